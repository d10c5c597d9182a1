//! The master: who is in the cluster, and where keys are.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tonic::Code;

use super::limit::Limit;
use super::metrics::{Figures, Report};
use super::rpc::{Failed, Rpc};
use crate::wire::master::{
    BatchLookupRequest, BatchLookupResponse, BatchRouteGetRequest, BatchRouteGetResponse, BatchRoutePutEntry,
    BatchRoutePutRequest, BatchRoutePutResponse, ExternalKvBlocksRequest, ExternalKvBlocksResponse,
    ExternalKvTierRequest, HeartbeatRequest, HeartbeatResponse, MatchExternalKvRequest, MatchExternalKvResponse,
    RegisterClientRequest, RegisterClientResponse, ReportMetricsRequest, ReportMetricsResponse, RouteGetRequest,
    RouteGetResponse, RoutePutRequest, UnregisterClientRequest, UnregisterClientResponse,
};

/// Keys of one question.
const KEYS: usize = 4096;
/// How long a master that did not answer is left alone by calls about pages.
const PAUSE: Duration = Duration::from_secs(1);

/// `RoutePutOutcome`.
const ROUTED: i32 = 1;
const ALREADY_EXISTS: i32 = 2;

/// Where an object is to be stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// With this node, at this address.
    Node(String, String),
    /// Nowhere: it is stored.
    There,
    /// No node has so much room.
    NoRoom,
}

/// Where an object is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The node.
    pub node: String,
    /// Its address.
    pub address: String,
    /// Bytes of the object.
    pub size: u64,
}

/// The master as one node sees it.
#[derive(Debug)]
pub struct Master {
    rpc: Rpc,
    node: String,
    figures: Arc<Figures>,
    /// Until when it is left alone, and why.
    down: Mutex<Option<(Instant, Failed)>>,
}

impl Master {
    /// The master at an address.
    ///
    /// # Errors
    /// When the address is none.
    pub fn new(handle: &Handle, address: &str, node: &str, figures: Arc<Figures>) -> Result<Master, String> {
        let rpc = Rpc::new(handle, "master", address)?;
        Ok(Master { rpc, node: node.to_owned(), figures, down: Mutex::default() })
    }

