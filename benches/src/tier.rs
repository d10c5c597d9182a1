//! What the storage tier costs an engine that decodes: every page is written through to files, beside the same engine without the tier.

use std::sync::Barrier;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use kvdock_tests::client::Client;
use kvdock_tests::prompt;
use kvdock_tests::server::Launch;

use crate::Bench;
use crate::row::{Better, Goal, Report, Row};
use crate::sample::side_by_side;
use crate::stored::token_times;

const CLIENTS: u64 = 16;
/// Tokens of a prompt, no two of which begin alike.
const PROMPT: usize = 32;
/// Tokens of an answer.
const ANSWER: usize = 48;

/// Adds the row.
///
/// # Errors
/// When an answer is not what was asked for, or nothing was written.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let name = format!("decode with {CLIENTS} clients, written through to files (tokens/s), peer without the tier");
    if !bench.wants(&name) {
        return Ok(());
    }
    let launch = || Launch::new().set("engine.threads", bench.threads);
    let on = launch().storage(&bench.scratch.join("tier")).start();
    let off = launch().set("cache.mode", "\"device\"").start();
    let (mut ours, mut theirs) = (0, 1_000_000);
    let turns =
        side_by_side(bench.rounds.longer(6), || rate(&on.address(), &mut ours), || rate(&off.address(), &mut theirs))?;
    let stored = on.client().metrics().storage_pages("set", "ok");
    ensure!(stored > 0.0, "the engine with the tier has stored no page");
    report.add(Row::new(name, turns, Better::More, Goal::Ratio(0.97)))
}

/// Tokens a second of all clients together, while all of them decode: from the last first token to the first last one.
fn rate(address: &str, seed: &mut u64) -> Result<f64> {
    let ready = Barrier::new(CLIENTS as usize);
    let first = *seed;
    *seed += CLIENTS;
    let times: Vec<Vec<Instant>> = std::thread::scope(|scope| {
        let clients: Vec<_> = (first..first + CLIENTS)
            .map(|seed| {
                let ready = &ready;
                scope.spawn(move || {
                    let client = Client::new(address);
                    let prompt = prompt::ids(50_000 + seed, PROMPT);
                    ready.wait();
                    token_times(&client, &prompt, ANSWER)
                })
            })
            .collect();
        clients
            .into_iter()
            .map(|client| client.join().map_err(|_| anyhow!("a client panicked"))?)
            .collect::<Result<_>>()
    })?;
    let begin = times.iter().filter_map(|times| times.first()).max().context("tokens came")?;
    let end = times.iter().filter_map(|times| times.last()).min().context("tokens came")?;
    ensure!(begin < end, "the clients did not decode at the same time: {ANSWER} tokens are too few");
    let tokens = times.iter().flatten().filter(|time| *time > begin && *time <= end).count();
    Ok(tokens as f64 / (*end - *begin).as_secs_f64())
}
