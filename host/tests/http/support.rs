//! A server process and a client for it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use kvdock_models::testing::{Fixture, TinyKind, TinyModel};
use serde_json::{Value, json};

/// A running `kvdock serve`; killed when dropped.
pub struct Server {
    child: Child,
    pub address: String,
    log: Mutex<mpsc::Receiver<String>>,
    /// The lines of the log before the last one that was waited for.
    pub before: String,
    _model: tempfile::TempDir,
}

/// What came back.
pub struct Reply {
    pub status: u16,
    pub headers: ureq::http::HeaderMap,
    pub text: String,
}

impl Reply {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The JSON of a reply that must be a success.
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text);
        self.json()
    }

    /// `error` of a reply that must bear `status`.
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text);
        let error = self.json()["error"].clone();
        for field in ["message", "type", "param", "code"] {
            assert!(error.get(field).is_some(), "no {field} in {error}");
        }
        error
    }
}

pub fn tiny_model() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    TinyModel::new(TinyKind::Llama).write_hf(dir.path()).unwrap();
    dir
}

/// A tiny checkpoint of a family beyond the dense one.
pub fn fixture(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    Fixture::new(name).unwrap().write(dir.path()).unwrap();
    dir
}

/// `kvdock` with a clean environment.
pub fn kvdock(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvdock"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("KVDOCK_") || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    // No test depends on a GPU of the machine.
    command.env("CUDA_VISIBLE_DEVICES", "");
    command.args(args);
    command
}

/// Runs `kvdock` to its end.
pub fn run(args: &[&str]) -> (ExitStatus, String, String) {
    let output = kvdock(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status, text(&output.stdout), text(&output.stderr))
}

impl Server {
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// A server with further `KEY=VALUE` settings.
    pub fn with(settings: &[&str]) -> Self {
        Self::serving(tiny_model(), settings)
    }

    /// A server whose model takes a millisecond or more a token, so that a long request surely still runs when the
    /// test does the next thing.
    pub fn slow(settings: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        TinyModel { layers: 12, ..TinyModel::wide(TinyKind::Llama) }.write_hf(dir.path()).unwrap();
        Self::serving(dir, settings)
    }

