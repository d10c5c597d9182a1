//! An operator who changes file backends all the time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::client::Client;
use crate::paths;
use crate::server::Launch;

/// The endpoint.
pub const ENDPOINT: &str = "/hicache/storage-backend";

/// Versions of the plugin that are copied over each other.
const BUILDS: usize = 3;

/// A folder for plugins, with one file plugin of which there are several builds.
pub struct PluginFolder {
    folder: TempDir,
    builds: Vec<Vec<u8>>,
}

impl PluginFolder {
    /// With the first build in it.
    pub fn new() -> Self {
        let plugin = fs::read(paths::file_plugin()).expect("the plugin can be read");
        let builds = (0..BUILDS).map(|number| build(&plugin, number)).collect();
        // Mode 0700, as a plugin's folder should be.
        let folder = tempfile::tempdir().expect("the temporary folder takes files");
        let new = Self { folder, builds };
        new.copy(0);
        new
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Copies a build over what is there, as `cp` does: the same file gets other bytes.
    pub fn copy(&self, build: usize) {
        let bytes = self.builds.get(build % BUILDS).expect("there is a build of each number");
        fs::write(self.folder.path().join("libfile.so"), bytes).expect("the plugin can be written");
    }
}

impl Default for PluginFolder {
    fn default() -> Self {
        Self::new()
    }
}

/// The plugin with another version in its note. The first is as it was built.
fn build(plugin: &[u8], number: usize) -> Vec<u8> {
    let mut bytes = plugin.to_vec();
    let mark = b"\"version\":\"";
    let at = bytes.windows(mark.len()).position(|window| window == mark).expect("the note has a version");
    let digit = bytes.get_mut(at + mark.len()).expect("a version follows");
    *digit += number as u8;
    bytes
}

fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).expect("the folder can be listed").flatten() {
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() {
            fs::create_dir_all(&to).expect("the folder takes folders");
            copy(&from, &to);
        } else {
            fs::copy(&from, &to).expect("the folder takes files");
        }
    }
}

/// What the script does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Attaches where nothing is attached.
    Attach,
    /// Another folder under the same name.
    OtherFolder,
    /// Another setting, the same folder.
    OtherConfig,
    /// The plugin's file was copied over.
    NewerBuild,
    /// Another name takes the place.
    OtherName,
    /// A second backend behind the first.
    Add,
    /// Another setting for the first of two.
    OneOfTwo,
    /// Detaches one by its name.
    DetachOne,
    /// Detaches everything without a drain.
    Force,
}

/// The order. It ends with nothing attached.
const STEPS: [Step; 13] = [
    Step::Attach,
    Step::OtherFolder,
    Step::OtherConfig,
    Step::NewerBuild,
    Step::OtherName,
    Step::DetachOne,
    Step::Attach,
    Step::Add,
    Step::OneOfTwo,
    Step::DetachOne,
    Step::NewerBuild,
    Step::Add,
    Step::Force,
];

/// The script.
pub struct Script {
    client: Client,
    plugins: PluginFolder,
    folders: [TempDir; 2],
    turn: usize,
    build: usize,
    /// How often each step was done, and the longest it took.
    pub done: BTreeMap<Step, (u32, Duration)>,
    /// SHA-256 of every plugin that was attached.
    pub contents: BTreeSet<String>,
    /// Versions of every plugin that was attached.
    pub versions: BTreeSet<String>,
}

/// What a server needs so that a script can work on it.
pub struct Stage {
    plugins: PluginFolder,
    folders: [TempDir; 2],
}

impl Default for Stage {
    fn default() -> Self {
        let folder = || tempfile::tempdir().expect("the temporary folder takes files");
        Self { plugins: PluginFolder::new(), folders: [folder(), folder()] }
    }
}

impl Stage {
    /// `launch` with the plugin folder, and a backend named `archive` that runs with the same plugin. Nothing is attached.
    pub fn set(&self, launch: Launch) -> Launch {
        launch
            .set("storage.plugin_path", json!([self.plugins.path()]))
            .set("storage.archive.plugin", json!("file"))
            .set("storage.archive.dir", json!(self.folders[1].path()))
            .set("storage.archive.min_free_bytes", 0)
    }

    /// The script for a server that was launched so.
    pub fn script(self, client: Client) -> Script {
        Script {
            client,
            plugins: self.plugins,
            folders: self.folders,
            turn: 0,
            build: 0,
            done: BTreeMap::new(),
            contents: BTreeSet::new(),
            versions: BTreeSet::new(),
        }
    }
}

impl Script {
    /// Steps of one round.
    pub const ROUND: usize = STEPS.len();

    /// Fills both folders: `ask` makes the server store pages in the first, which is then copied. Nothing is attached afterwards.
    pub fn fill(&self, ask: impl FnOnce()) {
        self.put("file", &json!({"dir": self.folder(0), "min_free_bytes": 0}), &[]);
        ask();
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.client.metrics().sum("kvdock:backup_pending_pages", &[]) > 0.0 {
            assert!(Instant::now() < deadline, "pages are still on their way to storage");
            std::thread::sleep(Duration::from_millis(20));
        }
        self.delete("");
        copy(&self.folder(0), &self.folder(1));
    }

