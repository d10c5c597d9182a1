//! Values of struct_pack: how a type is described, how a value is written and read.

use std::fmt;

use super::ErrorCode;

/// Codes of the type literal.
pub(super) mod literal {
    pub const I32: u8 = 0x01;
    pub const U32: u8 = 0x02;
    pub const I64: u8 = 0x03;
    pub const U64: u8 = 0x04;
    pub const U8: u8 = 0x06;
    pub const BOOL: u8 = 0x0b;
    pub const CHAR: u8 = 0x0c;
    pub const STRING: u8 = 0x80;
    pub const MAP: u8 = 0x82;
    pub const VECTOR: u8 = 0x84;
    pub const OPTIONAL: u8 = 0x85;
    pub const VARIANT: u8 = 0x86;
    pub const EXPECTED: u8 = 0x87;
    pub const VOID: u8 = 0xfa;
    pub const STRUCT: u8 = 0xfd;
    pub const END: u8 = 0xff;
    /// A size number below 127 is written as itself plus this.
    pub const SIZE: u8 = 129;
}

/// A message that can't be read, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// It ends too early.
    #[error("{what} needs {needed} bytes at {at}, there are {left}")]
    Truncated {
        /// What was read.
        what: &'static str,
        /// Offset in the message.
        at: usize,
        /// Bytes it needs.
        needed: usize,
        /// Bytes there are.
        left: usize,
    },
    /// It has another type: the other side speaks another release.
    #[error("the message has type {found:08x}, expected {expected:08x}")]
    Type {
        /// Type hash in the message.
        found: u32,
        /// Type hash of this release.
        expected: u32,
    },
    /// A value that its type does not have.
    #[error("{what} at {at} has the value {value}")]
    Value {
        /// What was read.
        what: &'static str,
        /// Offset in the message.
        at: usize,
        /// What it holds.
        value: u64,
    },
}

/// Bytes of the size fields of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Width {
    /// Sizes up to 255.
    One,
    /// Sizes up to 65,535.
    Two,
    /// Sizes up to 2^32 - 1.
    Four,
    /// Any size.
    Eight,
}

impl Width {
    /// The least width that holds `size`.
    pub fn of(size: usize) -> Width {
        match size as u64 {
            0..=0xff => Width::One,
            0x100..=0xffff => Width::Two,
            0x1_0000..=0xffff_ffff => Width::Four,
            _ => Width::Eight,
        }
    }
    /// As in bits 3 and 4 of the meta byte.
    pub fn from_bits(bits: u8) -> Width {
        match bits & 3 {
            0 => Width::One,
            1 => Width::Two,
            2 => Width::Four,
            _ => Width::Eight,
        }
    }
    /// As in bits 3 and 4 of the meta byte.
    pub fn bits(self) -> u8 {
        self as u8
    }
}

/// Where a message is written to.
#[derive(Debug)]
pub struct Writer {
    pub(super) bytes: Vec<u8>,
    pub(super) width: Width,
}

impl Writer {
    /// Appends bytes as they are.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }
    /// Appends a size field.
    pub fn size(&mut self, size: usize) {
        let bytes = (size as u64).to_le_bytes();
        self.raw(&bytes[..1 << self.width.bits()]);
    }
}

/// Where a message is read from.
#[derive(Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    pub(super) width: Width,
}

impl<'a> Reader<'a> {
    /// Reads from the start of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { bytes, at: 0, width: Width::One }
    }
    /// Offset of the next byte.
    pub fn at(&self) -> usize {
        self.at
    }
    /// Bytes that are left.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }
    /// The next `count` bytes.
    pub fn take(&mut self, count: usize, what: &'static str) -> Result<&'a [u8], Malformed> {
        let left = self.left();
        let end = self.at.saturating_add(count);
        let Some(taken) = self.bytes.get(self.at..end) else {
            return Err(Malformed::Truncated { what, at: self.at, needed: count, left });
        };
        self.at = end;
        Ok(taken)
    }
    /// The next `N` bytes.
    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Malformed> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, what)?);
        Ok(array)
    }
    /// A size field. What it counts has a byte each at least, so one beyond the end of the message is an error here.
    pub fn size(&mut self, what: &'static str) -> Result<usize, Malformed> {
        let mut bytes = [0; 8];
        let width = 1 << self.width.bits();
        bytes[..width].copy_from_slice(self.take(width, what)?);
        let size = usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX);
        if size > self.left() {
            return Err(Malformed::Truncated { what, at: self.at, needed: size, left: self.left() });
        }
        Ok(size)
    }
    /// What is left.
    pub fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }
}

