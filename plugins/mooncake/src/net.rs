//! Sockets: what both planes need of them. Payload is moved by the kernel between sockets and memory that is named by address; no
//! code of this crate touches it.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::limit::{Limit, Stop};

/// Most pieces of memory that one system call takes.
pub const MAX_PIECES: usize = 1024;

/// Splits `host:port`; an IPv6 address stands in brackets.
pub fn split_address(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    (!host.is_empty()).then_some((host, port.parse().ok()?))
}

/// Connects without waiting longer than `most`, and makes the socket non-blocking.
///
/// # Errors
/// When nobody answers at any of the host's addresses.
pub fn connect(host: &str, port: u16, most: Duration) -> io::Result<TcpStream> {
    let addresses: Vec<SocketAddr> = (host, port).to_socket_addrs()?.collect();
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in addresses {
        match TcpStream::connect_timeout(&address, most) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                stream.set_nonblocking(true)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Whether an idle connection can't be used any more: closed by the other side, or holding bytes that nobody asked for.
pub fn is_stale(stream: &TcpStream) -> bool {
    !matches!(stream.peek(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

/// Whether the other side has closed a connection that may hold bytes to be read.
pub fn is_closed(stream: &TcpStream) -> bool {
    match stream.peek(&mut [0]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}

/// Waits until a socket is ready, or the slice of time is over.
///
/// # Errors
/// Those of `poll`.
pub fn wait(fds: &mut [PollFd<'_>], time: Duration) -> io::Result<()> {
    // At least a millisecond: a wait of nothing would spin.
    let time = time.max(Duration::from_millis(1));
    let timeout = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
    match poll(fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Waits until one socket is ready.
///
/// # Errors
/// When the time is over before.
pub fn wait_for(fd: BorrowedFd<'_>, flags: PollFlags, limit: &Limit<'_>) -> Result<(), Stop> {
    let time = limit.slice()?;
    let mut fds = [PollFd::from_borrowed_fd(fd, flags)];
    // A failing poll shows in the read or write that follows.
    let _ = wait(&mut fds, time);
    Ok(())
}

/// Sends what the socket takes of the pieces.
///
/// # Safety
/// Each piece is memory that may be read until this returns.
///
/// # Errors
/// Those of the socket; `WouldBlock` when it takes nothing now.
pub unsafe fn send_pieces(stream: &TcpStream, pieces: &[libc::iovec]) -> io::Result<usize> {
    let message = header(pieces);
    // SAFETY: the message names `pieces`, which the caller vouches for; the kernel only reads them.
    let sent =
        unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Receives into the pieces what has come. 0 means that the other side has closed.
///
/// # Safety
/// Each piece is memory that may be written until this returns, and that nobody takes to hold a particular value meanwhile.
///
/// # Errors
/// Those of the socket; `WouldBlock` when nothing has come.
pub unsafe fn receive_pieces(stream: &TcpStream, pieces: &[libc::iovec]) -> io::Result<usize> {
    let mut message = header(pieces);
    // SAFETY: the message names `pieces`, which the caller vouches for.
    let received = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

fn header(pieces: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: all-zero is a valid value of this C struct of numbers and pointers.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = pieces.as_ptr().cast_mut();
    message.msg_iovlen = pieces.len().min(MAX_PIECES) as _;
    message
}

/// Whether an error of a non-blocking socket means: not now.
pub fn is_not_now(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
