//! The page hash chain: what a page is called in storage.
//!
//! The key of a page is the SHA-256 of the key before it and of its tokens, so it names the whole
//! prefix that ends with the page. The first page of a chain starts from the namespace's seed, or
//! from nothing. The key covers tokens and namespace alone; what else decides a page's bytes
//! (weights, dtype, layout, page size, numerics) is bound by the backend's namespace and by the
//! page's seal.

use sha2::{Digest, Sha256};

use crate::plugin::backend::PageKey;

const NAMESPACE_TAG: &[u8] = b"sglang-cache-namespace-v1";
const WIDE_TAG: u8 = 0xFF;

/// A token that has no place in a hash chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("token id {0} is out of range: a page hash takes 0 to 2^63 - 1")]
pub struct TokenOutOfRange(pub i128);

/// The seed of a namespace, or none where neither part is set.
pub fn namespace_seed(extra_key: Option<&str>, cache_salt: Option<&str>) -> Option<PageKey> {
    if extra_key.is_none() && cache_salt.is_none() {
        return None;
    }
    let mut hasher = Sha256::new();
    hasher.update(NAMESPACE_TAG);
    for part in [extra_key, cache_salt] {
        match part {
            None => hasher.update([0u8]),
            Some(text) => {
                hasher.update([1u8]);
                hasher.update((text.len() as u64).to_le_bytes());
                hasher.update(text.as_bytes());
            }
        }
    }
    Some(hasher.finalize().into())
}

/// Key of one page of plain 32-bit tokens after `prior`.
pub fn page_key(prior: Option<&PageKey>, tokens: &[u32]) -> PageKey {
    let mut hasher = Sha256::new();
    if let Some(prior) = prior {
        hasher.update(prior);
    }
    // The words go in as little-endian bytes, a block at a time.
    let mut block = [0u8; 256];
    for chunk in tokens.chunks(block.len() / 4) {
        for (bytes, token) in block.chunks_exact_mut(4).zip(chunk) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        hasher.update(&block[..chunk.len() * 4]);
    }
    hasher.finalize().into()
}

/// Keys of the whole pages of `tokens`, which follow `prior`. Tokens after the last whole page
/// have no key.
pub fn chain_keys(prior: Option<PageKey>, tokens: &[u32], page_size: usize) -> Vec<PageKey> {
    let mut prior = prior;
    tokens
        .chunks_exact(page_size.max(1))
        .map(|page| {
            let key = page_key(prior.as_ref(), page);
            prior = Some(key);
            key
        })
        .collect()
}

/// Key of one page of words of any width: narrow if all fit 32 bits, else wide.
fn word_key(prior: Option<&PageKey>, words: &[u64]) -> Result<PageKey, TokenOutOfRange> {
    if let Some(&word) = words.iter().find(|&&word| word > i64::MAX as u64) {
        return Err(TokenOutOfRange(word.into()));
    }
    let mut hasher = Sha256::new();
    if let Some(prior) = prior {
        hasher.update(prior);
    }
    if words.iter().all(|&word| word <= u32::MAX.into()) {
        for &word in words {
            hasher.update((word as u32).to_le_bytes());
        }
    } else {
        hasher.update([WIDE_TAG]);
        for &word in words {
            hasher.update(word.to_le_bytes());
        }
    }
    Ok(hasher.finalize().into())
}

fn keys_of_pages<'a>(
    prior: Option<PageKey>,
    pages: impl Iterator<Item = std::borrow::Cow<'a, [u64]>>,
) -> Result<Vec<PageKey>, TokenOutOfRange> {
    let mut prior = prior;
    pages
        .map(|words| {
            let key = word_key(prior.as_ref(), &words)?;
            prior = Some(key);
            Ok(key)
        })
        .collect()
}

/// Checks ids that come as signed numbers.
pub fn checked_ids(ids: &[i64]) -> Result<Vec<u64>, TokenOutOfRange> {
    ids.iter().map(|&id| u64::try_from(id).map_err(|_| TokenOutOfRange(id.into()))).collect()
}

