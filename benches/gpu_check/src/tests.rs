//! The small comparisons themselves, on kernels that run on the CPU here.

#![allow(clippy::unwrap_used)]

#[path = "../../../kernels/cuda/tests/device/clocks.rs"]
mod clocks;
#[path = "../../../kernels/cuda/tests/device/emulated.rs"]
#[allow(dead_code)]
mod emulated;
#[path = "../../../kernels/cuda/tests/device/fake.rs"]
#[allow(dead_code)]
mod fake;
#[path = "../../../kernels/cuda/tests/device/state.rs"]
#[allow(dead_code)]
mod state;

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use kvdock_cuda::driver::Driver;
use kvdock_cuda::{Arithmetic, CodeSource, CudaDevice, Unit};
use kvdock_kernels::cpu::CpuDevice;
use kvdock_kernels::{Device, KernelError};

use super::kernels::{Check, checks};
use super::table::Table;

fn cpu() -> CpuDevice {
    CpuDevice::new(1).unwrap()
}

/// Compiles for the emulation, and notes what it was asked for.
#[derive(Default)]
struct Asked(Mutex<HashSet<Unit>>);

impl CodeSource for Asked {
    fn code(&self, unit: Unit) -> Result<Vec<u8>, KernelError> {
        self.0.lock().unwrap().insert(unit);
        emulated::Compiler.code(unit)
    }
}

#[test]
fn small_comparisons_pass_on_emulated_kernels() {
    let fake = Arc::new(fake::Fake::new());
    let driver: Arc<dyn Driver> = fake.clone();
    let asked = Arc::new(Asked::default());
    let device = CudaDevice::new(driver, asked.clone(), Arithmetic::Fast).unwrap();
    for check in checks(true) {
        check.run(&cpu(), &device, Arithmetic::Fast).unwrap_or_else(|reason| panic!("{}: {reason}", check.name));
    }
    assert!(fake.launched().iter().any(|name| name == "seal_checksums"), "checksums of pages are compared");
    drop(device);
    let bundled = super::units();
    let asked = asked.0.lock().unwrap();
    let missing: Vec<String> = asked.iter().filter(|unit| !bundled.contains(unit)).map(|unit| unit.name()).collect();
    assert!(missing.is_empty() && asked.contains(&Unit::Seal), "a bundle has no code of {missing:?}");
    assert_eq!(fake.violations(), Vec::<String>::new());
}

#[test]
fn a_difference_fails_a_comparison() {
    let wrong = |value: f32| {
        Check::new("wrong", (1e-3, 1e-1), move |device: &dyn Device| {
            Ok(vec![1.0, if device.name().ends_with("threads)") { value } else { 2.0 }])
        })
    };
    let other = CpuDevice::new(2).unwrap();
    let run = |value, arithmetic| wrong(value).run(&cpu(), &other, arithmetic);
    assert!(run(2.0001, Arithmetic::Reproducible).is_ok());
    let reason = run(2.1, Arithmetic::Reproducible).unwrap_err();
    assert!(reason.contains("value 1 is 2.1, not 2"), "{reason}");
    assert!(run(2.1, Arithmetic::Fast).is_ok());
    assert!(run(f32::NAN, Arithmetic::Fast).is_err());
}

#[test]
fn a_bundle_has_code_for_everything_that_the_checks_use() {
    let units = super::units();
    assert!(units.len() > 30, "{}", units.len());
    let names: std::collections::HashSet<String> = units.iter().map(|unit| unit.name()).collect();
    for name in
        ["norm", "matmul-q4_k-1", "matmul-q4_k-2", "decode_tiles-bf16-128-128-4", "prefill-bf16-128-128", "seal"]
    {
        assert!(names.contains(name), "{name} is not among {names:?}");
    }
}

#[test]
fn the_table_is_markdown() {
    let mut table = Table::new("cuda 0 (Some GPU, sm_90a)");
    table.row("copy", 0.0015, "3000 GB/s".into(), Some((0.5, "all")), "80 %");
    table.note("nothing");
    let text = table.text();
    assert!(text.starts_with("# cuda 0 (Some GPU, sm_90a), driver"), "{text}");
    assert!(text.contains("| copy | 1.500 ms | 3000 GB/s | 50 % of all | 80 % |"), "{text}");
}
