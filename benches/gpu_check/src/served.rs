//! Pages that the GPU has computed, stored by one server and taken back by the next.

use std::panic::{AssertUnwindSafe, catch_unwind};

use kvdock_models::testing::{TinyKind, TinyModel, token_ids};
use kvdock_tests::server::Launch;

/// Serves a tiny model from the GPU, asks it something, starts it anew and asks the same.
///
/// # Errors
/// What did not come back, or came back different.
pub fn round_trip(device: usize) -> Result<String, String> {
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let model = folder.path().join("tiny.gguf");
    TinyModel::wide(TinyKind::Qwen3)
        .write_gguf(&model, kvdock_kernels::WeightFormat::Q8_0)
        .map_err(|error| format!("{}: {error}", model.display()))?;
    let text = |path: &std::path::Path| serde_json::Value::from(path.display().to_string()).to_string();
    let launch = Launch::new()
        .set("model.path", text(&model))
        .set("engine.device", "\"cuda\"")
        .set("engine.cuda_device", device)
        .set("cache.device_tokens", 4096)
        .set("cache.host_tokens", 4096)
        .storage(&folder.path().join("pages"));
    let prompt = token_ids("round trip", 1200, 256);
    // The helpers of the tests end in a panic, with a message for people.
    let ask = || {
        let server = launch.start();
        let answer = server.client().generate(&prompt, 16);
        server.stop();
        answer
    };
    let run = || {
        let (cold, first) = ask();
        let (warm, second) = ask();
        if first.cached() != 0 {
            return Err(format!("{} tokens came from a store that was empty", first.cached()));
        }
        if second.storage != 1184 {
            return Err(format!("{} of 1184 tokens came from storage", second.storage));
        }
        if warm != cold {
            return Err("the answer is another one with pages from storage".to_owned());
        }
        Ok("1184 tokens came from storage in a new process, and the answer is the same, bit for bit".to_owned())
    };
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        Err(text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a check ended in a panic").to_owned())
    })
}
