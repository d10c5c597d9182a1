//! Attention against f64, and its bits over chunks, pages, threads and instruction sets.

#![allow(clippy::unwrap_used)]

mod support;

use kvdock_kernels::cpu::{CpuDevice, Isa};
use kvdock_kernels::{AttentionSpec, Device, KvDtype, KvSpec, SeqSpan};
use proptest::prelude::*;
use support::{Sequence, bits, read};

fn spec(page_tokens: usize, dtype: KvDtype) -> KvSpec {
    KvSpec { layers: 2, kv_heads: 2, head_dim_k: 32, head_dim_v: 32, page_tokens, pages: 1, dtype }
}

fn near(got: &[f32], expected: &[f64], what: &str) {
    assert_eq!(got.len(), expected.len());
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*a) - b).abs();
        assert!(error <= 1e-5, "{what}: element {i} is {a}, not {b}");
    }
}

#[test]
fn outputs_are_near_f64() {
    let device = CpuDevice::new(2).unwrap();
    for dtype in [KvDtype::F16, KvDtype::BF16, KvDtype::F32] {
        let s = Sequence::new(spec(16, dtype), 6, 330, 1);
        near(&s.run(&device, &[330]), &s.reference(), dtype.name());
    }
}

#[test]
fn uneven_head_sizes_and_one_head_a_group() {
    let device = CpuDevice::new(2).unwrap();
    for (dk, dv, heads) in [(24, 40, 2), (7, 5, 4), (192, 128, 2), (64, 64, 14)] {
        let spec = KvSpec { head_dim_k: dk, head_dim_v: dv, ..spec(16, KvDtype::F16) };
        let s = Sequence::new(spec, heads, 150, 2);
        let whole = s.run(&device, &[150]);
        near(&whole, &s.reference(), &format!("{dk}, {dv}"));
        assert_eq!(bits(&s.run(&device, &[13])), bits(&whole), "{dk}, {dv}");
    }
}

#[test]
fn windows_and_sinks() {
    let device = CpuDevice::new(2).unwrap();
    for window in [1, 2, 63, 64, 65, 300] {
        let mut s = Sequence::new(spec(16, KvDtype::F32), 4, 400, 3);
        s.window = Some(window);
        let whole = s.run(&device, &[400]);
        near(&whole, &s.reference(), &format!("window {window}"));
        assert_eq!(bits(&s.run(&device, &[37, 1, 1])), bits(&whole), "window {window}");
        s.sinks = Some(vec![0.5, -2.0, 3.0, 0.0]);
        let whole = s.run(&device, &[400]);
        near(&whole, &s.reference(), &format!("window {window} with sinks"));
        assert_eq!(bits(&s.run(&device, &[100])), bits(&whole), "window {window} with sinks");
    }
}

/// The pool is filled with NaN first, so a read of a key or value that is not there shows.
#[test]
fn bits_do_not_depend_on_chunks() {
    let device = CpuDevice::new(2).unwrap();
    let s = Sequence::new(spec(16, KvDtype::F16), 6, 600, 4);
    let whole = bits(&s.run(&device, &[600]));
    for steps in [&[1][..], &[16], &[64], &[255, 2], &[512], &[7, 1, 1, 64, 55, 1, 3, 28]] {
        assert_eq!(bits(&s.run(&device, steps)), whole, "steps {steps:?}");
    }
}

#[test]
fn bits_do_not_depend_on_page_size_threads_or_instruction_set() {
    let two = CpuDevice::new(2).unwrap();
    for dtype in [KvDtype::F16, KvDtype::BF16, KvDtype::F32] {
        let make = |page| Sequence::new(spec(page, dtype), 6, 300, 5);
        let expected = bits(&make(16).run(&two, &[300]));
        for page in [1, 3, 15, 17, 32, 48, 64, 100, 256] {
            assert_eq!(bits(&make(page).run(&two, &[41])), expected, "page of {page}");
        }
        for isa in Isa::available() {
            for threads in [1, 3] {
                let device = CpuDevice::with_isa(threads, isa).unwrap();
                for steps in [&[300][..], &[290, 1]] {
                    let got = bits(&make(16).run(&device, steps));
                    assert_eq!(got, expected, "{} {steps:?}", device.name());
                }
            }
        }
    }
}

