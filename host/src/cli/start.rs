//! From a configuration to a running engine with its storage tier.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvdock_kernels::{Device, KvDtype};
use kvdock_models::{KvGeometry, LoadOptions, LoadedModel, ModelSpec};
use serde_json::{Value, json};

use super::progress::Progress;
use super::sink::CacheSink;
use super::sizes::{PoolSizes, Wanted, pools};
use super::{device, machine, memory};
use crate::cache::{CacheConfig, CacheError, CacheManager};
use crate::config::{Amount, CacheMode, Config, KeyScheme};
use crate::engine::{Engine, EngineConfig, EngineParts, Mailbox};
use crate::plugin::admin::StorageAdmin;
use crate::plugin::{Namespace, PAGE_FORMAT, PluginManager, WorkerIdentity, find, search_path};
use crate::server::Served;
use crate::telemetry::{CacheObserver, MetricSources, Metrics};

/// What runs, and what has to be ended in order.
pub(super) struct Running {
    pub engine: Engine,
    pub storage: PluginManager,
    pub served: Served,
}

/// Loads the model, makes the pools, starts the engine and attaches storage.
///
/// # Errors
/// One line that names what is wrong.
pub(super) fn start(config: &Config, began: Instant) -> Result<Running, String> {
    let Some(path) = &config.model.path else {
        return Err("model.path is not set; name a GGUF file or a Hugging Face folder: --set model.path=FILE".into());
    };
    let devices = device::choose_ranks(&config.engine)?;
    let device = devices.first().ok_or("no rank has a device")?.clone();
    check_layouts(config)?;
    let model = load_model(path, &devices, config.engine.cp_size as usize)?;
    let spec = model.spec().clone();
    let name = config.model.name.clone().unwrap_or_else(|| name_of(path));

    let dtype = kv_dtype(&config.cache.dtype)?;
    let page_tokens =
        memory::page_tokens(&spec, config.cache.page_size).map_err(|reason| format!("{}: {reason}", path.display()))?;
    let page_size = u32::try_from(page_tokens).map_err(|_| format!("a page of {page_tokens} tokens is too large"))?;
    let window_ratio = config.cache.window_ratio;
    let page_bytes = memory::page_bytes(&spec, dtype, page_tokens, window_ratio);
    let sizes = pools(&Wanted {
        page_bytes: page_bytes as u64,
        context: spec.context_length as u64,
        memory: machine::memory(),
        own_memory: device.own_memory(),
        ..wanted(config, page_size)
    })?;
    let running = config.engine.max_running_requests as usize;
    let available = machine::memory().map(|memory| memory.available);
    let saved = memory::saved_states(&spec, dtype, config.cache.states, running, available);
    let room = memory::Room {
        dtype,
        page_tokens,
        pages: sizes.device_pages as usize,
        host_pages: sizes.host_pages as usize,
        transit: config.cache.mode == CacheMode::Linker,
        window_ratio,
        chunk: config.engine.prefill_chunk as usize,
        running,
        saved,
    };
    let memory::Memory { model: pool, cache: memory } = memory::allocate(&devices, &spec, room)?;

    let namespace = namespace(config, &spec, dtype, page_tokens);
    let identity = WorkerIdentity::of_ranks(namespace, &name, spec.weights_digest, memory::replicated(&spec));
    let identities = (0..identity.ranks()).map(|rank| identity.of_rank(rank).namespace.digest()).collect();
    let cache_config = cache_config(config, sizes, identities).map_err(|error| error.to_string())?;
    let policies = (cache_config.prefetch_policy, cache_config.write_policy);
    let observer = Arc::new(CacheObserver::default());
    let mailbox = Mailbox::new();
    let cache = CacheManager::over(cache_config, memory, observer.clone(), mailbox.waker())
        .map_err(|error| error.to_string())?;
    let counters = cache.counters();
    let linked = config.cache.mode == CacheMode::Linker;
    let sink = CacheSink::new(cache.storage(), linked, policies.0, policies.1);
    let engine = Engine::start(
        EngineConfig {
            prefill_chunk: config.engine.prefill_chunk as usize,
            max_running_requests: config.engine.max_running_requests as usize,
            max_queued_requests: config.engine.max_queued_requests as usize,
            ..EngineConfig::default()
        },
        EngineParts { model: model.model.clone(), tokenizer: model.tokenizer.clone(), pool, cache, mailbox },
    )
    .map_err(|error| error.to_string())?;

    let folders = search_path(&config.storage.plugin_path);
    let storage = PluginManager::new(config.storage.clone(), folders, identity, Arc::new(sink));
    storage.attach_configured().map_err(|error| error.to_string())?;
    let admin: Option<Arc<dyn StorageAdmin>> = match sizes.host_pages {
        0 => None,
        _ => Some(Arc::new(storage.clone())),
    };

    let tokens = |pages: u32| u64::from(pages) * u64::from(page_size);
    tracing::info!(
        model = %name,
        architecture = %spec.architecture,
        device = %device.name(),
        ranks = spec.ranks,
        context = spec.context_length,
        device_tokens = tokens(sizes.device_pages),
        host_tokens = (!linked).then(|| tokens(sizes.host_pages)),
        transit_tokens = linked.then(|| tokens(sizes.host_pages)),
        "model loaded"
    );
    let metrics = Metrics::new(
        &name,
        MetricSources {
            engine: engine.handle(),
            cache: counters,
            observer,
            storage: admin.clone(),
            plugins: Some(storage.clone()),
            page_size,
            ranks: spec.ranks,
        },
    );
    let served = Served {
        engine: engine.handle(),
        tokenizer: model.tokenizer,
        template: model.template,
        spec,
        model_name: name,
        model_path: path.display().to_string(),
        storage: admin,
        settings: settings(config, device.kind()),
        page_size,
        device_tokens: tokens(sizes.device_pages),
        host_tokens: if linked { 0 } else { tokens(sizes.host_pages) },
        metrics,
        startup_seconds: began.elapsed().as_secs_f64(),
    };
    Ok(Running { engine, storage, served })
}

