//! The state machine that decides who gets in, against a model that only counts.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use proptest::prelude::*;
use roce_verbs::Instant;
use rtrs::{
    admission::{AccessList, Admission, Admitted, Client, ConnectRequest, Limits, PathKey, Refusal},
    proto::Uuid,
};

const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

fn v4(n: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + n))
}

fn uuid(n: u64) -> Uuid {
    let mut b = [0; 16];
    b[..8].copy_from_slice(&n.to_le_bytes());
    Uuid(b)
}

fn at(ms: u64) -> Instant {
    Instant::ZERO + Duration::from_millis(ms)
}

/// Connection 0 of a path of a session of its own.
fn hello(peer: IpAddr, n: u64) -> ConnectRequest {
    ConnectRequest {
        peer,
        local: SERVER,
        session: uuid(n),
        path: uuid(n),
        cid: 0,
        connections: 3,
        first_conn: true,
        recon_cnt: 1,
    }
}

fn cid(cid: u16, request: ConnectRequest) -> ConnectRequest {
    ConnectRequest { cid, ..request }
}

fn gate(limits: Limits, rules: &[&str]) -> Admission {
    Admission::new(limits, AccessList::new(rules.iter().map(|r| r.parse().unwrap())))
}

fn half_open(gate: &mut Admission, now: Instant, request: &ConnectRequest) -> PathKey {
    match gate.request(now, 0, request) {
        Ok(Admitted::HalfOpen { path, .. }) => path,
        other => panic!("{other:?}"),
    }
}

fn open(gate: &mut Admission, request: &ConnectRequest) -> PathKey {
    let path = half_open(gate, at(0), request);
    gate.established(path).unwrap().unwrap();
    path
}

#[test]
fn a_flood_of_strangers_locks_nobody_out() {
    for strangers in [16, 64, 512, 1536, 20_000] {
        let mut gate = gate(Limits::default(), &[]);
        for n in 0..strangers {
            half_open(&mut gate, at(n / 100), &hello(v4(n as u32), n));
        }
        assert_eq!((gate.sessions(), gate.paths(), gate.connections()), (0, 0, 0));
        assert_eq!(gate.half_open(), strangers.min(256) as usize);
        // While one client shakes hands, 200 more strangers come.
        let client = hello(v4(0x00ff_ffff), u64::MAX);
        let path = half_open(&mut gate, at(1000), &client);
        for n in 0..200 {
            half_open(&mut gate, at(1000), &hello(v4(200_000 + n as u32), 200_000 + n));
        }
        let opened = gate.established(path).unwrap().unwrap();
        assert_eq!(opened.session, client.session);
        let further = gate.request(at(1000), 0, &cid(1, client));
        assert_eq!(further, Ok(Admitted::Connection(path, opened.key)));
    }
}

#[test]
fn the_oldest_is_evicted_and_first_of_the_same_client() {
    let limits = Limits {
        half_open: 6,
        half_open_per_client: 3,
        ..Limits::default()
    };
    let mut gate = gate(limits, &[]);
    let mut paths = Vec::new();
    // Three of client 1, two of client 2, one of client 3: full.
    for (n, who) in [1, 1, 2, 1, 2, 3].into_iter().enumerate() {
        paths.push(half_open(&mut gate, at(0), &hello(v4(who), n as u64)));
    }
    let mut evicted = |who, n| match gate.request(at(1), 0, &hello(v4(who), n)) {
        Ok(Admitted::HalfOpen { evicted, .. }) => evicted,
        other => panic!("{other:?}"),
    };
    assert_eq!(evicted(2, 10), Some(paths[0]), "the oldest of all");
    assert_eq!(evicted(2, 11), Some(paths[2]), "client 2 has its share: its oldest");
    assert_eq!(evicted(4, 12), Some(paths[1]), "the oldest of all");
    assert_eq!(gate.half_open(), 6);
    assert_eq!(gate.established(paths[0]), None);
}

