//! How peers find one another: by a metadata server, or by asking the peer itself.

mod descriptor;
pub mod handshake;
mod http;
mod owner;

pub use descriptor::{Descriptor, Range};
pub use http::MetadataServer;
pub use owner::Owner;

use std::sync::Arc;

use crate::limit::Limit;
use crate::net::split_address;

/// Where the peers of one master publish what they offer. All of them use the same.
#[derive(Debug)]
pub enum Metadata {
    /// Nowhere: each is asked directly, at the address that is its name.
    Peer,
    /// On an HTTP server.
    Server(MetadataServer),
}

/// What is known of a peer.
#[derive(Debug, Clone)]
pub struct PeerInfo {
    /// What it offers.
    pub descriptor: Descriptor,
    /// Host of its data port.
    pub host: String,
    /// How RDMA reaches it, if it does.
    pub over_rdma: Option<Arc<kvdock_rdma::Peer>>,
}

impl Metadata {
    /// From the configuration.
    ///
    /// # Errors
    /// A text that says what is not right and what would be.
    pub fn parse(text: &str) -> Result<Metadata, String> {
        if text.eq_ignore_ascii_case("P2PHANDSHAKE") {
            return Ok(Metadata::Peer);
        }
        if text.starts_with("http://") {
            return MetadataServer::new(text).map(Metadata::Server);
        }
        let what = match text.split_once("://") {
            Some(("etcd" | "redis" | "https", _)) => "is a metadata server that this version does not speak to",
            _ => "is no metadata server",
        };
        Err(format!(
            "{text:?} {what}; it takes \"P2PHANDSHAKE\" or the URL of an HTTP metadata server such as \"http://host:8080/metadata\""
        ))
    }

    /// Where a peer answers handshakes, by its name.
    ///
    /// # Errors
    /// A text that says why nothing is known of it.
    pub fn handshake_place(&self, name: &str, limit: &Limit<'_>) -> Result<(String, u16), String> {
        match self {
            Metadata::Peer => {
                let (host, port) = split_address(name).ok_or_else(|| format!("{name:?} is no address"))?;
                Ok((host.to_owned(), port))
            }
            Metadata::Server(server) => server.handshake_place(name, limit),
        }
    }

    /// Asks for a peer by the endpoint that stands in a replica.
    ///
    /// # Errors
    /// A text that says why nothing is known of it.
    pub fn find(&self, endpoint: &str, limit: &Limit<'_>) -> Result<PeerInfo, String> {
        let (descriptor, fallback) = match self {
            Metadata::Peer => {
                let (host, port) = split_address(endpoint).ok_or_else(|| format!("{endpoint:?} is no address"))?;
                (handshake::ask(host, port, limit)?, host.to_owned())
            }
            Metadata::Server(server) => server.find(endpoint, limit)?,
        };
        descriptor.check()?;
        let host = descriptor.tcp_data_host.clone().filter(|host| !host.is_empty()).unwrap_or(fallback);
        let over_rdma = descriptor.over_rdma();
        Ok(PeerInfo { descriptor, host, over_rdma })
    }
}
