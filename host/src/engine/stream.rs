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
    /// Samples that have not finished.
    left: u32,
}

impl RequestStream {
    /// The events of a request of `samples` samples.
    pub(crate) fn new(
        id: String,
        key: u64,
        samples: u32,
        events: UnboundedReceiver<Event>,
        commands: Sender<Command>,
    ) -> Self {
        Self { id, key, events, commands, left: samples }
    }

    /// Name of the request.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The next event; `None` when all samples are finished.
    pub async fn next(&mut self) -> Option<Event> {
        if self.left == 0 {
            return None;
        }
        let event = self.events.recv().await;
        self.count(event)
    }

    /// [`next`](Self::next) for threads outside an async runtime.
    pub fn blocking_next(&mut self) -> Option<Event> {
        if self.left == 0 {
            return None;
        }
        let event = self.events.blocking_recv();
        self.count(event)
    }

    /// Notes what an event says of the end. Whoever waits need not be woken once more to see that nothing else comes.
    fn count(&mut self, event: Option<Event>) -> Option<Event> {
        match event {
            Some(Event::Finished { .. }) => self.left = self.left.saturating_sub(1),
            None => self.left = 0,
            _ => {}
        }
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
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.events.poll_recv(context).map(|event| self.count(event))
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if self.left > 0 {
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

#[cfg(test)]
mod tests {
    use std::task::Waker;
    use std::time::Duration;

    use tokio_stream::Stream;

    use super::*;
    use crate::engine::request::{FinishReason, Usage};

    fn end(index: u32) -> Event {
        let reason = FinishReason::Length { length: 0 };
        Event::Finished { index, reason, usage: Usage::default(), preemptions: 0, elapsed: Duration::ZERO }
    }

    #[test]
    fn the_last_end_ends_a_stream_whoever_could_still_send() {
        let (events, receiver) = tokio::sync::mpsc::unbounded_channel();
        let (commands, told) = crossbeam_channel::unbounded();
        let mut stream = RequestStream::new("a".to_owned(), 1, 2, receiver, commands);
        let next = |stream: &mut RequestStream| {
            let context = &mut Context::from_waker(Waker::noop());
            Pin::new(stream).poll_next(context).map(|event| event.is_some())
        };
        events.send(end(1)).unwrap();
        assert_eq!(next(&mut stream), Poll::Ready(true));
        assert_eq!(next(&mut stream), Poll::Pending, "another sample runs");
        events.send(end(0)).unwrap();
        assert_eq!(next(&mut stream), Poll::Ready(true));
        assert_eq!(next(&mut stream), Poll::Ready(false));
        assert_eq!(stream.blocking_next().map(drop), None);
        drop(stream);
        assert!(told.try_recv().is_err(), "nothing is left to cancel");
    }

    #[test]
    fn a_stream_that_is_dropped_before_its_last_end_cancels_the_rest() {
        let (events, receiver) = tokio::sync::mpsc::unbounded_channel();
        let (commands, told) = crossbeam_channel::unbounded();
        let mut stream = RequestStream::new("a".to_owned(), 7, 2, receiver, commands);
        events.send(end(0)).unwrap();
        assert!(stream.blocking_next().is_some());
        drop(stream);
        assert!(matches!(told.try_recv(), Ok(Command::ClientGone { key: 7 })));
        assert!(events.is_closed());
    }
}
