//! Calls of one kind on several threads, timed one by one.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use kvdock_plugin_api::PageStatus;
use kvdock_plugin_api::mock::{Instance, MockPool, Options, Part, Query, key};
use kvdock_plugin_api::v0_1::PageKey;

use super::event::{Kind, Row};
use super::plan::{DEADLINE, Shape};

/// Source of the memory copy: bytes at most, so that it does not fit into a cache near the core.
const COPY_SOURCE_BYTES: u64 = 64 << 20;

/// Times and outcomes of the calls of one thread, or of all.
struct Times {
    histogram: Histogram<u64>,
    start: Instant,
    elapsed: Duration,
    pages: u64,
    refused: u64,
    bad: u64,
    pages_per_second: f64,
}

impl Times {
    fn new() -> Result<Times, String> {
        let histogram = Histogram::new_with_bounds(1, 600_000_000_000, 3).map_err(|error| error.to_string())?;
        Ok(Times {
            histogram,
            start: Instant::now(),
            elapsed: Duration::ZERO,
            pages: 0,
            refused: 0,
            bad: 0,
            pages_per_second: 0.0,
        })
    }

    /// What comes before is preparation and does not count.
    fn begin(&mut self) {
        self.start = Instant::now();
    }

    fn add(&mut self, time: Duration, statuses: &[PageStatus]) {
        self.histogram.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1));
        self.elapsed = self.start.elapsed();
        for status in statuses {
            match status {
                PageStatus::Ok => self.pages += 1,
                PageStatus::Refused => self.refused += 1,
                _ => self.bad += 1,
            }
        }
    }

    fn merge(&mut self, other: &Times) -> Result<(), String> {
        self.histogram.add(&other.histogram).map_err(|error| error.to_string())?;
        self.pages += other.pages;
        self.refused += other.refused;
        self.bad += other.bad;
        if !other.elapsed.is_zero() {
            self.pages_per_second += other.pages as f64 / other.elapsed.as_secs_f64();
        }
        Ok(())
    }

    fn row(&self, call: Kind, shape: Shape, copy: Option<f64>) -> Row {
        let micros = |quantile| self.histogram.value_at_quantile(quantile) as f64 / 1000.0;
        Row {
            call,
            page_bytes: shape.page_bytes,
            batch: shape.batch,
            threads: shape.threads,
            calls: self.histogram.len(),
            pages: self.pages,
            refused: self.refused,
            bad: self.bad,
            pages_per_second: self.pages_per_second,
            of_copy: copy.filter(|copy| *copy > 0.0).map(|copy| self.pages_per_second / copy),
            p50_us: micros(0.5),
            p99_us: micros(0.99),
        }
    }
}

/// Which keys a thread of a shape works on: no two threads, and no two shapes, have one in common.
#[derive(Debug, Clone, Copy)]
pub(super) struct Keys {
    /// Number of the shape.
    pub shape: u64,
}

/// Keys of one call, and the numbers they are made of, which stand at the start of the pages.
struct Batch {
    numbers: Vec<u64>,
    keys: Vec<PageKey>,
}

impl Keys {
    /// The first `batches` batches of a thread.
    fn batches(self, shape: Shape, thread: u32, batches: u64) -> Vec<Batch> {
        let size = u64::from(shape.batch);
        let first = (self.shape << 48) | (u64::from(thread) << 40);
        (0..batches)
            .map(|batch| {
                let numbers: Vec<u64> = (0..size).map(|index| first + batch * size + index).collect();
                Batch { keys: numbers.iter().map(|number| key(*number)).collect(), numbers }
            })
            .collect()
    }
}

/// The instance and the memory that calls are made with.
pub(super) struct Bench<'a> {
    pub instance: &'a Instance,
    pub pool: &'a MockPool,
    pub slice: Duration,
}

