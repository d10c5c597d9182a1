//! The rows of a step and where their keys and values lie.

use std::ops::Range;

use crate::device::SeqSpan;
use crate::error::KernelError;
use crate::kv::KvSpec;

/// One sequence of a [`StepPlan`].
#[derive(Clone)]
pub struct StepSpan {
    /// Its rows within the step.
    pub rows: Range<usize>,
    /// Position of its first row.
    pub start: usize,
    /// Its page table, as far as it is needed.
    pub pages: Vec<u32>,
}

/// A checked step. For implementers of [`crate::Device`].
pub struct StepPlan {
    /// The pool's geometry.
    pub spec: KvSpec,
    /// The sequences.
    pub spans: Vec<StepSpan>,
    /// Position of each row.
    pub positions: Vec<u32>,
}

impl StepPlan {
    /// Checks that pages and positions of a step fit together.
    ///
    /// # Errors
    /// What is wrong with which sequence.
    pub fn new(spec: &KvSpec, seqs: &[SeqSpan<'_>]) -> Result<Self, KernelError> {
        let refuse = |index: usize, reason: String| {
            let reason = format!("sequence {index} of the step: {reason}");
            Err(KernelError::Page { op: "plan", reason })
        };
        let mut spans = Vec::with_capacity(seqs.len());
        let mut positions = Vec::new();
        let mut written = Vec::new();
        for (index, seq) in seqs.iter().enumerate() {
            if seq.len == 0 {
                return refuse(index, "it has no rows".into());
            }
            let Some(end) = seq.start.checked_add(seq.len) else {
                let SeqSpan { start, len, .. } = seq;
                return refuse(index, format!("{len} rows from position {start} overflow"));
            };
            let needed = (end as usize).div_ceil(spec.page_tokens);
            let Some(pages) = seq.pages.get(..needed) else {
                return refuse(
                    index,
                    format!(
                        "its page table has {} pages, but {end} tokens need {needed} of {} tokens",
                        seq.pages.len(),
                        spec.page_tokens
                    ),
                );
            };
            if let Some(page) = pages.iter().find(|p| **p as usize >= spec.pages) {
                return refuse(index, format!("page {page}, but the pool has {}", spec.pages));
            }
            let start = seq.start as usize;
            written.extend(pages[start / spec.page_tokens..].iter().map(|p| (*p, index)));
            let first = positions.len();
            positions.extend(seq.start..end);
            spans.push(StepSpan { rows: first..positions.len(), start, pages: pages.to_vec() });
        }
        // Two writers of one page would overwrite each other's tokens.
        written.sort_unstable();
        if let Some(w) = written.windows(2).find(|w| w[0].0 == w[1].0) {
            return refuse(w[1].1, format!("page {} is written more than once", w[1].0));
        }
        Ok(Self { spec: *spec, spans, positions })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::KvDtype;

    const SPEC: KvSpec =
        KvSpec { layers: 1, kv_heads: 1, head_dim_k: 4, head_dim_v: 4, page_tokens: 4, pages: 8, dtype: KvDtype::F16 };

    fn refused(seqs: &[SeqSpan<'_>]) -> String {
        StepPlan::new(&SPEC, seqs).err().unwrap().to_string()
    }

    #[test]
    fn rows_follow_sequences() {
        let seqs = [SeqSpan { start: 3, len: 2, pages: &[5, 1, 7] }, SeqSpan { start: 0, len: 1, pages: &[2] }];
        let plan = StepPlan::new(&SPEC, &seqs).unwrap();
        assert_eq!(plan.positions, [3, 4, 0]);
        assert_eq!(plan.spans[0].pages, [5, 1]);
        assert_eq!(plan.spans[1].rows, 2..3);
    }

    #[test]
    fn wrong_steps_are_refused() {
        let seq = |start, len, pages| SeqSpan { start, len, pages };
        assert!(refused(&[seq(0, 0, &[0])]).contains("no rows"));
        assert!(refused(&[seq(u32::MAX, 1, &[0])]).contains("overflow"));
        let e = refused(&[seq(0, 1, &[0]), seq(3, 2, &[1])]);
        assert!(e.contains("sequence 1") && e.contains("5 tokens need 2"), "{e}");
        assert!(refused(&[seq(0, 1, &[8])]).contains("page 8, but the pool has 8"));
        assert!(refused(&[seq(0, 5, &[3, 3])]).contains("page 3 is written more than once"));
        // Shared pages that are only read are fine; the written one is not.
        let ok = [seq(4, 1, &[0, 1]), seq(4, 1, &[0, 2])];
        assert!(StepPlan::new(&SPEC, &ok).is_ok());
        let e = refused(&[seq(4, 1, &[0, 1]), seq(4, 1, &[0, 1])]);
        assert!(e.contains("page 1 is written"), "{e}");
    }
}
