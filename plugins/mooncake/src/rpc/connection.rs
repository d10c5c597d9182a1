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

/// Memory that is set aside at first for an answer. There is more of it as its bytes come, at most twice as much as have come.
const STEP: usize = 64 << 10;

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

/// Bytes that have come of the next answer. They stay when the reader's time is over.
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
        loop {
            let need = incoming.header.map_or(REPLY_HEADER, |header| header.body as usize + header.attachment as usize);
            while incoming.have < need {
                if incoming.bytes.len() == incoming.have {
                    // What is claimed costs nothing before it has come.
                    incoming.bytes.resize(need.min(incoming.have + incoming.have.max(STEP)), 0);
                }
                let room = incoming.bytes.get_mut(incoming.have..).unwrap_or_default();
                match (&self.stream).read(room) {
                    Ok(0) => return Err(Reading::Ended("it closed the connection".to_owned())),
                    Ok(read) => incoming.have += read,
                    Err(error) if net::is_not_now(&error) => {
                        net::wait_for(self.stream.as_fd(), PollFlags::IN, limit).map_err(|_| Reading::Stopped)?;
                    }
                    Err(error) => return Err(Reading::Ended(format!("the connection broke: {error}"))),
                }
            }
            let bytes = std::mem::take(&mut incoming.bytes);
            incoming.have = 0;
            match incoming.header.take() {
                Some(header) => {
                    let mut body = bytes;
                    body.truncate(header.body as usize);
                    return Ok((header, body));
                }
                None => {
                    let header = bytes.first_chunk().map(Reply::from_bytes);
                    let header = header.ok_or_else(|| Reading::Ended("a header was cut".to_owned()))?;
                    let header =
                        header.map_err(|error| Reading::Ended(format!("what answers is no master: {error}")))?;
                    incoming.header = Some(header);
                }
            }
        }
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
}
