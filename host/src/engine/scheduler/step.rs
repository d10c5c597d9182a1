//! One forward pass over the next tokens of the running samples.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdock_models::{Batch, PooledBatch, PooledChunk, SeqChunk, StateSave, Want};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::Scheduler;
use super::arrive::{Gated, Gates};
use super::sequence::{Sequence, Wait};
use crate::engine::memory::{ModelMemory, Slot};
use crate::engine::request::{AbortKind, FinishReason};

/// Most logits that prompt log-probabilities may ask for in one chunk, so that a large
/// vocabulary does not take much memory.
const PROMPT_LOGITS: usize = 1 << 24;

/// Steps after which admission is tried again though no page is known to have come free.
const STEPS_BLOCKED: u64 = 32;

/// How long a sample that is alone may wait for pages that copies hold.
const STALL_LIMIT: Duration = Duration::from_secs(30);

/// Tokens of a prompt between recurrent states that are saved for whoever shares a part of it.
const STATE_SPACING: usize = 1024;

/// States that a chunk leaves.
type Saves = SmallVec<[StateSave; 4]>;

/// The part of a sample that a step computes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chunk {
    /// Its place in `running`.
    pub slot: usize,
    /// First position.
    pub start: usize,
    /// One past the last position.
    pub end: usize,
    pub want: Want,
    /// Nothing of it is kept.
    pub void: bool,
}

impl Chunk {
    /// Rows of logits it yields.
    pub fn rows(&self) -> usize {
        match self.want {
            Want::None => 0,
            Want::Last => 1,
            Want::All => self.end - self.start,
        }
    }
}

impl Scheduler {
    /// Runs a forward pass if there is anything to compute; says whether there was.
    pub(super) fn step(&mut self) -> bool {
        self.settle_arrivals();
        let mut chunks = self.plan();
        if chunks.is_empty() {
            return false;
        }
        let steps = self.parts.shared.counters.steps.fetch_add(1, Ordering::Relaxed);
        if steps.is_multiple_of(STEPS_BLOCKED) {
            // Less is set aside with every step; it may be enough for another sample by now.
            self.blocked = false;
        }
        let began = Instant::now();
        match self.forward(&chunks) {
            Ok(Pass::GivenUp) => self.park(&chunks),
            Ok(Pass::Done) => {
                self.report_prefill(&chunks, began.elapsed());
                self.judge(&mut chunks);
                self.relax_reserve();
                self.take_output(&chunks);
            }
            Err(message) => self.fail(&chunks, &message),
        }
        true
    }

    /// Tells the cache how fast prompts are computed: what loading from storage is compared with.
    fn report_prefill(&mut self, chunks: &[Chunk], took: Duration) {
        let arrives = |chunk: &Chunk| self.running.get(chunk.slot).is_some_and(|sequence| sequence.arrival.is_some());
        if chunks.iter().any(arrives) {
            // A part of the time it waited for storage.
            return;
        }
        let tokens = |chunk: &Chunk| chunk.end - chunk.start;
        let prefill: usize = chunks.iter().map(tokens).filter(|&tokens| tokens > 1).sum();
        let all: usize = chunks.iter().map(tokens).sum();
        if prefill > 0 {
            self.token_seconds = took.as_secs_f64() / all as f64;
        }
        self.parts.cache.prefilled(prefill, all - prefill, took);
    }

    /// Chooses the tokens of the next step and gets pages for them. Decoding samples get one
    /// token each; what is left of `prefill_chunk` goes to prompts in order of service.
    fn plan(&mut self) -> Vec<Chunk> {
        let mut chunks = Vec::with_capacity(self.running.len());
        let mut prefill = self.parts.config.prefill_chunk;
        let mut slot = 0;
        while let Some(sequence) = self.running.get(slot) {
            let decoding = sequence.is_decoding();
            let tokens = if decoding { 1 } else { sequence.uncomputed().min(prefill) };
            let tokens = self.bounded_by_windows(sequence, self.bounded_by_rows(sequence, tokens));
            if tokens == 0 || !self.may_join(sequence, tokens) {
                slot += 1;
                continue;
            }
            let (start, end) = (sequence.computed, sequence.computed + tokens);
            let want = wanted_rows(sequence, end);
            match self.provide_pages(slot, end) {
                Pages::Provided => {
                    chunks.push(Chunk { slot, start, end, want, void: false });
                    if !decoding {
                        prefill -= tokens;
                    }
                    slot += 1;
                }
                // The sample in this slot has left it.
                Pages::Preempted => {}
                Pages::Stalled => slot += 1,
            }
        }
        chunks
    }

