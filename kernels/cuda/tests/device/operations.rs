//! Operations through the device's face, against the CPU's device.

use kvdock_cuda::Arithmetic;
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{
    AttentionSpec, Buf, Device, KvDtype, KvSpec, MatrixShape, NewHeads, Projection, RopeScaling, RopeSpec, RopeStyle,
    SeqSpan, Weight, WeightData, WeightFormat,
};

use super::rig::{Rig, assert_near, floats};

fn read(device: &dyn Device, buf: &Buf) -> Vec<f32> {
    let mut out = vec![0.0; buf.len()];
    device.read(buf, 0, &mut out).unwrap();
    out
}

/// Runs the same on both devices and compares.
fn same(rig: &Rig, what: &str, tolerance: f32, run: &dyn Fn(&dyn Device) -> Vec<f32>) {
    let cpu = CpuDevice::new(1).unwrap();
    assert_near(what, &run(&rig.device), &run(&cpu), tolerance);
}

/// Weights of a format whose blocks hold numbers of a usual size.
fn weight(device: &dyn Device, format: WeightFormat, rows: usize, cols: usize, order: Option<&[u32]>) -> Weight {
    let bytes = blocks(format, rows * cols, 7);
    let shape = MatrixShape { rows, cols };
    device.upload_weight(&WeightData { name: "w", shape, format, bytes: &bytes, row_order: order }).unwrap()
}

fn blocks(format: WeightFormat, elements: usize, seed: u64) -> Vec<u8> {
    let values = floats(seed, elements);
    match format {
        WeightFormat::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        WeightFormat::F16 => values.iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect(),
        WeightFormat::BF16 => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
        quantised => {
            let count = elements / quantised.block_elements();
            let mut bytes: Vec<u8> =
                floats(seed, count * quantised.block_bytes()).iter().map(|x| (x * 127.0) as i8 as u8).collect();
            // The 16-bit scales of a block, wherever they stand, are small numbers.
            let places: &[usize] = match quantised {
                WeightFormat::Q4_1 | WeightFormat::Q4_K | WeightFormat::Q5_K => &[0, 2],
                WeightFormat::Q6_K => &[208],
                _ => &[0],
            };
            for block in bytes.chunks_exact_mut(quantised.block_bytes()) {
                for place in places {
                    block[*place..place + 2].copy_from_slice(&half::f16::from_f32(0.01).to_le_bytes());
                }
            }
            bytes
        }
    }
}

#[test]
fn rows_are_normed_added_gathered_and_read() {
    let rig = Rig::computing(Arithmetic::Reproducible);
    for (rows, width) in [(1, 1), (3, 33), (5, 256)] {
        let (x, delta, weight) = (floats(1, rows * width), floats(2, rows * width), floats(3, width));
        same(&rig, "norms", 1e-5, &|device| {
            let mut buf = device.upload(&x).unwrap();
            let (d, w) = (device.upload(&delta).unwrap(), device.upload(&weight).unwrap());
            let mut out = device.alloc(rows * width + 3).unwrap();
            device.rms_norm(&buf, &w, 1e-5, rows, &mut out).unwrap();
            let mut all = read(device, &out);
            device.add_rms_norm(&mut buf, &d, &w, 1e-5, rows, &mut out).unwrap();
            all.extend(read(device, &out));
            device.silu_mul(&mut buf, &d, rows * width).unwrap();
            device.add(&mut buf, &d, rows * width).unwrap();
            all.extend(read(device, &buf));
            let indices: Vec<u32> = (0..rows as u32).rev().collect();
            device.gather_rows(&buf, width, &indices, &mut out).unwrap();
            device.write(&mut out, rows * width, &[1.0, 2.0, 3.0]).unwrap();
            all.extend(read(device, &out));
            let mut part = vec![0.0; 2];
            device.read(&out, rows * width + 1, &mut part).unwrap();
            all.extend(part);
            all
        });
    }
    let (x, w) = (floats(4, 3 * 4 * 16), floats(5, 16));
    same(&rig, "head norms", 1e-5, &|device| {
        let mut buf = device.upload(&x).unwrap();
        device.head_rms_norm(&mut buf, &device.upload(&w).unwrap(), 1e-6, 3, 4).unwrap();
        read(device, &buf)
    });
    rig.end();
}

