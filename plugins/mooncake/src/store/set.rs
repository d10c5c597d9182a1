//! Storing pages.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use kvdock_plugin_api::{Batch, Error, ErrorKind, LogLevel, MetricKind, PageStatus, Result, Set};

use super::Store;
use super::items::{Item, Items, Use};
use super::put::{Begun, Round};
use crate::limit::{Limit, Stop};
use crate::member::{Claim, RPC_TIME, error_of};
use crate::rpc::RpcError;
use crate::wire::rpc;

/// How often it is said that the store is full.
const SAY_FULL: Duration = Duration::from_secs(60);
/// Pauses before pages are tried again that found no room, no living peer, or somebody else who writes them. The master makes room when it
/// has been asked in vain.
const PAUSES: [Duration; 5] = [
    Duration::from_millis(5),
    Duration::from_millis(15),
    Duration::from_millis(40),
    Duration::from_millis(100),
    Duration::from_millis(160),
];

/// When objects become visible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Commit {
    /// Each as soon as it is stored.
    Each,
    /// All at the end, or none.
    Together,
}

/// What has become of objects that are stored together, so far.
#[derive(Default)]
struct Progress<'a> {
    /// Those whose bytes are in place and whose puts have not ended.
    written: Vec<Begun<'a>>,
    error: Option<Error>,
    /// The objects are this call's alone.
    claim: Option<Claim<'a>>,
}

impl Store {
    /// Stores the pages of a batch.
    pub fn set(&self, batch: &Batch<'_, Set>) -> Result<()> {
        let began = Instant::now();
        let result = self.set_pages(batch);
        self.figures.set_done(began, result.is_ok());
        result
    }

