//! Objects of a server.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use kvdock_plugin_api::{
    Call, ClearScope, Error, ErrorKind, Health, HealthState, HeldChange, HeldPages, HeldTier, Host, LogLevel, Pool,
    Result,
};
use parking_lot::{Mutex, RwLock};
use sha2::{Digest, Sha256};

use super::batch::{OBJECTS, Placed, chunks, get_whole, place, put_whole, ranged, ranges_of};
use super::client::{Client, time_of};
use super::regions::{Region, Regions, Scratch};
use crate::config::{Standalone, fail};
use crate::object::{Got, Held, Objects, Piece, Put, Range, Read, Stored};
use crate::store::show_degraded;
use crate::wire::standalone::{
    BatchBoolResponse, BatchKeysRequest, BatchRangeDataRequest, BoolResponse, DeregisterMemoryRequest, Empty,
    ExternalKvMutationRequest, ExternalKvTierRequest, RegisterMemoryRequest,
};

/// Time to hand over a descriptor.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Time to register memory: a server pins it.
const REGISTER: Duration = Duration::from_secs(180);
/// Time of a call at the end.
const LEAVE: Duration = Duration::from_secs(5);
/// How often a call is tried while the server is started again.
const ROUNDS: usize = 3;

/// The store of a server, as one instance uses it.
#[derive(Debug)]
pub struct Remote {
    client: Client,
    fd_socket: String,
    /// Name of this client.
    id: String,
    config: Standalone,
    ranges_per_call: usize,
    host: Host,
    ranged: bool,
    regions: RwLock<Regions>,
    scratch: Scratch,
    /// The connection at which the server was given the memory.
    given: Mutex<Option<u64>>,
    /// The server had the memory once.
    opened: AtomicBool,
    /// What the server had is gone, and the host is to be told when it takes pages again.
    lost: AtomicBool,
    handles: Mutex<HashMap<u64, u64>>,
    trouble: Mutex<Option<String>>,
}

impl Remote {
    /// Connects to the server.
    ///
    /// # Errors
    /// When it is not ready in time.
    pub fn open(
        config: &Standalone,
        ranges_per_call: usize,
        instance: &str,
        host: Host,
        call: &Call<'_>,
    ) -> Result<Remote> {
        let (path, fd_socket) = super::paths(&config.address)
            .ok_or_else(|| fail(instance, "standalone_address", "it names no Unix socket"))?;
        let client = Client::new(&path, config.message)?;
        let ready = client.wait(config.startup, call).map_err(|error| Error {
            message: format!("storage.{instance}.standalone_address: {}", error.message),
            ..error
        })?;
        let mut regions = Regions::default();
        let scratch = Scratch::new()?;
        regions.add_own(&scratch)?;
        let remote = Remote {
            client,
            fd_socket,
            id: client_id(),
            config: config.clone(),
            ranges_per_call,
            host,
            ranged: ready.supports_ranged_io,
            regions: RwLock::new(regions),
            scratch,
            given: Mutex::new(None),
            handles: Mutex::default(),
            trouble: Mutex::default(),
            opened: AtomicBool::new(false),
            lost: AtomicBool::new(false),
        };
        remote.give_all()?;
        Ok(remote)
    }

    fn give(&self, region: &Region) -> Result<()> {
        let socket = &self.fd_socket;
        super::handoff::hand(socket, &self.id, region.fd.as_fd(), region.base, region.size, HANDSHAKE)
            .map_err(|error| Error::new(ErrorKind::Unavailable, format!("server at {socket}: {error}")).retryable())?;
        let answer: BoolResponse = self.client.call("RegisterMemory", self.registration(region), Some(REGISTER))?;
        if answer.ok {
            return Ok(());
        }
        let text = format!(
            "server at {}: it refuses {} bytes of memory: {}",
            self.client.address(),
            region.size,
            answer.error
        );
        Err(Error::new(ErrorKind::Unavailable, text).retryable())
    }