    /// Does `steps` steps, one every `pause`.
    pub fn run(&mut self, steps: usize, pause: Duration) {
        let begin = Instant::now();
        for number in 0..steps as u32 {
            std::thread::sleep((begin + pause * number).saturating_duration_since(Instant::now()));
            self.step();
        }
        std::thread::sleep((begin + pause * steps as u32).saturating_duration_since(Instant::now()));
    }

    /// Attaches a backend that stays; between rounds.
    pub fn rest(&self) {
        self.put("file", &json!({"dir": self.folder(0), "min_free_bytes": 0}), &[]);
    }

    /// Does the next step; the server must say that it is done.
    pub fn step(&mut self) {
        let step = STEPS.get(self.turn % Self::ROUND).copied().expect("the order has a step for every turn");
        self.turn += 1;
        let began = Instant::now();
        let attached = self.make(step);
        let took = began.elapsed();
        let (times, longest) = self.done.entry(step).or_default();
        *times += 1;
        *longest = took.max(*longest);
        self.look(step, attached);
    }

    fn folder(&self, number: usize) -> PathBuf {
        self.folders.get(number % self.folders.len()).expect("one of two folders").path().to_path_buf()
    }

    /// Makes the call; what is attached then, in order.
    fn make(&mut self, step: Step) -> &'static [&'static str] {
        let config = |folder: PathBuf| json!({"dir": folder, "max_bytes": "1GiB", "timeout": 4, "min_free_bytes": 0});
        match step {
            Step::Attach | Step::OtherFolder => {
                self.put("file", &json!({"dir": self.folder(self.turn), "min_free_bytes": 0}), &[])
            }
            Step::OtherConfig => self.put("file", &config(self.folder(self.turn - 1)), &[]),
            Step::NewerBuild => {
                self.build += 1;
                self.plugins.copy(self.build);
                self.put("file", &json!({"dir": self.folder(self.turn), "min_free_bytes": 0}), &[])
            }
            Step::OtherName => self.put("archive", &Value::Null, &[]),
            Step::Add => {
                self.put("archive", &Value::Null, &[("kvdock_mode", "add")]);
                return &["file", "archive"];
            }
            Step::OneOfTwo => {
                self.put("file", &config(self.folder(self.turn)), &[("kvdock_backend", "file")]);
                return &["file", "archive"];
            }
            Step::DetachOne => self.delete("?backend=archive"),
            Step::Force => self.delete("?force=true"),
        }
        match step {
            Step::OtherName => &["archive"],
            Step::Force => &[],
            // The first time `archive` was alone, the second time it was behind `file`.
            Step::DetachOne if self.turn % Self::ROUND == 6 => &[],
            _ => &["file"],
        }
    }

    fn put(&self, name: &str, config: &Value, more: &[(&str, &str)]) {
        let mut body = json!({"hicache_storage_backend": name});
        if !config.is_null() {
            body["hicache_storage_backend_extra_config_json"] = config.to_string().into();
        }
        more.iter().for_each(|(key, value)| body[key] = (*value).into());
        let reply = self.client.put(ENDPOINT, &body);
        assert_eq!(reply.status, 200, "{body}: {}", reply.json);
    }

    fn delete(&self, query: &str) {
        let reply = self.client.delete(&format!("{ENDPOINT}{query}"));
        assert_eq!(reply.status, 200, "DELETE {query}: {}", reply.json);
    }

    /// The status must show what was done.
    fn look(&mut self, step: Step, attached: &[&str]) {
        let status = self.client.get(ENDPOINT).json;
        assert_eq!(status["hicache_storage_backend"].as_str(), attached.first().copied(), "after {step:?}: {status}");
        let all = status["backends"].as_array().cloned().unwrap_or_default();
        // Those that are on their way out are shown, too.
        let used: Vec<Value> = all.into_iter().filter(|backend| backend["in_use"] == true).collect();
        let names: Vec<&str> = used.iter().filter_map(|backend| backend["name"].as_str()).collect();
        assert_eq!(names, attached, "after {step:?}: {status}");
        for backend in &used {
            assert_eq!(backend["state"], "active", "after {step:?}: {status}");
            let text = |field: &str| backend[field].as_str().unwrap_or_default().to_owned();
            self.contents.insert(text("sha256"));
            self.versions.insert(text("version"));
        }
        // What the last call attached runs from the file that lies there now.
        let newest = if step == Step::Add { used.last() } else { used.first() };
        if let (Some(newest), false) = (newest, step == Step::DetachOne) {
            let version = newest["version"].as_str().unwrap_or_default();
            let major = version.split('.').next().and_then(|major| major.parse().ok());
            assert_eq!(major, Some(self.build % BUILDS), "the build that was copied last: {status}");
        }
    }
}
