//! Models that keep more than pages of all tokens: windows, of which the one before the end comes, and recurrent states, of which the one at the end
//! does.

mod soak;

use kvdock_models::{HitPolicy, PageSource, PoolDecl, PoolKind, PoolLayout, PoolMemory, PoolSet, PoolSizes};

use super::*;
use crate::cache::fake_store::named;
use crate::cache::pool::{CacheMemory, CacheRoom};
use crate::cache::unified::{Component, NO_SLOT, PerComponent, Room, Side};
use crate::plugin::backend::PoolGroup;

/// Pages of a window.
const WINDOW: usize = 3;
const RUNNING: usize = 2;
/// Slots for states that are the cache's.
const STATES: usize = 8;
const DEVICE: usize = 64;

/// A cache over several pools.
struct Pooled {
    cache: CacheManager,
    pools: PoolSet,
    woken: Receiver<()>,
    next: RequestId,
}

/// What a request held, and what came of it.
struct Ran {
    grant: Grant,
    settled: Option<Settled>,
}

fn decl(name: &'static str, kind: PoolKind, source: PageSource, hit: HitPolicy, layers: &[usize]) -> PoolDecl {
    let layout = match source {
        PageSource::Slot => PoolLayout::Slot { elements: 5 },
        PageSource::Anchor | PageSource::Window => PoolLayout::Rows { tokens: 1, elements: 8 },
    };
    PoolDecl { name, kind, source, hit, layers: layers.to_vec(), layout, encoding: "" }
}

/// Pools of all tokens in both layers, and windows in the first and states in the second where they are wanted.
fn decls(windows: bool, states: bool) -> Vec<PoolDecl> {
    let trailing = HitPolicy::Trailing { tokens: WINDOW * PAGE };
    let mut decls = vec![decl("kv", PoolKind::FullKv, PageSource::Anchor, HitPolicy::AllPages, &[0, 1])];
    if windows {
        decls.push(decl("swa", PoolKind::Window, PageSource::Window, trailing, &[0]));
    }
    if states {
        decls.push(decl("mamba", PoolKind::Recurrent, PageSource::Slot, HitPolicy::ExactState, &[1]));
    }
    decls
}

/// The bytes of one layer of a page that ends after `tokens`, or of a state behind them.
fn bytes(name: &str, layer: usize, tokens: &[u32], length: usize) -> Vec<u8> {
    let mut hasher = DefaultHasher::new();
    (name, layer, tokens).hash(&mut hasher);
    let mut state = hasher.finish() | 1;
    let mut byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..length).map(|_| byte()).collect()
}

impl Pooled {
    fn new(windows: bool, states: bool, window_pages: usize, transit: u32) -> Self {
        let device = CpuDevice::new(1).unwrap();
        let sizes = PoolSizes {
            page_tokens: PAGE,
            anchor_pages: DEVICE,
            window_pages,
            slots: RUNNING + STATES,
            dtype: KvDtype::F16,
        };
        let pools = PoolSet::allocate(&device, &decls(windows, states), sizes).unwrap();
        let room = CacheRoom { running: RUNNING, host_windows: transit, host_states: 8 };
        let memory = CacheMemory::of_pools(&pools, 2, room).unwrap();
        let (wake, woken) = bounded(1);
        let waker = Arc::new(move || {
            let _ = wake.try_send(());
        });
        let cache = CacheManager::over(linked(transit), memory, Arc::new(NoEvents), waker).unwrap();
        Pooled { cache, pools, woken, next: 1 }
    }

    fn attach(&self, store: &Store) -> Arc<FakeBackend> {
        let handle = self.cache.storage();
        let mut backend = FakeBackend::new("fake", store, handle.host_pools());
        backend.linker = true;
        let backend = Arc::new(backend);
        handle.attached(Arc::clone(&backend) as Arc<_>, Place::At(0));
        backend
    }

    /// Each layer of a page of a pool, with the buffer's length.
    fn buffers(&self, name: &str) -> (Vec<usize>, &kvdock_kernels::PagePool) {
        let decl = self.pools.decls().iter().find(|decl| decl.name == name).unwrap();
        match self.pools.named(name).unwrap() {
            PoolMemory::Pages(pool) => (decl.layers.clone(), pool),
            _ => panic!("{name} has no pages"),
        }
    }

    fn write(&self, name: &str, page: u32, tokens: &[u32]) {
        let (layers, pool) = self.buffers(name);
        for (buffer, layer) in layers.into_iter().enumerate() {
            pool.copy_layer_in(page, buffer, &bytes(name, layer, tokens, pool.spec().page_bytes)).unwrap();
        }
    }

