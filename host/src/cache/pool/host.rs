//! The host pool of a component: one memfd, mapped once and for ever, holding for each of its named pools the planes (K and V, or what else
//! pages consist of) and the seals. A page is a page of each of them, under one number.
//!
//! A page's bytes may be touched by whoever holds the page in [`SharedPages`]: the copy worker fills
//! a fresh page that only its operation and the not-yet-valid tree node hold; afterwards the page
//! is only read until its last holder lets go. Backends fill fresh pages that only the prefetch holds.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use kvdock_kernels::{HostPage, KvDtype};
use kvdock_plugin_api::Dtype;
use parking_lot::Mutex;
use rustix::mm::Advice;
use sha2::{Digest, Sha256};

use super::mapping::Mapping;
use super::memory::{DeviceMemory, HostShape, NamedPlanes};
use super::noted::Noted;
use super::pages::{Holders, SharedPages};
use crate::cache::checksum::{FORESIGHT, LANES, append, prefetch};
use crate::cache::layout::{HostLayout, PlaneShape, PlaneStrides};
use crate::cache::seal::{SealFault, SealFormat};
use crate::cache::types::CacheError;
use crate::plugin::backend::{HostPoolComponent, HostPoolDescription, HostPoolSegment, PageKey, PoolGroup};

/// Name of the pool whose page numbers identify a page.
const ANCHOR_NAME: &str = "kv";

/// Alignment of the planes, and of every piece of a page where the page's size allows it.
pub(super) const BLOCK: u64 = 4096;

/// Host pages, their memory and their seals.
pub(crate) struct HostPool {
    memory: Mapping,
    planes: Vec<Plane>,
    /// What backends have to know of each named pool, in order.
    descriptions: Vec<HostPoolDescription>,
    /// The rank that each of them belongs to.
    ranks: Vec<usize>,
    /// The seals of those that have bytes.
    seals: Vec<Seals>,
    /// Whether a page's seal stands for what the page holds. Reset when the page is taken anew.
    sealed: Vec<AtomicBool>,
    /// Checksums of pages that are not sealed yet, where a device has taken them.
    noted: Noted,
    /// The tokens of a head lie together.
    by_heads: bool,
    /// Held while a page is sealed, each for its share of the pages: several backends may be about to store one page.
    sealing: [Mutex<()>; 16],
    pages: Mutex<SharedPages>,
    /// Gives the first pages their memory.
    prefault: Option<JoinHandle<()>>,
}

/// Where the seals of a named pool lie, and what they look like.
#[derive(Debug)]
struct Seals {
    /// Which description it belongs to.
    pool: usize,
    area: HostPoolSegment,
    format: SealFormat,
}

#[derive(Debug, Clone, Copy)]
struct Plane {
    offset: u64,
    shape: PlaneShape,
    strides: PlaneStrides,
}

impl std::fmt::Debug for HostPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostPool").field("descriptions", &self.descriptions).finish_non_exhaustive()
    }
}

pub(super) fn round_up(bytes: u64, to: u64) -> Option<u64> {
    Some(bytes.checked_add(to - 1)? / to * to)
}

fn dtype_of(dtype: KvDtype) -> Dtype {
    match dtype {
        KvDtype::F16 => Dtype::F16,
        KvDtype::BF16 => Dtype::Bf16,
        KvDtype::F32 => Dtype::F32,
    }
}

/// The mapping's plan: planes and pools, total bytes.
#[derive(Default)]
struct Plan {
    planes: Vec<Plane>,
    pools: Vec<PooledPlan>,
    bytes: u64,
}

/// The plan of one named pool; nothing of all that for a logical one.
#[derive(Default)]
struct PooledPlan {
    segments: Vec<HostPoolSegment>,
    components: Vec<HostPoolComponent>,
    seals: Option<(HostPoolSegment, SealFormat)>,
}

impl Plan {
    /// `identities` are those of the ranks.
    fn new(host: &HostShape, pages: u32, layout: HostLayout, identities: &[[u8; 32]]) -> Option<Self> {
        let mut plan = Plan::default();
        for pool in &host.pools {
            let identity = *identities.get(pool.rank).or(identities.first())?;
            let pool = plan.add(pool, pages, layout, identity)?;
            plan.pools.push(pool);
        }
        Some(plan)
    }

