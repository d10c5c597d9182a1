//! Instances of several ranks, used as one.

use super::super::ranks::{RankStates, Ranks, roll_back};
use super::*;

/// Longer than anything takes that is not to wait.
const LONG: Duration = Duration::from_secs(60);

/// A group of an instance for each name, and the cell that shows what they are together.
fn group(names: &[&str]) -> (Ranks, Vec<Arc<Knobs>>, Arc<StateCell>) {
    let shown = Arc::new(StateCell::new(names[0], Box::new(|_| {})));
    let states = RankStates::new(names[0], names.len(), shown.clone());
    let opened = names.iter().enumerate().map(|(rank, name)| {
        let settings = BackendSettings { timeout: LONG, ..BackendSettings::default() };
        attach_in(name, 2, settings, states.rank(rank).unwrap().clone())
    });
    let (instances, knobs): (Vec<_>, Vec<_>) = opened.unzip();
    let ranks = Ranks::new(instances[0].clone(), instances[1..].to_vec(), (states, shown.clone()), names.len());
    (ranks, knobs, shown)
}

fn read(ranks: &Ranks, timeout: Duration) -> (Result<(), BackendError>, Vec<PageStatus>) {
    let mut status = vec![PageStatus::Unset; 2];
    let (options, chain) = (CallOptions::within(timeout), ChainInfo::default());
    let result = ranks.batch_get(&options, PoolGroup::Full, &[[1; 32], [2; 32]], &[1, 2], &chain, &mut status);
    (result, status)
}

fn end(ranks: &Ranks, within: Duration) -> bool {
    ranks.shut(Instant::now() + within, Instant::now() + within * 2, "test")
}

fn closed(knobs: &[Arc<Knobs>]) -> Vec<usize> {
    knobs.iter().map(|knobs| knobs.closed.load(Ordering::SeqCst)).collect()
}

#[test]
fn l17_one_rank_is_called_as_it_is() {
    let (instance, knobs, _) = attach("one rank", 1);
    let alone = Ranks::alone(instance.clone());
    set_mood(&knobs, Mood::Err);
    let (result, _) = read(&alone, LONG);
    assert_eq!(result, get(&instance, LONG, &[1, 2]).0, "nothing is added to what it says");
    assert!(alone.rank_status().is_empty());
    assert!(Arc::ptr_eq(alone.state(), instance.state()));
    assert!(end(&alone, LONG));
}

#[test]
fn ranks_serve_as_one_and_are_closed_as_one() {
    let (ranks, knobs, shown) = group(&["as one 0", "as one 1"]);
    assert_eq!(shown.state(), BackendState::Active);
    assert_eq!(read(&ranks, LONG), (Ok(()), vec![PageStatus::Ok, PageStatus::Missing]));
    set_mood(&knobs[1], Mood::Err);
    let (result, status) = read(&ranks, LONG);
    assert!(result.unwrap_err().message.starts_with("rank 1: the shelf is full"));
    assert_eq!(status, [PageStatus::Failed; 2]);
    let of = |rank: usize| (ranks.rank_status()[rank].failed_calls, ranks.rank_status()[rank].lost_pages);
    assert_eq!((of(0), of(1)), ((0, 0), (1, 1)), "the second page was missing on both");
    assert!(end(&ranks, LONG));
    assert_eq!((closed(&knobs), shown.state()), (vec![1, 1], BackendState::Detached));
    let (result, _) = read(&ranks, LONG);
    assert_eq!(result.unwrap_err().kind, ErrorKind::Unavailable);
    assert!(knobs.iter().all(|knobs| knobs.after_close.load(Ordering::SeqCst) == 0));
}

#[test]
fn a_panic_of_one_rank_fails_all_of_them() {
    let (ranks, knobs, shown) = group(&["panic 0", "panic 1"]);
    set_mood(&knobs[1], Mood::Panic);
    assert!(read(&ranks, LONG).0.is_err());
    let report = shown.report();
    assert_eq!(report.state, BackendState::Failed);
    assert!(report.reason.starts_with("rank 1: ") && report.reason.contains("moody on purpose"), "{}", report.reason);
    set_mood(&knobs[0], Mood::Hang);
    let (result, _) = read(&ranks, LONG);
    assert_eq!(result.unwrap_err().kind, ErrorKind::Unavailable, "the first rank is not called either");
    assert_eq!(knobs[0].running.load(Ordering::SeqCst), 0);
    assert!(end(&ranks, LONG));
    assert_eq!((closed(&knobs), shown.state()), (vec![1, 1], BackendState::Failed), "the status shows why");
}

#[test]
fn a_call_that_hangs_on_one_rank_keeps_that_rank_and_no_other() {
    let (ranks, knobs, shown) = group(&["hang 0", "hang 1"]);
    set_mood(&knobs[1], Mood::Hang);
    let (result, _) = read(&ranks, SHORT);
    assert!(result.unwrap_err().pages_in_use);
    assert_eq!((ranks.quarantined(), ranks.reclaim(PoolGroup::Full)), (2, vec![]));
    assert!(!end(&ranks, SHORT), "the call has not returned");
    while closed(&knobs) != [1, 0] {
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(shown.state(), BackendState::Zombie);
    knobs[1].release.store(true, Ordering::SeqCst);
    let mut back = Vec::new();
    while back.is_empty() {
        back = ranks.reclaim(PoolGroup::Full);
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(back, [1, 2]);
    assert!(end(&ranks, LONG), "it is closed late");
    assert_eq!((closed(&knobs), shown.state()), (vec![1, 1], BackendState::Detached));
}

#[test]
fn a_roll_back_closes_every_rank_that_was_opened() {
    let (ranks, knobs, _) = group(&["roll back 0", "roll back 1"]);
    roll_back(ranks.instances(), Instant::now() + LONG, "rank 2 of 3: no");
    assert_eq!(closed(&knobs), [1, 1]);
}
