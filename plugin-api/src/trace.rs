//! Forwards a plugin's `tracing` events to the host.

use std::fmt::Write as _;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::{Host, LogLevel};

struct Forward(Host);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let separator = if self.0.is_empty() { "" } else { " " };
        // Writing to a string can't fail.
        let _ = match field.name() {
            "message" => write!(self.0, "{separator}{value:?}"),
            name => write!(self.0, "{separator}{name}={value:?}"),
        };
    }
}

impl<S: Subscriber> Layer<S> for Forward {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        let level = match *event.metadata().level() {
            Level::ERROR => LogLevel::Error,
            Level::WARN => LogLevel::Warn,
            Level::INFO => LogLevel::Info,
            Level::DEBUG => LogLevel::Debug,
            Level::TRACE => LogLevel::Trace,
        };
        self.0.log(level, event.metadata().target(), &text.0);
    }
}

/// Sends the events of this library's `tracing` macros to the host's log. A library has its own statics, so this changes
/// nothing outside of the plugin. A second call has no effect: all instances of a library share the first one's host.
pub fn forward_tracing(host: Host) {
    // An error means that it was set before, which is as good.
    let _ = tracing_subscriber::registry().with(Forward(host)).try_init();
}
