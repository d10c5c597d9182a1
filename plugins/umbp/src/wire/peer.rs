//! Messages of a node that owns objects, service `umbp.UMBPPeer`, as release 1.2.4 has them, and what nodes of kvdock add.
//!
//! What is added has field numbers from 20101 on, which nobody else knows: protobuf skips them.

use prost::Message;

/// `PageLocation`.
#[derive(Clone, PartialEq, Message)]
pub struct PageLocation {
    /// Field 1.
    #[prost(uint32, tag = "1")]
    pub buffer_index: u32,
    /// Field 2.
    #[prost(uint32, tag = "2")]
    pub page_index: u32,
}

/// `BufferMemoryDesc`.
#[derive(Clone, PartialEq, Message)]
pub struct BufferMemoryDesc {
    /// Field 1.
    #[prost(uint32, tag = "1")]
    pub buffer_index: u32,
    /// Field 2.
    #[prost(bytes = "vec", tag = "2")]
    pub desc: Vec<u8>,
    /// Field 3.
    #[prost(uint32, tag = "3")]
    pub backend_id: u32,
}

/// `GetPeerInfoRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct GetPeerInfoRequest {}

/// `GetPeerInfoResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct GetPeerInfoResponse {
    /// Field 1.
    #[prost(bytes = "vec", tag = "1")]
    pub engine_desc: Vec<u8>,
    /// Field 10.
    #[prost(message, repeated, tag = "10")]
    pub buffer_descs: Vec<BufferMemoryDesc>,
    /// Field 11.
    #[prost(uint64, tag = "11")]
    pub page_size: u64,
    /// Field 20101.
    #[prost(message, optional, tag = "20101")]
    pub kvdock: Option<KvdockNode>,
}

/// `AllocateSlotRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct AllocateSlotRequest {
    /// Field 1.
    #[prost(uint64, tag = "1")]
    pub size: u64,
    /// Field 2.
    #[prost(int32, tag = "2")]
    pub tier: i32,
    /// Field 3.
    #[prost(string, tag = "3")]
    pub key: String,
    /// Field 4.
    #[prost(string, optional, tag = "4")]
    pub backend_name: Option<String>,
    /// Field 5.
    #[prost(string, tag = "5")]
    pub logical_tier: String,
}

/// `AllocateSlotResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct AllocateSlotResponse {
    /// Field 1.
    #[prost(int32, tag = "1")]
    pub outcome: i32,
    /// Field 2.
    #[prost(uint64, tag = "2")]
    pub slot_id: u64,
    /// Field 3.
    #[prost(message, repeated, tag = "3")]
    pub pages: Vec<PageLocation>,
    /// Field 4.
    #[prost(uint64, tag = "4")]
    pub page_size: u64,
    /// Field 5.
    #[prost(message, repeated, tag = "5")]
    pub descs: Vec<BufferMemoryDesc>,
    /// Field 6.
    #[prost(uint64, tag = "6")]
    pub pending_ttl_ms: u64,
    /// Field 7.
    #[prost(uint32, tag = "7")]
    pub backend_id: u32,
}

/// `CommitSlotRequest`, and `BatchCommitSlotEntry`, which has the same fields.
#[derive(Clone, PartialEq, Message)]
pub struct CommitSlotRequest {
    /// Field 1.
    #[prost(uint64, tag = "1")]
    pub slot_id: u64,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub key: String,
}

/// `AbortSlotRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct AbortSlotRequest {
    /// Field 1.
    #[prost(uint64, tag = "1")]
    pub slot_id: u64,
}

/// `CommitSlotResponse` and `AbortSlotResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct SuccessResponse {
    /// Field 1.
    #[prost(bool, tag = "1")]
    pub success: bool,
}

/// `ResolveKeyRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct ResolveKeyRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub key: String,
}

/// `ResolveKeyResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct ResolveKeyResponse {
    /// Field 1.
    #[prost(bool, tag = "1")]
    pub found: bool,
    /// Field 2.
    #[prost(message, repeated, tag = "2")]
    pub pages: Vec<PageLocation>,
    /// Field 3.
    #[prost(uint64, tag = "3")]
    pub page_size: u64,
    /// Field 4.
    #[prost(message, repeated, tag = "4")]
    pub descs: Vec<BufferMemoryDesc>,
    /// Field 5.
    #[prost(uint64, tag = "5")]
    pub size: u64,
    /// Field 6.
    #[prost(uint32, tag = "6")]
    pub backend_id: u32,
}

