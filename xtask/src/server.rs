//! A `kvdock serve` of the tree, started, watched and stopped.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStderr, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::{model, paths, process};

/// A running server.
pub struct Server {
    child: Child,
    /// Where it listens: `http://HOST:PORT`.
    pub address: String,
}

/// What a server is started with.
pub struct Launch<'a> {
    /// The GGUF file.
    pub model: &'a Path,
    /// The folder of the file plugin.
    pub storage: &'a Path,
    /// Port; 0 picks a free one.
    pub port: u16,
    /// Further `KEY=VALUE` settings.
    pub set: &'a [String],
    /// Whether the server's log goes to standard error.
    pub show_log: bool,
}

impl Server {
    /// Starts a server and waits until it listens.
    ///
    /// # Errors
    /// When it can't be started, ends early, or does not listen within two minutes.
    pub fn start(launch: &Launch<'_>) -> Result<Self> {
        let release = paths::release()?;
        let mut settings = vec![
            format!("model.path={}", quoted(launch.model)?),
            format!("model.name=\"{}\"", model::NAME),
            format!("server.port={}", launch.port),
            "storage.backend=\"file\"".to_owned(),
            format!("storage.plugin_path=[{}]", quoted(&release)?),
            format!("storage.file.dir={}", quoted(launch.storage)?),
            // A few megabytes for a try: a full disk is no reason to keep nothing.
            "storage.file.min_free_bytes=0".to_owned(),
        ];
        settings.extend_from_slice(launch.set);
        let mut command = process::command(paths::text(&release.join("kvdock"))?);
        command.arg("serve");
        for setting in settings {
            command.args([OsString::from("--set"), OsString::from(setting)]);
        }
        // A group of its own: Ctrl-C reaches the server once, through this program, not twice.
        command.stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().with_context(|| format!("can't start `{}`", process::show(&command)))?;
        let stderr = child.stderr.take().context("the server has no standard error")?;
        let show_log = launch.show_log;
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || forward(stderr, show_log, &sender));
        match wait_for_address(&receiver, Duration::from_secs(120), show_log) {
            Ok(address) => Ok(Self { child, address }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Process id, for signals.
    pub fn pid(&self) -> Option<Pid> {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When the system can't say.
    pub fn wait(&mut self) -> Result<ExitStatus> {
        self.child.wait().context("can't wait for the server")
    }

    /// The status if it has ended.
    ///
    /// # Errors
    /// When the system can't say.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("can't ask after the server")
    }

    /// Asks it to stop with SIGTERM and waits at most `patience`.
    ///
    /// # Errors
    /// When it does not stop in time or not with success.
    pub fn stop(mut self, patience: Duration) -> Result<()> {
        if let Some(pid) = self.pid() {
            kill_process(pid, Signal::TERM).context("can't send SIGTERM to the server")?;
        }
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            if let Some(status) = self.ended()? {
                if !status.success() {
                    bail!("the server ended with {status} after SIGTERM");
                }
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        bail!("the server did not stop within {} s of SIGTERM", patience.as_secs())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// `path` as a TOML string.
///
/// # Errors
/// When it is not UTF-8.
pub fn quoted(path: &Path) -> Result<String> {
    let text = paths::text(path)?;
    Ok(format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")))
}

/// Passes the log on and every line to `lines` as long as someone listens there.
fn forward(stderr: ChildStderr, show_log: bool, lines: &mpsc::Sender<String>) {
    for line in BufReader::new(stderr).lines().map_while(Result::ok) {
        if show_log {
            eprintln!("{line}");
        }
        let _ = lines.send(line);
    }
}

/// Waits for the line in which the server says where it listens. `shown`: the user sees the log already.
fn wait_for_address(lines: &mpsc::Receiver<String>, patience: Duration, shown: bool) -> Result<String> {
    let deadline = Instant::now() + patience;
    let mut last = Vec::new();
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) => {
                if let Some(address) = line.split("listening on ").nth(1) {
                    return Ok(address.trim().to_owned());
                }
                last.push(line);
            }
            Err(RecvTimeoutError::Timeout) => bail!("the server did not listen within {} s", patience.as_secs()),
            Err(RecvTimeoutError::Disconnected) if shown => {
                bail!("the server ended before it listened; its log is above")
            }
            Err(RecvTimeoutError::Disconnected) => {
                let tail = last.split_off(last.len().saturating_sub(20)).join("\n  ");
                bail!("the server ended before it listened; its last lines:\n  {tail}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_read_from_the_log() {
        let (sender, receiver) = mpsc::channel();
        sender.send("loading".to_owned()).unwrap();
        sender.send("listening on http://127.0.0.1:4711".to_owned()).unwrap();
        assert_eq!(wait_for_address(&receiver, Duration::from_secs(1), true).unwrap(), "http://127.0.0.1:4711");
    }

    #[test]
    fn a_server_that_ends_early_is_an_error_with_its_last_lines() {
        let (sender, receiver) = mpsc::channel();
        sender.send("model.path: no such file".to_owned()).unwrap();
        drop(sender);
        let message = wait_for_address(&receiver, Duration::from_secs(1), false).unwrap_err().to_string();
        assert!(message.contains("no such file"), "{message}");
        let message = wait_for_address(&receiver, Duration::from_secs(1), true).unwrap_err().to_string();
        assert_eq!(message, "the server ended before it listened; its log is above", "nothing is said twice");
    }

    #[test]
    fn paths_are_quoted_as_toml() {
        assert_eq!(quoted(Path::new("/a \"b\"\\c")).unwrap(), r#""/a \"b\"\\c""#);
    }
}
