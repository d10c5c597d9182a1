//! Attention over a paged pool: decode and merge, and prefill by tiles, against the CPU's attention.

use half::{bf16, f16};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{AttentionSpec, Device, KvDtype, KvSpec, SeqSpan};

use crate::args;
use crate::compile::Program;
use crate::data::{Random, near, same};
use crate::emulator::{Arg, Checked, Gpu, Grid, Memory};

/// A step over a pool, and what it asks for.
#[derive(Clone)]
pub struct Case {
    pub dtype: KvDtype,
    pub dims: (usize, usize),
    pub heads: usize,
    pub kv_heads: usize,
    pub page_tokens: usize,
    /// Start and rows of each sequence's new tokens.
    pub seqs: Vec<(u32, u32)>,
    pub window: Option<u32>,
    pub sinks: bool,
    /// Decode by tiles on tensor cores.
    pub tiles: bool,
    pub seed: u64,
}

/// What the kernels get, and what they have to give.
struct Step {
    gpu: Gpu,
    q: Memory,
    keys: Memory,
    values: Memory,
    tables: Memory,
    sinks: Option<Memory>,
    /// Where each sequence's table starts.
    starts: Vec<u32>,
    want: Vec<f32>,
    /// Rows of the pool's keys, and of its values.
    rows_of_pool: u64,
}

/// Sequences and tiles of a prefill kernel.
struct Tiles {
    seqs: Vec<u32>,
    tiles: Vec<u32>,
}

fn encode(dtype: KvDtype, x: f32) -> Vec<u8> {
    match dtype {
        KvDtype::F32 => x.to_le_bytes().to_vec(),
        KvDtype::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        KvDtype::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
    }
}

impl Case {
    pub fn rows(&self) -> usize {
        self.seqs.iter().map(|(_, len)| *len as usize).sum()
    }

    pub fn scale(&self) -> f32 {
        (self.dims.0 as f32).sqrt().recip()
    }

    pub fn macros(&self) -> Vec<String> {
        let kind = match self.dtype {
            KvDtype::F32 => 0,
            KvDtype::F16 => 1,
            KvDtype::BF16 => 2,
        };
        vec![format!("-DKV_TYPE={kind}"), format!("-DDIM_K={}", self.dims.0), format!("-DDIM_V={}", self.dims.1)]
    }

    pub fn prefill_program(&self) -> Program {
        let macros = self.macros();
        Program::of("prefill.cu", &macros.iter().map(String::as_str).collect::<Vec<_>>())
    }

    pub fn decode_macros(&self, group: usize) -> Vec<String> {
        let mut macros = self.macros();
        macros.push(format!("-DGROUP={group}"));
        macros
    }

    pub fn decode_program(&self, group: usize) -> Program {
        let macros = self.decode_macros(group);
        Program::of(
            if self.tiles { "decode_tiles.cu" } else { "decode.cu" },
            &macros.iter().map(String::as_str).collect::<Vec<_>>(),
        )
    }

