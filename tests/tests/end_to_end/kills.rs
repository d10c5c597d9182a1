//! kill -9 while pages are being written.

use std::path::Path;
use std::time::{Duration, Instant};

use kvdock_tests::prompt::{self, Random};
use kvdock_tests::server::Launch;
use kvdock_tests::{soak, storage};
use rustix::process::Signal;
use serde_json::json;

#[test]
fn soak_kills_during_backups_leave_nothing_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let launch = Launch::new().storage(folder.path());
    let mut random = Random::new(u64::from(std::process::id()));
    // One prompt that has been asked for in every round; its answer never changes.
    let steady = prompt::ids(60, 320);
    let mut cold = None;
    for round in 0..3 * u64::from(soak::factor()) {
        let server = launch.start();
        let client = server.client();
        let (answer, usage) = client.generate(&steady, 4);
        let expected = cold.get_or_insert_with(|| answer.clone());
        assert_eq!(&answer, expected, "round {round}: {usage:?}");
        // Fresh pages are computed and then on their way to storage when the process ends.
        let body = json!({
            "input_ids": prompt::ids(1000 + round, 480),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        });
        std::thread::scope(|scope| {
            let request = scope.spawn(|| client.try_stream("/generate", &body).map(|mut stream| stream.next_event()));
            let after_the_answer = round % 2 == 1;
            let moment = if after_the_answer { random.below(150) } else { random.below(1500) };
            if after_the_answer {
                request.join().unwrap().unwrap().unwrap();
            }
            println!(
                "round {round}: kill -9 {moment} ms after the {}",
                if after_the_answer { "answer" } else { "request" }
            );
            std::thread::sleep(Duration::from_millis(moment));
            server.signal(Signal::KILL);
        });
        server.kill();
    }

    let server = launch.start();
    let client = server.client();
    for round in 0..3 * u64::from(soak::factor()) {
        client.generate(&prompt::ids(1000 + round, 480), 1);
    }
    let (answer, usage) = client.generate(&steady, 4);
    assert_eq!(Some(&answer), cold.as_ref(), "{usage:?}");
    let metrics = client.metrics();
    assert_eq!(metrics.storage_pages("get", "corrupt"), 0.0, "no page fails its check");
    assert!(metrics.storage_pages("get", "ok") > 0.0, "pages of killed servers are used");
    wait_clean(folder.path());
    server.stop();
}

/// Waits until nothing is left of the servers that were killed: no half-written file, no sign of theirs.
fn wait_clean(folder: &Path) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let files = storage::files(folder);
        let names = files.iter().filter_map(|path| path.strip_prefix(folder).ok());
        let leftovers: Vec<_> = names.clone().filter(|path| is_half_written(path)).collect();
        let owners = names.filter(|path| path.starts_with("owners")).count();
        if leftovers.is_empty() && owners <= 1 {
            return;
        }
        assert!(Instant::now() < deadline, "{owners} signs of processes, and half-written files: {leftovers:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Whether a file of the storage directory is the trace of a write that did not end: those have names of their own
/// until they are whole (FORMAT.md of the file plugin).
fn is_half_written(path: &Path) -> bool {
    path.file_name().is_some_and(|name| {
        let name = name.to_string_lossy();
        name.starts_with('.') || name.ends_with(".tmp")
    })
}