    fn registration(&self, region: &Region) -> RegisterMemoryRequest {
        RegisterMemoryRequest {
            client_id: self.id.clone(),
            worker_base: region.base,
            size: region.size,
            worker_node_id: self.config.node_id.clone(),
            worker_node_address: self.config.node_address.clone(),
            tags: self.config.tags.clone(),
            ..RegisterMemoryRequest::default()
        }
    }

    /// Gives the server all memory, if it was not given on this connection.
    fn give_all(&self) -> Result<u64> {
        let mut given = self.given.lock();
        let now = self.client.connections();
        if *given == Some(now) {
            return Ok(now);
        }
        let mut first = true;
        if self.opened.load(Ordering::Acquire) {
            first = false;
            self.host.log(
                LogLevel::Info,
                "umbp",
                "the connection to the server is a new one: it is given the memory again",
            );
            self.handles.lock().clear();
            // A server that was started again does not know this client, and has none of what it was given.
            if !self.knows_memory()? {
                self.lost.store(true, Ordering::Release);
            }
        }
        self.regions.read().iter().try_for_each(|region| self.give(region))?;
        if first {
            self.opened.store(true, Ordering::Release);
        } else if self.lost.swap(false, Ordering::AcqRel) {
            self.host.log(LogLevel::Warn, "umbp", "the server was started again; the pages that it had are gone");
            self.host.contents_lost();
        }
        // The calls above may have made the connection that counts.
        let now = self.client.connections();
        *given = Some(now);
        Ok(now)
    }

    /// Makes a call about memory. It has no deadline of its own: until the server has answered, or is gone, it may touch that memory.
    fn data(&self, method: &'static str, count: usize, request: impl Fn() -> DataRequest) -> Result<Vec<bool>> {
        let mut last = None;
        for round in 0..ROUNDS {
            if round > 0 {
                std::thread::sleep(Duration::from_millis(50 << round));
            }
            let before = match self.give_all() {
                Ok(before) => before,
                Err(error) => {
                    last = Some(error);
                    continue;
                }
            };
            let answer: Result<BatchBoolResponse> = match request() {
                DataRequest::Whole(request) => self.client.call(method, request, None),
                DataRequest::WithDepth(request) => self.client.call(method, request, None),
                DataRequest::Ranged(request) => self.client.call(method, request, None),
                DataRequest::ByHandle(request) => self.by_handle(method, request),
            };
            match answer {
                // A server that is a new one has not had the memory.
                Ok(_) if self.client.connections() != before => {}
                Ok(answer) if answer.ok.len() == count => {
                    if count > 0 && !answer.ok.contains(&true) && !self.knows_memory()? {
                        *self.given.lock() = None;
                        continue;
                    }
                    self.well();
                    return Ok(answer.ok);
                }
                Ok(answer) => {
                    let text = format!("{method}: the server answers for {} objects, not {count}", answer.ok.len());
                    last = Some(Error::new(ErrorKind::Unavailable, text));
                    break;
                }
                Err(error) => last = Some(error),
            }
        }
        let error = last.unwrap_or_else(|| {
            Error::new(ErrorKind::Unavailable, format!("{method}: the server was started again and again")).retryable()
        });
        self.failed(&error.message);
        Err(error)
    }

    /// Whether the server still has the memory: without it, it says false about everything and not why.
    fn knows_memory(&self) -> Result<bool> {
        let request = self.regions.read().iter().next().map(|region| self.registration(region));
        let Some(request) = request else { return Ok(true) };
        let answer: BoolResponse = self.client.call("RegisterMemory", request, Some(REGISTER))?;
        Ok(answer.ok)
    }

