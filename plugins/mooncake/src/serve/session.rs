//! What one peer is doing on one connection.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use super::memory::Memory;
use super::server::Figures;
use crate::data::{Header, Operation, STATUS_OK, STATUS_REJECTED};
use crate::metadata::handshake::{self, MAX_MESSAGE};
use crate::net;

/// Bytes that one turn of a session moves, so that others get theirs.
const TURN: usize = 4 << 20;

/// Memory that is set aside at first for a message.
const STEP: usize = 4096;

/// What a session waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wants {
    /// Bytes from the peer.
    Input,
    /// Room for bytes to the peer.
    Output,
    /// Nothing: it is over.
    Close,
}

#[derive(Debug)]
enum Data {
    /// Reading a header, of which so many bytes have come.
    Header([u8; 24], usize),
    /// Taking bytes of a write.
    Body { to: *mut u8, left: usize, with_status: bool },
    /// Sending a status, from this byte on; `close` after it.
    Status { bytes: [u8; 8], at: usize, close: bool },
    /// Answering a read: what is left of the status, then of the bytes.
    Answer { status: [u8; 8], at: usize, from: *mut u8, left: usize },
}

/// A connection of the data plane.
#[derive(Debug)]
pub struct DataSession {
    state: Data,
    memory: Arc<Memory>,
    /// When bytes moved last; when it began, if none have.
    pub moved: Instant,
    /// Whether a request has come.
    pub used: bool,
}

// SAFETY: the pointers lie in `memory`, which the session holds; they are only named to the kernel.
unsafe impl Send for DataSession {}

impl DataSession {
    pub fn new(memory: Arc<Memory>) -> DataSession {
        DataSession { state: Data::Header([0; 24], 0), memory, moved: Instant::now(), used: false }
    }

    /// Whether it stands between two requests.
    pub fn is_idle(&self) -> bool {
        matches!(self.state, Data::Header(_, 0))
    }

    /// Moves what can be moved now.
    pub fn step(&mut self, stream: &TcpStream, figures: &Figures) -> io::Result<Wants> {
        let mut moved = 0;
        let wants = self.work(stream, figures, &mut moved);
        if moved > 0 {
            self.moved = Instant::now();
        }
        wants
    }

    /// As [`DataSession::step`]; adds up the bytes of the peer's and of its memory.
    fn work(&mut self, stream: &TcpStream, figures: &Figures, moved: &mut usize) -> io::Result<Wants> {
        while *moved < TURN {
            match &mut self.state {
                Data::Header(bytes, have) => {
                    let room = bytes.get_mut(*have..).unwrap_or_default();
                    match (&mut &*stream).read(room) {
                        Ok(0) => return Ok(Wants::Close),
                        Ok(read) => {
                            *have += read;
                            *moved += read;
                        }
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Wants::Input),
                        Err(error) => return Err(error),
                    }
                    if *have == bytes.len() {
                        let header = Header::from_bytes(bytes);
                        self.begin(&header, figures);
                    }
                }
                Data::Body { to, left, with_status } => {
                    let piece = [libc::iovec { iov_base: to.cast(), iov_len: *left }];
                    // SAFETY: the range was checked to lie in the segment's memory, which this session holds and nobody refers to.
                    match unsafe { net::receive_pieces(stream, &piece) } {
                        Ok(0) => return Ok(Wants::Close),
                        Ok(read) => {
                            *moved += read;
                            *to = to.wrapping_add(read);
                            *left -= read;
                            figures.received(read);
                        }
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Wants::Input),
                        Err(error) => return Err(error),
                    }
                    if *left == 0 {
                        self.state = if *with_status {
                            Data::Status { bytes: STATUS_OK.to_le_bytes(), at: 0, close: false }
                        } else {
                            Data::Header([0; 24], 0)
                        };
                    }
                }
                Data::Status { bytes, at, close } => {
                    let piece = status_piece(bytes, *at);
                    // SAFETY: the status is part of this session.
                    match unsafe { net::send_pieces(stream, &[piece]) } {
                        Ok(sent) => {
                            *at += sent;
                            *moved += sent;
                        }
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Wants::Output),
                        Err(error) => return Err(error),
                    }
                    if *at == bytes.len() {
                        if *close {
                            return Ok(Wants::Close);
                        }
                        self.state = Data::Header([0; 24], 0);
                    }
                }
                Data::Answer { status, at, from, left } => {
                    let pieces = [status_piece(status, *at), libc::iovec { iov_base: from.cast(), iov_len: *left }];
                    // SAFETY: the status is part of this session, the range was checked to lie in the segment's memory.
                    let sent = match unsafe { net::send_pieces(stream, &pieces) } {
                        Ok(sent) => sent,
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Wants::Output),
                        Err(error) => return Err(error),
                    };
                    let of_status = sent.min(status.len() - *at);
                    *at += of_status;
                    *from = from.wrapping_add(sent - of_status);
                    *left -= sent - of_status;
                    *moved += sent;
                    figures.sent(sent - of_status);
                    if *left == 0 && *at == status.len() {
                        self.state = Data::Header([0; 24], 0);
                    }
                }
            }
        }
        // There is more, but it is somebody else's turn.
        Ok(if matches!(self.state, Data::Answer { .. } | Data::Status { .. }) { Wants::Output } else { Wants::Input })
    }

    fn begin(&mut self, header: &Header, figures: &Figures) {
        self.used = true;
        let range = usize::try_from(header.size).ok().zip(self.memory.find(header.address, header.size));
        self.state = match (range, header.operation, header.with_status) {
            (None, _, true) => {
                figures.refused();
                Data::Status { bytes: STATUS_REJECTED.to_le_bytes(), at: 0, close: true }
            }
            (None, _, false) => {
                figures.refused();
                // Version 1 has no word for it.
                Data::Status { bytes: [0; 8], at: 8, close: true }
            }
            (Some((left, to)), Operation::Write, with_status) => Data::Body { to, left, with_status },
            (Some((left, from)), Operation::Read, true) => {
                Data::Answer { status: STATUS_OK.to_le_bytes(), at: 0, from, left }
            }
            (Some((left, from)), Operation::Read, false) => Data::Answer { status: [0; 8], at: 8, from, left },
        };
    }
}

