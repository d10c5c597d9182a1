//! Nodes with segments below their memory.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use kvdock_plugin_api::mock::{MockPool, Options, Part, PoolSpec, identity};
use kvdock_plugin_api::v0_1::Component;
use kvdock_plugin_api::{ClearScope, ComponentKind, HealthState, PageStatus};
use kvdock_plugin_umbp::wire::master::{BatchRouteGetRequest, BatchRouteGetResponse};
use kvdock_plugin_umbp::wire::peer::tier;
use kvdock_tests::umbp::Master;
use serde_json::{Value, json};

use super::super::common::*;
use super::master::Raw;
use super::shares::flush;

/// Bytes of a page; sixteen fill the memory of a node, so that some of them are always in segments alone.
const PAGE: u64 = 65_536;

/// A node with 1 MiB of memory over segments in a folder.
fn config(master: &Master, dir: &Path, more: &Value) -> String {
    let mut all = json!({
        "dram_capacity_bytes": 1 << 20, "ssd_enabled": true, "ssd_storage_dir": dir, "ssd_capacity_bytes": 64 << 20,
        "ssd_segment_size_bytes": 1 << 20, "ssd_durability_mode": "relaxed", "cache_remote_fetches": false,
    });
    for (key, value) in more.as_object().unwrap() {
        all[key] = value.clone();
    }
    master.config(all)
}

/// Where the master sends readers, for each name.
fn tiers(master: &Master, names: &[String]) -> Vec<i32> {
    let request = BatchRouteGetRequest { node_id: "test".to_owned(), keys: names.to_vec(), exclude_nodes: Vec::new() };
    let answer: BatchRouteGetResponse = Raw::to(&master.address()).call("/umbp.UMBPMaster/BatchRouteGet", request);
    answer.node_ref.iter().zip(answer.tier).map(|(node, tier)| if *node == 0 { 0 } else { tier }).collect()
}

/// Pages in names that tests can make: K and V of a page are an object each.
fn plain_pool(pages: u64) -> MockPool {
    let part = |segment: u32, kind: ComponentKind| Component {
        layer: 0,
        kind: kind.raw(),
        segment,
        reserved: 0,
        offset: 0,
        run_len: PAGE / 2,
        run_stride: PAGE / 2,
        run_count: 1,
    };
    let components = vec![part(0, ComponentKind::K), part(1, ComponentKind::V)];
    MockPool::new(PoolSpec { components, ..PoolSpec::bytes(0, "kv", pages, &[PAGE / 2, PAGE / 2]) })
}

fn plain_names(numbers: &[u64]) -> Vec<String> {
    let hex = |key: &[u8; 32]| key.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    keys(numbers).iter().map(|key| hex(key) + "_0_k").collect()
}

#[test]
fn what_memory_has_no_room_for_is_found_and_read_by_all_nodes() {
    let (master, dir) = (Master::start(&[("UMBP_EVICTION_CHECK_INTERVAL_SEC", "3600")]), tempfile::tempdir().unwrap());
    let all = numbers(0..64);
    let first = Bench::new(&config(&master, dir.path(), &json!({"names": "sglang"})), plain_pool(8));
    first.store(&all);
    flush(&first);
    assert_eq!(first.store.stats().unwrap().pages, 128, "two objects a page, each counted once");
    assert!(disk_bytes(dir.path()) >= 64 * PAGE);
    // The master knows of both tiers.
    let there = tiers(&master, &plain_names(&all));
    let count = |wanted: i32| there.iter().filter(|tier| **tier == wanted).count();
    assert!(count(tier::SSD) >= 48 && count(tier::DRAM) >= 1, "{there:?}");
    assert_eq!(count(0), 0, "{there:?}");
    let wanted = |line: &str| line.starts_with("mori_umbp_client_capacity_total_bytes") && line.contains("SSD");
    wait_for("the capacity of segments", || master.metrics().lines().any(|line| wanted(line) && !line.ends_with(" 0")));
    // Without coming back to memory, and with that.
    let second = master.config(json!({"names": "sglang", "cache_remote_fetches": false}));
    let second = Bench::new(&second, plain_pool(8));
    assert_eq!(second.prefix(&all), 64);
    for _ in 0..3 {
        assert_eq!(second.count(&all), 64, "{}", second.logs());
        assert_eq!(first.count(&all), 64, "{}", first.logs());
    }
    assert_eq!(first.store.health().unwrap().state, HealthState::Ok);
}

