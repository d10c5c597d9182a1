//! Finding, refusing and mapping plugin files. Wrong files are made from the real file plugin by changing its bytes.

#![allow(clippy::unwrap_used)] // Also in the helpers, which the lint does not take for tests.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use kvdock::plugin::library::{load, loaded_count};
use kvdock::plugin::{Reason, Refusal, discover, find, inspect};
use kvdock_plugin_api::v0_1;

/// The built file plugin.
fn file_plugin() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let target = exe.ancestors().nth(2).unwrap();
    let path = target.join("libkvdock_plugin_file.so");
    assert!(path.is_file(), "{} is missing: run the tests with `cargo xtask test`", path.display());
    path
}

fn folder() -> tempfile::TempDir {
    // Mode 0700, as a plugin's folder should be.
    tempfile::tempdir().unwrap()
}

/// A copy of the file plugin in which every `from` is replaced by `to`, which has the same length.
fn changed(folder: &Path, name: &str, from: &[u8], to: &[u8]) -> PathBuf {
    assert_eq!(from.len(), to.len());
    let mut bytes = fs::read(file_plugin()).unwrap();
    let places: Vec<usize> =
        bytes.windows(from.len()).enumerate().filter(|(_, w)| *w == from).map(|(i, _)| i).collect();
    assert!(!places.is_empty(), "{:?} is not in the plugin", String::from_utf8_lossy(from));
    for place in places {
        bytes[place..place + to.len()].copy_from_slice(to);
    }
    write(folder, name, &bytes)
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn refusal(path: &Path) -> Refusal {
    let refusal = inspect(path).unwrap_err();
    // Loading refuses for the same reason.
    assert_eq!(load(path, None).unwrap_err(), refusal);
    assert!(refusal.to_string().starts_with(&path.display().to_string()), "{refusal}");
    refusal
}

/// Compiles a C file to a shared library.
fn compile(folder: &Path, name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let (input, output) = (folder.join(format!("{name}.c")), folder.join(format!("{name}.so")));
    fs::write(&input, source).unwrap();
    let status =
        Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&output).arg(&input).args(flags).status().unwrap();
    assert!(status.success());
    output
}

#[test]
fn the_note_of_the_file_plugin_says_who_it_is() {
    let info = inspect(&file_plugin()).unwrap();
    assert_eq!(info.note.name, "file");
    assert_eq!(info.note.abi, ["0.1"]);
    assert_eq!(info.note.license, "Apache-2.0");
    assert_eq!(info.note.panic, "unwind");
    assert!(info.note.capabilities.durable && info.note.capabilities.remove);
    assert!(info.note.config_schema["properties"]["dir"].is_object());
}

#[test]
fn a_text_file_is_no_plugin() {
    let folder = folder();
    let refusal = refusal(&write(folder.path(), "notes.so", b"dear reader"));
    assert_eq!(refusal.reason, Reason::NotElf("a text file".into()));
}

#[test]
fn a_library_for_another_machine_is_refused_with_both_names() {
    let folder = folder();
    let mut bytes = fs::read(file_plugin()).unwrap();
    let other: u16 = if cfg!(target_arch = "aarch64") { 62 } else { 183 };
    bytes[18..20].copy_from_slice(&other.to_le_bytes());
    let refusal = refusal(&write(folder.path(), "other.so", &bytes));
    assert!(matches!(&refusal.reason, Reason::OtherMachine { expected, found } if expected != found), "{refusal}");
}

#[test]
fn a_library_without_a_note_is_refused_when_named_and_passed_over_in_a_search() {
    let folder = folder();
    let path = compile(folder.path(), "plain", "int plain(void) { return 1; }", &[]);
    assert!(matches!(refusal(&path).reason, Reason::NoNote { .. }));
    let found = discover(&[folder.path().to_owned()]);
    assert!(found.plugins.is_empty() && found.refused.is_empty());
}

#[test]
fn a_plugin_of_another_abi_version_is_refused() {
    let folder = folder();
    let path = changed(folder.path(), "abi.so", b"\"abi\":[\"0.1\"]", b"\"abi\":[\"7.3\"]");
    assert_eq!(refusal(&path).reason, Reason::OtherAbi { expected: "0.1".into(), found: "7.3".into() });
}

