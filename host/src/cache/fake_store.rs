//! A storage backend in memory, with both faces and with faults on order.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::plugin::backend::{
    BackendError, BackendLimits, BackendSettings, BackendStats, CallOptions, ChainInfo, ErrorKind, Held,
    HostPoolDescription, LayerLoad, PageKey, PageStatus, PoolGroup, PoolHit, Restorable, StorageBackend,
};

/// What outlives a backend: the stored pages, by name.
pub type Store = Arc<Mutex<HashMap<PageKey, Vec<u8>>>>;

/// The name of a page in the store: its key, for other groups than that of all tokens a little changed.
pub fn named(group: PoolGroup, key: &PageKey) -> PageKey {
    let mut name = *key;
    name[31] ^= group as u8;
    name
}

/// What goes wrong.
#[derive(Debug, Default)]
pub struct Faults {
    /// `get` says missing for these, though `exists` says yes.
    pub vanish: Mutex<HashSet<PageKey>>,
    /// `get` delivers these with a byte flipped.
    pub flip: Mutex<HashSet<PageKey>>,
    /// `get` leaves the statuses from this page of the call on unset.
    pub short_after: Mutex<Option<usize>>,
    /// Each call takes this long.
    pub delay: Mutex<Duration>,
    /// Reads wait while this is set; past the deadline they come back late.
    pub hang_reads: AtomicBool,
    /// Reads that hang come back late after this time, not at their deadline.
    pub late_after: Mutex<Option<Duration>>,
    /// If not empty, only reads that begin with one of these hang.
    pub hang_only: Mutex<HashSet<PageKey>>,
    /// Writes wait while this is set; past the deadline they come back late.
    pub hang_writes: AtomicBool,
    /// This many writes fail with a retryable error.
    pub fail_writes: AtomicUsize,
    /// This many reads fail with a retryable error, after the first page was delivered.
    pub fail_reads: AtomicUsize,
    /// This many writes panic.
    pub panic_writes: AtomicUsize,
    /// Single pages of writes are answered as failed, this many times.
    pub fail_pages: AtomicUsize,
    /// This many removes fail, while the page itself is gone already.
    pub fail_removes: AtomicUsize,
    /// Writes are refused page by page.
    pub refuse: AtomicBool,
    /// Writes of this group are refused.
    pub refuse_group: Mutex<Option<PoolGroup>>,
    /// `exists` fails.
    pub fail_exists: AtomicBool,
    /// Layers that a load settles; it waits before the next one, up to its deadline.
    pub layers_open: Mutex<Option<usize>>,
    /// A load settles this layer without having filled it.
    pub skip_layer: Mutex<Option<usize>>,
    /// This many loads are refused before anything of them runs.
    pub refuse_loads: AtomicUsize,
    /// This many loads panic.
    pub panic_loads: AtomicUsize,
}

/// What was called.
#[derive(Debug, Default)]
pub struct Calls {
    pub exists: AtomicUsize,
    pub get: AtomicUsize,
    pub get_pages: AtomicUsize,
    pub set: AtomicUsize,
    pub set_pages: AtomicUsize,
    pub flush: AtomicUsize,
    pub lookups: AtomicUsize,
    pub loads: AtomicUsize,
    /// Requests of each batch of loads.
    pub batches: Mutex<Vec<Vec<u64>>>,
    pub load_pages: AtomicUsize,
    pub offloads: AtomicUsize,
    pub offload_pages: AtomicUsize,
    /// For each call, the keys from the start of the sequence to its last one.
    pub chains: Mutex<Vec<Vec<PageKey>>>,
    /// Sessions named by writes.
    pub sessions: Mutex<HashSet<String>>,
}

pub struct FakeBackend {
    name: String,
    generation: u64,
    pub store: Store,
    pools: Vec<HostPoolDescription>,
    pub faults: Faults,
    pub calls: Calls,
    pub settings: BackendSettings,
    pub remove: bool,
    pub linker: bool,
    /// Pages of late calls, by group.
    late: Mutex<[Vec<u32>; 3]>,
}

static GENERATION: AtomicU64 = AtomicU64::new(1);

impl FakeBackend {
    pub fn new(name: &str, store: &Store, pools: Vec<HostPoolDescription>) -> Self {
        FakeBackend {
            name: name.to_owned(),
            generation: GENERATION.fetch_add(1, Ordering::Relaxed),
            store: Arc::clone(store),
            pools,
            faults: Faults::default(),
            calls: Calls::default(),
            settings: BackendSettings { timeout: Duration::from_secs(10), retries: 0, ..BackendSettings::default() },
            remove: true,
            linker: false,
            late: Mutex::default(),
        }
    }

