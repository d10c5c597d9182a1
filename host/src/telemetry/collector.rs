//! Which figure goes under which name. SGLang's names where it has one.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::metrics::MetricSources;
use super::write::Writer;
use super::{backends, calls};
use crate::cache::{CacheStats, StorageOp, StorageResult};
use crate::engine::EngineStats;
use crate::plugin::admin::StorageStatus;
use crate::plugin::manager::ReportedMetric;

/// Reads all figures when metrics are asked for.
pub(super) struct Figures(pub MetricSources);

impl fmt::Debug for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Figures")
    }
}

impl Collector for Figures {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Writer(encoder);
        let engine = self.0.engine.stats();
        let cache = self.0.cache.snapshot();
        requests(&mut out, &engine)?;
        tokens(&mut out, &engine)?;
        out.gauge("kvdock:ranks", "Tensor-parallel ranks", self.0.ranks as f64)?;
        pools(&mut out, &cache, self.0.page_size)?;
        tiers(&mut out, &cache)?;
        prefetch(&mut out, &cache)?;
        let status = self.0.storage.as_ref().map(|storage| storage.status()).unwrap_or_default();
        self.distributions(&mut out, &status)?;
        self.storage(&mut out, &status)
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    match whole {
        0 => 0.0,
        whole => part as f64 / whole as f64,
    }
}

fn requests(out: &mut Writer<'_>, engine: &EngineStats) -> fmt::Result {
    out.gauge("sglang:num_running_reqs", "Requests in prefill or decode", engine.running as f64)?;
    out.gauge("sglang:num_queue_reqs", "Requests waiting", engine.queued as f64)?;
    out.gauge(
        "sglang:gen_throughput",
        "Tokens generated a second over the last seconds",
        engine.generation_throughput,
    )?;
    out.counter("sglang:num_requests", "Requests taken", engine.requests_total)?;
    out.counter("sglang:num_aborted_requests", "Samples aborted", engine.aborted_total)?;
    out.counter("kvdock:rejected_requests", "Requests refused: queue full", engine.rejected_total)?;
    out.counter("kvdock:preemptions", "Samples put back for want of pages", engine.preempted_total)?;
    out.counter("kvdock:steps", "Forward passes", engine.steps_total)?;
    out.counter("kvdock:failed_steps", "Forward passes that failed", engine.failed_steps_total)?;
    out.histogram(
        "sglang:time_to_first_token_seconds",
        "Time from submission to the first token",
        &engine.time_to_first_token,
    )?;
    out.histogram(
        "sglang:inter_token_latency_seconds",
        "Time between tokens of a sample",
        &engine.inter_token_latency,
    )?;
    out.histogram("sglang:e2e_request_latency_seconds", "Time from submission to the end", &engine.e2e_latency)?;
    out.histogram("sglang:queue_time_seconds", "Time from submission to the first forward pass", &engine.queue_time)
}

fn tokens(out: &mut Writer<'_>, engine: &EngineStats) -> fmt::Result {
    let cached = [
        ("device", engine.cached_device_total),
        ("host", engine.cached_host_total),
        ("storage", engine.cached_storage_total),
    ];
    let all: u64 = cached.iter().map(|(_, tokens)| tokens).sum();
    let labelled = cached.map(|(tier, tokens)| ([("cache_source", tier)], tokens));
    let series: Vec<_> = labelled.iter().map(|(labels, n)| (labels.as_slice(), *n)).collect();
    out.counters("sglang:cached_tokens", "Prompt tokens reused, by tier", &series)?;
    out.gauge(
        "sglang:cache_hit_rate",
        "Part of all prompt tokens that was reused",
        ratio(all, engine.prompt_tokens_total),
    )?;
    out.counter("sglang:prompt_tokens", "Prompt tokens", engine.prompt_tokens_total)?;
    out.counter("sglang:generation_tokens", "Tokens generated", engine.generation_tokens_total)?;
    out.histogram("sglang:prompt_tokens_histogram", "Prompt lengths", &engine.prompt_lengths)?;
    out.histogram("sglang:generation_tokens_histogram", "Completion lengths", &engine.completion_lengths)
}

