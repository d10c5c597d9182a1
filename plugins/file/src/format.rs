//! The bytes of page trailers and pack tables. FORMAT.md draws them.

use kvdock_plugin_api::PageKey;

use crate::names::{TAG_MAX, is_tag};

/// Bytes of the trailer that ends a page's file.
pub const TRAILER_LEN: usize = 128;
/// A page's file is a multiple of this long, so that it can be written past the page cache.
pub const BLOCK: usize = 4096;

/// Bytes of the file of a page with so many bytes of payload: payload, zeros, trailer.
pub fn file_len(payload: u64) -> u64 {
    (payload + TRAILER_LEN as u64).next_multiple_of(BLOCK as u64)
}

const TRAILER_MAGIC: [u8; 8] = *b"KVDOCKP1";

/// Bytes of a group's head in a pack.
pub const GROUP_HEAD_LEN: usize = 64;
/// Bytes of an entry of a group's table.
pub const ENTRY_LEN: usize = 96;
/// Most entries a group may have; a larger number is taken for damage.
pub const GROUP_ENTRIES_MAX: usize = 4096;
/// Where the state word lies in an entry.
pub const ENTRY_STATE_AT: u64 = 84;
/// Groups start at multiples of this.
pub const GROUP_ALIGN: u64 = 4096;
const GROUP_MAGIC: [u8; 8] = *b"KVDOCKG1";
/// Value of the state word of a page that was removed. A page that is there has 0.
pub const DEAD: u32 = 0x6465_6164;

/// Version that is written, and the only one that is read.
pub const VERSION: u32 = 1;

/// What the trailer of a page's file says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trailer {
    /// Namespace of the page.
    pub namespace: [u8; 32],
    /// Key of the page.
    pub key: PageKey,
    /// First bytes of the digest of the pool's shape.
    pub pool: [u8; 8],
    /// Bytes of the payload.
    pub len: u64,
    /// CRC-32C of the payload.
    pub crc: u32,
    /// When the page was written, in seconds since 1970.
    pub written: u64,
}

struct Writer<'a>(&'a mut [u8], usize);

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        if let Some(to) = self.0.get_mut(self.1..self.1 + bytes.len()) {
            to.copy_from_slice(bytes);
        }
        self.1 += bytes.len();
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }
    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}

impl Trailer {
    /// The bytes of the trailer.
    pub fn encode(&self) -> [u8; TRAILER_LEN] {
        let mut bytes = [0; TRAILER_LEN];
        let mut out = Writer(&mut bytes, 0);
        out.put(&TRAILER_MAGIC);
        out.put(&VERSION.to_le_bytes());
        out.put(&0u32.to_le_bytes());
        out.put(&self.namespace);
        out.put(&self.key);
        out.put(&self.pool);
        out.put(&self.len.to_le_bytes());
        out.put(&self.written.to_le_bytes());
        out.put(&self.crc.to_le_bytes());
        let crc = crc32c::crc32c(bytes.split_at(TRAILER_LEN - 4).0);
        Writer(&mut bytes, TRAILER_LEN - 4).put(&crc.to_le_bytes());
        bytes
    }

    /// Reads a trailer; the error says what is wrong with it.
    pub fn decode(bytes: &[u8; TRAILER_LEN]) -> Result<Trailer, &'static str> {
        let (body, crc) = bytes.split_at(TRAILER_LEN - 4);
        let mut input = Reader(body);
        if input.take() != Some(TRAILER_MAGIC) {
            return Err("it does not end in a page trailer");
        }
        if crc != crc32c::crc32c(body).to_le_bytes() {
            return Err("the checksum of its trailer is wrong");
        }
        if input.u32() != Some(VERSION) {
            return Err("it has another format version");
        }
        let fields = (|| {
            input.u32()?;
            let (namespace, key, pool) = (input.take()?, input.take()?, input.take()?);
            let (len, written, crc) = (input.u64()?, input.u64()?, input.u32()?);
            Some(Trailer { namespace, key, pool, len, crc, written })
        })();
        fields.ok_or("its trailer is short")
    }
}

/// One page in the table of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Key of the page.
    pub key: PageKey,
    /// Tag of the pool.
    pub tag: String,
    /// Bytes from the start of the group to the payload.
    pub offset: u64,
    /// Bytes of the payload.
    pub len: u64,
    /// CRC-32C of the payload.
    pub crc: u32,
    /// Whether the page was removed.
    pub dead: bool,
}

/// The head of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupHead {
    /// Entries in the table.
    pub count: usize,
    /// Bytes of the group, from its head to where the next one may start.
    pub len: u64,
    /// When it was written, in seconds since 1970.
    pub written: u64,
    crc: u32,
}

/// Bytes of head and table of a group of `count` pages.
pub fn table_len(count: usize) -> u64 {
    (GROUP_HEAD_LEN + count * ENTRY_LEN) as u64
}

/// Bytes of a group whose payloads have `payload` bytes.
pub fn group_len(count: usize, payload: u64) -> u64 {
    (table_len(count) + payload).next_multiple_of(GROUP_ALIGN)
}

