//! Free list of a pool whose pages may have several holders.

/// A page was given back or held in a way that its holders cannot have meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PageFault {
    /// The pool has no such page.
    #[error("page {page} is outside the pool of {pages} pages")]
    Outside { page: u32, pages: u32 },
    /// The page is free, or not its giver's to free.
    #[error("page {page} was freed twice, or by one who does not own it")]
    NotOwned { page: u32 },
}

/// Pages that calls may hold, whoever they are.
pub(crate) trait Holders {
    /// Takes a holder from each page.
    fn let_go(&self, pages: &[u32]);
}

/// Pages counted by holders: the tree is one, each operation on a page is another. A page is free
/// again when the last lets go, so an operation's pages outlive whatever happens to the tree.
#[derive(Debug)]
pub(crate) struct SharedPages {
    holders: Vec<u32>,
    free: Vec<u32>,
}

impl SharedPages {
    /// All of `pages` pages free.
    pub fn new(pages: u32) -> Self {
        SharedPages {
            holders: vec![0; pages as usize],
            // Low numbers first.
            free: (0..pages).rev().collect(),
        }
    }

    /// Free pages.
    pub fn free_count(&self) -> usize {
        self.free.len()
    }

    /// Takes `count` pages, each with one holder. None if there are fewer.
    pub fn alloc(&mut self, count: usize) -> Option<Vec<u32>> {
        let rest = self.free.len().checked_sub(count)?;
        let taken = self.free.split_off(rest);
        for &page in &taken {
            if let Some(holders) = self.holders.get_mut(page as usize) {
                *holders = 1;
            }
        }
        Some(taken)
    }

    /// Adds a holder to a page that has one.
    pub fn retain(&mut self, page: u32) -> Result<(), PageFault> {
        match self.entry(page)? {
            0 => Err(PageFault::NotOwned { page }),
            holders => {
                *holders += 1;
                Ok(())
            }
        }
    }

    /// Takes a holder away; true if the page is free now.
    pub fn release(&mut self, page: u32) -> Result<bool, PageFault> {
        let holders = self.entry(page)?;
        match holders {
            0 => Err(PageFault::NotOwned { page }),
            1 => {
                *holders = 0;
                self.free.push(page);
                Ok(true)
            }
            _ => {
                *holders -= 1;
                Ok(false)
            }
        }
    }

    /// Holders of a page; 0 for a free one and for one outside the pool.
    pub fn holders(&self, page: u32) -> u32 {
        self.holders.get(page as usize).copied().unwrap_or(0)
    }

    /// Checks that the free list is the set of pages without holders.
    pub fn check(&self) -> Result<(), String> {
        let mut listed = vec![false; self.holders.len()];
        for &page in &self.free {
            match listed.get_mut(page as usize) {
                Some(seen) if !*seen => *seen = true,
                _ => return Err(format!("page {page} is twice in the free list or outside")),
            }
        }
        for (page, (&holders, &free)) in self.holders.iter().zip(&listed).enumerate() {
            if (holders == 0) != free {
                return Err(format!("page {page} has {holders} holders, free list: {free}"));
            }
        }
        Ok(())
    }

    fn entry(&mut self, page: u32) -> Result<&mut u32, PageFault> {
        let pages = self.holders.len() as u32;
        self.holders.get_mut(page as usize).ok_or(PageFault::Outside { page, pages })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_back_when_the_last_holder_lets_go() {
        let mut pages = SharedPages::new(3);
        let taken = pages.alloc(3).unwrap();
        assert_eq!(pages.alloc(1), None);
        pages.retain(taken[0]).unwrap();
        assert!(!pages.release(taken[0]).unwrap());
        assert_eq!(pages.free_count(), 0);
        assert!(pages.release(taken[0]).unwrap());
        assert_eq!(pages.alloc(1), Some(vec![taken[0]]));
        pages.check().unwrap();
    }

    #[test]
    fn i13501_double_free_is_refused_and_changes_nothing() {
        let mut pages = SharedPages::new(2);
        let page = pages.alloc(1).unwrap()[0];
        pages.release(page).unwrap();
        assert_eq!(pages.release(page), Err(PageFault::NotOwned { page }));
        assert_eq!(pages.retain(page), Err(PageFault::NotOwned { page }));
        assert_eq!(pages.release(9), Err(PageFault::Outside { page: 9, pages: 2 }));
        pages.check().unwrap();
        assert_eq!(pages.free_count(), 2);
    }
}
