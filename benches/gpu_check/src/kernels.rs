//! Comparisons of the kernels with the CPU's, through the device's face.

use kvdock_cuda::Arithmetic;
use kvdock_kernels::{
    AttentionSpec, Buf, Device, HostPage, KernelError, KvDtype, KvPool, KvSpec, MatrixShape, Projection, RopeScaling,
    RopeSpec, RopeStyle, SeqSpan, Weight, WeightData, WeightFormat,
};

/// Formats of weights.
pub const FORMATS: [WeightFormat; 9] = [
    WeightFormat::F32,
    WeightFormat::F16,
    WeightFormat::BF16,
    WeightFormat::Q4_0,
    WeightFormat::Q4_1,
    WeightFormat::Q8_0,
    WeightFormat::Q4_K,
    WeightFormat::Q5_K,
    WeightFormat::Q6_K,
];

/// Element type of a pool, elements of keys and values, and groups of query heads that share loads.
pub type Heads = (KvDtype, (u32, u32), &'static [u32]);

/// Heads that are compared.
pub const HEADS: [Heads; 4] = [
    (KvDtype::F16, (64, 64), &[3]),
    (KvDtype::BF16, (128, 128), &[3]),
    (KvDtype::F16, (192, 128), &[3]),
    (KvDtype::F32, (80, 80), &[3]),
];

type Compute = Box<dyn Fn(&dyn Device) -> Result<Vec<f32>, KernelError>>;

/// One comparison.
pub struct Check {
    pub name: String,
    /// The largest difference, relative to the largest value: with reproducible and with fast arithmetic.
    tolerance: (f32, f32),
    compute: Compute,
}

impl Check {
    pub fn new(
        name: impl Into<String>,
        tolerance: (f32, f32),
        compute: impl Fn(&dyn Device) -> Result<Vec<f32>, KernelError> + 'static,
    ) -> Self {
        Self { name: name.into(), tolerance, compute: Box::new(compute) }
    }

    pub fn run(&self, cpu: &dyn Device, device: &dyn Device, arithmetic: Arithmetic) -> Result<String, String> {
        let expected = (self.compute)(cpu).map_err(|error| format!("on the CPU: {error}"))?;
        let found = (self.compute)(device).map_err(|error| error.to_string())?;
        if expected.len() != found.len() {
            return Err(format!("{} values, not {}", found.len(), expected.len()));
        }
        let size = expected.iter().fold(1e-6_f32, |most, x| most.max(x.abs()));
        let mut worst = (0, 0.0_f32);
        for (index, (a, b)) in expected.iter().zip(&found).enumerate() {
            let difference = (a - b).abs() / size;
            if difference > worst.1 || difference.is_nan() {
                worst = (index, if difference.is_nan() { f32::INFINITY } else { difference });
            }
        }
        let tolerance = if arithmetic == Arithmetic::Fast { self.tolerance.1 } else { self.tolerance.0 };
        let text =
            format!("{} values, {:.1e} of the largest apart at most ({tolerance:.0e} may be)", found.len(), worst.1);
        if worst.1 <= tolerance {
            return Ok(text);
        }
        Err(format!("{text}: value {} is {}, not {}", worst.0, found[worst.0], expected[worst.0]))
    }
}

/// All comparisons; small ones take less time and show less.
pub fn checks(small: bool) -> Vec<Check> {
    let mut checks = vec![norms(if small { 3 } else { 300 }, if small { 67 } else { 4099 }), ropes(small)];
    for format in FORMATS {
        checks.push(products(format, small));
    }
    for (dtype, (dk, dv), groups) in HEADS {
        let heads = 2 * groups.first().copied().unwrap_or(1) as usize;
        for (window, sinks) in [(None, false), (Some(if small { 19 } else { 700 }), true)] {
            checks.push(attention(dtype, (dk as usize, dv as usize), heads, window, sinks, small));
        }
    }
    checks.extend(super::latent::checks(small));
    for dtype in [KvDtype::F16, KvDtype::F32] {
        checks.push(pages(dtype));
    }
    checks
}

/// Numbers from -1 to 1.
pub fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut random = kvdock_tests::prompt::Random::new(seed);
    (0..len).map(|_| (random.number() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn read(device: &dyn Device, buf: &Buf) -> Result<Vec<f32>, KernelError> {
    let mut out = vec![0.0; buf.len()];
    device.read(buf, 0, &mut out)?;
    Ok(out)
}

fn norms(rows: usize, width: usize) -> Check {
    Check::new(format!("norms, sums, gathers of {rows} x {width}"), (1e-5, 1e-5), move |device| {
        let mut x = device.upload(&numbers(1, rows * width))?;
        let (delta, weight) = (device.upload(&numbers(2, rows * width))?, device.upload(&numbers(3, width))?);
        let mut out = device.alloc(rows * width)?;
        device.rms_norm(&x, &weight, 1e-5, rows, &mut out)?;
        let mut all = read(device, &out)?;
        device.add_rms_norm(&mut x, &delta, &weight, 1e-5, rows, &mut out)?;
        all.extend(read(device, &out)?);
        device.silu_mul(&mut x, &delta, rows * width)?;
        device.add(&mut x, &delta, rows * width)?;
        let backwards: Vec<u32> = (0..rows as u32).rev().collect();
        device.gather_rows(&x, width, &backwards, &mut out)?;
        all.extend(read(device, &out)?);
        Ok(all)
    })
}

fn ropes(small: bool) -> Check {
    let rows = if small { 5 } else { 500 };
    Check::new("head norms and rotary embeddings", (1e-5, 1e-5), move |device| {
        let mut all = Vec::new();
        let spec = KvSpec {
            layers: 1,
            kv_heads: 1,
            head_dim_k: 4,
            head_dim_v: 4,
            page_tokens: 256,
            pages: 9,
            dtype: KvDtype::F32,
        };
        let pool = device.alloc_kv_pool(spec)?;
        let tables: Vec<u32> = (0..9).collect();
        let plan = device.plan(pool.as_ref(), &[SeqSpan { start: 1500, len: rows as u32, pages: &tables }])?;
        let scalings = [
            RopeScaling::None,
            RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 512.0 },
            RopeScaling::Yarn {
                factor: 4.0,
                original_context: 512.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                attention_factor: None,
                truncate: true,
            },
        ];
        for (scaling, style) in scalings.into_iter().zip([RopeStyle::Half, RopeStyle::Interleaved, RopeStyle::Half]) {
            let rope = RopeSpec {
                style,
                offset: 8,
                dim: 64,
                theta: 500_000.0,
                scaling,
                frequency_divisors: None,
                max_positions: 2048,
            };
            let rope = device.upload_rope(&rope)?;
            let mut x = device.upload(&numbers(5, rows * 3 * 80))?;
            device.head_rms_norm(&mut x, &device.upload(&numbers(6, 80))?, 1e-6, rows, 3)?;
            device.rope(&rope, &plan, &mut x, 3, 80)?;
            all.extend(read(device, &x)?);
        }
        Ok(all)
    })
}

/// Bytes of a weight matrix whose scales are of a usual size.
pub fn weight_bytes(format: WeightFormat, elements: usize) -> Vec<u8> {
    let float = |x: f32| half::f16::from_f32(x).to_le_bytes();
    match format {
        WeightFormat::F32 => numbers(7, elements).iter().flat_map(|x| x.to_le_bytes()).collect(),
        WeightFormat::F16 => numbers(7, elements).iter().flat_map(|x| float(*x)).collect(),
        WeightFormat::BF16 => {
            numbers(7, elements).iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect()
        }
        quantised => {
            let mut random = kvdock_tests::prompt::Random::new(8);
            let count = elements / quantised.block_elements() * quantised.block_bytes();
            let mut bytes: Vec<u8> = (0..count).map(|_| random.number() as u8).collect();
            let scales: &[usize] = match quantised {
                WeightFormat::Q4_1 | WeightFormat::Q4_K | WeightFormat::Q5_K => &[0, 2],
                WeightFormat::Q6_K => &[208],
                _ => &[0],
            };
            for block in bytes.chunks_exact_mut(quantised.block_bytes()) {
                scales.iter().for_each(|at| block[*at..at + 2].copy_from_slice(&float(0.01)));
            }
            bytes
        }
    }
}

/// A weight matrix of any numbers.
pub fn weight(device: &dyn Device, format: WeightFormat, rows: usize, cols: usize) -> Result<Weight, KernelError> {
    let bytes = weight_bytes(format, rows * cols);
    let shape = MatrixShape { rows, cols };
    device.upload_weight(&WeightData { name: "w", shape, format, bytes: &bytes, row_order: None })
}

fn products(format: WeightFormat, small: bool) -> Check {
    let (out_rows, cols) = if small { (37, 256) } else { (1027, 1536) };
    let counts: &[usize] = if small { &[1, 9] } else { &[1, 3, 9, 130] };
    Check::new(format!("products and embeddings in {}", format.name()), (2e-4, 2e-2), move |device| {
        let weight = weight(device, format, out_rows, cols)?;
        let bias = device.upload(&numbers(9, out_rows))?;
        let mut all = Vec::new();
        for rows in counts.iter().copied() {
            let x = device.upload(&numbers(10, rows * cols))?;
            let (mut a, mut b) = (device.alloc(rows * out_rows)?, device.alloc(rows * out_rows)?);
            let mut projections = [
                Projection { weight: &weight, bias: Some(&bias), out: &mut a },
                Projection { weight: &weight, bias: None, out: &mut b },
            ];
            device.linear(&x, rows, &mut projections)?;
            all.extend(read(device, &a)?);
            all.extend(read(device, &b)?);
        }
        let mut out = device.alloc(3 * cols)?;
        device.embed(&weight, &[out_rows as u32 - 1, 0, 5], &mut out)?;
        all.extend(read(device, &out)?);
        Ok(all)
    })
}

fn attention(
    dtype: KvDtype,
    dims: (usize, usize),
    heads: usize,
    window: Option<u32>,
    with_sinks: bool,
    small: bool,
) -> Check {
    let (dk, dv) = dims;
    // Tokens that each of three sequences adds in each step; 0 leaves it out.
    let steps: &'static [[u32; 3]] = match small {
        true => &[[40, 3, 0], [0, 1, 7], [1, 1, 1]],
        false => &[[1500, 3, 0], [900, 1, 70], [1, 1, 1], [1, 0, 257]],
    };
    let tolerance = match dtype {
        KvDtype::F32 => 1e-5,
        KvDtype::F16 => 4e-3,
        KvDtype::BF16 => 3e-2,
    };
    let seen = window.map_or("all".to_owned(), |window| window.to_string());
    let name = format!("attention, {} pages, heads of {dk} and {dv}, window {seen}", dtype.name());
    Check::new(name, (tolerance, tolerance), move |device| {
        let pages = 200;
        let spec =
            KvSpec { layers: 2, kv_heads: 2, head_dim_k: dk, head_dim_v: dv, page_tokens: 16, pages: 3 * pages, dtype };
        let pool = device.alloc_kv_pool(spec)?;
        let table = |sequence: usize| (0..pages as u32).map(move |page| 3 * page + sequence as u32).rev().collect();
        let tables: [Vec<u32>; 3] = [table(0), table(1), table(2)];
        let sinks = device.upload(&numbers(11, heads))?;
        let mut lengths = [0_u32; 3];
        let mut all = Vec::new();
        for (number, step) in steps.iter().enumerate() {
            let spans: Vec<SeqSpan<'_>> = (0..3)
                .filter(|sequence| step[*sequence] > 0)
                .map(|sequence| SeqSpan { start: lengths[sequence], len: step[sequence], pages: &tables[sequence] })
                .collect();
            let plan = device.plan(pool.as_ref(), &spans)?;
            let rows = plan.rows();
            for layer in 0..2 {
                let seed = (100 * number + 10 * layer) as u64;
                let q: Vec<f32> = numbers(seed, rows * heads * dk).iter().map(|x| 3.0 * x).collect();
                let q = device.upload(&q)?;
                let k = device.upload(&numbers(seed + 1, rows * 2 * dk))?;
                let v = device.upload(&numbers(seed + 2, rows * 2 * dv))?;
                device.kv_write(pool.as_ref(), layer, &plan, &k, &v)?;
                let mut out = device.alloc(rows * heads * dv)?;
                let spec =
                    AttentionSpec { heads, scale: (dk as f32).powf(-0.5), window, sinks: with_sinks.then_some(&sinks) };
                device.attention(pool.as_ref(), layer, &plan, &q, &spec, &mut out)?;
                all.extend(read(device, &out)?);
            }
            (0..3).for_each(|sequence| lengths[sequence] += step[sequence]);
        }
        Ok(all)
    })
}

/// Whether a device's checksums of all 8 pages of a pool, last one first, are those of `host`, which holds these pages token by token, and of each the
/// layers: 1 for each that is. Of a device that takes none, the host's are right.
fn checksums_agree(pool: &dyn KvPool, host: &[u8]) -> Result<Vec<f32>, KernelError> {
    let KvSpec { layers, kv_heads, head_dim_k, head_dim_v, page_tokens, pages, dtype } = *pool.spec();
    let (keys, values) = host.split_at(pages * pool.spec().page_k_bytes());
    let of_host = |page: usize| {
        let parts = [(keys, head_dim_k), (values, head_dim_v)];
        parts.into_iter().flat_map(move |(bytes, dim)| {
            let row = kv_heads * dim * dtype.bytes();
            let page = &bytes[page * page_tokens * layers * row..][..page_tokens * layers * row];
            (0..layers).map(move |layer| {
                let rows = page.chunks_exact(row).skip(layer).step_by(layers);
                rows.fold(0, crc32c::crc32c_append)
            })
        })
    };
    let expected: Vec<u32> = (0..pages).flat_map(of_host).collect();
    let device: Vec<u32> = (0..pages as u32).rev().collect();
    let found = pool.checksums(&device, false, None)?.unwrap_or_else(|| expected.clone());
    if found.len() != expected.len() {
        return Ok(vec![0.0]);
    }
    Ok(expected.iter().zip(&found).map(|(expected, found)| f32::from(u8::from(expected == found))).collect())
}

/// Pages leave a pool and come into another one: by one kernel each way, or in two steps where the host's memory is not pinned.
fn pages(dtype: KvDtype) -> Check {
    Check::new(format!("pages of {} to the host and back", dtype.name()), (0.0, 0.0), move |device| {
        let spec = KvSpec { layers: 3, kv_heads: 2, head_dim_k: 64, head_dim_v: 40, page_tokens: 16, pages: 8, dtype };
        let rows = spec.pages * spec.page_tokens;
        let (first, second) = (device.alloc_kv_pool(spec)?, device.alloc_kv_pool(spec)?);
        let table: Vec<u32> = (0..8).collect();
        let plan = device.plan(first.as_ref(), &[SeqSpan { start: 0, len: rows as u32, pages: &table }])?;
        for layer in 0..3 {
            let k = device.upload(&numbers(layer, rows * 2 * 64))?;
            let v = device.upload(&numbers(10 + layer, rows * 2 * 40))?;
            device.kv_write(first.as_ref(), layer as usize, &plan, &k, &v)?;
        }
        let mut all = Vec::new();
        for pinned in [true, false] {
            // Keys of page, token, layer, head; then the values.
            let mut host = vec![0_u8; 8 * spec.page_bytes()];
            if pinned {
                // SAFETY: both pools are gone before the memory is.
                unsafe {
                    first.pin_host(host.as_mut_ptr(), host.len())?;
                }
            }
            let (k_row, v_row) = (64 * dtype.bytes(), 40 * dtype.bytes());
            let base = host.as_mut_ptr();
            let page = |number: usize| HostPage {
                k: base.wrapping_add(number * spec.page_k_bytes()),
                v: base.wrapping_add(8 * spec.page_k_bytes() + number * spec.page_v_bytes()),
                k_layer_stride: 2 * k_row,
                k_head_stride: k_row,
                k_token_stride: 6 * k_row,
                v_layer_stride: 2 * v_row,
                v_head_stride: v_row,
                v_token_stride: 6 * v_row,
            };
            let jobs: Vec<(u32, HostPage)> = (0..8).map(|number| (7 - number as u32, page(number))).collect();
            // SAFETY: the strides reach no byte outside of `host`, which nothing else uses.
            unsafe { first.copy_pages_out(&jobs)? };
            all.extend(host.iter().map(|byte| f32::from(*byte)));
            all.extend(checksums_agree(first.as_ref(), &host)?);
            // SAFETY: as above.
            unsafe {
                second.copy_pages_in(&jobs)?;
                host.fill(0);
                second.copy_page_out(3, &jobs[4].1)?;
                second.copy_layer_out(6, 1, &jobs[1].1)?;
            }
            all.extend(host.iter().map(|byte| f32::from(*byte)));
            if pinned {
                // The first pool has it pinned until its end, which is before that of this memory.
                std::mem::forget(host);
            }
        }
        Ok(all)
    })
}
