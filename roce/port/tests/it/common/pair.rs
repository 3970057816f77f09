//! A client (0) and a server (1), brought to the states that a case starts in.

use std::net::SocketAddr;

use roce_port::cm::{
    AcceptArgs, CmConfig, ConnId, ConnParams, ConnectArgs, Event, ListenId, OutMad, RemoteQp,
    mad::{Attribute, Mad, Message, Rej, Req},
};
use roce_verbs::{Mtu, Psn, Qpn, provider::NoAnswer};

use super::{CLIENT, SERVER, World};

pub const PORT: u16 = 1234;
pub const C: usize = 0;
pub const S: usize = 1;

pub fn config(guid: u64) -> CmConfig {
    CmConfig::new(guid, Mtu::B4096)
}

pub fn world() -> World {
    World::new(1, config)
}

pub fn listening() -> (World, ListenId) {
    let mut w = world();
    let l = w.m[S].listen(None, PORT, 8).unwrap();
    (w, l)
}

pub fn args(qpn: u32) -> ConnectArgs {
    ConnectArgs::new(
        SocketAddr::new(CLIENT, 40_000),
        SocketAddr::new(SERVER, PORT),
        Qpn::new(qpn),
        Psn::new(qpn + 1000),
        Mtu::B1024,
    )
}

pub fn accept_args(qpn: u32) -> AcceptArgs {
    AcceptArgs::new(Qpn::new(qpn), Psn::new(qpn + 1000), ConnParams::default())
}

/// The end of an attempt that nobody answered.
pub fn unreachable(conn: ConnId) -> Event {
    let why = NoAnswer::Timeout;
    Event::Unreachable { conn, why }
}

pub fn connect(w: &mut World, qpn: u32) -> ConnId {
    w.m[C].connect(w.now, &args(qpn)).unwrap()
}

/// The request that waits at the server.
pub fn request(w: &mut World) -> (ConnId, RemoteQp) {
    match w.m[S].poll_event() {
        Some(Event::Request { conn, path, .. }) => (conn, path),
        other => panic!("no request but {other:?}"),
    }
}

/// A client connection and its request at the server.
pub fn requested(w: &mut World, qpn: u32) -> (ConnId, ConnId) {
    let c = connect(w, qpn);
    w.settle();
    let (s, _) = request(w);
    (c, s)
}

/// Runs a handshake up to the reply's arrival at the client.
pub fn replied(w: &mut World, qpn: u32) -> (ConnId, ConnId) {
    let (c, s) = requested(w, qpn);
    w.m[S].accept(w.now, s, &accept_args(qpn + 1)).unwrap();
    w.settle();
    assert!(matches!(w.m[C].poll_event(), Some(Event::Reply { .. })));
    (c, s)
}

pub fn established(w: &mut World, qpn: u32) -> (ConnId, ConnId) {
    let (c, s) = replied(w, qpn);
    w.m[C].qp_ready(w.now, c).unwrap();
    w.settle();
    assert_eq!(
        w.m[S].poll_event(),
        Some(Event::Established {
            conn: s,
            private_data: vec![]
        })
    );
    (c, s)
}

pub fn kind(out: &OutMad) -> Attribute {
    Mad::parse(&out.mad).unwrap().message.attribute()
}

/// Kinds of MADs that one side sent.
pub fn kinds_from(w: &World, side: usize) -> Vec<Attribute> {
    let ip = [CLIENT, SERVER][side];
    w.sent.iter().filter(|o| o.local == ip).map(kind).collect()
}

pub fn last_sent(w: &World, a: Attribute) -> OutMad {
    *w.sent
        .iter()
        .rev()
        .find(|o| kind(o) == a)
        .unwrap_or_else(|| panic!("no {a:?} was sent"))
}

pub fn last_rej(w: &World) -> Rej {
    match Mad::parse(&last_sent(w, Attribute::Rej).mad).unwrap().message {
        Message::Rej(r) => r,
        _ => unreachable!(),
    }
}

/// Delivers a MAD again.
pub fn again(w: &mut World, out: OutMad) {
    let side = usize::from(out.remote == SERVER);
    w.m[side].handle_mad(w.now, out.remote, out.local, &out.mad);
    w.settle();
}

/// Returns a MAD whose REQ is changed.
pub fn with_req(out: OutMad, change: impl FnOnce(&mut Req)) -> OutMad {
    let mut mad = Mad::parse(&out.mad).unwrap();
    if let Message::Req(r) = &mut mad.message {
        change(r);
    }
    OutMad { mad: mad.emit(), ..out }
}

/// A REQ that was made but not delivered.
pub fn lone_req(w: &mut World, qpn: u32) -> OutMad {
    connect(w, qpn);
    w.m[C].poll_mad().unwrap()
}
