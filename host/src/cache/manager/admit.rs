//! From `begin` to the end of the wait for storage.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::CacheManager;
use super::grant::Phase;
use super::linked::Linked;
use crate::cache::config::{BreakEvenMode, PrefetchPolicy};
use crate::cache::controller::{Delivery, Fetch, FetchOrder, FetchState, FetchStep, Forecast};
use crate::cache::types::{Admission, CacheNamespace, MissReason, Prefetch, RequestId, ReuseHints};
use crate::cache::unified::{Component, HostInsert, Match, NO_SLOT, PerComponent, Room, Side, Slots};

/// Fetches a request may start after the one it first waited for.
pub(super) const FOLLOW_UPS: u32 = 2;
/// Time that a fetch which measures a backend anew is given at least.
const EXPLORING: Duration = Duration::from_millis(250);

/// A request as the cache knows it.
#[derive(Debug)]
pub(super) struct Request {
    pub id: RequestId,
    pub namespace: CacheNamespace,
    pub hints: ReuseHints,
    pub session: Option<Arc<str>>,
    pub prompt: Arc<[u32]>,
    pub phase: Phase,
    /// The fetch it waits for.
    pub wait: Option<Wait>,
    /// What came of asking storage.
    pub storage: StorageOutcome,
    /// Pages of the sequence that its fetch brought in.
    pub fetched: Range<usize>,
    /// How it stands with storage in linker mode.
    pub linked: Linked,
    /// Tokens after which states are saved on the way, and the slots that they go to.
    pub saves: Vec<(usize, u32)>,
    /// As well, for the last page that it computes: taken up when it ends, until then overwritten page by page.
    pub trail: Option<(usize, u32)>,
    /// It waited for another's fetch, and may need more than that brought.
    look_again: bool,
    follow_ups: u32,
}

/// What the tree has of a prompt.
pub(super) struct Known {
    /// Pages on device and host.
    pub pages: usize,
    /// Of these, pages on the device or on their way there; they come first.
    pub device_pages: usize,
    /// None for a namespace of which it has nothing.
    pub found: Option<Match>,
}

impl Known {
    /// Pages of all tokens that are on the device, with those behind `device_pages` that lack a window or a state alone.
    pub fn resident(&self) -> usize {
        self.found.as_ref().map_or(0, |found| found.resident.pages as usize)
    }
}

/// What storage said about a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StorageOutcome {
    /// Pages of the sequence up to which storage has it.
    pub hit_end: usize,
    /// Why nothing more came.
    pub reason: Option<MissReason>,
}

/// What backends have of pages that come from storage, as bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Marks {
    /// Those that need not be given them.
    stored: u64,
    /// Those that are to be given them whatever their write policy says.
    owed: u64,
    /// Nothing tells whether the pages are right.
    unproven: bool,
}

/// A wait for a fetch.
#[derive(Debug)]
pub(super) struct Wait {
    fetch: u64,
    joined: bool,
    began: Instant,
    /// When the policy gives up; set at the first look that found the fetch running.
    until: Option<Instant>,
}

/// A fetch that runs.
#[derive(Debug)]
pub(super) struct ActiveFetch {
    pub fetch: Arc<Fetch>,
    namespace: CacheNamespace,
    fingerprint: u64,
    waiters: usize,
    /// Pages of the sequence that went into the tree.
    delivered: Range<usize>,
    /// The longest it may take by the backends' own deadlines.
    bound: Duration,
}

impl Request {
    /// Whole pages of `tokens` that may be reused: at least one token stays for prefill.
    pub fn reusable_pages(&self, tokens: usize, page_size: usize) -> usize {
        tokens.saturating_sub(1).min(self.hints.reuse_limit.unwrap_or(usize::MAX)) / page_size
    }
}