    /// Keeps the rows of prompt log-probabilities within bounds.
    fn bounded_by_rows(&self, sequence: &Sequence, tokens: usize) -> usize {
        if sequence.next_prompt_row().is_none_or(|row| row >= sequence.computed + tokens) {
            return tokens;
        }
        let vocab = self.parts.shared.limits.vocab_size.max(1);
        tokens.min((PROMPT_LOGITS / vocab).max(1))
    }

    /// Keeps a chunk within the window pages that there are, one page at least.
    fn bounded_by_windows(&self, sequence: &Sequence, tokens: usize) -> usize {
        let Some(available) = self.parts.cache.available_windows() else { return tokens };
        let most = (sequence.tables.windows.len() + available) * self.page_size;
        tokens.min(most.saturating_sub(sequence.computed).max(1))
    }

    /// Gives the sample in `slot` pages for `end` tokens. Where the pool is full, the youngest
    /// running sample makes room, which may be this one.
    fn provide_pages(&mut self, slot: usize, end: usize) -> Pages {
        let needed = self.pages_for(end);
        loop {
            let Some(sequence) = self.running.get_mut(slot) else { return Pages::Preempted };
            let missing = needed.saturating_sub(sequence.tables.pages.len());
            let windowless = if self.windows { needed.saturating_sub(sequence.tables.windows.len()) } else { 0 };
            if missing == 0 && windowless == 0 {
                self.stalled = None;
                return Pages::Provided;
            }
            let cache = &mut self.parts.cache;
            let (table, fresh) = match missing {
                0 => (&mut sequence.tables.windows, cache.alloc_windows(windowless)),
                _ => (&mut sequence.tables.pages, cache.alloc_pages(missing)),
            };
            if let Some(mut pages) = fresh {
                table.append(&mut pages);
                continue;
            }
            if self.give_back_early() {
                continue;
            }
            if self.running.len() == 1 {
                return self.stall(needed);
            }
            let last = self.running.len() - 1;
            self.preempt_last();
            if last == slot {
                return Pages::Preempted;
            }
        }
    }

    /// The only running sample finds no page. Copies that end or samples that are loading may
    /// still give some back; after a while it is given up.
    fn stall(&mut self, needed: usize) -> Pages {
        let since = *self.stalled.get_or_insert_with(Instant::now);
        if since.elapsed() < STALL_LIMIT {
            self.cancel_loads();
            return Pages::Stalled;
        }
        self.stalled = None;
        if let Some(sequence) = self.running.pop() {
            let message = format!(
                "{needed} pages are needed, {} of {} in the device pool are free and none came \
                 free in {} s",
                self.parts.cache.available_pages() + sequence.tables.pages.len(),
                self.parts.cache.device_pages(),
                STALL_LIMIT.as_secs()
            );
            tracing::error!(request = %sequence.group.id, "{message}");
            self.retire(sequence, FinishReason::Abort { kind: AbortKind::Internal, message });
        }
        Pages::Preempted
    }

    /// Takes back the pages into which waiting samples are being loaded.
    fn cancel_loads(&mut self) {
        let loading: Vec<Sequence> = self.waiting.extract_if(.., |sequence| sequence.wait == Wait::Loading).collect();
        for sequence in loading {
            self.parts.cache.preempt(sequence.cache_id, &[], Vec::new());
            self.enqueue(sequence);
        }
    }

    fn forward(&mut self, chunks: &[Chunk]) -> Result<Pass, String> {
        let now = Instant::now();
        for chunk in chunks {
            if let Some(sequence) = self.running.get_mut(chunk.slot)
                && sequence.times.started.is_none()
            {
                sequence.times.started = Some(now);
                let queued = now - sequence.group.submitted;
                self.parts.shared.counters.queue_time.observe(queued.as_secs_f64());
            }
        }
        let saves: Vec<Saves> = match self.parts.pool.is_recurrent() {
            true => chunks.iter().map(|chunk| self.saves(chunk)).collect(),
            false => Vec::new(),
        };
        let mut seqs = Vec::with_capacity(chunks.len());
        for (place, chunk) in chunks.iter().enumerate() {
            let sequence = self.running.get(chunk.slot).ok_or("a chunk without its sample")?;
            seqs.push(PooledChunk {
                tokens: sequence.tokens.get(chunk.start..chunk.end).ok_or("a chunk past its end")?,
                start: u32::try_from(chunk.start).map_err(|_| "a position past u32")?,
                logits: chunk.want,
                pages: &sequence.tables.pages,
                window: &sequence.tables.windows,
                slot: sequence.slot.as_ref().map(Slot::number),
                save: saves.get(place).map_or(&[], |saves| saves),
            });
        }
        let gated = |chunk: &Chunk| {
            let sequence = self.running.get(chunk.slot)?;
            let load = &sequence.arrival.as_ref()?.load;
            Some(Gated { load, state: load.state_slot().zip(sequence.slot.as_ref().map(Slot::number)) })
        };
        let loads: Vec<_> = chunks.iter().filter_map(gated).collect();
        let gates = Gates {
            others: loads.len() < chunks.len(),
            waiting: !self.waiting.is_empty(),
            loads,
            memory: &self.parts.pool,
            states_from: Mutex::new(0),
            mailbox: &self.parts.mailbox,
            wake_pending: &self.parts.wake_pending,
            late: AtomicBool::new(false),
        };
        let stay = self.device_may_choose(chunks);
        let (model, pool, logits) = (&self.parts.model, &self.parts.pool, &mut self.logits);
        logits.stay_on_device(stay);
        // What a panic may leave half done is the logits and the pages and slots of these chunks; none
        // is used afterwards.
        let passed = catch_unwind(AssertUnwindSafe(|| match pool {
            ModelMemory::One(pool) => {
                let seqs: Vec<SeqChunk<'_>> = seqs.iter().map(plain).collect();
                model.forward(&Batch { seqs: &seqs }, pool.as_ref(), &gates, logits)
            }
            ModelMemory::Pools(pools) => model.forward_pools(&PooledBatch { seqs: &seqs }, pools, &gates, logits),
        }));
        let failure = match passed {
            Ok(Ok(())) => return Ok(Pass::Done),
            Ok(Err(error)) => format!("the forward pass failed: {error}"),
            Err(panic) => format!("the forward pass panicked: {}", panic_text(panic.as_ref())),
        };
        // What a pass does on pages that are not right says nothing about its samples.
        if gates.late.load(Ordering::Relaxed) || gates.is_doubtful() { Ok(Pass::GivenUp) } else { Err(failure) }
    }