    fn holds(&self, name: &str, page: u32, tokens: &[u32]) -> bool {
        let (layers, pool) = self.buffers(name);
        let mut found = vec![0; pool.spec().page_bytes];
        layers.into_iter().enumerate().all(|(buffer, layer)| {
            pool.copy_layer_out(page, buffer, &mut found).unwrap();
            found == bytes(name, layer, tokens, found.len())
        })
    }

    fn has(&self, component: Component) -> bool {
        self.cache.device_pool(component).is_some()
    }

    /// A request whose wait for storage is over.
    fn begin(&mut self, tokens: &[u32]) -> RequestId {
        let id = self.next;
        self.next += 1;
        self.cache.begin(id, tokens, &CacheNamespace::default(), &ReuseHints::default());
        let limit = Instant::now() + LONG;
        while let Prefetch::Waiting { until } = self.cache.poll(id) {
            assert!(Instant::now() < limit, "a wait for storage does not end");
            let _ = self.woken.recv_deadline(until);
        }
        id
    }

    fn acquire(&mut self, id: RequestId, tokens: &[u32]) -> Grant {
        let limit = Instant::now() + LONG;
        loop {
            if let Acquire::Granted(grant) = self.cache.acquire(id, tokens).unwrap() {
                return grant;
            }
            assert!(Instant::now() < limit, "no grant");
            let _ = self.woken.recv_deadline(Instant::now() + Duration::from_millis(5));
        }
    }

    fn settled(&mut self, id: RequestId, grant: &Grant, tokens: &[u32], tables: &mut PageTables) -> Settled {
        let arriving = grant.arriving.as_ref().expect("pages that come");
        arriving.wait_verdict(Instant::now() + LONG).expect("a verdict");
        self.cache.settle_load(id, tokens, tables).unwrap().expect("it is over")
    }

    /// What a request may stand on: all pages, the window before the end, the state behind it.
    fn check_tables(&self, tables: &PageTables, tokens: &[u32], state: Option<u32>) {
        let pages = tokens.len() / PAGE;
        assert_eq!(tables.pages.len(), pages);
        for (i, &page) in tables.pages.iter().enumerate() {
            assert!(self.holds("kv", page, &tokens[..(i + 1) * PAGE]), "page {i}");
        }
        if self.has(Component::Window) {
            assert_eq!(tables.windows.len(), pages);
            for i in pages.saturating_sub(WINDOW)..pages {
                assert!(self.holds("swa", tables.windows[i], &tokens[..(i + 1) * PAGE]), "window page {i}");
            }
        }
        if self.has(Component::State) && pages > 0 {
            assert!(self.holds("mamba", state.expect("a state"), tokens), "the state behind {pages} pages");
        }
    }

    /// Runs a request as the engine does, and leaves a state after its last whole page if `leave` says so. Every byte that it could have computed
    /// on is checked.
    fn run_leaving(&mut self, tokens: &[u32], leave: bool) -> Ran {
        let id = self.begin(tokens);
        let grant = self.acquire(id, tokens);
        self.cache.start_loads();
        let mut tables = PageTables { pages: grant.pages.clone(), windows: grant.windows.clone() };
        let settled = grant.arriving.is_some().then(|| self.settled(id, &grant, tokens, &mut tables));
        let right = settled.map_or(grant.tokens, |settled| settled.tokens);
        self.check_tables(&tables, &tokens[..right], settled.map_or(grant.state, |settled| settled.state));
        let whole = tokens.len() / PAGE * PAGE;
        let state = self.has(Component::State) && leave && whole > right;
        let slot = if state { self.cache.reserve_state(id, whole) } else { None };
        let missing = tokens.len().div_ceil(PAGE) - tables.pages.len();
        for page in self.alloc(Component::Full, missing) {
            let end = tokens.len().min((tables.pages.len() + 1) * PAGE);
            self.write("kv", page, &tokens[..end]);
            tables.pages.push(page);
        }
        if self.has(Component::Window) {
            for page in self.alloc(Component::Window, missing) {
                let end = tokens.len().min((tables.windows.len() + 1) * PAGE);
                self.write("swa", page, &tokens[..end]);
                tables.windows.push(page);
            }
        }
        if let Some(slot) = slot {
            self.write("mamba", slot, &tokens[..whole]);
        }
        self.cache.commit(id, tokens, &mut tables.pages, &mut tables.windows).unwrap();
        self.cache.finish(id, tokens, tables);
        self.cache.check_integrity().unwrap();
        Ran { grant, settled }
    }

