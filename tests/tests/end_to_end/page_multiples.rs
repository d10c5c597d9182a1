//! Prompts of an exact multiple of the page hit every page but the one that holds the last token:
//! its logits have to be computed.

use kvdock_tests::prompt;
use kvdock_tests::server::Launch;
use kvdock_tests::storage::wait_stored;

#[test]
fn all_pages_but_the_last_tokens_hit_in_every_tier() {
    let storage = tempfile::tempdir().unwrap();
    // The device holds one prompt and the tokens after it, the host all of them.
    let launch = Launch::new().storage(storage.path()).set("cache.device_tokens", 608);
    let server = launch.start();
    let client = server.client();
    let (first, second) = (prompt::ids(11, 512), prompt::ids(12, 512));

    let (cold, usage) = client.generate(&first, 4);
    assert_eq!(usage.cached(), 0);
    let (device, usage) = client.generate(&first, 4);
    assert_eq!((usage.device, usage.host, usage.storage), (496, 0, 0));
    assert_eq!(device, cold);

    // Makes the first prompt leave the device; on the host it stays.
    wait_stored(&client, 32);
    client.generate(&second, 4);
    let (host, usage) = client.generate(&first, 4);
    assert_eq!(usage.device + usage.host, 496, "{usage:?}");
    assert!(usage.host >= 400, "most of it left the device: {usage:?}");
    assert_eq!(host, cold);
    server.stop();

    let server = launch.start();
    let (stored, usage) = server.client().generate(&first, 4);
    assert_eq!((usage.device, usage.host, usage.storage), (0, 0, 496));
    assert_eq!(stored, cold);
}

#[test]
fn one_token_more_or_less_moves_the_hit_by_a_page_at_most() {
    let server = Launch::new().start();
    let client = server.client();
    let long = prompt::ids(13, 65);
    let (_, usage) = client.generate(&long, 1);
    assert_eq!(usage.cached(), 0);
    for (tokens, hit) in [(65, 64), (64, 48), (63, 48), (49, 48), (48, 32), (17, 16), (16, 0), (1, 0)] {
        let (_, usage) = client.generate(&long[..tokens], 1);
        assert_eq!(usage.cached(), hit, "a prompt of {tokens} tokens");
    }
}

#[test]
fn a_prompt_equal_to_anothers_tail_never_hits_it() {
    let storage = tempfile::tempdir().unwrap();
    let server = Launch::new().storage(storage.path()).start();
    let client = server.client();
    let whole = prompt::ids(14, 640);
    client.generate(&whole, 1);
    wait_stored(&client, 40);
    let (_, usage) = client.generate(&whole[320..], 1);
    assert_eq!(usage.cached(), 0, "the tail begins a page, at another position");
}