impl CacheManager {
    /// Makes a request known: matches `prompt` in device and host, and starts to fetch what is missing
    /// from storage if it is long enough. Beginning a known request again starts it anew (its
    /// grant, if any, must have been given back).
    pub fn begin(
        &mut self,
        request: RequestId,
        prompt: &[u32],
        namespace: &CacheNamespace,
        hints: &ReuseHints,
    ) -> Admission {
        self.take_events();
        if self.requests.contains_key(&request) {
            self.abort(request, Vec::new());
        }
        let mut state = Request {
            id: request,
            namespace: CacheNamespace::new(namespace.extra_key.clone(), namespace.cache_salt.clone()),
            hints: hints.clone(),
            session: hints.session_id.as_deref().map(Arc::from),
            prompt: prompt.into(),
            phase: Phase::Queued { ignore_host: false },
            wait: None,
            storage: StorageOutcome { hit_end: 0, reason: None },
            fetched: 0..0,
            linked: Linked::default(),
            saves: Vec::new(),
            trail: None,
            look_again: false,
            follow_ups: 0,
        };
        let found = self.start_fetch(&mut state);
        let admission = Admission {
            device_tokens: found.device_pages * self.page_size,
            host_tokens: (found.pages - found.device_pages) * self.page_size,
            prefetching: state.wait.is_some() || state.linked.is_asking(),
        };
        self.requests.insert(request, state);
        admission
    }

    /// Whether `request` still waits for storage. An unknown request is ready.
    pub fn poll(&mut self, request: RequestId) -> Prefetch {
        self.take_events();
        let Some(mut state) = self.requests.remove(&request) else {
            return Prefetch::Ready;
        };
        let answer = self.poll_state(&mut state);
        self.requests.insert(request, state);
        answer
    }

    fn poll_state(&mut self, state: &mut Request) -> Prefetch {
        if self.config.linked {
            return self.poll_lookup(state);
        }
        if state.look_again && state.wait.is_none() {
            state.look_again = false;
            if state.follow_ups < FOLLOW_UPS {
                state.follow_ups += 1;
                self.start_fetch(state);
            }
        }
        let Some(wait) = &mut state.wait else {
            return Prefetch::Ready;
        };
        let now = Instant::now();
        let (span, bound, explore) = match self.fetches.get(&wait.fetch) {
            Some(active) => (active.fetch.span, wait.began + active.bound, active.fetch.order.explore),
            None => (0, now, false),
        };
        // The clock starts at the first look that finds the request blocked.
        let until = match self.config.prefetch_policy {
            PrefetchPolicy::BestEffort => now,
            PrefetchPolicy::Timeout => {
                *wait.until.get_or_insert_with(|| now + self.patience(span, explore).unwrap_or(Duration::ZERO))
            }
            PrefetchPolicy::WaitComplete => *wait.until.get_or_insert_with(|| {
                self.patience(span, explore).map_or(bound, |patience| bound.min(now + patience))
            }),
        };
        let enough = self.find(state).pages >= state.reusable_pages(state.prompt.len(), self.page_size);
        if now >= until || enough {
            self.stop_waiting(state, !enough);
            return Prefetch::Ready;
        }
        Prefetch::Waiting { until }
    }

    /// How long a request waits for a span, from the first look that finds it blocked, where that is known beforehand. A fetch that
    /// explores gets a moment even where computing takes none, or nothing would be measured.
    pub(super) fn patience(&self, span: usize, explore: bool) -> Option<Duration> {
        let allowed = match self.config.prefetch_policy {
            PrefetchPolicy::BestEffort | PrefetchPolicy::WaitComplete => None,
            PrefetchPolicy::Timeout => Some(timeout(
                self.config.prefetch_timeout_base,
                self.config.prefetch_timeout_per_ki_token,
                span,
                self.page_size,
            )),
        };
        let least = if explore { EXPLORING } else { Duration::ZERO };
        let compute = self.time_to_compute(span).map(|time| time.max(least));
        [allowed, compute].into_iter().flatten().min()
    }

