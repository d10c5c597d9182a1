//! The whole message: type hash, optional parts, payload.

use md5::{Digest, Md5};

use super::pack::{Decode, Encode, Malformed, Reader, Shape, Width, Writer};

const META_TOTAL: u8 = 0b11;
const META_LITERAL: u8 = 0b100;
const META_WIDTH: u32 = 3;

/// How a message says its own length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Total {
    /// Not at all.
    #[default]
    None,
    /// In 2 bytes.
    Two,
    /// In 4 bytes.
    Four,
    /// In 8 bytes.
    Eight,
}

impl Total {
    fn bytes(self) -> usize {
        match self {
            Total::None => 0,
            Total::Two => 2,
            Total::Four => 4,
            Total::Eight => 8,
        }
    }
}

/// The parts of a message that its value does not decide.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Form {
    /// The type literal stands before the payload. It may be left out.
    pub literal: bool,
    /// Size fields are at least so wide; none for the least width that does.
    pub width: Option<Width>,
    /// How the message says its length. Messages with compatible fields do.
    pub total: Total,
    /// What follows the payload: fields that later releases added.
    pub compatible: Vec<u8>,
}

/// The first four bytes of an MD5 as a number.
pub(super) fn md5_head(bytes: &[u8]) -> u32 {
    let digest: [u8; 16] = Md5::digest(bytes).into();
    u32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]])
}

/// The hash that tells the types of messages apart. Its lowest bit is 0.
pub fn type_hash<T: Shape>() -> u32 {
    let mut literal = Vec::new();
    T::literal(&mut literal);
    md5_head(&literal) & !1
}

/// Writes a message whose type has the hash `hash`.
pub fn encode<T: Encode>(value: &T, hash: u32, form: &Form) -> Vec<u8> {
    let width = form.width.unwrap_or(Width::One).max(Width::of(value.longest()));
    let total_bits = match form.total {
        Total::None => 0,
        Total::Two => 1,
        Total::Four => 2,
        Total::Eight => 3,
    };
    let meta = total_bits | if form.literal { META_LITERAL } else { 0 } | width.bits() << META_WIDTH;
    let mut out = Writer { bytes: Vec::with_capacity(256), width };
    if meta == 0 {
        out.raw(&hash.to_le_bytes());
    } else {
        out.raw(&(hash | 1).to_le_bytes());
        out.raw(&[meta]);
    }
    let total_at = out.bytes.len();
    let total_bytes = form.total.bytes();
    out.raw(&[0; 8][..total_bytes]);
    if form.literal {
        T::literal(&mut out.bytes);
        out.raw(&[0]);
    }
    value.encode(&mut out);
    out.raw(&form.compatible);
    let total = (out.bytes.len() as u64).to_le_bytes();
    if let Some(place) = out.bytes.get_mut(total_at..total_at + total_bytes) {
        place.copy_from_slice(&total[..total_bytes]);
    }
    out.bytes
}

/// Reads a message whose type should have the hash `hash`, and says in which form it came.
///
/// # Errors
/// When it has another type, ends too early, or holds a value that its type does not have.
pub fn decode<'a, T: Decode<'a>>(bytes: &'a [u8], hash: u32) -> Result<(T, Form), Malformed> {
    let mut input = Reader::new(bytes);
    let head = u32::from_le_bytes(input.array("type hash")?);
    if head & !1 != hash {
        return Err(Malformed::Type { found: head & !1, expected: hash });
    }
    let mut form = Form::default();
    if head & 1 == 1 {
        let meta = input.array::<1>("meta byte")?[0];
        form.total = match meta & META_TOTAL {
            0 => Total::None,
            1 => Total::Two,
            2 => Total::Four,
            _ => Total::Eight,
        };
        form.width = Some(Width::from_bits(meta >> META_WIDTH));
        input.width = Width::from_bits(meta >> META_WIDTH);
        input.take(form.total.bytes(), "length of the message")?;
        form.literal = meta & META_LITERAL != 0;
        if form.literal {
            let len = input.rest().iter().position(|byte| *byte == 0);
            let needed = input.left() + 1;
            let len =
                len.ok_or(Malformed::Truncated { what: "type literal", at: input.at(), needed, left: input.left() })?;
            input.take(len + 1, "type literal")?;
        }
    }
    let value = T::decode(&mut input)?;
    form.compatible = input.rest().to_vec();
    Ok((value, form))
}
