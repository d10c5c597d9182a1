//! Objects go between this client and the real ones, byte for byte.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use common::services::{Master, Mode, Official};
use common::*;
use kvdock_plugin_api::PageStatus;

const MODES: [Mode; 2] = [Mode::Peer, Mode::Http];

#[test]
fn pages_go_into_the_own_segment_and_come_out() {
    let master = Master::start(&[]);
    for mode in MODES {
        let bench = Bench::of_model(&master.config(mode, 64 << 20), &format!("{mode:?}"), pool(40, 64 << 10));
        let numbers: Vec<u64> = (0..40).collect();
        assert_eq!(bench.prefix(&numbers), 0);
        assert!(bench.get(&numbers).statuses[0].iter().all(|status| *status == PageStatus::Missing));
        let set = bench.set(&numbers);
        assert!(set.all_ok(), "{set:?}\n{}", bench.logs());
        assert_eq!(bench.prefix(&numbers), 40);
        assert!(bench.has_all(&numbers), "{}", bench.logs());
        assert!(bench.set(&numbers).all_ok(), "what is stored already is a success");
        let stats = bench.store.stats().unwrap();
        assert!(stats.pages >= 40 && stats.bytes_used >= 40 * (64 << 10) && stats.bytes_total >= 64 << 20, "{stats:?}");
        bench.store.close().unwrap();
    }
}

#[test]
fn an_official_segment_holds_our_pages_and_official_clients_read_them() {
    let master = Master::start(&[]);
    for mode in MODES {
        let mut official = Official::start(&master, mode, 256 << 20);
        for bytes in [1, 100, 64 << 10, (1 << 20) + 7] {
            let bench = Bench::of_model(&master.config(mode, 0), &format!("{mode:?} {bytes}"), pool(33, bytes));
            let before = master.keys();
            let numbers: Vec<u64> = (0..33).collect();
            let set = bench.set(&numbers);
            assert!(set.all_ok(), "{mode:?} {bytes}: {set:?}\n{}", bench.logs());
            assert!(bench.has_all(&numbers), "{mode:?} {bytes}\n{}", bench.logs());
            // Names end in the key, so each page is found by it.
            let after = master.keys();
            let names: Vec<String> = numbers
                .iter()
                .map(|number| {
                    let hex: String = keys(&[*number])[0].iter().map(|byte| format!("{byte:02x}")).collect();
                    let mut found = after.iter().filter(|name| name.ends_with(&hex) && !before.contains(name));
                    found.next().unwrap().clone()
                })
                .collect();
            assert!(official.exists(&names).iter().all(|there| *there == 1));
            let (codes, data) = official.batch_get(&names, bytes as usize);
            assert!(codes.iter().all(|code| *code == bytes as i64), "{codes:?}");
            for (number, data) in numbers.iter().zip(&data) {
                assert!(*data == bench.pool.pattern(*number), "{mode:?} {bytes}: object {number}");
            }
            assert!(official.get(&names[7]) == bench.pool.pattern(7), "{mode:?} {bytes}: single");
        }
    }
}

#[test]
fn our_segment_holds_official_objects_and_both_sides_read_them() {
    let master = Master::start(&[]);
    for mode in MODES {
        let bytes = 96 << 10;
        let bench = Bench::of_model(&master.config(mode, 128 << 20), &format!("{mode:?}"), pool(20, bytes));
        let mut official = Official::start(&master, mode, 0);
        // What our names are, without what they hold.
        let numbers: Vec<u64> = (0..20).collect();
        let before = master.keys();
        assert!(bench.set(&numbers).all_ok());
        let names: Vec<String> = master.keys().into_iter().filter(|name| !before.contains(name)).collect();
        assert!(bench.remove(&numbers).all_ok());
        let number_of = |name: &String| {
            let hex = |number: &u64| keys(&[*number])[0].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
            *numbers.iter().find(|number| name.ends_with(&hex(number))).unwrap()
        };
        let data: Vec<Vec<u8>> = names.iter().map(|name| bench.pool.pattern(number_of(name))).collect();
        let codes = official.batch_put(&names, &data);
        assert!(codes.iter().all(|code| *code == 0), "{mode:?}: {codes:?}\n{}", bench.logs());
        let (codes, back) = official.batch_get(&names, bytes as usize);
        assert!(codes.iter().all(|code| *code == bytes as i64) && back == data, "{mode:?}: {codes:?}");
        assert!(bench.has_all(&numbers), "{mode:?}\n{}", bench.logs());
        // Single objects of all sizes.
        for size in [1, 7, 4096, 1 << 20, 32 << 20] {
            let data: Vec<u8> = (0..size).map(|at: usize| (at * 31 + at / 251) as u8).collect();
            let name = format!("single {mode:?} {size}");
            assert_eq!(official.put(&name, &data), 0, "{name}");
            assert!(official.get(&name) == data, "{name}");
        }
    }
}

