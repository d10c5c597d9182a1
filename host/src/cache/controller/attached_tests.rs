use std::sync::atomic::AtomicUsize;

use super::*;
use crate::cache::controller::paged::{PagedCall, fault_result};
use crate::cache::stats::StorageResult;
use crate::plugin::backend::{BackendStats, ChainInfo, Held, PageKey, PageStatus, PoolGroup, Restorable};

type Answer = Box<dyn FnMut(&CallOptions, &[PageKey], &mut [PageStatus]) -> Result<(), BackendError> + Send>;

/// A backend that answers as it is told to.
struct Scripted {
    answer: Mutex<Answer>,
    settings: BackendSettings,
    calls: AtomicUsize,
}

impl Scripted {
    fn answer(&self, options: &CallOptions, keys: &[PageKey], status: &mut [PageStatus]) -> Result<(), BackendError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        (self.answer.lock())(options, keys, status)
    }
}

impl StorageBackend for Scripted {
    fn name(&self) -> &str {
        "scripted"
    }
    fn generation(&self) -> u64 {
        1
    }
    fn limits(&self) -> BackendLimits {
        let concurrency = self.settings.concurrency.unwrap_or(8);
        BackendLimits { preferred_batch: 8, concurrency, remove: false, durable: false }
    }
    fn settings(&self) -> &BackendSettings {
        &self.settings
    }
    fn batch_exists(
        &self,
        options: &CallOptions,
        keys: &[PageKey],
        _: &Held,
        _: &ChainInfo<'_>,
    ) -> Result<Restorable, BackendError> {
        self.answer(options, keys, &mut []).map(|()| Restorable::none(keys.len()))
    }
    fn batch_get(
        &self,
        options: &CallOptions,
        _: PoolGroup,
        keys: &[PageKey],
        pages: &[u32],
        chain: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        assert_eq!((keys.len(), chain.position as usize), (pages.len(), chain.prefix_keys.len()));
        self.answer(options, keys, status)
    }
    fn batch_set(
        &self,
        options: &CallOptions,
        _: PoolGroup,
        keys: &[PageKey],
        _: &[u32],
        _: &ChainInfo<'_>,
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.answer(options, keys, status)
    }
    fn batch_remove(
        &self,
        options: &CallOptions,
        _: PoolGroup,
        keys: &[PageKey],
        status: &mut [PageStatus],
    ) -> Result<(), BackendError> {
        self.answer(options, keys, status)
    }
    fn flush(&self, options: &CallOptions) -> Result<(), BackendError> {
        self.answer(options, &[], &mut [])
    }
    fn clear(&self, options: &CallOptions) -> Result<(), BackendError> {
        self.answer(options, &[], &mut [])
    }
    fn stats(&self) -> Result<BackendStats, BackendError> {
        Ok(BackendStats::default())
    }
    fn reclaim(&self, _: PoolGroup) -> Vec<u32> {
        Vec::new()
    }
    fn quarantined(&self) -> usize {
        0
    }
}

fn error(kind: ErrorKind, retryable: bool, pages_in_use: bool) -> BackendError {
    BackendError { backend: "scripted".to_owned(), kind, retryable, message: "on order".to_owned(), pages_in_use }
}

fn scripted(
    settings: BackendSettings,
    answer: impl FnMut(&CallOptions, &[PageKey], &mut [PageStatus]) -> Result<(), BackendError> + Send + 'static,
) -> (Arc<Scripted>, Attached) {
    let backend = Arc::new(Scripted { answer: Mutex::new(Box::new(answer)), settings, calls: AtomicUsize::new(0) });
    (Arc::clone(&backend), Attached::new(backend, Arc::new(CacheCounters::default())))
}

fn failing(kind: ErrorKind) -> (Arc<Scripted>, Attached) {
    scripted(BackendSettings { retries: 0, ..BackendSettings::default() }, move |_, _, _| {
        Err(error(kind, false, false))
    })
}

fn flush(attached: &Attached, operation: &CancelSet) -> Result<(), CallFault> {
    let info = CallInfo { op: StorageOp::Flush, pages: 0, bytes: 0, operation, within: None };
    attached.call(&info, |backend, options| backend.flush(options))
}

fn key(number: u8) -> PageKey {
    [number; 32]
}

