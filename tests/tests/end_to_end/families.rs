//! Every model family is served, and its pages come back from storage with the same answer.

use kvdock_models::testing::{Fixture, token_ids};
use kvdock_tests::server::Launch;

const PAGES: usize = 3;

#[test]
fn every_family_is_served_and_its_prompts_come_back_from_storage() {
    for name in Fixture::NAMES {
        let (model, storage) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let fixture = Fixture::new(name).unwrap();
        fixture.write(model.path()).unwrap();
        let path = model.path().to_str().unwrap();
        // What DeepSeek-V4 keeps of 128 tokens in a row takes pages of as many.
        let page = if name.starts_with("dsv4") { 128 } else { 16 };
        let launch = Launch::new()
            .storage(storage.path())
            .set("model.path", format!("\"{path}\""))
            .set("cache.prefetch_threshold", 16)
            .set("engine.max_running_requests", 2);
        let vocab = fixture.config.get("vocab_size").and_then(serde_json::Value::as_u64);
        let vocab = u32::try_from(vocab.unwrap_or(256)).unwrap().min(256);
        let prompt = token_ids(name, PAGES * page + 5, vocab);

        let server = launch.start();
        let (cold, usage) = server.client().generate(&prompt, 6);
        assert_eq!(usage.cached(), 0, "{name}: {usage:?}");
        let (warm, usage) = server.client().generate(&prompt, 6);
        assert_eq!((usage.device, &warm), ((PAGES * page) as u64, &cold), "{name}: {usage:?}");
        server.stop();

        let server = launch.start();
        let (stored, usage) = server.client().generate(&prompt, 6);
        assert_eq!((usage.storage, &stored), ((PAGES * page) as u64, &cold), "{name}: {usage:?}");
        server.stop();
    }
}
