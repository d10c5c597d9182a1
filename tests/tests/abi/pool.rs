//! A pool of real pages and a manager of plugins over it, in the place of the cache.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvdock::config::{BackendTable, Sources};
use kvdock::plugin::backend::*;
use kvdock::plugin::{AbiVersions, Namespace, PAGE_FORMAT, PluginManager, WorkerIdentity};
use kvdock_plugin_api::Dtype;

const PAGES: usize = 128;
/// Two pieces a page, as K and V have them.
const PIECES: [usize; 2] = [3072, 1024];
/// Bytes of a page.
pub const PAGE_BYTES: usize = PIECES[0] + PIECES[1];

/// A host with one attached plugin.
pub struct Host {
    sink: Arc<Sink>,
    manager: PluginManager,
}

struct Sink {
    description: HostPoolDescription,
    backend: Mutex<Option<Arc<dyn StorageBackend>>>,
}

fn pool() -> HostPoolDescription {
    let bytes = PAGES * PAGE_BYTES;
    // Lives as long as the process, as a host pool does.
    let base = Box::leak(vec![0u64; bytes / 8].into_boxed_slice()).as_mut_ptr() as usize;
    let mut offset = 0;
    let segments = PIECES.map(|len| {
        let segment = HostPoolSegment { region: 0, offset, stride: len as u64, len: len as u64 };
        offset += (PAGES * len) as u64;
        segment
    });
    HostPoolDescription {
        name: "kv".to_owned(),
        group: PoolGroup::Full,
        hit: PoolHit::AllPages,
        logical: false,
        layout: "page_first".to_owned(),
        dtype: Dtype::F16,
        pages: PAGES as u32,
        page_tokens: 16,
        layers: 1,
        base,
        bytes: bytes as u64,
        pinned: false,
        fd: -1,
        device: Vec::new(),
        segments: segments.to_vec(),
        components: vec![],
    }
}

fn identity() -> WorkerIdentity {
    let namespace = Namespace {
        format: PAGE_FORMAT,
        architecture: "test".to_owned(),
        weights_sha256: "0".repeat(64),
        kv_dtype: "f16".to_owned(),
        host_layout: "page_first".to_owned(),
        page_tokens: 16,
        layers: 1,
        kv_heads: 1,
        head_dim_k: 96,
        head_dim_v: 32,
        tp: (0, 1),
        pp: (0, 1),
        cp: (0, 1),
        numerics_id: "test".to_owned(),
    };
    WorkerIdentity::new(namespace, "test", [0; 32])
}

impl Host {
    /// A host that speaks these versions attaches the plugin `name` from `folder`.
    ///
    /// # Errors
    /// What the manager says.
    pub fn attach(abi: AbiVersions, folder: &Path, name: &str) -> Result<Host, String> {
        let sink = Arc::new(Sink { description: pool(), backend: Mutex::default() });
        let mut config = kvdock::config::load(&Sources::default()).unwrap().config.storage;
        config.backend = Some(name.to_owned());
        config.required = true;
        config.tables.insert(name.to_owned(), BackendTable::new(name));
        let manager = PluginManager::with_abi(abi, config, vec![folder.to_owned()], identity(), sink.clone());
        manager.attach_configured().map_err(|error| error.to_string())?;
        Ok(Host { sink, manager })
    }

    pub fn backend(&self) -> Arc<dyn StorageBackend> {
        self.sink.backend.lock().unwrap().clone().expect("a backend is attached")
    }

    /// The bytes of one piece of a page.
    fn piece(&self, page: u32, piece: usize) -> *mut u8 {
        let (pool, segment) = (&self.sink.description, self.sink.description.segments[piece]);
        assert!(page < pool.pages);
        (pool.base + (segment.offset + segment.stride * u64::from(page)) as usize) as *mut u8
    }

    /// Writes what is told apart by `seed` into a page.
    pub fn fill(&self, page: u32, seed: u8) {
        for (piece, len) in PIECES.iter().enumerate() {
            for at in 0..*len {
                let byte = seed.wrapping_mul(31).wrapping_add((at * (piece + 3)) as u8);
                // SAFETY: inside of the piece; no call is under way.
                unsafe { self.piece(page, piece).add(at).write(byte) };
            }
        }
    }

    /// All bytes of a page.
    pub fn bytes(&self, page: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (piece, len) in PIECES.iter().enumerate() {
            // SAFETY: inside of the piece; no call is under way.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(self.piece(page, piece), *len) });
        }
        bytes
    }

    /// Stores pages, finds them and reads them back equal to the byte; removes one and misses it; clears.
    pub fn serves(&self) {
        let (backend, options) = (self.backend(), CallOptions::within(Duration::from_secs(20)));
        let chain = ChainInfo::default();
        let keys: Vec<PageKey> = (1..=5).map(|number| [number; 32]).collect();
        (0..4).for_each(|page| self.fill(page, page as u8 + 1));
        let stored: Vec<Vec<u8>> = (0..4).map(|page| self.bytes(page)).collect();
        let mut status = vec![PageStatus::Unset; 4];
        backend.batch_set(&options, PoolGroup::Full, &keys[..4], &[0, 1, 2, 3], &chain, &mut status).unwrap();
        assert_eq!(status, [PageStatus::Ok; 4]);
        assert_eq!(backend.batch_exists(&options, &keys, &Held::default(), &chain).unwrap().longest(), 4);
        assert_eq!(backend.stats().unwrap().pages, 4);

        (0..16).for_each(|page| self.fill(page, 200));
        let mut status = vec![PageStatus::Unset; 5];
        backend.batch_get(&options, PoolGroup::Full, &keys, &[9, 8, 7, 6, 5], &chain, &mut status).unwrap();
        assert_eq!(status[..4], [PageStatus::Ok; 4]);
        assert_eq!(status[4], PageStatus::Missing);
        for (page, expected) in [9, 8, 7, 6].into_iter().zip(&stored) {
            assert!(self.bytes(page) == *expected, "page {page} came back changed");
        }

        let mut status = vec![PageStatus::Unset; 1];
        backend.batch_remove(&options, PoolGroup::Full, &keys[1..2], &mut status).unwrap();
        assert_eq!(backend.batch_exists(&options, &keys, &Held::default(), &chain).unwrap().longest(), 1);
        backend.flush(&options).unwrap();
    }

    pub fn end(self) {
        assert!(self.manager.shut_down(), "the instance is closed");
    }
}

impl BackendSink for Sink {
    fn host_pools(&self) -> Vec<HostPoolDescription> {
        vec![self.description.clone()]
    }
    fn attached(&self, backend: Arc<dyn StorageBackend>, _: Place) {
        *self.backend.lock().unwrap() = Some(backend);
    }
    fn detached(&self, _: &str) -> bool {
        self.backend.lock().unwrap().take().is_some()
    }
    fn emptied(&self, _: &str) {}
    fn guards(&self, _: &str) -> Option<GuardReport> {
        None
    }
    fn policies(&self) -> (String, String) {
        ("timeout".to_owned(), "write_through".to_owned())
    }
    fn check_policies(&self, _: &PolicyChange) -> Result<(), String> {
        Ok(())
    }
    fn set_policies(&self, _: &PolicyChange) {}
}
