//! `kvdock plugin bench`: what a plugin costs on this machine, beside a copy in memory.
//!
//! The plugin is called in a process of its own (`worker`), which tells its results line by line. A plugin that crashes or hangs
//! ends that process, and this one says so.

mod cold;
mod event;
mod measure;
mod plan;
mod table;
mod worker;

use std::any::Any;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use clap::Args;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::check::locate;
use super::interrupt::Interrupts;
use super::machine::{cpus, memory, size};
use super::{Failure, print, say};
use crate::config::expanded_in;
use crate::plugin::schema::validate;
use crate::plugin::{PluginInfo, inspect};
use event::Event;
use plan::{Plan, SILENCE};
pub(super) use worker::run as run_worker;

/// Exit code when nothing could be measured.
const COULD_NOT: u8 = 2;
/// How often the worker is looked at while nothing comes from it.
const TURN: Duration = Duration::from_secs(1);
/// Stands for a fresh folder in a configuration.
const SCRATCH: &str = "{scratch}";

/// What to measure.
#[derive(Debug, Args)]
pub(super) struct Options {
    /// The plugin: the path of its file, or its name in the search path.
    #[arg(value_name = "PATH")]
    plugin: String,
    /// Its configuration as a JSON object; "{scratch}" in it stands for a fresh folder. The one that the plugin declares for checks,
    /// if it is not given.
    #[arg(long, value_name = "JSON")]
    config: Option<String>,
    /// Folder in which the fresh folder is made, such as one on the disk to be measured. The system's folder for temporary files,
    /// if it is not given.
    #[arg(long, value_name = "DIR")]
    scratch: Option<PathBuf>,
    /// Fewer sizes and less time for each: seconds instead of a minute.
    #[arg(long)]
    quick: bool,
    /// Seconds for all of it: 50, or 15 with --quick, if it is not given. Each size of page gets its share; what has not begun when
    /// its share is over is left out, and a note says so.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: Option<u32>,
    /// Set a config key, such as storage.plugin_path=["target/release"], by which a name is looked up; may be given often.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Write the results to this file too, a JSON object a line.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measures a plugin. Exit code 0, or 2 when it could not be measured to the end.
pub(super) fn bench(options: &Options) -> Result<ExitCode, Failure> {
    match measure(options) {
        Ok(code) => Ok(code),
        Err(Failure(text)) => {
            text.lines().for_each(|line| say(&format!("error: {line}")));
            Ok(ExitCode::from(COULD_NOT))
        }
    }
}

fn measure(options: &Options) -> Result<ExitCode, Failure> {
    let path = locate(&options.plugin, &options.set)?;
    let info = inspect(&path).map_err(Failure::new)?;
    let parent = options.scratch.clone().unwrap_or_else(std::env::temp_dir);
    let scratch = tempfile::Builder::new()
        .prefix("kvdock-bench-")
        .tempdir_in(&parent)
        .map_err(|error| Failure(format!("{}: no folder can be made in it: {error}", parent.display())))?;
    let (config, in_scratch) = config(&info, options.config.as_deref(), scratch.path())?;
    let plan = Plan {
        plugin: path,
        config,
        scratch: in_scratch.then(|| scratch.path().to_owned()),
        quick: options.quick,
        seconds: options.seconds,
        pool_bytes: Plan::pool_bytes(memory().map(|memory| memory.available)),
    };
    let mut report = Report { json: None, said: Vec::new() };
    if let Some(path) = &options.json {
        let file = File::create(path).map_err(|error| Failure(format!("--json: {}: {error}", path.display())))?;
        report.json = Some((file, path.clone()));
    }
    report.begin(&info, &plan, in_scratch.then_some(parent.as_path()))?;
    let mut worker = Worker::start(&plan)?;
    let result = worker.follow(&mut report);
    drop(worker);
    result?;
    print(FOOTER)?;
    Ok(ExitCode::SUCCESS)
}

const FOOTER: &str = "\n\
    p50 and p99 are times of a whole call. Throughput is of all threads together; \"of copy\" is that beside a copy of the\n\
    same pages in memory. \"get\" reads what was stored just before, which the system may still have in memory; \"get, cold\"\n\
    reads with a new instance, after the store's files were dropped from the page cache.\n";

/// The configuration to open the plugin with, and whether it names the scratch folder.
fn config(info: &PluginInfo, given: Option<&str>, scratch: &Path) -> Result<(Map<String, Value>, bool), Failure> {
    let text = given.map_or_else(|| info.note.check_config.to_string(), str::to_owned);
    let wrong = |error: String| Failure(format!("--config: {error}"));
    let folder = scratch.to_str().ok_or_else(|| Failure(format!("{}: no UTF-8", scratch.display())))?;
    let value: Value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let in_scratch = text.contains(SCRATCH);
    let config = match fill(value, folder) {
        Value::Object(config) => config,
        Value::Null if given.is_none() => Map::new(),
        other => return Err(wrong(format!("expected a JSON object, found {other}"))),
    };
    let config = expanded_in("--config", &info.note.config_schema, &config).map_err(Failure)?;
    validate(&info.note.name, &info.note.config_schema, &config).map_err(Failure)?;
    Ok((config, in_scratch))
}

fn fill(value: Value, folder: &str) -> Value {
    match value {
        Value::String(text) => Value::String(text.replace(SCRATCH, folder)),
        Value::Array(values) => values.into_iter().map(|value| fill(value, folder)).collect(),
        Value::Object(map) => map.into_iter().map(|(key, value)| (key, fill(value, folder))).collect(),
        other => other,
    }
}

/// What a panic said.
fn panicked(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
    format!("a call broke a rule of the boundary: {text}")
}

/// Where results go.
struct Report {
    json: Option<(File, PathBuf)>,
    said: Vec<String>,
}

impl Report {
    fn begin(&mut self, info: &PluginInfo, plan: &Plan, scratch: Option<&Path>) -> Result<(), Failure> {
        let note = &info.note;
        let shown = validate(&note.name, &note.config_schema, &plan.config).map_err(Failure)?;
        let (shown, cores, pool) = (Value::Object(shown), cpus(), plan.pool_bytes >> 20);
        let place = scratch.map_or_else(String::new, |folder| format!(" in {}", folder.display()));
        print(&format!(
            "{} {}, config {shown}\n{cores} processors; pages lie in {pool} MiB of memory, at most {} stored at a time{place}\n\n{}",
            note.name,
            note.version,
            size(plan.most_stored(note.capabilities.concurrency)),
            table::header()
        ))?;
        self.write(&json!({
            "plugin": note.name,
            "version": note.version,
            "sha256": info.sha256_hex(),
            "config": shown,
            "processors": cores,
            "quick": plan.quick,
        }))
    }

