//! The file plugin beside fio on the same disk.

use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use kvdock_plugin_api::mock::{Instance, MockHost, MockPool, Options, Part, PoolSpec, identity, key};
use kvdock_tests::prompt::Random;
use kvdock_tests::{paths, storage};
use rustix::fs::Advice;

use crate::fio::{Direction, Job};
use crate::row::{Better, Goal, Report, Row};
use crate::sample::{Rounds, Turns, side_by_side};
use crate::sglang::{FileBackend, MISSING};
use crate::{Bench, store};

/// Bytes that one sample moves, unless a single call is more.
const SAMPLE: u64 = 128 << 20;
/// The same where each batch of small pages is made durable, which takes much longer a byte.
const SMALL_SAMPLE: u64 = 16 << 20;
/// Bytes of a page that is read while it is in the page cache, and pages of a call.
const WARM: (u64, u64) = (1 << 20, 32);

/// Adds the rows.
///
/// # Errors
/// When a side can't be measured.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    for (kib, batch) in [(1024, 32), (1024, 128), (4096, 32), (4096, 128), (64, 32), (64, 128)] {
        let size = if kib < 1024 { format!("{kib} KiB") } else { format!("{} MiB", kib / 1024) };
        // Small pages are compared with fio doing the same work: durable after each batch.
        let small = kib < 256;
        let peer = if small { "fio, synced after each batch" } else { "fio" };
        let write = format!("file plugin, durable write, pages of {size}, batch {batch} (MB/s), peer {peer}");
        let read = format!("file plugin, cold read, pages of {size}, batch {batch} (MB/s), peer fio");
        let wanted = [bench.wants(&write), bench.wants(&read)];
        let beside = small && sglang_names(&size, batch).iter().any(|name| bench.wants(name));
        if wanted == [false, false] && !beside {
            continue;
        }
        let shape = Shape { page_bytes: kib * 1024, batch, sync_every: if small { batch as u32 } else { 0 } };
        let mut sides = Sides::new(bench, shape)?;
        for ((name, direction), wanted) in [(write, Direction::Write), (read, Direction::Read)].into_iter().zip(wanted)
        {
            // A read needs what a write left, also when only the read is wanted.
            // What a shared disk gives moves by a third within seconds.
            let rounds = if wanted { bench.rounds.longer(shape.longer()) } else { bench.rounds.at_most(1) };
            let turns = sides.measure(direction, rounds)?.in_units_of(1e6);
            if wanted {
                let (better, goal) = (Better::More, Goal::Ratio(0.9));
                report.add(Row::new(name, turns, better, goal))?;
            }
        }
        if beside {
            sides.beside_sglang(bench, report, sglang_names(&size, batch))?;
        }
        sides.clean_up()?;
    }
    let warm = "file plugin, warm read, pages of 1 MiB, batch 32 (MB/s), peer one-thread memory copy";
    if bench.wants(warm) {
        let mut sides = Sides::new(bench, Shape { page_bytes: WARM.0, batch: WARM.1, sync_every: 0 })?;
        sides.write()?;
        let bytes = sides.sample() as usize;
        let (source, mut target) = (vec![3u8; bytes], vec![2u8; bytes]);
        let copy = || {
            let start = Instant::now();
            target.copy_from_slice(black_box(&source));
            black_box(&mut target);
            Ok(bytes as f64 / start.elapsed().as_secs_f64())
        };
        let turns = side_by_side(bench.rounds, || sides.read(true), copy)?.in_units_of(1e6);
        let (better, goal) = (Better::More, Goal::Ratio(0.5));
        report.add(Row::new(warm, turns, better, goal))?;
        sides.clean_up()?;
    }
    Ok(())
}

fn sglang_names(size: &str, batch: u64) -> [String; 2] {
    ["durable write", "cold read"].map(|what| {
        format!("file plugin, {what}, pages of {size}, batch {batch} (MB/s), peer SGLang's file backend, which syncs nothing")
    })
}

/// What is moved, and how.
#[derive(Clone, Copy)]
struct Shape {
    page_bytes: u64,
    /// Pages of a call.
    batch: u64,
    /// After how many pages fio syncs; 0 for once at the end.
    sync_every: u32,
}

impl Shape {
    /// How many times as long as another row one of these takes: a sample is one call at least.
    fn longer(self) -> u32 {
        if self.page_bytes * self.batch > SAMPLE / 2 { 3 } else { 2 }
    }
}

struct Sides {
    store: Instance,
    pool: MockPool,
    folder: std::path::PathBuf,
    file: std::path::PathBuf,
    shape: Shape,
    /// Calls that have stored pages.
    written: u64,
}

impl Sides {
    fn new(bench: &Bench, shape: Shape) -> Result<Self> {
        let Shape { page_bytes, batch, .. } = shape;
        let folder = bench.scratch.join(format!("pages-{page_bytes}"));
        let file = bench.scratch.join(format!("fio-{page_bytes}"));
        let pool = MockPool::new(PoolSpec::bytes(0, "kv", batch, &[page_bytes]));
        let mut random = Random::new(page_bytes);
        for page in 0..batch {
            let bytes: Vec<u8> = (0..page_bytes / 8).flat_map(|_| random.number().to_le_bytes()).collect();
            pool.write(page as u32, &bytes);
        }
        let table = store::load(&paths::file_plugin())?;
        let config = serde_json::json!({"dir": folder, "min_free_bytes": 0}).to_string();
        let store = MockHost::new()
            .attach(table, &config, &identity("bench"), &[&pool])
            .map_err(|error| anyhow!("can't attach the file plugin: {error}"))?;
        Ok(Self { store, pool, folder, file, shape, written: 0 })
    }