    /// Time that computing a span takes, where the cache goes by that and knows it: no wait is worth more.
    fn time_to_compute(&self, span: usize) -> Option<Duration> {
        let rate = self.lower.as_ref().and_then(|lower| lower.shared.prefill.rate())?;
        let seconds = (span * self.page_size) as f64 / rate;
        (self.config.break_even == BreakEvenMode::Auto).then(|| Duration::try_from_secs_f64(seconds).ok()).flatten()
    }

    /// What the tree has of the part of the prompt that may be reused.
    pub(super) fn find(&self, state: &Request) -> Known {
        let pages = state.reusable_pages(state.prompt.len(), self.page_size);
        let root = self.tree.find_root(&state.namespace);
        let found = root.and_then(|root| self.tree.find(root, state.prompt.get(..pages * self.page_size)?));
        Known {
            pages: found.as_ref().map_or(0, |found| found.best.pages as usize),
            device_pages: found.as_ref().map_or(0, |found| found.device.pages as usize),
            found,
        }
    }

    /// Starts or joins a fetch for what the tree lacks of the prompt. Says what the tree has.
    pub(super) fn start_fetch(&mut self, state: &mut Request) -> Known {
        let found = self.find(state);
        let pages = state.reusable_pages(state.prompt.len(), self.page_size);
        let span = pages - found.pages;
        state.storage = StorageOutcome { hit_end: found.pages, reason: None };
        if span == 0 {
            return found;
        }
        if self.config.linked {
            if let Err(reason) = self.look_up(state, &found, span) {
                state.storage.reason = Some(reason);
            }
            return found;
        }
        match self.fetch_span(state, &found, span) {
            Ok(wait) => state.wait = Some(wait),
            Err(reason) => state.storage.reason = Some(reason),
        }
        found
    }

    fn fetch_span(&mut self, state: &Request, found: &Known, span: usize) -> Result<Wait, MissReason> {
        let Some(lower) = &self.lower else {
            return Err(MissReason::StorageOff);
        };
        let backends = lower.shared.registry.current();
        if backends.is_empty() {
            return Err(MissReason::StorageOff);
        }
        let began = Instant::now();
        let upto = (found.pages + 1) * self.page_size;
        let fingerprint = self.hash((&state.namespace, state.prompt.get(..upto)));
        // What others are fetching comes sooner than asked for anew, however little of it is left.
        let running = self.fetch_by_span.get(&fingerprint).copied().or_else(|| self.fetch_of(state, found.pages));
        if let Some(fetch) = running
            && let Some(active) = self.fetches.get_mut(&fetch)
        {
            active.waiters += 1;
            self.count(|counters| &counters.prefetch_shared, 1);
            return Ok(Wait { fetch, joined: true, began, until: None });
        }
        let threshold = self.config.prefetch_threshold.max(self.page_size);
        if span * self.page_size < threshold {
            return Err(MissReason::TooShort);
        }
        if backends.iter().all(|attached| attached.is_resting()) {
            self.count(|counters| &counters.breaker_skips, 1);
            return Err(MissReason::BackendFailed);
        }
        let forecast = match self.config.break_even {
            BreakEvenMode::Off => Forecast::Unknown,
            BreakEvenMode::Auto => lower.shared.forecast(span, threshold),
        };
        if forecast == Forecast::Refuse {
            self.count(|counters| &counters.unfulfilled_not_worth_tokens, span * self.page_size);
            return Err(MissReason::NotWorthIt);
        }
        let limit = (self.config.prefetch_occupancy * lower.shared.host.capacity() as f64) as usize;
        if self.fetch_pages >= limit {
            self.count(|counters| &counters.prefetch_rate_limited, 1);
            return Err(MissReason::HostFull);
        }
        let path = match &found.found {
            Some(found) => self.tree.key_path_to(found.best).ok(),
            None => None,
        };
        let path = path.unwrap_or_else(|| self.tree.key_path_from(state.namespace.seed()));
        // One round of questions and one of reads, each of which a backend may use to its deadline, after as long a wait for its turn.
        let bound = backends.iter().map(|attached| attached.settings().timeout).sum::<Duration>() * 4;
        let id = self.new_id();
        let tokens: Arc<[u32]> = state.prompt[..(found.pages + span) * self.page_size].into();
        let session = state.hints.session_id.clone().unwrap_or_default();
        let order = FetchOrder {
            path,
            tokens,
            span,
            threshold: threshold.div_ceil(self.page_size),
            session,
            patience: self.patience(span, forecast == Forecast::Explore),
            break_even: self.config.break_even == BreakEvenMode::Auto,
            explore: forecast == Forecast::Explore,
            held: found.found.as_ref().map_or(0, |found| found.held as usize).min(span),
        };
        let fetch = Fetch::new(id, order);
        let active = ActiveFetch {
            fetch: Arc::clone(&fetch),
            namespace: state.namespace.clone(),
            fingerprint,
            waiters: 1,
            delivered: found.pages..found.pages,
            bound,
        };
        self.fetches.insert(id, active);
        self.fetch_by_span.insert(fingerprint, id);
        self.fetch_pages += span;
        if let Some(lower) = &self.lower {
            lower.fetch(FetchStep::Query(fetch));
        }
        Ok(Wait { fetch: id, joined: false, began, until: None })
    }

