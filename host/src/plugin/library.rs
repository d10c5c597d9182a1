//! Maps a plugin's library: once for each content, from a private copy.
//!
//! The identity of a library is the SHA-256 of its file. The same bytes asked for again give the mapping that
//! is there. New bytes are copied to a path of their own, because the dynamic loader goes by path: after a rename over the same path it
//! would silently give the old code. A library is never unloaded: its threads, thread-local destructors or statics may be
//! in use as long as the process lives.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::c_void;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use kvdock_plugin_api::v0_1::{self, BackendTable, ENTRY_SYMBOL, EntryFn};
use libloading::os::unix::{Library as UnixLibrary, RTLD_LOCAL, RTLD_NOW};
use object::read::elf::{Dyn, ElfFile64, ProgramHeader};
use object::{Endianness, elf};
use sha2::{Digest, Sha256};

use super::abi::{AbiVersion, AbiVersions, Face, TableHeader};
use super::inspect::{PluginInfo, check_permissions, hex, inspect_bytes, read};
use super::refusal::{Reason, Refusal};
use super::trial;

/// A library that is mapped for the life of the process.
#[derive(Debug)]
pub struct Library {
    /// What its note says; the path is the one it was first loaded from.
    pub info: PluginInfo,
    entry: EntryFn,
    face: &'static dyn Face,
}

impl Library {
    /// What the host calls: the plugin's table of the version in `info.abi`, adapted to the newest version of the host.
    pub fn face(&self) -> &'static dyn Face {
        self.face
    }

    /// The plugin's own table of ABI version 0.1, for whoever looks at the plugin itself; none when its note does not name that version.
    pub fn table(&self) -> Option<&'static BackendTable> {
        if !self.info.note.abi.iter().any(|abi| abi == v0_1::ABI_VERSION_TEXT) {
            return None;
        }
        let table = table_of(self.entry, v0_1::ABI_VERSION, size_of::<BackendTable>() as u64).ok()?;
        // SAFETY: the header says that it is a table of this version; the library stays mapped.
        Some(unsafe { &*table.cast::<BackendTable>() })
    }
}

#[cfg(test)]
impl Library {
    /// A library that is part of this program, for tests of what is built on it.
    pub(super) fn built_in(info: PluginInfo, entry: EntryFn, table: &'static BackendTable) -> Arc<Library> {
        Arc::new(Library { info, entry, face: table })
    }
}

/// Mapped libraries by content, and for each host of this process that loaded them. There is more than one host in tests only.
type Libraries = Mutex<HashMap<[u8; 32], BTreeMap<usize, Arc<Library>>>>;

fn libraries() -> &'static Libraries {
    static LIBRARIES: OnceLock<Libraries> = OnceLock::new();
    LIBRARIES.get_or_init(Libraries::default)
}

/// Number of libraries that are mapped.
pub fn loaded_count() -> usize {
    libraries().lock().unwrap_or_else(PoisonError::into_inner).len()
}

/// Maps the file at `path`, or gives the mapping of the same bytes. `pin` is the SHA-256 in hex that the configuration demands.
///
/// # Errors
/// A [`Refusal`]; no code of the file has run then, but for a library that the dynamic loader refuses half way.
pub fn load(path: &Path, pin: Option<&str>) -> Result<Arc<Library>, Refusal> {
    load_with(AbiVersions::BUILT_IN, path, pin)
}

/// As [`load`], for a host that speaks these ABI versions.
///
/// # Errors
/// As [`load`].
pub fn load_with(host: AbiVersions, path: &Path, pin: Option<&str>) -> Result<Arc<Library>, Refusal> {
    check_permissions(path)?;
    let bytes = read(path).map_err(|reason| reason.of(path))?;
    let sha256: [u8; 32] = Sha256::digest(&bytes).into();
    if let Some(expected) = pin
        && !expected.eq_ignore_ascii_case(&hex(&sha256))
    {
        return Err(Reason::OtherDigest { expected: expected.to_owned(), found: hex(&sha256) }.of(path));
    }
    let known = |libraries: &HashMap<[u8; 32], BTreeMap<usize, Arc<Library>>>| {
        let hosts = libraries.get(&sha256);
        let entry = hosts.and_then(|hosts| hosts.values().next()).map(|library| library.entry);
        (hosts.and_then(|hosts| hosts.get(&host.id())).cloned(), entry)
    };
    let (library, entry) = known(&libraries().lock().unwrap_or_else(PoisonError::into_inner));
    if let Some(library) = library {
        return Ok(library);
    }
    let info = inspect_bytes(host, path, &bytes)?;
    // Other attaches do not wait for this one's trial.
    let copy = match entry {
        Some(_) => None,
        None => Some(copy(&info, &bytes)?),
    };
    if let Some(copy) = &copy {
        trial::map_elsewhere(&copy.file).map_err(|reason| reason.of(path))?;
    }
    // Held while loading, so that the same bytes are never mapped twice.
    let mut libraries = libraries().lock().unwrap_or_else(PoisonError::into_inner);
    let (library, entry) = known(&libraries);
    if let Some(library) = library {
        return Ok(library);
    }
    let entry = match (entry, &copy) {
        (Some(entry), _) => entry,
        (None, Some(copy)) => map(&info, &copy.file)?,
        (None, None) => return Err(Reason::Loader("its mapping went away".into()).of(path)),
    };
    let face = face(host, &info, entry).map_err(|reason| reason.of(path))?;
    let library = Arc::new(Library { info, entry, face });
    libraries.entry(sha256).or_default().insert(host.id(), library.clone());
    Ok(library)
}

