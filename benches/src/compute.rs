//! Prefill and decode beside llama.cpp: the same file, the same number of threads, the same run.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{KvDtype, KvPool};
use kvdock_models::{Batch, LoadOptions, Logits, Model, NoHooks, SeqChunk, Want, load};
use kvdock_tests::prompt;

use crate::Bench;
use crate::limit::Memory;
use crate::llama::Llama;
use crate::row::{Better, Goal, Report, Row};
use crate::sample::{Turns, side_by_side};

/// Tokens a page, as the server's default.
const PAGE: usize = 16;
/// Prompt tokens in one step, as the server's default.
const CHUNK: usize = 512;
/// Tokens that a decode sample makes of each sequence, and those before them that are not timed: steady decoding is measured, and the weights
/// that the other side's turn took the place of in the last cache have to come back first.
const STEPS: usize = 12;
const BEFORE: usize = 4;

/// What is decoded: tokens of context, our sequences side by side, llama.cpp's, and what is asked for.
const DECODES: [(usize, usize, usize, f64); 7] = [
    (16, 1, 1, 1.1),
    (512, 1, 1, 1.1),
    (2048, 1, 1, 1.1),
    (128, 8, 8, 1.5),
    // llama.cpp is given the batch that it is asked to be beaten at.
    (128, 32, 8, 1.5),
    (512, 8, 8, 1.5),
    (512, 32, 8, 1.5),
];

/// Adds the rows.
///
/// # Errors
/// When a side can't be measured.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let prefills = [(512, 3), (1500, 4)]
        .map(|(tokens, longer)| (format!("prefill, {tokens} tokens (tokens/s), peer llama.cpp"), tokens, longer));
    // To make sixteen thousand tokens of context takes most of a minute.
    let decodes = DECODES.iter().filter(|(context, ours, ..)| !bench.quick || *ours == 1 || *context < 512).map(
        |&(context, ours, theirs, goal)| {
            let peer = if ours == theirs { "llama.cpp".to_owned() } else { format!("llama.cpp's {theirs}") };
            let name = format!("decode, {ours} x context {context} (tokens/s), peer {peer}");
            (name, context, ours, theirs, goal)
        },
    );
    let decodes: Vec<_> = decodes.filter(|row| bench.wants(&row.0)).collect();
    let prefills: Vec<_> = prefills.into_iter().filter(|row| bench.wants(&row.0)).collect();
    if prefills.is_empty() && decodes.is_empty() {
        return Ok(());
    }
    let mut ours = Ours::load(bench)?;
    let mut llama = Llama::start(bench, bench.threads)?;
    let mut add = |name: String, turns: Turns, goal: Goal| report.add(Row::new(name, turns, Better::More, goal));
    for (name, tokens, longer) in prefills {
        let prompt = prompt::ids(1, tokens);
        let count = tokens as f64;
        let turns = side_by_side(
            bench.rounds.longer(longer),
            || ours.prefill(&prompt).map(|seconds| count / seconds),
            || llama.prefill(&prompt).map(|seconds| count / seconds),
        )?;
        add(name, turns, Goal::Ratio(1.5))?;
    }
    if decodes.is_empty() {
        return Ok(());
    }
    llama = faster_decoder(bench, llama)?;
    // But for the vocabulary, the file is weights.
    let weights = std::fs::metadata(&bench.model).context("the model's file")?.len() as f64;
    for (name, context, our_count, their_count, goal) in decodes {
        let prompts: Vec<Vec<u32>> = (0..our_count as u64).map(|seed| prompt::ids(seed, context)).collect();
        let mut decoding = ours.begin(&prompts)?;
        llama.begin(prompts.get(..their_count).unwrap_or_default(), BEFORE + STEPS)?;
        let turns = side_by_side(bench.rounds.longer(2), || decoding.more(), || llama.more(BEFORE, STEPS))?;
        llama.end()?;
        // Each step reads all weights once, and the keys and values of each sequence.
        let step = weights + (our_count * context * decoding.token_bytes()) as f64;
        let memory = Memory::new(bench.threads, step as usize);
        let limit = || Ok(memory.read_rate()? / step * our_count as f64);
        let of_limit_turns = side_by_side(bench.rounds.at_most(50), || decoding.more(), limit)?;
        let of_limit =
            format!("decode, {our_count} x context {context} (tokens/s), peer its bytes at the memory's rate");
        add(name, turns, Goal::Ratio(goal))?;
        add(of_limit, of_limit_turns, Goal::None)?;
    }
    Ok(())
}

