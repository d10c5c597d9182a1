//! Kernels by name: their modules are loaded when they are first asked for.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::code::CodeSource;
use super::driver::{Arg, Driver, Function, Launch, Module, Touches, nothing_more};
use super::memory::{Queue, failed};
use super::script::{Script, Way};
use super::units::Unit;
use kvdock_kernels::KernelError;

/// The kernels of a device.
pub(super) struct Kernels {
    driver: Arc<dyn Driver>,
    source: Arc<dyn CodeSource>,
    script: Arc<Script>,
    loaded: Mutex<Loaded>,
}

#[derive(Default)]
struct Loaded {
    modules: HashMap<Unit, Module>,
    functions: HashMap<(Unit, String), Function>,
}

/// The extent of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    pub(super) grid: [usize; 3],
    pub(super) threads: u32,
    pub(super) shared: usize,
}

impl Extent {
    /// Blocks along x alone.
    pub(super) fn line(blocks: usize, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], threads, shared: 0 }
    }

    /// Blocks along x and y.
    pub(super) fn plane(x: usize, y: usize, threads: u32) -> Self {
        Self { grid: [x, y, 1], threads, shared: 0 }
    }
}

impl Kernels {
    pub(super) fn new(driver: &Arc<dyn Driver>, source: Arc<dyn CodeSource>, script: &Arc<Script>) -> Self {
        Self { driver: Arc::clone(driver), source, script: Arc::clone(script), loaded: Mutex::default() }
    }

    fn module(&self, loaded: &mut Loaded, unit: Unit) -> Result<Module, KernelError> {
        if let Some(module) = loaded.modules.get(&unit) {
            return Ok(*module);
        }
        let code = self.source.code(unit)?;
        let module = self
            .driver
            .load(&code)
            .map_err(|error| KernelError::Device { op: "machine code", reason: format!("{}: {error}", unit.name()) })?;
        loaded.modules.insert(unit, module);
        Ok(module)
    }

    /// Loads a unit's module, if it is not loaded yet.
    pub(super) fn prepare(&self, unit: Unit) -> Result<(), KernelError> {
        self.module(&mut self.loaded.lock(), unit).map(|_| ())
    }

    fn function(&self, unit: Unit, name: &str) -> Result<Function, KernelError> {
        let mut loaded = self.loaded.lock();
        if let Some(function) = loaded.functions.get(&(unit, name.to_owned())) {
            return Ok(*function);
        }
        let module = self.module(&mut loaded, unit)?;
        let function = self.driver.function(module, name).map_err(failed("machine code"))?;
        loaded.functions.insert((unit, name.to_owned()), function);
        Ok(function)
    }

    /// Queues a kernel that touches nothing but what its arguments say. An empty grid queues nothing.
    ///
    /// # Safety
    /// As [`Driver::launch`].
    pub(super) unsafe fn launch(
        &self,
        unit: Unit,
        name: &str,
        extent: Extent,
        args: &[Arg],
        queue: &Queue,
    ) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_touching(unit, name, extent, args, &nothing_more, queue) }
    }

    /// As [`Kernels::launch`]; `touches` tells what is touched beside what the arguments say.
    ///
    /// # Safety
    /// As [`Driver::launch`].
    pub(super) unsafe fn launch_touching(
        &self,
        unit: Unit,
        name: &str,
        extent: Extent,
        args: &[Arg],
        touches: &Touches<'_>,
        queue: &Queue,
    ) -> Result<(), KernelError> {
        if extent.grid.contains(&0) {
            return Ok(());
        }
        let too_large = || KernelError::Device { op: "a launch", reason: format!("{name}: {extent:?} is too large") };
        let mut grid = [0; 3];
        for (axis, (to, from)) in grid.iter_mut().zip(extent.grid).enumerate() {
            *to = u32::try_from(from).ok().filter(|n| axis == 0 || *n <= 65_535).ok_or_else(too_large)?;
        }
        let shared = u32::try_from(extent.shared).map_err(|_| too_large())?;
        if self.script.launches(unit, name, &extent, args, touches) == Way::Dry {
            return Ok(());
        }
        let function = self.function(unit, name)?;
        let launch = Launch { grid, block: [extent.threads, 1, 1], shared, args, touches };
        // SAFETY: the caller's promise.
        unsafe { self.driver.launch(function, &launch, queue.id()) }
            .map_err(|error| KernelError::Device { op: "a launch", reason: format!("{name}: {error}") })
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        for module in self.loaded.get_mut().modules.values() {
            // SAFETY: the device that owned these kernels has waited for its queues, and queues nothing any more.
            if let Err(error) = unsafe { self.driver.unload(*module) } {
                tracing::warn!(%error, "a module could not be unloaded");
            }
        }
    }
}
