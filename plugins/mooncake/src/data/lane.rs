//! One connection in use: the ranges that go over it, one after another without waiting.

use std::io;
use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use super::frame::{HEADER, Header, Operation, STATUS, STATUS_OK, STATUS_REJECTED};
use super::peer::Peer;
use crate::net::{self, MAX_PIECES};

/// Bytes that are worth a look: fewer are left with the system until there are more, or no more are to come. Each time that somebody is woken costs both sides as
/// much as some ten thousand bytes.
const WORTH: u64 = 64 << 10;
/// Bytes that one turn of a lane moves each way at most, so that lanes go forward together.
const TURN: usize = 4 << 20;

/// A queue of pieces of memory that the kernel reads or writes, front first.
#[derive(Debug, Default)]
struct Pieces {
    list: Vec<libc::iovec>,
    at: usize,
}

impl Pieces {
    fn push(&mut self, base: *mut libc::c_void, len: usize) {
        if len > 0 {
            self.list.push(libc::iovec { iov_base: base, iov_len: len });
        }
    }
    fn front(&self) -> &[libc::iovec] {
        let end = self.list.len().min(self.at + MAX_PIECES);
        self.list.get(self.at..end).unwrap_or_default()
    }
    fn is_empty(&self) -> bool {
        self.at >= self.list.len()
    }
    fn advance(&mut self, mut bytes: usize) {
        while let Some(piece) = self.list.get_mut(self.at) {
            if bytes < piece.iov_len {
                piece.iov_base = piece.iov_base.wrapping_byte_add(bytes);
                piece.iov_len -= bytes;
                return;
            }
            bytes -= piece.iov_len;
            self.at += 1;
        }
    }
}

fn bytes_of(pieces: &[libc::iovec]) -> usize {
    pieces.iter().map(|piece| piece.iov_len).sum()
}

/// One range on a lane.
#[derive(Debug)]
struct Slot {
    /// Number of the job.
    job: usize,
    /// Where its bytes to be sent end, counted over the lane.
    sent_end: u64,
    /// Where its answer begins and ends, counted over the lane.
    answer: Range<u64>,
}

/// How a range on a lane ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It was moved.
    Moved,
    /// The peer does not have it.
    Rejected,
    /// The connection ended or spoke another protocol. The peer's end is closed, so it does nothing more.
    Broken,
    /// It was given up here, before anything of it was sent.
    Unsent,
    /// It was given up here after some of it was sent: the peer may still be at it.
    InDoubt,
}

/// A connection in use.
#[derive(Debug)]
pub struct Lane {
    pub peer: Arc<Peer>,
    stream: TcpStream,
    out: Pieces,
    answers: Pieces,
    slots: Vec<Slot>,
    /// The first slot that has not ended.
    done: usize,
    sent: u64,
    received: u64,
    with_status: bool,
    // What the pieces point at besides payload; neither moves while the lane lives.
    headers: Box<[[u8; HEADER]]>,
    statuses: Box<[AtomicU64]>,
    /// Bytes that have to be there before the system says so.
    low_water: u64,
    /// There is something to do on it, or to look for.
    pub is_due: bool,
    /// When bytes moved last.
    pub progress: Instant,
    /// Why it can't go on.
    pub broken: Option<String>,
    /// The peer refused a range, and closed the connection as it does then.
    pub refused: bool,
}

/// A range for a lane: number of the job, address at the peer, bytes, payload.
pub struct Load<'a> {
    pub job: usize,
    pub address: u64,
    pub len: u64,
    pub pieces: &'a [libc::iovec],
}

impl Lane {
    /// Puts ranges on a connection. The payload's memory has to live, and be this lane's to read or write, until the lane is gone.
    pub fn new(peer: Arc<Peer>, stream: TcpStream, operation: Operation, version: u32, loads: &[Load<'_>]) -> Lane {
        let with_status = version >= 2;
        // A peer of version 1 does not say when a write is done. It serves a connection in order: the answer to a read says it.
        let with_probe = !with_status && operation == Operation::Write;
        let headers: Box<[[u8; HEADER]]> = loads
            .iter()
            .flat_map(|load| {
                let header = Header { size: load.len, address: load.address, operation, with_status };
                let last = load.address.wrapping_add(load.len.saturating_sub(1));
                let probe = Header { size: 1, address: last, operation: Operation::Read, with_status };
                [header.to_bytes(), probe.to_bytes()]
            })
            .collect();
        let statuses: Box<[AtomicU64]> = loads.iter().map(|_| AtomicU64::new(0)).collect();
        let (mut out, mut answers) = (Pieces::default(), Pieces::default());
        let (mut sent_end, mut answer_end) = (0, 0);
        let mut slots = Vec::with_capacity(loads.len());
        for ((load, headers), status) in loads.iter().zip(headers.chunks_exact(2)).zip(&statuses) {
            let [header, probe] = headers else { continue };
            out.push(header.as_ptr().cast_mut().cast(), HEADER);
            sent_end += HEADER as u64;
            let begin = answer_end;
            if with_status {
                answers.push(status.as_ptr().cast(), STATUS);
                answer_end += STATUS as u64;
            }
            let payload = if operation == Operation::Write { &mut out } else { &mut answers };
            load.pieces.iter().for_each(|piece| payload.push(piece.iov_base, piece.iov_len));
            match operation {
                Operation::Write => sent_end += load.len,
                Operation::Read => answer_end += load.len,
            }
            if with_probe {
                out.push(probe.as_ptr().cast_mut().cast(), HEADER);
                sent_end += HEADER as u64;
                answers.push(status.as_ptr().cast(), 1);
                answer_end += 1;
            }
            slots.push(Slot { job: load.job, sent_end, answer: begin..answer_end });
        }
        let mut lane = Lane {
            peer,
            stream,
            out,
            answers,
            slots,
            done: 0,
            sent: 0,
            received: 0,
            with_status,
            headers,
            statuses,
            // Of the call before nobody knows.
            low_water: 0,
            is_due: true,
            progress: Instant::now(),
            broken: None,
            refused: false,
        };
        lane.set_low_water();
        lane
    }

    /// The system is to wait for as much as is worth it, and never for more than comes.
    fn set_low_water(&mut self) {
        let end = self.slots.last().map_or(0, |slot| slot.answer.end);
        let wanted = end.saturating_sub(self.received).clamp(1, WORTH);
        if wanted != self.low_water {
            self.low_water = wanted;
            net::set_low_water(&self.stream, wanted);
        }
    }

    /// Whether nothing is left to do on it.
    pub fn is_over(&self) -> bool {
        self.broken.is_some() || self.done == self.slots.len()
    }

    /// What to wait for.
    pub fn poll_fd(&self) -> PollFd<'_> {
        let flags = if self.out.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
        PollFd::from_borrowed_fd(self.stream.as_fd(), flags)
    }

