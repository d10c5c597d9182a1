//! The transport: devices, memory and connections of this process.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::{Mutex, RwLock};

use crate::completion::Poller;
use crate::config::Config;
use crate::connection::Connection;
use crate::device::{self, Device, DeviceInfo};
use crate::error::RdmaError;
use crate::handshake::{Description, split_path};
use crate::library::Verbs;
use crate::memory::{Memory, Region, Registration};
use crate::topology::{self, Priorities};
use crate::transfer::Deadline;

/// Connections that are kept. Beyond, the one that was used least lately makes room.
const MOST_CONNECTIONS: usize = 1024;

/// Carries a question about a connection to a peer, and its answer back.
pub trait Exchange: Sync {
    /// Asks the peer of this name.
    ///
    /// # Errors
    /// A text that says why there is no answer.
    fn exchange(&self, server: &str, request: &Description, limit: Deadline<'_>) -> Result<Description, String>;
}

type Connections = HashMap<(usize, String), Arc<Connection>>;

/// RDMA of this process.
#[derive(Debug)]
pub struct Transport {
    pub(crate) config: Config,
    server: RwLock<String>,
    connections: Mutex<Connections>,
    memory: Arc<Memory>,
    /// They hold devices, and end before those.
    pollers: Mutex<Vec<Poller>>,
    devices: Vec<Arc<Device>>,
    priorities: Priorities,
}

impl Transport {
    /// Opens the devices of this machine. `server`: the name of this process, which stands in front of those of its devices.
    ///
    /// # Errors
    /// When libibverbs or a device is missing, or can't be used.
    pub fn open(config: Config, server: &str) -> Result<Transport, RdmaError> {
        let verbs = Verbs::get()?;
        let devices = device::open_all(verbs, &config)?;
        let pollers: Result<Vec<_>, _> = devices.iter().cloned().map(Poller::start).collect();
        let nodes: Vec<_> = devices.iter().map(|device| (device.info.name.clone(), device.node)).collect();
        Ok(Transport {
            config,
            server: RwLock::new(server.to_owned()),
            connections: Mutex::default(),
            memory: Arc::default(),
            pollers: Mutex::new(pollers?),
            devices,
            priorities: topology::priorities(&nodes),
        })
    }

    /// The name of this process.
    pub fn server(&self) -> String {
        self.server.read().clone()
    }

    /// Names this process anew; for connections that are made later.
    pub fn set_server(&self, server: &str) {
        server.clone_into(&mut self.server.write());
    }

    /// The devices, in the order that keys have.
    pub fn devices(&self) -> Vec<DeviceInfo> {
        self.devices.iter().map(|device| device.info.clone()).collect()
    }

    /// Which devices are near which memory.
    pub fn priorities(&self) -> &Priorities {
        &self.priorities
    }

    /// Registers memory of this process with all devices. Peers, where they may reach it, name it by addresses from `address` on.
    ///
    /// # Errors
    /// When a device refuses it.
    ///
    /// # Safety
    /// The range is mapped until the registration is gone; with `remote`, peers read and write it at any time.
    pub unsafe fn register(
        &self,
        start: *mut u8,
        len: usize,
        address: u64,
        remote: bool,
    ) -> Result<Registration, RdmaError> {
        // SAFETY: the caller's promise.
        unsafe { self.memory.register(&self.devices, start as usize, len, address, remote) }
    }

    /// How many ranges are registered.
    pub fn registered(&self) -> usize {
        self.memory.count()
    }

    pub(crate) fn find(&self, start: usize, len: usize) -> Option<(Arc<Region>, usize)> {
        self.memory.find(start, len)
    }

    /// Places of the devices, near ones of a place first, and how many are near.
    pub(crate) fn near(&self, place: &str) -> (Vec<usize>, usize) {
        let is_up = |at: &usize| self.devices.get(*at).is_some_and(|device| device.is_up.load(Ordering::Acquire));
        let place_of = |name: &String| self.devices.iter().position(|device| device.info.name == *name);
        let Some(tiers) = self.priorities.get(place) else {
            let all: Vec<usize> = (0..self.devices.len()).filter(is_up).collect();
            let count = all.len();
            return (all, count);
        };
        let mut list: Vec<usize> = tiers.0.iter().filter_map(place_of).filter(is_up).collect();
        let count = list.len();
        list.extend(tiers.1.iter().filter_map(place_of).filter(is_up));
        (list, count)
    }

    pub(crate) fn connection(&self, device: usize, peer: &str) -> Option<Arc<Connection>> {
        let mut connections = self.connections.lock();
        if let Some(known) = connections.get(&(device, peer.to_owned())) {
            return Some(known.clone());
        }
        let oldest = if connections.len() >= MOST_CONNECTIONS {
            let idle = connections.iter().filter(|(_, connection)| Arc::strong_count(connection) == 1);
            let key = idle.min_by_key(|(_, connection)| connection.used()).map(|(key, _)| key.clone());
            // All are in use.
            Some(connections.remove(&key?)?)
        } else {
            None
        };
        let made = Arc::new(Connection::new(self.devices.get(device)?.clone(), peer));
        connections.insert((device, peer.to_owned()), made.clone());
        drop(connections);
        if let Some(oldest) = oldest {
            oldest.end();
        }
        Some(made)
    }

    /// Answers a peer that asks for a connection. A refusal says why.
    pub fn answer(&self, request: &Description) -> Description {
        let server = self.server();
        let Some((to, device)) = split_path(&request.peer_nic_path) else {
            return Description::refusal(format!("{:?} is not SERVER@DEVICE", request.peer_nic_path));
        };
        if to != server {
            return Description::refusal(format!("this is {server}, asked was {to}"));
        }
        if split_path(&request.local_nic_path).is_none() {
            return Description::refusal(format!("{:?} is not SERVER@DEVICE", request.local_nic_path));
        }
        let Some(at) = self.devices.iter().position(|known| known.info.name == device) else {
            return Description::refusal(format!("there is no device {device} here"));
        };
        match self.connection(at, &request.local_nic_path) {
            Some(connection) => connection.answer(&server, request, &self.config),
            None => Description::refusal(format!("{MOST_CONNECTIONS} connections are in use already")),
        }
    }

    /// Ends the connections to a peer.
    pub fn forget(&self, server: &str) {
        let gone = |peer: &str| split_path(peer).is_some_and(|(name, _)| name == server);
        let ended: Vec<_> = {
            let mut connections = self.connections.lock();
            let keys: Vec<_> = connections.keys().filter(|(_, peer)| gone(peer)).cloned().collect();
            keys.into_iter().filter_map(|key| connections.remove(&key)).collect()
        };
        ended.iter().for_each(|connection| connection.end());
    }

    /// Ends all connections: peers read and write nothing here any more.
    pub fn close(&self) {
        let all: Vec<_> = self.connections.lock().drain().map(|(_, connection)| connection).collect();
        all.iter().for_each(|connection| connection.end());
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        self.close();
        // Each ends its thread.
        self.pollers.lock().clear();
    }
}
