//! Figures of a node, as the master collects them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::wire::master::{HistogramAggregate, MetricLabel, MetricSample, MetricValue};

/// Upper bounds of the buckets of call times, in seconds.
const BOUNDS: [f64; 14] = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0];

/// Bytes that went one way.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// More of them.
    pub fn add(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Clone, Default, PartialEq)]
struct Times {
    counts: [u64; BOUNDS.len()],
    count: u64,
    sum: f64,
}

/// Figures since the start, and what of them the master has.
#[derive(Debug, Default)]
pub struct Figures {
    /// Stored in own memory.
    pub put_here: Counter,
    /// Stored in that of other nodes.
    pub put_there: Counter,
    /// Read from own memory.
    pub got_here: Counter,
    /// Read from that of other nodes.
    pub got_there: Counter,
    /// Other nodes have stored here.
    pub others_put: Counter,
    /// Other nodes have read here.
    pub others_got: Counter,
    told: Mutex<[u64; 6]>,
    /// Calls of the master by method and status, since the last report.
    calls: Mutex<HashMap<(&'static str, &'static str), Times>>,
}

/// A report that is on its way.
#[derive(Debug)]
pub struct Report {
    counters: [u64; 6],
    calls: HashMap<(&'static str, &'static str), Times>,
    /// What it says.
    pub samples: Vec<MetricSample>,
}

fn label(name: &str, value: &str) -> MetricLabel {
    MetricLabel { name: name.to_owned(), value: value.to_owned() }
}

impl Figures {
    /// A call of the master has ended.
    pub fn called(&self, method: &'static str, good: bool, time: Duration) {
        let mut calls = self.calls.lock();
        let times = calls.entry((method, if good { "ok" } else { "error" })).or_default();
        let seconds = time.as_secs_f64();
        for (count, bound) in times.counts.iter_mut().zip(BOUNDS) {
            *count += u64::from(seconds <= bound);
        }
        times.count += 1;
        times.sum += seconds;
    }

    fn counters(&self) -> [u64; 6] {
        let all =
            [&self.put_here, &self.put_there, &self.got_here, &self.got_there, &self.others_put, &self.others_got];
        all.map(Counter::now)
    }

    /// What is new since the last report that arrived; none when nothing is.
    pub fn report(&self) -> Option<Report> {
        const NAMES: [(&str, &str, &str); 6] = [
            ("mori_umbp_client_outbound_put_bytes_total", "local", "Bytes that a node has stored"),
            ("mori_umbp_client_outbound_put_bytes_total", "remote", "Bytes that a node has stored"),
            ("mori_umbp_client_outbound_get_bytes_total", "local", "Bytes that a node has read"),
            ("mori_umbp_client_outbound_get_bytes_total", "remote", "Bytes that a node has read"),
            ("mori_umbp_client_inbound_put_bytes_total", "remote", "Bytes that others have stored in a node"),
            ("mori_umbp_client_inbound_get_bytes_total", "remote", "Bytes that others have read from a node"),
        ];
        let (counters, told) = (self.counters(), *self.told.lock());
        let mut samples = Vec::new();
        for (((name, traffic, help), now), before) in NAMES.into_iter().zip(counters).zip(told) {
            if now > before {
                let value = Some(MetricValue::CounterDelta((now - before) as f64));
                let labels = vec![label("traffic", traffic)];
                samples.push(MetricSample { name: name.to_owned(), help: help.to_owned(), labels, value });
            }
        }
        let calls = std::mem::take(&mut *self.calls.lock());
        for ((method, status), times) in &calls {
            let labels = vec![label("rpc", method), label("status", status)];
            let histogram = HistogramAggregate {
                bounds: BOUNDS.to_vec(),
                bucket_counts: times.counts.to_vec(),
                count: times.count,
                sum: times.sum,
            };
            samples.push(MetricSample {
                name: "mori_umbp_master_client_rpc_latency_seconds".to_owned(),
                help: "Time of calls to the master, as the node sees it".to_owned(),
                labels: labels.clone(),
                value: Some(MetricValue::HistogramAggregate(histogram)),
            });
            if *status != "ok" {
                samples.push(MetricSample {
                    name: "mori_umbp_master_client_rpc_errors_total".to_owned(),
                    help: "Calls to the master that failed, as the node sees it".to_owned(),
                    labels,
                    value: Some(MetricValue::CounterDelta(times.count as f64)),
                });
            }
        }
        (!samples.is_empty()).then_some(Report { counters, calls, samples })
    }

    /// The master has a report.
    pub fn arrived(&self, report: &Report) {
        *self.told.lock() = report.counters;
    }

    /// A report was lost: it is part of the next.
    pub fn lost(&self, report: Report) {
        let mut calls = self.calls.lock();
        for (key, before) in report.calls {
            let times = calls.entry(key).or_default();
            times.counts.iter_mut().zip(before.counts).for_each(|(count, more)| *count += more);
            times.count += before.count;
            times.sum += before.sum;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(report: &Report, name: &str, label: &str) -> Option<f64> {
        let of = |sample: &&MetricSample| sample.name == name && sample.labels.iter().any(|known| known.value == label);
        report.samples.iter().find(of).map(|sample| match &sample.value {
            Some(MetricValue::CounterDelta(delta)) => *delta,
            Some(MetricValue::HistogramAggregate(times)) => times.count as f64,
            _ => panic!("{sample:?}"),
        })
    }

    #[test]
    fn what_was_lost_comes_with_the_next_report() {
        let figures = Figures::default();
        assert!(figures.report().is_none());
        figures.put_here.add(5);
        figures.called("RouteGet", true, Duration::from_millis(3));
        let lost = figures.report().unwrap();
        figures.lost(lost);
        figures.put_here.add(2);
        figures.called("RouteGet", true, Duration::from_secs(9));
        figures.called("RouteGet", false, Duration::from_millis(1));
        let report = figures.report().unwrap();
        assert_eq!(value(&report, "mori_umbp_client_outbound_put_bytes_total", "local"), Some(7.0));
        assert_eq!(value(&report, "mori_umbp_master_client_rpc_latency_seconds", "ok"), Some(2.0));
        assert_eq!(value(&report, "mori_umbp_master_client_rpc_errors_total", "error"), Some(1.0));
        figures.arrived(&report);
        assert!(figures.report().is_none());
    }
}
