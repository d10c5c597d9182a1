//! The engine's face to the rest of the process.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::params::ParamError;
use super::request::{Request, SubmitError};
use super::stats::{Counters, EngineStats};
use super::stream::RequestStream;
use crate::cache::{CacheCounters, Flushed, StorageHandle, Tiers};

/// Longest `Retry-After` that is ever advised.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(60);

/// What the scheduler thread is told.
pub(crate) enum Command {
    Submit(Box<Submission>),
    Abort {
        id: String,
        reply: oneshot::Sender<bool>,
    },
    AbortAll {
        reply: oneshot::Sender<usize>,
    },
    /// The stream of this request was dropped.
    ClientGone {
        key: u64,
    },
    /// Something the scheduler waits for may have happened.
    Wake,
    Flush {
        tiers: Tiers,
        reply: oneshot::Sender<Flushed>,
    },
    Drain {
        deadline: Instant,
        reply: oneshot::Sender<DrainReport>,
    },
    CheckIntegrity {
        reply: oneshot::Sender<Result<(), String>>,
    },
}

/// A request on its way to the scheduler.
pub(crate) struct Submission {
    pub key: u64,
    pub request: Request,
    /// Seed of sample 0.
    pub seed: i64,
    pub events: mpsc::UnboundedSender<super::Event>,
    pub submitted: Instant,
}

/// What a drain came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrainReport {
    /// Requests that finished by themselves.
    pub finished: usize,
    /// Requests that were aborted at the deadline.
    pub aborted: usize,
    /// Whether all pages on their way to host and storage arrived before the deadline.
    pub backups_flushed: bool,
}

/// Limits that `submit` checks without asking the scheduler.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub vocab_size: usize,
    pub context_length: usize,
    pub pool_tokens: usize,
    pub max_running: usize,
    pub max_queued: usize,
}

/// What handles and scheduler share.
pub(crate) struct Shared {
    pub limits: Limits,
    pub counters: Counters,
    /// Names of the requests in flight.
    pub ids: Mutex<HashSet<String>>,
    /// Samples taken and not finished.
    pub in_flight: AtomicUsize,
    /// Set once no more requests are taken.
    pub draining: AtomicBool,
    /// Set when the scheduler thread has ended.
    pub stopped: AtomicBool,
    /// Smoothed time between ends of samples, in microseconds; 0 while unknown.
    pub finish_interval_us: AtomicU64,
    next_key: AtomicU64,
}

impl Shared {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            counters: Counters::new(),
            ids: Mutex::new(HashSet::new()),
            in_flight: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            finish_interval_us: AtomicU64::new(0),
            next_key: AtomicU64::new(1),
        }
    }

    /// When `samples` places will be free, judged by how fast samples ended lately.
    fn retry_after(&self, samples: usize) -> Duration {
        let interval = Duration::from_micros(self.finish_interval_us.load(Ordering::Relaxed));
        let wait = interval.saturating_mul(u32::try_from(samples).unwrap_or(u32::MAX));
        let seconds = wait.as_secs_f64().ceil().max(1.0);
        Duration::from_secs_f64(seconds.min(MAX_RETRY_AFTER.as_secs_f64()))
    }
}

/// A cheap, clonable face to a running engine.
#[derive(Clone)]
pub struct EngineHandle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) commands: Sender<Command>,
    pub(crate) storage: StorageHandle,
    pub(crate) cache_counters: Arc<CacheCounters>,
}

