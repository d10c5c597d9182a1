//! The configuration `storage.<instance>.*`, and the environment variables that other nodes of UMBP read.

mod distributed;
mod environment;
mod refused;
mod schema;
#[cfg(test)]
mod tests;
mod types;
mod values;

use std::time::Duration;

use kvdock_plugin_api::values::{SIZE, flag, size};
use kvdock_plugin_api::{Error, ErrorKind, Identity, Open, Result};
use serde_json::{Map, Value};

use crate::linker::Cuts;
use crate::segment::MOST_SEGMENT;
pub use distributed::{DataPlane, Distributed};
pub use schema::SCHEMA;
pub use types::{Copies, Dram, IoBackend, Pipeline, Policy, Role, Scheme, Ssd, Standalone};
use values::{default_dir, expand, numbers, texts};

/// Configuration for the conformance suite: memory and disk of this process.
pub const CHECK_CONFIG: &str = r#"{"ssd_storage_dir":"{scratch}","dram_capacity_bytes":"256MiB","dram_page_size":4096,"ssd_capacity_bytes":"1GiB","ssd_segment_size_bytes":"64MiB"}"#;

/// The configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// How pages are named.
    pub scheme: Scheme,
    /// Stands before the names of side pools in SGLang's scheme, and of all objects in ours.
    pub tag: String,
    /// Memory.
    pub dram: Dram,
    /// Disk; none for memory alone.
    pub ssd: Option<Ssd>,
    /// What this process may do in the directory.
    pub role: Role,
    /// What makes room.
    pub policy: Policy,
    /// Pages that the prefix-aware policy looks at.
    pub window: usize,
    /// Pages read from disk come back to memory.
    pub promote: bool,
    /// Copies to disk.
    pub pipeline: Pipeline,
    /// How loads and offloads of the linker face are cut.
    pub cuts: Cuts,
    /// Ranges of one call to the server.
    pub ranges_per_call: usize,
    /// The server of the node; none for memory and disk of this process.
    pub standalone: Option<Standalone>,
    /// The cluster that this process is a node of.
    pub distributed: Option<Distributed>,
    /// What memory alone holds is shared by the instances of this process that have this name; none for a store of its own.
    pub shared: Option<String>,
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
        let whole = environment::complete(given, &variable);
        let rank = distributed::rank(open.identity(), &variable);
        let mut config = Config::parse(name, &whole, &variable, rank)?;
        config.place(open.identity());
        config.tell_apart(name, open.identity());
        // The host asks for names of another engine in the namespace that goes with them.
        let namespace: Value = serde_json::from_str(&open.identity().namespace_json).unwrap_or_default();
        if namespace.get("key_scheme").and_then(Value::as_str) == Some("sglang") {
            config.scheme = Scheme::Sglang;
        }
        Ok(config)
    }

    fn defaults() -> Config {
        Config {
            scheme: Scheme::Kvdock,
            tag: String::new(),
            dram: Dram {
                capacity: 4 << 30,
                page: 65536,
                high: 0.9,
                low: 0.7,
                huge_page: None,
                numa_nodes: Vec::new(),
                numa_strict: false,
                prefault: false,
                prefault_threads: 0,
                copies: Copies { write_threads: 4, read_threads: 4, worth: 1 << 20, past_caches: Some(32 << 10) },
            },
            ssd: None,
            role: Role::Standalone,
            policy: Policy::Lru,
            window: 16,
            promote: true,
            pipeline: Pipeline { background: true, queue: 4096, workers: 2, batch: 128 },
            cuts: Cuts { layer_group: 8, coalesce: 1024 },
            ranges_per_call: 8192,
            standalone: None,
            distributed: None,
            shared: None,
        }
    }

    fn parse(
        instance: &str,
        map: &Map<String, Value>,
        variable: &dyn Fn(&str) -> Option<String>,
        rank: u32,
    ) -> Result<Config> {
        let mut config = Config::defaults();
        let mut ssd = Ssd {
            dirs: Vec::new(),
            capacity: 32 << 30,
            segment: 256 << 20,
            io: IoBackend::Uring,
            queue_depth: 4096,
            strict: true,
            high: 0.9,
            low: 0.7,
            direct: true,
            verify: true,
            threads: 4,
            shard_threads: 0,
            single_flight: true,
        };
        let mut server = Standalone {
            address: String::new(),
            startup: Duration::from_secs(30),
            node_id: String::new(),
            node_address: String::new(),
            tags: Vec::new(),
            key_handles: 128,
            message: 64 << 20,
        };
        let (mut nt_copy, mut nt_bytes) = (true, 32 << 10);
        let mut older_role = None;
        let mut ssd_enabled = true;
        let (mut huge, mut huge_size) = (false, 2u64 << 20);
        let mut page_given = false;
        let mut cluster = distributed::Reader::default();
        for (key, value) in map.iter().filter(|(_, value)| !value.is_null()) {
            let bad = |right: &str| fail(instance, key, &format!("{value} is not right; it takes {right}"));
            let text = |right: &str| value.as_str().map(str::to_owned).ok_or_else(|| bad(right));
            let number = |from: u64, to: u64| {
                let found = value.as_u64().or_else(|| value.as_str()?.trim().parse().ok());
                let found = found.filter(|number| (from..=to).contains(number));
                found.ok_or_else(|| bad(&format!("a number from {from} to {to}")))
            };
            let bytes = |least: u64| {
                let found = size(value).filter(|size| *size >= least);
                found.ok_or_else(|| bad(&format!("{SIZE}, at least {least}")))
            };
            let part = || {
                let found = value.as_f64().or_else(|| value.as_str()?.trim().parse().ok());
                found
                    .filter(|part| *part > 0.0 && *part <= 1.0)
                    .ok_or_else(|| bad("a part such as 0.9: over 0, at most 1"))
            };
            let switch = || flag(value).ok_or_else(|| bad("true or false"));
            if cluster.take(instance, key, value)? {
                continue;
            }
            match key.as_str() {
                "names" => {
                    config.scheme = match value.as_str() {
                        Some("kvdock") => Scheme::Kvdock,
                        Some("sglang") => Scheme::Sglang,
                        _ => return Err(bad("\"kvdock\" or \"sglang\"")),
                    }
                }
                "extra_backend_tag" => {
                    const RIGHT: &str = "letters, digits, and any of _ . / -";
                    config.tag = text(RIGHT)?;
                    if !config.tag.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_./-".contains(&byte)) {
                        return Err(bad(RIGHT));
                    }
                }
                "dram_capacity_bytes" => config.dram.capacity = bytes(4096)?,
                "dram_page_size" => {
                    config.dram.page = bytes(4096)?;
                    if !config.dram.page.is_multiple_of(4096) || config.dram.page > 1 << 30 {
                        return Err(bad("a multiple of 4096, at most 1GiB"));
                    }
                    page_given = true;
                }
                "dram_high_watermark" => config.dram.high = part()?,
                "dram_low_watermark" => config.dram.low = part()?,
                "dram_use_hugepages" => huge = switch()?,
                "dram_hugepage_size" => {
                    huge_size = bytes(4096)?;
                    if !huge_size.is_power_of_two() {
                        return Err(bad("a power of two"));
                    }
                }
                "dram_numa_node" => match value.as_i64().or_else(|| value.as_str()?.trim().parse().ok()) {
                    Some(-1) => {}
                    Some(node) if (0..1024).contains(&node) => config.dram.numa_nodes.push(node as u32),
                    _ => return Err(bad("a NUMA node, or -1 for none")),
                },
                "dram_numa_nodes" => {
                    let nodes = numbers(value).filter(|nodes| nodes.iter().all(|node| *node < 1024));
                    config.dram.numa_nodes.extend(nodes.ok_or_else(|| bad("a list of NUMA nodes"))?);
                }
                "dram_numa_strict" => config.dram.numa_strict = switch()?,
                "dram_prefault" => config.dram.prefault = switch()?,
                "dram_prefault_threads" => config.dram.prefault_threads = number(0, 256)? as usize,
                "dram_write_threads" => config.dram.copies.write_threads = number(1, 64)? as usize,
                "dram_read_threads" => config.dram.copies.read_threads = number(1, 64)? as usize,
                "dram_copy_threads_min_bytes" => config.dram.copies.worth = bytes(1)?,
                "dram_nt_copy" => nt_copy = switch()?,
                "dram_nt_copy_min_bytes" => nt_bytes = bytes(0)? as usize,
                "ssd_enabled" => ssd_enabled = switch()?,
                "ssd_storage_dir" => {
                    let list = text("a directory, or several with commas between them")?;
                    let dirs = list.split(',').map(str::trim).filter(|dir| !dir.is_empty() && !dir.contains('\0'));
                    ssd.dirs = dirs.map(|dir| expand(dir, variable)).collect();
                    if ssd.dirs.is_empty() || ssd.dirs.len() > 64 {
                        return Err(bad("1 to 64 directories with commas between them"));
                    }
                }
                "ssd_capacity_bytes" => ssd.capacity = bytes(65536)?,
                "ssd_segment_size_bytes" => {
                    ssd.segment = bytes(16384)?;
                    if ssd.segment > MOST_SEGMENT {
                        return Err(bad("at most 64GiB"));
                    }
                }
                "ssd_queue_depth" => ssd.queue_depth = number(1, 65536)? as u32,
                "ssd_io_backend" => {
                    ssd.io = match value.as_str() {
                        Some("io_uring") => IoBackend::Uring,
                        Some("posix") => IoBackend::Posix,
                        _ => return Err(bad("\"io_uring\" or \"posix\"")),
                    }
                }
                "ssd_durability_mode" => {
                    ssd.strict = match value.as_str() {
                        Some("strict" | "sync") => true,
                        Some("relaxed" | "async") => false,
                        _ => return Err(bad("\"strict\" or \"relaxed\"")),
                    }
                }
                "ssd_backend" => match value.as_str() {
                    Some("file") => {}
                    Some("spdk" | "spdk_proxy") => {
                        return Err(bad(
                            "\"file\": drives without a file system (spdk, also by UMBP_SPDK_NVME_PCI) are not in this version",
                        ));
                    }
                    _ => return Err(bad("\"file\"")),
                },
                "ssd_high_watermark" => ssd.high = part()?,
                "ssd_low_watermark" => ssd.low = part()?,
                "ssd_direct_io" => ssd.direct = switch()?,
                "ssd_verify_crc" => ssd.verify = switch()?,
                "ssd_tier_io_threads" => ssd.threads = number(1, 64)? as usize,
                "ssd_shard_io_threads" => ssd.shard_threads = number(0, 64)? as usize,
                "ssd_single_flight_reads" => ssd.single_flight = switch()?,
                "ssd_copy_async" => config.pipeline.background = switch()?,
                "ssd_copy_queue_depth" => config.pipeline.queue = number(1, 1 << 20)? as usize,
                "ssd_copy_worker_threads" => config.pipeline.workers = number(1, 64)? as usize,
                "ssd_copy_batch_max_ops" => config.pipeline.batch = number(1, 65536)? as usize,
                "role" => {
                    config.role = match value.as_str() {
                        Some("standalone") => Role::Standalone,
                        Some("leader") => Role::Leader,
                        Some("follower") => Role::Follower,
                        _ => return Err(bad("\"standalone\", \"leader\" or \"follower\"")),
                    }
                }
                "follower_mode" | "force_ssd_copy_on_write" => {
                    let named = if key == "follower_mode" { Role::Follower } else { Role::Leader };
                    if switch()? && older_role.replace(named).is_some_and(|other| other != named) {
                        return Err(bad("one of the two: a follower stores nothing"));
                    }
                }
                "eviction_policy" => {
                    config.policy = match value.as_str() {
                        Some("lru") => Policy::Lru,
                        Some("prefix_aware_lru") => Policy::PrefixAwareLru,
                        _ => return Err(bad("\"lru\" or \"prefix_aware_lru\"")),
                    }
                }
                "eviction_candidate_window" => config.window = number(1, 65536)? as usize,
                "auto_promote_on_read" => config.promote = switch()?,
                "layer_group" => config.cuts.layer_group = number(1, 65536)? as usize,
                "ranges_per_call" => config.ranges_per_call = number(1, 1 << 20)? as usize,
                "offload_coalesce_pages" => config.cuts.coalesce = number(1, 1 << 20)? as usize,
                "load_split" if flag(value) == Some(false) => {}
                "load_split" => {
                    return Err(bad("false: ranks that hold different pages would wait for one another for ever"));
                }
                "standalone_address" => {
                    server.address = text("the address of a Unix socket")?;
                    if !server.address.is_empty() && crate::standalone::paths(&server.address).is_none() {
                        return Err(bad(
                            "the address of a Unix socket such as \"unix:///run/umbp/standalone/node0.grpc.sock\", at most 107 bytes",
                        ));
                    }
                }
                "standalone_startup_timeout_ms" => server.startup = Duration::from_millis(number(1, 86_400_000)?),
                "standalone_auto_start" if flag(value) == Some(false) => {}
                "standalone_auto_start" => {
                    return Err(bad("false: this version starts no server; start umbp_standalone_server beside it"));
                }
                "key_handle_slots" => server.key_handles = number(0, 1 << 20)? as usize,
                "grpc_max_message_bytes" => server.message = bytes(65536)?.min(1 << 31) as usize,
                "node_id" => server.node_id = text("a name")?,
                "node_address" => server.node_address = text("an address")?,
                "node_tags" | "tags" => server.tags = texts(value).ok_or_else(|| bad("a list of texts"))?,
                _ => match refused::look(key, value) {
                    Some(Ok(())) => {}
                    Some(Err(right)) => return Err(bad(right)),
                    None => return Err(fail(instance, key, "there is no such key")),
                },
            }
        }
        config.dram.huge_page = huge.then_some(huge_size);
        config.dram.copies.past_caches = nt_copy.then_some(nt_bytes);
        config.dram.numa_nodes.sort_unstable();
        config.dram.numa_nodes.dedup();
        match older_role {
            Some(older) if config.role == Role::Standalone => config.role = older,
            Some(older) if config.role != older => {
                let what = format!("it says {:?}, and follower_mode or force_ssd_copy_on_write {older:?}", config.role);
                return Err(fail(instance, "role", &what));
            }
            _ => {}
        }
        let marks = |key: &str, low: f64, high: f64| {
            let what = format!("{low} is not below the high watermark, {high}");
            if low < high { Ok(()) } else { Err(fail(instance, key, &what)) }
        };
        marks("dram_low_watermark", config.dram.low, config.dram.high)?;
        marks("ssd_low_watermark", ssd.low, ssd.high)?;
        config.fit_page(page_given);
        config.distributed = cluster.end(instance, &config, &server, rank)?;
        if !server.address.is_empty() {
            config.standalone = Some(server);
        }
        let wanted = config.distributed.as_ref().map_or(ssd_enabled, |cluster| cluster.disk);
        if wanted && config.standalone.is_none() {
            if ssd.dirs.is_empty() {
                ssd.dirs.push(default_dir(variable).ok_or_else(|| {
                    fail(instance, "ssd_storage_dir", "it is needed, for there is neither XDG_CACHE_HOME nor HOME")
                })?);
            }
            for dir in &mut ssd.dirs {
                *dir = std::path::absolute(&*dir)
                    .map_err(|error| fail(instance, "ssd_storage_dir", &format!("{}: {error}", dir.display())))?;
            }
            // Room for one segment is kept free, to write anew what still counts of a sparse one.
            let share = ssd.capacity / ssd.dirs.len() as u64 / 16;
            ssd.segment = ssd.segment.min(share / 4096 * 4096).max(8192);
            config.ssd = Some(ssd);
        } else if config.role == Role::Follower {
            return Err(fail(instance, "role", "a follower reads a leader's segments; set ssd_enabled = true with it"));
        } else if config.role == Role::Leader && config.standalone.is_none() {
            return Err(fail(
                instance,
                "role",
                "a leader writes every page to segments; set ssd_enabled = true with it",
            ));
        }
        Ok(config)
    }

    /// A pool has at least eight pages.
    fn fit_page(&mut self, given: bool) {
        let most = (self.dram.capacity / 8).max(4096);
        if self.dram.page > most && !given {
            self.dram.page = 1 << most.ilog2();
        }
        self.dram.page = self.dram.page.min(self.dram.capacity / 4096 * 4096);
    }

    /// Each rank of a server has a directory of its own, unless ranks share one by their roles, or hold the same bytes, as context-parallel ones do: then
    /// one of them stores, and all read. A node of a cluster has one in each case.
    fn place(&mut self, identity: &Identity) {
        if self.role != Role::Standalone {
            return;
        }
        let alike = identity.replicated && self.distributed.is_none();
        let tp = if alike { (0, 1) } else { identity.tp };
        let cp = if self.distributed.is_none() { (0, 1) } else { identity.cp };
        let ranks = [("dp", identity.dp), ("pp", identity.pp), ("cp", cp), ("tp", tp)];
        let name: Vec<String> =
            ranks.iter().filter(|(_, rank)| rank.1 > 1).map(|(what, rank)| format!("{what}{}", rank.0)).collect();
        if let Some(ssd) = self.ssd.as_mut().filter(|_| !name.is_empty()) {
            ssd.dirs.iter_mut().for_each(|dir| dir.push(name.join("_")));
        }
    }

    /// Ranks of one server have one configuration: where a name has to be a rank's own, its number is added; where they have to share memory, they get
    /// a name for it.
    fn tell_apart(&mut self, instance: &str, identity: &Identity) {
        if !distributed::is_one_of_several(identity) {
            return;
        }
        let server = self.standalone.as_mut().map(|server| &mut server.node_id);
        let node = self.distributed.as_mut().map(|cluster| &mut cluster.node_id);
        for id in server.into_iter().chain(node).filter(|id| !id.is_empty()) {
            id.push_str(&format!(":dp{}:pp{}:tp{}", identity.dp.0, identity.pp.0, identity.tp.0));
            if identity.cp.1 > 1 {
                id.push_str(&format!(":cp{}", identity.cp.0));
            }
        }
        let alone = self.ssd.is_none() && self.standalone.is_none() && self.distributed.is_none();
        if alone && (identity.replicated || identity.cp.1 > 1) {
            let tp = if identity.replicated { 0 } else { identity.tp.0 };
            self.shared = Some(format!("{instance} dp{} pp{} tp{tp}", identity.dp.0, identity.pp.0));
        }
    }
}

/// An error about a key.
pub fn fail(instance: &str, key: &str, what: &str) -> Error {
    let dot = if key.is_empty() { "" } else { "." };
    Error::new(ErrorKind::InvalidConfig, format!("storage.{instance}{dot}{key}: {what}"))
}
