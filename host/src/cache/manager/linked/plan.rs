//! From what storage has to a load: how far, into which slots, by way of which transit pages.

use std::sync::Arc;
use std::time::Instant;

use kvdock_kernels::KernelError;

use super::{CacheManager, Lent};
use crate::cache::linker::{Answer, Arriving, Hit, LoadRun, LoadSpan, Origin};
use crate::cache::manager::admit::Request;
use crate::cache::manager::grant::{Draft, Phase};
use crate::cache::pool::{DevicePages, HostPool, Moments};
use crate::cache::types::{Acquire, MissReason};
use crate::cache::unified::{Component, NO_SLOT, Parts, PerComponent, Room, Side, Slots};

/// Why nothing is loaded behind the pages of a grant.
enum NoLoad {
    /// There is nothing, or no room for it.
    Nothing,
    /// Others hold the transit pages that it takes.
    Wait,
    /// Others hold the slots that it takes.
    NoSpace,
}

/// What is loaded behind the pages of a grant.
struct Planned {
    origin: Origin,
    span: LoadSpan,
    /// When its slots were taken.
    moments: PerComponent<Moments>,
    lent: Option<Lent>,
}

/// What a load has to bring to get to the end of a page, depending on which one.
struct Needs {
    /// Pages of the sequence before it.
    start: usize,
    /// Pages of all tokens that are on the device.
    resident: usize,
    window: usize,
    states: usize,
}

impl Needs {
    fn upto(&self, end: usize) -> PerComponent<usize> {
        PerComponent([end.saturating_sub(self.resident), self.window.min(end - self.start), self.states])
    }
}

impl CacheManager {
    /// Grants what is on the device, and behind it slots for what storage has.
    pub(in crate::cache::manager) fn grant_with_load(
        &mut self,
        state: &mut Request,
        draft: Draft,
        tokens: &[u32],
    ) -> Acquire {
        let pages = self.tree.end(draft.lock.node()).map_or(0, |end| end as usize);
        let Planned { origin, span, moments, lent } = match self.plan_load(state, pages, tokens) {
            Ok(planned) => planned,
            Err(NoLoad::Nothing) => return self.grant(state, draft, tokens),
            Err(NoLoad::NoSpace) => {
                self.unlock(draft.lock);
                return Acquire::NoSpace;
            }
            Err(NoLoad::Wait) => {
                self.unlock(draft.lock);
                state.phase = Phase::Queued { ignore_host: false };
                return Acquire::Loading;
            }
        };
        let layers = self.lower.as_ref().map_or(0, |lower| lower.shared.layers());
        let id = self.new_id();
        let run = LoadRun::new(id, state.id, origin, span, moments, layers);
        self.hold_slots(&run);
        self.arrivals.insert(id, Arc::clone(&run));
        self.queued_loads.push(id);
        state.linked.run = Some(Arc::clone(&run));
        let lent_slots = lent.as_ref().map_or(Vec::new(), |lent| self.slots_of(lent));
        state.linked.lent = lent;
        let mut acquired = self.grant(state, draft, tokens);
        if let Acquire::Granted(grant) = &mut acquired {
            let root = self.tree.root(&state.namespace);
            let (span, size) = (&run.span, self.page_size);
            grant.from_device += lent_slots.len() * size;
            grant.from_storage += (run.pages() - lent_slots.len()) * size;
            grant.tokens += run.pages() * size;
            grant.pages.extend(lent_slots);
            grant.pages.extend_from_slice(&span.device[Component::Full]);
            if self.windows.is_some() {
                grant.windows.resize(span.from(Component::Window), NO_SLOT);
                grant.windows.extend_from_slice(&span.device[Component::Window]);
            }
            grant.why = self.misses(state, root, tokens, span.end());
            grant.state = None;
            grant.branch = grant.branch.filter(|&tokens| tokens > grant.tokens);
            grant.arriving = Some(Arriving(run));
        }
        acquired
    }

    /// Slots of pages that are lent.
    fn slots_of(&self, lent: &Lent) -> Vec<u32> {
        let table = self.tree.device_table(Component::Full, lent.lock.node()).unwrap_or_default();
        table.get(lent.pages.clone()).unwrap_or_default().to_vec()
    }

    /// What is on the device behind the first `pages` pages of a sequence, and lacks a window or a state alone, held until it is given back.
    fn lend(&mut self, state: &Request, pages: usize, tokens: &[u32]) -> Option<Lent> {
        if self.tree.components().len() == 1 {
            return None;
        }
        let root = self.tree.find_root(&state.namespace)?;
        let reusable = state.reusable_pages(tokens.len(), self.page_size);
        let found = self.tree.find(root, tokens.get(..reusable * self.page_size)?)?;
        let upto = found.resident.pages as usize;
        if upto <= pages {
            return None;
        }
        let settled = self.tree.settle(found.resident);
        let node = self.sound(settled)?;
        let locked = self.tree.lock_parts(node, Parts::FULL);
        Some(Lent { lock: self.sound(locked)?, pages: pages..upto })
    }

