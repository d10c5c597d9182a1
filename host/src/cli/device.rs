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
    cpu(config, 1)
}

/// The devices of `engine.tp_size` times `engine.cp_size` ranks, which share the threads evenly.
///
/// # Errors
/// As [`choose`]; several ranks on a GPU.
pub(super) fn choose_ranks(config: &EngineConfig) -> Result<Vec<Arc<dyn Device>>, String> {
    let ranks = config.ranks();
    if ranks == 1 {
        return Ok(vec![choose(config)?]);
    }
    match config.device {
        DeviceChoice::Cuda => {
            return Err(format!(
                "{}: ranks run on CPUs, as GPUs are not connected with each other yet; set engine.device = \"cpu\", or one rank",
                config.ranks_said()
            ));
        }
        DeviceChoice::Auto => tracing::info!(ranks, "the ranks of the model run on the CPU"),
        DeviceChoice::Cpu => {}
    }
    (0..ranks).map(|_| cpu(config, ranks)).collect()
}

/// The CPU, with one rank's share of the threads of `ranks` ranks.
fn cpu(config: &EngineConfig, ranks: usize) -> Result<Arc<dyn Device>, String> {
    let threads = match config.threads {
        Amount::Fixed(threads) => threads as usize,
        Amount::Auto => machine::cpus(),
    };
    let device =
        CpuDevice::new((threads / ranks).max(1)).map_err(|error| format!("engine.threads = {threads}: {error}"))?;
    Ok(Arc::new(device))
}