    /// The pool with every sequence's keys and values up to its last row, NaN elsewhere, and what the CPU makes of it.
    fn step(&self, program: &Program) -> Result<Step, String> {
        let mut random = Random::new(self.seed);
        let (dk, dv) = self.dims;
        let needed = |(start, len): &(u32, u32)| ((start + len) as usize).div_ceil(self.page_tokens);
        let used: usize = self.seqs.iter().map(needed).sum();
        let pages = used + 3;
        let spec = KvSpec {
            layers: 1,
            kv_heads: self.kv_heads,
            head_dim_k: dk,
            head_dim_v: dv,
            page_tokens: self.page_tokens,
            pages,
            dtype: self.dtype,
        };
        let cpu = CpuDevice::new(1).unwrap();
        let pool = cpu.alloc_kv_pool(spec).unwrap();
        let tables = random.some(used, pages);
        let size = self.dtype.bytes();
        let mut keys = vec![0xFF; pages * self.kv_heads * self.page_tokens * dk * size];
        let mut values = vec![0xFF; pages * self.kv_heads * self.page_tokens * dv * size];
        let (mut starts, mut at) = (Vec::new(), 0);
        for seq in &self.seqs {
            starts.push(at as u32);
            let table = &tables[at..at + needed(seq)];
            at += table.len();
            let tokens = (seq.0 + seq.1) as usize;
            let (k, v) = (random.floats(tokens * self.kv_heads * dk), random.floats(tokens * self.kv_heads * dv));
            let whole = [SeqSpan { start: 0, len: tokens as u32, pages: table }];
            let plan = cpu.plan(&*pool, &whole).unwrap();
            cpu.kv_write(&*pool, 0, &plan, &cpu.upload(&k).unwrap(), &cpu.upload(&v).unwrap()).unwrap();
            let put = |pool: &mut Vec<u8>, rows: &[f32], dim: usize| {
                for (i, head) in rows.chunks_exact(dim).enumerate() {
                    let (token, kv_head) = (i / self.kv_heads, i % self.kv_heads);
                    let page = table[token / self.page_tokens] as usize;
                    let slot = (page * self.kv_heads + kv_head) * self.page_tokens + token % self.page_tokens;
                    let bytes: Vec<u8> = head.iter().flat_map(|x| encode(self.dtype, *x)).collect();
                    pool[slot * dim * size..][..bytes.len()].copy_from_slice(&bytes);
                }
            };
            put(&mut keys, &k, dk);
            put(&mut values, &v, dv);
        }
        let q: Vec<f32> = random.floats(self.rows() * self.heads * dk).iter().map(|x| 3.0 * x).collect();
        let sinks = self.sinks.then(|| random.floats(self.heads));

        let mut at = 0;
        let spans: Vec<SeqSpan<'_>> = self
            .seqs
            .iter()
            .map(|seq| {
                let pages = &tables[at..at + needed(seq)];
                at += pages.len();
                SeqSpan { start: seq.0, len: seq.1, pages }
            })
            .collect();
        let plan = cpu.plan(&*pool, &spans).unwrap();
        let cpu_sinks = sinks.as_ref().map(|sinks| cpu.upload(sinks).unwrap());
        let asked =
            AttentionSpec { heads: self.heads, scale: self.scale(), window: self.window, sinks: cpu_sinks.as_ref() };
        let mut out = cpu.alloc(self.rows() * self.heads * dv).unwrap();
        cpu.attention(&*pool, 0, &plan, &cpu.upload(&q).unwrap(), &asked, &mut out).unwrap();
        let mut want = vec![0.0; out.len()];
        cpu.read(&out, 0, &mut want).unwrap();

        let mut gpu = Gpu::new(program, self.seed);
        let (q, keys, values) = (gpu.memory(&q)?, gpu.memory(&keys)?, gpu.memory(&values)?);
        let tables = gpu.memory(&tables)?;
        let sinks = match sinks {
            Some(sinks) => Some(gpu.memory(&sinks)?),
            None => None,
        };
        let rows_of_pool = (pages * self.kv_heads * self.page_tokens) as u64;
        Ok(Step { gpu, q, keys, values, tables, sinks, starts, want, rows_of_pool })
    }

