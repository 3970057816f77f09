//! An adversary of the second kind: it sees every packet, can neither change nor keep any back, and may send its own. It
//! has chosen one connection, whose addresses, numbers, keys and PSNs it knows from then on.
//!
//! Nothing in RoCE authenticates a packet, so it may do to its victim what the victim's peer may: end it, write and read
//! where it has seen keys open, complete its work requests before their time. All that is still promised of the victim
//! is that each work request completes once at most, in order, that everything comes to an end, and that no memory
//! changes but what its keys open. All other connections are held to everything.

use std::{collections::VecDeque, net::SocketAddr};

use roce_bth::{
    Aeth, AtomicEth, BTH_LEN, Bth, Header, ICRC_LEN, Msn, Opcode, Packet, Psn, Qpn, RKey, ROCE_UDP_PORT, Reth, Service,
    Syndrome,
};
use roce_port::cm::mad::{Drep, Dreq, Mad, Message, Mra, Rej, Rtu, Subject};

use super::state::{Observer, Seen};
use crate::{
    forge,
    life::RIGHTS,
    net::Frame,
    rng::Rng,
    runner::Check,
    scenario::{MS, US},
    world::World,
};

/// Packets that it remembers.
const MEMORY: usize = 64;
/// Bytes of a region that it must not reach.
const GUARD: usize = 4096;

fn remember<T>(list: &mut VecDeque<T>, item: T) {
    if list.len() == MEMORY {
        list.pop_front();
    }
    list.push_back(item);
}

fn pick<T: Clone>(list: &VecDeque<T>, rng: &mut Rng) -> Option<T> {
    list.get(rng.index(list.len())).cloned()
}

fn header_of(bytes: &[u8]) -> Option<Header> {
    Packet::parse(bytes).ok().map(|p| p.header.into())
}

impl World {
    /// Whether a connection is an observer's victim.
    pub(crate) fn is_victim(&self, conn: usize) -> bool {
        self.observer.as_ref().is_some_and(|o| o.victim == conn)
    }

    /// Puts memory beside the victim's that nobody has a key for.
    pub(crate) fn set_guards(&mut self) -> Check {
        let Some(victim) = self.observer.as_ref().map(|o| o.victim) else {
            return Ok(());
        };
        for end in [0, 1] {
            let e = &self.conns[victim].ends[end];
            let h = &self.hosts[e.host];
            let region = h
                .mem
                .alloc_region(e.pd, GUARD, RIGHTS | roce_verbs::AccessFlags::LOCAL_WRITE);
            let region = region.map_err(|e| e.to_string())?;
            let content = Rng::new(self.seed, 99 + end as u64).bytes(GUARD);
            region.write(0, &content).map_err(|e| e.to_string())?;
            let guard = (e.host, h.boot, region, content);
            if let Some(o) = &mut self.observer {
                o.guards.push(guard);
            }
        }
        Ok(())
    }

    pub(crate) fn check_guards(&self) -> Check {
        for (host, boot, region, content) in self.observer.iter().flat_map(|o| &o.guards) {
            let mut actual = vec![0; GUARD];
            let alive = self.hosts[*host].boot == *boot;
            if alive && (region.read(0, &mut actual).is_err() || actual != *content) {
                return Err(format!(
                    "host {host}: memory without a key was reached through the victim"
                ));
            }
        }
        Ok(())
    }

    /// Sees a packet leave.
    pub(crate) fn observe(&mut self, to: usize, frame: &Frame) {
        let Some(mut o) = self.observer.take() else { return };
        self.note_packet(&mut o, to, frame);
        self.observer = Some(o);
    }

