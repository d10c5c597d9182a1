//! The configuration `storage.<instance>.*`, and the files and environment variables that other clients of the store read.

mod rdma;
mod sources;

use kvdock_plugin_api::{Error, ErrorKind, Identity, Open, Result, values};
use serde_json::{Map, Value};

use crate::member::SCHEME;
use crate::net;

/// JSON Schema of the configuration; it travels in the plugin's note.
pub const SCHEMA: &str = r#"{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "additionalProperties": false,
  "x-key-schemes": ["kvdock", "sglang"],
  "x-host-layouts": {"sglang": ["page_first", "page_first_direct", "page_head"]},
  "x-host-layouts-replicated": {"sglang": ["page_first", "page_first_direct"]},
  "x-check-apart": {"prefer_own_segment": true},
  "properties": {
    "master_server_address": {
      "type": "string", "pattern": "^(([^/:\\s\\[\\]]+|\\[[^\\s/\\[\\]]+\\]):(0*([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))|etcd://\\s*([^/:\\s\\[\\]]+|\\[[^\\s/\\[\\]]+\\]):(0*([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))(\\s*[;,]\\s*([^/:\\s\\[\\]]+|\\[[^\\s/\\[\\]]+\\]):(0*([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])))*[;,\\s]*)$",
      "description": "Address of the Mooncake master, such as \"10.0.0.1:50051\"; or of the etcd in which several masters agree who leads, such as \"etcd://10.0.0.1:2379;10.0.0.2:2379\". An IPv6 address stands in brackets. Without it the file that SGLANG_HICACHE_MOONCAKE_CONFIG_PATH names, and then MOONCAKE_MASTER and the other MOONCAKE_* variables say it; keys given here count before either."
    },
    "cluster_id": {
      "type": "string", "pattern": "[^/]",
      "description": "With etcd: what the masters call their store, their --cluster_id. MC_STORE_CLUSTER_ID says it where this does not. Default: mooncake_cluster."
    },
    "metadata_server": {
      "type": "string", "pattern": "^([Pp]2[Pp][Hh][Aa][Nn][Dd][Ss][Hh][Aa][Kk][Ee]|http://[^/?#\\s]+(/[^?#\\s]*)?)$",
      "description": "How peers find one another: \"P2PHANDSHAKE\", or the URL of an HTTP metadata server such as \"http://10.0.0.1:8080/metadata\". All peers of a master use the same. Default: P2PHANDSHAKE."
    },
    "protocol": {
      "enum": ["tcp", "rdma"],
      "description": "What moves the bytes: tcp, or rdma, which needs libibverbs and a network card for it; all members of a cluster use the same. Default: tcp."
    },
    "device_name": {
      "type": "string",
      "description": "Network devices for rdma, with commas, such as \"mlx5_0,mlx5_1\"; or a JSON object from the numbers of tensor-parallel ranks to such lists. tcp needs none. MC_GID_INDEX, MC_IB_PORT, MC_IB_SL, MC_IB_TC, MC_SLICE_SIZE and MC_RETRY_CNT count as with other clients. Default: all that have an active port."
    },
    "local_hostname": {
      "type": "string", "pattern": "^([^/:\\s\\[\\]]+(:(0*([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))|:0+)?|\\[[^\\s/\\[\\]]+\\](:(0*([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))|:0+)?|[0-9A-Fa-f:.%]*:[0-9A-Fa-f:.%]*:[0-9A-Fa-f:.%]*)$",
      "description": "Name or address by which peers reach this machine, with a port if the one for handshakes should be fixed; it grows with the rank where a server has several. Where the variable MOONCAKE_LOCAL_HOSTNAME or LOCAL_HOSTNAME is set it counts before this key, as with other clients, so that machines can share a configuration; the log says so. Default: localhost, which only peers on this machine reach."
    },
    "global_segment_size": {
      "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^([0-9]{1,19} *B?|[0-9]{1,15} *[kK]i?B?|[0-9]{1,12} *Mi?B?|[0-9]{1,9} *(Gi?B?|[gG][bB])|[0-9]{1,7} *Ti?B?)$"}],
      "description": "Memory that this server lends to the store, over all its ranks: an integer or a text such as \"4GiB\"; \"4gb\" is the same, as other clients have it. 0: none. Default: 4gb."
    },
    "local_buffer_size": {
      "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^([0-9]{1,19} *B?|[0-9]{1,15} *[kK]i?B?|[0-9]{1,12} *Mi?B?|[0-9]{1,9} *(Gi?B?|[gG][bB])|[0-9]{1,7} *Ti?B?)$"}],
      "description": "Staging memory of other clients. This one moves pages straight between pools and sockets and needs none; the key is taken so that configurations can be shared."
    },
    "tenant_id": {
      "type": "string",
      "description": "Tenant at the master. Default: default."
    },
    "extra_backend_tag": {
      "type": "string", "pattern": "^[A-Za-z0-9_./-]*$",
      "description": "Put in front of the names of all objects: letters, digits, and any of _ . / -. Servers with another tag find none of them. Default: none."
    },
    "master_metrics_port": {
      "type": "integer", "minimum": 1, "maximum": 65535,
      "description": "Port of the master's HTTP figures, on the same host. Default: 9003."
    },
    "check_server": {
      "type": "boolean",
      "description": "Wait at the start until the master knows a segment, as far as the time for the start allows. Default: false."
    },
    "replica_num": {
      "type": "integer", "minimum": 1, "maximum": 16,
      "description": "Copies of each page, on different segments. Default: 1."
    },
    "soft_pin": {
      "type": "boolean",
      "description": "Stored pages are evicted after those without a pin. Default: false."
    },
    "soft_pin_ttl": {
      "type": "integer", "minimum": 1, "maximum": 18446744073709551,
      "description": "Seconds for which such a pin holds; it needs soft_pin = true. Default: the master's."
    },
    "hard_pin": {
      "type": "boolean",
      "description": "Stored pages are never evicted; a store that is full of them takes nothing more. Default: false."
    },
    "prefer_alloc_in_same_node": {
      "type": "boolean",
      "description": "Segments of this host take pages first. Default: false."
    },
    "enable_group_semantics": {
      "type": "boolean",
      "description": "Pages of one key in several pools are evicted together. Default: false."
    },
    "preferred_segments": {
      "type": "array", "items": {"type": "string"},
      "description": "Names of segments that take pages first. Default: none."
    },
    "prefer_own_segment": {
      "type": "boolean",
      "description": "The memory that this server lends takes its own pages first, where it has room: they are read back without the network, and go when this server goes. Default: false."
    },
    "connections_per_peer": {
      "type": "integer", "minimum": 1, "maximum": 16,
      "description": "Connections that one call uses to one peer. Default: 4."
    },
    "master_connections": {
      "type": "integer", "minimum": 1, "maximum": 16,
      "description": "Connections to the master that calls share; one more is for heartbeats. Default: 2."
    },
    "serve_threads": {
      "type": "integer", "minimum": 1, "maximum": 64,
      "description": "Threads that serve peers. Default: 2."
    },
    "standalone_storage": {"enum": [false], "description": "Has to be false: a separate client process is not used by this version."},
    "client_server_address": {"enum": [""], "description": "Has to be empty: as standalone_storage."},
    "enable_ssd_offload": {"enum": [false], "description": "Has to be false: this version lends no disk."},
    "ssd_offload_path": {"type": "string", "description": "Only with enable_ssd_offload."}
  },
  "dependentSchemas": {
    "soft_pin_ttl": {"if": {"properties": {"soft_pin": {"const": true}}, "required": ["soft_pin"]}, "else": {"properties": {"soft_pin_ttl": false}}}
  }
}"#;

