//! GPUs of NVIDIA as devices of kvdock.
//!
//! The program links nothing of CUDA: driver and compiler are looked for where they usually lie ([`Search`]) and loaded when a GPU is asked
//! for ([`open`]). The kernels (`*.cu`) are part of the program as sources, compiled for the GPU that is found, and their machine code is kept
//! on disk ([`Cubins`]). Everything that is done with the driver goes through [`driver::Driver`], so that tests can have another
//! one, which checks what is ordered before what.
//!
//! None of this has run on hardware yet.

mod attention;
mod code;
mod device;
pub mod driver;
mod find;
mod graphs;
mod heads;
mod memory;
mod module;
mod nvrtc;
mod operations;
mod ops;
mod order;
mod page_pool;
mod plan;
mod pool;
mod probe;
mod products;
mod real;
mod replays;
mod script;
mod staging;
mod units;

use std::sync::Arc;

pub use code::{CodeSource, Cubins};
pub use device::{Arithmetic, CudaDevice};
pub use find::{Found, Library, Search, nvidia_on_the_bus};
pub use nvrtc::{CompileError, Nvrtc};
pub use probe::{Probe, compiler};
pub use real::CudaDriver;
pub use units::{Unit, headers};

use driver::Driver as _;
use kvdock_kernels::KernelError;

/// Opens a GPU of this machine.
///
/// # Errors
/// What is missing, in words: the driver, the GPU, a compiler; what does not work of what is there.
pub fn open(search: &Search, ordinal: usize, arithmetic: Arithmetic) -> Result<CudaDevice, KernelError> {
    let missing = |reason: String| KernelError::Device { op: "CUDA", reason };
    let ready_made = Cubins::beside_program();
    let probe = Probe::new(search);
    if let Err(reason) = &probe.driver {
        return Err(missing(probe.without_driver(reason)));
    }
    if ready_made.is_none() {
        probe.usable().map_err(missing)?;
    }
    let driver = CudaDriver::open(search, ordinal).map_err(missing)?;
    let architecture = driver.gpu().architecture();
    let cubins = Cubins::new(&architecture, probe.nvrtc, Cubins::usual_cache(), ready_made);
    CudaDevice::new(Arc::new(driver), Arc::new(cubins), arithmetic)
}
