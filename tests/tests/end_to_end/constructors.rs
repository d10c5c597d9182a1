//! Plugins whose constructors hang or crash: code that runs while the file is mapped, before any call.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use kvdock_tests::client::Reply;
use kvdock_tests::paths;
use kvdock_tests::prompt;
use kvdock_tests::server::{Launch, Server};
use kvdock_tests::swaps::ENDPOINT;
use serde_json::json;

/// Builds the example in C with one more file in it.
fn plugin_with(constructor: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("constructor.c");
    std::fs::write(&source, constructor).unwrap();
    let example: PathBuf = paths::workspace().join("examples/c-minimal");
    let built = Command::new("make")
        .args(["--always-make", "--silent", "-C"])
        .arg(&example)
        .arg(format!("OUT={}", folder.path().display()))
        .arg(format!("SOURCES=plugin.c pools.c store.c {}", source.display()))
        .status()
        .unwrap();
    assert!(built.success());
    folder
}

fn launch(plugins: &Path, storage: &Path) -> Server {
    Launch::new().storage(storage).set("storage.plugin_path", plugins.display()).start()
}

fn assert_refused(reply: &Reply, words: &str) {
    assert_eq!(reply.status, 400, "{}", reply.json);
    assert!(reply.json.to_string().contains(words), "{}", reply.json);
}

#[test]
fn a_constructor_that_hangs_stops_nobody_and_is_refused() {
    let plugins =
        plugin_with("#include <unistd.h>\n__attribute__((constructor)) static void hang(void) { for (;;) pause(); }");
    let storage = tempfile::tempdir().unwrap();
    let server = launch(plugins.path(), storage.path());
    let client = server.client();
    let prompt = prompt::ids(81, 64);
    let (cold, _) = client.generate(&prompt, 4);
    let attach = json!({"hicache_storage_backend": "c-memory", "kvdock_mode": "add"});
    std::thread::scope(|scope| {
        let attaching = scope.spawn(|| server.client().put(ENDPOINT, &attach));
        // The attach is under way, which takes longer than all that follows.
        while client.get(ENDPOINT).json["backends"].as_array().unwrap().len() < 2 {
            assert!(!attaching.is_finished(), "it was refused without being tried");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(client.generate(&prompt, 4).0, cold);
        client.metrics();
        let other = json!({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": {"dir": storage.path(), "min_free_bytes": 0}, "kvdock_backend": "file"});
        let replaced = client.put(ENDPOINT, &other);
        assert_eq!(replaced.status, 200, "{}", replaced.json);
        assert!(!attaching.is_finished(), "the others waited for it");
        assert_refused(&attaching.join().unwrap(), "its constructors did not return");
    });
    server.stop();
}

#[test]
fn a_constructor_that_crashes_is_refused_and_the_server_goes_on() {
    let plugins = plugin_with("#include <stdlib.h>\n__attribute__((constructor)) static void crash(void) { abort(); }");
    let storage = tempfile::tempdir().unwrap();
    let server = launch(plugins.path(), storage.path());
    let client = server.client();
    let reply = client.put(ENDPOINT, &json!({"hicache_storage_backend": "c-memory", "kvdock_mode": "add"}));
    assert_refused(&reply, "its constructors ended the process (signal 6)");
    let prompt = prompt::ids(82, 64);
    assert_eq!(client.generate(&prompt, 4).0, client.generate(&prompt, 4).0);
    server.stop();
}
