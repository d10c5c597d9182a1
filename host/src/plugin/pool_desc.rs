//! The host pools as they cross the boundary.

use std::ffi::c_void;

use kvdock_plugin_api::v0_1::{Component, NONE, PoolDesc, PoolQuery, Region, Segment};
use kvdock_plugin_api::{ComponentKind, HitPolicy, MemoryKind, PoolRole};

use super::backend::{Held, HostPoolDescription, PlaneKind, PoolGroup, PoolHit};

/// Number under which the anchor pool is registered. Side pools follow in the order of their descriptions.
pub const ANCHOR_POOL: u32 = 0;

/// A registered pool, as calls need to know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registered {
    /// Its number.
    pub pool: u32,
    /// Whose page numbers it goes by.
    pub group: PoolGroup,
    /// What a prefix needs of it.
    pub hit: PoolHit,
}

impl Registered {
    /// The pools of a host, numbered: the anchor first.
    pub fn of(pools: &[HostPoolDescription]) -> Vec<Registered> {
        let numbered = pools.iter().zip(ANCHOR_POOL..);
        numbered.map(|(pool, number)| Registered { pool: number, group: pool.group, hit: pool.hit }).collect()
    }

    /// Asks for it in an `exists`, beside the pages that are `held`.
    pub fn query(&self, held: &Held) -> PoolQuery {
        let (hit_policy, trailing_pages) = policy(self.hit);
        PoolQuery {
            pool: self.pool,
            hit_policy,
            trailing_pages,
            block_pages: 0,
            group_pages: 0,
            held_pages: held[self.group as usize],
        }
    }
}

fn policy(hit: PoolHit) -> (u32, u32) {
    match hit {
        PoolHit::AllPages => (HitPolicy::AllPages.raw(), 0),
        PoolHit::TrailingPages(pages) => (HitPolicy::TrailingPages.raw(), pages),
    }
}

/// A description with the arrays that its C form points into.
#[derive(Debug)]
pub struct OwnedPoolDesc {
    number: u32,
    /// The pool whose page numbers it shares.
    indices_from: u32,
    name: String,
    layout: String,
    regions: Vec<Region>,
    segments: Vec<Segment>,
    components: Vec<Component>,
    sealed: bool,
    replicated: bool,
    pool: HostPoolDescription,
}

// SAFETY: the pointers in the regions name the host pool's mapping, which lives as long as the process, and device memory, which no code here
// touches; the rest is owned.
unsafe impl Send for OwnedPoolDesc {}

impl OwnedPoolDesc {
    /// All pools of a host, the anchor first. Without `sealed` their pages end before the seal, which is the last of their pieces. `replicated`:
    /// every tensor-parallel rank holds the same bytes.
    pub fn all(pools: &[HostPoolDescription], sealed: bool, replicated: bool) -> Vec<OwnedPoolDesc> {
        let numbered = pools.iter().zip(ANCHOR_POOL..);
        numbered
            .clone()
            .map(|(pool, number)| {
                let owner = numbered.clone().find(|(other, _)| other.group == pool.group).map(|(_, owner)| owner);
                let indices_from = owner.filter(|&owner| owner != number).unwrap_or(NONE);
                OwnedPoolDesc { replicated, ..OwnedPoolDesc::new(pool, number, indices_from, sealed) }
            })
            .collect()
    }

    /// The anchor pool alone.
    #[cfg(test)]
    pub fn anchor(pool: &HostPoolDescription, sealed: bool) -> OwnedPoolDesc {
        OwnedPoolDesc::new(pool, ANCHOR_POOL, NONE, sealed)
    }

