//! Pages go in and come out; damaged, foreign and missing ones are told apart.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use common::*;
use kvdock_plugin_api::mock::{KvShape, MockHost, MockPool, Options, Part, PoolSpec, Query, identity, key, table_of};
use kvdock_plugin_api::{ClearScope, Dtype, ErrorKind, HealthState, PageStatus};
use kvdock_plugin_file::kvdock_plugin_entry;

const ENGINES: [&str; 2] = [r#""io":"threads""#, r#""io":"io_uring""#];

/// Configurations to try a test with; without io_uring in this kernel only the other one.
fn engines() -> Vec<&'static str> {
    let has_uring = |more: &str| {
        let scratch = tempfile::tempdir().unwrap();
        attach(&MockHost::new(), scratch.path(), more, &identity("probe"), &[]).is_ok()
    };
    ENGINES.into_iter().filter(|more| has_uring(more)).collect()
}

#[test]
fn large_and_small_pages_come_back_also_after_a_restart() {
    for more in engines() {
        for pool in [large_pool(40), small_pool(40)] {
            let bench = Bench::new(pool, more);
            let numbers: Vec<u64> = (0..40).collect();
            assert_eq!(bench.prefix(&numbers), 0);
            assert!(bench.get(&numbers).statuses[0].iter().all(|status| *status == PageStatus::Missing));
            assert!(bench.set(&numbers).all_ok());
            assert!(bench.has_all(&numbers), "{more}");
            assert_eq!(bench.prefix(&numbers), 40);
            let stats = bench.store.stats().unwrap();
            assert_eq!(stats.pages, 40);
            assert!(stats.bytes_used >= 40 * bench.pool.page_bytes() as u64);
            assert!(stats.get_mean_ns > 0 && stats.set_mean_ns > 0 && stats.failures == 0);
            let bench = bench.reopen(more);
            assert_eq!(bench.prefix(&numbers), 40, "{more}");
            assert!(bench.has_all(&numbers), "{more}");
            assert_eq!(bench.store.health().unwrap().state, HealthState::Ok);
            bench.store.flush(&Options::default()).unwrap();
            bench.store.close().unwrap();
        }
    }
}

#[test]
fn every_layout_a_logical_anchor_and_side_pools_in_one_call() {
    let shape = KvShape { pages: 4, page_tokens: 16, layers: 3, heads: 2, head_dim: 64, dtype: Dtype::F16 };
    for layout in ["layer_first", "page_first", "page_first_direct", "page_head"] {
        let anchor = MockPool::new(PoolSpec::kv(0, "kv", layout, shape).with_seal(256));
        let big = MockPool::new(PoolSpec::bytes(1, "indexer", 4, &[LARGE]));
        let swa = MockPool::new(PoolSpec::bytes(2, "swa", 4, &[4096]).trailing(2));
        let scratch = tempfile::tempdir().unwrap();
        let store = attach(&MockHost::new(), scratch.path(), "", &identity("m"), &[&anchor, &big, &swa]).unwrap();
        let keys = keys(&[1, 2, 3]);
        for pool in [&anchor, &big, &swa] {
            (0..3).for_each(|page| pool.fill(page, u64::from(page) + 10 * u64::from(pool.id())));
        }
        let parts = [
            Part::new(&big, &keys, &[0, 1, 2]),
            Part::new(&swa, &keys[1..], &[1, 2]),
            Part::new(&anchor, &keys, &[0, 1, 2]),
        ];
        assert!(store.set(&Options::default(), &parts).all_ok());
        for pool in [&anchor, &big, &swa] {
            (0..3).for_each(|page| pool.wipe(page));
        }
        assert!(store.get(&Options::default(), &parts).all_ok());
        for pool in [&anchor, &big, &swa] {
            let from = u32::from(pool.id() == 2);
            assert!(
                (from..3).all(|page| pool.holds(page, u64::from(page) + 10 * u64::from(pool.id()))),
                "{layout} {}",
                pool.id()
            );
        }
        let found = store.exists(&Options::default(), &keys, &[&anchor, &big, &swa].map(Query::of)).unwrap();
        // The window of two pages is whole at the end of the chain only.
        assert_eq!(found.restorable, [true, false, false, true]);
        store.close().unwrap();
    }
    let anchor = MockPool::new(PoolSpec::logical(8));
    let side = MockPool::new(PoolSpec::bytes(1, "c4", 8, &[LARGE]));
    let scratch = tempfile::tempdir().unwrap();
    let store = attach(&MockHost::new(), scratch.path(), "", &identity("m"), &[&anchor, &side]).unwrap();
    let keys = keys(&[1, 2]);
    let parts = [Part::new(&side, &keys, &[0, 1]), Part::new(&anchor, &keys, &[0, 1])];
    assert_eq!(store.exists(&Options::default(), &keys, &[Query::of(&anchor)]).unwrap().longest(), 0);
    assert!(store.set(&Options::default(), &parts).all_ok());
    assert!(store.get(&Options::default(), &parts).all_ok());
    assert_eq!(store.exists(&Options::default(), &keys, &[Query::of(&anchor), Query::of(&side)]).unwrap().longest(), 2);
    assert!(store.remove(&Options::default(), &parts[1..]).all_ok());
    assert_eq!(store.get(&Options::default(), &parts).statuses[1], vec![PageStatus::Missing; 2], "markers are gone");
    store.close().unwrap();
}

