//! From which length on a prefix is loaded faster than computed, and that a storage that is slower than computing costs nothing.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use kvdock_tests::client::Client;
use kvdock_tests::prompt;
use kvdock_tests::server::Launch;

use crate::Bench;
use crate::disk::drop_from_page_cache;
use crate::plot::{self, Line, Panel};
use crate::row::{Better, Goal, Report, Row};
use crate::sample::{Turns, median, side_by_side};
use crate::stored::{PAGE, TOKENS, first_token, launch};

/// The name by which the curve is asked for.
const CURVE: &str = "break-even curve";
/// Lengths of the prefix; the last one is all that is stored.
const LENGTHS: [usize; 8] = [64, 128, 256, 512, 1024, 2048, 4096, TOKENS];
/// The longest that a quick run computes.
const QUICK: usize = 2048;

/// Tokens of the prompt beside a slow storage.
const SLOW_TOKENS: usize = 1024;
/// How many times as long loading from it takes as computing.
const SLOWER: f64 = 10.0;

/// Adds the rows and draws the curve.
///
/// # Errors
/// When a tier does not have what it has to have, or the picture can't be written.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    if bench.wants(CURVE) {
        curve(bench, report)?;
    }
    let name = format!(
        "first token of {SLOW_TOKENS} tokens, break-even \"auto\" and a storage {SLOWER} times slower than computing (s), peer without storage"
    );
    if bench.wants(&name) {
        let turns = beside_a_slow_storage(bench)?;
        report.add(Row::new(name, turns, Better::Less, Goal::Times(1.1)))?;
    }
    Ok(())
}

/// Seconds to the first token by length of the prefix, one curve a source.
fn curve(bench: &Bench, report: &mut Report) -> Result<()> {
    let stored = bench.stored()?;
    // Without this, short prefixes are not asked for.
    let server = launch(bench).storage(&stored.folder).set("cache.prefetch_threshold", PAGE).start();
    let client = server.client();
    // What is computed would be written to storage while storage is measured.
    let computing = launch(bench).set("cache.mode", "\"device\"").start();
    let rounds = bench.rounds.count.min(5);
    let line = |name: &str| Line { name: name.to_owned(), points: Vec::new() };
    let mut lines = [line("computed"), line("storage, cold"), line("storage, warm"), line("host"), line("device")];
    let mut salt = 0;
    for tokens in LENGTHS {
        let prompt = stored.prefix(tokens);
        let mut sample = |tier: &str| -> Result<f64> {
            match tier {
                "computed" => {
                    salt += 1;
                    first_token(&computing.client(), prompt, Some(&format!("curve {salt}")), Some(0))
                }
                "storage, cold" | "storage, warm" => {
                    client.flush();
                    if tier == "storage, cold" {
                        drop_from_page_cache(&stored.folder)?;
                    }
                    first_token(&client, prompt, None, Some(tokens))
                }
                tier => {
                    // It is on both now; the device is emptied where the host is to be measured.
                    if tier == "host" {
                        empty_device(&client)?;
                    }
                    let start = Instant::now();
                    let (_, usage) = client.generate(prompt, 1);
                    let seconds = start.elapsed().as_secs_f64();
                    let found = if tier == "host" { usage.host } else { usage.device };
                    ensure!(found == tokens as u64, "expected {tokens} tokens from {tier}, got {usage:?}");
                    Ok(seconds)
                }
            }
        };
        for line in &mut lines {
            let seconds = match line.name.as_str() {
                "computed" if tokens == TOKENS => stored.computed,
                "computed" if bench.quick && tokens > QUICK => continue,
                // What takes seconds is long enough to be measured once.
                "computed" if tokens >= QUICK => sample("computed")?,
                name => median(&mut (0..rounds).map(|_| sample(name)).collect::<Result<Vec<f64>>>()?),
            };
            line.points.push((tokens as f64, seconds));
        }
    }
    for line in &lines {
        let points: Vec<String> =
            line.points.iter().map(|(tokens, seconds)| format!("{tokens}: {:.1} ms", seconds * 1e3)).collect();
        println!("first token by prefix, {}: {}", line.name, points.join(", "));
    }
    let [computed, cold, ..] = &lines;
    match break_even(computed, cold) {
        Some(tokens) if tokens <= LENGTHS[0] as f64 => {
            println!("break-even, storage cold: {tokens:.0} tokens or fewer")
        }
        Some(tokens) => println!("break-even, storage cold: {tokens:.0} tokens"),
        None => println!("break-even, storage cold: none, computing is faster throughout"),
    }
    let picture = bench.pictures.join("break-even.png");
    let panel = Panel {
        title: "first token by length of the prefix".to_owned(),
        across: "tokens of the prefix".to_owned(),
        up: "seconds".to_owned(),
        lines: lines.to_vec(),
    };
    plot::write(&picture, &[panel])?;
    println!("the curve is in {}", picture.display());
    report.curve(CURVE, "s", &lines)
}

