//! A backend that breaks on one of several ranks, tensor-parallel or context-parallel, with a host tier and in linker mode: what fails on one rank fails
//! on all and is computed, every answer is the cold one, and an attach is one of all ranks or of none.

use kvdock_tests::client::{Client, Generation, Reply, Usage};
use kvdock_tests::load::assert_nothing_is_held;
use kvdock_tests::server::{Launch, Server};
use kvdock_tests::swaps::ENDPOINT;
use kvdock_tests::{broken, paths, prompt};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::ranks::{ranks_in, wait};

/// How a server is spread, and in which mode.
#[derive(Clone, Copy)]
struct Spread {
    shares: u32,
    context: u32,
    linked: bool,
}

/// The small model has nine query heads and three KV heads.
const SHARES: Spread = Spread { shares: 3, context: 1, linked: false };
const CONTEXT: Spread = Spread { shares: 1, context: 2, linked: false };

impl Spread {
    fn linked(self) -> Self {
        Self { linked: true, ..self }
    }

    fn ranks(self) -> usize {
        (self.shares * self.context) as usize
    }

    fn launch(self) -> Launch {
        let launch = if self.linked { Launch::linked() } else { Launch::new() };
        launch
            .set("engine.tp_size", self.shares)
            .set("engine.cp_size", self.context)
            .set("cache.prefetch_threshold", 16)
    }

    /// The faults of reads in this mode.
    fn faults(self) -> [&'static str; 4] {
        match self.linked {
            true => [
                "error_in_load_of_rank_1",
                "panic_in_load_of_rank_1",
                "hang_in_load_of_rank_1",
                "garbage_load_of_rank_1",
            ],
            false => {
                ["error_in_get_of_rank_1", "panic_in_get_of_rank_1", "hang_in_get_of_rank_1", "garbage_get_of_rank_1"]
            }
        }
    }
}

/// A server over several ranks, one prompt, and its cold answer.
struct Rig {
    server: Server,
    client: Client,
    plugins: TempDir,
    prompt: Vec<u32>,
    cold: Generation,
}

const TOKENS: usize = 100;
const CACHED: u64 = 96;

impl Rig {
    fn new(spread: Spread, seed: u64) -> Self {
        // Mode 0700, as a plugin's folder should be.
        let plugins = tempfile::tempdir().unwrap();
        let server = spread.launch().set("storage.plugin_path", json!([plugins.path(), paths::build()])).start();
        let client = server.client();
        let prompt = prompt::ids(seed, TOKENS);
        let (cold, usage) = client.generate_salted(&prompt, 4, Some("cold"));
        assert_eq!(usage.cached(), 0);
        Self { server, client, plugins, prompt, cold }
    }

    fn put(&self, name: &str, config: &Value) -> Reply {
        let body = json!({
            "hicache_storage_backend": name,
            "hicache_storage_backend_extra_config_json": config.to_string(),
        });
        self.client.put(ENDPOINT, &body)
    }

    /// Attaches the plugin with a fault under the fault's name, in the place of what is there. Its instances share `folder`, so that all ranks find
    /// what one stores for them.
    fn try_attach(&self, fault: &str, folder: &TempDir) -> Reply {
        broken::plugin(self.plugins.path(), fault, fault);
        self.put(fault, &json!({"timeout": 0.3, "drain_timeout": 0.3, "retries": 0, "dir": folder.path()}))
    }

    fn attach(&self, fault: &str, folder: &TempDir) {
        let reply = self.try_attach(fault, folder);
        assert_eq!(reply.status, 200, "{fault}: {}", reply.json);
    }

    fn attach_good(&self, folder: &TempDir) {
        let reply = self.put("file", &json!({"dir": folder.path(), "min_free_bytes": 0}));
        assert_eq!(reply.status, 200, "{}", reply.json);
        self.ask();
        wait("the good backend serves", || self.ask().storage == CACHED);
    }

