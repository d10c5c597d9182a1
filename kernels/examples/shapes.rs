//! How fast the CPU device is on the shapes of SmolLM2-135M, beside what the machine can do.
//!
//! `cargo run --release -p kvdock-kernels --example shapes [THREADS] [FORMAT | model | attention]
//! [INSTRUCTION SET]`: all, the products of one weight format, whole steps of the model, or attention of a layer.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvdock_kernels::cpu::{CpuDevice, Isa};
use kvdock_kernels::{
    AttentionSpec, Buf, Device, HostPage, KvDtype, KvPool, KvSpec, MatrixShape, Plan, Projection, Rope, RopeScaling,
    RopeSpec, RopeStyle, SeqSpan, Weight, WeightData, WeightFormat,
};
use rustix::time::{ClockId, clock_gettime};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const HIDDEN: usize = 576;
const FFN: usize = 1536;
const LAYERS: usize = 30;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const VOCAB: usize = 49152;
const CONTEXT: usize = 2048;

/// Set with one thread: then the CPU time of the thread counts, and other load does less harm.
static CPU_TIME: AtomicBool = AtomicBool::new(false);

/// Seconds since some moment.
fn now() -> f64 {
    let clock = if CPU_TIME.load(Ordering::Relaxed) { ClockId::ThreadCPUTime } else { ClockId::Monotonic };
    let t = clock_gettime(clock);
    t.tv_sec as f64 + 1e-9 * t.tv_nsec as f64
}

/// Best time of a few calls, in seconds.
fn best(calls: usize, mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..calls {
        let start = now();
        call()?;
        best = best.min(now() - start);
    }
    Ok(best)
}

/// A weight of random quants and scales near one thousandth.
fn weight(device: &dyn Device, rows: usize, cols: usize, format: WeightFormat) -> Result<Weight> {
    let len = format.row_bytes(cols).ok_or("columns")? * rows;
    let mut x = 0x2545_F491_4F6C_DD1Du64;
    let mut bytes: Vec<u8> = (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 32) as u8
        })
        .collect();
    let scales: &[usize] = match format {
        WeightFormat::Q6_K => &[208],
        WeightFormat::Q4_0 | WeightFormat::Q8_0 => &[0],
        _ => &[0, 2],
    };
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        match format {
            WeightFormat::F32 => block[3] = 0x3a,
            WeightFormat::F16 => block[1] = 0x14,
            WeightFormat::BF16 => block[1] = 0x3a,
            _ => scales.iter().for_each(|s| block[s + 1] = 0x14),
        }
    }
    let shape = MatrixShape { rows, cols };
    let data = WeightData { name: "w", shape, format, bytes: &bytes, row_order: None };
    Ok(device.upload_weight(&data)?)
}

fn products(device: &dyn Device, only: Option<&str>) -> Result<()> {
    println!("{:6} {:>12} {:>5} {:>10} {:>9} {:>8}", "format", "shape", "rows", "us", "GFLOP/s", "GB/s");
    let formats = [
        WeightFormat::Q4_1,
        WeightFormat::Q8_0,
        WeightFormat::Q4_0,
        WeightFormat::Q4_K,
        WeightFormat::Q5_K,
        WeightFormat::Q6_K,
        WeightFormat::F16,
        WeightFormat::F32,
    ];
    for format in formats.into_iter().filter(|f| only.is_none_or(|o| o == f.name())) {
        let k_quant = format.block_elements() == 256;
        let shapes: &[(usize, usize)] = match format {
            WeightFormat::Q4_1 => &[(HIDDEN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN), (VOCAB, HIDDEN)],
            WeightFormat::Q8_0 => &[(FFN, HIDDEN), (VOCAB, HIDDEN)],
            _ if k_quant => &[(VOCAB / 4, 512)],
            _ => &[(VOCAB / 4, HIDDEN)],
        };
        for (n, k) in shapes.iter().copied() {
            let w = weight(device, n, k, format)?;
            let bytes = format.row_bytes(k).ok_or("columns")? * n;
            for rows in [1, 2, 4, 8, 32, 512] {
                if n * rows > 16_000_000 {
                    continue;
                }
                let x = device.upload(&vec![0.5; rows * k])?;
                let mut out = device.alloc(rows * n)?;
                let calls = if rows > 100 { 12 } else { 60 };
                let seconds = best(calls, || {
                    let p = Projection { weight: &w, bias: None, out: &mut out };
                    Ok(device.linear(&x, rows, &mut [p])?)
                })?;
                println!(
                    "{:6} {:>12} {rows:>5} {:>10.1} {:>9.1} {:>8.2}",
                    format.name(),
                    format!("{n}x{k}"),
                    seconds * 1e6,
                    2e-9 * (rows * n * k) as f64 / seconds,
                    1e-9 * bytes as f64 / seconds,
                );
            }
        }
    }
    Ok(())
}

