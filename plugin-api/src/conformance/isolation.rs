//! Rules of what is kept apart.

use super::bench::Bench;
use super::data::{expect, keys, plain_pool, put};
use super::store::succeeds;
use super::{Check, Rule, ensure};
use crate::mock::{MockPool, Options, Part, PoolSpec, Query, identity};
use crate::{Capability, ClearScope};

pub(super) const RULES: &[Rule] = &[
    Rule::new(
        "isolation.namespaces",
        "7.6",
        "pages of another namespace are never found, given out or overwritten",
        &[namespaces],
    ),
    Rule::new("isolation.pools", "6", "the same key in two pools is two pages", &[pools]),
    Rule::new(
        "isolation.instances",
        "6",
        "two instances at a time have pools of their own, and one may go",
        &[instances],
    ),
    Rule::new("isolation.remove", "7.6", "removing a key leaves other namespaces and pools alone", &[remove])
        .needs(&[Capability::Remove]),
    Rule::new("isolation.clear", "7.6", "clear of the namespace leaves other namespaces alone", &[clear])
        .needs(&[Capability::ClearNamespace]),
];

fn namespaces(bench: &Bench) -> Check {
    let pools = [plain_pool(8), plain_pool(8)];
    let one = bench.attach_as(&identity("one"), &[&pools[0]])?;
    let two = bench.attach_as(&identity("two"), &[&pools[1]])?;
    put(&one, &pools[0], &[(1, 0, 11), (2, 1, 12)])?;
    expect(&two, &pools[1], &[(1, 4, None), (2, 5, None)])?;
    let found = succeeds("batch_exists", two.exists(&Options::default(), &keys([1, 2]), &[Query::of(&pools[1])])?)?;
    ensure(found.longest() == 0, "pages of another namespace are not found", || format!("{found:?}"))?;
    put(&two, &pools[1], &[(2, 0, 22), (3, 1, 23)])?;
    expect(&one, &pools[0], &[(1, 4, Some(11)), (2, 5, Some(12)), (3, 6, None)])?;
    expect(&two, &pools[1], &[(1, 4, None), (2, 5, Some(22)), (3, 6, Some(23))])?;
    one.close()?;
    two.close()
}

fn pools(bench: &Bench) -> Check {
    let (kv, swa) =
        (MockPool::new(PoolSpec::bytes(0, "kv", 8, &[128])), MockPool::new(PoolSpec::bytes(1, "swa", 8, &[128])));
    let store = bench.attach(&[&kv, &swa])?;
    put(&store, &kv, &[(1, 0, 11), (2, 1, 12)])?;
    expect(&store, &swa, &[(1, 4, None), (2, 5, None)])?;
    put(&store, &swa, &[(1, 0, 21), (3, 1, 23)])?;
    expect(&store, &kv, &[(1, 4, Some(11)), (2, 5, Some(12)), (3, 6, None)])?;
    expect(&store, &swa, &[(1, 4, Some(21)), (3, 5, Some(23)), (2, 6, None)])?;
    store.close()
}

fn instances(bench: &Bench) -> Check {
    // The numbers of pools are the instance's own: 1 is another pool in each.
    let first = [MockPool::new(PoolSpec::bytes(0, "kv", 8, &[96])), MockPool::new(PoolSpec::bytes(1, "swa", 8, &[64]))];
    let second =
        [MockPool::new(PoolSpec::bytes(0, "kv", 8, &[96])), MockPool::new(PoolSpec::bytes(1, "draft", 8, &[200]))];
    let one = bench.attach(&first.iter().collect::<Vec<_>>())?;
    let two = bench.attach(&second.iter().collect::<Vec<_>>())?;
    put(&one, &first[1], &[(1, 0, 11)])?;
    put(&two, &second[1], &[(1, 0, 21)])?;
    put(&two, &second[0], &[(5, 0, 25)])?;
    let (before, untouched) = (first[1].snapshot(), second[1].snapshot());
    expect(&two, &second[1], &[(1, 3, Some(21)), (2, 4, None)])?;
    if let Some(seen) = first[1].difference(&before, &[]) {
        return super::fail("a get of one instance leaves the pools of another one alone", seen);
    }
    if let Some(seen) = second[1].difference(&untouched, &[3, 4]) {
        return super::fail("a get writes the pages that it names", seen);
    }
    expect(&one, &first[1], &[(1, 3, Some(11))])?;
    one.close()?;
    expect(&two, &second[0], &[(5, 3, Some(25))])?;
    put(&two, &second[0], &[(6, 0, 26)])?;
    expect(&two, &second[0], &[(6, 4, Some(26))])?;
    // And a third one, while the second runs.
    let third = plain_pool(8);
    let store = bench.attach_as(&identity("another"), &[&third])?;
    put(&store, &third, &[(1, 0, 31)])?;
    expect(&store, &third, &[(1, 1, Some(31))])?;
    two.close()?;
    store.close()
}

fn remove(bench: &Bench) -> Check {
    let pools = [plain_pool(8), plain_pool(8)];
    let side = MockPool::new(PoolSpec::bytes(1, "side", 8, &[100]));
    let one = bench.attach_as(&identity("one"), &[&pools[0], &side])?;
    let two = bench.attach_as(&identity("two"), &[&pools[1]])?;
    put(&one, &pools[0], &[(1, 0, 11)])?;
    put(&one, &side, &[(1, 0, 15)])?;
    put(&two, &pools[1], &[(1, 0, 21)])?;
    let removed = two.remove(&Options::default(), &[Part::new(&pools[1], &keys([1]), &[0])])?;
    succeeds("batch_remove", removed.result)?;
    expect(&one, &pools[0], &[(1, 4, Some(11))])?;
    let removed = one.remove(&Options::default(), &[Part::new(&pools[0], &keys([1]), &[0])])?;
    succeeds("batch_remove", removed.result)?;
    expect(&one, &side, &[(1, 4, Some(15))])?;
    one.close()?;
    two.close()
}

fn clear(bench: &Bench) -> Check {
    let pools = [plain_pool(8), plain_pool(8)];
    let one = bench.attach_as(&identity("one"), &[&pools[0]])?;
    let two = bench.attach_as(&identity("two"), &[&pools[1]])?;
    put(&one, &pools[0], &[(1, 0, 11)])?;
    put(&two, &pools[1], &[(1, 0, 21), (2, 1, 22)])?;
    succeeds("clear", two.clear(&Options::default(), ClearScope::Namespace)?)?;
    expect(&one, &pools[0], &[(1, 4, Some(11))])?;
    one.close()?;
    two.close()
}