/// Configuration for the conformance suite: a master at its usual port on this machine. Rules run beside one another in the same store, so
/// each has names and a segment of its own.
pub const CHECK_CONFIG: &str = r#"{"master_server_address":"127.0.0.1:50051","local_hostname":"127.0.0.1","global_segment_size":"256MiB","extra_backend_tag":"{scratch}","prefer_own_segment":true}"#;

/// The configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Address of the master, or `etcd://` and the endpoints of the etcd that knows who leads.
    pub master: String,
    /// What several masters of one store call it in etcd.
    pub cluster: String,
    /// How peers find one another.
    pub metadata: String,
    /// Host by which peers reach this one.
    pub host: String,
    /// Port for handshakes; 0 for any.
    pub port: u16,
    /// Bytes that the whole server lends.
    pub segment: u64,
    /// Settings of RDMA; none where TCP moves the bytes.
    pub rdma: Option<kvdock_rdma::Config>,
    /// Network devices, as they were given.
    pub device_name: String,
    /// Tenant.
    pub tenant: String,
    /// In front of all names.
    pub tag: String,
    /// Port of the master's figures.
    pub metrics_port: u16,
    /// Wait for a segment at the start.
    pub check_server: bool,
    /// Copies of each page.
    pub replicas: u64,
    /// Pages are soft-pinned.
    pub soft_pin: bool,
    /// For so many seconds.
    pub soft_pin_ttl: Option<u64>,
    /// Pages are never evicted.
    pub hard_pin: bool,
    /// Segments of this host take pages first.
    pub same_node: bool,
    /// Pages of one key form a group.
    pub groups: bool,
    /// Segments that are tried first.
    pub preferred: Vec<String>,
    /// The own segment is tried before all but those.
    pub prefer_own: bool,
    /// Connections to a peer.
    pub lanes: usize,
    /// Connections to the master.
    pub master_connections: usize,
    /// Threads that serve.
    pub serve_threads: usize,
    /// What the log should say of where this comes from.
    pub notes: Vec<sources::Note>,
}

