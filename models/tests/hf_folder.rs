//! What the files around the weights of a Hugging Face folder say.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;

use common::try_load;
use kvdock_models::testing::{TinyKind, TinyModel};
use kvdock_models::{GenerationDefaults, LoadedModel};
use serde_json::{Map, Value, json};

/// A tiny model with room for two tokens more than bytes: 256 is a special one, 257 is not.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let model = TinyModel { vocab: 258, ..TinyModel::new(TinyKind::Qwen2) };
    model.write_hf(dir.path()).unwrap();
    change(dir.path(), "tokenizer.json", |file| {
        let token = |id: u32, text: &str, special: bool| {
            json!({
                "id": id, "content": text, "special": special, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false
            })
        };
        file["added_tokens"] = json!([token(256, "<|im_end|>", true), token(257, "<think>", false)]);
    });
    dir
}

fn change(dir: &Path, file: &str, edit: impl FnOnce(&mut Value)) {
    let path = dir.join(file);
    let mut value: Value =
        std::fs::read(&path).map_or_else(|_| json!({}), |text| serde_json::from_slice(&text).unwrap());
    edit(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

fn load(dir: &tempfile::TempDir) -> LoadedModel {
    try_load(dir.path()).unwrap()
}

#[test]
fn added_tokens_are_matched_first_and_special_ones_left_out() {
    let tokenizer = load(&folder()).tokenizer;
    let ids = tokenizer.encode("a<|im_end|><think>b", false).unwrap();
    assert_eq!(ids, [97, 256, 257, 98]);
    assert_eq!(tokenizer.decode(&ids, true), "a<think>b");
    assert_eq!(tokenizer.decode(&ids, false), "a<|im_end|><think>b");
}

#[test]
fn stop_ids_come_from_every_file_that_has_some() {
    let dir = folder();
    assert!(load(&dir).spec().eos.is_empty());
    change(dir.path(), "config.json", |file| file["eos_token_id"] = json!(10));
    change(dir.path(), "generation_config.json", |file| file["eos_token_id"] = json!([11, 10]));
    assert_eq!(load(&dir).spec().eos, [10, 11]);
    // The end of a turn, once the template uses it.
    change(dir.path(), "tokenizer_config.json", |file| file["chat_template"] = json!("{{ 'x<|im_end|>' }}"));
    assert_eq!(load(&dir).spec().eos, [10, 11, 256]);
    change(dir.path(), "tokenizer_config.json", |file| {
        file["chat_template"] = json!(null);
        file["eos_token"] = json!({"content": "A", "special": true});
        file["bos_token"] = json!("B");
    });
    let loaded = load(&dir);
    assert_eq!(loaded.spec().eos, [10, 11, 65]);
    assert_eq!(loaded.spec().bos, Some(66));
}

#[test]
fn the_end_of_a_message_does_not_end_a_turn_of_several() {
    let dir = folder();
    change(dir.path(), "tokenizer.json", |file| {
        file["added_tokens"][0]["content"] = json!("<|end|>");
        file["added_tokens"][1]["content"] = json!("<|return|>");
        file["added_tokens"][1]["special"] = json!(true);
    });
    let template = |text: &str| {
        change(dir.path(), "tokenizer_config.json", |file| file["chat_template"] = json!(text));
        load(&dir).spec().eos.clone()
    };
    assert_eq!(template("<|user|>{{ messages[0].content }}<|end|>"), [256]);
    assert_eq!(template("<|start|>user<|message|>{{ messages[0].content }}<|end|>{{ '<|return|>' }}"), [257]);
}

#[test]
fn sampling_values_come_from_the_generation_config() {
    let dir = folder();
    assert_eq!(load(&dir).spec().generation, GenerationDefaults::default());
    change(dir.path(), "generation_config.json", |file| {
        *file = json!({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "min_p": null});
    });
    assert_eq!(
        load(&dir).spec().generation,
        GenerationDefaults {
            temperature: Some(0.6),
            top_p: Some(0.95),
            top_k: Some(20),
            min_p: None,
            repetition_penalty: Some(1.05),
        }
    );
    change(dir.path(), "generation_config.json", |file| file["top_p"] = json!(7));
    let error = try_load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("key \"top_p\"") && error.contains("found 7"), "{error}");
}

fn rendered(loaded: &LoadedModel) -> String {
    let messages = json!([{"role": "user", "content": "hi"}]);
    loaded.template.as_ref().unwrap().render(&messages, true, &Map::new()).unwrap()
}

#[test]
fn templates_are_found_in_their_three_places() {
    let dir = folder();
    assert_eq!(rendered(&load(&dir)), "user: hi\nassistant: ");
    change(dir.path(), "tokenizer_config.json", |file| {
        file["bos_token"] = json!("B");
        file["chat_template"] = json!([
            {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token }}default"}
        ]);
    });
    assert_eq!(rendered(&load(&dir)), "Bdefault");
    std::fs::write(dir.path().join("chat_template.jinja"), "{{ messages[0].content }}!").unwrap();
    assert_eq!(rendered(&load(&dir)), "hi!");
    std::fs::write(dir.path().join("chat_template.jinja"), "{% if %}").unwrap();
    let error = try_load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("chat_template.jinja"), "{error}");
}