    fn note_packet(&mut self, o: &mut Observer, to: usize, frame: &Frame) {
        let Some(header) = header_of(&frame.bytes) else { return };
        let place = header.reth.map(|r| (r.va, r.rkey));
        let place = place.or(header.atomic_eth.map(|a| (a.va, a.rkey)));
        let ends = &self.conns[o.victim].ends;
        let dest = header.bth.dest_qp;
        let mine = ends.iter().any(|e| e.host == to && e.qpn == Some(dest));
        if !mine && dest != Qpn::GSI {
            if let Some(place) = place {
                remember(&mut o.others, place);
            }
            return;
        }
        if dest == Qpn::GSI {
            let qpns = [0, 1].map(|end| self.conns[o.victim].ends[end].qpn);
            if !learn_ids(&mut o.ids, qpns, &frame.bytes) {
                return;
            }
        } else if let Some(place) = place {
            remember(&mut o.keys, place);
        }
        let seen = Seen {
            to,
            src: frame.src,
            identification: frame.identification,
            bytes: frame.bytes.clone(),
        };
        remember(&mut o.seen, seen);
        if o.left > 0 && self.now < o.until && o.rng.chance(o.zeal) {
            o.left -= 1;
            let after = o.rng.pick(&[0, 0, US, 50 * US, MS]);
            self.schedule(after, "meddle", Self::meddle);
        }
    }

    /// Sends one packet in the victim's name.
    pub(crate) fn meddle(&mut self) -> Check {
        let Some(mut o) = self.observer.take() else {
            return Ok(());
        };
        let made = self.mischief(&mut o);
        o.sent += u64::from(made.is_some());
        self.observer = Some(o);
        let Some((to, frame)) = made.filter(|(to, _)| self.hosts[*to].alive) else {
            return Ok(());
        };
        self.trace.forged(self.now, to, &frame);
        let now = self.instant();
        self.hosts[to].take(now, &frame);
        self.service(to)?;
        self.check_bounds(to)?;
        self.check_guards()
    }

    fn mischief(&self, o: &mut Observer) -> Option<(usize, Frame)> {
        let victim = &self.conns[o.victim];
        let rng = &mut o.rng;
        let seen = pick(&o.seen, rng)?;
        let dst = self.hosts[seen.to].plan.addr;
        let mut bytes = seen.bytes.clone();
        let mut src = seen.src;
        match rng.index(10) {
            0 => {}
            1 => shift_psn(&mut bytes, rng),
            2 => {
                // Anywhere behind the queue pair number.
                let at = rng.range(8, bytes.len() as u64 - 1) as usize;
                bytes[at] ^= 1 << rng.index(8);
            }
            3 => {
                let keep = rng.range(BTH_LEN as u64, bytes.len() as u64) as usize;
                bytes.truncate(keep);
            }
            4 | 5 => {
                let end = rng.index(2);
                let [own, peer] = [end, 1 - end].map(|e| &victim.ends[e]);
                src = SocketAddr::new(self.hosts[peer.host].plan.addr, ROCE_UDP_PORT);
                let mad = end_of(end, o.ids, own.qpn?, rng);
                bytes = forge::to_gsi(&mad.emit(), rng);
                let dst = self.hosts[own.host].plan.addr;
                return Some((own.host, sealed(src, dst, seen.identification, bytes, rng)));
            }
            _ => {
                let header = header_of(&bytes)?;
                let place = match rng.chance(0.1) {
                    true => pick(&o.others, rng),
                    false => pick(&o.keys, rng),
                };
                bytes = forged(&header.bth, place, rng);
            }
        }
        Some((seen.to, sealed(src, dst, seen.identification, bytes, rng)))
    }
}

/// Learns the victim's communication IDs from its own management datagrams. Whether it is one of them.
fn learn_ids(ids: &mut [u32; 2], qpns: [Option<Qpn>; 2], bytes: &[u8]) -> bool {
    let Ok(packet) = Packet::parse(bytes) else { return false };
    let Ok(mad) = Mad::parse(packet.payload) else {
        return false;
    };
    match mad.message {
        Message::Req(m) if Some(m.local_qpn) == qpns[0] => *ids = [m.local_comm_id, 0],
        Message::Rep(m) if m.remote_comm_id == ids[0] && Some(m.local_qpn) == qpns[1] => ids[1] = m.local_comm_id,
        Message::Rtu(m) => return ids[0] != 0 && [m.local_comm_id, m.remote_comm_id] == *ids,
        Message::Dreq(m) => return ids[0] != 0 && ids.contains(&m.remote_comm_id),
        _ => return false,
    }
    true
}