/// llama.cpp with as many threads as ours, or with one, whichever decodes faster. Its threads wait for each other by
/// spinning, so on a machine with few cores the thread that drives them costs it more than a further thread brings.
fn faster_decoder(bench: &Bench, mut as_many: Llama) -> Result<Llama> {
    let mut alone = Llama::start(bench, 1)?;
    let (prompt, rounds) = ([prompt::ids(0, 16)], bench.rounds.at_most(9));
    for llama in [&mut as_many, &mut alone] {
        llama.begin(&prompt, BEFORE + STEPS)?;
    }
    let Turns { ours: many, peer: one, .. } =
        side_by_side(rounds, || as_many.more(BEFORE, STEPS), || alone.more(BEFORE, STEPS))?;
    for llama in [&mut as_many, &mut alone] {
        llama.end()?;
    }
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
        // Of the largest row, with room for what a sample decodes.
        let pages = 32 * (512 + BEFORE + STEPS).div_ceil(PAGE);
        let kv = loaded.spec().one_pool().map_err(anyhow::Error::msg)?;
        let spec = kv.pool(KvDtype::F16, PAGE, pages);
        let pool = kvdock_kernels::Device::alloc_kv_pool(device.as_ref(), spec).context("the KV pool")?;
        Ok(Self { model: loaded.model, pool, logits: Logits::new() })
    }

    /// The likeliest token of a row.
    fn likeliest(&self, row: usize) -> Result<u32> {
        let row = self.logits.row(row).context("no such row of logits")?;
        let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).context("a row without logits")?;
        Ok(best.0 as u32)
    }

    fn run_prompt(&mut self, pages: &[u32], prompt: &[u32]) -> Result<u32> {
        let chunks = prompt.len().div_ceil(CHUNK);
        for (index, tokens) in prompt.chunks(CHUNK).enumerate() {
            let logits = if index + 1 == chunks { Want::Last } else { Want::None };
            let chunk = SeqChunk { tokens, start: (index * CHUNK) as u32, pages, logits };
            self.model.forward(&Batch { seqs: &[chunk] }, self.pool.as_ref(), &NoHooks, &mut self.logits)?;
        }
        self.likeliest(0)
    }

    /// Seconds to the first token after `prompt`.
    fn prefill(&mut self, prompt: &[u32]) -> Result<f64> {
        let pages: Vec<u32> = (0..prompt.len().div_ceil(PAGE) as u32).collect();
        let start = Instant::now();
        self.run_prompt(&pages, prompt)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Computes `prompts`, with room for a sample's tokens after each.
    fn begin(&mut self, prompts: &[Vec<u32>]) -> Result<Decoding<'_>> {
        let mut sequences = Vec::new();
        let mut next = 0;
        for prompt in prompts {
            // No two sequences share a page.
            let count = (prompt.len() + BEFORE + STEPS).div_ceil(PAGE) as u32;
            let pages: Vec<u32> = (next..next + count).collect();
            next += count;
            let token = self.run_prompt(&pages, prompt)?;
            sequences.push(Sequence { pages, token, end: prompt.len() as u32 });
        }
        Ok(Decoding { ours: self, sequences })
    }
}

/// A sequence that goes on.
struct Sequence {
    pages: Vec<u32>,
    /// The token that comes after the prompt.
    token: u32,
    /// Tokens of the prompt.
    end: u32,
}

/// Sequences past their prompts.
struct Decoding<'a> {
    ours: &'a mut Ours,
    sequences: Vec<Sequence>,
}

impl Decoding<'_> {
    /// Bytes of a token's keys and values.
    fn token_bytes(&self) -> usize {
        self.ours.pool.spec().page_bytes() / PAGE
    }

    /// Tokens a second, of all sequences together, over a sample's tokens after each prompt: those of the call before are overwritten.
    fn more(&mut self) -> Result<f64> {
        let mut tokens: Vec<u32> = self.sequences.iter().map(|sequence| sequence.token).collect();
        let mut start = Instant::now();
        for step in 0..BEFORE + STEPS {
            if step == BEFORE {
                start = Instant::now();
            }
            let chunks: Vec<SeqChunk<'_>> = self
                .sequences
                .iter()
                .zip(&tokens)
                .map(|(sequence, token)| SeqChunk {
                    tokens: std::slice::from_ref(token),
                    start: sequence.end + step as u32,
                    pages: &sequence.pages,
                    logits: Want::Last,
                })
                .collect();
            let ours = &mut *self.ours;
            ours.model.forward(&Batch { seqs: &chunks }, ours.pool.as_ref(), &NoHooks, &mut ours.logits)?;
            for (row, token) in tokens.iter_mut().enumerate() {
                *token = self.ours.likeliest(row)?;
            }
        }
        Ok((STEPS * self.sequences.len()) as f64 / start.elapsed().as_secs_f64())
    }
}