/// A type as struct_pack describes it.
pub trait Shape {
    /// Appends its type literal.
    fn literal(out: &mut Vec<u8>);
}

/// A value that can be written.
pub trait Encode: Shape {
    /// Length of the longest string or vector in it.
    fn longest(&self) -> usize {
        0
    }
    /// Appends it.
    fn encode(&self, out: &mut Writer);
}

/// A value that can be read; it may borrow from the message.
pub trait Decode<'a>: Shape + Sized {
    /// Reads it.
    ///
    /// # Errors
    /// When the message ends too early or holds a value that the type does not have.
    fn decode(input: &mut Reader<'a>) -> Result<Self, Malformed>;
}

macro_rules! integers {
    ($($ty:ty = $code:ident),+) => {$(
        impl Shape for $ty {
            fn literal(out: &mut Vec<u8>) {
                out.push(literal::$code);
            }
        }
        impl Encode for $ty {
            fn encode(&self, out: &mut Writer) {
                out.raw(&self.to_le_bytes());
            }
        }
        impl Decode<'_> for $ty {
            fn decode(input: &mut Reader<'_>) -> Result<Self, Malformed> {
                Ok(<$ty>::from_le_bytes(input.array(stringify!($ty))?))
            }
        }
    )+};
}
integers!(u8 = U8, i32 = I32, u32 = U32, i64 = I64, u64 = U64);

impl Shape for bool {
    fn literal(out: &mut Vec<u8>) {
        out.push(literal::BOOL);
    }
}
impl Encode for bool {
    fn encode(&self, out: &mut Writer) {
        out.raw(&[u8::from(*self)]);
    }
}
impl Decode<'_> for bool {
    fn decode(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        flag(input, "bool")
    }
}

fn flag(input: &mut Reader<'_>, what: &'static str) -> Result<bool, Malformed> {
    match input.array::<1>(what)?[0] {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Malformed::Value { what, at: input.at() - 1, value: u64::from(other) }),
    }
}

/// Nothing: the value of an expected that says only that all went well.
impl Shape for () {
    fn literal(out: &mut Vec<u8>) {
        out.push(literal::VOID);
    }
}
impl Encode for () {
    fn encode(&self, _: &mut Writer) {}
}
impl Decode<'_> for () {
    fn decode(_: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(())
    }
}

impl Shape for &str {
    fn literal(out: &mut Vec<u8>) {
        out.extend_from_slice(&[literal::STRING, literal::CHAR]);
    }
}
impl Encode for &str {
    fn longest(&self) -> usize {
        self.len()
    }
    fn encode(&self, out: &mut Writer) {
        out.size(self.len());
        out.raw(self.as_bytes());
    }
}
impl<'a> Decode<'a> for &'a str {
    fn decode(input: &mut Reader<'a>) -> Result<Self, Malformed> {
        let len = input.size("string")?;
        let at = input.at();
        let bytes = input.take(len, "string")?;
        std::str::from_utf8(bytes).map_err(|error| {
            let wrong = bytes.get(error.valid_up_to()).copied().unwrap_or_default();
            Malformed::Value { what: "text", at: at + error.valid_up_to(), value: u64::from(wrong) }
        })
    }
}

impl Shape for String {
    fn literal(out: &mut Vec<u8>) {
        <&str>::literal(out);
    }
}
impl Encode for String {
    fn longest(&self) -> usize {
        self.len()
    }
    fn encode(&self, out: &mut Writer) {
        self.as_str().encode(out);
    }
}
impl Decode<'_> for String {
    fn decode(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(<&str>::decode(input)?.to_owned())
    }
}

impl<T: Shape> Shape for Vec<T> {
    fn literal(out: &mut Vec<u8>) {
        out.push(literal::VECTOR);
        T::literal(out);
    }
}
impl<T: Encode> Encode for Vec<T> {
    fn longest(&self) -> usize {
        self.iter().map(Encode::longest).max().unwrap_or(0).max(self.len())
    }
    fn encode(&self, out: &mut Writer) {
        out.size(self.len());
        self.iter().for_each(|item| item.encode(out));
    }
}
impl<'a, T: Decode<'a>> Decode<'a> for Vec<T> {
    fn decode(input: &mut Reader<'a>) -> Result<Self, Malformed> {
        let count = input.size("vector")?;
        (0..count).map(|_| T::decode(input)).collect()
    }
}

