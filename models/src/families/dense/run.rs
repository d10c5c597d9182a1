//! The forward pass of dense decoders.

use std::sync::{Arc, Mutex, PoisonError};

use kvdock_kernels::{AttentionSpec, Buf, Device, KernelError, KvPool, KvSpec, NewHeads, Plan, Projection, SeqSpan};

use super::config::Config;
use super::weights::{Layer, Weights};
use super::workspace::Workspace;
use crate::families::blocks::Linear;
use crate::families::blocks::context::Dealt;
use crate::families::blocks::share::Share;
use crate::families::blocks::step::{HEAD_ROWS, Rules, Step};
use crate::logits::Target;
use crate::{Batch, LayerHooks, Logits, Model, ModelError, ModelSpec, PooledChunk, Want};

/// Work buffers kept for the next pass; more passes at a time make their own.
const KEPT_WORKSPACES: usize = 4;

/// A dense decoder on its device.
pub(super) struct DenseModel {
    spec: ModelSpec,
    config: Config,
    weights: Weights,
    device: Arc<dyn Device>,
    share: Share,
    workspaces: Mutex<Vec<Workspace>>,
}

/// Told of the residual stream after each layer: layer and `[rows, hidden]`.
type Trace<'a> = &'a mut dyn FnMut(usize, &[f32]);

impl DenseModel {
    /// `config` is of what `share` holds.
    pub(super) fn new(
        spec: ModelSpec,
        config: Config,
        weights: Weights,
        device: Arc<dyn Device>,
        share: Share,
    ) -> Self {
        Self { spec, config, weights, device, share, workspaces: Mutex::new(Vec::new()) }
    }

    /// The pass, with an ear on the residual stream for tests.
    pub(super) fn run(
        &self,
        batch: &Batch<'_>,
        pool: &dyn KvPool,
        hooks: &dyn LayerHooks,
        logits: &mut Logits,
        trace: Option<Trace<'_>>,
    ) -> Result<(), ModelError> {
        let dealt = Dealt::new(&self.share, check(batch, pool.spec(), &self.spec)?);
        let input = Input::of(&dealt);
        let mut out = self.share.target(&self.device, input.wanted.len(), self.spec.vocab_size, logits)?;
        if input.ids.is_empty() {
            return Ok(());
        }
        let plan = self.device.plan(pool, &input.spans)?;
        let all = dealt.is_dealt().then(|| self.device.plan(pool, &spans(dealt.whole()))).transpose()?;
        let rows = Rows { plan: &plan, all: all.as_ref(), dealt: &dealt };
        let mut work = self.workspace(input.ids.len())?;
        let result = self
            .layers(&input, &rows, pool, hooks, &mut work, trace)
            .and_then(|rows| self.head(&rows, &mut work, &mut out));
        let mut kept = self.workspaces.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT_WORKSPACES {
            kept.push(work);
        }
        result
    }

    /// Buffers for `rows` rows: a kept set that is large enough, or a new one.
    fn workspace(&self, rows: usize) -> Result<Workspace, ModelError> {
        let mut kept = self.workspaces.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = kept.iter().position(|work| work.rows() >= rows) {
            return Ok(kept.swap_remove(index));
        }
        // A set that is too small would stay too small.
        kept.pop();
        drop(kept);
        Ok(Workspace::new(self.device.as_ref(), &self.config, &self.share, rows)?)
    }

