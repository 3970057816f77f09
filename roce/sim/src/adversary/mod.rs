//! An adversary of the first kind: it knows the addresses of all hosts, their programs' port and the protocol. It sees
//! nothing, and may send any packet from any address to any of them, as often as it likes.
//!
//! Its packets take no room on links and in sockets' buffers, and each burst is processed as it comes: what volume alone
//! does to a network is no question to the ports. So a run in which its packets do nothing is the same run as without it,
//! to the nanosecond.

mod forge;
mod observer;
mod strays;

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use roce_bth::{Class, Opcode, Qpn, ROCE_UDP_PORT};
use roce_cm::mad::Attribute;
use roce_port::ConnId;

use self::forge::{Guessed, Idents, Place, What};
pub(crate) use self::{observer::Observer, strays::Stray};
use crate::{
    net::Frame,
    rng::Dice,
    scenario::{MS, SEC, US},
    world::{Check, Event, World, guid_of},
};

/// Packets and bytes that an address which never sent anything genuine may be sent for one that was sent in its name.
const MOST_ANSWERS: u64 = 5;
const MOST_BYTES: u64 = 3;
/// For a single packet in its name no more than an answer and what the program says may go there within this time: a
/// message is not repeated sooner, whatever patience the forged one told of.
const PAUSE: u64 = 200 * MS;
/// Bytes of IP and UDP header.
const HEADERS: u64 = 28;

/// How hard it tries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Packets in all.
    pub(crate) packets: u32,
    /// It stops at this time, nanoseconds.
    pub(crate) until: u64,
    /// Longest pause between two campaigns, nanoseconds.
    pub(crate) rest: u64,
    /// It tries one thing only, on each pair of hosts in turn: what they believe of each other.
    obstinate: Option<(What, Idents)>,
    /// All that it sends is requests for sessions to the first host, in the name of so many addresses that belong to nobody.
    flood: Option<u32>,
}

impl Effort {
    /// Beside the chaos of a usual run and somewhat beyond.
    pub(crate) fn draw(dice: &mut Dice, chaos_end: u64) -> Self {
        if dice.chance(0.3) {
            return Self {
                packets: 3000,
                until: chaos_end + 10 * SEC,
                ..Self::obstinate(dice, &[100 * US, MS, 10 * MS])
            };
        }
        Self {
            obstinate: None,
            flood: None,
            packets: dice.pick(&[100, 500, 1500, 3000]),
            until: chaos_end + dice.pick(&[0, 50 * MS, 400 * MS, 4 * SEC]),
            rest: dice.pick(&[10 * US, MS, 10 * MS]),
        }
    }

    /// From when all connections are up until everything is done.
    pub(crate) fn throughout(dice: &mut Dice) -> Self {
        let mixed = Self {
            packets: 5000,
            until: 20 * SEC,
            rest: dice.pick(&[10 * US, 200 * US]),
            obstinate: None,
            flood: None,
        };
        match dice.chance(0.5) {
            true => Self {
                packets: 5000,
                until: 20 * SEC,
                ..Self::obstinate(dice, &[20 * US, 100 * US, 400 * US])
            },
            false => mixed,
        }
    }

    fn obstinate(dice: &mut Dice, rests: &[u64]) -> Self {
        let what = dice.pick(&[
            What::Mads(None),
            What::Mads(Some(Attribute::Dreq)),
            What::Datagrams,
            What::Connected,
        ]);
        let idents = dice.pick(&[
            Idents::Zero,
            Idents::Fixed(1000),
            Idents::Counter(20_000),
            Idents::Counter(60_000),
            Idents::Random,
        ]);
        Self {
            packets: 0,
            until: 0,
            rest: dice.pick(rests),
            obstinate: Some((what, idents)),
            flood: None,
        }
    }

    /// Up to some ten thousand requests for sessions a second.
    pub(crate) fn flood(dice: &mut Dice) -> Self {
        Self {
            packets: dice.pick(&[16, 64, 512, 1536, 4000]),
            until: 20 * SEC,
            rest: dice.pick(&[100 * US, MS, 10 * MS]),
            obstinate: None,
            flood: Some(dice.pick(&[1, 20, 400, 10_000])),
        }
    }
}

