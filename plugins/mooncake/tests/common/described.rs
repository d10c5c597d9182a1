//! Pools as registration makes them, without memory behind them.

use std::ffi::c_void;

use kvdock_plugin_api::mock::PoolSpec;
use kvdock_plugin_api::v0_1::{NONE, PoolDesc, Region, Segment};
use kvdock_plugin_api::{MemoryKind, Pool};

/// A pool of which nobody touches a page.
pub fn described(spec: &PoolSpec, replicated: bool) -> Pool {
    let mut at = 0;
    let segments: Vec<Segment> = spec
        .segments
        .iter()
        .map(|len| {
            let offset = at;
            at += len * spec.pages;
            Segment { region: 0, reserved: 0, offset, stride: *len, len: *len }
        })
        .collect();
    let regions = [Region {
        base: std::ptr::without_provenance_mut::<c_void>(4096),
        len: at,
        memory_kind: MemoryKind::Host.raw(),
        fd: -1,
        fd_offset: 0,
        device_uuid: [0; 16],
        flags: 0,
    }];
    let count = if spec.logical { 0 } else { 1 };
    let desc = PoolDesc {
        pool: spec.id,
        role: spec.role.raw(),
        logical: u32::from(spec.logical),
        dtype: spec.dtype.raw(),
        name: spec.name.as_str().into(),
        layout: spec.layout.as_str().into(),
        page_count: spec.pages,
        page_tokens: spec.page_tokens,
        layers: spec.layers,
        page_bytes: spec.segments.iter().sum(),
        regions: regions.as_ptr(),
        region_count: count,
        segments: segments.as_ptr(),
        segment_count: segments.len() as u64,
        components: spec.components.as_ptr(),
        component_count: spec.components.len() as u64,
        seal_segment: if spec.seal { segments.len() as u32 - 1 } else { NONE },
        hit_policy: spec.hit_policy,
        trailing_pages: spec.trailing_pages,
        block_pages: spec.block_pages,
        group_pages: spec.group_pages,
        indices_from_pool: spec.indices_from_pool.unwrap_or(NONE),
        replicated: u32::from(replicated),
        reserved: 0,
    };
    // SAFETY: every pointer names an array of this function, with its length.
    unsafe { Pool::from_raw(&desc) }.unwrap()
}
