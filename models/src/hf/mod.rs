//! Hugging Face folders: `config.json`, safetensors files, tokenizer and chat template.

mod json;
mod shard;

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

pub use json::JsonFile;
use shard::Shard;
pub(crate) use shard::StoredTensor;

use crate::ModelError;
use crate::load::{read, read_if_there};
use crate::spec::GenerationDefaults;
use crate::template::ChatTemplate;
use crate::tokenizer::Tokenizer;
use crate::weights::RawTensor;

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// An opened folder: its configuration, and its weight files mapped and checked.
pub struct HfFolder {
    dir: PathBuf,
    config: JsonFile,
    generation: Option<JsonFile>,
    tokenizer_config: Option<JsonFile>,
    shards: Vec<Shard>,
    /// Which shard holds a tensor.
    places: HashMap<String, usize>,
}

impl HfFolder {
    /// Opens the folder at `dir`.
    ///
    /// # Errors
    /// Missing or damaged files, tensors that the index promises and no file holds.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let config = JsonFile::open(&dir.join(CONFIG))?.ok_or_else(|| ModelError::Damaged {
            path: dir.to_path_buf(),
            what: format!("expected a Hugging Face folder with {CONFIG}, found none"),
        })?;
        let index = JsonFile::open(&dir.join(INDEX))?;
        let promised = index.as_ref().map(weight_map).transpose()?;
        let files: BTreeSet<String> = match &promised {
            Some(promised) => promised.values().cloned().collect(),
            None => BTreeSet::from([SINGLE.to_owned()]),
        };
        let mut shards = Vec::with_capacity(files.len());
        let mut places = HashMap::new();
        for file in files {
            let path = dir.join(&file);
            if !path.is_file() {
                return Err(ModelError::Damaged {
                    path: dir.to_path_buf(),
                    what: format!("expected the weight file {file}, found none"),
                });
            }
            let shard = Shard::open(path)?;
            for name in shard.names() {
                if let Some(&other) = places.get(&name) {
                    let other: &Shard = &shards[other];
                    return Err(ModelError::Tensor {
                        path: shard.path.clone(),
                        tensor: name,
                        expected: "one place".to_owned(),
                        found: format!("another one in {}", other.path.display()),
                    });
                }
                places.insert(name, shards.len());
            }
            shards.push(shard);
        }
        for (tensor, file) in promised.iter().flatten() {
            if !places.contains_key(tensor) {
                return Err(ModelError::Tensor {
                    path: dir.join(INDEX),
                    tensor: tensor.clone(),
                    expected: format!("a tensor in {file}"),
                    found: "none".to_owned(),
                });
            }
        }
        Ok(Self {
            dir: dir.to_path_buf(),
            config,
            generation: JsonFile::open(&dir.join("generation_config.json"))?,
            tokenizer_config: JsonFile::open(&dir.join("tokenizer_config.json"))?,
            shards,
            places,
        })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// `config.json`.
    pub fn config(&self) -> &JsonFile {
        &self.config
    }

    /// The first of `architectures`.
    ///
    /// # Errors
    /// When the key is missing or names none.
    pub fn architecture(&self) -> Result<&str, ModelError> {
        self.config.required("architectures", "a list with the architecture's name", |value| {
            value.as_array()?.first()?.as_str()
        })
    }

    /// The tensor called `name`; `None` where no file holds one.
    ///
    /// # Errors
    /// A tensor of a type that is not supported.
    pub fn tensor(&self, name: &str) -> Result<Option<RawTensor<'_>>, ModelError> {
        match self.places.get(name).and_then(|&shard| self.shards.get(shard)) {
            Some(shard) => shard.tensor(name),
            None => Ok(None),
        }
    }

    /// As [`HfFolder::tensor`], of any type.
    pub(crate) fn stored(&self, name: &str) -> Result<Option<StoredTensor<'_>>, ModelError> {
        match self.places.get(name).and_then(|&shard| self.shards.get(shard)) {
            Some(shard) => shard.stored(name),
            None => Ok(None),
        }
    }

    /// Names of all tensors, in no order.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.places.keys().map(String::as_str)
    }

    /// The weight files in order of their names: path and content.
    pub(crate) fn weight_files(&self) -> impl Iterator<Item = (&Path, &[u8])> {
        self.shards.iter().map(|shard| (shard.path.as_path(), shard.bytes()))
    }

    /// The tokenizer of `tokenizer.json`.
    ///
    /// # Errors
    /// When the file is missing, damaged, or of a kind that is not supported.
    pub fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        let path = self.dir.join("tokenizer.json");
        let json = read(&path)?;
        Tokenizer::from_json(&path, &json, self.special_token("bos_token")?, self.special_token("eos_token")?)
    }

    /// The chat template: `chat_template.jinja`, or the one in `tokenizer_config.json`.
    ///
    /// # Errors
    /// A template that does not parse, or a list of templates without one called "default".
    pub fn template(&self) -> Result<Option<ChatTemplate>, ModelError> {
        let bos = self.special_token("bos_token")?.unwrap_or_default();
        let eos = self.special_token("eos_token")?.unwrap_or_default();
        let path = self.dir.join("chat_template.jinja");
        if let Some(bytes) = read_if_there(&path)? {
            let source = String::from_utf8(bytes).map_err(|error| ModelError::Damaged {
                path: path.clone(),
                what: format!("expected UTF-8, found another byte at {}", error.utf8_error().valid_up_to()),
            })?;
            return ChatTemplate::new(path.display().to_string(), source, bos, eos).map(Some);
        }
        let Some(config) = &self.tokenizer_config else {
            return Ok(None);
        };
        const KEY: &str = "chat_template";
        let source =
            config.optional(KEY, "a template, or a list of templates with one called \"default\"", |value| {
                value.as_str().or_else(|| {
                    value
                        .as_array()?
                        .iter()
                        .find(|entry| entry.get("name").and_then(|name| name.as_str()) == Some("default"))?
                        .get("template")?
                        .as_str()
                })
            })?;
        let origin = format!("{}: {KEY}", config.path().display());
        source.map(|source| ChatTemplate::new(origin, source, bos, eos)).transpose()
    }

    /// The text of a token in `tokenizer_config.json`, given as text or as an object with `content`.
    fn special_token(&self, key: &str) -> Result<Option<&str>, ModelError> {
        match &self.tokenizer_config {
            None => Ok(None),
            Some(config) => config
                .optional(key, "a token's text", |value| value.as_str().or_else(|| value.get("content")?.as_str())),
        }
    }

    /// The token ids under `key` (an id or a list) in `generation_config.json`, and in `config.json` and the section of
    /// its text part.
    pub(crate) fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        let mut ids = Vec::new();
        let text = self.config.section("text_config");
        for file in self.generation.iter().chain([&self.config]).chain(&text) {
            let found = file.optional(key, "a token id or a list of token ids", |value| {
                let one = |value: &serde_json::Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
                match value.as_array() {
                    Some(list) => list.iter().map(one).collect(),
                    None => one(value).map(|id| vec![id]),
                }
            })?;
            ids.extend(found.unwrap_or_default());
        }
        Ok(ids)
    }

    /// The sampling values of `generation_config.json`.
    pub(crate) fn generation_defaults(&self) -> Result<GenerationDefaults, ModelError> {
        let Some(file) = &self.generation else {
            return Ok(GenerationDefaults::default());
        };
        let number = |key: &str, low: f64, high: f64| {
            file.optional(key, &format!("a number from {low} to {high}"), |value| {
                value.as_f64().filter(|value| (low..=high).contains(value)).map(|value| value as f32)
            })
        };
        Ok(GenerationDefaults {
            temperature: number("temperature", 0.0, 100.0)?,
            top_p: number("top_p", 0.0, 1.0)?,
            top_k: file
                .optional("top_k", "a count", |value| value.as_u64().and_then(|count| u32::try_from(count).ok()))?
                .filter(|&count| count > 0),
            min_p: number("min_p", 0.0, 1.0)?,
            repetition_penalty: number("repetition_penalty", 0.0, 100.0)?,
        })
    }
}

/// Which file holds which tensor, by the index. Only plain file names are followed.
fn weight_map(index: &JsonFile) -> Result<HashMap<String, String>, ModelError> {
    let map = index.required("weight_map", "an object of tensors and their files", |value| {
        value
            .as_object()?
            .iter()
            .map(|(tensor, file)| Some((tensor.clone(), file.as_str()?.to_owned())))
            .collect::<Option<HashMap<_, _>>>()
    })?;
    for file in map.values() {
        if Path::new(file).file_name().is_none_or(|name| name != file.as_str()) {
            return Err(index.key_error("weight_map", "names of files in the folder", format!("{file:?}")));
        }
    }
    if map.is_empty() {
        return Err(index.key_error("weight_map", "at least one tensor", "none"));
    }
    Ok(map)
}
