//! What a call through the boundary costs beside the same code linked in, and what the host puts around it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use kvdock::cache::Guarded;
use kvdock::config::BackendTable;
use kvdock::plugin::backend::{
    CacheMode, CallOptions, ChainInfo, Held, HostPoolDescription, HostPoolSegment, PageStatus, PoolGroup, PoolHit,
    StorageBackend,
};
use kvdock::plugin::open::{OpenRequest, open};
use kvdock::plugin::ranks::Ranks;
use kvdock::plugin::state::StateCell;
use kvdock::plugin::{AbiVersions, Namespace, PAGE_FORMAT, WorkerIdentity};
use kvdock_plugin_api::Dtype;

use crate::Bench;
use crate::row::{Better, Goal, Report, Row};
use crate::sample::{Turns, side_by_side};
use crate::store::Store;

/// Calls in one sample of the raw call.
const CALLS: u32 = 100_000;

/// Calls in one sample of what the host puts around it.
const GUARDED_CALLS: u32 = 2_000;

/// Calls whose instructions are counted.
const COUNTED: u64 = 2_000;

/// Adds the rows.
///
/// # Errors
/// When the plugin can't be loaded or called.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let examples = kvdock_tests::paths::build().join("examples");
    let library = examples.join("libbench_keys.so");
    let name = "boundary, batch_exists of 1 key (ns), peer the same code linked in";
    if bench.wants(name) {
        let (loaded, linked) = (Store::loaded(&library)?, Store::linked()?);
        let raw = |store: &Store| timed(CALLS, || store.exists(CALLS));
        // More rounds than elsewhere: a few nanoseconds are looked for.
        let turns = side_by_side(bench.rounds.times(10), || raw(&loaded), || raw(&linked))?;
        report.add(Row::new(name, turns, Better::Less, Goal::Over(10.0)))?;
    }
    let name = "boundary, batch_exists of 1 key (instructions), peer the same code linked in";
    if bench.wants(name) {
        match instructions(bench)? {
            Ok((ours, peer)) => {
                report.add(Row::new(name, Turns::once(ours, peer), Better::Less, Goal::Over(30.0)))?;
            }
            Err(reason) => report.skip(name, &reason)?,
        }
    }
    let worker = "instance, batch_exists of 1 key (ns), peer the raw call";
    let guards = "guards, batch_exists of 1 key (ns), peer the raw call";
    if !bench.wants(worker) && !bench.wants(guards) {
        return Ok(());
    }
    let raw = Store::loaded(&library)?;
    let raw = || timed(CALLS, || raw.exists(CALLS));
    let instance = attach(&examples)?;
    let key = [[1; 32]];
    let stored = &mut [PageStatus::Unset];
    let limit = CallOptions::within(Duration::from_secs(60));
    instance.batch_set(&limit, PoolGroup::Full, &key, &[0], &ChainInfo::default(), stored)?;
    ensure!(stored == &[PageStatus::Ok], "the key was not stored: {stored:?}");
    if bench.wants(worker) {
        let once = || {
            let options = CallOptions::within(Duration::from_secs(60));
            Ok(instance.batch_exists(&options, &key, &Held::default(), &ChainInfo::default())?.longest() == 1)
        };
        let turns = side_by_side(bench.rounds, || around(once), raw)?;
        report.add(Row::new(worker, turns, Better::Less, Goal::None))?;
    }
    if bench.wants(guards) {
        let guarded = Guarded::new(instance.clone(), PAGE);
        let once = || Ok(guarded.batch_exists(&key, &ChainInfo::default())?.longest() == 1);
        let turns = side_by_side(bench.rounds, || around(once), raw)?;
        report.add(Row::new(guards, turns, Better::Less, Goal::None))?;
    }
    let end = Instant::now() + Duration::from_secs(5);
    ensure!(instance.shut(end, end, "measured"), "the instance can't be closed");
    Ok(())
}

/// Nanoseconds of one call of `calls`.
fn timed(calls: u32, body: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    body()?;
    Ok(start.elapsed().as_secs_f64() * 1e9 / f64::from(calls))
}

