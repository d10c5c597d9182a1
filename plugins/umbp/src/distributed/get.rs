//! Reading objects: here, or where they are.

use std::collections::{BTreeMap, HashSet};

use kvdock_plugin_api::{Call, Error, Result};

use super::cluster::Cluster;
use super::fetch::Fetched;
use super::limit::Limit;
use super::objects::{DATA, each, text};
use crate::local::memory::Copied;
use crate::object::{Got, Piece, Read};

/// Places that are tried for an object that one of them does not deliver.
const PLACES: usize = 3;

fn bytes(read: &Read) -> u64 {
    read.ranges.iter().map(|range| range.piece.len as u64).sum()
}

impl Cluster {
    /// # Safety
    /// As [`crate::object::Objects::get`].
    pub(super) unsafe fn get_all(&self, reads: &[Read], call: &Call<'_>) -> Result<Vec<Got>> {
        call.check()?;
        let (node, limit) = (&self.node, Limit::of(call, DATA));
        let epoch = node.pool.removals();
        // SAFETY: passed on to the caller.
        let mut got = unsafe { self.get_here(&reads.iter().collect::<Vec<_>>()) };
        // SAFETY: as above.
        let damaged = unsafe { self.get_below(reads, &mut got, epoch, call)? };
        let is_open = |at: &usize| got.get(*at) == Some(&Got::Missing) || damaged.contains(at);
        let mut open: Vec<usize> = (0..reads.len()).filter(is_open).collect();
        let mut silent: HashSet<String> = HashSet::new();
        for _ in 0..PLACES {
            if open.is_empty() {
                break;
            }
            let names: Vec<&str> = open.iter().filter_map(|at| reads.get(*at)).map(|read| text(&read.name)).collect();
            let exclude: Vec<String> =
                std::iter::once(node.id.clone()).chain(node.foreign()).chain(silent.iter().cloned()).collect();
            let sources = match node.master.route_get(&names, &exclude, &limit) {
                Ok(sources) => sources,
                Err(failed) => {
                    if limit.left().is_ok() {
                        node.failed(&failed.text);
                    } else if !got.contains(&Got::Yes) {
                        return Err(Error::from(failed));
                    }
                    for at in &open {
                        put_in(&mut got, *at, Got::Failed(failed.text.clone()));
                    }
                    break;
                }
            };
            let mut by_node: BTreeMap<(String, String), Vec<usize>> = BTreeMap::new();
            for (at, source) in open.iter().zip(sources) {
                if let Some(source) = source.filter(|source| !source.address.is_empty()) {
                    by_node.entry((source.node, source.address)).or_default().push(*at);
                }
            }
            // SAFETY: passed on to the caller.
            open = unsafe { self.get_there(reads, by_node, &limit, epoch, &mut got, &mut silent) };
        }
        if limit.left().is_err() && !got.contains(&Got::Yes) {
            call.check()?;
        }
        Ok(got)
    }

    unsafe fn get_here(&self, reads: &[&Read]) -> Vec<Got> {
        let pool = &self.node.pool;
        let pinned: Vec<_> = reads.iter().map(|read| pool.pin(text(&read.name), Some(read.len))).collect();
        let here = reads.iter().zip(&pinned).filter(|(_, pinned)| pinned.is_ok());
        let total: u64 = here.map(|(read, _)| bytes(read)).sum();
        pool.read_all(Copied { objects: reads.len(), bytes: total }, |at, past_caches| {
            if let (Some(read), Some(Ok(pinned))) = (reads.get(at), pinned.get(at)) {
                for range in &read.ranges {
                    // SAFETY: passed on to the caller.
                    unsafe { pinned.read(range, past_caches) };
                }
            }
        });
        self.node.figures.got_here.add(total);
        pinned.into_iter().map(|pinned| pinned.map_or_else(|why| why, |_| Got::Yes)).collect()
    }

