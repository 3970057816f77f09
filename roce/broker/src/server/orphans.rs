//! Connections whose process has exited. Their peers get a DREQ, as a kernel sends one for a process that exits.
//!
//! The connections are those that members have reported, which can't be verified. So DREQs are paced, by host and in all, and a
//! host that answers none gets few.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    time::Duration,
};

use roce_bth::Qpn;
use roce_port::cm::{
    OutMad,
    mad::{Dreq, Mad, Message},
};
use roce_verbs::Instant;

use crate::{proto::Connection, track::host};

/// The pause before the first repetition; it doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
/// Largest number of times that a DREQ is sent: to a host that has answered any, and to one that has not.
const TRIES: u32 = 6;
const TRIES_UNANSWERED: u32 = 3;
/// DREQs to a host that answers none of them.
pub(super) const MAX_UNANSWERED: u32 = 256;
/// Largest number of connections that are ended at a time: in all, and to one host.
const MAX: usize = 1 << 14;
const MAX_PER_HOST: usize = 4096;
/// Largest number of hosts that are remembered, and the time after the last connection to one.
const MAX_HOSTS: usize = 4096;
const REMEMBERED: Duration = Duration::from_secs(60);
/// DREQs at once to one host, and the pause between further ones.
const BURST: u32 = 64;
const INTERVAL: Duration = Duration::from_millis(2);
/// Burst for all hosts together.
const BURST_ALL: u32 = 512;
const INTERVAL_ALL: Duration = Duration::from_micros(250);

/// A number of things at once, and then one in each interval.
struct Pace {
    interval: Duration,
    /// How far ahead of the interval it may be.
    slack: Duration,
    /// When the next one would be due without slack.
    next: Instant,
}

impl Pace {
    fn new(burst: u32, interval: Duration) -> Self {
        Self {
            interval,
            slack: interval * (burst - 1),
            next: Instant::ZERO,
        }
    }

    /// Returns the earliest time for one, `at` or later.
    fn earliest(&self, at: Instant) -> Instant {
        match self.next.saturating_since(at) > self.slack {
            true => at + (self.next.saturating_since(at) - self.slack),
            false => at,
        }
    }

    /// Takes the turn that [`Self::earliest`] returns.
    fn take(&mut self, at: Instant) -> Instant {
        let turn = self.earliest(at);
        self.next = self.next.max(turn) + self.interval;
        turn
    }
}

struct Orphan {
    conn: Connection,
    due: Instant,
    tries: u32,
    /// It waited for a turn of its host, and has it when it is due.
    has_turn: bool,
}

struct Host {
    pace: Pace,
    /// DREQs sent since it answered last.
    unanswered: u32,
    answered: bool,
    orphans: usize,
    last: Instant,
}

/// Connections of members that are gone, whose peers are still to be notified.
pub(super) struct Orphans {
    /// By our communication ID.
    all: HashMap<u32, Orphan>,
    queue: BTreeSet<(Instant, u32)>,
    hosts: HashMap<IpAddr, Host>,
    /// Number of connections of each local address.
    locals: HashMap<IpAddr, usize>,
    pace: Pace,
}

impl Default for Orphans {
    fn default() -> Self {
        Self {
            all: HashMap::new(),
            queue: BTreeSet::new(),
            hosts: HashMap::new(),
            locals: HashMap::new(),
            pace: Pace::new(BURST_ALL, INTERVAL_ALL),
        }
    }
}

impl Orphans {
    /// Adds a connection whose process has exited. Returns false if there are too many, and its peer gets no DREQ.
    pub(super) fn add(&mut self, now: Instant, conn: Connection) -> bool {
        if self.all.len() >= MAX {
            return false;
        }
        let key = host(conn.remote);
        if self.hosts.len() >= MAX_HOSTS && !self.hosts.contains_key(&key) {
            self.hosts.retain(|_, h| h.orphans > 0 || h.last + REMEMBERED > now);
            if self.hosts.len() >= MAX_HOSTS {
                return false;
            }
        }
        let host = self.hosts.entry(key).or_insert_with(|| Host {
            pace: Pace::new(BURST, INTERVAL),
            unanswered: 0,
            answered: false,
            orphans: 0,
            last: now,
        });
        if host.orphans == 0 && host.last + REMEMBERED <= now {
            (host.unanswered, host.answered) = (0, false);
        }
        if host.orphans >= MAX_PER_HOST || self.all.contains_key(&conn.local_id) {
            return false;
        }
        host.orphans += 1;
        host.last = now;
        *self.locals.entry(conn.local).or_default() += 1;
        self.queue.insert((now, conn.local_id));
        let orphan = Orphan {
            conn,
            due: now,
            tries: 0,
            has_turn: false,
        };
        self.all.insert(conn.local_id, orphan);
        true
    }

