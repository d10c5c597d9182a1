//! Shutting down while a call hangs.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::super::admin::{AttachMode, StorageAdmin};
use super::super::backend::*;
use super::super::identity::{Namespace, PAGE_FORMAT, WorkerIdentity};
use super::super::instance_tests::hanging;
use super::super::open::Opened;
use super::super::ranks::Ranks;
use super::super::state::{BackendState, StateCell};
use super::member::Member;
use super::{PluginManager, lock};

struct NoCache;

impl BackendSink for NoCache {
    fn host_pools(&self) -> Vec<HostPoolDescription> {
        Vec::new()
    }
    fn attached(&self, _: Arc<dyn StorageBackend>, _: Place) {}
    fn detached(&self, _: &str) -> bool {
        true
    }
    fn emptied(&self, _: &str) {}
    fn guards(&self, _: &str) -> Option<GuardReport> {
        None
    }
    fn policies(&self) -> (String, String) {
        Default::default()
    }
    fn check_policies(&self, _: &PolicyChange) -> Result<(), String> {
        Ok(())
    }
    fn set_policies(&self, _: &PolicyChange) {}
}

fn identity() -> WorkerIdentity {
    let namespace = Namespace {
        format: PAGE_FORMAT,
        architecture: "llama".into(),
        weights_sha256: "00".into(),
        kv_dtype: "f16".into(),
        host_layout: "page_first".into(),
        page_tokens: 16,
        layers: 30,
        kv_heads: 3,
        head_dim_k: 64,
        head_dim_v: 64,
        tp: (0, 1),
        pp: (0, 1),
        cp: (0, 1),
        numerics_id: "cpu-1".into(),
    };
    WorkerIdentity::new(namespace, "model", [0; 32])
}

/// A manager that attached nothing and has no folder to look in.
pub(super) fn empty() -> PluginManager {
    let config = crate::config::load(&crate::config::Sources::default()).unwrap().config.storage;
    PluginManager::new(config, Vec::new(), identity(), Arc::new(NoCache))
}

#[test]
fn a_hung_call_kept_the_process_for_the_whole_drain_timeout_of_its_backend() {
    let hour = Duration::from_secs(3600);
    let settings = BackendSettings { drain_timeout: hour, ..BackendSettings::default() };
    let manager = empty();
    let mut told = Vec::new();
    for name in ["hangs_at_the_end", "hangs_at_the_end_too"] {
        let state = StateCell::new(name, Box::new(|_| {}));
        state.go(BackendState::Active, "");
        let member = Member::new(name, "moody", settings.clone(), state);
        let (instance, cancelled) = hanging(name, settings.clone());
        member.set_opened(Opened { instance: Arc::new(Ranks::alone(instance)), shown_config: Default::default() });
        let mut board = lock(&manager.shared.board);
        let plan = board.plan(name, &AttachMode::Add, u64::MAX, usize::MAX).unwrap();
        board.put(&plan, usize::MAX, member, true);
        told.push(cancelled);
    }
    // A detach that drains already is cut short too.
    let detaching = manager.clone();
    thread::spawn(move || detaching.detach(Some("hangs_at_the_end"), false));
    let ending = thread::spawn(move || manager.shut_down_within(Duration::from_millis(50)));
    let late = Instant::now() + Duration::from_secs(60);
    while !ending.is_finished() && Instant::now() < late {
        thread::sleep(Duration::from_millis(5));
    }
    assert!(ending.is_finished(), "the drains are still waited for");
    assert!(!ending.join().unwrap(), "what can't be closed is told of");
    assert!(told.iter().all(|cancelled| cancelled()), "the calls were cancelled");
}
