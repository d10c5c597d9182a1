//! An instance against a backend that hangs, panics, errs and answers half.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use kvdock_plugin_api as api;
use kvdock_plugin_api::note::NoteSource;
use kvdock_plugin_api::v0_1::{BackendTable, Stats};

use super::abi::RawInstance;
use super::backend::*;
use super::host_table::{HOST_TABLE, HostContext};
use super::inspect::{Note, NoteCapabilities, PluginInfo};
use super::instance::{Instance, Parts};
use super::library::Library;
use super::manager::watch::ask;
use super::pool_desc::{OwnedPoolDesc, Registered};
use super::ranks::Ranks;
use super::state::{BackendState, StateCell};

mod ranks;

/// What the backend does in its next data calls.
#[derive(Clone, Copy, PartialEq)]
enum Mood {
    Good,
    Hang,
    Panic,
    Err,
    Silent,
}

/// The controls of one test's backend, found through the name of its instance.
struct Knobs {
    mood: Mutex<Mood>,
    release: AtomicBool,
    running: AtomicUsize,
    closed: AtomicUsize,
    saw_cancel: AtomicBool,
    /// Calls that came after `close`.
    after_close: AtomicUsize,
}

fn knobs(name: &str) -> Arc<Knobs> {
    static ALL: OnceLock<Mutex<std::collections::HashMap<String, Arc<Knobs>>>> = OnceLock::new();
    let mut all = ALL.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    let new = || {
        Arc::new(Knobs {
            mood: Mutex::new(Mood::Good),
            release: AtomicBool::new(false),
            running: AtomicUsize::new(0),
            closed: AtomicUsize::new(0),
            saw_cancel: AtomicBool::new(false),
            after_close: AtomicUsize::new(0),
        })
    };
    all.entry(name.to_owned()).or_insert_with(new).clone()
}

struct Moody(Arc<Knobs>);

impl Moody {
    /// The knobs outlive the instance, so that a call after `close` can be told.
    fn called(&self) {
        let late = usize::from(self.0.closed.load(Ordering::SeqCst) > 0);
        self.0.after_close.fetch_add(late, Ordering::SeqCst);
    }

    fn act(&self, call: &api::Call<'_>) -> api::Result<Mood> {
        self.called();
        let mood = *self.0.mood.lock().unwrap();
        self.0.running.fetch_add(1, Ordering::SeqCst);
        let result = match mood {
            Mood::Hang => {
                while !self.0.release.load(Ordering::SeqCst) {
                    if call.is_cancelled() {
                        self.0.saw_cancel.store(true, Ordering::SeqCst);
                    }
                    thread::sleep(Duration::from_millis(1));
                }
                Ok(mood)
            }
            Mood::Panic => {
                self.0.running.fetch_sub(1, Ordering::SeqCst);
                panic!("moody on purpose");
            }
            Mood::Err => Err(api::Error::new(ErrorKind::NoSpace, "the shelf is full").retryable()),
            Mood::Good | Mood::Silent => Ok(mood),
        };
        self.0.running.fetch_sub(1, Ordering::SeqCst);
        result
    }
}

