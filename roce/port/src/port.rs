//! RoCE port: its queue pairs, the verbs on them, their timers and the list of those that have packets to send.

use core::{net::IpAddr, ops::RangeInclusive};
use std::{collections::VecDeque, sync::Arc};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha12Rng;
use roce_bth::{Psn, Qpn};
use roce_cm::{Manager, guid};
use roce_icrc::IdSolver;
use roce_mem::MemoryTable;
use roce_qp::{Ctx, Failure, FreePaces, QpConfig, QueuePair, ReceiveQueue, WaitReason, Window};
use roce_verbs::{
    AddressVector, AsyncEvent, DeviceLimits, Instant, Mtu, PathMtus, QpAttr, QpCaps, QpState, QpType,
    provider::VerbsError, wr::PostError,
};
use slab::Slab;

use crate::{
    cnp::Notified,
    config::{PortConfig, QpInit},
    counters::PortCounters,
    entry::{Binding, QpEntry, SourcePort},
    gsi::{Agreement, Gsi, GsiLink, Terms},
    mcast::Groups,
    message::QpCommand,
    parting::Parting,
    peer::{PeerKey, Peers, QpPath},
    persist::Persisting,
    qpn::QpnTable,
    timers::TimerHeap,
};

/// UDP source ports that RoCEv2 uses for entropy (`IB_ROCE_UDP_ENCAP_VALID_PORT_MIN` to the maximum).
const SRC_PORTS: RangeInclusive<u16> = 0xc000..=u16::MAX;

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
    pub(crate) timers: TimerHeap,
    pub(crate) gsi: GsiLink,
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

