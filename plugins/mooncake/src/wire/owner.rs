//! What a peer that keeps objects on its own disk is asked for.

use std::sync::OnceLock;

use super::envelope::type_hash;
use super::frame::function_id;
use super::rpc::{Expected, Rpc};

/// Objects that an owner has put into memory to be read: number of the loan, an address each, the endpoint, milliseconds for which they stay.
pub type Lent = (u64, Vec<u64>, String, u64);

/// `batch_get_offload_object` of an owner: puts objects into memory. A name is the tenant, a zero byte, the key; beside it the size.
#[derive(Debug, Clone, Copy)]
pub enum GetOffloaded {}

/// `release_offload_buffer` of an owner: gives a loan back.
#[derive(Debug, Clone, Copy)]
pub enum ReleaseOffloaded {}

macro_rules! owner {
    ($name:ident, $method:literal, $request:ty, $reply:ty) => {
        impl Rpc for $name {
            const NAME: &'static str = $method;
            type Request<'a> = $request;
            type Reply = $reply;
            fn id() -> u32 {
                static ID: OnceLock<u32> = OnceLock::new();
                *ID.get_or_init(|| function_id(concat!("mooncake::RealClient::", $method)))
            }
            fn request_hash() -> Option<u32> {
                static HASH: OnceLock<u32> = OnceLock::new();
                Some(*HASH.get_or_init(type_hash::<$request>))
            }
            fn reply_hash() -> u32 {
                static HASH: OnceLock<u32> = OnceLock::new();
                *HASH.get_or_init(type_hash::<$reply>)
            }
        }
    };
}

owner!(GetOffloaded, "batch_get_offload_object", (Vec<String>, Vec<i64>), Expected<Lent>);
owner!(ReleaseOffloaded, "release_offload_buffer", u64, bool);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_have_the_numbers_that_were_recorded() {
        assert_eq!(GetOffloaded::id().to_be_bytes(), [0xdc, 0x81, 0x09, 0xd6]);
        assert_eq!(ReleaseOffloaded::id().to_be_bytes(), [0xaa, 0x14, 0x3b, 0xb9]);
    }
}
