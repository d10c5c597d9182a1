//! Prefill and decode beside llama.cpp: the same file, the same number of threads, the same run.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{KvDtype, KvPool};
use kvdock_models::{Batch, LoadOptions, Logits, Model, NoHooks, SeqChunk, Want, load};
use kvdock_tests::prompt;

use crate::Bench;
use crate::llama::Llama;
use crate::row::{Better, Goal, Report, Row};
use crate::sample::side_by_side;

/// Tokens a page, as the server's default.
const PAGE: usize = 16;
/// Prompt tokens in one step, as the server's default.
const CHUNK: usize = 512;
/// Tokens that a decode sample makes of each sequence.
const STEPS: usize = 32;

/// Adds the rows.
///
/// # Errors
/// When a side can't be measured.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let prefills = [512, 1500].map(|tokens| (format!("prefill, {tokens} tokens (tokens/s)"), tokens));
    let decodes = [(16, 1), (512, 1), (2048, 1), (16, 8), (512, 8)].map(|(context, sequences)| {
        let name = format!("decode, {sequences} x context {context} (tokens/s)");
        (name, context, sequences)
    });
    let names = prefills.iter().map(|row| &row.0).chain(decodes.iter().map(|row| &row.0));
    if !names.into_iter().any(|name| bench.wants(name)) {
        return Ok(());
    }
    let mut ours = Ours::load(bench)?;
    let mut llama = Llama::start(bench, bench.threads)?;
    let mut add = |name: &str, (ours, peer): (f64, f64)| {
        let (better, goal) = (Better::More, Goal::Ratio(0.8));
        report.add(Row { name: format!("{name}, peer llama.cpp"), ours, peer, better, goal })
    };
    for (name, tokens) in &prefills {
        if bench.wants(name) {
            let prompt = prompt::ids(1, *tokens);
            let count = *tokens as f64;
            let sides = side_by_side(
                bench.rounds,
                || ours.prefill(&prompt).map(|seconds| count / seconds),
                || llama.prefill(&prompt).map(|seconds| count / seconds),
            )?;
            add(name, sides)?;
        }
    }
    if decodes.iter().any(|row| bench.wants(&row.0)) {
        llama = faster_decoder(bench, llama)?;
    }
    for (name, context, sequences) in &decodes {
        if bench.wants(name) {
            let prompts: Vec<Vec<u32>> = (0..*sequences).map(|seed| prompt::ids(seed, *context)).collect();
            let sides = side_by_side(bench.rounds, || ours.decode(&prompts, STEPS), || llama.decode(&prompts, STEPS))?;
            add(name, sides)?;
        }
    }
    Ok(())
}

/// llama.cpp with as many threads as ours, or with one, whichever decodes faster. Its threads wait for each other by
/// spinning, so on a machine with few cores the thread that drives them costs it more than a further thread brings.
fn faster_decoder(bench: &Bench, mut as_many: Llama) -> Result<Llama> {
    let mut alone = Llama::start(bench, 1)?;
    let prompt = [prompt::ids(0, 16)];
    let (many, one) = side_by_side(3, || as_many.decode(&prompt, STEPS), || alone.decode(&prompt, STEPS))?;
    eprintln!("llama.cpp decodes {many:.1} tokens/s with {} threads, {one:.1} with 1", bench.threads);
    Ok(if one > many { alone } else { as_many })
}

/// The model as the engine runs it, without an engine around it.
struct Ours {
    model: Arc<dyn Model>,
    pool: Arc<dyn KvPool>,
    logits: Logits,
}

impl Ours {
    fn load(bench: &Bench) -> Result<Self> {
        let device = Arc::new(CpuDevice::new(bench.threads).context("the CPU device")?);
        let loaded = load(&bench.model, &LoadOptions::new(device.clone())).context("the model")?;
        let pages = 8 * 4096 / PAGE;
        let kv = loaded.spec().one_pool().map_err(anyhow::Error::msg)?;
        let spec = kv.pool(KvDtype::F16, PAGE, pages);
        let pool = kvdock_kernels::Device::alloc_kv_pool(device.as_ref(), spec).context("the KV pool")?;
        Ok(Self { model: loaded.model, pool, logits: Logits::new() })
    }

    /// The page table of sequence `index`; no two sequences share a page.
    fn pages(index: usize) -> Vec<u32> {
        let each = 4096 / PAGE;
        (index * each..(index + 1) * each).map(|page| page as u32).collect()
    }

    /// The likeliest token of a row.
    fn likeliest(&self, row: usize) -> Result<u32> {
        let row = self.logits.row(row).context("no such row of logits")?;
        let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).context("a row without logits")?;
        Ok(best.0 as u32)
    }

    fn run_prompt(&mut self, sequence: usize, prompt: &[u32]) -> Result<u32> {
        let pages = Self::pages(sequence);
        let chunks = prompt.len().div_ceil(CHUNK);
        for (index, tokens) in prompt.chunks(CHUNK).enumerate() {
            let logits = if index + 1 == chunks { Want::Last } else { Want::None };
            let chunk = SeqChunk { tokens, start: (index * CHUNK) as u32, pages: &pages, logits };
            self.model.forward(&Batch { seqs: &[chunk] }, self.pool.as_ref(), &NoHooks, &mut self.logits)?;
        }
        self.likeliest(0)
    }

    /// Seconds to the first token after `prompt`.
    fn prefill(&mut self, prompt: &[u32]) -> Result<f64> {
        let start = Instant::now();
        self.run_prompt(0, prompt)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Tokens a second, of all prompts together, over `steps` tokens after each of `prompts`.
    fn decode(&mut self, prompts: &[Vec<u32>], steps: usize) -> Result<f64> {
        let mut tokens = Vec::new();
        for (sequence, prompt) in prompts.iter().enumerate() {
            tokens.push(self.run_prompt(sequence, prompt)?);
        }
        let tables: Vec<Vec<u32>> = (0..prompts.len()).map(Self::pages).collect();
        let start = Instant::now();
        for step in 0..steps {
            let chunks: Vec<SeqChunk<'_>> = prompts
                .iter()
                .zip(&tokens)
                .zip(&tables)
                .map(|((prompt, token), pages)| SeqChunk {
                    tokens: std::slice::from_ref(token),
                    start: (prompt.len() + step) as u32,
                    pages,
                    logits: Want::Last,
                })
                .collect();
            self.model.forward(&Batch { seqs: &chunks }, self.pool.as_ref(), &NoHooks, &mut self.logits)?;
            tokens = (0..prompts.len()).map(|row| self.likeliest(row)).collect::<Result<_>>()?;
        }
        Ok((steps * prompts.len()) as f64 / start.elapsed().as_secs_f64())
    }
}
