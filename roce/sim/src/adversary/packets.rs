//! Packets that an off-path attacker can make.

use roce_bth::{AtomicEth, Bth, Class, Deth, Header, Opcode, Position, Psn, QKey, Qpn, Reth, Srqn, XrcEth};
use roce_port::cm::{
    cma::{HEADER_LEN, PortSpace},
    mad::{Attribute, Mad},
};

use super::live::{Direction, Target};
use crate::{
    forge::{
        Endpoint, PRIVATE_LEN, acceptable_req, any_header, any_opcode, comm_id, message, sidr_req, to_gsi, with_payload,
    },
    rng::Rng,
};

/// Claimed sender or receiver of a packet, as the attacker knows it.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) end: Endpoint,
    /// Queue pairs that take datagrams. SIDR gives anybody their numbers, but not their queue keys.
    pub(super) datagram_qpns: Vec<Qpn>,
    /// Connected queue pairs.
    pub(super) connected: Vec<Target>,
}

/// Kind of packets of a campaign.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum What {
    /// Management datagrams of this kind, or of any.
    Mads(Option<Attribute>),
    /// Any opcode to any queue pair.
    Opcodes,
    /// Any opcode to a connected queue pair, in its peer's name, at or around a PSN in use.
    Connected,
    /// Packets to QP1 that are no management datagrams.
    Gsi,
    /// Datagrams with a queue key that is not the receiver's.
    Datagrams,
    /// Packets to the multicast queue pair.
    Multicast,
    /// Congestion notifications.
    Cnps,
    /// Truncated packets, and noise.
    Garbage,
    /// Requests that look like those of the program's clients.
    Sessions,
    /// Requests to connect that the listener's program is given, and is slow to answer, and questions that it never forgets.
    Backlog,
    /// All of these in turns.
    Everything,
}

const KINDS: [What; 8] = [
    What::Mads(None),
    What::Opcodes,
    What::Connected,
    What::Gsi,
    What::Datagrams,
    What::Multicast,
    What::Cnps,
    What::Garbage,
];

impl What {
    pub(super) fn draw(rng: &mut Rng) -> Self {
        match rng.index(12) {
            0 | 1 => Self::Mads(Some(Attribute::Req)),
            2 => Self::Mads(Some(rng.pick(&Attribute::ALL))),
            3 | 4 => Self::Mads(None),
            5 => Self::Everything,
            6 => Self::Connected,
            _ => rng.pick(&KINDS),
        }
    }
}

/// Forges one packet, with four bytes for its ICRC. `session` draws the private data of a program's client.
pub(super) fn packet(
    what: What,
    from: &Place,
    to: &Place,
    session: &dyn Fn(&mut Rng) -> [u8; PRIVATE_LEN],
    rng: &mut Rng,
) -> Vec<u8> {
    match what {
        What::Mads(kind) => {
            let kind = kind.unwrap_or_else(|| rng.pick(&Attribute::ALL));
            let transaction = rng.number();
            let ids = [comm_id(rng), comm_id(rng)];
            let mut mad = Mad::new(transaction, message(kind, ids, &from.end, &to.end, rng));
            if rng.chance(0.05) {
                mad.attribute_modifier = rng.number() as u32;
            }
            to_gsi(&mad.emit(), rng)
        }
        What::Sessions => {
            let private_data = session(rng);
            let mut req = acceptable_req(&from.end, &to.end, rng);
            req.private_data[HEADER_LEN..].copy_from_slice(&private_data);
            to_gsi(&Mad::new(rng.number(), req).emit(), rng)
        }
        What::Backlog => {
            let transaction = rng.number();
            let mad = match transaction % 4 {
                0 => Mad::new(
                    transaction,
                    sidr_req(comm_id(rng), PortSpace::Udp, &from.end, &to.end, rng),
                ),
                _ => Mad::new(transaction, acceptable_req(&from.end, &to.end, rng)),
            };
            to_gsi(&mad.emit(), rng)
        }
        What::Opcodes => {
            let opcode = rng.pick(Opcode::ALL);
            any_opcode(opcode, Qpn::new(rng.number() as u32), rng)
        }
        What::Connected => connected(from, to, rng),
        What::Gsi => match rng.index(4) {
            0 => any_opcode(rng.pick(Opcode::ALL), Qpn::GSI, rng),
            1 => datagram(Qpn::GSI, QKey(rng.number() as u32), 256, rng),
            2 => {
                let len = rng.range(0, 80) as usize * 4;
                datagram(Qpn::GSI, QKey::GSI, len, rng)
            }
            _ => datagram(Qpn::GSI, QKey::GSI, 256, rng),
        },
        What::Datagrams => {
            let qpn = match to.datagram_qpns.as_slice() {
                [] => Qpn::new(rng.number() as u32),
                known => rng.pick(known),
            };
            // Bit 31 is set in no program's key, so no guess is right.
            let qkey = QKey(rng.number() as u32 | 1 << 31);
            let len = rng.range(0, 256) as usize * 4;
            datagram(qpn, qkey, len, rng)
        }
        What::Multicast => {
            let len = rng.range(0, 64) as usize * 4;
            datagram(Qpn::MULTICAST, QKey(rng.number() as u32), len, rng)
        }
        What::Cnps => any_opcode(Opcode::Cnp, Qpn::new(rng.number() as u32), rng),
        What::Garbage => {
            if rng.chance(0.5) {
                let len = rng.range(0, 400) as usize;
                return rng.bytes(len);
            }
            let mut whole = packet(What::Mads(None), from, to, session, rng);
            let keep = rng.index(whole.len());
            whole.truncate(keep);
            whole
        }
        What::Everything => {
            let kind = rng.pick(&KINDS);
            packet(kind, from, to, session, rng)
        }
    }
}