    /// A ranged read of a list of keys that may have been read before: layer after layer has the same.
    fn by_handle(&self, method: &'static str, mut request: BatchRangeDataRequest) -> Result<BatchBoolResponse> {
        if self.config.key_handles == 0 {
            return self.client.call(method, request, None);
        }
        let fingerprint = fingerprint(&request.keys);
        request.key_fingerprint = fingerprint;
        let known = self.handles.lock().get(&fingerprint).copied();
        if let Some(handle) = known {
            let keys = std::mem::take(&mut request.keys);
            request.key_handle = handle;
            let answer: BatchBoolResponse = self.client.call(method, request.clone(), None)?;
            if !answer.key_handle_unknown {
                return Ok(answer);
            }
            self.handles.lock().remove(&fingerprint);
            request.keys = keys;
            request.key_handle = 0;
        }
        let answer: BatchBoolResponse = self.client.call(method, request, None)?;
        if answer.key_handle != 0 {
            let mut handles = self.handles.lock();
            if handles.len() >= self.config.key_handles {
                handles.clear();
            }
            handles.insert(fingerprint, answer.key_handle);
        }
        Ok(answer)
    }

    fn place(&self, ranges: impl Iterator<Item = Range>) -> Result<Vec<Placed>> {
        place(&self.regions.read(), ranges).map_err(|piece| {
            let text = format!("{} bytes of a page lie in no memory that the server was given", piece.len);
            Error::new(ErrorKind::Internal, text)
        })
    }

    /// Markers lie outside of the pools.
    fn of_pool(&self, piece: Piece, own: Piece) -> Piece {
        if piece.len == 1 && self.regions.read().find(&piece).is_none() { own } else { piece }
    }

    fn failed(&self, what: &str) {
        let mut trouble = self.trouble.lock();
        if trouble.is_none() {
            self.host.log(LogLevel::Error, "umbp", what);
            self.host.health_changed(HealthState::Failed, what);
            show_degraded(&self.host, true);
        }
        *trouble = Some(what.to_owned());
    }

    fn well(&self) {
        if self.trouble.lock().take().is_some() {
            self.host.health_changed(HealthState::Ok, "");
            show_degraded(&self.host, false);
        }
    }
}

/// What is asked about memory.
enum DataRequest {
    Whole(crate::wire::standalone::BatchDataRequest),
    WithDepth(crate::wire::standalone::BatchDataWithDepthRequest),
    Ranged(BatchRangeDataRequest),
    ByHandle(BatchRangeDataRequest),
}

fn fingerprint(keys: &[String]) -> u64 {
    let mut digest = Sha256::new();
    for key in keys {
        digest.update((key.len() as u64).to_le_bytes());
        digest.update(key);
    }
    let number = digest.finalize().first_chunk().map_or(1, |bytes| u64::from_le_bytes(*bytes));
    number.max(1)
}

