//! Messages of the master, service `umbp.UMBPMaster`. Enumerations are plain numbers: an unknown one is no error.

use prost::{Message, Oneof};

/// `TierCapacity`.
#[derive(Clone, PartialEq, Message)]
pub struct TierCapacity {
    /// Field 1.
    #[prost(int32, tag = "1")]
    pub tier: i32,
    /// Field 2.
    #[prost(uint64, tag = "2")]
    pub total_capacity_bytes: u64,
    /// Field 3.
    #[prost(uint64, tag = "3")]
    pub available_capacity_bytes: u64,
    /// Field 4.
    #[prost(uint64, tag = "4")]
    pub max_allocatable_bytes: u64,
}

/// `LogicalTierCapacity`.
#[derive(Clone, PartialEq, Message)]
pub struct LogicalTierCapacity {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Field 2.
    #[prost(int32, tag = "2")]
    pub representative_tier: i32,
    /// Field 3.
    #[prost(uint64, tag = "3")]
    pub total_capacity_bytes: u64,
    /// Field 4.
    #[prost(uint64, tag = "4")]
    pub available_capacity_bytes: u64,
    /// Field 5.
    #[prost(uint64, tag = "5")]
    pub max_allocatable_bytes: u64,
    /// Field 6.
    #[prost(bool, tag = "6")]
    pub put_eligible: bool,
    /// Field 7.
    #[prost(double, tag = "7")]
    pub peak_member_utilization: f64,
}

/// `RegisterClientRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct RegisterClientRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub node_id: String,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub node_address: String,
    /// Field 3.
    #[prost(message, repeated, tag = "3")]
    pub tier_capacities: Vec<TierCapacity>,
    /// Field 4.
    #[prost(string, tag = "4")]
    pub peer_address: String,
    /// Field 5.
    #[prost(bytes = "vec", tag = "5")]
    pub engine_desc: Vec<u8>,
    /// Field 13.
    #[prost(string, repeated, tag = "13")]
    pub tags: Vec<String>,
    /// Field 14.
    #[prost(message, repeated, tag = "14")]
    pub logical_tier_capacities: Vec<LogicalTierCapacity>,
}

/// `RegisterClientResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct RegisterClientResponse {
    /// Field 1.
    #[prost(uint64, tag = "1")]
    pub heartbeat_interval_ms: u64,
    /// Field 2.
    #[prost(uint64, tag = "2")]
    pub ack_seq: u64,
    /// Field 3.
    #[prost(bool, tag = "3")]
    pub supports_max_allocatable_bytes: bool,
    /// Field 4.
    #[prost(bool, tag = "4")]
    pub supports_logical_tiers: bool,
}

/// `UnregisterClientRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct UnregisterClientRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub node_id: String,
}

/// `UnregisterClientResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct UnregisterClientResponse {}

/// `KvEvent`.
#[derive(Clone, PartialEq, Message)]
pub struct KvEvent {
    /// Field 1.
    #[prost(int32, tag = "1")]
    pub kind: i32,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub key: String,
    /// Field 3.
    #[prost(int32, tag = "3")]
    pub tier: i32,
    /// Field 4.
    #[prost(uint64, tag = "4")]
    pub size: u64,
    /// Field 5.
    #[prost(string, tag = "5")]
    pub logical_tier: String,
}

/// `EventBundle`.
#[derive(Clone, PartialEq, Message)]
pub struct EventBundle {
    /// Field 1.
    #[prost(uint64, tag = "1")]
    pub seq: u64,
    /// Field 2.
    #[prost(message, repeated, tag = "2")]
    pub events: Vec<KvEvent>,
}

/// `TierKvCount`.
#[derive(Clone, PartialEq, Message)]
pub struct TierKvCount {
    /// Field 1.
    #[prost(int32, tag = "1")]
    pub tier: i32,
    /// Field 2.
    #[prost(uint64, tag = "2")]
    pub count: u64,
}

