//! Pools: where pages lie and what they are made of.

use std::ffi::c_void;

use super::Bytes;
use crate::describe::abi_struct;

/// In place of an index: none.
pub const NONE: u32 = u32::MAX;

abi_struct! {
    /// A range of memory that pages lie in. It stays valid from registration until `unregister` or
    /// `close` returns. Pools may share regions.
    pub struct Region {
        /// First byte, as this process sees it; for device memory its address on the device.
        pub base: *mut c_void,
        /// Bytes.
        pub len: u64,
        /// A [`crate::MemoryKind`]. An unknown kind is refused.
        pub memory_kind: u32,
        /// Descriptor of the memfd (host memory) or dma-buf (device memory) behind the region, or -1. Owned by the host, and valid as long as
        /// the region; duplicate it to keep it.
        pub fd: i32,
        /// Where in the descriptor the region starts, in bytes.
        pub fd_offset: u64,
        /// UUID of the device the memory lies on; zero for host memory.
        pub device_uuid: [u8; 16],
        /// Reserved, 0.
        pub flags: u64,
    }
}

abi_struct! {
    /// One piece of every page of a pool. Page `i` has it at `base of region + offset + i * stride`.
    pub struct Segment {
        /// Index into the regions of the pool.
        pub region: u32,
        /// Reserved, 0.
        pub reserved: u32,
        /// Byte offset of page 0's piece in the region.
        pub offset: u64,
        /// Bytes from one page's piece to the next page's.
        pub stride: u64,
        /// Bytes of the piece.
        pub len: u64,
    }
}

abi_struct! {
    /// Where one layer's part of a page lies: `run_count` runs of `run_len` bytes, `run_stride` bytes apart,
    /// in one segment.
    pub struct Component {
        /// Layer, from 0 in this pipeline stage, and the same in all pools. Several components may have one layer.
        pub layer: u32,
        /// A [`crate::ComponentKind`].
        pub kind: u32,
        /// Index into the segments of the pool.
        pub segment: u32,
        /// Reserved, 0.
        pub reserved: u32,
        /// Byte offset of the first run in the segment.
        pub offset: u64,
        /// Bytes of a run.
        pub run_len: u64,
        /// Bytes from run to run.
        pub run_stride: u64,
        /// Number of runs.
        pub run_count: u64,
    }
}

abi_struct! {
    /// A pool of pages.
    pub struct PoolDesc {
        /// Number by which transfers name the pool, chosen by the host for this instance. What is stored goes by `name`.
        pub pool: u32,
        /// A [`crate::PoolRole`].
        pub role: u32,
        /// 1: the pool owns page indices and no bytes. A backend registers no memory for it and keeps the
        /// existence of its pages by marker objects.
        pub logical: u32,
        /// A [`crate::Dtype`].
        pub dtype: u32,
        /// Name of the pool: `kv`, `swa`, `indexer`, ...
        pub name: Bytes,
        /// Layout of a page: `layer_first`, `page_first`, `page_first_direct`, `page_head`,
        /// `page_first_kv_split`, or a name of the pool's own.
        pub layout: Bytes,
        /// Pages in the pool.
        pub page_count: u64,
        /// Tokens of the sequence a page stands for; 0 for a state that stands for the whole prefix up to its key.
        pub page_tokens: u32,
        /// Layers with a part in the page; 0 for a logical pool.
        pub layers: u32,
        /// Bytes of a page over all segments, the seal included; 0 for a logical pool. A page is stored with exactly this many bytes.
        pub page_bytes: u64,
        /// Regions.
        pub regions: *const Region,
        /// Number of regions.
        pub region_count: u64,
        /// Pieces of a page, in the order in which they make up the stored page.
        pub segments: *const Segment,
        /// Number of segments.
        pub segment_count: u64,
        /// Parts of a page by layer.
        pub components: *const Component,
        /// Number of components.
        pub component_count: u64,
        /// The segment that is the host's seal, or [`NONE`]. A backend moves it as payload.
        pub seal_segment: u32,
        /// A [`crate::HitPolicy`]. An unknown policy is refused.
        pub hit_policy: u32,
        /// For trailing pages: how many.
        pub trailing_pages: u32,
        /// For block groups: anchor pages of a block.
        pub block_pages: u32,
        /// For block groups: keys of a group.
        pub group_pages: u32,
        /// Pool whose page indices this pool shares, or [`NONE`].
        pub indices_from_pool: u32,
        /// 1: every rank holds the same bytes.
        pub replicated: u32,
        /// Reserved, 0.
        pub reserved: u32,
    }
}
