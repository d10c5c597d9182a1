//! Writing figures that live elsewhere in Prometheus' form.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use crate::engine::HistogramSnapshot;

/// Labels of one series.
pub(super) type Labels<'a> = &'a [(&'static str, &'a str)];

/// Writes whole metrics, one after the other.
pub(super) struct Writer<'a>(pub DescriptorEncoder<'a>);

impl Writer<'_> {
    /// A gauge without labels.
    pub fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        self.gauges(name, help, &[(&[], value)])
    }

    /// A gauge with a series for each set of labels.
    pub fn gauges(&mut self, name: &str, help: &str, series: &[(Labels<'_>, f64)]) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in series {
            match labels.is_empty() {
                true => metric.encode_gauge(value)?,
                false => metric.encode_family(labels)?.encode_gauge(value)?,
            }
        }
        Ok(())
    }

    /// A counter without labels. `_total` is added to its name.
    pub fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        self.counters(name, help, &[(&[], value)])
    }

    /// A counter with a series for each set of labels. `_total` is added to its name.
    pub fn counters(&mut self, name: &str, help: &str, series: &[(Labels<'_>, u64)]) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in series {
            match labels.is_empty() {
                true => metric.encode_counter::<NoLabelSet, _, u64>(value, None)?,
                false => metric.encode_family(labels)?.encode_counter::<NoLabelSet, _, u64>(value, None)?,
            }
        }
        Ok(())
    }

    /// A counter of seconds with a series for each set of labels. `_total` is added to its name.
    pub fn seconds(&mut self, name: &str, help: &str, series: &[(Labels<'_>, f64)]) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in series {
            metric.encode_family(labels)?.encode_counter::<NoLabelSet, _, u64>(value, None)?;
        }
        Ok(())
    }

    /// A histogram without labels.
    pub fn histogram(&mut self, name: &str, help: &str, snapshot: &HistogramSnapshot) -> fmt::Result {
        self.histograms(name, help, &[(&[], snapshot)])
    }

    /// A histogram with a series for each set of labels.
    pub fn histograms(&mut self, name: &str, help: &str, series: &[(Labels<'_>, &HistogramSnapshot)]) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (labels, snapshot) in series {
            let buckets = single(snapshot);
            let (sum, count) = (snapshot.sum, snapshot.count);
            match labels.is_empty() {
                true => metric.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?,
                false => metric.encode_family(labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?,
            }
        }
        Ok(())
    }
}

/// The encoder adds buckets up itself.
fn single(snapshot: &HistogramSnapshot) -> Vec<(f64, u64)> {
    let mut below = 0;
    snapshot
        .buckets
        .iter()
        .map(|&(bound, cumulative)| {
            let own = cumulative.saturating_sub(below);
            below = cumulative;
            (bound, own)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use prometheus_client::collector::Collector;
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::engine::Histogram;

    #[derive(Debug)]
    struct One;

    impl Collector for One {
        fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
            let histogram = Histogram::new(&[1.0]);
            histogram.observe(0.5);
            histogram.observe(9.0);
            Writer(encoder).histogram("h", "Help", &histogram.snapshot())
        }
    }

    #[test]
    fn the_last_bucket_was_the_largest_number_and_stood_beside_infinity() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(One));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        let buckets: Vec<&str> = text.lines().filter(|line| line.starts_with("h_bucket")).collect();
        assert_eq!(buckets, ["h_bucket{le=\"1.0\"} 1", "h_bucket{le=\"+Inf\"} 2"], "{text}");
    }
}
