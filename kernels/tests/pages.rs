//! Exchange of pages between the pool and host memory.

#![allow(clippy::unwrap_used)]

mod support;

use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{AttentionSpec, Device, HostPage, KvDtype, KvPool, KvSpec, SeqSpan};
use support::{Sequence, bits, numbers};

fn spec(page_tokens: usize, dtype: KvDtype) -> KvSpec {
    KvSpec { layers: 3, kv_heads: 2, head_dim_k: 24, head_dim_v: 10, page_tokens, pages: 5, dtype }
}

/// A host buffer of `pages` pages in one of SGLang's layouts, keys and values apart.
struct Host {
    k: Vec<u8>,
    v: Vec<u8>,
    spec: KvSpec,
    layout: &'static str,
    pages: usize,
}

impl Host {
    fn new(spec: KvSpec, layout: &'static str, pages: usize) -> Self {
        Self {
            k: vec![0xEE; pages * spec.page_k_bytes()],
            v: vec![0xEE; pages * spec.page_v_bytes()],
            spec,
            layout,
            pages,
        }
    }

    /// Strides of (page, layer, head, token) for elements of `row` bytes.
    fn strides(&self, row: usize) -> [usize; 4] {
        let KvSpec { layers, kv_heads, page_tokens, .. } = self.spec;
        let (l, h, t) = (layers * row, kv_heads * row, page_tokens * row);
        match self.layout {
            "layer_first" => [t * kv_heads, self.pages * t * kv_heads, row, h],
            "page_first" => [t * layers * kv_heads, h, row, h * layers],
            "page_first_direct" => [t * layers * kv_heads, t * kv_heads, row, h],
            "page_head" => [t * layers * kv_heads, row, t * layers, l],
            other => panic!("{other}"),
        }
    }

    fn page(&mut self, page: usize) -> HostPage {
        let bytes = self.spec.dtype.bytes();
        let [kp, kl, kh, kt] = self.strides(self.spec.head_dim_k * bytes);
        let [vp, vl, vh, vt] = self.strides(self.spec.head_dim_v * bytes);
        HostPage {
            k: self.k[page * kp..].as_mut_ptr(),
            v: self.v[page * vp..].as_mut_ptr(),
            k_layer_stride: kl,
            k_head_stride: kh,
            k_token_stride: kt,
            v_layer_stride: vl,
            v_head_stride: vh,
            v_token_stride: vt,
        }
    }

    /// The bytes of a row of keys (or values).
    fn row(&self, keys: bool, page: usize, layer: usize, head: usize, token: usize) -> &[u8] {
        let dim = if keys { self.spec.head_dim_k } else { self.spec.head_dim_v };
        let row = dim * self.spec.dtype.bytes();
        let [p, l, h, t] = self.strides(row);
        let at = page * p + layer * l + head * h + token * t;
        &(if keys { &self.k } else { &self.v })[at..][..row]
    }
}

fn encode(x: &[f32], dtype: KvDtype) -> Vec<u8> {
    x.iter()
        .flat_map(|x| match dtype {
            KvDtype::F16 => half::f16::from_f32(*x).to_le_bytes().to_vec(),
            KvDtype::BF16 => half::bf16::from_f32(*x).to_le_bytes().to_vec(),
            KvDtype::F32 => x.to_le_bytes().to_vec(),
        })
        .collect()
}

/// Fills all pages through `kv_write`; returns keys and values by layer, `[token][head][d]`.
fn fill(device: &CpuDevice, pool: &dyn KvPool) -> Vec<(Vec<f32>, Vec<f32>)> {
    let s = pool.spec();
    let tokens = s.pages * s.page_tokens;
    let pages: Vec<u32> = (0..s.pages as u32).collect();
    let plan = device.plan(pool, &[SeqSpan { start: 0, len: tokens as u32, pages: &pages }]).unwrap();
    (0..s.layers)
        .map(|layer| {
            let k = numbers(tokens * s.kv_heads * s.head_dim_k, 2 * layer as u64);
            let v = numbers(tokens * s.kv_heads * s.head_dim_v, 2 * layer as u64 + 1);
            let (kb, vb) = (device.upload(&k).unwrap(), device.upload(&v).unwrap());
            device.kv_write(pool, layer, &plan, &kb, &vb).unwrap();
            (k, v)
        })
        .collect()
}

const LAYOUTS: [&str; 4] = ["layer_first", "page_first", "page_first_direct", "page_head"];

#[test]
fn pages_come_out_in_any_layout_and_go_back_in() {
    let device = CpuDevice::new(1).unwrap();
    for dtype in [KvDtype::F16, KvDtype::BF16, KvDtype::F32] {
        for page_tokens in [1, 5, 16, 48] {
            for layout in LAYOUTS {
                let s = spec(page_tokens, dtype);
                let pool = device.alloc_kv_pool(s).unwrap();
                let written = fill(&device, &*pool);
                let mut host = Host::new(s, layout, s.pages);
                for page in 0..s.pages {
                    let to = host.page(page);
                    // SAFETY: the strides are those of the host buffer; nothing else runs.
                    unsafe { pool.copy_page_out(page as u32, &to).unwrap() };
                }
                for (layer, (k, v)) in written.iter().enumerate() {
                    for token in 0..s.pages * page_tokens {
                        for head in 0..s.kv_heads {
                            let row =
                                |x: &[f32], dim: usize| encode(&x[(token * s.kv_heads + head) * dim..][..dim], dtype);
                            let (page, token) = (token / page_tokens, token % page_tokens);
                            let what =
                                format!("{layout} {dtype:?} layer {layer} page {page} token {token} head {head}");
                            assert_eq!(host.row(true, page, layer, head, token), row(k, s.head_dim_k), "{what}");
                            assert_eq!(host.row(false, page, layer, head, token), row(v, s.head_dim_v), "{what}");
                        }
                    }
                }
                // Back in to other pages of another pool, and out again.
                let other = device.alloc_kv_pool(s).unwrap();
                let mut again = Host::new(s, layout, s.pages);
                for page in 0..s.pages {
                    let moved = (s.pages - 1 - page) as u32;
                    let (from, to) = (host.page(page), again.page(page));
                    // SAFETY: as above.
                    unsafe {
                        other.copy_page_in(moved, &from).unwrap();
                        other.copy_page_out(moved, &to).unwrap();
                    }
                }
                assert!(again.k == host.k && again.v == host.v, "{layout} {dtype:?} {page_tokens}");
            }
        }
    }
}