    fn new(pool: &HostPoolDescription, number: u32, indices_from: u32, sealed: bool) -> OwnedPoolDesc {
        let region = Region {
            base: pool.base as *mut c_void,
            len: pool.bytes,
            memory_kind: if pool.pinned { MemoryKind::CudaPinned } else { MemoryKind::Host }.raw(),
            fd: pool.fd,
            fd_offset: 0,
            device_uuid: [0; 16],
            flags: 0,
        };
        let of_device = pool.device.iter().map(|device| Region {
            base: device.base as *mut c_void,
            len: device.bytes,
            memory_kind: MemoryKind::Cuda.raw(),
            fd: -1,
            fd_offset: 0,
            device_uuid: device.uuid,
            flags: 0,
        });
        // A logical pool has no memory, so there is nothing to register and no seal.
        let regions = if pool.logical { Vec::new() } else { std::iter::once(region).chain(of_device).collect() };
        let sealed = sealed && !pool.logical;
        let count = if sealed { pool.segments.len() } else { pool.segments.len().saturating_sub(1) };
        let segments = pool
            .segments
            .iter()
            .take(count)
            .map(|s| Segment { region: s.region, reserved: 0, offset: s.offset, stride: s.stride, len: s.len })
            .collect();
        let components = pool
            .components
            .iter()
            .map(|c| Component {
                layer: c.layer,
                kind: match c.kind {
                    PlaneKind::K => ComponentKind::K,
                    PlaneKind::V => ComponentKind::V,
                    PlaneKind::State => ComponentKind::State,
                    PlaneKind::Other => ComponentKind::Other,
                }
                .raw(),
                segment: c.segment,
                reserved: 0,
                offset: c.offset,
                run_len: c.run_len,
                run_stride: c.run_stride,
                run_count: c.run_count,
            })
            .collect();
        OwnedPoolDesc {
            number,
            indices_from,
            name: pool.name.clone(),
            layout: pool.layout.clone(),
            regions,
            segments,
            components,
            sealed,
            replicated: false,
            pool: pool.clone(),
        }
    }

