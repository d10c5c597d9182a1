//! What the tree remembers of pages it no longer holds, to say why a prefix was no hit.

use std::collections::{HashMap, HashSet};

/// Fingerprints kept in each half of a set.
const LIMIT: usize = 32_768;

/// Bounded and forgetful: answers may be a false no after a while, never an unbounded table.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// Fingerprints of pages that were evicted; when `young` is full it becomes `old`.
    young: HashSet<u64>,
    old: HashSet<u64>,
    /// The namespace that last began a sequence with a page of this fingerprint.
    first_pages: HashMap<u64, u64>,
}

impl Memory {
    /// A page left the tree.
    pub fn departed(&mut self, fingerprint: u64) {
        if self.young.len() >= LIMIT {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(fingerprint);
    }

    /// Whether a page was here and left.
    pub fn has_departed(&self, fingerprint: u64) -> bool {
        self.young.contains(&fingerprint) || self.old.contains(&fingerprint)
    }

    /// A sequence of `namespace` begins with this page.
    pub fn began(&mut self, page: u64, namespace: u64) {
        if self.first_pages.len() >= LIMIT {
            self.first_pages.clear();
        }
        self.first_pages.insert(page, namespace);
    }

    /// Whether a sequence of another namespace than `namespace` began with this page.
    pub fn began_elsewhere(&self, page: u64, namespace: u64) -> bool {
        self.first_pages.get(&page).is_some_and(|&seen| seen != namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_and_keeps_the_latest() {
        let mut memory = Memory::default();
        for fingerprint in 0..10 * LIMIT as u64 {
            memory.departed(fingerprint);
            memory.began(fingerprint, 1);
        }
        assert!(memory.young.len() + memory.old.len() <= 2 * LIMIT);
        assert!(memory.first_pages.len() <= LIMIT);
        let last = 10 * LIMIT as u64 - 1;
        assert!(memory.has_departed(last) && memory.has_departed(last - LIMIT as u64 / 2));
        assert!(!memory.has_departed(0));
        assert!(memory.began_elsewhere(last, 2) && !memory.began_elsewhere(last, 1));
    }
}
