//! Queue, scheduler, batches and sampling.
//!
//! A [`Request`] goes in through [`EngineHandle::submit`], and its [`Event`]s come out of the
//! [`RequestStream`] that call returns. Between the two runs one scheduler thread: it asks the
//! cache for the longest reusable prefix, puts decode tokens and prefill chunks of all running
//! requests into one forward pass, samples, and hands finished pages back to the cache. The
//! scheduler never waits for a client: a stream that is dropped is a request cancelled.

mod config;
mod handle;
mod histogram;
mod memory;
mod params;
mod request;
mod sampler;
mod scheduler;
mod start;
mod stats;
mod stop;
mod stream;
mod text;
mod wake;

pub use config::{EngineConfig, LogitsRow, LogitsTap};
pub use handle::{DrainReport, EngineHandle};
pub use histogram::{Histogram, HistogramSnapshot};
pub use memory::ModelMemory;
pub use params::{ParamError, SamplingParams};
pub use request::{
    AbortKind, Completion, Event, FinishReason, LogprobOptions, MatchedStop, Request, SubmitError, TokenLogprobs, Usage,
};
pub use start::{Engine, EngineError, EngineParts};
pub use stats::EngineStats;
pub use stream::RequestStream;
pub use wake::Mailbox;

#[cfg(test)]
mod tests;
