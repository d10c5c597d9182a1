//! The UMBP plugin in this process beside the real UMBP in a process of its own, and beside what the machine can do: a copy in memory, and fio on the same disk.

mod peer;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, ensure};
use kvdock_plugin_api::mock::{Instance, MockHost, MockPool, Options, Part, PoolSpec, identity, key};
use kvdock_tests::paths;
use serde_json::{Value, json};

use crate::Bench;
use crate::fio::{Direction, Job};
use crate::row::{Better, Goal, Report, Row};
use crate::sample::side_by_side;
use crate::store::load;
use peer::{Peer, PlainCopy};

/// Objects of a call.
const BATCH: u64 = 32;

/// A size of objects.
struct Size {
    bytes: u64,
    name: &'static str,
    /// Calls of one sample in memory, and on the disk.
    calls: (u64, u64),
    /// What is asked for beside the real one on the disk.
    goal: f64,
}

const SIZES: [Size; 3] = [
    Size { bytes: 64 << 10, name: "64 KiB", calls: (16, 8), goal: 3.0 },
    Size { bytes: 1 << 20, name: "1 MiB", calls: (4, 4), goal: 1.0 },
    Size { bytes: 4 << 20, name: "4 MiB", calls: (2, 2), goal: 1.0 },
];

/// Where objects are kept.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tier {
    Memory,
    Disk,
}

/// Which way objects go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Put,
    Get,
}

const WAYS: [(Way, &str); 2] = [(Way::Put, "put"), (Way::Get, "get")];
/// What the others are called in the names of rows.
const REAL: &str = "the real UMBP";
/// What part of fio's rate is asked for.
const OF_FIO: f64 = 0.7;

impl Tier {
    fn row(self, way: &str, size: &Size, peer: &str) -> String {
        let tier = if self == Tier::Memory { "DRAM" } else { "SSD, strict, with checksums" };
        format!("umbp, {tier}, {way} of {BATCH} x {} (GB/s), peer {peer}", size.name)
    }

    fn limit(self) -> &'static str {
        if self == Tier::Memory { "memory copy" } else { "fio" }
    }

    fn calls(self, size: &Size) -> u64 {
        if self == Tier::Memory { size.calls.0 } else { size.calls.1 }
    }

    /// Bytes of the store, of either side.
    fn capacity(self) -> u64 {
        if self == Tier::Memory { 3 << 30 } else { 16 << 30 }
    }
}

/// Adds the rows.
///
/// # Errors
/// When a side can't be measured.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    for tier in [Tier::Memory, Tier::Disk] {
        for size in &SIZES {
            let names = WAYS.map(|(_, way)| [tier.row(way, size, REAL), tier.row(way, size, tier.limit())]);
            if names.iter().flatten().any(|name| bench.wants(name)) {
                rows_of(bench, report, tier, size)?;
            }
        }
    }
    Ok(())
}

fn rows_of(bench: &Bench, report: &mut Report, tier: Tier, size: &Size) -> Result<()> {
    let folder = |whose: &str| bench.scratch.join(format!("umbp-{whose}-{}", size.bytes));
    let mut ours = Ours::new(tier, size, folder("ours"))?;
    let real = WAYS.iter().any(|(_, way)| bench.wants(&tier.row(way, size, REAL)));
    let mut peer =
        if real { Some(Peer::start(tier == Tier::Disk, size.bytes, tier.capacity(), &folder("real"))?) } else { None };
    let rounds = bench.rounds.times(if size.bytes < 1 << 20 { 2 } else { 1 });
    for (way, word) in WAYS {
        if way == Way::Get {
            // Both read what was put last, whatever was measured before.
            ours.put()?;
            ours.before_gets()?;
            if let Some(Ok(peer)) = &mut peer {
                peer.put(tier.calls(size))?;
            }
        }
        let name = tier.row(word, size, REAL);
        match &mut peer {
            Some(Err(reason)) if bench.wants(&name) => report.skip(&name, reason)?,
            Some(Ok(peer)) if bench.wants(&name) => {
                let calls = tier.calls(size);
                let theirs = || {
                    let seconds = if way == Way::Put { peer.put(calls)? } else { peer.get(calls)? };
                    Ok(rate(size.bytes, calls, seconds))
                };
                let turns = side_by_side(rounds, || ours.rate(way), theirs)?;
                let goal = Goal::Ratio(if tier == Tier::Memory { 1.0 } else { size.goal });
                report.add(Row::new(name, turns, Better::More, goal))?;
            }
            _ => {}
        }
        let name = tier.row(word, size, tier.limit());
        if bench.wants(&name) {
            let turns = match tier {
                Tier::Memory => {
                    let mut copy = PlainCopy::new(size.bytes, BATCH);
                    let calls = tier.calls(size);
                    let plain = || Ok(rate(size.bytes, calls, copy.run(way == Way::Put, calls)));
                    side_by_side(rounds, || ours.rate(way), plain)?
                }
                Tier::Disk => {
                    let (file, total) = (folder("fio"), size.bytes * BATCH * tier.calls(size));
                    // It does the same: durable after each batch, and cold reads.
                    let job = |direction| Job {
                        direction,
                        file: &file,
                        block: size.bytes,
                        total,
                        depth: BATCH as u32,
                        sync_every: BATCH as u32,
                    };
                    if way == Way::Get {
                        job(Direction::Write).run()?;
                    }
                    let direction = if way == Way::Put { Direction::Write } else { Direction::Read };
                    let measured = side_by_side(rounds, || ours.rate(way), || Ok(job(direction).run()? / 1e9))?;
                    std::fs::remove_file(&file).with_context(|| format!("can't remove {}", file.display()))?;
                    measured
                }
            };
            let goal = if tier == Tier::Memory { Goal::None } else { Goal::Ratio(OF_FIO) };
            report.add(Row::new(name, turns, Better::More, goal))?;
        }
    }
    drop(peer);
    ours.end()?;
    for whose in ["ours", "real"] {
        // The next size needs the room.
        let _ = std::fs::remove_dir_all(folder(whose));
    }
    Ok(())
}

