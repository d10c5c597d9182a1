//! Calls to the master and to other nodes.

use std::time::Duration;

use kvdock_plugin_api::{Error, ErrorKind};
use tokio::runtime::Handle;
use tonic::Code;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use super::limit::{Limit, Stop};

/// Bytes of a message at most.
pub const MESSAGE: usize = 64 << 20;
/// How long a connection may take to come about.
const CONNECT: Duration = Duration::from_secs(5);

/// The header of a call that is meant for one incarnation of a node: its number, in hexadecimal digits.
pub const INSTANCE: &str = "kvdock-instance";

/// How much longer than this side the other one goes on.
const LATER: Duration = Duration::from_millis(200);

/// Why a call brought no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// What the other side says; none when it said nothing.
    pub code: Option<Code>,
    /// The call was stopped here.
    pub stop: Option<Stop>,
    /// In words, with the address.
    pub text: String,
}

impl Failed {
    /// The call did not reach its end for the connection's sake, so another one may do better.
    pub fn is_broken(&self) -> bool {
        let broken = [Code::Unavailable, Code::Unknown, Code::Internal, Code::Cancelled];
        self.stop.is_none() && self.code.is_some_and(|code| broken.contains(&code))
    }

    /// The node that was meant is not there any more; another one answers.
    pub fn is_for_another(&self) -> bool {
        self.code == Some(Code::Aborted)
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Error {
        let kind = match failed.stop {
            Some(Stop::Cancelled) => ErrorKind::Cancelled,
            Some(Stop::TimedOut) => ErrorKind::TimedOut,
            None => ErrorKind::Unavailable,
        };
        Error::new(kind, failed.text).retryable()
    }
}

/// One that is called. The connection is made with the first call, and anew when it breaks.
#[derive(Debug, Clone)]
pub struct Rpc {
    handle: Handle,
    channel: Channel,
    /// Who it is, in words.
    who: String,
}

impl Rpc {
    /// Somebody at `host:port`; `what` says who in errors.
    ///
    /// # Errors
    /// When the address is none.
    pub fn new(handle: &Handle, what: &str, address: &str) -> Result<Rpc, String> {
        let bad =
            |error: tonic::transport::Error| format!("{address:?} is no address such as \"10.0.0.1:50051\": {error}");
        let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(bad)?;
        let endpoint = endpoint
            .connect_timeout(CONNECT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(Duration::from_secs(20))
            .keep_alive_timeout(Duration::from_secs(20));
        let _inside = handle.enter();
        Ok(Rpc { handle: handle.clone(), channel: endpoint.connect_lazy(), who: format!("{what} {address}") })
    }

    /// Who it is.
    pub fn who(&self) -> &str {
        &self.who
    }

    /// Calls a method, such as `/umbp.UMBPMaster/RouteGet`. Not to be called by threads of the runtime.
    ///
    /// # Errors
    /// When there is no answer in time, or it is a refusal.
    pub fn call<Q, A>(&self, path: &'static str, request: Q, limit: &Limit<'_>) -> Result<A, Failed>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        self.call_one(None, path, request, limit)
    }

    /// As [`Rpc::call`]. Where an incarnation is named, no other one does what it is asked.
    ///
    /// # Errors
    /// As [`Rpc::call`].
    pub fn call_one<Q, A>(
        &self,
        instance: Option<u64>,
        path: &'static str,
        request: Q,
        limit: &Limit<'_>,
    ) -> Result<A, Failed>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let method = path.rsplit('/').next().unwrap_or(path);
        let stopped = |stop: Stop| {
            let why = if stop == Stop::Cancelled { "the call was cancelled" } else { "no answer in time" };
            Failed { code: None, stop: Some(stop), text: format!("{}: {method}: {why}", self.who) }
        };
        let left = limit.left().map_err(stopped)?;
        let answer = async {
            let mut grpc =
                Grpc::new(self.channel.clone()).max_decoding_message_size(MESSAGE).max_encoding_message_size(MESSAGE);
            grpc.ready().await.map_err(|error| tonic::Status::unavailable(chain(&error)))?;
            let codec: ProstCodec<Q, A> = ProstCodec::default();
            let mut request = tonic::Request::new(request);
            // This side's own clock ends the wait.
            request.set_timeout(left + LATER);
            if let Some(instance) = instance {
                let number = MetadataValue::try_from(instance_text(instance));
                let number = number.map_err(|error| tonic::Status::invalid_argument(error.to_string()))?;
                request.metadata_mut().insert(INSTANCE, number);
            }
            grpc.unary(request, PathAndQuery::from_static(path), codec).await
        };
        match self.handle.block_on(limit.race(answer)) {
            Err(stop) => Err(stopped(stop)),
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            // Its own clock, set by this one, was the faster.
            Ok(Err(status)) if matches!(status.code(), Code::DeadlineExceeded) => Err(stopped(Stop::TimedOut)),
            Ok(Err(status)) => {
                let text = format!("{}: {method}: {:?}: {}", self.who, status.code(), describe(&status));
                Err(Failed { code: Some(status.code()), stop: None, text })
            }
        }
    }
}

/// An incarnation as [`INSTANCE`] has it.
pub fn instance_text(instance: u64) -> String {
    format!("{instance:016x}")
}

/// What a refusal says, with its causes.
pub fn describe(status: &tonic::Status) -> String {
    use std::error::Error as _;
    with_causes(status.message().to_owned(), status.source())
}

fn chain(error: &dyn std::error::Error) -> String {
    with_causes(error.to_string(), error.source())
}

/// A text with the causes behind it. Many of them say again what stands before them; that is left out.
fn with_causes(mut text: String, mut source: Option<&(dyn std::error::Error + 'static)>) -> String {
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.contains(&cause) {
            text = if text.is_empty() { cause } else { format!("{text}: {cause}") };
        }
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_that_repeats_what_was_said_is_said_once() {
        #[derive(Debug)]
        struct Layer(&'static str, Option<Box<Layer>>);
        impl std::fmt::Display for Layer {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.0)
            }
        }
        impl std::error::Error for Layer {
            fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
                self.1.as_deref().map(|layer| layer as _)
            }
        }
        let refused = Layer("Connection refused (os error 111)", None);
        let inner = Layer("tcp connect error", Some(Box::new(refused)));
        let outer = Layer("tcp connect error", Some(Box::new(inner)));
        let whole = Layer("transport error", Some(Box::new(outer)));
        assert_eq!(chain(&whole), "transport error: tcp connect error: Connection refused (os error 111)");
        assert_eq!(with_causes(String::new(), Some(&Layer("gone", None))), "gone");
    }
}
