//! Two ports at one address: the first has the connection of a queue pair that is the second's.

use std::sync::{Mutex, MutexGuard};

use roce_bth::Packet;
use roce_cm::guid;
use roce_port::{ConnectArgs, QpnRange, Siblings, Steering};
use roce_verbs::provider::{RejectReason, VerbsError};

use crate::*;

const SERVICE: u16 = 7000;

/// The second port, and whether it is still open.
#[derive(Clone)]
struct Second(Arc<Mutex<(Host, bool)>>);

impl Second {
    fn lock(&self) -> MutexGuard<'_, (Host, bool)> {
        self.0.lock().unwrap()
    }
}

impl Siblings for Second {
    fn call(&self, qpn: Qpn, call: &mut dyn FnMut(&mut Port)) {
        let (host, open) = &mut *self.lock();
        if *open && Steering::new(2).unwrap().of_qpn(qpn) == 1 {
            call(&mut host.port);
        }
    }
}

struct Both {
    first: Host,
    second: Second,
}

fn shard(last: u8, index: usize) -> Host {
    let slot = Steering::new(2).unwrap().slot(index).unwrap();
    Host::with(last, |config| {
        config.cm.ca_guid = guid::keeping(u64::from(last));
        // One number is enough for those who don't need several, and the next queue pair gets it again.
        let first = slot.qpns().first + 5;
        config.qpns = QpnRange { first, last: first };
        config.cm.comm_ids = slot.comm_ids();
    })
}

impl Both {
    fn new(last: u8) -> Self {
        let (mut first, mut second) = (shard(last, 0), shard(last, 1));
        second.port.follow(&first.port);
        let second = Second(Arc::new(Mutex::new((second, true))));
        first.port.set_siblings(Arc::new(second.clone()));
        Self { first, second }
    }

    fn take(&mut self) -> Vec<Datagram> {
        let mut all = self.first.take();
        all.extend(self.second.lock().0.take());
        all
    }

    /// As the kernel finds the socket.
    fn give(&mut self, d: &Datagram) {
        let qpn = Packet::parse(&d.bytes[..d.segment_len]).unwrap().header.bth.dest_qp;
        match Steering::new(2).unwrap().of_qpn(qpn) {
            0 => self.first.give(d),
            _ => self.second.lock().0.give(d),
        }
        while let Some(conn) = self.poll_first_packet() {
            self.first.port.cm_notify(self.first.now, conn);
        }
    }

    fn poll_first_packet(&self) -> Option<ConnId> {
        self.second.lock().0.port.poll_first_packet()
    }

    fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        self.second.lock().0.port.qp_state(qpn)
    }
}

impl End for Both {
    fn take_all(&mut self) -> Vec<Datagram> {
        self.take()
    }

    fn take_in(&mut self, d: &Datagram) {
        self.give(d);
    }
}

fn the_request(events: &[CmEventKind]) -> ConnId {
    match events {
        [CmEventKind::Request { conn, .. }] => *conn,
        other => panic!("not one request: {other:?}"),
    }
}

/// One that connects with a queue pair of its second port, up to the request.
fn asking() -> (Both, Host, Qpn, ConnId, ConnId) {
    let (mut a, mut b) = (Both::new(1), Host::new(2));
    b.port.cm_listen(&ListenArgs::new(None, SERVICE, 10)).unwrap();
    let qa = a.second.lock().0.qp();
    let (local, remote) = ((a.first.addr, 0).into(), (b.addr, SERVICE).into());
    let ca = a.first.port.connect_qp(at(1), local, remote, qa, params(b"")).unwrap();
    a.take().iter().for_each(|d| b.give(d));
    let cb = the_request(&b.events());
    (a, b, qa, ca, cb)
}

/// The same, connected.
fn connected() -> (Both, Host, [Qpn; 2], [ConnId; 2]) {
    let (mut a, mut b, qa, ca, cb) = asking();
    let qb = b.qp();
    b.port.accept_qp(at(1), cb, qb, params(b"")).unwrap();
    exchange(&mut a, &mut b);
    (a, b, [qa, qb], [ca, cb])
}

/// One that accepts with a queue pair of its second port, up to the REP.
fn accepting() -> (Host, Both, [Qpn; 2], [ConnId; 2]) {
    let (mut a, mut b) = (Host::new(1), Both::new(2));
    b.first.port.cm_listen(&ListenArgs::new(None, SERVICE, 10)).unwrap();
    let (qa, qb) = (a.qp(), b.second.lock().0.qp());
    let (local, remote) = ((a.addr, 0).into(), (b.first.addr, SERVICE).into());
    let ca = a.port.connect_qp(at(1), local, remote, qa, params(b"")).unwrap();
    a.take().iter().for_each(|d| b.give(d));
    let cb = the_request(&b.first.events());
    b.first.port.accept_qp(at(1), cb, qb, params(b"")).unwrap();
    assert_eq!(b.qp_state(qb), Some(QpState::Rts));
    (a, b, [qa, qb], [ca, cb])
}

