//! The answer of `GET /hicache/storage-backend`: SGLang's fields, and what is known of each backend.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use super::state::unix_seconds;
use crate::config::KeyScheme;
use crate::plugin::admin::{BackendStatus, RankStatus, StorageStatus};
use crate::plugin::backend::{BackendSettings, GuardReport, WayReport};
use crate::plugin::state::StateReport;

/// The status as JSON. SGLang's fields are those of the first backend that serves.
pub(super) fn status_json(status: &StorageStatus) -> Value {
    let first = status.backends.iter().find(|backend| backend.in_use && backend.state.serves());
    let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let attached = first.is_some();
    let config = first.map(|backend| Value::Object(backend.config.clone()).to_string());
    let list = |backends: &[BackendStatus]| backends.iter().map(backend_json).collect::<Vec<_>>();
    json!({
        "hicache_storage_backend": first.map(|backend| backend.name.as_str()),
        "hicache_storage_backend_extra_config": config,
        "hicache_storage_prefetch_policy":
            attached.then(|| text(&status.prefetch_policy)).flatten(),
        "hicache_write_policy": attached.then(|| text(&status.write_policy)).flatten(),
        "backends": list(&status.backends),
        "past": list(&status.past),
    })
}

fn backend_json(backend: &BackendStatus) -> Value {
    json!({
        "name": backend.name,
        "plugin": backend.plugin,
        "version": backend.version,
        "sha256": backend.sha256,
        "instance": backend.instance,
        "state": backend.state.as_str(),
        "since": unix_seconds(backend.since),
        "reason": (!backend.reason.is_empty()).then_some(&backend.reason),
        "in_use": backend.in_use,
        "in_flight": backend.in_flight,
        "quarantined_pages": backend.quarantined_pages,
        "ranks": backend.ranks.iter().map(rank_json).collect::<Vec<_>>(),
        "history": backend.history.iter().map(report_json).collect::<Vec<_>>(),
        "guards": backend.guards.as_ref().map(guards_json),
        "settings": settings_json(&backend.settings),
        "config": backend.config,
    })
}

/// Seconds since 1970 with milliseconds: the steps of an attach are short.
fn precise_seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_millis() as f64 / 1e3)
}

fn report_json(report: &StateReport) -> Value {
    json!({
        "state": report.state.as_str(),
        "since": precise_seconds(report.since),
        "reason": (!report.reason.is_empty()).then_some(&report.reason),
    })
}

fn rank_json(rank: &RankStatus) -> Value {
    json!({
        "state": rank.state.as_str(),
        "reason": (!rank.reason.is_empty()).then_some(&rank.reason),
        "in_flight": rank.in_flight,
        "quarantined_pages": rank.quarantined_pages,
        "failed_calls": rank.failed_calls,
        "lost_pages": rank.lost_pages,
    })
}

fn guards_json(guards: &GuardReport) -> Value {
    let break_even = guards.break_even.map(|measured| {
        json!({
            "load_bytes_per_second": measured.load_bytes_per_second,
            "load_latency": measured.load_latency,
            "prefill_tokens_per_second": measured.prefill_tokens_per_second,
            "tokens": measured.tokens,
        })
    });
    json!({"reads": way_json(&guards.reads), "writes": way_json(&guards.writes), "break_even": break_even})
}

fn way_json(way: &WayReport) -> Value {
    json!({
        "breaker": way.breaker.as_str(),
        "since": way.since.map(precise_seconds),
        "resting": way.resting,
        "failures": way.failures,
        "calls": way.calls,
        "failed": way.failed,
        "skipped": way.skipped,
        "retried": way.retried,
        "queued": way.queued,
        "crowded_out": way.crowded_out,
    })
}

