//! The example in C, built by its own Makefile, loaded and called as a host does it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use kvdock_plugin_api::mock::*;
use kvdock_plugin_api::note::{NOTE_OWNER, NOTE_SECTION, NOTE_TYPE};
use kvdock_plugin_api::v0_1::{self, BackendTable, ENTRY_SYMBOL, EntryFn, PageKey};
use kvdock_plugin_api::{ClearScope, Dtype, ErrorKind, HealthState, MemoryKind, PageStatus};
use object::{Object, ObjectSection};

const LIBRARY: &str = "libkvdock_c_memory.so";

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/c-minimal")
}

/// Builds the example into a fresh folder; warnings are errors.
fn build() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new("make")
        .arg("--always-make")
        .arg("-C")
        .arg(example())
        .arg(format!("OUT={}", folder.path().display()))
        .arg("CFLAGS=-O2 -Wall -Wextra -Werror")
        .output()
        .unwrap_or_else(|error| panic!("make and cc are needed for this test: {error}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    folder
}

/// Builds and maps the example, once. It stays mapped, as a plugin does.
fn load() -> &'static BackendTable {
    static TABLE: OnceLock<&'static BackendTable> = OnceLock::new();
    TABLE.get_or_init(|| {
        let folder = build();
        // SAFETY: the library was built from the sources in the tree; it runs no code when it is mapped.
        let library = unsafe { libloading::Library::new(folder.path().join(LIBRARY)) }.unwrap();
        let library = Box::leak(Box::new(library));
        // SAFETY: the entry has this type in every plugin (see the header).
        let entry: libloading::Symbol<'_, EntryFn> = unsafe { library.get(ENTRY_SYMBOL.as_bytes()) }.unwrap();
        assert_eq!(entry(99), std::ptr::null::<c_void>(), "a version that it does not know");
        let table = table_of(*entry).unwrap();
        assert_eq!((table.size, table.abi_version), (size_of::<BackendTable>() as u64, v0_1::ABI_VERSION));
        table
    })
}

const SHAPE: KvShape = KvShape { pages: 8, page_tokens: 4, layers: 3, heads: 2, head_dim: 8, dtype: Dtype::F16 };

fn keys(numbers: std::ops::Range<u64>) -> Vec<PageKey> {
    numbers.map(key).collect()
}

#[test]
fn pages_of_every_layout_come_back_equal_to_the_byte() {
    let table = load();
    let host = MockHost::new();
    for layout in ["layer_first", "page_first", "page_first_direct", "page_head"] {
        let pool = MockPool::new(PoolSpec::kv(0, "kv", layout, SHAPE).with_seal(64));
        assert!(pool.spec().segments.len() > 2, "several pieces, the last is the seal");
        let store = host.attach(table, "{}", &identity("a model"), &[&pool]).unwrap();
        let options = Options::default();
        let stored = keys(0..3);
        (0..3).for_each(|page| pool.fill(page, u64::from(page) + 1));
        assert!(store.set(&options, &[Part::new(&pool, &stored, &[0, 1, 2])]).all_ok());
        // Again, and from another page: what is stored stays.
        assert!(store.set(&options, &[Part::new(&pool, &stored[..1], &[2])]).all_ok());

        (0..8).for_each(|page| pool.wipe(page));
        let outcome = store.get(&options, &[Part::new(&pool, &keys(0..4), &[7, 6, 5, 4])]);
        assert_eq!(outcome.result, Ok(()));
        let ok = PageStatus::Ok;
        assert_eq!(outcome.statuses, [vec![ok, ok, ok, PageStatus::Missing]]);
        for (page, seed) in [(7, 1), (6, 2), (5, 3)] {
            assert!(pool.holds(page, seed), "{layout}: page {page}");
        }
        assert!(pool.read(4).iter().all(|byte| *byte == 0), "a missing page is not touched");

        let stats = store.stats().unwrap();
        assert_eq!((stats.pages, stats.bytes_used, stats.failures), (3, 3 * pool.page_bytes() as u64, 0));
        store.close().unwrap();
    }
    assert!(host.logs().iter().any(|line| line.message.contains("keeps pages in memory")));
}

