//! Routers, experts, weights of eight and four bits, and hyper-connections.

use kvdock_kernels::rowmath::{sigmoid, softmax, softplus, top_k};
use kvdock_kernels::{from_e4m3, to_e4m3};

use crate::args;
use crate::compile::Program;
use crate::data::{Random, near, same};
use crate::emulator::{Checked, Gpu, Grid, line};

/// How a router chooses.
#[derive(Debug, Clone, Copy)]
struct Choice {
    scoring: u32,
    groups: usize,
    chosen: usize,
    bias: bool,
    renormalize: bool,
}

/// A row's experts and weights, as the models' router has them.
fn choose(logits: &[f32], bias: &[f32], k: usize, factor: f32, by: Choice) -> (Vec<u32>, Vec<f32>) {
    let mut scores = logits.to_vec();
    match by.scoring {
        0 => softmax(&mut scores),
        2 => scores.iter_mut().for_each(|x| *x = sigmoid(*x)),
        3 => scores.iter_mut().for_each(|x| *x = softplus(*x).sqrt()),
        _ => {}
    }
    let mut biased = scores.clone();
    if by.bias {
        biased.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
    }
    if by.groups > 1 {
        let size = biased.len() / by.groups;
        let sums: Vec<f32> =
            biased.chunks_exact(size).map(|g| top_k(g, 2).iter().map(|i| g[*i as usize]).sum()).collect();
        let kept = top_k(&sums, by.chosen);
        for (i, group) in biased.chunks_exact_mut(size).enumerate() {
            if !kept.contains(&(i as u32)) {
                group.fill(f32::NEG_INFINITY);
            }
        }
    }
    let experts = top_k(&biased, k);
    let mut weights: Vec<f32> = experts.iter().map(|e| scores[*e as usize]).collect();
    if by.scoring == 1 {
        softmax(&mut weights);
    }
    if by.renormalize {
        let sum = weights.iter().sum::<f32>() + 1e-20;
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    weights.iter_mut().for_each(|w| *w *= factor);
    (experts, weights)
}

pub fn routers(program: &Program) -> Checked {
    let plain = Choice { scoring: 0, groups: 1, chosen: 1, bias: false, renormalize: false };
    let choices = [
        plain,
        Choice { scoring: 1, ..plain },
        Choice { scoring: 2, bias: true, renormalize: true, ..plain },
        Choice { scoring: 2, groups: 8, chosen: 3, bias: true, renormalize: true },
        Choice { scoring: 3, bias: true, renormalize: true, ..plain },
    ];
    for (count, k) in [(8usize, 2usize), (64, 6), (160, 8)] {
        let rows = 5;
        let mut random = Random::new(count as u64);
        let mut logits: Vec<f32> = random.floats(rows * count).iter().map(|x| 3.0 * x).collect();
        // Equal ones: the lower number first.
        logits[..count].iter_mut().for_each(|x| *x = x.round());
        let bias = random.floats(count);
        for by in choices.into_iter().filter(|by| by.groups == 1 || count > 8) {
            let mut gpu = Gpu::new(program, count as u64);
            let (gl, gb) = (gpu.memory(&logits)?, gpu.memory(&bias)?);
            let (experts, weights) = (gpu.memory(&vec![999u32; rows * k])?, gpu.poison(rows * k)?);
            let shared = 4 * (2 * count + by.groups) as u32;
            gpu.launch(
                "route",
                Grid([rows as u32, 1, 1], 32, shared),
                args![
                    gl,
                    by.bias.then_some(gb),
                    None,
                    None,
                    experts,
                    weights,
                    count as u32,
                    k as u32,
                    by.scoring,
                    by.groups as u32,
                    by.chosen as u32,
                    u32::from(by.renormalize),
                    1.5f32
                ],
            )?;
            let (mut want_experts, mut want_weights) = (Vec::new(), Vec::new());
            for row in logits.chunks_exact(count) {
                let (e, w) = choose(row, &bias, k, 1.5, by);
                want_experts.extend(e);
                want_weights.extend(w);
            }
            same(&format!("experts, {by:?}"), &gpu.read(experts)?, &want_experts)?;
            near(&format!("weights, {by:?}"), &gpu.read(weights)?, &want_weights, 1e-6)?;
        }
    }
    Ok(())
}

#[test]
fn routers_choose_as_the_cpu_does() {
    routers(&Program::of("moe.cu", &[])).unwrap();
}

#[test]
fn tokens_may_have_their_experts_by_table() {
    let (count, k, ids) = (6u32, 2u32, [3u32, 0]);
    let table = [4u32, 1, 0, 0, 2, 2, 5, 3];
    let logits = Random::new(1).floats(2 * count as usize);
    let mut gpu = Gpu::new(&Program::of("moe.cu", &[]), 1);
    let (gl, gi, gt) = (gpu.memory(&logits).unwrap(), gpu.memory(&ids).unwrap(), gpu.memory(&table).unwrap());
    let (experts, weights) = (gpu.memory(&[9u32; 4]).unwrap(), gpu.poison(4).unwrap());
    let args = args![gl, None, gi, gt, experts, weights, count, k, 2u32, 1u32, 1u32, 0u32, 1.0f32];
    gpu.launch("route", Grid([2, 1, 1], 32, 4 * 13), args).unwrap();
    same("experts", &gpu.read(experts).unwrap(), &[5u32, 3, 4, 1]).unwrap();
    let want = [5, 3, 6 + 4, 6 + 1].map(|i| sigmoid(logits[i]));
    near("weights", &gpu.read(weights).unwrap(), &want, 1e-6).unwrap();
}

/// Pairs by expert, what experts make of them, on both kinds of kernels, and their sums.
pub fn experts(moe: &Program, gguf: &Program, matmul: &Program) -> Checked {
    let (rows, k, count, hidden, width) = (41usize, 3usize, 7usize, 40usize, 24usize);
    let pairs = rows * k;
    let mut random = Random::new(3);
    let chosen: Vec<u32> = (0..rows).flat_map(|_| random.some(k, count - 1)).collect();
    let factors = random.floats(pairs);
    let mut gpu = Gpu::new(moe, 3);
    let (ge, gf) = (gpu.memory(&chosen)?, gpu.memory(&factors)?);
    // A rank holds some of the experts.
    let (first, held) = (2u32, 3usize);
    let mine = |expert: u32| (first..first + held as u32).contains(&expert);
    let (offsets, order) = (gpu.memory(&vec![999u32; held + 1])?, gpu.memory(&vec![999u32; pairs])?);
    gpu.launch("moe_sort", line(held, 256), args![ge, pairs as u32, first, offsets, order])?;
    let mut held_order: Vec<u32> = (0..pairs as u32).filter(|pair| mine(chosen[*pair as usize])).collect();
    held_order.sort_by_key(|pair| chosen[*pair as usize]);
    same("order of some", &gpu.read(order)?[..held_order.len()], &held_order[..])?;
    let found: Vec<u32> = gpu.read(offsets)?;
    let before = |expert: u32| chosen.iter().filter(|c| mine(**c) && **c < first + expert).count() as u32;
    same("offsets of some", &found, &(0..=held as u32).map(before).collect::<Vec<u32>>())?;

    let (offsets, order) = (gpu.memory(&vec![999u32; count + 1])?, gpu.memory(&vec![999u32; pairs])?);
    gpu.launch("moe_sort", line(count, 256), args![ge, pairs as u32, 0u32, offsets, order])?;
    let mut want_order: Vec<u32> = (0..pairs as u32).collect();
    want_order.sort_by_key(|pair| chosen[*pair as usize]);
    let want_offsets: Vec<u32> = (0..=count as u32).map(|e| chosen.iter().filter(|c| **c < e).count() as u32).collect();
    same("order", &gpu.read(order)?, &want_order)?;
    same("offsets", &gpu.read(offsets)?, &want_offsets)?;

    let outputs = random.floats(pairs * width);
    let sums = |counted: &dyn Fn(u32) -> bool| -> Vec<f32> {
        let mut sums = vec![0.0f64; rows * width];
        for pair in (0..pairs).filter(|pair| counted(chosen[*pair])) {
            for d in 0..width {
                sums[pair / k * width + d] += f64::from(factors[pair]) * f64::from(outputs[pair * width + d]);
            }
        }
        sums.iter().map(|x| *x as f32).collect()
    };
    // What other ranks' experts would give was never written.
    let mut some = outputs.clone();
    for pair in (0..pairs).filter(|pair| !mine(chosen[*pair])) {
        some[pair * width..][..width].fill(f32::NAN);
    }
    let (go, y) = (gpu.memory(&some)?, gpu.poison(rows * width)?);
    let sizes = (k as u32, width as u32);
    gpu.launch("moe_combine", line(rows, 256), args![go, ge, gf, y, sizes.0, sizes.1, first, held as u32])?;
    near("moe_combine of some", &gpu.read(y)?, &sums(&mine), 1e-6)?;
    let (go, y) = (gpu.memory(&outputs)?, gpu.poison(rows * width)?);
    gpu.launch("moe_combine", line(rows, 256), args![go, ge, gf, y, sizes.0, sizes.1, 0u32, count as u32])?;
    let mut want = sums(&|_| true);
    near("moe_combine", &gpu.read(y)?, &want, 1e-6)?;
    let (more, gates) = (random.floats(rows * width), random.floats(rows));
    let (gm, gg) = (gpu.memory(&more)?, gpu.memory(&gates)?);
    gpu.launch("add_gated_rows", line(rows, 256), args![y, gm, gg, width as u32])?;
    gpu.launch("add_gated_rows", line(rows, 256), args![y, gm, None, width as u32])?;
    want.iter_mut().enumerate().for_each(|(i, y)| *y += (1.0 + sigmoid(gates[i / width])) * more[i]);
    near("add_gated_rows", &gpu.read(y)?, &want, 1e-6)?;

    // Weights of bf16 bytes by expert, with biases.
    let weights: Vec<u16> =
        random.floats(count * width * hidden).iter().map(|x| half::bf16::from_f32(*x).to_bits()).collect();
    let (biases, x) = (random.floats(count * width), random.floats(rows * hidden));
    let mut want = vec![0.0f32; pairs * width];
    for pair in 0..pairs {
        let expert = chosen[pair] as usize;
        for o in 0..width {
            let sum: f64 = (0..hidden)
                .map(|i| {
                    let w = half::bf16::from_bits(weights[(expert * width + o) * hidden + i]);
                    w.to_f64() * f64::from(x[pair / k * hidden + i])
                })
                .sum();
            want[pair * width + o] = (sum + f64::from(biases[expert * width + o])) as f32;
        }
    }
    for (program, kernel, columns, threads, relative) in
        [(gguf, "moe_matvec_bf16", 8, 256, 2e-6), (matmul, "matmul_grouped", 128, 256, 2e-5)]
    {
        let mut gpu = Gpu::new(program, 4);
        let (gw, gb, gx) = (gpu.memory(&weights)?, gpu.memory(&biases)?, gpu.memory(&x)?);
        let (offsets, order) = (gpu.memory(&want_offsets)?, gpu.memory(&want_order)?);
        let (at_weights, at_biases) = (gpu.memory(&vec![0u64; count])?, gpu.memory(&vec![0u64; count])?);
        for expert in 0..count {
            gpu.point(at_weights, 8 * expert as u64, gw, (2 * expert * width * hidden) as u64)?;
            gpu.point(at_biases, 8 * expert as u64, gb, (4 * expert * width) as u64)?;
        }
        let out = gpu.poison(pairs * width)?;
        let grid = Grid([width.div_ceil(columns) as u32, 2, count as u32], threads, 0);
        let args = args![at_weights, at_biases, gx, offsets, order, out, width as u32, hidden as u32, k as u32];
        gpu.launch(kernel, grid, args)?;
        near(kernel, &gpu.read(out)?, &want, relative)?;
    }
    Ok(())
}

#[test]
fn experts_get_their_pairs_and_are_summed() {
    let matmul = Program::of("matmul.cu", &["-DFORMAT=2", "-DPARTS=2"]);
    experts(&Program::of("moe.cu", &[]), &Program::of("gguf.cu", &[]), &matmul).unwrap();
}

/// Matrices by groups, with strides.
#[test]
fn groups_have_matrices_of_their_own() {
    let (groups, rows, outs, cols) = (3usize, 6usize, 10usize, 20usize);
    let mut random = Random::new(8);
    let (w, x) = (random.floats(groups * outs * cols), random.floats(rows * groups * cols));
    let mut gpu = Gpu::new(&Program::of("gguf.cu", &[]), 1);
    let (gw, gx, out) = (gpu.memory(&w).unwrap(), gpu.memory(&x).unwrap(), gpu.poison(rows * groups * outs).unwrap());
    let (x_stride, out_stride) = ((groups * cols) as u64, (groups * outs) as u64);
    gpu.launch(
        "matvec_groups_f32",
        Grid([2, 2, groups as u32], 256, 0),
        args![gw, gx, out, outs as u32, cols as u32, rows as u32, x_stride, out_stride],
    )
    .unwrap();
    let mut want = Vec::new();
    for (row, group, o) in (0..rows * groups * outs).map(|i| (i / (groups * outs), i / outs % groups, i % outs)) {
        let (w, x) = (&w[(group * outs + o) * cols..][..cols], &x[(row * groups + group) * cols..][..cols]);
        want.push(w.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32);
    }
    near("matvec_groups", &gpu.read(out).unwrap(), &want, 2e-6).unwrap();
}

/// The value of a code of e2m1, and of a byte of ue8m0.
fn e2m1(code: u8) -> f32 {
    let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { size } else { -size }
}
fn e8m0(byte: u8) -> f32 {
    2f64.powi(i32::from(byte) - 127) as f32
}

pub fn narrow(program: &Program) -> Checked {
    for (kind, powers) in [("fp8", false), ("fp8", true), ("mxfp4", true)] {
        let (rows, cols, x_rows) = (135usize, if kind == "fp8" { 140usize } else { 96 }, 5usize);
        let mut random = Random::new(cols as u64);
        let blocks = if kind == "fp8" { rows.div_ceil(128) * cols.div_ceil(128) } else { rows * cols / 32 };
        let (scale_bytes, scales): (Vec<u8>, Vec<f32>) = if powers {
            // Small ones, with the smallest there is.
            let bytes: Vec<u8> = (0..blocks).map(|i| if i == 1 { 0 } else { 118 + random.below(6) as u8 }).collect();
            (bytes.clone(), bytes.iter().map(|b| e8m0(*b)).collect())
        } else {
            let scales: Vec<f32> = random.floats(blocks).iter().map(|x| 0.01 * x).collect();
            (scales.iter().flat_map(|x| x.to_le_bytes()).collect(), scales)
        };
        let (bytes, want): (Vec<u8>, Vec<f32>) = if kind == "fp8" {
            let bytes: Vec<u8> = random.floats(rows * cols).iter().map(|x| to_e4m3(200.0 * x)).collect();
            let scale = |i: usize| scales[i / cols / 128 * cols.div_ceil(128) + i % cols / 128];
            let want = bytes.iter().enumerate().map(|(i, b)| from_e4m3(*b) * scale(i)).collect();
            (bytes, want)
        } else {
            let bytes = random.bytes(rows * cols / 2);
            let value = |i: usize| e2m1(bytes[i / 2] >> (4 * (i % 2)) & 15) * scales[i / 32];
            let want = (0..rows * cols).map(value).collect();
            (bytes, want)
        };
        let x = random.floats(x_rows * cols);
        let mut gpu = Gpu::new(program, 9);
        let (w, s, gx) = (gpu.memory(&bytes)?, gpu.memory(&scale_bytes)?, gpu.memory(&x)?);
        let (floats, halves) = (gpu.poison(rows * cols)?, gpu.memory(&vec![0xFFFFu16; rows * cols])?);
        let (r, c, flag) = (rows as u32, cols as u32, u32::from(powers));
        gpu.launch(&format!("dequant_{kind}_f32"), line(3, 256), args![w, s, flag, floats, r, c])?;
        same(kind, &gpu.read(floats)?, &want)?;
        gpu.launch(&format!("dequant_{kind}_bf16"), line(3, 256), args![w, s, flag, halves, r, c])?;
        let rounded: Vec<u16> = want.iter().map(|x| half::bf16::from_f32(*x).to_bits()).collect();
        same(&format!("{kind} as bf16"), &gpu.read(halves)?, &rounded)?;
        let out = gpu.poison(x_rows * rows)?;
        let grid = Grid([rows.div_ceil(8) as u32, 2, 1], 256, 0);
        gpu.launch(&format!("matvec_{kind}"), grid, args![w, s, flag, gx, None, out, r, c, x_rows as u32])?;
        let product: Vec<f32> = x
            .chunks_exact(cols)
            .flat_map(|x| {
                let dot = |w: &[f32]| w.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32;
                want.chunks_exact(cols).map(dot).collect::<Vec<f32>>()
            })
            .collect();
        near(&format!("matvec_{kind}"), &gpu.read(out)?, &product, 2e-6)?;

        // The same matrix for two experts, three pairs and two.
        let (weights, scale_list) = (gpu.memory(&[0u64; 2])?, gpu.memory(&[0u64; 2])?);
        let (biases, bias) = (gpu.memory(&[0u64; 2])?, random.floats(rows));
        let at_bias = gpu.memory(&bias)?;
        for expert in 0..2 {
            gpu.point(weights, 8 * expert, w, 0)?;
            gpu.point(scale_list, 8 * expert, s, 0)?;
            gpu.point(biases, 8 * expert, at_bias, 0)?;
        }
        let (offsets, order) = (gpu.memory(&[0u32, 3, 5])?, gpu.memory(&[1u32, 3, 4, 0, 2])?);
        let out = gpu.poison(x_rows * rows)?;
        let grid = Grid([rows.div_ceil(8) as u32, 1, 2], 256, 0);
        let args = args![weights, scale_list, flag, biases, gx, offsets, order, out, r, c, 1u32];
        gpu.launch(&format!("moe_matvec_{kind}"), grid, args)?;
        let biased: Vec<f32> = product.iter().enumerate().map(|(i, y)| y + bias[i % rows]).collect();
        near(&format!("moe_matvec_{kind}"), &gpu.read(out)?, &biased, 2e-6)?;
    }
    Ok(())
}

#[test]
fn narrow_weights_are_those_of_the_cpu() {
    narrow(&Program::of("narrow.cu", &[])).unwrap();
}

/// Softmax by rows, then columns and rows to 1 in turns, in double precision.
fn doubly_stochastic(logits: [[f64; 4]; 4], rounds: usize, eps: f64) -> [[f64; 4]; 4] {
    let mut c = logits.map(|row| {
        let all: f64 = row.iter().map(|x| x.exp()).sum();
        row.map(|x| x.exp() / all + eps)
    });
    for round in 0..rounds {
        if round > 0 {
            c = c.map(|row| row.map(|x| x / (row.iter().sum::<f64>() + eps)));
        }
        let sums: [f64; 4] = std::array::from_fn(|k| c.iter().map(|row| row[k]).sum::<f64>() + eps);
        c = c.map(|row| std::array::from_fn(|k| row[k] / sums[k]));
    }
    c
}

pub fn hyper(program: &Program) -> Checked {
    let (rows, hidden, eps, norm_eps) = (3usize, 77usize, 1e-6f32, 1e-5f32);
    let mut random = Random::new(5);
    let (streams, mixes) = (random.floats(rows * 4 * hidden), random.floats(rows * 24));
    let (base, y) = (random.floats(24), random.floats(rows * hidden));
    let scale = [0.7f32, 1.3, 2.0];
    let head_mixes = random.floats(rows * 4);
    for rounds in [1u32, 20] {
        let mut gpu = Gpu::new(program, u64::from(rounds));
        let (gs, gm, gb, gc) = (gpu.memory(&streams)?, gpu.memory(&mixes)?, gpu.memory(&base)?, gpu.memory(&scale)?);
        let (input, backs, gy) = (gpu.poison(rows * hidden)?, gpu.poison(rows * 20)?, gpu.memory(&y)?);
        let (h, grid) = (hidden as u32, line(rows, 256));
        gpu.launch("hyper_enter", grid, args![gs, gm, gb, gc, input, backs, h, rounds, eps, norm_eps])?;
        let (ghm, out) = (gpu.memory(&head_mixes)?, gpu.poison(rows * hidden)?);
        gpu.launch("hyper_head", grid, args![gs, ghm, gb, 0.9f32, out, h, eps, norm_eps])?;
        let head: Vec<f32> = gpu.read(out)?;
        gpu.launch("hyper_leave", grid, args![gs, backs, gy, h])?;
        let (mut want_input, mut want_streams, mut want_head) = (Vec::new(), Vec::new(), Vec::new());
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        for row in 0..rows {
            let x = |j: usize, d: usize| f64::from(streams[(row * 4 + j) * hidden + d]);
            let all = (0..4).flat_map(|j| (0..hidden).map(move |d| (j, d)));
            let squares: f64 = all.map(|(j, d)| x(j, d) * x(j, d)).sum();
            let factor = (squares / (4 * hidden) as f64 + f64::from(norm_eps)).sqrt().recip();
            let at = |i: usize, kind: usize| {
                f64::from(mixes[row * 24 + i]) * factor * f64::from(scale[kind]) + f64::from(base[i])
            };
            let before: [f64; 4] = std::array::from_fn(|j| sigmoid(at(j, 0)) + f64::from(eps));
            let post: [f64; 4] = std::array::from_fn(|j| 2.0 * sigmoid(at(4 + j, 1)));
            let logits = std::array::from_fn(|j| std::array::from_fn(|k| at((2 + j) * 4 + k, 2)));
            let among = doubly_stochastic(logits, rounds as usize, f64::from(eps));
            let mix = |w: &[f64; 4], d: usize| (0..4).map(|j| w[j] * x(j, d)).sum::<f64>() as f32;
            want_input.extend((0..hidden).map(|d| mix(&before, d)));
            let head: [f64; 4] = std::array::from_fn(|j| {
                let logit = f64::from(head_mixes[row * 4 + j]) * factor * f64::from(0.9f32) + f64::from(base[j]);
                sigmoid(logit) + f64::from(eps)
            });
            want_head.extend((0..hidden).map(|d| mix(&head, d)));
            for k in 0..4 {
                let column: [f64; 4] = std::array::from_fn(|j| among[j][k]);
                let own = |d: usize| post[k] * f64::from(y[row * hidden + d]);
                want_streams.extend((0..hidden).map(|d| (own(d) + f64::from(mix(&column, d))) as f32));
            }
        }
        near("input", &gpu.read(input)?, &want_input, 2e-6)?;
        near("head", &head, &want_head, 2e-6)?;
        near("streams", &gpu.read(gs)?, &want_streams, 2e-6)?;
    }
    Ok(())
}

#[test]
fn hyper_connections_mix_and_unmix() {
    hyper(&Program::of("hyper.cu", &[])).unwrap();
}
