//! Segments that somebody else has removed while this process runs.
//!
//! Who removes them takes their pages away, and wants the room: what is on them is forgotten, so that the kernel gives it back. Reads that run go on to their end. Pages that
//! memory has too stay, and get a record elsewhere when they leave it; those of a leader at once.

use std::time::{Duration, Instant};

use kvdock_plugin_api::LogLevel;

use super::Tiers;
use crate::config::Role;

/// How often it is looked whether segments are still there at most.
const LOOK: Duration = Duration::from_millis(500);

impl Tiers {
    /// Forgets what was on segments that are gone, if that was not looked for a moment ago.
    pub(super) fn look_for_lost(&self) {
        let Some(mut looked) = self.missed.try_lock() else { return };
        if looked.is_none_or(|at| at.elapsed() >= LOOK) {
            self.give_up_lost();
            *looked = Some(Instant::now());
        }
    }

    /// Forgets what was on segments that are gone.
    pub(super) fn give_up_lost(&self) {
        let Some(disk) = &self.disk else { return };
        let lost: Vec<_> = disk.logs.iter().flat_map(crate::segment::Log::take_lost).collect();
        let Some(first) = lost.first() else { return };
        let mut state = self.state.write();
        let on_lost = |(slot, entry): (u32, &super::state::Entry)| {
            entry.disk.as_ref().is_some_and(|place| place.at.segment.is_lost()).then_some(slot)
        };
        // A record that is just being written there is dropped by the one that writes it.
        let slots: Vec<u32> = state.slots().filter_map(on_lost).collect();
        let before = state.len();
        for slot in &slots {
            let _ = state.drop_disk(*slot);
        }
        let gone = before - state.len();
        let kept: Vec<u32> = slots.iter().copied().filter(|slot| state.is_there(*slot)).collect();
        drop(state);
        if self.config.role == Role::Leader {
            // Followers know of a page by its record alone.
            let mut queue = self.queue.lock();
            let room = self.config.pipeline.queue.saturating_sub(queue.len());
            queue.extend(kept.into_iter().take(room));
        }
        let level = if self.config.role == Role::Follower { LogLevel::Debug } else { LogLevel::Warn };
        let text = format!(
            "{}: it and {} other segments were removed or replaced by somebody else: {gone} objects are gone, {} are in memory alone",
            first.path().display(),
            lost.len() - 1,
            slots.len() - gone
        );
        self.host.log(level, "umbp", &text);
        // What a follower does not find any more its leader has moved, or evicted.
        if gone > 0 && self.config.role != Role::Follower {
            self.host.contents_lost();
        }
        self.ring();
    }
}
