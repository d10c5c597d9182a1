//! Loads: what they fill, when, and what they leave alone.

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use super::super::bench::Bench;
use super::super::data::keys;
use super::super::store::succeeds;
use super::super::{Check, ensure, fail, fail_rule};
use super::face::{Face, NOW, flag, handles};
use super::scene::{At, LAYERS_OF_POOLS, QUIET, Scene, part, seed};
use super::{DEADLINE, LAYERS, STATUSES};
use crate::mock::{Found, MockPool, Options, Part, PoolSpec, Query};
use crate::{CacheMode, ErrorKind, PageStatus};

/// A way to draw numbers that is the same in every run.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_mul(2).wrapping_add(12345))
    }
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end.max(1)
    }
}

pub(super) fn lookup(bench: &Bench) -> Check {
    let plain = |id, name| PoolSpec::bytes(id, name, 16, &[192]);
    let pools =
        [plain(0, "kv"), plain(1, "window").trailing(2), plain(2, "groups").block_groups(4, 2)].map(MockPool::new);
    let store = bench.open_mode(&bench.identity(), CacheMode::Linker)?;
    store.register_all(&pools.iter().collect::<Vec<_>>())?;
    let face = Face::of(&store)?;
    let mut dice = Dice::new(1);
    for round in 0..16u64 {
        let chain: Vec<u64> = (0..dice.below(9)).map(|index| round * 100 + index).collect();
        for pool in &pools {
            let stored: Vec<u64> = chain.iter().copied().filter(|_| dice.below(5) > 0).collect();
            let pages: Vec<At> = stored.iter().zip(0..).map(|(number, at)| (*number, at)).collect();
            pages.iter().for_each(|(number, at)| pool.fill(*at, seed(pool, *number)));
            store.set(&Options::default(), &[part(pool, &pages)])?;
        }
        let mut queries: Vec<Query> = pools.iter().map(Query::of).collect();
        if round % 3 == 0 {
            queries[0].raw.held_pages = dice.below(3) as u32;
        }
        let options = Options { request: 1 + round, ..Options::default() };
        let chain = keys(chain);
        let by_exists = succeeds("batch_exists", store.exists(&options, &chain, &queries)?)?;
        let by_lookup = match face.lookup(&options, &chain, &queries)? {
            Ok(found) => found,
            Err(error) => return fail("lookup answers", error.to_string()),
        };
        let what = |found: &Found| format!("restorable {:?}", found.restorable);
        ensure(by_lookup.restorable == by_exists.restorable, format!("as batch_exists: {}", what(&by_exists)), || {
            what(&by_lookup)
        })?;
    }
    store.close()
}

const KV: [At; 4] = [(1, 20), (2, 21), (3, 22), (4, 23)];
const SIDE: [At; 2] = [(3, 7), (4, 8)];

/// The pages `KV` and `SIDE` are stored, from other places.
fn stored(bench: &Bench) -> Check<Scene> {
    let scene = Scene::new(bench)?;
    scene.put(&scene.kv, &[(1, 0), (2, 1), (3, 2), (4, 3)])?;
    scene.put(&scene.side, &[(3, 0), (4, 1)])?;
    Ok(scene)
}

pub(super) fn load(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    let first = scene.queue(1, &[(&scene.side, &SIDE), (&scene.kv, &KV)])?;
    // The same pages for another request, into other places.
    let others: [At; 2] = [(4, 30), (1, 31)];
    let second = scene.queue(2, &[(&scene.kv, &others)])?;
    let words = scene.start(9)?;
    scene.finish(9, words, &[first, second])?;
    scene.loaded(&first.statuses()[0], &scene.side, &SIDE)?;
    scene.loaded(&first.statuses()[1], &scene.kv, &KV)?;
    scene.loaded(&second.statuses()[0], &scene.kv, &others)?;
    scene.store.close()
}

