//! The heartbeat: tells the master that this client lives, and notices that the master has started anew.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdock_plugin_api::{LogLevel, MetricKind};

use super::Member;
use crate::limit::Limit;
use crate::metadata::Metadata;
use crate::wire::rpc;
use crate::wire::types::ClientStatus;

const BEAT: Duration = Duration::from_secs(1);
const BEAT_TIME: Duration = Duration::from_secs(3);
/// How often it is looked whether the metadata server still knows this peer.
const LOOK: Duration = Duration::from_secs(10);
/// How often it is looked whether the master still knows the others.
const PEERS: Duration = Duration::from_secs(5);

impl Member {
    /// Beats until the member leaves.
    pub(super) fn beat(&self) {
        let mut known = false;
        let mut looked = Instant::now();
        let mut looked_at_peers = Instant::now();
        let mut beaten: Option<Instant> = None;
        while !self.is_stopping() {
            self.revoke_waiting();
            if beaten.is_none_or(|at| at.elapsed() >= BEAT) {
                beaten = Some(Instant::now());
                known = self.ping(known);
                self.tell_losses();
                let all = looked_at_peers.elapsed() >= PEERS;
                if all {
                    looked_at_peers = Instant::now();
                }
                self.look_at_peers(all);
                if looked.elapsed() >= LOOK {
                    looked = Instant::now();
                    self.look_at_metadata();
                    self.peers.drop_dead();
                }
            }
            let next = beaten.map_or(Duration::ZERO, |at| BEAT.saturating_sub(at.elapsed()));
            if self.pause(next.max(Duration::from_millis(1))) {
                return;
            }
        }
    }

    /// One beat. Says whether the master knows this client.
    pub(super) fn ping(&self, known: bool) -> bool {
        match self.heart.call::<rpc::Ping>(&self.id, &Limit::within(BEAT_TIME)) {
            Ok(Ok(pong)) if pong.status == ClientStatus::NEED_REMOUNT => self.remount(known),
            Ok(Ok(_)) => {
                self.state.well();
                true
            }
            Ok(Err(code)) => {
                self.state.fail(&format!("master {}: {code}", self.master.address()));
                known
            }
            Err(error) => {
                self.state.fail(&error.to_string());
                known
            }
        }
    }

    /// The master does not know this client: the first time that is how it goes; later it has started anew, or has not heard from this
    /// client for too long. Then all objects of this segment are gone, and addresses that it named before mean other things.
    fn remount(&self, known: bool) -> bool {
        if known {
            self.forgotten.store(true, Ordering::Release);
            self.epoch.fetch_add(1, Ordering::AcqRel);
            self.peers.forget_all();
            self.host.metric(MetricKind::CounterAdd, "mooncake_remounts", "", 1.0);
            let text = format!("master {} has forgotten this client; its objects here are gone", self.master.address());
            self.host.log(LogLevel::Warn, "member", &text);
        }
        if let Some(lent) = &self.lent
            && let Err(why) = lent.publish(self.peers.metadata())
        {
            self.state.fail(&why);
            return false;
        }
        let segments = self.lent.iter().map(|lent| lent.segment.clone()).collect();
        match self.heart.call::<rpc::ReMountSegment>(&(segments, self.id), &Limit::within(BEAT_TIME)) {
            Ok(Ok(())) => {
                self.state.well();
                if self.forgotten.swap(false, Ordering::AcqRel) {
                    self.lost(true);
                }
                true
            }
            Ok(Err(code)) => {
                self.state.fail(&format!("master {} does not take the segment again: {code}", self.master.address()));
                false
            }
            Err(error) => {
                self.state.fail(&error.to_string());
                false
            }
        }
    }

    /// A metadata server that was started again knows nobody, and nobody tells it.
    fn look_at_metadata(&self) {
        let (Some(lent), Metadata::Server(server)) = (&self.lent, self.peers.metadata()) else { return };
        if server.is_published(&lent.segment.name, &Limit::within(BEAT_TIME)) == Ok(false) {
            let told = lent.publish(self.peers.metadata());
            let text = match told {
                Ok(()) => "the metadata server had forgotten this peer and was told again".to_owned(),
                Err(why) => format!("the metadata server has forgotten this peer: {why}"),
            };
            self.host.log(LogLevel::Warn, "member", &text);
        }
    }
}
