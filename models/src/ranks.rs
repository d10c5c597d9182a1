//! A model that several ranks compute together.
//!
//! Each rank is a model of its own over its share of the weights, with pools of its own, on a thread and a device of its own. A pass runs on
//! all of them at once; where it needs what others have computed, they meet in a [`kvdock_kernels::Collective`]: tensor-parallel ranks have
//! different shares and compute the same rows, context-parallel ranks have the same share and compute different rows. A rank that fails or panics
//! ends the pass on all.

mod workers;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use kvdock_kernels::{InProcess, KvPool, RankGroup};

use crate::families::blocks::context::parts;
use crate::families::blocks::share::Share;
use crate::{Batch, DraftPass, LayerHooks, Logits, Model, ModelError, ModelSpec, PoolSet, PooledBatch};
use workers::Workers;

/// Ranks behind the face of one model.
pub(crate) struct RankedModel {
    spec: ModelSpec,
    /// Those with the first part of the rows, in order of their shares, then those with the next part.
    ranks: Vec<Arc<dyn Model>>,
    groups: Groups,
    /// One pass at a time: its operations follow each other in the group. With the rows of logits that nobody reads.
    turn: Mutex<Turn>,
}

/// Which ranks meet each other.
pub(crate) struct Groups {
    /// Ranks with the same rows, one group a part of the rows.
    shares: Vec<Arc<RankGroup>>,
    /// Ranks with the same share, one group a share.
    rows: Vec<Arc<RankGroup>>,
}

impl Groups {
    /// The groups of `context` parts of the rows times `shares` shares.
    pub(crate) fn new(shares: usize, context: usize) -> Self {
        let groups = |count: usize, size: usize| (0..count).map(|_| RankGroup::new(size)).collect();
        Self { shares: groups(context, shares), rows: groups(shares, context) }
    }

    /// The ranks' places in their groups, in order of the ranks.
    pub(crate) fn places(&self) -> Vec<Share> {
        let rows: Vec<_> = self.rows.iter().map(InProcess::ranks).collect();
        let part = |(part, group): (usize, &Arc<RankGroup>)| {
            let shares = InProcess::ranks(group).into_iter().zip(&rows);
            shares.map(|(share, rows)| Share::new(share).within(Arc::clone(&rows[part]))).collect::<Vec<_>>()
        };
        self.shares.iter().enumerate().flat_map(part).collect()
    }

    fn all(&self) -> impl Iterator<Item = &Arc<RankGroup>> {
        self.shares.iter().chain(&self.rows)
    }

    /// As [`RankGroup::fail`], of all.
    fn fail(&self, reason: &str) {
        self.all().for_each(|group| group.fail(reason));
    }

    /// As [`RankGroup::reset`], of all.
    fn reset(&self) {
        self.all().for_each(|group| group.reset());
    }
}

struct Turn {
    workers: Workers,
    /// Of every rank: main and draft.
    logits: Vec<(Logits, Logits)>,
}

impl RankedModel {
    /// Puts `ranks`, which are connected by `groups`, together. `spec` is that of any of them.
    ///
    /// # Errors
    /// When the threads can't be started.
    pub(crate) fn new(spec: ModelSpec, ranks: Vec<Arc<dyn Model>>, groups: Groups) -> std::io::Result<Self> {
        let workers = Workers::start(ranks.len())?;
        let logits = ranks.iter().map(|_| Default::default()).collect();
        // The one pool that a rank could do with is not the one of all.
        let spec = ModelSpec { kv: None, ranks: ranks.len(), context_ranks: groups.shares.len(), ..spec };
        Ok(Self { spec, ranks, groups, turn: Mutex::new(Turn { workers, logits }) })
    }

