//! Names below the store's directory. FORMAT.md lists them.
//!
//! Every name is bounded whatever a model or a pool is called: a model is its namespace digest, a pool at most
//! [`TAG_MAX`] characters.

use std::ffi::CStr;
use std::fmt::Write;

use kvdock_plugin_api::{PageKey, Pool};
use sha2::{Digest, Sha256};

/// Most characters of a pool's tag: 20 of its name, a dash, 8 hex digits of its shape.
pub const TAG_MAX: usize = 29;

/// Ending of names that are not pages yet.
pub const TEMP_SUFFIX: &str = ".tmp";

/// Ending of pack files.
pub const PACK_SUFFIX: &str = ".pack";

/// A short path relative to the folder of a namespace, kept in place: a page costs no allocation.
#[derive(Clone, Copy)]
pub struct Name {
    bytes: [u8; Name::CAPACITY],
    len: u8,
}

impl std::fmt::Debug for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Name {
    // "p/xx/" + 64 + "." + TAG_MAX, and room to spare; the last byte is never used, so the text always ends in a zero.
    const CAPACITY: usize = 128;

    fn new() -> Name {
        Name { bytes: [0; Name::CAPACITY], len: 0 }
    }

    fn from_args(args: std::fmt::Arguments<'_>) -> Name {
        let mut name = Name::new();
        // A name that is cut would be another name; the callers' parts are bounded so that it never is.
        let written = name.write_fmt(args);
        debug_assert!(written.is_ok(), "{args}");
        name
    }

    /// The path for a system call.
    pub fn as_cstr(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }

    /// The path as text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(self.bytes.get(..usize::from(self.len)).unwrap_or_default()).unwrap_or_default()
    }
}

impl Write for Name {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let start = usize::from(self.len);
        let end = start + text.len();
        if end >= Name::CAPACITY {
            return Err(std::fmt::Error);
        }
        self.bytes.get_mut(start..end).ok_or(std::fmt::Error)?.copy_from_slice(text.as_bytes());
        self.len = end as u8;
        Ok(())
    }
}

/// Bytes as lower-case hex digits.
#[derive(Debug, Clone, Copy)]
pub struct Hex<'a>(pub &'a [u8]);

impl std::fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut digits = [0u8; 64];
        for chunk in self.0.chunks(32) {
            for (byte, pair) in chunk.iter().zip(digits.chunks_exact_mut(2)) {
                pair.copy_from_slice(&[hex_digit(byte >> 4), hex_digit(byte & 15)]);
            }
            let text = digits.get(..chunk.len() * 2).unwrap_or_default();
            f.write_str(std::str::from_utf8(text).unwrap_or_default())?;
        }
        Ok(())
    }
}

fn hex_digit(value: u8) -> u8 {
    if value < 10 { b'0' + value } else { b'a' + value - 10 }
}

fn hex_value(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

/// Bytes from lower-case hex digits; none when the text is something else.
pub fn parse_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let [high, low] = pair else { return None };
        *byte = (hex_value(*high)? << 4) | hex_value(*low)?;
    }
    Some(bytes)
}

/// What a pool's pages are made of, as a name and as 8 bytes for headers. Pools of another shape are other pools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolTag {
    /// Part of file names and of pack tables.
    pub text: String,
    /// First bytes of the digest of the pool's shape.
    pub digest: [u8; 8],
}

impl PoolTag {
    /// The tag of a registered pool.
    pub fn of(pool: &Pool) -> PoolTag {
        let lens = pool.segments().iter().map(|segment| segment.len);
        PoolTag::new(pool.name(), pool.layout(), pool.dtype().as_str(), [pool.page_tokens(), pool.layers()], lens)
    }

    fn new(name: &str, layout: &str, dtype: &str, counts: [u32; 2], segments: impl Iterator<Item = u64>) -> PoolTag {
        let mut hasher = Sha256::new();
        for text in [name, layout, dtype] {
            hasher.update((text.len() as u64).to_le_bytes());
            hasher.update(text);
        }
        counts.iter().for_each(|count| hasher.update(count.to_le_bytes()));
        segments.for_each(|len| hasher.update(len.to_le_bytes()));
        let full = hasher.finalize();
        let mut digest = [0; 8];
        digest.iter_mut().zip(full.iter()).for_each(|(to, from)| *to = *from);
        let plain = |c: char| if c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' { c } else { '_' };
        let short: String = name.chars().take(20).map(|c| plain(c.to_ascii_lowercase())).collect();
        let [a, b, c, d, ..] = digest;
        PoolTag { text: format!("{short}-{}", Hex(&[a, b, c, d])), digest }
    }
}

/// Whether a text can be a pool's tag.
pub fn is_tag(text: &str) -> bool {
    let plain = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_' || c == b'-';
    !text.is_empty() && text.len() <= TAG_MAX && text.bytes().all(plain)
}