/// Sequences of different lengths and phases in one step give what each gives alone.
#[test]
fn bits_do_not_depend_on_the_batch() {
    let device = CpuDevice::new(2).unwrap();
    let spec = KvSpec { layers: 1, pages: 100, ..spec(16, KvDtype::F16) };
    // (tokens before the step, tokens in the step)
    let lengths = [(0, 70), (300, 1), (15, 1), (130, 50), (0, 1), (511, 2)];
    let pool = device.alloc_kv_pool(spec).unwrap();
    let mut next_page = 99;
    let mut tables = Vec::new();
    let mut expected = Vec::new();
    let (mut q, mut k, mut v) = (Vec::new(), Vec::new(), Vec::new());
    for (i, (before, new)) in lengths.into_iter().enumerate() {
        let s = Sequence::new(spec, 6, before + new, 10 + i as u64);
        let alone = s.run(&device, &[before + new]);
        expected.extend_from_slice(&alone[before * 6 * 32..]);
        let table: Vec<u32> = (0..(before + new).div_ceil(16))
            .map(|_| {
                next_page -= 1;
                next_page
            })
            .collect();
        if before > 0 {
            let seq = SeqSpan { start: 0, len: before as u32, pages: &table };
            let plan = device.plan(&*pool, &[seq]).unwrap();
            let k = device.upload(&s.k[..before * 64]).unwrap();
            let v = device.upload(&s.v[..before * 64]).unwrap();
            device.kv_write(&*pool, 0, &plan, &k, &v).unwrap();
        }
        q.extend_from_slice(&s.q[before * 6 * 32..]);
        k.extend_from_slice(&s.k[before * 64..]);
        v.extend_from_slice(&s.v[before * 64..]);
        tables.push(table);
    }
    let seqs: Vec<SeqSpan<'_>> = lengths
        .iter()
        .zip(&tables)
        .map(|((before, new), pages)| SeqSpan { start: *before as u32, len: *new as u32, pages })
        .collect();
    let plan = device.plan(&*pool, &seqs).unwrap();
    let (q, k, v) = (device.upload(&q).unwrap(), device.upload(&k).unwrap(), device.upload(&v).unwrap());
    let mut out = device.alloc(expected.len()).unwrap();
    device.kv_write(&*pool, 0, &plan, &k, &v).unwrap();
    let how = AttentionSpec { heads: 6, scale: 32f32.powf(-0.5), window: None, sinks: None };
    device.attention(&*pool, 0, &plan, &q, &how, &mut out).unwrap();
    assert_eq!(bits(&read(&device, &out, expected.len())), bits(&expected));
}

/// Rows of sequences that share the pages of their first splits give what each gives alone.
#[test]
fn bits_do_not_depend_on_shared_pages() {
    let spec = KvSpec { layers: 1, pages: 400, ..spec(16, KvDtype::F16) };
    let prefix = Sequence::new(spec, 6, 608, 40);
    let common: Vec<u32> = (0..38).collect();
    // Tokens that each sequence shares with the prefix, and the position of its row: more rows than go together, some that leave
    // the prefix early, at the end of a split and next to it, and one that shares nothing.
    let mut lengths = vec![(608, 608); 19];
    lengths.extend([(256, 400), (256, 256), (512, 512), (272, 290), (608, 615), (240, 255), (512, 1100), (0, 30)]);
    lengths.extend([(608, 640); 3]);
    let sequences: Vec<Sequence> =
        lengths.iter().enumerate().map(|(i, (_, at))| Sequence::new(spec, 6, at + 1, 50 + i as u64)).collect();
    let mut next = 38;
    let tables: Vec<Vec<u32>> = lengths
        .iter()
        .map(|(shared, at)| {
            let own = (at + 1usize).div_ceil(16) - shared / 16;
            next += own as u32;
            common[..shared / 16].iter().copied().chain(next - own as u32..next).collect()
        })
        .collect();
    let row = |x: &[f32], at: usize, width: usize| x[at * width..][..width].to_vec();
    let sinks = [0.5, -2.0, 3.0, 0.0, 1.0, -1.0];

    for isa in Isa::available() {
        let device = CpuDevice::with_isa(if isa == Isa::Portable { 1 } else { 3 }, isa).unwrap();
        let pool = device.alloc_kv_pool(spec).unwrap();
        let write = |k: &[f32], v: &[f32], start: usize, len: usize, pages: &[u32]| {
            let plan = device.plan(&*pool, &[SeqSpan { start: start as u32, len: len as u32, pages }]).unwrap();
            let part = |x: &[f32]| device.upload(&x[start * 64..][..len * 64]).unwrap();
            device.kv_write(&*pool, 0, &plan, &part(k), &part(v)).unwrap();
        };
        write(&prefix.k, &prefix.v, 0, 608, &common);
        for ((s, (shared, at)), pages) in sequences.iter().zip(&lengths).zip(&tables) {
            write(&s.k, &s.v, *shared, at + 1 - shared, pages);
        }
        let device_sinks = device.upload(&sinks).unwrap();
        for (window, sinks) in [(None, None), (None, Some(&device_sinks)), (Some(300), None)] {
            let how = AttentionSpec { heads: 6, scale: 32f32.powf(-0.5), window, sinks };
            let attend = |members: &[usize]| {
                let spans: Vec<SeqSpan<'_>> = members
                    .iter()
                    .map(|i| SeqSpan { start: lengths[*i].1 as u32, len: 1, pages: &tables[*i] })
                    .collect();
                let plan = device.plan(&*pool, &spans).unwrap();
                let q: Vec<f32> = members.iter().flat_map(|i| row(&sequences[*i].q, lengths[*i].1, 192)).collect();
                let mut out = device.alloc(q.len()).unwrap();
                device.attention(&*pool, 0, &plan, &device.upload(&q).unwrap(), &how, &mut out).unwrap();
                bits(&read(&device, &out, members.len() * 192))
            };
            let alone: Vec<Vec<u32>> = (0..lengths.len()).map(|i| attend(&[i])).collect();
            // All in order, the other way round, a few, and each with each: of two, keys are read where they lie, and either may
            // end just behind what they share.
            let all: Vec<usize> = (0..lengths.len()).collect();
            let reversed = all.iter().rev().copied().collect();
            let pairs =
                (17..lengths.len()).flat_map(|a| (17..lengths.len()).map(move |b| vec![a, b])).filter(|p| p[0] != p[1]);
            for members in [all, reversed, vec![3, 19, 7], vec![25, 0]].into_iter().chain(pairs) {
                let expected: Vec<u32> = members.iter().flat_map(|i| alone[*i].clone()).collect();
                assert!(attend(&members) == expected, "{} window {window:?} {members:?}", device.name());
            }
        }
    }
}

