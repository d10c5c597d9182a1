//! The first token of a long prompt after a restart: from storage, and computed.

use std::time::Instant;

use anyhow::{Result, ensure};
use kvdock_tests::prompt;
use kvdock_tests::server::{Launch, Server};
use kvdock_tests::storage::wait_stored;

use crate::Bench;
use crate::llama::Llama;
use crate::row::{Better, Goal, Report, Row};
use crate::sample::{median, side_by_side};

const TOKENS: usize = 1500;

/// Adds the rows.
///
/// # Errors
/// When a side can't be measured.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let cold_name = format!("first token after a restart, {TOKENS} tokens from storage (s), peer the same cold");
    let llama_name =
        format!("first token after a restart, {TOKENS} tokens from storage (s), peer llama.cpp's saved state");
    if !bench.wants(&cold_name) && !bench.wants(&llama_name) {
        return Ok(());
    }
    let folder = bench.scratch.join("restart");
    let launch = Launch::new().storage(&folder).set("engine.threads", bench.threads);
    let prompt = prompt::ids(9, TOKENS);
    let server = launch.start();
    first_token(&server, &prompt, None, false)?;
    wait_stored(&server.client(), (TOKENS / 16) as u64);
    server.stop();

    // Each turn is a fresh process on both sides: one finds the prompt in storage, the other, under another salt,
    // does not.
    let mut turn = 0;
    let mut stored = Vec::new();
    let (ours, cold) = side_by_side(
        bench.rounds.min(5),
        || {
            let seconds = first_token(&launch.start(), &prompt, None, true)?;
            stored.push(seconds);
            Ok(seconds)
        },
        || {
            turn += 1;
            first_token(&launch.start(), &prompt, Some(&format!("turn {turn}")), false)
        },
    )?;
    if bench.wants(&cold_name) {
        report.add(Row { name: cold_name, ours, peer: cold, better: Better::Less, goal: Goal::Ratio(30.0) })?;
    }
    if bench.wants(&llama_name) {
        let mut llama = Llama::start(bench, bench.threads)?;
        let state = bench.scratch.join("llama-state");
        llama.save(&prompt, &state)?;
        let mut seconds = Vec::new();
        for _ in 0..bench.rounds {
            seconds.push(llama.restore(&prompt, &state, 77)?);
        }
        let peer = median(&mut seconds);
        // The first turn was the warm-up.
        let ours = median(stored.get_mut(1..).unwrap_or_default());
        report.add(Row { name: llama_name, ours, peer, better: Better::Less, goal: Goal::None })?;
    }
    Ok(())
}

/// Seconds from the request to its first token.
fn first_token(server: &Server, prompt: &[u32], salt: Option<&str>, from_storage: bool) -> Result<f64> {
    let client = server.client();
    let start = Instant::now();
    let (_, usage) = client.generate_salted(prompt, 1, salt);
    let seconds = start.elapsed().as_secs_f64();
    let expected = if from_storage { (TOKENS - 1) / 16 * 16 } else { 0 };
    ensure!(usage.storage == expected as u64, "expected {expected} tokens from storage, got {usage:?}");
    Ok(seconds)
}
