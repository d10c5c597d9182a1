//! One backend: attached, replaced, cleared, detached.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use kvdock::plugin::BackendState;
use kvdock::plugin::admin::{AttachMode, StorageAdmin};
use kvdock::plugin::backend::*;
use serde_json::json;

use crate::support::*;

#[test]
fn pages_go_through_an_attached_backend_and_are_there_after_it_comes_back() {
    let (plugins, store, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("file", store.path())], "file", true);
    manager.attach_configured().unwrap();
    sink.page(1).fill(0xaa);
    sink.page(2).fill(0xbb);
    assert_eq!(set(&sink, [1, 2]), [PageStatus::Ok; 2]);
    let hit = sink
        .only()
        .batch_exists(&options(), &[KEYS[0], KEYS[1], [3; 32]], &Held::default(), &ChainInfo::default())
        .unwrap();
    assert_eq!(hit.longest(), 2);

    assert_eq!(manager.detach(None, false).unwrap(), "file is detached.");
    assert!(sink.names().is_empty() && manager.status().backends.is_empty());
    assert_eq!(manager.detach(None, false).unwrap(), "no storage backend was attached.");

    manager.attach(request("file", None)).unwrap();
    assert_eq!(get(&sink, [5, 6]), [PageStatus::Ok; 2]);
    assert!(sink.page(5).iter().all(|b| *b == 0xaa) && sink.page(6).iter().all(|b| *b == 0xbb));
    let status = manager.status();
    assert_eq!(status.backends[0].state, BackendState::Active);
    assert_eq!((status.backends[0].in_flight, status.backends[0].quarantined_pages), (0, 0));
    assert!(manager.shut_down());
}

#[test]
fn h10_the_same_name_with_another_config_or_another_build_replaces_in_one_step() {
    let (plugins, one, two, sink) =
        (plugin_folder(b"one"), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("file", one.path())], "file", true);
    manager.attach_configured().unwrap();
    let first = sink.only();
    sink.page(1).fill(1);
    assert_eq!(set(&sink, [1, 1]), [PageStatus::Ok; 2]);

    let said = manager.attach(request("file", Some(json!({"dir": two.path().to_str().unwrap()})))).unwrap();
    assert!(said.contains("It replaces file."), "{said}");
    assert_ne!(sink.only().generation(), first.generation());
    assert_eq!(get(&sink, [3, 4]), [PageStatus::Missing; 2], "the other folder is empty");
    let refused = first.batch_exists(&options(), &KEYS, &Held::default(), &ChainInfo::default()).unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Unavailable, "the old instance takes no more calls");

    let old_digest = manager.status().backends[0].sha256.clone();
    let old_mappings = mappings(&old_digest);
    assert!(!old_mappings.is_empty());
    let newer = plugin_folder(b"two");
    fs::rename(newer.path().join("file.so"), plugins.path().join("file.so")).unwrap();
    manager.attach(request("file", None)).unwrap();
    let new_digest = manager.status().backends[0].sha256.clone();
    assert_ne!(new_digest, old_digest, "a newer build over the same path comes in");
    let new_mappings = mappings(&new_digest);
    assert!(!new_mappings.is_empty() && mappings(&old_digest) == old_mappings, "beside the old one");
    manager.attach(request("file", None)).unwrap();
    assert_eq!(mappings(&new_digest), new_mappings, "the same bytes make no new mapping");
    assert_eq!(get(&sink, [3, 4]), [PageStatus::Ok; 2], "the first folder again");
    assert!(manager.shut_down());
}

#[test]
fn h2_a_failed_attach_changes_nothing() {
    let (plugins, store, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("file", store.path())], "file", true);
    manager.attach_configured().unwrap();
    let before = sink.only().generation();

    let unknown = manager.attach(request("fiel", None)).unwrap_err().to_string();
    assert!(
        unknown.contains("no plugin named \"fiel\"")
            && unknown.contains("did you mean \"file\"?")
            && unknown.contains("there are: file"),
        "{unknown}"
    );
    let wrong =
        manager.attach(request("file", Some(json!({"dir": store.path(), "colour": "red"})))).unwrap_err().to_string();
    assert!(wrong.contains("colour") && wrong.contains("its keys are"), "{wrong}");
    let mut bad_policy = request("file", None);
    bad_policy.prefetch_policy = Some("never".into());
    assert!(manager.attach(bad_policy).unwrap_err().to_string().contains("never"));
    let nowhere = manager.attach(request("file", Some(json!({"dir": "/proc/none/such"})))).unwrap_err().to_string();
    assert!(nowhere.contains("/proc/none/such"), "{nowhere}");
    let mut other = request("file", None);
    other.mode = AttachMode::Replace("mooncake".into());
    assert!(manager.attach(other).unwrap_err().to_string().contains("no backend named \"mooncake\" is attached"));

    assert_eq!(sink.only().generation(), before);
    assert_eq!(set(&sink, [1, 2]), [PageStatus::Ok; 2], "it still serves");
    assert!(manager.shut_down());
}

