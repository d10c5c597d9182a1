//! Real servers that share a real Mooncake cluster.

// A test that cannot go on panics: that is how it fails.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::{Duration, Instant};

use kvdock_tests::client::{Client, Generation, Usage};
use kvdock_tests::mooncake::{Etcd, Master, Mode, Official};
use kvdock_tests::server::Launch;
use kvdock_tests::storage::wait_stored;
use kvdock_tests::{paths, prompt};
use kvdock_verbs_stand_in::harness;

const SEGMENT: &str = "\"256MiB\"";

/// A server that lends memory of so many bytes to the cluster of a master.
fn launch(master: &str, metadata: &str, segment: &str) -> Launch {
    let plugins = paths::mooncake_plugin();
    let folder = plugins.parent().unwrap().to_str().unwrap();
    Launch::new()
        .set("storage.backend", "\"mooncake\"")
        .set("storage.plugin_path", format!("[\"{folder}\"]"))
        .set("storage.mooncake.master_server_address", format!("\"{master}\""))
        .set("storage.mooncake.metadata_server", format!("\"{metadata}\""))
        .set("storage.mooncake.local_hostname", "\"127.0.0.1\"")
        .set("storage.mooncake.global_segment_size", segment)
        .set("cache.prefetch_threshold", 16)
        // What the tests ask is whether pages come, not whether they come sooner than they are computed.
        .set("cache.prefetch_policy", "\"wait_complete\"")
}

fn member(master: &Master, mode: Mode, segment: &str) -> Launch {
    launch(&master.address(), &master.metadata(mode), segment)
        .set("storage.mooncake.master_metrics_port", master.metrics)
}

