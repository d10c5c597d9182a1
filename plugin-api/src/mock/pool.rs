//! Pools in memfds.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::v0_1::{self, NONE, PoolDesc};
use crate::{ComponentKind, Dtype, HitPolicy, MemoryKind, PoolRole};

/// Shape of a pool of keys and values.
#[derive(Debug, Clone, Copy)]
pub struct KvShape {
    /// Pages in the pool.
    pub pages: u64,
    /// Tokens a page.
    pub page_tokens: u32,
    /// Layers.
    pub layers: u32,
    /// Heads.
    pub heads: u32,
    /// Elements of a key's and of a value's head.
    pub head_dim: u32,
    /// Element type.
    pub dtype: Dtype,
}

/// What a pool is to be made of. Every field may be changed, also into something that a plugin must refuse.
#[derive(Debug, Clone)]
pub struct PoolSpec {
    /// Number of the pool.
    pub id: u32,
    /// Name.
    pub name: String,
    /// Name of the layout.
    pub layout: String,
    /// Role.
    pub role: PoolRole,
    /// Owns indices and no bytes.
    pub logical: bool,
    /// Element type.
    pub dtype: Dtype,
    /// Pages in the pool.
    pub pages: u64,
    /// Tokens a page.
    pub page_tokens: u32,
    /// Layers with a part in the page.
    pub layers: u32,
    /// Bytes of each segment.
    pub segments: Vec<u64>,
    /// Parts by layer.
    pub components: Vec<v0_1::Component>,
    /// The last segment is the host's seal.
    pub seal: bool,
    /// A memory kind, as the number that crosses the boundary.
    pub memory_kind: u32,
    /// A hit policy, as the number that crosses the boundary.
    pub hit_policy: u32,
    /// For trailing pages: how many.
    pub trailing_pages: u32,
    /// For block groups: anchor pages of a block.
    pub block_pages: u32,
    /// For block groups: keys of a group.
    pub group_pages: u32,
    /// Pool whose page indices this one shares.
    pub indices_from_pool: Option<u32>,
    /// Bytes between the pieces of neighbouring pages that belong to no page.
    pub gap: u64,
    /// The last segment lies in a region of its own.
    pub last_segment_apart: bool,
}

impl PoolSpec {
    /// A pool whose page has these segments, without layers. Number 0 is an anchor, other numbers are side pools.
    pub fn bytes(id: u32, name: &str, pages: u64, segments: &[u64]) -> PoolSpec {
        PoolSpec {
            id,
            name: name.to_owned(),
            layout: "page_first".to_owned(),
            role: if id == 0 { PoolRole::Anchor } else { PoolRole::Side },
            logical: false,
            dtype: Dtype::Bytes,
            pages,
            page_tokens: 16,
            layers: 0,
            segments: segments.to_vec(),
            components: Vec::new(),
            seal: false,
            memory_kind: MemoryKind::Host.raw(),
            hit_policy: HitPolicy::AllPages.raw(),
            trailing_pages: 0,
            block_pages: 0,
            group_pages: 0,
            indices_from_pool: None,
            gap: 0,
            last_segment_apart: false,
        }
    }

    /// An anchor that owns page indices and no bytes.
    pub fn logical(pages: u64) -> PoolSpec {
        PoolSpec { logical: true, ..PoolSpec::bytes(0, "kv", pages, &[]) }
    }

    /// A pool of keys and values in one of the field's layouts: `layer_first`, `page_first`, `page_first_direct` or `page_head`.
    ///
    /// # Panics
    /// For another layout, or a dtype without an element size.
    pub fn kv(id: u32, name: &str, layout: &str, shape: KvShape) -> PoolSpec {
        let element = match shape.dtype {
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::F32 => 4,
            Dtype::F8E4M3 | Dtype::F8E5M2 => 1,
            Dtype::Bytes => panic!("a kv pool needs an element type"),
        };
        let [tokens, layers, heads, dim] =
            [shape.page_tokens, shape.layers, shape.heads, shape.head_dim].map(u64::from);
        let (row, head) = (heads * dim * element, dim * element);
        // Per layer within its segment: offset, run length, stride, count.
        let by_layer = |layer: u64| match layout {
            "layer_first" => (0, tokens * row, 0, 1),
            "page_first" => (layer * row, row, layers * row, tokens),
            "page_first_direct" => (layer * tokens * row, tokens * row, 0, 1),
            "page_head" => (layer * head, head, layers * head, heads * tokens),
            other => panic!("layout {other} is none of layer_first, page_first, page_first_direct, page_head"),
        };
        let per_layer = layout == "layer_first";
        let planes = if per_layer { 2 * layers } else { 2 };
        let mut spec =
            PoolSpec::bytes(id, name, shape.pages, &vec![layers * tokens * row * 2 / planes; planes as usize]);
        for (plane, kind) in [(0, ComponentKind::K), (1, ComponentKind::V)] {
            for layer in 0..layers {
                let (offset, run_len, run_stride, run_count) = by_layer(layer);
                let segment = if per_layer { plane * layers + layer } else { plane };
                spec.components.push(v0_1::Component {
                    layer: layer as u32,
                    kind: kind.raw(),
                    segment: segment as u32,
                    reserved: 0,
                    offset,
                    run_len,
                    run_stride,
                    run_count,
                });
            }
        }
        PoolSpec {
            layout: layout.to_owned(),
            dtype: shape.dtype,
            page_tokens: shape.page_tokens,
            layers: shape.layers,
            ..spec
        }
    }

