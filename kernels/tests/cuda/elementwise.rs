//! Products and sums by elements, gathers, rotary embeddings, and new keys and values in their pages.

use half::{bf16, f16};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::rowmath::{sigmoid, silu};
use kvdock_kernels::{Device, RopeScaling, RopeSpec, RopeStyle, Rotation};

use crate::args;
use crate::compile::Program;
use crate::data::{Random, near, same};
use crate::emulator::{Checked, Gpu, line};

pub fn products(program: &Program) -> Checked {
    let cpu = CpuDevice::new(1).unwrap();
    for len in [1usize, 31, 256, 1000, 5000] {
        let mut random = Random::new(len as u64);
        let mut floats = || random.floats(len).iter().map(|x| 12.0 * x).collect::<Vec<f32>>();
        let (gate, up) = (floats(), floats());
        let mut gpu = Gpu::new(program, len as u64);
        let other = gpu.memory(&up)?;
        let n = len as u64;
        let grid = line(len.div_ceil(1024), 256);
        let mut run = |kernel: &str, more: [Option<f32>; 2]| -> Result<Vec<f32>, String> {
            let x = gpu.memory(&gate)?;
            let mut args: Vec<_> = vec![x.into(), other.into(), n.into()];
            args.extend(more.into_iter().flatten().map(Into::into));
            gpu.launch(kernel, grid, &args)?;
            gpu.read(x)
        };
        let want = |of: &dyn Fn(f32, f32) -> f32| gate.iter().zip(&up).map(|(g, u)| of(*g, *u)).collect::<Vec<f32>>();
        let mut buf = cpu.upload(&gate).unwrap();
        cpu.silu_mul(&mut buf, &cpu.upload(&up).unwrap(), len).unwrap();
        let mut by_cpu = vec![0.0; len];
        cpu.read(&buf, 0, &mut by_cpu).unwrap();
        near("silu_mul", &run("silu_mul", [None, None])?, &by_cpu, 1e-6)?;
        let clamped = want(&|g, u| silu(g.min(7.0)) * u.clamp(-7.0, 7.0));
        near("silu_mul_clamped", &run("silu_mul_clamped", [Some(7.0), None])?, &clamped, 1e-6)?;
        let oss = want(&|g, u| (u.clamp(-7.0, 7.0) + 1.0) * (g.min(7.0) * sigmoid(1.702 * g.min(7.0))));
        near("gpt_oss_mul", &run("gpt_oss_mul", [Some(1.702), Some(7.0)])?, &oss, 1e-6)?;
        near("sigmoid_mul", &run("sigmoid_mul", [None, None])?, &want(&|x, g| x * sigmoid(g)), 1e-6)?;
        same("add", &run("add", [None, None])?, &want(&|x, d| x + d))?;
    }
    Ok(())
}

#[test]
fn products_are_those_of_the_cpu() {
    products(&Program::of("elementwise.cu", &[])).unwrap();
}

#[test]
fn rows_are_gathered_and_memory_is_filled() {
    let (width, rows, picked) = (37usize, 9, 14);
    let mut random = Random::new(1);
    let x = random.floats(rows * width);
    let indices: Vec<u32> = (0..picked).map(|_| random.below(rows) as u32).collect();
    let mut gpu = Gpu::new(&Program::of("elementwise.cu", &[]), 1);
    let (from, at, to) = (gpu.memory(&x).unwrap(), gpu.memory(&indices).unwrap(), gpu.poison(picked * width).unwrap());
    gpu.launch("gather_rows", line(picked, 256), args![from, at, to, width as u32, picked as u32]).unwrap();
    let want: Vec<f32> = indices.iter().flat_map(|i| x[*i as usize * width..][..width].to_vec()).collect();
    same("gather_rows", &gpu.read(to).unwrap(), &want).unwrap();
    gpu.launch("fill", line(1, 256), args![to, 2.5f32, (picked * width) as u64]).unwrap();
    same("fill", &gpu.read(to).unwrap(), &vec![2.5f32; picked * width]).unwrap();
}

