//! Operations by chance, by two of our clients and an official one, with kills and a restart, against a model of what objects hold.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::services::{Master, Mode, Official};
use common::*;
use kvdock_plugin_api::PageStatus;
use kvdock_plugin_api::mock::{Instance, MockHost, MockPool, Options, Outcome, Part, PoolSpec, Query, key};
use kvdock_tests::prompt::Random;
use kvdock_tests::soak;
use rustix::process::{Pid, Signal, kill_process};
use sha2::{Digest, Sha256};

/// Bytes of a page.
const BYTES: u64 = 24_000;
/// Of which in a pool with a seal these are the seal.
const SEAL: u64 = 32;
/// Numbers of pages. More than the segments hold, so that the master evicts.
const PAGES: u64 = 4_000;
/// Bytes that each client lends.
const SEGMENT: u64 = 24 << 20;
/// Pages of a call.
const MOST: u64 = 32;
/// The configuration of a client in a process of its own, which it gets in the environment.
const CONFIG: &str = "MOONCAKE_RANDOM_CONFIG";
/// And its seed.
const SEED: &str = "MOONCAKE_RANDOM_SEED";

/// How long: 30 s, or 90 s for each that `KVDOCK_SOAK` says, which makes ten minutes of `cargo xtask soak`.
fn length() -> Duration {
    match soak::factor() {
        1 => Duration::from_secs(30),
        factor => Duration::from_secs(90 * u64::from(factor)),
    }
}

/// Neighbours, and now and then a single page.
fn some_pages(chance: &mut Random) -> Vec<u64> {
    let count = if chance.below(4) == 0 { 1 } else { 1 + chance.below(MOST) };
    // Most calls meet in a part of the pages.
    let span = if chance.below(4) == 0 { PAGES } else { PAGES / 20 };
    let first = chance.below(span);
    (first..(first + count).min(PAGES)).collect()
}

/// Two pools: for pages with a seal their host is the last to say whether they are right, for those without the plugin is.
fn pools(pages: u64) -> [MockPool; 2] {
    let half = (BYTES - SEAL) / 2;
    let sealed = PoolSpec::bytes(0, "kv", pages, &[half, BYTES - SEAL - half]).with_seal(SEAL);
    [sealed, PoolSpec::bytes(1, "bare", pages, &[BYTES / 2, BYTES / 2])].map(MockPool::new)
}

/// What a page of a number holds; where there is a seal, it binds payload and key.
fn content(pool: &MockPool, number: u64) -> Vec<u8> {
    let mut bytes = pool.pattern(number);
    if pool.spec().seal {
        let payload = bytes.len() - SEAL as usize;
        let seal = Sha256::new().chain_update(key(number)).chain_update(&bytes[..payload]).finalize();
        bytes[payload..].copy_from_slice(&seal);
    }
    bytes
}

/// Whether the seal of a page is the right one, as a host looks at it.
fn is_sealed(bytes: &[u8], number: u64) -> bool {
    let (payload, seal) = bytes.split_at(bytes.len() - SEAL as usize);
    *Sha256::new().chain_update(key(number)).chain_update(payload).finalize() == *seal
}

/// One of our clients.
struct Client {
    store: Instance,
    pools: [MockPool; 2],
    // The instance talks to it to its end.
    host: MockHost,
}

impl Client {
    /// Opens a client; none while there is no master.
    fn open(config: &str) -> Option<Client> {
        let (host, store) = try_attach(config, "model", &[]);
        let client = Client { store: store.ok()?, pools: pools(MOST), host };
        client.store.register(&client.pools[0]).ok()?;
        client.store.register_side(&[&client.pools[1]]).ok()?;
        Some(client)
    }

    fn part(&self, pool: &MockPool, numbers: &[u64]) -> Part {
        let pages: Vec<u32> = (0..numbers.len() as u32).collect();
        Part::new(pool, &keys(numbers), &pages)
    }

    fn set(&self, pool: &MockPool, numbers: &[u64]) -> Outcome {
        numbers.iter().enumerate().for_each(|(page, number)| pool.write(page as u32, &content(pool, *number)));
        self.store.set(&Options::default(), &[self.part(pool, numbers)])
    }

    /// Which of the pages are there. Each that is must hold what its number says; one that has a seal may be refused by its host before that.
    fn which(&self, pool: &MockPool, numbers: &[u64], refused: &AtomicU64) -> Vec<bool> {
        (0..numbers.len()).for_each(|page| pool.wipe(page as u32));
        let got = self.store.get(&Options::default(), &[self.part(pool, numbers)]);
        let is_right = |(page, number): (usize, &u64)| {
            let bytes = pool.read(page as u32);
            if got.statuses[0][page] != PageStatus::Ok {
                return false;
            }
            if pool.spec().seal && !is_sealed(&bytes, *number) {
                refused.fetch_add(1, Ordering::Relaxed);
                return false;
            }
            assert!(bytes == content(pool, *number), "page {number} of {} has other bytes", pool.spec().name);
            true
        };
        numbers.iter().enumerate().map(is_right).collect()
    }
}

