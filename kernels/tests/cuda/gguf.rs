//! Weights: dequantised, as embeddings, as a matrix times rows in f32 and on tensor cores.

use kvdock_kernels::{WeightFormat, dequantize};

use crate::args;
use crate::compile::Program;
use crate::data::{Random, near, same};
use crate::emulator::{Checked, Gpu, Grid, line};

const FORMATS: [(WeightFormat, &str); 9] = [
    (WeightFormat::F32, "f32"),
    (WeightFormat::F16, "f16"),
    (WeightFormat::BF16, "bf16"),
    (WeightFormat::Q4_0, "q4_0"),
    (WeightFormat::Q4_1, "q4_1"),
    (WeightFormat::Q8_0, "q8_0"),
    (WeightFormat::Q4_K, "q4_k"),
    (WeightFormat::Q5_K, "q5_k"),
    (WeightFormat::Q6_K, "q6_k"),
];

/// Bytes of `elements` random weights, with scales that are numbers near a tenth.
fn weights(format: WeightFormat, elements: usize, random: &mut Random) -> Vec<u8> {
    let blocks = elements / format.block_elements();
    let mut bytes = Vec::new();
    for _ in 0..blocks {
        let mut block = random.bytes(format.block_bytes());
        let mut half = |at: usize, x: f32| block[at..at + 2].copy_from_slice(&half::f16::from_f32(x).to_le_bytes());
        match format {
            WeightFormat::F32 => block.copy_from_slice(&random.float().to_le_bytes()),
            WeightFormat::F16 => half(0, random.float()),
            WeightFormat::BF16 => block.copy_from_slice(&half::bf16::from_f32(random.float()).to_le_bytes()),
            WeightFormat::Q4_0 | WeightFormat::Q8_0 => half(0, 0.1 * random.float()),
            WeightFormat::Q4_1 | WeightFormat::Q4_K | WeightFormat::Q5_K => {
                half(0, 0.01 * random.float());
                half(2, 0.01 * random.float());
            }
            WeightFormat::Q6_K => half(208, 0.01 * random.float()),
        }
        bytes.extend(block);
    }
    bytes
}

fn values(format: WeightFormat, bytes: &[u8], elements: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; elements];
    dequantize(format, bytes, &mut out).unwrap();
    out
}

/// Columns that are good for a format: odd ones for floats, a few blocks for the others.
fn columns(format: WeightFormat) -> [usize; 3] {
    match format.block_elements() {
        1 => [1, 77, 512],
        32 => [32, 96, 544],
        _ => [256, 512, 768],
    }
}

/// Every value of every format is that of the CPU, to the bit.
pub fn dequantised(program: &Program) -> Checked {
    for (format, name) in FORMATS {
        for cols in columns(format) {
            let rows = 5;
            let mut random = Random::new(cols as u64);
            let bytes = weights(format, rows * cols, &mut random);
            let want = values(format, &bytes, rows * cols);
            let mut gpu = Gpu::new(program, cols as u64);
            let w = gpu.memory(&bytes)?;
            let out = gpu.poison(want.len())?;
            gpu.launch(&format!("dequant_{name}"), line(1, 256), args![w, out, want.len() as u64])?;
            same(&format!("dequant_{name} of {cols}"), &gpu.read(out)?, &want)?;
            let ids = [4u32, 0, 4, 2];
            let (picked, out) = (gpu.memory(&ids)?, gpu.poison(ids.len() * cols)?);
            gpu.launch(&format!("embed_{name}"), line(ids.len(), 128), args![w, picked, out, cols as u32])?;
            let rows: Vec<f32> = ids.iter().flat_map(|id| want[*id as usize * cols..][..cols].to_vec()).collect();
            same(&format!("embed_{name} of {cols}"), &gpu.read(out)?, &rows)?;
        }
    }
    Ok(())
}

/// Products in double precision.
fn product(w: &[f32], x: &[f32], bias: Option<&[f32]>, cols: usize) -> Vec<f32> {
    let mut out = Vec::new();
    for row in x.chunks_exact(cols) {
        for (o, weights) in w.chunks_exact(cols).enumerate() {
            let sum: f64 = row.iter().zip(weights).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            out.push((sum + bias.map_or(0.0, |bias| f64::from(bias[o]))) as f32);
        }
    }
    out
}