    /// Slots for what is computed; what is being offloaded leaves in time.
    fn alloc(&mut self, component: Component, count: usize) -> Vec<u32> {
        let limit = Instant::now() + LONG;
        loop {
            let slots = match component {
                Component::Window => self.cache.alloc_windows(count),
                _ => self.cache.alloc_pages(count),
            };
            if let Some(slots) = slots {
                return slots;
            }
            assert!(Instant::now() < limit, "no {} slots for the rest", component.as_str());
            let _ = self.woken.recv_deadline(Instant::now() + Duration::from_millis(5));
            self.cache.tick();
        }
    }

    fn run(&mut self, tokens: &[u32]) -> Ran {
        self.run_leaving(tokens, true)
    }

    /// Lets the workers finish everything.
    fn settle(&mut self) -> CacheStats {
        let limit = Instant::now() + LONG;
        loop {
            let next = self.cache.tick();
            let stats = self.cache.stats();
            if stats.backup_pending_pages + stats.layer_loads_running == 0 && self.cache.writes.idle() {
                return stats;
            }
            assert!(Instant::now() < limit, "work does not end: {stats:?}");
            let _ = self.woken.recv_deadline(next.unwrap_or(limit).min(Instant::now() + Duration::from_millis(50)));
        }
    }

    /// Nothing is held in any pool.
    fn assert_quiet(&mut self) {
        self.settle();
        self.cache.check_integrity().unwrap();
        assert_eq!(self.cache.stats().misuses, 0);
        self.cache.flush(Tiers::ALL);
        self.cache.check_integrity().unwrap();
        for component in Component::ALL {
            let Some(pool) = self.cache.device_pool(component) else { continue };
            let elsewhere = if component == Component::State { RUNNING } else { 0 };
            let name = component.as_str();
            assert_eq!(pool.free_count() + elsewhere, pool.capacity(), "{name} slots are held");
            let host = self.cache.host_pool(component).unwrap();
            assert_eq!(host.free_count(), host.capacity(), "{name} transit pages are held");
        }
    }
}

fn window_key(tokens: &[u32], page: usize) -> PageKey {
    named(PoolGroup::Window, &keys(tokens)[page])
}

fn state_key(tokens: &[u32], page: usize) -> PageKey {
    named(PoolGroup::State, &keys(tokens)[page])
}

/// A store that a model with these pools has filled with `prompt`.
fn filled(windows: bool, states: bool, prompt: &[u32]) -> Store {
    let store = Store::default();
    let mut rig = Pooled::new(windows, states, DEVICE, 32);
    rig.attach(&store);
    rig.run(prompt);
    rig.settle();
    store
}

fn start(windows: bool, states: bool, store: &Store) -> (Pooled, Arc<FakeBackend>) {
    let rig = Pooled::new(windows, states, DEVICE, 32);
    let backend = rig.attach(store);
    (rig, backend)
}

/// The reference leaves rings out of the linker, and a restored tail has no window then. Here they are pools like others, so a hit has all.
#[test]
fn l23_l24_the_window_before_the_end_comes_and_none_of_what_is_before_it() {
    let prompt = tokens(1, 10 * PAGE + 1);
    let store = filled(true, false, &prompt);
    assert_eq!(store.lock().len(), 20, "pages and windows are stored");
    let (mut rig, backend) = start(true, false, &store);
    let Ran { grant, settled } = rig.run(&prompt);
    assert_eq!(settled.map(|settled| settled.came), Some(10 * PAGE));
    assert_eq!(grant.windows[..10 - WINDOW], [NO_SLOT; 10 - WINDOW]);
    assert!(grant.windows[10 - WINDOW..].iter().all(|&slot| slot != NO_SLOT));
    assert_eq!(backend.calls.load_pages.load(Ordering::Relaxed), 10 + WINDOW);
    // With a device that has the start, no more of the window than lies behind that.
    rig.settle();
    rig.cache.flush(Tiers::ALL);
    rig.run(&prompt[..8 * PAGE + 1]);
    let before = backend.calls.load_pages.load(Ordering::Relaxed);
    assert_eq!(rig.run(&prompt).settled.map(|settled| settled.came), Some(2 * PAGE));
    assert_eq!(backend.calls.load_pages.load(Ordering::Relaxed) - before, 2 + 2);
    rig.assert_quiet();
}