    /// A server of the model in a folder.
    pub fn serving(model: tempfile::TempDir, settings: &[&str]) -> Self {
        let path = format!("model.path={}", model.path().display());
        let mut args = vec!["serve", "--set", "server.port=0", "--set", &path];
        for setting in ["cache.device_tokens=4096", "cache.host_tokens=4096", "model.name=tiny"] {
            args.extend(["--set", setting]);
        }
        for setting in settings {
            args.extend(["--set", setting]);
        }
        let mut child = kvdock(&args).stderr(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
        let stderr = child.stderr.take().unwrap();
        let (sender, log) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    // Nobody reads any more, but the pipe must not fill.
                    continue;
                }
            }
        });
        let mut server =
            Self { child, address: String::new(), log: Mutex::new(log), before: String::new(), _model: model };
        let line = server.wait_for_line("listening on http://");
        server.address = line.trim_start_matches("listening on http://").to_owned();
        server
    }

    /// The next line of the log that contains `text`.
    pub fn wait_for_line(&mut self, text: &str) -> String {
        let mut seen = String::new();
        let end = Instant::now() + Duration::from_secs(30);
        let log = self.log.get_mut().unwrap();
        while let Ok(line) = log.recv_timeout(end.saturating_duration_since(Instant::now())) {
            if line.contains(text) {
                self.before = seen;
                return line;
            }
            seen.push_str(&line);
            seen.push('\n');
        }
        panic!("{text:?} did not come; the log says:\n{seen}");
    }

    pub fn signal(&self, signal: i32) {
        let pid = i32::try_from(self.child.id()).unwrap();
        // SAFETY: the child is ours and has not been waited for, so the id is still its own.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }

    /// Waits for the end of the process.
    pub fn wait(&mut self) -> ExitStatus {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "the server does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn get(&self, path: &str) -> Reply {
        reply(agent().get(self.url(path)).call())
    }

    pub fn get_with(&self, path: &str, header: (&str, &str)) -> Reply {
        reply(agent().get(self.url(path)).header(header.0, header.1).call())
    }

    pub fn delete(&self, path: &str) -> Reply {
        reply(agent().delete(self.url(path)).call())
    }

    pub fn put(&self, path: &str, body: &Value) -> Reply {
        reply(agent().put(self.url(path)).send_json(body))
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        reply(agent().post(self.url(path)).send_json(body))
    }

    pub fn post_with(&self, path: &str, body: &Value, header: (&str, &str)) -> Reply {
        reply(agent().post(self.url(path)).header(header.0, header.1).send_json(body))
    }

    pub fn post_text(&self, path: &str, content_type: &str, body: &str) -> Reply {
        reply(agent().post(self.url(path)).header("content-type", content_type).send(body))
    }

    /// The `data:` values of a streamed answer, without the `[DONE]` that must end it.
    pub fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let reply = self.post(path, body);
        assert_eq!(reply.status, 200, "{}", reply.text);
        assert!(reply.headers["content-type"].to_str().unwrap().starts_with("text/event-stream"));
        let mut frames: Vec<&str> = reply.text.split("\n\n").collect();
        assert_eq!(frames.pop(), Some(""), "the last frame must be whole");
        assert_eq!(frames.pop(), Some("data: [DONE]"));
        frames
            .into_iter()
            .map(|frame| {
                let data = frame.strip_prefix("data: ").unwrap_or_else(|| panic!("{frame:?}"));
                serde_json::from_str(data).unwrap()
            })
            .collect()
    }

    /// Sends a request and returns once the head of the answer and some of its body are here.
    pub fn begin(&self, path: &str, body: &Value) -> Answer {
        let body = body.to_string();
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = Answer { stream, seen: Vec::new() };
        answer.read_until("data: ");
        answer
    }

    /// A figure of `/metrics`, summed over its series.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text;
        let mut found = None;
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').unwrap();
            if series == name || series.starts_with(&format!("{name}{{")) {
                *found.get_or_insert(0.0) += value.parse::<f64>().unwrap();
            }
        }
        found.unwrap_or_else(|| panic!("no {name} in\n{text}"))
    }

    /// Waits until `condition` holds.
    pub fn wait_until(&self, what: &str, condition: impl Fn(&Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !condition(self) {
            assert!(Instant::now() < end, "still not: {what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- rest of the server's log:");
            let log = self.log.get_mut().unwrap();
            while let Ok(line) = log.recv_timeout(Duration::from_millis(200)) {
                eprintln!("{line}");
            }
        }
    }
}

/// An answer that is still coming.
pub struct Answer {
    stream: TcpStream,
    seen: Vec<u8>,
}

impl Answer {
    fn read_until(&mut self, text: &str) {
        let mut buffer = [0; 4096];
        while !String::from_utf8_lossy(&self.seen).contains(text) {
            let count = self.stream.read(&mut buffer).unwrap();
            assert!(count > 0, "the answer ended: {}", String::from_utf8_lossy(&self.seen));
            self.seen.extend_from_slice(&buffer[..count]);
        }
    }

    /// All of the answer, once it has ended.
    pub fn rest(mut self) -> String {
        self.read_until("\r\n0\r\n\r\n");
        String::from_utf8_lossy(&self.seen).into_owned()
    }
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder()
        .timeout_global(Some(Duration::from_secs(60)))
        .http_status_as_error(false)
        .allow_non_standard_methods(true)
        .build()
        .into()
}

fn reply(result: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Reply {
    let mut response = result.unwrap();
    Reply {
        status: response.status().as_u16(),
        headers: response.headers().clone(),
        text: response.body_mut().read_to_string().unwrap(),
    }
}

/// A greedy chat request.
pub fn chat(text: &str, more: Value) -> Value {
    merge(
        json!({"model": "tiny", "temperature": 0, "max_tokens": 24,
            "messages": [{"role": "user", "content": text}]}),
        more,
    )
}

/// A greedy completion request.
pub fn completion(prompt: Value, more: Value) -> Value {
    merge(json!({"model": "tiny", "temperature": 0, "max_tokens": 24, "prompt": prompt}), more)
}

/// The fields of `more` over those of `base`.
pub fn merge(mut base: Value, more: Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        base[name] = value.clone();
    }
    base
}

/// A prompt of about `tokens` tokens (the tiny tokenizer has one a byte).
pub fn long_prompt(tokens: usize) -> String {
    "abcdefghij klmnop qrstuv wxyz. ".chars().cycle().take(tokens).collect()
}

pub fn path_text(path: &Path) -> String {
    path.to_str().unwrap().to_owned()
}