/// Head and table of a group.
pub fn encode_group<'a>(
    namespace: &[u8; 32],
    written: u64,
    len: u64,
    entries: impl ExactSizeIterator<Item = (&'a PageKey, &'a str, u64, u64, u32)>,
) -> Vec<u8> {
    let count = entries.len();
    let mut bytes = vec![0; table_len(count) as usize];
    let mut out = Writer(&mut bytes, GROUP_HEAD_LEN);
    for (key, tag, offset, len, crc) in entries {
        out.put(key);
        let mut padded = [0; 32];
        Writer(&mut padded, 0).put(tag.as_bytes());
        out.put(&padded);
        out.put(&offset.to_le_bytes());
        out.put(&len.to_le_bytes());
        out.put(&crc.to_le_bytes());
        out.put(&[0; 12]);
    }
    let mut out = Writer(&mut bytes, 0);
    out.put(&GROUP_MAGIC);
    out.put(&VERSION.to_le_bytes());
    out.put(&(count as u32).to_le_bytes());
    out.put(&len.to_le_bytes());
    out.put(&written.to_le_bytes());
    out.put(namespace.split_at(16).0);
    let crc = crc32c::crc32c(&bytes);
    Writer(&mut bytes, GROUP_HEAD_LEN - 4).put(&crc.to_le_bytes());
    bytes
}

/// Reads a group's head. None: no group starts here (yet).
pub fn decode_head(bytes: &[u8], namespace: &[u8; 32]) -> Option<GroupHead> {
    let mut input = Reader(bytes.get(..GROUP_HEAD_LEN)?);
    if input.take() != Some(GROUP_MAGIC) || input.u32() != Some(VERSION) {
        return None;
    }
    let (count, len, written) = (input.u32()? as usize, input.u64()?, input.u64()?);
    if input.take::<16>()? != *namespace.first_chunk::<16>()? || count == 0 || count > GROUP_ENTRIES_MAX {
        return None;
    }
    input.take::<12>()?;
    let crc = input.u32()?;
    (len % GROUP_ALIGN == 0 && len >= table_len(count)).then_some(GroupHead { count, len, written, crc })
}

/// Reads a group's table from its head and entries; none when its checksum or one of its entries is wrong.
pub fn decode_table(head: &GroupHead, mut bytes: Vec<u8>) -> Option<Vec<Entry>> {
    if bytes.len() as u64 != table_len(head.count) {
        return None;
    }
    let mut dead = Vec::with_capacity(head.count);
    for entry in bytes.split_at_mut(GROUP_HEAD_LEN).1.chunks_exact_mut(ENTRY_LEN) {
        // The state changes after the table was written, so the checksum is over the state of a page that is there.
        let state = entry.get_mut(ENTRY_STATE_AT as usize..ENTRY_STATE_AT as usize + 4)?;
        dead.push(*state != [0; 4]);
        state.fill(0);
    }
    bytes.get_mut(GROUP_HEAD_LEN - 4..GROUP_HEAD_LEN)?.fill(0);
    if crc32c::crc32c(&bytes) != head.crc {
        return None;
    }
    let entries = bytes.split_at(GROUP_HEAD_LEN).1.chunks_exact(ENTRY_LEN);
    entries
        .zip(dead)
        .map(|(entry, dead)| {
            let mut input = Reader(entry);
            let key = input.take()?;
            let tag: [u8; 32] = input.take()?;
            let (offset, len, crc) = (input.u64()?, input.u64()?, input.u32()?);
            let text = tag.split(|byte| *byte == 0).next().and_then(|text| std::str::from_utf8(text).ok())?;
            if !is_tag(text) || offset < table_len(head.count) || offset.checked_add(len)? > head.len {
                return None;
            }
            Some(Entry { key, tag: text.to_owned(), offset, len, crc, dead })
        })
        .collect()
}

const _: () = assert!(TAG_MAX <= 32);

#[cfg(test)]
mod tests {
    use super::*;

    const TRAILER: Trailer = Trailer {
        namespace: [1; 32],
        key: [2; 32],
        pool: [3; 8],
        len: 1 << 40,
        crc: 0xdead_beef,
        written: 1_700_000_000,
    };

    #[test]
    fn every_flipped_bit_of_a_trailer_is_noticed() {
        let bytes = TRAILER.encode();
        assert_eq!(Trailer::decode(&bytes), Ok(TRAILER));
        for bit in 0..TRAILER_LEN * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Trailer::decode(&damaged).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn every_flipped_bit_of_a_table_is_noticed_but_for_the_states() {
        let keys = [[5; 32], [6; 32]];
        let len = group_len(2, 300);
        let entries =
            [(&keys[0], "kv-00000000", table_len(2), 100, 7), (&keys[1], "swa-1", table_len(2) + 100, 200, 8)];
        let bytes = encode_group(&[9; 32], 77, len, entries.into_iter());
        let decode = |bytes: &[u8]| decode_table(&decode_head(bytes, &[9; 32])?, bytes.to_vec());
        let table = decode(&bytes).unwrap();
        assert_eq!((table[1].key, table[1].tag.as_str(), table[1].len, table[1].crc), (keys[1], "swa-1", 200, 8));
        assert!(decode_head(&bytes, &[8; 32]).is_none(), "another namespace");
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let at = (bit / 8).checked_sub(GROUP_HEAD_LEN).map(|at| at % ENTRY_LEN);
            match at {
                Some(at) if (ENTRY_STATE_AT as usize..ENTRY_STATE_AT as usize + 4).contains(&at) => {
                    assert!(decode(&damaged).unwrap().iter().any(|entry| entry.dead), "bit {bit}");
                }
                _ => assert!(decode(&damaged).is_none(), "bit {bit}"),
            }
        }
    }
}
