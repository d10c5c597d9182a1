//! Where settings come from that the configuration leaves out.

use kvdock_plugin_api::Result;
use serde_json::{Map, Value};

use super::fail;

const FILE: &str = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH";

/// Keys that a file of SGLang's may have.
const SHARED: [&str; 14] = [
    "local_hostname",
    "metadata_server",
    "global_segment_size",
    "protocol",
    "device_name",
    "master_server_address",
    "master_metrics_port",
    "check_server",
    "standalone_storage",
    "client_server_address",
    "enable_ssd_offload",
    "ssd_offload_path",
    "tenant_id",
    "local_buffer_size",
];

/// Environment variables and the keys they stand for.
const VARIABLES: [(&str, &str); 11] = [
    ("MOONCAKE_MASTER", "master_server_address"),
    ("MOONCAKE_CLIENT", "client_server_address"),
    ("MOONCAKE_TE_META_DATA_SERVER", "metadata_server"),
    ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "global_segment_size"),
    ("MOONCAKE_DEVICE", "device_name"),
    ("MOONCAKE_MASTER_METRICS_PORT", "master_metrics_port"),
    ("MOONCAKE_CHECK_SERVER", "check_server"),
    ("MOONCAKE_STANDALONE_STORAGE", "standalone_storage"),
    ("MOONCAKE_ENABLE_SSD_OFFLOAD", "enable_ssd_offload"),
    ("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", "ssd_offload_path"),
    ("MOONCAKE_TENANT_ID", "tenant_id"),
];

/// Completes a configuration: when it names no master, from the file that an environment variable names, else from the environment. What
/// the configuration itself says always counts.
pub fn complete(
    instance: &str,
    given: Map<String, Value>,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<Map<String, Value>> {
    let names = |map: &Map<String, Value>, key: &str| map.get(key).is_some_and(|value| !value.is_null());
    let has_master =
        |map: &Map<String, Value>| names(map, "master_server_address") || names(map, "client_server_address");
    let mut whole = Map::new();
    if !has_master(&given) {
        if let Some(path) = variable(FILE).filter(|path| !path.is_empty()) {
            let wrong = |what: String| fail(instance, "master_server_address", &format!("{FILE} names {path}: {what}"));
            let text = std::fs::read_to_string(&path).map_err(|error| wrong(format!("it can't be read: {error}")))?;
            let map: Map<String, Value> =
                serde_json::from_str(&text).map_err(|error| wrong(format!("it is no JSON object: {error}")))?;
            if !has_master(&map) {
                return Err(wrong("it has no master_server_address".to_owned()));
            }
            whole.extend(map.into_iter().filter(|(key, _)| SHARED.contains(&key.as_str())));
        } else {
            for (name, key) in VARIABLES {
                if let Some(text) = variable(name).filter(|text| !text.is_empty()) {
                    let number = text.parse::<u64>().ok().filter(|_| key.ends_with("_port") || key.ends_with("_size"));
                    whole.insert(key.to_owned(), number.map_or(Value::String(text), Value::from));
                }
            }
            if !has_master(&whole) {
                let what = format!("it is needed, for there is neither {FILE} nor MOONCAKE_MASTER");
                return Err(fail(instance, "master_server_address", &what));
            }
        }
    }
    whole.extend(given);
    if !names(&whole, "protocol")
        && let Some(protocol) = variable("MOONCAKE_PROTOCOL").filter(|text| !text.is_empty())
    {
        whole.insert("protocol".to_owned(), Value::String(protocol));
    }
    if !names(&whole, "cluster_id")
        && let Some(cluster) = variable("MC_STORE_CLUSTER_ID").filter(|text| !text.is_empty())
    {
        whole.insert("cluster_id".to_owned(), Value::String(cluster));
    }
    // One configuration may be spread over many machines; their names are their own.
    for name in ["LOCAL_HOSTNAME", "MOONCAKE_LOCAL_HOSTNAME"] {
        if let Some(host) = variable(name).filter(|text| !text.is_empty()) {
            whole.insert("local_hostname".to_owned(), Value::String(host));
        }
    }
    Ok(whole)
}
