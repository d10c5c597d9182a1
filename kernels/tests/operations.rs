//! The device's operations through its face: values against f64, bits across devices, refusals.

#![allow(clippy::unwrap_used)]

mod support;

use kvdock_kernels::cpu::{CpuDevice, Isa};
use kvdock_kernels::{
    AttentionSpec, Device, KvDtype, KvSpec, MatrixShape, Projection, RopeScaling, RopeSpec, RopeStyle, SeqSpan, Weight,
    WeightData, WeightFormat,
};
use proptest::prelude::*;
use support::{bits, numbers, read};

/// Devices of every instruction set and some thread counts; the first is the one to compare to.
fn devices() -> Vec<CpuDevice> {
    let mut all = vec![CpuDevice::with_isa(1, Isa::Portable).unwrap()];
    for isa in Isa::available() {
        all.push(CpuDevice::with_isa(3, isa).unwrap());
    }
    all
}

/// Runs `op` on every device; all must give the same bits. Returns them.
fn same_on_all(op: impl Fn(&CpuDevice) -> Vec<f32>) -> Vec<f32> {
    let devices = devices();
    let expected = op(&devices[0]);
    for device in &devices[1..] {
        assert_eq!(bits(&op(device)), bits(&expected), "{}", device.name());
    }
    expected
}

fn upload(device: &CpuDevice, rows: usize, cols: usize, values: &[f32]) -> Weight {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let shape = MatrixShape { rows, cols };
    let format = WeightFormat::F32;
    device.upload_weight(&WeightData { name: "w", shape, format, bytes: &bytes, row_order: None }).unwrap()
}

#[test]
fn rms_norm_is_the_formula() {
    // Rows of tiny numbers, so that eps counts; widths with a rest after 16 lanes.
    for (width, rows, size) in [(576, 40, 1.0), (5, 3, 1.0), (16, 1, 1e-3), (50, 700, 1e-3)] {
        let x: Vec<f32> = numbers(width * rows, 1).iter().map(|x| x * size).collect();
        let w = numbers(width, 2);
        let got = same_on_all(|device| {
            let (x, w) = (device.upload(&x).unwrap(), device.upload(&w).unwrap());
            let mut out = device.alloc(width * rows).unwrap();
            device.rms_norm(&x, &w, 1e-5, rows, &mut out).unwrap();
            read(device, &out, width * rows)
        });
        for (row, got) in x.chunks(width).zip(got.chunks(width)) {
            let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
            for ((x, w), got) in row.iter().zip(&w).zip(got) {
                let expected = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*w);
                assert!((f64::from(*got) - expected).abs() < 2e-6, "{got} is not {expected}");
            }
        }
    }
}

#[test]
fn add_rms_norm_is_add_then_rms_norm() {
    let (width, rows) = (83, 300);
    let (x, d, w) = (numbers(width * rows, 3), numbers(width * rows, 4), numbers(width, 5));
    same_on_all(|device| {
        let (mut a, delta, w) = (device.upload(&x).unwrap(), device.upload(&d).unwrap(), device.upload(&w).unwrap());
        let mut b = device.upload(&x).unwrap();
        let (mut out_a, mut out_b) = (device.alloc(width * rows).unwrap(), device.alloc(width * rows).unwrap());
        device.add_rms_norm(&mut a, &delta, &w, 1e-6, rows, &mut out_a).unwrap();
        device.add(&mut b, &delta, width * rows).unwrap();
        device.rms_norm(&b, &w, 1e-6, rows, &mut out_b).unwrap();
        let (a, b) = (read(device, &a, width * rows), read(device, &b, width * rows));
        let sums: Vec<f32> = x.iter().zip(&d).map(|(x, d)| x + d).collect();
        assert_eq!(bits(&a), bits(&sums));
        assert_eq!(bits(&b), bits(&sums));
        let out = read(device, &out_a, width * rows);
        assert_eq!(bits(&out), bits(&read(device, &out_b, width * rows)));
        out
    });
}

#[test]
fn head_norm_is_rms_norm_of_each_head() {
    let (rows, heads, dim) = (20, 9, 24);
    let (x, w) = (numbers(rows * heads * dim, 6), numbers(dim, 7));
    same_on_all(|device| {
        let w = device.upload(&w).unwrap();
        let mut y = device.upload(&x).unwrap();
        device.head_rms_norm(&mut y, &w, 1e-6, rows, heads).unwrap();
        let mut out = device.alloc(x.len()).unwrap();
        device.rms_norm(&device.upload(&x).unwrap(), &w, 1e-6, rows * heads, &mut out).unwrap();
        let y = read(device, &y, x.len());
        assert_eq!(bits(&y), bits(&read(device, &out, x.len())));
        y
    });
}

#[test]
fn silu_mul_is_the_formula() {
    let gate: Vec<f32> = numbers(70_001, 8).iter().map(|x| x * 20.0).collect();
    let up = numbers(70_001, 9);
    let got = same_on_all(|device| {
        let mut g = device.upload(&gate).unwrap();
        device.silu_mul(&mut g, &device.upload(&up).unwrap(), gate.len()).unwrap();
        read(device, &g, gate.len())
    });
    for ((g, u), got) in gate.iter().zip(&up).zip(got) {
        let g = f64::from(*g);
        let expected = g / (1.0 + (-g).exp()) * f64::from(*u);
        assert!((f64::from(got) - expected).abs() <= 1e-6 * expected.abs() + 1e-12, "{got} is not {expected}");
    }
}

