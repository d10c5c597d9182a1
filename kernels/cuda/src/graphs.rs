//! Decode steps that are recorded once and queued again as one.
//!
//! A recording holds addresses. The buffers are those of the caller, who says by a key that they are the same; the arrays of the plan are the
//! recording's own, and those of each step are copied over them before it runs. Its first two runs go kernel by kernel: the first with the
//! caller's plan, the second with the recording's, so that everything that a recording can't do (loading code, sending small arrays) has been
//! done when the third is recorded.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::attention::splits;
use super::device::CudaDevice;
use super::driver::{Driver, Graph};
use super::memory::{DeviceMemory, Queue, failed};
use super::plan::CudaPlan;
use kvdock_kernels::KernelError;
use kvdock_kernels::Plan;

/// Recordings that are kept; the one that was used longest ago makes room.
const KEPT: usize = 64;

/// What has to be equal for a recording to be used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Key {
    caller: u64,
    pool: u64,
    rows: usize,
    /// Bytes of the block with the plan's arrays.
    capacity: usize,
    splits: usize,
}

struct Entry {
    key: Key,
    used: u64,
    /// The recording's own plan, from its second run on.
    plan: Option<Plan>,
    recorded: Option<Recorded>,
}

struct Recorded {
    graph: Graph,
    /// Positions must lie below.
    position_limit: usize,
    /// What the recorded kernels leave their splits in.
    _partial: Option<Arc<DeviceMemory>>,
}

/// The recordings of a device.
#[derive(Default)]
pub(super) struct Graphs {
    entries: Vec<Entry>,
    clock: u64,
}

impl Graphs {
    /// Forgets all. Nothing of them may be queued any more.
    pub(super) fn clear(&mut self, driver: &Arc<dyn Driver>) {
        for recorded in self.entries.drain(..).filter_map(|entry| entry.recorded) {
            recorded.end(driver);
        }
    }
}

impl Recorded {
    fn end(self, driver: &Arc<dyn Driver>) {
        // SAFETY: the graph is this recording's own and is not queued any more.
        if let Err(error) = unsafe { driver.destroy_graph(self.graph) } {
            tracing::warn!(%error, "a CUDA graph could not be given back");
        }
    }
}

impl CudaDevice {
    /// [`kvdock_kernels::Device::repeat`].
    pub(super) fn run_repeated(
        &self,
        caller: u64,
        plan: &Plan,
        work: &mut dyn FnMut(&Plan) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        let op = "repeat";
        let step = self.plan_of(op, plan)?;
        if !step.is_decode() {
            return work(plan);
        }
        let key = Key {
            caller,
            pool: step.pool,
            rows: step.rows(),
            capacity: step.capacity(),
            splits: splits(step.last_position()),
        };
        let queue = self.order.enter();
        let mut graphs = self.graphs.lock();
        graphs.clock += 1;
        let now = graphs.clock;
        let Some(index) = graphs.entries.iter().position(|entry| entry.key == key) else {
            if graphs.entries.len() >= KEPT {
                self.forget_oldest(&mut graphs, &queue)?;
            }
            graphs.entries.push(Entry { key, used: now, plan: None, recorded: None });
            drop(graphs);
            return work(plan);
        };
        let entry = &mut graphs.entries[index];
        entry.used = now;
        if let Some(recorded) = &entry.recorded
            && step.last_position() >= recorded.position_limit
        {
            // Kernel by kernel it is said what is wrong.
            drop(graphs);
            return work(plan);
        }
        let first_with_own_plan = entry.plan.is_none();
        if first_with_own_plan {
            let twin = step.twin(&self.blocks)?;
            entry.plan = Some(Plan::from_parts(twin.rows(), Box::new(twin)));
        }
        let Some(own) = &entry.plan else { return work(plan) };
        self.copy_arrays(step, self.plan_of(op, own)?, &queue)?;
        if first_with_own_plan {
            let result = work(own);
            if result.is_err() {
                graphs.entries.swap_remove(index);
            }
            return result;
        }
        if entry.recorded.is_none() {
            match self.record(own, &queue, work) {
                Ok(recorded) => entry.recorded = Some(recorded),
                Err(error) => {
                    graphs.entries.swap_remove(index);
                    return Err(error);
                }
            }
        }
        let Some(recorded) = &entry.recorded else { return Ok(()) };
        // SAFETY: the caller promises by the key that its buffers are those of the recording; what else the recording uses is kept with it.
        unsafe { self.driver.launch_graph(recorded.graph, queue.id()) }.map_err(failed(op))
    }

    fn record(
        &self,
        own: &Plan,
        queue: &Queue,
        work: &mut dyn FnMut(&Plan) -> Result<(), KernelError>,
    ) -> Result<Recorded, KernelError> {
        let op = "repeat";
        self.position_limit.store(usize::MAX, Ordering::Relaxed);
        self.driver.begin_capture(queue.id()).map_err(failed(op))?;
        let result = work(own);
        let graph = self.driver.end_capture(queue.id()).map_err(failed(op));
        let graph = match (result, graph) {
            (Ok(()), graph) => graph?,
            (Err(error), Ok(graph)) => {
                let partial = None;
                Recorded { graph, position_limit: 0, _partial: partial }.end(&self.driver);
                return Err(error);
            }
            (Err(error), Err(_)) => return Err(error),
        };
        let position_limit = self.position_limit.load(Ordering::Relaxed);
        Ok(Recorded { graph, position_limit, _partial: self.partial.lock().clone() })
    }

    /// Queues that the arrays of `to` become those of `from`.
    fn copy_arrays(&self, from: &CudaPlan, to: &CudaPlan, queue: &Queue) -> Result<(), KernelError> {
        let ((source, bytes), (target, _)) = (from.arrays(), to.arrays());
        // SAFETY: both blocks are equally long, and all of their uses are ordered by the queue.
        unsafe { self.driver.on_device(target, source, bytes, queue.id()) }.map_err(failed("repeat"))
    }

    fn forget_oldest(&self, graphs: &mut Graphs, queue: &Queue) -> Result<(), KernelError> {
        let oldest = graphs.entries.iter().enumerate().min_by_key(|(_, entry)| entry.used).map(|(index, _)| index);
        if let Some(index) = oldest
            && let Some(recorded) = graphs.entries.swap_remove(index).recorded
        {
            queue.synchronize("repeat")?;
            recorded.end(&self.driver);
        }
        Ok(())
    }
}
