//! What the worker process tells, a JSON object a line.

use serde::{Deserialize, Serialize};

/// A line of the worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Event {
    /// What it does from now on; said before each kind of call.
    Doing {
        /// For a person.
        what: String,
    },
    /// A result.
    Row(Row),
    /// Something to know about the results.
    Note {
        /// For a person.
        text: String,
    },
    /// It can't go on.
    Failed {
        /// For a person.
        text: String,
    },
    /// It is at its end.
    Done,
}

/// Which kind of call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    /// A copy of the same pages in memory, for comparison.
    Copy,
    /// `batch_set` of new keys.
    Set,
    /// `batch_exists` of stored keys.
    Exists,
    /// `batch_get` of pages that were stored just before.
    Get,
    /// `batch_get` by a new instance, with the files of the store out of the page cache.
    GetCold,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Copy => "copy",
            Kind::Set => "set",
            Kind::Exists => "exists",
            Kind::Get => "get",
            Kind::GetCold => "get, cold",
        }
    }
}

/// A result: calls of one kind in one shape.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Row {
    pub call: Kind,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Pages a call.
    pub batch: u32,
    /// Calls at a time.
    pub threads: u32,
    /// Calls that were made.
    pub calls: u64,
    /// Pages that were moved or found.
    pub pages: u64,
    /// Pages that the plugin refused, because it is full.
    pub refused: u64,
    /// Pages that did not become what they should: failed, missing, corrupt.
    pub bad: u64,
    /// Pages a second, all threads together.
    pub pages_per_second: f64,
    /// Throughput beside that of a memory copy of the same pages; none where no bytes move.
    pub of_copy: Option<f64>,
    /// Median time of a call in microseconds.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
}
