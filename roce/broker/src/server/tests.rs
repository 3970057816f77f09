//! Limits of what members can make a broker store, and for how long.

use std::{
    net::IpAddr,
    os::{fd::AsFd, unix::net::UnixListener},
    path::Path,
};

use roce_port::{
    RxMeta,
    cm::mad::{Drep, Mad, Message, Req},
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::{
    broker::{Broker, CLIENT_BUDGET, LAST_BUDGET},
    client::{FIRST_WORD, MAX_ANSWER_BYTES, MAX_ANSWERS},
    ended::MAX_SETS,
    quota::MAX_NAMELESS,
    requests::{MAX_NAME, MAX_WAITING_REQUESTS},
    slots::{Slots, Tenant},
    state::{StateFile, boot_time, namespace, process},
    *,
};
use crate::{
    page::{COUNTERS, MAX_ADDRS, Page, Report, Snapshot, named},
    proto::{
        Binding, Connection, Ended, Grant, MAX_GROUPS, MAX_SHOWN, Place, ProcessReport, Refusal, Reply, Request, SLOTS,
        Statistics, ToBroker, ToClient, VERSION,
    },
    wire::{self, MAX_RECORD, RecvError},
};

/// Any port of the TCP port space.
const TCP: u64 = 0x0106_0000;
/// A port that nobody gets by chance.
const PORT: u64 = TCP | 7000;

fn broker(dir: &Path) -> Broker {
    broker_of(&Config::new(dir.into()))
}

/// For several users, without isolation.
fn shared_broker(dir: &Path, quotas: Quotas) -> Broker {
    broker_of(&Config {
        shared: Some(0o600),
        isolate: false,
        quotas,
        ..Config::new(dir.into())
    })
}

fn broker_of(config: &Config) -> Broker {
    let listener = UnixListener::bind(config.dir.join("socket")).unwrap();
    Broker::new(config, listener.into(), vec![], systemd::Notify::from_env()).unwrap()
}

/// The other end of a connection, and the broker's number for it.
struct Peer {
    key: usize,
    socket: OwnedFd,
}

impl Peer {
    fn new(broker: &mut Broker) -> Self {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let key = broker.clients.vacant_key();
        broker.add_client(theirs).unwrap();
        Self { key, socket }
    }

    fn member(broker: &mut Broker) -> (Self, Place) {
        Self::new(broker).into_member(broker)
    }

    /// Connects as another user.
    fn of_user(broker: &mut Broker, uid: u32) -> Self {
        let this = Self::new(broker);
        broker.clients[this.key].uid = uid;
        this
    }

    fn into_member(self, broker: &mut Broker) -> (Self, Place) {
        let (this, given, _) = self.join(broker, None);
        (this, given.place)
    }

    /// Becomes a member, and maps its page.
    fn join(self, broker: &mut Broker, rejoin: Option<Grant>) -> (Self, Grant, Page) {
        let request = Request::Hello {
            version: VERSION,
            name: "member".into(),
            rejoin,
        };
        broker.on_request(self.key, 1, request, vec![]);
        let record = wire::receive(self.socket.as_fd(), &mut vec![0; MAX_RECORD], false).unwrap();
        let (message, page) = (record.message, Page::map(&record.fds[0]).unwrap());
        match message {
            ToClient::Reply {
                reply: Reply::Welcome(given),
                ..
            } => (self, given, page),
            other => panic!("{other:?}"),
        }
    }

    /// Has the broker handle a request, and takes the answer, if there is one.
    fn ask(&self, broker: &mut Broker, request: Request) -> Option<Reply> {
        broker.on_request(self.key, 1, request, vec![]);
        self.answer()
    }

    fn answer(&self) -> Option<Reply> {
        match wire::receive(self.socket.as_fd(), &mut vec![0; MAX_RECORD], false) {
            Ok(wire::Record {
                message: ToClient::Reply { reply, .. },
                ..
            }) => Some(reply),
            Ok(other) => panic!("{:?}", other.message),
            Err(RecvError::Empty) => None,
            Err(e) => panic!("{e:?}"),
        }
    }

    fn say(&self, message: &ToBroker) {
        let bytes = wire::encode(message, &[]).unwrap();
        wire::send(self.socket.as_fd(), &bytes, &[], false).unwrap();
    }
}

fn hello(name: &str) -> Request {
    Request::Hello {
        version: VERSION,
        name: name.into(),
        rejoin: None,
    }
}

fn bind(service: u64) -> Request {
    Request::Bind {
        service,
        addr: None,
        reuse: false,
    }
}

fn is_refused(reply: Option<Reply>, expected: Refusal) -> bool {
    matches!(reply, Some(Reply::Refused { why, .. }) if why == expected)
}

#[test]
fn requests_that_wait_for_a_port_to_be_free_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let mut broker = broker(dir.path());
    let ((holder, _), (one, _), (other, _)) = (
        Peer::member(&mut broker),
        Peer::member(&mut broker),
        Peer::member(&mut broker),
    );
    assert!(matches!(
        holder.ask(&mut broker, bind(PORT)),
        Some(Reply::Bound { service: PORT })
    ));
    for n in 0..MAX_WAITING_REQUESTS {
        assert!(one.ask(&mut broker, bind(PORT)).is_none(), "{n} wait");
        // After a round they wait at another place.
        if n == MAX_WAITING_REQUESTS / 2 {
            broker.retry_waiting();
        }
    }
    assert!(is_refused(one.ask(&mut broker, bind(PORT)), Refusal::Internal));
    assert!(other.ask(&mut broker, bind(PORT)).is_none(), "of another process");
    broker.retry_waiting();
    broker.retry_waiting();
    for _ in 0..MAX_WAITING_REQUESTS {
        assert!(is_refused(one.answer(), Refusal::PortInUse));
    }
    assert!(is_refused(other.answer(), Refusal::PortInUse));
    assert!(one.answer().is_none() && other.answer().is_none());
}

