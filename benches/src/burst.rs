//! Many requests at once whose long prefix is in storage alone, beside one such request.

use std::sync::Barrier;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use kvdock_tests::client::Client;

use crate::Bench;
use crate::row::{Better, Goal, Report, Row};
use crate::sample::side_by_side;
use crate::stored::{TOKENS, first_token, launch, token_times};

const REQUESTS: u32 = 50;

/// Adds the row.
///
/// # Errors
/// When a request does not get what storage has.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let name = format!("first token of {REQUESTS} requests at once, {TOKENS} tokens from storage (s), peer of one");
    if !bench.wants(&name) {
        return Ok(());
    }
    let stored = bench.stored()?;
    let server = launch(bench).storage(&stored.folder).set("engine.max_running_requests", REQUESTS).start();
    let client = server.client();
    let prefix = stored.prompt.get(..TOKENS).context("the prompt is as long as it was made")?;
    // What differs is the last token.
    let prompts: Vec<Vec<u32>> =
        (0..REQUESTS).map(|number| prefix.iter().copied().chain([2000 + number]).collect()).collect();
    let all = || {
        client.flush();
        last_first_token(&server.address(), &prompts)
    };
    let one = || {
        client.flush();
        first_token(&client, &stored.prompt, None, Some(TOKENS))
    };
    let turns = side_by_side(bench.rounds.longer(2), all, one)?;
    report.add(Row::new(name, turns, Better::Less, Goal::Times(1.5)))
}

/// Seconds from the moment at which all are asked until the last one has its first token.
fn last_first_token(address: &str, prompts: &[Vec<u32>]) -> Result<f64> {
    let ready = Barrier::new(prompts.len() + 1);
    std::thread::scope(|scope| {
        let clients: Vec<_> = prompts
            .iter()
            .map(|prompt| {
                let (client, ready) = (Client::new(address), &ready);
                scope.spawn(move || {
                    ready.wait();
                    token_times(&client, prompt, 1)
                })
            })
            .collect();
        ready.wait();
        let start = Instant::now();
        let mut last = start;
        for client in clients {
            let times = client.join().map_err(|_| anyhow!("a client panicked"))??;
            last = last.max(*times.first().context("a token came")?);
        }
        Ok((last - start).as_secs_f64())
    })
}
