//! Configuration: one TOML file, `KVDOCK_*` environment variables, `--set`.
//!
//! One table of keys ([`keys::KEYS`]) drives everything: which keys exist, what values they take,
//! the defaults, the checks, and the text of `kvdock config reference`. The typed structs of
//! [`Config`] carry no defaults of their own and refuse unknown fields, so a key that stands in
//! only one of the two places fails every start, and the tests with it.
//!
//! Later sources win: defaults, then the file, then the environment, then `--set`.

mod error;
mod file;
mod home;
mod keys;
mod load;
mod name;
mod reference;
mod served;
mod settings;
mod source;
mod storage;
mod value;

pub use error::{ConfigError, ConfigErrors, Origin};
pub(crate) use home::expanded_in;
pub use load::{Loaded, Sources, load};
pub(crate) use name::check_name;
pub use reference::reference;
pub use served::check_served;
pub use settings::{
    Amount, CacheConfig, CacheMode, Config, CudaArithmetic, DeviceChoice, EngineConfig, LogFormat, ModelConfig, Secret,
    ServerConfig, StorageConfig, TelemetryConfig,
};
pub use storage::{BackendTable, KeyScheme, host_keys_in};
pub use value::parse_size;
pub(crate) use value::{nearest, show};
