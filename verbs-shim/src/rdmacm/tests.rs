//! Commands as librdmacm writes them, over a transport that only writes down what it is asked for.

mod addresses;
mod options;

use std::{
    cell::Cell,
    net::{IpAddr, SocketAddr},
    os::fd::RawFd,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use roce::{AddressVector, Mtu, Psn, QpState, Qpn, RejectReason, verbs::attr::QpAttrMask};
use roce_cm::{
    AcceptArgs, ConnTransport, ConnectArgs, ListenArgs, RemoteQp, ResolveArgs, SidrAnswer, cma::PortSpace,
    mad::sidr_status,
};
use zerocopy::FromBytes;

use super::{
    Errno, Result,
    abi::{self, Cmd, ConnParam, EventResp, EventType, QpAttrResp, QueryAddrResp, QueryRouteResp, UdParam},
    addr::Addr,
    backend::{Backend, Handle, News, Place},
    command::Command,
    ucma::Ucma,
};

/// What was asked of the transport.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn note(&self, text: impl Into<String>) {
        self.0.lock().unwrap().push(text.into());
    }

    /// What was noted since the last call.
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

struct Thing {
    key: u64,
    log: Log,
}

impl Drop for Thing {
    fn drop(&mut self) {
        self.log.note(format!("end {}", self.key));
    }
}

impl Handle for Thing {
    fn key(&self) -> u64 {
        self.key
    }
}

/// Devices at 10.0.0.1, or 127.0.0.7, and fd00::1; 10.0.1.1 is an address without a device.
struct Fake {
    log: Log,
    next: u64,
    /// How many ports were chosen, from 40,000 on.
    given: u16,
    fail: Cell<Option<Errno>>,
    /// The IPv4 address.
    address: IpAddr,
}

impl Fake {
    fn thing(&mut self, text: String) -> Result<Thing> {
        if let Some(e) = self.fail.take() {
            return Err(e);
        }
        self.next += 1;
        self.log.note(format!("{text} -> {}", self.next));
        Ok(Thing {
            key: self.next,
            log: self.log.clone(),
        })
    }

    fn say(&self, text: String) -> Result<()> {
        if let Some(e) = self.fail.take() {
            return Err(e);
        }
        self.log.note(text);
        Ok(())
    }
}

impl Backend for Fake {
    type Handle = Thing;
    type Query = Thing;
    type Member = Thing;
    type Hold = Thing;

    fn place_of(&mut self, local: IpAddr) -> Result<Place> {
        let gid_index = match local.to_string().as_str() {
            "10.0.0.1" | "127.0.0.7" => 2,
            "fd00::1" => 3,
            "10.0.1.1" => return Err(Errno::NODEV),
            _ => return Err(Errno(libc::EADDRNOTAVAIL)),
        };
        Ok(Place {
            index: 4,
            guid: [9; 8],
            gid_index,
            mtu: Mtu::B1024,
        })
    }

    fn source_for(&mut self, remote: SocketAddr) -> Result<IpAddr> {
        match remote.ip().to_string().as_str() {
            "10.9.9.9" => Err(Errno(libc::ENETUNREACH)),
            "10.0.1.2" => Ok("10.0.1.1".parse().unwrap()),
            _ if remote.is_ipv6() => Ok("fd00::1".parse().unwrap()),
            _ => Ok(self.address),
        }
    }

    fn resolve_neighbour(
        &mut self,
        ticket: u64,
        way: (IpAddr, SocketAddr),
        timeout: Option<Duration>,
    ) -> Result<Option<Thing>> {
        match way.1.ip().to_string().as_str() {
            "10.0.0.77" => self.thing(format!("resolve {ticket} {timeout:?}")).map(Some),
            _ => Ok(None),
        }
    }

    fn some_address(&mut self, v6: bool) -> Option<IpAddr> {
        (!v6).then_some(self.address)
    }

