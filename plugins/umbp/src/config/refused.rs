//! Settings of other nodes of UMBP that can have one value here, and why.

use kvdock_plugin_api::values::flag;
use serde_json::Value;

/// Whether a value is what happens anyway; else what is, and why. None for a key that nobody has.
pub fn look(key: &str, value: &Value) -> Option<Result<(), &'static str>> {
    let is = |right: bool, why: &'static str| Some(if right { Ok(()) } else { Err(why) });
    let empty = value.as_str() == Some("");
    match key {
        "dram_use_shared_memory" => is(
            flag(value) == Some(false),
            "false: this process alone reads its memory, and a server of the node gets that of the host by its descriptors",
        ),
        "dram_shm_name" => is(empty, "nothing: the memory of this process has no name (see dram_use_shared_memory)"),
        "page_size" => is(false, "nothing: dram_page_size says it"),
        "backend_policy_path" => is(
            empty,
            "nothing: there is memory, and there are segments behind it; the keys dram_* and ssd_* say how large they are and what goes between them",
        ),
        "ssd_layout_mode" => {
            let right = value.as_str() == Some("segmented_log") || value.as_u64() == Some(1);
            is(right, "\"segmented_log\": there is no other layout")
        }
        "ssd_enable_background_gc" => is(
            flag(value) == Some(true),
            "true: segments are reclaimed when room is needed, or they would grow past ssd_capacity_bytes",
        ),
        "kv_events_subscriber" => is(
            flag(value) == Some(false),
            "false: nothing has to be subscribed to, the server that has this backend tells it what it holds",
        ),
        "kv_events_endpoint" | "kv_events_topic" => {
            is(empty, "nothing: the server that has this backend tells it what it holds")
        }
        "disable_zero_copy_register" => is(
            flag(value) == Some(false),
            "false: a server of the node reads and writes host pages itself, and needs them registered",
        ),
        _ if key.starts_with("spdk_") => is(
            empty,
            "nothing: drives without a file system (spdk) are not in this version; segments are files in ssd_storage_dir",
        ),
        _ => None,
    }
}
