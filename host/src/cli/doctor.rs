//! `kvdock doctor`

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use kvdock_cuda::{Probe, Search};
use kvdock_kernels::cpu::Isa;

use super::machine::{self, size};
use super::{Failure, Settings, plugin, print, say};
use crate::config::Config;
use crate::plugin::{discover, search_path};

/// Shows what this machine offers; fails when something that kvdock can't do without is missing.
pub(super) fn doctor(settings: Settings) -> Result<ExitCode, Failure> {
    let loaded = settings.load()?;
    for warning in &loaded.warnings {
        say(&format!("warning: {warning}"));
    }
    let (text, missing) = report(&loaded.config);
    print(&text)?;
    match missing.is_empty() {
        true => Ok(ExitCode::SUCCESS),
        false => Err(Failure(missing.join("\n"))),
    }
}

fn report(config: &Config) -> (String, Vec<String>) {
    let mut text = String::new();
    let mut missing = Vec::new();
    let mut row = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<16}{value}");
    };
    row("kvdock", env!("CARGO_PKG_VERSION").to_owned());
    row("cpu", cpu());
    let sets: Vec<_> = Isa::available().iter().map(|isa| isa.name()).collect();
    row(
        "cpu kernels",
        match sets.split_first() {
            Some((best, [])) => format!("{best} (slow: this CPU has no AVX2)"),
            Some((best, rest)) => format!("{best} (also possible: {})", rest.join(", ")),
            None => "none".to_owned(),
        },
    );
    let probe = Probe::new(&Search::usual());
    for (name, value) in probe.rows() {
        row(name, value);
    }
    row("pinned memory", pinned_memory(&probe));
    row(
        "memory",
        match machine::memory() {
            Some(memory) => {
                format!("{} in all, {} available", size(memory.total), size(memory.available))
            }
            None => "unknown".to_owned(),
        },
    );
    row(
        "memfd",
        match machine::memfd() {
            Ok(()) => "works".to_owned(),
            Err(error) => {
                missing.push(format!("memfd_create fails ({error}), and host pools live in such memory"));
                format!("fails: {error}")
            }
        },
    );
    row(
        "io_uring",
        match machine::io_uring() {
            Ok(()) => "allowed".to_owned(),
            Err(error) => format!("not allowed ({error}); plugins fall back to plain reads and writes"),
        },
    );
    let limit = |limit: Option<u64>| limit.map(size).unwrap_or_else(|| "unlimited".to_owned());
    row("locked memory", format!("{} (RLIMIT_MEMLOCK)", limit(machine::memlock())));
    let files = machine::open_files();
    let raised =
        machine::raise_open_files().map(|(_, to)| format!("; kvdock serve raises it to {to}")).unwrap_or_default();
    row("open files", files.map_or_else(|| "unlimited".to_owned(), |files| format!("{files}{raised}")));
    row("huge pages", machine::huge_pages());
    for (name, table) in &config.storage.tables {
        if let Some(folder) = table.own.get("dir").and_then(serde_json::Value::as_str) {
            row("disk", format!("storage.{name}.dir = {folder}: {}", disk(Path::new(folder))));
        }
    }
    let folders = search_path(&config.storage.plugin_path);
    for folder in &config.storage.plugin_path {
        if !folder.is_dir() {
            row("plugin path", format!("{} (no such folder)", folder.display()));
        }
    }
    for folder in &folders {
        row("plugin path", folder.display().to_string());
    }
    let found = discover(&folders);
    for line in plugin::table(&found, &folders).lines() {
        row("plugin", line.to_owned());
    }
    (text, missing)
}

/// How much host memory can be pinned for a GPU, in words.
fn pinned_memory(probe: &Probe) -> String {
    let limit = match machine::memlock() {
        None => "RLIMIT_MEMLOCK sets no limit".to_owned(),
        Some(limit) => format!("RLIMIT_MEMLOCK is {}, and drivers may go by it", size(limit)),
    };
    match (&probe.driver, machine::memory()) {
        (Err(_), _) => format!("none without the NVIDIA driver; {limit}"),
        (Ok(_), Some(memory)) => format!("{limit}; {} of memory are available", size(memory.available)),
        (Ok(_), None) => limit,
    }
}

fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .and_then(|rest| rest.split_once(':'))
        .map_or("unknown model", |(_, name)| name.trim());
    format!("{model}, {} usable", machine::cpus())
}

/// Room on the file system that holds `folder`, or will hold it.
fn disk(folder: &Path) -> String {
    let there: Option<PathBuf> = folder.ancestors().find(|path| path.is_dir()).map(Path::to_owned);
    let Some(there) = there else {
        return "no folder above it exists".to_owned();
    };
    match machine::disk(&there) {
        Ok((free, total)) => format!("{} free of {}", size(free), size(total)),
        Err(error) => format!("can't be asked: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Sources, load};

    #[test]
    fn the_report_covers_what_kvdock_uses() {
        let sources = Sources { set: vec!["storage.file.dir=/tmp/some/where".into()], ..Sources::default() };
        let (text, missing) = report(&load(&sources).unwrap().config);
        assert_eq!(missing, Vec::<String>::new());
        for word in ["cpu kernels", "memory", "memfd", "io_uring", "locked memory", "huge pages", "disk", "plugin"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        for word in ["cuda ", "cuda driver", "cuda compiler", "cublas", "pinned memory"] {
            assert!(text.lines().any(|line| line.starts_with(word)), "{word}: {text}");
        }
    }
}