/// Until members of a former broker are back nobody gets a port.
#[test]
fn requests_that_wait_for_a_former_member_are_bounded_and_go_with_their_process() {
    let dir = tempfile::tempdir().unwrap();
    let mut slots = Slots::new(0, namespace());
    let own = process(std::process::id()).unwrap();
    let tenant = Tenant {
        process: own,
        uid: 0,
        token: 7,
    };
    let (absent, _) = slots.allocate(boot_time(), tenant, 0).unwrap();
    StateFile::new(dir.path()).write(&slots).unwrap();
    let mut broker = broker(dir.path());
    // However long this takes.
    broker.started = roce_net::now() + Duration::from_secs(3600);
    let ((one, _), (other, _)) = (Peer::member(&mut broker), Peer::member(&mut broker));
    for _ in 0..MAX_WAITING_REQUESTS {
        assert!(one.ask(&mut broker, bind(TCP)).is_none());
    }
    assert!(is_refused(one.ask(&mut broker, bind(TCP)), Refusal::Internal));
    assert!(other.ask(&mut broker, bind(TCP)).is_none());
    broker.remove(one.key, false);
    assert_eq!(broker.clients[other.key].waiting.len(), 1);
    // The former member turns out to be dead.
    assert_eq!(broker.slots.bury(boot_time(), |_| false), [absent]);
    broker.retry_waiting();
    assert!(matches!(other.answer(), Some(Reply::Bound { .. })));
    assert!(broker.clients[other.key].waiting.is_empty());
}

#[test]
fn who_does_not_take_its_answers_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let mut broker = broker(dir.path());
    let ((busy, place), (other, _)) = (Peer::member(&mut broker), Peer::member(&mut broker));
    let asked = (0..2 * MAX_ANSWERS).find(|_| {
        broker.on_request(busy.key, 1, bind(TCP), vec![]);
        !broker.clients.contains(busy.key)
    });
    // What its socket holds comes on top.
    assert!(asked.is_some_and(|n| n >= MAX_ANSWERS), "{asked:?}");
    assert!(broker.ports.of(place).is_empty());
    assert!(matches!(other.ask(&mut broker, bind(TCP)), Some(Reply::Bound { .. })));
}

