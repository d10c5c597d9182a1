//! The storage directory breaks in every way a disk can, while the server serves: each answer
//! equals the cold one, and metrics and log say what happened.

use std::fs::{File, OpenOptions, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use kvdock_tests::client::{Client, Generation};
use kvdock_tests::metrics::Metrics;
use kvdock_tests::prompt;
use kvdock_tests::server::{Launch, Server};
use kvdock_tests::storage::{files, wait_stored};
use serde_json::Value;

const TOKENS: usize = 400;
const PAGES: u64 = 25;
const HIT: u64 = 384;

/// A server with one prompt in storage and in no other tier.
struct Case {
    server: Server,
    client: Client,
    prompt: Vec<u32>,
    cold: Generation,
}

impl Case {
    fn new(launch: &Launch, seed: u64) -> Self {
        let server = launch.start();
        let client = server.client();
        let prompt = prompt::ids(seed, TOKENS);
        let (cold, usage) = client.generate(&prompt, 6);
        assert_eq!(usage.cached(), 0);
        wait_stored(&client, PAGES);
        let case = Self { server, client, prompt, cold };
        assert_eq!(case.ask_from_storage(), HIT, "before anything breaks, all comes from storage");
        case.client.flush();
        case
    }

    /// Asks again with empty pools; the answer must be the cold one. Tokens that came from storage.
    fn ask_from_storage(&self) -> u64 {
        self.client.flush();
        let (answer, usage) = self.client.generate(&self.prompt, 6);
        assert_eq!(answer, self.cold, "{usage:?}");
        assert_eq!(usage.device + usage.host, 0, "the pools were emptied: {usage:?}");
        usage.storage
    }

    /// Once all is well again, a prompt is stored and comes back.
    fn serves_on(&self, seed: u64) {
        let before = self.client.metrics().storage_pages("set", "ok") as u64;
        let fresh = prompt::ids(seed, TOKENS);
        let (cold, _) = self.client.generate(&fresh, 6);
        wait_stored(&self.client, before + PAGES);
        self.client.flush();
        let (warm, usage) = self.client.generate(&fresh, 6);
        assert_eq!((usage.storage, &warm), (HIT, &cold));
    }
}

/// How many more pages than `before` had one of `results` in calls of `ops`.
fn more(before: &Metrics, after: &Metrics, ops: &[&str], results: &[&str]) -> f64 {
    let sum = |metrics: &Metrics| -> f64 {
        ops.iter().flat_map(|op| results.iter().map(move |result| metrics.storage_pages(op, result))).sum()
    };
    sum(after) - sum(before)
}

fn page_files(storage: &Path) -> Vec<PathBuf> {
    let found: Vec<PathBuf> =
        files(storage).into_iter().filter(|path| path.metadata().is_ok_and(|file| file.len() > 256 << 10)).collect();
    assert!(found.len() >= PAGES as usize, "a file a page: {found:?}");
    found
}

#[test]
fn deleted_pages_are_computed_again() {
    let storage = tempfile::tempdir().unwrap();
    let case = Case::new(&Launch::new().storage(storage.path()), 21);
    let before = case.client.metrics();
    for file in page_files(storage.path()) {
        std::fs::remove_file(file).unwrap();
    }
    assert_eq!(case.ask_from_storage(), 0);
    let after = case.client.metrics();
    assert!(more(&before, &after, &["exists", "get"], &["missing"]) > 0.0, "{after:?}");
    // They are stored again, without being asked to.
    case.serves_on(31);
    assert_eq!(case.ask_from_storage(), HIT);
    assert!(case.server.log().contains("not stored"), "the log says why a prefix was no hit");
}

#[test]
fn pages_cut_short_are_computed_again() {
    let storage = tempfile::tempdir().unwrap();
    let case = Case::new(&Launch::new().storage(storage.path()), 22);
    let before = case.client.metrics();
    for file in page_files(storage.path()) {
        let file = OpenOptions::new().write(true).open(file).unwrap();
        file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    }
    assert_eq!(case.ask_from_storage(), 0);
    let after = case.client.metrics();
    assert!(more(&before, &after, &["exists", "get"], &["missing", "corrupt", "failed"]) > 0.0, "{after:?}");
    case.serves_on(32);
    assert_eq!(case.ask_from_storage(), HIT, "the short pages were replaced by whole ones");
}

#[test]
fn a_flipped_byte_is_found_and_the_page_computed_again() {
    let storage = tempfile::tempdir().unwrap();
    let case = Case::new(&Launch::new().storage(storage.path()), 23);
    let before = case.client.metrics();
    for file in page_files(storage.path()) {
        flip_byte(&file);
    }
    assert_eq!(case.ask_from_storage(), 0);
    let after = case.client.metrics();
    assert!(more(&before, &after, &["get", "exists"], &["corrupt"]) > 0.0, "{after:?}");
    assert!(case.server.log().contains("corrupt"), "the log says why a prefix was no hit");
    case.serves_on(33);
    assert_eq!(case.ask_from_storage(), HIT, "the corrupt pages were replaced by whole ones");
}

/// One bit of one byte in the middle of the file's payload.
fn flip_byte(file: &Path) {
    let file = File::options().read(true).write(true).open(file).unwrap();
    let place = file.metadata().unwrap().len() / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, place).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], place).unwrap();
}