    fn add(&mut self, pool: &NamedPlanes, pages: u32, layout: HostLayout, identity: [u8; 32]) -> Option<PooledPlan> {
        let mut planned = PooledPlan::default();
        if pool.planes.is_empty() {
            return Some(planned);
        }
        let mut at = self.bytes;
        for plane in &pool.planes {
            let shape = PlaneShape { pages: pages.into(), ..plane.shape };
            let bytes = shape.bytes()?;
            for component in shape.components(layout, plane.kind, planned.segments.len() as u32) {
                let layer = match &plane.layers {
                    Some(layers) => *layers.get(component.layer as usize)?,
                    None => component.layer,
                };
                planned.components.push(HostPoolComponent { layer, ..component });
            }
            let segments = shape.segments(layout).into_iter();
            planned.segments.extend(segments.map(|part| HostPoolSegment {
                region: 0,
                offset: part.offset + at,
                ..part
            }));
            self.planes.push(Plane { offset: at, shape, strides: shape.strides(layout) });
            at = round_up(at.checked_add(bytes)?, BLOCK)?;
        }
        let format = SealFormat::new(seal_identity(identity, pool.name), planned.components.len());
        // Seals are whole blocks where everything else of a page is, so that direct I/O stays possible.
        let aligned = planned.segments.iter().all(|s| s.len % BLOCK == 0 && s.stride % BLOCK == 0);
        let len = round_up(format.len() as u64, if aligned { BLOCK } else { 64 })?;
        let area = HostPoolSegment { region: 0, offset: at, stride: len, len };
        planned.segments.push(area);
        planned.seals = Some((area, format));
        self.bytes = round_up(at.checked_add(len.checked_mul(pages.into())?)?, BLOCK)?;
        Some(planned)
    }

    fn segments(&self) -> impl Iterator<Item = &HostPoolSegment> {
        self.pools.iter().flat_map(|pool| &pool.segments)
    }
}

/// What binds a seal to its pool: a page of another pool under the same key is another page.
pub(super) fn seal_identity(identity: [u8; 32], pool: &str) -> [u8; 32] {
    if pool == ANCHOR_NAME {
        return identity;
    }
    Sha256::new().chain_update(identity).chain_update(pool.as_bytes()).finalize().into()
}

/// Bytes of the pool that get memory right after the start.
const PREFAULT_BYTES: u64 = 128 << 20;

/// Gives the first pages their memory in the background: the first prefix that comes from storage after a start would otherwise pay
/// for it, page fault by page fault. Without a thread the pages get their memory when they are used.
fn prefault(base: usize, plan: &Plan) -> Option<JoinHandle<()>> {
    let page_bytes: u64 = plan.segments().map(|s| s.len).sum();
    let pages = PREFAULT_BYTES / page_bytes.max(1);
    let ranges: Vec<(u64, u64)> = plan
        .segments()
        .map(|s| {
            let start = s.offset / BLOCK * BLOCK;
            let end = (s.offset + s.stride.saturating_mul(pages).max(s.len)).min(plan.bytes).next_multiple_of(BLOCK);
            (start, end.min(plan.bytes) - start)
        })
        .collect();
    let work = move || {
        for (start, len) in ranges {
            let place = std::ptr::without_provenance_mut::<std::ffi::c_void>(base + start as usize);
            // SAFETY: the range lies in the mapping, which is never unmapped. Populating changes no content, so others may use the pages
            // meanwhile. Only advice: a kernel that does not know it leaves the pages to their first use.
            let _ = unsafe { rustix::mm::madvise(place, len as usize, Advice::LinuxPopulateWrite) };
        }
    };
    std::thread::Builder::new().name("kvdock-prefault".to_owned()).spawn(work).ok()
}

