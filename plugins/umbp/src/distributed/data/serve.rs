//! Serves objects to other nodes. A connection is a task: one that stalls holds up nobody, and is closed when it does so for too long.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::frame::{self, GREETING, Operation, RANGE, REQUEST, Request, Status};
use crate::distributed::metrics::Figures;
use crate::distributed::pool::{Pinned, Pool};
use crate::object::Piece;

/// Most connections at a time, where the process may have as many files open.
const MOST: usize = 8192;
/// What part of the files that the process may have open goes to connections at most.
const PART_OF_FILES: u64 = 2;
/// A peer in the middle of something that moves nothing for so long is gone.
const STALL: Duration = Duration::from_secs(30);
/// Bytes that are moved between two looks at the time.
const STEP: usize = 1 << 20;
/// Objects that are read from segments at a time; each takes its bytes of memory.
const READS: usize = 8;
/// After an `accept` that failed, as when no descriptor is left.
const PAUSE: Duration = Duration::from_millis(50);

/// What serves.
#[derive(Debug)]
pub struct Server {
    /// The objects.
    pub pool: Arc<Pool>,
    /// Counts.
    pub figures: Arc<Figures>,
    /// Which incarnation of the node this is.
    pub instance: u64,
    connections: AtomicUsize,
    /// Whose turn it is to read from segments.
    turns: Semaphore,
}

/// Where the bytes of an object come from.
enum Source<'a> {
    Memory(Pinned<'a>),
    /// It was read for this request alone.
    Segments(Vec<u8>),
}

impl Source<'_> {
    fn len(&self) -> u64 {
        match self {
            Source::Memory(pinned) => pinned.len,
            Source::Segments(bytes) => bytes.len() as u64,
        }
    }
}

