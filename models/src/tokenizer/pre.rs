//! Pre-tokenizers by the name GGUF files give them (`tokenizer.ggml.pre`).

use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

/// What a pre-tokenizer name stands for.
pub(super) struct Pre {
    /// Names that mean this one.
    names: &'static [&'static str],
    /// Patterns applied one after the other; every match becomes a word, and so does what lies between.
    patterns: &'static [&'static str],
    /// A word that is a token as a whole is not merged.
    pub(super) ignore_merges: bool,
    /// Text is brought into Unicode's composed form first.
    pub(super) nfc: bool,
    /// Whether a text starts with BOS when the file does not say.
    pub(super) add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

static KNOWN: &[Pre] = &[
    Pre { names: &["smollm"], patterns: &[r"\p{N}", GPT2], ignore_merges: false, nfc: false, add_bos: false },
    Pre { names: &["gpt-2", "gpt2", "default"], patterns: &[GPT2], ignore_merges: false, nfc: false, add_bos: false },
    Pre {
        names: &["llama-bpe", "llama3", "llama-v3"],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: true,
        nfc: false,
        add_bos: true,
    },
    Pre {
        names: &["qwen2"],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: false,
        nfc: true,
        add_bos: false,
    },
    Pre {
        names: &["deepseek-v3"],
        patterns: &[
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        ],
        ignore_merges: false,
        nfc: false,
        add_bos: true,
    },
];

impl Pre {
    /// The pre-tokenizer called `name`, or the names there are.
    pub(super) fn by_name(name: &str) -> Result<&'static Pre, String> {
        KNOWN.iter().find(|pre| pre.names.contains(&name)).ok_or_else(|| {
            let known: Vec<&str> = KNOWN.iter().flat_map(|pre| pre.names.iter().copied()).collect();
            known.join(", ")
        })
    }

    /// The splits, then the byte alphabet.
    pub(super) fn build(&self) -> tokenizers::Result<PreTokenizerWrapper> {
        let mut steps = Vec::with_capacity(self.patterns.len() + 1);
        for pattern in self.patterns {
            steps.push(PreTokenizerWrapper::Split(Split::new(
                SplitPattern::Regex((*pattern).to_owned()),
                SplitDelimiterBehavior::Isolated,
                false,
            )?));
        }
        steps.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, false)));
        Ok(PreTokenizerWrapper::Sequence(Sequence::new(steps)))
    }
}

#[cfg(test)]
mod tests {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    #[derive(serde::Deserialize)]
    struct Row {
        pre: String,
        text: String,
        words: Vec<String>,
    }

    /// Against another engine for regular expressions (goldens/make_pretokens.py).
    #[test]
    fn words_are_cut_as_in_the_field() {
        let rows: Vec<Row> = serde_json::from_str(include_str!("../../goldens/pretokens.json")).unwrap();
        assert!(rows.len() > 80);
        for row in rows {
            let pre = Pre::by_name(&row.pre).map_err(|known| format!("known: {known}")).unwrap().build().unwrap();
            let mut text = PreTokenizedString::from(row.text.as_str());
            pre.pre_tokenize(&mut text).unwrap();
            let words: Vec<&str> = text
                .get_splits(OffsetReferential::Normalized, OffsetType::Byte)
                .into_iter()
                .map(|(word, _, _)| word)
                .collect();
            assert_eq!(words, row.words, "{} {:?}", row.pre, row.text);
        }
    }

    #[test]
    fn an_unknown_name_gets_the_known_ones() {
        assert!(Pre::by_name("nonsense").err().unwrap().contains("llama-bpe"));
    }
}
