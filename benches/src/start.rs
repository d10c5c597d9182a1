//! From nothing to a first token: a server of ours beside llama.cpp that loads the same file.

use std::time::Instant;

use anyhow::Result;
use kvdock_tests::prompt;
use kvdock_tests::server::Launch;

use crate::Bench;
use crate::llama::Llama;
use crate::row::{Better, Goal, Report, Row};
use crate::sample::side_by_side;
use crate::stored::first_token;

/// Tokens of the prompt.
const TOKENS: usize = 16;

/// Adds the row.
///
/// # Errors
/// When a side can't be measured.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let name = "server start to first token, weights in the page cache (s), peer llama.cpp's load and first token";
    if !bench.wants(name) {
        return Ok(());
    }
    let (launch, prompt) = (Launch::new().set("engine.threads", bench.threads), prompt::ids(3, TOKENS));
    // The process, the HTTP side and a request are in ours; the start of node is not in llama.cpp's.
    let ours = || {
        let start = Instant::now();
        let server = launch.start();
        first_token(&server.client(), &prompt, None, Some(0))?;
        Ok(start.elapsed().as_secs_f64())
    };
    let peer = || Llama::start(bench, bench.threads)?.first(&prompt);
    let turns = side_by_side(bench.rounds.longer(2), ours, peer)?;
    report.add(Row::new(name, turns, Better::Less, Goal::Ratio(1.0)))
}