fn rope_spec(style: RopeStyle, offset: usize, dim: usize) -> RopeSpec {
    RopeSpec {
        style,
        offset,
        dim,
        theta: 10_000.0,
        scaling: RopeScaling::None,
        frequency_divisors: None,
        max_positions: 1000,
    }
}

const ONE_HEAD: KvSpec =
    KvSpec { layers: 1, kv_heads: 1, head_dim_k: 4, head_dim_v: 4, page_tokens: 16, pages: 64, dtype: KvDtype::F32 };

#[test]
fn rope_rotates_pairs_by_position() {
    let (heads, head_dim, dim, offset) = (3, 20, 12, 4);
    let pages: Vec<u32> = (0..63).collect();
    let seqs = [SeqSpan { start: 990, len: 10, pages: &pages }, SeqSpan { start: 0, len: 2, pages: &[63] }];
    let positions: Vec<usize> = (990..1000).chain(0..2).collect();
    let x = numbers(12 * heads * head_dim, 10);
    for style in [RopeStyle::Half, RopeStyle::Interleaved] {
        let got = same_on_all(|device| {
            let pool = device.alloc_kv_pool(ONE_HEAD).unwrap();
            let plan = device.plan(&*pool, &seqs).unwrap();
            let rope = device.upload_rope(&rope_spec(style, offset, dim)).unwrap();
            let mut y = device.upload(&x).unwrap();
            device.rope(&rope, &plan, &mut y, heads, head_dim).unwrap();
            read(device, &y, x.len())
        });
        for (row, position) in positions.iter().enumerate() {
            for h in 0..heads {
                let at = (row * heads + h) * head_dim;
                let mut expected: Vec<f64> = x[at..][..head_dim].iter().map(|x| f64::from(*x)).collect();
                for i in 0..dim / 2 {
                    let (a, b) = match style {
                        RopeStyle::Half => (offset + i, offset + i + dim / 2),
                        RopeStyle::Interleaved => (offset + 2 * i, offset + 2 * i + 1),
                    };
                    let angle = *position as f64 * 10_000f64.powf(-2.0 * i as f64 / dim as f64);
                    let (sin, cos) = angle.sin_cos();
                    let (xa, xb) = (expected[a], expected[b]);
                    expected[a] = xa * cos - xb * sin;
                    expected[b] = xb * cos + xa * sin;
                }
                for (d, e) in expected.iter().enumerate() {
                    assert!((f64::from(got[at + d]) - e).abs() < 3e-7, "{style:?} position {position} element {d}");
                }
            }
        }
    }
}