/// G8: the pages of all tokens are on the device; windows, or a state, have left.
#[test]
fn g08_l22_a_window_or_a_state_alone_comes_where_the_rest_is_on_the_device() {
    let prompt = tokens(1, 8 * PAGE + 1);
    for (windows, states) in [(true, false), (false, true), (true, true)] {
        let store = filled(windows, states, &prompt);
        let (mut rig, backend) = start(windows, states, &store);
        rig.leave_pages_alone(&prompt);
        let before = backend.calls.load_pages.load(Ordering::Relaxed);
        let Ran { grant, settled } = rig.run(&prompt);
        let moved = if windows { WINDOW } else { 0 } + usize::from(states);
        assert_eq!(backend.calls.load_pages.load(Ordering::Relaxed) - before, moved);
        assert_eq!((grant.from_device, grant.from_storage, grant.tokens), (8 * PAGE, 0, 8 * PAGE));
        assert_eq!(settled.map(|settled| (settled.tokens, settled.came)), Some((8 * PAGE, 0)));
        rig.assert_quiet();
    }
}

impl Pooled {
    /// Leaves on the device, of windows and states, nothing, but the pages of all tokens of a prompt that storage has.
    fn leave_pages_alone(&mut self, prompt: &[u32]) {
        self.run(prompt);
        // At the end of a sequence a window or a state would take its pages along.
        self.run(&[&prompt[..prompt.len() / PAGE * PAGE], &tokens(7, 4 * PAGE + 1)].concat());
        self.settle();
        let want = PerComponent(Component::ALL.map(|component| match component {
            Component::Full => 0,
            other => self.cache.device_pool(other).map_or(0, |pool| pool.capacity()),
        }));
        let states = want[Component::State].min(STATES);
        let slots = self.cache.take_slots(Side::Device, &PerComponent([0, want[Component::Window], states])).unwrap();
        self.cache.give_back_all(Side::Device, slots);
    }
}

/// What is lent goes back, and stays in the tree: when the request goes, and when what it lacked does not come.
#[test]
fn g08_pages_that_were_lent_are_the_trees_whatever_becomes_of_the_load() {
    let prompt = tokens(1, 8 * PAGE + 1);
    let store = filled(true, false, &prompt);
    let (mut rig, backend) = start(true, false, &store);
    rig.leave_pages_alone(&prompt);
    let used = rig.cache.stats().device_used_tokens;
    for start in [false, true] {
        let id = rig.begin(&prompt);
        let grant = rig.acquire(id, &prompt);
        assert_eq!(grant.from_device, 8 * PAGE);
        rig.cache.check_integrity().unwrap();
        if start {
            rig.cache.start_loads();
        }
        rig.cache.abort(id, PageTables { pages: grant.pages, windows: grant.windows });
        rig.cache.check_integrity().unwrap();
    }
    rig.settle();
    backend.faults.vanish.lock().insert(window_key(&prompt, 7));
    let id = rig.begin(&prompt);
    let grant = rig.acquire(id, &prompt);
    rig.cache.start_loads();
    let mut tables = PageTables { pages: grant.pages.clone(), windows: grant.windows.clone() };
    let settled = rig.settled(id, &grant, &prompt, &mut tables);
    assert_eq!((settled.tokens, settled.reason), (0, Some(MissReason::Evicted)));
    assert_eq!(tables, PageTables::default(), "nothing of it is to be written over");
    rig.cache.finish(id, &[], tables);
    rig.cache.check_integrity().unwrap();
    assert_eq!(rig.cache.stats().device_used_tokens, used, "they are still there");
    backend.faults.vanish.lock().clear();
    rig.assert_quiet();
}

#[test]
fn l35_the_state_behind_the_last_page_comes_into_a_slot_of_its_own_and_into_the_tree() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = filled(false, true, &prompt);
    assert_eq!(store.lock().len(), 7, "pages and one state");
    let (mut rig, backend) = start(false, true, &store);
    let id = rig.begin(&prompt);
    let grant = rig.acquire(id, &prompt);
    assert_eq!(grant.state, None, "it still comes");
    let arriving = grant.arriving.clone().unwrap();
    let slot = arriving.state_slot().unwrap();
    assert!(slot as usize >= RUNNING);
    rig.cache.start_loads();
    let mut tables = PageTables::from(grant.pages.clone());
    let settled = rig.settled(id, &grant, &prompt, &mut tables);
    assert_eq!((settled.came, settled.state), (6 * PAGE, Some(slot)));
    assert!(rig.holds("mamba", slot, &prompt[..6 * PAGE]));
    rig.cache.finish(id, &prompt[..6 * PAGE], tables);
    // From now on it is on the device, and was not offered again.
    let Ran { grant, settled } = rig.run(&prompt);
    assert_eq!((grant.from_device, grant.state, settled), (6 * PAGE, Some(slot), None));
    rig.settle();
    assert_eq!(backend.calls.offload_pages.load(Ordering::Relaxed), 0);
    rig.assert_quiet();
}

