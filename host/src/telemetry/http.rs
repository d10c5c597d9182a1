//! Requests and answers counted at the HTTP level.

use std::collections::BTreeMap;
use std::fmt;

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;

use super::write::Writer;

/// Counts by endpoint. Endpoints are those of the router, so their number is bounded.
#[derive(Debug, Default)]
pub struct HttpMetrics {
    requests: Mutex<BTreeMap<(String, String), u64>>,
    responses: Mutex<BTreeMap<(String, String, u16), u64>>,
}

impl HttpMetrics {
    /// Counts a request. `method` is one that HTTP defines, or `other`.
    pub fn request(&self, endpoint: &str, method: &str) {
        let key = (endpoint.to_owned(), method.to_owned());
        *self.requests.lock().entry(key).or_default() += 1;
    }

    /// Counts an answer.
    pub fn response(&self, endpoint: &str, method: &str, status: u16) {
        let key = (endpoint.to_owned(), method.to_owned(), status);
        *self.responses.lock().entry(key).or_default() += 1;
    }

    /// The counts now.
    pub(super) fn snapshot(&self) -> HttpCounts {
        HttpCounts { requests: self.requests.lock().clone(), responses: self.responses.lock().clone() }
    }
}

/// The counts at one moment.
#[derive(Debug)]
pub(super) struct HttpCounts {
    requests: BTreeMap<(String, String), u64>,
    responses: BTreeMap<(String, String, u16), u64>,
}

impl Collector for HttpCounts {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Writer(encoder);
        let Self { requests, responses } = self;
        let labelled: Vec<_> = requests
            .iter()
            .map(|((endpoint, method), count)| ([("endpoint", endpoint.as_str()), ("method", method.as_str())], *count))
            .collect();
        let series: Vec<_> = labelled.iter().map(|(labels, n)| (labels.as_slice(), *n)).collect();
        out.counters("sglang:http_requests", "HTTP requests", &series)?;
        let statuses: Vec<_> = responses.keys().map(|(_, _, s)| s.to_string()).collect();
        let labelled: Vec<_> = responses
            .iter()
            .zip(&statuses)
            .map(|(((endpoint, method, _), count), status)| {
                let labels =
                    [("endpoint", endpoint.as_str()), ("method", method.as_str()), ("status_code", status.as_str())];
                (labels, *count)
            })
            .collect();
        let series: Vec<_> = labelled.iter().map(|(labels, n)| (labels.as_slice(), *n)).collect();
        out.counters("sglang:http_responses", "HTTP answers", &series)
    }
}
