//! Data calls.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdock_plugin_api::{
    Batch, Call, ComponentKind, Error, ErrorKind, Exists, Get, HitPolicy, Page, PageKey, PageStatus, Pool, PoolQuery,
    PoolRole, Remove, Result, Set,
};

use crate::backend::Backend;
use crate::fault::{self, Fault, is};
use crate::pages;
use crate::store::Stored;

impl Backend {
    /// Which pages are there.
    pub(crate) fn exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        exists.call().check()?;
        let queries: Vec<PoolQuery> = exists.pools().to_vec();
        let keys = exists.keys();
        if keys.is_empty() && queries.is_empty() && is(Fault::EmptyQuestionFails) {
            return Err(Error::new(ErrorKind::Unavailable, "planted: an empty question"));
        }
        let present: Vec<Vec<bool>> =
            queries.iter().map(|query| keys.iter().map(|key| self.is_there(&query.pool, key)).collect()).collect();
        let ignores_held = is(Fault::IgnoresHeld);
        if ignores_held || is(Fault::MissingAfterGap) {
            for length in 0..=keys.len() {
                let can =
                    queries.iter().zip(&present).all(|(query, there)| can_restore(query, there, length, ignores_held));
                exists.set_restorable(length, can);
            }
        }
        for (pool, there) in present.iter().enumerate() {
            let gap = there.iter().position(|there| !there).filter(|_| is(Fault::MissingAfterGap));
            for (at, there) in there.iter().enumerate() {
                let said = *there && gap.is_none_or(|gap| at < gap);
                exists.set(pool, at, if said { PageStatus::Ok } else { PageStatus::Missing });
            }
        }
        Ok(())
    }

    fn is_there(&self, pool: &Pool, key: &PageKey) -> bool {
        let name = self.name(pool, key);
        if is(Fault::FindsForeign) {
            return self.store.has_anywhere(&name);
        }
        let fits = |stored: Arc<Stored>| stored.bytes.len() as u64 == pool.page_bytes() || is(Fault::AnyLength);
        self.store.get(&name).is_some_and(fits)
    }

    /// Fills pages.
    pub(crate) fn get(&self, batch: Batch<'_, Get>) -> Result<()> {
        let (started, call, chain) = (Instant::now(), *batch.call(), batch.chain());
        refuse_nothing(batch.transfers().is_empty())?;
        if is(Fault::LateGet) {
            sleep_past(&call);
        }
        let second = batch.transfers().get(1).filter(|_| batch.len() > 32).map(|transfer| transfer.pool().id());
        let misses = match fault::planted() {
            Ok(Fault::MissesOtherSessions) => !matches!(chain.session_id, "" | "a session"),
            _ => false,
        };
        let (mut seen, mut last) = (HashSet::new(), None);
        let (count, mut late_pages) = (batch.len(), Vec::new());
        for page in batch.into_pages() {
            if is(Fault::WritesAfterReturn) {
                late_pages.extend(
                    (0..page.piece_count()).filter_map(|piece| page.piece(piece).ok().map(|(at, _)| at as usize)),
                );
            }
            if count == 32 && page.pool().page_count() == 64 && is(Fault::TouchesAfterClose) {
                let first = page.piece(0).map_or(0, |(at, _)| at as usize);
                self.last_page.store(first, Ordering::Relaxed);
            }
            if !is(Fault::LateGet)
                && let Err(stopped) = call.check()
            {
                if page.pool().page_count() == 64 && call.is_cancelled() && call.remaining() != Some(Duration::ZERO) {
                    write_later(late_pages);
                }
                return Err(stopped);
            }
            let twice = !seen.insert((page.pool().id(), *page.key()));
            let missing = misses
                || twice && is(Fault::MissesDuplicates)
                || second == Some(page.pool().id()) && is(Fault::SecondPoolMissing)
                || page.pool().id() == 7 && is(Fault::MissesPoolSeven)
                || page.pool().is_logical() && is(Fault::MissesMarkers);
            if missing {
                page.finish(PageStatus::Missing);
                continue;
            }
            let key = *page.key();
            self.get_page(page, last.as_ref());
            last = Some(key);
        }
        self.gets.add(started.elapsed());
        Ok(())
    }

    fn get_page(&self, mut page: Page<'_, Get>, last: Option<&PageKey>) {
        let name = self.name(page.pool(), page.key());
        let mut found = self.store.get(&name);
        if found.is_none() && page.len() == 128 && is(Fault::MixesPools) {
            found = self.store.in_any_pool(&name, 128);
        }
        let Some(stored) = found else {
            if !is(Fault::UnsetStatuses) {
                page.finish(PageStatus::Missing);
            }
            return;
        };
        match fault::planted() {
            Ok(planted) if planted == Fault::GarbageGet || self.is_of_rank_1(Fault::GarbageGetOfRank1) => {
                for index in 0..page.piece_count() {
                    if let Ok(piece) = page.piece_mut(index) {
                        piece.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u8).wrapping_mul(167) ^ 0x5a);
                    }
                }
                page.finish(PageStatus::Ok);
            }
            Ok(Fault::HalfGet) => {
                cut(&mut page, &stored, |len| len / 2);
                page.finish(PageStatus::Ok);
            }
            Ok(Fault::CutsOddPieces) if page.layers().is_none() && stored.bytes.len() == page.len() => {
                cut(&mut page, &stored, |len| len & !7);
                page.finish(PageStatus::Ok);
            }
            Ok(Fault::SwappedGet) => {
                let other = last.and_then(|key| self.store.get(&self.name(page.pool(), key)));
                pages::fill(page, &other.unwrap_or(stored));
            }
            Ok(Fault::NothingGet) => page.finish(PageStatus::Ok),
            Ok(Fault::SlowGet) => {
                std::thread::sleep(Duration::from_millis(300));
                pages::fill(page, &stored);
            }
            Ok(Fault::AnyLength) if stored.bytes.len() != page.len() => {
                let mut bytes = stored.bytes.clone();
                bytes.resize(page.len(), 0);
                page.fill(&bytes);
            }
            Ok(Fault::RangesIgnored) => page.fill(&stored.bytes),
            Ok(Fault::WritesBeside) => {
                write_beside(&page);
                pages::fill(page, &stored);
            }
            Ok(planted) if loses_a_byte(planted, page.pool()) => {
                let mut bytes = stored.bytes.clone();
                if let Some(byte) = bytes.last_mut() {
                    *byte ^= 0xff;
                }
                pages::fill(page, &Stored::new(bytes));
            }
            _ => pages::fill(page, &stored),
        }
    }

    /// Stores pages.
    pub(crate) fn set(&self, batch: Batch<'_, Set>) -> Result<()> {
        let (started, call, chain) = (Instant::now(), *batch.call(), batch.chain());
        refuse_nothing(batch.transfers().is_empty())?;
        if self.sticks.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Unavailable, "planted: a flush was late"));
        }
        let late = is(Fault::LateSet);
        if late {
            sleep_past(&call);
        }
        if chain.position == 2 && chain.prefix_keys.len() == 2 && is(Fault::ReadsArgumentsLate) {
            let key = chain.prefix_keys.as_ptr() as usize;
            fault::later(50, move || {
                // SAFETY: none: the key is the host's again. This is the fault.
                unsafe { std::ptr::read_volatile(key as *const u8) };
            });
        }
        let mut stopped = None;
        for (index, page) in batch.into_pages().enumerate() {
            if stopped.is_none() && !late {
                stopped = call.check().err();
            }
            match &stopped {
                None if index >= 8192 && is(Fault::DropsBeyond8192) => page.finish(PageStatus::Ok),
                None => self.set_page(page)?,
                Some(error) => match (error.kind, fault::planted()) {
                    (ErrorKind::TimedOut, Ok(Fault::LateSetLies))
                    | (ErrorKind::Cancelled, Ok(Fault::CancelledSetLies)) => {
                        page.finish(PageStatus::Ok);
                    }
                    _ => break,
                },
            }
        }
        self.sets.add(started.elapsed());
        stopped.map_or(Ok(()), Err)
    }

    fn set_page(&self, page: Page<'_, Set>) -> Result<()> {
        let name = self.name(page.pool(), page.key());
        let refuses = is(Fault::RefuseSets) || self.is_of_rank_1(Fault::RefuseSetsOfRank1);
        if refuses || page.len() == 1 && is(Fault::RefusesOneByte) {
            page.finish(PageStatus::Refused);
            return Ok(());
        }
        let one_setter = page.pool().page_count() == 32 && is(Fault::OneSetterAKey);
        if one_setter {
            if !self.setting.lock().insert(name.clone()) {
                page.finish(PageStatus::Refused);
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
            self.setting.lock().remove(&name);
        }
        if is(Fault::Overwrites) {
            self.store.remove(&name);
        }
        if self.store.get(&name).is_some() {
            page.finish(PageStatus::Ok);
            return Ok(());
        }
        let bytes = page.to_vec()?;
        if page.pool().page_count() == 64 && is(Fault::TornPages) {
            let half =
                bytes.iter().enumerate().map(|(at, byte)| if at * 2 < bytes.len() { *byte } else { 0 }).collect();
            // That it is full is seen below.
            let _ = self.store.put(vec![(name.clone(), Stored::new(half))]);
            std::thread::sleep(Duration::from_millis(1));
            self.store.remove(&name);
        }
        if page.pool().name() == "middle" && is(Fault::HalfOnDisk) {
            self.store.save_half(&name, &bytes);
        }
        if is(Fault::WritesSources) && !page.is_empty() {
            let (byte, _) = page.piece(0)?;
            // SAFETY: the piece is mapped until the call returns; that it is not ours to write is the fault.
            unsafe { byte.write_volatile(byte.read_volatile() ^ 0xff) };
        }
        let status = match self.store.put(vec![(name, Stored::new(bytes))]) {
            Ok(()) => PageStatus::Ok,
            Err(_) => PageStatus::Refused,
        };
        page.finish(status);
        Ok(())
    }

    /// Removes pages.
    pub(crate) fn remove(&self, batch: Batch<'_, Remove>) -> Result<()> {
        let call = *batch.call();
        let mut seen = HashSet::new();
        for page in batch.into_pages() {
            call.check()?;
            let name = self.name(page.pool(), page.key());
            let twice = !seen.insert(name.clone());
            let there = match fault::planted() {
                Ok(Fault::RemoveTwiceFails) if twice => {
                    page.finish(PageStatus::Failed);
                    continue;
                }
                Ok(Fault::KeepsRemoved) => true,
                Ok(Fault::RemovesForeign) => {
                    self.store.retain(|other| !(other.pool == name.pool && other.key == name.key));
                    true
                }
                _ => self.store.remove(&name),
            };
            page.finish(if there { PageStatus::Ok } else { PageStatus::Missing });
        }
        Ok(())
    }
}

