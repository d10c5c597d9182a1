//! `cargo xtask quickstart`: from a clone to a chat with a real model.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use rustix::process::{Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::process::{Stages, cargo, run as run_command};
use crate::server::{Launch, Server};
use crate::{check, model, paths, setup};

/// Options of `quickstart`.
#[derive(Args)]
pub struct Options {
    /// Port to listen on; 0 picks a free one.
    #[arg(long, default_value_t = 30000)]
    port: u16,
    /// More settings for `kvdock serve`.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Instead of serving: start, ask, restart, and show that a long prompt comes from storage with the same answer.
    #[arg(long)]
    check: bool,
}

pub fn run(options: &Options) -> Result<ExitCode> {
    if !options.check {
        is_free(options.port)?;
    }
    let mut stages = Stages::default();
    stages.stage("tools", || setup::ensure(&[setup::CC]))?;
    stages.stage("build", build)?;
    let model = stages.stage("model", model::fetch)?;
    if options.check {
        stages.stage("check", || check::run(&model, &options.set))?;
        eprintln!("{}", stages.summary());
        return Ok(ExitCode::SUCCESS);
    }

    let storage = paths::cache().join("quickstart").join("storage");
    std::fs::create_dir_all(&storage).with_context(|| format!("can't create {}", storage.display()))?;
    // Before the server starts, so that no signal is lost in between.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("can't listen for signals")?;
    // By default short prompts are computed without asking storage; here the first short one should show it.
    let mut set = vec!["cache.prefetch_threshold=16".to_owned()];
    set.extend_from_slice(&options.set);
    let launch = Launch { model: &model, storage: &storage, port: options.port, set: &set, show_log: true };
    let mut server = Server::start(&launch)?;
    println!("\nkvdock serves {} at {}; pages are kept in {}.", model::NAME, server.address, storage.display());
    println!("Ask it from another terminal:\n\n{}\n", curl_line(&server.address));
    println!(
        "Ctrl-C stops it. Started again, it finds prompts it has seen in storage: see usage.kvdock in the answer."
    );

    let pid = server.pid();
    let handle = signals.handle();
    let passer = std::thread::spawn(move || {
        for signal in signals.forever() {
            let signal = if signal == SIGINT { Signal::INT } else { Signal::TERM };
            if let Some(pid) = pid {
                let _ = kill_process(pid, signal);
            }
        }
    });
    let status = server.wait()?;
    handle.close();
    let _ = passer.join();
    if status.success() {
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("error: the server ended with {status}");
    Ok(ExitCode::FAILURE)
}

/// # Errors
/// When another program listens on the port.
fn is_free(port: u16) -> Result<()> {
    match std::net::TcpListener::bind(("127.0.0.1", port)) {
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            anyhow::bail!(
                "port {port} of 127.0.0.1 is in use; name another one with --port, or --port 0 for any that is free"
            )
        }
        // Whatever else is wrong is for the server to say.
        _ => Ok(()),
    }
}

fn build() -> Result<()> {
    run_command(cargo().args(["build", "--release", "--package", "kvdock", "--package", "kvdock-plugin-file"]))
}

/// A request that works as it stands in a shell.
fn curl_line(address: &str) -> String {
    let body = serde_json::json!({
        "model": model::NAME,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 64,
        // A model this small talks nonsense when it draws at random.
        "temperature": 0,
    });
    format!("curl -s {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
}

/// How long a stopping server may take.
pub const STOP_PATIENCE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_in_use_is_named_with_the_option_that_changes_it() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let error = is_free(taken.local_addr().unwrap().port()).unwrap_err().to_string();
        assert!(error.contains("is in use; name another one with --port"), "{error}");
        is_free(0).unwrap();
    }

    #[test]
    fn the_curl_line_is_one_shell_line_with_a_json_body() {
        let line = curl_line("http://127.0.0.1:30000");
        assert!(!line.contains('\n'));
        let body = line.split('\'').nth(3).unwrap();
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["messages"][0]["role"], "user");
    }
}
