//! The pages of a folder, or of one instance, and the file that they outlive the process in.

use std::collections::HashMap;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use kvdock_plugin_api::{Error, ErrorKind, PageKey, Result};
use parking_lot::{Mutex, RwLock};

use crate::fault::{self, Fault};

/// A stored page: whose it is, of which pool, under which key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Name {
    /// Digest of the namespace.
    pub namespace: [u8; 32],
    /// Name of the pool.
    pub pool: String,
    /// Key.
    pub key: PageKey,
}

/// The bytes of a page and their checksum.
#[derive(Debug)]
pub struct Stored {
    /// Segment after segment.
    pub bytes: Vec<u8>,
    /// CRC-32C of them.
    pub checksum: u32,
}

impl Stored {
    /// Whole bytes.
    pub fn new(bytes: Vec<u8>) -> Arc<Stored> {
        Arc::new(Stored { checksum: crc32c::crc32c(&bytes), bytes })
    }
    /// Whether the bytes are what was stored.
    pub fn is_sound(&self) -> bool {
        crc32c::crc32c(&self.bytes) == self.checksum
    }
}

#[derive(Debug, Default)]
struct Pages {
    map: HashMap<Name, Arc<Stored>>,
    bytes: u64,
}

/// A store of pages.
#[derive(Debug)]
pub struct Store {
    folder: Option<PathBuf>,
    max_bytes: u64,
    pages: RwLock<Pages>,
    saving: Mutex<()>,
}

/// Why a page was not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full;

const FILE: &str = "pages.bin";
const MAGIC: &[u8; 8] = b"kvbroken";

impl Store {
    /// The store of a folder, which all instances of the process share; or one in memory alone.
    ///
    /// # Errors
    /// When the folder can't be made or read.
    pub fn open(folder: Option<&Path>, max_bytes: u64) -> Result<Arc<Store>> {
        static OPEN: Mutex<Vec<(PathBuf, Weak<Store>)>> = Mutex::new(Vec::new());
        let new = |folder: Option<PathBuf>, pages: Pages| {
            Arc::new(Store { folder, max_bytes, pages: RwLock::new(pages), saving: Mutex::new(()) })
        };
        let Some(folder) = folder else { return Ok(new(None, Pages::default())) };
        let failed = |e: std::io::Error| {
            Error::new(
                ErrorKind::Unavailable,
                format!("dir {}: {e}; it must be a folder that may be written", folder.display()),
            )
        };
        fs::create_dir_all(folder).map_err(failed)?;
        let folder = folder.canonicalize().map_err(failed)?;
        let mut open = OPEN.lock();
        open.retain(|(_, store)| store.strong_count() > 0);
        if let Some(store) = open.iter().find(|(path, _)| *path == folder).and_then(|(_, store)| store.upgrade()) {
            return Ok(store);
        }
        let pages = match forgets(&folder) {
            true => Pages::default(),
            false => load(&folder.join(FILE)).map_err(failed)?,
        };
        let store = new(Some(folder.clone()), pages);
        open.push((folder, Arc::downgrade(&store)));
        Ok(store)
    }

    /// A page.
    pub fn get(&self, name: &Name) -> Option<Arc<Stored>> {
        self.pages.read().map.get(name).cloned()
    }

    /// Whether a page of this pool and key is there in any namespace.
    pub fn has_anywhere(&self, name: &Name) -> bool {
        self.pages.read().map.keys().any(|other| other.pool == name.pool && other.key == name.key)
    }

    /// A page of the namespace with this key and length, of any pool.
    pub fn in_any_pool(&self, name: &Name, len: usize) -> Option<Arc<Stored>> {
        let pages = self.pages.read();
        let same = |other: &Name| other.namespace == name.namespace && other.key == name.key;
        pages
            .map
            .iter()
            .find(|(other, stored)| same(other) && stored.bytes.len() == len)
            .map(|(_, stored)| stored.clone())
    }

    /// Stores all pages at once, or none. A page that is there stays as it is.
    pub fn put(&self, new: Vec<(Name, Arc<Stored>)>) -> std::result::Result<(), Full> {
        let mut pages = self.pages.write();
        let mut fresh: HashMap<Name, Arc<Stored>> = HashMap::new();
        for (name, stored) in new {
            if !pages.map.contains_key(&name) {
                fresh.entry(name).or_insert(stored);
            }
        }
        let bytes: u64 = fresh.values().map(|stored| stored.bytes.len() as u64).sum();
        if pages.bytes + bytes > self.max_bytes {
            return Err(Full);
        }
        pages.bytes += bytes;
        pages.map.extend(fresh);
        Ok(())
    }