/// A length that storage has the pages of and no state for is none.
#[test]
fn l35_a_hit_ends_where_a_state_was_left() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = filled(false, true, &prompt[..4 * PAGE + 1]);
    let (mut rig, _) = start(false, true, &store);
    rig.run_leaving(&prompt, false);
    rig.settle();
    assert_eq!(store.lock().len(), 7, "six pages, and a state after four");
    rig.cache.flush(Tiers::ALL);
    let Ran { settled, .. } = rig.run_leaving(&prompt, false);
    assert_eq!(settled.map(|settled| settled.came), Some(4 * PAGE));
    rig.assert_quiet();
}

/// G1: whatever of a hit does not come, nothing of it counts that cannot be gone on from.
#[test]
fn g01_a_window_or_a_state_that_does_not_come_right_costs_what_stands_on_it() {
    let prompt = tokens(1, 8 * PAGE + 1);
    let (window, state) = (window_key(&prompt, 6), state_key(&prompt, 7));
    for (bad, flipped) in [(window, false), (window, true), (state, false), (state, true)] {
        let store = filled(true, true, &prompt);
        let (mut rig, backend) = start(true, true, &store);
        let fault = if flipped { &backend.faults.flip } else { &backend.faults.vanish };
        fault.lock().insert(bad);
        let Ran { settled, .. } = rig.run(&prompt);
        let reason = if flipped { MissReason::Corrupt } else { MissReason::Evicted };
        assert_eq!(settled.map(|settled| (settled.tokens, settled.reason)), Some((0, Some(reason))));
        rig.settle();
        if flipped {
            assert!(store.lock().contains_key(&bad), "what was corrupt is stored anew");
            rig.cache.flush(Tiers::ALL);
            assert_eq!(rig.run(&prompt).settled.map(|settled| settled.came), Some(8 * PAGE));
        }
        rig.assert_quiet();
    }
}

/// G20, L33: a component for which there is no slot.
#[test]
fn l33_where_a_window_or_a_state_finds_no_slot_nothing_is_held() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = filled(true, true, &prompt);
    let (mut rig, _) = start(true, true, &store);
    let windows = rig.cache.alloc_windows(DEVICE - 1).unwrap();
    let id = rig.begin(&prompt);
    assert!(matches!(rig.cache.acquire(id, &prompt).unwrap(), Acquire::NoSpace));
    rig.cache.free_windows(&windows);
    let states = rig.cache.take_slots(Side::Device, &PerComponent([0, 0, STATES])).unwrap();
    assert!(matches!(rig.cache.acquire(id, &prompt).unwrap(), Acquire::NoSpace));
    rig.cache.check_integrity().unwrap();
    rig.cache.give_back_all(Side::Device, states);
    let grant = rig.acquire(id, &prompt);
    assert_eq!(grant.from_storage, 6 * PAGE);
    rig.cache.abort(id, PageTables { pages: grant.pages, windows: grant.windows });
    rig.assert_quiet();
}

/// G6: what comes to pages later than they were stored is stored by itself.
#[test]
fn g06_a_state_or_a_window_that_comes_to_stored_pages_is_offloaded_alone() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = Store::default();
    let (mut rig, backend) = start(false, true, &store);
    rig.run_leaving(&prompt, false);
    rig.settle();
    assert_eq!((store.lock().len(), backend.calls.offload_pages.load(Ordering::Relaxed)), (6, 6));
    // Its pages are on the device, and no state from which they could be gone on: they are computed again, and a state is left.
    rig.run(&prompt);
    rig.settle();
    assert_eq!((store.lock().len(), backend.calls.offload_pages.load(Ordering::Relaxed)), (7, 7));
    assert!(store.lock().contains_key(&state_key(&prompt, 5)));
    rig.assert_quiet();

    let store = filled(true, false, &prompt);
    store.lock().retain(|name, _| (0..6).all(|page| *name != window_key(&prompt, page)));
    let (mut rig, backend) = start(true, false, &store);
    rig.run(&prompt);
    rig.settle();
    assert_eq!(store.lock().len(), 12);
    assert!(backend.calls.offload_pages.load(Ordering::Relaxed) >= 6);
    rig.assert_quiet();
}

