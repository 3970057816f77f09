//! Answers, late and in time, and what goes with a broker.

use std::{path::PathBuf, thread};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::{state::MAX_GIVEN_UP, *};
use crate::proto::Refusal;

/// A member, and the broker's end of its connection.
fn member() -> (Arc<Shared>, Arc<OwnedFd>, OwnedFd) {
    member_in("/nonexistent".into())
}

fn member_in(dir: PathBuf) -> (Arc<Shared>, Arc<OwnedFd>, OwnedFd) {
    let (link, broker) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    let link = Arc::new(link);
    let config = JoinConfig {
        dir,
        program: None,
        name: "test".into(),
    };
    let given = Rejoin {
        place: Place { slot: 3, generation: 1 },
        token: 7,
        parts: Parts::default(),
    };
    let shared = Shared::new(config, given, None, link.clone()).unwrap();
    (Arc::new(shared), link, broker)
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
    state.awaited.is_empty() && state.replies.is_empty() && state.given_up.is_empty() && state.bindings.is_empty()
}

#[test]
fn what_comes_too_late_is_given_back() {
    let (shared, link, broker) = member();
    let addr = Some(IpAddr::from([127, 0, 0, 1]));
    let bind = Request::Bind {
        service: 0x0106_0000,
        addr,
        reuse: false,
    };
    let listen = Request::Listen { service: 9, addr };
    let bound = Reply::Bound { service: 0x0106_1234 };
    let unbind = "Unbind { service: 17175092, addr: Some(127.0.0.1) }";
    let cases = [
        (&bind, bound, Some(unbind)),
        (&bind, refused(), None),
        (
            &listen,
            Reply::Done,
            Some("Unlisten { service: 9, addr: Some(127.0.0.1) }"),
        ),
        (&listen, refused(), None),
    ];
    for (request, answer, told) in cases {
        let given_up = shared.call_until(request, Instant::now());
        assert!(matches!(given_up, Err(JoinError::Timeout)));
        let (seq, _) = asked(&broker, true).unwrap();
        let (theirs, ours) = std::io::pipe().unwrap();
        let late = reply(seq, answer, vec![ours.into()]);
        shared.take(&link, late);
        assert_eq!(asked(&broker, false).map(|(_, text)| text).as_deref(), told);
        assert_eq!(
            std::io::read_to_string(theirs).unwrap(),
            "",
            "its descriptors are closed"
        );
        // Nobody notes what is not had, and a repetition means nothing.
        shared.take(&link, reply(seq, Reply::Done, vec![]));
        assert!(is_empty(&shared.state.lock()) && asked(&broker, false).is_none());
    }
}

/// The broker gives a member the sockets of an address once.
#[test]
fn sockets_that_come_too_late_are_for_who_asks_next() {
    let (shared, link, broker) = member();
    let addr = IpAddr::from([127, 0, 0, 1]);
    let open = Request::Open { addr, again: false };
    assert!(matches!(
        shared.call_until(&open, Instant::now()),
        Err(JoinError::Timeout)
    ));
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
        shared.take(&link, reply(late, given, vec![ours.into()]));
        shared.take(&link, reply(seq, refused(), vec![]));
        assert_eq!(waits.join().unwrap().unwrap().receivers.len(), 1);
    });
    // The next broker is told of it, and nobody gets it twice.
    let state = shared.state.lock();
    assert_eq!(state.opened.iter().map(|o| o.addr).collect::<Vec<_>>(), [addr]);
    assert!(state.given.is_empty() && state.given_up.is_empty() && state.replies.is_empty());
    drop(state);
}

#[test]
fn a_late_answer_is_not_taken_for_another() {
    let (shared, link, broker) = member();
    let listen = Request::Listen { service: 9, addr: None };
    assert!(shared.call_until(&listen, Instant::now()).is_err());
    let (late, _) = asked(&broker, true).unwrap();
    thread::scope(|s| {
        let waits = s.spawn(|| shared.call(&listen));
        let (seq, _) = asked(&broker, true).unwrap();
        shared.take(&link, reply(late, refused(), vec![]));
        shared.take(&link, reply(seq + 1, refused(), vec![]));
        assert!(shared.state.lock().replies.is_empty());
        shared.take(&link, reply(seq, Reply::Done, vec![]));
        assert!(matches!(
            waits.join().unwrap(),
            Ok(Record {
                message: Reply::Done,
                ..
            })
        ));
    });
    let state = shared.state.lock();
    assert!(state.bindings.len() == 1 && state.bindings[0].listening);
}

#[test]
fn requests_that_are_given_up_are_bounded() {
    let (shared, link, broker) = member();
    let listen = Request::Listen { service: 9, addr: None };
    for _ in 0..MAX_GIVEN_UP + 50 {
        assert!(shared.call_until(&listen, Instant::now()).is_err());
        assert!(asked(&broker, true).is_some());
    }
    let state = shared.state.lock();
    assert_eq!((state.given_up.len(), state.awaited.len()), (MAX_GIVEN_UP, 0));
    drop((state, link));
}

#[test]
fn what_was_given_back_while_a_broker_was_told_is_told_too() {
    let binding = |service, bound, listening| Binding {
        service,
        addr: None,
        reuse: false,
        bound,
        listening,
    };
    let told = [
        binding(1, true, true),
        binding(2, false, true),
        binding(2, false, true),
        binding(3, true, false),
    ];
    assert!(given_back(&told, &told).is_empty());
    let left = [binding(1, true, false), binding(2, false, true)];
    let out = given_back(&told, &left);
    let text: Vec<String> = out.iter().map(|r| format!("{r:?}")).collect();
    assert_eq!(
        text,
        [
            "Unlisten { service: 1, addr: None }",
            "Unlisten { service: 2, addr: None }",
            "Unbind { service: 3, addr: None }"
        ]
    );
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
    let (shared, _link, _broker) = member_in(dir.path().into());
    shared.state.lock().bindings.push(Binding {
        service: 7,
        addr: None,
        reuse: false,
        bound: true,
        listening: false,
    });
    let member = shared.clone();
    thread::spawn(move || member.reconnect());
    let broker = rustix::net::accept(&listener).unwrap();
    let (place, token, parts) = (shared.place, shared.token, shared.parts);
    answered(&broker, Reply::Welcome { place, token, parts });
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
    assert!(answered(&broker, Reply::Done).contains("done: true"));
    is_back.recv().unwrap();
    assert_eq!(
        asked(&broker, false).map(|(_, text)| text).as_deref(),
        Some("Unbind { service: 7, addr: None }")
    );
}
