//! kill -9 while pages are being written.

use std::time::Duration;

use kvdock_tests::prompt::{self, Random};
use kvdock_tests::server::Launch;
use kvdock_tests::{soak, storage};

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
        // Fresh pages are on their way to storage when the process ends.
        std::thread::scope(|scope| {
            let (client, server) = (client.clone(), &server);
            scope.spawn(move || {
                let body = serde_json::json!({
                    "input_ids": prompt::ids(1000 + round, 480),
                    "sampling_params": {"temperature": 0, "max_new_tokens": 1},
                });
                // The server is killed under this request or after it; either is fine.
                if let Ok(mut stream) = client.try_stream("/generate", &body) {
                    let _ = stream.next_event();
                }
            });
            let moment = random.below(2500);
            println!("round {round}: kill -9 after {moment} ms");
            std::thread::sleep(Duration::from_millis(moment));
            server.signal(rustix::process::Signal::KILL);
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
    server.stop();
    let leftovers: Vec<_> = storage::files(folder.path()).into_iter().filter(|path| is_leftover(path)).collect();
    assert_eq!(leftovers, Vec::<std::path::PathBuf>::new(), "nothing half-written stays");
}

/// Whether a file of the storage directory is the trace of a write that did not end.
fn is_leftover(path: &std::path::Path) -> bool {
    path.components().any(|part| {
        let name = part.as_os_str().to_string_lossy();
        name == "tmp" || name.ends_with(".tmp")
    })
}
