//! Answers, late and in time, and what goes with a broker.

use std::{path::PathBuf, thread};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use roce_port::ConnChange;

use super::*;
use crate::proto::{Binding, Refusal};

/// A member, and the broker's end of its connection.
fn member() -> (Arc<Shared>, OwnedFd) {
    member_in("/nonexistent".into())
}

fn member_in(dir: PathBuf) -> (Arc<Shared>, OwnedFd) {
    let (link, broker) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let config = JoinConfig {
        dir,
        program: None,
        name: "test".into(),
    };
    let given = Grant {
        place: Place { slot: 3, generation: 1 },
        token: 7,
        parts: Parts::default(),
    };
    let shared = Shared::new(config, given, None, Arc::new(link)).unwrap();
    (Arc::new(shared), broker)
}

/// Returns the next request to the broker: its number and text.
fn asked(broker: &OwnedFd, wait: bool) -> Option<(u64, String)> {
    match wire::receive::<ToBroker>(broker.as_fd(), &mut vec![0; MAX_RECORD], wait) {
        Ok(Record {
            message: ToBroker::Request { seq, request },
            ..
        }) => Some((seq, format!("{request:?}"))),
        _ => None,
    }
}

fn reply(seq: u64, reply: Reply, fds: Vec<OwnedFd>) -> Record<ToClient> {
    let (message, payload) = (ToClient::Reply { seq, reply }, vec![]);
    let lacks_fds = false;
    Record {
        message,
        payload,
        fds,
        lacks_fds,
    }
}

fn refused() -> Reply {
    let why = Refusal::PortInUse;
    Reply::Refused {
        why,
        text: String::new(),
    }
}

fn is_empty(state: &State) -> bool {
    state.pending.is_empty() && state.resources.bindings.is_empty()
}

#[test]
fn what_comes_too_late_is_given_back() {
    let (shared, broker) = member();
    let addr = Some(IpAddr::from([127, 0, 0, 1]));
    let bind = Request::Bind {
        service: 0x0106_0000,
        addr,
        reuse: false,
    };
    let listen = Request::Listen { service: 9, addr };
    let bound = Reply::Bound { service: 0x0106_1234 };
    let unbind = "Release { service: 17175092, addr: Some(127.0.0.1), listening: false }";
    let cases = [
        (&bind, bound, Some(unbind)),
        (&bind, refused(), None),
        (
            &listen,
            Reply::Done,
            Some("Release { service: 9, addr: Some(127.0.0.1), listening: true }"),
        ),
        (&listen, refused(), None),
    ];
    for (request, answer, told) in cases {
        let given_up = shared.call_until(request, Instant::now());
        assert!(matches!(given_up, Err(Error::Timeout)));
        let (seq, _) = asked(&broker, true).unwrap();
        let (theirs, ours) = std::io::pipe().unwrap();
        let late = reply(seq, answer, vec![ours.into()]);
        shared.take(late);
        assert_eq!(asked(&broker, false).map(|(_, text)| text).as_deref(), told);
        assert_eq!(
            std::io::read_to_string(theirs).unwrap(),
            "",
            "its descriptors are closed"
        );
        // Nobody notes what is not had, and a repetition means nothing.
        shared.take(reply(seq, Reply::Done, vec![]));
        assert!(is_empty(&shared.state.lock()) && asked(&broker, false).is_none());
    }
}