impl api::Backend for Moody {
    type Linker = api::NoLinker<Self>;
    fn open(open: &api::Open<'_>) -> api::Result<Self> {
        Ok(Moody(knobs(open.instance_name())))
    }
    fn batch_exists(&self, exists: &mut api::Exists<'_>) -> api::Result<()> {
        if self.act(&exists.call().clone())? == Mood::Good {
            exists.set(0, 0, PageStatus::Ok);
        }
        Ok(())
    }
    fn batch_get(&self, batch: api::Batch<'_, api::Get>) -> api::Result<()> {
        let mood = self.act(batch.call())?;
        for (index, page) in batch.into_pages().enumerate() {
            match (mood, index % 2) {
                (Mood::Silent, _) => {}
                (_, 0) => page.finish(PageStatus::Ok),
                _ => page.finish(PageStatus::Missing),
            }
        }
        Ok(())
    }
    fn batch_set(&self, batch: api::Batch<'_, api::Set>) -> api::Result<()> {
        self.act(batch.call())?;
        batch.into_pages().for_each(|page| page.finish(PageStatus::Ok));
        Ok(())
    }
    fn stats(&self, _: &api::Call<'_>) -> api::Result<Stats> {
        Ok(Stats { pages: 7, bytes_used: 1, bytes_total: 2, failures: 3, get_mean_ns: 0, set_mean_ns: 0 })
    }
    fn health(&self, _: &api::Call<'_>) -> api::Result<api::Health> {
        self.called();
        Ok(api::Health::ok())
    }
    fn flush(&self, _: &api::Call<'_>) -> api::Result<()> {
        self.called();
        Ok(())
    }
    fn close(&self, _: &api::Call<'_>) -> api::Result<()> {
        self.0.closed.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

const SOURCE: NoteSource = NoteSource {
    name: "moody",
    version: "0.0.1",
    license: "Apache-2.0",
    description: "for tests",
    panic_abort: false,
    capabilities: api::Capabilities::NONE,
    config_schema: "{}",
    check_config: "{}",
};

unsafe extern "C" fn open_moody(
    args: *const api::v0_1::OpenArgs,
    out: *mut *mut std::ffi::c_void,
    error: *mut api::v0_1::ErrorOut,
) -> api::v0_1::Status {
    // SAFETY: called by the rules of the boundary.
    unsafe { api::export::open::<Moody>(SOURCE.capabilities, args, out, error) }
}

static TABLE: BackendTable = api::export::Tables::<Moody>::backend(open_moody);

extern "C" fn entry(_: u32) -> *const std::ffi::c_void {
    (&raw const TABLE).cast()
}

fn pool() -> HostPoolDescription {
    // Pages of 64 bytes that nobody reads: the moods touch no bytes.
    let memory: &'static mut [u8] = Box::leak(vec![0u8; 64 * 64].into_boxed_slice());
    HostPoolDescription {
        name: "kv".into(),
        group: PoolGroup::Full,
        hit: PoolHit::AllPages,
        logical: false,
        layout: "page_first".into(),
        dtype: api::Dtype::F16,
        pages: 64,
        page_tokens: 4,
        layers: 1,
        base: memory.as_mut_ptr() as usize,
        bytes: 64 * 64,
        pinned: false,
        fd: -1,
        device: Vec::new(),
        segments: vec![HostPoolSegment { region: 0, offset: 0, stride: 64, len: 64 }],
        components: vec![],
    }
}

fn attach(name: &str, concurrency: u32) -> (Arc<Instance>, Arc<Knobs>, Arc<AtomicUsize>) {
    let settings = BackendSettings { timeout: Duration::from_secs(1), ..BackendSettings::default() };
    attach_with(name, concurrency, settings)
}

/// An instance with a call that never returns, and whether that call was told to.
pub(super) fn hanging(name: &str, settings: BackendSettings) -> (Arc<Instance>, impl Fn() -> bool + use<>) {
    let (instance, knobs, _) = attach_with(name, 1, settings);
    set_mood(&knobs, Mood::Hang);
    let caller = instance.clone();
    thread::spawn(move || get(&caller, SECOND * 3600, &[1]).0);
    while knobs.running.load(Ordering::SeqCst) == 0 {
        thread::sleep(Duration::from_millis(1));
    }
    (instance, move || knobs.saw_cancel.load(Ordering::SeqCst))
}

fn attach_with(
    name: &str,
    concurrency: u32,
    settings: BackendSettings,
) -> (Arc<Instance>, Arc<Knobs>, Arc<AtomicUsize>) {
    let failures = Arc::new(AtomicUsize::new(0));
    let counted = failures.clone();
    let state = StateCell::new(
        name,
        Box::new(move |state| {
            counted.fetch_add(usize::from(state == BackendState::Failed), Ordering::SeqCst);
        }),
    );
    let (instance, knobs) = attach_in(name, concurrency, settings, Arc::new(state));
    (instance, knobs, failures)
}

/// An instance whose state is in `state`.
fn attach_in(
    name: &str,
    concurrency: u32,
    settings: BackendSettings,
    state: Arc<StateCell>,
) -> (Arc<Instance>, Arc<Knobs>) {
    let identity = api::v0_1::Identity {
        namespace_digest: [0; 32],
        namespace_json: "{}".into(),
        model_name: "m".into(),
        weights_digest: [0; 32],
        numerics_id: "n".into(),
        page_tokens: 4,
        tp_rank: 0,
        tp_size: 1,
        pp_rank: 0,
        pp_size: 1,
        cp_rank: 0,
        cp_size: 1,
        dp_rank: 0,
        dp_size: 1,
        dcp_rank: 0,
        dcp_size: 1,
        tp_lcm_size: 0,
        replicated: 0,
        writer: 1,
    };
    let context = HostContext::leak(name);
    let call = api::v0_1::CallContext { deadline_ns: 0, cancel: std::ptr::null(), trace_id: 0 };
    let args = api::v0_1::OpenArgs {
        context: call,
        config_json: "{}".into(),
        instance_name: name.into(),
        identity: &raw const identity,
        host: &raw const HOST_TABLE,
        host_context: context.raw(),
        cache_mode: api::CacheMode::Hierarchical.raw(),
        reserved: 0,
    };
    let mut raw = std::ptr::null_mut();
    let pool = pool();
    let anchor = OwnedPoolDesc::anchor(&pool, true);
    let desc = anchor.raw();
    // SAFETY: all arguments are valid; the pool's memory is leaked.
    unsafe {
        assert_eq!((TABLE.open)(&raw const args, &raw mut raw, std::ptr::null_mut()), 0);
        let status = (TABLE.register_mem_pool_host)(raw, &raw const call, &raw const desc, std::ptr::null_mut());
        assert_eq!(status, 0);
    }
    let note = Note {
        note: 1,
        name: "moody".into(),
        version: "0.0.1".into(),
        license: "Apache-2.0".into(),
        description: String::new(),
        abi: vec!["0.1".into()],
        panic: "unwind".into(),
        capabilities: NoteCapabilities::default(),
        config_schema: serde_json::json!({}),
        check_config: serde_json::json!({}),
        types_sha256: Default::default(),
        types: Default::default(),
    };
    state.go(BackendState::Active, "");
    let parts = Parts {
        device: None,
        name: name.into(),
        library: Library::built_in(
            PluginInfo { path: "moody.so".into(), sha256: [0; 32], abi: "0.1", note },
            entry,
            &TABLE,
        ),
        raw: RawInstance(raw),
        capabilities: api::Capabilities { concurrency, ..api::Capabilities::NONE },
        pools: Registered::of(&[pool]),
        context,
        settings,
        state,
    };
    (Instance::new(parts).unwrap(), knobs(name))
}

fn set_mood(knobs: &Knobs, mood: Mood) {
    *knobs.mood.lock().unwrap() = mood;
}

fn get(instance: &Instance, timeout: Duration, pages: &[u32]) -> (Result<(), BackendError>, Vec<PageStatus>) {
    let keys: Vec<PageKey> = pages.iter().map(|p| [*p as u8; 32]).collect();
    let mut status = vec![PageStatus::Unset; pages.len()];
    let options = CallOptions::within(timeout);
    let result = instance.batch_get(&options, PoolGroup::Full, &keys, pages, &ChainInfo::default(), &mut status);
    (result, status)
}

fn shut(instance: &Instance, within: Duration) -> bool {
    instance.shut(Instant::now() + within, Instant::now() + within * 2, "test")
}

const SECOND: Duration = Duration::from_secs(1);
const SHORT: Duration = Duration::from_millis(30);

#[test]
fn answers_come_page_by_page() {
    let (instance, knobs, _) = attach("good", 2);
    let (result, status) = get(&instance, SECOND, &[1, 2, 3]);
    assert_eq!(result, Ok(()));
    assert_eq!(status, [PageStatus::Ok, PageStatus::Missing, PageStatus::Ok]);
    let options = CallOptions::within(SECOND);
    let found = instance.batch_exists(&options, &[[1; 32], [2; 32]], &Held::default(), &ChainInfo::default()).unwrap();
    assert_eq!(found.longest(), 1);
    assert_eq!(instance.stats().unwrap().pages, 7);
    assert!(shut(&instance, SECOND));
    assert_eq!(knobs.closed.load(Ordering::SeqCst), 1);
    assert_eq!(instance.state().report().state, BackendState::Detached);
}

#[test]
fn a_page_left_unanswered_counts_as_failed() {
    let (instance, knobs, _) = attach("silent", 1);
    set_mood(&knobs, Mood::Silent);
    let (result, status) = get(&instance, SECOND, &[1, 2]);
    assert_eq!(result, Ok(()));
    assert_eq!(status, [PageStatus::Failed, PageStatus::Failed]);
    shut(&instance, SECOND);
}

#[test]
fn an_error_keeps_its_kind_and_words() {
    let (instance, knobs, failures) = attach("err", 1);
    set_mood(&knobs, Mood::Err);
    let error = get(&instance, SECOND, &[1]).0.unwrap_err();
    assert_eq!((error.kind, error.retryable, error.pages_in_use), (ErrorKind::NoSpace, true, false));
    assert_eq!(error.to_string(), "storage backend err: no space: the shelf is full");
    assert_eq!(failures.load(Ordering::SeqCst), 0);
    shut(&instance, SECOND);
}

#[test]
fn a_panic_fails_the_instance_once_and_for_good() {
    let (instance, knobs, failures) = attach("panic", 2);
    set_mood(&knobs, Mood::Panic);
    // The trace of a panic takes a while on a busy machine.
    let error = get(&instance, SECOND * 60, &[1]).0.unwrap_err();
    assert!(error.message.contains("moody on purpose"), "{error}");
    let report = instance.state().report();
    assert_eq!(report.state, BackendState::Failed);
    assert!(report.reason.contains("moody on purpose") && report.since <= SystemTime::now());
    set_mood(&knobs, Mood::Good);
    assert_eq!(get(&instance, SECOND, &[1]).0.unwrap_err().kind, ErrorKind::Unavailable);
    assert_eq!(failures.load(Ordering::SeqCst), 1);
    assert!(shut(&instance, SECOND));
    assert_eq!(instance.state().report().state, BackendState::Failed, "the status still shows why");
    assert_eq!(knobs.closed.load(Ordering::SeqCst), 1);
}

#[test]
fn i31296_a_late_call_keeps_its_pages_until_it_returns() {
    let (instance, knobs, _) = attach("late", 2);
    set_mood(&knobs, Mood::Hang);
    let (result, _) = get(&instance, SHORT, &[5, 6]);
    let error = result.unwrap_err();
    assert_eq!((error.kind, error.pages_in_use), (ErrorKind::TimedOut, true));
    assert!(knobs.saw_cancel.load(Ordering::SeqCst), "the call is asked to stop first");
    assert_eq!((instance.quarantined(), instance.reclaim(PoolGroup::Full)), (2, vec![]));
    set_mood(&knobs, Mood::Good);
    assert_eq!(get(&instance, SECOND, &[1]).0, Ok(()), "others go on");
    knobs.release.store(true, Ordering::SeqCst);
    let end = Instant::now() + SECOND;
    let mut back = Vec::new();
    while back.is_empty() && Instant::now() < end {
        back = instance.reclaim(PoolGroup::Full);
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(back, vec![5, 6]);
    assert_eq!((instance.quarantined(), instance.reclaim(PoolGroup::Full)), (0, vec![]));
    assert!(shut(&instance, SECOND));
}

#[test]
fn an_instance_whose_calls_all_hang_is_failed_and_stays_as_a_zombie() {
    let (instance, knobs, failures) = attach("zombie", 2);
    set_mood(&knobs, Mood::Hang);
    for page in [1, 2] {
        assert_eq!(get(&instance, SHORT, &[page]).0.unwrap_err().kind, ErrorKind::TimedOut);
    }
    assert_eq!(instance.state().report().state, BackendState::Failed);
    assert_eq!(failures.load(Ordering::SeqCst), 1);
    assert!(!shut(&instance, SHORT));
    assert_eq!(instance.state().report().state, BackendState::Zombie);
    assert_eq!(knobs.closed.load(Ordering::SeqCst), 0, "close comes only after every other call has returned");
    knobs.release.store(true, Ordering::SeqCst);
}

#[test]
fn a_zombie_whose_calls_return_after_all_is_closed_late() {
    let (instance, knobs, _) = attach("returns", 1);
    set_mood(&knobs, Mood::Hang);
    assert!(get(&instance, SHORT, &[1]).0.is_err());
    assert!(!shut(&instance, SHORT));
    assert_eq!(instance.state().report().state, BackendState::Zombie);
    assert!(!shut(&instance, SHORT), "its call still runs");
    knobs.release.store(true, Ordering::SeqCst);
    let end = Instant::now() + SECOND * 10;
    while !instance.is_idle() && Instant::now() < end {
        thread::sleep(Duration::from_millis(1));
    }
    assert!(shut(&instance, SECOND));
    assert_eq!(instance.state().report().state, BackendState::Detached);
    assert_eq!(knobs.closed.load(Ordering::SeqCst), 1);
}

#[test]
fn h17_a_drain_can_be_cut_short_while_it_runs() {
    let (instance, knobs, _) = attach("hurry", 1);
    set_mood(&knobs, Mood::Hang);
    let one = instance.clone();
    let hanging = thread::spawn(move || get(&one, SECOND * 3600, &[1]).0);
    while knobs.running.load(Ordering::SeqCst) == 0 {
        thread::yield_now();
    }
    let one = instance.clone();
    let hour = Instant::now() + SECOND * 3600;
    let draining = thread::spawn(move || one.shut(hour, hour + SECOND * 60, "test"));
    while instance.state().report().state != BackendState::Draining {
        thread::yield_now();
    }
    instance.hurry();
    while !knobs.saw_cancel.load(Ordering::SeqCst) {
        thread::yield_now();
    }
    knobs.release.store(true, Ordering::SeqCst);
    assert!(hanging.join().unwrap().is_ok());
    assert!(draining.join().unwrap(), "not after an hour");
}

#[test]
fn no_call_reaches_an_instance_that_is_closed() {
    let (instance, knobs, _) = attach("closed", 2);
    let over = Arc::new(AtomicBool::new(false));
    let callers: Vec<_> = (0..4)
        .map(|caller| {
            let (instance, over) = (instance.clone(), over.clone());
            thread::spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    let options = CallOptions::within(SECOND);
                    match caller {
                        0 => drop(instance.health(options.deadline)),
                        1 => drop(instance.flush(&options)),
                        _ => drop(get(&instance, SECOND, &[caller])),
                    }
                }
            })
        })
        .collect();
    thread::sleep(SHORT);
    assert!(shut(&instance, SECOND * 10));
    thread::sleep(SHORT);
    over.store(true, Ordering::SeqCst);
    callers.into_iter().for_each(|caller| caller.join().unwrap());
    // `Moody::act` counts a call that comes after `close`.
    assert_eq!(knobs.after_close.load(Ordering::SeqCst), 0);
    assert_eq!(instance.stats().unwrap_err().message, "it is being closed");
    assert_eq!(get(&instance, SECOND, &[1]).0.unwrap_err().kind, ErrorKind::Unavailable);
}

