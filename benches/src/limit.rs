//! What the memory of the machine allows.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Result, anyhow};

use crate::Bench;
use crate::sample::median;

/// Bytes that each thread reads: far more than caches hold.
const EACH: usize = 128 << 20;

/// Bytes a second that the compute threads read from memory together.
///
/// # Errors
/// When a thread can't be started.
pub fn memory_read_rate(bench: &Bench) -> Result<f64> {
    let memory: Vec<Vec<u64>> = (0..bench.threads.max(1)).map(|thread| vec![thread as u64 + 1; EACH / 8]).collect();
    let mut rates = Vec::new();
    for _ in 0..=bench.rounds.count {
        let start = Instant::now();
        std::thread::scope(|scope| {
            let readers: Vec<_> = memory
                .iter()
                .map(|part| scope.spawn(|| black_box(part.iter().fold(0u64, |sum, word| sum.wrapping_add(*word)))))
                .collect();
            readers.into_iter().try_for_each(|reader| reader.join().map(drop).map_err(|_| anyhow!("a reader panicked")))
        })?;
        rates.push((EACH * memory.len()) as f64 / start.elapsed().as_secs_f64());
    }
    Ok(median(&mut rates))
}
