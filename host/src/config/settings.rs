//! The configuration as typed structs, read from the checked table.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use super::storage::BackendTable;

/// The whole configuration, checked.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where and how the server listens.
    pub server: ServerConfig,
    /// Which model.
    pub model: ModelConfig,
    /// How it runs.
    pub engine: EngineConfig,
    /// Device and host tiers.
    pub cache: CacheConfig,
    /// Storage tier.
    pub storage: StorageConfig,
    /// Logs.
    pub telemetry: TelemetryConfig,
}

/// A key that must not be printed.
#[derive(Clone, Deserialize, PartialEq, Eq)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// The text itself, for comparing.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"***\"")
    }
}

/// `server.*`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerConfig {
    /// Address or host name to listen on.
    pub host: String,
    /// Port; 0 picks a free one.
    pub port: u16,
    /// Key that clients must send.
    pub api_key: Option<Secret>,
    /// Key for the admin endpoints.
    pub admin_key: Option<Secret>,
    /// Time to finish running requests when asked to stop.
    #[serde(deserialize_with = "seconds")]
    pub shutdown_timeout: Duration,
    /// Largest request body, bytes.
    pub max_body: u64,
}

/// `model.*`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// A GGUF file or a Hugging Face folder.
    pub path: Option<PathBuf>,
    /// Name that clients use.
    pub name: Option<String>,
}

/// `engine.*`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    /// Where the model runs.
    pub device: DeviceChoice,
    /// Number of the GPU.
    pub cuda_device: u32,
    /// What may be given up for speed on a GPU.
    pub cuda_arithmetic: CudaArithmetic,
    /// Compute threads.
    pub threads: Amount,
    /// Most prompt tokens in one step.
    pub prefill_chunk: u32,
    /// Most requests decoded side by side.
    pub max_running_requests: u32,
    /// Most requests waiting.
    pub max_queued_requests: u32,
    /// Tensor-parallel ranks.
    pub tp_size: u32,
    /// Context-parallel ranks; there are so many of each tensor-parallel one.
    pub cp_size: u32,
    /// Pipeline-parallel ranks.
    pub pp_size: u32,
    /// Decode-context-parallel ranks.
    pub dcp_size: u32,
}

/// `engine.device`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceChoice {
    /// The CPU.
    Cpu,
    /// A CUDA device.
    Cuda,
    /// A GPU where there is one, else the CPU.
    Auto,
}

/// `engine.cuda_arithmetic`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CudaArithmetic {
    /// Nothing.
    Reproducible,
    /// The same bits under other chunks and batches.
    Fast,
}

/// `cache.*`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheConfig {
    /// Which tiers.
    pub mode: CacheMode,
    /// Tokens a page.
    pub page_size: Amount,
    /// Tokens in the device pool.
    pub device_tokens: Amount,
    /// Tokens in the host pool.
    pub host_tokens: Amount,
    /// Tokens in the transit pages of linker mode.
    pub transit_tokens: Amount,
    /// Type of cached keys and values: `f16`, `bf16` or `f32`.
    pub dtype: String,
    /// Layout of the host pool, one of SGLang's names, or `auto`.
    pub host_layout: String,
    /// `write_through`, `write_through_selective` or `write_back`.
    pub write_policy: String,
    /// `best_effort`, `wait_complete` or `timeout`.
    pub prefetch_policy: String,
    /// Fewest missing tokens for which storage is asked.
    pub prefetch_threshold: u32,
    /// Constant part of the prefetch timeout.
    #[serde(deserialize_with = "seconds")]
    pub prefetch_timeout_base: Duration,
    /// Part of the prefetch timeout for each 1024 tokens.
    #[serde(deserialize_with = "seconds")]
    pub prefetch_timeout_per_ki_token: Duration,
    /// Window pages for each page of all tokens.
    pub window_ratio: f64,
    /// Recurrent states kept for models that have such.
    pub states: Amount,
    /// `lru`, `lfu`, `slru`, `fifo` or `priority`.
    pub eviction: String,
}

impl EngineConfig {
    /// Ranks in all.
    pub fn ranks(&self) -> usize {
        self.tp_size.max(1) as usize * self.cp_size.max(1) as usize
    }

    /// The keys that ask for several ranks, for errors.
    pub fn ranks_said(&self) -> String {
        let keys = [("tp_size", self.tp_size), ("cp_size", self.cp_size)];
        let said = keys.iter().filter(|(_, size)| *size > 1).map(|(key, size)| format!("engine.{key} = {size}"));
        said.collect::<Vec<_>>().join(", ")
    }
}

impl CacheConfig {
    /// The layout of the host pool, or of transit pages.
    pub fn layout(&self) -> &str {
        match (self.host_layout.as_str(), self.mode) {
            ("auto", CacheMode::Linker) => "page_first_direct",
            ("auto", CacheMode::Hierarchical | CacheMode::Device) => "page_first",
            (layout, _) => layout,
        }
    }
}

/// `cache.mode`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheMode {
    /// Device, host and storage.
    Hierarchical,
    /// Storage straight into device pages.
    Linker,
    /// Device alone.
    Device,
}

/// `storage.*`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StorageConfig {
    /// The only backend's name.
    pub backend: Option<String>,
    /// Several backends, in order.
    pub backends: Vec<String>,
    /// Whether an attach that fails stops the start.
    pub required: bool,
    /// Folders searched for plugins before the default ones.
    pub plugin_path: Vec<PathBuf>,
    /// `off` or `auto`.
    pub break_even: String,
    /// The backends' own tables, by name; also of backends that are not attached at the start.
    #[serde(skip)]
    pub tables: BTreeMap<String, BackendTable>,
}

impl StorageConfig {
    /// Names of the backends to attach at the start, in order.
    pub fn selected(&self) -> Vec<&str> {
        match &self.backend {
            Some(name) => vec![name.as_str()],
            None => self.backends.iter().map(String::as_str).collect(),
        }
    }

    /// The table of `name`; the defaults when the config has none.
    pub fn table(&self, name: &str) -> BackendTable {
        self.tables.get(name).cloned().unwrap_or_else(|| BackendTable::new(name))
    }
}

/// `telemetry.*`
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TelemetryConfig {
    /// Log filter.
    pub log_level: String,
    /// Form of the log.
    pub log_format: LogFormat,
}

/// `telemetry.log_format`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// A count, or `"auto"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// kvdock chooses.
    Auto,
    /// This many.
    Fixed(u32),
}

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Form {
            Count(u32),
            Word(String),
        }
        match Form::deserialize(deserializer)? {
            Form::Count(count) => Ok(Self::Fixed(count)),
            Form::Word(word) if word == "auto" => Ok(Self::Auto),
            Form::Word(word) => Err(serde::de::Error::custom(format!("{word:?} is neither a count nor \"auto\""))),
        }
    }
}

fn seconds<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    Duration::try_from_secs_f64(f64::deserialize(deserializer)?).map_err(serde::de::Error::custom)
}