    /// Moves what can be moved now, where something is due, and tells of each range that has ended.
    pub fn step(&mut self, mut ended: impl FnMut(usize, Ended)) {
        if !std::mem::take(&mut self.is_due) || self.is_over() {
            return;
        }
        let (sent, received) = (self.sent, self.received);
        self.send();
        // What was sent just now is not answered yet.
        if self.broken.is_none() && self.sent == sent {
            self.receive();
        }
        self.settle(&mut ended);
        if sent != self.sent || received != self.received {
            self.progress = Instant::now();
        }
    }

    fn send(&mut self) {
        let stop = self.sent + TURN as u64;
        while !self.out.is_empty() && self.sent < stop {
            let front = self.out.front();
            // SAFETY: the pieces are headers of this lane and payload that may be read while the lane lives.
            match unsafe { net::send_pieces(&self.stream, front) } {
                Ok(sent) => {
                    let took_all = sent == bytes_of(front);
                    self.sent += sent as u64;
                    self.out.advance(sent);
                    if !took_all {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // The other side may have said why before it closed.
                Err(error) => {
                    self.receive();
                    self.fail(format!("sending failed: {error}"));
                    return;
                }
            }
        }
    }

    fn receive(&mut self) {
        let stop = self.received + TURN as u64;
        while !self.answers.is_empty() && self.received < stop {
            let front = self.answers.front();
            // SAFETY: the pieces are statuses of this lane, which are atomics, and payload that is this lane's to write while it lives.
            match unsafe { net::receive_pieces(&self.stream, front) } {
                Ok(0) => return self.fail("the peer closed the connection".to_owned()),
                Ok(received) => {
                    let was_all = received < bytes_of(front);
                    self.received += received as u64;
                    self.answers.advance(received);
                    if self.has_bad_status() {
                        // What follows it means nothing.
                        return;
                    }
                    if was_all {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return self.fail(format!("receiving failed: {error}")),
            }
        }
        self.set_low_water();
    }

    fn fail(&mut self, why: String) {
        self.broken.get_or_insert(why);
    }

    fn status(&self, slot: usize) -> u64 {
        self.statuses.get(slot).map_or(0, |status| u64::from_le(status.load(Ordering::Relaxed)))
    }

    fn has_bad_status(&self) -> bool {
        let come = |slot: &Slot| self.with_status && self.received >= slot.answer.start + STATUS as u64;
        let open = self.slots.iter().enumerate().skip(self.done);
        open.take_while(|(_, slot)| come(slot)).any(|(at, _)| self.status(at) != STATUS_OK)
    }

    fn settle(&mut self, ended: &mut impl FnMut(usize, Ended)) {
        while let Some(slot) = self.slots.get(self.done) {
            if self.with_status && self.received >= slot.answer.start + STATUS as u64 {
                let status = self.status(self.done);
                if status != STATUS_OK {
                    self.refused = status == STATUS_REJECTED;
                    ended(slot.job, if self.refused { Ended::Rejected } else { Ended::Broken });
                    self.done += 1;
                    // It is the cause also where the close behind it was noticed first.
                    self.broken = Some(format!("status {status:#x}"));
                    break;
                }
            }
            if self.received < slot.answer.end {
                break;
            }
            ended(slot.job, Ended::Moved);
            self.done += 1;
        }
    }

    /// Ends the lane. Tells of each range that has not ended, and gives the connection back when nothing is under way on it.
    pub fn close(self, mut ended: impl FnMut(usize, Ended)) {
        let broken = self.broken.is_some();
        for (at, slot) in self.slots.iter().enumerate().skip(self.done) {
            let begin = at.checked_sub(1).and_then(|before| self.slots.get(before)).map_or(0, |before| before.sent_end);
            let how = match (broken, self.sent > begin) {
                (_, false) => Ended::Unsent,
                (true, true) => Ended::Broken,
                (false, true) => Ended::InDoubt,
            };
            ended(slot.job, how);
        }
        if !broken && self.done == self.slots.len() {
            self.peer.give_back(self.stream);
        }
        // Otherwise dropping the stream closes it. The pieces point into `headers` and `statuses`, which go last.
        drop((self.headers, self.statuses));
    }
}
