//! What goes between processes: a request with its bytes, an answer with its bytes, over a Unix socket a queue pair.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvdock_rdma::verbs;
use libc::{c_int, c_uint};

use crate::objects::{REGIONS, Region};
use crate::pair::{self, Pair, Work};
use crate::{devices, faults};

/// How long a peer may be silent until it counts as gone: what retries take on a card.
const SILENCE: Duration = Duration::from_secs(1);
/// How often a wait looks whether its queue pair has ended.
const LOOK: Duration = Duration::from_millis(20);
const HEADER: usize = 25;
const DONE: u8 = 0;
const DENIED: u8 = 1;

fn socket(process: u32) -> String {
    format!("{process}.sock")
}

/// Takes a number for a queue pair that no process of the folder has.
pub fn take_number() -> Option<u32> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let folder = crate::folder()?;
    let process = std::process::id();
    for _ in 0..10_000 {
        let number = 0x100 + (process.wrapping_mul(61) + NEXT.fetch_add(1, Ordering::Relaxed)) % 0xff_fe00;
        if std::os::unix::fs::symlink(socket(process), folder.join(format!("qp-{number}"))).is_ok() {
            return Some(number);
        }
    }
    None
}

pub fn give_number(number: u32) {
    if let Some(folder) = crate::folder() {
        let _ = std::fs::remove_file(folder.join(format!("qp-{number}")));
    }
}

/// Serves the other processes, from the first open device on.
pub fn serve() -> io::Result<()> {
    static SERVING: OnceLock<bool> = OnceLock::new();
    let ok = SERVING.get_or_init(|| {
        let Some(folder) = crate::folder() else { return false };
        let path = folder.join(socket(std::process::id()));
        // Of an earlier process of this number.
        let _ = std::fs::remove_file(&path);
        let Ok(listener) = UnixListener::bind(path) else { return false };
        let listen = move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || answer_all(stream));
            }
        };
        let watch = || {
            loop {
                if let Some(event) = faults::once("event ") {
                    devices::tell(event);
                }
                std::thread::sleep(LOOK);
            }
        };
        std::thread::spawn(watch);
        std::thread::spawn(listen);
        true
    });
    if *ok { Ok(()) } else { Err(io::Error::other("the folder of the stand-in can't be used")) }
}

/// Where a range of a region lies, if its owner may be asked for this.
fn locate(
    region: Option<&Region>,
    domain: usize,
    at: u64,
    by_start: bool,
    len: usize,
    access: c_uint,
) -> Option<*mut u8> {
    let region = region.filter(|region| region.domain == domain && region.access & access == access)?;
    let first = if by_start { region.start as u64 } else { region.address };
    let offset = usize::try_from(at.checked_sub(first)?).ok()?;
    (offset.checked_add(len)? <= region.len).then_some((region.start + offset) as *mut u8)
}

