//! A batch whose rules have been checked, and the output matrix for the rows that want logits.

use std::ops::Range;

use kvdock_kernels::{Buf, Device, Projection, SeqSpan, Weight};

use super::share::Share;
use crate::logits::Target;
use crate::{ModelError, ModelSpec, NO_PAGE, PageSource, PoolDecl, PoolSet, PooledChunk, Want};

/// Rows of logits computed at a time: bounds the buffer, changes no bit.
pub(crate) const HEAD_ROWS: usize = 64;

/// One sequence of a step.
pub(crate) struct Seq<'a> {
    pub(crate) chunk: PooledChunk<'a>,
    /// Its first row.
    pub(crate) first: usize,
}

impl Seq<'_> {
    /// Rows of the step, with their positions.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (usize, u32)> + use<> {
        let (first, start) = (self.first, self.chunk.start);
        (0..self.chunk.tokens.len()).map(move |i| (first + i, start + i as u32))
    }
}

/// A checked batch.
pub(crate) struct Step<'a> {
    /// Token ids of all rows.
    pub(crate) ids: Vec<u32>,
    pub(crate) seqs: Vec<Seq<'a>>,
    /// Rows that want logits, ascending.
    pub(crate) wanted: Vec<u32>,
}

/// What the pools ask of a batch.
pub(crate) struct Rules<'a> {
    pub(crate) spec: &'a ModelSpec,
    pub(crate) page_tokens: usize,
    /// Page counts of the sources that the model's pools use.
    pub(crate) pools: Option<&'a PoolSet>,
    /// Tokens before a chunk whose window pages must be there.
    pub(crate) window: usize,
}

impl<'a> Step<'a> {
    pub(crate) fn check(chunks: &[PooledChunk<'a>], rules: &Rules<'_>) -> Result<Self, ModelError> {
        let mut step = Step { ids: Vec::new(), seqs: Vec::with_capacity(chunks.len()), wanted: Vec::new() };
        for (index, chunk) in chunks.iter().enumerate() {
            check_chunk(chunk, rules).map_err(|why| ModelError::Batch(format!("sequence {index}: {why}")))?;
            let first = step.ids.len();
            step.ids.extend_from_slice(chunk.tokens);
            step.seqs.push(Seq { chunk: *chunk, first });
            let from = match chunk.logits {
                Want::None => continue,
                Want::Last => chunk.tokens.len() - 1,
                Want::All => 0,
            };
            step.wanted.extend((first + from) as u32..(first + chunk.tokens.len()) as u32);
        }
        rules.check_writers(chunks)?;
        Ok(step)
    }

    /// The rows `rows` of this step, as a step of their own.
    pub(crate) fn part(&self, rows: &Range<usize>) -> Step<'a> {
        let mut part = Step { ids: self.ids[rows.clone()].to_vec(), seqs: Vec::new(), wanted: Vec::new() };
        for seq in &self.seqs {
            let tokens = seq.chunk.tokens;
            let (begin, end) = (rows.start.max(seq.first), rows.end.min(seq.first + tokens.len()));
            if begin >= end {
                continue;
            }
            let (from, to) = (begin - seq.first, end - seq.first);
            let logits = match seq.chunk.logits {
                Want::Last if to < tokens.len() => Want::None,
                other => other,
            };
            let start = seq.chunk.start + from as u32;
            let chunk = PooledChunk { tokens: &tokens[from..to], start, logits, ..seq.chunk };
            part.seqs.push(Seq { chunk, first: begin - rows.start });
        }
        let wanted = self.wanted.iter().filter(|row| rows.contains(&(**row as usize)));
        part.wanted.extend(wanted.map(|row| row - rows.start as u32));
        part
    }

    /// Rows of the step.
    pub(crate) fn rows(&self) -> usize {
        self.ids.len()
    }

    /// The spans of a pool addressed by `source`. Pages that were freed stand for the sequence's last page: they are
    /// not seen, but a plan wants a page of the pool.
    pub(crate) fn spans<'b>(&'b self, source: PageSource, tables: &'b mut Vec<Vec<u32>>) -> Vec<SeqSpan<'b>> {
        tables.clear();
        tables.extend(self.seqs.iter().map(|seq| {
            let table = if source == PageSource::Window { seq.chunk.window } else { seq.chunk.pages };
            let last = table.iter().rev().find(|page| **page != NO_PAGE).copied().unwrap_or_default();
            table.iter().map(|page| if *page == NO_PAGE { last } else { *page }).collect()
        }));
        self.seqs
            .iter()
            .zip(tables.iter())
            .map(|(seq, pages)| SeqSpan { start: seq.chunk.start, len: seq.chunk.tokens.len() as u32, pages })
            .collect()
    }
}

/// Pools are those of the declarations, or no pass runs over them.
pub(crate) fn check_pools(declared: &[PoolDecl], pools: &PoolSet) -> Result<(), ModelError> {
    if declared == pools.decls() {
        return Ok(());
    }
    Err(ModelError::Batch("the pools are not those that the model declares".to_owned()))
}

