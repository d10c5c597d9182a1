//! Random numbers that depend on seed and position alone.

use sha2::{Digest, Sha256};

/// A number in [0, 1), the same for the same seed and position whatever was drawn before.
pub(super) fn uniform(seed: i64, position: u64) -> f64 {
    let mut hash = Sha256::new();
    hash.update(seed.to_le_bytes());
    hash.update(position.to_le_bytes());
    let digest = hash.finalize();
    let mut bits = [0u8; 8];
    for (to, from) in bits.iter_mut().zip(digest) {
        *to = from;
    }
    // The 53 high bits are exact in an f64.
    (u64::from_le_bytes(bits) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_and_position_same_number() {
        assert_eq!(uniform(7, 3).to_bits(), uniform(7, 3).to_bits());
        assert_ne!(uniform(7, 3).to_bits(), uniform(8, 3).to_bits());
        assert_ne!(uniform(7, 3).to_bits(), uniform(7, 4).to_bits());
    }

    #[test]
    fn numbers_are_spread_over_the_unit_interval() {
        const N: u64 = 20_000;
        let mut tenths = [0u32; 10];
        let mut sum = 0.0;
        for position in 0..N {
            let u = uniform(42, position);
            assert!((0.0..1.0).contains(&u));
            tenths[(u * 10.0) as usize] += 1;
            sum += u;
        }
        assert!((sum / N as f64 - 0.5).abs() < 0.01, "mean {}", sum / N as f64);
        for count in tenths {
            // Five standard deviations of a binomial count.
            assert!((f64::from(count) - 2000.0).abs() < 5.0 * 42.5, "{tenths:?}");
        }
    }
}