/// Puts the host's face over the table of the version that was picked.
fn face(host: AbiVersions, info: &PluginInfo, entry: EntryFn) -> Result<&'static dyn Face, Reason> {
    let other = |found: String| Reason::OtherAbi { expected: host.to_string(), found };
    let version: &AbiVersion = host.newest_of(&info.note.abi).ok_or_else(|| other(info.note.abi.join(", ")))?;
    let table = table_of(entry, version.number, version.table_bytes).map_err(other)?;
    // SAFETY: the note promises a table of this version with these types, the table says so itself, and the library stays mapped.
    Ok(unsafe { (version.adapt)(table) })
}

/// Asks for the table of a version and checks what it says of itself.
fn table_of(entry: EntryFn, number: u32, bytes: u64) -> Result<*const c_void, String> {
    let table = entry(number);
    // SAFETY: an entry answers null or the address of constant data, and a table of any version begins with its header.
    let Some(header) = (unsafe { table.cast::<TableHeader>().as_ref() }) else {
        return Err(format!("no table for version {number:#x}, against its own note"));
    };
    if *header != (TableHeader { size: bytes, abi_version: number }) {
        let (size, version) = (header.size, header.abi_version);
        return Err(format!(
            "a table of version {version:#x} with {size} bytes where version {number:#x} with {bytes} bytes was asked for"
        ));
    }
    Ok(table)
}

/// A copy that nobody else may write. The folder goes with it; a mapping stays.
struct PrivateCopy {
    file: PathBuf,
    _folder: tempfile::TempDir,
}

fn copy(info: &PluginInfo, bytes: &[u8]) -> Result<PrivateCopy, Refusal> {
    let path = info.path.clone();
    let refuse = |reason: Reason| reason.of(&path);
    let unwritable = |e: std::io::Error| refuse(Reason::Loader(format!("its private copy can't be made: {e}")));
    // `tempfile` makes folders with mode 0700.
    let private = tempfile::Builder::new().prefix("kvdock-plugin-").tempdir().map_err(unwritable)?;
    // Deep enough for libraries that are named relative to the folder of the plugin (`$ORIGIN/..`).
    let folder = private.path().join("a/b/c/d");
    fs::create_dir_all(&folder).map_err(unwritable)?;
    let copy = folder.join(format!("{}-{}.so", info.note.name, &info.sha256_hex()[..16]));
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o500)
        .open(&copy)
        .and_then(|mut file| file.write_all(bytes))
        .map_err(unwritable)?;
    link_siblings(&path, bytes, &folder, private.path()).map_err(unwritable)?;
    // The copy itself is what gets mapped, so it is the copy that is checked.
    let written = fs::read(&copy).map_err(unwritable)?;
    if <[u8; 32]>::from(Sha256::digest(&written)) != info.sha256 {
        return Err(refuse(Reason::Loader("its private copy changed while it was made".into())));
    }
    Ok(PrivateCopy { file: copy, _folder: private })
}

