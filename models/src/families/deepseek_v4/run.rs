//! The forward pass of DeepSeek-V4.

use std::sync::Arc;

use kvdock_kernels::rowmath::rms_norm;
use kvdock_kernels::{Buf, Device, KvPool, Weight};

use super::attention::Attention;
use super::hyper::{Hyper, HyperHead, STREAMS};
use crate::families::blocks::moe::Moe;
use crate::families::blocks::share::Share;
use crate::families::blocks::step::{Head, Rules, Step, check_pools};
use crate::families::blocks::{Linear, to_host};
use crate::{Batch, DraftPass, LayerHooks, Logits, Model, ModelError, ModelSpec, NoHooks, PoolSet, PooledBatch};

pub(super) struct Layer {
    pub(super) attention_norm: Vec<f32>,
    pub(super) attention_mix: Hyper,
    pub(super) attention: Attention,
    pub(super) ffn_norm: Vec<f32>,
    pub(super) ffn_mix: Hyper,
    pub(super) ffn: Moe,
}

/// A layer that predicts the token after the next.
pub(super) struct Draft {
    pub(super) embedding_norm: Vec<f32>,
    pub(super) stream_norm: Vec<f32>,
    pub(super) from_embedding: Linear,
    pub(super) from_streams: Linear,
    pub(super) layer: Layer,
    pub(super) mix: HyperHead,
    pub(super) norm: Buf,
}

pub(super) struct Net {
    pub(super) embedding: Weight,
    pub(super) layers: Vec<Layer>,
    pub(super) drafts: Vec<Draft>,
    pub(super) mix: HyperHead,
    pub(super) norm: Buf,
    pub(super) head: Weight,
    pub(super) eps: f32,
    /// Tokens before a chunk whose window pages must be there.
    pub(super) window: usize,
}

/// The model on its device.
pub(super) struct DeepseekV4 {
    pub(super) spec: ModelSpec,
    pub(super) net: Net,
    pub(super) device: Arc<dyn Device>,
    pub(super) share: Share,
}

impl Layer {
    /// Takes the streams `[rows, STREAMS, hidden]` through the layer.
    fn apply(
        &self,
        (device, share): (&dyn Device, &Share),
        step: &Step<'_>,
        pools: &PoolSet,
        streams: &mut [f32],
        eps: f32,
    ) -> Result<(), ModelError> {
        let rows = step.rows();
        sublayer((device, share), (&self.attention_mix, &self.attention_norm, eps), rows, streams, |x| {
            self.attention.apply(device, step, pools, x)
        })?;
        sublayer((device, share), (&self.ffn_mix, &self.ffn_norm, eps), rows, streams, |x| {
            self.ffn.apply(device, x, rows, &step.ids)
        })
    }
}

/// One sublayer between its mixes.
fn sublayer(
    (device, share): (&dyn Device, &Share),
    (mix, norm, eps): (&Hyper, &[f32], f32),
    rows: usize,
    streams: &mut [f32],
    of: impl FnOnce(&Buf) -> Result<Buf, ModelError>,
) -> Result<(), ModelError> {
    let hidden = norm.len();
    let (mut input, backs) = mix.enter(device, streams, rows)?;
    input.chunks_exact_mut(hidden).for_each(|row| rms_norm(row, Some(norm), eps));
    let mut y = of(&device.upload(&input)?)?;
    share.sum(device, &mut y, rows * hidden)?;
    let y = to_host(device, &y, rows * hidden)?;
    for ((streams, back), y) in streams.chunks_exact_mut(STREAMS * hidden).zip(&backs).zip(y.chunks_exact(hidden)) {
        back.apply(streams, y);
    }
    Ok(())
}

