//! Reads what a plugin says of itself, without running any of its code.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use kvdock_plugin_api::note::{NOTE_OWNER, NOTE_SECTION, NOTE_TYPE};
use kvdock_plugin_api::{Capabilities, v0_1::ENTRY_SYMBOL};
use object::read::elf::{ElfFile64, FileHeader};
use object::{Endianness, Object, ObjectSection, ObjectSymbol, ReadCache, elf};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::abi::AbiVersions;
use super::difference::difference;
use super::refusal::{Reason, Refusal};

/// What a plugin's note says, with where it was read.
#[derive(Debug, Clone, PartialEq)]
pub struct PluginInfo {
    /// The file.
    pub path: PathBuf,
    /// SHA-256 of the file.
    pub sha256: [u8; 32],
    /// The ABI version by which this host loads it: the newest that both know.
    pub abi: &'static str,
    /// The note.
    pub note: Note,
}

impl PluginInfo {
    /// The digest as hex digits.
    pub fn sha256_hex(&self) -> String {
        hex(&self.sha256)
    }
}

/// The JSON object of a note.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct Note {
    /// Version of the note itself.
    pub note: u32,
    /// Name by which a configuration picks the plugin.
    pub name: String,
    /// Version of the plugin.
    pub version: String,
    /// SPDX expression.
    pub license: String,
    /// One line for a person.
    #[serde(default)]
    pub description: String,
    /// ABI versions it speaks.
    pub abi: Vec<String>,
    /// `unwind` or `abort`.
    pub panic: String,
    /// What it can do.
    pub capabilities: NoteCapabilities,
    /// JSON Schema of its configuration.
    pub config_schema: serde_json::Value,
    /// Configuration for the conformance suite.
    #[serde(default)]
    pub check_config: serde_json::Value,
    /// ABI version to digest of the description of its types.
    pub types_sha256: BTreeMap<String, String>,
    /// ABI version to description of its types.
    pub types: BTreeMap<String, String>,
}

/// Capabilities as a note spells them; what is missing is false, or the default of [`Capabilities::NONE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
#[allow(missing_docs)] // The fields are those of `kvdock_plugin_api::Capabilities`.
pub struct NoteCapabilities {
    pub linker: bool,
    pub ranges: bool,
    pub remove: bool,
    pub clear_namespace: bool,
    pub clear_everything: bool,
    pub durable: bool,
    pub shared: bool,
    pub checksums: bool,
    pub logical_pools: bool,
    pub cuda_memory: bool,
    pub held_pages: bool,
    pub alignment: u32,
    pub preferred_batch: u32,
    pub concurrency: u32,
}

impl Default for NoteCapabilities {
    fn default() -> Self {
        let none = Capabilities::NONE;
        NoteCapabilities {
            linker: none.linker,
            ranges: none.ranges,
            remove: none.remove,
            clear_namespace: none.clear_namespace,
            clear_everything: none.clear_everything,
            durable: none.durable,
            shared: none.shared,
            checksums: none.checksums,
            logical_pools: none.logical_pools,
            cuda_memory: none.cuda_memory,
            held_pages: none.held_pages,
            alignment: none.alignment,
            preferred_batch: none.preferred_batch,
            concurrency: none.concurrency,
        }
    }
}

impl From<&NoteCapabilities> for Capabilities {
    fn from(note: &NoteCapabilities) -> Self {
        Capabilities {
            linker: note.linker,
            ranges: note.ranges,
            remove: note.remove,
            clear_namespace: note.clear_namespace,
            clear_everything: note.clear_everything,
            durable: note.durable,
            shared: note.shared,
            checksums: note.checksums,
            logical_pools: note.logical_pools,
            cuda_memory: note.cuda_memory,
            held_pages: note.held_pages,
            alignment: note.alignment,
            preferred_batch: note.preferred_batch,
            concurrency: note.concurrency,
        }
    }
}

/// Largest file that is taken for a library.
const LARGEST: u64 = 1 << 30;

/// The bytes of a file, or only the first few when they are not those of an ELF file.
pub(super) fn read(path: &Path) -> Result<Vec<u8>, Reason> {
    let unreadable = |e: std::io::Error| Reason::Unreadable(e.to_string());
    let mut file = std::fs::File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    file.by_ref().take(256).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.starts_with(b"\x7fELF") {
        let size = file.metadata().map_err(unreadable)?.len();
        if size > LARGEST {
            return Err(Reason::NotElf(format!("one of {size} bytes, larger than any plugin ({LARGEST} bytes)")));
        }
        file.read_to_end(&mut bytes).map_err(unreadable)?;
    }
    Ok(bytes)
}

