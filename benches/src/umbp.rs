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
use crate::sample::{Rounds, Turns, side_by_side};
use crate::store::load;
use peer::{Peer, PlainCopy};

/// Objects of a call.
const BATCH: u64 = 32;

/// A size of objects.
struct Size {
    bytes: u64,
    name: &'static str,
    calls: Calls,
    /// Objects that the real one has room for between its caller and its disk.
    slots: u64,
    /// What is asked for beside the real one on the disk.
    goal: f64,
    /// How many times more turns than elsewhere.
    more: usize,
}

/// Calls of one sample.
struct Calls {
    memory: u64,
    disk: u64,
    /// Beside fio, which says how long it took in whole milliseconds.
    fio: u64,
}

/// The real one keeps a slot of an object that was read for 30 to 200 ms, whatever its settings say, and is fastest when they do not run out. While it
/// keeps it, it reads the object from there.
const SIZES: [Size; 3] = [
    Size {
        bytes: 64 << 10,
        name: "64 KiB",
        calls: Calls { memory: 16, disk: 4, fio: 16 },
        slots: 4096,
        goal: 3.0,
        more: 8,
    },
    Size { bytes: 1 << 20, name: "1 MiB", calls: Calls { memory: 2, disk: 2, fio: 4 }, slots: 512, goal: 1.0, more: 4 },
    Size { bytes: 4 << 20, name: "4 MiB", calls: Calls { memory: 1, disk: 1, fio: 2 }, slots: 128, goal: 1.0, more: 4 },
];

/// Slots with which small objects are read from the real one as well.
const FEW_SLOTS: u64 = 4 * BATCH;

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
        if self == Tier::Memory { size.calls.memory } else { size.calls.disk }
    }

    /// Batches that are got one after another, round and round. On the disk these are so many that the real one has none of them in its slots when its
    /// turn comes.
    fn kept(self, size: &Size) -> u64 {
        if self == Tier::Memory { size.calls.memory } else { 2 * size.slots / BATCH }
    }

    /// Bytes of the store, of either side.
    fn capacity(self) -> u64 {
        if self == Tier::Memory { 3 << 30 } else { 16 << 30 }
    }
}

/// The row of small objects beside the real one with few slots.
fn few_slots(size: &Size) -> String {
    Tier::Disk.row("get", size, &format!("{REAL} with {FEW_SLOTS} slots"))
}

/// Adds the rows.
///
/// # Errors
/// When a side can't be measured.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    for tier in [Tier::Memory, Tier::Disk] {
        for size in &SIZES {
            let mut names: Vec<String> =
                WAYS.iter().flat_map(|(_, way)| [REAL, tier.limit()].map(|peer| tier.row(way, size, peer))).collect();
            if tier == Tier::Disk && size.goal > 1.0 {
                names.push(few_slots(size));
            }
            if names.iter().any(|name| bench.wants(name)) {
                rows_of(bench, report, tier, size)?;
            }
        }
    }
    Ok(())
}

fn folder_of(bench: &Bench, whose: &str, size: &Size) -> PathBuf {
    bench.scratch.join(format!("umbp-{whose}-{}", size.bytes))
}

fn rows_of(bench: &Bench, report: &mut Report, tier: Tier, size: &Size) -> Result<()> {
    let mut ours = Ours::new(tier, size, folder_of(bench, "ours", size))?;
    let rounds = bench.rounds.times(size.more);
    let real =
        |slots| Peer::start(tier == Tier::Disk, size.bytes, slots, tier.capacity(), &folder_of(bench, "real", size));
    let wanted = WAYS.iter().any(|(_, way)| bench.wants(&tier.row(way, size, REAL)));
    let mut peer = if wanted { Some(real(size.slots)?) } else { None };
    let goal = Goal::Ratio(if tier == Tier::Memory { 1.0 } else { size.goal });
    for (way, word) in WAYS {
        if way == Way::Get {
            ours.before_gets()?;
        }
        beside_real(bench, report, tier.row(word, size, REAL), way, &mut ours, &mut peer, rounds, goal)?;
        let name = tier.row(word, size, tier.limit());
        if bench.wants(&name) {
            let (turns, goal) = match tier {
                Tier::Memory => (beside_a_copy(&mut ours, way, rounds)?, Goal::None),
                Tier::Disk => (beside_fio(bench, &mut ours, size, way, rounds.longer(2))?, Goal::Ratio(OF_FIO)),
            };
            report.add(Row::new(name, turns, Better::More, goal))?;
        }
    }
    let name = few_slots(size);
    if tier == Tier::Disk && size.goal > 1.0 && bench.wants(&name) {
        drop(peer.take());
        let _ = std::fs::remove_dir_all(folder_of(bench, "real", size));
        peer = Some(real(FEW_SLOTS)?);
        beside_real(bench, report, name, Way::Get, &mut ours, &mut peer, rounds, Goal::None)?;
    }
    drop(peer);
    ours.end()?;
    for whose in ["ours", "real"] {
        // The next size needs the room.
        let _ = std::fs::remove_dir_all(folder_of(bench, whose, size));
    }
    Ok(())
}