#[test]
fn addresses_of_a_slash_64_are_one_client() {
    let v6 = |net: u16, host: u64| {
        let bits = 0x2001_0db8_u128 << 96 | u128::from(net) << 64 | u128::from(host);
        IpAddr::V6(Ipv6Addr::from_bits(bits))
    };
    let mut gate = gate(Limits::default(), &[]);
    for n in 0..1000 {
        half_open(&mut gate, at(0), &hello(v6(1, n), n));
    }
    assert_eq!(gate.half_open(), 32);
    for n in 0..16 {
        open(&mut gate, &hello(v6(2, n), 2000 + n));
    }
    let request = |host: IpAddr| hello(host, 3000);
    assert_eq!(
        gate.request(at(0), 0, &request(v6(2, 99))),
        Err(Refusal::SessionsOfClient)
    );
    assert!(gate.request(at(0), 0, &request(v6(3, 0))).is_ok());
    // All hosts of a network have link-local addresses in one /64.
    let local = |n: u16| Client::of(IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, n)));
    assert_ne!(local(1), local(2));
    assert_eq!(Client::of("::ffff:10.0.0.1".parse().unwrap()), Client::of(v4(1)));
}

#[test]
fn each_limit_says_which_it_is() {
    let limits = Limits {
        sessions: 4,
        sessions_per_client: 2,
        paths: 5,
        connections_per_path: 10,
        connections: 30,
        ..Limits::default()
    };
    let mut gate = gate(limits, &[]);
    let ask = |gate: &mut Admission, request: ConnectRequest| gate.request(at(0), 0, &request).unwrap_err();
    let wide = |request| ConnectRequest {
        connections: 11,
        ..request
    };
    assert_eq!(ask(&mut gate, wide(hello(v4(1), 1))), Refusal::ConnectionsOfPath);
    open(&mut gate, &hello(v4(1), 1));
    open(&mut gate, &hello(v4(1), 2));
    assert_eq!(ask(&mut gate, hello(v4(1), 3)), Refusal::SessionsOfClient);
    let small = open(&mut gate, &hello(v4(2), 3));
    open(
        &mut gate,
        &ConnectRequest {
            connections: 10,
            ..hello(v4(3), 4)
        },
    );
    assert_eq!(ask(&mut gate, hello(v4(4), 5)), Refusal::Sessions);
    // Another path of session 1.
    let second = |path, peer, connections| ConnectRequest {
        path: uuid(path),
        peer,
        connections,
        first_conn: false,
        ..hello(peer, 1)
    };
    assert_eq!(gate.connections(), 19);
    assert_eq!(ask(&mut gate, second(100, v4(1), 3)), Refusal::SamePath);
    let fifth = open(&mut gate, &second(100, v4(9), 10));
    assert_eq!(ask(&mut gate, second(101, v4(10), 3)), Refusal::Paths);
    gate.ended(small);
    assert_eq!(gate.sessions(), 3);
    assert_eq!(ask(&mut gate, second(101, v4(10), 10)), Refusal::Connections);
    gate.ended(fifth);
    assert_eq!(gate.sessions(), 3, "session 1 has another path");
    assert!(gate.request(at(0), 0, &second(101, v4(10), 3)).is_ok());
    assert_eq!(
        ask(
            &mut gate,
            ConnectRequest {
                first_conn: false,
                ..hello(v4(10), 77)
            }
        ),
        Refusal::NoSession
    );
}

#[test]
fn places_are_given_to_whom_the_network_has_answered() {
    let limits = Limits {
        sessions: 1,
        ..Limits::default()
    };
    let mut gate = gate(limits, &[]);
    let (a, b) = (hello(v4(1), 1), hello(v4(2), 2));
    let first = half_open(&mut gate, at(0), &a);
    let second = half_open(&mut gate, at(0), &b);
    assert!(gate.established(second).unwrap().is_ok());
    assert_eq!(gate.established(first), Some(Err(Refusal::Sessions)));
    assert_eq!(gate.half_open(), 0);
    assert_eq!(gate.established(first), None);
}

