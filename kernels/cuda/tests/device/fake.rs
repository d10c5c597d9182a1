//! A driver that runs everything at once in the memory of this process, and keeps track of what a GPU would have been free to do.
//!
//! Every operation of a stream has a number; a clock says which operations of which streams have certainly run when it does. Two uses of the
//! same bytes, of which one writes, must be ordered by such clocks. What is not is a violation, and so is memory that is used outside of
//! its bounds or after its end, an event that is waited for before it was ever recorded, or a recording that holds what it can't.

use std::sync::Mutex;

use kvdock_cuda::driver::{
    Access, Arg, DevicePtr, Driver, DriverResult, Event, Function, GpuInfo, Graph, Launch, MAP_BYTES, Module, RowMap,
    Stream, Touch,
};

use super::emulated::Emulated;
use super::state::{Action, Kind, Memory, Queue, Recorded, State, error};

/// The driver.
pub struct Fake {
    gpu: GpuInfo,
    state: Mutex<State>,
}

impl Fake {
    pub fn new() -> Self {
        Self::with_compute((9, 0))
    }

    pub fn with_compute(compute: (i32, i32)) -> Self {
        let gpu = GpuInfo {
            ordinal: 0,
            name: "Fake GPU".into(),
            compute,
            multiprocessors: 4,
            shared_bytes: 227 << 10,
            memory: 8 << 30,
            uuid: [7; 16],
            driver: (12, 4),
        };
        let state = State { room: 8 << 30, next: 1, ..State::default() };
        Self { gpu, state: Mutex::new(state) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What went wrong so far.
    pub fn violations(&self) -> Vec<String> {
        self.state().violations.clone()
    }

    /// How often a call was made.
    pub fn count(&self, call: &'static str) -> usize {
        self.state().calls.get(call).copied().unwrap_or_default()
    }

    /// The kernels that were launched, in order.
    pub fn launched(&self) -> Vec<String> {
        self.state().launched.clone()
    }

    /// Bytes of device memory and of pinned memory that were not given back.
    pub fn kept(&self) -> (u64, u64) {
        let state = self.state();
        let of = |kind| state.live.values().filter(|memory| memory.kind == kind).map(|memory| memory.bytes).sum();
        (of(Kind::Device), of(Kind::Pinned))
    }

    pub fn set_room(&self, bytes: u64) {
        self.state().room = bytes;
    }

    pub fn set_eager(&self, eager: bool) {
        self.state().eager = eager;
    }

    /// The next call of this kind fails.
    pub fn fail_next(&self, call: &'static str) {
        self.state().fail = Some(call);
    }
}

impl Driver for Fake {
    fn gpu(&self) -> &GpuInfo {
        &self.gpu
    }

    fn memory(&self) -> DriverResult<(u64, u64)> {
        let room = self.state().room;
        Ok((room.saturating_sub(self.kept().0), room))
    }

    fn alloc(&self, bytes: usize) -> DriverResult<DevicePtr> {
        let (free, _) = self.memory()?;
        let mut state = self.state();
        state.called("alloc")?;
        if bytes as u64 > free {
            return Err(error("alloc", 2, "out of memory"));
        }
        Ok(state.add(bytes, Kind::Device))
    }

    unsafe fn free(&self, at: DevicePtr) -> DriverResult<()> {
        let mut state = self.state();
        state.called("free")?;
        state.remove("free", at, Kind::Device);
        Ok(())
    }

    fn alloc_host(&self, bytes: usize) -> DriverResult<*mut u8> {
        let mut state = self.state();
        state.called("alloc_host")?;
        Ok(state.add(bytes, Kind::Pinned) as *mut u8)
    }

    unsafe fn free_host(&self, at: *mut u8) -> DriverResult<()> {
        let mut state = self.state();
        state.called("free_host")?;
        state.remove("free_host", at as u64, Kind::Pinned);
        Ok(())
    }

    unsafe fn pin_host(&self, at: *mut u8, bytes: usize) -> DriverResult<DevicePtr> {
        let mut state = self.state();
        state.called("pin_host")?;
        state.live.insert(at as u64, Memory { bytes: bytes as u64, kind: Kind::Registered, _store: Vec::new() });
        Ok(at as u64)
    }

    unsafe fn unpin_host(&self, at: *mut u8) -> DriverResult<()> {
        let mut state = self.state();
        state.called("unpin_host")?;
        state.remove("unpin_host", at as u64, Kind::Registered);
        Ok(())
    }

    fn stream(&self, _: bool) -> DriverResult<Stream> {
        let mut state = self.state();
        state.called("stream")?;
        let id = state.id();
        state.queues.insert(id, Queue::default());
        Ok(Stream(id))
    }

    unsafe fn destroy_stream(&self, stream: Stream) -> DriverResult<()> {
        let mut state = self.state();
        if state.queues.remove(&stream.0).is_none() {
            state.violation("a stream was destroyed twice".into());
        }
        Ok(())
    }

    fn event(&self, _: bool) -> DriverResult<Event> {
        let mut state = self.state();
        state.called("event")?;
        let id = state.id();
        state.events.insert(id, None);
        Ok(Event(id))
    }

    unsafe fn destroy_event(&self, event: Event) -> DriverResult<()> {
        let mut state = self.state();
        if state.events.remove(&event.0).is_none() {
            state.violation("an event was destroyed twice".into());
        }
        Ok(())
    }

    fn record(&self, event: Event, stream: Stream) -> DriverResult<()> {
        let mut state = self.state();
        state.called("record")?;
        state.no_capture("record", stream);
        let clock = state.queues.get(&stream.0).map(|queue| queue.clock.clone());
        match (clock, state.events.contains_key(&event.0)) {
            (Some(clock), true) => {
                state.events.insert(event.0, Some(clock));
            }
            _ => state.violation("record with a stream or event that is not there".into()),
        }
        Ok(())
    }

    fn wait(&self, stream: Stream, event: Event) -> DriverResult<()> {
        let mut state = self.state();
        state.called("wait")?;
        state.no_capture("wait", stream);
        match state.events.get(&event.0).cloned() {
            Some(Some(clock)) => {
                if let Some(queue) = state.queues.get_mut(&stream.0) {
                    queue.clock.join(&clock);
                }
            }
            Some(None) => state.violation("wait for an event that was never recorded".into()),
            None => state.violation("wait for an event that is not there".into()),
        }
        Ok(())
    }

    fn is_done(&self, event: Event) -> DriverResult<bool> {
        let mut state = self.state();
        state.called("is_done")?;
        if !state.eager {
            return Ok(false);
        }
        if let Some(Some(clock)) = state.events.get(&event.0).cloned() {
            state.host.join(&clock);
        }
        Ok(true)
    }

    fn wait_here(&self, event: Event) -> DriverResult<()> {
        let mut state = self.state();
        state.called("wait_here")?;
        if let Some(Some(clock)) = state.events.get(&event.0).cloned() {
            state.host.join(&clock);
        }
        Ok(())
    }

    fn elapsed(&self, _: Event, _: Event) -> DriverResult<f32> {
        Ok(1.0)
    }

    fn synchronize(&self, stream: Stream) -> DriverResult<()> {
        let mut state = self.state();
        state.called("synchronize")?;
        state.no_capture("synchronize", stream);
        if let Some(clock) = state.queues.get(&stream.0).map(|queue| queue.clock.clone()) {
            state.host.join(&clock);
        }
        Ok(())
    }

    unsafe fn to_device(&self, to: DevicePtr, from: *const u8, bytes: usize, stream: Stream) -> DriverResult<()> {
        self.state().copy("to_device", to, from as u64, bytes, stream)
    }

    unsafe fn to_host(&self, to: *mut u8, from: DevicePtr, bytes: usize, stream: Stream) -> DriverResult<()> {
        self.state().copy("to_host", to as u64, from, bytes, stream)
    }

    unsafe fn on_device(&self, to: DevicePtr, from: DevicePtr, bytes: usize, stream: Stream) -> DriverResult<()> {
        self.state().copy("on_device", to, from, bytes, stream)
    }

    unsafe fn fill(&self, at: DevicePtr, value: u8, bytes: usize, stream: Stream) -> DriverResult<()> {
        let mut state = self.state();
        state.called("fill")?;
        let touches = vec![Touch { at, len: bytes, access: Access::Write }];
        state.queue(stream, Recorded { what: "fill".into(), touches, action: Action::Fill { at, value, bytes } });
        Ok(())
    }

    /// As the shim of the kernels reads it.
    fn row_map(&self, map: RowMap) -> DriverResult<[u8; MAP_BYTES]> {
        let mut state = self.state();
        state.called("row_map")?;
        let bytes = 2 * map.rows * u64::from(map.row_elements);
        state.check_range("a map", &Touch { at: map.at, len: bytes as usize, access: Access::Read });
        let mut made = [0; MAP_BYTES];
        let words = [map.at, map.rows, u64::from(map.row_elements), u64::from(map.box_rows)];
        for (to, word) in made.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        Ok(made)
    }

    fn load(&self, image: &[u8]) -> DriverResult<Module> {
        let mut state = self.state();
        state.called("load")?;
        let id = state.id();
        state.modules.insert(id, Emulated::load(image));
        Ok(Module(id))
    }

    unsafe fn unload(&self, module: Module) -> DriverResult<()> {
        let mut state = self.state();
        if state.modules.remove(&module.0).is_none() {
            state.violation("a module was unloaded twice".into());
        }
        Ok(())
    }

    fn function(&self, module: Module, name: &str) -> DriverResult<Function> {
        let mut state = self.state();
        if let Some(Some(emulated)) = state.modules.get(&module.0)
            && !emulated.has(name)
        {
            return Err(error("function", 500, &format!("no kernel {name}")));
        }
        let id = state.id();
        state.functions.insert(id, (module.0, name.to_owned()));
        Ok(Function(id))
    }

    unsafe fn launch(&self, function: Function, launch: &Launch<'_>, stream: Stream) -> DriverResult<()> {
        let mut touches = Vec::new();
        (launch.touches)(&mut |touch| touches.push(touch));
        touches.extend(launch.args.iter().filter_map(|arg| match arg {
            Arg::Memory(touch) => Some(*touch),
            _ => None,
        }));
        let mut state = self.state();
        state.called("launch")?;
        let what =
            state.functions.get(&function.0).map_or("a kernel that is not there".into(), |(_, name)| name.clone());
        let action = Action::Launch {
            function: function.0,
            grid: launch.grid,
            block: launch.block,
            shared: launch.shared,
            args: launch.args.to_vec(),
        };
        state.queue(stream, Recorded { what, touches, action });
        Ok(())
    }

    fn begin_capture(&self, stream: Stream) -> DriverResult<()> {
        let mut state = self.state();
        state.called("begin_capture")?;
        state.no_capture("begin_capture", stream);
        if let Some(queue) = state.queues.get_mut(&stream.0) {
            queue.capture = Some((std::thread::current().id(), Vec::new()));
        }
        Ok(())
    }

    fn end_capture(&self, stream: Stream) -> DriverResult<Graph> {
        let mut state = self.state();
        state.called("end_capture")?;
        let recorded = state.queues.get_mut(&stream.0).and_then(|queue| queue.capture.take());
        let Some((_, recorded)) = recorded else {
            state.violation("the end of a recording that never began".into());
            return Err(error("end_capture", 400, "no recording"));
        };
        let id = state.id();
        state.graphs.insert(id, recorded);
        Ok(Graph(id))
    }

    unsafe fn launch_graph(&self, graph: Graph, stream: Stream) -> DriverResult<()> {
        let mut state = self.state();
        state.called("launch_graph")?;
        match state.graphs.get(&graph.0).cloned() {
            Some(recorded) => recorded.iter().for_each(|operation| state.run(stream, operation)),
            None => state.violation("a graph that is not there was launched".into()),
        }
        Ok(())
    }

    fn wants_touches(&self) -> bool {
        true
    }

    unsafe fn launch_graph_touching(&self, graph: Graph, touches: &[Vec<Touch>], stream: Stream) -> DriverResult<()> {
        let mut state = self.state();
        state.called("launch_graph")?;
        let Some(recorded) = state.graphs.get(&graph.0).cloned() else {
            state.violation("a graph that is not there was launched".into());
            return Ok(());
        };
        if recorded.len() != touches.len() {
            state.violation(format!("a graph of {} kernels is to touch what {} do", recorded.len(), touches.len()));
        }
        for (operation, touches) in recorded.into_iter().zip(touches) {
            state.run(stream, &Recorded { touches: touches.clone(), ..operation });
        }
        Ok(())
    }

    unsafe fn destroy_graph(&self, graph: Graph) -> DriverResult<()> {
        let mut state = self.state();
        state.called("destroy_graph")?;
        if state.graphs.remove(&graph.0).is_none() {
            state.violation("a graph was destroyed twice".into());
        }
        Ok(())
    }

    fn host_access(&self, touch: Touch) {
        let mut state = self.state();
        let what = "this process";
        if state.check_range(what, &touch).is_none() {
            return;
        }
        let writes = touch.access == Access::Write;
        let (start, end) = (touch.at, touch.at + touch.len as u64);
        let races: Vec<String> = state
            .uses
            .unordered(start, end, writes, &state.host)
            .iter()
            .map(|known| {
                format!("{what} {} what {} may still use", if writes { "writes" } else { "reads" }, known.what)
            })
            .collect();
        state.violations.extend(races);
    }
}
