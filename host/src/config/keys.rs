//! The one table of keys.

use super::value::Kind;

/// A key of the configuration.
#[derive(Debug)]
pub(crate) struct Key {
    /// Full path, `section.name`.
    pub path: &'static str,
    /// What it takes.
    pub kind: Kind,
    /// The default as TOML; `None` for keys that may be left unset.
    pub default: Option<&'static str>,
    /// What it means, for `kvdock config reference`.
    pub meaning: &'static str,
}

const fn key(path: &'static str, kind: Kind, default: &'static str, meaning: &'static str) -> Key {
    Key { path, kind, default: Some(default), meaning }
}

const fn unset(path: &'static str, kind: Kind, meaning: &'static str) -> Key {
    Key { path, kind, default: None, meaning }
}

const COUNT: i64 = u32::MAX as i64;

/// Write policies, SGLang's names.
pub(crate) const WRITE_POLICIES: &[&str] = &["write_through", "write_through_selective", "write_back"];
/// Prefetch policies, SGLang's names.
pub(crate) const PREFETCH_POLICIES: &[&str] = &["best_effort", "wait_complete", "timeout"];

/// Every key outside of `storage.<name>`.
pub(crate) const KEYS: &[Key] = &[
    key("server.host", Kind::Text, "\"127.0.0.1\"", "Address or host name to listen on."),
    key("server.port", Kind::Int(0, 65535), "30000", "Port to listen on; 0 picks a free one."),
    unset(
        "server.api_key",
        Kind::Secret,
        "Clients must send it as `Authorization: Bearer KEY`. Unset: no key is asked for.",
    ),
    unset(
        "server.admin_key",
        Kind::Secret,
        "The admin endpoints ask for this key instead. Unset: they answer loopback peers only.",
    ),
    key(
        "server.shutdown_timeout",
        Kind::Number(0.0, 86400.0),
        "20.0",
        "Seconds that running requests get to finish on SIGTERM or SIGINT. What they leave of it is the most that the drains of storage backends take then.",
    ),
    key("server.max_body", Kind::Size(1024), "\"64MiB\"", "Largest request body."),
    unset("model.path", Kind::Path, "A GGUF file or a Hugging Face folder. `kvdock serve` needs it."),
    unset("model.name", Kind::Text, "Name that clients use. Unset: the name of the file or folder."),
    key(
        "engine.device",
        Kind::Choice(&["cpu", "cuda", "auto"]),
        "\"cpu\"",
        "Where the model runs; `auto` takes a GPU where `kvdock doctor` finds all that it needs, else the CPU.",
    ),
    key("engine.cuda_device", Kind::Int(0, 1023), "0", "Number of the GPU, as the NVIDIA driver counts them."),
    key(
        "engine.cuda_arithmetic",
        Kind::Choice(&["reproducible", "fast"]),
        "\"reproducible\"",
        "On a GPU, `reproducible` gives the same bits however tokens are cut into chunks and batches; `fast` takes other kernels for few rows, which add in another order. Stored pages of one are not found by the other.",
    ),
    key(
        "engine.threads",
        Kind::IntOrAuto(1, 4096),
        "\"auto\"",
        "Compute threads; `auto` is one a CPU that this process may use.",
    ),
    key("engine.prefill_chunk", Kind::Int(1, COUNT), "512", "Most prompt tokens computed in one step."),
    key("engine.max_running_requests", Kind::Int(1, 65536), "32", "Most requests decoded side by side."),
    key(
        "engine.max_queued_requests",
        Kind::Int(1, COUNT),
        "1024",
        "Most requests waiting; beyond it the answer is 429.",
    ),
    key(
        "engine.tp_size",
        Kind::Int(1, 1024),
        "1",
        "Tensor-parallel ranks, on CPUs: each has its share of heads, MLP columns, experts and vocabulary, a share of engine.threads, and a \
         storage backend of its own. Refused where it does not divide the model's sizes.",
    ),
    key(
        "engine.cp_size",
        Kind::Int(1, 1024),
        "1",
        "Context-parallel ranks, on CPUs: each has the whole model (or, with engine.tp_size, each of these shares) and all pages, a share of engine.threads, \
         and computes its part of the tokens of every step. Logits are those of one rank, bit for bit.",
    ),
    key("engine.pp_size", Kind::Int(1, 1024), "1", "Pipeline-parallel ranks; only 1 is served."),
    key("engine.dcp_size", Kind::Int(1, 1024), "1", "Decode-context-parallel ranks; only 1 is served."),
    key(
        "cache.mode",
        Kind::Choice(&["hierarchical", "linker", "device"]),
        "\"hierarchical\"",
        "`hierarchical`: device, host and storage tiers; `linker`: device and storage, between which pages go layer by layer while the forward runs; \
         `device`: the device tier alone.",
    ),
    key(
        "cache.page_size",
        Kind::IntOrAuto(1, 256),
        "\"auto\"",
        "Tokens a page. auto: 16, rounded up to what the model's pools take.",
    ),
    key(
        "cache.device_tokens",
        Kind::IntOrAuto(1, COUNT),
        "\"auto\"",
        "Tokens in the device pool; `auto` sizes it from the model's context and free memory.",
    ),
    key(
        "cache.host_tokens",
        Kind::IntOrAuto(0, COUNT),
        "\"auto\"",
        "Tokens in the host pool; `auto` is twice the device pool, less if memory is short. Only with `mode = \"hierarchical\"`.",
    ),
    key(
        "cache.transit_tokens",
        Kind::IntOrAuto(2, COUNT),
        "\"auto\"",
        "With `mode = \"linker\"`: tokens in the pages by way of which others go between device and storage; a longer hit is loaded so far. `auto` is as \
         many as the device pool has, less if memory is short.",
    ),
    key("cache.dtype", Kind::Choice(&["f16", "bf16", "f32"]), "\"f16\"", "Type of the cached keys and values."),
    key(
        "cache.host_layout",
        Kind::Choice(&["auto", "page_first", "layer_first", "page_first_direct", "page_head"]),
        "\"auto\"",
        "Layout of the host pool, and of stored pages, SGLang's names. `auto` is `page_first`, with `mode = \"linker\"` `page_first_direct`.",
    ),
    key(
        "cache.write_policy",
        Kind::Choice(WRITE_POLICIES),
        "\"write_through\"",
        "When pages are copied to host and storage: at once, from the second use, or when the device evicts them.",
    ),
    key(
        "cache.prefetch_policy",
        Kind::Choice(PREFETCH_POLICIES),
        "\"timeout\"",
        "How long a queued request waits for its pages from storage: not at all, until all are there (bounded by the backend's deadline), or for a time that grows with their number.",
    ),
    key("cache.prefetch_threshold", Kind::Int(1, COUNT), "256", "Fewest missing tokens for which storage is asked."),
    key(
        "cache.prefetch_timeout_base",
        Kind::Number(0.0, 3600.0),
        "1.0",
        "Seconds; the constant part of the prefetch timeout.",
    ),
    key(
        "cache.prefetch_timeout_per_ki_token",
        Kind::Number(0.0, 3600.0),
        "0.25",
        "Seconds more for each 1024 tokens asked for.",
    ),
    key(
        "cache.window_ratio",
        Kind::Number(0.0, 1.0),
        "0.5",
        "Pages of sliding windows for each page of all tokens, on device and host, of models that have such; at least what running requests need.",
    ),
    key(
        "cache.states",
        Kind::IntOrAuto(1, COUNT),
        "\"auto\"",
        "Recurrent states kept beside those of running requests, of models that have such; twice as many on the host.",
    ),
    key(
        "cache.eviction",
        Kind::Choice(&["lru", "lfu", "slru", "fifo", "priority"]),
        "\"lru\"",
        "Which pages leave a full pool first: those used least recently (lru) or least often (lfu), those used once before the others (slru), \
         those that came first (fifo), those of requests of the lowest `priority` (priority).",
    ),
    unset("storage.backend", Kind::Text, "Name of the storage backend, as in `storage.NAME`. Unset: no storage tier."),
    key(
        "storage.backends",
        Kind::TextList,
        "[]",
        "Names of several backends in the order they are asked; excludes `storage.backend`.",
    ),
    key("storage.required", Kind::Bool, "true", "Whether a backend that can't be attached stops the start."),
    key(
        "storage.plugin_path",
        Kind::PathList,
        "[]",
        "Folders searched for plugins, before the default ones (`kvdock doctor` lists them).",
    ),
    key(
        "storage.break_even",
        Kind::Choice(&["off", "auto"]),
        "\"off\"",
        "`auto` loads a hit only where that is faster than computing it.",
    ),
    key(
        "telemetry.log_level",
        Kind::Text,
        "\"info\"",
        "Log filter, as in RUST_LOG, which wins: `error`, `warn`, `info`, `debug`, `trace`, or `target=level` with commas.",
    ),
    key("telemetry.log_format", Kind::Choice(&["text", "json"]), "\"text\"", "Form of the log on standard error."),
];

