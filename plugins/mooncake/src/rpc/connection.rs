//! One connection to the master, shared by threads that call at the same time.
//!
//! There is no thread that reads: of those that wait for an answer, one reads for all of them, and hands over when it has its own. So a
//! call costs no switch between threads when it is alone, and a slow answer holds nobody else up.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use rustix::event::PollFlags;

use super::{Address, RpcError};
use crate::limit::{Limit, Stop};
use crate::net;
use crate::wire::frame::{REPLY_HEADER, REQUEST_HEADER, Reply, Request};

/// An answer as it came.
#[derive(Debug)]
pub struct Answer {
    /// Error of the frame.
    pub error: u8,
    /// Message.
    pub body: Vec<u8>,
}

/// Memory that is set aside at first for an answer that is long. There is more of it as its bytes come, at most twice as much as have come.
const STEP: usize = 64 << 10;
/// What is read at once where the length of the answer is not known yet: most answers are no longer.
const FIRST: usize = 4 << 10;

#[derive(Debug)]
enum Waiting {
    /// Its answer has not come.
    Yet,
    /// Its answer has come.
    Done(Answer),
    /// Its caller has gone; the answer is dropped when it comes.
    Gone,
}

#[derive(Debug, Default)]
struct State {
    next: u32,
    calls: HashMap<u32, Waiting>,
    /// A caller is reading.
    reading: bool,
    /// Why the connection can't be used any more.
    dead: Option<String>,
}

/// Bytes that have come of the next answer, its header among them, and perhaps of those after it. They stay when the reader's time is over.
#[derive(Debug, Default)]
struct Incoming {
    header: Option<Reply>,
    bytes: Vec<u8>,
    /// Bytes of `bytes` that have come.
    have: usize,
}

/// A connection.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    /// Of the master, for messages.
    address: Arc<Address>,
    state: Mutex<State>,
    changed: Condvar,
    writing: Mutex<()>,
    incoming: Mutex<Incoming>,
}

impl Connection {
    /// Takes a connected, non-blocking socket.
    pub fn new(stream: TcpStream, address: Arc<Address>) -> Connection {
        Connection {
            stream,
            address,
            state: Mutex::default(),
            changed: Condvar::new(),
            writing: Mutex::default(),
            incoming: Mutex::default(),
        }
    }

    /// Whether it can be used, as far as is known without asking.
    pub fn is_alive(&self) -> bool {
        if self.state.lock().dead.is_some() {
            return false;
        }
        if net::is_closed(&self.stream) {
            self.die("it closed the connection");
            return false;
        }
        true
    }

    pub(super) fn die(&self, why: &str) {
        self.state.lock().dead.get_or_insert_with(|| why.to_owned());
        // Whoever reads has to notice too.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.changed.notify_all();
    }

    /// Sends a request and waits for its answer.
    ///
    /// # Errors
    /// When the connection ends or the time is over.
    pub fn call(&self, function: u32, body: &[u8], limit: &Limit<'_>) -> Result<Answer, RpcError> {
        let sequence = {
            let mut state = self.state.lock();
            if let Some(why) = &state.dead {
                return Err(RpcError::Unreachable(format!("master {}: {why}", self.address)));
            }
            let sequence = state.next;
            state.next = state.next.wrapping_add(1);
            state.calls.insert(sequence, Waiting::Yet);
            sequence
        };
        let result = self.send(sequence, function, body, limit).and_then(|()| self.wait(sequence, limit));
        let mut state = self.state.lock();
        match result {
            // A late answer still comes, unless the connection is gone.
            Err(RpcError::Stopped { .. }) if state.dead.is_none() => {
                if let Some(call) = state.calls.get_mut(&sequence) {
                    *call = Waiting::Gone;
                }
            }
            _ => drop(state.calls.remove(&sequence)),
        }
        result
    }