    fn reserve(&mut self, space: PortSpace, port: u16, addr: Option<IpAddr>, _: bool) -> Result<(u16, Thing)> {
        let hold = self.thing(format!("reserve {space:?} {port} {addr:?}"))?;
        if port != 0 {
            return Ok((port, hold));
        }
        self.given += 1;
        Ok((39_999 + self.given, hold))
    }

    fn listen(&mut self, args: &ListenArgs) -> Result<Thing> {
        self.thing(format!("listen {:?} {} {:?}", args.space, args.port, args.addr))
    }

    fn connect(&mut self, args: &ConnectArgs) -> Result<Thing> {
        let data = String::from_utf8_lossy(&args.params.private_data).into_owned();
        let text = format!("connect {} {:?} {}", args.remote, args.transport, data);
        self.thing(text)
    }

    fn resolve(&mut self, args: &ResolveArgs) -> Result<Thing> {
        self.thing(format!("resolve {} {:?}", args.remote, args.space))
    }

    fn leave_backlog(&mut self, conn: &Thing) {
        self.log.note(format!("out of the backlog {}", conn.key));
    }

    fn accept(&mut self, conn: &Thing, args: &AcceptArgs) -> Result<()> {
        self.say(format!("accept {} {:?}", conn.key, args.qpn))
    }

    fn answer(&mut self, conn: &Thing, answer: &SidrAnswer) -> Result<()> {
        self.say(format!("answer {} {} {:?}", conn.key, answer.status, answer.qpn))
    }

    fn establish(&mut self, conn: &Thing) -> Result<()> {
        self.say(format!("establish {}", conn.key))
    }

    fn reject(&mut self, conn: &Thing, reason: RejectReason, data: &[u8]) -> Result<()> {
        let data = String::from_utf8_lossy(data);
        self.say(format!("reject {} {} {data}", conn.key, reason.0))
    }

    fn notify(&mut self, conn: &Thing) -> Result<()> {
        self.say(format!("notify {}", conn.key))
    }

    fn disconnect(&mut self, conn: &Thing) -> Result<()> {
        self.say(format!("disconnect {}", conn.key))
    }

    fn join(&mut self, local: IpAddr, group: IpAddr, send_only: bool) -> Result<Thing> {
        self.thing(format!("join {local} {group} {send_only}"))
    }
}

/// A program with one channel.
struct Program {
    ucma: Ucma<Fake>,
    log: Log,
    fd: RawFd,
}

fn sockaddr(text: &str) -> Addr {
    Addr::Ip(text.parse().unwrap())
}

/// Little pieces of a command, in order.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn u64(mut self, v: u64) -> Self {
        self.0.extend(v.to_ne_bytes());
        self
    }

    fn u32(mut self, v: u32) -> Self {
        self.0.extend(v.to_ne_bytes());
        self
    }

    fn u16(mut self, v: u16) -> Self {
        self.0.extend(v.to_ne_bytes());
        self
    }

    fn raw(mut self, v: &[u8]) -> Self {
        self.0.extend(v);
        self
    }

    fn conn_param(self, qpn: u32, data: &[u8], valid: u8) -> Self {
        let mut padded = [0; abi::MAX_PRIVATE_DATA];
        padded[..data.len()].copy_from_slice(data);
        self.u32(qpn)
            .u32(0)
            .raw(&padded)
            .raw(&[data.len() as u8, 0, 5, 6, 0, 7, 3, valid])
    }
}

impl Program {
    fn new() -> Self {
        let log = Log::default();
        let mut ucma = Ucma::new(Fake {
            log: log.clone(),
            next: 0,
            given: 0,
            fail: Cell::default(),
            address: "10.0.0.1".parse().unwrap(),
        });
        let fd = ucma.open_channel().unwrap();
        Self { ucma, log, fd }
    }

    fn run_on(&mut self, fd: RawFd, cmd: Cmd, body: Bytes) -> Result<Vec<u8>> {
        let command = Command {
            fd,
            cmd,
            body: &body.0,
            room: 1000,
        };
        let user = |at: u64, len: usize| Ok(vec![at as u8; len]);
        self.ucma.execute(&command, &user).map(|a| a.bytes)
    }

