//! A queue pair: made, connected, given work, ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libc::c_int;
use parking_lot::Mutex;

use crate::completion::{Batch, Entry, finish};
use crate::config::Config;
use crate::device::Device;
use crate::library::system_error;
use crate::transfer::Operation;
use crate::verbs::{self, Address, QueueAttributes, QueueCapacity, QueueInit, Route, SendRequest, Sge};

/// Pieces of a request that are asked for.
const PIECES: u32 = 4;
/// Bytes of a request that are taken when it is posted.
const INLINE: u32 = 64;
/// Reads at a time.
const READS: c_int = 16;
/// Time between attempts to end a queue pair.
const AGAIN: Duration = Duration::from_millis(100);

/// The other end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remote {
    pub number: u32,
    pub lid: u16,
    pub gid: [u8; 16],
}

/// How giving work ended.
#[derive(Debug)]
pub enum Posted {
    /// It is under way.
    Yes,
    /// There is no room now.
    Full,
    /// The queue pair does not take it.
    Failed(String),
}

/// One request.
#[derive(Debug)]
pub struct Work<'a> {
    pub operation: Operation,
    pub pieces: &'a mut [Sge],
    pub address: u64,
    pub key: u32,
    pub inline: bool,
}

/// A queue pair.
#[derive(Debug)]
pub struct Queue {
    device: Arc<Device>,
    /// Null when it is no more.
    pair: Mutex<Pair>,
    pub number: u32,
    under_way: AtomicU32,
    depth: u32,
    pub pieces: u32,
    pub inline: u32,
}

#[derive(Debug)]
struct Pair(*mut verbs::QueuePair);

// SAFETY: the library's objects may be used by any thread; this one is behind a lock.
unsafe impl Send for Pair {}

