//! Our MADs against those of the kernel's rdma_cm.

use std::net::SocketAddr;

use crate::common::{CLIENT, Captured, SERVER, mads};
use roce_port::cm::{
    AcceptArgs, CmConfig, ConnId, ConnParams, ConnectArgs, Event, ListenArgs, Manager, RejectReason, ResolveArgs,
    SidrAnswer,
    cma::{CmaHeader, PortSpace, ServiceId},
    mad::{Attribute, Mad, Message, SidrRep, SidrReq},
    state::State,
};
use roce_verbs::{Instant, Mtu, Psn, Qpn};

const NOW: Instant = Instant::ZERO;
const QPN: Qpn = Qpn::new(0x12_3456);
const PSN: Psn = Psn::new(0x65_4321);

fn manager() -> Manager {
    Manager::new(CmConfig::new(0x0102_0304_0506_0708, Mtu::B1024), [7; 32])
}

fn parse(c: &Captured) -> Mad {
    Mad::parse(&c.mad).unwrap()
}

fn attribute(c: &Captured) -> Attribute {
    parse(c).message.attribute()
}

fn first(all: &[Captured], a: Attribute) -> &Captured {
    all.iter()
        .find(|c| attribute(c) == a)
        .unwrap_or_else(|| panic!("no {a:?}"))
}

/// The MAD with the named fields zeroed.
fn without(mad: &[u8; 256], fields: &[&str], transaction: bool) -> [u8; 256] {
    let mut out = *mad;
    let parsed = Mad::parse(mad).unwrap();
    for f in Message::fields(parsed.message.attribute())
        .iter()
        .filter(|f| fields.contains(&f.name))
    {
        for bit in f.first_bit()..f.first_bit() + f.width {
            out[bit / 8] &= !(0x80 >> (bit % 8));
        }
    }
    if transaction {
        out[8..16].fill(0);
    }
    out
}

/// Fields in which two implementations may differ.
const IDENTIFIERS: &[&str] = &[
    "local_comm_id",
    "remote_comm_id",
    "local_qpn",
    "remote_qpn",
    "starting_psn",
    "local_ca_guid",
];

/// Takes the one MAD that the manager has to send and compares it. `transaction`: whether it has the peer's
/// transaction ID, which then has to be right too.
fn sends_like(m: &mut Manager, captured: &Captured, own_transaction: bool) -> Mad {
    let out = m.poll_mad().expect("a MAD to send");
    assert_eq!((out.local, out.remote), (captured.src, captured.dst));
    let (ours, theirs) = (
        without(&out.mad, IDENTIFIERS, own_transaction),
        without(&captured.mad, IDENTIFIERS, own_transaction),
    );
    assert_eq!(Mad::parse(&ours), Mad::parse(&theirs));
    assert_eq!(ours, theirs, "{:?}", attribute(captured));
    assert!(m.poll_mad().is_none(), "one MAD only");
    Mad::parse(&out.mad).unwrap()
}

/// A captured MAD as the peer would have sent it to us: with our numbers where the kernel's were.
fn readdress(captured: &Captured, comm_id: u32, qpn: Qpn) -> [u8; 256] {
    let mut mad = parse(captured);
    match &mut mad.message {
        Message::Rep(m) => m.remote_comm_id = comm_id,
        Message::Rtu(m) => m.remote_comm_id = comm_id,
        Message::Rej(m) => m.remote_comm_id = comm_id,
        Message::Drep(m) => m.remote_comm_id = comm_id,
        Message::Dreq(m) => (m.remote_comm_id, m.remote_qpn) = (comm_id, qpn),
        other => panic!("{other:?}"),
    }
    mad.emit()
}

#[test]
fn captured_mads_reemit() {
    let files = [
        ("rping.pcap", 5),
        ("ucmatose.pcap", 5),
        ("cm-reject.pcap", 2),
        ("udaddy.pcap", 2),
        ("rnbd.pcap", 6),
        ("rnbd-unmap.pcap", 4),
        ("rds.pcap", 3),
    ];
    for (file, count) in files {
        let all = mads(file);
        assert!(all.len() >= count, "{file}: {} CM frames", all.len());
        for c in &all {
            assert_eq!(parse(c).emit(), c.mad, "{file}: {:?}", attribute(c));
        }
    }
}

