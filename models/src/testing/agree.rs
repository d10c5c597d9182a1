//! Whether two devices compute the same of a model.
//!
//! Rows that are packed in eight bits are rounded so coarsely that a difference in the last bit of an f32 now and then makes a step of one part in
//! sixteen. So with packed rows both devices attend to the same ones: after each step the second device is given the first one's, once it has been
//! seen that its own were the same or one step beside them ([`Flips`]).

mod packed;

use std::path::Path;
use std::sync::Arc;

use kvdock_kernels::{Device, KvDtype, KvPool};

use crate::{
    Batch, LoadOptions, LoadedModel, Logits, ModelError, ModelSpec, NoHooks, PoolSet, PoolSizes, PooledBatch,
    PooledChunk, SeqChunk, Want, load,
};

pub use packed::Flips;

/// What a comparison has found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Agreement {
    /// Rows of logits that were compared.
    pub rows: usize,
    /// The largest difference of two logits, relative to the largest logit of its row.
    pub largest: f32,
    /// Rows in which both choose the same token.
    pub same_choice: usize,
    /// Rows in which they do not although the first choice leads the second by more than the largest difference allows for.
    pub wrong_choice: usize,
    /// Rows of logits that were not compared, as something in their own step was rounded the other way.
    pub flipped_rows: usize,
    /// What of packed rows was rounded the other way.
    pub flips: Flips,
}

/// Two prompts in chunks, then `steps` tokens each in steps of both; the second device is given the first one's choices. With packed rows the last
/// [`SINGLE`] tokens of a prompt are steps of their own.
pub struct Course {
    /// Tokens of each prompt.
    pub prompts: [Vec<u32>; 2],
    /// Most tokens of a chunk.
    pub chunk: usize,
    /// Tokens to be chosen after each prompt.
    pub steps: usize,
    /// Tokens a page.
    pub page_tokens: usize,
    /// Element type of the pool.
    pub dtype: KvDtype,
    /// All pools of the model are used, and not only the one that plain decoders can do with.
    pub all_pools: bool,
    /// Rows are packed where the model can have them so.
    pub packed_rows: bool,
}

/// Tokens at the end of a prompt that are steps of their own where rows are packed.
pub const SINGLE: usize = 8;

/// Loads the model at `path` on both devices and compares what they compute along `course`.
///
/// # Errors
/// A model that can't be loaded or run on one of them.
pub fn agreement(
    path: &Path,
    course: &Course,
    reference: Arc<dyn Device>,
    device: Arc<dyn Device>,
) -> Result<Agreement, ModelError> {
    let mut pair = Pair {
        reference: Follower::new(path, course, reference)?,
        device: Follower::new(path, course, device)?,
        packed: course.packed_rows,
        found: Agreement {
            rows: 0,
            largest: 0.0,
            same_choice: 0,
            wrong_choice: 0,
            flipped_rows: 0,
            flips: Flips::default(),
        },
    };
    let mut next = [0_u32; 2];
    for (sequence, prompt) in course.prompts.iter().enumerate() {
        let single = if course.packed_rows { SINGLE.min(prompt.len()) } else { 0 };
        let (front, back) = prompt.split_at(prompt.len() - single);
        let mut start = 0;
        for chunk in front.chunks(course.chunk.max(1)).chain(back.chunks(1)) {
            let is_last = start + chunk.len() == prompt.len();
            let wanted = if is_last || start >= front.len() { Want::Last } else { Want::None };
            pair.step(&[(sequence, chunk, start, wanted)])?;
            start += chunk.len();
        }
        next[sequence] = pair.reference.choice(0);
    }
    for step in 0..course.steps {
        let last = |sequence: usize| {
            (sequence, std::slice::from_ref(&next[sequence]), course.prompts[sequence].len() + step, Want::Last)
        };
        pair.step(&[last(0), last(1)])?;
        next = [0, 1].map(|row| pair.reference.choice(row));
    }
    Ok(pair.found)
}

/// Both devices.
struct Pair {
    reference: Follower,
    device: Follower,
    packed: bool,
    found: Agreement,
}

/// Tokens of a sequence, the position of the first, and the logits that are wanted.
type Piece<'a> = (usize, &'a [u32], usize, Want);