/// The broker gives a member the sockets of an address once.
#[test]
fn sockets_that_come_too_late_are_for_who_asks_next() {
    let (shared, broker) = member();
    let addr = IpAddr::from([127, 0, 0, 1]);
    let open = Request::Open { addr, again: false };
    assert!(matches!(shared.call_until(&open, Instant::now()), Err(Error::Timeout)));
    let (late, _) = asked(&broker, true).unwrap();
    let membership = Membership { shared: shared.clone() };
    thread::scope(|s| {
        // It asks again before the answer comes, which then is the second.
        let waits = s.spawn(|| membership.open(addr));
        let (seq, _) = asked(&broker, true).unwrap();
        let (_theirs, ours) = std::io::pipe().unwrap();
        let given = Reply::Opened {
            addrs: vec![addr],
            vault: false,
        };
        shared.take(reply(late, given, vec![ours.into()]));
        shared.take(reply(seq, refused(), vec![]));
        assert_eq!(waits.join().unwrap().unwrap().receivers.len(), 1);
    });
    // The next broker is told of it, and nobody gets it twice.
    let state = shared.state.lock();
    let all = &state.resources;
    assert_eq!(all.opened.iter().map(|o| o.addr).collect::<Vec<_>>(), [addr]);
    assert!(all.given.is_empty() && state.pending.is_empty());
    drop(state);
}

#[test]
fn a_late_answer_is_not_taken_for_another() {
    let (shared, broker) = member();
    let listen = Request::Listen { service: 9, addr: None };
    assert!(shared.call_until(&listen, Instant::now()).is_err());
    let (late, _) = asked(&broker, true).unwrap();
    thread::scope(|s| {
        let waits = s.spawn(|| shared.call(&listen));
        let (seq, _) = asked(&broker, true).unwrap();
        shared.take(reply(late, refused(), vec![]));
        shared.take(reply(seq + 1, refused(), vec![]));
        assert_eq!(shared.state.lock().pending.len(), 1);
        shared.take(reply(seq, Reply::Done, vec![]));
        assert!(matches!(waits.join().unwrap(), Ok(Reply::Done)));
    });
    let state = shared.state.lock();
    let bindings = &state.resources.bindings;
    assert!(bindings.len() == 1 && bindings[0].listening);
}

#[test]
fn requests_that_are_given_up_are_bounded() {
    let (shared, broker) = member();
    let listen = Request::Listen { service: 9, addr: None };
    for _ in 0..MAX_PENDING + 50 {
        assert!(shared.call_until(&listen, Instant::now()).is_err());
        assert!(asked(&broker, true).is_some());
    }
    assert_eq!(shared.state.lock().pending.len(), MAX_PENDING);
}

/// Waits for a request, answers it, and returns it.
fn answered(broker: &OwnedFd, with: Reply) -> String {
    let (seq, text) = asked(broker, true).unwrap();
    let message = ToClient::Reply { seq, reply: with };
    let bytes = wire::encode(&message, &[]).unwrap();
    wire::send(broker.as_fd(), &bytes, &[], true).unwrap();
    text
}

/// Another process may have been told that the port is free, and ask the broker for it.
#[test]
fn what_is_given_back_while_a_broker_is_told_is_told_before_anybody_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(start::SOCKET);
    let listener = start::new_socket().unwrap();
    rustix::net::bind(&listener, &rustix::net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let (shared, _broker) = member_in(dir.path().into());
    shared.state.lock().resources.bindings.push(Binding {
        service: 7,
        addr: None,
        reuse: false,
        bound: true,
        listening: false,
    });
    let member = shared.clone();
    thread::spawn(move || {
        let link = member.reconnect().unwrap();
        member.serve(link);
    });
    let broker = rustix::net::accept(&listener).unwrap();
    answered(&broker, Reply::Welcome(shared.given));
    assert!(answered(&broker, Reply::Done).contains("service: 7"));
    let (back, is_back) = std::sync::mpsc::channel();
    thread::spawn(move || {
        let membership = Membership { shared };
        membership.unbind(7, None).unwrap();
        back.send(()).unwrap();
        // It does not leave.
        std::mem::forget(membership);
    });
    assert!(
        is_back.recv_timeout(Duration::from_millis(50)).is_err(),
        "the broker knows the port, and is not told that it is free"
    );
    assert!(answered(&broker, Reply::Done).contains("Restored"));
    is_back.recv().unwrap();
    assert_eq!(
        asked(&broker, false).map(|(_, text)| text).as_deref(),
        Some("Release { service: 7, addr: None, listening: false }")
    );
}

