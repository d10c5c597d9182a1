//! Cuts a job into requests.

use std::sync::Arc;

use super::{Job, Operation, Outcome};
use crate::memory::Region;
use crate::transport::Transport;

/// Bytes that are never registered for, where the queue pairs take them inline.
pub const INLINE: u64 = 64;
/// Pieces of a request at most.
pub const PIECES: usize = 4;

/// A piece of memory here.
#[derive(Debug)]
pub struct Local {
    pub start: usize,
    pub len: u32,
    /// None for bytes that go inline.
    pub region: Option<Arc<Region>>,
}

/// One request.
#[derive(Debug)]
pub struct Slice {
    pub job: usize,
    pub address: u64,
    pub len: u64,
    pub buffer: usize,
    pub pieces: Vec<Local>,
}

impl Slice {
    /// Whether its bytes have to be taken when it is posted.
    pub fn is_inline(&self) -> bool {
        self.pieces.iter().any(|piece| piece.region.is_none())
    }
}

/// The requests of a job; or why there are none.
pub fn cut(
    transport: &Transport,
    operation: Operation,
    number: usize,
    job: &Job<'_>,
    slices: &mut Vec<Slice>,
) -> Result<(), Outcome> {
    let most = u64::from(transport.config.slice.max(4096));
    let total: u64 = job.pieces.iter().map(|piece| piece.iov_len as u64).sum();
    if total != job.len {
        return Err(Outcome::Unable(format!("{} bytes are to be moved, and there is memory for {total}", job.len)));
    }
    let outside = || Outcome::Rejected(format!("peer {} has no such range", job.peer.server));
    let mut pieces = job.pieces.iter();
    let (mut start, mut left) = (0, 0);
    let mut at = 0;
    while at < job.len {
        let address = job.address.checked_add(at).ok_or_else(outside)?;
        let buffer = job.peer.buffer(address).ok_or_else(outside)?;
        let end = job.peer.buffers.get(buffer).map_or(address, |buffer| buffer.address.saturating_add(buffer.len));
        let rest = job.len - at;
        // A short rest goes with the last one.
        let wished = if rest <= most + most / 4 { rest } else { most };
        let wished = wished.min(end.saturating_sub(address)).min(u64::from(u32::MAX));
        let mut slice = Slice { job: number, address, len: 0, buffer, pieces: Vec::with_capacity(1) };
        while slice.len < wished && slice.pieces.len() < PIECES {
            if left == 0 {
                let Some(piece) = pieces.next() else { break };
                (start, left) = (piece.iov_base as usize, piece.iov_len);
                continue;
            }
            let want = left.min((wished - slice.len) as usize);
            let (region, len) = match transport.find(start, want) {
                Some((region, len)) => (Some(region), len),
                None if operation == Operation::Write && job.len <= INLINE => (None, want),
                None => {
                    return Err(Outcome::Unable("the memory here is not registered with the RDMA devices".to_owned()));
                }
            };
            slice.pieces.push(Local { start, len: len as u32, region });
            slice.len += len as u64;
            start += len;
            left -= len;
        }
        if slice.len == 0 {
            return Err(outside());
        }
        at += slice.len;
        slices.push(slice);
    }
    Ok(())
}
