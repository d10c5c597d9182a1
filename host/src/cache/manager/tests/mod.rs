//! Scenarios: a cache over a real device pool and a backend in memory, driven as the engine drives it.
//!
//! Each page's bytes follow from the tokens up to its end and the namespace, so every granted page is
//! checked to the byte.

mod break_even;
mod fallback;
mod faults;
mod lifecycle;
mod linked;
mod policies;
mod reuse;
mod several;
mod soak;
mod writes;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, bounded};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{Device, HostPage, KvDtype, KvPool, KvSpec};

use super::CacheManager;
use crate::cache::config::{CacheConfig, PrefetchPolicy};
use crate::cache::fake_store::{FakeBackend, Store};
use crate::cache::stats::{CacheStats, NoEvents, StorageOp, StorageResult};
use crate::cache::types::{Acquire, CacheNamespace, Grant, MissReason, Prefetch, RequestId, ReuseHints};
use crate::plugin::backend::PageKey;
use crate::plugin::backend::Place;

const PAGE: usize = 4;
const LONG: Duration = Duration::from_secs(20);

fn spec(pages: usize) -> KvSpec {
    KvSpec { layers: 2, kv_heads: 2, head_dim_k: 16, head_dim_v: 16, page_tokens: PAGE, pages, dtype: KvDtype::F16 }
}

/// A cache as the engine sees it.
struct Rig {
    cache: CacheManager,
    pool: Arc<dyn KvPool>,
    woken: Receiver<()>,
    next: RequestId,
}

/// Settings for small prompts: storage is asked for two pages and more.
fn config(host_pages: u32) -> CacheConfig {
    CacheConfig {
        host_pages,
        prefetch_threshold: 2 * PAGE,
        load_back_threshold: 1,
        prefetch_policy: PrefetchPolicy::WaitComplete,
        ..CacheConfig::default()
    }
}

impl Rig {
    fn new(device_pages: usize, config: CacheConfig) -> Self {
        let device = CpuDevice::new(1).unwrap();
        let pool = device.alloc_kv_pool(spec(device_pages)).unwrap();
        let (wake, woken) = bounded(1);
        let waker = Arc::new(move || {
            let _ = wake.try_send(());
        });
        let cache = CacheManager::new(config, Arc::clone(&pool), Arc::new(NoEvents), waker).unwrap();
        Rig { cache, pool, woken, next: 1 }
    }

    /// With a backend over `store` attached.
    fn with_storage(device_pages: usize, config: CacheConfig, store: &Store) -> (Self, Arc<FakeBackend>) {
        let rig = Rig::new(device_pages, config);
        let backend = rig.attach("fake", store, |_| {});
        (rig, backend)
    }

    fn attach(&self, name: &str, store: &Store, change: impl FnOnce(&mut FakeBackend)) -> Arc<FakeBackend> {
        let handle = self.cache.storage();
        let mut backend = FakeBackend::new(name, store, handle.host_pools());
        change(&mut backend);
        let backend = Arc::new(backend);
        handle.attached(Arc::clone(&backend) as Arc<_>, Place::Of(name.to_owned()));
        backend
    }

    fn request(&mut self, prompt: &[u32], namespace: &CacheNamespace) -> RequestId {
        let id = self.next;
        self.next += 1;
        self.cache.begin(id, prompt, namespace, &ReuseHints::default());
        id
    }

    /// Sleeps until the waker fires or `until`.
    fn sleep(&self, until: Instant) {
        let _ = self.woken.recv_deadline(until);
    }

    fn wait_storage(&mut self, id: RequestId) {
        let limit = Instant::now() + LONG;
        while let Prefetch::Waiting { until } = self.cache.poll(id) {
            assert!(Instant::now() < limit, "a wait for storage does not end");
            self.sleep(until);
        }
    }

    fn acquire(&mut self, id: RequestId, tokens: &[u32]) -> Grant {
        let limit = Instant::now() + LONG;
        loop {
            match self.cache.acquire(id, tokens).unwrap() {
                Acquire::Granted(grant) => return grant,
                Acquire::Loading => self.sleep(limit),
                Acquire::NoSpace => {
                    assert!(Instant::now() < limit, "no space");
                    self.sleep(Instant::now() + Duration::from_millis(5));
                }
            }
        }
    }

    /// Runs a request from begin to finish, and checks every byte of what it was granted.
    fn run_in(&mut self, tokens: &[u32], namespace: &CacheNamespace) -> Grant {
        let id = self.request(tokens, namespace);
        self.wait_storage(id);
        let grant = self.acquire(id, tokens);
        self.check_grant(&grant, tokens, namespace);
        self.complete(id, &grant, tokens, namespace);
        grant
    }

    fn run(&mut self, tokens: &[u32]) -> Grant {
        self.run_in(tokens, &CacheNamespace::default())
    }

