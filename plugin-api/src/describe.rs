//! Descriptions of the types that cross the boundary, made while compiling.
//!
//! Every frozen type carries its name, size, alignment and fields with offsets. The descriptions of a
//! version, one line a type, travel in the note of a plugin, so that a host can say in words what differs
//! before any code of the plugin runs.

/// One field of a described type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field {
    /// Name in the source.
    pub name: &'static str,
    /// Bytes from the start of the type.
    pub offset: usize,
    /// Bytes of the field.
    pub size: usize,
    /// Type as written in the source.
    pub ty: &'static str,
    /// Its documentation, line by line.
    pub doc: &'static [&'static str],
}

/// One described type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Type {
    /// Name in the source.
    pub name: &'static str,
    /// Bytes.
    pub size: usize,
    /// Alignment in bytes.
    pub align: usize,
    /// Fields in the order of the source; none for a name that stands for a plain type.
    pub fields: &'static [Field],
    /// Its documentation, line by line.
    pub doc: &'static [&'static str],
}

/// One named number of an enumeration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Value {
    /// Name in the source.
    pub name: &'static str,
    /// The number that crosses the boundary.
    pub number: u64,
    /// Its documentation, line by line.
    pub doc: &'static [&'static str],
}

/// An enumeration whose values cross the boundary as plain integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Enumeration {
    /// Name in the source.
    pub name: &'static str,
    /// Integer type.
    pub raw: &'static str,
    /// Values in the order of the source.
    pub values: &'static [Value],
    /// Its documentation, line by line.
    pub doc: &'static [&'static str],
}