/// Draws a message that closes the connection, or delays it, to one of its ends.
fn end_of(end: usize, ids: [u32; 2], qpn: Qpn, rng: &mut Rng) -> Mad {
    let (local_comm_id, remote_comm_id) = (ids[1 - end], ids[end]);
    let message: Message = match rng.index(5) {
        0 => Drep {
            local_comm_id,
            remote_comm_id,
            ..Drep::default()
        }
        .into(),
        1 => Rej {
            local_comm_id,
            remote_comm_id,
            subject: rng.pick(&[Subject::Req, Subject::Rep, Subject::Other]),
            reason: 28,
            ..Rej::default()
        }
        .into(),
        2 => Rtu {
            local_comm_id,
            remote_comm_id,
            ..Rtu::default()
        }
        .into(),
        3 => Mra {
            local_comm_id,
            remote_comm_id,
            subject: Subject::Rep,
            service_timeout: rng.pick(&[0, 10, 31]),
            ..Mra::default()
        }
        .into(),
        _ => Dreq {
            local_comm_id,
            remote_comm_id,
            remote_qpn: qpn,
            ..Dreq::default()
        }
        .into(),
    };
    Mad::new(rng.number(), message)
}

fn shift_psn(bytes: &mut [u8], rng: &mut Rng) {
    let Some(psn) = bytes.get_mut(9..12) else { return };
    let old = u32::from_be_bytes([0, psn[0], psn[1], psn[2]]);
    let by = rng.range(0, 12) as u32;
    let new = old.wrapping_add(by).wrapping_sub(3).to_be_bytes();
    psn.copy_from_slice(&new[1..]);
}

/// Forges a packet of any opcode of the victim's service, near its PSN, with a key that was seen.
fn forged(like: &Bth, place: Option<(u64, RKey)>, rng: &mut Rng) -> Vec<u8> {
    let of_service: Vec<Opcode> = Opcode::ALL
        .iter()
        .copied()
        .filter(|o| o.info().service == Service::Rc)
        .collect();
    let opcode = rng.pick(&of_service);
    let near = like.psn.value().wrapping_add(rng.range(0, 8) as u32).wrapping_sub(2);
    let mut header = Header::new(Bth::new(opcode, like.dest_qp, Psn::new(near)));
    header.bth.ack_req = rng.chance(0.5);
    let (va, rkey) = place.unwrap_or((rng.number(), RKey(rng.number() as u32)));
    let info = opcode.info();
    let len = if info.payload {
        rng.pick(&[0, 4, 64, 256, 1024])
    } else {
        0
    };
    let va = va
        .wrapping_add(rng.pick(&[0, 0, 8, 4096, 1 << 20]))
        .wrapping_sub(rng.pick(&[0, 0, 64]));
    header.reth = Some(Reth {
        va,
        rkey,
        dma_len: rng.pick(&[len as u32, len as u32, 8, 4096, u32::MAX]),
    });
    header.atomic_eth = Some(AtomicEth {
        va: va & !7,
        rkey,
        swap_add: rng.number(),
        compare: rng.number(),
    });
    header.aeth = Some(Aeth {
        syndrome: Syndrome::from_byte(rng.pick(&[0x1f, 0x1f, 0x00, 0x21, 0x60, 0x61, 0x62, 0x63, 0x64, 0xff])),
        msn: Msn::new(rng.number() as u32),
    });
    header.imm = Some(rng.number() as u32);
    header.ieth = Some(rkey);
    forge::with_payload(&header, &rng.bytes(len))
}

/// Seals a packet, mostly with the genuine packet's Identification.
fn sealed(src: SocketAddr, dst: std::net::IpAddr, like: u16, mut bytes: Vec<u8>, rng: &mut Rng) -> Frame {
    let identification = match rng.index(10) {
        0 => rng.number() as u16,
        _ => like.wrapping_add(rng.range(0, 1) as u16),
    };
    if rng.chance(0.95) && bytes.len() > ICRC_LEN {
        forge::seal(src, dst, identification, &mut bytes);
    }
    Frame {
        src,
        dst,
        tos: 0,
        identification,
        segment_len: 0,
        bytes,
        damaged: false,
    }
}
