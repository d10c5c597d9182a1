//! A CUDA device on the fake driver.

use std::sync::Arc;

use kvdock_cuda::driver::Driver;
use kvdock_cuda::{Arithmetic, CodeSource, CudaDevice};

use super::emulated::{Compiler, Nothing};
use super::fake::Fake;

/// A device, and its driver to be asked.
pub struct Rig {
    pub fake: Arc<Fake>,
    pub device: CudaDevice,
}

impl Rig {
    /// Kernels run.
    pub fn computing(arithmetic: Arithmetic) -> Self {
        Self::with(Arc::new(Compiler), arithmetic)
    }

    /// Kernels are only looked at.
    pub fn looking() -> Self {
        Self::with(Arc::new(Nothing), Arithmetic::Reproducible)
    }

    fn with(source: Arc<dyn CodeSource>, arithmetic: Arithmetic) -> Self {
        let fake = Arc::new(Fake::new());
        let driver: Arc<dyn Driver> = fake.clone();
        Self { device: CudaDevice::new(driver, source, arithmetic).unwrap(), fake }
    }

    /// Ends the device; nothing was done wrong, and nothing is left.
    pub fn end(self) {
        let Self { fake, device } = self;
        drop(device);
        assert_eq!(fake.violations(), Vec::<String>::new());
        assert_eq!(fake.kept(), (0, 0), "device and pinned memory are left");
    }
}

/// Numbers that follow from a seed, from -1 to 1.
pub fn floats(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// That both are as near as `tolerance` of the largest of `want`.
pub fn assert_near(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().fold(1e-6_f32, |most, x| most.max(x.abs()));
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            (got - want).abs() <= tolerance * scale,
            "{what}: element {index} is {got}, not {want} (largest {scale})"
        );
    }
}
