//! The scheduler: one thread that owns all requests, the cache and the model's batches.
//!
//! Each turn takes in commands, lets the cache take in what its workers finished, admits waiting
//! samples, and runs one forward pass over the next tokens of all running ones. With nothing to
//! compute it sleeps until a command or the cache's waker comes.

mod admit;
mod arrive;
mod commands;
mod drain;
mod early;
mod output;
mod retire;
mod sequence;
mod step;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use kvdock_models::{Logits, Model};

use super::config::EngineConfig;
use super::handle::{Command, Shared};
use super::memory::{ModelMemory, Slots};
use super::request::{AbortKind, FinishReason};
use super::sampler::{LogprobReader, Sampler};
use super::text::MakeDecoder;
use crate::cache::CacheManager;
use sequence::Sequence;

pub(super) use step::panic_text;

/// Longest sleep while anything waits: a bound on what a lost wake-up could cost.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// What the scheduler is made of.
pub(super) struct Parts {
    pub config: EngineConfig,
    pub shared: Arc<Shared>,
    pub mailbox: Receiver<Command>,
    pub wake_pending: Arc<AtomicBool>,
    pub model: Arc<dyn Model>,
    pub decoders: MakeDecoder,
    pub pool: ModelMemory,
    pub cache: CacheManager,
}

/// State of the scheduler thread.
pub(super) struct Scheduler {
    parts: Parts,
    page_size: usize,
    /// Samples without pages, in order of service.
    waiting: Vec<Sequence>,
    /// Samples with pages, in order of service; the last is preempted first.
    running: Vec<Sequence>,
    /// Samples that wait until another of their request has computed the prompt they share.
    followers: Vec<Sequence>,
    /// Samples left of each request, by its key.
    open: HashMap<u64, u32>,
    next_cache_id: u64,
    sampler: Sampler,
    logprobs: LogprobReader,
    logits: Logits,
    /// The tokens that the device chose, a row each, where it did.
    chosen: Vec<kvdock_kernels::Sampled>,
    /// Slots of pools that hold something for each sample that runs.
    slots: Slots,
    /// The model has pools of windows.
    windows: bool,
    /// Part of the tokens still to be generated for which pages are set aside at admission. Falls
    /// while all goes well, rises with every preemption.
    reserve: f64,
    /// No pages for the first waiting sample; holds until some may have come free.
    blocked: bool,
    /// Since when the only running sample cannot get a page.
    stalled: Option<Instant>,
    /// Seconds that a token of a prompt takes in a pass, lately.
    token_seconds: f64,
    last_finish: Option<Instant>,
    drain: Option<drain::Drain>,
}

impl Scheduler {
    pub fn new(parts: Parts) -> Self {
        let slots = parts.pool.slots(parts.config.max_running_requests);
        let windows = parts.cache.available_windows().is_some();
        Self {
            page_size: parts.cache.page_size().max(1),
            parts,
            waiting: Vec::new(),
            running: Vec::new(),
            followers: Vec::new(),
            open: HashMap::new(),
            next_cache_id: 1,
            sampler: Sampler::default(),
            logprobs: LogprobReader::default(),
            logits: Logits::new(),
            chosen: Vec::new(),
            slots,
            windows,
            reserve: admit::FIRST_RESERVE,
            blocked: false,
            stalled: None,
            token_seconds: 0.0,
            last_finish: None,
            drain: None,
        }
    }

    /// Runs until drained.
    pub fn run(&mut self) {
        let mut worked = false;
        let mut until = None;
        while !self.drained() {
            self.receive((!worked).then_some(until));
            until = self.parts.cache.tick();
            self.drop_gone();
            self.enforce_drain();
            let admission = self.admit();
            until = earlier(until, admission);
            worked = self.step();
            self.publish_gauges();
            if !self.waiting.is_empty() || !self.running.is_empty() {
                until = earlier(until, Some(Instant::now() + LONGEST_WAIT));
            }
            until = earlier(until, self.drain_deadline());
        }
        self.finish_drain();
    }

    /// Ends everything after the thread failed or drained; whoever still asks gets an answer.
    pub fn close(&mut self, kind: AbortKind, message: &str) {
        self.parts.shared.draining.store(true, Ordering::Release);
        self.parts.shared.stopped.store(true, Ordering::Release);
        let reason = FinishReason::Abort { kind, message: message.to_owned() };
        for sequence in self.take_all() {
            self.report_end(sequence, reason.clone());
        }
        while let Ok(command) = self.parts.mailbox.try_recv() {
            if let Command::Submit(submission) = command {
                self.refuse(*submission, kind, message);
            }
        }
        self.publish_gauges();
    }

    /// Takes all commands there are. With `sleep` it waits for the first, until the given moment
    /// or without end.
    fn receive(&mut self, sleep: Option<Option<Instant>>) {
        let mailbox = &self.parts.mailbox;
        let first = match sleep {
            None => mailbox.try_recv().ok(),
            Some(None) => mailbox.recv().ok(),
            Some(Some(until)) => mailbox.recv_deadline(until).ok(),
        };
        if first.is_none() && sleep.is_some() {
            // Time has passed; pages may have come free meanwhile.
            self.blocked = false;
        }
        let mut next = first;
        while let Some(command) = next {
            self.handle(command);
            next = self.parts.mailbox.try_recv().ok();
        }
    }

    /// All samples, in no particular order; none is left.
    fn take_all(&mut self) -> Vec<Sequence> {
        let mut all = std::mem::take(&mut self.running);
        all.append(&mut self.waiting);
        all.append(&mut self.followers);
        all
    }

    fn publish_gauges(&self) {
        let counters = &self.parts.shared.counters;
        counters.running.store(self.running.len(), Ordering::Relaxed);
        counters.queued.store(self.waiting.len() + self.followers.len(), Ordering::Relaxed);
    }

    /// Pages that `tokens` tokens fill or begin.
    fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_size)
    }
}

/// The earlier of two moments, of which either may be missing.
fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Puts a sample where its rank belongs.
fn insert(list: &mut Vec<Sequence>, sequence: Sequence) {
    let at = list.partition_point(|other| other.rank() < sequence.rank());
    list.insert(at, sequence);
}