#[test]
fn a_handshake_has_one_deadline() {
    let mut gate = gate(Limits::default(), &[]);
    let request = hello(v4(1), 1);
    let path = half_open(&mut gate, at(0), &request);
    let silent = half_open(&mut gate, at(1), &hello(v4(2), 2));
    let session = gate.established(path).unwrap().unwrap().key;
    for n in 1..3 {
        assert!(gate.request(at(29_000), 0, &cid(n, request)).is_ok());
    }
    assert_eq!(gate.next_deadline(0), Some(at(30_000)));
    assert_eq!(gate.expired(at(29_999), 0), None);
    assert_eq!(gate.expired(at(30_001), 0), Some((path, Some(session))));
    assert_eq!(gate.expired(at(30_001), 0), Some((silent, None)));
    assert_eq!(gate.expired(at(30_001), 0), None);
    // The established one is counted until it is gone.
    assert_eq!((gate.paths(), gate.half_open()), (1, 0));
    gate.ended(path);
    assert_eq!((gate.paths(), gate.sessions(), gate.next_deadline(0)), (0, 0, None));

    let path = half_open(&mut gate, at(0), &hello(v4(1), 3));
    gate.established(path).unwrap().unwrap();
    gate.up(path);
    assert_eq!(gate.next_deadline(0), None);
}

#[test]
fn further_connections_wait_for_the_first() {
    let mut gate = gate(Limits::default(), &[]);
    let request = ConnectRequest {
        connections: 20,
        ..hello(v4(1), 1)
    };
    assert_eq!(gate.request(at(0), 0, &cid(1, request)), Err(Refusal::NoPath));
    let path = half_open(&mut gate, at(0), &request);
    for n in 1..5 {
        assert_eq!(gate.request(at(0), 0, &cid(n, request)), Ok(Admitted::Held(path)));
    }
    assert_eq!(gate.request(at(0), 0, &cid(1, request)), Err(Refusal::Unexpected));
    assert_eq!(gate.request(at(0), 0, &cid(5, request)), Err(Refusal::Held));
    assert_eq!(gate.held(), 4);
    let session = gate.established(path).unwrap().unwrap().key;
    assert_eq!(gate.held(), 0);
    for n in 1..20 {
        assert_eq!(
            gate.request(at(0), 0, &cid(n, request)),
            Ok(Admitted::Connection(path, session))
        );
    }
    gate.up(path);
    assert_eq!(gate.request(at(0), 0, &cid(3, request)), Err(Refusal::Unexpected));
}

#[test]
fn whoever_knows_the_uuids_elsewhere_changes_nothing() {
    let mut gate = gate(Limits::default(), &[]);
    let owner = hello(v4(1), 1);
    // Even before the owner comes.
    let thief = ConnectRequest { peer: v4(66), ..owner };
    let early = half_open(&mut gate, at(0), &thief);
    let path = half_open(&mut gate, at(0), &owner);
    assert_eq!(gate.request(at(0), 0, &cid(1, thief)), Ok(Admitted::Held(early)));
    let session = gate.established(path).unwrap().unwrap().key;
    assert_eq!(
        gate.request(at(0), 0, &cid(1, owner)),
        Ok(Admitted::Connection(path, session))
    );
    // Established later, it finds that the path exists.
    assert_eq!(gate.established(early), Some(Err(Refusal::Unexpected)));
    assert_eq!(gate.request(at(0), 0, &thief), Err(Refusal::Unexpected));
    assert_eq!(
        gate.request(at(0), 0, &cid(2, owner)),
        Ok(Admitted::Connection(path, session))
    );
}

#[test]
fn names_come_only_from_where_they_may() {
    let mut gate = gate(Limits::default(), &["db=10.0.0.0/30", "web=10.0.1.0/24"]);
    let db = open(&mut gate, &hello(v4(1), 1));
    assert_eq!(gate.name(db, "db"), Ok(()));
    let other = open(&mut gate, &hello(v4(9), 2));
    assert_eq!(gate.name(other, "db"), Err(Refusal::Name));
    assert_eq!(gate.name(other, "web"), Err(Refusal::Name));
    assert_eq!(gate.name(other, "free"), Ok(()));
    // Further paths of the session: from the same ranges, whatever name they give.
    let second = |peer, n| ConnectRequest {
        path: uuid(n),
        first_conn: false,
        ..hello(peer, 1)
    };
    assert_eq!(gate.request(at(0), 0, &second(v4(9), 50)), Err(Refusal::Name));
    let path = open(&mut gate, &second(v4(2), 51));
    assert_eq!(gate.name(path, "web"), Ok(()), "the session is called db already");
}

