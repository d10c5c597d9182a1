//! The service that other nodes and the master call.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tonic::body::Body;
use tonic::codegen::http;
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use super::node::Node;
use super::pool::{Allocated, Located, PENDING};
use super::rpc::{INSTANCE, MESSAGE, instance_text};
use crate::wire::peer::{
    AbortSlotRequest, AllocateSlotRequest, AllocateSlotResponse, BatchAbortSlotsRequest, BatchAllocateSlotsRequest,
    BatchAllocateSlotsResponse, BatchCommitSlotsRequest, BatchResolveKeysRequest, BatchResolveKeysResponse,
    BatchSuccessResponse, ClearRequest, CommitSlotRequest, ConnectMessage, DoneResponse, EvictKeyEntry,
    EvictKeyRequest, EvictKeyResponse, GetPeerInfoRequest, GetPeerInfoResponse, PageLocation, ReleaseRequest,
    ResolveKeyRequest, ResolveKeyResponse, SuccessResponse, allocated, resolved, tier,
};

/// Longest lease that another node of kvdock may ask for.
const LEASE: Duration = Duration::from_secs(60);
/// How long the master may take to hear of what was removed for another node.
const TELL: Duration = Duration::from_secs(5);

/// Calls of other nodes.
#[derive(Debug, Clone)]
pub struct Service(pub Arc<Node>);

type Answer = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

impl tower::Service<http::Request<Body>> for Service {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Answer {
        let node = self.0.clone();
        Box::pin(async move { Ok(answer(node, request).await) })
    }
}

/// One call: its message goes to `work`, on a thread that may wait where `waits` says so.
async fn unary<Q, A>(
    request: http::Request<Body>,
    node: Arc<Node>,
    waits: bool,
    work: fn(&Node, Q) -> Result<A, Status>,
) -> http::Response<Body>
where
    Q: prost::Message + Default + 'static,
    A: prost::Message + 'static,
{
    let codec: ProstCodec<A, Q> = ProstCodec::default();
    let mut grpc =
        tonic::server::Grpc::new(codec).max_decoding_message_size(MESSAGE).max_encoding_message_size(MESSAGE);
    let service = tower::service_fn(move |request: Request<Q>| {
        let node = node.clone();
        async move {
            let request = request.into_inner();
            let answer = match waits {
                false => work(&node, request),
                true => {
                    let done = tokio::task::spawn_blocking(move || work(&node, request)).await;
                    done.unwrap_or_else(|error| Err(Status::internal(error.to_string())))
                }
            };
            answer.map(Response::new)
        }
    });
    grpc.unary(service, request).await
}

