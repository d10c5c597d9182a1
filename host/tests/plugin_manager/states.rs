//! What the status tells of a backend's life.

use kvdock::plugin::BackendState::{self, *};
use kvdock::plugin::admin::{AttachMode, BackendStatus, StorageAdmin};
use kvdock::plugin::backend::{BreakerState, GuardReport, WayReport};
use serde_json::json;

use crate::support::*;

fn states(backend: &BackendStatus) -> Vec<BackendState> {
    backend.history.iter().map(|report| report.state).collect()
}

#[test]
fn each_step_of_a_life_is_kept_with_its_time_and_reason() {
    let (plugins, store, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("file", store.path())], "file", true);
    manager.attach_configured().unwrap();
    let first = manager.status().backends.remove(0);
    assert_eq!(states(&first), [Loading, Opening, Registering, Active]);
    assert!(first.in_use && first.history.windows(2).all(|pair| pair[0].since <= pair[1].since));
    assert_eq!(first.history.last().map(|report| report.since), Some(first.since));

    manager.attach(request("file", None)).unwrap();
    let status = manager.status();
    assert_eq!(status.backends.len(), 1);
    assert!(status.backends[0].instance > first.instance);
    let gone = &status.past[0];
    assert_eq!((gone.instance, gone.in_use), (first.instance, false));
    assert_eq!(states(gone), [Loading, Opening, Registering, Active, Draining, Detached]);
    assert_eq!(gone.reason, "replaced by file");

    manager.detach(Some("file"), true).unwrap();
    let status = manager.status();
    assert!(status.backends.is_empty());
    assert_eq!((status.past.len(), status.past[1].reason.as_str()), (2, "detached"));
    assert!(manager.shut_down());
}

#[test]
fn an_attach_that_failed_is_told_with_its_reason() {
    let (plugins, store, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("file", store.path())], "file", true);
    manager.attach_configured().unwrap();
    let taken = store.path().join("taken");
    std::fs::write(&taken, "no folder").unwrap();
    let nowhere = Some(json!({"plugin": "file", "dir": taken.join("such")}));
    let error = manager.attach(request_in(AttachMode::Add, "other", nowhere)).unwrap_err().to_string();
    let status = manager.status();
    assert_eq!((status.backends.len(), status.past.len()), (1, 1), "nothing has changed");
    assert_eq!((states(&status.past[0]), &status.past[0].reason), (vec![Loading, Opening, Failed], &error));
    assert!(status.transitions.iter().all(|(name, ..)| name == "file"), "what is gone has no series");
    assert!(manager.shut_down());
}

#[test]
fn the_last_that_ended_are_kept_and_no_more() {
    let (plugins, store, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("file", store.path())], "file", true);
    manager.attach_configured().unwrap();
    for _ in 0..20 {
        manager.attach(request("file", None)).unwrap();
    }
    let status = manager.status();
    assert_eq!(status.past.len(), 16);
    assert!(status.past.windows(2).all(|pair| pair[0].instance < pair[1].instance));
    let to = |state| status.transitions.iter().find(|(_, to, _)| *to == state).map(|(.., count)| *count);
    assert_eq!((to(Active), to(Detached)), (Some(21), Some(20)));
    assert!(manager.shut_down());
}

#[test]
fn a_backend_that_keeps_failing_is_degraded_until_it_works_again() {
    let (plugins, store, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let manager = manager(&sink, plugins.path(), vec![table("file", store.path())], "file", true);
    manager.attach_configured().unwrap();
    manager.check_health();
    assert_eq!(manager.status().backends[0].state, Active);
    let open = WayReport { breaker: BreakerState::Open, failures: 3, ..WayReport::default() };
    *sink.guards.lock().unwrap() = GuardReport { writes: open.clone(), ..GuardReport::default() };
    manager.check_health();
    let backend = manager.status().backends.remove(0);
    assert_eq!((backend.state, backend.reason.as_str()), (Degraded, "writes keep failing and are left alone for now"));
    assert_eq!(backend.guards.unwrap().writes, open);
    *sink.guards.lock().unwrap() = GuardReport::default();
    manager.check_health();
    assert_eq!(states(&manager.status().backends[0])[3..], [Active, Degraded, Active]);
    assert!(manager.shut_down());
}