impl Config {
    /// Reads the configuration of an instance.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the key, what it has and what would be right.
    pub fn read(open: &Open<'_>) -> Result<Config> {
        let name = open.instance_name();
        let given: Map<String, Value> = serde_json::from_str(open.config_json())
            .map_err(|error| fail(name, "", &format!("the configuration is no JSON object: {error}")))?;
        let variable = |name: &str| std::env::var(name).ok();
        let sources::Complete { map, origins, notes } = sources::complete(name, given, &variable)?;
        let mut config = Config::parse(name, &map).map_err(|error| sources::traced(name, error, &origins))?;
        config.notes = notes;
        config.notes.extend(config.unreachable());
        config.port = port_of_rank(name, config.port, open.identity())?;
        if config.rdma.is_some() {
            config.rdma = Some(rdma::settings(name, &config.device_name, open.identity().tp.0.into(), &variable)?);
        }
        Ok(config)
    }

    /// What is to be said where peers on other machines can't reach the memory that this server lends.
    fn unreachable(&self) -> Option<sources::Note> {
        let hosts = self.master.strip_prefix(SCHEME).unwrap_or(&self.master).split([';', ',']);
        let is_far = |address: &str| net::split_address(address.trim()).is_some_and(|(host, _)| !is_loopback(host));
        if self.segment == 0 || !is_loopback(&self.host) || !hosts.into_iter().any(is_far) {
            return None;
        }
        let text = format!(
            "local_hostname is {:?}, which only peers on this machine reach, and the master is elsewhere ({}): they will not find the pages in the \
             memory that is lent here; set it to a name or address of this machine",
            self.host, self.master
        );
        Some(sources::Note { warns: true, text })
    }