    fn set_pages(&self, batch: &Batch<'_, Set>) -> Result<()> {
        let call = *batch.call();
        call.check()?;
        let items = self.items(batch.transfers(), Use::Write)?;
        let error = self.set_items(&items, Commit::Each, &Store::limit(&call)).error;
        items.settle();
        call.check()?;
        // A call of which a part was stored is a success: each page has its status.
        let any = items.list.iter().any(|item| item.status() == PageStatus::Ok);
        match error {
            Some(error) if !any => Err(error),
            Some(error) => {
                self.member.host.log(LogLevel::Debug, "store", &format!("some pages were not stored: {error}"));
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Stores objects so that all of them become visible, by one call to the master and in their order, or none. What is stored already stays.
    ///
    /// # Errors
    /// Why none of them was stored.
    pub(super) fn set_together(&self, items: &Items<'_>, limit: &Limit<'_>) -> Result<()> {
        let Progress { mut written, error, claim: _claim } = self.set_items(items, Commit::Together, limit);
        if let Some(error) = error {
            self.give_up(items, &written, limit);
            return Err(error);
        }
        if let Err(stop) = limit.left() {
            self.give_up(items, &written, limit);
            return Err(error_of(&RpcError::stopped(stop)));
        }
        // The master ends one put after the other. Nobody of this process looks meanwhile; another one may find a shorter prefix for a moment.
        let _alone = self.commit.write();
        // A segment may have been taken back meanwhile, and with it the room: what was stored beside it is removed again.
        self.end(&mut written, limit);
        let bad = |page: &&Begun<'_>| !matches!(page.round, Round::Stored);
        if let Some(page) = written.iter().find(bad) {
            let why = match &page.round {
                Round::PeerFailed(why) | Round::Failed(why) => why.clone(),
                _ => "the time was over before the puts had ended".to_owned(),
            };
            self.remove_stored(&written, limit);
            items.list.iter().for_each(|item| item.finish(PageStatus::Failed));
            return Err(Error::new(ErrorKind::Unavailable, why).retryable());
        }
        for page in &written {
            self.note_good(&page.item.name);
            page.item.finish(PageStatus::Ok);
        }
        self.finish_twins(items);
        Ok(())
    }

    fn give_up(&self, items: &Items<'_>, written: &[Begun<'_>], limit: &Limit<'_>) {
        self.revoke_all(written.iter(), limit);
        for item in items.list.iter().filter(|item| item.status() != PageStatus::Ok) {
            item.finish(PageStatus::Failed);
        }
    }

    fn remove_stored(&self, written: &[Begun<'_>], limit: &Limit<'_>) {
        let stored = written.iter().filter(|page| matches!(page.round, Round::Stored));
        let names: Vec<&str> = stored.map(|page| page.item.name.as_str()).collect();
        let request = (names, true, self.member.tenant.as_str());
        let _removing = self.member.under_way.remove();
        if let Err(error) = self.member.master.call::<rpc::BatchRemove>(&request, &limit.at_most(RPC_TIME)) {
            self.warn(&format!("pages that were stored in part could not be removed: {error}"));
        }
    }

    fn set_items<'a>(&'a self, items: &'a Items<'a>, commit: Commit, limit: &Limit<'_>) -> Progress<'a> {
        let mut seen: HashMap<&str, ()> = HashMap::with_capacity(items.list.len());
        let mut open: Vec<&Item<'_>> =
            items.list.iter().filter(|item| seen.insert(item.name.as_str(), ()).is_none()).collect();
        let mut progress = Progress::default();
        // The claim stays until all of it is stored or taken back.
        match self.member.under_way.claim(open.iter().map(|item| item.name.as_str()), limit) {
            Ok(claim) => progress.claim = Some(claim),
            Err(_) => {
                open.iter().for_each(|item| item.finish(PageStatus::Failed));
                progress.error = Some(over(limit));
                return progress;
            }
        }
        self.remove_lost(&open, limit);
        if commit == Commit::Together {
            // Most of what is offloaded a second time is there.
            match self.settle_existing(open, limit) {
                Ok(rest) => open = rest,
                Err(failed) => {
                    progress.error = Some(error_of(&failed));
                    return progress;
                }
            }
        }
        self.set_open(items, open, commit, limit, &mut progress);
        if commit == Commit::Each {
            self.finish_twins(items);
        }
        progress
    }

    /// A key may come twice: both get the status.
    fn finish_twins(&self, items: &Items<'_>) {
        let mut known: HashMap<&str, PageStatus> = HashMap::with_capacity(items.list.len());
        for item in &items.list {
            match known.get(item.name.as_str()) {
                Some(status) => item.finish(*status),
                None => drop(known.insert(&item.name, item.status())),
            }
        }
    }

    fn set_open<'a>(
        &self,
        items: &Items<'_>,
        mut open: Vec<&'a Item<'a>>,
        commit: Commit,
        limit: &Limit<'_>,
        progress: &mut Progress<'a>,
    ) {
        let mut preferred = self.config.preferred.clone();
        if self.config.prefer_own {
            preferred.extend(self.member.own_endpoint().map(str::to_owned));
        }
        let wished = preferred.len();
        let mut pauses = PAUSES.iter();
        while !open.is_empty() {
            let mut begun = match self.begin(items, &open, &preferred, limit) {
                Ok(begun) => begun,
                Err(failed) => {
                    open.iter().for_each(|item| item.finish(PageStatus::Failed));
                    progress.error = Some(error_of(&failed));
                    return;
                }
            };
            self.revoke_failed(&begun, limit);
            if commit == Commit::Each {
                self.end(&mut begun, limit);
            }
            open.clear();
            let mut exists = Vec::new();
            let pause = pauses.next();
            for page in begun {
                let item = page.item;
                let (status, why) = match page.round {
                    Round::Stored if commit == Commit::Together => {
                        progress.written.push(page);
                        continue;
                    }
                    Round::Stored => {
                        self.note_good(&item.name);
                        (PageStatus::Ok, None)
                    }
                    Round::Exists => {
                        exists.push(item);
                        continue;
                    }
                    Round::Full | Round::PeerFailed(_) if pause.is_some() && !page.in_doubt => {
                        if matches!(page.round, Round::PeerFailed(_)) && preferred.len() == wished {
                            // The master goes on placing objects at a peer that is gone until it notices; these live.
                            preferred.extend(self.member.own_endpoint().map(str::to_owned));
                            preferred.extend(self.member.peers.living());
                        }
                        open.push(item);
                        continue;
                    }
                    Round::Full => (PageStatus::Refused, Some(self.no_space())),
                    Round::PeerFailed(why) | Round::Failed(why) => {
                        (PageStatus::Failed, Some(Error::new(ErrorKind::Unavailable, why).retryable()))
                    }
                    Round::Stopped => (PageStatus::Failed, Some(over(limit))),
                };
                item.finish(status);
                if progress.error.is_none() {
                    progress.error = why;
                }
            }
            match self.settle_existing(exists, limit) {
                Ok(rest) if pause.is_some() => open.extend(rest),
                Ok(rest) => {
                    rest.iter().for_each(|item| item.finish(PageStatus::Refused));
                    if let Some(item) = rest.first().filter(|_| commit == Commit::Together) {
                        let text = format!("object {}: somebody else is writing it", item.name);
                        progress.error.get_or_insert(Error::new(ErrorKind::Unavailable, text).retryable());
                    }
                }
                Err(failed) => drop(progress.error.get_or_insert(error_of(&failed))),
            }
            if commit == Commit::Together && progress.error.is_some() {
                return;
            }
            if let Some(pause) = pause.filter(|_| !open.is_empty()) {
                std::thread::sleep((*pause).min(limit.left().unwrap_or_default()));
                if limit.left().is_err() {
                    open.iter().for_each(|item| item.finish(PageStatus::Failed));
                    progress.error.get_or_insert_with(|| over(limit));
                    return;
                }
            }
        }
    }

    /// An object that exists may be one that somebody is still writing, or began to write and did not finish, or has removed meanwhile.
    /// Gives those that can't be read.
    fn settle_existing<'a>(&self, exists: Vec<&'a Item<'a>>, limit: &Limit<'_>) -> Result<Vec<&'a Item<'a>>, RpcError> {
        if exists.is_empty() {
            return Ok(exists);
        }
        let names = exists.iter().map(|item| item.name.as_str()).collect();
        let request = (names, self.member.tenant.as_str());
        let found = self.member.master.call::<rpc::BatchExistKey>(&request, &limit.at_most(RPC_TIME));
        let found = found.inspect_err(|_| {
            exists.iter().for_each(|item| item.finish(PageStatus::Failed));
        })?;
        let (stored, rest): (Vec<_>, Vec<_>) = exists.into_iter().zip(found).partition(|(_, found)| *found == Ok(true));
        stored.iter().for_each(|(item, _)| item.finish(PageStatus::Ok));
        Ok(rest.into_iter().map(|(item, _)| item).collect())
    }
}

/// Why an operation ends before it is done.
fn over(limit: &Limit<'_>) -> Error {
    error_of(&RpcError::stopped(limit.left().err().unwrap_or(Stop::TimedOut)))
}

impl Store {
    /// No segment has room for a page. It is counted, and said once in a while: a full store is no fault, but whoever runs it should know.
    fn no_space(&self) -> Error {
        let text = format!(
            "no segment of the store at {} has room; its master evicts what nobody has read lately, so it may have soon",
            self.member.master.address()
        );
        self.member.host.metric(MetricKind::CounterAdd, "mooncake_refused_pages", "", 1.0);
        let mut said = self.full_said.lock();
        if said.is_none_or(|at| at.elapsed() >= SAY_FULL) {
            *said = Some(Instant::now());
            self.warn(&format!("no space: {text}"));
        }
        Error::new(ErrorKind::NoSpace, text).retryable()
    }
}
