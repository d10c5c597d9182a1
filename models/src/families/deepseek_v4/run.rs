//! The forward pass of DeepSeek-V4.

use std::sync::Arc;

use kvdock_kernels::ops::Columns;
use kvdock_kernels::{Buf, Device, KernelError, KvPool, Weight};

use super::attention::Attention;
use super::hyper::{Hyper, HyperHead, STREAMS};
use super::step::V4Step;
use crate::families::blocks::Linear;
use crate::families::blocks::context::Dealt;
use crate::families::blocks::moe::Moe;
use crate::families::blocks::replay::Streams;
use crate::families::blocks::share::Share;
use crate::families::blocks::step::{Head, Rules, Step, check_pools};
use crate::{Batch, DraftPass, LayerHooks, Logits, Model, ModelError, ModelSpec, NoHooks, PoolSet, PooledBatch};

pub(super) struct Layer {
    pub(super) attention_norm: Buf,
    pub(super) attention_mix: Hyper,
    pub(super) attention: Attention,
    pub(super) ffn_norm: Buf,
    pub(super) ffn_mix: Hyper,
    pub(super) ffn: Moe,
}

/// A layer that predicts the token after the next.
pub(super) struct Draft {
    pub(super) embedding_norm: Buf,
    pub(super) stream_norm: Buf,
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
    pub(super) kept: Streams,
}

impl Layer {
    /// Takes the streams `[rows, STREAMS, hidden]` through the layer.
    fn apply(&self, share: &Share, step: &V4Step<'_>, streams: &mut Buf, eps: f32) -> Result<(), ModelError> {
        let (device, rows) = (step.device, step.step.rows());
        let whole = |mut part: Buf, hidden: usize| {
            share.sum(device, &mut part, rows * hidden)?;
            Ok(part)
        };
        let (attention_norm, ffn_norm) = (&self.attention_norm, &self.ffn_norm);
        self.attention_mix.around(device, (attention_norm, eps), rows, streams, |x| {
            whole(self.attention.apply(step, x)?, attention_norm.len())
        })?;
        self.ffn_mix.around(device, (ffn_norm, eps), rows, streams, |x| {
            whole(self.ffn.apply(device, x, rows, &step.step.ids)?, ffn_norm.len())
        })
    }
}

/// Each row of `x` in all streams, `[rows, STREAMS, hidden]`.
fn in_all_streams(device: &dyn Device, x: &Buf, rows: usize, hidden: usize) -> Result<Buf, KernelError> {
    let mut streams = device.scratch(rows * STREAMS * hidden)?;
    into_all_streams(device, x, rows, hidden, &mut streams)?;
    Ok(streams)
}

fn into_all_streams(
    device: &dyn Device,
    x: &Buf,
    rows: usize,
    hidden: usize,
    streams: &mut Buf,
) -> Result<(), KernelError> {
    for stream in 0..STREAMS {
        let target = Columns { stride: STREAMS * hidden, at: stream * hidden };
        device.copy_columns(x, Columns { stride: hidden, at: 0 }, streams, target, hidden, rows)?;
    }
    Ok(())
}

