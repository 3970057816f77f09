//! Bounds of a connection manager: queues, private data, addresses, identifiers.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::common::{CLIENT, SERVER, World, error, pair::*};
use roce_port::cm::{
    CmConfig, ConnectArgs, DropReason, Event, Manager,
    mad::{Mad, Message},
    state::State,
};
use roce_verbs::Instant;

#[test]
fn lingering_connections_are_bounded() {
    let mut w = World::new(1, |guid| CmConfig {
        max_lingering: 3,
        ..config(guid)
    });
    for i in 0..10 {
        let c = connect(&mut w, 0x11 + i);
        w.m[C].destroy(w.now, c);
    }
    assert_eq!(w.m[C].usage().connections, 3);
    assert_eq!(w.m[C].counters().forgotten, 7);
}

#[test]
fn outgoing_queue_is_bounded() {
    let mut w = World::new(1, |guid| CmConfig {
        max_queued_mads: 2,
        ..config(guid)
    });
    let req = lone_req(&mut w, 0x11);
    for i in 0..5 {
        let r = with_req(req, |r| r.local_comm_id += i);
        w.m[S].handle_mad(w.now, SERVER, CLIENT, &r.mad);
    }
    assert_eq!(std::iter::from_fn(|| w.m[S].poll_mad()).count(), 2);
    assert_eq!(w.m[S].counters().dropped(DropReason::OutQueueFull), 3);
}

#[test]
fn private_data_limits_and_addresses() {
    let mut w = world();
    let mut a = args(0x11);
    a.params.private_data = vec![0; 57];
    assert_eq!(
        error(w.m[C].connect(w.now, &a)),
        "invalid argument: 57 bytes of private data, at most 56"
    );
    a.params.private_data = vec![0; 56];
    assert!(w.m[C].connect(w.now, &a).is_ok());
    for (local, remote) in [
        ("10.0.0.1:0", "[::1]:5"),
        ("0.0.0.0:0", "10.0.0.1:5"),
        ("10.0.0.1:0", "224.0.0.1:5"),
    ] {
        let a = ConnectArgs {
            local: local.parse().unwrap(),
            remote: remote.parse().unwrap(),
            ..args(0x12)
        };
        assert_eq!(
            error(w.m[C].connect(w.now, &a)),
            "local and remote address cannot be used together",
            "{local} {remote}"
        );
    }
    let (mut w, _) = listening();
    let (_, s) = requested(&mut w, 0x11);
    let mut reply = accept_args(0x22);
    reply.params.private_data = vec![0; 197];
    assert_eq!(
        error(w.m[S].accept(w.now, s, &reply)),
        "invalid argument: 197 bytes of private data, at most 196"
    );
    assert_eq!(w.m[S].state(s), Some(State::ReqReceived));
}

#[test]
fn ipv6_and_an_ephemeral_port() {
    let here: IpAddr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1).into();
    let there: IpAddr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2).into();
    let mut w = world();
    w.m[S].listen(Some(there), PORT, 1).unwrap();
    let a = ConnectArgs {
        local: SocketAddr::new(here, 0),
        remote: SocketAddr::new(there, PORT),
        ..args(0x11)
    };
    w.m[C].connect(w.now, &a).unwrap();
    let out = w.m[C].poll_mad().unwrap();
    assert_eq!((out.local, out.remote), (here, there));
    w.m[S].handle_mad(w.now, there, here, &out.mad);
    let Some(Event::Request {
        local, remote, path, ..
    }) = w.m[S].poll_event()
    else {
        panic!("no request")
    };
    assert_eq!((local, remote.ip()), (a.remote, here));
    assert!(remote.port() >= 32_768);
    assert_eq!((path.av.local, path.av.remote), (there, here));
}

#[test]
fn a_manager_connects_to_itself() {
    let mut m = Manager::new(config(1), [1; 32]);
    let now = Instant::ZERO;
    m.listen(None, PORT, 1).unwrap();
    let c = m
        .connect(
            now,
            &ConnectArgs {
                local: SocketAddr::new(SERVER, 0),
                ..args(0x11)
            },
        )
        .unwrap();
    let settle = |m: &mut Manager| {
        while let Some(o) = m.poll_mad() {
            m.handle_mad(now, o.remote, o.local, &o.mad);
        }
    };
    settle(&mut m);
    let Some(Event::Request { conn: s, .. }) = m.poll_event() else {
        panic!("no request")
    };
    m.accept(now, s, &accept_args(0x22)).unwrap();
    settle(&mut m);
    assert!(matches!(m.poll_event(), Some(Event::Reply { .. })));
    m.qp_ready(now, c).unwrap();
    settle(&mut m);
    assert_eq!(
        m.poll_event(),
        Some(Event::Established {
            conn: s,
            private_data: vec![]
        })
    );
    m.disconnect(now, s);
    settle(&mut m);
    let ends: Vec<_> = std::iter::from_fn(|| m.poll_event()).collect();
    assert_eq!(
        ends,
        [
            Event::Disconnected {
                conn: c,
                timed_out: false
            },
            Event::Disconnected {
                conn: s,
                timed_out: false
            }
        ]
    );
}

#[test]
fn communication_ids_differ_between_seeds_and_repeat_with_one() {
    let ids = |seed: u8| -> Vec<u32> {
        let mut m = Manager::new(config(1), [seed; 32]);
        (0..3)
            .map(|i| {
                m.connect(Instant::ZERO, &args(0x11 + i)).unwrap();
                match Mad::parse(&m.poll_mad().unwrap().mad).unwrap().message {
                    Message::Req(r) => r.local_comm_id,
                    _ => unreachable!(),
                }
            })
            .collect()
    };
    let (a, b) = (ids(1), ids(2));
    assert_eq!(a, ids(1));
    assert!(a.iter().all(|x| !b.contains(x)));
    assert!(a[1] != a[0] + 1 || a[2] != a[1] + 1, "not counted up");
}
