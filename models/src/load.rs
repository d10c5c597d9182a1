//! From a path to a model that is ready to run.

use std::path::Path;
use std::sync::Arc;

use kvdock_kernels::Device;
use memmap2::Mmap;

use crate::checkpoint::Checkpoint;
use crate::digest::{Digests, Progress};
use crate::families::blocks::share::Share;
use crate::families::{self, Build, Parts};
use crate::files::{open_regular, read_regular};
use crate::gguf::Gguf;
use crate::hf::HfFolder;
use crate::ranks::{Groups, RankedModel};
use crate::stop::stop_ids;
use crate::template::ChatTemplate;
use crate::tokenizer::{Tokenizer, token_key};
use crate::{GenerationDefaults, Model, ModelError, ModelSpec, PoolDecl, PoolLayout};

/// What [`load`] needs besides the path.
pub struct LoadOptions<'a> {
    /// Where the weights go and the model runs.
    pub device: Arc<dyn Device>,
    /// Called on the loading thread, often, with bytes done and bytes in all; done never falls and is at
    /// last equal to all.
    pub progress: &'a dyn Fn(u64, u64),
    /// Keeps rows of the cache packed in eight bits with scales, for a family whose published code does so; another one
    /// is refused. Packed rows give other logits than rows in the cache's element type, and as reproducible ones.
    pub packed_rows: bool,
    /// Devices of further ranks, which compute the model together with `device`. None: it runs on `device` alone.
    pub further_ranks: Vec<Arc<dyn Device>>,
    /// Context-parallel ranks: in how many parts the rows of a pass are dealt out among the devices, which are so many times as many as there are
    /// tensor-parallel shares. In order of the devices all shares of the first part come first ([`ModelSpec::context_ranks`]).
    pub context_ranks: usize,
}

impl LoadOptions<'_> {
    /// Options that tell nobody about the progress.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { device, progress: &|_, _| {}, packed_rows: false, further_ranks: Vec::new(), context_ranks: 1 }
    }
}

/// A model, and what turns text into its tokens.
#[derive(Clone)]
pub struct LoadedModel {
    /// The model on its device.
    pub model: Arc<dyn Model>,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template, where the checkpoint has one.
    pub template: Option<Arc<ChatTemplate>>,
}

impl LoadedModel {
    /// What the model is; the same as `model.spec()`.
    pub fn spec(&self) -> &ModelSpec {
        self.model.spec()
    }
}

impl std::fmt::Debug for LoadedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadedModel")
            .field("spec", self.spec())
            .field("template", &self.template)
            .finish_non_exhaustive()
    }
}

/// Loads the GGUF file or the Hugging Face folder at `path`.
///
/// The files are mapped while the model loads and not touched afterwards. They must not be changed in
/// place meanwhile: a file cut short under the map ends the process. Change a model by writing new files and
/// renaming them.
///
/// # Errors
/// Anything that is missing, damaged, unknown or not supported, with the file, the key or tensor, what
/// was expected and what was found. Nothing is served from a checkpoint that is not whole.
pub fn load(path: &Path, options: &LoadOptions<'_>) -> Result<LoadedModel, ModelError> {
    let kind = std::fs::metadata(path).map_err(|source| ModelError::Io { path: path.to_path_buf(), source })?;
    if kind.is_dir() { load_folder(path, options) } else { load_gguf(path, options) }
}

/// What a checkpoint's header says of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// A token leaves latents, which every tensor-parallel rank holds whole, and no keys and values of heads.
    pub latents: bool,
}

/// Checks what can be seen of the checkpoint at `path` without its weights: that it opens, that a family runs it, and that `ranks`
/// tensor-parallel ranks can share its query heads. [`load`] checks this and all the rest.
///
/// # Errors
/// As [`load`].
pub fn check_header(path: &Path, ranks: usize) -> Result<Header, ModelError> {
    let kind = std::fs::metadata(path).map_err(|source| ModelError::Io { path: path.to_path_buf(), source })?;
    if kind.is_dir() {
        let folder = HfFolder::open(path)?;
        let checkpoint = Checkpoint::Hf(&folder);
        let latents = families::find(&checkpoint)?.latents;
        let heads = ["num_attention_heads", "text_config.num_attention_heads"];
        let heads = heads.iter().find_map(|key| folder.config().get(key)?.as_u64());
        check_ranks(&checkpoint, heads, ranks)?;
        return Ok(Header { latents });
    }
    let map = map_file(path)?;
    let gguf = Gguf::parse(path, &map)?;
    let checkpoint = Checkpoint::Gguf(&gguf);
    let latents = families::find(&checkpoint)?.latents;
    let heads = gguf.get(&format!("{}.attention.head_count", checkpoint.architecture()?));
    check_ranks(&checkpoint, heads.and_then(|heads| heads.as_u64()), ranks)?;
    Ok(Header { latents })
}

