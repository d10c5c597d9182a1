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
    /// More flags of the master, each as --NAME=VALUE or --NAME VALUE. Its ports may be among them; where it listens may not: that is 127.0.0.1.
    #[arg(last = true)]
    flags: Vec<String>,
}

/// Where the services listen, all on 127.0.0.1.
#[derive(Debug, Clone, Copy)]
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
    // Before anything is fetched or built.
    let flags = Flags::of(options)?;
    let folder = fetch()?;
    let model = if options.master_only {
        None
    } else {
        run(cargo().args(["build", "--release", "--package", "kvdock", "--package", "kvdock-plugin-mooncake"]))?;
        Some(model::fetch()?)
    };
    // Before the master starts, so that no signal is lost in between.
    let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("can't listen for signals")?;
    let log = paths::cache().join("mooncake-master.log");
    let (mut master, ports) = start(&folder.join("mooncake/mooncake_master"), &log, &flags)?;
    print!("{}", advice(&ports, model.as_deref())?);
    attend(&mut master, signals, "the master", &log)
}

/// Stays with a service until it ends, or a signal asks for its end.
///
/// # Errors
/// When it can't be waited for.
pub fn attend(child: &mut Child, mut signals: Signals, what: &str, log: &Path) -> Result<ExitCode> {
    println!("Its log goes to {}. Ctrl-C stops it.", log.display());
    let pid = Pid::from_child(child);
    let handle = signals.handle();
    let passer = std::thread::spawn(move || {
        let asked = signals.forever().next().is_some();
        if asked {
            // It may have ended by itself.
            let _ = kill_process(pid, Signal::TERM);
        }
        asked
    });
    let status = child.wait().with_context(|| format!("can't wait for {what}"))?;
    handle.close();
    let asked = passer.join().unwrap_or(false);
    if asked {
        println!("{what} has stopped");
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("error: {what} ended by itself, with {status}; its log is {}", log.display());
    Ok(ExitCode::FAILURE)
}

/// What the master is started with.
#[derive(Debug, PartialEq)]
struct Flags {
    rpc: Option<u16>,
    metrics: Option<u16>,
    metadata: Option<u16>,
    lease: String,
    /// All others, as they were given.
    others: Vec<String>,
}

/// Flags that `up` sets by itself.
const OWN: [(&str, &str); 5] = [
    ("rpc_address", "it listens on 127.0.0.1"),
    ("metrics_host", "it listens on 127.0.0.1"),
    ("enable_http_metadata_server", "there always is one"),
    ("logtostderr", "the log goes to a file that it names"),
    ("enable_ha", "one master is started; plugins/mooncake/README.md shows several"),
];

impl Flags {
    /// Takes out of the flags of the master what `up` has to know.
    fn of(options: &Up) -> Result<Flags> {
        let (lease, others) = (options.lease.to_string(), Vec::new());
        let mut flags = Flags { rpc: None, metrics: None, metadata: None, lease, others };
        let mut given = options.flags.iter();
        while let Some(flag) = given.next() {
            let Some(word) = flag.strip_prefix("--").or_else(|| flag.strip_prefix('-')) else {
                bail!("{flag}: expected a flag of the master, such as --rpc_port=50051");
            };
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (word, None),
            };
            // Flags may be written with dashes too.
            let plain = name.replace('-', "_");
            if let Some((_, why)) = OWN.iter().find(|(own, _)| *own == plain || plain.strip_prefix("no") == Some(*own))
            {
                bail!("--{name}: this is set by `mooncake up`: {why}");
            }
            let place = match plain.as_str() {
                "rpc_port" | "port" => &mut flags.rpc,
                "metrics_port" => &mut flags.metrics,
                "http_metadata_server_port" => &mut flags.metadata,
                "default_kv_lease_ttl" => {
                    flags.lease = value
                        .or_else(|| given.next().map(String::as_str))
                        .context("--default_kv_lease_ttl takes a time")?
                        .to_owned();
                    continue;
                }
                _ => {
                    flags.others.push(flag.clone());
                    // Its value, if that stands apart.
                    if value.is_none() && given.as_slice().first().is_some_and(|next| !next.starts_with('-')) {
                        flags.others.extend(given.next().cloned());
                    }
                    continue;
                }
            };
            let value = value.or_else(|| given.next().map(String::as_str)).unwrap_or_default();
            let port = value.parse().ok().filter(|port| *port > 0);
            *place = Some(
                port.with_context(|| format!("--{name}: {value:?} is no port; it takes a number from 1 to 65535"))?,
            );
        }
        let ports: Vec<u16> = [flags.rpc, flags.metrics, flags.metadata].into_iter().flatten().collect();
        if ports.iter().enumerate().any(|(at, port)| ports.get(at + 1..).is_some_and(|rest| rest.contains(port))) {
            bail!("--rpc_port, --metrics_port and --http_metadata_server_port have to be different");
        }
        Ok(flags)
    }

    /// Ports for a start: those that were asked for, and free ones.
    fn ports(&self) -> Result<Ports> {
        for (name, port) in
            [("rpc_port", self.rpc), ("metrics_port", self.metrics), ("http_metadata_server_port", self.metadata)]
        {
            if let Some(port) = port {
                TcpListener::bind(("127.0.0.1", port))
                    .with_context(|| format!("--{name}: port {port} of 127.0.0.1 can't be used"))?;
            }
        }
        let asked = [self.rpc, self.metrics, self.metadata];
        let [rpc, metrics, metadata] = loop {
            let free = free_ports()?;
            // A free port may be one that was asked for.
            if !free.iter().any(|port| asked.contains(&Some(*port))) {
                break free;
            }
        };
        Ok(Ports {
            rpc: self.rpc.unwrap_or(rpc),
            metrics: self.metrics.unwrap_or(metrics),
            metadata: self.metadata.unwrap_or(metadata),
        })
    }
}

