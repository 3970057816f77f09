//! Frames of ConnectX cards through a whole port, as a UDP socket delivers them: without the IPv4 header.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ferroce_replay::{fixtures, load, made, made_stall};
use roce_bth::ICRC_LEN;
use roce_icrc::Flow;
use roce_port::{Port, PortConfig, QpInit, RxMeta};
use roce_qp::{CompletionQueue, Counters};
use roce_verbs::mem::MemoryTable;
use roce_verbs::{AddressVector, Instant, Mtu, Psn, QpAttr, QpCaps, QpState, QpType, Qpn};

#[test]
fn the_made_captures_are_what_the_generator_makes() {
    let read = |name: &str| fs::read(fixtures().join(name)).unwrap();
    assert!(read("made-connectx.pcap") == made::connectx().unwrap());
    assert!(read("made-read-span.pcap") == made_stall::read_span().unwrap());
    assert!(read("scapy-cnp.pcap") == made::cnp());
}

#[test]
fn made_frames_are_as_cards_send_them() {
    let bytes = fs::read(fixtures().join("made-connectx.pcap")).unwrap();
    let events = load(&fixtures().join("made-connectx.pcap")).unwrap();
    assert_eq!(events.len(), 14);
    for event in &events {
        assert!(event.packet().header.bth.migreq);
        assert_eq!(event.identification, Some(0));
    }
    let mut at = 24;
    while at < bytes.len() {
        let len = u32::from_le_bytes(bytes[at + 8..at + 12].try_into().unwrap()) as usize;
        // UDP checksum, behind 16 bytes of record, 14 of Ethernet and 20 of IPv4.
        assert_eq!(bytes[at + 16 + 40..at + 16 + 42], [0, 0]);
        at += 16 + len;
    }
}

struct Host {
    port: Port,
    qpn: Qpn,
    local: IpAddr,
    remote: IpAddr,
}

impl Host {
    fn new(local: IpAddr, remote: IpAddr, rq_psn: Psn) -> Self {
        let config = PortConfig::new(vec![local], Mtu::B1024, 7);
        let mem = Arc::new(MemoryTable::new([3; 32], &config.limits));
        let mut port = Port::new(config, mem.clone(), [4; 32]);
        let pd = mem.alloc_pd().unwrap();
        let cq = CompletionQueue::new(1, 64, None);
        let init = QpInit {
            pd,
            qp_type: QpType::Rc,
            send_cq: cq.clone(),
            recv_cq: cq,
            caps: QpCaps::default(),
            signal_all: true,
            srq: None,
            xrcd: None,
        };
        let qpn = port.create_qp(init).unwrap();
        let way = QpAttr {
            rq_psn: Some(rq_psn),
            ..QpAttr::to_rts(AddressVector::new(local, remote), Mtu::B1024, Qpn::new(0x77))
        };
        for attr in [QpState::Init, QpState::Rtr].map(|to| way.step(QpType::Rc, to)) {
            port.modify_qp(Instant::ZERO, qpn, &attr).unwrap();
        }
        Self {
            port,
            qpn,
            local,
            remote,
        }
    }

    /// Delivers a UDP payload made for another queue pair to ours, with the ICRC that it would have had, and spoils a
    /// byte on the way.
    fn deliver(&mut self, payload: &[u8], identification: u16, src_port: u16, spoil: u8) {
        let mut bytes = payload.to_vec();
        bytes[5..8].copy_from_slice(&self.qpn.value().to_be_bytes()[1..]);
        let src = SocketAddr::new(self.remote, src_port);
        let flow = Flow::try_from((src, SocketAddr::new(self.local, 4791))).unwrap();
        flow.seal(identification, &mut bytes);
        bytes[20] ^= spoil;
        let meta = RxMeta::new(self.local, src);
        self.port.handle_datagram(Instant::from_nanos(1), &meta, &bytes);
    }
}

#[test]
fn packets_of_cards_pass_the_port() {
    let events = load(&fixtures().join("made-connectx.pcap")).unwrap();
    let first = &events[0];
    let psn = first.packet().header.bth.psn;
    let mut host = Host::new(first.dst.ip(), first.src.ip(), psn);
    host.deliver(&first.bytes, 0, first.src.port(), 0);
    // No receive is posted: the packet has come as far as the queue pair.
    let counters = host.port.counters();
    assert_eq!(counters.transport.send_rnr_err, 1, "{counters:?}");
    host.deliver(&first.bytes, 0, first.src.port(), 1);
    let counters = host.port.counters();
    assert_eq!(
        (counters.transport.send_rnr_err, counters.icrc_errors),
        (1, 1),
        "{counters:?}"
    );
}

#[test]
fn a_congestion_notification_where_nothing_may_be_marked_is_counted_and_changes_nothing() {
    let cnp = &made::CNP[28..];
    assert_eq!(cnp.len(), 28 + ICRC_LEN);
    let src: IpAddr = "10.0.17.1".parse().unwrap();
    let dst: IpAddr = "10.0.18.1".parse().unwrap();
    // As published, its ICRC is right with the Identification that it came with, and it is for a queue pair of another
    // machine: 0x118.
    let flow = Flow::try_from((SocketAddr::new(src, 0), SocketAddr::new(dst, 4791))).unwrap();
    assert!(flow.verify(0x718c, cnp));
    let mut host = Host::new(dst, src, Psn::new(5));
    let state = host.port.query_qp(host.qpn).unwrap();
    host.deliver(cnp, 0x718c, 0, 0);
    let counters = host.port.counters();
    assert_eq!(
        (counters.rp_cnp_ignored, counters.transport),
        (1, Counters::default()),
        "{counters:?}"
    );
    assert_eq!(host.port.query_qp(host.qpn).unwrap(), state);
    // Spoilt, it is not one.
    host.deliver(cnp, 0x718c, 0, 1);
    let counters = host.port.counters();
    let refused = counters.icrc_errors + counters.icrc_implausible;
    assert_eq!((counters.rp_cnp_ignored, refused), (1, 1), "{counters:?}");
}
