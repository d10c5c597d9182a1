//! The handshake socket: one message each way on a connection of its own.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Duration;

use kvdock_rdma::{Description, Transport};
use rustix::event::PollFlags;

use super::Descriptor;
use crate::limit::{Limit, Stop};
use crate::net::{connect, is_not_now, wait_for};

/// Most bytes of a message, on either side.
pub const MAX_MESSAGE: u64 = 1 << 20;
/// How long to wait for a peer to take a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// What a message is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Setting up queue pairs (RDMA).
    Connection,
    /// Descriptors.
    Metadata,
    /// A notice.
    Notify,
    /// Whether somebody is there.
    Probe,
}

impl Kind {
    fn of(byte: u8) -> Option<Kind> {
        match byte {
            0 => Some(Kind::Connection),
            1 => Some(Kind::Metadata),
            2 => Some(Kind::Notify),
            3 => Some(Kind::Probe),
            _ => None,
        }
    }
}

/// A message as it travels: its length, its kind, JSON.
pub fn message(kind: Kind, json: &str) -> Vec<u8> {
    let mut bytes = (json.len() as u64 + 1).to_le_bytes().to_vec();
    bytes.push(kind as u8);
    bytes.extend_from_slice(json.as_bytes());
    bytes
}

/// Reads what follows the length of a message. Old peers leave out the kind; theirs are about connections.
///
/// # Errors
/// A text that says what is not right.
pub fn parse(body: &[u8]) -> Result<(Kind, &str), String> {
    let (kind, json) = match body.split_first() {
        None => return Err("the message is empty".to_owned()),
        Some((byte, rest)) => match Kind::of(*byte) {
            Some(kind) => (kind, rest),
            None => (Kind::Connection, body),
        },
    };
    let json = std::str::from_utf8(json).map_err(|error| format!("the message is no text: {error}"))?;
    Ok((kind, json.trim_end_matches(['\n', '\0'])))
}

/// What the official responder answers, and this one: its descriptor to a request for metadata, a word to the others.
pub fn answer(kind: Kind, own: &Descriptor) -> Vec<u8> {
    let json = match kind {
        Kind::Metadata => serde_json::to_string(own).unwrap_or_default(),
        Kind::Notify => r#"{"name":"","notify_msg":"success"}"#.to_owned(),
        Kind::Probe => r#"{"status":"success"}"#.to_owned(),
        Kind::Connection => {
            r#"{"local_nic_path":"","peer_nic_path":"","qp_num":[],"reply_msg":"this peer speaks tcp"}"#.to_owned()
        }
    };
    message(kind, &json)
}

/// The answer of a transport to a peer that asks for a connection of queue pairs.
pub fn answer_connection(rdma: &Transport, json: &str) -> Vec<u8> {
    let answer = match serde_json::from_str::<Description>(json) {
        Ok(request) => rdma.answer(&request),
        Err(error) => Description::refusal(format!("the question can't be read: {error}")),
    };
    message(Kind::Connection, &serde_json::to_string(&answer).unwrap_or_default())
}

/// Asks a peer for a connection of queue pairs.
///
/// # Errors
/// A text that says why there is no answer.
pub fn ask_to_connect(host: &str, port: u16, request: &Description, limit: &Limit<'_>) -> Result<Description, String> {
    let json = serde_json::to_string(request).map_err(|error| error.to_string())?;
    let reply = exchange(host, port, Kind::Connection, &json, limit)?;
    let (_, json) = parse(&reply).map_err(|error| format!("{host}:{port}: {error}"))?;
    serde_json::from_str(json).map_err(|error| format!("{host}:{port} sent an answer that can't be read: {error}"))
}

/// Asks a peer for its descriptor.
///
/// # Errors
/// A text that says why there is none.
pub fn ask(host: &str, port: u16, limit: &Limit<'_>) -> Result<Descriptor, String> {
    let reply = exchange(host, port, Kind::Metadata, "{}", limit)?;
    let (kind, json) = parse(&reply).map_err(|error| format!("{host}:{port}: {error}"))?;
    if kind != Kind::Metadata {
        return Err(format!("{host}:{port} answered a request for its descriptor with a message about {kind:?}"));
    }
    serde_json::from_str(json).map_err(|error| format!("{host}:{port} sent a descriptor that can't be read: {error}"))
}

