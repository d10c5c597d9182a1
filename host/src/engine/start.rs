//! Starting and stopping an engine.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdock_models::{Model, Tokenizer};
use thiserror::Error;
use tokio::sync::oneshot;

use super::config::EngineConfig;
use super::handle::{Command, EngineHandle, Limits, Shared};
use super::memory::ModelMemory;
use super::request::AbortKind;
use super::scheduler::{Parts, Scheduler, panic_text};
use super::text::{MakeDecoder, tokenizer_decoders};
use super::wake::Mailbox;
use crate::cache::CacheManager;

/// What an engine works with.
pub struct EngineParts {
    /// The model.
    pub model: Arc<dyn Model>,
    /// Its tokenizer, for the text of the output.
    pub tokenizer: Arc<Tokenizer>,
    /// The device memory; what the cache was made over.
    pub pool: ModelMemory,
    /// The cache, made with the waker of `mailbox`.
    pub cache: CacheManager,
    /// Where the scheduler is told things.
    pub mailbox: Mailbox,
}

/// Why an engine could not start.
#[derive(Debug, Error)]
pub enum EngineError {
    /// A setting that no engine can work with.
    #[error("{key} is {value}; it must be at least 1")]
    Setting {
        /// The configuration key.
        key: &'static str,
        /// Its value.
        value: usize,
    },
    /// The system gave no thread.
    #[error("cannot start the scheduler thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// A running engine. Dropping it aborts what runs and waits for the scheduler to end.
pub struct Engine {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the scheduler on a thread of its own.
    pub fn start(config: EngineConfig, parts: EngineParts) -> Result<Self, EngineError> {
        let EngineParts { model, tokenizer, pool, cache, mailbox } = parts;
        let decoders = tokenizer_decoders(tokenizer);
        Self::start_with(config, model, decoders, pool, cache, mailbox)
    }

    /// As [`start`](Self::start), with any way of turning tokens into text.
    pub(super) fn start_with(
        config: EngineConfig,
        model: Arc<dyn Model>,
        decoders: MakeDecoder,
        pool: ModelMemory,
        cache: CacheManager,
        mailbox: Mailbox,
    ) -> Result<Self, EngineError> {
        for (key, value) in [
            ("engine.prefill_chunk", config.prefill_chunk),
            ("engine.max_running_requests", config.max_running_requests),
        ] {
            if value == 0 {
                return Err(EngineError::Setting { key, value });
            }
        }
        let limits = Limits {
            vocab_size: model.spec().vocab_size,
            context_length: model.spec().context_length,
            pool_tokens: cache.device_pages() * cache.page_size(),
            max_running: config.max_running_requests,
            max_queued: config.max_queued_requests,
        };
        let shared = Arc::new(Shared::new(limits));
        let handle = EngineHandle {
            shared: Arc::clone(&shared),
            commands: mailbox.sender,
            storage: cache.storage(),
            cache_counters: cache.counters(),
        };
        let mut scheduler = Scheduler::new(Parts {
            config,
            shared,
            mailbox: mailbox.receiver,
            wake_pending: mailbox.pending,
            model,
            decoders,
            pool,
            cache,
        });
        let thread = std::thread::Builder::new().name("scheduler".into()).spawn(move || {
            let ended = catch_unwind(AssertUnwindSafe(|| scheduler.run()));
            match ended {
                Ok(()) => scheduler.close(AbortKind::ShuttingDown, "the server is shutting down"),
                Err(panic) => {
                    let text = panic_text(panic.as_ref());
                    tracing::error!("the scheduler failed and no request is served any more: {text}");
                    scheduler.close(AbortKind::Internal, &format!("the scheduler failed: {text}"));
                }
            }
        })?;
        Ok(Self { handle, thread: Some(thread) })
    }

    /// A face to it.
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }

    /// Takes no more requests, gives those in flight and the backups `within`, and blocks until
    /// the scheduler has ended.
    pub fn stop(mut self, within: Duration) {
        self.end(within);
    }

    fn end(&mut self, within: Duration) {
        let Some(thread) = self.thread.take() else { return };
        let (reply, _) = oneshot::channel();
        let deadline = Instant::now() + within;
        // If the scheduler has ended already there is nobody to tell.
        let _ = self.handle.commands.send(Command::Drain { deadline, reply });
        // Its panics were caught and reported on its own thread.
        let _ = thread.join();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}
