//! Histograms with fixed buckets, in the form Prometheus wants them.

use parking_lot::Mutex;

/// A histogram over fixed upper bounds; observing takes a short lock.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    counts: Vec<u64>,
    sum: f64,
}

/// A copy of a histogram at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct HistogramSnapshot {
    /// `(upper bound, observations at or below it)`, cumulative, ending with infinity.
    pub buckets: Vec<(f64, u64)>,
    /// Sum of all observations.
    pub sum: f64,
    /// Number of observations.
    pub count: u64,
}

impl Histogram {
    /// An empty histogram over rising `bounds`; a last bucket for the rest is added.
    pub fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, state: Mutex::new(State { counts: vec![0; bounds.len() + 1], sum: 0.0 }) }
    }

    /// Counts `value`.
    pub fn observe(&self, value: f64) {
        let bucket = self.bounds.partition_point(|&bound| bound < value);
        let mut state = self.state.lock();
        if let Some(count) = state.counts.get_mut(bucket) {
            *count += 1;
        }
        state.sum += value;
    }

    /// The histogram as it is now.
    pub fn snapshot(&self) -> HistogramSnapshot {
        let state = self.state.lock();
        let mut count = 0;
        let buckets = self
            .bounds
            .iter()
            .copied()
            .chain([f64::INFINITY])
            .zip(&state.counts)
            .map(|(bound, &n)| {
                count += n;
                (bound, count)
            })
            .collect();
        HistogramSnapshot { buckets, sum: state.sum, count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_bounds_inclusive() {
        let histogram = Histogram::new(&[1.0, 2.0]);
        for value in [0.5, 1.0, 1.5, 7.0] {
            histogram.observe(value);
        }
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.buckets, [(1.0, 2), (2.0, 3), (f64::INFINITY, 4)]);
        assert_eq!((snapshot.sum, snapshot.count), (10.0, 4));
    }
}