#[test]
fn a_changed_struct_is_refused_with_the_difference_in_words() {
    let folder = folder();
    let path = changed(folder.path(), "layout.so", b"page_tokens:", b"page_tokenz:");
    let text = refusal(&path).to_string();
    assert!(text.contains("expected page_tokens: u32") && text.contains("found page_tokenz: u32"), "{text}");
}

#[test]
fn a_plugin_that_aborts_on_panic_is_refused() {
    let folder = folder();
    let path = changed(folder.path(), "abort.so", b"\"panic\":\"unwind\"", b"\"panic\": \"abort\"");
    assert_eq!(refusal(&path).reason, Reason::PanicAbort("abort".into()));
}

#[test]
fn a_plugin_without_the_entry_symbol_is_refused() {
    let folder = folder();
    let path = changed(folder.path(), "entry.so", b"kvdock_plugin_entry\0", b"kvdock_plugin_entrv\0");
    assert_eq!(refusal(&path).reason, Reason::NoEntry(v0_1::ENTRY_SYMBOL));
}

#[test]
fn damaged_files_are_refused_and_never_crash() {
    let folder = folder();
    let bytes = fs::read(file_plugin()).unwrap();
    let step = (bytes.len() / 40).max(1);
    for len in (0..bytes.len()).step_by(step).chain([3, 4, 19, 63, 64, 65]) {
        let path = write(folder.path(), "short.so", &bytes[..len]);
        assert!(inspect(&path).is_err(), "{len} bytes of it pass");
    }
}

/// A plugin that loads, and whose constructor leaves a trace, so that a test sees whether any of its code ran.
fn tracing_plugin(folder: &Path) -> (PathBuf, PathBuf) {
    let trace = folder.join("constructor-ran");
    let types = serde_json::to_string(v0_1::TYPES_TEXT).unwrap();
    let digest: String = v0_1::TYPES_DIGEST.iter().map(|b| format!("{b:02x}")).collect();
    let json = format!(
        r#"{{"note":1,"name":"traced","version":"1","license":"X","abi":["0.1"],"panic":"unwind","capabilities":{{}},"config_schema":{{}},"types":{{"0.1":{types}}},"types_sha256":{{"0.1":"{digest}"}}}}"#
    );
    // The table's head is enough for the loader; no function of it is called.
    let source = format!(
        r#"
#include <stdio.h>
struct note {{ unsigned owner_len, len, type; char owner[8]; char json[{len}]; }};
__attribute__((section(".note.kvdock"), used, aligned(4))) static const struct note note = {{ 7, {text_len}, {kind}u, "kvdock", {json} }};
__attribute__((constructor)) static void start(void) {{ FILE *f = fopen("{trace}", "w"); if (f) fclose(f); }}
static struct {{ unsigned long size; unsigned version, reserved; void *rest[{rest}]; }} table = {{ {size}, 1, 0, {{ 0 }} }};
const void *kvdock_plugin_entry(unsigned version) {{ return version == 1 ? &table : 0; }}
"#,
        json = serde_json::to_string(&json).unwrap(),
        len = (json.len() + 1).next_multiple_of(4),
        text_len = json.len(),
        kind = kvdock_plugin_api::note::NOTE_TYPE,
        trace = trace.display(),
        size = size_of::<v0_1::BackendTable>(),
        rest = (size_of::<v0_1::BackendTable>() - 16) / 8,
    );
    (compile(folder, "traced", &source, &[]), trace)
}

/// The bytes with `from` replaced by `to`, wherever it stands.
fn with(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = bytes.to_vec();
    let places: Vec<usize> = (0..=bytes.len() - from.len()).filter(|at| bytes[*at..].starts_with(from)).collect();
    assert!(!places.is_empty(), "{:?} is not in the plugin", String::from_utf8_lossy(from));
    places.into_iter().for_each(|at| bytes[at..at + to.len()].copy_from_slice(to));
    bytes
}

