//! Names of objects. PROTOCOL.md says what they are made of.

use kvdock_plugin_api::{PageKey, Pool};
use sha2::{Digest, Sha256};

/// What stands before all names of this server's namespace.
#[derive(Debug, Clone)]
pub struct Names {
    prefix: String,
}

impl Names {
    /// Names in a namespace, below an optional tag.
    pub fn new(tag: &str, namespace: &[u8; 32]) -> Names {
        let dash = if tag.is_empty() { "" } else { "-" };
        let mut prefix = format!("{tag}{dash}kvdock/");
        hex(&mut prefix, namespace.get(..16).unwrap_or_default());
        prefix.push('/');
        Names { prefix }
    }

    /// Of a page of a pool.
    pub fn page(&self, pool: &str, key: &PageKey) -> String {
        let mut name = String::with_capacity(self.prefix.len() + pool.len() + 65);
        name.push_str(&self.prefix);
        name.push_str(pool);
        name.push('/');
        hex(&mut name, key);
        name
    }

    /// The group of all pages of a key.
    pub fn group(&self, key: &PageKey) -> String {
        let mut name = self.prefix.clone();
        hex(&mut name, key);
        name
    }

    /// A regular expression for all names of the namespace, and for no other.
    pub fn all(&self) -> String {
        // A tag may have dots; everything else stands for itself.
        format!("^{}.*", self.prefix.replace('.', "\\."))
    }
}

fn hex(out: &mut String, bytes: &[u8]) {
    // A name has 48 bytes of it, a question 128 names: formatting them one by one would take longer than the answer.
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for byte in bytes {
        for half in [byte >> 4, byte & 15] {
            out.push(DIGITS.get(usize::from(half)).copied().map_or('0', char::from));
        }
    }
}

/// What a pool is called in names: up to 20 characters of its own name, and a digest of all that shapes its pages. So pages of another
/// layout, type or size are never found.
pub fn pool_tag(pool: &Pool) -> String {
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
    hex(&mut tag, digest.finalize().get(..4).unwrap_or_default());
    tag
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_bind_tag_namespace_pool_and_key() {
        let names = Names::new("", &[0xab; 32]);
        let name = names.page("kv-01020304", &[7; 32]);
        assert_eq!(name, format!("kvdock/{}/kv-01020304/{}", "ab".repeat(16), "07".repeat(32)));
        assert!(name.len() < 256, "one byte says its length");
        let tagged = Names::new("a.b", &[0xab; 32]);
        assert!(tagged.page("kv", &[7; 32]).starts_with("a.b-kvdock/abab"));
        assert_eq!(tagged.all(), format!("^a\\.b-kvdock/{}/.*", "ab".repeat(16)));
    }
}
