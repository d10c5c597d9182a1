//! Whether two devices compute the same of a model.

use std::path::Path;
use std::sync::Arc;

use kvdock_kernels::{Device, KvDtype, KvPool};

use crate::{
    Batch, LoadOptions, Logits, ModelError, ModelSpec, NoHooks, PoolSet, PoolSizes, PooledBatch, PooledChunk, SeqChunk,
    Want, load,
};

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
}

/// Two prompts in chunks, then `steps` tokens each in steps of both; the second device is given the first one's choices.
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
    let (expected, choices) = follow(path, course, reference, None)?;
    let (found, _) = follow(path, course, device, Some(&choices))?;
    let mut agreement = Agreement { rows: 0, largest: 0.0, same_choice: 0, wrong_choice: 0 };
    for (expected, found) in expected.iter().zip(&found) {
        let size = expected.iter().fold(1e-6_f32, |most, logit| most.max(logit.abs()));
        let differs = |(a, b): (&f32, &f32)| {
            let difference = (a - b).abs();
            // What is no number differs most of all.
            if difference.is_nan() { f32::INFINITY } else { difference }
        };
        let largest = expected.iter().zip(found).map(differs).fold(0.0, f32::max);
        agreement.rows += 1;
        agreement.largest = agreement.largest.max(largest / size);
        let (first, lead) = leader(expected);
        if leader(found).0 == first {
            agreement.same_choice += 1;
        } else if lead > 2.0 * largest {
            agreement.wrong_choice += 1;
        }
    }
    Ok(agreement)
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

/// Rows of logits, and the token that each of the two sequences took after each of its rows.
type Followed = (Vec<Vec<f32>>, Vec<[u32; 2]>);

fn follow(
    path: &Path,
    course: &Course,
    device: Arc<dyn Device>,
    given: Option<&[[u32; 2]]>,
) -> Result<Followed, ModelError> {
    let options = LoadOptions { packed_rows: course.packed_rows, ..LoadOptions::new(Arc::clone(&device)) };
    let model = load(path, &options)?.model;
    let longest = course.prompts.iter().map(Vec::len).max().unwrap_or_default() + course.steps;
    let page_tokens = course.page_tokens.next_multiple_of(model.spec().page_multiple);
    let pages = longest.div_ceil(page_tokens) as u32;
    let memory = Memory::new(model.spec(), course, page_tokens, 2 * pages as usize, device.as_ref())?;
    // The pages of the two lie among each other, one from the front and one from the back.
    let tables: [Vec<u32>; 2] =
        [(0..pages).map(|page| 2 * page).collect(), (0..pages).map(|page| 2 * (pages - page) - 1).collect()];
    let forward = |seqs: &[(usize, &[u32], usize, Want)], logits: &mut Logits| {
        let chunks: Vec<SeqChunk<'_>> = seqs
            .iter()
            .map(|(sequence, tokens, start, logits)| SeqChunk {
                tokens,
                start: *start as u32,
                pages: &tables[*sequence],
                logits: *logits,
            })
            .collect();
        match &memory {
            Memory::One(pool) => model.forward(&Batch { seqs: &chunks }, pool.as_ref(), &NoHooks, logits),
            Memory::Many(pools) => {
                let pooled: Vec<PooledChunk<'_>> = chunks
                    .iter()
                    .zip(seqs)
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
    };
    let mut logits = Logits::new();
    let mut rows = Vec::new();
    let mut next = [0_u32; 2];
    let mut keep = |logits: &Logits| {
        for row in 0..logits.rows() {
            rows.push(logits.row(row).unwrap_or_default().to_vec());
        }
    };
    for (sequence, prompt) in course.prompts.iter().enumerate() {
        let mut start = 0;
        for chunk in prompt.chunks(course.chunk.max(1)) {
            let last = start + chunk.len() == prompt.len();
            let wanted = if last { Want::Last } else { Want::None };
            forward(&[(sequence, chunk, start, wanted)], &mut logits)?;
            start += chunk.len();
        }
        keep(&logits);
        next[sequence] = leader(logits.row(0).unwrap_or_default()).0 as u32;
    }
    let mut choices = Vec::new();
    for step in 0..course.steps {
        if let Some(given) = given.and_then(|given| given.get(step)) {
            next = *given;
        }
        choices.push(next);
        let last = |sequence: usize| {
            (sequence, std::slice::from_ref(&next[sequence]), course.prompts[sequence].len() + step, Want::Last)
        };
        forward(&[last(0), last(1)], &mut logits)?;
        keep(&logits);
        next = [0, 1].map(|row| leader(logits.row(row).unwrap_or_default()).0 as u32);
    }
    Ok((rows, choices))
}
