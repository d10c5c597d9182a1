//! Error codes of the store.

use std::fmt;

/// An error code of the store. One without a name stays what it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ErrorCode(pub i32);

macro_rules! codes {
    ($($(#[$meta:meta])* $name:ident = $number:literal, $text:literal;)+) => {
        impl ErrorCode {
            $($(#[$meta])* pub const $name: ErrorCode = ErrorCode($number);)+

            /// What it means.
            pub fn text(self) -> Option<&'static str> {
                match self.0 { $($number => Some($text),)+ _ => None }
            }
        }
    };
}

codes! {
    /// Something went wrong inside of the master.
    INTERNAL_ERROR = -1, "internal error of the master";
    /// The segment is not mounted.
    SEGMENT_NOT_FOUND = -101, "there is no such segment";
    /// The segment is mounted.
    SEGMENT_ALREADY_EXISTS = -102, "the segment exists already";
    /// The master does not know this client.
    CLIENT_NOT_FOUND = -103, "there is no such client";
    /// No segment has room.
    NO_AVAILABLE_HANDLE = -200, "no segment has room";
    /// The key can't be used.
    INVALID_KEY = -400, "the key is not allowed";
    /// An argument can't be used.
    INVALID_PARAMS = -600, "an argument is not allowed";
    /// Another client began this.
    ILLEGAL_CLIENT = -601, "the object belongs to a put of another client";
    /// The object is past the state for it.
    INVALID_WRITE = -700, "the object can't be written now";
    /// The object is before the state for it.
    INVALID_READ = -701, "the object can't be read now";
    /// The replica is not one for this.
    INVALID_REPLICA = -702, "the object has no replica of that kind";
    /// The put has not ended.
    REPLICA_IS_NOT_READY = -703, "the object is being written";
    /// There is no such object.
    OBJECT_NOT_FOUND = -704, "there is no such object";
    /// There is such an object.
    OBJECT_ALREADY_EXISTS = -705, "the object exists already";
    /// Somebody may be reading it.
    OBJECT_HAS_LEASE = -706, "the object has a lease";
    /// It is being copied.
    OBJECT_HAS_REPLICATION_TASK = -708, "the object is being copied";
    /// The master is not in the state for it.
    UNAVAILABLE_IN_CURRENT_STATUS = -1010, "the master does not do this in its present state";
    /// The master is not in the mode for it.
    UNAVAILABLE_IN_CURRENT_MODE = -1011, "the master does not do this in its mode";
    /// The tenant has used up its share.
    TENANT_QUOTA_EXCEEDED = -1700, "the tenant's quota is used up";
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.text() {
            Some(text) => write!(f, "{text} ({})", self.0),
            None => write!(f, "error {} of the master", self.0),
        }
    }
}
impl fmt::Debug for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl std::error::Error for ErrorCode {}