fn client_id() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    // A process that comes later may have the same number.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_micros() as u64);
    format!("kvdock-{}-{}-{now:x}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

impl Objects for Remote {
    fn exists(&self, names: &[Vec<u8>], call: &Call<'_>) -> Result<Vec<bool>> {
        let mut found = Vec::with_capacity(names.len());
        for part in names.chunks(4 * OBJECTS) {
            call.check()?;
            let keys = part.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect();
            let answer = self.client.call("BatchExists", BatchKeysRequest { keys }, Some(time_of(call)));
            let answer: BatchBoolResponse = answer.inspect_err(|error| self.failed(&error.message))?;
            if answer.ok.len() != part.len() {
                let text = format!("BatchExists: the server answers for {} of {} objects", answer.ok.len(), part.len());
                return Err(Error::new(ErrorKind::Unavailable, text));
            }
            found.extend(answer.ok);
        }
        self.well();
        Ok(found)
    }

    unsafe fn put(&self, puts: &[Put], call: &Call<'_>) -> Result<Vec<Stored>> {
        let mut stored = vec![Stored::Refused; puts.len()];
        let mut first: HashMap<&[u8], usize> = HashMap::new();
        let mut again = Vec::new();
        let (mut whole, mut scattered) = (Vec::new(), Vec::new());
        for (number, put) in puts.iter().enumerate() {
            // The server says false of what comes again in a batch.
            if let Some(before) = first.insert(&put.name, number) {
                first.insert(&put.name, before);
                again.push((number, before));
                continue;
            }
            let ranges =
                ranges_of(put).map(|range| Range { piece: self.of_pool(range.piece, self.scratch.source()), ..range });
            let placed = self.place(ranges)?;
            if placed.len() == 1 { &mut whole } else { &mut scattered }.push((number, put, placed));
        }
        if !self.ranged && !scattered.is_empty() {
            return Err(Error::unsupported("pages of several pieces with this server"));
        }
        for (list, method) in [(whole, "BatchPutWithDepth"), (scattered, "BatchPutRanges")] {
            let counts: Vec<usize> = list.iter().map(|(_, _, placed)| placed.len()).collect();
            for chunk in chunks(&counts, OBJECTS, self.ranges_per_call) {
                call.check()?;
                let part = list.get(chunk).unwrap_or_default();
                let ok = self.data(method, part.len(), || match method {
                    "BatchPutRanges" => DataRequest::Ranged(ranged(
                        &self.id,
                        part.iter().map(|(_, put, placed)| (put.name.as_slice(), placed.as_slice(), Some(put.len()))),
                    )),
                    _ => {
                        let objects: Vec<(&Put, Vec<Placed>)> =
                            part.iter().map(|(_, put, placed)| (*put, placed.clone())).collect();
                        DataRequest::WithDepth(put_whole(&self.id, &objects))
                    }
                })?;
                for ((number, ..), ok) in part.iter().zip(ok) {
                    if let Some(entry) = stored.get_mut(*number).filter(|_| ok) {
                        *entry = Stored::Yes;
                    }
                }
            }
        }
        for (number, before) in again {
            let like = stored.get(before).cloned().unwrap_or(Stored::Refused);
            if let Some(entry) = stored.get_mut(number) {
                *entry = like;
            }
        }
        Ok(stored)
    }

    unsafe fn get(&self, reads: &[Read], call: &Call<'_>) -> Result<Vec<Got>> {
        let mut got = vec![Got::Missing; reads.len()];
        let (mut whole, mut scattered, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        for (number, read) in reads.iter().enumerate() {
            let ranges = read
                .ranges
                .iter()
                .map(|range| Range { piece: self.of_pool(range.piece, self.scratch.sink()), ..*range });
            let placed = self.place(ranges)?;
            let list = match (read.is_whole(), placed.len()) {
                (true, 1) => &mut whole,
                (true, _) => &mut scattered,
                (false, _) => &mut parts,
            };
            list.push((number, read, placed));
        }
        if !self.ranged && scattered.len() + parts.len() > 0 {
            return Err(Error::unsupported("pages of several pieces with this server"));
        }
        for (kind, list) in [whole, scattered, parts].into_iter().enumerate() {
            let counts: Vec<usize> = list.iter().map(|(_, _, placed)| placed.len()).collect();
            for chunk in chunks(&counts, OBJECTS, self.ranges_per_call) {
                call.check()?;
                let part = list.get(chunk).unwrap_or_default();
                let method = if kind == 0 { "BatchGet" } else { "BatchGetRanges" };
                let ok = self.data(method, part.len(), || {
                    let pieces =
                        || part.iter().map(|(_, read, placed)| (read.name.as_slice(), placed.as_slice(), None));
                    match kind {
                        0 => {
                            let objects: Vec<(&Read, Vec<Placed>)> =
                                part.iter().map(|(_, read, placed)| (*read, placed.clone())).collect();
                            DataRequest::Whole(get_whole(&self.id, &objects))
                        }
                        1 => DataRequest::Ranged(ranged(&self.id, pieces())),
                        _ => DataRequest::ByHandle(ranged(&self.id, pieces())),
                    }
                })?;
                for ((number, ..), ok) in part.iter().zip(ok) {
                    if let Some(entry) = got.get_mut(*number).filter(|_| ok) {
                        *entry = Got::Yes;
                    }
                }
            }
        }
        Ok(got)
    }

    fn remove(&self, _names: &[Vec<u8>], _call: &Call<'_>) -> Result<Vec<bool>> {
        Err(Error::unsupported("removing single objects from a server of the node"))
    }

    fn clear(&self, _prefix: &[u8], _scope: ClearScope, _call: &Call<'_>) -> Result<()> {
        // The server can drop everything that all workers of the node have, and refuses all puts after it when it has no master.
        Err(Error::unsupported("clearing a server that other workers of the node use"))
    }

    fn flush(&self, call: &Call<'_>) -> Result<()> {
        let answer: BoolResponse = self.client.call("Flush", Empty {}, Some(time_of(call)))?;
        if answer.ok { Ok(()) } else { Err(Error::new(ErrorKind::Unavailable, format!("Flush: {}", answer.error))) }
    }

    fn register(&self, pool: &Pool, _call: &Call<'_>) -> Result<()> {
        if pool.segments().len() > 1 && !self.ranged {
            let text = format!(
                "pool {} ({}): its pages have several pieces, and the server has no ranged calls",
                pool.id(),
                pool.name()
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let mut regions = self.regions.write();
        let given = regions.add(pool).and_then(|changed| {
            changed.iter().filter_map(|base| regions.get(*base)).try_for_each(|region| self.give(region))
        });
        given.inspect_err(|_| {
            regions.remove(pool.id());
        })
    }

    fn unregister(&self, pool: &Pool) {
        if self.regions.write().remove(pool.id()) {
            // There is no call for one region: all go, and those still in use come back.
            let request = DeregisterMemoryRequest { client_id: self.id.clone() };
            let gone: Result<Empty> = self.client.call("DeregisterMemory", request, None);
            *self.given.lock() = None;
            if let Err(error) = gone.and_then(|_| self.give_all().map(|_| Empty {})) {
                self.failed(&error.message);
            }
        }
    }

    fn report(&self, held: &HeldPages<'_>) -> Result<()> {
        let tier = match held.tier {
            HeldTier::Device => 1,
            HeldTier::Host => 2,
            HeldTier::Unknown => return Ok(()),
        };
        let client_id = self.id.clone();
        let time = Some(time_of(&held.call));
        let hashes = held.keys.iter().map(|key| key.iter().map(|byte| format!("{byte:02x}")).collect()).collect();
        let answer: BoolResponse = match held.change {
            HeldChange::Added => self.client.call(
                "ReportExternalKvBlocks",
                ExternalKvMutationRequest { hashes, tier, client_id },
                time,
            )?,
            HeldChange::Removed => self.client.call(
                "RevokeExternalKvBlocks",
                ExternalKvMutationRequest { hashes, tier, client_id },
                time,
            )?,
            HeldChange::Cleared => {
                let request = ExternalKvTierRequest { tier, client_id };
                self.client.call("RevokeAllExternalKvBlocksAtTier", request, time)?
            }
            HeldChange::Unknown => return Ok(()),
        };
        if !answer.ok {
            // A server without a master has nobody to tell, and says so by failing.
            self.host.log(LogLevel::Debug, "umbp", &format!("what is held was not passed on: {}", answer.error));
        }
        Ok(())
    }

    fn held(&self) -> Held {
        // The server says nothing about what it holds.
        Held::default()
    }

    fn health(&self) -> Health {
        match &*self.trouble.lock() {
            None => Health::ok(),
            Some(reason) => Health { state: HealthState::Failed, reason: reason.clone() },
        }
    }

    fn is_durable(&self) -> bool {
        false
    }

    fn can_remove(&self) -> bool {
        false
    }

    fn has_ranges(&self) -> bool {
        self.ranged
    }

    fn close(&self, _call: &Call<'_>) -> Result<()> {
        let request = DeregisterMemoryRequest { client_id: self.id.clone() };
        // A server that is gone has forgotten the memory.
        let _: Result<Empty> = self.client.call("DeregisterMemory", request, Some(LEAVE));
        Ok(())
    }
}
