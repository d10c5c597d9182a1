//! The circuit breaker: leaves a backend alone that keeps failing, so that no request waits for it.

use std::time::{Duration, Instant, SystemTime};

use crate::plugin::backend::BreakerState;

/// Calls that fail in a row before the backend is left alone.
const FAILURES: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, Default)]
enum State {
    #[default]
    Closed,
    Open {
        until: Instant,
    },
    /// One call finds out.
    Probing {
        /// When another one may, should the first never end.
        until: Instant,
    },
}

/// What lets a call through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    /// The breaker is closed.
    Free,
    /// The backend rested; this call finds out whether it works again.
    Probe,
}

/// Opens after some failures in a row; lets one call through after a pause that doubles; closes when that went well.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    state: State,
    failures: u32,
    /// Whether the last failure was of a call that moves pages.
    moving: bool,
    pause: Duration,
    why: String,
    since: Option<SystemTime>,
}

impl Breaker {
    /// Whether a call may be made. After a pause one caller gets through; the others wait for what comes of it.
    pub fn allows(&mut self, now: Instant) -> Option<Pass> {
        match self.state {
            State::Closed => Some(Pass::Free),
            State::Open { until } | State::Probing { until } if now < until => None,
            State::Open { .. } | State::Probing { .. } => {
                self.go(State::Probing { until: now + LONGEST_PAUSE });
                Some(Pass::Probe)
            }
        }
    }

    /// Whether `allows` would say no, without taking the one chance after a pause.
    pub fn is_open(&self, now: Instant) -> bool {
        match self.state {
            State::Closed => false,
            State::Open { until } | State::Probing { until } => now < until,
        }
    }

    /// A call went well; true if that ended a rest. What began before the rest says nothing about now. A call that moves no pages
    /// (`moving` is false) does not make good for those that fail to: it may end the rest, and the next failure begins the next.
    pub fn succeeded(&mut self, pass: Pass, moving: bool) -> bool {
        let closes = pass == Pass::Probe && !matches!(self.state, State::Closed);
        if closes {
            self.go(State::Closed);
        }
        if !closes && !matches!(self.state, State::Closed) {
            return false;
        }
        if self.moving && !moving {
            self.failures = self.failures.min(FAILURES - 1);
            return false;
        }
        self.failures = 0;
        self.moving = false;
        self.pause = Duration::ZERO;
        closes
    }

    /// A call failed, one that moves pages or not. Says for how long the backend is left alone if that begins now.
    pub fn failed(&mut self, pass: Pass, moving: bool, now: Instant, why: impl FnOnce() -> String) -> Option<Duration> {
        if pass == Pass::Free && !matches!(self.state, State::Closed) {
            return None;
        }
        self.failures += 1;
        self.moving |= moving;
        if pass == Pass::Free && self.failures < FAILURES {
            return None;
        }
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.why = why();
        let fresh = matches!(self.state, State::Closed);
        self.go(State::Open { until: now + self.pause });
        fresh.then_some(self.pause)
    }

    /// A call was called off: nothing was learnt, and another one may find out.
    pub fn unsettled(&mut self, pass: Pass, now: Instant) {
        if pass == Pass::Probe && matches!(self.state, State::Probing { .. }) {
            self.go(State::Open { until: now });
        }
    }

    /// What it does now.
    pub fn state(&self) -> BreakerState {
        match self.state {
            State::Closed => BreakerState::Closed,
            State::Open { .. } => BreakerState::Open,
            State::Probing { .. } => BreakerState::HalfOpen,
        }
    }

    /// Calls that failed in a row.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Why it rests; none while it does not.
    pub fn why(&self) -> Option<String> {
        match self.state {
            State::Closed => None,
            _ => Some(format!("{} calls in a row failed; the last: {}", self.failures, self.why)),
        }
    }

    /// When it took its state; none while it never opened.
    pub fn since(&self) -> Option<SystemTime> {
        self.since
    }