impl Queue {
    pub fn new(device: &Arc<Device>, config: &Config) -> Result<Queue, String> {
        let limits = &device.limits;
        let at_most = |wished: u32, most: c_int| u32::try_from(most).unwrap_or(0).clamp(1, wished.max(1));
        let depth = at_most(config.depth, limits.max_qp_wr);
        let pieces = at_most(PIECES, limits.max_sge);
        let mut init = QueueInit {
            qp_context: std::ptr::null_mut(),
            send_cq: device.completions,
            recv_cq: device.completions,
            srq: std::ptr::null_mut(),
            cap: QueueCapacity {
                max_send_wr: depth,
                max_recv_wr: depth,
                max_send_sge: pieces,
                max_recv_sge: 1,
                max_inline_data: INLINE,
            },
            qp_type: verbs::TYPE_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and completion queue live as long as the device, which the queue holds.
        let mut pair = unsafe { (device.verbs.create_qp)(device.domain, &raw mut init) };
        if pair.is_null() {
            // Some devices take nothing inline.
            init.cap.max_inline_data = 0;
            // SAFETY: as above.
            pair = unsafe { (device.verbs.create_qp)(device.domain, &raw mut init) };
        }
        if pair.is_null() {
            let error = std::io::Error::last_os_error();
            return Err(format!("RDMA device {}: no queue pair can be made: {error}", device.info.name));
        }
        // SAFETY: it was just made.
        let number = unsafe { (*pair).qp_num };
        Ok(Queue {
            device: device.clone(),
            pair: Mutex::new(Pair(pair)),
            number,
            under_way: AtomicU32::new(0),
            depth,
            pieces,
            inline: init.cap.max_inline_data,
        })
    }

    /// Connects it to its other end: it can then send, and serve.
    pub fn connect(&self, remote: &Remote, config: &Config) -> Result<(), String> {
        let device = &self.device;
        let most = |limit: c_int| u8::try_from(limit.clamp(1, READS)).unwrap_or(1);
        let initial = QueueAttributes {
            qp_state: verbs::STATE_INIT,
            qp_access_flags: verbs::ACCESS_LOCAL_WRITE
                | verbs::ACCESS_REMOTE_READ
                | verbs::ACCESS_REMOTE_WRITE
                | verbs::ACCESS_REMOTE_ATOMIC,
            pkey_index: 0,
            port_num: device.port,
            ..QueueAttributes::default()
        };
        let mask = verbs::QP_STATE | verbs::QP_PKEY_INDEX | verbs::QP_PORT | verbs::QP_ACCESS_FLAGS;
        self.modify(initial, mask, "made ready", remote)?;
        let (high, low) = remote.gid.split_at(8);
        let number = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
        let to_receive = QueueAttributes {
            qp_state: verbs::STATE_RTR,
            path_mtu: device.mtu,
            dest_qp_num: remote.number,
            rq_psn: 0,
            max_dest_rd_atomic: most(device.limits.max_qp_rd_atom),
            min_rnr_timer: 12,
            ah_attr: Address {
                grh: Route {
                    dgid: [number(high), number(low)],
                    flow_label: 0,
                    sgid_index: device.gid_index,
                    hop_limit: 16,
                    traffic_class: config.traffic_class,
                },
                dlid: remote.lid,
                sl: config.service_level,
                is_global: 1,
                port_num: device.port,
                ..Address::default()
            },
            ..QueueAttributes::default()
        };
        let mask = verbs::QP_STATE
            | verbs::QP_AV
            | verbs::QP_PATH_MTU
            | verbs::QP_DEST_QPN
            | verbs::QP_RQ_PSN
            | verbs::QP_MAX_DEST_RD_ATOMIC
            | verbs::QP_MIN_RNR_TIMER;
        self.modify(to_receive, mask, "connected", remote)?;
        let to_send = QueueAttributes {
            qp_state: verbs::STATE_RTS,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            sq_psn: 0,
            max_rd_atomic: most(device.limits.max_qp_init_rd_atom),
            ..QueueAttributes::default()
        };
        let mask = verbs::QP_STATE
            | verbs::QP_TIMEOUT
            | verbs::QP_RETRY_CNT
            | verbs::QP_RNR_RETRY
            | verbs::QP_SQ_PSN
            | verbs::QP_MAX_QP_RD_ATOMIC;
        self.modify(to_send, mask, "opened", remote)
    }

    fn modify(&self, mut attributes: QueueAttributes, mask: c_int, what: &str, remote: &Remote) -> Result<(), String> {
        let pair = self.pair.lock();
        if pair.0.is_null() {
            return Err("the queue pair has ended".to_owned());
        }
        // SAFETY: the pair lives while it is not null.
        let result = unsafe { (self.device.verbs.modify_qp)(pair.0, &raw mut attributes, mask) };
        if result == 0 {
            return Ok(());
        }
        Err(format!(
            "RDMA device {}: a queue pair can't be {what}: {} (own GID {} at place {}, peer's GID {}, LID {}, packets of code {})",
            self.device.info.name,
            system_error(result),
            crate::format_gid(&self.device.info.gid),
            self.device.gid_index,
            crate::format_gid(&remote.gid),
            remote.lid,
            self.device.mtu,
        ))
    }

    /// Gives it a request.
    ///
    /// # Safety
    /// Until the request has ended, its memory may be read (for a write) or is its alone to write (for a read).
    pub unsafe fn post(self: &Arc<Self>, batch: &Arc<Batch>, slice: u32, work: &mut Work<'_>) -> Posted {
        if self.under_way.fetch_add(1, Ordering::AcqRel) >= self.depth {
            self.under_way.fetch_sub(1, Ordering::AcqRel);
            return Posted::Full;
        }
        if !self.device.take_room() {
            self.under_way.fetch_sub(1, Ordering::AcqRel);
            return Posted::Full;
        }
        let number = self.device.slab.lock().insert(Entry { batch: batch.clone(), slice, queue: self.clone() });
        let mut request = SendRequest {
            wr_id: number,
            next: std::ptr::null_mut(),
            sg_list: work.pieces.as_mut_ptr(),
            num_sge: work.pieces.len() as c_int,
            opcode: if work.operation == Operation::Write { verbs::WR_WRITE } else { verbs::WR_READ },
            send_flags: verbs::SEND_SIGNALED | if work.inline { verbs::SEND_INLINE } else { 0 },
            imm_data: 0,
            remote_addr: work.address,
            rkey: work.key,
            rest: [0; 9],
        };
        let mut bad = std::ptr::null_mut();
        let pair = self.pair.lock();
        let result = if pair.0.is_null() {
            libc::ENOTCONN
        } else {
            // SAFETY: the pair lives while it is not null, its context has the driver's functions; the caller answers for the memory.
            match unsafe { (*(*pair.0).context).ops.post_send } {
                // SAFETY: as above.
                Some(post) => unsafe { post(pair.0, &raw mut request, &raw mut bad) },
                None => libc::ENOSYS,
            }
        };
        drop(pair);
        if result == 0 {
            return Posted::Yes;
        }
        // It was not taken, so no completion comes, unless the queue pair was ended meanwhile: then its end was told with all others.
        if self.device.slab.lock().remove(number).is_none() {
            return Posted::Yes;
        }
        self.device.give_room();
        self.ended();
        if result == libc::ENOMEM {
            return Posted::Full;
        }
        Posted::Failed(format!(
            "RDMA device {}: a request is not taken: {}",
            self.device.info.name,
            system_error(result)
        ))
    }

    /// A request of it has ended.
    pub fn ended(&self) {
        self.under_way.fetch_sub(1, Ordering::AcqRel);
    }

    /// Has all its requests end. They still complete, as flushed.
    pub fn fail(&self) {
        let pair = self.pair.lock();
        if !pair.0.is_null() {
            let mut attributes = QueueAttributes { qp_state: verbs::STATE_ERROR, ..QueueAttributes::default() };
            // SAFETY: the pair lives while it is not null. Where it fails, ending the pair does what is needed.
            unsafe { (self.device.verbs.modify_qp)(pair.0, &raw mut attributes, verbs::QP_STATE) };
        }
    }

    /// Ends it: afterwards the device touches no memory for it. Requests that are still under way have ended with it. Tries until it
    /// succeeds, for memory that a device may still write to must not be given back.
    pub fn end(&self) {
        loop {
            let mut pair = self.pair.lock();
            if pair.0.is_null() {
                break;
            }
            // SAFETY: the pair lives while it is not null, and nobody else uses it: it is locked.
            if unsafe { (self.device.verbs.destroy_qp)(pair.0) } == 0 {
                pair.0 = std::ptr::null_mut();
                break;
            }
            drop(pair);
            std::thread::sleep(AGAIN);
        }
        let left = self.device.slab.lock().remove_of(self);
        for entry in left {
            finish(&self.device, entry, verbs::WC_FLUSHED);
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let pair = self.pair.get_mut();
        if !pair.0.is_null() {
            // SAFETY: nobody else has it, and no request is under way, for each holds the queue.
            unsafe { (self.device.verbs.destroy_qp)(pair.0) };
        }
    }
}