/// Checks the sizes of a queue pair's queues against the device's limits (`rxe_qp_chk_cap`).
fn check_caps(caps: &QpCaps, limits: &DeviceLimits) -> Result<(), VerbsError> {
    let checks = [
        (caps.max_send_wr, limits.max_qp_wr, "send work requests"),
        (caps.max_recv_wr, limits.max_qp_wr, "receive work requests"),
        (caps.max_send_sge, limits.max_sge, "scatter/gather elements of a send"),
        (
            caps.max_recv_sge,
            limits.max_sge,
            "scatter/gather elements of a receive",
        ),
        (caps.max_inline_data, limits.max_inline_data, "bytes of inline data"),
    ];
    match checks.into_iter().find(|(requested, max, _)| requested > max) {
        Some((requested, max, what)) => Err(invalid(format_args!(
            "{requested} {what} requested: the device's limit is {max}"
        ))),
        None => Ok(()),
    }
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
            gsi: GsiLink::Here(Box::new(gsi)),
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

    /// Creates a queue pair in RESET. Numbers of destroyed queue pairs are quarantined for a while.
    ///
    /// # Errors
    /// If a limit of the device is reached, or the attributes don't fit the transport.
    pub fn create_qp(&mut self, init: QpInit) -> Result<Qpn, VerbsError> {
        let limits = &self.config.limits;
        if self.qpns.len() >= limits.max_qp as usize {
            return Err(VerbsError::Limit("queue pairs"));
        }
        let caps = init.caps.of_queues(init.qp_type, init.srq.is_some());
        check_caps(&caps, limits)?;
        let qpn = match init.qp_type {
            QpType::Gsi if self.qpns.get(Qpn::GSI).is_some() => {
                return Err(VerbsError::Busy("queue pair 1"));
            }
            QpType::Gsi => Qpn::GSI,
            _ => self
                .qpns
                .draw(self.now, &mut self.rng)
                .ok_or(VerbsError::Limit("queue pair numbers"))?,
        };
        self.mem.hold_pd(init.pd).map_err(invalid)?;
        let pd = init.pd;
        let qp = QueuePair::new(QpConfig {
            qpn,
            pd,
            qp_type: init.qp_type,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            caps,
            signal_all: init.signal_all,
            max_msg_size: limits.max_msg_size,
            // The path MTU of a datagram is checked when it is posted.
            port_mtu: Mtu::B4096,
            srq: init.srq,
            xrcd: init.xrcd,
        });
        let qp = match qp {
            Ok(qp) => qp,
            Err(e) => {
                self.mem.release_pd(pd);
                return Err(invalid(e));
            }
        };
        self.created = self.created.wrapping_add(1);
        let source = (!init.qp_type.is_datagram()).then(|| SourcePort {
            port: self.config.src_port(self.rng.random_range(SRC_PORTS)),
            promised: false,
        });
        let slot = self.qps.insert(Box::new(QpEntry {
            qp,
            serial: self.created,
            pd,
            path: None,
            receiver: None,
            queued: false,
            blocked: false,
            armed: None,
            binding: Binding::Free,
            source,
            notifies: Notified::default(),
        }));
        self.qpns.insert(qpn, slot);
        Ok(qpn)
    }

    /// Destroys a queue pair. Its work requests do not complete. [`Port::cm_destroy`] ends its connection, if any.
    ///
    /// # Errors
    /// If the queue pair does not exist.
    pub fn destroy_qp(&mut self, now: Instant, qpn: Qpn) -> Result<(), VerbsError> {
        self.now = now;
        let slot = self.slot(qpn)?;
        self.part(slot);
        self.with_qp(now, slot, |qp, ctx| qp.destroy(ctx));
        self.groups.forget(qpn);
        self.qpns.remove(now, qpn);
        let entry = self.qps.remove(slot);
        if let Some(path) = &entry.path {
            self.peers.leave(self.now, path.peer);
        }
        self.mem.release_pd(entry.pd);
        Ok(())
    }

    /// Changes attributes and state of a queue pair (`ibv_modify_qp`).
    ///
    /// # Errors
    /// If the queue pair does not exist, or the transition or an attribute is not permitted. Then nothing changes.
    pub fn modify_qp(&mut self, now: Instant, qpn: Qpn, attr: &QpAttr) -> Result<(), VerbsError> {
        self.modify_with(now, qpn, attr, Terms::default())
    }

    /// Changes attributes and state. `terms`: those of the queue pair's connection.
    pub(crate) fn modify_with(
        &mut self,
        now: Instant,
        qpn: Qpn,
        attr: &QpAttr,
        mut terms: Terms,
    ) -> Result<(), VerbsError> {
        self.now = now;
        let slot = self.slot(qpn)?;
        let mut attr = *attr;
        if let Some(av) = &mut attr.av {
            *av = self.check_av(av)?;
        }
        if let Some(mtu) = attr.path_mtu {
            // The first modify sets both path and path MTU; later ones may set only one of them.
            let av = attr.av.or_else(|| self.qps[slot].qp.remote().map(|(av, _)| av));
            self.check_mtu(mtu, av.map(|av| av.local))?;
        }
        if attr.stops() {
            self.part(slot);
        }
        self.with_qp(now, slot, |qp, ctx| qp.modify(ctx, &attr))
            .map_err(|e| VerbsError::State(e.to_string()))?;
        if attr.state == Some(QpState::Rtr) {
            if self.config.reorder {
                self.qps[slot].qp.enable_reorder(&self.config.reorder_budget);
            }
            if let Some((av, _)) = self.qps[slot].qp.remote() {
                // Packets to our own address come to our own sockets.
                terms.selective |= av.remote == av.local;
                self.apply_terms(slot, terms);
            }
        }
        self.follow_path(slot);
        self.after_step(slot, 0);
        Ok(())
    }

    /// Sets the UDP source port of a queue pair's peer, learned by other means than the connection manager.
    ///
    /// Packets from other ports are dropped from now on. Call in RTR or later.
    ///
    /// # Errors
    /// If the queue pair does not exist.
    pub fn set_peer_source(&mut self, qpn: Qpn, port: u16) -> Result<(), VerbsError> {
        let slot = self.slot(qpn)?;
        self.qps[slot].qp.set_peer_source(port);
        Ok(())
    }

    /// Fixes and returns the UDP source port of a connected queue pair, to be announced to its peer.
    pub fn promise_source(&mut self, qpn: Qpn) -> Option<u16> {
        let slot = self.qpns.get(qpn)?;
        let source = self.qps[slot].source.as_mut()?;
        source.promised = true;
        Some(source.port)
    }

    /// Applies the terms of a connection to its queue pair, unless that has another peer.
    pub fn agree(&mut self, agreement: &Agreement) {
        let Some(slot) = self.qpns.get(agreement.qpn) else {
            return;
        };
        let remote = self.qps[slot].qp.remote();
        if remote.map(|(av, peer)| (av.remote.to_canonical(), peer)) == Some(agreement.peer) {
            self.apply_terms(slot, agreement.terms);
        }
    }

    /// Applies the terms that the peer announced to a queue pair in RTR or RTS.
    fn apply_terms(&mut self, slot: usize, terms: Terms) {
        let qp = &mut self.qps[slot].qp;
        if let Some(port) = terms.src_port {
            qp.set_peer_source(port);
        }
        if terms.selective && guid::keeps_packets(self.config.cm.ca_guid) {
            qp.enable_selective_ack(&self.config.reorder_budget);
            self.heed_marks(slot);
        }
    }

    /// Checks that paths from a local address (`None`: any) have at least this path MTU.
    pub(crate) fn check_mtu(&self, mtu: Mtu, local: Option<IpAddr>) -> Result<(), VerbsError> {
        let max = local.map_or(self.config.mtus.usual(), |ip| self.config.mtus.of(ip));
        if mtu <= max {
            return Ok(());
        }
        let (requested, max) = (mtu.bytes(), max.bytes());
        Err(invalid(format_args!(
            "path MTU {requested} requested: the interface's largest is {max}"
        )))
    }

    /// Sets the path MTUs of the interfaces. Existing connections keep their path MTU.
    pub fn set_path_mtus(&mut self, mtus: PathMtus) {
        if let Ok(gsi) = self.gsi() {
            gsi.manager().set_path_mtus(mtus.clone());
        }
        self.config.mtus = mtus;
    }

    /// Returns the largest path MTU from a local address.
    pub fn path_mtu(&self, local: IpAddr) -> Mtu {
        self.config.mtus.of(local)
    }

    /// Returns the attributes of a queue pair (`ibv_query_qp`).
    ///
    /// # Errors
    /// If the queue pair does not exist.
    pub fn query_qp(&self, qpn: Qpn) -> Result<QpAttr, VerbsError> {
        Ok(self.qps[self.slot(qpn)?].qp.query())
    }

    /// Returns the state of a queue pair. `None` if it does not exist.
    pub fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        Some(self.qps[self.qpns.get(qpn)?].qp.state())
    }

    /// Returns the reason why a queue pair's requester is not sending. `None` if the queue pair does not exist.
    pub fn wait_reason(&self, qpn: Qpn) -> Option<WaitReason> {
        Some(self.qps[self.qpns.get(qpn)?].qp.wait_reason())
    }

    /// Takes the reason why a queue pair has failed, see [`QueuePair::take_failure`].
    pub fn take_failure(&mut self, qpn: Qpn) -> Option<Failure> {
        let slot = self.qpns.get(qpn)?;
        self.qps[slot].qp.take_failure()
    }

    /// Returns a queue pair's receive queue. `None` if it has none of its own, or does not exist.
    ///
    /// Threads may post to it without the port, see [`ReceiveQueue::post`](roce_qp::ReceiveQueue::post).
    pub fn receive_queue(&self, qpn: Qpn) -> Option<Arc<ReceiveQueue>> {
        self.qps[self.qpns.get(qpn)?].qp.receive_queue().cloned()
    }

    /// Queues an asynchronous event that was detected outside of the port.
    pub fn push_event(&mut self, event: AsyncEvent) {
        self.events.push_back(event);
    }

    /// Posts work requests in order, up to the first invalid one.
    pub(crate) fn post<W>(
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
        self.make_ready(slot);
        result
    }

    /// Returns the time when [`Port::handle_timeout`] must be called next.
    pub fn poll_timeout(&mut self) -> Option<Instant> {
        let cm = self.gsi_timeout();
        loop {
            let Some((at, qpn)) = self.timers.peek() else {
                return cm;
            };
            let live = self.qpns.get(qpn).filter(|slot| self.qps[*slot].armed == Some(at));
            if let Some(slot) = live {
                let entry = &mut self.qps[slot];
                let deadline = entry.qp.next_timeout();
                if deadline == Some(at) {
                    return Some(cm.map_or(at, |cm| cm.min(at)));
                }
                entry.armed = None;
                self.timers.pop();
                self.timers.update(qpn, &mut entry.armed, deadline);
            } else {
                self.timers.pop();
            }
        }
    }

    /// Returns whether [`Port::handle_timeout`] may have a timer to run. Cheaper than [`Port::poll_timeout`].
    pub fn is_timeout_due(&self, now: Instant) -> bool {
        let is_due = |at: Instant| at <= now;
        self.timers.peek().is_some_and(|(at, _)| is_due(at)) || self.gsi_timeout().is_some_and(is_due)
    }

    fn gsi_timeout(&self) -> Option<Instant> {
        self.gsi.get()?.manager_ref().next_timeout()
    }

    /// Runs every timer that is due. Returns whether one was. Calling it early or late is harmless.
    pub fn handle_timeout(&mut self, now: Instant) -> bool {
        self.now = now;
        let mut any = false;
        // Each queue pair runs once, so that a timer set to the past can't loop forever.
        let mut due = Vec::new();
        while let Some((at, qpn)) = self.timers.peek().filter(|(at, _)| *at <= now) {
            self.timers.pop();
            let Some(slot) = self.qpns.get(qpn) else {
                continue;
            };
            let entry = &mut self.qps[slot];
            if entry.armed == Some(at) {
                entry.armed = None;
                due.push(slot);
            }
        }
        for slot in due {
            let entry = &mut self.qps[slot];
            let deadline = entry.qp.next_timeout();
            if deadline.is_some_and(|at| at <= now) {
                self.with_qp(now, slot, |qp, ctx| qp.handle_timeout(ctx));
                any = true;
            } else {
                let qpn = entry.qp.qpn();
                self.timers.update(qpn, &mut entry.armed, deadline);
            }
        }
        if self.gsi_timeout().is_some_and(|at| at <= now)
            && let Ok(gsi) = self.gsi()
        {
            gsi.manager().handle_timeout(now);
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
            cm: self
                .gsi
                .get()
                .map(|gsi| *gsi.manager_ref().counters())
                .unwrap_or_default(),
            ..self.counters
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

    /// Runs a step of a queue pair. [`Port::finish_steps`] runs [`Port::after_step`] once for all packets of a train.
    pub(crate) fn with_qp_of_train(
        &mut self,
        now: Instant,
        slot: usize,
        step: impl FnOnce(&mut QueuePair, &mut Ctx<'_>),
    ) {
        if self.stepped.is_some_and(|(other, _)| other != slot) {
            self.finish_steps();
        }
        let ((), room) = self.run_step(now, slot, step);
        self.stepped.get_or_insert((slot, room));
    }

    /// Runs [`Port::after_step`] for the steps of a train. Call after its last packet, or before any other step.
    pub(crate) fn finish_steps(&mut self) {
        if let Some((slot, room)) = self.stepped.take() {
            self.after_step(slot, room);
        }
    }

    /// Runs a step of a queue pair. Returns its result and the room in the peer's window before, bytes.
    fn run_step<R>(
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
        self.make_ready(slot);
        let entry = &mut *self.qps[slot];
        let qpn = entry.qp.qpn();
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

    /// Adds a queue pair to the ready list if it has packets to send.
    fn make_ready(&mut self, slot: usize) {
        let entry = &mut *self.qps[slot];
        if !entry.queued && !entry.qp.is_idle() {
            entry.queued = true;
            self.ready.push_back(entry.qp.qpn());
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
            if !entry.queued {
                entry.queued = true;
                // In front of the queue pair that made the room: it would use it up again.
                self.ready.push_front(qpn);
                return;
            }
        }
    }

    pub(crate) fn slot(&self, qpn: Qpn) -> Result<usize, VerbsError> {
        self.qpns.get(qpn).ok_or(VerbsError::Post(PostError::NoQueuePair))
    }

    /// Returns a queue pair's path in normal form, see [`PortConfig::path`]. Multicast addresses are errors.
    pub(crate) fn check_av(&self, av: &AddressVector) -> Result<AddressVector, VerbsError> {
        let av = self.config.path(av)?;
        match av.is_multicast() {
            true => Err(VerbsError::Address(format!(
                "remote address {} is multicast: a connection needs a unicast address",
                av.remote
            ))),
            false => Ok(av),
        }
    }

    /// Returns an address handle's path in normal form; the remote address may be a multicast group.
    ///
    /// # Errors
    /// If the remote address is unspecified or of another IP version, or the local address is not one of this port's.
    pub fn path(&self, av: &AddressVector) -> Result<AddressVector, VerbsError> {
        self.config.path(av)
    }

    /// Updates the port's copy of a queue pair's path after a modify.
    fn follow_path(&mut self, slot: usize) {
        let entry = &mut *self.qps[slot];
        let Some((av, dest)) = entry.qp.remote() else {
            // The queue pair may still be in this peer's waiting list: its entry there is now stale.
            entry.blocked = false;
            if let Some(path) = entry.path.take() {
                self.peers.leave(self.now, path.peer);
            }
            return;
        };
        if entry.path.as_ref().is_some_and(|p| p.av == av && p.dest == dest) {
            return;
        }
        let Some(source) = &mut entry.source else { return };
        if let Some(port) = self.config.requested_port(&av).filter(|_| !source.promised) {
            source.port = port;
        }
        let Some(tx) = self.config.tx_path(&av, source.port) else {
            return;
        };
        let peer = self.peers.join(self.now, av.remote);
        entry.blocked &= entry.path.as_ref().is_some_and(|p| p.peer == peer);
        let former = entry.path.replace(QpPath {
            peer,
            av,
            tx,
            dest,
            rx: None,
        });
        if let Some(former) = former {
            // Packets in flight will be acknowledged or retransmitted on the new path.
            let bytes = entry.qp.in_flight();
            self.peers.get_mut(former.peer).window.forget(bytes);
            self.peers.get_mut(peer).window.on_sent(bytes);
            if former.peer != peer {
                self.wake_blocked(former.peer);
            }
            self.peers.leave(self.now, former.peer);
        }
        self.heed_marks(slot);
    }
}
