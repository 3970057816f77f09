//! RoCE port: its state, work requests that are posted, steps of its queue pairs, their timers, and the list of those that may have
//! packets to send.

use core::net::IpAddr;
use std::{collections::VecDeque, sync::Arc};

use crate::cm::Manager;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;
use roce_bth::{Psn, Qpn};
use roce_icrc::IdSolver;
use roce_qp::{Ctx, FreePaces, QueuePair, Window};
use roce_verbs::mem::MemoryTable;
use roce_verbs::{
    AsyncEvent, Instant, RecvWr, SendRequest, SendWr, Target, TimerHeap, provider::VerbsError, wr::PostError,
};
use slab::Slab;

use crate::{
    config::PortConfig,
    counters::{ErrorCounts, PortCounters},
    entry::QpEntry,
    gsi::Gsi,
    mcast::Groups,
    message::{FromShard, QpCommand},
    parting::Parting,
    peer::{PeerKey, Peers},
    persist::{Persisted, Persisting},
    qpn::QpnTable,
};

/// RoCE port, sans-IO. The crate's documentation describes how to drive it.
pub struct Port {
    pub(crate) config: PortConfig,
    pub(crate) mem: Arc<MemoryTable>,
    pub(crate) rng: ChaCha12Rng,
    pub(crate) qpns: QpnTable,
    pub(crate) qps: Slab<Box<QpEntry>>,
    /// Queue pairs created so far.
    pub(crate) created: u32,
    pub(crate) peers: Peers,
    /// Window passed to queue pairs without a path, which send nothing.
    pub(crate) spare_window: Window,
    /// Pacing of UC and UD, which have no flow control.
    pub(crate) paces: FreePaces,
    /// Queue pairs with a congestion notification to send.
    pub(crate) notifications: VecDeque<Qpn>,
    /// FLUSH jobs for the driver.
    pub(crate) persists: VecDeque<Persisting>,
    /// Last acknowledgements of stopped queue pairs.
    pub(crate) partings: VecDeque<Parting>,
    /// Queue pairs that may have packets to send, in the order of their turns.
    pub(crate) ready: VecDeque<Qpn>,
    pub(crate) timers: TimerHeap<Qpn>,
    /// `None`: another port of the address has it.
    pub(crate) gsi: Option<Box<Gsi>>,
    /// Reports for the port that has the GSI.
    pub(crate) reports: VecDeque<FromShard>,
    /// Commands of the GSI for other shards.
    pub(crate) commands: VecDeque<QpCommand>,
    pub(crate) groups: Groups,
    pub(crate) events: VecDeque<AsyncEvent>,
    pub(crate) counters: PortCounters,
    pub(crate) solver: IdSolver,
    /// Slot of the queue pair that is receiving a train, and the room in its peer's window before, bytes.
    pub(crate) stepped: Option<(usize, usize)>,
    /// Time of the driver's last call.
    pub(crate) now: Instant,
}

impl core::fmt::Debug for Port {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Port")
            .field("local", &self.config.local)
            .field("queue_pairs", &self.qps.len())
            .field("ready", &self.ready.len())
            .finish_non_exhaustive()
    }
}

pub(crate) fn invalid(what: impl core::fmt::Display) -> VerbsError {
    VerbsError::Invalid(what.to_string())
}

impl Port {
    /// Creates a port without queue pairs.
    ///
    /// `seed` must come from the system's random number generator, except in a simulation: queue pair numbers, PSNs and
    /// communication IDs must be hard to guess.
    pub fn new(config: PortConfig, mem: Arc<MemoryTable>, seed: [u8; 32]) -> Self {
        let mut rng = ChaCha12Rng::from_seed(seed);
        let mut cm_config = config.cm.clone();
        cm_config.mtus = config.mtus.clone();
        let cm = Manager::new(cm_config, rng.random());
        let gsi = Gsi::new(cm, Psn::new(rng.random()));
        Self {
            mem,
            qpns: QpnTable::new(config.qpns, config.qpn_parts),
            qps: Slab::new(),
            created: 0,
            peers: Peers::new(config.window),
            spare_window: Window::new(config.window),
            paces: FreePaces::new(config.unreliable_rate),
            notifications: VecDeque::new(),
            persists: VecDeque::new(),
            partings: VecDeque::new(),
            ready: VecDeque::new(),
            timers: TimerHeap::default(),
            gsi: Some(Box::new(gsi)),
            reports: VecDeque::new(),
            commands: VecDeque::new(),
            groups: Groups::default(),
            events: VecDeque::new(),
            counters: PortCounters::default(),
            solver: IdSolver::new(),
            stepped: None,
            now: Instant::ZERO,
            config,
            rng,
        }
    }

