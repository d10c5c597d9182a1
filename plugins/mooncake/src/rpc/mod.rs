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
    Stopped {
        /// Which of the two.
        stop: Stop,
        /// What was asked of whom; empty where nobody was asked.
        asked: String,
    },
    /// The master speaks another release.
    Incompatible(String),
    /// The master answered something else than what was asked, or failed.
    Failed(String),
}

impl RpcError {
    /// The time was over, or the call was cancelled, with nobody asked.
    pub fn stopped(stop: Stop) -> RpcError {
        RpcError::Stopped { stop, asked: String::new() }
    }

    /// The same error, of a call of a method at an address.
    fn of_call(self, method: &str, address: &str) -> RpcError {
        match self {
            RpcError::Stopped { stop, .. } => RpcError::Stopped { stop, asked: format!("master {address}: {method}") },
            RpcError::Lost(why) => RpcError::Lost(format!("master {address}: {method}: {why}")),
            RpcError::Failed(why) => RpcError::Failed(format!("master {address}: {method}: {why}")),
            RpcError::Unreachable(_) | RpcError::Incompatible(_) => self,
        }
    }

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
            RpcError::Stopped { stop, asked } => {
                if !asked.is_empty() {
                    write!(f, "{asked}: ")?;
                }
                f.write_str(match (stop, asked.is_empty()) {
                    (Stop::TimedOut, true) => "the time of the call was over",
                    (Stop::TimedOut, false) => "it did not answer in time",
                    (Stop::Cancelled, _) => "the call was cancelled",
                })
            }
        }
    }
}
impl std::error::Error for RpcError {}
