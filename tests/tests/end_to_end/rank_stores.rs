//! Models over several ranks whose pages lie in stores that servers share: a Mooncake cluster and a UMBP cluster, each with its real master, a real
//! server of the node, and UMBP in the memory of the server. Each rank is a member by itself.

use std::path::Path;
use std::time::{Duration, Instant};

use kvdock_models::testing::{Fixture, token_ids};
use kvdock_tests::client::{Client, Generation};
use kvdock_tests::server::Launch;
use kvdock_tests::{mooncake, paths, umbp};
use serde_json::json;

/// Whole pages of a first turn.
const PAGES: usize = 3;

/// Tensor-parallel times context-parallel ranks.
type Ranks = (u32, u32);

/// Pages of heads, which each rank has some of; latents, which all have; and windows beside pages.
const SPREAD: [(&str, Ranks); 4] =
    [("qwen3_moe", (2, 1)), ("qwen3_moe", (4, 1)), ("glm_dsa", (2, 1)), ("gpt_oss", (2, 1))];
/// The same with context-parallel ranks, alone and in each share.
const CONTEXT: [(&str, Ranks); 3] = [("gpt_oss", (1, 2)), ("qwen3_moe", (2, 2)), ("glm_dsa", (1, 2))];

/// A server over ranks, hierarchical or in linker mode, with the backend that is set for it.
fn over((shares, context): Ranks, linked: bool, model: &Path) -> Launch {
    let launch = if linked { Launch::linked() } else { Launch::new() };
    launch
        .set("engine.tp_size", shares)
        .set("engine.cp_size", context)
        .set("model.path", json!(model))
        .set("engine.max_running_requests", 2)
        .set("cache.prefetch_threshold", 16)
        // What the tests ask is whether pages come, not whether they come sooner than they are computed.
        .set("cache.prefetch_policy", "\"wait_complete\"")
}

/// A model of random weights in a folder, and token ids that it knows.
struct Model {
    name: &'static str,
    folder: tempfile::TempDir,
}

impl Model {
    fn write(name: &'static str) -> Model {
        let folder = tempfile::tempdir().unwrap();
        Fixture::new(name).unwrap().write(folder.path()).unwrap();
        Model { name, folder }
    }

    fn ids(&self, what: &str, count: usize) -> Vec<u32> {
        token_ids(&format!("{} {what}", self.name), count, 256)
    }
}

/// Tokens of a page.
const PAGE: usize = 16;