    fn write(&mut self, line: &Value) -> Result<(), Failure> {
        match &mut self.json {
            Some((file, path)) => {
                writeln!(file, "{line}").map_err(|error| Failure(format!("--json: {}: {error}", path.display())))
            }
            None => Ok(()),
        }
    }

    fn row(&mut self, row: &event::Row) -> Result<(), Failure> {
        print(&table::row(row))?;
        self.write(&serde_json::to_value(row).map_err(Failure::new)?)
    }

    /// Once each: a store that is full says so in every shape.
    fn note(&mut self, text: String) -> Result<(), Failure> {
        if self.said.contains(&text) {
            return Ok(());
        }
        print(&format!("note: {text}\n"))?;
        self.write(&json!({ "note": text }))?;
        self.said.push(text);
        Ok(())
    }
}

/// The process that calls the plugin.
struct Worker {
    child: Child,
    lines: mpsc::Receiver<Line>,
    _interrupts: Interrupts,
    /// Its temporary files: the private copy of the plugin stays there when it is ended while it maps it.
    _temporary: TempDir,
}

/// What comes from the worker, or from the user.
enum Line {
    Text(String),
    Interrupt,
    End,
}

impl Worker {
    fn start(plan: &Plan) -> Result<Worker, Failure> {
        let cannot = |what: &str, error: &dyn std::fmt::Display| Failure(format!("{what}: {error}"));
        let program =
            std::env::current_exe().map_err(|error| cannot("the path of this program is not known", &error))?;
        let (sender, lines) = mpsc::channel();
        let to_us = sender.clone();
        let interrupts = Interrupts::listen(move || {
            // Nobody waits for it any more when the command is at its end.
            let _ = to_us.send(Line::Interrupt);
        })?;
        let temporary = tempfile::Builder::new()
            .prefix("kvdock-bench-")
            .tempdir()
            .map_err(|error| cannot("no folder for temporary files can be made", &error))?;
        let mut child = Command::new(program)
            .args(["plugin", "bench-worker"])
            .env("TMPDIR", temporary.path())
            // A group of its own, so that all it has started ends with it.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| cannot("the process that calls the plugin can't be started", &error))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        // From here on the worker ends with `Worker`.
        let worker = Worker { child, lines, _interrupts: interrupts, _temporary: temporary };
        if let Some(stdout) = stdout {
            std::thread::spawn(move || {
                // What the plugin prints may be no UTF-8.
                for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
                    if sender.send(Line::Text(String::from_utf8_lossy(&line).into_owned())).is_err() {
                        return;
                    }
                }
                let _ = sender.send(Line::End);
            });
        }
        let text = serde_json::to_string(plan).map_err(Failure::new)?;
        if let Some(mut stdin) = stdin {
            stdin.write_all(text.as_bytes()).map_err(|error| cannot("the process that calls the plugin", &error))?;
        }
        Ok(worker)
    }

