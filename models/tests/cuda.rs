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

use std::sync::Arc;

use kvdock_cuda::driver::Driver;
use kvdock_cuda::{Arithmetic, CudaDevice};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{KvDtype, WeightFormat};
use kvdock_models::testing::{Agreement, Course, TinyKind, TinyModel, agreement, token_ids};

fn compare(model: &TinyModel, format: WeightFormat, course: &Course, arithmetic: Arithmetic) -> Agreement {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    model.write_gguf(&path, format).unwrap();
    let fake = Arc::new(fake::Fake::new());
    let driver: Arc<dyn Driver> = fake.clone();
    let device = CudaDevice::new(driver, Arc::new(emulated::Compiler), arithmetic).unwrap();
    let found = agreement(&path, course, Arc::new(CpuDevice::new(1).unwrap()), Arc::new(device)).unwrap();
    assert_eq!(fake.violations(), Vec::<String>::new());
    assert_eq!(fake.kept(), (0, 0), "memory of the device or pinned memory is left");
    assert_eq!(fake.count("launch_graph"), course.steps - 2, "decode steps are recorded and queued again");
    found
}

fn course(dtype: KvDtype) -> Course {
    let prompts = [token_ids("one", 21, 256), token_ids("two", 9, 256)];
    Course { prompts, chunk: 16, steps: 6, page_tokens: 8, dtype }
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
