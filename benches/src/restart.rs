//! The first token of a long prompt after a restart: from storage, computed, and from llama.cpp's saved state.

use anyhow::{Context, Result};
use kvdock_tests::server::Launch;

use crate::Bench;
use crate::disk::drop_from_page_cache;
use crate::fio::{Direction, Job};
use crate::llama::Llama;
use crate::row::{Better, Goal, Report, Row};
use crate::sample::{Turns, side_by_side};
use crate::stored::{PAGE, Stored, first_token, token_times};

/// Tokens that come from storage; the prompt has one more.
const TOKENS: usize = 2048;
/// Bytes that fio reads to learn the disk's rate.
const READ: u64 = 256 << 20;
/// Tokens over which a decode step is measured.
const STEPS: usize = 32;

/// Adds the rows.
///
/// # Errors
/// When a side can't be measured.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let name = |how: &str| format!("first token after a restart, {TOKENS} tokens from storage, {how}");
    let llama_name = name("page cache warm (s), peer llama.cpp restoring its saved state");
    let disk_name = name("page cache cold (s), peer its bytes at fio's rate and one decode step");
    let computed_name = name("page cache warm (s), peer the same computed");
    if ![&llama_name, &disk_name, &computed_name].into_iter().any(|name| bench.wants(name)) {
        return Ok(());
    }
    let stored = bench.stored()?;
    let prompt = stored.prefix(TOKENS);
    // Each turn is a fresh process.
    let launch = Launch::new().storage(&stored.folder).set("engine.threads", bench.threads);
    let ours = || first_token(&launch.start().client(), prompt, None, Some(TOKENS));
    // Each turn starts a process.
    let rounds = bench.rounds.longer(5);
    if bench.wants(&llama_name) {
        let mut llama = Llama::start(bench, bench.threads)?;
        let state = bench.scratch.join("llama-state");
        let (last, before) = prompt.split_last().context("the prompt has tokens")?;
        llama.save(before, &state)?;
        let turns = side_by_side(rounds, ours, || llama.restore(before, &state, *last))?;
        report.add(Row::new(llama_name, turns, Better::Less, Goal::Ratio(1.2)))?;
    }
    if bench.wants(&disk_name) {
        let turns = beside_the_disk(bench, stored, &launch)?;
        report.add(Row::new(disk_name, turns, Better::Less, Goal::Times(1.25)))?;
    }
    if bench.wants(&computed_name) {
        let mut turn = 0;
        // Under another salt nothing is found.
        let computed = || {
            turn += 1;
            first_token(&launch.start().client(), prompt, Some(&format!("turn {turn}")), Some(0))
        };
        let turns = side_by_side(rounds, ours, computed)?;
        report.add(Row::new(computed_name, turns, Better::Less, Goal::Ratio(30.0)))?;
    }
    Ok(())
}

/// Seconds to the first token with nothing of storage in the page cache, and those that the disk and the model need at the least.
fn beside_the_disk(bench: &Bench, stored: &Stored, launch: &Launch) -> Result<Turns> {
    let prompt = stored.prefix(TOKENS);
    let step = {
        let server = launch.start();
        let times = token_times(&server.client(), prompt, STEPS + 1)?;
        let (first, last) = times.first().zip(times.last()).context("tokens came")?;
        (*last - *first).as_secs_f64() / STEPS as f64
    };
    let bytes = stored.page_bytes * (TOKENS / PAGE) as f64;
    let file = bench.scratch.join("fio-restart");
    let job = |direction| Job { direction, file: &file, block: 1 << 20, total: READ, depth: 32, sync_every: 0 };
    job(Direction::Write).run()?;
    let ours = || {
        let server = launch.start();
        drop_from_page_cache(&stored.folder)?;
        first_token(&server.client(), prompt, None, Some(TOKENS))
    };
    let peer = || job(Direction::Read).run().map(|rate| bytes / rate + step);
    let turns = side_by_side(bench.rounds.longer(3), ours, peer);
    std::fs::remove_file(&file).with_context(|| format!("can't remove {}", file.display()))?;
    turns
}