#[test]
fn captured_request_reads_as_expected() {
    let Message::Req(req) = parse(&mads("rping.pcap")[0]).message else {
        panic!("not a REQ")
    };
    assert_eq!(ServiceId(req.service_id).port(PortSpace::Tcp), Some(7174));
    assert_eq!(ServiceId(req.service_id).port(PortSpace::Udp), None);
    assert_eq!(req.local_qpn, Qpn::new(0x20));
    assert_eq!(req.starting_psn, Psn::new(0x2b_5cb6));
    assert_eq!(
        (req.path_mtu, req.retry_count, req.rnr_retry_count, req.max_cm_retries),
        (3, 7, 7, 15)
    );
    let header = CmaHeader::parse(&req.private_data).unwrap();
    assert_eq!((header.src, header.dst, header.port), (CLIENT, SERVER, 0xd1b6));
    assert_eq!(header.emit(), req.private_data[..36]);
    let Message::SidrReq(sidr) = parse(&mads("udaddy.pcap")[0]).message else {
        panic!("not a SIDR_REQ")
    };
    assert_eq!(ServiceId(sidr.service_id).port(PortSpace::Udp), Some(7174));
}

/// A program of the captures: what its side passed to rdma_connect or rdma_accept.
struct Program {
    file: &'static str,
    port: u16,
    client_port: u16,
    depth: u8,
    /// Retries and RNR retries of the client; all servers say 7.
    retries: (u8, u8),
    /// Private data without padding.
    request: Vec<u8>,
    reply: Vec<u8>,
}

fn programs() -> Vec<Program> {
    let rtrs = mads("rnbd.pcap");
    let data = |a: Attribute, skip: usize, len: usize| match parse(first(&rtrs, a)).message {
        Message::Req(m) => m.private_data[skip..skip + len].to_vec(),
        Message::Rep(m) => m.private_data[skip..skip + len].to_vec(),
        _ => unreachable!(),
    };
    vec![
        Program {
            file: "rping.pcap",
            port: 7174,
            client_port: 0xd1b6,
            depth: 1,
            retries: (7, 7),
            request: vec![],
            reply: vec![],
        },
        Program {
            file: "ucmatose.pcap",
            port: 7471,
            client_port: 0x830c,
            depth: 1,
            retries: (5, 0),
            request: vec![],
            reply: vec![],
        },
        Program {
            file: "rnbd.pcap",
            port: 1234,
            client_port: 0xa58e,
            depth: 0,
            retries: (7, 7),
            request: data(Attribute::Req, 36, 56),
            reply: data(Attribute::Rep, 0, 56),
        },
    ]
}

fn params(depth: u8, retries: (u8, u8), private_data: &[u8]) -> ConnParams {
    ConnParams {
        private_data: private_data.to_vec(),
        responder_resources: depth,
        initiator_depth: depth,
        retry_count: retries.0,
        rnr_retry_count: retries.1,
        ..ConnParams::default()
    }
}

fn connect(m: &mut Manager, p: &Program) -> ConnId {
    let mut args = ConnectArgs::new(
        SocketAddr::new(CLIENT, p.client_port),
        SocketAddr::new(SERVER, p.port),
        QPN,
        PSN,
        Mtu::B1024,
    );
    args.params = params(p.depth, p.retries, &p.request);
    m.connect(NOW, &args).unwrap()
}