/// Reads pages 1, 2, ... after a page 0.
fn get(attached: &Attached, pages: usize, page_bytes: u64) -> (super::super::paged::PagedOutcome, Vec<PageStatus>) {
    let chain: Vec<PageKey> = (0..=pages as u8).map(key).collect();
    let numbers: Vec<u32> = (1..=pages as u32).collect();
    let mut status = vec![PageStatus::Unset; pages];
    let operation = CancelSet::default();
    let call = PagedCall {
        op: StorageOp::Get,
        linked: false,
        group: PoolGroup::Full,
        chain: &chain,
        pages: &numbers,
        page_bytes,
        session: "",
        operation: &operation,
        within: None,
    };
    let outcome = attached.paged(&call, &mut status, |_| true);
    (outcome, status)
}

#[test]
fn a_call_that_nobody_called_off_was_late() {
    let (_, attached) = failing(ErrorKind::Cancelled);
    let operation = CancelSet::default();
    assert_eq!(fault_result(&flush(&attached, &operation).unwrap_err()), StorageResult::Late);
    operation.cancel();
    let fault = flush(&attached, &operation).unwrap_err();
    assert_eq!(fault_result(&fault), StorageResult::Failed, "called off by the host");
    assert_eq!(attached.report(None).writes.failed, 1, "what was asked to stop did not fail");
}

/// It heeds the flag, so no call of it ever was late; each request waited its whole time for nothing.
#[test]
fn a_backend_that_is_called_off_before_each_call_is_late_was_never_left_alone() {
    let heeds = |options: &CallOptions, _: &[PageKey], _: &mut [PageStatus]| {
        while !options.is_cancelled() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(error(ErrorKind::Cancelled, true, false))
    };
    let (_, attached) = scripted(BackendSettings::default(), heeds);
    let call_off_after = |time: Duration, end: fn(&CancelSet)| {
        let operation = CancelSet::default();
        std::thread::scope(|scope| {
            let call = scope.spawn(|| flush(&attached, &operation));
            std::thread::sleep(time);
            end(&operation);
            fault_result(&call.join().unwrap().unwrap_err())
        })
    };
    let fair = FAIR_TIME + Duration::from_millis(100);
    assert_eq!(call_off_after(fair, CancelSet::cancel), StorageResult::Failed, "nobody wants it any more");
    assert_eq!(attached.report(None).writes.failures, 0);
    for failures in 1..=3 {
        assert_eq!(call_off_after(fair, CancelSet::expire), StorageResult::Late);
        assert_eq!(attached.report(None).writes.failures, failures);
    }
    assert_eq!(attached.report(None).writes.breaker, BreakerState::Open);
}

#[test]
fn a_limit_of_less_than_a_batch_let_nothing_through() {
    let settings = BackendSettings { read_bandwidth: Some(30), write_bandwidth: Some(1), ..BackendSettings::default() };
    let (_, attached) = scripted(settings, |_, _, _| Ok(()));
    assert_eq!((attached.batch(Way::Read, 10), attached.batch(Way::Write, 10)), (3, 1));
    let (_, free) = scripted(BackendSettings::default(), |_, _, _| Ok(()));
    assert_eq!(free.batch(Way::Read, 10), 8, "what suits the backend");
}

#[test]
fn detached_backends_are_not_called_any_more() {
    let (backend, attached) = scripted(BackendSettings::default(), |_, _, _| Ok(()));
    attached.retire();
    assert!(matches!(flush(&attached, &CancelSet::default()), Err(CallFault::Skipped)));
    assert_eq!(backend.calls.load(Ordering::Relaxed), 0);
}

#[test]
fn reads_go_on_while_writes_rest() {
    let (_, attached) = failing(ErrorKind::NoSpace);
    for _ in 0..3 {
        assert!(matches!(flush(&attached, &CancelSet::default()), Err(CallFault::Failed(_))));
    }
    assert!(matches!(flush(&attached, &CancelSet::default()), Err(CallFault::Skipped)));
    assert!(matches!(get(&attached, 1, 1).0.result, Err(CallFault::Failed(_))), "reads are called");
    let report = attached.report(None);
    assert_eq!((report.writes.breaker, report.writes.skipped), (BreakerState::Open, 1));
    assert!(report.writes.resting.unwrap().contains("on order") && report.writes.since.is_some());
    assert_eq!((report.reads.breaker, report.reads.failures), (BreakerState::Closed, 1));
    assert_eq!(attached.figures.breakers(), [BreakerState::Closed, BreakerState::Open]);
}