const FORMATS: [WeightFormat; 9] = [
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

/// A product with and without a bias, of weights whose rows come in another order.
fn product(rig: &Rig, format: WeightFormat, rows: usize, tolerance: f32) {
    let (out_rows, cols) = (37, 256);
    let order: Vec<u32> = (0..out_rows as u32).map(|row| (row * 5 + 3) % out_rows as u32).collect();
    let (x, bias) = (floats(11, rows * cols), floats(12, out_rows));
    same(rig, &format!("{format:?}, {rows} rows"), tolerance, &|device| {
        let weight = weight(device, format, out_rows, cols, Some(&order));
        let (x, bias) = (device.upload(&x).unwrap(), device.upload(&bias).unwrap());
        let (mut a, mut b) = (device.alloc(rows * out_rows).unwrap(), device.alloc(rows * out_rows).unwrap());
        let mut projections = [
            Projection { weight: &weight, bias: Some(&bias), out: &mut a },
            Projection { weight: &weight, bias: None, out: &mut b },
        ];
        device.linear(&x, rows, &mut projections).unwrap();
        [read(device, &a), read(device, &b)].concat()
    });
}

#[test]
fn products_and_embeddings_of_every_format() {
    let rig = Rig::computing(Arithmetic::Fast);
    for format in FORMATS {
        product(&rig, format, 3, 1e-4);
        same(&rig, &format!("embed {format:?}"), 1e-6, &|device| {
            let weight = weight(device, format, 37, 256, None);
            let mut out = device.alloc(3 * 256).unwrap();
            device.embed(&weight, &[36, 0, 5], &mut out).unwrap();
            read(device, &out)
        });
    }
    // More rows go to tensor cores, which round to 16 bits, once or to two parts.
    product(&rig, WeightFormat::BF16, 9, 2e-2);
    product(&rig, WeightFormat::F32, 9, 2e-4);
    rig.end();
    let rig = Rig::computing(Arithmetic::Reproducible);
    for rows in [1, 9] {
        product(&rig, WeightFormat::F32, rows, 2e-4);
        product(&rig, WeightFormat::Q8_0, rows, 2e-4);
    }
    rig.end();
}

#[test]
fn heads_are_rotated_and_attend() {
    for (arithmetic, dtype, dims, tolerance) in [
        (Arithmetic::Reproducible, KvDtype::F16, (32, 32), 4e-3),
        (Arithmetic::Fast, KvDtype::F16, (32, 32), 4e-3),
        (Arithmetic::Fast, KvDtype::BF16, (48, 16), 3e-2),
        (Arithmetic::Reproducible, KvDtype::F32, (20, 12), 1e-5),
    ] {
        let rig = Rig::computing(arithmetic);
        let (dk, dv) = dims;
        let spec = KvSpec { layers: 2, kv_heads: 2, head_dim_k: dk, head_dim_v: dv, page_tokens: 4, pages: 90, dtype };
        let heads = 4;
        let rope = RopeSpec {
            style: RopeStyle::Half,
            offset: 0,
            dim: 12,
            theta: 10_000.0,
            scaling: RopeScaling::Linear { factor: 2.0 },
            frequency_divisors: None,
            max_positions: 400,
        };
        let tables: [Vec<u32>; 3] = [(0..80).rev().collect(), vec![81, 80, 85], vec![84, 83]];
        // A long prompt in two chunks, then a step of two single rows around the rest of another prompt.
        let steps: [&[(usize, u32, u32)]; 3] =
            [&[(0, 0, 70), (1, 0, 3)], &[(0, 70, 200)], &[(1, 3, 1), (2, 0, 6), (0, 270, 1)]];
        for (window, with_sinks) in [(None, false), (Some(9), true)] {
            let sinks = floats(20, heads);
            same(&rig, &format!("attention {arithmetic:?} {dtype:?} {window:?}"), tolerance, &|device| {
                let pool = device.alloc_kv_pool(spec).unwrap();
                let rope = device.upload_rope(&rope).unwrap();
                let sinks = device.upload(&sinks).unwrap();
                let mut all = Vec::new();
                for (number, step) in steps.iter().enumerate() {
                    let span = |(table, start, len): &(usize, u32, u32)| SeqSpan {
                        start: *start,
                        len: *len,
                        pages: &tables[*table],
                    };
                    let seqs: Vec<SeqSpan<'_>> = step.iter().map(span).collect();
                    let plan = device.plan(&*pool, &seqs).unwrap();
                    let rows = plan.rows();
                    for layer in 0..2 {
                        let seed = (10 * number + layer) as u64;
                        let mut q = device.upload(&floats(100 + seed, rows * heads * dk)).unwrap();
                        let mut k = device.upload(&floats(200 + seed, rows * 2 * dk)).unwrap();
                        let v = device.upload(&floats(300 + seed, rows * 2 * dv)).unwrap();
                        if layer == 0 {
                            device.rope(&rope, &plan, &mut q, heads, dk).unwrap();
                            device.rope(&rope, &plan, &mut k, 2, dk).unwrap();
                            device.kv_write(&*pool, layer, &plan, &k, &v).unwrap();
                        } else {
                            let norm = device.upload(&floats(400, dk)).unwrap();
                            let (q_norm, k_norm) = (Some(&norm), None);
                            let (q, k, v, rope) = (&mut q, &mut k, &v, &rope);
                            let new = NewHeads { q, k, v, heads, q_norm, k_norm, eps: 1e-5, rope };
                            device.heads_enter(&*pool, layer, &plan, new).unwrap();
                        }
                        let mut out = device.alloc(rows * heads * dv).unwrap();
                        let sinks = with_sinks.then_some(&sinks);
                        let spec = AttentionSpec { heads, scale: 0.3, window, sinks };
                        device.attention(&*pool, layer, &plan, &q, &spec, &mut out).unwrap();
                        all.extend(read(device, &out));
                    }
                }
                all
            });
        }
        rig.end();
    }
}

/// A prompt in one chunk, in chunks and token by token, with reproducible arithmetic.
#[test]
fn the_law_of_bits_holds_for_chunks() {
    let rig = Rig::computing(Arithmetic::Reproducible);
    let device = &rig.device;
    let spec = KvSpec {
        layers: 1,
        kv_heads: 1,
        head_dim_k: 32,
        head_dim_v: 32,
        page_tokens: 16,
        pages: 8,
        dtype: KvDtype::F16,
    };
    let (rows, heads, width) = (40, 3, 96);
    let x = floats(1, rows * width);
    let run = |chunks: &[usize]| {
        let pool = device.alloc_kv_pool(spec).unwrap();
        let (to_q, to_k) =
            (weight(device, WeightFormat::F32, 96, width, None), weight(device, WeightFormat::Q8_0, 32, width, None));
        let mut all = Vec::new();
        let mut start = 0;
        for len in chunks {
            let plan =
                device.plan(&*pool, &[SeqSpan { start: start as u32, len: *len as u32, pages: &[3, 1, 7] }]).unwrap();
            let buf = device.upload(&x[start * width..(start + len) * width]).unwrap();
            let (mut q, mut k) = (device.alloc(len * 96).unwrap(), device.alloc(len * 32).unwrap());
            let mut projections = [
                Projection { weight: &to_q, bias: None, out: &mut q },
                Projection { weight: &to_k, bias: None, out: &mut k },
            ];
            device.linear(&buf, *len, &mut projections).unwrap();
            device.kv_write(&*pool, 0, &plan, &k, &k).unwrap();
            let mut out = device.alloc(len * heads * 32).unwrap();
            let spec = AttentionSpec { heads, scale: 0.2, window: None, sinks: None };
            device.attention(&*pool, 0, &plan, &q, &spec, &mut out).unwrap();
            all.extend(read(device, &out).iter().map(|x| x.to_bits()));
            start += len;
        }
        all
    };
    let whole = run(&[40]);
    assert_eq!(run(&[7, 1, 1, 31]), whole);
    assert_eq!(run(&[16, 24]), whole);
    rig.end();
}
