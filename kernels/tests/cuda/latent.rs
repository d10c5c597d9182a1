//! Rows in pages of opaque bytes, attention over them, the indexer's scores and choice, and the compressor.

use half::{bf16, f16};
use kvdock_kernels::rowmath::{attend_shared, dot, top_k};
use kvdock_kernels::{PACKED_SCALES, pack_key, pack_row, unpack_key, unpack_row};

use crate::args;
use crate::compile::Program;
use crate::data::{Random, near, same};
use crate::emulator::{Arg, Checked, Gpu, Grid, Memory, line};

/// How rows lie in pages.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    F32,
    F16,
    Bf16,
    Packed { rope: usize },
    Key,
}

impl Kind {
    fn data(self, width: usize) -> usize {
        match self {
            Self::F32 => 4 * width,
            Self::F16 | Self::Bf16 => 2 * width,
            Self::Packed { rope } => width + rope,
            Self::Key => width,
        }
    }

    fn scales(self) -> usize {
        match self {
            Self::Packed { .. } => PACKED_SCALES,
            Self::Key => 4,
            _ => 0,
        }
    }

    fn page(self, width: usize, rows: usize) -> usize {
        rows * (self.data(width) + self.scales())
    }

    /// The bytes of a row and of its scales, as the CPU writes them.
    fn encode(self, row: &[f32]) -> (Vec<u8>, Vec<u8>) {
        let (mut data, mut scales) = (vec![0; self.data(row.len())], vec![0; self.scales()]);
        match self {
            Self::F32 => data = row.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Self::F16 => data = row.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
            Self::Bf16 => data = row.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            Self::Packed { rope } => pack_row(row, rope, &mut data, &mut scales),
            Self::Key => pack_key(row, &mut data, &mut scales),
        }
        (data, scales)
    }

    /// The row as the CPU reads it back.
    fn rounded(self, row: &[f32]) -> Vec<f32> {
        let (data, scales) = self.encode(row);
        let mut out = row.to_vec();
        match self {
            Self::F32 => {}
            Self::F16 => out.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
            Self::Bf16 => out.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
            Self::Packed { rope } => unpack_row(&data, &scales, rope, &mut out),
            Self::Key => unpack_key(&data, &scales, &mut out),
        }
        out
    }

    /// A pool of `pages` pages with these rows in these slots, 0xFF (which is NaN in every kind) elsewhere.
    fn pool(self, width: usize, page_rows: usize, pages: usize, rows: &[(u32, &[f32])]) -> Vec<u8> {
        let page = self.page(width, page_rows);
        let mut pool = vec![0xFF; pages * page];
        for (slot, row) in rows {
            let (base, index) = (*slot as usize / page_rows * page, *slot as usize % page_rows);
            let (data, scales) = self.encode(row);
            pool[base + index * data.len()..][..data.len()].copy_from_slice(&data);
            let behind = base + page_rows * data.len() + index * scales.len();
            pool[behind..][..scales.len()].copy_from_slice(&scales);
        }
        pool
    }
}

/// Rows whose groups are of very different sizes.
fn uneven(random: &mut Random, rows: usize, width: usize) -> Vec<f32> {
    let scale = |i: usize| 2f32.powi((i % width / 64) as i32 - 3);
    random.floats(rows * width).iter().enumerate().map(|(i, x)| 4.0 * x * scale(i)).collect()
}