    /// Adds the host's seal as the last segment.
    pub fn with_seal(mut self, bytes: u64) -> PoolSpec {
        self.segments.push(bytes);
        self.seal = true;
        self
    }
    /// Needs the last pages of a prefix only.
    pub fn trailing(mut self, pages: u32) -> PoolSpec {
        self.hit_policy = HitPolicy::TrailingPages.raw();
        self.trailing_pages = pages;
        self
    }
    /// Whole groups of keys that each stand for a block of the anchor's pages.
    pub fn block_groups(mut self, block_pages: u32, group_pages: u32) -> PoolSpec {
        self.hit_policy = HitPolicy::BlockGroups.raw();
        self.block_pages = block_pages;
        self.group_pages = group_pages;
        self
    }
}

/// Where each segment lies, and how long the regions are, from `start` on in the first one.
fn plan(spec: &PoolSpec, start: u64) -> (Vec<Plane>, Vec<u64>) {
    let mut lens = vec![start];
    let mut planes = Vec::new();
    for (index, len) in spec.segments.iter().enumerate() {
        if spec.last_segment_apart && index > 0 && index + 1 == spec.segments.len() {
            lens.push(0);
        }
        let region = lens.len() - 1;
        let stride = len + spec.gap;
        planes.push(Plane { region, offset: lens[region], stride, len: *len });
        lens[region] += stride * spec.pages;
    }
    (planes, lens)
}

/// A memfd, mapped between two pages that nobody may touch: an access beyond its ends is a fault of the process.
#[derive(Debug)]
struct Memory {
    fd: OwnedFd,
    base: *mut u8,
    len: usize,
    reserved: (*mut c_void, usize),
}

// SAFETY: the mapping is shared memory like any heap; who touches which page when is ruled by the boundary.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`.
unsafe impl Sync for Memory {}

