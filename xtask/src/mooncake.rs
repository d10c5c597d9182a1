//! The real Mooncake services, for the tests of the Mooncake plugin: published programs from the Python package index.

use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::process::{cargo, command, run, show, succeeds};
use crate::server::quoted;
use crate::{model, paths, setup};

const PACKAGE: &str = "mooncake-transfer-engine-non-cuda";
const RELEASE: &str = "0.3.13.post1";
/// How long the master may take to listen.
const PATIENCE: Duration = Duration::from_secs(60);

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

/// Fetches etcd once: in it several masters agree who leads. Nothing is installed, for the Debian package would start a service.
///
/// # Errors
/// When there is none and it can't be fetched.
pub fn fetch_etcd() -> Result<()> {
    let folder = paths::cache().join("etcd");
    let program = folder.join("usr/bin/etcd");
    if succeeds("etcd", &["--version"]) || succeeds(paths::text(&program)?, &["--version"]) {
        return Ok(());
    }
    let by_hand = "install etcd 3.4 or later by hand, so that `etcd` is on the path";
    if !succeeds("apt-get", &["--version"]) {
        bail!("etcd is missing and there is no apt-get here; {by_hand}");
    }
    std::fs::create_dir_all(paths::cache()).context("can't create the folder of what is fetched")?;
    let scratch = tempfile::Builder::new().prefix("fetch-").tempdir_in(paths::cache())?;
    let download = || {
        let mut apt = command("apt-get");
        apt.current_dir(scratch.path()).args(["download", "--quiet", "etcd-server"]);
        apt
    };
    eprintln!("fetching the Debian package etcd-server (8 MiB)");
    if run(&mut download()).is_err() {
        setup::update_packages()?;
        run(&mut download()).context(by_hand)?;
    }
    let mut packages = std::fs::read_dir(scratch.path())?.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let package = packages.find(|path| path.extension().is_some_and(|extension| extension == "deb"));
    let unpacked = scratch.path().join("etcd");
    run(command("dpkg-deb").arg("--extract").arg(package.context("apt-get has left no package")?).arg(&unpacked))?;
    if folder.exists() {
        std::fs::remove_dir_all(&folder).with_context(|| format!("can't remove {}", folder.display()))?;
    }
    std::fs::rename(&unpacked, &folder).with_context(|| format!("can't move etcd to {}", folder.display()))?;
    run(command(paths::text(&program)?).arg("--version")).context("etcd does not run here")
}

/// What to do with the services.
#[derive(Subcommand)]
pub enum Action {
    /// Start a real master with its metadata server on free ports of this machine, and print a config and a command line of `kvdock serve`
    /// that use it. Ctrl-C stops it.
    Up(Up),
}

/// Options of `up`.
#[derive(Args)]
pub struct Up {
    /// Milliseconds for which pages that were found are kept for reading.
    #[arg(long, default_value_t = 5000)]
    lease: u64,
    /// Start the master alone: neither build kvdock nor fetch the small model that the command line names.
    #[arg(long)]
    master_only: bool,
    /// More flags of the master.
    #[arg(last = true)]
    flags: Vec<String>,
}

/// Where the services listen, all on 127.0.0.1.
struct Ports {
    rpc: u16,
    metrics: u16,
    metadata: u16,
}