/// One operation of ours. What a page holds is told by its number, so every page that is read is checked against the model, whoever wrote
/// it. Answers how many were read.
///
/// A removal by force breaks the leases of official readers, which then may see what came after: `quiet` keeps it from them.
fn operate(client: &Client, chance: &mut Random, quiet: Option<&RwLock<()>>, refused: &AtomicU64) -> usize {
    let numbers = some_pages(chance);
    let pool = &client.pools[chance.below(2) as usize];
    match chance.below(10) {
        0..=3 => drop(client.set(pool, &numbers)),
        8 if let Some(quiet) = quiet => {
            let _alone = quiet.write().unwrap();
            client.store.remove(&Options::default(), &[client.part(pool, &numbers)]);
        }
        // It fails while there is no master.
        9 => drop(client.store.exists(&Options::default(), &keys(&numbers), &[Query::of(pool)])),
        _ => return client.which(pool, &numbers, refused).into_iter().filter(|there| *there).count(),
    }
    0
}

/// A client for as long as it is let, or its process lives. By itself it is a test of one client and one master.
#[test]
fn one_client_reads_what_it_wrote() {
    let started = std::env::var(CONFIG).ok();
    let master = started.is_none().then(|| Master::start(&[]));
    let config = started.unwrap_or_else(|| master.as_ref().unwrap().config(Mode::Peer, SEGMENT));
    let mut chance = Random::new(std::env::var(SEED).map_or(1, |seed| seed.parse().unwrap()));
    let mut read = 0;
    let began = Instant::now();
    let refused = AtomicU64::new(0);
    let client = loop {
        if let Some(client) = Client::open(&config) {
            break client;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "the client can't start");
        std::thread::sleep(Duration::from_millis(50));
    };
    // Whoever started this process ends it.
    while master.is_none() || began.elapsed() < Duration::from_secs(2) || read == 0 {
        let now = operate(&client, &mut chance, None, &refused);
        read += now;
        if master.is_none() && now > 0 {
            println!("\nread {now}");
        }
        if master.is_none() && refused.swap(0, Ordering::Relaxed) > 0 {
            println!("\nrefused");
        }
        assert!(began.elapsed() < Duration::from_secs(3600));
    }
    assert!(read > 0);
}

/// Runs such a client in a process of its own and kills it in the middle of what it does, again and again.
fn killed_client(config: &str, stop: &AtomicBool, read: &AtomicU64, refused: &AtomicU64, kills: &AtomicU64) {
    let mut chance = Random::new(5);
    while !stop.load(Ordering::Acquire) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "one_client_reads_what_it_wrote", "--nocapture"])
            .env(CONFIG, config)
            .env(SEED, chance.number().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let said = std::thread::scope(|scope| {
            scope.spawn(|| {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    let count: Option<u64> = line.strip_prefix("read ").and_then(|count| count.parse().ok());
                    read.fetch_add(count.unwrap_or(0), Ordering::Relaxed);
                    refused.fetch_add(u64::from(line == "refused"), Ordering::Relaxed);
                }
            });
            let said = scope.spawn(|| std::io::read_to_string(stderr).unwrap_or_default());
            let until = Instant::now() + Duration::from_millis(1500 + chance.below(4000));
            while Instant::now() < until && !stop.load(Ordering::Acquire) {
                if child.try_wait().unwrap().is_some() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            let ended = child.try_wait().unwrap();
            let _ = child.kill();
            child.wait().unwrap();
            assert!(ended.is_none(), "a client ended by itself: {ended:?}");
            said.join().unwrap()
        });
        assert!(!said.contains("panicked"), "a client in a process of its own: {said}");
        kills.fetch_add(1, Ordering::Relaxed);
    }
}

