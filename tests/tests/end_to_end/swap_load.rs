//! File backends are attached, replaced, detached and force-detached under 64 streaming clients.

use std::time::Duration;

use kvdock_tests::load::{Load, Shape, assert_nothing_is_held};
use kvdock_tests::process::{Look, mapped_plugins};
use kvdock_tests::server::Launch;
use kvdock_tests::soak;
use kvdock_tests::swaps::{ENDPOINT, Script, Stage};

const CLIENTS: u64 = 64;
const PAUSE: Duration = Duration::from_secs(2);

/// Short prompts, of more pages in all than device and host hold: storage is in use all the time.
const SHAPE: Shape = Shape { groups: 8, group: 4, shared: 24, own: 32, new_tokens: 6 };

#[test]
fn soak_swaps_under_load_harm_no_answer_and_leave_nothing() {
    let stage = Stage::default();
    let launch = Launch::new()
        .set("cache.page_size", 8)
        .set("cache.device_tokens", 640)
        .set("cache.host_tokens", 512)
        .set("cache.prefetch_threshold", 8)
        .set("engine.max_running_requests", 64);
    let server = stage.set(launch).start();
    let client = server.client();
    let load = Load::prepare(&client, &SHAPE).unwrap();
    // Threads and files that come with the first requests are there now; none of them is a backend's.
    let start = Look::at(server.pid());
    assert!(mapped_plugins(server.pid()).is_empty());

    let mut script = stage.script(server.client());
    script.fill(|| load.warm(&client).unwrap());
    client.flush();
    // The figures of a backend are shown while it is there.
    script.rest();
    let before = client.metrics();
    let steps = Script::ROUND * soak::factor() as usize;
    let (report, ()) = load.run(&server.address(), CLIENTS, || script.run(steps, PAUSE));
    script.rest();
    let after = client.metrics();
    let pages = |op: &str, result: &str| after.storage_pages(op, result) - before.storage_pages(op, result);
    println!("{} answers, {:?}; p99 of the gaps is {:.3} s", report.answers, report.usage, report.gap(0.99));
    println!(
        "{} pages read, {} stored; steps: times, longest {:?}",
        pages("get", "ok"),
        pages("set", "ok"),
        script.done
    );
    assert!(report.failures.is_empty(), "{}", report.failures.join("\n"));
    assert!(pages("get", "ok") > 0.0 && pages("set", "ok") > 0.0, "storage was in use: {after:?}");
    for result in ["corrupt", "failed", "refused", "late"] {
        println!("{result}: {} pages read, {} stored", pages("get", result), pages("set", result));
    }
    assert_eq!(pages("get", "corrupt"), 0.0, "no page is damaged by a swap");

    assert_nothing_is_held(&client);
    let detached = client.delete(ENDPOINT);
    assert_eq!(detached.status, 200, "{}", detached.json);
    start.wait_back(server.pid());
    let mapped = mapped_plugins(server.pid());
    assert!(script.versions.len() > 1, "a newer build was attached: {:?}", script.versions);
    assert_eq!(mapped.len(), script.contents.len(), "one mapping for each content: {mapped:?}");
    server.stop();
}
