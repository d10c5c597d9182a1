//! Plugins that are broken on purpose, in a running server: each answer is the cold one, status, metrics and log say which backend did
//! what, and a good backend takes over by the same call.

use std::time::{Duration, Instant};

use kvdock_tests::client::{Client, Generation, Reply, Usage};
use kvdock_tests::load::assert_nothing_is_held;
use kvdock_tests::server::{Launch, Server};
use kvdock_tests::swaps::ENDPOINT;
use kvdock_tests::{broken, paths, prompt};
use serde_json::{Value, json};
use tempfile::TempDir;

const TOKENS: usize = 100;
const PAGES: f64 = 6.0;
const NEW_TOKENS: u32 = 4;

/// A server, one prompt, and its cold answer.
struct Rig {
    server: Server,
    client: Client,
    plugins: TempDir,
    prompt: Vec<u32>,
    cold: Generation,
}

impl Rig {
    fn new(seed: u64) -> Self {
        Self::with(seed, Launch::new())
    }

    fn with(seed: u64, launch: Launch) -> Self {
        // Mode 0700, as a plugin's folder should be.
        let plugins = tempfile::tempdir().unwrap();
        let launch = launch
            .set("cache.prefetch_threshold", 16)
            .set("storage.plugin_path", json!([plugins.path(), paths::build()]));
        let server = launch.start();
        let client = server.client();
        let prompt = prompt::ids(seed, TOKENS);
        let (cold, usage) = client.generate_salted(&prompt, NEW_TOKENS, Some("cold"));
        assert_eq!(usage.cached(), 0);
        Self { server, client, plugins, prompt, cold }
    }

    /// Attaches the plugin with a fault under the fault's name, in the place of what is there.
    fn try_attach(&self, fault: &str) -> Reply {
        broken::plugin(self.plugins.path(), fault, fault);
        let config = json!({"timeout": 0.3, "drain_timeout": 0.3, "retries": 1});
        self.client.put(
            ENDPOINT,
            &json!({
                "hicache_storage_backend": fault,
                "hicache_storage_backend_extra_config_json": config.to_string(),
            }),
        )
    }

    fn attach(&self, fault: &str) {
        let reply = self.try_attach(fault);
        assert_eq!(reply.status, 200, "{fault}: {}", reply.json);
    }

    /// Asks with empty pools; the answer must be the cold one.
    fn ask(&self) -> Usage {
        self.empty();
        let (answer, usage) = self.client.generate(&self.prompt, NEW_TOKENS);
        assert_eq!(answer, self.cold, "{usage:?}");
        usage
    }

    /// Empties device and host but for what late calls hold.
    fn empty(&self) {
        self.wait("pages leave the pools", || {
            let reply = self.client.post("/flush_cache", &json!({}));
            assert_eq!(reply.status, 200, "{}", reply.json);
            let metrics = self.client.metrics();
            let page = metrics.sum("sglang:page_size", &[]);
            let held = metrics.sum("kvdock:quarantined_pages", &[]);
            metrics.sum("sglang:kv_available_tokens", &[]) == metrics.sum("sglang:max_total_num_tokens", &[])
                && metrics.sum("sglang:hicache_host_used_tokens", &[]) <= held * page
        });
    }

    /// Stores, reads, and reads once more; what storage gives or not, the answers are the cold one.
    fn use_it(&self, fault: &str) {
        self.ask();
        self.wait("pages are written or fail to be", || {
            ["ok", "failed", "refused", "late"].iter().any(|result| self.pages(fault, "set", result) > 0.0)
                || self.backend(fault)["state"] == "failed"
        });
        self.ask();
        self.ask();
    }

    fn pages(&self, backend: &str, op: &str, result: &str) -> f64 {
        let labels = [("backend", backend), ("op", op), ("result", result)];
        self.client.metrics().sum("kvdock:storage_pages_total", &labels)
    }

    /// What the status says of the backend of this name that came last; null when it is not there.
    fn backend(&self, name: &str) -> Value {
        let status = self.client.get(ENDPOINT).json;
        let found = status["backends"].as_array().and_then(|all| all.iter().rfind(|backend| backend["name"] == name));
        found.cloned().unwrap_or_default()
    }

