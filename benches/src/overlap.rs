//! Loading while computing: the first token in linker mode with a storage that delivers layers at a fixed pace.

use anyhow::{Result, ensure};
use kvdock_tests::client::Client;
use kvdock_tests::prompt;
use kvdock_tests::server::Launch;
use kvdock_tests::storage::wait_stored;

use crate::Bench;
use crate::row::{Better, Goal, Report, Row};
use crate::sample::{median, side_by_side};
use crate::stored::{PAGE, first_token};

/// Tokens that come from storage.
const PREFIX: usize = 2048;
/// Tokens that are computed behind them, in one chunk.
const TAIL: usize = 384;
/// Layers of the small model.
const LAYERS: u32 = 30;

/// Adds the rows.
///
/// # Errors
/// When the prefix does not come from where it has to.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let what =
        format!("first token of {PREFIX} tokens from a storage as fast as {TAIL} more are computed, linker mode (s)");
    let overlapped = format!("{what}, less one layer, peer the longer of both");
    let summed = format!("{what}, peer both one after the other");
    if !bench.wants(&overlapped) && !bench.wants(&summed) {
        return Ok(());
    }
    let launch = Launch::linked()
        .set("engine.threads", bench.threads)
        .set("cache.device_tokens", 16_384)
        .set("engine.prefill_chunk", 1024);
    let mut turn = 0;
    let mut tail = || {
        turn += 1;
        prompt::ids(5000 + turn, TAIL)
    };
    // How long the tail takes with the prefix on the device. With no pace the load takes next to no time.
    let prefix = prompt::ids(72, PREFIX);
    let with_tail = |tail: Vec<u32>| [prefix.as_slice(), tail.as_slice()].concat();
    let folder = kvdock_tests::paths::build().join("examples");
    let paced = launch
        .set("storage.backend", "\"bench-slow\"")
        .set("storage.plugin_path", format!("[{:?}]", folder.display().to_string()));
    let computed = {
        let server = paced.clone().start();
        let client = server.client();
        client.generate(&with_tail(tail()), 1);
        let mut times = Vec::new();
        for _ in 0..bench.rounds.count.min(5) {
            times.push(from_device(&client, &with_tail(tail()))?);
        }
        median(&mut times)
    };
    let pace = computed / f64::from(LAYERS);
    let server = paced.set("storage.bench-slow.micros_per_layer", (pace * 1e6) as u64).start();
    let client = server.client();
    client.generate(&with_tail(tail()), 1);
    wait_stored(&client, ((PREFIX + TAIL) / PAGE) as u64);
    let tails = std::cell::RefCell::new(tail);
    let ours = || {
        client.flush();
        let tail = (tails.borrow_mut())();
        first_token(&client, &with_tail(tail), None, Some(PREFIX))
    };
    // The prefix is on the device then: what is measured is computing alone.
    let peer = || {
        let tail = (tails.borrow_mut())();
        from_device(&client, &with_tail(tail))
    };
    let turns = side_by_side(bench.rounds.longer(3), ours, peer)?;
    let loaded = pace * f64::from(LAYERS);
    let longer = turns.clone().map(|ours, computed| (ours - pace, computed.max(loaded)));
    report.add(Row::new(overlapped, longer, Better::Less, Goal::Times(1.15)))?;
    report.add(Row::new(summed, turns.map(|ours, computed| (ours, computed + loaded)), Better::Less, Goal::None))
}

/// Seconds to the first token with the prefix on the device.
fn from_device(client: &Client, prompt: &[u32]) -> Result<f64> {
    let start = std::time::Instant::now();
    let (_, usage) = client.generate(prompt, 1);
    let seconds = start.elapsed().as_secs_f64();
    ensure!(usage.device == PREFIX as u64, "expected {PREFIX} tokens from the device, got {usage:?}");
    Ok(seconds)
}
