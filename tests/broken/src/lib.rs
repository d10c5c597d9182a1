//! A storage plugin for tests: pages in memory, with every capability that needs no hardware, and right as it is built. Tests
//! plant one fault at a time into a copy of the built file, by the marker in [`fault`]; see `kvdock_tests::broken`.

mod backend;
mod data;
mod entry;
mod fault;
mod linker;
mod pages;
mod raw;
mod store;

use kvdock_plugin_api::Capabilities;

/// What the plugin can do. `durable` needs a folder.
const CAPABILITIES: Capabilities = Capabilities {
    linker: true,
    ranges: true,
    remove: true,
    clear_namespace: true,
    clear_everything: true,
    durable: true,
    checksums: true,
    logical_pools: true,
    held_pages: true,
    concurrency: 8,
    ..Capabilities::NONE
};

const CONFIG_SCHEMA: &str = r#"{
    "type": "object",
    "properties": {
        "dir": {"type": "string", "description": "Folder of the file in which pages outlive the process; without it they do not"},
        "max_bytes": {"type": "integer", "minimum": 1, "default": 1073741824, "description": "Bytes of pages that are kept"},
        "check": {"type": "boolean", "default": false, "description": "Set by the check alone"}
    },
    "additionalProperties": false
}"#;

const CHECK_CONFIG: &str = r#"{"dir": "{scratch}", "check": true}"#;
