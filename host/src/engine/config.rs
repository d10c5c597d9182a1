//! Settings of the engine.

use std::sync::Arc;

/// Sees every row of logits that a token was sampled from or a prompt log-probability taken
/// from, before penalties and bias. For tests and tools that compare runs bit for bit.
pub type LogitsTap = Arc<dyn Fn(&LogitsRow<'_>) + Send + Sync>;

/// One row as a [`LogitsTap`] sees it.
#[derive(Debug, Clone, Copy)]
pub struct LogitsRow<'a> {
    /// Name of the request.
    pub request_id: &'a str,
    /// Sample.
    pub index: u32,
    /// Absolute position of the token whose successor the row predicts.
    pub position: usize,
    /// One value a token of the vocabulary.
    pub logits: &'a [f32],
}

/// Settings of the engine; the keys are those of the `engine` table.
#[derive(Clone)]
pub struct EngineConfig {
    /// Most prompt tokens computed in one step, over all requests; at least 1.
    pub prefill_chunk: usize,
    /// Most samples in prefill or decode at once; at least 1.
    pub max_running_requests: usize,
    /// Most samples waiting beyond those.
    pub max_queued_requests: usize,
    /// Shown every row of logits.
    pub logits_tap: Option<LogitsTap>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self { prefill_chunk: 512, max_running_requests: 64, max_queued_requests: 256, logits_tap: None }
    }
}
