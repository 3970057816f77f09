//! Protocol between broker and members, and the division of numbers.
//!
//! A message is one record of a `SOCK_SEQPACKET` unix socket: the length of its JSON part (32 bits, little endian), the
//! JSON, and for [`ToBroker::Datagram`] and [`ToClient::Datagram`] the datagram's bytes. Sockets travel beside it
//! (`SCM_RIGHTS`).

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use roce_bth::Qpn;
use roce_port::{QpnSlot, RxMeta};
use serde::{Deserialize, Serialize};

use crate::page::Report;

/// Version of this protocol. Broker and members of other versions refuse each other.
pub const VERSION: u32 = 8;
/// Ports of a process that statistics show.
pub const MAX_SHOWN: usize = 64;
/// Number of top bits of a queue pair number that choose the socket.
pub const SLOT_BITS: u8 = 7;
/// Sockets of a group. Slot 0 is the broker's.
pub const SLOTS: usize = 1 << SLOT_BITS;
/// Groups that a broker has open for all users: each keeps a record with systemd (`FileDescriptorStoreMax`), and is up to 128
/// sockets.
pub const MAX_GROUPS: usize = 64;
/// Number of further bits, which distinguish successive owners of a slot.
pub const GENERATION_BITS: u8 = 4;
/// Number of successive owners of a slot that are distinguished.
pub const GENERATIONS: usize = 1 << GENERATION_BITS;
/// Stands for all generations of a slot, which has one owner with all of its numbers.
pub const ALL_GENERATIONS: u8 = GENERATIONS as u8;
/// Bits of a number that name its owner, if that has one generation of a slot.
pub const PLACE_BITS: u8 = SLOT_BITS + GENERATION_BITS;

/// Owner of numbers: a slot, and a generation, which counts the slot's successive owners. The next owner of a slot has another generation,
/// so that packets to the former one's queue pairs find none.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub struct Place {
    /// Index of the socket, 1 to 127.
    pub slot: u8,
    /// Generation, 0 to 15, or [`ALL_GENERATIONS`].
    pub generation: u8,
}

impl Place {
    /// A whole slot.
    pub const fn whole(slot: u8) -> Self {
        Self {
            slot,
            generation: ALL_GENERATIONS,
        }
    }

    /// Whether it is a whole slot.
    pub const fn is_whole(self) -> bool {
        self.generation == ALL_GENERATIONS
    }

    /// Whether a member can have it.
    pub const fn is_valid(self) -> bool {
        self.slot >= 1 && (self.slot as usize) < SLOTS && self.generation <= ALL_GENERATIONS
    }

    /// Whether the numbers of `other` are its own.
    pub const fn covers(self, other: Self) -> bool {
        self.slot == other.slot && (self.is_whole() || self.generation == other.generation)
    }

    /// The part of all queue pair numbers and communication IDs that belongs to it.
    pub const fn numbers(self) -> QpnSlot {
        let (bits, slot) = match self.is_whole() {
            true => (SLOT_BITS, self.slot as u16),
            false => {
                let slot = ((self.slot as u16) << GENERATION_BITS) | self.generation as u16;
                (PLACE_BITS, slot)
            }
        };
        QpnSlot { bits, slot }
    }

    /// Returns the owner of a queue pair number: a single generation, which an owner of the whole slot [covers](Self::covers).
    pub const fn of_qpn(qpn: Qpn) -> Self {
        Self::from_top(qpn.value() >> (24 - PLACE_BITS as u32))
    }

    /// Returns the owner of a communication ID, or of the upper half of a transaction ID.
    pub const fn of_comm_id(id: u32) -> Self {
        Self::from_top(id >> (32 - PLACE_BITS as u32))
    }

    const fn from_top(top: u32) -> Self {
        Self {
            slot: ((top >> GENERATION_BITS) as u8) & (SLOTS as u8 - 1),
            generation: (top as u8) & (GENERATIONS as u8 - 1),
        }
    }
}

/// Generations of its place that a member may use, and those that it uses. Of a whole slot it uses one generation, until it has more queue pairs than that
/// has numbers: only what has been used must rest when the member is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Parts {
    /// The generation that it uses first.
    pub home: u8,
    /// Generations that it may not use, a bit for each: numbers of former owners rest.
    pub resting: u16,
    /// It uses all others.
    pub spread: bool,
}

impl Parts {
    /// The generations of a place that may be used, a bit for each.
    pub const fn usable(self, place: Place) -> u16 {
        match place.is_whole() {
            true => !self.resting,
            false => 1 << (place.generation & (GENERATIONS as u8 - 1)),
        }
    }