#[test]
fn clients_that_break_into_chunks_are_slowed_down() {
    let mut gate = gate(Limits::default(), &[]);
    let (mut n, mut refused) = (0, 0);
    for ms in (0..20_000).step_by(100) {
        match gate.request(at(ms), 0, &hello(v4(1), n)) {
            Ok(Admitted::HalfOpen { path, .. }) => {
                gate.established(path).unwrap().unwrap();
                gate.access_error(at(ms), v4(1));
                gate.ended(path);
                n += 1;
            }
            Err(Refusal::SlowedDown) => refused += 1,
            other => panic!("{other:?}"),
        }
        assert!(gate.request(at(ms), 0, &hello(v4(2), 1_000_000 + ms)).is_ok());
    }
    assert!(n < 10, "{n} sessions in 20 s");
    assert_eq!(n + refused, 200);
    assert!(gate.request(at(100_000), 0, &hello(v4(1), n)).is_ok());
}

/// What may happen.
#[derive(Clone, Debug)]
enum Step {
    Request {
        at: usize,
        who: u8,
        session: u8,
        path: u8,
        cid: u16,
    },
    Established(u8),
    Up(u8),
    Closing(u8),
    Ended(u8),
    Wait(u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0usize..3, 0u8..6, 0u8..8, 0u8..3, 0u16..4)
            .prop_map(|(at, who, session, path, cid)| Step::Request { at, who, session, path, cid }),
        4 => any::<u8>().prop_map(Step::Established),
        2 => any::<u8>().prop_map(Step::Up),
        1 => any::<u8>().prop_map(Step::Closing),
        2 => any::<u8>().prop_map(Step::Ended),
        1 => (0u16..2000).prop_map(Step::Wait),
    ]
}

/// A path as the model knows it.
#[derive(Clone, Debug)]
struct Known {
    /// Its loop.
    at: usize,
    request: ConnectRequest,
    established: bool,
    since: Instant,
    up: bool,
    closing: bool,
    held: usize,
}

#[derive(Default)]
struct Model {
    now: Instant,
    paths: BTreeMap<PathKey, Known>,
}

impl Model {
    fn pick(&self, n: u8) -> Option<PathKey> {
        let count = self.paths.len().max(1);
        self.paths.keys().nth(usize::from(n) % count).copied()
    }

    fn apply(&mut self, gate: &mut Admission, step: &Step) {
        match *step {
            Step::Request {
                at,
                who,
                session,
                path,
                cid,
            } => self.request(gate, at % gate.loads().len(), who, session, path, cid),
            Step::Established(n) => {
                let Some(key) = self.pick(n) else { return };
                let known = self.paths.get_mut(&key).unwrap();
                match gate.established(key) {
                    Some(Ok(_)) => (known.established, known.held) = (true, 0),
                    Some(Err(_)) => drop(self.paths.remove(&key)),
                    None => assert!(known.established),
                }
            }
            Step::Up(n) => {
                let Some(key) = self.pick(n) else { return };
                gate.up(key);
                let known = self.paths.get_mut(&key).unwrap();
                known.up |= known.established && !known.closing;
            }
            Step::Closing(n) => {
                let Some(key) = self.pick(n) else { return };
                gate.closing(key);
                self.close(key);
            }
            Step::Ended(n) => {
                let Some(key) = self.pick(n) else { return };
                gate.ended(key);
                self.paths.remove(&key);
            }
            Step::Wait(ms) => {
                self.now = self.now + Duration::from_millis(ms.into());
                for at in 0..gate.loads().len() {
                    while let Some((key, session)) = gate.expired(self.now, at) {
                        let known = &self.paths[&key];
                        assert_eq!((known.at, known.established), (at, session.is_some()));
                        assert!(!known.up && self.now >= known.since + gate.limits().handshake);
                        self.close(key);
                    }
                }
            }
        }
    }

