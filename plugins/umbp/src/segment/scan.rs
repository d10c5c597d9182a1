//! Finding the records of a segment file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::record::{BLOCK, Checksum, HEADER, Header, Version};

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
    let mut at = from;
    while at < len {
        let why = match record_at(file, at, len)? {
            Ok(found) => {
                at += found.header.record_len();
                scan.end = at;
                scan.records.push(found);
                continue;
            }
            Err(why) => why,
        };
        match next_whole(file, at, len)? {
            Some(next) => {
                scan.damaged.push((at, next, why));
                at = next;
            }
            None => {
                scan.tail = Some(why);
                break;
            }
        }
    }
    Ok(scan)
}

fn record_at(file: &File, at: u64, len: u64) -> io::Result<Result<Found, String>> {
    let mut header = [0; HEADER];
    if at + HEADER as u64 > len {
        return Ok(Err("it ends within its header".to_owned()));
    }
    file.read_exact_at(&mut header, at)?;
    let header = match Header::decode(&header) {
        Ok(header) => header,
        Err(why) => return Ok(Err(why.to_owned())),
    };
    if header.version == Version::Three && !at.is_multiple_of(BLOCK) {
        return Ok(Err("it does not begin at a block".to_owned()));
    }
    if at + header.record_len() > len {
        return Ok(Err("it passes the end of the file".to_owned()));
    }
    let mut key = vec![0; header.key_len as usize];
    file.read_exact_at(&mut key, at + HEADER as u64)?;
    Ok(Ok(Found { offset: at, header, key }))
}

fn next_whole(file: &File, bad: u64, len: u64) -> io::Result<Option<u64>> {
    let mut at = (bad / BLOCK + 1) * BLOCK;
    while at < len {
        if let Ok(found) = record_at(file, at, len)?
            && found.header.version == Version::Three
            && found.header.checked
            && is_whole(file, &found)?
        {
            return Ok(Some(at));
        }
        at += BLOCK;
    }
    Ok(None)
}

fn is_whole(file: &File, found: &Found) -> io::Result<bool> {
    let header = &found.header;
    let mut sum = Checksum::new(header.version);
    sum.add(&found.key);
    let (mut at, end) =
        (found.offset + header.value_at(), found.offset + header.value_at() + u64::from(header.value_len));
    let mut chunk = vec![0; 1 << 16];
    while at < end {
        let part = chunk.len().min((end - at) as usize);
        let bytes = chunk.get_mut(..part).unwrap_or_default();
        file.read_exact_at(bytes, at)?;
        sum.add(bytes);
        at += part as u64;
    }
    Ok(sum.sum() == header.crc)
}