fn pools(out: &mut Writer<'_>, cache: &CacheStats, page_size: u32) -> fmt::Result {
    let total = cache.device_total_tokens;
    let free = total.saturating_sub(cache.device_used_tokens);
    // As in SGLang, tokens that could be evicted at any time are not in use.
    let used = cache.device_used_tokens.saturating_sub(cache.device_evictable_tokens);
    out.gauge("sglang:max_total_num_tokens", "Tokens the device pool holds", total as f64)?;
    out.gauge("sglang:num_used_tokens", "Device tokens that requests hold", used as f64)?;
    out.gauge("sglang:token_usage", "Part of the device pool that requests hold", ratio(used, total))?;
    out.gauge("sglang:kv_used_tokens", "Device tokens that requests hold", used as f64)?;
    out.gauge("sglang:kv_available_tokens", "Free device tokens", free as f64)?;
    out.gauge(
        "sglang:kv_evictable_tokens",
        "Cached device tokens that no request holds",
        cache.device_evictable_tokens as f64,
    )?;
    out.gauge("sglang:page_size", "Tokens a page", f64::from(page_size))?;
    let pages = total / u64::from(page_size.max(1));
    out.gauge("sglang:num_pages", "Pages of the device pool", pages as f64)?;
    out.gauge("sglang:hicache_host_used_tokens", "Host tokens in use", cache.host_used_tokens as f64)?;
    out.gauge("sglang:hicache_host_total_tokens", "Tokens the host pool holds", cache.host_total_tokens as f64)?;
    out.gauge("kvdock:tree_nodes", "Nodes of the radix tree", cache.tree_nodes as f64)?;
    out.gauge("kvdock:backup_pending_pages", "Pages on their way to storage", cache.backup_pending_pages as f64)?;
    out.gauge(
        "kvdock:quarantined_pages",
        "Host or transit pages held by storage calls that are late",
        cache.host_quarantined_pages as f64,
    )?;
    out.gauge("kvdock:transit_used_tokens", "Tokens in transit pages in use", cache.transit_used_tokens as f64)?;
    out.gauge("kvdock:transit_total_tokens", "Tokens the transit pages hold", cache.transit_total_tokens as f64)?;
    out.gauge("kvdock:layer_loads_running", "Loads layer by layer running", cache.layer_loads_running as f64)?;
    out.gauge("kvdock:prefetches_running", "Prefetches running", cache.prefetches_running as f64)
}

