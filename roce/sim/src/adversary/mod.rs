//! Off-path attacker: it knows the addresses of all hosts, their programs' port, the numbers of connected queue pairs, where
//! their PSN streams are, and the protocol. It receives nothing, and may send any packet from any address at any rate: also ICMP
//! errors that quote packets of its making, and connect requests that look as if they had passed address translation.
//!
//! Its packets take no room on links and in socket buffers, and the port processes each burst at once: the ports are under
//! test, not the network's capacity. A run in which its packets have no effect is the same run as without it, to the
//! nanosecond.

mod copies;
mod live;
mod observer;
mod packets;
mod strays;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use roce_bth::{Qpn, ROCE_UDP_PORT};
use roce_cm::mad::Attribute;
use roce_port::ConnId;
use roce_verbs::provider::NoAnswer;

pub(crate) use self::{copies::Copies, observer::Observer, packets::MARK, strays::Stray};
use self::{
    live::{Hit, Live},
    packets::{Place, What},
};
use crate::{
    forge::{self, Endpoint, Identifications},
    net::Frame,
    rng::Rng,
    runner::Check,
    scenario::{MS, SEC, US},
    world::{Event, LISTEN_PORT, World, guid_of},
};

/// Largest amplification: packets and bytes sent to an address without genuine traffic, for each forged in its name.
const MOST_ANSWERS: u64 = 5;
const MOST_BYTES: u64 = 3;
/// Least time between a first answer to a single forged packet and its repetition, whatever timeout the packet claims.
const REPEAT_TIME: u64 = 200 * MS;
/// Bytes of IP and UDP header.
const HEADERS: u64 = 28;

/// Strategy and limits of an attacker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    /// Packets in all.
    pub(crate) packets: u32,
    /// End of the attack, nanoseconds.
    pub(crate) until: u64,
    /// Longest pause between two campaigns, nanoseconds.
    pub(crate) rest: u64,
    /// A single kind of packet, between hosts that know each other, to teach them false Identifications or to fill a backlog.
    obstinate: Option<(What, Identifications)>,
    /// Requests for sessions to the first host alone, in the name of this many unused addresses.
    flood: Option<u32>,
    /// Packets to connected queue pairs alone, in their peers' names, at and around the PSNs in use.
    strangers: bool,
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
            obstinate: None,
            flood: None,
            strangers: false,
            packets: rng.pick(&[100, 500, 1500, 3000]),
            until: chaos_end + rng.pick(&[0, 50 * MS, 400 * MS, 4 * SEC]),
            rest: rng.pick(&[10 * US, MS, 10 * MS]),
        }
    }

    /// Draws an attack from when all connections are up until everything is done.
    pub(crate) fn throughout(rng: &mut Rng) -> Self {
        let mixed = Self {
            packets: 5000,
            until: 20 * SEC,
            rest: rng.pick(&[10 * US, 200 * US]),
            obstinate: None,
            flood: None,
            strangers: false,
        };
        match rng.chance(0.5) {
            true => Self {
                packets: 5000,
                until: 20 * SEC,
                ..Self::obstinate(rng, &[20 * US, 100 * US, 400 * US])
            },
            false => mixed,
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
        Self {
            packets: 0,
            until: 0,
            rest: rng.pick(rests),
            // Requests with an ICRC that is wrong would fill nothing.
            obstinate: Some((
                what,
                if what == What::Backlog {
                    Identifications::Zero
                } else {
                    idents
                },
            )),
            flood: None,
            strangers: false,
        }
    }

    /// Whether it fills backlogs: programs are slow to answer requests to connect.
    fn fills_backlogs(&self) -> bool {
        self.obstinate.is_some_and(|(what, _)| what == What::Backlog)
    }

    /// Draws a flood of up to some ten thousand requests for sessions a second.
    pub(crate) fn flood(rng: &mut Rng) -> Self {
        Self {
            packets: rng.pick(&[16, 64, 512, 1536, 4000]),
            until: 20 * SEC,
            rest: rng.pick(&[100 * US, MS, 10 * MS]),
            obstinate: None,
            flood: Some(rng.pick(&[1, 20, 400, 10_000])),
            strangers: false,
        }
    }

    /// Draws an attack on connected queue pairs that lasts as long as there may be traffic.
    pub(crate) fn strangers(rng: &mut Rng, chaos_end: u64) -> Self {
        Self {
            packets: rng.pick(&[500, 2000, 5000]),
            until: chaos_end + rng.pick(&[0, 50 * MS, 400 * MS]),
            rest: rng.pick(&[10 * US, 100 * US, MS]),
            obstinate: None,
            flood: None,
            strangers: true,
        }
    }
}

/// Packets of one kind from one address to one host, one after the other.
struct Campaign {
    src: IpAddr,
    to: usize,
    what: What,
    idents: Identifications,
    left: u32,
    burst: u32,
    pause: u64,
}

