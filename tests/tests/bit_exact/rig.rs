//! An engine in this process, with the real model and the file plugin, that shows its logits.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use kvdock::cache::{CacheConfig, CacheManager, CacheMemory, CacheRoom, HostLayout, NoEvents, StorageHandle, Tiers};
use kvdock::config::{BackendTable, Sources};
use kvdock::engine::{
    Completion, Engine, EngineConfig, EngineParts, LogitsRow, Mailbox, ModelMemory, Request, RequestStream,
    SamplingParams, Usage,
};
use kvdock::plugin::admin::StorageAdmin;
use kvdock::plugin::backend::{
    BackendSink, CacheMode, DevicePools, GuardReport, HostPoolDescription, Place, PolicyChange, StorageBackend,
};
use kvdock::plugin::{Namespace, PAGE_FORMAT, PluginManager, WorkerIdentity};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{Device, KvDtype};
use kvdock_models::{KvGeometry, LoadOptions, LoadedModel, PoolDecl, PoolSet, PoolSizes, load};
use kvdock_tests::{paths, prompt};

const PAGE: usize = 16;

/// How an engine is started.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    /// Tokens prefilled in a step.
    pub chunk: usize,
    /// Where pages are stored; none for no storage.
    pub folder: Option<&'a Path>,
    /// Fewest missing tokens for which storage is asked.
    pub threshold: usize,
    /// Pages of all tokens on the device.
    pub device_pages: usize,
    /// Pages of windows on the device.
    pub window_pages: usize,
    /// Pages of all tokens on the host, and of windows.
    pub host_pages: u32,
    /// Recurrent states on the device, beside those of requests that run; twice as many on the host.
    pub states: usize,
    /// Requests that run side by side.
    pub running: usize,
    /// Linker mode: pages come from storage layer by layer, and the host pages are transit pages.
    pub linked: bool,
    /// Folder and name of another plugin than the file plugin; it takes a folder as well.
    pub plugin: Option<(&'a Path, &'a str)>,
    /// Most time of a call to the plugin.
    pub timeout: Duration,
    /// Rows of logits are recorded. Else nothing but tokens is asked of the model, so that a device may choose them.
    pub watched: bool,
}

impl Default for Setup<'_> {
    fn default() -> Self {
        Setup {
            chunk: 512,
            folder: None,
            threshold: CacheConfig::default().prefetch_threshold,
            device_pages: 512,
            window_pages: 512,
            host_pages: 512,
            states: 48,
            running: 16,
            linked: false,
            plugin: None,
            // Nothing here is about being late: a thread that stands still must not make a hit a miss.
            timeout: Duration::from_secs(60),
            watched: true,
        }
    }
}

/// Puts something between the cache and a backend that is attached; it is told the host pools.
pub trait Wrap:
    Fn(Arc<dyn StorageBackend>, Vec<HostPoolDescription>) -> Arc<dyn StorageBackend> + Send + Sync + 'static
{
}

impl<F> Wrap for F where
    F: Fn(Arc<dyn StorageBackend>, Vec<HostPoolDescription>) -> Arc<dyn StorageBackend> + Send + Sync + 'static
{
}

/// Where a prefix came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    Nowhere,
    Device,
    Host,
    Storage,
}

/// Rows of logits by position, as bits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rows(BTreeMap<usize, Vec<u32>>);

impl Rows {
    /// The first place where two runs differ: position, token, and both values.
    pub fn difference(&self, other: &Rows) -> Option<(usize, usize, f32, f32)> {
        for (position, row) in &self.0 {
            let Some(theirs) = other.0.get(position) else { return Some((*position, 0, f32::NAN, f32::NAN)) };
            if let Some(token) = (0..row.len().max(theirs.len())).find(|&token| row.get(token) != theirs.get(token)) {
                let value = |row: &[u32]| row.get(token).map_or(f32::NAN, |bits| f32::from_bits(*bits));
                return Some((*position, token, value(row), value(theirs)));
            }
        }
        let beyond = other.0.keys().find(|position| !self.0.contains_key(position));
        beyond.map(|position| (*position, 0, f32::NAN, f32::NAN))
    }

    pub fn must_equal(&self, other: &Rows, what: &str) {
        if let Some((position, token, expected, found)) = self.difference(other) {
            panic!("{what}: at position {position} the logit of token {token} is {found}, not {expected}");
        }
    }
}