/// Runs a command about the services.
///
/// # Errors
/// When they can't be fetched or started, or end with an error.
pub fn act(action: &Action) -> Result<ExitCode> {
    let Action::Up(options) = action;
    let folder = fetch()?;
    let model = if options.master_only {
        None
    } else {
        run(cargo().args(["build", "--release", "--package", "kvdock", "--package", "kvdock-plugin-mooncake"]))?;
        Some(model::fetch()?)
    };
    // Before the master starts, so that no signal is lost in between.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("can't listen for signals")?;
    let log = paths::cache().join("mooncake-master.log");
    let (mut master, ports) = start(&folder.join("mooncake/mooncake_master"), &log, options)?;
    print!("{}", advice(&ports, model.as_deref())?);
    println!("Its log goes to {}. Ctrl-C stops it.", log.display());
    let pid = Pid::from_child(&master);
    let handle = signals.handle();
    let passer = std::thread::spawn(move || {
        let asked = signals.forever().next().is_some();
        if asked {
            // It may have ended by itself.
            let _ = kill_process(pid, Signal::TERM);
        }
        asked
    });
    let status = master.wait().context("can't wait for the master")?;
    handle.close();
    let asked = passer.join().unwrap_or(false);
    if asked {
        println!("the master has stopped");
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("error: the master ended by itself, with {status}; its log is {}", log.display());
    Ok(ExitCode::FAILURE)
}

/// Starts a master and waits until it serves.
fn start(program: &Path, log: &Path, options: &Up) -> Result<(Child, Ports)> {
    // Ports are free when they are drawn; somebody else may take one before the master does.
    for _ in 0..3 {
        let [rpc, metrics, metadata] = free_ports()?;
        let mut master = command(paths::text(program)?);
        master
            .arg("--rpc_address=127.0.0.1")
            .arg(format!("--rpc_port={rpc}"))
            .arg("--metrics_host=127.0.0.1")
            .arg(format!("--metrics_port={metrics}"))
            .arg("--enable_http_metadata_server=true")
            .arg(format!("--http_metadata_server_port={metadata}"))
            .arg(format!("--default_kv_lease_ttl={}", options.lease))
            .arg("--logtostderr=1")
            .stderr(File::create(log).with_context(|| format!("can't create {}", log.display()))?)
            .args(&options.flags)
            // A group of its own: Ctrl-C reaches the master once, through this program.
            .process_group(0);
        let mut child = master.spawn().with_context(|| format!("can't start `{}`", show(&master)))?;
        let began = Instant::now();
        let is_up = |port: u16| TcpStream::connect(("127.0.0.1", port)).is_ok();
        while child.try_wait().context("can't ask after the master")?.is_none() {
            if is_up(rpc) && is_up(metrics) && is_up(metadata) {
                return Ok((child, Ports { rpc, metrics, metadata }));
            }
            if began.elapsed() > PATIENCE {
                let _ = child.kill();
                let _ = child.wait();
                bail!("the master did not listen within {} s", PATIENCE.as_secs());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    bail!("the master ended at its start, three times; its log is {}", log.display())
}

/// How kvdock is told of it.
fn advice(ports: &Ports, model: Option<&Path>) -> Result<String> {
    let Ports { rpc, metrics, metadata } = ports;
    let release = paths::release()?;
    let model = model.map_or(Ok("MODEL.gguf"), paths::text)?;
    let (program, plugins) = (release.join("kvdock"), quoted(&release)?);
    Ok(format!(
        r#"
Mooncake {RELEASE} listens on 127.0.0.1:{rpc}; its figures are at http://127.0.0.1:{metrics}/metrics/summary

In a config file:

    [storage]
    backend = "mooncake"
    plugin_path = [{plugins}]

    [storage.mooncake]
    master_server_address = "127.0.0.1:{rpc}"
    metadata_server = "P2PHANDSHAKE"   # or "http://127.0.0.1:{metadata}/metadata", the same for every client
    master_metrics_port = {metrics}
    local_hostname = "127.0.0.1"
    global_segment_size = "1GiB"       # memory that each server lends

Or as one command, in another terminal, and once more with another port to see two servers share their pages:

    {} serve --set model.path={} --set server.port=30000 \
        --set storage.backend=mooncake --set 'storage.plugin_path=[{plugins}]' \
        --set storage.mooncake.master_server_address=127.0.0.1:{rpc} \
        --set storage.mooncake.master_metrics_port={metrics} \
        --set storage.mooncake.local_hostname=127.0.0.1 --set storage.mooncake.global_segment_size=1GiB \
        --set cache.prefetch_threshold=16

"#,
        shell(paths::text(&program)?),
        shell(model),
    ))
}

/// A word of a shell's command line.
fn shell(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:@%".contains(c);
    if text.chars().all(plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
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

    #[test]
    fn the_advice_names_every_port_and_quotes_for_toml_and_shell() {
        let text =
            advice(&Ports { rpc: 1111, metrics: 2222, metadata: 3333 }, Some(Path::new("/a b/it's.gguf"))).unwrap();
        for part in
            ["127.0.0.1:1111\"", "master_metrics_port = 2222", "http://127.0.0.1:3333/metadata", "=127.0.0.1:1111 "]
        {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
        assert!(text.contains(r"model.path='/a b/it'\''s.gguf'"), "{text}");
        let lines: Vec<&str> = text.lines().collect();
        let config =
            lines.iter().skip_while(|line| !line.contains("[storage]")).take_while(|line| !line.starts_with("Or "));
        assert_eq!(config.filter(|line| line.contains('=')).count(), 7);
    }
}
