//! The gaps between tokens while backends are swapped, beside the same load without swaps.

use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use kvdock_tests::load::{Load, Report as Met, Shape};
use kvdock_tests::server::Launch;
use kvdock_tests::swaps::{Script, Stage};

use crate::Bench;
use crate::row::{Better, Goal, Report, Row};
use crate::sample::side_by_side;

const CLIENTS: u64 = 64;
/// From one change of backends to the next.
const PAUSE: Duration = Duration::from_secs(2);
/// Changes in one turn. The turns together make all of the script's.
const CHANGES: usize = 2;
const TURNS: usize = Script::ROUND.div_ceil(CHANGES);

/// Prompts of more pages in all than the pools hold.
const SHAPE: Shape = Shape { groups: 8, group: 4, shared: 64, own: 64, new_tokens: 24 };

/// Adds the row.
///
/// # Errors
/// When an answer is not the cold one, or the server can't be measured.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let name = format!(
        "p99 gap between tokens, {CLIENTS} streaming clients, backends swapped every {} s (ms), peer without swaps",
        PAUSE.as_secs()
    );
    if !bench.wants(&name) {
        return Ok(());
    }
    let stage = Stage::default();
    let launch = Launch::new()
        .set("engine.threads", bench.threads)
        .set("engine.max_running_requests", CLIENTS)
        .set("cache.device_tokens", 2048)
        .set("cache.host_tokens", 1024)
        .set("cache.prefetch_threshold", 16);
    let server = stage.set(launch).start();
    let client = server.client();
    let load = Load::prepare(&client, &SHAPE).map_err(|error| anyhow!(error))?;
    let mut script = stage.script(server.client());
    let mut warm = Ok(());
    script.fill(|| warm = load.warm(&client));
    warm.map_err(|error| anyhow!(error))?;
    let address = server.address();
    let script = std::cell::RefCell::new(&mut script);
    let turns = side_by_side(
        bench.rounds.longer(12).at_most(TURNS),
        || milliseconds(load.run(&address, CLIENTS, || script.borrow_mut().run(CHANGES, PAUSE)).0),
        || {
            // With what the last change left attached.
            milliseconds(load.run(&address, CLIENTS, || std::thread::sleep(PAUSE * CHANGES as u32)).0)
        },
    )?;
    report.add(Row::new(name, turns, Better::Less, Goal::Times(1.5)))
}

/// The gap that 99 of 100 do not exceed.
fn milliseconds(met: Met) -> Result<f64> {
    if let Some(failure) = met.failures.first() {
        bail!("an answer went wrong: {failure}");
    }
    let p99 = met.gap(0.99) * 1e3;
    eprintln!("  {} answers, {} gaps, p99 {p99:.0} ms, {:?}", met.answers, met.gaps.len(), met.usage);
    Ok(p99)
}