/// What a run gave.
pub struct Run {
    pub rows: Rows,
    /// What was generated.
    pub tokens: Vec<u32>,
    usage: Usage,
}

impl Run {
    /// Exactly `tokens` came from `tier` and nothing from the others.
    pub fn came_from(&self, tier: Tier, tokens: u32) {
        let expected = |this: Tier| if this == tier { tokens } else { 0 };
        let expected = (expected(Tier::Device), expected(Tier::Host), expected(Tier::Storage));
        let found = (self.usage.cached_device, self.usage.cached_host, self.usage.cached_storage);
        assert_eq!(found, expected, "tokens from device, host and storage");
    }
}

impl Run {
    /// Tokens of the prompt that were not computed.
    pub fn cached(&self) -> u32 {
        self.usage.cached_tokens()
    }
}

type Recorded = Arc<Mutex<BTreeMap<String, Rows>>>;

/// A running engine.
pub struct Rig {
    engine: Engine,
    storage: PluginManager,
    runtime: tokio::runtime::Runtime,
    recorded: Recorded,
    vocab: u32,
}

/// A model, and the devices that its ranks run on.
pub struct Loaded {
    model: LoadedModel,
    devices: Vec<Arc<dyn Device>>,
    /// Tokens a page.
    pub page: usize,
}

impl Loaded {
    /// Loads the checkpoint at `path`, for pages of 16 tokens or what its pools take.
    pub fn from(path: &Path) -> Self {
        Self::with_page(path, PAGE)
    }

    /// As `from`, for pages of `page` tokens or what its pools take.
    pub fn with_page(path: &Path, page: usize) -> Self {
        Self::over_ranks(path, page, (1, 1))
    }

    /// As `with_page`, over so many tensor-parallel times so many context-parallel ranks.
    pub fn over_ranks(path: &Path, page: usize, (shares, context): (usize, usize)) -> Self {
        let ranks = shares * context;
        let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
        let device = || CpuDevice::new((threads / ranks).max(1)).expect("a CPU device");
        let devices = (0..ranks).map(|_| Arc::new(device()) as Arc<dyn Device>).collect();
        Self::over(path, page, devices, context)
    }

    /// As `with_page`, on this device.
    pub fn on(path: &Path, page: usize, device: Arc<dyn Device>) -> Self {
        Self::over(path, page, vec![device], 1)
    }

    fn over(path: &Path, page: usize, devices: Vec<Arc<dyn Device>>, context: usize) -> Self {
        let (first, further_ranks) = (devices[0].clone(), devices[1..].to_vec());
        let options = LoadOptions { further_ranks, context_ranks: context, ..LoadOptions::new(first) };
        let model = load(path, &options).expect("the model loads");
        let page = page.next_multiple_of(model.spec().page_multiple);
        Self { model, devices, page }
    }

    /// Tokens that the model knows.
    pub fn vocab(&self) -> u32 {
        u32::try_from(self.model.spec().vocab_size).expect("a small number")
    }

    /// Memory for the model and for the cache.
    fn memory(&self, setup: &Setup<'_>) -> (ModelMemory, CacheMemory) {
        let spec = self.model.spec();
        if let Some(kv) = spec.kv.filter(|_| spec.pools.len() == 1 && spec.ranks == 1) {
            let shape = kv.pool(KvDtype::F16, self.page, setup.device_pages);
            let pool = self.devices[0].alloc_kv_pool(shape).expect("a KV pool");
            return (pool.clone().into(), pool.into());
        }
        let sizes = PoolSizes {
            page_tokens: self.page,
            anchor_pages: setup.device_pages,
            window_pages: setup.window_pages,
            slots: setup.running + setup.states,
            dtype: KvDtype::F16,
        };
        let pools = PoolSet::allocate_ranks(&self.devices, &spec.pools, sizes).expect("the pools");
        let room =
            CacheRoom { running: setup.running, host_windows: setup.host_pages, host_states: 2 * setup.states as u32 };
        let cache = CacheMemory::of_pools(&pools, spec.layers, room).expect("the cache's memory");
        (ModelMemory::Pools(Arc::new(pools)), cache)
    }
}

fn small() -> &'static Loaded {
    static MODEL: OnceLock<Loaded> = OnceLock::new();
    MODEL.get_or_init(|| Loaded::from(&paths::model()))
}

