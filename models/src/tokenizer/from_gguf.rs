//! The tokenizer that GGUF metadata describes.

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, decoders::DecoderWrapper};

use super::pre::Pre;
use super::{NamedTokens, Tokenizer, bytes};
use crate::ModelError;
use crate::gguf::{Gguf, Value};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// `tokenizer.ggml.token_type`: no text of a user ever becomes these.
const TYPE_UNKNOWN: u64 = 2;
const TYPE_CONTROL: u64 = 3;
/// Matched in the text before anything else, but no special token.
const TYPE_USER_DEFINED: u64 = 4;

impl Tokenizer {
    /// Builds the byte-level BPE that `gguf` describes.
    ///
    /// # Errors
    /// Another kind of tokenizer, an unknown pre-tokenizer, lists that do not fit together.
    pub fn from_gguf(gguf: &Gguf<'_>) -> Result<Self, ModelError> {
        let unsupported = |what: String| ModelError::Unsupported { path: gguf.path().to_path_buf(), what };
        let model = gguf.required(MODEL, "the text \"gpt2\"", |value| value.as_str())?;
        if model != "gpt2" {
            return Err(unsupported(format!("the tokenizer \"{model}\" ({MODEL}; byte-level BPE, \"gpt2\", is)")));
        }
        let pre_name = gguf.optional(PRE, "a text", |value| value.as_str())?.unwrap_or("default");
        let pre = Pre::by_name(pre_name)
            .map_err(|known| unsupported(format!("the pre-tokenizer \"{pre_name}\" ({PRE}; known are {known})")))?;

        let tokens = text_array(gguf, TOKENS)?;
        if tokens.is_empty() {
            return Err(gguf.key_error(TOKENS, "at least one token", "none"));
        }
        let types = token_types(gguf, tokens.len())?;
        let mut vocab = Vocab::with_capacity(tokens.len());
        let mut added = Vec::new();
        for (id, (&token, &kind)) in (0u32..).zip(tokens.iter().zip(&types)) {
            // Of tokens spelled alike, only the first can ever come out of a text.
            vocab.entry(token.to_owned()).or_insert(id);
            match kind {
                TYPE_UNKNOWN | TYPE_CONTROL => {
                    added.push(AddedToken::from(token, true).normalized(false));
                }
                TYPE_USER_DEFINED => added.push(AddedToken::from(token, false).normalized(false)),
                _ => {}
            }
        }
        let merges = merges(gguf, &vocab)?;

        let fail = |error: tokenizers::Error| ModelError::Tokenizer(error.to_string()).in_file(gguf.path());
        let bpe =
            BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(pre.ignore_merges).build().map_err(fail)?;
        let mut inner = tokenizers::Tokenizer::new(bpe);
        if pre.nfc {
            inner.with_normalizer(Some(NFC)).map_err(fail)?;
        }
        inner.with_pre_tokenizer(Some(pre.build().map_err(fail)?));
        inner.with_decoder(Some(DecoderWrapper::ByteLevel(ByteLevel::default())));
        inner.add_tokens(added).map_err(fail)?;

        let named = NamedTokens {
            bos: token_key(gguf, "tokenizer.ggml.bos_token_id", tokens.len())?,
            eos: token_key(gguf, "tokenizer.ggml.eos_token_id", tokens.len())?,
        };
        let add_bos = flag(gguf, "tokenizer.ggml.add_bos_token")?.unwrap_or(pre.add_bos);
        let add_eos = flag(gguf, "tokenizer.ggml.add_eos_token")?.unwrap_or(false);
        let mut tokenizer = Tokenizer::new(inner, named).map_err(|error| error.in_file(gguf.path()))?;
        tokenizer.token_bytes = tokens
            .iter()
            .zip(&types)
            .map(|(token, &kind)| match kind {
                TYPE_UNKNOWN | TYPE_CONTROL | TYPE_USER_DEFINED => token.as_bytes().into(),
                _ => bytes::token_bytes(token),
            })
            .collect();
        tokenizer.before.extend(named.bos.filter(|_| add_bos));
        tokenizer.after.extend(named.eos.filter(|_| add_eos));
        Ok(tokenizer)
    }
}

/// The texts of the array `key`, which must be there.
fn text_array<'a>(gguf: &Gguf<'a>, key: &str) -> Result<Vec<&'a str>, ModelError> {
    const EXPECTED: &str = "an array of texts";
    let array = gguf.required(key, EXPECTED, |value| value.as_array())?;
    array
        .iter()
        .map(|value| value.as_str().ok_or_else(|| gguf.key_error(key, EXPECTED, format!("in it {}", value.describe()))))
        .collect()
}

/// A type for each of `count` tokens; all are normal where the file has no types.
fn token_types(gguf: &Gguf<'_>, count: usize) -> Result<Vec<u64>, ModelError> {
    const EXPECTED: &str = "an array of token types";
    let Some(array) = gguf.optional(TYPES, EXPECTED, |value| value.as_array())? else {
        return Ok(vec![1; count]);
    };
    if array.len() != count {
        return Err(gguf.key_error(TYPES, &format!("{count} types, one a token"), format!("{}", array.len())));
    }
    array
        .iter()
        .map(|value| {
            value.as_u64().ok_or_else(|| gguf.key_error(TYPES, EXPECTED, format!("in it {}", value.describe())))
        })
        .collect()
}

