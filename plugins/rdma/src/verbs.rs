//! The binary interface of libibverbs: the parts of `infiniband/verbs.h` that this crate uses, by hand.
//!
//! Objects that the library makes are only ever behind pointers; of those, the public part is declared whole. Offsets are checked when this is
//! compiled; they are those of a C compiler for the header of rdma-core, on 64-bit Linux.

use libc::{c_char, c_int, c_uint, c_void, pthread_cond_t, pthread_mutex_t};

/// A device that is there.
#[repr(C)]
pub struct Device {
    /// Unused functions.
    pub ops: [usize; 2],
    /// Kind of node.
    pub node_type: c_int,
    /// Kind of transport.
    pub transport_type: c_int,
    /// Name, such as `mlx5_0`.
    pub name: [c_char; 64],
    /// Name of the character device.
    pub dev_name: [c_char; 64],
    /// Its folder in sysfs.
    pub dev_path: [c_char; 256],
    /// The device's folder in sysfs.
    pub ibdev_path: [c_char; 256],
}

/// Posts work.
pub type PostSend = unsafe extern "C" fn(*mut QueuePair, *mut SendRequest, *mut *mut SendRequest) -> c_int;
/// Takes completions.
pub type PollCq = unsafe extern "C" fn(*mut CompletionQueue, c_int, *mut WorkCompletion) -> c_int;
/// Asks for an event at the next completion.
pub type RequestNotify = unsafe extern "C" fn(*mut CompletionQueue, c_int) -> c_int;

/// Functions of a driver that a header calls without a way through the library.
#[repr(C)]
pub struct ContextOps {
    /// Of other uses.
    pub before: [usize; 11],
    /// Takes completions.
    pub poll_cq: Option<PollCq>,
    /// Asks for an event.
    pub req_notify_cq: Option<RequestNotify>,
    /// Of other uses.
    pub between: [usize; 12],
    /// Posts work.
    pub post_send: Option<PostSend>,
    /// Of other uses.
    pub after: [usize; 6],
}

/// An open device.
#[repr(C)]
pub struct Context {
    /// The device.
    pub device: *mut Device,
    /// Its driver.
    pub ops: ContextOps,
    /// Descriptor of commands.
    pub cmd_fd: c_int,
    /// Descriptor of asynchronous events.
    pub async_fd: c_int,
    /// Completion vectors.
    pub num_comp_vectors: c_int,
    /// The library's.
    pub mutex: pthread_mutex_t,
    /// All ones where the context has an extension before it.
    pub abi_compat: *mut c_void,
}

/// A protection domain.
#[repr(C)]
pub struct ProtectionDomain {
    /// Of this device.
    pub context: *mut Context,
    /// The kernel's number.
    pub handle: u32,
}

/// Registered memory.
#[repr(C)]
pub struct MemoryRegion {
    /// Of this device.
    pub context: *mut Context,
    /// Of this domain.
    pub pd: *mut ProtectionDomain,
    /// First address in this process.
    pub addr: *mut c_void,
    /// Bytes.
    pub length: usize,
    /// The kernel's number.
    pub handle: u32,
    /// Key for work of this process.
    pub lkey: u32,
    /// Key for work of peers.
    pub rkey: u32,
}

/// A channel of completion events.
#[repr(C)]
pub struct CompletionChannel {
    /// Of this device.
    pub context: *mut Context,
    /// Readable when there is an event.
    pub fd: c_int,
    /// The library's.
    pub refcnt: c_int,
}

/// A completion queue.
#[repr(C)]
pub struct CompletionQueue {
    /// Of this device.
    pub context: *mut Context,
    /// Its channel.
    pub channel: *mut CompletionChannel,
    /// The caller's.
    pub cq_context: *mut c_void,
    /// The kernel's number.
    pub handle: u32,
    /// Entries.
    pub cqe: c_int,
    /// The library's.
    pub mutex: pthread_mutex_t,
    /// The library's.
    pub cond: pthread_cond_t,
    /// The library's.
    pub comp_events_completed: u32,
    /// The library's.
    pub async_events_completed: u32,
}