    fn error(&self, kind: ErrorKind, retryable: bool, pages_in_use: bool) -> BackendError {
        BackendError { backend: self.name.clone(), kind, retryable, message: "on order".to_owned(), pages_in_use }
    }

    fn pools_of(&self, group: PoolGroup) -> impl Iterator<Item = &HostPoolDescription> {
        self.pools.iter().filter(move |pool| pool.group == group)
    }

    fn pieces(&self, group: PoolGroup, page: u32) -> impl Iterator<Item = (*mut u8, usize)> + '_ {
        self.pools_of(group).flat_map(move |pool| {
            assert!(page < pool.pages);
            pool.segments.iter().map(move |segment| {
                let offset = segment.offset + u64::from(page) * segment.stride;
                ((pool.base + offset as usize) as *mut u8, segment.len as usize)
            })
        })
    }

    fn read_page(&self, group: PoolGroup, page: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (at, len) in self.pieces(group, page) {
            // SAFETY: the pool lies where it says; the host promises not to write source pages.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(at, len) });
        }
        bytes
    }

    fn write_page(&self, group: PoolGroup, page: u32, bytes: &[u8]) {
        let mut rest = bytes;
        for (at, len) in self.pieces(group, page) {
            let (piece, others) = rest.split_at(len);
            // SAFETY: the pool lies where it says; destination pages are this call's.
            unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), at, len) };
            rest = others;
        }
        assert!(rest.is_empty(), "a page of another size");
    }

    /// Fills one layer of a page, or with none what belongs to no layer.
    fn write_layer(&self, group: PoolGroup, page: u32, layer: Option<usize>, bytes: &[u8]) {
        let mut end = 0;
        for pool in self.pools_of(group) {
            let starts: Vec<u64> = pool
                .segments
                .iter()
                .map(|segment| {
                    let start = end;
                    end += segment.len;
                    start
                })
                .collect();
            let put = |segment: usize, offset: u64, len: u64| {
                let place = pool.segments[segment];
                let at = (pool.base as u64 + place.offset + u64::from(page) * place.stride + offset) as *mut u8;
                let from = &bytes[(starts[segment] + offset) as usize..][..len as usize];
                // SAFETY: the pool lies where it says; destination pages are this call's.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), at, len as usize) };
            };
            match (layer, pool.segments.last()) {
                (Some(layer), _) => {
                    for c in pool.components.iter().filter(|c| c.layer as usize == layer) {
                        let runs = 0..c.run_count;
                        runs.for_each(|run| put(c.segment as usize, c.offset + run * c.run_stride, c.run_len));
                    }
                }
                (None, Some(seal)) => put(starts.len() - 1, 0, seal.len),
                (None, None) => {}
            }
        }
    }

    /// Whether the store has what going on from the end of the first `pages` keys needs.
    fn can_restore(&self, keys: &[PageKey], held: &Held, pages: usize) -> bool {
        let store = self.store.lock();
        self.pools.iter().all(|pool| {
            let first = match pool.hit {
                PoolHit::AllPages => held[pool.group as usize] as usize,
                PoolHit::TrailingPages(reach) => pages.saturating_sub(reach as usize),
            };
            (first..pages).all(|page| store.contains_key(&named(pool.group, &keys[page])))
        })
    }

    fn hangs(&self, keys: &[PageKey]) -> Option<&AtomicBool> {
        let only = self.faults.hang_only.lock();
        (only.is_empty() || only.contains(&keys[0])).then_some(&self.faults.hang_reads)
    }

    /// Waits as ordered; an error when the deadline passes while the call hangs.
    fn wait(
        &self,
        options: &CallOptions,
        hang: Option<&AtomicBool>,
        pages: &[(PoolGroup, u32)],
    ) -> Result<(), BackendError> {
        let delay = *self.faults.delay.lock();
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        let late_after = self.faults.late_after.lock().map(|after| Instant::now() + after);
        let late = late_after.unwrap_or(options.deadline).min(options.deadline);
        while hang.is_some_and(|hang| hang.load(Ordering::Acquire)) {
            if Instant::now() >= late {
                let mut late = self.late.lock();
                pages.iter().for_each(|&(group, page)| late[group as usize].push(page));
                return Err(self.error(ErrorKind::TimedOut, true, !pages.is_empty()));
            }
            if options.is_cancelled() && pages.is_empty() {
                return Err(self.error(ErrorKind::Cancelled, false, false));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

impl Calls {
    fn note(&self, chain: &ChainInfo<'_>, keys: &[PageKey]) {
        assert_eq!(chain.position as usize, chain.prefix_keys.len());
        self.chains.lock().push([chain.prefix_keys, keys].concat());
    }
}

fn of_group(group: PoolGroup, pages: &[u32]) -> Vec<(PoolGroup, u32)> {
    pages.iter().map(|&page| (group, page)).collect()
}

fn take(counter: &AtomicUsize) -> bool {
    counter.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1)).is_ok()
}

impl StorageBackend for FakeBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn generation(&self) -> u64 {
        self.generation
    }

    fn limits(&self) -> BackendLimits {
        BackendLimits { preferred_batch: 4, concurrency: 4, remove: self.remove, durable: true }
    }

    fn settings(&self) -> &BackendSettings {
        &self.settings
    }

    fn batch_exists(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        held: &Held,
        chain: &ChainInfo<'_>,
    ) -> Result<Restorable, BackendError> {
        self.calls.exists.fetch_add(1, Ordering::Relaxed);
        self.calls.note(chain, keys);
        self.wait(options, self.hangs(keys), &[])?;
        if self.faults.fail_exists.load(Ordering::Acquire) {
            return Err(self.error(ErrorKind::Unavailable, true, false));
        }
        let lengths = (0..=keys.len()).map(|pages| self.can_restore(keys, held, pages)).collect();
        let mut answer = Restorable::from_mask(lengths);
        for group in PoolGroup::ALL.into_iter().filter(|&group| self.pools_of(group).next().is_some()) {
            let store = self.store.lock();
            let present = keys.iter().map(|key| store.contains_key(&named(group, key))).collect();
            answer = answer.with_present_of(group, present);
        }
        Ok(answer)
    }

    fn batch_get(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.calls.note(chain, keys);
        self.calls.get.fetch_add(1, Ordering::Relaxed);
        self.calls.get_pages.fetch_add(keys.len(), Ordering::Relaxed);
        assert!(keys.len() == pages.len() && keys.len() == status.len() && !keys.is_empty());
        self.wait(options, self.hangs(keys), &of_group(group, pages))?;
        let fails = take(&self.faults.fail_reads);
        let short = if fails { 1 } else { self.faults.short_after.lock().unwrap_or(usize::MAX) };
        for (i, (key, &page)) in keys.iter().zip(pages).enumerate().take_while(|(i, _)| *i < short) {
            let name = named(group, key);
            let found = self.store.lock().get(&name).cloned();
            let vanished = self.faults.vanish.lock().contains(&name);
            match found {
                Some(mut bytes) if !vanished => {
                    if self.faults.flip.lock().contains(&name) {
                        bytes[7] ^= 0x10;
                    }
                    self.write_page(group, page, &bytes);
                    status[i] = PageStatus::Ok;
                }
                _ => status[i] = PageStatus::Missing,
            }
        }
        if fails { Err(self.error(ErrorKind::Unavailable, true, false)) } else { Ok(()) }
    }

    fn batch_set(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.calls.set.fetch_add(1, Ordering::Relaxed);
        self.calls.set_pages.fetch_add(keys.len(), Ordering::Relaxed);
        self.calls.sessions.lock().insert(chain.session_id.to_owned());
        assert!(keys.len() == pages.len() && keys.len() == status.len() && !keys.is_empty());
        self.calls.note(chain, keys);
        assert!(!take(&self.faults.panic_writes), "a panic on order");
        if take(&self.faults.fail_writes) {
            return Err(self.error(ErrorKind::Unavailable, true, false));
        }
        self.wait(options, Some(&self.faults.hang_writes), &of_group(group, pages))?;
        for (i, (key, &page)) in keys.iter().zip(pages).enumerate() {
            let refused = *self.faults.refuse_group.lock() == Some(group);
            status[i] = if refused || self.faults.refuse.load(Ordering::Acquire) {
                PageStatus::Refused
            } else if take(&self.faults.fail_pages) {
                PageStatus::Failed
            } else {
                let bytes = self.read_page(group, page);
                self.store.lock().entry(named(group, key)).or_insert(bytes);
                PageStatus::Ok
            };
        }
        Ok(())
    }

    fn has_linker(&self) -> bool {
        self.linker
    }

    fn lookup(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        held: &Held,
        chain: &ChainInfo<'_>,
        request: u64,
    ) -> Result<Restorable, BackendError> {
        assert!(self.linker && request > 0);
        self.calls.lookups.fetch_add(1, Ordering::Relaxed);
        self.batch_exists(options, keys, held, chain)
    }

    fn load_layers(
        &self,
        options: &CallOptions,
        loads: &[LayerLoad<'_>],
        words: &Arc<[AtomicU32]>,
        watch: &mut dyn FnMut(),
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        assert!(self.linker && !loads.is_empty());
        self.calls.loads.fetch_add(1, Ordering::Relaxed);
        self.calls.batches.lock().push(loads.iter().map(|load| load.request).collect());
        assert!(!take(&self.faults.panic_loads), "a panic on order");
        if take(&self.faults.refuse_loads) {
            status.fill(PageStatus::Refused);
            return Err(self.error(ErrorKind::Unsupported, false, false));
        }
        let mut pages = Vec::new();
        for load in loads {
            assert!(!load.keys_of(PoolGroup::Full).is_empty() || self.pools.len() > 1);
            self.calls.chains.lock().push(load.keys.to_vec());
            for group in PoolGroup::ALL {
                let (keys, numbers) = (load.keys_of(group), load.lanes[group as usize].pages);
                assert_eq!(keys.len(), numbers.len());
                pages.extend(keys.iter().zip(numbers).map(|(key, &page)| (named(group, key), (group, page))));
            }
        }
        self.calls.load_pages.fetch_add(pages.len(), Ordering::Relaxed);
        let numbers: Vec<(PoolGroup, u32)> = pages.iter().map(|(_, page)| *page).collect();
        self.wait(options, self.hangs(&[pages[0].0]), &numbers)?;
        let short = self.faults.short_after.lock().unwrap_or(usize::MAX);
        let mut found = Vec::new();
        for (i, (name, (group, page))) in pages.iter().enumerate() {
            let gone = self.faults.vanish.lock().contains(name);
            match self.store.lock().get(name).filter(|_| !gone && i < short) {
                Some(bytes) => {
                    let mut bytes = bytes.clone();
                    if self.faults.flip.lock().contains(name) {
                        bytes[7] ^= 0x10;
                    }
                    self.write_layer(*group, *page, None, &bytes);
                    found.push((*group, *page, bytes));
                    status[i] = PageStatus::Ok;
                }
                None if i < short => status[i] = PageStatus::Missing,
                None => {}
            }
        }
        for (layer, word) in words.iter().enumerate() {
            while self.faults.layers_open.lock().is_some_and(|open| layer >= open) {
                if options.is_cancelled() || Instant::now() >= options.deadline {
                    status.fill(PageStatus::Failed);
                    return Err(self.error(ErrorKind::TimedOut, true, false));
                }
                watch();
                std::thread::sleep(Duration::from_millis(1));
            }
            if *self.faults.skip_layer.lock() != Some(layer) {
                found.iter().for_each(|(group, page, bytes)| self.write_layer(*group, *page, Some(layer), bytes));
            }
            word.store(1, Ordering::Release);
            watch();
        }
        Ok(())
    }

    fn offload(
        &self,
        options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        assert!(self.linker);
        self.calls.offloads.fetch_add(1, Ordering::Relaxed);
        self.calls.offload_pages.fetch_add(keys.len(), Ordering::Relaxed);
        self.batch_set(options, group, keys, pages, chain, status)
    }

    fn batch_remove(
        &self,
        _options: &CallOptions,
        group: PoolGroup,
        keys: &[PageKey],
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        let keys: Vec<PageKey> = keys.iter().map(|key| named(group, key)).collect();
        if !self.remove {
            return Err(self.error(ErrorKind::Unsupported, false, false));
        }
        if take(&self.faults.fail_removes) {
            for key in &keys {
                self.store.lock().remove(key);
                self.faults.flip.lock().remove(key);
            }
            return Err(self.error(ErrorKind::NoSpace, true, false));
        }
        for (key, status) in keys.iter().zip(status) {
            self.store.lock().remove(key);
            self.faults.flip.lock().remove(key);
            *status = PageStatus::Ok;
        }
        Ok(())
    }

    fn flush(&self, _options: &CallOptions) -> Result<(), BackendError> {
        self.calls.flush.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn clear(&self, _options: &CallOptions) -> Result<(), BackendError> {
        self.store.lock().clear();
        Ok(())
    }

    fn stats(&self) -> Result<BackendStats, BackendError> {
        Ok(BackendStats { pages: self.store.lock().len() as u64, ..BackendStats::default() })
    }

    fn reclaim(&self, group: PoolGroup) -> Vec<u32> {
        let hanging = self.faults.hang_reads.load(Ordering::Acquire) || self.faults.hang_writes.load(Ordering::Acquire);
        if hanging { Vec::new() } else { std::mem::take(&mut self.late.lock()[group as usize]) }
    }

    fn quarantined(&self) -> usize {
        self.late.lock().iter().map(Vec::len).sum()
    }
}