fn datagram(qpn: Qpn, qkey: QKey, len: usize, rng: &mut Rng) -> Vec<u8> {
    let opcode = rng.pick(&[Opcode::UdSendOnly, Opcode::UdSendOnlyImm]);
    let mut header = Header::new(Bth::new(opcode, qpn, Psn::new(rng.number() as u32)));
    header.bth.solicited = rng.chance(0.3);
    header.deth = Some(Deth {
        qkey,
        reserved: 0,
        src_qp: rng.pick(&[Qpn::GSI, Qpn::new(rng.clone().number() as u32)]),
    });
    with_payload(&header, &rng.bytes(len))
}

/// Byte that fills forged payloads. No program writes eight of them in a row.
pub(crate) const MARK: u8 = 0x5a;

/// Distance of most guesses from a PSN in use.
const NEAR: u64 = 5000;

const SENDS: [Opcode; 7] = [
    Opcode::RcSendFirst,
    Opcode::RcSendMiddle,
    Opcode::RcSendLast,
    Opcode::RcSendLastImm,
    Opcode::RcSendOnly,
    Opcode::RcSendOnlyImm,
    Opcode::RcSendOnlyInv,
];
const WRITES: [Opcode; 6] = [
    Opcode::RcWriteFirst,
    Opcode::RcWriteMiddle,
    Opcode::RcWriteLast,
    Opcode::RcWriteLastImm,
    Opcode::RcWriteOnly,
    Opcode::RcWriteOnlyImm,
];
const READ_RESPONSES: [Opcode; 4] = [
    Opcode::RcReadResponseFirst,
    Opcode::RcReadResponseMiddle,
    Opcode::RcReadResponseLast,
    Opcode::RcReadResponseOnly,
];
const OTHER_REQUESTS: [Opcode; 5] = [
    Opcode::RcReadRequest,
    Opcode::RcCompareSwap,
    Opcode::RcFetchAdd,
    Opcode::RcFlush,
    Opcode::RcAtomicWrite,
];

/// Draws the opcode of a packet to a connected queue pair.
fn connected_opcode(xrc: bool, rng: &mut Rng) -> Opcode {
    let opcode = match rng.index(20) {
        0..=3 => rng.pick(&SENDS),
        4..=7 => rng.pick(&WRITES),
        8 | 9 => rng.pick(&OTHER_REQUESTS),
        10..=12 => rng.pick(&READ_RESPONSES),
        13..=15 => Opcode::RcAcknowledge,
        16 => Opcode::RcAtomicAcknowledge,
        17 => return Opcode::SelectiveAck,
        18 => return Opcode::Cnp,
        _ => return rng.pick(Opcode::ALL),
    };
    // The services differ in the top bits.
    Opcode::from_byte(opcode as u8 | 0xa0).filter(|_| xrc).unwrap_or(opcode)
}

