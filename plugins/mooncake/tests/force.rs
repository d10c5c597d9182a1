//! Objects that are removed by force while they are read, which no lease keeps from happening.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use common::services::{Calls, Master, Mode};
use common::*;
use kvdock_plugin_api::PageStatus;
use kvdock_plugin_api::mock::MockPool;
use kvdock_plugin_mooncake::data::{HEADER, STATUS};
use kvdock_plugin_mooncake::limit::Limit;
use kvdock_plugin_mooncake::metadata::Metadata;
use kvdock_plugin_mooncake::wire::rpc;
use kvdock_plugin_mooncake::wire::types::Place;

/// Bytes of a page: more than half of the segment, so that a page gets the place of the one before it.
const BYTES: u64 = 10 << 20;
const SEGMENT: u64 = 16 << 20;

/// Puts a port of ours before the data port of the peer that has the only object; gives the peer's own.
fn stand_before(master: &Master, port: u16) -> u16 {
    let listed = master.call::<rpc::GetReplicaListByRegex>(&(".*", "default")).unwrap();
    let Place::Memory(memory) = &listed.0[0].1[0].place else { panic!("{listed:?}") };
    let metadata = Metadata::parse(&master.metadata(Mode::Http)).unwrap();
    let limit = Limit::within(Duration::from_secs(20));
    let mut descriptor = metadata.find(&memory.buffer.endpoint, &limit).unwrap().descriptor;
    let own = std::mem::replace(&mut descriptor.tcp_data_port, port);
    let (host, handshake) = metadata.handshake_place(&memory.buffer.endpoint, &limit).unwrap();
    let Metadata::Server(server) = metadata else { panic!("there is a server") };
    server.publish(&host, handshake, &descriptor).unwrap();
    own
}

/// Reads page 1, which is removed by force while its request is on the way; page 2 takes its place. Gives what the reader says of the page.
fn read_meanwhile(master: &Master, model: &str, page: impl Fn() -> MockPool) -> (Bench, PageStatus) {
    let holder = Bench::of_model(&master.config(Mode::Http, SEGMENT), model, page());
    let reader = Bench::of_model(&master.config(Mode::Http, 0), model, page());
    assert!(holder.set(&[1]).all_ok(), "{}", holder.logs());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = stand_before(master, listener.local_addr().unwrap().port());
    let status = std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut near, _) = listener.accept().unwrap();
            let mut request = [0; HEADER];
            near.read_exact(&mut request).unwrap();
            assert!(holder.remove(&[1]).all_ok(), "{}", holder.logs());
            assert!(holder.set(&[2]).all_ok(), "{}", holder.logs());
            let mut far = TcpStream::connect(("127.0.0.1", own)).unwrap();
            far.write_all(&request).unwrap();
            let mut answer = vec![0; STATUS + BYTES as usize];
            far.read_exact(&mut answer).unwrap();
            near.write_all(&answer).unwrap();
        });
        reader.get(&[1]).statuses[0][0]
    });
    (reader, status)
}

#[test]
fn without_a_seal_the_master_is_asked_whether_a_page_was_there_all_the_time() {
    let master = Master::start(&[]);
    let (reader, status) = read_meanwhile(&master, "bare", || bare(2, BYTES));
    assert_eq!(status, PageStatus::Missing, "{}", reader.logs());
}

#[test]
fn with_a_seal_other_bytes_are_the_hosts_to_find() {
    let master = Master::start(&[]);
    let (reader, status) = read_meanwhile(&master, "sealed", || pool(2, BYTES));
    assert_eq!(status, PageStatus::Ok, "{}", reader.logs());
    // The seal travels with the bytes that it is the seal of: here those of the other page, with its key.
    assert!(reader.pool.holds(0, 2));
}