/// Packets of one kind from one address to one host, one after the other.
struct Campaign {
    src: IpAddr,
    to: usize,
    what: What,
    idents: Idents,
    left: u32,
    burst: u32,
    pause: u64,
}

/// What went in an address's name, and what went to it.
#[derive(Clone, Copy, Default, Debug)]
struct Account {
    forged: u64,
    forged_bytes: u64,
    answers: u64,
    answer_bytes: u64,
    /// When the last two answers went, the later one first.
    last: [Option<u64>; 2],
}

/// The adversary and what is kept about it.
pub(crate) struct Blind {
    pub(crate) dice: Dice,
    effort: Effort,
    campaign: Option<Campaign>,
    /// Of addresses that belong to nobody.
    accounts: BTreeMap<IpAddr, Account>,
    /// The last PSNs of requests and of answers to each queue pair.
    live: BTreeMap<(usize, Qpn), [Option<u32>; 2]>,
    /// What programs made of its requests.
    pub(crate) strays: Vec<Stray>,
    /// Requests that programs have just answered: what happened to them meanwhile may still be told.
    pub(crate) answered: Vec<(u64, usize, ConnId)>,
    pub(crate) forged: u64,
    pub(crate) reflected: u64,
}

impl Blind {
    pub(crate) fn new(dice: Dice, effort: Effort) -> Self {
        Self {
            dice,
            effort,
            campaign: None,
            accounts: BTreeMap::new(),
            live: BTreeMap::new(),
            strays: Vec::new(),
            answered: Vec::new(),
            forged: 0,
            reflected: 0,
        }
    }

    /// The next campaign: mostly in the name of a host that the victim knows.
    fn plan(&mut self, hosts: &[IpAddr]) -> Campaign {
        let dice = &mut self.dice;
        let to = dice.index(hosts.len());
        if let Some(addresses) = self.effort.flood {
            let mut name = Dice::new(dice.range(1, u64::from(addresses)), 0);
            return Campaign {
                src: stranger(hosts[0].is_ipv6(), &mut name),
                to: 0,
                what: What::Sessions,
                idents: Idents::Zero,
                left: dice.pick(&[1, 2, 8]),
                burst: 8,
                pause: 1,
            };
        }
        if let Some((what, idents)) = self.effort.obstinate {
            return Campaign {
                src: hosts[(to + 1 + dice.index(hosts.len() - 1)) % hosts.len()],
                to,
                what,
                idents,
                left: dice.pick(&[1, 4, 8]),
                burst: 4,
                pause: dice.pick(&[US, 200 * US]),
            };
        }
        let src = match dice.index(10) {
            0..=5 => hosts[(to + 1 + dice.index(hosts.len() - 1)) % hosts.len()],
            6 => hosts[to],
            _ => stranger(hosts[0].is_ipv6(), dice),
        };
        Campaign {
            src,
            to,
            what: What::draw(dice),
            idents: Idents::draw(dice),
            left: dice.pick(&[1, 3, 10, 50, 200]),
            burst: dice.pick(&[1, 1, 4, 32, 256]),
            pause: dice.pick(&[US, 20 * US, 200 * US, 2 * MS, 20 * MS]),
        }
    }
}

/// An address that belongs to nobody.
fn stranger(v6: bool, dice: &mut Dice) -> IpAddr {
    let [a, b, c, d, ..] = dice.next().to_be_bytes().map(u16::from);
    match v6 {
        true => Ipv6Addr::new(0xfd66, 0, 0, a, b, c, d, 1).into(),
        false => Ipv4Addr::new(10, 66, a as u8, b as u8).into(),
    }
}

impl World {
    /// Lets the adversary begin after a pause.
    pub(crate) fn unleash(&mut self, after: u64) {
        self.schedule(after, Event::Attack);
    }

