//! `/hicache/storage-backend`: the storage tier's controls, with SGLang's fields.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value};

use super::error::ApiError;
use super::fields::Fields;
use super::state::Server;
use super::storage_status::status_json;
use crate::cache::{PrefetchPolicy, WritePolicy};
use crate::config::check_name;
use crate::plugin::admin::{AdminError, AttachMode, AttachRequest, StorageAdmin, StorageStatus};

/// Most time for a clear.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(60);

/// The fields of a `PUT`: SGLang's, the name under which `GET` shows the config, and kvdock's own.
const ATTACH_FIELDS: [&str; 7] = [
    "hicache_storage_backend",
    "hicache_storage_backend_extra_config_json",
    "hicache_storage_backend_extra_config",
    "hicache_storage_prefetch_policy",
    "hicache_write_policy",
    "kvdock_mode",
    "kvdock_backend",
];

fn admin(server: &Server) -> Result<Arc<dyn StorageAdmin>, ApiError> {
    server.served()?.storage.clone().ok_or_else(|| {
        ApiError::bad_request(
            "there is no host tier to attach storage to: the server runs with cache.mode = \
             \"device\" or cache.host_tokens = 0",
        )
    })
}

/// Runs something that loads, drains or deletes away from the threads that answer requests.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, AdminError> + Send + 'static,
) -> Result<T, AdminError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(AdminError::new(format!("the operation failed: {error}"))),
    }
}

/// SGLang's two-line reply.
fn reply(result: Result<String, AdminError>, good: &str, bad: &str) -> Response {
    match result {
        Ok(message) => (StatusCode::OK, format!("{good}\n{message}\n")).into_response(),
        Err(error) => (StatusCode::BAD_REQUEST, format!("{bad}\n{error}\n")).into_response(),
    }
}

/// `GET`: what is attached.
pub(super) fn show(server: &Server) -> Result<Response, ApiError> {
    let served = server.served()?;
    let status = match &served.storage {
        Some(storage) => storage.status(),
        None => StorageStatus::default(),
    };
    Ok(Json(status_json(&status)).into_response())
}

/// `PUT`: attaches or replaces.
pub(super) async fn attach(server: Arc<Server>, fields: Fields) -> Result<Response, ApiError> {
    let admin = admin(&server)?;
    let request = read_attach(fields)?;
    let result = blocking(move || admin.attach(request)).await;
    Ok(reply(result, "HiCache storage backend attached.", "Failed to attach HiCache storage backend."))
}

/// Checks the name of a backend, in the field or parameter `field`.
fn expect_name(field: &'static str, name: Option<&str>) -> Result<(), ApiError> {
    let Some(name) = name else { return Ok(()) };
    check_name(name).map_err(|wrong| ApiError::field(field, format!("names a backend: {wrong}")))
}

fn read_attach(mut fields: Fields) -> Result<AttachRequest, ApiError> {
    let backend = match fields.text("hicache_storage_backend")? {
        Some(name) => name,
        None => return Err(ApiError::field("hicache_storage_backend", "is missing")),
    };
    expect_name("hicache_storage_backend", Some(&backend))?;
    let config = read_extra_config(&mut fields)?;
    let prefetch_policy = fields.text("hicache_storage_prefetch_policy")?;
    if let Some(Err(error)) = prefetch_policy.as_deref().map(str::parse::<PrefetchPolicy>) {
        return Err(ApiError::field("hicache_storage_prefetch_policy", error));
    }
    let write_policy = fields.text("hicache_write_policy")?;
    if let Some(Err(error)) = write_policy.as_deref().map(str::parse::<WritePolicy>) {
        return Err(ApiError::field("hicache_write_policy", error));
    }
    let mode = fields.text("kvdock_mode")?;
    let replaced = fields.text("kvdock_backend")?;
    expect_name("kvdock_backend", replaced.as_deref())?;
    let mode = match (mode.as_deref(), replaced) {
        (Some("add"), None) => AttachMode::Add,
        (Some("add"), Some(_)) => {
            return Err(ApiError::field(
                "kvdock_backend",
                "names a backend to replace; with \"kvdock_mode\": \"add\" none is replaced",
            ));
        }
        (None | Some("replace"), Some(name)) => AttachMode::Replace(name),
        (None | Some("replace"), None) => AttachMode::ReplaceOnly,
        (Some(other), _) => {
            let other: String = other.chars().take(40).collect();
            return Err(ApiError::field("kvdock_mode", format!("takes \"add\" or \"replace\"; found {other:?}")));
        }
    };
    fields.finish_strictly(&ATTACH_FIELDS)?;
    Ok(AttachRequest { backend, config, prefetch_policy, write_policy, mode })
}

/// The backend's config: JSON in a string, as SGLang has it, or an object. Also taken under the name by which GET shows it.
fn read_extra_config(fields: &mut Fields) -> Result<Option<Map<String, Value>>, ApiError> {
    const NAME: &str = "hicache_storage_backend_extra_config_json";
    const SHOWN: &str = "hicache_storage_backend_extra_config";
    let given = match (fields.take(NAME), fields.take(SHOWN)) {
        (Some(_), Some(_)) => {
            return Err(ApiError::field(
                SHOWN,
                format!("says the same as {NAME}, which is there too; give one of them"),
            ));
        }
        (given, shown) => given.or(shown),
    };
    match given {
        None => Ok(None),
        Some(Value::Object(map)) => Ok(Some(map)),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
        Some(Value::String(text)) if text.starts_with('@') => {
            Err(ApiError::field(NAME, "takes JSON; files of the server are not read over HTTP"))
        }
        Some(Value::String(text)) => match serde_json::from_str(&text) {
            Ok(Value::Object(map)) => Ok(Some(map)),
            Ok(_) => Err(ApiError::field(NAME, "takes a JSON object")),
            Err(error) => Err(ApiError::field(NAME, format!("is not valid JSON: {error}"))),
        },
        Some(_) => Err(ApiError::field(NAME, "takes a JSON object, also as a text")),
    }
}

