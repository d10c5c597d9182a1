//! Many clients at once, some of which leave in the middle.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdock_tests::client::Client;
use kvdock_tests::prompt::{self, Random};
use kvdock_tests::server::{Launch, Server};
use kvdock_tests::soak;
use serde_json::json;

const CLIENTS: u64 = 64;

#[test]
fn soak_streaming_clients_with_cancels_leak_nothing() {
    let storage = tempfile::tempdir().unwrap();
    let server = Launch::new()
        .storage(storage.path())
        .set("cache.device_tokens", 3072)
        .set("cache.host_tokens", 3072)
        .set("engine.max_queued_requests", 256)
        .start();
    let seconds = 10 * u64::from(soak::factor());
    // Fills pools, buffers and the allocator's arenas, so that what grows after it is a leak.
    for seed in 0..3 {
        server.client().generate(&prompt::ids(90 + seed, 1000), 1);
    }
    load(&server, Duration::from_secs(seconds / 2));
    let warm = server.resident_bytes();
    let (finished, cancelled) = load(&server, Duration::from_secs(seconds));
    let after = server.resident_bytes();
    println!(
        "{finished} requests finished, {cancelled} cancelled; resident memory {} MiB, then {} MiB",
        warm >> 20,
        after >> 20
    );
    assert!(finished > 0 && cancelled > 0, "both kinds of client were there");
    assert!(after < warm + warm / 10 + (32 << 20), "memory grew from {warm} to {after} bytes");
    nothing_is_held(&server.client());
    server.stop();
}

/// `CLIENTS` clients for `time`: how many requests ended by themselves and how many were left.
fn load(server: &Server, time: Duration) -> (u64, u64) {
    let (finished, cancelled) = (AtomicU64::new(0), AtomicU64::new(0));
    let end = Instant::now() + time;
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (finished, cancelled) = (&finished, &cancelled);
            let address = server.address();
            scope.spawn(move || {
                let mut random = Random::new(client + 7);
                let client = Client::new(&address);
                while Instant::now() < end {
                    let counter = if one_request(&client, &mut random, end) { finished } else { cancelled };
                    counter.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    (finished.into_inner(), cancelled.into_inner())
}

/// Streams one request to its end, or leaves after a random number of events. Whether it ended.
fn one_request(client: &Client, random: &mut Random, end: Instant) -> bool {
    // Few different prompts, so that requests share prefixes; of different lengths, so that pages split.
    let tokens = 16 + random.below(200) as usize;
    let prompt = &prompt::ids(100 + random.below(12), 256)[..tokens];
    let body = json!({
        "prompt": prompt,
        "max_tokens": 2 + random.below(20),
        "temperature": 0.7,
        "stream": true,
    });
    let leave_after = if random.below(3) == 0 { random.below(6) } else { u64::MAX };
    let mut stream = client.stream("/v1/completions", &body);
    assert_eq!(stream.status, 200, "no request is refused");
    let mut events = 0;
    loop {
        if events == leave_after || Instant::now() > end + Duration::from_secs(20) {
            return false;
        }
        match stream.next_event() {
            Ok(None) => return true,
            Ok(Some(event)) => assert!(event.get("error").is_none(), "{event}"),
            Err(error) => panic!("a stream broke: {error}"),
        }
        events += 1;
    }
}

/// All requests are over: nothing runs, nothing waits, and every page can be freed.
fn nothing_is_held(client: &Client) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let metrics = client.metrics();
        let busy = metrics.sum("sglang:num_running_reqs", &[]) + metrics.sum("sglang:num_queue_reqs", &[]);
        if busy == 0.0 {
            break;
        }
        assert!(Instant::now() < deadline, "{busy} requests still run: {metrics:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    client.flush();
}
