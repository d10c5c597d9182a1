//! The rows of a step, as the kernels read them.

use parking_lot::Mutex;

use super::driver::{Access, Arg, DevicePtr, Touch};
use super::memory::{Block, Blocks, Queue, Uploads};
use super::pool::CudaKvPool;
use kvdock_kernels::KernelError;
use kvdock_kernels::KvSpec;
use kvdock_kernels::SeqSpan;
use kvdock_kernels::StepPlan;
use std::sync::Arc;

/// A checked step, and its arrays on the device: for each row its position, the slot of its key and value, and where its sequence's page table
/// starts; for each sequence its first row, rows, first position and page table; the page tables.
pub(super) struct CudaPlan {
    pub(super) checked: StepPlan,
    /// The pool it was made over.
    pub(super) pool: u64,
    block: Block,
    /// Bytes of the block in use.
    bytes: usize,
    /// Tiles of the prefill kernels.
    tiles: Mutex<Vec<(TileKind, Arc<Tiles>)>>,
    /// It is used for steps whose pages are others than its own.
    pub(super) stands_for_others: bool,
}

/// Which tiles there are to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TileKind {
    /// Query heads a KV head.
    pub(super) group: usize,
    /// Pairs of a row and a head in a tile.
    pub(super) pairs: usize,
    /// Also for sequences of one row.
    pub(super) decodes_too: bool,
}

/// Tiles of a prefill kernel.
pub(super) struct Tiles {
    block: Block,
    pub(super) count: usize,
}

impl Tiles {
    pub(super) fn arg(&self) -> Arg {
        Arg::read(self.block.at(), self.count * 8)
    }
}

fn as_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

