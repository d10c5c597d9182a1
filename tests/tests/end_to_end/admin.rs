//! Admin calls act at once, whatever a plugin does meanwhile.

use std::path::Path;
use std::time::{Duration, Instant};

use kvdock_tests::broken;
use kvdock_tests::client::Client;
use kvdock_tests::prompt;
use kvdock_tests::server::Launch;
use kvdock_tests::storage::wait_stored;
use serde_json::{Value, json};

const PATH: &str = "/hicache/storage-backend";

fn backend(client: &Client, name: &str) -> Option<Value> {
    let status = client.get(PATH).json;
    status["backends"].as_array().unwrap().iter().find(|backend| backend["name"] == name).cloned()
}

fn wait_for(client: &Client, what: &str, condition: impl Fn(&Client) -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !condition(client) {
        assert!(Instant::now() < end, "still not: {what}; {}", client.get(PATH).json);
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn is(name: &'static str, state: &'static str) -> impl Fn(&Client) -> bool {
    move |client| backend(client, name).is_some_and(|backend| backend["state"] == state)
}

fn add(name: &str) -> Value {
    json!({"hicache_storage_backend": name, "kvdock_mode": "add"})
}

/// `hanger` never returns from a get, `sleeper` never from its open, and a drain takes ten minutes: if any call here waited for another, the
/// test would, too.
#[test]
fn i20746_i20101_h17_no_admin_call_waits_for_a_drain_or_an_open() {
    let (plugins, pages) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    broken::plugin(plugins.path(), "hanger", "hang_in_get");
    broken::plugin(plugins.path(), "sleeper", "hang_in_open");
    let quoted = |path: &Path| format!("{:?}", path.to_str().unwrap());
    let server = Launch::new()
        .set("storage.backend", "\"hanger\"")
        .set("storage.plugin_path", format!("[{}]", quoted(plugins.path())))
        .set("storage.hanger.timeout", 1)
        .set("storage.hanger.drain_timeout", 600)
        .set("storage.pages.plugin", "\"file\"")
        .set("storage.pages.dir", quoted(pages.path()))
        .set("storage.pages.min_free_bytes", 0)
        .start();
    let client = server.client();
    let long = prompt::ids(90, 320);
    let (cold, _) = client.generate(&long, 2);
    wait_stored(&client, 20);
    client.flush();
    let (answer, usage) = client.generate(&long, 2);
    assert_eq!((usage.storage, &answer), (0, &cold), "computed, because the read does not return");
    let hangs =
        |client: &Client| backend(client, "hanger").is_some_and(|b| b["in_flight"] != 0 && b["quarantined_pages"] != 0);
    wait_for(&client, "a call is late and its pages are quarantined", hangs);

    std::thread::scope(|scope| {
        let slow_detach = scope.spawn(|| client.delete(&format!("{PATH}?backend=hanger")));
        wait_for(&client, "it drains", is("hanger", "draining"));
        // Another backend takes over while that goes on.
        let attached = client.put(PATH, &json!({"hicache_storage_backend": "pages"}));
        assert_eq!(attached.status, 200, "{}", attached.json);
        let status = client.get(PATH).json;
        assert_eq!(status["hicache_storage_backend"], "pages", "{status}");
        assert!(is("hanger", "draining")(&client), "{status}");

        // Nor does an open that does not return hold anything up.
        let slow_attach = scope.spawn(|| client.put(PATH, &add("sleeper")));
        wait_for(&client, "it opens", is("sleeper", "opening"));
        let gone = client.delete(&format!("{PATH}?backend=pages"));
        assert_eq!((gone.status, gone.json.as_str().unwrap().contains("pages is detached.")), (200, true));
        let back = client.put(PATH, &add("pages"));
        assert_eq!(back.status, 200, "{}", back.json);
        assert!(is("sleeper", "opening")(&client));
        let called_off = client.delete(&format!("{PATH}?backend=sleeper"));
        assert!(called_off.json.as_str().unwrap().contains("will not be attached"), "{}", called_off.json);
        let refused = slow_attach.join().unwrap();
        assert_eq!(refused.status, 400);
        assert!(refused.json.as_str().unwrap().contains("detached while it was being opened"), "{}", refused.json);

        // A second detach does not wait for the first one's drain; told to force it, it ends it.
        let second = client.delete(&format!("{PATH}?backend=hanger"));
        assert!(second.json.as_str().unwrap().contains("hanger still drains"), "{}", second.json);

        // The drain is cut short. The call hangs on, so the instance is kept, and says so.
        assert!(!slow_detach.is_finished());
        let forced = client.delete(&format!("{PATH}?backend=hanger&force=true"));
        for reply in [forced, slow_detach.join().unwrap()] {
            assert_eq!(reply.status, 200, "{}", reply.json);
            assert!(reply.json.as_str().unwrap().contains("hanger is detached, but can't be closed"), "{}", reply.json);
        }
    });
    let zombie = backend(&client, "hanger").unwrap();
    assert_eq!((&zombie["state"], &zombie["in_use"]), (&json!("zombie"), &json!(false)));
    assert!(zombie["quarantined_pages"].as_u64().unwrap() > 0, "{zombie}");
    assert!(zombie["reason"].as_str().unwrap().contains("has not returned"), "{zombie}");
    let metrics = client.metrics();
    let state = |state| metrics.sum("kvdock:storage_backend_state", &[("backend", "hanger"), ("state", state)]);
    assert_eq!((state("zombie"), state("active")), (1.0, 0.0));
    assert!(metrics.sum("kvdock:storage_quarantined_pages", &[("backend", "hanger")]) > 0.0);
    assert!(client.get("/health").status == 200 && client.generate(&long, 2).0 == cold);
    let log = server.stop();
    let event = |line: &&str| line.contains("storage backend zombie") && line.contains("backend=\"hanger\"");
    assert_eq!(log.lines().filter(event).count(), 1, "one line says it:\n{log}");
}
