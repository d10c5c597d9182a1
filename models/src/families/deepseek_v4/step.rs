//! What all layers of a step share: positions, the window, and for each ratio which rows are completed of which tokens.

use std::cell::OnceCell;
use std::collections::BTreeMap;

use kvdock_kernels::Device;
use kvdock_kernels::ops::{CompressPlan, Indices, StateSource};

use super::compressor::{OVERLAPPING, RING};
use crate::families::blocks::context::Dealt;
use crate::families::blocks::rows::{Placement, Positions, Reach, slot_of};
use crate::families::blocks::step::{Seq, Step};
use crate::{ModelError, PageSource, PoolSet};

/// A step over one set of pools.
pub(super) struct V4Step<'a> {
    pub(super) device: &'a dyn Device,
    pub(super) dealt: &'a Dealt<'a>,
    /// The rows that this rank computes.
    pub(super) step: &'a Step<'a>,
    pub(super) pools: &'a PoolSet,
    pub(super) positions: Positions<'a>,
    /// Of the rows of all ranks.
    pub(super) all_positions: Positions<'a>,
    /// Keys that a query sees in the window, its own included.
    reach: usize,
    window: OnceCell<Placement>,
    light: OnceCell<Compressed>,
    heavy: OnceCell<Compressed>,
}

/// Compressed rows of one ratio. Every rank compresses the tokens of all, as a row may take tokens of several.
pub(super) struct Compressed {
    pub(super) plan: CompressPlan,
    /// The first position of each row that is completed.
    pub(super) positions: Indices,
    pub(super) rows: Placement,
    /// The most rows that a row of the step sees, whoever computes it.
    pub(super) most: usize,
}

impl<'a> V4Step<'a> {
    pub(super) fn new(device: &'a dyn Device, dealt: &'a Dealt<'a>, pools: &'a PoolSet, reach: usize) -> Self {
        let step = dealt.own();
        let (positions, all_positions) = (Positions::new(device, step), Positions::new(device, dealt.whole()));
        let (window, light, heavy) = Default::default();
        Self { device, dealt, step, pools, positions, all_positions, reach, window, light, heavy }
    }

    /// Window rows.
    pub(super) fn window(&self) -> Result<&Placement, ModelError> {
        if let Some(made) = self.window.get() {
            return Ok(made);
        }
        let reach = Reach { source: PageSource::Window, tokens: 1, window: Some(self.reach) };
        let made = Placement::new(self.device, self.dealt, self.pools, reach)?;
        Ok(self.window.get_or_init(|| made))
    }

    /// Rows of a ratio.
    pub(super) fn compressed(&self, ratio: usize) -> Result<&Compressed, ModelError> {
        let cell = if ratio == OVERLAPPING { &self.light } else { &self.heavy };
        if let Some(made) = cell.get() {
            return Ok(made);
        }
        let made = Compressed::new(self, ratio)?;
        Ok(cell.get_or_init(|| made))
    }
}

/// Where the state of a token is kept.
fn state_slot(seq: &Seq<'_>, position: usize, ratio: usize, page_tokens: usize) -> Result<u32, ModelError> {
    if ratio == OVERLAPPING {
        return slot_of(seq.chunk.window, position / page_tokens * RING + position % RING, RING);
    }
    slot_of(&[seq.chunk.slot.unwrap_or_default()], position % ratio, ratio)
}

impl Compressed {
    fn new(step: &V4Step<'_>, ratio: usize) -> Result<Self, ModelError> {
        let page_tokens = step.pools.sizes().page_tokens;
        let overlapping = ratio == OVERLAPPING;
        let mut plan = CompressPlan { tokens: if overlapping { 2 * ratio } else { ratio }, ..Default::default() };
        let (mut positions, mut most) = (Vec::new(), 0);
        for seq in &step.dealt.whole().seqs {
            let start = seq.chunk.start as usize;
            let end = start + seq.chunk.tokens.len();
            most = most.max(end / ratio);
            let source = |position: usize| {
                if position >= start {
                    return Ok(StateSource::New((seq.first + position - start) as u32));
                }
                Ok::<_, ModelError>(StateSource::Kept(state_slot(seq, position, ratio, page_tokens)?))
            };
            for row in start / ratio..end / ratio {
                let begin = row * ratio;
                positions.push(begin as u32);
                if overlapping {
                    for back in (1..=ratio).rev() {
                        let before = begin.checked_sub(back);
                        plan.sources.push(before.map_or(Ok(StateSource::None), source)?);
                    }
                }
                for position in begin..begin + ratio {
                    plan.sources.push(source(position)?);
                }
            }
            // Every position is kept, until a later one takes its place: so each page's ring ends with the page's own last
            // tokens, and every page's end can be gone on from.
            let mut kept = BTreeMap::new();
            for (row, position) in seq.rows() {
                kept.insert(state_slot(seq, position as usize, ratio, page_tokens)?, row as u32);
            }
            plan.kept.extend(kept.into_iter().map(|(slot, row)| (row, slot)));
        }
        let reach = Reach { source: PageSource::Anchor, tokens: ratio, window: None };
        let rows = Placement::new(step.device, step.dealt, step.pools, reach)?;
        Ok(Self { plan, positions: step.device.upload_indices(&positions)?, rows, most })
    }
}
