//! A safetensors file whose header is written anew, its data left as it is.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

pub struct Header {
    path: PathBuf,
    pub entries: Map<String, Value>,
    data: Vec<u8>,
}

impl Header {
    /// Reads `model.safetensors` in `dir`.
    pub fn read(dir: &Path) -> Self {
        let path = dir.join("model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let entries = serde_json::from_slice(&bytes[8..end]).unwrap();
        Self { path, entries, data: bytes[end..].to_vec() }
    }

    /// Writes the file with `entries` in place of its own.
    pub fn write(&self, entries: &Map<String, Value>) {
        let header = serde_json::to_vec(entries).unwrap();
        let length = (header.len() as u64).to_le_bytes();
        std::fs::write(&self.path, [length.as_slice(), &header, &self.data].concat()).unwrap();
    }

    /// Tensors that differ in more than the numbers in their names: the last of each kind.
    pub fn kinds(&self) -> Vec<String> {
        let mut kinds = std::collections::BTreeMap::new();
        for name in self.entries.keys().filter(|name| *name != "__metadata__") {
            let digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
            let kind: Vec<&str> = name.split('.').map(|part| if digits(part) { "N" } else { part }).collect();
            kinds.insert(kind.join("."), name.clone());
        }
        kinds.into_values().collect()
    }
}
