//! What a request spends outside of the model: HTTP, template, tokenizer, scheduler, cache, sampling.
//!
//! The server runs in this process, put together as `kvdock serve` does it, around a model that notes when it computes. Of the time from
//! sending a request to having its answer, the model's own is taken away: what it computes for others in that time a request waits for in
//! any server. Clients ask at moments of their own, as clients do. Where all ask at the same moment, as in the last row, all are answered
//! by the same step, so each one's time is that of all answers before it.
//!
//! The clients are threads of this process too and share its CPUs, so they are the cheapest there are: each has a connection that stays open, and
//! writes bytes that were ready before. Beside the time stands what of the processor's time it is: that of all threads but the clients', without
//! the model's.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use kvdock::cache::{CacheConfig, CacheManager};
use kvdock::engine::{Engine, EngineConfig, EngineParts, Mailbox};
use kvdock::server::{Keys, Served, Server, bind, router, run};
use kvdock::telemetry::{CacheObserver, MetricSources, Metrics};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{Device, KvDtype, KvPool};
use kvdock_models::{Batch, LayerHooks, LoadOptions, Logits, Model, ModelError, ModelSpec, load};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

use crate::Bench;
use crate::caller::{Caller, Prepared};
use crate::row::{Better, Goal, Report, Row};
use crate::sample::Turns;

const CLIENTS: usize = 64;
/// Requests that are counted where clients ask at moments of their own: of fewer, a hundredth is one or two.
const REQUESTS: usize = 1000;
/// Requests of each client where all ask at once.
const AT_ONCE: usize = 4;
/// Tokens of an answer.
const ANSWER: usize = 1;
/// Milliseconds.
const LIMIT: f64 = 1.0;
/// A client waits for up to so long before it asks again: sixteen requests a second, which keep the model busy for a third of the time.
const PAUSE: Duration = Duration::from_secs(8);

/// When clients ask.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moments {
    /// After a pause of random length.
    Own,
    /// As soon as they have their answer; that of the same step as all others.
    Same,
}

/// Adds the rows.
///
/// # Errors
/// When an answer is not what was asked for.
pub fn rows(bench: &Bench, report: &mut Report) -> Result<()> {
    let name = |what: &str, how: &str| format!("{what} of a request outside the model, {how} (ms), peer the limit");
    let often = if bench.quick { 1 } else { 4 };
    let tail = name("time", &format!("p99, {CLIENTS} clients"));
    let processor = name("processor time", &format!("mean, {CLIENTS} clients"));
    if bench.wants(&tail) | bench.wants(&processor) {
        let measured = measure(bench, REQUESTS * often, Moments::Own)?;
        let ours = percentiles(measured.outside);
        report.add(Row::new(tail, Turns::once(ours, LIMIT), Better::Less, Goal::Times(1.0)))?;
        report.add(Row::new(processor, Turns::once(measured.processor, LIMIT), Better::Less, Goal::None))?;
    }
    let together = name("time", &format!("p99, {CLIENTS} clients, all at once"));
    if bench.wants(&together) {
        let measured = measure(bench, CLIENTS * AT_ONCE * often, Moments::Same)?;
        report.add(Row::new(together, Turns::once(percentiles(measured.outside), LIMIT), Better::Less, Goal::None))?;
    }
    Ok(())
}

/// Tells how the times of requests are spread, and returns the one that 99 of 100 stay below.
fn percentiles(mut outside: Vec<f64>) -> f64 {
    outside.sort_by(f64::total_cmp);
    let part = |part: f64| outside.get((outside.len() as f64 * part) as usize).copied().unwrap_or(f64::NAN);
    eprintln!(
        "  {} requests, half of them below {:.3} ms, 9 of 10 below {:.3} ms, 19 of 20 below {:.3} ms, all but one below {:.3} ms",
        outside.len(),
        part(0.5),
        part(0.9),
        part(0.95),
        outside.iter().rev().nth(1).copied().unwrap_or(f64::NAN)
    );
    part(0.99)
}

/// What came of a run, in milliseconds.
struct Measured {
    /// What each request spent outside of the model.
    outside: Vec<f64>,
    /// The processor's time a request: all threads but those of clients and of the model.
    processor: f64,
}

/// A model that notes when it computes.
struct Watched {
    model: Arc<dyn Model>,
    busy: Mutex<Busy>,
}

