//! Damaged checkpoints are refused with the place, the expected and the found, and never with a panic.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::{Path, PathBuf};

use common::try_load;
use kvdock_models::WeightFormat;
use kvdock_models::testing::{TinyKind, TinyModel};
use proptest::prelude::*;

/// As small as a model can be, so that it can be loaded thousands of times.
fn smallest(kind: TinyKind) -> TinyModel {
    TinyModel {
        hidden: 32,
        intermediate: 32,
        layers: 1,
        heads: 2,
        kv_heads: 1,
        head_dim: 16,
        vocab: 32,
        context: 64,
        ..TinyModel::new(kind)
    }
}

struct GgufFile {
    _dir: tempfile::TempDir,
    path: PathBuf,
    bytes: Vec<u8>,
    /// Bytes before the tensors' data, but for some padding.
    header: usize,
}

impl GgufFile {
    fn new(kind: TinyKind) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tiny.gguf");
        let model = smallest(kind);
        model.write_gguf(&path, WeightFormat::Q8_0).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        // Each tensor's data, padded to the alignment.
        let data: usize = model
            .tensors()
            .iter()
            .map(|tensor| {
                let columns = *tensor.shape.last().unwrap();
                let format = if tensor.shape.len() == 1 { WeightFormat::F32 } else { WeightFormat::Q8_0 };
                let rows = tensor.values.len() / columns;
                (rows * format.row_bytes(columns).unwrap()).next_multiple_of(32)
            })
            .sum();
        let header = bytes.len() - data;
        Self { _dir: dir, path, bytes, header }
    }

    fn load(&self, bytes: &[u8]) -> Result<(), String> {
        std::fs::write(&self.path, bytes).unwrap();
        match try_load(&self.path) {
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }
}

#[test]
fn a_gguf_file_cut_anywhere_in_its_header_is_refused() {
    let file = GgufFile::new(TinyKind::Qwen2);
    assert_eq!(file.load(&file.bytes), Ok(()));
    for length in 0..file.header {
        let error = file.load(&file.bytes[..length]).unwrap_err();
        assert!(error.contains("tiny.gguf"), "{length}: {error}");
    }
}

#[test]
fn a_gguf_file_cut_in_its_data_names_the_tensor_and_the_sizes() {
    let file = GgufFile::new(TinyKind::Llama);
    // The last 64 values are `output_norm.weight`, 128 bytes of F32.
    let length = file.bytes.len() - 1;
    let error = file.load(&file.bytes[..length]).unwrap_err();
    assert!(error.contains("tensor \"output_norm.weight\""), "{error}");
    assert!(error.contains("128 bytes") && error.contains(&format!("a file of {length} bytes")), "{error}");
    for length in (file.header..length).step_by(97) {
        let error = file.load(&file.bytes[..length]).unwrap_err();
        assert!(error.contains("tensor \""), "{length}: {error}");
    }
}

