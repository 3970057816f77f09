//! Two ports at one address: the first has the connection of a queue pair that is the second's.

use roce_bth::Packet;
use roce_port::cm::guid;
use roce_port::{ConnectArgs, QpCommand, QpnRange, Steering};
use roce_verbs::provider::{RejectReason, VerbsError};

use super::*;

const SERVICE: u16 = 7000;

struct Both {
    first: Host,
    second: Host,
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
        let (first, mut second) = (shard(last, 0), shard(last, 1));
        second.port.leave_gsi();
        Self { first, second }
    }

    /// Starts to connect a queue pair of the second port.
    fn connect(&mut self, qpn: Qpn, remote: IpAddr) -> ConnId {
        let (local, remote) = ((self.first.addr, 0).into(), (remote, SERVICE).into());
        let offer = self.second.port.offer_qp(at(1), qpn, &params(b"")).unwrap();
        let asked = self
            .first
            .port
            .connect_offered(at(1), local, remote, &offer, params(b""));
        asked.unwrap()
    }

    /// Accepts a request with a queue pair of the second port.
    fn accept(&mut self, conn: ConnId, qpn: Qpn) {
        let params = params(b"");
        let path = self.first.port.accept_path(conn, &params).unwrap();
        let offer = self.second.port.offer_accepted(at(1), conn, qpn, &path, &params);
        self.first
            .port
            .accept_offered(at(1), conn, &offer.unwrap(), params)
            .unwrap();
    }

    /// Passes on the messages between the ports, and has them make events of those.
    fn pass_on(&mut self) {
        loop {
            self.first.follow();
            let (command, report) = (self.first.port.poll_command(), self.second.port.poll_report());
            if command.is_none() && report.is_none() {
                return;
            }
            if let Some(command) = command {
                self.second.port.handle_command(at(1), command);
            }
            if let Some(report) = report {
                self.first.port.handle_report(at(1), report);
            }
        }
    }

    fn events(&mut self) -> Vec<CmEventKind> {
        self.pass_on();
        self.first.events()
    }

    fn take(&mut self) -> Vec<Datagram> {
        self.pass_on();
        let mut all = self.first.take();
        all.extend(self.second.take());
        all
    }

    /// As the kernel finds the socket.
    fn give(&mut self, d: &Datagram) {
        let qpn = Packet::parse(&d.bytes[..d.segment_len]).unwrap().header.bth.dest_qp;
        match Steering::new(2).unwrap().of_qpn(qpn) {
            0 => self.first.give(d),
            _ => self.second.give(d),
        }
        self.pass_on();
    }

    fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        self.second.port.qp_state(qpn)
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
    let qa = a.second.qp();
    let ca = a.connect(qa, b.addr);
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
    let (qa, qb) = (a.qp(), b.second.qp());
    let (local, remote) = ((a.addr, 0).into(), (b.first.addr, SERVICE).into());
    let ca = a.port.connect_qp(at(1), local, remote, qa, params(b"")).unwrap();
    a.take().iter().for_each(|d| b.give(d));
    let cb = the_request(&b.events());
    b.accept(cb, qb);
    assert_eq!(b.qp_state(qb), Some(QpState::Rts));
    (a, b, [qa, qb], [ca, cb])
}

#[test]
fn a_connection_asked_for_carries_data_and_ends_with_both_queue_pairs_in_error() {
    let (mut a, mut b, [qa, qb], [ca, cb]) = connected();
    assert!(matches!(a.events()[..], [CmEventKind::Established { conn, .. }] if conn == ca));
    assert_eq!(a.qp_state(qa), Some(QpState::Rts));
    let (src, dst) = (a.second.region(3000), b.region(3000));
    b.receive(qb, 7, &dst);
    a.second.send(qa, 1, SendOp::Send, &src, 3000);
    exchange(&mut a, &mut b);
    assert!(a.second.completions()[0].is_ok() && b.completions()[0].is_ok());

    b.port.cm_disconnect(at(1), cb);
    exchange(&mut a, &mut b);
    assert!(matches!(a.events()[..], [CmEventKind::Disconnected { conn, .. }] if conn == ca));
    assert_eq!(a.qp_state(qa), Some(QpState::Err));
}

#[test]
fn a_refused_connection_fails_its_queue_pair() {
    let (mut a, mut b, qa, _, cb) = asking();
    b.port.cm_reject(at(1), cb, RejectReason::CONSUMER, b"").unwrap();
    exchange(&mut a, &mut b);
    assert!(matches!(a.events()[..], [CmEventKind::Rejected { .. }]));
    assert_eq!(a.qp_state(qa), Some(QpState::Err));
}

#[test]
fn an_accepted_connection_is_ended_by_us() {
    let (mut a, mut b, [qa, qb], [_, cb]) = accepting();
    exchange(&mut b, &mut a);
    assert!(matches!(a.events()[..], [CmEventKind::Established { .. }]));
    assert!(matches!(b.events()[..], [CmEventKind::Established { .. }]));
    b.first.port.cm_destroy(at(1), cb);
    b.pass_on();
    assert_eq!(b.qp_state(qb), Some(QpState::Err));
    exchange(&mut b, &mut a);
    assert_eq!(a.port.qp_state(qa), Some(QpState::Err));
}

