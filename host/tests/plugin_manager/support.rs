//! A stand-in for the cache, and managers of the real file plugin.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvdock::config::{BackendTable, StorageConfig};
use kvdock::plugin::admin::{AttachMode, AttachRequest};
use kvdock::plugin::backend::*;
use kvdock::plugin::{Namespace, PluginManager, WorkerIdentity};
use serde_json::{Map, Value};

const PAGE: usize = 4096;
const SEAL: usize = 64;
const PAGES: usize = 16;

/// What the cache would hold: a pool and the backends in use.
pub struct Sink {
    pub pool: HostPoolDescription,
    /// The pools of the ranks after the first.
    pub further: Mutex<Vec<HostPoolDescription>>,
    pub in_use: Mutex<Vec<Arc<dyn StorageBackend>>>,
    pub policies: Mutex<(String, String)>,
    pub emptied: Mutex<Vec<String>>,
    pub threshold: Mutex<Option<usize>>,
    /// What the guards say of every backend.
    pub guards: Mutex<GuardReport>,
}

impl Sink {
    pub fn new() -> Arc<Sink> {
        let bytes = PAGES * (PAGE + SEAL);
        let fd = rustix::fs::memfd_create("pool", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
        // SAFETY: a fresh mapping of a file of this size; it is never unmapped.
        let base = unsafe {
            let (read_write, shared) =
                (rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE, rustix::mm::MapFlags::SHARED);
            rustix::mm::mmap(std::ptr::null_mut(), bytes, read_write, shared, &fd, 0).unwrap()
        };
        let raw = std::os::fd::IntoRawFd::into_raw_fd(fd);
        let segment = |offset: usize, len: usize| HostPoolSegment {
            region: 0,
            offset: offset as u64,
            stride: len as u64,
            len: len as u64,
        };
        Arc::new(Sink {
            pool: HostPoolDescription {
                name: "kv".into(),
                group: PoolGroup::Full,
                hit: PoolHit::AllPages,
                logical: false,
                layout: "page_first".into(),
                dtype: kvdock_plugin_api::Dtype::F16,
                pages: PAGES as u32,
                page_tokens: 16,
                layers: 1,
                base: base as usize,
                bytes: bytes as u64,
                pinned: false,
                fd: raw,
                device: Vec::new(),
                segments: vec![segment(0, PAGE), segment(PAGES * PAGE, SEAL)],
                components: vec![],
            },
            further: Mutex::default(),
            in_use: Mutex::default(),
            policies: Mutex::new(("timeout".into(), "write_through".into())),
            emptied: Mutex::default(),
            threshold: Mutex::default(),
            guards: Mutex::default(),
        })
    }

    #[allow(clippy::mut_from_ref)] // The pool is memory outside of Rust's borrow rules; the tests keep to one thread a page.
    pub fn page(&self, page: usize) -> &mut [u8] {
        assert!(page < PAGES);
        // SAFETY: inside the mapping; the tests use a page from one thread at a time.
        unsafe { std::slice::from_raw_parts_mut((self.pool.base + page * PAGE) as *mut u8, PAGE) }
    }

    pub fn only(&self) -> Arc<dyn StorageBackend> {
        let in_use = self.in_use.lock().unwrap();
        assert_eq!(in_use.len(), 1);
        in_use[0].clone()
    }

    pub fn names(&self) -> Vec<String> {
        self.in_use.lock().unwrap().iter().map(|b| b.name().to_owned()).collect()
    }
}

impl BackendSink for Sink {
    fn host_pools(&self) -> Vec<HostPoolDescription> {
        vec![self.pool.clone()]
    }
    fn rank_pools(&self) -> Vec<Vec<HostPoolDescription>> {
        let further = self.further.lock().unwrap();
        std::iter::once(&self.pool).chain(further.iter()).map(|pool| vec![pool.clone()]).collect()
    }
    fn attached(&self, backend: Arc<dyn StorageBackend>, place: Place) {
        let mut in_use = self.in_use.lock().unwrap();
        match place {
            Place::Of(name) => match in_use.iter().position(|b| b.name() == name) {
                Some(index) => in_use[index] = backend,
                None => in_use.push(backend),
            },
            Place::At(index) => {
                let index = index.min(in_use.len());
                in_use.insert(index, backend);
            }
        }
    }
    fn detached(&self, name: &str) -> bool {
        let mut in_use = self.in_use.lock().unwrap();
        let before = in_use.len();
        in_use.retain(|b| b.name() != name);
        in_use.len() < before
    }
    fn emptied(&self, name: &str) {
        self.emptied.lock().unwrap().push(name.to_owned());
    }
    fn guards(&self, name: &str) -> Option<GuardReport> {
        self.names().iter().any(|known| known == name).then(|| self.guards.lock().unwrap().clone())
    }
    fn policies(&self) -> (String, String) {
        self.policies.lock().unwrap().clone()
    }
    fn check_policies(&self, change: &PolicyChange) -> Result<(), String> {
        if change.prefetch.as_deref() == Some("never") { Err("\"never\" is no prefetch policy".into()) } else { Ok(()) }
    }
    fn set_policies(&self, change: &PolicyChange) {
        let mut policies = self.policies.lock().unwrap();
        let (prefetch, write) = policies.clone();
        *policies = (change.prefetch.clone().unwrap_or(prefetch), change.write.clone().unwrap_or(write));
        *self.threshold.lock().unwrap() = change.prefetch_threshold;
    }
}

/// A folder with a copy of the file plugin; `tail` makes it another build.
pub fn plugin_folder(tail: &[u8]) -> tempfile::TempDir {
    let exe = std::env::current_exe().unwrap();
    let built = exe.ancestors().nth(2).unwrap().join("libkvdock_plugin_file.so");
    assert!(built.is_file(), "{} is missing: run the tests with `cargo xtask test`", built.display());
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file.so"), [fs::read(built).unwrap().as_slice(), tail].concat()).unwrap();
    folder
}

pub fn table(name: &str, dir: &Path) -> BackendTable {
    let mut table = BackendTable::new(name);
    table.plugin = "file".into();
    table.own.insert("dir".into(), dir.to_str().unwrap().into());
    // How full the disk of the machine is must not matter.
    table.own.insert("min_free_bytes".into(), 0.into());
    table
}

/// `selected` names the backends of the configuration, with commas.
pub fn manager(
    sink: &Arc<Sink>,
    plugins: &Path,
    tables: Vec<BackendTable>,
    selected: &str,
    required: bool,
) -> PluginManager {
    let selected: Vec<&str> = selected.split(',').filter(|name| !name.is_empty()).collect();
    let config = StorageConfig {
        backend: None,
        backends: selected.into_iter().map(str::to_owned).collect(),
        required,
        plugin_path: vec![],
        break_even: "off".into(),
        tables: tables.into_iter().map(|t| (t.name.clone(), t)).collect::<BTreeMap<_, _>>(),
    };
    let namespace = Namespace {
        format: 1,
        architecture: "llama".into(),
        weights_sha256: String::new(),
        kv_dtype: "f16".into(),
        host_layout: "page_first".into(),
        page_tokens: 16,
        layers: 1,
        kv_heads: 1,
        head_dim_k: 64,
        head_dim_v: 64,
        tp: (0, sink.rank_pools().len() as u32),
        pp: (0, 1),
        cp: (0, 1),
        numerics_id: "test".into(),
    };
    let folders = vec![PathBuf::from(plugins)];
    PluginManager::new(config, folders, WorkerIdentity::of_ranks(namespace, "m", [1; 32], false), sink.clone())
}

pub fn request(name: &str, config: Option<Value>) -> AttachRequest {
    let config: Option<Map<String, Value>> = config.map(|c| c.as_object().unwrap().clone());
    AttachRequest {
        backend: name.into(),
        config,
        prefetch_policy: None,
        write_policy: None,
        mode: AttachMode::ReplaceOnly,
    }
}

pub const KEYS: [PageKey; 2] = [[1; 32], [2; 32]];

pub fn options() -> CallOptions {
    CallOptions::within(Duration::from_secs(10))
}

pub fn set(sink: &Sink, pages: [u32; 2]) -> Vec<PageStatus> {
    let mut status = [PageStatus::Unset; 2];
    sink.only().batch_set(&options(), PoolGroup::Full, &KEYS, &pages, &ChainInfo::default(), &mut status).unwrap();
    status.to_vec()
}

pub fn get(sink: &Sink, pages: [u32; 2]) -> Vec<PageStatus> {
    let mut status = [PageStatus::Unset; 2];
    sink.only().batch_get(&options(), PoolGroup::Full, &KEYS, &pages, &ChainInfo::default(), &mut status).unwrap();
    status.to_vec()
}

/// A request as `request` makes it, in another mode.
pub fn request_in(mode: AttachMode, name: &str, config: Option<Value>) -> AttachRequest {
    AttachRequest { mode, ..request(name, config) }
}

/// The memory mappings of the library with this SHA-256: its private copy is named after it.
pub fn mappings(sha256: &str) -> Vec<String> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains(&sha256[..16])).map(str::to_owned).collect()
}
