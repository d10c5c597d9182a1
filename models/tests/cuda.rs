//! Tiny models on the CUDA device, whose kernels run on the CPU here, against the CPU's device.

#![allow(clippy::unwrap_used)]

#[path = "../../kernels/cuda/tests/device/clocks.rs"]
mod clocks;
#[path = "../../kernels/cuda/tests/device/emulated.rs"]
#[allow(dead_code)]
mod emulated;
#[path = "../../kernels/cuda/tests/device/fake.rs"]
#[allow(dead_code)]
mod fake;
#[path = "../../kernels/cuda/tests/device/state.rs"]
#[allow(dead_code)]
mod state;

use std::path::Path;
use std::sync::Arc;

use kvdock_cuda::driver::Driver;
use kvdock_cuda::{Arithmetic, CudaDevice};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{KvDtype, WeightFormat};
use kvdock_models::testing::{Agreement, Course, Fixture, SINGLE, TinyKind, TinyModel, agreement, token_ids};

/// Compares what both devices compute of a checkpoint; gives also how often a recording was queued.
fn run(path: &Path, course: &Course, arithmetic: Arithmetic) -> (Agreement, usize) {
    let fake = Arc::new(fake::Fake::new());
    let driver: Arc<dyn Driver> = fake.clone();
    let device = CudaDevice::new(driver, Arc::new(emulated::Compiler), arithmetic).unwrap();
    let found = agreement(path, course, Arc::new(CpuDevice::new(1).unwrap()), Arc::new(device)).unwrap();
    assert_eq!(fake.violations(), Vec::<String>::new());
    assert_eq!(fake.kept(), (0, 0), "memory of the device or pinned memory is left");
    (found, fake.count("launch_graph"))
}

fn compare(model: &TinyModel, format: WeightFormat, course: &Course, arithmetic: Arithmetic) -> Agreement {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    model.write_gguf(&path, format).unwrap();
    let (found, recorded) = run(&path, course, arithmetic);
    assert_eq!(recorded, course.steps - 2, "decode steps are recorded and queued again");
    found
}

fn course(dtype: KvDtype) -> Course {
    let prompts = [token_ids("one", 21, 256), token_ids("two", 9, 256)];
    Course { prompts, chunk: 16, steps: 6, page_tokens: 8, dtype, all_pools: false, packed_rows: false }
}

#[test]
fn a_quantised_llama_computes_what_the_cpu_computes() {
    let model = TinyModel { layers: 1, ..TinyModel::wide(TinyKind::Llama) };
    let found = compare(&model, WeightFormat::Q4_K, &course(KvDtype::F16), Arithmetic::Fast);
    assert!(found.largest < 2e-2 && found.wrong_choice == 0 && found.rows == 14, "{found:?}");
}

#[test]
fn reproducible_arithmetic_is_near_the_cpus() {
    let model = TinyModel { layers: 2, ..TinyModel::new(TinyKind::Qwen3) };
    let found = compare(&model, WeightFormat::BF16, &course(KvDtype::F32), Arithmetic::Reproducible);
    assert!(found.largest < 1e-3 && found.wrong_choice == 0 && found.rows == 14, "{found:?}");
}

#[test]
fn biases_and_half_precision_pages() {
    let model = TinyModel { layers: 1, ..TinyModel::new(TinyKind::Qwen2) };
    let found = compare(&model, WeightFormat::F16, &course(KvDtype::BF16), Arithmetic::Reproducible);
    assert!(found.largest < 3e-2 && found.wrong_choice == 0 && found.rows == 14, "{found:?}");
}

/// What recorded steps compute is what the same steps compute kernel by kernel.
fn recordings_change_no_bit(name: &str, path: &Path, course: &Course, arithmetic: Arithmetic) {
    let device = || {
        let fake = Arc::new(fake::Fake::new());
        let driver: Arc<dyn Driver> = fake.clone();
        (fake, CudaDevice::new(driver, Arc::new(emulated::Compiler), arithmetic).unwrap())
    };
    let ((plain_fake, plain), (fake, recorded)) = (device(), device());
    let found = agreement(path, course, Arc::new(plain.kernel_by_kernel()), Arc::new(recorded)).unwrap();
    assert_eq!((found.largest, found.wrong_choice, found.flipped_rows), (0.0, 0, 0), "{name}: {found:?}");
    assert_eq!((plain_fake.count("launch_graph"), fake.count("launch_graph") > 0), (0, true), "{name}");
    assert_eq!((plain_fake.violations(), fake.violations()), (Vec::new(), Vec::new()));
    assert_eq!(fake.kept(), (0, 0), "memory of the device or pinned memory is left");
    assert_eq!(fake.count("destroy_graph"), fake.count("end_capture"));
}

