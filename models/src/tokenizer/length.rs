//! How few tokens a text can have.

use serde_json::Value;

use super::byte_to_char;

/// Bytes that the Unicode normal forms make of one at most, the other way round: "\u{212a}" (3 bytes) becomes "K", and the compatibility
/// forms make one byte of four.
const NORMAL_FORMS_SHRINK: usize = 4;
/// Most nested sequences that are looked through.
const MOST_DEPTH: usize = 4;

/// What is needed to bound the number of tokens from below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bound {
    /// Bytes of text that one token stands for at most.
    bytes_a_token: usize,
    /// Some added token takes the whitespace around it with it, however much that is.
    swallows_whitespace: bool,
}

impl Bound {
    /// The bound of a tokenizer whose longest token has `longest` bytes; `None` where parts of a text may become no token at all.
    pub(super) fn of(tokenizer: &tokenizers::Tokenizer, longest: usize) -> Option<Self> {
        let every_byte = (0..=u8::MAX).all(|byte| tokenizer.token_to_id(&byte_to_char(byte).to_string()).is_some());
        let shrink = shrink_of(&serde_json::to_value(tokenizer.get_normalizer()).ok()?, 0)?;
        let splits_only = keeps_all(&serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?, 0);
        if !every_byte || !splits_only || longest == 0 {
            return None;
        }
        let swallows_whitespace =
            tokenizer.get_added_tokens_decoder().values().any(|token| token.lstrip || token.rstrip);
        Some(Self { bytes_a_token: longest.saturating_mul(shrink), swallows_whitespace })
    }

    pub(super) fn fewest_tokens(&self, text: &str) -> usize {
        let bytes = match self.swallows_whitespace {
            false => text.len(),
            true => text.chars().filter(|c| !c.is_whitespace()).map(char::len_utf8).sum(),
        };
        bytes.div_ceil(self.bytes_a_token)
    }
}

/// By how much a normalizer shortens a text at most; `None` for one that isn't known.
fn shrink_of(normalizer: &Value, depth: usize) -> Option<usize> {
    if normalizer.is_null() {
        return Some(1);
    }
    match normalizer.get("type")?.as_str()? {
        "NFC" | "NFD" | "NFKC" | "NFKD" => Some(NORMAL_FORMS_SHRINK),
        "Sequence" if depth < MOST_DEPTH => {
            let steps = normalizer.get("normalizers")?.as_array()?;
            steps.iter().try_fold(1usize, |all, step| all.checked_mul(shrink_of(step, depth + 1)?))
        }
        _ => None,
    }
}

/// Whether a pre-tokenizer only cuts a text and drops nothing of it.
pub(super) fn keeps_all(step: &Value, depth: usize) -> bool {
    match step.get("type").and_then(Value::as_str) {
        None => step.is_null(),
        Some("ByteLevel" | "Digits") => true,
        Some("Split" | "Punctuation") => {
            step.get("behavior").and_then(Value::as_str).is_some_and(|how| how != "Removed")
        }
        Some("Sequence") if depth < MOST_DEPTH => step
            .get("pretokenizers")
            .and_then(Value::as_array)
            .is_some_and(|steps| steps.iter().all(|step| keeps_all(step, depth + 1))),
        Some(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokenizers::models::bpe::BPE;
    use tokenizers::normalizers::unicode::NFC;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::{AddedToken, Tokenizer};

    use super::*;

    /// All bytes, and two of the byte alphabet's letters as one token.
    fn tokenizer() -> Tokenizer {
        let mut vocab: Vec<(String, u32)> =
            (0..=u8::MAX).map(|byte| (byte_to_char(byte).to_string(), u32::from(byte))).collect();
        vocab.push(("ab".to_owned(), 256));
        let merges = vec![("a".to_owned(), "b".to_owned())];
        let bpe = BPE::builder()
            .vocab_and_merges(vocab.into_iter().collect::<tokenizers::models::bpe::Vocab>(), merges)
            .build()
            .unwrap();
        let mut tokenizer = Tokenizer::new(bpe);
        tokenizer.with_pre_tokenizer(Some(ByteLevel::default()));
        tokenizer
    }

    #[test]
    fn no_text_has_fewer_tokens_than_the_bound() {
        let mut normalizing = tokenizer();
        normalizing.with_normalizer(Some(NFC)).unwrap();
        let mut swallowing = tokenizer();
        swallowing.add_tokens([AddedToken::from("<s>", true).lstrip(true).rstrip(true)]).unwrap();
        let texts =
            ["", "a", "abababab", "   <s>    <s>  ", "\u{212a}\u{212a}\u{212a}", "e\u{302}\u{301}", "\u{1f600} \n"];
        for (tokenizer, longest) in [(tokenizer(), 2), (normalizing, 2), (swallowing, 3)] {
            let bound = Bound::of(&tokenizer, longest).unwrap();
            for text in texts {
                let tokens = tokenizer.encode(text, false).unwrap().len();
                assert!(bound.fewest_tokens(text) <= tokens, "{text:?}: {bound:?}, {tokens} tokens");
            }
        }
        assert_eq!(Bound::of(&tokenizer(), 2).unwrap().fewest_tokens(&"x".repeat(1000)), 500);
    }

    #[test]
    fn a_tokenizer_that_may_drop_text_has_no_bound() {
        assert_eq!(shrink_of(&json!({"type": "Strip"}), 0), None);
        assert_eq!(shrink_of(&json!({"type": "Sequence", "normalizers": []}), 0), Some(1));
        assert!(keeps_all(&json!({"type": "Split", "behavior": "Isolated"}), 0));
        assert!(!keeps_all(&json!({"type": "Split", "behavior": "Removed"}), 0));
        assert!(!keeps_all(&json!({"type": "WhitespaceSplit"}), 0));
    }
}