/// Counts a connection while it lives.
struct Counted(Arc<Server>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Server {
    /// Serves nothing yet.
    pub fn new(pool: Arc<Pool>, figures: Arc<Figures>, instance: u64) -> Server {
        Server { pool, figures, instance, connections: AtomicUsize::new(0), turns: Semaphore::new(READS) }
    }

    /// Serves whoever connects, until it is dropped.
    pub async fn run(self: Arc<Server>, listener: TcpListener) {
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = usize::try_from(files / PART_OF_FILES).unwrap_or(MOST).min(MOST);
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            if self.connections.load(Ordering::Relaxed) >= most {
                continue;
            }
            self.connections.fetch_add(1, Ordering::Relaxed);
            let counted = Counted(self.clone());
            tokio::spawn(async move {
                // How it ends is for the peer to notice: each request has an answer, or the connection ends.
                let _ = counted.0.serve(stream).await;
                drop(counted);
            });
        }
    }

    async fn serve(&self, stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let (input, output) = stream.into_split();
        let (mut input, mut output) = (BufReader::with_capacity(64 << 10, input), BufWriter::new(output));
        let mut greeting = [0; GREETING];
        within(input.read_exact(&mut greeting)).await?;
        if greeting != frame::greeting(self.instance) {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        within(output.write_all(&frame::MAGIC)).await?;
        within(output.flush()).await?;
        loop {
            // Between two requests it may wait as long as it likes.
            if input.fill_buf().await?.is_empty() {
                return Ok(());
            }
            let mut header = [0; REQUEST];
            within(input.read_exact(&mut header)).await?;
            let request = Request::from_bytes(&header).ok_or(io::ErrorKind::InvalidData)?;
            match request.operation {
                Operation::Read => self.read(request, &mut input, &mut output).await?,
                Operation::Write => self.write(request, &mut input, &mut output).await?,
            }
            if input.buffer().is_empty() {
                within(output.flush()).await?;
            }
        }
    }

    async fn read(
        &self,
        request: Request,
        input: &mut BufReader<OwnedReadHalf>,
        output: &mut BufWriter<OwnedWriteHalf>,
    ) -> io::Result<()> {
        let mut rest = vec![0; request.name as usize + request.ranges as usize * RANGE];
        within(input.read_exact(&mut rest)).await?;
        let (name, ranges) = rest.split_at(request.name as usize);
        let name = std::str::from_utf8(name).map_err(|_| io::ErrorKind::InvalidData)?;
        let ranges = frame::ranges(ranges);
        let source = match self.pool.pin(name, None) {
            Ok(pinned) => Some(Source::Memory(pinned)),
            Err(_) if self.pool.has_below() => self.read_below(name).await,
            Err(_) => None,
        };
        let Some(source) = source else {
            return within(output.write_all(&Status::Missing.to_bytes(0))).await;
        };
        let whole = source.len();
        if whole != request.len {
            return within(output.write_all(&Status::OtherLength.to_bytes(whole))).await;
        }
        let inside = |(offset, len): &(u64, u64)| offset.checked_add(*len).is_some_and(|end| end <= whole);
        let total = ranges.iter().try_fold(0u64, |sum, (_, len)| sum.checked_add(*len));
        let Some(total) = total.filter(|_| ranges.iter().all(inside)) else {
            return within(output.write_all(&Status::Refused.to_bytes(0))).await;
        };
        within(output.write_all(&Status::Done.to_bytes(total))).await?;
        for (offset, len) in ranges {
            match &source {
                Source::Memory(pinned) => self.send(pinned, offset, len, output).await?,
                Source::Segments(bytes) => {
                    let range = bytes.get(offset as usize..).and_then(|rest| rest.get(..len as usize));
                    for bytes in range.unwrap_or_default().chunks(STEP) {
                        within(output.write_all(bytes)).await?;
                    }
                }
            }
        }
        self.figures.others_got.add(total);
        Ok(())
    }

    /// What memory has not, segments may have. They are read by threads that may wait for a disk.
    async fn read_below(&self, name: &str) -> Option<Source<'_>> {
        let _turn = self.turns.acquire().await.ok()?;
        let (pool, own) = (self.pool.clone(), name.to_owned());
        let read = tokio::task::spawn_blocking(move || {
            pool.bring(&[&own]);
            if pool.is_in_memory(&own) { None } else { pool.read_below(&own) }
        });
        let read = read.await.ok()?;
        match self.pool.pin(name, None) {
            Ok(pinned) => Some(Source::Memory(pinned)),
            Err(_) => read.map(Source::Segments),
        }
    }

    async fn send(
        &self,
        pinned: &Pinned<'_>,
        offset: u64,
        len: u64,
        output: &mut BufWriter<OwnedWriteHalf>,
    ) -> io::Result<()> {
        for piece in pinned.pieces(offset, len) {
            for bytes in shared(&piece, pinned).chunks(STEP) {
                within(output.write_all(bytes)).await?;
            }
        }
        Ok(())
    }

    async fn write(
        &self,
        request: Request,
        input: &mut BufReader<OwnedReadHalf>,
        output: &mut BufWriter<OwnedWriteHalf>,
    ) -> io::Result<()> {
        let Some(mut writing) = self.pool.write(request.slot, request.len) else {
            // What was sent has to be read all the same.
            let mut left = request.len;
            let mut sink = vec![0; left.min(STEP as u64) as usize];
            while left > 0 {
                let part = left.min(sink.len() as u64) as usize;
                within(input.read_exact(sink.get_mut(..part).unwrap_or_default())).await?;
                left -= part as u64;
            }
            return within(output.write_all(&Status::Refused.to_bytes(0))).await;
        };
        for piece in std::mem::take(&mut writing.pieces) {
            // SAFETY: the place is this task's alone while `writing` lives, and its memory is mapped as long as the pool.
            let bytes = unsafe { std::slice::from_raw_parts_mut(piece.base, piece.len) };
            for part in bytes.chunks_mut(STEP) {
                within(input.read_exact(part)).await?;
            }
        }
        writing.done();
        self.figures.others_put.add(request.len);
        within(output.write_all(&Status::Done.to_bytes(0))).await
    }
}

/// The bytes of a piece of an object that is pinned.
fn shared<'a>(piece: &Piece, _pinned: &'a Pinned<'_>) -> &'a [u8] {
    // SAFETY: the piece lies in the pool's memory and belongs to an object that stays, and is never written again, while it is pinned.
    unsafe { std::slice::from_raw_parts(piece.base, piece.len) }
}

async fn within<T>(step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(STALL, step).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}