/// Rows are written as the CPU writes them, byte for byte, and nothing else is touched.
pub fn writes(program: &Program) -> Checked {
    let kinds = [
        (Kind::F32, "rows_write_f32", 37),
        (Kind::F16, "rows_write_f16", 37),
        (Kind::Bf16, "rows_write_bf16", 37),
        (Kind::Packed { rope: 64 }, "rows_write_packed", 512),
        (Kind::Packed { rope: 8 }, "rows_write_packed", 32),
        (Kind::Key, "keys_write_packed", 128),
        (Kind::Key, "keys_write_packed", 20),
    ];
    for (kind, kernel, width) in kinds {
        let (rows, page_rows, pages) = (6, 4, 3);
        let mut random = Random::new(width as u64);
        let mut x = uneven(&mut random, rows, width);
        x[..width].fill(0.0);
        let slots = random.some(rows, page_rows * pages);
        let mut gpu = Gpu::new(program, 5);
        let page = kind.page(width, page_rows);
        let (gx, pool, gs) = (gpu.memory(&x)?, gpu.memory(&vec![0xFFu8; pages * page])?, gpu.memory(&slots)?);
        let (width_arg, rows_arg, page_arg) = (width as u32, page_rows as u32, page as u64);
        match kind {
            Kind::Packed { rope } => {
                let args = args![gx, pool, gs, width_arg, rope as u32, rows_arg, page_arg];
                gpu.launch(kernel, line(rows, 128), args)?;
            }
            _ => gpu.launch(kernel, line(rows, 128), args![gx, pool, gs, width_arg, rows_arg, page_arg])?,
        }
        let placed: Vec<(u32, &[f32])> = slots.iter().copied().zip(x.chunks_exact(width)).collect();
        same(&format!("{kernel} of {width}"), &gpu.read(pool)?, &kind.pool(width, page_rows, pages, &placed))?;
    }
    Ok(())
}

/// One sequence's rows in a pool, with its table.
struct Side {
    rows: Vec<f32>,
    pool: Vec<u8>,
    table: Vec<u32>,
    page_rows: usize,
}

fn side(kind: Kind, width: usize, count: usize, page_rows: usize, random: &mut Random) -> Side {
    let used = count.div_ceil(page_rows).max(1);
    let table = random.some(used, used + 2);
    let plain = random.floats(count * width);
    let slot = |i: usize| table[i / page_rows] * page_rows as u32 + (i % page_rows) as u32;
    let placed: Vec<(u32, &[f32])> = plain.chunks_exact(width).enumerate().map(|(i, row)| (slot(i), row)).collect();
    let pool = kind.pool(width, page_rows, used + 2, &placed);
    let rows = plain.chunks_exact(width).flat_map(|row| kind.rounded(row)).collect();
    Side { rows, pool, table, page_rows }
}

/// Attention over rows of a kind, and the kernel that makes it.
#[derive(Clone, Copy)]
struct Attend {
    kind: Kind,
    width: usize,
    value: usize,
    heads: usize,
    /// Heads of a block and parts, on tensor cores.
    tiles: Option<(usize, usize)>,
    split: u32,
    /// Rows of queries in a launch.
    at_once: usize,
}

impl Attend {
    fn plain(kind: Kind, width: usize, value: usize, heads: usize) -> Self {
        Self { kind, width, value, heads, tiles: None, split: 48, at_once: usize::MAX }
    }

    fn macros(self) -> Vec<String> {
        let (number, rope) = match self.kind {
            Kind::F32 => (0, 8),
            Kind::F16 => (1, 0),
            Kind::Bf16 => (2, 0),
            Kind::Packed { rope } => (3, rope),
            Kind::Key => panic!("keys are not attended to"),
        };
        let mut macros = vec![("ROW_TYPE", number), ("WIDTH", self.width), ("VALUE", self.value), ("ROPE", rope)];
        if let Some((heads, parts)) = self.tiles {
            macros.extend([("HEADS", heads), ("PARTS", parts)]);
        }
        macros.iter().map(|(name, value)| format!("-D{name}={value}")).collect()
    }

