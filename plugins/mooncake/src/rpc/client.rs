//! The few connections to one master: made when they are needed, made again when they break.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};

use super::{Connection, RpcError};
use crate::limit::Limit;
use crate::net;
use crate::wire::frame::{Refusal, refusal_text};
use crate::wire::{Form, Rpc, decode, encode};

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(5);
/// How long after a failed attempt the next one is made, at first and at most.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_LAST: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct Trouble {
    why: String,
    next: Instant,
    pause: Duration,
}

/// Where a master listens.
#[derive(Debug)]
pub struct Address {
    text: String,
    host: String,
    port: u16,
}

impl Address {
    /// Reads `host:port`.
    ///
    /// # Errors
    /// A text that says what is not right with it.
    pub fn parse(text: &str) -> Result<Address, String> {
        let (host, port) = net::split_address(text)
            .ok_or_else(|| format!("{text:?} is no address; it takes \"host:port\", such as \"10.0.0.1:50051\""))?;
        Ok(Address { text: text.to_owned(), host: host.to_owned(), port })
    }

    /// The host alone.
    pub fn host(&self) -> &str {
        &self.host
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

/// Connections to one master at a time.
#[derive(Debug)]
pub struct Client {
    address: RwLock<Arc<Address>>,
    connections: Box<[Mutex<Option<Arc<Connection>>>]>,
    turn: AtomicUsize,
    trouble: Mutex<Option<Trouble>>,
}

/// Says later whether the master that gave an answer has been there ever since.
#[derive(Debug, Clone)]
pub struct Ticket(Arc<Connection>);

impl Ticket {
    /// Whether the connection of the answer still stands. A master that ended has closed it.
    pub fn holds(&self) -> bool {
        self.0.is_alive()
    }
}

impl Client {
    /// A client that keeps up to `connections` connections to `host:port`. None is made yet.
    ///
    /// # Errors
    /// A text that says what is not right with the address.
    pub fn new(address: &str, connections: usize) -> Result<Client, String> {
        Ok(Client::at(Arc::new(Address::parse(address)?), connections))
    }

    /// The same, for an address that was read already.
    pub fn at(address: Arc<Address>, connections: usize) -> Client {
        Client {
            address: RwLock::new(address),
            connections: (0..connections.max(1)).map(|_| Mutex::default()).collect(),
            turn: AtomicUsize::new(0),
            trouble: Mutex::default(),
        }
    }

    /// Address of the master.
    pub fn address(&self) -> Arc<Address> {
        self.address.read().clone()
    }

    /// Calls go to another master from now on; what the one before still has to answer is lost.
    pub fn follow(&self, address: Arc<Address>) {
        *self.address.write() = address;
        *self.trouble.lock() = None;
        for place in &self.connections {
            // Whoever is connecting now holds the lock, for no longer than that may take.
            if let Some(connection) = place.lock().take() {
                connection.die("another master leads now");
            }
        }
    }

    /// Whether the next call may be tried at once.
    fn pause(&self) -> Result<(), RpcError> {
        match &*self.trouble.lock() {
            Some(trouble) if Instant::now() < trouble.next => Err(RpcError::Unreachable(trouble.why.clone())),
            _ => Ok(()),
        }
    }

    fn connection(&self, limit: &Limit<'_>) -> Result<Arc<Connection>, RpcError> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed) % self.connections.len();
        let Some(place) = self.connections.get(turn) else {
            return Err(RpcError::Unreachable(format!("master {}: there is no connection", self.address())));
        };
        let Some(mut place) = place.try_lock_until(limit.until()) else {
            return Err(RpcError::stopped(crate::limit::Stop::TimedOut));
        };
        if let Some(connection) = place.as_ref().filter(|connection| connection.is_alive()) {
            return Ok(connection.clone());
        }
        *place = None;
        self.pause()?;
        let time = limit.left().map_err(RpcError::stopped)?.min(CONNECT);
        let address = self.address();
        match net::connect(&address.host, address.port, time) {
            Ok(stream) => {
                *self.trouble.lock() = None;
                let connection = Arc::new(Connection::new(stream, address));
                *place = Some(connection.clone());
                Ok(connection)
            }
            Err(error) => {
                let why = format!("master {address} can't be reached: {error}");
                let mut trouble = self.trouble.lock();
                let pause = trouble.as_ref().map_or(PAUSE_FIRST, |known| (known.pause * 2).min(PAUSE_LAST));
                *trouble = Some(Trouble { why: why.clone(), next: Instant::now() + pause, pause });
                Err(RpcError::Unreachable(why))
            }
        }
    }

    /// Calls a function of the master.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub fn call<M: Rpc>(&self, request: &M::Request<'_>, limit: &Limit<'_>) -> Result<M::Reply, RpcError> {
        self.call_with_ticket::<M>(request, limit).map(|(reply, _)| reply)
    }

    /// The same, with a ticket that says later whether the master has been there ever since.
    ///
    /// # Errors
    /// See [`RpcError`].
    pub fn call_with_ticket<M: Rpc>(
        &self,
        request: &M::Request<'_>,
        limit: &Limit<'_>,
    ) -> Result<(M::Reply, Ticket), RpcError> {
        let body = M::request_hash().map_or_else(Vec::new, |hash| encode(request, hash, &Form::default()));
        let named = |error: RpcError| error.of_call(M::NAME, &self.address().text);
        let connection = self.connection(limit).map_err(named)?;
        let answer = connection.call(M::id(), &body, limit).map_err(named)?;
        if let Some(refusal) = Refusal::of(answer.error) {
            return Err(RpcError::refused(M::NAME, &self.address().text, &refusal, &refusal_text(&answer.body)));
        }
        let reply = decode::<M::Reply>(&answer.body, M::reply_hash());
        let (reply, _) = reply.map_err(|error| RpcError::malformed(M::NAME, &self.address().text, &error))?;
        Ok((reply, Ticket(connection)))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use super::*;
    use crate::limit::Stop;
    use crate::wire::frame::{REQUEST_HEADER, Reply, Request};
    use crate::wire::{ErrorCode, rpc};

    fn read_request(stream: &mut TcpStream) -> Option<(Request, Vec<u8>)> {
        let mut header = [0; REQUEST_HEADER];
        stream.read_exact(&mut header).ok()?;
        let request = Request::from_bytes(&header).unwrap();
        let mut body = vec![0; request.body as usize];
        stream.read_exact(&mut body).ok()?;
        Some((request, body))
    }

    fn answer(stream: &mut TcpStream, sequence: u32, value: &Result<bool, ErrorCode>) {
        let body = encode(value, rpc::ExistKey::reply_hash(), &Form { literal: true, ..Form::default() });
        let header = Reply { error: 0, sequence, body: body.len() as u32, attachment: 0 };
        stream.write_all(&[&header.to_bytes()[..], &body].concat()).unwrap();
    }

    fn client(listener: &TcpListener) -> Client {
        Client::new(&listener.local_addr().unwrap().to_string(), 1).unwrap()
    }

    #[test]
    fn calls_share_a_connection_and_answers_may_come_in_any_order() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = client(&listener);
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut requests: Vec<(u32, bool)> = (0..8)
                    .map(|_| {
                        let (request, body) = read_request(&mut stream).unwrap();
                        let ((key, _), _) =
                            decode::<(&str, &str)>(&body, rpc::ExistKey::request_hash().unwrap()).unwrap();
                        (request.sequence, key.ends_with('1'))
                    })
                    .collect();
                requests.reverse();
                for (sequence, found) in requests {
                    answer(&mut stream, sequence, &Ok(found));
                }
                // Until the client goes.
                read_request(&mut stream);
            });
            let calls: Vec<_> = (0..8)
                .map(|number| {
                    let client = &client;
                    scope.spawn(move || {
                        let key = format!("key {}", number % 2);
                        let limit = Limit::within(Duration::from_secs(20));
                        client.call::<rpc::ExistKey>(&(key.as_str(), "default"), &limit).unwrap().unwrap()
                    })
                })
                .collect();
            let found: Vec<bool> = calls.into_iter().map(|call| call.join().unwrap()).collect();
            assert_eq!(found, [false, true, false, true, false, true, false, true]);
            drop(client.connections[0].lock().take());
        });
    }

    #[test]
    fn a_late_answer_is_dropped_and_the_connection_goes_on() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = client(&listener);
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let (first, _) = read_request(&mut stream).unwrap();
                let (second, _) = read_request(&mut stream).unwrap();
                answer(&mut stream, first.sequence, &Ok(true));
                answer(&mut stream, second.sequence, &Ok(false));
                read_request(&mut stream);
            });
            let late = client.call::<rpc::ExistKey>(&("a", ""), &Limit::within(Duration::from_millis(50)));
            let late = late.unwrap_err();
            assert!(matches!(late, RpcError::Stopped { stop: Stop::TimedOut, .. }), "{late}");
            let address = listener.local_addr().unwrap().to_string();
            assert!(late.to_string().contains(&address) && late.to_string().contains("ExistKey"), "{late}");
            let (found, ticket) =
                client.call_with_ticket::<rpc::ExistKey>(&("b", ""), &Limit::within(Duration::from_secs(20))).unwrap();
            assert_eq!(found, Ok(false));
            assert!(ticket.holds());
            drop(client.connections[0].lock().take());
            drop(ticket);
        });
    }

    #[test]
    fn a_master_that_ends_is_noticed_and_one_that_is_back_is_used_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let client = client(&listener);
        let limit = || Limit::within(Duration::from_secs(20));
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let (request, _) = read_request(&mut stream).unwrap();
                answer(&mut stream, request.sequence, &Ok(true));
                read_request(&mut stream).unwrap();
            });
            let (_, ticket) = client.call_with_ticket::<rpc::ExistKey>(&("a", ""), &limit()).unwrap();
            assert!(ticket.holds());
            let lost = client.call::<rpc::ExistKey>(&("a", ""), &limit()).unwrap_err();
            assert!(matches!(&lost, RpcError::Lost(why) if why.contains(&address.to_string())), "{lost}");
            assert!(!ticket.holds());
        });
        drop(listener);
        let gone = client.call::<rpc::ExistKey>(&("a", ""), &limit()).unwrap_err();
        assert!(matches!(&gone, RpcError::Unreachable(why) if why.contains(&address.to_string())), "{gone}");
        let listener = TcpListener::bind(address).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let (request, _) = read_request(&mut stream).unwrap();
                answer(&mut stream, request.sequence, &Ok(true));
            });
            let began = Instant::now();
            while client.call::<rpc::ExistKey>(&("a", ""), &limit()).is_err() {
                assert!(began.elapsed() < Duration::from_secs(20), "it does not come back");
                thread::sleep(Duration::from_millis(10));
            }
        });
    }

    #[test]
    fn what_is_no_master_is_told_apart() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = client(&listener);
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
                read_request(&mut stream);
            });
            let error = client.call::<rpc::ExistKey>(&("a", ""), &Limit::within(Duration::from_secs(20))).unwrap_err();
            assert!(error.to_string().contains("no master"), "{error}");
        });
        assert!(Client::new("nowhere", 1).unwrap_err().contains("host:port"));
    }
}
