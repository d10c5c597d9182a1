//! Calls to a server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hyper_util::rt::TokioIo;
use kvdock_plugin_api::{Call, Error, ErrorKind, Result};
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic_prost::ProstCodec;

use crate::distributed::limit::in_time;
use crate::distributed::rpc::describe;
use crate::wire::standalone::{Empty, PingResponse};

/// One question whether the server is there.
const PING: Duration = Duration::from_millis(500);
/// Between two of them.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a call without memory may take.
pub const RPC: Duration = Duration::from_secs(10);
/// How long the runtime may take to end.
const END: Duration = Duration::from_secs(5);

/// A connection to a server, made anew when it breaks.
#[derive(Debug)]
pub struct Client {
    // None only while it is dropped.
    runtime: Option<Runtime>,
    channel: Channel,
    address: String,
    /// Bytes of a message at most.
    message: usize,
    /// Connections made so far: a server that was started again has forgotten all memory.
    connections: Arc<AtomicU64>,
}

impl Client {
    /// A client of the server at a socket, with so many bytes in a message at most. It connects with the first call.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub fn new(path: &str, message: usize) -> Result<Client> {
        let fail = |what: String| Error::new(ErrorKind::Unavailable, what);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kvdock-umbp-rpc")
            .enable_all()
            .build()
            .map_err(|error| fail(format!("no thread for calls to the server: {error}")))?;
        let connections = Arc::new(AtomicU64::new(0));
        let counted = connections.clone();
        let socket = path.to_owned();
        let connector = tower::service_fn(move |_: Uri| {
            let (counted, socket) = (counted.clone(), socket.clone());
            async move {
                let stream = UnixStream::connect(socket).await?;
                counted.fetch_add(1, Ordering::AcqRel);
                Ok::<_, std::io::Error>(TokioIo::new(stream))
            }
        });
        let channel = {
            let _inside = runtime.enter();
            // The address of the endpoint is none: the connector knows the socket.
            Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector)
        };
        Ok(Client { runtime: Some(runtime), channel, address: path.to_owned(), message, connections })
    }

    /// Path of the socket.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Connections made so far.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Acquire)
    }

    /// Calls a method, for no longer than `time`; without, until it ends or the server is gone.
    ///
    /// # Errors
    /// `Unavailable` or `TimedOut`.
    pub fn call<Q, A>(&self, method: &'static str, request: Q, time: Option<Duration>) -> Result<A>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let fail = |what: String| {
            let text = format!("server at {}: {method}: {what}", self.address);
            Error::new(ErrorKind::Unavailable, text).retryable()
        };
        let runtime = self.runtime.as_ref().ok_or_else(|| fail("the client is closed".to_owned()))?;
        let call = async {
            let grpc = Grpc::new(self.channel.clone());
            let mut grpc = grpc.max_decoding_message_size(self.message).max_encoding_message_size(self.message);
            grpc.ready().await.map_err(|error| fail(error.to_string()))?;
            let path = PathAndQuery::try_from(format!("/umbp.UMBPStandalone/{method}"));
            let path = path.map_err(|error| fail(error.to_string()))?;
            let codec: ProstCodec<Q, A> = ProstCodec::default();
            let answer = grpc.unary(tonic::Request::new(request), path, codec).await;
            answer
                .map(tonic::Response::into_inner)
                .map_err(|status| fail(format!("{:?}: {}", status.code(), describe(&status))))
        };
        runtime.block_on(async {
            match time {
                None => call.await,
                Some(time) => tokio::time::timeout(time, call).await.unwrap_or_else(|_| {
                    let text = format!("server at {}: {method}: no answer within {time:?}", self.address);
                    Err(Error::new(ErrorKind::TimedOut, text).retryable())
                }),
            }
        })
    }

    /// Waits until the server is ready.
    ///
    /// # Errors
    /// When it is not in time.
    pub fn wait(&self, time: Duration, call: &Call<'_>) -> Result<PingResponse> {
        let began = Instant::now();
        let time = call.remaining().map_or(time, |left| in_time(left).min(time));
        let until = began + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let answer = self.call::<_, PingResponse>("Ping", Empty {}, Some(PING.min(left)));
            let why = match answer {
                Ok(answer) if answer.ready => return Ok(answer),
                Ok(_) => "it is not ready".to_owned(),
                Err(error) => error.message,
            };
            if call.is_cancelled() {
                return Err(Error::new(ErrorKind::Cancelled, "the host cancelled the call"));
            }
            if Instant::now() + PAUSE >= until {
                let text = format!(
                    "no umbp_standalone_server is ready at {} within {} ms; start one there, `umbp_standalone_server unix://{}`, before this one: {why}",
                    self.address,
                    time.as_millis(),
                    self.address
                );
                return Err(Error::new(ErrorKind::Unavailable, text).retryable());
            }
            std::thread::sleep(PAUSE);
        }
    }
}

/// How long a call without memory may take, by its own deadline.
pub fn time_of(call: &Call<'_>) -> Duration {
    call.remaining().map_or(RPC, |left| in_time(left).min(RPC))
}

impl Drop for Client {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(END);
        }
    }
}
