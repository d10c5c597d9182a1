//! A node in a process of its own.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use kvdock_plugin_api::PageStatus;
use serde_json::{Value, json};

use super::super::common::*;

/// Bytes of the pages that it stores.
pub const PAGE: u64 = 300_000;

pub struct Other {
    pub child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    pub fn start(config: &str) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["distributed::other::node_process", "--exact", "--ignored", "--nocapture"])
            .env("KVDOCK_NODE", config)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut other = Other { child, input, output };
        assert_eq!(other.answer(), json!("ready"));
        other
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the other node ended");
            if let Some(answer) = line.strip_prefix("answer ") {
                return serde_json::from_str(answer).unwrap();
            }
        }
    }

    fn ask(&mut self, what: &str, numbers: &[u64]) -> Value {
        writeln!(self.input, "{}", json!([what, numbers])).unwrap();
        self.answer()
    }

    /// Stores pages, and tells the master.
    pub fn set(&mut self, numbers: &[u64]) {
        assert_eq!(self.ask("set", numbers), json!(vec![true; numbers.len()]));
    }

    pub fn has_all(&mut self, numbers: &[u64]) -> bool {
        self.ask("which", numbers) == json!(vec![true; numbers.len()])
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the other process does; not a test of its own.
#[test]
#[ignore = "started by the other tests"]
fn node_process() {
    let Ok(config) = std::env::var("KVDOCK_NODE") else { return };
    let bench = Bench::new(&config, pool(64, PAGE));
    println!("\nanswer {}", json!("ready"));
    for line in std::io::stdin().lines() {
        let (what, numbers): (String, Vec<u64>) = serde_json::from_str(&line.unwrap()).unwrap();
        let answer = match what.as_str() {
            "set" => {
                let stored: Vec<bool> =
                    bench.set(&numbers).statuses[0].iter().map(|status| *status == PageStatus::Ok).collect();
                bench.store.flush(&Default::default()).unwrap();
                json!(stored)
            }
            "which" => json!(bench.which(&numbers)),
            _ => panic!("{what}"),
        };
        println!("answer {answer}");
    }
}