impl Rig {
    /// An engine that prefills `chunk` tokens in a step, over the pages in `folder`.
    pub fn start(chunk: usize, folder: &Path) -> Self {
        Self::of(small(), Setup { chunk, folder: Some(folder), ..Setup::default() })
    }

    /// The same in linker mode.
    pub fn start_linked(chunk: usize, folder: &Path) -> Self {
        Self::of(small(), Setup { chunk, folder: Some(folder), linked: true, ..Setup::default() })
    }

    /// An engine for this model.
    pub fn of(loaded: &Loaded, setup: Setup<'_>) -> Self {
        Self::over(loaded, setup, |backend, _| backend)
    }

    /// As `of`, with something between the cache and its store.
    pub fn over(loaded: &Loaded, setup: Setup<'_>, wrap: impl Wrap) -> Self {
        let Setup { chunk, folder, threshold, linked, .. } = setup;
        let layout = if linked { HostLayout::PageFirstDirect } else { HostLayout::PageFirst };
        let model = &loaded.model;
        let spec = model.spec();
        let (pool, memory) = loaded.memory(&setup);
        let none = KvGeometry { layers: spec.layers, kv_heads: 0, head_dim_k: 0, head_dim_v: 0 };
        let kv = spec.kv.unwrap_or(none);
        let small = |number: usize| u32::try_from(number).expect("a small number");
        let namespace = Namespace {
            format: PAGE_FORMAT,
            architecture: spec.architecture.clone(),
            weights_sha256: spec.weights_digest_hex(),
            kv_dtype: "f16".to_owned(),
            host_layout: layout.as_str().to_owned(),
            page_tokens: small(loaded.page),
            layers: small(kv.layers),
            kv_heads: small(kv.kv_heads),
            head_dim_k: small(kv.head_dim_k),
            head_dim_v: small(kv.head_dim_v),
            tp: (0, small(spec.ranks / spec.context_ranks)),
            pp: (0, 1),
            cp: (0, small(spec.context_ranks)),
            numerics_id: spec.numerics_id.clone(),
        };
        let replicated = spec.ranks > 1 && spec.pools.iter().all(PoolDecl::replicated);
        let identity = WorkerIdentity::of_ranks(namespace, "small", spec.weights_digest, replicated);
        let of_rank = |rank: usize| identity.of_rank(small(rank)).namespace.digest();
        let cache_config = CacheConfig {
            host_pages: setup.host_pages,
            host_layout: layout,
            linked,
            identity: of_rank(0),
            further_identities: (1..spec.ranks).map(of_rank).collect(),
            prefetch_threshold: threshold,
            // Nothing here is about being late.
            prefetch_timeout_base: Duration::from_secs(60),
            ..CacheConfig::default()
        };
        let mailbox = Mailbox::new();
        let cache = CacheManager::over(cache_config, memory, Arc::new(NoEvents), mailbox.waker()).expect("a cache");
        let sink = Sink { storage: cache.storage(), linked, wrap: Box::new(wrap) };
        let recorded = Recorded::default();
        let engine_config = EngineConfig {
            prefill_chunk: chunk,
            max_running_requests: setup.running,
            max_queued_requests: 16,
            logits_tap: setup.watched.then(|| tap(recorded.clone())),
        };
        let parts =
            EngineParts { model: model.model.clone(), tokenizer: model.tokenizer.clone(), pool, cache, mailbox };
        let engine = Engine::start(engine_config, parts).expect("the engine starts");

        let mut config = kvdock::config::load(&Sources::default()).expect("the defaults are right").config.storage;
        if let Some(folder) = folder {
            let name = setup.plugin.map_or("file", |(_, name)| name);
            let mut table = BackendTable::new(name);
            table.own.insert("dir".to_owned(), folder.to_str().expect("a UTF-8 path").into());
            if setup.plugin.is_none() {
                table.own.insert("min_free_bytes".to_owned(), 0.into());
            }
            table.settings.timeout = setup.timeout;
            config.backend = Some(name.to_owned());
            config.tables.insert(name.to_owned(), table);
        }
        let file = || paths::file_plugin().parent().expect("the plugin lies in a folder").to_path_buf();
        let plugins = setup.plugin.map_or_else(file, |(folder, _)| folder.to_path_buf());
        let storage = PluginManager::new(config, vec![plugins], identity, Arc::new(sink));
        storage.attach_configured().expect("the file plugin is attached");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        Self { engine, storage, runtime, recorded, vocab: loaded.vocab() }
    }

