//! The device memory behind the pages of a cache.

mod copies;

use std::sync::Arc;

use kvdock_kernels::{DeviceRanges, KernelError, KvDtype, KvPool, KvSpec, PagePool};
use kvdock_models::{HitPolicy, PageSource, PoolDecl, PoolKind, PoolMemory, PoolSet};

use crate::cache::layout::PlaneShape;
use crate::cache::types::CacheError;
use crate::plugin::backend::{PlaneKind, PoolHit};

pub(crate) use copies::{Moments, Transfers};

/// What the pools of one component hold on the device: a page (or a state) is a page of each of them, under one number, also where they are the
/// pools of several ranks.
#[derive(Clone)]
pub struct DeviceMemory {
    pools: Vec<DevicePool>,
    pages: usize,
    page_tokens: usize,
    dtype: KvDtype,
    layers: usize,
}

/// One named pool of one rank.
#[derive(Clone)]
struct DevicePool {
    name: &'static str,
    /// Number of the rank, 0 where there is one.
    rank: usize,
    hit: PoolHit,
    /// The model's layer behind each buffer; none where they have the same numbers.
    layers: Option<Vec<u32>>,
    buffers: Buffers,
}

#[derive(Clone)]
enum Buffers {
    /// Page numbers alone.
    Logical,
    /// Heads of keys and values.
    Heads(Arc<dyn KvPool>),
    /// Pages of bytes.
    Bytes(Arc<PagePool>),
}

/// The device memory of a cache, component by component.
#[derive(Clone)]
pub struct CacheMemory {
    /// Pages of all tokens.
    pub full: DeviceMemory,
    /// Pages of sliding windows, where the model has such.
    pub window: Option<WindowMemory>,
    /// Recurrent states, where the model has such.
    pub state: Option<StateMemory>,
}

/// Pages of sliding windows: they have a table of their own, and leave when no later token sees them.
#[derive(Clone)]
pub struct WindowMemory {
    /// The memory.
    pub memory: DeviceMemory,
    /// Tokens before a boundary that later ones see: the most of all its pools.
    pub tokens: usize,
    /// Pages on the host.
    pub host_pages: u32,
}

/// Slots for recurrent states.
#[derive(Clone)]
pub struct StateMemory {
    /// The memory; a page is a slot.
    pub memory: DeviceMemory,
    /// Slots at its beginning that are not the cache's: those of requests that run.
    pub running: usize,
    /// Slots on the host.
    pub host_slots: u32,
}

/// A plane of the host pool: the pages of one part of one pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlaneSpec {
    /// Its shape, for one page.
    pub shape: PlaneShape,
    /// What it holds.
    pub kind: PlaneKind,
    /// The model's layer behind each of its layers; none where they have the same numbers.
    pub layers: Option<Vec<u32>>,
}

/// One named pool of a host pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedPlanes {
    /// Its name in storage.
    pub name: &'static str,
    /// The rank whose pool it is.
    pub rank: usize,
    /// What a prefix needs of it.
    pub hit: PoolHit,
    /// What a page consists of, in order; nothing for a logical pool.
    pub planes: Vec<PlaneSpec>,
}

/// What a host pool is made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostShape {
    /// The pools whose pages lie under one number, in order.
    pub pools: Vec<NamedPlanes>,
    /// Tokens of a page; 0 for a state, which stands for all before it.
    pub page_tokens: usize,
    /// Layers of the model.
    pub layers: usize,
    /// Element type of keys and values.
    pub dtype: KvDtype,
}

impl HostShape {
    /// Bytes of a page, or as much as can be counted.
    pub fn page_bytes(&self) -> u64 {
        let planes = self.pools.iter().flat_map(|pool| &pool.planes);
        planes.fold(0, |bytes: u64, plane| bytes.saturating_add(plane.shape.bytes().unwrap_or(u64::MAX)))
    }

    /// The shape of pages of keys and values.
    #[cfg(test)]
    pub fn of_heads(spec: &KvSpec) -> Self {
        HostShape {
            pools: vec![NamedPlanes {
                name: "kv",
                rank: 0,
                hit: PoolHit::AllPages,
                planes: planes_of_heads(spec, None).into(),
            }],
            page_tokens: spec.page_tokens,
            layers: spec.layers,
            dtype: spec.dtype,
        }
    }
}