    /// Returns the generations in use.
    pub const fn used(self, place: Place) -> u16 {
        match place.is_whole() && !self.spread {
            true => 1 << (self.home & (GENERATIONS as u8 - 1)),
            false => self.usable(place),
        }
    }
}

/// A port of a port space that a member has.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Binding {
    /// Service ID: port space and port (`rdma_get_service_id`).
    pub service: u64,
    /// On this address, or (unspecified) on all of its IP version, or on all.
    pub addr: Option<IpAddr>,
    /// Others that also allow it may bind the port too (`RDMA_OPTION_ID_REUSEADDR`).
    pub reuse: bool,
    /// It is held by [`Request::Bind`].
    pub bound: bool,
    /// It takes requests.
    pub listening: bool,
}

impl Binding {
    /// Creates a binding by [`Request::Bind`], or one that only takes requests.
    pub(crate) const fn new(service: u64, addr: Option<IpAddr>, reuse: bool, bound: bool) -> Self {
        Self {
            service,
            addr,
            reuse,
            bound,
            listening: !bound,
        }
    }
}

/// An established connection: the peer gets a DREQ when the process dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Connection {
    /// Our address.
    pub local: IpAddr,
    /// The peer's.
    pub remote: IpAddr,
    /// Our communication ID.
    pub local_id: u32,
    /// The peer's communication ID.
    pub remote_id: u32,
    /// The peer's queue pair.
    pub remote_qpn: u32,
}

/// Addresses and IP header fields of a single packet.
#[derive(Serialize, Deserialize)]
#[serde(remote = "RxMeta")]
struct Meta {
    local: IpAddr,
    remote: SocketAddr,
    #[serde(skip)]
    identification: Option<u16>,
    #[serde(skip)]
    segment_len: usize,
    tos: u8,
    hop_limit: u8,
}

/// Message from a member, or a process that only asks for statistics, to the broker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToBroker {
    /// Is answered with a [`ToClient::Reply`] of the same number.
    Request {
        /// Chosen by the asking side.
        seq: u64,
        /// The request.
        request: Request,
    },
    /// A packet for another member that the kernel gave to this one: several packets of one sender may come merged, and
    /// are steered by the first.
    Datagram(#[serde(with = "Meta")] RxMeta),
    /// Changes of the member's connections. The broker doesn't learn of them from packets: anybody may send those.
    Connections {
        /// They are established.
        up: Vec<Connection>,
        /// They are over, by our communication IDs.
        down: Vec<u32>,
    },
    /// From now on the member uses all that it may of its place ([`Parts::spread`]).
    Spread,
    /// The member leaves, having ended its connections itself.
    Goodbye,
}

/// Place of a member, and what gets it again from the next broker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Grant {
    /// Its place.
    pub place: Place,
    /// Shows that the place was this member's: nobody else knows it.
    pub token: u64,
    /// Generations that it may use, and uses.
    pub parts: Parts,
}

/// Request of a member.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// The first of every member: wants a place. Answer: [`Reply::Welcome`].
    Hello {
        /// [`VERSION`].
        version: u32,
        /// Name of the process.
        name: String,
        /// The place that it had with a former broker.
        rejoin: Option<Grant>,
    },
    /// Ports that a member had with a former broker; may come several times. One that another process has by now is left out.
    /// Answer: [`Reply::Done`].
    Restore(Vec<Binding>),
    /// The member has reported all the ports and connections that it had. Until all members have, nobody gets a port. Answer:
    /// [`Reply::Done`].
    Restored,
    /// Wants its sockets of an address, `::` meaning IPv4 too. Members that rejoin send the groups' vaults with it, or where
    /// they have none their sockets. Answer: [`Reply::Opened`].
    Open {
        /// The address.
        addr: IpAddr,
        /// It uses the sockets already: what they have received stays.
        again: bool,
    },
    /// Wants a port. Answer: [`Reply::Bound`].
    Bind {
        /// Port space and port; port 0: any that is free.
        service: u64,
        /// On one address or on all.
        addr: Option<IpAddr>,
        /// See [`Binding::reuse`].
        reuse: bool,
    },
    /// Wants the connect requests for a service ID. Answer: [`Reply::Done`].
    Listen {
        /// Service ID.
        service: u64,
        /// To one address or to all.
        addr: Option<IpAddr>,
    },
    /// Gives back what `Bind` or `Listen` gave. Answer: [`Reply::Done`].
    Release {
        /// Service ID, as bound.
        service: u64,
        /// Address, as bound.
        addr: Option<IpAddr>,
        /// Whether it came from `Listen`.
        listening: bool,
    },
    /// Wants to know what is going on. Answer: [`Reply::Statistics`].
    Statistics,
}

