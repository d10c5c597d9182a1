//! The part of a model that one of several ranks holds.
//!
//! Query heads, columns of MLPs, experts and rows of the vocabulary are dealt out in order; KV heads too, where there are enough of them,
//! else ranks share one. What every rank needs whole (norms, routers, latents, indexers, compressors) each of them has. A block's output is
//! then the sum of what the ranks compute of it.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use kvdock_kernels::{Buf, Collective, Device, KernelError, Weight};

use crate::logits::Target;
use crate::{Logits, ModelError};

/// Which rank of how many loads and computes.
#[derive(Clone, Default)]
pub(crate) struct Share {
    /// `None`: there are no others.
    group: Option<Arc<dyn Collective>>,
    /// Ranks with the same share, among which the rows of a pass are dealt out. `None`: there are no others.
    context: Option<Arc<dyn Collective>>,
}

/// Which part of a matrix a rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cut {
    /// All of it.
    Whole,
    /// These rows: output features. Biases are cut alike.
    Rows(Range<usize>),
    /// These columns: input features. The ranks' products add up, so the first rank alone adds the bias.
    Cols(Range<usize>),
}

impl Cut {
    /// Rows that hold the heads `heads`, each of `width` rows.
    pub(crate) fn head_rows(heads: &Range<usize>, width: usize) -> Self {
        Self::Rows(heads.start * width..heads.end * width)
    }

    /// Columns that hold the heads `heads`, each of `width` columns.
    pub(crate) fn head_cols(heads: &Range<usize>, width: usize) -> Self {
        Self::Cols(heads.start * width..heads.end * width)
    }

    /// The rows and columns of a matrix of `rows` x `cols`.
    pub(crate) fn of(&self, rows: usize, cols: usize) -> (Range<usize>, Range<usize>) {
        match self {
            Self::Whole => (0..rows, 0..cols),
            Self::Rows(part) => (part.clone(), 0..cols),
            Self::Cols(part) => (0..rows, part.clone()),
        }
    }
}

/// Largest number of ranks that a refusal names as fitting.
const MOST_NAMED: usize = 64;

impl Share {
    /// The rank behind `group`.
    pub(crate) fn new(group: Arc<dyn Collective>) -> Self {
        Self { group: (group.size() > 1).then_some(group), context: None }
    }

    /// The same share, whose passes are dealt out among the ranks of `context`.
    pub(crate) fn within(self, context: Arc<dyn Collective>) -> Self {
        Self { context: (context.size() > 1).then_some(context), ..self }
    }

    /// The ranks with the same share, where there are others than this one.
    pub(crate) fn context(&self) -> Option<&Arc<dyn Collective>> {
        self.context.as_ref()
    }

    pub(crate) fn rank(&self) -> usize {
        self.group.as_ref().map_or(0, |group| group.rank())
    }

    pub(crate) fn size(&self) -> usize {
        self.group.as_ref().map_or(1, |group| group.size())
    }

    /// Whether there are no other ranks.
    pub(crate) fn is_alone(&self) -> bool {
        self.group.is_none()
    }

    /// This rank's share of `total` things called `what`.
    ///
    /// # Errors
    /// When the ranks can't have equal shares.
    pub(crate) fn deal(&self, path: &Path, total: usize, what: &str) -> Result<Range<usize>, ModelError> {
        let size = self.size();
        if !total.is_multiple_of(size) {
            let fitting: Vec<String> = (1..=total.min(MOST_NAMED))
                .filter(|size| total.is_multiple_of(*size))
                .map(|size| size.to_string())
                .collect();
            let what = format!("it has {total} {what}, which {size} does not divide ({} would)", fitting.join(", "));
            return Err(refused(path, size, what));
        }
        let each = total / size;
        Ok(self.rank() * each..(self.rank() + 1) * each)
    }

    /// This rank's KV heads of `kv_heads`: its share, or where there are fewer than ranks, the one that its query heads read.
    ///
    /// # Errors
    /// When neither can be.
    pub(crate) fn kv_heads(&self, path: &Path, kv_heads: usize) -> Result<Range<usize>, ModelError> {
        let size = self.size();
        if kv_heads < size && size.is_multiple_of(kv_heads) {
            let head = self.rank() / (size / kv_heads);
            return Ok(head..head + 1);
        }
        self.deal(path, kv_heads, "KV heads")
    }

