//! Plugins that are broken on purpose, made from the one of `tests/broken` by changing bytes of a copy.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use memchr::memmem;
use object::{Object, ObjectSection};
use serde_json::Value;

use crate::paths;

const MARKER: &[u8] = b"kvdock-planted-fault=";
/// Bytes of the marker and the name after it.
const MARKER_LEN: usize = 64;
const KNOWN: &[u8] = b"kvdock-known-faults=";

/// Writes `lib{plugin_name}.so` into `folder`: the plugin of `tests/broken` under another name and with a fault planted. The folder must be
/// one that other users may not write, as `tempfile` makes them; `none` is the fault of a plugin that is right.
///
/// # Panics
/// When the plugin is not built, or knows no such fault.
pub fn plugin(folder: &Path, plugin_name: &str, fault: &str) -> PathBuf {
    Broken::new().fault(fault).name(plugin_name).write(folder)
}

/// A copy of the plugin of `tests/broken` in memory.
pub struct Broken {
    bytes: Vec<u8>,
    name: String,
}

impl Default for Broken {
    fn default() -> Self {
        Self::new()
    }
}

impl Broken {
    /// The plugin as it is built: right.
    ///
    /// # Panics
    /// When it is not built.
    pub fn new() -> Self {
        static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
        let bytes = BYTES.get_or_init(|| {
            let built = paths::broken_plugin();
            stripped(&built).unwrap_or_else(|| {
                let mut bytes = std::fs::read(&built).unwrap();
                wipe_debug_sections(&mut bytes);
                bytes
            })
        });
        Self { bytes: bytes.clone(), name: "broken".to_owned() }
    }

    /// Every fault that can be planted.
    pub fn known_faults(&self) -> Vec<String> {
        let start = self.find(KNOWN) + KNOWN.len();
        let list: Vec<u8> = self.bytes[start..]
            .iter()
            .copied()
            .take_while(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'|'))
            .collect();
        let list = String::from_utf8(list).unwrap();
        list.split_terminator('|').map(str::to_owned).collect()
    }

    /// Plants a fault.
    ///
    /// # Panics
    /// When the plugin knows no such fault.
    pub fn fault(mut self, fault: &str) -> Self {
        let known = self.known_faults();
        assert!(known.iter().any(|name| name == fault), "{fault:?} is none of the faults {known:?}");
        let start = self.find(MARKER);
        let mut marker = [MARKER, fault.as_bytes()].concat();
        assert!(marker.len() <= MARKER_LEN, "{fault:?} is too long for the marker");
        marker.resize(MARKER_LEN, b'.');
        self.bytes[start..start + MARKER_LEN].copy_from_slice(&marker);
        self
    }

    /// Changes the name by which a configuration picks the plugin.
    pub fn name(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        let name = name.to_owned();
        self.note(|note| note["name"] = name.into())
    }

    /// Changes the note. The new one may be as long as the old one; the description gives way.
    ///
    /// # Panics
    /// When it is longer all the same.
    pub fn note(mut self, change: impl FnOnce(&mut Value)) -> Self {
        let (start, len) = {
            let file = object::File::parse(&*self.bytes).unwrap();
            let section = file.section_by_name(".note.kvdock").expect("the plugin has a note");
            let (start, _) = section.file_range().unwrap();
            let data = section.data().unwrap();
            let len = u32::from_le_bytes(data[4..8].try_into().unwrap());
            // Three words and the owner, padded to 8 bytes.
            (start as usize + 20, len as usize)
        };
        let mut note: Value = serde_json::from_slice(&self.bytes[start..start + len]).unwrap();
        change(&mut note);
        let mut text = note.to_string();
        if text.len() > len
            && let Some(description) = note["description"].as_str()
        {
            let keep = description.len().saturating_sub(text.len() - len);
            note["description"] = description[..keep].to_owned().into();
            text = note.to_string();
        }
        assert!(text.len() <= len, "the note has {} bytes, there is room for {len}", text.len());
        // Spaces after the object are JSON, too.
        let padded = format!("{text:len$}");
        self.bytes[start..start + len].copy_from_slice(padded.as_bytes());
        self
    }

    /// Replaces bytes by as many others, wherever they stand.
    ///
    /// # Panics
    /// When they stand nowhere.
    pub fn replace(mut self, from: &[u8], to: &[u8]) -> Self {
        assert_eq!(from.len(), to.len());
        let places: Vec<usize> = memmem::find_iter(&self.bytes, from).collect();
        assert!(!places.is_empty(), "{:?} is not in the plugin", String::from_utf8_lossy(from));
        for at in places {
            self.bytes[at..at + to.len()].copy_from_slice(to);
        }
        self
    }

    /// Changes the bytes of the file.
    pub fn bytes(mut self, change: impl FnOnce(&mut Vec<u8>)) -> Self {
        change(&mut self.bytes);
        self
    }

    /// Writes the file as `lib` and the plugin's name.
    pub fn write(&self, folder: &Path) -> PathBuf {
        self.write_as(folder, &self.name)
    }

    /// Writes the file as `lib` and a name that need not be the plugin's.
    pub fn write_as(&self, folder: &Path, name: &str) -> PathBuf {
        let path = folder.join(format!("lib{name}.so"));
        // Never over a file that may be mapped.
        let _ = std::fs::remove_file(&path);
        write_sparse(&path, &self.bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        path
    }

    fn find(&self, text: &[u8]) -> usize {
        let mut places = memmem::find_iter(&self.bytes, text);
        let at = places.next().expect("the plugin has its markers");
        assert!(places.next().is_none(), "the marker {:?} stands twice", String::from_utf8_lossy(text));
        at
    }
}

/// Writes a file whose zeros take no room on the disk.
fn write_sparse(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    const BLOCK: usize = 4096;
    let file = std::fs::File::create_new(path)?;
    file.set_len(bytes.len() as u64)?;
    for (block, at) in bytes.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
        if block.iter().any(|byte| *byte != 0) {
            file.write_all_at(block, at)?;
        }
    }
    Ok(())
}

/// The file without what only debuggers read, which is nearly all of it: a host reads each plugin whole. None where there is no `strip`.
fn stripped(file: &Path) -> Option<Vec<u8>> {
    let folder = tempfile::tempdir().ok()?;
    let out = folder.path().join("stripped.so");
    let done = Command::new("strip").arg("--strip-debug").arg("-o").arg(&out).arg(file).output().ok()?;
    std::fs::read(out).ok().filter(|_| done.status.success())
}

/// Wipes what only debuggers read: a test that plants ten faults would take half a gigabyte of disk.
fn wipe_debug_sections(bytes: &mut [u8]) {
    let ranges: Vec<(u64, u64)> = {
        let file = object::File::parse(&*bytes).unwrap();
        let debug = file.sections().filter(|section| section.name().is_ok_and(|name| name.starts_with(".debug_")));
        debug.filter_map(|section| section.file_range()).collect()
    };
    for (start, len) in ranges {
        bytes[start as usize..(start + len) as usize].fill(0);
    }
}
