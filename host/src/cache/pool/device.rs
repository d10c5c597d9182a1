//! Who owns each page of the device pool.

use std::sync::Arc;

use super::direct::HeldSlots;
use super::pages::PageFault;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Free,
    /// A request's, or whoever called `alloc_pages`.
    Caller,
    Tree,
    /// Nobody's who asks here: another's from the start.
    Elsewhere,
    /// Nobody's any more, but a call of a backend still has it.
    Waiting,
}

/// Pages of the device pool, each free, a caller's or the tree's.
#[derive(Debug)]
pub(crate) struct DevicePages {
    owners: Vec<Owner>,
    free: Vec<u32>,
    callers: usize,
    /// Pages that calls of backends have, where such calls are about pages of the device.
    held: Option<Arc<HeldSlots>>,
    /// Those that are waited for.
    waiting: Vec<u32>,
}

impl DevicePages {
    /// All of `pages` pages free.
    pub fn new(pages: u32) -> Self {
        Self::after(0, pages)
    }

    /// The pages from `first` to `pages`; those before it are somebody else's.
    pub fn after(first: u32, pages: u32) -> Self {
        let first = first.min(pages);
        let mut owners = vec![Owner::Elsewhere; first as usize];
        owners.resize(pages as usize, Owner::Free);
        DevicePages { owners, free: (first..pages).rev().collect(), callers: 0, held: None, waiting: Vec::new() }
    }

    /// Pages of `held` are free only once nobody has them any more, whoever frees them before.
    pub fn heed(&mut self, held: Arc<HeldSlots>) {
        self.held = Some(held);
    }

    /// Frees those that were waited for and that nobody has any more.
    pub fn sweep(&mut self) {
        let Some(held) = self.held.as_ref().filter(|_| !self.waiting.is_empty()) else { return };
        for page in self.waiting.extract_if(.., |page| !held.is_held(*page)) {
            if let Some(owner) = self.owners.get_mut(page as usize) {
                *owner = Owner::Free;
            }
            self.free.push(page);
        }
    }

    /// Pages in the pool.
    pub fn capacity(&self) -> usize {
        self.owners.len()
    }

    /// Free pages.
    pub fn free_count(&self) -> usize {
        self.free.len()
    }

    /// Pages that callers own.
    pub fn caller_count(&self) -> usize {
        self.callers
    }

    /// Takes `count` pages for a caller. None if there are fewer.
    pub fn alloc(&mut self, count: usize) -> Option<Vec<u32>> {
        if self.free.len() < count {
            self.sweep();
        }
        let rest = self.free.len().checked_sub(count)?;
        let taken = self.free.split_off(rest);
        for &page in &taken {
            if let Some(owner) = self.owners.get_mut(page as usize) {
                *owner = Owner::Caller;
            }
        }
        self.callers += count;
        Some(taken)
    }

    /// Whether a caller owns `page`.
    pub fn is_callers(&self, page: u32) -> bool {
        self.owners.get(page as usize) == Some(&Owner::Caller)
    }

    /// Hands a caller's page to the tree.
    pub fn give_to_tree(&mut self, page: u32) -> Result<(), PageFault> {
        self.change(page, Owner::Caller, Owner::Tree)?;
        self.callers -= 1;
        Ok(())
    }

    /// Frees a caller's page.
    pub fn free_callers(&mut self, page: u32) -> Result<(), PageFault> {
        self.let_go(page, Owner::Caller)?;
        self.callers -= 1;
        Ok(())
    }

    /// Frees a page of the tree.
    pub fn free_trees(&mut self, page: u32) -> Result<(), PageFault> {
        self.let_go(page, Owner::Tree)
    }

    /// Nobody needs the page any more; it is free, unless a call still has it.
    fn let_go(&mut self, page: u32, from: Owner) -> Result<(), PageFault> {
        if self.held.as_ref().is_some_and(|held| held.is_held(page)) {
            self.change(page, from, Owner::Waiting)?;
            self.waiting.push(page);
        } else {
            self.change(page, from, Owner::Free)?;
            self.free.push(page);
        }
        Ok(())
    }

