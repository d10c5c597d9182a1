//! What the fake driver keeps track of.

use std::collections::{BTreeMap, HashMap};
use std::thread::ThreadId;

use kvdock_cuda::driver::{Access, Arg, DriverError, DriverResult, Launch, Stream, Touch};

use super::clocks::{Clock, Use, Uses};
use super::emulated::Emulated;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Device,
    Pinned,
    /// Memory that is the test's own.
    Registered,
}

pub struct Memory {
    pub bytes: u64,
    pub kind: Kind,
    /// The memory itself, with room for its alignment.
    pub _store: Vec<u8>,
}

#[derive(Default)]
pub struct Queue {
    pub clock: Clock,
    pub number: u64,
    /// Who records on it, and what.
    pub capture: Option<(ThreadId, Vec<Recorded>)>,
}

/// An operation that was recorded.
#[derive(Clone)]
pub struct Recorded {
    pub what: String,
    pub touches: Vec<Touch>,
    pub action: Action,
}

#[derive(Clone)]
pub enum Action {
    Copy { to: u64, from: u64, bytes: usize },
    Fill { at: u64, value: u8, bytes: usize },
    Launch { function: u64, grid: [u32; 3], block: [u32; 3], shared: u32, args: Vec<Arg> },
}

#[derive(Default)]
pub struct State {
    /// By first address.
    pub live: BTreeMap<u64, Memory>,
    /// Memory that was given back; it stays as it is, so that its addresses are not used again.
    pub dead: Vec<Memory>,
    pub dead_ranges: Vec<(u64, u64)>,
    pub uses: Uses,
    pub queues: HashMap<u64, Queue>,
    /// What each event marks; `None` before it was recorded.
    pub events: HashMap<u64, Option<Clock>>,
    pub modules: HashMap<u64, Option<Emulated>>,
    pub functions: HashMap<u64, (u64, String)>,
    pub graphs: HashMap<u64, Vec<Recorded>>,
    /// What this process knows to have run.
    pub host: Clock,
    pub next: u64,
    pub violations: Vec<String>,
    /// Calls of kinds that tests count.
    pub calls: BTreeMap<&'static str, usize>,
    pub launched: Vec<String>,
    /// Bytes of device memory that there are.
    pub room: u64,
    /// Whether a query finds that work has run as soon as it is queued.
    pub eager: bool,
    /// Makes a call of this kind fail once.
    pub fail: Option<&'static str>,
}

pub fn error(call: &'static str, code: u32, reason: &str) -> DriverError {
    DriverError { call, code, reason: reason.into() }
}

impl State {
    pub fn called(&mut self, call: &'static str) -> DriverResult<()> {
        *self.calls.entry(call).or_default() += 1;
        if self.fail == Some(call) {
            self.fail = None;
            return Err(error(call, 719, "failed as the test asked"));
        }
        Ok(())
    }

    pub fn violation(&mut self, text: String) {
        self.violations.push(text);
    }

    pub fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub fn add(&mut self, bytes: usize, kind: Kind) -> u64 {
        // Poisoned: an f32 or a half of it is no number.
        let store = vec![0xFF_u8; bytes.max(1) + 4096];
        let at = (store.as_ptr() as u64).next_multiple_of(4096);
        self.live.insert(at, Memory { bytes: bytes.max(1) as u64, kind, _store: store });
        at
    }

    pub fn remove(&mut self, call: &'static str, at: u64, kind: Kind) {
        match self.live.remove(&at) {
            Some(memory) if memory.kind == kind => {
                // The driver waits for work before it gives device memory back; of host memory it knows nothing.
                if kind != Kind::Device {
                    let open: Vec<String> = self
                        .uses
                        .unordered(at, at + memory.bytes, true, &self.host)
                        .iter()
                        .map(|known| format!("{call}: {} may still run", known.what))
                        .collect();
                    self.violations.extend(open);
                }
                self.dead_ranges.push((at, at + memory.bytes));
                self.dead.push(memory);
            }
            _ => self.violation(format!("{call} of {at:#x}, which is no such memory")),
        }
    }