#[test]
fn more_calls_than_the_plugin_wants_wait_for_their_turn() {
    let (instance, knobs, _) = attach("turns", 1);
    set_mood(&knobs, Mood::Hang);
    let one = instance.clone();
    let first = thread::spawn(move || get(&one, SECOND * 20, &[1]).0);
    while knobs.running.load(Ordering::SeqCst) == 0 {
        thread::yield_now();
    }
    let error = get(&instance, SHORT, &[2]).0.unwrap_err();
    assert_eq!((error.kind, error.pages_in_use), (ErrorKind::Unavailable, false));
    assert_eq!(instance.in_flight(), 1);
    knobs.release.store(true, Ordering::SeqCst);
    assert_eq!(first.join().unwrap(), Ok(()));
    assert!(shut(&instance, SECOND));
}

#[test]
fn closing_cancels_what_still_runs_after_the_drain() {
    let (instance, knobs, _) = attach("drain", 1);
    set_mood(&knobs, Mood::Hang);
    let one = instance.clone();
    let first = thread::spawn(move || get(&one, SECOND * 20, &[1]).0);
    while knobs.running.load(Ordering::SeqCst) == 0 {
        thread::yield_now();
    }
    let watched = knobs.clone();
    let watcher = thread::spawn(move || {
        while !watched.saw_cancel.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        watched.release.store(true, Ordering::SeqCst);
    });
    assert!(instance.shut(Instant::now(), Instant::now() + SECOND * 10, "test"));
    watcher.join().unwrap();
    assert!(first.join().unwrap().is_ok());
    assert_eq!(knobs.closed.load(Ordering::SeqCst), 1);
    assert!(shut(&instance, SECOND), "a second shut does nothing more");
    assert_eq!(knobs.closed.load(Ordering::SeqCst), 1);
}

