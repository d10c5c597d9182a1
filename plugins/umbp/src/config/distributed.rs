//! Settings of the mode with a master.

use std::time::Duration;

use kvdock_plugin_api::values::{SIZE, flag, size};
use kvdock_plugin_api::{Identity, Result};
use serde_json::{Map, Value};

use super::values::texts;
use super::{Config, Policy, Role, Standalone, fail};
use crate::distributed::pool::Bounds;

/// What moves bytes between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataPlane {
    /// RDMA where there is a device, else TCP.
    Auto,
    /// RDMA; this machine has to have a device.
    Rdma,
    /// TCP.
    Tcp,
}

/// The mode with a master.
#[derive(Debug, Clone, PartialEq)]
pub struct Distributed {
    /// Address of the master.
    pub master: String,
    /// Name of this node; empty for one that is made up.
    pub node_id: String,
    /// Its host; empty for the address from which the master is reached.
    pub node_address: String,
    /// Its tags.
    pub tags: Vec<String>,
    /// Port of its service; 0 for any.
    pub peer_port: u16,
    /// Host by which others reach its bytes; empty for that of the node.
    pub data_host: String,
    /// Port of them; 0 for any.
    pub data_port: u16,
    /// What moves them.
    pub data_plane: DataPlane,
    /// RDMA devices; none for all.
    pub devices: Vec<String>,
    /// Segments hold what memory has no room for.
    pub disk: bool,
    /// What was read from other nodes is kept here too.
    pub cache_fetches: bool,
    /// Unless it has more bytes; 0 for no limit.
    pub admission: u64,
    /// And unless memory is used to this part.
    pub high: f64,
    /// How long an object stays where another node was told it is.
    pub lease: Duration,
    /// Events that are told at once; 0 for never.
    pub flush_events: usize,
    /// What a heartbeat carries.
    pub bounds: Bounds,
    /// How long one may take.
    pub heartbeat_timeout: Duration,
    /// Between two reports of figures.
    pub metrics: Duration,
    /// How long leaving may take.
    pub shutdown: Duration,
}

/// One port, which grows with the rank, or one for each rank.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Ports {
    From(u16),
    Each(Vec<u16>),
}

impl Ports {
    fn read(value: &Value) -> Option<Ports> {
        let port = |value: &Value| u16::try_from(value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())?).ok();
        match value {
            Value::Array(list) => list.iter().map(port).collect::<Option<Vec<_>>>().map(Ports::Each),
            Value::String(list) if list.contains(',') => {
                list.split(',').map(|port| port.trim().parse().ok()).collect::<Option<Vec<_>>>().map(Ports::Each)
            }
            one => port(one).map(Ports::From),
        }
    }

    fn of(&self, instance: &str, key: &str, rank: u32) -> Result<u16> {
        let port = match self {
            Ports::From(0) => Some(0),
            Ports::From(first) => u16::try_from(u32::from(*first) + rank).ok(),
            Ports::Each(list) => list.get(rank as usize).copied(),
        };
        port.ok_or_else(|| fail(instance, key, &format!("it has no port for rank {rank}")))
    }
}

/// The keys of the mode, as they are read.
#[derive(Debug)]
pub struct Reader {
    found: Distributed,
    peer_ports: Ports,
    data_ports: Ports,
    /// There is a key about segments, and they are switched on or off.
    disk: bool,
    disk_switch: Option<bool>,
}

impl Default for Reader {
    fn default() -> Reader {
        let found = Distributed {
            master: String::new(),
            node_id: String::new(),
            node_address: String::new(),
            tags: Vec::new(),
            peer_port: 0,
            data_host: String::new(),
            data_port: 0,
            data_plane: DataPlane::Auto,
            devices: Vec::new(),
            disk: false,
            cache_fetches: true,
            admission: 16 << 20,
            high: 0.9,
            lease: Duration::from_millis(500),
            flush_events: 128,
            bounds: Bounds { events: 1024, bundles: 16 },
            heartbeat_timeout: Duration::from_secs(5),
            metrics: Duration::from_secs(1),
            shutdown: Duration::from_secs(3),
        };
        Reader { found, peer_ports: Ports::From(0), data_ports: Ports::From(0), disk: false, disk_switch: None }
    }
}