impl HostPool {
    /// A pool of `pages` pages of this shape, not yet backed by memory. Backends know its pools as parts of `group`. Pages of each rank are sealed
    /// with the rank's own of `identities`, or with the first where there is none.
    pub fn new(
        shape: &HostShape,
        group: PoolGroup,
        pages: u32,
        layout: HostLayout,
        identities: &[[u8; 32]],
    ) -> Result<Self, CacheError> {
        let too_large = |message: &str| CacheError::HostMemory {
            bytes: shape.page_bytes().saturating_mul(pages.into()),
            message: message.to_owned(),
        };
        let plan = Plan::new(shape, pages, layout, identities)
            .map(|plan| Plan { bytes: plan.bytes.max(BLOCK), ..plan })
            .filter(|plan| plan.bytes <= isize::MAX as u64)
            .ok_or_else(|| too_large("the size is beyond what this machine can address"))?;
        let memory = Mapping::new(plan.bytes)?;
        let base = memory.base() as usize;
        let prefault = prefault(base, &plan);
        let mut descriptions = Vec::with_capacity(plan.pools.len());
        let (mut seals, mut ranks) = (Vec::new(), Vec::new());
        for (pool, (named, planned)) in shape.pools.iter().zip(plan.pools).enumerate() {
            descriptions.push(HostPoolDescription {
                name: named.name.to_owned(),
                group,
                hit: named.hit,
                logical: planned.seals.is_none(),
                layout: layout.as_str().to_owned(),
                dtype: dtype_of(shape.dtype),
                pages,
                page_tokens: shape.page_tokens as u32,
                layers: if planned.seals.is_some() { shape.layers as u32 } else { 0 },
                base,
                bytes: plan.bytes,
                pinned: false,
                fd: memory.fd(),
                device: Vec::new(),
                segments: planned.segments,
                components: planned.components,
            });
            ranks.push(named.rank);
            seals.extend(planned.seals.map(|(area, format)| Seals { pool, area, format }));
        }
        Ok(HostPool {
            by_heads: layout == HostLayout::PageHead,
            noted: Noted::default(),
            memory,
            planes: plan.planes,
            descriptions,
            ranks,
            seals,
            sealed: (0..pages).map(|_| AtomicBool::new(false)).collect(),
            sealing: Default::default(),
            pages: Mutex::new(SharedPages::new(pages)),
            prefault,
        })
    }

    /// Lets a device that has a use for it read and write the pool by itself. Where that can't be, pages go by way of the device's own pinned
    /// memory.
    pub fn pin_for(&mut self, device: &DeviceMemory) {
        // SAFETY: the mapping just made is never unmapped.
        match unsafe { device.pin_host(self.memory.base(), self.memory.bytes() as usize) } {
            Ok(pinned) => self.descriptions.iter_mut().for_each(|description| description.pinned = pinned),
            Err(error) => tracing::warn!(%error, "host pages are not pinned, and copied in two steps"),
        }
    }

    /// What a backend has to know to register the pools of a rank, in order.
    pub fn descriptions(&self, rank: usize) -> impl Iterator<Item = &HostPoolDescription> {
        let of_rank = move |&(_, owner): &(&HostPoolDescription, &usize)| *owner == rank;
        self.descriptions.iter().zip(&self.ranks).filter(of_rank).map(|(description, _)| description)
    }

    /// Ranks that have pools.
    pub fn ranks(&self) -> usize {
        self.ranks.iter().max().map_or(0, |last| last + 1)
    }

    /// Payload bytes of a page in all pools, with the seals.
    pub fn page_bytes(&self) -> u64 {
        self.descriptions.iter().flat_map(|pool| &pool.segments).map(|s| s.len).sum()
    }

    /// Pages in the pool.
    pub fn capacity(&self) -> usize {
        self.sealed.len()
    }

    /// Free pages.
    pub fn free_count(&self) -> usize {
        self.pages.lock().free_count()
    }

    /// Takes `count` pages. None if there are fewer free.
    pub fn alloc(&self, count: usize) -> Option<Vec<u32>> {
        let taken = self.pages.lock().alloc(count)?;
        for &page in &taken {
            self.set_sealed(page, false);
        }
        Some(taken)
    }

    /// Adds a holder to each page. Pages that are free are a fault of the caller, and logged.
    pub fn retain(&self, pages: &[u32]) {
        let mut shared = self.pages.lock();
        for &page in pages {
            if let Err(fault) = shared.retain(page) {
                tracing::error!(%fault, "host page held by nobody");
            }
        }
    }

