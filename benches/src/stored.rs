//! A prompt of 7,009 tokens whose pages lie in storage, computed once for all rows that need it. Each prefix of it is stored as well.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use kvdock_tests::client::Client;
use kvdock_tests::prompt;
use kvdock_tests::server::Launch;
use kvdock_tests::storage::{self, wait_stored};
use serde_json::json;

use crate::Bench;

/// Tokens of a page, as the server's default.
pub const PAGE: usize = 16;
/// Tokens that are stored: as many whole pages as hold 7,000.
pub const TOKENS: usize = 7008;

/// A prompt in storage.
pub struct Stored {
    /// The prompt: what is stored, and a token more.
    pub prompt: Vec<u32>,
    /// The folder of the file plugin.
    pub folder: PathBuf,
    /// Seconds to its first token when nothing was stored.
    pub computed: f64,
    /// Bytes on the disk of a page.
    pub page_bytes: f64,
}

impl Stored {
    /// Computes the prompt and waits until it is stored.
    ///
    /// # Errors
    /// When something of it was cached already.
    pub fn make(bench: &Bench) -> Result<Self> {
        let folder = bench.scratch.join("stored");
        let prompt = prompt::ids(9, TOKENS + 1);
        let server = launch(bench).storage(&folder).start();
        eprintln!("computing the prompt of {} tokens that several rows find in storage", prompt.len());
        let computed = first_token(&server.client(), &prompt, None, Some(0))?;
        wait_stored(&server.client(), (TOKENS / PAGE) as u64);
        server.stop();
        let files = storage::files(&folder);
        let mut sizes: Vec<u64> = Vec::new();
        for file in &files {
            let size = std::fs::metadata(file).with_context(|| format!("can't look at {}", file.display()))?.len();
            // Whatever is smaller is no page: the small model's have 360 KiB.
            sizes.extend((size > 256 << 10).then_some(size));
        }
        ensure!(sizes.len() >= TOKENS / PAGE, "{} pages are on the disk, {} were stored", sizes.len(), TOKENS / PAGE);
        let page_bytes = sizes.iter().sum::<u64>() as f64 / sizes.len() as f64;
        Ok(Self { prompt, folder, computed, page_bytes })
    }

    /// The first `tokens` of what is stored, and one more.
    pub fn prefix(&self, tokens: usize) -> &[u32] {
        self.prompt.get(..=tokens).unwrap_or(&self.prompt)
    }
}

/// A server with room for the prompt and for as many tokens again.
pub fn launch(bench: &Bench) -> Launch {
    Launch::new()
        .set("engine.threads", bench.threads)
        .set("cache.device_tokens", 16_384)
        .set("cache.host_tokens", 16_384)
}

/// Seconds from a request to its first token. `stored` says how many tokens have to come from storage, where that is known.
///
/// # Errors
/// When they do not.
pub fn first_token(client: &Client, prompt: &[u32], salt: Option<&str>, stored: Option<usize>) -> Result<f64> {
    let start = Instant::now();
    let (_, usage) = client.generate_salted(prompt, 1, salt);
    let seconds = start.elapsed().as_secs_f64();
    if let Some(stored) = stored {
        ensure!(usage.storage == stored as u64, "expected {stored} tokens from storage, got {usage:?}");
    }
    Ok(seconds)
}

/// When the tokens of a streamed, greedy answer came.
///
/// # Errors
/// When the answer is not what was asked for.
pub fn token_times(client: &Client, prompt: &[u32], new_tokens: usize) -> Result<Vec<Instant>> {
    let body = json!({
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": true},
        "stream": true,
    });
    let mut stream = client.try_stream("/generate", &body).context("/generate")?;
    let mut times = Vec::new();
    while let Some(event) = stream.next_event().map_err(anyhow::Error::msg)? {
        ensure!(stream.status == 200 && event.get("error").is_none(), "/generate answers {event}");
        let count = event["meta_info"]["completion_tokens"].as_u64().context("an event does not count its tokens")?;
        // Several tokens may come with one event.
        times.resize(count as usize, Instant::now());
    }
    ensure!(times.len() == new_tokens, "{} of {new_tokens} tokens came", times.len());
    Ok(times)
}
