//! Registered memory: once per allocation, on all devices.

use std::collections::BTreeMap;
use std::sync::Arc;

use libc::c_uint;
use parking_lot::RwLock;

use crate::device::Device;
use crate::error::RdmaError;
use crate::topology;
use crate::verbs;

const MEMLOCK: &str = "; the limit of locked memory (ulimit -l) has to allow it";

/// Registered memory as peers are told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// First address, as peers name it.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// Where it lies, such as `cpu:0`.
    pub place: String,
    /// Its keys for work of this process, in the order of the devices.
    pub lkeys: Vec<u32>,
    /// Its keys for work of peers, in the order of the devices.
    pub rkeys: Vec<u32>,
}

/// A range that is registered with every device.
#[derive(Debug)]
pub struct Region {
    start: usize,
    len: usize,
    address: u64,
    access: c_uint,
    pub place: String,
    /// In the order of the devices.
    keys: Vec<Key>,
}

#[derive(Debug)]
struct Key {
    region: *mut verbs::MemoryRegion,
    device: Arc<Device>,
}

// SAFETY: a registration may be used by any thread.
unsafe impl Send for Key {}
// SAFETY: as above.
unsafe impl Sync for Key {}

impl Drop for Key {
    fn drop(&mut self) {
        // SAFETY: it is what the device gave, and goes once.
        unsafe { (self.device.verbs.dereg_mr)(self.region) };
    }
}

impl Region {
    /// # Safety
    /// As [`Memory::register`].
    unsafe fn new(
        devices: &[Arc<Device>],
        start: usize,
        len: usize,
        address: u64,
        access: c_uint,
    ) -> Result<Region, RdmaError> {
        let mut keys = Vec::with_capacity(devices.len());
        for device in devices {
            let flags = access | verbs::ACCESS_RELAXED_ORDERING;
            // SAFETY: the caller's promise; the domain lives as long as the device.
            let region = unsafe { (device.verbs.reg_mr)(device.domain, start as *mut _, len, address, flags) };
            if region.is_null() {
                let error = std::io::Error::last_os_error();
                let locked = matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EPERM | libc::EAGAIN));
                return Err(RdmaError::Registration {
                    len,
                    device: device.info.name.clone(),
                    why: error.to_string(),
                    hint: if locked { MEMLOCK } else { "" },
                });
            }
            keys.push(Key { region, device: device.clone() });
        }
        Ok(Region { start, len, address, access, place: topology::place(start as *const u8), keys })
    }

    /// The key for work of this process on a device.
    pub fn lkey(&self, device: usize) -> u32 {
        // SAFETY: the registration lives as long as the key.
        self.keys.get(device).map_or(0, |key| unsafe { (*key.region).lkey })
    }

    fn rkey(&self, device: usize) -> u32 {
        // SAFETY: as above.
        self.keys.get(device).map_or(0, |key| unsafe { (*key.region).rkey })
    }

    fn holds(&self, start: usize, len: usize) -> bool {
        start >= self.start && start.checked_add(len).is_some_and(|end| end <= self.start + self.len)
    }

    fn key(&self) -> Place {
        (self.start, self.len, self.address, self.access)
    }

    fn piece(&self) -> Piece {
        let each = |key: fn(&Region, usize) -> u32| (0..self.keys.len()).map(|at| key(self, at)).collect();
        Piece {
            address: self.address,
            len: self.len as u64,
            place: self.place.clone(),
            lkeys: each(Region::lkey),
            rkeys: each(Region::rkey),
        }
    }
}

/// Start, bytes, address, access.
type Place = (usize, usize, u64, c_uint);
type Regions = BTreeMap<Place, (Arc<Region>, usize)>;

/// The last place that begins at `start` or before.
fn up_to(start: usize) -> Place {
    (start, usize::MAX, u64::MAX, c_uint::MAX)
}

/// All memory that is registered.
#[derive(Debug, Default)]
pub struct Memory {
    regions: RwLock<Regions>,
}

/// Memory stays registered while this lives.
#[derive(Debug)]
pub struct Registration {
    memory: Arc<Memory>,
    regions: Vec<Arc<Region>>,
}

impl Registration {
    /// What peers are told of it.
    pub fn pieces(&self) -> Vec<Piece> {
        self.regions.iter().map(|region| region.piece()).collect()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut regions = self.memory.regions.write();
        for region in &self.regions {
            if let Some((_, users)) = regions.get_mut(&region.key()) {
                *users -= 1;
                if *users == 0 {
                    regions.remove(&region.key());
                }
            }
        }
    }
}

impl Memory {
    /// Registers a range; what is registered already is shared. Peers name it by addresses from `address` on; `remote`: they may read and write it.
    ///
    /// # Safety
    /// The range is mapped until the registration is gone.
    pub unsafe fn register(
        self: &Arc<Self>,
        devices: &[Arc<Device>],
        start: usize,
        len: usize,
        address: u64,
        remote: bool,
    ) -> Result<Registration, RdmaError> {
        let access =
            verbs::ACCESS_LOCAL_WRITE | if remote { verbs::ACCESS_REMOTE_READ | verbs::ACCESS_REMOTE_WRITE } else { 0 };
        let most = devices.iter().map(|device| device.limits.max_mr_size).filter(|most| *most > 0).min();
        // A multiple of the largest pages keeps addresses and pages in step.
        let step = most.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX));
        let step = if step >= 1 << 30 { step & !((1 << 30) - 1) } else { step & !4095 }.max(4096);
        let mut held = Registration { memory: self.clone(), regions: Vec::new() };
        let mut at = 0;
        while at < len {
            let part = step.min(len - at);
            // SAFETY: the caller's promise.
            held.regions.push(unsafe { self.register_part(devices, start + at, part, address + at as u64, access) }?);
            at += part;
        }
        Ok(held)
    }

    /// # Safety
    /// As [`Memory::register`].
    unsafe fn register_part(
        &self,
        devices: &[Arc<Device>],
        start: usize,
        len: usize,
        address: u64,
        access: c_uint,
    ) -> Result<Arc<Region>, RdmaError> {
        let shift = |address: u64, start: usize| address.wrapping_sub(start as u64);
        let same =
            |region: &Region| region.access == access && shift(region.address, region.start) == shift(address, start);
        let mut regions = self.regions.write();
        for (region, users) in regions.range_mut(..=up_to(start)).rev().map(|(_, held)| held) {
            if region.holds(start, len) && same(region) {
                *users += 1;
                return Ok(region.clone());
            }
        }
        // SAFETY: the caller's promise.
        let region = Arc::new(unsafe { Region::new(devices, start, len, address, access) }?);
        regions.insert(region.key(), (region.clone(), 1));
        Ok(region)
    }

    /// The region that has a range, or its first part, and how much of it.
    pub fn find(&self, start: usize, len: usize) -> Option<(Arc<Region>, usize)> {
        let regions = self.regions.read();
        let mut before = regions.range(..=up_to(start)).rev().map(|(_, (region, _))| region);
        let region = before.find(|region| region.holds(start, 1))?;
        Some((region.clone(), len.min(region.start + region.len - start)))
    }

    /// How many regions there are.
    pub fn count(&self) -> usize {
        self.regions.read().len()
    }
}