    /// Takes a holder from each page; says how many became free.
    pub fn release(&self, pages: &[u32]) -> usize {
        let mut shared = self.pages.lock();
        let mut freed = 0;
        for &page in pages {
            match shared.release(page) {
                Ok(free) => freed += usize::from(free),
                Err(fault) => tracing::error!(%fault, "host page given back in error"),
            }
        }
        freed
    }

    /// Looks at the pages' holders, for checks.
    pub fn with_pages<R>(&self, look: impl FnOnce(&SharedPages) -> R) -> R {
        look(&self.pages.lock())
    }

    /// Pointers and strides of a page in a plane of keys and the plane of values after it. None outside the pool.
    pub fn heads(&self, plane: usize, page: u32) -> Option<HostPage> {
        if page as usize >= self.capacity() {
            return None;
        }
        let (k, v) = (self.planes.get(plane)?, self.planes.get(plane + 1)?);
        let start = |plane: &Plane| {
            let offset = plane.offset + u64::from(page) * plane.strides.page;
            self.memory.base().wrapping_add(offset as usize)
        };
        Some(HostPage {
            k: start(k),
            v: start(v),
            k_layer_stride: k.strides.layer as usize,
            k_head_stride: k.strides.head as usize,
            k_token_stride: k.strides.token as usize,
            v_layer_stride: v.strides.layer as usize,
            v_head_stride: v.strides.head as usize,
            v_token_stride: v.strides.token as usize,
        })
    }

    /// Start and length of a layer of a page in a plane whose layers are one piece each. None outside the pool.
    pub fn bytes(&self, plane: usize, layer: usize, page: u32) -> Option<(*mut u8, usize)> {
        let plane = self.planes.get(plane).filter(|_| (page as usize) < self.capacity())?;
        let PlaneShape { layers, heads, page_tokens, head_bytes, .. } = plane.shape;
        if layer as u64 >= layers || heads != 1 || page_tokens != 1 {
            return None;
        }
        let offset = plane.offset + u64::from(page) * plane.strides.page + layer as u64 * plane.strides.layer;
        Some((self.memory.base().wrapping_add(offset as usize), head_bytes as usize))
    }

    /// Writes the seal of a page under `key`, if it does not stand yet.
    ///
    /// # Safety
    ///
    /// The caller holds `page`, and its content is complete.
    pub unsafe fn seal(&self, page: u32, key: &PageKey) {
        if page as usize >= self.capacity() || self.is_sealed(page) {
            return;
        }
        let _sealing = self.sealing[page as usize % self.sealing.len()].lock();
        if self.is_sealed(page) {
            return;
        }
        for seals in &self.seals {
            // SAFETY: the seal of a page is written by its holders alone, of which the caller is one and the lock lets one do so; those who
            // have found it sealed read it afterwards. It lies in the mapping.
            let seal =
                unsafe { std::slice::from_raw_parts_mut(self.seal_pointer(seals, page), seals.area.len as usize) };
            match self.noted.take(seals.pool, page) {
                Some(sums) => seals.format.write(seal, key, sums.iter().copied()),
                // SAFETY: the caller holds the page and its content is complete.
                None => seals.format.write(seal, key, unsafe { self.checksums(seals.pool, page) }),
            }
        }
        self.set_sealed(page, true);
    }

    /// Whether a page has the tokens of a head together.
    pub fn is_by_heads(&self) -> bool {
        self.by_heads
    }

    /// Tells the checksums of what a page holds of a named pool, by its place among them, in order of its components: a device has taken them
    /// of the pages that were copied here. They count until the page holds something else.
    pub fn note_checksums(&self, pool: usize, page: u32, sums: &[u32]) {
        let known = self.descriptions.get(pool).is_some_and(|of| of.components.len() == sums.len());
        if known && (page as usize) < self.capacity() && !self.is_sealed(page) {
            self.noted.put(pool, page, sums);
        }
    }

