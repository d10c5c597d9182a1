//! Whether the store can be reached, and why not.

use kvdock_plugin_api::{Health, HealthState, Host, LogLevel, MetricKind};
use parking_lot::Mutex;

/// What is counted, from the start on.
const COUNTERS: [&str; 4] =
    ["mooncake_remounts", "mooncake_expired_pages", "mooncake_refused_pages", "mooncake_unreadable_pages"];

/// The state. One log line, one event and one metric a change.
#[derive(Debug)]
pub struct State {
    host: Host,
    trouble: Mutex<Option<String>>,
}

impl State {
    /// All is well.
    pub(super) fn new(host: Host) -> State {
        host.metric(MetricKind::GaugeSet, "mooncake_degraded", "", 0.0);
        // What has not happened is seen too.
        COUNTERS.iter().for_each(|name| host.metric(MetricKind::CounterAdd, name, "", 0.0));
        State { host, trouble: Mutex::default() }
    }

    /// The master does not do its part.
    pub(super) fn fail(&self, why: &str) {
        let mut trouble = self.trouble.lock();
        if trouble.is_none() {
            self.host.log(LogLevel::Warn, "health", &format!("degraded, pages are computed instead: {why}"));
            self.host.health_changed(HealthState::Degraded, why);
            self.host.metric(MetricKind::GaugeSet, "mooncake_degraded", "", 1.0);
        }
        *trouble = Some(why.to_owned());
    }

    /// It does again.
    pub(super) fn well(&self) {
        if self.trouble.lock().take().is_some() {
            self.host.log(LogLevel::Info, "health", "the master answers again");
            self.host.health_changed(HealthState::Ok, "");
            self.host.metric(MetricKind::GaugeSet, "mooncake_degraded", "", 0.0);
        }
    }

    /// For the host.
    pub fn report(&self) -> Health {
        match &*self.trouble.lock() {
            None => Health::ok(),
            Some(why) => Health { state: HealthState::Degraded, reason: why.clone() },
        }
    }
}