#[test]
fn i39269_truncated_long_foreign_or_flipped_file_is_corrupt_once_and_is_removed() {
    type Damage = fn(&std::path::Path);
    let damages: [(&str, Damage); 7] = [
        ("truncated", |path| fs::OpenOptions::new().write(true).open(path).unwrap().set_len(1000).unwrap()),
        ("empty", |path| fs::File::create(path).map(drop).unwrap()),
        ("cut by one", |path| {
            let file = fs::OpenOptions::new().write(true).open(path).unwrap();
            file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        }),
        ("longer", |path| fs::OpenOptions::new().append(true).open(path).unwrap().write_all(b"more").unwrap()),
        ("flipped byte", |path| {
            let mut file = fs::OpenOptions::new().write(true).open(path).unwrap();
            file.seek(SeekFrom::Start(100_000)).unwrap();
            file.write_all(b"\x55").unwrap();
        }),
        ("flipped trailer", |path| {
            let mut file = fs::OpenOptions::new().write(true).open(path).unwrap();
            file.seek(SeekFrom::End(-60)).unwrap();
            file.write_all(b"\x55").unwrap();
        }),
        ("foreign", |path| fs::write(path, vec![b'x'; (LARGE + BLOCK) as usize]).unwrap()),
    ];
    for more in engines() {
        for (what, damage) in damages {
            let bench = Bench::new(large_pool(4), more);
            assert!(bench.set(&[1, 2, 3]).all_ok());
            damage(&bench.file_of(2));
            let got = bench.get(&[1, 2, 3]);
            assert_eq!(got.result, Ok(()), "{what}: the call goes on");
            assert_eq!(got.statuses[0], [PageStatus::Ok, PageStatus::Corrupt, PageStatus::Ok], "{what}");
            assert_eq!(bench.page_files().len(), 2, "{what}: the file is removed");
            assert_eq!(bench.get(&[2]).statuses[0], [PageStatus::Missing], "{what}");
            assert_eq!(bench.prefix(&[1, 2, 3]), 1, "{what}");
            assert!(bench.set(&[2]).all_ok() && bench.has_all(&[1, 2, 3]), "{what}: it heals");
            assert_eq!(bench.host.metric("file_corrupt_pages"), Some(1.0));
        }
    }
}

#[test]
fn a_page_swapped_for_another_pages_file_is_noticed() {
    let bench = Bench::new(large_pool(4), "");
    assert!(bench.set(&[1, 2]).all_ok());
    fs::copy(bench.file_of(1), bench.file_of(2)).unwrap();
    assert_eq!(bench.get(&[1, 2]).statuses[0], [PageStatus::Ok, PageStatus::Corrupt]);
    // A folder in place of the file.
    let path = bench.file_of(1);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert_ne!(bench.get(&[1]).statuses[0], [PageStatus::Ok]);
    assert_eq!(bench.prefix(&[1]), 0);
}

