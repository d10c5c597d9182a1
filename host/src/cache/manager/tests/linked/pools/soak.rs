//! Random requests, some of which go halfway, over a store with random faults. `KVDOCK_SOAK` multiplies the length; the seed of a failing run is in
//! its message.

use super::*;
use crate::cache::manager::tests::soak::Random;

/// Sequences that part again and again, so that nodes are cut and joined.
fn sequence(random: &mut Random) -> Vec<u32> {
    let mut place = 1;
    let mut tokens = Vec::new();
    for _ in 0..1 + random.below(9) {
        place = place * 2 + random.below(2) as u32;
        tokens.extend((0..PAGE as u32).map(|token| place * 10 + token));
    }
    tokens.extend((0..1 + random.below(PAGE) as u32).map(|token| 9 + token));
    tokens
}

fn some_page(random: &mut Random, store: &Store) -> Option<PageKey> {
    let mut names: Vec<PageKey> = store.lock().keys().copied().collect();
    names.sort_unstable();
    (!names.is_empty()).then(|| names[random.below(names.len())])
}

fn soak(seed: u64) {
    let mut random = Random(seed);
    let (windows, states) = [(true, false), (false, true), (true, true)][seed as usize % 3];
    let store = Store::default();
    let mut rig = Pooled::new(windows, states, 28, 16);
    let backend = rig.attach(&store);
    let faults = &backend.faults;
    for _ in 0..80 {
        match random.below(16) {
            0 => faults.vanish.lock().extend(some_page(&mut random, &store)),
            1 => faults.flip.lock().extend(some_page(&mut random, &store)),
            2 => {
                faults.vanish.lock().clear();
                faults.flip.lock().clear();
                (*faults.short_after.lock(), *faults.skip_layer.lock()) = (None, None);
            }
            3 => *faults.short_after.lock() = Some(random.below(6)),
            4 => *faults.skip_layer.lock() = Some(random.below(2)),
            5 => drop(rig.cache.flush(Tiers::ALL)),
            6 => {
                store.lock().clear();
                rig.cache.storage().emptied("fake");
            }
            7 => faults.refuse_loads.store(1, Ordering::Release),
            8..=10 => {
                let tokens = sequence(&mut random);
                let id = rig.begin(&tokens);
                let grant = rig.acquire(id, &tokens);
                if random.below(2) == 0 {
                    rig.cache.start_loads();
                }
                rig.cache.abort(id, PageTables { pages: grant.pages, windows: grant.windows });
            }
            _ => {
                let tokens = sequence(&mut random);
                let leave = random.below(3) > 0;
                rig.run_leaving(&tokens, leave);
            }
        }
        rig.cache.check_integrity().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
    rig.assert_quiet();
}

#[test]
fn soak_random_requests_of_several_pools_lose_no_slot_and_read_no_wrong_byte() {
    let length = std::env::var("KVDOCK_SOAK").ok().and_then(|length| length.parse().ok()).unwrap_or(1);
    for seed in 0..9 * length {
        soak(seed);
    }
}
