//! `cargo xtask quickstart --check`: what the quick start promises, checked over HTTP.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::quickstart::STOP_PATIENCE;
use crate::server::{Launch, Server};
use crate::{model, paths};

/// One answer and what it cost.
struct Answer {
    text: String,
    prompt_tokens: u64,
    from_storage: u64,
    seconds: f64,
}

/// Starts a server on fresh storage, asks, restarts it, asks again, and compares.
///
/// # Errors
/// When a request fails, the answers differ, or the second prompt does not come from storage.
pub fn run(model: &Path, set: &[String]) -> Result<()> {
    let scratch = tempfile::Builder::new()
        .prefix("check-")
        .tempdir_in(paths::cache())
        .context("can't create a folder for the storage")?;
    let launch = Launch { model, storage: scratch.path(), port: 0, set, show_log: false };

    let server = Server::start(&launch)?;
    let short = ask(&server.address, "What is the capital of France?")?;
    eprintln!("short prompt: {:?}", short.text);
    let prompt = long_prompt();
    let cold = ask(&server.address, &prompt)?;
    server.stop(STOP_PATIENCE)?;

    let server = Server::start(&launch)?;
    let warm = ask(&server.address, &prompt)?;
    server.stop(STOP_PATIENCE)?;

    eprintln!(
        "long prompt of {} tokens: {:.2} s cold, {:.2} s after a restart with {} tokens from storage",
        cold.prompt_tokens, cold.seconds, warm.seconds, warm.from_storage
    );
    ensure!(cold.from_storage == 0, "the first long prompt found {} tokens in fresh storage", cold.from_storage);
    ensure!(
        warm.from_storage * 10 >= warm.prompt_tokens * 9,
        "after the restart only {} of {} prompt tokens came from storage",
        warm.from_storage,
        warm.prompt_tokens
    );
    ensure!(cold.text == warm.text, "the answers differ:\n  cold: {:?}\n  from storage: {:?}", cold.text, warm.text);
    eprintln!("the answers are equal");
    Ok(())
}

/// A prompt of about 1,500 tokens.
fn long_prompt() -> String {
    let mut text = String::from("Here is a list of facts.\n");
    for number in 1..=60 {
        text.push_str(&format!(
            "Fact {number}: the box with number {number} holds {} red balls and {} blue balls.\n",
            number * 7 % 13,
            number * 5 % 11
        ));
    }
    text.push_str("What is in the first box? Answer in one sentence.");
    text
}

fn ask(address: &str, prompt: &str) -> Result<Answer> {
    let url = format!("{address}/v1/chat/completions");
    let body = json!({
        "model": model::NAME,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 24,
        "temperature": 0,
    });
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(Duration::from_secs(300)))
        .http_status_as_error(false)
        .build()
        .into();
    let start = Instant::now();
    let mut response = agent.post(&url).send_json(&body).with_context(|| format!("POST {url}"))?;
    let status = response.status();
    let reply = response.body_mut().read_to_string().with_context(|| format!("POST {url}: can't read the reply"))?;
    let seconds = start.elapsed().as_secs_f64();
    if !status.is_success() {
        bail!("POST {url} answered {status}: {reply}");
    }
    let reply: Value = serde_json::from_str(&reply).with_context(|| format!("POST {url} answered no JSON: {reply}"))?;
    let number = |pointer: &str| {
        reply.pointer(pointer).and_then(Value::as_u64).with_context(|| format!("no {pointer} in the reply: {reply}"))
    };
    Ok(Answer {
        text: reply
            .pointer("/choices/0/message/content")
            .and_then(Value::as_str)
            .with_context(|| format!("no text in the reply: {reply}"))?
            .to_owned(),
        prompt_tokens: number("/usage/prompt_tokens")?,
        from_storage: number("/usage/kvdock/storage")?,
        seconds,
    })
}
