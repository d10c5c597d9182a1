//! Looking through the directory: what is in it, and what a crash has left.

use std::collections::HashSet;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use kvdock_plugin_api::LogLevel;
use rustix::fs::{AtFlags, FileType};

use crate::evict::unlink;
use crate::index::{PageId, Place};
use crate::names;
use crate::pack::Look;
use crate::root::{self, Lives, Root, list, now_seconds, open_folder};
use crate::store::Store;

/// A page file or a pack of another namespace.
#[derive(Debug)]
pub struct ForeignFile<'a> {
    /// Path below the store's directory.
    pub path: &'a str,
    /// Bytes on the disk.
    pub bytes: u64,
    /// When it was used last.
    pub used: u32,
}

/// A page added less long ago than this may be missing in a listing that was begun before.
const FRESH_SECONDS: u32 = 2;

impl Store {
    /// The first look: everything in the directory, and the leftovers go.
    pub fn first_look(&self) {
        let root = self.root();
        let mut lives = Lives::default();
        // Lock files that can't be listed stay until the next start.
        let dead = lives.look(&root).unwrap_or_default();
        for byte in 0..=255 {
            if self.is_stopping() {
                return;
            }
            // What can't be listed is looked for page by page.
            let _ = self.list_fan_out(&root, byte, &mut lives);
        }
        let _ = self.look_at_packs(&root, Look::Everything, None);
        self.cut_torn_ends(&root);
        clean_folder(&root, root.namespace.as_fd(), &mut lives);
        clean_folder(&root, root.dir.as_fd(), &mut lives);
        self.look_at_foreign(&root, &mut lives);
        if self.is_stopping() {
            return;
        }
        let _ = Lives::bury(&root, &dead);
        self.scanned.store(true, Ordering::Release);
        let message = format!("{} pages found, {} bytes in the directory", self.index.pages(), self.bytes_used());
        self.host.log(LogLevel::Info, "store", &message);
    }

    /// Lists a fan-out folder, and brings the index and the disk in order. Says whether a page is missing that is too fresh to be given
    /// up, so that the folder should be listed again.
    pub fn list_fan_out(&self, root: &Root, byte: u8, lives: &mut Lives) -> io::Result<bool> {
        let began = now_seconds() as u32;
        let folder = match open_folder(root.namespace.as_fd(), names::fan_out(byte).as_cstr()) {
            Ok(folder) => folder,
            Err(error) => {
                if error.kind() == io::ErrorKind::NotFound {
                    self.index.retain(byte, |_, known| !is_old_file(known.place, known.used, began));
                }
                return Err(error);
            }
        };
        let mut there = HashSet::new();
        let mut unknown = Vec::new();
        let mut temps = Vec::new();
        list(folder.as_fd(), |name| {
            if let Some((key, tag)) = names::parse_page(name) {
                let Some(tag) = self.index.tag(tag) else { return };
                let id = PageId { key, tag };
                if self.index.get(&id).is_none() {
                    unknown.push((id, name.to_owned()));
                }
                there.insert(id);
            } else if let Some(owner) = names::parse_temp(name)
                && owner != self.owner.id()
            {
                temps.push((name.to_owned(), owner.to_owned()));
            }
        })?;
        let mut again = false;
        self.index.retain(byte, |id, known| {
            let missing = matches!(known.place, Place::File(_)) && !there.contains(id);
            let kept = !missing || !is_old_file(known.place, known.used, began);
            again |= missing && kept;
            kept
        });
        for (id, name) in unknown {
            let Ok(stat) = rustix::fs::statat(&folder, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
                let used = u32::try_from(stat.st_mtime).unwrap_or(0).min(now_seconds() as u32);
                self.index.insert(id, Place::File(stat.st_size as u64), used);
            }
        }
        for (name, owner) in temps {
            if let Ok(name) = CString::new(name) {
                lives.clean_temp(root, folder.as_fd(), &name, &owner);
            }
        }
        Ok(again)
    }

    /// Measures the other namespaces and removes what is too old or was left by a crash.
    pub fn look_at_foreign(&self, root: &Root, lives: &mut Lives) {
        let mut bytes = 0;
        let mut expired = Vec::new();
        self.walk_foreign(root, &mut |file| {
            if self.is_expired(file.used) {
                expired.push(file.path.to_owned());
            } else {
                bytes += file.bytes;
            }
        });
        for path in expired {
            // What can't be removed is tried again at the next look.
            let _ = unlink(root, &path);
        }
        self.foreign.bytes.store(bytes, Ordering::Relaxed);
        for folder in self.foreign_folders(root) {
            for byte in 0..=255 {
                if self.is_stopping() {
                    return;
                }
                if let Ok(opened) = open_folder(root.dir.as_fd(), format!("{folder}/{}", names::fan_out(byte).as_str()))
                {
                    clean_folder(root, opened.as_fd(), lives);
                }
            }
        }
    }

    fn foreign_folders(&self, root: &Root) -> Vec<String> {
        let own = names::namespace_folder(&self.namespace);
        root::namespaces(root).unwrap_or_default().into_iter().filter(|folder| *folder != own).collect()
    }

    /// Calls `see` with every page file and pack of the other namespaces.
    pub fn walk_foreign(&self, root: &Root, see: &mut dyn FnMut(ForeignFile<'_>)) {
        for folder in self.foreign_folders(root) {
            let fan_outs = (0..=255).map(|byte| format!("{folder}/{}", names::fan_out(byte).as_str()));
            for path in fan_outs.chain([format!("{folder}/packs")]) {
                if self.is_stopping() {
                    return;
                }
                let Ok(opened) = open_folder(root.dir.as_fd(), path.as_str()) else { continue };
                let mut files = Vec::new();
                // A folder that can't be listed counts as empty.
                let _ = list(opened.as_fd(), |name| {
                    if names::parse_page(name).is_some() || names::parse_pack(name).is_some() {
                        files.push(name.to_owned());
                    }
                });
                for name in files {
                    let Ok(stat) = rustix::fs::statat(&opened, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) else {
                        continue;
                    };
                    let bytes = if names::parse_pack(&name).is_some() {
                        stat.st_blocks as u64 * 512
                    } else {
                        stat.st_size as u64
                    };
                    let used = u32::try_from(stat.st_mtime).unwrap_or(0);
                    see(ForeignFile { path: &format!("{path}/{name}"), bytes, used });
                }
            }
        }
    }
}

fn is_old_file(place: Place, used: u32, began: u32) -> bool {
    matches!(place, Place::File(_)) && used.saturating_add(FRESH_SECONDS) < began
}

/// Removes the leftovers of the dead from a folder.
fn clean_folder(root: &Root, folder: BorrowedFd<'_>, lives: &mut Lives) {
    let mut temps = Vec::new();
    // A folder that can't be listed is looked at the next time.
    let _ = list(folder, |name| {
        if let Some(owner) = names::parse_temp(name) {
            temps.push((name.to_owned(), owner.to_owned()));
        }
    });
    for (name, owner) in temps {
        if let Ok(name) = CString::new(name) {
            lives.clean_temp(root, folder, &name, &owner);
        }
    }
}
