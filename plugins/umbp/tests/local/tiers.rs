//! Memory, disk, and what goes between them.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use kvdock_plugin_api::mock::{MockPool, Options, PoolSpec, identity};
use kvdock_plugin_api::v0_1::Component;
use kvdock_plugin_api::{ComponentKind, ErrorKind, PageStatus};
use kvdock_plugin_umbp::segment::{Log, Options as LogOptions};
use serde_json::json;

use super::super::common::*;

fn memory_alone(pages: u64, more: serde_json::Value) -> String {
    let mut config = json!({"ssd_enabled": false, "dram_capacity_bytes": pages * 4096, "dram_page_size": 4096});
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    config.to_string()
}

#[test]
fn memory_is_freed_from_the_high_watermark_to_the_low_one() {
    let bench = Bench::new(&memory_alone(128, json!({})), pool(1, 4096));
    for number in 0..115 {
        bench.store(&[number]);
    }
    assert_eq!(bench.store.stats().unwrap().pages, 115);
    bench.store(&[115]);
    assert_eq!(bench.store.stats().unwrap().pages, 89);
    assert_eq!(bench.count(&numbers(0..27)), 0);
    assert_eq!(bench.count(&numbers(27..116)), 89);
}

#[test]
fn reading_keeps_a_page_and_asking_does_not() {
    let bench = Bench::new(&memory_alone(128, json!({})), pool(1, 4096));
    for number in 0..115 {
        bench.store(&[number]);
    }
    assert_eq!(bench.count(&[0]), 1);
    assert_eq!(bench.prefix(&[1]), 1);
    bench.store(&[115]);
    assert_eq!(bench.status(0), PageStatus::Ok);
    assert_eq!(bench.status(1), PageStatus::Missing);
}

#[test]
fn the_deepest_of_the_oldest_pages_goes_first() {
    let more =
        json!({"eviction_policy": "prefix_aware_lru", "eviction_candidate_window": 4, "dram_high_watermark": 1.0});
    let bench = Bench::new(&memory_alone(16, more), pool(1, 4096));
    for (number, depth) in [(0, 0), (1, 3), (2, 1), (3, 2), (4, 9)] {
        bench.set_at(&[number], depth).result.unwrap();
    }
    for number in 5..15 {
        bench.set_at(&[number], 100).result.unwrap();
    }
    assert_eq!(bench.store.stats().unwrap().pages, 15);
    bench.set_at(&[15], 0).result.unwrap();
    // At the high mark it goes down to 11 pages. The window is the four oldest of those that are left: 0 to 3, then 4 joins them.
    let left: Vec<bool> = [0, 1, 2, 3, 4].iter().map(|number| bench.prefix(&[*number]) == 1).collect();
    assert_eq!(left, [true, false, true, true, false]);
}

#[test]
fn a_page_larger_than_memory_is_refused_without_a_disk() {
    let bench = Bench::new(&memory_alone(8, json!({})), pool(1, 9 * 4096));
    assert_eq!(bench.set(&[1]).statuses[0], [PageStatus::Refused]);
    let bench = Bench::new(&memory_alone(8, json!({"dram_high_watermark": 1.0})), pool(1, 8 * 4096));
    assert!(bench.set(&[1]).all_ok());
}

#[test]
fn what_is_read_from_disk_comes_back_to_memory_unless_it_is_off() {
    for promote in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let config = settings(dir.path(), json!({"auto_promote_on_read": promote}));
        let bench = Bench::new(&config, pool(8, 8192));
        bench.store(&numbers(0..8));
        bench.store.close().unwrap();
        let bench = Bench::new(&config, pool(8, 8192));
        assert_eq!(bench.count(&numbers(0..8)), 8);
        // With the files gone from under it, memory alone can answer.
        segments(dir.path())
            .iter()
            .for_each(|path| std::fs::File::options().write(true).open(path).unwrap().set_len(0).unwrap());
        let left = (0..8).filter(|number| bench.status(*number) == PageStatus::Ok).count();
        assert_eq!(left, if promote { 8 } else { 0 });
    }
}

