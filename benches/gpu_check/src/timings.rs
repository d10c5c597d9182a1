//! How long kernels take, beside what the card can do at most.

use std::time::Instant;

use kvdock_cuda::driver::{Driver, DriverResult};
use kvdock_cuda::{CudaDriver, Search};
use kvdock_kernels::{
    AttentionSpec, Buf, Device, HostPage, KernelError, KvDtype, KvSpec, Projection, SeqSpan, WeightFormat,
};

use super::kernels::{Heads, weight};
use super::table::Table;

/// Heads whose attention is timed.
pub const HEADS: [Heads; 1] = [(KvDtype::BF16, (128, 128), &[4])];

const QUERY_HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const PAGE: usize = 64;

/// Seconds of one of `times` runs, after one that is not counted.
pub fn time(
    device: &dyn Device,
    times: u32,
    mut run: impl FnMut() -> Result<(), KernelError>,
) -> Result<f64, KernelError> {
    run()?;
    device.synchronize()?;
    let began = Instant::now();
    for _ in 0..times {
        run()?;
    }
    device.synchronize()?;
    Ok(began.elapsed().as_secs_f64() / f64::from(times))
}

/// Fills the table.
///
/// # Errors
/// The first call that fails.
pub fn measure(device: &dyn Device, ordinal: usize, table: &mut Table) -> Result<(), String> {
    let limits = limits(ordinal)?;
    table.row("copy on the device, 1 GiB", limits.copy.0, rate(limits.copy.1), None, "");
    table.row("copy to pinned host memory, 256 MiB", limits.out.0, rate(limits.out.1), None, "");
    table.row("copy from pinned host memory, 256 MiB", limits.into.0, rate(limits.into.1), None, "");
    let mut rows = || -> Result<(), KernelError> {
        let matrix = products(device, table)?;
        for context in [8192, 65_536] {
            decode(device, context, limits.copy.1, table)?;
        }
        prefill(device, 8192, matrix, table)?;
        super::latent::measure(device, limits.copy.1, matrix, table)?;
        pages(device, &limits, table)
    };
    rows().map_err(|error| error.to_string())
}

/// Times and bytes a second of plain copies.
struct Limits {
    copy: (f64, f64),
    out: (f64, f64),
    into: (f64, f64),
}

fn limits(ordinal: usize) -> Result<Limits, String> {
    let driver = CudaDriver::open(&Search::usual(), ordinal)?;
    let run = || -> DriverResult<Limits> {
        let (large, small) = (1 << 30, 256 << 20);
        let stream = driver.stream(false)?;
        let (a, b, host) = (driver.alloc(large)?, driver.alloc(large)?, driver.alloc_host(small)?);
        let timed = |bytes: f64, queue: &dyn Fn() -> DriverResult<()>| -> DriverResult<(f64, f64)> {
            queue()?;
            driver.synchronize(stream)?;
            let began = Instant::now();
            (0..10).try_for_each(|_| queue())?;
            driver.synchronize(stream)?;
            let seconds = began.elapsed().as_secs_f64() / 10.0;
            Ok((seconds, bytes / seconds))
        };
        let limits = Limits {
            // A copy reads and writes.
            // SAFETY: the ranges are valid until they are given back below, and only this stream uses them.
            copy: timed(2.0 * large as f64, &|| unsafe { driver.on_device(b, a, large, stream) })?,
            // SAFETY: as above.
            out: timed(small as f64, &|| unsafe { driver.to_host(host, a, small, stream) })?,
            // SAFETY: as above.
            into: timed(small as f64, &|| unsafe { driver.to_device(a, host, small, stream) })?,
        };
        // SAFETY: everything that was queued has run.
        unsafe {
            driver.free(a)?;
            driver.free(b)?;
            driver.free_host(host)?;
            driver.destroy_stream(stream)?;
        }
        Ok(limits)
    };
    run().map_err(|error| error.to_string())
}

pub fn rate(bytes_a_second: f64) -> String {
    format!("{:.0} GB/s", bytes_a_second / 1e9)
}

pub fn flops(flops_a_second: f64) -> String {
    format!("{:.1} TFLOP/s", flops_a_second / 1e12)
}

/// Products of an 8B model's sizes; gives the best rate.
fn products(device: &dyn Device, table: &mut Table) -> Result<f64, KernelError> {
    let mut best = 0.0_f64;
    for (format, rows) in
        [(WeightFormat::BF16, 4096), (WeightFormat::Q4_K, 4096), (WeightFormat::BF16, 1), (WeightFormat::Q4_K, 1)]
    {
        let (out_rows, cols) = (4096, 4096);
        let weight = weight(device, format, out_rows, cols)?;
        let x = device.alloc(rows * cols)?;
        let mut out = device.alloc(rows * out_rows)?;
        let seconds = time(device, if rows == 1 { 200 } else { 10 }, || {
            device.linear(&x, rows, &mut [Projection { weight: &weight, bias: None, out: &mut out }])
        })?;
        let what = format!("product, {rows} x {cols} by {out_rows} in {}", format.name());
        if rows == 1 {
            let bytes = format.row_bytes(cols).unwrap_or_default() * out_rows;
            table.row(&what, seconds, rate(bytes as f64 / seconds), None, "70 to 80 % of the copy rate");
        } else {
            let done = 2.0 * (rows * cols * out_rows) as f64 / seconds;
            best = best.max(done);
            table.row(&what, seconds, flops(done), None, "");
        }
    }
    Ok(best)
}

