//! Attach, replace and detach of the real file plugin, against a stand-in for the cache.

#![allow(clippy::unwrap_used)] // Also in the helpers, which the lint does not take for tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvdock::config::{BackendTable, StorageConfig};
use kvdock::plugin::admin::{AttachMode, AttachRequest, StorageAdmin};
use kvdock::plugin::backend::*;
use kvdock::plugin::library::loaded_count;
use kvdock::plugin::{BackendState, Namespace, PluginManager, WorkerIdentity};
use serde_json::{Map, Value, json};

const PAGE: usize = 4096;
const SEAL: usize = 64;
const PAGES: usize = 16;

/// What the cache would hold: a pool and the backends in use.
struct Sink {
    pool: HostPoolDescription,
    in_use: Mutex<Vec<Arc<dyn StorageBackend>>>,
    policies: Mutex<(String, String)>,
    emptied: Mutex<Vec<String>>,
    threshold: Mutex<Option<usize>>,
}

impl Sink {
    fn new() -> Arc<Sink> {
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
        let segment =
            |offset: usize, len: usize| HostPoolSegment { offset: offset as u64, stride: len as u64, len: len as u64 };
        Arc::new(Sink {
            pool: HostPoolDescription {
                name: "kv".into(),
                layout: "page_first".into(),
                dtype: kvdock_plugin_api::Dtype::F16,
                pages: PAGES as u32,
                page_tokens: 16,
                layers: 1,
                base: base as usize,
                bytes: bytes as u64,
                fd: raw,
                segments: vec![segment(0, PAGE), segment(PAGES * PAGE, SEAL)],
                components: vec![],
            },
            in_use: Mutex::default(),
            policies: Mutex::new(("timeout".into(), "write_through".into())),
            emptied: Mutex::default(),
            threshold: Mutex::default(),
        })
    }

    #[allow(clippy::mut_from_ref)] // The pool is memory outside of Rust's borrow rules; the tests keep to one thread a page.
    fn page(&self, page: usize) -> &mut [u8] {
        assert!(page < PAGES);
        // SAFETY: inside the mapping; the tests use a page from one thread at a time.
        unsafe { std::slice::from_raw_parts_mut((self.pool.base + page * PAGE) as *mut u8, PAGE) }
    }

    fn only(&self) -> Arc<dyn StorageBackend> {
        let in_use = self.in_use.lock().unwrap();
        assert_eq!(in_use.len(), 1);
        in_use[0].clone()
    }

    fn names(&self) -> Vec<String> {
        self.in_use.lock().unwrap().iter().map(|b| b.name().to_owned()).collect()
    }
}