    /// That memory is there, and what it is.
    pub fn check_range(&mut self, what: &str, touch: &Touch) -> Option<Kind> {
        let end = touch.at + touch.len as u64;
        if let Some((start, memory)) = self.live.range(..=touch.at).next_back()
            && end <= start + memory.bytes
        {
            return Some(memory.kind);
        }
        let dead = self.dead_ranges.iter().any(|(start, stop)| *start <= touch.at && end <= *stop);
        let why = if dead { "after it was given back" } else { "outside of any memory" };
        self.violation(format!("{what} uses {} bytes at {:#x} {why}", touch.len, touch.at));
        None
    }

    /// Queues an operation.
    pub fn queue(&mut self, stream: Stream, operation: Recorded) {
        let Some(queue) = self.queues.get_mut(&stream.0) else {
            return self.violation(format!("{} on a stream that is not there", operation.what));
        };
        if let Some((thread, recorded)) = &mut queue.capture {
            let other = *thread != std::thread::current().id();
            recorded.push(operation.clone());
            if other {
                self.violation(format!("{} of another thread got into a recording", operation.what));
            }
            for touch in &operation.touches {
                if self.check_range(&operation.what, touch).is_some_and(|kind| kind != Kind::Device) {
                    self.violation(format!("{} with host memory was recorded", operation.what));
                }
            }
            return;
        }
        self.run(stream, &operation);
    }

    pub fn run(&mut self, stream: Stream, operation: &Recorded) {
        let Some(queue) = self.queues.get_mut(&stream.0) else { return };
        queue.number += 1;
        let number = queue.number;
        // What this process knew when it queued the operation has run before it.
        queue.clock.join(&self.host);
        queue.clock.set(stream.0, number);
        let clock = queue.clock.clone();
        let mut good = true;
        for touch in &operation.touches {
            if touch.len == 0 {
                continue;
            }
            good &= self.check_range(&operation.what, touch).is_some();
            let (start, end, writes) = (touch.at, touch.at + touch.len as u64, touch.access == Access::Write);
            let races: Vec<String> = self
                .uses
                .unordered(start, end, writes, &clock)
                .iter()
                .filter(|known| known.number != number || known.stream != stream.0)
                .map(|known| format!("{} is not ordered behind {}", operation.what, known.what))
                .collect();
            self.violations.extend(races);
            let what = operation.what.clone();
            self.uses.add(Use { start, end, writes, stream: stream.0, number, what }, &clock);
        }
        if !good {
            return;
        }
        match &operation.action {
            // SAFETY: the ranges lie in live memory of this process, which has just been checked.
            Action::Copy { to, from, bytes } => unsafe {
                std::ptr::copy(*from as *const u8, *to as *mut u8, *bytes);
            },
            // SAFETY: as above.
            Action::Fill { at, value, bytes } => unsafe { std::ptr::write_bytes(*at as *mut u8, *value, *bytes) },
            Action::Launch { function, grid, block, shared, args } => {
                let Some((module, name)) = self.functions.get(function) else { return };
                self.launched.push(name.clone());
                if let Some(Some(emulated)) = self.modules.get(module) {
                    let launch = Launch { grid: *grid, block: *block, shared: *shared, args, touches: &|_| {} };
                    // SAFETY: what the kernel touches has been told, and is live.
                    unsafe { emulated.run(name, &launch, number) };
                }
            }
        }
    }

    pub fn copy(&mut self, call: &'static str, to: u64, from: u64, bytes: usize, stream: Stream) -> DriverResult<()> {
        self.called(call)?;
        let touches = vec![
            Touch { at: from, len: bytes, access: Access::Read },
            Touch { at: to, len: bytes, access: Access::Write },
        ];
        self.queue(stream, Recorded { what: call.into(), touches, action: Action::Copy { to, from, bytes } });
        Ok(())
    }

    pub fn no_capture(&mut self, call: &str, stream: Stream) {
        if self.queues.get(&stream.0).is_some_and(|queue| queue.capture.is_some()) {
            self.violation(format!("{call} of a stream that records"));
        }
    }
}