/// A follower's leader stores all pages; each offload of the follower counted as a failure, and the backend was shown as degraded.
#[test]
fn a_backend_that_stores_nothing_here_was_taken_for_a_broken_one() {
    let (backend, attached) = failing(ErrorKind::Unsupported);
    for _ in 0..5 {
        assert!(matches!(flush(&attached, &CancelSet::default()), Err(CallFault::Failed(_))));
    }
    assert_eq!(backend.calls.load(Ordering::Relaxed), 5);
    let writes = attached.report(None).writes;
    assert_eq!((writes.breaker, writes.failures, writes.failed), (BreakerState::Closed, 0, 0));
    // One that can't read what it has is of no use.
    for _ in 0..3 {
        assert!(matches!(get(&attached, 1, 1).0.result, Err(CallFault::Failed(_))));
    }
    assert_eq!(attached.report(None).reads.breaker, BreakerState::Open);
}

#[test]
fn i39701_a_call_that_says_so_is_made_again_for_the_pages_that_failed_alone() {
    let mut seen: Vec<Vec<PageKey>> = Vec::new();
    let (sender, asked) = std::sync::mpsc::channel();
    let (_, attached) = scripted(BackendSettings::default(), move |_, keys, status| {
        seen.push(keys.to_vec());
        sender.send(keys.to_vec()).unwrap();
        status.fill(PageStatus::Ok);
        if seen.len() == 1 {
            status[1] = PageStatus::Failed;
            status[3] = PageStatus::Missing;
            status[4] = PageStatus::Unset;
            return Err(error(ErrorKind::Unavailable, true, false));
        }
        Ok(())
    });
    let (outcome, status) = get(&attached, 5, 10);
    assert!(outcome.result.is_ok() && outcome.answered, "{outcome:?}");
    let mut expected = [PageStatus::Ok; 5];
    expected[3] = PageStatus::Missing;
    assert_eq!(status, expected);
    let asked: Vec<Vec<PageKey>> = asked.try_iter().collect();
    assert_eq!(asked[1..], [vec![key(2)], vec![key(5)]], "runs without gaps");
    let figures = attached.figures.calls(StorageOp::Get);
    assert_eq!((figures.ok, figures.failed, figures.retries, figures.bytes), (1, 0, 1, 40));
    assert_eq!(attached.report(None).reads.retried, 1);
}

#[test]
fn retries_are_bounded_and_only_for_errors_that_say_they_help() {
    let settings = BackendSettings { retries: 3, ..BackendSettings::default() };
    let (backend, attached) = scripted(settings.clone(), |_, _, _| Err(error(ErrorKind::Unavailable, true, false)));
    assert!(get(&attached, 2, 1).0.result.is_err());
    assert_eq!(backend.calls.load(Ordering::Relaxed), 4);
    assert_eq!(attached.report(None).reads.failures, 1, "with its retries it is one call");
    let (backend, attached) = scripted(settings, |_, _, _| Err(error(ErrorKind::Internal, false, false)));
    assert!(get(&attached, 2, 1).0.result.is_err());
    assert_eq!(backend.calls.load(Ordering::Relaxed), 1);
}

#[test]
fn retries_end_with_the_calls_time_and_when_it_is_called_off() {
    let settings =
        BackendSettings { retries: u32::MAX, timeout: Duration::from_millis(150), ..BackendSettings::default() };
    let (backend, attached) = scripted(settings, |_, _, _| Err(error(ErrorKind::Unavailable, true, false)));
    let began = Instant::now();
    assert!(get(&attached, 2, 1).0.result.is_err());
    assert!(backend.calls.load(Ordering::Relaxed) > 1);
    assert!(began.elapsed() < Duration::from_secs(20));
    let settings =
        BackendSettings { retries: u32::MAX, timeout: Duration::from_secs(600), ..BackendSettings::default() };
    let (_, attached) = scripted(settings, |_, _, _| Err(error(ErrorKind::Unavailable, true, false)));
    let operation = CancelSet::default();
    std::thread::scope(|scope| {
        let call = scope.spawn(|| flush(&attached, &operation));
        operation.cancel();
        assert!(call.join().unwrap().is_err());
    });
}