    /// Returns a queue pair's place in the order in which queue pairs were created here, from 1.
    pub fn qp_serial(&self, qpn: Qpn) -> Option<u32> {
        self.qpns.get(qpn).map(|slot| self.qps[slot].serial)
    }

    /// Sets the time for calls without a time argument.
    pub fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    /// Queues an asynchronous event that was detected outside of the port.
    pub fn push_event(&mut self, event: AsyncEvent) {
        self.events.push_back(event);
    }

    /// Returns the time when [`Port::handle_timeout`] must be called next.
    pub fn poll_timeout(&mut self) -> Option<Instant> {
        let deadline = self.next_deadline().map(|(at, _)| at);
        deadline.into_iter().chain(self.gsi_timeout()).min()
    }

    /// Returns the earliest deadline of a queue pair, and its slot. Drops timers that no longer match.
    fn next_deadline(&mut self) -> Option<(Instant, usize)> {
        loop {
            let (at, qpn) = self.timers.peek()?;
            let live = self.qpns.get(qpn).filter(|slot| self.qps[*slot].armed == Some(at));
            let Some(slot) = live else {
                self.timers.pop();
                continue;
            };
            let entry = &mut self.qps[slot];
            let deadline = entry.qp.next_timeout();
            if deadline == Some(at) {
                return Some((at, slot));
            }
            entry.armed = None;
            self.timers.pop();
            self.timers.update(qpn, &mut entry.armed, deadline);
        }
    }

    /// Returns whether [`Port::handle_timeout`] may have a timer to run. Cheaper than [`Port::poll_timeout`].
    pub fn is_timeout_due(&self, now: Instant) -> bool {
        let is_due = |at: Instant| at <= now;
        self.timers.peek().is_some_and(|(at, _)| is_due(at)) || self.gsi_timeout().is_some_and(is_due)
    }

    fn gsi_timeout(&self) -> Option<Instant> {
        self.gsi.as_ref()?.cm.next_timeout()
    }

    /// Runs every timer that is due. Returns whether one was. Calling it early or late is harmless.
    pub fn handle_timeout(&mut self, now: Instant) -> bool {
        self.now = now;
        // Each queue pair runs once, so that a timer set to the past can't loop forever.
        let mut due = Vec::new();
        while let Some((_, slot)) = self.next_deadline().filter(|(at, _)| *at <= now) {
            self.timers.pop();
            self.qps[slot].armed = None;
            due.push(slot);
        }
        let mut any = !due.is_empty();
        for slot in due {
            self.with_qp(now, slot, |qp, ctx| qp.handle_timeout(ctx));
        }
        if self.gsi_timeout().is_some_and(|at| at <= now)
            && let Some(gsi) = &mut self.gsi
        {
            gsi.cm.handle_timeout(now);
            any = true;
        }
        any
    }

    /// Returns the next asynchronous event, if any.
    pub fn poll_async_event(&mut self) -> Option<AsyncEvent> {
        self.events.pop_front()
    }

    /// Returns the counters.
    pub fn counters(&self) -> PortCounters {
        PortCounters {
            cm: self.gsi.as_ref().map(|gsi| *gsi.cm.counters()).unwrap_or_default(),
            ..self.counters
        }
    }