#[test]
fn no_template_is_no_error() {
    let dir = folder();
    std::fs::remove_file(dir.path().join("tokenizer_config.json")).unwrap();
    assert!(load(&dir).template.is_none());
}

#[test]
fn the_digest_follows_weights_and_configuration_but_not_the_place() {
    let (first, second) = (folder(), folder());
    let digest = |dir: &tempfile::TempDir| load(dir).spec().weights_digest;
    assert_eq!(digest(&first), digest(&second));
    change(second.path(), "config.json", |file| file["rope_theta"] = json!(9999.0));
    assert_ne!(digest(&first), digest(&second));
    let third = folder();
    let path = third.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert_ne!(digest(&first), digest(&third));
}

#[test]
fn a_tokenizer_larger_than_the_embedding_is_refused() {
    let dir = folder();
    change(dir.path(), "tokenizer.json", |file| {
        let mut third = file["added_tokens"][1].clone();
        third["id"] = json!(258);
        third["content"] = json!("</think>");
        file["added_tokens"].as_array_mut().unwrap().push(third);
    });
    let error = try_load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("258") && error.contains("found 259"), "{error}");
}

#[test]
fn an_added_token_that_would_get_another_id_is_refused() {
    let dir = folder();
    change(dir.path(), "tokenizer.json", |file| file["added_tokens"][1]["id"] = json!(300));
    let error = try_load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("added_tokens") && error.contains("300") && error.contains("257"), "{error}");
}

#[test]
fn tokenizers_that_are_no_byte_level_bpe_are_refused() {
    type Edit = fn(&mut Value);
    let cases: [(Edit, &str); 4] = [
        (|file| file["model"]["type"] = json!("WordPiece"), "WordPiece"),
        (|file| file["decoder"] = json!({"type": "Fuse"}), "without ByteLevel in its decoder"),
        (|file| file["model"]["merges"] = json!([["a", "zz"]]), "model.merges[0]"),
        (|file| file["model"]["vocab"]["a"] = json!("x"), "tokenizer.json"),
    ];
    for (edit, expected) in cases {
        let dir = folder();
        change(dir.path(), "tokenizer.json", edit);
        let error = try_load(dir.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json") && error.contains(expected), "{error}");
    }
}

#[test]
fn newer_spellings_of_the_rotary_settings_are_read() {
    let dir = tempfile::tempdir().unwrap();
    TinyModel::stretched("llama3").write_hf(dir.path()).unwrap();
    let row = |dir: &Path| {
        let session = common::Session::new(try_load(dir).unwrap(), kvdock_kernels::KvDtype::F32, 2);
        session.chunk(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 0, &[0], kvdock_models::Want::Last)
    };
    let older = row(dir.path());
    change(dir.path(), "config.json", |file| {
        let mut rope = file["rope_scaling"].take();
        rope["rope_theta"] = file["rope_theta"].take();
        file["rope_parameters"] = rope;
    });
    assert_eq!(row(dir.path()), older);
}
