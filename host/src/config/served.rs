//! What the configuration may ask for and this build does not serve.

use super::settings::{CacheMode, Config};

/// Refuses, in plain words, what can be configured but is not served by this build.
///
/// # Errors
/// One line a thing, each naming the key and what to set instead.
pub fn check_served(config: &Config) -> Result<(), Vec<String>> {
    let mut refused = Vec::new();
    let mut refuse = |line: String| refused.push(line);
    let ranks = [
        ("tp_size", config.engine.tp_size, "tensor parallelism"),
        ("cp_size", config.engine.cp_size, "context parallelism"),
        ("pp_size", config.engine.pp_size, "pipeline parallelism"),
        ("dcp_size", config.engine.dcp_size, "decode context parallelism"),
    ];
    for (key, size, what) in ranks {
        if size > 1 {
            refuse(format!("engine.{key} = {size}: this build runs one rank, without {what}; set 1"));
        }
    }
    if config.cache.mode == CacheMode::Linker {
        refuse(
            "cache.mode = \"linker\": this build does not load from storage straight into device \
             pages; set \"hierarchical\""
                .into(),
        );
    }
    let selected = config.storage.selected();
    if config.cache.mode == CacheMode::Device && !selected.is_empty() {
        refuse(format!(
            "cache.mode = \"device\" has no storage tier, but storage backend {:?} is named; set \
             cache.mode = \"hierarchical\" or leave the backend out",
            selected.first().copied().unwrap_or_default()
        ));
    }
    if refused.is_empty() { Ok(()) } else { Err(refused) }
}