/// A family's tiny checkpoint on both devices, past its windows, over several pages, with more rows than its indexer picks.
fn family(name: &str, dtype: KvDtype, all_pools: bool, packed_rows: bool, arithmetic: Arithmetic) {
    let folder = tempfile::tempdir().unwrap();
    let mut fixture = Fixture::new(name).unwrap();
    // Rotary tables of a million positions take long to make here.
    fixture.config["max_position_embeddings"] = 2048.into();
    fixture.write(folder.path()).unwrap();
    // Rows of 128 tokens are only there after 128 tokens.
    let (long, chunk) = if name.starts_with("dsv4") { (150, 70) } else { (37, 20) };
    let prompts = [token_ids("one", long, 256), token_ids("two", 11, 256)];
    // Packed rows take longest, and are compared step by step.
    let steps = if packed_rows { 3 } else { 4 };
    let course = Course { prompts, chunk, steps, page_tokens: 8, dtype, all_pools, packed_rows };
    let (found, recorded) = run(folder.path(), &course, arithmetic);
    if !packed_rows {
        assert!(recorded > 0, "{name}: decode steps are recorded and queued again");
        recordings_change_no_bit(name, folder.path(), &course, arithmetic);
    }
    let tolerance = if dtype == KvDtype::F32 { 2e-3 } else { 3e-2 };
    assert!(found.largest < tolerance && found.wrong_choice == 0, "{name}: {found:?}");
    let rows = if packed_rows { 2 * SINGLE + 6 } else { 10 };
    assert_eq!(found.rows + found.flipped_rows, rows, "{name}: {found:?}");
    // A step rounds a thousand elements, and of some steps one the other way; enough are as they are on the CPU.
    assert!(found.flips.far == 0 && found.rows > rows / 4, "{name}: {found:?}");
}

#[test]
fn experts_compute_what_the_cpu_computes() {
    family("qwen3_moe", KvDtype::F32, false, false, Arithmetic::Reproducible);
    family("qwen3_moe", KvDtype::F16, true, false, Arithmetic::Fast);
}

#[test]
fn windows_sinks_and_biased_experts() {
    family("gpt_oss", KvDtype::F32, true, false, Arithmetic::Fast);
    family("gpt_oss", KvDtype::F32, false, false, Arithmetic::Reproducible);
}

#[test]
fn experts_of_four_bits() {
    family("gpt_oss_mxfp4", KvDtype::F32, true, false, Arithmetic::Reproducible);
    family("gpt_oss_mxfp4", KvDtype::F32, true, false, Arithmetic::Fast);
}

#[test]
fn keys_wider_than_values_and_scaled_values() {
    family("mimo", KvDtype::F32, true, false, Arithmetic::Fast);
}

#[test]
fn gated_delta_nets() {
    family("qwen3_5", KvDtype::F32, true, false, Arithmetic::Reproducible);
    family("qwen3_next", KvDtype::F32, true, false, Arithmetic::Fast);
}

#[test]
fn latent_attention_to_picked_tokens() {
    family("glm_dsa", KvDtype::F32, true, false, Arithmetic::Reproducible);
    family("deepseek_v32", KvDtype::F32, true, false, Arithmetic::Fast);
}

#[test]
fn deepseek_v4_with_plain_rows() {
    family("dsv4", KvDtype::F32, true, false, Arithmetic::Fast);
}

/// Weights of eight and four bits, rows of eight bits.
#[test]
fn deepseek_v4_with_packed_rows() {
    family("dsv4q", KvDtype::F32, true, true, Arithmetic::Reproducible);
    family("dsv4q", KvDtype::F32, true, true, Arithmetic::Fast);
}
