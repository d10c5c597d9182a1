//! The CPU's KV pool.
//!
//! Values lie `[layer][page][head][token][d]`. Keys lie `[layer][page][head][token / 16][d][16]`,
//! so that attention reads one element of 16 keys at once; if a page is no multiple of 16 tokens,
//! they lie like values, and attention gathers. Results do not depend on which.

use std::any::Any;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use parking_lot::RwLock;

use super::key_groups::copy_group;
use super::memory::Region;
use super::prefault::Prefault;
use super::simd::{LANES, Lanes, prefetch};
use crate::error::KernelError;
use crate::kv::{HostPage, KvDtype, KvPool, KvSpec};

/// An element type of the pool.
pub(super) trait KvElement: Copy + Send + Sync + 'static {
    /// Rounds to nearest, halves to even. Both are equally long.
    fn round(from: &[f32], to: &mut [Self]);
    fn to_f32(self) -> f32;
    /// # Safety
    /// 16 elements at `p` are readable.
    unsafe fn load<S: Lanes>(s: S, p: *const Self) -> S::F;
}

macro_rules! kv_element {
    ($name:ident, $round:expr, $to:expr, $load:ident, $raw:ty) => {
        impl KvElement for $name {
            fn round(from: &[f32], to: &mut [Self]) {
                $round(to, from)
            }
            #[inline(always)]
            fn to_f32(self) -> f32 {
                $to(self)
            }
            #[inline(always)]
            unsafe fn load<S: Lanes>(s: S, p: *const Self) -> S::F {
                // SAFETY: the caller promises 16 elements; both types have the same layout.
                unsafe { s.$load(p.cast::<$raw>()) }
            }
        }
    };
}

kv_element!(f16, HalfFloatSliceExt::convert_from_f32_slice, f16::to_f32, load_f16, u16);
kv_element!(bf16, HalfFloatSliceExt::convert_from_f32_slice, bf16::to_f32, load_bf16, u16);
kv_element!(f32, <[f32]>::copy_from_slice, std::convert::identity, load, f32);

/// Calls `$body` with the type `$E` bound to the [`KvElement`] of `$dtype`.
macro_rules! with_kv_element {
    ($dtype:expr, $E:ident => $body:expr) => {
        match $dtype {
            $crate::kv::KvDtype::F16 => {
                type $E = half::f16;
                $body
            }
            $crate::kv::KvDtype::BF16 => {
                type $E = half::bf16;
                $body
            }
            $crate::kv::KvDtype::F32 => {
                type $E = f32;
                $body
            }
        }
    };
}
pub(super) use with_kv_element;

/// Bytes of a pool that get memory right after it is made: its first pages, in all layers. Pools of less than an eighth of that do without.
const PREFAULT_BYTES: usize = 128 << 20;

/// Keys and values in memory of this process.
pub(super) struct CpuKvPool {
    /// Goes before the regions do.
    _prefault: Option<Prefault>,
    spec: KvSpec,
    keys: Region,
    values: Region,
    /// Held for writing while new keys and values are written, for reading while attention
    /// reads, so that operations called from several threads cannot race. Copies of pages do
    /// not take it; their callers promise to keep to pages that no operation touches.
    pub(super) in_use: RwLock<()>,
}

impl CpuKvPool {
    pub(super) fn new(spec: KvSpec) -> Result<Self, KernelError> {
        let (key_bytes, value_bytes) = spec.checked_bytes()?;
        let keys = Region::zeroed(key_bytes, "the keys of a KV pool")?;
        let values = Region::zeroed(value_bytes, "the values of a KV pool")?;
        let large = key_bytes + value_bytes >= PREFAULT_BYTES / 8;
        // SAFETY: the regions go after what is made here.
        let prefault = large.then(|| unsafe { Prefault::start(first_pages(&spec, &keys, &values)) });
        Ok(Self { _prefault: prefault, spec, keys, values, in_use: RwLock::new(()) })
    }

    /// Whether keys lie in groups of 16 tokens.
    pub(super) fn keys_in_groups(&self) -> bool {
        self.spec.page_tokens.is_multiple_of(LANES)
    }

    fn block(&self, layer: usize, page: u32, head: usize) -> usize {
        (layer * self.spec.pages + page as usize) * self.spec.kv_heads + head
    }

