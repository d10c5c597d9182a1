//! What the scheduler is told from outside.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::sequence::{Group, Pending, Sequence, Times, Wait};
use super::{Scheduler, insert};
use crate::cache::PageTables;
use crate::engine::handle::{Command, Submission};
use crate::engine::request::{AbortKind, Event, FinishReason, Usage};
use crate::engine::text::OutputText;

impl Scheduler {
    pub(super) fn handle(&mut self, command: Command) {
        // Whoever asked may have stopped waiting for the answer.
        match command {
            Command::Submit(submission) => self.take(*submission),
            Command::ClientGone { key } => {
                self.abort_where(|group| group.key == key, AbortKind::ClientGone, "the client left");
            }
            Command::Wake => {
                self.parts.wake_pending.store(false, Ordering::Release);
                self.blocked = false;
            }
            Command::Abort { id, reply } => {
                let message = "aborted on request";
                let count = self.abort_where(|group| group.id == id, AbortKind::Requested, message);
                let _ = reply.send(count > 0);
            }
            Command::AbortAll { reply } => {
                let open = self.open.len();
                self.abort_where(|_| true, AbortKind::Requested, "aborted on request");
                let _ = reply.send(open);
            }
            Command::Flush { tiers, reply } => {
                self.blocked = false;
                let _ = reply.send(self.parts.cache.flush(tiers));
            }
            Command::Drain { deadline, reply } => self.begin_drain(deadline, reply),
            Command::CheckIntegrity { reply } => {
                let _ = reply.send(self.check_integrity());
            }
        }
    }

    /// Turns a submission into samples. The first of several computes the prompt; the others
    /// wait for it, so that they find its pages in the tree.
    fn take(&mut self, submission: Submission) {
        if self.drain.is_some() {
            self.refuse(submission, AbortKind::ShuttingDown, "the server is shutting down");
            return;
        }
        let Submission { key, mut request, seed, events, submitted } = submission;
        let tokens = std::mem::take(&mut request.prompt_ids);
        let group = Arc::new(Group::new(key, &mut request, events, submitted));
        self.open.insert(key, group.samples);
        for index in 0..group.samples {
            let sequence = self.sequence(&group, index, seed, tokens.clone());
            if index == 0 {
                self.enqueue(sequence);
            } else {
                self.followers.push(sequence);
            }
        }
    }

    fn sequence(&mut self, group: &Arc<Group>, index: u32, seed: i64, tokens: Vec<u32>) -> Sequence {
        let params = &group.sampling;
        let limits = &self.parts.shared.limits;
        let prompt_len = tokens.len();
        let room = limits.context_length.min(limits.pool_tokens).max(prompt_len);
        let max_len = params.max_new_tokens.map_or(room, |new| room.min(prompt_len.saturating_add(new as usize)));
        let mut stop_tokens = params.stop_token_ids.clone();
        if !params.ignore_eos {
            stop_tokens.extend(&self.parts.model.spec().eos);
        }
        let decoder = (self.parts.decoders)(params.skip_special_tokens);
        let cache_id = self.next_cache_id;
        self.next_cache_id += 1;
        Sequence {
            text: OutputText::new(decoder, params, stop_tokens),
            group: Arc::clone(group),
            index,
            cache_id,
            seed: seed.wrapping_add(index.into()),
            tokens,
            prompt_len,
            max_len,
            computed: 0,
            tables: PageTables::default(),
            early: None,
            arrival: None,
            slot: None,
            branch: None,
            saved: 0,
            wait: Wait::New,
            generated: HashMap::new(),
            prompt_logprobs: Vec::new(),
            prompt_told: false,
            pending: Pending::default(),
            usage: Usage { prompt_tokens: u32::try_from(prompt_len).unwrap_or(u32::MAX), ..Usage::default() },
            why: Vec::new(),
            preemptions: 0,
            times: Times::default(),
            ended: None,
            broken: false,
            reported: false,
        }
    }

    /// Makes a sample known to the cache, which may begin to fetch, and lets it wait its turn.
    pub(super) fn enqueue(&mut self, mut sequence: Sequence) {
        self.parts.cache.begin(sequence.cache_id, &sequence.tokens, &sequence.group.namespace, &sequence.hints());
        sequence.wait = Wait::Prefetch;
        insert(&mut self.waiting, sequence);
    }

    /// Answers a submission that cannot be taken any more.
    pub(super) fn refuse(&mut self, submission: Submission, kind: AbortKind, message: &str) {
        let Submission { request, events, submitted, .. } = submission;
        let shared = &self.parts.shared;
        for index in 0..request.n {
            let reason = FinishReason::Abort { kind, message: message.to_owned() };
            let usage = Usage::default();
            let elapsed = submitted.elapsed();
            let _ = events.send(Event::Finished { index, reason, usage, preemptions: 0, elapsed });
        }
        shared.ids.lock().remove(&request.id);
        shared.in_flight.fetch_sub(request.n as usize, Ordering::AcqRel);
    }

    /// Aborts the samples of some requests and says how many there were.
    pub(super) fn abort_where(&mut self, which: impl Fn(&Group) -> bool, kind: AbortKind, message: &str) -> usize {
        let mut leaving = Vec::new();
        for list in [&mut self.running, &mut self.waiting, &mut self.followers] {
            leaving.extend(list.extract_if(.., |sequence| which(&sequence.group)));
        }
        let count = leaving.len();
        for sequence in leaving {
            let reason = FinishReason::Abort { kind, message: message.to_owned() };
            self.retire(sequence, reason);
        }
        count
    }

    /// Aborts samples whose stream was dropped.
    pub(super) fn drop_gone(&mut self) {
        let all = self.running.iter().chain(&self.waiting).chain(&self.followers);
        if all.into_iter().any(|sequence| sequence.group.client_gone()) {
            self.abort_where(Group::client_gone, AbortKind::ClientGone, "the client left");
        }
    }

    fn check_integrity(&mut self) -> Result<(), String> {
        for sequence in &self.running {
            let (held, needed) = (sequence.tables.pages.len(), self.pages_for(sequence.computed));
            if held < needed {
                return Err(format!(
                    "request {:?}: {} computed tokens need {needed} pages, it holds {held}",
                    sequence.group.id, sequence.computed
                ));
            }
        }
        for sequence in self.waiting.iter().chain(&self.followers) {
            if !sequence.tables.pages.is_empty() {
                return Err(format!(
                    "request {:?} waits and holds {} pages",
                    sequence.group.id,
                    sequence.tables.pages.len()
                ));
            }
        }
        let samples = self.running.len() + self.waiting.len() + self.followers.len();
        let open: usize = self.open.values().map(|&left| left as usize).sum();
        if samples != open {
            return Err(format!("{samples} samples are held, but {open} are open"));
        }
        self.parts.cache.check_integrity()
    }
}