impl Pair {
    fn step(&mut self, pieces: &[Piece<'_>]) -> Result<(), ModelError> {
        self.reference.forward(pieces)?;
        self.device.forward(pieces)?;
        let mut flipped = false;
        if let (true, Memory::Many(expected), Memory::Many(found)) =
            (self.packed, &self.reference.memory, &self.device.memory)
        {
            let is_chunk = pieces.iter().any(|(_, tokens, ..)| tokens.len() > 1);
            let flips = packed::align(expected, found, is_chunk)?;
            flipped = flips.flipped > 0;
            self.found.flips.add(flips);
        }
        for row in 0..self.reference.logits.rows() {
            if flipped {
                self.found.flipped_rows += 1;
            } else {
                self.found.compare(self.reference.row(row), self.device.row(row));
            }
        }
        Ok(())
    }
}

impl Agreement {
    fn compare(&mut self, expected: &[f32], found: &[f32]) {
        let size = expected.iter().fold(1e-6_f32, |most, logit| most.max(logit.abs()));
        let differs = |(a, b): (&f32, &f32)| {
            let difference = (a - b).abs();
            // What is no number differs most of all.
            if difference.is_nan() { f32::INFINITY } else { difference }
        };
        let largest = expected.iter().zip(found).map(differs).fold(0.0, f32::max);
        self.rows += 1;
        self.largest = self.largest.max(largest / size);
        let (first, lead) = leader(expected);
        if leader(found).0 == first {
            self.same_choice += 1;
        } else if lead > 2.0 * largest {
            self.wrong_choice += 1;
        }
    }
}

/// The token with the highest logit, and by how much it leads.
fn leader(logits: &[f32]) -> (usize, f32) {
    let mut best = (0, f32::NEG_INFINITY);
    let mut second = f32::NEG_INFINITY;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > best.1 {
            second = best.1;
            best = (token, *logit);
        } else if *logit > second {
            second = *logit;
        }
    }
    (best.0, best.1 - second)
}

/// What a model's cache is kept in.
enum Memory {
    One(Arc<dyn KvPool>),
    Many(PoolSet),
}

impl Memory {
    fn new(
        spec: &ModelSpec,
        course: &Course,
        page_tokens: usize,
        pages: usize,
        device: &dyn Device,
    ) -> Result<Self, ModelError> {
        if course.all_pools {
            let sizes =
                PoolSizes { page_tokens, anchor_pages: pages, window_pages: pages, slots: 2, dtype: course.dtype };
            return Ok(Self::Many(PoolSet::allocate(device, &spec.pools, sizes)?));
        }
        let kv = spec.one_pool().map_err(ModelError::Batch)?;
        Ok(Self::One(device.alloc_kv_pool(kv.pool(course.dtype, page_tokens, pages))?))
    }
}

/// A model on one device.
struct Follower {
    model: LoadedModel,
    memory: Memory,
    /// Pages of each sequence.
    tables: [Vec<u32>; 2],
    logits: Logits,
}

impl Follower {
    fn new(path: &Path, course: &Course, device: Arc<dyn Device>) -> Result<Self, ModelError> {
        let options = LoadOptions { packed_rows: course.packed_rows, ..LoadOptions::new(Arc::clone(&device)) };
        let model = load(path, &options)?;
        let spec = model.model.spec();
        let longest = course.prompts.iter().map(Vec::len).max().unwrap_or_default() + course.steps;
        let page_tokens = course.page_tokens.next_multiple_of(spec.page_multiple);
        let pages = longest.div_ceil(page_tokens) as u32;
        let memory = Memory::new(spec, course, page_tokens, 2 * pages as usize, device.as_ref())?;
        // The pages of the two lie among each other, one from the front and one from the back.
        let tables =
            [(0..pages).map(|page| 2 * page).collect(), (0..pages).map(|page| 2 * (pages - page) - 1).collect()];
        Ok(Self { model, memory, tables, logits: Logits::new() })
    }

    fn forward(&mut self, pieces: &[Piece<'_>]) -> Result<(), ModelError> {
        let Self { model, memory, tables, logits } = self;
        let model = &model.model;
        let chunks: Vec<SeqChunk<'_>> = pieces
            .iter()
            .map(|(sequence, tokens, start, logits)| SeqChunk {
                tokens,
                start: *start as u32,
                pages: &tables[*sequence],
                logits: *logits,
            })
            .collect();
        match memory {
            Memory::One(pool) => model.forward(&Batch { seqs: &chunks }, pool.as_ref(), &NoHooks, logits),
            Memory::Many(pools) => {
                let pooled: Vec<PooledChunk<'_>> = chunks
                    .iter()
                    .zip(pieces)
                    .map(|(chunk, (sequence, ..))| PooledChunk {
                        // The same numbers in another order.
                        window: &tables[1 - sequence],
                        slot: Some(*sequence as u32),
                        ..PooledChunk::from(*chunk)
                    })
                    .collect();
                model.forward_pools(&PooledBatch { seqs: &pooled }, pools, &NoHooks, logits)
            }
        }
    }

    fn row(&self, row: usize) -> &[f32] {
        self.logits.row(row).unwrap_or_default()
    }

    /// The token that follows by the logits of a row.
    fn choice(&self, row: usize) -> u32 {
        leader(self.row(row)).0 as u32
    }
}
