//! Where the model runs.

use std::sync::Arc;

use kvdock_cuda::{Arithmetic, Search};
use kvdock_kernels::Device;
use kvdock_kernels::cpu::CpuDevice;

use super::machine;
use crate::config::{Amount, CudaArithmetic, DeviceChoice, EngineConfig};

/// The device that `engine.device` asks for.
///
/// # Errors
/// One line that names the key and what is missing.
pub(super) fn choose(config: &EngineConfig) -> Result<Arc<dyn Device>, String> {
    let gpu = || {
        let arithmetic = match config.cuda_arithmetic {
            CudaArithmetic::Reproducible => Arithmetic::Reproducible,
            CudaArithmetic::Fast => Arithmetic::Fast,
        };
        kvdock_cuda::open(&Search::usual(), config.cuda_device as usize, arithmetic)
    };
    match config.device {
        DeviceChoice::Cpu => {}
        DeviceChoice::Cuda => match gpu() {
            Ok(device) => return Ok(Arc::new(device)),
            Err(error) => {
                return Err(format!("engine.device = \"cuda\": {error}; `kvdock doctor` shows what is there"));
            }
        },
        DeviceChoice::Auto => match gpu() {
            Ok(device) => return Ok(Arc::new(device)),
            Err(error) => tracing::info!("no {error}; the model runs on the CPU"),
        },
    }
    let threads = match config.threads {
        Amount::Fixed(threads) => threads as usize,
        Amount::Auto => machine::cpus(),
    };
    let device = CpuDevice::new(threads).map_err(|error| format!("engine.threads = {threads}: {error}"))?;
    Ok(Arc::new(device))
}