    /// This rank's share of `heads`, which are in `groups`, and the groups they are in: whole groups, or a part of one.
    ///
    /// # Errors
    /// When it would have parts of several.
    pub(crate) fn head_groups(
        &self,
        path: &Path,
        heads: usize,
        groups: usize,
    ) -> Result<(Range<usize>, Range<usize>), ModelError> {
        let own = self.deal(path, heads, "query heads")?;
        let each = heads / groups;
        let held = own.start / each..own.end.div_ceil(each);
        let whole = own.start.is_multiple_of(each) && own.end.is_multiple_of(each);
        if whole || held.len() == 1 {
            return Ok((own, held));
        }
        let what = format!("its {heads} query heads are in {groups} groups, which {} ranks would cut", self.size());
        Err(refused(path, self.size(), what))
    }

    /// This rank's rows of a vocabulary of `vocab` tokens. The last rank may have fewer.
    ///
    /// # Errors
    /// When one would have none.
    pub(crate) fn vocab(&self, path: &Path, vocab: usize) -> Result<Range<usize>, ModelError> {
        let part = self.vocab_of(self.size() - 1, vocab);
        if part.is_empty() {
            return Err(refused(
                path,
                self.size(),
                format!("its vocabulary has {vocab} tokens, too few for each to hold some"),
            ));
        }
        Ok(self.vocab_of(self.rank(), vocab))
    }

    fn vocab_of(&self, rank: usize, vocab: usize) -> Range<usize> {
        let each = vocab.div_ceil(self.size());
        (rank * each).min(vocab)..((rank + 1) * each).min(vocab)
    }

    /// What this rank adds of a bias whose matrix is cut like that.
    pub(crate) fn bias(&self, cut: &Cut, whole: Vec<f32>) -> Option<Vec<f32>> {
        match cut {
            Cut::Whole => Some(whole),
            Cut::Rows(part) => Some(whole.get(part.clone()).unwrap_or_default().to_vec()),
            Cut::Cols(_) => (self.rank() == 0).then_some(whole),
        }
    }

    /// Replaces what this rank has computed of a block's output, `len` elements, with the sum over all ranks.
    pub(crate) fn sum(&self, device: &dyn Device, buf: &mut Buf, len: usize) -> Result<(), KernelError> {
        match &self.group {
            Some(group) => group.all_reduce(device, buf, len),
            None => Ok(()),
        }
    }

    /// Rows of the embedding for `ids`, of which this rank's `table` holds its part of `vocab` tokens.
    pub(crate) fn embed(
        &self,
        device: &dyn Device,
        table: &Weight,
        vocab: usize,
        ids: &[u32],
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        if self.is_alone() {
            return device.embed(table, ids, out);
        }
        let own = self.vocab_of(self.rank(), vocab);
        let width = table.shape().cols;
        let local: Vec<u32> = ids.iter().map(|id| id.wrapping_sub(own.start as u32)).collect();
        let held = |id: &u32| (*id as usize) < own.len();
        let some: Vec<u32> = local.iter().map(|id| if held(id) { *id } else { 0 }).collect();
        device.embed(table, &some, out)?;
        let none = vec![0.0; width];
        for (row, _) in local.iter().enumerate().filter(|(_, id)| !held(id)) {
            device.write(out, row * width, &none)?;
        }
        // One rank has the row, the others add zeros.
        self.sum(device, out, ids.len() * width)
    }

    /// Elements of a buffer of logits for `rows` rows: what this rank computes, with room for what a rank with more of the vocabulary has.
    pub(crate) fn logits_len(&self, rows: usize, vocab: usize) -> usize {
        rows * vocab.div_ceil(self.size())
    }

