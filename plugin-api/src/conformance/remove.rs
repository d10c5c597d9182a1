//! Rules of `batch_remove` and `clear`.

use super::bench::Bench;
use super::data::{expect, keys, plain_pool, put};
use super::store::succeeds;
use super::{Check, Rule, Stop, ensure};
use crate::mock::{MockPool, Options, Part, PoolSpec, Query, identity};
use crate::{Capability, ClearScope, PageStatus};

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "remove.removes",
        "6",
        "removed pages are gone, the others stay, and they can be stored again",
        &[removes],
    )
    .needs(&[Capability::Remove]),
    Rule::new("remove.missing", "6", "removing a page that is not there succeeds", &[missing])
        .needs(&[Capability::Remove]),
    Rule::new("remove.refused", "7.5", "who does not remove pages says so", &[refused]),
    Rule::new("clear.namespace", "6", "clear of the namespace removes every page of it, in all pools", &[namespace])
        .needs(&[Capability::ClearNamespace]),
    Rule::new("clear.everything", "6", "clear of everything removes pages of all namespaces", &[everything])
        .needs(&[Capability::ClearEverything]),
    Rule::new(
        "clear.refused",
        "7.5",
        "a scope that is not offered, or not known, is refused and removes nothing",
        &[clear_refused],
    ),
];

fn removes(bench: &Bench) -> Check {
    let (pool, side) = (plain_pool(16), MockPool::new(PoolSpec::bytes(1, "side", 16, &[100])));
    let store = bench.attach(&[&pool, &side])?;
    put(&store, &pool, &[(1, 0, 1), (2, 1, 2), (3, 2, 3)])?;
    put(&store, &side, &[(2, 0, 22)])?;
    let part = Part::new(&pool, &keys([2, 3]), &[0, 0]);
    // The page indices of a remove may be left out.
    for part in [part.clone(), Part { pages: Vec::new(), ..part }] {
        let removed = store.remove(&Options::default(), &[part])?;
        succeeds("batch_remove", removed.result.clone())?;
        let right = |status: &PageStatus| matches!(status, PageStatus::Ok | PageStatus::Missing);
        ensure(removed.statuses[0].iter().all(right), "removed pages are ok or missing", || format!("{removed:?}"))?;
    }
    expect(&store, &pool, &[(1, 4, Some(1)), (2, 5, None), (3, 6, None)])?;
    expect(&store, &side, &[(2, 4, Some(22))])?;
    let found = succeeds("batch_exists", store.exists(&Options::default(), &keys([1, 2]), &[Query::of(&pool)])?)?;
    ensure(found.longest() == 1, "a removed page is not found", || format!("{found:?}"))?;
    // A page that was corrupt heals so: other bytes under the same key.
    put(&store, &pool, &[(2, 1, 92)])?;
    expect(&store, &pool, &[(2, 5, Some(92))])?;
    store.close()
}

fn missing(bench: &Bench) -> Check {
    let pool = plain_pool(8);
    let store = bench.attach(&[&pool])?;
    let removed = store.remove(&Options::default(), &[Part::new(&pool, &keys([1, 1, 2]), &[0, 0, 0])])?;
    succeeds("batch_remove", removed.result.clone())?;
    let right = |status: &PageStatus| matches!(status, PageStatus::Ok | PageStatus::Missing);
    ensure(removed.statuses[0].iter().all(right), "pages that are not there are ok or missing", || {
        format!("{removed:?}")
    })?;
    store.close()
}

fn refused(bench: &Bench) -> Check {
    let pool = plain_pool(8);
    let store = bench.attach(&[&pool])?;
    if store.capabilities.remove {
        return Err(Stop::Skip("it removes pages".to_owned()));
    }
    let removed = store.remove(&Options::default(), &[Part::new(&pool, &keys([1]), &[0])])?;
    ensure(removed.result.is_err(), "batch_remove is an error", || format!("{removed:?}"))?;
    store.close()
}

fn namespace(bench: &Bench) -> Check {
    let (pool, side) = (plain_pool(16), MockPool::new(PoolSpec::bytes(1, "side", 16, &[100])));
    let store = bench.attach(&[&pool, &side])?;
    put(&store, &pool, &[(1, 0, 1), (2, 1, 2)])?;
    put(&store, &side, &[(2, 0, 22)])?;
    succeeds("clear of the namespace", store.clear(&Options::default(), ClearScope::Namespace)?)?;
    expect(&store, &pool, &[(1, 4, None), (2, 5, None)])?;
    expect(&store, &side, &[(2, 4, None)])?;
    put(&store, &pool, &[(1, 0, 91)])?;
    expect(&store, &pool, &[(1, 4, Some(91))])?;
    store.close()
}

fn everything(bench: &Bench) -> Check {
    let pools = [plain_pool(8), plain_pool(8)];
    let one = bench.attach_as(&identity("one"), &[&pools[0]])?;
    put(&one, &pools[0], &[(1, 0, 1)])?;
    let two = bench.attach_as(&identity("two"), &[&pools[1]])?;
    put(&two, &pools[1], &[(2, 0, 2)])?;
    succeeds("clear of everything", two.clear(&Options::default(), ClearScope::Everything)?)?;
    expect(&two, &pools[1], &[(2, 1, None)])?;
    let reaches = bench.declared().shared || bench.declared().durable;
    if reaches {
        expect(&one, &pools[0], &[(1, 1, None)])?;
    }
    one.close()?;
    two.close()
}

fn clear_refused(bench: &Bench) -> Check {
    let pool = plain_pool(8);
    let store = bench.attach(&[&pool])?;
    put(&store, &pool, &[(1, 0, 1)])?;
    let can = store.capabilities;
    let scopes = [
        (can.clear_namespace, ClearScope::Namespace, "the namespace"),
        (can.clear_everything, ClearScope::Everything, "everything"),
    ];
    for (_, scope, name) in scopes.iter().filter(|(offered, _, _)| !offered) {
        let answer = store.clear(&Options::default(), *scope)?;
        ensure(answer.is_err(), format!("clear of {name} is an error"), || "success".to_owned())?;
    }
    let answer = store.clear_raw(&Options::default(), 77)?;
    ensure(answer.is_err(), "clear of scope 77, which nobody knows, is an error", || "success".to_owned())?;
    expect(&store, &pool, &[(1, 1, Some(1))])?;
    store.close()
}
