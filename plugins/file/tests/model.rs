//! Random operations against a plain model of what may and must be there.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

mod common;

use std::collections::{HashMap, HashSet};

use common::*;
use kvdock_plugin_api::mock::Options;
use kvdock_plugin_api::{ClearScope, PageStatus};

/// A small generator, so that a failure can be repeated from its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
    fn numbers(&mut self, most: u64) -> Vec<u64> {
        let count = 1 + self.below(most);
        (0..count).map(|_| self.below(40)).collect()
    }
}

/// Two instances on one directory do what chance says; a page that was stored and not removed is there with its bytes, one that was
/// removed or never stored is not. With a quota a page may also be gone, but never have other bytes.
fn run(seed: u64, small: bool, bounded: bool) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let pool = |small: bool| if small { small_pool(16) } else { large_pool(16) };
    let limit = if bounded {
        format!(r#""max_bytes":{}"#, 24 * (pool(small).page_bytes() as u64 + 4096))
    } else {
        String::new()
    };
    let more = format!("{}{}\"durability\":\"none\"", limit, if bounded { "," } else { "" });
    let one = Bench::new(pool(small), &more);
    let two = one.peer(&more);
    let mut benches = [one, two];
    let mut model: HashSet<u64> = HashSet::new();
    for step in 0..150 {
        let at = random.below(2) as usize;
        let bench = &benches[at];
        let context = format!("seed {seed}, small {small}, bounded {bounded}, step {step}, instance {at}");
        match random.below(20) {
            0..=6 => {
                let numbers = random.numbers(16);
                let set = bench.set(&numbers);
                assert!(set.all_ok(), "{context}: {set:?}");
                model.extend(&numbers);
            }
            7..=12 => {
                let numbers = random.numbers(16);
                for (number, there) in numbers.iter().zip(bench.which(&numbers)) {
                    let expected = model.contains(number);
                    assert!(
                        if bounded { !there || expected } else { there == expected },
                        "{context}: page {number} {there}"
                    );
                }
            }
            13 | 14 => {
                let numbers = random.numbers(6);
                let removed = bench.remove(&numbers);
                assert_eq!(removed.result, Ok(()), "{context}");
                let mut seen: HashMap<u64, usize> = HashMap::new();
                for (number, status) in numbers.iter().zip(&removed.statuses[0]) {
                    let first = *seen.entry(*number).and_modify(|count| *count += 1).or_insert(0) == 0;
                    if first && !bounded {
                        assert_eq!(*status == PageStatus::Ok, model.contains(number), "{context}: page {number}");
                    }
                }
                model.retain(|number| !numbers.contains(number));
            }
            15..=17 => {
                let numbers: Vec<u64> = random.numbers(12);
                let expected = numbers.iter().take_while(|number| model.contains(number)).count();
                let found = bench.prefix(&numbers);
                // An instance may believe for a while in what the other one has removed.
                assert!(found >= expected || bounded, "{context}: {found} of {expected}");
            }
            18 => {
                if random.below(3) == 0 {
                    bench.store.clear(&Options::default(), ClearScope::Namespace).unwrap();
                    model.clear();
                }
            }
            _ => {
                let [one, two] = benches;
                benches = if at == 0 {
                    let spec = one.pool.spec().clone();
                    one.store.close().unwrap();
                    let fresh = Bench::at(&one.dir, kvdock_plugin_api::mock::MockPool::new(spec), &more);
                    [Bench { scratch: one.scratch, ..fresh }, two]
                } else {
                    two.store.close().unwrap();
                    let fresh = one.peer(&more);
                    [one, fresh]
                };
            }
        }
    }
    for bench in benches {
        assert_eq!(bench.host.metric("file_corrupt_pages"), None, "seed {seed}: no page was damaged");
        bench.store.close().unwrap();
    }
}

#[test]
fn random_operations_agree_with_a_model() {
    for seed in 0..6 * soak() {
        for small in [false, true] {
            run(seed, small, false);
        }
    }
}

#[test]
fn random_operations_under_a_quota_never_give_other_bytes() {
    for seed in 0..4 * soak() {
        for small in [false, true] {
            run(seed, small, true);
        }
    }
}