    /// First key element of a head of a page. E is the pool's element type; indices are in range.
    pub(super) fn keys<E: KvElement>(&self, layer: usize, page: u32, head: usize) -> *mut E {
        let elements = self.spec.page_tokens * self.spec.head_dim_k;
        let at = self.block(layer, page, head) * elements;
        debug_assert!((at + elements) * size_of::<E>() <= self.keys.len());
        self.keys.as_ptr().cast::<E>().wrapping_add(at)
    }

    /// First value element of a head of a page. E is the pool's element type; indices are in
    /// range.
    pub(super) fn values<E: KvElement>(&self, layer: usize, page: u32, head: usize) -> *mut E {
        let elements = self.spec.page_tokens * self.spec.head_dim_v;
        let at = self.block(layer, page, head) * elements;
        debug_assert!((at + elements) * size_of::<E>() <= self.values.len());
        self.values.as_ptr().cast::<E>().wrapping_add(at)
    }

    /// Rounds one token's key and value of one head and stores them.
    ///
    /// # Safety
    ///
    /// E is the pool's element type, layer, page, head and token (within the page) are in
    /// range, `k` and `v` are a head long, and nothing else uses this token's memory meanwhile.
    pub(super) unsafe fn put<E: KvElement>(
        &self,
        layer: usize,
        page: u32,
        head: usize,
        token: usize,
        k: &[f32],
        v: &[f32],
    ) {
        let (dk, dv) = (self.spec.head_dim_k, self.spec.head_dim_v);
        let keys = self.keys::<E>(layer, page, head);
        let values = self.values::<E>(layer, page, head);
        // SAFETY: all offsets are within the page's block of the head, whose memory is zero or
        // elements, and which nothing else uses.
        unsafe {
            if self.keys_in_groups() {
                let group = keys.add(token / LANES * LANES * dk + token % LANES);
                let mut rounded = [*group; 64];
                for (i, k) in k.chunks(64).enumerate() {
                    E::round(k, &mut rounded[..k.len()]);
                    for (d, x) in rounded[..k.len()].iter().enumerate() {
                        *group.add((64 * i + d) * LANES) = *x;
                    }
                }
            } else {
                E::round(k, std::slice::from_raw_parts_mut(keys.add(token * dk), dk));
            }
            E::round(v, std::slice::from_raw_parts_mut(values.add(token * dv), dv));
        }
    }

    fn check(&self, op: &'static str, page: u32, layer: usize) -> Result<(), KernelError> {
        if page as usize >= self.spec.pages {
            let reason = format!("page {page}, but the pool has {}", self.spec.pages);
            return Err(KernelError::Page { op, reason });
        }
        if layer >= self.spec.layers {
            let reason = format!("layer {layer}, but the pool has {}", self.spec.layers);
            return Err(KernelError::Page { op, reason });
        }
        Ok(())
    }