#[test]
fn one_bad_page_costs_only_what_follows_it() {
    let storage = tempfile::tempdir().unwrap();
    let case = Case::new(&Launch::new().storage(storage.path()), 24);
    let files = page_files(storage.path());
    flip_byte(&files[files.len() / 2]);
    let stored = case.ask_from_storage();
    assert!(stored < HIT && stored.is_multiple_of(16), "pages before the bad one may be used: {stored}");
}

#[test]
fn a_removed_directory_stops_nothing() {
    let outer = tempfile::tempdir().unwrap();
    let storage = outer.path().join("pages");
    let case = Case::new(&Launch::new().storage(&storage), 25);
    // The plugin may be writing there at this moment, which makes a removal fail half way.
    while storage.exists() {
        let _ = std::fs::remove_dir_all(&storage);
    }
    assert_eq!(case.ask_from_storage(), 0);
    std::fs::create_dir_all(&storage).unwrap();
    wait_healthy(&case.client);
    case.serves_on(35);
}

#[test]
fn a_full_disk_degrades_the_tier_and_heals() {
    let outer = tempfile::tempdir().unwrap();
    let storage = outer.path().join("pages");
    std::fs::create_dir(&storage).unwrap();
    let Some(_mount) = Tmpfs::mount(&storage, "24m") else {
        println!("no mount is allowed here: the full disk is injected through min_free_bytes");
        full_by_min_free_bytes(&storage);
        return;
    };
    println!("the full disk is a tmpfs of 24 MiB");
    let launch = Launch::new().storage(&storage);
    let case = Case::new(&launch, 26);
    let before = case.client.metrics();
    // Somebody else takes all the room that is left.
    let foreign = storage.join("foreign");
    let mut file = File::create(&foreign).unwrap();
    while file.write_all(&[1; 64 << 10]).is_ok() {}
    for seed in 40..42 {
        case.client.generate(&prompt::ids(seed, TOKENS), 2);
    }
    let reason = wait_degraded(&case.client);
    assert!(reason.contains("full"), "the reason names the full disk: {reason:?}");
    let after = case.client.metrics();
    assert!(more(&before, &after, &["set"], &["failed", "refused"]) > 0.0, "{after:?}");
    assert!(case.server.log().contains("degraded"), "one log line says so");
    assert_eq!(case.ask_from_storage(), HIT, "what is there can still be read");
    drop(file);
    std::fs::remove_file(&foreign).unwrap();
    wait_healthy(&case.client);
    case.serves_on(36);
}

fn full_by_min_free_bytes(storage: &Path) {
    let launch = Launch::new().storage(storage).set("storage.file.min_free_bytes", "\"1000TiB\"");
    let server = launch.start();
    let client = server.client();
    let prompt = prompt::ids(26, TOKENS);
    let (cold, _) = client.generate(&prompt, 6);
    let reason = wait_degraded(&client);
    assert!(reason.contains("free"), "the reason names the bound: {reason:?}");
    client.flush();
    let (again, usage) = client.generate(&prompt, 6);
    assert_eq!((usage.cached(), &again), (0, &cold));
    assert!(server.log().contains("degraded"), "one log line says so");
}