#[allow(clippy::too_many_arguments, reason = "what a row is made of")]
fn beside_real(
    bench: &Bench,
    report: &mut Report,
    name: String,
    way: Way,
    ours: &mut Ours,
    peer: &mut Option<Result<Peer, String>>,
    rounds: Rounds,
    goal: Goal,
) -> Result<()> {
    let peer = match peer {
        Some(Err(reason)) if bench.wants(&name) => return report.skip(&name, reason),
        Some(Ok(peer)) if bench.wants(&name) => peer,
        _ => return Ok(()),
    };
    let (bytes, calls, kept) = (ours.bytes, ours.calls, ours.kept);
    if way == Way::Get {
        peer.fill(kept)?;
    }
    let theirs = || {
        let seconds = if way == Way::Put { peer.put(calls)? } else { peer.get(calls, kept)? };
        Ok(rate(bytes, calls, seconds))
    };
    let turns = side_by_side(rounds, || ours.rate(way, calls), theirs)?;
    let missing = [("this side", ours.not_read), ("the real UMBP", peer.not_read())];
    match missing.into_iter().find(|(_, bytes)| *bytes > 0) {
        Some((whose, bytes)) => {
            report.skip(&name, &format!("{whose} read {bytes} bytes out of a cache and not from the disk"))
        }
        None => report.add(Row::new(name, turns, Better::More, goal)),
    }
}

fn beside_a_copy(ours: &mut Ours, way: Way, rounds: Rounds) -> Result<Turns> {
    let (bytes, calls) = (ours.bytes, ours.calls);
    let mut copy = PlainCopy::new(bytes, BATCH);
    side_by_side(rounds, || ours.rate(way, calls), || Ok(rate(bytes, calls, copy.run(way == Way::Put, calls))))
}

/// It does the same: durable after each batch, and cold reads.
fn beside_fio(bench: &Bench, ours: &mut Ours, size: &Size, way: Way, rounds: Rounds) -> Result<Turns> {
    let (file, calls) = (folder_of(bench, "fio", size), size.calls.fio);
    let total = size.bytes * BATCH * calls;
    let (depth, sync_every) = (BATCH as u32, BATCH as u32);
    let job = |direction| Job { direction, file: &file, block: size.bytes, total, depth, sync_every };
    if way == Way::Get {
        job(Direction::Write).run()?;
    }
    let direction = if way == Way::Put { Direction::Write } else { Direction::Read };
    let turns = side_by_side(rounds, || ours.rate(way, calls), || Ok(job(direction).run()? / 1e9))?;
    std::fs::remove_file(&file).with_context(|| format!("can't remove {}", file.display()))?;
    Ok(turns)
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
    /// How many of them are got, those that were put last.
    kept: u64,
    /// Gets so far, in batches.
    got: u64,
    /// Bytes that did not come from the disk although they lie there.
    not_read: u64,
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
            kept: tier.kept(size),
            got: 0,
            not_read: 0,
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
    fn put(&mut self, calls: u64) -> Result<f64> {
        let batches: Vec<_> = (self.put..self.put + calls).map(|batch| self.parts(batch)).collect();
        self.put += calls;
        let begin = Instant::now();
        for parts in &batches {
            let outcome = self.store()?.set(&Options::default(), parts);
            ensure!(outcome.all_ok(), "not all objects were stored: {outcome:?}");
        }
        Ok(begin.elapsed().as_secs_f64())
    }

    /// Seconds of getting some of what was put last, each time others.
    fn get(&mut self, calls: u64) -> Result<f64> {
        let first = self.put - self.kept;
        let batches: Vec<_> = (self.got..self.got + calls).map(|batch| self.parts(first + batch % self.kept)).collect();
        self.got += calls;
        let before = bytes_read();
        let begin = Instant::now();
        for parts in &batches {
            let outcome = self.store()?.get(&Options::default(), parts);
            ensure!(outcome.all_ok(), "not all objects came back: {outcome:?}");
        }
        let seconds = begin.elapsed().as_secs_f64();
        if let (Tier::Disk, Some(before), Some(after)) = (self.tier, before, bytes_read()) {
            self.not_read += (calls * BATCH * self.bytes).saturating_sub(after.saturating_sub(before));
        }
        Ok(seconds)
    }

    fn rate(&mut self, way: Way, calls: u64) -> Result<f64> {
        let seconds = if way == Way::Put { self.put(calls)? } else { self.get(calls)? };
        Ok(rate(self.bytes, calls, seconds))
    }

    /// Puts what there is to be got. What lies on the disk is to be read from there: a new instance, whose memory is empty.
    fn before_gets(&mut self) -> Result<()> {
        self.put(self.kept)?;
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

/// Bytes that the disks gave this process so far, as the kernel counts them; none where it does not say.
fn bytes_read() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix("read_bytes: "))?.parse().ok()
}
