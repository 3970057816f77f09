//! Faults of the packets of one port.

use std::{net::IpAddr, sync::Arc, time::Duration};

use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use roce_bth::{Class, ExtHeader, Opcode, Qpn};
use roce_verbs::Instant;

use crate::{
    faults::{Active, Counts, Faults, Streams, stream_seed},
    impairment::{Counters, Impairment, Passage, Passages},
    rule::{Action, Direction, Kind, QpRef, Which},
};

/// Bits of the traffic class that say whether the sender supports ECN (RFC 3168).
const ECN_BITS: u8 = 3;

/// Packet as the rules see it.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// Direction.
    pub direction: Direction,
    /// Our queue pair.
    pub qp: QpRef,
    /// The peer's address.
    pub peer: IpAddr,
    /// TOS or traffic class.
    pub traffic_class: u8,
    /// UDP payload: from the BTH to the ICRC.
    pub bytes: &'a [u8],
}

/// Fate of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fate {
    /// Arrivals, at times since [`Instant::ZERO`].
    pub passages: Passages,
    /// The message finds no receive work request.
    pub rnr: bool,
}

/// State of a rule for the packets of a queue pair in one direction.
#[derive(Debug)]
struct Way {
    seen: u64,
    impairment: Impairment,
    /// Decides about `rnr`.
    rng: ChaCha8Rng,
}

/// Faults of the packets of one port. The first rule that applies to a packet decides its fate.
#[derive(Debug)]
pub struct Network {
    faults: Faults,
    /// That of `rules`.
    generation: u64,
    rules: Arc<[Active]>,
    /// By rule, direction and queue pair.
    ways: Streams<(usize, Direction, QpRef), Way>,
    /// The rule that decided last.
    last: usize,
}

/// Whether an address is in a network.
fn is_in(addr: IpAddr, (network, bits): (IpAddr, u8)) -> bool {
    let (a, b, width) = match (addr.to_canonical(), network) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (u128::from(a.to_bits()), u128::from(b.to_bits()), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits(), b.to_bits(), 128),
        _ => return false,
    };
    (a ^ b).checked_shr(width - u32::from(bits)).unwrap_or(0) == 0
}

impl Which {
    /// Whether a rule is about a packet, but for its ordinal number.
    fn has(&self, packet: &Packet<'_>, kind: Option<Kind>) -> bool {
        let management = kind == Some(Kind::Cm);
        // Who counts the packets of queue pairs, or names some, doesn't mean queue pair 1.
        let ordinary = !management || self.qp.is_some() || self.kind.is_some() || self.nth.is_none();
        ordinary
            && self.direction.is_none_or(|direction| direction == packet.direction)
            && self.kind.is_none_or(|wanted| kind == Some(wanted))
            && self.has_qp(packet.qp)
            && self.peer.is_none_or(|network| is_in(packet.peer, network))
    }
}

/// Whether a packet takes a receive work request.
fn takes_receive(opcode: Opcode) -> bool {
    let info = opcode.info();
    match info.class {
        Class::Send => info.position.starts(),
        Class::Write => info.has(ExtHeader::Imm),
        _ => false,
    }
}

impl Faults {
    /// Creates the network faults of one port, which follow changes of the rules.
    pub fn network(&self) -> Network {
        Network {
            faults: self.clone(),
            generation: 0,
            rules: Arc::default(),
            ways: Streams::default(),
            last: 0,
        }
    }
}

impl Network {
    /// Takes over changes of the rules. Returns whether there are any.
    pub fn is_active(&mut self) -> bool {
        let generation = self.faults.generation();
        if generation != self.generation {
            self.generation = generation;
            self.rules = self.faults.rules();
            self.ways = Streams::default();
        }
        !self.rules.is_empty()
    }

    /// Counts an arrival of the last packet as dropped, because there is no memory for it.
    pub fn count_overflow(&self) {
        if let Some(active) = self.rules.get(self.last) {
            active.counts.lock().dropped += 1;
        }
    }

