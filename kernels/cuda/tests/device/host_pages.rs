//! Host pages in every layout, and pools to copy them from.

use std::sync::Arc;

use kvdock_kernels::{Device, HostPage, KvDtype, KvPool, KvSpec, SeqSpan};

use super::rig::floats;

pub fn spec(dtype: KvDtype) -> KvSpec {
    KvSpec { layers: 3, kv_heads: 2, head_dim_k: 24, head_dim_v: 10, page_tokens: 5, pages: 9, dtype }
}

pub const LAYOUTS: [&str; 4] = ["layer_first", "page_first", "page_first_direct", "page_head"];

/// Host pages in one of the host pool's layouts, keys and values apart.
pub struct Host {
    spec: KvSpec,
    pub layout: &'static str,
    pages: usize,
    pub k: Vec<u8>,
    pub v: Vec<u8>,
}

impl Host {
    pub fn new(spec: KvSpec, layout: &'static str, pages: usize) -> Self {
        let filled = |bytes| vec![0xEE; pages * bytes];
        Self { spec, layout, pages, k: filled(spec.page_k_bytes()), v: filled(spec.page_v_bytes()) }
    }

    /// Bytes from page to page, layer to layer, head to head, token to token, for rows of `row` bytes.
    fn strides(&self, row: usize) -> [usize; 4] {
        let KvSpec { layers, kv_heads: heads, page_tokens: tokens, .. } = self.spec;
        match self.layout {
            "layer_first" => [tokens * heads * row, self.pages * tokens * heads * row, row, heads * row],
            "page_first" => [tokens * layers * heads * row, heads * row, row, layers * heads * row],
            "page_first_direct" => [tokens * layers * heads * row, tokens * heads * row, row, heads * row],
            _ => [heads * tokens * layers * row, row, tokens * layers * row, layers * row],
        }
    }

    pub fn page(&mut self, page: usize) -> HostPage {
        let bytes = self.spec.dtype.bytes();
        let [kp, kl, kh, kt] = self.strides(self.spec.head_dim_k * bytes);
        let [vp, vl, vh, vt] = self.strides(self.spec.head_dim_v * bytes);
        HostPage {
            k: self.k.as_mut_ptr().wrapping_add(page * kp),
            v: self.v.as_mut_ptr().wrapping_add(page * vp),
            k_layer_stride: kl,
            k_head_stride: kh,
            k_token_stride: kt,
            v_layer_stride: vl,
            v_head_stride: vh,
            v_token_stride: vt,
        }
    }

    pub fn pin(&mut self, pool: &dyn KvPool) {
        for part in [&mut self.k, &mut self.v] {
            // SAFETY: the tests drop the pool before the host's pages.
            assert!(unsafe { pool.pin_host(part.as_mut_ptr(), part.len()) }.unwrap());
        }
    }
}

/// A pool whose pages hold numbers, which nobody has waited for.
pub fn filled(device: &dyn Device, spec: KvSpec) -> Arc<dyn KvPool> {
    let pool = device.alloc_kv_pool(spec).unwrap();
    let pages: Vec<u32> = (0..spec.pages as u32).collect();
    let rows = spec.pages * spec.page_tokens;
    let plan = device.plan(&*pool, &[SeqSpan { start: 0, len: rows as u32, pages: &pages }]).unwrap();
    for layer in 0..spec.layers {
        let k = device.upload(&floats(layer as u64, rows * spec.kv_heads * spec.head_dim_k)).unwrap();
        let v = device.upload(&floats(100 + layer as u64, rows * spec.kv_heads * spec.head_dim_v)).unwrap();
        device.kv_write(&*pool, layer, &plan, &k, &v).unwrap();
    }
    pool
}
