//! The attackers' knowledge of connected queue pairs.

use roce_bth::{Class, Packet, Qpn};
use roce_verbs::QpType;

use super::live::{Direction, Hit, Target};
use crate::world::World;

impl World {
    /// Numbers of a host's queue pairs that are connected, or are being connected.
    pub(super) fn qpns(&self, h: usize) -> Vec<Qpn> {
        let ends = self.conns.iter().flat_map(|c| &c.ends);
        ends.filter(|end| end.host == h).filter_map(|end| end.qpn).collect()
    }

    /// Returns the connected queue pairs of a host that have been sent a packet, with their addresses.
    pub(super) fn targets(&self, h: usize) -> Vec<Target> {
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
                let genuine = self.live.0.get(&(h, qpn))?;
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
        let conn = self.find_end(|e| e.host == h && e.qpn == Some(qpn));
        let mtu = conn.map_or(self.hosts[h].plan.mtu, |(conn, _)| self.conns[conn].plan.mtu);
        mtu.bytes()
    }

    /// Whether both ends of a queue pair's connection agree on source ports: no PSN makes up for a wrong one then.
    pub(super) fn agrees_on_ports(&self, h: usize, qpn: Qpn) -> bool {
        let conn = self.find_end(|e| e.host == h && e.qpn == Some(qpn));
        let conn = conn.map(|(conn, _)| &self.conns[conn]).filter(|c| c.plan.via_cm);
        conn.is_some_and(|c| c.ends.iter().all(|e| self.hosts[e.host].plan.keeps))
    }

    /// Whether a queue pair has learned its peer's port in a packet's direction: it has answered a request, or sent one after the
    /// first was answered.
    pub(super) fn has_learned(&self, h: usize, bytes: &[u8]) -> bool {
        let Ok(packet) = Packet::parse(bytes) else { return false };
        let bth = packet.header.bth;
        let ends = self
            .conns
            .iter()
            .flat_map(|c| [(&c.ends[0], &c.ends[1]), (&c.ends[1], &c.ends[0])]);
        let peer = ends.filter(|(own, _)| own.host == h && own.qpn == Some(bth.dest_qp));
        let mut sent = peer.filter_map(|(_, peer)| self.live.0.get(&(peer.host, peer.qpn?)));
        sent.any(|sent| match Direction::of(bth.opcode) {
            Direction::Request => sent.last[Direction::Response as usize].is_some(),
            Direction::Response => sent.new_requests >= 2,
        })
    }

    /// Tells whether a forged packet has what only the peer knows.
    pub(super) fn hit(&self, h: usize, src_port: u16, bytes: &[u8]) -> Option<Hit> {
        let bth = Packet::parse(bytes).ok()?.header.bth;
        let genuine = self.live.0.get(&(h, bth.dest_qp))?;
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
