//! Pages on their way between the device memory of a cache and its host pool.

use kvdock_kernels::{HostPage, KernelError, Moment, Transfer};
use smallvec::SmallVec;

use super::{Buffers, DeviceMemory, DevicePool, outside};
use crate::cache::pool::HostPool;

/// Pages that are copied by one call where a pool wishes for no other number.
const LEAST_AT_ONCE: usize = 2;

/// Copies on their way, each with the buffer that it copies to.
pub(crate) type Transfers = SmallVec<[(usize, Box<dyn Transfer>); 1]>;

/// A point in what the devices of a memory's pools compute, pool by pool.
#[derive(Debug, Default)]
pub(crate) struct Moments(SmallVec<[Option<Moment>; 1]>);

impl Moments {
    /// That of the device of a pool.
    fn of(&self, pool: usize) -> Option<&Moment> {
        self.0.get(pool)?.as_ref()
    }
}

/// Device pages with the places of their host pages in the planes from `plane` on.
type Places = SmallVec<[(u32, HostPage); LEAST_AT_ONCE]>;

fn places(host: &HostPool, plane: usize, pages: &[(u32, u32)]) -> Result<Places, KernelError> {
    let place = |&(device, page): &(u32, u32)| Ok((device, host.heads(plane, page).ok_or_else(|| outside(page))?));
    pages.iter().map(place).collect()
}

/// Each page with each of `layers` layers.
fn each_layer(pages: &[(u32, u32)], layers: usize) -> impl Iterator<Item = (&(u32, u32), usize)> {
    pages.iter().flat_map(move |pair| (0..layers).map(move |layer| (pair, layer)))
}

impl DeviceMemory {
    /// Pages that are best copied by one call.
    pub(crate) fn pages_at_once(&self) -> usize {
        let of = |pool: &DevicePool| match &pool.buffers {
            Buffers::Heads(heads) => heads.pages_at_once(),
            Buffers::Logical | Buffers::Bytes(_) => LEAST_AT_ONCE,
        };
        self.pools.iter().map(of).max().unwrap_or(LEAST_AT_ONCE).max(1)
    }

    /// Copies pages to the host, given as pairs of a device page and a host page.
    ///
    /// # Errors
    /// A page that is not there; some may have been copied then.
    ///
    /// # Safety
    ///
    /// `host` was made for these planes. The caller holds the host pages and they are no one else's yet; the device pages are complete, and
    /// stay so during the call.
    pub(crate) unsafe fn copy_out(&self, pages: &[(u32, u32)], host: &HostPool) -> Result<(), KernelError> {
        let mut plane = 0;
        for (index, pool) in self.pools.iter().enumerate() {
            match &pool.buffers {
                Buffers::Logical => {}
                Buffers::Heads(pool) => {
                    let places = places(host, plane, pages)?;
                    plane += 2;
                    // SAFETY: the strides of the host pool were made from this pool's geometry, and by the caller's
                    // promise nobody else touches the host pages or writes the device pages.
                    unsafe { pool.copy_pages_out(&places)? };
                    let of_device: SmallVec<[u32; LEAST_AT_ONCE]> = pages.iter().map(|(from, _)| *from).collect();
                    if let Some(sums) = pool.checksums(&of_device, host.is_by_heads(), None)? {
                        let a_page = 2 * pool.spec().layers;
                        for (&(_, to), sums) in pages.iter().zip(sums.chunks_exact(a_page)) {
                            host.note_checksums(index, to, sums);
                        }
                    }
                }
                Buffers::Bytes(pool) => {
                    for (&(from, to), layer) in each_layer(pages, pool.spec().layers) {
                        let target = host.bytes(plane, layer, to).ok_or_else(|| outside(to))?;
                        // SAFETY: the bytes lie in the mapping, and by the caller's promise nobody else touches the page.
                        let target = unsafe { std::slice::from_raw_parts_mut(target.0, target.1) };
                        pool.copy_layer_out(from, layer, target)?;
                    }
                    plane += 1;
                }
            }
        }
        Ok(())
    }

    /// Checksums that the device takes of its pages, of each those of all components in order; none where the host does as well itself. What has
    /// been waited for is in them, and what was computed before `moments`.
    ///
    /// # Errors
    /// A page that is not there; the device's own.
    pub(crate) fn checksums(
        &self,
        pages: &[u32],
        by_heads: bool,
        moments: &Moments,
    ) -> Result<Option<Vec<Vec<u32>>>, KernelError> {
        let mut all = vec![Vec::new(); pages.len()];
        for (index, pool) in self.pools.iter().enumerate() {
            match &pool.buffers {
                Buffers::Logical => {}
                Buffers::Heads(pool) => {
                    let Some(sums) = pool.checksums(pages, by_heads, moments.of(index))? else { return Ok(None) };
                    let a_page = 2 * pool.spec().layers;
                    all.iter_mut().zip(sums.chunks_exact(a_page)).for_each(|(page, sums)| page.extend_from_slice(sums));
                }
                Buffers::Bytes(_) => return Ok(None),
            }
        }
        Ok(Some(all))
    }

