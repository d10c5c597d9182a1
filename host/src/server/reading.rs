//! Turning requests into tokens, away from the threads that answer, and only for clients that are there.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use tokio::sync::Semaphore;

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

/// Bodies up to this many bytes are read where they came in: that takes well below a millisecond, and to hand them over and back takes as long.
const SHORT: usize = 1024;

/// How many longer ones are read at a time. More would only share the same processors, and each holds a hundred times its size.
static READERS: LazyLock<Semaphore> =
    LazyLock::new(|| Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from)));

/// Runs `work` on a body of `bytes` bytes. What takes milliseconds runs on a thread for that, in turn.
///
/// # Errors
/// Those of `work`.
pub(super) async fn reading<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce(&Client) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let client = Client::default();
    if bytes <= SHORT {
        let done = catch_unwind(AssertUnwindSafe(|| work(&client)));
        return done.map_err(|_| ApiError::internal("reading the request failed"))?;
    }
    let _watch = Watch(client.clone());
    in_turn(move || client.is_there().and_then(|()| work(&client))).await
}

/// Runs `work` on a thread for what takes long, when its turn has come.
///
/// # Errors
/// Those of `work`.
pub(super) async fn in_turn<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let failed = || ApiError::internal("reading the request failed");
    // It is never closed.
    let turn = READERS.acquire().await.map_err(|_| failed())?;
    tokio::task::spawn_blocking(move || {
        // Kept until the work ends, also when nobody waits for it any more.
        let _turn = turn;
        work()
    })
    .await
    .map_err(|_| failed())?
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
    async fn a_panic_is_an_answer_for_short_and_long_bodies() {
        for bytes in [0, SHORT, SHORT + 1] {
            let error = reading::<()>(bytes, |_| panic!("as a test does")).await.unwrap_err();
            assert_eq!(error, ApiError::internal("reading the request failed"), "{bytes}");
        }
    }

    #[tokio::test]
    async fn long_bodies_are_read_in_turn_and_short_ones_pass_them() {
        let readers = std::thread::available_parallelism().unwrap().get();
        let (go, wait) = crossbeam_channel::unbounded::<()>();
        let began = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let tasks: Vec<_> = (0..readers + 2)
            .map(|_| {
                let (wait, began) = (wait.clone(), began.clone());
                tokio::spawn(reading(SHORT + 1, move |_| {
                    began.fetch_add(1, Ordering::SeqCst);
                    let _ = wait.recv();
                    Ok(())
                }))
            })
            .collect();
        while began.load(Ordering::SeqCst) == 0 || READERS.available_permits() > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        assert_eq!(reading(SHORT, |_| Ok(7)).await, Ok(7));
        assert!(began.load(Ordering::SeqCst) <= readers, "no more than {readers} at a time");
        drop(go);
        for task in tasks {
            task.await.unwrap().unwrap();
        }
    }

    #[tokio::test]
    async fn work_for_a_client_that_has_left_went_on() {
        assert_eq!(reading(SHORT + 1, |client| client.is_there().map(|()| 1)).await, Ok(1));
        let (started, start) = std::sync::mpsc::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let task = tokio::spawn(reading(SHORT + 1, move |client| {
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