#[test]
fn a_damaged_page_in_a_pack_is_corrupt_once_and_heals() {
    for more in engines() {
        let bench = Bench::new(small_pool(8), more);
        assert!(bench.set(&[1, 2, 3]).all_ok());
        let pack = files(&bench.dir).into_iter().find(|path| path.extension().is_some_and(|e| e == "pack")).unwrap();
        let mut file = fs::OpenOptions::new().write(true).open(pack).unwrap();
        // Into the payload of the second page.
        file.seek(SeekFrom::Start(64 + 3 * 96 + bench.pool.page_bytes() as u64 + 5000)).unwrap();
        file.write_all(b"\xff\x00\xff").unwrap();
        assert_eq!(bench.get(&[1, 2, 3]).statuses[0], [PageStatus::Ok, PageStatus::Corrupt, PageStatus::Ok]);
        assert_eq!(bench.get(&[1, 2, 3]).statuses[0], [PageStatus::Ok, PageStatus::Missing, PageStatus::Ok]);
        assert!(bench.set(&[2]).all_ok() && bench.has_all(&[1, 2, 3]));
        let bench = bench.reopen(more);
        assert!(bench.has_all(&[1, 2, 3]));
    }
}

#[test]
fn a_torn_pack_keeps_its_whole_groups() {
    let bench = Bench::new(small_pool(8), "");
    assert!(bench.set(&[1, 2, 3]).all_ok());
    assert!(bench.set(&[4, 5]).all_ok());
    let pack = files(&bench.dir).into_iter().find(|path| path.extension().is_some_and(|e| e == "pack")).unwrap();
    let (dir, scratch) = (bench.dir.clone(), bench.scratch);
    bench.store.close().unwrap();
    let size = fs::metadata(&pack).unwrap().len();
    fs::OpenOptions::new().write(true).open(&pack).unwrap().set_len(size - 20_000).unwrap();
    let bench = Bench::at(&dir, small_pool(8), "");
    assert_eq!(bench.which(&[1, 2, 3, 4, 5]), [true, true, true, false, false]);
    assert!(bench.set(&[4, 5]).all_ok() && bench.has_all(&[1, 2, 3, 4, 5]));
    wait_for("the torn end is cut", || {
        fs::metadata(&pack).is_ok_and(|meta| meta.len() % 4096 == 0 && meta.len() < size - 20_000)
    });
    let bench = bench.reopen("");
    assert!(bench.has_all(&[1, 2, 3, 4, 5]));
    drop(bench);
    drop(scratch);
}

#[test]
fn i38925_long_model_and_pool_names() {
    let scratch = tempfile::tempdir().unwrap();
    let name = "an/organisation/with a very long name ☃/".repeat(30);
    let spec = PoolSpec::bytes(0, &format!("kv{name}"), 2, &[LARGE]);
    let pool = MockPool::new(spec);
    let store = attach(&MockHost::new(), scratch.path(), "", &identity(&name), &[&pool]).unwrap();
    pool.fill(0, 1);
    assert!(store.set(&Options::default(), &[Part::new(&pool, &[key(1)], &[0])]).all_ok());
    for path in files(scratch.path()) {
        let relative = path.strip_prefix(scratch.path()).unwrap();
        assert!(relative.components().all(|part| part.as_os_str().len() < 100), "{relative:?}");
    }
}

#[test]
fn models_and_shapes_are_kept_apart() {
    let scratch = tempfile::tempdir().unwrap();
    let host = MockHost::new();
    let pool = large_pool(2);
    let one = attach(&host, scratch.path(), "", &identity("one"), &[&pool]).unwrap();
    let two = attach(&host, scratch.path(), "", &identity("two"), &[&pool]).unwrap();
    pool.fill(0, 1);
    let part = [Part::new(&pool, &[key(1)], &[0])];
    assert!(one.set(&Options::default(), &part).all_ok());
    assert_eq!(two.get(&Options::default(), &part).statuses[0], [PageStatus::Missing]);
    // The same bytes in another order are another pool.
    let mut spec = pool.spec().clone();
    spec.layout = "page_head".to_owned();
    let other = MockPool::new(spec);
    let three = attach(&host, scratch.path(), "", &identity("one"), &[&other]).unwrap();
    assert_eq!(
        three.get(&Options::default(), &[Part::new(&other, &[key(1)], &[0])]).statuses[0],
        [PageStatus::Missing]
    );
    pool.fill(0, 2);
    assert!(two.set(&Options::default(), &part).all_ok());
    two.clear(&Options::default(), ClearScope::Namespace).unwrap();
    assert_eq!(two.get(&Options::default(), &part).statuses[0], [PageStatus::Missing]);
    assert!(one.get(&Options::default(), &part).all_ok(), "clearing a namespace leaves the others");
    assert!(pool.holds(0, 1));
}

