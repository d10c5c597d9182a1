//! Which of many stored pages are there: the file plugin beside a `stat` for each key.

use std::fs::File;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use kvdock_plugin_api::mock::{Instance, MockHost, MockPool, Options, Part, PoolSpec, Query, identity, key};
use kvdock_tests::paths;
use kvdock_tests::prompt::Random;

use crate::row::{Better, Goal, Report, Row};
use crate::sample::side_by_side;
use crate::{Bench, store};

/// Pages that are stored.
const PAGES: u64 = 1_000_000;
/// Pages of a call that stores them.
const FILL: u64 = 4096;
/// Bytes of a page. Such small ones lie in packs; a million that have files of their own would be a quarter of a terabyte.
const PAGE_BYTES: u64 = 64;
/// Keys of a call.
const KEYS: u64 = 128;
/// Calls of a sample, each for other keys.
const CALLS: usize = 50;
/// Files among which those that are asked for lie. What a `stat` of a name that the kernel knows costs does not depend on their number.
const FILES: u64 = 100_000;

/// Adds the row.
///
/// # Errors
/// When a page is not found.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let name = format!("file plugin, batch_exists of {KEYS} keys, {PAGES} pages stored (us), peer a stat for each key");
    if !bench.wants(&name) {
        return Ok(());
    }
    let pool = MockPool::new(PoolSpec::bytes(0, "kv", FILL, &[PAGE_BYTES]));
    let folder = bench.scratch.join("lookup");
    let config = serde_json::json!({"dir": folder, "min_free_bytes": 0, "durability": "none"}).to_string();
    let store = MockHost::new()
        .attach(store::load(&paths::file_plugin())?, &config, &identity("bench"), &[&pool])
        .map_err(|error| anyhow!("can't attach the file plugin: {error}"))?;
    fill(&store, &pool)?;
    let files = make_files(&bench.scratch.join("lookup-files"))?;
    let mut random = Random::new(128);
    // A chain of keys is asked for at a time, as a prompt does it.
    let asked: Vec<u64> = (0..CALLS).map(|_| random.below(PAGES - KEYS)).collect();
    let ours = || {
        let calls: Vec<Vec<_>> = asked.iter().map(|first| (*first..first + KEYS).map(key).collect()).collect();
        let start = Instant::now();
        for keys in &calls {
            let found =
                store.exists(&Options::default(), keys, &[Query::of(&pool)]).map_err(|error| anyhow!("{error}"))?;
            ensure!(found.longest() == KEYS as usize, "{} of {KEYS} keys are there", found.longest());
        }
        Ok(start.elapsed().as_secs_f64() * 1e6 / CALLS as f64)
    };
    let peer = || {
        let start = Instant::now();
        for first in &asked {
            for number in *first..first + KEYS {
                let path = files.get((number % FILES) as usize).context("a file for each key")?;
                std::fs::metadata(path).with_context(|| format!("can't look at {}", path.display()))?;
            }
        }
        Ok(start.elapsed().as_secs_f64() * 1e6 / CALLS as f64)
    };
    let turns = side_by_side(bench.rounds.times(8), ours, peer)?;
    report.add(Row::new(name, turns, Better::Less, Goal::Ratio(3.0)))?;
    store.close().map_err(|error| anyhow!("can't close the file plugin: {error}"))
}

fn fill(store: &Instance, pool: &MockPool) -> Result<()> {
    eprintln!("storing {PAGES} pages for the lookups");
    let mut first = 0;
    while first < PAGES {
        let count = FILL.min(PAGES - first);
        let keys: Vec<_> = (first..first + count).map(key).collect();
        let pages: Vec<u32> = (0..count as u32).collect();
        let outcome = store.set(&Options::default(), &[Part::new(pool, &keys, &pages)]);
        ensure!(outcome.all_ok(), "not all pages were stored: {outcome:?}");
        first += count;
    }
    Ok(())
}

/// Empty files in 256 folders, under names as long as the plugin's.
fn make_files(folder: &std::path::Path) -> Result<Vec<PathBuf>> {
    for number in 0..256 {
        let folder = folder.join(format!("{number:02x}"));
        std::fs::create_dir_all(&folder).with_context(|| format!("can't create {}", folder.display()))?;
    }
    let make = |number: u64| {
        let mut random = Random::new(number);
        let name: String = (0..4).map(|_| format!("{:016x}", random.number())).collect();
        let path = folder.join(name.get(..2).unwrap_or_default()).join(format!("{name}.kv-0123abcd"));
        File::create(&path).with_context(|| format!("can't create {}", path.display()))?;
        Ok(path)
    };
    (0..FILES).map(make).collect()
}