/// A queue pair here that serves a peer's. One that is not ready yet gets the time that retries take on a card.
fn serving(to: u32, from: u32) -> Option<Arc<Pair>> {
    let began = Instant::now();
    loop {
        if let Some(pair) = pair::find(to).filter(|pair| pair.serves(from)) {
            return Some(pair);
        }
        if began.elapsed() > SILENCE / 2 {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Does what one peer's queue pair asks, one request after another. Without an answer, the peer takes this side for gone.
fn answer_all(mut stream: UnixStream) {
    let mut header = [0; HEADER];
    let mut bytes = Vec::new();
    while stream.read_exact(&mut header).is_ok() {
        let number = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap_or_default());
        let (to, from, key, len) = (number(1), number(5), number(9), number(13) as usize);
        let address = u64::from_le_bytes(header[17..].try_into().unwrap_or_default());
        let is_read = header[0] == 1;
        bytes.resize(len, 0);
        if !is_read && stream.read_exact(&mut bytes).is_err() {
            return;
        }
        let Some(pair) = serving(to, from) else { return };
        let access = if is_read { verbs::ACCESS_REMOTE_READ } else { verbs::ACCESS_REMOTE_WRITE };
        {
            let regions = REGIONS.read();
            let region = regions.as_ref().and_then(|regions| regions.get(&key));
            match locate(region, pair.domain, address, false, len, access) {
                // SAFETY: registered memory is mapped, and no region goes while this is locked.
                Some(place) if is_read => unsafe { std::ptr::copy(place, bytes.as_mut_ptr(), len) },
                // SAFETY: as above.
                Some(place) => unsafe { std::ptr::copy(bytes.as_ptr(), place, len) },
                None => {
                    drop(regions);
                    let _ = stream.write_all(&[DENIED]);
                    pair.fail();
                    return;
                }
            }
        }
        let body: &[u8] = if is_read { &bytes } else { &[] };
        if stream.write_all(&[DONE]).and_then(|()| stream.write_all(body)).is_err() {
            return;
        }
    }
}

/// Moves the bytes of a request; gives its status.
pub fn execute(pair: &Pair, work: &Work, peer: u32, line: &mut Option<UnixStream>) -> c_int {
    let is_read = work.opcode == verbs::WR_READ;
    let access = if is_read { verbs::ACCESS_LOCAL_WRITE } else { 0 };
    let len: usize = work.pieces.iter().map(|piece| piece.length as usize).sum();
    let mut bytes = vec![0; len];
    if let Some(inline) = &work.inline {
        bytes.clone_from(inline);
    } else if !with_pieces(pair, work, access, |place, range| {
        if !is_read {
            // SAFETY: registered memory is mapped, and no region goes while this runs.
            unsafe { std::ptr::copy(place, bytes[range.start..].as_mut_ptr(), range.len()) };
        }
    }) {
        return verbs::WC_LOCAL_PROTECTION;
    }
    if line.is_none() {
        let connected = crate::folder().and_then(|folder| UnixStream::connect(folder.join(format!("qp-{peer}"))).ok());
        let set = connected.filter(|stream| {
            stream.set_read_timeout(Some(LOOK)).and_then(|()| stream.set_write_timeout(Some(LOOK))).is_ok()
        });
        *line = set;
    }
    let Some(stream) = line else {
        std::thread::sleep(LOOK);
        return verbs::WC_RETRIES_EXCEEDED;
    };
    let mut message = vec![u8::from(is_read)];
    for number in [peer, pair.number, work.key, len as u32] {
        message.extend_from_slice(&number.to_le_bytes());
    }
    message.extend_from_slice(&work.address.to_le_bytes());
    if !is_read {
        message.extend_from_slice(&bytes);
    }
    let mut status = [0];
    let answered = patiently(pair, &mut message, |part| stream.write(part))
        .and_then(|()| patiently(pair, &mut status, |part| stream.read(part)));
    let status = match (answered, status) {
        (Ok(()), [DONE]) if is_read => match patiently(pair, &mut bytes, |part| stream.read(part)) {
            Ok(()) => verbs::WC_SUCCESS,
            Err(status) => status,
        },
        (Ok(()), [DONE]) => verbs::WC_SUCCESS,
        (Ok(()), _) => verbs::WC_REMOTE_ACCESS,
        (Err(status), _) => status,
    };
    if status != verbs::WC_SUCCESS {
        *line = None;
        return status;
    }
    let landed = !is_read
        || with_pieces(pair, work, access, |place, range| {
            // SAFETY: as above.
            unsafe { std::ptr::copy(bytes[range.start..].as_ptr(), place, range.len()) };
        });
    if landed { status } else { verbs::WC_LOCAL_PROTECTION }
}

/// Calls with each piece of memory of a request, all of which have to be registered.
fn with_pieces(
    pair: &Pair,
    work: &Work,
    access: c_uint,
    mut each: impl FnMut(*mut u8, std::ops::Range<usize>),
) -> bool {
    let regions = REGIONS.read();
    let mut at = 0;
    for piece in &work.pieces {
        let len = piece.length as usize;
        let region = regions.as_ref().and_then(|regions| regions.get(&piece.lkey));
        let Some(place) = locate(region, pair.domain, piece.addr, true, len, access) else { return false };
        each(place, at..at + len);
        at += len;
    }
    true
}

/// Moves all of some bytes, as long as the queue pair works and the peer is not silent.
fn patiently(pair: &Pair, bytes: &mut [u8], mut part: impl FnMut(&mut [u8]) -> io::Result<usize>) -> Result<(), c_int> {
    let mut at = 0;
    let mut since = Instant::now();
    while at < bytes.len() {
        match part(&mut bytes[at..]) {
            Ok(0) => return Err(verbs::WC_RETRIES_EXCEEDED),
            Ok(moved) => {
                at += moved;
                since = Instant::now();
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if since.elapsed() > SILENCE {
                    return Err(verbs::WC_RETRIES_EXCEEDED);
                }
            }
            Err(_) => return Err(verbs::WC_RETRIES_EXCEEDED),
        }
        if pair.is_over() {
            return Err(verbs::WC_FLUSHED);
        }
    }
    Ok(())
}