    fn send(&self, sequence: u32, function: u32, body: &[u8], limit: &Limit<'_>) -> Result<(), RpcError> {
        let Ok(length) = u32::try_from(body.len()) else {
            return Err(RpcError::Failed(format!("a request of {} bytes is too long", body.len())));
        };
        let header = Request { sequence, function, body: length, attachment: 0 }.to_bytes();
        let mut frame = Vec::with_capacity(REQUEST_HEADER + body.len());
        frame.extend_from_slice(&header);
        frame.extend_from_slice(body);
        let Some(_turn) = self.writing.try_lock_until(limit.until()) else {
            return Err(RpcError::stopped(Stop::TimedOut));
        };
        let mut rest = frame.as_slice();
        while !rest.is_empty() {
            match (&self.stream).write(rest) {
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                Err(error) if net::is_not_now(&error) => {
                    if let Err(stop) = net::wait_for(self.stream.as_fd(), PollFlags::OUT, limit) {
                        if rest.len() < frame.len() {
                            // Half a request can't be taken back.
                            self.die("a request could not be sent in time");
                        }
                        return Err(RpcError::stopped(stop));
                    }
                }
                Err(error) => {
                    let why = format!("the connection broke: {error}");
                    self.die(&why);
                    return Err(RpcError::Lost(why));
                }
            }
        }
        Ok(())
    }

    fn wait(&self, sequence: u32, limit: &Limit<'_>) -> Result<Answer, RpcError> {
        let mut state = self.state.lock();
        loop {
            if matches!(state.calls.get(&sequence), Some(Waiting::Done(_)))
                && let Some(Waiting::Done(answer)) = state.calls.remove(&sequence)
            {
                return Ok(answer);
            }
            if let Some(why) = &state.dead {
                return Err(RpcError::Lost(why.clone()));
            }
            let time = limit.slice().map_err(RpcError::stopped)?;
            if state.reading {
                self.changed.wait_for(&mut state, time);
                continue;
            }
            state.reading = true;
            drop(state);
            let read = self.read(limit);
            state = self.state.lock();
            state.reading = false;
            match read {
                Ok((header, body)) => deliver(&mut state, &header, body),
                Err(Reading::Stopped) => {}
                Err(Reading::Ended(why)) => {
                    drop(state);
                    self.die(&why);
                    state = self.state.lock();
                }
            }
            // Somebody else may have to read now.
            self.changed.notify_all();
        }
    }

    fn read(&self, limit: &Limit<'_>) -> Result<(Reply, Vec<u8>), Reading> {
        let incoming = &mut *self.incoming.lock();
        // Whoever reads has just asked: there is something to wait for.
        let mut waits = true;
        loop {
            if let Some(answer) = incoming.next().map_err(Reading::Ended)? {
                return Ok(answer);
            }
            if std::mem::take(&mut waits) {
                net::wait_for(self.stream.as_fd(), PollFlags::IN, limit).map_err(|_| Reading::Stopped)?;
            }
            match (&self.stream).read(incoming.room()) {
                Ok(0) => return Err(Reading::Ended("it closed the connection".to_owned())),
                Ok(read) => incoming.have += read,
                Err(error) if net::is_not_now(&error) => waits = true,
                Err(error) => return Err(Reading::Ended(format!("the connection broke: {error}"))),
            }
        }
    }
}

impl Incoming {
    /// Bytes of the next answer with its header; those of a header as long as that is not known.
    fn need(&self) -> usize {
        let rest = self.header.map_or(0, |header| header.body as usize + header.attachment as usize);
        REPLY_HEADER + rest
    }

    /// Takes the next answer, if all of it has come.
    fn next(&mut self) -> Result<Option<(Reply, Vec<u8>)>, String> {
        if self.header.is_none() && self.have >= REPLY_HEADER {
            let header = self.bytes.first_chunk().map(Reply::from_bytes).ok_or("a header was cut")?;
            self.header = Some(header.map_err(|error| format!("what answers is no master: {error}"))?);
        }
        let need = self.need();
        let Some(header) = self.header.take_if(|_| self.have >= need) else { return Ok(None) };
        let body = self.bytes.get(REPLY_HEADER..REPLY_HEADER + header.body as usize).unwrap_or_default().to_vec();
        // What has come of the next one stays. Memory for a long answer does not.
        self.bytes.copy_within(need..self.have, 0);
        self.have -= need;
        if self.bytes.len() > STEP {
            self.bytes.truncate(self.have);
            self.bytes.shrink_to_fit();
        }
        Ok(Some((header, body)))
    }

