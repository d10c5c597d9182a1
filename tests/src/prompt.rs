//! Prompts of an exact number of tokens.

/// Ids below this are special or bytes in the small model's vocabulary; those above are words.
const FIRST_WORD: u64 = 1000;
/// One past the last id used.
const LAST_WORD: u64 = 40_000;

/// `tokens` token ids, the same for the same `seed` and different from the first token on for another.
pub fn ids(seed: u64, tokens: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..tokens).map(|_| (FIRST_WORD + random.below(LAST_WORD - FIRST_WORD)) as u32).collect()
}

/// Pseudo-random numbers that are the same in every run (splitmix64).
pub struct Random(u64);

impl Random {
    /// A sequence of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number, of all 64 bits.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }
}