    fn run(&mut self, cmd: Cmd, body: Bytes) -> Result<Vec<u8>> {
        self.run_on(self.fd, cmd, body)
    }

    fn number(&mut self, cmd: Cmd, body: Bytes) -> u32 {
        u32::from_ne_bytes(self.run(cmd, body).unwrap()[..].try_into().unwrap())
    }

    fn create(&mut self, uid: u64, space: PortSpace) -> u32 {
        let body = Bytes::default()
            .u64(uid)
            .u64(1)
            .u16(space as u16)
            .raw(&[2, 0, 0, 0, 0, 0]);
        self.number(Cmd::CreateId, body)
    }

    fn destroy(&mut self, id: u32) -> u32 {
        self.number(Cmd::DestroyId, Bytes::default().u64(1).u32(id).u32(0))
    }

    fn resolve(&mut self, id: u32, dst: &str) -> Result<Vec<u8>> {
        let body = Bytes::default()
            .raw(&[0; 28])
            .raw(&sockaddr(dst).emit_in6())
            .u32(id)
            .u32(2000);
        self.run(Cmd::ResolveIp, body)
    }

    fn simple(&mut self, cmd: Cmd, id: u32, value: u32) -> Result<Vec<u8>> {
        self.run(cmd, Bytes::default().u32(id).u32(value))
    }

    fn connect(&mut self, id: u32, data: &[u8]) -> Result<Vec<u8>> {
        let body = Bytes::default().conn_param(0x1234, data, 1).u32(id).u32(0);
        self.run(Cmd::Connect, body)
    }

    fn accept(&mut self, id: u32, uid: u64, valid: u8) -> Result<Vec<u8>> {
        let body = Bytes::default().u64(uid).conn_param(0x77, b"ok", valid).u32(id).u32(0);
        self.run(Cmd::Accept, body)
    }

    fn qp_attr(&mut self, id: u32, state: QpState) -> Result<QpAttrResp> {
        let bytes = self.run(Cmd::InitQpAttr, Bytes::default().u64(1).u32(id).u32(state as u32))?;
        Ok(QpAttrResp::read_from_bytes(&bytes).unwrap())
    }

    fn event(&mut self) -> Option<EventResp> {
        self.ucma.take_event(self.fd)
    }

    fn expect(&mut self, kind: EventType) -> EventResp {
        let event = self.event().unwrap_or_else(|| panic!("no event, {kind:?} expected"));
        assert_eq!(event.event, kind as u32, "{kind:?}");
        event
    }

    /// An id with a route to 10.0.0.9:7471.
    fn routed(&mut self, uid: u64, space: PortSpace) -> u32 {
        let id = self.create(uid, space);
        self.resolve(id, "10.0.0.9:7471").unwrap();
        assert_eq!(self.expect(EventType::AddrResolved).status, 0);
        self.simple(Cmd::ResolveRoute, id, 2000).unwrap();
        self.expect(EventType::RouteResolved);
        id
    }

    fn listener(&mut self, uid: u64, space: PortSpace) -> (u32, u64) {
        let id = self.create(uid, space);
        let body = Bytes::default()
            .u64(0)
            .raw(&sockaddr("10.0.0.1:7471").emit_in6())
            .u32(id);
        self.run(Cmd::BindIp, body).unwrap();
        self.simple(Cmd::Listen, id, 5).unwrap();
        (id, self.ucma.backend.next)
    }

    fn request(&mut self, listener: u64) -> u64 {
        let conn = self.ucma.backend.thing("request".into()).unwrap();
        let key = conn.key;
        self.ucma.on_news(News::Request {
            listener,
            conn,
            local: "10.0.0.1:7471".parse().unwrap(),
            remote: "10.0.0.9:5000".parse().unwrap(),
            path: path(),
            private_data: b"hello".to_vec(),
        });
        key
    }
}

