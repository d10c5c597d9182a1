//! The seal: bytes beside each host page by which the host knows the page again, whoever stored it.
//!
//! | offset | bytes | content |
//! | --- | --- | --- |
//! | 0 | 8 | `KVDKSEAL` |
//! | 8 | 4 | format version, 1 |
//! | 12 | 4 | number of components: layers times 2, or of every pool the layers that it has |
//! | 16 | 32 | identity digest: what decides a page's bytes besides its tokens |
//! | 48 | 32 | page key |
//! | 80 | 4 each | CRC-32C of the K of each layer, then of the V of each layer; so pool by pool where there are several |
//! | then | 4 | CRC-32C of all seal bytes before |
//!
//! Numbers are little endian; the rest of the segment is zero. Backends move it as payload.

use crate::plugin::backend::PageKey;

const MAGIC: [u8; 8] = *b"KVDKSEAL";
const VERSION: u32 = 1;
const CHECKSUMS: usize = 80;

/// What is wrong with a page that came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SealFault {
    /// Not a seal, or a damaged one.
    #[error("the seal is damaged")]
    Damaged,
    /// A seal of another format.
    #[error("the seal has format version {found}, expected {VERSION}")]
    Version { found: u32 },
    /// The page of another model, dtype, layout or build.
    #[error("the page was written under another identity")]
    Identity,
    /// Another page.
    #[error("the page has another key")]
    Key,
    /// The payload changed.
    #[error("the checksum of component {component} is wrong")]
    Payload { component: usize },
}

/// Writes and checks the seals of one pool.
#[derive(Debug, Clone)]
pub(crate) struct SealFormat {
    identity: [u8; 32],
    components: usize,
}

impl SealFormat {
    /// Seals of pages of so many components, bound to `identity`.
    pub fn new(identity: [u8; 32], components: usize) -> Self {
        SealFormat { identity, components }
    }

    /// Bytes that are used.
    pub fn len(&self) -> usize {
        CHECKSUMS + 4 * self.components + 4
    }

    /// Writes a seal over `out`, which has at least [`SealFormat::len`] bytes. `checksums` are those of
    /// the components in order.
    pub fn write(&self, out: &mut [u8], key: &PageKey, checksums: impl Iterator<Item = u32>) {
        out.fill(0);
        let mut seal = Vec::with_capacity(self.len());
        seal.extend_from_slice(&MAGIC);
        seal.extend_from_slice(&VERSION.to_le_bytes());
        seal.extend_from_slice(&(self.components as u32).to_le_bytes());
        seal.extend_from_slice(&self.identity);
        seal.extend_from_slice(key);
        for checksum in checksums {
            seal.extend_from_slice(&checksum.to_le_bytes());
        }
        let own = crc32c::crc32c(&seal);
        seal.extend_from_slice(&own.to_le_bytes());
        if let Some(space) = out.get_mut(..seal.len()) {
            space.copy_from_slice(&seal);
        }
    }

    /// Checks a seal against what the page should be. Payload checksums are computed only if all
    /// else is right.
    pub fn verify(&self, seal: &[u8], key: &PageKey, checksums: impl Iterator<Item = u32>) -> Result<(), SealFault> {
        let seal = seal.get(..self.len()).ok_or(SealFault::Damaged)?;
        let (body, own) = seal.split_at(self.len() - 4);
        let (head, sums) = body.split_at(CHECKSUMS);
        if head.get(..8) != Some(&MAGIC[..]) {
            return Err(SealFault::Damaged);
        }
        let version = word(head, 8);
        if version != VERSION {
            return Err(SealFault::Version { found: version });
        }
        if crc32c::crc32c(body).to_le_bytes() != *own || word(head, 12) as usize != self.components {
            return Err(SealFault::Damaged);
        }
        if head.get(16..48) != Some(&self.identity[..]) {
            return Err(SealFault::Identity);
        }
        if head.get(48..80) != Some(&key[..]) {
            return Err(SealFault::Key);
        }
        let stored = sums.chunks_exact(4);
        for (component, (stored, found)) in stored.zip(checksums).enumerate() {
            if stored != found.to_le_bytes() {
                return Err(SealFault::Payload { component });
            }
        }
        Ok(())
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUMS: [u32; 4] = [11, 22, 33, 44];

    fn sealed(format: &SealFormat) -> Vec<u8> {
        let mut seal = vec![0xAA; 256];
        format.write(&mut seal, &[5; 32], SUMS.into_iter());
        seal
    }

    #[test]
    fn a_sealed_page_is_known_again() {
        let format = SealFormat::new([1; 32], 4);
        let seal = sealed(&format);
        format.verify(&seal, &[5; 32], SUMS.into_iter()).unwrap();
        assert!(seal[format.len()..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn any_flipped_bit_of_the_seal_is_found() {
        let format = SealFormat::new([1; 32], 4);
        let seal = sealed(&format);
        for bit in 0..format.len() * 8 {
            let mut bad = seal.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(format.verify(&bad, &[5; 32], SUMS.into_iter()).is_err(), "bit {bit}");
        }
    }

    /// Dtype, layout and weights are part of the identity, so pages of another dtype never pass.
    #[test]
    fn i33268_pages_of_another_identity_do_not_pass() {
        let format = SealFormat::new([1; 32], 4);
        let other = SealFormat::new([2; 32], 4);
        assert_eq!(other.verify(&sealed(&format), &[5; 32], SUMS.into_iter()), Err(SealFault::Identity));
    }

    #[test]
    fn i27504_wrong_key_payload_or_length_do_not_pass() {
        let format = SealFormat::new([1; 32], 4);
        let seal = sealed(&format);
        assert_eq!(format.verify(&seal, &[6; 32], SUMS.into_iter()), Err(SealFault::Key));
        assert_eq!(
            format.verify(&seal, &[5; 32], [11, 22, 34, 44].into_iter()),
            Err(SealFault::Payload { component: 2 })
        );
        assert_eq!(format.verify(&seal[..20], &[5; 32], SUMS.into_iter()), Err(SealFault::Damaged));
        assert_eq!(format.verify(&[0; 256], &[5; 32], SUMS.into_iter()), Err(SealFault::Damaged));
        let fewer = SealFormat::new([1; 32], 2);
        assert!(fewer.verify(&seal, &[5; 32], SUMS.into_iter()).is_err());
    }

    #[test]
    fn a_later_format_is_told_apart_from_damage() {
        let format = SealFormat::new([1; 32], 4);
        let mut seal = sealed(&format);
        seal[8] = 9;
        assert_eq!(format.verify(&seal, &[5; 32], SUMS.into_iter()), Err(SealFault::Version { found: 9 }));
    }
}
