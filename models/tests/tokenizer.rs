//! Tokenizers, from GGUF metadata and from `tokenizer.json`.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::try_load;
use kvdock_models::testing::{TinyKind, TinyModel, test_model_path};
use kvdock_models::{DecodeStream, Tokenizer, WeightFormat};
use proptest::prelude::*;

fn smollm2() -> Arc<Tokenizer> {
    static TOKENIZER: std::sync::OnceLock<Arc<Tokenizer>> = std::sync::OnceLock::new();
    Arc::clone(TOKENIZER.get_or_init(|| {
        let path = test_model_path().unwrap_or_else(|why| panic!("{why}"));
        let bytes = std::fs::read(&path).unwrap();
        let gguf = kvdock_models::gguf::Gguf::parse(&path, &bytes).unwrap();
        Arc::new(Tokenizer::from_gguf(&gguf).unwrap())
    }))
}

const VECTORS: [(&str, &[u32]); 5] = [
    ("The capital of France is", &[504, 3575, 282, 4649, 314]),
    ("Hello, world! 12345", &[19556, 28, 905, 17, 216, 33, 34, 35, 36, 37]),
    ("<|im_start|>user\nHi<|im_end|>\n", &[1, 4093, 198, 26843, 2, 198]),
    (
        "don't stop   believing\n\n  naïve café 你好",
        &[12420, 982, 2853, 256, 16517, 8866, 15486, 46494, 37366, 216, 18645, 250, 48392, 138],
    ),
    ("x = foo(1, 22)\n\treturn x", &[104, 446, 29856, 24, 33, 28, 216, 34, 34, 25, 198, 197, 5406, 1792]),
];

#[test]
fn reference_vectors_encode_and_decode() {
    let tokenizer = smollm2();
    for (text, ids) in VECTORS {
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(ids, false), text);
    }
}

/// This model puts no token around a text, so with them it is tokenized as a whole, and without them in parts that are kept.
#[test]
fn parts_of_a_text_have_the_tokens_of_the_whole() {
    let tokenizer = smollm2();
    assert!(tokenizer.encode("", true).unwrap().is_empty());
    let special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>"];
    let parts = ["", " ", "\n", "user\nHi", " Hi ", "é", "<|im_", "im_end|>", "|>", "12 3", "'s"];
    let all: Vec<&str> = special.into_iter().chain(parts).collect();
    // The second time all parts have been met before.
    for _ in 0..2 {
        for first in &all {
            for second in &all {
                for third in &all {
                    let text = [*first, *second, *third].concat();
                    assert_eq!(
                        tokenizer.encode(&text, false).unwrap(),
                        tokenizer.encode(&text, true).unwrap(),
                        "{text:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn special_tokens_are_left_out_when_asked() {
    let tokenizer = smollm2();
    let ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n", false).unwrap();
    assert_eq!(tokenizer.decode(&ids, true), "user\nHi\n");
    assert!(tokenizer.is_special(1) && !tokenizer.is_special(504));
    assert_eq!(tokenizer.token_bytes(7042), Some(b" Paris".as_slice()));
    assert_eq!(tokenizer.token_bytes(49152), None);
    assert_eq!(tokenizer.token_id("<|im_end|>"), Some(2));
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
    // An id that stands for nothing adds nothing.
    assert_eq!(tokenizer.decode(&[504, 4_000_000], false), "The");
}

#[test]
fn long_runs_of_one_character_are_no_trouble() {
    let tokenizer = smollm2();
    for unit in [" ", "a", "1", "\n", "é"] {
        let text = unit.repeat(200_000);
        let ids = tokenizer.encode(&text, false).unwrap();
        assert!(tokenizer.decode(&ids, false) == text, "{unit:?}");
    }
}

fn streamed(tokenizer: &Arc<Tokenizer>, ids: &[u32], skip_special: bool) -> String {
    let mut stream = DecodeStream::new(Arc::clone(tokenizer), skip_special);
    let mut text: String = ids.iter().map(|id| stream.push(*id)).collect();
    text.push_str(&stream.finish());
    text
}

#[test]
fn a_character_of_several_tokens_comes_out_whole() {
    let tokenizer = smollm2();
    let text = "🦀 你好 ok";
    let ids = tokenizer.encode(text, false).unwrap();
    let mut stream = DecodeStream::new(Arc::clone(&tokenizer), false);
    let pieces: Vec<String> = ids.iter().map(|id| stream.push(*id)).collect();
    assert!(pieces.iter().any(String::is_empty), "{pieces:?}");
    assert!(pieces.iter().all(|piece| !piece.contains('\u{FFFD}')), "{pieces:?}");
    assert_eq!(pieces.concat(), text);
    assert_eq!(stream.finish(), "");
}

#[test]
fn an_unfinished_character_ends_as_a_replacement() {
    let tokenizer = smollm2();
    let ids = tokenizer.encode("🦀", false).unwrap();
    assert!(ids.len() > 1);
    let mut stream = DecodeStream::new(Arc::clone(&tokenizer), false);
    assert_eq!(stream.push(ids[0]), "");
    assert!(stream.held_bytes() > 0);
    assert_eq!(stream.finish(), "\u{FFFD}");
}

proptest! {
    #[test]
    fn any_text_survives(text in any::<String>()) {
        let tokenizer = smollm2();
        let ids = tokenizer.encode(&text, false).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids, false), text);
    }

    #[test]
    fn streams_join_to_the_whole(
        ids in proptest::collection::vec(0u32..49_300, 0..60), skip_special in any::<bool>()
    ) {
        let tokenizer = smollm2();
        prop_assert_eq!(
            streamed(&tokenizer, &ids, skip_special),
            tokenizer.decode(&ids, skip_special)
        );
    }

    /// Tokens of one byte each make every broken sequence there is.
    #[test]
    fn streams_of_any_bytes_join_to_the_whole(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
        let tokenizer = byte_tokenizer();
        let ids: Vec<u32> = bytes.iter().map(|byte| u32::from(*byte)).collect();
        let whole = tokenizer.decode(&ids, false);
        prop_assert_eq!(&whole, &String::from_utf8_lossy(&bytes));
        prop_assert_eq!(streamed(&tokenizer, &ids, false), whole);
    }
}

fn byte_tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: std::sync::OnceLock<Arc<Tokenizer>> = std::sync::OnceLock::new();
    Arc::clone(TOKENIZER.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        TinyModel::new(TinyKind::Llama).write_hf(dir.path()).unwrap();
        try_load(dir.path()).unwrap().tokenizer
    }))
}

#[test]
fn both_formats_of_a_tiny_model_have_the_same_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tiny.gguf");
    TinyModel::new(TinyKind::Qwen2).write_gguf(&file, WeightFormat::F32).unwrap();
    let from_gguf = try_load(&file).unwrap().tokenizer;
    let text = "Hello 123 wörld\n";
    let ids: Vec<u32> = text.bytes().map(u32::from).collect();
    assert_eq!(from_gguf.encode(text, true).unwrap(), ids);
    assert_eq!(byte_tokenizer().encode(text, true).unwrap(), ids);
}
