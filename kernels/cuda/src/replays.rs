//! Decode steps that take numbers from the host between their kernels, recorded and queued again as one.
//!
//! Each step is gone through dry first ([`super::script`]): the process computes what it would queue, and that decides. Launches and arguments that
//! are those of a recording are queued by it, one launch for all, behind one copy of the step's numbers. Others are queued kernel by kernel when they
//! are seen for the first time, and recorded the second time. So a recording is never queued with an address, a size or a shape that is not the step's own.

use super::device::CudaDevice;
use super::driver::{Graph, Touch};
use super::memory::{Queue, failed};
use super::script::{Arena, Seen};
use kvdock_kernels::KernelError;

/// Callers whose steps are kept; the one that came longest ago makes room.
const CALLERS: usize = 8;
/// Recordings of a caller.
const KEPT: usize = 32;
/// Steps of a caller that are remembered as queued once.
const REMEMBERED: usize = 64;

/// What is kept of a caller.
struct Caller {
    key: u64,
    used: u64,
    arena: Arena,
    /// Steps that were queued kernel by kernel, the latest last.
    once: Vec<u64>,
    /// Recordings by what they queue, the one that was used last at the end.
    recorded: Vec<(u64, Graph)>,
}

/// The recordings of a device.
#[derive(Default)]
pub(super) struct Replays {
    callers: Vec<Caller>,
    clock: u64,
}

impl CudaDevice {
    /// [`kvdock_kernels::Device::replay`].
    pub(super) fn run_replayed(
        &self,
        key: u64,
        work: &mut dyn FnMut() -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        if !self.recordings || self.script.is_on() {
            return work();
        }
        let queue = self.order.enter();
        let mut replays = self.replays.lock();
        replays.clock += 1;
        let now = replays.clock;
        let caller = match replays.callers.iter().position(|caller| caller.key == key) {
            Some(index) => replays.callers.swap_remove(index),
            None => {
                if replays.callers.len() >= CALLERS {
                    let oldest = replays.callers.iter().enumerate().min_by_key(|(_, caller)| caller.used);
                    if let Some(index) = oldest.map(|(index, _)| index) {
                        let mut gone = replays.callers.swap_remove(index);
                        self.forget(&mut gone, &queue)?;
                    }
                }
                Caller { key, used: now, arena: Arena::new(&self.driver)?, once: Vec::new(), recorded: Vec::new() }
            }
        };
        let (caller, result) = self.step(Caller { used: now, ..caller }, &queue, work);
        replays.callers.extend(caller);
        result
    }

    /// One step of a caller, which comes back unless its memory is lost.
    fn step(
        &self,
        caller: Caller,
        queue: &Queue,
        work: &mut dyn FnMut() -> Result<(), KernelError>,
    ) -> (Option<Caller>, Result<(), KernelError>) {
        let Caller { key, used, arena, mut once, mut recorded } = caller;
        let Some(Seen { arena, signature, sound, result, touches }) = self.script.go(arena, true, work) else {
            return (None, work());
        };
        if let Some(grown) = arena.grown() {
            let mut gone = Caller { key, used, arena, once, recorded };
            let forgotten = self.forget(&mut gone, queue);
            let result = forgotten.and_then(|()| work());
            let caller = grown.ok().map(|arena| Caller { key, used, arena, once: Vec::new(), recorded: Vec::new() });
            return (caller, result);
        }
        let back = |arena, once, recorded| Some(Caller { key, used, arena, once, recorded });
        // What is wrong is said by the step itself.
        if !sound || result.is_err() {
            return (back(arena, once, recorded), work());
        }
        if let Some(index) = recorded.iter().position(|(known, _)| *known == signature) {
            let found = recorded.remove(index);
            recorded.push(found);
            let result = self.queue_recorded(&arena, found.1, &touches, queue);
            return (back(arena, once, recorded), result);
        }
        let Some(index) = once.iter().position(|known| *known == signature) else {
            if once.len() >= REMEMBERED {
                once.remove(0);
            }
            once.push(signature);
            return (back(arena, once, recorded), work());
        };
        once.remove(index);
        let (arena, graph) = match self.record_step(arena, signature, queue, work) {
            (Some(arena), Ok(graph)) => (arena, graph),
            (Some(arena), Err(error)) => return (back(arena, once, recorded), Err(error)),
            (None, _) => return (None, work()),
        };
        let Some(graph) = graph else { return (back(arena, once, recorded), work()) };
        if recorded.len() >= KEPT {
            let (_, oldest) = recorded.remove(0);
            if let Err(error) = queue.synchronize("replay") {
                self.destroy(graph);
                return (back(arena, once, recorded), Err(error));
            }
            self.destroy(oldest);
        }
        recorded.push((signature, graph));
        let result = self.queue_recorded(&arena, graph, &touches, queue);
        (back(arena, once, recorded), result)
    }

    /// Records a step that has been seen before. No recording: it was another one this time.
    fn record_step(
        &self,
        arena: Arena,
        signature: u64,
        queue: &Queue,
        work: &mut dyn FnMut() -> Result<(), KernelError>,
    ) -> (Option<Arena>, Result<Option<Graph>, KernelError>) {
        if let Err(error) = self.driver.begin_capture(queue.id()).map_err(failed("replay")) {
            return (Some(arena), Err(error));
        }
        let seen = self.script.go(arena, false, work);
        let graph = self.driver.end_capture(queue.id()).map_err(failed("replay"));
        let Some(seen) = seen else {
            graph.into_iter().for_each(|graph| self.destroy(graph));
            return (None, Ok(None));
        };
        let same = seen.sound && seen.signature == signature && seen.result.is_ok();
        let result = match (graph, seen.result) {
            (Ok(graph), _) if same => Ok(Some(graph)),
            (Ok(graph), result) => {
                self.destroy(graph);
                result.map(|()| None)
            }
            (Err(error), result) => result.and(Err(error)),
        };
        (Some(seen.arena), result)
    }

    /// Queues a recording behind the numbers of this step.
    fn queue_recorded(
        &self,
        arena: &Arena,
        graph: Graph,
        touches: &[Vec<Touch>],
        queue: &Queue,
    ) -> Result<(), KernelError> {
        let (to, numbers) = arena.numbers();
        // SAFETY: the memory is the arena's, whose uses are all ordered by the queue.
        unsafe { self.uploads.send(numbers, to, queue, "replay")? };
        // SAFETY: every address of the recording was found to be one that this step would use.
        unsafe { self.driver.launch_graph_touching(graph, touches, queue.id()) }.map_err(failed("replay"))
    }

    fn destroy(&self, graph: Graph) {
        // SAFETY: the graph is not queued any more, or never was.
        if let Err(error) = unsafe { self.driver.destroy_graph(graph) } {
            tracing::warn!(%error, "a CUDA graph could not be given back");
        }
    }

    /// Gives back what is recorded of a caller, once it has run.
    fn forget(&self, caller: &mut Caller, queue: &Queue) -> Result<(), KernelError> {
        queue.synchronize("replay")?;
        caller.recorded.drain(..).for_each(|(_, graph)| self.destroy(graph));
        Ok(())
    }

    /// Forgets all. Nothing of it may be queued any more.
    pub(super) fn clear_replays(&mut self) {
        let callers = std::mem::take(&mut self.replays.get_mut().callers);
        callers.into_iter().flat_map(|caller| caller.recorded).for_each(|(_, graph)| self.destroy(graph));
    }
}
