//! Models spread over tensor-parallel ranks, served: every tier gives the cold answer, keys tell ranks apart, and what fails on one rank fails on all
//! and is computed.

use std::path::Path;
use std::time::{Duration, Instant};

use kvdock_models::testing::{Fixture, token_ids};
use kvdock_tests::client::{Client, Generation, Usage};
use kvdock_tests::load::{Load, Shape, assert_nothing_is_held};
use kvdock_tests::server::{Launch, Server};
use kvdock_tests::storage::wait_stored;
use kvdock_tests::swaps::{ENDPOINT, Script, Stage};
use kvdock_tests::{broken, paths, prompt, soak};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Pages of a first turn.
const PAGES: usize = 3;

/// The small model has nine query heads and three KV heads.
const RANKS: u32 = 3;

fn over(ranks: u32) -> Launch {
    Launch::new().set("engine.tp_size", ranks).set("cache.prefetch_threshold", 16)
}

fn wait_written(client: &Client) {
    wait("pages are written", || client.metrics().sum("kvdock:backup_pending_pages", &[]) == 0.0);
}

fn wait(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < deadline, "not seen: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The ranks of the namespaces in a store, as (rank, ranks).
fn ranks_in(store: &Path) -> Vec<(u64, u64)> {
    let folders = std::fs::read_dir(store).unwrap().map(|entry| entry.unwrap().path());
    let mut ranks: Vec<(u64, u64)> = folders
        .filter_map(|folder| {
            let json: Value = serde_json::from_slice(&std::fs::read(folder.join("namespace.json")).ok()?).unwrap();
            Some((json["tp"][0].as_u64().unwrap(), json["tp"][1].as_u64().unwrap()))
        })
        .collect();
    ranks.sort_unstable();
    ranks
}

/// A first turn of whole pages, asked cold, again, and after a flush a second turn that goes on from its answer, in one process and after a restart.
fn turns_come_from_every_tier(name: &str, ranks: u32) {
    let (model, storage) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Fixture::new(name).unwrap().write(model.path()).unwrap();
    let page = if name.starts_with("dsv4") { 128 } else { 16 };
    let launch = over(ranks)
        .storage(storage.path())
        .set("model.path", json!(model.path()))
        .set("engine.max_running_requests", 2);
    let told = format!("{name} over {ranks} ranks");
    let first = token_ids(name, PAGES * page, 256);
    let next = token_ids(&format!("{name} next"), page + 5, 256);
    let new = page as u32 + 3;

    let server = launch.start();
    let client = server.client();
    let info = client.get("/server_info").json;
    assert_eq!((&info["tp_size"], &info["internal_states"][0]["world_size"]), (&json!(ranks), &json!(ranks)), "{info}");
    let (cold, usage) = client.generate(&first, new);
    assert_eq!(usage.cached(), 0, "{told}: {usage:?}");
    let (warm, usage) = client.generate(&first, new);
    assert_eq!((usage.device, &warm), (((PAGES - 1) * page) as u64, &cold), "{told}: {usage:?}");
    let history = [&first[..], &cold.token_ids()[..]].concat();
    let turn = [&history[..], &next[..]].concat();
    let (reference, usage) = client.generate_salted(&turn, 4, Some("cold"));
    assert_eq!(usage.cached(), 0, "{told}: {usage:?}");
    let expected = ((history.len() - 1) / page * page) as u64;
    wait_written(&client);
    client.flush();
    let (second, usage) = client.generate(&turn, 4);
    assert_eq!((usage.storage, usage.cached(), &second), (expected, expected, &reference), "{told}: {usage:?}");
    assert_nothing_is_held(&client);
    server.stop();

    let server = launch.start();
    let (second, usage) = server.client().generate(&turn, 4);
    assert!(usage.storage >= expected, "{told}, restarted: {usage:?}");
    assert_eq!(second, reference, "{told}, restarted");
    server.stop();
}

macro_rules! families {
    ($($test:ident: $($name:literal over $ranks:literal),+;)+) => {
        $(#[test]
        fn $test() {
            $(turns_come_from_every_tier($name, $ranks);)+
        })+
    };
}

families! {
    turns_of_a_mixture_of_experts_come_from_every_tier: "qwen3_moe" over 2, "qwen3_moe" over 4;
    turns_with_windows_come_from_every_tier: "gpt_oss" over 2, "mimo" over 2;
    turns_with_latents_come_from_every_tier: "glm_dsa" over 2, "deepseek_v32" over 2;
    turns_with_compressed_rows_come_from_every_tier: "dsv4" over 2;
    turns_with_recurrent_states_come_from_every_tier: "qwen3_next" over 2, "qwen3_5" over 2;
}

#[test]
fn servers_over_different_numbers_of_ranks_share_a_folder_and_no_page() {
    let storage = tempfile::tempdir().unwrap();
    let long = prompt::ids(70, 400);
    let mut texts = Vec::new();
    for ranks in [1, RANKS] {
        let launch = over(ranks).storage(storage.path());
        let server = launch.start();
        let (cold, usage) = server.client().generate(&long, 4);
        assert_eq!(usage.cached(), 0, "{ranks} ranks found pages of another number: {usage:?}");
        wait_stored(&server.client(), 25);
        server.stop();
        let server = launch.start();
        let (warm, usage) = server.client().generate(&long, 4);
        assert_eq!((usage.storage, &warm), (384, &cold), "{ranks} ranks: {usage:?}");
        server.stop();
        texts.push(cold.text);
    }
    assert_eq!(texts[0], texts[1], "they say the same all the same");
    assert_eq!(ranks_in(storage.path()), [(0, 1), (0, 3), (1, 3), (2, 3)]);
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
    fn new(seed: u64) -> Self {
        // Mode 0700, as a plugin's folder should be.
        let plugins = tempfile::tempdir().unwrap();
        let server = over(RANKS).set("storage.plugin_path", json!([plugins.path(), paths::build()])).start();
        let client = server.client();
        let prompt = prompt::ids(seed, TOKENS);
        let (cold, usage) = client.generate_salted(&prompt, 4, Some("cold"));
        assert_eq!(usage.cached(), 0);
        Self { server, client, plugins, prompt, cold }
    }

    fn put(&self, name: &str, config: &Value) -> kvdock_tests::client::Reply {
        let body = json!({
            "hicache_storage_backend": name,
            "hicache_storage_backend_extra_config_json": config.to_string(),
        });
        self.client.put(ENDPOINT, &body)
    }

    /// Attaches the plugin with a fault under the fault's name, in the place of what is there.
    fn try_attach(&self, fault: &str) -> kvdock_tests::client::Reply {
        broken::plugin(self.plugins.path(), fault, fault);
        self.put(fault, &json!({"timeout": 0.3, "drain_timeout": 0.3, "retries": 0}))
    }

    fn attach(&self, fault: &str) {
        let reply = self.try_attach(fault);
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
            metrics.sum("sglang:kv_available_tokens", &[]) == metrics.sum("sglang:max_total_num_tokens", &[])
                && metrics.sum("sglang:hicache_host_used_tokens", &[]) <= held * page
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

    fn of_rank(&self, what: &str, backend: &str, rank: &str) -> f64 {
        let name = format!("kvdock:storage_rank_{what}_total");
        self.client.metrics().sum(&name, &[("backend", backend), ("rank", rank)])
    }

    fn pages(&self, backend: &str, op: &str, result: &str) -> f64 {
        let labels = [("backend", backend), ("op", op), ("result", result)];
        self.client.metrics().sum("kvdock:storage_pages_total", &labels)
    }
}

#[test]
fn h11_an_attach_that_fails_on_one_rank_is_undone_on_all() {
    let rig = Rig::new(210);
    let folder = tempfile::tempdir().unwrap();
    rig.attach_good(&folder);
    assert_eq!(ranks_in(folder.path()).len(), RANKS as usize, "each rank has a namespace");
    assert_eq!(rig.backend("file")["ranks"].as_array().map(Vec::len), Some(RANKS as usize));
    let reply = rig.try_attach("open_fails_for_rank_1");
    assert_eq!(reply.status, 400, "{}", reply.json);
    let said = reply.json.to_string();
    assert!(said.contains("rank 1 of 3") && said.contains("planted: the second rank can't be opened"), "{said}");
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
fn a_get_that_fails_on_one_rank_fails_on_all_and_is_computed() {
    let rig = Rig::new(211);
    for fault in ["error_in_get_of_rank_1", "panic_in_get_of_rank_1", "hang_in_get_of_rank_1", "garbage_get_of_rank_1"]
    {
        rig.attach(fault);
        rig.ask();
        wait("pages are written", || rig.pages(fault, "set", "ok") >= 6.0);
        // Storage says that it has all of it, on every rank.
        let usage = rig.ask();
        assert_eq!(usage.cached(), 0, "{fault}: {usage:?}");
        if fault == "garbage_get_of_rank_1" {
            wait("the seal finds it", || rig.pages(fault, "get", "corrupt") > 0.0);
        } else {
            wait("it is counted where it failed", || rig.of_rank("failed_calls", fault, "1") > 0.0);
            assert_eq!(
                rig.of_rank("failed_calls", fault, "0") + rig.of_rank("failed_calls", fault, "2"),
                0.0,
                "{fault}"
            );
            assert!(rig.of_rank("lost_pages", fault, "1") >= 6.0, "{fault}");
            assert!(rig.backend(fault)["ranks"][1]["failed_calls"].as_u64() > Some(0), "{}", rig.backend(fault));
        }
        if fault == "panic_in_get_of_rank_1" {
            wait("it has failed as a whole", || rig.backend(fault)["state"] == "failed");
            let reason = rig.backend(fault)["reason"].to_string();
            assert!(reason.contains("rank 1") && reason.contains("planted: a panic"), "{reason}");
        }
        rig.attach_good(&tempfile::tempdir().unwrap());
        if fault == "hang_in_get_of_rank_1" {
            wait("it is a zombie", || rig.backend(fault)["state"] == "zombie");
        }
        assert_eq!(rig.client.metrics().doubled(), Vec::<String>::new());
    }
    // A call that never returns must not keep the process.
    rig.server.stop();
}

#[test]
fn what_one_rank_refuses_is_stored_on_none_that_counts() {
    let rig = Rig::new(212);
    let fault = "refuse_sets_of_rank_1";
    rig.attach(fault);
    rig.ask();
    wait("sets are refused", || rig.pages(fault, "set", "refused") >= 6.0);
    assert_eq!(rig.pages(fault, "set", "ok"), 0.0);
    assert!(rig.of_rank("lost_pages", fault, "1") >= 6.0);
    assert_eq!(rig.ask().cached(), 0, "ranks 0 and 2 have them, which is of no use");
    assert_nothing_is_held(&rig.client);
    rig.server.stop();
}

#[test]
fn soak_swaps_under_load_harm_no_answer_of_several_ranks() {
    const SHAPE: Shape = Shape { groups: 4, group: 3, shared: 24, own: 32, new_tokens: 4 };
    let stage = Stage::default();
    let launch = over(RANKS)
        .set("cache.page_size", 8)
        .set("cache.device_tokens", 640)
        .set("cache.host_tokens", 512)
        .set("cache.prefetch_threshold", 8);
    let server = stage.set(launch).start();
    let client = server.client();
    let load = Load::prepare(&client, &SHAPE).unwrap();
    let mut script = stage.script(server.client());
    script.fill(|| load.warm(&client).unwrap());
    client.flush();
    script.rest();
    let before = client.metrics();
    let steps = Script::ROUND * soak::factor() as usize;
    let (report, ()) = load.run(&server.address(), 8, || script.run(steps, Duration::from_secs(1)));
    script.rest();
    let after = client.metrics();
    assert!(report.failures.is_empty(), "{}", report.failures.join("\n"));
    let pages = |op: &str, result: &str| after.storage_pages(op, result) - before.storage_pages(op, result);
    assert!(pages("get", "ok") > 0.0 && pages("set", "ok") > 0.0, "storage was in use: {after:?}");
    assert_eq!(pages("get", "corrupt"), 0.0, "no page is damaged by a swap");
    assert_nothing_is_held(&client);
    let detached = client.delete(ENDPOINT);
    assert_eq!(detached.status, 200, "{}", detached.json);
    server.stop();
}