/// An offload is one over all of its pools: what lacks a window or a state becomes no hit, and is offered again as a whole.
#[test]
fn l07_where_a_window_or_a_state_is_refused_no_page_becomes_a_hit() {
    let prompt = tokens(1, 6 * PAGE + 1);
    for refused in [PoolGroup::Window, PoolGroup::State] {
        let store = Store::default();
        let (mut rig, backend) = start(true, true, &store);
        *backend.faults.refuse_group.lock() = Some(refused);
        rig.run(&prompt);
        rig.settle();
        let hit = || {
            let (mut other, _) = start(true, true, &store);
            let Ran { grant, settled } = other.run_leaving(&prompt, false);
            other.assert_quiet();
            (grant.from_storage, settled.map_or(0, |settled| settled.tokens))
        };
        assert_eq!(hit(), (0, 0), "without {refused:?}");
        *backend.faults.refuse_group.lock() = None;
        // Whoever comes through the pages again offers them again.
        rig.run(&prompt);
        rig.settle();
        assert_eq!(hit(), (6 * PAGE, 6 * PAGE), "with {refused:?}");
        rig.assert_quiet();
    }
}

/// G2, G11: a load that hangs holds transit pages of each group, and no slot.
#[test]
fn g11_a_load_of_several_pools_that_hangs_holds_transit_pages_alone() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = filled(true, true, &prompt);
    let rig = Pooled::new(true, true, DEVICE, 32);
    let handle = rig.cache.storage();
    let mut backend = FakeBackend::new("fake", &store, handle.host_pools());
    backend.linker = true;
    let backend = Arc::new(backend);
    handle.attached(Arc::clone(&backend) as Arc<_>, Place::At(0));
    let mut rig = rig;
    let id = rig.begin(&prompt);
    *backend.faults.late_after.lock() = Some(Duration::from_millis(30));
    backend.faults.hang_reads.store(true, Ordering::Release);
    let grant = rig.acquire(id, &prompt);
    rig.cache.start_loads();
    let mut tables = PageTables { pages: grant.pages.clone(), windows: grant.windows.clone() };
    let settled = rig.settled(id, &grant, &prompt, &mut tables);
    assert_eq!((settled.tokens, settled.reason), (0, Some(MissReason::BackendSlow)));
    rig.cache.finish(id, &[], tables);
    let stats = rig.settle();
    assert_eq!(stats.host_quarantined_pages as usize, 6 + WINDOW + 1);
    rig.cache.check_integrity().unwrap();
    backend.faults.hang_reads.store(false, Ordering::Release);
    rig.assert_quiet();
}

/// A place where others could have branched off is told of while it is ahead, and dropped once the pages behind it came.
#[test]
fn l36_a_branch_is_told_of_where_it_lies_behind_what_came() {
    let prompt = tokens(1, 8 * PAGE + 1);
    let store = filled(false, true, &prompt);
    let (mut rig, _) = start(false, true, &store);
    // The device has six pages without a state; storage has all eight with one.
    rig.run_leaving(&[&prompt[..6 * PAGE], &tokens(2, 2 * PAGE)].concat(), false);
    rig.settle();
    let id = rig.begin(&prompt);
    let grant = rig.acquire(id, &prompt);
    assert_eq!((grant.tokens, grant.branch), (8 * PAGE, None), "the branch at six pages is passed");
    rig.cache.abort(id, PageTables::from(grant.pages));
    store.lock().clear();
    rig.cache.storage().emptied("fake");
    let id = rig.begin(&prompt);
    let grant = rig.acquire(id, &prompt);
    assert_eq!((grant.tokens, grant.branch), (0, Some(6 * PAGE)));
    rig.cache.abort(id, PageTables::from(grant.pages));
    rig.assert_quiet();
}

/// Transit pages for less than a window: what begins the sequence needs less.
#[test]
fn l40_a_hit_whose_window_no_transit_pages_can_carry_is_loaded_so_far_as_one_fits() {
    let prompt = tokens(1, 6 * PAGE + 1);
    let store = filled(true, false, &prompt);
    let mut rig = Pooled::new(true, false, DEVICE, 2);
    rig.attach(&store);
    let Ran { grant, settled } = rig.run(&prompt);
    assert_eq!((grant.tokens, settled.map(|settled| settled.came)), (2 * PAGE, Some(2 * PAGE)), "two pages fit");
    rig.assert_quiet();
}