#[test]
fn answers_that_wait_are_bounded_in_bytes_and_nothing_overtakes_them() {
    const LEN: usize = 60_000;
    let dir = tempfile::tempdir().unwrap();
    let mut broker = broker(dir.path());
    let (peer, _) = Peer::member(&mut broker);
    let client = &mut broker.clients[peer.key];
    let meta = RxMeta::new([127, 0, 0, 1].into(), "127.0.0.1:4791".parse().unwrap());
    assert!(client.forward(meta, &[]));
    let large = || Reply::Refused {
        why: Refusal::Internal,
        text: "x".repeat(LEN),
    };
    let most = MAX_ANSWER_BYTES / LEN;
    let sent = (0..10 * most)
        .find(|_| client.reply(1, large(), vec![]).is_err())
        .unwrap();
    // A socket holds 208 KiB unless the host has it otherwise.
    assert!((most..5 * most).contains(&sent), "{sent} of {LEN} bytes");
    assert!(!client.forward(meta, &[]));
    // Whoever takes them gets all, in order.
    let mut buffer = vec![0; MAX_RECORD];
    let first = wire::receive::<ToClient>(peer.socket.as_fd(), &mut buffer, false).unwrap();
    assert!(matches!(first.message, ToClient::Datagram(_)));
    assert!(peer.answer().is_some());
    assert!(!client.forward(meta, &[]), "although there is room");
    let mut taken = 1;
    client.flush().unwrap();
    while peer.answer().is_some() {
        taken += 1;
        client.flush().unwrap();
    }
    assert_eq!(taken, sent + 1);
    assert!(client.forward(meta, &[]));
}

#[test]
fn a_process_has_one_turn_and_when_it_has_ended_all_of_it_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let mut broker = broker(dir.path());
    let (eager, place) = Peer::member(&mut broker);
    let bound = |broker: &Broker| broker.ports.count(place);
    let bind_many = |count: usize| {
        for _ in 0..count {
            eager.say(&ToBroker::Request {
                seq: 1,
                request: bind(TCP),
            });
        }
    };
    bind_many(CLIENT_BUDGET + 1);
    broker.serve_client(eager.key, CLIENT_BUDGET);
    assert_eq!(bound(&broker), CLIENT_BUDGET, "others are served between");
    broker.serve_client(eager.key, CLIENT_BUDGET);
    assert_eq!(bound(&broker), CLIENT_BUDGET + 1);
    while eager.answer().is_some() {}
    // As when its process has exited.
    bind_many(CLIENT_BUDGET + 9);
    broker.serve_client(eager.key, LAST_BUDGET);
    assert_eq!(bound(&broker), 2 * CLIENT_BUDGET + 10);
}

/// Publishes the first counters of a member in its page.
fn publish(page: &Page, first: u64) {
    let mut counters = [0; COUNTERS.len()];
    counters[0] = first;
    let status = Snapshot {
        mtu: 1024,
        queue_pairs: 1,
        counters,
    };
    page.publish(&status);
}

fn statistics(broker: &mut Broker) -> Statistics {
    let peer = Peer::new(broker);
    let Some(Reply::Statistics { part: mut all, .. }) = peer.ask(broker, Request::Statistics) else {
        panic!("no statistics");
    };
    while let Some(Reply::Statistics { part, .. }) = peer.answer() {
        all.append(part);
    }
    all
}

