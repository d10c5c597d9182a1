//! Attention over rows that are keys and values at once, and the indexer's choice: compared with the CPU's, and timed.

use kvdock_cuda::Unit;
use kvdock_kernels::ops::{RowAttention, RowFormat, RowLayout, RowPool, RowRun, RowSpan};
use kvdock_kernels::{Device, KernelError, KvDtype, PageSpec};

use super::kernels::{Check, numbers};
use super::table::Table;
use super::timings::{flops, rate, time};

const HALF: RowFormat = RowFormat::Plain(KvDtype::BF16);
const PACKED: RowFormat = RowFormat::Packed { rope: 64 };
/// Elements of index keys, and heads of an indexer.
const INDEX_DIM: usize = 128;
const INDEX_HEADS: usize = 64;

/// The units that comparisons and timings use, in both arithmetics.
pub const UNITS: [Unit; 8] = [
    Unit::LatentTiles { format: HALF, width: 40, value: 32, heads: 16, parts: 1 },
    Unit::LatentTiles { format: HALF, width: 40, value: 32, heads: 16, parts: 2 },
    Unit::LatentTiles { format: HALF, width: 576, value: 512, heads: 64, parts: 1 },
    Unit::LatentTiles { format: HALF, width: 576, value: 512, heads: 32, parts: 2 },
    Unit::LatentTiles { format: PACKED, width: 80, value: 72, heads: 16, parts: 2 },
    Unit::LatentTiles { format: PACKED, width: 512, value: 512, heads: 32, parts: 2 },
    Unit::IndexTiles { parts: 1 },
    Unit::IndexTiles { parts: 2 },
];

/// All comparisons.
pub fn checks(small: bool) -> Vec<Check> {
    let shapes: [(RowFormat, usize, usize, usize, f32); 2] = match small {
        true => [(HALF, 40, 32, 11, 3e-2), (PACKED, 80, 72, 9, 2e-4)],
        false => [(HALF, 576, 512, 128, 3e-2), (PACKED, 512, 512, 64, 2e-4)],
    };
    let tokens = if small { 43 } else { 700 };
    let of = |(format, width, value, heads, fast)| {
        let name = format!("latent attention of {heads} heads to picked rows of {width} ({format:?})");
        Check::new(name, (2e-4, fast), move |device| picked(device, format, (width, value), heads, tokens))
    };
    shapes.into_iter().map(of).collect()
}

