//! A connection: the queue pairs between one device here and one device of a peer. Either side may ask for it, or both at once; there is one
//! set of queue pairs all the same, and their numbers say which incarnation of the peer it is to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::completion::Batch;
use crate::config::Config;
use crate::device::Device;
use crate::handshake::{Description, parse_gid, path};
use crate::queue::{Posted, Queue, Remote, Work};
use crate::transfer::{Deadline, Stop};
use crate::transport::Exchange;

/// How long a connection that failed is left alone, at first and at most.
const PAUSE_FIRST: Duration = Duration::from_millis(250);
const PAUSE_LAST: Duration = Duration::from_secs(10);
/// Queue pairs that a peer may ask for.
const MOST_QUEUES: usize = 64;

/// Queue pairs that belong together.
#[derive(Debug)]
pub struct Queues {
    list: Vec<Arc<Queue>>,
    next: AtomicUsize,
    is_broken: AtomicBool,
}

impl Queues {
    fn new(device: &Arc<Device>, config: &Config) -> Result<Arc<Queues>, String> {
        let list: Result<Vec<_>, String> =
            (0..config.queues.max(1)).map(|_| Queue::new(device, config).map(Arc::new)).collect();
        Ok(Arc::new(Queues { list: list?, next: AtomicUsize::new(0), is_broken: AtomicBool::new(false) }))
    }

    fn numbers(&self) -> Vec<u32> {
        self.list.iter().map(|queue| queue.number).collect()
    }

    /// Pieces of a request, and bytes that are taken when it is posted.
    pub fn limits(&self) -> (u32, u32) {
        let least = |of: fn(&Queue) -> u32| self.list.iter().map(|queue| of(queue)).min().unwrap_or(0);
        (least(|queue| queue.pieces).max(1), least(|queue| queue.inline))
    }

    fn connect(&self, peer: &Description, config: &Config) -> Result<(), String> {
        if peer.qp_num.len() != self.list.len() {
            return Err(format!(
                "the peer has {} queue pairs for a connection, this side has {}; both need the same number",
                peer.qp_num.len(),
                self.list.len()
            ));
        }
        let gid = parse_gid(&peer.local_gid).ok_or_else(|| format!("{:?} is no GID of the peer", peer.local_gid))?;
        for (queue, number) in self.list.iter().zip(&peer.qp_num) {
            if *number >= 1 << 24 {
                return Err(format!("{number} is no number of a queue pair of the peer"));
            }
            queue.connect(&Remote { number: *number, lid: peer.local_lid, gid }, config)?;
        }
        Ok(())
    }

    /// Whether they have failed.
    pub fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Acquire)
    }

    /// Has all requests of them end; says whether they had not failed before.
    pub fn fail(&self) -> bool {
        let first = !self.is_broken.swap(true, Ordering::AcqRel);
        if first {
            self.list.iter().for_each(|queue| queue.fail());
        }
        first
    }

    /// Ends them: afterwards no device touches memory for them.
    pub fn end(&self) {
        self.is_broken.store(true, Ordering::Release);
        self.list.iter().for_each(|queue| queue.end());
    }

    /// Gives a request to the next queue pair that has room.
    ///
    /// # Safety
    /// As [`Queue::post`].
    pub unsafe fn post(&self, batch: &Arc<Batch>, slice: u32, work: &mut Work<'_>) -> Posted {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        for shift in 0..self.list.len() {
            let Some(queue) = self.list.get(first.wrapping_add(shift) % self.list.len()) else { break };
            // SAFETY: the caller's promise.
            match unsafe { queue.post(batch, slice, work) } {
                Posted::Full => {}
                other => return other,
            }
        }
        Posted::Full
    }
}

#[derive(Debug, Default)]
enum Link {
    /// There is none.
    #[default]
    Idle,
    /// This side has asked the peer.
    Asked(Arc<Queues>),
    /// It can be used; the numbers of the peer's queue pairs.
    Ready(Arc<Queues>, Vec<u32>),
}

/// What a call finds.
enum Begun {
    /// Queue pairs that can be used.
    Ready(Arc<Queues>),
    /// None: these are to be connected.
    Ask(Arc<Queues>),
}

/// Why a question brought no connection, and whether the peer said anything.
struct Refused {
    why: String,
    answered: bool,
}

#[derive(Debug, Default)]
struct State {
    link: Link,
    why: String,
    until: Option<Instant>,
    /// When the peer last asked, or this side used it.
    used: Option<Instant>,
}

