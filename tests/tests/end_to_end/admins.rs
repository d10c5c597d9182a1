//! The admin endpoints, used by several at once and wrongly, while requests run.

use kvdock_tests::client::{Client, Reply};
use kvdock_tests::load::{Load, Shape, assert_nothing_is_held};
use kvdock_tests::prompt::{self, Random};
use kvdock_tests::server::Launch;
use kvdock_tests::storage::wait_stored;
use kvdock_tests::swaps::ENDPOINT;
use serde_json::{Value, json};

const STATES: [&str; 9] =
    ["loading", "opening", "registering", "active", "draining", "degraded", "failed", "zombie", "detached"];

fn attach(name: &str, config: &Value) -> Value {
    json!({
        "hicache_storage_backend": name,
        "hicache_storage_backend_extra_config_json": config.to_string(),
    })
}

/// One call of an operator, right or wrong. A wrong one is refused with a reason, and no call is an error of the server.
fn admin_call(client: &Client, random: &mut Random, folders: &[&std::path::Path]) {
    let folder = folders[random.below(folders.len() as u64) as usize];
    let refused = |reply: Reply, words: &str| {
        assert_eq!(reply.status, 400, "{}", reply.json);
        let text = reply.json.to_string();
        // Another operator may have called the attach off first.
        let right = text.contains(words) || text.contains("it was detached while");
        assert!(right, "the reply names {words:?}: {text}");
    };
    // Whether these find what they ask for hangs on the other operators.
    let either = |reply: Reply| assert!(matches!(reply.status, 200 | 400), "{} {}", reply.status, reply.json);
    let put = |body: &Value| client.put(ENDPOINT, body);
    match random.below(12) {
        0..3 => either(put(&attach("file", &json!({"dir": folder, "min_free_bytes": 0})))),
        3 => either(client.delete(&format!("{ENDPOINT}?backend=file"))),
        4 => either(client.delete(&format!("{ENDPOINT}?force=true"))),
        5 => either(client.delete(&format!("{ENDPOINT}?backend=no-such-name"))),
        6 => refused(put(&attach("no-such-plugin", &json!({}))), "no-such-plugin"),
        7 => refused(put(&attach("file", &json!({"dir": folder, "dirr": 1, "min_free_bytes": 0}))), "dirr"),
        8 => refused(client.put_text(ENDPOINT, "{\"hicache_storage_backend\": \"file\""), "JSON"),
        9 => refused(put(&json!({"hicache_storage_backend": ["file"]})), "hicache_storage_backend"),
        10 => either(client.post(&format!("{ENDPOINT}/clear"), &json!({}))),
        _ => {
            let status = client.get(ENDPOINT);
            assert_eq!(status.status, 200);
            for backend in status.json["backends"].as_array().expect("a list of backends") {
                let state = backend["state"].as_str().unwrap_or_default();
                assert!(STATES.contains(&state), "{}", status.json);
            }
        }
    }
}

#[test]
fn several_admins_at_once_and_wrong_calls_harm_no_request() {
    const ADMINS: u64 = 4;
    const CALLS: u32 = 20;
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let server = Launch::new()
        .storage(folders[0].path())
        .set("cache.page_size", 8)
        .set("cache.device_tokens", 640)
        .set("cache.host_tokens", 512)
        .set("cache.prefetch_threshold", 8)
        .start();
    let client = server.client();
    let shape = Shape { groups: 3, group: 3, shared: 24, own: 24, new_tokens: 4 };
    let load = Load::prepare(&client, &shape).unwrap();
    let (report, ()) = load.run(&server.address(), 8, || {
        std::thread::scope(|scope| {
            for number in 0..ADMINS {
                let (client, folders) = (server.client(), folders.each_ref().map(tempfile::TempDir::path));
                scope.spawn(move || {
                    let mut random = Random::new(40 + number);
                    (0..CALLS).for_each(|_| admin_call(&client, &mut random, &folders));
                });
            }
        });
    });
    assert!(report.failures.is_empty(), "{}", report.failures.join("\n"));
    assert!(report.answers > 0);
    assert_eq!(client.delete(ENDPOINT).status, 200);
    let status = client.get(ENDPOINT).json;
    assert!(status["hicache_storage_backend"].is_null(), "{status}");
    let attached = client.put(ENDPOINT, &attach("file", &json!({"dir": folders[0].path(), "min_free_bytes": 0})));
    assert_eq!(attached.status, 200, "{}", attached.json);
    assert_nothing_is_held(&client);
    server.stop();
}

#[test]
fn a_detach_keeps_what_is_stored_and_attaching_again_finds_it() {
    let folder = tempfile::tempdir().unwrap();
    let server = Launch::new().storage(folder.path()).start();
    let client = server.client();
    let long = prompt::ids(220, 320);
    let (cold, _) = client.generate(&long, 2);
    wait_stored(&client, 20);
    for query in ["", "?backend=file", "?force=true"] {
        let detached = client.delete(&format!("{ENDPOINT}{query}"));
        assert_eq!(detached.status, 200, "{}", detached.json);
        client.flush();
        let (without, usage) = client.generate(&long, 2);
        assert_eq!((usage.cached(), &without), (0, &cold), "nothing is attached");
        let attached = client.put(ENDPOINT, &attach("file", &json!({"dir": folder.path(), "min_free_bytes": 0})));
        assert_eq!(attached.status, 200, "{}", attached.json);
        client.flush();
        let (warm, usage) = client.generate(&long, 2);
        assert_eq!((usage.storage, &warm), (304, &cold), "after a DELETE{query}");
    }
}
