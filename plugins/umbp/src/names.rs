//! Names of objects, and which parts of a page each object has.

use std::ops::Range;

use data_encoding::HEXLOWER;
use kvdock_plugin_api::{ComponentKind, Error, ErrorKind, Identity, PageKey, Pool, PoolRole, Result};
use sha2::{Digest, Sha256};

use crate::config::Scheme;

/// Makes names.
#[derive(Debug, Clone)]
pub struct Names {
    scheme: Scheme,
    /// Stands before all names of ours, or before those of side pools in SGLang's scheme.
    prefix: String,
    /// Rank part of names for pages that are split over ranks.
    split: String,
    /// Rank part of names for pages that all ranks hold.
    replicated: String,
    shares_heads: bool,
    /// Every rank holds the same bytes in the anchor.
    same_on_ranks: bool,
}

/// The objects that a page of a pool is stored as.
#[derive(Debug, Clone)]
pub struct PoolNames {
    /// Before the key.
    before: String,
    /// After the key, and the segments of the page that the object has.
    pub parts: Vec<(String, Range<usize>)>,
}

impl Names {
    /// Names for a worker.
    pub fn new(scheme: Scheme, tag: &str, identity: &Identity) -> Names {
        let prefix = match scheme {
            Scheme::Kvdock => {
                let dash = if tag.is_empty() { "" } else { "-" };
                let mut prefix = format!("{tag}{dash}kvdock/");
                HEXLOWER.encode_append(identity.namespace.get(..16).unwrap_or_default(), &mut prefix);
                prefix.push('/');
                prefix
            }
            Scheme::Sglang => {
                let model = identity.model_name.replace('/', "-");
                [tag, &model].iter().filter(|part| !part.is_empty()).map(|part| format!("{part}_")).collect()
            }
        };
        let (tp, pp) = (identity.tp, identity.pp);
        let (split, replicated) = match pp.1 > 1 {
            true => (format!("{}_{}", tp.0, pp.0), pp.0.to_string()),
            false => (tp.0.to_string(), String::new()),
        };
        let shares_heads = identity.tp_lcm_size > tp.1;
        Names { scheme, prefix, split, replicated, shares_heads, same_on_ranks: identity.replicated }
    }

    /// What all names of this worker's model begin with; nothing where the scheme has no such thing.
    pub fn prefix(&self) -> &[u8] {
        match self.scheme {
            Scheme::Kvdock => self.prefix.as_bytes(),
            Scheme::Sglang => b"",
        }
    }

    /// Names for the pages of a pool.
    ///
    /// # Errors
    /// When the scheme has no names for it.
    pub fn pool(&self, pool: &Pool) -> Result<PoolNames> {
        let segments = pool.segments().len();
        if self.scheme == Scheme::Kvdock {
            let before = format!("{}{}/", self.prefix, pool_tag(pool));
            return Ok(PoolNames { before, parts: vec![(String::new(), 0..segments)] });
        }
        let refuse = |what: &str| {
            let text = format!("pool {} ({}): names = \"sglang\" {what}", pool.id(), pool.name());
            Error::new(ErrorKind::Unsupported, text)
        };
        if pool.seal_segment().is_some() {
            return Err(refuse(
                "has no room for the seal; with key_scheme = \"sglang\" in the same table the host describes pools without one",
            ));
        }
        if self.shares_heads {
            return Err(refuse("does not split heads between sizes of tensor parallelism in this version"));
        }
        let anchor = pool.role() == PoolRole::Anchor;
        let replicated = pool.is_replicated() || (anchor && self.same_on_ranks);
        let rank = if replicated { &self.replicated } else { &self.split };
        let kinds: Vec<Option<ComponentKind>> = (0..segments).map(|segment| kind_of(pool, segment)).collect();
        let all = |kind| kinds.iter().all(|found| *found == Some(kind));
        let parts = match (anchor, kinds.as_slice()) {
            // Pages without bytes have no object there; ours is one that nobody else looks for.
            (_, []) => vec![(format!("_{rank}_{}_marker", pool.name()), 0..0)],
            (true, [Some(ComponentKind::K), Some(ComponentKind::V)]) => {
                vec![(format!("_{rank}_k"), 0..1), (format!("_{rank}_v"), 1..2)]
            }
            (true, [_]) if replicated => vec![(format!("_{rank}_k"), 0..1)],
            (true, _) if all(ComponentKind::Kv) => vec![(format!("_{rank}_kv"), 0..segments)],
            (false, [Some(ComponentKind::K), Some(ComponentKind::V)]) => {
                let name = pool.name();
                vec![(format!("_{rank}_{name}_k"), 0..1), (format!("_{rank}_{name}_v"), 1..2)]
            }
            (false, [Some(ComponentKind::TemporalState), rest @ ..])
                if rest.iter().all(|kind| *kind == Some(ComponentKind::ConvState)) =>
            {
                let states = (0..rest.len()).map(|i| (format!("_{}_conv_{i}", self.split), i + 1..i + 2));
                std::iter::once((format!("_{}_temporal", self.split), 0..1)).chain(states).collect()
            }
            (false, [_]) => vec![(format!("_{rank}_{}", pool.name()), 0..1)],
            _ => {
                let layout = pool.layout();
                return Err(refuse(&format!(
                    "knows pages of K and V, of one component, or of states; this one has {segments} segments in the layout {layout}"
                )));
            }
        };
        let before = if anchor { String::new() } else { self.prefix.clone() };
        Ok(PoolNames { before, parts })
    }
}

