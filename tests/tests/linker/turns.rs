//! What comes back from storage, after restarts and with the device emptied.

use kvdock_tests::prompt;
use kvdock_tests::server::Launch;
use kvdock_tests::storage::wait_stored;
use kvdock_tests::swaps::ENDPOINT;
use serde_json::json;

const PAGE: usize = 16;

#[test]
fn l19_a_prompt_comes_from_storage_after_a_restart_with_the_same_answer() {
    let storage = tempfile::tempdir().unwrap();
    let launch = Launch::linked().storage(storage.path());
    let long = prompt::ids(801, 700);
    let server = launch.start();
    let (cold, usage) = server.client().generate(&long, 12);
    assert_eq!((usage.prompt, usage.cached()), (700, 0));
    server.stop();

    let server = launch.start();
    let (warm, usage) = server.client().generate(&long, 12);
    assert_eq!((usage.storage, usage.device, usage.host), (688, 0, 0), "{usage:?}");
    assert_eq!(warm, cold);
    let (again, usage) = server.client().generate(&long, 12);
    assert_eq!((usage.device, &again), (688, &cold), "{usage:?}");
    let metrics = server.client().metrics();
    assert_eq!(metrics.sum("sglang:hicache_host_total_tokens", &[]), 0.0, "there is no host tier");
    assert!(metrics.sum("kvdock:transit_total_tokens", &[]) > 0.0);
    let status = server.client().get(ENDPOINT).json;
    assert_eq!(status["backends"][0]["state"], "active", "{status}");
    server.stop();
}

/// Line 3 of what linker mode has to show: with the device emptied between turns, all of the history but what has to be computed.
#[test]
fn every_turn_comes_from_storage_also_when_the_prompt_is_whole_pages() {
    let storage = tempfile::tempdir().unwrap();
    let server = Launch::linked().storage(storage.path()).set("cache.prefetch_threshold", PAGE).start();
    let client = server.client();
    let mut stored = 0;
    for (seed, length) in [(810, 15 * PAGE), (811, 15 * PAGE + 5), (812, 16 * PAGE)] {
        let mut history = prompt::ids(seed, length);
        let mut before = 0;
        for turn in 0..3 {
            client.flush();
            let (answer, usage) = client.generate(&history, 8);
            let expected = if turn == 0 { 0 } else { before };
            assert!(usage.storage >= expected as u64, "turn {turn} of {length}: {expected} tokens, {usage:?}");
            assert_eq!(usage.device + usage.host, 0, "{usage:?}");
            let (alone, usage) = client.generate_salted(&history, 8, Some(&format!("alone {turn}")));
            assert_eq!((alone, usage.cached()), (answer.clone(), 0), "turn {turn} of {length}");
            let ids = answer.token_ids();
            // What was computed, prompt and answer but its last token, in whole pages; and as much under the salt.
            let whole = (history.len() + ids.len() - 1) / PAGE;
            stored += (whole - before / PAGE) + whole;
            wait_stored(&client, stored as u64);
            history.extend(&ids);
            before = (history.len() - 1) / PAGE * PAGE;
            // A new turn that ends at a page's end, too.
            let fresh = prompt::ids(seed + 1000 + turn, PAGE * 3 - history.len() % PAGE);
            history.extend(fresh);
        }
    }
    server.stop();
}

/// The device holds one prompt, so each hit comes from storage.
#[test]
fn l22_a_device_that_holds_little_is_served_by_storage() {
    let storage = tempfile::tempdir().unwrap();
    let server = Launch::linked().storage(storage.path()).set("cache.device_tokens", 640).start();
    let client = server.client();
    let prompts: Vec<Vec<u32>> = (0..4).map(|i| prompt::ids(820 + i, 500)).collect();
    let cold: Vec<_> = prompts.iter().map(|prompt| client.generate(prompt, 6).0).collect();
    wait_stored(&client, 4 * 31);
    for _ in 0..2 {
        for (prompt, cold) in prompts.iter().zip(&cold) {
            let (warm, usage) = client.generate(prompt, 6);
            assert_eq!(&warm, cold);
            assert_eq!(usage.cached(), 496, "{usage:?}");
            assert!(usage.storage > 0, "{usage:?}");
        }
    }
    server.stop();
}

/// Attach, replace and detach while requests run.
#[test]
fn backends_come_and_go_while_it_serves() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = Launch::linked().storage(one.path()).start();
    let client = server.client();
    let prompt = prompt::ids(830, 400);
    let (cold, _) = client.generate(&prompt, 6);
    wait_stored(&client, 25);
    let config = json!({"dir": two.path(), "min_free_bytes": 0}).to_string();
    let body = json!({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": config});
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| {
            let client = server.client();
            for round in 0..6 {
                client.flush();
                assert_eq!(client.generate(&prompt, 6).0, cold, "round {round}");
            }
        });
        for _ in 0..3 {
            let reply = client.put(ENDPOINT, &body);
            assert_eq!(reply.status, 200, "{}", reply.json);
            let reply = client.delete(ENDPOINT);
            assert_eq!(reply.status, 200, "{}", reply.json);
        }
        busy.join().unwrap();
    });
    let reply = client.put(ENDPOINT, &body);
    assert_eq!(reply.status, 200, "{}", reply.json);
    client.flush();
    assert_eq!(client.generate(&prompt, 6).0, cold);
    client.flush();
    let before = client.metrics().storage_pages("set", "ok");
    assert!(before > 0.0);
    assert_eq!(client.generate(&prompt, 6).0, cold);
    server.stop();
}