    /// Checks that the tree's pages are exactly `tree`, each once, and the free list is right.
    pub fn check(&self, tree: impl Iterator<Item = u32>) -> Result<(), String> {
        let elsewhere = |owner: &Owner| if *owner == Owner::Elsewhere { Owner::Elsewhere } else { Owner::Caller };
        let mut expected: Vec<Owner> = self.owners.iter().map(elsewhere).collect();
        let free = self.free.iter().map(|&page| (page, Owner::Free));
        let waiting = self.waiting.iter().map(|&page| (page, Owner::Waiting));
        for (page, owner) in free.chain(waiting).chain(tree.map(|page| (page, Owner::Tree))) {
            match expected.get_mut(page as usize) {
                Some(seen) if *seen == Owner::Caller => *seen = owner,
                _ => return Err(format!("device page {page} has two owners or is outside")),
            }
        }
        for (page, (expected, found)) in expected.iter().zip(&self.owners).enumerate() {
            if expected != found {
                return Err(format!("device page {page} is {expected:?} by the lists and {found:?} by the pool"));
            }
        }
        let callers = self.owners.iter().filter(|&&o| o == Owner::Caller).count();
        if callers != self.callers {
            return Err(format!("{callers} device pages are callers', counted {}", self.callers));
        }
        Ok(())
    }

    fn change(&mut self, page: u32, from: Owner, to: Owner) -> Result<(), PageFault> {
        let pages = self.owners.len() as u32;
        match self.owners.get_mut(page as usize) {
            None => Err(PageFault::Outside { page, pages }),
            Some(owner) if *owner == from => {
                *owner = to;
                Ok(())
            }
            Some(_) => Err(PageFault::NotOwned { page }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_has_one_owner() {
        let mut pages = DevicePages::new(4);
        let taken = pages.alloc(3).unwrap();
        assert_eq!(pages.alloc(2), None, "nothing is taken when there is too little");
        pages.give_to_tree(taken[0]).unwrap();
        pages.free_callers(taken[1]).unwrap();
        assert_eq!(pages.caller_count(), 1);
        pages.check([taken[0]].into_iter()).unwrap();
        assert!(pages.check([].into_iter()).is_err(), "a lost page is found");
        assert!(pages.check([taken[0], taken[0]].into_iter()).is_err());
    }

    /// Slots of a load whose call has not returned, and pages of the tree that a late offload still reads.
    #[test]
    fn pages_that_a_call_has_are_given_to_nobody() {
        let held = Arc::new(HeldSlots::default());
        let mut pages = DevicePages::new(3);
        pages.heed(held.clone());
        let taken = pages.alloc(3).unwrap();
        held.hold(&taken[..2]);
        pages.give_to_tree(taken[1]).unwrap();
        pages.free_callers(taken[0]).unwrap();
        pages.free_trees(taken[1]).unwrap();
        pages.free_callers(taken[2]).unwrap();
        assert_eq!((pages.free_count(), pages.caller_count()), (1, 0));
        pages.check([].into_iter()).unwrap();
        assert!(pages.free_callers(taken[0]).is_err(), "it is nobody's");
        assert_eq!(pages.alloc(2), None);
        held.release(&taken[..1]);
        assert_eq!(
            pages.alloc(2).map(|mut pages| {
                pages.sort_unstable();
                pages
            }),
            Some({
                let mut expected = vec![taken[0], taken[2]];
                expected.sort_unstable();
                expected
            })
        );
        held.release(&taken[1..2]);
        pages.sweep();
        assert_eq!(pages.free_count(), 1);
        pages.check([].into_iter()).unwrap();
    }

    #[test]
    fn pages_of_somebody_else_are_never_given_out() {
        let mut pages = DevicePages::after(2, 4);
        assert_eq!(pages.free_count(), 2);
        let mut taken = pages.alloc(2).unwrap();
        taken.sort_unstable();
        assert_eq!(taken, [2, 3]);
        assert!(pages.alloc(1).is_none() && pages.free_callers(0).is_err() && pages.give_to_tree(1).is_err());
        pages.check([].into_iter()).unwrap();
        assert!(pages.check([1].into_iter()).is_err());
    }

    #[test]
    fn double_free_and_foreign_free_are_refused() {
        let mut pages = DevicePages::new(2);
        let page = pages.alloc(1).unwrap()[0];
        pages.give_to_tree(page).unwrap();
        assert_eq!(pages.free_callers(page), Err(PageFault::NotOwned { page }));
        pages.free_trees(page).unwrap();
        assert_eq!(pages.free_trees(page), Err(PageFault::NotOwned { page }));
        assert_eq!(pages.give_to_tree(7), Err(PageFault::Outside { page: 7, pages: 2 }));
        pages.check([].into_iter()).unwrap();
    }
}