/// Values that are not finite are seen by the rows at and behind them, and by no other row of their block.
#[test]
fn values_that_are_not_finite_do_not_reach_earlier_rows() {
    for isa in Isa::available() {
        let device = CpuDevice::with_isa(2, isa).unwrap();
        for dtype in [KvDtype::F16, KvDtype::BF16, KvDtype::F32] {
            let mut s = Sequence::new(spec(16, dtype), 6, 100, 7);
            let before = bits(&s.run(&device, &[70]))[..69 * 6 * 32].to_vec();
            s.v[69 * 64..][..64].fill(f32::INFINITY);
            s.k[80 * 64..][..64].fill(f32::NAN);
            let whole = s.run(&device, &[100]);
            assert!(bits(&whole[..69 * 6 * 32]) == before, "{} {}", device.name(), dtype.name());
            assert!(whole[69 * 6 * 32..].iter().all(|x| !x.is_finite()), "{} {}", device.name(), dtype.name());
            assert!(bits(&s.run(&device, &[33]))[..80 * 6 * 32] == bits(&whole)[..80 * 6 * 32], "{}", device.name());
        }
    }
}

/// Scores far from zero neither overflow nor lose the small ones' exact zero.
#[test]
fn large_scores_are_safe() {
    let device = CpuDevice::new(1).unwrap();
    let mut s = Sequence::new(spec(16, KvDtype::F32), 2, 200, 6);
    s.q.iter_mut().for_each(|q| *q *= 300.0);
    let got = s.run(&device, &[200]);
    for (i, (a, b)) in got.iter().zip(s.reference()).enumerate() {
        assert!((f64::from(*a) - b).abs() < 2e-3, "element {i} is {a}, not {b}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_geometry_in_any_chunks(
        page in 1usize..=64,
        group in 1usize..=8,
        kv_heads in 1usize..=3,
        dk in 1usize..=40,
        dv in 1usize..=40,
        tokens in 1usize..=330,
        steps in prop::collection::vec(1usize..=90, 1..5),
        seed in 0u64..1000,
    ) {
        let device = CpuDevice::new(2).unwrap();
        let spec = KvSpec {
            layers: 1,
            kv_heads,
            head_dim_k: dk,
            head_dim_v: dv,
            page_tokens: page,
            pages: 1,
            dtype: KvDtype::F16,
        };
        let s = Sequence::new(spec, kv_heads * group, tokens, seed);
        let whole = s.run(&device, &[tokens]);
        for (a, b) in whole.iter().zip(s.reference()) {
            prop_assert!((f64::from(*a) - b).abs() <= 1e-5, "{} is not {}", a, b);
        }
        prop_assert_eq!(bits(&s.run(&device, &steps)), bits(&whole));
    }
}
