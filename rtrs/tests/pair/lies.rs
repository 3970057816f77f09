//! Servers by hand that break the protocol: the client ends the path, and says why.

use std::net::{IpAddr, Ipv4Addr};

use roce_verbs::{
    RKey, RemoteAddr, SendOp,
    provider::{CmKind, CmRef, Provider},
};
use rtrs::{
    Direction, Error, IoError, PathError,
    addr::PathAddr,
    client::{ConType, Output, Submission},
    proto::{ChunkLayout, ConnRsp, Imm, InfoRsp, IoReply, MsgFlags, SgDesc},
};
use zerocopy::IntoBytes;

use crate::{
    host::KeyMode,
    hosts::{Pair, carry},
    server,
    station::{Con, Station},
};

const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 99));
const PORT: u16 = 1234;

/// A client of ours, and a server by hand with four chunks of 16 KiB whose keys never change.
struct Liar {
    pair: Pair,
    station: Station,
    listener: CmRef,
    /// Answer to connection requests.
    conn_rsp: Vec<u8>,
    /// Converts the session information into the bytes that it sends.
    info_rsp: fn(InfoRsp) -> Vec<u8>,
    cons: Vec<Con>,
    informed: bool,
}

fn accept(depth: u16, max_io_size: u32) -> Vec<u8> {
    let rsp = ConnRsp::accept(depth, max_io_size, 4096, MsgFlags::empty());
    rsp.as_bytes().to_vec()
}

impl Liar {
    /// Opens a session at it, which comes as far as it comes.
    fn new(conn_rsp: Vec<u8>, info_rsp: fn(InfoRsp) -> Vec<u8>) -> Self {
        let mut station = Station::new(ADDRESS);
        let listener = station.host.fabric.cm_listen((ADDRESS, PORT).into(), 8).unwrap();
        let mut liar = Self {
            pair: Pair::new(KeyMode::Instant, server(true)),
            station,
            listener,
            conn_rsp,
            info_rsp,
            cons: Vec::new(),
            informed: false,
        };
        liar.pair
            .ask_open(|config| config.paths = vec![PathAddr::to((ADDRESS, PORT).into())]);
        liar.settle();
        liar
    }

    /// One that keeps to the protocol so far.
    fn proper() -> Self {
        let mut liar = Self::new(accept(4, 12 << 10), |rsp| rsp.to_bytes());
        let told = core::mem::take(&mut liar.pair.told);
        assert!(matches!(told[..], [Output::Opened(..)]), "{told:?}");
        liar
    }

    fn settle(&mut self) {
        loop {
            let mut moved = self.pair.client_turn();
            let now = self.pair.now;
            moved |= carry(now, &mut self.pair.near, &mut self.station.host, |_| false);
            self.station.host.timers(now);
            moved |= self.station.poll(now);
            self.answer();
            moved |= carry(now, &mut self.station.host, &mut self.pair.near, |_| false);
            if !moved {
                return;
            }
        }
    }

    /// Answers what comes of a handshake.
    fn answer(&mut self) {
        for (cm, kind) in core::mem::take(&mut self.station.events) {
            if let CmKind::ConnectRequest { listener, .. } = kind {
                assert_eq!(listener, self.listener);
                let cid = self.cons.len() as u16;
                self.cons.push(self.station.accept(cid, cm, self.conn_rsp.clone()));
            }
        }
        let service = self.cons.first().filter(|_| !self.informed).map(|con| con.qp);
        if let Some(qp) = service
            && !self.station.messages(qp).is_empty()
        {
            self.informed = true;
            let mr = self.station.data.mr;
            let rsp = InfoRsp::new(vec![SgDesc::new(mr.addr, mr.rkey.0, mr.len as u32)]);
            self.station.send(qp, SendOp::Send, &(self.info_rsp)(rsp));
        }
    }

    /// Sends a message. Returns whether it has arrived.
    fn send(&mut self, cid: usize, op: SendOp, bytes: &[u8]) -> bool {
        let qp = self.cons[cid].qp;
        self.station.send(qp, op, bytes);
        self.settle();
        self.pair.now = self.pair.now + core::time::Duration::from_millis(1);
        self.settle();
        self.station.is_sent(qp)
    }

    fn imm(&mut self, cid: usize, imm: u32) {
        self.send(cid, SendOp::WriteWithImm(RemoteAddr::default(), imm), b"");
    }