/// Bytes a second, in units of 10^9.
fn rate(bytes: u64, calls: u64, seconds: f64) -> f64 {
    (bytes * BATCH * calls) as f64 / seconds / 1e9
}

/// Our side: an instance of the plugin, and the pool that its objects come from and go to.
struct Ours {
    tier: Tier,
    bytes: u64,
    calls: u64,
    folder: PathBuf,
    // None only between two instances.
    store: Option<Instance>,
    pool: MockPool,
    // The instance talks to it to its end.
    _host: MockHost,
    /// Batches that were put.
    put: u64,
}

impl Ours {
    fn new(tier: Tier, size: &Size, folder: PathBuf) -> Result<Ours> {
        let pool = MockPool::new(PoolSpec::bytes(0, "kv", BATCH, &[size.bytes]));
        (0..BATCH).for_each(|page| pool.fill(page as u32, page));
        let (store, host) = attach(&Ours::config(tier, size.bytes, &folder, true), &pool)?;
        Ok(Ours {
            tier,
            bytes: size.bytes,
            calls: tier.calls(size),
            folder,
            store: Some(store),
            pool,
            _host: host,
            put: 0,
        })
    }

    /// Memory alone; or segments that every set waits for, and whose pages do not come back to memory.
    fn config(tier: Tier, bytes: u64, folder: &std::path::Path, writes: bool) -> Value {
        match tier {
            Tier::Memory => json!({
                "ssd_enabled": false, "dram_capacity_bytes": tier.capacity(), "dram_page_size": bytes, "dram_prefault": true,
            }),
            Tier::Disk => json!({
                "ssd_storage_dir": folder, "ssd_capacity_bytes": tier.capacity(), "ssd_durability_mode": "strict",
                "role": if writes { "leader" } else { "standalone" }, "ssd_copy_async": false, "auto_promote_on_read": false,
                "dram_capacity_bytes": 1u64 << 30, "dram_prefault": writes,
            }),
        }
    }

    fn parts(&self, batch: u64) -> [Part; 1] {
        let keys: Vec<_> = (batch * BATCH..(batch + 1) * BATCH).map(key).collect();
        let pages: Vec<u32> = (0..BATCH as u32).collect();
        [Part::new(&self.pool, &keys, &pages)]
    }

    /// Seconds of putting new objects.
    fn put(&mut self) -> Result<f64> {
        let batches: Vec<_> = (self.put..self.put + self.calls).map(|batch| self.parts(batch)).collect();
        self.put += self.calls;
        let begin = Instant::now();
        for parts in &batches {
            let outcome = self.store()?.set(&Options::default(), parts);
            ensure!(outcome.all_ok(), "not all objects were stored: {outcome:?}");
        }
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Seconds of getting what was put last.
    fn get(&mut self) -> Result<f64> {
        let batches: Vec<_> = (self.put - self.calls..self.put).map(|batch| self.parts(batch)).collect();
        let begin = Instant::now();
        for parts in &batches {
            let outcome = self.store()?.get(&Options::default(), parts);
            ensure!(outcome.all_ok(), "not all objects came back: {outcome:?}");
        }
        Ok(begin.elapsed().as_secs_f64())
    }

    fn rate(&mut self, way: Way) -> Result<f64> {
        let seconds = if way == Way::Put { self.put()? } else { self.get()? };
        Ok(rate(self.bytes, self.calls, seconds))
    }

    /// What lies on the disk is to be read from there: a new instance, whose memory is empty.
    fn before_gets(&mut self) -> Result<()> {
        if self.tier == Tier::Disk {
            self.end()?;
            let config = Ours::config(self.tier, self.bytes, &self.folder, false);
            let (store, host) = attach(&config, &self.pool)?;
            (self.store, self._host) = (Some(store), host);
        }
        Ok(())
    }

    fn store(&self) -> Result<&Instance> {
        self.store.as_ref().context("there is an instance")
    }

    fn end(&mut self) -> Result<()> {
        self.store.take().map_or(Ok(()), Instance::close).map_err(|error| anyhow!("{error}"))
    }
}

fn attach(config: &Value, pool: &MockPool) -> Result<(Instance, MockHost)> {
    let (table, host) = (load(&paths::umbp_plugin())?, MockHost::new());
    let store = host.attach(table, &config.to_string(), &identity("bench"), &[pool]);
    Ok((store.map_err(|error| anyhow!("can't attach the UMBP plugin: {error}"))?, host))
}
