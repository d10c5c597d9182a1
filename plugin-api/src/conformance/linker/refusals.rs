//! Calls that are illegal, or can't be served: refused, and without an effect.

use std::time::{Duration, Instant};

use super::super::bench::Bench;
use super::super::store::succeeds;
use super::super::{Check, ensure, fail};
use super::face::{NOW, flag, handles};
use super::scene::{At, LAYERS_OF_POOLS, QUIET, Scene, part};
use crate::ErrorKind;
use crate::mock::{MockPool, Options, Part, PoolSpec};
use crate::v0_1::ReadyHandle;

const UNKNOWN: ReadyHandle = ReadyHandle { kind: 0x7fff_0001, reserved: 0, handle: 0 };
const KV: [At; 2] = [(1, 20), (2, 21)];

/// The pages `KV` are stored, from other places.
fn stored(bench: &Bench) -> Check<Scene> {
    let scene = Scene::new(bench)?;
    scene.put(&scene.kv, &[(1, 0), (2, 1)])?;
    Ok(scene)
}

fn unregistered(scene: &Scene) -> Part {
    let stranger = MockPool::new(PoolSpec::bytes(9, "stranger", 4, &[64]));
    Part { pool: stranger.id(), ..part(&scene.kv, &[(5, 0)]) }
}

fn refused(what: &str, kinds: &[ErrorKind], answer: crate::Result<()>) -> Check {
    let names: Vec<&str> = kinds.iter().map(|kind| kind.as_str()).collect();
    let expected = match names.as_slice() {
        [] => format!("{what} is refused"),
        names => format!("{what} is refused with {}", names.join(" or ")),
    };
    match answer {
        Ok(()) => fail(expected, "it was taken"),
        Err(error) if kinds.is_empty() || kinds.contains(&error.kind) => Ok(()),
        Err(error) => fail(expected, error.to_string()),
    }
}

pub(super) fn offload(bench: &Bench) -> Check {
    let scene = Scene::new(bench)?;
    let face = scene.face()?;
    scene.fill(&scene.kv, &KV);
    let unknown = face.offload(1, None, &[part(&scene.kv, &KV)], &[NOW, UNKNOWN])?.map(|_| ());
    refused("an offload with a ready handle of an unknown kind", &[ErrorKind::Unsupported], unknown)?;
    let parts = [unregistered(&scene), part(&scene.kv, &KV)];
    let nowhere = face.offload(2, None, &parts, &[NOW])?.map(|_| ());
    refused("an offload of a pool that is not registered", &[ErrorKind::NotFound], nowhere)?;
    std::thread::sleep(QUIET);
    let left = (face.completed()?, scene.pop_now()?);
    ensure(left == (0, None), "an offload that was refused never completes", || format!("{left:?}"))?;
    scene.none_stored(1, &scene.kv, &[(1, 30), (2, 31)], "an offload that was refused")?;
    scene.store.close()
}

pub(super) fn pop(bench: &Bench) -> Check {
    let scene = Scene::new(bench)?;
    let face = scene.face()?;
    let look = |when: &str| -> Check {
        let began = Instant::now();
        let popped = match face.pop()? {
            Ok(popped) => popped,
            Err(error) => return fail(format!("popping {when} answers not found"), error.to_string()),
        };
        ensure(popped.is_none(), format!("popping {when} answers not found"), || format!("{popped:?}"))?;
        let took = began.elapsed();
        ensure(took < scene.store.watch.limits.late, format!("popping {when} does not wait"), || format!("{took:?}"))?;
        let count = face.completed()?;
        ensure(count == 0, format!("no offload is completed {when}"), || format!("{count}"))
    };
    look("before any offload")?;
    scene.fill(&scene.kv, &KV);
    let never = flag();
    let offloaded = face.offload(1, Some(Duration::from_secs(60)), &[part(&scene.kv, &KV)], &handles(&[never]))?;
    succeeds("offload with a flag of the host", offloaded)?;
    look("while an offload waits for its flag")?;
    never.store(1, std::sync::atomic::Ordering::Release);
    scene.pop()?;
    look("after the last one was popped")?;
    scene.store.close()
}

pub(super) fn start(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    let face = scene.face()?;
    scene.queue(1, &[(&scene.kv, &KV)])?;
    let started = face.start(&Options::default(), 9, LAYERS_OF_POOLS, &[UNKNOWN])?.map(|_| ());
    refused("a start with a ready handle of an unknown kind", &[ErrorKind::Unsupported], started)?;
    // A later batch does not bring it either.
    scene.empty_batch(10)?;
    std::thread::sleep(QUIET);
    ensure(scene.are_blank(&scene.kv, &KV), "a load that was queued before a refused start is forgotten", || {
        "its pages were written".to_owned()
    })?;
    scene.come_back(1, &scene.kv, &KV)?;
    scene.store.close()
}

pub(super) fn double_load(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    let face = scene.face()?;
    let first = scene.queue(1, &[(&scene.kv, &KV)])?;
    let others: [At; 2] = [(2, 30), (1, 31)];
    scene.blank(&scene.kv, &others);
    let second = face.load(1, &[part(&scene.kv, &others)])?.map(|_| ());
    refused("a second load of a request that is queued", &[], second)?;
    let words = scene.start(9)?;
    scene.finish(9, words, &[first])?;
    scene.loaded(&first.statuses()[0], &scene.kv, &KV)?;
    ensure(scene.are_blank(&scene.kv, &others), "the pages of the refused load are left alone", || {
        "a page was written".to_owned()
    })?;
    // Once it has started, the request may be queued again.
    scene.come_back(1, &scene.kv, &KV)?;
    scene.store.close()
}

pub(super) fn load(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    let face = scene.face()?;
    scene.blank(&scene.kv, &KV);
    let nowhere = face.load(1, &[part(&scene.kv, &KV), unregistered(&scene)])?.map(|_| ());
    refused("a load of a pool that is not registered", &[ErrorKind::NotFound], nowhere)?;
    scene.empty_batch(9)?;
    ensure(scene.are_blank(&scene.kv, &KV), "no page of the refused load is written", || "one was".to_owned())?;
    scene.store.close()
}

pub(super) fn cancel(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    let face = scene.face()?;
    refused("cancelling a load that was never queued", &[ErrorKind::NotFound], face.cancel(44)?)?;
    let queued = scene.queue(1, &[(&scene.kv, &KV)])?;
    let late = flag();
    let started = face.start(&Options::default(), 9, LAYERS_OF_POOLS, &handles(&[late]))?;
    let words = succeeds("start_layer_wise_loading with a flag of the host", started)?;
    refused("cancelling a load that has started", &[ErrorKind::NotFound], face.cancel(1)?)?;
    late.store(1, std::sync::atomic::Ordering::Release);
    scene.finish(9, words, &[queued])?;
    scene.loaded(&queued.statuses()[0], &scene.kv, &KV)?;
    refused("cancelling a load that is finished", &[ErrorKind::NotFound], face.cancel(1)?)?;
    scene.store.close()
}

pub(super) fn finish(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    let face = scene.face()?;
    let options = Options::default();
    refused("finishing a batch that was never started", &[ErrorKind::NotFound], face.finish(&options, 44)?)?;
    scene.come_back(9, &scene.kv, &KV)?;
    refused("finishing a batch twice", &[ErrorKind::NotFound], face.finish(&options, 9)?)?;
    scene.store.close()
}
