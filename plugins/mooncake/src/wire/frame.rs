//! coro_rpc: what stands before a message on the connection.

use md5::{Digest, Md5};

use super::envelope;
use super::pack::Malformed;

/// Bytes of the header of a request.
pub const REQUEST_HEADER: usize = 20;
/// Bytes of the header of a reply.
pub const REPLY_HEADER: usize = 16;
/// Most bytes of a reply that this side takes. The largest honest one lists the replicas of a large batch.
pub const MAX_REPLY: u32 = 256 << 20;

const MAGIC: u8 = 0x15;
const VERSION: u8 = 0;
const STRUCT_PACK: u8 = 0;

/// Header of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Number of the request on its connection; the reply has the same.
    pub sequence: u32,
    /// What is called.
    pub function: u32,
    /// Bytes of the message.
    pub body: u32,
    /// Bytes after the message.
    pub attachment: u32,
}

impl Request {
    /// As it travels.
    pub fn to_bytes(&self) -> [u8; REQUEST_HEADER] {
        let mut bytes = [0; REQUEST_HEADER];
        bytes[..4].copy_from_slice(&[MAGIC, VERSION, STRUCT_PACK, 0]);
        for (at, value) in [self.sequence, self.function, self.body, self.attachment].into_iter().enumerate() {
            bytes[4 + at * 4..8 + at * 4].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// Reads one.
    ///
    /// # Errors
    /// When it is of another protocol.
    pub fn from_bytes(bytes: &[u8; REQUEST_HEADER]) -> Result<Request, Malformed> {
        check_start([bytes[0], bytes[1]])?;
        if bytes[2] != STRUCT_PACK {
            return Err(Malformed::Value { what: "encoding of the message", at: 2, value: u64::from(bytes[2]) });
        }
        let [sequence, function, body, attachment] = numbers(&bytes[4..]);
        Ok(Request { sequence, function, body, attachment })
    }
}

/// Header of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reply {
    /// 0 when the function ran; see [`Refusal`].
    pub error: u8,
    /// Number of the request.
    pub sequence: u32,
    /// Bytes of the message.
    pub body: u32,
    /// Bytes after the message.
    pub attachment: u32,
}

impl Reply {
    /// As it travels.
    pub fn to_bytes(&self) -> [u8; REPLY_HEADER] {
        let mut bytes = [0; REPLY_HEADER];
        bytes[..4].copy_from_slice(&[MAGIC, VERSION, self.error, 0]);
        for (at, value) in [self.sequence, self.body, self.attachment].into_iter().enumerate() {
            bytes[4 + at * 4..8 + at * 4].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// Reads one.
    ///
    /// # Errors
    /// When it is of another protocol, or longer than any honest reply.
    pub fn from_bytes(bytes: &[u8; REPLY_HEADER]) -> Result<Reply, Malformed> {
        check_start([bytes[0], bytes[1]])?;
        let [sequence, body, attachment, _] = numbers(&bytes[4..]);
        for (at, value) in [(8, body), (12, attachment)] {
            if value > MAX_REPLY {
                return Err(Malformed::Value { what: "length of the reply", at, value: u64::from(value) });
            }
        }
        Ok(Reply { error: bytes[2], sequence, body, attachment })
    }
}

fn check_start(start: [u8; 2]) -> Result<(), Malformed> {
    match start {
        [MAGIC, VERSION] => Ok(()),
        [MAGIC, version] => Err(Malformed::Value { what: "version of the protocol", at: 1, value: u64::from(version) }),
        [other, _] => Err(Malformed::Value { what: "first byte of the header", at: 0, value: u64::from(other) }),
    }
}

fn numbers(bytes: &[u8]) -> [u32; 4] {
    let mut numbers = [0; 4];
    for (number, chunk) in numbers.iter_mut().zip(bytes.chunks_exact(4)) {
        *number = chunk.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte));
    }
    numbers
}

/// Why the other side did not run a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The arguments have other types than it expects: it speaks another release.
    Arguments,
    /// It has no such function: it speaks another release.
    Function,
    /// Something else went wrong there.
    Other(u8),
}

impl Refusal {
    /// The refusal behind the error of a reply, if there is one.
    pub fn of(error: u8) -> Option<Refusal> {
        match error {
            0 => None,
            4 => Some(Refusal::Arguments),
            11 => Some(Refusal::Function),
            other => Some(Refusal::Other(other)),
        }
    }
}

/// The text in a reply that refuses.
pub fn refusal_text(body: &[u8]) -> String {
    let text = envelope::decode::<&str>(body, envelope::type_hash::<&str>());
    text.map(|(text, _)| text.to_owned()).unwrap_or_default()
}

/// The number of a function: from its qualified name.
pub fn function_id(qualified_name: &str) -> u32 {
    let digest: [u8; 16] = Md5::digest(qualified_name.as_bytes()).into();
    u32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]])
}
