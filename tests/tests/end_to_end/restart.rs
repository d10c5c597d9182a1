//! What outlives the process.

use kvdock_tests::prompt;
use kvdock_tests::server::Launch;
use kvdock_tests::storage::wait_stored;
use serde_json::json;

#[test]
fn a_long_prompt_comes_from_storage_after_a_restart_with_the_same_answer() {
    let storage = tempfile::tempdir().unwrap();
    let launch = Launch::new().storage(storage.path());
    let long = prompt::ids(1, 700);

    let server = launch.start();
    let (cold, usage) = server.client().generate(&long, 12);
    assert_eq!((usage.prompt, usage.cached()), (700, 0), "fresh storage holds nothing");
    server.stop();

    let server = launch.start();
    let (warm, usage) = server.client().generate(&long, 12);
    assert_eq!(usage.storage, 688, "43 whole pages of 16 tokens: {usage:?}");
    assert_eq!((usage.device, usage.host), (0, 0), "a new process has empty pools");
    assert_eq!(warm, cold);
    let (again, usage) = server.client().generate(&long, 12);
    assert_eq!(usage.device, 688, "what came from storage is on the device now: {usage:?}");
    assert_eq!(again, cold);
    server.stop();
}

#[test]
fn backups_under_way_are_finished_by_sigterm() {
    let storage = tempfile::tempdir().unwrap();
    let launch = Launch::new().storage(storage.path());
    let long = prompt::ids(2, 512);
    let server = launch.start();
    server.client().generate(&long, 1);
    // At once: the backups of 32 pages are still on their way.
    server.stop();

    let server = launch.start();
    let (_, usage) = server.client().generate(&long, 1);
    assert_eq!(usage.storage, 496, "{usage:?}");
}

#[test]
fn two_servers_share_a_directory() {
    let storage = tempfile::tempdir().unwrap();
    let launch = Launch::new().storage(storage.path());
    let (first, second) = (launch.start(), launch.start());
    let (one, two) = (prompt::ids(3, 400), prompt::ids(4, 400));

    let (cold_one, _) = first.client().generate(&one, 4);
    let (cold_two, _) = second.client().generate(&two, 4);
    wait_stored(&first.client(), 25);
    wait_stored(&second.client(), 25);
    let (warm_two, usage) = first.client().generate(&two, 4);
    assert_eq!((usage.storage, &warm_two), (384, &cold_two));
    let (warm_one, usage) = second.client().generate(&one, 4);
    assert_eq!((usage.storage, &warm_one), (384, &cold_one));
}

#[test]
fn tenants_do_not_share_pages_in_any_tier() {
    let storage = tempfile::tempdir().unwrap();
    let launch = Launch::new().storage(storage.path());
    let long = prompt::ids(5, 400);
    let server = launch.start();
    let client = server.client();
    let (cold, _) = client.generate_salted(&long, 4, Some("tenant one"));
    wait_stored(&client, 25);
    for salt in [None, Some("tenant two")] {
        let (answer, usage) = client.generate_salted(&long, 4, salt);
        assert_eq!(usage.cached(), 0, "salt {salt:?} saw another's pages");
        assert_eq!(answer, cold, "a salt changes where pages are found, not what is computed");
    }
    server.stop();

    let server = launch.start();
    let client = server.client();
    let (_, usage) = client.generate_salted(&long, 4, Some("tenant three"));
    assert_eq!(usage.cached(), 0);
    let (_, usage) = client.generate_salted(&long, 4, Some("tenant one"));
    assert_eq!(usage.storage, 384);
}

#[test]
fn a_chat_is_continued_from_storage_after_a_restart() {
    let storage = tempfile::tempdir().unwrap();
    let launch = Launch::new().storage(storage.path());
    let facts: String = (1..40).map(|n| format!("Box {n} holds {} balls. ", n * 7 % 13)).collect();
    let mut messages = vec![json!({"role": "user", "content": format!("{facts}How many balls are in box 1?")})];
    let ask = |launch: &Launch, messages: &[serde_json::Value]| {
        let server = launch.start();
        let body = json!({"messages": messages, "max_tokens": 24, "temperature": 0});
        let reply = server.client().post("/v1/chat/completions", &body);
        assert_eq!(reply.status, 200, "{}", reply.json);
        let text = reply.json["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
        let usage = kvdock_tests::client::usage(&reply.json["usage"]);
        server.stop();
        (text, usage)
    };
    let (first, usage) = ask(&launch, &messages);
    assert_eq!(usage.cached(), 0);
    assert!(!first.trim().is_empty(), "the model says something");
    messages.push(json!({"role": "assistant", "content": first}));
    messages.push(json!({"role": "user", "content": "And in box 2?"}));
    let (_, next) = ask(&launch, &messages);
    assert!(next.storage + 32 >= usage.prompt, "the first turn, {usage:?}, is found in the second, {next:?}");
}
