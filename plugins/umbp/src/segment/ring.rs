//! Reads through io_uring, many in flight.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::{IoUring, opcode, types};

use super::log::Segment;

/// Operations that a ring has room for at most; more of them wait for their turn.
const MOST: u32 = 256;
/// Bytes of one operation.
const PIECE: usize = 1 << 20;

/// A ring.
pub struct Ring {
    ring: IoUring,
    depth: usize,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("depth", &self.depth).finish_non_exhaustive()
    }
}

/// One read of a segment.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// The file.
    pub segment: &'a Segment,
    /// Whether its bytes are whole blocks.
    pub aligned: bool,
    /// Where it begins.
    pub offset: u64,
    /// Where the bytes go.
    pub bytes: &'a mut [u8],
}

struct Piece {
    wanted: usize,
    at: usize,
    len: usize,
}

impl Ring {
    /// A ring, where the kernel has them.
    ///
    /// # Errors
    /// Where it has not.
    pub fn new(depth: u32) -> io::Result<Ring> {
        let entries = depth.clamp(1, MOST).next_power_of_two();
        Ok(Ring { ring: IoUring::new(entries)?, depth: depth.clamp(1, MOST) as usize })
    }

    /// Reads; when it returns, nothing is under way. What a ring can't read in full is read without one.
    pub fn read(&mut self, wanted: &mut [Wanted<'_>]) -> Vec<io::Result<()>> {
        let mut results: Vec<io::Result<()>> = wanted.iter().map(|_| Ok(())).collect();
        let mut pieces = Vec::new();
        for (number, one) in wanted.iter().enumerate() {
            let starts = (0..one.bytes.len()).step_by(PIECE);
            pieces.extend(starts.map(|at| Piece { wanted: number, at, len: PIECE.min(one.bytes.len() - at) }));
        }
        let (mut next, mut flying) = (0, 0);
        let mut again = Vec::new();
        while next < pieces.len() || flying > 0 {
            while flying < self.depth
                && let Some(piece) = pieces.get(next)
            {
                let Some(one) = wanted.get_mut(piece.wanted) else { break };
                let Some(room) = one.bytes.get_mut(piece.at..piece.at + piece.len) else { break };
                let fd = types::Fd(one.segment.file(one.aligned).as_raw_fd());
                let entry = opcode::Read::new(fd, room.as_mut_ptr(), room.len() as u32)
                    .offset(one.offset + piece.at as u64)
                    .build()
                    .user_data(next as u64);
                // SAFETY: file and bytes outlive the operation: this function does not return before everything in flight has completed.
                if unsafe { self.ring.submission().push(&entry) }.is_err() {
                    break;
                }
                next += 1;
                flying += 1;
            }
            if self.ring.submit_and_wait(1).is_err() {
                // Interrupted, or the kernel is short of something for a moment. What is in flight still has to be waited for.
                std::thread::sleep(Duration::from_micros(100));
            }
            for done in self.ring.completion() {
                flying -= 1;
                let number = done.user_data() as usize;
                if pieces.get(number).is_some_and(|piece| done.result() != piece.len as i32) {
                    again.push(number);
                }
            }
        }
        for number in again {
            let Some(piece) = pieces.get(number) else { continue };
            let (Some(one), Some(result)) = (wanted.get_mut(piece.wanted), results.get_mut(piece.wanted)) else {
                continue;
            };
            let at = one.offset + piece.at as u64;
            let (segment, aligned) = (one.segment, one.aligned);
            let bytes = one.bytes.get_mut(piece.at..piece.at + piece.len).unwrap_or_default();
            if let Err(error) = segment.read(bytes, at, aligned) {
                *result = Err(error);
            }
        }
        results
    }
}
