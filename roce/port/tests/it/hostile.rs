//! Anything may arrive on QP1.

use std::net::{IpAddr, SocketAddr};

use crate::common::{CLIENT, Rng, SERVER, World, ms};
use roce_port::cm::{
    AcceptArgs, CmConfig, ConnId, ConnParams, ConnectArgs, DropReason, Event, OutMad, RejectReason,
    mad::{Attribute, Mad, Message},
    state::State,
};
use roce_verbs::{Mtu, Psn, Qpn};

const PORT: u16 = 1234;
const HALF_OPEN: usize = 16;
const CONNECTIONS: usize = 40;

fn world(seed: u64) -> World {
    let mut w = World::new(seed, |guid| CmConfig {
        max_half_open: HALF_OPEN,
        max_connections: CONNECTIONS,
        max_queued_mads: 64,
        ..CmConfig::new(guid, Mtu::B4096)
    });
    for m in &mut w.m {
        m.listen(None, PORT, 8).unwrap();
    }
    w
}

/// Brings a pair of connections into some state, and gives the MADs of its whole life as material.
fn stage(w: &mut World, stage: u64, qpn: u32) -> (ConnId, Option<ConnId>) {
    let args = ConnectArgs::new(
        SocketAddr::new(CLIENT, 0),
        SocketAddr::new(SERVER, PORT),
        Qpn::new(qpn),
        Psn::new(qpn),
        Mtu::B1024,
    );
    let c = w.m[0].connect(w.now, &args).unwrap();
    w.settle();
    let mut s = None;
    while let Some(e) = w.m[1].poll_event() {
        if let Event::Request { conn, .. } = e {
            s = Some(conn);
        }
    }
    let Some(server) = s else { return (c, None) };
    let accept = AcceptArgs::new(Qpn::new(qpn + 1), Psn::new(qpn), ConnParams::default());
    if stage >= 1 && w.m[1].accept(w.now, server, &accept).is_ok() {
        w.settle();
    }
    if stage >= 2 {
        let _ = w.m[0].qp_ready(w.now, c);
        w.settle();
    }
    if stage == 3 {
        w.m[0].disconnect(w.now, c);
        w.pump();
    }
    if stage == 4 {
        w.m[1].disconnect(w.now, server);
        w.settle();
    }
    if stage == 5 {
        let _ = w.m[1].reject(w.now, server, RejectReason::CONSUMER, &[]);
    }
    (c, s)
}

/// A changed MAD: bits flipped, fields replaced by values from other MADs, another kind, another length.
fn mutate(rng: &mut Rng, pool: &[OutMad]) -> (IpAddr, IpAddr, Vec<u8>) {
    let base = pool[rng.below(pool.len() as u64) as usize];
    let mut mad = base.mad.to_vec();
    for _ in 0..rng.below(4) {
        match rng.below(6) {
            0 => {
                let bit = rng.below(256 * 8) as usize;
                mad[bit / 8] ^= 1 << (bit % 8);
            }
            1 => mad[17] = 0x10 + rng.below(12) as u8,
            2 => {
                let other = pool[rng.below(pool.len() as u64) as usize].mad;
                let at = 24 + 4 * rng.below(12) as usize;
                mad[at..at + 4].copy_from_slice(&other[at..at + 4]);
            }
            3 => {
                let other = pool[rng.below(pool.len() as u64) as usize].mad;
                let (from, to) = (24 + 4 * rng.below(2) as usize, 24 + 4 * rng.below(2) as usize);
                mad[to..to + 4].copy_from_slice(&other[from..from + 4]);
            }
            4 => {
                let at = 24 + rng.below(232) as usize;
                mad[at] = rng.next() as u8;
            }
            _ => mad.iter_mut().skip(24).for_each(|b| *b = rng.next() as u8),
        }
    }
    if rng.chance(3) {
        mad.truncate(rng.below(257) as usize);
    }
    let (to, from) = match rng.below(20) {
        0 => (base.local, base.remote),
        1 => (base.remote, [10, 0, 0, rng.below(256) as u8].into()),
        2 => (base.remote, [224, 0, 0, 1].into()),
        _ => (base.remote, base.local),
    };
    (to, from, mad)
}