/// Rows are written, half of them picked, and queries attend to a window and to what was picked.
fn picked(
    device: &dyn Device,
    format: RowFormat,
    (width, value): (usize, usize),
    heads: usize,
    tokens: usize,
) -> Result<Vec<f32>, KernelError> {
    let page_rows = 16;
    let pages = tokens.div_ceil(page_rows) + 2;
    let top_k = tokens / 2;
    let key_format = if format == HALF { HALF } else { RowFormat::Key };
    let pool = device.alloc_page_pool(PageSpec { layers: 2, page_bytes: page_rows * (2 * width + 64 + 8), pages })?;
    let keys = device.alloc_page_pool(PageSpec { layers: 1, page_bytes: page_rows * (2 * INDEX_DIM + 8), pages })?;
    let layout = |format, elements| RowLayout { format, page_rows, elements };
    let rows = RowPool::new(&pool, 1, layout(format, width))?;
    let index = RowPool::new(&keys, 0, layout(key_format, INDEX_DIM))?;
    let table: Vec<u32> = (0..pages as u32).rev().collect();
    let slot = |row: usize| table[row / page_rows] * page_rows as u32 + (row % page_rows) as u32;
    let slots = device.upload_indices(&(0..tokens).map(slot).collect::<Vec<u32>>())?;
    device.write_rows(&rows, &slots, &device.upload(&numbers(21, tokens * width))?)?;
    // Keys of one direction and different lengths: which are the highest does not hang on how queries are rounded.
    let length = |row: usize| ((row * 7 % tokens) + tokens) as f32 / tokens as f32;
    let direction: Vec<f32> = numbers(22, INDEX_DIM).iter().map(|x| x.abs()).collect();
    let all: Vec<f32> = (0..tokens).flat_map(|row| direction.iter().map(move |x| x * length(row))).collect();
    device.write_rows(&index, &slots, &device.upload(&all)?)?;

    let ends = [tokens, 3, tokens / 2, 1];
    let spans = |most: usize| ends.map(|end| RowSpan { table: 0, first: end - end.min(most), count: end.min(most) });
    let window = device.spans(&[&table], &spans(20), page_rows, pages)?;
    let whole = device.spans(&[&table], &spans(tokens), page_rows, pages)?;
    let queries: Vec<f32> = numbers(23, ends.len() * INDEX_HEADS * INDEX_DIM).iter().map(|x| x.abs()).collect();
    let weights: Vec<f32> = numbers(24, ends.len() * INDEX_HEADS).iter().map(|x| x.abs()).collect();
    let picks =
        device.pick(&index, &whole, &device.upload(&queries)?, &device.upload(&weights)?, INDEX_HEADS, top_k)?;
    let q = device.upload(&numbers(25, ends.len() * heads * width))?;
    let sinks = device.upload(&numbers(26, heads))?;
    let spec = RowAttention { heads, width, value, scale: (width as f32).powf(-0.5), sinks: Some(&sinks) };
    let mut out = device.alloc(ends.len() * heads * value)?;
    let runs =
        [RowRun { pool: rows, spans: &window, picks: None }, RowRun { pool: rows, spans: &whole, picks: Some(&picks) }];
    device.attend_rows(&q, &spec, &runs, &mut out)?;
    let mut found = vec![0.0; out.len()];
    device.read(&out, 0, &mut found)?;
    Ok(found)
}

/// Times of MLA with 128 heads: `copy` is bytes a second of a plain copy, `matrix` operations a second of the best product.
///
/// # Errors
/// The first call that fails.
pub fn measure(device: &dyn Device, copy: f64, matrix: f64, table: &mut Table) -> Result<(), KernelError> {
    const HEADS: usize = 128;
    const WIDTH: usize = 576;
    const VALUE: usize = 512;
    // Tokens of the step, and rows that each sees: a decode step over a long context, and a chunk with as many rows as an indexer picks.
    for (step, seen) in [(1, 65_536), (512, 2048)] {
        let page_rows = 64;
        let pages = seen / page_rows;
        let pool = device.alloc_page_pool(PageSpec { layers: 1, page_bytes: page_rows * 2 * WIDTH, pages })?;
        let rows = RowPool::new(&pool, 0, RowLayout { format: HALF, page_rows, elements: WIDTH })?;
        let pages_of: Vec<u32> = (0..pages as u32).collect();
        let all = vec![RowSpan { table: 0, first: 0, count: seen }; step];
        let spans = device.spans(&[&pages_of], &all, page_rows, pages)?;
        let q = device.alloc(step * HEADS * WIDTH)?;
        let mut out = device.alloc(step * HEADS * VALUE)?;
        let spec = RowAttention { heads: HEADS, width: WIDTH, value: VALUE, scale: 0.04, sinks: None };
        let runs = [RowRun { pool: rows, spans: &spans, picks: None }];
        let seconds = time(device, 5, || device.attend_rows(&q, &spec, &runs, &mut out))?;
        let done = 2.0 * (step * seen * HEADS * (WIDTH + VALUE)) as f64 / seconds;
        let read = (seen * 2 * WIDTH) as f64 / seconds;
        let what = format!("MLA of {step} tokens with {HEADS} heads over {seen} rows each");
        table.row(&what, seconds, flops(done), Some((done / matrix, "the best product")), "");
        if step == 1 {
            table.row(&format!("{what}: rows read"), seconds, rate(read), Some((read / copy, "the copy rate")), "");
        }
    }
    Ok(())
}
