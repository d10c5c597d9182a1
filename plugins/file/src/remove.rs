//! Removing pages, and everything.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;

use kvdock_plugin_api::{Batch, Call, ClearScope, Error, ErrorKind, PageStatus, Remove, Result};
use rustix::fs::AtFlags;

use crate::health::explain;
use crate::index::{PackPlace, PageId, Place};
use crate::names;
use crate::pack::Look;
use crate::root::{self, Root, list, open_folder};
use crate::store::Store;

impl Store {
    /// Removes the pages of a batch.
    pub fn remove(&self, batch: &Batch<'_, Remove>) -> Result<()> {
        let root = self.root();
        let mut first_error = None;
        for transfer in batch.transfers() {
            let info = self.pool(transfer.pool())?;
            let mut packed: Vec<(PageId, PackPlace)> = Vec::new();
            let mut numbers = Vec::new();
            let (mut looked, mut opened) = (false, HashMap::new());
            for (number, key) in transfer.keys().iter().enumerate() {
                batch.call().check()?;
                let id = PageId { key: *key, tag: info.tag_number };
                if info.is_small() {
                    let Some(place) = self.living_place(&root, &id, &mut looked, batch.call(), &mut opened) else {
                        transfer.finish(number, PageStatus::Missing);
                        continue;
                    };
                    packed.push((id, place));
                    packed.extend(self.copies_of(&id));
                    numbers.push((number, id));
                    continue;
                }
                let status = match self.remove_file(&root, &id) {
                    Ok(true) => PageStatus::Ok,
                    Ok(false) => PageStatus::Missing,
                    Err(error) => {
                        first_error.get_or_insert(error);
                        PageStatus::Failed
                    }
                };
                transfer.finish(number, status);
            }
            packed.dedup();
            let failed = self.bury_in_packs(&root, &mut packed);
            for (number, id) in numbers {
                let gone = failed == 0 || self.index.get(&id).is_none();
                transfer.finish(number, if gone { PageStatus::Ok } else { PageStatus::Failed });
                if !gone {
                    first_error.get_or_insert_with(|| io::Error::other("pages could not be marked as removed"));
                }
            }
        }
        self.removed(first_error)
    }

    fn removed(&self, error: Option<io::Error>) -> Result<()> {
        let Some(error) = error else { return Ok(()) };
        self.figures.failures.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let message = format!("{}: removing failed: {}", self.config.dir.display(), explain(&error));
        Err(Error::new(ErrorKind::Unavailable, message).retryable())
    }

    /// Removes every page of a scope. Files that are not ours stay.
    pub fn clear(&self, call: &Call<'_>, scope: ClearScope) -> Result<()> {
        let root = self.root();
        let mut first_error = None;
        self.clear_own(&root, call, &mut first_error)?;
        if scope == ClearScope::Everything {
            let own = names::namespace_folder(&self.namespace);
            match root::namespaces(&root) {
                Ok(folders) => {
                    for folder in folders.iter().filter(|folder| **folder != own) {
                        if let Err(error) = self.clear_foreign(&root, folder, call)? {
                            first_error.get_or_insert(error);
                        }
                    }
                    self.foreign.bytes.store(0, std::sync::atomic::Ordering::Relaxed);
                }
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        self.removed(first_error)
    }

    fn clear_own(&self, root: &Root, call: &Call<'_>, first_error: &mut Option<io::Error>) -> Result<()> {
        for byte in 0..=255 {
            call.check()?;
            match clear_fan_out(root.namespace.as_fd(), byte) {
                Ok(()) => self.index.retain(byte, |_, known| !matches!(known.place, Place::File(_))),
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        }
        self.packs.retire_all();
        if let Err(error) = self.look_at_packs(root, Look::Everything, None)
            && error.kind() != io::ErrorKind::NotFound
        {
            first_error.get_or_insert(error);
        }
        for (pack, _) in self.idle_packs() {
            call.check()?;
            self.drop_pack(root, pack);
        }
        // What is left lies in packs that other processes, or other calls, append to.
        for shard in 0..=255 {
            let mut left = Vec::new();
            self.index.for_each(shard, |id, known| {
                if let Place::Pack(place) = known.place {
                    left.push((*id, place));
                }
            });
            if self.bury_in_packs(root, &mut left) > 0 {
                first_error.get_or_insert_with(|| io::Error::other("pages could not be marked as removed"));
            }
        }
        Ok(())
    }

    fn clear_foreign(&self, root: &Root, folder: &str, call: &Call<'_>) -> Result<io::Result<()>> {
        let opened = match open_folder(root.dir.as_fd(), folder) {
            Ok(opened) => opened,
            Err(error) => return Ok(Err(error)),
        };
        let mut result = Ok(());
        for byte in 0..=255 {
            call.check()?;
            result = result.and(clear_fan_out(opened.as_fd(), byte));
        }
        if let Ok(packs) = open_folder(opened.as_fd(), "packs") {
            result = result.and(remove_names(packs.as_fd(), |name| names::parse_pack(name).is_some()));
        }
        Ok(result)
    }
}

/// Removes the pages of a fan-out folder.
fn clear_fan_out(namespace: std::os::fd::BorrowedFd<'_>, byte: u8) -> io::Result<()> {
    match open_folder(namespace, names::fan_out(byte).as_cstr()) {
        Ok(folder) => remove_names(folder.as_fd(), |name| names::parse_page(name).is_some()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn remove_names(folder: std::os::fd::BorrowedFd<'_>, ours: impl Fn(&str) -> bool) -> io::Result<()> {
    let mut names = Vec::new();
    list(folder, |name| {
        if ours(name) {
            names.push(name.to_owned());
        }
    })?;
    let mut result = Ok(());
    for name in names {
        match rustix::fs::unlinkat(folder, name.as_str(), AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(error) => result = Err(error.into()),
        }
    }
    result
}
