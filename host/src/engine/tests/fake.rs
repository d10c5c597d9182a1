//! A model whose logits are a hash of the tokens it finds in the pool.
//!
//! It keeps each token and its position in the KV pool and reads the whole history from there, so
//! a wrong page table, a page overwritten or a chunk out of order changes its output or is
//! an error.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvdock_kernels::{HostPage, KernelError, KvDtype, KvPool, KvSpec};
use kvdock_models::{Batch, GenerationDefaults, KvGeometry, LayerHooks, Logits, Model, ModelError, ModelSpec, Want};
use parking_lot::Mutex;

use crate::engine::text::{MakeDecoder, TokenDecoder};

pub const VOCAB: usize = 64;
/// Ends a generation.
pub const EOS: u32 = 63;
/// A prompt with this token makes the pass fail.
pub const FAILS: u32 = 62;
/// A prompt with this token makes the pass panic.
pub const PANICS: u32 = 61;
/// A prompt with this token makes the logits no numbers.
pub const NOT_A_NUMBER: u32 = 60;
/// These three are the bytes of one character.
pub const FISH: [u32; 3] = [57, 58, 59];

/// One slot: the token, its position, and two values that are always 7.
type Slot = [f32; 4];

const KV: KvGeometry = KvGeometry { layers: 1, kv_heads: 1, head_dim_k: 2, head_dim_v: 2 };

pub struct FakePool {
    spec: KvSpec,
    slots: Mutex<Vec<Slot>>,
}

impl FakePool {
    pub fn new(page_tokens: usize, pages: usize) -> Arc<Self> {
        let spec =
            KvSpec { layers: 1, kv_heads: 1, head_dim_k: 2, head_dim_v: 2, page_tokens, pages, dtype: KvDtype::F32 };
        Arc::new(Self { spec, slots: Mutex::new(vec![[f32::NAN; 4]; page_tokens * pages]) })
    }
}

impl KvPool for FakePool {
    fn spec(&self) -> &KvSpec {
        &self.spec
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    unsafe fn copy_layer_out(&self, page: u32, _: usize, dst: &HostPage) -> Result<(), KernelError> {
        let slots = self.slots.lock();
        for token in 0..self.spec.page_tokens {
            let slot = slots[page as usize * self.spec.page_tokens + token];
            // SAFETY: the caller promises that these strides stay inside memory it may write.
            unsafe {
                let k = dst.k.add(token * dst.k_token_stride);
                k.cast::<[f32; 2]>().write_unaligned([slot[0], slot[1]]);
                let v = dst.v.add(token * dst.v_token_stride);
                v.cast::<[f32; 2]>().write_unaligned([slot[2], slot[3]]);
            }
        }
        Ok(())
    }

    unsafe fn copy_layer_in(&self, page: u32, _: usize, src: &HostPage) -> Result<(), KernelError> {
        let mut slots = self.slots.lock();
        for token in 0..self.spec.page_tokens {
            // SAFETY: the caller promises that these strides stay inside memory it may read.
            let (k, v) = unsafe {
                let k = src.k.add(token * src.k_token_stride);
                let v = src.v.add(token * src.v_token_stride);
                (k.cast::<[f32; 2]>().read_unaligned(), v.cast::<[f32; 2]>().read_unaligned())
            };
            slots[page as usize * self.spec.page_tokens + token] = [k[0], k[1], v[0], v[1]];
        }
        Ok(())
    }
}

/// What the model did.
#[derive(Default)]
pub struct Log {
    pub passes: AtomicUsize,
    /// Tokens computed, without those found in the cache.
    pub tokens: AtomicUsize,
    pub most_sequences: AtomicUsize,
    pub most_prefill: AtomicUsize,
}

pub struct FakeModel {
    spec: ModelSpec,
    /// Tokens that are always followed by a certain other.
    pub chain: HashMap<u32, u32>,
    pub delay: Duration,
    pub log: Arc<Log>,
}

impl FakeModel {
    pub fn new(context_length: usize) -> Self {
        Self {
            spec: ModelSpec {
                architecture: "fake".into(),
                family: "fake",
                name: None,
                vocab_size: VOCAB,
                context_length,
                hidden: 4,
                layers: 1,
                kv: Some(KV),
                pools: vec![KV.declared()],
                draft_pools: Vec::new(),
                page_multiple: 1,
                ranks: 1,
                context_ranks: 1,
                bos: None,
                eos: vec![EOS],
                generation: GenerationDefaults::default(),
                weights_digest: [0; 32],
                numerics_id: "fake".into(),
            },
            chain: HashMap::new(),
            delay: Duration::ZERO,
            log: Arc::default(),
        }
    }

