//! Protection domains, regions, completion channels and queues.

use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use kvdock_rdma::verbs::{
    self, CompletionChannel, CompletionQueue, Context, MemoryRegion, ProtectionDomain, WorkCompletion,
};
use libc::{c_int, c_uint, c_void, size_t};
use parking_lot::{Mutex, RwLock};

use crate::{devices, fail, faults, pair};

/// Registered memory.
#[derive(Debug, Clone, Copy)]
pub struct Region {
    pub domain: usize,
    pub start: usize,
    pub len: usize,
    /// First address, as peers name it.
    pub address: u64,
    pub access: c_uint,
}

/// All regions, by their key. It is locked while bytes are moved, so that none goes under them.
pub static REGIONS: RwLock<Option<HashMap<u32, Region>>> = RwLock::new(None);
static NEXT: AtomicU32 = AtomicU32::new(0x1001);

#[unsafe(no_mangle)]
extern "C" fn ibv_alloc_pd(context: *mut Context) -> *mut ProtectionDomain {
    Box::into_raw(Box::new(ProtectionDomain { context, handle: NEXT.fetch_add(1, Ordering::Relaxed) }))
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dealloc_pd(domain: *mut ProtectionDomain) -> c_int {
    let in_use = |region: &Region| region.domain == domain as usize;
    if REGIONS.read().as_ref().is_some_and(|regions| regions.values().any(in_use)) {
        return libc::EBUSY;
    }
    // SAFETY: `ibv_alloc_pd` made it.
    drop(unsafe { Box::from_raw(domain) });
    0
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr_iova2(
    domain: *mut ProtectionDomain,
    start: *mut c_void,
    length: size_t,
    address: u64,
    access: c_uint,
) -> *mut MemoryRegion {
    if faults::is("registration") {
        return fail(libc::ENOMEM);
    }
    let most = std::env::var("KVDOCK_STAND_IN_MAX_MR").ok().and_then(|text| text.parse::<usize>().ok());
    let remote = access & (verbs::ACCESS_REMOTE_WRITE | verbs::ACCESS_REMOTE_ATOMIC) != 0;
    let is_wrong = length == 0
        || most.is_some_and(|most| length > most)
        || (remote && access & verbs::ACCESS_LOCAL_WRITE == 0)
        || (start as u64 ^ address) & 4095 != 0;
    if is_wrong {
        return fail(libc::EINVAL);
    }
    let key = NEXT.fetch_add(1, Ordering::Relaxed);
    let region = Region { domain: domain as usize, start: start as usize, len: length, address, access };
    REGIONS.write().get_or_insert_default().insert(key, region);
    // SAFETY: a domain that `ibv_alloc_pd` made.
    let context = unsafe { (*domain).context };
    Box::into_raw(Box::new(MemoryRegion {
        context,
        pd: domain,
        addr: start,
        length,
        handle: key,
        lkey: key,
        rkey: key,
    }))
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_reg_mr(
    domain: *mut ProtectionDomain,
    start: *mut c_void,
    length: size_t,
    access: c_int,
) -> *mut MemoryRegion {
    // SAFETY: the caller's promise.
    unsafe { ibv_reg_mr_iova2(domain, start, length, start as u64, access as c_uint) }
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_dereg_mr(region: *mut MemoryRegion) -> c_int {
    // SAFETY: a region that registering made.
    let region = unsafe { Box::from_raw(region) };
    if let Some(regions) = REGIONS.write().as_mut() {
        regions.remove(&region.lkey);
    }
    0
}

#[repr(C)]
struct Channel {
    base: CompletionChannel,
    writing: RawFd,
}

#[unsafe(no_mangle)]
extern "C" fn ibv_create_comp_channel(context: *mut Context) -> *mut CompletionChannel {
    let Ok((fd, writing)) = devices::pipe() else { return fail(libc::EMFILE) };
    Box::into_raw(Box::new(Channel { base: CompletionChannel { context, fd, refcnt: 0 }, writing })).cast()
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut CompletionChannel) -> c_int {
    // SAFETY: `ibv_create_comp_channel` made it, and both ends are its own.
    unsafe {
        let channel = Box::from_raw(channel.cast::<Channel>());
        libc::close(channel.base.fd);
        libc::close(channel.writing);
    }
    0
}

/// The entries of a completion queue.
#[derive(Debug)]
pub struct Completions {
    entries: Mutex<VecDeque<WorkCompletion>>,
    armed: AtomicBool,
    most: usize,
    /// Where to tell of a completion, and the queue's address.
    tell: Mutex<(RawFd, usize)>,
}

impl Completions {
    /// A request has ended.
    pub fn push(&self, completion: WorkCompletion) {
        let mut entries = self.entries.lock();
        if entries.len() >= self.most {
            // On a card the queue would be lost, silently for who does not ask.
            eprintln!("stand-in: a completion queue of {} entries is overrun", self.most);
            std::process::abort();
        }
        entries.push_back(completion);
        if self.armed.swap(false, Ordering::AcqRel) {
            let (fd, queue) = *self.tell.lock();
            // SAFETY: the bytes are the number's; the channel outlives its queues.
            unsafe { libc::write(fd, (&raw const queue).cast(), size_of::<usize>()) };
        }
    }
}

#[repr(C)]
struct Queue {
    base: CompletionQueue,
    completions: Arc<Completions>,
}

/// The entries of a queue.
///
/// # Safety
/// `ibv_create_cq` made it.
pub unsafe fn completions(queue: *mut CompletionQueue) -> Arc<Completions> {
    // SAFETY: the caller's promise.
    unsafe { (*queue.cast::<Queue>()).completions.clone() }
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_cq(
    context: *mut Context,
    entries: c_int,
    cq_context: *mut c_void,
    channel: *mut CompletionChannel,
    _vector: c_int,
) -> *mut CompletionQueue {
    // SAFETY: numbers and pointers, for which nought is a value.
    let mut base: CompletionQueue = unsafe { std::mem::zeroed() };
    (base.context, base.channel, base.cq_context, base.cqe) = (context, channel, cq_context, entries);
    // SAFETY: null, or a channel that `ibv_create_comp_channel` made.
    let fd = if channel.is_null() { -1 } else { unsafe { (*channel.cast::<Channel>()).writing } };
    let completions = Arc::new(Completions {
        entries: Mutex::default(),
        armed: AtomicBool::new(false),
        most: entries.max(1) as usize,
        tell: Mutex::new((fd, 0)),
    });
    let queue = Box::into_raw(Box::new(Queue { base, completions: completions.clone() }));
    completions.tell.lock().1 = queue as usize;
    queue.cast()
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_cq(queue: *mut CompletionQueue) -> c_int {
    // SAFETY: `ibv_create_cq` made it.
    let used = unsafe { Arc::strong_count(&(*queue.cast::<Queue>()).completions) };
    if used > 1 {
        return libc::EBUSY;
    }
    // SAFETY: as above.
    drop(unsafe { Box::from_raw(queue.cast::<Queue>()) });
    0
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut CompletionChannel,
    queue: *mut *mut CompletionQueue,
    context: *mut *mut c_void,
) -> c_int {
    let mut address = 0usize;
    // SAFETY: a channel; there is room for a number.
    let read = unsafe { libc::read((*channel).fd, (&raw mut address).cast(), size_of::<usize>()) };
    if read != size_of::<usize>() as isize {
        return -1;
    }
    // SAFETY: the caller's places; the queue lives while it has events.
    unsafe {
        *queue = address as *mut CompletionQueue;
        *context = (**queue).cq_context;
    }
    0
}

#[unsafe(no_mangle)]
extern "C" fn ibv_ack_cq_events(_queue: *mut CompletionQueue, _count: c_uint) {}

/// # Safety
/// As in C.
pub unsafe extern "C" fn poll_cq(queue: *mut CompletionQueue, count: c_int, place: *mut WorkCompletion) -> c_int {
    // SAFETY: a queue that `ibv_create_cq` made.
    let completions = unsafe { completions(queue) };
    let mut entries = completions.entries.lock();
    let mut taken = 0;
    while taken < count {
        let Some(entry) = entries.pop_front() else { break };
        pair::taken(entry.qp_num);
        // SAFETY: the caller has room for so many.
        unsafe { place.add(taken as usize).write(entry) };
        taken += 1;
    }
    taken
}

/// # Safety
/// As in C.
pub unsafe extern "C" fn req_notify_cq(queue: *mut CompletionQueue, _solicited: c_int) -> c_int {
    // SAFETY: a queue that `ibv_create_cq` made.
    unsafe { completions(queue) }.armed.store(true, Ordering::Release);
    0
}
