//! Text to token ids and back.
//!
//! A tokenizer comes from a Hugging Face `tokenizer.json` or is built from GGUF metadata; both end
//! in the same byte-level BPE. Decoding is this crate's own: every token stands for a fixed string of bytes,
//! so text can be cut between any two tokens and put together again without loss.

mod bytes;
mod from_gguf;
mod from_hf;
mod length;
mod pieces;
mod pre;
mod stream;

use std::collections::HashSet;

pub(crate) use bytes::byte_to_char;
pub(crate) use from_gguf::token_key;
pub use stream::DecodeStream;

use crate::ModelError;

/// A tokenizer. Cheap to share behind an `Arc`; all methods take `&self` from any thread.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Bytes of every token by id; empty for ids in a hole of the vocabulary.
    token_bytes: Vec<Box<[u8]>>,
    special: HashSet<u32>,
    /// Added around a text beyond what `inner` itself adds.
    before: Vec<u32>,
    after: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    /// How few tokens a text can have, where that can be said without tokenizing it.
    bound: std::sync::OnceLock<Option<length::Bound>>,
    /// Parts of texts that were tokenized before, where a text may be taken apart.
    pieces: std::sync::OnceLock<Option<pieces::Pieces>>,
}

/// The ids a checkpoint gives to tokens with a meaning.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct NamedTokens {
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
}

impl Tokenizer {
    /// Wraps a tokenizer whose tokens are byte-level; works out the bytes of every token.
    pub(crate) fn new(inner: tokenizers::Tokenizer, named: NamedTokens) -> Result<Self, ModelError> {
        let added = inner.get_added_tokens_decoder();
        let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let vocab = inner.get_vocab(true);
        let size = vocab.values().max().map_or(0, |id| *id as usize + 1);
        // Ids come from a file: a single huge one must not make a huge table.
        if size > vocab.len().saturating_mul(4).saturating_add(65_536) {
            return Err(ModelError::Tokenizer(format!(
                "the largest token id is {} but there are only {} tokens: ids must be nearly consecutive",
                size - 1,
                vocab.len()
            )));
        }
        let mut token_bytes = vec![Box::default(); size];
        for (text, id) in &vocab {
            let bytes = if added.contains_key(id) { text.as_bytes().into() } else { bytes::token_bytes(text) };
            if let Some(slot) = token_bytes.get_mut(*id as usize) {
                *slot = bytes;
            }
        }
        Ok(Self {
            inner,
            token_bytes,
            special,
            before: Vec::new(),
            after: Vec::new(),
            bos: named.bos,
            eos: named.eos,
            bound: std::sync::OnceLock::new(),
            pieces: std::sync::OnceLock::new(),
        })
    }

    /// Token ids of `text`. Special tokens spelled out in the text become their ids. With
    /// `add_special` the tokens that the checkpoint puts around a text are added (a BOS, where it wants one);
    /// a text that came out of a chat template has them already.
    ///
    /// # Errors
    /// When the pre-tokenizer or the vocabulary cannot take the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, ModelError> {
        if add_special {
            let ids = self.encode_whole(text, true)?;
            return Ok([self.before.as_slice(), &ids, self.after.as_slice()].concat());
        }
        let plain = |text: &str| self.encode_whole(text, false);
        match self.pieces.get_or_init(|| pieces::Pieces::of(&self.inner)) {
            Some(pieces) => pieces.encode(text, plain),
            None => plain(text),
        }
    }

    fn encode_whole(&self, text: &str, add_special: bool) -> Result<Vec<u32>, ModelError> {
        let encoding = self.inner.encode_fast(text, add_special);
        let encoding = encoding.map_err(|error| ModelError::Tokenizer(format!("cannot encode the text: {error}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// A lower bound of the tokens that `text` has, without special tokens around it: its bytes over those of the longest token. Costs one
    /// look at the text, where tokenizing costs a hundred times its size in memory. 0 where the tokenizer may drop parts of a text.
    pub fn fewest_tokens(&self, text: &str) -> usize {
        let bound = self.bound.get_or_init(|| {
            let longest = self.token_bytes.iter().map(|bytes| bytes.len()).max().unwrap_or_default();
            length::Bound::of(&self.inner, longest)
        });
        bound.as_ref().map_or(0, |bound| bound.fewest_tokens(text))
    }

    /// The text of `ids`: their bytes one after the other, with U+FFFD for what is no UTF-8. With
    /// `skip_special` special tokens are left out. Ids that stand for no token add nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(self.token_bytes(id).unwrap_or_default());
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes token `id` stands for, perhaps part of a character; `None` where the id stands for no token.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.token_bytes.get(id as usize).map(AsRef::as_ref).filter(|bytes: &&[u8]| !bytes.is_empty())
    }

    /// Whether `id` is a special token, which decoding may leave out.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// The id of the token spelled `text` in the vocabulary, special tokens included.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }

    /// One more than the largest token id.
    pub fn vocab_size(&self) -> usize {
        self.token_bytes.len()
    }

    /// The token that starts a text, where there is one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text, where there is one.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("bos", &self.bos)
            .field("eos", &self.eos)
            .finish_non_exhaustive()
    }
}

/// Fails unless both sides of a merge and its result are tokens; says which is none.
fn check_merge(left: &str, right: &str, is_token: impl Fn(&str) -> bool) -> Result<(), String> {
    let merged = format!("{left}{right}");
    match [left, right, &merged].into_iter().find(|token| !is_token(token)) {
        Some(token) => Err(format!("{left:?} with {right:?}, but {token:?} is no token")),
        None => Ok(()),
    }
}
