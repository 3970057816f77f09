//! Connected queue pairs as the off-path attacker knows them: their numbers, their peers' addresses and where both PSN
//! streams are. It has to guess source ports; where these are learned from packets at the exact PSN, it may hit that once
//! from a port. The simulator redraws the guesses that go beyond, and counts them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use roce_bth::{Class, Opcode, Packet, Psn, Qpn, RKey};
use roce_verbs::QpType;

use crate::world::World;

/// Direction of a packet to a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Direction {
    Request,
    Response,
}

impl Direction {
    pub(super) fn of(opcode: Opcode) -> Self {
        match opcode.info().class {
            Class::Acknowledge | Class::SelectiveAcknowledge | Class::AtomicAcknowledge | Class::ReadResponse => {
                Self::Response
            }
            _ => Self::Request,
        }
    }
}

/// Genuine packets that were sent to one queue pair since it was made or reset.
#[derive(Clone, Default, Debug)]
struct Genuine {
    /// UDP source ports.
    ports: BTreeSet<u16>,
    /// Last PSN of each direction.
    last: [Option<Psn>; 2],
    /// PSNs of each direction at which the queue pair may expect its next packet exactly: those that were sent, and those
    /// that follow them.
    exact: [BTreeSet<u32>; 2],
    /// Newest PSN of a request, and how many new ones there were.
    newest: Option<Psn>,
    new_requests: u32,
    /// PSNs of requests that have not arrived.
    missing: BTreeSet<u32>,
}

/// Genuine packets by the host and number of the queue pair that they are sent to.
#[derive(Default, Debug)]
pub(super) struct Live(BTreeMap<(usize, Qpn), Genuine>);

/// Connected queue pair that the attacker knows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) peer: IpAddr,
    pub(super) qpn: Qpn,
    pub(super) xrc: bool,
    pub(super) mtu: usize,
    /// Last PSN of each [`Direction`].
    pub(super) last: [Option<Psn>; 2],
    /// Address and key of memory that the peer may write and read.
    pub(super) memory: Option<(u64, RKey)>,
}

impl Target {
    /// Whether a packet goes to this queue pair.
    pub(super) fn is_addressed(&self, bytes: &[u8]) -> bool {
        bytes.get(5..8) == Some(&self.qpn.value().to_be_bytes()[1..])
    }
}

/// Reason to redraw a guess: the attacker would know what only the peer knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Hit {
    /// The peer's source port.
    Port,
    /// The exact PSN where the port is learned.
    Psn,
}

impl Live {
    /// Notes a genuine packet. `mtu`: the path MTU of its connection.
    pub(super) fn note(&mut self, to: usize, src_port: u16, bytes: &[u8], mtu: impl Fn(Qpn) -> usize) {
        let Ok(packet) = Packet::parse(bytes) else { return };
        let bth = packet.header.bth;
        let direction = Direction::of(bth.opcode);
        let genuine = self.0.entry((to, bth.dest_qp)).or_default();
        genuine.ports.insert(src_port);
        if bth.opcode.info().class == Class::Cnp {
            return;
        }
        genuine.last[direction as usize] = Some(bth.psn);
        let responses = match (bth.opcode.info().class, packet.header.reth()) {
            (Class::ReadRequest, Some(reth)) => reth.dma_len.div_ceil(mtu(bth.dest_qp) as u32).max(1),
            _ => 1,
        };
        // A retransmitted READ may begin within one that has arrived: only PSNs beyond that are new, and missing.
        if direction == Direction::Request && genuine.newest.is_none_or(|newest| bth.psn.diff(newest) > 0) {
            genuine.newest = Some(bth.psn.add(responses - 1));
            genuine.new_requests += 1;
            genuine.missing.insert(bth.psn.value());
        }
        let exact = &mut genuine.exact[direction as usize];
        exact.extend([bth.psn, bth.psn.add(responses)].map(Psn::value));
    }

    /// Notes that a genuine packet has arrived, whether or not it was damaged.
    pub(super) fn deliver(&mut self, to: usize, bytes: &[u8]) {
        let Ok(packet) = Packet::parse(bytes) else { return };
        let bth = packet.header.bth;
        if Direction::of(bth.opcode) == Direction::Request
            && let Some(genuine) = self.0.get_mut(&(to, bth.dest_qp))
        {
            genuine.missing.remove(&bth.psn.value());
        }
    }

    /// Whether a request arrives for the first time, and one before it has not arrived.
    pub(super) fn is_beyond_gap(&self, to: usize, qpn: Qpn, psn: Psn) -> bool {
        let Some(genuine) = self.0.get(&(to, qpn)) else {
            return false;
        };
        let mut missing = genuine.missing.iter().map(|missing| psn.diff(Psn::new(*missing)));
        genuine.missing.contains(&psn.value()) && missing.any(|distance| distance > 0)
    }

