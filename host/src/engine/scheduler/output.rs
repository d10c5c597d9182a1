//! From rows of logits to tokens, events and pages in the tree.

use std::time::Instant;

use kvdock_kernels::SampleRow;
use kvdock_models::Want;

use super::Scheduler;
use super::sequence::Sequence;
use super::step::Chunk;
use crate::cache::PageTables;
use crate::engine::config::LogitsRow;
use crate::engine::request::{Event, TokenLogprobs};
use crate::engine::sampler::{DeviceDraw, Draw, chosen};

impl Scheduler {
    /// Whether nothing but the chosen tokens is asked of a pass over `chunks`: a device that chooses them itself need not
    /// hand out its logits.
    pub(super) fn device_may_choose(&self, chunks: &[Chunk]) -> bool {
        let tokens_only = |chunk: &Chunk| {
            let sequence = self.running.get(chunk.slot);
            chunk.want != Want::All && sequence.is_some_and(|sequence| !sequence.group.logprobs.output)
        };
        self.parts.config.logits_tap.is_none() && chunks.iter().all(tokens_only)
    }

    /// Lets the device choose where the pass has left its rows there.
    fn choose_on_device(&mut self, running: &[Sequence], chunks: &[Chunk]) -> Result<(), String> {
        self.chosen.clear();
        if !self.logits.is_on_device() {
            return Ok(());
        }
        let vocab = self.logits.vocab();
        let draws: Vec<DeviceDraw> = chunks
            .iter()
            .filter(|chunk| chunk.rows() > 0)
            .map(|chunk| match running.get(chunk.slot) {
                Some(sequence) if !chunk.void && chunk.end == sequence.tokens.len() => {
                    DeviceDraw::new(&draw(sequence), vocab)
                }
                _ => DeviceDraw::unwanted(),
            })
            .collect();
        let rows: Vec<SampleRow<'_>> = draws.iter().map(DeviceDraw::row).collect();
        self.chosen = self.logits.sample(&rows).map_err(|error| format!("the device chose no tokens: {error}"))?;
        Ok(())
    }

    /// Takes in what a forward pass computed for `chunks`, which are in order of their slots.
    pub(super) fn take_output(&mut self, chunks: &[Chunk]) {
        let mut running = std::mem::take(&mut self.running);
        if let Err(message) = self.choose_on_device(&running, chunks) {
            for chunk in chunks.iter().filter(|chunk| chunk.rows() > 0 && !chunk.void) {
                if let Some(sequence) = running.get_mut(chunk.slot) {
                    sequence.fail(message.clone());
                }
            }
        }
        let mut row = 0;
        let mut generated = 0;
        for chunk in chunks {
            if let Some(sequence) = running.get_mut(chunk.slot).filter(|_| !chunk.void) {
                generated += self.advance(sequence, chunk, row);
            }
            row += chunk.rows();
        }
        self.parts.shared.counters.generated(generated);
        self.running = running;
        self.retire_ended();
    }

    /// Lets go of the running samples that have ended.
    pub(super) fn retire_ended(&mut self) {
        let ended: Vec<Sequence> = self.running.extract_if(.., |sequence| sequence.ended.is_some()).collect();
        for mut sequence in ended {
            if let Some(reason) = sequence.ended.take() {
                self.retire(sequence, reason);
            }
        }
    }

    /// Moves one sample on by its chunk, whose rows begin at `first_row`. Returns the tokens
    /// generated: 0 or 1.
    fn advance(&mut self, sequence: &mut Sequence, chunk: &Chunk, first_row: usize) -> u64 {
        let whole_pages = sequence.computed / self.page_size;
        sequence.computed = chunk.end;
        self.read_prompt_logprobs(sequence, chunk, first_row);
        let samples = chunk.end == sequence.tokens.len() && chunk.end < sequence.max_len;
        let mut next = None;
        if samples && sequence.ended.is_none() {
            let last_row = first_row + chunk.rows().saturating_sub(1);
            match self.next_token(sequence, last_row) {
                Ok(token) => next = Some(token),
                Err(message) => sequence.fail(message),
            }
        }
        if sequence.ended.is_some() {
            return 0;
        }
        // Only now: pages of a pass whose logits are broken must not be found by others.
        if sequence.computed / self.page_size != whole_pages {
            self.commit(sequence);
        }
        let prompt_done = chunk.start < sequence.prompt_len && chunk.end >= sequence.prompt_len;
        if prompt_done && sequence.output_len() == 0 {
            self.prompt_done(sequence);
        }
        if let Some((token, logprobs)) = next {
            self.accept(sequence, token, logprobs);
            return 1;
        }
        if chunk.end == sequence.tokens.len() {
            sequence.ended = sequence.ended.take().or_else(|| sequence.end_after(None));
        }
        0
    }