    /// The client sends a request: its chunk, and the message in it.
    fn request(&mut self, direction: Direction, len: usize) -> (u32, Vec<u8>) {
        let data = (len > 0).then(|| self.pair.buffer(len).unwrap());
        let request = Submission {
            tag: 1,
            con: ConType::Io(0),
            direction,
            header: [b'x'].into_iter().collect(),
            data,
        };
        self.pair.submit(request);
        self.settle();
        let messages = self.station.messages(self.cons[1].qp);
        let [(wc, _)] = &messages[..] else {
            panic!("{messages:?}");
        };
        let Ok(Imm::IoReq(payload)) = Imm::decode(wc.imm) else {
            panic!("not a request");
        };
        let (chunk, offset) = ChunkLayout::new(4, 16 << 10).unwrap().unpack(payload).unwrap();
        (chunk, self.station.data(((chunk << 14) + offset) as usize, 24))
    }
}

#[test]
fn servers_that_offer_what_can_not_be() {
    let proper: fn(InfoRsp) -> Vec<u8> = |rsp| rsp.to_bytes();
    let fails = |mut liar: Liar, word: &str| {
        let told = core::mem::take(&mut liar.pair.told);
        let [Output::OpenFailed(_, Error::Protocol { what, .. })] = &told[..] else {
            panic!("{word}: {told:?}");
        };
        assert_eq!(*what, word);
    };
    for rsp in [
        accept(0, 12 << 10),
        accept(4, 0),
        accept(4, u32::MAX),
        accept(65535, 1 << 20),
        ConnRsp::reject(5).as_bytes().to_vec(),
        vec![1; 56],
    ] {
        fails(Liar::new(rsp, proper), "connection response");
    }
    let infos: [fn(InfoRsp) -> Vec<u8>; 4] = [
        |_| InfoRsp::new(Vec::new()).to_bytes(),
        |rsp| InfoRsp::new([rsp.descriptors(), rsp.descriptors()].concat()).to_bytes(),
        |rsp| rsp.to_bytes()[..12].to_vec(),
        |_| vec![0; 24],
    ];
    for info in infos {
        fails(Liar::new(accept(4, 12 << 10), info), "session information");
    }
}

#[test]
fn servers_that_say_what_nobody_asked() {
    let answer = |chunk| Imm::IoRsp(IoReply::new(chunk, 0, false)).encode();
    let written = |imm| SendOp::WriteWithImm(RemoteAddr::default(), imm);
    for op in [
        written(answer(0)),
        written(answer(4)),
        written(Imm::IoReq(0).encode()),
        written(0x7000_0000),
        SendOp::SendWithImm(answer(0)),
    ] {
        let mut liar = Liar::proper();
        liar.send(1, op, b"");
        let why = liar.pair.told.iter().find_map(|told| match told {
            Output::Down(_, why) => Some(why),
            _ => None,
        });
        assert!(why.is_some_and(PathError::is_protocol), "{op:?}: {why:?}");
    }
}

/// The server says that it revoked the buffer's key, but did not: the client does, before it ends the request.
#[test]
fn a_server_that_lies_about_a_revoked_key() {
    let mut liar = Liar::proper();
    let (chunk, message) = liar.request(Direction::Read, 6);
    let addr = u64::from_le_bytes(message[8..16].try_into().unwrap());
    let rkey = RKey(u32::from_le_bytes(message[16..20].try_into().unwrap()));
    let write = SendOp::Write(RemoteAddr { addr, rkey });
    assert!(liar.send(1, write, b"before"));
    liar.imm(1, Imm::IoRsp(IoReply::new(chunk, 0, true)).encode());
    let (_, result, data) = liar.pair.done.remove(0);
    result.unwrap();
    let data = data.unwrap();
    assert!(!liar.send(1, write, b"after!"), "the key is closed");
    let mut bytes = [0; 6];
    let buffers = liar.pair.client.buffers(liar.pair.session()).unwrap();
    buffers.read(&data, 0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"before");
}

/// An answer that comes over another connection than the request is not for it.
#[test]
fn an_answer_over_the_wrong_connection() {
    let mut liar = Liar::proper();
    let (chunk, _) = liar.request(Direction::Write, 0);
    liar.imm(0, Imm::IoRsp(IoReply::new(chunk, 0, false)).encode());
    let (_, result, _) = liar.pair.done.remove(0);
    assert!(
        matches!(result, Err(IoError::Path(PathError::Unexpected(_)))),
        "{result:?}"
    );
}