    /// Decides the fate of a packet. `None`: no rule applies to it.
    pub fn judge(&mut self, now: Instant, packet: &Packet<'_>) -> Option<Fate> {
        let now = now.saturating_since(Instant::ZERO);
        let opcode = packet.bytes.first().and_then(|byte| Opcode::from_byte(*byte));
        let kind = opcode.and_then(|opcode| Kind::of_packet(opcode, packet.qp.qpn == Qpn::GSI.value()));
        for (index, active) in self.rules.iter().enumerate() {
            let Action::Packets { conditions, rnr } = active.rule.action else {
                continue;
            };
            if !active.rule.which.has(packet, kind) {
                continue;
            }
            let way = self.ways.of((index, packet.direction, packet.qp), || {
                let seed = |stream| stream_seed(active.rule.seed, index, stream, packet.qp.serial);
                let direction = u64::from(packet.direction == Direction::Rx);
                let mut impairment = Impairment::new(seed(direction));
                impairment.set(conditions);
                Way {
                    seen: 0,
                    impairment,
                    rng: ChaCha8Rng::seed_from_u64(seed(3)),
                }
            });
            way.seen += 1;
            let nth = active.rule.which.nth.as_ref();
            if nth.is_some_and(|nth| !nth.contains(way.seen)) {
                continue;
            }
            let mut passages = way.impairment.pass(now, packet.bytes.len());
            for passage in passages.iter_mut().flatten() {
                passage.marked &= packet.traffic_class & ECN_BITS != 0;
            }
            let may = packet.direction == Direction::Rx && rnr > 0.0 && opcode.is_some_and(takes_receive);
            let rnr = may && way.rng.random::<f64>() < rnr;
            self.last = index;
            count(
                &mut active.counts.lock(),
                now,
                way.impairment.take_counters(),
                &Fate { passages, rnr },
            );
            return Some(Fate { passages, rnr });
        }
        None
    }
}

