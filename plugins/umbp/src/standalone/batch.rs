//! Requests about many objects.

use crate::object::{Piece, Put, Range, Read};
use crate::wire::standalone::{BatchDataRequest, BatchDataWithDepthRequest, BatchRangeDataRequest};

use super::regions::Regions;

/// Objects of one call at most.
pub const OBJECTS: usize = 1024;
/// A range of an object, and where it lies for the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// Offset in the object.
    pub object: u64,
    /// The mapping.
    pub region: u64,
    /// Offset in it.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Places the ranges of an object; those that follow one another in both are one. The error is the piece that lies in no mapping.
pub fn place(regions: &Regions, ranges: impl Iterator<Item = Range>) -> Result<Vec<Placed>, Piece> {
    let mut placed: Vec<Placed> = Vec::new();
    for range in ranges {
        let (region, offset) = regions.find(&range.piece).ok_or(range.piece)?;
        let next = Placed { object: range.offset, region, offset, len: range.piece.len as u64 };
        match placed.last_mut() {
            Some(last)
                if last.region == region
                    && last.offset + last.len == offset
                    && last.object + last.len == range.offset =>
            {
                last.len += next.len;
            }
            _ => placed.push(next),
        }
    }
    Ok(placed)
}

/// The ranges of an object that is put.
pub fn ranges_of(put: &Put) -> impl Iterator<Item = Range> + '_ {
    let mut offset = 0;
    put.pieces.iter().map(move |piece| {
        let range = Range { offset, piece: *piece };
        offset += piece.len as u64;
        range
    })
}

/// Cuts a list of objects, each with so many ranges, into calls. An object is never cut.
pub fn chunks(counts: &[usize], objects: usize, ranges: usize) -> Vec<std::ops::Range<usize>> {
    let mut chunks = Vec::new();
    let (mut start, mut sum) = (0, 0);
    for (at, count) in counts.iter().enumerate() {
        if at > start && (at - start >= objects || sum + count > ranges) {
            chunks.push(start..at);
            (start, sum) = (at, 0);
        }
        sum += count;
    }
    if start < counts.len() {
        chunks.push(start..counts.len());
    }
    chunks
}

fn key(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}

/// Stores objects that each lie in one piece.
pub fn put_whole(client: &str, objects: &[(&Put, Vec<Placed>)]) -> BatchDataWithDepthRequest {
    let first = |get: fn(&Placed) -> u64| objects.iter().filter_map(|(_, placed)| placed.first().map(get)).collect();
    BatchDataWithDepthRequest {
        keys: objects.iter().map(|(put, _)| key(&put.name)).collect(),
        client_id: client.to_owned(),
        shm_offsets: first(|placed| placed.offset),
        sizes: first(|placed| placed.len),
        depths: objects.iter().map(|(put, _)| i32::try_from(put.depth).unwrap_or(i32::MAX)).collect(),
        region_bases: first(|placed| placed.region),
    }
}

/// Reads objects that each go to one piece.
pub fn get_whole(client: &str, objects: &[(&Read, Vec<Placed>)]) -> BatchDataRequest {
    let first = |get: fn(&Placed) -> u64| objects.iter().filter_map(|(_, placed)| placed.first().map(get)).collect();
    BatchDataRequest {
        keys: objects.iter().map(|(read, _)| key(&read.name)).collect(),
        client_id: client.to_owned(),
        shm_offsets: first(|placed| placed.offset),
        sizes: first(|placed| placed.len),
        region_bases: first(|placed| placed.region),
    }
}

/// Stores or reads objects by ranges; a put has the sizes of the objects as well.
pub fn ranged<'a>(
    client: &str,
    objects: impl Iterator<Item = (&'a [u8], &'a [Placed], Option<u64>)>,
) -> BatchRangeDataRequest {
    let mut request = BatchRangeDataRequest { client_id: client.to_owned(), ..BatchRangeDataRequest::default() };
    for (name, placed, size) in objects {
        request.keys.push(key(name));
        request.range_counts.push(placed.len() as u32);
        for range in placed {
            request.shm_offsets.push(range.offset);
            request.region_bases.push(range.region);
            request.sizes.push(range.len);
            request.object_offsets.push(range.object);
        }
        request.object_sizes.extend(size);
    }
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn u07_calls_are_cut_at_objects_by_what_they_really_have() {
        let sizes = |counts: &[usize], objects, ranges| -> Vec<usize> {
            chunks(counts, objects, ranges).into_iter().map(|chunk| chunk.len()).collect()
        };
        assert_eq!(sizes(&[4; 5], 100, 8), [2, 2, 1]);
        assert_eq!(sizes(&[1, 7, 2, 2, 2, 2, 8], 100, 8), [2, 4, 1]);
        assert_eq!(sizes(&[4, 4, 4, 4, 2, 2, 9], 100, 8), [2, 2, 2, 1]);
        assert_eq!(sizes(&[1; 5], 2, 8), [2, 2, 1]);
        assert_eq!(sizes(&[], 2, 8), [] as [usize; 0]);
    }
}
