//! Counters and histograms of the engine.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::Mutex;

use super::histogram::{Histogram, HistogramSnapshot};
use super::request::Usage;

const LATENCY_BOUNDS: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0,
    400.0,
];
const TOKEN_LATENCY_BOUNDS: &[f64] = &[
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.8, 1.0, 2.0,
    4.0, 8.0,
];
const TOKEN_COUNT_BOUNDS: &[f64] =
    &[1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0];

/// The engine's numbers at one moment; counters run from the start of the engine.
#[derive(Debug, Clone)]
pub struct EngineStats {
    /// Requests with pages, in prefill or decode.
    pub running: usize,
    /// Requests waiting for a place or for storage.
    pub queued: usize,
    /// Most requests that run at once.
    pub max_running: usize,
    /// Requests taken.
    pub requests_total: u64,
    /// Samples that ended with an abort of any kind.
    pub aborted_total: u64,
    /// Requests refused because the queue was full.
    pub rejected_total: u64,
    /// Preemptions for want of pages.
    pub preempted_total: u64,
    /// Prompt tokens of requests that began.
    pub prompt_tokens_total: u64,
    /// Tokens generated.
    pub generation_tokens_total: u64,
    /// Prompt tokens served from device pages.
    pub cached_device_total: u64,
    /// Prompt tokens served from host pages.
    pub cached_host_total: u64,
    /// Prompt tokens served from storage.
    pub cached_storage_total: u64,
    /// Forward passes run.
    pub steps_total: u64,
    /// Forward passes that failed.
    pub failed_steps_total: u64,
    /// Tokens generated a second over the last few seconds.
    pub generation_throughput: f64,
    /// Seconds from submission to the first token.
    pub time_to_first_token: HistogramSnapshot,
    /// Seconds between tokens of a sample.
    pub inter_token_latency: HistogramSnapshot,
    /// Seconds from submission to the end.
    pub e2e_latency: HistogramSnapshot,
    /// Seconds from submission to the first forward pass.
    pub queue_time: HistogramSnapshot,
    /// Prompt lengths in tokens.
    pub prompt_lengths: HistogramSnapshot,
    /// Completion lengths in tokens.
    pub completion_lengths: HistogramSnapshot,
}

/// Where the scheduler and the handles count.
#[derive(Debug)]
pub(crate) struct Counters {
    pub running: AtomicUsize,
    pub queued: AtomicUsize,
    pub requests: AtomicU64,
    pub aborted: AtomicU64,
    pub rejected: AtomicU64,
    pub preempted: AtomicU64,
    pub prompt_tokens: AtomicU64,
    pub generation_tokens: AtomicU64,
    cached: [AtomicU64; 3],
    pub steps: AtomicU64,
    pub failed_steps: AtomicU64,
    pub time_to_first_token: Histogram,
    pub inter_token_latency: Histogram,
    pub e2e_latency: Histogram,
    pub queue_time: Histogram,
    pub prompt_lengths: Histogram,
    pub completion_lengths: Histogram,
    throughput: Mutex<Throughput>,
}

/// Generated tokens by second, for the last few seconds.
#[derive(Debug)]
struct Throughput {
    started: Instant,
    slots: [(u64, u64); Throughput::SECONDS as usize + 1],
}

impl Throughput {
    const SECONDS: u64 = 5;

    fn new() -> Self {
        Self { started: Instant::now(), slots: Default::default() }
    }

    fn add(&mut self, second: u64, tokens: u64) {
        let index = (second % (Self::SECONDS + 1)) as usize;
        if let Some(slot) = self.slots.get_mut(index) {
            if slot.0 != second {
                *slot = (second, 0);
            }
            slot.1 += tokens;
        }
    }

    /// Tokens a second over the whole seconds before `second`.
    fn rate(&self, second: u64) -> f64 {
        let window = Self::SECONDS.min(second);
        if window == 0 {
            return self.slots.iter().filter(|s| s.0 == 0).map(|s| s.1 as f64).sum();
        }
        let tokens: u64 =
            self.slots.iter().filter(|(at, _)| *at < second && *at + window >= second).map(|(_, tokens)| tokens).sum();
        tokens as f64 / window as f64
    }
}

