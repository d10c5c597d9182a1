//! What travels. All numbers are little-endian.

/// What both sides begin with.
pub const MAGIC: [u8; 8] = *b"KVDUMBP1";
/// Bytes of a greeting: the magic, and the instance that is meant.
pub const GREETING: usize = 16;
/// Bytes of a request before its name and ranges.
pub const REQUEST: usize = 32;
/// Bytes of an answer before its payload.
pub const ANSWER: usize = 16;
/// Bytes of a range.
pub const RANGE: usize = 16;
/// Bytes of a name at most.
pub const NAME: usize = 64 << 10;
/// Ranges of a request at most.
pub const RANGES: usize = 1 << 20;

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Ranges of an object.
    Read,
    /// To fill a place.
    Write,
}

/// A request. Behind it come its name and ranges, or what a place is filled with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// What is asked for.
    pub operation: Operation,
    /// Bytes of the name; 0 of a write.
    pub name: u32,
    /// Ranges; 0 of a write.
    pub ranges: u32,
    /// Bytes of the object.
    pub len: u64,
    /// The place; 0 of a read.
    pub slot: u64,
}

/// How it went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// As asked.
    Done,
    /// There is no such object.
    Missing,
    /// It has another length, which is the number in the answer.
    OtherLength,
    /// There is no such range, or no such place.
    Refused,
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|bytes| bytes.first_chunk()).copied().unwrap_or([0; N])
}

impl Request {
    /// As it travels.
    pub fn to_bytes(self) -> [u8; REQUEST] {
        let mut bytes = [0; REQUEST];
        bytes[..4].copy_from_slice(&u32::from(self.operation == Operation::Write).to_le_bytes());
        bytes[4..8].copy_from_slice(&self.name.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.ranges.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_le_bytes());
        bytes[24..].copy_from_slice(&self.slot.to_le_bytes());
        bytes
    }

    /// Reads one; none when it is not one.
    pub fn from_bytes(bytes: &[u8; REQUEST]) -> Option<Request> {
        let operation = match u32::from_le_bytes(number(bytes, 0)) {
            0 => Operation::Read,
            1 => Operation::Write,
            _ => return None,
        };
        let (name, ranges) = (u32::from_le_bytes(number(bytes, 4)), u32::from_le_bytes(number(bytes, 8)));
        let (len, slot) = (u64::from_le_bytes(number(bytes, 16)), u64::from_le_bytes(number(bytes, 24)));
        let request = Request { operation, name, ranges, len, slot };
        (name as usize <= NAME && ranges as usize <= RANGES && request.to_bytes() == *bytes).then_some(request)
    }
}

impl Status {
    /// As it travels, with a number: the payload's bytes, or the length of an object.
    pub fn to_bytes(self, number: u64) -> [u8; ANSWER] {
        let code: u32 = match self {
            Status::Done => 0,
            Status::Missing => 1,
            Status::OtherLength => 2,
            Status::Refused => 3,
        };
        let mut bytes = [0; ANSWER];
        bytes[..4].copy_from_slice(&code.to_le_bytes());
        bytes[8..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    /// Reads one; none when it is not one.
    pub fn from_bytes(bytes: &[u8; ANSWER]) -> Option<(Status, u64)> {
        let status = match u32::from_le_bytes(number(bytes, 0)) {
            0 => Status::Done,
            1 => Status::Missing,
            2 => Status::OtherLength,
            3 => Status::Refused,
            _ => return None,
        };
        let number = u64::from_le_bytes(number(bytes, 8));
        (status.to_bytes(number) == *bytes).then_some((status, number))
    }
}

/// A greeting for an instance.
pub fn greeting(instance: u64) -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..].copy_from_slice(&instance.to_le_bytes());
    bytes
}

/// A range as it travels: where it begins in the object, and its bytes.
pub fn range(offset: u64, len: u64) -> [u8; RANGE] {
    let mut bytes = [0; RANGE];
    bytes[..8].copy_from_slice(&offset.to_le_bytes());
    bytes[8..].copy_from_slice(&len.to_le_bytes());
    bytes
}

/// Reads ranges.
pub fn ranges(bytes: &[u8]) -> Vec<(u64, u64)> {
    let (chunks, _) = bytes.as_chunks::<RANGE>();
    let range = |bytes: &[u8; RANGE]| (u64::from_le_bytes(number(bytes, 0)), u64::from_le_bytes(number(bytes, 8)));
    chunks.iter().map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_and_others_are_none() {
        let request = Request { operation: Operation::Write, name: 0, ranges: 0, len: 1 << 40, slot: 7 };
        assert_eq!(Request::from_bytes(&request.to_bytes()), Some(request));
        let read = Request { operation: Operation::Read, name: 64, ranges: 3, len: 9, slot: 0 };
        assert_eq!(Request::from_bytes(&read.to_bytes()), Some(read));
        for (at, value) in [(0, 2), (1, 1), (7, 1), (11, 1), (12, 1)] {
            let mut bytes = read.to_bytes();
            bytes[at] = value;
            assert_eq!(Request::from_bytes(&bytes), None, "{at}");
        }
        for status in [Status::Done, Status::Missing, Status::OtherLength, Status::Refused] {
            assert_eq!(Status::from_bytes(&status.to_bytes(5)), Some((status, 5)));
        }
        assert_eq!(Status::from_bytes(&[9; ANSWER]), None);
        assert_eq!(ranges(&[range(1, 2), range(3, u64::MAX)].concat()), [(1, 2), (3, u64::MAX)]);
    }
}
