//! A device of this machine: its port, the GID it is known by, and what is made once for it.

use std::ffi::CStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use libc::c_int;
use parking_lot::Mutex;

use crate::completion::Slab;
use crate::config::Config;
use crate::error::RdmaError;
use crate::library::{Verbs, system_error};
use crate::topology;
use crate::verbs::{self, DeviceAttributes, GidEntry, PortAttributes};

/// Entries of a table of GIDs that are looked at.
const MOST_GIDS: u32 = 256;

/// What peers are told of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Its number on InfiniBand; 0 on Ethernet.
    pub lid: u16,
    /// Its GID.
    pub gid: [u8; 16],
}

/// An open device.
pub struct Device {
    pub verbs: &'static Verbs,
    pub info: DeviceInfo,
    pub gid_index: u8,
    pub port: u8,
    pub mtu: c_int,
    pub node: Option<u32>,
    pub limits: DeviceAttributes,
    pub context: *mut verbs::Context,
    pub domain: *mut verbs::ProtectionDomain,
    pub channel: *mut verbs::CompletionChannel,
    pub completions: *mut verbs::CompletionQueue,
    /// Requests under way.
    pub slab: Mutex<Slab>,
    /// Entries of the completion queue that no request will take.
    pub room: AtomicI64,
    /// Whether its port works.
    pub is_up: AtomicBool,
}

// SAFETY: the library's objects may be used by any thread; it locks them itself.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("info", &self.info).field("gid_index", &self.gid_index).finish_non_exhaustive()
    }
}

/// Opens the devices that are asked for, or all that can be used.
pub fn open_all(verbs: &'static Verbs, config: &Config) -> Result<Vec<Arc<Device>>, RdmaError> {
    let mut count: c_int = 0;
    // SAFETY: the count is written; the list is given back below.
    let list = unsafe { (verbs.get_device_list)(&raw mut count) };
    if list.is_null() {
        let why = std::io::Error::last_os_error();
        // What the library says where the kernel has none of its modules.
        let none = if why.raw_os_error() == Some(libc::ENOSYS) { ", for its kernel has no RDMA" } else { "" };
        return Err(RdmaError::NoDevice(format!("{none} (the list of devices can't be had: {why})")));
    }
    let mut opened = Vec::new();
    let mut present = Vec::new();
    let mut troubles = Vec::new();
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has so many entries.
        let device = unsafe { *list.add(at) };
        // SAFETY: each is a device until the list is given back, and its name has an end.
        let name = unsafe { CStr::from_ptr((&raw const (*device).name).cast()) }.to_string_lossy().into_owned();
        present.push(name.clone());
        if !config.devices.is_empty() && !config.devices.contains(&name) {
            continue;
        }
        match Device::open(verbs, device, &name, config) {
            Ok(device) => opened.push(Arc::new(device)),
            Err(error) => troubles.push((name, error)),
        }
    }
    // SAFETY: it is what the library gave; open devices do not need it.
    unsafe { (verbs.free_device_list)(list) };
    for name in &config.devices {
        if !present.contains(name) {
            let there = if present.is_empty() { "none".to_owned() } else { present.join(", ") };
            return Err(RdmaError::Device {
                name: name.clone(),
                why: format!("there is no such device; there is {there}"),
            });
        }
        // Whoever names devices wants these.
        if let Some((_, error)) = troubles.iter().find(|(of, _)| of == name) {
            return Err(error.clone());
        }
    }
    if opened.is_empty() {
        let why: Vec<String> = troubles.iter().map(|(_, error)| error.to_string()).collect();
        return Err(RdmaError::NoDevice(if why.is_empty() { String::new() } else { format!(": {}", why.join("; ")) }));
    }
    Ok(opened)
}