struct Layer {
    norm: Buf,
    q: Weight,
    k: Weight,
    v: Weight,
    o: Weight,
    gate: Weight,
    up: Weight,
    down: Weight,
}

struct Model {
    layers: Vec<Layer>,
    table: Weight,
    rope: Rope,
    pool: Arc<dyn KvPool>,
}

struct Work {
    x: Buf,
    normed: Buf,
    delta: Buf,
    q: Buf,
    k: Buf,
    v: Buf,
    attended: Buf,
    gate: Buf,
    up: Buf,
    logits: Buf,
}

impl Model {
    fn new(device: &dyn Device) -> Result<Self> {
        let q4 = |rows, cols| weight(device, rows, cols, WeightFormat::Q4_1);
        let kv = KV_HEADS * HEAD_DIM;
        let layers = (0..LAYERS)
            .map(|_| {
                Ok(Layer {
                    norm: device.upload(&[1.0; HIDDEN])?,
                    q: q4(HIDDEN, HIDDEN)?,
                    k: q4(kv, HIDDEN)?,
                    v: q4(kv, HIDDEN)?,
                    o: q4(HIDDEN, HIDDEN)?,
                    gate: q4(FFN, HIDDEN)?,
                    up: q4(FFN, HIDDEN)?,
                    down: q4(HIDDEN, FFN)?,
                })
            })
            .collect::<Result<_>>()?;
        let rope = RopeSpec {
            style: RopeStyle::Interleaved,
            offset: 0,
            dim: HEAD_DIM,
            theta: 1e5,
            scaling: RopeScaling::None,
            frequency_divisors: None,
            max_positions: CONTEXT,
        };
        let pool = KvSpec {
            layers: LAYERS,
            kv_heads: KV_HEADS,
            head_dim_k: HEAD_DIM,
            head_dim_v: HEAD_DIM,
            page_tokens: 16,
            pages: 64 * CONTEXT / 16,
            dtype: KvDtype::F16,
        };
        Ok(Self {
            layers,
            table: weight(device, VOCAB, HIDDEN, WeightFormat::Q8_0)?,
            rope: device.upload_rope(&rope)?,
            pool: device.alloc_kv_pool(pool)?,
        })
    }

    /// One step; logits for the last `logits` rows.
    fn forward(&self, device: &dyn Device, plan: &Plan, logits: usize, w: &mut Work) -> Result<()> {
        let rows = plan.rows();
        let ids: Vec<u32> = (0..rows as u32).collect();
        device.embed(&self.table, &ids, &mut w.x)?;
        let how = AttentionSpec { heads: HEADS, scale: 0.125, window: None, sinks: None };
        for (index, layer) in self.layers.iter().enumerate() {
            device.rms_norm(&w.x, &layer.norm, 1e-5, rows, &mut w.normed)?;
            device.linear(
                &w.normed,
                rows,
                &mut [
                    Projection { weight: &layer.q, bias: None, out: &mut w.q },
                    Projection { weight: &layer.k, bias: None, out: &mut w.k },
                    Projection { weight: &layer.v, bias: None, out: &mut w.v },
                ],
            )?;
            device.rope(&self.rope, plan, &mut w.q, HEADS, HEAD_DIM)?;
            device.rope(&self.rope, plan, &mut w.k, KV_HEADS, HEAD_DIM)?;
            device.kv_write(&*self.pool, index, plan, &w.k, &w.v)?;
            device.attention(&*self.pool, index, plan, &w.q, &how, &mut w.attended)?;
            let out = Projection { weight: &layer.o, bias: None, out: &mut w.delta };
            device.linear(&w.attended, rows, &mut [out])?;
            device.add_rms_norm(&mut w.x, &w.delta, &layer.norm, 1e-5, rows, &mut w.normed)?;
            device.linear(
                &w.normed,
                rows,
                &mut [
                    Projection { weight: &layer.gate, bias: None, out: &mut w.gate },
                    Projection { weight: &layer.up, bias: None, out: &mut w.up },
                ],
            )?;
            device.silu_mul(&mut w.gate, &w.up, rows * FFN)?;
            let down = Projection { weight: &layer.down, bias: None, out: &mut w.delta };
            device.linear(&w.gate, rows, &mut [down])?;
            device.add(&mut w.x, &w.delta, rows * HIDDEN)?;
        }
        let last: Vec<u32> = (rows - logits..rows).map(|r| r as u32).collect();
        device.gather_rows(&w.x, HIDDEN, &last, &mut w.delta)?;
        let out = Projection { weight: &self.table, bias: None, out: &mut w.logits };
        device.linear(&w.delta, logits, &mut [out])?;
        Ok(())
    }
}