/// Whether all ranks hold the same bytes in the pool of all tokens, as far as the model's header says it.
pub(super) fn alike(config: &Config) -> bool {
    let ranks = config.engine.tp_size.max(1) as usize;
    // What is wrong with the header is said elsewhere.
    config
        .model
        .path
        .as_ref()
        .is_some_and(|path| kvdock_models::check_header(path, ranks).is_ok_and(|header| header.latents))
}

/// Refuses backends that have no names for pages of the host's layout, before anything is loaded or registered. What else is wrong with a
/// backend its attach finds.
fn check_layouts(config: &Config) -> Result<(), String> {
    let folders = search_path(&config.storage.plugin_path);
    for name in config.storage.selected() {
        let table = config.storage.table(name);
        if table.key_scheme == KeyScheme::Kvdock {
            continue;
        }
        let Ok(plugin) = find(&table.plugin, &folders) else { continue };
        match table.check_key_scheme(&plugin.note.config_schema, config.cache.layout(), alike(config)) {
            Err(reason) if config.storage.required => return Err(reason),
            _ => {}
        }
    }
    Ok(())
}

/// Checks of a configuration what needs no model: the device, and the sizes of the pools as far as pages go.
///
/// # Errors
/// The line that [`start`] gives.
pub(super) fn check_machine(config: &Config) -> Result<(), String> {
    device::choose_ranks(&config.engine)?;
    check_layouts(config)?;
    kv_dtype(&config.cache.dtype)?;
    let page_size = match config.cache.page_size {
        Amount::Fixed(tokens) => tokens,
        // The least that it can be: a model may wish for more.
        Amount::Auto => memory::PAGE_TOKENS as u32,
    };
    // Without bytes and memory, pages alone are looked at.
    pools(&wanted(config, page_size)).map(drop)
}

/// The sizes that the configuration asks for, in pages of no bytes on a machine that does not say what it has.
fn wanted(config: &Config, page_size: u32) -> Wanted {
    Wanted {
        device_tokens: config.cache.device_tokens,
        host_tokens: match config.cache.mode {
            CacheMode::Hierarchical => Some(config.cache.host_tokens),
            CacheMode::Linker => Some(config.cache.transit_tokens),
            CacheMode::Device => None,
        },
        transit: config.cache.mode == CacheMode::Linker,
        page_size,
        page_bytes: 0,
        context: 0,
        memory: None,
        own_memory: None,
    }
}

fn load_model(path: &Path, devices: &[Arc<dyn Device>], context_ranks: usize) -> Result<LoadedModel, String> {
    let Some((device, further)) = devices.split_first() else {
        return Err("no rank has a device".to_owned());
    };
    let progress = Progress::new();
    let update = |done, all| progress.update(done, all);
    let options = LoadOptions {
        progress: &update,
        further_ranks: further.to_vec(),
        context_ranks,
        ..LoadOptions::new(device.clone())
    };
    let model = kvdock_models::load(path, &options);
    progress.finish();
    model.map_err(|error| format!("model.path: {error}"))
}

fn name_of(path: &Path) -> String {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let is_gguf = absolute.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let name = if is_gguf { absolute.file_stem() } else { absolute.file_name() };
    match name {
        Some(name) => name.to_string_lossy().into_owned(),
        None => "model".to_owned(),
    }
}

fn kv_dtype(name: &str) -> Result<KvDtype, String> {
    [KvDtype::F16, KvDtype::BF16, KvDtype::F32]
        .into_iter()
        .find(|dtype| dtype.name() == name)
        .ok_or_else(|| format!("cache.dtype = {name:?}: is none that this build has"))
}