/// Between one device here and one of a peer.
#[derive(Debug)]
pub struct Connection {
    device: Arc<Device>,
    /// `SERVER@DEVICE` of the peer.
    peer: String,
    state: Mutex<State>,
    changed: Condvar,
    failures: AtomicU32,
}

impl Connection {
    pub fn new(device: Arc<Device>, peer: &str) -> Connection {
        Connection {
            device,
            peer: peer.to_owned(),
            state: Mutex::default(),
            changed: Condvar::new(),
            failures: AtomicU32::new(0),
        }
    }

    /// Since when nobody has used it.
    pub fn used(&self) -> Option<Instant> {
        self.state.lock().used
    }

    /// Why it is left alone now; none when it is not.
    pub fn trouble(&self) -> Option<String> {
        if !self.device.is_up.load(Ordering::Acquire) {
            return Some(format!("RDMA device {}: its port is down", self.device.info.name));
        }
        let state = self.state.lock();
        state.until.filter(|until| Instant::now() < *until).map(|_| state.why.clone())
    }

    /// Requests have gone through.
    pub fn worked(&self) {
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
            self.state.lock().until = None;
        }
    }

    /// A request failed, and with it the queue pairs. The first time they are made anew at once.
    pub fn broke(&self, queues: &Queues, why: &str) {
        if !queues.fail() {
            return;
        }
        let mut state = self.state.lock();
        if self.failures.fetch_add(1, Ordering::Relaxed) > 0 {
            self.pause(&mut state, why);
        }
    }

    fn pause(&self, state: &mut State, why: &str) {
        let times = self.failures.load(Ordering::Relaxed).saturating_sub(1).min(8);
        state.until = Some(Instant::now() + (PAUSE_FIRST * 2u32.pow(times)).min(PAUSE_LAST));
        state.why = why.to_owned();
    }

    fn own(&self, server: &str, queues: &Queues, ready: bool) -> Description {
        Description {
            local_nic_path: path(server, &self.device.info.name),
            peer_nic_path: self.peer.clone(),
            local_lid: self.device.info.lid,
            local_gid: crate::format_gid(&self.device.info.gid),
            qp_num: queues.numbers(),
            ready_ack: Some(ready),
            reply_msg: String::new(),
            payload: String::new(),
        }
    }

    /// Its queue pairs; asks the peer when there are none.
    pub fn ready(
        &self,
        server: &str,
        config: &Config,
        exchange: &dyn Exchange,
        limit: Deadline<'_>,
    ) -> Result<Arc<Queues>, String> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let queues = match self.begin(config, limit)? {
                Begun::Ready(queues) => return Ok(queues),
                Begun::Ask(queues) => queues,
            };
            // The peer may be asking at this moment too; its question must find this unlocked.
            let asked = self.ask(server, &queues, config, exchange, limit);
            let mut state = self.state.lock();
            self.changed.notify_all();
            if let Link::Ready(ready, _) = &state.link
                && !ready.is_broken()
            {
                // Also when the peer's own question has made it ready meanwhile, whatever became of this one.
                let ready = ready.clone();
                state.used = Some(Instant::now());
                return Ok(ready);
            }
            queues.fail();
            state.link = Link::Idle;
            let unready =
                || Refused { why: format!("peer {}: the connection broke at once", self.peer), answered: true };
            let refused = asked.err().unwrap_or_else(unready);
            // A peer that answers may have been in the middle of something, such as a question of its own.
            if refused.answered && attempts == 1 {
                continue;
            }
            self.failures.fetch_add(1, Ordering::Relaxed);
            self.pause(&mut state, &refused.why);
            return Err(refused.why);
        }
    }

    fn begin(&self, config: &Config, limit: Deadline<'_>) -> Result<Begun, String> {
        let mut state = self.state.lock();
        loop {
            match &state.link {
                Link::Ready(queues, _) if !queues.is_broken() => {
                    let queues = queues.clone();
                    state.used = Some(Instant::now());
                    return Ok(Begun::Ready(queues));
                }
                Link::Asked(_) => {
                    let time = limit().map_err(|stop| stopped(&self.peer, stop))?;
                    self.changed.wait_for(&mut state, time);
                }
                Link::Idle | Link::Ready(..) => {
                    if state.until.is_some_and(|until| Instant::now() < until) {
                        return Err(state.why.clone());
                    }
                    limit().map_err(|stop| stopped(&self.peer, stop))?;
                    let queues = Queues::new(&self.device, config)?;
                    state.link = Link::Asked(queues.clone());
                    return Ok(Begun::Ask(queues));
                }
            }
        }
    }

    fn ask(
        &self,
        server: &str,
        queues: &Arc<Queues>,
        config: &Config,
        exchange: &dyn Exchange,
        limit: Deadline<'_>,
    ) -> Result<(), Refused> {
        let text = |why: String| format!("peer {}: no connection of queue pairs: {why}", self.peer);
        let silent = |why| Refused { why: text(why), answered: false };
        let refused = |why| Refused { why: text(why), answered: true };
        let peer = self.peer.rsplit_once('@').map_or(self.peer.as_str(), |(peer, _)| peer);
        let request = self.own(server, queues, false);
        let answer = exchange.exchange(peer, &request, limit).map_err(silent)?;
        check(&answer, &request).map_err(refused)?;
        {
            let mut state = self.state.lock();
            match &state.link {
                Link::Asked(own) if Arc::ptr_eq(own, queues) => {
                    queues.connect(&answer, config).map_err(refused)?;
                    state.link = Link::Ready(queues.clone(), answer.qp_num.clone());
                }
                // The peer's own question came first, and has connected these, or newer ones.
                _ => {}
            }
        }
        if answer.ready_ack.is_some() {
            let ready = Description { ready_ack: Some(true), ..request };
            let answer = exchange.exchange(peer, &ready, limit).map_err(|why| {
                queues.fail();
                silent(why)
            })?;
            if !answer.reply_msg.is_empty() {
                queues.fail();
                return Err(refused(format!("it refuses: {}", answer.reply_msg)));
            }
        }
        Ok(())
    }

    /// Answers a peer's question.
    pub fn answer(&self, server: &str, request: &Description, config: &Config) -> Description {
        let mut state = self.state.lock();
        if let Link::Ready(queues, numbers) = &state.link
            && *numbers == request.qp_num
            && !queues.is_broken()
        {
            // Asked again, or told that the peer is ready.
            return self.own(server, queues, request.ready_ack == Some(true));
        }
        if request.ready_ack == Some(true) {
            return Description::refusal("there is no connection with these queue pairs");
        }
        if request.qp_num.is_empty() || request.qp_num.len() > MOST_QUEUES {
            return Description::refusal("the question names no queue pairs");
        }
        let queues = match &state.link {
            // Both ask at once: the queue pairs that this side has told of are those that the peer will hear of.
            Link::Asked(queues) => Ok(queues.clone()),
            // Another incarnation of the peer; what there was is over.
            Link::Ready(old, _) => {
                old.fail();
                Queues::new(&self.device, config)
            }
            Link::Idle => Queues::new(&self.device, config),
        };
        let connected = queues.and_then(|queues| queues.connect(request, config).map(|()| queues));
        match connected {
            Ok(queues) => {
                let own = self.own(server, &queues, false);
                state.link = Link::Ready(queues, request.qp_num.clone());
                state.used = Some(Instant::now());
                // It lives, for it asks.
                state.until = None;
                self.changed.notify_all();
                own
            }
            Err(why) => {
                if !matches!(state.link, Link::Asked(_)) {
                    state.link = Link::Idle;
                }
                Description::refusal(why)
            }
        }
    }

    /// Ends it.
    pub fn end(&self) {
        let link = std::mem::take(&mut self.state.lock().link);
        if let Link::Ready(queues, _) | Link::Asked(queues) = link {
            queues.end();
        }
    }
}

fn check(answer: &Description, request: &Description) -> Result<(), String> {
    if !answer.reply_msg.is_empty() {
        return Err(format!("it refuses: {}", answer.reply_msg));
    }
    if answer.local_nic_path != request.peer_nic_path || answer.peer_nic_path != request.local_nic_path {
        return Err(format!(
            "it answers for {:?} to {:?}, asked was {:?} for {:?}",
            answer.local_nic_path, answer.peer_nic_path, request.peer_nic_path, request.local_nic_path
        ));
    }
    Ok(())
}

fn stopped(peer: &str, stop: Stop) -> String {
    match stop {
        Stop::TimedOut => format!("peer {peer}: no time left to connect"),
        Stop::Cancelled => format!("peer {peer}: the call was cancelled while connecting"),
    }
}
