//! Saying which pages are stored.

use std::collections::HashSet;
use std::ops::Range;

use kvdock_plugin_api::{Exists, PageStatus, Result};

use super::{MOST_NAMES, Store};
use crate::member::{RPC_TIME, error_of};
use crate::wire::rpc;

impl Store {
    /// Looks up the pages of an exists call: one question to the master for all pools. The pages that are there get a lease.
    pub fn exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        let call = *exists.call();
        call.check()?;
        // The names stand one after another in one text: hundreds of texts would cost more than what is in them.
        let mut text = String::new();
        let mut asked: Vec<(usize, usize, Range<usize>)> = Vec::new();
        // A page that is stored as no object at all is never missing.
        let mut whole: Vec<(usize, usize)> = Vec::new();
        for (number, query) in exists.pools().iter().enumerate() {
            let shape = self.pool(&query.pool)?;
            let len: usize = shape.objects.iter().map(|object| self.names.object_len(&object.label)).sum();
            let pages = exists.keys().len().saturating_sub(query.held_pages);
            text.reserve(pages * len);
            asked.reserve(pages * shape.objects.len());
            for (at, key) in exists.keys().iter().enumerate().skip(query.held_pages) {
                whole.push((number, at));
                for object in shape.objects.iter() {
                    let first = text.len();
                    self.names.append(&mut text, &object.label, key);
                    asked.push((number, at, first..text.len()));
                }
            }
        }
        let mut missing = HashSet::new();
        let _quiet = self.commit.try_read_until(Store::limit(&call).until());
        for asked in asked.chunks(MOST_NAMES) {
            let name = |(_, _, name): &(usize, usize, Range<usize>)| text.get(name.clone()).unwrap_or_default();
            let names = asked.iter().map(name).collect();
            let request = (names, self.member.tenant.as_str());
            let limit = Store::limit(&call).at_most(RPC_TIME);
            let found = self.member.master.call::<rpc::BatchExistKey>(&request, &limit);
            let found = found.map_err(|error| {
                Store::count(&self.figures.failures, 1);
                error_of(&error)
            })?;
            for (asked, found) in asked.iter().zip(found) {
                if found != Ok(true) || self.failed_lately(name(asked)) {
                    missing.insert((asked.0, asked.1));
                }
            }
        }
        for (number, at) in whole {
            let there = !missing.contains(&(number, at));
            exists.set(number, at, if there { PageStatus::Ok } else { PageStatus::Missing });
        }
        Ok(())
    }
}