#[test]
fn who_wants_a_page_that_another_one_reads_waits_for_that() {
    let dir = tempfile::tempdir().unwrap();
    // Large enough that one read takes a while, and read by the thread that asks.
    let more = json!({"dram_capacity_bytes": 64 << 20, "ssd_capacity_bytes": 512 << 20, "ssd_io_backend": "posix"});
    let config = settings(dir.path(), more);
    let bench = Bench::new(&config, pool(1, 8 << 20));
    bench.store(&[1]);
    bench.store.close().unwrap();
    let first = Bench::new(&config, pool(1, 8 << 20));
    let benches: Vec<Bench> = (0..4).map(|_| Bench::new(&config, pool(1, 8 << 20))).collect();
    let start = std::sync::Barrier::new(benches.len());
    let read: u64 = std::thread::scope(|scope| {
        let readers: Vec<_> = benches
            .iter()
            .map(|bench| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    let before = bytes_read();
                    assert_eq!(bench.count(&[1]), 1);
                    bytes_read() - before
                })
            })
            .collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).sum()
    });
    // One record, and what the kernel says about each thread.
    let record = (8 << 20) + 8192;
    assert!((8 << 20..record + (64 << 10)).contains(&read), "{read} bytes were read");
    assert_eq!(first.count(&[1]), 1);
}

/// Bytes that this thread has read by system calls so far.
fn bytes_read() -> u64 {
    let io = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().trim().parse().unwrap()
}

#[test]
fn a_corrupt_record_is_noticed_and_can_be_stored_again() {
    let dir = tempfile::tempdir().unwrap();
    let config = settings(dir.path(), json!({"auto_promote_on_read": false}));
    let bench = Bench::new(&config, pool(4, 8192));
    bench.store(&[1, 2]);
    bench.store.close().unwrap();
    let path = segments(dir.path()).remove(0);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[5000] ^= 0x40;
    std::fs::write(&path, bytes).unwrap();
    let bench = Bench::new(&config, pool(4, 8192));
    assert_eq!(bench.get(&[1, 2]).statuses[0], [PageStatus::Corrupt, PageStatus::Ok]);
    assert_eq!(bench.status(1), PageStatus::Missing);
    bench.store(&[1]);
    assert_eq!(bench.count(&[1, 2]), 2);
}

/// A page went when the one that had its place before was written out and had been removed meanwhile.
#[test]
fn a_page_was_lost_that_took_the_place_of_one_that_was_removed_while_it_was_written_out() {
    let dir = tempfile::tempdir().unwrap();
    // Memory is always full, so that pages are written out all the time.
    let config = settings(dir.path(), json!({"dram_capacity_bytes": 20 * 8192}));
    std::thread::scope(|scope| {
        for worker in 0..4u64 {
            let config = &config;
            // They share one store.
            scope.spawn(move || {
                let bench = Bench::new(config, pool(4, 6000));
                for round in 0..400u64 {
                    let first = worker * 1000 + round % 10 * 4;
                    let batch = numbers(first..first + 4);
                    bench.store(&batch);
                    bench.remove(&batch[..3]).result.unwrap();
                    bench.store(&batch[1..3]);
                    assert_eq!(bench.count(&batch[1..]), 3, "round {round}: pages are lost\n{}", bench.logs());
                }
            });
        }
    });
}

#[test]
fn several_directories_fill_evenly() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let dirs = format!("{},{}", one.path().display(), two.path().display());
    let config = settings(one.path(), json!({"ssd_storage_dir": dirs}));
    let bench = Bench::new(&config, pool(40, 8192));
    bench.store(&numbers(0..40));
    bench.store.close().unwrap();
    let (first, second) = (disk_bytes(one.path()), disk_bytes(two.path()));
    assert_eq!((first, second), (20 * 12288, 20 * 12288));
    assert_eq!(Bench::new(&config, pool(40, 8192)).count(&numbers(0..40)), 40);
}

#[test]
fn records_without_checksums_are_written_and_read() {
    let dir = tempfile::tempdir().unwrap();
    let config =
        settings(dir.path(), json!({"ssd_verify_crc": false, "ssd_direct_io": false, "ssd_durability_mode": "strict"}));
    let bench = Bench::new(&config, pool(8, 8192));
    bench.store(&numbers(0..8));
    bench.store.close().unwrap();
    let bytes = std::fs::read(segments(dir.path()).remove(0)).unwrap();
    assert_eq!((bytes[6], &bytes[16..20]), (3, &[0u8; 4][..]));
    assert_eq!(Bench::new(&config, pool(8, 8192)).count(&numbers(0..8)), 8);
}

#[test]
fn one_process_writes_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let config = settings(dir.path(), json!({}));
    let bench = Bench::new(&config, pool(4, 8192));
    // A second instance of this process shares the store.
    let second = Bench::new(&config, pool(4, 8192));
    bench.store(&[1]);
    assert_eq!(second.count(&[1]), 1);
    let other = LogOptions { segment: 65536, strict: false, direct: false, verify: true, follower: false };
    let refused = Log::open(dir.path(), other, Arc::new(AtomicU64::new(0)), &mut |_| {}).unwrap_err();
    assert!(refused.contains("another process writes it"), "{refused}");
    let bad = dir.path().join("file");
    std::fs::write(&bad, b"x").unwrap();
    let pool = pool(4, 8192);
    let (_, store) = try_attach(&settings(&bad, json!({})), &identity("model"), &[&pool]);
    let error = store.map(|_| ()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidConfig);
    assert!(error.message.contains("ssd_storage_dir"), "{}", error.message);
}

