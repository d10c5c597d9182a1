//! Runs rules in processes of their own, and says how those ended.

use std::io::{Error, ErrorKind, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use kvdock_plugin_api::conformance::{Entry, Finding, Rule, Verdict};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;

use super::super::Failure;
use super::{MAPS, READY, limits};
use crate::plugin::PluginInfo;

/// The rule about the end of a process.
const EXIT: &str = "life.exit";
/// The rule about calls that never return.
const HANG: &str = "calls.hang";
/// How long a process may stay after the suite in it should have ended.
const GRACE: Duration = Duration::from_secs(20);
/// Bytes of a process's words that are kept.
const LAST_WORDS: usize = 600;

/// Set when the user asks the check to end.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Ends the rules that run, and lets no other begin.
pub(super) fn interrupt() {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

pub(super) fn is_interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// The plugin that is checked.
#[derive(Debug)]
pub(super) struct Plugin {
    program: PathBuf,
    file: PathBuf,
    config: String,
    patience: u32,
}

impl Plugin {
    pub(super) fn new(info: PluginInfo, config: Value, patience: u32) -> Result<Plugin, Failure> {
        let program = std::env::current_exe().map_err(|error| Failure(format!("the path of kvdock: {error}")))?;
        Ok(Plugin { program, file: info.path, config: config.to_string(), patience })
    }

    /// Runs a rule, step after step.
    pub(super) fn run(&self, rule: &'static Rule) -> Entry {
        let began = Instant::now();
        let verdict = self.steps(rule).unwrap_or_else(|problem| Verdict::NotRun(problem.to_string()));
        Entry { rule, verdict, took: began.elapsed() }
    }

    fn steps(&self, rule: &Rule) -> std::io::Result<Verdict> {
        not_interrupted()?;
        let scratch = scratch()?;
        for step in 0..rule.steps() {
            match self.step(rule, step, scratch.path())? {
                Verdict::Passed => {}
                other => return Ok(other),
            }
        }
        Ok(Verdict::Passed)
    }

    /// Why no instance can be opened, where that is not the plugin's to answer for: a store that can't be reached, or a configuration that it
    /// refuses, if `given` is not its own. Whatever else goes wrong is for the rules to find.
    pub(super) fn unready(&self, given: bool) -> Option<String> {
        not_interrupted().ok()?;
        let scratch = scratch().ok()?;
        match self.child(READY, 0, scratch.path(), limits(self.patience).step).ok()?.verdict? {
            Verdict::NotRun(why) => Some(why),
            Verdict::Skipped(why) if given => Some(why),
            _ => None,
        }
    }

    fn step(&self, rule: &Rule, step: usize, scratch: &Path) -> std::io::Result<Verdict> {
        let limits = limits(self.patience);
        // Nothing but the mapping happens there.
        let limit = if rule.id == MAPS { limits.hang } else { limits.step };
        let Ended { verdict, status, words } = self.child(rule.id, step, scratch, limit)?;
        Ok(judge(rule, step, verdict, status, &words))
    }

    fn child(&self, rule: &str, step: usize, scratch: &Path, limit: Duration) -> std::io::Result<Ended> {
        let mut child = Command::new(&self.program)
            .args(["plugin", "check-step"])
            .arg(&self.file)
            .arg(format!("--config={}", self.config))
            .arg(format!("--rule={rule}"))
            .arg(format!("--step={step}"))
            .arg("--scratch")
            .arg(scratch)
            .arg(format!("--patience={}", self.patience))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| Error::new(error.kind(), format!("no process can be started for it: {error}")))?;
        let (answer, words) = (collect(child.stdout.take()), collect(child.stderr.take()));
        let status = wait(&mut child, limit + GRACE)?;
        let answer = answer.recv_timeout(Duration::from_secs(5)).unwrap_or_default();
        let words = words.recv_timeout(Duration::from_secs(5)).unwrap_or_default();
        let verdict = serde_json::from_str::<Verdict>(&answer).ok();
        Ok(Ended { verdict, status, words })
    }
}

/// How a process ended.
struct Ended {
    verdict: Option<Verdict>,
    /// None when it had to be ended.
    status: Option<ExitStatus>,
    /// What it printed.
    words: String,
}

fn scratch() -> std::io::Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix("kvdock-check-")
        .tempdir()
        .map_err(|error| Error::new(error.kind(), format!("no scratch folder can be made: {error}")))
}

/// Reads a pipe to its end, on a thread.
fn collect(pipe: Option<impl Read + Send + 'static>) -> Receiver<String> {
    let (done, ended) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            let _ = pipe.read_to_end(&mut bytes);
        }
        let _ = done.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    ended
}