pub(super) fn statuses(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    let mixed: [At; 4] = [(1, 20), (77, 21), (3, 22), (78, 23)];
    let first = scene.queue(1, &[(&scene.kv, &mixed)])?;
    let second = scene.queue(2, &[(&scene.side, &[(79, 5)]), (&scene.kv, &[(2, 30)])])?;
    let words = scene.start(9)?;
    scene.finish(9, words, &[first, second])?;
    let (ok, missing) = (PageStatus::Ok, PageStatus::Missing);
    for (queued, expected) in [(first, vec![vec![ok, missing, ok, missing]]), (second, vec![vec![missing], vec![ok]])] {
        let seen = queued.statuses();
        if seen != expected {
            return fail_rule(STATUSES, format!("the verdicts {expected:?}"), format!("{seen:?}"));
        }
    }
    scene.store.close()
}

pub(super) fn layers(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    let told = bench.host.layers_settled();
    let queued = scene.queue(1, &[(&scene.kv, &KV)])?;
    let words = scene.start(9)?;
    // A host waits for the words while the forward runs; the finish comes later.
    scene.settles(words)?;
    scene.finish(9, words, &[queued])?;
    if bench.host.layers_settled() == told {
        return fail_rule(LAYERS, "the plugin calls layers_settled of the host", "no call");
    }
    scene.store.close()
}

/// Bytes of a layer of a page.
fn layer_of(pool: &MockPool, page: u32, layer: usize) -> Vec<u8> {
    let components = &pool.spec().components;
    components.iter().filter(|c| c.layer as usize == layer).flat_map(|c| pool.read_component(page, c)).collect()
}

pub(super) fn layer_bytes(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    // What each layer of each page has to be, read from the pages as they were stored.
    let right = |layer: usize| (0..KV.len() as u32).map(|page| layer_of(&scene.kv, page, layer)).collect::<Vec<_>>();
    let right: Vec<Vec<Vec<u8>>> = (0..LAYERS_OF_POOLS).map(right).collect();
    for batch in 1..=8 {
        let queued = scene.queue(batch, &[(&scene.kv, &KV)])?;
        let words = scene.start(batch)?;
        let mut seen = vec![None; LAYERS_OF_POOLS];
        let all = super::face::eventually(scene.store.watch.limits.call, || {
            for (layer, seen) in seen.iter_mut().enumerate() {
                if seen.is_none() && words.settled(layer) {
                    *seen = Some(KV.iter().map(|(_, at)| layer_of(&scene.kv, *at, layer)).collect::<Vec<_>>());
                }
            }
            seen.iter().all(Option::is_some)
        });
        if !all {
            return fail_rule(LAYERS, "the words of the layers become 1 while the batch runs", "a word is still 0");
        }
        scene.finish(batch, words, &[queued])?;
        // A page that was not loaded settles without its bytes; that is a matter of another rule.
        scene.loaded(&queued.statuses()[0], &scene.kv, &KV)?;
        for (layer, (seen, right)) in seen.iter().zip(&right).enumerate() {
            ensure(seen.as_ref() == Some(right), format!("layer {layer} has its bytes when its word is 1"), || {
                "other bytes at that time".to_owned()
            })?;
        }
    }
    scene.store.close()
}

pub(super) fn ranges(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    scene.blank(&scene.kv, &KV);
    let untouched: Vec<Vec<u8>> = KV.iter().map(|(_, at)| layer_of(&scene.kv, *at, 0)).collect();
    let wanted: Vec<Vec<u8>> = (0..4).map(|page| layer_of(&scene.kv, page, 1)).collect();
    let one_layer = Part { layers: Some((1, 1)), ..part(&scene.kv, &KV) };
    let queued = succeeds("load of a range of layers", scene.face()?.load(1, &[one_layer])?)?;
    let words = scene.start(9)?;
    scene.finish(9, words, &[queued])?;
    let statuses = queued.statuses();
    ensure(statuses[0].iter().all(|status| *status == PageStatus::Ok), "stored pages are loaded", || {
        format!("{statuses:?}")
    })?;
    let now = |layer| KV.iter().map(|(_, at)| layer_of(&scene.kv, *at, layer)).collect::<Vec<_>>();
    ensure(now(1) == wanted, "the layer that was asked for has its bytes", || "other bytes".to_owned())?;
    ensure(now(0) == untouched && now(2) != wanted, "the other layers are left alone", || "they changed".to_owned())?;
    scene.store.close()
}