    fn wait(&self, what: &str, done: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !done() {
            assert!(Instant::now() < deadline, "not seen: {what}; {}", self.client.get(ENDPOINT).json);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn says(&self, backend: &str, words: &str) {
        self.wait(&format!("a line of the log with {backend:?} and {words:?}"), || {
            let log = self.server.log().to_lowercase();
            log.lines().any(|line| line.contains(backend) && line.contains(words))
        });
    }

    /// The file backend takes the place of whatever is attached, and serves.
    fn a_good_backend_takes_over(&self, folder: &TempDir) {
        let body = json!({
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config_json": json!({"dir": folder.path(), "min_free_bytes": 0}).to_string(),
        });
        let reply = self.client.put(ENDPOINT, &body);
        assert_eq!(reply.status, 200, "{}", reply.json);
        let status = self.client.get(ENDPOINT).json;
        assert_eq!(status["hicache_storage_backend"], "file", "{status}");
        self.ask();
        self.wait("the good backend serves", || self.ask().storage == 96);
    }
}

#[test]
fn a_backend_that_hangs_in_a_call_costs_its_pages_and_no_answer() {
    for (fault, op) in [("hang_in_get", "get"), ("hang_in_set", "set"), ("hang_in_exists", "exists")] {
        let rig = Rig::new(200);
        rig.attach(fault);
        rig.use_it(fault);
        rig.wait("late pages", || rig.pages(fault, op, "late") > 0.0);
        rig.says(fault, "did not return");
        if op != "exists" {
            let status = rig.backend(fault);
            assert!(status["quarantined_pages"].as_u64() > Some(0), "{status}");
            let held = rig.client.metrics().sum("kvdock:storage_quarantined_pages", &[("backend", fault)]);
            assert!(held > 0.0, "metrics show what it holds: {held}");
        }
        rig.a_good_backend_takes_over(&tempfile::tempdir().unwrap());
        // No admin call waits for the drain, so this comes later.
        rig.wait("it is a zombie", || rig.backend(fault)["state"] == "zombie");
        rig.says(fault, "zombie");
        // Another instance under the name of a zombie is told apart from it.
        rig.attach(fault);
        assert_eq!(rig.client.metrics().doubled(), Vec::<String>::new());
        // A call that never returns must not keep the process.
        rig.server.stop();
    }
}

#[test]
fn a_backend_that_hangs_in_close_is_a_zombie_and_the_process_ends() {
    let rig = Rig::new(201);
    rig.attach("hang_in_close");
    rig.use_it("hang_in_close");
    assert!(rig.pages("hang_in_close", "get", "ok") > 0.0, "until then it serves");
    let detached = rig.client.delete(ENDPOINT);
    assert_eq!(detached.status, 200, "{}", detached.json);
    rig.says("hang_in_close", "zombie");
    rig.a_good_backend_takes_over(&tempfile::tempdir().unwrap());
    assert_nothing_is_held(&rig.client);
    rig.server.stop();
}

#[test]
fn a_panic_in_any_call_fails_the_instance_and_no_answer() {
    let rig = Rig::new(202);
    let folder = tempfile::tempdir().unwrap();
    // These fail before anything has changed.
    rig.a_good_backend_takes_over(&folder);
    for fault in ["panic_in_open", "panic_in_register", "panic_in_pools_ready", "health_failed"] {
        let reply = rig.try_attach(fault);
        assert_eq!(reply.status, 400, "{fault}: {}", reply.json);
        assert!(reply.json.to_string().contains("planted"), "the reply has the plugin's words: {}", reply.json);
        assert_eq!(rig.client.get(ENDPOINT).json["hicache_storage_backend"], "file");
        assert_eq!(rig.ask().storage, 96, "{fault}: what was attached goes on");
    }
    for fault in ["panic_in_exists", "panic_in_get", "panic_in_set"] {
        rig.attach(fault);
        rig.use_it(fault);
        rig.wait("the instance has failed", || rig.backend(fault)["state"] == "failed");
        let reason = rig.backend(fault)["reason"].to_string();
        assert!(reason.contains("planted: a panic in batch_"), "{fault}: {reason}");
        rig.says(fault, "planted: a panic");
        rig.a_good_backend_takes_over(&folder);
    }
    // Nobody has to ask: the host does so every few seconds.
    rig.attach("panic_in_health");
    rig.wait("the instance has failed", || rig.backend("panic_in_health")["state"] == "failed");
    rig.says("panic_in_health", "planted: a panic in health");
    rig.a_good_backend_takes_over(&folder);
    for fault in ["panic_in_clear", "panic_in_stats", "panic_in_flush", "panic_in_close"] {
        rig.attach(fault);
        rig.use_it(fault);
        assert!(rig.pages(fault, "get", "ok") > 0.0, "{fault}: until then it serves");
        let cleared = rig.client.post(&format!("{ENDPOINT}/clear"), &json!({}));
        if fault == "panic_in_clear" {
            assert!(cleared.json.to_string().contains("planted"), "{}", cleared.json);
        }
        rig.ask();
        rig.a_good_backend_takes_over(&folder);
    }
    assert_nothing_is_held(&rig.client);
    rig.server.stop();
}

#[test]
fn wrong_bytes_of_a_right_length_are_corrupt_and_computed_again() {
    let rig = Rig::with(203, Launch::new().set("cache.host_tokens", 256));
    let folder = tempfile::tempdir().unwrap();
    let other = prompt::ids(303, 240);
    for fault in ["garbage_get", "half_get", "swapped_get", "nothing_get"] {
        rig.attach(fault);
        rig.ask();
        rig.wait("pages are written", || rig.pages(fault, "set", "ok") >= PAGES);
        // The host pages still have the right bytes, which a backend that writes nothing would leave there.
        rig.empty();
        rig.client.generate_salted(&other, 1, Some(fault));
        rig.ask();
        rig.ask();
        assert!(rig.pages(fault, "get", "corrupt") > 0.0, "{fault}: the seal finds it");
        rig.says(fault, "is not what it should be");
        rig.a_good_backend_takes_over(&folder);
    }
    assert_nothing_is_held(&rig.client);
    rig.server.stop();
}

#[test]
fn slow_late_and_failing_backends_change_no_answer() {
    let rig = Rig::new(204);
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        ("slow_get", "get", "late"),
        ("late_get", "get", "late"),
        ("late_set", "set", "late"),
        ("error_always", "set", "failed"),
        ("error_fatal", "set", "failed"),
        ("refuse_sets", "set", "refused"),
        ("error_retryable_then_ok", "set", "ok"),
    ];
    for (fault, op, result) in cases {
        rig.attach(fault);
        rig.use_it(fault);
        rig.wait(&format!("{fault}: {op} {result}"), || rig.pages(fault, op, result) > 0.0);
        rig.a_good_backend_takes_over(&folder);
        rig.wait("late calls give their pages back", || {
            rig.client.metrics().sum("kvdock:quarantined_pages", &[]) == 0.0
        });
    }
    assert_nothing_is_held(&rig.client);
    rig.server.stop();
}

#[test]
fn the_second_backend_serves_when_the_first_is_broken() {
    let rig = Rig::new(205);
    let faults = ["panic_in_get", "panic_in_exists", "error_fatal", "refuse_sets", "garbage_get", "hang_in_get"];
    for fault in faults {
        let folder = tempfile::tempdir().unwrap();
        rig.attach(fault);
        let added = rig.client.put(
            ENDPOINT,
            &json!({
                "hicache_storage_backend": "file",
                "kvdock_mode": "add",
                "hicache_storage_backend_extra_config_json": json!({"dir": folder.path(), "min_free_bytes": 0}).to_string(),
            }),
        );
        assert_eq!(added.status, 200, "{fault}: {}", added.json);
        let status = rig.client.get(ENDPOINT).json;
        let names: Vec<_> = status["backends"].as_array().unwrap().iter().map(|backend| &backend["name"]).collect();
        assert!(names.starts_with(&[&json!(fault), &json!("file")]), "in the order of the calls: {status}");
        rig.ask();
        rig.wait("the second serves", || rig.ask().storage == 96);
        let detached = rig.client.delete(&format!("{ENDPOINT}?backend=file"));
        assert_eq!(detached.status, 200, "{fault}: {}", detached.json);
    }
    rig.server.stop();
}
