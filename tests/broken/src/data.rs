//! Data calls.

use std::time::{Duration, Instant};

use kvdock_plugin_api::{Batch, Call, Exists, Get, Page, PageKey, PageStatus, Remove, Result, Set};

use crate::backend::Backend;
use crate::fault::{self, Fault};
use crate::pages;
use crate::store::Stored;

impl Backend {
    /// Which pages are there.
    pub(crate) fn exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        exists.call().check()?;
        let pools: Vec<_> = exists.pools().iter().map(|query| query.pool.clone()).collect();
        for (index, pool) in pools.iter().enumerate() {
            for (at, key) in exists.keys().iter().enumerate() {
                let there = self.store.has(&self.name(pool, key));
                exists.set(index, at, if there { PageStatus::Ok } else { PageStatus::Missing });
            }
        }
        Ok(())
    }

    /// Fills pages.
    pub(crate) fn get(&self, batch: Batch<'_, Get>) -> Result<()> {
        let (started, call) = (Instant::now(), *batch.call());
        if fault::is(Fault::LateGet) {
            sleep_past(&call);
        }
        let mut last: Option<PageKey> = None;
        for page in batch.into_pages() {
            if !fault::is(Fault::LateGet) {
                call.check()?;
            }
            let key = *page.key();
            self.get_page(page, last.as_ref());
            last = Some(key);
        }
        self.gets.add(started.elapsed());
        Ok(())
    }

    fn get_page(&self, mut page: Page<'_, Get>, last: Option<&PageKey>) {
        let Some(stored) = self.store.get(&self.name(page.pool(), page.key())) else {
            return page.finish(PageStatus::Missing);
        };
        match fault::planted() {
            Ok(Fault::GarbageGet) => {
                for index in 0..page.piece_count() {
                    if let Ok(piece) = page.piece_mut(index) {
                        piece.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u8).wrapping_mul(167) ^ 0x5a);
                    }
                }
                page.finish(PageStatus::Ok);
            }
            Ok(Fault::HalfGet) => {
                for index in 0..page.piece_count().div_ceil(2) {
                    let start: usize = page.pool().segments().iter().take(index).map(|s| s.len as usize).sum();
                    if let Ok(piece) = page.piece_mut(index) {
                        let half = piece.len() / 2;
                        piece[..half].copy_from_slice(&stored.bytes[start..start + half]);
                    }
                }
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
            _ => pages::fill(page, &stored),
        }
    }

    /// Stores pages.
    pub(crate) fn set(&self, batch: Batch<'_, Set>) -> Result<()> {
        let (started, call) = (Instant::now(), *batch.call());
        let late = fault::is(Fault::LateSet);
        if late {
            sleep_past(&call);
        }
        for page in batch.into_pages() {
            if !late {
                call.check()?;
            }
            self.set_page(page)?;
        }
        self.sets.add(started.elapsed());
        Ok(())
    }

    fn set_page(&self, page: Page<'_, Set>) -> Result<()> {
        let name = self.name(page.pool(), page.key());
        if fault::is(Fault::RefuseSets) {
            page.finish(PageStatus::Refused);
            return Ok(());
        }
        if self.store.has(&name) {
            page.finish(PageStatus::Ok);
            return Ok(());
        }
        let stored = Stored::new(page.to_vec()?);
        let status = match self.store.put(vec![(name, stored)]) {
            Ok(()) => PageStatus::Ok,
            Err(_) => PageStatus::Refused,
        };
        page.finish(status);
        Ok(())
    }

    /// Removes pages.
    pub(crate) fn remove(&self, batch: Batch<'_, Remove>) -> Result<()> {
        let call = *batch.call();
        for page in batch.into_pages() {
            call.check()?;
            let there = self.store.remove(&self.name(page.pool(), page.key()));
            page.finish(if there { PageStatus::Ok } else { PageStatus::Missing });
        }
        Ok(())
    }
}

/// Sleeps until a second after the deadline of a call.
fn sleep_past(call: &Call<'_>) {
    std::thread::sleep(call.remaining().unwrap_or_default() + Duration::from_secs(1));
}
