//! Every call that was recorded between real programs: read, and written again to the same bytes.

use std::path::Path;

use prost::Message;
use serde_json::Value;

use super::{master, standalone};

fn bytes(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

fn same<M: Message + Default + std::fmt::Debug>(what: &str, hex: &str) {
    let bytes = bytes(hex);
    let message = M::decode(bytes.as_slice()).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(message.encode_to_vec(), bytes, "{what}: {message:?}");
}

macro_rules! calls {
    ($method:expr, $request:expr, $response:expr, { $($name:literal: $ask:ty => $answer:ty,)+ }) => {
        match $method {
            $($name => {
                same::<$ask>(concat!($name, " request"), $request);
                same::<$answer>(concat!($name, " response"), $response);
            })+
            other => panic!("there is no test for {other}"),
        }
    };
}

#[test]
fn captured_messages_come_back_to_the_byte() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/captures/grpc-messages.jsonl");
    let text = std::fs::read_to_string(path).unwrap();
    let mut seen = 0;
    for line in text.lines() {
        let call: Value = serde_json::from_str(line).unwrap();
        let of = |key: &str| call[key].as_str().unwrap_or("").to_owned();
        let (request, response) = (of("request_hex"), of("response_hex"));
        let method = of("method");
        let method = method.strip_prefix("/umbp.").unwrap();
        calls!(method, &request, &response, {
            "UMBPMaster/RegisterClient": master::RegisterClientRequest => master::RegisterClientResponse,
            "UMBPMaster/UnregisterClient": master::UnregisterClientRequest => master::UnregisterClientResponse,
            "UMBPMaster/Heartbeat": master::HeartbeatRequest => master::HeartbeatResponse,
            "UMBPMaster/BatchRoutePut": master::BatchRoutePutRequest => master::BatchRoutePutResponse,
            "UMBPMaster/BatchRouteGet": master::BatchRouteGetRequest => master::BatchRouteGetResponse,
            "UMBPMaster/BatchLookup": master::BatchLookupRequest => master::BatchLookupResponse,
            "UMBPMaster/ReportMetrics": master::ReportMetricsRequest => master::ReportMetricsResponse,
            "UMBPMaster/ReportExternalKvBlocks": master::ExternalKvBlocksRequest => master::ExternalKvBlocksResponse,
            "UMBPMaster/RevokeExternalKvBlocks": master::ExternalKvBlocksRequest => master::ExternalKvBlocksResponse,
            "UMBPMaster/RevokeAllExternalKvBlocksAtTier": master::ExternalKvTierRequest => master::ExternalKvBlocksResponse,
            "UMBPMaster/RevokeAllExternalKvBlocksForNode": master::ExternalKvNodeRequest => master::ExternalKvBlocksResponse,
            "UMBPMaster/MatchExternalKv": master::MatchExternalKvRequest => master::MatchExternalKvResponse,
            "UMBPMaster/GetExternalKvHitCounts": master::ExternalKvHitCountsRequest => master::ExternalKvHitCountsResponse,
            "UMBPStandalone/Ping": standalone::Empty => standalone::PingResponse,
            "UMBPStandalone/RegisterMemory": standalone::RegisterMemoryRequest => standalone::BoolResponse,
            "UMBPStandalone/DeregisterMemory": standalone::DeregisterMemoryRequest => standalone::Empty,
            "UMBPStandalone/Put": standalone::DataRequest => standalone::BoolResponse,
            "UMBPStandalone/Get": standalone::DataRequest => standalone::BoolResponse,
            "UMBPStandalone/BatchPut": standalone::BatchDataRequest => standalone::BatchBoolResponse,
            "UMBPStandalone/BatchPutWithDepth": standalone::BatchDataWithDepthRequest => standalone::BatchBoolResponse,
            "UMBPStandalone/BatchGet": standalone::BatchDataRequest => standalone::BatchBoolResponse,
            "UMBPStandalone/BatchPutRanges": standalone::BatchRangeDataRequest => standalone::BatchBoolResponse,
            "UMBPStandalone/BatchGetRanges": standalone::BatchRangeDataRequest => standalone::BatchBoolResponse,
            "UMBPStandalone/Exists": standalone::KeyRequest => standalone::BoolResponse,
            "UMBPStandalone/BatchExists": standalone::BatchKeysRequest => standalone::BatchBoolResponse,
            "UMBPStandalone/BatchExistsConsecutive": standalone::BatchKeysRequest => standalone::CountResponse,
            "UMBPStandalone/ReportExternalKvBlocks": standalone::ExternalKvMutationRequest => standalone::BoolResponse,
            "UMBPStandalone/MatchExternalKv": standalone::MatchExternalKvRequest => standalone::MatchExternalKvResponse,
            "UMBPStandalone/Clear": standalone::Empty => standalone::BoolResponse,
            "UMBPStandalone/Flush": standalone::Empty => standalone::BoolResponse,
        });
        seen += 1;
    }
    assert_eq!(seen, 59);
}
