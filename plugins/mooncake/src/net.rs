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

/// Splits `host:port` as somebody wrote it down: a host that is one, an IPv6 address in brackets, a port that can be connected to.
pub fn written_address(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let port = written_port(port).filter(|port| *port > 0)?;
    Some((written_host(host)?, port))
}

/// A host: a name, an IPv4 address, or an IPv6 address in brackets, which are left out of the answer.
pub fn written_host(text: &str) -> Option<&str> {
    let is_plain = |text: &str| !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || "/[]".contains(c));
    let bracketed = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    match bracketed {
        Some(address) => is_plain(address).then_some(address),
        None => (is_plain(text) && !text.contains(':')).then_some(text),
    }
}

/// A port: digits.
pub fn written_port(text: &str) -> Option<u16> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
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

/// Has the system ask whether the other side is there still, when a connection has been silent for so long: of a machine that is gone without a word
/// nothing comes.
///
/// # Errors
/// Those of the socket.
pub fn keep_alive(stream: &TcpStream, after: Duration) -> io::Result<()> {
    let seconds = libc::c_int::try_from(after.as_secs()).unwrap_or(libc::c_int::MAX).max(1);
    let options = [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, seconds),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, (seconds / 4).max(1)),
    ];
    for (level, option, value) in options {
        let len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the value is an integer as these options take it, and lives through the call.
        let set = unsafe { libc::setsockopt(stream.as_raw_fd(), level, option, (&raw const value).cast(), len) };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Has the system say that bytes have come only when there are so many, or when no more come. Where it can't, it says so of each byte.
pub fn set_low_water(stream: &TcpStream, bytes: u64) {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX).max(1);
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the value is an integer as this option takes it, and lives through the call.
    let _ = unsafe {
        let value = (&raw const bytes).cast();
        libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, value, len)
    };
}

/// Whether nobody listens at a port of a host, as each of its addresses says. One that does not answer says nothing.
pub fn is_refused(host: &str, port: u16, most: Duration) -> bool {
    let Ok(addresses) = (host, port).to_socket_addrs() else { return false };
    let addresses: Vec<SocketAddr> = addresses.collect();
    let refuses = |address: &SocketAddr| {
        TcpStream::connect_timeout(address, most).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    };
    !addresses.is_empty() && addresses.iter().all(refuses)
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
