//! The forward pass.

use std::cell::OnceCell;
use std::sync::Arc;

use kvdock_kernels::ops::Picks;
use kvdock_kernels::{Buf, Device, KvPool, Plan, Weight};

use super::delta::DeltaNet;
use super::gqa::Heads;
use super::mla::Latent;
use crate::families::blocks::context::Dealt;
use crate::families::blocks::moe::{Mlp, Moe};
use crate::families::blocks::replay::Streams;
use crate::families::blocks::rows::{Placement, Positions, Reach};
use crate::families::blocks::share::Share;
use crate::families::blocks::step::{Head, Rules, Step, check_pools};
use crate::{
    Batch, KvGeometry, LayerHooks, Logits, Model, ModelError, ModelSpec, NoHooks, PageSource, PoolMemory, PoolSet,
    PooledBatch, PooledChunk,
};

/// How a layer mixes tokens.
pub(super) enum Mixer {
    Heads(Box<Heads>),
    Delta(Box<DeltaNet>),
    Latent(Box<Latent>),
}

/// How a layer feeds forward.
pub(super) enum FeedForward {
    Mlp(Box<Mlp>),
    Moe(Box<Moe>),
}

macro_rules! boxed {
    ($part:ident into $whole:ident::$variant:ident) => {
        impl From<$part> for $whole {
            fn from(part: $part) -> Self {
                $whole::$variant(Box::new(part))
            }
        }
    };
}
boxed!(Heads into Mixer::Heads);
boxed!(DeltaNet into Mixer::Delta);
boxed!(Latent into Mixer::Latent);
boxed!(Mlp into FeedForward::Mlp);
boxed!(Moe into FeedForward::Moe);

pub(super) struct Layer {
    pub(super) mixer_norm: Buf,
    pub(super) mixer: Mixer,
    pub(super) ffn_norm: Buf,
    pub(super) ffn: FeedForward,
}

/// Where a layer's rows lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// The pool's index in the declaration.
    pub(super) pool: usize,
    /// The buffer within that pool.
    pub(super) buffer: usize,
    /// The buffer when there is one pool for all layers.
    pub(super) alone: usize,
}

/// A model all but its [`ModelSpec`].
pub(super) struct Net {
    pub(super) embedding: Weight,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Buf,
    /// `None`: the embedding.
    pub(super) head: Option<Weight>,
    pub(super) eps: f32,
    /// Tokens before a chunk whose window pages must be there.
    pub(super) window: usize,
}

/// A decoder on its device.
pub(super) struct Decoder {
    pub(super) spec: ModelSpec,
    pub(super) net: Net,
    pub(super) device: Arc<dyn Device>,
    pub(super) share: Share,
    pub(super) streams: Streams,
}

#[derive(Clone, Copy)]
enum Memory<'a> {
    One(&'a dyn KvPool),
    Many(&'a PoolSet),
}

/// What the blocks of one pass share.
pub(super) struct Pass<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) dealt: &'a Dealt<'a>,
    /// The rows that this rank computes.
    pub(super) step: &'a Step<'a>,
    memory: Memory<'a>,
    /// A plan for each pool of heads, by the pool's index.
    plans: Vec<Option<Plan>>,
    /// The same for the rows of all ranks, where others compute some of them.
    all_plans: Option<Vec<Option<Plan>>>,
    pub(super) positions: Positions<'a>,
    /// Rows of pools with a row a token.
    tokens: OnceCell<Placement>,
    /// What the last indexer has picked for each row; `None` for all that it sees.
    pub(super) picked: Option<Picks>,
}

impl<'a> Pass<'a> {
    pub(super) fn rows(&self) -> usize {
        self.step.rows()
    }

    /// The pool of heads that a layer's rows lie in, and the buffer.
    pub(super) fn heads(&self, place: Place) -> Result<(&'a dyn KvPool, usize, &Plan), ModelError> {
        self.heads_by(place, &self.plans)
    }