fn planes_of_heads(spec: &KvSpec, layers: Option<&[u32]>) -> [PlaneSpec; 2] {
    [(PlaneKind::K, spec.head_dim_k), (PlaneKind::V, spec.head_dim_v)].map(|(kind, head_dim)| {
        let shape = PlaneShape {
            layers: spec.layers as u64,
            heads: spec.kv_heads as u64,
            head_bytes: (head_dim as u64).saturating_mul(spec.dtype.bytes() as u64),
            page_tokens: spec.page_tokens as u64,
            pages: 1,
        };
        PlaneSpec { shape, kind, layers: layers.map(<[u32]>::to_vec) }
    })
}

fn small(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

impl From<Arc<dyn KvPool>> for DeviceMemory {
    /// One pool of keys and values.
    fn from(pool: Arc<dyn KvPool>) -> Self {
        let spec = *pool.spec();
        let buffers = Buffers::Heads(pool);
        DeviceMemory {
            pools: vec![DevicePool { name: "kv", rank: 0, hit: PoolHit::AllPages, layers: None, buffers }],
            pages: spec.pages,
            page_tokens: spec.page_tokens,
            dtype: spec.dtype,
            layers: spec.layers,
        }
    }
}

impl From<Arc<dyn KvPool>> for CacheMemory {
    /// One pool of keys and values.
    fn from(pool: Arc<dyn KvPool>) -> Self {
        CacheMemory { full: pool.into(), window: None, state: None }
    }
}

/// How much of a model's pools is whose, where that does not follow from the pools themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheRoom {
    /// Slots at the beginning that belong to requests that run.
    pub running: usize,
    /// Pages of windows on the host.
    pub host_windows: u32,
    /// States on the host.
    pub host_states: u32,
}

impl CacheMemory {
    /// The memory of a model of `layers` layers. What slots hold for running requests alone is not the cache's.
    ///
    /// # Errors
    /// No pool that owns the page numbers of all tokens.
    pub fn of_pools(pools: &PoolSet, layers: usize, room: CacheRoom) -> Result<Self, CacheError> {
        let sizes = pools.sizes();
        let of = |source, belongs: fn(&PoolDecl) -> bool| {
            DeviceMemory::of_pools(pools, layers, |decl| decl.source == source && belongs(decl))
        };
        let full = of(PageSource::Anchor, |_| true).ok_or_else(|| CacheError::Config {
            key: "cache.device_tokens",
            problem: "the model keeps nothing page by page".to_owned(),
        })?;
        let window = of(PageSource::Window, |_| true).map(|memory| {
            let decls = pools.decls().iter().filter(|decl| decl.source == PageSource::Window);
            let tokens = decls.map(|decl| match decl.hit {
                HitPolicy::Trailing { tokens } => tokens,
                HitPolicy::AllPages => usize::MAX,
                HitPolicy::ExactState | HitPolicy::Nothing => 0,
            });
            WindowMemory { memory, tokens: tokens.max().unwrap_or(0).max(1), host_pages: room.host_windows }
        });
        let state = of(PageSource::Slot, |decl| decl.kind == PoolKind::Recurrent).map(|memory| StateMemory {
            memory,
            running: room.running.min(sizes.slots),
            host_slots: room.host_states,
        });
        Ok(CacheMemory { full, window, state })
    }
}

impl DeviceMemory {
    /// The pools of a model that `belong`, one rank's after the other's. None where there are none.
    fn of_pools(pools: &PoolSet, layers: usize, belongs: impl Fn(&PoolDecl) -> bool) -> Option<Self> {
        let sizes = pools.sizes();
        let mut named = Vec::new();
        let mut pages = 0;
        let ranks = (0..pools.rank_count()).filter_map(|rank| Some((rank, pools.rank(rank).ok()?)));
        let decls = pools.decls().iter().enumerate().filter(|(_, decl)| belongs(decl));
        for ((rank, of_rank), (index, decl)) in ranks.flat_map(|rank| decls.clone().map(move |decl| (rank, decl))) {
            let buffers = match of_rank.memory(index)? {
                PoolMemory::None => Buffers::Logical,
                // Numbers without a buffer are what a pool of no layers is, too.
                _ if decl.layers.is_empty() => Buffers::Logical,
                PoolMemory::Heads(pool) => Buffers::Heads(Arc::clone(pool)),
                PoolMemory::Pages(pool) => Buffers::Bytes(Arc::clone(pool)),
            };
            let hit = match decl.hit {
                HitPolicy::Trailing { tokens } => {
                    PoolHit::TrailingPages(small(tokens.div_ceil(sizes.page_tokens.max(1)).max(1)))
                }
                HitPolicy::ExactState => PoolHit::TrailingPages(1),
                HitPolicy::AllPages | HitPolicy::Nothing => PoolHit::AllPages,
            };
            pages = sizes.pages(decl.source);
            let layers = Some(decl.layers.iter().map(|&layer| small(layer)).collect());
            named.push(DevicePool { name: decl.name, rank, hit, layers, buffers });
        }
        let (page_tokens, dtype) = (sizes.page_tokens, sizes.dtype);
        (!named.is_empty()).then_some(DeviceMemory { pools: named, pages, page_tokens, dtype, layers })
    }

