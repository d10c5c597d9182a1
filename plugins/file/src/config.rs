//! The configuration `storage.<instance>.*`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvdock_plugin_api::values::{SIZE, size};
use kvdock_plugin_api::{Error, ErrorKind, Open, Result};
use serde_json::{Map, Value};

/// JSON Schema of the configuration; it travels in the plugin's note.
pub const SCHEMA: &str = r#"{
  "$schema": "https://json-schema.org/draft/2020-12/schema",
  "type": "object",
  "additionalProperties": false,
  "properties": {
    "dir": {
      "type": "string", "minLength": 1, "not": {"pattern": "^/+(proc|sys)(/|$)"},
      "description": "Directory that keeps the pages, on a file system that keeps files. Several processes and models may share it, also over a shared file system. Default: kvdock/storage in $XDG_CACHE_HOME or ~/.cache."
    },
    "max_bytes": {
      "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+ *([kKMGT]i?)?B?$"}],
      "description": "Most bytes the directory may hold, over all models: an integer or a text such as \"10GiB\". The pages used longest ago make room. 0: no bound. Default: 0."
    },
    "min_free_bytes": {
      "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+ *([kKMGT]i?)?B?$"}],
      "description": "Bytes of the file system that stay free; pages make room for them. Default: a twentieth of the file system, at most 10GiB."
    },
    "ttl": {
      "type": "integer", "minimum": 0,
      "description": "Seconds after its last use when a page is removed. 0: never. Default: 0."
    },
    "durability": {
      "enum": ["batch", "none"],
      "description": "batch: pages are on the disk before a set answers. none: they are when the system writes them. Default: batch."
    },
    "io": {
      "enum": ["auto", "io_uring", "threads"],
      "description": "What moves the bytes. auto takes threads, which were measured to be faster. Default: auto."
    },
    "io_threads": {
      "type": "integer", "minimum": 1, "maximum": 256,
      "description": "Operations in flight. Default: 32."
    }
  }
}"#;

/// Configuration for the conformance suite.
pub const CHECK_CONFIG: &str = r#"{"dir":"{scratch}","min_free_bytes":0}"#;

/// How much `batch_set` waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Nothing.
    None,
    /// The disk.
    Batch,
}

/// What moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoChoice {
    /// What was measured to be faster.
    Auto,
    /// io_uring, or an error.
    Uring,
    /// Threads.
    Threads,
}

/// The configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Directory of the store, absolute.
    pub dir: PathBuf,
    /// Most bytes of the directory; none for no bound.
    pub max_bytes: Option<u64>,
    /// Bytes that stay free; none for the default.
    pub min_free_bytes: Option<u64>,
    /// How long an unused page stays.
    pub ttl: Option<Duration>,
    /// What a set waits for.
    pub durability: Durability,
    /// What moves the bytes.
    pub io: IoChoice,
    /// Operations in flight.
    pub io_threads: usize,
}

impl Config {
    /// Reads the configuration of an instance.
    ///
    /// # Errors
    /// `InvalidConfig`, naming the key, what it has and what would be right.
    pub fn read(open: &Open<'_>) -> Result<Config> {
        let home = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let cache = home("XDG_CACHE_HOME").or_else(|| home("HOME").map(|home| home.join(".cache")));
        Config::parse(open.instance_name(), open.config_json(), cache, home("HOME"))
    }

