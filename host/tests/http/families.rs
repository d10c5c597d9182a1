//! Model families beyond the dense one: served where one pool of keys and values will do, refused with the reason where
//! it will not.

use serde_json::json;

use crate::support::{Server, fixture, run};

#[test]
fn experts_and_windows_are_served_and_their_prefixes_come_from_the_cache() {
    for name in ["qwen3_moe", "gpt_oss", "mimo"] {
        let server = Server::serving(fixture(name), &["cache.page_size=16"]);
        let prompt: Vec<u32> = (0..150).map(|i| (i * 37 + 11) % 251).collect();
        let body = json!({
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 12},
        });
        let cold = server.post("/generate", &body).ok();
        let warm = server.post("/generate", &body).ok();
        assert_eq!(cold["meta_info"]["cached_tokens"], 0, "{name}");
        assert_eq!(warm["meta_info"]["cached_tokens"], 144, "{name}");
        assert_eq!(warm["output_ids"], cold["output_ids"], "{name}");
        assert_eq!(cold["output_ids"].as_array().unwrap().len(), 12, "{name}");
    }
}

#[test]
fn families_of_several_pools_are_refused_with_the_pools_they_need() {
    let cases = [
        ("qwen3_5", "qwen3_5", "kv, mamba"),
        ("qwen3_next", "qwen3_next", "kv, mamba"),
        ("glm_dsa", "glm_moe_dsa", "kv, indexer"),
        ("dsv4", "deepseek_v4", "kv, swa, deepseek_v4_c4,"),
    ];
    for (fixture_name, name, pools) in cases {
        let dir = fixture(fixture_name);
        let path = format!("model.path={}", dir.path().display());
        let (status, _, errors) = run(&["serve", "--set", "server.port=0", "--set", &path]);
        assert!(!status.success(), "{name}");
        assert!(errors.contains(pools) && errors.contains(name), "{errors}");
    }
}
