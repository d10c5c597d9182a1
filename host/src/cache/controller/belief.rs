//! What the host believes of a store: pages it holds, and pages not to be asked for.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use crate::plugin::backend::PageKey;

/// Keys kept in each half of the set of stored pages.
const STORED_LIMIT: usize = 262_144;
/// Keys kept in the list of pages to treat as missing.
const SHUNNED_LIMIT: usize = 65_536;

/// Which pages a store holds, as far as acknowledged writes and reads tell. Bounded: it may forget,
/// which costs a redundant write, but it never believes without an acknowledgement.
#[derive(Debug, Default)]
pub(crate) struct Belief {
    young: HashSet<PageKey>,
    old: HashSet<PageKey>,
    shunned: HashMap<PageKey, Option<Instant>>,
}

impl Belief {
    /// A write or read of the page was acknowledged.
    pub fn stored(&mut self, key: &PageKey) {
        self.shunned.remove(key);
        if self.young.len() >= STORED_LIMIT {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(*key);
    }

    /// Whether the page was acknowledged and nothing spoke against it since.
    pub fn is_stored(&self, key: &PageKey) -> bool {
        self.young.contains(key) || self.old.contains(key)
    }

    /// The page is not there.
    pub fn gone(&mut self, key: &PageKey) {
        self.young.remove(key);
        self.old.remove(key);
    }

    /// Treats a page as missing until `until`, or for good.
    pub fn shun(&mut self, key: &PageKey, until: Option<Instant>) {
        self.gone(key);
        if self.shunned.len() >= SHUNNED_LIMIT {
            let now = Instant::now();
            self.shunned.retain(|_, until| until.is_none_or(|until| until > now));
            if self.shunned.len() >= SHUNNED_LIMIT {
                self.shunned.clear();
            }
        }
        self.shunned.insert(*key, until);
    }

    /// A page that could not be read was removed: it may be written again.
    pub fn heal(&mut self, key: &PageKey) {
        self.gone(key);
        self.shunned.remove(key);
    }

    /// Whether the page is to be treated as missing.
    pub fn is_shunned(&self, key: &PageKey, now: Instant) -> bool {
        match self.shunned.get(key) {
            None => false,
            Some(None) => true,
            Some(Some(until)) => *until > now,
        }
    }

    /// Whether the page is unreadable for good, so that writing it again is of no use.
    pub fn is_lost(&self, key: &PageKey) -> bool {
        matches!(self.shunned.get(key), Some(None))
    }

    /// Forgets everything: the store was emptied.
    pub fn clear(&mut self) {
        *self = Belief::default();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn i31315_a_failed_read_ends_the_belief_and_backs_off() {
        let mut belief = Belief::default();
        let now = Instant::now();
        belief.stored(&[1; 32]);
        assert!(belief.is_stored(&[1; 32]));
        belief.shun(&[1; 32], Some(now + Duration::from_secs(5)));
        assert!(!belief.is_stored(&[1; 32]));
        assert!(belief.is_shunned(&[1; 32], now));
        assert!(!belief.is_shunned(&[1; 32], now + Duration::from_secs(6)));
        belief.stored(&[1; 32]);
        assert!(!belief.is_shunned(&[1; 32], now), "a write that went well heals it");
    }

    #[test]
    fn lists_are_bounded() {
        let mut belief = Belief::default();
        for number in 0..(3 * STORED_LIMIT as u64) {
            let mut key = [0; 32];
            key[..8].copy_from_slice(&number.to_le_bytes());
            belief.stored(&key);
            belief.shun(&key, None);
        }
        assert!(belief.young.len() + belief.old.len() <= 2 * STORED_LIMIT);
        assert!(belief.shunned.len() <= SHUNNED_LIMIT);
    }
}