/// `EvictKeyRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct EvictKeyRequest {
    /// Field 1.
    #[prost(string, repeated, tag = "1")]
    pub keys: Vec<String>,
    /// Field 20101.
    #[prost(bool, tag = "20101")]
    pub remove: bool,
}

/// `EvictKeyEntry`.
#[derive(Clone, PartialEq, Message)]
pub struct EvictKeyEntry {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Field 2.
    #[prost(uint64, tag = "2")]
    pub bytes_freed: u64,
}

/// `EvictKeyResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct EvictKeyResponse {
    /// Field 1.
    #[prost(message, repeated, tag = "1")]
    pub evicted: Vec<EvictKeyEntry>,
}

/// `BatchAllocateSlotsRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchAllocateSlotsRequest {
    /// Field 1.
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<AllocateSlotRequest>,
}

/// `BatchAllocateSlotsResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchAllocateSlotsResponse {
    /// Field 1.
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<AllocateSlotResponse>,
}

/// `BatchCommitSlotsRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchCommitSlotsRequest {
    /// Field 1.
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<CommitSlotRequest>,
}

/// `BatchAbortSlotsRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchAbortSlotsRequest {
    /// Field 1.
    #[prost(uint64, repeated, tag = "1")]
    pub slot_ids: Vec<u64>,
}

/// `BatchCommitSlotsResponse` and `BatchAbortSlotsResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchSuccessResponse {
    /// Field 1.
    #[prost(bool, repeated, tag = "1")]
    pub success: Vec<bool>,
}

/// `BatchResolveKeysRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchResolveKeysRequest {
    /// Field 1.
    #[prost(string, repeated, tag = "1")]
    pub keys: Vec<String>,
    /// Field 2.
    #[prost(bool, tag = "2")]
    pub omit_descs: bool,
    /// Field 20101.
    #[prost(uint64, tag = "20101")]
    pub lease_ms: u64,
}

/// `BatchResolveKeysResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchResolveKeysResponse {
    /// Field 1.
    #[prost(message, repeated, tag = "1")]
    pub descs: Vec<BufferMemoryDesc>,
    /// Field 2.
    #[prost(uint64, tag = "2")]
    pub page_size: u64,
    /// Field 3.
    #[prost(bool, repeated, tag = "3")]
    pub found: Vec<bool>,
    /// Field 4.
    #[prost(int32, repeated, tag = "4")]
    pub tier: Vec<i32>,
    /// Field 5.
    #[prost(uint64, repeated, tag = "5")]
    pub size: Vec<u64>,
    /// Field 6.
    #[prost(uint32, repeated, tag = "6")]
    pub page_count: Vec<u32>,
    /// Field 7.
    #[prost(uint32, repeated, tag = "7")]
    pub buffer_index: Vec<u32>,
    /// Field 8.
    #[prost(uint32, repeated, tag = "8")]
    pub page_index: Vec<u32>,
    /// Field 9.
    #[prost(uint32, repeated, tag = "9")]
    pub backend_id: Vec<u32>,
    /// Field 10.
    #[prost(int32, repeated, tag = "10")]
    pub resolve_status: Vec<i32>,
    /// Field 20101.
    #[prost(uint64, tag = "20101")]
    pub lease_id: u64,
    /// Field 20102.
    #[prost(uint64, tag = "20102")]
    pub lease_ms: u64,
}

/// What a node of kvdock tells of itself in `GetPeerInfoResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct KvdockNode {
    /// Field 1.
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// Field 2.
    #[prost(uint64, tag = "2")]
    pub instance: u64,
    /// Field 3.
    #[prost(string, tag = "3")]
    pub data_address: String,
    /// Field 4.
    #[prost(message, optional, tag = "4")]
    pub rdma: Option<KvdockRdma>,
}

/// How RDMA reaches the memory of a node of kvdock.
#[derive(Clone, PartialEq, Message)]
pub struct KvdockRdma {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub server: String,
    /// Field 2.
    #[prost(string, repeated, tag = "2")]
    pub devices: Vec<String>,
    /// Field 3.
    #[prost(message, repeated, tag = "3")]
    pub buffers: Vec<KvdockBuffer>,
    /// Field 4.
    #[prost(string, tag = "4")]
    pub priorities: String,
}

