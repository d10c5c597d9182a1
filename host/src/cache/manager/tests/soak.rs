//! Everything at once, at random, against what must always be true.
//!
//! `KVDOCK_SOAK` multiplies the length; the seed of a failing run is in its message.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use super::*;
use crate::cache::config::{BreakEvenMode, EvictionPolicy, WritePolicy};
use crate::cache::layout::HostLayout;
use crate::cache::types::Tiers;

const LAYOUTS: [HostLayout; 4] =
    [HostLayout::LayerFirst, HostLayout::PageFirst, HostLayout::PageFirstDirect, HostLayout::PageHead];

/// A small generator: the sequence depends on nothing but its seed.
pub(super) struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) as usize) % bound
    }
}

struct Live {
    tokens: Vec<u32>,
    namespace: CacheNamespace,
    pages: Option<Vec<u32>>,
    computed: usize,
}

#[test]
fn random_requests_under_random_faults_get_right_bytes_and_lose_nothing() {
    let rounds = std::env::var("KVDOCK_SOAK").ok().and_then(|length| length.parse().ok()).unwrap_or(1usize);
    for seed in 0..6 * rounds as u64 {
        soak(seed);
    }
}

/// A backend, its store, and those that had its name before.
struct Tier {
    name: &'static str,
    store: Store,
    backend: Option<Arc<FakeBackend>>,
    past: Vec<Arc<FakeBackend>>,
}

impl Tier {
    fn new(name: &'static str) -> Self {
        Tier { name, store: Store::default(), backend: None, past: Vec::new() }
    }

    /// Puts a new backend over the store to use: in the place of the one before, or anywhere.
    fn attach(&mut self, random: &mut Random, rig: &Rig) {
        let handle = rig.cache.storage();
        let pools = handle.host_pools();
        if pools.is_empty() {
            return;
        }
        let mut backend = FakeBackend::new(self.name, &self.store, pools);
        let policies = [None, Some("write_through"), Some("write_through_selective"), Some("write_back")];
        backend.settings.timeout = Duration::from_millis(30);
        backend.settings.write_policy = policies[random.below(4)].map(str::to_owned);
        backend.settings.promote = random.below(2) == 0;
        backend.settings.retries = random.below(3) as u32;
        backend.settings.read_bandwidth = (random.below(4) == 0).then_some(20_000_000);
        backend.remove = random.below(4) > 0;
        let backend = Arc::new(backend);
        let place = match self.backend.replace(Arc::clone(&backend)) {
            Some(before) => {
                self.past.push(before);
                Place::Of(self.name.to_owned())
            }
            None => Place::At(random.below(4)),
        };
        handle.attached(backend, place);
    }

    fn detach(&mut self, rig: &Rig) {
        if let Some(backend) = self.backend.take() {
            assert!(rig.cache.storage().detached(self.name));
            self.past.push(backend);
        }
    }

    fn let_go(&self) {
        for backend in self.backend.iter().chain(&self.past) {
            backend.faults.hang_reads.store(false, Ordering::Release);
            backend.faults.hang_writes.store(false, Ordering::Release);
        }
    }
}

fn soak(seed: u64) {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) + 1);
    let policies = [WritePolicy::WriteThrough, WritePolicy::WriteThroughSelective, WritePolicy::WriteBack];
    let waits = [PrefetchPolicy::BestEffort, PrefetchPolicy::WaitComplete, PrefetchPolicy::Timeout];
    let settings = CacheConfig {
        write_policy: policies[random.below(3)],
        prefetch_policy: waits[random.below(3)],
        prefetch_timeout_base: Duration::from_millis(3),
        break_even: [BreakEvenMode::Off, BreakEvenMode::Auto][random.below(2)],
        eviction: EvictionPolicy::ALL[random.below(5)],
        host_layout: LAYOUTS[random.below(4)],
        ..config(20 + random.below(40) as u32)
    };
    let mut rig = Rig::new(48, settings);
    let mut tiers: Vec<Tier> = ["a", "b", "c"].into_iter().take(1 + random.below(3)).map(Tier::new).collect();
    tiers.iter_mut().for_each(|tier| tier.attach(&mut random, &rig));
    let mut live: HashMap<RequestId, Live> = HashMap::new();
    for step in 0..1500 {
        let at = random.below(tiers.len());
        disturb(&mut random, &mut rig, &mut tiers[at]);
        if live.len() < 4 && random.below(3) == 0 {
            let (tokens, namespace) = prompt(&mut random);
            let id = rig.request(&tokens, &namespace);
            live.insert(id, Live { tokens, namespace, pages: None, computed: 0 });
        }
        let mut ids: Vec<RequestId> = live.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            advance(&mut random, &mut rig, &mut live, id);
        }
        if step % 50 == 0 {
            integrity(&mut rig, seed);
        }
    }
    tiers.iter().for_each(Tier::let_go);
    for (id, request) in live {
        rig.cache.abort(id, request.pages.unwrap_or_default());
    }
    rig.settle();
    while rig.cache.stats().host_quarantined_pages > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    integrity(&mut rig, seed);
    let flushed = rig.cache.flush(Tiers::ALL);
    assert_eq!((flushed.device_kept, flushed.host_kept), (0, 0), "seed {seed}");
    let stats = rig.cache.stats();
    assert_eq!((stats.misuses, stats.device_used_tokens, stats.tree_nodes), (0, 0, 0), "seed {seed}");
    for tier in &mut tiers {
        tier.detach(&rig);
        assert!(rig.cache.storage().quiesced(tier.name, LONG), "seed {seed}: a call of {} still runs", tier.name);
    }
    rig.cache.tick();
    rig.cache.tick();
    let left = tiers.iter().flat_map(|tier| &tier.past).filter(|backend| Arc::strong_count(backend) > 1).count();
    assert_eq!(left, 0, "seed {seed}: backends that left are still held");
}

