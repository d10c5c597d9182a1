//! Who owns each page of the device pool.

use super::pages::PageFault;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Free,
    /// A request's, or whoever called `alloc_pages`.
    Caller,
    Tree,
    /// Nobody's who asks here: another's from the start.
    Elsewhere,
}

/// Pages of the device pool, each free, a caller's or the tree's.
#[derive(Debug)]
pub(crate) struct DevicePages {
    owners: Vec<Owner>,
    free: Vec<u32>,
    callers: usize,
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
        DevicePages { owners, free: (first..pages).rev().collect(), callers: 0 }
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
        self.change(page, Owner::Caller, Owner::Free)?;
        self.callers -= 1;
        self.free.push(page);
        Ok(())
    }

    /// Frees a page of the tree.
    pub fn free_trees(&mut self, page: u32) -> Result<(), PageFault> {
        self.change(page, Owner::Tree, Owner::Free)?;
        self.free.push(page);
        Ok(())
    }

    /// Checks that the tree's pages are exactly `tree`, each once, and the free list is right.
    pub fn check(&self, tree: impl Iterator<Item = u32>) -> Result<(), String> {
        let elsewhere = |owner: &Owner| if *owner == Owner::Elsewhere { Owner::Elsewhere } else { Owner::Caller };
        let mut expected: Vec<Owner> = self.owners.iter().map(elsewhere).collect();
        for (page, owner) in
            self.free.iter().map(|&page| (page, Owner::Free)).chain(tree.map(|page| (page, Owner::Tree)))
        {
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
