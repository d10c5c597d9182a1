//! Reading what the other side points at.

use crate::v0_1::{Bytes, ErrorOut, Status};
use crate::{Error, ErrorKind, Result};

/// A slice over `count` elements; a null pointer or a count of 0 is the empty slice.
///
/// # Safety
/// `ptr` is null or points at `count` valid elements that nobody writes for `'a`.
pub unsafe fn slice<'a, T>(ptr: *const T, count: u64) -> &'a [T] {
    if ptr.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: not null, and the caller promises the elements.
    unsafe { std::slice::from_raw_parts(ptr, count as usize) }
}

/// A slice to write into; a null pointer or a count of 0 is the empty slice.
///
/// # Safety
/// `ptr` is null or points at `count` valid elements that nobody else touches for `'a`.
pub unsafe fn slice_mut<'a, T>(ptr: *mut T, count: u64) -> &'a mut [T] {
    if ptr.is_null() || count == 0 {
        return &mut [];
    }
    // SAFETY: not null, and the caller promises the elements and that they are ours alone.
    unsafe { std::slice::from_raw_parts_mut(ptr, count as usize) }
}

/// Text from the other side.
///
/// # Safety
/// As for [`slice`].
pub unsafe fn text<'a>(bytes: Bytes) -> Result<&'a str> {
    // SAFETY: the caller's promise.
    std::str::from_utf8(unsafe { slice(bytes.ptr, bytes.len) })
        .map_err(|e| Error::new(ErrorKind::InvalidConfig, format!("text that is no UTF-8 crossed the boundary: {e}")))
}

impl From<&str> for Bytes {
    fn from(text: &str) -> Self {
        Bytes { ptr: text.as_ptr(), len: text.len() as u64 }
    }
}

impl From<&[u8]> for Bytes {
    fn from(bytes: &[u8]) -> Self {
        Bytes { ptr: bytes.as_ptr(), len: bytes.len() as u64 }
    }
}

/// Copies as much of `text` as fits, cut at a character. Returns the bytes written.
///
/// # Safety
/// `buffer` is null or has room for `capacity` bytes.
pub unsafe fn write_text(text: &str, buffer: *mut u8, capacity: u64) -> u64 {
    if buffer.is_null() {
        return 0;
    }
    let len = text.floor_char_boundary((capacity as usize).min(text.len()));
    // SAFETY: `len` is within the text and within the buffer, which the host owns and so does not overlap.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buffer, len) };
    len as u64
}

/// Writes an error where the host asked for it, and gives the status of the call.
///
/// # Safety
/// `out` is null or points at a valid [`ErrorOut`] whose buffer has the capacity it says.
pub unsafe fn write_error(error: &Error, out: *mut ErrorOut) -> Status {
    // SAFETY: the caller's promise; the reference ends with this call.
    if let Some(out) = unsafe { out.as_mut() } {
        out.kind = error.kind.raw();
        out.retryable = u8::from(error.retryable);
        out.panicked = u8::from(error.panicked);
        // SAFETY: the host owns the buffer and says how much it takes.
        out.message_len = unsafe { write_text(&error.message, out.message, out.message_capacity) };
    }
    error.kind.raw()
}

/// What a panic said.
pub fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}