#[test]
fn health_told_by_the_plugin_degrades_and_heals() {
    let (instance, _, _) = attach("health", 1);
    let all = Ranks::alone(instance.clone());
    let tell = |state: api::HealthState, reason: &str| {
        // SAFETY: the table and the context are the host's own.
        unsafe { (HOST_TABLE.health_changed)(instance.context().raw(), state.raw(), reason.into()) }
    };
    tell(api::HealthState::Degraded, "the disk is full");
    let report = instance.state().report();
    assert_eq!((report.state, report.reason.as_str()), (BackendState::Degraded, "the disk is full"));
    assert_eq!(get(&instance, SECOND, &[1]).0, Ok(()), "a degraded backend still serves");
    ask(&all, None);
    assert_eq!(
        instance.state().state(),
        BackendState::Degraded,
        "asked, it only says that it answers; what it told stands"
    );
    tell(api::HealthState::Ok, "");
    assert_eq!(instance.state().report().state, BackendState::Active);
    ask(&all, Some("reads keep failing".into()));
    assert_eq!(instance.state().report().reason, "reads keep failing");
    ask(&all, None);
    assert_eq!(instance.state().state(), BackendState::Active);
    shut(&instance, SECOND);
}

#[test]
fn a_call_with_mismatched_arrays_is_refused_before_the_plugin_sees_it() {
    let (instance, _, _) = attach("arrays", 1);
    let mut status = [PageStatus::Unset; 1];
    let options = CallOptions { deadline: Instant::now() + SECOND, cancel: Arc::new(AtomicU32::new(0)) };
    let error = instance
        .batch_get(&options, PoolGroup::Full, &[[0; 32]; 2], &[1], &ChainInfo::default(), &mut status)
        .unwrap_err();
    assert_eq!(error.message, "2 keys, 1 pages, 1 statuses");
    shut(&instance, SECOND);
}
