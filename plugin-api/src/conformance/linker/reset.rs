//! What a reset ends, and what works after it.

use std::sync::atomic::Ordering;

use super::super::bench::Bench;
use super::super::store::succeeds;
use super::super::{Check, ensure};
use super::face::{NOW, eventually, flag, handles};
use super::scene::{At, LAYERS_OF_POOLS, QUIET, Scene, part};
use crate::mock::Options;

const RUNNING: [At; 2] = [(1, 20), (2, 21)];
const QUEUED: [At; 2] = [(1, 30), (2, 31)];
const OFFLOADED: [At; 2] = [(5, 2), (6, 3)];

pub(super) fn ends(bench: &Bench) -> Check {
    let scene = Scene::new(bench)?;
    let face = scene.face()?;
    scene.put(&scene.kv, &[(1, 0), (2, 1)])?;
    scene.queue(1, &[(&scene.kv, &RUNNING)])?;
    let late = flag();
    let started = face.start(&Options::default(), 9, LAYERS_OF_POOLS, &handles(&[late]))?;
    succeeds("start_layer_wise_loading with a flag of the host", started)?;
    scene.queue(2, &[(&scene.kv, &QUEUED)])?;
    scene.fill(&scene.kv, &OFFLOADED);
    succeeds("offload", face.offload(7, None, &[part(&scene.kv, &OFFLOADED)], &handles(&[late]))?)?;
    scene.waits_for_its_flag(&scene.kv, &RUNNING)?;
    succeeds("reset", face.reset(&Options::default())?)?;
    late.store(1, Ordering::Release);
    std::thread::sleep(QUIET);
    for (what, pages) in [("running", RUNNING), ("queued", QUEUED)] {
        ensure(scene.are_blank(&scene.kv, &pages), format!("the pages of a {what} load are left alone"), || {
            "a page was written after the reset".to_owned()
        })?;
    }
    // Nothing that was queued comes with a later batch.
    scene.empty_batch(10)?;
    ensure(scene.are_blank(&scene.kv, &QUEUED), "a queued load is forgotten", || "a page was written".to_owned())?;
    let offloaded = OFFLOADED.map(|(number, at)| (number, at + 30));
    scene.none_stored(3, &scene.kv, &offloaded, "an offload that waited when the reset came")?;
    scene.store.close()
}

pub(super) fn usable(bench: &Bench) -> Check {
    let scene = Scene::new(bench)?;
    let face = scene.face()?;
    succeeds("a reset with nothing to end", face.reset(&Options::default())?)?;
    scene.fill(&scene.kv, &OFFLOADED);
    succeeds("offload", face.offload(7, None, &[part(&scene.kv, &OFFLOADED)], &[NOW])?)?;
    let done = eventually(scene.store.watch.limits.call, || matches!(face.completed(), Ok(1) | Err(_)));
    ensure(done, "the offload completes", || "it did not".to_owned())?;
    succeeds("reset", face.reset(&Options::default())?)?;
    let left = (face.completed()?, scene.pop_now()?);
    ensure(left == (0, None), "completed offloads are forgotten", || format!("{left:?}"))?;
    scene.queue(1, &[(&scene.kv, &QUEUED)])?;
    succeeds("reset", face.reset(&Options::default())?)?;
    // The request may be queued again, and the batch number used.
    scene.put(&scene.kv, &[(1, 0), (2, 1)])?;
    scene.come_back(1, &scene.kv, &QUEUED)?;
    succeeds("reset", face.reset(&Options::default())?)?;
    scene.come_back(1, &scene.kv, &QUEUED)?;
    scene.store.close()
}
