//! Storing objects: here, or where the master says.

use std::collections::{BTreeMap, HashMap};

use kvdock_plugin_api::{Call, Result};

use super::cluster::Cluster;
use super::limit::Limit;
use super::master::Target;
use super::objects::{DATA, each, text};
use crate::local::memory::{Copied, Extents};
use crate::object::{Put, Stored};

fn set(stored: &mut [Stored], number: usize, value: Stored) {
    if let Some(entry) = stored.get_mut(number) {
        *entry = value;
    }
}

impl Cluster {
    /// # Safety
    /// As [`crate::object::Objects::put`].
    pub(super) unsafe fn put_all(&self, puts: &[Put], call: &Call<'_>) -> Result<Vec<Stored>> {
        call.check()?;
        let (node, limit) = (&self.node, Limit::of(call, DATA));
        let names: Vec<&str> = puts.iter().map(|put| text(&put.name)).collect();
        let mut stored = vec![Stored::Refused; puts.len()];
        let mut first: HashMap<&str, usize> = HashMap::new();
        let (mut open, mut again) = (Vec::new(), Vec::new());
        for ((number, name), here) in names.iter().enumerate().zip(node.pool.use_now(&names)) {
            let before = *first.entry(name).or_insert(number);
            if before != number {
                again.push((number, before));
            } else if here {
                set(&mut stored, number, Stored::Yes);
            } else {
                open.push(number);
            }
        }
        let (mut here, there) = self.route(puts, &names, &open, &mut stored, &limit)?;
        let groups: Vec<((String, String), Vec<usize>)> = there.into_iter().collect();
        let taken = each(groups.len(), |at| {
            let Some(((id, address), numbers)) = groups.get(at) else { return Vec::new() };
            let objects: Vec<&Put> = numbers.iter().filter_map(|number| puts.get(*number)).collect();
            // SAFETY: passed on to the caller.
            unsafe { self.store_with(id, address, &objects, &limit) }
        });
        for ((_, numbers), taken) in groups.iter().zip(taken) {
            let taken = taken.unwrap_or_default();
            for (at, number) in numbers.iter().enumerate() {
                match taken.get(at) {
                    Some(true) => {
                        node.figures.put_there.add(puts.get(*number).map_or(0, Put::len));
                        set(&mut stored, *number, Stored::Yes);
                    }
                    // Another node could not take it: this one may.
                    _ => here.push(*number),
                }
            }
        }
        here.sort_unstable();
        // SAFETY: passed on to the caller.
        unsafe { self.put_here(puts, &names, &here, &mut stored, call) }?;
        for (number, before) in again {
            let like = stored.get(before).cloned().unwrap_or(Stored::Refused);
            set(&mut stored, number, like);
        }
        Ok(stored)
    }

    /// Which objects are to be stored here, and which with other nodes: by name and address.
    #[allow(clippy::type_complexity, reason = "two lists")]
    fn route(
        &self,
        puts: &[Put],
        names: &[&str],
        open: &[usize],
        stored: &mut [Stored],
        limit: &Limit<'_>,
    ) -> Result<(Vec<usize>, BTreeMap<(String, String), Vec<usize>>)> {
        let node = &self.node;
        let (mut here, mut there) = (Vec::new(), BTreeMap::new());
        let asked: Vec<(&str, u64)> =
            open.iter().filter_map(|number| Some((*names.get(*number)?, puts.get(*number)?.len()))).collect();
        let targets = if asked.is_empty() {
            Vec::new()
        } else {
            match node.master.route_put(&asked, &node.foreign(), limit) {
                Ok(targets) => targets,
                Err(failed) if limit.left().is_err() => return Err(failed.into()),
                Err(failed) => {
                    // Without a master, this node takes them; it is told when it comes back.
                    node.failed(&failed.text);
                    return Ok((open.to_vec(), there));
                }
            }
        };
        for (number, target) in open.iter().zip(targets) {
            match target {
                // That may be what has just gone from here.
                Target::There if names.get(*number).is_some_and(|name| node.pool.is_leaving(name)) => {
                    here.push(*number);
                }
                Target::There => set(stored, *number, Stored::Yes),
                Target::Node(id, address) if id != node.id && !address.is_empty() => {
                    there.entry((id, address)).or_insert_with(Vec::new).push(*number);
                }
                // Where no node has room, the oldest objects of this one make some.
                Target::Node(..) | Target::NoRoom => here.push(*number),
            }
        }
        Ok((here, there))
    }

    unsafe fn put_here(
        &self,
        puts: &[Put],
        names: &[&str],
        here: &[usize],
        stored: &mut [Stored],
        call: &Call<'_>,
    ) -> Result<()> {
        let pool = &self.node.pool;
        let mut taken: Vec<(usize, Extents)> = Vec::new();
        let mut ended = Ok(());
        for number in here {
            ended = call.check();
            if ended.is_err() {
                break;
            }
            let Some(put) = puts.get(*number) else { continue };
            let mut room = pool.take(put.len());
            if room.is_none() && pool.has_below() && !taken.is_empty() {
                // The objects of this call fill memory by themselves: those that have room can go to segments once they are shown.
                // SAFETY: passed on to the caller.
                unsafe { self.fill_and_show(puts, names, std::mem::take(&mut taken), stored) };
                room = pool.take(put.len());
            }
            if let Some(extents) = room {
                taken.push((*number, extents));
            }
        }
        if ended.is_err() {
            taken.iter().for_each(|(_, extents)| pool.give(extents));
            return ended;
        }
        // SAFETY: passed on to the caller.
        unsafe { self.fill_and_show(puts, names, taken, stored) };
        Ok(())
    }

    /// Copies objects into the room that was taken for them, and shows them.
    unsafe fn fill_and_show(&self, puts: &[Put], names: &[&str], taken: Vec<(usize, Extents)>, stored: &mut [Stored]) {
        let pool = &self.node.pool;
        let bytes = taken.iter().filter_map(|(number, _)| puts.get(*number)).map(Put::len).sum();
        pool.fill_all(Copied { objects: taken.len(), bytes }, |at| {
            if let Some((number, extents)) = taken.get(at)
                && let Some(put) = puts.get(*number)
            {
                // SAFETY: the extents were taken for this object alone; the pieces are the caller's promise.
                unsafe { pool.fill(extents, put.len(), &put.pieces) };
            }
        });
        let mut objects = Vec::with_capacity(taken.len());
        for (number, extents) in taken {
            let (Some(name), Some(put)) = (names.get(number), puts.get(number)) else { continue };
            objects.push(((*name).to_owned(), put.len(), extents));
            set(stored, number, Stored::Yes);
        }
        self.node.figures.put_here.add(bytes);
        // All of a call that is stored here, and that memory has room for at once, can be found from the same moment on.
        let waiting = pool.show(objects);
        self.node.happened(waiting);
    }
}