#[test]
fn client_speaks_like_the_kernel() {
    for p in programs() {
        let all = mads(p.file);
        let mut m = manager();
        let conn = connect(&mut m, &p);
        let sent = sends_like(&mut m, first(&all, Attribute::Req), true);
        let Message::Req(req) = sent.message else {
            panic!("not a REQ")
        };
        assert_eq!(
            (req.local_qpn, req.starting_psn, req.local_ca_guid),
            (QPN, PSN, 0x0102_0304_0506_0708)
        );
        let rep = first(&all, Attribute::Rep);
        m.handle_mad(NOW, CLIENT, SERVER, &readdress(rep, req.local_comm_id, QPN));
        let Message::Rep(kernel) = parse(rep).message else {
            panic!("not a REP")
        };
        match m.poll_event() {
            Some(Event::Reply {
                conn: c,
                path,
                private_data,
            }) => {
                assert_eq!(c, conn);
                assert_eq!(
                    (path.qpn, path.sq_psn, path.mtu),
                    (kernel.local_qpn, kernel.starting_psn, Mtu::B1024)
                );
                assert_eq!((path.responder_resources, path.initiator_depth), (p.depth, p.depth));
                assert_eq!((path.timeout, path.retry_cnt, path.rnr_retry), (19, p.retries.0, 7));
                assert_eq!((path.av.local, path.av.remote), (CLIENT, SERVER));
                assert_eq!(private_data[..], kernel.private_data[..]);
                assert!(private_data.starts_with(&p.reply));
            }
            other => panic!("{}: {other:?}", p.file),
        }
        m.qp_ready(NOW, conn).unwrap();
        let rtu = sends_like(&mut m, first(&all, Attribute::Rtu), true);
        assert_eq!(rtu.transaction_id, sent.transaction_id);
        assert_eq!(m.state(conn), Some(State::Established));
        if p.file == "rping.pcap" {
            m.disconnect(NOW, conn);
            let dreq = sends_like(&mut m, first(&all, Attribute::Dreq), true);
            let Message::Dreq(dreq) = dreq.message else {
                panic!("not a DREQ")
            };
            assert_eq!(
                (dreq.remote_qpn, dreq.remote_comm_id),
                (kernel.local_qpn, kernel.local_comm_id)
            );
            m.handle_mad(
                NOW,
                CLIENT,
                SERVER,
                &readdress(first(&all, Attribute::Drep), req.local_comm_id, QPN),
            );
            assert_eq!(m.poll_event(), Some(Event::Disconnected { conn, timed_out: false }));
        }
        if p.file == "ucmatose.pcap" {
            let dreq = first(&all, Attribute::Dreq);
            m.handle_mad(NOW, CLIENT, SERVER, &readdress(dreq, req.local_comm_id, QPN));
            let drep = sends_like(&mut m, first(&all, Attribute::Drep), false);
            assert_eq!(drep.transaction_id, parse(dreq).transaction_id);
            assert_eq!(m.poll_event(), Some(Event::Disconnected { conn, timed_out: false }));
        }
    }
}

#[test]
fn server_speaks_like_the_kernel() {
    for p in programs() {
        let all = mads(p.file);
        let mut m = manager();
        let listener = m.listen(None, p.port, 1).unwrap();
        m.handle_mad(NOW, SERVER, CLIENT, &first(&all, Attribute::Req).mad);
        let Some(Event::Request {
            listener: l,
            conn,
            local,
            remote,
            private_data,
            path,
        }) = m.poll_event()
        else {
            panic!("{}: no request", p.file)
        };
        let Message::Req(kernel) = parse(first(&all, Attribute::Req)).message else {
            panic!("not a REQ")
        };
        assert_eq!(l, listener);
        assert_eq!(local, SocketAddr::new(SERVER, p.port));
        assert_eq!(remote, SocketAddr::new(CLIENT, p.client_port));
        assert_eq!(private_data.len(), 56);
        assert!(private_data.starts_with(&p.request));
        assert_eq!(
            (path.qpn, path.sq_psn, path.mtu),
            (kernel.local_qpn, kernel.starting_psn, Mtu::B1024)
        );
        assert_eq!(
            (path.timeout, path.retry_cnt, path.rnr_retry),
            (19, p.retries.0, p.retries.1)
        );
        m.accept(NOW, conn, &AcceptArgs::new(QPN, PSN, params(p.depth, (7, 7), &p.reply)))
            .unwrap();
        let sent = sends_like(&mut m, first(&all, Attribute::Rep), false);
        let Message::Rep(rep) = sent.message else {
            panic!("not a REP")
        };
        assert_eq!(
            (rep.local_qpn, rep.starting_psn, rep.remote_comm_id),
            (QPN, PSN, kernel.local_comm_id)
        );
        m.handle_mad(
            NOW,
            SERVER,
            CLIENT,
            &readdress(first(&all, Attribute::Rtu), rep.local_comm_id, QPN),
        );
        assert_eq!(
            m.poll_event(),
            Some(Event::Established {
                conn,
                private_data: vec![]
            })
        );
        if p.file == "ucmatose.pcap" {
            m.disconnect(NOW, conn);
            sends_like(&mut m, first(&all, Attribute::Dreq), true);
            m.handle_mad(
                NOW,
                SERVER,
                CLIENT,
                &readdress(first(&all, Attribute::Drep), rep.local_comm_id, QPN),
            );
            assert_eq!(m.poll_event(), Some(Event::Disconnected { conn, timed_out: false }));
        }
        let unmap = mads("rnbd-unmap.pcap");
        let ends = if p.file == "rnbd.pcap" { &unmap } else { &all };
        if p.file != "ucmatose.pcap" {
            m.handle_mad(
                NOW,
                SERVER,
                CLIENT,
                &readdress(first(ends, Attribute::Dreq), rep.local_comm_id, QPN),
            );
            sends_like(&mut m, first(ends, Attribute::Drep), false);
            assert_eq!(m.poll_event(), Some(Event::Disconnected { conn, timed_out: false }));
        }
    }
}

