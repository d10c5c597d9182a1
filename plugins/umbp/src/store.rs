//! Pages of batches, as objects.

pub mod linked;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kvdock_plugin_api::v0_1::Stats;
use kvdock_plugin_api::{
    Batch, Error, ErrorKind, Exists, Get, HealthState, Host, LogLevel, MemoryKind, MetricKind, PageStatus, Pool,
    Remove, Result, Set, Transfer,
};
use parking_lot::RwLock;

use crate::names::{Names, PoolNames};
use crate::object::{Got, Objects, Piece, Put, Range, Read, Stored};

/// The object of a page without bytes.
static MARKER: [u8; 1] = *b"1";

/// A registered pool.
#[derive(Debug)]
struct PoolInfo {
    names: PoolNames,
    /// Offset in its object of each segment.
    offsets: Vec<u64>,
}

/// Figures since the start.
#[derive(Debug, Default)]
struct Figures {
    failures: AtomicU64,
    gets: AtomicU64,
    get_ns: AtomicU64,
    sets: AtomicU64,
    set_ns: AtomicU64,
}

/// Pages of one worker in a store.
#[derive(Debug)]
pub struct Store {
    pub objects: Box<dyn Objects>,
    pub names: Names,
    pub host: Host,
    pools: RwLock<HashMap<u32, Arc<PoolInfo>>>,
    figures: Figures,
}

/// Which page an object of a call belongs to.
#[derive(Debug, Clone, Copy)]
struct Owner<'a> {
    transfer: &'a Transfer<'a>,
    number: usize,
}

/// Pages that were not taken.
const REFUSED: &str = "umbp_refused_pages";
/// Pages that were not what had been stored.
const CORRUPT: &str = "umbp_corrupt_pages";
/// 1 while something is the matter.
const DEGRADED: &str = "umbp_degraded";

/// Shows whether something is the matter with the store.
pub fn show_degraded(host: &Host, degraded: bool) {
    host.metric(MetricKind::GaugeSet, DEGRADED, "", if degraded { 1.0 } else { 0.0 });
}

impl Store {
    /// Pages in a store.
    pub fn new(objects: Box<dyn Objects>, names: Names, host: Host) -> Store {
        // What has not happened is seen too.
        [REFUSED, CORRUPT].iter().for_each(|name| host.metric(MetricKind::CounterAdd, name, "", 0.0));
        show_degraded(&host, objects.health().state != HealthState::Ok);
        Store { objects, names, host, pools: RwLock::default(), figures: Figures::default() }
    }