#[test]
fn counters_are_read_when_somebody_asks_and_when_a_member_ends() {
    let dir = tempfile::tempdir().unwrap();
    let mut broker = broker(dir.path());
    let (member, given, page) = Peer::new(&mut broker).join(&mut broker, None);
    assert_eq!(statistics(&mut broker).processes[0].report, None);
    publish(&page, 5);
    let sum = |s: &Statistics| s.sum(&[], COUNTERS[0]);
    assert_eq!(sum(&statistics(&mut broker)), 5);
    // It counts on while its connection is lost, and comes back to the same page.
    broker.remove(member.key, false);
    publish(&page, 6);
    let lost = statistics(&mut broker);
    assert_eq!((sum(&lost), lost.ended.len(), lost.processes.len()), (6, 1, 0));
    let (member, _, again) = Peer::new(&mut broker).join(&mut broker, Some(given));
    let back = statistics(&mut broker);
    assert_eq!((sum(&back), back.ended.len()), (6, 0));
    publish(&again, 7);
    drop((page, again));
    broker.remove(member.key, true);
    let left = statistics(&mut broker);
    assert_eq!((sum(&left), left.ended[0].processes, left.ended_unknown), (7, 1, 0));
}

#[test]
fn who_says_nothing_is_given_up_and_names_are_cut() {
    let dir = tempfile::tempdir().unwrap();
    let mut broker = broker(dir.path());
    let (silent, named) = (Peer::new(&mut broker), Peer::new(&mut broker));
    let name = format!("a\n\u{1b}[31m{}", "b".repeat(MAX_NAME));
    assert!(named.ask(&mut broker, hello(&name)).is_some());
    assert_eq!(
        broker.clients[named.key].name,
        format!("a[31m{}", "b".repeat(MAX_NAME - 5))
    );
    let start = roce_net::now();
    broker.remove_silent(start);
    assert!(broker.clients.contains(silent.key));
    broker.remove_silent(start + FIRST_WORD);
    assert!(!broker.clients.contains(silent.key) && broker.clients.contains(named.key));
}

const QUOTAS: Quotas = Quotas {
    places: 3,
    addresses: 2,
    ports: 4,
    connections: 5,
};

#[test]
fn a_user_has_so_many_places_and_others_have_theirs() {
    let dir = tempfile::tempdir().unwrap();
    let mut broker = shared_broker(dir.path(), QUOTAS);
    let places = |broker: &mut Broker, uid| {
        let peer = Peer::of_user(broker, uid);
        let reply = peer.ask(broker, hello("one of many"));
        (peer, reply)
    };
    let mut all = vec![];
    for _ in 0..QUOTAS.places {
        let (peer, reply) = places(&mut broker, 1);
        assert!(matches!(reply, Some(Reply::Welcome { .. })));
        all.push(peer);
    }
    assert!(is_refused(places(&mut broker, 1).1, Refusal::Quota));
    assert!(matches!(places(&mut broker, 2).1, Some(Reply::Welcome { .. })));
    assert_eq!(broker.counters["refused_places"], 1);
    // What was left without a goodbye rests, and only so much of that.
    let mut killed = 0;
    loop {
        for peer in all.drain(..) {
            broker.remove(peer.key, false);
            killed += 1;
        }
        let (peer, reply) = places(&mut broker, 1);
        if is_refused(reply, Refusal::Quota) {
            break;
        }
        all.push(peer);
    }
    assert_eq!(killed, QUOTAS.resting());
    assert!(matches!(places(&mut broker, 2).1, Some(Reply::Welcome { .. })));
}

