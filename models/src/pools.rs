//! The pools that a model keeps its cache in: what it declares, and their memory.
//!
//! A dense decoder has one pool of keys and values. Others have several, which a cache must hold together: a prefix
//! counts only as far as every pool can bring it back. A model declares each pool with a [`PoolDecl`]: what a page of
//! it holds, for which layers, where its page numbers come from, and what a hit needs of it ([`HitPolicy`]). The
//! engine decides which pages hold what; [`PoolSet`] is the memory, and [`crate::Model::forward_pools`] runs over it.
//!
//! There are three sources of page numbers ([`PageSource`]). All pools with the same source are addressed alike, so a
//! cache keeps one page table a source: page `i` of a sequence holds positions `i * page_tokens ..`, whether as rows
//! for each token, as rows for several tokens each, or as a ring of state that belongs to the page. Slots are single:
//! one for a request that runs, one for each saved state.

use std::sync::Arc;

use kvdock_kernels::{Device, KvDtype, KvPool, PACKED_SCALES, PagePool, PageSpec};

use crate::{KvGeometry, ModelError};

/// Stands in a window page table for a page that was freed, because no later token sees it.
pub const NO_PAGE: u32 = u32::MAX;

/// What a pool is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PoolKind {
    /// Owns page numbers that other pools are addressed by, and has no buffer.
    LogicalAnchor,
    /// Keys and values (or latents) of every token.
    FullKv,
    /// Keys and values of the last tokens of a sequence.
    Window,
    /// One row for every `ratio` tokens.
    CompressedKv {
        /// Tokens of a row.
        ratio: usize,
    },
    /// Keys that an indexer picks tokens (`ratio` 1) or compressed rows by.
    IndexKeys {
        /// Tokens of a key.
        ratio: usize,
    },
    /// What a compressor keeps of the last tokens of a page.
    StateRing,
    /// A summary of all tokens before; it can be neither cut nor extended without computing.
    Recurrent,
    /// What only a running request needs; at a page's end nothing of it is needed any more.
    RequestState,
}

/// Where the page numbers of a pool come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PageSource {
    /// The page table of all tokens.
    Anchor,
    /// The page table whose pages are freed once no token sees them any more.
    Window,
    /// One slot a request, and one for every saved state.
    Slot,
}

/// What a hit that ends at a page's end, L tokens long, needs of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HitPolicy {
    /// All pages of the L tokens.
    AllPages,
    /// The pages that hold the last `tokens` of them.
    Trailing {
        /// Tokens before L that later ones see.
        tokens: usize,
    },
    /// A state that was saved at exactly L.
    ExactState,
    /// Nothing.
    Nothing,
}

impl HitPolicy {
    /// How many pages before the end of a hit of `tokens` tokens must be there.
    pub fn pages(self, tokens: usize, page_tokens: usize) -> usize {
        let all = tokens.div_ceil(page_tokens);
        match self {
            Self::AllPages => all,
            Self::Trailing { tokens } => tokens.div_ceil(page_tokens).min(all),
            Self::ExactState => usize::from(tokens > 0),
            Self::Nothing => 0,
        }
    }
}

/// What a page of one layer consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PoolLayout {
    /// No buffer.
    None,
    /// Heads of keys and values for each token, in the cache's element type, as [`KvPool`] keeps them.
    Heads {
        /// KV heads.
        kv_heads: usize,
        /// Elements of a key.
        head_dim_k: usize,
        /// Elements of a value.
        head_dim_v: usize,
    },
    /// A row for every `tokens` tokens, in the cache's element type.
    Rows {
        /// Tokens of a row.
        tokens: usize,
        /// Elements of a row.
        elements: usize,
    },
    /// A row for every `tokens` tokens, as [`kvdock_kernels::pack_row`] packs it: first all rows' bytes, then all rows'
    /// scales, then zeros up to a multiple of a row's bytes.
    PackedRows {
        /// Tokens of a row.
        tokens: usize,
        /// Elements of a row.
        elements: usize,
        /// Elements at its end that are kept in bf16.
        rope: usize,
    },
    /// A key for every `tokens` tokens, as [`kvdock_kernels::pack_key`] packs it: first all keys, then all scales.
    PackedKeys {
        /// Tokens of a key.
        tokens: usize,
        /// Elements of a key.
        elements: usize,
    },
    /// `rows` rows of f32 for each page, whatever its tokens: position p is in row `p % rows`.
    Ring {
        /// Rows of the ring.
        rows: usize,
        /// Elements of a row.
        elements: usize,
    },
    /// `elements` f32 for each slot.
    Slot {
        /// Elements of the state.
        elements: usize,
    },
}