/// A queue pair.
#[repr(C)]
pub struct QueuePair {
    /// Of this device.
    pub context: *mut Context,
    /// The caller's.
    pub qp_context: *mut c_void,
    /// Of this domain.
    pub pd: *mut ProtectionDomain,
    /// Where its sends complete.
    pub send_cq: *mut CompletionQueue,
    /// Where its receives complete.
    pub recv_cq: *mut CompletionQueue,
    /// Of other uses.
    pub srq: *mut c_void,
    /// The kernel's number.
    pub handle: u32,
    /// Its number, 24 bits.
    pub qp_num: u32,
    /// What state it was brought to.
    pub state: c_int,
    /// What kind it is.
    pub qp_type: c_int,
    /// The library's.
    pub mutex: pthread_mutex_t,
    /// The library's.
    pub cond: pthread_cond_t,
    /// The library's.
    pub events_completed: u32,
}

/// What a device can do.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceAttributes {
    /// Firmware.
    pub fw_ver: [c_char; 64],
    /// Of other uses.
    pub guids: [u64; 2],
    /// Most bytes of a region.
    pub max_mr_size: u64,
    /// Page sizes.
    pub page_size_cap: u64,
    /// Of other uses.
    pub ids: [u32; 3],
    /// Most queue pairs.
    pub max_qp: c_int,
    /// Most requests of a queue.
    pub max_qp_wr: c_int,
    /// Flags.
    pub device_cap_flags: c_uint,
    /// Most pieces of a request.
    pub max_sge: c_int,
    /// Most pieces of a read.
    pub max_sge_rd: c_int,
    /// Most completion queues.
    pub max_cq: c_int,
    /// Most entries of one.
    pub max_cqe: c_int,
    /// Of other uses.
    pub max_mr_pd: [c_int; 2],
    /// Most reads at a time, as their target.
    pub max_qp_rd_atom: c_int,
    /// Of other uses.
    pub max_ee_res: [c_int; 2],
    /// Most reads at a time, as their initiator.
    pub max_qp_init_rd_atom: c_int,
    /// Of other uses.
    pub rest: [u32; 16],
    /// Of other uses.
    pub max_pkeys: u16,
    /// Of other uses.
    pub local_ca_ack_delay: u8,
    /// Ports.
    pub phys_port_cnt: u8,
    /// Room for what later versions write.
    pub tail: [u32; 1],
}

/// What a port is, as the function of the library writes it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct PortAttributes {
    /// State; [`PORT_ACTIVE`].
    pub state: c_int,
    /// Largest packet.
    pub max_mtu: c_int,
    /// Largest packet now.
    pub active_mtu: c_int,
    /// GIDs.
    pub gid_tbl_len: c_int,
    /// Of other uses.
    pub caps: [u32; 4],
    /// Of other uses.
    pub pkey_tbl_len: u16,
    /// Its number on InfiniBand.
    pub lid: u16,
    /// Of other uses.
    pub sm_lid: u16,
    /// Of other uses.
    pub bytes: [u8; 8],
    /// [`LINK_INFINIBAND`] or [`LINK_ETHERNET`].
    pub link_layer: u8,
    /// Flags.
    pub flags: u8,
}

/// A GID with what is known of it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct GidEntry {
    /// The GID.
    pub gid: [u8; 16],
    /// Its place in the table.
    pub gid_index: u32,
    /// Its port.
    pub port_num: u32,
    /// [`GID_IB`], [`GID_ROCE_V1`] or [`GID_ROCE_V2`].
    pub gid_type: u32,
    /// Network interface; 0 for none.
    pub ndev_ifindex: u32,
}

/// Sizes of a queue pair.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct QueueCapacity {
    /// Sends.
    pub max_send_wr: u32,
    /// Receives.
    pub max_recv_wr: u32,
    /// Pieces of a send.
    pub max_send_sge: u32,
    /// Pieces of a receive.
    pub max_recv_sge: u32,
    /// Bytes that are taken from the request itself.
    pub max_inline_data: u32,
}

/// How a queue pair is made.
#[repr(C)]
pub struct QueueInit {
    /// The caller's.
    pub qp_context: *mut c_void,
    /// Where sends complete.
    pub send_cq: *mut CompletionQueue,
    /// Where receives complete.
    pub recv_cq: *mut CompletionQueue,
    /// Of other uses.
    pub srq: *mut c_void,
    /// Sizes; what was granted, after the call.
    pub cap: QueueCapacity,
    /// [`TYPE_RC`].
    pub qp_type: c_int,
    /// All requests complete with an entry.
    pub sq_sig_all: c_int,
}

