//! The plugin as kvdock sees it, without kvdock: `mock` is a host that has pools and no model, and
//! `conformance` the rules behind `kvdock plugin check`.

use std::path::Path;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use kvdock_plugin_api::conformance::Suite;
use kvdock_plugin_api::mock::{
    Instance, MockHost, MockPool, Options, Part, PoolSpec, Query, identity, key, table_of,
};

use super::*;

/// Eight pages of two pieces each, and kvdock's seal.
fn pool() -> MockPool {
    MockPool::new(PoolSpec::bytes(0, "kv", 8, &[4096, 4096]).with_seal(64))
}

fn attach(dir: &Path, more: &str, model: &str, pool: &MockPool) -> Result<Instance> {
    let config = format!(r#"{{"dir": {:?}{more}}}"#, dir.display().to_string());
    MockHost::new().attach(
        table_of(kvdock_plugin_entry)?,
        &config,
        &identity(model),
        &[pool],
    )
}

#[test]
fn it_keeps_the_contract() {
    Suite::new(kvdock_plugin_entry, &KVDOCK_NOTE_SOURCE)
        .run()
        .assert_passed();
}

#[test]
fn a_page_comes_back_after_a_restart() -> Result<()> {
    let (dir, pool, options) = (tempfile::tempdir().unwrap(), pool(), Options::default());
    let store = attach(dir.path(), "", "a model", &pool)?;
    pool.fill(3, 42);
    assert!(
        store
            .set(&options, &[Part::new(&pool, &[key(1)], &[3])])
            .all_ok()
    );
    store.close()?;

    let store = attach(dir.path(), "", "a model", &pool)?;
    assert_eq!(
        store
            .exists(&options, &[key(1), key(2)], &[Query::of(&pool)])?
            .longest(),
        1
    );
    let got = store.get(&options, &[Part::new(&pool, &[key(1), key(2)], &[5, 6])]);
    assert_eq!(got.statuses, [[PageStatus::Ok, PageStatus::Missing]]);
    assert!(pool.holds(5, 42));
    assert_eq!(
        (store.stats()?.pages, store.stats()?.bytes_used),
        (1, pool.page_bytes() as u64)
    );
    store.close()
}

#[test]
fn another_model_neither_sees_nor_clears_it() -> Result<()> {
    let (dir, pool, options) = (tempfile::tempdir().unwrap(), pool(), Options::default());
    let one = attach(dir.path(), "", "one", &pool)?;
    let two = attach(dir.path(), "", "two", &pool)?;
    assert!(
        one.set(&options, &[Part::new(&pool, &[key(1)], &[0])])
            .all_ok()
    );
    assert_eq!(
        two.exists(&options, &[key(1)], &[Query::of(&pool)])?
            .longest(),
        0
    );
    two.clear(&options, ClearScope::Namespace)?;
    assert_eq!(one.stats()?.pages, 1);
    one.clear(&options, ClearScope::Namespace)?;
    assert_eq!(one.stats()?.pages, 0);
    Ok(())
}

#[test]
fn a_full_store_refuses_and_takes_again_what_is_freed() -> Result<()> {
    let (dir, pool, options) = (tempfile::tempdir().unwrap(), pool(), Options::default());
    let store = attach(dir.path(), r#", "max_bytes": 10000"#, "a model", &pool)?;
    let set = store.set(&options, &[Part::new(&pool, &[key(1), key(2)], &[0, 1])]);
    assert_eq!(set.statuses, [[PageStatus::Ok, PageStatus::Refused]]);
    let removed = store.remove(&options, &[Part::new(&pool, &[key(1), key(9)], &[])]);
    assert_eq!(removed.statuses, [[PageStatus::Ok, PageStatus::Missing]]);
    assert!(
        store
            .set(&options, &[Part::new(&pool, &[key(2)], &[1])])
            .all_ok()
    );
    Ok(())
}

#[test]
fn a_file_that_was_cut_is_corrupt_and_can_be_stored_again() -> Result<()> {
    let (dir, pool, options) = (tempfile::tempdir().unwrap(), pool(), Options::default());
    let store = attach(dir.path(), "", "a model", &pool)?;
    let page = [Part::new(&pool, &[key(1)], &[0])];
    assert!(store.set(&options, &page).all_ok());
    let namespace = std::fs::read_dir(dir.path())
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let file = std::fs::read_dir(namespace.join("kv"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    std::fs::write(&file, "half a page").unwrap();
    assert_eq!(
        store
            .exists(&options, &[key(1)], &[Query::of(&pool)])?
            .longest(),
        0
    );
    assert_eq!(store.get(&options, &page).statuses, [[PageStatus::Corrupt]]);
    assert!(store.set(&options, &page).all_ok());
    assert!(store.get(&options, &page).all_ok());
    Ok(())
}

#[test]
fn a_call_that_is_late_or_cancelled_ends() -> Result<()> {
    let (dir, pool) = (tempfile::tempdir().unwrap(), pool());
    let store = attach(dir.path(), "", "a model", &pool)?;
    let page = [Part::new(&pool, &[key(1)], &[0])];
    let late = Options {
        deadline: Some(Duration::ZERO),
        ..Options::default()
    };
    assert_eq!(
        store.set(&late, &page).result.unwrap_err().kind,
        ErrorKind::TimedOut
    );
    let cancelled = Options {
        cancel: Some(&AtomicU32::new(1)),
        ..Options::default()
    };
    assert_eq!(
        store.get(&cancelled, &page).result.unwrap_err().kind,
        ErrorKind::Cancelled
    );
    Ok(())
}
