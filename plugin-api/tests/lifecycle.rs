//! Open, register, ready, close: in order, and rolled back when a step fails.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use std::sync::Mutex;

use common::{instances_alive, journals, kvdock_plugin_entry};
use kvdock_plugin_api::mock::*;
use kvdock_plugin_api::*;

/// Tests that count instances take turns.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> std::sync::MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(|turn| turn.into_inner())
}

fn open(config: &str, pools: &[&MockPool]) -> (MockHost, Instance) {
    let host = MockHost::new();
    let store = host.attach(table_of(kvdock_plugin_entry).unwrap(), config, &identity("model"), pools).unwrap();
    (host, store)
}

fn pool(id: u32, name: &str) -> PoolSpec {
    PoolSpec::bytes(id, name, 16, &[640, 384]).with_seal(96)
}

#[test]
fn calls_come_in_order_and_close_comes_once() {
    let _turn = turn();
    let before = instances_alive();
    let (anchor, swa, draft) =
        (MockPool::new(pool(0, "kv")), MockPool::new(pool(1, "swa")), MockPool::new(pool(2, "draft")));
    let (host, store) = open("{}", &[&anchor, &swa]);
    assert_eq!(instances_alive(), before + 1);
    store.register_side(&[&draft]).unwrap();
    store.ready().unwrap();
    store.flush(&Options::default()).unwrap();
    store.unregister(&[2]).unwrap();
    store.close().unwrap();
    assert_eq!(instances_alive(), before, "the instance is dropped");
    let expected =
        ["open", "anchor kv", "sides swa", "ready", "sides draft", "ready", "flush", "unregister draft", "close"];
    assert_eq!(journals().last().unwrap(), &expected);
    assert_eq!(host.logs()[0].message, "opened for model");
}

#[test]
fn a_failing_step_rolls_back() {
    let _turn = turn();
    let before = instances_alive();
    let anchor = MockPool::new(pool(0, "kv"));
    let host = MockHost::new();
    let table = table_of(kvdock_plugin_entry).unwrap();
    let error = host.attach(table, r#"{"refuse_pools":true}"#, &identity("m"), &[&anchor]).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unsupported);
    assert_eq!(instances_alive(), before);
    let error = host.open(table, r#"{"refuse_poles":true}"#, &identity("m")).unwrap_err();
    assert!(error.kind == ErrorKind::InvalidConfig && error.message.contains("refuse_poles"), "{error}");
    assert_eq!(instances_alive(), before);
}
