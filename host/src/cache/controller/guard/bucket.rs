//! A limit on bytes a second.
//!
//! Calls differ in size by orders of magnitude and one call may move more than the limit allows in a second, so the limit is kept on
//! time: each call pushes the moment at which the next may begin further away. Crates that keep such limits count cells in a bucket and
//! refuse what is larger than the bucket.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How much time of idleness is made good afterwards.
const BURST: Duration = Duration::from_millis(250);
/// Longest time one call pushes the next away; keeps sums in range.
const LONGEST: f64 = 86_400.0;

/// Lets calls begin so that in the long run no more than so many bytes a second are moved.
#[derive(Debug)]
pub(crate) struct Bucket {
    bytes_per_second: f64,
    /// When the bytes granted so far are paid for.
    paid: Mutex<Instant>,
}

impl Bucket {
    /// Room for `bytes_per_second`; at least one byte.
    pub fn new(bytes_per_second: u64, now: Instant) -> Self {
        let paid = Mutex::new(now.checked_sub(BURST).unwrap_or(now));
        Bucket { bytes_per_second: bytes_per_second.max(1) as f64, paid }
    }

    /// Takes room for `bytes`. Says when the call may begin; none, with nothing taken, if that is after `deadline`.
    pub fn take(&self, bytes: u64, now: Instant, deadline: Instant) -> Option<Instant> {
        let mut paid = self.paid.lock();
        let begin = (*paid).max(now.checked_sub(BURST).unwrap_or(now));
        if begin > deadline {
            return None;
        }
        *paid = begin + self.time(bytes);
        Some(begin.max(now))
    }

    /// Gives back room that was taken and not used.
    pub fn give_back(&self, bytes: u64) {
        let mut paid = self.paid.lock();
        *paid = paid.checked_sub(self.time(bytes)).unwrap_or(*paid);
    }

    fn time(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64((bytes as f64 / self.bytes_per_second).min(LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn over_time_no_more_than_the_limit_passes() {
        let mut now = Instant::now();
        let bucket = Bucket::new(1000, now);
        let began = now;
        let mut bytes = 0;
        for size in [100, 700, 5000, 1, 1, 2000, 30, 900] {
            let begin = bucket.take(size, now, now + Duration::from_secs(3600)).unwrap();
            assert!(begin >= now);
            now = begin;
            let allowed = (now - began + BURST).as_secs_f64() * 1000.0;
            assert!(bytes as f64 <= allowed + 1.0, "{bytes} bytes before this call, {allowed} allowed");
            bytes += size;
        }
        assert!(now - began >= Duration::from_secs(7));
    }

    #[test]
    fn a_call_that_would_wait_too_long_takes_nothing() {
        let now = Instant::now();
        let bucket = Bucket::new(1000, now);
        assert_eq!(bucket.take(10_000, now, now), Some(now), "an idle limit lets any call pass");
        assert_eq!(bucket.take(1, now, now + Duration::from_secs(5)), None);
        bucket.give_back(9_900);
        assert_eq!(bucket.take(1, now, now), Some(now), "what was given back and not used is there again");
    }

    #[test]
    fn idleness_is_made_good_within_bounds() {
        let now = Instant::now();
        let bucket = Bucket::new(1000, now);
        let later = now + Duration::from_secs(600);
        assert_eq!(bucket.take(1000, later, later), Some(later));
        let begin = bucket.take(1, later, later + Duration::from_secs(2)).unwrap();
        assert_eq!(begin, later + Duration::from_secs(1) - BURST);
    }
}
