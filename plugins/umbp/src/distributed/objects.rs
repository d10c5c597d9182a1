//! The cluster as a store of objects.

use std::time::{Duration, Instant};

use kvdock_plugin_api::{Call, ClearScope, Error, ErrorKind, Health, HealthState, HeldPages, Pool as HostPool, Result};

use super::cluster::Cluster;
use super::limit::Limit;
use crate::local::below::Below;
use crate::object::{Got, Held, Objects, Put, Read, Stored};

/// Longest time of a call about pages, whatever its own deadline.
pub const DATA: Duration = Duration::from_secs(30);

/// A name as it travels. Names are texts; what is none could not have been made by this crate.
pub fn text(name: &[u8]) -> &str {
    std::str::from_utf8(name).unwrap_or_default()
}

impl Cluster {
    fn open_only(&self) -> Result<()> {
        match self.node.is_closed() {
            false => Ok(()),
            true => Err(Error::new(ErrorKind::Unavailable, "the node has left the cluster")),
        }
    }

    fn look_up(&self, names: &[Vec<u8>], call: &Call<'_>) -> Result<Vec<bool>> {
        let names: Vec<&str> = names.iter().map(|name| text(name)).collect();
        let mut found = self.node.pool.has(&names);
        // What has just gone from here the master may still know; it does not count.
        let asked: Vec<usize> = (0..names.len())
            .filter(|at| {
                !found.get(*at).copied().unwrap_or(true)
                    && names.get(*at).is_some_and(|name| !self.node.pool.is_leaving(name))
            })
            .collect();
        if asked.is_empty() {
            return Ok(found);
        }
        let keys: Vec<&str> = asked.iter().filter_map(|at| names.get(*at).copied()).collect();
        let limit = Limit::of(call, DATA);
        let foreign = self.node.foreign();
        let answer = if foreign.is_empty() {
            self.node.master.lookup(&keys, &limit)
        } else {
            // What only nodes have that bytes can't come from is not there for us.
            let sources = self.node.master.route_get(&keys, &foreign, &limit);
            sources.map(|sources| sources.iter().map(Option::is_some).collect())
        };
        match answer {
            Ok(there) => {
                for (at, there) in asked.into_iter().zip(there) {
                    if let Some(found) = found.get_mut(at) {
                        *found = there;
                    }
                }
                Ok(found)
            }
            Err(failed) if limit.left().is_err() => Err(failed.into()),
            Err(failed) => {
                self.node.failed(&failed.text);
                // What is here is here without the master too.
                if found.contains(&true) { Ok(found) } else { Err(failed.into()) }
            }
        }
    }
}

impl Objects for Cluster {
    fn exists(&self, names: &[Vec<u8>], call: &Call<'_>) -> Result<Vec<bool>> {
        self.open_only()?;
        self.look_up(names, call)
    }

    unsafe fn put(&self, puts: &[Put], call: &Call<'_>) -> Result<Vec<Stored>> {
        self.open_only()?;
        // SAFETY: passed on to the caller.
        unsafe { self.put_all(puts, call) }
    }

    unsafe fn get(&self, reads: &[Read], call: &Call<'_>) -> Result<Vec<Got>> {
        self.open_only()?;
        // SAFETY: passed on to the caller.
        unsafe { self.get_all(reads, call) }
    }

    fn remove(&self, names: &[Vec<u8>], call: &Call<'_>) -> Result<Vec<bool>> {
        self.open_only()?;
        self.remove_all(names, call)
    }

    fn clear(&self, prefix: &[u8], scope: ClearScope, call: &Call<'_>) -> Result<()> {
        self.open_only()?;
        if scope == ClearScope::Everything {
            return Err(Error::unsupported("clearing what nodes that are none of kvdock have"));
        }
        if prefix.is_empty() {
            return Err(Error::unsupported("clearing one model's pages where names do not say whose they are"));
        }
        self.clear_prefix(text(prefix), call)
    }

    fn flush(&self, call: &Call<'_>) -> Result<()> {
        self.open_only()?;
        self.node.pool.write_out_all(call)?;
        let until = Limit::of(call, DATA).until();
        if self.node.tell(until) {
            return Ok(());
        }
        call.check()?;
        let why = self.node.trouble().unwrap_or_else(|| "it did not answer in time".to_owned());
        let text = format!("the master was not told of what was stored: {why}");
        Err(Error::new(ErrorKind::Unavailable, text).retryable())
    }

    fn register(&self, pool: &HostPool, _call: &Call<'_>) -> Result<()> {
        let Some(rdma) = &self.node.rdma else { return Ok(()) };
        rdma.register(pool)
            .map_err(|what| Error::new(ErrorKind::Unavailable, format!("pool {} ({}): {what}", pool.id(), pool.name())))
    }

    fn unregister(&self, pool: &HostPool) {
        if let Some(rdma) = &self.node.rdma {
            rdma.unregister(pool);
        }
    }

    fn report(&self, held: &HeldPages<'_>) -> Result<()> {
        self.open_only()?;
        self.node.report(held);
        Ok(())
    }

    fn held(&self) -> Held {
        self.node.pool.held_in_all()
    }

    fn health(&self) -> Health {
        match self.node.trouble() {
            None => self.node.pool.below().map_or_else(Health::ok, Below::health),
            Some(reason) => Health { state: HealthState::Degraded, reason },
        }
    }

    fn is_durable(&self) -> bool {
        false
    }

    fn can_remove(&self) -> bool {
        true
    }

    fn has_ranges(&self) -> bool {
        true
    }

    fn close(&self, call: &Call<'_>) -> Result<()> {
        let written = if self.node.is_closed() { Ok(()) } else { self.node.pool.write_out_all(call) };
        self.leave();
        written
    }
}

/// When a wait that is to answer before its call ends has to be over.
pub fn before(limit: &Limit<'_>, most: Duration) -> Instant {
    limit.until().min(Instant::now() + most)
}

/// Does work several times at once. What no thread could be had for has no result.
pub fn each<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<Option<T>> {
    if count == 1 {
        return vec![Some(work(0))];
    }
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            (0..count).map(|at| std::thread::Builder::new().spawn_scoped(scope, move || work(at))).collect();
        threads.into_iter().map(|thread| thread.ok()?.join().ok()).collect()
    })
}
