//! Whether a hit in storage is worth loading: storage is never slower than computing.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::speed::{Fit, Prefill, Speed};
use crate::plugin::backend::BreakEven;

/// Every so many refusals a few pages are loaded all the same, so that a backend that became faster is noticed.
const EXPLORE_EVERY: u32 = 16;

/// The engine's speed, which all backends are compared with.
#[derive(Debug, Default)]
pub(crate) struct PrefillSpeed(Mutex<Prefill>);

impl PrefillSpeed {
    /// Takes in a step of the engine.
    pub fn add(&self, prefill: usize, others: usize, took: Duration) {
        self.0.lock().add(prefill, others, took);
    }

    /// Tokens a second, once measured.
    pub fn rate(&self) -> Option<f64> {
        self.0.lock().rate()
    }
}

/// What the measured speeds of one backend say of hits in general.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Verdict {
    /// Not measured.
    #[default]
    Unknown,
    /// Any hit that is long enough to be asked for is worth loading.
    Worth,
    /// Only longer ones are.
    WorthIfLong,
    /// Computing is faster, whatever the length.
    Never,
}

/// What is known of the reads of one backend.
#[derive(Debug, Default)]
pub(crate) struct ReadSpeed {
    speed: Mutex<Speed>,
    verdict: Mutex<Verdict>,
    refusals: AtomicU32,
}

impl ReadSpeed {
    /// Takes in that a fetch moved `bytes` from this backend.
    pub fn add(&self, bytes: u64, took: Duration) {
        self.speed.lock().add(bytes, took);
    }

    /// Time of a read, once measured.
    pub fn fit(&self) -> Option<Fit> {
        self.speed.lock().fit()
    }

    /// Counts a hit that was not worth loading; true when it is to be loaded all the same, to measure anew.
    pub fn refuse(&self) -> bool {
        (self.refusals.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(EXPLORE_EVERY)
    }

    /// What was measured; none before both sides were. `token_bytes` is what a token takes in storage.
    pub fn report(&self, prefill: Option<f64>, token_bytes: f64) -> Option<BreakEven> {
        let (fit, prefill) = (self.fit()?, prefill?);
        let gain = 1.0 / prefill - fit.per_byte * token_bytes;
        Some(BreakEven {
            load_bytes_per_second: 1.0 / fit.per_byte.max(1e-15),
            load_latency: fit.latency,
            prefill_tokens_per_second: prefill,
            tokens: (gain > 0.0).then(|| (fit.latency / gain).floor() as u64 + 1),
        })
    }

    /// Says in the log when the verdict on this backend has changed. `shortest` is the fewest tokens storage is asked for.
    pub fn note(&self, backend: &str, report: Option<BreakEven>, shortest: usize) {
        let Some(report) = report else { return };
        let now = match report.tokens {
            None => Verdict::Never,
            Some(tokens) if tokens <= shortest as u64 => Verdict::Worth,
            Some(_) => Verdict::WorthIfLong,
        };
        let before = std::mem::replace(&mut *self.verdict.lock(), now);
        if before == now {
            return;
        }
        let verdict = match now {
            Verdict::Never => "computing is faster than loading, whatever the length",
            Verdict::WorthIfLong => "hits from that many tokens on are loaded",
            Verdict::Worth | Verdict::Unknown => "all hits are loaded",
        };
        tracing::info!(
            backend,
            break_even_tokens = report.tokens,
            load_bytes_per_second = report.load_bytes_per_second.round(),
            load_latency_seconds = report.load_latency,
            prefill_tokens_per_second = report.prefill_tokens_per_second.round(),
            "break-even of storage: {verdict}"
        );
    }
}

/// A part of a hit that one backend delivers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    /// Which backend.
    pub source: usize,
    /// Pages.
    pub pages: usize,
    /// Its speed; none while unmeasured.
    pub fit: Option<Fit>,
}

/// How much of a hit is worth loading.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Worth {
    /// Leading pages that are.
    pub pages: usize,
    /// Seconds that loading the whole hit takes, as far as measured.
    pub load_seconds: f64,
    /// Seconds that computing it takes.
    pub prefill_seconds: f64,
}

