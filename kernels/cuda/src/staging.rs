//! Host pages byte by byte: how far they reach, and their copies to and from a dense page.

use std::ops::Range;

use kvdock_kernels::{HostPage, KvSpec};

/// The strides of a host page.
pub(super) fn strides(host: &HostPage) -> [usize; 6] {
    [
        host.k_layer_stride,
        host.k_head_stride,
        host.k_token_stride,
        host.v_layer_stride,
        host.v_head_stride,
        host.v_token_stride,
    ]
}

/// The addresses from a page's first to its last byte, of keys and of values; `None` if they overflow.
pub(super) fn extents(spec: &KvSpec, host: &HostPage) -> Option<[Range<usize>; 2]> {
    let [kl, kh, kt, vl, vh, vt] = strides(host);
    let extent = |base: *mut u8, layer: usize, head: usize, token: usize, dim: usize| {
        let last = (spec.layers - 1)
            .checked_mul(layer)?
            .checked_add((spec.kv_heads - 1).checked_mul(head)?)?
            .checked_add((spec.page_tokens - 1).checked_mul(token)?)?;
        let end = (base as usize).checked_add(last)?.checked_add(dim * spec.dtype.bytes())?;
        Some(base as usize..end)
    };
    Some([extent(host.k, kl, kh, kt, spec.head_dim_k)?, extent(host.v, vl, vh, vt, spec.head_dim_v)?])
}

/// A host page without gaps that begins at `at`: `[layer][head][token][d]`, keys before values.
pub(super) fn dense(spec: &KvSpec, at: *mut u8) -> HostPage {
    let (k_row, v_row) = (spec.head_dim_k * spec.dtype.bytes(), spec.head_dim_v * spec.dtype.bytes());
    HostPage {
        k: at,
        v: at.wrapping_add(spec.page_k_bytes()),
        k_layer_stride: spec.kv_heads * spec.page_tokens * k_row,
        k_head_stride: spec.page_tokens * k_row,
        k_token_stride: k_row,
        v_layer_stride: spec.kv_heads * spec.page_tokens * v_row,
        v_head_stride: spec.page_tokens * v_row,
        v_token_stride: v_row,
    }
}

/// The rows of a layer in a host page: whether it is a key, where it lies from the first byte of keys or values on, and its length.
pub(super) fn rows(spec: &KvSpec, host: &HostPage, layer: usize) -> impl Iterator<Item = (bool, usize, usize)> {
    let [kl, kh, kt, vl, vh, vt] = strides(host);
    let (heads, tokens, size) = (spec.kv_heads, spec.page_tokens, spec.dtype.bytes());
    let (k_len, v_len) = (spec.head_dim_k * size, spec.head_dim_v * size);
    (0..heads).flat_map(move |head| {
        (0..tokens).flat_map(move |token| {
            [(true, layer * kl + head * kh + token * kt, k_len), (false, layer * vl + head * vh + token * vt, v_len)]
        })
    })
}

/// Copies layers of a dense page to a host page.
///
/// # Safety
/// `from` is a whole dense page; every byte of these layers that the strides of `host` reach may be written.
pub(super) unsafe fn scatter(spec: &KvSpec, from: &[u8], host: &HostPage, layers: Range<usize>) {
    let plan = dense(spec, std::ptr::null_mut());
    let values = spec.page_k_bytes();
    for layer in layers {
        for ((is_key, at, len), (_, to, _)) in rows(spec, &plan, layer).zip(rows(spec, host, layer)) {
            let from = &from[if is_key { at } else { values + at }..][..len];
            let to = if is_key { host.k } else { host.v }.wrapping_add(to);
            // SAFETY: the caller's promise; both are different memory.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, len) };
        }
    }
}

/// Copies layers of a host page to a dense page.
///
/// # Safety
/// `to` is as long as a dense page; every byte of these layers that the strides of `host` reach may be read.
pub(super) unsafe fn gather(spec: &KvSpec, host: &HostPage, to: &mut [u8], layers: Range<usize>) {
    let plan = dense(spec, std::ptr::null_mut());
    let values = spec.page_k_bytes();
    for layer in layers {
        for ((is_key, at, len), (_, from, _)) in rows(spec, &plan, layer).zip(rows(spec, host, layer)) {
            let to = &mut to[if is_key { at } else { values + at }..][..len];
            let from = if is_key { host.k } else { host.v }.wrapping_add(from);
            // SAFETY: the caller's promise; both are different memory.
            unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), len) };
        }
    }
}