#[test]
fn a_directory_that_becomes_read_only_degrades_the_tier_and_heals() {
    let storage = tempfile::tempdir().unwrap();
    // Permissions are the injected error: a file system can't be made read-only while somebody writes to it.
    let mut launch = Launch::new().storage(storage.path());
    if rustix::process::geteuid().is_root() {
        // Without its capabilities even root has to obey them.
        launch = launch.through(&["setpriv", "--inh-caps=-all", "--bounding-set=-all"]);
    }
    let case = Case::new(&launch, 27);
    permissions(storage.path(), 0o555);
    for seed in 50..52 {
        case.client.generate(&prompt::ids(seed, TOKENS), 2);
    }
    let reason = wait_degraded(&case.client);
    assert!(reason.to_lowercase().contains("permi"), "the reason names it: {reason:?}");
    assert!(case.server.log().contains("degraded"), "one log line says so");
    assert_eq!(case.ask_from_storage(), HIT, "what is there can still be read");
    permissions(storage.path(), 0o755);
    wait_healthy(&case.client);
    case.serves_on(37);
}

#[test]
fn a_read_only_file_system_is_read_from_and_heals() {
    let outer = tempfile::tempdir().unwrap();
    let storage = outer.path().join("pages");
    std::fs::create_dir(&storage).unwrap();
    let Some(mount) = Tmpfs::mount(&storage, "256m") else {
        println!("no mount is allowed here: only permissions, in the test above, make the directory read-only");
        return;
    };
    let launch = Launch::new().storage(&storage);
    let Case { server, prompt, cold, .. } = Case::new(&launch, 28);
    server.stop();
    mount.remount("ro");
    let server = launch.start();
    let case = Case { client: server.client(), server, prompt, cold };
    assert_eq!(case.ask_from_storage(), HIT, "what is there can be read");
    case.client.generate(&prompt::ids(53, TOKENS), 2);
    let reason = wait_degraded(&case.client);
    assert!(reason.contains("read-only"), "the reason names it: {reason:?}");
    assert!(case.server.log().contains("degraded"), "one log line says so");
    mount.remount("rw");
    wait_healthy(&case.client);
    case.serves_on(38);
}

fn permissions(folder: &Path, mode: u32) {
    std::fs::set_permissions(folder, Permissions::from_mode(mode)).unwrap();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() {
            permissions(&entry.path(), mode);
        }
    }
}

/// State and reason of the only backend.
fn state(client: &Client) -> (String, String) {
    let status = client.get("/hicache/storage-backend").json;
    let backend = &status["backends"][0];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (text(&backend["state"]), text(&backend["reason"]))
}

fn wait_state(client: &Client, what: &str, wanted: impl Fn(&str) -> bool) -> String {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let (state, reason) = state(client);
        if wanted(&state) {
            return reason;
        }
        assert!(Instant::now() < deadline, "the backend is {state} ({reason}), not {what}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn wait_degraded(client: &Client) -> String {
    wait_state(client, "degraded", |state| state == "degraded")
}

fn wait_healthy(client: &Client) {
    wait_state(client, "healthy", |state| matches!(state, "active" | "attached"));
}

/// A tmpfs that is unmounted at the end.
struct Tmpfs {
    folder: PathBuf,
}

impl Tmpfs {
    /// None where this user may not mount.
    fn mount(folder: &Path, size: &str) -> Option<Self> {
        let options = format!("size={size},mode=755");
        let status = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(folder)
            .stderr(std::process::Stdio::null())
            .status()
            .ok()?;
        status.success().then(|| Self { folder: folder.to_path_buf() })
    }

    fn remount(&self, option: &str) {
        let options = format!("remount,{option}");
        let status = Command::new("mount").args(["-o", &options]).arg(&self.folder).status().unwrap();
        assert!(status.success(), "mount -o {options} failed");
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.folder).status();
    }
}
