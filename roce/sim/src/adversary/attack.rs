//! The off-path attacker's packets, and checks of what they cause.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use roce_bth::ROCE_UDP_PORT;
use roce_port::cm::Manager;
use roce_verbs::provider::NoAnswer;

use super::{
    live::Hit,
    packets::{self, Place, What},
    state::{Blind, Campaign, Copies, Effort, Observer},
};
use crate::{
    config::Class,
    forge::{self, Endpoint, PRIVATE_LEN},
    host::{Host, LISTEN_PORT, guid_of},
    net::Frame,
    rng::Rng,
    runner::Check,
    scenario::{MS, SEC, US},
    world::{ADVERSARY, World},
};

/// Largest amplification: packets and bytes sent to an address without genuine traffic, for each forged in its name.
const MOST_ANSWERS: u64 = 5;
const MOST_BYTES: u64 = 3;
/// Least time between a first answer to a single forged packet and its repetition, whatever timeout the packet claims.
const REPEAT_TIME: u64 = 200 * MS;
/// Bytes of IP and UDP header.
const HEADERS: u64 = 28;

/// Names a forged packet by host, source port, queue pair and PSN.
fn key(to: usize, port: u16, bytes: &[u8]) -> (usize, u16, [u8; 8]) {
    let mut numbers = [0; 8];
    numbers.copy_from_slice(&bytes[4..12]);
    [numbers[0], numbers[4]] = [0; 2];
    (to, port, numbers)
}

impl World {
    /// Creates the run's attacker.
    pub(crate) fn create_attacker(&mut self) {
        let mut rng = Rng::new(self.seed, ADVERSARY);
        let effort = match self.class {
            Class::Blind => {
                self.hosts.iter_mut().for_each(Host::take_questions);
                Effort::draw(&mut rng, self.scenario.chaos_end)
            }
            Class::Observed => {
                let victim = rng.index(self.conns.len());
                let plan = &mut self.conns[victim].plan;
                // What it makes wait for ever must give up, and soon enough for a run.
                plan.timeout = plan.timeout.clamp(12, 16);
                plan.retry_cnt = plan.retry_cnt.max(1);
                let observer = Observer::new(rng, victim, self.scenario.chaos_end);
                self.observer = Some(Box::new(observer));
                return;
            }
            Class::Copies => {
                self.copies = Some(Box::new(Copies::new(rng)));
                return;
            }
            Class::Goodput { attacked: true } => Effort::throughout(&mut rng),
            Class::Strangers { attacked: true } => Effort::strangers(&mut rng, self.scenario.chaos_end),
            Class::Plain | Class::Flood | Class::Goodput { attacked: false } | Class::Strangers { attacked: false } => {
                return;
            }
        };
        let after = rng.range(0, self.scenario.chaos_end / 2);
        self.blind = Some(Box::new(Blind::new(rng, effort)));
        match self.class {
            Class::Blind => self.start_attack(after),
            Class::Strangers { .. } => self.start_attack(0),
            _ => {}
        }
    }

    /// Starts the attack after a pause.
    pub(crate) fn start_attack(&mut self, after: u64) {
        self.schedule(after, "attack", Self::attack);
    }

    /// Returns a host's current GUID.
    pub(super) fn guid(&self, h: usize) -> u64 {
        guid_of(h, self.hosts[h].boot, self.hosts[h].plan.keeps)
    }

    fn place_of(&self, _blind: &Blind, addr: IpAddr) -> Place {
        let host = self.hosts.iter().position(|h| h.plan.addr == addr);
        Place {
            end: Endpoint {
                addr,
                guid: host.map_or(0, |h| self.guid(h)),
                port: LISTEN_PORT,
                qpns: host.map_or(Vec::new(), |h| self.qpns(h)),
            },
            datagram_qpns: host.map_or(Vec::new(), |h| self.datagram_qpns(h)),
            connected: host.map_or(Vec::new(), |h| self.targets(h)),
        }
    }

    /// Notes a genuine packet to a host, from which attackers learn.
    pub(crate) fn note_genuine(&mut self, to: usize, src_port: u16, packet: &[u8]) {
        let mut live = std::mem::take(&mut self.live);
        live.note(to, src_port, packet, |qpn| self.path_mtu(to, qpn));
        self.live = live;
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
                    .flat_map(|h| self.targets(h).into_iter().map(move |t| (h, t.peer)))
                    .collect();
                blind.plan_at_live(&connected)
            }
            None => Some(blind.plan(&addrs)),
        };
        let Some(mut campaign) = planned else {
            // Nothing is connected yet.
            self.blind = Some(blind);
            self.schedule(100 * US, "attack", Self::attack);
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
        self.schedule(after, "attack", Self::attack);
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
        let program = self.program.as_deref();
        let session = |rng: &mut Rng| program.map_or([0; PRIVATE_LEN], |p| p.forged_request(rng));
        let rng = &mut blind.rng;
        loop {
            let port = match rng.index(4) {
                0 => ROCE_UDP_PORT,
                _ => 0xc000 | rng.number() as u16,
            };
            let bytes = packets::packet(campaign.what, from, to, &session, rng);
            match self.hit(campaign.to, port, &bytes) {
                None => return (port, bytes, false),
                Some(Hit::Psn)
                    if self.has_learned(campaign.to, &bytes) && blind.once.insert(key(campaign.to, port, &bytes)) =>
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
            b.reflected += train.segments() as u64;
            b.accounts.get_mut(&remote)
        });
        let Some(a) = account else {
            return Err(format!("host {h} sends to {remote}, an address without traffic"));
        };
        a.answers += train.segments() as u64;
        a.answer_bytes += train.bytes.len() as u64 + train.segments() as u64 * HEADERS;
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
        let (usage, limits) = (
            self.hosts[h].port.cm().map(Manager::usage).unwrap_or_default(),
            &self.hosts[h].cm,
        );
        let bounds = [
            (usage.connections, limits.max_connections),
            (usage.half_open, limits.max_half_open),
            (usage.half_open_of_peer, limits.max_half_open_per_peer),
            (usage.lingering, limits.max_lingering),
            (usage.lingering_resolutions, limits.max_lingering),
            (usage.held_resolutions, limits.max_lingering),
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