    fn close(&mut self, key: PathKey) {
        match self.paths.get_mut(&key) {
            Some(known) if known.established => known.closing = true,
            _ => drop(self.paths.remove(&key)),
        }
    }

    fn request(&mut self, gate: &mut Admission, at: usize, who: u8, session: u8, path: u8, cid: u16) {
        let request = ConnectRequest {
            peer: v4(who.into()),
            local: SERVER,
            session: uuid(session.into()),
            path: uuid(u64::from(path) * 1000 + u64::from(session)),
            cid,
            connections: 2 + u16::from(session % 3),
            first_conn: true,
            recon_cnt: 1,
        };
        match gate.request(self.now, at, &request) {
            Ok(Admitted::HalfOpen { path, evicted }) => {
                assert_eq!(cid, 0);
                if let Some(old) = evicted {
                    let old = self.paths.remove(&old).unwrap();
                    assert!(!old.established, "only a half-open path is evicted");
                    assert_eq!(old.at, at, "a path of the same loop is evicted");
                }
                let known = Known {
                    at,
                    request,
                    established: false,
                    since: self.now,
                    up: false,
                    closing: false,
                    held: 0,
                };
                assert!(self.paths.insert(path, known).is_none());
            }
            Ok(Admitted::Connection(path, _)) => {
                let known = &self.paths[&path];
                assert!(known.established && !known.up && !known.closing && cid != 0);
                assert_eq!(known.at, at);
            }
            Ok(Admitted::GivenUp(path, _)) => panic!("{path:?}: each is connected once"),
            Ok(Admitted::Held(path)) => {
                let known = self.paths.get_mut(&path).unwrap();
                assert!(!known.established && cid != 0 && known.at == at);
                known.held += 1;
            }
            Err(refusal) => {
                // Newcomers are refused for what the established have, never for the number of the half-open.
                let full = matches!(
                    refusal,
                    Refusal::Sessions | Refusal::SessionsOfClient | Refusal::Paths | Refusal::Connections
                );
                assert!(!full || self.paths.values().any(|p| p.established));
            }
        }
    }

