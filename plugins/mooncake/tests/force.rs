//! Objects that are removed by force while they are read, which no lease keeps from happening, or whose lease is over by then.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use common::services::{Master, Mode, stand_before};
use common::*;
use kvdock_plugin_api::PageStatus;
use kvdock_plugin_api::mock::MockPool;
use kvdock_plugin_mooncake::data::{HEADER, STATUS};

/// Bytes of a page: more than half of the segment, so that a page gets the place of the one before it.
const BYTES: u64 = 10 << 20;
const SEGMENT: u64 = 16 << 20;

/// Who removes a page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// The instance that reads it.
    Itself,
    /// Another one.
    Another,
}

/// Reads page 1, which is removed by force while its request is on the way; page 2 takes its place. Gives what the reader says of the page.
fn read_meanwhile(master: &Master, model: &str, page: impl Fn() -> MockPool, by: By) -> (Bench, PageStatus) {
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
            let remover = if by == By::Itself { &reader } else { &holder };
            assert!(remover.remove(&[1]).all_ok(), "{}", remover.logs());
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
    let (reader, status) = read_meanwhile(&master, "bare", || bare(2, BYTES), By::Another);
    assert_eq!(status, PageStatus::Missing, "{}", reader.logs());
}

#[test]
fn with_a_seal_other_bytes_are_the_hosts_to_find() {
    let master = Master::start(&[]);
    let (reader, status) = read_meanwhile(&master, "sealed", || pool(2, BYTES), By::Another);
    assert_eq!(status, PageStatus::Ok, "{}", reader.logs());
    // The seal travels with the bytes that it is the seal of: here those of the other page, with its key.
    assert!(reader.pool.holds(0, 2));
}

/// A rule of `kvdock plugin check` calls from many threads, and saw it now and then.
#[test]
fn a_page_that_another_thread_removed_at_that_moment_came_with_the_bytes_of_the_one_in_its_place() {
    let master = Master::start(&[]);
    let (reader, status) = read_meanwhile(&master, "beside", || pool(2, BYTES), By::Itself);
    assert_eq!(status, PageStatus::Missing, "{}", reader.logs());
}

#[test]
fn a_page_that_went_after_its_lease_was_over_is_not_taken_for_good() {
    let master = Master::start(&["--default_kv_lease_ttl=1"]);
    let (reader, status) = read_meanwhile(&master, "late", || pool(2, BYTES), By::Another);
    assert_eq!(status, PageStatus::Missing, "{}", reader.logs());
    assert_eq!(reader.host.metric("mooncake_expired_pages"), Some(1.0));
}