/// Nanoseconds of one call, which says whether it found the key.
fn around(once: impl Fn() -> Result<bool>) -> Result<f64> {
    timed(GUARDED_CALLS, || {
        (0..GUARDED_CALLS)
            .try_for_each(|_| once().and_then(|found| found.then_some(()).context("the key was not found")))
    })
}

/// Instructions of one call, loaded and linked; or why they were not counted.
fn instructions(bench: &Bench) -> Result<std::result::Result<(f64, f64), String>> {
    if let Err(error) = Command::new("valgrind").arg("--version").output() {
        return Ok(Err(format!("valgrind can't be started: {error}")));
    }
    let program = kvdock_tests::paths::build().join("kvdock-bench-calls");
    let mut sides = [0.0; 2];
    for (place, side) in sides.iter_mut().zip(["loaded", "linked"]) {
        // What is not a call is in both counts.
        let (once, twice) = (count(bench, &program, side, COUNTED)?, count(bench, &program, side, 2 * COUNTED)?);
        *place = (twice as f64 - once as f64) / COUNTED as f64;
    }
    Ok(Ok((sides[0], sides[1])))
}

/// Instructions of a whole run with so many calls.
fn count(bench: &Bench, program: &Path, side: &str, calls: u64) -> Result<u64> {
    let output = Command::new("valgrind")
        .arg("--tool=callgrind")
        .arg(format!("--callgrind-out-file={}", bench.scratch.join("callgrind.out").display()))
        .arg(program)
        .args([side, &calls.to_string()])
        .output()
        .context("can't start valgrind")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{} under callgrind: {said}", program.display());
    let collected = said.lines().find_map(|line| line.split_once("Collected : ")).map(|(_, number)| number.trim());
    collected
        .and_then(|number| number.parse().ok())
        .ok_or_else(|| anyhow!("callgrind does not say how many instructions it collected: {said}"))
}

/// Bytes of a page, which nobody reads.
const PAGE: u64 = 4096;

/// The plugin as the server opens it.
fn attach(folder: &Path) -> Result<Arc<Ranks>> {
    let namespace = Namespace {
        format: PAGE_FORMAT,
        architecture: "bench".to_owned(),
        weights_sha256: "0".repeat(64),
        kv_dtype: "f16".to_owned(),
        host_layout: "page_first".to_owned(),
        page_tokens: 16,
        layers: 1,
        kv_heads: 1,
        head_dim_k: 64,
        head_dim_v: 64,
        tp: (0, 1),
        pp: (0, 1),
        cp: (0, 1),
        numerics_id: "bench".to_owned(),
    };
    // A pool lives as long as the process.
    let memory = Box::leak(vec![0u64; PAGE as usize / 8].into_boxed_slice());
    let request = OpenRequest {
        abi: AbiVersions::BUILT_IN,
        config: BackendTable::new("bench-keys"),
        folders: vec![PathBuf::from(folder)],
        identity: Arc::new(WorkerIdentity::new(namespace, "bench", [0; 32])),
        mode: CacheMode::Hierarchical,
        pools: vec![Arc::from([HostPoolDescription {
            name: "kv".to_owned(),
            group: PoolGroup::Full,
            hit: PoolHit::AllPages,
            logical: false,
            layout: "page_first".to_owned(),
            dtype: Dtype::F16,
            pages: 1,
            page_tokens: 16,
            layers: 1,
            base: memory.as_mut_ptr() as usize,
            bytes: PAGE,
            pinned: false,
            fd: -1,
            device: Vec::new(),
            segments: vec![HostPoolSegment { region: 0, offset: 0, stride: PAGE, len: PAGE }],
            components: vec![],
        }])],
        device: None,
        state: Arc::new(StateCell::new("bench-keys", Box::new(|_| {}))),
        calls: Arc::default(),
    };
    open(&request).map(|opened| opened.instance).map_err(|error| anyhow!("{error}"))
}
