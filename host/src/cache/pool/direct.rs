//! The pages of a device as backends see them that take its memory: described where they lie, each with a seal beside it in host memory.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use super::host::{BLOCK, HostPool, round_up, seal_identity};
use super::mapping::Mapping;
use super::memory::{DeviceMemory, OnDevice};
use super::pages::Holders;
use crate::cache::seal::{SealFault, SealFormat};
use crate::cache::types::CacheError;
use crate::plugin::backend::{
    DeviceRegion, HostPoolComponent, HostPoolDescription, HostPoolSegment, PageKey, PlaneKind,
};

/// The order of the bytes: layers outermost, then pages, heads, tokens. Stored pages are the pieces of all layers one after another, keys before values.
const LAYOUT: &str = "layer_page_head";

/// Pages that somebody else still reads or writes, however they change hands: they are given to nobody new.
#[derive(Debug, Default)]
pub(crate) struct HeldSlots {
    /// Holders of each page that has some.
    holders: Mutex<HashMap<u32, u32>>,
    /// Pages with holders, so that nobody waits for the lock where there are none.
    count: AtomicUsize,
}

impl HeldSlots {
    /// Adds a holder to each page.
    pub fn hold(&self, pages: &[u32]) {
        let mut holders = self.holders.lock();
        pages.iter().for_each(|&page| *holders.entry(page).or_default() += 1);
        self.count.store(holders.len(), Ordering::Release);
    }

    /// Takes a holder from each page. Pages that nobody holds are a fault of the caller, and logged.
    pub fn release(&self, pages: &[u32]) {
        let mut holders = self.holders.lock();
        for &page in pages {
            match holders.get_mut(&page) {
                Some(1) => drop(holders.remove(&page)),
                Some(count) => *count -= 1,
                None => tracing::error!(page, "a device page is let go that nobody holds"),
            }
        }
        self.count.store(holders.len(), Ordering::Release);
    }

    /// Pages that have holders.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Whether somebody holds it.
    pub fn is_held(&self, page: u32) -> bool {
        self.count.load(Ordering::Acquire) > 0 && self.holders.lock().contains_key(&page)
    }
}

impl Holders for HeldSlots {
    fn let_go(&self, pages: &[u32]) {
        self.release(pages);
    }
}

/// The pages of a device, for backends.
pub(crate) struct DirectPool {
    seals: Mapping,
    /// What backends have to know of each named pool, in order.
    descriptions: Vec<HostPoolDescription>,
    formats: Vec<Format>,
    pages: u32,
    held: Arc<HeldSlots>,
    /// Held while a page is sealed, each for its share of the pages.
    sealing: [Mutex<()>; 16],
}

/// Where the seals of a named pool lie, and what they look like.
struct Format {
    area: HostPoolSegment,
    /// Checksums of a page.
    components: usize,
    format: SealFormat,
}

impl std::fmt::Debug for DirectPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirectPool").field("descriptions", &self.descriptions).finish_non_exhaustive()
    }
}

/// Pieces and components of a page in the memory of a device.
fn plan(on_device: &OnDevice) -> (Vec<HostPoolSegment>, Vec<HostPoolComponent>) {
    let spec = &on_device.spec;
    let layers = spec.layers.max(1) as u64;
    let (mut segments, mut components) = (Vec::new(), Vec::new());
    let planes = [(PlaneKind::K, 1, spec.page_k_bytes()), (PlaneKind::V, 2, spec.page_v_bytes())];
    for (kind, region, page_bytes) in planes {
        let len = page_bytes as u64 / layers;
        for layer in 0..layers {
            let segment = segments.len() as u32;
            segments.push(HostPoolSegment { region, offset: layer * len * spec.pages as u64, stride: len, len });
            let (layer, run) = (on_device.layer(layer as u32), len);
            components.push(HostPoolComponent {
                layer,
                kind,
                segment,
                offset: 0,
                run_len: run,
                run_stride: run,
                run_count: 1,
            });
        }
    }
    (segments, components)
}