#[test]
fn exists_gives_every_restorable_length() {
    let table = load();
    let anchor = MockPool::new(PoolSpec::logical(16));
    let window = MockPool::new(PoolSpec::bytes(1, "swa", 16, &[96, 32]).trailing(2));
    let store = MockHost::new().attach(table, "{}", &identity("a model"), &[&anchor, &window]).unwrap();
    let options = Options::default();
    // Markers for pages 0 to 5; the window pool has 0, 1, 4 and 5.
    assert!(store.set(&options, &[Part::new(&anchor, &keys(0..6), &[0, 1, 2, 3, 4, 5])]).all_ok());
    let some = [key(0), key(1), key(4), key(5)];
    assert!(store.set(&options, &[Part::new(&window, &some, &[0, 1, 2, 3])]).all_ok());

    let queries = [Query::of(&anchor), Query::of(&window)];
    let found = store.exists(&options, &keys(0..7), &queries).unwrap();
    assert_eq!(found.restorable, [true, true, true, false, false, false, true, false]);
    assert_eq!(found.present[1][2], PageStatus::Missing);
    assert_eq!(found.present[1][4], PageStatus::Ok);

    // What the worker holds itself is not asked of the store.
    let mut held = Query::of(&window);
    held.raw.held_pages = 4;
    let found = store.exists(&options, &keys(0..7), &[Query::of(&anchor), held]).unwrap();
    assert_eq!(found.restorable, [true, true, true, true, true, true, true, false]);

    let unknown = Query { raw: v0_1::PoolQuery { pool: 9, ..Query::of(&anchor).raw } };
    let error = store.exists(&options, &keys(0..2), &[unknown]).unwrap_err();
    assert_eq!((error.kind, error.message.as_str()), (ErrorKind::NotFound, "pool 9 is not registered"));
    // Markers carry no bytes.
    assert_eq!(store.stats().unwrap().bytes_used, 4 * 128);
    store.close().unwrap();
}

#[test]
fn pages_are_removed_and_cleared() {
    let table = load();
    let pool = MockPool::new(PoolSpec::bytes(0, "kv", 8, &[64, 64]));
    let store = MockHost::new().attach(table, "{}", &identity("a model"), &[&pool]).unwrap();
    let options = Options::default();
    assert!(store.set(&options, &[Part::new(&pool, &keys(0..4), &[0, 1, 2, 3])]).all_ok());
    let gone = store.remove(&options, &[Part::new(&pool, &[key(1), key(9)], &[])]);
    assert_eq!((gone.result, gone.statuses), (Ok(()), vec![vec![PageStatus::Ok, PageStatus::Missing]]));
    assert_eq!(store.exists(&options, &keys(0..4), &[Query::of(&pool)]).unwrap().longest(), 1);
    assert_eq!(store.stats().unwrap().pages, 3);
    store.flush(&options).unwrap();
    assert_eq!(store.clear(&options, ClearScope::Everything).unwrap_err().kind, ErrorKind::Unsupported);
    store.clear(&options, ClearScope::Namespace).unwrap();
    assert_eq!((store.stats().unwrap().pages, store.stats().unwrap().bytes_used), (0, 0));
    assert_eq!(store.exists(&options, &keys(0..4), &[Query::of(&pool)]).unwrap().longest(), 0);
    store.close().unwrap();
}

