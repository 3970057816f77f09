//! A path of an RTRS client, step by step: it can send what a proper client never would.

use std::{
    cell::RefCell,
    fmt,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use roce::{
    AccessFlags, CmEventKind, Completion, ConnParams, Cq, Device, EventChannel, Id, Mr, Payload, Pd, Qp, QpCaps,
    QpInit, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, WcOpcode,
};
use rtrs::proto::{
    ChunkLayout, ConnReq, ConnRsp, Imm, InfoReq, InfoRsp, MsgFlags, RdmaWrite, RkeyRsp, Uuid, info::ChunkAddr,
};
use zerocopy::IntoBytes as _;

use crate::Error;

/// For each step; a server that makes a session's registrations before it answers may take some seconds.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Receives of a connection.
const RECVS: usize = 16;
const RECV_BYTES: usize = 4096;
/// Connections of a path that receives are set aside for.
const CONNS: usize = 4;
/// Where sends are put together.
const SEND_AT: usize = CONNS * RECVS * RECV_BYTES;
const SEND_BYTES: usize = 4096;
/// Number of sends; receives have those from 0 on.
const SEND: u64 = 1 << 32;
/// Bytes of the user's header of a request: as many as a message of RNBD has at the least.
const HEADER: usize = 32;

/// What came of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// The connection stands.
    Accepted,
    /// With an error number of Linux.
    Refused(i32),
    /// Without one.
    RefusedByCm(u16),
    Unreachable,
    /// The information response came.
    Informed,
    /// The request was answered with this error number of Linux.
    Answered(u16),
    /// The server has answered a sign of life.
    Alive,
    /// The connection is over.
    Closed,
    /// Nothing came.
    Silence,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accepted => f.write_str("accepted"),
            Self::Refused(errno) => write!(f, "refused {errno}"),
            Self::RefusedByCm(reason) => write!(f, "refused by the connection manager, reason {reason}"),
            Self::Unreachable => f.write_str("unreachable"),
            Self::Informed => f.write_str("informed"),
            Self::Answered(errno) => write!(f, "answered {errno}"),
            Self::Alive => f.write_str("alive"),
            Self::Closed => f.write_str("closed"),
            Self::Silence => f.write_str("silence"),
        }
    }
}

struct Conn {
    qp: Qp,
    id: Id,
}

/// See the module. Its connections end with it.
pub(super) struct Client {
    pub(super) session: Uuid,
    pub(super) path: Uuid,
    pub(super) first_conn: bool,
    pub(super) recon_cnt: u16,
    conns: Vec<(u16, Conn)>,
    chunks: RefCell<Vec<ChunkAddr>>,
    rsp: Option<ConnRsp>,
    /// Completions that nobody has waited for yet.
    waiting: RefCell<Vec<Completion>>,
    src: IpAddr,
    dst: SocketAddr,
    channel: EventChannel,
    cq: Cq,
    mr: Mr,
    pd: Pd,
    dev: Device,
}

impl Client {
    /// A path between these addresses, of a session of its own.
    pub(super) fn new(dev: &Device, dst: SocketAddr) -> Result<Self, Error> {
        let pd = dev.alloc_pd()?;
        Ok(Self {
            session: uuid()?,
            path: uuid()?,
            first_conn: true,
            recon_cnt: 1,
            conns: Vec::new(),
            chunks: RefCell::default(),
            rsp: None,
            waiting: RefCell::default(),
            src: dev.addr(),
            dst,
            channel: dev.create_cm_channel()?,
            cq: dev.create_cq(1024, None, 0)?,
            mr: dev.alloc_mr(
                &pd,
                SEND_AT + SEND_BYTES,
                AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
            )?,
            pd,
            dev: dev.clone(),
        })
    }

    /// A proper connection request.
    pub(super) fn request(&self, cid: u16, cid_num: u16) -> Vec<u8> {
        let request = ConnReq::new(cid, cid_num, self.recon_cnt, self.path, self.session, self.first_conn);
        request.as_bytes().to_vec()
    }

    /// Connects number `cid` of two.
    pub(super) fn connect(&mut self, cid: u16) -> Result<Outcome, Error> {
        self.connect_with(cid, self.request(cid, 2))
    }

