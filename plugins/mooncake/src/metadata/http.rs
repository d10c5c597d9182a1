//! The HTTP metadata server: a map from keys to JSON.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use ureq::Agent;

use super::Descriptor;
use crate::limit::Limit;

const CONNECT: Duration = Duration::from_millis(1500);
const TOTAL: Duration = Duration::from_secs(3);
const MOST: u64 = 1 << 20;

/// Where a peer answers handshakes.
#[derive(Debug, Serialize, Deserialize)]
struct HandshakePlace {
    ip_or_host_name: String,
    rpc_port: u16,
}

/// An HTTP metadata server.
#[derive(Debug)]
pub struct MetadataServer {
    base: String,
    prefix: String,
    agent: Agent,
}

impl MetadataServer {
    /// The server at a URL.
    ///
    /// # Errors
    /// A text that says what is not right.
    pub fn new(base: &str) -> Result<MetadataServer, String> {
        if base.contains(['?', '#']) || ureq::http::Uri::try_from(base).is_err() {
            return Err(format!("{base:?} is no URL of a metadata server, such as \"http://host:8080/metadata\""));
        }
        let config = Agent::config_builder()
            .timeout_connect(Some(CONNECT))
            .timeout_global(Some(TOTAL))
            .http_status_as_error(false)
            // A metadata server is an address of the cluster; a proxy of the environment is for other things.
            .proxy(None)
            .build();
        let prefix = match std::env::var("MC_METADATA_CLUSTER_ID") {
            Ok(cluster) if !cluster.is_empty() => format!("mooncake/{cluster}/"),
            _ => "mooncake/".to_owned(),
        };
        Ok(MetadataServer { base: base.to_owned(), prefix, agent: config.into() })
    }

    fn handshake_key(&self, name: &str) -> String {
        format!("{}rpc_meta/{name}", self.prefix)
    }

    fn descriptor_key(&self, name: &str) -> String {
        // A name with a slash is a key of its own.
        if name.contains('/') { format!("{}{name}", self.prefix) } else { format!("{}ram/{name}", self.prefix) }
    }

