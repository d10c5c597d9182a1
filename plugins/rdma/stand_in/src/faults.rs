//! Faults that tests plant.
//!
//! | text of `fault-PID` | what happens |
//! | --- | --- |
//! | `registration` | memory is refused, as when the limit of locked memory is reached |
//! | `queue` | queue pairs are refused |
//! | `connect` | queue pairs can't be connected |
//! | `complete N` | once: the next request ends with status N and moves nothing |
//! | `always N` | every request ends with status N and moves nothing |
//! | `silent` | requests neither go through nor end; the error state flushes them |
//! | `unflushed` | as `silent`, and the error state flushes nothing |
//! | `event N` | once: the devices tell of event N of port 1 |

use std::path::{Path, PathBuf};

/// The file that plants a fault in a process.
pub fn file(folder: &Path, process: u32) -> PathBuf {
    folder.join(format!("fault-{process}"))
}

/// Whether a fault of this kind is planted now.
pub(crate) fn is(kind: &str) -> bool {
    text().is_some_and(|text| text == kind)
}

/// The number of a fault that stays.
pub(crate) fn number(kind: &str) -> Option<i32> {
    text()?.strip_prefix(kind)?.trim().parse().ok()
}

/// The number of a fault that happens once; it is gone afterwards.
pub(crate) fn once(kind: &str) -> Option<i32> {
    let number = number(kind)?;
    // Who removes it has it.
    std::fs::remove_file(file(&crate::folder()?, std::process::id())).ok()?;
    Some(number)
}

fn text() -> Option<String> {
    let text = std::fs::read_to_string(file(&crate::folder()?, std::process::id())).ok()?;
    Some(text.trim().to_owned())
}
