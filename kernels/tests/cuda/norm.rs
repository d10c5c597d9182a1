//! Norms.

use kvdock_kernels::rowmath::{layer_norm, rms_norm, silu};
use kvdock_kernels::{Device, cpu::CpuDevice};

use crate::args;
use crate::compile::Program;
use crate::data::{Random, near, same};
use crate::emulator::{Checked, Gpu, line};

const EPS: f32 = 1e-5;
/// Odd sizes, less than a warp, less and more than a block, and a real one.
const SHAPES: [(usize, usize); 7] = [(1, 1), (3, 7), (2, 33), (5, 255), (2, 257), (3, 576), (2, 4096)];

fn program() -> Program {
    Program::of("norm.cu", &[])
}

/// Plain and fused, with and without an offset, against the CPU device; the fused one has the bits of its two parts.
pub fn rms_norms(program: &Program) -> Checked {
    let cpu = CpuDevice::new(1).unwrap();
    for (index, (rows, width)) in SHAPES.into_iter().enumerate() {
        let mut random = Random::new(index as u64);
        let (x, delta, weight) = (random.floats(rows * width), random.floats(rows * width), random.floats(width));
        let mut gpu = Gpu::new(program, index as u64);
        let (gx, gd, gw) = (gpu.memory(&x)?, gpu.memory(&delta)?, gpu.memory(&weight)?);
        let (plain, fused, again) = (gpu.poison(x.len())?, gpu.poison(x.len())?, gpu.poison(x.len())?);
        let grid = line(rows, 256);
        gpu.launch("rms_norm", grid, args![gx, gw, plain, width as u32, EPS, 0.0f32])?;
        gpu.launch("add_rms_norm", grid, args![gx, gd, gw, fused, width as u32, EPS, 0.0f32])?;
        // Now x holds the sum, and the plain norm of it must have the same bits.
        gpu.launch("rms_norm", grid, args![gx, gw, again, width as u32, EPS, 0.0f32])?;

        let what = |name: &str| format!("{name} {rows} x {width}");
        let (mut cpu_x, cpu_w, cpu_d) =
            (cpu.upload(&x).unwrap(), cpu.upload(&weight).unwrap(), cpu.upload(&delta).unwrap());
        let mut out = cpu.alloc(x.len()).unwrap();
        let mut want = vec![0.0; x.len()];
        cpu.rms_norm(&cpu_x, &cpu_w, EPS, rows, &mut out).unwrap();
        cpu.read(&out, 0, &mut want).unwrap();
        near(&what("rms_norm"), &gpu.read(plain)?, &want, 1e-6)?;
        cpu.add_rms_norm(&mut cpu_x, &cpu_d, &cpu_w, EPS, rows, &mut out).unwrap();
        cpu.read(&out, 0, &mut want).unwrap();
        near(&what("add_rms_norm"), &gpu.read(fused)?, &want, 1e-6)?;
        same(&what("add_rms_norm's bits"), &gpu.read::<u32>(fused)?, &gpu.read::<u32>(again)?)?;
        cpu.read(&cpu_x, 0, &mut want).unwrap();
        same(&what("the sum"), &gpu.read(gx)?, &want)?;

        let offset: Vec<f32> = weight.iter().map(|w| w + 1.0).collect();
        let mut want = x.clone();
        want.chunks_exact_mut(width).for_each(|row| rms_norm(row, Some(&offset), EPS));
        let fresh = gpu.memory(&x)?;
        gpu.launch("rms_norm", grid, args![fresh, gw, fresh, width as u32, EPS, 1.0f32])?;
        near(&what("rms_norm with an offset, in place"), &gpu.read(fresh)?, &want, 1e-6)?;
    }
    Ok(())
}

pub fn head_norms(program: &Program) -> Checked {
    for (heads, width) in [(1, 1), (5, 16), (3, 33), (7, 128), (4, 256)] {
        let mut random = Random::new(heads as u64);
        let (x, gate, weight) = (random.floats(heads * width), random.floats(heads * width), random.floats(width));
        let mut gpu = Gpu::new(program, 3);
        let (gg, gw) = (gpu.memory(&gate)?, gpu.memory(&weight)?);
        let (plain, bare, source, gated) = (gpu.memory(&x)?, gpu.memory(&x)?, gpu.memory(&x)?, gpu.poison(x.len())?);
        let grid = line(heads.div_ceil(4), 128);
        let (h, w) = (heads as u32, width as u32);
        gpu.launch("head_rms_norm", grid, args![plain, gw, h, w, EPS, 0.0f32])?;
        gpu.launch("head_rms_norm", grid, args![bare, None, h, w, EPS, 0.0f32])?;
        gpu.launch("gated_rms_norm", grid, args![source, gg, gw, gated, h, w, EPS])?;
        let norm = |weight: Option<&[f32]>| {
            let mut out = x.clone();
            out.chunks_exact_mut(width).for_each(|head| rms_norm(head, weight, EPS));
            out
        };
        near("head_rms_norm", &gpu.read(plain)?, &norm(Some(&weight)), 1e-6)?;
        near("head_rms_norm without weights", &gpu.read(bare)?, &norm(None), 1e-6)?;
        let want: Vec<f32> = norm(Some(&weight)).iter().zip(&gate).map(|(x, gate)| x * silu(*gate)).collect();
        near("gated_rms_norm", &gpu.read(gated)?, &want, 1e-6)?;
    }
    Ok(())
}

#[test]
fn rms_norms_are_those_of_the_cpu() {
    rms_norms(&program()).unwrap();
}

#[test]
fn norms_of_heads_are_those_of_the_cpu() {
    head_norms(&program()).unwrap();
}

#[test]
fn layer_norm_is_that_of_the_definition() {
    for (rows, width) in SHAPES {
        let mut random = Random::new(width as u64);
        let (x, weight, bias) = (random.floats(rows * width), random.floats(width), random.floats(width));
        let mut gpu = Gpu::new(&program(), 1);
        let (gx, gw, gb) = (gpu.memory(&x).unwrap(), gpu.memory(&weight).unwrap(), gpu.memory(&bias).unwrap());
        let out = gpu.poison(x.len()).unwrap();
        gpu.launch("layer_norm", line(rows, 256), args![gx, gw, gb, out, width as u32, 1e-3f32]).unwrap();
        let mut want = x.clone();
        want.chunks_exact_mut(width).for_each(|row| layer_norm(row, &weight, &bias, 1e-3));
        near("layer_norm", &gpu.read(out).unwrap(), &want, 1e-5).unwrap();
    }
}