    fn url(&self, key: &str) -> String {
        let mut url = format!("{}?key=", self.base);
        for byte in key.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => url.push(byte as char),
                _ => url.push_str(&format!("%{byte:02X}")),
            }
        }
        url
    }

    fn fail(&self, key: &str, error: &ureq::Error) -> String {
        format!("metadata server {}: {key}: {error}", self.base)
    }

    fn get(&self, key: &str, limit: &Limit<'_>) -> Result<Option<String>, String> {
        let time = limit.left().map_err(|_| format!("metadata server {}: no time left to ask for {key}", self.base))?;
        let request = self.agent.get(self.url(key)).config().timeout_global(Some(time.min(TOTAL))).build();
        let mut response = request.call().map_err(|error| self.fail(key, &error))?;
        let text = response.body_mut().with_config().limit(MOST).read_to_string();
        let text = text.map_err(|error| self.fail(key, &error))?;
        match response.status().as_u16() {
            200 => Ok(Some(text)),
            404 => Ok(None),
            status => Err(format!("metadata server {}: {key}: status {status}: {text}", self.base)),
        }
    }

    fn put(&self, key: &str, json: &str) -> Result<(), String> {
        let request = self.agent.put(self.url(key)).header("Content-Type", "application/json");
        let mut response = request.send(json).map_err(|error| self.fail(key, &error))?;
        let text = response.body_mut().with_config().limit(MOST).read_to_string().unwrap_or_default();
        match response.status().as_u16() {
            200 => Ok(()),
            status => Err(format!("metadata server {}: {key}: status {status}: {text}", self.base)),
        }
    }

    fn delete(&self, key: &str) -> Result<(), String> {
        self.agent.delete(self.url(key)).call().map(drop).map_err(|error| self.fail(key, &error))
    }

    /// What a peer has published, and the host that its handshake port is on.
    pub(super) fn find(&self, name: &str, limit: &Limit<'_>) -> Result<(Descriptor, String), String> {
        let key = self.descriptor_key(name);
        let text =
            self.get(&key, limit)?.ok_or_else(|| format!("metadata server {} knows no peer {name}", self.base))?;
        let descriptor: Descriptor = serde_json::from_str(&text)
            .map_err(|error| format!("metadata server {}: {key} is no descriptor: {error}", self.base))?;
        let host = match &descriptor.tcp_data_host {
            Some(host) if !host.is_empty() => host.clone(),
            _ => self.handshake_place(name, limit)?.0,
        };
        Ok((descriptor, host))
    }

    /// Host and port at which a peer answers handshakes.
    pub(super) fn handshake_place(&self, name: &str, limit: &Limit<'_>) -> Result<(String, u16), String> {
        let key = self.handshake_key(name);
        let text = self.get(&key, limit)?.ok_or_else(|| format!("metadata server {} has no {key}", self.base))?;
        let place: HandshakePlace = serde_json::from_str(&text)
            .map_err(|error| format!("metadata server {}: {key} can't be read: {error}", self.base))?;
        Ok((place.ip_or_host_name, place.rpc_port))
    }

    /// Publishes a peer: where its handshakes are answered, then what it offers.
    ///
    /// # Errors
    /// A text that says what failed.
    pub fn publish(&self, host: &str, handshake_port: u16, descriptor: &Descriptor) -> Result<(), String> {
        let key = self.handshake_key(&descriptor.name);
        let place = HandshakePlace { ip_or_host_name: host.to_owned(), rpc_port: handshake_port };
        let place = serde_json::to_string(&place).map_err(|error| error.to_string())?;
        if self.put(&key, &place).is_err() {
            // The server refuses another value under the key: what is there is a dead peer's, for the name is this one's alone.
            self.delete(&key)?;
            self.put(&key, &place)?;
        }
        let json = serde_json::to_string(descriptor).map_err(|error| error.to_string())?;
        self.put(&self.descriptor_key(&descriptor.name), &json)
    }

    /// Whether a peer is still published: a server that was started again has forgotten it.
    ///
    /// # Errors
    /// When the server can't be asked.
    pub fn is_published(&self, name: &str, limit: &Limit<'_>) -> Result<bool, String> {
        let both = [self.descriptor_key(name), self.handshake_key(name)];
        for key in both {
            if self.get(&key, limit)?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes a peer back.
    ///
    /// # Errors
    /// A text that says what failed.
    pub fn withdraw(&self, name: &str) -> Result<(), String> {
        let handshake = self.delete(&self.handshake_key(name));
        self.delete(&self.descriptor_key(name)).and(handshake)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_the_recorded_requests() {
        let server = MetadataServer::new("http://127.0.0.1:8080/metadata").unwrap();
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures/metadata");
        for (number, key) in [
            (1, server.handshake_key("127.0.0.1:14068")),
            (2, server.descriptor_key("127.0.0.1:14068")),
            (8, server.handshake_key("127.0.0.1:14068")),
            (9, server.descriptor_key("127.0.0.1:14068")),
        ] {
            let recorded = std::fs::read_to_string(folder.join(format!("http-0{number}.req.txt"))).unwrap();
            let path = recorded.split(' ').nth(1).unwrap();
            assert_eq!(server.url(&key), format!("http://127.0.0.1:8080{path}"));
        }
        let recorded = std::fs::read_to_string(folder.join("http-01.req.txt")).unwrap();
        let body = recorded.split_once("\r\n\r\n").unwrap().1;
        let place: HandshakePlace = serde_json::from_str(body).unwrap();
        assert_eq!(serde_json::to_string(&place).unwrap(), body);
        assert_eq!(server.descriptor_key("a/b"), "mooncake/a/b");
    }

    #[test]
    fn what_is_no_url_is_refused_in_words() {
        for text in ["http://a b/", "http://host/x?key=1"] {
            assert!(MetadataServer::new(text).unwrap_err().contains(text));
        }
    }
}