impl DeepseekV4 {
    fn check<'a>(&self, batch: &PooledBatch<'a>, pools: &PoolSet) -> Result<Step<'a>, ModelError> {
        let page_tokens = pools.sizes().page_tokens;
        let rules = Rules { spec: &self.spec, page_tokens, pools: Some(pools), window: self.net.window };
        Step::check(batch.seqs, &rules)
    }

    /// The streams of all rows behind the last layer.
    fn streams(&self, step: &Step<'_>, pools: &PoolSet, hooks: &dyn LayerHooks) -> Result<Vec<f32>, ModelError> {
        let device = (self.device.as_ref(), &self.share);
        let embedded = self.embed(&step.ids)?;
        let rows = embedded.chunks_exact(self.spec.hidden);
        let mut streams: Vec<f32> = rows.flat_map(|row| std::iter::repeat_n(row, STREAMS).flatten().copied()).collect();
        for (index, layer) in self.net.layers.iter().enumerate() {
            hooks.before_layer(index)?;
            layer.apply(device, step, pools, &mut streams, self.net.eps)?;
        }
        Ok(streams)
    }

    fn embed(&self, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        let device = self.device.as_ref();
        let mut x = device.alloc(ids.len() * self.spec.hidden)?;
        self.share.embed(device, &self.net.embedding, self.spec.vocab_size, ids, &mut x)?;
        Ok(to_host(device, &x, ids.len() * self.spec.hidden)?)
    }

    /// Logits of the rows in `wanted`.
    fn logits(
        &self,
        (mix, norm): (&HyperHead, &Buf),
        streams: &[f32],
        wanted: &[u32],
        out: &mut Logits,
    ) -> Result<(), ModelError> {
        let device = self.device.as_ref();
        let width = STREAMS * self.spec.hidden;
        let out = out.reset(wanted.len(), self.spec.vocab_size);
        if wanted.is_empty() {
            return Ok(());
        }
        let picked: Vec<f32> =
            wanted.iter().flat_map(|row| streams[*row as usize * width..][..width].iter().copied()).collect();
        let x = device.upload(&mix.apply(device, &picked, wanted.len())?)?;
        let rows: Vec<u32> = (0..wanted.len() as u32).collect();
        let head =
            Head { norm, weight: &self.net.head, vocab: self.spec.vocab_size, eps: self.net.eps, share: &self.share };
        head.logits(device, &x, &rows, out)
    }

    /// One draft layer over the streams of the layer before it.
    fn draft(
        &self,
        draft: &Draft,
        step: &Step<'_>,
        pools: &PoolSet,
        streams: &[f32],
        next: &[u32],
    ) -> Result<Vec<f32>, ModelError> {
        let device = self.device.as_ref();
        let (rows, hidden, eps) = (step.rows(), self.spec.hidden, self.net.eps);
        let mut embedded = self.embed(next)?;
        embedded.chunks_exact_mut(hidden).for_each(|row| rms_norm(row, Some(&draft.embedding_norm), eps));
        let mut normed = streams.to_vec();
        normed.chunks_exact_mut(hidden).for_each(|row| rms_norm(row, Some(&draft.stream_norm), eps));
        let from_embedding = draft.from_embedding.to_host(device, &device.upload(&embedded)?, rows)?;
        let mut x = draft.from_streams.to_host(device, &device.upload(&normed)?, rows * STREAMS)?;
        for (row, x) in x.chunks_exact_mut(STREAMS * hidden).enumerate() {
            for stream in x.chunks_exact_mut(hidden) {
                stream.iter_mut().zip(&from_embedding[row * hidden..]).for_each(|(x, e)| *x += e);
            }
        }
        draft.layer.apply((device, &self.share), step, pools, &mut x, eps)?;
        Ok(x)
    }
}

impl Model for DeepseekV4 {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(
        &self,
        _batch: &Batch<'_>,
        _pool: &dyn KvPool,
        _hooks: &dyn LayerHooks,
        _logits: &mut Logits,
    ) -> Result<(), ModelError> {
        match self.spec.one_pool() {
            Err(why) => Err(ModelError::Batch(why)),
            Ok(_) => Err(ModelError::Batch("this model needs all of its pools".to_owned())),
        }
    }

    fn forward_pools(
        &self,
        batch: &PooledBatch<'_>,
        pools: &PoolSet,
        hooks: &dyn LayerHooks,
        logits: &mut Logits,
    ) -> Result<(), ModelError> {
        check_pools(&self.spec.pools, pools)?;
        let step = self.check(batch, pools)?;
        let streams = self.streams(&step, pools, hooks)?;
        self.logits((&self.net.mix, &self.net.norm), &streams, &step.wanted, logits)
    }

    fn forward_draft(
        &self,
        batch: &PooledBatch<'_>,
        pools: &PoolSet,
        draft: DraftPass<'_>,
        logits: &mut Logits,
    ) -> Result<(), ModelError> {
        let Some(layer) = self.net.drafts.first() else {
            return Err(ModelError::Batch("this checkpoint has no layer that predicts further tokens".to_owned()));
        };
        check_pools(&self.spec.pools, pools)?;
        check_pools(&self.spec.draft_pools, draft.pools)?;
        let step = self.check(batch, pools)?;
        self.check(batch, draft.pools)?;
        if draft.next.len() != step.rows() {
            let (rows, next) = (step.rows(), draft.next.len());
            return Err(ModelError::Batch(format!("{next} next tokens for a step of {rows} rows")));
        }
        if let Some(id) = draft.next.iter().find(|id| **id as usize >= self.spec.vocab_size) {
            let vocab = self.spec.vocab_size;
            return Err(ModelError::Batch(format!("next token {id} is not below the vocabulary's size, {vocab}")));
        }
        let streams = self.streams(&step, pools, &NoHooks)?;
        self.logits((&self.net.mix, &self.net.norm), &streams, &step.wanted, logits)?;
        let drafted = self.draft(layer, &step, draft.pools, &streams, draft.next)?;
        self.logits((&layer.mix, &layer.norm), &drafted, &step.wanted, draft.logits)
    }
}
