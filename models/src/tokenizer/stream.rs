//! Decoding token by token.

use std::sync::Arc;

use super::Tokenizer;

/// Turns tokens into text as they come. It never gives out half a character; everything it gave
/// out, joined, equals [`Tokenizer::decode`] of all the tokens.
#[derive(Debug, Clone)]
pub struct DecodeStream {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// Bytes at the end that may still become a character: at most three.
    held: Vec<u8>,
}

impl DecodeStream {
    /// A stream with no token yet. `skip_special` as in [`Tokenizer::decode`].
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, held: Vec::new() }
    }

    /// Takes the next token and returns the text that is now certain; often a word, empty while
    /// a character is incomplete.
    pub fn push(&mut self, id: u32) -> String {
        if self.skip_special && self.tokenizer.is_special(id) {
            return String::new();
        }
        self.held.extend_from_slice(self.tokenizer.token_bytes(id).unwrap_or_default());
        let keep = incomplete_tail(&self.held);
        let tail = self.held.split_off(self.held.len() - keep);
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held = tail;
        text
    }

    /// Ends the stream: what is still held can become no character any more and is given out as U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        text
    }

    /// Number of bytes held back because they may still become a character.
    pub fn held_bytes(&self) -> usize {
        self.held.len()
    }
}

/// How many bytes at the end of `bytes` are the beginning of a character that further bytes can
/// complete (0 to 3).
fn incomplete_tail(bytes: &[u8]) -> usize {
    // The last error of the valid/invalid chunks decides: only an error "unexpected end" is open.
    let mut rest = bytes;
    loop {
        match std::str::from_utf8(rest) {
            Ok(_) => return 0,
            Err(error) => match error.error_len() {
                None => return rest.len() - error.valid_up_to(),
                Some(length) => rest = rest.get(error.valid_up_to() + length..).unwrap_or_default(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_character_that_can_be_completed_is_held() {
        assert_eq!(incomplete_tail(b"abc"), 0);
        assert_eq!(incomplete_tail("a你".as_bytes()), 0);
        assert_eq!(incomplete_tail(&"a你".as_bytes()[..3]), 2);
        assert_eq!(incomplete_tail(&[0xF0, 0x9F, 0x98]), 3);
        // 0xFF starts nothing; a lone continuation byte ends nothing.
        assert_eq!(incomplete_tail(&[0xFF]), 0);
        assert_eq!(incomplete_tail(&[0x80]), 0);
        assert_eq!(incomplete_tail(&[0xE4, 0xFF]), 0);
        assert_eq!(incomplete_tail(&[0xFF, 0xE4]), 1);
    }
}
