//! How fast pages come from a backend and prompts are computed, as measured.

use std::time::Duration;

/// What a measurement weighs when the next one comes in.
const DECAY: f64 = 0.85;
/// A measurement counts as at most this many times of what was expected, so that one stall does not change the verdict.
const OUTLIER: f64 = 8.0;
/// Weight of the measurements from which on there is an expectation.
const EXPECTING: f64 = 2.5;
/// Least relative variance of the sizes from which a latency can be told from a bandwidth.
const SPREAD: f64 = 0.02;

/// Time of a read as a constant and a part for each byte.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Fit {
    /// Seconds that a read takes whatever its length.
    pub latency: f64,
    /// Seconds a byte.
    pub per_byte: f64,
}

impl Fit {
    /// Seconds that reading `bytes` takes.
    pub fn seconds(&self, bytes: f64) -> f64 {
        self.latency + self.per_byte * bytes
    }
}

/// Sums over the reads of a backend, in which older ones fade: a line through sizes and times.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Speed {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl Speed {
    /// Takes in a read.
    pub fn add(&mut self, bytes: u64, took: Duration) {
        let (x, mut y) = (bytes as f64, took.as_secs_f64().max(1e-9));
        if x <= 0.0 {
            return;
        }
        if self.weight >= EXPECTING
            && let Some(fit) = self.fit()
        {
            y = y.min(fit.seconds(x) * OUTLIER);
        }
        for (sum, value) in
            [(&mut self.weight, 1.0), (&mut self.x, x), (&mut self.y, y), (&mut self.xx, x * x), (&mut self.xy, x * y)]
        {
            *sum = *sum * DECAY + value;
        }
    }

    /// The line; none before the first read.
    pub fn fit(&self) -> Option<Fit> {
        if self.weight <= 0.0 {
            return None;
        }
        let (mean_x, mean_y) = (self.x / self.weight, self.y / self.weight);
        let variance = self.xx / self.weight - mean_x * mean_x;
        let flat = Fit { latency: 0.0, per_byte: mean_y / mean_x };
        if variance < SPREAD * mean_x * mean_x {
            // All of one size: no way to tell what is latency.
            return Some(flat);
        }
        let per_byte = (self.xy / self.weight - mean_x * mean_y) / variance;
        if per_byte <= 0.0 {
            return Some(Fit { latency: mean_y, per_byte: 0.0 });
        }
        let latency = mean_y - per_byte * mean_x;
        // A line that would begin below zero goes through it.
        Some(if latency < 0.0 { Fit { latency: 0.0, per_byte: self.xy / self.xx } } else { Fit { latency, per_byte } })
    }
}

/// Tokens a second of prefill.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Prefill {
    tokens: f64,
    seconds: f64,
}

/// Tokens after which a measurement of prefill weighs about a third.
const PREFILL_MEMORY: f64 = 8192.0;
/// Fewest tokens of a step that says something of prefill.
const PREFILL_LEAST: usize = 16;

impl Prefill {
    /// Takes in a step that computed `prefill` tokens of prompts, beside `others` of running answers.
    pub fn add(&mut self, prefill: usize, others: usize, took: Duration) {
        if prefill < PREFILL_LEAST || took.is_zero() {
            return;
        }
        let decay = (-(prefill as f64) / PREFILL_MEMORY).exp();
        let share = prefill as f64 / (prefill + others) as f64;
        self.tokens = self.tokens * decay + prefill as f64;
        self.seconds = self.seconds * decay + took.as_secs_f64() * share;
    }

    /// Tokens a second; none before the first measurement.
    pub fn rate(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.tokens / self.seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(ms: f64) -> Duration {
        Duration::from_secs_f64(ms / 1e3)
    }

    #[test]
    fn latency_and_bandwidth_are_told_apart_by_reads_of_two_sizes() {
        let mut speed = Speed::default();
        assert!(speed.fit().is_none());
        for _ in 0..6 {
            speed.add(1_000_000, millis(5.0 + 10.0));
            speed.add(100_000, millis(5.0 + 1.0));
        }
        let fit = speed.fit().unwrap();
        assert!((fit.latency - 0.005).abs() < 1e-4 && (fit.per_byte - 1e-8).abs() < 1e-10, "{fit:?}");
        assert!((fit.seconds(2e6) - 0.025).abs() < 1e-4);
    }

    #[test]
    fn reads_of_one_size_give_a_bandwidth_alone() {
        let mut speed = Speed::default();
        for _ in 0..3 {
            speed.add(1_000_000, millis(10.0));
        }
        let fit = speed.fit().unwrap();
        assert!(fit.latency == 0.0 && (fit.per_byte - 1e-8).abs() < 1e-12, "{fit:?}");
    }

    #[test]
    fn odd_measurements_give_no_negative_times() {
        let mut speed = Speed::default();
        for _ in 0..4 {
            speed.add(1_000_000, millis(1.0));
            speed.add(1_000, millis(9.0));
        }
        let fit = speed.fit().unwrap();
        assert!(fit.latency > 0.0 && fit.per_byte >= 0.0, "{fit:?}");
        let mut speed = Speed::default();
        for _ in 0..4 {
            speed.add(1_000_000, millis(1.0));
            speed.add(2_000_000, millis(9.0));
        }
        let fit = speed.fit().unwrap();
        assert!(fit.latency == 0.0 && fit.per_byte > 0.0, "{fit:?}");
        speed.add(0, millis(9.0));
        assert_eq!(speed.fit().unwrap(), fit, "a read of nothing says nothing");
    }

    #[test]
    fn one_stall_is_no_verdict_and_a_lasting_change_is_one() {
        let mut speed = Speed::default();
        for _ in 0..10 {
            speed.add(1_000_000, millis(10.0));
        }
        speed.add(1_000_000, millis(60_000.0));
        let seconds = speed.fit().unwrap().seconds(1e6);
        assert!(seconds < 0.025, "{seconds} after one stall");
        for _ in 0..10 {
            speed.add(1_000_000, millis(1_000.0));
        }
        let seconds = speed.fit().unwrap().seconds(1e6);
        assert!(seconds > 0.7, "{seconds} after it became slow for good");
        for _ in 0..16 {
            speed.add(1_000_000, millis(10.0));
        }
        let seconds = speed.fit().unwrap().seconds(1e6);
        assert!(seconds < 0.2, "{seconds} after it became fast again");
    }

    #[test]
    fn prefill_counts_its_share_of_a_step() {
        let mut prefill = Prefill::default();
        prefill.add(8, 0, millis(1.0));
        assert!(prefill.rate().is_none(), "a few tokens say nothing");
        prefill.add(512, 512, millis(1000.0));
        let rate = prefill.rate().unwrap();
        assert!((rate - 1024.0).abs() < 1.0, "{rate}");
        for _ in 0..100 {
            prefill.add(512, 0, millis(100.0));
        }
        let rate = prefill.rate().unwrap();
        assert!((rate - 5120.0).abs() < 100.0, "{rate}: older steps fade");
    }
}