fn namespace(config: &Config, spec: &ModelSpec, dtype: KvDtype, page_tokens: usize) -> Namespace {
    // What the pages of several pools consist of stands in the numerics.
    let none = KvGeometry { layers: spec.layers, kv_heads: 0, head_dim_k: 0, head_dim_v: 0 };
    let kv = spec.kv.unwrap_or(none);
    let small = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Namespace {
        format: PAGE_FORMAT,
        architecture: spec.architecture.clone(),
        weights_sha256: spec.weights_digest_hex(),
        kv_dtype: dtype.name().to_owned(),
        host_layout: config.cache.layout().to_owned(),
        page_tokens: small(page_tokens),
        layers: small(kv.layers),
        kv_heads: small(kv.kv_heads),
        head_dim_k: small(kv.head_dim_k),
        head_dim_v: small(kv.head_dim_v),
        tp: (0, config.engine.tp_size),
        pp: (0, config.engine.pp_size),
        cp: (0, config.engine.cp_size),
        numerics_id: memory::numerics(spec, dtype, page_tokens),
    }
}

/// `identities` are those of the ranks.
fn cache_config(config: &Config, sizes: PoolSizes, identities: Vec<[u8; 32]>) -> Result<CacheConfig, CacheError> {
    let cache = &config.cache;
    let mut identities = identities.into_iter();
    Ok(CacheConfig {
        host_pages: sizes.host_pages,
        linked: cache.mode == CacheMode::Linker,
        host_layout: cache.layout().parse()?,
        write_policy: cache.write_policy.parse()?,
        prefetch_policy: cache.prefetch_policy.parse()?,
        prefetch_threshold: cache.prefetch_threshold as usize,
        prefetch_timeout_base: cache.prefetch_timeout_base,
        prefetch_timeout_per_ki_token: cache.prefetch_timeout_per_ki_token,
        break_even: config.storage.break_even.parse()?,
        eviction: cache.eviction.parse()?,
        identity: identities.next().unwrap_or_default(),
        further_identities: identities.collect(),
        ..CacheConfig::default()
    })
}

/// The configuration as `/get_server_info` shows it: without keys, and without the backends'
/// tables, which may hold secrets.
fn settings(config: &Config, device: &str) -> Value {
    let amount = |amount: Amount| match amount {
        Amount::Auto => json!("auto"),
        Amount::Fixed(count) => json!(count),
    };
    json!({
        "host": config.server.host,
        "port": config.server.port,
        "device": device,
        "threads": amount(config.engine.threads),
        "chunked_prefill_size": config.engine.prefill_chunk,
        "max_queued_requests": config.engine.max_queued_requests,
        "tp_size": config.engine.tp_size,
        "attn_cp_size": config.engine.cp_size,
        "pp_size": config.engine.pp_size,
        "kv_cache_dtype": config.cache.dtype,
        "radix_eviction_policy": config.cache.eviction,
        "enable_hierarchical_cache": config.cache.mode == CacheMode::Hierarchical,
        "enable_unified_cache_external_linker": config.cache.mode == CacheMode::Linker,
        "hicache_mem_layout": config.cache.layout(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_named_after_its_file_or_folder() {
        assert_eq!(name_of(Path::new("/m/Some.Model-Q4_1.gguf")), "Some.Model-Q4_1");
        assert_eq!(name_of(Path::new("/m/Some.Model/")), "Some.Model");
        assert_ne!(name_of(Path::new(".")), "model");
    }

    #[test]
    fn pools_below_a_page_passed_the_check() {
        let checked = |set: &[&str]| {
            let set = set.iter().map(|text| (*text).to_owned()).collect();
            let sources = crate::config::Sources { set, ..Default::default() };
            check_machine(&crate::config::load(&sources).unwrap().config)
        };
        checked(&["engine.threads=1"]).unwrap();
        let refused = |set: &[&str]| checked(set).unwrap_err();
        assert!(refused(&["cache.device_tokens=8"]).starts_with("cache.device_tokens = 8: takes at least one page"));
        assert!(refused(&["cache.host_tokens=8"]).starts_with("cache.host_tokens = 8: "));
        assert!(refused(&["cache.mode=linker", "cache.transit_tokens=16"]).starts_with("cache.transit_tokens = 16: "));
        assert!(refused(&["engine.tp_size=2", "engine.device=cuda"]).starts_with("engine.tp_size = 2: "));
    }

    /// Layouts that a backend has no names for were refused when the pools were registered, where all ranks hold the same bytes, and with one rank
    /// latents had no names in any layout.
    #[test]
    fn the_header_says_whether_all_ranks_hold_the_same() {
        let folder = tempfile::tempdir().unwrap();
        for (name, latents) in [("glm_dsa", true), ("deepseek_v32", true), ("qwen3_moe", false), ("dsv4", false)] {
            let model = folder.path().join(name);
            kvdock_models::testing::Fixture::new(name).unwrap().write(&model).unwrap();
            for (ranks, expected) in [(1, latents), (2, latents)] {
                let set = [format!("engine.tp_size={ranks}"), format!("model.path={:?}", model.display())];
                let sources = crate::config::Sources { set: set.into(), ..Default::default() };
                let config = crate::config::load(&sources).unwrap().config;
                assert_eq!(alike(&config), expected, "{name} over {ranks}");
            }
        }
    }

    #[test]
    fn every_configured_dtype_exists() {
        for name in ["f16", "bf16", "f32"] {
            assert_eq!(kv_dtype(name).unwrap().name(), name);
        }
        assert!(kv_dtype("f8").is_err());
    }
}
