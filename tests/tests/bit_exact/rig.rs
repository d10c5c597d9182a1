//! An engine in this process, with the real model and the file plugin, that shows its logits.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use kvdock::cache::{CacheConfig, CacheManager, HostLayout, NoEvents, StorageHandle, Tiers};
use kvdock::config::{BackendTable, Sources};
use kvdock::engine::{
    Completion, Engine, EngineConfig, EngineParts, LogitsRow, Mailbox, Request, RequestStream, SamplingParams, Usage,
};
use kvdock::plugin::backend::{BackendSink, GuardReport, HostPoolDescription, Place, PolicyChange, StorageBackend};
use kvdock::plugin::{Namespace, PAGE_FORMAT, PluginManager, WorkerIdentity};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{Device, KvDtype};
use kvdock_models::{LoadOptions, LoadedModel, load};
use kvdock_tests::{paths, prompt};

const PAGE: usize = 16;
const DEVICE_PAGES: usize = 512;
const HOST_PAGES: u32 = 512;

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

type Recorded = Arc<Mutex<BTreeMap<String, Rows>>>;

/// A running engine.
pub struct Rig {
    engine: Engine,
    storage: PluginManager,
    runtime: tokio::runtime::Runtime,
    recorded: Recorded,
}

fn model() -> &'static (LoadedModel, Arc<dyn Device>) {
    static MODEL: OnceLock<(LoadedModel, Arc<dyn Device>)> = OnceLock::new();
    MODEL.get_or_init(|| {
        let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
        let device: Arc<dyn Device> = Arc::new(CpuDevice::new(threads).expect("a CPU device"));
        let model = load(&paths::model(), &LoadOptions::new(device.clone())).expect("the small model loads");
        (model, device)
    })
}

impl Rig {
    /// An engine that prefills `chunk` tokens in a step, over the pages in `folder`.
    pub fn start(chunk: usize, folder: &Path) -> Self {
        let (model, device) = model();
        let spec = model.spec();
        let kv = spec.one_pool().expect("a model of one pool");
        let pool = device.alloc_kv_pool(kv.pool(KvDtype::F16, PAGE, DEVICE_PAGES)).expect("a KV pool");
        let small = |number: usize| u32::try_from(number).expect("a small number");
        let namespace = Namespace {
            format: PAGE_FORMAT,
            architecture: spec.architecture.clone(),
            weights_sha256: spec.weights_digest_hex(),
            kv_dtype: "f16".to_owned(),
            host_layout: "page_first".to_owned(),
            page_tokens: small(PAGE),
            layers: small(kv.layers),
            kv_heads: small(kv.kv_heads),
            head_dim_k: small(kv.head_dim_k),
            head_dim_v: small(kv.head_dim_v),
            tp: (0, 1),
            pp: (0, 1),
            cp: (0, 1),
            numerics_id: spec.numerics_id.clone(),
        };
        let identity = WorkerIdentity::new(namespace, "small", spec.weights_digest);
        let cache_config = CacheConfig {
            host_pages: HOST_PAGES,
            host_layout: HostLayout::PageFirst,
            identity: identity.namespace.digest(),
            // Nothing here is about being late.
            prefetch_timeout_base: Duration::from_secs(60),
            ..CacheConfig::default()
        };
        let mailbox = Mailbox::new();
        let cache =
            CacheManager::new(cache_config, pool.clone(), Arc::new(NoEvents), mailbox.waker()).expect("a cache");
        let sink = Sink { storage: cache.storage() };
        let recorded = Recorded::default();
        let engine_config = EngineConfig {
            prefill_chunk: chunk,
            max_running_requests: 16,
            max_queued_requests: 16,
            logits_tap: Some(tap(recorded.clone())),
        };
        let parts =
            EngineParts { model: model.model.clone(), tokenizer: model.tokenizer.clone(), pool, cache, mailbox };
        let engine = Engine::start(engine_config, parts).expect("the engine starts");

        let mut config = kvdock::config::load(&Sources::default()).expect("the defaults are right").config.storage;
        let mut table = BackendTable::new("file");
        table.own.insert("dir".to_owned(), folder.to_str().expect("a UTF-8 path").into());
        table.own.insert("min_free_bytes".to_owned(), 0.into());
        config.backend = Some("file".to_owned());
        config.tables.insert("file".to_owned(), table);
        let plugins = paths::file_plugin().parent().expect("the plugin lies in a folder").to_path_buf();
        let storage = PluginManager::new(config, vec![plugins], identity, Arc::new(sink));
        storage.attach_configured().expect("the file plugin is attached");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        Self { engine, storage, runtime, recorded }
    }

    fn submit(&self, id: &str, prompt: &[u32], new: u32, salt: Option<&str>) -> RequestStream {
        let sampling =
            SamplingParams { max_new_tokens: Some(new), temperature: 0.0, ignore_eos: true, ..Default::default() };
        let mut request = Request::new(id, prompt.to_vec(), sampling);
        request.cache_salt = salt.map(str::to_owned);
        self.engine.handle().submit(request).expect("the request is taken")
    }

    fn collect(&self, stream: RequestStream) -> Completion {
        let samples = self.runtime.block_on(stream.collect());
        samples.into_iter().next().expect("one sample")
    }

    fn result(&self, id: &str, whole: &Completion, prompt: usize, new: u32) -> Run {
        let rows = self.recorded.lock().unwrap().remove(id).expect("its logits were seen");
        let positions: Vec<usize> = rows.0.keys().copied().collect();
        let expected: Vec<usize> = (prompt - 1..prompt - 1 + new as usize).collect();
        assert_eq!(positions, expected, "a row for each new token; {:?}", whole.reason);
        Run { rows, usage: whole.usage }
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
            self.submit(&format!("{id}-{number}"), &prompt::ids(200 + number, tokens), 24, None)
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

    /// Tree, pools and locks agree.
    pub fn check_integrity(&self) {
        self.runtime.block_on(self.engine.handle().check_integrity()).expect("the cache is whole");
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
}

impl BackendSink for Sink {
    fn host_pool(&self) -> Option<HostPoolDescription> {
        self.storage.host_pool()
    }
    fn attached(&self, backend: Arc<dyn StorageBackend>, place: Place) {
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