/// Draws a PSN at or around a live one.
fn guess_psn(live: Psn, rng: &mut Rng) -> Psn {
    match rng.index(10) {
        0 => live,
        1 => live.next(),
        2..=4 => live.add(rng.range(1, 64) as u32),
        5 | 6 => live.add(rng.range(1, NEAR) as u32),
        7 => live.sub(rng.range(1, NEAR) as u32),
        8 => live.add(rng.range(64, 4200) as u32),
        _ => Psn::new(rng.number() as u32),
    }
}

/// Forges a packet to a connected queue pair in its peer's name, at or around the PSNs that are in use.
fn connected(from: &Place, to: &Place, rng: &mut Rng) -> Vec<u8> {
    let known: Vec<Target> = to
        .connected
        .iter()
        .copied()
        .filter(|t| t.peer == from.end.addr)
        .collect();
    if known.is_empty() {
        return any_opcode(rng.pick(Opcode::ALL), Qpn::new(rng.number() as u32), rng);
    }
    let target = rng.pick(&known);
    let opcode = connected_opcode(target.xrc, rng);
    let direction = Direction::of(opcode) as usize;
    let live = target.last[direction]
        .or(target.last[1 - direction])
        .unwrap_or_default();
    let psn = guess_psn(live, rng);
    let payload = connected_payload(opcode, psn, target.mtu, rng);
    let mut header = any_header(opcode, target.qpn, rng);
    header.bth.psn = psn;
    header.bth.ack_req = rng.chance(0.5);
    header.bth.becn = false;
    header.bth.pad = payload.len().wrapping_neg() as u8 & 3;
    if let Some((va, rkey)) = target.memory.filter(|_| rng.chance(0.7)) {
        let at = va + 8 * rng.range(0, 100);
        header.reth = Some(Reth {
            va: at,
            rkey,
            dma_len: match opcode.info().position {
                Position::Only if opcode.info().payload => payload.len() as u32,
                _ => rng.pick(&[8, target.mtu, 2 * target.mtu, 4 * target.mtu]) as u32,
            },
        });
        header.atomic_eth = Some(AtomicEth {
            va: at,
            rkey,
            swap_add: u64::from_ne_bytes([MARK; 8]),
            compare: 0,
        });
        header.ieth = Some(rkey);
    }
    header.imm = Some(u32::from_ne_bytes([MARK; 4]));
    header.xrceth = Some(XrcEth {
        reserved: 0,
        srqn: Srqn::new(100 + rng.range(0, 2) as u32),
    });
    let mut padded = payload;
    padded.resize(padded.len().next_multiple_of(4), 0);
    with_payload(&header, &padded)
}

/// Draws a payload of a length that goes with the opcode: of marks, or for selective acknowledgements a bitmap.
fn connected_payload(opcode: Opcode, psn: Psn, mtu: usize, rng: &mut Rng) -> Vec<u8> {
    let info = opcode.info();
    if !info.payload {
        return Vec::new();
    }
    if info.class == Class::SelectiveAcknowledge {
        let expected = psn.add(rng.range(0, 64) as u32);
        let mut payload = expected.value().to_be_bytes().to_vec();
        for _ in 0..rng.range(0, 4) {
            payload.extend(rng.pick(&[u64::MAX, 1 << 63, u64::MAX << 32]).to_le_bytes());
        }
        return payload;
    }
    let len = match info.position {
        Position::First | Position::Middle if rng.chance(0.9) => mtu,
        Position::Last => rng.range(1, mtu as u64) as usize,
        // Four bytes are the shortest payload, with which a packet has 20.
        _ if info.class == Class::AtomicWrite => 8,
        _ => rng.pick(&[0, 4, 8, 64, mtu - 1, mtu]),
    };
    vec![MARK; len]
}