fn path() -> RemoteQp {
    RemoteQp {
        av: AddressVector::new("10.0.0.1".parse().unwrap(), "10.0.0.9".parse().unwrap()),
        qpn: Qpn::new(0x4321),
        sq_psn: Psn::new(0xabc),
        mtu: Mtu::B512,
        responder_resources: 3,
        initiator_depth: 4,
        timeout: 19,
        retry_cnt: 6,
        rnr_retry: 5,
        transport: ConnTransport::Rc,
        flow_control: true,
        keeps_packets: false,
        src_port: None,
        srq: false,
    }
}

fn conn_param(event: &EventResp) -> ConnParam {
    ConnParam::read_from_prefix(&event.param).unwrap().0
}

fn ud_param(event: &EventResp) -> UdParam {
    UdParam::read_from_bytes(&event.param).unwrap()
}

#[test]
fn an_active_id_goes_from_address_to_connection() {
    let mut p = Program::new();
    let id = p.routed(0xa0, PortSpace::Tcp);
    assert_eq!(
        p.qp_attr(id, QpState::Init).unwrap().access,
        0,
        "no rights before the connection"
    );
    p.connect(id, b"hi").unwrap();
    assert_eq!(p.log.take(), ["connect 10.0.0.9:7471 Rc hi -> 1"]);
    assert!(p.qp_attr(id, QpState::Rtr).is_err(), "the peer is not known yet");
    p.ucma.on_news(News::Reply {
        key: 1,
        path: path(),
        private_data: b"answer".to_vec(),
    });
    let event = p.expect(EventType::ConnectResponse);
    assert_eq!((event.uid, event.id, event.status), (0xa0, id, 0));
    let param = conn_param(&event);
    assert_eq!(
        (param.qp_num, param.responder_resources, param.initiator_depth),
        (0x4321, 3, 4)
    );
    assert_eq!(&param.private_data[..usize::from(param.private_data_len)], b"answer");

    let init = p.qp_attr(id, QpState::Init).unwrap();
    assert_eq!(init.access, 0b1110);
    let rtr = p.qp_attr(id, QpState::Rtr).unwrap();
    let mask = QpAttrMask::from_bits(rtr.mask).unwrap();
    assert!(mask.contains(QpAttrMask::AV | QpAttrMask::DEST_QPN | QpAttrMask::RQ_PSN | QpAttrMask::MAX_DEST_RD_ATOMIC));
    assert_eq!((rtr.dest_qp_num, rtr.path_mtu, rtr.max_dest_rd_atomic), (0x4321, 2, 3));
    assert_eq!(
        (rtr.ah_attr.sgid_index, rtr.ah_attr.is_global, rtr.ah_attr.port_num),
        (2, 1, 1)
    );
    assert_eq!(rtr.ah_attr.dgid, sockaddr("10.0.0.9:0").gid());
    let rts = p.qp_attr(id, QpState::Rts).unwrap();
    assert_eq!(
        (rts.sq_psn, rts.timeout, rts.retry_cnt, rts.rnr_retry),
        (0xabc, 19, 6, 5)
    );
    assert_eq!(rts.max_rd_atomic, 4);

    p.accept(id, 0, 0).unwrap();
    assert_eq!(p.log.take(), ["establish 1"]);
    p.simple(Cmd::Disconnect, id, 0).unwrap();
    p.ucma.on_news(News::Disconnected {
        key: 1,
        timed_out: true,
    });
    let end = p.expect(EventType::Disconnected);
    assert_eq!(end.status.cast_signed(), -libc::ETIMEDOUT, "as IB_CM_DREQ_ERROR");
    p.ucma.on_news(News::Disconnected {
        key: 1,
        timed_out: false,
    });
    assert!(p.event().is_none(), "only once");
    p.ucma.on_news(News::TimewaitExit { key: 1 });
    p.expect(EventType::TimewaitExit);
    assert!(p.qp_attr(id, QpState::Rts).is_err(), "over");
    assert_eq!(p.destroy(id), 5, "events that were taken");
    assert_eq!(p.log.take(), ["disconnect 1", "end 1"]);
}

