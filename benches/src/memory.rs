//! Copies between the device pool and host pages beside a plain copy of the same bytes.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{Device, HostPage, KvDtype, KvSpec};

use crate::Bench;
use crate::row::{Better, Goal, Report, Row};
use crate::sample::side_by_side;

/// Pages of one sample: more than the last level of cache holds.
const PAGES: usize = 256;

/// Adds the rows.
///
/// # Errors
/// When the pool can't be made.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let name = |way: &str| format!("page copy, {way} (GB/s), peer memory copy");
    let (out, back) = (name("device to host"), name("host to device"));
    if !bench.wants(&out) && !bench.wants(&back) {
        return Ok(());
    }
    // The small model's pages.
    let spec = KvSpec {
        layers: 30,
        kv_heads: 3,
        head_dim_k: 64,
        head_dim_v: 64,
        page_tokens: 16,
        pages: PAGES,
        dtype: KvDtype::F16,
    };
    let device = CpuDevice::new(bench.threads).context("the CPU device")?;
    let pool = device.alloc_kv_pool(spec).context("the KV pool")?;
    let bytes = spec.page_bytes() * PAGES;
    let mut host = vec![1u8; bytes];
    let mut plain = vec![2u8; bytes];
    let source = vec![3u8; bytes];
    let rate = |start: Instant| bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
    for (name, to_host) in [(out, true), (back, false)] {
        let ours = || {
            let start = Instant::now();
            for page in 0..PAGES {
                let place = host_page(&spec, &mut host, page);
                // SAFETY: the strides stay within the page's part of `host`, which nothing else uses; nothing uses
                // the pool.
                unsafe {
                    if to_host {
                        pool.copy_page_out(page as u32, &place)
                    } else {
                        pool.copy_page_in(page as u32, &place)
                    }
                }
                .context("the copy")?;
            }
            Ok(rate(start))
        };
        let peer = || {
            let start = Instant::now();
            plain.copy_from_slice(black_box(&source));
            black_box(&mut plain);
            Ok(rate(start))
        };
        let turns = side_by_side(bench.rounds, ours, peer)?;
        report.add(Row::new(name, turns, Better::More, Goal::None))?;
    }
    Ok(())
}

/// Page `page` of a host pool in the layout `page_first`: tokens, then layers, then heads.
fn host_page(spec: &KvSpec, host: &mut [u8], page: usize) -> HostPage {
    let head = spec.head_dim_k * spec.dtype.bytes();
    let layer = spec.kv_heads * head;
    let token = spec.layers * layer;
    let k = host.as_mut_ptr().wrapping_add(page * spec.page_bytes());
    HostPage {
        k,
        v: k.wrapping_add(spec.page_k_bytes()),
        k_layer_stride: layer,
        k_head_stride: head,
        k_token_stride: token,
        v_layer_stride: layer,
        v_head_stride: head,
        v_token_stride: token,
    }
}