#[test]
fn pages_in_segments_are_read_where_nothing_comes_back_to_memory() {
    let (master, dir) = (Master::start(&[]), tempfile::tempdir().unwrap());
    let first = Bench::new(&config(&master, dir.path(), &json!({"auto_promote_on_read": false})), pool(8, PAGE));
    let all = numbers(0..40);
    first.store(&all);
    flush(&first);
    let second = Bench::new(&master.config(json!({"cache_remote_fetches": false})), pool(8, PAGE));
    for _ in 0..2 {
        assert_eq!((first.count(&all), second.count(&all)), (40, 40), "{}{}", first.logs(), second.logs());
    }
}

#[test]
fn h04_a_node_that_is_started_again_has_what_its_segments_hold() {
    let (master, dir) = (Master::start(&[]), tempfile::tempdir().unwrap());
    let all = numbers(0..40);
    let looking = Bench::new(&master.config(json!({"cache_remote_fetches": false})), pool(8, PAGE));
    for turn in 0..2 {
        let node = Bench::new(&config(&master, dir.path(), &json!({})), pool(8, PAGE));
        if turn == 0 {
            node.store(&all);
        } else {
            // It tells the master when it joins, and what it has is not stored again.
            assert_eq!(node.prefix(&all), 40);
            let before = disk_bytes(dir.path());
            node.store(&all);
            assert_eq!(disk_bytes(dir.path()), before);
        }
        flush(&node);
        assert_eq!(looking.count(&all), 40, "{}", looking.logs());
        node.store.close().unwrap();
        assert_eq!(looking.count(&all), 0, "its pages leave with it");
    }
    // Nobody else writes there meanwhile.
    let node = Bench::new(&config(&master, dir.path(), &json!({})), pool(8, PAGE));
    let other = pool(8, PAGE);
    let error = try_attach(&config(&master, dir.path(), &json!({})), &identity("model"), &[&other]).1;
    let error = error.map(|_| ()).unwrap_err();
    assert!(error.message.contains("ssd_storage_dir") && error.message.contains("writes it"), "{error}");
    assert_eq!(node.count(&all), 40);
}

#[test]
fn what_is_removed_or_cleared_goes_from_segments_too_and_does_not_come_back() {
    let (master, dirs) = (Master::start(&[]), [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()]);
    let mut nodes: Vec<Bench> =
        dirs.iter().map(|dir| Bench::new(&config(&master, dir.path(), &json!({})), pool(8, PAGE))).collect();
    let stranger = Bench::of(&master.config(json!({})), &identity("other"), pool(8, PAGE));
    stranger.store(&numbers(0..4));
    let all = numbers(0..40);
    nodes[0].store(&all);
    flush(&nodes[0]);
    // By another node than the one that has it.
    assert!(nodes[1].remove(&[0, 1, 39]).all_ok(), "{}", nodes[1].logs());
    let expected: Vec<bool> = all.iter().map(|number| ![0, 1, 39].contains(number)).collect();
    for node in &nodes {
        assert_eq!(node.which(&all), expected);
        assert_eq!(node.prefix(&all), 0);
    }
    assert_eq!(nodes[0].remove(&[0]).statuses[0], [PageStatus::Missing]);
    nodes[0].store(&[1]);
    assert_eq!(nodes[0].status(1), PageStatus::Ok);
    nodes[1].store.clear(&Options::default(), ClearScope::Namespace).unwrap();
    for node in &nodes {
        assert_eq!(node.count(&all), 0);
        assert_eq!(node.store.stats().unwrap().pages, 0);
    }
    assert_eq!(stranger.count(&numbers(0..4)), 4);
    nodes.remove(0).store.close().unwrap();
    let again = Bench::new(&config(&master, dirs[0].path(), &json!({})), pool(8, PAGE));
    assert_eq!(again.count(&all), 0, "it is gone from the files as well");
    again.store(&all);
    assert_eq!(again.count(&all), 40);
}