/// Keys of the host in a backend's table, `storage.<name>.<key>`; the others are the backend's.
pub(crate) const BACKEND_KEYS: &[Key] = &[
    unset(
        "plugin",
        Kind::Text,
        "Plugin to run this backend with, so that one plugin may run as two backends. Unset: the backend's name.",
    ),
    unset(
        "write_policy",
        Kind::Choice(WRITE_POLICIES),
        "Write policy towards this backend. Unset: `cache.write_policy`.",
    ),
    key("timeout", Kind::Number(0.001, 3600.0), "5.0", "Seconds that one call to the backend may take."),
    key(
        "key_scheme",
        Kind::Choice(&["kvdock", "sglang"]),
        "\"kvdock\"",
        "How pages are named in the store. \"sglang\": as SGLang 0.5.23 names those of the same model, rank and pool, where the plugin can; these \
         names bind no weights, element type or layout, and the objects carry no seal, so nothing tells a wrong page from a right one; pages read \
         from it are stored in no other backend.",
    ),
    key(
        "promote",
        Kind::Bool,
        "false",
        "Whether pages that were read from a backend further down the list are stored in this one too.",
    ),
    key(
        "retries",
        Kind::Int(0, 10),
        "2",
        "How often a call is made again after an error that says that this can help, with a growing pause, within `timeout`.",
    ),
    unset("concurrency", Kind::Int(1, 64), "Calls at a time at most. Unset: as many as the plugin wants."),
    unset("read_bandwidth", Kind::Size(1), "Bytes a second at most that are read from this backend. Unset: no limit."),
    unset(
        "write_bandwidth",
        Kind::Size(1),
        "Bytes a second at most that are written to this backend. Unset: no limit.",
    ),
    key(
        "drain_timeout",
        Kind::Number(0.0, 3600.0),
        "5.0",
        "Seconds that calls under way get to return when the backend is detached or replaced, before they are cancelled. On SIGTERM or SIGINT no longer than what is left of `server.shutdown_timeout`.",
    ),
    unset("sha256", Kind::Text, "SHA-256 of the plugin's file, in hex; another file is refused."),
];

