//! Registered pools as a plugin sees them.

use std::sync::Arc;

use crate::v0_1::{self, NONE};
use crate::{ComponentKind, Dtype, Error, ErrorKind, HitPolicy, MemoryKind, PoolRole, Result};

/// A range of memory that pages lie in.
#[derive(Debug, Clone, Copy)]
pub struct Region {
    /// Address of the first byte in this process, or on the device.
    pub base: usize,
    /// Bytes.
    pub len: u64,
    /// Where it lies.
    pub memory_kind: MemoryKind,
    /// Descriptor of the memfd behind it. Owned by the host; duplicate it to keep it.
    pub fd: Option<i32>,
    /// Where in the descriptor the region starts.
    pub fd_offset: u64,
    /// UUID of the device; zero for host memory.
    pub device_uuid: [u8; 16],
}

/// One piece of every page: page `i` has it at `region.base + offset + i * stride`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Index into [`Pool::regions`].
    pub region: usize,
    /// Byte offset of page 0's piece.
    pub offset: u64,
    /// Bytes from page to page.
    pub stride: u64,
    /// Bytes of the piece.
    pub len: u64,
}

/// Where one layer's part of a page lies: runs of bytes in one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Component {
    /// Layer, from 0.
    pub layer: u32,
    /// What it holds.
    pub kind: ComponentKind,
    /// Index into [`Pool::segments`].
    pub segment: usize,
    /// Byte offset of the first run in the segment.
    pub offset: u64,
    /// Bytes of a run.
    pub run_len: u64,
    /// Bytes from run to run.
    pub run_stride: u64,
    /// Number of runs.
    pub run_count: u64,
}

#[derive(Debug)]
struct PoolData {
    id: u32,
    role: PoolRole,
    logical: bool,
    replicated: bool,
    dtype: Dtype,
    name: String,
    layout: String,
    page_count: u64,
    page_tokens: u32,
    layers: u32,
    page_bytes: u64,
    regions: Vec<Region>,
    segments: Vec<Segment>,
    components: Vec<Component>,
    seal_segment: Option<usize>,
    hit_policy: HitPolicy,
    trailing_pages: u32,
    block_pages: u32,
    group_pages: u32,
    indices_from_pool: Option<u32>,
}

/// A registered pool. Cheap to clone; the memory it names stays valid until `unregister` or `close` returns.
#[derive(Debug, Clone)]
pub struct Pool(Arc<PoolData>);

