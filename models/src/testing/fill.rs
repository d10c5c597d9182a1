//! Numbers that follow from a name.

/// FNV-1a over the name, 64 bits.
fn seed(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The `index`-th uniform number in [0, 1) of the stream that `seed` starts: 24 random bits.
fn uniform(seed: u64, index: u64) -> f64 {
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    (z >> 40) as f64 / f64::from(1u32 << 24)
}

/// `count` numbers from `low` to `high` that follow from `name`.
pub fn fill(name: &str, count: usize, low: f64, high: f64) -> Vec<f32> {
    let seed = seed(name);
    (0..count as u64).map(|index| (low + (high - low) * uniform(seed, index)) as f32).collect()
}

/// `count` token ids below `vocab` that follow from `name`.
pub fn token_ids(name: &str, count: usize, vocab: u32) -> Vec<u32> {
    let seed = seed(name);
    (0..count as u64).map(|index| (f64::from((uniform(seed, index)) as f32) * f64::from(vocab)) as u32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_rule() {
        let embed = fill("embed.weight", 256 * 64, -1.0, 1.0);
        let start = [0.035_039_9, 0.889_698_74, 0.659_263_25, 0.522_226_45];
        for (got, expected) in embed.iter().zip(start) {
            assert!((got - expected).abs() < 1e-7, "{got} {expected}");
        }
        let total: f64 = embed.iter().map(|value| f64::from(*value)).sum();
        assert!((total + 110.641_453_266_1).abs() < 1e-6, "{total}");
    }

    #[test]
    fn tokens_are_those_of_the_rule() {
        assert_eq!(
            token_ids("dsv4.tokens.36", 20, 256),
            [198, 71, 250, 17, 17, 101, 241, 175, 4, 157, 218, 139, 144, 8, 72, 71, 102, 8, 18, 121]
        );
    }
}
