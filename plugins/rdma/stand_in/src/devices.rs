//! Devices and their ports.

use std::io;
use std::os::fd::RawFd;
use std::sync::OnceLock;

use kvdock_rdma::verbs::{self, AsyncEvent, Context, ContextOps, Device, DeviceAttributes, GidEntry, PortAttributes};
use libc::{c_char, c_int, c_void, size_t};
use parking_lot::Mutex;

use crate::{fail, objects, pair, wire};

/// An open device, and the writing end of its events.
#[repr(C)]
struct Opened {
    base: Context,
    events: RawFd,
}

/// Writing ends of the events of open devices.
static EVENTS: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

struct Devices(Vec<*mut Device>);

// SAFETY: devices are made once and never change.
unsafe impl Send for Devices {}
// SAFETY: as above.
unsafe impl Sync for Devices {}

fn devices() -> &'static [*mut Device] {
    static ALL: OnceLock<Devices> = OnceLock::new();
    let all = ALL.get_or_init(|| {
        let Some(folder) = crate::folder() else { return Devices(Vec::new()) };
        let names = std::env::var("KVDOCK_STAND_IN_DEVICES").unwrap_or_else(|_| "stand0".to_owned());
        let make = |name: &str| {
            let path = folder.join("sys/class/infiniband").join(name);
            // SAFETY: numbers and bytes, for which nought is a value.
            let mut device: Device = unsafe { std::mem::zeroed() };
            device.node_type = 1;
            write(&mut device.name, name);
            write(&mut device.dev_name, &format!("uverbs-{name}"));
            write(&mut device.dev_path, &path.to_string_lossy());
            write(&mut device.ibdev_path, &path.to_string_lossy());
            Box::into_raw(Box::new(device))
        };
        Devices(names.split(',').filter(|name| !name.is_empty()).map(make).collect())
    });
    &all.0
}

fn write(place: &mut [c_char], text: &str) {
    let room = place.len() - 1;
    place.iter_mut().zip(text.bytes().take(room)).for_each(|(to, byte)| *to = byte as c_char);
}

/// The place of a device, from 1; it is the last byte of its GIDs.
fn number(device: *const Device) -> u8 {
    devices().iter().position(|known| std::ptr::eq(*known, device)).map_or(0, |at| at as u8 + 1)
}

/// The GIDs of a device: link-local and routable, each of RoCE version 1 and 2.
fn gids(device: *const Device) -> [(u32, [u8; 16]); 4] {
    let last = number(device);
    let local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last];
    let routable = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, last];
    let (v1, v2) = (verbs::GID_ROCE_V1, verbs::GID_ROCE_V2);
    [(v1, local), (v2, local), (v1, routable), (v2, routable)]
}

/// Whether packets from a GID of a device reach another one: both are of RoCE version 2, and alike.
pub fn reaches(device: *const Device, from: u8, to: &[u8; 16]) -> bool {
    let is_local = |gid: &[u8; 16]| gid[0] == 0xfe;
    let known = to[..15] == gids(device)[1].1[..15] || to[..15] == gids(device)[3].1[..15];
    gids(device)
        .get(usize::from(from))
        .is_some_and(|(kind, own)| *kind == verbs::GID_ROCE_V2 && known && is_local(own) == is_local(to))
}

/// Tells all open devices of an event of port 1.
pub fn tell(event_type: c_int) {
    let event = AsyncEvent { element: 1, event_type };
    for fd in EVENTS.lock().iter() {
        // SAFETY: the event is plain bytes; the descriptor is open while it is in the list.
        unsafe { libc::write(*fd, (&raw const event).cast(), size_of::<AsyncEvent>()) };
    }
}

