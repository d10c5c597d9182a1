//! What a request spends outside of the model: HTTP, template, tokenizer, scheduler, cache, sampling.
//!
//! The server runs in this process, put together as `kvdock serve` does it, around a model that notes when it computes. Of the time from
//! sending a request to having its answer, the model's own is taken away: what it computes for others in that time a request waits for in
//! any server. Clients ask at moments of their own, as clients do. Where all ask at the same moment, as in the second row, all are answered
//! by the same step, so each one's time is that of all answers before it.

use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use kvdock::cache::{CacheConfig, CacheManager};
use kvdock::engine::{Engine, EngineConfig, EngineParts, Mailbox};
use kvdock::server::{Keys, Served, Server, bind, router, run};
use kvdock::telemetry::{CacheObserver, MetricSources, Metrics};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{Device, KvDtype, KvPool};
use kvdock_models::{Batch, LayerHooks, LoadOptions, Logits, Model, ModelError, ModelSpec, load};
use kvdock_tests::client::Client;
use serde_json::json;

use crate::Bench;
use crate::row::{Better, Goal, Report, Row};
use crate::sample::Turns;

const CLIENTS: usize = 64;
/// Requests of a client, of which the first is not counted.
const REQUESTS: usize = 5;
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
    let name =
        |how: &str| format!("time of a request outside the model, p99, {CLIENTS} clients{how} (ms), peer the limit");
    let rows = [(name(""), Moments::Own, Goal::Times(1.0)), (name(", all at once"), Moments::Same, Goal::None)];
    for (name, moments, goal) in rows {
        if !bench.wants(&name) {
            continue;
        }
        let requests = if bench.quick { REQUESTS } else { 4 * REQUESTS };
        let mut outside = measure(bench, requests, moments)?;
        outside.sort_by(f64::total_cmp);
        let part = |part: f64| outside.get((outside.len() as f64 * part) as usize).copied().unwrap_or(f64::NAN);
        let ours = part(0.99);
        eprintln!(
            "  {} requests, half of them below {:.3} ms, 9 of 10 below {:.3} ms",
            outside.len(),
            part(0.5),
            part(0.9)
        );
        report.add(Row::new(name, Turns::once(ours, LIMIT), Better::Less, goal))?;
    }
    Ok(())
}

/// A model that notes when it computes.
struct Watched {
    model: Arc<dyn Model>,
    busy: Mutex<Vec<(Instant, Instant)>>,
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
        let begin = Instant::now();
        let outcome = self.model.forward(batch, pool, hooks, logits);
        self.busy.lock().unwrap_or_else(PoisonError::into_inner).push((begin, Instant::now()));
        outcome
    }
}

/// Milliseconds that each request spent outside of the model.
fn measure(bench: &Bench, requests: usize, moments: Moments) -> Result<Vec<f64>> {
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
    let spans = ask_all(&format!("http://{address}"), requests, moments)?;
    let _ = stop.send(true);
    runtime.block_on(serving).context("the HTTP side")?;
    engine.stop(Duration::ZERO);
    let busy = watched.busy.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(spans.iter().map(|span| outside(*span, &busy).as_secs_f64() * 1e3).collect())
}

/// The part of a span in which the model does not compute.
fn outside((from, to): (Instant, Instant), busy: &[(Instant, Instant)]) -> Duration {
    let inside = |(begin, end): &(Instant, Instant)| (*end).min(to).saturating_duration_since((*begin).max(from));
    (to - from).saturating_sub(busy.iter().map(inside).sum())
}

/// When each request of each client was sent and answered.
fn ask_all(address: &str, requests: usize, moments: Moments) -> Result<Vec<(Instant, Instant)>> {
    let ready = Barrier::new(CLIENTS);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let ready = &ready;
                scope.spawn(move || {
                    let http = Client::without_limit(address);
                    let mut random = fastrand::Rng::with_seed(client as u64);
                    ready.wait();
                    let mut spans = Vec::new();
                    for request in 0..requests {
                        if moments == Moments::Own {
                            std::thread::sleep(PAUSE.mul_f64(random.f64()));
                        }
                        let text = format!("Name {} things that begin with the letter {}.", request + 2, client % 26);
                        let body = json!({
                            "messages": [{"role": "user", "content": text}],
                            "max_tokens": ANSWER, "temperature": 0, "ignore_eos": true,
                        });
                        let begin = Instant::now();
                        let reply = http.post("/v1/chat/completions", &body);
                        spans.push((begin, Instant::now()));
                        ensure!(reply.status == 200, "/v1/chat/completions: {}", reply.json);
                    }
                    // The first one opens the connection.
                    Ok(spans.split_off(1))
                })
            })
            .collect();
        let mut all = Vec::new();
        for client in clients {
            all.extend(client.join().map_err(|_| anyhow!("a client panicked"))??);
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
