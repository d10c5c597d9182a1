//! Calls across the boundary under watch: what every call has to keep is checked at every call.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Bench, Check, Limits, Rule, fail_rule};
use crate::mock::{MockPool, Options, Part, PoolSpec, Query, key};
use crate::v0_1::{ErrorOut, Status};
use crate::{ClearScope, Error, ErrorKind, Result};

/// No call panics.
pub(crate) const PANIC: &str = "calls.panic";
/// Every call returns.
pub(crate) const HANG: &str = "calls.hang";
/// No call stays long after its deadline.
pub(crate) const LATE: &str = "calls.late";
/// Errors have the form that the boundary says.
pub(crate) const ERROR_FORM: &str = "calls.error_form";

pub(super) const RULES: &[Rule] = &[
    Rule::new(PANIC, "5", "no call panics", &[every_call]),
    Rule::new(HANG, "5", "every call returns, also when its deadline has passed", &[every_call_without_time]),
    Rule::new(LATE, "5", "a call whose deadline has passed returns soon", &[every_call_without_time]),
    Rule::new(
        ERROR_FORM,
        "5",
        "the status of a call is the kind in its error; the message is UTF-8, says something and stays in its buffer",
        &[errors],
    ),
];

/// Calls that run, and since when they are late.
#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) limits: Limits,
    flying: Mutex<Vec<Flying>>,
    next: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
struct Flying {
    id: u64,
    name: &'static str,
    due: Instant,
}

const CANARY: u8 = 0xa5;
const CANARY_BYTES: usize = 64;
const MESSAGE_BYTES: usize = 512;

impl Watch {
    pub(crate) fn new(limits: Limits) -> Watch {
        Watch { limits, flying: Mutex::default(), next: AtomicU64::new(0) }
    }

    fn flying(&self) -> std::sync::MutexGuard<'_, Vec<Flying>> {
        self.flying.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call that should have returned long ago, and how long ago.
    pub(crate) fn hung(&self) -> Option<(&'static str, Duration)> {
        let late = |call: &Flying| (call.name, call.due.elapsed());
        self.flying().iter().map(late).find(|(_, late)| *late > self.limits.hang)
    }

    /// Makes a call that has `time`, and reads its error. What every call has to keep is checked here; the inner result is the plugin's answer.
    pub(crate) fn call(
        &self,
        name: &'static str,
        time: Duration,
        run: impl FnOnce(*mut ErrorOut) -> Status,
    ) -> Check<Result<()>> {
        let mut buffer = [CANARY; CANARY_BYTES + MESSAGE_BYTES + CANARY_BYTES];
        let mut error = ErrorOut {
            kind: 0,
            retryable: 0,
            panicked: 0,
            reserved: [0; 2],
            message: buffer[CANARY_BYTES..].as_mut_ptr(),
            message_capacity: MESSAGE_BYTES as u64,
            message_len: 0,
        };
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let due = Instant::now() + time;
        self.flying().push(Flying { id, name, due });
        let status = run(&raw mut error);
        self.flying().retain(|call| call.id != id);
        let late = due.elapsed();
        if late > self.limits.late {
            return fail_rule(
                LATE,
                format!("{name} returns at most {:?} after its deadline", self.limits.late),
                format!("it returned {late:.1?} after it"),
            );
        }
        let (before, rest) = buffer.split_at(CANARY_BYTES);
        let (message, after) = rest.split_at(MESSAGE_BYTES);
        if before.iter().chain(after).any(|byte| *byte != CANARY) {
            let seen = "bytes beside the buffer were written";
            return fail_rule(ERROR_FORM, format!("the message of {name} stays in its buffer"), seen);
        }
        read_error(name, status, &error, message)
    }
}

