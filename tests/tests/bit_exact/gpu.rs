//! The engine on a GPU whose kernels run on the CPU, behind a driver that checks what is ordered before what: every tier, linker mode, and tokens
//! that are chosen on the device.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvdock::engine::SamplingParams;
use kvdock::plugin::backend::PoolGroup;
use kvdock_cuda::driver::Driver;
use kvdock_cuda::{Arithmetic, CudaDevice};
use kvdock_kernels::{Device, WeightFormat};
use kvdock_models::testing::{Fixture, TinyKind, TinyModel, token_ids};

use super::emulated::Compiler;
use super::fake::Fake;
use super::faults::{Fault, Ordered};
use super::rig::{Loaded, Rig, Setup, Tier, Wrap};

const PAGE: usize = 8;
pub const PAGES: usize = 4;
pub const NEW: u32 = 4;

pub struct Gpu {
    pub fake: Arc<Fake>,
    model: Loaded,
}

impl Gpu {
    /// A dense model of two layers.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        TinyModel { layers: 2, ..TinyModel::new(TinyKind::Qwen3) }.write_gguf(&path, WeightFormat::BF16).unwrap();
        Self::of(&path, PAGE)
    }

    /// The tiny model of a family, for pages of so many tokens.
    pub fn family(name: &str, page: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut fixture = Fixture::new(name).unwrap();
        // Rotary tables of a million positions take long to make here.
        fixture.config["max_position_embeddings"] = 2048.into();
        fixture.write(folder.path()).unwrap();
        Self::of(folder.path(), page)
    }

    fn of(path: &Path, page: usize) -> Self {
        let fake = Arc::new(Fake::new());
        let driver: Arc<dyn Driver> = fake.clone();
        let device = CudaDevice::new(driver, Arc::new(Compiler), Arithmetic::Reproducible).unwrap();
        let device: Arc<dyn Device> = Arc::new(device);
        Self { fake, model: Loaded::on(path, page, device) }
    }

    pub fn start(&self, setup: Setup<'_>) -> Rig {
        self.start_over(setup, |backend, _| backend)
    }

    pub fn start_over(&self, setup: Setup<'_>, wrap: impl Wrap) -> Rig {
        let room = Setup { device_pages: 32, window_pages: 32, host_pages: 32, states: 8, running: 4, ..setup };
        Rig::over(&self.model, Setup { threshold: self.model.page, ..room }, wrap)
    }

    pub fn prompt(&self, what: &str) -> Vec<u32> {
        token_ids(what, PAGES * self.model.page + 3, self.model.vocab())
    }

    /// Tokens of so many pages.
    pub fn tokens(&self, pages: usize) -> u32 {
        (pages * self.model.page) as u32
    }

    /// How often a kernel was launched.
    pub fn launched(&self, kernel: &str) -> usize {
        self.fake.launched().iter().filter(|name| *name == kernel).count()
    }

    /// Nothing was done out of order.
    pub fn is_sound(&self) {
        assert_eq!(self.fake.violations(), Vec::<String>::new());
    }
}

#[test]
fn every_tier_of_a_gpu_gives_the_same_bits() {
    let gpu = Gpu::new();
    let (prompt, whole) = (gpu.prompt("prompt"), gpu.tokens(PAGES));
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
    assert!(
        gpu.launched("seal_checksums") > 0,
        "the seals that have just been verified are made of the device's checksums"
    );
    // In other chunks, in a new engine.
    let rig = gpu.start(Setup { chunk: 4096, folder: Some(storage.path()), ..Setup::default() });
    same(&rig, "from storage, in one chunk", Tier::Storage);
    rig.stop();
    gpu.is_sound();
}

/// Computes a prompt in linker mode, and stores it; then a new engine loads it, over `fault` where there is one. `stored` pages of it are good.
fn layer_by_layer(gpu: &Gpu, fault: Option<&Ordered>, stored: usize) {
    let prompt = gpu.prompt("prompt");
    let storage = tempfile::tempdir().unwrap();
    let linked = || Setup { chunk: 4096, folder: Some(storage.path()), linked: true, ..Setup::default() };
    let rig = gpu.start(linked());
    let cold = rig.run("cold", &prompt, NEW, None);
    cold.came_from(Tier::Nowhere, 0);
    rig.wait_written();
    rig.stop();
    let rig = match fault.cloned() {
        Some(fault) => gpu.start_over(linked(), move |inner, pools| fault.over(inner, pools)),
        None => gpu.start(linked()),
    };
    let run = rig.run("from storage", &prompt, NEW, None);
    run.came_from(if stored == 0 { Tier::Nowhere } else { Tier::Storage }, gpu.tokens(stored));
    cold.rows.must_equal(&run.rows, "from storage, layer by layer");
    rig.assert_quiet();
    rig.stop();
}

#[test]
fn layers_come_to_a_gpu_one_by_one() {
    let gpu = Gpu::new();
    layer_by_layer(&gpu, None, PAGES);
    assert_eq!(gpu.launched("kv_pages_in"), 2, "one launch a layer for all pages");
    // A launch each for what was offloaded, and one for what was loaded.
    assert!(gpu.launched("seal_checksums") > gpu.launched("kv_pages_out"), "what has come is verified on the device");
    gpu.is_sound();
}

#[test]
fn what_comes_damaged_to_a_gpu_is_computed() {
    let gpu = Gpu::new();
    let fault = Ordered::new(PoolGroup::Full, 2, Fault::Changed("kv"));
    layer_by_layer(&gpu, Some(&fault), 2);
    assert!(fault.met.load(Ordering::SeqCst) > 0);
    layer_by_layer(&gpu, Some(&Ordered::new(PoolGroup::Full, 0, Fault::FailsAt(1))), 0);
    gpu.is_sound();
}

#[test]
fn windows_and_recurrent_states_come_to_a_gpu() {
    for (name, page) in [("gpt_oss", 4), ("qwen3_next", 8)] {
        let gpu = Gpu::family(name, page);
        layer_by_layer(&gpu, None, PAGES);
        gpu.is_sound();
    }
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
    assert_eq!(gpu.launched("sample"), 0, "who wants to see logits gets them");
    assert_eq!(run(false), by_host);
    assert_eq!(gpu.launched("sample"), 6 * cases.len(), "one choice a token");
    gpu.is_sound();
}