/// Packets forged in an address's name, and packets sent to it.
#[derive(Clone, Copy, Default, Debug)]
struct Account {
    forged: u64,
    forged_bytes: u64,
    answers: u64,
    answer_bytes: u64,
    /// Times of the last two answers, the later one first.
    last: [Option<u64>; 2],
}

/// The attacker's state and statistics.
pub(crate) struct Blind {
    pub(crate) rng: Rng,
    effort: Effort,
    campaign: Option<Campaign>,
    /// By unused address.
    accounts: BTreeMap<IpAddr, Account>,
    live: Live,
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
    once: BTreeSet<(usize, u16, [u8; 8])>,
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
            live: Live::default(),
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
    fn plan_at_live(&mut self, connected: &[(usize, IpAddr)]) -> Option<Campaign> {
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
    fn plan(&mut self, hosts: &[IpAddr]) -> Campaign {
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

/// Names a forged packet by host, source port, queue pair and PSN.
fn key(to: usize, port: u16, bytes: &[u8]) -> (usize, u16, [u8; 8]) {
    let mut numbers = [0; 8];
    numbers.copy_from_slice(&bytes[4..12]);
    [numbers[0], numbers[4]] = [0; 2];
    (to, port, numbers)
}

/// Draws an unused address.
fn stranger(v6: bool, rng: &mut Rng) -> IpAddr {
    let [a, b, c, d, ..] = rng.number().to_be_bytes().map(u16::from);
    match v6 {
        true => Ipv6Addr::new(0xfd66, 0, 0, a, b, c, d, 1).into(),
        false => Ipv4Addr::new(10, 66, a as u8, b as u8).into(),
    }
}

impl World {
    /// Starts the attack after a pause.
    pub(crate) fn start_attack(&mut self, after: u64) {
        self.schedule(after, Event::Attack);
    }

    /// Returns a host's current GUID.
    fn guid(&self, h: usize) -> u64 {
        guid_of(h, self.hosts[h].boot, self.hosts[h].plan.keeps)
    }

    fn place_of(&self, blind: &Blind, addr: IpAddr) -> Place {
        let host = self.hosts.iter().position(|h| h.plan.addr == addr);
        Place {
            end: Endpoint {
                addr,
                guid: host.map_or(0, |h| self.guid(h)),
                port: LISTEN_PORT,
                qpns: host.map_or(Vec::new(), |h| self.qpns(h)),
            },
            datagram_qpns: host.map_or(Vec::new(), |h| self.datagram_qpns(h)),
            connected: host.map_or(Vec::new(), |h| self.targets(&blind.live, h)),
        }
    }

    /// Notes a genuine packet to a host, from which the attacker learns.
    pub(crate) fn note_genuine(&mut self, to: usize, src_port: u16, packet: &[u8]) {
        let Some(mut blind) = self.blind.take() else { return };
        blind.live.note(to, src_port, packet, |qpn| self.path_mtu(to, qpn));
        self.blind = Some(blind);
    }

    /// Forgets what was sent to a queue pair that is made, or starts again.
    pub(crate) fn forget_genuine(&mut self, host: usize, qpn: Qpn) {
        self.forget_copies(host, qpn);
        if let Some(blind) = &mut self.blind {
            blind.live.forget(host, qpn);
        }
    }

    /// Sends one burst.
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
        let planned = match blind.campaign.take() {
            Some(campaign) => Some(campaign),
            None if effort.strangers => {
                let connected: Vec<_> = (0..addrs.len())
                    .flat_map(|h| self.targets(&blind.live, h).into_iter().map(move |t| (h, t.peer)))
                    .collect();
                blind.plan_at_live(&connected)
            }
            None => Some(blind.plan(&addrs)),
        };
        let Some(mut campaign) = planned else {
            // Nothing is connected yet.
            self.blind = Some(blind);
            self.schedule(100 * US, Event::Attack);
            return Ok(());
        };
        let (host, src) = (campaign.to, campaign.src);
        let n = campaign.burst.min(campaign.left);
        campaign.left -= n;
        let frames: Vec<Frame> = (0..n).map(|_| self.forge(&mut blind, &mut campaign)).collect();
        let after = match campaign.left {
            0 => blind.rng.range(0, effort.rest),
            _ => blind.rng.range(1, campaign.pause),
        };
        blind.campaign = (campaign.left > 0).then_some(campaign);
        self.blind = Some(blind);
        self.schedule(after, Event::Attack);
        if !self.hosts[host].alive {
            return Ok(());
        }
        for (index, frame) in frames.iter().enumerate() {
            self.trace.forged(self.now, host, frame);
            let now = self.instant();
            self.hosts[host].take(now, frame);
            // An ICMP error that quotes a packet which the host has not sent.
            if index % 4 == 0 {
                let port = &mut self.hosts[host].port;
                port.handle_undeliverable(now, src, &frame.bytes, NoAnswer::PortUnreachable);
            }
        }
        self.service(host)?;
        self.check_bounds(host)
    }

    /// Forges the next packet of a campaign, or several that the kernel has merged (GRO).
    fn forge(&self, blind: &mut Blind, campaign: &mut Campaign) -> Frame {
        let host = &self.hosts[campaign.to].plan;
        let (from, to) = (self.place_of(blind, campaign.src), self.place_of(blind, host.addr));
        let (port, mut bytes, single) = self.guess(blind, campaign, &from, &to);
        let rng = &mut blind.rng;
        let src = SocketAddr::new(campaign.src, port);
        let copies = match host.gro && !host.sees_headers && !single && rng.chance(0.1) {
            true => rng.range(2, 12),
            false => 1,
        };
        let segment_len = if copies > 1 && !bytes.is_empty() {
            bytes.len()
        } else {
            0
        };
        let identification = campaign.idents.next(rng);
        let first = bytes.clone();
        if let Some(id) = identification {
            forge::seal(src, host.addr, id, &mut bytes);
        }
        for i in 1..copies {
            let mut copy = first.clone();
            if let Some(id) = campaign.idents.next(rng).or(identification) {
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
        blind.at_live += if to.connected.iter().any(|t| t.is_addressed(&bytes)) {
            copies
        } else {
            0
        };
        if self.is_stranger(campaign.src) {
            let account = blind.accounts.entry(campaign.src).or_default();
            account.forged += copies;
            account.forged_bytes += bytes.len() as u64 + copies * HEADERS;
        }
        // Routers have nothing to deliver groups' packets here, but a neighbour may send them.
        let to_group = campaign.what == What::Multicast && host.addr.is_ipv4() && rng.chance(0.5);
        // Some requests look like those of a sender behind address translation.
        let is_request = matches!(campaign.what, What::Mads(_) | What::Sessions | What::Backlog);
        let others = self.hosts.iter().map(|h| h.plan.addr);
        let translated = others
            .filter(|addr| ![campaign.src, host.addr].contains(addr) && addr.is_ipv4() == host.addr.is_ipv4())
            .find(|_| is_request && blind.forged % 10 == 9);
        Frame {
            src: translated.map_or(src, |addr| SocketAddr::new(addr, port)),
            dst: if to_group {
                Ipv4Addr::new(239, 1, 2, 3).into()
            } else {
                host.addr
            },
            tos: rng.pick(&[0, 0, 0, 1, 3]),
            identification: identification.unwrap_or_default(),
            segment_len,
            bytes,
            damaged: false,
        }
    }

    /// Draws a packet and its source port, until they don't show what only the peer knows. True: at the exact PSN, so it is sent once.
    fn guess(&self, blind: &mut Blind, campaign: &Campaign, from: &Place, to: &Place) -> (u16, Vec<u8>, bool) {
        let rng = &mut blind.rng;
        loop {
            let port = match rng.index(4) {
                0 => ROCE_UDP_PORT,
                _ => 0xc000 | rng.number() as u16,
            };
            let bytes = packets::packet(campaign.what, from, to, self.program.as_deref(), rng);
            match self.hit(&blind.live, campaign.to, port, &bytes) {
                None => return (port, bytes, false),
                Some(Hit::Psn)
                    if self.has_learned(&blind.live, campaign.to, &bytes)
                        && blind.once.insert(key(campaign.to, port, &bytes)) =>
                {
                    blind.exact += 1;
                    return (port, bytes, true);
                }
                Some(hit) => blind.redrawn[usize::from(hit == Hit::Psn)] += 1,
            }
        }
    }

    fn is_stranger(&self, addr: IpAddr) -> bool {
        self.hosts.iter().all(|h| h.plan.addr != addr)
    }

    /// Checks a train that a host sends to an unused address: only answers are allowed, and no amplification.
    pub(crate) fn reflect(&mut self, h: usize, train: &roce_port::Train<'_>) -> Check {
        let remote = train.remote.ip();
        let account = self.blind.as_mut().and_then(|b| {
            b.reflected += train.segments as u64;
            b.accounts.get_mut(&remote)
        });
        let Some(a) = account else {
            return Err(format!("host {h} sends to {remote}, an address without traffic"));
        };
        a.answers += train.segments as u64;
        a.answer_bytes += train.bytes.len() as u64 + train.segments as u64 * HEADERS;
        let crowded = a.last[1].is_some_and(|at| self.now < at + REPEAT_TIME);
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

    /// Checks that the state kept about peers stays within its limits.
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

    /// Checks that forged requests leave no state behind.
    pub(crate) fn check_strays(&self) -> Check {
        match self.blind.as_ref().map_or(0, |b| b.strays.len()) {
            0 => Ok(()),
            n => Err(format!("{n} forged requests still have something")),
        }
    }

    /// Returns the time until all state of the attack has expired.
    pub(crate) fn adversary_rest(&self) -> u64 {
        let begun = self.blind.as_ref().map_or(0, |b| b.effort.until);
        begun.saturating_sub(self.now) + if begun > 0 { 15 * SEC } else { 0 }
    }
}
