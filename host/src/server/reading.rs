//! Turning requests into tokens, away from the threads that answer, and only for clients that are there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::ApiError;
use super::state::Served;

/// Whether the client of a request still waits for the answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Client {
    gone: Arc<AtomicBool>,
}

/// Says that the client has gone when the future that serves it is dropped.
struct Watch(Client);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.gone.store(true, Ordering::Relaxed);
    }
}

impl Client {
    /// # Errors
    /// When nobody waits any more, so that nobody reads this either.
    fn is_there(&self) -> Result<(), ApiError> {
        match self.gone.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(ApiError::bad_request("the client has gone")),
        }
    }
}

/// Runs `work`, which takes milliseconds on long prompts, on a thread for that.
///
/// # Errors
/// Those of `work`.
pub(super) async fn reading<T: Send + 'static>(
    work: impl FnOnce(&Client) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let client = Client::default();
    let _watch = Watch(client.clone());
    tokio::task::spawn_blocking(move || client.is_there().and_then(|()| work(&client)))
        .await
        .map_err(|_| ApiError::internal("reading the request failed"))?
}

/// The tokens of a text, which came in the field `name`. A text that is too long for the model whatever its tokens are is refused first:
/// tokenizing takes a hundred times its size in memory.
///
/// # Errors
/// A text that is too long or can't be tokenized, and a client that has left meanwhile.
pub(super) fn tokenize(
    served: &Served,
    client: &Client,
    name: &str,
    text: &str,
    add_special: bool,
) -> Result<Vec<u32>, ApiError> {
    client.is_there()?;
    let fewest = served.tokenizer.fewest_tokens(text);
    served.engine.check_text(fewest).map_err(|error| ApiError::from_submit(error, str::to_owned))?;
    served.tokenizer.encode(text, add_special).map_err(|error| ApiError::field(name, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_for_a_client_that_has_left_went_on() {
        assert_eq!(reading(|client| client.is_there().map(|()| 1)).await, Ok(1));
        let (started, start) = std::sync::mpsc::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let task = tokio::spawn(reading(move |client| {
            let _ = started.send(());
            let _ = wait.recv();
            let _ = tell.send(client.is_there().is_err());
            Ok(())
        }));
        tokio::task::spawn_blocking(move || start.recv()).await.unwrap().unwrap();
        task.abort();
        assert!(task.await.unwrap_err().is_cancelled());
        go.send(()).unwrap();
        assert!(tokio::task::spawn_blocking(move || told.recv()).await.unwrap().unwrap());
    }
}
