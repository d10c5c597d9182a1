//! The cache as the engine uses it, over simulated pools, with and without backends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use crossbeam_channel::{Receiver, bounded};
use kvdock::cache::{Acquire, CacheConfig, CacheManager, CacheNamespace, Grant, NoEvents, Prefetch, ReuseHints};
use kvdock::plugin::backend::Place;

use super::curve::median;
use super::keys::{PAGES, TOKENS, heap, prompt};
use super::simulated::{PAGE, Pool, Store};

/// Operations of one sample.
const SAMPLE: u64 = 32;
/// No wait of the cache takes this long.
const PATIENCE: Duration = Duration::from_secs(60);

/// What was measured at one size.
pub struct Measured {
    /// Microseconds of a request whose prompt is on the device: from its begin to its end.
    pub hit: f64,
    /// Microseconds of a request that no tier knows, and for which the oldest pages leave.
    pub fresh: f64,
    /// Bytes a page.
    pub bytes: f64,
    /// Bytes of a request that holds its prompt.
    pub open: f64,
    /// Microseconds until one more backend is in use, where there is a host tier.
    pub attach: Option<f64>,
}

struct Rig {
    cache: CacheManager,
    woken: Receiver<()>,
    next: u64,
    namespace: CacheNamespace,
}

/// Measures a cache that holds `pages` pages; `backends` is none for a device tier alone, else how many backends are attached.
///
/// # Errors
/// When the cache refuses what it must not refuse.
pub fn measure(pages: usize, backends: Option<usize>, rounds: usize) -> Result<Measured> {
    let prompts = (pages / PAGES).max(1) as u64;
    let before = heap();
    let mut rig = Rig::new(prompts as usize * PAGES, backends)?;
    for index in 0..prompts {
        rig.fresh(index)?;
    }
    rig.settle()?;
    let bytes = (heap() - before) / (prompts * PAGES as u64) as f64;

    let (mut first, mut hits, mut fresh) = (0, Vec::new(), Vec::new());
    for round in 0..=rounds {
        // Those that came last are surely there.
        let alive = prompts.min(SAMPLE);
        let newest = first + prompts - alive;
        let picked: Vec<Vec<u32>> =
            (0..SAMPLE).map(|number| prompt(newest + (number + round as u64) % alive)).collect();
        let begin = Instant::now();
        for tokens in &picked {
            rig.hit(tokens)?;
        }
        hits.push(begin.elapsed().as_secs_f64() * 1e6 / SAMPLE as f64);
        let begin = Instant::now();
        for number in 0..SAMPLE {
            rig.fresh(first + prompts + number)?;
        }
        fresh.push(begin.elapsed().as_secs_f64() * 1e6 / SAMPLE as f64 - rig.making());
        rig.settle()?;
        first += SAMPLE;
    }
    let open = rig.open(first + prompts - prompts.min(SAMPLE), prompts.min(SAMPLE))?;
    let attach = backends.map(|_| rig.attach_one_more()).transpose()?;
    Ok(Measured { hit: median(hits.split_off(1)), fresh: median(fresh.split_off(1)), bytes, open, attach })
}

impl Rig {
    fn new(pages: usize, backends: Option<usize>) -> Result<Self> {
        // Room for one prompt that is being computed.
        let pool = Arc::new(Pool::new(pages + PAGES));
        let host_pages = match backends {
            None => 0,
            Some(_) => u32::try_from(pages + PAGES).context("more host pages than a pool may have")?,
        };
        let (wake, woken) = bounded(1);
        let waker = Arc::new(move || {
            let _ = wake.try_send(());
        });
        let config = CacheConfig { host_pages, ..CacheConfig::default() };
        let cache = CacheManager::new(config, pool, Arc::new(NoEvents), waker)?;
        let rig = Rig { cache, woken, next: 1, namespace: CacheNamespace::default() };
        for number in 0..backends.unwrap_or(0) {
            rig.attach(&format!("store-{number}"));
        }
        Ok(rig)
    }

    fn attach(&self, name: &str) {
        self.cache.storage().attached(Arc::new(Store::new(name.to_owned())), Place::Of(name.to_owned()));
    }

    fn wait(&self, until: Instant) {
        let _ = self.woken.recv_deadline(until);
    }

