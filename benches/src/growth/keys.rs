//! Prompts that differ from the first page on, made anew whenever they are needed: a list of them would be as large as what is measured.

use super::simulated::PAGE;

/// Tokens of a prompt.
pub const TOKENS: usize = 2048;
/// Pages of a prompt.
pub const PAGES: usize = TOKENS / PAGE;

/// Prompt number `index`.
pub fn prompt(index: u64) -> Vec<u32> {
    let mut random = kvdock_tests::prompt::Random::new(index.wrapping_mul(0x2545_F491_4F6C_DD1D));
    (0..TOKENS).map(|_| random.below(150_000) as u32).collect()
}

/// Bytes that this process holds from its allocator.
pub fn heap() -> f64 {
    // SAFETY: the call takes nothing and answers a structure of numbers.
    let info = unsafe { libc::mallinfo2() };
    (info.uordblks + info.hblkhd) as f64
}
