//! What the configuration may ask for and this build does not serve.

use super::settings::{Amount, CacheMode, Config};
use super::storage::KeyScheme;

/// Refuses, in plain words, what can be configured but is not served by this build.
///
/// # Errors
/// One line a thing, each naming the key and what to set instead.
pub fn check_served(config: &Config) -> Result<(), Vec<String>> {
    let mut refused = Vec::new();
    let mut refuse = |line: String| refused.push(line);
    let ranks = [
        (
            "pp_size",
            config.engine.pp_size,
            "pipeline parallelism: ranks of different layers do not agree on hits and failures",
        ),
        (
            "dcp_size",
            config.engine.dcp_size,
            "decode context parallelism: every rank keeps all tokens of its heads, and what a query attends to is never split over ranks",
        ),
    ];
    for (key, size, why) in ranks {
        if size > 1 {
            refuse(format!(
                "engine.{key} = {size}: there is no {why}; set 1, and engine.tp_size or engine.cp_size for several ranks"
            ));
        }
    }
    let selected = config.storage.selected();
    if config.cache.mode == CacheMode::Linker {
        linker(config, &selected, &mut refuse);
    }
    if config.cache.mode == CacheMode::Device && !selected.is_empty() {
        refuse(format!(
            "cache.mode = \"device\" has no storage tier, but storage backend {:?} is named; set \
             cache.mode = \"hierarchical\" or \"linker\", or leave the backend out",
            selected.first().copied().unwrap_or_default()
        ));
    }
    if refused.is_empty() { Ok(()) } else { Err(refused) }
}

/// What excludes linker mode.
fn linker(config: &Config, selected: &[&str], refuse: &mut impl FnMut(String)) {
    if let Amount::Fixed(tokens @ 1..) = config.cache.host_tokens {
        refuse(format!(
            "cache.mode = \"linker\" has no host tier, but cache.host_tokens = {tokens}; leave it out, or set cache.mode = \
             \"hierarchical\""
        ));
    }
    let layout = config.cache.host_layout.as_str();
    if matches!(layout, "page_first" | "page_head") {
        refuse(format!(
            "cache.mode = \"linker\" reads pages layer by layer, and cache.host_layout = \"{layout}\" scatters a layer over the \
             page; set \"page_first_direct\" or \"layer_first\", or leave it out"
        ));
    }
    let write_back = |key: String| {
        format!(
            "{key} = \"write_back\" stores pages when they leave the device for the host tier, and cache.mode = \"linker\" has no host \
             tier; set \"write_through\" or \"write_through_selective\""
        )
    };
    if config.cache.write_policy == "write_back" {
        refuse(write_back("cache.write_policy".into()));
    }
    if config.storage.break_even != "off" {
        refuse(
            "storage.break_even = \"auto\" weighs loading against computing, and with cache.mode = \"linker\" they run side by side; \
             set \"off\""
                .into(),
        );
    }
    for name in selected {
        let table = config.storage.table(name);
        if table.settings.write_policy.as_deref() == Some("write_back") {
            refuse(write_back(format!("storage.{name}.write_policy")));
        }
        if table.key_scheme != KeyScheme::Kvdock {
            refuse(format!(
                "storage.{name}.key_scheme = \"{}\": pages under another engine's names carry no seal, and with cache.mode = \"linker\" a page \
                 counts only by its seal; set \"kvdock\"",
                table.key_scheme.as_str()
            ));
        }
    }
}