impl Bench<'_> {
    /// Runs `body` on each thread of the shape, and adds up what they measured.
    fn on_threads(
        &self,
        shape: Shape,
        body: impl Fn(u32, &mut Times) -> Result<(), String> + Sync,
    ) -> Result<Times, String> {
        let results: Vec<Result<Times, String>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..shape.threads)
                .map(|thread| {
                    let body = &body;
                    scope.spawn(move || {
                        let mut times = Times::new()?;
                        body(thread, &mut times)?;
                        Ok(times)
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| Err(super::panicked(&*panic))))
                .collect()
        });
        let mut all = Times::new()?;
        for times in results {
            all.merge(&times?)?;
        }
        Ok(all)
    }

    /// Copies pages within memory, as a plugin does that keeps them there: from a buffer to pages of the pool.
    pub fn copy(&self, shape: Shape) -> Result<Row, String> {
        let page_bytes = shape.page_bytes as usize;
        let pages = (COPY_SOURCE_BYTES / shape.page_bytes).clamp(1, shape.pages().max(4)) as usize;
        let source = vec![0x5a_u8; pages * page_bytes];
        let times = self.on_threads(shape, |thread, times| {
            let statuses = vec![PageStatus::Ok; shape.batch as usize];
            let mut next = thread as usize;
            let mut copy_batch = || {
                for page in pool_pages(shape, thread) {
                    let from = next % pages * page_bytes;
                    self.pool.write(page, &source[from..from + page_bytes]);
                    next += 1;
                }
            };
            // The first time every page is new to this thread.
            copy_batch();
            let until = Instant::now() + self.slice / 2;
            times.begin();
            while times.histogram.is_empty() || Instant::now() < until {
                let start = Instant::now();
                copy_batch();
                times.add(start.elapsed(), &statuses);
            }
            Ok(())
        })?;
        Ok(times.row(Kind::Copy, shape, None))
    }

    /// Stores new pages, each with bytes of its own. Answers also how many batches each thread stored.
    pub fn set(&self, shape: Shape, keys: Keys, copy: f64) -> Result<(Row, Vec<u64>), String> {
        let stored: Vec<AtomicU64> = (0..shape.threads).map(|_| AtomicU64::new(0)).collect();
        let times = self.on_threads(shape, |thread, times| {
            let pages: Vec<u32> = pool_pages(shape, thread).collect();
            let all = keys.batches(shape, thread, shape.stored_each() / u64::from(shape.batch));
            let until = Instant::now() + self.slice;
            times.begin();
            for batch in &all {
                for (page, number) in pages.iter().zip(&batch.numbers) {
                    self.pool.write_at(*page, 0, &number.to_le_bytes());
                }
                let part = [Part::new(self.pool, &batch.keys, &pages)];
                let start = Instant::now();
                let outcome = self.instance.set(&options(), &part);
                let time = start.elapsed();
                outcome.result.map_err(|error| format!("batch_set: {error}"))?;
                times.add(time, &outcome.statuses[0]);
                stored[thread as usize].fetch_add(1, Ordering::Relaxed);
                // Full: more calls would measure refusals.
                if outcome.statuses[0].contains(&PageStatus::Refused) || Instant::now() >= until {
                    break;
                }
            }
            Ok(())
        })?;
        let stored = stored.into_iter().map(AtomicU64::into_inner).collect();
        Ok((times.row(Kind::Set, shape, Some(copy)), stored))
    }

    /// Asks for the keys that were stored, over and over.
    pub fn exists(&self, shape: Shape, keys: Keys, stored: &[u64]) -> Result<Row, String> {
        let query = [Query::of(self.pool)];
        let times = self.on_threads(shape, |thread, times| {
            self.repeat(shape, keys, stored, thread, times, |batch, times| {
                let start = Instant::now();
                let found = self.instance.exists(&options(), &batch.keys, &query);
                let time = start.elapsed();
                let found = found.map_err(|error| format!("batch_exists: {error}"))?;
                times.add(time, &found.present[0]);
                Ok(())
            })
        })?;
        Ok(times.row(Kind::Exists, shape, None))
    }

    /// Reads the pages that were stored, over and over, and checks that they are the right ones.
    pub fn get(&self, shape: Shape, keys: Keys, stored: &[u64], copy: f64) -> Result<Row, String> {
        let times = self.on_threads(shape, |thread, times| {
            let pages: Vec<u32> = pool_pages(shape, thread).collect();
            self.repeat(shape, keys, stored, thread, times, |batch, times| self.get_once(&pages, batch, times))
        })?;
        Ok(times.row(Kind::Get, shape, Some(copy)))
    }

    /// Reads pages once each: batches of the keys that one thread stored, dealt to the threads of this shape.
    pub fn get_cold(&self, shape: Shape, keys: Keys, range: Range<u64>, copy: f64) -> Result<Row, String> {
        let times = self.on_threads(shape, |thread, times| {
            let pages: Vec<u32> = pool_pages(shape, thread).collect();
            let all = keys.batches(shape, 0, range.end);
            let until = Instant::now() + self.slice * 2;
            times.begin();
            for batch in all.iter().skip(range.start as usize).skip(thread as usize).step_by(shape.threads as usize) {
                self.get_once(&pages, batch, times)?;
                if Instant::now() >= until {
                    break;
                }
            }
            Ok(())
        })?;
        Ok(times.row(Kind::GetCold, shape, Some(copy)))
    }

    fn get_once(&self, pages: &[u32], batch: &Batch, times: &mut Times) -> Result<(), String> {
        for page in pages {
            self.pool.write_at(*page, 0, &[0xff; 8]);
        }
        let part = [Part::new(self.pool, &batch.keys, pages)];
        let start = Instant::now();
        let outcome = self.instance.get(&options(), &part);
        let time = start.elapsed();
        outcome.result.map_err(|error| format!("batch_get: {error}"))?;
        times.add(time, &outcome.statuses[0]);
        for ((page, number), status) in pages.iter().zip(&batch.numbers).zip(&outcome.statuses[0]) {
            let mut stamp = [0; 8];
            self.pool.read_at(*page, 0, &mut stamp);
            if *status == PageStatus::Ok && stamp != number.to_le_bytes() {
                return Err("batch_get: a page has the status ok and holds other bytes than were stored".to_owned());
            }
        }
        Ok(())
    }

    /// Calls `body` with each stored batch of a thread in turn, until the time is over.
    fn repeat(
        &self,
        shape: Shape,
        keys: Keys,
        stored: &[u64],
        thread: u32,
        times: &mut Times,
        mut body: impl FnMut(&Batch, &mut Times) -> Result<(), String>,
    ) -> Result<(), String> {
        let all = keys.batches(shape, thread, stored.get(thread as usize).copied().unwrap_or(0));
        let until = Instant::now() + self.slice;
        times.begin();
        for batch in all.iter().cycle() {
            body(batch, times)?;
            if Instant::now() >= until {
                break;
            }
        }
        Ok(())
    }
}

fn options() -> Options<'static> {
    Options { deadline: Some(DEADLINE), ..Options::default() }
}

/// Pages of the pool that a thread uses.
fn pool_pages(shape: Shape, thread: u32) -> impl Iterator<Item = u32> {
    (0..shape.batch).map(move |index| thread * shape.batch + index)
}