    fn agrees(&self, gate: &Admission) {
        let limits = gate.limits();
        let established = || self.paths.values().filter(|p| p.established);
        let half_open = self.paths.len() - established().count();
        let mut sessions: Vec<_> = established().map(|p| p.request.session).collect();
        sessions.sort_unstable();
        sessions.dedup();
        let connections: usize = established().map(|p| usize::from(p.request.connections)).sum();
        assert_eq!(gate.half_open(), half_open);
        assert_eq!(gate.paths(), established().count());
        assert_eq!(gate.sessions(), sessions.len());
        assert_eq!(gate.connections(), connections);
        assert_eq!(gate.held(), self.paths.values().map(|p| p.held).sum::<usize>());
        assert!(sessions.len() <= limits.sessions);
        assert!(gate.paths() <= limits.paths && connections <= limits.connections);
        let mut loops = BTreeMap::new();
        for (at, load) in gate.loads().into_iter().enumerate() {
            let here = || self.paths.values().filter(|p| p.at == at);
            let half_open = || here().filter(|p| !p.established);
            assert!(half_open().count() <= limits.half_open);
            assert!(half_open().map(|p| p.held).sum::<usize>() <= limits.held);
            for who in 0..6 {
                let of_client = half_open().filter(|p| p.request.peer == v4(who));
                assert!(of_client.count() <= limits.half_open_per_client);
            }
            let sessions: BTreeSet<_> = here().map(|p| p.request.session).collect();
            assert_eq!(load, sessions.len());
            for session in sessions {
                assert_eq!(loops.insert(session, at), None, "two loops have a session");
            }
        }
        let mut of_clients = 0;
        for who in 0..6 {
            let client = Client::of(v4(who));
            assert!(gate.sessions_of(client) <= limits.sessions_per_client);
            of_clients += gate.sessions_of(client);
        }
        assert_eq!(of_clients, sessions.len());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn counts_are_what_is_there_and_never_above_the_limits(loops in 1usize..=3, steps in proptest::collection::vec(step(), 1..200)) {
        let limits = Limits {
            sessions: 4,
            sessions_per_client: 2,
            paths: 6,
            connections: 16,
            half_open: 5,
            half_open_per_client: 2,
            held: 3,
            held_per_path: 2,
            handshake: Duration::from_secs(3),
            ..Limits::default()
        };
        let mut gate = Admission::on_loops(limits, AccessList::default(), loops);
        let mut model = Model::default();
        for step in &steps {
            model.apply(&mut gate, step);
            model.agrees(&gate);
        }
        for key in model.paths.keys() {
            gate.ended(*key);
        }
        model.paths.clear();
        model.agrees(&gate);
        prop_assert!((0..loops).all(|at| gate.next_deadline(at).is_none()));
    }
}

#[test]
fn a_later_attempt_says_that_the_path_was_given_up() {
    let mut gate = gate(Limits::default(), &[]);
    let first = hello(v4(1), 1);
    let attempt = |recon_cnt| ConnectRequest { recon_cnt, ..first };
    let path = half_open(&mut gate, at(0), &attempt(u16::MAX));
    let given_up = |session| Ok(Admitted::GivenUp(path, session));
    // A repetition, and what was on its way before.
    for recon_cnt in [u16::MAX, u16::MAX - 1, 0x8000] {
        assert_eq!(gate.request(at(0), 0, &attempt(recon_cnt)), Err(Refusal::Unexpected));
    }
    assert_eq!(
        gate.request(at(0), 0, &attempt(0)),
        given_up(None),
        "half-open, and the number has wrapped"
    );
    let session = Some(gate.established(path).unwrap().unwrap().key);
    assert_eq!(gate.request(at(0), 0, &attempt(7)), given_up(session));
    gate.up(path);
    assert_eq!(gate.request(at(0), 0, &attempt(7)), given_up(session));
    // Only connection 0 begins an attempt, and only from where the path is.
    assert_eq!(gate.request(at(0), 0, &cid(1, attempt(7))), Err(Refusal::Unexpected));
    let elsewhere = ConnectRequest {
        peer: v4(2),
        ..attempt(7)
    };
    assert_eq!(gate.request(at(0), 0, &elsewhere), Err(Refusal::Unexpected));
    gate.closing(path);
    assert_eq!(gate.request(at(0), 0, &attempt(8)), Err(Refusal::Unexpected));
    gate.ended(path);
    assert!(matches!(
        gate.request(at(0), 0, &attempt(8)),
        Ok(Admitted::HalfOpen { .. })
    ));
}

/// Admission of two loops.
fn two_loops(limits: Limits) -> Admission {
    Admission::on_loops(limits, AccessList::default(), 2)
}

fn half_open_at(gate: &mut Admission, loop_index: usize, request: &ConnectRequest) -> PathKey {
    match gate.request(at(1000), loop_index, request) {
        Ok(Admitted::HalfOpen { path, .. }) => path,
        other => panic!("{other:?}"),
    }
}

#[test]
fn limits_names_and_penalties_are_those_of_all_loops() {
    let mut gate = two_loops(Limits {
        sessions: 3,
        sessions_per_client: 2,
        ..Limits::default()
    });
    let up = [0, 1].map(|n| {
        let path = half_open_at(&mut gate, n as usize, &hello(v4(1), n));
        gate.established(path).unwrap().unwrap();
        path
    });
    for index in 0..2 {
        let third = gate.request(at(1000), index, &hello(v4(1), 2));
        assert_eq!(third, Err(Refusal::SessionsOfClient));
    }
    assert_eq!(
        (gate.name(up[0], "db"), gate.name(up[1], "db")),
        (Ok(()), Err(Refusal::NameTaken))
    );
    // One that is only being cleaned up does not count: its client may be back already.
    gate.closing(up[0]);
    assert_eq!(gate.name(up[1], "db"), Ok(()));
    // Two are half-open at two loops, and there is room for one.
    let paths = [(0, 10), (1, 11)].map(|(index, n)| half_open_at(&mut gate, index, &hello(v4(n), n.into())));
    assert!(gate.established(paths[0]).unwrap().is_ok());
    assert_eq!(gate.established(paths[1]), Some(Err(Refusal::Sessions)));
    assert_eq!(gate.loads(), [2, 1]);
    for _ in 0..3 {
        gate.access_error(at(1000), v4(7));
    }
    for index in 0..2 {
        let refused = gate.request(at(1000), index, &hello(v4(7), 7));
        assert_eq!(refused, Err(Refusal::SlowedDown));
    }
}

#[test]
fn a_session_is_on_one_loop_and_its_number_no_others() {
    let mut gate = two_loops(Limits::default());
    let mut keys = Vec::new();
    for n in 0..4 {
        let index = gate.place(at(1000), uuid(n), true);
        assert_eq!(index, n as usize % 2);
        assert_eq!(gate.place(at(1000), uuid(n), false), index, "any connection of it");
        let path = half_open_at(&mut gate, index, &hello(v4(n as u32), n));
        keys.push(gate.established(path).unwrap().unwrap().key);
        let elsewhere = gate.request(at(1000), 1 - index, &cid(1, hello(v4(n as u32), n)));
        assert_eq!(elsewhere, Err(Refusal::Unexpected));
    }
    keys.dedup();
    assert_eq!((keys.len(), gate.loads()), (4, vec![2, 2]));
}

#[test]
fn each_loop_evicts_and_expires_its_own_half_open_paths() {
    let mut gate = two_loops(Limits {
        half_open: 2,
        ..Limits::default()
    });
    let paths = [0, 1, 0, 1].map(|index| {
        let n = gate.half_open() as u64;
        half_open_at(&mut gate, index, &hello(v4(n as u32), n))
    });
    let evicted = match gate.request(at(1000), 1, &hello(v4(9), 9)) {
        Ok(Admitted::HalfOpen { evicted, .. }) => evicted,
        other => panic!("{other:?}"),
    };
    assert_eq!((evicted, gate.half_open()), (Some(paths[1]), 4));
    assert_eq!([0, 1].map(|index| gate.next_deadline(index)), [Some(at(31_000)); 2]);
    let mut expired = Vec::new();
    while let Some((path, None)) = gate.expired(at(40_000), 0) {
        expired.push(path);
    }
    assert_eq!((expired, gate.half_open()), (vec![paths[0], paths[2]], 2));
    assert_eq!((gate.next_deadline(0), gate.loads()), (None, vec![0, 2]));
}

#[test]
fn each_loop_has_its_own_room_for_waiting_requests() {
    let mut gate = two_loops(Limits {
        held: 1,
        ..Limits::default()
    });
    for index in 0..2 {
        let request = hello(v4(index as u32), index as u64);
        let path = half_open_at(&mut gate, index, &request);
        assert_eq!(
            gate.request(at(1000), index, &cid(1, request)),
            Ok(Admitted::Held(path))
        );
        assert_eq!(gate.request(at(1000), index, &cid(2, request)), Err(Refusal::Held));
    }
    assert_eq!(gate.held(), 2);
}

#[test]
fn a_session_that_is_refused_is_not_expected() {
    let mut gate = two_loops(Limits {
        sessions_per_client: 1,
        ..Limits::default()
    });
    let first = gate.place(at(1000), uuid(1), true);
    let path = half_open_at(&mut gate, first, &hello(v4(1), 1));
    gate.established(path).unwrap().unwrap();
    let index = gate.place(at(1000), uuid(2), true);
    assert_eq!(gate.loads(), [1, 1]);
    let refused = gate.request(at(1000), index, &hello(v4(1), 2));
    assert_eq!((refused, gate.loads()), (Err(Refusal::SessionsOfClient), vec![1, 0]));
    // A path of a session that has others is refused, and the session stays.
    let again = gate.request(at(1000), 0, &hello(v4(1), 1));
    assert_eq!((again, gate.loads()), (Err(Refusal::Unexpected), vec![1, 0]));
}