fn read_error(name: &'static str, status: Status, error: &ErrorOut, message: &[u8]) -> Check<Result<()>> {
    let form = |expected: String, seen: String| fail_rule(ERROR_FORM, expected, seen);
    if error.panicked != 0 {
        let len = error.message_len.min(MESSAGE_BYTES as u64) as usize;
        let seen = String::from_utf8_lossy(&message[..len]).into_owned();
        return fail_rule(PANIC, format!("{name} does not panic"), seen);
    }
    if status == 0 {
        return Ok(Ok(()));
    }
    if status != error.kind {
        let seen = format!("status {status}, kind {}", error.kind);
        return form(format!("the status of {name} is the kind in its error"), seen);
    }
    if error.retryable > 1 {
        return form(format!("{name} sets retryable to 0 or 1"), error.retryable.to_string());
    }
    if error.message_len > MESSAGE_BYTES as u64 {
        let seen = format!("a length of {}", error.message_len);
        return form(format!("the message of {name} has at most the {MESSAGE_BYTES} bytes of its buffer"), seen);
    }
    match std::str::from_utf8(&message[..error.message_len as usize]) {
        Err(problem) => form(format!("the message of {name} is UTF-8"), problem.to_string()),
        Ok("") => form(format!("the error of {name} says what was wrong"), "an empty message".to_owned()),
        Ok(text) => Ok(Err(Error {
            kind: ErrorKind::from_raw(error.kind),
            retryable: error.retryable != 0,
            panicked: false,
            message: text.to_owned(),
        })),
    }
}

/// Every call that a host makes, once, with `time` for each. What they answer is a matter of other rules.
fn run_every_call(bench: &Bench, time: Option<Duration>) -> Check {
    let pool = MockPool::new(PoolSpec::bytes(0, "kv", 8, &[256, 256]).with_seal(64));
    let side = MockPool::new(PoolSpec::bytes(1, "side", 8, &[256]));
    let store = bench.attach(&[&pool, &side])?;
    let options = Options { deadline: time, ..Options::default() };
    let keys = [key(1), key(2), key(3)];
    let parts = [Part::new(&side, &keys, &[0, 1, 2]), Part::new(&pool, &keys, &[0, 1, 2])];
    (0..3).for_each(|page| {
        pool.fill(page, 1 + u64::from(page));
        side.fill(page, 11 + u64::from(page));
    });
    for _ in 0..2 {
        store.set(&options, &parts)?;
        let _ = store.exists(&options, &keys, &[Query::of(&pool), Query::of(&side)])?;
        store.get(&options, &parts)?;
    }
    store.get(&options, &[])?;
    for _ in 0..2 {
        let _ = store.report_held_pages(&options, &keys)?;
        let _ = store.stats(&options)?;
        let _ = store.health(&options)?;
        let _ = store.flush(&options)?;
    }
    store.remove(&options, &parts)?;
    let _ = store.clear(&options, ClearScope::Namespace)?;
    let _ = store.clear(&options, ClearScope::Everything)?;
    let _ = store.unregister(&[1])?;
    store.close()
}

fn every_call(bench: &Bench) -> Check {
    run_every_call(bench, None)
}

fn every_call_without_time(bench: &Bench) -> Check {
    run_every_call(bench, Some(Duration::ZERO))
}

/// Provokes errors; their form is checked at every call.
fn errors(bench: &Bench) -> Check {
    let pool = MockPool::new(PoolSpec::bytes(0, "kv", 8, &[256]));
    let stranger = MockPool::new(PoolSpec::bytes(9, "stranger", 8, &[256]));
    let store = bench.attach(&[&pool])?;
    let options = Options::default();
    let part = [Part::new(&stranger, &[key(1)], &[0])];
    store.get(&options, &part)?;
    store.set(&options, &part)?;
    store.remove(&options, &part)?;
    let _ = store.exists(&options, &[key(1)], &[Query::of(&stranger)])?;
    let _ = store.unregister(&[9])?;
    let late = Options { deadline: Some(Duration::ZERO), ..options };
    store.get(&late, &[Part::new(&pool, &[key(1)], &[0])])?;
    store.set(&late, &[Part::new(&pool, &[key(1)], &[0])])?;
    let unknown = MockPool::new(PoolSpec { hit_policy: 77, ..PoolSpec::bytes(3, "unknown", 8, &[256]) });
    let _ = store.register_side(&[&unknown])?;
    store.close()
}
