//! Offloads: what they store, when, and what they leave alone.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::super::bench::Bench;
use super::super::data::keys;
use super::super::store::succeeds;
use super::super::{Check, ensure, fail};
use super::OFFLOAD;
use super::face::{NOW, eventually, flag, handles};
use super::scene::{At, PAGES, QUIET, Scene, part, seed};
use crate::mock::{Options, Query};
use crate::{ErrorKind, PageStatus};

const KV: [At; 3] = [(1, 0), (2, 1), (3, 2)];
const SIDE: [At; 2] = [(2, 0), (3, 1)];

pub(super) fn offload(bench: &Bench) -> Check {
    let scene = Scene::new(bench)?;
    let face = scene.face()?;
    scene.fill(&scene.kv, &KV);
    scene.fill(&scene.side, &SIDE);
    let parts = [part(&scene.side, &SIDE), part(&scene.kv, &KV)];
    let queued = succeeds("offload", face.offload(7, None, &parts, &[NOW])?)?;
    let popped = scene.pop()?;
    ensure(popped == Some((7, None)), "operation 7 completes without an error", || format!("{popped:?}"))?;
    queued.check_settled(OFFLOAD, "pop_completed_offload")?;
    let statuses = queued.statuses();
    ensure(statuses.iter().flatten().all(|status| *status == PageStatus::Ok), "each page is ok", || {
        format!("{statuses:?}")
    })?;
    scene.come_back(1, &scene.kv, &[(1, 20), (2, 21), (3, 22)])?;
    scene.come_back(2, &scene.side, &[(2, 20), (3, 21)])?;
    // Of pages that are stored already it is a success, too, and the stored bytes stay.
    scene.put(&scene.kv, &[(2, 5), (4, 6)])?;
    scene.come_back(3, &scene.kv, &[(2, 20), (4, 21)])?;
    scene.store.close()
}

pub(super) fn ready(bench: &Bench) -> Check {
    let scene = Scene::new(bench)?;
    // Not the bytes that they are to be stored with: those come before the flags.
    scene.blank(&scene.kv, &KV);
    let flags = [flag(), flag()];
    let offloaded = scene.face()?.offload(7, None, &[part(&scene.kv, &KV)], &handles(&flags))?;
    let queued = succeeds("offload with flags of the host", offloaded)?;
    for flag in flags {
        std::thread::sleep(QUIET);
        let completed = scene.face()?.completed()?;
        ensure(completed == 0, "it does not complete before both flags are 1", || "it completed".to_owned())?;
        scene.fill(&scene.kv, &KV);
        flag.store(1, Ordering::Release);
    }
    let popped = scene.pop()?;
    ensure(popped == Some((7, None)), "operation 7 completes without an error", || format!("{popped:?}"))?;
    queued.check_settled(OFFLOAD, "pop_completed_offload")?;
    let loaded: [At; 3] = [(1, 20), (2, 21), (3, 22)];
    let statuses = scene.statuses_of(1, &scene.kv, &loaded)?;
    for ((number, at), status) in loaded.iter().zip(statuses) {
        let right = status == PageStatus::Ok && scene.kv.holds(*at, seed(&scene.kv, *number));
        ensure(right, "the bytes that lay in the pages when the flags became 1 are stored", || {
            format!("page {number}: status {status}, other bytes")
        })?;
    }
    scene.store.close()
}