/// A pool that a model declares.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PoolDecl {
    /// Its name, also in the keys of storage: `kv`, `swa`, `indexer`, `mamba`, `deepseek_v4_c4`, ...
    pub name: &'static str,
    /// What it is for.
    pub kind: PoolKind,
    /// Where its page numbers come from.
    pub source: PageSource,
    /// What a hit needs of it.
    pub hit: HitPolicy,
    /// The model's layers that have a buffer, ascending: buffer `i` belongs to layer `layers[i]`.
    pub layers: Vec<usize>,
    /// What a page consists of.
    pub layout: PoolLayout,
    /// What the bytes mean beyond the layout, where that could be otherwise. Part of a saved page's identity.
    pub encoding: &'static str,
}

impl PoolDecl {
    /// Whether it has a buffer. Registering one without skips what is about buffers and layouts.
    pub fn has_buffer(&self) -> bool {
        self.layout != PoolLayout::None
    }

    /// Whether all tensor-parallel ranks of a model hold the same bytes of it. Heads and states of heads are dealt out to them (and where
    /// several share a KV head, each has it to itself); what all heads read, latents, index keys and what compressors make, each rank has whole.
    pub fn replicated(&self) -> bool {
        !matches!(self.layout, PoolLayout::Heads { .. }) && self.kind != PoolKind::Recurrent
    }

    /// Units of a page of `page_tokens` tokens: tokens, rows, or 1 for a slot.
    pub fn page_units(&self, page_tokens: usize) -> usize {
        match self.layout {
            PoolLayout::None => 0,
            PoolLayout::Heads { .. } => page_tokens,
            PoolLayout::Rows { tokens, .. }
            | PoolLayout::PackedRows { tokens, .. }
            | PoolLayout::PackedKeys { tokens, .. } => page_tokens / tokens.max(1),
            PoolLayout::Ring { rows, .. } => rows,
            PoolLayout::Slot { .. } => 1,
        }
    }

    /// Bytes of a unit in one layer, in a cache of element type `dtype`.
    pub fn unit_bytes(&self, dtype: KvDtype) -> usize {
        match self.layout {
            PoolLayout::None => 0,
            PoolLayout::Heads { kv_heads, head_dim_k, head_dim_v } => {
                kv_heads * (head_dim_k + head_dim_v) * dtype.bytes()
            }
            PoolLayout::Rows { elements, .. } => elements * dtype.bytes(),
            PoolLayout::PackedRows { elements, rope, .. } => elements + rope + PACKED_SCALES,
            PoolLayout::PackedKeys { elements, .. } => elements + size_of::<f32>(),
            PoolLayout::Ring { elements, .. } | PoolLayout::Slot { elements } => elements * size_of::<f32>(),
        }
    }

    /// Bytes of a page in one layer.
    pub fn page_bytes(&self, page_tokens: usize, dtype: KvDtype) -> usize {
        let bytes = self.page_units(page_tokens) * self.unit_bytes(dtype);
        match self.layout {
            PoolLayout::PackedRows { elements, rope, .. } => bytes.next_multiple_of(elements + rope),
            _ => bytes,
        }
    }

    /// What writer and reader of a saved page must agree on, as text to make a key of.
    pub fn identity(&self, page_tokens: usize, dtype: KvDtype) -> String {
        format!(
            "{} {:?} {:?} page={page_tokens} dtype={} layers={:?} {}",
            self.name,
            self.kind,
            self.layout,
            dtype.name(),
            self.layers,
            self.encoding
        )
    }
}

/// How much room the pools have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSizes {
    /// Tokens of a page; a multiple of [`crate::ModelSpec::page_multiple`].
    pub page_tokens: usize,
    /// Pages of the pools addressed by [`PageSource::Anchor`].
    pub anchor_pages: usize,
    /// Pages of the pools addressed by [`PageSource::Window`].
    pub window_pages: usize,
    /// Slots.
    pub slots: usize,
    /// Element type of rows and heads.
    pub dtype: KvDtype,
}

impl PoolSizes {
    /// Pages or slots of a pool.
    pub fn pages(&self, source: PageSource) -> usize {
        match source {
            PageSource::Anchor => self.anchor_pages,
            PageSource::Window => self.window_pages,
            PageSource::Slot => self.slots,
        }
    }
}

