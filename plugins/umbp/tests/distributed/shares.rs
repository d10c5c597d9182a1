//! Nodes that use one another's memory.

use kvdock_plugin_api::mock::{MockPool, Options, Part, PoolSpec, Query, identity};
use kvdock_plugin_api::v0_1::Component;
use kvdock_plugin_api::{ComponentKind, PageStatus};
use serde_json::json;

use super::super::common::*;
use super::other::{self, PAGE};
use kvdock_tests::umbp::Master;

/// Tells the master what was stored.
pub fn flush(bench: &Bench) {
    bench.store.flush(&Options::default()).unwrap_or_else(|error| panic!("{error}\n{}", bench.logs()));
}

/// How many of the first pages are found; none when nobody says.
pub fn found(bench: &Bench, numbers: &[u64]) -> Option<usize> {
    let found = bench.store.exists(&Options::default(), &keys(numbers), &[Query::of(&bench.pool)]);
    found.ok().map(|found| found.longest())
}

#[test]
fn pages_of_one_node_are_found_and_read_by_others() {
    let master = Master::start(&[]);
    let all = numbers(0..40);
    let first = Bench::new(&master.config(json!({})), pool(40, 65_536));
    let second = Bench::new(&master.config(json!({"cache_remote_fetches": false})), pool(40, 65_536));
    assert_eq!(second.prefix(&all), 0);
    assert_eq!(second.status(0), PageStatus::Missing);
    first.store(&all);
    // Where they are the pages are found at once; elsewhere when the master knows.
    assert_eq!(first.prefix(&all), 40);
    flush(&first);
    assert_eq!(second.prefix(&all), 40);
    for _ in 0..3 {
        assert_eq!(second.count(&all), 40, "{}", second.logs());
    }
    assert_eq!(second.store.stats().unwrap().pages, 0, "nothing was to be kept");
    // A page that another node has is not stored again.
    second.store(&all);
    assert_eq!(second.store.stats().unwrap().pages, 0);
    // Another model does not find them.
    assert_eq!(Bench::of(&master.config(json!({})), &identity("other"), pool(40, 65_536)).prefix(&all), 0);
}

#[test]
fn what_was_read_elsewhere_is_kept_where_there_is_room() {
    let master = Master::start(&[]);
    let first = Bench::new(&master.config(json!({})), pool(16, 65_536));
    first.store(&numbers(0..16));
    flush(&first);
    let second = Bench::new(&master.config(json!({"dram_capacity_bytes": 1 << 20})), pool(16, 65_536));
    assert_eq!(second.count(&numbers(0..16)), 16);
    // To 0.9 of a mebibyte, and no further.
    assert_eq!(second.store.stats().unwrap().pages, 14);
    let large = master.config(json!({"admission_max_block_bytes": 65_535}));
    let third = Bench::new(&large, pool(16, 65_536));
    assert_eq!(third.count(&numbers(0..16)), 16);
    assert_eq!(third.store.stats().unwrap().pages, 0);
    // The copies are told of: they are read when the first node is gone.
    flush(&second);
    first.store.close().unwrap();
    assert_eq!(third.count(&numbers(0..16)), 14);
}

#[test]
fn the_master_spreads_pages_over_nodes() {
    let master = Master::start(&[("UMBP_ROUTE_PUT_NODE_AFFINITY", "none"), ("UMBP_ROUTE_PUT_SELECT_ALGO", "random")]);
    let nodes: Vec<Bench> = (0..3).map(|_| Bench::new(&master.config(json!({})), pool(64, 9_000))).collect();
    let all = numbers(0..192);
    nodes[0].store(&all);
    nodes.iter().for_each(flush);
    let held: Vec<u64> = nodes.iter().map(|node| node.store.stats().unwrap().pages).collect();
    assert_eq!(held.iter().sum::<u64>(), 192, "{held:?}");
    assert!(held.iter().all(|count| *count > 20), "{held:?}");
    for node in &nodes {
        assert_eq!(node.count(&all), 192, "{}", node.logs());
    }
}

#[test]
fn a_key_that_comes_twice_and_single_pages_and_markers_travel_too() {
    let master = Master::start(&[("UMBP_ROUTE_PUT_NODE_AFFINITY", "none"), ("UMBP_ROUTE_PUT_SELECT_ALGO", "random")]);
    let nodes: Vec<Bench> = (0..2).map(|_| Bench::new(&master.config(json!({})), pool(8, 5_000))).collect();
    for number in 0..20 {
        nodes[0].pool.fill(0, number);
        nodes[0].pool.fill(1, number);
        let twice = nodes[0].store.set(&Options::default(), &[nodes[0].part(&[number, number])]);
        assert_eq!(twice.statuses[0], [PageStatus::Ok; 2]);
    }
    nodes.iter().for_each(flush);
    assert!(nodes.iter().all(|node| node.store.stats().unwrap().pages > 0));
    for number in 0..20 {
        // One by one, by the calls for single keys.
        assert_eq!((nodes[0].status(number), nodes[1].status(number)), (PageStatus::Ok, PageStatus::Ok));
    }
    let spec = PoolSpec::logical(8);
    let (one, two) = (Bench::new(&master.config(json!({})), MockPool::new(spec.clone())), MockPool::new(spec));
    let two = Bench::new(&master.config(json!({})), two);
    let part = |bench: &Bench| Part::new(&bench.pool, &keys(&[1, 2, 3]), &[0, 1, 2]);
    assert!(one.store.set(&Options::default(), &[part(&one)]).all_ok());
    nodes.iter().chain([&one, &two]).for_each(flush);
    assert!(two.store.get(&Options::default(), &[part(&two)]).all_ok());
}