    /// Bytes a second of both sides.
    fn measure(&mut self, direction: Direction, rounds: Rounds) -> Result<Turns> {
        let (file, Shape { page_bytes, batch, sync_every }) = (self.file.clone(), self.shape);
        let job =
            Job { direction, file: &file, block: page_bytes, total: self.sample(), depth: batch as u32, sync_every };
        match direction {
            Direction::Write => side_by_side(rounds, || self.write(), || job.run()),
            Direction::Read => side_by_side(rounds, || self.read(false), || job.run()),
        }
    }

    fn beside_sglang(&mut self, bench: &Bench, report: &mut Report, names: [String; 2]) -> Result<()> {
        let folder = bench.scratch.join("sglang");
        let Some(mut theirs) = FileBackend::open(&folder, self.shape.page_bytes, self.shape.batch)? else {
            return names.iter().try_for_each(|name| report.skip(name, MISSING));
        };
        let (calls, sample) = (self.calls(), self.sample() as f64);
        let [write, read] = names;
        let mut row = |name, turns: Turns| {
            let (better, goal) = (Better::More, Goal::Ratio(3.0));
            report.add(Row::new(name, turns.in_units_of(1e6), better, goal))
        };
        row(write, side_by_side(bench.rounds, || self.write(), || Ok(sample / theirs.put(calls)?))?)?;
        let theirs = || {
            drop_from_page_cache(&folder)?;
            Ok(sample / theirs.get(calls)?)
        };
        row(read, side_by_side(bench.rounds, || self.read(false), theirs)?)?;
        std::fs::remove_dir_all(&folder).with_context(|| format!("can't remove {}", folder.display()))
    }

    /// Calls of a sample.
    fn calls(&self) -> u64 {
        let sample = if self.shape.sync_every > 0 { SMALL_SAMPLE } else { SAMPLE };
        (sample / (self.shape.page_bytes * self.shape.batch)).max(1)
    }

    /// Bytes of a sample.
    fn sample(&self) -> u64 {
        self.calls() * self.shape.page_bytes * self.shape.batch
    }

    fn parts(&self, call: u64) -> [Part; 1] {
        let batch = self.shape.batch;
        let keys: Vec<_> = (call * batch..(call + 1) * batch).map(key).collect();
        let pages: Vec<u32> = (0..batch as u32).collect();
        [Part::new(&self.pool, &keys, &pages)]
    }

    /// Removes what was written.
    fn clean_up(self) -> Result<()> {
        let Sides { store, folder, file, .. } = self;
        store.close().map_err(|error| anyhow!("can't close the file plugin: {error}"))?;
        std::fs::remove_dir_all(&folder).with_context(|| format!("can't remove {}", folder.display()))?;
        // fio has not run where only the page cache was read.
        let _ = std::fs::remove_file(file);
        Ok(())
    }

    /// Stores new pages. Those of the sample before are removed, so that the disk does not fill up.
    fn write(&mut self) -> Result<f64> {
        let calls = self.calls();
        for call in self.written.saturating_sub(calls)..self.written {
            let outcome = self.store.remove(&Options::default(), &self.parts(call));
            ensure!(outcome.all_ok(), "not all pages were removed: {outcome:?}");
        }
        let batches: Vec<_> = (self.written..self.written + calls).map(|call| self.parts(call)).collect();
        self.written += calls;
        let start = Instant::now();
        for parts in &batches {
            let outcome = self.store.set(&Options::default(), parts);
            ensure!(outcome.all_ok(), "not all pages were stored: {outcome:?}");
        }
        Ok(self.sample() as f64 / start.elapsed().as_secs_f64())
    }

    /// Reads the pages that were stored last, with none of them in the page cache unless `warm`.
    fn read(&mut self, warm: bool) -> Result<f64> {
        let batches: Vec<_> = (self.written - self.calls()..self.written).map(|call| self.parts(call)).collect();
        if !warm {
            drop_from_page_cache(&self.folder)?;
        }
        let start = Instant::now();
        for parts in &batches {
            let outcome = self.store.get(&Options::default(), parts);
            ensure!(outcome.all_ok(), "not all pages came back: {outcome:?}");
        }
        Ok(self.sample() as f64 / start.elapsed().as_secs_f64())
    }
}

/// Makes the kernel forget the contents of all files below `folder`.
///
/// # Errors
/// When a file can't be opened or synced.
pub fn drop_from_page_cache(folder: &Path) -> Result<()> {
    for path in storage::files(folder) {
        let file = match std::fs::File::open(&path) {
            Ok(file) => file,
            // What a store keeps beside its pages may go at any time.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error).with_context(|| format!("can't open {}", path.display())),
        };
        // Pages that are not on the disk yet would stay.
        file.sync_data().with_context(|| format!("can't sync {}", path.display()))?;
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed)
            .with_context(|| format!("can't drop {} from the page cache", path.display()))?;
    }
    Ok(())
}
