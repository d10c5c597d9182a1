//! How a sample leaves: ended, or preempted for a while.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Scheduler;
use super::early::tables_of;
use super::sequence::{Sequence, Wait};
use crate::engine::request::{Event, FinishReason, MatchedStop};

impl Scheduler {
    /// Ends a sample: its whole pages stay in the tree unless it is broken, everything else is
    /// given back.
    pub(super) fn retire(&mut self, mut sequence: Sequence, reason: FinishReason) {
        if sequence.wait != Wait::New {
            let computed = sequence.tokens.get(..sequence.computed).unwrap_or_default();
            let tables = match sequence.early.take() {
                Some(grant) => tables_of(grant),
                None => std::mem::take(&mut sequence.tables),
            };
            if sequence.broken {
                self.parts.cache.abort(sequence.cache_id, tables);
            } else {
                self.parts.cache.finish(sequence.cache_id, computed, tables);
            }
        }
        self.report_end(sequence, reason);
    }

    /// Tells everyone that a sample has ended; the cache knows already.
    pub(super) fn report_end(&mut self, mut sequence: Sequence, reason: FinishReason) {
        self.blocked = false;
        if matches!(reason, FinishReason::Abort { .. }) {
            // What was held back as a possible stop string is output after all.
            let tail = sequence.text.finish();
            sequence.pending.text.push_str(&tail);
        }
        self.count_end(&sequence, &reason);
        trace(&sequence, &reason);
        let group = Arc::clone(&sequence.group);
        let key = group.key;
        // Its name and place are free before the client can know that it ended.
        let left = self.open.get(&key).map_or(0, |left| left.saturating_sub(1));
        if left == 0 {
            self.open.remove(&key);
            self.parts.shared.ids.lock().remove(&group.id);
        } else {
            self.open.insert(key, left);
        }
        self.parts.shared.in_flight.fetch_sub(1, Ordering::AcqRel);
        sequence.reported = true;
        // Together with the end, so that whoever waits for both is woken once.
        sequence.flush_pending();
        group.send(Event::Finished {
            index: sequence.index,
            reason,
            usage: sequence.usage,
            preemptions: sequence.preemptions,
            elapsed: group.submitted.elapsed(),
        });
        if sequence.index == 0 {
            // Where it failed before its prompt was done nobody else would let them go.
            self.release_followers(key);
        }
    }

    fn count_end(&mut self, sequence: &Sequence, reason: &FinishReason) {
        let shared = &self.parts.shared;
        let counters = &shared.counters;
        if matches!(reason, FinishReason::Abort { .. }) {
            counters.aborted.fetch_add(1, Ordering::Relaxed);
        }
        counters.e2e_latency.observe(sequence.group.submitted.elapsed().as_secs_f64());
        counters.completion_lengths.observe(sequence.usage.completion_tokens.into());
        if let Some(drain) = &mut self.drain {
            drain.count(reason);
        }
        let now = Instant::now();
        // A pause in which nothing ran says nothing about how fast samples end.
        let begun = sequence.times.admitted.unwrap_or(now);
        let since = self.last_finish.replace(now).map_or(begun, |last| last.max(begun));
        let interval = u64::try_from((now - since).as_micros()).unwrap_or(u64::MAX);
        let smoothed = shared.finish_interval_us.load(Ordering::Relaxed);
        let next = if smoothed == 0 { interval } else { (smoothed / 8) * 7 + interval / 8 };
        shared.finish_interval_us.store(next, Ordering::Relaxed);
    }

    /// Takes the pages of the running sample that came last and lets it wait again. Its whole
    /// pages stay in the tree; what is evicted of them is computed anew.
    pub(super) fn preempt_last(&mut self) {
        let Some(mut sequence) = self.running.pop() else { return };
        let computed = sequence.tokens.get(..sequence.computed).unwrap_or_default();
        let tables = std::mem::take(&mut sequence.tables);
        self.parts.cache.preempt(sequence.cache_id, computed, tables);
        tracing::debug!(request = %sequence.group.id, tokens = sequence.tokens.len(), "preempted");
        // What it holds is lost; whole pages are enough to go on from.
        sequence.slot = None;
        sequence.computed = 0;
        sequence.arrival = None;
        sequence.preemptions += 1;
        self.parts.shared.counters.preempted.fetch_add(1, Ordering::Relaxed);
        self.raise_reserve();
        self.enqueue(sequence);
    }
}

/// The one log line of a sample.
fn trace(sequence: &Sequence, reason: &FinishReason) {
    let times = &sequence.times;
    let submitted = sequence.group.submitted;
    let milliseconds = |from: Option<Instant>, to: Option<Instant>| {
        let span = from.zip(to).map(|(from, to)| to.saturating_duration_since(from));
        span.map(|span: Duration| (span.as_secs_f64() * 1e4).round() / 10.0)
    };
    let decode = times.first_token.zip(times.last_token).map(|(first, last)| last - first);
    let decoded = sequence.usage.completion_tokens.saturating_sub(1);
    let decode_rate = decode
        .filter(|span| !span.is_zero())
        .map(|span| (f64::from(decoded) / span.as_secs_f64() * 10.0).round() / 10.0);
    let why: Vec<String> = sequence.why.iter().map(ToString::to_string).collect();
    let finish = match reason {
        FinishReason::Stop(MatchedStop::Token(token)) => format!("stop (token {token})"),
        FinishReason::Stop(MatchedStop::Text(text)) => format!("stop ({text:?})"),
        FinishReason::Length { .. } => "length".to_owned(),
        FinishReason::Abort { message, .. } => format!("abort ({message})"),
    };
    tracing::info!(
        request = %sequence.group.id,
        sample = sequence.index,
        finish,
        prompt_tokens = sequence.usage.prompt_tokens,
        completion_tokens = sequence.usage.completion_tokens,
        cached_device = sequence.usage.cached_device,
        cached_host = sequence.usage.cached_host,
        cached_storage = sequence.usage.cached_storage,
        queue_ms = milliseconds(Some(submitted), times.started),
        prefill_ms = milliseconds(times.started, times.first_token),
        first_token_ms = milliseconds(Some(submitted), times.first_token),
        total_ms = milliseconds(Some(submitted), Some(Instant::now())),
        decode_tokens_per_s = decode_rate,
        preemptions = sequence.preemptions,
        why = why.join("; "),
        "request"
    );
}