    /// Room for `rows` rows of logits. Those of several ranks come together in host memory.
    pub(crate) fn target<'a>(
        &self,
        device: &Arc<dyn Device>,
        rows: usize,
        vocab: usize,
        logits: &'a mut Logits,
    ) -> Result<Target<'a>, KernelError> {
        if self.is_alone() { logits.target(device, rows, vocab) } else { Ok(Target::Host(logits.reset(rows, vocab))) }
    }

    /// Puts `rows` rows of logits into `out` from row `first` on; `part` is what this rank has computed of them, its part of the
    /// vocabulary.
    pub(crate) fn put_logits(
        &self,
        device: &dyn Device,
        part: &Buf,
        (first, rows): (usize, usize),
        vocab: usize,
        out: &mut Target<'_>,
    ) -> Result<(), KernelError> {
        match (&self.group, out) {
            (Some(group), Target::Host(out)) => {
                self.gather_logits((device, group.as_ref()), part, rows, vocab, &mut out[first * vocab..])
            }
            (_, out) => out.put(device, part, (first, rows), vocab),
        }
    }

    /// Rows of logits `[rows, vocab]` in `out`, of which this rank has computed its part of the vocabulary.
    fn gather_logits(
        &self,
        (device, group): (&dyn Device, &dyn Collective),
        part: &Buf,
        rows: usize,
        vocab: usize,
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        let len = self.logits_len(rows, vocab);
        let mut whole = device.alloc(len * self.size())?;
        group.all_gather(device, part, len, &mut whole)?;
        let mut values = vec![0.0; len * self.size()];
        device.read(&whole, 0, &mut values)?;
        for (rank, values) in values.chunks_exact(len.max(1)).enumerate() {
            let tokens = self.vocab_of(rank, vocab);
            for (out, part) in out.chunks_exact_mut(vocab).zip(values.chunks_exact(tokens.len().max(1))).take(rows) {
                out[tokens.clone()].copy_from_slice(part);
            }
        }
        Ok(())
    }
}

fn refused(path: &Path, ranks: usize, what: String) -> ModelError {
    ModelError::Ranks { path: path.to_path_buf(), ranks, what }
}

#[cfg(test)]
mod tests {
    use kvdock_kernels::{InProcess, RankGroup};

    use super::*;

    fn shares(size: usize) -> Vec<Share> {
        InProcess::ranks(&RankGroup::new(size)).into_iter().map(Share::new).collect()
    }

    #[test]
    fn shares_are_equal_or_refused() {
        let path = Path::new("m");
        let dealt: Vec<_> = shares(4).iter().map(|share| share.deal(path, 8, "query heads").unwrap()).collect();
        assert_eq!(dealt, [0..2, 2..4, 4..6, 6..8]);
        let error = shares(4)[0].deal(path, 6, "query heads").unwrap_err().to_string();
        assert_eq!(
            error,
            "m: can't be spread over 4 ranks: it has 6 query heads, which 4 does not divide (1, 2, 3, 6 would)"
        );
    }

    #[test]
    fn ranks_share_a_kv_head_where_there_are_fewer_than_ranks() {
        let heads = |size: usize, kv_heads: usize| -> Vec<Range<usize>> {
            shares(size).iter().map(|share| share.kv_heads(Path::new("m"), kv_heads).unwrap()).collect()
        };
        assert_eq!(heads(2, 4), [0..2, 2..4]);
        assert_eq!(heads(4, 2), [0..1, 0..1, 1..2, 1..2]);
        assert_eq!(heads(2, 1), [0..1, 0..1]);
        assert!(shares(4)[0].kv_heads(Path::new("m"), 3).is_err());
        assert!(shares(2)[0].kv_heads(Path::new("m"), 3).is_err());
    }

    #[test]
    fn ranks_hold_whole_groups_of_heads_or_a_part_of_one() {
        let groups = |size: usize, heads: usize, groups: usize| -> Vec<(Range<usize>, Range<usize>)> {
            shares(size).iter().map(|share| share.head_groups(Path::new("m"), heads, groups).unwrap()).collect()
        };
        assert_eq!(groups(2, 8, 4), [(0..4, 0..2), (4..8, 2..4)]);
        assert_eq!(groups(4, 8, 2), [(0..2, 0..1), (2..4, 0..1), (4..6, 1..2), (6..8, 1..2)]);
        assert!(shares(4)[1].head_groups(Path::new("m"), 12, 3).is_err());
    }

    #[test]
    fn the_last_rank_may_have_a_smaller_part_of_the_vocabulary() {
        let parts: Vec<_> = shares(4).iter().map(|share| share.vocab(Path::new("m"), 10).unwrap()).collect();
        assert_eq!(parts, [0..3, 3..6, 6..9, 9..10]);
        assert!(shares(4)[0].vocab(Path::new("m"), 6).is_err(), "the last one would have none");
    }
}
