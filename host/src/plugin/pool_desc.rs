//! The host pool as it crosses the boundary.

use std::ffi::c_void;

use kvdock_plugin_api::v0_1::{Component, NONE, PoolDesc, Region, Segment};
use kvdock_plugin_api::{ComponentKind, HitPolicy, MemoryKind, PoolRole};

use super::backend::HostPoolDescription;

/// Number under which the anchor pool is registered.
pub const ANCHOR_POOL: u32 = 0;

/// A description with the arrays that its C form points into.
#[derive(Debug)]
pub struct OwnedPoolDesc {
    name: String,
    layout: String,
    regions: Vec<Region>,
    segments: Vec<Segment>,
    components: Vec<Component>,
    sealed: bool,
    pool: HostPoolDescription,
}

// SAFETY: the pointers in the regions name the host pool's mapping, which lives as long as the process; the rest is owned.
unsafe impl Send for OwnedPoolDesc {}

impl OwnedPoolDesc {
    /// The anchor pool. Without `sealed` its pages end before the seal, which is the last of their pieces.
    pub fn anchor(pool: &HostPoolDescription, sealed: bool) -> OwnedPoolDesc {
        let regions = vec![Region {
            base: pool.base as *mut c_void,
            len: pool.bytes,
            memory_kind: if pool.pinned { MemoryKind::CudaPinned } else { MemoryKind::Host }.raw(),
            fd: pool.fd,
            fd_offset: 0,
            device_uuid: [0; 16],
            flags: 0,
        }];
        let count = if sealed { pool.segments.len() } else { pool.segments.len().saturating_sub(1) };
        let segments = pool
            .segments
            .iter()
            .take(count)
            .map(|s| Segment { region: 0, reserved: 0, offset: s.offset, stride: s.stride, len: s.len })
            .collect();
        let components = pool
            .components
            .iter()
            .map(|c| Component {
                layer: c.layer,
                kind: if c.component == 0 { ComponentKind::K } else { ComponentKind::V }.raw(),
                segment: c.segment,
                reserved: 0,
                offset: c.offset,
                run_len: c.run_len,
                run_stride: c.run_stride,
                run_count: c.run_count,
            })
            .collect();
        OwnedPoolDesc {
            name: pool.name.clone(),
            layout: pool.layout.clone(),
            regions,
            segments,
            components,
            sealed,
            pool: pool.clone(),
        }
    }

    /// The C form; it points into `self`.
    pub fn raw(&self) -> PoolDesc {
        PoolDesc {
            pool: ANCHOR_POOL,
            role: PoolRole::Anchor.raw(),
            logical: 0,
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
            hit_policy: HitPolicy::AllPages.raw(),
            trailing_pages: 0,
            block_pages: 0,
            group_pages: 0,
            indices_from_pool: NONE,
            replicated: 0,
            reserved: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use kvdock_plugin_api::Dtype;

    use super::super::backend::HostPoolSegment;
    use super::*;

    #[test]
    fn without_a_seal_a_page_ends_before_it() {
        let piece = |offset, len| HostPoolSegment { offset, stride: len, len };
        let pool = HostPoolDescription {
            name: "kv".into(),
            layout: "page_first".into(),
            dtype: Dtype::F16,
            pages: 4,
            page_tokens: 16,
            layers: 1,
            base: 4096,
            bytes: 1024,
            pinned: false,
            fd: -1,
            segments: vec![piece(0, 64), piece(256, 64), piece(512, 32)],
            components: Vec::new(),
        };
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
}