/// Asks with empty pools until `tokens` come from storage: what was computed is stored by threads of its own, and others hear of it in time. The answer is the
/// cold one each time.
fn from_storage(client: &Client, prompt: &[u32], cold: &Generation, tokens: usize, told: &str) {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        client.flush();
        let (answer, usage) = client.generate(prompt, 6);
        assert_eq!(&answer, cold, "{told}: {usage:?}");
        if usage.storage == tokens as u64 {
            return;
        }
        assert!(Instant::now() < deadline, "{told}: {tokens} tokens do not come from storage: {usage:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// What `one` has computed `two` reads, on every rank; a second turn too; and a server of one rank reads nothing of it. When `one` is
/// killed, `two` goes on.
fn servers_share(model: &Model, ranks: Ranks, told: &str, launch: impl Fn(Ranks, bool) -> Launch) {
    let (one, two) = (launch(ranks, true).start(), launch(ranks, false).start());
    let prompt = model.ids("shared", PAGES * PAGE + 5);
    let (cold, usage) = one.client().generate(&prompt, 6);
    assert_eq!(usage.cached(), 0, "{told}: {usage:?}");
    from_storage(&two.client(), &prompt, &cold, PAGES * PAGE, told);
    from_storage(&one.client(), &prompt, &cold, PAGES * PAGE, told);
    let shown = two.client().get("/hicache/storage-backend").json;
    assert_eq!(
        shown["backends"][0]["ranks"].as_array().map(Vec::len),
        Some((ranks.0 * ranks.1) as usize),
        "{told}: {shown}"
    );

    let turn = [&prompt[..], &cold.token_ids()[..], &model.ids("next", 2 * PAGE)[..]].concat();
    let (reference, usage) = two.client().generate_salted(&turn, 6, Some("cold"));
    assert_eq!(usage.cached(), 0, "{told}: {usage:?}");
    assert_eq!(two.client().generate(&turn, 6).0, reference, "{told}");
    from_storage(&one.client(), &turn, &reference, (turn.len() - 1) / PAGE * PAGE, told);

    let third = launch((1, 1), false).start();
    let (_, usage) = third.client().generate(&prompt, 6);
    assert_eq!(usage.cached(), 0, "{told}: one rank read pages of others: {usage:?}");
    third.stop();

    // The memory of its ranks goes with it, and no answer.
    one.kill();
    let client = two.client();
    client.flush();
    assert_eq!(client.generate(&turn, 6).0, reference, "{told}: after the death of a server");
    client.flush();
    assert_eq!(client.generate(&prompt, 6).0, cold, "{told}: after the death of a server");
    two.stop();
}

fn through_mooncake(spread: &[(&'static str, Ranks)], linked: bool) {
    for (name, ranks) in spread.iter().copied() {
        let master = mooncake::Master::start(&["--default_kv_lease_ttl=10000", "--client_ttl=5"]);
        let (model, plugin) = (Model::write(name), paths::mooncake_plugin());
        let told = format!("{name} over {ranks:?} ranks, linker mode {linked}");
        servers_share(&model, ranks, &told, |ranks, lends| {
            over(ranks, linked, model.folder.path())
                .set("storage.backend", "\"mooncake\"")
                .set("storage.plugin_path", json!([plugin.parent().unwrap()]))
                .set("storage.mooncake.master_server_address", json!(master.address()))
                .set("storage.mooncake.metadata_server", json!(master.metadata(mooncake::Mode::Peer)))
                .set("storage.mooncake.master_metrics_port", master.metrics)
                .set("storage.mooncake.local_hostname", "\"127.0.0.1\"")
                // Over all ranks.
                .set("storage.mooncake.global_segment_size", json!(if lends { "256MiB" } else { "0" }))
        });
    }
}

#[test]
fn servers_over_ranks_share_a_mooncake_cluster() {
    through_mooncake(&SPREAD, false);
}

#[test]
fn servers_over_ranks_share_a_mooncake_cluster_layer_by_layer() {
    through_mooncake(&SPREAD, true);
}

fn through_umbp(spread: &[(&'static str, Ranks)], linked: bool) {
    for (name, ranks) in spread.iter().copied() {
        let master = umbp::Master::start(&[]);
        let (model, plugin) = (Model::write(name), paths::umbp_plugin());
        let told = format!("{name} over {ranks:?} ranks, linker mode {linked}");
        servers_share(&model, ranks, &told, |ranks, named| {
            let launch = over(ranks, linked, model.folder.path())
                .set("storage.backend", "\"umbp\"")
                .set("storage.plugin_path", json!([plugin.parent().unwrap()]))
                .set("storage.umbp.master_address", json!(master.address()))
                .set("storage.umbp.node_address", "\"127.0.0.1\"")
                .set("storage.umbp.data_plane", "\"tcp\"")
                .set("storage.umbp.dram_capacity_bytes", "\"64MiB\"")
                .set("storage.umbp.dram_page_size", 4096);
            // One name in the configuration, and as many nodes as ranks.
            if named { launch.set("storage.umbp.node_id", "\"one\"") } else { launch }
        });
    }
}

#[test]
fn servers_over_ranks_share_a_umbp_cluster() {
    through_umbp(&SPREAD, false);
}

#[test]
fn servers_over_ranks_share_a_umbp_cluster_layer_by_layer() {
    through_umbp(&SPREAD, true);
}

/// The first ranks of a server with context-parallel ones store all pages, and all read them.
#[test]
fn servers_with_context_parallel_ranks_share_a_mooncake_cluster() {
    through_mooncake(&CONTEXT, false);
    through_mooncake(&CONTEXT, true);
}

#[test]
fn servers_with_context_parallel_ranks_share_a_umbp_cluster() {
    through_umbp(&CONTEXT, false);
    through_umbp(&CONTEXT, true);
}

/// Each rank hands the server of the node its own memory.
#[test]
fn servers_over_ranks_share_a_server_of_the_node() {
    for (name, ranks) in [("qwen3_moe", (2, 1)), ("glm_dsa", (2, 1)), ("gpt_oss", (1, 2)), ("qwen3_moe", (2, 2))] {
        for linked in [false, true] {
            let node = umbp::Server::start(128 << 20);
            let (model, plugin) = (Model::write(name), paths::umbp_plugin());
            let told = format!("{name} over {ranks:?} ranks, linker mode {linked}");
            servers_share(&model, ranks, &told, |ranks, _| {
                over(ranks, linked, model.folder.path())
                    .set("storage.backend", "\"umbp\"")
                    .set("storage.plugin_path", json!([plugin.parent().unwrap()]))
                    .set("storage.umbp.standalone_address", json!(node.address()))
            });
        }
    }
}

/// Ranks whose pages differ have memory of their own; those that hold the same bytes, as context-parallel ones do, share it.
#[test]
fn pages_of_ranks_come_from_umbp_in_the_memory_of_the_server() {
    for (name, ranks) in SPREAD.into_iter().chain(CONTEXT) {
        for linked in [false, true] {
            let (model, plugin) = (Model::write(name), paths::umbp_plugin());
            let server = over(ranks, linked, model.folder.path())
                .set("storage.backend", "\"umbp\"")
                .set("storage.plugin_path", json!([plugin.parent().unwrap()]))
                .set("storage.umbp.ssd_enabled", false)
                .set("storage.umbp.dram_capacity_bytes", "\"64MiB\"")
                .set("storage.umbp.dram_page_size", 4096)
                .start();
            let told = format!("{name} over {ranks:?} ranks, linker mode {linked}");
            let prompt = model.ids("memory", PAGES * PAGE + 5);
            let (cold, usage) = server.client().generate(&prompt, 6);
            assert_eq!(usage.cached(), 0, "{told}: {usage:?}");
            from_storage(&server.client(), &prompt, &cold, PAGES * PAGE, &told);
            server.stop();
        }
    }
}