/// Folder of a namespace below the store's directory.
pub fn namespace_folder(namespace: &[u8; 32]) -> String {
    Hex(namespace.split_at(16).0).to_string()
}

/// Whether a name below the store's directory is the folder of a namespace.
pub fn is_namespace_folder(name: &str) -> bool {
    parse_hex::<16>(name).is_some()
}

/// Fan-out folder of pages whose key starts with `byte`.
pub fn fan_out(byte: u8) -> Name {
    Name::from_args(format_args!("p/{}", Hex(&[byte])))
}

/// The folder of the fan-out folders.
pub fn fan_outs() -> Name {
    Name::from_args(format_args!("p"))
}

/// A page's file.
pub fn page(key: &PageKey, tag: &str) -> Name {
    let [first, ..] = *key;
    Name::from_args(format_args!("p/{}/{}.{tag}", Hex(&[first]), Hex(key)))
}

/// A page's file before it is one.
pub fn temp(key: &PageKey, owner: &str, number: u64) -> Name {
    let [first, ..] = *key;
    Name::from_args(format_args!("p/{}/.{owner}-{number:x}{TEMP_SUFFIX}", Hex(&[first])))
}

/// Key and tag of a page's file name.
pub fn parse_page(name: &str) -> Option<(PageKey, &str)> {
    let (key, tag) = name.split_once('.')?;
    let key = parse_hex::<32>(key)?;
    is_tag(tag).then_some((key, tag))
}

/// Owner of a temporary file's name.
pub fn parse_temp(name: &str) -> Option<&str> {
    let (owner, number) = name.strip_prefix('.')?.strip_suffix(TEMP_SUFFIX)?.split_once('-')?;
    (is_owner(owner) && u64::from_str_radix(number, 16).is_ok()).then_some(owner)
}

/// A pack file's name, without its folder.
pub fn pack(owner: &str, number: u64) -> String {
    format!("{owner}-{number:x}{PACK_SUFFIX}")
}

/// Owner of a pack file's name.
pub fn parse_pack(name: &str) -> Option<&str> {
    let (owner, number) = name.strip_suffix(PACK_SUFFIX)?.split_once('-')?;
    (is_owner(owner) && u64::from_str_radix(number, 16).is_ok()).then_some(owner)
}

/// A pack file relative to the folder of its namespace.
pub fn pack_path(name: &str) -> Name {
    Name::from_args(format_args!("packs/{name}"))
}

/// Whether a text can be the number of an instance.
pub fn is_owner(text: &str) -> bool {
    parse_hex::<8>(text).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_under_100_bytes_and_parse_back() {
        let key = [0xab; 32];
        let tag =
            PoolTag::new(&"a very Long/Name of a pool ü".repeat(20), "page_first", "f16", [16, 30], [1, 2].into_iter());
        assert!(is_tag(&tag.text), "{}", tag.text);
        let name = page(&key, &tag.text);
        let file = name.as_str().rsplit('/').next().unwrap();
        assert!(file.len() < 100, "{file}");
        assert_eq!(parse_page(file), Some((key, tag.text.as_str())));
        assert!(name.as_str().starts_with("p/ab/abab"));
        assert_eq!(name.as_cstr().to_str().unwrap(), name.as_str());
        let temp = temp(&key, "0123456789abcdef", u64::MAX);
        let file = temp.as_str().rsplit('/').next().unwrap();
        assert!(file.len() < 100 && parse_page(file).is_none());
        assert_eq!(parse_temp(file), Some("0123456789abcdef"));
        assert_eq!(parse_pack(&pack("0123456789abcdef", 17)), Some("0123456789abcdef"));
        assert_eq!(namespace_folder(&[7; 32]).len(), 32);
        assert!(is_namespace_folder(&namespace_folder(&[7; 32])) && !is_namespace_folder("lost+found"));
    }

    #[test]
    fn pools_of_another_shape_are_other_pools() {
        let tag = |layout: &str, lens: [u64; 2]| PoolTag::new("kv", layout, "f16", [16, 2], lens.into_iter());
        let one = tag("page_first", [4096, 4096]);
        assert_eq!(one, tag("page_first", [4096, 4096]));
        assert_ne!(one.text, tag("page_head", [4096, 4096]).text);
        assert_ne!(one.text, tag("page_first", [4096, 8192]).text);
    }

    #[test]
    fn foreign_names_are_not_ours() {
        for name in
            ["x", ".x", "notes.txt", "..", &"a".repeat(64), &format!("{}.KV", "a".repeat(64)), ".zz-1.tmp", "core.pack"]
        {
            assert!(parse_page(name).is_none() && parse_temp(name).is_none() && parse_pack(name).is_none(), "{name}");
        }
    }
}
