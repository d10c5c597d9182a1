//! What the linker face moves: pages layer by layer, and stores of several pools at once.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvdock_plugin_api::v0_1::CallContext;
use kvdock_plugin_api::{
    Call, Error, ErrorKind, MetricKind, Offload, PageStatus, Pool, Ready, Result, Start, Transfer, monotonic_ns,
};

use super::{CORRUPT, MARKER, Owner, PoolInfo, REFUSED, Store, page};
use crate::object::{Got, Piece, Put, Range, Read, Stored};

/// How often a sign is looked at that pages may be touched.
const LOOK: Duration = Duration::from_micros(200);
/// The most by which an offload ends before its deadline.
const EARLY: Duration = Duration::from_secs(1);

/// A run of bytes of every page of a transfer, and the layer with which it is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    segment: usize,
    at: u64,
    len: u64,
    layer: u32,
}

/// The runs of a transfer, in the order of a page's bytes.
fn runs(pool: &Pool, layers: Option<&std::ops::Range<u32>>) -> Vec<Run> {
    let first = layers.map_or(0, |layers| layers.start);
    let mut runs = Vec::new();
    for part in pool.components() {
        if layers.is_some_and(|layers| !layers.contains(&part.layer)) {
            continue;
        }
        for run in 0..part.run_count {
            let at = part.offset + run * part.run_stride;
            runs.push(Run { segment: part.segment, at, len: part.run_len, layer: part.layer });
        }
    }
    if let (Some(_), Some(seal)) = (layers, pool.seal_segment()) {
        let len = pool.segments().get(seal).map_or(0, |segment| segment.len);
        runs.push(Run { segment: seal, at: 0, len, layer: first });
    }
    runs.sort_by_key(|run| (run.segment, run.at));
    if layers.is_some() {
        return runs;
    }
    // All bytes of a page come back: those of no layer with the first one.
    let mut gaps = Vec::new();
    for (number, segment) in pool.segments().iter().enumerate() {
        let mut end = 0;
        for run in runs.iter().filter(|run| run.segment == number) {
            if run.at > end {
                gaps.push(Run { segment: number, at: end, len: run.at - end, layer: first });
            }
            end = end.max(run.at + run.len);
        }
        if end < segment.len {
            gaps.push(Run { segment: number, at: end, len: segment.len - end, layer: first });
        }
    }
    runs.extend(gaps);
    runs.sort_by_key(|run| (run.segment, run.at));
    runs
}

/// One page of a load, as one of its objects.
struct Part<'a> {
    owner: Owner<'a>,
    /// Number of the transfer, and of the part of its pages.
    transfer: usize,
    part: usize,
    /// Which page of the load it belongs to.
    page: usize,
}

