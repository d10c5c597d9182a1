//! The memory that this process lends.

use std::sync::Arc;

use data_encoding::HEXLOWER;
use kvdock_plugin_api::{Error, ErrorKind, LogLevel, Result};

use super::{Member, RPC_TIME, error_of};
use crate::config::{Config, is_loopback};
use crate::data::{Peers, Rdma};
use crate::limit::Limit;
use crate::metadata::{Descriptor, Metadata, Range};
use crate::serve::{Bounds, Memory, Server};
use crate::wire::types::Segment;
use crate::wire::{ErrorCode, Uuid, rpc};

/// Memory that is lent, the sockets it is reached by, and what the master knows of it.
#[derive(Debug)]
pub struct Lent {
    /// Its registration with RDMA devices, which goes before the memory.
    _registration: Option<kvdock_rdma::Registration>,
    /// The memory.
    pub memory: Arc<Memory>,
    /// The sockets.
    pub server: Server,
    /// As the master knows it.
    pub segment: Segment,
    /// As peers know it.
    pub descriptor: Descriptor,
    host: String,
}

impl Lent {
    /// Sets memory aside and serves it. Nobody knows of it yet.
    pub(super) fn serve(config: &Config, len: u64, peers: &Peers) -> Result<Lent> {
        let failed = |key: &str, why: String| Error::new(ErrorKind::Unavailable, format!("{key}: {why}"));
        let memory = Memory::new(len)
            .map_err(|error| failed("global_segment_size", format!("{len} bytes can't be set aside: {error}")))?;
        let memory = Arc::new(memory);
        let transport = peers.rdma().map(Rdma::transport);
        let bounds = Bounds::of_this_process();
        let server = Server::start_with(
            memory.clone(),
            &config.host,
            config.port,
            config.serve_threads,
            transport.cloned(),
            bounds,
        )
        .map_err(|why| failed("local_hostname", why))?;
        let id = Uuid::random().map_err(|error| failed("global_segment_size", error.to_string()))?;
        let host = &config.host;
        let bracketed = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        let place = format!("{bracketed}:{}", server.handshake_port());
        // Official peers keep what they know under a name for as long as they live, so a name is used once. Where peers find one another by
        // asking, the name is the address, and a port drawn by the system has to do.
        let name = match peers.metadata() {
            Metadata::Peer => place,
            Metadata::Server(_) => format!("{place}-{}", short(&id)),
        };
        let mut registration = None;
        let descriptor = match transport {
            None => {
                let range = Range { addr: memory.base(), length: len, name: name.clone(), ..Range::default() };
                Descriptor::tcp(&name, host, server.data_port(), vec![range])
            }
            Some(transport) => {
                transport.set_server(&name);
                let size = usize::try_from(len).unwrap_or(usize::MAX);
                // SAFETY: the registration is held beside the memory and goes first. Peers may touch the memory at any time: no code of
                // this crate refers to it.
                let held = unsafe { transport.register(memory.map(), size, memory.base(), true) }
                    .map_err(|error| failed("global_segment_size", error.to_string()))?;
                let range = |piece: kvdock_rdma::Piece| Range {
                    addr: piece.address,
                    length: piece.len,
                    lkey: piece.lkeys,
                    name: piece.place,
                    rkey: piece.rkeys,
                };
                let buffers = held.pieces().into_iter().map(range).collect();
                registration = Some(held);
                Descriptor::rdma(&name, &transport.devices(), transport.priorities(), buffers)
            }
        };
        server.describe(descriptor.clone());
        let loopback = is_loopback(host);
        let segment = Segment {
            id,
            name: name.clone(),
            base: memory.base(),
            size: len,
            endpoint: name,
            protocol: if registration.is_some() { "rdma" } else { "tcp" }.to_owned(),
            host_id: if loopback { String::new() } else { host.clone() },
        };
        Ok(Lent { _registration: registration, memory, server, segment, descriptor, host: host.clone() })
    }

    /// Tells the metadata server, if there is one.
    pub(super) fn publish(&self, metadata: &Metadata) -> Result<(), String> {
        match metadata {
            Metadata::Peer => Ok(()),
            Metadata::Server(server) => server.publish(&self.host, self.server.handshake_port(), &self.descriptor),
        }
    }
}

pub(super) fn short(id: &Uuid) -> String {
    HEXLOWER.encode(id.0.get(..4).unwrap_or_default())
}

impl Member {
    /// Publishes the memory, then mounts it: the master may place objects the moment it knows it.
    pub(super) fn mount(&self, limit: &Limit<'_>) -> Result<()> {
        let Some(lent) = &self.lent else { return Ok(()) };
        lent.publish(self.peers.metadata())
            .map_err(|why| Error::new(ErrorKind::Unavailable, format!("metadata_server: {why}")).retryable())?;
        let request = (lent.segment.clone(), self.id);
        match self.master.call::<rpc::MountSegment>(&request, &limit.at_most(RPC_TIME)) {
            Ok(Ok(()) | Err(ErrorCode::SEGMENT_ALREADY_EXISTS)) => {}
            Ok(Err(code)) => {
                let text = format!(
                    "master {} does not take the segment of {} bytes: {code}",
                    self.master.address(),
                    lent.segment.size
                );
                return Err(Error::new(ErrorKind::Unavailable, text));
            }
            Err(error) => return Err(error_of(&error)),
        }
        let text = format!(
            "{} bytes are lent to the store at {} as {}",
            lent.segment.size,
            self.master.address(),
            lent.segment.name
        );
        self.host.log(LogLevel::Info, "member", &text);
        Ok(())
    }
}