#[test]
fn no_code_of_a_refused_plugin_runs() {
    let folder = folder();
    let (path, trace) = tracing_plugin(folder.path());
    let right = fs::read(&path).unwrap();
    let mut other_machine = right.clone();
    let other: u16 = if cfg!(target_arch = "aarch64") { 62 } else { 183 };
    other_machine[18..20].copy_from_slice(&other.to_le_bytes());
    let wrong: [(&str, Vec<u8>, &[&str]); 6] = [
        ("other_machine", other_machine, &["x86_64", "aarch64"]),
        ("text", b"int main(void) { return 0; }".to_vec(), &["expected an ELF", "a text file"]),
        ("other_abi", with(&right, b"\"abi\":[\"0.1\"]", b"\"abi\":[\"7.3\"]"), &["0.1", "7.3"]),
        ("struct", with(&right, b"page_tokens:", b"page_tokenz:"), &["page_tokens: u32", "page_tokenz: u32"]),
        ("abort", with(&right, b"\"panic\":\"unwind\"", b"\"panic\": \"abort\""), &["unwind", "abort"]),
        ("entry", with(&right, b"kvdock_plugin_entry\0", b"kvdock_plugin_entrv\0"), &["kvdock_plugin_entry"]),
    ];
    for (name, bytes, words) in wrong {
        let text = refusal(&write(folder.path(), &format!("{name}.so"), &bytes)).to_string();
        for word in words {
            assert!(text.contains(word), "{name}: {word:?} is not in {text:?}");
        }
        assert!(!trace.exists(), "{name}: its constructor ran");
    }
    // The same plugin as it was built is loaded, and leaves its trace: what was looked for above would have been there.
    assert_eq!(load(&path, None).unwrap().info.note.name, "traced");
    assert!(trace.exists());
}

#[test]
fn a_file_or_folder_that_others_may_write_is_refused() {
    let folder = folder();
    let path = write(folder.path(), "file.so", &fs::read(file_plugin()).unwrap());
    fs::set_permissions(&path, fs::Permissions::from_mode(0o664)).unwrap();
    assert!(matches!(refusal(&path).reason, Reason::Unsafe { .. }));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(inspect(&path).is_ok());
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    assert!(matches!(refusal(&path).reason, Reason::Unsafe { .. }));
}

#[test]
fn the_first_file_of_a_name_wins_and_others_are_shown_as_shadowed() {
    let (one, two) = (folder(), folder());
    let bytes = fs::read(file_plugin()).unwrap();
    let first = write(one.path(), "a.so", &bytes);
    write(one.path(), "b.so", &bytes);
    write(two.path(), "a.so", &bytes);
    let folders = [one.path().to_owned(), two.path().to_owned()];
    let found = discover(&folders);
    assert_eq!(found.plugins.len(), 3);
    assert_eq!(found.plugins[0].shadowed_by, None);
    assert!(found.plugins[1..].iter().all(|p| p.shadowed_by.as_ref() == Some(&first)));
    assert_eq!(find("file", &folders).unwrap().path, first);
    let text = find("fil", &folders).unwrap_err();
    assert!(text.contains("no plugin named \"fil\"") && text.contains("there are: file"), "{text}");
}

#[test]
fn a_refused_plugin_is_named_when_a_name_is_not_found() {
    let folder = folder();
    changed(folder.path(), "abi.so", b"\"abi\":[\"0.1\"]", b"\"abi\":[\"7.3\"]");
    let text = find("file", &[folder.path().to_owned()]).unwrap_err();
    assert!(text.contains("abi.so: expected ABI version 0.1, found 7.3"), "{text}");
}

#[test]
fn identity_is_content_not_path() {
    let folder = folder();
    let bytes = fs::read(file_plugin()).unwrap();
    let one = load(&write(folder.path(), "one.so", &bytes), None).unwrap();
    let count = loaded_count();
    let two = load(&write(folder.path(), "two.so", &bytes), None).unwrap();
    assert!(Arc::ptr_eq(&one, &two), "the same bytes are mapped once");
    assert_eq!(loaded_count(), count);

    // Another build under the same path, after a rename: new code. Bytes after the ELF file's end change nothing but the digest.
    let newer = [bytes.as_slice(), b"another build"].concat();
    fs::rename(write(folder.path(), "new.so", &newer), folder.path().join("one.so")).unwrap();
    let three = load(&folder.path().join("one.so"), None).unwrap();
    assert!(!Arc::ptr_eq(&one, &three));
    assert_ne!(one.table().map(std::ptr::from_ref), three.table().map(std::ptr::from_ref), "it has a table of its own");
    assert_eq!(loaded_count(), count + 1);
}

