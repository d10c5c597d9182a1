//! Plugins from the frozen sources of each released version, in today's host.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use kvdock::plugin::{AbiVersions, inspect};
use kvdock_plugin_api::v0_1;
use kvdock_tests::server::Launch;
use kvdock_tests::storage::wait_stored;
use kvdock_tests::{frozen, paths, prompt};
use sha2::{Digest, Sha256};

use crate::pool::Host;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn a_rust_plugin_of_0_1_serves() {
    let folder = tempfile::tempdir().unwrap();
    let path = frozen::rust_plugin("0.1", folder.path());
    let note = inspect(&path).unwrap().note;
    assert_eq!(note.types["0.1"], v0_1::TYPES_TEXT, "the types of the released crate are today's");
    let host = Host::attach(AbiVersions::BUILT_IN, folder.path(), "frozen-rust").unwrap();
    host.serves();
    host.end();
}

#[test]
fn a_c_plugin_of_0_1_serves() {
    let folder = tempfile::tempdir().unwrap();
    frozen::c_plugin("0.1", folder.path());
    let host = Host::attach(AbiVersions::BUILT_IN, folder.path(), "frozen-c").unwrap();
    host.serves();
    host.end();
}

#[test]
fn plugins_of_0_1_serve_requests_in_todays_server() {
    let folder = tempfile::tempdir().unwrap();
    frozen::rust_plugin("0.1", folder.path());
    frozen::c_plugin("0.1", folder.path());
    for (seed, name) in [(61, "frozen-rust"), (62, "frozen-c")] {
        let server = Launch::new()
            .set("storage.plugin_path", format!("[{:?}]", folder.path()))
            .set("storage.backend", format!("{name:?}"))
            .start();
        let (client, long) = (server.client(), prompt::ids(seed, 500));
        let (cold, usage) = client.generate(&long, 8);
        assert_eq!(usage.cached(), 0, "{name}");
        // 31 whole pages of 16 tokens.
        wait_stored(&client, 31);
        client.flush();
        let (warm, usage) = client.generate(&long, 8);
        assert_eq!((usage.storage, usage.device + usage.host), (496, 0), "{name}: {usage:?}");
        assert_eq!(warm, cold, "{name}");
        server.stop();
    }
}

#[test]
fn a_released_archive_never_changes() {
    let archive = frozen::archive("0.1");
    let digest = hex(&Sha256::digest(fs::read(&archive).unwrap()));
    let pinned = text(&frozen::sources("0.1").join("SHA256"));
    assert_eq!(pinned.trim(), digest, "{} is not the archive that was released", archive.display());
    let inside = frozen::unpacked("0.1").join("kvdock-plugin-api-0.1.0");
    for (copy, original) in [("kvdock_plugin.h", "include/kvdock_plugin.h"), ("v0_1.txt", "layouts/v0_1.txt")] {
        let copy = frozen::sources("0.1").join(copy);
        assert!(text(&copy) == text(&inside.join(original)), "{} is not the one of the archive", copy.display());
    }
}

/// A dump of a layout: everything but the enumerations, and each value with the enumeration it belongs to.
fn parts(dump: &str) -> (String, BTreeSet<(String, String)>) {
    let (types, rest) = dump.split_once("# Enumerations").expect("a dump has enumerations");
    let (enumerations, digest) = rest.split_once("# SHA-256").expect("a dump ends with the digest");
    let mut values = BTreeSet::new();
    let mut name = String::new();
    for line in enumerations.lines().skip(1) {
        match line.strip_prefix("    ") {
            Some(value) => assert!(values.insert((name.clone(), value.trim().to_owned()))),
            None => name = line.to_owned(),
        }
    }
    (format!("{types}{digest}"), values)
}

#[test]
fn the_types_of_0_1_are_those_that_were_released() {
    let released = text(&frozen::sources("0.1").join("v0_1.txt"));
    let today = text(&paths::workspace().join("plugin-api/layouts/v0_1.txt"));
    let ((types, values), (types_today, values_today)) = (parts(&released), parts(&today));
    assert!(types == types_today, "a released version is frozen: see plugin-api/layouts/v0_1.txt and ABI.md");
    assert!(types.contains(&hex(&v0_1::TYPES_DIGEST)), "the digest of this build");
    // A number may come to a released version, none changes or goes.
    let lost: Vec<_> = values.difference(&values_today).collect();
    assert!(lost.is_empty(), "numbers of 0.1 changed or went: {lost:?}");
}

#[test]
fn a_dump_with_a_changed_field_or_number_is_noticed() {
    let released = text(&frozen::sources("0.1").join("v0_1.txt"));
    let (types, values) = parts(&released);
    assert_ne!(parts(&released.replacen("page_tokens: u32", "page_tokens: u64", 1)).0, types);
    let (_, changed) = parts(&released.replacen("   1 Ok", "   9 Ok", 1));
    assert!(values.difference(&changed).next().is_some());
}