    /// Connects with these private data; the connection counts as number `cid` here.
    pub(super) fn connect_with(&mut self, cid: u16, private_data: Vec<u8>) -> Result<Outcome, Error> {
        let init = QpInit {
            send_cq: &self.cq,
            recv_cq: &self.cq,
            caps: QpCaps::default(),
            signal_all: true,
        };
        let qp = self.dev.create_qp(&self.pd, &init)?;
        // A second connection of a number gets receives of its own.
        let place = self.conns.len() % CONNS;
        for i in place * RECVS..(place + 1) * RECVS {
            self.post_recv(&qp, i as u64)?;
        }
        let params = ConnParams {
            private_data,
            timeout: Some(TIMEOUT),
            ..ConnParams::default()
        };
        let id = self.dev.connect(&self.channel, Some(self.src), self.dst, &qp, params)?;
        loop {
            let Some(event) = self.channel.wait(Some(TIMEOUT))? else {
                return Ok(Outcome::Silence);
            };
            match event.kind {
                CmEventKind::Established { private_data, .. } => {
                    self.rsp = Some(*ConnRsp::parse(&private_data)?);
                    self.conns.push((cid, Conn { qp, id }));
                    return Ok(Outcome::Accepted);
                }
                CmEventKind::Rejected {
                    reason, private_data, ..
                } => {
                    let rsp = ConnRsp::parse(&private_data).map(ConnRsp::errno);
                    return Ok(rsp.map_or(Outcome::RefusedByCm(reason.0), Outcome::Refused));
                }
                CmEventKind::Unreachable { .. } => return Ok(Outcome::Unreachable),
                // Of connections before.
                CmEventKind::Disconnected { .. } | CmEventKind::TimewaitExit { .. } => {}
                other => return Err(format!("connection {cid}: {other:?}").into()),
            }
        }
    }

    /// Connects both connections, which the server must accept.
    pub(super) fn connected(&mut self) -> Result<(), Error> {
        for cid in 0..2 {
            match self.connect(cid)? {
                Outcome::Accepted => {}
                other => return Err(format!("connection {cid} of a proper path: {other}").into()),
            }
        }
        Ok(())
    }

    /// The whole handshake, which the server must go along with.
    pub(super) fn open(&mut self, name: &str) -> Result<(), Error> {
        self.connected()?;
        match self.inform(InfoReq::new(name)?.as_bytes())? {
            Outcome::Informed => Ok(()),
            other => Err(format!("information request of a proper path: {other}").into()),
        }
    }

    /// Sends an information request.
    pub(super) fn inform(&self, bytes: &[u8]) -> Result<Outcome, Error> {
        self.send(0, SendOp::Send, bytes)?;
        let wc = match self.next(0)? {
            Ok(wc) => wc,
            Err(end) => return Ok(end),
        };
        if wc.opcode != WcOpcode::Recv {
            return Err(format!("no information response: {wc:?}").into());
        }
        *self.chunks.borrow_mut() = InfoRsp::parse(&self.received(&wc)?)?.chunks(&self.layout()?)?;
        Ok(Outcome::Informed)
    }

    /// Asks the server for a sign of life.
    pub(super) fn beat(&self) -> Result<Outcome, Error> {
        self.imm(0, Imm::HbMsg.encode())?;
        loop {
            match self.next(0)? {
                Ok(wc) if Imm::decode(wc.imm) == Ok(Imm::HbAck) => return Ok(Outcome::Alive),
                Ok(_) => {}
                Err(end) => return Ok(end),
            }
        }
    }

    /// Sends a proper message with a user's header that no message of RNBD has, and waits for the answer.
    pub(super) fn ask(&self, msg_id: u32) -> Result<Outcome, Error> {
        self.write(msg_id)?;
        self.answer()
    }

    /// Sends such a message.
    pub(super) fn write(&self, msg_id: u32) -> Result<(), Error> {
        let header = [0xff; HEADER];
        let message = RdmaWrite::new(HEADER as u16);
        self.io(msg_id, 0, &[&header, message.as_bytes()].concat(), HEADER as u32)
    }

    /// The next answer on connection 1.
    pub(super) fn answer(&self) -> Result<Outcome, Error> {
        loop {
            let wc = match self.next(1)? {
                Ok(wc) => wc,
                Err(end) => return Ok(end),
            };
            let Ok(Imm::IoRsp(reply)) = Imm::decode(wc.imm) else {
                continue;
            };
            let renewed = self.rsp.is_some_and(|rsp| rsp.flags().contains(MsgFlags::NEW_RKEY));
            if renewed {
                let bytes = self.received(&wc)?;
                let message = RkeyRsp::parse(&bytes)?;
                let mut chunks = self.chunks.borrow_mut();
                let chunk = chunks.get_mut(usize::from(message.buf_id.get()));
                chunk.ok_or("a key of no chunk")?.rkey = message.rkey.get();
            }
            return Ok(Outcome::Answered(reply.errno));
        }
    }