impl EngineHandle {
    /// Takes a request, or says why not. Returns at once; what follows comes from the stream.
    /// Dropping the stream cancels the request.
    pub fn submit(&self, request: Request) -> Result<RequestStream, SubmitError> {
        self.check(&request)?;
        let samples = request.n as usize;
        self.reserve(samples)?;
        if !self.shared.ids.lock().insert(request.id.clone()) {
            self.shared.in_flight.fetch_sub(samples, Ordering::AcqRel);
            return Err(SubmitError::DuplicateId(request.id));
        }
        let key = self.shared.next_key.fetch_add(1, Ordering::Relaxed);
        let (events, receiver) = mpsc::unbounded_channel();
        let stream = RequestStream::new(request.id.clone(), key, request.n, receiver, self.commands.clone());
        let seed = request.sampling.seed.unwrap_or_else(random_seed);
        let id = request.id.clone();
        let submission = Submission { key, request, seed, events, submitted: Instant::now() };
        if self.commands.send(Command::Submit(Box::new(submission))).is_err() {
            self.shared.ids.lock().remove(&id);
            self.shared.in_flight.fetch_sub(samples, Ordering::AcqRel);
            return Err(SubmitError::ShuttingDown);
        }
        self.shared.counters.requests.fetch_add(1, Ordering::Relaxed);
        Ok(stream)
    }

    /// Ends the request of this name; false if none is in flight.
    pub async fn abort(&self, id: &str) -> bool {
        let id = id.to_owned();
        self.ask(|reply| Command::Abort { id, reply }).await.unwrap_or(false)
    }

    /// Ends all requests and says how many there were.
    pub async fn abort_all(&self) -> usize {
        self.ask(|reply| Command::AbortAll { reply }).await.unwrap_or(0)
    }

    /// Empties device and host tiers of what no request holds. `None` if the engine has stopped.
    pub async fn flush(&self, tiers: Tiers) -> Option<Flushed> {
        self.ask(|reply| Command::Flush { tiers, reply }).await
    }

    /// The switch of the storage tier, for whoever attaches and detaches backends.
    pub fn storage(&self) -> &StorageHandle {
        &self.storage
    }

    /// Counters and gauges of the cache.
    pub fn cache_counters(&self) -> &Arc<CacheCounters> {
        &self.cache_counters
    }

    /// Takes no more requests, lets the running and queued ones finish until `within` has
    /// passed, aborts the rest and waits for backups. The scheduler ends afterwards.
    pub async fn drain(&self, within: Duration) -> DrainReport {
        self.shared.draining.store(true, Ordering::Release);
        let deadline = Instant::now() + within;
        self.ask(|reply| Command::Drain { deadline, reply }).await.unwrap_or(DrainReport {
            finished: 0,
            aborted: 0,
            backups_flushed: false,
        })
    }

    /// Checks the invariants of scheduler, tree and pools; the error names what is broken.
    pub async fn check_integrity(&self) -> Result<(), String> {
        self.ask(|reply| Command::CheckIntegrity { reply })
            .await
            .unwrap_or_else(|| Err("the engine has stopped".into()))
    }

    /// The engine's numbers now.
    pub fn stats(&self) -> EngineStats {
        self.shared.counters.snapshot(self.shared.limits.max_running)
    }

    /// Whether requests are taken.
    pub fn is_accepting(&self) -> bool {
        !self.shared.draining.load(Ordering::Acquire) && self.is_alive()
    }

    /// Whether the scheduler runs.
    pub fn is_alive(&self) -> bool {
        !self.shared.stopped.load(Ordering::Acquire)
    }

    /// Most prompt and generated tokens of one request: the smaller of context and pool.
    pub fn max_request_tokens(&self) -> usize {
        self.shared.limits.context_length.min(self.shared.limits.pool_tokens)
    }

    /// Refuses a request of several prompts with more samples than there are places for, which an empty server could not take either.
    ///
    /// # Errors
    /// Names the limit.
    pub fn check_samples(&self, prompts: usize, n: u32) -> Result<(), SubmitError> {
        let limits = &self.shared.limits;
        let (most, all) = (limits.max_running + limits.max_queued, prompts.saturating_mul(n as usize));
        if prompts < 2 || all <= most {
            return Ok(());
        }
        Err(param_error(
            "n",
            format!(
                "{prompts} prompts of {n} samples are {all} in all, more than the {most} that the server has places for: {} run \
                 (engine.max_running_requests) and {} wait (engine.max_queued_requests); send fewer at a time",
                limits.max_running, limits.max_queued
            ),
        ))
    }