/// A flipped byte may make another sound file (a changed number, a renamed key), but never a panic, a
/// huge allocation, or an error without the file's name.
#[test]
fn flipped_bytes_in_a_gguf_header_never_end_the_process() {
    for (kind, step) in [(TinyKind::Llama, 1), (TinyKind::Qwen3, 3)] {
        let file = GgufFile::new(kind);
        for at in (0..file.header).step_by(step) {
            let mut bytes = file.bytes.clone();
            bytes[at] ^= [0xFF, 0x80, 0x01][at % 3];
            if let Err(error) = file.load(&bytes) {
                assert!(
                    error.contains("tiny.gguf") || error.contains("weight") || error.contains("tokenizer"),
                    "{at}: {error}"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn random_damage_in_a_gguf_header_never_ends_the_process(
        damage in proptest::collection::vec((0usize..100_000, any::<[u8; 8]>()), 1..4)
    ) {
        let file = GgufFile::new(TinyKind::Qwen2);
        let mut bytes = file.bytes.clone();
        for (at, new) in damage {
            let at = at % (file.header - 8);
            bytes[at..at + 8].copy_from_slice(&new);
        }
        let _ = file.load(&bytes);
    }
}

#[test]
fn a_length_past_the_end_of_the_file_is_named() {
    let file = GgufFile::new(TinyKind::Llama);
    let mut bytes = file.bytes.clone();
    // The first key's length.
    bytes[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
    let error = file.load(&bytes).unwrap_err();
    assert!(error.contains("key 0 of") && error.contains(&u64::MAX.to_string()), "{error}");
}

#[test]
fn files_that_are_no_models_say_what_was_expected() {
    let file = GgufFile::new(TinyKind::Llama);
    assert!(file.load(b"").unwrap_err().contains("the file is empty"));
    let error = file.load(b"PK\x03\x04 something else").unwrap_err();
    assert!(error.contains("beginning with \"GGUF\""), "{error}");
    let mut old = file.bytes.clone();
    old[4] = 1;
    let error = file.load(&old).unwrap_err();
    assert!(error.contains("version 2 or 3") && error.contains("found 1"), "{error}");
    let error = try_load(Path::new("/no/such/file.gguf")).unwrap_err().to_string();
    assert!(error.contains("/no/such/file.gguf"), "{error}");
}

#[test]
fn an_unknown_architecture_lists_the_known_ones() {
    let file = GgufFile::new(TinyKind::Llama);
    let at = find(&file.bytes, b"llama").unwrap();
    let mut bytes = file.bytes.clone();
    bytes[at..at + 5].copy_from_slice(b"bloom");
    let error = file.load(&bytes).unwrap_err();
    assert!(error.contains("architecture \"bloom\"") && error.contains("llama, qwen2, qwen3"), "{error}");

    let dir = folder(TinyKind::Qwen3);
    edit(dir.path(), "config.json", "Qwen3ForCausalLM", "GPT2LMHeadModel");
    let error = try_load(dir.path()).unwrap_err().to_string();
    for name in
        ["GPT2LMHeadModel", "GptOssForCausalLM, LlamaForCausalLM, MiMo", "Qwen3ForCausalLM, Qwen3MoeForCausalLM"]
    {
        assert!(error.contains(name), "{error}");
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

fn folder(kind: TinyKind) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    smallest(kind).write_hf_as(dir.path(), WeightFormat::BF16, 2).unwrap();
    dir
}

fn edit(dir: &Path, file: &str, from: &str, to: &str) {
    let path = dir.join(file);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{file} has no {from}");
    std::fs::write(path, text.replacen(from, to, 1)).unwrap();
}

const SECOND: &str = "model-00002-of-00002.safetensors";

#[test]
fn a_short_shard_names_a_tensor_and_the_sizes() {
    let dir = folder(TinyKind::Llama);
    try_load(dir.path()).unwrap();
    let path = dir.path().join(SECOND);
    let bytes = std::fs::read(&path).unwrap();
    for length in 0..bytes.len() {
        std::fs::write(&path, &bytes[..length]).unwrap();
        let error = try_load(dir.path()).unwrap_err().to_string();
        assert!(error.contains(SECOND), "{length}: {error}");
    }
    std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    let error = try_load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("tensor \"model.") && error.contains("bytes after the header"), "{error}");
}

#[test]
fn flipped_bytes_in_a_safetensors_header_never_end_the_process() {
    let dir = folder(TinyKind::Qwen2);
    let path = dir.path().join(SECOND);
    let bytes = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for at in 0..header {
        let mut damaged = bytes.clone();
        damaged[at] ^= [0xFF, 0x80, 0x01][at % 3];
        std::fs::write(&path, &damaged).unwrap();
        let _ = try_load(dir.path());
    }
}

#[test]
fn what_is_missing_from_a_folder_is_named() {
    let dir = folder(TinyKind::Llama);
    std::fs::remove_file(dir.path().join(SECOND)).unwrap();
    assert!(try_load(dir.path()).unwrap_err().to_string().contains(SECOND));

    let dir = folder(TinyKind::Llama);
    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    assert!(try_load(dir.path()).unwrap_err().to_string().contains("tokenizer.json"));

    let dir = tempfile::tempdir().unwrap();
    assert!(try_load(dir.path()).unwrap_err().to_string().contains("config.json"));

    let dir = folder(TinyKind::Llama);
    edit(dir.path(), "model.safetensors.index.json", "model.norm.weight", "model.ghost.weight");
    let error = try_load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("tensor \"model.ghost.weight\""), "{error}");
}

#[test]
fn an_index_leads_to_no_file_outside_the_folder() {
    let dir = folder(TinyKind::Llama);
    edit(dir.path(), "model.safetensors.index.json", SECOND, "../../etc/passwd");
    let error = try_load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("names of files in the folder"), "{error}");
}

#[test]
fn a_configuration_that_does_not_fit_the_tensors_names_both() {
    let cases = [
        ("\"hidden_size\": 32", "\"hidden_size\": 64", "[32, 64]", "[32, 32]"),
        ("\"intermediate_size\": 32", "\"intermediate_size\": 48", "[48, 32]", "[32, 32]"),
        ("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2", "model.layers.1.input_layernorm.weight", "none"),
        ("\"vocab_size\": 32", "\"vocab_size\": 33", "model.embed_tokens.weight", "[33, 32]"),
        ("\"num_key_value_heads\": 1", "\"num_key_value_heads\": 2", "k_proj", "[32, 32]"),
    ];
    for (from, to, first, second) in cases {
        let dir = folder(TinyKind::Llama);
        edit(dir.path(), "config.json", from, to);
        let error = try_load(dir.path()).unwrap_err().to_string();
        assert!(error.contains(first) && error.contains(second), "{to}: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    TinyModel::new(TinyKind::Llama).write_hf(dir.path()).unwrap();
    edit(dir.path(), "config.json", "\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2");
    let error = try_load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("model.layers.2.input_layernorm.weight"), "{error}");
}

#[test]
fn keys_of_the_wrong_kind_are_named_with_their_value() {
    let cases = [
        ("\"hidden_size\": 32", "\"hidden_size\": \"wide\"", "key \"hidden_size\"", "\"wide\""),
        ("\"num_attention_heads\": 2", "\"num_attention_heads\": 0", "key \"num_attention_heads\"", "found 0"),
        ("\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"", "hidden_act \"gelu\"", "\"silu\" is"),
        (
            "\"rope_scaling\": null",
            "\"rope_scaling\": {\"rope_type\": \"longrope\"}",
            "rope_scaling.rope_type",
            "longrope",
        ),
        ("\"rms_norm_eps\": ", "\"rms_norm_eps\": -1, \"old_eps\": ", "key \"rms_norm_eps\"", "found -1"),
        (
            "\"torch_dtype\"",
            "\"quantization_config\": {\"quant_method\": \"fp8\"}, \"torch_dtype\"",
            "quantization_config",
            "not supported",
        ),
    ];
    for (from, to, first, second) in cases {
        let dir = folder(TinyKind::Llama);
        edit(dir.path(), "config.json", from, to);
        let error = try_load(dir.path()).unwrap_err().to_string();
        assert!(error.contains(first) && error.contains(second), "{to}: {error}");
    }
}

#[test]
fn a_tensor_of_an_unknown_type_is_named() {
    let dir = folder(TinyKind::Llama);
    let path = dir.path().join(SECOND);
    let mut bytes = std::fs::read(&path).unwrap();
    let at = find(&bytes, b"\"BF16\"").unwrap();
    bytes[at..at + 6].copy_from_slice(b"\"I16\" ");
    std::fs::write(&path, bytes).unwrap();
    let error = try_load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("type I16") && error.contains("one of the types F32, F16, BF16"), "{error}");
}

#[test]
fn a_bias_the_configuration_does_not_know_is_refused() {
    let dir = folder(TinyKind::Qwen2);
    edit(dir.path(), "config.json", "Qwen2ForCausalLM", "LlamaForCausalLM");
    let error = try_load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("q_proj.bias") && error.contains("no bias"), "{error}");
}