impl Pool {
    /// Number by which transfers name the pool.
    pub fn id(&self) -> u32 {
        self.0.id
    }
    /// Whether it is the anchor.
    pub fn role(&self) -> PoolRole {
        self.0.role
    }
    /// Whether it owns page indices and no bytes.
    pub fn is_logical(&self) -> bool {
        self.0.logical
    }
    /// Whether every rank holds the same bytes.
    pub fn is_replicated(&self) -> bool {
        self.0.replicated
    }
    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.0.dtype
    }
    /// Name: `kv`, `swa`, `indexer`, ...
    pub fn name(&self) -> &str {
        &self.0.name
    }
    /// Name of the layout.
    pub fn layout(&self) -> &str {
        &self.0.layout
    }
    /// Pages in the pool.
    pub fn page_count(&self) -> u64 {
        self.0.page_count
    }
    /// Tokens a page.
    pub fn page_tokens(&self) -> u32 {
        self.0.page_tokens
    }
    /// Layers with a part in the page.
    pub fn layers(&self) -> u32 {
        self.0.layers
    }
    /// Bytes of a page over all segments; 0 for a logical pool.
    pub fn page_bytes(&self) -> u64 {
        self.0.page_bytes
    }
    /// Memory the pages lie in.
    pub fn regions(&self) -> &[Region] {
        &self.0.regions
    }
    /// Pieces of a page, in the order in which they make up the stored page.
    pub fn segments(&self) -> &[Segment] {
        &self.0.segments
    }
    /// Parts of a page by layer.
    pub fn components(&self) -> &[Component] {
        &self.0.components
    }
    /// Index of the host's seal among the segments.
    pub fn seal_segment(&self) -> Option<usize> {
        self.0.seal_segment
    }
    /// Which pages a prefix needs.
    pub fn hit_policy(&self) -> HitPolicy {
        self.0.hit_policy
    }
    /// For trailing pages: how many.
    pub fn trailing_pages(&self) -> u32 {
        self.0.trailing_pages
    }
    /// For block groups: anchor pages of a block.
    pub fn block_pages(&self) -> u32 {
        self.0.block_pages
    }
    /// For block groups: keys of a group.
    pub fn group_pages(&self) -> u32 {
        self.0.group_pages
    }
    /// Pool whose page indices this one shares.
    pub fn indices_from_pool(&self) -> Option<u32> {
        self.0.indices_from_pool
    }

    /// Address and length of piece `segment` of page `page`.
    ///
    /// # Errors
    /// When the pool has no such page or segment.
    pub fn piece(&self, page: u32, segment: usize) -> Result<(*mut u8, usize)> {
        let piece = self.0.segments.get(segment).ok_or_else(|| self.bad(&format!("it has no segment {segment}")))?;
        if u64::from(page) >= self.0.page_count {
            return Err(self.bad(&format!("page {page} is outside of its {} pages", self.0.page_count)));
        }
        let region = self.0.regions.get(piece.region).ok_or_else(|| self.bad("a segment names no region"))?;
        // Registration checked that the last page's piece ends inside the region.
        let offset = piece.offset + piece.stride * u64::from(page);
        Ok((region.base.wrapping_add(offset as usize) as *mut u8, piece.len as usize))
    }

    fn bad(&self, what: &str) -> Error {
        Error::new(ErrorKind::InvalidConfig, format!("pool {} ({}): {what}", self.0.id, self.0.name))
    }

    /// Reads and checks a description from the host.
    ///
    /// # Safety
    /// Every pointer in `desc` is null with a count of 0, or points at that many valid elements.
    pub unsafe fn from_raw(desc: &v0_1::PoolDesc) -> Result<Pool> {
        // SAFETY: the caller's promise covers every pointer of `desc`.
        let (name, layout) = unsafe { (crate::raw::text(desc.name)?, crate::raw::text(desc.layout)?) };
        // SAFETY: as above.
        let (regions, segments, components) = unsafe {
            (
                crate::raw::slice(desc.regions, desc.region_count),
                crate::raw::slice(desc.segments, desc.segment_count),
                crate::raw::slice(desc.components, desc.component_count),
            )
        };
        let bad = |what: String| Error::new(ErrorKind::InvalidConfig, format!("pool {} ({name}): {what}", desc.pool));
        let Some(hit_policy) = HitPolicy::try_from_raw(desc.hit_policy).filter(|p| *p != HitPolicy::Unknown) else {
            return Err(bad(format!("hit policy {} is not known to this version", desc.hit_policy)));
        };
        let role = PoolRole::try_from_raw(desc.role).ok_or_else(|| bad(format!("role {} is not known", desc.role)))?;
        let dtype =
            Dtype::try_from_raw(desc.dtype).ok_or_else(|| bad(format!("element type {} is not known", desc.dtype)))?;
        let logical = desc.logical != 0;
        if logical && !(regions.is_empty() && segments.is_empty() && desc.page_bytes == 0) {
            return Err(bad("a logical pool has no regions, segments or bytes".into()));
        }
        if !logical && segments.is_empty() {
            return Err(bad("a pool with bytes needs segments; a pool without is declared logical".into()));
        }
        let regions = regions
            .iter()
            .map(|r| {
                let kind = MemoryKind::from_raw(r.memory_kind);
                if kind == MemoryKind::Unknown {
                    return Err(bad(format!("memory kind {} is not known to this version", r.memory_kind)));
                }
                if r.base.is_null() {
                    return Err(bad("a region has no address".into()));
                }
                let fd = (r.fd >= 0).then_some(r.fd);
                Ok(Region {
                    base: r.base as usize,
                    len: r.len,
                    memory_kind: kind,
                    fd,
                    fd_offset: r.fd_offset,
                    device_uuid: r.device_uuid,
                })
            })
            .collect::<Result<Vec<_>>>()?;
        let mut bytes = 0u64;
        for (index, s) in segments.iter().enumerate() {
            let region = regions.get(s.region as usize).ok_or_else(|| {
                bad(format!("segment {index} names region {}, there are {}", s.region, regions.len()))
            })?;
            let end = desc
                .page_count
                .saturating_sub(1)
                .checked_mul(s.stride)
                .and_then(|x| x.checked_add(s.offset))
                .and_then(|x| x.checked_add(s.len));
            if end.is_none_or(|end| end > region.len) {
                return Err(bad(format!(
                    "segment {index} of the last page ends outside of its region of {} bytes",
                    region.len
                )));
            }
            bytes = bytes.saturating_add(s.len);
        }
        if bytes != desc.page_bytes {
            return Err(bad(format!("its segments have {bytes} bytes, the description says {}", desc.page_bytes)));
        }
        for (index, c) in components.iter().enumerate() {
            let segment = segments.get(c.segment as usize).ok_or_else(|| {
                bad(format!("component {index} names segment {}, there are {}", c.segment, segments.len()))
            })?;
            let end = c
                .run_count
                .saturating_sub(1)
                .checked_mul(c.run_stride)
                .and_then(|x| x.checked_add(c.offset))
                .and_then(|x| x.checked_add(c.run_len));
            if end.is_none_or(|end| end > segment.len) {
                return Err(bad(format!("component {index} ends outside of its segment of {} bytes", segment.len)));
            }
        }
        if desc.seal_segment != NONE && desc.seal_segment as usize >= segments.len() {
            return Err(bad(format!("the seal is segment {}, there are {}", desc.seal_segment, segments.len())));
        }
        Ok(Pool(Arc::new(PoolData {
            id: desc.pool,
            role,
            logical,
            replicated: desc.replicated != 0,
            dtype,
            name: name.to_owned(),
            layout: layout.to_owned(),
            page_count: desc.page_count,
            page_tokens: desc.page_tokens,
            layers: desc.layers,
            page_bytes: desc.page_bytes,
            regions,
            segments: segments
                .iter()
                .map(|s| Segment { region: s.region as usize, offset: s.offset, stride: s.stride, len: s.len })
                .collect(),
            components: components
                .iter()
                .map(|c| Component {
                    layer: c.layer,
                    kind: ComponentKind::from_raw(c.kind),
                    segment: c.segment as usize,
                    offset: c.offset,
                    run_len: c.run_len,
                    run_stride: c.run_stride,
                    run_count: c.run_count,
                })
                .collect(),
            seal_segment: (desc.seal_segment != NONE).then_some(desc.seal_segment as usize),
            hit_policy,
            trailing_pages: desc.trailing_pages,
            block_pages: desc.block_pages,
            group_pages: desc.group_pages,
            indices_from_pool: (desc.indices_from_pool != NONE).then_some(desc.indices_from_pool),
        })))
    }
}