/// A pool of one layer whose first `tokens` positions count as written, and its page table.
fn pool(
    device: &dyn Device,
    tokens: usize,
) -> Result<(std::sync::Arc<dyn kvdock_kernels::KvPool>, Vec<u32>), KernelError> {
    let pages = tokens.div_ceil(PAGE) + 1;
    let (dtype, _, _) = HEADS[0];
    let spec =
        KvSpec { layers: 1, kv_heads: KV_HEADS, head_dim_k: DIM, head_dim_v: DIM, page_tokens: PAGE, pages, dtype };
    Ok((device.alloc_kv_pool(spec)?, (0..pages as u32).collect()))
}

fn attend(
    device: &dyn Device,
    pool: &dyn kvdock_kernels::KvPool,
    plan: &kvdock_kernels::Plan,
    q: &Buf,
    out: &mut Buf,
) -> Result<(), KernelError> {
    let spec = AttentionSpec { heads: QUERY_HEADS, scale: 0.088, window: None, sinks: None };
    device.attention(pool, 0, plan, q, &spec, out)
}

/// One token of a sequence; the keys and values are read once.
fn decode(device: &dyn Device, context: usize, copy: f64, table: &mut Table) -> Result<(), KernelError> {
    let (pool, pages) = pool(device, context)?;
    let plan = device.plan(pool.as_ref(), &[SeqSpan { start: context as u32 - 1, len: 1, pages: &pages }])?;
    let q = device.alloc(QUERY_HEADS * DIM)?;
    let mut out = device.alloc(QUERY_HEADS * DIM)?;
    let seconds = time(device, 100, || attend(device, pool.as_ref(), &plan, &q, &mut out))?;
    let bytes = 2.0 * (context * KV_HEADS * DIM * 2) as f64 / seconds;
    let what = format!("decode attention over {context} tokens, one sequence");
    table.row(&what, seconds, rate(bytes), Some((bytes / copy, "the copy rate")), "80 %");
    Ok(())
}

/// A whole prompt; half of the products are masked away.
fn prefill(device: &dyn Device, tokens: usize, matrix: f64, table: &mut Table) -> Result<(), KernelError> {
    let (pool, pages) = pool(device, tokens)?;
    let plan = device.plan(pool.as_ref(), &[SeqSpan { start: 0, len: tokens as u32, pages: &pages }])?;
    let q = device.alloc(tokens * QUERY_HEADS * DIM)?;
    let mut out = device.alloc(tokens * QUERY_HEADS * DIM)?;
    let seconds = time(device, 5, || attend(device, pool.as_ref(), &plan, &q, &mut out))?;
    let done = 2.0 * (tokens * tokens * QUERY_HEADS * DIM) as f64 / seconds;
    let what = format!("prefill attention of {tokens} tokens");
    table.row(&what, seconds, flops(done), Some((done / matrix, "the best product")), "60 % on sm_90a, else 45 %");
    Ok(())
}

/// Pages of an 8B model between the device and pinned host memory.
fn pages(device: &dyn Device, limits: &Limits, table: &mut Table) -> Result<(), KernelError> {
    let spec = KvSpec {
        layers: 32,
        kv_heads: KV_HEADS,
        head_dim_k: DIM,
        head_dim_v: DIM,
        page_tokens: 16,
        pages: 64,
        dtype: KvDtype::BF16,
    };
    let mut host = vec![0_u8; 64 * spec.page_bytes()];
    let pool = device.alloc_kv_pool(spec)?;
    // SAFETY: the pool is dropped before the memory.
    unsafe { pool.pin_host(host.as_mut_ptr(), host.len())? };
    let row = DIM * 2;
    let page = |number: usize| {
        let k = host.as_ptr().cast_mut().wrapping_add(number * spec.page_bytes());
        HostPage {
            k,
            v: k.wrapping_add(spec.page_k_bytes()),
            k_layer_stride: KV_HEADS * row,
            k_head_stride: row,
            k_token_stride: 32 * KV_HEADS * row,
            v_layer_stride: KV_HEADS * row,
            v_head_stride: row,
            v_token_stride: 32 * KV_HEADS * row,
        }
    };
    let jobs: Vec<(u32, HostPage)> = (0..64).map(|number| (number as u32, page(number))).collect();
    let bytes = host.len() as f64;
    // SAFETY: the strides reach no byte outside of `host`, which nothing else uses.
    let out = time(device, 10, || unsafe { pool.copy_pages_out(&jobs) })?;
    // SAFETY: as above.
    let into = time(device, 10, || unsafe { pool.copy_pages_in(&jobs) })?;
    for (what, seconds, limit) in
        [("64 pages of 2 MiB to the host", out, limits.out.1), ("64 pages of 2 MiB from the host", into, limits.into.1)]
    {
        let done = bytes / seconds;
        table.row(what, seconds, rate(done), Some((done / limit, "the plain copy")), "90 %");
    }
    drop(pool);
    drop(host);
    Ok(())
}
