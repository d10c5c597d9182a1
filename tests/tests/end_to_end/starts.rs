//! Starting and stopping.

use kvdock_tests::prompt;
use kvdock_tests::server::Launch;
use serde_json::json;

#[test]
fn a_required_storage_that_fails_stops_the_start_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("no-folder");
    std::fs::write(&file, b"").unwrap();
    let mut server = Launch::new().storage(&file).spawn();
    let status = server.wait();
    let log = server.finished_log();
    assert!(!status.success(), "{log}");
    assert!(log.contains("no-folder"), "the error names the folder: {log}");
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
fn an_optional_storage_that_fails_does_not_stop_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("no-folder");
    std::fs::write(&file, b"").unwrap();
    let server = Launch::new().storage(&file).set("storage.required", false).start();
    let client = server.client();
    let status = client.get("/hicache/storage-backend");
    assert_eq!(status.status, 200);
    assert!(status.json.to_string().contains("no-folder"), "the status says why: {}", status.json);
    assert!(server.log().contains("no-folder"), "the log says why: {}", server.log());
    client.generate(&prompt::ids(80, 32), 2);
}

#[test]
fn a_wrong_setting_is_one_line_that_names_it() {
    let mut server = Launch::new().set("cache.page_sise", 16).spawn();
    let status = server.wait();
    let log = server.finished_log();
    assert!(!status.success());
    assert!(log.contains("cache.page_sise") && log.contains("cache.page_size"), "{log}");
    assert!(!log.contains("panicked"), "{log}");
}

#[test]
fn sigterm_lets_a_running_stream_finish() {
    let server = Launch::new().start();
    let client = server.client();
    let body = json!({
        "prompt": prompt::ids(81, 32),
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": true,
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    let mut stream = client.stream("/v1/completions", &body);
    stream.next_event().unwrap().expect("the stream has begun");
    server.signal(rustix::process::Signal::TERM);
    let mut usage = None;
    while let Some(event) = stream.next_event().unwrap() {
        assert!(event.get("error").is_none(), "{event}");
        if event["usage"].is_object() {
            usage = Some(event["usage"].clone());
        }
    }
    assert_eq!(usage.expect("the usage chunk comes last")["completion_tokens"], 60);
    server.stop_after_signal();
}