/// Route to a peer.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Route {
    /// The peer's GID. A union of bytes and two numbers in C, so aligned as these.
    pub dgid: [u64; 2],
    /// Flow.
    pub flow_label: u32,
    /// The own GID's place.
    pub sgid_index: u8,
    /// Hops.
    pub hop_limit: u8,
    /// Class.
    pub traffic_class: u8,
}

/// Address of a peer.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Address {
    /// Route.
    pub grh: Route,
    /// The peer's number on InfiniBand.
    pub dlid: u16,
    /// Service level.
    pub sl: u8,
    /// Of other uses.
    pub src_path_bits: u8,
    /// Of other uses.
    pub static_rate: u8,
    /// Whether the route counts.
    pub is_global: u8,
    /// The own port.
    pub port_num: u8,
}

/// What a queue pair is told.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct QueueAttributes {
    /// Its state.
    pub qp_state: c_int,
    /// Of other uses.
    pub cur_qp_state: c_int,
    /// Largest packet.
    pub path_mtu: c_int,
    /// Of other uses.
    pub path_mig_state: c_int,
    /// Of other uses.
    pub qkey: u32,
    /// First packet that is expected.
    pub rq_psn: u32,
    /// First packet that is sent.
    pub sq_psn: u32,
    /// The peer's queue pair.
    pub dest_qp_num: u32,
    /// What the peer may do.
    pub qp_access_flags: c_uint,
    /// Of other uses.
    pub cap: QueueCapacity,
    /// The peer.
    pub ah_attr: Address,
    /// Of other uses.
    pub alt_ah_attr: Address,
    /// Partition.
    pub pkey_index: u16,
    /// Of other uses.
    pub alt_pkey_index: u16,
    /// Of other uses.
    pub en_sqd_async_notify: u8,
    /// Of other uses.
    pub sq_draining: u8,
    /// Reads at a time, as their initiator.
    pub max_rd_atomic: u8,
    /// Reads at a time, as their target.
    pub max_dest_rd_atomic: u8,
    /// Time before a peer that was not ready tries again.
    pub min_rnr_timer: u8,
    /// Port.
    pub port_num: u8,
    /// Time before a packet is sent again.
    pub timeout: u8,
    /// How often.
    pub retry_cnt: u8,
    /// How often after the peer was not ready.
    pub rnr_retry: u8,
    /// Of other uses.
    pub alt_port_num: u8,
    /// Of other uses.
    pub alt_timeout: u8,
    /// Of other uses.
    pub rate_limit: u32,
}

/// A piece of memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// First address.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// Its region.
    pub lkey: u32,
}

/// A request, with the part of it that one-sided work has.
#[repr(C)]
pub struct SendRequest {
    /// Comes back with the completion.
    pub wr_id: u64,
    /// The next one.
    pub next: *mut SendRequest,
    /// Memory here.
    pub sg_list: *mut Sge,
    /// Pieces of it.
    pub num_sge: c_int,
    /// [`WR_WRITE`] or [`WR_READ`].
    pub opcode: c_int,
    /// [`SEND_SIGNALED`], [`SEND_INLINE`].
    pub send_flags: c_uint,
    /// Of other uses.
    pub imm_data: u32,
    /// First address there.
    pub remote_addr: u64,
    /// The key of its region.
    pub rkey: u32,
    /// Of other uses.
    pub rest: [u64; 9],
}

/// The end of a request.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkCompletion {
    /// Of the request.
    pub wr_id: u64,
    /// [`WC_SUCCESS`], or what went wrong.
    pub status: c_int,
    /// What was done.
    pub opcode: c_int,
    /// The maker's word.
    pub vendor_err: u32,
    /// Bytes.
    pub byte_len: u32,
    /// Of other uses.
    pub imm_data: u32,
    /// The queue pair.
    pub qp_num: u32,
    /// Of other uses.
    pub src_qp: u32,
    /// Flags.
    pub wc_flags: c_uint,
    /// Of other uses.
    pub pkey_index: u16,
    /// Of other uses.
    pub slid: u16,
    /// Of other uses.
    pub sl: u8,
    /// Of other uses.
    pub dlid_path_bits: u8,
}

