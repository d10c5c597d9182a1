//! Queue pairs.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvdock_rdma::verbs::{
    self, ProtectionDomain, QueueAttributes, QueueInit, QueuePair, SendRequest, Sge, WorkCompletion,
};
use libc::c_int;
use parking_lot::{Condvar, Mutex, RwLock};

use crate::objects::{self, Completions};
use crate::{devices, fail, faults, wire};

/// A request.
#[derive(Debug)]
pub struct Work {
    number: u64,
    pub opcode: c_int,
    pub pieces: Vec<Sge>,
    /// Its bytes, where they were taken when it was posted.
    pub inline: Option<Vec<u8>>,
    pub address: u64,
    pub key: u32,
}

/// A queue pair.
#[derive(Debug)]
pub struct Pair {
    pub number: u32,
    pub domain: usize,
    state: Mutex<State>,
    changed: Condvar,
    completions: Arc<Completions>,
    depth: usize,
    /// Requests whose completions have not been taken.
    open: AtomicUsize,
    pub stop: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    state: c_int,
    peer: u32,
    work: VecDeque<Work>,
}

type Pairs = HashMap<u32, Arc<Pair>>;
static PAIRS: RwLock<Option<Pairs>> = RwLock::new(None);

/// A queue pair of this process.
pub fn find(number: u32) -> Option<Arc<Pair>> {
    PAIRS.read().as_ref()?.get(&number).cloned()
}