    /// Reads what memory has not from segments. Gives those that can't be read there, which another node may have.
    unsafe fn get_below(&self, reads: &[Read], got: &mut [Got], epoch: u64, call: &Call<'_>) -> Result<Vec<usize>> {
        let pool = &self.node.pool;
        let Some(below) = pool.below() else { return Ok(Vec::new()) };
        let mut open: Vec<usize> = (0..reads.len()).filter(|at| got.get(*at) == Some(&Got::Missing)).collect();
        if open.is_empty() {
            return Ok(Vec::new());
        }
        // Parts of objects are read many times, as layer after layer; whole ones go to the caller at once.
        let parts: Vec<&str> = open
            .iter()
            .filter_map(|at| reads.get(*at))
            .filter(|read| !read.is_whole())
            .map(|read| text(&read.name))
            .collect();
        if !parts.is_empty() {
            pool.bring(&parts);
            let part: Vec<&Read> = open.iter().filter_map(|at| reads.get(*at)).collect();
            // SAFETY: passed on to the caller.
            for (at, now) in open.iter().zip(unsafe { self.get_here(&part) }) {
                put_in(got, *at, now);
            }
            open.retain(|at| got.get(*at) == Some(&Got::Missing));
        }
        let part: Vec<Read> = open.iter().filter_map(|at| reads.get(*at)).cloned().collect();
        // SAFETY: passed on to the caller.
        let read = unsafe { below.read(&part, call) }?;
        let mut damaged = Vec::new();
        for (at, now) in open.into_iter().zip(read) {
            match &now {
                Got::Yes => {
                    if let Some(read) = reads.get(at) {
                        self.node.figures.got_here.add(bytes(read));
                        if pool.promotes() {
                            self.keep(read, epoch);
                        }
                    }
                }
                Got::Missing => {}
                Got::Corrupt(_) | Got::Failed(_) => damaged.push(at),
            }
            put_in(got, at, now);
        }
        Ok(damaged)
    }

    /// Gives those that are to be looked for elsewhere.
    unsafe fn get_there(
        &self,
        reads: &[Read],
        by_node: BTreeMap<(String, String), Vec<usize>>,
        limit: &Limit<'_>,
        epoch: u64,
        got: &mut [Got],
        silent: &mut HashSet<String>,
    ) -> Vec<usize> {
        let groups: Vec<((String, String), Vec<usize>)> = by_node.into_iter().collect();
        let results = each(groups.len(), |at| {
            let Some(((id, address), numbers)) = groups.get(at) else { return Vec::new() };
            let part: Vec<&Read> = numbers.iter().filter_map(|number| reads.get(*number)).collect();
            // SAFETY: passed on to the caller.
            unsafe { self.fetch_from(id, address, &part, limit) }
        });
        let mut again = Vec::new();
        for (((id, _), numbers), fetched) in groups.iter().zip(results) {
            let mut fetched = fetched.unwrap_or_default().into_iter();
            for number in numbers {
                let (now, elsewhere) = match fetched.next() {
                    Some(Fetched::Got(Got::Yes)) => {
                        if let Some(read) = reads.get(*number) {
                            self.node.figures.got_there.add(bytes(read));
                            self.keep_foreign(read, epoch);
                        }
                        (Got::Yes, false)
                    }
                    // The master has not heard yet that it has gone there; it may be elsewhere.
                    Some(Fetched::Got(Got::Missing)) => (Got::Missing, true),
                    Some(Fetched::Got(got)) => (got, false),
                    Some(Fetched::Node(why)) => (Got::Failed(why), true),
                    None => (Got::Failed("there was no thread for it".to_owned()), false),
                };
                put_in(got, *number, now);
                if elsewhere {
                    silent.insert(id.clone());
                    again.push(*number);
                }
            }
        }
        again
    }

    /// A copy here of what came from another node.
    fn keep_foreign(&self, read: &Read, epoch: u64) {
        let config = &self.node.config;
        if config.cache_fetches && (config.admission == 0 || read.len <= config.admission) {
            self.keep(read, epoch);
        }
    }

    /// A copy in memory of what came from elsewhere, where there is room to spare, and unless something was removed meanwhile.
    fn keep(&self, read: &Read, epoch: u64) {
        let pool = &self.node.pool;
        if !read.is_whole() {
            return;
        }
        let Some(extents) = pool.take_spare(read.len, self.node.config.high) else { return };
        let pieces: Vec<Piece> = read.ranges.iter().map(|range| range.piece).collect();
        // SAFETY: the extents were taken for this copy alone; the pieces have just been filled, and are the call's until it returns.
        unsafe { pool.fill(&extents, read.len, &pieces) };
        let waiting = pool.show_copy(text(&read.name), read.len, extents, epoch);
        self.node.happened(waiting);
    }
}

fn put_in(got: &mut [Got], at: usize, value: Got) {
    if let Some(entry) = got.get_mut(at) {
        *entry = value;
    }
}
