//! This process as a member of the cluster: known to the master, found by its peers.

mod heartbeat;
mod leader;
mod losses;
mod probe;
mod segment;
mod state;
mod under_way;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdock_plugin_api::{Error, ErrorKind, Host, LogLevel, Result};
use parking_lot::{Condvar, Mutex};

use crate::config::Config;
use crate::data::{Peers, Rdma};
use crate::limit::{Limit, Stop};
use crate::metadata::Metadata;
use crate::rpc::{Address, Client, RpcError};
use crate::wire::types::ReplicaType;
use crate::wire::{Uuid, rpc};

pub use leader::{Election, SCHEME};
pub use segment::Lent;
pub use state::State;
pub use under_way::{Claim, Removals, UnderWay};

/// How long one call to the master may take.
pub const RPC_TIME: Duration = Duration::from_secs(10);
/// How long after a first heartbeat that failed the next one comes.
const FIRST_BEATS: Duration = Duration::from_millis(50);
/// How long requests of peers under way may take when this process leaves.
const DRAIN: Duration = Duration::from_secs(2);

/// A member of a cluster.
#[derive(Debug)]
pub struct Member {
    pub host: Host,
    pub master: Client,
    heart: Client,
    pub id: Uuid,
    pub tenant: String,
    pub peers: Peers,
    pub lent: Option<Lent>,
    pub state: State,
    /// Objects that calls of this process are just storing or removing.
    pub under_way: UnderWay,
    /// Counts up when the master has forgotten this client: what it said before means nothing any more.
    pub epoch: AtomicU64,
    /// The master has forgotten this client, and has not taken its memory again yet.
    forgotten: AtomicBool,
    /// When the host is to be told that what was stored is gone.
    loss_due: Mutex<Option<Instant>>,
    /// Names whose puts are to be taken back, and which of their replicas.
    revokes: Mutex<Vec<(String, ReplicaType)>>,
    stopping: Mutex<bool>,
    wake: Condvar,
    left: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// RDMA can't be used, which is for the administrator to mend.
fn unavailable(key: &str, error: &kvdock_rdma::RdmaError) -> Error {
    let key = if matches!(error, kvdock_rdma::RdmaError::Device { .. }) { "device_name" } else { key };
    Error::new(ErrorKind::InvalidConfig, format!("{key}: {error}; with protocol = \"tcp\" no RDMA is needed"))
}

/// What a failed call to the master means to the host.
pub fn error_of(error: &RpcError) -> Error {
    match error {
        RpcError::Unreachable(_) | RpcError::Lost(_) => {
            Error::new(ErrorKind::Unavailable, error.to_string()).retryable()
        }
        RpcError::Stopped { stop: Stop::TimedOut, .. } => {
            Error::new(ErrorKind::TimedOut, error.to_string()).retryable()
        }
        RpcError::Stopped { stop: Stop::Cancelled, .. } => Error::new(ErrorKind::Cancelled, error.to_string()),
        RpcError::Incompatible(_) | RpcError::Failed(_) => Error::new(ErrorKind::Unavailable, error.to_string()),
    }
}

impl Member {
    /// Joins the cluster: looks whether the master is one to talk to, then lends it memory.
    ///
    /// # Errors
    /// When the master can't be reached or is of another release, or the memory can't be lent.
    pub fn join(config: &Config, ranks: u64, host: Host, limit: &Limit<'_>) -> Result<Arc<Member>> {
        let wrong = |key: &str, why: String| Error::new(ErrorKind::InvalidConfig, format!("{key}: {why}"));
        let metadata = Metadata::parse(&config.metadata).map_err(|why| wrong("metadata_server", why))?;
        let wrong_master = |why| wrong("master_server_address", why);
        let election = Election::parse(&config.master, &config.cluster).map_err(wrong_master)?;
        let (view, address) = match &election {
            None => (None, Arc::new(Address::parse(&config.master).map_err(wrong_master)?)),
            Some(election) => {
                let found = election.wait(&limit.at_most(leader::FIRST));
                let (view, address) = found.map_err(|why| Error::new(ErrorKind::Unavailable, why).retryable())?;
                (Some(view), address)
            }
        };
        let id = Uuid::random()
            .map_err(|error| Error::new(ErrorKind::Unavailable, format!("no random numbers: {error}")))?;
        let rdma = match &config.rdma {
            None => None,
            Some(settings) => {
                // A name for who lends nothing; who lends has the one that it is found by.
                let name = format!("{}:0-{}", config.host, segment::short(&id));
                let open = kvdock_rdma::Transport::open(settings.clone(), &name);
                Some(Rdma::new(open.map_err(|error| unavailable("protocol", &error))?))
            }
        };
        let mut member = Member {
            host,
            master: Client::at(address.clone(), config.master_connections),
            heart: Client::at(address, 1),
            id,
            tenant: config.tenant.clone(),
            peers: Peers::new(metadata, config.lanes).with_rdma(rdma),
            lent: None,
            state: State::new(host),
            under_way: UnderWay::default(),
            epoch: AtomicU64::new(0),
            forgotten: AtomicBool::new(false),
            loss_due: Mutex::default(),
            revokes: Mutex::default(),
            stopping: Mutex::new(false),
            wake: Condvar::new(),
            left: AtomicBool::new(false),
            threads: Mutex::default(),
        };
        let is_early = |error: &Error| election.is_some() && error.retryable;
        leader::until_it_serves(limit, is_early, || probe::probe(&member, limit))?;
        let share = config.segment / ranks.max(1);
        if share > 0 {
            member.lent = Some(Lent::serve(config, share, &member.peers)?);
            member.mount(limit)?;
            // The master takes the segment once more when it first hears of this client. It must have done so before it places anything
            // there: what it had placed would be forgotten, and its room given out again.
            member.be_known(limit)?;
        }
        if config.check_server {
            probe::wait_for_segment(&member, config, limit)?;
        }
        let member = Arc::new(member);
        member.start("kvdock-mc-heart", Member::beat)?;
        if let (Some(election), Some(view)) = (election, view) {
            member.start("kvdock-mc-lead", move |member| member.follow_leaders(&election, view))?;
        }
        Ok(member)
    }

