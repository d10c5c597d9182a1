//! Log set-up: `tracing` to standard error, as text or JSON.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, TelemetryConfig};

/// Whether `filter` is a log filter.
///
/// # Errors
/// Says what is wrong with it.
pub fn check_filter(filter: &str) -> Result<(), String> {
    parse(filter).map(drop)
}

fn parse(filter: &str) -> Result<EnvFilter, String> {
    if filter.trim().is_empty() {
        return Err("it is empty".to_owned());
    }
    // A bare word that is no level would be taken for the name of a target.
    let is_level = |word: &str| {
        ["error", "warn", "info", "debug", "trace", "off"].iter().any(|level| level.eq_ignore_ascii_case(word))
    };
    if let Some(word) =
        filter.split(',').map(str::trim).find(|word| !word.contains(['=', '[', ':', '_']) && !is_level(word))
    {
        return Err(format!("{word:?} is no level"));
    }
    EnvFilter::builder().parse(filter).map_err(|error| error.to_string())
}

/// Sends the log of this process to standard error. `RUST_LOG` wins over the config when it is
/// set and usable. Calling it again changes nothing.
pub fn init_logs(config: &TelemetryConfig) {
    let from_env = std::env::var("RUST_LOG").ok().filter(|text| !text.is_empty());
    let (filter, complaint) = match from_env.as_deref().map(EnvFilter::try_new) {
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (configured(config), Some(error.to_string())),
        None => (configured(config), None),
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let installed = match config.log_format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    if installed.is_ok()
        && let Some(complaint) = complaint
    {
        tracing::warn!("RUST_LOG is not used: {complaint}");
    }
}

fn configured(config: &TelemetryConfig) -> EnvFilter {
    parse(&config.log_level).unwrap_or_else(|_| EnvFilter::new("info"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters() {
        for good in ["info", "WARN", "kvdock=debug,info", "kvdock::server=trace"] {
            assert!(check_filter(good).is_ok(), "{good}");
        }
        for bad in ["", "verbose", "kvdock=loud"] {
            assert!(check_filter(bad).is_err(), "{bad}");
        }
    }
}