fn model(device: &dyn Device) -> Result<()> {
    let rows = 512;
    let model = Model::new(device)?;
    let mut work = Work {
        x: device.alloc(rows * HIDDEN)?,
        normed: device.alloc(rows * HIDDEN)?,
        delta: device.alloc(rows * HIDDEN)?,
        q: device.alloc(rows * HIDDEN)?,
        k: device.alloc(rows * KV_HEADS * HEAD_DIM)?,
        v: device.alloc(rows * KV_HEADS * HEAD_DIM)?,
        attended: device.alloc(rows * HIDDEN)?,
        gate: device.alloc(rows * FFN)?,
        up: device.alloc(rows * FFN)?,
        logits: device.alloc(64 * VOCAB)?,
    };
    let per_seq = CONTEXT / 16;
    let tables: Vec<Vec<u32>> = (0..64).map(|s| (s * per_seq..(s + 1) * per_seq).map(|p| p as u32).collect()).collect();
    let mut run = |what: &str, seqs: &[SeqSpan<'_>], logits: usize, calls: usize| -> Result<()> {
        let plan = device.plan(&*model.pool, seqs)?;
        let seconds = best(calls, || model.forward(device, &plan, logits, &mut work))?;
        let rate = plan.rows() as f64 / seconds;
        println!("{what:36} {:>9.2} ms {rate:>9.1} tokens/s", seconds * 1e3);
        Ok(())
    };
    for start in [0, 1024] {
        let seq = SeqSpan { start, len: 512, pages: &tables[0] };
        run(&format!("prefill 512 at {start}"), &[seq], 1, 3)?;
    }
    for (seqs, start) in [(1, 32), (1, 512), (1, 1500), (2, 512), (4, 512), (8, 512), (32, 512), (64, 512)] {
        let spans: Vec<SeqSpan<'_>> = tables[..seqs].iter().map(|pages| SeqSpan { start, len: 1, pages }).collect();
        run(&format!("decode {seqs} at {start}"), &spans, seqs, 10)?;
    }
    pages(&*model.pool)
}

/// Attention of a layer: parts of a prompt, single rows, and rows behind one long prompt.
fn attention(device: &dyn Device) -> Result<()> {
    let long = 7008;
    let spec = KvSpec {
        layers: 1,
        kv_heads: KV_HEADS,
        head_dim_k: HEAD_DIM,
        head_dim_v: HEAD_DIM,
        page_tokens: 16,
        pages: long / 16 + 64,
        dtype: KvDtype::F16,
    };
    let pool = device.alloc_kv_pool(spec)?;
    let pages: Vec<u32> = (0..spec.pages as u32).collect();
    let numbers = |n: usize| -> Vec<f32> { (0..n).map(|i| (i as f32 * 0.37).sin()).collect() };
    let all = [SeqSpan { start: 0, len: (spec.pages * 16) as u32, pages: &pages }];
    let rows = device.upload(&numbers(spec.pages * 16 * KV_HEADS * HEAD_DIM))?;
    device.kv_write(&*pool, 0, &device.plan(&*pool, &all)?, &rows, &rows)?;
    let q = device.upload(&numbers(512 * HIDDEN))?;
    let mut out = device.alloc(512 * HIDDEN)?;
    let how = AttentionSpec { heads: HEADS, scale: 0.125, window: None, sinks: None };
    let tables: Vec<Vec<u32>> =
        (0..50).map(|i| pages[..long / 16].iter().copied().chain([(long / 16 + i) as u32]).collect()).collect();
    let behind = |count: usize| -> Vec<SeqSpan<'_>> {
        tables[..count].iter().map(|pages| SeqSpan { start: long as u32, len: 1, pages }).collect()
    };
    let one = |start: u32, len: u32| vec![SeqSpan { start, len, pages: &pages }];
    let shapes = [
        ("512 at 0", one(0, 512)),
        ("512 at 1024", one(1024, 512)),
        ("1 at 512", one(512, 1)),
        ("1 at 2048", one(2048, 1)),
        ("1 at 7008", behind(1)),
        ("50 behind 7008", behind(50)),
    ];
    for (what, seqs) in shapes {
        let plan = device.plan(&*pool, &seqs)?;
        let seconds = best(20, || Ok(device.attention(&*pool, 0, &plan, &q, &how, &mut out)?))?;
        let keys: f64 = seqs.iter().map(|s| f64::from(s.len) * (f64::from(s.start) + f64::from(s.len + 1) / 2.0)).sum();
        let rate = keys * (2 * HEADS * HEAD_DIM) as f64 / seconds;
        println!("attention, {what:24} {:>9.1} us {:>9.1} G multiply-adds/s", seconds * 1e6, rate * 1e-9);
    }
    Ok(())
}

