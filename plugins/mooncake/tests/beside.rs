//! Calls of one process beside one another, on the same objects.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::services::{Master, Mode, stand_before};
use common::*;
use kvdock_plugin_api::mock::{Options, Part};
use kvdock_plugin_mooncake::wire::Rpc;
use kvdock_plugin_mooncake::wire::frame::{REQUEST_HEADER, Request};
use kvdock_plugin_mooncake::wire::rpc;

/// How long anything may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Copies one way until the end, and passes the end on.
fn copy(mut from: TcpStream, mut to: TcpStream) {
    // How a connection ends is of no interest here.
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}

/// Stands between a writer and the data port of the only peer: what is sent waits until `go` says something.
fn hold_back(listener: &TcpListener, own: u16, reached: impl FnOnce(), go: &Receiver<()>) {
    let (mut near, _) = listener.accept().unwrap();
    near.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut first = [0; 1];
    near.read_exact(&mut first).unwrap();
    reached();
    go.recv_timeout(PATIENCE).unwrap();
    let mut far = TcpStream::connect(("127.0.0.1", own)).unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    far.write_all(&first).unwrap();
    std::thread::scope(|scope| {
        let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        scope.spawn(|| copy(near_too, far_too));
        copy(far, near);
    });
}

/// Once a put has begun the object exists for the master, and can't be read before it has ended: whoever stored it too asked again for a third of a
/// second, and gave up. A rule of `kvdock plugin check` stores from many threads, and saw it where one of them stood still for so long.
#[test]
fn a_page_that_another_thread_was_storing_was_refused_after_a_third_of_a_second() {
    let master = Master::start(&[]);
    let holder = Bench::new(&master.config(Mode::Http, 16 << 20), pool(4, 4096));
    let writer = Bench::new(&master.config(Mode::Http, 0), pool(4, 4096));
    assert!(holder.set(&[9]).all_ok(), "{}", holder.logs());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = stand_before(&master, listener.local_addr().unwrap().port());
    let set = |at: u32| {
        writer.pool.fill(at, 1);
        writer.store.set(&Options::default(), &[Part::new(&writer.pool, &keys(&[1]), &[at])])
    };
    let (reached, is_reached) = channel();
    let (go, gone) = channel();
    // It ends when the writer closes its connections.
    std::thread::spawn(move || hold_back(&listener, own, || reached.send(()).unwrap(), &gone));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| set(0));
        // The bytes of the first put are on their way.
        is_reached.recv_timeout(PATIENCE).unwrap();
        let second = scope.spawn(|| set(1));
        // Longer than anybody asks again and again.
        std::thread::sleep(Duration::from_secs(1));
        go.send(()).unwrap();
        for put in [first, second] {
            let put = put.join().unwrap();
            assert!(put.all_ok(), "{put:?}\n{}", writer.logs());
        }
    });
    assert!(writer.has_all(&[1]), "{}", writer.logs());
    assert!(holder.has_all(&[1, 9]), "{}", holder.logs());
}

/// Passes calls on to a master, and takes note of them. The first heartbeat gets no answer.
struct Between {
    passed: Mutex<Vec<u32>>,
    pings: Mutex<usize>,
}

/// Makes the last connection, which says that it is over.
struct Last(SocketAddr);

impl Drop for Last {
    fn drop(&mut self) {
        // Nobody listens any more only when it is over anyway.
        let _ = TcpStream::connect(self.0);
    }
}

impl Between {
    fn serve(&self, listener: &TcpListener, master: &Master) {
        std::thread::scope(|scope| {
            for near in listener.incoming() {
                let near = near.unwrap();
                let mut first = [0; 1];
                if near.peek(&mut first).unwrap_or(0) == 0 {
                    return;
                }
                let far = TcpStream::connect(("127.0.0.1", master.port)).unwrap();
                let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                scope.spawn(move || self.pass(near_too, far_too));
                scope.spawn(move || copy(far, near));
            }
        });
    }

    fn pass(&self, mut near: TcpStream, mut far: TcpStream) -> Option<()> {
        loop {
            let mut header = [0; REQUEST_HEADER];
            if near.read_exact(&mut header).is_err() {
                return far.shutdown(Shutdown::Write).ok();
            }
            let request = Request::from_bytes(&header).unwrap();
            let mut body = vec![0; (request.body + request.attachment) as usize];
            near.read_exact(&mut body).ok()?;
            if request.function == rpc::Ping::id() {
                let mut pings = self.pings.lock().unwrap();
                *pings += 1;
                if *pings == 1 {
                    continue;
                }
            }
            self.passed.lock().unwrap().push(request.function);
            far.write_all(&[&header[..], &body].concat()).ok()?;
        }
    }
}

/// The master takes a segment once more when it first hears of its owner, and forgets what it had placed there until then.
#[test]
fn a_member_whose_first_heartbeat_got_no_answer_stored_pages_that_were_forgotten_soon() {
    let master = Master::start(&[]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&master.config(Mode::Peer, 16 << 20)).unwrap();
    config["master_server_address"] = at.to_string().into();
    let between = Between { passed: Mutex::default(), pings: Mutex::default() };
    std::thread::scope(|scope| {
        scope.spawn(|| between.serve(&listener, &master));
        let _last = Last(at);
        let bench = Bench::new(&config.to_string(), pool(4, 4096));
        let known = between.passed.lock().unwrap().contains(&rpc::ReMountSegment::id());
        assert!(known, "it serves before the master knows it: {}", bench.logs());
        assert!(bench.set(&[1, 2, 3]).all_ok() && bench.has_all(&[1, 2, 3]), "{}", bench.logs());
        bench.store.close().unwrap();
    });
}