fn status_piece(status: &[u8; 8], at: usize) -> libc::iovec {
    let rest = status.get(at..).unwrap_or_default();
    libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() }
}

/// A connection of the handshake port: one message each way.
#[derive(Debug)]
pub struct HandshakeSession {
    len: [u8; 8],
    /// Bytes of the message, as they say.
    claimed: usize,
    body: Vec<u8>,
    have: usize,
    answer: Option<(Vec<u8>, usize)>,
    pub since: Instant,
}

impl HandshakeSession {
    pub fn new() -> HandshakeSession {
        HandshakeSession { len: [0; 8], claimed: 0, body: Vec::new(), have: 0, answer: None, since: Instant::now() }
    }

    /// Moves what can be moved now; `answer` makes the answer to a message.
    pub fn step(
        &mut self,
        mut stream: &TcpStream,
        answer: impl Fn(handshake::Kind, &str) -> Vec<u8>,
    ) -> io::Result<Wants> {
        loop {
            if let Some((bytes, at)) = &mut self.answer {
                let rest = bytes.get(*at..).unwrap_or_default();
                if rest.is_empty() {
                    // The peer reads to the end of the stream, and closes.
                    let mut drain = [0; 4096];
                    match stream.read(&mut drain) {
                        Ok(0) => return Ok(Wants::Close),
                        // Others have their turn: a peer that goes on sending must not keep this thread.
                        Ok(_) => return Ok(Wants::Input),
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Wants::Input),
                        Err(error) => return Err(error),
                    }
                }
                match stream.write(rest) {
                    Ok(sent) => {
                        *at += sent;
                        if *at == bytes.len() {
                            stream.shutdown(std::net::Shutdown::Write)?;
                        }
                    }
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Wants::Output),
                    Err(error) => return Err(error),
                }
                continue;
            }
            let room = match self.have.checked_sub(8) {
                None => self.len.get_mut(self.have..),
                Some(have) => {
                    if self.body.len() == have {
                        // What is claimed costs nothing before it has come.
                        self.body.resize(self.claimed.min(have + have.max(STEP)), 0);
                    }
                    self.body.get_mut(have..)
                }
            };
            match stream.read(room.unwrap_or_default()) {
                Ok(0) => return Ok(Wants::Close),
                Ok(read) => self.have += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Wants::Input),
                Err(error) => return Err(error),
            }
            if self.have == 8 && self.claimed == 0 {
                let len = u64::from_le_bytes(self.len);
                if len == 0 || len > MAX_MESSAGE {
                    return Ok(Wants::Close);
                }
                self.claimed = len as usize;
            }
            if self.have >= 8 && self.have - 8 == self.claimed {
                let Ok((kind, json)) = handshake::parse(&self.body) else { return Ok(Wants::Close) };
                self.answer = Some((answer(kind, json), 0));
            }
        }
    }
}