/// Something that happened to a device or one of its objects.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct AsyncEvent {
    /// The object, or the number of the port.
    pub element: u64,
    /// What happened.
    pub event_type: c_int,
}

macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr;)*) => { $($(#[$doc])* pub const $name: $type = $value;)* };
}

constants! {
    /// A port that works.
    PORT_ACTIVE: c_int = 4;
    /// InfiniBand.
    LINK_INFINIBAND: u8 = 1;
    /// Ethernet: RoCE.
    LINK_ETHERNET: u8 = 2;
    /// A GID of InfiniBand.
    GID_IB: u32 = 0;
    /// A GID of RoCE version 1.
    GID_ROCE_V1: u32 = 1;
    /// A GID of RoCE version 2.
    GID_ROCE_V2: u32 = 2;
    /// The device writes for work of this process.
    ACCESS_LOCAL_WRITE: c_uint = 1;
    /// Peers write.
    ACCESS_REMOTE_WRITE: c_uint = 2;
    /// Peers read.
    ACCESS_REMOTE_READ: c_uint = 4;
    /// Peers do arithmetic.
    ACCESS_REMOTE_ATOMIC: c_uint = 8;
    /// Bytes may come in any order, before the completion. Libraries ignore it where it is not known.
    ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;
    /// A connection of two queue pairs that loses nothing.
    TYPE_RC: c_int = 2;
    /// States of a queue pair.
    STATE_RESET: c_int = 0;
    /// Has a port.
    STATE_INIT: c_int = 1;
    /// Ready to receive.
    STATE_RTR: c_int = 2;
    /// Ready to send.
    STATE_RTS: c_int = 3;
    /// Does nothing any more.
    STATE_ERROR: c_int = 6;
    /// The state is told.
    QP_STATE: c_int = 1;
    /// As for each of these.
    QP_ACCESS_FLAGS: c_int = 1 << 3;
    /// Partition.
    QP_PKEY_INDEX: c_int = 1 << 4;
    /// Port.
    QP_PORT: c_int = 1 << 5;
    /// Address of the peer.
    QP_AV: c_int = 1 << 7;
    /// Packet size.
    QP_PATH_MTU: c_int = 1 << 8;
    /// Timeout.
    QP_TIMEOUT: c_int = 1 << 9;
    /// Retries.
    QP_RETRY_CNT: c_int = 1 << 10;
    /// Retries when not ready.
    QP_RNR_RETRY: c_int = 1 << 11;
    /// First packet expected.
    QP_RQ_PSN: c_int = 1 << 12;
    /// Reads as their initiator.
    QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    /// Time when not ready.
    QP_MIN_RNR_TIMER: c_int = 1 << 15;
    /// First packet sent.
    QP_SQ_PSN: c_int = 1 << 16;
    /// Reads as their target.
    QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    /// The peer's queue pair.
    QP_DEST_QPN: c_int = 1 << 20;
    /// Writes to the peer.
    WR_WRITE: c_int = 0;
    /// Reads from the peer.
    WR_READ: c_int = 4;
    /// Completes with an entry.
    SEND_SIGNALED: c_uint = 2;
    /// The bytes are taken when the request is posted.
    SEND_INLINE: c_uint = 8;
    /// All went well.
    WC_SUCCESS: c_int = 0;
    /// Memory here is not registered for this.
    WC_LOCAL_PROTECTION: c_int = 4;
    /// The queue pair was in the error state.
    WC_FLUSHED: c_int = 5;
    /// The peer has no such range.
    WC_REMOTE_ACCESS: c_int = 10;
    /// The peer does not answer.
    WC_RETRIES_EXCEEDED: c_int = 12;
    /// A queue pair can't go on.
    EVENT_QP_FATAL: c_int = 1;
    /// A peer asked for what it must not.
    EVENT_QP_REQUEST: c_int = 2;
    /// A peer touched what it must not.
    EVENT_QP_ACCESS: c_int = 3;
    /// The device can't go on.
    EVENT_DEVICE_FATAL: c_int = 8;
    /// A port works again.
    EVENT_PORT_ACTIVE: c_int = 9;
    /// A port does not work.
    EVENT_PORT_ERROR: c_int = 10;
}

/// Compile-time checks of the layouts.
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<usize>() == 8, "the layouts are those of 64-bit systems");
    assert!(size_of::<Device>() == 664 && offset_of!(Device, name) == 24 && offset_of!(Device, ibdev_path) == 408);
    assert!(size_of::<ContextOps>() == 256 && offset_of!(ContextOps, poll_cq) == 88);
    assert!(offset_of!(ContextOps, req_notify_cq) == 96 && offset_of!(ContextOps, post_send) == 200);
    assert!(size_of::<ProtectionDomain>() == 16 && size_of::<CompletionChannel>() == 16);
    assert!(offset_of!(CompletionChannel, fd) == 8);
    assert!(offset_of!(Context, ops) == 8 && offset_of!(Context, async_fd) == 268);
    assert!(size_of::<MemoryRegion>() == 48 && offset_of!(MemoryRegion, lkey) == 36);
    assert!(offset_of!(CompletionQueue, cqe) == 28);
    assert!(offset_of!(QueuePair, qp_num) == 52 && offset_of!(QueuePair, send_cq) == 24);
    assert!(size_of::<DeviceAttributes>() == 232 && offset_of!(DeviceAttributes, max_mr_size) == 80);
    assert!(offset_of!(DeviceAttributes, max_qp_wr) == 112 && offset_of!(DeviceAttributes, max_sge) == 120);
    assert!(offset_of!(DeviceAttributes, max_cqe) == 132 && offset_of!(DeviceAttributes, max_qp_rd_atom) == 144);
    assert!(offset_of!(DeviceAttributes, max_qp_init_rd_atom) == 156);
    assert!(offset_of!(DeviceAttributes, phys_port_cnt) == 227);
    assert!(size_of::<PortAttributes>() == 48 && offset_of!(PortAttributes, gid_tbl_len) == 12);
    assert!(offset_of!(PortAttributes, lid) == 34 && offset_of!(PortAttributes, link_layer) == 46);
    assert!(size_of::<GidEntry>() == 32 && offset_of!(GidEntry, gid_type) == 24);
    assert!(size_of::<QueueCapacity>() == 20 && size_of::<QueueInit>() == 64 && offset_of!(QueueInit, cap) == 32);
    assert!(offset_of!(QueueInit, qp_type) == 52);
    assert!(size_of::<Route>() == 24 && offset_of!(Route, sgid_index) == 20 && offset_of!(Route, hop_limit) == 21);
    assert!(size_of::<Address>() == 32 && offset_of!(Address, dlid) == 24 && offset_of!(Address, is_global) == 29);
    assert!(offset_of!(Address, port_num) == 30);
    assert!(size_of::<QueueAttributes>() == 144 && offset_of!(QueueAttributes, dest_qp_num) == 28);
    assert!(offset_of!(QueueAttributes, qp_access_flags) == 32 && offset_of!(QueueAttributes, cap) == 36);
    assert!(offset_of!(QueueAttributes, ah_attr) == 56 && offset_of!(QueueAttributes, pkey_index) == 120);
    assert!(offset_of!(QueueAttributes, max_rd_atomic) == 126 && offset_of!(QueueAttributes, port_num) == 129);
    assert!(offset_of!(QueueAttributes, timeout) == 130 && offset_of!(QueueAttributes, rnr_retry) == 132);
    assert!(offset_of!(QueueAttributes, rate_limit) == 136);
    assert!(size_of::<Sge>() == 16 && size_of::<SendRequest>() == 128 && offset_of!(SendRequest, opcode) == 28);
    assert!(offset_of!(SendRequest, remote_addr) == 40 && offset_of!(SendRequest, rkey) == 48);
    assert!(size_of::<WorkCompletion>() == 48 && offset_of!(WorkCompletion, qp_num) == 28);
    assert!(size_of::<AsyncEvent>() == 16 && offset_of!(AsyncEvent, event_type) == 8);
};
/// As above, where the system's own types are those of x86-64 and have their sizes.
#[cfg(target_arch = "x86_64")]
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<Context>() == 328 && offset_of!(Context, abi_compat) == 320);
    assert!(size_of::<CompletionQueue>() == 128 && size_of::<QueuePair>() == 160);
};
