//! The linker faces of the other plugins behind running servers: Mooncake with its real master, and UMBP with a store of its own.

use std::time::{Duration, Instant};

use kvdock_tests::client::{Client, Generation};
use kvdock_tests::mooncake::{Master, Mode, Official};
use kvdock_tests::paths;
use kvdock_tests::server::Launch;

use super::model::{Model, PAGES};

/// A dense model, several pools of all tokens, windows with rings, windows in heads, recurrent states.
const FAMILIES: [&str; 5] = ["qwen3_moe", "glm_dsa", "dsv4q", "gpt_oss", "qwen3_next"];

/// A server that lends memory of so many bytes to the cluster of a master.
fn member(master: &Master, segment: &str) -> Launch {
    let plugins = paths::mooncake_plugin();
    let folder = plugins.parent().unwrap().to_str().unwrap();
    Launch::linked()
        .set("storage.backend", "\"mooncake\"")
        .set("storage.plugin_path", format!("[\"{folder}\"]"))
        .set("storage.mooncake.master_server_address", format!("\"{}\"", master.address()))
        .set("storage.mooncake.metadata_server", format!("\"{}\"", master.metadata(Mode::Peer)))
        .set("storage.mooncake.master_metrics_port", master.metrics)
        .set("storage.mooncake.local_hostname", "\"127.0.0.1\"")
        .set("storage.mooncake.global_segment_size", segment)
}

/// A server with a store of its own in `folder`, whose memory holds so much.
fn alone(folder: &std::path::Path, memory: &str) -> Launch {
    let plugins = paths::umbp_plugin();
    let plugins = plugins.parent().unwrap().to_str().unwrap();
    Launch::linked()
        .set("storage.backend", "\"umbp\"")
        .set("storage.plugin_path", format!("[\"{plugins}\"]"))
        .set("storage.umbp.dram_capacity_bytes", format!("\"{memory}\""))
        .set("storage.umbp.ssd_storage_dir", format!("{:?}", folder.to_str().unwrap()))
        .set("storage.umbp.ssd_capacity_bytes", "\"256MiB\"")
}

/// Asks with an empty device until `tokens` come from storage: what is computed is stored by threads of its own. The answer is the cold one each
/// time.
fn from_storage(client: &Client, prompt: &[u32], cold: &Generation, tokens: u64) {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        client.flush();
        let (answer, usage) = client.generate(prompt, 6);
        assert_eq!(&answer, cold, "{usage:?}");
        assert_eq!(usage.host, 0, "there is no host tier: {usage:?}");
        if usage.storage == tokens {
            return;
        }
        assert!(Instant::now() < deadline, "{tokens} tokens do not come from storage: {usage:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Turn by turn with an empty device; what storage has of the history is not computed.
fn turns(client: &Client, model: &Model) {
    let mut history = model.prompt("turns", PAGES * model.page);
    for turn in 0..2 {
        client.flush();
        let (answer, _) = client.generate(&history, 6);
        let whole = (history.len() - 1) / model.page;
        from_storage(client, &history, &answer, model.tokens(whole));
        history.extend(answer.token_ids());
        history.extend(model.prompt(&format!("turn {turn}"), 2 * model.page - history.len() % model.page));
    }
}

#[test]
fn pages_of_one_server_come_layer_by_layer_to_another_through_a_mooncake_cluster() {
    for name in FAMILIES {
        let master = Master::start(&["--default_kv_lease_ttl=10000", "--client_ttl=5"]);
        let model = Model::write(name);
        let launch = |segment| model.served_by(member(&master, segment)).start();
        let (one, two) = (launch("\"256MiB\""), launch("0"));
        let prompt = model.prompt("mooncake", PAGES * model.page + 5);
        let (cold, usage) = one.client().generate(&prompt, 6);
        assert_eq!(usage.cached(), 0, "{name}: {usage:?}");
        from_storage(&one.client(), &prompt, &cold, model.tokens(PAGES));
        let (warm, usage) = two.client().generate(&prompt, 6);
        assert_eq!((usage.storage, &warm), (model.tokens(PAGES), &cold), "{name}: {usage:?}");
        turns(&two.client(), &model);
        // Its memory goes with it, and no answer.
        one.kill();
        let client = two.client();
        client.flush();
        assert_eq!(client.generate(&prompt, 6).0, cold, "{name}: after the death of who had the pages");
        two.stop();
    }
}

#[test]
fn pages_in_the_memory_of_an_official_mooncake_client_outlive_a_server_in_linker_mode() {
    let master = Master::start(&["--default_kv_lease_ttl=10000"]);
    let _holder = Official::start(&master, Mode::Peer, 256 << 20);
    let model = Model::write("dsv4q");
    let launch = model.served_by(member(&master, "0"));
    let prompt = model.prompt("official", PAGES * model.page + 5);
    let server = launch.start();
    let (cold, _) = server.client().generate(&prompt, 6);
    server.stop();
    let server = launch.start();
    let (warm, usage) = server.client().generate(&prompt, 6);
    assert_eq!((usage.storage, &warm), (model.tokens(PAGES), &cold), "{usage:?}");
    server.stop();
}

/// With memory for all pages, and with memory for few, so that most come from segments.
#[test]
fn pages_come_layer_by_layer_from_umbp_after_a_restart() {
    for (name, memory) in FAMILIES.into_iter().flat_map(|name| [(name, "256MiB"), (name, "1MiB")]) {
        let (model, folder) = (Model::write(name), tempfile::tempdir().unwrap());
        let launch = model.served_by(alone(folder.path(), memory));
        let prompt = model.prompt("umbp", PAGES * model.page + 5);
        let server = launch.start();
        let (cold, usage) = server.client().generate(&prompt, 6);
        assert_eq!(usage.cached(), 0, "{name}: {usage:?}");
        turns(&server.client(), &model);
        server.stop();

        let server = launch.start();
        let (warm, usage) = server.client().generate(&prompt, 6);
        assert_eq!((usage.storage, &warm), (model.tokens(PAGES), &cold), "{name}, {memory}: {usage:?}");
        turns(&server.client(), &model);
        server.stop();
    }
}