#[test]
fn h12_pages_that_the_master_evicts_go_to_segments() {
    let variables = [("UMBP_EVICTION_CHECK_INTERVAL_SEC", "1"), ("UMBP_LEASE_DURATION_SEC", "0")];
    let (master, dir) = (Master::start(&variables), tempfile::tempdir().unwrap());
    // The node itself has no reason to.
    let more = json!({"names": "sglang", "dram_high_watermark": 1.0});
    let node = Bench::new(&config(&master, dir.path(), &more), plain_pool(16));
    let all = numbers(0..16);
    node.store(&all);
    assert_eq!(disk_bytes(dir.path()), 0, "all of it fits into memory");
    node.store.flush(&Options::default()).unwrap();
    let names = plain_names(&all);
    wait_for("the master evicts", || tiers(&master, &names).contains(&tier::SSD));
    assert_eq!(node.count(&all), 16, "{}", node.logs());
}

#[test]
fn full_segments_lose_what_was_used_longest_ago_and_nothing_is_said_to_be_there_that_is_not() {
    let (master, dir) = (Master::start(&[("UMBP_EVICTION_CHECK_INTERVAL_SEC", "3600")]), tempfile::tempdir().unwrap());
    let small = json!({"ssd_capacity_bytes": 4 << 20, "ssd_segment_size_bytes": 262_144});
    let node = Bench::new(&config(&master, dir.path(), &small), pool(8, PAGE));
    let all = numbers(0..200);
    node.store(&all);
    let there = node.which(&all);
    let held = there.iter().filter(|there| **there).count();
    assert!((24..=80).contains(&held), "{held}");
    assert!(there[192..].iter().all(|there| *there), "what came last is there: {there:?}");
    assert!(disk_bytes(dir.path()) <= 4 << 20, "{}", disk_bytes(dir.path()));
    flush(&node);
    let there = node.which(&all);
    node.store.flush(&Options::default()).unwrap();
    let looking = Bench::new(&master.config(json!({"cache_remote_fetches": false})), pool(8, PAGE));
    assert_eq!(looking.which(&all), there, "what is gone is not found elsewhere");
    assert_eq!(node.store.health().unwrap().state, HealthState::Ok);
}

#[test]
fn a_damaged_record_is_no_page_and_another_node_that_has_it_is_asked() {
    let (master, dir) = (Master::start(&[]), tempfile::tempdir().unwrap());
    let all = numbers(0..40);
    let node = Bench::new(&config(&master, dir.path(), &json!({})), pool(8, PAGE));
    node.store(&all);
    flush(&node);
    // A copy of some with the other node.
    let copied = numbers(0..4);
    let keeps = Bench::new(&master.config(json!({})), pool(8, PAGE));
    assert_eq!(keeps.count(&copied), 4);
    flush(&keeps);
    for path in segments(dir.path()) {
        // In the middle of each value; a record is a block with its header, and the value.
        let (file, record) = (File::options().read(true).write(true).open(&path).unwrap(), 4096 + PAGE);
        for at in (0..file.metadata().unwrap().len() / record).map(|number| number * record + 4096 + 1000) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
        }
    }
    assert_eq!(node.which(&copied), [true; 4], "{}", node.logs());
    let there = node.which(&all);
    assert!(there.iter().filter(|there| **there).count() <= 24, "no damaged page counts: {there:?}");
    assert!(node.logs().contains("corrupt"), "{}", node.logs());
}

#[test]
fn layers_are_read_from_segments_as_ranges() {
    let (master, dir) = (Master::start(&[]), tempfile::tempdir().unwrap());
    let part = |layer: u32, offset| Component {
        layer,
        kind: ComponentKind::Kv.raw(),
        segment: 0,
        reserved: 0,
        offset,
        run_len: 5_000,
        run_stride: 15_000,
        run_count: 4,
    };
    let layered = || {
        let components = (0..3).map(|layer| part(layer, u64::from(layer) * 5_000)).collect();
        MockPool::new(PoolSpec { components, layers: 3, ..PoolSpec::bytes(0, "kv", 40, &[60_000]) }.with_seal(32))
    };
    let first = Bench::new(&config(&master, dir.path(), &json!({})), layered());
    first.store(&numbers(0..40));
    flush(&first);
    let second = Bench::new(&master.config(json!({"cache_remote_fetches": false})), layered());
    for reader in [&first, &second] {
        let stored: Vec<Vec<u8>> = (0..40)
            .map(|page| {
                reader.pool.fill(page, u64::from(page));
                reader.pool.read(page)
            })
            .collect();
        for layer in 0..3u32 {
            (0..40).for_each(|page| reader.pool.wipe(page));
            let wiped = reader.pool.read(0);
            let mut wanted: Part = reader.part(&numbers(0..40));
            wanted.layers = Some((layer, 1));
            assert!(reader.store.get(&Options::default(), &[wanted]).all_ok(), "{}", reader.logs());
            for page in 0..40u32 {
                let read = reader.pool.read(page);
                for at in (0..60_000).step_by(97) {
                    let inside = at % 15_000 / 5_000 == layer as usize;
                    let expected = if inside { stored[page as usize][at] } else { wiped[at] };
                    assert_eq!(read[at], expected, "page {page}, byte {at}, layer {layer}");
                }
            }
        }
    }
}

