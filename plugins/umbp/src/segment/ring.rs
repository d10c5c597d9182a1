//! Reads through io_uring, many in flight.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::{IoUring, opcode, types};

use super::file::Segment;

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

/// Takes what was read, or why it could not be, by its number.
pub type Done<'a> = &'a mut dyn FnMut(usize, &[u8], io::Result<()>);

impl Ring {
    /// A ring, where the kernel has them.
    ///
    /// # Errors
    /// Where it has not.
    pub fn new(depth: u32) -> io::Result<Ring> {
        let entries = depth.clamp(1, MOST).next_power_of_two();
        Ok(Ring { ring: IoUring::new(entries)?, depth: depth.clamp(1, MOST) as usize })
    }

    /// Reads, and gives away each of what is wanted as soon as it is there, while others are still on the way. When it returns, nothing is under way. What a ring can't
    /// read in full is read without one.
    pub fn read(&mut self, wanted: &mut [Wanted<'_>], done: Done<'_>) {
        let mut pieces = Vec::new();
        let mut left: Vec<(usize, io::Result<()>)> = Vec::with_capacity(wanted.len());
        for (number, one) in wanted.iter().enumerate() {
            let starts = (0..one.bytes.len()).step_by(PIECE);
            left.push((starts.len(), Ok(())));
            if starts.len() == 0 {
                done(number, &[], Ok(()));
            }
            pieces.extend(starts.map(|at| Piece { wanted: number, at, len: PIECE.min(one.bytes.len() - at) }));
        }
        let (mut next, mut flying) = (0, 0);
        let mut landed = Vec::new();
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
                // SAFETY: file and bytes outlive the operation: this function does not return before everything in flight has completed, and nobody looks at these bytes
                // before that.
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
            landed.clear();
            landed.extend(self.ring.completion().map(|done| (done.user_data() as usize, done.result())));
            flying -= landed.len();
            for (number, result) in &landed {
                let Some(piece) = pieces.get(*number) else { continue };
                let (Some(one), Some((left, outcome))) = (wanted.get_mut(piece.wanted), left.get_mut(piece.wanted))
                else {
                    continue;
                };
                if *result != piece.len as i32 {
                    let bytes = one.bytes.get_mut(piece.at..piece.at + piece.len).unwrap_or_default();
                    if let Err(error) = one.segment.read(bytes, one.offset + piece.at as u64, one.aligned) {
                        *outcome = Err(error);
                    }
                }
                *left -= 1;
                if *left == 0 {
                    done(piece.wanted, one.bytes, std::mem::replace(outcome, Ok(())));
                }
            }
        }
    }
}