    /// All layers. Leaves the residual stream in `work.x`, the last block's output not yet added in
    /// `work.delta`; returns which of their rows want logits.
    fn layers(
        &self,
        input: &Input<'_>,
        of: &Rows<'_>,
        pool: &dyn KvPool,
        hooks: &dyn LayerHooks,
        work: &mut Workspace,
        mut trace: Option<Trace<'_>>,
    ) -> Result<Vec<u32>, ModelError> {
        let device = self.device.as_ref();
        let (rows, plan) = (input.ids.len(), of.plan);
        let eps = self.config.eps;
        self.share.embed(device, &self.weights.embedding, self.config.vocab, input.ids, &mut work.x)?;
        let is_decode = rows == input.spans.len() && input.wanted.len() == rows;
        // What ranks do together goes by way of the host, which a repeated step does not.
        if device.repeats() && self.share.is_alone() && !of.dealt.is_dealt() && is_decode && trace.is_none() {
            (0..self.weights.layers.len()).try_for_each(|index| hooks.before_layer(index))?;
            let key = work.key();
            device.repeat(key, plan, &mut |plan| self.decode(&Rows { plan, ..*of }, pool, work))?;
            return Ok(input.wanted.clone());
        }
        for (index, layer) in self.weights.layers.iter().enumerate() {
            hooks.before_layer(index)?;
            self.norm(layer, index, eps, rows, work)?;
            self.keys_and_values(layer, index, of, pool, work)?;
            let last = index + 1 == self.weights.layers.len();
            if last && trace.is_none() && input.wanted.len() < rows {
                return self.last_layer_of_wanted(layer, index, input, pool, work);
            }
            self.attend(layer, index, plan, pool, work)?;
            self.mlp(layer, rows, work)?;
            if let Some(trace) = trace.as_deref_mut() {
                trace(index, &self.residual(rows, work)?);
            }
        }
        Ok(input.wanted.clone())
    }

