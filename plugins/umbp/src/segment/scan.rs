//! Finding the records of a segment file.
//!
//! What it costs grows with the length of the file and no faster, whatever the file says: somebody else may have written it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{SeekFrom, seek};

use super::record::{BLOCK, HEADER, Header, Version};

/// Bytes that checksums are made of at a time.
const CHUNK: usize = 1 << 20;
/// Blocks between two looks at whether the file has a hole here.
const STRIDE: u64 = 256;

/// A record that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Where it begins.
    pub offset: u64,
    /// Its header.
    pub header: Header,
    /// Its key.
    pub key: Vec<u8>,
}

/// What a file holds.
#[derive(Debug, Default)]
pub struct Scan {
    /// Its records, in order, also those that are not committed.
    pub records: Vec<Found>,
    /// Where the last one ends.
    pub end: u64,
    /// Ranges between records that are none, and why.
    pub damaged: Vec<(u64, u64, String)>,
    /// Why the file has bytes after `end`, if it has.
    pub tail: Option<String>,
}

/// Reads the headers of a file from `from` on, up to `len`. After damage it looks for the next record that is whole, checksum and all, so that one bad place costs the
/// records at that place and no others.
///
/// # Errors
/// When the file can't be read.
pub fn scan(file: &File, from: u64, len: u64) -> io::Result<Scan> {
    let mut scan = Scan { end: from, ..Scan::default() };
    let mut sums = None;
    let mut at = from;
    while at < len {
        let why = match header_at(file, at, len)? {
            Ok((header, _)) => {
                let mut key = vec![0; header.key_len as usize];
                file.read_exact_at(&mut key, at + HEADER as u64)?;
                scan.records.push(Found { offset: at, header, key });
                at += header.record_len();
                scan.end = at;
                continue;
            }
            Err(why) => why,
        };
        match next_whole(file, &mut sums, at, len)? {
            Some(next) => {
                scan.damaged.push((at, next, why.to_owned()));
                at = next;
            }
            None => {
                scan.tail = Some(why.to_owned());
                break;
            }
        }
    }
    Ok(scan)
}

/// A header and its bytes, where its record ends within the file.
fn header_at(file: &File, at: u64, len: u64) -> io::Result<Result<(Header, [u8; HEADER]), &'static str>> {
    if at + HEADER as u64 > len {
        return Ok(Err("it ends within its header"));
    }
    let mut bytes = [0; HEADER];
    file.read_exact_at(&mut bytes, at)?;
    let header = match Header::decode(&bytes) {
        Ok(header) => header,
        Err(why) => return Ok(Err(why)),
    };
    if header.version == Version::Three && !at.is_multiple_of(BLOCK) {
        return Ok(Err("it does not begin at a block"));
    }
    if at + header.record_len() > len {
        return Ok(Err("it passes the end of the file"));
    }
    Ok(Ok((header, bytes)))
}

/// The first record with a right checksum at a block behind a bad place. No block is looked at twice in a scan.
fn next_whole<'a>(file: &'a File, sums: &mut Option<Sums<'a>>, bad: u64, len: u64) -> io::Result<Option<u64>> {
    let mut at = (bad / BLOCK + 1) * BLOCK;
    let mut looked = 0u64;
    while at < len {
        if looked.is_multiple_of(STRIDE) {
            match behind_hole(file, at) {
                Some(next) => at = next,
                None => return Ok(None),
            }
            if at >= len {
                break;
            }
        }
        looked += 1;
        if let Ok((header, bytes)) = header_at(file, at, len)?
            && header.version == Version::Three
            && header.checked
            && sums.get_or_insert_with(|| Sums::new(file, at)).record(at, &header, &bytes)? == header.crc
        {
            return Ok(Some(at));
        }
        at += BLOCK;
    }
    Ok(None)
}

/// Where bytes begin that were written, in whole blocks; none when there are no more of them. No record begins in a hole, and a file may have large ones.
fn behind_hole(file: &File, at: u64) -> Option<u64> {
    match seek(file, SeekFrom::Data(at)) {
        Ok(data) => Some((data / BLOCK * BLOCK).max(at)),
        Err(rustix::io::Errno::NXIO) => None,
        // The file system does not tell.
        Err(_) => Some(at),
    }
}

/// Checksums from one block of a file to all later ones. What lies between two places has its checksum from theirs, so that it does not matter how many records claim the
/// same bytes, or how long they are.
struct Sums<'a> {
    file: &'a File,
    start: u64,
    /// Of the bytes from `start` to the end of so many blocks.
    sums: Vec<u32>,
    chunk: Vec<u8>,
}

impl<'a> Sums<'a> {
    fn new(file: &'a File, start: u64) -> Sums<'a> {
        Sums { file, start, sums: vec![0], chunk: Vec::new() }
    }

    /// Of the bytes from `start` to `end`.
    fn up_to(&mut self, end: u64) -> io::Result<u32> {
        let blocks = (end - self.start) / BLOCK;
        while (self.sums.len() as u64) <= blocks {
            let done = self.sums.len() as u64 - 1;
            let len = ((blocks - done) * BLOCK).min(CHUNK as u64) as usize;
            self.chunk.resize(CHUNK, 0);
            let bytes = self.chunk.get_mut(..len).unwrap_or_default();
            self.file.read_exact_at(bytes, self.start + done * BLOCK)?;
            let mut sum = self.sums.last().copied().unwrap_or(0);
            self.sums.extend(bytes.chunks(BLOCK as usize).map(|block| {
                sum = crc32c::crc32c_append(sum, block);
                sum
            }));
        }
        let sum = self.sums.get(blocks as usize).copied().unwrap_or(0);
        let mut rest = [0; BLOCK as usize];
        let rest = rest.get_mut(..(end % BLOCK) as usize).unwrap_or_default();
        self.file.read_exact_at(rest, end - rest.len() as u64)?;
        Ok(crc32c::crc32c_append(sum, rest))
    }

    /// Of the key and the value of a record.
    fn record(&mut self, at: u64, header: &Header, bytes: &[u8; HEADER]) -> io::Result<u32> {
        let key_len = u64::from(header.key_len);
        let (value, end) = (at + header.value_at(), at + header.value_at() + u64::from(header.value_len));
        let key = if key_len < BLOCK {
            let mut key = [0; BLOCK as usize];
            let key = key.get_mut(..key_len as usize).unwrap_or_default();
            self.file.read_exact_at(key, at + HEADER as u64)?;
            crc32c::crc32c(key)
        } else {
            let before = crc32c::crc32c_append(self.up_to(at)?, bytes);
            between(before, self.up_to(at + HEADER as u64 + key_len)?, key_len)
        };
        // Both what stands before the value and the key would be followed by as many bytes: their difference takes the same way.
        let before = self.up_to(value)?;
        Ok(between(before ^ key, self.up_to(end)?, u64::from(header.value_len)))
    }
}

/// The checksum of the last `len` bytes of what has the checksum `whole`, where all before them has the checksum `before`.
fn between(before: u32, whole: u32, len: u64) -> u32 {
    crc32c::crc32c_combine(before, 0, len as usize) ^ whole
}

#[cfg(test)]
mod tests;
