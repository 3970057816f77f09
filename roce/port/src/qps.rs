//! Queue pairs of a port: creation, attributes, paths, multicast memberships.

use core::{net::IpAddr, ops::RangeInclusive};

use crate::cm::{RemoteQp, guid};
use rand::Rng;
use roce_bth::Qpn;
use roce_qp::{Failure, QpConfig, QueuePair};
use roce_verbs::{
    AddressVector, DeviceLimits, Instant, Mtu, PathMtus, QpAttr, QpCaps, QpState, QpType, provider::VerbsError,
};

use crate::{
    config::QpInit,
    entry::{Binding, Notified, QpEntry, SourcePort},
    parting::Parting,
    peer::QpPath,
    port::{Port, invalid},
};

/// UDP source ports that RoCEv2 uses for entropy (`IB_ROCE_UDP_ENCAP_VALID_PORT_MIN` to the maximum).
const SRC_PORTS: RangeInclusive<u16> = 0xc000..=u16::MAX;

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
        let qp = qp.inspect_err(|_| self.mem.release_pd(pd)).map_err(invalid)?;
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
        self.partings.extend(Parting::of(&mut self.qps[slot]));
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
        self.modify_with(now, qpn, attr, None)
    }

    /// Changes attributes and state. `peer`: the queue pair of the connection's other side.
    pub(crate) fn modify_with(
        &mut self,
        now: Instant,
        qpn: Qpn,
        attr: &QpAttr,
        peer: Option<&RemoteQp>,
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
            self.partings.extend(Parting::of(&mut self.qps[slot]));
        }
        self.with_qp(now, slot, |qp, ctx| qp.modify(ctx, &attr))
            .map_err(|e| VerbsError::State(e.to_string()))?;
        if attr.state == Some(QpState::Rtr) {
            if self.config.reorder {
                self.qps[slot].qp.enable_reorder(&self.config.reorder_budget);
            }
            if let Some((av, _)) = self.qps[slot].qp.remote() {
                // Packets to our own address come to our own sockets.
                let selective = av.remote == av.local || peer.is_some_and(|peer| peer.keeps_packets);
                self.apply_terms(slot, peer.and_then(|peer| peer.src_port), selective);
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

    /// Applies the terms that a connection's peer has announced to its queue pair, unless that has another peer.
    pub fn agree(&mut self, qpn: Qpn, peer: &RemoteQp) {
        let Some(slot) = self.qpns.get(qpn) else { return };
        let remote = self.qps[slot].qp.remote();
        let agreed = (peer.av.remote.to_canonical(), peer.qpn);
        if remote.map(|(av, qpn)| (av.remote.to_canonical(), qpn)) == Some(agreed) {
            self.apply_terms(slot, peer.src_port, peer.keeps_packets);
        }
    }

    /// Applies the peer's terms to a queue pair in RTR or RTS: UDP source port of its packets, and selective acknowledgement.
    fn apply_terms(&mut self, slot: usize, src_port: Option<u16>, selective: bool) {
        let qp = &mut self.qps[slot].qp;
        if let Some(port) = src_port {
            qp.set_peer_source(port);
        }
        if selective && guid::keeps_packets(self.config.cm.ca_guid) {
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
            gsi.cm.set_path_mtus(mtus.clone());
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

    /// Returns a queue pair, to look at. `None` if it does not exist.
    pub fn qp(&self, qpn: Qpn) -> Option<&QueuePair> {
        Some(&self.qps[self.qpns.get(qpn)?].qp)
    }

    /// Returns the state of a queue pair. `None` if it does not exist.
    pub fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        Some(self.qp(qpn)?.state())
    }

    /// Takes the reason why a queue pair has failed, see [`QueuePair::take_failure`].
    pub fn take_failure(&mut self, qpn: Qpn) -> Option<Failure> {
        let slot = self.qpns.get(qpn)?;
        self.qps[slot].qp.take_failure()
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

    /// Attaches a UD queue pair to a group (`ibv_attach_mcast`). The driver must join the group, so that its packets arrive. Returns
    /// false if the queue pair is a member already.
    ///
    /// # Errors
    /// If the address is not a group's, the queue pair is not UD, or a limit is reached.
    pub fn attach_mcast(&mut self, qpn: Qpn, group: IpAddr) -> Result<bool, VerbsError> {
        let group = group.to_canonical();
        let qp_type = self.qps[self.slot(qpn)?].qp.config().qp_type;
        if qp_type != QpType::Ud {
            return Err(invalid("only UD queue pairs can be members of multicast groups"));
        }
        if !group.is_multicast() {
            return Err(VerbsError::Address(format!(
                "{group} is not a multicast group's address"
            )));
        }
        self.groups.add(&self.config.limits, group, qpn)
    }

    /// Detaches a queue pair from a group (`ibv_detach_mcast`).
    ///
    /// # Errors
    /// If the queue pair is not a member.
    pub fn detach_mcast(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), VerbsError> {
        match self.groups.remove(group.to_canonical(), qpn) {
            true => Ok(()),
            false => Err(invalid(format_args!("the queue pair is not a member of {group}"))),
        }
    }

    /// Returns the groups that a queue pair is a member of.
    pub fn mcast_groups(&self, qpn: Qpn) -> Vec<IpAddr> {
        self.groups.of(qpn).collect()
    }
}