#[test]
fn nobody_listens() {
    let all = mads("cm-reject.pcap");
    let mut server = manager();
    server.listen(None, 1, 1).unwrap();
    server.handle_mad(NOW, SERVER, CLIENT, &all[0].mad);
    // Nothing in this REJ is ours to choose: it is equal to the byte.
    assert_eq!(server.poll_mad().unwrap().mad, all[1].mad);
    assert_eq!(server.poll_event(), None);

    let mut client = manager();
    let mut args = ConnectArgs::new(
        SocketAddr::new(CLIENT, 0x953b),
        SocketAddr::new(SERVER, 7174),
        QPN,
        PSN,
        Mtu::B1024,
    );
    args.params = params(1, (7, 7), &[]);
    let conn = client.connect(NOW, &args).unwrap();
    let Message::Req(req) = sends_like(&mut client, &all[0], true).message else {
        panic!("not a REQ")
    };
    client.handle_mad(NOW, CLIENT, SERVER, &readdress(&all[1], req.local_comm_id, QPN));
    match client.poll_event() {
        Some(Event::Rejected { conn: c, reason, .. }) => {
            assert_eq!((c, reason), (conn, RejectReason::INVALID_SERVICE_ID));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(client.next_timeout(), None);
}

#[test]
fn datagram_service_is_unknown() {
    let all = mads("udaddy.pcap");
    let mut m = manager();
    m.handle_mad(NOW, SERVER, CLIENT, &all[0].mad);
    let out = Mad::parse(&m.poll_mad().unwrap().mad).unwrap();
    let (Message::SidrRep(ours), Message::SidrRep(kernel)) = (out.message, parse(&all[1]).message) else {
        panic!("not a SIDR_REP")
    };
    assert_eq!(
        (ours.request_id, ours.service_id, ours.status),
        (kernel.request_id, kernel.service_id, 1)
    );
    assert_eq!(out.transaction_id, parse(&all[0]).transaction_id);
}

/// The kernel's question reaches our listener, whose answer has the kernel's form; the kernel's answer resolves our question,
/// which has the kernel's form.
#[test]
fn datagram_service_is_resolved_like_the_kernel_s() {
    let all = mads("udaddy.pcap");
    let (Message::SidrReq(asked), Message::SidrRep(answered)) = (parse(&all[0]).message, parse(&all[1]).message) else {
        panic!("not a SIDR exchange")
    };
    assert_eq!(answered.status, 0);

    let mut server = manager();
    server
        .listen_for(&ListenArgs {
            addr: None,
            space: PortSpace::Udp,
            port: 7174,
            transport: None,
            backlog: 1,
        })
        .unwrap();
    server.handle_mad(NOW, SERVER, CLIENT, &all[0].mad);
    let Some(Event::SidrRequest { conn, private_data, .. }) = server.poll_event() else {
        panic!("no question")
    };
    assert_eq!(private_data, asked.private_data[36..]);
    let answer = SidrAnswer {
        status: 0,
        qpn: answered.qpn,
        qkey: answered.qkey,
        private_data: answered.private_data.to_vec(),
    };
    server.answer(NOW, conn, &answer).unwrap();
    assert_eq!(server.poll_mad().unwrap().mad, all[1].mad);

    let mut client = manager();
    let header = CmaHeader::parse(&asked.private_data).unwrap();
    let args = ResolveArgs {
        local: SocketAddr::new(CLIENT, header.port),
        remote: SocketAddr::new(SERVER, 7174),
        space: PortSpace::Udp,
        private_data: asked.private_data[36..].to_vec(),
    };
    let conn = client.resolve(NOW, &args).unwrap();
    let sent = Mad::parse(&client.poll_mad().unwrap().mad).unwrap();
    let Message::SidrReq(ours) = sent.message else {
        panic!("not a SIDR_REQ")
    };
    let request_id = ours.request_id;
    let same = SidrReq {
        request_id: asked.request_id,
        ..ours
    };
    assert_eq!(same, asked);
    let back = SidrRep { request_id, ..answered };
    client.handle_mad(NOW, CLIENT, SERVER, &Mad::new(sent.transaction_id, back).emit());
    match client.poll_event() {
        Some(Event::Resolved { conn: c, qpn, qkey, .. }) => {
            assert_eq!((c, qpn, qkey), (conn, answered.qpn, answered.qkey))
        }
        other => panic!("{other:?}"),
    }
}