/// The merges in order of their rank; both sides and the result are tokens.
fn merges(gguf: &Gguf<'_>, vocab: &Vocab) -> Result<Merges, ModelError> {
    text_array(gguf, MERGES)?
        .into_iter()
        .enumerate()
        .map(|(rank, merge)| {
            // The byte alphabet has no space: the only one stands between the two sides.
            let (left, right) = merge
                .split_once(' ')
                .ok_or_else(|| gguf.key_error(MERGES, "merges of two tokens", format!("{merge:?} at {rank}")))?;
            super::check_merge(left, right, |token| vocab.contains_key(token))
                .map_err(|found| gguf.key_error(MERGES, "merges of tokens", format!("{found} at {rank}")))?;
            Ok((left.to_owned(), right.to_owned()))
        })
        .collect()
}

/// The token id in `key`, if the key is there; it must be one of the `count` tokens.
pub(crate) fn token_key(gguf: &Gguf<'_>, key: &str, count: usize) -> Result<Option<u32>, ModelError> {
    gguf.optional(key, &format!("a token id below {count}"), |value: Value<'_>| {
        value.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < count)
    })
}

fn flag(gguf: &Gguf<'_>, key: &str) -> Result<Option<bool>, ModelError> {
    gguf.optional(key, "true or false", |value| value.as_bool())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::testing::Writer;

    /// Metadata of a tokenizer with the tokens a, b, ab, BOS, EOS and a user-defined one.
    fn keys(pre: &str, edit: impl FnOnce(&mut Writer)) -> Vec<u8> {
        let mut writer = Writer::default();
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        writer.text(MODEL, "gpt2");
        writer.text(PRE, pre);
        writer.texts(TOKENS, &texts(&["a", "b", "ab", "<s>", "</s>", "<think>", "Ġ"]));
        writer.i32s(TYPES, &[1, 1, 1, 3, 3, 4, 1]);
        writer.texts(MERGES, &texts(&["a b"]));
        writer.u32("tokenizer.ggml.bos_token_id", 3);
        writer.u32("tokenizer.ggml.eos_token_id", 4);
        edit(&mut writer);
        writer.finish()
    }

    fn tokenizer(bytes: &[u8]) -> Result<Tokenizer, String> {
        let gguf = Gguf::parse(Path::new("keys.gguf"), bytes).map_err(|error| error.to_string())?;
        Tokenizer::from_gguf(&gguf).map_err(|error| error.to_string())
    }

    #[test]
    fn merges_and_added_tokens_are_used() {
        let tokenizer = tokenizer(&keys("gpt-2", |_| {})).unwrap();
        assert_eq!(tokenizer.encode("aab<think></s>", false).unwrap(), [0, 2, 5, 4]);
        assert_eq!(tokenizer.decode(&[3, 2, 6, 5, 4], true), "ab <think>");
        assert_eq!(tokenizer.decode(&[3, 2], false), "<s>ab");
    }

    #[test]
    fn bos_and_eos_are_added_as_the_file_says_or_the_pre_tokenizer_implies() {
        let encode = |bytes: &[u8], special| tokenizer(bytes).unwrap().encode("a", special).unwrap();
        assert_eq!(encode(&keys("gpt-2", |_| {}), true), [0]);
        assert_eq!(encode(&keys("llama-bpe", |_| {}), true), [3, 0]);
        assert_eq!(encode(&keys("llama-bpe", |_| {}), false), [0]);
        let never = keys("llama-bpe", |writer| writer.bool("tokenizer.ggml.add_bos_token", false));
        assert_eq!(encode(&never, true), [0]);
        let both = keys("gpt-2", |writer| {
            writer.bool("tokenizer.ggml.add_bos_token", true);
            writer.bool("tokenizer.ggml.add_eos_token", true);
        });
        assert_eq!(encode(&both, true), [3, 0, 4]);
    }

    #[test]
    fn what_does_not_fit_together_is_named() {
        let with = |key: &str, write: &dyn Fn(&mut Writer)| {
            let mut writer = Writer::default();
            writer.text(MODEL, if key == MODEL { "llama" } else { "gpt2" });
            writer.text(PRE, if key == PRE { "mystery" } else { "gpt-2" });
            write(&mut writer);
            tokenizer(&writer.finish()).unwrap_err()
        };
        let nothing = |_: &mut Writer| {};
        assert!(with(MODEL, &nothing).contains("the tokenizer \"llama\""));
        assert!(with(PRE, &nothing).contains("the pre-tokenizer \"mystery\""));
        assert!(with("", &nothing).contains("tokenizer.ggml.tokens"));
        let two = ["a".to_owned(), "b".to_owned()];
        let types = with("", &|writer| {
            writer.texts(TOKENS, &two);
            writer.i32s(TYPES, &[1]);
        });
        assert!(types.contains("expected 2 types") && types.contains("found 1"), "{types}");
        let merge = with("", &|writer| {
            writer.texts(TOKENS, &two);
            writer.texts(MERGES, &["a b".to_owned()]);
        });
        assert!(merge.contains("\"ab\" is no token"), "{merge}");
        let id = with("", &|writer| {
            writer.texts(TOKENS, &two);
            writer.texts(MERGES, &[]);
            writer.u32("tokenizer.ggml.eos_token_id", 2);
        });
        assert!(id.contains("a token id below 2") && id.contains("found the integer 2"), "{id}");
    }
}