/// The key at `path`.
pub(crate) fn find(path: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.path == path)
}

/// Sections that hold keys, such as `server`.
pub(crate) fn is_section(path: &str) -> bool {
    KEYS.iter().any(|key| key.path.strip_prefix(path).is_some_and(|rest| rest.starts_with('.')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_pass_their_own_checks() {
        for key in KEYS.iter().chain(BACKEND_KEYS) {
            if let Some(text) = key.default {
                let value: toml::Value = text.parse().expect(key.path);
                key.kind.check(&value).expect(key.path);
            }
        }
    }

    #[test]
    fn the_check_of_a_plugin_knows_the_hosts_keys() {
        let mut known: Vec<&str> = kvdock_plugin_api::conformance::HOST_KEYS.to_vec();
        let mut keys: Vec<&str> = BACKEND_KEYS.iter().map(|key| key.path).collect();
        known.sort_unstable();
        keys.sort_unstable();
        assert_eq!(known, keys);
    }

    #[test]
    fn paths_are_unique_and_reachable_from_the_environment() {
        for (index, key) in KEYS.iter().enumerate() {
            assert!(KEYS[..index].iter().all(|other| other.path != key.path));
            assert!(key.path.bytes().all(|b| b.is_ascii_lowercase() || matches!(b, b'_' | b'.')), "{}", key.path);
            assert!(!key.path.contains("__"), "{}", key.path);
        }
    }
}
