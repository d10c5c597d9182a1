//! A tiny real model through the whole of engine, cache and CPU kernels: bit for bit the same
//! logits however a prompt is computed.

use std::sync::OnceLock;

use kvdock_kernels::KvDtype;
use kvdock_kernels::cpu::CpuDevice;
use kvdock_models::testing::{TinyKind, TinyModel, token_ids};
use kvdock_models::{LoadOptions, LoadedModel, load};

use super::*;

const REAL_PAGE: usize = 16;

fn loaded() -> (LoadedModel, Arc<CpuDevice>) {
    static LOADED: OnceLock<(LoadedModel, Arc<CpuDevice>)> = OnceLock::new();
    LOADED
        .get_or_init(|| {
            let directory = tempfile::tempdir().unwrap();
            TinyModel::new(TinyKind::Llama).write_hf(directory.path()).unwrap();
            let device = Arc::new(CpuDevice::new(2).unwrap());
            (load(directory.path(), &LoadOptions::new(device.clone())).unwrap(), device)
        })
        .clone()
}

fn start(chunk: usize, pages: usize, host_pages: u32) -> Rig {
    use kvdock_kernels::Device;
    let (loaded, device) = loaded();
    let spec = loaded.spec().one_pool().unwrap().pool(KvDtype::F16, REAL_PAGE, pages);
    let pool = device.alloc_kv_pool(spec).unwrap();
    let mailbox = Mailbox::new();
    let cache_config = CacheConfig { host_pages, ..CacheConfig::default() };
    let cache = CacheManager::new(cache_config, pool.clone(), Arc::new(NoEvents), mailbox.waker()).unwrap();
    let logits = Captured::default();
    let config = EngineConfig {
        prefill_chunk: chunk,
        max_running_requests: 8,
        max_queued_requests: 64,
        logits_tap: Some(capture(&logits)),
    };
    let parts = EngineParts { model: loaded.model, tokenizer: loaded.tokenizer, pool: pool.into(), cache, mailbox };
    let engine = Engine::start(config, parts).unwrap();
    Rig { handle: engine.handle(), engine, log: Arc::default(), logits }
}

fn real_prompt(name: &str, len: usize) -> Vec<u32> {
    token_ids(name, len, 256)
}

/// Log-probabilities of the whole prompt make every row of its logits visible to the tap.
fn watched(id: &str, prompt_ids: Vec<u32>) -> Request {
    let mut request = request(id, prompt_ids, 10);
    request.logprobs.prompt_start = Some(0);
    request
}

#[test]
fn chunks_and_batches_do_not_change_a_bit() {
    let prompt = real_prompt("a", 300);
    let whole = start(1024, 200, 0);
    let expected = whole.run(watched("a", prompt.clone()));
    let logits = whole.logits_of("a");
    assert_eq!(logits.len(), 309);
    assert_eq!(expected.text, loaded().0.tokenizer.decode(&expected.token_ids, true));
    for chunk in [1, 16, 64, 100] {
        let rig = start(chunk, 200, 0);
        assert_eq!(rig.run(watched("a", prompt.clone())).token_ids, expected.token_ids);
        assert!(rig.logits_of("a") == logits, "chunks of {chunk} change the logits");
        rig.assert_idle();
    }
    let rig = start(64, 400, 0);
    let others: Vec<RequestStream> = (0..7)
        .map(|i| {
            let name = format!("o{i}");
            rig.submit(request(&name, real_prompt(&name, 20 + 31 * i), 30))
        })
        .collect();
    assert_eq!(rig.run(watched("a", prompt)).token_ids, expected.token_ids);
    assert!(rig.logits_of("a") == logits, "company changes the logits");
    for stream in others {
        stream.blocking_collect();
    }
    rig.assert_idle();
}

#[test]
fn device_and_host_hits_do_not_change_a_bit() {
    // A prompt of whole pages, and one that ends inside a page.
    for len in [320, 327] {
        let rig = start(64, 100, 100);
        let prompt = real_prompt("b", len);
        let cold = rig.run(request("b", prompt.clone(), 10));
        let logits = rig.logits_of("b");
        assert_eq!(cold.usage.cached_tokens(), 0);
        let reused = u32::try_from((len - 1) / REAL_PAGE * REAL_PAGE).unwrap();

        let device = rig.run(request("b", prompt.clone(), 10));
        assert_eq!(device.usage.cached_device, reused);
        assert_eq!(device.token_ids, cold.token_ids);

        rig.wait_for_backups();
        block_on(rig.handle.flush(Tiers::DEVICE)).unwrap();
        let host = rig.run(request("b", prompt, 10));
        assert_eq!((host.usage.cached_device, host.usage.cached_host), (0, reused));
        assert_eq!(host.token_ids, cold.token_ids);
        // The tap has compared each row with that of the run before.
        assert_eq!(rig.logits_of("b"), logits);
        rig.assert_idle();
    }
}

#[test]
fn preemption_does_not_change_a_bit() {
    let run = |pages: usize| {
        let rig = start(64, pages, 0);
        let streams: Vec<RequestStream> = (0..4)
            .map(|i| {
                let name = format!("p{i}");
                rig.submit(request(&name, real_prompt(&name, 70), 100))
            })
            .collect();
        let outputs: Vec<_> = streams.into_iter().map(|stream| stream.blocking_collect().remove(0).token_ids).collect();
        let logits: Vec<_> = (0..4).map(|i| rig.logits_of(&format!("p{i}"))).collect();
        let preempted = rig.handle.stats().preempted_total;
        rig.assert_idle();
        (outputs, logits, preempted)
    };
    let (outputs, logits, none) = run(100);
    let (tight_outputs, tight_logits, some) = run(20);
    assert_eq!(none, 0);
    assert!(some > 0, "the pool was never full");
    assert_eq!(outputs, tight_outputs);
    assert!(logits == tight_logits, "preemption changes the logits");
}
