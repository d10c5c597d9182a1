//! Removing and clearing, wherever pages are.

use kvdock_plugin_api::mock::{Options, identity};
use kvdock_plugin_api::{ClearScope, PageStatus};
use serde_json::json;

use super::super::common::*;
use super::shares::flush;
use kvdock_tests::umbp::Master;

#[test]
fn a_page_that_one_node_removes_is_gone_with_all_and_can_be_stored_anew() {
    let master = Master::start(&[]);
    let nodes: Vec<Bench> = (0..3).map(|_| Bench::new(&master.config(json!({})), pool(8, 9_000))).collect();
    nodes[0].store(&numbers(0..8));
    flush(&nodes[0]);
    // Copies with all of them.
    for node in &nodes {
        assert_eq!(node.count(&numbers(0..8)), 8);
        flush(node);
    }
    assert!(nodes[2].remove(&[3, 4]).all_ok(), "{}", nodes[2].logs());
    for node in &nodes {
        let there = node.which(&numbers(0..8));
        assert_eq!(there, [true, true, true, false, false, true, true, true]);
        assert_eq!(node.prefix(&numbers(0..8)), 3);
    }
    assert_eq!(nodes[1].remove(&[3, 77]).statuses[0], [PageStatus::Missing; 2]);
    // Other bytes in its place, as after a page that was corrupt.
    nodes[1].pool.fill(0, 3);
    assert!(nodes[1].store.set(&Options::default(), &[nodes[1].part(&[3])]).all_ok());
    flush(&nodes[1]);
    assert_eq!(nodes[0].status(3), PageStatus::Ok);
}

#[test]
fn h01_a_clear_reaches_every_node_and_puts_after_it_work() {
    let master = Master::start(&[]);
    let nodes: Vec<Bench> = (0..3).map(|_| Bench::new(&master.config(json!({})), pool(8, 9_000))).collect();
    let stranger = Bench::of(&master.config(json!({})), &identity("other"), pool(8, 9_000));
    stranger.store(&numbers(0..4));
    for (at, node) in nodes.iter().enumerate() {
        let first = at as u64 * 10;
        node.store(&numbers(first..first + 8));
        flush(node);
    }
    let all: Vec<u64> = (0..3).flat_map(|at| at * 10..at * 10 + 8).collect();
    assert_eq!(nodes[1].count(&all), 24);
    nodes[1].store.clear(&Options::default(), ClearScope::Namespace).unwrap();
    for node in &nodes {
        assert_eq!(node.count(&all), 0);
        assert_eq!(node.store.stats().unwrap().pages, 0);
    }
    assert_eq!(stranger.count(&numbers(0..4)), 4, "another model's pages stay");
    nodes[2].store(&all[..8]);
    flush(&nodes[2]);
    assert_eq!(nodes[0].count(&all[..8]), 8);
    assert!(nodes[0].store.clear(&Options::default(), ClearScope::Everything).is_err());
    assert_eq!(stranger.count(&numbers(0..4)), 4);
}
