//! `/abort_request` and `/flush_cache`

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::super::error::ApiError;
use super::super::fields::Fields;
use super::super::state::Server;
use crate::cache::{Flushed, Tiers};

/// Most time for emptying the storage tier.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(60);

/// Ends one request, or all.
pub(in crate::server) async fn abort_request(server: Arc<Server>, mut fields: Fields) -> Result<Response, ApiError> {
    let served = server.served()?;
    let all = fields.bool("abort_all")?.unwrap_or(false);
    let rid = fields.text("rid")?.filter(|rid| !rid.is_empty());
    fields.finish(&[], &server.unknown)?;
    let aborted = match (all, rid) {
        (true, _) => served.engine.abort_all().await,
        (false, Some(rid)) => {
            let mut aborted = 0;
            for id in server.members(&rid) {
                aborted += usize::from(served.engine.abort(&id).await);
            }
            aborted
        }
        (false, None) => {
            return Err(ApiError::field("rid", "is missing; give rid, or \"abort_all\": true"));
        }
    };
    Ok(Json(json!({"aborted": aborted})).into_response())
}

/// What `/flush_cache` was asked to empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server) struct FlushTiers {
    device: bool,
    host: bool,
    /// What the attached storage backends hold. Storage outlives a flush unless it is asked for.
    pub storage: bool,
}

/// Tiers named in `?tiers=`.
pub(in crate::server) fn read_tiers(tiers: Option<&str>) -> Result<FlushTiers, ApiError> {
    let mut chosen = FlushTiers { device: false, host: false, storage: false };
    for tier in tiers.unwrap_or("device,host").split(',').map(str::trim) {
        match tier {
            "device" => chosen.device = true,
            "host" => chosen.host = true,
            "storage" => chosen.storage = true,
            "all" => chosen = FlushTiers { device: true, host: true, storage: true },
            other => {
                let other: String = other.chars().take(40).collect();
                return Err(ApiError::field(
                    "tiers",
                    format!("takes device, host, storage or all, with commas; found {other:?}"),
                ));
            }
        }
    }
    Ok(chosen)
}

/// Empties tiers of what no request holds.
pub(in crate::server) async fn flush_cache(
    server: Arc<Server>,
    tiers: FlushTiers,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let served = server.served()?;
    let mut flushed = Flushed::default();
    if tiers.device || tiers.host {
        let tiers = Tiers { device: tiers.device, host: tiers.host };
        flushed = match served.engine.flush(tiers).await {
            Some(flushed) => flushed,
            None => return Err(ApiError::unavailable("the engine has stopped")),
        };
    }
    // After the other tiers: their backups could write anew what is being removed.
    let mut cleared = None;
    let attached = served.storage.clone().filter(|storage| storage.status().backends.iter().any(|b| b.in_use));
    if let (true, Some(storage)) = (tiers.storage, attached) {
        let result = tokio::task::spawn_blocking(move || storage.clear(None, CLEAR_TIMEOUT)).await;
        let message = result
            .map_err(|_| ApiError::internal("clearing storage failed"))?
            .map_err(|error| ApiError::bad_request(format!("the storage tier was not emptied: {error}")))?;
        cleared = Some(message);
    }
    let wants_json = headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .is_some_and(|accept| accept.contains("application/json"));
    let report = Report { tiers, has_host: served.host_tokens > 0, flushed, cleared };
    Ok(match wants_json {
        true => Json(report.json()).into_response(),
        false => report.words().into_response(),
    })
}

/// What a flush came to.
struct Report {
    tiers: FlushTiers,
    /// Whether there is a host tier; without one there is nothing to say of it.
    has_host: bool,
    flushed: Flushed,
    /// What the storage tier said, if it was there to be emptied.
    cleared: Option<String>,
}

impl Report {
    /// Names of the tiers that were emptied, and of those that were kept.
    fn lists(&self) -> (Vec<&'static str>, Vec<&'static str>) {
        let tiers = [("device", self.tiers.device), ("host", self.tiers.host), ("storage", self.cleared.is_some())];
        let there = tiers.into_iter().filter(|(name, _)| self.has_host || *name != "host");
        let (emptied, kept): (Vec<_>, Vec<_>) = there.partition(|(_, done)| *done);
        let names = |list: Vec<(&'static str, bool)>| list.into_iter().map(|(n, _)| n).collect();
        (names(emptied), names(kept))
    }

    fn json(&self) -> Value {
        let (emptied, kept) = self.lists();
        json!({
            "emptied": emptied,
            "kept": kept,
            "device_pages_freed": self.flushed.device_freed,
            "device_pages_kept": self.flushed.device_kept,
            "host_pages_freed": self.flushed.host_freed,
            "host_pages_kept": self.flushed.host_kept,
            "storage": self.cleared,
        })
    }

    fn words(&self) -> String {
        let (emptied, kept) = self.lists();
        let list = |tiers: Vec<&str>| match tiers.is_empty() {
            true => "none".to_owned(),
            false => tiers.join(", "),
        };
        let flushed = &self.flushed;
        let mut text = format!(
            "Cache flushed.\nemptied: {}\nkept: {}\ndevice: {} pages freed, {} in use stayed\n",
            list(emptied),
            list(kept),
            flushed.device_freed,
            flushed.device_kept,
        );
        if self.has_host {
            let (freed, stayed) = (flushed.host_freed, flushed.host_kept);
            text.push_str(&format!("host: {freed} pages freed, {stayed} in use stayed\n"));
        }
        if let Some(cleared) = &self.cleared {
            text.push_str(&format!("storage: {cleared}\n"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_by_name() {
        let read = |text| read_tiers(Some(text)).unwrap();
        let default = read_tiers(None).unwrap();
        assert!(default.device && default.host && !default.storage);
        assert!(read("all").storage);
        let two = read("storage, host");
        assert!(two.storage && two.host && !two.device);
        assert!(read_tiers(Some("disk")).is_err());
    }

    #[test]
    fn the_text_begins_as_sglangs_and_lists_the_tiers() {
        let report = Report {
            tiers: FlushTiers { device: true, host: true, storage: false },
            has_host: true,
            flushed: Flushed { device_freed: 9, device_kept: 3, host_freed: 7, host_kept: 0 },
            cleared: None,
        };
        let text = report.words();
        assert!(text.starts_with("Cache flushed."));
        assert!(text.contains("emptied: device, host\nkept: storage\n"), "{text}");
        assert!(text.contains("9 pages freed, 3 in use stayed"), "{text}");
        assert_eq!(report.json()["kept"], json!(["storage"]));
        let without = Report { has_host: false, ..report };
        assert!(!without.words().contains("host"), "{}", without.words());
        assert_eq!(without.json()["emptied"], json!(["device"]), "there is no host tier to empty");
    }
}