/// Holders of a page change while workers run; a fault that is none is gone at the next look.
fn integrity(rig: &mut Rig, seed: u64) {
    let mut last = Ok(());
    for _ in 0..20 {
        last = rig.cache.check_integrity();
        if last.is_ok() {
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    panic!("seed {seed}: {last:?}");
}

/// Prompts share prefixes at random: each is a path in a small tree of pages.
fn prompt(random: &mut Random) -> (Vec<u32>, CacheNamespace) {
    let mut tokens = Vec::new();
    let pages = 1 + random.below(12);
    for depth in 0..pages {
        let branch = if random.below(4) == 0 { random.below(3) } else { 0 };
        tokens.extend((0..PAGE).map(|i| (depth * 100 + branch * 10 + i) as u32));
    }
    tokens.extend((0..1 + random.below(PAGE)).map(|i| 50_000 + i as u32));
    let namespace = if random.below(5) == 0 { salt("other") } else { CacheNamespace::default() };
    (tokens, namespace)
}

fn disturb(random: &mut Random, rig: &mut Rig, tier: &mut Tier) {
    let some_key = |random: &mut Random, store: &Store| {
        let store = store.lock();
        let at = random.below(store.len().max(1));
        store.keys().nth(at).copied()
    };
    let chance = random.below(120);
    match chance {
        13..=15 => {
            if let Some(key) = some_key(random, &tier.store) {
                tier.store.lock().remove(&key);
            }
        }
        20 => {
            // With calls under way, which may hang on or return.
            if random.below(2) == 0 {
                tier.let_go();
            }
            tier.detach(rig);
        }
        21..=23 => {
            if random.below(2) == 0 {
                tier.let_go();
            }
            tier.attach(random, rig);
        }
        24 => drop(rig.cache.flush(Tiers::DEVICE)),
        25 => drop(rig.cache.flush(Tiers::HOST)),
        26 => drop(rig.cache.flush(Tiers::ALL)),
        27 => std::thread::sleep(Duration::from_millis(1)),
        28 => {
            tier.store.lock().clear();
            rig.cache.storage().emptied(tier.name);
        }
        29 => rig.cache.prefilled(16 + random.below(4096), 0, Duration::from_micros(1 + random.below(100_000) as u64)),
        _ => {
            let Some(backend) = &tier.backend else { return };
            let faults = &backend.faults;
            match chance {
                0 => faults.hang_reads.store(true, Ordering::Release),
                1..=4 => faults.hang_reads.store(false, Ordering::Release),
                5 => faults.hang_writes.store(true, Ordering::Release),
                6..=9 => faults.hang_writes.store(false, Ordering::Release),
                10..=12 => {
                    if let Some(key) = some_key(random, &tier.store) {
                        faults.flip.lock().insert(key);
                    }
                }
                16 => faults.fail_pages.store(random.below(5), Ordering::Release),
                17 => faults.fail_writes.store(1, Ordering::Release),
                18 => faults.refuse.store(random.below(2) == 0, Ordering::Release),
                19 => *faults.short_after.lock() = [None, Some(1)][random.below(2)],
                30 => faults.fail_reads.store(1 + random.below(3), Ordering::Release),
                31 => faults.panic_writes.store(1, Ordering::Release),
                32 => faults.fail_exists.store(random.below(2) == 0, Ordering::Release),
                33 => {
                    if let Some(key) = some_key(random, &tier.store) {
                        faults.vanish.lock().insert(key);
                    }
                }
                _ => {}
            }
        }
    }
}

/// One step of a request: wait, acquire, compute a chunk, or end in one of several ways.
fn advance(random: &mut Random, rig: &mut Rig, live: &mut HashMap<RequestId, Live>, id: RequestId) {
    let Some(mut request) = live.remove(&id) else { return };
    if random.below(40) == 0 {
        return rig.cache.abort(id, request.pages.unwrap_or_default());
    }
    let Some(mut pages) = request.pages.take() else {
        if rig.cache.poll(id) == Prefetch::Ready
            && let Acquire::Granted(grant) = rig.cache.acquire(id, &request.tokens).unwrap()
        {
            rig.check_grant(&grant, &request.tokens, &request.namespace);
            request.computed = grant.tokens;
            request.pages = Some(grant.pages);
        }
        live.insert(id, request);
        return;
    };
    let end = request.tokens.len().min(request.computed + 1 + random.below(2 * PAGE));
    let missing = end.div_ceil(PAGE) - pages.len().min(end.div_ceil(PAGE));
    let Some(fresh) = rig.cache.alloc_pages(missing) else {
        rig.cache.preempt(id, &request.tokens[..request.computed], pages);
        request.computed = 0;
        live.insert(id, request);
        return;
    };
    pages.extend(fresh);
    // Rewrites the partial page as a forward pass would go on with it.
    for (number, &page) in pages.iter().enumerate().take(end.div_ceil(PAGE)).skip(request.computed / PAGE) {
        let upto = end.min((number + 1) * PAGE);
        rig.write(page, &content(&request.tokens[..upto], &request.namespace));
    }
    request.computed = end;
    if end == request.tokens.len() {
        return rig.cache.finish(id, &request.tokens, pages);
    }
    rig.cache.commit(id, &request.tokens[..end], &mut pages, &mut []).unwrap();
    request.pages = Some(pages);
    live.insert(id, request);
}
