//! The process in which one step of one rule runs.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use clap::Args;
use kvdock_plugin_api::ErrorKind;
use kvdock_plugin_api::conformance::{Declared, Finding, Subject, Verdict, rule, run_step};
use kvdock_plugin_api::mock::{MockHost, identity, table_of};
use kvdock_plugin_api::v0_1::{ENTRY_SYMBOL, EntryFn};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde_json::Value;

use super::super::Failure;
use super::{MAPS, READY, fill, limits};
use crate::plugin::{PluginInfo, inspect};

/// What the parent hands over.
#[derive(Debug, Args)]
pub(in crate::cli) struct StepArgs {
    /// The file.
    pub plugin: PathBuf,
    /// The configuration, with `{scratch}`.
    #[arg(long)]
    pub config: String,
    /// The rule.
    #[arg(long)]
    pub rule: String,
    /// Number of the step.
    #[arg(long)]
    pub step: usize,
    /// The folder that the steps of the rule share.
    #[arg(long)]
    pub scratch: PathBuf,
    /// Times all limits of time by this.
    #[arg(long)]
    pub patience: u32,
}

/// Runs a step and writes its verdict, one line of JSON, to what was standard output. What the plugin prints goes to standard error.
pub(in crate::cli) fn step(args: &StepArgs) -> Result<ExitCode, Failure> {
    // A check that is ended takes its rules along.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let answer = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3).map_err(Failure::new)?;
    let answer = File::from(answer);
    rustix::stdio::dup2_stdout(rustix::stdio::stderr()).map_err(Failure::new)?;
    let verdict = verdict(args, &answer).unwrap_or_else(|Failure(why)| Verdict::NotRun(why));
    tell(&answer, &verdict)?;
    if verdict == Verdict::Passed {
        return Ok(ExitCode::SUCCESS);
    }
    end()
}

fn tell(mut answer: &File, verdict: &Verdict) -> Result<(), Failure> {
    let mut line = serde_json::to_string(verdict).map_err(Failure::new)?;
    line.push('\n');
    answer.write_all(line.as_bytes()).map_err(Failure::new)
}

/// Threads of a broken plugin may be anywhere: nothing of it is to run any more.
fn end() -> ! {
    // SAFETY: ends the process at once, and returns never.
    unsafe { libc::_exit(0) }
}

fn verdict(args: &StepArgs, answer: &File) -> Result<Verdict, Failure> {
    let rule = match args.rule.as_str() {
        READY => None,
        id => Some(rule(id).ok_or_else(|| Failure(format!("no rule {id}")))?),
    };
    let config: Value = serde_json::from_str(&args.config).map_err(Failure::new)?;
    let info = inspect(&args.plugin).map_err(Failure::new)?;
    let limits = limits(args.patience);
    let mapped = {
        // What comes before the rules does not wait for a constructor that hangs: they find it.
        let _guard = Guard::new(answer, if rule.is_some() { limits.hang } else { limits.hang / 4 })?;
        map(&info)
    };
    let entry = match mapped {
        Ok(entry) => entry,
        Err(_) if rule.is_none() => return Ok(Verdict::Passed),
        Err(seen) => {
            let expected = format!("a library that can be mapped and has {ENTRY_SYMBOL}");
            return Ok(Verdict::Failed(vec![Finding { rule: Some(MAPS.to_owned()), expected, seen }]));
        }
    };
    let Some(rule) = rule else { return Ok(ready(entry, fill(config, &args.scratch.to_string_lossy()))) };
    let subject = Subject { entry, declared: declared(&info), config };
    Ok(run_step(&subject, rule, args.step, &args.scratch, limits))
}

/// Whether an instance can be opened: not run, where its store can't be reached; skipped, where it refuses the configuration.
fn ready(entry: EntryFn, config: Value) -> Verdict {
    // A table that is not right is for the rules to find.
    let Ok(table) = table_of(entry) else { return Verdict::Passed };
    let opened = MockHost::new().open(table, &config.to_string(), &identity("conformance"));
    match opened.and_then(|instance| instance.close()) {
        Err(error) if matches!(error.kind, ErrorKind::Unavailable | ErrorKind::TimedOut) => {
            Verdict::NotRun(error.to_string())
        }
        Err(error) if error.kind == ErrorKind::InvalidConfig => Verdict::Skipped(error.to_string()),
        _ => Verdict::Passed,
    }
}

/// Ends the process with a finding when the mapping takes longer than a limit: a constructor can't be left in any other way. It is mapped
/// on the thread that everything else runs on, and this watches from another one, which is gone before a rule runs.
struct Guard(Option<(Sender<()>, JoinHandle<()>)>);

impl Guard {
    fn new(answer: &File, limit: Duration) -> Result<Guard, Failure> {
        let answer = answer.try_clone().map_err(Failure::new)?;
        let (mapped, watched) = channel::<()>();
        let (begun, ready) = channel::<()>();
        let watch = move || {
            // A thread's first steps may need the loader's lock, which the mapping holds: they are taken before it.
            let _ = watched.recv_timeout(Duration::from_millis(1));
            let _ = begun.send(());
            if watched.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                let expected = "the library's constructors return".to_owned();
                let seen = format!("they have not returned after {} s", limit.as_secs());
                let _ = tell(&answer, &Verdict::Failed(vec![Finding { rule: Some(MAPS.to_owned()), expected, seen }]));
                end();
            }
        };
        let thread = std::thread::Builder::new().spawn(watch).map_err(Failure::new)?;
        ready.recv().map_err(Failure::new)?;
        Ok(Guard(Some((mapped, thread))))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some((mapped, thread)) = self.0.take() {
            drop(mapped);
            let _ = thread.join();
        }
    }
}

/// Maps the library. This process has no other plugin, so that no copy of the file is needed.
fn map(info: &PluginInfo) -> Result<EntryFn, String> {
    // SAFETY: loading runs the library's constructors, in a process that is there for it. The file was checked to be a plugin by its note.
    let library = unsafe { Library::open(Some(&info.path), RTLD_NOW | RTLD_LOCAL | libc::RTLD_NODELETE) }
        .map_err(|error| std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string))?;
    // SAFETY: the note says that the library keeps the boundary, where this symbol has this type.
    let entry =
        unsafe { library.get::<EntryFn>(ENTRY_SYMBOL) }.map(|symbol| *symbol).map_err(|error| error.to_string())?;
    // Never unloaded.
    std::mem::forget(library);
    Ok(entry)
}

fn declared(info: &PluginInfo) -> Declared {
    Declared {
        name: info.note.name.clone(),
        capabilities: (&info.note.capabilities).into(),
        config_schema: info.note.config_schema.clone(),
        check_config: info.note.check_config.clone(),
    }
}