    fn check_grant(&self, grant: &Grant, tokens: &[u32], namespace: &CacheNamespace) {
        assert_eq!(grant.tokens, grant.pages.len() * PAGE);
        assert_eq!(grant.tokens, grant.from_device + grant.from_host + grant.from_storage);
        assert!(grant.tokens < tokens.len(), "the last token is left for prefill");
        for (i, &page) in grant.pages.iter().enumerate() {
            let expected = content(&tokens[..(i + 1) * PAGE], namespace);
            assert!(self.read(page) == expected, "page {i} of the prefix has wrong bytes");
        }
    }

    /// Computes the rest of `tokens` and finishes.
    fn complete(&mut self, id: RequestId, grant: &Grant, tokens: &[u32], namespace: &CacheNamespace) {
        let mut pages = grant.pages.clone();
        self.extend(&mut pages, tokens, namespace);
        self.cache.commit(id, tokens, &mut pages, &mut []).unwrap();
        self.cache.finish(id, tokens, pages);
    }

    /// Allocates and fills the pages that `tokens` need beyond `pages`.
    fn extend(&mut self, pages: &mut Vec<u32>, tokens: &[u32], namespace: &CacheNamespace) {
        let missing = tokens.len().div_ceil(PAGE) - pages.len();
        let limit = Instant::now() + LONG;
        let fresh = loop {
            match self.cache.alloc_pages(missing) {
                Some(fresh) => break fresh,
                None => {
                    assert!(Instant::now() < limit, "no pages for the rest of the prompt");
                    self.sleep(Instant::now() + Duration::from_millis(5));
                    self.cache.tick();
                }
            }
        };
        for page in fresh {
            let end = tokens.len().min((pages.len() + 1) * PAGE);
            self.write(page, &content(&tokens[..end], namespace));
            pages.push(page);
        }
    }

    /// Lets the workers finish everything.
    fn settle(&mut self) -> CacheStats {
        let limit = Instant::now() + LONG;
        loop {
            let next = self.cache.tick();
            let stats = self.cache.stats();
            let moving = stats.prefetches_running + stats.load_backs_running + stats.layer_loads_running;
            if stats.backup_pending_pages + moving == 0 {
                return stats;
            }
            assert!(Instant::now() < limit, "work does not end: {stats:?}");
            self.sleep(next.unwrap_or(limit).min(limit));
        }
    }

    fn check(&mut self) {
        self.cache.check_integrity().unwrap();
    }

    fn pages(&self, op: StorageOp, result: StorageResult) -> u64 {
        self.cache.counters().backend("fake").get(op, result)
    }

    fn write(&self, page: u32, bytes: &[u8]) {
        let mut bytes = bytes.to_vec();
        // SAFETY: the buffer has the bytes the strides reach; the page is the test's alone.
        unsafe { self.pool.copy_page_in(page, &view(&mut bytes)).unwrap() };
    }

    fn read(&self, page: u32) -> Vec<u8> {
        let mut bytes = vec![0; self.pool.spec().page_bytes()];
        // SAFETY: the buffer has the bytes the strides reach; nobody writes a granted page.
        unsafe { self.pool.copy_page_out(page, &view(&mut bytes)).unwrap() };
        bytes
    }
}

fn view(bytes: &mut [u8]) -> HostPage {
    let spec = spec(1);
    let token = spec.head_dim_k * spec.dtype.bytes();
    let head = token * PAGE;
    let layer = head * spec.kv_heads;
    let (k, v) = bytes.split_at_mut(spec.page_k_bytes());
    HostPage {
        k: k.as_mut_ptr(),
        v: v.as_mut_ptr(),
        k_layer_stride: layer,
        k_head_stride: head,
        k_token_stride: token,
        v_layer_stride: layer,
        v_head_stride: head,
        v_token_stride: token,
    }
}

/// The bytes of the page that ends after `tokens`.
fn content(tokens: &[u32], namespace: &CacheNamespace) -> Vec<u8> {
    let mut hasher = DefaultHasher::new();
    (tokens, namespace).hash(&mut hasher);
    let mut state = hasher.finish() | 1;
    let mut byte = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..spec(1).page_bytes()).map(|_| byte()).collect()
}

/// `count` tokens that no other `start` shares.
fn tokens(start: u32, count: usize) -> Vec<u32> {
    (0..count as u32).map(|i| start * 10_000 + i).collect()
}

fn salt(text: &str) -> CacheNamespace {
    CacheNamespace::new(None, Some(text.to_owned()))
}

fn keys(tokens: &[u32]) -> Vec<PageKey> {
    crate::cache::hash::chain_keys(None, tokens, PAGE)
}

fn reasons(grant: &Grant) -> Vec<MissReason> {
    grant.why.iter().map(|miss| miss.reason).collect()
}