/// `HeartbeatRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct HeartbeatRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub node_id: String,
    /// Field 2.
    #[prost(message, repeated, tag = "2")]
    pub bundles: Vec<EventBundle>,
    /// Field 3.
    #[prost(bool, tag = "3")]
    pub is_full_sync: bool,
    /// Field 4.
    #[prost(message, repeated, tag = "4")]
    pub tier_capacities: Vec<TierCapacity>,
    /// Field 6.
    #[prost(uint64, tag = "6")]
    pub delta_seq_baseline: u64,
    /// Field 7.
    #[prost(message, repeated, tag = "7")]
    pub tier_kv_counts: Vec<TierKvCount>,
    /// Field 8.
    #[prost(message, repeated, tag = "8")]
    pub logical_tier_capacities: Vec<LogicalTierCapacity>,
}

/// `HeartbeatResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct HeartbeatResponse {
    /// Field 1.
    #[prost(int32, tag = "1")]
    pub status: i32,
    /// Field 2.
    #[prost(uint64, tag = "2")]
    pub acked_seq: u64,
    /// Field 3.
    #[prost(bool, tag = "3")]
    pub request_full_sync: bool,
}

/// `RoutePutRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct RoutePutRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub node_id: String,
    /// Field 3.
    #[prost(uint64, tag = "3")]
    pub block_size: u64,
    /// Field 4.
    #[prost(string, repeated, tag = "4")]
    pub exclude_nodes: Vec<String>,
}

/// `RouteGetRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct RouteGetRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub node_id: String,
    /// Field 3.
    #[prost(string, repeated, tag = "3")]
    pub exclude_nodes: Vec<String>,
}

/// `RouteGetResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct RouteGetResponse {
    /// Field 1.
    #[prost(bool, tag = "1")]
    pub found: bool,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub node_id: String,
    /// Field 3.
    #[prost(int32, tag = "3")]
    pub tier: i32,
    /// Field 4.
    #[prost(uint64, tag = "4")]
    pub size: u64,
    /// Field 5.
    #[prost(string, tag = "5")]
    pub peer_address: String,
    /// Field 6.
    #[prost(string, tag = "6")]
    pub logical_tier: String,
}

/// `BatchRoutePutRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchRoutePutRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub node_id: String,
    /// Field 2.
    #[prost(string, repeated, tag = "2")]
    pub keys: Vec<String>,
    /// Field 3.
    #[prost(uint64, repeated, tag = "3")]
    pub block_sizes: Vec<u64>,
    /// Field 4.
    #[prost(string, repeated, tag = "4")]
    pub exclude_nodes: Vec<String>,
}

/// `BatchRoutePutEntry`, and `RoutePutResponse`, which has the same fields.
#[derive(Clone, PartialEq, Message)]
pub struct BatchRoutePutEntry {
    /// Field 1.
    #[prost(int32, tag = "1")]
    pub outcome: i32,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub node_id: String,
    /// Field 3.
    #[prost(int32, tag = "3")]
    pub tier: i32,
    /// Field 4.
    #[prost(string, tag = "4")]
    pub peer_address: String,
    /// Field 5.
    #[prost(string, tag = "5")]
    pub logical_tier: String,
}

/// `BatchRoutePutResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchRoutePutResponse {
    /// Field 1.
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<BatchRoutePutEntry>,
}

/// `BatchRouteGetRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchRouteGetRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub node_id: String,
    /// Field 2.
    #[prost(string, repeated, tag = "2")]
    pub keys: Vec<String>,
    /// Field 3.
    #[prost(string, repeated, tag = "3")]
    pub exclude_nodes: Vec<String>,
}

/// `NodeInfo`.
#[derive(Clone, PartialEq, Message)]
pub struct NodeInfo {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub node_id: String,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub peer_address: String,
}

/// `BatchRouteGetResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchRouteGetResponse {
    /// Field 1.
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<NodeInfo>,
    /// Field 2.
    #[prost(uint32, repeated, tag = "2")]
    pub node_ref: Vec<u32>,
    /// Field 3.
    #[prost(int32, repeated, tag = "3")]
    pub tier: Vec<i32>,
    /// Field 4.
    #[prost(uint64, repeated, tag = "4")]
    pub size: Vec<u64>,
    /// Field 5.
    #[prost(string, repeated, tag = "5")]
    pub logical_tier: Vec<String>,
}