/// When the model computed.
#[derive(Default)]
struct Busy {
    spans: Vec<(Instant, Instant)>,
    /// The processor's time that the calling thread took for it.
    processor: Duration,
}

impl Model for Watched {
    fn spec(&self) -> &ModelSpec {
        self.model.spec()
    }

    fn forward(
        &self,
        batch: &Batch<'_>,
        pool: &dyn KvPool,
        hooks: &dyn LayerHooks,
        logits: &mut Logits,
    ) -> Result<(), ModelError> {
        let processor = clock(ClockId::ThreadCPUTime);
        let begin = Instant::now();
        let outcome = self.model.forward(batch, pool, hooks, logits);
        let end = Instant::now();
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.spans.push((begin, end));
        busy.processor += clock(ClockId::ThreadCPUTime).saturating_sub(processor);
        outcome
    }
}

/// What a clock shows.
fn clock(which: ClockId) -> Duration {
    let time = clock_gettime(which);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The processor's time of the threads that do nothing but compute.
fn compute_threads() -> Result<Duration> {
    let mut all = Duration::ZERO;
    for thread in std::fs::read_dir("/proc/self/task").context("/proc/self/task")? {
        let thread = thread.context("/proc/self/task")?.path();
        // Threads end meanwhile; none of these does.
        let read = |name: &str| std::fs::read_to_string(thread.join(name)).unwrap_or_default();
        if read("comm").starts_with("kernel-") {
            let nanoseconds = read("schedstat").split(' ').next().and_then(|first| first.parse().ok());
            all += Duration::from_nanos(nanoseconds.context("a thread's schedstat")?);
        }
    }
    Ok(all)
}

/// Has clients ask, `requests` times in all.
fn measure(bench: &Bench, requests: usize, moments: Moments) -> Result<Measured> {
    let device: Arc<dyn Device> = Arc::new(CpuDevice::new(bench.threads).context("the CPU device")?);
    let loaded = load(&bench.model, &LoadOptions::new(device.clone())).context("the model")?;
    let spec = loaded.spec().clone();
    let page_size = 16;
    let kv = spec.one_pool().map_err(anyhow::Error::msg)?;
    let shape = kv.pool(KvDtype::F16, page_size, 1024);
    let pool = device.alloc_kv_pool(shape).context("the KV pool")?;
    let watched = Arc::new(Watched { model: loaded.model.clone(), busy: Mutex::default() });
    let (mailbox, observer) = (Mailbox::new(), Arc::new(CacheObserver::default()));
    let cache = CacheManager::new(CacheConfig::default(), pool.clone(), observer.clone(), mailbox.waker())?;
    let counters = cache.counters();
    let engine = Engine::start(
        EngineConfig { max_running_requests: CLIENTS, ..EngineConfig::default() },
        EngineParts { model: watched.clone(), tokenizer: loaded.tokenizer.clone(), pool: pool.into(), cache, mailbox },
    )?;
    let metrics = Metrics::new(
        "bench",
        MetricSources {
            engine: engine.handle(),
            cache: counters,
            observer,
            storage: None,
            plugins: None,
            page_size: page_size as u32,
            ranks: 1,
        },
    );
    let tokens = (shape.pages * page_size) as u64;
    let served = Served {
        engine: engine.handle(),
        tokenizer: loaded.tokenizer.clone(),
        template: loaded.template.clone(),
        spec,
        model_name: "bench".to_owned(),
        model_path: bench.model.display().to_string(),
        storage: None,
        settings: json!({}),
        page_size: page_size as u32,
        device_tokens: tokens,
        host_tokens: 0,
        metrics,
        startup_seconds: 0.0,
    };
    let server = Arc::new(Server::new(Keys::new(None, None), 1 << 20));
    server.ready(served);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(bench.threads.clamp(2, 8))
        .enable_all()
        .build()
        .context("can't start threads")?;
    let (listener, address) = runtime.block_on(bind("127.0.0.1", 0)).map_err(anyhow::Error::msg)?;
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let serving = runtime.spawn(run(listener, router(server), stopped));
    // The first ones open connections and fill what is filled once.
    ask_all(address, 0, CLIENTS, Moments::Same)?;
    let model = || -> Result<Duration> {
        let calling = watched.busy.lock().unwrap_or_else(PoisonError::into_inner).processor;
        Ok(calling + compute_threads()?)
    };
    let (process, computed) = (clock(ClockId::ProcessCPUTime), model()?);
    let asked = ask_all(address, 1, requests, moments)?;
    let process = clock(ClockId::ProcessCPUTime).saturating_sub(process);
    let computed = model()?.saturating_sub(computed);
    let _ = stop.send(true);
    runtime.block_on(serving).context("the HTTP side")?;
    engine.stop(Duration::ZERO);
    let busy = watched.busy.lock().unwrap_or_else(PoisonError::into_inner);
    let processor = process.saturating_sub(computed).saturating_sub(asked.processor);
    Ok(Measured {
        outside: asked.spans.iter().map(|span| outside(*span, &busy.spans).as_secs_f64() * 1e3).collect(),
        processor: processor.as_secs_f64() * 1e3 / asked.spans.len() as f64,
    })
}

/// The part of a span in which the model does not compute.
fn outside((from, to): (Instant, Instant), busy: &[(Instant, Instant)]) -> Duration {
    let inside = |(begin, end): &(Instant, Instant)| (*end).min(to).saturating_duration_since((*begin).max(from));
    (to - from).saturating_sub(busy.iter().map(inside).sum())
}

/// What clients saw.
#[derive(Default)]
struct Asked {
    /// When each request was sent and answered.
    spans: Vec<(Instant, Instant)>,
    /// The processor's time of all clients.
    processor: Duration,
}

/// Ends the pauses of all clients.
#[derive(Default)]
struct Over {
    told: Mutex<bool>,
    telling: Condvar,
}

impl Over {
    /// Pauses for so long, or until nobody is to ask any more.
    fn wait(&self, pause: Duration) {
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.telling.wait_timeout_while(told, pause, |told| !*told));
    }

    fn tell(&self) {
        *self.told.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.telling.notify_all();
    }
}

