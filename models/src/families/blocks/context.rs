//! Context parallelism: the rows of a pass are dealt out, and each rank computes some of them.
//!
//! Every rank has all weights of its tensor-parallel share, and pools that hold all tokens. A rank takes its rows through projections, experts and
//! attention. What later rows need of a row (keys and values, latents, index keys, what compressors and recurrences take in) the ranks give each
//! other before it is written, so each writes all of it to its own pools, and the pools of all ranks hold the same bytes. A row's own arithmetic is
//! that of one rank alone, so its bits are too.

use std::ops::Range;
use std::sync::Arc;

use kvdock_kernels::{Buf, Collective, Device, KernelError};

use super::share::Share;
use super::step::Step;

/// The rows that each of `ranks` ranks computes of `rows` rows: parts in order, as equal as can be. `None`: there are fewer rows than ranks, and every
/// rank computes all of them, as giving each other one row costs more than computing it.
pub(crate) fn parts(rows: usize, ranks: usize) -> Option<Vec<Range<usize>>> {
    let part = |rank: usize| rows * rank / ranks..rows * (rank + 1) / ranks;
    (ranks > 1 && rows >= ranks).then(|| (0..ranks).map(part).collect())
}

/// A step, and which rows of it this rank computes.
pub(crate) struct Dealt<'a> {
    whole: Step<'a>,
    /// `None`: all rows are its own.
    own: Option<Own<'a>>,
}

struct Own<'a> {
    step: Step<'a>,
    group: Arc<dyn Collective>,
    /// By rank.
    parts: Vec<Range<usize>>,
}

impl<'a> Dealt<'a> {
    /// The rows of `whole` that the rank of `share` computes.
    pub(crate) fn new(share: &Share, whole: Step<'a>) -> Self {
        let own = share.context().and_then(|group| {
            let parts = parts(whole.rows(), group.size())?;
            let step = whole.part(parts.get(group.rank())?);
            Some(Own { step, group: Arc::clone(group), parts })
        });
        Self { whole, own }
    }

    /// All rows, whoever computes them.
    pub(crate) fn whole(&self) -> &Step<'a> {
        &self.whole
    }

    /// The rows that this rank computes.
    pub(crate) fn own(&self) -> &Step<'a> {
        self.own.as_ref().map_or(&self.whole, |own| &own.step)
    }

    /// Whether others compute rows of this step.
    pub(crate) fn is_dealt(&self) -> bool {
        self.own.is_some()
    }

    /// Which rows of the whole step are the rank's own.
    pub(crate) fn own_rows(&self) -> Range<usize> {
        let all = 0..self.whole.rows();
        self.own.as_ref().and_then(|own| own.parts.get(own.group.rank()).cloned()).unwrap_or(all)
    }

    /// Rows of the whole step, `[rows, width]`, of which `part` are the rank's own. To be called by all ranks.
    ///
    /// # Errors
    /// What the ranks' exchange gives.
    pub(crate) fn gather(&self, device: &dyn Device, part: Buf, width: usize) -> Result<Buf, KernelError> {
        Ok(self.gathered(device, &part, width)?.unwrap_or(part))
    }

    /// As [`Dealt::gather`]; `None` where `part` is all there is.
    pub(crate) fn gathered(&self, device: &dyn Device, part: &Buf, width: usize) -> Result<Option<Buf>, KernelError> {
        let Some(own) = &self.own else { return Ok(None) };
        let lens: Vec<usize> = own.parts.iter().map(|part| part.len() * width).collect();
        let mut whole = device.scratch(self.whole.rows() * width)?;
        own.group.all_gather_parts(device, part, &lens, &mut whole)?;
        Ok(Some(whole))
    }

    /// The rank's own rows of `whole`, `[rows, width]`.
    ///
    /// # Errors
    /// What the device gives.
    pub(crate) fn keep(&self, device: &dyn Device, whole: Buf, width: usize) -> Result<Buf, KernelError> {
        if self.own.is_none() {
            return Ok(whole);
        }
        let rows: Vec<u32> = self.own_rows().map(|row| row as u32).collect();
        let mut own = device.scratch(rows.len() * width)?;
        device.gather_rows(&whole, width, &rows, &mut own)?;
        Ok(own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_dealt_in_order_and_evenly() {
        assert_eq!(parts(7, 2).unwrap(), [0..3, 3..7]);
        assert_eq!(parts(9, 4).unwrap(), [0..2, 2..4, 4..6, 6..9]);
        assert_eq!(parts(4, 4).unwrap(), [0..1, 1..2, 2..3, 3..4]);
        assert!(parts(3, 4).is_none(), "everybody computes them");
        assert!(parts(100, 1).is_none());
    }
}
