//! Rules of the life of an instance, and of what it leaves behind.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::bench::Bench;
use super::data::{expect, keys, plain_pool, put};
use super::store::succeeds;
use super::{Check, Rule, ensure, fail};
use crate::mock::{MockPool, Options, Part, PoolSpec, Query, identity};
use crate::{Capability, ClearScope};

pub(super) const RULES: &[Rule] = &[
    Rule::new("life.close", "4", "an instance may be closed at any step, and another one opened after it", &[close]),
    Rule::new("life.failed_start", "4", "after a refused pool close works, and a new instance too", &[failed_start]),
    Rule::new("life.threads", "7.7", "close leaves no thread behind", &[threads]).alone(),
    Rule::new("life.files", "7.7", "close leaves no file open", &[files]).alone(),
    Rule::new(
        "life.process_state",
        "5",
        "signal handlers, working directory, umask, environment, locale and limits stay as they are",
        &[process_state],
    )
    .alone(),
    Rule::new(
        "life.reopen",
        "6",
        "what a durable backend has stored, flushed and closed is there when it is opened again",
        &[reopen],
    )
    .needs(&[Capability::Durable]),
    Rule::new(
        "life.other_process",
        "6",
        "what a durable backend has stored, flushed and closed is there in another process",
        &[store_for_later, find_from_before],
    )
    .needs(&[Capability::Durable]),
    Rule::new(
        "life.killed",
        "7.4",
        "when the process is killed while pages are stored, each page is there whole or not at all",
        &[kill_at_work, find_whole_pages],
    )
    .needs(&[Capability::Durable])
    .killed(),
    Rule::new("life.exit", "2", "a process that has closed its instances ends as it would without the plugin", &[exit])
        .alone(),
];

fn close(bench: &Bench) -> Check {
    let pool = plain_pool(8);
    bench.open()?.close()?;
    let store = bench.open()?;
    succeeds("registering the anchor", store.register(&pool)?)?;
    store.close()?;
    bench.attach(&[&pool])?.close()?;
    let store = bench.attach(&[&pool])?;
    put(&store, &pool, &[(1, 0, 1), (2, 1, 2)])?;
    expect(&store, &pool, &[(1, 2, Some(1))])?;
    store.close()?;
    // And two that are open at once, closed in the order in which they were opened.
    let pools = [plain_pool(8), plain_pool(8)];
    let (one, two) = (bench.attach(&[&pools[0]])?, bench.attach_as(&identity("another"), &[&pools[1]])?);
    one.close()?;
    put(&two, &pools[1], &[(1, 0, 1)])?;
    expect(&two, &pools[1], &[(1, 2, Some(1))])?;
    two.close()
}

fn failed_start(bench: &Bench) -> Check {
    let bad = PoolSpec { hit_policy: 77, ..PoolSpec::bytes(0, "kv", 8, &[64]) };
    for _ in 0..3 {
        let store = bench.open()?;
        let refused = store.register(&MockPool::new(bad.clone()))?;
        ensure(refused.is_err(), "an anchor with an unknown hit policy is refused", || "success".to_owned())?;
        store.close()?;
        let (anchor, side) =
            (plain_pool(8), MockPool::new(PoolSpec { id: 1, role: crate::PoolRole::Side, ..bad.clone() }));
        let store = bench.open()?;
        succeeds("registering the anchor", store.register(&anchor)?)?;
        let refused = store.register_side(&[&side])?;
        ensure(refused.is_err(), "a side pool with an unknown hit policy is refused", || "success".to_owned())?;
        store.close()?;
    }
    let pool = plain_pool(8);
    let store = bench.attach(&[&pool])?;
    put(&store, &pool, &[(1, 0, 1)])?;
    expect(&store, &pool, &[(1, 2, Some(1))])?;
    store.close()
}

/// Opens, works and closes, with everything that may start a thread or open a file.
fn one_life(bench: &Bench, number: u64) -> Check {
    let pool = plain_pool(64);
    let large = MockPool::new(PoolSpec::bytes(1, "large", 4, &[300_000]));
    let store = bench.attach(&[&pool, &large])?;
    let pages: Vec<_> = (0..64).map(|page| (100 * number + u64::from(page), page, u64::from(page))).collect();
    put(&store, &pool, &pages)?;
    put(&store, &large, &[(100 * number, 0, 1)])?;
    expect(&store, &pool, &[(100 * number, 9, Some(0)), (99_999, 10, None)])?;
    expect(&store, &large, &[(100 * number, 1, Some(1))])?;
    let _ = store.exists(&Options::default(), &keys(0..8), &[Query::of(&pool)])?;
    let _ = store.flush(&Options::default())?;
    let _ = store.stats(&Options::default())?;
    let _ = store.health(&Options::default())?;
    if store.capabilities.remove {
        store.remove(&Options::default(), &[Part::new(&pool, &keys([100 * number]), &[0])])?;
    }
    store.close()
}