/// A completion of a queue pair was taken: there is room for another request.
pub fn taken(number: u32) {
    if let Some(pair) = find(number) {
        pair.open.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Pair {
    /// Whether it serves a peer's queue pair.
    pub fn serves(&self, peer: u32) -> bool {
        let state = self.state.lock();
        matches!(state.state, verbs::STATE_RTR | verbs::STATE_RTS) && state.peer == peer
    }

    /// Whether it has been told to stop what it does.
    pub fn is_over(&self) -> bool {
        self.stop.load(Ordering::Acquire) || self.state.lock().state != verbs::STATE_RTS
    }

    pub fn fail(&self) {
        self.state.lock().state = verbs::STATE_ERROR;
        self.changed.notify_all();
    }

    fn end(&self, work: &Work, status: c_int) {
        let opcode = if work.opcode == verbs::WR_READ { 2 } else { 1 };
        let length = work.pieces.iter().map(|piece| piece.length).sum();
        self.completions.push(WorkCompletion {
            wr_id: work.number,
            status,
            opcode,
            byte_len: length,
            qp_num: self.number,
            ..WorkCompletion::default()
        });
    }

    /// What the card does: one request after another.
    fn run(&self) {
        let mut line = None;
        while !self.stop.load(Ordering::Acquire) {
            let (work, peer) = {
                let mut state = self.state.lock();
                if state.work.is_empty() {
                    self.changed.wait_for(&mut state, Duration::from_millis(100));
                    continue;
                }
                if state.state == verbs::STATE_ERROR {
                    if faults::is("unflushed") {
                        self.changed.wait_for(&mut state, Duration::from_millis(10));
                        continue;
                    }
                    let flushed = std::mem::take(&mut state.work);
                    drop(state);
                    flushed.iter().for_each(|work| self.end(work, verbs::WC_FLUSHED));
                    continue;
                }
                if faults::is("silent") || faults::is("unflushed") {
                    self.changed.wait_for(&mut state, Duration::from_millis(10));
                    continue;
                }
                match state.work.pop_front() {
                    Some(work) => (work, state.peer),
                    None => continue,
                }
            };
            let status = match faults::once("complete ").or_else(|| faults::number("always ")) {
                Some(status) => status,
                None => wire::execute(self, &work, peer, &mut line),
            };
            if status != verbs::WC_SUCCESS {
                self.fail();
            }
            self.end(&work, status);
        }
    }
}

#[repr(C)]
struct Made {
    base: QueuePair,
    pair: Arc<Pair>,
    thread: Option<JoinHandle<()>>,
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_create_qp(domain: *mut ProtectionDomain, init: *mut QueueInit) -> *mut QueuePair {
    // SAFETY: the caller's structures.
    let (init, context) = unsafe { (&*init, (*domain).context) };
    let cap = &init.cap;
    if cap.max_send_wr > 1024 || cap.max_send_sge > 16 || cap.max_inline_data > 256 || init.qp_type != verbs::TYPE_RC {
        return fail(libc::EINVAL);
    }
    if faults::is("queue") {
        return fail(libc::ENOMEM);
    }
    let Some(number) = wire::take_number() else { return fail(libc::EAGAIN) };
    // SAFETY: a queue that `ibv_create_cq` made.
    let completions = unsafe { objects::completions(init.send_cq) };
    let pair = Arc::new(Pair {
        number,
        domain: domain as usize,
        state: Mutex::default(),
        changed: Condvar::new(),
        completions,
        depth: cap.max_send_wr as usize,
        open: AtomicUsize::new(0),
        stop: AtomicBool::new(false),
    });
    PAIRS.write().get_or_insert_default().insert(number, pair.clone());
    let running = pair.clone();
    let Ok(thread) = std::thread::Builder::new().name("stand-in".to_owned()).spawn(move || running.run()) else {
        return fail(libc::EAGAIN);
    };
    // SAFETY: numbers and pointers, for which nought is a value.
    let mut base: QueuePair = unsafe { std::mem::zeroed() };
    (base.context, base.pd, base.qp_context) = (context, domain, init.qp_context);
    (base.send_cq, base.recv_cq) = (init.send_cq, init.recv_cq);
    (base.qp_num, base.qp_type) = (number, init.qp_type);
    Box::into_raw(Box::new(Made { base, pair, thread: Some(thread) })).cast()
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_qp(queue: *mut QueuePair, attributes: *mut QueueAttributes, mask: c_int) -> c_int {
    // SAFETY: a queue pair that `ibv_create_qp` made, and the caller's structure.
    let (made, attributes) = unsafe { (&mut *queue.cast::<Made>(), &*attributes) };
    let mut state = made.pair.state.lock();
    let needed = |bits: c_int| if mask & bits == bits { 0 } else { libc::EINVAL };
    let result = match (state.state, attributes.qp_state) {
        (_, verbs::STATE_RESET | verbs::STATE_ERROR) => 0,
        (verbs::STATE_RESET | verbs::STATE_INIT, verbs::STATE_INIT) if attributes.port_num == 1 => {
            needed(verbs::QP_PKEY_INDEX | verbs::QP_PORT | verbs::QP_ACCESS_FLAGS)
        }
        (verbs::STATE_INIT, verbs::STATE_RTR) => {
            // SAFETY: the queue pair's device is open.
            let device = unsafe { (*(*queue).context).device };
            let grh = &attributes.ah_attr.grh;
            let [high, low] = grh.dgid.map(u64::to_ne_bytes);
            let mut gid = [0; 16];
            gid[..8].copy_from_slice(&high);
            gid[8..].copy_from_slice(&low);
            if faults::is("connect")
                || attributes.ah_attr.is_global == 0
                || !devices::reaches(device, grh.sgid_index, &gid)
            {
                libc::ENETUNREACH
            } else {
                state.peer = attributes.dest_qp_num;
                let bits = verbs::QP_AV | verbs::QP_PATH_MTU | verbs::QP_DEST_QPN | verbs::QP_RQ_PSN;
                needed(bits | verbs::QP_MAX_DEST_RD_ATOMIC | verbs::QP_MIN_RNR_TIMER)
            }
        }
        (verbs::STATE_RTR, verbs::STATE_RTS) => {
            let bits = verbs::QP_TIMEOUT | verbs::QP_RETRY_CNT | verbs::QP_RNR_RETRY | verbs::QP_SQ_PSN;
            needed(bits | verbs::QP_MAX_QP_RD_ATOMIC)
        }
        _ => libc::EINVAL,
    };
    if result == 0 {
        state.state = attributes.qp_state;
        made.base.state = attributes.qp_state;
        made.pair.changed.notify_all();
    }
    result
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_qp(
    queue: *mut QueuePair,
    attributes: *mut QueueAttributes,
    _mask: c_int,
    _init: *mut QueueInit,
) -> c_int {
    // SAFETY: a queue pair that `ibv_create_qp` made, and the caller's structure.
    let (made, attributes) = unsafe { (&*queue.cast::<Made>(), &mut *attributes) };
    attributes.qp_state = made.pair.state.lock().state;
    0
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_destroy_qp(queue: *mut QueuePair) -> c_int {
    // SAFETY: `ibv_create_qp` made it.
    let mut made = unsafe { Box::from_raw(queue.cast::<Made>()) };
    made.pair.stop.store(true, Ordering::Release);
    made.pair.fail();
    if let Some(pairs) = PAIRS.write().as_mut() {
        pairs.remove(&made.pair.number);
    }
    wire::give_number(made.pair.number);
    if let Some(thread) = made.thread.take() {
        // Afterwards it touches no memory.
        let _ = thread.join();
    }
    0
}

/// # Safety
/// As in C.
pub unsafe extern "C" fn post_send(
    queue: *mut QueuePair,
    request: *mut SendRequest,
    bad: *mut *mut SendRequest,
) -> c_int {
    // SAFETY: a queue pair that `ibv_create_qp` made.
    let pair = unsafe { &(*queue.cast::<Made>()).pair };
    let mut next = request;
    while !next.is_null() {
        // SAFETY: the caller's list.
        let result = unsafe { post_one(pair, &*next) };
        if result != 0 {
            // SAFETY: the caller's place.
            unsafe { *bad = next };
            return result;
        }
        // SAFETY: as above.
        next = unsafe { (*next).next };
    }
    0
}

/// # Safety
/// The request's pieces are there.
unsafe fn post_one(pair: &Pair, request: &SendRequest) -> c_int {
    let mut state = pair.state.lock();
    if !matches!(state.state, verbs::STATE_RTS | verbs::STATE_ERROR)
        || !matches!(request.opcode, verbs::WR_READ | verbs::WR_WRITE)
    {
        return libc::EINVAL;
    }
    if pair.open.load(Ordering::Acquire) >= pair.depth {
        return libc::ENOMEM;
    }
    // SAFETY: the caller's list has so many pieces.
    let pieces = unsafe { std::slice::from_raw_parts(request.sg_list, request.num_sge.max(0) as usize) }.to_vec();
    let inline = (request.send_flags & verbs::SEND_INLINE != 0).then(|| {
        // SAFETY: the caller's memory, which may be read now.
        let bytes = |piece: &Sge| unsafe { std::slice::from_raw_parts(piece.addr as *const u8, piece.length as usize) };
        pieces.iter().flat_map(bytes).copied().collect()
    });
    pair.open.fetch_add(1, Ordering::AcqRel);
    state.work.push_back(Work {
        number: request.wr_id,
        opcode: request.opcode,
        pieces,
        inline,
        address: request.remote_addr,
        key: request.rkey,
    });
    pair.changed.notify_all();
    0
}
