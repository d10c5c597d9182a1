//! Frames of the data plane.

/// Bytes of a header.
pub const HEADER: usize = 24;
/// Bytes of a status.
pub const STATUS: usize = 8;

const READ: u8 = 0;
const WRITE: u8 = 1;
const VERSION_2: u8 = 0x80;
const STATUS_MARK: u64 = 0x4d43_5456_0000_0000;

/// The status of a range that was moved.
pub const STATUS_OK: u64 = STATUS_MARK;
/// The status of a range that is not inside of one buffer.
pub const STATUS_REJECTED: u64 = STATUS_MARK | 1;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// From the peer.
    Read,
    /// To the peer.
    Write,
}

/// What stands before each range on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Bytes of the range.
    pub size: u64,
    /// Its first address, in the peer's numbering.
    pub address: u64,
    /// Which way.
    pub operation: Operation,
    /// The peer is to say how it went: version 2 of the protocol.
    pub with_status: bool,
}

impl Header {
    /// As it travels.
    pub fn to_bytes(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(&self.size.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.address.to_le_bytes());
        let code = if self.operation == Operation::Write { WRITE } else { READ };
        bytes[16] = code | if self.with_status { VERSION_2 } else { 0 };
        bytes
    }

    /// Reads one. Every byte string of this length is one; codes that are not known read, as with official peers.
    pub fn from_bytes(bytes: &[u8; HEADER]) -> Header {
        let number =
            |at: usize| bytes[at..at + 8].iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
        let code = bytes[16] & !VERSION_2;
        Header {
            size: number(0),
            address: number(8),
            operation: if code == WRITE { Operation::Write } else { Operation::Read },
            with_status: bytes[16] & VERSION_2 != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capture(name: &str) -> Vec<u8> {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures/data-plane");
        std::fs::read(folder.join(name)).unwrap()
    }

    fn header(bytes: &[u8]) -> Header {
        let chunk = bytes.first_chunk::<HEADER>().unwrap();
        let header = Header::from_bytes(chunk);
        let mut sent = *chunk;
        // Official senders leave the last bytes as they were.
        sent[17..].fill(0);
        assert_eq!(header.to_bytes(), sent);
        header
    }

    #[test]
    fn recorded_streams_are_read_and_written_to_the_same_bytes() {
        let write = capture("v2-write.c2s.bin");
        let first = header(&write);
        assert_eq!((first.size, first.operation, first.with_status), (100, Operation::Write, true));
        assert_eq!(write.len(), HEADER + 100);
        assert_eq!(capture("v2-write.s2c.bin"), STATUS_OK.to_le_bytes());
        let read = header(&capture("v2-read.c2s.bin"));
        assert_eq!((read.size, read.operation, read.with_status), (100, Operation::Read, true));
        let answer = capture("v2-read.s2c.bin");
        assert_eq!((&answer[..8], answer.len()), (&STATUS_OK.to_le_bytes()[..], 108));
        header(&capture("v2-read-rejected.c2s.bin"));
        assert_eq!(capture("v2-read-rejected.s2c.bin"), STATUS_REJECTED.to_le_bytes());
        let write = header(&capture("v1-write.c2s.bin"));
        assert_eq!((write.size, write.operation, write.with_status), (8, Operation::Write, false));
        let read = header(&capture("v1-read.c2s.bin"));
        assert_eq!((read.size, read.operation, read.with_status), (8, Operation::Read, false));
    }

    #[test]
    fn a_recorded_pipeline_is_three_requests_and_three_answers() {
        let mut stream = capture("v2-pipelined.c2s.bin");
        let mut found = Vec::new();
        while !stream.is_empty() {
            let header = header(&stream);
            let body = if header.operation == Operation::Write { header.size as usize } else { 0 };
            stream.drain(..HEADER + body);
            found.push((header.operation, header.size));
        }
        assert_eq!(found, [(Operation::Write, 4), (Operation::Read, 4), (Operation::Read, 2)]);
        let answers = capture("v2-pipelined.s2c.bin");
        assert_eq!(answers.len(), STATUS + STATUS + 4 + STATUS + 2);
        for at in [0, 8, 20] {
            assert_eq!(answers[at..at + 8], STATUS_OK.to_le_bytes());
        }
    }
}
