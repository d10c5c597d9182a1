//! llama.cpp, run by a small node program that reads a command a line.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::Bench;

/// A running llama.cpp.
pub struct Llama {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// Seconds that it took to load the model.
    loading: f64,
}

impl Llama {
    /// Starts it with `threads` compute threads and waits until the model is loaded.
    ///
    /// # Errors
    /// When node or llama.cpp can't be started.
    pub fn start(bench: &Bench, threads: usize) -> Result<Self> {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/llama.mjs");
        let mut child = Command::new("node")
            .arg(&program)
            .arg(&bench.peers)
            .arg(&bench.model)
            .arg(threads.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("can't start node")?;
        let commands = child.stdin.take().context("node has no standard input")?;
        let answers = BufReader::new(child.stdout.take().context("node has no standard output")?);
        let mut llama = Self { child, commands, answers, loading: 0.0 };
        let ready = llama.answer().context("llama.cpp did not start")?;
        llama.loading = Self::number(&ready, "seconds")?;
        Ok(llama)
    }

    fn answer(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.answers.read_line(&mut line).context("can't read from llama.cpp")? == 0 {
            bail!("llama.cpp ended");
        }
        let answer: Value = serde_json::from_str(&line).with_context(|| format!("llama.cpp said {line:?}"))?;
        match answer.get("error") {
            Some(error) => bail!("llama.cpp failed: {error}"),
            None => Ok(answer),
        }
    }

    fn ask(&mut self, command: &Value) -> Result<Value> {
        writeln!(self.commands, "{command}").context("can't write to llama.cpp")?;
        self.answer()
    }

    fn number(answer: &Value, field: &str) -> Result<f64> {
        answer
            .get(field)
            .and_then(Value::as_f64)
            .with_context(|| format!("llama.cpp's answer has no {field}: {answer}"))
    }

    /// Seconds to the first token after `prompt`.
    ///
    /// # Errors
    /// What llama.cpp says.
    pub fn prefill(&mut self, prompt: &[u32]) -> Result<f64> {
        let answer = self.ask(&json!({"op": "prefill", "tokens": prompt}))?;
        Self::number(&answer, "seconds")
    }

    /// Computes `prompts`, with room for up to `most` tokens after each.
    ///
    /// # Errors
    /// What llama.cpp says.
    pub fn begin(&mut self, prompts: &[Vec<u32>], most: usize) -> Result<()> {
        self.ask(&json!({"op": "begin", "prompts": prompts, "most": most})).map(drop)
    }

    /// Tokens a second, of all prompts of `begin` together, over `steps` tokens of each that follow `before` others,
    /// which follow the prompt: those of the call before are gone.
    ///
    /// # Errors
    /// What llama.cpp says.
    pub fn more(&mut self, before: usize, steps: usize) -> Result<f64> {
        let answer = self.ask(&json!({"op": "more", "before": before, "steps": steps}))?;
        Ok(Self::number(&answer, "tokens")? / Self::number(&answer, "seconds")?)
    }

    /// Ends what `begin` began.
    ///
    /// # Errors
    /// What llama.cpp says.
    pub fn end(&mut self) -> Result<()> {
        self.ask(&json!({"op": "end"})).map(drop)
    }

    /// Seconds from the beginning of loading to the first token after `prompt`, without the start of node around it. To be asked first.
    ///
    /// # Errors
    /// What llama.cpp says.
    pub fn first(&mut self, prompt: &[u32]) -> Result<f64> {
        let answer = self.ask(&json!({"op": "first", "tokens": prompt}))?;
        Ok(self.loading + Self::number(&answer, "seconds")?)
    }

    /// Saves the state after `prompt` to `file`.
    ///
    /// # Errors
    /// What llama.cpp says.
    pub fn save(&mut self, prompt: &[u32], file: &Path) -> Result<()> {
        self.ask(&json!({"op": "save", "tokens": prompt, "file": file})).map(drop)
    }

    /// Seconds to load the state of `file`, saved after `prompt`, and to compute a token after one more, `last`.
    ///
    /// # Errors
    /// What llama.cpp says.
    pub fn restore(&mut self, prompt: &[u32], file: &Path, last: u32) -> Result<f64> {
        let answer = self.ask(&json!({"op": "restore", "tokens": prompt, "file": file, "last": last}))?;
        Self::number(&answer, "seconds")
    }
}

impl Drop for Llama {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