/// Tables of every scaling, and heads turned by them, against the CPU's.
pub fn ropes(program: &Program) -> Checked {
    let scalings = [
        RopeScaling::None,
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 64.0 },
        RopeScaling::Yarn {
            factor: 4.0,
            original_context: 64.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
            truncate: true,
        },
    ];
    for (index, scaling) in scalings.into_iter().enumerate() {
        for (style, offset, dim, head_dim, heads) in [
            (RopeStyle::Half, 0, 64, 64, 3),
            (RopeStyle::Interleaved, 0, 128, 128, 2),
            (RopeStyle::Half, 3, 10, 19, 5),
            (RopeStyle::Interleaved, 8, 6, 14, 1),
        ] {
            let max_positions = 300;
            let spec = RopeSpec {
                style,
                offset,
                dim,
                theta: 10_000.0,
                scaling: scaling.clone(),
                frequency_divisors: None,
                max_positions,
            };
            let (frequencies, factor) = spec.frequencies().unwrap();
            let rotation = Rotation::new(&spec).unwrap();
            let positions = [0u32, 299, 17];
            let x = Random::new(index as u64).floats(positions.len() * heads * head_dim);
            let mut gpu = Gpu::new(program, dim as u64);
            let pairs = dim / 2;
            let (table_frequencies, gpu_positions) = (gpu.memory(&frequencies)?, gpu.memory(&positions)?);
            let (cos, sin) = (gpu.poison(max_positions * pairs)?, gpu.poison(max_positions * pairs)?);
            let grid = line((max_positions * pairs).div_ceil(256), 256);
            gpu.launch(
                "rope_table",
                grid,
                args![table_frequencies, factor, cos, sin, max_positions as u32, pairs as u32],
            )?;
            let turned = gpu.memory(&x)?;
            let mut turn = |sign: f32| {
                let style = u32::from(style == RopeStyle::Interleaved);
                let args = args![
                    turned,
                    gpu_positions,
                    cos,
                    sin,
                    heads as u32,
                    head_dim as u32,
                    offset as u32,
                    dim as u32,
                    style,
                    sign
                ];
                gpu.launch("rope", line(positions.len(), 128), args)?;
                gpu.read::<f32>(turned)
            };
            let mut want = x.clone();
            for (row, position) in want.chunks_exact_mut(heads * head_dim).zip(positions) {
                row.chunks_exact_mut(head_dim).for_each(|head| rotation.rotate(&rotation.at(position), head));
            }
            near("rope", &turn(1.0)?, &want, 1e-6)?;
            for (row, position) in want.chunks_exact_mut(heads * head_dim).zip(positions) {
                row.chunks_exact_mut(head_dim).for_each(|head| rotation.rotate_back(&rotation.at(position), head));
            }
            near("rope back", &turn(-1.0)?, &want, 1e-6)?;
        }
    }
    Ok(())
}

#[test]
fn heads_are_turned_as_the_cpu_turns_them() {
    ropes(&Program::of("rope.cu", &[])).unwrap();
}