#[test]
fn a_request_is_nobodys_until_it_is_accepted() {
    let mut p = Program::new();
    let (listener, key) = p.listener(0xb0, PortSpace::Tcp);
    let conn = p.request(key);
    p.log.take();
    let event = p.expect(EventType::ConnectRequest);
    assert_eq!(p.log.take(), [format!("out of the backlog {conn}")]);
    let id = event.id;
    assert_eq!(event.uid, 0xb0, "the listener's");
    assert_ne!(id, listener);
    assert_eq!(conn_param(&event).private_data_len, 5);
    let query = p.run(Cmd::QueryRoute, Bytes::default().u64(1).u32(id).u32(0)).unwrap();
    let route = QueryRouteResp::read_from_bytes(&query).unwrap();
    assert_eq!((route.num_paths, route.port_num, route.ibdev_index), (1, 1, 4));
    assert_eq!(Addr::parse(&route.dst_addr), Ok(sockaddr("10.0.0.9:5000")));
    assert_eq!(route.ib_route[0].mtu, 2);

    // librdmacm brings its queue pair up before it accepts.
    assert_eq!(p.qp_attr(id, QpState::Rtr).unwrap().dest_qp_num, 0x4321);
    assert_eq!(p.qp_attr(id, QpState::Rts).unwrap().sq_psn, 0xabc);
    p.ucma.on_news(News::Unreachable {
        key: conn,
        why: roce::NoAnswer::Timeout,
    });
    assert!(p.event().is_none(), "librdmacm does not know the id yet");
    p.log.take();
    p.accept(id, 0xb1, 1).unwrap();
    assert_eq!(p.log.take(), [format!("accept {conn} Qpn(0x000077)")]);
    p.ucma.on_news(News::Established { key: conn });
    assert_eq!(p.expect(EventType::Established).uid, 0xb1);
    assert_eq!(p.destroy(listener), 1, "the request counts for the listener");
    assert_eq!(p.destroy(id), 1);
}

#[test]
fn requests_that_nobody_saw_go_with_their_listener() {
    let mut p = Program::new();
    let (listener, key) = p.listener(0xb0, PortSpace::Tcp);
    let conn = p.request(key);
    p.log.take();
    assert_eq!(p.destroy(listener), 0);
    let log = p.log.take();
    assert!(
        log.contains(&format!("end {conn}")) && log.contains(&format!("end {key}")),
        "{log:?}"
    );
    assert_eq!(p.ucma.waiting(p.fd), 0);
    // One that comes for a listener that is gone is refused.
    let late = p.request(key);
    assert!(p.log.take().contains(&format!("end {late}")));
}

#[test]
fn a_refusal_carries_reason_and_data() {
    let mut p = Program::new();
    let id = p.routed(1, PortSpace::Tcp);
    p.connect(id, b"").unwrap();
    p.ucma.on_news(News::Rejected {
        key: 1,
        reason: RejectReason::CONSUMER,
        private_data: vec![7; 148],
    });
    let event = p.expect(EventType::Rejected);
    assert_eq!(event.status, 28);
    assert_eq!(conn_param(&event).private_data_len, 148);

    let (_, key) = p.listener(2, PortSpace::Tcp);
    let conn = p.request(key);
    let request = p.expect(EventType::ConnectRequest).id;
    p.log.take();
    let reject = |reason: u8| {
        let mut data = [0; 256];
        data[..2].copy_from_slice(b"no");
        Bytes::default().u32(request).raw(&[2, reason, 0, 0]).raw(&data)
    };
    assert_eq!(
        p.run(Cmd::Reject, reject(4)),
        Err(Errno::INVAL),
        "not a program's reason"
    );
    p.run(Cmd::Reject, reject(0)).unwrap();
    p.run(Cmd::Reject, reject(35)).unwrap();
    assert_eq!(
        p.log.take(),
        [format!("reject {conn} 28 no"), format!("reject {conn} 35 no")]
    );
}