/// Sends a message and waits for the answer; gives what follows its length.
///
/// # Errors
/// A text that says what failed.
pub fn exchange(host: &str, port: u16, kind: Kind, json: &str, limit: &Limit<'_>) -> Result<Vec<u8>, String> {
    let fail = |what: String| format!("{host}:{port}: {what}");
    let time = limit.left().map_err(|stop| fail(stopped(stop)))?.min(CONNECT);
    let mut stream = connect(host, port, time).map_err(|error| fail(format!("no connection: {error}")))?;
    let request = message(kind, json);
    let mut rest = request.as_slice();
    while !rest.is_empty() {
        match stream.write(rest) {
            Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
            Err(error) if is_not_now(&error) => {
                wait_for(stream.as_fd(), PollFlags::OUT, limit).map_err(|stop| fail(stopped(stop)))?
            }
            Err(error) => return Err(fail(format!("the request could not be sent: {error}"))),
        }
    }
    let mut len = [0; 8];
    read_exact(&mut stream, &mut len, limit).map_err(fail)?;
    let len = u64::from_le_bytes(len);
    if len == 0 || len > MAX_MESSAGE {
        return Err(fail(format!("the answer has {len} bytes, it takes 1 to {MAX_MESSAGE}")));
    }
    let mut body = vec![0; len as usize];
    read_exact(&mut stream, &mut body, limit).map_err(fail)?;
    Ok(body)
}

fn read_exact(stream: &mut TcpStream, buffer: &mut [u8], limit: &Limit<'_>) -> Result<(), String> {
    let mut rest = buffer;
    while !rest.is_empty() {
        match stream.read(rest) {
            Ok(0) => return Err("the peer closed before it had answered".to_owned()),
            Ok(read) => rest = rest.get_mut(read..).unwrap_or_default(),
            Err(error) if is_not_now(&error) => wait_for(stream.as_fd(), PollFlags::IN, limit).map_err(stopped)?,
            Err(error) => return Err(format!("the answer could not be read: {error}")),
        }
    }
    Ok(())
}

fn stopped(stop: Stop) -> String {
    match stop {
        Stop::TimedOut => "it did not answer in time".to_owned(),
        Stop::Cancelled => "the call was cancelled".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capture(name: &str) -> Vec<u8> {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures/data-plane");
        std::fs::read(folder.join(name)).unwrap()
    }

    #[test]
    fn recorded_messages_are_read_and_written_to_the_same_bytes() {
        for (name, kind) in [
            ("handshake-metadata.c2s.bin", Kind::Metadata),
            ("handshake-metadata.s2c.bin", Kind::Metadata),
            ("handshake-metadata-official.c2s.bin", Kind::Metadata),
            ("handshake-metadata-official.s2c.bin", Kind::Metadata),
            ("handshake-notify.c2s.bin", Kind::Notify),
            ("handshake-notify.s2c.bin", Kind::Notify),
            ("handshake-probe.c2s.bin", Kind::Probe),
            ("handshake-probe.s2c.bin", Kind::Probe),
        ] {
            let bytes = capture(name);
            let (len, body) = bytes.split_first_chunk::<8>().unwrap();
            assert_eq!(u64::from_le_bytes(*len) as usize, body.len(), "{name}");
            let (found, json) = parse(body).unwrap();
            assert_eq!(found, kind, "{name}");
            // The official side ends its JSON with a newline.
            let ended = if body.ends_with(b"\n") { format!("{json}\n") } else { json.to_owned() };
            assert_eq!(message(kind, &ended), bytes, "{name}");
        }
        let official = capture("handshake-metadata-official.s2c.bin");
        let (_, json) = parse(&official[8..]).unwrap();
        let descriptor: Descriptor = serde_json::from_str(json).unwrap();
        assert_eq!(serde_json::to_string(&descriptor).unwrap(), json);
    }

    #[test]
    fn a_message_without_kind_is_an_old_peers() {
        assert_eq!(parse(b"{\"qp_num\":[]}").unwrap(), (Kind::Connection, "{\"qp_num\":[]}"));
        assert!(parse(b"").is_err());
        assert!(parse(b"\x01\xff").is_err());
    }
}