impl BackendSink for Sink {
    fn host_pool(&self) -> Option<HostPoolDescription> {
        Some(self.pool.clone())
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
    fn guards(&self, _: &str) -> Option<GuardReport> {
        None
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
fn plugin_folder(tail: &[u8]) -> tempfile::TempDir {
    let exe = std::env::current_exe().unwrap();
    let built = exe.ancestors().nth(2).unwrap().join("libkvdock_plugin_file.so");
    assert!(built.is_file(), "{} is missing: run the tests with `cargo xtask test`", built.display());
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file.so"), [fs::read(built).unwrap().as_slice(), tail].concat()).unwrap();
    folder
}

fn table(name: &str, dir: &Path) -> BackendTable {
    let mut table = BackendTable::new(name);
    table.plugin = "file".into();
    table.own.insert("dir".into(), dir.to_str().unwrap().into());
    table
}

fn manager(
    sink: &Arc<Sink>,
    plugins: &Path,
    tables: Vec<BackendTable>,
    selected: &str,
    required: bool,
) -> PluginManager {
    let config = StorageConfig {
        backend: (!selected.is_empty()).then(|| selected.to_owned()),
        backends: vec![],
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
        tp: (0, 1),
        pp: (0, 1),
        cp: (0, 1),
        numerics_id: "test".into(),
    };
    let folders = vec![PathBuf::from(plugins)];
    PluginManager::new(config, folders, WorkerIdentity::new(namespace, "m", [1; 32]), sink.clone())
}

fn request(name: &str, config: Option<Value>) -> AttachRequest {
    let config: Option<Map<String, Value>> = config.map(|c| c.as_object().unwrap().clone());
    AttachRequest {
        backend: name.into(),
        config,
        prefetch_policy: None,
        write_policy: None,
        mode: AttachMode::ReplaceOnly,
    }
}

const KEYS: [PageKey; 2] = [[1; 32], [2; 32]];

fn options() -> CallOptions {
    CallOptions::within(Duration::from_secs(10))
}

fn set(sink: &Sink, pages: [u32; 2]) -> Vec<PageStatus> {
    let mut status = [PageStatus::Unset; 2];
    sink.only().batch_set(&options(), &KEYS, &pages, &ChainInfo::default(), &mut status).unwrap();
    status.to_vec()
}

fn get(sink: &Sink, pages: [u32; 2]) -> Vec<PageStatus> {
    let mut status = [PageStatus::Unset; 2];
    sink.only().batch_get(&options(), &KEYS, &pages, &ChainInfo::default(), &mut status).unwrap();
    status.to_vec()
}

#[test]
fn pages_go_through_an_attached_backend_and_are_there_after_it_comes_back() {
    let (plugins, store, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("file", store.path())], "file", true);
    manager.attach_configured().unwrap();
    sink.page(1).fill(0xaa);
    sink.page(2).fill(0xbb);
    assert_eq!(set(&sink, [1, 2]), [PageStatus::Ok; 2]);
    let hit = sink.only().batch_exists(&options(), &[KEYS[0], KEYS[1], [3; 32]], &ChainInfo::default()).unwrap();
    assert_eq!(hit.longest(), 2);

    assert_eq!(manager.detach(None, false).unwrap(), "file is detached.");
    assert!(sink.names().is_empty() && manager.status().backends.is_empty());
    assert_eq!(manager.detach(None, false).unwrap(), "no storage backend was attached.");

    manager.attach(request("file", None)).unwrap();
    assert_eq!(get(&sink, [5, 6]), [PageStatus::Ok; 2]);
    assert!(sink.page(5).iter().all(|b| *b == 0xaa) && sink.page(6).iter().all(|b| *b == 0xbb));
    let status = manager.status();
    assert_eq!(status.backends[0].state, BackendState::Active);
    assert_eq!((status.backends[0].in_flight, status.backends[0].quarantined_pages), (0, 0));
    assert!(manager.shut_down());
}

#[test]
fn the_same_name_with_another_config_or_another_build_replaces_in_one_step() {
    let (plugins, one, two, sink) =
        (plugin_folder(b"one"), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("file", one.path())], "file", true);
    manager.attach_configured().unwrap();
    let first = sink.only();
    sink.page(1).fill(1);
    assert_eq!(set(&sink, [1, 1]), [PageStatus::Ok; 2]);

    let said = manager.attach(request("file", Some(json!({"dir": two.path().to_str().unwrap()})))).unwrap();
    assert!(said.contains("It replaces file."), "{said}");
    assert_ne!(sink.only().generation(), first.generation());
    assert_eq!(get(&sink, [3, 4]), [PageStatus::Missing; 2], "the other folder is empty");
    let refused = first.batch_exists(&options(), &KEYS, &ChainInfo::default()).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Unavailable, "the old instance takes no more calls");

    let count = loaded_count();
    let old_digest = manager.status().backends[0].sha256.clone();
    let newer = plugin_folder(b"two");
    fs::rename(newer.path().join("file.so"), plugins.path().join("file.so")).unwrap();
    manager.attach(request("file", None)).unwrap();
    assert_ne!(manager.status().backends[0].sha256, old_digest, "a newer build over the same path comes in");
    assert_eq!(loaded_count(), count + 1);
    assert_eq!(get(&sink, [3, 4]), [PageStatus::Ok; 2], "the first folder again");
    assert!(manager.shut_down());
}

#[test]
fn a_failed_attach_changes_nothing() {
    let (plugins, store, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("file", store.path())], "file", true);
    manager.attach_configured().unwrap();
    let before = sink.only().generation();

    let unknown = manager.attach(request("fiel", None)).unwrap_err().to_string();
    assert!(unknown.contains("no plugin named \"fiel\"") && unknown.contains("there are: file"), "{unknown}");
    let wrong =
        manager.attach(request("file", Some(json!({"dir": store.path(), "colour": "red"})))).unwrap_err().to_string();
    assert!(wrong.contains("colour") && wrong.contains("its keys are"), "{wrong}");
    let mut bad_policy = request("file", None);
    bad_policy.prefetch_policy = Some("never".into());
    assert!(manager.attach(bad_policy).unwrap_err().to_string().contains("never"));
    let nowhere = manager.attach(request("file", Some(json!({"dir": "/proc/none/such"})))).unwrap_err().to_string();
    assert!(nowhere.contains("/proc/none/such"), "{nowhere}");
    let mut other = request("file", None);
    other.mode = AttachMode::Replace("mooncake".into());
    assert!(manager.attach(other).unwrap_err().to_string().contains("no backend named \"mooncake\" is attached"));

    assert_eq!(sink.only().generation(), before);
    assert_eq!(set(&sink, [1, 2]), [PageStatus::Ok; 2], "it still serves");
    assert!(manager.shut_down());
}