/// Copies of the pages of a 1,500 token prompt.
fn pages(pool: &dyn KvPool) -> Result<()> {
    let spec = *pool.spec();
    let pages = 1500usize.div_ceil(spec.page_tokens);
    let (row, rows) = (spec.head_dim_k * spec.dtype.bytes(), pages * spec.page_tokens);
    let plane = spec.layers * rows * spec.kv_heads * row;
    let mut host = vec![1u8; 2 * plane];
    let (k, v) = host.split_at_mut(plane);
    // Two layouts: [layer][slot][head][d], and [page][layer][token][head][d].
    let layer = [rows * spec.kv_heads * row, spec.page_tokens * spec.kv_heads * row];
    let page = [layer[1], spec.layers * layer[1]];
    for (name, layer, page) in [("layer_first", layer[0], page[0]), ("page_first", layer[1], page[1])] {
        let host = |index: usize, k: &mut [u8], v: &mut [u8]| HostPage {
            k: k[index * page..].as_mut_ptr(),
            v: v[index * page..].as_mut_ptr(),
            k_layer_stride: layer,
            k_head_stride: row,
            k_token_stride: spec.kv_heads * row,
            v_layer_stride: layer,
            v_head_stride: row,
            v_token_stride: spec.kv_heads * row,
        };
        for out in [true, false] {
            let seconds = best(5, || {
                for index in 0..pages {
                    let host = host(index, k, v);
                    // SAFETY: the strides stay within `host`, and nothing else runs.
                    unsafe {
                        if out {
                            pool.copy_page_out(index as u32, &host)?;
                        } else {
                            pool.copy_page_in(index as u32, &host)?;
                        }
                    }
                }
                Ok(())
            })?;
            println!(
                "copy {pages} pages {:4} {name:16} {:>9.2} ms {:>9.2} GB/s",
                if out { "out" } else { "in" },
                seconds * 1e3,
                1e-9 * (pages * spec.page_bytes()) as f64 / seconds
            );
        }
    }
    Ok(())
}

/// What the machine gives at best: bytes a second of reads with all threads.
fn bandwidth(threads: usize) -> f64 {
    let data = vec![1u64; 32 << 20];
    let mut best = f64::INFINITY;
    for _ in 0..3 {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in data.chunks(data.len() / threads) {
                scope.spawn(move || std::hint::black_box(part.iter().fold(0, |a, b| a ^ b)));
            }
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    (data.len() * 8) as f64 / best
}

fn main() -> Result<()> {
    let threads = std::env::args().nth(1).map_or(Ok(2), |a| a.parse())?;
    let device = match std::env::args().nth(3) {
        Some(name) => {
            let isa = Isa::available().into_iter().find(|isa| isa.name() == name);
            CpuDevice::with_isa(threads, isa.ok_or("this machine has no such instruction set")?)?
        }
        None => CpuDevice::new(threads)?,
    };
    CPU_TIME.store(threads == 1, Ordering::Relaxed);
    println!("{}, reads {:.1} GB/s", device.name(), bandwidth(threads) * 1e-9);
    let only = std::env::args().nth(2);
    if only.as_deref().is_none_or(|o| o == "attention") {
        attention(&device)?;
    }
    if only.as_deref().is_none_or(|o| o != "model" && o != "attention") {
        products(&device, only.as_deref())?;
    }
    if only.is_none_or(|o| o == "model") {
        model(&device)?;
    }
    Ok(())
}
