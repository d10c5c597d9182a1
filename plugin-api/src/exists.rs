//! `batch_exists` and the linker's `lookup`: which prefixes of a chain can be restored.

use crate::call::{Call, Chain};
use crate::pool::Pool;
use crate::v0_1::PageKey;
use crate::{HitPolicy, PageStatus};

/// A pool that a prefix needs.
#[derive(Debug, Clone)]
pub struct PoolQuery {
    /// The pool.
    pub pool: Pool,
    /// Which of its pages the prefix needs.
    pub hit_policy: HitPolicy,
    /// For trailing pages: how many.
    pub trailing_pages: usize,
    /// For block groups: anchor pages of a block.
    pub block_pages: usize,
    /// For block groups: keys of a group.
    pub group_pages: usize,
    /// The first pages of the chain that the worker holds in this pool already: the store need not have them.
    pub held_pages: usize,
}

/// The question which prefixes of a chain can be restored, and its answer.
///
/// A backend says of each page whether it is there ([`Exists::set`]); what can be restored follows from the
/// policies of the pools. Pages it does not speak of count as missing, so it may stop where the anchor's chain ends.
#[derive(Debug)]
pub struct Exists<'a> {
    pub(crate) call: Call<'a>,
    pub(crate) chain: Chain<'a>,
    pub(crate) request: u64,
    pub(crate) keys: &'a [PageKey],
    pub(crate) queries: Vec<PoolQuery>,
    pub(crate) present: PresentMap<'a>,
    pub(crate) restorable: &'a mut [u8],
    pub(crate) answered: bool,
}

#[derive(Debug)]
pub(crate) enum PresentMap<'a> {
    Host(&'a mut [u8]),
    Own(Vec<u8>),
}

impl PresentMap<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            PresentMap::Host(bytes) => bytes,
            PresentMap::Own(bytes) => bytes,
        }
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            PresentMap::Host(bytes) => bytes,
            PresentMap::Own(bytes) => bytes,
        }
    }
}

impl<'a> Exists<'a> {
    /// Deadline and cancel flag.
    pub fn call(&self) -> &Call<'a> {
        &self.call
    }
    /// Keys of the chain.
    pub fn keys(&self) -> &'a [PageKey] {
        self.keys
    }
    /// The pools a prefix needs.
    pub fn pools(&self) -> &[PoolQuery] {
        &self.queries
    }
    /// Where the keys stand in their sequence.
    pub fn chain(&self) -> Chain<'a> {
        self.chain
    }
    /// Number of the request; 0 for none.
    pub fn request(&self) -> u64 {
        self.request
    }

    /// Says what is known of key `key` in pool `pool` (an index into [`Exists::pools`]). Out of range is ignored.
    pub fn set(&mut self, pool: usize, key: usize, status: PageStatus) {
        if key < self.keys.len()
            && let Some(entry) = self.present.bytes_mut().get_mut(pool * self.keys.len() + key)
        {
            *entry = status.raw();
        }
    }

    /// Says directly that the first `pages` pages can be restored in full, or not. A backend that calls this
    /// answers for every length itself.
    pub fn set_restorable(&mut self, pages: usize, can: bool) {
        self.answered = true;
        if let Some(entry) = self.restorable.get_mut(pages) {
            *entry = u8::from(can);
        }
    }

    /// Derives what can be restored from what was said of the pages.
    pub(crate) fn settle(&mut self) {
        if self.answered {
            return;
        }
        let keys = self.keys.len();
        let present = self.present.bytes();
        self.restorable.fill(1);
        for (index, query) in self.queries.iter().enumerate() {
            let pool = &present[index * keys..(index + 1) * keys];
            let needed = match query.hit_policy {
                HitPolicy::AllPages => usize::MAX,
                HitPolicy::TrailingPages => query.trailing_pages.max(1),
                HitPolicy::BlockGroups | HitPolicy::Unknown => continue,
            };
            // Pages in an unbroken run up to the length at hand.
            let mut run = 0usize;
            for length in 1..=keys {
                let there = length <= query.held_pages || pool[length - 1] == PageStatus::Ok.raw();
                run = if there { run + 1 } else { 0 };
                if run < needed.min(length) {
                    self.restorable[length] = 0;
                }
            }
        }
    }
}
