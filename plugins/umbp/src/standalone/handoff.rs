//! Handing memory to a server: its descriptor goes over a socket of its own.

use std::io::{self, IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const MAGIC: u32 = 0x554D_4250;
const VERSION: u32 = 1;
/// Bytes of the name of a client.
const NAME: usize = 64;
/// Bytes of the message.
pub const MESSAGE: usize = 88;

/// The message that goes with a descriptor; none when the client's name is too long.
pub fn message(client: &str, base: u64, size: u64) -> Option<[u8; MESSAGE]> {
    let mut out = [0; MESSAGE];
    if client.is_empty() || client.len() >= NAME {
        return None;
    }
    let name = format!("{client:\0<NAME$}");
    let fields: [&[u8]; 5] =
        [&MAGIC.to_le_bytes(), &VERSION.to_le_bytes(), name.as_bytes(), &base.to_le_bytes(), &size.to_le_bytes()];
    let mut rest = &mut out[..];
    for field in fields {
        let (head, tail) = rest.split_at_mut_checked(field.len())?;
        head.copy_from_slice(field);
        rest = tail;
    }
    Some(out)
}

/// Hands a descriptor over. The server maps it from its start on.
///
/// # Errors
/// When the server can't be reached, refuses, or does not answer in time.
pub fn hand(socket: &str, client: &str, fd: BorrowedFd<'_>, base: u64, size: u64, time: Duration) -> io::Result<()> {
    let message = message(client, base, size).ok_or_else(|| io::Error::other("the name of the client is too long"))?;
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(time))?;
    stream.set_write_timeout(Some(time))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("there is no room for the descriptor"));
    }
    let sent = sendmsg(&stream, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL)?;
    if sent != MESSAGE {
        return Err(io::Error::new(io::ErrorKind::WriteZero, "the message was sent in part"));
    }
    let mut status = [0; 4];
    stream.read_exact(&mut status)?;
    match i32::from_le_bytes(status) {
        0 => Ok(()),
        other => Err(io::Error::other(format!("the server refuses the memory (status {other})"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_is_the_captured_one() {
        let made = message("umbp-28662-0", 0x7f68_282f_e000, 1 << 20).unwrap();
        let mut expected = Vec::new();
        expected.extend([0x50, 0x42, 0x4d, 0x55, 1, 0, 0, 0]);
        expected.extend(b"umbp-28662-0");
        expected.resize(72, 0);
        expected.extend([0x00, 0xe0, 0x2f, 0x28, 0x68, 0x7f, 0, 0]);
        expected.extend([0, 0, 0x10, 0, 0, 0, 0, 0]);
        assert_eq!(made.as_slice(), expected);
        assert!(message(&"x".repeat(63), 1, 1).is_some());
        assert!(message(&"x".repeat(64), 1, 1).is_none());
        assert!(message("", 1, 1).is_none());
    }
}
