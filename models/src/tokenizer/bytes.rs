//! The byte alphabet of byte-level BPE: every byte has a printable character.

/// Bytes that stand for themselves.
fn is_printable(byte: u8) -> bool {
    matches!(byte, 33..=126 | 161..=172 | 174..=255)
}

/// The character that stands for `byte`: itself where printable, else U+0100 and up in order of the bytes.
pub(crate) fn byte_to_char(byte: u8) -> char {
    if is_printable(byte) {
        return char::from(byte);
    }
    let rank = (0..byte).filter(|&lower| !is_printable(lower)).count() as u32;
    char::from_u32(0x100 + rank).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte that `character` stands for.
fn char_to_byte(character: char) -> Option<u8> {
    static UPPER: std::sync::LazyLock<Vec<u8>> =
        std::sync::LazyLock::new(|| (0..=255u8).filter(|&byte| !is_printable(byte)).collect());
    let code = u32::from(character);
    match u8::try_from(code) {
        Ok(byte) => is_printable(byte).then_some(byte),
        Err(_) => UPPER.get((code - 0x100) as usize).copied(),
    }
}

/// The bytes of a token spelled in the byte alphabet. A token with any other character is taken
/// as plain text.
pub(super) fn token_bytes(token: &str) -> Box<[u8]> {
    token.chars().map(char_to_byte).collect::<Option<Box<[u8]>>>().unwrap_or_else(|| token.as_bytes().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character_and_comes_back() {
        for byte in 0..=255u8 {
            assert_eq!(char_to_byte(byte_to_char(byte)), Some(byte));
        }
    }

    #[test]
    fn known_characters_of_the_alphabet() {
        assert_eq!(byte_to_char(b' '), 'Ġ');
        assert_eq!(byte_to_char(b'\n'), 'Ċ');
        assert_eq!(byte_to_char(0), 'Ā');
        assert_eq!(byte_to_char(b'a'), 'a');
    }

    #[test]
    fn a_token_outside_the_alphabet_is_plain_text() {
        assert_eq!(&*token_bytes("Ġthe"), b" the");
        assert_eq!(&*token_bytes("<｜end｜>"), "<｜end｜>".as_bytes());
    }
}
