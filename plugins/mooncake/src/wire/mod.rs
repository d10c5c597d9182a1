//! What Mooncake's control plane speaks: struct_pack messages in coro_rpc frames. PROTOCOL.md lists the bytes.
//!
//! Each message is one declaration. Its type literal, its hash, its writer and its reader follow from it.

#[cfg(test)]
mod captures;
mod code;
mod envelope;
pub mod frame;
mod message;
pub mod owner;
mod pack;
pub mod rpc;
pub mod types;

pub use code::ErrorCode;
pub use envelope::{Form, Total, decode, encode, type_hash};
pub use pack::{Decode, Encode, Malformed, Map, Reader, Shape, Uuid, Width, Writer};
pub use rpc::Rpc;