    fn plan_load(&mut self, state: &mut Request, pages: usize, tokens: &[u32]) -> Result<Planned, NoLoad> {
        let Some(Answer { start, held, keys, hit: Some(Hit { lengths, origin }), .. }) = &state.linked.answer else {
            return Err(NoLoad::Nothing);
        };
        let (start, held_end) = (*start, start + held);
        let limit = state.reusable_pages(tokens.len(), self.page_size).min(keys.len());
        // Storage may have been changed or emptied since.
        let stands =
            self.writes.view_of(&origin.attached).is_some() && origin.attached.times_emptied() == origin.emptied;
        if start > pages || !stands {
            return Err(NoLoad::Nothing);
        }
        // From the longest on.
        let ends: Vec<usize> = (pages + 1..=limit).rev().filter(|end| lengths.contains(end - start)).collect();
        if ends.is_empty() {
            return Err(NoLoad::Nothing);
        }
        let (keys, origin) = (Arc::clone(keys), origin.clone());
        let lent = self.lend(state, pages, tokens);
        let resident = lent.as_ref().map_or(pages, |lent| lent.pages.end);
        let taken = match resident < held_end.min(ends[0]) {
            // What nobody asked storage for has left the device.
            true => Err(NoLoad::Nothing),
            false => self.take_load_room(state, origin.attached.is_direct(), (pages, resident), &ends),
        };
        let (end, device, transit, moments) = match taken {
            Ok(taken) => taken,
            Err(why) => {
                self.give_back_lent(lent);
                return Err(why);
            }
        };
        // A shorter load may end before what is on the device does.
        let lent = lent.map(|lent| Lent { pages: lent.pages.start..lent.pages.end.min(end), ..lent });
        let window = self.window_pages();
        let keys = keys.get(..end).map_or(keys.clone(), Arc::from);
        Ok(Planned { origin, span: LoadSpan { keys, start: pages, device, transit, window }, moments, lent })
    }

    /// Slots and transit pages for a load to the longest of `ends` for which there is room, in time. A backend that fills the slots itself needs no
    /// transit pages.
    fn take_load_room(
        &mut self,
        state: &mut Request,
        is_direct: bool,
        (start, resident): (usize, usize),
        ends: &[usize],
    ) -> Result<(usize, Slots, Slots, PerComponent<Moments>), NoLoad> {
        let (window, states) = (self.window_pages(), usize::from(self.states.is_some()));
        let needs = Needs { start, resident, window, states };
        let longest = |has: &dyn Fn(Component) -> usize| {
            let fits = |end: &usize| {
                let needed = needs.upto(*end);
                Component::ALL.into_iter().all(|component| needed[component] <= has(component))
            };
            ends.iter().copied().find(fits)
        };
        let wanted = longest(&|component| self.passage(component, is_direct, false));
        let mut chosen = longest(&|component| self.passage(component, is_direct, true));
        if chosen != wanted {
            let now = Instant::now();
            let patience = self.config.prefetch_timeout_base;
            let until = *state.linked.room_until.get_or_insert(now + patience);
            if now < until && !(self.arrivals.is_empty() && self.writes.held.is_empty()) {
                return Err(NoLoad::Wait);
            }
        }
        let mut device = chosen.and_then(|end| self.take_slots(Side::Device, &needs.upto(end)));
        if device.is_none() && chosen.is_some() {
            if !self.nobody_else_holds_pages() {
                return Err(NoLoad::NoSpace);
            }
            // Waiting would bring nothing: what fits.
            let room = Component::ALL.map(|component| {
                let free = self.device_pool(component).map_or(0, DevicePages::free_count);
                self.passage(component, is_direct, true).min(free + self.tree.sizes(component).unlocked)
            });
            chosen = longest(&|component| room[component as usize]);
            device = chosen.and_then(|end| self.take_slots(Side::Device, &needs.upto(end)));
        }
        let (Some(end), Some(device)) = (chosen, device) else {
            state.storage.reason = Some(MissReason::HostFull);
            return Err(NoLoad::Nothing);
        };
        let transit = match is_direct {
            true => Some(Slots::default()),
            false => self.lower.as_ref().and_then(|lower| lower.shared.alloc_host(&needs.upto(end))),
        };
        let Some(transit) = transit else {
            self.give_back_all(Side::Device, device);
            return Err(NoLoad::Nothing);
        };
        let moments = match self.moments() {
            Ok(moments) => moments,
            Err(error) => {
                tracing::error!(%error, "nothing can be loaded to the device");
                self.give_back_all(Side::Device, device);
                self.give_back_all(Side::Host, transit);
                state.storage.reason = Some(MissReason::BackendFailed);
                return Err(NoLoad::Nothing);
            }
        };
        state.linked.room_until = None;
        if end < ends[0] {
            state.storage.reason = Some(MissReason::HostFull);
        }
        Ok((end, device, transit, moments))
    }

    /// Pages of a component that may be loaded at a time, or those of them that nobody has `now`. By way of the host they are its transit pages; of the
    /// device backends fill no more than half by themselves, as a call that never returns keeps its slots for ever, and the rest has to do then.
    fn passage(&self, component: Component, is_direct: bool, now: bool) -> usize {
        if !is_direct {
            let of = if now { HostPool::free_count } else { HostPool::capacity };
            return self.host_pool(component).map_or(0, of);
        }
        let direct = self.lower.as_ref().and_then(|lower| lower.shared.direct.as_ref());
        let held = direct.and_then(|direct| direct[component].as_ref()).map_or(0, |direct| direct.held().len());
        let all = self.device_pool(component).map_or(0, |pool| pool.capacity() / 2);
        if now { all.saturating_sub(held) } else { all }
    }

    /// The point behind all that the device was told to compute so far, for the pools of each component.
    fn moments(&self) -> Result<PerComponent<Moments>, KernelError> {
        let mut moments = PerComponent::default();
        let Some(lower) = &self.lower else { return Ok(moments) };
        for component in Component::ALL {
            if let Some((device, _)) = lower.shared.pools(component) {
                moments[component] = device.moments()?;
            }
        }
        Ok(moments)
    }

    pub(super) fn give_back_lent(&mut self, lent: Option<Lent>) {
        if let Some(Lent { lock, .. }) = lent {
            self.unlock(lock);
        }
    }
}