impl DirectPool {
    /// The pages of `memory`, whose host pool is `host`; seals are bound to `identity`. None where nobody but the host can move them: a pool that lies in
    /// no memory of a device, or whose checksums the device does not take.
    ///
    /// # Errors
    /// No memory for the seals.
    pub fn new(memory: &DeviceMemory, host: &HostPool, identity: [u8; 32]) -> Result<Option<Self>, CacheError> {
        let (Some(pools), Ok(pages)) = (memory.on_device(), u32::try_from(memory.pages())) else { return Ok(None) };
        if !memory.takes_checksums() || host.ranks() != 1 {
            return Ok(None);
        }
        // Bound to the order of the bytes as well.
        let identity: [u8; 32] = Sha256::new().chain_update(identity).chain_update(LAYOUT).finalize().into();
        let (mut descriptions, mut formats, mut bytes) = (Vec::new(), Vec::new(), 0_u64);
        for (of_host, on_device) in host.descriptions(0).zip(&pools) {
            let common = HostPoolDescription { layout: LAYOUT.to_owned(), pages, pinned: false, ..of_host.clone() };
            let Some(on_device) = on_device else {
                descriptions.push(common);
                continue;
            };
            let (mut segments, components) = plan(on_device);
            let format = SealFormat::new(seal_identity(identity, &common.name), components.len());
            let aligned = segments.iter().all(|segment| segment.len % BLOCK == 0);
            let len = round_up(format.len() as u64, if aligned { BLOCK } else { 64 }).unwrap_or(BLOCK);
            let area = HostPoolSegment { region: 0, offset: bytes, stride: len, len };
            bytes =
                len.checked_mul(pages.into()).and_then(|seals| round_up(bytes.checked_add(seals)?, BLOCK)).ok_or_else(
                    || CacheError::HostMemory { bytes: u64::MAX, message: "the seals of all device pages".to_owned() },
                )?;
            segments.push(area);
            formats.push(Format { area, components: components.len(), format });
            let ranges = &on_device.ranges;
            let region = |base, bytes: usize| DeviceRegion { base, bytes: bytes as u64, uuid: ranges.uuid };
            let device = vec![region(ranges.keys, ranges.key_bytes), region(ranges.values, ranges.value_bytes)];
            descriptions.push(HostPoolDescription { segments, components, device, ..common });
        }
        let seals = Mapping::new(bytes.max(BLOCK))?;
        for description in &mut descriptions {
            (description.base, description.bytes, description.fd) = (seals.base() as usize, seals.bytes(), seals.fd());
        }
        let (held, sealing) = (Arc::default(), Default::default());
        Ok(Some(DirectPool { seals, descriptions, formats, pages, held, sealing }))
    }

    /// What a backend has to know to register the pools, in order.
    pub fn descriptions(&self) -> &[HostPoolDescription] {
        &self.descriptions
    }

    /// The pages that calls hold.
    pub fn held(&self) -> &Arc<HeldSlots> {
        &self.held
    }

    fn seal_pointer(&self, format: &Format, page: u32) -> *mut u8 {
        self.seals.base().wrapping_add((format.area.offset + u64::from(page) * format.area.stride) as usize)
    }

    /// The parts of a page's checksums, pool by pool.
    fn parts<'a>(&'a self, sums: &'a [u32]) -> impl Iterator<Item = (&'a Format, &'a [u32])> {
        self.formats.iter().scan(sums, |rest, format| {
            let (own, others) = rest.split_at_checked(format.components)?;
            *rest = others;
            Some((format, own))
        })
    }

    /// Writes the seals of a page under `key`, whose checksums are `sums`. Where they stand already they are left alone: another backend may be
    /// reading them.
    ///
    /// # Safety
    ///
    /// The caller holds the page, its content is complete, and whoever else holds it stores it under the same key.
    pub unsafe fn seal(&self, page: u32, key: &PageKey, sums: &[u32]) {
        if page >= self.pages {
            return;
        }
        let _sealing = self.sealing[page as usize % self.sealing.len()].lock();
        for (format, own) in self.parts(sums) {
            let mut seal = vec![0; format.area.len as usize];
            format.format.write(&mut seal, key, own.iter().copied());
            let at = self.seal_pointer(format, page);
            // SAFETY: the seal lies in the mapping; those who hold the page only read it, and the lock lets one write it.
            if unsafe { std::slice::from_raw_parts(at, seal.len()) } != seal {
                // SAFETY: as above: nobody reads a seal that is not this one, as all who hold the page store it under this key.
                unsafe { std::ptr::copy_nonoverlapping(seal.as_ptr(), at, seal.len()) };
            }
        }
    }

    /// Wipes what the page's seals were.
    ///
    /// # Safety
    ///
    /// The caller holds `page` alone, and no backend call on it is running.
    pub unsafe fn wipe_seal(&self, page: u32) {
        for format in self.formats.iter().filter(|_| page < self.pages) {
            // SAFETY: the seal lies in the mapping, and by the caller's promise nobody else touches it.
            unsafe { self.seal_pointer(format, page).write_bytes(0, format.area.len as usize) };
        }
    }

    /// Checks the seals of a page whose checksums are `sums` against `key`.
    ///
    /// # Safety
    ///
    /// The caller holds the page, and nobody writes its seals.
    pub unsafe fn verify(&self, page: u32, key: &PageKey, sums: &[u32]) -> Result<(), SealFault> {
        let mut verified = 0;
        for (format, own) in self.parts(sums).take(if page < self.pages { usize::MAX } else { 0 }) {
            // SAFETY: the seal lies in the mapping, and by the caller's promise nobody writes it.
            let seal = unsafe { std::slice::from_raw_parts(self.seal_pointer(format, page), format.area.len as usize) };
            format.format.verify(seal, key, own.iter().copied())?;
            verified += 1;
        }
        if verified == self.formats.len() { Ok(()) } else { Err(SealFault::Damaged) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_held_until_its_last_holder_lets_go() {
        let held = HeldSlots::default();
        assert!(!held.is_held(3));
        held.hold(&[3, 4]);
        held.hold(&[3]);
        held.release(&[3, 4]);
        assert!(held.is_held(3) && !held.is_held(4));
        held.release(&[3]);
        held.release(&[3]);
        assert!(!held.is_held(3), "one more is logged, and nothing else");
    }
}
