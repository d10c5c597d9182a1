//! The scheduler with a fake model over the real cache.

mod batching;
mod drain;
mod fake;
mod lifecycle;
mod linked;
mod output;
mod preemption;
mod real;
mod sampling;
mod storage;

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::*;
use crate::cache::{CacheConfig, CacheManager, NoEvents, Tiers};
use fake::{FakeModel, FakePool, Log};

const PAGE: usize = 4;

/// Logits by request, sample and position.
type Captured = Arc<Mutex<HashMap<(String, u32, usize), Vec<u32>>>>;

/// An engine with a fake model, and what a test looks at.
struct Rig {
    engine: Engine,
    handle: EngineHandle,
    log: Arc<Log>,
    logits: Captured,
}

/// How a rig is made.
struct Setup {
    pages: usize,
    cache: CacheConfig,
    context: usize,
    chunk: usize,
    running: usize,
    queued: usize,
    delay: Duration,
    chain: Vec<(u32, u32)>,
    /// Makes the scheduler itself panic.
    broken_tap: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            pages: 256,
            cache: CacheConfig::default(),
            context: 512,
            chunk: 16,
            running: 8,
            queued: 64,
            delay: Duration::ZERO,
            chain: Vec::new(),
            broken_tap: false,
        }
    }
}

impl Setup {
    fn start(self) -> Rig {
        let mut model = FakeModel::new(self.context);
        model.delay = self.delay;
        model.chain = self.chain.into_iter().collect();
        let log = Arc::clone(&model.log);
        let logits = Captured::default();
        let config = EngineConfig {
            prefill_chunk: self.chunk,
            max_running_requests: self.running,
            max_queued_requests: self.queued,
            logits_tap: Some(if self.broken_tap {
                Arc::new(|_| panic!("the tap was told to panic"))
            } else {
                capture(&logits)
            }),
        };
        let pool = FakePool::new(PAGE, self.pages);
        let mailbox = Mailbox::new();
        let cache = CacheManager::new(self.cache, pool.clone(), Arc::new(NoEvents), mailbox.waker()).unwrap();
        let engine =
            Engine::start_with(config, Arc::new(model), fake::decoders(), ModelMemory::One(pool), cache, mailbox)
                .unwrap();
        Rig { handle: engine.handle(), engine, log, logits }
    }
}

/// A tap that keeps each row and checks that one computed twice is the same.
fn capture(logits: &Captured) -> LogitsTap {
    let seen = Arc::clone(logits);
    Arc::new(move |row| {
        let bits: Vec<u32> = row.logits.iter().map(|l| l.to_bits()).collect();
        let key = (row.request_id.to_owned(), row.index, row.position);
        let before = seen.lock().insert(key, bits.clone());
        assert!(before.is_none_or(|before| before == bits), "a row computed twice differs");
    })
}

impl Rig {
    fn submit(&self, request: Request) -> RequestStream {
        self.handle.submit(request).unwrap()
    }

    fn run(&self, request: Request) -> Completion {
        let mut completions = self.submit(request).blocking_collect();
        assert_eq!(completions.len(), 1);
        completions.remove(0)
    }

    /// Logits of one request, by sample and position.
    fn logits_of(&self, id: &str) -> HashMap<(u32, usize), Vec<u32>> {
        let logits = self.logits.lock();
        let own = logits.iter().filter(|((request, _, _), _)| request == id);
        own.map(|((_, index, position), bits)| ((*index, *position), bits.clone())).collect()
    }

    fn flush(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        // Copies to the host hold pages for a moment.
        while block_on(self.handle.flush(Tiers::ALL)).unwrap().device_kept > 0 {
            assert!(Instant::now() < deadline, "pages are locked though nothing runs");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Nothing runs, nothing is left locked or owned, and the books balance.
    fn assert_idle(&self) {
        block_on(self.handle.check_integrity()).unwrap();
        self.flush();
        block_on(self.handle.check_integrity()).unwrap();
        self.wait_for("the gauges", |s| s.running + s.queued == 0);
        assert_eq!(self.handle.shared.in_flight.load(std::sync::atomic::Ordering::SeqCst), 0);
        assert!(self.handle.shared.ids.lock().is_empty());
    }

    /// Waits until the host tier has taken all it will take.
    fn wait_for_backups(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        let done = || {
            block_on(self.handle.check_integrity()).unwrap();
            let stats = self.handle.cache_counters().snapshot();
            stats.device_used_tokens > 0 && stats.host_backup_tokens >= stats.device_used_tokens
        };
        while !done() {
            assert!(Instant::now() < deadline, "waited too long for the copies to the host");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn wait_for(&self, what: &str, condition: impl Fn(&EngineStats) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !condition(&self.handle.stats()) {
            assert!(Instant::now() < deadline, "waited too long for {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

fn greedy(max_new_tokens: u32) -> SamplingParams {
    SamplingParams { temperature: 0.0, max_new_tokens: Some(max_new_tokens), ..SamplingParams::default() }
}

/// A prompt of letters that differs with `salt` from its first token on.
fn prompt(salt: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| (salt * 7 + i * i + i / 3) % 26).collect()
}

fn request(id: &str, prompt_ids: Vec<u32>, max_new_tokens: u32) -> Request {
    Request::new(id, prompt_ids, greedy(max_new_tokens))
}