/// The name in a file's note, of which no more is read than that takes. None where it can't be told so; [`inspect`] says why.
pub(super) fn name_in(path: &Path) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        name: String,
    }
    std::fs::metadata(path).ok().filter(|meta| meta.is_file() && meta.len() <= LARGEST)?;
    let parts = ReadCache::new(std::fs::File::open(path).ok()?);
    let file = ElfFile64::<Endianness, _>::parse(&parts).ok()?;
    let note = note_descriptor(file.section_by_name(NOTE_SECTION)?.data().ok()?).ok()?;
    serde_json::from_slice(note).ok().map(|Named { name }| name)
}

/// Lower-case hex digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads and checks the note of a file: the file may be written by nobody else, is a shared library for this machine,
/// speaks an ABI version of this host with the same types, unwinds, and has the entry symbol.
///
/// # Errors
/// A [`Refusal`] that says what was expected and what was found.
pub fn inspect(path: &Path) -> Result<PluginInfo, Refusal> {
    inspect_with(AbiVersions::BUILT_IN, path)
}

/// As [`inspect`], for a host that speaks these ABI versions.
///
/// # Errors
/// As [`inspect`].
pub fn inspect_with(host: AbiVersions, path: &Path) -> Result<PluginInfo, Refusal> {
    check_permissions(path)?;
    let bytes = read(path).map_err(|reason| reason.of(path))?;
    inspect_bytes(host, path, &bytes)
}

/// As [`inspect_with`], for bytes that were read already.
pub(super) fn inspect_bytes(host: AbiVersions, path: &Path, bytes: &[u8]) -> Result<PluginInfo, Refusal> {
    let refuse = |reason: Reason| reason.of(path);
    if bytes.get(..4) != Some(b"\x7fELF".as_slice()) {
        let found = match bytes.len() {
            0 => "an empty file".to_owned(),
            _ if std::str::from_utf8(&bytes[..bytes.len().min(256)]).is_ok() => "a text file".to_owned(),
            len => format!("{len} bytes of something else"),
        };
        return Err(refuse(Reason::NotElf(found)));
    }
    check_machine(bytes).map_err(refuse)?;
    let file = ElfFile64::<Endianness>::parse(bytes)
        .map_err(|e| refuse(Reason::NotElf(format!("a damaged ELF file ({e})"))))?;
    if file.elf_header().e_type(file.endian()) != elf::ET_DYN {
        return Err(refuse(Reason::NotElf("an ELF file that is no shared library".into())));
    }
    let section = file.section_by_name(NOTE_SECTION).ok_or_else(|| refuse(Reason::NoNote { section: NOTE_SECTION }))?;
    let data = section.data().map_err(|e| refuse(Reason::BadNote(e.to_string())))?;
    let json = note_descriptor(data).map_err(|e| refuse(Reason::BadNote(e)))?;
    let note: Note = serde_json::from_slice(json).map_err(|e| refuse(Reason::BadNote(e.to_string())))?;
    let abi = check_note(host, &note).map_err(refuse)?;
    if !file.dynamic_symbols().any(|s| s.is_definition() && s.name() == Ok(ENTRY_SYMBOL)) {
        return Err(refuse(Reason::NoEntry(ENTRY_SYMBOL)));
    }
    Ok(PluginInfo { path: path.to_owned(), sha256: Sha256::digest(bytes).into(), abi, note })
}

fn check_machine(bytes: &[u8]) -> Result<(), Reason> {
    let expected = format!("64-bit little-endian {}", std::env::consts::ARCH);
    let ours = match std::env::consts::ARCH {
        "x86_64" => elf::EM_X86_64,
        "aarch64" => elf::EM_AARCH64,
        "riscv64" => elf::EM_RISCV,
        _ => elf::EM_NONE,
    };
    let (Some(class), Some(data), Some(machine)) = (bytes.get(4), bytes.get(5), bytes.get(18..20)) else {
        return Err(Reason::NotElf("an ELF file that ends within its header".into()));
    };
    let machine = u16::from_le_bytes([machine[0], machine[1]]);
    if *class == elf::ELFCLASS64.0 && *data == elf::ELFDATA2LSB.0 && machine == ours.0 {
        return Ok(());
    }
    let bits = if *class == elf::ELFCLASS64.0 { 64 } else { 32 };
    let order = if *data == elf::ELFDATA2LSB.0 { "little" } else { "big" };
    let name = match elf::Machine(machine) {
        elf::EM_X86_64 => "x86_64".to_owned(),
        elf::EM_386 => "x86".to_owned(),
        elf::EM_AARCH64 => "aarch64".to_owned(),
        elf::EM_ARM => "arm".to_owned(),
        elf::EM_RISCV => "riscv".to_owned(),
        other => format!("machine number {}", other.0),
    };
    Err(Reason::OtherMachine { expected, found: format!("{bits}-bit {order}-endian {name}") })
}