#[test]
fn a_connection_asked_for_carries_data_and_ends_with_both_queue_pairs_in_error() {
    let (mut a, mut b, [qa, qb], [ca, cb]) = connected();
    assert!(matches!(a.first.events()[..], [CmEventKind::Established { conn, .. }] if conn == ca));
    assert_eq!(a.qp_state(qa), Some(QpState::Rts));
    let (src, dst) = (a.second.lock().0.region(3000), b.region(3000));
    b.receive(qb, 7, &dst);
    a.second.lock().0.send(qa, 1, SendOp::Send, &src, 3000);
    exchange(&mut a, &mut b);
    assert!(a.second.lock().0.completions()[0].is_ok() && b.completions()[0].is_ok());

    b.port.cm_disconnect(at(1), cb);
    exchange(&mut a, &mut b);
    assert!(matches!(a.first.events()[..], [CmEventKind::Disconnected { conn, .. }] if conn == ca));
    assert_eq!(a.qp_state(qa), Some(QpState::Err));
}

#[test]
fn a_refused_connection_fails_its_queue_pair() {
    let (mut a, mut b, qa, _, cb) = asking();
    b.port.cm_reject(at(1), cb, RejectReason::CONSUMER, b"").unwrap();
    exchange(&mut a, &mut b);
    assert!(matches!(a.first.events()[..], [CmEventKind::Rejected { .. }]));
    assert_eq!(a.qp_state(qa), Some(QpState::Err));
}

#[test]
fn an_accepted_connection_is_ended_by_us() {
    let (mut a, mut b, [qa, qb], [_, cb]) = accepting();
    exchange(&mut b, &mut a);
    assert!(matches!(a.events()[..], [CmEventKind::Established { .. }]));
    assert!(matches!(b.first.events()[..], [CmEventKind::Established { .. }]));
    b.first.port.cm_destroy(at(1), cb);
    assert_eq!(b.qp_state(qb), Some(QpState::Err));
    exchange(&mut b, &mut a);
    assert_eq!(a.port.qp_state(qa), Some(QpState::Err));
}

#[test]
fn the_first_packet_of_the_second_port_says_as_much_as_the_rtu() {
    let (mut a, mut b, [qa, qb], [_, cb]) = accepting();
    let memory = b.second.lock().0.region(64);
    b.second.lock().0.receive(qb, 1, &memory);
    b.take().iter().for_each(|d| a.give(d));
    assert!(matches!(a.events()[..], [CmEventKind::Established { .. }]));
    // The RTU is lost.
    a.take();
    let src = a.region(64);
    a.send(qa, 1, SendOp::Send, &src, 64);
    a.take().iter().for_each(|d| b.give(d));
    assert!(matches!(b.first.events()[..], [CmEventKind::Established { conn, .. }] if conn == cb));
    assert!(b.second.lock().0.completions()[0].is_ok());
}

#[test]
fn another_queue_pair_with_its_number_is_none_of_its_business() {
    let (mut a, mut b, [qa, qb], [ca, _]) = connected();
    {
        let (host, _) = &mut *a.second.lock();
        host.port.destroy_qp(at(1), qa).unwrap();
        assert_eq!(host.qp(), qa);
        host.raise(qa, ip(9), Qpn::new(77));
    }
    a.first.port.cm_disconnect(at(1), ca);
    assert_eq!(a.qp_state(qa), Some(QpState::Rts));
    exchange(&mut a, &mut b);
    assert_eq!(b.port.qp_state(qb), Some(QpState::Err));
}

#[test]
fn a_second_port_that_is_closed_has_no_queue_pairs() {
    let (mut a, b) = (Both::new(1), Host::new(2));
    let qa = a.second.lock().0.qp();
    a.second.lock().1 = false;
    let (local, remote) = ((a.first.addr, 0).into(), (b.addr, SERVICE).into());
    let asked = a.first.port.connect_qp(at(1), local, remote, qa, params(b""));
    assert!(matches!(asked, Err(VerbsError::Closed)));
    assert!(a.take().is_empty());
}

#[test]
fn an_answer_for_a_queue_pair_that_is_gone_is_refused() {
    let (mut a, mut b, qa, ca, cb) = asking();
    let qb = b.qp();
    a.second.lock().0.port.destroy_qp(at(1), qa).unwrap();
    b.port.accept_qp(at(1), cb, qb, params(b"")).unwrap();
    exchange(&mut a, &mut b);
    assert!(matches!(a.first.events()[..], [CmEventKind::Failed { conn, .. }] if conn == ca));
    assert!(matches!(b.events()[..], [CmEventKind::Rejected { .. }]));
    assert_eq!(b.port.qp_state(qb), Some(QpState::Err));
}

#[test]
fn a_peer_that_keeps_packets_is_known_at_both_ports() {
    let mut a = Both::new(1);
    let mut b = Host::with(2, |config| config.cm.ca_guid = guid::keeping(2));
    b.port.cm_listen(&ListenArgs::new(None, SERVICE, 10)).unwrap();
    let (qa, qb) = (a.second.lock().0.qp(), b.qp());
    let (local, remote) = ((a.first.addr, 0).into(), (b.addr, SERVICE).into());
    let args = ConnectArgs::new(local, remote, qa, Psn::new(100), Mtu::B1024);
    a.first.port.cm_connect(at(1), &args).unwrap();
    a.take().iter().for_each(|d| b.give(d));
    let cb = the_request(&b.events());
    b.port.accept_qp(at(1), cb, qb, params(b"")).unwrap();
    b.take().iter().for_each(|d| a.give(d));
    assert!(matches!(a.first.events()[..], [CmEventKind::Reply { .. }]));
    // Only what goes to such a peer may be marked by switches.
    let (host, _) = &mut *a.second.lock();
    let src = host.region(64);
    host.raise(qa, b.addr, qb);
    host.send(qa, 1, SendOp::Send, &src, 64);
    assert!(matches!(&host.take()[..], [sent] if sent.tos & 3 == 2));
}
