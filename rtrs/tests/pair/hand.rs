//! Clients by hand, which send what a proper client never would.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use roce_verbs::{Completion, RKey, RemoteAddr, SendOp, WcFlags, WcOpcode, provider::CmKind, provider::Provider};
use rtrs::proto::{
    ChunkLayout, ConnReq, ConnRsp, Imm, InfoReq, InfoRsp, IoReply, MsgFlags, RdmaRead, RdmaWrite, RkeyRsp, Uuid,
    info::ChunkAddr,
};
use zerocopy::IntoBytes;

use crate::{
    bed::{Bed, address},
    station::{Con, Station},
};

/// The information request that gives this name.
pub(crate) fn name(name: &str) -> Vec<u8> {
    InfoReq::new(name).unwrap().as_bytes().to_vec()
}

/// A client with one path.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) session: Uuid,
    pub(crate) path: Uuid,
    pub(crate) peer: IpAddr,
    pub(crate) local: SocketAddr,
    pub(crate) connections: u16,
    pub(crate) first: bool,
    /// Attempts to connect the path.
    pub(crate) attempt: u16,
    /// By number.
    pub(crate) cons: BTreeMap<u16, Con>,
    pub(crate) chunks: Vec<ChunkAddr>,
}

impl Client {
    /// Number `n`, with an address, a session and a path of its own, and one I/O connection.
    pub(crate) fn new(n: u8) -> Self {
        Self {
            session: Uuid([n; 16]),
            path: Uuid([n; 16]),
            peer: [10, 0, 0, n].into(),
            local: SocketAddr::new(address(0), 1234),
            connections: 2,
            first: true,
            attempt: 1,
            cons: BTreeMap::new(),
            chunks: Vec::new(),
        }
    }

    /// Another path of the same session, from another address.
    pub(crate) fn second_path(&self, n: u8) -> Self {
        Self {
            session: self.session,
            first: false,
            ..Self::new(n)
        }
    }

    /// The same path, after its client has lost it: nothing of it stands any more on that side.
    pub(crate) fn once_more(&self) -> Self {
        Self {
            attempt: self.attempt + 1,
            first: true,
            cons: BTreeMap::new(),
            chunks: Vec::new(),
            ..self.clone()
        }
    }

    pub(crate) fn request(&self, cid: u16) -> Vec<u8> {
        ConnReq::new(cid, self.connections, self.attempt, self.path, self.session, self.first)
            .as_bytes()
            .to_vec()
    }