/// Names of what lies in a folder of `/proc/self`, with what they are.
fn proc_entries(folder: &str, describe: impl Fn(&std::path::Path) -> String) -> BTreeMap<String, String> {
    let entries = std::fs::read_dir(format!("/proc/self/{folder}"));
    let entry = |entry: std::fs::DirEntry| (entry.file_name().to_string_lossy().into_owned(), describe(&entry.path()));
    entries.into_iter().flatten().flatten().map(entry).collect()
}

fn running_threads() -> BTreeMap<String, String> {
    let name =
        |task: &std::path::Path| std::fs::read_to_string(task.join("comm")).unwrap_or_default().trim().to_owned();
    proc_entries("task", name)
}

fn open_files() -> BTreeMap<String, String> {
    let target = |link: &std::path::Path| {
        std::fs::read_link(link).map(|target| target.display().to_string()).unwrap_or_default()
    };
    let mut files = proc_entries("fd", target);
    // The one by which the folder was read.
    files.retain(|_, target| !target.is_empty() && !target.starts_with("/proc/"));
    files
}

/// What is there now and was not before, after it had some time to go: a thread that was joined is seen for a moment more.
fn left_behind(before: &BTreeMap<String, String>, look: impl Fn() -> BTreeMap<String, String>) -> Vec<String> {
    let began = Instant::now();
    loop {
        let left: Vec<String> =
            look().into_iter().filter(|(key, _)| !before.contains_key(key)).map(|(_, name)| name).collect();
        if left.is_empty() || began.elapsed() > Duration::from_secs(3) {
            return left;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn threads(bench: &Bench) -> Check {
    let before = running_threads();
    for number in 1..4 {
        one_life(bench, number)?;
        let left = left_behind(&before, running_threads);
        ensure(left.is_empty(), "no thread that was not there before open", || left.join(", "))?;
    }
    Ok(())
}

fn files(bench: &Bench) -> Check {
    // What a library opens once and keeps for all instances is no leak.
    one_life(bench, 1)?;
    let before = open_files();
    for number in 2..5 {
        one_life(bench, number)?;
        let left = left_behind(&before, open_files);
        ensure(left.is_empty(), "no open file that was not there after the first close", || left.join(", "))?;
    }
    Ok(())
}

unsafe extern "C" {
    fn setlocale(category: std::ffi::c_int, locale: *const std::ffi::c_char) -> *const std::ffi::c_char;
}

/// `LC_ALL` of the C libraries on Linux.
const LC_ALL: std::ffi::c_int = 6;

fn locale() -> String {
    // SAFETY: a null locale asks for the one that is set, and changes nothing.
    let name = unsafe { setlocale(LC_ALL, std::ptr::null()) };
    if name.is_null() {
        return String::new();
    }
    // SAFETY: not null, so it is a text that stays as it is until the locale changes.
    unsafe { std::ffi::CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// What belongs to the process and not to a plugin.
fn state_of_the_process() -> Vec<(String, String)> {
    let mut state = vec![
        ("the working directory".to_owned(), format!("{:?}", std::env::current_dir())),
        ("the environment".to_owned(), format!("{:?}", std::env::vars_os().collect::<BTreeMap<_, _>>())),
        ("the locale".to_owned(), locale()),
    ];
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let known = [("Umask:", "the umask"), ("SigIgn:", "ignored signals"), ("SigCgt:", "signal handlers")];
    for (key, name) in known {
        let value = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().trim();
        state.push((name.to_owned(), value.to_owned()));
    }
    state.push(("limits".to_owned(), std::fs::read_to_string("/proc/self/limits").unwrap_or_default()));
    state
}

fn process_state(bench: &Bench) -> Check {
    let before = state_of_the_process();
    let unchanged = |when: &str| -> Check {
        for ((name, before), (_, now)) in before.iter().zip(state_of_the_process()) {
            ensure(*before == now, format!("{name} of the process stays as it is"), || {
                format!("{when} it is {now:?}, it was {before:?}")
            })?;
        }
        Ok(())
    };
    let pool = plain_pool(8);
    let store = bench.attach(&[&pool])?;
    unchanged("after open")?;
    put(&store, &pool, &[(1, 0, 1)])?;
    expect(&store, &pool, &[(1, 1, Some(1))])?;
    let _ = store.flush(&Options::default())?;
    let _ = store.clear(&Options::default(), ClearScope::Namespace)?;
    unchanged("after some calls")?;
    store.close()?;
    unchanged("after close")
}

const STORED: u64 = 40;

fn store_pages(bench: &Bench) -> Check {
    let (pool, side) = (plain_pool(64), MockPool::new(PoolSpec::bytes(1, "side", 64, &[300_000])));
    let store = bench.attach(&[&pool, &side])?;
    put(&store, &pool, &(0..STORED).map(|page| (page, page as u32, 70 + page)).collect::<Vec<_>>())?;
    put(&store, &side, &[(3, 0, 33), (5, 1, 35)])?;
    succeeds("flush", store.flush(&Options::default())?)?;
    store.close()
}

fn find_pages(bench: &Bench) -> Check {
    let (pool, side) = (plain_pool(64), MockPool::new(PoolSpec::bytes(1, "side", 64, &[300_000])));
    let store = bench.attach(&[&pool, &side])?;
    let found =
        succeeds("batch_exists", store.exists(&Options::default(), &keys(0..STORED + 1), &[Query::of(&pool)])?)?;
    let expected = format!("a prefix of the {STORED} pages that were stored before");
    ensure(found.longest() == STORED as usize, expected, || format!("{} pages", found.longest()))?;
    expect(&store, &pool, &(0..STORED).map(|page| (page, page as u32, Some(70 + page))).collect::<Vec<_>>())?;
    expect(&store, &side, &[(3, 5, Some(33)), (5, 6, Some(35)), (4, 7, None)])?;
    store.close()
}

fn reopen(bench: &Bench) -> Check {
    store_pages(bench)?;
    find_pages(bench)
}

fn store_for_later(bench: &Bench) -> Check {
    let scratch = bench.config().to_string().contains(&*bench.scratch.to_string_lossy());
    if !scratch && !bench.declared().shared {
        // Nothing says that the store belongs to this check, and what lies there is not ours to count on.
        return Err(super::Stop::Skip("its configuration names no scratch folder".to_owned()));
    }
    store_pages(bench)
}

fn find_from_before(bench: &Bench) -> Check {
    find_pages(bench)
}

fn exit(bench: &Bench) -> Check {
    one_life(bench, 1)?;
    let pool = plain_pool(8);
    let refused = bench.open()?.register(&MockPool::new(PoolSpec { hit_policy: 77, ..pool.spec().clone() }))?;
    if refused.is_ok() {
        return fail("a pool with an unknown hit policy is refused", "success");
    }
    // How the process ends is seen from outside.
    Ok(())
}

/// Pages of three sizes, which a backend may keep in different ways.
fn pools_of_sizes() -> [MockPool; 3] {
    let size = |(id, name, bytes)| MockPool::new(PoolSpec::bytes(id, name, 8, &[bytes, 64]));
    [(0, "kv", 700), (1, "middle", 9_000), (2, "large", 300_000)].map(size)
}

/// More pages than are stored before the end comes, and no more bytes than a check configuration has room for.
const ROUNDS: u64 = 540;

fn kill_at_work(bench: &Bench) -> Check {
    let pools = pools_of_sizes();
    let store = bench.attach(&pools.iter().collect::<Vec<_>>())?;
    let stored = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            (0..ROUNDS).try_for_each(|number| {
                stored.store(number, Ordering::Relaxed);
                put(&store, &pools[number as usize % 3], &[(number, 0, number)])
            })
        });
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(300) && stored.load(Ordering::Relaxed) < ROUNDS / 3 {
            std::thread::yield_now();
        }
        if !worker.is_finished() {
            // Nothing of the plugin, of the suite or of the C library runs after this.
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        }
        worker.join().unwrap_or_else(|_| fail("pages are stored", "a thread ended"))
    })?;
    Err(super::Stop::Skip("all pages were stored before the process could be killed".to_owned()))
}

fn find_whole_pages(bench: &Bench) -> Check {
    let pools = pools_of_sizes();
    let store = bench.attach(&pools.iter().collect::<Vec<_>>())?;
    for number in 0..ROUNDS {
        let pool = &pools[number as usize % 3];
        let got = store.get(&Options::default(), &[Part::new(pool, &keys([number]), &[1])])?;
        if let Err(error) = &got.result {
            return fail("batch_get succeeds after the process was killed", error.to_string());
        }
        if got.statuses[0][0] == crate::PageStatus::Ok && !pool.holds(1, number) {
            let seen = format!("page {number} of {} bytes is ok and has other bytes", pool.page_bytes());
            return fail("a page is there whole or not at all", seen);
        }
    }
    put(&store, &pools[0], &[(ROUNDS, 2, 5)])?;
    expect(&store, &pools[0], &[(ROUNDS, 3, Some(5))])?;
    store.close()
}
