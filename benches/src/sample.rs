//! Taking samples of two sides in turn.

use anyhow::Result;

/// Measures both sides `rounds` times, turn about, and answers their medians. The first turn of each side only
/// warms it up.
///
/// # Errors
/// Those of the sides.
pub fn side_by_side(
    rounds: usize,
    mut ours: impl FnMut() -> Result<f64>,
    mut peer: impl FnMut() -> Result<f64>,
) -> Result<(f64, f64)> {
    ours()?;
    peer()?;
    let (mut our_samples, mut peer_samples) = (Vec::new(), Vec::new());
    for round in 0..rounds.max(1) {
        // Whoever goes second finds the caches as the first left them, so they take turns at that as well.
        if round % 2 == 0 {
            our_samples.push(ours()?);
            peer_samples.push(peer()?);
        } else {
            peer_samples.push(peer()?);
            our_samples.push(ours()?);
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
        let (ours, peer) = side_by_side(3, || count(&mut a), || count(&mut b)).unwrap();
        assert_eq!((ours, peer, a, b), (3.0, 3.0, 4, 4));
    }
}