/// Whether the ranks can have equal shares of the query heads, where the header says how many there are.
fn check_ranks(checkpoint: &Checkpoint<'_>, heads: Option<u64>, ranks: usize) -> Result<(), ModelError> {
    let Some(heads) = heads.and_then(|heads| usize::try_from(heads).ok()).filter(|_| ranks > 1) else { return Ok(()) };
    Groups::new(ranks, 1)
        .places()
        .iter()
        .take(1)
        .try_for_each(|share| share.deal(checkpoint.config_path(), heads, "query heads").map(drop))
}

fn load_gguf(path: &Path, options: &LoadOptions<'_>) -> Result<LoadedModel, ModelError> {
    let map = map_file(path)?;
    let gguf = Gguf::parse(path, &map)?;
    let checkpoint = Checkpoint::Gguf(&gguf);
    families::find(&checkpoint)?;

    let tokenizer = Tokenizer::from_gguf(&gguf)?;
    let text_of = |id: Option<u32>| {
        let bytes = id.and_then(|id| tokenizer.token_bytes(id)).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    };
    const TEMPLATE: &str = "tokenizer.chat_template";
    let template = gguf
        .optional(TEMPLATE, "a template", |value| value.as_str())?
        .map(|source| {
            ChatTemplate::new(
                format!("{}: {TEMPLATE}", path.display()),
                source,
                text_of(tokenizer.bos()),
                text_of(tokenizer.eos()),
            )
        })
        .transpose()?;
    let mut listed = Vec::new();
    for key in ["eos", "eot", "eom"] {
        let key = format!("tokenizer.ggml.{key}_token_id");
        listed.extend(token_key(&gguf, &key, tokenizer.vocab_size())?);
    }
    let name = gguf.optional("general.name", "a text", |value| value.as_str())?;
    let identity = Identity {
        name: name.map(str::to_owned),
        bos: tokenizer.bos(),
        listed,
        generation: GenerationDefaults::default(),
    };
    finish(&checkpoint, Digests::one_file(&map), tokenizer, template, identity, options)
}

fn load_folder(path: &Path, options: &LoadOptions<'_>) -> Result<LoadedModel, ModelError> {
    let folder = HfFolder::open(path)?;
    let checkpoint = Checkpoint::Hf(&folder);
    families::find(&checkpoint)?;

    let tokenizer = folder.tokenizer()?;
    let template = folder.template()?;
    let mut listed = folder.token_ids("eos_token_id")?;
    listed.extend(tokenizer.eos());
    let config = read(folder.config().path())?;
    let mut files = vec![config.as_slice()];
    files.extend(folder.weight_files().map(|(_, bytes)| bytes));
    let identity = Identity {
        name: path.file_name().map(|name| name.to_string_lossy().into_owned()),
        bos: tokenizer.bos().or(folder.token_ids("bos_token_id")?.first().copied()),
        listed,
        generation: folder.generation_defaults()?,
    };
    finish(&checkpoint, Digests::files(files), tokenizer, template, identity, options)
}

/// What the files around the weights say.
struct Identity {
    name: Option<String>,
    bos: Option<u32>,
    /// Stop ids the checkpoint lists.
    listed: Vec<u32>,
    generation: GenerationDefaults,
}