impl Device {
    fn open(
        verbs: &'static Verbs,
        device: *mut verbs::Device,
        name: &str,
        config: &Config,
    ) -> Result<Device, RdmaError> {
        let wrong = |why: String| RdmaError::Device { name: name.to_owned(), why };
        let object =
            |what, error: std::io::Error| RdmaError::Object { device: name.to_owned(), what, why: error.to_string() };
        // SAFETY: the path has an end.
        let folder = unsafe { CStr::from_ptr((&raw const (*device).ibdev_path).cast()) };
        let folder = PathBuf::from(folder.to_string_lossy().into_owned());
        // SAFETY: the device is one of the list.
        let context = unsafe { (verbs.open_device)(device) };
        if context.is_null() {
            return Err(wrong(format!("it can't be opened: {}", std::io::Error::last_os_error())));
        }
        // From here on dropping it gives back what was made.
        let mut device = Device {
            verbs,
            info: DeviceInfo { name: name.to_owned(), lid: 0, gid: [0; 16] },
            gid_index: 0,
            port: config.port,
            mtu: 0,
            node: topology::numa_node(&folder),
            // SAFETY: numbers and bytes, for which nought is a value.
            limits: unsafe { std::mem::zeroed() },
            context,
            domain: std::ptr::null_mut(),
            channel: std::ptr::null_mut(),
            completions: std::ptr::null_mut(),
            slab: Mutex::default(),
            room: AtomicI64::new(0),
            is_up: AtomicBool::new(true),
        };
        // SAFETY: the device is open; the attributes have the size that the function writes.
        let result = unsafe { (verbs.query_device)(context, &raw mut device.limits) };
        if result != 0 {
            return Err(wrong(format!("it does not say what it can do: {}", system_error(result))));
        }
        device.find_port(config)?;
        // SAFETY: the device is open.
        device.domain = unsafe { (verbs.alloc_pd)(context) };
        if device.domain.is_null() {
            return Err(object("no protection domain", std::io::Error::last_os_error()));
        }
        // SAFETY: as above.
        device.channel = unsafe { (verbs.create_channel)(context) };
        if device.channel.is_null() {
            return Err(object("no completion channel", std::io::Error::last_os_error()));
        }
        let entries = c_int::try_from(config.completions).unwrap_or(c_int::MAX).min(device.limits.max_cqe).max(1);
        // SAFETY: device and channel are open; no context is handed over.
        device.completions = unsafe { (verbs.create_cq)(context, entries, std::ptr::null_mut(), device.channel, 0) };
        if device.completions.is_null() {
            return Err(object("no completion queue", std::io::Error::last_os_error()));
        }
        device.room = AtomicI64::new(entries.into());
        Ok(device)
    }

    fn find_port(&mut self, config: &Config) -> Result<(), RdmaError> {
        let name = self.info.name.clone();
        let wrong = |why: String| RdmaError::Device { name: name.clone(), why };
        let mut port = PortAttributes::default();
        // SAFETY: the device is open; the attributes have the size that this function of the library writes.
        let result = unsafe { (self.verbs.query_port)(self.context, config.port, &raw mut port) };
        if result != 0 {
            return Err(wrong(format!("it has no port {}: {}", config.port, system_error(result))));
        }
        if port.state != verbs::PORT_ACTIVE {
            return Err(wrong(format!("port {} is not active (state {})", config.port, port.state)));
        }
        let table: Vec<GidEntry> = (0..u32::try_from(port.gid_tbl_len).unwrap_or(0).min(MOST_GIDS))
            .filter_map(|at| self.gid(at))
            .filter(|entry| entry.gid != [0; 16])
            .collect();
        let chosen = match config.gid_index {
            Some(index) => table
                .iter()
                .find(|entry| entry.gid_index == u32::from(index))
                .ok_or_else(|| wrong(format!("port {} has no GID at place {index}", config.port)))?,
            None => best_gid(&table, port.link_layer).ok_or_else(|| {
                wrong(format!(
                    "port {} has no GID for {}; give its place in the table where another one is to be used",
                    config.port,
                    if port.link_layer == verbs::LINK_ETHERNET { "RoCE version 2" } else { "InfiniBand" }
                ))
            })?,
        };
        self.info.gid = chosen.gid;
        self.info.lid = port.lid;
        self.gid_index = u8::try_from(chosen.gid_index).unwrap_or(0);
        self.mtu = port.active_mtu;
        Ok(())
    }

    fn gid(&self, at: u32) -> Option<GidEntry> {
        let mut entry = GidEntry::default();
        let size = size_of::<GidEntry>();
        // SAFETY: the device is open, and the entry has the size that is told.
        let result = unsafe { (self.verbs.query_gid)(self.context, self.port.into(), at, &raw mut entry, 0, size) };
        (result == 0).then_some(entry)
    }

    /// Takes room for a completion; says whether there was.
    pub fn take_room(&self) -> bool {
        if self.room.fetch_sub(1, Ordering::AcqRel) > 0 {
            return true;
        }
        self.room.fetch_add(1, Ordering::AcqRel);
        false
    }