/// From the broker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToClient {
    /// Answer to a request.
    Reply {
        /// The request's.
        seq: u64,
        /// The answer.
        reply: Reply,
    },
    /// A packet for this member that another socket received.
    Datagram(#[serde(with = "Meta")] RxMeta),
}

/// Answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The member's place, and beside it the page for its counters, unless the broker can't make one.
    Welcome(Grant),
    /// The sockets of an address: for each IP version the member's socket, unless it has that already, and the vault if
    /// `vault`.
    Opened {
        /// Addresses, one per IP version.
        addrs: Vec<IpAddr>,
        /// Every socket is followed by its group's vault.
        vault: bool,
    },
    /// The port.
    Bound {
        /// Service ID.
        service: u64,
    },
    /// Done.
    Done,
    /// Members and counters, in as many answers as that takes.
    Statistics {
        /// Some of it.
        part: Statistics,
        /// Another answer follows.
        more: bool,
    },
    /// Not done.
    Refused {
        /// Reason for programs.
        why: Refusal,
        /// Reason for people.
        text: String,
    },
}

/// Reason why a request is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Refusal {
    /// Another version of the protocol.
    Version,
    /// All places are taken or rest.
    Full,
    /// The place that the member had is another's.
    PlaceTaken,
    /// The address can't be opened: not ours, taken by another program, or overlapping with another group.
    Address,
    /// The port is taken.
    PortInUse,
    /// The user has as much of it as one may have.
    Quota,
    /// The request makes no sense (now).
    Invalid,
    /// The broker's own trouble.
    Internal,
}

/// Sums of the counters of processes that have ended.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Ended {
    /// Addresses of their devices, as in [`Report`].
    pub addrs: Vec<IpAddr>,
    /// Number of processes.
    pub processes: u64,
    /// Sums by name. They stop at the largest value.
    pub counters: BTreeMap<String, u64>,
}

/// A member, as others see it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ProcessReport {
    /// Process id; 0 if it can't be seen from the broker's namespace.
    pub pid: u32,
    /// User id.
    pub uid: u32,
    /// Its name.
    pub name: String,
    /// Its place.
    pub place: Place,
    /// Number of connections that it has reported.
    pub connections: u64,
    /// Its ports, [`MAX_SHOWN`] at most.
    pub bindings: Vec<Binding>,
    /// Its status; `None` if it has published none.
    pub report: Option<Report>,
}

/// Processes that the members of a broker have to trust.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Isolation {
    /// They are one user's.
    #[default]
    OneUser,
    /// The broker, and nobody else: none can receive what is another's.
    Isolated,
    /// Each other: the broker may not load the program that would keep them apart.
    TrustDomain,
}

/// Connect request that proved address translation (NAT), and was dropped.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Translated {
    /// Addresses, for people.
    pub text: String,
    /// Seconds since it came.
    pub age: u64,
}

impl Translated {
    /// Cause and remedy.
    pub const ADVICE: &'static str = roce_port::cm::Translation::ADVICE;
}

/// Answer to [`Request::Statistics`].
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Statistics {
    /// The broker's process id.
    pub pid: u32,
    /// Processes that the members trust.
    #[serde(default)]
    pub isolation: Isolation,
    /// Addresses that are open.
    pub addrs: Vec<IpAddr>,
    /// The members.
    pub processes: Vec<ProcessReport>,
    /// Counters of members that ended since the broker was started, by the addresses of their devices.
    pub ended: Vec<Ended>,
    /// Number of ended members whose counters are unknown: they had published none, or sums are kept for too many sets of addresses.
    pub ended_unknown: u64,
    /// Counters of the broker, by name.
    pub counters: BTreeMap<String, u64>,
    /// Last request that proved address translation.
    #[serde(default)]
    pub translated: Option<Translated>,
}

impl Statistics {
    /// Divides them into parts that each fit into a record: one for each process and each sum.
    pub(crate) fn parts(mut self) -> Vec<Self> {
        let processes = std::mem::take(&mut self.processes).into_iter().map(|process| Self {
            processes: vec![process],
            ..Self::default()
        });
        let ended = std::mem::take(&mut self.ended).into_iter().map(|sums| Self {
            ended: vec![sums],
            ..Self::default()
        });
        std::iter::once(self).chain(processes).chain(ended).collect()
    }

    /// Adds a further part.
    pub(crate) fn append(&mut self, part: Self) {
        self.processes.extend(part.processes);
        self.ended.extend(part.ended);
    }