    /// Writes bytes into a chunk, and announces a message at `offset` there.
    pub(super) fn io(&self, msg_id: u32, start: u32, bytes: &[u8], offset: u32) -> Result<(), Error> {
        let chunks = self.chunks.borrow();
        let chunk = chunks.get(msg_id as usize).ok_or("no such chunk")?;
        let remote = RemoteAddr {
            addr: chunk.addr + u64::from(start),
            rkey: RKey(chunk.rkey),
        };
        let imm = Imm::IoReq(self.layout()?.pack(msg_id, offset)).encode();
        self.send(1, SendOp::WriteWithImm(remote, imm), bytes)
    }

    /// Sends an immediate value without data.
    pub(super) fn imm(&self, cid: u16, imm: u32) -> Result<(), Error> {
        self.send(cid, SendOp::WriteWithImm(RemoteAddr::default(), imm), &[])
    }

    /// Sends bytes; the connection may be over already.
    pub(super) fn send(&self, cid: u16, op: SendOp, bytes: &[u8]) -> Result<(), Error> {
        let qp = self.qp(cid)?;
        self.mr.write(SEND_AT, bytes)?;
        let sges = [self.mr.sge(SEND_AT, bytes.len())];
        let wr = SendWr {
            wr_id: SEND,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(if bytes.is_empty() { &[] } else { &sges }),
        };
        // What failed shows when an answer is waited for.
        let _ = qp.post_send(&[wr]);
        Ok(())
    }

    /// Sends bytes and waits until they have arrived, or the connection is over.
    pub(super) fn deliver(&self, cid: u16, op: SendOp, bytes: &[u8]) -> Result<(), Error> {
        self.send(cid, op, bytes)?;
        self.take(cid, |wc| wc.wr_id == SEND || !wc.is_ok()).map(drop)
    }

    /// Disconnects one connection.
    pub(super) fn disconnect(&self, cid: u16) -> Result<(), Error> {
        let conn = self.conns.iter().find(|(of, _)| *of == cid);
        Ok(conn.ok_or("no such connection")?.1.id.disconnect()?)
    }

    /// Waits for the end of a connection.
    pub(super) fn end(&self, cid: u16) -> Result<Outcome, Error> {
        loop {
            if let Err(end) = self.next(cid)? {
                return Ok(end);
            }
        }
    }

    /// Forgets its connections, which thereby end.
    pub(super) fn leave(&mut self) {
        self.conns.clear();
    }

    /// How the server's chunks are numbered.
    pub(super) fn layout(&self) -> Result<ChunkLayout, Error> {
        Ok(self.rsp.ok_or("no connection stands")?.layout()?)
    }

    /// How many chunks the information response named.
    pub(super) fn chunks(&self) -> usize {
        self.chunks.borrow().len()
    }

    fn qp(&self, cid: u16) -> Result<&Qp, Error> {
        let conn = self.conns.iter().find(|(of, _)| *of == cid);
        Ok(&conn.ok_or_else(|| format!("no connection {cid}"))?.1.qp)
    }

    /// The next message on a connection, or why none comes.
    fn next(&self, cid: u16) -> Result<Result<Completion, Outcome>, Error> {
        let wc = self.take(cid, |wc| wc.wr_id != SEND || !wc.is_ok())?;
        let Some(wc) = wc else { return Ok(Err(Outcome::Silence)) };
        if !wc.is_ok() {
            return Ok(Err(Outcome::Closed));
        }
        Ok(Ok(wc))
    }

    /// The next completion of a connection that is wanted; others of it are dropped.
    fn take(&self, cid: u16, wanted: impl Fn(&Completion) -> bool) -> Result<Option<Completion>, Error> {
        let qpn = self.qp(cid)?.qpn();
        let until = Instant::now() + TIMEOUT;
        loop {
            let mut waiting = self.waiting.borrow_mut();
            self.cq.poll(&mut waiting, 64)?;
            while let Some(at) = waiting.iter().position(|wc| wc.qpn == qpn) {
                let wc = waiting.remove(at);
                if wc.is_ok() && wc.wr_id != SEND {
                    // It is the last of those that wait: its bytes stay until all others are used.
                    let _ = self.post_recv(self.qp(cid)?, wc.wr_id);
                }
                if wanted(&wc) {
                    return Ok(Some(wc));
                }
            }
            drop(waiting);
            if Instant::now() > until {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn received(&self, wc: &Completion) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; wc.byte_len as usize];
        self.mr.read(wc.wr_id as usize * RECV_BYTES, &mut bytes)?;
        Ok(bytes)
    }

    fn post_recv(&self, qp: &Qp, i: u64) -> Result<(), Error> {
        let sges = [self.mr.sge(i as usize * RECV_BYTES, RECV_BYTES)];
        Ok(qp.post_recv(&[RecvWr { wr_id: i, sges: &sges }]).map_err(|(_, e)| e)?)
    }
}

/// A random UUID.
fn uuid() -> Result<Uuid, Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(Uuid(bytes))
}