    /// Returns the counts of errors.
    pub fn error_counts(&self) -> ErrorCounts {
        ErrorCounts {
            qp_failures: self.counters.transport.qp_failures,
            icrc_errors: self.counters.icrc_errors,
        }
    }

    /// Returns the number of queue pairs.
    pub fn queue_pairs(&self) -> usize {
        self.qps.len()
    }

    /// Iterates over the peer addresses, also those of a minute ago, with the bytes in flight towards each.
    pub fn in_flight(&self) -> impl Iterator<Item = (IpAddr, usize)> {
        self.peers.iter().map(|p| (p.addr, p.window.in_flight()))
    }

    /// Posts send work requests in order, up to the first invalid one.
    ///
    /// # Errors
    /// The number of work requests posted, and the error of the next one.
    pub fn post_send(&mut self, now: Instant, qpn: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        self.post(now, qpn, wrs, |qp, ctx, wr| {
            qp.post_send(ctx, wr, Target::Peer, usize::MAX)
        })
    }

    /// Posts receive work requests in order, up to the first invalid one.
    ///
    /// # Errors
    /// The number of work requests posted, and the error of the next one.
    pub fn post_recv(&mut self, now: Instant, qpn: Qpn, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        self.post(now, qpn, wrs, |qp, ctx, wr| qp.post_recv(ctx, wr))
    }

