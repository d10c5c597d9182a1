//! The `kvdock` command line.
//!
//! Exit codes: 0 success, 1 an error (one line on standard error that a person can act on), 2
//! wrong usage.

mod check;
mod config;
mod device;
mod doctor;
mod interrupt;
mod machine;
mod memory;
mod plugin;
mod plugin_bench;
mod plugin_new;
mod progress;
mod serve;
mod sink;
mod sizes;
mod start;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::config::{Loaded, Sources};

/// An LLM serving engine whose KV cache outlives the process.
#[derive(Debug, Parser)]
#[command(name = "kvdock", version, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a model over HTTP.
    Serve(Settings),
    /// Look at storage plugins.
    #[command(subcommand)]
    Plugin(PluginCommand),
    /// Check a config file, or list all keys.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Show what this machine offers to kvdock.
    Doctor(Settings),
}

#[derive(Debug, Subcommand)]
enum PluginCommand {
    /// List the plugins in the search path.
    List(Settings),
    /// Show what a plugin says of itself.
    Info {
        /// Name of a plugin in the search path, or the path of its file.
        name_or_path: String,
        #[command(flatten)]
        settings: Settings,
    },
    /// Check a plugin against every rule of the contract. Exits with 0 when all are kept, 1 when one is broken, 2 when none is
    /// broken but the check, or a rule of it, could not be run.
    Check(check::CheckArgs),
    /// One step of one rule, in a process of its own.
    #[command(hide = true)]
    CheckStep(check::StepArgs),
    /// Write a storage plugin to start from: a crate that builds, passes its tests and serves.
    New {
        /// Folder for it, new or empty.
        dir: PathBuf,
        /// Name by which a configuration picks it: a-z, 0-9, "-" and "_". The folder's name, if it is not given.
        #[arg(long)]
        name: Option<String>,
        /// Folder with the source of kvdock-plugin-api. If it is not given, it is looked for beside and above this program, as
        /// plugin-api, api or kvdock-plugin-api.
        #[arg(long, value_name = "PATH")]
        api: Option<PathBuf>,
    },
    /// Measure a plugin on this machine: throughput and latency of its calls, beside a copy in memory.
    Bench(plugin_bench::Options),
    /// Map a plugin and end: what `serve` starts before it maps a new one itself.
    #[command(hide = true)]
    MapTrial {
        /// The file.
        file: PathBuf,
    },
    /// What `bench` starts to call the plugin.
    #[command(hide = true)]
    BenchWorker,
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Check a config file as `serve` would, and name everything that is wrong.
    Check {
        /// The file.
        file: PathBuf,
    },
    /// Print every key with type, default and meaning.
    Reference,
}

/// Where the configuration comes from, besides `KVDOCK_*` environment variables.
#[derive(Debug, Args)]
struct Settings {
    /// The config file (TOML).
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Set a config key, such as server.port=8080; may be given often, and wins over the file.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

impl Settings {
    fn load(self) -> Result<Loaded, Failure> {
        crate::config::load(&Sources::from_process(self.config, self.set)).map_err(Failure::new)
    }
}

/// Why a command failed: what is printed, a line each.
#[derive(Debug)]
struct Failure(String);

impl Failure {
    fn new(error: impl std::fmt::Display) -> Self {
        Self(error.to_string())
    }
}

/// Runs the command that this process was started with.
pub fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve(settings) => serve::serve(settings),
        Command::Plugin(PluginCommand::List(settings)) => plugin::list(settings),
        Command::Plugin(PluginCommand::Info { name_or_path, settings }) => plugin::info(&name_or_path, settings),
        Command::Plugin(PluginCommand::Check(args)) => check::check(&args),
        Command::Plugin(PluginCommand::CheckStep(args)) => check::step(&args),
        Command::Plugin(PluginCommand::Bench(options)) => plugin_bench::bench(&options),
        Command::Plugin(PluginCommand::MapTrial { file }) => crate::plugin::trial::map_and_end(&file),
        Command::Plugin(PluginCommand::BenchWorker) => Ok(plugin_bench::run_worker()),
        Command::Plugin(PluginCommand::New { dir, name, api }) => {
            plugin_new::new(&dir, name.as_deref(), api.as_deref())
        }
        Command::Config(ConfigCommand::Check { file }) => config::check(file),
        Command::Config(ConfigCommand::Reference) => config::reference(),
        Command::Doctor(settings) => doctor::doctor(settings),
    };
    match result {
        Ok(code) => code,
        Err(Failure(text)) => {
            for line in text.lines() {
                say(&format!("error: {line}"));
            }
            ExitCode::FAILURE
        }
    }
}

/// A line on standard error; nobody may be listening.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Text on standard output. A reader that has left (`| head`) is no error.
fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure(format!("can't write to standard output: {error}")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn commands_parse_as_documented() {
        for line in [
            "kvdock serve",
            "kvdock serve --config a.toml --set server.port=0 --set model.path=x",
            "kvdock plugin list",
            "kvdock plugin info file",
            "kvdock plugin check a.so --config {} --junit a.xml --rule load. --rule data.one_page",
            "kvdock plugin check --list",
            "kvdock plugin check mine --set storage.plugin_path=[\"target/release\"]",
            "kvdock plugin bench mine --set storage.plugin_path=[\"target/release\"] --seconds 120",
            "kvdock plugin new my-store",
            "kvdock plugin bench target/release/libmine.so --quick --json out.jsonl --config {}",
            "kvdock plugin new some/folder --name my-store --api kvdock/plugin-api",
            "kvdock config check a.toml",
            "kvdock config reference",
            "kvdock doctor",
        ] {
            assert!(Cli::try_parse_from(line.split(' ')).is_ok(), "{line}");
        }
        for line in [
            "kvdock",
            "kvdock plugin check",
            "kvdock plugin check x --patience 0",
            "kvdock plugin bench x --seconds 0",
            "kvdock config check",
            "kvdock serve x",
        ] {
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }
}
