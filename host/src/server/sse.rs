//! Server-sent events: framing, and the pump from the engine to a client.

use std::convert::Infallible;
use std::ops::ControlFlow;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{StreamExt, StreamMap};

use crate::engine::{Event, RequestStream};

/// Frames that may wait for a slow client before the pump waits too.
const BACKLOG: usize = 64;
/// Bytes that may wait for a slow client. A larger frame waits alone.
const BACKLOG_BYTES: usize = 1 << 20;

/// Frames under way to a client.
#[derive(Debug, Default)]
pub(super) struct Frames(Vec<u8>);

impl Frames {
    /// Appends `data: {json}` and a blank line.
    pub(super) fn json(&mut self, value: &Value) {
        self.0.extend_from_slice(b"data: ");
        // JSON text has no line breaks, so one value is always one frame.
        if serde_json::to_writer(&mut self.0, value).is_err() {
            self.0.extend_from_slice(b"null");
        }
        self.0.extend_from_slice(b"\n\n");
    }

    /// Appends the frame that ends a stream.
    pub(super) fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn take(&mut self) -> Option<Bytes> {
        (!self.0.is_empty()).then(|| Bytes::from(std::mem::take(&mut self.0)))
    }

    #[cfg(test)]
    pub(super) fn text(&self) -> String {
        String::from_utf8(self.0.clone()).expect("JSON is UTF-8")
    }
}

/// Turns the events of a request into frames.
pub(super) trait Chunks: Send + 'static {
    /// Takes an event of the prompt with this number. `Break` ends the stream, without `finish`.
    fn event(&mut self, prompt: usize, event: Event, out: &mut Frames) -> ControlFlow<()>;

    /// All prompts have ended well.
    fn finish(&mut self, out: &mut Frames);
}

/// A streaming answer. Requests are cancelled when the client leaves.
pub(super) fn respond(streams: Vec<RequestStream>, mut chunks: impl Chunks) -> Response {
    let (sender, receiver) = mpsc::channel::<(Bytes, OwnedSemaphorePermit)>(BACKLOG);
    let room = Arc::new(Semaphore::new(BACKLOG_BYTES));
    tokio::spawn(async move {
        let mut streams: StreamMap<usize, RequestStream> = streams.into_iter().enumerate().collect();
        let mut out = Frames::default();
        loop {
            let flow = tokio::select! {
                biased;
                // The body was dropped: the client has left. Dropping the streams cancels.
                () = sender.closed() => return,
                next = streams.next() => match next {
                    Some((prompt, event)) => chunks.event(prompt, event, &mut out),
                    None => {
                        chunks.finish(&mut out);
                        ControlFlow::Break(())
                    }
                },
            };
            if let Some(frames) = out.take() {
                let bytes = u32::try_from(frames.len().min(BACKLOG_BYTES)).unwrap_or(u32::MAX);
                // The body drops what waits in it when the client leaves, which also ends this wait.
                let Ok(share) = room.clone().acquire_many_owned(bytes).await else { return };
                if sender.send((frames, share)).await.is_err() {
                    return;
                }
            }
            if flow.is_break() {
                return;
            }
        }
    });
    let body = Body::from_stream(ReceiverStream::new(receiver).map(|(frames, _share)| Ok::<_, Infallible>(frames)));
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that buffer answers are asked not to.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_value_is_one_frame_whatever_it_holds() {
        let mut frames = Frames::default();
        frames.json(&json!({"text": "a\n\ndata: b\r"}));
        frames.done();
        assert_eq!(frames.text(), "data: {\"text\":\"a\\n\\ndata: b\\r\"}\n\ndata: [DONE]\n\n");
        assert!(frames.take().is_some());
        assert!(frames.take().is_none());
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_holds_a_bounded_number_of_bytes() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        use tokio_stream::Stream as _;

        let (sender, receiver) = mpsc::channel::<(Bytes, OwnedSemaphorePermit)>(BACKLOG);
        let room = Arc::new(Semaphore::new(BACKLOG_BYTES));
        let sent = Arc::new(AtomicUsize::new(0));
        let counted = sent.clone();
        let pump = tokio::spawn(async move {
            // Each frame is larger than all the room there is.
            for _ in 0..8 {
                let frames = Bytes::from(vec![b'x'; BACKLOG_BYTES * 2]);
                let bytes = u32::try_from(frames.len().min(BACKLOG_BYTES)).unwrap();
                let share = room.clone().acquire_many_owned(bytes).await.unwrap();
                sender.send((frames, share)).await.unwrap();
                counted.fetch_add(1, Ordering::SeqCst);
            }
        });
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        assert_eq!(sent.load(Ordering::SeqCst), 1, "one frame waits, the next one is not even queued");
        let mut body = ReceiverStream::new(receiver).map(|(frames, _share)| frames);
        assert!(body.size_hint().0 <= BACKLOG);
        let mut got = 0;
        while let Some(frames) = body.next().await {
            got += frames.len();
        }
        assert_eq!(got, 16 * BACKLOG_BYTES);
        pump.await.unwrap();
    }
}