impl DeepseekV4 {
    fn check<'a>(&self, batch: &PooledBatch<'a>, pools: &PoolSet) -> Result<Dealt<'a>, ModelError> {
        let page_tokens = pools.sizes().page_tokens;
        let rules = Rules { spec: &self.spec, page_tokens, pools: Some(pools), window: self.net.window };
        Ok(Dealt::new(&self.share, Step::check(batch.seqs, &rules)?))
    }

    /// A step over one set of pools.
    fn over<'a>(&'a self, step: &'a Dealt<'a>, pools: &'a PoolSet) -> V4Step<'a> {
        V4Step::new(self.device.as_ref(), step, pools, self.net.window + 1)
    }

    /// The streams of all rows behind the last layer.
    fn streams(&self, step: &V4Step<'_>, hooks: &dyn LayerHooks) -> Result<Buf, ModelError> {
        let mut streams = step.device.scratch(step.step.rows() * STREAMS * self.spec.hidden)?;
        self.layers(step, hooks, &mut streams)?;
        Ok(streams)
    }

    /// All layers, from the embedding on, into `streams`.
    fn layers(&self, step: &V4Step<'_>, hooks: &dyn LayerHooks, streams: &mut Buf) -> Result<(), ModelError> {
        let embedded = self.embed(&step.step.ids)?;
        into_all_streams(step.device, &embedded, step.step.rows(), self.spec.hidden, streams)?;
        for (index, layer) in self.net.layers.iter().enumerate() {
            hooks.before_layer(index)?;
            layer.apply(&self.share, step, streams, self.net.eps)?;
        }
        Ok(())
    }

    fn embed(&self, ids: &[u32]) -> Result<Buf, ModelError> {
        let device = self.device.as_ref();
        let mut x = device.scratch(ids.len() * self.spec.hidden)?;
        self.share.embed(device, &self.net.embedding, self.spec.vocab_size, ids, &mut x)?;
        Ok(x)
    }

    /// Logits of the rows in `wanted`.
    fn logits(
        &self,
        (mix, norm): (&HyperHead, &Buf),
        streams: &Buf,
        wanted: &[u32],
        out: &mut Logits,
    ) -> Result<(), ModelError> {
        let device = self.device.as_ref();
        let (hidden, rows) = (self.spec.hidden, wanted.len());
        let mut out = self.share.target(&self.device, rows, self.spec.vocab_size, out)?;
        if wanted.is_empty() {
            return Ok(());
        }
        let mut picked = device.scratch(rows * STREAMS * hidden)?;
        device.gather_rows(streams, STREAMS * hidden, wanted, &mut picked)?;
        let x = mix.apply(device, &picked, rows, hidden)?;
        let rows: Vec<u32> = (0..rows as u32).collect();
        let head =
            Head { norm, weight: &self.net.head, vocab: self.spec.vocab_size, eps: self.net.eps, share: &self.share };
        head.logits(device, &x, &rows, &mut out)
    }

    /// One draft layer over the streams of the layer before it.
    fn draft(&self, draft: &Draft, step: &V4Step<'_>, streams: &Buf, next: &[u32]) -> Result<Buf, ModelError> {
        let device = self.device.as_ref();
        let (rows, hidden, eps) = (step.step.rows(), self.spec.hidden, self.net.eps);
        let mut embedded = self.embed(next)?;
        device.norm_rows(&mut embedded, Some(&draft.embedding_norm), hidden, eps, rows)?;
        let mut normed = device.scratch(rows * STREAMS * hidden)?;
        let whole = Columns { stride: hidden, at: 0 };
        device.copy_columns(streams, whole, &mut normed, whole, hidden, rows * STREAMS)?;
        device.norm_rows(&mut normed, Some(&draft.stream_norm), hidden, eps, rows * STREAMS)?;
        let from_embedding = draft.from_embedding.apply(device, &embedded, rows)?;
        let mut x = draft.from_streams.apply(device, &normed, rows * STREAMS)?;
        let each = in_all_streams(device, &from_embedding, rows, hidden)?;
        device.add(&mut x, &each, rows * STREAMS * hidden)?;
        draft.layer.apply(&self.share, step, &mut x, eps)?;
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
        let (device, width) = (self.device.as_ref(), STREAMS * self.spec.hidden);
        let layers = (self.net.layers.len(), hooks);
        // What a step knows of its rows is made anew each time.
        let mut repeated = |streams: &mut Buf| self.layers(&self.over(&step, pools), &NoHooks, streams);
        let (mix, wanted) = ((&self.net.mix, &self.net.norm), &step.own().wanted);
        if step.own().ids.is_empty() {
            let streams = self.streams(&self.over(&step, pools), hooks)?;
            return self.logits(mix, &streams, wanted, logits);
        }
        match self.kept.decode(device, (&self.share, &step), width, layers, &mut repeated)? {
            Some(kept) => {
                self.logits(mix, &kept.stream, wanted, logits)?;
                self.kept.give_back(kept);
                Ok(())
            }
            None => self.logits(mix, &self.streams(&self.over(&step, pools), hooks)?, wanted, logits),
        }
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
        let rows = step.whole().rows();
        if draft.next.len() != rows {
            let next = draft.next.len();
            return Err(ModelError::Batch(format!("{next} next tokens for a step of {rows} rows")));
        }
        if let Some(id) = draft.next.iter().find(|id| **id as usize >= self.spec.vocab_size) {
            let vocab = self.spec.vocab_size;
            return Err(ModelError::Batch(format!("next token {id} is not below the vocabulary's size, {vocab}")));
        }
        let streams = self.streams(&self.over(&step, pools), &NoHooks)?;
        self.logits((&self.net.mix, &self.net.norm), &streams, &step.own().wanted, logits)?;
        let drafted = self.draft(layer, &self.over(&step, draft.pools), &streams, &draft.next[step.own_rows()])?;
        self.logits((&layer.mix, &layer.norm), &drafted, &step.own().wanted, draft.logits)
    }
}