/// A pipe: reading end, writing end.
pub fn pipe() -> io::Result<(RawFd, RawFd)> {
    let mut ends = [0; 2];
    // SAFETY: there is room for both.
    match unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } {
        0 => Ok((ends[0], ends[1])),
        _ => Err(io::Error::last_os_error()),
    }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut Device {
    let devices = devices();
    if !count.is_null() {
        // SAFETY: the caller's number.
        unsafe { *count = devices.len() as c_int };
    }
    let mut list = devices.to_vec();
    list.push(std::ptr::null_mut());
    // Lists are few, and stay.
    Box::leak(list.into_boxed_slice()).as_mut_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ibv_free_device_list(_list: *mut *mut Device) {}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_device_name(device: *mut Device) -> *const c_char {
    // SAFETY: a device of the list.
    unsafe { (&raw const (*device).name).cast() }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_open_device(device: *mut Device) -> *mut Context {
    if wire::serve().is_err() {
        return fail(libc::EIO);
    }
    let Ok((reading, writing)) = pipe() else { return fail(libc::EMFILE) };
    let ops = ContextOps {
        before: [0; 11],
        poll_cq: Some(objects::poll_cq),
        req_notify_cq: Some(objects::req_notify_cq),
        between: [0; 12],
        post_send: Some(pair::post_send),
        after: [0; 6],
    };
    // SAFETY: numbers and pointers, for which nought is a value.
    let mut base: Context = unsafe { std::mem::zeroed() };
    base.device = device;
    base.ops = ops;
    base.cmd_fd = -1;
    base.async_fd = reading;
    base.num_comp_vectors = 1;
    EVENTS.lock().push(writing);
    Box::into_raw(Box::new(Opened { base, events: writing })).cast()
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_close_device(context: *mut Context) -> c_int {
    // SAFETY: `ibv_open_device` made it.
    let opened = unsafe { Box::from_raw(context.cast::<Opened>()) };
    let mut events = EVENTS.lock();
    events.retain(|fd| *fd != opened.events);
    // SAFETY: both are this device's.
    unsafe {
        libc::close(opened.base.async_fd);
        libc::close(opened.events);
    }
    0
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_device(_context: *mut Context, attributes: *mut DeviceAttributes) -> c_int {
    // SAFETY: numbers and bytes, for which nought is a value.
    let mut found: DeviceAttributes = unsafe { std::mem::zeroed() };
    let most = std::env::var("KVDOCK_STAND_IN_MAX_MR").ok().and_then(|text| text.parse().ok());
    found.max_mr_size = most.unwrap_or(u64::MAX);
    found.page_size_cap = 4096;
    found.max_qp = 4096;
    found.max_qp_wr = 1024;
    found.max_sge = 16;
    found.max_sge_rd = 16;
    found.max_cq = 64;
    found.max_cqe = 8192;
    found.max_qp_rd_atom = 16;
    found.max_qp_init_rd_atom = 16;
    found.max_pkeys = 1;
    found.phys_port_cnt = 1;
    // SAFETY: the caller's structure.
    unsafe { attributes.write(found) };
    0
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_port(_context: *mut Context, port: u8, attributes: *mut PortAttributes) -> c_int {
    if port != 1 {
        return libc::EINVAL;
    }
    let found = PortAttributes {
        state: verbs::PORT_ACTIVE,
        max_mtu: 5,
        active_mtu: 5,
        gid_tbl_len: 4,
        caps: [0, 1 << 30, 0, 0],
        pkey_tbl_len: 1,
        link_layer: verbs::LINK_ETHERNET,
        ..PortAttributes::default()
    };
    // SAFETY: the caller's structure.
    unsafe { attributes.write(found) };
    0
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_gid(context: *mut Context, port: u8, index: c_int, gid: *mut [u8; 16]) -> c_int {
    // SAFETY: an open device.
    let device = unsafe { (*context).device };
    match usize::try_from(index).ok().and_then(|index| gids(device).get(index).copied()).filter(|_| port == 1) {
        Some((_, found)) => {
            // SAFETY: the caller's bytes.
            unsafe { *gid = found };
            0
        }
        None => -1,
    }
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut Context,
    port: u32,
    index: u32,
    entry: *mut GidEntry,
    _flags: u32,
    size: size_t,
) -> c_int {
    // SAFETY: an open device.
    let device = unsafe { (*context).device };
    match gids(device).get(index as usize).copied() {
        Some((gid_type, gid)) if port == 1 && size == size_of::<GidEntry>() => {
            // The loopback interface.
            let found = GidEntry { gid, gid_index: index, port_num: port, gid_type, ndev_ifindex: 1 };
            // SAFETY: the caller's structure.
            unsafe { entry.write(found) };
            0
        }
        _ => libc::ENODATA,
    }
}

/// # Safety
/// As in C.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_get_async_event(context: *mut Context, event: *mut AsyncEvent) -> c_int {
    // SAFETY: an open device; the caller's structure has room for an event.
    let read = unsafe { libc::read((*context).async_fd, event.cast::<c_void>(), size_of::<AsyncEvent>()) };
    if read == size_of::<AsyncEvent>() as isize { 0 } else { -1 }
}

#[unsafe(no_mangle)]
extern "C" fn ibv_ack_async_event(_event: *mut AsyncEvent) {}

#[unsafe(no_mangle)]
extern "C" fn ibv_event_type_str(_event: c_int) -> *const c_char {
    c"event of the stand-in".as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ibv_wc_status_str(status: c_int) -> *const c_char {
    let text = match status {
        verbs::WC_SUCCESS => c"success",
        verbs::WC_LOCAL_PROTECTION => c"local protection error",
        verbs::WC_FLUSHED => c"Work Request Flushed Error",
        verbs::WC_REMOTE_ACCESS => c"remote access error",
        verbs::WC_RETRIES_EXCEEDED => c"transport retry counter exceeded",
        _ => c"another error",
    };
    text.as_ptr()
}
