//! The storage directory seen from outside, as an operator or a failing disk sees it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::client::Client;

/// All files below `folder`, sorted.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
            let path = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => open.push(path),
                Ok(kind) if kind.is_file() => found.push(path),
                _ => {}
            }
        }
    }
    found.sort();
    found
}

/// Waits until at least `pages` pages were stored since the start of the server.
pub fn wait_stored(client: &Client, pages: u64) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let metrics = client.metrics();
        let stored = metrics.storage_pages("set", "ok");
        if stored >= pages as f64 {
            return;
        }
        assert!(Instant::now() < deadline, "only {stored} of {pages} pages were stored: {metrics:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