    fn fill_row(&self, history: &[u32], row: &mut [f32]) {
        let mut state = 0xcbf2_9ce4_8422_2325u64;
        for &token in history {
            state = (state ^ u64::from(token) ^ 0x9e37).wrapping_mul(0x0100_0000_01b3);
        }
        for (token, logit) in row.iter_mut().enumerate() {
            let mut x = state ^ (token as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            *logit = ((x >> 40) as f32) / 4_194_304.0;
        }
        // Tokens with a special meaning come only where a test asks for them.
        row[57..VOCAB].fill(-50.0);
        if let Some(next) = history.last().and_then(|last| self.chain.get(last)) {
            row[*next as usize] = 100.0;
        }
        if history.contains(&NOT_A_NUMBER) {
            row[5] = f32::NAN;
        }
    }
}

fn failed(message: String) -> ModelError {
    ModelError::Tokenizer(message)
}

impl Model for FakeModel {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(
        &self,
        batch: &Batch<'_>,
        pool: &dyn KvPool,
        hooks: &dyn LayerHooks,
        logits: &mut Logits,
    ) -> Result<(), ModelError> {
        hooks.before_layer(0)?;
        std::thread::sleep(self.delay);
        let pool = pool.as_any().downcast_ref::<FakePool>().unwrap();
        let page_tokens = pool.spec.page_tokens;
        let mut slots = pool.slots.lock();
        let mut rows: Vec<Vec<u32>> = Vec::new();
        let mut prefill = 0;
        for seq in batch.seqs {
            let slot_of = |p: usize| seq.pages[p / page_tokens] as usize * page_tokens + p % page_tokens;
            let start = seq.start as usize;
            for (i, &token) in seq.tokens.iter().enumerate() {
                slots[slot_of(start + i)] = [token as f32, (start + i) as f32, 7.0, 7.0];
            }
            let end = start + seq.tokens.len();
            let mut history = Vec::with_capacity(end);
            for position in 0..end {
                let slot = slots[slot_of(position)];
                if slot[1] != position as f32 || slot[2..] != [7.0, 7.0] {
                    return Err(failed(format!("position {position} holds {slot:?}")));
                }
                history.push(slot[0] as u32);
            }
            assert!(!history.contains(&PANICS), "the fake model was told to panic");
            if history.contains(&FAILS) {
                return Err(failed("the fake model was told to fail".into()));
            }
            match seq.logits {
                Want::None => {}
                Want::Last => rows.push(history),
                Want::All => rows.extend((start..end).map(|p| history[..=p].to_vec())),
            }
            prefill += if seq.tokens.len() > 1 { seq.tokens.len() } else { 0 };
        }
        let values = logits.reset(rows.len(), VOCAB);
        for (history, row) in rows.iter().zip(values.chunks_mut(VOCAB)) {
            self.fill_row(history, row);
        }
        let tokens = batch.seqs.iter().map(|s| s.tokens.len()).sum();
        self.log.passes.fetch_add(1, Ordering::Relaxed);
        self.log.tokens.fetch_add(tokens, Ordering::Relaxed);
        self.log.most_sequences.fetch_max(batch.seqs.len(), Ordering::Relaxed);
        self.log.most_prefill.fetch_max(prefill, Ordering::Relaxed);
        Ok(())
    }
}

/// Bytes of a token: letters, except for the three bytes of a fish.
pub fn token_bytes(token: u32) -> Vec<u8> {
    match FISH.iter().position(|&t| t == token) {
        Some(i) => vec!["鱼".as_bytes()[i]],
        None if token == EOS => b"<eos>".to_vec(),
        None if token < 26 => vec![b'a' + token as u8],
        None => format!(" t{token}").into_bytes(),
    }
}

/// The text of tokens, as a whole.
pub fn text_of(tokens: &[u32]) -> String {
    let bytes: Vec<u8> = tokens.iter().flat_map(|&t| token_bytes(t)).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

struct FakeDecoder {
    skip_special: bool,
    held: Vec<u8>,
}

impl TokenDecoder for FakeDecoder {
    fn push(&mut self, token: u32) -> String {
        if token == EOS && self.skip_special {
            return String::new();
        }
        self.held.extend(token_bytes(token));
        match std::str::from_utf8(&self.held) {
            Err(error) if error.error_len().is_none() => String::new(),
            _ => self.finish(),
        }
    }

    fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned()
    }
}

pub fn decoders() -> MakeDecoder {
    Box::new(|skip_special| Box::new(FakeDecoder { skip_special, held: Vec::new() }))
}
