//! A full, read-only or vanished disk: the store says so, reading goes on, and it heals by itself.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

mod common;

use std::ffi::CString;
use std::fs;
use std::path::Path;

use common::*;
use kvdock_plugin_api::{ErrorKind, HealthState, LogLevel, PageStatus};
use kvdock_plugin_file::fail_writes_with;
use std::sync::Mutex;

/// Injected errors are the whole process's: tests with them, and those that must not meet them, take turns.
static TURN: Mutex<()> = Mutex::new(());

fn mount(source: &str, target: &Path, kind: &str, flags: libc::c_ulong, data: &str) -> std::io::Result<()> {
    let text = |text: &str| CString::new(text).unwrap();
    let (source, target) = (text(source), text(target.to_str().unwrap()));
    let (kind, data) = (text(kind), text(data));
    // SAFETY: four texts that live through the call.
    match unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// A small file system of its own, seen by this thread and the threads that it starts only; none where that is not allowed.
fn own_file_system(target: &Path, size: &str) -> std::io::Result<()> {
    fs::create_dir_all(target)?;
    // SAFETY: changes what this thread sees mounted, nothing else.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    mount("none", Path::new("/"), "none", libc::MS_REC | libc::MS_PRIVATE, "")?;
    mount("kvdock-test", target, "tmpfs", 0, &format!("size={size}"))
}

fn warnings(bench: &Bench) -> usize {
    bench.host.logs().iter().filter(|line| line.level == LogLevel::Warn && line.message.starts_with("degraded")).count()
}

/// The store is in trouble: it says so once, refuses to store, and reads.
fn is_degraded(bench: &Bench, kind: ErrorKind, word: &str, there: &[u64]) {
    let health = bench.store.health().unwrap();
    assert!(health.state == HealthState::Degraded && health.reason.contains(word), "{health:?}");
    for _ in 0..3 {
        let set = bench.set(&[900]);
        let error = set.result.unwrap_err();
        assert!(error.kind == kind && error.retryable, "{error}");
        assert_eq!(set.statuses[0], [PageStatus::Refused]);
    }
    assert!(bench.has_all(there), "reading goes on");
    assert_eq!(bench.prefix(there), there.len());
    let last = bench.host.health_events().last().cloned().unwrap();
    assert!(last.0 == HealthState::Degraded && last.1.contains(word), "{last:?}");
    assert_eq!(bench.host.metric("file_degraded"), Some(1.0));
    assert_eq!(warnings(bench), 1, "one line a change: {:?}", bench.host.logs());
}

fn heals(bench: &Bench) {
    wait_for("healing", || bench.store.health().unwrap().state == HealthState::Ok);
    assert_eq!(bench.host.health_events().last().unwrap().0, HealthState::Ok);
    assert_eq!(bench.host.metric("file_degraded"), Some(0.0));
    assert!(bench.set(&[901, 902]).all_ok() && bench.has_all(&[901, 902]));
}

#[test]
fn a_full_disk_degrades_and_heals() {
    let _turn = TURN.lock().unwrap_or_else(|turn| turn.into_inner());
    for small in [false, true] {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().join("disk");
        if let Err(error) = own_file_system(&dir, "8m") {
            eprintln!("mounting is not allowed here ({error}): covered by injected errors only");
            return;
        }
        let bench = Bench::at(&dir.join("store"), if small { small_pool(64) } else { large_pool(64) }, "");
        assert!(bench.set(&[1, 2, 3]).all_ok());
        let mut filler = fs::File::create(dir.join("filler")).unwrap();
        while std::io::Write::write_all(&mut filler, &[7; 65536]).is_ok() {}
        let set = bench.set(&(10..74).collect::<Vec<_>>());
        assert!(set.statuses[0].contains(&PageStatus::Refused), "{set:?}");
        is_degraded(&bench, ErrorKind::NoSpace, "full", &[1, 2, 3]);
        assert_eq!(leftovers(&dir), Vec::<std::path::PathBuf>::new());
        drop(filler);
        let numbers: Vec<u64> = (10..74).collect();
        // A start on a full disk reads too.
        let bench = bench.reopen("");
        assert!(bench.has_all(&[1, 2, 3]));
        bench.set(&[500, 501, 502, 503, 504, 505, 506, 507]);
        is_degraded(&bench, ErrorKind::NoSpace, "full", &[1, 2, 3]);
        fs::remove_file(dir.join("filler")).unwrap();
        heals(&bench);
        let bench = bench.reopen("");
        assert!(bench.which(&numbers).contains(&false) && bench.has_all(&[1, 2, 3]));
    }
}

#[test]
fn a_read_only_disk_degrades_and_heals() {
    let _turn = TURN.lock().unwrap_or_else(|turn| turn.into_inner());
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path().join("disk");
    if let Err(error) = own_file_system(&dir, "32m") {
        eprintln!("mounting is not allowed here ({error}): covered by injected errors only");
        return;
    }
    for small in [false, true] {
        let pool = || if small { small_pool(8) } else { large_pool(8) };
        let store = dir.join(format!("store-{small}"));
        Bench::at(&store, pool(), "").set(&[1, 2, 3]);
        // The system makes no file system read-only while files are open for writing, so the store is opened afterwards. (What
        // becomes of a store whose disk turns read-only under it is shown by injected errors.)
        mount("none", &dir, "none", libc::MS_REMOUNT | libc::MS_RDONLY, "").unwrap();
        let bench = Bench::at(&store, pool(), "");
        is_degraded(&bench, ErrorKind::Unavailable, "read-only", &[1, 2, 3]);
        mount("none", &dir, "none", libc::MS_REMOUNT, "").unwrap();
        heals(&bench);
    }
}

#[test]
fn injected_errors_degrade_and_heal() {
    let _turn = TURN.lock().unwrap_or_else(|turn| turn.into_inner());
    for (errno, kind, word) in [
        (libc::ENOSPC, ErrorKind::NoSpace, "full"),
        (libc::EROFS, ErrorKind::Unavailable, "read-only"),
        (libc::EDQUOT, ErrorKind::NoSpace, "quota"),
        (libc::EACCES, ErrorKind::Unavailable, "permitted"),
        (libc::EIO, ErrorKind::Unavailable, "writing fails"),
    ] {
        for pool in [large_pool(8), small_pool(8)] {
            let bench = Bench::new(pool, "");
            assert!(bench.set(&[1, 2, 3]).all_ok());
            fail_writes_with(errno);
            let set = bench.set(&[4, 5]);
            assert_eq!(set.result.unwrap_err().kind, kind);
            assert!(set.statuses[0].iter().all(|status| matches!(status, PageStatus::Refused | PageStatus::Failed)));
            is_degraded(&bench, kind, word, &[1, 2, 3]);
            fail_writes_with(0);
            heals(&bench);
        }
    }
}

#[test]
fn a_removed_directory_is_made_again_by_the_next_set() {
    let _turn = TURN.lock().unwrap_or_else(|turn| turn.into_inner());
    for more in [r#""io":"threads""#, r#""durability":"none""#] {
        for pool in [large_pool(8), small_pool(8)] {
            let bench = Bench::new(pool, more);
            assert!(bench.set(&[1, 2, 3]).all_ok());
            fs::remove_dir_all(&bench.dir).unwrap();
            let got = bench.get(&[1, 2, 3]);
            assert!(
                got.result.is_ok() && got.statuses[0].iter().all(|status| *status == PageStatus::Missing),
                "{got:?}"
            );
            assert!(!bench.dir.exists(), "reading makes nothing");
            assert!(bench.set(&[4, 5]).all_ok());
            assert_eq!(bench.which(&[1, 2, 3, 4, 5]), [false, false, false, true, true]);
            let bench = bench.reopen(more);
            assert_eq!(bench.which(&[1, 2, 3, 4, 5]), [false, false, false, true, true]);
            // Only the folders of pages.
            let folder =
                fs::read_dir(&bench.dir).unwrap().flatten().find(|entry| entry.file_name().len() == 32).unwrap().path();
            fs::remove_dir_all(&folder).unwrap();
            assert!(bench.set(&[6]).all_ok() && bench.has_all(&[6]));
        }
    }
    // A peer that makes it again is followed.
    let bench = Bench::new(large_pool(8), "");
    assert!(bench.set(&[1]).all_ok());
    fs::remove_dir_all(&bench.dir).unwrap();
    let peer = bench.peer("");
    assert!(peer.set(&[7]).all_ok());
    wait_for("following", || bench.prefix(&[7]) == 1);
    assert_eq!(bench.prefix(&[1]), 0);
    assert!(bench.has_all(&[7]));
}
