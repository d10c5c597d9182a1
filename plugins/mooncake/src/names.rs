//! Names of objects. PROTOCOL.md says what they are made of.

mod sglang;

use data_encoding::HEXLOWER;
use kvdock_plugin_api::{CacheMode, Error, ErrorKind, Identity, PageKey, Pool, Result};
use sha2::{Digest, Sha256};

use crate::store::shape::{ObjectShape, Piece};
pub use sglang::Sglang;

/// How the objects of a namespace are named.
#[derive(Debug, Clone)]
pub struct Names {
    prefix: String,
    /// Another engine's scheme; none for kvdock's own.
    sglang: Option<Sglang>,
}

impl Names {
    /// The names of a worker, below an optional tag. The host says in the identity when they are to be another engine's.
    ///
    /// # Errors
    /// When the scheme is not known, or can't name the pages of this worker.
    pub fn of(tag: &str, identity: &Identity, mode: CacheMode) -> Result<Names> {
        let bound: serde_json::Value = serde_json::from_str(&identity.namespace_json).unwrap_or_default();
        match bound.get("key_scheme").and_then(serde_json::Value::as_str) {
            None | Some("kvdock") => Ok(Names::new(tag, &identity.namespace)),
            Some("sglang") => {
                let sglang = Sglang::of(identity, mode)?;
                Ok(Names { prefix: sglang.prefix(tag, identity), sglang: Some(sglang) })
            }
            Some(other) => Err(Error::new(
                ErrorKind::InvalidConfig,
                format!("key_scheme: {other:?} is not known; it takes \"kvdock\" or \"sglang\""),
            )),
        }
    }

    /// Names in a namespace, below an optional tag.
    pub fn new(tag: &str, namespace: &[u8; 32]) -> Names {
        let dash = if tag.is_empty() { "" } else { "-" };
        let mut prefix = format!("{tag}{dash}kvdock/");
        HEXLOWER.encode_append(namespace.get(..16).unwrap_or_default(), &mut prefix);
        prefix.push('/');
        Names { prefix, sglang: None }
    }

    /// Whether the names are another engine's: they bind no weights, type or layout, and others store under them too.
    pub fn are_foreign(&self) -> bool {
        self.sglang.is_some()
    }

    /// The objects that a page of a pool is stored as.
    ///
    /// # Errors
    /// When the scheme has no names for the pool, or the pool is not as the other engine has it.
    pub fn objects(&self, pool: &Pool) -> Result<Vec<ObjectShape>> {
        match &self.sglang {
            Some(sglang) => sglang.objects(pool),
            None if pool.is_logical() => Ok(vec![ObjectShape { label: pool_tag(pool), parts: Vec::new(), len: 1 }]),
            None => {
                let segments = pool.segments().iter().enumerate();
                let parts = segments.map(|(segment, at)| Piece { segment, offset: 0, len: at.len }).collect();
                Ok(vec![ObjectShape::new(pool_tag(pool), parts)])
            }
        }
    }

    /// Of an object, by its label.
    pub fn object(&self, label: &str, key: &PageKey) -> String {
        let mut name = String::with_capacity(self.object_len(label));
        self.append(&mut name, label, key);
        name
    }

    /// Bytes that the name of an object with a label has at most.
    pub fn object_len(&self, label: &str) -> usize {
        self.prefix.len() + label.len() + 65
    }

    /// Appends the name of an object.
    pub fn append(&self, names: &mut String, label: &str, key: &PageKey) {
        names.push_str(&self.prefix);
        if self.sglang.is_some() {
            HEXLOWER.encode_append(key, names);
            names.push_str(label);
        } else {
            names.push_str(label);
            names.push('/');
            HEXLOWER.encode_append(key, names);
        }
    }

    /// The group of all pages of a key.
    pub fn group(&self, key: &PageKey) -> String {
        let mut name = if self.sglang.is_some() { sglang::GROUP.to_owned() } else { String::new() };
        name.push_str(&self.prefix);
        HEXLOWER.encode_append(key, &mut name);
        name
    }

    /// A regular expression for all names of the namespace, and for no other. None where the names do not say whose they are.
    pub fn all(&self) -> Option<String> {
        // A tag may have dots; everything else stands for itself.
        (!self.are_foreign()).then(|| format!("^{}.*", self.prefix.replace('.', "\\.")))
    }
}

/// What a pool is called in names: up to 20 characters of its own name, and a digest of all that shapes its pages. So pages of another
/// layout, type or size are never found.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_bind_tag_namespace_pool_and_key() {
        let names = Names::new("", &[0xab; 32]);
        let name = names.object("kv-01020304", &[7; 32]);
        assert_eq!(name, format!("kvdock/{}/kv-01020304/{}", "ab".repeat(16), "07".repeat(32)));
        assert!(name.len() < 256, "one byte says its length");
        let tagged = Names::new("a.b", &[0xab; 32]);
        assert!(tagged.object("kv", &[7; 32]).starts_with("a.b-kvdock/abab"));
        assert_eq!(tagged.all().unwrap(), format!("^a\\.b-kvdock/{}/.*", "ab".repeat(16)));
    }
}