/// Memory of one pool.
#[derive(Clone)]
pub enum PoolMemory {
    /// A logical anchor has none.
    None,
    /// Heads of keys and values.
    Heads(Arc<dyn KvPool>),
    /// Pages of bytes.
    Pages(Arc<PagePool>),
}

/// The memory of a model's pools, in the order of its declarations.
pub struct PoolSet {
    decls: Vec<PoolDecl>,
    sizes: PoolSizes,
    memory: Vec<PoolMemory>,
    /// The same of the ranks after the first.
    further: Vec<PoolSet>,
}

impl PoolSet {
    /// Takes the memory for `decls`. Nothing is real before it is written.
    ///
    /// # Errors
    /// Pages that the layouts do not divide, sizes that do not fit in memory.
    pub fn allocate(device: &dyn Device, decls: &[PoolDecl], sizes: PoolSizes) -> Result<Self, ModelError> {
        let mut memory = Vec::with_capacity(decls.len());
        for decl in decls {
            let pages = sizes.pages(decl.source);
            memory.push(match decl.layout {
                PoolLayout::None => PoolMemory::None,
                PoolLayout::Heads { kv_heads, head_dim_k, head_dim_v } => {
                    let geometry = KvGeometry { layers: decl.layers.len(), kv_heads, head_dim_k, head_dim_v };
                    PoolMemory::Heads(device.alloc_kv_pool(geometry.pool(sizes.dtype, sizes.page_tokens, pages))?)
                }
                PoolLayout::Rows { tokens: per_unit, .. }
                | PoolLayout::PackedRows { tokens: per_unit, .. }
                | PoolLayout::PackedKeys { tokens: per_unit, .. }
                | PoolLayout::Ring { rows: per_unit, .. }
                    if !sizes.page_tokens.is_multiple_of(per_unit.max(1)) =>
                {
                    return Err(ModelError::Batch(format!(
                        "pool {}: a page of {} tokens is no multiple of {per_unit}",
                        decl.name, sizes.page_tokens
                    )));
                }
                _ => PoolMemory::Pages(Arc::new(device.alloc_page_pool(PageSpec {
                    layers: decl.layers.len(),
                    page_bytes: decl.page_bytes(sizes.page_tokens, sizes.dtype),
                    pages,
                })?)),
            });
        }
        Ok(Self { decls: decls.to_vec(), sizes, memory, further: Vec::new() })
    }

    /// As [`PoolSet::allocate`], for a model of several ranks: memory of each rank's pools on its device.
    ///
    /// # Errors
    /// As [`PoolSet::allocate`]; no device.
    pub fn allocate_ranks(
        devices: &[Arc<dyn Device>],
        decls: &[PoolDecl],
        sizes: PoolSizes,
    ) -> Result<Self, ModelError> {
        let mut ranks = devices.iter().map(|device| Self::allocate(device.as_ref(), decls, sizes));
        let first = ranks.next().ok_or_else(|| ModelError::Batch("pools on no device".to_owned()))??;
        Ok(Self { further: ranks.collect::<Result<_, _>>()?, ..first })
    }

    /// Ranks whose pools these are.
    pub fn rank_count(&self) -> usize {
        1 + self.further.len()
    }

    /// The pools of one rank. Those of the first are the set itself.
    ///
    /// # Errors
    /// A rank that is not there.
    pub fn rank(&self, rank: usize) -> Result<&PoolSet, ModelError> {
        let further = || rank.checked_sub(1).and_then(|index| self.further.get(index));
        let found = if rank == 0 { Some(self) } else { further() };
        found.ok_or_else(|| ModelError::Batch(format!("rank {rank} of the pools of {} ranks", self.rank_count())))
    }

    /// The declarations it was made for.
    pub fn decls(&self) -> &[PoolDecl] {
        &self.decls
    }

    /// Its room.
    pub fn sizes(&self) -> &PoolSizes {
        &self.sizes
    }

    /// Memory of the pool declared at `index`, of the first rank.
    pub fn memory(&self, index: usize) -> Option<&PoolMemory> {
        self.memory.get(index)
    }

    /// Memory of the pool called `name`, of the first rank.
    pub fn named(&self, name: &str) -> Option<&PoolMemory> {
        self.memory.get(self.decls.iter().position(|decl| decl.name == name)?)
    }