impl Reader {
    /// Takes a key of this mode. Says whether it is one.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the key, what it has and what would be right.
    pub fn take(&mut self, instance: &str, key: &str, value: &Value) -> Result<bool> {
        let bad = |right: &str| fail(instance, key, &format!("{value} is not right; it takes {right}"));
        let text = |right: &str| value.as_str().map(str::to_owned).ok_or_else(|| bad(right));
        let number = |from: u64, to: u64| {
            let found = value.as_u64().or_else(|| value.as_str()?.trim().parse().ok());
            let found = found.filter(|number| (from..=to).contains(number));
            found.ok_or_else(|| bad(&format!("a number from {from} to {to}")))
        };
        let time = |from: u64| number(from, 86_400_000).map(Duration::from_millis);
        let bytes = || size(value).ok_or_else(|| bad(SIZE));
        let ports = || Ports::read(value).ok_or_else(|| bad("a port, or a list with one for each rank"));
        let switch = || flag(value).ok_or_else(|| bad("true or false"));
        let found = &mut self.found;
        match key {
            "master_address" => {
                const RIGHT: &str = "the address of a umbp_master such as \"10.0.0.1:50051\"";
                found.master = text(RIGHT)?;
                let good =
                    |(host, port): (&str, &str)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0);
                let address = &found.master;
                if !address.is_empty()
                    && (address.contains(['/', '@', ' ']) || !address.rsplit_once(':').is_some_and(good))
                {
                    return Err(bad(RIGHT));
                }
            }
            "auto_heartbeat" if flag(value) == Some(true) => {}
            "auto_heartbeat" => return Err(bad("true: the master forgets a node that sends no heartbeats")),
            "peer_service_port" => self.peer_ports = ports()?,
            "io_engine_port" => self.data_ports = ports()?,
            "io_engine_host" => found.data_host = text("a host by which other nodes reach this one")?,
            "data_plane" => {
                found.data_plane = match value.as_str() {
                    Some("auto") => DataPlane::Auto,
                    Some("rdma") => DataPlane::Rdma,
                    Some("tcp") => DataPlane::Tcp,
                    _ => return Err(bad("\"auto\", \"rdma\" or \"tcp\"")),
                }
            }
            "rdma_devices" => found.devices = texts(value).ok_or_else(|| bad("names such as \"mlx5_0,mlx5_1\""))?,
            "cache_remote_fetches" => found.cache_fetches = switch()?,
            "admission_max_block_bytes" => found.admission = bytes()?,
            "dram_read_lease_ms" => found.lease = time(1)?,
            "auto_flush_event_threshold" => found.flush_events = number(0, 1 << 32)? as usize,
            "heartbeat_events_per_bundle" => found.bounds.events = number(1, 1 << 20)? as usize,
            "heartbeat_max_bundles_per_rpc" => found.bounds.bundles = number(1, 1 << 20)? as usize,
            "heartbeat_rpc_timeout_ms" => found.heartbeat_timeout = time(1)?,
            "metrics_report_interval_ms" => found.metrics = time(10)?,
            "rpc_shutdown_timeout_ms" => found.shutdown = time(1)?,
            // Nothing is staged here: bytes go between memory and network at once.
            "staging_buffer_size" | "ranged_scratch_size" | "ssd_staging_buffer_size" => {
                bytes()?;
            }
            "ssd_staging_buffer_slots" => {
                number(1, 1 << 20)?;
            }
            _ => {
                if key == "ssd_enabled" {
                    self.disk_switch = flag(value);
                } else if key.starts_with("ssd_") {
                    self.disk = true;
                }
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The mode, if a master was named; with what other keys mean for it.
    ///
    /// # Errors
    /// When there are keys that go with another mode only.
    pub fn end(
        mut self,
        instance: &str,
        config: &Config,
        server: &Standalone,
        rank: u32,
    ) -> Result<Option<Distributed>> {
        if self.found.master.is_empty() {
            return Ok(None);
        }
        if !server.address.is_empty() {
            let what = "standalone_address is set as well; name a master to be a node, or a server to use its memory";
            return Err(fail(instance, "master_address", what));
        }
        if config.role != Role::Standalone {
            return Err(fail(
                instance,
                "role",
                "leaders and followers share a directory, and a node of a master has none",
            ));
        }
        if config.policy != Policy::Lru {
            return Err(fail(instance, "eviction_policy", "a node of a master has \"lru\""));
        }
        let found = &mut self.found;
        found.disk = self.disk_switch.unwrap_or(self.disk);
        found.node_id.clone_from(&server.node_id);
        found.node_address.clone_from(&server.node_address);
        found.tags.clone_from(&server.tags);
        found.high = config.dram.high;
        found.peer_port = self.peer_ports.of(instance, "peer_service_port", rank)?;
        found.data_port = self.data_ports.of(instance, "io_engine_port", rank)?;
        Ok(Some(self.found))
    }
}

/// Whether a worker is one of several ranks of its server.
pub fn is_one_of_several(identity: &Identity) -> bool {
    [identity.dp, identity.pp, identity.cp, identity.tp].iter().any(|(_, size)| *size > 1)
}

/// The number of a worker among all of its server. Where ranks are processes, their launcher may have numbered them.
pub fn rank(identity: &Identity, variable: &dyn Fn(&str) -> Option<String>) -> u32 {
    if !is_one_of_several(identity)
        && let Some(local) = variable("LOCAL_RANK").and_then(|text| text.trim().parse().ok())
    {
        return local;
    }
    [identity.dp, identity.pp, identity.cp, identity.tp]
        .iter()
        .fold(0, |number, (rank, size)| number * size.max(&1) + rank)
}

/// Takes out of the environment's part what does not go with the mode that was chosen.
pub fn keep_apart(given: &Map<String, Value>, environment: &mut Map<String, Value>) {
    let names = |map: &Map<String, Value>, key: &str| {
        map.get(key).and_then(Value::as_str).is_some_and(|address| !address.is_empty())
    };
    if names(given, "master_address") {
        environment.retain(|key, _| !key.starts_with("standalone_"));
    } else if given.contains_key("standalone_address") || environment.contains_key("standalone_address") {
        environment.remove("master_address");
    }
    if names(given, "master_address") || (!given.contains_key("master_address") && names(environment, "master_address"))
    {
        environment.retain(|key, _| key != "role" && key != "eviction_policy");
        // A node has segments where somebody asks for them: what the environment says of those of others is not that.
        let asks = environment.get("ssd_enabled").and_then(flag) == Some(true);
        let about = |key: &String| key.starts_with("ssd_") && !key.starts_with("ssd_staging_");
        if !asks && !given.keys().any(about) {
            environment.retain(|key, _| !key.starts_with("ssd_"));
        }
    }
}