fn count(counts: &mut Counts, now: Duration, done: Counters, fate: &Fate) {
    let any = |f: &dyn Fn(&Passage) -> bool| u64::from(fate.passages.iter().flatten().any(f));
    counts.add(&Counts {
        packets: done.taken,
        lost: done.lost + done.cut,
        dropped: done.dropped,
        duplicated: done.repeated,
        reordered: done.reordered,
        delayed: any(&|p| p.due > now),
        corrupted: done.corrupted,
        ecn_marked: any(&|p| p.marked),
        rnr: u64::from(fate.rnr),
        ..Counts::default()
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rule::rules;

    const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7));
    const WRITE: u8 = Opcode::RcWriteOnly as u8;
    const SEND: u8 = Opcode::RcSendOnly as u8;
    const ACK: u8 = Opcode::RcAcknowledge as u8;

    fn network(text: &str) -> Network {
        let mut network = Faults::new(rules(text).unwrap()).unwrap().network();
        network.is_active();
        network
    }

    fn packet(direction: Direction, serial: u32, bytes: &[u8]) -> Packet<'_> {
        Packet {
            direction,
            qp: QpRef {
                qpn: 0x100 + serial,
                serial,
            },
            peer: PEER,
            traffic_class: 2,
            bytes,
        }
    }

    fn judge(network: &mut Network, direction: Direction, serial: u32, opcode: u8) -> Option<Fate> {
        network.judge(Instant::from_nanos(5), &packet(direction, serial, &[opcode; 40]))
    }

    fn lost(fate: Option<Fate>) -> bool {
        fate.is_some_and(|fate| fate.passages == [None; 2])
    }

    fn counted(network: &Network, rule: usize, name: &str) -> u64 {
        let counts = &network.faults.report()[rule].counts;
        counts.iter().find(|(n, _)| *n == name).unwrap().1
    }

    #[test]
    fn what_one_queue_pair_meets_is_independent_of_others() {
        let mut alone = network("loss=20%,seed=7");
        let fates: Vec<bool> = (0..500)
            .map(|_| lost(judge(&mut alone, Direction::Tx, 1, WRITE)))
            .collect();
        let mut busy = network("loss=20%,seed=7");
        let beside: Vec<bool> = (0..500)
            .map(|n| {
                for serial in 2..5 {
                    judge(&mut busy, Direction::Tx, serial + n % 3, WRITE);
                }
                judge(&mut busy, Direction::Rx, 1, ACK);
                lost(judge(&mut busy, Direction::Tx, 1, WRITE))
            })
            .collect();
        assert_eq!(fates, beside);
        let times = fates.iter().filter(|lost| **lost).count();
        assert!((60..140).contains(&times), "{times}");
        assert_eq!(
            (counted(&alone, 0, "packets"), counted(&alone, 0, "lost")),
            (500, times as u64)
        );
    }

    #[test]
    fn the_nth_packet_of_each_queue_pair_and_direction() {
        let mut network = network("loss,nth=3,kind=write");
        let mut hits = Vec::new();
        for n in 1..=5 {
            for (direction, serial) in [(Direction::Tx, 1), (Direction::Tx, 2), (Direction::Rx, 1)] {
                judge(&mut network, direction, serial, ACK);
                if lost(judge(&mut network, direction, serial, WRITE)) {
                    hits.push((n, direction, serial));
                }
            }
        }
        assert_eq!(
            hits,
            [(3, Direction::Tx, 1), (3, Direction::Tx, 2), (3, Direction::Rx, 1)]
        );
    }

    #[test]
    fn the_first_rule_that_applies_decides() {
        let mut network = network("loss,nth=2,dir=tx; corrupt,peer=192.0.2.0/24; loss");
        let mut fate = || judge(&mut network, Direction::Tx, 1, WRITE);
        let damaged = |fate: Option<Fate>| fate.is_some_and(|f| f.passages[0].is_some_and(|p| p.damage.is_some()));
        assert!(damaged(fate()) && lost(fate()) && damaged(fate()));
        let elsewhere = Packet {
            peer: [198, 51, 100, 1].into(),
            ..packet(Direction::Tx, 1, &[WRITE; 40])
        };
        assert!(lost(network.judge(Instant::ZERO, &elsewhere)));
    }

    #[test]
    fn queue_pairs_are_named_by_number_and_by_order() {
        let mut network = network("loss,qp=0x102; corrupt,qp=#1");
        let fates = [1, 2, 3].map(|serial| judge(&mut network, Direction::Tx, serial, WRITE));
        assert!(fates[0].is_some() && !lost(fates[0]) && lost(fates[1]) && fates[2].is_none());
    }

    #[test]
    fn management_is_counted_only_when_it_is_meant() {
        let mad = Packet {
            qp: QpRef { qpn: 1, serial: 0 },
            ..packet(Direction::Tx, 0, &[Opcode::UdSendOnly as u8; 40])
        };
        for (text, meant) in [
            ("loss", true),
            ("loss,nth=1", false),
            ("loss,nth=1,kind=cm", true),
            ("loss,nth=1,qp=1", true),
            ("loss,kind=send", false),
        ] {
            assert_eq!(network(text).judge(Instant::ZERO, &mad).is_some(), meant, "{text}");
        }
    }

    #[test]
    fn only_messages_that_take_a_receive_find_none() {
        let mut network = network("rnr");
        let rnr = |network: &mut Network, direction, opcode| judge(network, direction, 1, opcode).unwrap().rnr;
        assert!(rnr(&mut network, Direction::Rx, SEND));
        assert!(rnr(&mut network, Direction::Rx, Opcode::RcWriteOnlyImm as u8));
        for opcode in [WRITE, ACK, Opcode::RcSendMiddle as u8] {
            assert!(!rnr(&mut network, Direction::Rx, opcode));
        }
        assert!(!rnr(&mut network, Direction::Tx, SEND));
        assert_eq!(counted(&network, 0, "rnr"), 2);
    }

    #[test]
    fn only_packets_of_senders_that_support_ecn_are_marked() {
        let mut network = network("ecn");
        let mut marked = |traffic_class| {
            let packet = Packet {
                traffic_class,
                ..packet(Direction::Rx, 1, &[WRITE; 40])
            };
            network.judge(Instant::ZERO, &packet).unwrap().passages[0]
                .unwrap()
                .marked
        };
        assert!(marked(2) && marked(1) && !marked(0));
        assert_eq!(counted(&network, 0, "ecn_marked"), 2);
    }

    #[test]
    fn a_changed_rule_begins_at_the_next_packet() {
        let mut network = network("none");
        assert!(!network.is_active());
        network.faults.set(rules("loss").unwrap()).unwrap();
        assert!(network.is_active() && lost(judge(&mut network, Direction::Tx, 1, WRITE)));
        network.faults.clear();
        assert!(!network.is_active());
    }

    #[test]
    fn networks() {
        for (network, inside, outside) in [
            ("192.0.2.0/24", "192.0.2.255", "192.0.3.0"),
            ("192.0.2.7", "192.0.2.7", "192.0.2.8"),
            ("0.0.0.0/0", "8.8.8.8", "::1"),
            ("2001:db8::/32", "2001:db8:1::1", "2001:db9::"),
            ("::/0", "::1", "192.0.2.7"),
        ] {
            let mut rule = self::network(&format!("loss,peer={network}"));
            let mut has = |peer: &str| {
                let packet = Packet {
                    peer: peer.parse().unwrap(),
                    ..packet(Direction::Tx, 1, &[WRITE; 40])
                };
                rule.judge(Instant::ZERO, &packet).is_some()
            };
            assert!(has(inside) && !has(outside), "{network}");
        }
    }
}