    fn heads_by<'p>(
        &self,
        place: Place,
        plans: &'p [Option<Plan>],
    ) -> Result<(&'a dyn KvPool, usize, &'p Plan), ModelError> {
        let (pool, buffer, plan) = match &self.memory {
            Memory::One(pool) => (*pool, place.alone, 0),
            Memory::Many(set) => (set.heads(place.pool)?, place.buffer, place.pool),
        };
        match plans.get(plan) {
            Some(Some(plan)) => Ok((pool, buffer, plan)),
            _ => Err(ModelError::Batch(format!("pool {plan} has no plan"))),
        }
    }

    /// Whether no other rank computes some of the step's rows.
    pub(super) fn computes_all_rows(&self) -> bool {
        self.all_plans.is_none()
    }

    /// Writes keys and values, of which `k` and `v` have the rank's own rows, each of so many elements.
    pub(super) fn write_heads(
        &self,
        place: Place,
        (k, k_width): (Buf, usize),
        v: (Buf, usize),
    ) -> Result<(), ModelError> {
        let plans = self.all_plans.as_deref().unwrap_or(&self.plans);
        let (pool, buffer, plan) = self.heads_by(place, plans)?;
        let k = self.dealt.gather(self.device, k, k_width)?;
        let v = self.dealt.gather(self.device, v.0, v.1)?;
        Ok(self.device.kv_write(pool, buffer, plan, &k, &v)?)
    }

    /// Where the step's rows lie in pools with a row a token, and what they see.
    pub(super) fn tokens(&self) -> Result<&Placement, ModelError> {
        if let Some(made) = self.tokens.get() {
            return Ok(made);
        }
        let reach = Reach { source: PageSource::Anchor, tokens: 1, window: None };
        let made = Placement::new(self.device, self.dealt, self.pools()?, reach)?;
        Ok(self.tokens.get_or_init(|| made))
    }

    /// All pools.
    pub(super) fn pools(&self) -> Result<&'a PoolSet, ModelError> {
        match &self.memory {
            Memory::Many(set) => Ok(set),
            Memory::One(_) => Err(ModelError::Batch("this model needs all of its pools".to_owned())),
        }
    }

    fn plan(device: &dyn Device, step: &Step<'_>, memory: &Memory<'_>) -> Result<Vec<Option<Plan>>, ModelError> {
        let mut tables = Vec::new();
        match memory {
            Memory::One(pool) => Ok(vec![Some(device.plan(*pool, &step.spans(PageSource::Anchor, &mut tables))?)]),
            Memory::Many(set) => (0..set.decls().len())
                .map(|index| match set.memory(index) {
                    Some(PoolMemory::Heads(pool)) => {
                        let spans = step.spans(set.decls()[index].source, &mut tables);
                        Ok(Some(device.plan(pool.as_ref(), &spans)?))
                    }
                    _ => Ok(None),
                })
                .collect(),
        }
    }
}

impl Decoder {
    fn run(
        &self,
        batch: &PooledBatch<'_>,
        memory: Memory<'_>,
        hooks: &dyn LayerHooks,
        logits: &mut Logits,
    ) -> Result<(), ModelError> {
        let (page_tokens, pools) = match &memory {
            Memory::One(pool) => (pool.spec().page_tokens, None),
            Memory::Many(set) => (set.sizes().page_tokens, Some(*set)),
        };
        let rules = Rules { spec: &self.spec, page_tokens, pools, window: self.net.window };
        let dealt = Dealt::new(&self.share, Step::check(batch.seqs, &rules)?);
        let step = dealt.own();
        let mut out = self.share.target(&self.device, step.wanted.len(), self.spec.vocab_size, logits)?;
        if step.ids.is_empty() {
            return Ok(());
        }
        let device = self.device.as_ref();
        let (hidden, count) = (self.spec.hidden, self.net.layers.len());
        let mut repeated = |x: &mut Buf| self.layers(&dealt, memory, &NoHooks, x);
        let kept = self.streams.decode(device, (&self.share, &dealt), hidden, (count, hooks), &mut repeated)?;
        let once = match &kept {
            Some(_) => None,
            None => {
                let mut x = device.scratch(step.rows() * hidden)?;
                self.layers(&dealt, memory, hooks, &mut x)?;
                Some(x)
            }
        };
        let weight = self.net.head.as_ref().unwrap_or(&self.net.embedding);
        let (vocab, eps) = (self.spec.vocab_size, self.net.eps);
        let head = Head { norm: &self.net.norm, weight, vocab, eps, share: &self.share };
        if let Some(x) = kept.as_ref().map(|kept| &kept.stream).or(once.as_ref()) {
            head.logits(device, x, &step.wanted, &mut out)?;
        }
        kept.into_iter().for_each(|kept| self.streams.give_back(kept));
        Ok(())
    }

