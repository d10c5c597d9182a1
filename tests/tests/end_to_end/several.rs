//! Two file backends in one server.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use kvdock_tests::client::Client;
use kvdock_tests::prompt;
use kvdock_tests::server::Launch;
use kvdock_tests::storage::{files, wait_stored};
use serde_json::json;

const PATH: &str = "/hicache/storage-backend";
const TOKENS: usize = 320;
const PAGES: u64 = 20;
/// All whole pages but the last, whose tokens are computed to have logits.
const HIT: u64 = 304;

fn two(near: &Path, far: &Path) -> Launch {
    let quoted = |path: &Path| format!("{:?}", path.to_str().unwrap());
    Launch::new()
        .set("storage.backends", "[\"near\", \"far\"]")
        .set("storage.near.plugin", "\"file\"")
        .set("storage.near.dir", quoted(near))
        .set("storage.far.plugin", "\"file\"")
        .set("storage.far.dir", quoted(far))
        // How full the disk of the machine is must not matter.
        .set("storage.near.min_free_bytes", 0)
        .set("storage.far.min_free_bytes", 0)
}

fn attached(client: &Client) -> Vec<String> {
    let status = client.get(PATH).json;
    let backends = status["backends"].as_array().unwrap();
    backends.iter().filter(|b| b["in_use"] == true).map(|b| b["name"].as_str().unwrap().to_owned()).collect()
}

fn wait_stored_in(client: &Client, backend: &str, pages: u64) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    loop {
        let labels = [("backend", backend), ("op", "set"), ("result", "ok")];
        let stored = client.metrics().sum("kvdock:storage_pages_total", &labels);
        if stored >= pages as f64 {
            return;
        }
        assert!(std::time::Instant::now() < end, "only {stored} of {pages} pages are in {backend}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

#[test]
fn the_second_backend_serves_what_the_first_lacks() {
    let (near, far) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let long = prompt::ids(80, TOKENS);
    let server = Launch::new().storage(far.path()).start();
    let (cold, _) = server.client().generate(&long, 4);
    wait_stored(&server.client(), PAGES);
    server.stop();

    let server = two(near.path(), far.path()).start();
    let client = server.client();
    assert_eq!(attached(&client), ["near", "far"], "the order of the config");
    let (answer, usage) = client.generate(&long, 4);
    assert_eq!((usage.storage, answer), (HIT, cold), "{}", server.log());
    server.stop();
}

#[test]
fn one_backend_is_detached_by_name_while_the_other_serves() {
    let (near, far) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = two(near.path(), far.path()).start();
    let client = server.client();
    let prompts: Vec<Vec<u32>> = (81..84).map(|seed| prompt::ids(seed, TOKENS)).collect();
    let cold: Vec<_> = prompts.iter().map(|prompt| client.generate(prompt, 4).0).collect();
    for backend in ["near", "far"] {
        wait_stored_in(&client, backend, 3 * PAGES);
    }
    assert!(!files(near.path()).is_empty() && !files(far.path()).is_empty(), "each is written to");

    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (prompt, cold) in prompts.iter().zip(&cold) {
            let (client, over) = (client.clone(), &over);
            scope.spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    assert_eq!(&client.generate(prompt, 4).0, cold);
                }
            });
        }
        let ends = EndOnDrop(&over);
        for backend in ["near", "far"] {
            let other = if backend == "near" { "far" } else { "near" };
            let gone = client.delete(&format!("{PATH}?backend={backend}"));
            assert_eq!(gone.status, 200, "{}", gone.json);
            assert_eq!(attached(&client), [other]);
            let back = client.put(PATH, &json!({"hicache_storage_backend": backend, "kvdock_mode": "add"}));
            assert_eq!(back.status, 200, "{}", back.json);
            assert_eq!(attached(&client), ["near", "far"], "back in its place");
        }
        drop(ends);
    });

    assert_eq!(client.delete(&format!("{PATH}?backend=near")).status, 200);
    client.flush();
    let (answer, usage) = client.generate(&prompts[0], 4);
    assert_eq!((usage.storage, &answer), (HIT, &cold[0]), "the other one serves");
    let twice = client.put(PATH, &json!({"hicache_storage_backend": "far", "kvdock_mode": "add"}));
    assert_eq!(twice.status, 400);
    assert!(twice.json.as_str().unwrap().contains("far is attached already"), "{}", twice.json);
    server.stop();
}

struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A second series of the same labels makes the whole answer unreadable to who collects it.
#[test]
fn i18354_series_end_with_a_backend_and_come_back_once() {
    let (near, far) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = two(near.path(), far.path()).start();
    let client = server.client();
    client.generate(&prompt::ids(85, TOKENS), 2);
    wait_stored_in(&client, "far", PAGES);
    let series = |backend: &str| {
        let metrics = client.metrics();
        let names = metrics.series();
        let twice = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name));
        assert_eq!(twice, None, "a series comes twice");
        names.iter().filter(|name| name.contains(&format!("backend=\"{backend}\""))).cloned().collect::<Vec<_>>()
    };
    let before = series("far");
    assert!(before.iter().any(|name| name.starts_with("kvdock:storage_pages_total")), "{before:?}");
    for _ in 0..2 {
        assert_eq!(client.delete(&format!("{PATH}?backend=far")).status, 200);
        assert_eq!(series("far"), Vec::<String>::new());
        let back = client.put(PATH, &json!({"hicache_storage_backend": "far", "kvdock_mode": "add"}));
        assert_eq!(back.status, 200, "{}", back.json);
        let after = series("far");
        assert!(after.iter().any(|name| name.starts_with("kvdock:storage_backend_state")), "{after:?}");
        assert!(after.iter().any(|name| name.starts_with("kvdock:storage_breaker")), "{after:?}");
    }
    let labels = [("backend", "far"), ("op", "set"), ("result", "ok")];
    assert!(client.metrics().sum("kvdock:storage_pages_total", &labels) >= PAGES as f64, "counts go on");
    server.stop();
}