/// Keys of wide tokens (multimodal placeholders are content hashes that do not fit 32 bits). Each
/// page is narrow or wide by itself. `page_size` none makes one key over everything; a trailing
/// partial page has a key too, so callers that store whole pages cut it off before.
pub fn wide_chain_keys(
    prior: Option<PageKey>,
    ids: &[u64],
    page_size: Option<usize>,
) -> Result<Vec<PageKey>, TokenOutOfRange> {
    tuple_chain_keys(prior, ids, 1, page_size)
}

/// Keys of tuple tokens of `width` words each, given flattened.
pub fn tuple_chain_keys(
    prior: Option<PageKey>,
    words: &[u64],
    width: usize,
    page_size: Option<usize>,
) -> Result<Vec<PageKey>, TokenOutOfRange> {
    match page_size {
        None => Ok(vec![word_key(prior.as_ref(), words)?]),
        Some(page_size) => {
            let page_words = page_size.max(1) * width.max(1);
            keys_of_pages(prior, words.chunks(page_words).map(Into::into))
        }
    }
}

/// Keys of bigram units, as drafts that look one token ahead use them: unit `i` is the pair of
/// tokens `i` and `i + 1`, so adjacent pages share a raw token, and a sequence of `m` tokens has
/// `m - 1` units. Never equal to plain keys of the same text.
pub fn bigram_chain_keys(
    prior: Option<PageKey>,
    ids: &[u64],
    page_size: Option<usize>,
) -> Result<Vec<PageKey>, TokenOutOfRange> {
    let units: Vec<u64> = ids.windows(2).flatten().copied().collect();
    tuple_chain_keys(prior, &units, 2, page_size)
}