/// Defines a `#[repr(C)]` struct of the boundary together with its description.
macro_rules! abi_struct {
    ($(#[doc = $doc:literal])* pub struct $name:ident { $($(#[doc = $fdoc:literal])* pub $field:ident : $ty:ty,)+ }) => {
        $(#[doc = $doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        #[cfg_attr(feature = "stable-abi", derive(abi_stable::StableAbi))]
        pub struct $name { $($(#[doc = $fdoc])* pub $field: $ty,)+ }

        impl $name {
            /// Size, alignment and fields of this type.
            pub const DESCRIPTION: $crate::describe::Type = $crate::describe::Type {
                name: stringify!($name),
                size: std::mem::size_of::<$name>(),
                align: std::mem::align_of::<$name>(),
                fields: &[$($crate::describe::Field {
                    name: stringify!($field),
                    offset: std::mem::offset_of!($name, $field),
                    size: $crate::describe::size_of_field(|value: &$name| &raw const value.$field),
                    ty: stringify!($ty),
                    doc: &[$($fdoc),*],
                },)+],
                doc: &[$($doc),*],
            };
        }
    };
}
pub(crate) use abi_struct;

/// Size of the field that `_get` points at; only its type matters.
pub const fn size_of_field<T, F>(_get: fn(&T) -> *const F) -> usize {
    std::mem::size_of::<F>()
}

/// Appends text to a fixed buffer while compiling. With a buffer of length 0 it only counts.
#[derive(Debug, Clone, Copy)]
pub struct ConstWriter<const N: usize> {
    buffer: [u8; N],
    len: usize,
}

impl<const N: usize> Default for ConstWriter<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<const N: usize> ConstWriter<N> {
    /// An empty writer.
    pub const fn new() -> Self {
        ConstWriter { buffer: [0; N], len: 0 }
    }

    /// Bytes written, or that would have been written into a large enough buffer.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was written.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The whole buffer.
    pub const fn into_bytes(self) -> [u8; N] {
        self.buffer
    }

    /// Appends one byte.
    pub const fn byte(&mut self, byte: u8) {
        if N > 0 {
            self.buffer[self.len] = byte;
        }
        self.len += 1;
    }

    /// Appends bytes.
    pub const fn bytes(&mut self, bytes: &[u8]) {
        let mut i = 0;
        while i < bytes.len() {
            self.byte(bytes[i]);
            i += 1;
        }
    }

    /// Appends text.
    pub const fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    /// Appends a number in decimal.
    pub const fn number(&mut self, number: u64) {
        if number >= 10 {
            self.number(number / 10);
        }
        self.byte(b'0' + (number % 10) as u8);
    }

    /// Appends bytes as lower-case hex digits.
    pub const fn hex(&mut self, bytes: &[u8]) {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut i = 0;
        while i < bytes.len() {
            self.byte(DIGITS[(bytes[i] >> 4) as usize]);
            self.byte(DIGITS[(bytes[i] & 15) as usize]);
            i += 1;
        }
    }

    /// Appends text as a JSON string with its quotes.
    pub const fn json_string(&mut self, text: &str) {
        self.byte(b'"');
        let bytes = text.as_bytes();
        let mut i = 0;
        while i < bytes.len() {
            match bytes[i] {
                b'"' => self.text("\\\""),
                b'\\' => self.text("\\\\"),
                b'\n' => self.text("\\n"),
                control if control < 0x20 => {
                    self.text("\\u00");
                    self.hex(&[control]);
                }
                other => self.byte(other),
            }
            i += 1;
        }
        self.byte(b'"');
    }

    /// Appends the text of a type in one form, whatever spaces the compiler puts into it: the text is part of the digest of a version, and
    /// plugins are built with other compilers than the host. An array is spelled `u8[32]`, because `;` stands between fields.
    pub const fn type_text(&mut self, text: &str) {
        const fn is_word(byte: u8) -> bool {
            byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'"'
        }
        let bytes = text.as_bytes();
        let mut last = 0;
        let mut space = false;
        let mut i = 0;
        while i < bytes.len() {
            let byte = bytes[i];
            i += 1;
            if byte.is_ascii_whitespace() {
                space = true;
                continue;
            }
            if is_word(last) && (byte == b'*' || space && is_word(byte)) {
                self.byte(b' ');
            }
            space = false;
            match byte {
                b'[' => {}
                b';' => self.byte(b'['),
                b',' => self.text(", "),
                b'-' => self.text(" -"),
                b'>' if last == b'-' => self.text("> "),
                other => self.byte(other),
            }
            last = byte;
        }
    }

    /// Appends the description of a type as one line:
    /// `Name size align field:offset:size:type;...`.
    pub const fn describe(&mut self, described: &Type) {
        self.text(described.name);
        self.byte(b' ');
        self.number(described.size as u64);
        self.byte(b' ');
        self.number(described.align as u64);
        self.byte(b' ');
        let mut i = 0;
        while i < described.fields.len() {
            let field = &described.fields[i];
            if i > 0 {
                self.byte(b';');
            }
            self.text(field.name);
            self.byte(b':');
            self.number(field.offset as u64);
            self.byte(b':');
            self.number(field.size as u64);
            self.byte(b':');
            self.type_text(field.ty);
            i += 1;
        }
        self.byte(b'\n');
    }
}

/// Bytes that the descriptions of `types` take as text.
pub const fn described_len(types: &[Type]) -> usize {
    let mut writer = ConstWriter::<0>::new();
    let mut i = 0;
    while i < types.len() {
        writer.describe(&types[i]);
        i += 1;
    }
    writer.len()
}

/// The descriptions of `types` as text; `N` is [`described_len`].
pub const fn describe_all<const N: usize>(types: &[Type]) -> [u8; N] {
    let mut writer = ConstWriter::<N>::new();
    let mut i = 0;
    while i < types.len() {
        writer.describe(&types[i]);
        i += 1;
    }
    writer.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_strings_are_escaped() {
        const TEXT: &str = "a\"b\\c\nd\u{1}é";
        const LEN: usize = {
            let mut writer = ConstWriter::<0>::new();
            writer.json_string(TEXT);
            writer.len()
        };
        const BYTES: [u8; LEN] = {
            let mut writer = ConstWriter::<LEN>::new();
            writer.json_string(TEXT);
            writer.into_bytes()
        };
        let back: String = serde_json::from_slice(&BYTES).unwrap();
        assert_eq!(back, TEXT);
    }

    #[test]
    fn a_type_has_one_text_whatever_the_spaces() {
        let text = |ty: &str| {
            let mut writer = ConstWriter::<96>::new();
            writer.type_text(ty);
            let len = writer.len();
            String::from_utf8(writer.into_bytes()[..len].to_vec()).unwrap()
        };
        let function = r#"unsafe extern "C" fn(*mut *mut c_void, u64) -> Status"#;
        assert_eq!(text(function), function);
        assert_eq!(text("unsafe extern \"C\"  fn( * mut *mut c_void ,u64)->Status"), function);
        assert_eq!(text("[u8; 32]"), "u8[32]");
        assert_eq!(text("[ u8 ;32 ]"), "u8[32]");
    }

    #[test]
    fn numbers_are_decimal() {
        let mut writer = ConstWriter::<32>::new();
        writer.number(0);
        writer.byte(b' ');
        writer.number(u64::MAX);
        assert_eq!(&writer.into_bytes()[..22], b"0 18446744073709551615");
    }
}
