//! The published client.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use serde_json::{Value, json};

use super::{Server, command};

/// The published Python client in a process of its own.
#[derive(Debug)]
pub struct Official {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    scratch: tempfile::TempDir,
}

impl Official {
    /// Starts one that uses a server; none where there is no CPython 3.12, for which it is made.
    pub fn start(server: &Server) -> Option<Official> {
        let scratch = tempfile::tempdir().unwrap();
        let mut child = command(&scratch.path().join("client.log"))
            .arg("client")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut official = Official { child, input, output, scratch };
        let answer = official.ask(&json!({"op": "connect", "address": server.address()}));
        let Some(answer) = answer else {
            assert_eq!(official.child.wait().unwrap().code(), Some(3), "{}", official.log());
            return None;
        };
        assert_eq!(answer["ok"], json!(true), "{answer}");
        Some(official)
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.scratch.path().join("client.log")).unwrap_or_default()
    }

    /// The answer; none when the client has ended.
    pub fn ask(&mut self, request: &Value) -> Option<Value> {
        writeln!(self.input, "{request}").ok()?;
        let mut line = String::new();
        (self.output.read_line(&mut line).unwrap() > 0).then(|| serde_json::from_str(&line).unwrap())
    }
}

impl Drop for Official {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
