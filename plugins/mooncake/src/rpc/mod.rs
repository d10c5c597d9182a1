//! Calls to the master: many at a time over few connections, each with an end to its time.

mod client;
mod connection;

pub use client::{Address, Client, Ticket};
pub use connection::Connection;

use crate::limit::Stop;
use crate::wire::Malformed;
use crate::wire::frame::Refusal;

/// A call that has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RpcError {
    /// There is no connection; nothing was sent.
    Unreachable(String),
    /// The connection ended after the request was sent: whether the function ran is not known.
    Lost(String),
    /// The time was over, or the call was cancelled, before the answer came: whether the function ran is not known.
    Stopped(Stop),
    /// The master speaks another release.
    Incompatible(String),
    /// The master answered something else than what was asked, or failed.
    Failed(String),
}

impl RpcError {
    fn refused(method: &str, address: &str, refusal: &Refusal, text: &str) -> RpcError {
        let what = format!("master {address}: {method}: {text}");
        match refusal {
            Refusal::Arguments | Refusal::Function => RpcError::Incompatible(what),
            Refusal::Other(code) => RpcError::Failed(format!("{what} (transport error {code})")),
        }
    }

    fn malformed(method: &str, address: &str, error: &Malformed) -> RpcError {
        let what = format!("master {address}: the answer to {method} can't be read: {error}");
        match error {
            Malformed::Type { .. } => RpcError::Incompatible(what),
            _ => RpcError::Failed(what),
        }
    }
}

impl std::fmt::Display for RpcError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RpcError::Unreachable(text) | RpcError::Lost(text) | RpcError::Failed(text) => f.write_str(text),
            RpcError::Incompatible(text) => write!(f, "{text}; the master is of another release"),
            RpcError::Stopped(Stop::TimedOut) => f.write_str("the master did not answer in time"),
            RpcError::Stopped(Stop::Cancelled) => f.write_str("the call was cancelled"),
        }
    }
}
impl std::error::Error for RpcError {}
