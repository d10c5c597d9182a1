//! Models spread over ranks, served: every tier gives the cold answer, and keys tell tensor-parallel ranks apart.

use std::path::Path;
use std::time::{Duration, Instant};

use kvdock_models::testing::{Fixture, token_ids};
use kvdock_tests::client::Client;
use kvdock_tests::load::{Load, Shape, assert_nothing_is_held};
use kvdock_tests::server::Launch;
use kvdock_tests::storage::wait_stored;
use kvdock_tests::swaps::{ENDPOINT, Script, Stage};
use kvdock_tests::{prompt, soak};
use serde_json::{Value, json};

/// Pages of a first turn.
const PAGES: usize = 3;

/// The small model has nine query heads and three KV heads.
const RANKS: u32 = 3;

/// Over so many tensor-parallel ranks.
fn over(ranks: u32) -> Launch {
    Launch::new().set("engine.tp_size", ranks).set("cache.prefetch_threshold", 16)
}

/// Over so many tensor-parallel times so many context-parallel ranks.
fn over_both((shares, context): (u32, u32)) -> Launch {
    over(shares).set("engine.cp_size", context)
}

fn wait_written(client: &Client) {
    wait("pages are written", || client.metrics().sum("kvdock:backup_pending_pages", &[]) == 0.0);
}

pub fn wait(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < deadline, "not seen: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The tensor-parallel ranks of the namespaces in a store, as (rank, ranks).
pub fn ranks_in(store: &Path) -> Vec<(u64, u64)> {
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
fn turns_come_from_every_tier(name: &str, ranks: (u32, u32)) {
    let (model, storage) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Fixture::new(name).unwrap().write(model.path()).unwrap();
    let page = if name.starts_with("dsv4") { 128 } else { 16 };
    let launch = over_both(ranks)
        .storage(storage.path())
        .set("model.path", json!(model.path()))
        .set("engine.max_running_requests", 2);
    let told = format!("{name} over {ranks:?} ranks");
    let first = token_ids(name, PAGES * page, 256);
    let next = token_ids(&format!("{name} next"), page + 5, 256);
    let new = page as u32 + 3;

    let server = launch.start();
    let client = server.client();
    let info = client.get("/server_info").json;
    assert_eq!((&info["tp_size"], &info["attn_cp_size"]), (&json!(ranks.0), &json!(ranks.1)), "{info}");
    assert_eq!(info["internal_states"][0]["world_size"], json!(ranks.0 * ranks.1), "{info}");
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
    ($($test:ident: $($name:literal over $ranks:expr),+;)+) => {
        $(#[test]
        fn $test() {
            $(turns_come_from_every_tier($name, $ranks);)+
        })+
    };
}

families! {
    turns_of_a_mixture_of_experts_come_from_every_tier: "qwen3_moe" over (2, 1), "qwen3_moe" over (4, 1);
    turns_with_windows_come_from_every_tier: "gpt_oss" over (2, 1), "mimo" over (2, 1);
    turns_with_latents_come_from_every_tier: "glm_dsa" over (2, 1), "deepseek_v32" over (2, 1);
    turns_with_compressed_rows_come_from_every_tier: "dsv4" over (2, 1);
    turns_with_recurrent_states_come_from_every_tier: "qwen3_next" over (2, 1), "qwen3_5" over (2, 1);
    turns_of_context_parallel_ranks_come_from_every_tier: "qwen3_moe" over (1, 2), "mimo" over (1, 4), "deepseek_v32" over (1, 2);
    turns_with_rings_and_states_come_to_context_parallel_ranks: "dsv4" over (1, 2), "qwen3_next" over (1, 2);
    turns_of_shares_with_several_ranks_each_come_from_every_tier: "gpt_oss" over (2, 2);
}

/// The answers of a server with context-parallel ranks are those of one without, to the last token; pages are under names of their own.
#[test]
fn context_parallel_ranks_answer_as_one_rank_does() {
    let storage = tempfile::tempdir().unwrap();
    let long = prompt::ids(71, 700);
    let mut answers = Vec::new();
    for context in [1, 2, 4] {
        let launch = over_both((1, context)).storage(storage.path());
        let server = launch.start();
        let (cold, usage) = server.client().generate(&long, 12);
        assert_eq!(usage.cached(), 0, "{context} ranks found pages of another number: {usage:?}");
        wait_stored(&server.client(), 44);
        server.stop();
        let server = launch.start();
        let (warm, usage) = server.client().generate(&long, 12);
        assert_eq!((usage.storage, &warm), (688, &cold), "{context} ranks: {usage:?}");
        assert_nothing_is_held(&server.client());
        server.stop();
        answers.push(cold);
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]));
    assert_eq!(ranks_in(storage.path()), [(0, 1), (0, 1), (0, 1)], "of each number of ranks one writes");
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