/// Registered memory; its pages follow one another.
#[derive(Clone, PartialEq, Message)]
pub struct KvdockBuffer {
    /// Field 1.
    #[prost(uint64, tag = "1")]
    pub address: u64,
    /// Field 2.
    #[prost(uint64, tag = "2")]
    pub len: u64,
    /// Field 3.
    #[prost(string, tag = "3")]
    pub place: String,
    /// Field 4.
    #[prost(uint32, repeated, tag = "4")]
    pub keys: Vec<u32>,
}

/// `kvdock.UmbpNode/Release`: a reader is done with what it had resolved.
#[derive(Clone, PartialEq, Message)]
pub struct ReleaseRequest {
    /// Field 1.
    #[prost(uint64, tag = "1")]
    pub lease_id: u64,
}

/// `kvdock.UmbpNode/Connect`, both ways: one side of a connection of queue pairs, as JSON.
#[derive(Clone, PartialEq, Message)]
pub struct ConnectMessage {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub description: String,
}

/// `kvdock.UmbpNode/Clear`: what is named with a prefix goes.
#[derive(Clone, PartialEq, Message)]
pub struct ClearRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub prefix: String,
}

/// An answer that says nothing but that it was done.
#[derive(Clone, PartialEq, Message)]
pub struct DoneResponse {}

/// Values of `TierType`.
pub mod tier {
    /// Memory of a device.
    pub const HBM: i32 = 1;
    /// Memory of the host.
    pub const DRAM: i32 = 2;
    /// Disk.
    pub const SSD: i32 = 3;
}

/// Values of `AllocateSlotOutcome`.
pub mod allocated {
    /// There is a slot.
    pub const YES: i32 = 1;
    /// The key is there.
    pub const ALREADY_EXISTS: i32 = 2;
    /// It is not to be had.
    pub const FAILED: i32 = 3;
    /// There is no room.
    pub const NO_SPACE: i32 = 4;
}

/// Values of `ResolveStatus`.
pub mod resolved {
    /// It is there.
    pub const FOUND: i32 = 1;
    /// It is not.
    pub const MISSING: i32 = 2;
    /// It is, and can't be read there now.
    pub const BUSY: i32 = 3;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_skip_what_nodes_of_kvdock_add() {
        /// As release 1.2.4 has it.
        #[derive(Clone, PartialEq, Message)]
        struct Theirs {
            #[prost(bytes = "vec", tag = "1")]
            engine_desc: Vec<u8>,
            #[prost(uint64, tag = "11")]
            page_size: u64,
        }
        let node = KvdockNode { version: 1, instance: 7, data_address: "10.0.0.1:5".to_owned(), rdma: None };
        let ours = GetPeerInfoResponse { page_size: 4096, kvdock: Some(node), ..GetPeerInfoResponse::default() };
        let theirs = Theirs::decode(ours.encode_to_vec().as_slice()).unwrap();
        assert_eq!(theirs, Theirs { engine_desc: Vec::new(), page_size: 4096 });
        // And the other way round.
        let back = GetPeerInfoResponse::decode(theirs.encode_to_vec().as_slice()).unwrap();
        assert_eq!((back.page_size, back.kvdock), (4096, None));
        let request = BatchResolveKeysRequest { keys: vec!["a".to_owned()], omit_descs: true, lease_ms: 0 };
        assert_eq!(request.encode_to_vec(), [0x0a, 1, b'a', 0x10, 1]);
    }

    #[test]
    fn messages_have_the_bytes_of_the_schema() {
        let slot = AllocateSlotRequest { size: 300, tier: tier::DRAM, key: "k".to_owned(), ..Default::default() };
        assert_eq!(slot.encode_to_vec(), [0x08, 0xac, 0x02, 0x10, 2, 0x1a, 1, b'k']);
        let answer = BatchResolveKeysResponse {
            page_size: 1,
            found: vec![true, false],
            page_count: vec![2, 0],
            page_index: vec![5, 6],
            resolve_status: vec![resolved::FOUND, resolved::MISSING],
            ..Default::default()
        };
        let bytes = [0x10, 1, 0x1a, 2, 1, 0, 0x32, 2, 2, 0, 0x42, 2, 5, 6, 0x52, 2, 1, 2];
        assert_eq!(answer.encode_to_vec(), bytes);
        assert_eq!(BatchResolveKeysResponse::decode(&bytes[..]).unwrap(), answer);
    }
}
