//! How long to wait before a call is made again.

use std::time::Duration;

/// Pause before the first retry.
const FIRST: Duration = Duration::from_millis(20);
/// Longest pause.
const LONGEST: Duration = Duration::from_secs(1);

/// Pause before retry number `retry`, from 0: doubles each time, of which a random part of up to a half is left out, so that calls which
/// failed together do not come back together.
pub(crate) fn pause(retry: u32) -> Duration {
    jittered(retry, fastrand::f64())
}

fn jittered(retry: u32, random: f64) -> Duration {
    let whole = FIRST.saturating_mul(1 << retry.min(16)).min(LONGEST);
    whole.mul_f64(1.0 - random.clamp(0.0, 1.0) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_bound_and_differ() {
        assert_eq!(jittered(0, 0.0), FIRST);
        assert_eq!(jittered(0, 1.0), FIRST / 2);
        assert_eq!(jittered(2, 0.0), FIRST * 4);
        assert_eq!(jittered(u32::MAX, 0.0), LONGEST);
        let pauses: std::collections::HashSet<Duration> = (0..32).map(|_| pause(3)).collect();
        assert!(pauses.len() > 1, "all calls come back at once");
        assert!(pauses.iter().all(|&pause| pause >= FIRST * 4 && pause <= FIRST * 8));
    }
}
