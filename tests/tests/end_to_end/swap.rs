//! Backends come and go while requests run.

use std::sync::atomic::{AtomicBool, Ordering};

use kvdock_tests::prompt;
use kvdock_tests::server::Launch;
use serde_json::json;

#[test]
fn requests_in_flight_do_not_notice_a_swap() {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // Small pools: pages leave them, so that storage is in use all the time.
    let launch = Launch::new().storage(first.path()).set("cache.device_tokens", 1536).set("cache.host_tokens", 3072);
    let server = launch.start();
    let client = server.client();
    let prompts: Vec<Vec<u32>> = (70..74).map(|seed| prompt::ids(seed, 320)).collect();
    let cold: Vec<_> = prompts.iter().map(|prompt| client.generate(prompt, 4).0).collect();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (prompt, cold) in prompts.iter().zip(&cold) {
            let (client, over) = (client.clone(), &over);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let (answer, usage) = client.generate(prompt, 4);
                    assert_eq!(&answer, cold, "{usage:?}");
                }
            });
        }
        // Also when an assertion fails here, the clients must end.
        let stop = StopOnDrop(&over);
        for round in 0..4 {
            let folder = if round % 2 == 0 { second.path() } else { first.path() };
            let replaced = client.put("/hicache/storage-backend", &attach(folder));
            assert_eq!(replaced.status, 200, "round {round}: {}", replaced.json);
            let status = client.get("/hicache/storage-backend").json;
            assert_eq!(status["backends"][0]["name"], "file", "{status}");
            std::thread::sleep(std::time::Duration::from_millis(300));
        }
        let detached = client.delete("/hicache/storage-backend");
        assert_eq!(detached.status, 200, "{}", detached.json);
        let status = client.get("/hicache/storage-backend").json;
        assert!(status["hicache_storage_backend"].is_null(), "{status}");
        let attached = client.put("/hicache/storage-backend", &attach(first.path()));
        assert_eq!(attached.status, 200, "{}", attached.json);
        drop(stop);
    });
    client.flush();
    let (answer, usage) = client.generate(&prompts[0], 4);
    assert_eq!(answer, cold[0]);
    assert!(usage.storage > 0, "the backend attached last serves: {usage:?}");
    server.stop();
}

fn attach(folder: &std::path::Path) -> serde_json::Value {
    json!({
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config_json": json!({"dir": folder, "min_free_bytes": 0}).to_string(),
    })
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_refused_replacement_changes_nothing() {
    let storage = tempfile::tempdir().unwrap();
    let server = Launch::new().storage(storage.path()).start();
    let client = server.client();
    for body in [
        json!({"hicache_storage_backend": "no_such_backend"}),
        json!({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": "{\"dirr\": \"/x\"}"}),
        json!({"hicache_storage_backend": storage.path().join("libx.so")}),
    ] {
        let reply = client.put("/hicache/storage-backend", &body);
        assert!((400..500).contains(&reply.status), "{body}: {} {}", reply.status, reply.json);
        let status = client.get("/hicache/storage-backend").json;
        assert_eq!(status["backends"][0]["name"], "file", "{status}");
    }
    let long = prompt::ids(75, 320);
    let (cold, _) = client.generate(&long, 2);
    kvdock_tests::storage::wait_stored(&client, 20);
    client.flush();
    let (warm, usage) = client.generate(&long, 2);
    assert_eq!((usage.storage, &warm), (304, &cold));
}
