//! What is shown while weights load.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;

/// Fewest seconds between two log lines.
const LOG_EVERY: Duration = Duration::from_secs(2);

/// A bar on a terminal, log lines elsewhere.
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    logged: Mutex<Instant>,
}

impl Progress {
    /// Nothing done yet.
    pub fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(0);
            let style = "loading weights {bar:40} {bytes}/{total_bytes} {binary_bytes_per_sec}";
            if let Ok(style) = ProgressStyle::with_template(style) {
                bar.set_style(style);
            }
            bar
        });
        Self { bar, logged: Mutex::new(Instant::now()) }
    }

    /// `done` of `all` bytes are loaded.
    pub fn update(&self, done: u64, all: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(all);
            bar.set_position(done);
            return;
        }
        let mut logged = self.logged.lock();
        if logged.elapsed() >= LOG_EVERY {
            *logged = Instant::now();
            tracing::info!(percent = done * 100 / all.max(1), bytes = done, "loading weights");
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
