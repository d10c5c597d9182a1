//! What a call through the boundary costs beside the same code linked in.

use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use kvdock_plugin_api::mock::{Instance, MockHost, MockPool, Options, Part, PoolSpec, Query, identity, key, table_of};
use kvdock_plugin_api::v0_1::{BackendTable, ENTRY_SYMBOL, EntryFn};

use crate::row::{Better, Goal, Report, Row};
use crate::sample::side_by_side;
use crate::{Bench, keys};

/// Calls in one sample.
const CALLS: u32 = 100_000;

/// Adds the rows.
///
/// # Errors
/// When the plugin can't be loaded or called.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let name = "boundary, batch_exists of 1 key (ns), peer the same code linked in";
    if !bench.wants(name) {
        return Ok(());
    }
    let library = kvdock_tests::paths::build().join("examples/libbench_keys.so");
    let loaded = Store::attach(load(&library)?)?;
    let linked = Store::attach(table_of(keys::kvdock_plugin_entry).map_err(|error| anyhow!("{error}"))?)?;
    // More rounds than elsewhere: a few nanoseconds are looked for.
    let (ours, peer) = side_by_side(bench.rounds * 10, || loaded.exists(), || linked.exists())?;
    report.add(Row { name: name.to_owned(), ours, peer, better: Better::Less, goal: Goal::Over(10.0) })
}

/// The table of the plugin in `library`.
///
/// # Errors
/// When it can't be loaded or has no table of this version.
pub fn load(library: &Path) -> Result<&'static BackendTable> {
    ensure!(library.exists(), "{} is missing; `cargo xtask bench` builds it", library.display());
    // SAFETY: the library is one of ours, just built; its constructors do nothing of note.
    let library =
        unsafe { libloading::Library::new(library) }.with_context(|| format!("can't load {}", library.display()))?;
    // SAFETY: a plugin's entry symbol has this type.
    let entry: EntryFn = *unsafe { library.get::<EntryFn>(ENTRY_SYMBOL) }.context("no entry symbol")?;
    // The table is constant data of the library, which therefore stays mapped.
    std::mem::forget(library);
    table_of(entry).map_err(|error| anyhow!("{error}"))
}

struct Store {
    instance: Instance,
    pool: MockPool,
}

impl Store {
    fn attach(table: &'static BackendTable) -> Result<Self> {
        let pool = MockPool::new(PoolSpec::bytes(0, "kv", 1, &[4096]));
        let instance = MockHost::new()
            .attach(table, "{}", &identity("bench"), &[&pool])
            .map_err(|error| anyhow!("can't attach: {error}"))?;
        let stored = instance.set(&Options::default(), &[Part::new(&pool, &[key(1)], &[0])]);
        ensure!(stored.all_ok(), "the key was not stored: {stored:?}");
        Ok(Self { instance, pool })
    }

    /// Nanoseconds of one call.
    fn exists(&self) -> Result<f64> {
        let (keys, queries, options) = ([key(1)], [Query::of(&self.pool)], Options::default());
        let start = Instant::now();
        let mut found = 0;
        for _ in 0..CALLS {
            let answer =
                self.instance.exists(&options, black_box(&keys), &queries).map_err(|error| anyhow!("{error}"))?;
            found += answer.longest();
        }
        let seconds = start.elapsed().as_secs_f64();
        ensure!(found == CALLS as usize, "the key was found in {found} of {CALLS} calls");
        Ok(seconds * 1e9 / f64::from(CALLS))
    }
}