    /// Pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Tokens of a page.
    pub fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// Names of its pools, in order.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.pools.iter().map(|pool| pool.name)
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        let bytes = |pool: &DevicePool| match &pool.buffers {
            Buffers::Logical => 0,
            Buffers::Heads(pool) => pool.spec().page_bytes(),
            Buffers::Bytes(pool) => pool.spec().layers * pool.spec().page_bytes,
        };
        self.pools.iter().map(bytes).sum()
    }

    /// What a host pool of such pages is made for. `is_state` says that a page stands for all tokens before it.
    pub(crate) fn host_shape(&self, is_state: bool) -> HostShape {
        let named = |pool: &DevicePool| {
            let planes = match &pool.buffers {
                Buffers::Logical => Vec::new(),
                Buffers::Heads(heads) => planes_of_heads(heads.spec(), pool.layers.as_deref()).into(),
                Buffers::Bytes(bytes) => {
                    let spec = bytes.spec();
                    let (layers, head_bytes) = (spec.layers as u64, spec.page_bytes as u64);
                    let shape = PlaneShape { layers, heads: 1, head_bytes, page_tokens: 1, pages: 1 };
                    let kind = if is_state { PlaneKind::State } else { PlaneKind::Other };
                    vec![PlaneSpec { shape, kind, layers: pool.layers.clone() }]
                }
            };
            NamedPlanes { name: pool.name, rank: pool.rank, hit: pool.hit, planes }
        };
        let page_tokens = if is_state { 0 } else { self.page_tokens };
        HostShape { pools: self.pools.iter().map(named).collect(), page_tokens, layers: self.layers, dtype: self.dtype }
    }

    /// Where its pages lie on a device, pool by pool, nothing of a logical one. None unless all of them are keys and values in such memory.
    pub(crate) fn on_device(&self) -> Option<Vec<Option<OnDevice>>> {
        let of = |pool: &DevicePool| match &pool.buffers {
            Buffers::Logical => Some(None),
            Buffers::Heads(heads) => {
                let ranges = heads.device_memory()?;
                Some(Some(OnDevice { ranges, spec: *heads.spec(), layers: pool.layers.clone() }))
            }
            Buffers::Bytes(_) => None,
        };
        self.pools.iter().map(of).collect()
    }

    /// Makes host memory that pages are copied to and from known to the device; false where it has no use for that.
    ///
    /// # Errors
    /// The device's own.
    ///
    /// # Safety
    ///
    /// The range stays mapped as long as the memory lives.
    pub(crate) unsafe fn pin_host(&self, at: *mut u8, bytes: usize) -> Result<bool, KernelError> {
        let heads = self.pools.iter().find_map(|pool| match &pool.buffers {
            Buffers::Heads(heads) => Some(heads),
            Buffers::Logical | Buffers::Bytes(_) => None,
        });
        // SAFETY: the caller's promise.
        heads.map_or(Ok(false), |heads| unsafe { heads.pin_host(at, bytes) })
    }
}

impl DevicePool {
    /// Where a layer of the model lies among `count` buffers.
    fn buffer_of(&self, layer: usize, count: usize) -> Option<usize> {
        match &self.layers {
            Some(layers) => layers.iter().position(|&of| of as usize == layer).filter(|&at| at < count),
            None => Some(layer).filter(|&at| at < count),
        }
    }
}

/// Where the pages of a named pool lie on a device.
pub(crate) struct OnDevice {
    /// The memory.
    pub ranges: DeviceRanges,
    /// What lies there.
    pub spec: KvSpec,
    layers: Option<Vec<u32>>,
}

impl OnDevice {
    /// The model's layer behind a buffer.
    pub fn layer(&self, buffer: u32) -> u32 {
        self.layers.as_ref().and_then(|layers| layers.get(buffer as usize).copied()).unwrap_or(buffer)
    }
}

fn outside(page: u32) -> KernelError {
    KernelError::Page { op: "host pool", reason: format!("page {page} is outside the pool") }
}
