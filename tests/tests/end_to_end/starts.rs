//! Starting and stopping.

use std::process::Command;

use kvdock_tests::server::Launch;
use kvdock_tests::{broken, paths, prompt};
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
fn a_low_soft_limit_of_open_files_stayed_and_left_few_connections_to_peers() {
    let server = Launch::new().through(&["sh", "-c", "ulimit -Sn 300; exec \"$0\" \"$@\""]).start();
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.pid())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let numbers: Vec<u64> = line.split_whitespace().skip(3).map(|word| word.parse().unwrap_or(u64::MAX)).collect();
    assert_eq!(numbers[0], numbers[1].min(1 << 19), "{line}");
    server.stop();
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

/// The drain of a backend that never returns may take ten minutes; the process has two seconds.
#[test]
fn sigterm_waited_for_the_drain_of_a_backend_that_hangs() {
    let plugins = tempfile::tempdir().unwrap();
    broken::plugin(plugins.path(), "hanger", "hang_in_get");
    let server = Launch::new()
        .set("storage.backend", "\"hanger\"")
        .set("storage.plugin_path", format!("[{:?}]", plugins.path().to_str().unwrap()))
        .set("storage.hanger.timeout", 1)
        .set("storage.hanger.drain_timeout", 600)
        .set("server.shutdown_timeout", 2)
        .start();
    let client = server.client();
    let long = prompt::ids(82, 320);
    let (cold, _) = client.generate(&long, 2);
    let stored = [("backend", "hanger"), ("op", "set"), ("result", "ok")];
    while client.metrics().sum("kvdock:storage_pages_total", &stored) < 20.0 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    client.flush();
    assert_eq!(client.generate(&long, 2).0, cold, "computed, because the read does not return");
    let held = [("backend", "hanger")];
    assert!(client.metrics().sum("kvdock:storage_quarantined_pages", &held) > 0.0, "a call is still out");
    // Waits a minute for the end, and fails then.
    server.stop();
}

#[test]
fn config_check_refuses_another_file_than_the_pinned_one() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("kvdock.toml");
    let check = |sha256: &str| {
        let text = format!(
            "[model]\npath = {:?}\n[storage]\nbackend = \"file\"\nplugin_path = [{:?}]\n\
             [storage.file]\ndir = {:?}\nsha256 = \"{sha256}\"\n",
            paths::model(),
            paths::build(),
            folder.path().join("pages"),
        );
        std::fs::write(&config, text).unwrap();
        let output = Command::new(paths::kvdock()).args(["config", "check"]).arg(&config).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let other = "0".repeat(64);
    let (success, error) = check(&other);
    assert!(!success && error.contains(&other), "both digests are in the message: {error}");
    // The message says which digest it found; with that one the check passes.
    let is_digest = |word: &&str| word.len() == 64 && **word != *other && word.bytes().all(|b| b.is_ascii_hexdigit());
    let found = error.split(|c: char| !c.is_ascii_alphanumeric()).find(is_digest).unwrap_or_else(|| panic!("{error}"));
    assert_eq!(check(found), (true, String::new()));
}

/// A plugin that names pages of one layout alone in another engine's way: another layout is refused before the model loads or anything is registered.
#[test]
fn a_layout_that_a_backend_has_no_names_for_is_refused_by_the_configuration() {
    let folder = tempfile::tempdir().unwrap();
    broken::Broken::new()
        .name("picky")
        .note(|note| {
            note["config_schema"]["x-key-schemes"] = json!(["kvdock", "sglang"]);
            note["config_schema"]["x-host-layouts"] = json!({"sglang": ["page_first"]});
        })
        .write(folder.path());
    let config = folder.path().join("kvdock.toml");
    let check = |layout: &str, scheme: &str| {
        let text = format!(
            "[model]\npath = {:?}\n[cache]\nhost_layout = {layout:?}\n[storage]\nbackend = \"picky\"\nplugin_path = [{:?}]\n\
             [storage.picky]\nkey_scheme = {scheme:?}\n",
            paths::model(),
            folder.path(),
        );
        std::fs::write(&config, text).unwrap();
        let output = Command::new(paths::kvdock()).args(["config", "check"]).arg(&config).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(check("page_first", "sglang"), (true, String::new()));
    assert_eq!(check("layer_first", "kvdock"), (true, String::new()));
    let (success, error) = check("layer_first", "sglang");
    assert!(!success && error.contains("cache.host_layout = \"layer_first\" have no names there"), "{error}");
    assert!(error.contains("set one of \"page_first\""), "{error}");
    let mut server = Launch::new()
        .set("storage.plugin_path", json!([folder.path()]))
        .set("storage.backend", "\"picky\"")
        .set("storage.picky.key_scheme", "\"sglang\"")
        .set("cache.host_layout", "\"layer_first\"")
        .spawn();
    let status = server.wait();
    let log = server.finished_log();
    assert!(!status.success() && log.contains("have no names there"), "{log}");
    assert!(!log.contains("model loaded"), "{log}");
}
