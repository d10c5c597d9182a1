//! Messages of a node's server, service `umbp.UMBPStandalone`. Enumerations are plain numbers: an unknown one is no error.

use prost::Message;

/// `Empty`.
#[derive(Clone, PartialEq, Message)]
pub struct Empty {}

/// `PingResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct PingResponse {
    /// Field 1.
    #[prost(bool, tag = "1")]
    pub ready: bool,
    /// Field 2.
    #[prost(int32, tag = "2")]
    pub deployment_mode: i32,
    /// Field 3.
    #[prost(bool, tag = "3")]
    pub supports_ranged_io: bool,
}

/// `BoolResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct BoolResponse {
    /// Field 1.
    #[prost(bool, tag = "1")]
    pub ok: bool,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub error: String,
}

/// `CountResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct CountResponse {
    /// Field 1.
    #[prost(uint64, tag = "1")]
    pub count: u64,
}

/// `KeyRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct KeyRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub key: String,
}

/// `BatchKeysRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchKeysRequest {
    /// Field 1.
    #[prost(string, repeated, tag = "1")]
    pub keys: Vec<String>,
}

/// `DataRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct DataRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub client_id: String,
    /// Field 3.
    #[prost(uint64, tag = "3")]
    pub shm_offset: u64,
    /// Field 4.
    #[prost(uint64, tag = "4")]
    pub size: u64,
    /// Field 5.
    #[prost(uint64, tag = "5")]
    pub region_base: u64,
}

/// `BatchDataRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchDataRequest {
    /// Field 1.
    #[prost(string, repeated, tag = "1")]
    pub keys: Vec<String>,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub client_id: String,
    /// Field 3.
    #[prost(uint64, repeated, tag = "3")]
    pub shm_offsets: Vec<u64>,
    /// Field 4.
    #[prost(uint64, repeated, tag = "4")]
    pub sizes: Vec<u64>,
    /// Field 5.
    #[prost(uint64, repeated, tag = "5")]
    pub region_bases: Vec<u64>,
}

/// `BatchDataWithDepthRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchDataWithDepthRequest {
    /// Field 1.
    #[prost(string, repeated, tag = "1")]
    pub keys: Vec<String>,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub client_id: String,
    /// Field 3.
    #[prost(uint64, repeated, tag = "3")]
    pub shm_offsets: Vec<u64>,
    /// Field 4.
    #[prost(uint64, repeated, tag = "4")]
    pub sizes: Vec<u64>,
    /// Field 5.
    #[prost(int32, repeated, tag = "5")]
    pub depths: Vec<i32>,
    /// Field 6.
    #[prost(uint64, repeated, tag = "6")]
    pub region_bases: Vec<u64>,
}

/// `BatchRangeDataRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchRangeDataRequest {
    /// Field 1.
    #[prost(string, repeated, tag = "1")]
    pub keys: Vec<String>,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub client_id: String,
    /// Field 3.
    #[prost(uint32, repeated, tag = "3")]
    pub range_counts: Vec<u32>,
    /// Field 4.
    #[prost(uint64, repeated, tag = "4")]
    pub shm_offsets: Vec<u64>,
    /// Field 5.
    #[prost(uint64, repeated, tag = "5")]
    pub region_bases: Vec<u64>,
    /// Field 6.
    #[prost(uint64, repeated, tag = "6")]
    pub sizes: Vec<u64>,
    /// Field 7.
    #[prost(uint64, repeated, tag = "7")]
    pub object_offsets: Vec<u64>,
    /// Field 8.
    #[prost(uint64, repeated, tag = "8")]
    pub object_sizes: Vec<u64>,
    /// Field 9.
    #[prost(uint64, tag = "9")]
    pub key_handle: u64,
    /// Field 10.
    #[prost(uint64, tag = "10")]
    pub key_fingerprint: u64,
}

/// `BatchBoolResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchBoolResponse {
    /// Field 1.
    #[prost(bool, repeated, tag = "1")]
    pub ok: Vec<bool>,
    /// Field 2.
    #[prost(uint64, tag = "2")]
    pub key_handle: u64,
    /// Field 3.
    #[prost(bool, tag = "3")]
    pub key_handle_unknown: bool,
}

/// `RegisterMemoryRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct RegisterMemoryRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub client_id: String,
    /// Field 2.
    #[prost(uint64, tag = "2")]
    pub worker_base: u64,
    /// Field 3.
    #[prost(uint64, tag = "3")]
    pub size: u64,
    /// Field 4.
    #[prost(string, tag = "4")]
    pub worker_node_id: String,
    /// Field 5.
    #[prost(string, tag = "5")]
    pub worker_node_address: String,
    /// Field 6.
    #[prost(string, repeated, tag = "6")]
    pub tags: Vec<String>,
    /// Field 7.
    #[prost(int32, tag = "7")]
    pub kind: i32,
    /// Field 8.
    #[prost(int32, tag = "8")]
    pub device_id: i32,
    /// Field 9.
    #[prost(bytes = "vec", tag = "9")]
    pub ipc_handle: Vec<u8>,
    /// Field 10.
    #[prost(uint64, tag = "10")]
    pub ipc_offset: u64,
    /// Field 11.
    #[prost(uint64, tag = "11")]
    pub alloc_base: u64,
}

/// `DeregisterMemoryRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct DeregisterMemoryRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub client_id: String,
}

/// `ExternalKvMutationRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct ExternalKvMutationRequest {
    /// Field 1.
    #[prost(string, repeated, tag = "1")]
    pub hashes: Vec<String>,
    /// Field 2.
    #[prost(int32, tag = "2")]
    pub tier: i32,
    /// Field 3.
    #[prost(string, tag = "3")]
    pub client_id: String,
}

/// `ExternalKvTierRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct ExternalKvTierRequest {
    /// Field 1.
    #[prost(int32, tag = "1")]
    pub tier: i32,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub client_id: String,
}

/// `MatchExternalKvRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct MatchExternalKvRequest {
    /// Field 1.
    #[prost(string, repeated, tag = "1")]
    pub hashes: Vec<String>,
    /// Field 2.
    #[prost(bool, tag = "2")]
    pub count_as_hit: bool,
    /// Field 3.
    #[prost(string, tag = "3")]
    pub client_id: String,
}

/// `ExternalKvMatch`.
#[derive(Clone, PartialEq, Message)]
pub struct ExternalKvMatch {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub node_id: String,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub peer_address: String,
    /// Field 3.
    #[prost(message, repeated, tag = "3")]
    pub hashes_by_tier: Vec<super::master::TierHashes>,
}

/// `MatchExternalKvResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct MatchExternalKvResponse {
    /// Field 1.
    #[prost(message, repeated, tag = "1")]
    pub matches: Vec<ExternalKvMatch>,
}

/// `ExternalKvHitCountsRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct ExternalKvHitCountsRequest {
    /// Field 1.
    #[prost(string, repeated, tag = "1")]
    pub hashes: Vec<String>,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub client_id: String,
}

/// `HitCountEntry`.
#[derive(Clone, PartialEq, Message)]
pub struct HitCountEntry {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub hash: String,
    /// Field 2.
    #[prost(uint64, tag = "2")]
    pub hit_count_total: u64,
}

/// `ExternalKvHitCountsResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct ExternalKvHitCountsResponse {
    /// Field 1.
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<HitCountEntry>,
}
