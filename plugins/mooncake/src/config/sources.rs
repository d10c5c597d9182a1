//! Where settings come from that the configuration leaves out.

use std::collections::BTreeMap;
use std::io::Read as _;

use kvdock_plugin_api::{Error, Result};
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

/// Keys that a variable says where nothing else does, also beside a configured master.
const LATE: [(&str, &str); 2] = [("MOONCAKE_PROTOCOL", "protocol"), ("MC_STORE_CLUSTER_ID", "cluster_id")];

/// Variables with the machine's own name, the one that counts last: one configuration may be spread over many machines.
const HOSTS: [&str; 2] = ["LOCAL_HOSTNAME", "MOONCAKE_LOCAL_HOSTNAME"];

/// Something that the log should say of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// It may not be what somebody meant.
    pub warns: bool,
    /// What.
    pub text: String,
}

/// A configuration with what it leaves out.
#[derive(Debug)]
pub(super) struct Complete {
    /// All keys.
    pub map: Map<String, Value>,
    /// Where those come from that the configuration does not say.
    pub origins: BTreeMap<String, String>,
    /// For the log.
    pub notes: Vec<Note>,
}

/// Most bytes of a file with settings.
const MOST: u64 = 1 << 20;

/// The text of a regular file. Anything else is not opened: a FIFO would wait for somebody to write, and a device need not end.
fn text(path: &str) -> std::io::Result<String> {
    let wrong = |what: String| Err(std::io::Error::other(what));
    if !std::fs::metadata(path)?.is_file() {
        return wrong("expected a regular file".to_owned());
    }
    let mut text = String::new();
    std::fs::File::open(path)?.take(MOST + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MOST { wrong(format!("expected at most {MOST} bytes, found more")) } else { Ok(text) }
}

/// Completes a configuration: when it names no master, from the file that an environment variable names, else from the environment. What
/// the configuration itself says always counts, but for the name of this machine.
pub(super) fn complete(
    instance: &str,
    given: Map<String, Value>,
    variable: &dyn Fn(&str) -> Option<String>,
) -> Result<Complete> {
    let names = |map: &Map<String, Value>, key: &str| map.get(key).is_some_and(|value| !value.is_null());
    let has_master =
        |map: &Map<String, Value>| names(map, "master_server_address") || names(map, "client_server_address");
    let set = |name: &str| variable(name).filter(|text| !text.is_empty());
    let mut map = Map::new();
    let mut origins = BTreeMap::new();
    let mut notes = Vec::new();
    if !has_master(&given) {
        if let Some(path) = set(FILE) {
            let wrong = |what: String| fail(instance, "master_server_address", &format!("{FILE} names {path}: {what}"));
            let text = text(&path).map_err(|error| wrong(format!("it can't be read: {error}")))?;
            let found: Map<String, Value> =
                serde_json::from_str(&text).map_err(|error| wrong(format!("it is no JSON object: {error}")))?;
            if !has_master(&found) {
                return Err(wrong("it has no master_server_address".to_owned()));
            }
            for (key, value) in found.into_iter().filter(|(key, _)| SHARED.contains(&key.as_str())) {
                origins.insert(key.clone(), format!("{path}, which {FILE} names"));
                map.insert(key, value);
            }
        } else {
            for (name, key) in VARIABLES {
                if let Some(text) = set(name) {
                    let number = text.parse::<u64>().ok().filter(|_| key.ends_with("_port") || key.ends_with("_size"));
                    origins.insert(key.to_owned(), format!("the variable {name}"));
                    map.insert(key.to_owned(), number.map_or(Value::String(text), Value::from));
                }
            }
            if !has_master(&map) {
                let what = format!("it is needed, for there is neither {FILE} nor MOONCAKE_MASTER");
                return Err(fail(instance, "master_server_address", &what));
            }
        }
    }
    for key in given.keys() {
        origins.remove(key);
    }
    map.extend(given);
    for (name, key) in LATE {
        if !names(&map, key)
            && let Some(text) = set(name)
        {
            origins.insert(key.to_owned(), format!("the variable {name}"));
            map.insert(key.to_owned(), Value::String(text));
        }
    }
    for name in HOSTS {
        let Some(host) = set(name) else { continue };
        let before = map.insert("local_hostname".to_owned(), Value::String(host.clone()));
        if let Some(before) = before.filter(|before| !before.is_null() && before.as_str() != Some(host.as_str())) {
            let where_from =
                origins.get("local_hostname").map(|origin| format!(", from {origin},")).unwrap_or_default();
            let text =
                format!("local_hostname is {host:?}, as the variable {name} says; {before}{where_from} does not count");
            notes.push(Note { warns: true, text });
        }
        origins.insert("local_hostname".to_owned(), format!("the variable {name}"));
    }
    if !origins.is_empty() {
        let list: Vec<String> = origins.iter().map(|(key, origin)| format!("{key} from {origin}")).collect();
        notes.push(Note { warns: false, text: format!("not in the configuration itself: {}", list.join("; ")) });
    }
    Ok(Complete { map, origins, notes })
}

/// The same error, saying where the value comes from that is not right.
pub(super) fn traced(instance: &str, error: Error, origins: &BTreeMap<String, String>) -> Error {
    let start = format!("storage.{instance}.");
    let key = error.message.strip_prefix(&start).and_then(|rest| rest.split_once(": ")).map(|(key, _)| key);
    match key.and_then(|key| origins.get(key)) {
        Some(origin) => Error { message: format!("{} (it comes from {origin})", error.message), ..error },
        None => error,
    }
}