#[test]
fn the_first_packet_of_the_second_port_says_as_much_as_the_rtu() {
    let (mut a, mut b, [qa, qb], [_, cb]) = accepting();
    let memory = b.second.region(64);
    b.second.receive(qb, 1, &memory);
    b.take().iter().for_each(|d| a.give(d));
    assert!(matches!(a.events()[..], [CmEventKind::Established { .. }]));
    // The RTU is lost.
    a.take();
    let src = a.region(64);
    a.send(qa, 1, SendOp::Send, &src, 64);
    a.take().iter().for_each(|d| b.give(d));
    assert!(matches!(b.events()[..], [CmEventKind::Established { conn, .. }] if conn == cb));
    assert!(b.second.completions()[0].is_ok());
}

#[test]
fn another_queue_pair_with_its_number_is_none_of_its_business() {
    let (mut a, mut b, [qa, qb], [ca, _]) = connected();
    a.second.port.destroy_qp(at(1), qa).unwrap();
    assert_eq!(a.second.qp(), qa);
    a.second.raise(qa, ip(9), Qpn::new(77));
    a.first.port.cm_disconnect(at(1), ca);
    a.pass_on();
    assert_eq!(a.qp_state(qa), Some(QpState::Rts));
    exchange(&mut a, &mut b);
    assert_eq!(b.port.qp_state(qb), Some(QpState::Err));
}

#[test]
fn the_second_port_has_no_connections_of_its_own() {
    let (mut a, b) = (Both::new(1), Host::new(2));
    let qa = a.second.qp();
    let (local, remote) = ((a.first.addr, 0).into(), (b.addr, SERVICE).into());
    let asked = a.second.port.connect_qp(at(1), local, remote, qa, params(b""));
    assert!(matches!(asked, Err(VerbsError::State(_))));
    // It is free for a connection of the first port.
    a.connect(qa, b.addr);
}

#[test]
fn a_reserved_queue_pair_is_busy_until_it_is_released() {
    let mut a = Both::new(1);
    let qa = a.second.qp();
    let offer = a.second.port.offer_qp(at(1), qa, &params(b"")).unwrap();
    let again = a.second.port.offer_qp(at(1), qa, &params(b""));
    assert!(matches!(again, Err(VerbsError::Busy(_))));
    a.second.port.handle_command(at(1), QpCommand::Release(offer.qp()));
    a.connect(qa, ip(2));
}

/// The peer ends the connection before the second port has answered: the events come in their order, when it has.
#[test]
fn events_wait_for_the_answer_of_the_second_port() {
    let (mut a, mut b, qa, ca, cb) = asking();
    let qb = b.qp();
    b.port.accept_qp(at(1), cb, qb, params(b"")).unwrap();
    b.take().iter().for_each(|d| a.first.give(d));
    assert!(a.first.events().is_empty());
    assert_eq!(a.qp_state(qa), Some(QpState::Init));
    b.port.cm_destroy(at(1), cb);
    b.take().iter().for_each(|d| a.first.give(d));
    assert!(a.first.events().is_empty());
    let events = a.events();
    let ends = |event: &CmEventKind| {
        use CmEventKind::{Disconnected, Failed, Rejected};
        event.conn() == ca && matches!(event, Rejected { .. } | Disconnected { .. } | Failed { .. })
    };
    assert!(matches!(&events[..], [.., last] if ends(last)), "{events:?}");
    assert_eq!(a.qp_state(qa), Some(QpState::Err));
}

#[test]
fn an_answer_for_a_queue_pair_that_is_gone_is_refused() {
    let (mut a, mut b, qa, ca, cb) = asking();
    let qb = b.qp();
    a.second.port.destroy_qp(at(1), qa).unwrap();
    b.port.accept_qp(at(1), cb, qb, params(b"")).unwrap();
    exchange(&mut a, &mut b);
    assert!(matches!(a.events()[..], [CmEventKind::Failed { conn, .. }] if conn == ca));
    assert!(matches!(b.events()[..], [CmEventKind::Rejected { .. }]));
    assert_eq!(b.port.qp_state(qb), Some(QpState::Err));
}

#[test]
fn a_peer_that_keeps_packets_is_known_at_both_ports() {
    let mut a = Both::new(1);
    let mut b = Host::with(2, |config| config.cm.ca_guid = guid::keeping(2));
    b.port.cm_listen(&ListenArgs::new(None, SERVICE, 10)).unwrap();
    let (qa, qb) = (a.second.qp(), b.qp());
    let (local, remote) = ((a.first.addr, 0).into(), (b.addr, SERVICE).into());
    let args = ConnectArgs::new(local, remote, qa, Psn::new(100), Mtu::B1024);
    let ca = a.first.port.cm_connect(at(1), &args).unwrap();
    a.take().iter().for_each(|d| b.give(d));
    let cb = the_request(&b.events());
    b.port.accept_qp(at(1), cb, qb, params(b"")).unwrap();
    b.take().iter().for_each(|d| a.give(d));
    assert!(matches!(a.events()[..], [CmEventKind::Reply { .. }]));
    a.second.raise(qa, b.addr, qb);
    let agreement = a.first.port.cm_agreement(ca, None).unwrap();
    let (qpn, peer) = agreement;
    assert_eq!(qpn, qa);
    a.second.port.agree(qpn, &peer);
    a.first.port.cm_establish(at(1), ca).unwrap();
    // Only what goes to such a peer may be marked by switches.
    let host = &mut a.second;
    let src = host.region(64);
    host.send(qa, 1, SendOp::Send, &src, 64);
    assert!(matches!(&host.take()[..], [sent] if sent.tos & 3 == 2));
}
