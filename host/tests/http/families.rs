//! Model families beyond the dense one, of one pool of keys and values and of several.

use serde_json::json;

use crate::support::{Server, fixture};

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
fn families_of_several_pools_are_served_and_their_prefixes_come_from_the_cache() {
    for name in ["qwen3_5", "qwen3_next", "glm_dsa", "dsv4"] {
        let server = Server::serving(fixture(name), &[]);
        let prompt: Vec<u32> = (0..400).map(|i| (i * 37 + 11) % 251).collect();
        let body = json!({
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 4},
        });
        let cold = server.post("/generate", &body).ok();
        let warm = server.post("/generate", &body).ok();
        assert_eq!(cold["meta_info"]["cached_tokens"], 0, "{name}");
        assert!(warm["meta_info"]["cached_tokens"].as_u64().unwrap() >= 256, "{name}: {}", warm["meta_info"]);
        assert_eq!(warm["output_ids"], cold["output_ids"], "{name}");
    }
}