    /// Which recurrent states a chunk leaves on its way, as far as there are slots: where the prompt can be taken up again, where another
    /// sample could have gone on, now and then in a long prompt; and after its last page, for what goes on from all of it.
    fn saves(&mut self, chunk: &Chunk) -> Saves {
        let page_size = self.page_size;
        let whole = |tokens: usize| tokens / page_size * page_size;
        let mut saves = Saves::new();
        let Some(sequence) = self.running.get_mut(chunk.slot) else { return saves };
        let end = whole(chunk.end);
        let inside = |point: usize| point > chunk.start && point <= chunk.end;
        let again = whole(sequence.prompt_len.saturating_sub(1));
        let spaced = end >= sequence.saved + STATE_SPACING && end < again;
        let mut points: SmallVec<[usize; 4]> = SmallVec::from_slice(&[again, sequence.branch.unwrap_or(0)]);
        points.extend(spaced.then_some(end));
        points.retain(|point| inside(*point));
        points.sort_unstable();
        points.dedup();
        let cache = &mut self.parts.cache;
        let mut add = |point: usize, slot: u32| {
            if let Ok(tokens) = u32::try_from(point) {
                saves.push(StateSave { tokens, slot });
            }
        };
        for &point in &points {
            if let Some(slot) = cache.reserve_state(sequence.cache_id, point) {
                sequence.saved = point;
                add(point, slot);
            }
        }
        if inside(end)
            && !points.contains(&end)
            && let Some(slot) = cache.trail_state(sequence.cache_id, end)
        {
            add(end, slot);
        }
        saves
    }

    /// The pass failed: its samples end, and nothing they computed in it is kept.
    fn fail(&mut self, chunks: &[Chunk], message: &str) {
        self.parts.shared.counters.failed_steps.fetch_add(1, Ordering::Relaxed);
        tracing::error!(requests = chunks.len(), "{message}");
        for chunk in chunks.iter().rev() {
            if chunk.slot < self.running.len() {
                let mut sequence = self.running.remove(chunk.slot);
                self.parts.cache.abort(sequence.cache_id, std::mem::take(&mut sequence.tables));
                let kind = AbortKind::Internal;
                let message = message.to_owned();
                self.report_end(sequence, FinishReason::Abort { kind, message });
            }
        }
    }
}

/// A chunk for a model of one pool.
fn plain<'a>(chunk: &PooledChunk<'a>) -> SeqChunk<'a> {
    SeqChunk { tokens: chunk.tokens, start: chunk.start, pages: chunk.pages, logits: chunk.logits }
}

/// How a forward pass ended that did not fail.
enum Pass {
    Done,
    /// A layer did not come from storage. Nothing of the pass is kept.
    GivenUp,
}

/// What became of a wish for pages.
enum Pages {
    Provided,
    Preempted,
    Stalled,
}

/// Rows that a chunk up to `end` must yield.
fn wanted_rows(sequence: &Sequence, end: usize) -> Want {
    if sequence.next_prompt_row().is_some_and(|row| row < end) {
        return Want::All;
    }
    let samples = end == sequence.tokens.len() && end < sequence.max_len;
    if samples { Want::Last } else { Want::None }
}

/// What a panic said.
pub(in crate::engine) fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message")
}