    /// Asks with pools that are empty but for what late calls hold; the answer must be the cold one.
    fn ask(&self) -> Usage {
        wait("pages leave the pools", || {
            let reply = self.client.post("/flush_cache", &json!({}));
            assert_eq!(reply.status, 200, "{}", reply.json);
            let metrics = self.client.metrics();
            let (page, held) = (metrics.sum("sglang:page_size", &[]), metrics.sum("kvdock:quarantined_pages", &[]));
            let used = |name: &str| metrics.sum(name, &[]) <= held * page;
            metrics.sum("sglang:kv_available_tokens", &[]) == metrics.sum("sglang:max_total_num_tokens", &[])
                && used("sglang:hicache_host_used_tokens")
                && used("kvdock:transit_used_tokens")
        });
        let (answer, usage) = self.client.generate(&self.prompt, 4);
        assert_eq!(answer, self.cold, "{usage:?}");
        usage
    }

    fn backend(&self, name: &str) -> Value {
        let status = self.client.get(ENDPOINT).json;
        let found = status["backends"].as_array().and_then(|all| all.iter().rfind(|backend| backend["name"] == name));
        found.cloned().unwrap_or_default()
    }

    fn of_rank(&self, what: &str, backend: &str, rank: usize) -> f64 {
        let name = format!("kvdock:storage_rank_{what}_total");
        self.client.metrics().sum(&name, &[("backend", backend), ("rank", &rank.to_string())])
    }

    fn pages(&self, backend: &str, op: &str, result: &str) -> f64 {
        let labels = [("backend", backend), ("op", op), ("result", result)];
        self.client.metrics().sum("kvdock:storage_pages_total", &labels)
    }
}

fn an_attach_is_one_of_all_ranks_or_none(spread: Spread, seed: u64) {
    let rig = Rig::new(spread, seed);
    let folder = tempfile::tempdir().unwrap();
    rig.attach_good(&folder);
    assert_eq!(
        ranks_in(folder.path()).len(),
        spread.shares as usize,
        "each rank with bytes of its own has a namespace"
    );
    assert_eq!(rig.backend("file")["ranks"].as_array().map(Vec::len), Some(spread.ranks()));
    let reply = rig.try_attach("open_fails_for_rank_1", &tempfile::tempdir().unwrap());
    assert_eq!(reply.status, 400, "{}", reply.json);
    let said = reply.json.to_string();
    let rank = format!("rank 1 of {}", spread.ranks());
    assert!(said.contains(&rank) && said.contains("planted: the second rank can't be opened"), "{said}");
    let status = rig.client.get(ENDPOINT).json;
    assert_eq!(status["hicache_storage_backend"], "file", "{status}");
    assert_eq!(status["backends"].as_array().map(Vec::len), Some(1), "nothing of it is left: {status}");
    assert_eq!(
        status["past"].as_array().and_then(|past| past.last()).map(|past| &past["state"]),
        Some(&json!("failed"))
    );
    assert_eq!(rig.ask().storage, CACHED, "what was attached goes on");
    // A detach is one of all ranks.
    let detached = rig.client.delete(ENDPOINT);
    assert_eq!(detached.status, 200, "{}", detached.json);
    assert_eq!(rig.ask().storage, 0);
    rig.attach_good(&folder);
    assert_nothing_is_held(&rig.client);
    rig.server.stop();
}

#[test]
fn h11_an_attach_that_fails_on_one_rank_is_undone_on_all() {
    an_attach_is_one_of_all_ranks_or_none(SHARES, 210);
}

#[test]
fn h11_an_attach_that_fails_on_one_context_parallel_rank_is_undone_on_all() {
    an_attach_is_one_of_all_ranks_or_none(CONTEXT, 213);
}

#[test]
fn h11_an_attach_in_linker_mode_that_fails_on_one_rank_is_undone_on_all() {
    an_attach_is_one_of_all_ranks_or_none(SHARES.linked(), 214);
}