impl PoolNames {
    /// Name of part `part` of a page.
    pub fn name(&self, part: usize, key: &PageKey) -> Vec<u8> {
        let suffix = self.parts.get(part).map_or("", |(suffix, _)| suffix.as_str());
        let mut name = String::with_capacity(self.before.len() + 64 + suffix.len());
        name.push_str(&self.before);
        HEXLOWER.encode_append(key, &mut name);
        name.push_str(suffix);
        name.into_bytes()
    }
}

/// The kind of what a segment holds, if it holds one kind.
fn kind_of(pool: &Pool, segment: usize) -> Option<ComponentKind> {
    let mut kinds = pool.components().iter().filter(|part| part.segment == segment).map(|part| part.kind);
    let first = kinds.next()?;
    kinds.all(|kind| kind == first).then_some(first)
}

/// What a pool is called in names of ours: up to 20 characters of its own name, and a digest of all that shapes its pages. So pages of
/// another layout, type or size are never found.
fn pool_tag(pool: &Pool) -> String {
    let mut digest = Sha256::new();
    for text in [pool.name(), pool.layout(), pool.dtype().as_str()] {
        digest.update((text.len() as u64).to_le_bytes());
        digest.update(text.as_bytes());
    }
    digest.update(pool.page_tokens().to_le_bytes());
    digest.update(pool.layers().to_le_bytes());
    for segment in pool.segments() {
        digest.update(segment.len.to_le_bytes());
    }
    let plain = |c: char| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '_' };
    let mut tag: String = pool.name().chars().take(20).map(|c| plain(c.to_ascii_lowercase())).collect();
    tag.push('-');
    HEXLOWER.encode_append(digest.finalize().get(..4).unwrap_or_default(), &mut tag);
    tag
}

/// The group of a name of SGLang's: its page hash, so that the parts of a page leave together.
pub fn group(name: &[u8]) -> &[u8] {
    let strip = |name: &[u8]| -> Option<usize> {
        let end = name.len().checked_sub(2)?;
        matches!(name.get(end..), Some(b"_k" | b"_v")).then_some(end)
    };
    let Some(mut end) = strip(name) else { return name };
    for _ in 0..=2 {
        let head = name.get(..end).unwrap_or_default();
        if head.len() == 64 && head.iter().all(u8::is_ascii_hexdigit) {
            return head;
        }
        let digits = head.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
        match head.len().checked_sub(digits + 1) {
            Some(at) if head.get(at) == Some(&b'_') => end = at,
            _ => break,
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_page_hashes() {
        let hash = "0123456789abcdef".repeat(4);
        for (suffix, grouped) in [
            ("_0_k", true),
            ("_0_v", true),
            ("_3_1_v", true),
            ("__k", true),
            ("_1_2_3_k", false),
            ("_x_k", false),
            ("_kv", false),
        ] {
            let name = format!("{hash}{suffix}");
            let found = group(name.as_bytes());
            assert_eq!(found == hash.as_bytes(), grouped, "{suffix}");
            assert!(grouped || found == name.as_bytes());
        }
        assert_eq!(group(b"beta_0_k"), b"beta_0_k");
    }
}
