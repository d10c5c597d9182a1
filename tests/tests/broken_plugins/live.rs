//! Each fault for running servers does what its name says.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use kvdock::plugin::inspect;
use kvdock::plugin::library::load;
use kvdock_plugin_api::mock::{Instance, MockHost, MockPool, Options, Part, PoolSpec, Query, identity, key};
use kvdock_plugin_api::v0_1::BackendTable;
use kvdock_plugin_api::{ClearScope, Error, ErrorKind, HealthState, PageStatus, Result};
use kvdock_tests::broken::{self, Broken};

fn folder() -> tempfile::TempDir {
    // Mode 0700, as a plugin's folder should be.
    tempfile::tempdir().unwrap()
}

/// The table of the plugin with a fault.
fn table(folder: &Path, fault: &str) -> &'static BackendTable {
    // The mapping outlives the last holder.
    load(&broken::plugin(folder, "broken", fault), None).unwrap().table().unwrap()
}

fn pool() -> MockPool {
    MockPool::new(PoolSpec::bytes(0, "kv", 16, &[640, 384]))
}

fn attach(fault: &str, pool: &MockPool) -> Result<Instance> {
    MockHost::new().attach(table(folder().path(), fault), "{}", &identity("m"), &[pool])
}

fn parts(pool: &MockPool, numbers: &[u32]) -> [Part; 1] {
    let keys: Vec<_> = numbers.iter().map(|number| key(u64::from(*number))).collect();
    [Part::new(pool, &keys, numbers)]
}

/// An instance with four pages stored.
fn with_pages(fault: &str) -> (Instance, MockPool, [Part; 1]) {
    let pool = pool();
    (0..4).for_each(|page| pool.fill(page, u64::from(page)));
    let store = attach(fault, &pool).unwrap();
    let parts = parts(&pool, &[0, 1, 2, 3]);
    assert!(store.set(&Options::default(), &parts).all_ok());
    (0..4).for_each(|page| pool.wipe(page));
    (store, pool, parts)
}

#[test]
fn the_name_and_the_note_of_a_copy_can_be_changed() {
    let folder = folder();
    let long = "a-name-that-is-longer-than-the-one-of-the-plugin";
    let path = Broken::new()
        .fault("hang_in_get")
        .name(long)
        .note(|note| note["capabilities"]["remove"] = false.into())
        .write(folder.path());
    assert_eq!(path, folder.path().join(format!("lib{long}.so")));
    let info = inspect(&path).unwrap();
    assert_eq!(info.note.name, long);
    assert!(!info.note.capabilities.remove && info.note.capabilities.ranges);
    assert!(info.note.description.starts_with("A right storage plugin"));
}

#[test]
fn fault_names_are_single_and_fit_the_marker() {
    let names = Broken::new().known_faults();
    assert!(names.len() > 25 && names.iter().all(|name| !name.is_empty()), "{names:?}");
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
    for name in &names {
        let _ = Broken::new().fault(name);
    }
}

#[test]
fn without_a_fault_pages_come_back() {
    let (store, pool, parts) = with_pages("none");
    assert!(store.get(&Options::default(), &parts).all_ok());
    assert!((0..4).all(|page| pool.holds(page, u64::from(page))));
    assert!(store.remove(&Options::default(), &parts).all_ok());
    assert_eq!(store.get(&Options::default(), &parts).statuses, [[PageStatus::Missing; 4]]);
    store.close().unwrap();
}

#[test]
fn each_call_panics_where_its_fault_says() {
    let panicked = |error: Error, call: &str| {
        assert!(error.panicked && error.message.contains(&format!("planted: a panic in {call}")), "{error}");
    };
    let pool = pool();
    for (fault, call) in [
        ("panic_in_open", "open"),
        ("panic_in_register", "register_mem_pool_host"),
        ("panic_in_pools_ready", "pools_ready"),
    ] {
        panicked(attach(fault, &pool).unwrap_err(), call);
    }
    let options = Options::default();
    let parts = parts(&pool, &[1]);
    let store = attach("panic_in_exists", &pool).unwrap();
    panicked(store.exists(&options, &[key(1)], &[Query::of(&pool)]).unwrap_err(), "batch_exists");
    panicked(attach("panic_in_get", &pool).unwrap().get(&options, &parts).result.unwrap_err(), "batch_get");
    panicked(attach("panic_in_set", &pool).unwrap().set(&options, &parts).result.unwrap_err(), "batch_set");
    panicked(attach("panic_in_remove", &pool).unwrap().remove(&options, &parts).result.unwrap_err(), "batch_remove");
    let clear = attach("panic_in_clear", &pool).unwrap().clear(&options, ClearScope::Namespace);
    panicked(clear.unwrap_err(), "clear");
    panicked(attach("panic_in_stats", &pool).unwrap().stats().unwrap_err(), "stats");
    let store = attach("panic_in_health", &pool).unwrap();
    assert_eq!(store.health().unwrap().state, HealthState::Ok, "the first one answers");
    panicked(store.health().unwrap_err(), "health");
    panicked(attach("panic_in_flush", &pool).unwrap().flush(&options).unwrap_err(), "flush");
    panicked(attach("panic_in_close", &pool).unwrap().close().unwrap_err(), "close");
}