#[test]
fn i31296_pages_of_a_late_call_are_not_given_to_a_retry() {
    let (backend, attached) = scripted(BackendSettings::default(), |_, keys, status| {
        status.fill(PageStatus::Ok);
        if keys.len() == 4 {
            status[1..3].fill(PageStatus::Failed);
            return Err(error(ErrorKind::Unavailable, true, false));
        }
        Err(error(ErrorKind::TimedOut, true, true))
    });
    let (outcome, status) = get(&attached, 4, 1);
    assert_eq!((outcome.in_use.clone(), backend.calls.load(Ordering::Relaxed)), (1..3, 2), "no third call");
    let verdicts: Vec<StorageResult> = (0..4).map(|page| outcome.verdict(page, status[page])).collect();
    assert_eq!(verdicts, [StorageResult::Ok, StorageResult::Late, StorageResult::Late, StorageResult::Ok]);
}

#[test]
fn i16614_answers_that_bring_no_page_right_open_the_breaker_too() {
    for status in [PageStatus::Failed, PageStatus::Corrupt, PageStatus::Unset] {
        let (_, attached) = scripted(BackendSettings::default(), move |_, _, statuses| {
            statuses.fill(status);
            Ok(())
        });
        for _ in 0..3 {
            get(&attached, 3, 1);
        }
        assert!(attached.is_resting(), "{status:?}");
    }
    let (_, attached) = scripted(BackendSettings::default(), |_, _, statuses| {
        statuses.fill(PageStatus::Missing);
        Ok(())
    });
    for _ in 0..9 {
        get(&attached, 3, 1);
    }
    assert!(!attached.is_resting(), "a page that is not there is an answer");
}

#[test]
fn no_more_calls_at_a_time_than_the_backend_wants_and_waiting_is_counted() {
    let running = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let settings = BackendSettings { concurrency: Some(2), ..BackendSettings::default() };
    let attached = {
        // The script is behind a lock; so the count is taken around the call.
        let (_, attached) = scripted(settings, |_, _, _| Ok(()));
        attached
    };
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let operation = CancelSet::default();
                let info = CallInfo { op: StorageOp::Flush, pages: 0, bytes: 0, operation: &operation, within: None };
                attached
                    .call(&info, |_, _| {
                        most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(5));
                        running.fetch_sub(1, Ordering::SeqCst);
                        Ok(())
                    })
                    .unwrap();
            });
        }
    });
    assert!(most.load(Ordering::SeqCst) <= 2);
    let figures = attached.figures.calls(StorageOp::Flush);
    assert!(figures.queued > 0 && figures.queued_nanos > 0 && figures.ok == 8, "{figures:?}");
}

#[test]
fn a_call_that_waits_for_its_turn_keeps_its_own_time_and_does_not_wait_for_ever() {
    let settings =
        BackendSettings { concurrency: Some(1), timeout: Duration::from_millis(200), ..BackendSettings::default() };
    let (_, attached) = scripted(settings, |_, _, _| Ok(()));
    let operation = CancelSet::default();
    let info = CallInfo { op: StorageOp::Flush, pages: 0, bytes: 0, operation: &operation, within: None };
    let (entered, inside) = std::sync::mpsc::channel();
    let (leave, left) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let attached = &attached;
        scope.spawn(move || {
            attached.call(&info, |_, _| {
                entered.send(()).unwrap();
                left.recv().unwrap();
                Ok(())
            })
        });
        inside.recv().unwrap();
        assert!(matches!(flush(attached, &CancelSet::default()), Err(CallFault::CrowdedOut)));
        let waiter = scope.spawn(|| {
            let operation = CancelSet::default();
            let info = CallInfo { op: StorageOp::Flush, pages: 0, bytes: 0, operation: &operation, within: None };
            attached.call(&info, |_, options| Ok(options.deadline.saturating_duration_since(Instant::now())))
        });
        while attached.report(None).writes.queued < 2 {
            std::thread::yield_now();
        }
        leave.send(()).unwrap();
        let left = waiter.join().unwrap().unwrap();
        assert!(left > Duration::from_millis(100), "the wait ate the call's time: {left:?}");
    });
    let report = attached.report(None).writes;
    assert_eq!((report.crowded_out, report.failures), (1, 0), "the backend is not to blame");
}

