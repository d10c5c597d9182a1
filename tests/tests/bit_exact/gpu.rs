//! The engine on a GPU whose kernels run on the CPU, behind a driver that checks what is ordered before what: every tier, linker mode, and tokens
//! that are chosen on the device.

use std::sync::Arc;

use kvdock::engine::SamplingParams;
use kvdock_cuda::driver::Driver;
use kvdock_cuda::{Arithmetic, CudaDevice};
use kvdock_kernels::{Device, WeightFormat};
use kvdock_models::testing::{TinyKind, TinyModel, token_ids};

use super::emulated::Compiler;
use super::fake::Fake;
use super::rig::{Loaded, Rig, Setup, Tier};

const PAGE: usize = 8;
const PAGES: usize = 4;
const NEW: u32 = 4;

struct Gpu {
    fake: Arc<Fake>,
    model: Loaded,
}

impl Gpu {
    fn new() -> Self {
        let fake = Arc::new(Fake::new());
        let driver: Arc<dyn Driver> = fake.clone();
        let device = CudaDevice::new(driver, Arc::new(Compiler), Arithmetic::Reproducible).unwrap();
        let device: Arc<dyn Device> = Arc::new(device);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        TinyModel { layers: 2, ..TinyModel::new(TinyKind::Qwen3) }.write_gguf(&path, WeightFormat::BF16).unwrap();
        Self { fake, model: Loaded::on(&path, PAGE, device) }
    }

    fn start(&self, setup: Setup<'_>) -> Rig {
        Rig::of(&self.model, Setup { threshold: PAGE, device_pages: 32, host_pages: 32, running: 4, ..setup })
    }

    fn prompt(&self, what: &str) -> Vec<u32> {
        token_ids(what, PAGES * PAGE + 3, self.model.vocab())
    }

    /// Nothing was done out of order.
    fn is_sound(&self) {
        assert_eq!(self.fake.violations(), Vec::<String>::new());
    }
}

#[test]
fn every_tier_of_a_gpu_gives_the_same_bits() {
    let gpu = Gpu::new();
    let (prompt, whole) = (gpu.prompt("prompt"), (PAGES * PAGE) as u32);
    let storage = tempfile::tempdir().unwrap();
    let rig = gpu.start(Setup { chunk: 13, folder: Some(storage.path()), ..Setup::default() });
    let cold = rig.run("cold", &prompt, NEW, None);
    cold.came_from(Tier::Nowhere, 0);
    let same = |rig: &Rig, what: &str, tier: Tier| {
        let run = rig.run(what, &prompt, NEW, None);
        run.came_from(tier, whole);
        cold.rows.must_equal(&run.rows, what);
    };
    same(&rig, "from the device", Tier::Device);
    rig.empty_device();
    same(&rig, "from the host", Tier::Host);
    rig.empty_all();
    same(&rig, "from storage", Tier::Storage);
    rig.check_integrity();
    rig.stop();
    let checksums = gpu.fake.launched().iter().filter(|name| *name == "seal_checksums").count();
    assert!(checksums > 0, "the seals that have just been verified are made of the device's checksums");
    // In other chunks, in a new engine.
    let rig = gpu.start(Setup { chunk: 4096, folder: Some(storage.path()), ..Setup::default() });
    same(&rig, "from storage, in one chunk", Tier::Storage);
    rig.stop();
    gpu.is_sound();
}

#[test]
fn layers_come_to_a_gpu_one_by_one() {
    let gpu = Gpu::new();
    let (prompt, whole) = (gpu.prompt("prompt"), (PAGES * PAGE) as u32);
    let storage = tempfile::tempdir().unwrap();
    let linked = || Setup { chunk: 4096, folder: Some(storage.path()), linked: true, ..Setup::default() };
    let rig = gpu.start(linked());
    let cold = rig.run("cold", &prompt, NEW, None);
    cold.came_from(Tier::Nowhere, 0);
    rig.wait_written();
    rig.stop();
    let rig = gpu.start(linked());
    let run = rig.run("from storage", &prompt, NEW, None);
    run.came_from(Tier::Storage, whole);
    cold.rows.must_equal(&run.rows, "from storage, layer by layer");
    rig.check_integrity();
    rig.stop();
    gpu.is_sound();
}

/// What is chosen on the device is what the host would have chosen.
#[test]
fn tokens_are_chosen_on_a_gpu() {
    let gpu = Gpu::new();
    let greedy = SamplingParams { max_new_tokens: Some(6), temperature: 0.0, ignore_eos: true, ..Default::default() };
    let drawn = SamplingParams { temperature: 0.8, seed: Some(7), ..greedy.clone() };
    let biased = gpu.model.vocab() - 3;
    let cases = [
        greedy.clone(),
        drawn.clone(),
        SamplingParams { top_k: Some(9), top_p: 0.9, min_p: 0.01, ..drawn.clone() },
        SamplingParams { frequency_penalty: 0.5, presence_penalty: 0.25, repetition_penalty: 1.5, ..drawn.clone() },
        SamplingParams { logit_bias: vec![(biased, 4.0)], ..greedy },
    ];
    let prompt = gpu.prompt("prompt");
    let run = |watched: bool| -> Vec<Vec<u32>> {
        let rig = gpu.start(Setup { watched, ..Setup::default() });
        let run = |(index, case): (usize, &SamplingParams)| rig.tokens(&index.to_string(), &prompt, case.clone());
        let tokens = cases.iter().enumerate().map(run).collect();
        rig.stop();
        tokens
    };
    let by_host = run(true);
    let chosen = |gpu: &Gpu| gpu.fake.launched().iter().filter(|name| *name == "sample").count();
    assert_eq!(chosen(&gpu), 0, "who wants to see logits gets them");
    assert_eq!(run(false), by_host);
    assert_eq!(chosen(&gpu), 6 * cases.len(), "one choice a token");
    gpu.is_sound();
}