    /// The C form; it points into `self`.
    pub fn raw(&self) -> PoolDesc {
        let (hit_policy, trailing_pages) = policy(self.pool.hit);
        PoolDesc {
            pool: self.number,
            role: if self.number == ANCHOR_POOL { PoolRole::Anchor } else { PoolRole::Side }.raw(),
            logical: u32::from(self.pool.logical),
            dtype: self.pool.dtype.raw(),
            name: self.name.as_str().into(),
            layout: self.layout.as_str().into(),
            page_count: u64::from(self.pool.pages),
            page_tokens: self.pool.page_tokens,
            layers: self.pool.layers,
            page_bytes: self.segments.iter().map(|s| s.len).sum(),
            regions: self.regions.as_ptr(),
            region_count: self.regions.len() as u64,
            segments: self.segments.as_ptr(),
            segment_count: self.segments.len() as u64,
            components: self.components.as_ptr(),
            component_count: self.components.len() as u64,
            seal_segment: match u32::try_from(self.segments.len()) {
                Ok(count) if self.sealed => count.wrapping_sub(1),
                _ => NONE,
            },
            hit_policy,
            trailing_pages,
            block_pages: 0,
            group_pages: 0,
            indices_from_pool: self.indices_from,
            replicated: u32::from(self.replicated),
            reserved: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use kvdock_plugin_api::Dtype;

    use super::super::backend::{DeviceRegion, HostPoolSegment};
    use super::*;

    fn pool(name: &str, group: PoolGroup, hit: PoolHit) -> HostPoolDescription {
        let piece = |offset, len| HostPoolSegment { region: 0, offset, stride: len, len };
        HostPoolDescription {
            name: name.into(),
            group,
            hit,
            logical: false,
            layout: "page_first".into(),
            dtype: Dtype::F16,
            pages: 4,
            page_tokens: 16,
            layers: 1,
            base: 4096,
            bytes: 1024,
            pinned: false,
            fd: -1,
            device: Vec::new(),
            segments: vec![piece(0, 64), piece(256, 64), piece(512, 32)],
            components: Vec::new(),
        }
    }

    #[test]
    fn without_a_seal_a_page_ends_before_it() {
        let pool = pool("kv", PoolGroup::Full, PoolHit::AllPages);
        let (sealed, plain) = (OwnedPoolDesc::anchor(&pool, true), OwnedPoolDesc::anchor(&pool, false));
        let of = |desc: &OwnedPoolDesc| {
            let raw = desc.raw();
            (raw.segment_count, raw.page_bytes, raw.seal_segment)
        };
        assert_eq!(of(&sealed), (3, 160, 2));
        let kind = |pinned| {
            let desc = OwnedPoolDesc::anchor(&HostPoolDescription { pinned, ..pool.clone() }, true);
            desc.regions[0].memory_kind
        };
        assert_eq!((kind(false), kind(true)), (MemoryKind::Host.raw(), MemoryKind::CudaPinned.raw()));
        assert_eq!(of(&plain), (2, 128, NONE));
    }

    #[test]
    fn pieces_in_the_memory_of_a_device_name_its_regions() {
        let device = DeviceRegion { base: 0x7000_0000, bytes: 4096, uuid: [9; 16] };
        let base = pool("kv", PoolGroup::Full, PoolHit::AllPages);
        let mut segments = base.segments.clone();
        segments[0].region = 1;
        segments[1].region = 2;
        let second = DeviceRegion { base: 0x7100_0000, ..device };
        let pool = HostPoolDescription { device: vec![device, second], segments, ..base };
        let owned = OwnedPoolDesc::anchor(&pool, true);
        let kinds: Vec<_> = owned.regions.iter().map(|r| (r.memory_kind, r.base as usize, r.device_uuid[0])).collect();
        let (host, cuda) = (MemoryKind::Host.raw(), MemoryKind::Cuda.raw());
        assert_eq!(kinds, [(host, 4096, 0), (cuda, 0x7000_0000, 9), (cuda, 0x7100_0000, 9)]);
        let places: Vec<u32> = owned.segments.iter().map(|segment| segment.region).collect();
        assert_eq!((places, owned.raw().seal_segment), (vec![1, 2, 0], 2));
    }

    #[test]
    fn side_pools_say_whose_numbers_they_share_and_what_a_hit_needs() {
        let anchor = HostPoolDescription {
            logical: true,
            segments: Vec::new(),
            layers: 0,
            ..pool("kv", PoolGroup::Full, PoolHit::AllPages)
        };
        let pools = [
            anchor,
            pool("rows", PoolGroup::Full, PoolHit::AllPages),
            pool("swa", PoolGroup::Window, PoolHit::TrailingPages(3)),
            pool("ring", PoolGroup::Window, PoolHit::TrailingPages(1)),
        ];
        let owned = OwnedPoolDesc::all(&pools, true, false);
        let of = |desc: &OwnedPoolDesc| {
            let raw = desc.raw();
            (raw.pool, raw.role, raw.indices_from_pool, raw.trailing_pages, raw.region_count)
        };
        let (main, side) = (PoolRole::Anchor.raw(), PoolRole::Side.raw());
        let found: Vec<_> = owned.iter().map(of).collect();
        assert_eq!(found, [(0, main, NONE, 0, 0), (1, side, 0, 0, 1), (2, side, NONE, 3, 1), (3, side, 2, 1, 1)]);
        let logical = owned[0].raw();
        assert_eq!((logical.logical, logical.page_bytes, logical.seal_segment), (1, 0, NONE));
        let query = Registered::of(&pools)[2].query(&[7, 5, 0]);
        assert_eq!((query.pool, query.trailing_pages, query.held_pages), (2, 3, 5));
        assert_eq!(query.hit_policy, HitPolicy::TrailingPages.raw());
        assert!(owned.iter().all(|desc| desc.raw().replicated == 0));
        assert!(OwnedPoolDesc::all(&pools, true, true).iter().all(|desc| desc.raw().replicated == 1));
    }
}