    /// Posts send work requests with a target each: datagrams, and messages of XRC initiators.
    ///
    /// # Errors
    /// The number of work requests posted, and the error of the next one.
    pub fn post_requests(
        &mut self,
        now: Instant,
        qpn: Qpn,
        requests: &[SendRequest<'_>],
    ) -> Result<(), (usize, PostError)> {
        let mtus = self.config.mtus.clone();
        self.post(now, qpn, requests, |qp, ctx, r| {
            let path_mtu = match r.target {
                Target::Datagram(to) => mtus.of(to.av.local).bytes(),
                _ => usize::MAX,
            };
            qp.post_send(ctx, &r.wr, r.target, path_mtu)
        })
    }

    /// Posts send work requests with a target each, all or none (`ibv_wr_complete`).
    ///
    /// # Errors
    /// The index of the first invalid work request, and its error. Then nothing is posted.
    pub fn post_batch(
        &mut self,
        now: Instant,
        qpn: Qpn,
        requests: &[SendRequest<'_>],
    ) -> Result<(), (usize, PostError)> {
        let slot = self.qpns.get(qpn).ok_or((0, PostError::NoQueuePair))?;
        let qp = &self.qps[slot].qp;
        for (i, r) in requests.iter().enumerate() {
            qp.check_post(&r.wr, &r.target, i).map_err(|e| (i, e))?;
        }
        self.post_requests(now, qpn, requests)
    }

    /// Returns the next FLUSH job.
    pub fn poll_persist(&mut self) -> Option<Persisting> {
        self.persists.pop_front()
    }

    /// Resumes the queue pair of a finished job, if it still waits for that.
    pub fn persisted(&mut self, now: Instant, done: Persisted) {
        self.now = now;
        if let Some(slot) = self.qpns.get(done.of.qpn) {
            self.with_qp(now, slot, |qp, ctx| qp.persisted(ctx, &done.of.job, done.result));
        }
    }

    /// Runs all jobs, for a driver without other threads.
    pub fn persist_here(&mut self, now: Instant) {
        while let Some(next) = self.poll_persist() {
            self.persisted(now, next.run());
        }
    }

    /// Posts work requests in order, up to the first invalid one.
    fn post<W>(
        &mut self,
        now: Instant,
        qpn: Qpn,
        wrs: &[W],
        one: impl Fn(&mut QueuePair, &mut Ctx<'_>, &W) -> Result<(), PostError>,
    ) -> Result<(), (usize, PostError)> {
        self.now = now;
        let slot = self.qpns.get(qpn).ok_or((0, PostError::NoQueuePair))?;
        let (result, _) = self.run_step(now, slot, |qp, ctx| {
            for (i, wr) in wrs.iter().enumerate() {
                one(qp, ctx, wr).map_err(|e| (i, e))?;
            }
            Ok(())
        });
        // Posting sends nothing, so that timers, window and waiting queue pairs stay as they are.
        let entry = &mut *self.qps[slot];
        if !entry.qp.is_idle() {
            enqueue(&mut self.ready, entry, false);
        }
        result
    }

    /// Runs a step of a queue pair and then [`Port::after_step`].
    pub(crate) fn with_qp<R>(
        &mut self,
        now: Instant,
        slot: usize,
        step: impl FnOnce(&mut QueuePair, &mut Ctx<'_>) -> R,
    ) -> R {
        let (result, room) = self.run_step(now, slot, step);
        self.after_step(slot, room);
        result
    }

    /// Runs [`Port::after_step`] once for all packets of a train that a queue pair has received. Call after the last one, or before any
    /// other step.
    pub(crate) fn finish_steps(&mut self) {
        if let Some((slot, room)) = self.stepped.take() {
            self.after_step(slot, room);
        }
    }

    /// Runs a step of a queue pair. Returns its result and the room in the peer's window before, bytes.
    pub(crate) fn run_step<R>(
        &mut self,
        now: Instant,
        slot: usize,
        step: impl FnOnce(&mut QueuePair, &mut Ctx<'_>) -> R,
    ) -> (R, usize) {
        let entry = &mut *self.qps[slot];
        let window = match &entry.path {
            Some(path) => &mut self.peers.get_mut(path.peer).window,
            None => &mut self.spare_window,
        };
        let room = window.available();
        let mut ctx = Ctx {
            now,
            mem: &self.mem,
            window,
            paces: &mut self.paces,
            events: &mut self.events,
            counters: &mut self.counters.transport,
        };
        (step(&mut entry.qp, &mut ctx), room)
    }

    /// Updates the ready list, the timer and the waiting queue pairs of the peer after a step of a queue pair.
    ///
    /// `room` is the room in the peer's window before the step, bytes.
    pub(crate) fn after_step(&mut self, slot: usize, room: usize) {
        let entry = &mut *self.qps[slot];
        let qpn = entry.qp.qpn();
        if !entry.qp.is_idle() {
            enqueue(&mut self.ready, entry, false);
        }
        self.timers.update(qpn, &mut entry.armed, entry.qp.next_timeout());
        if let Some(job) = entry.qp.take_persist_job() {
            self.persists.push_back(Persisting { qpn, job });
        }
        if let Some(key) = entry.path.as_ref().map(|p| p.peer) {
            let peer = self.peers.get_mut(key);
            if peer.gso.waits_for(qpn) {
                peer.gso.on_acked(qpn, entry.qp.acknowledged());
            }
            if peer.window.available() > room {
                self.wake_blocked(key);
            }
        }
    }

    /// Makes the queue pair ready that has waited longest for this peer's window.
    pub(crate) fn wake_blocked(&mut self, key: PeerKey) {
        while let Some(qpn) = self.peers.get_mut(key).blocked.pop_front() {
            let Some(slot) = self.qpns.get(qpn) else {
                continue;
            };
            let entry = &mut *self.qps[slot];
            if !entry.blocked || entry.path.as_ref().is_none_or(|p| p.peer != key) {
                continue;
            }
            entry.blocked = false;
            // In front of the queue pair that made the room: it would use it up again.
            if enqueue(&mut self.ready, entry, true) {
                return;
            }
        }
    }

    pub(crate) fn slot(&self, qpn: Qpn) -> Result<usize, VerbsError> {
        self.qpns.get(qpn).ok_or(VerbsError::Post(PostError::NoQueuePair))
    }
}

/// Adds a queue pair to the ready list. Returns false if it is in the list already.
pub(crate) fn enqueue(ready: &mut VecDeque<Qpn>, entry: &mut QpEntry, first: bool) -> bool {
    if core::mem::replace(&mut entry.queued, true) {
        return false;
    }
    match first {
        true => ready.push_front(entry.qp.qpn()),
        false => ready.push_back(entry.qp.qpn()),
    }
    true
}