impl Memory {
    #[allow(clippy::expect_used, reason = "a helper of tests: without memory there is no test")]
    fn new(len: u64) -> Memory {
        let fd = memfd_create("kvdock-mock-pool", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&fd, len).expect("memory of that size");
        let page = rustix::param::page_size();
        let reserved_len = (len as usize).next_multiple_of(page) + 2 * page;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let reserved = unsafe {
            mmap_anonymous(std::ptr::null_mut(), reserved_len, ProtFlags::empty(), MapFlags::PRIVATE)
                .expect("a range of addresses")
        };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the place lies inside of the range that was just reserved, and nobody else knows it.
        let base =
            unsafe { mmap(reserved.byte_add(page), len as usize, protection, flags, &fd, 0) }.expect("a mapping");
        Memory { fd, base: base.cast(), len: len as usize, reserved: (reserved, reserved_len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: address and length are what was reserved; the last holder is gone.
        let _ = unsafe { munmap(self.reserved.0, self.reserved.1) };
    }
}

/// Where the pieces of a segment lie: page `i` has it at `base of region + offset + i * stride`.
#[derive(Debug, Clone, Copy)]
struct Plane {
    region: usize,
    offset: u64,
    stride: u64,
    len: u64,
}

/// A pool in memfds: plane after plane, each segment of page `i` at `i * stride` of its plane. Cheap to clone; the memory lives until the
/// last holder is gone, and an instance holds its pools until it is closed.
#[derive(Debug, Clone)]
pub struct MockPool {
    spec: Arc<PoolSpec>,
    regions: Vec<Arc<Memory>>,
    planes: Arc<[Plane]>,
}

impl MockPool {
    /// Makes a pool.
    ///
    /// # Panics
    /// When the system has no memory for it.
    pub fn new(spec: PoolSpec) -> MockPool {
        let (planes, lens) = plan(&spec, 0);
        let regions = lens.iter().filter(|len| **len > 0).map(|len| Arc::new(Memory::new(*len))).collect();
        MockPool { spec: Arc::new(spec), regions, planes: planes.into() }
    }

    /// Makes pools that lie one after the other in one region.
    ///
    /// # Panics
    /// When the system has no memory for them, or one wants its last segment apart.
    pub fn in_one_region(specs: &[PoolSpec]) -> Vec<MockPool> {
        let mut end = 0;
        let mut planned = Vec::new();
        for spec in specs {
            assert!(!spec.last_segment_apart, "pools in one region have no segment apart");
            let (planes, lens) = plan(spec, end);
            end = lens[0];
            planned.push(planes);
        }
        let memory = Arc::new(Memory::new(end));
        let pool = |(spec, planes): (&PoolSpec, Vec<Plane>)| MockPool {
            spec: Arc::new(spec.clone()),
            regions: vec![memory.clone()],
            planes: planes.into(),
        };
        specs.iter().zip(planned).map(pool).collect()
    }

    /// Another pool that names the same bytes.
    pub fn same_bytes(&self, id: u32, name: &str) -> MockPool {
        let spec = PoolSpec { id, name: name.to_owned(), role: PoolRole::Side, ..(*self.spec).clone() };
        MockPool { spec: Arc::new(spec), ..self.clone() }
    }

    /// All bytes of its regions.
    pub fn snapshot(&self) -> Vec<Vec<u8>> {
        let bytes = |memory: &Arc<Memory>| {
            // SAFETY: the mapping has these bytes; tests look at them only while no call is in flight on them.
            unsafe { std::slice::from_raw_parts(memory.base, memory.len) }.to_vec()
        };
        self.regions.iter().map(bytes).collect()
    }

    /// Says in words which byte outside of the pages `except` differs from a snapshot, the first one.
    pub fn difference(&self, snapshot: &[Vec<u8>], except: &[u32]) -> Option<String> {
        let now = self.snapshot();
        now.iter().zip(snapshot).enumerate().find_map(|(region, (now, before))| {
            let mut differing = (0..now.len()).filter(|at| now[*at] != before[*at]);
            differing.find_map(|at| {
                let place = self.place(region, at as u64);
                match place {
                    Some((page, _, _)) if except.contains(&page) => None,
                    Some((page, segment, byte)) => {
                        Some(format!("byte {byte} of segment {segment} of page {page} has changed"))
                    }
                    None => Some(format!("byte {at} of region {region}, which belongs to no page, has changed")),
                }
            })
        })
    }

    /// The page, segment and byte that a byte of a region belongs to.
    fn place(&self, region: usize, at: u64) -> Option<(u32, usize, u64)> {
        self.planes.iter().enumerate().filter(|(_, plane)| plane.region == region).find_map(|(segment, plane)| {
            let from = at.checked_sub(plane.offset)?;
            let (page, byte) = (from / plane.stride.max(1), from % plane.stride.max(1));
            (page < self.spec.pages && byte < plane.len).then_some((page as u32, segment, byte))
        })
    }

    /// What it is made of.
    pub fn spec(&self) -> &PoolSpec {
        &self.spec
    }
    /// Number of the pool.
    pub fn id(&self) -> u32 {
        self.spec.id
    }
    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.spec.segments.iter().sum::<u64>() as usize
    }

    fn pieces(&self, page: u32) -> impl Iterator<Item = (*mut u8, usize)> {
        assert!(u64::from(page) < self.spec.pages, "page {page} of {}", self.spec.pages);
        self.planes.iter().map(move |plane| {
            let offset = plane.offset + u64::from(page) * plane.stride;
            (self.regions[plane.region].base.wrapping_add(offset as usize), plane.len as usize)
        })
    }

    /// Bytes of a page, segment after segment.
    ///
    /// # Panics
    /// When there is no such page.
    pub fn read(&self, page: u32) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.page_bytes());
        for (piece, len) in self.pieces(page) {
            // SAFETY: within the mapping; tests read pages only while no call is in flight on them.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(piece, len) });
        }
        bytes
    }

    /// Bytes of a part of a page, run after run. Other parts of the page may be written meanwhile.
    ///
    /// # Panics
    /// When there is no such page or segment.
    pub fn read_component(&self, page: u32, component: &v0_1::Component) -> Vec<u8> {
        let (piece, len) = self.pieces(page).nth(component.segment as usize).unwrap_or((std::ptr::null_mut(), 0));
        let mut bytes = Vec::new();
        for run in 0..component.run_count {
            let start = (component.offset + run * component.run_stride) as usize;
            assert!(start + component.run_len as usize <= len, "the component lies in its segment");
            // SAFETY: within the mapping. Volatile, because a plugin that is wrong may be writing here.
            bytes
                .extend((start..start + component.run_len as usize).map(|at| unsafe { piece.add(at).read_volatile() }));
        }
        bytes
    }

    /// Writes the bytes of a page.
    ///
    /// # Panics
    /// When there is no such page, or the length is not the page's.
    pub fn write(&self, page: u32, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.page_bytes(), "bytes of a page");
        let mut rest = bytes;
        for (piece, len) in self.pieces(page) {
            let (head, tail) = rest.split_at(len);
            // SAFETY: within the mapping; tests write pages only while no call is in flight on them.
            unsafe { std::ptr::copy_nonoverlapping(head.as_ptr(), piece, len) };
            rest = tail;
        }
    }

    /// Writes bytes from byte `offset` of a page on, through its segments; what lies beyond the page is left out.
    ///
    /// # Panics
    /// When there is no such page.
    pub fn write_at(&self, page: u32, offset: usize, bytes: &[u8]) {
        let mut at = 0;
        for (piece, len) in self.pieces(page) {
            let (from, to) = (offset.max(at), (offset + bytes.len()).min(at + len));
            if from < to {
                let part = &bytes[from - offset..to - offset];
                // SAFETY: within the mapping, as above.
                unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), piece.wrapping_add(from - at), part.len()) };
            }
            at += len;
        }
    }

    /// Reads bytes from byte `offset` of a page on, as [`MockPool::write_at`] writes them.
    ///
    /// # Panics
    /// When there is no such page.
    pub fn read_at(&self, page: u32, offset: usize, bytes: &mut [u8]) {
        let mut at = 0;
        for (piece, len) in self.pieces(page) {
            let (from, to) = (offset.max(at), (offset + bytes.len()).min(at + len));
            if from < to {
                let part = &mut bytes[from - offset..to - offset];
                // SAFETY: within the mapping, as in `read`.
                unsafe { std::ptr::copy_nonoverlapping(piece.wrapping_add(from - at), part.as_mut_ptr(), part.len()) };
            }
            at += len;
        }
    }

    /// The pattern for a seed: bytes that no other seed and no shifted position has.
    pub fn pattern(&self, seed: u64) -> Vec<u8> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d;
        let mut bytes = Vec::with_capacity(self.page_bytes() + 8);
        while bytes.len() < self.page_bytes() {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bytes.extend_from_slice(&state.to_le_bytes());
        }
        bytes.truncate(self.page_bytes());
        bytes
    }
    /// Fills a page with the pattern of a seed.
    pub fn fill(&self, page: u32, seed: u64) {
        self.write(page, &self.pattern(seed));
    }
    /// Whether a page holds the pattern of a seed.
    pub fn holds(&self, page: u32, seed: u64) -> bool {
        self.read(page) == self.pattern(seed)
    }
    /// Sets every byte of a page to 0.
    pub fn wipe(&self, page: u32) {
        self.write(page, &vec![0; self.page_bytes()]);
    }

    /// Calls `body` with the description that crosses the boundary.
    pub(crate) fn describe<T>(&self, body: impl FnOnce(&PoolDesc) -> T) -> T {
        let spec = &*self.spec;
        let region = |memory: &Arc<Memory>| v0_1::Region {
            base: memory.base.cast::<c_void>(),
            len: memory.len as u64,
            memory_kind: spec.memory_kind,
            fd: memory.fd.as_raw_fd(),
            fd_offset: 0,
            device_uuid: [0; 16],
            flags: 0,
        };
        let regions: Vec<v0_1::Region> = self.regions.iter().map(region).collect();
        let segment = |plane: &Plane| v0_1::Segment {
            region: plane.region as u32,
            reserved: 0,
            offset: plane.offset,
            stride: plane.stride,
            len: plane.len,
        };
        let segments: Vec<v0_1::Segment> = self.planes.iter().map(segment).collect();
        body(&PoolDesc {
            pool: spec.id,
            role: spec.role.raw(),
            logical: u32::from(spec.logical),
            dtype: spec.dtype.raw(),
            name: spec.name.as_str().into(),
            layout: spec.layout.as_str().into(),
            page_count: spec.pages,
            page_tokens: spec.page_tokens,
            layers: spec.layers,
            page_bytes: self.page_bytes() as u64,
            regions: regions.as_ptr(),
            region_count: regions.len() as u64,
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
            replicated: 0,
            reserved: 0,
        })
    }
}