    /// Refuses a text that has at least `fewest` tokens before it is tokenized, when not even those would fit.
    ///
    /// # Errors
    /// [`SubmitError::TextTooLong`].
    pub fn check_text(&self, fewest: usize) -> Result<(), SubmitError> {
        let most = self.max_request_tokens();
        if fewest > most { Err(SubmitError::TextTooLong { fewest, most }) } else { Ok(()) }
    }

    fn check(&self, request: &Request) -> Result<(), SubmitError> {
        if !self.is_accepting() {
            return Err(SubmitError::ShuttingDown);
        }
        let limits = &self.shared.limits;
        request.sampling.validate(limits.vocab_size)?;
        let outside = |t: u32| t as usize >= limits.vocab_size;
        if let Some(token) = request.logprobs.token_ids.iter().copied().find(|&t| outside(t)) {
            return Err(param_error(
                "token_ids_logprob",
                format!("token {token} is outside the vocabulary of {}", limits.vocab_size),
            ));
        }
        if request.logprobs.top > limits.vocab_size {
            return Err(param_error(
                "top_logprobs_num",
                format!("{} is more than the vocabulary of {}", request.logprobs.top, limits.vocab_size),
            ));
        }
        let most = limits.max_running + limits.max_queued;
        if request.n == 0 || request.n as usize > most {
            return Err(param_error(
                "n",
                format!("{} is not between 1 and {most}, the places for running and queued requests", request.n),
            ));
        }
        let prompt_tokens = request.prompt_ids.len();
        if prompt_tokens == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if let Some((position, &token)) = request.prompt_ids.iter().enumerate().find(|&(_, &t)| outside(t)) {
            let vocab_size = limits.vocab_size;
            return Err(SubmitError::UnknownToken { position, token, vocab_size });
        }
        let new = usize::from(request.sampling.max_new_tokens != Some(0));
        if prompt_tokens + new > limits.context_length {
            let context_length = limits.context_length;
            return Err(SubmitError::ContextTooLong { prompt_tokens, context_length });
        }
        if prompt_tokens + new > limits.pool_tokens {
            let pool_tokens = limits.pool_tokens;
            return Err(SubmitError::PoolTooSmall { prompt_tokens, pool_tokens });
        }
        Ok(())
    }

    /// Takes `samples` places among the running and queued.
    fn reserve(&self, samples: usize) -> Result<(), SubmitError> {
        let limits = &self.shared.limits;
        let most = limits.max_running + limits.max_queued;
        self.shared
            .in_flight
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                now.checked_add(samples).filter(|&next| next <= most)
            })
            .map(drop)
            .map_err(|now| {
                self.shared.counters.rejected.fetch_add(1, Ordering::Relaxed);
                SubmitError::QueueFull {
                    queued: now.saturating_sub(limits.max_running),
                    retry_after: self.shared.retry_after(samples),
                }
            })
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).ok()?;
        answer.await.ok()
    }
}

fn param_error(field: &'static str, message: String) -> SubmitError {
    SubmitError::Param(ParamError { field, message })
}

/// A seed nobody chose, from the process's randomly keyed hasher.
fn random_seed() -> i64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(Instant::now()) as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_follows_how_fast_samples_end() {
        let limits = Limits { vocab_size: 1, context_length: 1, pool_tokens: 1, max_running: 1, max_queued: 1 };
        let shared = Shared::new(limits);
        assert_eq!(shared.retry_after(1), Duration::from_secs(1), "nothing is known yet");
        shared.finish_interval_us.store(2_400_000, Ordering::Relaxed);
        assert_eq!(shared.retry_after(1), Duration::from_secs(3));
        assert_eq!(shared.retry_after(2), Duration::from_secs(5));
        assert_eq!(shared.retry_after(10_000), MAX_RETRY_AFTER);
    }

    #[test]
    fn seeds_nobody_chose_differ() {
        assert_ne!(random_seed(), random_seed());
    }
}