#[test]
fn a_pinned_digest_is_demanded() {
    let path = file_plugin();
    let right = inspect(&path).unwrap().sha256_hex();
    assert!(load(&path, Some(&right.to_uppercase())).is_ok());
    let wrong = "0".repeat(64);
    let refusal = load(&path, Some(&wrong)).unwrap_err();
    assert_eq!(refusal.reason, Reason::OtherDigest { expected: wrong, found: right });
}

#[test]
fn libraries_beside_the_original_are_found_from_the_private_copy() {
    let folder = folder();
    let side = folder.path().join("side");
    fs::create_dir(&side).unwrap();
    fs::set_permissions(&side, fs::Permissions::from_mode(0o755)).unwrap();
    compile(&side, "libdeeper", "int deeper(void) { return 41; }", &[]);
    let library_path = format!("-L{}", side.display());
    let flags = [library_path.as_str(), "-l:libdeeper.so", "-Wl,-rpath,$ORIGIN"];
    compile(&side, "libbeside", "int deeper(void); int beside(void) { return deeper() + 1; }", &flags);
    let types = serde_json::to_string(v0_1::TYPES_TEXT).unwrap();
    let digest: String = v0_1::TYPES_DIGEST.iter().map(|b| format!("{b:02x}")).collect();
    let json = format!(
        r#"{{"note":1,"name":"sided","version":"1","license":"X","abi":["0.1"],"panic":"unwind","capabilities":{{}},"config_schema":{{}},"types":{{"0.1":{types}}},"types_sha256":{{"0.1":"{digest}"}}}}"#
    );
    // The table's head is enough for the loader; no function of it is called.
    let source = format!(
        r#"
int beside(void);
struct note {{ unsigned owner_len, len, type; char owner[8]; char json[{len}]; }};
__attribute__((section(".note.kvdock"), used, aligned(4))) static const struct note note = {{ 7, {text_len}, {kind}u, "kvdock", {json} }};
static struct {{ unsigned long size; unsigned version, reserved; void *rest[{rest}]; }} table;
const void *kvdock_plugin_entry(unsigned version) {{
    if (version != 1) return 0;
    table.size = beside() == 42 ? sizeof table : 0;
    table.version = 1;
    return &table;
}}
"#,
        json = serde_json::to_string(&json).unwrap(),
        len = (json.len() + 1).next_multiple_of(4),
        text_len = json.len(),
        kind = kvdock_plugin_api::note::NOTE_TYPE,
        rest = (size_of::<v0_1::BackendTable>() - 16) / 8,
    );
    let flags = [
        library_path.as_str(),
        "-l:libbeside.so",
        "-Wl,-rpath,$ORIGIN/side",
        "-Wl,-rpath-link",
        side.to_str().unwrap(),
    ];
    let path = compile(folder.path(), "sided", &source, &flags);
    assert_eq!(load(&path, None).unwrap().info.note.name, "sided");
}

#[test]
fn a_huge_file_is_refused_without_being_read() {
    let folder = folder();
    let path = write(folder.path(), "huge.so", b"");
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    // Sparse: it takes no room on the disk, and would take all of the memory.
    file.set_len(1 << 40).unwrap();
    assert!(matches!(refusal(&path).reason, Reason::NotElf(_)));
    fs::write(&path, b"\x7fELF").unwrap();
    file.set_len(1 << 40).unwrap();
    assert!(refusal(&path).to_string().contains("larger than any plugin"));
}

#[test]
fn a_damaged_plugin_was_as_good_as_not_there_when_its_name_was_asked_for() {
    let folder = folder();
    write(folder.path(), "libkvdock_plugin_far_store.so", b"");
    write(folder.path(), "libm.so", b"dear reader");
    let text = find("far-store", &[folder.path().to_owned()]).unwrap_err();
    assert!(text.contains("passed over") && text.contains("libkvdock_plugin_far_store.so"), "{text}");
    assert!(!text.contains("libm.so"), "{text}");
}
