//! Keys and the storage tier's controls

use serde_json::{Value, json};

use crate::support::{Server, completion};

const PATH: &str = "/hicache/storage-backend";

#[test]
fn nothing_attached_is_nulls_and_what_fails_changes_nothing() {
    let server = Server::start();
    let nothing = server.get(PATH).ok();
    for field in [
        "hicache_storage_backend",
        "hicache_storage_backend_extra_config",
        "hicache_storage_prefetch_policy",
        "hicache_write_policy",
    ] {
        assert_eq!(nothing.get(field), Some(&Value::Null), "{nothing}");
    }
    assert_eq!(nothing["backends"], json!([]));
    let reply = server.put(PATH, &json!({"hicache_storage_backend": "no-such-plugin"}));
    assert_eq!(reply.status, 400);
    assert!(reply.text.starts_with("Failed to attach HiCache storage backend.\n"), "{}", reply.text);
    assert!(reply.text.contains("no-such-plugin"), "{}", reply.text);
    let error = server.put(PATH, &json!({"hicache_storage_backend": "../x.so"})).error(400);
    assert!(error["message"].as_str().unwrap().contains("never a path"), "{error}");
    assert_eq!(server.get(PATH).ok(), nothing);
    let reply = server.delete(PATH);
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert!(reply.text.starts_with("HiCache storage backend detached."), "{}", reply.text);
    let reply = server.post(&format!("{PATH}/clear"), &json!({}));
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(server.delete(&format!("{PATH}?force=maybe")).error(400)["param"], "force");
}

#[test]
fn without_a_host_tier_there_is_nothing_to_attach_to() {
    let server = Server::with(&["cache.mode=device"]);
    let error = server.put(PATH, &json!({"hicache_storage_backend": "file"})).error(400);
    assert!(error["message"].as_str().unwrap().contains("host tier"), "{error}");
    assert_eq!(server.get(PATH).ok()["backends"], json!([]));
}

#[test]
fn keys_are_asked_for() {
    let server = Server::with(&["server.api_key=user-key", "server.admin_key=root-key"]);
    let body = completion(json!("x"), json!({}));
    let bearer = |key: &'static str| ("authorization", key);
    let error = server.post("/v1/completions", &body).error(401);
    assert_eq!(error["type"], "authentication_error");
    assert!(!error.to_string().contains("user-key"));
    server.post_with("/v1/completions", &body, bearer("Bearer nope")).error(401);
    server.post_with("/v1/completions", &body, bearer("Bearer user-key")).ok();
    server.post_with("/v1/completions", &body, bearer("Bearer root-key")).ok();
    server.get("/v1/models").error(401);
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/metrics").status, 200);
    server.get(PATH).error(401);
    server.get_with(PATH, bearer("Bearer user-key")).error(401);
    server.get_with(PATH, bearer("Bearer root-key")).ok();
    server.get_with("/flush_cache?tiers=all", bearer("Bearer user-key")).error(401);
    assert_eq!(server.get_with("/flush_cache", bearer("Bearer user-key")).status, 200);
}

#[test]
fn a_misspelled_query_parameter_was_taken_for_all_backends() {
    let server = Server::start();
    for path in [format!("{PATH}?backnd=near"), format!("{PATH}?backend=near&forse=true")] {
        let error = server.delete(&path).error(400);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("unknown parameter") && message.contains("backend, force"), "{path}: {message}");
    }
    for reply in [
        server.get(&format!("{PATH}?x=1")),
        server.put(&format!("{PATH}?x=1"), &json!({"hicache_storage_backend": "file"})),
    ] {
        assert!(reply.error(400)["message"].as_str().unwrap().contains("unknown parameter \"x\""), "{}", reply.text);
    }
    let error = server.delete(&format!("{PATH}?backend=near&backend=far")).error(400);
    assert_eq!(error["param"], "backend", "{error}");
}
