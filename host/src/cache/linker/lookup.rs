//! Asking what storage has behind the pages that are on the device.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::run::Origin;
use crate::cache::controller::{Attached, CallFault, CallInfo, CancelSet, Event, Shared, fault_result};
use crate::cache::stats::{StorageOp, StorageResult};
use crate::cache::types::{MissReason, RequestId};
use crate::cache::unified::{Component, KeyPath};
use crate::plugin::backend::{ChainInfo, Held, PageKey, Restorable};

/// A question of one request.
#[derive(Debug)]
pub(crate) struct Lookup {
    /// Which lookup it is.
    pub id: u64,
    /// Whose.
    pub request: RequestId,
    /// The way to the pages that are on the device.
    pub path: KeyPath,
    /// Pages on the device from whose end it can be gone on.
    pub start: usize,
    /// Pages behind those that are on the device as well, and lack a window or a state alone.
    pub held: usize,
    /// The tokens behind `start` that may be reused, whole pages.
    pub tokens: Vec<u32>,
    /// Fewest pages of a hit.
    pub threshold: usize,
    /// How long the request waits, if that is known.
    pub until: Option<Instant>,
    /// Session that the request names, or empty.
    pub session: String,
    /// By which it is called off.
    pub operation: CancelSet,
}

/// What storage said.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    /// Pages that were on the device when it was asked, and could be gone on from.
    pub start: usize,
    /// Pages behind those that were there as well: nobody knows whether storage has them.
    pub held: usize,
    /// Keys of the sequence, up to the end of what was asked for.
    pub keys: Arc<[PageKey]>,
    /// Up to where it can be loaded, from the backend of the longest hit.
    pub hit: Option<Hit>,
    /// Why there is no more.
    pub fault: Option<MissReason>,
}

/// What one backend has.
#[derive(Debug, Clone)]
pub(crate) struct Hit {
    /// Pages behind the start up to each of which the sequence can be loaded.
    pub lengths: Restorable,
    /// The backend.
    pub origin: Origin,
}

impl Answer {
    /// Pages of the sequence up to which storage has it.
    pub fn end(&self) -> usize {
        self.start + self.hit.as_ref().map_or(0, |hit| hit.lengths.longest())
    }
}

/// Asks every backend, in order, and keeps the longest hit.
pub(crate) fn look_up(shared: &Shared, lookup: &Arc<Lookup>) {
    let keys: Arc<[PageKey]> = lookup.path.keys_with(&lookup.tokens).into();
    let Lookup { start, held, .. } = **lookup;
    let mut answer = Answer { start, held, keys: Arc::clone(&keys), hit: None, fault: None };
    let backends = shared.registry.current();
    let mut best = 0;
    for (index, attached) in backends.iter().enumerate() {
        if best == keys.len().saturating_sub(lookup.start) || lookup.operation.is_cancelled() {
            break;
        }
        let others = backends[index + 1..].iter().filter(|other| !other.is_resting()).count();
        let origin = Origin { attached: Arc::clone(attached), emptied: attached.times_emptied() };
        match ask(shared, attached, lookup, &keys, share(lookup, others)) {
            Ok(lengths) if lengths.longest() > best => {
                best = lengths.longest();
                answer.hit = Some(Hit { lengths, origin });
            }
            Ok(_) => {}
            Err(reason) => answer.fault = Some(reason),
        }
    }
    let tokens = |pages: usize| (pages * shared.page_size) as u64;
    shared.counters.storage_hit_tokens.fetch_add(tokens(best), Ordering::Relaxed);
    if best > 0 && best < lookup.threshold {
        answer.hit = None;
        answer.fault = Some(MissReason::TooShort);
        shared.counters.unfulfilled_below_threshold_tokens.fetch_add(tokens(best), Ordering::Relaxed);
    }
    shared.send(Event::LookedUp(Arc::clone(lookup), answer));
}

/// A backend's share of the time that the request waits.
fn share(lookup: &Lookup, others: usize) -> Option<Duration> {
    let left = lookup.until?.saturating_duration_since(Instant::now());
    Some(left / u32::try_from(others + 1).unwrap_or(u32::MAX))
}

/// Pages behind the device up to each of which a backend can bring the sequence back.
fn ask(
    shared: &Shared,
    attached: &Attached,
    lookup: &Lookup,
    keys: &[PageKey],
    within: Option<Duration>,
) -> Result<Restorable, MissReason> {
    let (prefix, asked) = keys.split_at(lookup.start.min(keys.len()));
    let held = lookup.held.min(asked.len());
    let now = Instant::now();
    let shunned = |component: Component| -> Vec<bool> {
        attached.with_belief(component, |belief| asked.iter().map(|key| belief.is_shunned(key, now)).collect())
    };
    let usable = shunned(Component::Full).iter().skip(held).position(|&shunned| shunned).map(|place| held + place);
    let usable = usable.unwrap_or(asked.len());
    if usable == 0 {
        return Err(MissReason::BackendFailed);
    }
    let (windows, states) = (shunned(Component::Window), shunned(Component::State));
    let asked = &asked[..usable];
    let held_pages: Held = [u32::try_from(held).unwrap_or(u32::MAX), 0, 0];
    let chain = ChainInfo { position: prefix.len() as u64, prefix_keys: prefix, session_id: &lookup.session };
    let info = CallInfo { op: StorageOp::Exists, pages: asked.len(), bytes: 0, operation: &lookup.operation, within };
    match attached.call(&info, |backend, options| backend.lookup(options, asked, &held_pages, &chain, lookup.request)) {
        Ok(restorable) => {
            let pages = restorable.longest_within(asked.len());
            attached.figures.add(StorageOp::Exists, StorageResult::Ok, pages as u64);
            attached.figures.add(StorageOp::Exists, StorageResult::Missing, (asked.len() - pages) as u64);
            // The store may have dropped pages by itself; a belief that outlives them would keep them from ever being written again.
            attached.with_belief(Component::Full, |belief| {
                let gone = asked.iter().enumerate().skip(held).filter(|(page, _)| !restorable.has_page(*page));
                gone.for_each(|(_, key)| belief.gone(key));
            });
            for component in [Component::Window, Component::State] {
                attached.with_belief(component, |belief| {
                    let gone = asked.iter().enumerate();
                    let gone = gone.filter(|(page, _)| !restorable.names(component.into(), *page));
                    gone.for_each(|(_, key)| belief.gone(key));
                });
            }
            let window = shared.window_pages.unwrap_or(0);
            let usable = |length: usize| {
                !windows[length.saturating_sub(window)..length].contains(&true)
                    && (length == 0 || shared.host_of(Component::State).is_none() || !states[length - 1])
            };
            let lengths = (0..=asked.len()).map(|length| restorable.contains(length) && usable(length));
            Ok(Restorable::from_mask(lengths.collect()))
        }
        Err(fault) => Err(match (&fault, fault_result(&fault)) {
            (CallFault::CalledOff, _) | (_, StorageResult::Late) => MissReason::BackendSlow,
            _ => MissReason::BackendFailed,
        }),
    }
}