fn change(local_id: u32, established: bool) -> PortChange {
    PortChange::Connection(ConnChange {
        established,
        local: [127, 0, 0, 1].into(),
        remote: [127, 0, 0, 2].into(),
        local_id,
        remote_id: local_id + 1,
        remote_qpn: roce_bth::Qpn::new(7),
    })
}

/// Returns the changes that the broker was told of.
fn told(broker: &OwnedFd) -> (Vec<u32>, Vec<u32>) {
    let (mut ups, mut downs) = (vec![], vec![]);
    let mut buffer = vec![0; MAX_RECORD];
    while let Ok(Record {
        message: ToBroker::Connections { up, down },
        ..
    }) = wire::receive(broker.as_fd(), &mut buffer, false)
    {
        ups.extend(up.iter().map(|c| c.local_id));
        downs.extend(down);
    }
    (ups, downs)
}

#[test]
fn a_broker_without_room_is_told_when_it_has_and_nobody_waits() {
    const ALL: u32 = 20_000;
    let (shared, broker) = member();
    let membership = Membership { shared: shared.clone() };
    // Far more than a socket holds; nobody reads.
    (0..ALL).for_each(|id| membership.port_change(&change(id, true)));
    membership.port_change(&change(0, false));
    // Changes without end of one connection, as a peer may make them, take up no more room.
    (0..1_000).for_each(|_| {
        membership.port_change(&change(ALL, true));
        membership.port_change(&change(ALL, false));
    });
    {
        let state = shared.state.lock();
        assert!(state.outbox.len() == 1 && state.untold.len() <= ALL as usize + 1);
    }
    let link = shared.state.lock().link.clone().unwrap();
    let (mut ups, mut downs) = (vec![], vec![]);
    thread::scope(|s| {
        s.spawn(|| {
            let waits = |state: &State| !state.outbox.is_empty() || !state.untold.is_empty();
            while waits(&shared.state.lock()) {
                shared.wait_for_broker(&link);
            }
        });
        while ups.len() < ALL as usize || downs.len() < 2 {
            let (up, down) = told(&broker);
            ups.extend(up);
            downs.extend(down);
            thread::yield_now();
        }
        shared.stuck.raise();
    });
    ups.sort_unstable();
    downs.sort_unstable();
    assert!(ups.into_iter().eq(0..ALL) && downs == [0, ALL]);
}

#[test]
fn changes_without_a_broker_are_not_queued_and_later_ones_follow_what_the_next_one_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let listener = start::new_socket().unwrap();
    let path = rustix::net::SocketAddrUnix::new(dir.path().join(start::SOCKET)).unwrap();
    rustix::net::bind(&listener, &path).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    let (shared, broker) = member_in(dir.path().into());
    let membership = Membership { shared: shared.clone() };
    (1..4).for_each(|id| membership.port_change(&change(id, true)));
    assert_eq!(told(&broker).0, [1, 2, 3]);
    shared.state.lock().disconnect();
    membership.port_change(&change(2, false));
    membership.port_change(&change(4, true));
    {
        let state = shared.state.lock();
        assert!(
            state.outbox.is_empty() && state.untold.is_empty(),
            "nobody has to be told"
        );
    }
    thread::scope(|s| {
        let rejoins = s.spawn(|| shared.rejoin().unwrap());
        let broker = rustix::net::accept(&listener).unwrap();
        answered(&broker, Reply::Welcome(shared.given));
        let record = wire::receive::<ToBroker>(broker.as_fd(), &mut vec![0; MAX_RECORD], true);
        let ToBroker::Connections { up, .. } = record.unwrap().message else {
            panic!("not the connections");
        };
        let mut all: Vec<u32> = up.iter().map(|c| c.local_id).collect();
        all.sort_unstable();
        assert_eq!(all, [1, 3, 4]);
        membership.port_change(&change(1, false));
        assert!(answered(&broker, Reply::Done).contains("Restored"));
        let mut state = shared.state.lock();
        state.connect(Arc::new(rejoins.join().unwrap()));
        assert!(state.flush());
        assert_eq!(told(&broker), (vec![], vec![1]));
    });
}
