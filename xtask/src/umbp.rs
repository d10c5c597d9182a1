//! The real UMBP services, for the tests of the UMBP plugin and to try it with: published programs from the Python package index.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::mooncake::{attend, free_ports, shell};
use crate::process::{cargo, command, run};
use crate::server::quoted;
use crate::{model, paths, setup};

const RELEASE: &str = "1.2.4";
/// How long a service may take to listen.
const PATIENCE: Duration = Duration::from_secs(60);

/// What to do with the services.
#[derive(Subcommand)]
pub enum Action {
    /// Start a real umbp_master on a free port of this machine, or a real umbp_standalone_server, and print a config and a command line of
    /// `kvdock serve` that use it. Ctrl-C stops it.
    Up(Up),
}

/// Options of `up`.
#[derive(Args)]
pub struct Up {
    /// A umbp_standalone_server at a Unix socket, which has the memory, and not a master, whose nodes have it.
    #[arg(long)]
    standalone: bool,
    /// Bytes of memory of the standalone server.
    #[arg(long, default_value_t = 1 << 30, requires = "standalone")]
    memory: u64,
    /// Start the service alone: neither build kvdock nor fetch the small model that the command line names.
    #[arg(long)]
    service_only: bool,
}

/// Fetches the programs once, builds what they need to run without a GPU, and answers the folder they lie in.
///
/// # Errors
/// When they can't be fetched, or do not run here.
pub fn fetch() -> Result<PathBuf> {
    setup::ensure(&[setup::CC, setup::CXX, setup::PIP])?;
    let folder = paths::cache().join(format!("umbp-{RELEASE}"));
    let script = paths::root().join("plugins/umbp/tests/peer/setup.sh");
    run(command("bash").arg(script).arg(&folder)).with_context(|| format!("UMBP {RELEASE} can't be set up"))?;
    Ok(folder)
}

/// Runs a command about the services.
///
/// # Errors
/// When they can't be fetched or started, or end with an error.
pub fn act(action: &Action) -> Result<ExitCode> {
    let Action::Up(options) = action;
    let folder = fetch()?;
    let model = if options.service_only {
        None
    } else {
        run(cargo().args(["build", "--release", "--package", "kvdock", "--package", "kvdock-plugin-umbp"]))?;
        Some(model::fetch()?)
    };
    // Before the service starts, so that no signal is lost in between.
    let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("can't listen for signals")?;
    // The path of a socket is short; it goes with this folder at the end.
    let sockets =
        tempfile::Builder::new().prefix("kvdock-umbp-").tempdir().context("can't make a folder for sockets")?;
    let (role, what, address) = if options.standalone {
        let socket = sockets.path().join("node0.grpc.sock");
        ("standalone", "the server", format!("unix://{}", paths::text(&socket)?))
    } else {
        ("master", "the master", format!("127.0.0.1:{}", free_ports()?[0]))
    };
    let log = paths::cache().join(format!("umbp-{role}.log"));
    let mut child = start(&folder, role, &address, options.memory, &log)?;
    print!("{}", advice(options.standalone, &address, model.as_deref())?);
    attend(&mut child, signals, what, &log)
}

/// Starts a service, and waits until it listens.
fn start(folder: &Path, role: &str, address: &str, memory: u64, log: &Path) -> Result<Child> {
    let file = File::create(log).with_context(|| format!("can't create {}", log.display()))?;
    let mut service = command("bash");
    service
        .arg(paths::root().join("plugins/umbp/tests/peer/run.sh"))
        .arg(folder)
        .args([role, address])
        .env("UMBP_DRAM_CAPACITY", memory.to_string())
        .stdout(file.try_clone().context("can't write the log twice")?)
        .stderr(file)
        // A group of its own: Ctrl-C reaches the service once, through this program.
        .process_group(0);
    let mut child = service.spawn().with_context(|| format!("can't start the {role}"))?;
    let began = Instant::now();
    let ready = ["[Master] Listening on", "[StandaloneServer] running on"];
    while child.try_wait().with_context(|| format!("can't ask after the {role}"))?.is_none() {
        let said = std::fs::read(log).unwrap_or_default();
        if ready.iter().any(|line| String::from_utf8_lossy(&said).contains(line)) {
            return Ok(child);
        }
        if began.elapsed() > PATIENCE {
            let _ = child.kill();
            let _ = child.wait();
            bail!("the {role} did not listen within {} s; its log is {}", PATIENCE.as_secs(), log.display());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    bail!("the {role} ended at its start; its log is {}", log.display())
}

/// How kvdock is told of it.
fn advice(standalone: bool, address: &str, model: Option<&Path>) -> Result<String> {
    let release = paths::release()?;
    let model = model.map_or(Ok("MODEL.gguf"), paths::text)?;
    let (program, plugins) = (release.join("kvdock"), quoted(&release)?);
    // Key, value, and what it is.
    let keys: &[(&str, &str, &str)] = if standalone {
        &[("standalone_address", address, "the server has the memory")]
    } else {
        &[
            ("master_address", address, ""),
            ("node_address", "127.0.0.1", "this machine, as the other nodes reach it"),
            ("dram_capacity_bytes", "1GiB", "memory that each server lends"),
        ]
    };
    let config: String = keys
        .iter()
        .map(|(key, value, what)| {
            let what = if what.is_empty() { String::new() } else { format!("   # {what}") };
            format!("    {key} = {}{what}\n", quoted(Path::new(value)).unwrap_or_default())
        })
        .collect();
    let flags: String = keys
        .iter()
        .map(|(key, value, _)| format!(" --set {}", shell(&format!("storage.umbp.{key}={value}"))))
        .collect();
    let what = if standalone { "umbp_standalone_server" } else { "umbp_master" };
    Ok(format!(
        r#"
{what} of UMBP {RELEASE} listens at {address}

In a config file:

    [storage]
    backend = "umbp"
    plugin_path = [{plugins}]

    [storage.umbp]
{config}
Or as one command, in another terminal, and once more with another port to see two servers share their pages:

    {} serve --set model.path={} --set server.port=30000 \
        --set storage.backend=umbp --set 'storage.plugin_path=[{plugins}]' \
       {flags} \
        --set cache.prefetch_threshold=16

"#,
        shell(paths::text(&program)?),
        shell(model),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_names_the_address_and_quotes_for_toml_and_shell() {
        let master = advice(false, "127.0.0.1:1111", Some(Path::new("/a b/it's.gguf"))).unwrap();
        for part in [
            "umbp_master of",
            "master_address = \"127.0.0.1:1111\"",
            "--set storage.umbp.master_address=127.0.0.1:1111 ",
            "dram_capacity_bytes = \"1GiB\"   # memory",
            r"model.path='/a b/it'\''s.gguf'",
        ] {
            assert!(master.contains(part), "{part} is missing in {master}");
        }
        let server = advice(true, "unix:///tmp/x y/n.sock", None).unwrap();
        for part in [
            "standalone_address = \"unix:///tmp/x y/n.sock\"",
            "--set 'storage.umbp.standalone_address=unix:///tmp/x y/n.sock'",
            "model.path=MODEL.gguf",
        ] {
            assert!(server.contains(part), "{part} is missing in {server}");
        }
        assert!(!server.contains("master_address"), "{server}");
    }
}
