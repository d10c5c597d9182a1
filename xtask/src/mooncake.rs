//! The real Mooncake services, for the tests of the Mooncake plugin: published programs from the Python package index.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};

use crate::paths;
use crate::process::{command, run, show, succeeds};
use crate::setup;

const PACKAGE: &str = "mooncake-transfer-engine-non-cuda";
const RELEASE: &str = "0.3.13.post1";

/// Fetches the programs once and answers the folder they lie in.
///
/// # Errors
/// When they can't be fetched, or do not run here.
pub fn fetch() -> Result<PathBuf> {
    let folder = paths::cache().join(format!("mooncake-{RELEASE}"));
    let master = folder.join("mooncake/mooncake_master");
    let master = paths::text(&master)?;
    if succeeds(master, &["--version"]) {
        return Ok(folder);
    }
    setup::ensure(&[setup::PIP, setup::MOONCAKE_LIBRARIES])?;
    if !folder.join("mooncake").exists() {
        std::fs::create_dir_all(paths::cache()).context("can't create the folder of what is fetched")?;
        // Beside its last place, so that the move at the end is a rename on one file system.
        let scratch = tempfile::Builder::new().prefix("fetch-").tempdir_in(paths::cache())?;
        eprintln!("fetching the Python package {PACKAGE} {RELEASE} (44 MiB)");
        run(command("python3")
            .args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--root-user-action=ignore"])
            .arg("--target")
            .arg(scratch.path())
            .arg(format!("{PACKAGE}=={RELEASE}")))?;
        let fetched = scratch.keep();
        std::fs::rename(&fetched, &folder)
            .with_context(|| format!("can't move {} to {}", fetched.display(), folder.display()))?;
    }
    run(command(master).arg("--version")).with_context(|| format!("Mooncake {RELEASE} does not run here"))?;
    Ok(folder)
}

/// What to do with the services.
#[derive(Subcommand)]
pub enum Action {
    /// Start a master on free ports of this machine, and say how kvdock uses it. It ends with Ctrl-C.
    Up(Up),
}

/// Options of `up`.
#[derive(Args)]
pub struct Up {
    /// Milliseconds for which pages that were found are kept for reading.
    #[arg(long, default_value_t = 5000)]
    lease: u64,
}

/// Runs a command about the services.
///
/// # Errors
/// When they can't be fetched or started, or end with an error.
pub fn act(action: &Action) -> Result<ExitCode> {
    let Action::Up(options) = action;
    let folder = fetch()?;
    let [rpc, metrics, metadata] = free_ports()?;
    let mut master = command(paths::text(&folder.join("mooncake/mooncake_master"))?);
    master
        .arg("--rpc_address=127.0.0.1")
        .arg(format!("--rpc_port={rpc}"))
        .arg("--metrics_host=127.0.0.1")
        .arg(format!("--metrics_port={metrics}"))
        .arg("--enable_http_metadata_server=true")
        .arg(format!("--http_metadata_server_port={metadata}"))
        .arg(format!("--default_kv_lease_ttl={}", options.lease))
        .arg("--minloglevel=1");
    let mut child = master.spawn().with_context(|| format!("can't start `{}`", show(&master)))?;
    println!("Mooncake {RELEASE} listens on 127.0.0.1:{rpc}. Serve with it, in another terminal:\n");
    println!("  target/release/kvdock serve --set model.path=MODEL --set storage.backend=mooncake \\");
    println!("      --set storage.mooncake.master_server_address=127.0.0.1:{rpc} \\");
    println!(
        "      --set storage.mooncake.master_metrics_port={metrics} --set storage.mooncake.global_segment_size=1GiB\n"
    );
    println!(
        "As metadata server, P2PHANDSHAKE (the default) does, and http://127.0.0.1:{metadata}/metadata. Ctrl-C ends it."
    );
    let status = child.wait().context("can't wait for the master")?;
    // A signal is how it is meant to end.
    Ok(if status.success() || status.code().is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Ports that nobody listens on now, all different.
fn free_ports() -> Result<[u16; 3]> {
    let mut held = Vec::new();
    let mut ports = [0; 3];
    for port in &mut ports {
        let listener = TcpListener::bind("127.0.0.1:0").context("there is no free port")?;
        *port = listener.local_addr().context("a port has no number")?.port();
        held.push(listener);
    }
    Ok(ports)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_free_and_different() {
        let [a, b, c] = free_ports().unwrap();
        assert!(a != b && b != c && a != c);
        assert!(TcpListener::bind(("127.0.0.1", a)).is_ok());
    }
}