/// The host's keys of the backend, by the names that the config has for them.
fn settings_json(settings: &BackendSettings) -> Value {
    json!({
        "write_policy": settings.write_policy,
        "timeout": settings.timeout.as_secs_f64(),
        "drain_timeout": settings.drain_timeout.as_secs_f64(),
        "promote": settings.promote,
        // Pages go without a seal where another engine's scheme names them.
        "key_scheme": if settings.sealed { KeyScheme::Kvdock } else { KeyScheme::Sglang }.as_str(),
        "retries": settings.retries,
        "concurrency": settings.concurrency,
        "read_bandwidth": settings.read_bandwidth,
        "write_bandwidth": settings.write_bandwidth,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::plugin::BackendState;
    use crate::plugin::backend::BreakerState;

    #[test]
    fn nothing_attached_is_nulls() {
        let status = StorageStatus {
            prefetch_policy: "timeout".into(),
            write_policy: "write_through".into(),
            ..StorageStatus::default()
        };
        assert_eq!(
            status_json(&status),
            json!({"hicache_storage_backend": null, "hicache_storage_backend_extra_config": null,
                "hicache_storage_prefetch_policy": null, "hicache_write_policy": null,
                "backends": [], "past": []})
        );
    }

    fn backend() -> BackendStatus {
        let at = |millis| SystemTime::UNIX_EPOCH + Duration::from_millis(millis);
        let report = |state, since, reason: &str| StateReport { state, since: at(since), reason: reason.into() };
        BackendStatus {
            name: "fast".into(),
            plugin: "file".into(),
            version: "0.1.0".into(),
            sha256: "ab".into(),
            instance: 7,
            state: BackendState::Degraded,
            since: at(5500),
            reason: "disk full".into(),
            history: vec![report(BackendState::Active, 1250, ""), report(BackendState::Degraded, 5500, "disk full")],
            in_use: true,
            in_flight: 1,
            quarantined_pages: 2,
            ranks: vec![RankStatus {
                state: BackendState::Degraded,
                reason: "disk full".into(),
                in_flight: 1,
                quarantined_pages: 2,
                failed_calls: 3,
                lost_pages: 4,
            }],
            guards: Some(GuardReport {
                writes: WayReport { breaker: BreakerState::Open, retried: 3, ..WayReport::default() },
                ..GuardReport::default()
            }),
            settings: BackendSettings::default(),
            config: json!({"dir": "/x"}).as_object().cloned().unwrap(),
        }
    }

    #[test]
    fn an_attached_backend_is_shown() {
        let status = StorageStatus {
            prefetch_policy: "timeout".into(),
            write_policy: "write_through".into(),
            backends: vec![backend()],
            ..StorageStatus::default()
        };
        let json = status_json(&status);
        assert_eq!(json["hicache_storage_backend"], "fast");
        assert_eq!(json["hicache_storage_backend_extra_config"], "{\"dir\":\"/x\"}");
        assert_eq!(json["hicache_write_policy"], "write_through");
        let shown = &json["backends"][0];
        for (field, value) in json!({"name": "fast", "plugin": "file", "version": "0.1.0", "sha256": "ab",
            "state": "degraded", "since": 5, "reason": "disk full", "in_flight": 1, "quarantined_pages": 2,
            "in_use": true, "instance": 7, "config": {"dir": "/x"}})
        .as_object()
        .unwrap()
        {
            assert_eq!(&shown[field], value, "{field}");
        }
        assert_eq!(
            shown["history"],
            json!([{"state": "active", "since": 1.25, "reason": null},
                {"state": "degraded", "since": 5.5, "reason": "disk full"}])
        );
        assert_eq!(
            shown["ranks"],
            json!([{"state": "degraded", "reason": "disk full", "in_flight": 1, "quarantined_pages": 2,
                "failed_calls": 3, "lost_pages": 4}])
        );
        assert_eq!(shown["guards"]["writes"]["breaker"], "open");
        assert_eq!(shown["guards"]["writes"]["retried"], 3);
        assert_eq!(shown["settings"]["timeout"], 5.0);
        assert_eq!(shown["settings"]["key_scheme"], "kvdock");
        let foreign = settings_json(&BackendSettings { sealed: false, ..BackendSettings::default() });
        assert_eq!(foreign["key_scheme"], "sglang");
    }

    #[test]
    fn sglangs_fields_are_those_of_the_first_that_serves() {
        let mut failed = backend();
        failed.state = BackendState::Failed;
        let draining = BackendStatus { name: "old".into(), in_use: false, ..backend() };
        let second = BackendStatus { name: "second".into(), ..backend() };
        let status = StorageStatus { backends: vec![failed, draining, second], ..StorageStatus::default() };
        assert_eq!(status_json(&status)["hicache_storage_backend"], "second");
    }
}