#[test]
fn embedding_and_gathering_take_rows() {
    let (rows, cols) = (50, 37);
    let table = numbers(rows * cols, 11);
    let ids = [49, 0, 17, 17, 3];
    let got = same_on_all(|device| {
        let w = upload(device, rows, cols, &table);
        let mut out = device.alloc(5 * cols).unwrap();
        device.embed(&w, &ids, &mut out).unwrap();
        read(device, &out, 5 * cols)
    });
    for (id, got) in ids.iter().zip(got.chunks(cols)) {
        assert_eq!(got, &table[*id as usize * cols..][..cols]);
    }
    let device = CpuDevice::new(1).unwrap();
    let x = device.upload(&table).unwrap();
    let mut out = device.alloc(2 * cols).unwrap();
    device.gather_rows(&x, cols, &[49, 1], &mut out).unwrap();
    let got = read(&device, &out, 2 * cols);
    assert_eq!((&got[..cols], &got[cols..]), (&table[49 * cols..], &table[cols..2 * cols]));
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = CpuDevice::new(1).unwrap();
    let small = device.upload(&[1.0; 8]).unwrap();
    let mut out = device.alloc(8).unwrap();
    let weight = upload(&device, 4, 4, &[0.0; 16]);
    let text = |r: Result<(), kvdock_kernels::KernelError>| r.unwrap_err().to_string();

    let e = text(device.rms_norm(&small, &small, 1e-5, 2, &mut out));
    assert!(e.contains("rms_norm") && e.contains('x') && e.contains("16 elements"), "{e}");
    let e = text(device.linear(&small, 3, &mut [Projection { weight: &weight, bias: None, out: &mut out }]));
    assert!(e.contains("linear") && e.contains("12 elements"), "{e}");
    let e = text(device.linear(&small, usize::MAX, &mut [Projection { weight: &weight, bias: None, out: &mut out }]));
    assert!(e.contains("address space"), "{e}");
    let mut short = device.alloc(7).unwrap();
    let e = text(device.linear(&small, 2, &mut [Projection { weight: &weight, bias: None, out: &mut short }]));
    assert!(e.contains("out") && e.contains("8 elements") && e.contains("7 elements"), "{e}");
    let narrow = upload(&device, 4, 2, &[0.0; 8]);
    let mut other = device.alloc(8).unwrap();
    let e = text(device.linear(
        &small,
        1,
        &mut [
            Projection { weight: &weight, bias: None, out: &mut out },
            Projection { weight: &narrow, bias: None, out: &mut other },
        ],
    ));
    assert!(e.contains("2 columns") && e.contains("4 columns"), "{e}");
    let e = text(device.embed(&weight, &[0, 4], &mut out));
    assert!(e.contains("index 4 at row 1") && e.contains("4 rows"), "{e}");
    let e = text(device.gather_rows(&small, 4, &[2], &mut out));
    assert!(e.contains("index 2 at row 0") && e.contains("2 rows"), "{e}");
    let e = text(device.gather_rows(&small, 0, &[0], &mut out));
    assert!(e.contains("0 rows"), "{e}");
    let e = text(device.write(&mut out, usize::MAX, &[1.0]));
    assert!(e.contains("write"), "{e}");
    let e = text(device.read(&small, 8, &mut [0.0]));
    assert!(e.contains("9 elements"), "{e}");

    let pool = device.alloc_kv_pool(ONE_HEAD).unwrap();
    let plan = device.plan(&*pool, &[SeqSpan { start: 0, len: 2, pages: &[0] }]).unwrap();
    let rope = device.upload_rope(&rope_spec(RopeStyle::Half, 0, 8)).unwrap();
    let e = text(device.rope(&rope, &plan, &mut out, 1, 4));
    assert!(e.contains("head_dim is 4"), "{e}");
    let far = device.alloc_kv_pool(KvSpec { pages: 1, page_tokens: 256, ..ONE_HEAD }).unwrap();
    let e = text(device.kv_write(&*far, 0, &plan, &small, &small));
    assert!(e.contains("the plan's pool"), "{e}");
    let e = text(device.kv_write(&*pool, 1, &plan, &small, &small));
    assert!(e.contains("layer is 1"), "{e}");
    let how = AttentionSpec { heads: 1, scale: 1.0, window: None, sinks: None };
    let many = KvSpec { kv_heads: 2, ..ONE_HEAD };
    let two = device.alloc_kv_pool(many).unwrap();
    let plan_two = device.plan(&*two, &[SeqSpan { start: 0, len: 1, pages: &[0] }]).unwrap();
    let e = text(device.attention(&*two, 0, &plan_two, &small, &how, &mut out));
    assert!(e.contains("multiple of 2 KV heads"), "{e}");
    let none = AttentionSpec { window: Some(0), ..how };
    let e = text(device.attention(&*pool, 0, &plan, &small, &none, &mut out));
    assert!(e.contains("window"), "{e}");

    let mut spec = rope_spec(RopeStyle::Half, 0, 4);
    spec.max_positions = 2;
    let rope = device.upload_rope(&spec).unwrap();
    let late = device.plan(&*pool, &[SeqSpan { start: 2, len: 1, pages: &[0] }]).unwrap();
    let e = text(device.rope(&rope, &late, &mut out, 1, 4));
    assert!(e.contains("position is 2") && e.contains("below 2"), "{e}");

    for spec in [
        KvSpec { page_tokens: 0, ..ONE_HEAD },
        KvSpec { page_tokens: 257, ..ONE_HEAD },
        KvSpec { layers: 0, ..ONE_HEAD },
        KvSpec { pages: usize::MAX, ..ONE_HEAD },
        KvSpec { head_dim_v: usize::MAX / 2, ..ONE_HEAD },
    ] {
        assert!(device.alloc_kv_pool(spec).is_err(), "{spec:?}");
    }
    assert!(CpuDevice::new(0).is_err());
}

#[test]
fn a_handle_of_something_else_is_refused() {
    let device = CpuDevice::new(1).unwrap();
    let foreign = kvdock_kernels::Buf::from_parts(4, Box::new(()));
    let mut out = device.alloc(4).unwrap();
    let e = device.add(&mut out, &foreign, 4).unwrap_err().to_string();
    assert!(e.contains("delta does not belong to device cpu"), "{e}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// One row alone and the same row among others, any shape, also through several products.
    #[test]
    fn a_row_is_the_same_in_any_company(
        n in 1usize..80,
        k in 1usize..80,
        rows in 1usize..40,
        threads in 1usize..4,
        seed in 0u64..1000,
    ) {
        let device = CpuDevice::new(threads).unwrap();
        let w = upload(&device, n, k, &numbers(n * k, seed));
        let bias = device.upload(&numbers(n, seed + 1)).unwrap();
        let x = numbers(rows * k, seed + 2);
        let run = |x: &[f32], rows: usize| {
            let x = device.upload(x).unwrap();
            let mut out = device.alloc(rows * n).unwrap();
            device.linear(&x, rows, &mut [Projection { weight: &w, bias: Some(&bias), out: &mut out }]).unwrap();
            bits(&read(&device, &out, rows * n))
        };
        let together = run(&x, rows);
        for r in 0..rows {
            prop_assert_eq!(&run(&x[r * k..][..k], 1)[..], &together[r * n..][..n]);
        }
    }
}
