//! Saying which pages are stored.

use std::collections::HashSet;

use kvdock_plugin_api::{Exists, PageStatus, Result};

use super::{MOST_NAMES, Store};
use crate::member::{RPC_TIME, error_of};
use crate::wire::rpc;

impl Store {
    /// Looks up the pages of an exists call: one question to the master for all pools. The pages that are there get a lease.
    pub fn exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        let call = *exists.call();
        call.check()?;
        let mut asked: Vec<(usize, usize, String)> = Vec::new();
        // A page that is stored as no object at all is never missing.
        let mut whole: Vec<(usize, usize)> = Vec::new();
        for (number, query) in exists.pools().iter().enumerate() {
            let shape = self.pool(&query.pool)?;
            for (at, key) in exists.keys().iter().enumerate().skip(query.held_pages) {
                whole.push((number, at));
                asked.extend(shape.objects.iter().map(|object| (number, at, self.names.object(&object.label, key))));
            }
        }
        let mut missing = HashSet::new();
        let _quiet = self.commit.try_read_until(Store::limit(&call).until());
        for asked in asked.chunks(MOST_NAMES) {
            let names = asked.iter().map(|(_, _, name)| name.as_str()).collect();
            let request = (names, self.member.tenant.as_str());
            let limit = Store::limit(&call).at_most(RPC_TIME);
            let found = self.member.master.call::<rpc::BatchExistKey>(&request, &limit);
            let found = found.map_err(|error| {
                Store::count(&self.figures.failures, 1);
                error_of(&error)
            })?;
            for ((number, at, name), found) in asked.iter().zip(found) {
                if found != Ok(true) || self.failed_lately(name) {
                    missing.insert((*number, *at));
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
