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

    /// So many times as long, for rows whose turns take long or differ much.
    pub fn longer(self, factor: u32) -> Self {
        Self { budget: self.budget * factor, ..self }
    }
}

/// What both sides came to.
///
/// A machine that is shared gets faster and slower within seconds, and both sides of a turn meet the same of it: so the quotient is that of
/// the middle turn, and not that of two medians, of which one may be from a fast time and the other from a slow one.
#[derive(Clone, Debug)]
pub struct Turns {
    /// Our median.
    pub ours: f64,
    /// The peer's.
    pub peer: f64,
    /// Ours by the peer's of the same turn: the median of all turns.
    pub quotient: f64,
    /// Both, turn by turn.
    pub each: Vec<(f64, f64)>,
}

impl Turns {
    /// Figures that are measured once, or counted.
    pub fn once(ours: f64, peer: f64) -> Self {
        Self::of(vec![(ours, peer)])
    }

    /// From what was measured, turn by turn.
    pub fn of(each: Vec<(f64, f64)>) -> Self {
        let middle = |value: fn(&(f64, f64)) -> f64| median(&mut each.iter().map(value).collect::<Vec<_>>());
        Self {
            ours: middle(|turn| turn.0),
            peer: middle(|turn| turn.1),
            quotient: middle(|turn| turn.0 / turn.1),
            each,
        }
    }

    /// The same with each turn's figures made into others.
    pub fn map(self, figures: impl Fn(f64, f64) -> (f64, f64)) -> Self {
        Self::of(self.each.into_iter().map(|(ours, peer)| figures(ours, peer)).collect())
    }

    /// The same in a unit that is so many times as large.
    pub fn in_units_of(self, unit: f64) -> Self {
        self.map(|ours, peer| (ours / unit, peer / unit))
    }
}

/// Measures both sides, turn about. The first turn of each side only warms it up, unless the two alone took all the time there is: whoever
/// computes that long is not swayed by cold caches.
///
/// # Errors
/// Those of the sides.
pub fn side_by_side(
    rounds: Rounds,
    mut ours: impl FnMut() -> Result<f64>,
    mut peer: impl FnMut() -> Result<f64>,
) -> Result<Turns> {
    let begin = Instant::now();
    let first = (ours()?, peer()?);
    if begin.elapsed() >= rounds.budget {
        return Ok(Turns::of(vec![first]));
    }
    let mut turns = Vec::new();
    for round in 0..rounds.count.max(1) {
        // Whoever goes second finds the caches as the first left them, so they take turns at that as well.
        if round % 2 == 0 {
            let ours = ours()?;
            turns.push((ours, peer()?));
        } else {
            let peer = peer()?;
            turns.push((ours()?, peer));
        }
        if begin.elapsed() >= rounds.budget {
            break;
        }
    }
    Ok(Turns::of(turns))
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
        let sides = side_by_side(rounds, || count(&mut a), || count(&mut b)).unwrap();
        assert_eq!((sides.ours, sides.peer, a, b), (3.0, 3.0, 4, 4));
        assert_eq!(sides.each, [(2.0, 2.0), (3.0, 3.0), (4.0, 4.0)]);
        let none = Rounds { count: 3, budget: Duration::ZERO };
        let sides = side_by_side(none, || count(&mut a), || count(&mut b)).unwrap();
        assert_eq!((sides.ours, sides.peer, a, b), (5.0, 5.0, 5, 5), "without time each is measured once");
        assert_eq!((none.times(2).count, none.at_most(1).count), (6, 1));
        let second = Rounds { count: 3, budget: Duration::from_secs(1) };
        assert_eq!(second.longer(2).budget, Duration::from_secs(2));
    }

    #[test]
    fn a_machine_that_slows_down_for_both_does_not_sway_the_quotient() {
        // Three turns at full speed and three at half of it; the medians would be of different times.
        let turns = vec![(100.0, 50.0), (50.0, 25.0), (102.0, 51.0), (48.0, 24.0), (99.0, 50.0), (100.0, 24.0)];
        let sides = Turns::of(turns);
        assert!((sides.quotient - 2.0).abs() < 0.01, "{sides:?}");
        let quarter = sides.clone().in_units_of(4.0);
        assert_eq!((quarter.ours, quarter.peer), (sides.ours / 4.0, sides.peer / 4.0));
        assert_eq!(quarter.quotient, sides.quotient);
    }
}