/// The descriptor of the first note of ours in a note section.
fn note_descriptor(mut data: &[u8]) -> Result<&[u8], String> {
    let word = |data: &[u8], at: usize| -> Option<usize> {
        Some(u32::from_le_bytes(data.get(at..at + 4)?.try_into().ok()?) as usize)
    };
    while !data.is_empty() {
        let short = || format!("the section ends within a note ({} bytes left)", data.len());
        let (owner_len, len, kind) =
            (word(data, 0).ok_or_else(short)?, word(data, 4).ok_or_else(short)?, word(data, 8).ok_or_else(short)?);
        let start = 12 + owner_len.next_multiple_of(4);
        let owner = data.get(12..12 + owner_len).ok_or_else(short)?;
        let descriptor = data.get(start..start.saturating_add(len)).ok_or_else(short)?;
        if owner.strip_suffix(b"\0") == Some(NOTE_OWNER.as_bytes()) && kind == NOTE_TYPE as usize {
            return Ok(descriptor);
        }
        data = data.get(start + len.next_multiple_of(4)..).unwrap_or_default();
    }
    Err(format!("the section holds no note of {NOTE_OWNER} with type {NOTE_TYPE:#x}"))
}

/// Checks a note and picks the version of the boundary.
fn check_note(host: AbiVersions, note: &Note) -> Result<&'static str, Reason> {
    if note.note != 1 {
        return Err(Reason::BadNote(format!("expected note version 1, found {}", note.note)));
    }
    let name_ok = !note.name.is_empty()
        && note.name.len() <= 64
        && note.name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_".contains(&b));
    if !name_ok {
        return Err(Reason::BadNote(format!(
            "expected a name of 1 to 64 lower-case letters, digits, \"-\" and \"_\", found {:?}",
            note.name
        )));
    }
    let Some(version) = host.newest_of(&note.abi) else {
        let found = if note.abi.is_empty() { "none".to_owned() } else { note.abi.join(", ") };
        return Err(Reason::OtherAbi { expected: host.to_string(), found });
    };
    let types = note.types.get(version.text).map(String::as_str).unwrap_or_default();
    let digest = note.types_sha256.get(version.text).map(String::as_str).unwrap_or_default();
    if digest != hex(&version.types_sha256) || types != version.types {
        let difference = difference(version.types, types)
            .unwrap_or_else(|| "their descriptions agree, their digests do not".to_owned());
        return Err(Reason::OtherLayout { version: version.text.into(), host: host.to_string(), difference });
    }
    if note.panic != "unwind" {
        return Err(Reason::PanicAbort(note.panic.clone()));
    }
    if !note.config_schema.is_object() {
        return Err(Reason::BadNote("config_schema is no JSON object".into()));
    }
    Ok(version.text)
}

/// Refuses a file or folder that other users may change.
pub(super) fn check_permissions(path: &Path) -> Result<(), Refusal> {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    for checked in [folder, path] {
        let meta = std::fs::metadata(checked)
            .map_err(|e| Reason::Unreadable(format!("{}: {e}", checked.display())).of(path))?;
        let mut problem = None;
        if meta.mode() & 0o022 != 0 {
            problem = Some(format!("mode {:o} lets others write", meta.mode() & 0o7777));
        } else if meta.uid() != 0 && meta.uid() != rustix::process::geteuid().as_raw() {
            problem = Some(format!("belongs to user {}", meta.uid()));
        }
        if let Some(problem) = problem {
            return Err(Reason::Unsafe { path: checked.display().to_string(), problem }.of(path));
        }
        if checked == path && !meta.is_file() {
            return Err(Reason::NotElf("no regular file".into()).of(path));
        }
    }
    Ok(())
}