#[test]
fn i12740_a_required_backend_that_fails_stops_the_start_and_one_that_is_not_is_shown() {
    let (plugins, sink) = (plugin_folder(b""), Sink::new());
    let broken = || vec![table("file", Path::new("/proc/none/such"))];
    let required = manager(&sink, plugins.path(), broken(), "file", true);
    assert!(required.attach_configured().unwrap_err().to_string().contains("storage backend file"));

    let optional = manager(&sink, plugins.path(), broken(), "file", false);
    optional.attach_configured().unwrap();
    let status = optional.status();
    assert_eq!(status.backends[0].state, BackendState::Failed);
    assert!(status.backends[0].reason.contains("/proc/none/such"), "{}", status.backends[0].reason);
    assert!(sink.names().is_empty());

    // An operator mends it and attaches by hand.
    let store = tempfile::tempdir().unwrap();
    optional.attach(request("file", Some(json!({"dir": store.path()})))).unwrap();
    let status = optional.status();
    assert_eq!(status.backends.len(), 1);
    assert_eq!(status.backends[0].state, BackendState::Active);
    assert!(optional.shut_down());
}

#[test]
fn policies_change_with_an_attach() {
    let (plugins, store, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("file", store.path())], "", true);
    let mut attach = request("file", None);
    attach.write_policy = Some("write_back".into());
    manager.attach(attach).unwrap();
    let status = manager.status();
    assert_eq!((status.prefetch_policy.as_str(), status.write_policy.as_str()), ("timeout", "write_back"));
    let dir = store.path().to_str().unwrap();
    let config = json!({"dir": dir, "prefetch_threshold": 32, "write_policy": "write_through_selective"});
    manager.attach(request("file", Some(config))).unwrap();
    let status = manager.status();
    assert_eq!(status.write_policy, "write_back", "a backend's own policy is no other's");
    assert_eq!(status.backends[0].settings.write_policy.as_deref(), Some("write_through_selective"));
    assert_eq!(sink.only().settings().write_policy.as_deref(), Some("write_through_selective"));
    assert_eq!(*sink.threshold.lock().unwrap(), Some(32));
    assert!(manager.shut_down());
}

#[test]
fn clearing_removes_the_pages_and_tells_the_cache() {
    let (plugins, store, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("file", store.path())], "file", true);
    assert_eq!(manager.clear(None, Duration::from_secs(5)).unwrap(), "no storage backend is attached.");
    manager.attach_configured().unwrap();
    assert_eq!(set(&sink, [1, 2]), [PageStatus::Ok; 2]);
    assert_eq!(manager.clear(None, Duration::from_secs(5)).unwrap(), "file is cleared.");
    assert_eq!(get(&sink, [3, 4]), [PageStatus::Missing; 2]);
    assert_eq!(*sink.emptied.lock().unwrap(), ["file"]);
    assert!(manager.shut_down());
}

#[test]
fn i29955_detaching_again_and_again_leaves_no_thread_and_no_file_open() {
    let (plugins, store, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("leaky", store.path())], "", true);
    // Other tests of this process open files and start threads too; ours are told by their names.
    let threads = || {
        let tasks = fs::read_dir("/proc/self/task").unwrap();
        let name = |t: std::io::Result<fs::DirEntry>| fs::read_to_string(t.ok()?.path().join("comm")).ok();
        tasks.filter_map(name).filter(|comm| comm.starts_with("kv-leaky")).count()
    };
    let files = || {
        let open = fs::read_dir("/proc/self/fd").unwrap();
        let target = |f: std::io::Result<fs::DirEntry>| fs::read_link(f.ok()?.path()).ok();
        open.filter_map(target).filter(|path| path.starts_with(store.path())).count()
    };
    for _ in 0..10 {
        manager.attach(request("leaky", None)).unwrap();
        set(&sink, [1, 2]);
        assert!(threads() > 0);
        manager.detach(Some("leaky"), true).unwrap();
    }
    // A thread that was told to end may take a moment.
    let end = Instant::now() + Duration::from_secs(5);
    while threads() > 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!((threads(), files()), (0, 0));
    assert!(manager.shut_down());
}
