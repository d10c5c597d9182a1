//! What is ordered before what: vector clocks over streams.

use std::collections::HashMap;

/// For each stream the number of the last operation that is known to have run.
#[derive(Debug, Clone, Default)]
pub struct Clock(HashMap<u64, u64>);

impl Clock {
    pub fn join(&mut self, other: &Clock) {
        for (stream, number) in &other.0 {
            let mine = self.0.entry(*stream).or_default();
            *mine = (*mine).max(*number);
        }
    }

    pub fn set(&mut self, stream: u64, number: u64) {
        self.0.insert(stream, number);
    }

    /// Whether operation `number` of `stream` is before this.
    pub fn has(&self, stream: u64, number: u64) -> bool {
        self.0.get(&stream).is_some_and(|known| *known >= number)
    }
}

/// A use of memory by an operation of a stream.
#[derive(Debug, Clone)]
pub struct Use {
    pub start: u64,
    pub end: u64,
    pub writes: bool,
    pub stream: u64,
    pub number: u64,
    pub what: String,
}

/// Uses that later ones have to be ordered behind.
#[derive(Debug, Default)]
pub struct Uses(Vec<Use>);

impl Uses {
    /// The uses that overlap a range, conflict with it, and are not before `clock`.
    pub fn unordered(&self, start: u64, end: u64, writes: bool, clock: &Clock) -> Vec<&Use> {
        let conflicts = |known: &&Use| {
            known.start < end && start < known.end && (writes || known.writes) && !clock.has(known.stream, known.number)
        };
        self.0.iter().filter(conflicts).collect()
    }

    /// Adds a use at `clock`, and drops those that whoever is ordered behind this one is behind, too.
    pub fn add(&mut self, new: Use, clock: &Clock) {
        self.0.retain(|known| {
            let covered = new.start <= known.start && known.end <= new.end;
            let follows = clock.has(known.stream, known.number) || known.stream == new.stream;
            !(covered && follows && (new.writes || !known.writes))
        });
        self.0.push(new);
    }
}
