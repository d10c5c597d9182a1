//! Whether the store can be written, and since when and why not.

use std::io;
use std::time::{Duration, Instant};

use kvdock_plugin_api::{Error, ErrorKind, Health, HealthState, Host, LogLevel, MetricKind, PageStatus};
use parking_lot::Mutex;

/// How soon after a failure the store is tried again, at first and at most.
const PROBE_FIRST: Duration = Duration::from_millis(200);
const PROBE_LAST: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Trouble {
    error: Error,
    next_probe: Instant,
    pause: Duration,
    bytes: u64,
}

/// The state. One log line, one event and one metric a change.
#[derive(Debug)]
pub struct HealthBook {
    host: Host,
    trouble: Mutex<Option<Trouble>>,
}

/// The kind of error and the status of a page whose writing failed.
pub fn classify(error: &io::Error) -> (ErrorKind, PageStatus) {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => (ErrorKind::NoSpace, PageStatus::Refused),
        Some(libc::EROFS | libc::EACCES | libc::EPERM) => (ErrorKind::Unavailable, PageStatus::Refused),
        Some(libc::ENOENT | libc::ENOTDIR | libc::ESTALE | libc::ENXIO | libc::ENODEV) => {
            (ErrorKind::Unavailable, PageStatus::Refused)
        }
        _ => (ErrorKind::Unavailable, PageStatus::Failed),
    }
}

/// What an error means for a person who runs the store.
pub fn explain(error: &io::Error) -> String {
    let what = match error.raw_os_error() {
        Some(libc::ENOSPC) => "the file system is full",
        Some(libc::EDQUOT) => "the file system's quota is used up",
        Some(libc::EROFS) => "the file system is read-only",
        Some(libc::EACCES | libc::EPERM) => "writing is not permitted",
        Some(libc::ENOENT | libc::ENOTDIR | libc::ESTALE) => "the directory has vanished",
        _ => "writing fails",
    };
    format!("{what} ({error})")
}

impl HealthBook {
    /// All is well.
    pub fn new(host: Host) -> HealthBook {
        host.metric(MetricKind::GaugeSet, "file_degraded", "", 0.0);
        HealthBook { host, trouble: Mutex::new(None) }
    }

    /// Writing `bytes` failed.
    pub fn fail(&self, error: Error, bytes: u64) {
        let mut trouble = self.trouble.lock();
        let changed = trouble.as_ref().is_none_or(|known| known.error.message != error.message);
        if changed {
            let reason = format!("degraded, pages are read but not stored: {}", error.message);
            self.host.log(LogLevel::Warn, "health", &reason);
            self.host.health_changed(HealthState::Degraded, &error.message);
            self.host.metric(MetricKind::GaugeSet, "file_degraded", "", 1.0);
        }
        let pause = trouble.as_ref().filter(|_| !changed).map_or(PROBE_FIRST, |known| known.pause);
        *trouble = Some(Trouble { error, next_probe: Instant::now() + pause, pause, bytes });
    }

    /// Writing works.
    pub fn well(&self) {
        if self.trouble.lock().take().is_some() {
            self.host.log(LogLevel::Info, "health", "pages are stored again");
            self.host.health_changed(HealthState::Ok, "");
            self.host.metric(MetricKind::GaugeSet, "file_degraded", "", 0.0);
        }
    }

    /// Why pages can't be stored.
    pub fn trouble(&self) -> Option<Error> {
        self.trouble.lock().as_ref().map(|trouble| trouble.error.clone())
    }

    /// For the host.
    pub fn report(&self) -> Health {
        match self.trouble() {
            None => Health::ok(),
            Some(error) => Health { state: HealthState::Degraded, reason: error.message },
        }
    }

    /// How many bytes a probe should write, when it is time for one. The next one comes later.
    pub fn probe_due(&self) -> Option<u64> {
        let mut trouble = self.trouble.lock();
        let trouble = trouble.as_mut()?;
        if Instant::now() < trouble.next_probe {
            return None;
        }
        trouble.pause = (trouble.pause * 2).min(PROBE_LAST);
        trouble.next_probe = Instant::now() + trouble.pause;
        Some(trouble.bytes)
    }
}