    /// All layers of a step that has one row for each sequence: the same operations for any such step of as many rows.
    fn decode(&self, of: &Rows<'_>, pool: &dyn KvPool, work: &mut Workspace) -> Result<(), KernelError> {
        let (plan, rows) = (of.plan, of.plan.rows());
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.norm(layer, index, self.config.eps, rows, work)?;
            self.keys_and_values(layer, index, of, pool, work)?;
            self.attend(layer, index, plan, pool, work)?;
            self.mlp(layer, rows, work)?;
        }
        Ok(())
    }

    /// Adds what the block before left, and norms, into `work.normed`.
    fn norm(
        &self,
        layer: &Layer,
        index: usize,
        eps: f32,
        rows: usize,
        work: &mut Workspace,
    ) -> Result<(), KernelError> {
        match index {
            0 => self.device.rms_norm(&work.x, &layer.attention_norm, eps, rows, &mut work.normed),
            _ => self.device.add_rms_norm(&mut work.x, &work.delta, &layer.attention_norm, eps, rows, &mut work.normed),
        }
    }

    /// The last layer behind its keys and values, for the rows that want logits only: nobody asks for the
    /// others. Rows do not depend on each other here, so no bit changes.
    fn last_layer_of_wanted(
        &self,
        layer: &Layer,
        index: usize,
        input: &Input<'_>,
        pool: &dyn KvPool,
        work: &mut Workspace,
    ) -> Result<Vec<u32>, ModelError> {
        let count = input.wanted.len();
        if count == 0 {
            return Ok(Vec::new());
        }
        let device = self.device.as_ref();
        let plan = device.plan(pool, &input.wanted_spans)?;
        let Config { hidden, heads, head_dim, .. } = self.config;
        device.gather_rows(&work.q, heads * head_dim, &input.wanted, &mut work.attended)?;
        device.gather_rows(&work.x, hidden, &input.wanted, &mut work.normed)?;
        work.swap_gathered();
        self.attend(layer, index, &plan, pool, work)?;
        self.mlp(layer, count, work)?;
        Ok((0..count as u32).collect())
    }

    /// Projects, norms, rotates, and writes the new keys and values, also those of other ranks, to their pages. Leaves the
    /// queries in `work.q`.
    fn keys_and_values(
        &self,
        layer: &Layer,
        index: usize,
        of: &Rows<'_>,
        pool: &dyn KvPool,
        work: &mut Workspace,
    ) -> Result<(), KernelError> {
        let device = self.device.as_ref();
        let Config { heads, kv_heads, head_dim, eps, .. } = self.config;
        let (plan, rows) = (of.plan, of.plan.rows());
        device.linear(
            &work.normed,
            rows,
            &mut [
                projection(&layer.q, &mut work.q),
                projection(&layer.k, &mut work.k),
                projection(&layer.v, &mut work.v),
            ],
        )?;
        let rope = &self.weights.rope;
        if of.all.is_none() {
            let (q_norm, k_norm) = (layer.q_norm.as_ref(), layer.k_norm.as_ref());
            let new = NewHeads { q: &mut work.q, k: &mut work.k, v: &work.v, heads, q_norm, k_norm, eps, rope };
            return device.heads_enter(pool, index, plan, new);
        }
        if let Some(norm) = &layer.q_norm {
            device.head_rms_norm(&mut work.q, norm, eps, rows, heads)?;
        }
        if let Some(norm) = &layer.k_norm {
            device.head_rms_norm(&mut work.k, norm, eps, rows, kv_heads)?;
        }
        device.rope(rope, plan, &mut work.q, heads, head_dim)?;
        device.rope(rope, plan, &mut work.k, kv_heads, head_dim)?;
        let width = kv_heads * head_dim;
        let k = of.dealt.gathered(device, &work.k, width)?;
        let v = of.dealt.gathered(device, &work.v, width)?;
        let (k, v) = (k.as_ref().unwrap_or(&work.k), v.as_ref().unwrap_or(&work.v));
        device.kv_write(pool, index, of.all.unwrap_or(plan), k, v)
    }

    /// Attention and its output projection, into `work.delta`.
    fn attend(
        &self,
        layer: &Layer,
        index: usize,
        plan: &Plan,
        pool: &dyn KvPool,
        work: &mut Workspace,
    ) -> Result<(), KernelError> {
        let spec = AttentionSpec {
            heads: self.config.heads,
            scale: (self.config.head_dim as f64).sqrt().recip() as f32,
            window: None,
            sinks: None,
        };
        self.device.attention(pool, index, plan, &work.q, &spec, &mut work.attended)?;
        self.device.linear(&work.attended, plan.rows(), &mut [projection(&layer.o, &mut work.delta)])?;
        self.share.sum(self.device.as_ref(), &mut work.delta, plan.rows() * self.config.hidden)
    }

    /// Adds attention's output to the residual stream, then the norm and the gated MLP, into `work.delta`.
    fn mlp(&self, layer: &Layer, rows: usize, work: &mut Workspace) -> Result<(), KernelError> {
        self.device.add_rms_norm(&mut work.x, &work.delta, &layer.mlp_norm, self.config.eps, rows, &mut work.normed)?;
        self.device.linear(
            &work.normed,
            rows,
            &mut [projection(&layer.gate, &mut work.gate), projection(&layer.up, &mut work.up)],
        )?;
        self.device.silu_mul(&mut work.gate, &work.up, rows * self.config.intermediate)?;
        self.device.linear(&work.gate, rows, &mut [projection(&layer.down, &mut work.delta)])?;
        self.share.sum(self.device.as_ref(), &mut work.delta, rows * self.config.hidden)
    }

    /// Final norm and output matrix for the rows in `wanted`, into `out`.
    fn head(&self, wanted: &[u32], work: &mut Workspace, out: &mut Target<'_>) -> Result<(), ModelError> {
        let device = self.device.as_ref();
        let Config { hidden, vocab, eps, .. } = self.config;
        for (index, rows) in wanted.chunks(HEAD_ROWS).enumerate() {
            device.gather_rows(&work.x, hidden, rows, &mut work.head_x)?;
            device.gather_rows(&work.delta, hidden, rows, &mut work.head_delta)?;
            device.add_rms_norm(
                &mut work.head_x,
                &work.head_delta,
                &self.weights.norm,
                eps,
                rows.len(),
                &mut work.head_normed,
            )?;
            device.linear(
                &work.head_normed,
                rows.len(),
                &mut [Projection { weight: self.weights.head(), bias: None, out: &mut work.logits }],
            )?;
            self.share.put_logits(device, &work.logits, (index * HEAD_ROWS, rows.len()), vocab, out)?;
        }
        Ok(())
    }

    /// The residual stream with the last block's output.
    fn residual(&self, rows: usize, work: &Workspace) -> Result<Vec<f32>, ModelError> {
        let mut x = vec![0.0; rows * self.config.hidden];
        let mut delta = x.clone();
        self.device.read(&work.x, 0, &mut x)?;
        self.device.read(&work.delta, 0, &mut delta)?;
        x.iter_mut().zip(&delta).for_each(|(x, delta)| *x += delta);
        Ok(x)
    }
}

