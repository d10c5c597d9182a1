//! Figures: this client's own, and those of the master.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdock_plugin_api::v0_1::Stats;
use parking_lot::Mutex;
use ureq::Agent;

use crate::limit::Limit;

/// How long the master's figures may take.
const TIME: Duration = Duration::from_millis(500);
/// How long figures are good, and how soon after a failure they are asked for again.
const FRESH: Duration = Duration::from_secs(2);
const MOST: u64 = 4 << 20;

/// What the master said, when, and after how many sets of this client: it does not count what came later.
#[derive(Debug)]
struct Known {
    at: Instant,
    sets: u64,
    figures: [u64; 3],
}

/// Figures since the start.
#[derive(Debug, Default)]
pub struct Figures {
    /// Calls that failed.
    pub failures: AtomicU64,
    gets: AtomicU64,
    get_ns: AtomicU64,
    sets: AtomicU64,
    set_ns: AtomicU64,
    master: Mutex<Option<Known>>,
}

impl Figures {
    /// A get ended.
    pub(super) fn get_done(&self, began: Instant, well: bool) {
        Figures::done(&self.gets, &self.get_ns, began);
        self.failures.fetch_add(u64::from(!well), Ordering::Relaxed);
    }
    /// A set ended.
    pub(super) fn set_done(&self, began: Instant, well: bool) {
        Figures::done(&self.sets, &self.set_ns, began);
        self.failures.fetch_add(u64::from(!well), Ordering::Relaxed);
    }
    fn done(count: &AtomicU64, ns: &AtomicU64, began: Instant) {
        count.fetch_add(1, Ordering::Relaxed);
        ns.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    /// For the host. Pages and bytes are the whole store's, as its master counts them; 0 when it can't be asked.
    pub fn stats(&self, host: &str, port: u16, limit: &Limit<'_>) -> Stats {
        let mean = |ns: &AtomicU64, count: &AtomicU64| {
            ns.load(Ordering::Relaxed).checked_div(count.load(Ordering::Relaxed)).unwrap_or(0)
        };
        let [pages, bytes_used, bytes_total] = self.of_master(host, port, limit);
        Stats {
            pages,
            bytes_used,
            bytes_total,
            failures: self.failures.load(Ordering::Relaxed),
            get_mean_ns: mean(&self.get_ns, &self.gets),
            set_mean_ns: mean(&self.set_ns, &self.sets),
        }
    }

    fn of_master(&self, host: &str, port: u16, limit: &Limit<'_>) -> [u64; 3] {
        let mut kept = self.master.lock();
        let sets = self.sets.load(Ordering::Relaxed);
        if let Some(known) = kept.as_ref().filter(|known| known.sets == sets && known.at.elapsed() < FRESH) {
            return known.figures;
        }
        let figures = page(host, port, "metrics", limit).map_or([0; 3], |text| {
            ["master_key_count", "master_allocated_bytes", "master_total_capacity_bytes"]
                .map(|name| metric(&text, name).unwrap_or(0))
        });
        *kept = Some(Known { at: Instant::now(), sets, figures });
        figures
    }
}

/// The value of a metric without labels in Prometheus's text format.
fn metric(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    line.trim().parse::<f64>().ok().filter(|value| *value >= 0.0).map(|value| value as u64)
}

/// Names of all segments that a master knows.
///
/// # Errors
/// A text that says why they are not known.
pub fn segments(host: &str, port: u16, limit: &Limit<'_>) -> Result<String, String> {
    page(host, port, "get_all_segments", limit)
}

fn page(host: &str, port: u16, path: &str, limit: &Limit<'_>) -> Result<String, String> {
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let url = format!("http://{host}:{port}/{path}");
    let time = limit.left().map_err(|_| format!("{url}: no time left"))?.min(TIME);
    let config = Agent::config_builder().timeout_global(Some(time)).proxy(None).build();
    let agent: Agent = config.into();
    let mut response = agent.get(&url).call().map_err(|error| format!("{url}: {error}"))?;
    response.body_mut().with_config().limit(MOST).read_to_string().map_err(|error| format!("{url}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_found_by_their_whole_name() {
        let text = "# HELP master_key_count x\nmaster_key_count_total 9\nmaster_key_count 7\nb{a=\"1\"} 3\nc 1.5e3\n";
        assert_eq!(metric(text, "master_key_count"), Some(7));
        assert_eq!(metric(text, "c"), Some(1500));
        assert_eq!(metric(text, "b"), None);
    }
}