    fn call<Q, A>(&self, path: &'static str, request: Q, limit: &Limit<'_>) -> Result<A, Failed>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let began = Instant::now();
        let answer = self.rpc.call(path, request, limit);
        let method = path.rsplit('/').next().unwrap_or(path);
        self.figures.called(method, answer.is_ok(), began.elapsed());
        match &answer {
            Ok(_) => *self.down.lock() = None,
            // A call that had hardly any time says nothing of the master.
            Err(failed) if failed.code == Some(Code::Unavailable) || began.elapsed() >= PAUSE => {
                *self.down.lock() = Some((Instant::now() + PAUSE, failed.clone()));
            }
            Err(_) => {}
        }
        answer
    }

    /// A call about pages: it does not wait for a master that has just not answered.
    fn ask<Q, A>(&self, path: &'static str, request: Q, limit: &Limit<'_>) -> Result<A, Failed>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        if let Some((until, failed)) = &*self.down.lock()
            && Instant::now() < *until
        {
            return Err(failed.clone());
        }
        self.call(path, request, limit)
    }

    /// Joins. The error says when a node of this name is alive.
    ///
    /// # Errors
    /// When it can't.
    pub fn register(
        &self,
        request: RegisterClientRequest,
        limit: &Limit<'_>,
    ) -> Result<RegisterClientResponse, Failed> {
        self.call("/umbp.UMBPMaster/RegisterClient", request, limit)
    }

    /// Leaves.
    ///
    /// # Errors
    /// When the master can't be told.
    pub fn unregister(&self, limit: &Limit<'_>) -> Result<(), Failed> {
        let request = UnregisterClientRequest { node_id: self.node.clone() };
        let _: UnregisterClientResponse = self.call("/umbp.UMBPMaster/UnregisterClient", request, limit)?;
        Ok(())
    }

    /// Says that this node lives, and what is new.
    ///
    /// # Errors
    /// When the master can't be told.
    pub fn heartbeat(&self, request: HeartbeatRequest, limit: &Limit<'_>) -> Result<HeartbeatResponse, Failed> {
        self.call("/umbp.UMBPMaster/Heartbeat", request, limit)
    }

    /// Asks where objects are to be stored.
    ///
    /// # Errors
    /// When the master does not say.
    pub fn route_put(
        &self,
        objects: &[(&str, u64)],
        exclude: &[String],
        limit: &Limit<'_>,
    ) -> Result<Vec<Target>, Failed> {
        let mut targets = Vec::with_capacity(objects.len());
        for part in objects.chunks(KEYS) {
            let (node_id, exclude_nodes) = (self.node.clone(), exclude.to_vec());
            let entries: Vec<BatchRoutePutEntry> = if let [(key, block_size)] = part {
                let request =
                    RoutePutRequest { key: (*key).to_owned(), node_id, block_size: *block_size, exclude_nodes };
                vec![self.ask("/umbp.UMBPMaster/RoutePut", request, limit)?]
            } else {
                let request = BatchRoutePutRequest {
                    node_id,
                    keys: part.iter().map(|(key, _)| (*key).to_owned()).collect(),
                    block_sizes: part.iter().map(|(_, size)| *size).collect(),
                    exclude_nodes,
                };
                let answer: BatchRoutePutResponse = self.ask("/umbp.UMBPMaster/BatchRoutePut", request, limit)?;
                answer.entries
            };
            self.fits("BatchRoutePut", part.len(), entries.len())?;
            targets.extend(entries.into_iter().map(|entry| match entry.outcome {
                ROUTED => Target::Node(entry.node_id, entry.peer_address),
                ALREADY_EXISTS => Target::There,
                _ => Target::NoRoom,
            }));
        }
        Ok(targets)
    }

    /// Asks where objects are.
    ///
    /// # Errors
    /// When the master does not say.
    pub fn route_get(
        &self,
        keys: &[&str],
        exclude: &[String],
        limit: &Limit<'_>,
    ) -> Result<Vec<Option<Source>>, Failed> {
        let mut sources = Vec::with_capacity(keys.len());
        for part in keys.chunks(KEYS) {
            let (node_id, exclude_nodes) = (self.node.clone(), exclude.to_vec());
            if let [key] = part {
                let request = RouteGetRequest { key: (*key).to_owned(), node_id, exclude_nodes };
                let answer: RouteGetResponse = self.ask("/umbp.UMBPMaster/RouteGet", request, limit)?;
                let source = Source { node: answer.node_id, address: answer.peer_address, size: answer.size };
                sources.push(answer.found.then_some(source));
                continue;
            }
            let keys = part.iter().map(|key| (*key).to_owned()).collect();
            let request = BatchRouteGetRequest { node_id, keys, exclude_nodes };
            let answer: BatchRouteGetResponse = self.ask("/umbp.UMBPMaster/BatchRouteGet", request, limit)?;
            self.fits("BatchRouteGet", part.len(), answer.node_ref.len())?;
            self.fits("BatchRouteGet", part.len(), answer.size.len())?;
            sources.extend(answer.node_ref.iter().zip(&answer.size).map(|(number, size)| {
                let node = answer.nodes.get((*number as usize).checked_sub(1)?)?;
                Some(Source { node: node.node_id.clone(), address: node.peer_address.clone(), size: *size })
            }));
        }
        Ok(sources)
    }

    /// Asks which objects are with any node.
    ///
    /// # Errors
    /// When the master does not say.
    pub fn lookup(&self, keys: &[&str], limit: &Limit<'_>) -> Result<Vec<bool>, Failed> {
        let mut found = Vec::with_capacity(keys.len());
        for part in keys.chunks(KEYS) {
            let keys = part.iter().map(|key| (*key).to_owned()).collect();
            let request = BatchLookupRequest { node_id: self.node.clone(), keys };
            let answer: BatchLookupResponse = self.ask("/umbp.UMBPMaster/BatchLookup", request, limit)?;
            self.fits("BatchLookup", part.len(), answer.found.len())?;
            found.extend(answer.found);
        }
        Ok(found)
    }

    /// Says that this node holds blocks of its own, or (`add` false) that it does no more.
    ///
    /// # Errors
    /// When the master can't be told.
    pub fn external(&self, add: bool, hashes: Vec<String>, tier: i32, limit: &Limit<'_>) -> Result<(), Failed> {
        for part in hashes.chunks(KEYS) {
            let request = ExternalKvBlocksRequest { node_id: self.node.clone(), hashes: part.to_vec(), tier };
            let path = match add {
                true => "/umbp.UMBPMaster/ReportExternalKvBlocks",
                false => "/umbp.UMBPMaster/RevokeExternalKvBlocks",
            };
            let _: ExternalKvBlocksResponse = self.ask(path, request, limit)?;
        }
        Ok(())
    }

    /// Says that this node holds no blocks of its own at a tier.
    ///
    /// # Errors
    /// When the master can't be told.
    pub fn external_none(&self, tier: i32, limit: &Limit<'_>) -> Result<(), Failed> {
        let request = ExternalKvTierRequest { node_id: self.node.clone(), tier };
        let path = "/umbp.UMBPMaster/RevokeAllExternalKvBlocksAtTier";
        let _: ExternalKvBlocksResponse = self.ask(path, request, limit)?;
        Ok(())
    }

    /// Asks which nodes hold blocks of their own.
    ///
    /// # Errors
    /// When the master does not say.
    pub fn match_external(&self, hashes: Vec<String>, limit: &Limit<'_>) -> Result<MatchExternalKvResponse, Failed> {
        let request = MatchExternalKvRequest { hashes, count_as_hit: false };
        self.ask("/umbp.UMBPMaster/MatchExternalKv", request, limit)
    }

    /// Hands figures over.
    ///
    /// # Errors
    /// When the master does not take them.
    pub fn metrics(&self, report: &Report, limit: &Limit<'_>) -> Result<(), Failed> {
        let request = ReportMetricsRequest { node_id: self.node.clone(), metrics: report.samples.clone() };
        let _: ReportMetricsResponse = self.ask("/umbp.UMBPMaster/ReportMetrics", request, limit)?;
        Ok(())
    }

    fn fits(&self, method: &str, asked: usize, answered: usize) -> Result<(), Failed> {
        if asked == answered {
            return Ok(());
        }
        let text = format!("{}: {method}: it answers for {answered} of {asked} keys", self.rpc.who());
        Err(Failed { code: None, stop: None, text })
    }
}