/// Which leading parts of a hit save the most time over computing them. What is not measured is worth loading.
pub(crate) fn worth(parts: &[Part], page_bytes: u64, page_tokens: usize, prefill: f64) -> Worth {
    let mut best = (0.0, 0);
    let mut seen = [false; 64];
    let (mut pages, mut load, mut compute) = (0, 0.0, 0.0);
    for part in parts {
        let bytes = part.pages as f64 * page_bytes as f64;
        pages += part.pages;
        compute += (part.pages * page_tokens) as f64 / prefill;
        let Some(fit) = part.fit else {
            best = (compute - load, pages);
            continue;
        };
        // Runs of one backend are under way at the same time: they wait for it once.
        let begun = seen.get_mut(part.source).is_some_and(|seen| std::mem::replace(seen, true));
        load += fit.seconds(bytes) - if begun { fit.latency } else { 0.0 };
        let gain = compute - load;
        if gain > best.0 {
            best = (gain, pages);
        }
    }
    Worth { pages: best.1, load_seconds: load, prefill_seconds: compute }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAST: Fit = Fit { latency: 0.001, per_byte: 1e-9 };
    const SLOW: Fit = Fit { latency: 0.5, per_byte: 1e-6 };

    fn part(source: usize, pages: usize, fit: Option<Fit>) -> Part {
        Part { source, pages, fit }
    }

    /// Pages of 100 kB and 16 tokens; 1,000 tokens a second.
    fn pages_worth(parts: &[Part]) -> usize {
        worth(parts, 100_000, 16, 1000.0).pages
    }

    #[test]
    fn a_hit_is_loaded_as_far_as_that_saves_time() {
        assert_eq!(pages_worth(&[part(0, 10, Some(FAST))]), 10);
        assert_eq!(pages_worth(&[part(0, 10, Some(SLOW))]), 0, "0.1 s a page against 16 ms");
        assert_eq!(pages_worth(&[part(0, 10, Some(FAST)), part(1, 10, Some(SLOW))]), 10, "the slow tail is computed");
        let hole =
            [part(0, 10, Some(FAST)), part(1, 1, Some(Fit { latency: 0.1, per_byte: 0.0 })), part(0, 50, Some(FAST))];
        assert_eq!(pages_worth(&hole), 61, "a slow page in front of many fast ones is worth it");
        assert_eq!(pages_worth(&[]), 0);
    }

    #[test]
    fn a_latency_counts_once_a_backend() {
        let latency = Fit { latency: 0.1, per_byte: 0.0 };
        let parts = [part(0, 4, Some(latency)), part(1, 4, Some(FAST)), part(0, 4, Some(latency))];
        let worth = worth(&parts, 100_000, 16, 1000.0);
        assert!((worth.load_seconds - 0.1014).abs() < 1e-9, "{worth:?}");
    }

    #[test]
    fn what_is_not_measured_is_loaded() {
        assert_eq!(pages_worth(&[part(0, 10, None)]), 10);
        assert_eq!(pages_worth(&[part(0, 10, Some(SLOW)), part(1, 2, None)]), 12);
        assert_eq!(pages_worth(&[part(1, 2, None), part(0, 10, Some(FAST)), part(2, 9, Some(SLOW))]), 12);
    }

    #[test]
    fn every_so_many_refusals_one_is_for_exploring() {
        let speed = ReadSpeed::default();
        let explored = (0..4 * EXPLORE_EVERY).filter(|_| speed.refuse()).count();
        assert_eq!(explored, 4);
    }

    #[test]
    fn the_report_says_from_how_many_tokens_on_loading_wins() {
        let speed = ReadSpeed::default();
        assert_eq!(speed.report(Some(1000.0), 6250.0), None, "the backend is not measured");
        for bytes in [100_000, 1_000_000, 100_000, 1_000_000] {
            speed.add(bytes, Duration::from_secs_f64(0.01 + bytes as f64 * 1e-9));
        }
        assert_eq!(speed.report(None, 6250.0), None, "prefill is not measured");
        let report = speed.report(Some(1000.0), 6250.0).unwrap();
        assert_eq!(report.tokens, Some(11), "10 ms of latency are 10 tokens: {report:?}");
        assert_eq!(speed.report(Some(1e9), 6250.0).unwrap().tokens, None, "computing is always faster");
    }
}