/// `BatchLookupRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchLookupRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub node_id: String,
    /// Field 2.
    #[prost(string, repeated, tag = "2")]
    pub keys: Vec<String>,
}

/// `BatchLookupResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct BatchLookupResponse {
    /// Field 1.
    #[prost(bool, repeated, tag = "1")]
    pub found: Vec<bool>,
}

/// `MetricLabel`.
#[derive(Clone, PartialEq, Message)]
pub struct MetricLabel {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub value: String,
}

/// `HistogramAggregate`.
#[derive(Clone, PartialEq, Message)]
pub struct HistogramAggregate {
    /// Field 1.
    #[prost(double, repeated, tag = "1")]
    pub bounds: Vec<f64>,
    /// Field 2.
    #[prost(uint64, repeated, tag = "2")]
    pub bucket_counts: Vec<u64>,
    /// Field 3.
    #[prost(uint64, tag = "3")]
    pub count: u64,
    /// Field 4.
    #[prost(double, tag = "4")]
    pub sum: f64,
}

/// `ReportMetricsRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct ReportMetricsRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub node_id: String,
    /// Field 2.
    #[prost(message, repeated, tag = "2")]
    pub metrics: Vec<MetricSample>,
}

/// `ReportMetricsResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct ReportMetricsResponse {}

/// `ExternalKvBlocksRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct ExternalKvBlocksRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub node_id: String,
    /// Field 2.
    #[prost(string, repeated, tag = "2")]
    pub hashes: Vec<String>,
    /// Field 3.
    #[prost(int32, tag = "3")]
    pub tier: i32,
}

/// `ExternalKvBlocksResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct ExternalKvBlocksResponse {}

/// `ExternalKvTierRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct ExternalKvTierRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub node_id: String,
    /// Field 2.
    #[prost(int32, tag = "2")]
    pub tier: i32,
}

/// `ExternalKvNodeRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct ExternalKvNodeRequest {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub node_id: String,
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
}

/// `TierHashes`.
#[derive(Clone, PartialEq, Message)]
pub struct TierHashes {
    /// Field 1.
    #[prost(int32, tag = "1")]
    pub tier: i32,
    /// Field 2.
    #[prost(string, repeated, tag = "2")]
    pub hashes: Vec<String>,
}

/// `ExternalKvNodeMatch`.
#[derive(Clone, PartialEq, Message)]
pub struct ExternalKvNodeMatch {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub node_id: String,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub peer_address: String,
    /// Field 3.
    #[prost(message, repeated, tag = "3")]
    pub hashes_by_tier: Vec<TierHashes>,
}

/// `MatchExternalKvResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct MatchExternalKvResponse {
    /// Field 1.
    #[prost(message, repeated, tag = "1")]
    pub matches: Vec<ExternalKvNodeMatch>,
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

/// `ExternalKvHitCountsRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct ExternalKvHitCountsRequest {
    /// Field 1.
    #[prost(string, repeated, tag = "1")]
    pub hashes: Vec<String>,
}

/// `ExternalKvHitCountsResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct ExternalKvHitCountsResponse {
    /// Field 1.
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<HitCountEntry>,
}

/// `MetricSample`.
#[derive(Clone, PartialEq, Message)]
pub struct MetricSample {
    /// Field 1.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Field 2.
    #[prost(string, tag = "2")]
    pub help: String,
    /// Field 3.
    #[prost(message, repeated, tag = "3")]
    pub labels: Vec<MetricLabel>,
    /// Fields 4 to 6.
    #[prost(oneof = "MetricValue", tags = "4, 5, 6")]
    pub value: Option<MetricValue>,
}

/// What a metric says.
#[derive(Clone, PartialEq, Oneof)]
pub enum MetricValue {
    /// Adds to a counter.
    #[prost(double, tag = "4")]
    CounterDelta(f64),
    /// Sets a gauge.
    #[prost(double, tag = "5")]
    GaugeValue(f64),
    /// Observations.
    #[prost(message, tag = "6")]
    HistogramAggregate(HistogramAggregate),
}