fn refuse_nothing(empty: bool) -> Result<()> {
    match empty && is(Fault::EmptyBatchFails) {
        true => Err(Error::new(ErrorKind::Unavailable, "planted: a batch without parts")),
        false => Ok(()),
    }
}

/// What a prefix of this length needs of a pool.
fn can_restore(query: &PoolQuery, there: &[bool], length: usize, ignores_held: bool) -> bool {
    let held = if ignores_held { 0 } else { query.held_pages };
    let needed = match query.hit_policy {
        HitPolicy::AllPages => 0..length,
        HitPolicy::TrailingPages => length.saturating_sub(query.trailing_pages.max(1))..length,
        HitPolicy::BlockGroups | HitPolicy::Unknown => 0..0,
    };
    needed.into_iter().all(|page| page < held || there.get(page) == Some(&true))
}

/// Whether a fault changes a byte of pages of such a pool.
fn loses_a_byte(planted: Fault, pool: &Pool) -> bool {
    match planted {
        Fault::LosesPageHead => pool.layout() == "page_head" && pool.seal_segment().is_none(),
        Fault::LosesConvStates => pool.components().iter().any(|part| part.kind == ComponentKind::ConvState),
        Fault::LosesFarSeal => pool.regions().len() > 1,
        Fault::LosesInSharedRegion => pool.segments().first().is_some_and(|segment| segment.offset > 0),
        Fault::LosesSharedIndices => pool.indices_from_pool().is_some(),
        Fault::LosesInSmallPool => pool.role() == PoolRole::Anchor && pool.page_count() == 4,
        _ => false,
    }
}