/// Uploads the weights while a second thread computes their digest.
fn finish(
    checkpoint: &Checkpoint<'_>,
    digests: Digests<'_>,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    identity: Identity,
    options: &LoadOptions<'_>,
) -> Result<LoadedModel, ModelError> {
    let family = families::find(checkpoint)?;
    let devices: Vec<&Arc<dyn Device>> = std::iter::once(&options.device).chain(&options.further_ranks).collect();
    let context = options.context_ranks.max(1);
    if !devices.len().is_multiple_of(context) {
        let what = format!("{context} parts of the rows do not divide them");
        return Err(ModelError::Ranks { path: checkpoint.path().to_path_buf(), ranks: devices.len(), what });
    }
    let groups = Groups::new(devices.len() / context, context);
    let shares = groups.places();
    let progress = Progress::new(options.progress, digests.total_bytes());
    let hashed = progress.hashed();
    let (parts, weights_digest) = std::thread::scope(|scope| {
        let loading = std::thread::current();
        let hashing = scope.spawn(move || {
            let digest = digests.compute(hashed);
            loading.unpark();
            digest
        });
        let build = |(device, share): (&Arc<dyn Device>, &Share)| {
            (family.build)(&Build {
                checkpoint,
                device,
                share,
                progress: &progress,
                tokens: tokenizer.vocab_size(),
                packed_rows: options.packed_rows,
            })
        };
        let parts: Result<Vec<Parts>, ModelError> = devices.iter().copied().zip(&shares).map(build).collect();
        if parts.is_err() {
            progress.cancel();
        }
        while !hashed.is_done() && !hashing.is_finished() {
            progress.report();
            std::thread::park_timeout(std::time::Duration::from_millis(20));
        }
        let digest = hashing.join().map_err(|_| ModelError::Damaged {
            path: checkpoint.path().to_path_buf(),
            what: "the digest of the weights could not be computed".to_owned(),
        });
        Ok::<_, ModelError>((parts?, digest?))
    })?;
    let geometry = match parts.first() {
        Some(first) if parts.iter().all(|rank| rank.geometry == first.geometry) => first.geometry.clone(),
        _ => {
            let what = "its layers leave other pages on other ranks".to_owned();
            return Err(ModelError::Ranks { path: checkpoint.path().to_path_buf(), ranks: parts.len(), what });
        }
    };
    let packs = |pool: &PoolDecl| matches!(pool.layout, PoolLayout::PackedRows { .. } | PoolLayout::PackedKeys { .. });
    if options.packed_rows && !geometry.pools.iter().any(packs) {
        return Err(ModelError::Unsupported {
            path: checkpoint.config_path().to_path_buf(),
            what: format!("packing the cache's rows for the family {}", family.name),
        });
    }
    if tokenizer.vocab_size() > geometry.vocab_size {
        return Err(ModelError::Damaged {
            path: checkpoint.path().to_path_buf(),
            what: format!(
                "expected a tokenizer of at most {} tokens, the rows of the embedding, found {}",
                geometry.vocab_size,
                tokenizer.vocab_size()
            ),
        });
    }
    let spec = ModelSpec {
        architecture: checkpoint.architecture()?.to_owned(),
        family: family.name,
        name: identity.name,
        vocab_size: geometry.vocab_size,
        context_length: geometry.context_length,
        hidden: geometry.hidden,
        layers: geometry.layers,
        kv: geometry.kv,
        pools: geometry.pools,
        draft_pools: geometry.draft_pools,
        page_multiple: geometry.page_multiple,
        ranks: 1,
        context_ranks: 1,
        bos: identity.bos,
        eos: stop_ids(identity.listed, &tokenizer, template.as_ref()),
        generation: identity.generation,
        weights_digest,
        numerics_id: options.device.numerics_id().to_owned(),
    };
    let mut ranks: Vec<Arc<dyn Model>> = parts.into_iter().map(|rank| (rank.finish)(spec.clone())).collect();
    let model = match (ranks.len(), ranks.pop()) {
        (1, Some(model)) => model,
        (_, last) => {
            ranks.extend(last);
            let model = RankedModel::new(spec, ranks, groups);
            Arc::new(model.map_err(|source| ModelError::Io { path: checkpoint.path().to_path_buf(), source })?)
        }
    };
    progress.finish();
    Ok(LoadedModel { model, tokenizer: Arc::new(tokenizer), template: template.map(Arc::new) })
}

/// Most bytes of a file beside the weights: a configuration, a tokenizer, an index.
const MOST_BESIDE: u64 = 256 << 20;

/// Reads a file beside the weights.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, ModelError> {
    read_regular(path, MOST_BESIDE).map_err(|source| ModelError::Io { path: path.to_path_buf(), source })
}

/// As [`read`]; none where there is no such file.
pub(crate) fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>, ModelError> {
    match read(path) {
        Err(ModelError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// Maps a file for reading. An empty file gives an error, as it can be no checkpoint.
pub(crate) fn map_file(path: &Path) -> Result<Mmap, ModelError> {
    let io = |source| ModelError::Io { path: path.to_path_buf(), source };
    let file = open_regular(path).map_err(io)?;
    if file.metadata().map_err(io)?.len() == 0 {
        return Err(ModelError::Damaged { path: path.to_path_buf(), what: "the file is empty".to_owned() });
    }
    // SAFETY: the map is only read, and nothing keeps a reference into it after loading. That no other
    // process changes the file in place meanwhile is asked of the user by `load`; it can't be enforced.
    unsafe { Mmap::map(&file) }.map_err(io)
}
