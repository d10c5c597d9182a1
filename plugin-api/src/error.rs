//! What a call across the boundary can answer: kinds of error, page statuses, one error type.

use std::fmt;

/// Defines a C-like enumeration whose values cross the boundary as plain integers.
///
/// A value that the receiving side does not know is mapped by `from_raw` to the fallback
/// instead of becoming an invalid Rust enumeration.
macro_rules! wire_enum {
    ($(#[doc = $doc:literal])* $name:ident : $raw:ty, unknown => $fallback:ident {
        $($(#[doc = $vdoc:literal])* $variant:ident = $value:literal => $text:literal,)+
    }) => {
        $(#[doc = $doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr($raw)]
        pub enum $name { $($(#[doc = $vdoc])* $variant = $value,)+ }

        impl $name {
            /// Every value, in the order of its number.
            pub const ALL: &'static [$name] = &[$($name::$variant,)+];

            /// Names, numbers and documentation of the values.
            pub const DESCRIPTION: $crate::describe::Enumeration = $crate::describe::Enumeration {
                name: stringify!($name),
                raw: stringify!($raw),
                values: &[$($crate::describe::Value {
                    name: stringify!($variant),
                    number: $value,
                    doc: &[$($vdoc),*],
                },)+],
                doc: &[$($doc),*],
            };

            /// The value for a number read from the other side; an unknown number is the fallback.
            pub const fn from_raw(raw: $raw) -> Self {
                match raw { $($value => $name::$variant,)+ _ => $name::$fallback }
            }

            /// The value for a number read from the other side, if it is known.
            pub const fn try_from_raw(raw: $raw) -> Option<Self> {
                match raw { $($value => Some($name::$variant),)+ _ => None }
            }

            /// The number that crosses the boundary.
            pub const fn raw(self) -> $raw { self as $raw }

            /// The name used in logs, metrics and messages.
            pub const fn as_str(self) -> &'static str {
                match self { $($name::$variant => $text,)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}
pub(crate) use wire_enum;

wire_enum! {
    /// Why a call failed.
    ErrorKind: u32, unknown => Internal {
        /// The configuration is wrong; the message names the key.
        InvalidConfig = 1 => "invalid config",
        /// Something named in the call does not exist.
        NotFound = 2 => "not found",
        /// The store can't be reached or is not ready.
        Unavailable = 3 => "unavailable",
        /// The deadline of the call passed.
        TimedOut = 4 => "timed out",
        /// The store has no room.
        NoSpace = 5 => "no space",
        /// Stored bytes failed a check.
        Corrupt = 6 => "corrupt",
        /// The backend does not do this.
        Unsupported = 7 => "unsupported",
        /// The cancel flag of the call was set.
        Cancelled = 8 => "cancelled",
        /// A fault of the backend itself.
        Internal = 9 => "internal",
    }
}

wire_enum! {
    /// What became of one page of one pool in a batch call.
    PageStatus: u8, unknown => Failed {
        /// Not answered. The host writes it before a call; left standing it counts as failed.
        Unset = 0 => "unset",
        /// Found, read, written or removed.
        Ok = 1 => "ok",
        /// The store does not hold the page.
        Missing = 2 => "missing",
        /// Reading or writing failed; the error of the call or the log says why.
        Failed = 3 => "failed",
        /// The store holds the page, but its bytes failed a check or have another length.
        Corrupt = 4 => "corrupt",
        /// The store declines to take the page, for instance because it is full.
        Refused = 5 => "refused",
    }
}

/// An error that crosses the boundary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    /// What kind of error it is.
    pub kind: ErrorKind,
    /// Whether the same call may succeed later.
    pub retryable: bool,
    /// True when the plugin panicked: the host fails the instance and detaches it.
    pub panicked: bool,
    /// For a person: what was wrong, where, and what would be right.
    pub message: String,
}

impl Error {
    /// An error that a retry can't help.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error { kind, retryable: false, panicked: false, message: message.into() }
    }

    /// The same error, marked as one that a retry can help.
    pub fn retryable(mut self) -> Self {
        self.retryable = true;
        self
    }

    /// A call that this backend does not offer.
    pub fn unsupported(what: &str) -> Self {
        Error::new(ErrorKind::Unsupported, format!("this backend does not support {what}"))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)
    }
}

impl std::error::Error for Error {}

/// The result of a call across the boundary.
pub type Result<T, E = Error> = std::result::Result<T, E>;