fn reads_that_fail_on_one_rank_fail_on_all(spread: Spread, seed: u64) {
    let rig = Rig::new(spread, seed);
    for fault in spread.faults() {
        let folder = tempfile::tempdir().unwrap();
        rig.attach(fault, &folder);
        rig.ask();
        wait("pages are written", || rig.pages(fault, "set", "ok") >= 6.0);
        // Storage says that it has all of it, on every rank.
        let usage = rig.ask();
        assert_eq!(usage.cached(), 0, "{fault}: {usage:?}");
        if fault.starts_with("garbage") {
            wait("the seal finds it", || rig.pages(fault, "get", "corrupt") > 0.0);
        } else {
            wait("it is counted where it failed", || rig.of_rank("failed_calls", fault, 1) > 0.0);
            // A rank that panics ends the service of all at once, and with it what runs on the others.
            if !fault.starts_with("panic") {
                let others = (0..spread.ranks()).filter(|rank| *rank != 1);
                assert_eq!(others.map(|rank| rig.of_rank("failed_calls", fault, rank)).sum::<f64>(), 0.0, "{fault}");
            }
            assert!(rig.of_rank("lost_pages", fault, 1) >= 6.0, "{fault}");
            assert!(rig.backend(fault)["ranks"][1]["failed_calls"].as_u64() > Some(0), "{}", rig.backend(fault));
        }
        if fault.starts_with("panic") {
            wait("it has failed as a whole", || rig.backend(fault)["state"] == "failed");
            let reason = rig.backend(fault)["reason"].to_string();
            assert!(reason.contains("rank 1") && reason.contains("planted: a panic"), "{reason}");
        }
        rig.attach_good(&tempfile::tempdir().unwrap());
        if fault.starts_with("hang") {
            wait("it is a zombie", || rig.backend(fault)["state"] == "zombie");
        }
        assert_eq!(rig.client.metrics().doubled(), Vec::<String>::new());
    }
    // A call that never returns must not keep the process.
    rig.server.stop();
}

#[test]
fn a_get_that_fails_on_one_rank_fails_on_all_and_is_computed() {
    reads_that_fail_on_one_rank_fail_on_all(SHARES, 211);
}

#[test]
fn a_get_that_fails_on_one_context_parallel_rank_fails_on_all_and_is_computed() {
    reads_that_fail_on_one_rank_fail_on_all(CONTEXT, 215);
}

#[test]
fn l37_a_load_that_fails_on_one_rank_fails_on_all_and_is_computed() {
    reads_that_fail_on_one_rank_fail_on_all(SHARES.linked(), 216);
}

#[test]
fn l37_a_load_that_fails_on_one_context_parallel_rank_fails_on_all_and_is_computed() {
    reads_that_fail_on_one_rank_fail_on_all(CONTEXT.linked(), 217);
}

fn what_one_rank_refuses_is_stored_on_none(spread: Spread, fault: &str, seed: u64) {
    let rig = Rig::new(spread, seed);
    rig.attach(fault, &tempfile::tempdir().unwrap());
    rig.ask();
    wait("sets are refused", || rig.pages(fault, "set", "refused") >= 6.0);
    assert_eq!(rig.pages(fault, "set", "ok"), 0.0);
    assert!(rig.of_rank("lost_pages", fault, 1) >= 6.0);
    assert_eq!(rig.ask().cached(), 0, "the other ranks have them, which is of no use");
    assert_nothing_is_held(&rig.client);
    rig.server.stop();
}

#[test]
fn what_one_rank_refuses_is_stored_on_none_that_counts() {
    what_one_rank_refuses_is_stored_on_none(SHARES, "refuse_sets_of_rank_1", 212);
}

#[test]
fn l16_what_one_rank_does_not_offload_is_stored_on_none_that_counts() {
    what_one_rank_refuses_is_stored_on_none(SHARES.linked(), "refuse_offloads_of_rank_1", 218);
}