pub(super) fn empty_start(bench: &Bench) -> Check {
    let scene = Scene::new(bench)?;
    // Nothing is to be written, so there is nothing to wait for.
    let never = flag();
    let started = scene.face()?.start(&Options::default(), 5, LAYERS_OF_POOLS, &handles(&[never]))?;
    let words = succeeds("start_layer_wise_loading with nothing queued", started)?;
    ensure(words.wait(scene.store.watch.limits.late), "all words are 1 at once", || "a word is still 0".to_owned())?;
    succeeds("finish_layer_wise_loading of a batch without loads", scene.face()?.finish(&Options::default(), 5)?)?;
    scene.store.close()
}

pub(super) fn ready(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    let queued = scene.queue(1, &[(&scene.kv, &KV)])?;
    let flags = [flag(), flag()];
    let started = scene.face()?.start(&Options::default(), 9, LAYERS_OF_POOLS, &handles(&flags))?;
    let words = succeeds("start_layer_wise_loading with flags of the host", started)?;
    for flag in flags {
        std::thread::sleep(QUIET);
        ensure(scene.are_blank(&scene.kv, &KV), "no page is written before both flags are 1", || {
            "a page was written".to_owned()
        })?;
        ensure((0..LAYERS_OF_POOLS).all(|layer| !words.settled(layer)), "no layer is settled before that", || {
            "a word is 1".to_owned()
        })?;
        flag.store(1, Ordering::Release);
    }
    scene.finish(9, words, &[queued])?;
    scene.loaded(&queued.statuses()[0], &scene.kv, &KV)?;
    scene.store.close()
}

pub(super) fn cancel(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    let face = scene.face()?;
    scene.queue(1, &[(&scene.kv, &KV[..2])])?;
    let kept = scene.queue(2, &[(&scene.kv, &KV[2..])])?;
    succeeds("cancel_queued_load of a queued load", face.cancel(1)?)?;
    let words = scene.start(9)?;
    scene.finish(9, words, &[kept])?;
    scene.loaded(&kept.statuses()[0], &scene.kv, &KV[2..])?;
    std::thread::sleep(QUIET);
    ensure(scene.are_blank(&scene.kv, &KV[..2]), "the pages of a cancelled load are left alone", || {
        "a page was written".to_owned()
    })?;
    // The request may come again.
    scene.come_back(1, &scene.kv, &KV[..2])?;
    scene.store.close()
}

/// A store that hangs, as far as a host can make one: the flag of the start never comes.
pub(super) fn deadline(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    let queued = scene.queue(1, &[(&scene.kv, &KV), (&scene.side, &SIDE)])?;
    let late = flag();
    let started = scene.face()?.start(&Options::default(), 9, LAYERS_OF_POOLS, &handles(&[late]))?;
    let words = succeeds("start_layer_wise_loading with a flag of the host", started)?;
    scene.waits_for_its_flag(&scene.kv, &KV)?;
    let short = Options { deadline: Some(Duration::from_millis(50)), ..Options::default() };
    match scene.face()?.finish(&short, 9)? {
        Err(error) if error.kind == ErrorKind::TimedOut => {}
        other => return fail("a finish that reaches its deadline answers timed out", format!("{other:?}")),
    }
    is_over(&scene, words, queued)?;
    late.store(1, Ordering::Release);
    is_quiet(&scene)?;
    scene.come_back(2, &scene.kv, &KV)?;
    scene.store.close()
}