    /// A fetch that is bringing page `page` of the prompt, with earlier pages of which it is through.
    fn fetch_of(&self, state: &Request, page: usize) -> Option<u64> {
        let (from, to) = (page * self.page_size, (page + 1) * self.page_size);
        let brings = |active: &ActiveFetch| {
            let fetch = &active.fetch;
            let tokens = &fetch.order.tokens;
            active.delivered.end <= page
                && (fetch.start..fetch.start + fetch.span).contains(&page)
                && !fetch.cancel.is_cancelled()
                && active.namespace == state.namespace
                // The page itself tells most prompts apart.
                && tokens.get(from..to).is_some_and(|page| Some(page) == state.prompt.get(from..to))
                && tokens.get(..from) == state.prompt.get(..from)
        };
        self.fetches.iter().find(|(_, active)| brings(active)).map(|(&id, _)| id)
    }

    /// Ends a request's wait: what has come by now is in the tree; if nobody else waits, the rest is
    /// called off. `expired` says that the request would take more, but waits no longer.
    pub(super) fn stop_waiting(&mut self, state: &mut Request, expired: bool) {
        self.stop_lookup(state, expired);
        let Some(wait) = state.wait.take() else { return };
        self.harvest(wait.fetch, false);
        let Some(active) = self.fetches.get_mut(&wait.fetch) else { return };
        active.waiters = active.waiters.saturating_sub(1);
        let (start, last) = (active.fetch.start, active.waiters == 0);
        let (hit, taken, fault) = {
            let fetched = active.fetch.state.lock();
            (fetched.hit, fetched.taken, fetched.fault)
        };
        state.fetched = active.delivered.clone();
        // A fetch that has not even answered may have all of it.
        state.storage.hit_end = start + hit.unwrap_or(active.fetch.span);
        state.storage.reason = fault.or(Some(MissReason::BackendSlow));
        if last {
            match expired {
                true => active.fetch.cancel.expire(),
                false => active.fetch.cancel.cancel(),
            }
            let fingerprint = active.fingerprint;
            self.fetch_by_span.remove(&fingerprint);
            let missed = hit.unwrap_or(0).saturating_sub(taken) * self.page_size;
            self.count(|counters| &counters.unfulfilled_deadline_tokens, missed);
        }
    }