    /// Copies the state in slot `from` to slot `to`, in every pool of slots of every rank: a saved state is never computed on, so a
    /// request that resumes from one gets a copy.
    ///
    /// # Errors
    /// A slot that is not there.
    pub fn copy_slot(&self, from: u32, to: u32) -> Result<(), ModelError> {
        for (decl, memory) in self.decls.iter().zip(&self.memory) {
            if let (PageSource::Slot, PoolMemory::Pages(pool)) = (decl.source, memory) {
                pool.copy_page(from, to)?;
            }
        }
        self.further.iter().try_for_each(|rank| rank.copy_slot(from, to))
    }

    /// As [`PoolSet::copy_slot`], of one of the model's layers alone.
    ///
    /// # Errors
    /// A slot that is not there.
    pub fn copy_slot_layer(&self, from: u32, to: u32, layer: usize) -> Result<(), ModelError> {
        for (decl, memory) in self.decls.iter().zip(&self.memory) {
            if let (PageSource::Slot, PoolMemory::Pages(pool)) = (decl.source, memory)
                && let Some(buffer) = decl.layers.iter().position(|&of| of == layer)
            {
                pool.copy_page_layer(from, to, buffer)?;
            }
        }
        self.further.iter().try_for_each(|rank| rank.copy_slot_layer(from, to, layer))
    }

    /// Whether a pass leaves in these pools what a second run of the same pass would take for the state before it: a slot, or a ring, holds what
    /// the last tokens made of it, where a page of rows holds each token's own.
    pub fn is_stateful(&self) -> bool {
        let stateful =
            |decl: &PoolDecl| decl.source == PageSource::Slot || matches!(decl.layout, PoolLayout::Ring { .. });
        self.decls.iter().any(stateful)
    }

    /// The pages of bytes of the pool at `index`. For models.
    pub(crate) fn pages(&self, index: usize) -> Result<&PagePool, ModelError> {
        match self.memory.get(index) {
            Some(PoolMemory::Pages(pool)) => Ok(pool),
            _ => Err(ModelError::Batch(format!("pool {index} of the set has no pages of bytes"))),
        }
    }

    /// The heads of the pool at `index`. For models.
    pub(crate) fn heads(&self, index: usize) -> Result<&dyn KvPool, ModelError> {
        match self.memory.get(index) {
            Some(PoolMemory::Heads(pool)) => Ok(pool.as_ref()),
            _ => Err(ModelError::Batch(format!("pool {index} of the set has no heads of keys and values"))),
        }
    }
}

/// Asks for the recurrent state behind a position to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateSave {
    /// Tokens of the sequence that the state is to sum up: above the chunk's start, at most its end.
    pub tokens: u32,
    /// The slot it goes to, which nothing else uses.
    pub slot: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hit_needs_what_its_policy_says() {
        assert_eq!(HitPolicy::AllPages.pages(96, 16), 6);
        assert_eq!(HitPolicy::Trailing { tokens: 33 }.pages(96, 16), 3);
        assert_eq!(HitPolicy::Trailing { tokens: 128 }.pages(32, 16), 2);
        assert_eq!(HitPolicy::ExactState.pages(96, 16), 1);
        assert_eq!(HitPolicy::ExactState.pages(0, 16), 0);
        assert_eq!(HitPolicy::Nothing.pages(96, 16), 0);
    }

    #[test]
    fn pages_are_as_large_as_their_layout() {
        let decl = |layout| PoolDecl {
            name: "p",
            kind: PoolKind::FullKv,
            source: PageSource::Anchor,
            hit: HitPolicy::AllPages,
            layers: vec![0],
            layout,
            encoding: "",
        };
        let bytes = |layout| decl(layout).page_bytes(256, KvDtype::BF16);
        assert_eq!(bytes(PoolLayout::None), 0);
        assert_eq!(bytes(PoolLayout::Heads { kv_heads: 2, head_dim_k: 24, head_dim_v: 16 }), 256 * 2 * 40 * 2);
        assert_eq!(bytes(PoolLayout::Rows { tokens: 128, elements: 512 }), 2 * 512 * 2);
        let packed = |tokens| PoolLayout::PackedRows { tokens, elements: 512, rope: 64 };
        assert_eq!((bytes(packed(1)), bytes(packed(4)), bytes(packed(128))), (149_760, 37_440, 1_728));
        assert_eq!(bytes(PoolLayout::PackedKeys { tokens: 4, elements: 128 }), 8_448);
        assert_eq!(bytes(PoolLayout::Ring { rows: 8, elements: 2048 }), 8 * 2048 * 4);
        assert_eq!(bytes(PoolLayout::Slot { elements: 10 }), 40);
        assert!(!decl(PoolLayout::None).has_buffer());
    }
}