/// One operation of the official client. None when it was killed in the middle.
fn official_operates(
    official: &mut Official,
    prefixes: &[String; 2],
    chance: &mut Random,
    quiet: &RwLock<()>,
    pools: &[MockPool; 2],
) -> Option<u64> {
    let numbers = some_pages(chance);
    let which = chance.below(2) as usize;
    let (prefix, pool) = (&prefixes[which], &pools[which]);
    let names: Vec<String> = numbers.iter().map(|number| format!("{prefix}{}", hex(*number))).collect();
    let data = || numbers.iter().map(|number| content(pool, *number)).collect::<Vec<_>>();
    match chance.below(5) {
        0 | 1 => official.try_batch_put(&names, &data()).map(|_| 0),
        2 => official.try_put(&names[0], &content(pool, numbers[0])).map(|_| 0),
        3 => {
            let _quiet = quiet.read().unwrap();
            let found = official.try_get(&names[0])?;
            assert!(found.is_empty() || found == content(pool, numbers[0]), "official: wrong bytes of {}", names[0]);
            Some(u64::from(!found.is_empty()))
        }
        _ => {
            let _quiet = quiet.read().unwrap();
            let (codes, found) = official.try_batch_get(&names, BYTES as usize)?;
            let mut read = 0;
            for ((name, number), (code, found)) in names.iter().zip(&numbers).zip(codes.into_iter().zip(found)) {
                if code == BYTES as i64 {
                    assert!(found == content(pool, *number), "official: wrong bytes of {name}");
                    read += 1;
                }
            }
            Some(read)
        }
    }
}

/// Kills a process after a while, unless it has ended before.
fn kill_after(pid: u32, time: Duration, over: &AtomicBool) {
    let until = Instant::now() + time;
    while Instant::now() < until && !over.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(5));
    }
    // Its owner has not waited for it, so the number is still its own.
    let _ = kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::KILL);
}

#[test]
fn soak_random_operations_with_kills_and_a_restart_give_no_wrong_byte() {
    let mut master = Master::start(&["--default_kv_lease_ttl=5000", "--client_ttl=5"]);
    let config = master.config(Mode::Peer, SEGMENT);
    let stop = AtomicBool::new(false);
    let quiet = RwLock::new(());
    let [ours, theirs, official_read, refused, kills, official_kills] = [const { AtomicU64::new(0) }; 6];
    let first = Client::open(&config).expect("there is a master");
    let prefixes = [0, 1].map(|pool| {
        let known = master.keys();
        let set = first.set(&first.pools[pool], &[PAGES]);
        assert!(set.all_ok(), "{set:?} {:?}", first.host.logs());
        let name = master.keys().into_iter().find(|name| !known.contains(name)).expect("it is stored");
        name.strip_suffix(&hex(PAGES)).expect("names end in the key").to_owned()
    });
    std::thread::scope(|scope| {
        // A failing thread ends the others.
        let _ends = Ends(&stop);
        let one = scope.spawn(|| {
            let _ends = Ends(&stop);
            let mut chance = Random::new(1);
            while !stop.load(Ordering::Acquire) {
                ours.fetch_add(operate(&first, &mut chance, Some(&quiet), &refused) as u64, Ordering::Relaxed);
            }
        });
        let two = scope.spawn(|| {
            let _ends = Ends(&stop);
            killed_client(&config, &stop, &theirs, &refused, &kills);
        });
        let began = Instant::now();
        let (mut chance, pools) = (Random::new(3), pools(1));
        let mut restarted = false;
        while began.elapsed() < length() && !stop.load(Ordering::Acquire) {
            let mut official = Official::start(&master, Mode::Peer, SEGMENT);
            let (pid, over) = (official.pid(), AtomicBool::new(false));
            let time = Duration::from_millis(2000 + chance.below(4000));
            std::thread::scope(|scope| {
                let _over = Ends(&over);
                scope.spawn(|| kill_after(pid, time, &over));
                while let Some(read) = official_operates(&mut official, &prefixes, &mut chance, &quiet, &pools) {
                    official_read.fetch_add(read, Ordering::Relaxed);
                }
            });
            official_kills.fetch_add(1, Ordering::Relaxed);
            if !restarted && began.elapsed() > length() / 3 {
                restarted = true;
                master.kill();
                std::thread::sleep(Duration::from_millis(300));
                master.start_again();
            }
        }
        assert!(restarted, "the time was too short for a restart");
        stop.store(true, Ordering::Release);
        one.join().unwrap();
        two.join().unwrap();
    });
    let count = |value: &AtomicU64| value.load(Ordering::Relaxed);
    let read = [count(&ours), count(&theirs), count(&official_read)];
    println!(
        "pages read: {read:?}, refused by their seals: {}; killed: {} times ours, {} times the official one",
        count(&refused),
        count(&kills),
        count(&official_kills)
    );
    assert!(read.iter().all(|count| *count > 0), "each client has read pages: {read:?}");
    assert!(count(&kills) > 1 && count(&official_kills) > 1);
    // And it still works.
    for pool in &first.pools {
        wait_for("a page that is stored and read", || {
            first.set(pool, &[PAGES]).statuses[0] == [PageStatus::Ok] && first.which(pool, &[PAGES], &refused) == [true]
        });
    }
}

/// Sets a flag when it goes, also by a panic.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn hex(number: u64) -> String {
    key(number).iter().map(|byte| format!("{byte:02x}")).collect()
}