    /// Whether the device takes the checksums of its pages.
    pub(crate) fn takes_checksums(&self) -> bool {
        let nothing = |pool: &DevicePool| matches!(pool.buffers, Buffers::Logical);
        !self.pools.iter().all(nothing) && matches!(self.checksums(&[], false, &Moments::default()), Ok(Some(_)))
    }

    /// The point behind all that the devices of the pools were told to compute.
    ///
    /// # Errors
    /// A device's own.
    pub(crate) fn moments(&self) -> Result<Moments, KernelError> {
        let of = |pool: &DevicePool| match &pool.buffers {
            Buffers::Heads(heads) => heads.moment().map(Some),
            Buffers::Bytes(bytes) => bytes.moment().map(Some),
            Buffers::Logical => Ok(None),
        };
        Ok(Moments(self.pools.iter().map(of).collect::<Result<_, _>>()?))
    }

    /// Waits until what the devices of the pools were told to compute before `moments` has run.
    ///
    /// # Errors
    /// A device's own.
    pub(crate) fn pass(&self, moments: &Moments) -> Result<(), KernelError> {
        for (index, pool) in self.pools.iter().enumerate() {
            if let (Buffers::Heads(heads), Some(moment)) = (&pool.buffers, moments.of(index)) {
                heads.pass(moment)?;
            }
        }
        Ok(())
    }

    /// Starts to copy a layer of pages from the host, as far as the pools have it, given as pairs of a device page and a host page: behind
    /// what the device was told to compute before `moments`, and beside what it computes later.
    ///
    /// # Errors
    /// A page that is not there.
    ///
    /// # Safety
    ///
    /// As for `copy_in`, of that layer alone, until what is given back is over; what was computed since the moments does not touch the pages.
    pub(crate) unsafe fn begin_layer_in(
        &self,
        moments: &Moments,
        layer: usize,
        pages: &[(u32, u32)],
        host: &HostPool,
    ) -> Result<Transfers, KernelError> {
        let mut plane = 0;
        let mut transfers = Transfers::new();
        for (index, named) in self.pools.iter().enumerate() {
            match &named.buffers {
                Buffers::Logical => {}
                Buffers::Heads(pool) => {
                    let at = plane;
                    plane += 2;
                    if let Some(buffer) = named.buffer_of(layer, pool.spec().layers) {
                        let places = places(host, at, pages)?;
                        let none = Moment::from_parts(Box::new(()));
                        let moment = moments.of(index).unwrap_or(&none);
                        // SAFETY: the strides of the host pool were made from this pool's geometry; the rest is the caller's promise.
                        transfers.push((buffer, unsafe { pool.begin_layer_in(moment, buffer, &places)? }));
                    }
                }
                Buffers::Bytes(pool) => {
                    let at = plane;
                    plane += 1;
                    let Some(buffer) = named.buffer_of(layer, pool.spec().layers) else { continue };
                    for &(to, from) in pages {
                        let source = host.bytes(at, buffer, from).ok_or_else(|| outside(from))?;
                        // SAFETY: the bytes lie in the mapping, and by the caller's promise nobody writes them.
                        let source = unsafe { std::slice::from_raw_parts(source.0.cast_const(), source.1) };
                        // These have come when the call returns.
                        pool.copy_layer_in_after(moments.of(index), to, buffer, source)?;
                    }
                }
            }
        }
        Ok(transfers)
    }

    /// Copies pages from the host, given as pairs of a device page and a host page.
    ///
    /// # Errors
    /// A page that is not there; some may have been copied then.
    ///
    /// # Safety
    ///
    /// `host` was made for these planes. The host pages are complete and not written during the call; the device pages belong to the caller
    /// and nobody reads them yet.
    pub(crate) unsafe fn copy_in(&self, pages: &[(u32, u32)], host: &HostPool) -> Result<(), KernelError> {
        let mut plane = 0;
        for pool in &self.pools {
            match &pool.buffers {
                Buffers::Logical => {}
                Buffers::Heads(pool) => {
                    let places = places(host, plane, pages)?;
                    plane += 2;
                    // SAFETY: the strides of the host pool were made from this pool's geometry, and by the caller's
                    // promise nobody writes the host pages or touches the device pages.
                    unsafe { pool.copy_pages_in(&places)? };
                }
                Buffers::Bytes(pool) => {
                    for (&(to, from), layer) in each_layer(pages, pool.spec().layers) {
                        let source = host.bytes(plane, layer, from).ok_or_else(|| outside(from))?;
                        // SAFETY: the bytes lie in the mapping, and by the caller's promise nobody writes the page.
                        let source = unsafe { std::slice::from_raw_parts(source.0.cast_const(), source.1) };
                        pool.copy_layer_in(to, layer, source)?;
                    }
                    plane += 1;
                }
            }
        }
        Ok(())
    }
}