    fn place_of(&self, blind: &Blind, addr: IpAddr) -> Place {
        let host = self.hosts.iter().position(|h| h.plan.addr == addr);
        Place {
            addr,
            guid: host.map_or(0, |h| guid_of(h, self.hosts[h].boot, self.hosts[h].plan.keeps)),
            datagram_qpns: host.map_or(Vec::new(), |h| self.datagram_qpns(h)),
            connected: host.map_or(Vec::new(), |h| self.connected(blind, h)),
        }
    }

    /// Queue pairs of a host that have been sent requests and answers.
    fn connected(&self, blind: &Blind, h: usize) -> Vec<Guessed> {
        let ends = self
            .conns
            .iter()
            .flat_map(|c| [(&c.ends[0], &c.ends[1]), (&c.ends[1], &c.ends[0])]);
        let known = ends.filter(|(own, _)| own.host == h).filter_map(|(own, peer)| {
            let qpn = own.qpn?;
            let [Some(request), Some(answer)] = *blind.live.get(&(h, qpn))? else {
                return None;
            };
            Some(Guessed {
                peer: self.hosts[peer.host].plan.addr,
                qpn,
                live: [request, answer],
            })
        });
        known.collect()
    }

    /// Notes the PSN of a genuine packet, which the adversary's guesses keep away from.
    pub(crate) fn note_live(&mut self, to: usize, packet: &[u8]) {
        let Some(blind) = &mut self.blind else { return };
        let (Some([opcode, ..]), Some(bytes)) = (packet.first_chunk::<12>(), packet.get(4..12)) else {
            return;
        };
        let word = |at: usize| u32::from_be_bytes([0, bytes[at], bytes[at + 1], bytes[at + 2]]);
        let is_answer = Opcode::from_byte(*opcode).is_some_and(|o| {
            matches!(
                o.info().class,
                Class::Acknowledge | Class::AtomicAcknowledge | Class::ReadResponse
            )
        });
        let live = blind.live.entry((to, Qpn::new(word(1)))).or_default();
        live[usize::from(is_answer)] = Some(word(5));
    }

    /// One burst.
    pub(crate) fn attack(&mut self) -> Check {
        let Some(mut blind) = self.blind.take() else {
            return Ok(());
        };
        let effort = blind.effort;
        let over = self.class.is_goodput() && self.stats.work_ns > 0;
        if over || self.now >= effort.until || blind.forged >= u64::from(effort.packets) {
            self.blind = Some(blind);
            return Ok(());
        }
        let addrs: Vec<IpAddr> = self.hosts.iter().map(|h| h.plan.addr).collect();
        let mut campaign = match blind.campaign.take() {
            Some(campaign) => campaign,
            None => blind.plan(&addrs),
        };
        let host = campaign.to;
        let n = campaign.burst.min(campaign.left);
        campaign.left -= n;
        let frames: Vec<Frame> = (0..n).map(|_| self.forge(&mut blind, &mut campaign)).collect();
        let after = match campaign.left {
            0 => blind.dice.range(0, effort.rest),
            _ => blind.dice.range(1, campaign.pause),
        };
        blind.campaign = (campaign.left > 0).then_some(campaign);
        self.blind = Some(blind);
        self.schedule(after, Event::Attack);
        if !self.hosts[host].alive {
            return Ok(());
        }
        for frame in frames {
            self.trace.forged(self.now, host, &frame);
            let now = self.instant();
            self.hosts[host].take(now, &frame);
        }
        self.service(host)?;
        self.check_bounds(host)
    }