    /// Prints results until the end.
    fn follow(&mut self, report: &mut Report) -> Result<(), Failure> {
        let mut doing = "starting".to_owned();
        let (mut heard, mut gone) = (Instant::now(), false);
        loop {
            let received = self.lines.recv_timeout(TURN);
            if received.is_ok() {
                heard = Instant::now();
            }
            match received {
                Ok(Line::Text(line)) => match serde_json::from_str(&line) {
                    Ok(Event::Doing { what }) => doing = what,
                    Ok(Event::Row(row)) => report.row(&row)?,
                    Ok(Event::Note { text }) => report.note(text)?,
                    Ok(Event::Failed { text }) => return Err(Failure(text)),
                    Ok(Event::Done) => return Ok(()),
                    Err(_) => say(&format!("the plugin printed: {line}")),
                },
                Ok(Line::Interrupt) => return Err(Failure("interrupted".to_owned())),
                Err(RecvTimeoutError::Timeout) if !gone && heard.elapsed() < SILENCE => {
                    // A process that the plugin has started may hold the pipe open, and then its end says nothing.
                    gone = self.child.try_wait().is_ok_and(|status| status.is_some());
                    if gone {
                        self.end_group();
                    }
                }
                Err(RecvTimeoutError::Timeout) if !gone => {
                    return Err(Failure(format!(
                        "the plugin hangs in {doing}: nothing has come back for {} s, and the call's deadline has long passed",
                        SILENCE.as_secs()
                    )));
                }
                Ok(Line::End) | Err(_) => {
                    let how = self.child.wait().map_or_else(|error| error.to_string(), ended);
                    return Err(Failure(format!("the plugin ended its process ({how}) during {doing}")));
                }
            }
        }
    }

    fn end_group(&self) {
        if let Some(group) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may hang, or have ended; both are fine here.
        self.end_group();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How a process ended.
fn ended(status: ExitStatus) -> String {
    match status.signal() {
        Some(libc::SIGSEGV) => "SIGSEGV: it touched memory that is not there".to_owned(),
        Some(libc::SIGBUS) => "SIGBUS".to_owned(),
        Some(libc::SIGABRT) => "SIGABRT: it aborted".to_owned(),
        Some(libc::SIGILL) => "SIGILL".to_owned(),
        Some(libc::SIGKILL) => "SIGKILL: perhaps the system had no memory left".to_owned(),
        Some(signal) => format!("signal {signal}"),
        None => format!("exit code {}", status.code().unwrap_or_default()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_filled_in_at_every_depth() {
        let filled = fill(json!({"a": ["{scratch}/x", 1], "b": {"c": "{scratch}"}, "d": "plain"}), "/s");
        assert_eq!(filled, json!({"a": ["/s/x", 1], "b": {"c": "/s"}, "d": "plain"}));
    }

    #[test]
    fn the_end_of_a_process_is_said_in_words() {
        assert!(ended(ExitStatus::from_raw(libc::SIGSEGV)).starts_with("SIGSEGV"));
        assert_eq!(ended(ExitStatus::from_raw(7 << 8)), "exit code 7");
        assert_eq!(ended(ExitStatus::from_raw(libc::SIGUSR1)), "signal 10");
    }
}