    /// Runs the decode kernels on the rows in launches of `at_once`; gives what they make and what the CPU makes.
    pub fn decode_in_parts(
        &self,
        program: &Program,
        group: usize,
        split: u32,
        at_once: usize,
    ) -> Result<(Vec<f32>, Vec<f32>), String> {
        let Step { mut gpu, q, keys, values, tables, sinks, starts, want, .. } = self.step(program)?;
        let (rows, (dk, dv)) = (self.rows(), self.dims);
        let mut positions = Vec::new();
        let mut row_tables = Vec::new();
        for ((start, len), table) in self.seqs.iter().zip(&starts) {
            positions.extend(*start..start + len);
            row_tables.extend(vec![*table; *len as usize]);
        }
        let splits = positions.iter().max().unwrap() / split + 1;
        let parts = rows * self.heads * splits as usize;
        let (positions, row_tables) = (gpu.memory(&positions)?, gpu.memory(&row_tables)?);
        let (partial, partial_ms) = (gpu.poison(parts * dv)?, gpu.poison(parts * 2)?);
        let out = gpu.poison(want.len())?;
        let (heads, window) = (self.heads as u32, self.window.unwrap_or(0));
        for first in (0..rows).step_by(at_once) {
            let count = at_once.min(rows - first) as u32;
            let from = |memory: Memory, each: usize| Arg::At(memory, (4 * first * each) as u64);
            let (name, threads, shared) = if self.tiles {
                let warps = if dk.max(dv) > 128 { 2 } else { 4 };
                let queries = if dk > 128 { 32 * (dk + 8) } else { 0 };
                ("paged_decode_tiles", 32 * warps, warps * 64 * (dk + 8 + dv + 8) as u32 + queries as u32)
            } else {
                ("paged_decode", 128, 0)
            };
            gpu.launch(
                name,
                Grid([splits, (self.heads / group) as u32, count], threads, shared),
                args![
                    from(q, self.heads * dk),
                    keys,
                    values,
                    tables,
                    from(row_tables, 1),
                    from(positions, 1),
                    partial,
                    partial_ms,
                    heads,
                    self.kv_heads as u32,
                    self.page_tokens as u32,
                    window,
                    self.scale(),
                    split,
                    splits
                ],
            )?;
            gpu.launch(
                "paged_merge",
                Grid([heads, count, 1], 256, 0),
                args![
                    partial,
                    partial_ms,
                    from(positions, 1),
                    sinks,
                    from(out, self.heads * dv),
                    heads,
                    window,
                    split,
                    splits
                ],
            )?;
        }
        Ok((gpu.read(out)?, want))
    }

    pub fn decode(&self, program: &Program, group: usize, split: u32) -> Result<(Vec<f32>, Vec<f32>), String> {
        self.decode_in_parts(program, group, split, self.rows())
    }

    /// Bytes of dynamic shared memory, by the rule of the README.
    fn prefill_shared(&self) -> u32 {
        let (dk, dv) = (self.dims.0 + 8, self.dims.1 + 8);
        let large = self.dims.0.max(self.dims.1) > 128;
        let keys = if large { 32 } else { 64 };
        let queries = if self.dims.0 > 128 { 64 * dk } else { 0 };
        (2 * (2 * keys * (dk + dv) + queries)) as u32
    }

    /// The same for the prefill kernel; each sequence's rows come in chunks of `chunk`.
    pub fn prefill_in_chunks(&self, program: &Program, chunk: u32) -> Result<(Vec<f32>, Vec<f32>), String> {
        let Step { mut gpu, q, keys, values, tables, sinks, starts, want, .. } = self.step(program)?;
        let Tiles { seqs, tiles } = self.tiles(&starts, chunk, 64);
        let count = tiles.len() as u32 / 2;
        let (seqs, tiles) = (gpu.memory(&seqs)?, gpu.memory(&tiles)?);
        let out = gpu.poison(want.len())?;
        gpu.launch(
            "paged_prefill",
            Grid([count, self.kv_heads as u32, 1], 128, self.prefill_shared()),
            args![
                q,
                keys,
                values,
                tables,
                seqs,
                tiles,
                sinks,
                out,
                self.heads as u32,
                self.kv_heads as u32,
                self.page_tokens as u32,
                self.window.unwrap_or(0),
                self.scale()
            ],
        )?;
        Ok((gpu.read(out)?, want))
    }

    pub fn prefill(&self, program: &Program) -> Result<(Vec<f32>, Vec<f32>), String> {
        self.prefill_in_chunks(program, u32::MAX)
    }