/// The length at which `loaded` becomes the faster one, on straight lines between the points of both axes' logarithms.
fn break_even(computed: &Line, loaded: &Line) -> Option<f64> {
    let both: Vec<(f64, f64)> = computed
        .points
        .iter()
        .filter_map(|(tokens, seconds)| {
            let other = loaded.points.iter().find(|point| point.0 == *tokens)?;
            Some((tokens.ln(), (other.1 / seconds).ln()))
        })
        .collect();
    let (first, _) = both.split_first()?;
    if first.1 <= 0.0 {
        return Some(first.0.exp());
    }
    both.windows(2).find_map(|pair| match pair {
        [(x0, y0), (x1, y1)] if *y0 > 0.0 && *y1 <= 0.0 => Some((x0 + (x1 - x0) * y0 / (y0 - y1)).exp()),
        _ => None,
    })
}

fn empty_device(client: &Client) -> Result<()> {
    // Copies to the host hold pages for a moment.
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let reply = client.post("/flush_cache?tiers=device", &serde_json::json!({}));
        ensure!(reply.status == 200, "/flush_cache: {}", reply.json);
        if client.metrics().sum("sglang:kv_evictable_tokens", &[]) == 0.0 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the device keeps pages");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Seconds to the first token with the prompt in a storage that is slower than computing, and without a storage.
fn beside_a_slow_storage(bench: &Bench) -> Result<Turns> {
    let plain = Launch::new().set("engine.threads", bench.threads);
    let without = plain.clone().set("cache.mode", "\"device\"").start();
    let mut turn = 0;
    let mut fresh = || {
        turn += 1;
        turn
    };
    // Under another salt nothing is found, and everything is computed.
    let computed = first_token(&without.client(), &prompt::ids(70, SLOW_TOKENS + 1), Some("first"), Some(0))?;
    let page_time = computed / (SLOW_TOKENS / PAGE) as f64 * SLOWER;
    let folder = kvdock_tests::paths::build().join("examples");
    let with = plain
        .set("storage.backend", "\"bench-slow\"")
        .set("storage.plugin_path", format!("[{:?}]", folder.display().to_string()))
        .set("storage.bench-slow.micros_per_page", (page_time * 1e6) as u64)
        .set("storage.break_even", "\"auto\"")
        .start();
    let (client, prompt) = (with.client(), prompt::ids(71, SLOW_TOKENS + 1));
    first_token(&client, &prompt, None, Some(0))?;
    kvdock_tests::storage::wait_stored(&client, (SLOW_TOKENS / PAGE) as u64);
    // Until both speeds are known the first hit is taken.
    let guard = Instant::now();
    loop {
        client.flush();
        let (_, usage) = client.generate(&prompt, 1);
        let known = client.get("/hicache/storage-backend").json.to_string().contains("load_bytes_per_second");
        if known && usage.storage == 0 {
            break;
        }
        ensure!(
            guard.elapsed() < Duration::from_secs(120),
            "the engine does not learn that storage is slow: {usage:?}"
        );
    }
    let ours = || {
        client.flush();
        first_token(&client, &prompt, None, None)
    };
    let peer = || {
        let salt = format!("turn {}", fresh());
        first_token(&without.client(), &prompt, Some(&salt), Some(0))
    };
    side_by_side(bench.rounds.longer(3), ours, peer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(points: &[(f64, f64)]) -> Line {
        Line { name: "a line".to_owned(), points: points.to_vec() }
    }

    #[test]
    fn the_crossing_lies_between_the_points_around_it() {
        let computed = line(&[(100.0, 1.0), (1000.0, 10.0)]);
        let crossing = break_even(&computed, &line(&[(100.0, 10.0), (1000.0, 1.0)])).unwrap();
        assert!((crossing - 10f64.powf(2.5)).abs() < 1e-6, "{crossing}");
        let always = break_even(&computed, &line(&[(100.0, 0.5), (1000.0, 1.0)])).unwrap();
        assert!((always - 100.0).abs() < 1e-9);
        assert_eq!(break_even(&computed, &line(&[(100.0, 2.0), (1000.0, 20.0)])), None);
    }
}
