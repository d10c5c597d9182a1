//! Storage that breaks while the server runs in linker mode: each answer is the cold one, and nothing stays held.

use std::time::{Duration, Instant};

use kvdock_tests::client::{Client, Generation, Usage};
use kvdock_tests::server::{Launch, Server};
use kvdock_tests::storage::{files, wait_stored};
use kvdock_tests::swaps::ENDPOINT;
use kvdock_tests::{broken, paths, prompt};
use serde_json::json;

const TOKENS: usize = 400;
const PAGES: u64 = 25;
const HIT: u64 = 384;

/// A server with one prompt in storage and in no other tier.
struct Case {
    server: Server,
    client: Client,
    prompt: Vec<u32>,
    cold: Generation,
}

impl Case {
    fn new(launch: &Launch, seed: u64) -> Self {
        let server = launch.start();
        let client = server.client();
        let prompt = prompt::ids(seed, TOKENS);
        let (cold, usage) = client.generate(&prompt, 6);
        assert_eq!(usage.cached(), 0);
        wait_stored(&client, PAGES);
        Self { server, client, prompt, cold }
    }

    /// Asks again with an empty device; the answer must be the cold one.
    fn ask(&self) -> Usage {
        empty(&self.client);
        let (answer, usage) = self.client.generate(&self.prompt, 6);
        assert_eq!(answer, self.cold, "{usage:?}");
        assert_eq!(usage.device + usage.host, 0, "the device was emptied: {usage:?}");
        usage
    }
}

/// Empties the device, but for what late calls hold nothing stays in use.
fn empty(client: &Client) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let reply = client.post("/flush_cache", &json!({}));
        assert_eq!(reply.status, 200, "{}", reply.json);
        let metrics = client.metrics();
        let page = metrics.sum("sglang:page_size", &[]);
        let held = metrics.sum("kvdock:quarantined_pages", &[]);
        if metrics.sum("sglang:kv_available_tokens", &[]) == metrics.sum("sglang:max_total_num_tokens", &[])
            && metrics.sum("kvdock:transit_used_tokens", &[]) <= held * page
        {
            return;
        }
        assert!(Instant::now() < deadline, "pages are held: {metrics:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn g01_objects_that_are_gone_between_lookup_and_load_are_computed() {
    let storage = tempfile::tempdir().unwrap();
    let case = Case::new(&Launch::linked().storage(storage.path()), 841);
    assert_eq!(case.ask().storage, HIT);
    // The plugin believes that it has them; the load finds out.
    for file in
        files(storage.path()).into_iter().filter(|file| file.metadata().is_ok_and(|file| file.len() > 256 << 10))
    {
        std::fs::remove_file(file).unwrap();
    }
    assert!(case.ask().storage < HIT);
    // The last page of the prompt was never asked for, so nobody knows that it is gone.
    wait_stored(&case.client, 2 * PAGES - 1);
    assert_eq!(case.ask().storage, HIT, "what was computed is stored again");
    case.server.stop();
}

#[test]
fn g01_a_file_that_is_cut_short_or_changed_costs_its_page_and_those_after_it() {
    let storage = tempfile::tempdir().unwrap();
    let case = Case::new(&Launch::linked().storage(storage.path()), 842);
    assert_eq!(case.ask().storage, HIT);
    let pages: Vec<_> = files(storage.path())
        .into_iter()
        .filter(|file| file.metadata().is_ok_and(|file| file.len() > 256 << 10))
        .collect();
    std::fs::OpenOptions::new().write(true).open(&pages[3]).unwrap().set_len(1000).unwrap();
    assert!(case.ask().storage < HIT);
    empty(&case.client);
    use std::os::unix::fs::FileExt;
    let changed = std::fs::OpenOptions::new().write(true).open(&pages[5]).unwrap();
    changed.write_all_at(&[0x5a; 64], 100_000).unwrap();
    assert!(case.ask().storage < HIT);
    case.server.stop();
}

/// Every fault that the broken plugin knows, in linker mode. Whatever it does, the answers are the cold ones, and the server goes on.
#[test]
fn whatever_a_plugin_does_wrong_no_answer_changes() {
    let plugins = tempfile::tempdir().unwrap();
    let launch = Launch::linked()
        .set("cache.prefetch_threshold", 16)
        .set("storage.plugin_path", json!([plugins.path(), paths::build()]));
    let server = launch.start();
    let client = server.client();
    let prompt = prompt::ids(843, 100);
    let (cold, usage) = client.generate_salted(&prompt, 4, Some("cold"));
    assert_eq!(usage.cached(), 0);
    for fault in FAULTS {
        broken::plugin(plugins.path(), fault, fault);
        let config = json!({"timeout": 0.3, "drain_timeout": 0.3, "retries": 1}).to_string();
        let body = json!({"hicache_storage_backend": fault, "hicache_storage_backend_extra_config_json": config});
        let reply = client.put(ENDPOINT, &body);
        assert!([200, 400].contains(&reply.status), "{fault}: {} {}", reply.status, reply.json);
        for round in 0..3 {
            let reply = client.post("/flush_cache", &json!({}));
            assert_eq!(reply.status, 200, "{fault}: {}", reply.json);
            let (answer, usage) = client.generate(&prompt, 4);
            assert_eq!(answer, cold, "{fault}, round {round}: {usage:?}");
            // What is stored is stored by threads of its own; whether it is there in the next round is the fault's to say.
            std::thread::sleep(Duration::from_millis(30));
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let config = json!({"dir": folder.path(), "min_free_bytes": 0}).to_string();
    let body = json!({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": config});
    let reply = client.put(ENDPOINT, &body);
    assert_eq!(reply.status, 200, "{}", reply.json);
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        client.post("/flush_cache", &json!({}));
        let (answer, usage) = client.generate(&prompt, 4);
        assert_eq!(answer, cold);
        if usage.storage == 96 {
            break;
        }
        assert!(Instant::now() < deadline, "a good backend does not serve: {usage:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    empty(&client);
}

/// Faults of calls that linker mode makes. Those of the faces that it does not use are shown elsewhere.
const FAULTS: [&str; 16] = [
    "none",
    "hang_in_exists",
    "panic_in_exists",
    "offload_forgets_status",
    "offload_reads_early",
    "offload_page_by_page",
    "offload_last_first",
    "load_wrong_bytes",
    "load_unset_missing",
    "layers_not_told",
    "layers_settled_early",
    "load_all_layers",
    "load_writes_early",
    "double_load_taken",
    "cancel_keeps_load",
    "tires_after_many",
];
