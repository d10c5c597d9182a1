//! Completions: requests under way, and the thread that takes their ends from a device.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use libc::c_int;
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::device::Device;
use crate::error::RdmaError;
use crate::queue::Queue;
use crate::verbs::{self, AsyncEvent, WorkCompletion};

/// Completions that are taken at a time.
const TAKEN: usize = 64;
/// How long the thread sleeps at most; a device that loses an event is looked at all the same.
const LOOK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// The ends of a call's requests.
#[derive(Debug, Default)]
pub struct Batch {
    ended: Mutex<Vec<(u32, c_int)>>,
    wake: Condvar,
}

impl Batch {
    /// A request has ended.
    pub fn push(&self, slice: u32, status: c_int) {
        self.ended.lock().push((slice, status));
        self.wake.notify_all();
    }

    /// What has ended; waits for the first for some time.
    pub fn take(&self, time: Duration) -> Vec<(u32, c_int)> {
        let mut ended = self.ended.lock();
        if ended.is_empty() {
            self.wake.wait_for(&mut ended, time);
        }
        std::mem::take(&mut *ended)
    }
}

/// A request under way.
#[derive(Debug)]
pub struct Entry {
    pub batch: Arc<Batch>,
    pub slice: u32,
    /// Lives as long as requests of it are under way.
    pub queue: Arc<Queue>,
}

/// Requests under way on a device, by the numbers that their completions bear. A number is used once, so a completion that comes twice or
/// late means nothing.
#[derive(Debug, Default)]
pub struct Slab {
    slots: Vec<(u32, Option<Entry>)>,
    free: Vec<u32>,
}

impl Slab {
    pub fn insert(&mut self, entry: Entry) -> u64 {
        let at = self.free.pop().unwrap_or_else(|| {
            self.slots.push((0, None));
            (self.slots.len() - 1) as u32
        });
        let Some((turn, slot)) = self.slots.get_mut(at as usize) else { return u64::MAX };
        *slot = Some(entry);
        u64::from(*turn) << 32 | u64::from(at)
    }

    pub fn remove(&mut self, number: u64) -> Option<Entry> {
        let at = number as u32;
        let (turn, slot) = self.slots.get_mut(at as usize)?;
        if *turn != (number >> 32) as u32 {
            return None;
        }
        let entry = slot.take()?;
        *turn = turn.wrapping_add(1);
        self.free.push(at);
        Some(entry)
    }

    /// Takes all requests of a queue pair that is no more.
    pub fn remove_of(&mut self, queue: &Queue) -> Vec<Entry> {
        let mine = |slot: &Option<Entry>| slot.as_ref().is_some_and(|entry| std::ptr::eq(&*entry.queue, queue));
        let numbers: Vec<u64> = (0u64..)
            .zip(&self.slots)
            .filter(|(_, (_, slot))| mine(slot))
            .map(|(at, (turn, _))| u64::from(*turn) << 32 | at)
            .collect();
        numbers.into_iter().filter_map(|number| self.remove(number)).collect()
    }
}

/// Ends a request.
pub fn finish(device: &Device, entry: Entry, status: c_int) {
    device.give_room();
    entry.queue.ended();
    entry.batch.push(entry.slice, status);
}

/// The thread that takes completions and events of one device.
#[derive(Debug)]
pub struct Poller {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Poller {
    pub fn start(device: Arc<Device>) -> Result<Poller, RdmaError> {
        let name = device.info.name.clone();
        let fail =
            |what, error: std::io::Error| RdmaError::Object { device: name.clone(), what, why: error.to_string() };
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = Arc::new(eventfd(0, flags).map_err(|error| fail("no event descriptor", error.into()))?);
        // SAFETY: the channel and the context are open as long as the device, which the thread holds.
        let fds = unsafe { [(*device.channel).fd, (*device.context).async_fd] };
        for fd in fds {
            // SAFETY: as above.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            let set = fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
            set.map_err(|error| fail("its events can't be waited for", error.into()))?;
        }
        let waiting = stop.clone();
        let thread = std::thread::Builder::new()
            .name(format!("kvdock-{name}"))
            .spawn(move || run(&device, fds, &waiting))
            .map_err(|error| fail("no thread for completions", error))?;
        Ok(Poller { stop, thread: Some(thread) })
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        // A full counter wakes as well.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
    }
}

fn run(device: &Device, [channel, events]: [c_int; 2], stop: &OwnedFd) {
    // SAFETY: both are open as long as the device.
    let (channel, events) = unsafe { (BorrowedFd::borrow_raw(channel), BorrowedFd::borrow_raw(events)) };
    loop {
        // Asked for before looking, so that nothing slips through between.
        request_event(device);
        drain(device);
        let mut fds = [
            PollFd::from_borrowed_fd(channel, PollFlags::IN),
            PollFd::from_borrowed_fd(events, PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
        ];
        // An interrupted wait is followed by a look, as every other.
        let _ = poll(&mut fds, Some(&LOOK));
        let [of_channel, of_device, of_stop] = fds.map(|fd| !fd.revents().is_empty());
        if of_stop {
            return;
        }
        if of_channel {
            take_channel_event(device);
        }
        if of_device {
            take_device_event(device);
        }
    }
}

fn request_event(device: &Device) {
    // SAFETY: the completion queue lives as long as the device; its context has the driver's functions.
    unsafe {
        if let Some(request) = (*(*device.completions).context).ops.req_notify_cq {
            request(device.completions, 0);
        }
    }
}

fn take_channel_event(device: &Device) {
    let (mut queue, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the channel lives as long as the device; it does not block.
    if unsafe { (device.verbs.get_cq_event)(device.channel, &raw mut queue, &raw mut context) } == 0 {
        // SAFETY: the event is of this queue.
        unsafe { (device.verbs.ack_cq_events)(queue, 1) };
    }
}

fn take_device_event(device: &Device) {
    let mut event = AsyncEvent::default();
    // SAFETY: the device is open; its descriptor does not block.
    if unsafe { (device.verbs.get_async_event)(device.context, &raw mut event) } != 0 {
        return;
    }
    match event.event_type {
        verbs::EVENT_DEVICE_FATAL => device.is_up.store(false, Ordering::Release),
        verbs::EVENT_PORT_ERROR if event.element == u64::from(device.port) => {
            device.is_up.store(false, Ordering::Release);
        }
        verbs::EVENT_PORT_ACTIVE if event.element == u64::from(device.port) => {
            device.is_up.store(true, Ordering::Release);
        }
        // What befalls a queue pair shows in the next completion of it.
        _ => {}
    }
    // SAFETY: the event was just taken.
    unsafe { (device.verbs.ack_async_event)(&raw mut event) };
}

fn drain(device: &Device) {
    let mut taken = [WorkCompletion::default(); TAKEN];
    loop {
        // SAFETY: the completion queue lives as long as the device, and there is room for as many entries as are asked for.
        let count = unsafe {
            match (*(*device.completions).context).ops.poll_cq {
                Some(poll) => poll(device.completions, TAKEN as c_int, taken.as_mut_ptr()),
                None => 0,
            }
        };
        // A queue that fails gives no more completions; calls end by their time.
        let Some(found) = usize::try_from(count).ok().and_then(|count| taken.get(..count)) else { return };
        for completion in found {
            let entry = device.slab.lock().remove(completion.wr_id);
            if let Some(entry) = entry {
                finish(device, entry, completion.status);
            }
        }
        if found.len() < TAKEN {
            return;
        }
    }
}