    /// The room of a request that has ended.
    pub fn give_room(&self) {
        self.room.fetch_add(1, Ordering::AcqRel);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // An object that can't be given back now goes with the process; nothing here can do more.
        if !self.completions.is_null() {
            // SAFETY: no queue pair is left, for each holds the device.
            unsafe { (self.verbs.destroy_cq)(self.completions) };
        }
        if !self.channel.is_null() {
            // SAFETY: its queue is gone.
            unsafe { (self.verbs.destroy_channel)(self.channel) };
        }
        if !self.domain.is_null() {
            // SAFETY: no region is left, for each holds the device.
            unsafe { (self.verbs.dealloc_pd)(self.domain) };
        }
        // SAFETY: nothing of the device is left.
        unsafe { (self.verbs.close_device)(self.context) };
    }
}

/// The GID by which peers most likely reach a port.
fn best_gid(table: &[GidEntry], link_layer: u8) -> Option<&GidEntry> {
    let rank = |entry: &GidEntry| -> Option<u32> {
        if link_layer != verbs::LINK_ETHERNET {
            return (entry.gid_type == verbs::GID_IB).then_some(0);
        }
        if entry.gid_type != verbs::GID_ROCE_V2 {
            return None;
        }
        let has_interface = entry.ndev_ifindex != 0;
        Some(match entry.gid {
            [0xfe, 0x80, ..] => 40,
            _ if is_overlay(entry.ndev_ifindex) => 30,
            gid if is_private(&gid) => 10 + u32::from(!has_interface) * 10,
            _ => u32::from(!has_interface) * 15,
        })
    };
    let ranked = table.iter().filter_map(|entry| Some((rank(entry)?, entry.gid_index, entry)));
    ranked.min_by_key(|(rank, index, _)| (*rank, *index)).map(|(_, _, entry)| entry)
}

/// An IPv4 address of a private network, as a GID.
fn is_private(gid: &[u8; 16]) -> bool {
    let [.., a, b, _, _] = gid;
    gid.starts_with(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff])
        && (*a == 10 || (*a == 172 && (16..32).contains(b)) || (*a == 192 && *b == 168))
}

/// Whether an interface is one of containers, which other machines do not reach.
fn is_overlay(index: u32) -> bool {
    let mut name = [0; libc::IF_NAMESIZE];
    // SAFETY: the buffer has the size that the function asks for.
    if index == 0 || unsafe { libc::if_indextoname(index, name.as_mut_ptr()) }.is_null() {
        return false;
    }
    // SAFETY: the function has written a name with an end.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy();
    ["docker", "veth", "cali", "flannel", "cni", "br-", "virbr", "tun", "vxlan"]
        .iter()
        .any(|kind| name.starts_with(kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(gid_index: u32, gid_type: u32, gid: [u8; 16], ndev_ifindex: u32) -> GidEntry {
        GidEntry { gid, gid_index, port_num: 1, gid_type, ndev_ifindex }
    }

    fn v4(a: u8, b: u8, c: u8, d: u8) -> [u8; 16] {
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d]
    }

    #[test]
    fn routable_gids_of_roce_version_2_come_first() {
        let local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
        let global = [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
        let (v1, v2) = (verbs::GID_ROCE_V1, verbs::GID_ROCE_V2);
        let mut table = vec![entry(0, v1, local, 1), entry(1, v2, local, 1), entry(2, v1, v4(10, 0, 0, 1), 1)];
        let best = |table: &[GidEntry]| best_gid(table, verbs::LINK_ETHERNET).map(|entry| entry.gid_index);
        assert_eq!(best(&table[..1]), None);
        assert_eq!(best(&table), Some(1));
        table.push(entry(3, v2, v4(10, 0, 0, 1), 1));
        assert_eq!(best(&table), Some(3));
        table.push(entry(4, v2, global, 0));
        assert_eq!(best(&table), Some(3), "one without a network interface");
        table.push(entry(5, v2, global, 1));
        assert_eq!(best(&table), Some(5));
    }

    #[test]
    fn infiniband_takes_its_first_gid() {
        let gid = |last| [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last];
        let table = [entry(0, verbs::GID_IB, gid(1), 0), entry(1, verbs::GID_IB, gid(2), 0)];
        assert_eq!(best_gid(&table, verbs::LINK_INFINIBAND).map(|entry| entry.gid_index), Some(0));
    }

    #[test]
    fn private_addresses_are_known() {
        for private in [v4(10, 1, 2, 3), v4(172, 16, 0, 1), v4(172, 31, 0, 1), v4(192, 168, 9, 9)] {
            assert!(is_private(&private), "{private:?}");
        }
        for public in [v4(8, 8, 8, 8), v4(172, 32, 0, 1), v4(192, 169, 0, 1), [10; 16]] {
            assert!(!is_private(&public), "{public:?}");
        }
    }
}
