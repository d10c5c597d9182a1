//! `kvdock plugin bench`: what it measures, and that a plugin which misbehaves is an error and no crash.

use std::collections::BTreeSet;
use std::path::Path;

use kvdock_tests::{broken, paths};
use serde_json::Value;

use crate::build::{Installed, argument, kvdock_plugin, text};

/// The lines of a file with results.
fn lines(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Measures a plugin that is expected to fail, and answers what was printed.
fn fails(path: &Path, arguments: &[&str]) -> String {
    let output = kvdock_plugin(&[&["bench", "--quick", argument(path)], arguments].concat());
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    text(&output)
}

#[test]
fn every_call_is_measured_in_every_shape_and_nothing_is_left_behind() {
    let folder = tempfile::tempdir_in(paths::build()).unwrap();
    let json = folder.path().join("results.jsonl");
    let scratch = folder.path().join("scratch");
    std::fs::create_dir(&scratch).unwrap();
    let plugin = Installed::new(&paths::file_plugin());
    let arguments = ["--quick", "--scratch", argument(&scratch), "--json", argument(&json)];
    let output = kvdock_plugin(&[&["bench", argument(&plugin.file)], &arguments[..]].concat());
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("throughput") && text(&output).contains("GiB/s"), "{}", text(&output));
    assert_eq!(std::fs::read_dir(&scratch).unwrap().count(), 0, "the scratch folder is empty again");

    let lines = lines(&json);
    assert_eq!((&lines[0]["plugin"], &lines[0]["quick"]), (&Value::from("file"), &Value::from(true)));
    let rows: Vec<&Value> = lines[1..].iter().filter(|line| line["call"].is_string()).collect();
    let first = lines.iter().find(|line| line["page_bytes"] == 65536 && line["batch"] == 32 && line["threads"] == 4);
    assert!(first.is_some(), "{lines:?}");
    let calls: BTreeSet<&str> = rows.iter().map(|row| row["call"].as_str().unwrap()).collect();
    for call in ["copy", "set", "exists", "get"] {
        assert!(calls.contains(call), "{call} is missing in {calls:?}");
    }
    for row in rows {
        assert_eq!((row["bad"].as_u64(), row["refused"].as_u64()), (Some(0), Some(0)), "{row}");
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("calls") >= 1.0 && number("pages_per_second") > 0.0, "{row}");
        assert!(number("p50_us") <= number("p99_us") && number("p50_us") > 0.0, "{row}");
        let moves_bytes = !matches!(row["call"].as_str(), Some("copy" | "exists"));
        assert_eq!(row["of_copy"].is_f64(), moves_bytes, "{row}");
    }
}

#[test]
fn a_bench_with_little_time_leaves_no_size_out() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("results.jsonl");
    let plugin = Installed::new(&paths::file_plugin());
    let output = kvdock_plugin(&["bench", argument(&plugin.file), "--seconds", "1", "--json", argument(&json)]);
    assert!(output.status.success(), "{}", text(&output));
    let sizes: BTreeSet<u64> = lines(&json).iter().filter_map(|line| line["page_bytes"].as_u64()).collect();
    assert_eq!(sizes, BTreeSet::from([64 << 10, 1 << 20, 4 << 20]), "{}", text(&output));
}

#[test]
fn a_full_store_is_measured_as_far_as_it_goes() {
    let folder = tempfile::tempdir().unwrap();
    let plugin = broken::plugin(folder.path(), "small", "none");
    let output = kvdock_plugin(&["bench", "--quick", argument(&plugin), "--config", r#"{"max_bytes": 3000000}"#]);
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("the store is full"), "{}", text(&output));
}

#[test]
fn what_is_no_plugin_or_no_config_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("libtext.so");
    std::fs::write(&file, "hello").unwrap();
    assert!(fails(&file, &[]).contains("found a text file"));
    let plugin = broken::plugin(folder.path(), "right", "none");
    assert!(fails(&plugin, &["--config", "{"]).contains("--config"));
    assert!(fails(&plugin, &["--config", "[]"]).contains("expected a JSON object"));
    assert!(fails(&plugin, &["--config", r#"{"max_bytes": "many"}"#]).contains("storage.right.max_bytes"));
    assert!(fails(&plugin, &["--json", "/no/such/folder/file"]).contains("/no/such/folder/file"));
    assert!(fails(&plugin, &["--scratch", "/no/such/folder"]).contains("/no/such/folder"));
}

#[test]
fn a_panic_an_error_and_wrong_bytes_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    for (fault, part) in [
        ("panic_in_get", "batch_get: internal: the plugin panicked"),
        ("panic_in_open", "open: internal: the plugin panicked"),
        ("error_fatal", "batch_set: "),
        ("garbage_get", "holds other bytes than were stored"),
        ("nothing_get", "holds other bytes than were stored"),
    ] {
        let plugin = broken::plugin(folder.path(), fault, fault);
        let text = fails(&plugin, &[]);
        assert!(text.contains(part), "{fault}: {text}");
    }
}

#[test]
fn a_plugin_that_ends_its_process_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let plugin = broken::plugin(folder.path(), "aborts", "abort_in_check");
    let text = fails(&plugin, &[]);
    assert!(text.contains("ended its process (SIGABRT") && text.contains("during open"), "{text}");
}

#[test]
fn a_plugin_that_hangs_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let plugin = broken::plugin(folder.path(), "hangs", "hang_in_get");
    let text = fails(&plugin, &[]);
    assert!(text.contains("the plugin hangs in batch_get (32 of 64 KiB, 1 thread)"), "{text}");
}