#[test]
fn a_user_has_so_many_ports_and_connections() {
    let dir = tempfile::tempdir().unwrap();
    let mut broker = shared_broker(dir.path(), QUOTAS);
    let own: IpAddr = [127, 44, 1, 1].into();
    let open = |addr| Request::Open { addr, again: false };
    let member = |broker: &mut Broker, uid| {
        let (peer, place) = Peer::of_user(broker, uid).into_member(broker);
        assert!(matches!(peer.ask(broker, open(own)), Some(Reply::Opened { .. })));
        (peer, place)
    };
    let (one, other, third) = (member(&mut broker, 1), member(&mut broker, 1), member(&mut broker, 2));
    for n in 0..QUOTAS.ports {
        let peer = if n % 2 == 0 { &one.0 } else { &other.0 };
        assert!(matches!(peer.ask(&mut broker, bind(TCP)), Some(Reply::Bound { .. })));
    }
    assert!(is_refused(other.0.ask(&mut broker, bind(TCP)), Refusal::Quota));
    let listen = Request::Listen {
        service: PORT,
        addr: None,
    };
    assert!(is_refused(one.0.ask(&mut broker, listen), Refusal::Quota));
    assert!(matches!(third.0.ask(&mut broker, bind(TCP)), Some(Reply::Bound { .. })));

    let conn = |place: Place, n: u32| Connection {
        local: own,
        remote: [127, 44, 1, 2].into(),
        local_id: place.numbers().comm_ids().0 + n,
        remote_id: n,
        remote_qpn: 7,
    };
    let all = |place| (1..10).map(|n| conn(place, n)).collect::<Vec<_>>();
    broker.on_connections(one.0.key, &all(one.1)[..3], &[]);
    broker.on_connections(other.0.key, &all(other.1), &[]);
    broker.on_connections(third.0.key, &all(third.1), &[]);
    let count = |broker: &Broker| [&one.0, &other.0, &third.0].map(|peer| broker.clients[peer.key].connections.len());
    assert_eq!(count(&broker), [3, 2, 5]);
    assert_eq!(broker.counters["refused_connections"], 7 + 4);
    // Told again they are no more; and what is over makes room.
    broker.on_connections(one.0.key, &all(one.1)[..3], &[]);
    broker.on_connections(one.0.key, &all(one.1)[3..4], &[conn(one.1, 1).local_id]);
    assert_eq!(count(&broker), [3, 2, 5]);
    // Others', and from addresses that it has not opened.
    let elsewhere = Connection {
        local: [127, 44, 1, 9].into(),
        ..conn(one.1, 20)
    };
    broker.on_connections(one.0.key, &[], &[conn(one.1, 2).local_id, conn(other.1, 1).local_id]);
    broker.on_connections(one.0.key, &[elsewhere, conn(other.1, 30)], &[]);
    assert_eq!(count(&broker), [2, 2, 5]);
    assert_eq!(broker.counters["refused_foreign_connections"], 2);
    // With a member the peers' names of its connections are forgotten.
    let owner = |broker: &Broker| {
        let req = Message::Req(Req {
            local_comm_id: 5,
            ..Req::default()
        });
        broker.tracker.owner(roce_net::now(), [127, 44, 1, 2].into(), &req)
    };
    assert_eq!(owner(&broker).map(|place| place.slot), Some(third.1.slot));
    broker.remove(third.0.key, false);
    assert_eq!(owner(&broker), None);
}

#[test]
fn an_answer_to_a_killed_process_is_detected_when_another_has_its_slot() {
    let dir = tempfile::tempdir().unwrap();
    let mut broker = broker(dir.path());
    let (peer, place) = Peer::member(&mut broker);
    assert_eq!(place, Place::whole(place.slot));
    let remote: IpAddr = [127, 44, 1, 2].into();
    let conn = Connection {
        local: [127, 44, 1, 1].into(),
        remote,
        local_id: place.numbers().comm_ids().0 + 1,
        remote_id: 9,
        remote_qpn: 7,
    };
    assert!(broker.orphans.add(roce_net::now(), conn));
    let answer = Drep {
        local_comm_id: conn.remote_id,
        remote_comm_id: conn.local_id,
        ..Drep::default()
    };
    let mad = Mad::new(1, Message::Drep(answer));
    let meta = RxMeta::new(conn.local, (remote, 50_000).into());
    broker.route_mad(0, &meta, &[], &mad.emit());
    assert!(broker.orphans.is_empty());
    assert!(broker.clients.contains(peer.key));
}