async fn answer(node: Arc<Node>, request: http::Request<Body>) -> http::Response<Body> {
    let meant = request.headers().get(INSTANCE);
    if meant.is_some_and(|meant| meant.as_bytes() != instance_text(node.instance).as_bytes()) {
        return Status::aborted("the node that is meant is not here any more; another one has come to its address")
            .into_http();
    }
    match request.uri().path() {
        "/umbp.UMBPPeer/GetPeerInfo" => unary(request, node, false, info).await,
        // Where there are segments, what makes room is written there before, and what is there is read.
        "/umbp.UMBPPeer/AllocateSlot" => {
            let waits = node.pool.has_below();
            unary(request, node, waits, |node, slot: AllocateSlotRequest| Ok(allocate(node, &slot))).await
        }
        "/umbp.UMBPPeer/BatchAllocateSlots" => {
            let waits = node.pool.has_below();
            unary(request, node, waits, allocate_all).await
        }
        "/umbp.UMBPPeer/CommitSlot" => {
            unary(request, node, false, |node, slot: CommitSlotRequest| {
                Ok(SuccessResponse { success: commit(node, &slot) })
            })
            .await
        }
        "/umbp.UMBPPeer/BatchCommitSlots" => {
            unary(request, node, false, |node, all: BatchCommitSlotsRequest| {
                Ok(BatchSuccessResponse { success: all.entries.iter().map(|slot| commit(node, slot)).collect() })
            })
            .await
        }
        "/umbp.UMBPPeer/AbortSlot" => {
            unary(request, node, false, |node, slot: AbortSlotRequest| {
                node.pool.abort(slot.slot_id);
                Ok(SuccessResponse { success: true })
            })
            .await
        }
        "/umbp.UMBPPeer/BatchAbortSlots" => {
            unary(request, node, false, |node, all: BatchAbortSlotsRequest| {
                all.slot_ids.iter().for_each(|slot| node.pool.abort(*slot));
                Ok(BatchSuccessResponse { success: vec![true; all.slot_ids.len()] })
            })
            .await
        }
        "/umbp.UMBPPeer/ResolveKey" => {
            let waits = node.pool.has_below();
            unary(request, node, waits, resolve).await
        }
        "/umbp.UMBPPeer/BatchResolveKeys" => {
            let waits = node.pool.has_below();
            unary(request, node, waits, resolve_all).await
        }
        "/umbp.UMBPPeer/EvictKey" => unary(request, node, true, evict).await,
        "/kvdock.UmbpNode/Release" => {
            unary(request, node, false, |node, lease: ReleaseRequest| {
                node.pool.release(lease.lease_id);
                Ok(DoneResponse {})
            })
            .await
        }
        "/kvdock.UmbpNode/Connect" => unary(request, node, true, connect).await,
        "/kvdock.UmbpNode/Clear" => unary(request, node, true, clear).await,
        other => Status::unimplemented(format!("there is no {other} here")).into_http(),
    }
}

fn info(node: &Node, _: GetPeerInfoRequest) -> Result<GetPeerInfoResponse, Status> {
    // To nodes that are none of kvdock this one looks like one without an I/O engine: its memory is out of their reach.
    let page_size = node.pool.page_size();
    Ok(GetPeerInfoResponse { page_size, kvdock: Some(node.describe()), ..GetPeerInfoResponse::default() })
}

fn locations(pages: &[u32]) -> Vec<PageLocation> {
    pages.iter().map(|page| PageLocation { buffer_index: 0, page_index: *page }).collect()
}

fn allocate(node: &Node, slot: &AllocateSlotRequest) -> AllocateSlotResponse {
    let empty = |outcome| AllocateSlotResponse { outcome, ..AllocateSlotResponse::default() };
    // What is to go to segments goes by way of memory.
    let has_tier = slot.tier == tier::DRAM || (slot.tier == tier::SSD && node.pool.has_below());
    if slot.size == 0 || !has_tier || slot.key.is_empty() || node.is_closed() {
        return empty(allocated::FAILED);
    }
    match node.pool.allocate(&slot.key, slot.size) {
        Allocated::Exists => empty(allocated::ALREADY_EXISTS),
        Allocated::Pending => empty(allocated::FAILED),
        Allocated::NoSpace => empty(allocated::NO_SPACE),
        Allocated::Yes(slot_id, pages) => AllocateSlotResponse {
            outcome: allocated::YES,
            slot_id,
            pages: locations(&pages),
            page_size: node.pool.page_size(),
            pending_ttl_ms: PENDING.as_millis() as u64,
            ..AllocateSlotResponse::default()
        },
    }
}

fn allocate_all(node: &Node, all: BatchAllocateSlotsRequest) -> Result<BatchAllocateSlotsResponse, Status> {
    Ok(BatchAllocateSlotsResponse { entries: all.entries.iter().map(|slot| allocate(node, slot)).collect() })
}

fn commit(node: &Node, slot: &CommitSlotRequest) -> bool {
    let (good, waiting) = node.pool.commit(slot.slot_id, &slot.key);
    node.happened(waiting);
    good
}

