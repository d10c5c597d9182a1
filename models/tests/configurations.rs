//! Configurations as real checkpoints spell them: what is said in several ways is read in each, what would be another
//! model is refused.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;

use common::header::Header;
use common::pools::{Place, PoolSession};
use common::{Session, bits, pages, try_load};
use kvdock_kernels::KvDtype;
use kvdock_models::LoadedModel;
use kvdock_models::testing::{Fixture, TinyModel, token_ids};
use serde_json::{Map, Value, json};

/// Bits of the logits of 40 tokens.
fn rows(model: &LoadedModel) -> Vec<Vec<u32>> {
    let page = 16usize.next_multiple_of(model.spec().page_multiple);
    let session = PoolSession::new(model.clone(), KvDtype::F32, page, 40usize.div_ceil(page));
    bits(&session.prompt(&token_ids("configurations.tokens", 40, 256), 40, &Place::first(40usize.div_ceil(page))))
}

fn load(fixture: &Fixture) -> Result<LoadedModel, String> {
    let dir = tempfile::tempdir().unwrap();
    fixture.write(dir.path()).unwrap();
    try_load(dir.path()).map_err(|error| error.to_string())
}

/// The fixture called `name` with `keys` in its configuration; null takes a key away.
fn with(name: &str, keys: Value) -> Fixture {
    let mut fixture = Fixture::new(name).unwrap();
    change(&mut fixture.config, keys);
    fixture
}

fn change(config: &mut Value, keys: Value) {
    let config = config.as_object_mut().unwrap();
    for (key, value) in keys.as_object().unwrap().clone() {
        match value {
            Value::Null => drop(config.remove(&key)),
            value => drop(config.insert(key, value)),
        }
    }
}

fn refused(name: &str, keys: Value, expected: &str) {
    let error = load(&with(name, keys.clone())).map(drop).unwrap_err();
    assert!(error.contains("config.json") && error.contains(expected), "{name} {keys}: {error}");
}

#[test]
fn yarn_stretches_the_context_of_every_family_that_has_it() {
    for (name, theta) in [("qwen3_moe", 1e6), ("gpt_oss", 1.5e5), ("qwen3_next", 1e7), ("deepseek_v32", 1e4)] {
        let rope = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 });
        let settings = |positions: usize| json!({ "max_position_embeddings": positions, "rope_scaling": rope, "rope_theta": theta });
        let short = load(&with(name, settings(64))).unwrap();
        assert_eq!(short.spec().context_length, 256, "{name}");
        assert!(rows(&short) == rows(&load(&with(name, settings(256))).unwrap()), "{name}");
        let page = 16;
        let session = PoolSession::new(short, KvDtype::F32, page, 16);
        assert_eq!(session.prompt(&token_ids("long.tokens", 256, 256), 64, &Place::first(16)).len(), 256, "{name}");
    }
}

#[test]
fn the_mscales_of_yarn_are_read_by_dense_models_too_and_0_is_none() {
    let rows = |keys: Value| {
        let dir = tempfile::tempdir().unwrap();
        let mut model = TinyModel::stretched("yarn");
        change(model.rope_scaling.as_mut().unwrap(), keys);
        model.write_hf(dir.path()).unwrap();
        let session = Session::new(try_load(dir.path()).unwrap(), KvDtype::F32, 3);
        bits(&session.prompt(&token_ids("mscale.tokens", 40, 256), 40, &pages(3)))
    };
    let plain = rows(json!({}));
    let one = rows(json!({ "attention_factor": 1.0 }));
    assert!(plain != one);
    assert!(rows(json!({ "mscale": 1.0, "mscale_all_dim": 1.0 })) == one);
    assert!(rows(json!({ "mscale": 1.0, "mscale_all_dim": 0 })) == plain);
    assert!(rows(json!({ "mscale": 0.707, "mscale_all_dim": 1.0 })) != one);
}

