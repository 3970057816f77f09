//! State of the attackers.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use roce_bth::{Qpn, RKey};
use roce_port::ConnId;
use roce_port::cm::mad::Attribute;
use roce_verbs::mem::Region;

use super::packets::What;
use crate::{
    forge::Identifications,
    rng::Rng,
    scenario::{MS, SEC, US},
};

/// Strategy and limits of an attacker.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Effort {
    /// Packets in all.
    pub(crate) packets: u32,
    /// End of the attack, nanoseconds.
    pub(crate) until: u64,
    /// Longest pause between two campaigns, nanoseconds.
    pub(crate) rest: u64,
    /// A single kind of packet, between hosts that know each other, to teach them false Identifications or to fill a backlog.
    pub(super) obstinate: Option<(What, Identifications)>,
    /// Requests for sessions to the first host alone, in the name of this many unused addresses.
    pub(super) flood: Option<u32>,
    /// Packets to connected queue pairs alone, in their peers' names, at and around the PSNs in use.
    pub(super) strangers: bool,
}

impl Effort {
    /// Draws an attack that lasts for the chaos of a usual run and somewhat longer.
    pub(crate) fn draw(rng: &mut Rng, chaos_end: u64) -> Self {
        if rng.chance(0.3) {
            return Self {
                packets: 3000,
                until: chaos_end + 10 * SEC,
                ..Self::obstinate(rng, &[100 * US, MS, 10 * MS])
            };
        }
        Self {
            packets: rng.pick(&[100, 500, 1500, 3000]),
            until: chaos_end + rng.pick(&[0, 50 * MS, 400 * MS, 4 * SEC]),
            rest: rng.pick(&[10 * US, MS, 10 * MS]),
            ..Self::default()
        }
    }

    /// Draws an attack from when all connections are up until everything is done.
    pub(crate) fn throughout(rng: &mut Rng) -> Self {
        let rest = rng.pick(&[10 * US, 200 * US]);
        let effort = match rng.chance(0.5) {
            true => Self::obstinate(rng, &[20 * US, 100 * US, 400 * US]),
            false => Self {
                rest,
                ..Self::default()
            },
        };
        Self {
            packets: 5000,
            until: 20 * SEC,
            ..effort
        }
    }

    fn obstinate(rng: &mut Rng, rests: &[u64]) -> Self {
        let what = rng.pick(&[
            What::Mads(None),
            What::Mads(Some(Attribute::Dreq)),
            What::Datagrams,
            What::Connected,
            What::Backlog,
        ]);
        let idents = rng.pick(&[
            Identifications::Zero,
            Identifications::Fixed(1000),
            Identifications::Counter(20_000),
            Identifications::Counter(60_000),
            Identifications::Random,
        ]);
        // Requests with an ICRC that is wrong would fill nothing.
        let idents = match what {
            What::Backlog => Identifications::Zero,
            _ => idents,
        };
        Self {
            rest: rng.pick(rests),
            obstinate: Some((what, idents)),
            ..Self::default()
        }
    }

    /// Whether it fills backlogs: programs are slow to answer requests to connect.
    pub(super) fn fills_backlogs(&self) -> bool {
        self.obstinate.is_some_and(|(what, _)| what == What::Backlog)
    }

    /// Draws a flood of up to some ten thousand requests for sessions a second.
    pub(crate) fn flood(rng: &mut Rng) -> Self {
        Self {
            packets: rng.pick(&[16, 64, 512, 1536, 4000]),
            until: 20 * SEC,
            rest: rng.pick(&[100 * US, MS, 10 * MS]),
            flood: Some(rng.pick(&[1, 20, 400, 10_000])),
            ..Self::default()
        }
    }

    /// Draws an attack on connected queue pairs that lasts as long as there may be traffic.
    pub(crate) fn strangers(rng: &mut Rng, chaos_end: u64) -> Self {
        Self {
            packets: rng.pick(&[500, 2000, 5000]),
            until: chaos_end + rng.pick(&[0, 50 * MS, 400 * MS]),
            rest: rng.pick(&[10 * US, 100 * US, MS]),
            strangers: true,
            ..Self::default()
        }
    }
}

/// Packets of one kind from one address to one host, one after the other.
pub(super) struct Campaign {
    pub(super) src: IpAddr,
    pub(super) to: usize,
    pub(super) what: What,
    pub(super) idents: Identifications,
    pub(super) left: u32,
    pub(super) burst: u32,
    pub(super) pause: u64,
}

/// Packets forged in an address's name, and packets sent to it.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Account {
    pub(super) forged: u64,
    pub(super) forged_bytes: u64,
    pub(super) answers: u64,
    pub(super) answer_bytes: u64,
    /// Times of the last two answers, the later one first.
    pub(super) last: [Option<u64>; 2],
}

/// The attacker's state and statistics.
pub(crate) struct Blind {
    pub(crate) rng: Rng,
    pub(super) effort: Effort,
    pub(super) campaign: Option<Campaign>,
    /// By unused address.
    pub(super) accounts: BTreeMap<IpAddr, Account>,
    /// Forged requests that programs hold.
    pub(crate) strays: Vec<Stray>,
    /// Requests that programs have just answered: events of theirs may still be queued.
    pub(crate) answered: Vec<(u64, usize, ConnId)>,
    pub(crate) forged: u64,
    /// Forged packets to connected queue pairs that it knows.
    pub(crate) at_live: u64,
    /// Guesses that were redrawn because they hit the peer's port, or the exact PSN where ports are learned.
    pub(crate) redrawn: [u64; 2],
    /// Packets at the exact PSN of a connection that has learned another port. Only a second one would be believed.
    pub(super) once: BTreeSet<(usize, u16, [u8; 8])>,
    pub(crate) exact: u64,
    pub(crate) reflected: u64,
}

