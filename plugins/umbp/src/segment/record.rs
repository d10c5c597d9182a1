//! One record: header, key, value.

/// Bytes of a header.
pub const HEADER: usize = 32;
/// Records of version 3 begin and end at multiples of this.
pub const BLOCK: u64 = 4096;
/// Longest key that is believed.
pub const MOST_KEY: u32 = 1 << 20;

/// A million records a second reach this in two thousand years; what is above is damage, and would leave no room for later ones.
const MOST_GENERATION: u64 = 1 << 56;

const MAGIC: u32 = 0x554D_4250;
const COMMITTED: u16 = 1;
const UNCHECKED: u16 = 2;

/// Offset in a record of the byte that has the flags.
pub const FLAGS_AT: u64 = 6;

/// How records are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// Packed, CRC-32.
    One,
    /// In blocks of 4096 bytes, CRC-32C.
    Three,
}

/// A header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// How the record is laid out.
    pub version: Version,
    /// The record counts.
    pub committed: bool,
    /// It has a checksum.
    pub checked: bool,
    /// Bytes of the key.
    pub key_len: u32,
    /// Bytes of the value.
    pub value_len: u32,
    /// Checksum over key and value.
    pub crc: u32,
    /// Of records of one key the one with the highest counts.
    pub generation: u64,
}

impl Header {
    /// The bytes.
    pub fn encode(&self) -> [u8; HEADER] {
        let version: u16 = match self.version {
            Version::One => 1,
            Version::Three => 3,
        };
        let flags = if self.committed { COMMITTED } else { 0 } | if self.checked { 0 } else { UNCHECKED };
        let mut out = [0; HEADER];
        let fields: [&[u8]; 8] = [
            &MAGIC.to_le_bytes(),
            &version.to_le_bytes(),
            &flags.to_le_bytes(),
            &self.key_len.to_le_bytes(),
            &self.value_len.to_le_bytes(),
            &self.crc.to_le_bytes(),
            &0u32.to_le_bytes(),
            &self.generation.to_le_bytes(),
        ];
        let mut rest = &mut out[..];
        for field in fields {
            let (head, tail) = rest.split_at_mut(field.len());
            head.copy_from_slice(field);
            rest = tail;
        }
        out
    }

    /// Reads a header; says what is wrong with one that is none.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Header, &'static str> {
        let u32_at = |at: usize| bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u32::from_le_bytes(*b));
        let u16_at = |at: usize| bytes.get(at..).and_then(|b| b.first_chunk()).map_or(0, |b| u16::from_le_bytes(*b));
        if u32_at(0) != MAGIC {
            return Err("it has another magic number");
        }
        let version = match u16_at(4) {
            1 => Version::One,
            3 => Version::Three,
            _ => return Err("its version is neither 1 nor 3"),
        };
        let flags = u16_at(6);
        let known = if version == Version::Three { COMMITTED | UNCHECKED } else { COMMITTED };
        if flags & !known != 0 {
            return Err("it has unknown flags");
        }
        let checked = flags & UNCHECKED == 0;
        let header = Header {
            version,
            committed: flags & COMMITTED != 0,
            checked,
            key_len: u32_at(8),
            value_len: u32_at(12),
            crc: u32_at(16),
            generation: bytes.get(24..).and_then(|b| b.first_chunk()).map_or(0, |b| u64::from_le_bytes(*b)),
        };
        if !(1..=MOST_KEY).contains(&header.key_len) {
            return Err("the length of its key is wrong");
        }
        if header.generation > MOST_GENERATION {
            return Err("its generation can't be");
        }
        if u32_at(20) != 0 || (!checked && header.crc != 0) {
            return Err("bytes that have to be zero are not");
        }
        Ok(header)
    }

    /// Offset of the value in the record.
    pub fn value_at(&self) -> u64 {
        value_at(self.version, self.key_len)
    }

    /// Bytes of the record.
    pub fn record_len(&self) -> u64 {
        record_len(self.version, self.key_len, self.value_len)
    }
}