    /// Puts the whole pages of a sample into the tree, where others find them.
    fn commit(&mut self, sequence: &mut Sequence) {
        let Sequence { cache_id, tokens, computed, tables: PageTables { pages, windows }, .. } = sequence;
        let computed = tokens.get(..*computed).unwrap_or_default();
        if let Err(error) = self.parts.cache.commit(*cache_id, computed, pages, windows) {
            sequence.fail(format!("the cache failed: {error}"));
        }
    }

    /// Reads the log-probabilities of prompt tokens that the chunk's rows predict.
    fn read_prompt_logprobs(&mut self, sequence: &mut Sequence, chunk: &Chunk, first_row: usize) {
        if chunk.want != Want::All {
            return;
        }
        while let Some(position) = sequence.next_prompt_row().filter(|&p| p < chunk.end) {
            let row = (position >= chunk.start).then(|| self.logits.row(first_row + position - chunk.start)).flatten();
            let (Some(row), Some(&token)) = (row, sequence.tokens.get(position + 1)) else {
                sequence.fail("a row of prompt log-probabilities is missing".to_owned());
                return;
            };
            if let Some(tap) = &self.parts.config.logits_tap {
                let request_id = &sequence.group.id;
                tap(&LogitsRow { request_id, index: sequence.index, position, logits: row });
            }
            let options = &sequence.group.logprobs;
            let entry = self.logprobs.read(row, token, options.top, &options.token_ids);
            sequence.prompt_logprobs.push(entry);
        }
    }

    /// The prompt is computed: its log-probabilities go out, and the samples that share it may
    /// come.
    fn prompt_done(&mut self, sequence: &mut Sequence) {
        if sequence.index != 0 || sequence.prompt_told {
            return;
        }
        sequence.prompt_told = true;
        let group = &sequence.group;
        if let Some(start) = group.logprobs.prompt_start {
            let mut logprobs = std::mem::take(&mut sequence.prompt_logprobs);
            if let (0, Some(&token_id)) = (start, sequence.tokens.first()) {
                let first = TokenLogprobs { token_id, logprob: None, top: Vec::new(), token_ids: Vec::new() };
                logprobs.insert(0, first);
            }
            for index in 1..group.samples {
                group.send(Event::Prompt { index, logprobs: logprobs.clone() });
            }
            group.send(Event::Prompt { index: 0, logprobs });
        }
        let key = group.key;
        self.release_followers(key);
    }

    /// Lets the other samples of a request join the queue.
    pub(super) fn release_followers(&mut self, key: u64) {
        let released: Vec<Sequence> = self.followers.extract_if(.., |follower| follower.group.key == key).collect();
        for follower in released {
            self.enqueue(follower);
        }
    }

    /// Chooses the token that follows the one whose logits are in `row`.
    fn next_token(&mut self, sequence: &Sequence, row: usize) -> Result<(u32, Option<TokenLogprobs>), String> {
        if let Some(sampled) = self.chosen.get(row) {
            return chosen(*sampled).map(|token| (token, None)).map_err(|error| error.to_string());
        }
        let logits = self.logits.row_mut(row).ok_or("the model returned too few rows of logits")?;
        if let Some(tap) = &self.parts.config.logits_tap {
            tap(&LogitsRow {
                request_id: &sequence.group.id,
                index: sequence.index,
                position: sequence.computed - 1,
                logits,
            });
        }
        let options = &sequence.group.logprobs;
        // Sampling changes the row, so what the model said must be kept if it is asked for.
        let original = options.output.then(|| logits.to_vec());
        let token = self.sampler.sample(logits, &draw(sequence)).map_err(|error| error.to_string())?;
        let logprobs = original.map(|row| self.logprobs.read(&row, token, options.top, &options.token_ids));
        Ok((token, logprobs))
    }

    /// Appends a token to its sample and sends what it brings.
    fn accept(&mut self, sequence: &mut Sequence, token: u32, logprobs: Option<TokenLogprobs>) {
        let now = Instant::now();
        let counters = &self.parts.shared.counters;
        match sequence.times.last_token.replace(now) {
            Some(before) => {
                counters.inter_token_latency.observe((now - before).as_secs_f64());
            }
            None => {
                sequence.times.first_token = Some(now);
                let waited = now - sequence.group.submitted;
                counters.time_to_first_token.observe(waited.as_secs_f64());
            }
        }
        sequence.tokens.push(token);
        if sequence.group.sampling.has_penalties() {
            *sequence.generated.entry(token).or_default() += 1;
        }
        let step = sequence.text.push(token);
        let mut text = step.text;
        let full = sequence.tokens.len() >= sequence.max_len;
        if step.matched.is_none() && full {
            text.push_str(&sequence.text.finish());
        }
        sequence.deliver(text, token, logprobs);
        sequence.ended = sequence.end_after(step.matched);
    }
}

/// What the choice of a sample's next token depends on.
fn draw(sequence: &Sequence) -> Draw<'_> {
    Draw {
        params: &sequence.group.sampling,
        seed: sequence.seed,
        position: sequence.tokens.len() as u64,
        generated: &sequence.generated,
        masked: sequence.text.masked(),
    }
}