    /// A counter of all processes, ended ones included, whose device has one of these addresses or all of the host's.
    /// `u64::MAX` if it is more.
    pub fn sum(&self, addrs: &[IpAddr], name: &str) -> u64 {
        let living = self.processes.iter().filter_map(|p| p.report.as_ref());
        let living = living.map(|r| (&r.addrs, &r.counters));
        let ended = self.ended.iter().map(|e| (&e.addrs, &e.counters));
        living
            .chain(ended)
            .filter(|(of, _)| of.is_empty() || of.iter().any(|ip| addrs.contains(ip)))
            .filter_map(|(_, counters)| counters.get(name))
            .fold(0, |sum, n| sum.saturating_add(*n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_of_a_datagram_stays_with_it() {
        let sender = "192.0.2.7:49152".parse().unwrap();
        let seen = RxMeta {
            tos: 0x68,
            hop_limit: 9,
            ..RxMeta::new([192, 0, 2, 1].into(), sender)
        };
        let text = serde_json::to_string(&ToClient::Datagram(seen)).unwrap();
        let ToClient::Datagram(told) = serde_json::from_str(&text).unwrap() else {
            panic!("{text}");
        };
        assert_eq!((told.local, told.remote), (seen.local, sender));
        assert_eq!((told.tos, told.hop_limit), (0x68, 9));
    }

    fn report(addrs: &[[u8; 4]], counters: &[(&str, u64)]) -> Report {
        Report {
            addrs: addrs.iter().map(|a| IpAddr::from(*a)).collect(),
            counters: counters.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect(),
            ..Report::default()
        }
    }

    #[test]
    fn a_counter_of_a_device_is_that_of_its_processes_ended_or_not() {
        let living = |addrs: &[[u8; 4]], n| ProcessReport {
            pid: 1,
            uid: 0,
            name: String::new(),
            place: Place { slot: 1, generation: 0 },
            connections: 0,
            bindings: vec![],
            report: Some(report(addrs, &[("sent_pkts", n)])),
        };
        let ended = |addrs: &[[u8; 4]], n| Ended {
            addrs: report(addrs, &[]).addrs,
            processes: 1,
            counters: report(&[], &[("sent_pkts", n), ("huge", u64::MAX)]).counters,
        };
        let (one, two) = ([10, 0, 0, 1], [10, 0, 0, 2]);
        let statistics = Statistics {
            processes: vec![living(&[], 1), living(&[one], 2), living(&[two], 4)],
            ended: vec![ended(&[], 8), ended(&[one], 16), ended(&[two], 32)],
            ..Statistics::default()
        };
        assert_eq!(statistics.sum(&[one.into()], "sent_pkts"), 1 + 2 + 8 + 16);
        assert_eq!(statistics.sum(&[one.into(), two.into()], "sent_pkts"), 63);
        assert_eq!(statistics.sum(&[], "sent_pkts"), 9);
        assert_eq!(statistics.sum(&[one.into()], "huge"), u64::MAX);
        assert_eq!(statistics.sum(&[one.into()], "none"), 0);
    }

    #[test]
    fn numbers_show_their_place() {
        for (slot, generation) in [(1, 0), (5, 9), (127, 15), (64, 1)] {
            let place = Place { slot, generation };
            assert!(place.is_valid());
            let numbers = place.numbers();
            assert!(numbers.is_valid());
            let (qpns, ids) = (numbers.qpns(), numbers.comm_ids());
            for qpn in [qpns.first, qpns.last] {
                assert_eq!(Place::of_qpn(Qpn::new(qpn)), place);
                assert_eq!((qpn >> 17) as u8, slot, "what the BPF program computes");
            }
            for id in [ids.0, ids.1] {
                assert_eq!(Place::of_comm_id(id), place);
            }
        }
        let whole = Place::whole(9);
        let (qpns, ids) = (whole.numbers().qpns(), whole.numbers().comm_ids());
        assert!(whole.is_valid() && whole.numbers().is_valid());
        assert_eq!(
            qpns.count(),
            Place { slot: 9, generation: 0 }.numbers().qpns().count() * GENERATIONS as u32
        );
        for other in [
            Place::of_qpn(Qpn::new(qpns.first)),
            Place::of_qpn(Qpn::new(qpns.last)),
            Place::of_comm_id(ids.0),
        ] {
            assert!(
                whole.covers(other) && !other.covers(whole) && !Place::whole(8).covers(other),
                "{other:?}"
            );
        }
        assert!(!Place { slot: 0, generation: 3 }.is_valid());
        assert!(
            !Place {
                slot: 9,
                generation: ALL_GENERATIONS + 1
            }
            .is_valid()
        );
        assert_eq!(Place::of_qpn(Qpn::GSI).slot, 0, "QP1 is the broker's");
    }
}