    /// Beats until the master knows this client.
    fn be_known(&self, limit: &Limit<'_>) -> Result<()> {
        while !self.ping(false) {
            let Ok(left) = limit.left() else {
                let why = self.state.report().reason;
                return Err(Error::new(ErrorKind::Unavailable, why).retryable());
            };
            std::thread::sleep(FIRST_BEATS.min(left));
        }
        Ok(())
    }

    fn start(self: &Arc<Member>, name: &str, work: impl FnOnce(&Member) + Send + 'static) -> Result<()> {
        let member = self.clone();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || work(&member));
        let fail = |error| {
            self.leave();
            Error::new(ErrorKind::Unavailable, format!("no thread for the master: {error}"))
        };
        self.threads.lock().push(thread.map_err(fail)?);
        Ok(())
    }

    /// The endpoint that replicas in this process's own memory have.
    pub fn own_endpoint(&self) -> Option<&str> {
        self.lent.as_ref().map(|lent| lent.segment.endpoint.as_str())
    }

    /// Has the puts of names taken back soon: when the call that began them has no time left for it.
    pub fn revoke_later(&self, names: impl IntoIterator<Item = String>, kind: ReplicaType) {
        let names: Vec<String> = names.into_iter().collect();
        self.under_way.claim_more(names.iter().map(String::as_str));
        self.revokes.lock().extend(names.into_iter().map(|name| (name, kind)));
        self.wake.notify_all();
    }

    fn revoke_waiting(&self) {
        let waiting = std::mem::take(&mut *self.revokes.lock());
        for kind in [ReplicaType::ALL, ReplicaType::DISK] {
            let names: Vec<&str> =
                waiting.iter().filter(|(_, of)| *of == kind).map(|(name, _)| name.as_str()).collect();
            if names.is_empty() {
                continue;
            }
            let request = (self.id, names.clone(), kind, self.tenant.as_str());
            if let Err(error) = self.heart.call::<rpc::BatchPutRevoke>(&request, &Limit::within(RPC_TIME)) {
                // The master gives up unfinished puts by itself after a while.
                self.host.log(LogLevel::Debug, "member", &format!("puts could not be taken back: {error}"));
            }
            self.under_way.give_back(names.into_iter());
        }
    }

    fn is_stopping(&self) -> bool {
        *self.stopping.lock()
    }

    /// Waits, or less long when there is something to do. Says whether the thread should end.
    fn pause(&self, time: Duration) -> bool {
        let mut stopping = self.stopping.lock();
        if !*stopping {
            self.wake.wait_for(&mut stopping, time);
        }
        *stopping
    }

    /// Leaves the cluster. May be called again.
    pub fn leave(&self) {
        *self.stopping.lock() = true;
        self.wake.notify_all();
        for thread in self.threads.lock().drain(..) {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
        if self.left.swap(true, Ordering::AcqRel) {
            return;
        }
        self.revoke_waiting();
        if let Some(lent) = &self.lent {
            let request = (lent.segment.id, self.id);
            if let Err(error) = self.heart.call::<rpc::UnmountSegment>(&request, &Limit::within(DRAIN)) {
                self.host.log(LogLevel::Info, "member", &format!("the segment was not unmounted: {error}"));
            }
            if let Metadata::Server(server) = self.peers.metadata()
                && let Err(error) = server.withdraw(&lent.segment.name)
            {
                self.host.log(LogLevel::Info, "member", &error);
            }
            lent.server.stop(DRAIN);
        }
        if let Some(rdma) = self.peers.rdma() {
            // Devices know no requests that are half done; what is under way ends here.
            rdma.transport().close();
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.leave();
    }
}
