//! The plan of a step on the CPU: the checked step, and which sequences share pages.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use super::attention::SPLIT;
use super::plan::StepPlan;

/// A [`StepPlan`] with what attention finds out about it once, not in every layer.
pub(super) struct CpuPlan {
    pub(super) step: StepPlan,
    shared: OnceLock<Vec<SharedSplit>>,
}

/// Sequences of one row each whose pages of a split are the same, and of all splits before it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SharedSplit {
    pub(super) split: usize,
    /// At least two, in ascending order.
    pub(super) spans: Vec<usize>,
}

impl CpuPlan {
    pub(super) fn new(step: StepPlan) -> Self {
        Self { step, shared: OnceLock::new() }
    }

    /// All shared splits that the sequences see whole, in order of splits.
    pub(super) fn shared(&self) -> &[SharedSplit] {
        self.shared.get_or_init(|| shared(&self.step))
    }
}

fn shared(step: &StepPlan) -> Vec<SharedSplit> {
    let mut found = Vec::new();
    if !SPLIT.is_multiple_of(step.spec.page_tokens) {
        return found;
    }
    let pages_each = SPLIT / step.spec.page_tokens;
    let single = |span: &usize| step.spans[*span].rows.len() == 1;
    let mut together = vec![(0..step.spans.len()).filter(single).collect::<Vec<_>>()];
    let mut split = 0;
    while !together.is_empty() {
        let mut next = Vec::new();
        for spans in together {
            let mut by_pages: BTreeMap<&[u32], Vec<usize>> = BTreeMap::new();
            for index in spans {
                let span = &step.spans[index];
                // The row sees its own position too.
                if (split + 1) * SPLIT <= span.start + 1 {
                    by_pages.entry(&span.pages[split * pages_each..][..pages_each]).or_default().push(index);
                }
            }
            next.extend(by_pages.into_values().filter(|spans| spans.len() > 1));
        }
        found.extend(next.iter().map(|spans| SharedSplit { split, spans: spans.clone() }));
        together = next;
        split += 1;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::SeqSpan;
    use crate::kv::{KvDtype, KvSpec};

    fn plan(page_tokens: usize, seqs: &[(u32, u32, Vec<u32>)]) -> CpuPlan {
        let spec = KvSpec {
            layers: 1,
            kv_heads: 1,
            head_dim_k: 4,
            head_dim_v: 4,
            page_tokens,
            pages: 1000,
            dtype: KvDtype::F16,
        };
        let seqs: Vec<_> = seqs.iter().map(|(start, len, pages)| SeqSpan { start: *start, len: *len, pages }).collect();
        CpuPlan::new(StepPlan::new(&spec, &seqs).unwrap())
    }

    fn found(plan: &CpuPlan) -> Vec<(usize, Vec<usize>)> {
        plan.shared().iter().map(|shared| (shared.split, shared.spans.clone())).collect()
    }

    /// Pages of 128 tokens, two a split.
    #[test]
    fn whole_splits_with_the_same_pages_are_found() {
        let seqs = [
            (600, 1, vec![1, 2, 3, 4, 10]),
            (600, 1, vec![1, 2, 3, 5, 11]),
            (700, 1, vec![1, 2, 3, 4, 20, 12]),
            // Too short to see the second split whole, of two rows, and with pages of its own.
            (510, 1, vec![1, 2, 3, 13]),
            (511, 2, vec![1, 2, 3, 14, 15]),
            (600, 1, vec![6, 2, 3, 4, 16]),
        ];
        assert_eq!(found(&plan(128, &seqs)), [(0, vec![0, 1, 2, 3]), (1, vec![0, 2])]);
    }

    #[test]
    fn the_last_position_of_a_split_sees_it_whole() {
        let seqs = |start| [(start, 1, vec![1, 2]), (300, 1, vec![1, 2, 5])];
        assert_eq!(found(&plan(128, &seqs(254))), []);
        assert_eq!(found(&plan(128, &seqs(255))), [(0, vec![0, 1])]);
    }

    #[test]
    fn groups_of_sequences_stay_apart_and_odd_pages_are_left_alone() {
        let seqs = |page: u32| -> Vec<_> {
            let pages = |first: u32, last: u32| (0..300u32.div_ceil(page) - 1).map(move |p| first + p).chain([last]);
            (0..4).map(|i| (299, 1, pages(100 * (i % 2), 990 + i).collect())).collect()
        };
        assert_eq!(found(&plan(64, &seqs(64))), [(0, vec![0, 2]), (0, vec![1, 3])]);
        assert_eq!(found(&plan(48, &seqs(48))), []);
    }
}