    /// Checks a page that a backend filled against `key`.
    ///
    /// # Safety
    ///
    /// The caller holds `page` alone, and no backend call on it is running.
    pub unsafe fn verify(&self, page: u32, key: &PageKey) -> Result<(), SealFault> {
        if page as usize >= self.capacity() {
            return Err(SealFault::Damaged);
        }
        for seals in &self.seals {
            // SAFETY: the seal lies in the mapping, and by the caller's promise nobody writes it.
            let seal = unsafe { std::slice::from_raw_parts(self.seal_pointer(seals, page), seals.area.len as usize) };
            // SAFETY: the caller holds the page alone.
            seals.format.verify(seal, key, unsafe { self.checksums(seals.pool, page) })?;
        }
        self.set_sealed(page, true);
        Ok(())
    }

    /// Wipes what the page's seals were.
    ///
    /// # Safety
    ///
    /// The caller holds `page` alone, and no backend call on it is running.
    pub unsafe fn wipe_seal(&self, page: u32) {
        if (page as usize) < self.capacity() {
            for seals in &self.seals {
                // SAFETY: the seal lies in the mapping, and by the caller's promise nobody else touches it.
                unsafe { self.seal_pointer(seals, page).write_bytes(0, seals.area.len as usize) };
            }
        }
    }

    /// The page is about to hold something else: its seals stand for nothing any more. For who holds it alone.
    pub fn unseal(&self, page: u32) {
        self.set_sealed(page, false);
    }

    /// Layers of the model.
    pub fn layers(&self) -> usize {
        self.descriptions.iter().map(|pool| pool.layers as usize).max().unwrap_or(0)
    }

    /// The model's layer of each component of a page, pool after pool.
    pub fn component_layers(&self) -> impl Iterator<Item = usize> {
        self.descriptions.iter().flat_map(|pool| &pool.components).map(|component| component.layer as usize)
    }

    /// CRC-32C of one component of a page, by its place in `component_layers`; 0 outside the pool.
    ///
    /// # Safety
    ///
    /// The caller holds `page`, and nobody writes that component of it.
    pub unsafe fn checksum(&self, page: u32, component: usize) -> u32 {
        let mut components = self.descriptions.iter().flat_map(|pool| pool.components.iter().map(move |of| (pool, of)));
        match components.nth(component) {
            // SAFETY: the caller's promise.
            Some((pool, component)) if (page as usize) < self.capacity() => unsafe { self.sum(pool, page, component) },
            _ => 0,
        }
    }

    /// As `verify`, of a page whose checksums were taken already, in the order of `component_layers`.
    ///
    /// # Safety
    ///
    /// The caller holds `page`, and nobody writes its seals.
    pub unsafe fn verify_sums(&self, page: u32, key: &PageKey, sums: &[u32]) -> Result<(), SealFault> {
        if page as usize >= self.capacity() {
            return Err(SealFault::Damaged);
        }
        let mut sums = sums.iter().copied();
        for seals in &self.seals {
            let own: Vec<u32> = sums.by_ref().take(self.descriptions[seals.pool].components.len()).collect();
            // SAFETY: the seal lies in the mapping, and by the caller's promise nobody writes it.
            let seal = unsafe { std::slice::from_raw_parts(self.seal_pointer(seals, page), seals.area.len as usize) };
            seals.format.verify(seal, key, own.into_iter())?;
        }
        Ok(())
    }

    fn seal_pointer(&self, seals: &Seals, page: u32) -> *mut u8 {
        let offset = seals.area.offset + u64::from(page) * seals.area.stride;
        self.memory.base().wrapping_add(offset as usize)
    }

    /// CRC-32C of each component of a named pool, computed when the first one is asked for.
    ///
    /// # Safety
    ///
    /// `page` is in the pool, and nobody writes it while the iterator lives.
    unsafe fn checksums(&self, pool: usize, page: u32) -> impl Iterator<Item = u32> {
        // SAFETY: the caller's promise.
        std::iter::once_with(move || unsafe { self.sums(&self.descriptions[pool], page) }).flatten()
    }