/// Waits for a process; after `limit` it is ended with everything that it has started. None when it had to be.
fn wait(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let began = Instant::now();
    let mut pause = Duration::from_millis(2);
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break Some(status);
        }
        if began.elapsed() > limit || is_interrupted() {
            break None;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    };
    // Its group may have members left, which would keep the pipes open.
    if let Some(group) = Pid::from_raw(child.id() as i32) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    if status.is_none() {
        child.wait()?;
    }
    not_interrupted()?;
    Ok(status)
}

fn not_interrupted() -> std::io::Result<()> {
    if is_interrupted() { Err(Error::new(ErrorKind::Interrupted, "the check was interrupted")) } else { Ok(()) }
}

/// What became of a rule, from what its process said and how it ended.
fn judge(rule: &Rule, step: usize, verdict: Option<Verdict>, status: Option<ExitStatus>, words: &str) -> Verdict {
    let finding = |rule: Option<&str>, expected: &str, seen: String| {
        let rule = rule.map(str::to_owned);
        Verdict::Failed(vec![Finding {
            rule,
            expected: expected.to_owned(),
            seen: format!("{seen}{}", last_words(words)),
        }])
    };
    match (verdict, status) {
        (Some(Verdict::Passed), Some(status)) if !status.success() => {
            finding(Some(EXIT), "the process ends cleanly after close", format!("{} {}", rule.id, ended(status)))
        }
        (Some(Verdict::Passed), None) => {
            finding(Some(EXIT), "the process ends after close", "it did not, and was ended".to_owned())
        }
        (Some(verdict), _) => verdict,
        (None, Some(status)) if rule.killed && step == 0 && status.signal() == Some(libc::SIGKILL) => Verdict::Passed,
        (None, Some(status)) => {
            finding(None, "the plugin leaves the process running", format!("the process {}", ended(status)))
        }
        (None, None) if rule.id == MAPS => {
            finding(None, "the library's constructors return", "they did not, and the process was ended".to_owned())
        }
        (None, None) => finding(Some(HANG), "the rule ends", "it did not, and its process was ended".to_owned()),
    }
}

fn ended(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("ended by signal {signal}{}", name_of(signal)),
        (None, Some(code)) => format!("ended with exit code {code}"),
        (None, None) => "ended".to_owned(),
    }
}

fn name_of(signal: i32) -> &'static str {
    match signal {
        libc::SIGABRT => " (SIGABRT)",
        libc::SIGBUS => " (SIGBUS)",
        libc::SIGFPE => " (SIGFPE)",
        libc::SIGILL => " (SIGILL)",
        libc::SIGKILL => " (SIGKILL)",
        libc::SIGSEGV => " (SIGSEGV)",
        libc::SIGTERM => " (SIGTERM)",
        libc::SIGTRAP => " (SIGTRAP)",
        _ => "",
    }
}

/// The end of what a process printed, on one line.
fn last_words(words: &str) -> String {
    let text = words.split('\n').map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" | ");
    if text.is_empty() {
        return String::new();
    }
    let from = text.floor_char_boundary(text.len().saturating_sub(LAST_WORDS));
    format!("; it printed: {}", &text[from..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvdock_plugin_api::conformance::rules;

    fn status(raw: i32) -> Option<ExitStatus> {
        Some(ExitStatus::from_raw(raw))
    }

    fn finding(verdict: Verdict) -> Finding {
        match verdict {
            Verdict::Failed(mut findings) => findings.remove(0),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_end_of_a_process_is_said_in_words() {
        let rule = rules().next().unwrap();
        let aborted = finding(judge(rule, 0, None, status(libc::SIGABRT), "one\n\ntwo\n"));
        assert_eq!(aborted.rule, None);
        assert_eq!(aborted.seen, "the process ended by signal 6 (SIGABRT); it printed: one | two");
        let left = finding(judge(rule, 0, None, status(3 << 8), ""));
        assert_eq!(left.seen, "the process ended with exit code 3");
        assert_eq!(finding(judge(rule, 0, None, None, "")).rule.as_deref(), Some(HANG));
        let maps = rules().find(|rule| rule.id == MAPS).unwrap();
        assert_eq!(finding(judge(maps, 0, None, None, "")).rule, None, "a mapping that hangs is no call that hangs");
        let late = finding(judge(rule, 0, Some(Verdict::Passed), status(libc::SIGSEGV), ""));
        assert_eq!(late.rule.as_deref(), Some(EXIT));
        assert_eq!(judge(rule, 0, Some(Verdict::Passed), status(0), "words"), Verdict::Passed);
        let killed = rules().find(|rule| rule.killed).unwrap();
        assert_eq!(judge(killed, 0, None, status(libc::SIGKILL), ""), Verdict::Passed);
        assert!(matches!(judge(killed, 1, None, status(libc::SIGKILL), ""), Verdict::Failed(_)));
    }

    #[test]
    fn long_words_are_cut_at_a_character() {
        let words = "é".repeat(1000);
        assert!(last_words(&words).len() <= LAST_WORDS + 20);
    }
}
