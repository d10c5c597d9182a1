//! Operations by chance, by our clients and a real one, with kills and a restart, against a model of what objects hold.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::services::{Master, Mode, Official};
use common::*;
use kvdock_plugin_api::mock::key;

/// Bytes of a page.
const BYTES: u64 = 24_000;
/// Numbers of pages.
const PAGES: u64 = 200;

struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// How long: 20 s, or as much longer as `KVDOCK_SOAK` says.
fn length() -> Duration {
    let factor = std::env::var("KVDOCK_SOAK").ok().and_then(|text| text.parse().ok()).unwrap_or(1).max(1);
    Duration::from_secs(20 * factor)
}

/// What a page holds is told by its number, so every page that is read is checked against the model, whoever wrote it.
fn traffic(bench: &Bench, chance: &mut Chance, read: &AtomicU64) {
    let (first, count) = (chance.below(PAGES), 1 + chance.below(24));
    let numbers: Vec<u64> = (first..(first + count).min(PAGES)).collect();
    match chance.below(10) {
        0..=3 => drop(bench.set(&numbers)),
        4..=7 => {
            let right = bench.which(&numbers).iter().filter(|there| **there).count();
            read.fetch_add(right as u64, Ordering::Relaxed);
        }
        8 => drop(bench.remove(&numbers)),
        _ => drop(bench.store.exists(&Default::default(), &keys(&numbers), &[])),
    }
}

#[test]
fn soak_random_operations_with_kills_and_a_restart_give_no_wrong_byte() {
    let mut master = Master::start(&["--default_kv_lease_ttl=1000"]);
    let segment = 24 << 20;
    let config = master.config(Mode::Peer, segment);
    let stop = AtomicBool::new(false);
    let read = [const { AtomicU64::new(0) }; 3];
    std::thread::scope(|scope| {
        for number in 0..2u64 {
            let (config, stop, read) = (&config, &stop, &read[number as usize]);
            scope.spawn(move || {
                let mut chance = Chance(0x9e37_79b9 + number);
                // One of them comes and goes.
                while !stop.load(Ordering::Acquire) {
                    let (host, store) = try_attach(config, "model", &[]);
                    let Ok(store) = store else {
                        std::thread::sleep(Duration::from_millis(100));
                        continue;
                    };
                    let bench = Bench { host, pool: pool(32, BYTES), store };
                    if bench.store.register(&bench.pool).is_err() {
                        continue;
                    }
                    let until = Instant::now() + Duration::from_secs(if number == 0 { 3600 } else { 4 });
                    while Instant::now() < until && !stop.load(Ordering::Acquire) {
                        traffic(&bench, &mut chance, read);
                    }
                    bench.store.close().unwrap();
                }
            });
        }
        let began = Instant::now();
        let mut chance = Chance(77);
        let mut restarted = false;
        let patterns = pool(1, BYTES);
        while began.elapsed() < length() {
            let mut official = Official::start(&master, Mode::Peer, segment);
            let until = Instant::now() + Duration::from_secs(5);
            while Instant::now() < until {
                let names = master.keys();
                if names.is_empty() {
                    std::thread::sleep(Duration::from_millis(20));
                    continue;
                }
                let some: Vec<String> =
                    (0..8).map(|_| names[chance.below(names.len() as u64) as usize].clone()).collect();
                let (codes, data) = official.batch_get(&some, BYTES as usize);
                for ((name, code), data) in some.iter().zip(codes).zip(data) {
                    if code == BYTES as i64 {
                        let number = (0..PAGES).find(|number| name.ends_with(&hex(*number))).unwrap();
                        // A removal by force breaks the lease of an official reader, so it may see what came after.
                        let right = data == patterns.pattern(number);
                        read[2].fetch_add(u64::from(right), Ordering::Relaxed);
                    }
                }
            }
            official.kill();
            if !restarted && began.elapsed() > length() / 3 {
                restarted = true;
                master.kill();
                std::thread::sleep(Duration::from_millis(300));
                master.start_again();
            }
        }
        stop.store(true, Ordering::Release);
    });
    let read: Vec<u64> = read.iter().map(|count| count.load(Ordering::Relaxed)).collect();
    assert!(read.iter().all(|count| *count > 0), "each client has read pages: {read:?}");
}

fn hex(number: u64) -> String {
    key(number).iter().map(|byte| format!("{byte:02x}")).collect()
}