impl Rules<'_> {
    fn uses(&self, source: PageSource) -> bool {
        self.pools.is_some_and(|pools| pools.decls().iter().any(|decl| decl.source == source))
    }

    /// Two writers of a page or a slot would overwrite each other's tokens.
    fn check_writers(&self, chunks: &[PooledChunk<'_>]) -> Result<(), ModelError> {
        let written = |chunk: &PooledChunk<'_>, table: &[u32]| {
            let first = chunk.start as usize / self.page_tokens;
            let end = (chunk.start as usize + chunk.tokens.len()).div_ceil(self.page_tokens);
            table.get(first..end).unwrap_or_default().to_vec()
        };
        for source in [PageSource::Anchor, PageSource::Window, PageSource::Slot] {
            if !self.uses(source) {
                continue;
            }
            let mut all: Vec<u32> = chunks
                .iter()
                .flat_map(|chunk| match source {
                    PageSource::Anchor => written(chunk, chunk.pages),
                    PageSource::Window => written(chunk, chunk.window),
                    PageSource::Slot => chunk.slot.into_iter().chain(chunk.save.iter().map(|save| save.slot)).collect(),
                })
                .collect();
            all.sort_unstable();
            if let Some(pair) = all.windows(2).find(|pair| pair[0] == pair[1]) {
                let what = match source {
                    PageSource::Anchor => "page",
                    PageSource::Window => "window page",
                    PageSource::Slot => "slot",
                };
                return Err(ModelError::Batch(format!("{what} {} is written more than once", pair[0])));
            }
        }
        Ok(())
    }
}

fn check_chunk(chunk: &PooledChunk<'_>, rules: &Rules<'_>) -> Result<(), String> {
    if chunk.tokens.is_empty() {
        return Err("no tokens".to_owned());
    }
    let (start, page_tokens) = (chunk.start as usize, rules.page_tokens);
    let end = start + chunk.tokens.len();
    let context = rules.spec.context_length;
    if end > context {
        return Err(format!("it would be {end} tokens long, the model's context holds {context}"));
    }
    if let Some(id) = chunk.tokens.iter().find(|id| **id as usize >= rules.spec.vocab_size) {
        return Err(format!("token {id} is not below the vocabulary's size, {}", rules.spec.vocab_size));
    }
    let needed = end.div_ceil(page_tokens);
    let holds = |what: &str, table: &[u32]| {
        if table.len() >= needed {
            return Ok(());
        }
        Err(format!("{} {what}pages of {page_tokens} tokens do not hold {end} tokens", table.len()))
    };
    holds("", chunk.pages)?;
    let Some(pools) = rules.pools else {
        return Ok(());
    };
    let sizes = pools.sizes();
    if rules.uses(PageSource::Anchor)
        && let Some(page) = chunk.pages[..needed].iter().find(|page| **page as usize >= sizes.anchor_pages)
    {
        return Err(format!("page {page}, but the pools have {}", sizes.anchor_pages));
    }
    if rules.uses(PageSource::Window) {
        holds("window ", chunk.window)?;
        let seen = start.saturating_sub(rules.window) / page_tokens;
        if let Some(page) = chunk.window[seen..needed].iter().find(|page| **page as usize >= sizes.window_pages) {
            return Err(format!("window page {page} of those it sees, but the pools have {}", sizes.window_pages));
        }
    }
    if rules.uses(PageSource::Slot) {
        let slots = chunk.slot.into_iter().chain(chunk.save.iter().map(|save| save.slot));
        if chunk.slot.is_none() {
            return Err("it has no slot".to_owned());
        }
        if let Some(slot) = slots.into_iter().find(|slot| *slot as usize >= sizes.slots) {
            return Err(format!("slot {slot}, but the pools have {}", sizes.slots));
        }
        if let Some(save) = chunk.save.iter().find(|save| save.tokens <= chunk.start || save.tokens as usize > end) {
            return Err(format!("a state of {} tokens, but the chunk goes from {start} to {end}", save.tokens));
        }
    }
    Ok(())
}

/// Final norm and output matrix.
pub(crate) struct Head<'a> {
    pub(crate) norm: &'a Buf,
    /// What the rank holds of the output matrix.
    pub(crate) weight: &'a Weight,
    /// Tokens of the vocabulary, over all ranks.
    pub(crate) vocab: usize,
    pub(crate) eps: f32,
    pub(crate) share: &'a Share,
}

impl Head<'_> {
    /// Logits of the rows `wanted` of the residual stream `x`.
    pub(crate) fn logits(
        &self,
        device: &dyn Device,
        x: &Buf,
        wanted: &[u32],
        out: &mut Target<'_>,
    ) -> Result<(), ModelError> {
        let (hidden, vocab) = (self.norm.len(), self.vocab);
        if wanted.is_empty() {
            return Ok(());
        }
        let rows = wanted.len().min(HEAD_ROWS);
        let (mut picked, mut normed) = (device.scratch(rows * hidden)?, device.scratch(rows * hidden)?);
        let mut logits = device.scratch(self.share.logits_len(rows, vocab))?;
        for (index, rows) in wanted.chunks(HEAD_ROWS).enumerate() {
            device.gather_rows(x, hidden, rows, &mut picked)?;
            device.rms_norm(&picked, self.norm, self.eps, rows.len(), &mut normed)?;
            let mut product = [Projection { weight: self.weight, bias: None, out: &mut logits }];
            device.linear(&normed, rows.len(), &mut product)?;
            self.share.put_logits(device, &logits, (index * HEAD_ROWS, rows.len()), vocab, out)?;
        }
        Ok(())
    }
}
