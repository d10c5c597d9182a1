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
use kvdock_plugin_api::mock::{Options, Query, key};
use kvdock_tests::prompt::Random;
use kvdock_tests::soak;
use rustix::process::{Pid, Signal, kill_process};

/// Bytes of a page.
const BYTES: u64 = 24_000;
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

/// One operation of ours. What a page holds is told by its number, so every page that is read is checked against the model, whoever wrote
/// it. Answers how many were read.
///
/// A removal by force breaks the leases of official readers, which then may see what came after: `quiet` keeps it from them.
fn operate(bench: &Bench, chance: &mut Random, quiet: Option<&RwLock<()>>) -> usize {
    let numbers = some_pages(chance);
    match chance.below(10) {
        0..=3 => drop(bench.set(&numbers)),
        8 if let Some(quiet) = quiet => {
            let _alone = quiet.write().unwrap();
            bench.remove(&numbers);
        }
        // It fails while there is no master.
        9 => drop(bench.store.exists(&Options::default(), &keys(&numbers), &[Query::of(&bench.pool)])),
        _ => return bench.which(&numbers).into_iter().filter(|there| *there).count(),
    }
    0
}

/// Opens a client; none while there is no master.
fn open(config: &str) -> Option<Bench> {
    let (host, store) = try_attach(config, "model", &[]);
    let bench = Bench { host, pool: pool(MOST, BYTES), store: store.ok()? };
    bench.store.register(&bench.pool).ok()?;
    Some(bench)
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
    let bench = loop {
        if let Some(bench) = open(&config) {
            break bench;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "the client can't start");
        std::thread::sleep(Duration::from_millis(50));
    };
    // Whoever started this process ends it.
    while master.is_none() || began.elapsed() < Duration::from_secs(2) || read == 0 {
        let now = operate(&bench, &mut chance, None);
        read += now;
        if master.is_none() && now > 0 {
            println!("\nread {now}");
        }
        assert!(began.elapsed() < Duration::from_secs(3600));
    }
    assert!(read > 0);
}

/// Runs such a client in a process of its own and kills it in the middle of what it does, again and again.
fn killed_client(config: &str, stop: &AtomicBool, read: &AtomicU64, kills: &AtomicU64) {
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
    prefix: &str,
    chance: &mut Random,
    quiet: &RwLock<()>,
    patterns: &kvdock_plugin_api::mock::MockPool,
) -> Option<u64> {
    let numbers = some_pages(chance);
    let names: Vec<String> = numbers.iter().map(|number| format!("{prefix}{}", hex(*number))).collect();
    let data = || numbers.iter().map(|number| patterns.pattern(*number)).collect::<Vec<_>>();
    match chance.below(5) {
        0 | 1 => official.try_batch_put(&names, &data()).map(|_| 0),
        2 => official.try_put(&names[0], &patterns.pattern(numbers[0])).map(|_| 0),
        3 => {
            let _quiet = quiet.read().unwrap();
            let found = official.try_get(&names[0])?;
            assert!(found.is_empty() || found == patterns.pattern(numbers[0]), "official: wrong bytes of {}", names[0]);
            Some(u64::from(!found.is_empty()))
        }
        _ => {
            let _quiet = quiet.read().unwrap();
            let (codes, found) = official.try_batch_get(&names, BYTES as usize)?;
            let mut read = 0;
            for ((name, number), (code, found)) in names.iter().zip(&numbers).zip(codes.into_iter().zip(found)) {
                if code == BYTES as i64 {
                    assert!(found == patterns.pattern(*number), "official: wrong bytes of {name}");
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
    let (ours, theirs, official_read, kills, official_kills) =
        (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let first = open(&config).expect("there is a master");
    assert!(first.set(&[PAGES]).all_ok(), "{}", first.logs());
    let prefix = master.keys().remove(0).strip_suffix(&hex(PAGES)).expect("names end in the key").to_owned();
    std::thread::scope(|scope| {
        // A failing thread ends the others.
        let _ends = Ends(&stop);
        let one = scope.spawn(|| {
            let _ends = Ends(&stop);
            let mut chance = Random::new(1);
            while !stop.load(Ordering::Acquire) {
                ours.fetch_add(operate(&first, &mut chance, Some(&quiet)) as u64, Ordering::Relaxed);
            }
        });
        let two = scope.spawn(|| {
            let _ends = Ends(&stop);
            killed_client(&config, &stop, &theirs, &kills);
        });
        let began = Instant::now();
        let (mut chance, patterns) = (Random::new(3), pool(1, BYTES));
        let mut restarted = false;
        while began.elapsed() < length() && !stop.load(Ordering::Acquire) {
            let mut official = Official::start(&master, Mode::Peer, SEGMENT);
            let (pid, over) = (official.pid(), AtomicBool::new(false));
            let time = Duration::from_millis(2000 + chance.below(4000));
            std::thread::scope(|scope| {
                let _over = Ends(&over);
                scope.spawn(|| kill_after(pid, time, &over));
                while let Some(read) = official_operates(&mut official, &prefix, &mut chance, &quiet, &patterns) {
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
        "pages read: {read:?}; killed: {} times ours, {} times the official one",
        count(&kills),
        count(&official_kills)
    );
    assert!(read.iter().all(|count| *count > 0), "each client has read pages: {read:?}");
    assert!(count(&kills) > 1 && count(&official_kills) > 1);
    // And it still works.
    wait_for("a page that is stored and read", || {
        first.set(&[PAGES]).statuses[0] == [PageStatus::Ok] && first.which(&[PAGES]) == [true]
    });
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