    fn station<'a>(&self, bed: &'a mut Bed) -> &'a mut Station {
        bed.station(self.peer)
    }

    /// Sends a request for a connection; the error number when it is refused. An RTU is held back: the server does not know yet that
    /// there is somebody.
    pub(crate) fn ask(&mut self, bed: &mut Bed, cid: u16, private_data: Vec<u8>) -> Result<(), i32> {
        let con = self.station(bed).connect(cid, self.local, private_data);
        bed.unestablished.insert(self.peer);
        bed.turn();
        for (of, kind) in &self.station(bed).events {
            if let CmKind::Rejected { private_data, .. } = kind
                && *of == con.cm
            {
                return Err(ConnRsp::parse(private_data).unwrap().errno());
            }
        }
        self.cons.insert(cid, con);
        Ok(())
    }

    /// Delivers the RTUs of its connections that were held back.
    pub(crate) fn establish(&self, bed: &mut Bed) {
        bed.unestablished.remove(&self.peer);
        for (meta, bytes) in core::mem::take(&mut bed.rtus) {
            match meta.remote.ip() == self.peer {
                true => bed.host.receive(bed.now, &meta, &bytes),
                false => bed.rtus.push((meta, bytes)),
            }
        }
        bed.turn();
    }

    /// Makes a connection.
    pub(crate) fn connect(&mut self, bed: &mut Bed, cid: u16) -> Result<(), i32> {
        self.ask(bed, cid, self.request(cid))?;
        self.establish(bed);
        Ok(())
    }

    pub(crate) fn connect_all(&mut self, bed: &mut Bed) {
        for cid in 0..self.connections {
            self.connect(bed, cid).unwrap();
        }
    }

    /// Private data with which the server accepted a connection.
    pub(crate) fn accepted(&self, bed: &mut Bed, cid: u16) -> Option<ConnRsp> {
        let con = self.cons.get(&cid)?;
        let events = &self.station(bed).events;
        events.iter().find_map(|(of, kind)| match kind {
            CmKind::Established { private_data } if *of == con.cm => Some(*ConnRsp::parse(private_data).unwrap()),
            _ => None,
        })
    }

    pub(crate) fn layout(&self, bed: &mut Bed) -> ChunkLayout {
        self.accepted(bed, 0).expect("a connection").layout().unwrap()
    }

    pub(crate) fn has_new_keys(&self, bed: &mut Bed) -> bool {
        let flags = self.accepted(bed, 0).expect("a connection").flags();
        flags.contains(MsgFlags::NEW_RKEY)
    }

    /// Sends the information request.
    pub(crate) fn inform(&self, bed: &mut Bed, bytes: &[u8]) {
        self.send(bed, 0, SendOp::Send, bytes);
    }

    /// Reads the information response; false if there is none.
    pub(crate) fn informed(&mut self, bed: &mut Bed) -> bool {
        let messages = self.messages(bed, 0);
        let Some((_, bytes)) = messages.iter().find(|(wc, _)| wc.opcode == WcOpcode::Recv) else {
            return false;
        };
        let layout = self.layout(bed);
        self.chunks = InfoRsp::parse(bytes).unwrap().chunks(&layout).unwrap();
        true
    }

    /// The whole handshake.
    pub(crate) fn open(&mut self, bed: &mut Bed, session: &str) {
        self.connect_all(bed);
        self.inform(bed, &name(session));
        assert!(self.informed(bed), "{session} is not accepted");
    }

    /// A client with an open session.
    pub(crate) fn opened(bed: &mut Bed, n: u8, session: &str) -> Self {
        let mut client = Self::new(n);
        client.open(bed, session);
        bed.outputs.clear();
        client
    }

    /// Sends a message over a connection. Returns whether it has arrived.
    pub(crate) fn send(&self, bed: &mut Bed, cid: u16, op: SendOp, bytes: &[u8]) -> bool {
        self.post(bed, cid, op, bytes);
        bed.turn();
        self.station(bed).is_sent(self.cons[&cid].qp)
    }

    /// Posts a message, which leaves with the next turn.
    pub(crate) fn post(&self, bed: &mut Bed, cid: u16, op: SendOp, bytes: &[u8]) {
        let qp = self.cons[&cid].qp;
        self.station(bed).send(qp, op, bytes);
    }

    /// Writes bytes into a chunk. If its key does not open it, false; the connection has failed then.
    pub(crate) fn write(&self, bed: &mut Bed, chunk: u16, at: u32, bytes: &[u8]) -> bool {
        self.write_by(bed, chunk, at, bytes, 0)
    }

    /// The same, with some bits of the key changed.
    pub(crate) fn write_by(&self, bed: &mut Bed, chunk: u16, at: u32, bytes: &[u8], change: u32) -> bool {
        let to = self.chunks[usize::from(chunk)];
        let remote = RemoteAddr {
            addr: to.addr + u64::from(at),
            rkey: RKey(to.rkey ^ change),
        };
        self.send(bed, 1, SendOp::Write(remote), bytes)
    }

    /// Sends an immediate value over a connection.
    pub(crate) fn imm(&self, bed: &mut Bed, cid: u16, imm: u32) {
        self.send(bed, cid, SendOp::WriteWithImm(RemoteAddr::default(), imm), b"");
    }

    /// Announces a message in a chunk.
    pub(crate) fn announce(&self, bed: &mut Bed, chunk: u16, offset: u32) {
        let payload = self.layout(bed).pack(chunk.into(), offset);
        self.imm(bed, 1, Imm::IoReq(payload).encode());
    }

    /// A write request with this data and header.
    pub(crate) fn send_write(&self, bed: &mut Bed, chunk: u16, data: &[u8], header: &[u8]) {
        let message = RdmaWrite::new(header.len() as u16);
        let bytes = [data, header, message.as_bytes()].concat();
        assert!(self.write(bed, chunk, 0, &bytes), "chunk {chunk} is closed");
        self.announce(bed, chunk, (data.len() + header.len()) as u32);
    }

    /// A read request for so many bytes, with a key that the server is to invalidate, or with one that stays.
    pub(crate) fn send_read(&self, bed: &mut Bed, chunk: u16, len: u32, header: &[u8], invalidate: bool) {
        let qp = self.cons[&1].qp;
        let desc = self.station(bed).destination(qp, len, invalidate);
        let flags = match invalidate {
            true => MsgFlags::NEED_INVAL,
            false => MsgFlags::empty(),
        };
        let message = RdmaRead::new(header.len() as u16, flags, 1);
        let bytes = [header, message.as_bytes(), desc.as_bytes()].concat();
        assert!(self.write(bed, chunk, len, &bytes), "chunk {chunk} is closed");
        self.announce(bed, chunk, len + header.len() as u32);
    }

    /// Data that a read returned.
    pub(crate) fn data(&self, bed: &mut Bed, len: usize) -> Vec<u8> {
        self.station(bed).data(0, len)
    }

    /// Takes the messages that it has received over a connection.
    pub(crate) fn messages(&self, bed: &mut Bed, cid: u16) -> Vec<(Completion, Vec<u8>)> {
        let qp = self.cons.get(&cid).map(|con| con.qp);
        qp.map_or(Vec::new(), |qp| self.station(bed).messages(qp))
    }

    /// The immediate values among these messages.
    pub(crate) fn imms(&self, bed: &mut Bed, cid: u16) -> Vec<Imm> {
        let messages = self.messages(bed, cid).into_iter();
        let with = messages.filter(|(wc, _)| wc.flags.contains(WcFlags::WITH_IMM));
        with.map(|(wc, _)| Imm::decode(wc.imm).unwrap()).collect()
    }

    /// The answers that it has got over a connection; new keys are taken over.
    pub(crate) fn answers(&mut self, bed: &mut Bed, cid: u16) -> Vec<IoReply> {
        let mut replies = Vec::new();
        for (wc, bytes) in self.messages(bed, cid) {
            let (true, Ok(Imm::IoRsp(reply))) = (wc.flags.contains(WcFlags::WITH_IMM), Imm::decode(wc.imm)) else {
                continue;
            };
            if wc.opcode == WcOpcode::Recv {
                let message = RkeyRsp::parse(&bytes).unwrap();
                assert_eq!(u32::from(message.buf_id.get()), reply.msg_id);
                self.chunks[reply.msg_id as usize].rkey = message.rkey.get();
            }
            replies.push(reply);
        }
        replies
    }

    /// Ends the path: by a disconnect of its service connection.
    pub(crate) fn leave(&self, bed: &mut Bed) {
        self.disconnect(bed, 0);
        bed.turn();
    }

    /// Asks for a connection's end; the message is not sent yet.
    pub(crate) fn disconnect(&self, bed: &mut Bed, cid: u16) {
        let cm = self.cons[&cid].cm;
        let station = self.station(bed);
        station.host.fabric.cm_disconnect(cm);
        station.ended.insert(cm);
    }

    /// Forgets a connection, as after the end of its process.
    pub(crate) fn forget(&self, bed: &mut Bed, cid: u16) {
        let cm = self.cons[&cid].cm;
        let station = self.station(bed);
        station.host.fabric.cm_destroy(cm);
        station.ended.insert(cm);
        bed.turn();
    }

    /// Whether it has been told that a connection is over, or knows of none.
    pub(crate) fn has_lost(&self, bed: &Bed, cid: u16) -> bool {
        let station = bed.stations.get(&self.peer);
        let con = self.cons.get(&cid);
        con.is_none_or(|con| station.is_none_or(|station| station.ended.contains(&con.cm)))
    }

    /// Whether nothing is left of its path.
    pub(crate) fn is_gone(&self, bed: &Bed) -> bool {
        self.cons.keys().all(|cid| self.has_lost(bed, *cid))
    }
}