#[test]
fn layers_are_read_from_other_nodes_as_ranges() {
    let master = Master::start(&[]);
    let part = |layer: u32, offset| Component {
        layer,
        kind: ComponentKind::Kv.raw(),
        segment: 0,
        reserved: 0,
        offset,
        run_len: 500,
        run_stride: 1500,
        run_count: 4,
    };
    let layered = || {
        let components = (0..3).map(|layer| part(layer, u64::from(layer) * 500)).collect();
        MockPool::new(PoolSpec { components, layers: 3, ..PoolSpec::bytes(0, "kv", 8, &[6000]) }.with_seal(32))
    };
    let (first, second) =
        (Bench::new(&master.config(json!({})), layered()), Bench::new(&master.config(json!({})), layered()));
    first.store(&numbers(0..8));
    flush(&first);
    (0..8).for_each(|page| second.pool.wipe(page));
    let mut wanted = second.part(&numbers(0..8));
    wanted.layers = Some((1, 1));
    assert!(second.store.get(&Options::default(), &[wanted]).all_ok(), "{}", second.logs());
    for page in 0..8 {
        let (theirs, ours) = (first.pool.read(page), second.pool.read(page));
        second.pool.wipe(page);
        let wiped = second.pool.read(page);
        for at in 0..6000 {
            let in_layer = at % 1500 / 500 == 1;
            assert_eq!(ours[at], if in_layer { theirs[at] } else { wiped[at] }, "byte {at}");
        }
    }
    assert_eq!(second.store.stats().unwrap().pages, 0, "parts of pages are not kept");
}

#[test]
fn two_processes_share_pages_over_tcp() {
    let master = Master::start(&[]);
    let mut other = other::start(&master.config(json!({})));
    let bench = Bench::new(&master.config(json!({})), pool(64, PAGE));
    other.set(&numbers(0..40));
    assert_eq!(bench.count(&numbers(0..40)), 40, "{}", bench.logs());
    bench.store(&numbers(100..140));
    flush(&bench);
    assert!(other.has_all(&numbers(100..140)));
}

#[test]
fn a_full_node_makes_room_and_says_nothing_that_is_not_so() {
    // It makes room by itself; the master's own evictions would be another matter.
    let master = Master::start(&[("UMBP_EVICTION_CHECK_INTERVAL_SEC", "3600")]);
    let small = json!({"dram_capacity_bytes": 1 << 20});
    let bench = Bench::new(&master.config(small.clone()), pool(8, 65_536));
    let all = numbers(0..64);
    bench.store(&all);
    let there = bench.which(&all);
    let held = there.iter().filter(|there| **there).count();
    assert!((8..=16).contains(&held), "{held}");
    assert!(there.iter().skip(56).all(|there| *there), "what came last is there: {there:?}");
    flush(&bench);
    let looking = Bench::new(&master.config(small), pool(8, 65_536));
    assert_eq!(looking.which(&all), there, "what is gone is not found elsewhere");
    // A page that has no room at all.
    let huge = Bench::of(&master.config(json!({"dram_capacity_bytes": 1 << 20})), &identity("huge"), pool(2, 3 << 20));
    assert_eq!(huge.set(&[1]).statuses[0], [PageStatus::Refused]);
}

#[test]
fn a_batch_that_has_not_room_for_all_of_its_pages_says_which_are_stored() {
    let master = Master::start(&[("UMBP_EVICTION_CHECK_INTERVAL_SEC", "3600")]);
    let bench = Bench::new(&master.config(json!({"dram_capacity_bytes": 1 << 20})), pool(32, 65_536));
    let outcome = bench.set(&numbers(0..32));
    let stored: Vec<u64> = (0..32).filter(|number| outcome.statuses[0][*number as usize] == PageStatus::Ok).collect();
    assert!((1..32).contains(&stored.len()), "{outcome:?}");
    let others: Vec<u64> = (0..32).filter(|number| !stored.contains(number)).collect();
    assert!(others.iter().all(|number| outcome.statuses[0][*number as usize] == PageStatus::Refused));
    assert_eq!(bench.count(&others), 0);
}
