//! One call: posts requests as far as there is room, takes their ends, and makes those that failed again.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use libc::c_int;

use super::cut::{Slice, cut};
use super::{Deadline, Job, Operation, Outcome, Stop};
use crate::completion::Batch;
use crate::connection::{Connection, Queues};
use crate::library::Verbs;
use crate::queue::{Posted, Work};
use crate::transport::{Exchange, Transport};
use crate::verbs::{self, Sge};

/// How long to wait for room that others hold.
const ROOM: Duration = Duration::from_millis(1);
/// How long requests of a call that stops may take to be flushed before their queue pairs are ended.
const FLUSH: Duration = Duration::from_secs(1);

/// A way to a peer: a device here, a device there.
#[derive(Debug)]
struct Way {
    local: usize,
    remote: usize,
    connection: Arc<Connection>,
}

#[derive(Debug)]
struct Track {
    slice: Slice,
    tries: u32,
    /// On which queue pairs it is under way.
    on: Option<(Arc<Connection>, Arc<Queues>)>,
}

#[derive(Debug)]
struct Progress {
    left: usize,
    was_posted: bool,
    outcome: Option<Outcome>,
}

/// The state of a call.
pub struct Run<'a> {
    transport: &'a Transport,
    operation: Operation,
    jobs: &'a [Job<'a>],
    exchange: &'a dyn Exchange,
    limit: Deadline<'a>,
    server: String,
    batch: Arc<Batch>,
    slices: Vec<Track>,
    progress: Vec<Progress>,
    /// Requests that are not under way, by the peer they are to.
    waiting: Vec<VecDeque<u32>>,
    /// Which of those is a job's.
    places: Vec<usize>,
    under_way: usize,
    ways: HashMap<(usize, String), Vec<Way>>,
}