impl Counters {
    pub fn new() -> Self {
        Self {
            running: AtomicUsize::new(0),
            queued: AtomicUsize::new(0),
            requests: AtomicU64::new(0),
            aborted: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            preempted: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            generation_tokens: AtomicU64::new(0),
            cached: Default::default(),
            steps: AtomicU64::new(0),
            failed_steps: AtomicU64::new(0),
            time_to_first_token: Histogram::new(LATENCY_BOUNDS),
            inter_token_latency: Histogram::new(TOKEN_LATENCY_BOUNDS),
            e2e_latency: Histogram::new(LATENCY_BOUNDS),
            queue_time: Histogram::new(LATENCY_BOUNDS),
            prompt_lengths: Histogram::new(TOKEN_COUNT_BOUNDS),
            completion_lengths: Histogram::new(TOKEN_COUNT_BOUNDS),
            throughput: Mutex::new(Throughput::new()),
        }
    }

    /// Counts the prompt of a request that begins.
    pub fn prompt_started(&self, usage: &Usage) {
        self.prompt_tokens.fetch_add(usage.prompt_tokens.into(), Relaxed);
        let tiers = [usage.cached_device, usage.cached_host, usage.cached_storage];
        for (total, tokens) in self.cached.iter().zip(tiers) {
            total.fetch_add(tokens.into(), Relaxed);
        }
        self.prompt_lengths.observe(usage.prompt_tokens.into());
    }

    /// Counts tokens generated in one step.
    pub fn generated(&self, tokens: u64) {
        self.generation_tokens.fetch_add(tokens, Relaxed);
        let mut throughput = self.throughput.lock();
        let second = throughput.started.elapsed().as_secs();
        throughput.add(second, tokens);
    }

    pub fn snapshot(&self, max_running: usize) -> EngineStats {
        let [device, host, storage] = &self.cached;
        let generation_throughput = {
            let throughput = self.throughput.lock();
            throughput.rate(throughput.started.elapsed().as_secs())
        };
        EngineStats {
            running: self.running.load(Relaxed),
            queued: self.queued.load(Relaxed),
            max_running,
            requests_total: self.requests.load(Relaxed),
            aborted_total: self.aborted.load(Relaxed),
            rejected_total: self.rejected.load(Relaxed),
            preempted_total: self.preempted.load(Relaxed),
            prompt_tokens_total: self.prompt_tokens.load(Relaxed),
            generation_tokens_total: self.generation_tokens.load(Relaxed),
            cached_device_total: device.load(Relaxed),
            cached_host_total: host.load(Relaxed),
            cached_storage_total: storage.load(Relaxed),
            steps_total: self.steps.load(Relaxed),
            failed_steps_total: self.failed_steps.load(Relaxed),
            generation_throughput,
            time_to_first_token: self.time_to_first_token.snapshot(),
            inter_token_latency: self.inter_token_latency.snapshot(),
            e2e_latency: self.e2e_latency.snapshot(),
            queue_time: self.queue_time.snapshot(),
            prompt_lengths: self.prompt_lengths.snapshot(),
            completion_lengths: self.completion_lengths.snapshot(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throughput_is_the_mean_of_the_last_seconds() {
        let mut throughput = Throughput::new();
        throughput.add(0, 10);
        assert_eq!(throughput.rate(0), 10.0, "the first second counts as it runs");
        throughput.add(1, 30);
        assert_eq!(throughput.rate(2), 20.0);
        throughput.add(7, 50);
        assert_eq!(throughput.rate(8), 10.0, "older seconds have left the window");
        assert_eq!(throughput.rate(100), 0.0);
    }

    #[test]
    fn cached_tokens_are_counted_by_tier() {
        let counters = Counters::new();
        let usage =
            Usage { prompt_tokens: 100, cached_device: 10, cached_host: 20, cached_storage: 30, ..Default::default() };
        counters.prompt_started(&usage);
        let stats = counters.snapshot(8);
        assert_eq!(stats.prompt_tokens_total, 100);
        assert_eq!((stats.cached_device_total, stats.cached_host_total, stats.cached_storage_total), (10, 20, 30));
    }
}