/// Asks until the prompt comes from storage: a peer that died is noticed in time, not at once.
fn from_storage(client: &Client, ids: &[u32], expected: &Generation) -> Usage {
    let began = Instant::now();
    loop {
        client.flush();
        let (answer, usage) = client.generate(ids, 8);
        assert!(answer == *expected, "another answer than the cold one, with {usage:?}");
        if usage.storage > 0 {
            return usage;
        }
        assert!(began.elapsed() < Duration::from_secs(90), "the prompt does not come from storage");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Tokens in whole pages of 16 that can be taken over: the last token is always computed.
fn whole_pages(tokens: u64) -> u64 {
    (tokens - 1) / 16 * 16
}

#[test]
fn what_one_server_computed_the_other_serves_from_storage_and_goes_on_when_the_first_is_killed() {
    for mode in [Mode::Peer, Mode::Http] {
        let master = Master::start(&["--default_kv_lease_ttl=10000", "--client_ttl=5"]);
        let (one, two) = (member(&master, mode, SEGMENT).start(), member(&master, mode, SEGMENT).start());
        let long = prompt::ids(11, 700);
        let (cold, usage) = one.client().generate(&long, 8);
        assert_eq!(usage.cached(), 0, "the store is empty: {usage:?}");
        wait_stored(&one.client(), 43);

        let (warm, usage) = two.client().generate(&long, 8);
        assert_eq!((usage.storage, usage.device + usage.host), (whole_pages(700), 0), "{mode:?}: {usage:?}");
        assert!(warm == cold, "{mode:?}: pages of the other server give another answer");

        // And the other way round.
        let other = prompt::ids(12, 300);
        let (cold_other, _) = two.client().generate(&other, 8);
        wait_stored(&two.client(), 18);
        let (warm_other, usage) = one.client().generate(&other, 8);
        assert_eq!(usage.storage, whole_pages(300), "{mode:?}: {usage:?}");
        assert!(warm_other == cold_other);

        one.kill();
        // Nothing fails while the master still believes in what died, and the answers stay what they are.
        let client = two.client();
        client.flush();
        let (again, _) = client.generate(&long, 8);
        assert!(again == cold, "{mode:?}: the death of a peer changes an answer");
        // What was lost with it is stored anew, in memory that is there.
        from_storage(&client, &long, &cold);
        from_storage(&client, &other, &cold_other);

        // A third one joins, lends nothing, and finds what the second has.
        let three = member(&master, mode, "0").start();
        let (warm, usage) = three.client().generate(&other, 8);
        assert!(usage.storage > 0 && warm == cold_other, "{mode:?}: {usage:?}");
        three.stop();
        two.stop();
    }
}

#[test]
fn two_servers_share_pages_by_rdma_through_the_stand_in_for_libibverbs() {
    let master = Master::start(&["--default_kv_lease_ttl=10000", "--client_ttl=5"]);
    let folder = tempfile::tempdir().unwrap();
    harness::install(folder.path());
    let folder = folder.path().display();
    let (library, stand_in) = (format!("LD_LIBRARY_PATH={folder}"), format!("KVDOCK_STAND_IN={folder}"));
    let launch = |segment| {
        let launch = member(&master, Mode::Peer, segment).set("storage.mooncake.protocol", "\"rdma\"");
        launch.through(&["env", &library, &stand_in])
    };
    let (one, two) = (launch(SEGMENT).start(), launch("0").start());
    let long = prompt::ids(16, 500);
    let (cold, _) = two.client().generate(&long, 8);
    wait_stored(&two.client(), 31);
    let (warm, usage) = one.client().generate(&long, 8);
    assert_eq!(usage.storage, whole_pages(500), "{usage:?}");
    assert!(warm == cold);
    let client = two.client();
    from_storage(&client, &long, &cold);
    one.kill();
    client.flush();
    let (again, _) = client.generate(&long, 8);
    assert!(again == cold, "the death of a peer changes an answer");
    two.stop();
}

#[test]
fn servers_that_name_pages_as_sglang_does_share_them() {
    let master = Master::start(&["--default_kv_lease_ttl=10000"]);
    let launch = member(&master, Mode::Peer, SEGMENT)
        .set("storage.mooncake.key_scheme", "\"sglang\"")
        .set("cache.host_layout", "\"page_first\"");
    let (one, two) = (launch.start(), launch.start());
    let status = one.client().get("/hicache/storage-backend").json;
    assert_eq!(status["backends"][0]["settings"]["key_scheme"], "sglang", "{status}");
    let long = prompt::ids(17, 500);
    let (cold, _) = one.client().generate(&long, 8);
    wait_stored(&one.client(), 31);
    let (warm, usage) = two.client().generate(&long, 8);
    assert_eq!(usage.storage, whole_pages(500), "{usage:?}");
    assert!(warm == cold);
    // Who names pages by kvdock's own scheme does not find them.
    let third = member(&master, Mode::Peer, "0").start();
    let (other, usage) = third.client().generate(&long, 8);
    assert_eq!((usage.storage, other == cold), (0, true), "{usage:?}");
    third.stop();
    two.stop();
    let log = one.stop();
    assert!(log.contains("WARN") && log.contains("sglang"), "it warns at the start:\n{log}");
}

#[test]
fn pages_lie_in_the_memory_of_an_official_client_and_survive_the_servers() {
    let master = Master::start(&["--default_kv_lease_ttl=10000"]);
    let _holder = Official::start(&master, Mode::Peer, 256 << 20);
    let launch = member(&master, Mode::Peer, "0");
    let server = launch.start();
    let long = prompt::ids(13, 500);
    let (cold, _) = server.client().generate(&long, 8);
    // SIGTERM ends what is under way first.
    server.stop();
    let server = launch.start();
    let (warm, usage) = server.client().generate(&long, 8);
    assert_eq!(usage.storage, whole_pages(500), "{usage:?}");
    assert!(warm == cold);
    server.stop();
}

#[test]
fn a_master_that_restarts_costs_pages_and_no_answers() {
    let mut master = Master::start(&["--default_kv_lease_ttl=10000"]);
    let server = member(&master, Mode::Peer, SEGMENT).start();
    let client = server.client();
    let long = prompt::ids(14, 400);
    let (cold, _) = client.generate(&long, 8);
    wait_stored(&client, 25);
    master.kill();
    client.flush();
    let (without, usage) = client.generate(&long, 8);
    assert!(without == cold && usage.storage == 0, "{usage:?}");
    master.start_again();
    from_storage(&client, &long, &cold);
    server.stop();
}

/// A master that had started anew knew nothing, while servers went on believing that it held their pages: what one of them still had on its host was
/// not stored again for as long as it stayed there, and nobody else found it.
#[test]
fn pages_that_a_restarted_master_had_forgotten_were_never_stored_again() {
    let mut master = Master::start(&["--default_kv_lease_ttl=10000"]);
    let one = member(&master, Mode::Peer, SEGMENT).start();
    let long = prompt::ids(18, 400);
    let (cold, _) = one.client().generate(&long, 8);
    wait_stored(&one.client(), 25);
    master.kill();
    master.start_again();
    // Nobody asks it for anything: it stores by itself what it has.
    wait_stored(&one.client(), 50);
    let two = member(&master, Mode::Peer, "0").start();
    let (warm, usage) = two.client().generate(&long, 8);
    assert_eq!(usage.storage, whole_pages(400), "{usage:?}\n{}", one.log());
    assert!(warm == cold);
    let text = one.client().metrics_text();
    assert!(text.contains("kvdock_contents_lost"), "{text}");
    two.stop();
    one.stop();
}

/// The same, where a part of the store goes with the server that lent it.
#[test]
fn pages_that_went_with_a_peer_were_never_stored_again() {
    let master = Master::start(&["--default_kv_lease_ttl=10000", "--client_ttl=5"]);
    let lender = member(&master, Mode::Peer, SEGMENT).start();
    let one = member(&master, Mode::Peer, "0").start();
    let long = prompt::ids(19, 400);
    let (cold, _) = one.client().generate(&long, 8);
    wait_stored(&one.client(), 25);
    let other = member(&master, Mode::Peer, SEGMENT).start();
    lender.kill();
    wait_stored(&one.client(), 50);
    let (warm, usage) = other.client().generate(&long, 8);
    assert_eq!(usage.storage, whole_pages(400), "{usage:?}\n{}", one.log());
    assert!(warm == cold);
    other.stop();
    one.stop();
}

#[test]
fn servers_follow_the_leader_of_several_masters() {
    let etcd = Etcd::start();
    let mut first = Master::start_of_several(&etcd, "servers");
    let began = Instant::now();
    while !first.serves() {
        assert!(began.elapsed() < Duration::from_secs(90), "no master leads\n{}", first.log());
        std::thread::sleep(Duration::from_millis(100));
    }
    let second = Master::start_of_several(&etcd, "servers");
    let address = format!("etcd://{}", etcd.endpoint());
    let launch = launch(&address, "P2PHANDSHAKE", SEGMENT).set("storage.mooncake.cluster_id", "\"servers\"");
    let (one, two) = (launch.start(), launch.start());
    let long = prompt::ids(15, 400);
    let (cold, _) = one.client().generate(&long, 8);
    wait_stored(&one.client(), 25);
    let usage = from_storage(&two.client(), &long, &cold);
    assert_eq!(usage.storage, whole_pages(400), "{usage:?}");
    first.kill();
    let (meanwhile, _) = two.client().generate(&prompt::ids(16, 100), 8);
    assert_eq!(meanwhile.text, one.client().generate(&prompt::ids(16, 100), 8).0.text, "they serve without a leader");
    // The new leader knows nothing; what is asked again is stored again.
    from_storage(&one.client(), &long, &cold);
    assert!(second.serves());
    from_storage(&two.client(), &long, &cold);
    one.stop();
    two.stop();
}

#[test]
fn a_full_cluster_is_said_in_words_and_serving_goes_on() {
    // Nothing is evicted before its lease is over, which here outlasts the test, and asking for a page is enough to lease it.
    let master = Master::start(&["--default_kv_lease_ttl=600000"]);
    // Room for the pages of one prompt and a part of another: each page has some hundred KiB.
    let server = member(&master, Mode::Peer, "\"16MiB\"").start();
    let client = server.client();
    let prompts: Vec<Vec<u32>> = (20..23).map(|seed| prompt::ids(seed, 400)).collect();
    let mut cold = Vec::new();
    for ids in &prompts {
        let (answer, usage) = client.generate(ids, 8);
        assert_eq!(usage.storage, 0);
        cold.push(answer);
        // Asks for its pages, which leases those that are there.
        client.flush();
        assert!(client.generate(ids, 8).0 == cold[cold.len() - 1]);
    }
    let refused = || client.metrics().storage_pages("set", "refused");
    let began = Instant::now();
    while refused() == 0.0 {
        assert!(began.elapsed() < Duration::from_secs(90), "nothing was refused\n{}", client.metrics_text());
        std::thread::sleep(Duration::from_millis(200));
    }
    for (ids, cold) in prompts.iter().zip(&cold) {
        client.flush();
        let (answer, usage) = client.generate(ids, 8);
        assert!(answer == *cold, "another answer than the cold one, with {usage:?}");
    }
    assert_eq!(client.get("/health").status, 200);
    let log = server.stop();
    assert!(log.contains("no space: no segment of the store"), "the log says why:\n{log}");
}
