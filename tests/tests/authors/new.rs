//! `kvdock plugin new`: what it writes builds, passes its tests and the check, and serves.

use kvdock_tests::paths;
use kvdock_tests::prompt;
use kvdock_tests::server::Launch;
use kvdock_tests::storage::wait_stored;

use crate::build::{argument, cargo, kvdock_plugin, library, text};

/// The crate with the boundary, wherever the program lies.
fn api() -> std::path::PathBuf {
    paths::workspace().join("plugin-api")
}

#[test]
fn a_new_plugin_builds_passes_its_tests_and_the_check_and_serves() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("my-store");
    let made = kvdock_plugin(&["new", argument(&dir), "--api", argument(&api())]);
    assert!(made.status.success(), "{}", text(&made));
    assert!(text(&made).contains("kvdock-plugin-api comes from"), "{}", text(&made));
    // The versions of the workspace, which are there already.
    std::fs::copy(paths::workspace().join("Cargo.lock"), dir.join("Cargo.lock")).unwrap();

    let plugin = library(&dir, "libkvdock_plugin_my_store.so");
    cargo(&dir, &["test", "--release"]);
    let checked = kvdock_plugin(&["check", argument(&plugin.file)]);
    assert!(checked.status.success(), "{}", text(&checked));

    let server = Launch::new()
        .set("storage.backend", "\"my-store\"")
        .set("storage.plugin_path", format!("[{:?}]", plugin.folder()))
        .set("storage.my-store.dir", format!("{:?}", folder.path().join("pages")))
        .set("cache.prefetch_threshold", 16)
        .start();
    let client = server.client();
    let prompt = prompt::ids(1, 200);
    let (cold, usage) = client.generate(&prompt, 8);
    assert_eq!(usage.storage, 0);
    wait_stored(&client, 12);
    client.flush();
    let (warm, usage) = client.generate(&prompt, 8);
    assert_eq!(warm, cold);
    assert!(usage.storage >= 12 * 16, "{usage:?}");
    let log = server.stop();
    assert!(log.contains("pages of this model"), "the plugin's own line is in the log:\n{log}");
}

#[test]
fn what_is_written_is_formatted() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("my-store");
    assert!(kvdock_plugin(&["new", argument(&dir), "--api", argument(&api())]).status.success());
    let formatted = std::process::Command::new("rustfmt")
        .args(["--check", "--edition", "2024"])
        .arg(dir.join("src/lib.rs"))
        .output();
    match formatted {
        Ok(output) => assert!(output.status.success(), "{}", text(&output)),
        Err(error) => println!("not checked: rustfmt: {error}"),
    }
}

#[test]
fn a_wrong_name_and_a_full_folder_are_errors_of_one_line() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("mine"), "mine").unwrap();
    let full = kvdock_plugin(&["new", argument(folder.path()), "--name", "store", "--api", argument(&api())]);
    assert_eq!(full.status.code(), Some(1));
    assert!(text(&full).contains("found mine in it"), "{}", text(&full));
    let wrong = kvdock_plugin(&["new", argument(&folder.path().join("x")), "--name", "My Store"]);
    assert_eq!((wrong.status.code(), text(&wrong).lines().count()), (Some(1), 1), "{}", text(&wrong));
}