    /// CRC-32C of each component of a page, run by run for all of them, so that memory is gone through as it lies, and several side by side.
    ///
    /// # Safety
    ///
    /// `page` is in the pool, and nobody writes it meanwhile.
    unsafe fn sums(&self, pool: &HostPoolDescription, page: u32) -> Vec<u32> {
        let mut sums = vec![0; pool.components.len()];
        let runs = pool.components.iter().map(|component| component.run_count).max().unwrap_or(0);
        for run in 0..runs {
            for (sums, components) in sums.chunks_mut(LANES).zip(pool.components.chunks(LANES)) {
                let whole = components.iter().all(|component| run < component.run_count);
                if let (Ok(sums), Ok(components), true) =
                    (<&mut [u32; LANES]>::try_from(&mut *sums), <&[_; LANES]>::try_from(components), whole)
                {
                    // SAFETY: the caller's promise.
                    let runs = components.each_ref().map(|component| unsafe { self.run(pool, page, component, run) });
                    runs.iter().for_each(|run| prefetch(run.as_ptr(), FORESIGHT, run.len()));
                    append(sums, runs);
                    continue;
                }
                for (sum, component) in sums.iter_mut().zip(components) {
                    if run < component.run_count {
                        // SAFETY: the caller's promise.
                        *sum = crc32c::crc32c_append(*sum, unsafe { self.run(pool, page, component, run) });
                    }
                }
            }
        }
        sums
    }

    /// # Safety
    ///
    /// `page` is in the pool, and nobody writes the component of it meanwhile.
    unsafe fn sum(&self, pool: &HostPoolDescription, page: u32, component: &HostPoolComponent) -> u32 {
        // SAFETY: the caller's promise.
        let run = |run| unsafe { self.run(pool, page, component, run) };
        (0..component.run_count).fold(0, |checksum, number| crc32c::crc32c_append(checksum, run(number)))
    }

    /// Bytes of one run of a component.
    ///
    /// # Safety
    ///
    /// `page` is in the pool, and nobody writes the component of it while the bytes are borrowed.
    unsafe fn run(&self, pool: &HostPoolDescription, page: u32, component: &HostPoolComponent, run: u64) -> &[u8] {
        let segment = pool.segments[component.segment as usize];
        let at = segment.offset + u64::from(page) * segment.stride + component.offset + run * component.run_stride;
        // SAFETY: the plan keeps every run inside its segment and every segment inside the mapping, and by the caller's promise nobody
        // writes it.
        unsafe { std::slice::from_raw_parts(self.memory.base().wrapping_add(at as usize), component.run_len as usize) }
    }

    fn is_sealed(&self, page: u32) -> bool {
        self.sealed.get(page as usize).is_some_and(|sealed| sealed.load(Ordering::Acquire))
    }

    fn set_sealed(&self, page: u32, to: bool) {
        if !to {
            self.noted.forget(page);
        }
        if let Some(sealed) = self.sealed.get(page as usize) {
            sealed.store(to, Ordering::Release);
        }
    }
}

impl Holders for HostPool {
    fn let_go(&self, pages: &[u32]) {
        self.release(pages);
    }
}

