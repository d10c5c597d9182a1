//! Several backends at once.

use std::path::Path;

use kvdock::plugin::BackendState;
use kvdock::plugin::admin::{AttachMode, StorageAdmin};
use serde_json::json;

use crate::support::*;

fn config_at(dir: &Path) -> Option<serde_json::Value> {
    Some(json!({"plugin": "file", "dir": dir, "min_free_bytes": 0}))
}

#[test]
fn backends_stand_in_the_order_of_the_config_whenever_they_come() {
    let (plugins, dir, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let tables = ["near", "middle", "far"].map(|name| table(name, &dir.path().join(name)));
    let manager = manager(&sink, plugins.path(), tables.to_vec(), "near,middle,far", true);
    manager.attach_configured().unwrap();
    assert_eq!(sink.names(), ["near", "middle", "far"]);

    assert_eq!(manager.detach(Some("middle"), false).unwrap(), "middle is detached.");
    assert_eq!(sink.names(), ["near", "far"], "the others stay");
    let stranger = dir.path().join("stranger");
    manager.attach(request_in(AttachMode::Add, "stranger", config_at(&stranger))).unwrap();
    manager.attach(request_in(AttachMode::Add, "middle", None)).unwrap();
    let order = ["near", "middle", "far", "stranger"];
    assert_eq!(sink.names(), order, "in its place; a name that is not in the list stands at the end");
    let shown: Vec<String> = manager.status().backends.into_iter().map(|backend| backend.name).collect();
    assert_eq!(shown, order);

    let error = manager.attach(request_in(AttachMode::Add, "far", None)).unwrap_err().to_string();
    assert!(error.starts_with("far is attached already"), "{error}");
    let error = manager.detach(Some("fat"), false).unwrap_err().to_string();
    assert_eq!(error, "no backend named \"fat\" is attached; there are: near, middle, far, stranger");
    assert_eq!(sink.names(), order);
    let said = manager.detach(None, false).unwrap();
    assert_eq!(said, "near is detached. middle is detached. far is detached. stranger is detached.");
    assert!(sink.names().is_empty() && manager.shut_down());
}

#[test]
fn one_of_several_is_replaced_by_name_and_keeps_its_place() {
    let (plugins, dir, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let tables = ["near", "far"].map(|name| table(name, &dir.path().join(name)));
    let manager = manager(&sink, plugins.path(), tables.to_vec(), "near,far", true);
    manager.attach_configured().unwrap();
    let other = dir.path().join("other");
    let error = manager.attach(request("other", config_at(&other))).unwrap_err().to_string();
    assert!(error.contains("several backends are attached (near, far): kvdock_backend"), "{error}");
    let error = manager.attach(request_in(AttachMode::Replace("near".into()), "far", None)).unwrap_err().to_string();
    assert_eq!(error, "far is attached already and can't replace near too");

    let said = manager.attach(request_in(AttachMode::Replace("near".into()), "other", config_at(&other))).unwrap();
    assert!(said.ends_with(" It replaces near."), "{said}");
    assert_eq!(sink.names(), ["other", "far"]);
    // Its own config again, in another folder.
    let again = config_at(&dir.path().join("again"));
    manager.attach(request_in(AttachMode::Replace("far".into()), "far", again)).unwrap();
    assert_eq!(sink.names(), ["other", "far"]);
    assert!(manager.status().backends[1].config["dir"].as_str().unwrap().ends_with("again"));
    assert!(manager.shut_down());
}

#[test]
fn one_plugin_runs_as_two_backends_with_stores_of_their_own() {
    let (plugins, dir, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let mut far = table("far", &dir.path().join("far"));
    far.settings.concurrency = Some(1);
    let tables = vec![table("near", &dir.path().join("near")), far];
    let manager = manager(&sink, plugins.path(), tables, "near,far", true);
    manager.attach_configured().unwrap();
    let status = manager.status();
    assert_eq!((status.backends[0].plugin.as_str(), status.backends[1].plugin.as_str()), ("file", "file"));
    assert_ne!(status.backends[0].instance, status.backends[1].instance);
    let far = sink.in_use.lock().unwrap()[1].clone();
    assert_eq!((far.settings().concurrency, far.limits().concurrency), (Some(1), 1));
    assert!(dir.path().join("near").is_dir() && dir.path().join("far").is_dir());
    assert!(manager.shut_down());
}

#[test]
fn a_required_backend_that_fails_takes_those_attached_before_it_down_again() {
    let (plugins, dir, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let tables = vec![table("good", dir.path()), table("bad", Path::new("/proc/none/such"))];
    let manager = manager(&sink, plugins.path(), tables, "good,bad", true);
    let error = manager.attach_configured().unwrap_err().to_string();
    assert!(error.contains("storage backend bad") && error.contains("/proc/none/such"), "{error}");
    assert!(sink.names().is_empty() && manager.status().backends.is_empty());
    let past = manager.status().past;
    assert_eq!(past.iter().map(|backend| backend.name.as_str()).collect::<Vec<_>>(), ["bad", "good"]);
    assert!(manager.shut_down());
}

#[test]
fn a_backend_that_failed_at_the_start_keeps_its_place() {
    let (plugins, dir, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let tables = vec![table("bad", Path::new("/proc/none/such")), table("good", &dir.path().join("good"))];
    let manager = manager(&sink, plugins.path(), tables, "bad,good", false);
    manager.attach_configured().unwrap();
    assert_eq!(sink.names(), ["good"]);
    let status = manager.status();
    assert_eq!((status.backends[0].name.as_str(), status.backends[0].state), ("bad", BackendState::Failed));
    assert_eq!((status.backends[1].name.as_str(), status.backends[1].state), ("good", BackendState::Active));

    let mended = config_at(&dir.path().join("mended"));
    let error = manager.attach(request("bad", mended.clone())).unwrap_err().to_string();
    assert!(error.contains("several backends"), "good must not be replaced by mistake: {error}");
    manager.attach(request_in(AttachMode::Add, "bad", mended)).unwrap();
    assert_eq!(sink.names(), ["bad", "good"]);
    assert_eq!(manager.status().backends.len(), 2);
    assert!(manager.shut_down());
}

#[test]
fn clearing_one_leaves_the_other_as_it_is() {
    let (plugins, dir, sink) = (plugin_folder(b""), tempfile::tempdir().unwrap(), Sink::new());
    let tables = ["near", "far"].map(|name| table(name, &dir.path().join(name)));
    let manager = manager(&sink, plugins.path(), tables.to_vec(), "near,far", true);
    manager.attach_configured().unwrap();
    assert_eq!(manager.clear(Some("far"), std::time::Duration::from_secs(5)).unwrap(), "far is cleared.");
    assert_eq!(*sink.emptied.lock().unwrap(), ["far"]);
    let error = manager.clear(Some("fur"), std::time::Duration::from_secs(5)).unwrap_err().to_string();
    assert!(error.contains("there are: near, far"), "{error}");
    assert!(manager.shut_down());
}