pub fn matvecs(program: &Program) -> Checked {
    for (format, name) in FORMATS {
        for (cols, rows) in columns(format).into_iter().zip([1, 3, 6]) {
            let outs = 11;
            let mut random = Random::new(cols as u64 + 1);
            let bytes = weights(format, outs * cols, &mut random);
            let (x, bias) = (random.floats(rows * cols), random.floats(outs));
            let mut gpu = Gpu::new(program, cols as u64);
            let (w, gx, gb) = (gpu.memory(&bytes)?, gpu.memory(&x)?, gpu.memory(&bias)?);
            let (plain, biased) = (gpu.poison(rows * outs)?, gpu.poison(rows * outs)?);
            let grid = Grid([2, rows.div_ceil(4) as u32, 1], 256, 0);
            let kernel = format!("matvec_{name}");
            gpu.launch(&kernel, grid, args![w, gx, None, plain, outs as u32, cols as u32, rows as u32])?;
            gpu.launch(&kernel, grid, args![w, gx, gb, biased, outs as u32, cols as u32, rows as u32])?;
            let w = values(format, &bytes, outs * cols);
            near(&format!("{kernel} {cols} x {rows}"), &gpu.read(plain)?, &product(&w, &x, None, cols), 2e-6)?;
            near(&format!("{kernel}, bias"), &gpu.read(biased)?, &product(&w, &x, Some(&bias), cols), 2e-6)?;
        }
    }
    Ok(())
}

fn matmul_macros(format: usize, parts: usize) -> [String; 2] {
    [format!("-DFORMAT={format}"), format!("-DPARTS={parts}")]
}

fn matmul(format: usize, parts: usize) -> Program {
    let macros = matmul_macros(format, parts);
    Program::of("matmul.cu", &[&macros[0], &macros[1]])
}

fn matmul_is_near(
    program: &Program,
    format: usize,
    parts: usize,
    (outs, cols, rows): (usize, usize, usize),
) -> Result<Vec<f32>, String> {
    let mut random = Random::new(7);
    let bytes = weights(FORMATS[format].0, outs * cols, &mut random);
    let (x, bias) = (random.floats(rows * cols), random.floats(outs));
    let mut gpu = Gpu::new(program, 2);
    let (w, gx, gb, out) = (gpu.memory(&bytes)?, gpu.memory(&x)?, gpu.memory(&bias)?, gpu.poison(rows * outs)?);
    let grid = Grid([outs.div_ceil(128) as u32, rows.div_ceil(128) as u32, 1], 256, 0);
    gpu.launch("matmul", grid, args![w, gx, gb, out, outs as u32, cols as u32, rows as u32])?;
    let got = gpu.read(out)?;
    let want = product(&values(FORMATS[format].0, &bytes, outs * cols), &x, Some(&bias), cols);
    // Eight bits of each number are kept, or sixteen.
    let relative = if parts == 1 { 8e-3 } else { 2e-5 };
    near(&format!("matmul {} in {parts} parts, {outs} x {cols} x {rows}", FORMATS[format].1), &got, &want, relative)?;
    Ok(got)
}

/// Two parts of bf16 weights, odd sizes on all sides.
pub fn matmul_bf16(program: &Program) -> Checked {
    matmul_is_near(program, 2, 2, (131, 77, 130)).map(drop)
}

pub fn matmul_bf16_program() -> Program {
    matmul(2, 2)
}

#[test]
fn dequantised_values_are_those_of_the_cpu() {
    dequantised(&Program::of("gguf.cu", &[])).unwrap();
}

#[test]
fn matrices_times_few_rows_are_right() {
    matvecs(&Program::of("gguf.cu", &[])).unwrap();
}

#[test]
fn matrices_times_many_rows_are_right() {
    matmul_bf16(&matmul_bf16_program()).unwrap();
    for (format, parts, size) in [(0, 1, (64, 40, 33)), (6, 1, (70, 256, 5)), (4, 2, (20, 96, 128))] {
        matmul_is_near(&matmul(format, parts), format, parts, size).unwrap();
    }
}
