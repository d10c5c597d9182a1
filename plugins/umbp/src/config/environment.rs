//! Environment variables that other nodes of UMBP read too.

use serde_json::{Map, Value};

/// Names of variables and the keys they stand for.
const VARIABLES: &[(&str, &str)] = &[
    ("UMBP_DRAM_CAPACITY", "dram_capacity_bytes"),
    ("UMBP_EMBEDDED_DRAM_PAGE_SIZE", "dram_page_size"),
    ("UMBP_DRAM_HIGH_WM", "dram_high_watermark"),
    ("UMBP_DRAM_LOW_WM", "dram_low_watermark"),
    ("UMBP_DRAM_USE_HUGEPAGES", "dram_use_hugepages"),
    ("UMBP_DRAM_HUGEPAGE_SIZE", "dram_hugepage_size"),
    ("UMBP_DRAM_NUMA_NODE", "dram_numa_node"),
    ("UMBP_DRAM_NUMA_STRICT", "dram_numa_strict"),
    ("UMBP_DRAM_PREFAULT", "dram_prefault"),
    ("UMBP_DRAM_PREFAULT_THREADS", "dram_prefault_threads"),
    // What says more comes later, and counts.
    ("UMBP_DRAM_COPY_THREADS", "dram_read_threads"),
    ("UMBP_DRAM_COPY_THREADS", "dram_write_threads"),
    ("UMBP_DRAM_READ_THREADS", "dram_read_threads"),
    ("UMBP_DRAM_WRITE_THREADS", "dram_write_threads"),
    ("UMBP_DRAM_COPY_THREADS_MIN_BYTES", "dram_copy_threads_min_bytes"),
    ("UMBP_DRAM_NT_COPY", "dram_nt_copy"),
    ("UMBP_DRAM_NT_COPY_MIN_BYTES", "dram_nt_copy_min_bytes"),
    ("UMBP_SSD_ENABLED", "ssd_enabled"),
    ("UMBP_SSD_DIR", "ssd_storage_dir"),
    ("UMBP_SSD_CAPACITY", "ssd_capacity_bytes"),
    ("UMBP_SSD_DURABILITY", "ssd_durability_mode"),
    ("UMBP_SSD_BACKEND", "ssd_backend"),
    ("UMBP_SSD_HIGH_WM", "ssd_high_watermark"),
    ("UMBP_SSD_LOW_WM", "ssd_low_watermark"),
    ("UMBP_SSD_DIRECT_IO", "ssd_direct_io"),
    ("UMBP_SSD_VERIFY_CRC", "ssd_verify_crc"),
    ("UMBP_SSD_TIER_IO_THREADS", "ssd_tier_io_threads"),
    ("UMBP_SSD_SHARD_IO_THREADS", "ssd_shard_io_threads"),
    ("UMBP_SSD_SINGLE_FLIGHT", "ssd_single_flight_reads"),
    ("UMBP_BACKEND_POLICY", "backend_policy_path"),
    ("UMBP_EVICTION_POLICY", "eviction_policy"),
    ("UMBP_ROLE", "role"),
    ("UMBP_LAYER_GROUP", "layer_group"),
    ("UMBP_RANGES_PER_CALL", "ranges_per_call"),
    ("UMBP_OFFLOAD_COALESCE_PAGES", "offload_coalesce_pages"),
    ("UMBP_LOAD_SPLIT", "load_split"),
    ("UMBP_STANDALONE_ADDRESS", "standalone_address"),
    ("UMBP_STANDALONE_STARTUP_TIMEOUT_MS", "standalone_startup_timeout_ms"),
    ("UMBP_STANDALONE_AUTO_START", "standalone_auto_start"),
    ("UMBP_DISABLE_ZERO_COPY_REGISTER", "disable_zero_copy_register"),
    ("UMBP_KEY_HANDLE_SLOTS", "key_handle_slots"),
    ("UMBP_GRPC_MAX_MESSAGE_BYTES", "grpc_max_message_bytes"),
    ("UMBP_NODE_ID", "node_id"),
    ("UMBP_NODE_ADDRESS", "node_address"),
    ("UMBP_NODE_TAGS", "node_tags"),
    ("UMBP_MASTER_ADDRESS", "master_address"),
    ("UMBP_PEER_SERVICE_PORT", "peer_service_port"),
    ("UMBP_IO_ENGINE_HOST", "io_engine_host"),
    ("UMBP_IO_ENGINE_PORT", "io_engine_port"),
    ("UMBP_CACHE_REMOTE_FETCHES", "cache_remote_fetches"),
    ("UMBP_DRAM_READ_LEASE_MS", "dram_read_lease_ms"),
    ("UMBP_AUTO_FLUSH_EVENT_THRESHOLD", "auto_flush_event_threshold"),
    ("UMBP_HEARTBEAT_EVENTS_PER_BUNDLE", "heartbeat_events_per_bundle"),
    ("UMBP_HEARTBEAT_MAX_BUNDLES_PER_RPC", "heartbeat_max_bundles_per_rpc"),
    ("UMBP_HEARTBEAT_RPC_TIMEOUT_MS", "heartbeat_rpc_timeout_ms"),
    ("UMBP_METRICS_REPORT_INTERVAL_MS", "metrics_report_interval_ms"),
    ("UMBP_RPC_SHUTDOWN_TIMEOUT_MS", "rpc_shutdown_timeout_ms"),
];

/// Completes a configuration from the environment. What the configuration itself says counts, also for the mode: a master that the
/// environment names for others is none of ours where the configuration names a server, and the other way round.
pub fn complete(given: Map<String, Value>, variable: &dyn Fn(&str) -> Option<String>) -> Map<String, Value> {
    let mut whole = Map::new();
    for (name, key) in VARIABLES {
        if let Some(text) = variable(name).filter(|text| !text.is_empty()) {
            let number = text.trim().trim_start_matches('+').parse::<u64>().ok().filter(|_| {
                key.ends_with("_bytes") || key.ends_with("_size") || key.ends_with("_ms") || key.ends_with("_threads")
            });
            let text = if *key == "role" { text.to_ascii_lowercase() } else { text };
            whole.insert((*key).to_owned(), number.map_or(Value::String(text), Value::from));
        }
    }
    // Nodes of UMBP take a drive named so for the one to use, unless they are told of another way.
    if variable("UMBP_SPDK_NVME_PCI").is_some_and(|text| !text.is_empty()) {
        whole.entry("ssd_backend").or_insert_with(|| Value::from("spdk"));
    }
    super::distributed::keep_apart(&given, &mut whole);
    whole.extend(given);
    whole
}