    pub fn hopper_program(&self) -> Program {
        let macros = self.macros();
        Program::of("prefill_hopper.cu", &macros.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// As `prefill_in_chunks`, by the kernel for sm_90a.
    pub fn hopper_in_chunks(&self, program: &Program, chunk: u32) -> Result<(Vec<f32>, Vec<f32>), String> {
        let Step { mut gpu, q, keys, values, tables, sinks, starts, want, rows_of_pool } = self.step(program)?;
        let Tiles { seqs, tiles } = self.tiles(&starts, chunk, 128);
        let count = tiles.len() as u32 / 2;
        let (dk, dv) = self.dims;
        let box_rows = 1 << self.page_tokens.trailing_zeros().min(6);
        let mut map = |memory: Memory, dim: usize| {
            let mut words = [0u64; 16];
            words[1..4].copy_from_slice(&[rows_of_pool, dim as u64, box_rows]);
            let map = gpu.memory(&words)?;
            gpu.point(map, 0, memory, 0)?;
            Ok::<_, String>(map)
        };
        let (of_keys, of_values) = (map(keys, dk)?, map(values, dv)?);
        let (seqs, tiles) = (gpu.memory(&seqs)?, gpu.memory(&tiles)?);
        let out = gpu.poison(want.len())?;
        let keys_at_once = if dk.max(dv) > 128 { 64 } else { 128 };
        let shared = 1024 + 2 * (2 * keys_at_once * (dk + dv) + 128 * dk) + 48;
        gpu.launch(
            "paged_prefill_hopper",
            Grid([count, self.kv_heads as u32, 1], 384, shared as u32),
            args![
                q,
                of_keys,
                of_values,
                tables,
                seqs,
                tiles,
                sinks,
                out,
                self.heads as u32,
                self.kv_heads as u32,
                self.page_tokens as u32,
                self.window.unwrap_or(0),
                self.scale(),
                0u32,
                box_rows as u32
            ],
        )?;
        Ok((gpu.read(out)?, want))
    }

    /// Sequences and tiles of `pairs` pairs, each sequence's rows in chunks of `chunk`.
    fn tiles(&self, starts: &[u32], chunk: u32, pairs: usize) -> Tiles {
        let group = self.heads / self.kv_heads;
        let (mut seqs, mut tiles, mut first) = (Vec::new(), Vec::new(), 0);
        for ((start, len), table) in self.seqs.iter().zip(starts) {
            for at in (0..*len).step_by(chunk as usize) {
                let rows = chunk.min(len - at);
                let index = seqs.len() as u32 / 4;
                seqs.extend([first, rows, start + at, *table]);
                first += rows;
                for tile in (0..rows * group as u32).step_by(pairs) {
                    tiles.extend([index, tile]);
                }
            }
        }
        Tiles { seqs, tiles }
    }
}

/// Small heads, pages of an odd size, sequences that end at and around page borders, a window, sinks.
pub fn small(dtype: KvDtype) -> Case {
    Case {
        dtype,
        dims: (32, 32),
        heads: 6,
        kv_heads: 2,
        page_tokens: 7,
        seqs: vec![(0, 1), (6, 1), (7, 1), (97, 1), (64, 2)],
        window: None,
        sinks: false,
        tiles: false,
        seed: 4,
    }
}

/// The same by tiles, of which the longest sequence has several a warp in a split.
pub fn small_tiles(dtype: KvDtype) -> Case {
    Case { tiles: true, seqs: vec![(0, 1), (6, 1), (7, 1), (297, 1), (64, 2)], ..small(dtype) }
}

fn decode_all(program: &Program, case: &Case, group: usize, split: u32) -> Checked {
    let within = if case.tiles { tolerance(case.dtype) } else { 2e-6 };
    for window in [None, Some(1), Some(20), Some(33)] {
        for sinks in [false, true] {
            let case = Case { window, sinks, seed: 4 + u64::from(sinks), ..case.clone() };
            let (got, want) = case.decode(program, group, split)?;
            near(&format!("decode, window {window:?}, sinks {sinks}, split {split}"), &got, &want, within)?;
        }
    }
    Ok(())
}

/// Decode of small heads with all windows: what `faults` plants faults in.
pub fn decode_small(program: &Program) -> Checked {
    decode_all(program, &small(KvDtype::F16), 3, 32)
}

#[test]
fn decode_is_attention_of_the_cpu() {
    let case = small(KvDtype::F16);
    decode_small(&case.decode_program(3)).unwrap();
    decode_all(&case.decode_program(3), &case, 3, 512).unwrap();
    decode_all(&case.decode_program(1), &case, 1, 64).unwrap();
}

/// Every type, and dimensions that are no multiple of 16 bytes, differ, or need all lanes.
#[test]
fn decode_takes_any_head() {
    for (dtype, dims, heads, kv_heads, group) in [
        (KvDtype::F32, (20, 12), 4, 2, 2),
        (KvDtype::F32, (9, 7), 2, 2, 1),
        (KvDtype::BF16, (10, 6), 3, 1, 3),
        (KvDtype::BF16, (128, 128), 8, 1, 8),
        (KvDtype::F16, (192, 128), 4, 1, 4),
        (KvDtype::F32, (64, 64), 3, 1, 3),
    ] {
        let case = Case { dtype, dims, heads, kv_heads, page_tokens: 16, seed: 8, ..small(dtype) };
        let (got, want) = case.decode(&case.decode_program(group), group, 64).unwrap();
        near(&format!("{dtype:?} {dims:?}"), &got, &want, 2e-6).unwrap();
    }
}

/// Thousands of tokens in pages of one and of many tokens.
#[test]
fn decode_of_long_sequences() {
    for page_tokens in [1, 64] {
        let case = Case { page_tokens, seqs: vec![(4999, 1), (2047, 1)], sinks: true, ..small(KvDtype::F16) };
        let (got, want) = case.decode(&case.decode_program(3), 3, 512).unwrap();
        near(&format!("pages of {page_tokens}"), &got, &want, 4e-6).unwrap();
    }
}

/// A row has the same bits whatever rows are beside it.
#[test]
fn decode_does_not_depend_on_the_batch() {
    let case = Case { seqs: vec![(40, 9), (99, 1)], window: Some(50), sinks: true, ..small(KvDtype::F16) };
    let program = case.decode_program(3);
    let (whole, _) = case.decode(&program, 3, 32).unwrap();
    for at_once in [1, 4] {
        let (parts, _) = case.decode_in_parts(&program, 3, 32, at_once).unwrap();
        same("bits", &bits(&parts), &bits(&whole)).unwrap();
    }
}

/// Decode by tiles of small heads with all windows: what `faults` plants faults in.
pub fn decode_tiles_small(program: &Program) -> Checked {
    decode_all(program, &small_tiles(KvDtype::F16), 3, 256)
}

#[test]
fn decode_by_tiles_is_attention_of_the_cpu() {
    let case = small_tiles(KvDtype::F16);
    decode_tiles_small(&case.decode_program(3)).unwrap();
    decode_all(&case.decode_program(3), &case, 3, 32).unwrap();
    decode_all(&case.decode_program(1), &case, 1, 96).unwrap();
}

#[test]
fn decode_by_tiles_takes_every_head_that_tensor_cores_do() {
    for (dtype, dims, heads, kv_heads, group, page_tokens) in [
        (KvDtype::BF16, (128, 128), 8, 1, 8, 16),
        (KvDtype::F16, (64, 64), 32, 2, 16, 1),
        (KvDtype::BF16, (192, 128), 4, 1, 4, 64),
        (KvDtype::F16, (256, 256), 2, 2, 1, 16),
        (KvDtype::BF16, (16, 48), 24, 1, 12, 5),
    ] {
        let case = Case { dtype, dims, heads, kv_heads, page_tokens, seed: 8, ..small_tiles(dtype) };
        let (got, want) = case.decode(&case.decode_program(group), group, 256).unwrap();
        near(&format!("{dtype:?} {dims:?}"), &got, &want, tolerance(dtype)).unwrap();
    }
}

#[test]
fn decode_by_tiles_does_not_depend_on_the_batch() {
    let case = Case { seqs: vec![(40, 9), (199, 1)], window: Some(50), sinks: true, ..small_tiles(KvDtype::BF16) };
    let program = case.decode_program(3);
    let (whole, _) = case.decode(&program, 3, 64).unwrap();
    for at_once in [1, 4] {
        let (parts, _) = case.decode_in_parts(&program, 3, 64, at_once).unwrap();
        same("bits", &bits(&parts), &bits(&whole)).unwrap();
    }
}

#[test]
fn decode_by_tiles_of_long_sequences() {
    for page_tokens in [1, 64] {
        let case = Case { page_tokens, seqs: vec![(4999, 1), (2047, 1)], sinks: true, ..small_tiles(KvDtype::F16) };
        let (got, want) = case.decode(&case.decode_program(3), 3, 512).unwrap();
        near(&format!("pages of {page_tokens}"), &got, &want, tolerance(case.dtype)).unwrap();
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn tolerance(dtype: KvDtype) -> f32 {
    // Queries and weights are rounded to the type.
    if dtype == KvDtype::F16 { 2e-3 } else { 1.5e-2 }
}

pub fn prefill_case(dtype: KvDtype) -> Case {
    Case { dims: (32, 48), seqs: vec![(0, 1), (0, 70), (30, 45), (129, 3)], ..small(dtype) }
}

/// Prefill of small heads with all windows: what `faults` plants faults in.
pub fn prefill_small(program: &Program) -> Checked {
    for window in [None, Some(1), Some(20), Some(70)] {
        for sinks in [false, true] {
            // Odd and even seeds: asynchronous copies come early and late.
            let case = Case { window, sinks, seed: 4 + u64::from(sinks), ..prefill_case(KvDtype::F16) };
            let (got, want) = case.prefill(program)?;
            near(&format!("prefill, window {window:?}, sinks {sinks}"), &got, &want, tolerance(case.dtype))?;
        }
    }
    Ok(())
}

#[test]
fn prefill_is_attention_of_the_cpu() {
    prefill_small(&prefill_case(KvDtype::F16).prefill_program()).unwrap();
}

#[test]
fn prefill_takes_every_head_that_tensor_cores_do() {
    for (dtype, dims, heads, kv_heads, page_tokens) in [
        (KvDtype::BF16, (128, 128), 8, 2, 16),
        (KvDtype::F16, (64, 64), 3, 3, 1),
        (KvDtype::BF16, (192, 128), 2, 1, 64),
        (KvDtype::F16, (256, 256), 1, 1, 32),
        (KvDtype::BF16, (16, 16), 5, 1, 3),
    ] {
        let seqs = vec![(0, 33), (65, 20), (3, 1)];
        let case = Case { dtype, dims, heads, kv_heads, page_tokens, seqs, ..small(dtype) };
        let (got, want) = case.prefill(&case.prefill_program()).unwrap();
        near(&format!("{dtype:?} {dims:?}"), &got, &want, tolerance(dtype)).unwrap();
    }
}

/// However a prompt is cut into chunks, each row has the same bits.
#[test]
fn prefill_does_not_depend_on_chunks() {
    for window in [None, Some(40)] {
        let case = Case { window, seqs: vec![(11, 100), (0, 5)], ..prefill_case(KvDtype::BF16) };
        let program = case.prefill_program();
        let (whole, _) = case.prefill(&program).unwrap();
        for chunk in [1, 23, 64] {
            let (parts, _) = case.prefill_in_chunks(&program, chunk).unwrap();
            same(&format!("bits, chunks of {chunk}"), &bits(&parts), &bits(&whole)).unwrap();
        }
    }
}

#[test]
fn prefill_of_a_long_sequence() {
    let case = Case { seqs: vec![(1900, 150)], page_tokens: 64, window: Some(1000), ..prefill_case(KvDtype::F16) };
    let (got, want) = case.prefill(&case.prefill_program()).unwrap();
    near("long prefill", &got, &want, tolerance(case.dtype)).unwrap();
}

/// Heads that the kernel for sm_90a takes, of which several share keys, in pages that are smaller than its boxes and larger.
pub fn hopper_case(dtype: KvDtype) -> Case {
    let seqs = vec![(0, 1), (0, 40), (30, 70), (290, 3)];
    Case { dims: (64, 64), heads: 4, kv_heads: 2, page_tokens: 24, seqs, ..small(dtype) }
}

/// Prefill by the kernel for sm_90a with and without a window: what `faults` plants faults in.
pub fn hopper_small(program: &Program) -> Checked {
    hopper_with(program, &[None, Some(20)])
}

/// A block all of whose rows count, over more tiles of keys than there are places; copies come early and products late.
fn hopper_full(program: &Program) -> Checked {
    let small = hopper_case(KvDtype::F16);
    let case = Case { heads: 2, kv_heads: 1, seqs: vec![(260, 64)], page_tokens: 64, seed: 5, ..small };
    let (got, want) = case.hopper_in_chunks(program, u32::MAX)?;
    near("hopper, a full block", &got, &want, tolerance(case.dtype))
}

fn hopper_with(program: &Program, windows: &[Option<u32>]) -> Checked {
    for (index, &window) in windows.iter().enumerate() {
        for sinks in [false, true] {
            // By its two lowest bits copies and products come early or late.
            let seed = 4 + u64::from(sinks) + 2 * (index as u64 % 2);
            let case = Case { window, sinks, seed, ..hopper_case(KvDtype::F16) };
            let (got, want) = case.hopper_in_chunks(program, u32::MAX)?;
            near(&format!("hopper, window {window:?}, sinks {sinks}"), &got, &want, tolerance(case.dtype))?;
        }
    }
    Ok(())
}

#[test]
fn prefill_for_sm_90a_is_attention_of_the_cpu() {
    let program = hopper_case(KvDtype::F16).hopper_program();
    hopper_with(&program, &[None, Some(1), Some(20), Some(140)]).unwrap();
    hopper_full(&program).unwrap();
}

#[test]
fn prefill_for_sm_90a_takes_every_head_that_it_should() {
    for (dtype, dims, heads, kv_heads, page_tokens) in [
        (KvDtype::BF16, (128, 128), 8, 2, 16),
        (KvDtype::F16, (64, 64), 3, 3, 8),
        (KvDtype::BF16, (192, 128), 2, 1, 64),
        (KvDtype::F16, (256, 256), 1, 1, 128),
        (KvDtype::BF16, (64, 192), 2, 1, 40),
    ] {
        let seqs = vec![(0, 9), (165, 5), (3, 1)];
        let case = Case { dtype, dims, heads, kv_heads, page_tokens, seqs, ..small(dtype) };
        let (got, want) = case.hopper_in_chunks(&case.hopper_program(), u32::MAX).unwrap();
        near(&format!("{dtype:?} {dims:?}"), &got, &want, tolerance(dtype)).unwrap();
    }
}

/// However a prompt is cut into chunks, each row has the same bits.
#[test]
fn prefill_for_sm_90a_does_not_depend_on_chunks() {
    for window in [None, Some(40)] {
        let case = Case { window, seqs: vec![(101, 70), (0, 5)], ..hopper_case(KvDtype::BF16) };
        let program = case.hopper_program();
        let (whole, _) = case.hopper_in_chunks(&program, u32::MAX).unwrap();
        for chunk in [7, 64] {
            let (parts, _) = case.hopper_in_chunks(&program, chunk).unwrap();
            same(&format!("bits, chunks of {chunk}"), &bits(&parts), &bits(&whole)).unwrap();
        }
    }
}

/// More tiles of keys than there are places for them.
#[test]
fn prefill_for_sm_90a_of_a_long_sequence() {
    for window in [None, Some(500)] {
        let case = Case { seqs: vec![(600, 40)], page_tokens: 64, window, ..hopper_case(KvDtype::F16) };
        let (got, want) = case.hopper_in_chunks(&case.hopper_program(), u32::MAX).unwrap();
        near("long prefill", &got, &want, tolerance(case.dtype)).unwrap();
    }
}