#[test]
fn a_kind_of_layer_that_nobody_knows_is_no_layer_of_another_kind() {
    let four = |kind: &str| json!(["full_attention", "sliding_attention", "full_attention", kind]);
    refused("gpt_oss", json!({ "layer_types": four("chunked_attention") }), "\"chunked_attention\" for layer 3");
    refused(
        "mimo",
        json!({ "hybrid_layer_pattern": null, "layer_types": four("linear_attention") }),
        "\"linear_attention\" for layer 3",
    );
    refused("mimo", json!({ "hybrid_layer_pattern": [0, 1, 1, 2] }), "a list of 0 and 1");
    refused("mimo", json!({ "hybrid_layer_pattern": null }), "or layer_types, found neither");
    refused("qwen3_next", json!({ "layer_types": four("full_attention") }), "\"sliding_attention\" for layer 1");
    refused("glm_dsa", json!({ "indexer_types": ["full", "full", "shared", "none"] }), "\"none\" for layer 3");
    refused("glm_dsa", json!({ "indexer_types": null, "index_topk_pattern": "FFSX" }), "letters F");
    refused("glm_dsa", json!({ "mlp_layer_types": ["dense", "moe", "moe", "moe"] }), "\"moe\" for layer 1");
    let types = json!(["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]);
    refused("dsv4", json!({ "compress_ratios": null, "layer_types": types }), "\"full_attention\" for layer 1");
    refused("dsv4", json!({ "compress_ratios": null }), "or layer_types, found neither");
}

#[test]
fn settings_of_another_model_are_refused() {
    refused("deepseek_v32", json!({ "topk_method": "greedy" }), "topk_method \"greedy\" (\"noaux_tc\" is)");
    refused("mimo", json!({ "topk_method": "group_limited_greedy" }), "(\"noaux_tc\" is)");
    refused("dsv4", json!({ "topk_method": "greedy" }), "(\"noaux_tc\" is)");
    refused("dsv4", json!({ "scoring_func": "sigmoid" }), "(\"sqrtsoftplus\" is)");
    refused("qwen3_next", json!({ "output_gate_type": "sigmoid" }), "(\"swish\" or \"silu\" is)");
    refused("qwen3_5", json!({ "attn_output_gate": false }), "attn_output_gate false");
    refused(
        "mimo",
        json!({ "rope_scaling": { "rope_type": "linear", "factor": 2.0 } }),
        "a stretched rotary embedding",
    );
    let sections = json!({ "sliding_attention": { "rope_type": "yarn", "rope_theta": 1e4 } });
    refused("mimo", json!({ "rope_parameters": sections }), "sliding_attention.rope_type \"yarn\"");
    refused("dsv4", json!({ "rope_scaling": { "type": "linear", "factor": 2.0 } }), "of type \"linear\"");
    refused("dsv4", json!({ "rope_scaling": { "type": "yarn" } }), "key \"rope_scaling.factor\"");
    refused("dsv4", json!({ "o_groups": 8 }), "heads that o_groups divides");
    refused("dsv4", json!({ "hc_sinkhorn_iters": 1 << 24 }), "an hc_sinkhorn_iters of at most 1024");
    let main = json!({ "main": { "rope_type": "yarn" } });
    refused("dsv4", json!({ "rope_parameters": main }), "rope_parameters.main.rope_type \"yarn\"");
}

#[test]
fn rotary_settings_that_cannot_be_name_the_file() {
    let yarn = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 });
    refused("qwen3_moe", json!({ "rope_theta": 0.5, "rope_scaling": yarn }), "rope theta for yarn");
    refused("deepseek_v32", json!({ "qk_rope_head_dim": 1 << 20, "index_head_dim": 1 << 20 }), "up to 65536");
    let dir = tempfile::tempdir().unwrap();
    let mut model = TinyModel::stretched("llama3");
    model.rope_scaling.as_mut().unwrap()["low_freq_factor"] = json!(4.0);
    model.write_hf(dir.path()).unwrap();
    let error = try_load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("config.json") && error.contains("high_freq_factor"), "{error}");
}