#[test]
fn i23309_a_read_that_the_bandwidth_limit_holds_up_too_long_is_given_up() {
    let settings = BackendSettings {
        read_bandwidth: Some(1000),
        timeout: Duration::from_millis(300),
        ..BackendSettings::default()
    };
    let (backend, attached) = scripted(settings, |_, _, status| {
        status.fill(PageStatus::Ok);
        Ok(())
    });
    assert!(get(&attached, 1, 100_000).0.result.is_ok(), "an idle limit lets it pass");
    let (outcome, _) = get(&attached, 1, 100_000);
    assert!(matches!(outcome.result, Err(CallFault::CrowdedOut)));
    assert_eq!(outcome.verdict(0, PageStatus::Unset), StorageResult::Late);
    assert_eq!(backend.calls.load(Ordering::Relaxed), 1);
    let report = attached.report(None).reads;
    assert_eq!((report.crowded_out, report.failures), (1, 0));
}

#[test]
fn what_a_read_did_not_move_does_not_count_for_the_limit() {
    let settings = BackendSettings { read_bandwidth: Some(1000), ..BackendSettings::default() };
    let (_, attached) = scripted(settings, |_, _, status| {
        status.fill(PageStatus::Missing);
        Ok(())
    });
    for _ in 0..20 {
        assert!(get(&attached, 2, 50_000).0.result.is_ok());
    }
    assert_eq!(attached.figures.calls(StorageOp::Get).bytes, 0);
}

#[test]
fn a_wait_for_bandwidth_ends_when_the_operation_is_called_off() {
    let settings =
        BackendSettings { write_bandwidth: Some(10), timeout: Duration::from_secs(600), ..BackendSettings::default() };
    let (_, attached) = scripted(settings, |_, _, _| Ok(()));
    let operation = CancelSet::default();
    let info = CallInfo { op: StorageOp::Set, pages: 1, bytes: 3000, operation: &operation, within: None };
    attached.call(&info, |_, _| Ok(())).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| attached.call(&info, |_, _| Ok(())));
        operation.cancel();
        assert!(matches!(waiter.join().unwrap(), Err(CallFault::CalledOff)));
    });
}

#[test]
fn flags_of_ended_calls_are_used_again_and_those_of_late_ones_are_not() {
    let flags = Arc::new(Mutex::new(Vec::new()));
    let late = Arc::new(AtomicBool::new(false));
    let (noted, is_late) = (Arc::clone(&flags), Arc::clone(&late));
    let settings = BackendSettings { retries: 0, ..BackendSettings::default() };
    let (_, attached) = scripted(settings, move |options, _, _| {
        noted.lock().push(Arc::as_ptr(&options.cancel) as usize);
        // The flag stays in the hands of the call that has not returned.
        if is_late.load(Ordering::Relaxed) {
            std::mem::forget(Arc::clone(&options.cancel));
            return Err(error(ErrorKind::TimedOut, true, true));
        }
        Ok(())
    });
    let operation = CancelSet::default();
    flush(&attached, &operation).unwrap();
    flush(&attached, &operation).unwrap();
    late.store(true, Ordering::Relaxed);
    flush(&attached, &operation).unwrap_err();
    late.store(false, Ordering::Relaxed);
    flush(&attached, &operation).unwrap();
    let flags = flags.lock();
    assert!(flags[0] == flags[1] && flags[1] == flags[2] && flags[3] != flags[2], "{flags:?}");
}

#[test]
fn an_unknown_write_policy_is_no_end() {
    let settings = BackendSettings { write_policy: Some("write_sideways".to_owned()), ..BackendSettings::default() };
    let (_, attached) = scripted(settings, |_, _, _| Ok(()));
    assert_eq!(attached.write_policy(WritePolicy::WriteBack), WritePolicy::WriteBack);
    let settings = BackendSettings { write_policy: Some("write_through".to_owned()), ..BackendSettings::default() };
    let (_, attached) = scripted(settings, |_, _, _| Ok(()));
    assert_eq!(attached.write_policy(WritePolicy::WriteBack), WritePolicy::WriteThrough);
}

#[test]
fn a_backend_that_was_given_next_to_no_time_is_not_blamed_for_being_late() {
    for (within, rests) in [(Some(Duration::from_millis(20)), false), (Some(FAIR_TIME), true), (None, true)] {
        let (_, attached) = failing(ErrorKind::TimedOut);
        for _ in 0..4 {
            let operation = CancelSet::default();
            let info = CallInfo { op: StorageOp::Exists, pages: 0, bytes: 0, operation: &operation, within };
            let call = attached.call(&info, |backend, options| {
                backend.batch_exists(options, &[], &Held::default(), &ChainInfo::default())
            });
            assert!(call.is_err());
        }
        assert_eq!(attached.is_resting(), rests, "{within:?}");
    }
}