    /// Hands in a request.
    pub fn submit(&self, id: &str, prompt: &[u32], new: u32, salt: Option<&str>) -> RequestStream {
        let sampling =
            SamplingParams { max_new_tokens: Some(new), temperature: 0.0, ignore_eos: true, ..Default::default() };
        let mut request = Request::new(id, prompt.to_vec(), sampling);
        request.cache_salt = salt.map(str::to_owned);
        self.engine.handle().submit(request).expect("the request is taken")
    }

    /// Ends a request before its time. Says whether it was there.
    pub fn abort(&self, id: &str) -> bool {
        self.runtime.block_on(self.engine.handle().abort(id))
    }

    /// Empties the device of what nobody holds.
    pub fn flush(&self) {
        self.runtime.block_on(self.engine.handle().flush(Tiers::ALL)).expect("the engine runs");
    }

    /// The rest of a request that was handed in, `new` tokens after `prompt` ones.
    pub fn finish(&self, id: &str, stream: RequestStream, prompt: usize, new: u32) -> Run {
        let whole = self.collect(stream);
        self.result(id, &whole, prompt, new)
    }

    /// Waits until what is in the cache is the tree's alone, nothing is on its way, and nothing of it is lost.
    pub fn assert_quiet(&self) {
        let handle = self.engine.handle();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        loop {
            self.check_integrity();
            let stats = handle.cache_counters().snapshot();
            if stats.transit_used_tokens + stats.backup_pending_pages + stats.layer_loads_running == 0 {
                assert_eq!(stats.misuses, 0);
                break;
            }
            assert!(std::time::Instant::now() < deadline, "something is held: {stats:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
        self.empty_device();
        self.check_integrity();
        assert_eq!(handle.cache_counters().snapshot().device_used_tokens, 0, "device pages are lost");
    }

    pub fn collect(&self, stream: RequestStream) -> Completion {
        let samples = self.runtime.block_on(stream.collect());
        samples.into_iter().next().expect("one sample")
    }

    fn result(&self, id: &str, whole: &Completion, prompt: usize, new: u32) -> Run {
        let rows = self.recorded.lock().unwrap().remove(id).expect("its logits were seen");
        let positions: Vec<usize> = rows.0.keys().copied().collect();
        let expected: Vec<usize> = (prompt - 1..prompt - 1 + new as usize).collect();
        assert_eq!(positions, expected, "a row for each new token; {:?}", whole.reason);
        Run { rows, tokens: whole.token_ids.clone(), usage: whole.usage }
    }

    /// Runs one request with nothing beside it; gives its tokens.
    pub fn tokens(&self, id: &str, prompt: &[u32], sampling: SamplingParams) -> Vec<u32> {
        let request = Request::new(id, prompt.to_vec(), sampling);
        self.collect(self.engine.handle().submit(request).expect("the request is taken")).token_ids
    }

    /// Runs one request with nothing beside it.
    pub fn run(&self, id: &str, prompt: &[u32], new: u32, salt: Option<&str>) -> Run {
        let whole = self.collect(self.submit(id, prompt, new, salt));
        self.result(id, &whole, prompt.len(), new)
    }

    /// Runs one request beside seven others of different lengths.
    pub fn run_in_company(&self, id: &str, prompt: &[u32], new: u32, salt: Option<&str>) -> Run {
        let other = |number: u64| {
            let tokens = 20 + 11 * number as usize;
            let ids: Vec<u32> = prompt::ids(200 + number, tokens).iter().map(|id| id % self.vocab).collect();
            self.submit(&format!("{id}-{number}"), &ids, 24, None)
        };
        let before: Vec<RequestStream> = (0..4).map(other).collect();
        let main = self.submit(id, prompt, new, salt);
        let after: Vec<RequestStream> = (4..7).map(other).collect();
        let whole = self.collect(main);
        for stream in before.into_iter().chain(after) {
            assert_eq!(self.collect(stream).token_ids.len(), 24, "the others are served as well");
        }
        self.result(id, &whole, prompt.len(), new)
    }

    /// Empties device and host, once storage has all that is to be stored.
    pub fn empty_all(&self) {
        let handle = self.engine.handle();
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        loop {
            let device = self.runtime.block_on(handle.flush(Tiers::DEVICE)).expect("the engine runs");
            // What waits to be stored would leave the host before it is written.
            let pending = handle.cache_counters().snapshot().backup_pending_pages;
            if pending == 0 && device.device_kept == 0 {
                let flushed = self.runtime.block_on(handle.flush(Tiers::ALL)).expect("the engine runs");
                if (flushed.device_kept, flushed.host_kept) == (0, 0) {
                    return;
                }
            }
            assert!(std::time::Instant::now() < deadline, "pages are still held: {device:?}, {pending} wait");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until nothing waits to be stored: until then it holds host pages, and what is in storage may find no room.
    pub fn wait_written(&self) {
        let handle = self.engine.handle();
        let counters = handle.cache_counters();
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        while counters.snapshot().backup_pending_pages > 0 {
            assert!(std::time::Instant::now() < deadline, "{} pages wait", counters.snapshot().backup_pending_pages);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Empties the device tier; the host keeps its pages, once all of them are there.
    pub fn empty_device(&self) {
        let handle = self.engine.handle();
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        loop {
            let flushed = self.runtime.block_on(handle.flush(Tiers::DEVICE)).expect("the engine runs");
            if flushed.device_kept == 0 {
                return;
            }
            assert!(std::time::Instant::now() < deadline, "device pages are still held: {flushed:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits until so many pages were stored since the start.
    pub fn wait_stored(&self, pages: u64) {
        let handle = self.engine.handle();
        let counters = handle.cache_counters();
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while counters.snapshot().backuped_tokens < pages * PAGE as u64 {
            assert!(std::time::Instant::now() < deadline, "{:?}", counters.snapshot());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Tree, pools and locks agree.
    pub fn check_integrity(&self) {
        self.runtime.block_on(self.engine.handle().check_integrity()).expect("the cache is whole");
    }

    /// Takes the backends out of use. Gives what is said of it.
    pub fn detach(&self) -> String {
        self.storage.detach(None, true).expect("they can be taken out")
    }

    /// Ends the engine and lets go of a plugin that can't be closed.
    pub fn leave(self) {
        self.engine.stop(Duration::from_secs(30));
        assert!(!self.storage.shut_down(), "the plugin's instance can't be closed");
    }

    /// Stops as the server does: backups are finished first.
    pub fn stop(self) {
        self.engine.stop(Duration::from_secs(30));
        assert!(self.storage.shut_down(), "the plugin's instance is closed");
    }
}

/// Keeps every row as bits, by request and position.
fn tap(recorded: Recorded) -> kvdock::engine::LogitsTap {
    Arc::new(move |row: &LogitsRow<'_>| {
        let bits = row.logits.iter().map(|logit| logit.to_bits()).collect();
        let mut recorded = recorded.lock().unwrap();
        recorded.entry(row.request_id.to_owned()).or_default().0.insert(row.position, bits);
    })
}

/// Passes backends to the cache.
struct Sink {
    storage: StorageHandle,
    linked: bool,
    wrap: Box<dyn Wrap>,
}

impl BackendSink for Sink {
    fn host_pools(&self) -> Vec<HostPoolDescription> {
        self.storage.host_pools()
    }
    fn cache_mode(&self) -> CacheMode {
        if self.linked { CacheMode::Linker } else { CacheMode::Hierarchical }
    }
    fn rank_pools(&self) -> Vec<Vec<HostPoolDescription>> {
        self.storage.rank_pools()
    }
    fn device_pools(&self) -> Option<DevicePools> {
        self.storage.device_pools()
    }
    fn attached(&self, backend: Arc<dyn StorageBackend>, place: Place) {
        let direct = self.storage.device_pools().filter(|_| backend.is_direct());
        let pools = direct.map_or_else(|| self.storage.host_pools(), |pools| pools.descriptions.to_vec());
        let backend = (self.wrap)(backend, pools);
        self.storage.attached(backend, place);
    }
    fn detached(&self, name: &str) -> bool {
        self.storage.detached(name)
    }
    fn emptied(&self, name: &str) {
        self.storage.emptied(name);
    }
    fn guards(&self, name: &str) -> Option<GuardReport> {
        self.storage.guards(name)
    }
    fn policies(&self) -> (String, String) {
        ("timeout".to_owned(), "write_through".to_owned())
    }
    fn check_policies(&self, _: &PolicyChange) -> Result<(), String> {
        Ok(())
    }
    fn set_policies(&self, _: &PolicyChange) {}
}
