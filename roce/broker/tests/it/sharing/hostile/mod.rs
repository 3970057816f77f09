//! Forged management datagrams, and users who want all there is.

use std::net::UdpSocket;

use roce_broker::proto::{Grant, Place as Number};
use roce_bth::{Bth, Deth, Header, ICRC_LEN, Opcode, Psn, QKey, Qpn};
use roce_icrc::{Flow, IpPair};
use roce_port::cm::mad::{MAD_LEN, Mad, Message, Rep};

use super::*;

/// A MAD from one queue pair 1 to another's, sealed.
fn packet(from: &UdpSocket, to: IpAddr, mad: &[u8; MAD_LEN]) -> Vec<u8> {
    let from = from.local_addr().unwrap();
    let flow = Flow {
        ip: IpPair::try_from((from.ip(), to)).unwrap(),
        src_port: from.port(),
        dst_port: 4791,
    };
    let mut header = Header::new(Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(1)));
    header.deth = Some(Deth {
        qkey: QKey::GSI,
        reserved: 0,
        src_qp: Qpn::GSI,
    });
    let mut bytes = vec![0; header.wire_len() + mad.len() + ICRC_LEN];
    let at = header.emit(&mut bytes);
    bytes[at..at + mad.len()].copy_from_slice(mad);
    flow.seal(0, &mut bytes);
    bytes
}

/// A REP that nobody has asked for.
fn forged_rep(member: Number, n: u32) -> Mad {
    let rep = Rep {
        local_comm_id: 1 + n,
        remote_comm_id: member.numbers().comm_ids().0 + n,
        local_qpn: Qpn::new(2 + n),
        ..Rep::default()
    };
    Mad::new(u64::from(n), rep)
}

fn open(raw: &Raw, addr: IpAddr) {
    let request = Request::Open { addr, again: false };
    raw.say(&ToBroker::Request { seq: 2, request });
    assert!(matches!(raw.reply(), Reply::Opened { .. }));
}

fn counter(s: &Statistics, name: &str) -> u64 {
    s.counters.get(name).copied().unwrap_or(0)
}

#[test]
fn forged_reps_make_no_connections_and_send_nothing_to_the_victim() {
    const FORGED: u32 = 17_000;
    let (addr, victim): (IpAddr, IpAddr) = ([127, 45, 2, 1].into(), [127, 45, 2, 2].into());
    let place = Place::new();
    let stays = place.join();
    let dies = Raw::at(&place.broker_dir());
    let own = dies.hello(None);
    open(&dies, addr);
    let socket = UdpSocket::bind((victim, 4791)).unwrap();
    for n in 0..FORGED {
        let bytes = packet(&socket, addr, &forged_rep(own.place, n).emit());
        socket.send_to(&bytes, (addr, 4791)).unwrap();
        // No more at a time than the broker's socket takes.
        if n % 256 == 255 {
            let sent = u64::from(n) + 1;
            place.until("they have arrived", |s| counter(s, "rx_mads") + 64 >= sent);
        }
    }
    let now = place.until("most have arrived", |s| counter(s, "rx_mads") + 64 >= FORGED.into());
    let known: u64 = now.processes.iter().map(|p| p.connections).sum();
    assert_eq!(known, 0, "connections are what members tell");
    drop(dies);
    let now = place.until("it is dead", |s| s.processes.len() == 1);
    assert_eq!(counter(&now, "tx_dreqs_for_dead"), 0);
    socket.set_nonblocking(true).unwrap();
    let mut bytes = [0; 512];
    while let Ok(len) = socket.recv(&mut bytes) {
        let mad = &bytes[20..len - ICRC_LEN];
        let message = Mad::parse(mad).map(|m| m.message);
        assert!(!matches!(message, Ok(Message::Dreq(_))), "the victim is told of an end");
    }
    drop(stays);
}

#[test]
fn a_place_is_not_given_to_who_only_claims_it() {
    let place = Place::new();
    let stays = place.join();
    let member = Raw::at(&place.broker_dir());
    let own = member.hello(None);
    let claim = |rejoin: Grant| {
        let claims = Raw::at(&place.broker_dir());
        let request = Request::Hello {
            version: roce_broker::proto::VERSION,
            name: "claims".into(),
            rejoin: Some(rejoin),
        };
        claims.say(&ToBroker::Request { seq: 1, request });
        claims.reply()
    };
    let wrong = Grant {
        token: own.token ^ 1,
        ..own
    };
    assert!(matches!(claim(own), Reply::Refused { .. }), "it is there");
    drop(member);
    place.until("it is gone", |s| s.processes.len() == 1);
    assert!(matches!(claim(wrong), Reply::Refused { .. }), "it rests");
    assert!(matches!(claim(own), Reply::Welcome { .. }), "with its token");
    drop(stays);
}

/// A broker for all users, which stays.
struct Shared {
    place: Place,
    broker: Child,
}

impl Shared {
    fn new(options: &[&str]) -> Self {
        let mut place = Place::new();
        place.program = "/bin/false".into();
        let broker = Command::new(BROKER)
            .args(["broker", "--shared", "--dir"])
            .arg(place.broker_dir())
            .args(options)
            .env("FERROCE_BROKER_LINGER", "0.5")
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        place.until("the broker serves", |_| true);
        Self { place, broker }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = self.broker.kill();
        let _ = self.broker.wait();
    }
}

#[test]
fn a_broker_that_stays_closes_addresses_that_nobody_uses() {
    let shared = Shared::new(&[]);
    for n in 3..9 {
        let addr: IpAddr = [127, 45, 2, n].into();
        drop(shared.place.join().open(addr).unwrap());
    }
    shared.place.until("all are closed", |s| s.addrs.is_empty());
    for n in 3..9 {
        UdpSocket::bind((IpAddr::from([127, 45, 2, n]), 4791)).unwrap();
    }
}

#[test]
fn what_is_refused_for_a_quota_is_said_and_counted() {
    let shared = Shared::new(&["--max-places", "2", "--max-addresses", "1", "--max-ports", "3"]);
    let place = &shared.place;
    let (one, other) = (place.join(), place.join());
    let text = |e: Error| e.to_string();
    assert!(text(join(&place.how()).unwrap_err()).contains("--max-places"));
    one.open([127, 45, 2, 10].into()).unwrap();
    other.open([127, 45, 2, 10].into()).unwrap();
    assert!(text(other.open([127, 45, 2, 11].into()).unwrap_err()).contains("--max-addresses"));
    for member in [&one, &one, &other] {
        member.bind(0x0106_0000, None, false).unwrap();
    }
    assert!(text(other.bind(0x0106_0000, None, false).unwrap_err()).contains("--max-ports"));
    let now = place.statistics();
    let counted = ["refused_places", "refused_addresses", "refused_ports"].map(|name| counter(&now, name));
    assert_eq!(counted, [1, 1, 1]);
    drop(one);
    place.until("there is room", |s| s.processes.len() == 1);
    drop(place.join());
}
