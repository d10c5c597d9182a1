//! What the tests of this crate share.
#![allow(dead_code)]

pub mod header;
pub mod pools;

use std::path::Path;
use std::sync::{Arc, OnceLock};

use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{Device, KvDtype, KvPool};
use kvdock_models::{Batch, LoadOptions, LoadedModel, Logits, ModelError, NoHooks, SeqChunk, Want, load};

/// Tokens of a page in these tests.
pub const PAGE: usize = 16;

/// One CPU device for all tests of a binary.
pub fn device() -> Arc<dyn Device> {
    static DEVICE: OnceLock<Arc<dyn Device>> = OnceLock::new();
    Arc::clone(DEVICE.get_or_init(|| Arc::new(CpuDevice::new(2).unwrap())))
}

/// Devices of `count` ranks, the first being [`device`].
pub fn devices(count: usize) -> Vec<Arc<dyn Device>> {
    static FURTHER: OnceLock<Vec<Arc<dyn Device>>> = OnceLock::new();
    let further =
        FURTHER.get_or_init(|| (0..3).map(|_| Arc::new(CpuDevice::new(1).unwrap()) as Arc<dyn Device>).collect());
    std::iter::once(device()).chain(further.iter().cloned()).take(count).collect()
}

/// Loads onto the devices of `ranks` ranks.
pub fn try_load_ranks(path: &Path, ranks: usize) -> Result<LoadedModel, ModelError> {
    load(path, &LoadOptions { further_ranks: devices(ranks)[1..].to_vec(), ..LoadOptions::new(device()) })
}

/// Loads onto the devices of `shares` tensor-parallel ranks times `context` context-parallel ones.
pub fn try_load_context(path: &Path, shares: usize, context: usize) -> Result<LoadedModel, ModelError> {
    let further_ranks = devices(shares * context)[1..].to_vec();
    load(path, &LoadOptions { further_ranks, context_ranks: context, ..LoadOptions::new(device()) })
}

/// Loads onto [`device`].
pub fn try_load(path: &Path) -> Result<LoadedModel, ModelError> {
    load(path, &LoadOptions::new(device()))
}

/// A model with a pool of its own.
pub struct Session {
    pub loaded: LoadedModel,
    pub pool: Arc<dyn KvPool>,
}

impl Session {
    pub fn new(loaded: LoadedModel, dtype: KvDtype, pages: usize) -> Self {
        let spec = loaded.spec().one_pool().unwrap().pool(dtype, PAGE, pages);
        let pool = device().alloc_kv_pool(spec).unwrap();
        Self { loaded, pool }
    }

    /// Runs one chunk and returns its rows.
    pub fn chunk(&self, tokens: &[u32], start: usize, pages: &[u32], logits: Want) -> Vec<Vec<f32>> {
        self.chunks(&[SeqChunk { tokens, start: start as u32, pages, logits }])
    }

    /// Runs one batch and returns its rows.
    pub fn chunks(&self, seqs: &[SeqChunk<'_>]) -> Vec<Vec<f32>> {
        let mut logits = Logits::new();
        self.loaded.model.forward(&Batch { seqs }, self.pool.as_ref(), &NoHooks, &mut logits).unwrap();
        (0..logits.rows()).map(|row| logits.row(row).unwrap().to_vec()).collect()
    }

    /// All rows of a prompt that is cut into chunks of `size`.
    pub fn prompt(&self, tokens: &[u32], size: usize, pages: &[u32]) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        for (index, chunk) in tokens.chunks(size).enumerate() {
            rows.extend(self.chunk(chunk, index * size, pages, Want::All));
        }
        rows
    }

    /// Greedy continuation of a prompt, token by token.
    pub fn greedy(&self, prompt: &[u32], count: usize, pages: &[u32]) -> Vec<u32> {
        let mut row = self.chunk(prompt, 0, pages, Want::Last).remove(0);
        let mut out = Vec::new();
        loop {
            out.push(argmax(&row));
            if out.len() == count {
                return out;
            }
            let at = prompt.len() + out.len() - 1;
            row = self.chunk(&out[out.len() - 1..], at, pages, Want::Last).remove(0);
        }
    }
}

/// Page numbers in order.
pub fn pages(count: usize) -> Vec<u32> {
    (0..count as u32).collect()
}

pub fn argmax(row: &[f32]) -> u32 {
    let mut best = 0;
    for (id, value) in row.iter().enumerate() {
        if *value > row[best] {
            best = id;
        }
    }
    best as u32
}

/// log of the sum of exponentials, in f64.
pub fn log_sum_exp(row: &[f32]) -> f64 {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    let sum: f64 = row.iter().map(|value| (*value as f64 - most).exp()).sum();
    most + sum.ln()
}

/// The bits of rows, to compare them exactly.
pub fn bits(rows: &[Vec<f32>]) -> Vec<Vec<u32>> {
    rows.iter().map(|row| row.iter().map(|value| value.to_bits()).collect()).collect()
}
