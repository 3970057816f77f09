//! Commands as librdmacm writes them, over a transport that only logs its calls.

mod addresses;
mod connections;
mod datagrams;
mod options;

use std::{
    cell::Cell,
    net::{IpAddr, SocketAddr},
    os::fd::RawFd,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use roce::{AddressVector, Mtu, Psn, QpState, Qpn, RejectReason, verbs::attr::QpAttrMask};
use roce_port::cm::{
    AcceptArgs, ConnId, ConnTransport, ConnectArgs, Event as CmEventKind, ListenArgs, ListenId, RemoteQp, ResolveArgs,
    SidrAnswer, cma::PortSpace, mad::sidr_status,
};
use zerocopy::FromBytes;

use super::{
    Errno, Result,
    abi::{self, Cmd, ConnParam, EventResp, EventType, QpAttrResp, QueryAddrResp, QueryRouteResp, UdParam},
    addr::Addr,
    backend::{Backend, CmaDevice, Handle, Report},
    command::Command,
    ucma::Ucma,
};

/// Log of the calls to the transport.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn note(&self, text: impl Into<String>) {
        self.0.lock().unwrap().push(text.into());
    }

    /// Returns the lines since the last call.
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

    fn cma_dev_of(&mut self, local: IpAddr) -> Result<CmaDevice> {
        let gid_index = match local.to_string().as_str() {
            "10.0.0.1" | "127.0.0.7" => 2,
            "fd00::1" => 3,
            "10.0.1.1" => return Err(Errno::NODEV),
            _ => return Err(Errno(libc::EADDRNOTAVAIL)),
        };
        Ok(CmaDevice {
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
        route: (IpAddr, SocketAddr),
        timeout: Option<Duration>,
    ) -> Result<Option<Thing>> {
        match route.1.ip().to_string().as_str() {
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
        let text = format!("connect {} {:?} {}", args.remote, args.qp.transport, data);
        self.thing(text)
    }

    fn resolve(&mut self, args: &ResolveArgs) -> Result<Thing> {
        self.thing(format!("resolve {} {:?}", args.remote, args.space))
    }

    fn leave_backlog(&mut self, conn: &Thing) {
        self.log.note(format!("out of the backlog {}", conn.key));
    }

    fn accept(&mut self, conn: &Thing, args: &AcceptArgs) -> Result<()> {
        self.say(format!("accept {} {:?}", conn.key, args.qp.qpn))
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
        let event = CmEventKind::Request {
            listener: ListenId(0),
            conn: CONN,
            local: "10.0.0.1:7471".parse().unwrap(),
            remote: "10.0.0.9:5000".parse().unwrap(),
            path: path(),
            private_data: b"hello".to_vec(),
        };
        self.ucma.on_report(Report::Cm {
            key: listener,
            new: Some(conn),
            event,
        });
        key
    }

    /// Reports an event of a connection.
    fn report(&mut self, key: u64, event: CmEventKind) {
        self.ucma.on_report(Report::Cm { key, new: None, event });
    }
}

/// Number of every connection in events. RDMA_CM ignores it.
const CONN: ConnId = ConnId(0);

fn reply(private_data: &[u8]) -> CmEventKind {
    CmEventKind::Reply {
        conn: CONN,
        path: path(),
        private_data: private_data.to_vec(),
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