impl Blind {
    pub(crate) fn new(rng: Rng, effort: Effort) -> Self {
        Self {
            rng,
            effort,
            campaign: None,
            accounts: BTreeMap::new(),
            strays: Vec::new(),
            answered: Vec::new(),
            forged: 0,
            at_live: 0,
            redrawn: [0; 2],
            once: BTreeSet::new(),
            exact: 0,
            reflected: 0,
        }
    }

    /// Draws a campaign against one of these connected hosts, in its peer's name.
    pub(super) fn plan_at_live(&mut self, connected: &[(usize, IpAddr)]) -> Option<Campaign> {
        let rng = &mut self.rng;
        let (to, src) = *connected.get(rng.index(connected.len()))?;
        Some(Campaign {
            src,
            to,
            what: What::Connected,
            idents: match rng.chance(0.8) {
                true => Identifications::Zero,
                false => Identifications::draw(rng),
            },
            left: rng.pick(&[1, 3, 10, 50, 200]),
            burst: rng.pick(&[1, 1, 4, 32]),
            pause: rng.pick(&[US, 20 * US, 200 * US]),
        })
    }

    /// Draws the next campaign: mostly in the name of a host that the victim knows.
    pub(super) fn plan(&mut self, hosts: &[IpAddr]) -> Campaign {
        let rng = &mut self.rng;
        let to = rng.index(hosts.len());
        if let Some(addresses) = self.effort.flood {
            let mut name = Rng::new(rng.range(1, u64::from(addresses)), 0);
            return Campaign {
                src: stranger(hosts[0].is_ipv6(), &mut name),
                to: 0,
                what: What::Sessions,
                idents: Identifications::Zero,
                left: rng.pick(&[1, 2, 8]),
                burst: 8,
                pause: 1,
            };
        }
        if let Some((what, idents)) = self.effort.obstinate {
            // A backlog is filled in the name of one host.
            let others = if what == What::Backlog { 1 } else { hosts.len() - 1 };
            return Campaign {
                src: hosts[(to + 1 + rng.index(others)) % hosts.len()],
                to,
                what,
                idents,
                left: rng.pick(&[1, 4, 8]),
                burst: 4,
                pause: rng.pick(&[US, 200 * US]),
            };
        }
        let src = match rng.index(10) {
            0..=5 => hosts[(to + 1 + rng.index(hosts.len() - 1)) % hosts.len()],
            6 => hosts[to],
            _ => stranger(hosts[0].is_ipv6(), rng),
        };
        Campaign {
            src,
            to,
            what: What::draw(rng),
            idents: Identifications::draw(rng),
            left: rng.pick(&[1, 3, 10, 50, 200]),
            burst: rng.pick(&[1, 1, 4, 32, 256]),
            pause: rng.pick(&[US, 20 * US, 200 * US, 2 * MS, 20 * MS]),
        }
    }
}

/// Draws an unused address.
fn stranger(v6: bool, rng: &mut Rng) -> IpAddr {
    let [a, b, c, d, ..] = rng.number().to_be_bytes().map(u16::from);
    match v6 {
        true => Ipv6Addr::new(0xfd66, 0, 0, a, b, c, d, 1).into(),
        false => Ipv4Addr::new(10, 66, a as u8, b as u8).into(),
    }
}

/// Forged request that a program has not refused.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stray {
    pub(super) host: usize,
    pub(super) boot: u32,
    pub(super) id: ConnId,
    pub(super) what: Held,
}

/// Part of a program that a forged request occupies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Held {
    /// A connection, and the queue pair that it was accepted with.
    Connection(Option<Qpn>),
    /// A question for a queue pair's number (SIDR).
    Question,
}

/// The attacker and what it has seen.
pub(crate) struct Copies {
    pub(super) rng: Rng,
    pub(super) left: u32,
    pub(crate) sent: u64,
}

impl Copies {
    pub(crate) fn new(mut rng: Rng) -> Self {
        Self {
            left: rng.pick(&[20, 100, 500]),
            sent: 0,
            rng,
        }
    }
}

/// Packet of the victim.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) to: usize,
    pub(super) src: SocketAddr,
    pub(super) identification: u16,
    pub(super) bytes: Vec<u8>,
}

/// The observer.
pub(crate) struct Observer {
    pub(super) rng: Rng,
    pub(crate) victim: usize,
    pub(super) left: u32,
    pub(super) until: u64,
    /// Share of the packets it sees after which it sends one.
    pub(super) zeal: f64,
    pub(super) seen: VecDeque<Seen>,
    /// Places that keys open, of the victim or of others: address and key.
    pub(super) keys: VecDeque<(u64, RKey)>,
    pub(super) others: VecDeque<(u64, RKey)>,
    /// Communication IDs of the victim's ends.
    pub(super) ids: [u32; 2],
    /// In the victim's protection domains, with every right, and keys that never go over the network.
    pub(super) guards: Vec<(usize, u32, Arc<Region>, Vec<u8>)>,
    pub(crate) sent: u64,
}

impl Observer {
    pub(crate) fn new(mut rng: Rng, victim: usize, chaos_end: u64) -> Self {
        Self {
            victim,
            left: rng.pick(&[5, 50, 300]),
            until: chaos_end + rng.pick(&[0, 20 * MS, 200 * MS]),
            zeal: rng.pick(&[0.01, 0.1, 0.5]),
            seen: VecDeque::new(),
            keys: VecDeque::new(),
            others: VecDeque::new(),
            ids: [0; 2],
            guards: Vec::new(),
            sent: 0,
            rng,
        }
    }
}