#[test]
fn a_model_that_the_configuration_cuts_short_is_refused() {
    for (name, layers, tensor) in [
        ("qwen3_moe", 2, "model.layers.2.input_layernorm.weight"),
        ("gpt_oss", 2, "model.layers.2.input_layernorm.weight"),
        ("mimo", 3, "model.layers.3.input_layernorm.weight"),
        ("glm_dsa", 3, "model.layers.3.input_layernorm.weight"),
        ("dsv4", 3, "layers.3.attn_norm.weight"),
    ] {
        let error = load(&with(name, json!({ "num_hidden_layers": layers }))).map(drop).unwrap_err();
        let expected = format!("{layers} layers by the model's configuration");
        assert!(error.contains(&format!("tensor \"{tensor}\"")) && error.contains(&expected), "{name}: {error}");
    }
    // Layers that predict further tokens lie behind the others.
    load(&with("glm_dsa", json!({ "num_hidden_layers": 3, "num_nextn_predict_layers": 1 }))).unwrap();
}

#[test]
fn deepseek_v4_is_read_in_the_spelling_of_newer_files() {
    let newer = with(
        "dsv4",
        json!({
            "compress_ratios": null, "qk_rope_head_dim": null, "num_hash_layers": null, "rope_scaling": null,
            "rope_theta": null, "compress_rope_theta": null, "partial_rotary_factor": 0.25,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                "compressed_sparse_attention"],
            "compress_rates": { "compressed_sparse_attention": 4, "heavily_compressed_attention": 128 },
            "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
            "rope_parameters": {
                "main": { "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25 },
                "compress": {
                    "rope_type": "yarn", "rope_theta": 160000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
                    "original_max_position_embeddings": 128, "attention_factor": 1.0
                },
            },
        }),
    );
    assert!(rows(&load(&newer).unwrap()) == rows(&load(&Fixture::new("dsv4").unwrap()).unwrap()));
    let rates = json!({ "compressed_sparse_attention": 8 });
    let mut other = newer;
    other.config["compress_rates"] = rates;
    let error = load(&other).map(drop).unwrap_err();
    assert!(error.contains("a compress ratio of 8"), "{error}");
}