    /// All layers, from the embedding on: the residual stream of the step's rows, into `x`.
    fn layers(
        &self,
        dealt: &Dealt<'_>,
        memory: Memory<'_>,
        hooks: &dyn LayerHooks,
        x: &mut Buf,
    ) -> Result<(), ModelError> {
        let (device, step) = (self.device.as_ref(), dealt.own());
        let rows = step.rows();
        let plans = Pass::plan(device, step, &memory)?;
        let all_plans = dealt.is_dealt().then(|| Pass::plan(device, dealt.whole(), &memory)).transpose()?;
        let positions = Positions::new(device, step);
        let (tokens, picked) = (OnceCell::new(), None);
        let mut pass = Pass { device, dealt, step, memory, plans, all_plans, positions, tokens, picked };
        let (hidden, eps) = (self.spec.hidden, self.net.eps);
        let mut normed = device.scratch(rows * hidden)?;
        self.share.embed(device, &self.net.embedding, self.spec.vocab_size, &step.ids, x)?;
        for (index, layer) in self.net.layers.iter().enumerate() {
            hooks.before_layer(index)?;
            device.rms_norm(x, &layer.mixer_norm, eps, rows, &mut normed)?;
            let mut mixed = match &layer.mixer {
                Mixer::Heads(heads) => heads.apply(&pass, &normed)?,
                Mixer::Delta(delta) => delta.apply(&pass, &normed)?,
                Mixer::Latent(latent) => latent.apply(&mut pass, &normed)?,
            };
            self.share.sum(device, &mut mixed, rows * hidden)?;
            device.add_rms_norm(x, &mixed, &layer.ffn_norm, eps, rows, &mut normed)?;
            let mut fed = match &layer.ffn {
                FeedForward::Mlp(mlp) => mlp.apply(device, &normed, rows)?,
                FeedForward::Moe(moe) => moe.apply(device, &normed, rows, &step.ids)?,
            };
            self.share.sum(device, &mut fed, rows * hidden)?;
            device.add(x, &fed, rows * hidden)?;
        }
        Ok(())
    }

    fn check_pool(&self, pool: &dyn KvPool, kv: KvGeometry) -> Result<(), ModelError> {
        let spec = pool.spec();
        if *spec == kv.pool(spec.dtype, spec.page_tokens, spec.pages) {
            return Ok(());
        }
        Err(ModelError::Batch(format!("the pool's shape is {spec:?}, the model's {kv:?}")))
    }
}

impl Model for Decoder {
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
        let kv = self.spec.one_pool().map_err(ModelError::Batch)?;
        self.check_pool(pool, kv)?;
        let seqs: Vec<PooledChunk<'_>> = batch.seqs.iter().map(|seq| PooledChunk::from(*seq)).collect();
        self.run(&PooledBatch { seqs: &seqs }, Memory::One(pool), hooks, logits)
    }

    fn forward_pools(
        &self,
        batch: &PooledBatch<'_>,
        pools: &PoolSet,
        hooks: &dyn LayerHooks,
        logits: &mut Logits,
    ) -> Result<(), ModelError> {
        check_pools(&self.spec.pools, pools)?;
        self.run(batch, Memory::Many(pools), hooks, logits)
    }
}