/// The letter that a client asks about.
fn letter(client: usize) -> char {
    char::from(b'a' + (client % 26) as u8)
}

/// Has clients ask until they have asked so often together. `first` is the number of the first question of each.
fn ask_all(address: SocketAddr, first: usize, requests: usize, moments: Moments) -> Result<Asked> {
    let (ready, taken, over) = (Barrier::new(CLIENTS), AtomicUsize::new(0), Over::default());
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let (ready, taken, over) = (&ready, &taken, &over);
                scope.spawn(move || {
                    let connected = Caller::new(address);
                    let mut random = fastrand::Rng::with_seed(client as u64);
                    ready.wait();
                    let mut http = connected?;
                    let mut spans = Vec::new();
                    for number in first.. {
                        // Never the same twice: neither tokenizer nor cache knows it.
                        let number = number * CLIENTS + client;
                        let text = format!("Name {} things that begin with the letter {}.", number + 2, letter(client));
                        let request = Prepared::post(
                            "/v1/chat/completions",
                            &json!({
                                "messages": [{"role": "user", "content": text}],
                                "max_tokens": ANSWER, "temperature": 0, "ignore_eos": true,
                            }),
                        );
                        if moments == Moments::Own {
                            over.wait(PAUSE.mul_f64(random.f64()));
                        }
                        match taken.fetch_add(1, Ordering::Relaxed) {
                            before if before >= requests => break,
                            before if before + 1 == requests => over.tell(),
                            _ => {}
                        }
                        let begin = Instant::now();
                        http.call(&request)?;
                        spans.push((begin, Instant::now()));
                    }
                    Ok(Asked { spans, processor: clock(ClockId::ThreadCPUTime) })
                })
            })
            .collect();
        let mut all = Asked::default();
        for client in clients {
            let one: Result<Asked> = client.join().map_err(|_| anyhow!("a client panicked"))?;
            let one = one?;
            all.spans.extend(one.spans);
            all.processor += one.processor;
        }
        Ok(all)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_model_computes_in_a_span_is_taken_away() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let busy = [(at(0), at(10)), (at(20), at(30)), (at(40), at(60)), (at(90), at(95))];
        assert_eq!(outside((at(5), at(50)), &busy), Duration::from_millis(45 - 5 - 10 - 10));
        assert_eq!(outside((at(60), at(80)), &busy), Duration::from_millis(20));
        assert_eq!(outside((at(45), at(50)), &busy), Duration::ZERO);
    }
}