impl Drop for HostPool {
    fn drop(&mut self) {
        // Otherwise it could give memory to what is given back below.
        if let Some(thread) = self.prefault.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use kvdock_kernels::KvSpec;

    use super::*;

    fn first(pool: &HostPool) -> &HostPoolDescription {
        pool.descriptions(0).next().unwrap()
    }

    const SPEC: KvSpec =
        KvSpec { layers: 3, kv_heads: 2, head_dim_k: 8, head_dim_v: 4, page_tokens: 4, pages: 1, dtype: KvDtype::F16 };

    const LAYOUTS: [HostLayout; 4] =
        [HostLayout::LayerFirst, HostLayout::PageFirst, HostLayout::PageFirstDirect, HostLayout::PageHead];

    /// Writes a byte pattern into a page through the description's segments, as a backend would.
    fn fill(pool: &HostPool, page: u32, salt: u8) {
        let description = first(pool);
        let payload = description.segments.len() - 1;
        for (index, segment) in description.segments[..payload].iter().enumerate() {
            let start = segment.offset + u64::from(page) * segment.stride;
            for byte in 0..segment.len {
                let at = (description.base as u64 + start + byte) as *mut u8;
                // SAFETY: the segment lies in the mapping and the test is the only user.
                unsafe { *at = (byte as u8).wrapping_mul(31) ^ salt ^ index as u8 };
            }
        }
    }

    #[test]
    fn every_payload_byte_is_under_the_seal_in_every_layout() {
        for layout in LAYOUTS {
            let pool = HostPool::new(&HostShape::of_heads(&SPEC), PoolGroup::Full, 3, layout, &[[9; 32]]).unwrap();
            let pages = pool.alloc(3).unwrap();
            for &page in &pages {
                fill(&pool, page, page as u8);
                // SAFETY: the test holds the page.
                unsafe { pool.seal(page, &[page as u8; 32]) };
            }
            let description = first(&pool).clone();
            for &page in &pages {
                let key = [page as u8; 32];
                // SAFETY: the test holds the page.
                assert_eq!(unsafe { pool.verify(page, &key) }, Ok(()), "{layout:?}");
                for segment in &description.segments[..description.segments.len() - 1] {
                    for byte in 0..segment.len {
                        let offset = segment.offset + u64::from(page) * segment.stride + byte;
                        let at = (description.base as u64 + offset) as *mut u8;
                        // SAFETY: inside the mapping; the test is the only user.
                        unsafe { *at ^= 1 };
                        // SAFETY: the test holds the page.
                        let verdict = unsafe { pool.verify(page, &key) };
                        assert!(
                            matches!(verdict, Err(SealFault::Payload { .. })),
                            "{layout:?}: byte {byte} is not covered"
                        );
                        // SAFETY: as above.
                        unsafe { *at ^= 1 };
                    }
                }
            }
        }
    }

    #[test]
    fn segments_of_pages_do_not_overlap() {
        for layout in LAYOUTS {
            let pool = HostPool::new(&HostShape::of_heads(&SPEC), PoolGroup::Full, 4, layout, &[[0; 32]]).unwrap();
            let mut taken = vec![false; first(&pool).bytes as usize];
            for page in 0..4 {
                for segment in &first(&pool).segments {
                    let start = (segment.offset + page * segment.stride) as usize;
                    for seen in &mut taken[start..start + segment.len as usize] {
                        assert!(!*seen, "{layout:?}");
                        *seen = true;
                    }
                }
            }
        }
    }

    #[test]
    fn a_page_taken_anew_has_no_seal() {
        let pool =
            HostPool::new(&HostShape::of_heads(&SPEC), PoolGroup::Full, 1, HostLayout::PageFirst, &[[0; 32]]).unwrap();
        let page = pool.alloc(1).unwrap()[0];
        fill(&pool, page, 1);
        // SAFETY: the test holds the page.
        unsafe { pool.seal(page, &[1; 32]) };
        assert_eq!(pool.release(&[page]), 1);
        assert_eq!(pool.alloc(1), Some(vec![page]));
        fill(&pool, page, 2);
        // SAFETY: the test holds the page.
        unsafe { pool.seal(page, &[2; 32]) };
        // SAFETY: as above.
        assert_eq!(unsafe { pool.verify(page, &[2; 32]) }, Ok(()));
    }

    #[test]
    fn checksums_that_a_device_took_are_in_the_seal() {
        let pool =
            HostPool::new(&HostShape::of_heads(&SPEC), PoolGroup::Full, 1, HostLayout::PageFirst, &[[0; 32]]).unwrap();
        let page = pool.alloc(1).unwrap()[0];
        fill(&pool, page, 1);
        // SAFETY: the test holds the page.
        let sums: Vec<u32> = unsafe { pool.checksums(0, page) }.collect();
        pool.note_checksums(0, page, &sums);
        // SAFETY: as above.
        unsafe { pool.seal(page, &[1; 32]) };
        // SAFETY: as above.
        assert_eq!(unsafe { pool.verify(page, &[1; 32]) }, Ok(()));
        // Of other bytes than those that came: whoever reads the page finds out.
        pool.unseal(page);
        pool.note_checksums(0, page, &sums.iter().map(|sum| sum ^ 1).collect::<Vec<u32>>());
        // SAFETY: as above.
        unsafe { pool.seal(page, &[1; 32]) };
        // SAFETY: as above.
        assert_eq!(unsafe { pool.verify(page, &[1; 32]) }, Err(SealFault::Payload { component: 0 }));
        // Too few, and of what the page held before: the bytes count.
        pool.unseal(page);
        pool.note_checksums(0, page, &sums[1..]);
        pool.note_checksums(0, page, &[0; 6]);
        pool.unseal(page);
        // SAFETY: as above.
        unsafe { pool.seal(page, &[1; 32]) };
        // SAFETY: as above.
        assert_eq!(unsafe { pool.verify(page, &[1; 32]) }, Ok(()));
    }

    #[test]
    fn seals_are_whole_blocks_where_pages_are() {
        let spec = KvSpec { head_dim_k: 64, head_dim_v: 64, layers: 2, kv_heads: 2, ..SPEC };
        let spec = KvSpec { page_tokens: 16, ..spec };
        let pool =
            HostPool::new(&HostShape::of_heads(&spec), PoolGroup::Full, 2, HostLayout::PageFirst, &[[0; 32]]).unwrap();
        assert!(first(&pool).segments.iter().all(|s| s.len % 4096 == 0));
        let small =
            HostPool::new(&HostShape::of_heads(&SPEC), PoolGroup::Full, 2, HostLayout::PageFirst, &[[0; 32]]).unwrap();
        assert!(first(&small).segments.last().unwrap().len < 4096);
    }

    #[test]
    fn a_pool_beyond_the_address_space_is_an_error_not_a_crash() {
        let spec = KvSpec { layers: usize::MAX / 1024, ..SPEC };
        let error =
            HostPool::new(&HostShape::of_heads(&spec), PoolGroup::Full, u32::MAX, HostLayout::PageFirst, &[[0; 32]])
                .unwrap_err();
        assert!(error.to_string().contains("cache.host_tokens"), "{error}");
    }

    #[test]
    fn pages_of_every_rank_are_under_seals_of_their_own() {
        let of_rank = |rank| NamedPlanes { rank, ..HostShape::of_heads(&SPEC).pools[0].clone() };
        let shape = HostShape { pools: vec![of_rank(0), of_rank(1)], ..HostShape::of_heads(&SPEC) };
        let new = |identities: [[u8; 32]; 2]| {
            HostPool::new(&shape, PoolGroup::Full, 2, HostLayout::PageFirst, &identities).unwrap()
        };
        let pool = new([[1; 32], [2; 32]]);
        assert_eq!(pool.ranks(), 2);
        let page = pool.alloc(1).unwrap()[0];
        // SAFETY: the test holds the page.
        unsafe { pool.seal(page, &[7; 32]) };
        let seal = |pool: &HostPool, rank: usize| -> Vec<u8> {
            let description = pool.descriptions(rank).next().unwrap();
            let seal = description.segments.last().unwrap();
            let at = description.base as u64 + seal.offset + u64::from(page) * seal.stride;
            // SAFETY: the segment lies in the mapping and the test is the only user.
            unsafe { std::slice::from_raw_parts(at as *const u8, seal.len as usize) }.to_vec()
        };
        assert_ne!(seal(&pool, 0), seal(&pool, 1), "one rank's page is not the other's");
        // SAFETY: the test holds the page.
        assert!(unsafe { pool.verify(page, &[7; 32]) }.is_ok());
        // The second rank's bytes are damaged.
        let second = pool.descriptions(1).next().unwrap();
        let at =
            (second.base as u64 + second.segments[0].offset + u64::from(page) * second.segments[0].stride) as *mut u8;
        // SAFETY: as above.
        unsafe { *at ^= 1 };
        // SAFETY: the test holds the page.
        assert!(unsafe { pool.verify(page, &[7; 32]) }.is_err());
        let same = new([[1; 32], [1; 32]]);
        let page = same.alloc(1).unwrap()[0];
        // SAFETY: the test holds the page.
        unsafe { same.seal(page, &[7; 32]) };
        assert_eq!(seal(&same, 0), seal(&same, 1), "ranks of equal bytes have equal objects");
    }
}