#[test]
fn pages_of_64_mib_pass() {
    let master = Master::start(&[]);
    let mut official = Official::start(&master, Mode::Peer, 512 << 20);
    let bench = Bench::new(&master.config(Mode::Peer, 0), pool(3, 64 << 20));
    let set = bench.set(&[1, 2, 3]);
    assert!(set.all_ok(), "{set:?}\n{}", bench.logs());
    assert!(bench.has_all(&[1, 2, 3]), "{}", bench.logs());
    let name = master.keys().remove(0);
    let found = official.get(&name);
    assert!((1..=3).any(|number| found == bench.pool.pattern(number)), "{name}");
}

/// What an object of a page is called.
fn name_of(names: &[String], page: u64, number: u64) -> String {
    let hex = |number: u64| keys(&[number])[0].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let prefix = names.iter().find_map(|name| name.strip_suffix(&hex(page))).expect("names end in the key");
    format!("{prefix}{}", hex(number))
}

#[test]
fn objects_of_1_byte_to_64_mib_put_by_either_side_alone_or_in_batches_are_read_by_the_other() {
    for mode in MODES {
        // Peers of one master all find one another in the same way.
        let master = Master::start(&[]);
        let mut official = Official::start(&master, mode, 320 << 20);
        for bytes in [1, 100, 64 << 10, (1 << 20) + 7, 64 << 20] {
            let what = format!("{mode:?} {bytes}");
            let count = if bytes < 64 << 20 { 17 } else { 2 };
            // Objects lie in the memory of either side.
            let bench = Bench::of_model(&master.config(mode, 320 << 20), &what, pool(count, bytes));
            let size = bytes as usize;
            let (batch, single): (Vec<u64>, u64) = ((0..count).collect(), 1000);
            let before = master.keys();
            let set = bench.set(&batch);
            assert!(set.all_ok(), "{what}: {set:?}\n{}", bench.logs());
            let new: Vec<String> = master.keys().into_iter().filter(|name| !before.contains(name)).collect();
            let name = |number: u64| name_of(&new, 0, number);
            let names: Vec<String> = batch.iter().map(|number| name(*number)).collect();
            let (codes, found) = official.batch_get(&names, size);
            assert!(codes.iter().all(|code| *code == bytes as i64), "{what}: {codes:?}");
            assert!(batch.iter().zip(&found).all(|(number, found)| *found == bench.pool.pattern(*number)), "{what}");
            assert!(bench.set(&[single]).all_ok(), "{what}\n{}", bench.logs());
            assert!(official.get(&name(single)) == bench.pool.pattern(single), "{what}: ours alone");
            assert!(bench.remove(&batch).all_ok() && bench.remove(&[single]).all_ok());
            assert_eq!(official.exists(&names), vec![0; names.len()], "{what}: removed by us");

            let data: Vec<Vec<u8>> = batch.iter().map(|number| bench.pool.pattern(*number)).collect();
            let codes = official.batch_put(&names, &data);
            assert!(codes.iter().all(|code| *code == 0), "{what}: {codes:?}\n{}{}", bench.logs(), official.log());
            assert!(bench.has_all(&batch), "{what}: theirs\n{}", bench.logs());
            assert_eq!(official.put(&name(single), &bench.pool.pattern(single)), 0, "{what}");
            assert!(bench.has_all(&[single]), "{what}: theirs alone\n{}", bench.logs());
            for name in names.iter().chain([&name(single)]) {
                assert_eq!(official.remove(name, true), 0, "{what}");
            }
            assert_eq!(bench.prefix(&batch), 0, "{what}: removed by them");
            bench.store.close().unwrap();
        }
    }
}

#[test]
fn what_official_clients_remove_is_gone_and_leases_keep_it_until_force_is_used() {
    let master = Master::start(&["--default_kv_lease_ttl=60000"]);
    let bench = Bench::new(&master.config(Mode::Peer, 64 << 20), pool(8, 10_000));
    let mut official = Official::start(&master, Mode::Peer, 64 << 20);
    let numbers: Vec<u64> = (0..8).collect();
    assert!(bench.set(&numbers).all_ok());
    let names = master.keys();
    // The question for the names has given leases.
    assert_eq!(official.remove(&names[0], false), -706);
    assert_eq!(official.remove_all(false), 0);
    assert!(bench.has_all(&numbers), "leases keep them");
    assert_eq!(official.remove(&names[0], true), 0);
    assert_eq!(bench.which(&numbers).iter().filter(|there| !**there).count(), 1);
    assert_eq!(official.remove_all(true), 7);
    assert_eq!((bench.which(&numbers), bench.prefix(&numbers)), (vec![false; 8], 0));
    // The store goes on, empty.
    assert!(bench.set(&numbers).all_ok() && bench.has_all(&numbers), "{}", bench.logs());
    assert_eq!(official.exists(&names), vec![1; 8]);
}
