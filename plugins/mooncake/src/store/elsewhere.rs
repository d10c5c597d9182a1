//! Objects that lie in no memory: in a folder that hosts share, or on an owner's disk. They are read whole, when the session begins.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path};

use kvdock_plugin_api::{MetricKind, PageStatus};

use super::Store;
use super::items::{Item, Items};
use crate::data::{Job, Operation, Outcome, transfer};
use crate::limit::Limit;
use crate::member::RPC_TIME;
use crate::rpc::Client;
use crate::wire::owner::{GetOffloaded, Lent, ReleaseOffloaded};
use crate::wire::rpc;
use crate::wire::types::{OnDisk, OnLocalDisk};

/// Where an object lies that is in no memory.
#[derive(Debug)]
pub(super) enum Elsewhere {
    /// In a file that hosts share.
    Shared(OnDisk),
    /// On the disk of a peer, which is asked for it.
    Owner(OnLocalDisk),
}

/// Why an object could not be read, and what is said of it then.
type Unread = (PageStatus, String);

impl Store {
    /// Reads objects whole. Each has an answer.
    pub(super) fn read_elsewhere(
        &self,
        items: &Items<'_>,
        objects: &[(&Item<'_>, Elsewhere)],
        limit: &Limit<'_>,
    ) -> Vec<Result<(), Unread>> {
        let mut answers: Vec<Option<Result<(), Unread>>> = objects.iter().map(|_| None).collect();
        let mut folder = None;
        let mut owners: HashMap<&str, Vec<usize>> = HashMap::new();
        for (number, (item, place)) in objects.iter().enumerate() {
            match place {
                Elsewhere::Owner(owner) => owners.entry(&owner.endpoint).or_default().push(number),
                Elsewhere::Shared(file) => {
                    let folder = folder.get_or_insert_with(|| self.shared_folder(limit));
                    let read = folder.as_ref().map_err(|why| (PageStatus::Missing, why.clone()));
                    let read = read.and_then(|folder| read_file(items, item, file, folder));
                    if let Some(answer) = answers.get_mut(number) {
                        *answer = Some(read);
                    }
                }
            }
        }
        for (endpoint, numbers) in owners {
            let asked: Vec<&Item<'_>> =
                numbers.iter().filter_map(|number| objects.get(*number)).map(|(item, _)| *item).collect();
            for (number, read) in numbers.iter().zip(self.read_from_owner(items, endpoint, &asked, limit)) {
                if let Some(answer) = answers.get_mut(*number) {
                    *answer = Some(read);
                }
            }
        }
        let unread = answers.iter().filter(|answer| !matches!(answer, Some(Ok(())))).count();
        if unread > 0 {
            self.member.host.metric(MetricKind::CounterAdd, "mooncake_unreadable_pages", "", unread as f64);
        }
        let none = || Err((PageStatus::Failed, "nobody answered for the object".to_owned()));
        answers.into_iter().map(|answer| answer.unwrap_or_else(none)).collect()
    }

    /// The folder that the hosts of the store share, as its master has it.
    fn shared_folder(&self, limit: &Limit<'_>) -> Result<String, String> {
        let asked = self.member.master.call::<rpc::GetStorageConfig>(&rpc::NoArguments, &limit.at_most(RPC_TIME));
        match asked {
            Ok(Ok(config)) if !config.fsdir.is_empty() => Ok(config.fsdir),
            Ok(Ok(_)) => Err("the master names no shared folder".to_owned()),
            Ok(Err(code)) => Err(format!("the master names no shared folder: {code}")),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Has an owner put objects into its memory, reads them there, and gives them back.
    fn read_from_owner(
        &self,
        items: &Items<'_>,
        endpoint: &str,
        objects: &[&Item<'_>],
        limit: &Limit<'_>,
    ) -> Vec<Result<(), Unread>> {
        let all = |why: String| objects.iter().map(|_| Err((PageStatus::Failed, why.clone()))).collect();
        let owner = match Client::new(endpoint, 1) {
            Ok(owner) => owner,
            Err(why) => return all(format!("an owner's address: {why}")),
        };
        let tenant = &self.member.tenant;
        let names = objects.iter().map(|item| format!("{tenant}\0{}", item.name)).collect();
        let sizes = objects.iter().map(|item| item.len as i64).collect();
        let asked = owner.call::<GetOffloaded>(&(names, sizes), &limit.at_most(RPC_TIME));
        let (loan, addresses, peer, _): Lent = match asked {
            Ok(Ok(lent)) if lent.1.len() == objects.len() => lent,
            Ok(Ok(lent)) => return all(format!("owner {endpoint} has {} of {} objects", lent.1.len(), objects.len())),
            Ok(Err(code)) => return all(format!("owner {endpoint}: {code}")),
            // It is asked as a master is.
            Err(error) => return all(error.to_string().replacen("master ", "owner ", 1)),
        };
        let peer = self.member.peers.get(&peer);
        let mut jobs = Vec::new();
        let mut counts = Vec::with_capacity(objects.len());
        for (item, address) in objects.iter().zip(addresses) {
            let before = jobs.len();
            for step in 0..items.steps {
                for span in items.spans(item, step) {
                    let address = address.wrapping_add(span.offset);
                    jobs.push(Job { peer: peer.clone(), address, len: span.len, pieces: items.pieces(span) });
                }
            }
            counts.push(jobs.len() - before);
        }
        // SAFETY: destination pages of an operation are its own to write until it ends; no byte is in two jobs.
        let mut outcomes = unsafe { transfer(&self.member.peers, Operation::Read, &jobs, limit) }.into_iter();
        let answer = |count: usize| {
            let mut answer = Ok(());
            for outcome in outcomes.by_ref().take(count) {
                match outcome {
                    Outcome::Moved => {}
                    Outcome::Rejected(why) | Outcome::PeerFailed(why) => answer = Err((PageStatus::Failed, why)),
                    Outcome::Stopped { .. } => answer = Err((PageStatus::Failed, "the time was over".to_owned())),
                }
            }
            answer
        };
        let answers = counts.into_iter().map(answer).collect();
        // The owner takes it back by itself after a while.
        let _ = owner.call::<ReleaseOffloaded>(&loan, &limit.at_most(RPC_TIME));
        answers
    }
}

/// Reads an object from a file. The path comes from the master, so nothing outside of the shared folder is opened.
fn read_file(items: &Items<'_>, item: &Item<'_>, file: &OnDisk, folder: &str) -> Result<(), Unread> {
    let path = Path::new(&file.path);
    let is_plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !path.is_absolute() || !is_plain || !path.starts_with(folder) {
        return Err((PageStatus::Missing, format!("{} does not lie in the shared folder {folder}", path.display())));
    }
    let failed = |status, why: String| (status, format!("{}: {why}", path.display()));
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let opened = File::options().read(true).custom_flags(flags).open(path);
    let opened = opened.map_err(|error| failed(PageStatus::Missing, error.to_string()))?;
    let about = opened.metadata().map_err(|error| failed(PageStatus::Failed, error.to_string()))?;
    if !about.is_file() || about.len() != item.len || file.size != item.len {
        let why = format!("it has {} bytes, the page has {}", about.len(), item.len);
        return Err(failed(PageStatus::Corrupt, why));
    }
    for step in 0..items.steps {
        for span in items.spans(item, step).iter().filter(|_| !item.marker) {
            let mut at = span.offset;
            for piece in items.pieces(span) {
                let mut done = 0;
                while done < piece.iov_len {
                    // SAFETY: the piece is memory of a destination page, which is this operation's to write until it ends.
                    let read = unsafe {
                        let to = piece.iov_base.byte_add(done);
                        libc::pread(opened.as_raw_fd(), to, piece.iov_len - done, at as libc::off_t)
                    };
                    match usize::try_from(read) {
                        Ok(0) => return Err(failed(PageStatus::Corrupt, "it ended early".to_owned())),
                        Ok(read) => (done, at) = (done + read, at + read as u64),
                        Err(_) => match std::io::Error::last_os_error() {
                            error if error.kind() == std::io::ErrorKind::Interrupted => {}
                            error => return Err(failed(PageStatus::Failed, error.to_string())),
                        },
                    }
                }
            }
        }
    }
    Ok(())
}
