//! What somebody else may have put into the folder of the segments: it is told of or left alone, and never waited for.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use kvdock_plugin_api::ErrorKind;
use kvdock_plugin_api::mock::identity;
use kvdock_plugin_umbp::segment::record::{HEADER, Header, Version};
use rustix::fs::{CWD, Mode, mkfifoat};
use serde_json::json;

use super::super::common::*;

const LOCK: &str = ".kvdock-umbp-lock";
const PROBE: &str = ".umbp_odirect_probe";

fn pipe(path: &Path) {
    mkfifoat(CWD, path, Mode::from_raw_mode(0o600)).unwrap();
}

/// Opens a store in a folder, in a thread of its own: one that waited for ever would wait there.
fn opens(dir: &Path, role: &str) -> Result<(), String> {
    let (config, (tell, told)) = (settings(dir, json!({"role": role})), mpsc::channel());
    std::thread::spawn(move || {
        let pool = pool(4, 8192);
        let result = try_attach(&config, &identity("model"), &[&pool]).1;
        let result = result.map(|store| store.close().unwrap()).map_err(|error| {
            assert_eq!(error.kind, ErrorKind::InvalidConfig);
            error.message
        });
        let _ = tell.send(result);
    });
    told.recv_timeout(Duration::from_secs(120)).expect("it does not wait for what lies in the folder")
}

/// What is no plain file, by what an error calls it.
fn strange(path: &Path, what: &str, elsewhere: &Path) {
    match what {
        "a named pipe" => pipe(path),
        "a directory" => std::fs::create_dir(path).unwrap(),
        "a symbolic link" => std::os::unix::fs::symlink(elsewhere, path).unwrap(),
        "a socket" => drop(std::os::unix::net::UnixListener::bind(path).unwrap()),
        other => panic!("{other}"),
    }
}

const KINDS: [&str; 4] = ["a named pipe", "a directory", "a symbolic link", "a socket"];

#[test]
fn a_lock_or_a_segment_that_is_no_plain_file_is_an_error_that_names_it() {
    for name in [LOCK, "segment_3.log"] {
        for what in KINDS {
            let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
            std::fs::write(other.path(), b"of somebody else").unwrap();
            let path = dir.path().join(name);
            strange(&path, what, other.path());
            for role in ["standalone", "leader", "follower"] {
                if (name, role) == (LOCK, "follower") {
                    // It does not write, and needs no lock.
                    assert_eq!(opens(dir.path(), role), Ok(()));
                    continue;
                }
                let error = opens(dir.path(), role).unwrap_err();
                assert!(error.contains("ssd_storage_dir") && error.contains(what) && error.contains(name), "{error}");
            }
            assert_eq!(std::fs::read(other.path()).unwrap(), b"of somebody else");
            // With it out of the way everything is as ever.
            std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir(&path)).unwrap();
            assert_eq!(opens(dir.path(), "standalone"), Ok(()));
        }
    }
}

#[test]
fn a_link_to_nowhere_is_made_no_file() {
    for name in [LOCK, "segment_0.log"] {
        let dir = tempfile::tempdir().unwrap();
        let nowhere = dir.path().join("nowhere");
        std::os::unix::fs::symlink(&nowhere, dir.path().join(name)).unwrap();
        assert!(opens(dir.path(), "standalone").unwrap_err().contains("a symbolic link"));
        assert!(!nowhere.exists());
    }
}

#[test]
fn where_direct_io_is_tried_nothing_of_others_is_written() {
    for what in KINDS {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
        std::fs::write(other.path(), b"of somebody else").unwrap();
        strange(&dir.path().join(PROBE), what, other.path());
        assert_eq!(opens(dir.path(), "standalone"), Ok(()));
        assert_eq!(std::fs::read(other.path()).unwrap(), b"of somebody else");
    }
}

#[test]
fn a_folder_that_is_none_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pipe");
    pipe(&path);
    for role in ["standalone", "follower"] {
        for place in [path.clone(), path.join("below")] {
            let error = opens(&place, role).unwrap_err();
            assert!(error.contains("ssd_storage_dir") && error.contains("pipe"), "{error}");
        }
    }
}

/// A file of so many bytes, none of which takes room.
fn sparse(path: PathBuf, len: u64) -> bool {
    let file = std::fs::File::create(path).unwrap();
    file.set_len(len).is_ok()
}

#[test]
fn files_of_any_length_without_anything_in_them_cost_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    // Nobody reads what is in a lock.
    if sparse(path(LOCK), 1 << 43) {
        assert_eq!(opens(dir.path(), "standalone"), Ok(()));
    }
    if sparse(path("segment_0.log"), 60 << 30) {
        assert_eq!(opens(dir.path(), "follower"), Ok(()));
        assert_eq!(opens(dir.path(), "standalone"), Ok(()));
        assert!(segments(dir.path()).is_empty(), "it held nothing");
    }
    if sparse(path("segment_0.log"), 1 << 43) {
        for role in ["standalone", "follower"] {
            let error = opens(dir.path(), role).unwrap_err();
            assert!(error.contains("segment_0.log has 8796093022208 bytes"), "{error}");
        }
        assert!(path("segment_0.log").exists());
    }
}

#[test]
fn numbers_that_no_segment_has_are_other_files() {
    let dir = tempfile::tempdir().unwrap();
    for name in
        ["segment_18446744073709551615.log", "segment_01.log", "segment_-1.log", "segment_.log", "segment_1.LOG"]
    {
        pipe(&dir.path().join(name));
    }
    let bench = Bench::new(&settings(dir.path(), json!({})), pool(4, 8192));
    bench.store(&[1, 2]);
    bench.store.close().unwrap();
    assert_eq!(Bench::new(&settings(dir.path(), json!({})), pool(4, 8192)).count(&[1, 2]), 2);
    assert!(dir.path().join("segment_0.log").exists());
}

#[test]
fn a_segment_full_of_headers_that_claim_all_of_it_is_cut_and_told_of_in_few_lines() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("segment_0.log");
    let (block, blocks) = (4096u64, 8192u64);
    let mut bytes = vec![0; (block * blocks) as usize];
    for number in 1..blocks {
        let at = (number * block) as usize;
        let header = Header {
            version: Version::Three,
            committed: true,
            checked: true,
            key_len: 64,
            value_len: (bytes.len() - at) as u32 - 4096,
            crc: 7,
            generation: number,
        };
        bytes[at..at + HEADER].copy_from_slice(&header.encode());
    }
    std::fs::write(&path, bytes).unwrap();
    let bench = Bench::new(&settings(dir.path(), json!({})), pool(4, 8192));
    assert!(!path.exists(), "nothing in it was a record");
    assert!(bench.logs().contains("the file is cut there"), "{}", bench.logs());
    bench.store(&[1, 2]);
    bench.store.close().unwrap();

    // A record, rubbish, a record, rubbish, ...: all of them are found, and few lines tell of it.
    let one = std::fs::read(segments(dir.path()).remove(0)).unwrap();
    let mut file = Vec::new();
    for _ in 0..500 {
        file.extend([&[0x11; 4096], one.as_slice()].concat());
    }
    std::fs::write(dir.path().join("segment_7.log"), file).unwrap();
    let bench = Bench::new(&settings(dir.path(), json!({})), pool(4, 8192));
    assert_eq!(bench.count(&[1, 2]), 2);
    let lines = bench.logs().lines().filter(|line| line.contains("damaged")).count();
    assert!((1..=10).contains(&lines), "{lines} lines\n{}", bench.logs());
}