#[test]
fn who_connects_too_early_asks_again() {
    let mut p = Program::new();
    let id = p.routed(1, PortSpace::Tcp);
    p.connect(id, b"").unwrap();
    let nobody = |key| News::Rejected {
        key,
        reason: RejectReason::INVALID_SERVICE_ID,
        private_data: Vec::new(),
    };
    p.log.take();
    p.ucma.on_news(nobody(1));
    assert!(p.event().is_none());
    let at = p.ucma.ask_again(Instant::now()).expect("something is planned");
    assert_eq!(p.log.take(), [""; 0], "not at once");
    assert_eq!(p.ucma.ask_again(at), None);
    assert_eq!(p.log.take(), ["connect 10.0.0.9:7471 Rc  -> 2", "end 1"]);
    // The answer to the second question counts, and there is an end to asking.
    let end = Instant::now() + Duration::from_secs(5);
    let mut last = 2;
    while Instant::now() < end {
        p.ucma.on_news(nobody(last));
        let Some(event) = p.event() else {
            let at = p.ucma.ask_again(Instant::now()).expect("something is planned");
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            p.ucma.ask_again(at);
            last += 1;
            continue;
        };
        assert_eq!((event.event, event.status), (EventType::Rejected as u32, 8));
        assert_eq!(p.ucma.ask_again(Instant::now()), None);
        return;
    }
    panic!("no end to asking");
}

#[test]
fn an_accept_that_fails_refuses_the_peer() {
    let mut p = Program::new();
    let (_, key) = p.listener(2, PortSpace::Tcp);
    let conn = p.request(key);
    let request = p.expect(EventType::ConnectRequest).id;
    p.log.take();
    p.ucma.backend.fail.set(Some(Errno::INVAL));
    assert_eq!(p.accept(request, 3, 1), Err(Errno::INVAL));
    assert_eq!(p.log.take(), [format!("reject {conn} 28 ")]);
}

#[test]
fn datagram_ids_are_resolved() {
    let mut p = Program::new();
    let id = p.routed(5, PortSpace::Udp);
    let attr = p.qp_attr(id, QpState::Init).unwrap();
    assert_eq!(attr.qkey, 0x0123_4567);
    assert!(QpAttrMask::from_bits(attr.mask).unwrap().contains(QpAttrMask::QKEY));
    p.connect(id, b"q").unwrap();
    assert_eq!(p.log.take(), ["resolve 10.0.0.9:7471 Udp -> 1"]);
    let answer = |status, qkey| SidrAnswer {
        status,
        qpn: Qpn::new(0x55),
        qkey: roce::verbs::QKey(qkey),
        private_data: vec![1; 136],
    };
    p.ucma.on_news(News::Resolved {
        key: 1,
        answer: answer(sidr_status::SUCCESS, 0x0123_4567),
    });
    let event = p.expect(EventType::Established);
    let ud = ud_param(&event);
    assert_eq!((ud.qp_num, ud.qkey, ud.private_data_len), (0x55, 0x0123_4567, 136));
    assert_eq!(
        (ud.ah_attr.dgid, ud.ah_attr.sgid_index),
        (sockaddr("10.0.0.9:0").gid(), 2)
    );
    p.ucma.on_news(News::Resolved {
        key: 1,
        answer: answer(sidr_status::SUCCESS, 1),
    });
    assert_eq!(
        p.expect(EventType::AddrError).status,
        -libc::EINVAL as u32,
        "another Q_Key"
    );
    p.ucma.on_news(News::Resolved {
        key: 1,
        answer: answer(sidr_status::REJECT, 0),
    });
    assert_eq!(p.expect(EventType::Unreachable).status, 2);
}