/// Starts a master and waits until it serves.
fn start(program: &Path, log: &Path, flags: &Flags) -> Result<(Child, Ports)> {
    // Ports are free when they are drawn; somebody else may take one before the master does.
    for _ in 0..3 {
        let ports = flags.ports()?;
        let Ports { rpc, metrics, metadata } = ports;
        let mut master = command(paths::text(program)?);
        master
            .arg("--rpc_address=127.0.0.1")
            .arg(format!("--rpc_port={rpc}"))
            .arg("--metrics_host=127.0.0.1")
            .arg(format!("--metrics_port={metrics}"))
            .arg("--enable_http_metadata_server=true")
            .arg(format!("--http_metadata_server_port={metadata}"))
            .arg(format!("--default_kv_lease_ttl={}", flags.lease))
            .arg("--logtostderr=1")
            .stderr(File::create(log).with_context(|| format!("can't create {}", log.display()))?)
            .args(&flags.others)
            // A group of its own: Ctrl-C reaches the master once, through this program.
            .process_group(0);
        let mut child = master.spawn().with_context(|| format!("can't start `{}`", show(&master)))?;
        let began = Instant::now();
        let is_up = |port: u16| TcpStream::connect(("127.0.0.1", port)).is_ok();
        while child.try_wait().context("can't ask after the master")?.is_none() {
            if is_up(rpc) && is_up(metrics) && is_up(metadata) {
                return Ok((child, ports));
            }
            if began.elapsed() > PATIENCE {
                let _ = child.kill();
                let _ = child.wait();
                bail!("the master did not listen within {} s; its log is {}", PATIENCE.as_secs(), log.display());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        // A flag that it does not know ends it as well, each time.
        let said = std::fs::read_to_string(log).unwrap_or_default();
        if let Some(line) =
            said.lines().find(|line| line.contains("unknown command line flag") || line.contains("ERROR:"))
        {
            bail!("the master does not start: {line}");
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
pub fn shell(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:@%".contains(c);
    if text.chars().all(plain) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

/// Ports that nobody listens on now, all different.
pub fn free_ports() -> Result<[u16; 3]> {
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

    fn flags(given: &[&str]) -> Result<Flags> {
        Flags::of(&Up { lease: 5000, master_only: true, flags: given.iter().map(|flag| (*flag).to_owned()).collect() })
    }

    /// The master listened where it was told to, and was waited for somewhere else.
    #[test]
    fn a_port_of_ones_own_was_not_where_the_master_was_looked_for() {
        let [own, other, third] = free_ports().unwrap();
        for given in [
            vec![format!("--rpc_port={own}")],
            vec!["--rpc_port".to_owned(), own.to_string()],
            vec![format!("-rpc-port={own}")],
        ] {
            let given: Vec<&str> = given.iter().map(String::as_str).collect();
            let flags = flags(&given).unwrap();
            assert!(flags.others.is_empty(), "{flags:?}");
            let ports = flags.ports().unwrap();
            assert!(ports.rpc == own && ports.metrics != own && ports.metadata != own, "{ports:?}");
        }
        let all = [
            format!("--metrics_port={other}"),
            format!("--http_metadata_server_port={third}"),
            "--client_ttl".to_owned(),
            "5".to_owned(),
            "-v=1".to_owned(),
        ];
        let flags = flags(&all.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
        let ports = flags.ports().unwrap();
        assert_eq!((ports.metrics, ports.metadata), (other, third));
        assert_eq!(flags.others, ["--client_ttl", "5", "-v=1"]);
    }

    #[test]
    fn flags_that_make_no_sense_are_refused_in_words() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        for (given, word) in [
            (vec!["--rpc_port=x"], "1 to 65535"),
            (vec!["--rpc_port"], "1 to 65535"),
            (vec!["--rpc_port=70000"], "1 to 65535"),
            (vec!["--rpc_port=1000", "--metrics_port=1000"], "different"),
            (vec!["--rpc_address=0.0.0.0"], "127.0.0.1"),
            (vec!["--noenable_http_metadata_server"], "always is one"),
            (vec!["50051"], "expected a flag"),
        ] {
            let error = format!("{:#}", flags(&given).unwrap_err());
            assert!(error.contains(word), "{given:?}: {error}");
        }
        let error = format!("{:#}", flags(&[&format!("--rpc_port={port}")]).unwrap().ports().unwrap_err());
        assert!(error.contains(&port.to_string()) && error.contains("can't be used"), "{error}");
        assert_eq!(flags(&["--default_kv_lease_ttl=7s"]).unwrap().lease, "7s");
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
