//! A model with all of its pools.

use kvdock_kernels::KvDtype;
use kvdock_models::{
    LoadedModel, Logits, NO_PAGE, NoHooks, PageSource, PoolSet, PoolSizes, PooledBatch, PooledChunk, StateSave, Want,
};

use super::{argmax, devices};

/// Where a sequence lies in the pools.
#[derive(Debug, Clone, PartialEq)]
pub struct Place {
    pub pages: Vec<u32>,
    pub window: Vec<u32>,
    pub slot: u32,
}

impl Place {
    /// The first `count` pages, and slot 0.
    pub fn first(count: usize) -> Self {
        Self { pages: super::pages(count), window: super::pages(count), slot: 0 }
    }

    /// `count` pages of each table from `first` on, in an order of their own, and slot `slot`.
    pub fn shuffled(first: u32, count: u32, slot: u32) -> Self {
        let pages = (0..count).rev().map(|page| first + page).collect();
        let window = (0..count).map(|page| first + (page + 3) % count).collect();
        Self { pages, window, slot }
    }
}

/// A model with pools of its own.
pub struct PoolSession {
    pub loaded: LoadedModel,
    pub pools: PoolSet,
    pub page: usize,
    /// Tokens before a position whose window pages are kept; pages before are freed, and their numbers forgotten.
    pub trailing: Option<usize>,
}

impl PoolSession {
    pub fn new(loaded: LoadedModel, dtype: KvDtype, page: usize, pages: usize) -> Self {
        let spec = loaded.spec();
        let sizes = PoolSizes { page_tokens: page, anchor_pages: pages, window_pages: pages, slots: 16, dtype };
        let pools = PoolSet::allocate_ranks(&devices(spec.ranks), &spec.pools, sizes).unwrap();
        let trailing =
            spec.pools.iter().filter(|pool| pool.source == PageSource::Window).find_map(|pool| match pool.hit {
                kvdock_models::HitPolicy::Trailing { tokens } => Some(tokens),
                _ => None,
            });
        Self { loaded, pools, page, trailing }
    }

    pub fn batch(&self, seqs: &[PooledChunk<'_>]) -> Vec<Vec<f32>> {
        let mut logits = Logits::new();
        self.loaded.model.forward_pools(&PooledBatch { seqs }, &self.pools, &NoHooks, &mut logits).unwrap();
        (0..logits.rows()).map(|row| logits.row(row).unwrap().to_vec()).collect()
    }

    /// The window table of a chunk that starts at `start`: what no later token sees is gone.
    pub fn window(&self, place: &Place, start: usize) -> Vec<u32> {
        let first = start.saturating_sub(self.trailing.unwrap_or(usize::MAX)) / self.page;
        place.window.iter().enumerate().map(|(index, page)| if index < first { NO_PAGE } else { *page }).collect()
    }

    pub fn chunk(
        &self,
        tokens: &[u32],
        start: usize,
        place: &Place,
        logits: Want,
        save: &[StateSave],
    ) -> Vec<Vec<f32>> {
        let window = self.window(place, start);
        self.batch(&[PooledChunk {
            tokens,
            start: start as u32,
            logits,
            pages: &place.pages,
            window: &window,
            slot: Some(place.slot),
            save,
        }])
    }

    /// All rows of a prompt that is cut into chunks of `size`.
    pub fn prompt(&self, tokens: &[u32], size: usize, place: &Place) -> Vec<Vec<f32>> {
        let chunks = tokens.chunks(size).enumerate();
        chunks.flat_map(|(index, chunk)| self.chunk(chunk, index * size, place, Want::All, &[])).collect()
    }

    /// Greedy continuation of a prompt, token by token.
    pub fn greedy(&self, prompt: &[u32], count: usize, place: &Place) -> Vec<u32> {
        let mut row = self.chunk(prompt, 0, place, Want::Last, &[]).remove(0);
        let mut out = Vec::new();
        while out.len() < count {
            out.push(argmax(&row));
            let at = prompt.len() + out.len() - 1;
            row = self.chunk(&out[out.len() - 1..], at, place, Want::Last, &[]).remove(0);
        }
        out
    }
}