#[test]
fn wrong_bytes_come_as_good_ones() {
    for fault in ["garbage_get", "half_get", "swapped_get", "nothing_get"] {
        let (store, pool, parts) = with_pages(fault);
        let got = store.get(&Options::default(), &parts);
        assert!(got.all_ok(), "{fault}: {got:?}");
        let right = (0..4).filter(|page| pool.holds(*page, u64::from(*page))).count();
        assert_eq!(right, usize::from(fault == "swapped_get"), "{fault}: pages with the right bytes");
    }
}

#[test]
fn late_calls_are_late_and_slow_ones_slow() {
    let options = Options { deadline: Some(Duration::from_millis(100)), ..Options::default() };
    let pool = pool();
    let store = attach("late_set", &pool).unwrap();
    let started = Instant::now();
    assert!(store.set(&options, &parts(&pool, &[1])).all_ok());
    assert!(started.elapsed() >= Duration::from_millis(1000));
    let (store, pool, parts) = with_pages("late_get");
    let started = Instant::now();
    assert!(store.get(&options, &parts).all_ok() && pool.holds(3, 3));
    assert!(started.elapsed() >= Duration::from_millis(1000));
    let (store, _, parts) = with_pages("slow_get");
    let error = store.get(&options, &parts).result.unwrap_err();
    assert_eq!(error.kind, ErrorKind::TimedOut);
}

#[test]
fn errors_say_whether_a_retry_helps() {
    let pool = pool();
    let (options, parts) = (Options::default(), parts(&pool, &[1]));
    let store = attach("error_retryable_then_ok", &pool).unwrap();
    assert!(store.set(&options, &parts).result.unwrap_err().retryable);
    assert!(store.set(&options, &parts).all_ok());
    assert!(store.get(&options, &parts).result.unwrap_err().retryable);
    assert!(store.get(&options, &parts).all_ok());
    assert_eq!(store.stats().unwrap().failures, 2);
    for (fault, retryable) in [("error_always", true), ("error_fatal", false)] {
        let store = attach(fault, &pool).unwrap();
        for _ in 0..3 {
            let error = store.get(&options, &parts).result.unwrap_err();
            assert_eq!((error.kind, error.retryable), (ErrorKind::Unavailable, retryable));
        }
    }
    let refused = attach("refuse_sets", &pool).unwrap().set(&options, &parts);
    assert_eq!(refused.statuses, [[PageStatus::Refused]]);
    assert_eq!(attach("health_failed", &pool).unwrap().health().unwrap().state, HealthState::Failed);
}

#[test]
fn hanging_calls_do_not_return() {
    for fault in ["hang_in_open", "hang_in_close", "hang_in_exists", "hang_in_get", "hang_in_set"] {
        let (done, returned) = std::sync::mpsc::channel();
        // It never ends; the process does not wait for it.
        std::thread::spawn(move || {
            let pool = pool();
            let store = attach(fault, &pool).unwrap();
            match fault {
                "hang_in_exists" => drop(store.exists(&Options::default(), &[key(1)], &[Query::of(&pool)])),
                "hang_in_get" => drop(store.get(&Options::default(), &parts(&pool, &[1]))),
                "hang_in_set" => drop(store.set(&Options::default(), &parts(&pool, &[1]))),
                _ => drop(store),
            }
            done.send(()).unwrap();
        });
        assert!(returned.recv_timeout(Duration::from_millis(300)).is_err(), "{fault} returned");
    }
}

#[test]
fn what_was_stored_outlives_an_instance_with_a_folder() {
    let (plugins, pages) = (folder(), folder());
    let table = table(plugins.path(), "none");
    let config = serde_json::json!({ "dir": pages.path() }).to_string();
    let pool = pool();
    let attach = |model: &str| MockHost::new().attach(table, &config, &identity(model), &[&pool]).unwrap();
    pool.fill(5, 5);
    let parts = parts(&pool, &[5]);
    let store = attach("a model");
    assert!(store.set(&Options::default(), &parts).all_ok());
    store.close().unwrap();
    pool.wipe(5);
    let other = attach("another model");
    assert_eq!(other.get(&Options::default(), &parts).statuses, [[PageStatus::Missing]], "another namespace");
    let store = attach("a model");
    assert!(store.get(&Options::default(), &parts).all_ok() && pool.holds(5, 5));
    other.clear(&Options::default(), ClearScope::Everything).unwrap();
    assert_eq!(store.stats().unwrap().pages, 0);
}
