//! Connected queue pairs as the off-path attacker knows them: their numbers, their peers' addresses and where both PSN
//! streams are. It has to guess source ports; where these are learned from packets at the exact PSN, it may hit that once
//! from a port. The simulator redraws the guesses that go beyond, and counts them.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use roce_bth::{Class, Opcode, Packet, Psn, Qpn, RKey};

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
pub(super) struct Genuine {
    /// UDP source ports.
    pub(super) ports: BTreeSet<u16>,
    /// Last PSN of each direction.
    pub(super) last: [Option<Psn>; 2],
    /// PSNs of each direction at which the queue pair may expect its next packet exactly: those that were sent, and those
    /// that follow them.
    pub(super) exact: [BTreeSet<u32>; 2],
    /// Newest PSN of a request, and how many new ones there were.
    pub(super) newest: Option<Psn>,
    pub(super) new_requests: u32,
    /// PSNs of requests that have not arrived.
    pub(super) missing: BTreeSet<u32>,
}

/// Genuine packets by the host and number of the queue pair that they are sent to.
#[derive(Default, Debug)]
pub(crate) struct Live(pub(super) BTreeMap<(usize, Qpn), Genuine>);

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
    pub(crate) fn forget(&mut self, host: usize, qpn: Qpn) {
        self.0.remove(&(host, qpn));
    }
}