    /// The next packet of a campaign, or several that the kernel has merged (GRO).
    fn forge(&self, blind: &mut Blind, campaign: &mut Campaign) -> Frame {
        let host = &self.hosts[campaign.to].plan;
        let (from, to) = (self.place_of(blind, campaign.src), self.place_of(blind, host.addr));
        let dice = &mut blind.dice;
        let port = dice.pick(&[ROCE_UDP_PORT, 49_152, 50_000 + dice.clone().next() as u16 % 10_000]);
        let src = SocketAddr::new(campaign.src, port);
        let copies = match host.gro && !host.sees_headers && dice.chance(0.1) {
            true => dice.range(2, 12),
            false => 1,
        };
        let mut bytes = forge::packet(campaign.what, &from, &to, dice);
        let segment_len = if copies > 1 && !bytes.is_empty() {
            bytes.len()
        } else {
            0
        };
        let identification = campaign.idents.next(dice);
        let first = bytes.clone();
        if let Some(id) = identification {
            forge::seal(src, host.addr, id, &mut bytes);
        }
        for i in 1..copies {
            let mut copy = first.clone();
            if let Some(id) = campaign.idents.next(dice).or(identification) {
                forge::seal(
                    src,
                    host.addr,
                    if i % 2 == 0 { id } else { id.wrapping_add(i as u16) },
                    &mut copy,
                );
            }
            bytes.extend_from_slice(&copy);
        }
        blind.forged += copies;
        if self.is_stranger(campaign.src) {
            let account = blind.accounts.entry(campaign.src).or_default();
            account.forged += copies;
            account.forged_bytes += bytes.len() as u64 + copies * HEADERS;
        }
        // Routers have nothing to deliver groups' packets here, but a neighbour may send them.
        let to_group = campaign.what == What::Multicast && host.addr.is_ipv4() && dice.chance(0.5);
        Frame {
            src,
            dst: if to_group {
                Ipv4Addr::new(239, 1, 2, 3).into()
            } else {
                host.addr
            },
            tos: dice.pick(&[0, 0, 0, 1, 3]),
            identification: identification.unwrap_or_default(),
            segment_len,
            bytes,
        }
    }

    fn is_stranger(&self, addr: IpAddr) -> bool {
        self.hosts.iter().all(|h| h.plan.addr != addr)
    }

    /// A host sends to an address that belongs to nobody: somebody else has to bear it.
    pub(crate) fn reflect(&mut self, h: usize, train: &roce_port::Train<'_>) -> Check {
        let remote = train.remote.ip();
        let account = self.blind.as_mut().and_then(|b| {
            b.reflected += train.segments as u64;
            b.accounts.get_mut(&remote)
        });
        let Some(a) = account else {
            return Err(format!("host {h} sends to {remote}, which nobody asked for"));
        };
        a.answers += train.segments as u64;
        a.answer_bytes += train.bytes.len() as u64 + train.segments as u64 * HEADERS;
        let crowded = a.last[1].is_some_and(|at| self.now < at + PAUSE);
        a.last = [Some(self.now), a.last[0]];
        if a.forged == 1 && crowded {
            return Err(format!(
                "host {h} sends at once what it may repeat in the name of {remote}: {a:?}"
            ));
        }
        if a.answers > a.forged * MOST_ANSWERS || a.answer_bytes > a.forged_bytes * MOST_BYTES {
            return Err(format!(
                "host {h} amplifies what was forged in the name of {remote}: {a:?}"
            ));
        }
        Ok(())
    }

    /// Whatever is kept about peers stays within what is configured.
    pub(crate) fn check_bounds(&self, h: usize) -> Check {
        let (usage, limits) = (self.hosts[h].port.cm_usage(), &self.hosts[h].cm);
        let bounds = [
            (usage.connections, limits.max_connections),
            (usage.half_open, limits.max_half_open),
            (usage.half_open_of_peer, limits.max_half_open_per_peer),
            (usage.lingering, limits.max_lingering),
            (usage.rated_peers, limits.max_rated_peers),
            (usage.queued_mads, limits.max_queued_mads),
        ];
        match bounds.iter().all(|(used, limit)| used <= limit) {
            true => Ok(()),
            false => Err(format!("host {h}: {usage:?}, beyond its limits")),
        }
    }

    /// The adversary's requests leave nothing behind.
    pub(crate) fn check_strays(&self) -> Check {
        match self.blind.as_ref().map_or(0, |b| b.strays.len()) {
            0 => Ok(()),
            n => Err(format!("{n} forged requests still have something")),
        }
    }

    /// When the last of an adversary's doings has been forgotten.
    pub(crate) fn adversary_rest(&self) -> u64 {
        let begun = self.blind.as_ref().map_or(0, |b| b.effort.until);
        begun.saturating_sub(self.now) + if begun > 0 { 15 * SEC } else { 0 }
    }
}
