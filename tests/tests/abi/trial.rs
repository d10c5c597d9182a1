//! The trial version 0.2, which this program knows in its tests only.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvdock::plugin::backend::{CallOptions, ChainInfo, PageStatus, PoolGroup};
use kvdock::plugin::inspect::inspect_with;
use kvdock::plugin::library::{load, load_with};
use kvdock::plugin::{AbiVersions, Reason};
use kvdock_abi_trial::v0_2;
use kvdock_plugin_api::{ErrorKind, note, v0_1};
use kvdock_tests::frozen;

use crate::host_0_2::{Host0_2, KNOWS_0_2, KNOWS_BOTH};
use crate::pool::Host;

/// A folder with the plugin that has tables for 0.1 and 0.2. Bytes after the end of an ELF file make it another library, so that tests do
/// not share one.
fn trial_plugin(tail: &[u8]) -> (tempfile::TempDir, PathBuf) {
    // Cargo builds it with the test, and beside it.
    let built = std::env::current_exe().unwrap().with_file_name("libkvdock_abi_trial.so");
    let bytes = fs::read(&built).unwrap_or_else(|error| panic!("{}: {error}", built.display()));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trial.so");
    fs::write(&path, [bytes.as_slice(), tail].concat()).unwrap();
    (folder, path)
}

#[test]
fn a_frozen_0_1_plugin_serves_in_a_host_that_also_knows_0_2() {
    let folder = tempfile::tempdir().unwrap();
    let path = frozen::rust_plugin("0.1", folder.path());
    assert_eq!(inspect_with(KNOWS_BOTH, &path).unwrap().abi, "0.1");
    let plugin = Host0_2::behind(load_with(KNOWS_BOTH, &path, None).unwrap().face());
    assert!(plugin.is_adapted());
    plugin.priority.store(7, Ordering::SeqCst);

    let host = Host::attach(KNOWS_BOTH, folder.path(), "frozen-rust").unwrap();
    host.serves();
    assert_eq!(plugin.pinned(), 0, "a figure that it does not give is unknown");
    let (status, message) = plugin.pin(&[[1; 32]]);
    assert_eq!(ErrorKind::from_raw(status), ErrorKind::Unsupported, "a function that it lacks");
    assert!(message.contains("pinning pages"), "{message}");
    host.end();
}

#[test]
fn a_frozen_c_plugin_serves_in_a_host_that_also_knows_0_2() {
    let folder = tempfile::tempdir().unwrap();
    let path = frozen::c_plugin("0.1", folder.path());
    assert!(Host0_2::behind(load_with(KNOWS_BOTH, &path, None).unwrap().face()).is_adapted());
    let host = Host::attach(KNOWS_BOTH, folder.path(), "frozen-c").unwrap();
    host.serves();
    host.end();
}

#[test]
fn a_plugin_with_both_tables_serves_in_a_host_that_knows_0_1_only() {
    let (folder, path) = trial_plugin(b"in an old host");
    let library = load(&path, None).unwrap();
    assert_eq!(
        (library.info.abi, library.info.note.abi.as_slice()),
        ("0.1", ["0.1".to_owned(), "0.2".to_owned()].as_slice())
    );
    let host = Host::attach(AbiVersions::BUILT_IN, folder.path(), "abi-trial").unwrap();
    host.serves();
    host.end();
}

#[test]
fn a_plugin_with_both_tables_is_called_by_0_2_in_a_host_that_knows_both() {
    let (folder, path) = trial_plugin(b"in a new host");
    let library = load_with(KNOWS_BOTH, &path, None).unwrap();
    assert_eq!(library.info.abi, "0.2");
    let plugin = Host0_2::behind(library.face());
    assert!(!plugin.is_adapted());
    let host = Host::attach(KNOWS_BOTH, folder.path(), "abi-trial").unwrap();
    host.serves();
    assert_eq!(plugin.pinned(), 0);

    // What is new arrives: an argument, a function, a figure.
    plugin.priority.store(7, Ordering::SeqCst);
    host.fill(0, 99);
    let mut status = [PageStatus::Unset];
    let options = CallOptions::within(Duration::from_secs(20));
    host.backend().batch_set(&options, PoolGroup::Full, &[[77; 32]], &[0], &ChainInfo::default(), &mut status).unwrap();
    assert_eq!((status, plugin.pinned()), ([PageStatus::Ok], 1), "a page that is set with a priority is pinned");
    assert_eq!(plugin.pin(&[[1; 32], [3; 32]]), (0, String::new()));
    assert_eq!(plugin.pinned(), 3);
    host.end();
}

