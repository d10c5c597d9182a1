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
use tokio_stream::{Stream, StreamExt, StreamMap};

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

/// The near end of what waits for a client, bounded in frames and in bytes.
struct Outlet {
    sender: mpsc::Sender<(Bytes, OwnedSemaphorePermit)>,
    room: Arc<Semaphore>,
}

/// An outlet, and what comes out of it.
fn outlet() -> (Outlet, impl Stream<Item = Bytes>) {
    let (sender, receiver) = mpsc::channel(BACKLOG);
    let out = ReceiverStream::new(receiver).map(|(frames, _share)| frames);
    (Outlet { sender, room: Arc::new(Semaphore::new(BACKLOG_BYTES)) }, out)
}

impl Outlet {
    /// Waits until there is room, and sends. False when the client has left: its end drops what waits, which also ends the wait here.
    async fn send(&self, frames: Bytes) -> bool {
        let bytes = u32::try_from(frames.len().min(BACKLOG_BYTES)).unwrap_or(u32::MAX);
        match self.room.clone().acquire_many_owned(bytes).await {
            Ok(share) => self.sender.send((frames, share)).await.is_ok(),
            Err(_) => false,
        }
    }

    /// Waits until the client has left.
    async fn closed(&self) {
        self.sender.closed().await;
    }
}

/// A streaming answer. Requests are cancelled when the client leaves.
pub(super) fn respond(streams: Vec<RequestStream>, mut chunks: impl Chunks) -> Response {
    let (outlet, frames) = outlet();
    tokio::spawn(async move {
        let mut streams: StreamMap<usize, RequestStream> = streams.into_iter().enumerate().collect();
        let mut out = Frames::default();
        loop {
            let flow = tokio::select! {
                biased;
                // The body was dropped: the client has left. Dropping the streams cancels.
                () = outlet.closed() => return,
                next = streams.next() => match next {
                    Some((prompt, event)) => chunks.event(prompt, event, &mut out),
                    None => {
                        chunks.finish(&mut out);
                        ControlFlow::Break(())
                    }
                },
            };
            if let Some(frames) = out.take()
                && !outlet.send(frames).await
            {
                return;
            }
            if flow.is_break() {
                return;
            }
        }
    });
    let body = Body::from_stream(frames.map(Ok::<_, Infallible>));
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
        use std::time::Duration;

        for (size, most) in [(BACKLOG_BYTES * 2, 1), (BACKLOG_BYTES / 4, 4), (10, BACKLOG)] {
            let (outlet, frames) = outlet();
            let sent = Arc::new(AtomicUsize::new(0));
            let counted = sent.clone();
            let pump = tokio::spawn(async move {
                for _ in 0..BACKLOG * 2 {
                    assert!(outlet.send(Bytes::from(vec![b'x'; size])).await);
                    counted.fetch_add(1, Ordering::SeqCst);
                }
            });
            tokio::time::sleep(Duration::from_millis(50)).await;
            assert_eq!(sent.load(Ordering::SeqCst), most, "frames of {size} bytes wait, and no more is taken");
            tokio::pin!(frames);
            let mut got = 0;
            while let Some(frame) = frames.next().await {
                got += frame.len();
            }
            assert_eq!(got, BACKLOG * 2 * size, "a client that reads gets everything");
            pump.await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_client_that_leaves_ends_a_wait_for_room() {
        let (outlet, frames) = outlet();
        assert!(outlet.send(Bytes::from(vec![0; BACKLOG_BYTES])).await);
        let waiting = tokio::spawn(async move { outlet.send(Bytes::from_static(b"more")).await });
        tokio::task::yield_now().await;
        drop(frames);
        assert!(!waiting.await.unwrap());
    }
}