pub(super) fn atomic(bench: &Bench) -> Check {
    let scene = Scene::new(bench)?;
    let face = scene.face()?;
    let queries = [Query::of(&scene.kv), Query::of(&scene.side)];
    for round in 0..4u64 {
        let pages: Vec<At> = (0..PAGES).map(|at| (round * 1000 + u64::from(at), at)).collect();
        scene.fill(&scene.kv, &pages);
        scene.fill(&scene.side, &pages);
        let chain = keys(pages.iter().map(|page| page.0));
        let parts = [part(&scene.side, &pages), part(&scene.kv, &pages)];
        succeeds("offload", face.offload(round, None, &parts, &[NOW])?)?;
        // Once one of its pages is visible, all are: the next look must find them.
        let mut early = None;
        let mut answer = Ok(());
        eventually(scene.store.watch.limits.call, || {
            let mut look = || -> Check<bool> {
                let found = succeeds("lookup", face.lookup(&Options::default(), &chain, &queries)?)?;
                let visible = found.present.iter().flatten().filter(|status| **status == PageStatus::Ok).count();
                if let Some(before) = early
                    && visible < chain.len() * 2
                {
                    let seen = format!("{before} of {} at first, {visible} at a later look", chain.len() * 2);
                    return fail("all pages of an offload are visible once one is", seen);
                }
                if visible > 0 {
                    early.get_or_insert(visible);
                }
                Ok(visible == chain.len() * 2 || face.completed()? > 0)
            };
            answer = look().map(|_| ());
            answer.is_err() || early.is_some_and(|before| before == chain.len() * 2)
        });
        answer?;
        let popped = scene.pop()?;
        ensure(popped == Some((round, None)), "the offload completes without an error", || format!("{popped:?}"))?;
    }
    scene.store.close()
}

pub(super) fn deadline(bench: &Bench) -> Check {
    let scene = Scene::new(bench)?;
    let face = scene.face()?;
    scene.fill(&scene.kv, &KV);
    scene.fill(&scene.side, &SIDE);
    let parts = [part(&scene.side, &SIDE), part(&scene.kv, &KV)];
    let late = flag();
    let offloaded = face.offload(7, Some(Duration::from_millis(40)), &parts, &handles(&[late]))?;
    let queued = succeeds("offload with a flag of the host", offloaded)?;
    match scene.pop()? {
        Some((7, Some(ErrorKind::TimedOut))) => {}
        other => return fail("an offload whose deadline passes completes with timed out", format!("{other:?}")),
    }
    queued.check_settled(OFFLOAD, "pop_completed_offload")?;
    late.store(1, Ordering::Release);
    std::thread::sleep(QUIET);
    scene.none_stored(1, &scene.kv, &[(1, 20), (2, 21), (3, 22)], "an offload that was late")?;
    scene.none_stored(2, &scene.side, &[(2, 20), (3, 21)], "an offload that was late")?;
    scene.store.close()
}

pub(super) fn order(bench: &Bench) -> Check {
    let scene = Scene::new(bench)?;
    let face = scene.face()?;
    let pages: [At; 4] = [(1, 0), (2, 1), (3, 2), (4, 3)];
    scene.fill(&scene.kv, &pages);
    let late = flag();
    for (operation, page) in (10..).zip(&pages) {
        let ready = if operation == 10 { handles(&[late]) } else { vec![NOW] };
        let offloaded = face.offload(operation, None, &[part(&scene.kv, &[*page])], &ready)?;
        succeeds("offload", offloaded)?;
    }
    std::thread::sleep(QUIET);
    let early = (face.completed()?, scene.pop_now()?);
    ensure(early == (0, None), "nothing is completed before the operation that was queued first", || {
        format!("{} completed, popped {:?}", early.0, early.1)
    })?;
    late.store(1, Ordering::Release);
    let all = eventually(scene.store.watch.limits.call, || matches!(face.completed(), Ok(4) | Err(_)));
    let count = face.completed()?;
    ensure(all && count == 4, "4 completed offloads wait to be popped", || format!("{count}"))?;
    for (left, expected) in (10..14u64).enumerate() {
        let popped = scene.pop_now()?;
        ensure(popped == Some((expected, None)), format!("operation {expected} is next"), || format!("{popped:?}"))?;
        let count = face.completed()?;
        ensure(count == 3 - left as u64, format!("{} are left", 3 - left), || format!("{count}"))?;
    }
    scene.store.close()
}