/// Pages that were not told a status have failed.
pub fn fail_rest(transfers: &[Transfer<'static>]) {
    for transfer in transfers {
        (0..transfer.len())
            .filter(|number| transfer.status(*number) == PageStatus::Unset)
            .for_each(|number| transfer.finish(number, PageStatus::Failed));
    }
}

fn wait(ready: &[Ready], stop: &AtomicBool, late: &dyn Fn() -> Result<()>) -> Result<()> {
    for sign in ready {
        while !sign.is_set()? {
            late()?;
            if stop.load(Ordering::Acquire) {
                return Err(Error::new(ErrorKind::Cancelled, "it was ended while it waited for its pages"));
            }
            std::thread::sleep(LOOK);
        }
    }
    Ok(())
}

impl Store {
    /// Whether the pools of a load or offload are served.
    ///
    /// # Errors
    /// When one is not registered, or single layers can't be read.
    pub fn knows(&self, transfer: &Transfer<'_>) -> Result<()> {
        self.pool(transfer.pool()).map(drop)
    }

    /// Loads pages, group of layers after group of layers, and says of each layer when it is settled.
    pub fn load(&self, transfers: &[Transfer<'static>], start: &Start, stop: &AtomicBool, group: usize) -> Result<()> {
        let result = self.load_pages(transfers, start, stop, group.max(1));
        fail_rest(transfers);
        start.done.settle_all();
        result
    }

    fn load_pages(
        &self,
        transfers: &[Transfer<'static>],
        start: &Start,
        stop: &AtomicBool,
        group: usize,
    ) -> Result<()> {
        wait(&start.ready, stop, &|| start.call.check())?;
        let mut infos = Vec::with_capacity(transfers.len());
        let mut plans = Vec::with_capacity(transfers.len());
        let (mut parts, mut pages) = (Vec::new(), 0);
        for (number, transfer) in transfers.iter().enumerate() {
            let info = self.pool(transfer.pool())?;
            for index in 0..transfer.len() {
                let owner = Owner { transfer, number: index };
                parts.extend((0..info.names.parts.len()).map(|part| Part {
                    owner,
                    transfer: number,
                    part,
                    page: pages,
                }));
                pages += 1;
            }
            plans.push(runs(transfer.pool(), transfer.layers().as_ref()));
            infos.push(info);
        }
        let mut verdicts = vec![PageStatus::Ok; pages];
        let mut asked = vec![false; parts.len()];
        let layers = start.done.layers();
        // Without ranges there is one group of all layers.
        let group = if self.objects.has_ranges() { group } else { layers.max(1) };
        for from in (0..layers.max(1)).step_by(group) {
            let last = from + group >= layers;
            let wanted = from as u32..if last { u32::MAX } else { (from + group) as u32 };
            let (mut reads, mut numbers) = (Vec::new(), Vec::new());
            for (number, part) in parts.iter().enumerate() {
                if verdicts.get(part.page) != Some(&PageStatus::Ok) {
                    continue;
                }
                let (Some(info), Some(plan)) = (infos.get(part.transfer), plans.get(part.transfer)) else { continue };
                if let Some(read) = read_of(part, info, plan, &wanted)? {
                    reads.push(read);
                    numbers.push(number);
                    asked.get_mut(number).into_iter().for_each(|asked| *asked = true);
                }
            }
            let these = from..(from + group).min(layers);
            self.load_group((&reads, &numbers), &parts, &mut verdicts, &these, start, stop)?;
            these.for_each(|layer| start.done.settle(layer));
        }
        self.ask_rest(&parts, &infos, &asked, &mut verdicts, &start.call)?;
        for part in &parts {
            let verdict = verdicts.get(part.page).copied().unwrap_or(PageStatus::Failed);
            part.owner.transfer.finish(part.owner.number, verdict);
        }
        self.count(CORRUPT, PageStatus::Corrupt, transfers);
        Ok(())
    }

    fn load_group(
        &self,
        (reads, numbers): (&[Read], &[usize]),
        parts: &[Part<'_>],
        verdicts: &mut [PageStatus],
        layers: &std::ops::Range<usize>,
        start: &Start,
        stop: &AtomicBool,
    ) -> Result<()> {
        /// Objects between two looks at whether the load is to end.
        const STEP: usize = 256;
        for (reads, numbers) in reads.chunks(STEP).zip(numbers.chunks(STEP)) {
            start.call.check()?;
            if stop.load(Ordering::Acquire) {
                return Err(Error::new(ErrorKind::TimedOut, "the load was ended").retryable());
            }
            // SAFETY: destination pages of a load are private to it until it is finished, and runs of a page do not overlap.
            let got = unsafe { self.objects.get(reads, &start.call) }?;
            for (number, got) in numbers.iter().zip(got) {
                let Some(part) = parts.get(*number) else { continue };
                let status = match got {
                    Got::Yes => continue,
                    Got::Missing => PageStatus::Missing,
                    Got::Corrupt(_) => PageStatus::Corrupt,
                    Got::Failed(_) => PageStatus::Failed,
                };
                let pool = part.owner.transfer.pool();
                self.tell_page(pool, status, start.batch, layers);
                if let Some(verdict) = verdicts.get_mut(part.page) {
                    *verdict = status;
                }
            }
        }
        Ok(())
    }

    fn tell_page(&self, pool: &Pool, status: PageStatus, batch: u64, layers: &std::ops::Range<usize>) {
        let (first, last) = (layers.start, layers.end.saturating_sub(1));
        let (id, name) = (pool.id(), pool.name());
        let text = format!("load {batch}: layers {first} to {last}: a page of pool {id} ({name}) is {status}");
        self.host.log(kvdock_plugin_api::LogLevel::Debug, "umbp", &text);
    }

    /// Pages of which no byte was asked for are there, or not.
    fn ask_rest(
        &self,
        parts: &[Part<'_>],
        infos: &[std::sync::Arc<PoolInfo>],
        asked: &[bool],
        verdicts: &mut [PageStatus],
        call: &Call<'_>,
    ) -> Result<()> {
        let rest: Vec<&Part<'_>> =
            parts.iter().zip(asked).filter(|(_, asked)| !**asked).map(|(part, _)| part).collect();
        let rest: Vec<&Part<'_>> =
            rest.into_iter().filter(|part| verdicts.get(part.page) == Some(&PageStatus::Ok)).collect();
        if rest.is_empty() {
            return Ok(());
        }
        let names: Vec<Vec<u8>> = rest.iter().map(|part| name_of(part, infos)).collect();
        for (part, there) in rest.iter().zip(self.objects.exists(&names, call)?) {
            if let Some(verdict) = verdicts.get_mut(part.page).filter(|_| !there) {
                *verdict = PageStatus::Missing;
            }
        }
        Ok(())
    }

    /// Counts the pages of offloads, none of which is stored.
    fn refused(&self, offloads: &[Offload]) {
        let pages: usize = offloads.iter().flat_map(Offload::transfers).map(Transfer::len).sum();
        self.host.metric(MetricKind::CounterAdd, REFUSED, "", pages as f64);
    }

    /// Stores the pages of offloads by the earliest of their deadlines: all become visible or none. Those that were there before stay in any case.
    pub fn offload(&self, offloads: &[Offload], stop: &AtomicBool) -> Result<()> {
        let late = || -> Result<()> {
            let now = monotonic_ns();
            match offloads.iter().any(|offload| offload.deadline_ns != 0 && offload.deadline_ns <= now) {
                true => Err(Error::new(ErrorKind::TimedOut, "the deadline of the offload has passed").retryable()),
                false => Ok(()),
            }
        };
        offloads.iter().try_for_each(|offload| wait(&offload.ready, stop, &late))?;
        late()?;
        let mut puts = Vec::new();
        for transfer in offloads.iter().flat_map(Offload::transfers) {
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
                    puts.push((Put { name: info.names.name(part, key), pieces, depth }, transfer));
                }
            }
        }
        let (puts, of): (Vec<Put>, Vec<&Transfer<'static>>) = puts.into_iter().unzip();
        let (call, parting) = calls_until(offloads.iter().map(|offload| offload.deadline_ns));
        let names: Vec<Vec<u8>> = puts.iter().map(|put| put.name.clone()).collect();
        let before = self.objects.exists(&names, &call)?;
        // SAFETY: the host does not write pages of an offload until it was popped.
        let stored = unsafe { self.objects.put(&puts, &call) };
        let bad = match &stored {
            Err(_) => Some(0),
            Ok(stored) => stored.iter().position(|stored| *stored != Stored::Yes),
        };
        let Some(bad) = bad else {
            offloads.iter().flat_map(Offload::transfers).for_each(|transfer| {
                (0..transfer.len()).for_each(|number| transfer.finish(number, PageStatus::Ok));
            });
            return Ok(());
        };
        if !self.objects.takes_objects() {
            self.refused(offloads);
            return Err(Error::unsupported("storing pages as a follower (role): its leader stores them"));
        }
        let new: HashSet<&Vec<u8>> =
            names.iter().zip(before).filter(|(_, before)| !before).map(|(name, _)| name).collect();
        let new: Vec<Vec<u8>> = new.into_iter().cloned().collect();
        if self.objects.can_remove() {
            // Why it failed says more than that not all of it could be taken back.
            let removed = self.objects.remove(&new, &parting);
            if stored.is_ok() {
                removed?;
            }
        }
        let stored = stored?;
        let count = stored.iter().filter(|stored| **stored == Stored::Yes).count();
        let pool = of.get(bad).map_or_else(String::new, |transfer| {
            format!("pool {} ({}): ", transfer.pool().id(), transfer.pool().name())
        });
        match stored.get(bad) {
            Some(Stored::Failed(why)) => {
                let text = format!("{pool}{count} of {} objects were stored: {why}", stored.len());
                Err(Error::new(ErrorKind::Unavailable, text).retryable())
            }
            _ => {
                self.refused(offloads);
                let text = format!("{pool}the store has no room: {count} of {} objects were stored", stored.len());
                Err(Error::new(ErrorKind::NoSpace, text).retryable())
            }
        }
    }
}

/// The call that stores by the earliest of some deadlines, of which 0 is none, and one that has a little longer, to take back what was stored. Both end
/// before that deadline: the host takes an offload that ends at it for one that hangs.
fn calls_until(deadlines: impl Iterator<Item = u64>) -> (Call<'static>, Call<'static>) {
    let Some(deadline) = deadlines.filter(|deadline| *deadline != 0).min() else {
        return (Call::unbounded(), Call::unbounded());
    };
    let until = |early: u64| {
        // Never 0, which would be no deadline.
        let context =
            CallContext { deadline_ns: deadline.saturating_sub(early).max(1), cancel: std::ptr::null(), trace_id: 0 };
        // SAFETY: there is no cancel flag.
        unsafe { Call::from_raw(&context) }
    };
    let early = (deadline.saturating_sub(monotonic_ns()) / 4).min(EARLY.as_nanos() as u64);
    (until(early), until(early / 4))
}

fn name_of(part: &Part<'_>, infos: &[std::sync::Arc<PoolInfo>]) -> Vec<u8> {
    let key = part.owner.transfer.keys().get(part.owner.number);
    let (Some(info), Some(key)) = (infos.get(part.transfer), key) else { return Vec::new() };
    info.names.name(part.part, key)
}

/// What a group of layers reads of an object; none for nothing.
fn read_of(part: &Part<'_>, info: &PoolInfo, plan: &[Run], layers: &std::ops::Range<u32>) -> Result<Option<Read>> {
    let transfer = part.owner.transfer;
    let pool = transfer.pool();
    let (Some((_, segments)), Some(key)) = (info.names.parts.get(part.part), transfer.keys().get(part.owner.number))
    else {
        return Ok(None);
    };
    let mut ranges: Vec<Range> = Vec::new();
    for run in plan.iter().filter(|run| layers.contains(&run.layer) && segments.contains(&run.segment)) {
        let (base, _) = pool.piece(page(transfer, part.owner.number)?, run.segment)?;
        let base = base.wrapping_add(run.at as usize);
        let offset = info.offsets.get(run.segment).copied().unwrap_or(0) + run.at;
        match ranges.last_mut() {
            Some(last)
                if last.offset + last.piece.len as u64 == offset
                    && last.piece.base.wrapping_add(last.piece.len) == base =>
            {
                last.piece.len += run.len as usize;
            }
            _ => ranges.push(Range { offset, piece: Piece { base, len: run.len as usize } }),
        }
    }
    if ranges.is_empty() {
        return Ok(None);
    }
    let len = pool.segments().get(segments.clone()).unwrap_or_default().iter().map(|segment| segment.len).sum();
    Ok(Some(Read { name: info.names.name(part.part, key), len, ranges }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offload_ends_before_the_earliest_deadline_and_has_time_left_to_take_back() {
        let now = monotonic_ns();
        let hour = 3_600_000_000_000;
        let (store, back) = calls_until([0, now + 2 * hour, now + hour].into_iter());
        let (store, back) = (store.remaining().unwrap(), back.remaining().unwrap());
        assert!(store < back && back < Duration::from_nanos(hour), "{store:?} {back:?}");
        let (store, back) = calls_until([now.saturating_sub(1).max(1)].into_iter());
        assert!(store.check().is_err() && back.check().is_err());
        let (store, back) = calls_until([0, 0].into_iter());
        assert!(store.remaining().is_none() && back.remaining().is_none());
    }
}