    /// Where more bytes are to be read to.
    fn room(&mut self) -> &mut [u8] {
        if self.bytes.len() == self.have {
            // What is claimed costs nothing before it has come.
            self.bytes.resize(self.need().max(FIRST).min(self.have + self.have.max(STEP)), 0);
        }
        self.bytes.get_mut(self.have..).unwrap_or_default()
    }
}

enum Reading {
    /// The reader's time is over; the connection goes on.
    Stopped,
    /// The connection can't be used any more.
    Ended(String),
}

fn deliver(state: &mut State, header: &Reply, body: Vec<u8>) {
    match state.calls.get_mut(&header.sequence) {
        Some(call @ Waiting::Yet) => *call = Waiting::Done(Answer { error: header.error, body }),
        Some(Waiting::Gone) => drop(state.calls.remove(&header.sequence)),
        // Nobody asked: the answer to a call that has ended.
        Some(Waiting::Done(_)) | None => {}
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use super::*;
    use crate::wire::frame::MAX_REPLY;

    /// A connection, and the other end of it.
    fn pair() -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nonblocking(true).unwrap();
        let (master, _) = listener.accept().unwrap();
        (Connection::new(stream, Arc::new(Address::parse(&address.to_string()).unwrap())), master)
    }

    /// It set aside, and filled with zeros, half a gigabyte for each connection before a byte of it had come.
    #[test]
    fn a_master_that_claimed_much_was_given_memory_for_all_of_it() {
        let (connection, mut master) = pair();
        let header = Reply { error: 0, sequence: 7, body: MAX_REPLY, attachment: MAX_REPLY };
        master.write_all(&header.to_bytes()).unwrap();
        master.write_all(&[1; 100]).unwrap();
        while connection.incoming.lock().have < 100 {
            let late = connection.call(1, &[], &Limit::within(Duration::from_millis(100)));
            assert!(matches!(late, Err(RpcError::Stopped { .. })), "{late:?}");
        }
        let incoming = connection.incoming.lock();
        assert!(incoming.bytes.capacity() <= 2 * STEP, "{} bytes", incoming.bytes.capacity());
    }

    #[test]
    fn a_long_answer_comes_whole() {
        let (connection, mut master) = pair();
        let body: Vec<u8> = (0..500_000u32).map(|at| (at * 7 + at / 251) as u8).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut request = [0; REQUEST_HEADER];
                master.read_exact(&mut request).unwrap();
                let header = Reply { error: 0, sequence: 0, body: body.len() as u32, attachment: 3 };
                master.write_all(&[&header.to_bytes()[..], &body, b"end"].concat()).unwrap();
            });
            let answer = connection.call(1, &[], &Limit::within(Duration::from_secs(60))).unwrap();
            assert!(answer.body == body);
        });
    }

    #[test]
    fn answers_that_come_together_or_in_crumbs_are_told_apart() {
        let (connection, mut master) = pair();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut requests = [0; 3 * REQUEST_HEADER];
                master.read_exact(&mut requests).unwrap();
                let frame = |sequence: u32| {
                    let body = vec![sequence as u8; 5000 * sequence as usize + 1];
                    let header = Reply { error: 0, sequence, body: body.len() as u32, attachment: 2 };
                    [&header.to_bytes()[..], &body, b"at"].concat()
                };
                let all = [frame(2), frame(0), frame(1)].concat();
                // One and a half at once, the rest byte by byte.
                let (first, rest) = all.split_at(10_600);
                master.write_all(first).unwrap();
                rest.iter().for_each(|byte| master.write_all(&[*byte]).unwrap());
            });
            let calls: Vec<_> = (0..3)
                .map(|_| scope.spawn(|| connection.call(1, &[], &Limit::within(Duration::from_secs(60))).unwrap()))
                .collect();
            let mut lengths: Vec<usize> = calls
                .into_iter()
                .map(|call| {
                    let body = call.join().unwrap().body;
                    assert!(body.iter().all(|byte| usize::from(*byte) == body.len() / 5000), "mixed up");
                    body.len()
                })
                .collect();
            lengths.sort_unstable();
            assert_eq!(lengths, [1, 5001, 10_001]);
        });
        assert_eq!(connection.incoming.lock().have, 0);
    }
}