#[test]
fn clearing_everything_leaves_what_is_not_ours() {
    for pool in [large_pool(4), small_pool(4)] {
        let bench = Bench::new(pool, "");
        let other = attach(&bench.host, &bench.dir, "", &identity("other"), &[&bench.pool]).unwrap();
        bench.pool.fill(0, 1);
        let part = [Part::new(&bench.pool, &[key(1)], &[0])];
        assert!(other.set(&Options::default(), &part).all_ok());
        other.close().unwrap();
        assert!(bench.set(&[1, 2, 3]).all_ok());
        let mine = [bench.dir.join("notes.txt"), bench.dir.join("p"), bench.dir.join("lost+found")];
        mine.iter().for_each(|path| fs::write(path, "mine").unwrap());
        let beside = files(&bench.dir).into_iter().find(|path| path.ends_with("namespace.json")).unwrap();
        let inside = beside.with_file_name("packs").join("readme");
        fs::write(&inside, "mine").unwrap();
        bench.store.clear(&Options::default(), ClearScope::Everything).unwrap();
        assert_eq!(bench.prefix(&[1]), 0);
        assert_eq!(bench.page_files().len(), 0);
        assert!(mine.iter().chain([&inside]).all(|path| fs::read(path).unwrap() == b"mine"));
        assert_eq!(bench.store.stats().unwrap().pages, 0);
        assert!(bench.set(&[1, 2]).all_ok() && bench.has_all(&[1, 2]), "the store goes on");
    }
}

#[test]
fn setting_a_page_again_does_not_rewrite_it() {
    let bench = Bench::new(large_pool(4), "");
    assert!(bench.set(&[1]).all_ok());
    let inode = |path: &std::path::Path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap());
    let before = inode(&bench.file_of(1));
    assert!(bench.set(&[1, 1, 2, 2]).all_ok(), "also twice in one call");
    assert_eq!(inode(&bench.file_of(1)), before);
    assert_eq!(bench.page_files().len(), 2);
    // One of another length does not count as stored.
    fs::write(bench.file_of(1), "short").unwrap();
    assert!(bench.set(&[1]).all_ok() && bench.has_all(&[1]));
    let small = Bench::new(small_pool(4), "");
    assert!(small.set(&[1, 1, 2]).all_ok());
    let size = small.store.stats().unwrap().bytes_used;
    assert!(small.set(&[1, 2, 2]).all_ok());
    assert_eq!(small.store.stats().unwrap().bytes_used, size);
}

#[test]
fn removed_pages_stay_away_also_after_a_restart() {
    for pool in [large_pool(8), small_pool(8)] {
        let bench = Bench::new(pool, "");
        assert!(bench.set(&[1, 2, 3, 4]).all_ok());
        assert!(bench.remove(&[2, 3]).all_ok());
        assert_eq!(bench.which(&[1, 2, 3, 4]), [true, false, false, true]);
        let again = bench.remove(&[2, 9]);
        assert!(again.result.is_ok() && again.statuses[0].iter().all(|status| *status == PageStatus::Missing));
        let bench = bench.reopen("");
        assert_eq!(bench.which(&[1, 2, 3, 4]), [true, false, false, true]);
        assert!(bench.set(&[2]).all_ok());
        let bench = bench.reopen("");
        assert_eq!(bench.which(&[1, 2, 3, 4]), [true, true, false, true]);
    }
}

