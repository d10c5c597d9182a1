//! A second process of a test's own program, which stores and reads what it is asked to.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::Pid;
use serde_json::{Value, json};

const CONFIG: &str = "KVDOCK_OTHER_PROCESS";

/// The process. It ends with this.
#[derive(Debug)]
pub struct Other {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Other {
    /// Starts the test program anew, with the ignored test alone that calls [`serve`], and waits until it is ready.
    pub fn start(test: &str, config: &str) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--ignored", "--nocapture"])
            .env(CONFIG, config)
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
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the other process ended");
            if let Some(answer) = line.strip_prefix("answer ") {
                return serde_json::from_str(answer).unwrap();
            }
        }
    }

    /// Has it do something with pages.
    pub fn ask(&mut self, what: &str, numbers: &[u64]) -> Value {
        writeln!(self.input, "{}", json!([what, numbers])).unwrap();
        self.answer()
    }

    /// Has it store pages, all of which it has to.
    pub fn set(&mut self, numbers: &[u64]) {
        assert_eq!(self.ask("set", numbers), json!(vec![true; numbers.len()]));
    }

    /// Whether it reads all of these.
    pub fn has_all(&mut self, numbers: &[u64]) -> bool {
        self.ask("which", numbers) == json!(vec![true; numbers.len()])
    }

    /// Which process it is.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Ends it as kill -9 does.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the other process does: `begin` gets its configuration, `answer` what it is asked. Nothing where no test has started it.
pub fn serve<T>(begin: impl FnOnce(&str) -> T, mut answer: impl FnMut(&mut T, &str, &[u64]) -> Value) {
    let Ok(config) = std::env::var(CONFIG) else { return };
    let mut state = begin(&config);
    // What the test harness prints first has no end of line.
    println!("\nanswer {}", json!("ready"));
    for line in std::io::stdin().lines() {
        let (what, numbers): (String, Vec<u64>) = serde_json::from_str(&line.unwrap()).unwrap();
        println!("answer {}", answer(&mut state, &what, &numbers));
    }
}