    fn parse(instance: &str, map: &Map<String, Value>) -> Result<Config> {
        let mut config = Config {
            master: String::new(),
            cluster: CLUSTER.to_owned(),
            metadata: "P2PHANDSHAKE".to_owned(),
            host: "localhost".to_owned(),
            port: 0,
            segment: 4 << 30,
            rdma: None,
            device_name: String::new(),
            tenant: "default".to_owned(),
            tag: String::new(),
            metrics_port: 9003,
            check_server: false,
            replicas: 1,
            soft_pin: false,
            soft_pin_ttl: None,
            hard_pin: false,
            same_node: false,
            groups: false,
            preferred: Vec::new(),
            prefer_own: false,
            lanes: 4,
            master_connections: 2,
            serve_threads: 2,
            notes: Vec::new(),
        };
        for (key, value) in map.iter().filter(|(_, value)| !value.is_null()) {
            let bad = |right: &str| fail(instance, key, &format!("{value} is not right; it takes {right}"));
            let text = |right: &str| value.as_str().map(str::to_owned).ok_or_else(|| bad(right));
            let number = |from: u64, to: u64| {
                let found = value.as_u64().filter(|number| (from..=to).contains(number));
                found.ok_or_else(|| bad(&format!("a number from {from} to {to}")))
            };
            let switch = || flag(value).ok_or_else(|| bad("true or false"));
            match key.as_str() {
                "master_server_address" => config.master = text("an address such as \"10.0.0.1:50051\"")?,
                "cluster_id" => {
                    let right = "a name such as \"mooncake_cluster\"";
                    config.cluster = text(right)?;
                    if config.cluster.trim_matches('/').is_empty() {
                        return Err(bad(right));
                    }
                }
                "metadata_server" => config.metadata = text("\"P2PHANDSHAKE\" or a URL")?,
                "protocol" => match value.as_str() {
                    Some("tcp") => {}
                    Some("rdma") => config.rdma = Some(kvdock_rdma::Config::default()),
                    _ => return Err(bad("\"tcp\" or \"rdma\"")),
                },
                "local_hostname" => {
                    (config.host, config.port) =
                        host(&text("a host name")?).ok_or_else(|| bad("a host, or host:port"))?
                }
                "global_segment_size" => config.segment = size(value).ok_or_else(|| bad(SIZE))?,
                "local_buffer_size" => drop(size(value).ok_or_else(|| bad(SIZE))?),
                "tenant_id" => {
                    let tenant = text("a name")?;
                    config.tenant = if tenant.trim().is_empty() { "default".to_owned() } else { tenant };
                }
                "extra_backend_tag" => {
                    const RIGHT: &str = "letters, digits, and any of _ . / -";
                    config.tag = text(RIGHT)?;
                    // It becomes part of a regular expression.
                    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_./-".contains(&byte);
                    if !config.tag.bytes().all(plain) {
                        return Err(bad(RIGHT));
                    }
                }
                "master_metrics_port" => config.metrics_port = number(1, 65535)? as u16,
                "check_server" => config.check_server = switch()?,
                "replica_num" => config.replicas = number(1, 16)?,
                "soft_pin" => config.soft_pin = switch()?,
                "soft_pin_ttl" => config.soft_pin_ttl = Some(number(1, u64::MAX / 1000)?),
                "hard_pin" => config.hard_pin = switch()?,
                "prefer_alloc_in_same_node" => config.same_node = switch()?,
                "enable_group_semantics" => config.groups = switch()?,
                "preferred_segments" => {
                    let list = value.as_array().map(|list| list.iter().map(|item| item.as_str().map(str::to_owned)));
                    let list = list.and_then(|list| list.collect::<Option<Vec<String>>>());
                    config.preferred = list.ok_or_else(|| bad("a list of names of segments"))?;
                }
                "prefer_own_segment" => config.prefer_own = switch()?,
                "connections_per_peer" => config.lanes = number(1, 16)? as usize,
                "master_connections" => config.master_connections = number(1, 16)? as usize,
                "serve_threads" => config.serve_threads = number(1, 64)? as usize,
                // Of other ways to move bytes; nothing to check.
                "device_name" => config.device_name = text("names of devices, such as \"mlx5_0,mlx5_1\"")?,
                "ssd_offload_path" => drop(text("a text")?),
                "standalone_storage" | "enable_ssd_offload" if flag(value) == Some(false) => {}
                "client_server_address" if value.as_str() == Some("") => {}
                "standalone_storage" | "client_server_address" => {
                    return Err(bad(
                        "nothing: a separate client process (client_server_address) is not used by this version; name the master in master_server_address",
                    ));
                }
                "enable_ssd_offload" => return Err(bad("false: this version lends no disk to the store")),
                _ => return Err(fail(instance, key, "there is no such key")),
            }
        }
        let wrong_master = |why: &str| {
            let why = format!("\"{}\" is not right; {why}", config.master);
            fail(instance, "master_server_address", &why)
        };
        match crate::member::Election::parse(&config.master, &config.cluster) {
            Ok(Some(_)) => {}
            Err(why) => return Err(wrong_master(&why)),
            Ok(None) if config.master.contains("://") => {
                return Err(wrong_master(
                    "the leader of several masters is found through etcd alone: it takes \"etcd://host:2379\", or the address of one master such as \"10.0.0.1:50051\"",
                ));
            }
            Ok(None) if net::written_address(&config.master).is_none() => {
                return Err(wrong_master("it takes an address such as \"10.0.0.1:50051\""));
            }
            Ok(None) => {}
        }
        crate::metadata::Metadata::parse(&config.metadata).map_err(|why| fail(instance, "metadata_server", &why))?;
        if config.soft_pin_ttl.is_some() && !config.soft_pin {
            return Err(fail(
                instance,
                "soft_pin_ttl",
                "it says how long a soft pin holds; set soft_pin = true with it",
            ));
        }
        Ok(config)
    }
}