/// Fills a part of each piece.
fn cut(page: &mut Page<'_, Get>, stored: &Stored, keep: impl Fn(usize) -> usize) {
    let mut start = 0;
    for index in 0..page.piece_count() {
        let Ok(piece) = page.piece_mut(index) else { return };
        let kept = keep(piece.len());
        if let Some(bytes) = stored.bytes.get(start..start + kept) {
            piece[..kept].copy_from_slice(bytes);
        }
        start += piece.len();
    }
}

/// Writes a byte behind each piece that has one behind it.
fn write_beside(page: &Page<'_, Get>) {
    for (index, _) in page.pool().segments().iter().enumerate().filter(|(_, segment)| segment.stride > segment.len) {
        if let Ok((piece, len)) = page.piece(index) {
            // SAFETY: what lies between two pages of a pool is mapped as they are; that it is not ours to write is the fault.
            unsafe { piece.add(len).write_volatile(0xee) };
        }
    }
}

/// Writes pages when the call has long returned.
fn write_later(pieces: Vec<usize>) {
    fault::later(120, move || {
        for piece in pieces {
            // SAFETY: none: the page is the host's again. This is the fault.
            unsafe { std::ptr::write_volatile(piece as *mut u8, 0xee) }
        }
    });
}

/// Sleeps until a second after the deadline of a call.
fn sleep_past(call: &Call<'_>) {
    std::thread::sleep(call.remaining().unwrap_or_default() + Duration::from_secs(1));
}