#[test]
fn i12740_a_required_backend_that_fails_stops_the_start_and_one_that_is_not_is_shown() {
    let (plugins, sink) = (plugin_folder(b""), Sink::new());
    let broken = || vec![table("file", Path::new("/proc/none/such"))];
    let required = manager(&sink, plugins.path(), broken(), "file", true);
    assert!(required.attach_configured().unwrap_err().to_string().contains("storage backend file"));

    let optional = manager(&sink, plugins.path(), broken(), "file", false);
    optional.attach_configured().unwrap();
    let status = optional.status();
    assert_eq!(status.backends[0].state, BackendState::Detached);
    assert!(status.backends[0].reason.contains("/proc/none/such"), "{}", status.backends[0].reason);
    assert!(sink.names().is_empty());

    // An operator mends it and attaches by hand.
    let store = tempfile::tempdir().unwrap();
    optional.attach(request("file", Some(json!({"dir": store.path()})))).unwrap();
    let status = optional.status();
    assert_eq!(status.backends.len(), 1);
    assert_eq!(status.backends[0].state, BackendState::Active);
    assert!(optional.shut_down());
}

#[test]
fn policies_change_with_an_attach() {
    let (plugins, store, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("file", store.path())], "", true);
    let mut attach = request("file", None);
    attach.write_policy = Some("write_back".into());
    manager.attach(attach).unwrap();
    let status = manager.status();
    assert_eq!((status.prefetch_policy.as_str(), status.write_policy.as_str()), ("timeout", "write_back"));
    let dir = store.path().to_str().unwrap();
    let config = json!({"dir": dir, "prefetch_threshold": 32, "write_policy": "write_through_selective"});
    manager.attach(request("file", Some(config))).unwrap();
    assert_eq!(manager.status().write_policy, "write_through_selective");
    assert_eq!(*sink.threshold.lock().unwrap(), Some(32));
    assert!(manager.shut_down());
}

#[test]
fn clearing_removes_the_pages_and_tells_the_cache() {
    let (plugins, store, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("file", store.path())], "file", true);
    assert_eq!(manager.clear(Duration::from_secs(5)).unwrap(), "no storage backend is attached.");
    manager.attach_configured().unwrap();
    assert_eq!(set(&sink, [1, 2]), [PageStatus::Ok; 2]);
    assert_eq!(manager.clear(Duration::from_secs(5)).unwrap(), "file is cleared.");
    assert_eq!(get(&sink, [3, 4]), [PageStatus::Missing; 2]);
    assert_eq!(*sink.emptied.lock().unwrap(), ["file"]);
    assert!(manager.shut_down());
}

#[test]
fn i29955_detaching_again_and_again_leaves_no_thread_and_no_file_open() {
    let (plugins, store, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("leaky", store.path())], "", true);
    // Other tests of this process open files and start threads too; ours are told by their names.
    let threads = || {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let name = |t: std::io::Result<fs::DirEntry>| fs::read_to_string(t.ok()?.path().join("comm")).ok();
        tasks.filter_map(name).filter(|comm| comm.starts_with("kv-leaky")).count()
    };
    let files = || {
        let open = fs::read_dir("/proc/self/fd").unwrap();
        let target = |f: std::io::Result<fs::DirEntry>| fs::read_link(f.ok()?.path()).ok();
        open.filter_map(target).filter(|path| path.starts_with(store.path())).count()
    };
    for _ in 0..10 {
        manager.attach(request("leaky", None)).unwrap();
        set(&sink, [1, 2]);
        assert!(threads() > 0);
        manager.detach(Some("leaky"), true).unwrap();
    }
    // A thread that was told to end may take a moment.
    let end = Instant::now() + Duration::from_secs(5);
    while threads() > 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!((threads(), files()), (0, 0));
    assert!(manager.shut_down());
}
