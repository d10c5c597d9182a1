//! The file plugin beside fio on the same disk.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use kvdock_plugin_api::mock::{Instance, MockHost, MockPool, Options, Part, PoolSpec, identity, key};
use kvdock_tests::prompt::Random;
use kvdock_tests::{paths, storage};
use rustix::fs::Advice;

use crate::fio::{Direction, Job};
use crate::row::{Better, Goal, Report, Row};
use crate::sample::side_by_side;
use crate::{Bench, store};

/// Pages in one call.
const BATCH: u64 = 32;
/// Calls in one sample.
const CALLS: u64 = 8;

/// Adds the rows.
///
/// # Errors
/// When a side can't be measured.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    for kib in [64, 1024, 4096] {
        let size = if kib < 1024 { format!("{kib} KiB") } else { format!("{} MiB", kib / 1024) };
        // Small pages are compared with fio doing the same work: durable after each batch.
        let sync_every = if kib < 256 { BATCH as u32 } else { 0 };
        let peer = if sync_every == 0 { "fio" } else { "fio, synced after each batch" };
        let write = format!("file plugin, write, pages of {size}, batch {BATCH} (MB/s), peer {peer}");
        let read = format!("file plugin, cold read, pages of {size}, batch {BATCH} (MB/s), peer fio");
        if bench.wants(&write) || bench.wants(&read) {
            let mut sides = Sides::new(bench, kib * 1024, sync_every)?;
            for (name, direction) in [(write, Direction::Write), (read, Direction::Read)] {
                // A read needs what a write left, also when only the read is wanted.
                let rounds = if bench.wants(&name) { bench.rounds } else { 1 };
                let (ours, peer) = sides.measure(direction, rounds)?;
                if bench.wants(&name) {
                    let (better, goal) = (Better::More, Goal::Ratio(0.7));
                    report.add(Row { name, ours: ours / 1e6, peer: peer / 1e6, better, goal })?;
                }
            }
        }
    }
    Ok(())
}

struct Sides {
    store: Instance,
    pool: MockPool,
    folder: std::path::PathBuf,
    file: std::path::PathBuf,
    page_bytes: u64,
    sync_every: u32,
    written: u64,
}

impl Sides {
    fn new(bench: &Bench, page_bytes: u64, sync_every: u32) -> Result<Self> {
        let folder = bench.scratch.join(format!("pages-{page_bytes}"));
        let file = bench.scratch.join(format!("fio-{page_bytes}"));
        let pool = MockPool::new(PoolSpec::bytes(0, "kv", BATCH, &[page_bytes]));
        let mut random = Random::new(page_bytes);
        for page in 0..BATCH {
            let bytes: Vec<u8> = (0..page_bytes / 8).flat_map(|_| random.number().to_le_bytes()).collect();
            pool.write(page as u32, &bytes);
        }
        let table = store::load(&paths::file_plugin())?;
        let config = serde_json::json!({"dir": folder, "min_free_bytes": 0}).to_string();
        let store = MockHost::new()
            .attach(table, &config, &identity("bench"), &[&pool])
            .map_err(|error| anyhow!("can't attach the file plugin: {error}"))?;
        Ok(Self { store, pool, folder, file, page_bytes, sync_every, written: 0 })
    }

    /// Bytes a second of both sides.
    fn measure(&mut self, direction: Direction, rounds: usize) -> Result<(f64, f64)> {
        let total = self.page_bytes * BATCH * CALLS;
        let (file, sync_every) = (self.file.clone(), self.sync_every);
        let job = Job { direction, file: &file, block: self.page_bytes, total, depth: BATCH as u32, sync_every };
        match direction {
            Direction::Write => side_by_side(rounds, || self.write(), || job.run()),
            Direction::Read => side_by_side(rounds, || self.read(), || job.run()),
        }
    }

    fn parts(&self, batch: u64) -> [Part; 1] {
        let keys: Vec<_> = (batch * BATCH..(batch + 1) * BATCH).map(key).collect();
        let pages: Vec<u32> = (0..BATCH as u32).collect();
        [Part::new(&self.pool, &keys, &pages)]
    }

    /// Stores new pages.
    fn write(&mut self) -> Result<f64> {
        let batches: Vec<_> = (self.written..self.written + CALLS).map(|batch| self.parts(batch)).collect();
        self.written += CALLS;
        let start = Instant::now();
        for parts in &batches {
            let outcome = self.store.set(&Options::default(), parts);
            ensure!(outcome.all_ok(), "not all pages were stored: {outcome:?}");
        }
        Ok((self.page_bytes * BATCH * CALLS) as f64 / start.elapsed().as_secs_f64())
    }

    /// Reads the pages that were stored last, with none of them in the page cache.
    fn read(&mut self) -> Result<f64> {
        let batches: Vec<_> = (self.written - CALLS..self.written).map(|batch| self.parts(batch)).collect();
        drop_from_page_cache(&self.folder)?;
        let start = Instant::now();
        for parts in &batches {
            let outcome = self.store.get(&Options::default(), parts);
            ensure!(outcome.all_ok(), "not all pages came back: {outcome:?}");
        }
        Ok((self.page_bytes * BATCH * CALLS) as f64 / start.elapsed().as_secs_f64())
    }
}

/// Makes the kernel forget the contents of all files below `folder`.
fn drop_from_page_cache(folder: &Path) -> Result<()> {
    for path in storage::files(folder) {
        let file = std::fs::File::open(&path).with_context(|| format!("can't open {}", path.display()))?;
        // Pages that are not on the disk yet would stay.
        file.sync_data().with_context(|| format!("can't sync {}", path.display()))?;
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)
            .with_context(|| format!("can't drop {} from the page cache", path.display()))?;
    }
    Ok(())
}
