//! A little-endian reader over bytes that nobody vouches for.

/// Reads forward; every read says what it was after, so that a short file is reported with the place.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    /// Bytes left.
    pub(super) fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// All bytes left, without reading them.
    pub(super) fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }

    /// The next `count` bytes.
    pub(super) fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8], String> {
        let left = self.remaining();
        let taken = usize::try_from(count)
            .ok()
            .and_then(|count| self.at.checked_add(count))
            .and_then(|end| self.bytes.get(self.at..end));
        match taken {
            Some(bytes) => {
                self.at += bytes.len();
                Ok(bytes)
            }
            None => Err(format!(
                "{what} at byte {}: expected {count} bytes, found {left} before the end of the file",
                self.at
            )),
        }
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], String> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    pub(super) fn u8(&mut self, what: &str) -> Result<u8, String> {
        Ok(u8::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u16(&mut self, what: &str) -> Result<u16, String> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A length-prefixed string, which must be UTF-8.
    pub(super) fn string(&mut self, what: &str) -> Result<&'a str, String> {
        let start = self.at;
        let length = self.u64(what)?;
        let bytes = self.take(length, what)?;
        std::str::from_utf8(bytes)
            .map_err(|error| format!("{what} at byte {start}: expected UTF-8 text, found {error}"))
    }
}
