//! `kvdock serve`

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use super::start::{Running, start};
use super::{Failure, Settings, machine, say};
use crate::config::{Config, check_served};
use crate::plugin::trial;
use crate::server::{Keys, Server, bind, router, run};

/// Serves until a signal asks to stop.
pub(super) fn serve(settings: Settings) -> Result<ExitCode, Failure> {
    let began = Instant::now();
    let loaded = settings.load()?;
    let config = loaded.config;
    crate::telemetry::init_logs(&config.telemetry);
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    if let Some((before, after)) = machine::raise_open_files() {
        tracing::info!(before, after, "this process may open more files now");
    }
    // By this name the child is the program that runs here, also after its file was replaced.
    trial::set_program("/proc/self/exe".into(), vec!["plugin".into(), "map-trial".into()]);
    check_served(&config).map_err(|lines| Failure(lines.join("\n")))?;
    // Requests are parsed and tokenized on these threads' blocking helpers; computing has its own.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(machine::cpus().clamp(2, 8))
        .thread_name("http")
        .enable_all()
        .build()
        .map_err(|error| Failure(format!("can't start threads: {error}")))?;
    let ended = runtime.block_on(serve_until_asked(Arc::new(config), began));
    // What still runs there is a storage call that doesn't return, or nothing.
    runtime.shutdown_timeout(Duration::from_millis(100));
    match ended? {
        End::Clean => Ok(ExitCode::SUCCESS),
        // SAFETY: `_exit` ends the process at once and touches no memory of ours. It skips the
        // exit handlers, which a plugin's thread that is still running could run into.
        End::WithZombies => unsafe { libc::_exit(0) },
    }
}

/// How serving ended.
enum End {
    /// Everything was closed.
    Clean,
    /// A plugin's call never returned, and its code may still run.
    WithZombies,
}

/// The signals that ask to stop.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    fn listen() -> Result<Self, Failure> {
        let listen = |kind| signal(kind).map_err(|error| Failure(format!("can't listen for signals: {error}")));
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

async fn serve_until_asked(config: Arc<Config>, began: Instant) -> Result<End, Failure> {
    let mut signals = StopSignals::listen()?;
    let keys = Keys::new(
        config.server.api_key.as_ref().map(|key| key.reveal()),
        config.server.admin_key.as_ref().map(|key| key.reveal()),
    );
    let max_body = usize::try_from(config.server.max_body).unwrap_or(usize::MAX);
    let server = Arc::new(Server::new(keys, max_body));
    // Before the model loads, so that a port in use costs no minutes.
    let (listener, address) = bind(&config.server.host, config.server.port).await.map_err(Failure)?;
    let (stop_http, stop_http_seen) = watch::channel(false);
    let http = tokio::spawn(run(listener, router(server.clone()), stop_http_seen));

    let loading = {
        let config = config.clone();
        tokio::task::spawn_blocking(move || start(&config, began))
    };
    let running = tokio::select! {
        running = loading => running
            .map_err(|error| Failure(format!("loading failed: {error}")))?
            .map_err(Failure)?,
        name = signals.next() => {
            tracing::info!("{name} while loading: ending");
            // The loading thread can't be stopped, and nothing has been promised to anybody yet.
            // SAFETY: `_exit` ends the process at once and touches no memory of ours.
            unsafe { libc::_exit(0) }
        }
    };
    let Running { engine, storage, mut served } = running;
    // `server.port = 0` picks a free one.
    served.settings["port"] = address.port().into();
    let handle = served.engine.clone();
    server.ready(served);
    say(&format!("listening on http://{address}"));

    let name = signals.next().await;
    server.start_draining();
    let within = config.server.shutdown_timeout;
    let asked = Instant::now();
    tracing::info!("{name}: finishing running requests, at most {} s; once more ends at once", within.as_secs_f64());
    tokio::spawn(async move {
        let name = signals.next().await;
        say(&format!("{name} again: ending at once"));
        // SAFETY: `_exit` ends the process at once and touches no memory of ours.
        unsafe { libc::_exit(1) }
    });
    let report = handle.drain(within).await;
    tracing::info!(
        finished = report.finished,
        aborted = report.aborted,
        backups_flushed = report.backups_flushed,
        "drained"
    );
    // Answers of aborted requests still go out before connections are closed.
    let _ = stop_http.send(true);
    if let Err(error) = http.await {
        tracing::warn!("the HTTP side ended badly: {error}");
    }
    let closed = tokio::task::spawn_blocking(move || {
        engine.stop(Duration::ZERO);
        // A backend whose call hangs gets no more time than the requests got.
        storage.shut_down_within(within.saturating_sub(asked.elapsed()))
    })
    .await
    .unwrap_or(false);
    Ok(if closed { End::Clean } else { End::WithZombies })
}