/// The port for handshakes of one rank of a server, all of which have one configuration: they follow one another. 0 stays any.
fn port_of_rank(instance: &str, first: u16, identity: &Identity) -> Result<u16> {
    let ranks = [identity.pp, identity.cp, identity.tp];
    let rank = ranks.iter().fold(0, |number, (rank, size)| number * size.max(&1) + rank);
    if first == 0 {
        return Ok(0);
    }
    u16::try_from(u32::from(first) + rank).map_err(|_| {
        let what =
            format!("its port is {first}, and rank {rank} has none so far after it; it takes a lower one, or none");
        fail(instance, "local_hostname", &what)
    })
}

/// Whether a host is this machine to whoever asks.
pub fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.starts_with("127.") || host == "::1"
}

/// What masters call their store unless they are told.
const CLUSTER: &str = "mooncake_cluster";

const SIZE: &str = "a number of bytes such as 1073741824, \"4GiB\" or \"4gb\"";

fn fail(instance: &str, key: &str, what: &str) -> Error {
    let dot = if key.is_empty() { "" } else { "." };
    Error::new(ErrorKind::InvalidConfig, format!("storage.{instance}{dot}{key}: {what}"))
}

/// True and false, also as the texts that environment variables hold; an empty one is false.
fn flag(value: &Value) -> Option<bool> {
    if value.as_str() == Some("") { Some(false) } else { values::flag(value) }
}

/// A host, perhaps with a port.
fn host(text: &str) -> Option<(String, u16)> {
    // An IPv6 address without brackets has colons of its own.
    if text.matches(':').count() > 1 && !text.starts_with('[') {
        let is_address = text.chars().all(|c| c.is_ascii_hexdigit() || ":.%".contains(c));
        return is_address.then(|| (text.to_owned(), 0));
    }
    match text.rsplit_once(':') {
        Some((host, port)) if !text.ends_with(']') => {
            Some((net::written_host(host)?.to_owned(), net::written_port(port)?))
        }
        _ => Some((net::written_host(text)?.to_owned(), 0)),
    }
}

/// A size: an integer, or digits with a unit. `gb` in any case is what other clients of the store take it for: 2^30.
fn size(value: &Value) -> Option<u64> {
    let Some(text) = value.as_str().map(str::trim) else { return values::size(value) };
    match text.len().checked_sub(2).and_then(|at| text.split_at_checked(at)) {
        Some((number, unit)) if unit.eq_ignore_ascii_case("gb") => values::size(&Value::from(format!("{number}GiB"))),
        _ => values::size(value),
    }
}

#[cfg(test)]
mod tests;
