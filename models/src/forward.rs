//! The face of a model: batches of chunks in, rows of logits out.

use kvdock_kernels::KvPool;

use crate::logits::Logits;
use crate::pools::{PoolMemory, PoolSet, StateSave};
use crate::{ModelError, ModelSpec};

/// Which positions of a chunk want logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// None: the chunk only fills the cache.
    None,
    /// The last position of the chunk: one row.
    Last,
    /// Every position of the chunk: one row each.
    All,
}

/// The next tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct SeqChunk<'a> {
    /// Token ids, at least one, each below the vocabulary size.
    pub tokens: &'a [u32],
    /// Absolute position of `tokens[0]`. Positions `0..start` must already be in the pool.
    pub start: u32,
    /// Page table of the sequence: `pages[i]` holds the positions `i * page_tokens ..`. It must
    /// cover `start + tokens.len()` positions. Pages that this chunk writes belong to no other
    /// chunk of the batch; pages wholly below `start` may be shared.
    pub pages: &'a [u32],
    /// Which positions want logits.
    pub logits: Want,
}

/// One step of the engine: chunks of many sequences, of any lengths.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// The chunks, each of a different sequence.
    pub seqs: &'a [SeqChunk<'a>],
}

/// The next tokens of one sequence, for a model that runs over several pools.
#[derive(Debug, Clone, Copy)]
pub struct PooledChunk<'a> {
    /// As in [`SeqChunk`].
    pub tokens: &'a [u32],
    /// As in [`SeqChunk`]; what the pools' hit policies ask for must be there for it.
    pub start: u32,
    /// As in [`SeqChunk`].
    pub logits: Want,
    /// Page table of the pools addressed by [`crate::PageSource::Anchor`], as in [`SeqChunk`].
    pub pages: &'a [u32],
    /// Page table of the pools addressed by [`crate::PageSource::Window`], of the same page size. Pages that no token
    /// of this chunk sees may be [`crate::NO_PAGE`]. Empty where the model has no such pool.
    pub window: &'a [u32],
    /// The sequence's own slot, where the model has pools of slots. A chunk that starts at 0 clears it first.
    pub slot: Option<u32>,
    /// Which states on the way are kept.
    pub save: &'a [StateSave],
}

impl<'a> From<SeqChunk<'a>> for PooledChunk<'a> {
    /// The chunk for a model whose pools are all addressed by the table of all tokens.
    fn from(seq: SeqChunk<'a>) -> Self {
        let SeqChunk { tokens, start, pages, logits } = seq;
        Self { tokens, start, logits, pages, window: &[], slot: None, save: &[] }
    }
}

/// As [`Batch`], over several pools.
#[derive(Debug, Clone, Copy)]
pub struct PooledBatch<'a> {
    /// The chunks, each of a different sequence.
    pub seqs: &'a [PooledChunk<'a>],
}

/// What [`Model::forward_draft`] needs beside the main pass.
pub struct DraftPass<'a> {
    /// For each row of the batch the token that follows it.
    pub next: &'a [u32],
    /// The pools that [`ModelSpec::draft_pools`] declares, addressed by the same page tables.
    pub pools: &'a PoolSet,
    /// Takes the draft's rows: of the same rows that want logits, for the token after the next.
    pub logits: &'a mut Logits,
}

/// Called by a forward pass between layers, on the thread that runs it. With several ranks, each of them calls from a thread of its own.
pub trait LayerHooks: Sync {
    /// Before `layer` reads or writes the KV pool. It may wait, for example until the pages of
    /// that layer have arrived; an error stops the pass, and the pages of its chunks are then
    /// undefined from `start` on.
    fn before_layer(&self, layer: usize) -> Result<(), ModelError> {
        let _ = layer;
        Ok(())
    }

    /// As [`LayerHooks::before_layer`], of one of several ranks and its pools.
    ///
    /// # Errors
    /// As [`LayerHooks::before_layer`]; the pass then stops on all ranks.
    fn before_layer_of(&self, rank: usize, layer: usize) -> Result<(), ModelError> {
        let _ = rank;
        self.before_layer(layer)
    }
}

/// Hooks that do nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoHooks;

impl LayerHooks for NoHooks {}

/// A model that is ready to run.
pub trait Model: Send + Sync {
    /// What the model is.
    fn spec(&self) -> &ModelSpec;

    /// Runs `batch`: writes K and V of every chunk into its pages of `pool`, attends over positions
    /// `0..start + len`, and puts the wanted rows into `logits`.
    ///
    /// The values of a row depend on the tokens of its sequence alone: on a CPU device they are
    /// the same bit for bit however the sequence was cut into chunks, whatever else was in the
    /// batch, and wherever its pages lie. New K and V are rounded to the pool's type before
    /// anything attends to them.
    ///
    /// Several passes may run at the same time when no page is written by one of them and used by another.
    ///
    /// # Errors
    /// A batch that breaks a rule of [`SeqChunk`], a pool of another geometry, a hook or a kernel
    /// that failed. The pages of the chunks are then undefined from `start` on.
    fn forward(
        &self,
        batch: &Batch<'_>,
        pool: &dyn KvPool,
        hooks: &dyn LayerHooks,
        logits: &mut Logits,
    ) -> Result<(), ModelError>;

    /// As [`Model::forward`], over the pools that [`ModelSpec::pools`] declares. `before_layer` of the hooks is called
    /// before any pool's buffer of that layer is read or written.
    ///
    /// # Errors
    /// As [`Model::forward`]; pools that are not those of the declaration.
    fn forward_pools(
        &self,
        batch: &PooledBatch<'_>,
        pools: &PoolSet,
        hooks: &dyn LayerHooks,
        logits: &mut Logits,
    ) -> Result<(), ModelError> {
        let (true, Some(PoolMemory::Heads(pool))) = (self.spec().pools == pools.decls(), pools.memory(0)) else {
            return Err(ModelError::Batch("the pools are not those that the model declares".to_owned()));
        };
        let seqs: Vec<SeqChunk<'_>> = batch
            .seqs
            .iter()
            .map(|seq| SeqChunk { tokens: seq.tokens, start: seq.start, pages: seq.pages, logits: seq.logits })
            .collect();
        self.forward(&Batch { seqs: &seqs }, pool.as_ref(), hooks, logits)
    }

    /// As [`Model::forward_pools`], and the layer that predicts the token after the next runs on what comes out.
    ///
    /// # Errors
    /// As [`Model::forward_pools`]; a model without such a layer.
    fn forward_draft(
        &self,
        batch: &PooledBatch<'_>,
        pools: &PoolSet,
        draft: DraftPass<'_>,
        logits: &mut Logits,
    ) -> Result<(), ModelError> {
        let _ = (batch, pools, draft, logits);
        Err(ModelError::Batch("this model has no layer that predicts further tokens".to_owned()))
    }
}