impl<'a> Run<'a> {
    pub fn new(
        transport: &'a Transport,
        operation: Operation,
        jobs: &'a [Job<'a>],
        exchange: &'a dyn Exchange,
        limit: Deadline<'a>,
    ) -> Run<'a> {
        let mut run = Run {
            transport,
            operation,
            jobs,
            exchange,
            limit,
            server: transport.server(),
            batch: Arc::default(),
            slices: Vec::new(),
            progress: Vec::with_capacity(jobs.len()),
            waiting: Vec::new(),
            places: Vec::with_capacity(jobs.len()),
            under_way: 0,
            ways: HashMap::new(),
        };
        let mut peers: HashMap<*const super::Peer, usize> = HashMap::new();
        for (number, job) in jobs.iter().enumerate() {
            let mut slices = Vec::new();
            let outcome = match cut(transport, operation, number, job, &mut slices) {
                Ok(()) if slices.is_empty() => Some(Outcome::Moved),
                Ok(()) => None,
                Err(outcome) => {
                    slices.clear();
                    Some(outcome)
                }
            };
            run.progress.push(Progress { left: slices.len(), was_posted: false, outcome });
            let place = *peers.entry(Arc::as_ptr(&job.peer)).or_insert_with(|| {
                run.waiting.push(VecDeque::new());
                run.waiting.len() - 1
            });
            run.places.push(place);
            let first = run.slices.len() as u32;
            if let Some(queue) = run.waiting.get_mut(place) {
                queue.extend((first..).take(slices.len()));
            }
            run.slices.extend(slices.into_iter().map(|slice| Track { slice, tries: 0, on: None }));
        }
        run
    }

    /// Runs until all has ended.
    ///
    /// # Safety
    /// As [`Transport::transfer`].
    pub unsafe fn complete(&mut self) -> Vec<Outcome> {
        loop {
            // SAFETY: the caller's promise.
            unsafe { self.post() };
            if self.under_way == 0 && self.waiting.iter().all(VecDeque::is_empty) {
                break;
            }
            let time = match (self.limit)() {
                Ok(time) => time,
                Err(stop) => {
                    self.abandon(stop);
                    break;
                }
            };
            let ended = self.batch.take(if self.under_way == 0 { time.min(ROOM) } else { time });
            self.take(ended);
        }
        let left = || Outcome::Failed("it was not moved".to_owned());
        self.progress.iter_mut().map(|progress| progress.outcome.take().unwrap_or_else(left)).collect()
    }

    /// Posts what there is room for.
    ///
    /// # Safety
    /// As [`Transport::transfer`].
    unsafe fn post(&mut self) {
        for place in 0..self.waiting.len() {
            while let Some(number) = self.waiting.get_mut(place).and_then(VecDeque::pop_front) {
                // SAFETY: the caller's promise.
                if !unsafe { self.post_slice(number) } {
                    if let Some(queue) = self.waiting.get_mut(place) {
                        queue.push_front(number);
                    }
                    break;
                }
            }
        }
    }

    /// Posts a request, or ends its job. Says whether that was done; it was not when there is no room.
    ///
    /// # Safety
    /// As [`Transport::transfer`].
    unsafe fn post_slice(&mut self, number: u32) -> bool {
        let Some(track) = self.slices.get(number as usize) else { return true };
        let (job, tries) = (track.slice.job, track.tries);
        if self.progress.get(job).is_none_or(|progress| progress.outcome.is_some()) {
            return true;
        }
        let Some(key) = self.find_ways(number) else { return true };
        let count = self.ways.get(&key).map_or(0, Vec::len);
        let mut why = None;
        for turn in 0..count {
            if (self.limit)().is_err() {
                // The loop asks again, and ends all that is under way.
                return false;
            }
            let Some(way) = self.ways.get(&key).and_then(|ways| ways.get((job + tries as usize + turn) % count)) else {
                break;
            };
            if let Some(trouble) = way.connection.trouble() {
                why = Some(trouble);
                continue;
            }
            let connection = way.connection.clone();
            let (local, remote) = (way.local, way.remote);
            let queues = match connection.ready(&self.server, &self.transport.config, self.exchange, self.limit) {
                Ok(queues) => queues,
                Err(trouble) => {
                    why = Some(trouble);
                    continue;
                }
            };
            // SAFETY: the caller's promise.
            match unsafe { self.post_on(number, local, remote, &queues) } {
                Posted::Yes => {
                    if let Some(track) = self.slices.get_mut(number as usize) {
                        track.on = Some((connection, queues));
                    }
                    if let Some(progress) = self.progress.get_mut(job) {
                        progress.was_posted = true;
                    }
                    self.under_way += 1;
                    return true;
                }
                Posted::Full => return false,
                Posted::Failed(trouble) => {
                    connection.broke(&queues, &trouble);
                    why = Some(trouble);
                }
            }
        }
        let outcome = why.map_or_else(|| Outcome::Unable("no RDMA device works".to_owned()), Outcome::Failed);
        self.end_job(job, outcome);
        true
    }

    /// # Safety
    /// As [`Transport::transfer`].
    unsafe fn post_on(&mut self, number: u32, local: usize, remote: usize, queues: &Arc<Queues>) -> Posted {
        let (Some(track), batch) = (self.slices.get(number as usize), &self.batch) else {
            return Posted::Failed("there is no such request".to_owned());
        };
        let slice = &track.slice;
        let buffer = self.jobs.get(slice.job).and_then(|job| job.peer.buffers.get(slice.buffer));
        let Some(key) = buffer.and_then(|buffer| buffer.keys.get(remote)) else {
            return Posted::Failed("the peer tells no key for its device".to_owned());
        };
        let (most, inline) = queues.limits();
        if slice.is_inline() && slice.len > u64::from(inline) {
            return Posted::Failed("the RDMA device takes no bytes from memory that is not registered".to_owned());
        }
        if slice.pieces.len() > most as usize {
            return Posted::Failed(format!("the RDMA device takes {most} pieces a request"));
        }
        let mut pieces = [Sge::default(); super::cut::PIECES];
        for (place, piece) in pieces.iter_mut().zip(&slice.pieces) {
            let lkey = piece.region.as_ref().map_or(0, |region| region.lkey(local));
            *place = Sge { addr: piece.start as u64, length: piece.len, lkey };
        }
        let mut work = Work {
            operation: self.operation,
            pieces: pieces.get_mut(..slice.pieces.len()).unwrap_or_default(),
            address: slice.address,
            key: *key,
            inline: slice.is_inline(),
        };
        // SAFETY: the caller's promise, until the end of the request is taken or its queue pair has ended.
        unsafe { queues.post(batch, number, &mut work) }
    }

    /// The ways for a request: near devices first, each of this side once before one is used again.
    fn find_ways(&mut self, number: u32) -> Option<(usize, String)> {
        let slice = &self.slices.get(number as usize)?.slice;
        let peer = &self.jobs.get(slice.job)?.peer;
        let here = slice.pieces.iter().find_map(|piece| piece.region.as_ref()).map_or("", |region| &region.place);
        let there = &peer.buffers.get(slice.buffer)?.place;
        let key = (Arc::as_ptr(peer) as usize, format!("{here} {there}"));
        if !self.ways.contains_key(&key) {
            let (local, near_here) = self.transport.near(here);
            let (remote, near_there) = peer.near(there);
            let pairs = |local: &[usize], remote: &[usize]| -> Vec<(usize, usize)> {
                let count = remote.len();
                let pair = |shift: usize| local.iter().enumerate().map(move |(at, l)| (*l, (at + shift) % count));
                (0..count).flat_map(pair).filter_map(|(l, at)| Some((l, *remote.get(at)?))).collect()
            };
            let mut order = pairs(local.get(..near_here)?, remote.get(..near_there)?);
            let far: Vec<_> = pairs(&local, &remote).into_iter().filter(|pair| !order.contains(pair)).collect();
            order.extend(far);
            let way = |(local, remote): (usize, usize)| {
                let connection = self.transport.connection(local, &peer.path(remote)?)?;
                Some(Way { local, remote, connection })
            };
            let ways = order.into_iter().filter_map(way).collect();
            self.ways.insert(key.clone(), ways);
        }
        Some(key)
    }

    fn end_job(&mut self, job: usize, outcome: Outcome) {
        if let Some(progress) = self.progress.get_mut(job) {
            progress.outcome.get_or_insert(outcome);
        }
    }

    /// Takes the ends of requests.
    fn take(&mut self, ended: Vec<(u32, c_int)>) {
        for (number, status) in ended {
            self.under_way = self.under_way.saturating_sub(1);
            let Some(track) = self.slices.get_mut(number as usize) else { continue };
            let job = track.slice.job;
            let Some((connection, queues)) = track.on.take() else { continue };
            if status == verbs::WC_SUCCESS {
                connection.worked();
                if let Some(progress) = self.progress.get_mut(job) {
                    progress.left = progress.left.saturating_sub(1);
                    if progress.left == 0 {
                        progress.outcome.get_or_insert(Outcome::Moved);
                    }
                }
                continue;
            }
            track.tries += 1;
            let tries = track.tries;
            let peer = self.jobs.get(job).map_or("", |job| job.peer.server.as_str());
            let text = Verbs::get().map_or_else(|_| format!("status {status}"), |verbs| verbs.status(status));
            let why = format!("peer {peer}: {text}");
            connection.broke(&queues, &why);
            match status {
                verbs::WC_REMOTE_ACCESS => self.end_job(job, Outcome::Rejected(why)),
                verbs::WC_LOCAL_PROTECTION => self.end_job(job, Outcome::Unable(why)),
                _ if tries > self.transport.config.retries => self.end_job(job, Outcome::Failed(why)),
                _ => self.wait_again(job, number),
            }
        }
    }

    fn wait_again(&mut self, job: usize, number: u32) {
        let place = self.places.get(job).copied().unwrap_or(0);
        if let Some(queue) = self.waiting.get_mut(place) {
            queue.push_back(number);
        }
    }

    /// Ends all that is under way: queue pairs go into the error state, which flushes them; those that are not flushed are ended.
    fn abandon(&mut self, stop: Stop) {
        self.waiting.iter_mut().for_each(VecDeque::clear);
        let in_use: Vec<(Arc<Connection>, Arc<Queues>)> =
            self.slices.iter().filter_map(|track| track.on.clone()).collect();
        for (_, queues) in &in_use {
            queues.fail();
        }
        let began = Instant::now();
        while self.under_way > 0 && began.elapsed() < FLUSH {
            let ended = self.batch.take(Duration::from_millis(20));
            self.note(&ended);
        }
        if self.under_way > 0 {
            for (_, queues) in self.slices.iter().filter_map(|track| track.on.as_ref()) {
                queues.end();
            }
            while self.under_way > 0 {
                // The queue pairs have ended: what is left of them comes now.
                let ended = self.batch.take(Duration::from_millis(20));
                self.note(&ended);
            }
        }
        let write = self.operation == Operation::Write;
        for progress in &mut self.progress {
            let in_doubt = write && progress.was_posted;
            progress.outcome.get_or_insert(Outcome::Stopped { stop, in_doubt });
        }
    }

    /// Takes ends of requests of a call that has stopped.
    fn note(&mut self, ended: &[(u32, c_int)]) {
        for (number, status) in ended {
            self.under_way = self.under_way.saturating_sub(1);
            let Some(track) = self.slices.get_mut(*number as usize) else { continue };
            track.on = None;
            if *status != verbs::WC_SUCCESS {
                continue;
            }
            if let Some(progress) = self.progress.get_mut(track.slice.job) {
                progress.left = progress.left.saturating_sub(1);
                if progress.left == 0 {
                    progress.outcome.get_or_insert(Outcome::Moved);
                }
            }
        }
    }
}