    /// Runs `pass` as every rank, over `batch`. Gives the logits of the ranks that have the model's, one part of the rows after the other.
    fn run(
        &self,
        batch: &PooledBatch<'_>,
        pools: &PoolSet,
        pass: impl Fn(usize, &dyn Model, &mut (Logits, Logits)) -> Result<(), ModelError> + Sync,
        take: impl FnOnce(&mut [&mut (Logits, Logits)]),
    ) -> Result<(), ModelError> {
        if pools.rank_count() != self.ranks.len() {
            let (found, ranks) = (pools.rank_count(), self.ranks.len());
            return Err(ModelError::Batch(format!("pools of {found} ranks for a model of {ranks}")));
        }
        let mut turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let Turn { workers, logits } = &mut *turn;
        self.groups.reset();
        type Outcome = Option<Result<(), ModelError>>;
        let places: Vec<Mutex<(&mut (Logits, Logits), Outcome)>> =
            logits.iter_mut().map(|logits| Mutex::new((logits, None))).collect();
        workers.run(&|rank| {
            let mut place = places[rank].lock().unwrap_or_else(PoisonError::into_inner);
            let (logits, outcome) = &mut *place;
            let result = catch_unwind(AssertUnwindSafe(|| pass(rank, self.ranks[rank].as_ref(), logits)))
                .unwrap_or_else(|panic| Err(ModelError::Batch(format!("rank {rank} panicked: {}", text(&*panic)))));
            if let Err(error) = &result {
                self.groups.fail(&format!("rank {rank}: {error}"));
            }
            *outcome = Some(result);
        });
        let mut failures = Vec::new();
        for (rank, place) in places.into_iter().enumerate() {
            match place.into_inner().unwrap_or_else(PoisonError::into_inner).1 {
                Some(Ok(())) => {}
                Some(Err(error)) => failures.push(error),
                None => failures.push(ModelError::Batch(format!("rank {rank} did not run"))),
            }
        }
        // What a rank says that stopped because of another one is not the cause.
        let consequence = |error: &ModelError| matches!(error, ModelError::Kernel(kvdock_kernels::KernelError::Device { reason, .. }) if reason.starts_with("rank "));
        failures.sort_by_key(consequence);
        if let Some(error) = failures.into_iter().next() {
            return Err(error);
        }
        // Tensor-parallel ranks have the same logits. Context-parallel ones have those of their rows, or each has all where there are few.
        let rows = batch.seqs.iter().map(|seq| seq.tokens.len()).sum();
        let parts = if parts(rows, self.spec.context_ranks).is_some() { self.spec.context_ranks } else { 1 };
        let shares = self.groups.rows.len().max(1);
        let mut told: Vec<_> = logits.iter_mut().step_by(shares).take(parts).collect();
        take(&mut told);
        Ok(())
    }
}

/// Puts the rows of `parts` one after the other into `whole`.
fn together<'a>(whole: &mut Logits, mut parts: impl Iterator<Item = &'a mut Logits>) {
    if let Some(first) = parts.next() {
        std::mem::swap(first, whole);
    }
    parts.for_each(|part| whole.append(part));
}

fn text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".to_owned())
}

impl Model for RankedModel {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn forward(&self, _: &Batch<'_>, _: &dyn KvPool, _: &dyn LayerHooks, _: &mut Logits) -> Result<(), ModelError> {
        let ranks = self.ranks.len();
        Err(ModelError::Batch(format!("a model of {ranks} ranks needs pools for each of them")))
    }

    fn forward_pools(
        &self,
        batch: &PooledBatch<'_>,
        pools: &PoolSet,
        hooks: &dyn LayerHooks,
        logits: &mut Logits,
    ) -> Result<(), ModelError> {
        self.run(
            batch,
            pools,
            |rank, model, (own, _)| {
                let hooks = OfRank { rank, hooks };
                model.forward_pools(batch, pools.rank(rank)?, &hooks, own)
            },
            |parts| together(logits, parts.iter_mut().map(|(main, _)| main)),
        )
    }

    fn forward_draft(
        &self,
        batch: &PooledBatch<'_>,
        pools: &PoolSet,
        draft: DraftPass<'_>,
        logits: &mut Logits,
    ) -> Result<(), ModelError> {
        let DraftPass { next, pools: draft_pools, logits: draft_logits } = draft;
        self.run(
            batch,
            pools,
            |rank, model, (own, drafted)| {
                let draft = DraftPass { next, pools: draft_pools.rank(rank)?, logits: drafted };
                model.forward_draft(batch, pools.rank(rank)?, draft, own)
            },
            |parts| {
                together(logits, parts.iter_mut().map(|(main, _)| main));
                together(draft_logits, parts.iter_mut().map(|(_, drafted)| drafted));
            },
        )
    }
}

/// The hooks of the whole model, called by one of its ranks.
struct OfRank<'a> {
    rank: usize,
    hooks: &'a dyn LayerHooks,
}

impl LayerHooks for OfRank<'_> {
    fn before_layer(&self, layer: usize) -> Result<(), ModelError> {
        self.hooks.before_layer_of(self.rank, layer)
    }
}