/// Offset of the value in a record.
pub fn value_at(version: Version, key_len: u32) -> u64 {
    let end = HEADER as u64 + u64::from(key_len);
    match version {
        Version::One => end,
        Version::Three => end.next_multiple_of(BLOCK),
    }
}

/// Bytes of a record.
pub fn record_len(version: Version, key_len: u32, value_len: u32) -> u64 {
    let end = value_at(version, key_len) + u64::from(value_len);
    match version {
        Version::One => end,
        Version::Three => end.next_multiple_of(BLOCK),
    }
}

/// A checksum as a version has it.
#[derive(Debug, Clone)]
pub enum Checksum {
    /// CRC-32 of IEEE.
    Ieee(crc32fast::Hasher),
    /// CRC-32C.
    Castagnoli(u32),
}

impl Checksum {
    /// Over nothing yet.
    pub fn new(version: Version) -> Checksum {
        match version {
            Version::One => Checksum::Ieee(crc32fast::Hasher::new()),
            Version::Three => Checksum::Castagnoli(0),
        }
    }
    /// Takes more bytes.
    pub fn add(&mut self, bytes: &[u8]) {
        match self {
            Checksum::Ieee(hasher) => hasher.update(bytes),
            Checksum::Castagnoli(crc) => *crc = crc32c::crc32c_append(*crc, bytes),
        }
    }
    /// The sum.
    pub fn sum(self) -> u32 {
        match self {
            Checksum::Ieee(hasher) => hasher.finalize(),
            Checksum::Castagnoli(crc) => crc,
        }
    }
}

/// Bytes of a step of a check: they stay in the nearest caches until whoever is handed them has taken them too.
const STEP: usize = 32 << 10;

/// Checks a whole record and gives its header and value; what is wrong is said in words. Every bit of header, key and value is looked at, but the
/// generation, which says nothing about bytes, and the value of a record without a checksum.
pub fn open<'a>(record: &'a [u8], key: &[u8]) -> Result<(Header, &'a [u8]), String> {
    open_by_steps(record, key, |_, _| {})
}

/// The same, and hands over the value meanwhile: where in it each step begins, and its bytes. That they are right is not known before the whole is.
pub fn open_by_steps<'a>(
    record: &'a [u8],
    key: &[u8],
    mut step: impl FnMut(usize, &[u8]),
) -> Result<(Header, &'a [u8]), String> {
    let header = record.first_chunk().ok_or_else(|| "it ends within its header".to_owned())?;
    let header = Header::decode(header).map_err(str::to_owned)?;
    if !header.committed {
        return Err("it is not committed".to_owned());
    }
    let found = record.get(HEADER..HEADER + header.key_len as usize).ok_or("it ends within its key")?;
    if found != key {
        return Err("it belongs to another key".to_owned());
    }
    let at = header.value_at() as usize;
    let value = record.get(at..at + header.value_len as usize).ok_or("it ends within its value")?;
    let mut sum = Checksum::new(header.version);
    sum.add(found);
    for (number, bytes) in value.chunks(STEP).enumerate() {
        if header.checked {
            sum.add(bytes);
        }
        step(number * STEP, bytes);
    }
    if header.checked && sum.sum() != header.crc {
        return Err("its checksum is wrong".to_owned());
    }
    Ok((header, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_those_of_the_captures() {
        assert_eq!(record_len(Version::One, 5, 1), 38);
        assert_eq!(record_len(Version::Three, 5, 1), 8192);
        assert_eq!(value_at(Version::Three, 4064), 4096);
        assert_eq!(value_at(Version::Three, 4065), 8192);
    }

    #[test]
    fn headers_come_back() {
        for version in [Version::One, Version::Three] {
            let header = Header {
                version,
                committed: true,
                checked: true,
                key_len: 5,
                value_len: 7,
                crc: 0x1234_5678,
                generation: 1 << 40,
            };
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
        assert!(Header::decode(&[0; HEADER]).is_err());
    }
}
