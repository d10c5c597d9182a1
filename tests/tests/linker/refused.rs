//! What excludes linker mode is refused at the start, with the reason.

use std::time::{Duration, Instant};

use kvdock_tests::server::Launch;
use kvdock_tests::swaps::ENDPOINT;
use kvdock_tests::{broken, paths};
use serde_json::json;

/// Starts a server that must not come up, and gives its log.
fn refused(launch: &Launch) -> String {
    let mut server = launch.spawn();
    let status = server.wait();
    assert!(!status.success(), "it came up:\n{}", server.log());
    // What it said last may still be on its way here.
    let deadline = Instant::now() + Duration::from_secs(60);
    while !server.log().contains("error: ") && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    server.log()
}

#[test]
fn l02_settings_that_exclude_linker_mode_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let linked = || Launch::linked().storage(folder.path());
    for (key, value, reason) in [
        ("cache.host_tokens", "4096", "has no host tier"),
        ("cache.write_policy", "\"write_back\"", "has no host tier"),
        ("cache.host_layout", "\"page_first\"", "layer by layer"),
        ("storage.break_even", "\"auto\"", "side by side"),
        ("storage.file.write_policy", "\"write_back\"", "has no host tier"),
        ("cache.transit_tokens", "16", "at least two pages"),
    ] {
        let log = refused(&linked().set(key, value));
        assert!(log.contains(key) && log.contains(reason), "{key} = {value}: {log}");
    }
}

/// A plugin without the linker face, by its note or by what its instance can do.
#[test]
fn l02_a_backend_without_the_linker_face_is_refused_and_serving_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    broken::Broken::new()
        .name("no-linker")
        .note(|note| note["capabilities"]["linker"] = false.into())
        .write(folder.path());
    let paths = json!([folder.path(), paths::build()]);
    let log = refused(&Launch::linked().set("storage.plugin_path", &paths).set("storage.backend", "\"no-linker\""));
    assert!(log.contains("no-linker") && log.contains("no linker face"), "{log}");
    // The same while it runs: nothing changes.
    let server = Launch::linked().set("storage.plugin_path", &paths).start();
    let client = server.client();
    let reply = client.put(ENDPOINT, &json!({"hicache_storage_backend": "no-linker"}));
    assert_eq!(reply.status, 400, "{}", reply.json);
    assert!(reply.json.to_string().contains("no linker face"), "{}", reply.json);
    let policy = json!({"hicache_storage_backend": "file", "hicache_write_policy": "write_back"});
    let reply = client.put(ENDPOINT, &policy);
    assert_eq!(reply.status, 400, "{}", reply.json);
    assert_eq!(client.generate(&[1, 2, 3, 4], 2).1.cached(), 0);
    server.stop();
}