#[test]
fn a_user_has_so_many_addresses_and_what_nobody_uses_makes_room() {
    let dir = tempfile::tempdir().unwrap();
    let mut broker = shared_broker(dir.path(), QUOTAS);
    let open = |last| Request::Open {
        addr: [127, 44, 2, last].into(),
        again: false,
    };
    let is_open =
        |broker: &mut Broker, peer: &Peer, last| matches!(peer.ask(broker, open(last)), Some(Reply::Opened { .. }));
    let (one, _) = Peer::of_user(&mut broker, 1).into_member(&mut broker);
    let (other, _) = Peer::of_user(&mut broker, 2).into_member(&mut broker);
    assert!(is_open(&mut broker, &one, 1) && is_open(&mut broker, &one, 2));
    assert!(is_refused(one.ask(&mut broker, open(3)), Refusal::Quota));
    assert_eq!(broker.counters["refused_addresses"], 1);
    assert!(is_open(&mut broker, &other, 3) && is_open(&mut broker, &other, 2));
    broker.remove(one.key, true);
    // The first is idle now, the second is the other's.
    let (one, _) = Peer::of_user(&mut broker, 1).into_member(&mut broker);
    assert!(is_open(&mut broker, &one, 4) && is_open(&mut broker, &one, 5));
    assert!(broker.group_of([127, 44, 2, 1].into()).is_none() && broker.group_of([127, 44, 2, 2].into()).is_some());
}

#[test]
fn a_user_has_so_many_connections_to_the_broker_without_a_place() {
    let dir = tempfile::tempdir().unwrap();
    let mut broker = shared_broker(dir.path(), QUOTAS);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let all: Vec<_> = (0..MAX_NAMELESS + 50)
        .map(|_| {
            let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
            broker.add_client(theirs).unwrap();
            ours
        })
        .collect();
    assert_eq!((broker.clients.len(), all.len()), (MAX_NAMELESS, MAX_NAMELESS + 50));
    assert_eq!(broker.counters["refused_connects"], 50);
}

/// Returns the largest statistics that members can cause.
fn worst_statistics() -> Statistics {
    let counters = named(&[u64::MAX; COUNTERS.len()]);
    let addr: IpAddr = "1111:2222:3333:4444:5555:6666:7777:8888".parse().unwrap();
    let binding = Binding {
        service: u64::MAX,
        addr: Some(addr),
        reuse: false,
        bound: false,
        listening: false,
    };
    let process = ProcessReport {
        pid: u32::MAX,
        uid: u32::MAX,
        // Of the longest characters.
        name: "\u{10ffff}".repeat(MAX_NAME),
        place: Place {
            slot: 127,
            generation: 15,
        },
        connections: u64::MAX,
        bindings: vec![binding; MAX_SHOWN],
        report: Some(Report {
            addrs: vec![addr; MAX_ADDRS],
            mtu: u32::MAX,
            queue_pairs: u64::MAX,
            counters: counters.clone(),
        }),
    };
    let sums = Ended {
        addrs: vec![addr; MAX_ADDRS],
        processes: u64::MAX,
        counters,
    };
    Statistics {
        addrs: vec![addr; MAX_GROUPS],
        processes: vec![process; SLOTS - 1],
        ended: vec![sums; MAX_SETS],
        ended_unknown: 7,
        ..Statistics::default()
    }
}

#[test]
fn statistics_of_any_size_are_told_in_parts() {
    let all = worst_statistics();
    let parts = all.clone().parts();
    let encode = |(n, part): (usize, &Statistics)| {
        let (part, more) = (part.clone(), n + 1 < parts.len());
        let reply = Reply::Statistics { part, more };
        wire::encode(&ToClient::Reply { seq: u64::MAX, reply }, &[]).expect("it fits into a record")
    };
    let total: usize = parts.iter().enumerate().map(encode).map(|bytes| bytes.len()).sum();
    assert!(total < MAX_ANSWER_BYTES, "{total} bytes may wait");
    let mut parts = parts.into_iter();
    let mut joined = parts.next().unwrap();
    parts.for_each(|part| joined.append(part));
    assert_eq!(joined, all);
    assert_eq!(Statistics::default().parts(), [Statistics::default()]);
}