/// Maps a private copy; what it answers is the entry, which stays valid for the life of the process.
fn map(info: &PluginInfo, copy: &Path) -> Result<EntryFn, Refusal> {
    let path = &info.path;
    let refuse = |reason: Reason| reason.of(path);
    // SAFETY: loading runs the library's constructors. The file was checked to be a plugin by its note, may be written by nobody
    // but this user and root, and was named by the operator.
    let library = unsafe { UnixLibrary::open(Some(copy), RTLD_NOW | RTLD_LOCAL | libc::RTLD_NODELETE) }
        .map_err(|e| refuse(Reason::Loader(loader_message(&e))))?;
    // SAFETY: the note says that the library keeps the boundary, where this symbol has this type.
    let entry = unsafe { library.get::<EntryFn>(ENTRY_SYMBOL) }
        .map(|symbol| *symbol)
        .map_err(|_| refuse(Reason::NoEntry(ENTRY_SYMBOL)))?;
    // Never unloaded; see the page of this module.
    std::mem::forget(library);
    tracing::info!(plugin = %info.note.name, version = %info.note.version, abi = info.abi, sha256 = %info.sha256_hex(), file = %path.display(), "plugin library mapped");
    Ok(entry)
}

fn loader_message(error: &libloading::Error) -> String {
    let source = std::error::Error::source(error).map(|source| format!(": {source}")).unwrap_or_default();
    format!("{error}{source}")
}

/// What a library needs and where it looks for it.
struct Needs {
    libraries: Vec<String>,
    run_path: Vec<String>,
}

fn needs(bytes: &[u8]) -> Option<Needs> {
    let file = ElfFile64::<Endianness>::parse(bytes).ok()?;
    let endian = file.endian();
    let mut entries = Vec::new();
    for header in file.elf_program_headers() {
        if let Ok(Some(dynamic)) = header.dynamic(endian, bytes) {
            entries.extend_from_slice(dynamic);
        }
    }
    let value = |tag: u64| entries.iter().find(|e| e.d_tag(endian).0 as u64 == tag).map(|e| e.d_val(endian));
    let (address, size) = (value(elf::DT_STRTAB.0 as u64)?, value(elf::DT_STRSZ.0 as u64)?);
    let strings = file
        .elf_program_headers()
        .iter()
        .find_map(|header| header.data_range(endian, bytes, address, size).ok().flatten())?;
    let text = |offset: u64| -> Option<String> {
        let rest = strings.get(offset as usize..)?;
        let end = rest.iter().position(|byte| *byte == 0)?;
        String::from_utf8(rest[..end].to_vec()).ok()
    };
    let of = |tag: u64| -> Vec<String> {
        entries.iter().filter(|e| e.d_tag(endian).0 as u64 == tag).filter_map(|e| text(e.d_val(endian))).collect()
    };
    let mut run_path = of(elf::DT_RUNPATH.0 as u64);
    run_path.extend(of(elf::DT_RPATH.0 as u64));
    let run_path = run_path.iter().flat_map(|list| list.split(':')).map(str::to_owned).collect();
    Some(Needs { libraries: of(elf::DT_NEEDED.0 as u64), run_path })
}

/// Makes the libraries that a plugin finds relative to its own folder (`$ORIGIN`) visible from the folder of the copy, and
/// those that they find likewise.
fn link_siblings(original: &Path, bytes: &[u8], folder: &Path, private: &Path) -> std::io::Result<()> {
    let home = original.parent().unwrap_or(Path::new(".")).canonicalize()?;
    let mut done = BTreeSet::new();
    let mut open = vec![(home, folder.to_owned(), bytes.to_vec())];
    while let Some((origin, mirror, bytes)) = open.pop() {
        let Some(needs) = needs(&bytes) else { continue };
        for entry in &needs.run_path {
            let relative = entry.strip_prefix("$ORIGIN").or_else(|| entry.strip_prefix("${ORIGIN}"));
            let Some(relative) = relative else { continue };
            let relative = Path::new(relative.trim_start_matches('/'));
            let (Some(from), Some(to)) = (join(&origin, relative), join(&mirror, relative)) else { continue };
            for library in &needs.libraries {
                let (file, link) = (from.join(library), to.join(library));
                if !file.is_file() || !to.starts_with(private) || !done.insert(link.clone()) {
                    continue;
                }
                check_permissions(&file).map_err(|refusal| std::io::Error::other(refusal.to_string()))?;
                fs::create_dir_all(&to)?;
                symlink(&file, &link)?;
                open.push((from.clone(), to.clone(), fs::read(&file)?));
            }
        }
    }
    Ok(())
}

/// `base/relative` with `..` resolved; none when it leaves the file system's root.
fn join(base: &Path, relative: &Path) -> Option<PathBuf> {
    let mut path = base.to_owned();
    for component in relative.components() {
        match component {
            Component::ParentDir => path.pop().then_some(())?,
            Component::Normal(name) => path.push(name),
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(path)
}