/// The cancel flag of the start ends the load.
pub(super) fn cancelled(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    let queued = scene.queue(1, &[(&scene.kv, &KV), (&scene.side, &SIDE)])?;
    let (late, cancel) = (flag(), flag());
    let options = Options { cancel: Some(cancel), ..Options::default() };
    let started = scene.face()?.start(&options, 9, LAYERS_OF_POOLS, &handles(&[late]))?;
    let words = succeeds("start_layer_wise_loading with a flag of the host", started)?;
    scene.waits_for_its_flag(&scene.kv, &KV)?;
    cancel.store(1, Ordering::Release);
    if scene.face()?.finish(&Options::default(), 9)?.is_ok() {
        let statuses = queued.statuses();
        ensure(statuses.iter().flatten().all(|status| *status != PageStatus::Ok), "no page of it is loaded", || {
            format!("{statuses:?}")
        })?;
    }
    is_over(&scene, words, queued)?;
    late.store(1, Ordering::Release);
    is_quiet(&scene)?;
    scene.store.close()
}

fn is_over(scene: &Scene, words: super::face::Words, queued: super::face::Queued) -> Check {
    words.check_settled(DEADLINE, "a finish that ended the load")?;
    queued.check_settled(DEADLINE, "a finish that ended the load")?;
    let statuses = queued.statuses();
    let none = statuses.iter().flatten().all(|status| *status != PageStatus::Ok);
    ensure(none && is_untouched(scene), "no page is loaded before the flag of the start is 1", || {
        format!("{statuses:?}")
    })
}

fn is_untouched(scene: &Scene) -> bool {
    scene.are_blank(&scene.kv, &KV) && scene.are_blank(&scene.side, &SIDE)
}

fn is_quiet(scene: &Scene) -> Check {
    std::thread::sleep(QUIET);
    ensure(is_untouched(scene), "no page is touched after finish_layer_wise_loading has returned", || {
        "a page was written".to_owned()
    })
}

pub(super) fn beside(bench: &Bench) -> Check {
    let scene = stored(bench)?;
    let first = scene.queue(1, &[(&scene.kv, &KV[..2])])?;
    let late = flag();
    let started = scene.face()?.start(&Options::default(), 9, LAYERS_OF_POOLS, &handles(&[late]))?;
    let words = succeeds("start_layer_wise_loading with a flag of the host", started)?;
    let face = scene.face()?;
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| face.finish(&Options::default(), 9));
        std::thread::sleep(QUIET);
        let (done, ended) = mpsc::channel();
        let calls = scope.spawn({
            let scene = &scene;
            move || {
                let result = others(scene);
                // Nobody listens any more when it took too long.
                let _ = done.send(());
                result
            }
        });
        // Long before the deadline of the finish.
        let in_time = ended.recv_timeout(scene.store.watch.limits.late).is_ok();
        late.store(1, Ordering::Release);
        let calls = calls.join().unwrap_or_else(|_| fail("the calls end", "a panic of the suite"));
        let waited = waiting.join().unwrap_or_else(|_| fail("the finish ends", "a panic of the suite"));
        ensure(in_time, "lookup, load, cancel, start and finish of another batch return while a finish waits", || {
            "they returned only after it".to_owned()
        })?;
        calls?;
        succeeds("the finish that waited", waited?)
    })?;
    words.check_settled(LAYERS, "finish_layer_wise_loading")?;
    scene.loaded(&first.statuses()[0], &scene.kv, &KV[..2])?;
    scene.store.close()
}

fn others(scene: &Scene) -> Check {
    let face = scene.face()?;
    let found = face.lookup(&Options::default(), &keys([1, 2]), &[Query::of(&scene.kv)])?;
    succeeds("lookup while a finish waits", found)?;
    scene.queue(2, &[(&scene.kv, &KV[2..3])])?;
    succeeds("cancel_queued_load while a finish waits", face.cancel(2)?)?;
    let queued = scene.queue(3, &[(&scene.kv, &KV[3..])])?;
    let words = succeeds("start_layer_wise_loading", face.start(&Options::default(), 10, LAYERS_OF_POOLS, &[NOW])?)?;
    succeeds("finish_layer_wise_loading", face.finish(&Options::default(), 10)?)?;
    words.check_settled(LAYERS, "finish_layer_wise_loading")?;
    scene.loaded(&queued.statuses()[0], &scene.kv, &KV[3..])
}
