//! Taking samples of two sides in turn.

use std::time::{Duration, Instant};

use anyhow::Result;

/// How often a side is measured, and how long a row may take.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    /// Turns of each side at most.
    pub count: usize,
    /// After this time no further turn begins.
    pub budget: Duration,
}

impl Rounds {
    /// So many times as often, in the same time.
    pub fn times(self, factor: usize) -> Self {
        Self { count: self.count * factor, ..self }
    }

    /// No more than `count`.
    pub fn at_most(self, count: usize) -> Self {
        Self { count: self.count.min(count), ..self }
    }
}

/// Measures both sides, turn about, and answers their medians. The first turn of each side only warms it up, unless the two alone took
/// all the time there is: whoever computes that long is not swayed by cold caches.
///
/// # Errors
/// Those of the sides.
pub fn side_by_side(
    rounds: Rounds,
    mut ours: impl FnMut() -> Result<f64>,
    mut peer: impl FnMut() -> Result<f64>,
) -> Result<(f64, f64)> {
    let begin = Instant::now();
    let first = (ours()?, peer()?);
    if begin.elapsed() >= rounds.budget {
        return Ok(first);
    }
    let (mut our_samples, mut peer_samples) = (Vec::new(), Vec::new());
    for round in 0..rounds.count.max(1) {
        // Whoever goes second finds the caches as the first left them, so they take turns at that as well.
        if round % 2 == 0 {
            our_samples.push(ours()?);
            peer_samples.push(peer()?);
        } else {
            peer_samples.push(peer()?);
            our_samples.push(ours()?);
        }
        if begin.elapsed() >= rounds.budget {
            break;
        }
    }
    Ok((median(&mut our_samples), median(&mut peer_samples)))
}

/// The middle value; the mean of the two in the middle for an even number. 0 without values.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match (values.get(middle), values.len() % 2) {
        (Some(value), 1) => *value,
        (Some(value), _) => (value + values.get(middle.wrapping_sub(1)).unwrap_or(value)) / 2.0,
        (None, _) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_even_and_none() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&mut []), 0.0);
    }

    #[test]
    fn both_sides_are_measured_equally_often() {
        let (mut a, mut b) = (0, 0);
        let count = |counter: &mut i32| {
            *counter += 1;
            Ok(f64::from(*counter))
        };
        let rounds = Rounds { count: 3, budget: Duration::MAX };
        let (ours, peer) = side_by_side(rounds, || count(&mut a), || count(&mut b)).unwrap();
        assert_eq!((ours, peer, a, b), (3.0, 3.0, 4, 4));
        let none = Rounds { count: 3, budget: Duration::ZERO };
        let (ours, peer) = side_by_side(none, || count(&mut a), || count(&mut b)).unwrap();
        assert_eq!((ours, peer, a, b), (5.0, 5.0, 5, 5), "without time each is measured once");
        assert_eq!((none.times(2).count, none.at_most(1).count), (6, 1));
    }
}
