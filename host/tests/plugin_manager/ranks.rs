//! A backend of a model of several ranks: an instance for each, attached and detached together.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use kvdock::plugin::BackendState;
use kvdock::plugin::admin::{AttachMode, StorageAdmin};
use kvdock::plugin::backend::*;
use kvdock_plugin_api::PageStatus::{Missing, Ok as There};

use crate::support::*;

/// A sink for two ranks, and the one whose pool is the second rank's.
fn two() -> (Arc<Sink>, Arc<Sink>) {
    let (first, second) = (Sink::new(), Sink::new());
    first.further.lock().unwrap().push(second.pool.clone());
    (first, second)
}

/// Files below `dir` that this process has open: an instance of the file plugin that lives has some.
fn open_below(dir: &Path) -> usize {
    let dir = dir.canonicalize().unwrap();
    let open = fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    open.filter(|file| file.starts_with(&dir)).count()
}

/// Namespaces in a store, as (rank, ranks).
fn ranks_in(dir: &Path) -> Vec<(u64, u64)> {
    let folders = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut ranks: Vec<(u64, u64)> = folders
        .filter_map(|folder| {
            let json: serde_json::Value =
                serde_json::from_slice(&fs::read(folder.join("namespace.json")).ok()?).unwrap();
            Some((json["tp"][0].as_u64().unwrap(), json["tp"][1].as_u64().unwrap()))
        })
        .collect();
    ranks.sort_unstable();
    ranks
}

#[test]
fn pages_of_every_rank_are_stored_and_read_as_one() {
    let (plugins, dir) = (plugin_folder(b""), tempfile::tempdir().unwrap());
    let (sink, second) = two();
    let manager = manager(&sink, plugins.path(), vec![table("file", dir.path())], "file", true);
    manager.attach_configured().unwrap();
    let states: Vec<BackendState> = manager.status().backends[0].history.iter().map(|report| report.state).collect();
    assert_eq!(states.last(), Some(&BackendState::Active), "{states:?}");
    assert_eq!(ranks_in(dir.path()), [(0, 2), (1, 2)]);
    for (page, byte) in [(0, 1), (1, 2)] {
        sink.page(page).fill(byte);
        second.page(page).fill(0x80 | byte);
    }
    assert_eq!(set(&sink, [0, 1]), [There, There]);
    assert_eq!(get(&sink, [2, 3]), [There, There]);
    assert!(sink.page(2).iter().all(|byte| *byte == 1) && sink.page(3).iter().all(|byte| *byte == 2));
    assert!(second.page(2).iter().all(|byte| *byte == 0x81) && second.page(3).iter().all(|byte| *byte == 0x82));
    assert!(open_below(dir.path()) > 0);
    // The second rank's store loses what it has.
    let gone = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).find(|folder| {
        fs::read_to_string(folder.join("namespace.json")).is_ok_and(|json| json.contains("\"tp\":[1,2]"))
    });
    manager.detach(None, false).unwrap();
    fs::remove_dir_all(gone.unwrap()).unwrap();
    manager.attach(request("file", None)).unwrap();
    let chain = ChainInfo::default();
    let found = sink.only().batch_exists(&options(), &KEYS, &Held::default(), &chain).unwrap();
    assert_eq!(found.longest(), 0, "what the first rank has alone is of no use");
    assert_eq!(get(&sink, [2, 3]), [Missing, Missing]);
    assert!(manager.shut_down());
    assert_eq!(open_below(dir.path()), 0, "the instances of both are closed");
}

#[test]
fn h11_an_attach_that_fails_on_one_rank_is_undone_on_all() {
    let (plugins, dir) = (plugin_folder(b""), tempfile::tempdir().unwrap());
    let (sink, second) = two();
    let manager = manager(&sink, plugins.path(), vec![table("near", dir.path())], "near", true);
    manager.attach_configured().unwrap();
    let near = sink.only();
    // The pages of the second rank would lie outside of its memory.
    let wrong = HostPoolDescription { pages: 1 << 20, ..second.pool.clone() };
    *sink.further.lock().unwrap() = vec![wrong];
    let far = tempfile::tempdir().unwrap();
    let config = serde_json::json!({ "plugin": "file", "dir": far.path().to_str().unwrap(), "min_free_bytes": 0 });
    let error = manager.attach(request_in(AttachMode::Add, "far", Some(config.clone()))).unwrap_err().to_string();
    assert!(error.starts_with("storage backend far: rank 1 of 2: "), "{error}");
    assert!(!ranks_in(far.path()).is_empty(), "the first rank was open");
    assert_eq!(open_below(far.path()), 0, "and is closed again");
    assert!(Arc::ptr_eq(&near, &sink.only()), "nothing has changed");
    assert_eq!(manager.status().backends.len(), 1);
    let past = manager.status().past;
    assert_eq!(
        past.iter().map(|past| (past.name.as_str(), past.state)).collect::<Vec<_>>(),
        [("far", BackendState::Failed)]
    );
    // Once it can be, it is attached.
    *sink.further.lock().unwrap() = vec![second.pool.clone()];
    manager.attach(request_in(AttachMode::Add, "far", Some(config))).unwrap();
    assert_eq!(sink.names(), ["near", "far"]);
    assert!(manager.shut_down());
    assert_eq!(open_below(far.path()), 0);
}

#[test]
fn pools_of_another_number_of_ranks_are_refused() {
    let (plugins, dir) = (plugin_folder(b""), tempfile::tempdir().unwrap());
    let (sink, _) = two();
    let manager = manager(&sink, plugins.path(), vec![table("file", dir.path())], "", true);
    sink.further.lock().unwrap().clear();
    let error = manager.attach(request("file", None)).unwrap_err().to_string();
    assert_eq!(error, "there are host pools of 1 ranks, but the model has 2");
}