/// `DELETE`: detaches one or all.
pub(super) async fn detach(server: Arc<Server>, backend: Option<String>, force: bool) -> Result<Response, ApiError> {
    expect_name("backend", backend.as_deref())?;
    let admin = admin(&server)?;
    let result = blocking(move || admin.detach(backend.as_deref(), force)).await;
    Ok(reply(result, "HiCache storage backend detached.", "Failed to detach HiCache storage backend."))
}

/// `POST .../clear`: removes what one backend or all hold for this server's namespace.
pub(super) async fn clear(server: Arc<Server>, backend: Option<String>) -> Result<Response, ApiError> {
    expect_name("backend", backend.as_deref())?;
    let admin = admin(&server)?;
    let result = blocking(move || admin.clear(backend.as_deref(), CLEAR_TIMEOUT)).await;
    Ok(reply(
        result,
        "Hierarchical cache storage backend cleared.",
        "Failed to clear hierarchical cache storage backend.",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(value: Value) -> Result<AttachRequest, ApiError> {
        read_attach(Fields::new(value.as_object().cloned().unwrap()))
    }

    #[test]
    fn sglangs_body_is_read() {
        let request = read(json!({
            "hicache_storage_backend": "file",
            "hicache_storage_backend_extra_config_json": "{\"dir\": \"/x\"}",
            "hicache_storage_prefetch_policy": "best_effort",
            "hicache_write_policy": "write_back",
        }))
        .unwrap();
        assert_eq!(request.backend, "file");
        assert_eq!(request.config.unwrap()["dir"], "/x");
        assert_eq!(request.mode, AttachMode::ReplaceOnly);
    }

    #[test]
    fn the_name_that_the_status_uses_is_taken_too() {
        let body = json!({"hicache_storage_backend": "file", "hicache_storage_backend_extra_config": {"dir": "/y"}});
        assert_eq!(read(body).unwrap().config.unwrap()["dir"], "/y");
    }

    #[test]
    fn one_of_two_configurations_was_dropped_without_a_word() {
        let both = |shown: Value| {
            json!({
                "hicache_storage_backend": "mooncake",
                "hicache_storage_backend_extra_config_json": "{\"master_server_address\": \"127.0.0.1:1\"}",
                "hicache_storage_backend_extra_config": shown,
            })
        };
        let error = read(both(json!({"protocol": "tcp"}))).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("hicache_storage_backend_extra_config"));
        assert!(error.message.contains("give one of them"), "{}", error.message);
        assert!(read(both(Value::Null)).is_ok(), "null is not given");
    }

    #[test]
    fn names_of_any_length_were_taken() {
        let long = "x".repeat(70_000);
        for (field, body) in [
            ("hicache_storage_backend", json!({"hicache_storage_backend": long})),
            ("kvdock_backend", json!({"hicache_storage_backend": "file", "kvdock_backend": long})),
        ] {
            let error = read(body).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field));
            assert!(error.message.contains("1 to 64") && error.message.len() < 300, "{}", error.message);
        }
        assert!(expect_name("backend", Some(&long)).is_err());
        assert!(expect_name("backend", None).is_ok());
    }

    #[test]
    fn modes() {
        let mode = |value| read(value).unwrap().mode;
        let base = json!({"hicache_storage_backend": "b", "kvdock_mode": "add"});
        assert_eq!(mode(base), AttachMode::Add);
        let base = json!({"hicache_storage_backend": "b", "kvdock_backend": "a"});
        assert_eq!(mode(base), AttachMode::Replace("a".into()));
    }

    #[test]
    fn a_misspelled_mode_replaced_what_it_was_to_stand_beside() {
        let error = read(json!({"hicache_storage_backend": "a", "kvdock_mod": "add"})).unwrap_err();
        assert!(
            error.message.contains("did you mean kvdock_mode? There are: hicache_storage_backend, "),
            "{}",
            error.message
        );
        let error = read(json!({"hicache_storage_backend": "a", "zzz": 1})).unwrap_err();
        assert!(error.message.contains("is no field of this request; there are: "), "{}", error.message);
    }

    #[test]
    fn wrong_bodies_name_the_field() {
        for (value, param) in [
            (json!({}), "hicache_storage_backend"),
            (json!({"hicache_storage_backend": "/tmp/x.so"}), "hicache_storage_backend"),
            (json!({"hicache_storage_backend": "a", "hicache_write_policy": "never"}), "hicache_write_policy"),
            (json!({"hicache_storage_backend": "a", "kvdock_mode": "x"}), "kvdock_mode"),
            (json!({"hicache_storage_backend": "a", "kvdock_mod": "add"}), "kvdock_mod"),
            (
                json!({"hicache_storage_backend": "a",
                "hicache_storage_backend_extra_config_json": "{"}),
                "hicache_storage_backend_extra_config_json",
            ),
            (
                json!({"hicache_storage_backend": "a",
                "hicache_storage_backend_extra_config_json": "@/etc/passwd.json"}),
                "hicache_storage_backend_extra_config_json",
            ),
        ] {
            assert_eq!(read(value).unwrap_err().param.as_deref(), Some(param));
        }
    }
}