    /// Takes a pool.
    ///
    /// # Errors
    /// When its memory is on a device, or there are no names for it.
    pub fn register(&self, pool: &Pool, call: &kvdock_plugin_api::Call<'_>) -> Result<()> {
        let on_host = |kind| matches!(kind, MemoryKind::Host | MemoryKind::CudaPinned);
        if !pool.regions().iter().all(|region| on_host(region.memory_kind)) {
            let (id, name) = (pool.id(), pool.name());
            let text = format!("pool {id} ({name}): it lies in device memory, this backend moves host memory");
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let names = self.names.pool(pool)?;
        let mut offsets = vec![0; pool.segments().len()];
        for (_, segments) in &names.parts {
            let mut at = 0;
            for segment in segments.clone() {
                if let (Some(offset), Some(info)) = (offsets.get_mut(segment), pool.segments().get(segment)) {
                    *offset = at;
                    at += info.len;
                }
            }
        }
        self.objects.register(pool, call)?;
        self.pools.write().insert(pool.id(), Arc::new(PoolInfo { names, offsets }));
        Ok(())
    }

    /// Forgets a pool.
    pub fn unregister(&self, pool: &Pool) {
        if self.pools.write().remove(&pool.id()).is_some() {
            self.objects.unregister(pool);
        }
    }

    fn pool(&self, pool: &Pool) -> Result<Arc<PoolInfo>> {
        self.pools.read().get(&pool.id()).cloned().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("pool {} ({}) is not registered", pool.id(), pool.name()))
        })
    }

    /// Says which pages are stored.
    pub fn exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        let call = *exists.call();
        call.check()?;
        let (mut asked, mut names) = (Vec::new(), Vec::new());
        for (number, query) in exists.pools().iter().enumerate() {
            let info = self.pool(&query.pool)?;
            for (at, key) in exists.keys().iter().enumerate().skip(query.held_pages) {
                asked.push((number, at, info.names.parts.len()));
                names.extend((0..info.names.parts.len()).map(|part| info.names.name(part, key)));
            }
        }
        if names.is_empty() {
            return Ok(());
        }
        let found = self.objects.exists(&names, &call).inspect_err(|_| self.failed())?;
        let mut found = found.into_iter();
        for (number, at, parts) in asked {
            // All parts are taken, so that the answers stay in step.
            let there = found.by_ref().take(parts).filter(|there| *there).count() == parts;
            exists.set(number, at, if there { PageStatus::Ok } else { PageStatus::Missing });
        }
        Ok(())
    }

    /// Stores pages.
    pub fn set(&self, batch: &Batch<'_, Set>) -> Result<()> {
        let began = Instant::now();
        let result = self.set_pages(batch);
        self.done(&self.figures.sets, &self.figures.set_ns, began, &result);
        result
    }

    fn set_pages(&self, batch: &Batch<'_, Set>) -> Result<()> {
        batch.call().check()?;
        let (mut puts, mut owners) = (Vec::with_capacity(batch.len()), Vec::new());
        for transfer in batch.transfers() {
            let info = self.pool(transfer.pool())?;
            for (number, key) in transfer.keys().iter().enumerate() {
                for (part, (_, segments)) in info.names.parts.iter().enumerate() {
                    let mut pieces = Vec::with_capacity(segments.len());
                    for segment in segments.clone() {
                        let (base, len) = transfer.pool().piece(page(transfer, number)?, segment)?;
                        pieces.push(Piece { base, len });
                    }
                    if transfer.pool().is_logical() {
                        pieces.push(Piece { base: MARKER.as_ptr().cast_mut(), len: MARKER.len() });
                    }
                    let depth = u32::try_from(transfer.position(number)).unwrap_or(u32::MAX);
                    puts.push(Put { name: info.names.name(part, key), pieces, depth });
                    owners.push(Owner { transfer, number });
                }
            }
        }
        if puts.is_empty() {
            return Ok(());
        }
        // SAFETY: the host does not write source pages of a call, and the marker is a constant that is only read.
        let stored = unsafe { self.objects.put(&puts, batch.call()) }?;
        let mut why = None;
        settle(
            &owners,
            stored.into_iter().map(|stored| match stored {
                Stored::Yes => PageStatus::Ok,
                Stored::Refused => PageStatus::Refused,
                Stored::Failed(text) => {
                    why.get_or_insert(text);
                    PageStatus::Failed
                }
            }),
        );
        self.count(REFUSED, PageStatus::Refused, batch.transfers());
        self.tell("set", why, batch.transfers())
    }

    /// Reads pages.
    pub fn get(&self, batch: &Batch<'_, Get>) -> Result<()> {
        let began = Instant::now();
        let result = self.get_pages(batch);
        self.done(&self.figures.gets, &self.figures.get_ns, began, &result);
        result
    }

    fn get_pages(&self, batch: &Batch<'_, Get>) -> Result<()> {
        batch.call().check()?;
        let (mut reads, mut owners) = (Vec::with_capacity(batch.len()), Vec::new());
        let logical = batch.transfers().iter().filter(|transfer| transfer.pool().is_logical());
        // A place for each marker: they are read by several threads.
        let mut markers = vec![0u8; logical.map(Transfer::len).sum()];
        let mut free = markers.iter_mut();
        for transfer in batch.transfers() {
            let info = self.pool(transfer.pool())?;
            if transfer.layers().is_some() && !self.objects.has_ranges() {
                return Err(Error::unsupported("ranges of layers with this server"));
            }
            for (number, key) in transfer.keys().iter().enumerate() {
                for (part, (_, segments)) in info.names.parts.iter().enumerate() {
                    let name = info.names.name(part, key);
                    if transfer.pool().is_logical() {
                        if let Some(byte) = free.next() {
                            let piece = Piece { base: byte, len: 1 };
                            reads.push(Read { name, len: 1, ranges: vec![Range { offset: 0, piece }] });
                            owners.push(Owner { transfer, number });
                        }
                        continue;
                    }
                    let len = transfer.pool().segments().get(segments.clone());
                    let len = len.unwrap_or_default().iter().map(|segment| segment.len).sum();
                    let ranges = ranges(transfer, number, &info, segments)?;
                    if ranges.is_empty() {
                        continue;
                    }
                    reads.push(Read { name, len, ranges });
                    owners.push(Owner { transfer, number });
                }
            }
        }
        // A page none of whose bytes were asked for is there if its objects are; the status of all others comes with their bytes.
        let mut why = None;
        if !reads.is_empty() {
            // SAFETY: destination pages of calls in flight are disjoint and left alone by the host, and the pieces of a page do not overlap.
            let got = unsafe { self.objects.get(&reads, batch.call()) }?;
            settle(&owners, got.into_iter().map(|got| status_of(got, &mut why)));
        }
        self.count(CORRUPT, PageStatus::Corrupt, batch.transfers());
        self.tell("get", why, batch.transfers())
    }

    /// Counts the pages of a call that have such a status.
    fn count(&self, name: &str, wanted: PageStatus, transfers: &[Transfer<'_>]) {
        let all = transfers.iter().flat_map(|transfer| (0..transfer.len()).map(|number| transfer.status(number)));
        let pages = all.filter(|status| *status == wanted).count();
        if pages > 0 {
            self.host.metric(MetricKind::CounterAdd, name, "", pages as f64);
        }
    }

    /// Removes pages.
    pub fn remove(&self, batch: &Batch<'_, Remove>) -> Result<()> {
        batch.call().check()?;
        let (mut names, mut owners) = (Vec::new(), Vec::new());
        for transfer in batch.transfers() {
            let info = self.pool(transfer.pool())?;
            for (number, key) in transfer.keys().iter().enumerate() {
                for part in 0..info.names.parts.len() {
                    names.push(info.names.name(part, key));
                    owners.push(Owner { transfer, number });
                }
            }
        }
        let removed = self.objects.remove(&names, batch.call())?;
        let mut there: HashMap<(u32, usize), bool> = HashMap::new();
        for (owner, removed) in owners.iter().zip(removed) {
            *there.entry((owner.transfer.pool().id(), owner.number)).or_default() |= removed;
        }
        for owner in owners {
            let removed = there.get(&(owner.transfer.pool().id(), owner.number)).copied().unwrap_or(false);
            owner.transfer.finish(owner.number, if removed { PageStatus::Ok } else { PageStatus::Missing });
        }
        Ok(())
    }

    /// Figures for the host.
    pub fn stats(&self) -> Stats {
        let load = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let mean = |ns: &AtomicU64, count: &AtomicU64| load(ns).checked_div(load(count)).unwrap_or(0);
        let held = self.objects.held();
        let figures = &self.figures;
        Stats {
            pages: held.objects,
            bytes_used: held.used,
            bytes_total: held.total,
            failures: load(&figures.failures),
            get_mean_ns: mean(&figures.get_ns, &figures.gets),
            set_mean_ns: mean(&figures.set_ns, &figures.sets),
        }
    }

    fn failed(&self) {
        self.figures.failures.fetch_add(1, Ordering::Relaxed);
    }

    fn done(&self, count: &AtomicU64, ns: &AtomicU64, began: Instant, result: &Result<()>) {
        count.fetch_add(1, Ordering::Relaxed);
        ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        if result.is_err() {
            self.failed();
        }
    }

    /// A call of which a part went well is a success: each page has its status.
    fn tell(&self, what: &str, why: Option<String>, transfers: &[Transfer<'_>]) -> Result<()> {
        let Some(why) = why else { return Ok(()) };
        self.failed();
        let all = || transfers.iter().flat_map(|transfer| (0..transfer.len()).map(|number| transfer.status(number)));
        if all().any(|status| status != PageStatus::Failed) {
            self.host.log(LogLevel::Warn, "umbp", &format!("{what}: {why}"));
            return Ok(());
        }
        Err(Error::new(ErrorKind::Unavailable, why).retryable())
    }
}

fn status_of(got: Got, why: &mut Option<String>) -> PageStatus {
    match got {
        Got::Yes => PageStatus::Ok,
        Got::Missing => PageStatus::Missing,
        Got::Corrupt(_) => PageStatus::Corrupt,
        Got::Failed(text) => {
            why.get_or_insert(text);
            PageStatus::Failed
        }
    }
}

fn page(transfer: &Transfer<'_>, number: usize) -> Result<u32> {
    let page = transfer.pages().get(number).copied();
    page.ok_or_else(|| Error::new(ErrorKind::Internal, "the call names no page to move"))
}

/// The parts of an object that a page of a transfer asks for.
fn ranges(
    transfer: &Transfer<'_>,
    number: usize,
    info: &PoolInfo,
    segments: &std::ops::Range<usize>,
) -> Result<Vec<Range>> {
    let pool = transfer.pool();
    let page = page(transfer, number)?;
    let mut ranges = Vec::new();
    let mut whole = |segment: usize| -> Result<()> {
        let (base, len) = pool.piece(page, segment)?;
        let offset = info.offsets.get(segment).copied().unwrap_or(0);
        ranges.push(Range { offset, piece: Piece { base, len } });
        Ok(())
    };
    let Some(layers) = transfer.layers() else {
        segments.clone().try_for_each(&mut whole)?;
        return Ok(ranges);
    };
    if let Some(seal) = pool.seal_segment().filter(|seal| segments.contains(seal)) {
        whole(seal)?;
    }
    for part in pool.components().iter().filter(|part| layers.contains(&part.layer) && segments.contains(&part.segment))
    {
        let (base, _) = pool.piece(page, part.segment)?;
        let start = info.offsets.get(part.segment).copied().unwrap_or(0);
        for run in 0..part.run_count {
            let at = part.offset + run * part.run_stride;
            let base = base.wrapping_add(at as usize);
            match ranges.last_mut() {
                // Runs that follow one another in the object and in memory are one.
                Some(last)
                    if last.offset + last.piece.len as u64 == start + at
                        && last.piece.base.wrapping_add(last.piece.len) == base =>
                {
                    last.piece.len += part.run_len as usize;
                }
                _ => ranges.push(Range { offset: start + at, piece: Piece { base, len: part.run_len as usize } }),
            }
        }
    }
    Ok(ranges)
}

/// A page is as well as the worst of its objects.
fn settle(owners: &[Owner<'_>], statuses: impl Iterator<Item = PageStatus>) {
    let rank = |status: PageStatus| match status {
        PageStatus::Ok => 0,
        PageStatus::Missing => 1,
        PageStatus::Refused => 2,
        PageStatus::Corrupt => 3,
        PageStatus::Failed | PageStatus::Unset => 4,
    };
    let mut last: Option<(*const Transfer<'_>, usize, PageStatus)> = None;
    for (owner, status) in owners.iter().zip(statuses) {
        let transfer: *const Transfer<'_> = owner.transfer;
        let status = match last {
            Some((before, number, worst))
                if before == transfer && number == owner.number && rank(worst) > rank(status) =>
            {
                worst
            }
            _ => status,
        };
        last = Some((transfer, owner.number, status));
        owner.transfer.finish(owner.number, status);
    }
}
