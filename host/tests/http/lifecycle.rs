//! Start, stop, disconnects, and the command line

use std::io::Write as _;
use std::net::TcpListener;

use serde_json::json;

use crate::support::{Server, completion, path_text, run, tiny_model};

fn long(tokens: u32) -> serde_json::Value {
    json!({"text": "a", "stream": true,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": true}})
}

#[test]
fn a_client_that_leaves_cancels_its_request() {
    let server = Server::slow(&[]);
    let streaming = server.begin("/generate", &long(4000));
    server.wait_until("it runs", |server| server.metric("sglang:num_running_reqs") == 1.0);
    drop(streaming);
    server.wait_until("the streamed request is cancelled", |server| {
        server.metric("sglang:num_running_reqs") == 0.0 && server.metric("sglang:num_aborted_requests_total") == 1.0
    });

    let body = completion(json!("a"), json!({"max_tokens": 4000})).to_string();
    let mut waiting = std::net::TcpStream::connect(&server.address).unwrap();
    write!(
        waiting,
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    server.wait_until("it runs", |server| server.metric("sglang:num_running_reqs") == 1.0);
    drop(waiting);
    server.wait_until("the waiting request is cancelled", |server| {
        server.metric("sglang:num_running_reqs") == 0.0 && server.metric("sglang:num_aborted_requests_total") == 2.0
    });
}

#[test]
fn sigterm_lets_requests_finish_and_refuses_new_ones() {
    let mut server = Server::slow(&[]);
    let whole = server.post(
        "/generate",
        &json!({"text": "a",
        "sampling_params": {"temperature": 0, "max_new_tokens": 800, "ignore_eos": true}}),
    );
    let text = whole.ok()["text"].as_str().unwrap().to_owned();
    let running = server.begin("/generate", &long(800));
    server.signal(libc::SIGTERM);
    server.wait_for_line("SIGTERM");
    assert_eq!(server.get("/health").status, 503);
    server.post("/v1/completions", &completion(json!("x"), json!({}))).error(503);
    let rest = running.rest();
    assert!(rest.contains("data: [DONE]"));
    let last = rest.rsplit("data: {").next().unwrap();
    let last = format!("{{{}", last.split("\n\n").next().unwrap());
    let last: serde_json::Value = serde_json::from_str(&last).unwrap();
    assert_eq!(last["text"], text);
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn the_shutdown_timeout_bounds_the_drain() {
    let mut server = Server::slow(&["server.shutdown_timeout=0.2"]);
    let running = server.begin("/generate", &long(4000));
    server.signal(libc::SIGINT);
    let rest = running.rest();
    assert!(rest.contains("shutting down"), "{rest}");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn a_second_signal_ends_at_once() {
    let mut server = Server::slow(&["server.shutdown_timeout=600"]);
    let _running = server.begin("/generate", &long(4000));
    server.signal(libc::SIGTERM);
    server.wait_for_line("SIGTERM");
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(1));
}

#[test]
fn starts_that_can_not_work_say_why_in_a_line() {
    let model = tiny_model();
    let model = format!("model.path={}", path_text(model.path()));
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = format!("server.port={}", taken.local_addr().unwrap().port());
    let cases: &[(&[&str], &str)] = &[
        (&["--set", &model, "--set", &port], "can't listen on 127.0.0.1:"),
        (&[], "model.path is not set"),
        (&["--set", "model.path=/no/such/model"], "/no/such/model"),
        (&["--set", &model, "--set", "server.prot=1"], "did you mean server.port?"),
        (
            &["--set", &model, "--set", "server.port=0", "--set", "engine.device=cuda"],
            "engine.device = \"cuda\": CUDA: ",
        ),
        (
            &["--set", &model, "--set", "engine.tp_size=3"],
            "can't be spread over 3 ranks: it has 4 query heads, which 3 does not divide (1, 2, 4 would)",
        ),
        (&["--set", &model, "--set", "engine.pp_size=2"], "engine.pp_size = 2: there is no pipeline parallelism"),
        (
            &["--set", &model, "--set", "engine.tp_size=2", "--set", "engine.device=cuda"],
            "engine.tp_size = 2: ranks run on CPUs",
        ),
        (
            &["--set", &model, "--set", "engine.cp_size=4", "--set", "engine.device=cuda"],
            "engine.cp_size = 4: ranks run on CPUs",
        ),
        (
            &["--set", &model, "--set", "cache.mode=linker", "--set", "cache.host_tokens=4096"],
            "cache.mode = \"linker\" has no host tier",
        ),
        (&["--set", &model, "--set", "server.port=0", "--set", "cache.device_tokens=8"], "cache.device_tokens = 8"),
        (&["--set", &model, "--set", "server.port=0", "--set", "storage.backend=no-such-plugin"], "no-such-plugin"),
        (&["--config", "/no/such/file.toml"], "/no/such/file.toml: can't be read"),
    ];
    for (args, words) in cases {
        let args = [&["serve", "--set", "telemetry.log_level=error"], *args].concat();
        let (status, _, stderr) = run(&args);
        assert_eq!(status.code(), Some(1), "{args:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
        assert!(stderr.starts_with("error: "), "{stderr}");
        assert!(stderr.contains(words), "{args:?}: {stderr}");
    }
    assert_eq!(run(&["serve", "--nonsense"]).0.code(), Some(2));
}

#[test]
fn a_storage_that_is_not_required_does_not_stop_the_start() {
    let mut server = Server::with(&["storage.backend=no-such-plugin", "storage.required=false"]);
    let status = server.get("/hicache/storage-backend").ok();
    assert_eq!(status["backends"][0]["name"], "no-such-plugin");
    assert_eq!(status["backends"][0]["state"], "failed");
    assert!(status["backends"][0]["reason"].as_str().unwrap().contains("no-such-plugin"));
    assert_eq!(status["hicache_storage_backend"], serde_json::Value::Null);
    server.post("/v1/completions", &completion(json!("x"), json!({}))).ok();
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn without_a_gpu_the_cpu_serves() {
    let server = Server::with(&["engine.device=auto"]);
    let line = server.before.lines().find(|line| line.contains("no CUDA: ")).unwrap_or_default();
    assert!(line.contains("the model runs on the CPU"), "{}", server.before);
    assert!(server.get("/server_info").text.contains("\"device\":\"cpu\""));
    server.post("/v1/completions", &completion(json!("x"), json!({}))).ok();
}

#[test]
fn config_commands() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvdock.toml");
    let name = path_text(&file);
    let (status, reference, _) = run(&["config", "reference"]);
    assert!(status.success());
    std::fs::write(&file, reference).unwrap();
    let (status, stdout, stderr) = run(&["config", "check", &name]);
    assert!(status.success(), "{stderr}");
    assert_eq!(stdout, format!("{name}: ok\n"));
    std::fs::write(&file, "[storage]\nbackend = \"fiel\"\n").unwrap();
    let (status, _, stderr) = run(&["config", "check", &name]);
    assert_eq!(status.code(), Some(1));
    assert!(stderr.contains("storage.fiel: no plugin named \"fiel\""), "{stderr}");
    std::fs::write(&file, "[model]\npath = \"/no/such/model\"\n").unwrap();
    let (status, _, stderr) = run(&["config", "check", &name]);
    assert_eq!(status.code(), Some(1));
    assert!(stderr.contains("model.path") && stderr.contains("/no/such/model"), "{stderr}");
    std::fs::write(&file, "[cache]\ndevice_tokens = 8\n").unwrap();
    let (status, _, stderr) = run(&["config", "check", &name]);
    assert_eq!(status.code(), Some(1));
    assert!(stderr.contains("cache.device_tokens = 8: takes at least one page"), "{stderr}");
    std::fs::write(&file, "[engine]\ndevice = \"cuda\"\n").unwrap();
    let (status, _, stderr) = run(&["config", "check", &name]);
    assert_eq!(status.code(), Some(1), "the tests hide every GPU");
    assert!(stderr.contains("engine.device = \"cuda\": "), "{stderr}");
    std::fs::write(&file, "[server]\nport = 1\n[cache]\npage_siz = 8\neviction = \"mru\"\n").unwrap();
    let (status, _, stderr) = run(&["config", "check", &name]);
    assert_eq!(status.code(), Some(1));
    assert_eq!(
        stderr,
        format!(
            "error: {name}:5: cache.eviction = \"mru\": takes \"lru\", \"lfu\", \"slru\", \"fifo\" or \"priority\"; did you mean \"lru\"?\n\
             error: {name}:4: unknown key cache.page_siz; did you mean cache.page_size?\n"
        )
    );
}

#[test]
fn doctor_and_plugin_list_report() {
    let (status, stdout, stderr) = run(&["doctor"]);
    assert!(status.success(), "{stderr}");
    assert!(stdout.contains("cpu kernels") && stdout.contains("no CUDA: "), "{stdout}");
    let folder = tempfile::tempdir().unwrap();
    let path = format!("storage.plugin_path={}", path_text(folder.path()));
    assert!(run(&["plugin", "list", "--set", &path]).0.success());
    let (status, _, stderr) = run(&["plugin", "info", "no-such-plugin"]);
    assert_eq!(status.code(), Some(1));
    assert!(stderr.contains("no-such-plugin"), "{stderr}");
    let not_elf = folder.path().join("x.so");
    std::fs::write(&not_elf, "hello").unwrap();
    let (status, _, stderr) = run(&["plugin", "info", &path_text(&not_elf)]);
    assert_eq!(status.code(), Some(1));
    assert!(stderr.contains("x.so"), "{stderr}");
}