#[test]
fn mimo_is_read_with_a_section_for_each_kind_of_layer() {
    let sections = json!({
        "full_attention": { "rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334 },
        "sliding_attention": { "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334 },
    });
    let types = json!(["full_attention", "sliding_attention", "sliding_attention", "full_attention"]);
    let newer = with(
        "mimo",
        json!({
            "rope_theta": null, "swa_rope_theta": null, "partial_rotary_factor": null, "rope_parameters": sections,
            "hybrid_layer_pattern": null, "layer_types": types, "sliding_window_size": null, "sliding_window": 17,
        }),
    );
    assert!(rows(&load(&newer).unwrap()) == rows(&load(&Fixture::new("mimo").unwrap()).unwrap()));
}

/// Writes the text model of `fixture` as the part of a model that also sees.
fn write_composite(fixture: &Fixture, dir: &Path, top: Value, text: Value, tensors: impl Fn(&str) -> Option<String>) {
    let mut whole = fixture.clone();
    let mut inner = fixture.config.clone();
    change(&mut inner, json!({ "architectures": null, "tie_word_embeddings": null }));
    change(&mut inner, text);
    whole.config = json!({ "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": inner });
    change(&mut whole.config, top);
    whole.write(dir).unwrap();
    let header = Header::read(dir);
    let renamed = |(name, entry): (&String, &Value)| {
        let name =
            if name == "__metadata__" { name.clone() } else { tensors(name).unwrap_or(format!("unused.{name}")) };
        (name, entry.clone())
    };
    header.write(&header.entries.iter().map(renamed).collect::<Map<String, Value>>());
}

#[test]
fn the_text_part_of_a_model_that_sees_says_what_the_whole_does_not() {
    let fixture = Fixture::new("qwen3_5").unwrap();
    let inside = |name: &str| match name.strip_prefix("model.") {
        Some(rest) => Some(format!("model.language_model.{rest}")),
        None => Some(name.to_owned()),
    };
    let dir = tempfile::tempdir().unwrap();
    write_composite(&fixture, dir.path(), json!({}), json!({ "eos_token_id": 7 }), inside);
    let composite = try_load(dir.path()).unwrap();
    assert_eq!(composite.spec().eos, [7]);
    let plain = rows(&load(&fixture).unwrap());
    assert!(rows(&composite) == plain);

    // The output matrix is the embedding: the whole says so, or the text part.
    let headless = |name: &str| if name == "lm_head.weight" { None } else { inside(name) };
    let tied = json!({ "tie_word_embeddings": true });
    let mut seen = Vec::new();
    for (top, text) in [(tied.clone(), json!({})), (json!({}), tied.clone()), (json!({}), json!({}))] {
        let dir = tempfile::tempdir().unwrap();
        write_composite(&fixture, dir.path(), top, text, headless);
        seen.push(try_load(dir.path()).map(|model| rows(&model)).map_err(|error| error.to_string()));
    }
    assert!(seen[0].is_ok() && seen[0] == seen[1] && seen[0] != Ok(plain));
    assert!(seen[2].as_ref().unwrap_err().contains("tensor \"lm_head.weight\""));
}

#[test]
fn a_bias_that_deepseek_v4_would_leave_out_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    with("dsv4", json!({ "num_nextn_predict_layers": 0 })).write(dir.path()).unwrap();
    let header = Header::read(dir.path());
    for bias in ["layers.1.attn.wq_b.bias", "layers.3.ffn.experts.2.w1.bias", "layers.1.attn.indexer.weights_proj.bias"]
    {
        let mut entries = header.entries.clone();
        let entry = entries.remove("mtp.0.norm.weight").unwrap();
        entries.insert(bias.to_owned(), entry);
        header.write(&entries);
        let error = try_load(dir.path()).unwrap_err().to_string();
        assert!(error.contains(bias) && error.contains("no bias"), "{error}");
    }
}

#[test]
fn a_scale_of_another_type_is_named_and_not_the_blocks() {
    let dir = tempfile::tempdir().unwrap();
    Fixture::new("gpt_oss_mxfp4").unwrap().write(dir.path()).unwrap();
    let header = Header::read(dir.path());
    let scales = "model.layers.0.mlp.experts.gate_up_proj_scales";
    let mut entries = header.entries.clone();
    entries[scales]["dtype"] = json!("I8");
    header.write(&entries);
    let error = try_load(dir.path()).unwrap_err().to_string();
    assert!(error.contains(&format!("tensor \"{scales}\": expected type U8, found type I8")), "{error}");
}

#[test]
fn a_model_in_several_files_is_the_same_model() {
    for name in ["qwen3_moe", "gpt_oss_mxfp4", "deepseek_v32", "dsv4q"] {
        let fixture = Fixture::new(name).unwrap();
        let fixture = if name == "deepseek_v32" { fixture.in_fp8_blocks([16, 48]).0 } else { fixture };
        let dir = tempfile::tempdir().unwrap();
        fixture.write_shards(dir.path(), 3).unwrap();
        assert!(dir.path().join("model-00003-of-00003.safetensors").is_file());
        assert!(rows(&try_load(dir.path()).unwrap()) == rows(&load(&fixture).unwrap()), "{name}");
        std::fs::remove_file(dir.path().join("model-00002-of-00003.safetensors")).unwrap();
        let error = try_load(dir.path()).unwrap_err().to_string();
        assert!(error.contains("model-00002-of-00003.safetensors"), "{error}");
    }
}

#[test]
fn every_fixture_has_goldens() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/goldens/families.json");
    let goldens: Map<String, Value> = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    for name in Fixture::NAMES {
        let golden = goldens.get(name).unwrap_or_else(|| panic!("{name} has no goldens"));
        assert!(golden["positions"].as_array().unwrap().len() >= 7, "{name}");
    }
}