    /// Removes a page; whether it was there.
    pub fn remove(&self, name: &Name) -> bool {
        let mut pages = self.pages.write();
        let removed = pages.map.remove(name);
        pages.bytes -= removed.as_ref().map_or(0, |stored| stored.bytes.len() as u64);
        removed.is_some()
    }

    /// Removes what `keep` does not want.
    pub fn retain(&self, keep: impl Fn(&Name) -> bool) {
        let mut pages = self.pages.write();
        pages.map.retain(|name, _| keep(name));
        pages.bytes = pages.map.values().map(|stored| stored.bytes.len() as u64).sum();
    }

    /// Pages and bytes of a namespace, and the bytes that may be used.
    pub fn figures(&self, namespace: &[u8; 32]) -> (u64, u64, u64) {
        let pages = self.pages.read();
        let own = pages.map.iter().filter(|(name, _)| name.namespace == *namespace);
        let (count, bytes) =
            own.fold((0, 0), |(count, bytes), (_, stored)| (count + 1, bytes + stored.bytes.len() as u64));
        (count, bytes, self.max_bytes)
    }

    /// What a fault does: the file has this page alone, with half of its bytes.
    pub fn save_half(&self, name: &Name, bytes: &[u8]) {
        if let Some(folder) = &self.folder {
            let half = bytes.iter().enumerate().map(|(at, byte)| if at * 2 < bytes.len() { *byte } else { 0 });
            // That it can't be written is none of the fault.
            let _ = save(&folder.join(FILE), &[(name.clone(), Stored::new(half.collect()))]);
        }
    }

    /// Writes the file, where there is a folder.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn save(&self) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let _one_at_a_time = self.saving.lock();
        let pages: Vec<(Name, Arc<Stored>)> =
            self.pages.read().map.iter().map(|(name, stored)| (name.clone(), stored.clone())).collect();
        if fault::is(Fault::OtherProcessForgets) {
            // The fault is what is read; that it can't be written is none.
            let _ = fs::write(folder.join(OWNER), std::process::id().to_string());
        }
        let path = folder.join(FILE);
        save(&path, &pages).map_err(|e| Error::new(ErrorKind::Unavailable, format!("{}: {e}", path.display())))
    }
}

/// Which process wrote the file; written by a fault alone.
const OWNER: &str = "owner";

/// Whether a fault makes a folder empty.
fn forgets(folder: &Path) -> bool {
    static SEEN: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    let mut seen = SEEN.lock();
    let again = seen.iter().any(|path| path == folder);
    seen.push(folder.to_owned());
    let owner = fs::read_to_string(folder.join(OWNER)).unwrap_or_default();
    match fault::planted() {
        Ok(Fault::ForgetsOnReopen) => again,
        Ok(Fault::OtherProcessForgets) => owner != std::process::id().to_string(),
        _ => false,
    }
}

fn save(path: &Path, pages: &[(Name, Arc<Stored>)]) -> std::io::Result<()> {
    let written = path.with_extension("new");
    let mut file = std::io::BufWriter::new(fs::File::create(&written)?);
    file.write_all(MAGIC)?;
    for (name, stored) in pages {
        file.write_all(&name.namespace)?;
        file.write_all(&(name.pool.len() as u64).to_le_bytes())?;
        file.write_all(name.pool.as_bytes())?;
        file.write_all(&name.key)?;
        file.write_all(&stored.checksum.to_le_bytes())?;
        file.write_all(&(stored.bytes.len() as u64).to_le_bytes())?;
        file.write_all(&stored.bytes)?;
    }
    file.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_data()?;
    fs::rename(&written, path)
}

fn load(path: &Path) -> std::io::Result<Pages> {
    let mut pages = Pages::default();
    let text = match fs::File::open(path) {
        Ok(mut file) => {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            bytes
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(pages),
        Err(e) => return Err(e),
    };
    let mut rest = text.strip_prefix(MAGIC.as_slice()).unwrap_or_default();
    // A file that ends early gives the pages before its end.
    while let Some((name, stored, after)) = entry(rest) {
        pages.bytes += stored.bytes.len() as u64;
        pages.map.insert(name, Arc::new(stored));
        rest = after;
    }
    Ok(pages)
}

fn entry(rest: &[u8]) -> Option<(Name, Stored, &[u8])> {
    let (namespace, rest) = rest.split_first_chunk::<32>()?;
    let (len, rest) = rest.split_first_chunk::<8>()?;
    let (pool, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    let (key, rest) = rest.split_first_chunk::<32>()?;
    let (checksum, rest) = rest.split_first_chunk::<4>()?;
    let (len, rest) = rest.split_first_chunk::<8>()?;
    let (bytes, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    let name = Name { namespace: *namespace, pool: String::from_utf8(pool.to_vec()).ok()?, key: *key };
    Some((name, Stored { bytes: bytes.to_vec(), checksum: u32::from_le_bytes(*checksum) }, rest))
}