    fn parse(instance: &str, json: &str, cache: Option<PathBuf>, home: Option<PathBuf>) -> Result<Config> {
        let fail = |message: String| Error::new(ErrorKind::InvalidConfig, message);
        let map: Map<String, Value> = serde_json::from_str(json)
            .map_err(|error| fail(format!("storage.{instance}: the configuration is no JSON object: {error}")))?;
        let bad = |key: &str, value: &Value, right: &str| {
            fail(format!("storage.{instance}.{key}: {value} is not right; it takes {right}"))
        };
        let mut config = Config {
            dir: PathBuf::new(),
            max_bytes: None,
            min_free_bytes: None,
            ttl: None,
            durability: Durability::Batch,
            io: IoChoice::Auto,
            io_threads: 32,
        };
        for (key, value) in &map {
            match key.as_str() {
                "dir" => {
                    let text = value.as_str().filter(|text| !text.is_empty() && !text.contains('\0'));
                    let text = text.ok_or_else(|| bad(key, value, "the path of a directory"))?;
                    let within = |top: &str| Path::new(text).starts_with(top);
                    if within("/proc") || within("/sys") {
                        return Err(bad(key, value, "a directory on a file system that keeps files"));
                    }
                    config.dir = match (text.strip_prefix("~/"), &home) {
                        (Some(rest), Some(home)) => home.join(rest),
                        _ => PathBuf::from(text),
                    };
                }
                "max_bytes" => {
                    config.max_bytes = Some(size(value).ok_or_else(|| bad(key, value, SIZE))?).filter(|size| *size > 0);
                }
                "min_free_bytes" => config.min_free_bytes = Some(size(value).ok_or_else(|| bad(key, value, SIZE))?),
                "ttl" => {
                    let seconds = value.as_u64().ok_or_else(|| bad(key, value, "a whole number of seconds"))?;
                    config.ttl = (seconds > 0).then(|| Duration::from_secs(seconds));
                }
                "durability" => {
                    config.durability = match value.as_str() {
                        Some("batch") => Durability::Batch,
                        Some("none") => Durability::None,
                        _ => return Err(bad(key, value, "\"batch\" or \"none\"")),
                    };
                }
                "io" => {
                    config.io = match value.as_str() {
                        Some("auto") => IoChoice::Auto,
                        Some("io_uring") => IoChoice::Uring,
                        Some("threads") => IoChoice::Threads,
                        _ => return Err(bad(key, value, "\"auto\", \"io_uring\" or \"threads\"")),
                    };
                }
                "io_threads" => {
                    let threads = value.as_u64().filter(|threads| (1..=256).contains(threads));
                    config.io_threads = threads.ok_or_else(|| bad(key, value, "a number from 1 to 256"))? as usize;
                }
                _ => {
                    return Err(fail(format!(
                        "storage.{instance}.{key}: there is no such key; there are dir, max_bytes, min_free_bytes, ttl, \
                         durability, io, io_threads"
                    )));
                }
            }
        }
        if config.dir.as_os_str().is_empty() {
            let cache = cache.ok_or_else(|| {
                fail(format!("storage.{instance}.dir: it is needed, for there is neither XDG_CACHE_HOME nor HOME"))
            })?;
            config.dir = cache.join("kvdock").join("storage");
        }
        config.dir = std::path::absolute(&config.dir)
            .map_err(|error| fail(format!("storage.{instance}.dir: {}: {error}", config.dir.display())))?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<Config> {
        Config::parse("file", json, Some("/cache".into()), Some("/home/me".into()))
    }

    #[test]
    fn bad_values_are_errors_that_name_the_key() {
        for (json, key) in [
            (r#"{"dir":7}"#, "dir"),
            (r#"{"dir":""}"#, "dir"),
            (r#"{"max_bytes":"10 apples"}"#, "max_bytes"),
            (r#"{"max_bytes":-1}"#, "max_bytes"),
            (r#"{"max_bytes":"GiB"}"#, "max_bytes"),
            (r#"{"max_bytes":"99999999999999TiB"}"#, "max_bytes"),
            (r#"{"min_free_bytes":1.5}"#, "min_free_bytes"),
            (r#"{"ttl":"soon"}"#, "ttl"),
            (r#"{"durability":"always"}"#, "durability"),
            (r#"{"io":"sync"}"#, "io"),
            (r#"{"io_threads":0}"#, "io_threads"),
            (r#"{"max_byte":1}"#, "max_byte"),
        ] {
            let error = parse(json).unwrap_err();
            assert_eq!(error.kind, ErrorKind::InvalidConfig);
            assert!(error.message.contains(&format!("storage.file.{key}:")), "{json}: {}", error.message);
        }
        assert!(parse("[]").unwrap_err().message.contains("no JSON object"));
    }

    #[test]
    fn the_directory_has_a_default() {
        assert_eq!(parse("{}").unwrap().dir, PathBuf::from("/cache/kvdock/storage"));
        assert_eq!(parse(r#"{"dir":"~/kv"}"#).unwrap().dir, PathBuf::from("/home/me/kv"));
        let error = Config::parse("file", "{}", None, None).unwrap_err();
        assert!(error.message.contains("storage.file.dir"), "{}", error.message);
    }

    #[test]
    fn the_schema_agrees_with_the_reader() {
        let schema = serde_json::from_str(SCHEMA).unwrap();
        let validator = jsonschema::validator_for(&schema).unwrap();
        for (json, good) in [
            (
                r#"{"dir":"/x","max_bytes":"10GiB","min_free_bytes":0,"ttl":60,"durability":"none","io":"threads","io_threads":8}"#,
                true,
            ),
            ("{}", true),
            (r#"{"max_bytes":"10 GiB"}"#, true),
            (r#"{"max_bytes":"10 apples"}"#, false),
            (r#"{"max_bytes":-1}"#, false),
            (r#"{"ttl":"soon"}"#, false),
            (r#"{"io_threads":0}"#, false),
            (r#"{"durability":"always"}"#, false),
            (r#"{"dirs":"/x"}"#, false),
            (r#"{"dir":"/proc/nope"}"#, false),
            (r#"{"dir":"/sys"}"#, false),
            (r#"{"dir":"/process/x"}"#, true),
        ] {
            assert_eq!(parse(json).is_ok(), good, "{json}");
            assert_eq!(validator.is_valid(&serde_json::from_str(json).unwrap()), good, "{json}");
        }
        assert!(validator.is_valid(&serde_json::from_str(CHECK_CONFIG).unwrap()));
    }
}