    fn program(self) -> Program {
        let macros = self.macros();
        let file = if self.tiles.is_some() { "latent_tiles.cu" } else { "latent.cu" };
        Program::of(file, &macros.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// The kernel, heads of its blocks, their threads, and their shared memory, by the rules of the README.
    fn kernel(self) -> (&'static str, usize, u32, usize) {
        let Some((heads, parts)) = self.tiles else {
            return ("latent_decode", 8, 128, 4 * (8 * self.width + 16 * (self.width | 1)));
        };
        let row = 2 * (self.width.next_multiple_of(16) + 8);
        let rows = match self.kind {
            Kind::Packed { rope } => row + 2 * (self.width + rope).next_multiple_of(16),
            _ => 2 * row,
        };
        ("latent_tiles", heads, 256, 32 * rows + 18_432 + 80 * parts * heads)
    }

    /// What is within the rounding of queries and weights.
    fn tolerance(self) -> f32 {
        match (self.tiles, self.kind) {
            (None, _) => 3e-6,
            (Some((_, 2)), Kind::F16) => 3e-6,
            (Some((_, 2)), _) => 3e-5,
            (_, Kind::F16) => 2e-3,
            _ => 1.5e-2,
        }
    }

    /// Rows of queries that see a range of one pool, then picked rows of another, either of which may be none: what the kernels make, and what the CPU makes.
    fn compute(self, program: &Program, with_sinks: bool) -> Result<(Vec<f32>, Vec<f32>), String> {
        let Self { kind, width, value, heads, split, .. } = self;
        let mut random = Random::new(width as u64 + heads as u64);
        let (a, b) = (side(kind, width, 70, 5, &mut random), side(kind, width, 50, 8, &mut random));
        // Ranges of a and counts picked of b, one a row of queries.
        let sees: [(u32, u32, usize); 5] = [(0, 1, 0), (3, 67, 50), (10, 0, 7), (0, 0, 0), (0, 16, 17)];
        let lists: Vec<Vec<u32>> = sees.iter().map(|(_, _, n)| random.some(*n, 50)).collect();
        let (mut runs_a, mut runs_b, mut list) = (Vec::new(), Vec::new(), Vec::<u32>::new());
        for ((first, count, _), picked) in sees.iter().zip(&lists) {
            runs_a.extend([0u32, *first, *count, 0]);
            runs_b.extend([0u32, 0, picked.len() as u32, list.len() as u32]);
            list.extend(picked);
        }
        let q = random.floats(sees.len() * heads * width);
        let sinks = random.floats(heads);
        let scale = 0.3f32;
        let splits = 117u32.div_ceil(split);
        let mut gpu = Gpu::new(program, 11 + u64::from(with_sinks));
        let parts = sees.len() * heads * splits as usize;
        let (gq, pool_a, pool_b) = (gpu.memory(&q)?, gpu.memory(&a.pool)?, gpu.memory(&b.pool)?);
        let (tables_a, tables_b) = (gpu.memory(&a.table)?, gpu.memory(&b.table)?);
        let (gpu_runs_a, gpu_runs_b, lists_b) = (gpu.memory(&runs_a)?, gpu.memory(&runs_b)?, gpu.memory(&list)?);
        let (partial, partial_ms) = (gpu.poison(parts * value)?, gpu.poison(parts * 2)?);
        let out = gpu.poison(sees.len() * heads * value)?;
        let gpu_sinks = if with_sinks { Some(gpu.memory(&sinks)?) } else { None };
        let page = |side: &Side| kind.page(width, side.page_rows) as u64;
        let (name, heads_of_block, threads, shared) = self.kernel();
        for first in (0..sees.len()).step_by(self.at_once.min(sees.len())) {
            let count = self.at_once.min(sees.len() - first) as u32;
            let from = |memory: Memory, each: usize| Arg::At(memory, (4 * first * each) as u64);
            gpu.launch(
                name,
                Grid([splits, heads.div_ceil(heads_of_block) as u32, count], threads, shared as u32),
                args![
                    from(gq, heads * width),
                    pool_a,
                    tables_a,
                    None,
                    from(gpu_runs_a, 4),
                    a.page_rows as u32,
                    page(&a),
                    pool_b,
                    tables_b,
                    lists_b,
                    from(gpu_runs_b, 4),
                    b.page_rows as u32,
                    page(&b),
                    partial,
                    partial_ms,
                    heads as u32,
                    scale,
                    split,
                    splits
                ],
            )?;
            gpu.launch(
                "latent_merge",
                Grid([heads as u32, count, 1], 256, 0),
                args![
                    partial,
                    partial_ms,
                    from(gpu_runs_a, 4),
                    from(gpu_runs_b, 4),
                    gpu_sinks,
                    from(out, heads * value),
                    heads as u32,
                    split,
                    splits
                ],
            )?;
        }
        let mut want = Vec::new();
        for (row, ((first, count, _), picked)) in sees.iter().zip(&lists).enumerate() {
            let mut keys = a.rows[*first as usize * width..][..*count as usize * width].to_vec();
            picked.iter().for_each(|i| keys.extend(&b.rows[*i as usize * width..][..width]));
            for head in 0..heads {
                let mut out = vec![0.0; value];
                let query = &q[(row * heads + head) * width..][..width];
                attend_shared(query, &keys, width, scale, with_sinks.then(|| sinks[head]), &mut out);
                want.extend(out);
            }
        }
        Ok((gpu.read(out)?, want))
    }

    fn check(self, program: &Program) -> Checked {
        for with_sinks in [false, true] {
            let (got, want) = self.compute(program, with_sinks)?;
            let Self { kind, heads, tiles, split, .. } = self;
            let what = format!("{kind:?}, {heads} heads, tiles {tiles:?}, split {split}, sinks {with_sinks}");
            near(&what, &got, &want, self.tolerance())?;
        }
        Ok(())
    }
}

const SMALL: [&str; 4] = ["-DROW_TYPE=2", "-DWIDTH=40", "-DVALUE=32", "-DROPE=0"];

/// MLA of small rows: what `faults` plants faults in.
pub fn mla_small(program: &Program) -> Checked {
    Attend::plain(Kind::Bf16, 40, 32, 11).check(program)
}

pub const MLA_SMALL: [&str; 4] = SMALL;

/// Packed rows in tiles, several of a split and two blocks of heads: what `faults` plants faults in.
const PACKED_TILES: Attend = Attend {
    kind: Kind::Packed { rope: 16 },
    width: 80,
    value: 72,
    heads: 19,
    tiles: Some((16, 2)),
    split: 128,
    at_once: usize::MAX,
};

pub fn packed_tiles(program: &Program) -> Checked {
    PACKED_TILES.check(program)
}

pub fn packed_tiles_macros() -> Vec<String> {
    PACKED_TILES.macros()
}

/// Scores of keys: the kernel, heads, elements of a key, threads' keys in a block, shared memory, what rounding may make.
struct Scoring {
    kind: Kind,
    kernel: &'static str,
    heads: usize,
    dim: usize,
    keys: usize,
    shared: usize,
    tolerance: f32,
}

impl Scoring {
    fn check(&self, program: &Program, counts: &[u32]) -> Checked {
        let Self { kind, kernel, heads, dim, keys: block, shared, tolerance } = *self;
        let mut random = Random::new(dim as u64);
        let longest = *counts.iter().max().unwrap() as usize;
        let keys = side(kind, dim, longest, 8, &mut random);
        let (q, weights) = (random.floats(counts.len() * heads * dim), random.floats(counts.len() * heads));
        let mut gpu = Gpu::new(program, 2 + heads as u64);
        let stride = longest + 5;
        let (gq, gw, pool) = (gpu.memory(&q)?, gpu.memory(&weights)?, gpu.memory(&keys.pool)?);
        let (tables, starts) = (gpu.memory(&keys.table)?, gpu.memory(&vec![0u32; counts.len()])?);
        let (gc, scores) = (gpu.memory(counts)?, gpu.memory(&vec![9.0f32; counts.len() * stride])?);
        gpu.launch(
            kernel,
            Grid([longest.div_ceil(block) as u32, counts.len() as u32, 1], 128, shared as u32),
            args![
                gq,
                gw,
                pool,
                tables,
                starts,
                gc,
                scores,
                stride as u64,
                heads as u32,
                dim as u32,
                keys.page_rows as u32,
                kind.page(dim, keys.page_rows) as u64
            ],
        )?;
        let mut want = vec![9.0f32; counts.len() * stride];
        for (row, count) in counts.iter().enumerate() {
            for (i, key) in keys.rows.chunks_exact(dim).take(*count as usize).enumerate() {
                want[row * stride + i] = (0..heads)
                    .map(|h| weights[row * heads + h] * dot(&q[(row * heads + h) * dim..][..dim], key).max(0.0))
                    .sum();
            }
        }
        near(&format!("{kernel}, {heads} heads of {dim}"), &gpu.read(scores)?, &want, tolerance)
    }
}

/// Scores by tiles with `parts` parts, in blocks of 512 keys and less.
fn scores_by_tiles(program: &Program, parts: usize) -> Checked {
    for (kind, kernel, coarse) in [
        (Kind::F16, "index_tiles_f16", 2e-3),
        (Kind::Bf16, "index_tiles_bf16", 1.5e-2),
        (Kind::Key, "index_tiles_packed", 1.5e-2),
    ] {
        for (heads, dim, counts) in
            [(6usize, 16usize, [1u32, 75, 0, 33]), (64, 128, [40, 0, 3, 128]), (17, 48, [700, 513, 512, 1])]
        {
            let key = if kind == Kind::Key { dim + 16 } else { 2 * dim + 16 };
            let shared = heads.next_multiple_of(16) * (4 + 2 * parts * (dim + 8)) + 128 * key;
            let tolerance = if parts == 2 { 1e-5 } else { coarse };
            Scoring { kind, kernel, heads, dim, keys: 512, shared, tolerance }.check(program, &counts)?;
        }
    }
    Ok(())
}

/// What `faults` plants faults in.
pub fn index_tiles(program: &Program) -> Checked {
    scores_by_tiles(program, 2)
}

#[test]
fn scores_by_tiles_are_those_of_the_cpu() {
    index_tiles(&Program::of("index_tiles.cu", &["-DPARTS=2"])).unwrap();
    scores_by_tiles(&Program::of("index_tiles.cu", &["-DPARTS=1"]), 1).unwrap();
}

/// Scores and the highest of them.
pub fn indexers(program: &Program) -> Checked {
    for (kind, kernel) in [
        (Kind::F32, "index_scores_f32"),
        (Kind::F16, "index_scores_f16"),
        (Kind::Bf16, "index_scores_bf16"),
        (Kind::Key, "index_scores_packed"),
    ] {
        let (heads, dim) = (6, 20);
        let shared = 4 * (heads * dim + 32 * (dim | 1));
        Scoring { kind, kernel, heads, dim, keys: 32, shared, tolerance: 1e-6 }.check(program, &[1, 75, 0, 33])?;
    }
    for k in [1usize, 5, 300, 700] {
        let mut random = Random::new(k as u64);
        let stride = 700;
        let counts = [0u32, 4, 699, 700, 301];
        let mut scores = random.floats(counts.len() * stride);
        // Many equal ones, and one that is no number.
        scores[3 * stride..4 * stride].iter_mut().for_each(|x| *x = (4.0 * *x).round());
        scores[4 * stride + 7] = f32::NAN;
        let mut gpu = Gpu::new(program, k as u64);
        let (gs, gc) = (gpu.memory(&scores)?, gpu.memory(&counts)?);
        let (picked, found) = (gpu.memory(&vec![9999u32; counts.len() * k])?, gpu.memory(&[77u32; 5])?);
        gpu.launch("top_k", line(counts.len(), 256), args![gs, stride as u64, gc, k as u32, picked, found])?;
        let mut want = Vec::new();
        let mut kept = Vec::new();
        for (row, count) in counts.iter().enumerate() {
            let mut best = top_k(&scores[row * stride..][..*count as usize], k);
            best.sort_unstable();
            kept.push(best.len() as u32);
            best.resize(k, 9999);
            want.extend(best);
        }
        same(&format!("counts of top {k}"), &gpu.read(found)?, &kept)?;
        same(&format!("top {k}"), &gpu.read(picked)?, &want)?;
    }
    Ok(())
}

/// States, and rows that are means of them, with and without overlap.
pub fn compressors(program: &Program) -> Checked {
    for (ratio, dim, overlap) in [(4usize, 20usize, true), (16, 33, false)] {
        let width = if overlap { 2 * dim } else { dim };
        let rows = 3 * ratio;
        let mut random = Random::new(ratio as u64);
        let (values, scores) = (random.floats(rows * width), random.floats(rows * width));
        let ape = random.floats(ratio * width);
        let positions: Vec<u32> = (0..rows as u32).collect();
        let mut gpu = Gpu::new(program, 1);
        let (gv, gs, ga, gp) = (gpu.memory(&values)?, gpu.memory(&scores)?, gpu.memory(&ape)?, gpu.memory(&positions)?);
        let states = gpu.poison(2 * rows * width)?;
        let args = args![gv, gs, ga, gp, states, width as u32, ratio as u32];
        gpu.launch("compress_states", line(rows, 256), args)?;
        let mut want = Vec::new();
        for row in 0..rows {
            want.extend(&values[row * width..][..width]);
            want.extend((0..width).map(|i| scores[row * width + i] + ape[row % ratio * width + i]));
        }
        same("states", &gpu.read(states)?, &want)?;

        // Three windows; the first has none before it.
        let tokens = if overlap { 2 * ratio } else { ratio };
        let sources = gpu.memory(&vec![0u64; 3 * tokens])?;
        let mut rows_want = Vec::new();
        for window in 0..3 {
            let from = (window + 1) * ratio;
            let members: Vec<Option<usize>> = (0..tokens).map(|t| (from + t).checked_sub(tokens)).collect();
            for (t, member) in members.iter().enumerate() {
                if let Some(row) = member {
                    gpu.point(sources, 8 * (window * tokens + t) as u64, states, (8 * row * width) as u64)?;
                }
            }
            for channel in 0..dim {
                let part = |t: usize, row: usize| {
                    let at = 2 * row * width + channel + if overlap && t >= ratio { dim } else { 0 };
                    (f64::from(want[at]), f64::from(want[at + width]).exp())
                };
                let all: Vec<(f64, f64)> =
                    members.iter().enumerate().filter_map(|(t, row)| row.map(|row| part(t, row))).collect();
                let total: f64 = all.iter().map(|(_, w)| w).sum();
                rows_want.push((all.iter().map(|(x, w)| x * w).sum::<f64>() / total) as f32);
            }
        }
        let out = gpu.poison(3 * dim)?;
        let args = args![sources, out, tokens as u32, dim as u32, width as u32, u32::from(overlap)];
        gpu.launch("compress_rows", line(3, 256), args)?;
        near(&format!("rows at ratio {ratio}"), &gpu.read(out)?, &rows_want, 1e-6)?;
    }
    Ok(())
}

#[test]
fn rows_have_the_bytes_of_the_cpu() {
    writes(&Program::of("rows.cu", &[])).unwrap();
}

#[test]
fn latent_attention_is_that_of_the_cpu() {
    mla_small(&Program::of("latent.cu", &SMALL)).unwrap();
    for case in [Attend::plain(Kind::Packed { rope: 8 }, 136, 136, 3), Attend::plain(Kind::F32, 24, 16, 8)] {
        case.check(&case.program()).unwrap();
    }
}

/// Every kind of row, number of heads of a block and of parts; sizes that fill no tile, and those of real models.
#[test]
fn latent_attention_by_tiles_is_that_of_the_cpu() {
    packed_tiles(&PACKED_TILES.program()).unwrap();
    for (kind, width, value, heads, tiles, split) in [
        (Kind::Bf16, 40, 32, 11, (16, 2), 48),
        (Kind::F16, 24, 16, 33, (32, 1), 128),
        (Kind::F16, 72, 72, 64, (64, 1), 32),
        (Kind::Bf16, 576, 512, 70, (64, 1), 128),
        (Kind::Packed { rope: 8 }, 136, 136, 3, (16, 1), 48),
        (Kind::Packed { rope: 64 }, 512, 512, 40, (32, 2), 128),
    ] {
        let case = Attend { tiles: Some(tiles), split, ..Attend::plain(kind, width, value, heads) };
        case.check(&case.program()).unwrap();
    }
}

/// A row has the same bits whatever rows are beside it.
#[test]
fn latent_attention_by_tiles_does_not_depend_on_the_batch() {
    let program = PACKED_TILES.program();
    let (whole, _) = PACKED_TILES.compute(&program, true).unwrap();
    for at_once in [1, 2] {
        let (parts, _) = Attend { at_once, ..PACKED_TILES }.compute(&program, true).unwrap();
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        same(&format!("{at_once} at once"), &bits(&parts), &bits(&whole)).unwrap();
    }
}

#[test]
fn indexers_pick_what_the_cpu_picks() {
    indexers(&Program::of("index.cu", &[])).unwrap();
}

#[test]
fn compressed_rows_are_means_of_states() {
    compressors(&Program::of("compress.cu", &[])).unwrap();
}