#[test]
fn mutated_mads_in_every_state() {
    let mut seen_drops = [0u64; DropReason::ALL.len()];
    for seed in 0..150 {
        let mut w = world(seed);
        let mut conns = Vec::new();
        for i in 0..6 {
            conns.push(stage(&mut w, i, 0x100 + 10 * i as u32));
        }
        let mut pool = w.sent.clone();
        for round in 0..400 {
            let (to, from, mad) = mutate(&mut w.rng, &pool);
            let side = usize::from(to == SERVER);
            w.m[side].handle_mad(w.now, to, from, &mad);
            if round % 50 == 0 {
                w.run_for(ms(300));
                pool.extend(w.sent.iter().rev().take(5).copied().collect::<Vec<_>>());
            }
            if w.rng.chance(2) {
                let (c, s) = conns[w.rng.below(6) as usize];
                match w.rng.below(3) {
                    0 => w.m[0].disconnect(w.now, c),
                    1 => drop(w.m[0].qp_ready(w.now, c)),
                    _ => {
                        if let Some(s) = s {
                            w.m[1].destroy(w.now, s);
                        }
                    }
                }
            }
            for m in &mut w.m {
                assert!(m.usage().connections <= CONNECTIONS);
            }
            w.settle();
        }
        for (i, r) in DropReason::ALL.into_iter().enumerate() {
            seen_drops[i] += w.m[0].counters().dropped(r) + w.m[1].counters().dropped(r);
        }
        still_works(&mut w, seed);
    }
    for r in [
        DropReason::Length,
        DropReason::Header,
        DropReason::Attribute,
        DropReason::Field,
        DropReason::UnknownConnection,
        DropReason::WrongAddress,
        DropReason::State,
        DropReason::Duplicate,
    ] {
        assert!(seen_drops[r as usize] > 0, "the mutations never reached {r:?}");
    }
}

/// After whatever happened a well-behaved peer still gets its connection, and the manager comes to rest.
fn still_works(w: &mut World, seed: u64) {
    for side in 0..2 {
        let mut known: Vec<ConnId> = (0..2000)
            .map(ConnId)
            .filter(|c| w.m[side].state(*c).is_some())
            .collect();
        known.extend(std::iter::from_fn(|| w.m[side].poll_event()).map(|e| e.conn()));
        for c in known {
            w.m[side].destroy(w.now, c);
        }
    }
    w.run_dry();
    assert_eq!(
        (w.m[0].usage().connections, w.m[1].usage().connections),
        (0, 0),
        "seed {seed}"
    );
    let (c, s) = stage(w, 2, 0x5000);
    assert_eq!(w.m[0].state(c), Some(State::Established), "seed {seed}");
    assert_eq!(w.m[1].state(s.unwrap()), Some(State::Established), "seed {seed}");
}

#[test]
fn random_bytes() {
    let mut w = world(1);
    let mut bytes = [0u8; 300];
    for i in 0..20_000u32 {
        bytes.iter_mut().for_each(|b| *b = w.rng.next() as u8);
        if i % 2 == 0 {
            bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
            bytes[16..18].copy_from_slice(&[0, 0x10 + (i / 2 % 11) as u8]);
        }
        let len = if i % 3 == 0 { w.rng.below(300) as usize } else { 256 };
        w.m[1].handle_mad(w.now, SERVER, CLIENT, &bytes[..len]);
        w.m[1].handle_timeout(w.now);
        while w.m[1].poll_mad().is_some() {}
    }
    assert_eq!(w.m[1].usage().connections, 0);
    assert_eq!(w.m[1].poll_event(), None);
}

/// A flood of requests with ever new numbers from ever new addresses: bounded, and drops are counted.
#[test]
fn flood_of_requests() {
    let mut w = world(1);
    let args = ConnectArgs::new(
        SocketAddr::new(CLIENT, 0),
        SocketAddr::new(SERVER, PORT),
        Qpn::new(5),
        Psn::new(5),
        Mtu::B1024,
    );
    w.m[0].connect(w.now, &args).unwrap();
    let out = w.m[0].poll_mad().unwrap();
    let Message::Req(req) = Mad::parse(&out.mad).unwrap().message else {
        panic!("not a REQ")
    };
    for i in 0..5000u32 {
        let from: IpAddr = [10, 1, (i >> 8) as u8, i as u8].into();
        let mut r = req;
        r.local_comm_id = i + 1;
        r.local_qpn = Qpn::new(i + 2);
        r.primary_local_gid = from;
        r.private_data[16..20].copy_from_slice(&[10, 1, (i >> 8) as u8, i as u8]);
        w.m[1].handle_mad(w.now, SERVER, from, &Mad::new(1, r).emit());
        while let Some(e) = w.m[1].poll_event() {
            match e {
                Event::Request { conn, .. } => {
                    let a = AcceptArgs::new(Qpn::new(0x9000 + i), Psn::new(0), ConnParams::default());
                    w.m[1].accept(w.now, conn, &a).unwrap();
                }
                Event::Unreachable { conn, .. } => w.m[1].destroy(w.now, conn),
                other => panic!("{other:?}"),
            }
        }
        while w.m[1].poll_mad().is_some() {}
    }
    assert_eq!(w.m[1].usage().connections, HALF_OPEN);
    assert_eq!(w.m[1].counters().displaced, 5000 - HALF_OPEN as u64);
    assert_eq!(w.m[1].counters().received(Attribute::Req), 5000);
    assert_eq!(w.m[1].counters().sent(Attribute::Rep), 5000);
}
