//! The process in which one step of one rule runs.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use kvdock_plugin_api::conformance::{Declared, Finding, Subject, Verdict, rule, run_step};
use kvdock_plugin_api::v0_1::{ENTRY_SYMBOL, EntryFn};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use rustix::process::{Signal, set_parent_process_death_signal};

use super::super::Failure;
use super::{MAPS, limits};
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
    rustix::stdio::dup2_stdout(rustix::stdio::stderr()).map_err(Failure::new)?;
    let verdict = verdict(args)?;
    let mut line = serde_json::to_string(&verdict).map_err(Failure::new)?;
    line.push('\n');
    std::fs::File::from(answer).write_all(line.as_bytes()).map_err(Failure::new)?;
    if verdict == Verdict::Passed {
        return Ok(ExitCode::SUCCESS);
    }
    // Threads of a broken plugin may be anywhere: nothing of it is to run any more.
    // SAFETY: ends the process at once, and returns never.
    unsafe { libc::_exit(0) }
}

fn verdict(args: &StepArgs) -> Result<Verdict, Failure> {
    let rule = rule(&args.rule).ok_or_else(|| Failure(format!("no rule {}", args.rule)))?;
    let config = serde_json::from_str(&args.config).map_err(Failure::new)?;
    let info = inspect(&args.plugin).map_err(Failure::new)?;
    let entry = match map(&info) {
        Ok(entry) => entry,
        Err(seen) => {
            let expected = format!("a library that can be mapped and has {ENTRY_SYMBOL}");
            return Ok(Verdict::Failed(vec![Finding { rule: Some(MAPS.to_owned()), expected, seen }]));
        }
    };
    let subject = Subject { entry, declared: declared(&info), config };
    Ok(run_step(&subject, rule, args.step, &args.scratch, limits(args.patience)))
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