#[test]
fn a_full_store_refuses_and_says_so() {
    let table = load();
    let pool = MockPool::new(PoolSpec::bytes(0, "kv", 8, &[64]));
    let store = MockHost::new().attach(table, r#"{"max_pages": 2}"#, &identity("m"), &[&pool]).unwrap();
    assert_eq!(store.health().unwrap().state, HealthState::Ok);
    let outcome = store.set(&Options::default(), &[Part::new(&pool, &keys(0..3), &[0, 1, 2])]);
    let ok = PageStatus::Ok;
    assert_eq!((outcome.result, outcome.statuses), (Ok(()), vec![vec![ok, ok, PageStatus::Refused]]));
    let health = store.health().unwrap();
    assert_eq!((health.state, health.reason.contains("full")), (HealthState::Degraded, true));
    store.close().unwrap();
}

#[test]
fn what_it_cannot_serve_is_refused_with_the_reason() {
    let table = load();
    let host = MockHost::new();
    let refused = |spec: PoolSpec| {
        let pool = MockPool::new(spec);
        host.attach(table, "{}", &identity("m"), &[&pool]).unwrap_err()
    };
    let base = PoolSpec::bytes(0, "kv", 8, &[64]);
    let error = refused(PoolSpec { memory_kind: MemoryKind::Cuda.raw(), ..base.clone() });
    assert_eq!(error.kind, ErrorKind::Unsupported);
    assert!(error.message.contains("memory of kind 2"), "{error}");
    let error = refused(PoolSpec { hit_policy: 77, ..base.clone() });
    assert!(error.message.contains("hit policy 77"), "{error}");

    let anchor = MockPool::new(base);
    let side = MockPool::new(PoolSpec { indices_from_pool: Some(5), ..PoolSpec::bytes(1, "draft", 8, &[64]) });
    let error = host.attach(table, "{}", &identity("m"), &[&anchor, &side]).unwrap_err();
    assert!(error.message.contains("pool draft: it shares the indices of pool 5"), "{error}");
    assert_eq!(host.open(table, r#"{"max_pages":0}"#, &identity("m")).unwrap_err().kind, ErrorKind::InvalidConfig);
}

#[test]
fn a_call_that_is_cancelled_or_late_ends() {
    let table = load();
    let pool = MockPool::new(PoolSpec::bytes(0, "kv", 8, &[64]));
    let store = MockHost::new().attach(table, "{}", &identity("m"), &[&pool]).unwrap();
    let flag = AtomicU32::new(1);
    let parts = [Part::new(&pool, &keys(0..2), &[0, 1])];
    let outcome = store.set(&Options { cancel: Some(&flag), ..Options::default() }, &parts);
    assert_eq!(outcome.result.unwrap_err().kind, ErrorKind::Cancelled);
    let error =
        store.get(&Options { deadline: Some(Duration::ZERO), ..Options::default() }, &parts).result.unwrap_err();
    assert_eq!((error.kind, error.retryable), (ErrorKind::TimedOut, true));
    assert_eq!(store.stats().unwrap().pages, 0);
    store.close().unwrap();
}

#[test]
fn the_note_is_read_without_running_it() {
    let folder = build();
    let bytes = std::fs::read(folder.path().join(LIBRARY)).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let section = file.section_by_name(NOTE_SECTION).expect("a note section");
    let data = section.data().unwrap();
    let word = |at: usize| u32::from_le_bytes(data[at..at + 4].try_into().unwrap());
    assert_eq!((word(0) as usize, word(8)), (NOTE_OWNER.len() + 1, NOTE_TYPE));
    assert_eq!(&data[12..12 + NOTE_OWNER.len()], NOTE_OWNER.as_bytes());
    let len = word(4) as usize;
    assert_eq!(data.len(), 20 + len.next_multiple_of(4), "the section ends where the note does");
    let note: serde_json::Value = serde_json::from_slice(&data[20..20 + len]).unwrap();
    assert_eq!((&note["note"], &note["name"]), (&1.into(), &"c-memory".into()));
    assert_eq!(note["abi"], serde_json::json!(["0.1"]));
    assert_eq!(
        (&note["capabilities"]["remove"], &note["capabilities"]["linker"]),
        (&true.into(), &serde_json::Value::Null)
    );
    assert_eq!(note["config_schema"]["properties"]["max_pages"]["minimum"], 1);
    assert_eq!(note["types"]["0.1"], v0_1::TYPES_TEXT);
    let digest: String = v0_1::TYPES_DIGEST.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(note["types_sha256"]["0.1"], digest);
}
