//! What the store has lost, and telling the host of it.
//!
//! The host believes that what was stored is there. A master that starts anew knows nothing of it, and memory that a peer has lent goes with the
//! peer; so the host is told, or it would not store these pages again as long as it holds them itself.

use std::time::{Duration, Instant};

use kvdock_plugin_api::LogLevel;

use super::Member;
use crate::data::{Peer, Standing};
use crate::limit::Limit;
use crate::metadata::{Metadata, Owner};
use crate::rpc::RpcError;
use crate::wire::{ErrorCode, rpc};

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
        self.host.contents_lost();
    }

    /// Asks the master whether it still knows the memory of peers: what lay in memory that it knows no more is gone. Peers that it was not asked
    /// about yet, or all. The master knows memory by its name, which is the endpoint of the peer, but of official peers that find one another by
    /// asking: these are asked themselves.
    pub(super) fn look_at_peers(&self, all: bool) {
        let began = Instant::now();
        for peer in self.peers.to_look_at(all) {
            if began.elapsed() > LOOK {
                return;
            }
            peer.look();
            let asked = self.heart.call::<rpc::QuerySegmentStatus>(&peer.endpoint(), &Limit::within(TIME));
            match asked {
                Ok(Ok(_)) => {
                    if peer.stands(Standing::Mounted) != Standing::Mounted {
                        let text = format!("peer {} lends memory to the store", peer.endpoint());
                        self.host.log(LogLevel::Debug, "member", &text);
                    }
                }
                Ok(Err(ErrorCode::SEGMENT_NOT_FOUND)) => {
                    let before = peer.stands(Standing::Gone);
                    if before == Standing::Mounted {
                        let (endpoint, master) = (peer.endpoint(), self.master.address());
                        let text = format!(
                            "peer {endpoint} has left the store of master {master}; the pages in its memory are gone"
                        );
                        self.host.log(LogLevel::Warn, "member", &text);
                        self.lost(false);
                    } else if matches!(self.peers.metadata(), Metadata::Peer) {
                        peer.stands(before);
                        self.look_at_nameless(&peer, &Limit::within(LOOK));
                    }
                }
                Ok(Err(_)) | Err(RpcError::Incompatible(_) | RpcError::Failed(_)) => {
                    peer.stands(Standing::Unknown);
                }
                Err(_) => return,
            }
        }
    }
    /// Asks a peer itself whether it has the memory that bytes went to. That nobody is there any more, or somebody else, proves that it is gone; that
    /// it does not answer proves nothing. The master may go on naming its pages for a while: `one_ended_lately` is for those who store meanwhile.
    fn look_at_nameless(&self, peer: &Peer, limit: &Limit<'_>) {
        let (endpoint, address) = (peer.endpoint(), peer.address());
        if address == 0 {
            // Nothing of this process lies there, as far as it knows.
            peer.stands(Standing::Gone);
            return;
        }
        let owner = self.peers.metadata().look_for(endpoint, limit);
        if owner.has_lost(address) {
            peer.stands(Standing::Gone);
            self.peers.has_ended(peer);
            let text = format!("peer {endpoint} has ended; the pages in its memory are gone");
            self.host.log(LogLevel::Warn, "member", &text);
            self.lost(false);
            return;
        }
        if let (Owner::Unknown, Standing::Nameless) = (&owner, peer.stands(Standing::Nameless)) {
            let text = format!("peer {endpoint} does not say whether it has its memory still");
            self.host.log(LogLevel::Debug, "member", &text);
        }
    }
}