/// Lower-case hexadecimal form of a key, as object names use it.
pub fn key_hex(key: &PageKey) -> String {
    key.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(keys: &[PageKey]) -> Vec<String> {
        keys.iter().map(key_hex).collect()
    }

    const FIRST: &str = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72";
    const SECOND: &str = "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6";

    #[test]
    fn plain_vectors() {
        let keys = chain_keys(None, &[1, 2, 3, 4, 5, 6, 7, 8, 9], 4);
        assert_eq!(hex(&keys), [FIRST, SECOND], "the ninth token fills no page");
        assert!(chain_keys(None, &[], 4).is_empty());
        assert!(chain_keys(None, &[1, 2, 3], 4).is_empty());
    }

    #[test]
    fn chain_goes_on_from_any_page() {
        let first = chain_keys(None, &[1, 2, 3, 4], 4);
        let rest = chain_keys(Some(first[0]), &[5, 6, 7, 8], 4);
        assert_eq!(hex(&rest), [SECOND]);
        let unanchored = chain_keys(None, &[5, 6, 7, 8], 4);
        assert_ne!(unanchored, rest, "a suffix has another key than the same tokens in a chain");
    }

    #[test]
    fn long_pages_are_hashed_whole() {
        let tokens: Vec<u32> = (0..1000).collect();
        let wide: Vec<u64> = (0..1000).collect();
        assert_eq!(chain_keys(None, &tokens, 500), wide_chain_keys(None, &wide, Some(500)).unwrap());
    }

    #[test]
    fn wide_vectors() {
        let keys = wide_chain_keys(None, &[1, 1 << 32], Some(2)).unwrap();
        assert_eq!(hex(&keys), ["66af2f218931e670270f1b4ea79f49befb670188f60c94856ed7a1743298f181"]);
        let narrow = wide_chain_keys(None, &[1, 2, 3, 4], Some(4)).unwrap();
        assert_eq!(hex(&narrow), [FIRST], "narrow pages equal the plain form");
        let mixed = wide_chain_keys(None, &[1, 2, 3, 4, 5, 6, 7, 1 << 40], Some(4)).unwrap();
        assert_eq!(hex(&mixed[..1]), [FIRST], "wideness is a page's own");
        assert_ne!(hex(&mixed[1..]), [SECOND]);
    }

    #[test]
    fn ids_out_of_range_are_refused() {
        assert_eq!(wide_chain_keys(None, &[1, 1 << 63], Some(2)), Err(TokenOutOfRange(1 << 63)));
        assert_eq!(checked_ids(&[3, -1]), Err(TokenOutOfRange(-1)));
        assert_eq!(checked_ids(&[3, 0]), Ok(vec![3, 0]));
    }

    #[test]
    fn bigram_vectors() {
        let keys = bigram_chain_keys(None, &[1, 2, 3, 4, 5], Some(4)).unwrap();
        assert_eq!(hex(&keys), ["f721fe42aac11dcbfd1a17f24cc5765a0d5b6bc264d1c0b6581d775a7344c11f"]);
        let wide = bigram_chain_keys(None, &[1, 2, 1 << 32], Some(2)).unwrap();
        assert_eq!(hex(&wide), ["ce04301f1a9d619d0eb13416d6e3162be589a46808367653c97bb5e7f826a685"]);
    }

    /// A page boundary counts the following page's first token, so one wide token can make two
    /// bigram pages wide.
    #[test]
    fn i19570_bigram_and_plain_units_do_not_mix() {
        let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
        let bigram = bigram_chain_keys(None, &tokens, Some(4)).unwrap();
        let plain = wide_chain_keys(None, &tokens, Some(4)).unwrap();
        assert_eq!(bigram.len(), 2, "7 units: one page and a partial one");
        assert_eq!(plain.len(), 2);
        assert!(bigram.iter().all(|key| !plain.contains(key)));
        let low = bigram_chain_keys(None, &[1, 2, 3, 4, 5, 6], Some(2)).unwrap();
        let high = bigram_chain_keys(None, &[1, 2, 1 << 33, 4, 5, 6], Some(2)).unwrap();
        assert_ne!(low[0], high[0]);
    }

    #[test]
    fn i12025_tuple_tokens_are_flattened_by_width() {
        let flat = [1, 10, 2, 20, 3, 30, 4, 40];
        let tuples = tuple_chain_keys(None, &flat, 2, Some(2)).unwrap();
        let words = wide_chain_keys(None, &flat, Some(4)).unwrap();
        assert_eq!(tuples, words);
        assert_eq!(
            hex(&tuple_chain_keys(None, &[1, 2, 3, 4], 2, None).unwrap()),
            [FIRST],
            "without a page size one key stands for everything"
        );
        assert!(tuple_chain_keys(None, &[], 2, Some(4)).unwrap().is_empty());
    }

    #[test]
    fn namespace_vectors() {
        assert_eq!(namespace_seed(None, None), None);
        let salt = namespace_seed(None, Some("tenant-a")).unwrap();
        assert_eq!(key_hex(&salt), "9d303df3761a7561353e2ae7459eb4ab12a08abb37951b696aa4f0c059c7caaa");
        assert_eq!(
            hex(&chain_keys(Some(salt), &[1, 2, 3, 4], 4)),
            ["2fd053693d7ef6aeb2f9315a5ca100dfe4b99434c563241ee3243a9163846222"]
        );
        assert_eq!(
            key_hex(&namespace_seed(Some("lora1"), None).unwrap()),
            "69df3de801c43e60adaa856ad245421b72609a9c94f2c6cc263c4d6c4497c3c5"
        );
    }

    /// Parts are tagged and carry their length, so no two namespaces share a seed by shifting
    /// bytes between the parts.
    #[test]
    fn i24638_adapter_and_salt_never_collide() {
        let seeds = [
            namespace_seed(Some("ab"), None),
            namespace_seed(None, Some("ab")),
            namespace_seed(Some("a"), Some("b")),
            namespace_seed(Some("ab"), Some("")),
            namespace_seed(Some(""), Some("ab")),
        ];
        for (i, a) in seeds.iter().enumerate() {
            assert!(a.is_some());
            assert!(seeds[i + 1..].iter().all(|b| a != b));
        }
    }

    #[test]
    fn i8342_wide_placeholder_ids_count_in_full() {
        let image_a = [7, 0x1_0000_0001, 9, 10];
        let image_b = [7, 0x2_0000_0001, 9, 10];
        let a = wide_chain_keys(None, &image_a, Some(4)).unwrap();
        let b = wide_chain_keys(None, &image_b, Some(4)).unwrap();
        assert_ne!(a, b, "ids that agree in their low 32 bits have different keys");
    }
}
