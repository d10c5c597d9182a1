//! Heads of new rows in one launch, against the kernels that do the same one after another.

use crate::args;
use crate::compile::Program;
use crate::data::{Random, same};
use crate::emulator::{Checked, Gpu, Grid, line};

const EPS: f32 = 1e-5;

/// Kinds of heads: element type and its bytes, query and KV heads, elements of keys and values, where the rotated part begins and how long it is, whether
/// pairs are neighbours, whether heads are normed.
type Kind = (&'static str, usize, (usize, usize), (usize, usize), (usize, usize), bool, bool);

const KINDS: [Kind; 4] = [
    ("f32", 4, (6, 2), (20, 12), (0, 20), false, true),
    ("f16", 2, (3, 3), (128, 128), (0, 128), false, false),
    ("bf16", 2, (5, 1), (64, 64), (8, 32), true, true),
    ("bf16", 2, (1, 1), (19, 7), (3, 10), false, true),
];

/// Every kind has the bits of the kernels one after another.
pub fn enters(program: &Program) -> Checked {
    let [norm, rope, kv] = ["norm.cu", "rope.cu", "kv.cu"].map(|file| Program::of(file, &[]));
    for (index, (dtype, size, (heads, kv_heads), (dk, dv), (offset, dim), interleaved, normed)) in
        KINDS.into_iter().enumerate()
    {
        let (rows, page_tokens, pages, table_rows) = (5usize, 3usize, 4usize, 40usize);
        let mut random = Random::new(index as u64);
        let (q, k, v) = (
            random.floats(rows * heads * dk),
            random.floats(rows * kv_heads * dk),
            random.floats(rows * kv_heads * dv),
        );
        let (q_norm, k_norm) = (random.floats(dk), random.floats(dk));
        let (cos, sin) = (random.floats(table_rows * dim / 2), random.floats(table_rows * dim / 2));
        let positions = random.some(rows, table_rows);
        let slots = random.some(rows, pages * page_tokens);
        let empty = |dim: usize| vec![0xEEu8; pages * page_tokens * kv_heads * dim * size];
        let sizes = [heads, kv_heads, dk, dv, page_tokens, offset, dim].map(|size| size as u32);
        let [h, kv_h, k_dim, v_dim, tokens, from, turned] = sizes;
        let pairs = u32::from(interleaved);

        // One after another, each by a program of its own.
        let mut separate = (q.clone(), k.clone());
        for (x, weight, count) in [(&mut separate.0, &q_norm, heads), (&mut separate.1, &k_norm, kv_heads)] {
            if normed {
                let mut gpu = Gpu::new(&norm, 3);
                let (gx, gw) = (gpu.memory(x)?, gpu.memory(weight)?);
                let all = (rows * count) as u32;
                gpu.launch(
                    "head_rms_norm",
                    line(all.div_ceil(4) as usize, 128),
                    args![gx, gw, all, k_dim, EPS, 0.0f32],
                )?;
                *x = gpu.read(gx)?;
            }
            let mut gpu = Gpu::new(&rope, 3);
            let (gx, gp) = (gpu.memory(x)?, gpu.memory(&positions)?);
            let (gc, gs) = (gpu.memory(&cos)?, gpu.memory(&sin)?);
            let args = args![gx, gp, gc, gs, count as u32, k_dim, from, turned, pairs, 1.0f32];
            gpu.launch("rope", line(rows, 128), args)?;
            *x = gpu.read(gx)?;
        }
        let mut gpu = Gpu::new(&kv, 3);
        let (gk, gv, gs) = (gpu.memory(&separate.1)?, gpu.memory(&v)?, gpu.memory(&slots)?);
        let (keys, values) = (gpu.memory(&empty(dk))?, gpu.memory(&empty(dv))?);
        let args = args![gk, gv, keys, values, gs, kv_h, k_dim, v_dim, tokens];
        gpu.launch(&format!("kv_write_{dtype}"), line(rows, 128), args)?;
        let want: (Vec<u8>, Vec<u8>) = (gpu.read(keys)?, gpu.read(values)?);

        let mut gpu = Gpu::new(program, 7 + index as u64);
        let (gq, gk, gv) = (gpu.memory(&q)?, gpu.memory(&k)?, gpu.memory(&v)?);
        let (qw, kw) = match normed {
            true => (Some(gpu.memory(&q_norm)?), Some(gpu.memory(&k_norm)?)),
            false => (None, None),
        };
        let (gp, gs) = (gpu.memory(&positions)?, gpu.memory(&slots)?);
        let (gc, gsin) = (gpu.memory(&cos)?, gpu.memory(&sin)?);
        let (keys, values) = (gpu.memory(&empty(dk))?, gpu.memory(&empty(dv))?);
        let args = args![
            gq, gk, gv, qw, kw, EPS, gp, gc, gsin, keys, values, gs, h, kv_h, k_dim, v_dim, tokens, from, turned, pairs
        ];
        let grid = Grid([rows as u32, (heads + 2 * kv_heads).div_ceil(4) as u32, 1], 128, 0);
        gpu.launch(&format!("heads_enter_{dtype}"), grid, args)?;
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        let what = format!("{dtype}, heads of {dk} and {dv}");
        same(&format!("{what}: queries"), &bits(&gpu.read(gq)?), &bits(&separate.0))?;
        same(&format!("{what}: keys"), &gpu.read(keys)?, &want.0)?;
        same(&format!("{what}: values"), &gpu.read(values)?, &want.1)?;
    }
    Ok(())
}

#[test]
fn heads_in_one_launch_have_the_bits_of_several() {
    enters(&Program::of("heads.cu", &[])).unwrap();
}