#[test]
fn deadlines_and_cancelling_end_a_call() {
    for pool in [large_pool(8), small_pool(8)] {
        let bench = Bench::new(pool, "");
        assert!(bench.set(&[1]).all_ok());
        let part = [Part::new(&bench.pool, &keys(&[1, 2]), &[0, 1])];
        let late = Options { deadline: Some(Duration::ZERO), ..Options::default() };
        let flag = AtomicU32::new(1);
        let cancelled = Options { cancel: Some(&flag), ..Options::default() };
        for (options, kind) in [(late, ErrorKind::TimedOut), (cancelled, ErrorKind::Cancelled)] {
            let got = bench.store.get(&options, &part);
            assert_eq!(got.result.unwrap_err().kind, kind);
            assert!(got.statuses[0].iter().all(|status| *status != PageStatus::Ok));
            let set = bench.store.set(&options, &[Part::new(&bench.pool, &keys(&[5, 6]), &[0, 1])]);
            assert_eq!(set.result.unwrap_err().kind, kind);
            assert_eq!(bench.store.exists(&options, &keys(&[1]), &[Query::of(&bench.pool)]).unwrap_err().kind, kind);
            assert_eq!(bench.which(&[5, 6]), [false, false]);
            assert_eq!(bench.store.health().unwrap().state, HealthState::Ok);
        }
        let roomy = Options { deadline: Some(Duration::from_secs(30)), ..Options::default() };
        assert!(bench.store.get(&roomy, &part[..1]).result.is_ok());
    }
}

#[test]
fn empty_batches_and_many_threads() {
    for pool in [large_pool(16), small_pool(16)] {
        let bench = Bench::new(pool, "");
        assert!(bench.set(&[]).all_ok() && bench.get(&[]).all_ok() && bench.remove(&[]).all_ok());
        assert_eq!(bench.prefix(&[]), 0);
        // Eight threads store and read the same two pages.
        (0..16).for_each(|page| bench.pool.fill(page, u64::from(page) % 2));
        std::thread::scope(|scope| {
            for thread in 0..8u32 {
                let (store, pool) = (&bench.store, &bench.pool);
                scope.spawn(move || {
                    let part = [Part::new(pool, &keys(&[0, 1]), &[2 * thread, 2 * thread + 1])];
                    for _ in 0..5 {
                        assert!(store.set(&Options::default(), &part).all_ok());
                        assert!(store.get(&Options::default(), &part).all_ok());
                        assert!(pool.holds(2 * thread, 0) && pool.holds(2 * thread + 1, 1));
                    }
                });
            }
        });
        assert_eq!(bench.store.stats().unwrap().pages, 2);
        let bench = bench.reopen("");
        assert!(bench.has_all(&[0, 1]));
    }
}

#[test]
fn bad_configurations_and_directories_are_told() {
    let scratch = tempfile::tempdir().unwrap();
    let open = |config: &str| {
        let table = table_of(kvdock_plugin_entry).unwrap();
        MockHost::new().open(table, config, &identity("m")).map(drop).unwrap_err()
    };
    let error = open(r#"{"dir":"/tmp/x","durabilty":"none"}"#);
    assert!(error.kind == ErrorKind::InvalidConfig && error.message.contains("durabilty"), "{error}");
    let file = scratch.path().join("file");
    fs::write(&file, "x").unwrap();
    let error = open(&config(&file, ""));
    assert!(error.message.contains("dir") && error.message.contains("file"), "{error}");
    let dir = scratch.path().join("newer");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("kvdock-file-store"), "kvdock file store, format 7\n").unwrap();
    let error = open(&config(&dir, ""));
    assert!(error.kind == ErrorKind::InvalidConfig && error.message.contains("format 7"), "{error}");
    // Damage at the end is told as well.
    fs::write(dir.join("kvdock-file-store"), "kvdock file store, format 1").unwrap();
    let error = open(&config(&dir, ""));
    let told = r#"says "kvdock file store, format 1", this version reads "kvdock file store, format 1\n";"#;
    assert!(error.message.contains(told), "{error}");
    assert_eq!(files(&dir).len(), 1, "nothing was written into it");
}
