//! Saying which pages are stored.

use kvdock_plugin_api::{Exists, HitPolicy, PageStatus, Result};
use rustix::fs::{AtFlags, FileType};

use crate::format::file_len;
use crate::index::{PageId, Place};
use crate::names;
use crate::root::{Root, now_seconds};
use crate::store::{PoolInfo, Store};

/// How many pages are looked up between two looks at the deadline.
const CHECK_EVERY: usize = 32;

impl Store {
    /// Looks up the pages of an exists call.
    pub fn exists(&self, exists: &mut Exists<'_>) -> Result<()> {
        let root = self.root();
        let keys = exists.keys();
        let call = *exists.call();
        call.check()?;
        let queries: Vec<(HitPolicy, usize, PoolInfo)> = exists
            .pools()
            .iter()
            .map(|query| Ok((query.hit_policy, query.held_pages, self.pool(&query.pool)?)))
            .collect::<Result<_>>()?;
        // Beyond the first missing page of a pool that needs all pages nothing can be restored, whatever the other pools hold.
        let mut end = keys.len();
        let mut looked = false;
        let needs_all = |policy: HitPolicy| policy == HitPolicy::AllPages;
        for all in [true, false] {
            let of_round = queries.iter().enumerate().filter(|(_, (policy, _, _))| needs_all(*policy) == all);
            for (number, (policy, held, info)) in of_round {
                for (at, key) in keys.iter().enumerate().take(end).skip(*held) {
                    if at % CHECK_EVERY == 0 {
                        call.check()?;
                    }
                    let id = PageId { key: *key, tag: info.tag_number };
                    let there = !self.is_hidden(&id)
                        && if info.is_small() {
                            self.known_small(&root, &id, &mut looked, &call).is_some_and(
                                |known| matches!(known.place, Place::Pack(place) if place.len == info.page_bytes),
                            )
                        } else {
                            self.known(&id).is_some_and(|known| known.place == Place::File(file_len(info.page_bytes)))
                                || self.find_file(&root, &id, info)
                        };
                    exists.set(number, at, if there { PageStatus::Ok } else { PageStatus::Missing });
                    if !there && needs_all(*policy) {
                        end = at;
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Looks on the disk for a page that is not believed to be there.
    fn find_file(&self, root: &Root, id: &PageId, info: &PoolInfo) -> bool {
        let bytes = file_len(info.page_bytes);
        let path = names::page(&id.key, &info.tag.text);
        let Ok(stat) = rustix::fs::statat(&root.namespace, path.as_cstr(), AtFlags::SYMLINK_NOFOLLOW) else {
            return false;
        };
        let whole = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && stat.st_size as u64 == bytes;
        let used = u32::try_from(stat.st_mtime).unwrap_or(0).min(now_seconds() as u32);
        if !whole || self.is_expired(used) {
            return false;
        }
        self.index.insert(*id, Place::File(bytes), used);
        true
    }
}
