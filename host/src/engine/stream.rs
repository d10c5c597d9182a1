//! The events of one request.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::task::{Context, Poll};

use crossbeam_channel::Sender;
use tokio::sync::mpsc::UnboundedReceiver;

use super::handle::Command;
use super::request::{Completion, Event};

/// Events of a request, in order. Ends after every sample's `Finished`. Dropping it cancels
/// what has not finished.
pub struct RequestStream {
    id: String,
    key: u64,
    events: UnboundedReceiver<Event>,
    commands: Sender<Command>,
    ended: bool,
}

impl RequestStream {
    pub(crate) fn new(id: String, key: u64, events: UnboundedReceiver<Event>, commands: Sender<Command>) -> Self {
        Self { id, key, events, commands, ended: false }
    }

    /// Name of the request.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The next event; `None` when all samples are finished.
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.events.recv().await;
        self.ended |= event.is_none();
        event
    }

    /// [`next`](Self::next) for threads outside an async runtime.
    pub fn blocking_next(&mut self) -> Option<Event> {
        let event = self.events.blocking_recv();
        self.ended |= event.is_none();
        event
    }

    /// All samples as wholes, by index.
    pub async fn collect(mut self) -> Vec<Completion> {
        let mut parts = Parts::default();
        while let Some(event) = self.next().await {
            parts.add(event);
        }
        parts.completions
    }

    /// [`collect`](Self::collect) for threads outside an async runtime.
    pub fn blocking_collect(mut self) -> Vec<Completion> {
        let mut parts = Parts::default();
        while let Some(event) = self.blocking_next() {
            parts.add(event);
        }
        parts.completions
    }
}

impl tokio_stream::Stream for RequestStream {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let event = self.events.poll_recv(context);
        self.ended |= matches!(event, Poll::Ready(None));
        event
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if !self.ended {
            // The scheduler sees the closed channel; the command only wakes it. A scheduler that
            // has ended needs no waking.
            self.events.close();
            let _ = self.commands.send(Command::ClientGone { key: self.key });
        }
    }
}

/// Samples under way of being joined from their events.
#[derive(Default)]
pub(super) struct Parts {
    open: BTreeMap<u32, Open>,
    pub completions: Vec<Completion>,
}

#[derive(Default)]
struct Open {
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<super::TokenLogprobs>,
    prompt_logprobs: Vec<super::TokenLogprobs>,
}

impl Parts {
    pub fn add(&mut self, event: Event) {
        match event {
            Event::Prompt { index, logprobs } => {
                self.open.entry(index).or_default().prompt_logprobs = logprobs;
            }
            Event::Delta { index, text, token_ids, logprobs, .. } => {
                let open = self.open.entry(index).or_default();
                open.text.push_str(&text);
                open.token_ids.extend(token_ids);
                open.logprobs.extend(logprobs);
            }
            Event::Finished { index, reason, usage, preemptions, elapsed } => {
                let open = self.open.remove(&index).unwrap_or_default();
                let at = self.completions.partition_point(|c| c.index < index);
                let completion = Completion {
                    index,
                    text: open.text,
                    token_ids: open.token_ids,
                    logprobs: open.logprobs,
                    prompt_logprobs: open.prompt_logprobs,
                    reason,
                    usage,
                    preemptions,
                    elapsed,
                };
                self.completions.insert(at, completion);
            }
        }
    }
}