    fn remove(&mut self, local_id: u32) {
        let Some(o) = self.all.remove(&local_id) else { return };
        self.queue.remove(&(o.due, local_id));
        if let Some(host) = self.hosts.get_mut(&host(o.conn.remote)) {
            host.orphans -= 1;
        }
        if let Some(count) = self.locals.get_mut(&o.conn.local) {
            *count -= 1;
            if *count == 0 {
                self.locals.remove(&o.conn.local);
            }
        }
    }

    /// Processes a message. Returns whether it was the answer to a DREQ.
    pub(super) fn observe(&mut self, remote: IpAddr, message: &Message) -> bool {
        let id = match message {
            Message::Drep(m) => m.remote_comm_id,
            // The peer disconnects as well. Answered elsewhere.
            Message::Dreq(m) => m.remote_comm_id,
            _ => return false,
        };
        if self.all.get(&id).is_none_or(|o| o.conn.remote != remote) {
            return false;
        }
        if let Some(host) = self.hosts.get_mut(&host(remote)) {
            (host.unanswered, host.answered) = (0, true);
        }
        self.remove(id);
        matches!(message, Message::Drep(_))
    }

    /// Returns whether no DREQ must be sent.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns whether a DREQ must be sent from one of these local addresses.
    pub(super) fn needs(&self, covers: impl Fn(IpAddr) -> bool) -> bool {
        self.locals.keys().any(|local| covers(*local))
    }

    /// Returns the time of the next [`Self::poll`].
    pub(super) fn next(&self) -> Option<Instant> {
        self.queue.first().map(|(due, _)| self.pace.earliest(*due))
    }

    /// Returns the MADs that are due.
    pub(super) fn poll(&mut self, now: Instant) -> Vec<OutMad> {
        let mut out = Vec::new();
        while let Some((due, id)) = self.queue.first().copied()
            && due <= now
            && self.pace.earliest(now) <= now
        {
            let Some(o) = self.all.get_mut(&id) else {
                self.queue.pop_first();
                continue;
            };
            let Some(host) = self.hosts.get_mut(&host(o.conn.remote)) else {
                self.remove(id);
                continue;
            };
            let tries = if host.answered { TRIES } else { TRIES_UNANSWERED };
            if o.tries >= tries || host.unanswered >= MAX_UNANSWERED {
                self.remove(id);
                continue;
            }
            let turn = if o.has_turn { now } else { host.pace.take(now) };
            o.has_turn = turn > now;
            self.queue.pop_first();
            if o.has_turn {
                o.due = turn;
            } else {
                self.pace.take(now);
                host.unanswered += 1;
                host.last = now;
                out.push(OutMad {
                    local: o.conn.local,
                    remote: o.conn.remote,
                    mad: dreq(&o.conn).emit(),
                });
                o.due = now + FIRST_PAUSE * (1 << o.tries);
                o.tries += 1;
            }
            self.queue.insert((o.due, id));
        }
        out
    }
}

fn dreq(conn: &Connection) -> Mad {
    let dreq = Dreq {
        local_comm_id: conn.local_id,
        remote_comm_id: conn.remote_id,
        remote_qpn: Qpn::new(conn.remote_qpn),
        ..Dreq::default()
    };
    // The upper half names the process, as in all of its transactions.
    let id = u64::from(conn.local_id);
    Mad::new((id << 32) | id, dreq)
}

#[cfg(test)]
mod tests {
    use roce_port::cm::mad::Drep;

    use super::*;

    const PEER: [u8; 4] = [127, 0, 0, 2];

    fn connection() -> Connection {
        Connection {
            local: [127, 0, 0, 1].into(),
            remote: PEER.into(),
            local_id: 70,
            remote_id: 80,
            remote_qpn: 90,
        }
    }

    fn drep(local_id: u32) -> Message {
        Message::Drep(Drep {
            local_comm_id: 80,
            remote_comm_id: local_id,
            ..Drep::default()
        })
    }

    /// Plays on until nothing is left. Returns when each DREQ was sent, and to whom.
    fn play(o: &mut Orphans, mut now: Instant, mut answer: impl FnMut(&OutMad) -> bool) -> Vec<(Instant, IpAddr)> {
        let mut sent = vec![];
        while let Some(next) = o.next() {
            now = now.max(next);
            for out in o.poll(now) {
                sent.push((now, out.remote));
                let Message::Dreq(dreq) = Mad::parse(&out.mad).unwrap().message else {
                    panic!("not a DREQ");
                };
                if answer(&out) {
                    o.observe(out.remote, &drep(dreq.local_comm_id));
                }
            }
        }
        assert!(o.queue.is_empty() && o.locals.is_empty() && o.hosts.values().all(|h| h.orphans == 0));
        sent
    }