fn resolve(node: &Node, request: ResolveKeyRequest) -> Result<ResolveKeyResponse, Status> {
    node.pool.bring(&[&request.key]);
    let found = node.pool.resolve(&request.key);
    Ok(found.map_or_else(ResolveKeyResponse::default, |found| ResolveKeyResponse {
        found: true,
        pages: locations(&found.pages),
        page_size: node.pool.page_size(),
        size: found.len,
        ..ResolveKeyResponse::default()
    }))
}

fn resolve_all(node: &Node, request: BatchResolveKeysRequest) -> Result<BatchResolveKeysResponse, Status> {
    let mut answer = BatchResolveKeysResponse { page_size: node.pool.page_size(), ..Default::default() };
    let names: Vec<&str> = request.keys.iter().map(String::as_str).collect();
    node.pool.bring(&names);
    let found: Vec<Option<Located>> = match request.lease_ms {
        0 => request.keys.iter().map(|key| node.pool.resolve(key)).collect(),
        time => {
            let time = Duration::from_millis(time).min(LEASE);
            let (lease, found) = node.pool.hold(&request.keys, time);
            (answer.lease_id, answer.lease_ms) = (lease, time.as_millis() as u64);
            found
        }
    };
    let below = node.pool.below().map_or_else(|| vec![None; names.len()], |below| below.find(&names));
    for (located, below) in found.into_iter().zip(below) {
        let there = located.is_some();
        // Memory has no room for it now. Its bytes can be asked for by its name.
        let is_busy = !there && below.is_some();
        let located = located.unwrap_or(Located { pages: Vec::new(), len: below.unwrap_or(0) });
        answer.found.push(there);
        answer.tier.push(if is_busy { tier::SSD } else { tier::DRAM });
        answer.size.push(located.len);
        answer.page_count.push(located.pages.len() as u32);
        answer.buffer_index.extend(located.pages.iter().map(|_| 0));
        answer.page_index.extend(located.pages);
        answer.backend_id.push(0);
        answer.resolve_status.push(match (there, is_busy) {
            (true, _) => resolved::FOUND,
            (false, true) => resolved::BUSY,
            (false, false) => resolved::MISSING,
        });
    }
    Ok(answer)
}

fn evict(node: &Node, request: EvictKeyRequest) -> Result<EvictKeyResponse, Status> {
    let freed: Vec<u64> = match request.remove {
        true => {
            let names: Vec<&str> = request.keys.iter().map(String::as_str).collect();
            node.pool.remove(&names).into_iter().map(u64::from).collect()
        }
        false => node.pool.evict(&request.keys),
    };
    let entry = |(key, bytes_freed): (String, u64)| EvictKeyEntry { key, bytes_freed };
    let evicted: Vec<EvictKeyEntry> = request.keys.into_iter().zip(freed).map(entry).collect();
    // Who removes a page wants to store another in its place, for which the master must not take this one.
    if request.remove && evicted.iter().any(|entry| entry.bytes_freed > 0) {
        node.tell(Instant::now() + TELL);
    } else {
        node.wake();
    }
    Ok(EvictKeyResponse { evicted })
}

fn connect(node: &Node, message: ConnectMessage) -> Result<ConnectMessage, Status> {
    let Some(rdma) = &node.rdma else {
        return Err(Status::failed_precondition("this node does not use RDMA"));
    };
    let request = serde_json::from_str(&message.description)
        .map_err(|error| Status::invalid_argument(format!("this is no description of queue pairs: {error}")))?;
    let answer = serde_json::to_string(&rdma.transport().answer(&request));
    Ok(ConnectMessage { description: answer.map_err(|error| Status::internal(error.to_string()))? })
}

fn clear(node: &Node, request: ClearRequest) -> Result<DoneResponse, Status> {
    if request.prefix.is_empty() {
        return Err(Status::invalid_argument("a prefix is needed: what has none is other models' too"));
    }
    node.pool.clear(&request.prefix);
    node.tell(Instant::now() + TELL);
    Ok(DoneResponse {})
}