    fn go(&mut self, state: State) {
        self.state = state;
        self.since = Some(SystemTime::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fail(breaker: &mut Breaker, pass: Pass, now: Instant) -> bool {
        breaker.failed(pass, true, now, || "no".to_owned()).is_some()
    }

    #[test]
    fn i16614_a_backend_that_keeps_failing_is_left_alone_and_tried_again() {
        let mut breaker = Breaker::default();
        let now = Instant::now();
        assert!(!fail(&mut breaker, Pass::Free, now) && !fail(&mut breaker, Pass::Free, now));
        assert_eq!(breaker.allows(now), Some(Pass::Free), "two failures are no pattern");
        assert!(fail(&mut breaker, Pass::Free, now));
        assert!(breaker.allows(now).is_none() && breaker.is_open(now));
        assert_eq!(breaker.why().as_deref(), Some("3 calls in a row failed; the last: no"));
        let later = now + FIRST_PAUSE;
        assert!(!breaker.is_open(later));
        assert_eq!(breaker.allows(later), Some(Pass::Probe), "one probe after the pause");
        assert_eq!((breaker.allows(later), breaker.state()), (None, BreakerState::HalfOpen), "and only one");
        assert!(!fail(&mut breaker, Pass::Probe, later), "it rested before");
        assert_eq!(breaker.allows(later + FIRST_PAUSE), None, "the pause doubled");
        assert_eq!(breaker.allows(later + FIRST_PAUSE * 2), Some(Pass::Probe));
        assert!(breaker.succeeded(Pass::Probe, true), "a good probe closes it");
        assert_eq!((breaker.allows(later), breaker.why()), (Some(Pass::Free), None));
    }

    #[test]
    fn calls_from_before_the_rest_change_nothing() {
        let mut breaker = Breaker::default();
        let now = Instant::now();
        for _ in 0..FAILURES {
            fail(&mut breaker, Pass::Free, now);
        }
        assert!(!breaker.succeeded(Pass::Free, true));
        assert!(!fail(&mut breaker, Pass::Free, now));
        assert!(breaker.is_open(now));
        assert_eq!(breaker.allows(now + FIRST_PAUSE), Some(Pass::Probe), "the pause is the first one still");
    }

    #[test]
    fn a_store_that_answers_what_it_has_and_delivers_nothing_was_never_left_alone() {
        let mut breaker = Breaker::default();
        let now = Instant::now();
        for _ in 0..FAILURES - 1 {
            assert!(!fail(&mut breaker, Pass::Free, now));
            assert!(!breaker.succeeded(Pass::Free, false), "it says what it has");
        }
        assert!(fail(&mut breaker, Pass::Free, now));
        let later = now + FIRST_PAUSE;
        assert_eq!(breaker.allows(later), Some(Pass::Probe));
        assert!(!breaker.succeeded(Pass::Probe, false), "that is no proof");
        assert_eq!(breaker.state(), BreakerState::Closed, "but lets the next call find out");
        assert!(fail(&mut breaker, Pass::Free, later), "which is enough");
        assert!(breaker.is_open(later + FIRST_PAUSE), "the pause doubled");
        assert_eq!(breaker.allows(later + FIRST_PAUSE * 2), Some(Pass::Probe));
        assert!(!breaker.succeeded(Pass::Probe, false));
        breaker.succeeded(Pass::Free, true);
        assert!(!fail(&mut breaker, Pass::Free, later), "a page that came makes good");
    }

    #[test]
    fn a_probe_that_was_called_off_leaves_the_chance_to_the_next() {
        let mut breaker = Breaker::default();
        let now = Instant::now();
        for _ in 0..FAILURES {
            fail(&mut breaker, Pass::Free, now);
        }
        let later = now + FIRST_PAUSE;
        assert_eq!(breaker.allows(later), Some(Pass::Probe));
        breaker.unsettled(Pass::Probe, later);
        assert_eq!(breaker.allows(later), Some(Pass::Probe));
        assert_eq!(breaker.allows(later + LONGEST_PAUSE), Some(Pass::Probe), "a probe that never ends is not the last");
    }
}