    #[test]
    fn the_peer_is_told_until_it_answers() {
        let mut o = Orphans::default();
        let now = Instant::ZERO;
        assert!(o.add(now, connection()) && !o.add(now, connection()));
        let out = o.poll(now);
        assert_eq!(out.len(), 1);
        let Message::Dreq(dreq) = Mad::parse(&out[0].mad).unwrap().message else {
            panic!("not a DREQ");
        };
        assert_eq!(
            (dreq.local_comm_id, dreq.remote_comm_id, dreq.remote_qpn.value()),
            (70, 80, 90)
        );
        assert!(o.poll(now).is_empty());
        assert_eq!(o.poll(now + FIRST_PAUSE).len(), 1);
        assert!(o.needs(|a| a == connection().local) && !o.needs(|a| a == connection().remote));
        assert!(!o.observe([127, 0, 0, 3].into(), &drep(70)), "not the peer");
        assert!(o.observe(PEER.into(), &drep(70)));
        assert!(o.is_empty());
    }

    /// Claims of members can't be verified.
    #[test]
    fn a_host_that_answers_nothing_is_told_little() {
        let mut o = Orphans::default();
        o.add(Instant::ZERO, connection());
        assert_eq!(play(&mut o, Instant::ZERO, |_| false).len(), TRIES_UNANSWERED as usize);
        for round in 0..2 {
            let mut added = 0;
            for id in 0..100_000 {
                let local_id = 1000 + id;
                added += usize::from(o.add(
                    Instant::ZERO,
                    Connection {
                        local_id,
                        ..connection()
                    },
                ));
            }
            assert_eq!(added, MAX_PER_HOST);
            let sent = play(&mut o, Instant::ZERO, |_| false);
            // Not more by dying again.
            let left = if round == 0 {
                MAX_UNANSWERED - TRIES_UNANSWERED
            } else {
                0
            };
            assert_eq!(sent.len(), left as usize);
        }
    }

    #[test]
    fn ends_are_paced_by_host_and_in_all() {
        let mut o = Orphans::default();
        for (hosts, told, burst, interval) in [(1, MAX_PER_HOST, BURST, INTERVAL), (40, MAX, BURST_ALL, INTERVAL_ALL)] {
            let conn = |id| Connection {
                local_id: id,
                remote: [127, 0, 1, (id % hosts) as u8].into(),
                ..connection()
            };
            let added = (0..40_000).filter(|id| o.add(Instant::ZERO, conn(*id))).count();
            assert_eq!(added, told);
            let start = Instant::ZERO + Duration::from_secs(1);
            let sent = play(&mut o, start, |_| true);
            assert_eq!(sent.len(), told, "each is told, and answers");
            let span = Duration::from_millis(500);
            let most = burst as usize + (span.as_nanos() / interval.as_nanos()) as usize + 1;
            for from in 0..20 {
                let from = start + span * from;
                let within = sent.iter().filter(|(at, _)| *at >= from && *at < from + span).count();
                assert!(within <= most, "{within} in the span from {from:?}");
            }
        }
    }

    #[test]
    fn a_host_that_answers_some_is_told_of_the_others_again() {
        let mut o = Orphans::default();
        for local_id in [1, 2] {
            o.add(
                Instant::ZERO,
                Connection {
                    local_id,
                    ..connection()
                },
            );
        }
        let mut first = true;
        let sent = play(&mut o, Instant::ZERO, |_| std::mem::take(&mut first));
        assert_eq!(sent.len(), 1 + TRIES as usize);
    }

    #[test]
    fn hosts_are_remembered_for_a_while_and_bounded() {
        let mut o = Orphans::default();
        let conn = |n: u32| Connection {
            local_id: n,
            remote: IpAddr::from((0x0a00_0000 + n).to_be_bytes()),
            ..connection()
        };
        let added = (0..20_000).filter(|n| o.add(Instant::ZERO, conn(*n))).count();
        assert_eq!((added, o.hosts.len()), (MAX_HOSTS, MAX_HOSTS));
        let sent = play(&mut o, Instant::ZERO, |_| false);
        let end = sent.last().unwrap().0;
        assert!(!o.add(end, conn(19_999)));
        assert!(o.add(end + REMEMBERED + REMEMBERED, conn(19_999)));
        assert_eq!(o.hosts.len(), 1);
    }
}
