//! What the memory of the machine allows.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Result, anyhow};

/// Bytes that one sample reads at the least: some tens of milliseconds.
const SAMPLE: usize = 1 << 30;

/// Memory that threads read, each a part of its own.
pub struct Memory {
    parts: Vec<Vec<u64>>,
}

impl Memory {
    /// So many bytes for so many threads together. What a step reads again and again may stay in the last cache in part, so the limit of a
    /// step is what threads get of as many bytes, read again and again.
    pub fn new(threads: usize, bytes: usize) -> Self {
        let threads = threads.max(1);
        Self { parts: (0..threads).map(|thread| vec![thread as u64 + 1; bytes.div_ceil(8 * threads)]).collect() }
    }

    /// Bytes a second that the threads read together, after a pass that is not timed.
    ///
    /// # Errors
    /// When a thread can't be started.
    pub fn read_rate(&self) -> Result<f64> {
        let bytes: usize = self.parts.iter().map(|part| part.len() * 8).sum();
        let passes = SAMPLE.div_ceil(bytes.max(1));
        self.read(1)?;
        let start = Instant::now();
        self.read(passes)?;
        Ok((bytes * passes) as f64 / start.elapsed().as_secs_f64())
    }

    fn read(&self, passes: usize) -> Result<()> {
        let read = |part: &[u64]| {
            for _ in 0..passes {
                black_box(black_box(part).iter().fold(0u64, |sum, word| sum.wrapping_add(*word)));
            }
        };
        std::thread::scope(|scope| {
            let readers: Vec<_> = self.parts.iter().map(|part| scope.spawn(move || read(part))).collect();
            readers.into_iter().try_for_each(|reader| reader.join().map_err(|_| anyhow!("a reader panicked")))
        })
    }
}
