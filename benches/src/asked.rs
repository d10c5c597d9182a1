//! A peer in a process of its own that answers a JSON line with a JSON line.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

/// The process. It is killed when this is dropped.
pub struct Asked {
    name: &'static str,
    child: Child,
    // None once it has been told to end.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Asked {
    /// Starts `command`, called `name` in errors.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn start(name: &'static str, command: &mut Command) -> Result<Asked> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().with_context(|| format!("can't start {name}"))?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("its output is a pipe")?);
        Ok(Asked { name, child, input, output })
    }

    /// Its answer to a request.
    ///
    /// # Errors
    /// When it ended, or answers with an error.
    pub fn ask(&mut self, request: &Value) -> Result<Value> {
        let ended = || anyhow!("{} ended at {request}", self.name);
        let input = self.input.as_mut().ok_or_else(ended)?;
        writeln!(input, "{request}").map_err(|_| ended())?;
        let mut line = String::new();
        if self.output.read_line(&mut line).with_context(|| self.name)? == 0 {
            return Err(ended());
        }
        let answer: Value = serde_json::from_str(&line).with_context(|| format!("the answer of {}", self.name))?;
        match answer.get("answer") {
            Some(answer) => Ok(answer.clone()),
            None => bail!("{}, asked {request}: {answer}", self.name),
        }
    }

    /// As [`ask`](Self::ask), for requests that are answered with the seconds that they took.
    ///
    /// # Errors
    /// As there, and when the answer is no number.
    pub fn seconds(&mut self, request: &Value) -> Result<f64> {
        self.ask(request)?.as_f64().with_context(|| format!("{} answers with seconds", self.name))
    }

    /// Has it end by itself, and gives its exit status.
    ///
    /// # Errors
    /// When it can't be waited for.
    pub fn end(&mut self) -> Result<Option<i32>> {
        self.input = None;
        Ok(self.child.wait().with_context(|| self.name)?.code())
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