    /// Copies a layer of a page, out of the pool or into it.
    ///
    /// # Safety
    ///
    /// As `copy_layer_out` or `copy_layer_in`; page and layer are in range; `W` is as large as an
    /// element.
    unsafe fn copy<W: Copy, const OUT: bool>(&self, page: u32, layer: usize, host: &HostPage) {
        let KvSpec { head_dim_k: dk, head_dim_v: dv, page_tokens, .. } = self.spec;
        if !OUT && layer + 1 < self.spec.layers {
            // Rows of a page lie apart on the host, and layers in the pool, so the processor does not foresee what comes next, on either side.
            for head in 0..self.spec.kv_heads {
                let host_k = host.k.wrapping_add((layer + 1) * host.k_layer_stride + head * host.k_head_stride);
                let host_v = host.v.wrapping_add((layer + 1) * host.v_layer_stride + head * host.v_head_stride);
                let block = self.block(layer + 1, page, head) * page_tokens * size_of::<W>();
                (0..page_tokens * dk * size_of::<W>())
                    .step_by(64)
                    .for_each(|at| prefetch(self.keys.as_ptr(), block * dk + at));
                (0..page_tokens * dv * size_of::<W>())
                    .step_by(64)
                    .for_each(|at| prefetch(self.values.as_ptr(), block * dv + at));
                for token in 0..page_tokens {
                    let (k, v) = (token * host.k_token_stride, token * host.v_token_stride);
                    (0..dk * size_of::<W>()).step_by(64).for_each(|at| prefetch(host_k, k + at));
                    (0..dv * size_of::<W>()).step_by(64).for_each(|at| prefetch(host_v, v + at));
                }
            }
        }
        for head in 0..self.spec.kv_heads {
            let block = self.block(layer, page, head);
            let keys = self.keys.as_ptr().cast::<W>().wrapping_add(block * page_tokens * dk);
            let values = self.values.as_ptr().cast::<W>().wrapping_add(block * page_tokens * dv);
            // SAFETY: pool addresses lie within the page; host addresses are those that the
            // caller vouches for.
            unsafe {
                let host_k = host.k.add(layer * host.k_layer_stride + head * host.k_head_stride);
                let host_v = host.v.add(layer * host.v_layer_stride + head * host.v_head_stride);
                if self.keys_in_groups() {
                    for first in (0..page_tokens).step_by(LANES) {
                        let group = keys.add(first * dk);
                        let rows = host_k.add(first * host.k_token_stride);
                        copy_group::<W, OUT>(group, dk, rows, host.k_token_stride);
                    }
                } else {
                    copy_rows::<W, OUT>(keys, page_tokens, dk, host_k, host.k_token_stride);
                }
                copy_rows::<W, OUT>(values, page_tokens, dv, host_v, host.v_token_stride);
            }
        }
    }
}

/// Where the first pages lie, layer by layer.
fn first_pages<'a>(spec: &KvSpec, keys: &'a Region, values: &'a Region) -> Vec<(&'a Region, std::ops::Range<usize>)> {
    let pages = (PREFAULT_BYTES / spec.page_bytes().max(1)).min(spec.pages);
    let sides = [(keys, keys.len() / spec.layers), (values, values.len() / spec.layers)];
    let of_layer =
        |layer: usize| sides.map(|(region, bytes)| (region, layer * bytes..layer * bytes + bytes / spec.pages * pages));
    (0..spec.layers).flat_map(of_layer).collect()
}

/// Copies `tokens` rows of `dim` elements that lie in a row in the pool.
///
/// # Safety
/// Both sides are valid as far as the strides reach.
unsafe fn copy_rows<W: Copy, const OUT: bool>(pool: *mut W, tokens: usize, dim: usize, host: *mut u8, stride: usize) {
    let row_bytes = dim * size_of::<W>();
    // SAFETY: as promised; copies of bytes need no alignment. Pool and host do not overlap, as
    // the pool's memory is its own.
    unsafe {
        let (rows, bytes) = if stride == row_bytes { (1, tokens * row_bytes) } else { (tokens, row_bytes) };
        for row in 0..rows {
            let pool = pool.cast::<u8>().add(row * row_bytes);
            let host = host.add(row * stride);
            if OUT {
                std::ptr::copy_nonoverlapping(pool, host, bytes);
            } else {
                std::ptr::copy_nonoverlapping(host, pool, bytes);
            }
        }
    }
}

impl KvPool for CpuKvPool {
    fn spec(&self) -> &KvSpec {
        &self.spec
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    unsafe fn copy_layer_out(&self, page: u32, layer: usize, dst: &HostPage) -> Result<(), KernelError> {
        self.check("copy_layer_out", page, layer)?;
        // SAFETY: in range; the rest is the caller's promise. Only the size of an element counts.
        unsafe {
            match self.spec.dtype {
                KvDtype::F16 | KvDtype::BF16 => self.copy::<u16, true>(page, layer, dst),
                KvDtype::F32 => self.copy::<u32, true>(page, layer, dst),
            }
        }
        Ok(())
    }

    unsafe fn copy_layer_in(&self, page: u32, layer: usize, src: &HostPage) -> Result<(), KernelError> {
        self.check("copy_layer_in", page, layer)?;
        // SAFETY: as above.
        unsafe {
            match self.spec.dtype {
                KvDtype::F16 | KvDtype::BF16 => self.copy::<u16, false>(page, layer, src),
                KvDtype::F32 => self.copy::<u32, false>(page, layer, src),
            }
        }
        Ok(())
    }
}