#[test]
fn random_operations_beside_a_model_soak() {
    let operations = if kvdock_tests::soak::factor() > 1 { 200_000 } else { 3_000 };
    let (master, dir) = (Master::start(&[("UMBP_EVICTION_CHECK_INTERVAL_SEC", "1")]), tempfile::tempdir().unwrap());
    let small = json!({"dram_capacity_bytes": 256 << 10, "ssd_segment_size_bytes": 131_072});
    let node = || Bench::new(&config(&master, dir.path(), &small), pool(16, 6_000));
    let mut keeper = node();
    let other = Bench::new(&master.config(json!({"cache_remote_fetches": false})), pool(16, 6_000));
    let (mut model, mut random) = (BTreeSet::<u64>::new(), fastrand::Rng::with_seed(5));
    let mut done = 0;
    while done < operations {
        let wanted: BTreeSet<u64> = (0..random.usize(1..16)).map(|_| random.u64(0..200)).collect();
        let batch: Vec<u64> = wanted.into_iter().collect();
        done += batch.len();
        match random.u32(0..1000) {
            0..400 => {
                keeper.store(&batch);
                model.extend(&batch);
            }
            400..800 => {
                let there: Vec<bool> = batch.iter().map(|number| model.contains(number)).collect();
                assert_eq!(keeper.which(&batch), there, "{batch:?}\n{}", keeper.logs());
            }
            800..900 => {
                for (number, there) in batch.iter().zip(other.which(&batch)) {
                    assert!(!there || model.contains(number), "page {number} is not there\n{}", other.logs());
                }
            }
            900..960 => {
                let remover = if random.bool() { &keeper } else { &other };
                flush(&keeper);
                remover.remove(&batch).result.unwrap();
                model.retain(|number| !batch.contains(number));
            }
            960..970 => {
                other.store.clear(&Options::default(), ClearScope::Namespace).unwrap();
                model.clear();
            }
            970..980 => {
                keeper.store.close().unwrap();
                keeper = node();
            }
            _ => {
                flush(&keeper);
                let all: Vec<u64> = model.iter().copied().collect();
                assert_eq!(other.count(&all), all.len(), "{}", other.logs());
            }
        }
    }
}

/// Sets, reads and removals at the same time, with memory that has room for a part of what is in use.
#[test]
fn threads_that_store_read_and_remove_meet_no_wrong_byte() {
    let (master, dir) = (Master::start(&[]), tempfile::tempdir().unwrap());
    let small = json!({"dram_capacity_bytes": 256 << 10});
    let nodes: Vec<Bench> = (0..3)
        .map(|at| {
            let own = if at == 0 {
                config(&master, dir.path(), &small)
            } else {
                master.config(json!({"dram_capacity_bytes": 64 << 10}))
            };
            Bench::new(&own, pool(16, 6_000))
        })
        .collect();
    std::thread::scope(|scope| {
        for (at, node) in nodes.iter().enumerate() {
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(at as u64);
                for _ in 0..150 {
                    let first = random.u64(0..184);
                    let batch: Vec<u64> = (first..first + 16).collect();
                    match random.u8(0..8) {
                        0..3 => drop(node.set(&batch)),
                        3 if at == 0 => drop(node.remove(&batch[..4])),
                        // It fails on a wrong byte.
                        _ => drop(node.which(&batch)),
                    }
                }
            });
        }
    });
    assert_eq!(nodes[0].store.health().unwrap().state, HealthState::Ok, "{}", nodes[0].logs());
}