#[test]
fn hosts_of_different_versions_share_one_mapping() {
    let (_folder, path) = trial_plugin(b"in two hosts");
    let old = load(&path, None).unwrap();
    let new = load_with(KNOWS_BOTH, &path, None).unwrap();
    assert_eq!((old.info.abi, new.info.abi), ("0.1", "0.2"));
    let (old, new) = (old.table().unwrap(), new.table().unwrap());
    assert!(std::ptr::eq(old, new), "the same bytes are mapped once, whatever host asks");
}

/// A C library with a note and a constructor that leaves a file behind.
fn traced(folder: &Path, name: &str, abi: &str, types: &str, digest: &str) -> (PathBuf, PathBuf) {
    let trace = folder.join(format!("{name}-ran"));
    let json = serde_json::json!({
        "note": 1, "name": name, "version": "1", "license": "Apache-2.0", "abi": [abi], "panic": "unwind",
        "capabilities": {}, "config_schema": {}, "types": {abi: types}, "types_sha256": {abi: digest},
    })
    .to_string();
    let source = format!(
        r#"#include <stdio.h>
struct note {{ unsigned owner_len, len, type; char owner[8]; char json[{room}]; }};
__attribute__((section(".note.kvdock"), used, aligned(4))) static const struct note note = {{ 7, {len}, {kind}u, "kvdock", {json} }};
__attribute__((constructor)) static void ran(void) {{ FILE *file = fopen({trace}, "w"); if (file) fclose(file); }}
const void *kvdock_plugin_entry(unsigned version) {{ return 0; }}
"#,
        room = (json.len() + 1).next_multiple_of(4),
        len = json.len(),
        kind = note::NOTE_TYPE,
        json = serde_json::to_string(&json).unwrap(),
        trace = serde_json::to_string(trace.to_str().unwrap()).unwrap(),
    );
    let (input, output) = (folder.join(format!("{name}.c")), folder.join(format!("{name}.so")));
    fs::write(&input, source).unwrap();
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&output).arg(&input).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    (output, trace)
}

fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_plugin_with_0_2_only_is_refused_by_a_0_1_host_before_its_code_runs() {
    let folder = tempfile::tempdir().unwrap();
    let digest = hex(&v0_2::VERSION.types_sha256);
    let (path, trace) = traced(folder.path(), "newer", "0.2", v0_2::TYPES_TEXT, &digest);
    let refusal = load(&path, None).unwrap_err();
    assert_eq!(refusal.reason, Reason::OtherAbi { expected: "0.1".into(), found: "0.2".into() });
    assert!(refusal.to_string().contains("expected ABI version 0.1, found 0.2"), "{refusal}");
    let error = Host::attach(AbiVersions::BUILT_IN, folder.path(), "newer").err().expect("it is refused");
    assert!(error.contains("expected ABI version 0.1, found 0.2"), "{error}");
    assert!(!trace.exists(), "none of its code has run");
    // A host that knows 0.2 takes its note; then its entry has no table, against its own word.
    assert_eq!(inspect_with(KNOWS_BOTH, &path).unwrap().abi, "0.2");
    assert!(load_with(KNOWS_BOTH, &path, None).unwrap_err().to_string().contains("against its own note"));
    assert!(trace.exists(), "the trace works");
}

#[test]
fn refusals_name_every_version_of_the_host() {
    let folder = tempfile::tempdir().unwrap();
    let (path, _) = traced(folder.path(), "far", "7.3", "", "");
    let text = load_with(KNOWS_BOTH, &path, None).unwrap_err().to_string();
    assert!(text.contains("expected ABI version 0.1 or 0.2, found 7.3"), "{text}");
    // Types of 0.1 under the name of 0.2.
    let (path, trace) = traced(folder.path(), "mixed", "0.2", v0_1::TYPES_TEXT, &hex(&v0_1::TYPES_DIGEST));
    let text = load_with(KNOWS_BOTH, &path, None).unwrap_err().to_string();
    assert!(text.contains("types of ABI version 0.2 differ from this host's, which knows 0.1 or 0.2"), "{text}");
    assert!(text.contains("BatchArgs: expected priority: u32"), "{text}");
    assert!(!trace.exists());
}

#[test]
fn a_host_that_has_dropped_0_1_refuses_its_plugins_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let path = frozen::c_plugin("0.1", folder.path());
    let text = load_with(KNOWS_0_2, &path, None).unwrap_err().to_string();
    assert!(text.contains("expected ABI version 0.2, found 0.1"), "{text}");
}