/// A map, in the order in which it came: Mooncake's maps have none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Map<K, V>(pub Vec<(K, V)>);

impl<K: Shape, V: Shape> Shape for Map<K, V> {
    fn literal(out: &mut Vec<u8>) {
        out.push(literal::MAP);
        K::literal(out);
        V::literal(out);
    }
}
impl<K: Encode, V: Encode> Encode for Map<K, V> {
    fn longest(&self) -> usize {
        self.0.iter().map(|(key, value)| key.longest().max(value.longest())).max().unwrap_or(0).max(self.0.len())
    }
    fn encode(&self, out: &mut Writer) {
        out.size(self.0.len());
        for (key, value) in &self.0 {
            key.encode(out);
            value.encode(out);
        }
    }
}
impl<'a, K: Decode<'a>, V: Decode<'a>> Decode<'a> for Map<K, V> {
    fn decode(input: &mut Reader<'a>) -> Result<Self, Malformed> {
        let count = input.size("map")?;
        (0..count).map(|_| Ok((K::decode(input)?, V::decode(input)?))).collect::<Result<_, _>>().map(Map)
    }
}

impl<T: Shape> Shape for Option<T> {
    fn literal(out: &mut Vec<u8>) {
        out.push(literal::OPTIONAL);
        T::literal(out);
    }
}
impl<T: Encode> Encode for Option<T> {
    fn longest(&self) -> usize {
        self.as_ref().map_or(0, Encode::longest)
    }
    fn encode(&self, out: &mut Writer) {
        out.raw(&[u8::from(self.is_some())]);
        if let Some(value) = self {
            value.encode(out);
        }
    }
}
impl<'a, T: Decode<'a>> Decode<'a> for Option<T> {
    fn decode(input: &mut Reader<'a>) -> Result<Self, Malformed> {
        flag(input, "optional")?.then(|| T::decode(input)).transpose()
    }
}

/// What Mooncake calls an expected: a value or an error code.
impl<T: Shape> Shape for Result<T, ErrorCode> {
    fn literal(out: &mut Vec<u8>) {
        out.push(literal::EXPECTED);
        T::literal(out);
        out.push(literal::I32);
    }
}
impl<T: Encode> Encode for Result<T, ErrorCode> {
    fn longest(&self) -> usize {
        self.as_ref().map_or(0, Encode::longest)
    }
    fn encode(&self, out: &mut Writer) {
        out.raw(&[u8::from(self.is_ok())]);
        match self {
            Ok(value) => value.encode(out),
            Err(code) => code.0.encode(out),
        }
    }
}
impl<'a, T: Decode<'a>> Decode<'a> for Result<T, ErrorCode> {
    fn decode(input: &mut Reader<'a>) -> Result<Self, Malformed> {
        if flag(input, "expected")? {
            T::decode(input).map(Ok)
        } else {
            i32::decode(input).map(|code| Err(ErrorCode(code)))
        }
    }
}

/// An identifier: 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// One drawn by chance (RFC 9562, version 4).
    ///
    /// # Errors
    /// When the system has no random numbers to give.
    pub fn random() -> std::io::Result<Uuid> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Ok(Uuid(bytes))
    }
}

/// As the services print it: both halves in decimal.
impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = u128::from_le_bytes(self.0);
        write!(f, "{}-{}", whole as u64, (whole >> 64) as u64)
    }
}
impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Shape for Uuid {
    fn literal(out: &mut Vec<u8>) {
        // The other side copies it as raw memory, which adds its alignments to the description.
        out.extend_from_slice(&[literal::STRUCT, literal::U64, literal::U64]);
        out.extend_from_slice(&[literal::SIZE + 8, literal::SIZE + 8, literal::END]);
    }
}
impl Encode for Uuid {
    fn encode(&self, out: &mut Writer) {
        out.raw(&self.0);
    }
}
impl Decode<'_> for Uuid {
    fn decode(input: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Uuid(input.array("identifier")?))
    }
}