fn tiers(out: &mut Writer<'_>, cache: &CacheStats) -> fmt::Result {
    out.counter("sglang:evicted_tokens", "Tokens evicted from the device pool", cache.evicted_device_tokens)?;
    out.counter("kvdock:evicted_host_tokens", "Tokens evicted from the host pool", cache.evicted_host_tokens)?;
    let kv: &[(&'static str, &str)] = &[("pool", "kv")];
    out.counters("sglang:load_back_tokens", "Tokens copied from host to device", &[(kv, cache.load_back_tokens)])?;
    out.counter("sglang:load_back_bytes", "Bytes copied from host to device", cache.load_back_bytes)?;
    out.counters(
        "sglang:hicache_backup_tokens",
        "Tokens copied from device to host",
        &[(kv, cache.host_backup_tokens)],
    )?;
    out.counter("sglang:hicache_backup_bytes", "Bytes copied from device to host", cache.host_backup_bytes)?;
    let pressure: &[(&'static str, &str)] = &[("reason", "host_pressure"), ("pool", "kv")];
    let unbacked: &[(&'static str, &str)] = &[("reason", "write_through_unbacked_eviction"), ("pool", "kv")];
    out.counters(
        "sglang:hicache_dropped_tokens",
        "Tokens that did not reach the host",
        &[(pressure, cache.dropped_host_pressure_tokens), (unbacked, cache.dropped_unbacked_tokens)],
    )?;
    out.counter(
        "sglang:hicache_backup_dropped_tokens",
        "Tokens that did not reach storage",
        cache.backup_dropped_tokens,
    )
}

fn prefetch(out: &mut Writer<'_>, cache: &CacheStats) -> fmt::Result {
    out.counter("sglang:prefetched_tokens", "Tokens from storage to host, or to the device", cache.prefetched_tokens)?;
    out.counter("sglang:backuped_tokens", "Tokens from host or device to storage", cache.backuped_tokens)?;
    out.counter("sglang:storage_prefetch_hit_tokens", "Tokens that storage said it has", cache.storage_hit_tokens)?;
    let reasons = [
        ("below_threshold", cache.unfulfilled_below_threshold_tokens),
        ("host_capacity", cache.unfulfilled_host_capacity_tokens),
        ("storage_transfer", cache.unfulfilled_storage_transfer_tokens),
        ("deadline", cache.unfulfilled_deadline_tokens),
        ("not_worth_it", cache.unfulfilled_not_worth_tokens),
    ];
    let labelled = reasons.map(|(reason, tokens)| ([("reason", reason)], tokens));
    let series: Vec<_> = labelled.iter().map(|(labels, n)| (labels.as_slice(), *n)).collect();
    out.counters("sglang:storage_prefetch_unfulfilled_tokens", "Tokens found in storage and not used", &series)?;
    out.counter(
        "kvdock:prefetch_rate_limited",
        "Prefetches not begun: host pool too full of them",
        cache.prefetch_rate_limited,
    )?;
    out.counter("kvdock:prefetch_shared", "Requests that waited for another's prefetch", cache.prefetch_shared)?;
    out.counter(
        "kvdock:break_even_explored",
        "Reads made though computing is faster, to measure a backend anew",
        cache.break_even_explored,
    )?;
    out.counter(
        "kvdock:storage_fallback_tokens",
        "Tokens from another backend after the first one failed to deliver them",
        cache.fallback_tokens,
    )?;
    out.counter(
        "kvdock:storage_promoted_tokens",
        "Tokens offered to a backend because they came from another one",
        cache.promoted_tokens,
    )?;
    out.counter("kvdock:breaker_skips", "Storage calls not made: the backend keeps failing", cache.breaker_skips)?;
    out.counter("kvdock:late_layers", "Passes given up: a layer from storage was late", cache.late_layers)?;
    out.counter(
        "kvdock:recomputed_tails",
        "Results thrown away: pages from storage that they stand on were not right",
        cache.recomputed_tails,
    )?;
    out.counter("kvdock:corrupt_pages", "Pages with wrong bytes", cache.corrupt_pages)?;
    out.counter("kvdock:healed_pages", "Corrupt pages removed from storage", cache.healed_pages)?;
    out.counter("kvdock:backup_retries", "Writes to storage tried again", cache.backup_retries)
}

impl Figures {
    fn distributions(&self, out: &mut Writer<'_>, status: &StorageStatus) -> fmt::Result {
        let observer = &self.0.observer;
        out.histogram(
            "sglang:eviction_duration_seconds",
            "Time of an eviction from the device pool",
            &observer.eviction.snapshot(),
        )?;
        out.histogram(
            "sglang:load_back_duration_seconds",
            "Time of a copy from host to device",
            &observer.load_back.snapshot(),
        )?;
        out.histogram(
            "sglang:hicache_backup_duration_seconds",
            "Time of a copy from device to host",
            &observer.backup.snapshot(),
        )?;
        let by_backend = [
            ("sglang:prefetch_pgs", "Pages in a read", observer.storage(|s| &s.read_pages)),
            ("sglang:backup_pgs", "Pages in a write", observer.storage(|s| &s.write_pages)),
            ("sglang:prefetch_bandwidth", "GB/s of a read", observer.storage(|s| &s.read_bandwidth)),
            ("sglang:backup_bandwidth", "GB/s of a write", observer.storage(|s| &s.write_bandwidth)),
        ];
        for (name, help, snapshots) in &by_backend {
            let labelled: Vec<_> = snapshots
                .iter()
                .filter(|(backend, _)| is_shown(status, backend))
                .map(|(backend, snapshot)| ([("storage_backend", backend.as_str())], snapshot))
                .collect();
            let series: Vec<_> = labelled.iter().map(|(l, s)| (l.as_slice(), *s)).collect();
            out.histograms(name, help, &series)?;
        }
        Ok(())
    }

    /// Series of the backends that the status shows. Those of one that has left end; when it comes back, its counts go on.
    fn storage(&self, out: &mut Writer<'_>, status: &StorageStatus) -> fmt::Result {
        let mut backends = self.0.cache.backends();
        backends.retain(|(name, _)| is_shown(status, name));
        let mut labelled = Vec::new();
        for (name, counters) in &backends {
            for op in StorageOp::ALL {
                for result in StorageResult::ALL {
                    let labels = [("backend", name.as_str()), ("op", op.as_str()), ("result", result.as_str())];
                    labelled.push((labels, counters.get(op, result)));
                }
            }
        }
        let series: Vec<_> = labelled.iter().map(|(labels, n)| (labels.as_slice(), *n)).collect();
        out.counters("kvdock:storage_pages", "Pages by backend, call and what became of them", &series)?;
        calls::write(out, &backends)?;
        if let Some(plugins) = &self.0.plugins {
            plugin_figures(out, &plugins.reported_metrics())?;
        }
        backends::write(out, status)
    }
}

fn is_shown(status: &StorageStatus, name: &str) -> bool {
    status.backends.iter().any(|backend| backend.name == name)
}

/// What plugins reported. Their names are theirs, so they stand in a label and can't collide with
/// anybody's.
fn plugin_figures(out: &mut Writer<'_>, reported: &[ReportedMetric]) -> fmt::Result {
    let ranks: Vec<Option<String>> = reported.iter().map(|one| one.rank.map(|rank| rank.to_string())).collect();
    let labelled: Vec<_> = reported
        .iter()
        .zip(&ranks)
        .map(|(one, rank)| {
            let mut labels =
                vec![("backend", one.backend.as_str()), ("name", one.name.as_str()), ("labels", one.labels.as_str())];
            labels.extend(rank.as_deref().map(|rank| ("rank", rank)));
            (labels, &one.metric)
        })
        .collect();
    let values: Vec<_> = labelled.iter().map(|(l, metric)| (l.as_slice(), metric.value)).collect();
    out.gauges("kvdock:plugin_value", "What plugins report: sums of counters, values of gauges", &values)?;
    let counts: Vec<_> = labelled.iter().map(|(l, metric)| (l.as_slice(), metric.count)).collect();
    out.counters("kvdock:plugin_reports", "How often plugins reported", &counts)
}

#[cfg(test)]
mod tests {
    use kvdock_plugin_api::MetricKind;
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::plugin::PluginMetric;

    #[derive(Debug)]
    struct Reported(Vec<ReportedMetric>);

    impl Collector for Reported {
        fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
            plugin_figures(&mut Writer(encoder), &self.0)
        }
    }

    #[test]
    fn the_rank_of_a_plugins_figure_stood_inside_of_another_label() {
        let of_rank = |rank| ReportedMetric {
            backend: "near".into(),
            name: "bytes".into(),
            labels: String::new(),
            rank,
            metric: PluginMetric { kind: MetricKind::GaugeSet, value: 2.0, count: 1 },
        };
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Reported(vec![of_rank(None), of_rank(Some(1))])));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        let alone = "kvdock:plugin_value{backend=\"near\",name=\"bytes\",labels=\"\"} 2.0";
        let ranked = "kvdock:plugin_value{backend=\"near\",name=\"bytes\",labels=\"\",rank=\"1\"} 2.0";
        assert!(text.contains(alone) && text.contains(ranked), "{text}");
    }
}