    /// Forgets a queue pair that is made, or starts again.
    pub(super) fn forget(&mut self, host: usize, qpn: Qpn) {
        self.0.remove(&(host, qpn));
    }
}

impl World {
    /// Numbers of a host's queue pairs that are connected, or are being connected.
    pub(super) fn qpns(&self, h: usize) -> Vec<Qpn> {
        let ends = self.conns.iter().flat_map(|c| &c.ends);
        ends.filter(|end| end.host == h).filter_map(|end| end.qpn).collect()
    }

    /// Returns the connected queue pairs of a host that have been sent a packet, with their addresses.
    pub(super) fn targets(&self, live: &Live, h: usize) -> Vec<Target> {
        let ends = self.conns.iter().flat_map(|c| {
            [(0, 1), (1, 0)].map(|(own, peer)| {
                let own = &c.ends[own];
                let target = &own.target;
                (
                    own.host,
                    own.qpn,
                    c.ends[peer].host,
                    QpType::Rc,
                    c.plan.mtu,
                    Some((target.addr(), target.rkey())),
                )
            })
        });
        let services = self
            .reliable_flows()
            .map(|(own, qpn, peer, qp_type, mtu)| (own, Some(qpn), peer, qp_type, mtu, None));
        let known = ends
            .chain(services)
            .filter_map(|(own, qpn, peer, qp_type, mtu, memory)| {
                let qpn = qpn.filter(|_| own == h)?;
                let genuine = live.0.get(&(h, qpn))?;
                Some(Target {
                    peer: self.hosts[peer].plan.addr,
                    qpn,
                    xrc: matches!(qp_type, QpType::XrcIni | QpType::XrcTgt),
                    mtu: mtu.bytes(),
                    last: genuine.last,
                    memory,
                })
            });
        known.filter(|target| target.last.iter().any(Option::is_some)).collect()
    }

    /// Returns the path MTU of a connection, in bytes.
    pub(super) fn path_mtu(&self, h: usize, qpn: Qpn) -> usize {
        let has = |c: &&crate::model::Conn| c.ends.iter().any(|e| e.host == h && e.qpn == Some(qpn));
        self.conns
            .iter()
            .find(has)
            .map_or(self.hosts[h].plan.mtu.bytes(), |c| c.plan.mtu.bytes())
    }

    /// Whether both ends of a queue pair's connection agree on source ports: no PSN makes up for a wrong one then.
    pub(super) fn agrees_on_ports(&self, h: usize, qpn: Qpn) -> bool {
        let mut conns = self.conns.iter().filter(|c| c.plan.via_cm);
        conns.any(|c| {
            let own = c.ends.iter().any(|e| e.host == h && e.qpn == Some(qpn));
            own && c.ends.iter().all(|e| roce_cm::guid::keeps_packets(self.guid(e.host)))
        })
    }

    /// Whether a queue pair has learned its peer's port in a packet's direction: it has answered a request, or sent one after the
    /// first was answered.
    pub(super) fn has_learned(&self, live: &Live, h: usize, bytes: &[u8]) -> bool {
        let Ok(packet) = Packet::parse(bytes) else { return false };
        let bth = packet.header.bth;
        let ends = self
            .conns
            .iter()
            .flat_map(|c| [(&c.ends[0], &c.ends[1]), (&c.ends[1], &c.ends[0])]);
        let peer = ends.filter(|(own, _)| own.host == h && own.qpn == Some(bth.dest_qp));
        let mut sent = peer.filter_map(|(_, peer)| live.0.get(&(peer.host, peer.qpn?)));
        sent.any(|sent| match Direction::of(bth.opcode) {
            Direction::Request => sent.last[Direction::Response as usize].is_some(),
            Direction::Response => sent.new_requests >= 2,
        })
    }

    /// Tells whether a forged packet has what only the peer knows.
    pub(super) fn hit(&self, live: &Live, h: usize, src_port: u16, bytes: &[u8]) -> Option<Hit> {
        let bth = Packet::parse(bytes).ok()?.header.bth;
        let genuine = live.0.get(&(h, bth.dest_qp))?;
        if genuine.ports.contains(&src_port) {
            return Some(Hit::Port);
        }
        if bth.opcode.info().class == Class::Cnp || self.agrees_on_ports(h, bth.dest_qp) {
            return None;
        }
        let direction = Direction::of(bth.opcode);
        let attr = self.hosts[h].port.query_qp(bth.dest_qp).ok()?;
        let first = match direction {
            Direction::Request => attr.rq_psn,
            Direction::Response => attr.sq_psn,
        };
        let exact = genuine.exact[direction as usize].contains(&bth.psn.value()) || first == Some(bth.psn);
        exact.then_some(Hit::Psn)
    }
}