impl CudaPlan {
    pub(super) fn new(
        spec: &KvSpec,
        pool: u64,
        seqs: &[SeqSpan<'_>],
        blocks: &Arc<Blocks>,
        uploads: &Uploads,
        queue: &Queue,
    ) -> Result<Self, KernelError> {
        let checked = StepPlan::new(spec, seqs)?;
        let words = arrays(&checked)?;
        let block = blocks.numbers(words.len() * 4, "the plan of a step")?;
        // SAFETY: the block is as long as the words, and all of its uses are ordered by the queue.
        unsafe { uploads.send(&as_bytes(&words), block.at(), queue, "plan")? };
        Ok(Self { checked, pool, block, bytes: words.len() * 4, tiles: Mutex::default(), stands_for_others: false })
    }

    /// A plan of the same step in a block of its own, whose arrays are not filled yet. Of what is recorded with it nobody is told which pages it touches:
    /// they are others whenever it is queued, and those of this step may be another's by then.
    pub(super) fn twin(&self, blocks: &Arc<Blocks>) -> Result<Self, KernelError> {
        let StepPlan { spec, spans, positions } = &self.checked;
        let checked = StepPlan { spec: *spec, spans: spans.clone(), positions: positions.clone() };
        let block = blocks.take(self.block.bytes(), "the plan of a step")?;
        Ok(Self {
            checked,
            pool: self.pool,
            block,
            bytes: self.bytes,
            tiles: Mutex::default(),
            stands_for_others: true,
        })
    }

    /// Where the arrays lie, and how long they are.
    pub(super) fn arrays(&self) -> (DevicePtr, usize) {
        (self.block.at(), self.bytes)
    }

    /// Bytes that the arrays may grow to without another block.
    pub(super) fn capacity(&self) -> usize {
        self.block.bytes()
    }

    pub(super) fn rows(&self) -> usize {
        self.checked.positions.len()
    }

    pub(super) fn sequences(&self) -> usize {
        self.checked.spans.len()
    }

    /// The highest position; 0 without rows.
    pub(super) fn last_position(&self) -> usize {
        self.checked.positions.iter().max().map_or(0, |position| *position as usize)
    }

    /// Whether each sequence has one row.
    pub(super) fn is_decode(&self) -> bool {
        !self.checked.spans.is_empty() && self.checked.spans.iter().all(|span| span.rows.len() == 1)
    }

    fn part(&self, first: usize, len: usize) -> Arg {
        Arg::read(self.block.at() + 4 * first as u64, 4 * len)
    }

    /// Positions of `rows` rows from `first` on.
    pub(super) fn positions(&self, first: usize, rows: usize) -> Arg {
        self.part(first, rows)
    }

    pub(super) fn slots(&self) -> Arg {
        self.part(self.rows(), self.rows())
    }

    /// Where the page tables of `rows` rows from `first` on start.
    pub(super) fn row_tables(&self, first: usize, rows: usize) -> Arg {
        self.part(2 * self.rows() + first, rows)
    }

    pub(super) fn seqs(&self) -> Arg {
        self.part(3 * self.rows(), 4 * self.sequences())
    }

    pub(super) fn tables(&self) -> Arg {
        let first = 3 * self.rows() + 4 * self.sequences();
        self.part(first, self.bytes / 4 - first)
    }

    /// Tells the pages of a layer that new keys and values go to.
    pub(super) fn written(&self, tell: &mut dyn FnMut(Touch), pool: &CudaKvPool, layer: usize) {
        if self.stands_for_others {
            return;
        }
        for span in &self.checked.spans {
            for page in &span.pages[span.start / self.checked.spec.page_tokens..] {
                pool.page(layer, *page, Access::Write).into_iter().for_each(&mut *tell);
            }
        }
    }

    /// The tiles of a kind. They are made when they are first asked for.
    pub(super) fn tiles(
        &self,
        kind: TileKind,
        blocks: &Arc<Blocks>,
        uploads: &Uploads,
        queue: &Queue,
    ) -> Result<Arc<Tiles>, KernelError> {
        let mut made = self.tiles.lock();
        if let Some((_, tiles)) = made.iter().find(|(known, _)| *known == kind) {
            return Ok(Arc::clone(tiles));
        }
        let mut words = Vec::new();
        for (index, span) in self.checked.spans.iter().enumerate() {
            if kind.decodes_too || span.rows.len() > 1 {
                let firsts = (0..span.rows.len() * kind.group).step_by(kind.pairs.max(1));
                words.extend(firsts.flat_map(|first| [index as u32, first as u32]));
            }
        }
        let block = blocks.numbers(words.len() * 4, "the tiles of a step")?;
        // SAFETY: the block is as long as the words, and all of its uses are ordered by the queue.
        unsafe { uploads.send(&as_bytes(&words), block.at(), queue, "plan")? };
        let tiles = Arc::new(Tiles { block, count: words.len() / 2 });
        made.push((kind, Arc::clone(&tiles)));
        Ok(tiles)
    }
}

/// The arrays, one after another.
fn arrays(plan: &StepPlan) -> Result<Vec<u32>, KernelError> {
    let StepPlan { spec, spans, positions } = plan;
    let slots = spec.pages.checked_mul(spec.page_tokens).filter(|slots| u32::try_from(*slots).is_ok());
    if slots.is_none() {
        let reason = format!("{} pages of {} tokens are more than 32 bits can number", spec.pages, spec.page_tokens);
        return Err(KernelError::Page { op: "plan", reason });
    }
    let mut words = positions.clone();
    let mut row_tables = Vec::with_capacity(positions.len());
    let mut seqs = Vec::with_capacity(4 * spans.len());
    let mut tables = Vec::new();
    for span in spans {
        let table = tables.len() as u32;
        for row in span.rows.clone() {
            let position = positions[row] as usize;
            let page = span.pages[position / spec.page_tokens] as usize;
            words.push((page * spec.page_tokens + position % spec.page_tokens) as u32);
            row_tables.push(table);
        }
        seqs.extend([span.rows.start as u32, span.rows.len() as u32, span.start as u32, table]);
        tables.extend_from_slice(&span.pages);
    }
    words.extend(row_tables);
    words.extend(seqs);
    words.extend(tables);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvdock_kernels::KvDtype;

    #[test]
    fn the_arrays_say_where_rows_lie() {
        let spec = KvSpec {
            layers: 1,
            kv_heads: 1,
            head_dim_k: 4,
            head_dim_v: 4,
            page_tokens: 4,
            pages: 9,
            dtype: KvDtype::F16,
        };
        let seqs = [SeqSpan { start: 3, len: 2, pages: &[5, 1, 7] }, SeqSpan { start: 8, len: 1, pages: &[2, 3, 8] }];
        let words = arrays(&StepPlan::new(&spec, &seqs).unwrap()).unwrap();
        let expected: [&[u32]; 5] =
            [&[3, 4, 8], &[5 * 4 + 3, 4, 8 * 4], &[0, 0, 2], &[0, 2, 3, 0, 2, 1, 8, 2], &[5, 1, 2, 3, 8]];
        assert_eq!(words, expected.concat());
        let large = KvSpec { pages: u32::MAX as usize, ..spec };
        let error = arrays(&StepPlan::new(&large, &seqs).unwrap()).unwrap_err().to_string();
        assert!(error.contains("32 bits"), "{error}");
    }
}