fn projection<'a>(linear: &'a Linear, out: &'a mut Buf) -> Projection<'a> {
    Projection { weight: &linear.weight, bias: linear.bias.as_ref(), out }
}

impl Model for DenseModel {
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
        self.run(batch, pool, hooks, logits, None)
    }
}

/// The rows of a pass.
#[derive(Clone, Copy)]
struct Rows<'a> {
    /// Of the rows that this rank computes.
    plan: &'a Plan,
    /// Of the rows of all ranks, where others compute some of them.
    all: Option<&'a Plan>,
    dealt: &'a Dealt<'a>,
}

/// What a rank computes of a batch.
struct Input<'a> {
    /// Token ids of all rows.
    ids: &'a [u32],
    spans: Vec<SeqSpan<'a>>,
    /// Rows that want logits, ascending.
    wanted: Vec<u32>,
    /// The same rows as parts of their sequences.
    wanted_spans: Vec<SeqSpan<'a>>,
}

/// Checks a batch's rules.
fn check<'a>(batch: &Batch<'a>, pool: &KvSpec, spec: &ModelSpec) -> Result<Step<'a>, ModelError> {
    let kv = spec.one_pool().map_err(ModelError::Batch)?;
    if *pool != kv.pool(pool.dtype, pool.page_tokens, pool.pages) {
        return Err(ModelError::Batch(format!(
            "the pool holds {} layers of {} heads of {} and {} elements, the model {} layers of {} heads of {} and {}",
            pool.layers,
            pool.kv_heads,
            pool.head_dim_k,
            pool.head_dim_v,
            kv.layers,
            kv.kv_heads,
            kv.head_dim_k,
            kv.head_dim_v
        )));
    }
    let seqs: Vec<PooledChunk<'a>> = batch.seqs.iter().map(|seq| PooledChunk::from(*seq)).collect();
    Step::check(&seqs, &Rules { spec, page_tokens: pool.page_tokens, pools: None, window: 0 })
}

fn span<'a>(chunk: &PooledChunk<'a>) -> SeqSpan<'a> {
    SeqSpan { start: chunk.start, len: chunk.tokens.len() as u32, pages: chunk.pages }
}

fn spans<'a>(step: &Step<'a>) -> Vec<SeqSpan<'a>> {
    step.seqs.iter().map(|seq| span(&seq.chunk)).collect()
}

impl<'a> Input<'a> {
    fn of(dealt: &'a Dealt<'a>) -> Self {
        let step = dealt.own();
        let wanted_span = |chunk: &PooledChunk<'a>| {
            let whole = span(chunk);
            match chunk.logits {
                Want::None => None,
                Want::Last => Some(SeqSpan { start: whole.start + whole.len - 1, len: 1, ..whole }),
                Want::All => Some(whole),
            }
        };
        Self {
            ids: &step.ids,
            wanted: step.wanted.clone(),
            spans: spans(step),
            wanted_spans: step.seqs.iter().filter_map(|seq| wanted_span(&seq.chunk)).collect(),
        }
    }
}