    /// Puts the pages of a fetch that came in since the last time into the tree.
    pub(super) fn harvest(&mut self, id: u64, ended: bool) {
        let Some(active) = self.fetches.get_mut(&id) else { return };
        let fetch = Arc::clone(&active.fetch);
        let Delivery { from, pages, offers, windows, state: recurrent } = fetch.take_ready(ended);
        if pages.is_empty() {
            return;
        }
        let start = fetch.start + from;
        let end = start + pages.len();
        active.delivered.end = end;
        let root = self.tree.root(&active.namespace);
        let state = fetch.state.lock();
        let marks: Vec<Marks> = offers.iter().map(|&offers| self.marks(&state, offers)).collect();
        let mut orphaned = false;
        let mut fresh = Vec::new();
        let (mut pages, mut windows) = (pages, windows);
        let mut at = start;
        for run in marks.chunk_by(|a, b| a == b) {
            let rest = pages.split_off(run.len().min(pages.len()));
            let own = std::mem::replace(&mut pages, rest);
            let rest = windows.split_off(run.len().min(windows.len()));
            let own_windows = std::mem::replace(&mut windows, rest);
            let upto = at + own.len();
            let own_state = recurrent.filter(|_| upto == end);
            let (tokens, keys) = (fetch.order.tokens.get(..upto * self.page_size), state.keys.get(at..upto));
            let (Some(tokens), Some(keys)) = (tokens, keys) else {
                tracing::error!(id, "a fetch delivered pages it was not asked for");
                self.release_fetched(&own, &own_windows, own_state);
                continue;
            };
            let Marks { stored, owed, unproven } = run[0];
            let inserted = self.tree.insert_host(HostInsert {
                root,
                tokens,
                start: at,
                keys,
                full: &own,
                window: &own_windows,
                state: own_state,
                stored,
                owed,
                unproven,
            });
            at = upto;
            let Some(inserted) = self.sound(inserted) else {
                self.release_fetched(&own, &own_windows, own_state);
                continue;
            };
            if inserted.taken > 0 {
                fresh.push(inserted.node);
            }
            orphaned |= inserted.orphaned;
            self.carry_out(inserted.actions);
        }
        drop(state);
        self.release_fetched(&pages, &windows, None);
        self.tree.retire_root(root);
        for node in fresh {
            let owed = self.tree.info(node).map_or(0, |info| info.owed.count_ones() as usize * info.pages as usize);
            self.count(|counters| &counters.promoted_tokens, owed * self.page_size);
            self.want_stored(node);
        }
        if orphaned {
            // The prefix left while its continuation was on its way.
            self.count(|counters| &counters.unfulfilled_storage_transfer_tokens, (end - start) * self.page_size);
            if let Some(active) = self.fetches.get_mut(&id) {
                active.delivered.end = active.delivered.start;
            }
        }
    }

    /// Gives back host pages that a fetch brought and the tree did not take.
    fn release_fetched(&self, pages: &[u32], windows: &[u32], state: Option<u32>) {
        let live = |slots: &[u32]| -> Vec<u32> { slots.iter().copied().filter(|&slot| slot != NO_SLOT).collect() };
        self.release_slots(Component::Full, &live(pages));
        self.release_slots(Component::Window, &live(windows));
        self.release_slots(Component::State, state.as_slice());
    }

    /// What the backends have of pages that the fetch offers to the sources `offers`. A backend that was in use when storage was asked is
    /// not given them by its write policy: they are in storage already.
    fn marks(&self, state: &FetchState, offers: u64) -> Marks {
        let mut marks = Marks { stored: 0, owed: 0, unproven: state.unproven };
        for view in &self.writes.views {
            let known = state.sources.iter().position(|source| Arc::ptr_eq(&source.attached, &view.attached));
            match known {
                Some(index) if offers & (1 << index) != 0 => marks.owed |= view.bit,
                Some(index) if state.sources[index].emptied == view.emptied => marks.stored |= view.bit,
                // It came, or was emptied, since.
                _ => {}
            }
        }
        marks
    }