/// libfabric's server binds to `localhost`.
#[test]
fn a_datagram_listener_answers() {
    let mut p = Program::new();
    let (_, key) = p.listener(6, PortSpace::Udp);
    for (accept, fails) in [(true, false), (true, true), (false, false)] {
        let conn = p.ucma.backend.thing("ask".into()).unwrap();
        let number = conn.key;
        p.ucma.on_news(News::SidrRequest {
            listener: key,
            conn,
            local: "10.0.0.1:7471".parse().unwrap(),
            remote: "10.0.0.9:5000".parse().unwrap(),
            private_data: vec![2; 180],
        });
        let event = p.expect(EventType::ConnectRequest);
        assert_eq!(ud_param(&event).private_data_len, 180);
        p.log.take();
        if fails {
            p.ucma.backend.fail.set(Some(Errno::INVAL));
            assert_eq!(p.accept(event.id, 7, 1), Err(Errno::INVAL));
            assert_eq!(p.log.take(), [format!("answer {number} 2 Qpn(0x000000)")]);
        } else if accept {
            p.accept(event.id, 7, 1).unwrap();
            assert_eq!(p.log.take(), [format!("answer {number} 0 Qpn(0x000077)")]);
        } else {
            let body = Bytes::default().u32(event.id).raw(&[0; 4]).raw(&[0; 256]);
            p.run(Cmd::Reject, body).unwrap();
            assert_eq!(p.log.take(), [format!("answer {number} 2 Qpn(0x000000)")]);
        }
    }
}

#[test]
fn groups_are_joined_and_left() {
    let mut p = Program::new();
    let id = p.create(8, PortSpace::Udp);
    let join = |id: u32, group: &str| {
        let addr = sockaddr(group);
        Bytes::default()
            .u64(1)
            .u64(0xcc)
            .u32(id)
            .u16(addr.size() as u16)
            .u16(0)
            .raw(&addr.emit())
    };
    assert_eq!(
        p.run(Cmd::JoinMcast, join(id, "239.1.2.3:0")),
        Err(Errno::INVAL),
        "no device yet"
    );
    let body = Bytes::default().u64(0).raw(&sockaddr("10.0.0.1:0").emit_in6()).u32(id);
    p.run(Cmd::BindIp, body).unwrap();
    assert_eq!(
        p.run(Cmd::JoinMcast, join(id, "10.0.0.7:0")),
        Err(Errno::INVAL),
        "not a group"
    );
    let member = p.number(Cmd::JoinMcast, join(id, "239.1.2.3:0"));
    let event = p.expect(EventType::MulticastJoin);
    assert_eq!((event.uid, event.id), (0xcc, member));
    let ud = ud_param(&event);
    assert_eq!((ud.qp_num, ud.qkey), (0x00ff_ffff, 0x0123_4567));
    assert_eq!(ud.ah_attr.dgid, sockaddr("239.1.2.3:0").gid());
    let left = p.number(Cmd::LeaveMcast, Bytes::default().u64(1).u32(member).u32(0));
    assert_eq!(left, 1);
    let log = p.log.take();
    assert_eq!(log[1..], ["join 10.0.0.1 239.1.2.3 false -> 2", "end 2"]);
    assert_eq!(p.destroy(id), 1, "the join counts for the id as well");
}

#[test]
fn an_id_moves_to_another_channel_with_its_events() {
    let mut p = Program::new();
    let id = p.create(9, PortSpace::Tcp);
    p.resolve(id, "10.0.0.9:7471").unwrap();
    let other = p.ucma.open_channel().unwrap();
    let body = Bytes::default().u64(1).u32(id).u32(p.fd as u32);
    assert_eq!(p.run_on(other, Cmd::MigrateId, body).unwrap(), 0u32.to_ne_bytes());
    assert_eq!((p.ucma.waiting(p.fd), p.ucma.waiting(other)), (0, 1));
    assert_eq!(
        p.simple(Cmd::ResolveRoute, id, 0),
        Err(Errno::INVAL),
        "the old channel's no more"
    );
    assert_eq!(p.ucma.take_event(other).unwrap().uid, 9);
    p.ucma.close_channel(other);
    assert_eq!(
        p.simple(Cmd::ResolveRoute, id, 0),
        Err(Errno(libc::ENOENT)),
        "it went with its channel"
    );
}