#[test]
fn one_layer_touches_no_other() {
    let device = CpuDevice::new(1).unwrap();
    let s = spec(16, KvDtype::F16);
    let pool = device.alloc_kv_pool(s).unwrap();
    let mut host = Host::new(s, "page_first_direct", 1);
    let mut back = Host::new(s, "page_first_direct", 1);
    let (from, to) = (host.page(0), back.page(0));
    // SAFETY: the strides are those of the host buffers; nothing else runs.
    unsafe {
        pool.copy_layer_in(2, 1, &from).unwrap();
        pool.copy_page_out(2, &to).unwrap();
    }
    let layer = s.page_k_bytes() / s.layers;
    assert!(back.k[..layer].iter().all(|b| *b == 0), "layer 0 was written");
    assert!(back.k[layer..2 * layer].iter().all(|b| *b == 0xEE), "layer 1 was not");
    assert!(back.k[2 * layer..].iter().all(|b| *b == 0), "layer 2 was written");
}

#[test]
fn pages_and_layers_out_of_range_are_refused() {
    let device = CpuDevice::new(1).unwrap();
    let s = spec(16, KvDtype::F16);
    let pool = device.alloc_kv_pool(s).unwrap();
    let mut host = Host::new(s, "layer_first", 1);
    let page = host.page(0);
    // SAFETY: the strides are those of the host buffer; nothing else runs.
    let errors = unsafe { [pool.copy_page_out(5, &page), pool.copy_layer_in(0, 3, &page)] };
    let [page, layer] = errors.map(|e| e.unwrap_err().to_string());
    assert!(page.contains("page 5, but the pool has 5"), "{page}");
    assert!(layer.contains("layer 3, but the pool has 3"), "{layer}");
}

/// A prefix that went to the host and came back, on other pages, attends to the same bits, while
/// other pages are copied by another thread.
#[test]
fn a_restored_prefix_gives_the_same_bits_beside_running_copies() {
    let device = CpuDevice::new(2).unwrap();
    let geometry = KvSpec {
        layers: 1,
        kv_heads: 2,
        head_dim_k: 32,
        head_dim_v: 32,
        page_tokens: 16,
        pages: 40,
        dtype: KvDtype::F16,
    };
    let s = Sequence::new(geometry, 6, 200, 9);
    let expected = s.run(&device, &[200])[160 * 6 * 32..].to_vec();

    let first = device.alloc_kv_pool(geometry).unwrap();
    let pages: Vec<u32> = (0..13).collect();
    let write = |pool: &dyn KvPool, pages: &[u32], from: usize, to: usize| {
        let seq = SeqSpan { start: from as u32, len: (to - from) as u32, pages };
        let plan = device.plan(pool, &[seq]).unwrap();
        let (k, v) =
            (device.upload(&s.k[from * 64..to * 64]).unwrap(), device.upload(&s.v[from * 64..to * 64]).unwrap());
        device.kv_write(pool, 0, &plan, &k, &v).unwrap();
        plan
    };
    write(&*first, &pages, 0, 160);
    let mut host = Host::new(geometry, "page_head", 10);
    let host_pages: Vec<HostPage> = (0..10).map(|p| host.page(p)).collect();
    let second = device.alloc_kv_pool(geometry).unwrap();
    let moved: Vec<u32> = (0..13).map(|p| 30 - 2 * p).collect();
    for (p, page) in host_pages.iter().enumerate() {
        // SAFETY: the strides are those of the host buffer; nothing else runs.
        unsafe {
            first.copy_page_out(p as u32, page).unwrap();
            second.copy_page_in(moved[p], page).unwrap();
        }
    }

    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut own = Host::new(geometry, "layer_first", 1);
            let page = own.page(0);
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                for odd in (31..40).step_by(2) {
                    // SAFETY: the buffer is this thread's own, and no plan uses odd pages.
                    unsafe {
                        second.copy_page_in(odd, &page).unwrap();
                        second.copy_page_out(odd, &page).unwrap();
                    }
                }
            }
        });
        for _ in 0..20 {
            let plan = write(&*second, &moved, 160, 200);
            let q = device.upload(&s.q[160 * 6 * 32..]).unwrap();
            let mut out = device.alloc(expected.len()).unwrap();
            let how = AttentionSpec { heads: 6, scale: s.scale(), window: None, sinks: None };
            device.attention(&*second, 0, &plan, &q, &how, &mut out).unwrap();
            assert_eq!(bits(&support::read(&device, &out, expected.len())), bits(&expected));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}