    /// Makes room in the host pool for the pages that a fetch found, or for as many as are worth it.
    pub(super) fn make_fetch_room(&mut self, id: u64, needed: &PerComponent<usize>) {
        let Some(fetch) = self.fetches.get(&id).map(|active| Arc::clone(&active.fetch)) else { return };
        if fetch.cancel.is_cancelled() {
            return self.fetch_done(id);
        }
        let (free, capacity) = self.host().map_or((0, 0), |host| (host.free_count(), host.capacity()));
        let wanted = needed[Component::Full];
        if wanted <= capacity {
            // Where all of it can't be had, as much as can.
            let most = free + self.tree.sizes(Component::Full).host;
            self.make_room(Side::Host, Component::Full, wanted.min(most));
        }
        for component in [Component::Window, Component::State] {
            self.make_room(Side::Host, component, needed[component]);
        }
        let Some(lower) = &self.lower else { return };
        let host = &lower.shared.host;
        let room = lower.shared.alloc_host(needed).or_else(|| {
            // A shorter prefix is still worth it if it reaches the threshold; not where more than pages must fit together.
            let alone = needed[Component::Window] + needed[Component::State] == 0;
            let free = host.free_count();
            (alone && free >= fetch.order.threshold).then(|| host.alloc(free)).flatten().map(|pages| {
                let mut room = Slots::default();
                room[Component::Full] = pages;
                room
            })
        });
        let missing = wanted - room.as_ref().map_or(0, |room| room[Component::Full].len());
        self.count(|counters| &counters.unfulfilled_host_capacity_tokens, missing * self.page_size);
        let mut state = fetch.state.lock();
        if room.is_none() || missing > 0 {
            state.fault = Some(MissReason::HostFull);
        }
        match room {
            Some(room) => {
                state.give_room(room);
                drop(state);
                lower.fetch(FetchStep::Transfer(fetch));
            }
            None => {
                drop(state);
                self.fetch_done(id);
            }
        }
    }

    /// Takes leave of a fetch: its last pages, and the requests that wait for it.
    pub(super) fn fetch_done(&mut self, id: u64) {
        self.harvest(id, true);
        let Some(active) = self.fetches.remove(&id) else { return };
        self.fetch_by_span.retain(|_, fetch| *fetch != id);
        self.fetch_pages -= active.fetch.span;
        if let Some(lower) = &self.lower {
            lower.shared.release_host(active.fetch.take_rest());
        }
        let (hit, taken, fault) = {
            let state = active.fetch.state.lock();
            (state.hit.unwrap_or(0), state.taken, state.fault)
        };
        let undelivered = matches!(
            fault,
            Some(MissReason::Corrupt | MissReason::BackendFailed | MissReason::BackendSlow | MissReason::Evicted)
        );
        if undelivered && !active.fetch.cancel.is_cancelled() {
            let missed = hit.saturating_sub(taken) * self.page_size;
            self.count(|counters| &counters.unfulfilled_storage_transfer_tokens, missed);
        }
        let aux = self.tree.components().len() > 1;
        for state in self.requests.values_mut() {
            let Some(wait) = state.wait.take_if(|wait| wait.fetch == id) else { continue };
            // Where windows or states are needed a hit that broke off may have been for nothing, and a shorter one may do.
            state.look_again = wait.joined || (aux && undelivered);
            state.fetched = active.delivered.clone();
            state.storage = StorageOutcome { hit_end: active.fetch.start + hit, reason: fault };
        }
    }
}

/// Time the `timeout` policy allows for a span: a constant part, and a part for each whole page.
fn timeout(base: Duration, per_ki_token: Duration, pages: usize, page_size: usize) -> Duration {
    let per_page = per_ki_token.as_secs_f64() * page_size as f64 / 1024.0;
    base + Duration::try_from_secs_f64(per_page * pages as f64).unwrap_or(Duration::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_grows_with_the_span() {
        let base = Duration::from_secs(1);
        let per_ki = Duration::from_millis(250);
        assert_eq!(timeout(base, per_ki, 0, 16), base);
        assert_eq!(timeout(base, per_ki, 64, 16), Duration::from_millis(1250), "1,024 tokens");
        assert_eq!(timeout(base, per_ki, 128, 16), Duration::from_millis(1500));
    }
}