/// Names as another client of the store finds them: the keys of the records on disk.
fn names_on_disk(dir: &std::path::Path) -> Vec<String> {
    let options = LogOptions { segment: 65536, strict: false, direct: false, verify: true, follower: true };
    let (_, found) = Log::open(dir, options, Arc::new(AtomicU64::new(0)), &mut |_| {}).unwrap();
    let mut names: Vec<String> = found.into_iter().map(|(key, _)| String::from_utf8(key).unwrap()).collect();
    names.sort();
    names
}

fn component(segment: u32, kind: ComponentKind, len: u64) -> Component {
    Component {
        layer: 0,
        kind: kind.raw(),
        segment,
        reserved: 0,
        offset: 0,
        run_len: len,
        run_stride: len,
        run_count: 1,
    }
}

#[test]
fn names_are_sglangs_to_the_byte_where_that_is_asked_for() {
    let hash = "07".repeat(32);
    let k_and_v = [ComponentKind::K, ComponentKind::V];
    type Case<'a> = (&'a [ComponentKind], (u32, u32), (u32, u32), bool, &'a [&'a str]);
    let cases: [Case<'_>; 5] = [
        (&k_and_v, (0, 1), (0, 1), false, &["_0_k", "_0_v"]),
        (&k_and_v, (3, 4), (0, 1), false, &["_3_k", "_3_v"]),
        (&k_and_v, (3, 4), (1, 2), false, &["_3_1_k", "_3_1_v"]),
        (&[ComponentKind::Kv], (3, 4), (0, 1), true, &["__k"]),
        (&[ComponentKind::Kv], (3, 4), (1, 2), true, &["_1_k"]),
    ];
    for (kinds, tp, pp, replicated, suffixes) in cases {
        let dir = tempfile::tempdir().unwrap();
        let sizes = vec![4096; kinds.len()];
        let components = kinds.iter().enumerate().map(|(i, kind)| component(i as u32, *kind, 4096)).collect();
        let spec = PoolSpec { components, ..PoolSpec::bytes(0, "kv", 4, &sizes) };
        let mut who = identity("org/model");
        (who.tp, who.pp, who.replicated) = (tp, pp, replicated);
        let config = settings(dir.path(), json!({"names": "sglang", "role": "leader", "ssd_copy_async": false}));
        let bench = Bench::of(&config, &who, MockPool::new(spec));
        bench.pool.fill(0, 1);
        let part = kvdock_plugin_api::mock::Part::new(&bench.pool, &[[7; 32]], &[0]);
        assert!(bench.store.set(&Options::default(), std::slice::from_ref(&part)).all_ok());
        bench.pool.wipe(0);
        assert!(bench.store.get(&Options::default(), &[part]).all_ok());
        assert!(bench.pool.holds(0, 1));
        let expected: Vec<String> = suffixes.iter().map(|suffix| format!("{hash}{suffix}")).collect();
        assert_eq!(names_on_disk(dir.path()), expected);
        assert!(bench.logs().contains("names = \"sglang\""));
    }
    let dir = tempfile::tempdir().unwrap();
    let sealed = pool(4, 8192);
    let (_, store) = try_attach(&settings(dir.path(), json!({"names": "sglang"})), &identity("m"), &[&sealed]);
    let message = store.map(|_| ()).unwrap_err().message;
    assert!(message.contains("seal") && message.contains("key_scheme"), "{message}");
    // The host asks for them in the namespace, of plugins that say that they have them.
    let schema: serde_json::Value = serde_json::from_str(kvdock_plugin_umbp::SCHEMA).unwrap();
    assert_eq!(schema["x-key-schemes"], json!(["kvdock", "sglang"]));
    let mut who = identity("m");
    who.namespace_json = json!({"model": "m", "key_scheme": "sglang"}).to_string();
    let part = component(0, ComponentKind::Kv, 4096);
    let plain = MockPool::new(PoolSpec { components: vec![part], ..PoolSpec::bytes(0, "kv", 4, &[4096]) });
    let bench = Bench::of(&settings(dir.path(), json!({"role": "leader", "ssd_copy_async": false})), &who, plain);
    bench.store(&[7]);
    let name = keys(&[7])[0].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(names_on_disk(dir.path()), [format!("{name}_0_kv")]);
}