/// Rows go to the slots that are named, rounded, and nothing else is touched.
pub fn kv_writes(program: &Program) -> Checked {
    let (rows, kv_heads, dk, dv, page_tokens, pages) = (7usize, 3usize, 20usize, 12usize, 5usize, 4usize);
    let mut random = Random::new(9);
    let (k, v) = (random.floats(rows * kv_heads * dk), random.floats(rows * kv_heads * dv));
    let slots = random.some(rows, pages * page_tokens);
    let mut gpu = Gpu::new(program, 5);
    let (gk, gv, gs) = (gpu.memory(&k)?, gpu.memory(&v)?, gpu.memory(&slots)?);
    let place = |slot: u32, head: usize, dim: usize| {
        let (page, token) = (slot as usize / page_tokens, slot as usize % page_tokens);
        ((page * kv_heads + head) * page_tokens + token) * dim
    };
    let expected = |rows: &[f32], dim: usize| {
        let mut pool = vec![f32::NAN; pages * kv_heads * page_tokens * dim];
        for (row, slot) in rows.chunks_exact(kv_heads * dim).zip(&slots) {
            for (head, x) in row.chunks_exact(dim).enumerate() {
                pool[place(*slot, head, dim)..][..dim].copy_from_slice(x);
            }
        }
        pool
    };
    let (want_k, want_v) = (expected(&k, dk), expected(&v, dv));
    let mut run = |name: &str, k: &[u8], v: &[u8]| -> Result<(Vec<u8>, Vec<u8>), String> {
        let (keys, values) = (gpu.memory(k)?, gpu.memory(v)?);
        let args = args![gk, gv, keys, values, gs, kv_heads as u32, dk as u32, dv as u32, page_tokens as u32];
        gpu.launch(name, line(rows, 128), args)?;
        Ok((gpu.read(keys)?, gpu.read(values)?))
    };
    type Encode = fn(f32) -> Vec<u8>;
    let kinds: [(&str, usize, Encode); 3] = [
        ("kv_write_f32", 4, |x| x.to_le_bytes().to_vec()),
        ("kv_write_f16", 2, |x| f16::from_f32(x).to_le_bytes().to_vec()),
        ("kv_write_bf16", 2, |x| bf16::from_f32(x).to_le_bytes().to_vec()),
    ];
    for (name, size, encode) in kinds {
        let bytes = |values: &[f32]| {
            let element = |x: &f32| if x.is_nan() { vec![0xEE; size] } else { encode(*x) };
            values.iter().flat_map(element).collect::<Vec<u8>>()
        };
        let (got_k, got_v) = run(name, &vec![0xEE; size * want_k.len()], &vec![0xEE; size * want_v.len()])?;
        same(&format!("{name}: keys"), &got_k, &bytes(&want_k))?;
        same(&format!("{name}: values"), &got_v, &bytes(&want_v))?;
    }
    Ok(())
}

#[test]
fn new_keys_and_values_go_to_their_pages() {
    kv_writes(&Program::of("kv.cu", &[])).unwrap();
}

#[test]
fn columns_are_copied_and_elements_scaled() {
    let program = Program::of("elementwise.cu", &[]);
    for (width, rows, source, target) in [(1usize, 1usize, 1usize, 1usize), (7, 300, 11, 9), (64, 33, 64, 128)] {
        let mut random = Random::new(width as u64);
        let x = random.floats(rows * source);
        let mut gpu = Gpu::new(&program, 3);
        // Both end with the last element that is used.
        let from = gpu.memory(&x[..(rows - 1) * source + width]).unwrap();
        let to = gpu.poison((rows - 1) * target + width).unwrap();
        let grid = line((rows * width).div_ceil(1024), 256);
        let strides = (source as u64, target as u64);
        gpu.launch("copy_columns", grid, args![from, to, strides.0, strides.1, width as u32, rows as u32]).unwrap();
        let found: Vec<f32> = gpu.read(to).unwrap();
        for (at, value) in found.iter().enumerate() {
            let (row, column) = (at / target, at % target);
            if column < width {
                assert_eq!(*value, x[row * source + column], "row {row} column {column}");
            } else {
                assert!(value.is_nan(), "row {row} column {column} was written");
            }
        }
        let count = (rows - 1) * source + width;
        gpu.launch("scale", line(count.div_ceil(1024), 256), args![from, 2.5f32, count as u64]).unwrap();
        let scaled: Vec<f32> = gpu.read(from).unwrap();
        assert!(scaled.iter().zip(&x).all(|(got, x)| *got == 2.5 * x));
    }
}
