//! The tokenizer of a Hugging Face folder.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;

use super::{NamedTokens, Tokenizer};
use crate::ModelError;

/// The parts of `tokenizer.json` that are checked before the file is handed on.
#[derive(Deserialize)]
struct Outline<'a> {
    #[serde(borrow)]
    model: Model<'a>,
    decoder: Option<serde_json::Value>,
    pre_tokenizer: Option<serde_json::Value>,
    #[serde(default)]
    added_tokens: Vec<Added>,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
}

#[derive(Deserialize)]
struct Model<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: HashMap<String, u32>,
    #[serde(borrow, default)]
    merges: Vec<Merge<'a>>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge<'a> {
    Pair(#[serde(borrow)] [std::borrow::Cow<'a, str>; 2]),
    Joined(#[serde(borrow)] std::borrow::Cow<'a, str>),
}

impl Tokenizer {
    /// Reads `tokenizer.json`, the content of the file at `path`. `bos` and `eos` are the texts of those
    /// tokens where `tokenizer_config.json` names them.
    ///
    /// # Errors
    /// A file that is damaged, or whose tokenizer is no byte-level BPE.
    pub fn from_json(path: &Path, json: &[u8], bos: Option<&str>, eos: Option<&str>) -> Result<Self, ModelError> {
        let damaged = |what: String| ModelError::Damaged { path: path.to_path_buf(), what };
        let unsupported = |what: String| ModelError::Unsupported { path: path.to_path_buf(), what };
        let outline: Outline<'_> = serde_json::from_slice(json).map_err(|error| damaged(error.to_string()))?;
        let model = &outline.model;
        if model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
            return Err(unsupported(format!(
                "the tokenizer model {:?} (\"BPE\" is)",
                model.kind.as_deref().unwrap_or_default()
            )));
        }
        let affix = [&model.continuing_subword_prefix, &model.end_of_word_suffix];
        if affix.into_iter().flatten().any(|affix| !affix.is_empty()) {
            return Err(unsupported("a BPE with a subword prefix or suffix".to_owned()));
        }
        for (part, value) in [("decoder", &outline.decoder), ("pre_tokenizer", &outline.pre_tokenizer)] {
            if !value.as_ref().is_some_and(|value| has_byte_level(value, 0)) {
                return Err(unsupported(format!("a tokenizer without ByteLevel in its {part}")));
            }
        }
        for (rank, merge) in model.merges.iter().enumerate() {
            let sides = match merge {
                Merge::Pair([left, right]) => Some((left.as_ref(), right.as_ref())),
                Merge::Joined(both) => both.split_once(' '),
            };
            let checked = match sides {
                Some((left, right)) => super::check_merge(left, right, |token| model.vocab.contains_key(token)),
                None => Err("a text without a space".to_owned()),
            };
            checked.map_err(|found| {
                damaged(format!("model.merges[{rank}]: expected a merge of two tokens, found {found}"))
            })?;
        }
        let added = outline.added_tokens;
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|error| damaged(error.to_string()))?;
        // Both would cut or fill a prompt behind the user's back.
        inner.with_truncation(None).map_err(|error| damaged(error.to_string()))?;
        inner.with_padding(None);
        // Ids with gaps would be closed up silently.
        for Added { id, content } in &added {
            let found = inner.token_to_id(content);
            if found != Some(*id) {
                return Err(damaged(format!(
                    "added_tokens: expected {content:?} to get its id {id}, found {}",
                    found.map_or("none".to_owned(), |found| format!("that {found} is the next"))
                )));
            }
        }
        let id = |role: &str, text: Option<&str>| match text {
            None => Ok(None),
            Some(text) => inner
                .token_to_id(text)
                .map(Some)
                .ok_or_else(|| damaged(format!("the {role} token {text:?} of tokenizer_config.json is no token"))),
        };
        let named = NamedTokens { bos: id("bos", bos)?, eos: id("eos", eos)? };
        Tokenizer::new(inner, named).map_err(|error| error.in_file(path))
    }
}

/// Whether a pre-tokenizer or decoder is, or has in its sequence, the byte alphabet.
fn has_byte_level(value: &serde_json::Value, depth: usize) -> bool {
    if value.get("type").and_then(|kind| kind.as_str()) == Some("ByteLevel") {
        return true;
    }
    depth < 4
        && ["pretokenizers", "decoders"].iter().any(|list| {
            value
                .get(list)
                .and_then(|list| list.as_array())
                .is_some_and(|list| list.iter().any(|step| has_byte_level(step, depth + 1)))
        })
}