    /// Begins a request, waits for storage, and takes what is there of its prompt.
    fn begin(&mut self, tokens: &[u32]) -> Result<(u64, Grant)> {
        let id = self.next;
        self.next += 1;
        self.cache.begin(id, tokens, &self.namespace, &ReuseHints::default());
        let limit = Instant::now() + PATIENCE;
        while let Prefetch::Waiting { until } = self.cache.poll(id) {
            ensure!(Instant::now() < limit, "a wait for storage does not end");
            self.wait(until);
        }
        loop {
            match self.cache.acquire(id, tokens)? {
                Acquire::Granted(grant) => return Ok((id, grant)),
                Acquire::Loading | Acquire::NoSpace => {
                    ensure!(Instant::now() < limit, "a prompt finds no room");
                    self.wait(Instant::now() + Duration::from_millis(1));
                }
            }
        }
    }

    /// A request that nothing is known of. As in the engine, the cache is asked now and then what has come to its end.
    fn fresh(&mut self, index: u64) -> Result<()> {
        let tokens = prompt(index);
        let (id, grant) = self.begin(&tokens)?;
        ensure!(grant.tokens == 0, "a new prompt has {} cached tokens", grant.tokens);
        let limit = Instant::now() + PATIENCE;
        let mut pages = loop {
            if let Some(pages) = self.cache.alloc_pages(PAGES) {
                break pages;
            }
            // Pages that are being copied to the host can't leave yet.
            ensure!(Instant::now() < limit, "no pages for a new prompt");
            self.wait(Instant::now() + Duration::from_millis(1));
            self.cache.tick();
        };
        self.cache.commit(id, &tokens, &mut pages, &mut [])?;
        self.cache.finish(id, &tokens, pages);
        self.cache.tick();
        Ok(())
    }

    fn hit(&mut self, tokens: &[u32]) -> Result<()> {
        let (id, grant) = self.begin(tokens)?;
        let expected = (TOKENS - 1) / PAGE * PAGE;
        ensure!(grant.from_device == expected, "{} of {expected} tokens are on the device", grant.from_device);
        self.cache.finish(id, &tokens[..expected], grant.pages);
        Ok(())
    }

    /// Microseconds that making a prompt takes, which is none of the cache's time.
    fn making(&self) -> f64 {
        let begin = Instant::now();
        for index in 0..SAMPLE {
            std::hint::black_box(prompt(index));
        }
        begin.elapsed().as_secs_f64() * 1e6 / SAMPLE as f64
    }

    /// Bytes of each of `count` requests that hold their prompts at the same time.
    fn open(&mut self, first: u64, count: u64) -> Result<f64> {
        let before = heap();
        let mut held = Vec::new();
        for index in first..first + count {
            let (id, grant) = self.begin(&prompt(index))?;
            ensure!(grant.tokens > 0, "a prompt that was there is gone");
            held.push((id, grant));
        }
        let bytes = (heap() - before) / count as f64;
        for (id, _) in held {
            self.cache.abort(id, Vec::new());
        }
        Ok(bytes)
    }

    /// Waits until nothing is on its way to storage.
    fn settle(&mut self) -> Result<()> {
        let limit = Instant::now() + PATIENCE * 10;
        loop {
            let next = self.cache.tick();
            let stats = self.cache.stats();
            if stats.backup_pending_pages + stats.prefetches_running + stats.load_backs_running == 0 {
                return Ok(());
            }
            ensure!(Instant::now() < limit, "{} pages are still on their way", stats.backup_pending_pages);
            self.wait(next.unwrap_or(limit).min(Instant::now() + Duration::from_millis(50)));
        }
    }

    /// Microseconds of the scheduler until one more backend is in use and has been offered what the host holds.
    fn attach_one_more(&mut self) -> Result<f64> {
        let begin = Instant::now();
        self.attach("one-more");
        self.cache.tick();
        let took = begin.elapsed().as_secs_f64() * 1e6;
        if !self.cache.storage().names().iter().any(|name| name == "one-more") {
            bail!("the backend is not in use");
        }
        self.cache.check_integrity().map_err(|fault| anyhow!("{fault}"))?;
        Ok(took)
    }
}
