//! What the store has lost, and telling the host of it.
//!
//! The host believes that what was stored is there. A master that starts anew knows nothing of it, and memory that a peer has lent goes with the
//! peer; so the host is told, or it would not store these pages again as long as it holds them itself.

use std::time::{Duration, Instant};

use kvdock_plugin_api::{LogLevel, MetricKind};

use super::Member;
use crate::data::Standing;
use crate::limit::Limit;
use crate::rpc::RpcError;
use crate::wire::{ErrorCode, rpc};

/// What the host calls it, as the boundary has it.
const CONTENTS_LOST: &str = "kvdock_contents_lost";
/// How long after a loss the host is told: members beat each second, so by then the others have mounted their memory again as well, and there
/// is room for what the host stores then.
const SETTLE: Duration = Duration::from_secs(3);
/// How long one question to the master may take.
const TIME: Duration = Duration::from_secs(3);
/// How long a look at peers may take, for it is between two heartbeats; the others are looked at the next time.
const LOOK: Duration = Duration::from_secs(1);

impl Member {
    /// What was stored before is gone, or a part of it. `anew`: the wait for room begins again.
    pub(super) fn lost(&self, anew: bool) {
        let mut due = self.loss_due.lock();
        if anew || due.is_none() {
            *due = Some(Instant::now() + SETTLE);
        }
    }

    /// Tells the host of what was lost, once the time for it has come.
    pub(super) fn tell_losses(&self) {
        let mut due = self.loss_due.lock();
        if due.is_none_or(|at| Instant::now() < at) {
            return;
        }
        *due = None;
        drop(due);
        self.host.log(
            LogLevel::Info,
            "member",
            "pages that were stored before may be gone; the host is told to store what it has",
        );
        self.host.metric(MetricKind::CounterAdd, CONTENTS_LOST, "", 1.0);
    }

    /// Asks the master whether it still knows the memory of peers: what lay in memory that it knows no more is gone. Peers that it was not asked
    /// about yet, or all. The master knows memory by its name, which is the endpoint of the peer, but of official peers that find one another by
    /// asking: of these it does not say that they have left.
    pub(super) fn look_at_peers(&self, all: bool) {
        let began = Instant::now();
        for peer in self.peers.to_look_at(all) {
            if began.elapsed() > LOOK {
                return;
            }
            let asked = self.heart.call::<rpc::QuerySegmentStatus>(&peer.endpoint(), &Limit::within(TIME));
            match asked {
                Ok(Ok(_)) => {
                    if peer.stands(Standing::Mounted) != Standing::Mounted {
                        let text = format!("peer {} lends memory to the store", peer.endpoint());
                        self.host.log(LogLevel::Debug, "member", &text);
                    }
                }
                Ok(Err(ErrorCode::SEGMENT_NOT_FOUND)) => {
                    if peer.stands(Standing::Gone) == Standing::Mounted {
                        let (endpoint, master) = (peer.endpoint(), self.master.address());
                        let text = format!(
                            "peer {endpoint} has left the store of master {master}; the pages in its memory are gone"
                        );
                        self.host.log(LogLevel::Warn, "member", &text);
                        self.lost(false);
                    }
                }
                Ok(Err(_)) | Err(RpcError::Incompatible(_) | RpcError::Failed(_)) => {
                    peer.stands(Standing::Unknown);
                }
                Err(_) => return,
            }
        }
    }
}
