//! A process seen from outside, through `/proc`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// What a process holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// Threads by name.
    pub threads: BTreeMap<String, usize>,
    /// Open files by what they are. Numbers of sockets, pipes and such are left out.
    pub files: BTreeMap<String, usize>,
}

impl Look {
    /// Looks at a process.
    pub fn at(pid: u32) -> Self {
        let mut threads = BTreeMap::new();
        for entry in entries(pid, "task") {
            // A thread may end between the listing and this.
            if let Ok(name) = std::fs::read_to_string(entry.join("comm")) {
                *threads.entry(name.trim_end().to_owned()).or_default() += 1;
            }
        }
        let mut files = BTreeMap::new();
        for entry in entries(pid, "fd") {
            if let Ok(target) = std::fs::read_link(entry) {
                let target = target.to_string_lossy().into_owned();
                let kind = target.split_once(":[").map_or(target.as_str(), |(kind, _)| kind).to_owned();
                *files.entry(kind).or_default() += 1;
            }
        }
        Self { threads, files }
    }

    /// Waits until the process holds no more than this; the server's HTTP side may hold less.
    pub fn wait_back(&self, pid: u32) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let now = Self::at(pid);
            let more = [grown(&self.threads, &now.threads), grown(&self.files, &now.files)].concat();
            if more.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "the process still holds more than at the start: {more:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Stops a process where it is, and waits until each of its threads has stopped: until then some of them still serve.
pub fn stand_still(process: Pid) {
    kill_process(process, Signal::STOP).expect("the process is ours");
    let stopped = |task: PathBuf| {
        let stat = std::fs::read_to_string(task.join("stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_none_or(|rest| rest.starts_with(['T', 't']))
    };
    let began = Instant::now();
    while !entries(process.as_raw_nonzero().get().unsigned_abs(), "task").into_iter().all(stopped) {
        assert!(began.elapsed() < Duration::from_secs(60), "the process does not stand still");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What there is more of than before: name, then, now.
fn grown(before: &BTreeMap<String, usize>, now: &BTreeMap<String, usize>) -> Vec<(String, usize, usize)> {
    let count = |name: &String| before.get(name).copied().unwrap_or_default();
    now.iter().filter(|(name, n)| **n > count(name)).map(|(name, n)| (name.clone(), count(name), *n)).collect()
}

fn entries(pid: u32, folder: &str) -> Vec<PathBuf> {
    let folder = Path::new("/proc").join(pid.to_string()).join(folder);
    std::fs::read_dir(folder).expect("the process runs").flatten().map(|entry| entry.path()).collect()
}

/// The plugin libraries that a process has mapped: the paths of their private copies.
pub fn mapped_plugins(pid: u32) -> BTreeSet<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("the process runs");
    // address perms offset device inode path
    let paths = maps.lines().filter_map(|line| line.splitn(6, ' ').nth(5)).map(str::trim);
    paths.filter(|path| path.contains("kvdock-plugin-")).map(str::to_owned).collect()
}
