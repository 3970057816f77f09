//! Every RTRS message that the kernel's client and server exchanged in the captures: read, and made again byte for byte.

use std::{collections::HashMap, fs::File, path::Path};

use pcap_file::pcap::PcapReader;
use roce_bth::{Class, Packet, Service};
use rtrs::Direction;
use rtrs::proto::{
    ChunkLayout, ConnReq, ConnRsp, Imm, InfoReq, InfoRsp, MsgFlags, RdmaRead, RdmaWrite, Request, RkeyRsp, SgDesc,
    info::ChunkAddr, rdma,
};
use zerocopy::IntoBytes;

/// A message of a reliable connection, put together from its packets.
#[derive(Clone, Debug)]
struct Message {
    from_client: bool,
    class: Class,
    va: u64,
    rkey: u32,
    imm: Option<u32>,
    invalidates: Option<u32>,
    bytes: Vec<u8>,
}

#[derive(Default)]
struct Traffic {
    /// Private data of REQ and REP.
    requests: Vec<Vec<u8>>,
    responses: Vec<Vec<u8>>,
    messages: Vec<Message>,
}

fn read(name: &str) -> Traffic {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../pcap-fixtures")
        .join(name);
    let mut pcap = PcapReader::new(File::open(path).unwrap()).unwrap();
    let mut traffic = Traffic::default();
    let mut open: HashMap<(bool, u32), Message> = HashMap::new();
    while let Some(frame) = pcap.next_packet() {
        let frame = frame.unwrap();
        let from_client = frame.data[26..30] == [10, 77, 0, 2];
        let packet = Packet::parse(&frame.data[42..]).unwrap();
        let info = packet.header.bth.opcode.info();
        if info.service == Service::Ud {
            let mad = packet.payload;
            match u16::from_be_bytes([mad[16], mad[17]]) {
                // Private data of the REQ starts with the RDMA_CM's 36 bytes.
                0x10 => traffic.requests.push(mad[24 + 140 + 36..24 + 140 + 92].to_vec()),
                0x13 => traffic.responses.push(mad[24 + 36..24 + 36 + 196].to_vec()),
                _ => {}
            }
            continue;
        }
        if !matches!(info.class, Class::Send | Class::Write) {
            continue;
        }
        let qpn = packet.header.bth.dest_qp.value();
        let message = open.entry((from_client, qpn)).or_insert_with(|| Message {
            from_client,
            class: info.class,
            va: packet.header.reth().map_or(0, |r| r.va),
            rkey: packet.header.reth().map_or(0, |r| r.rkey.0),
            imm: None,
            invalidates: None,
            bytes: Vec::new(),
        });
        message.bytes.extend_from_slice(packet.payload);
        if info.position.ends() {
            message.imm = packet.header.imm();
            message.invalidates = packet.header.ieth().map(|k| k.0);
            traffic.messages.extend(open.remove(&(from_client, qpn)));
        }
    }
    assert!(open.is_empty(), "messages without an end");
    traffic
}

#[test]
fn connection_messages_are_the_kernels() {
    let traffic = read("rnbd.pcap");
    assert_eq!((traffic.requests.len(), traffic.responses.len()), (2, 2));
    for (cid, bytes) in traffic.requests.iter().enumerate() {
        let req = ConnReq::parse(bytes).unwrap();
        assert_eq!((usize::from(req.cid.get()), req.cid_num.get()), (cid, 2));
        assert!(req.first_conn());
        let ours = ConnReq::new(
            req.cid.get(),
            req.cid_num.get(),
            req.recon_cnt.get(),
            req.path_uuid,
            req.session_uuid,
            true,
        );
        assert_eq!(ours.as_bytes(), &bytes[..ConnReq::LEN]);
    }
    for bytes in &traffic.responses {
        let rsp = ConnRsp::parse(bytes).unwrap();
        assert_eq!(rsp.errno(), 0);
        assert_eq!(rsp.flags(), MsgFlags::NEW_RKEY);
        assert_eq!(
            (rsp.queue_depth.get(), rsp.max_io_size.get(), rsp.max_hdr_size.get()),
            (512, 126_976, 4096)
        );
        assert_eq!(rsp.layout().unwrap(), ChunkLayout::new(512, 128 << 10).unwrap());
        let ours = ConnRsp::accept(512, 126_976, 4096, MsgFlags::NEW_RKEY);
        assert_eq!(ours.as_bytes(), &bytes[..ConnRsp::LEN]);
    }
}

/// What the two ends know of each other while the capture is replayed.
struct Replay {
    layout: ChunkLayout,
    chunks: Vec<ChunkAddr>,
    /// Requests in flight by chunk: destination and whether its key is to be revoked.
    inflight: HashMap<u32, Option<(SgDesc, bool)>>,
    written: HashMap<u32, u32>,
    invalidated: Vec<u32>,
    answered: usize,
}

impl Replay {
    fn request(&mut self, m: &Message) {
        let Imm::IoReq(payload) = Imm::decode(m.imm.expect("a request has an immediate value")).unwrap() else {
            panic!("not a request: {m:?}");
        };
        let (msg_id, offset) = self.layout.unpack(payload).unwrap();
        assert_eq!(Imm::IoReq(self.layout.pack(msg_id, offset)).encode(), m.imm.unwrap());
        let chunk = self.chunks[msg_id as usize];
        assert_eq!(m.rkey, chunk.rkey, "the key that the server gave last");
        let at = usize::try_from(chunk.addr + u64::from(offset) - m.va).unwrap();
        let message = &m.bytes[at..];
        let request = Request::parse(&message[..message.len().min(Request::MAX_LEN)], offset, 4096).unwrap();
        let Request {
            usr_len,
            data_len,
            dest,
            need_inval,
            ..
        } = request;
        let ours = match request.direction {
            Direction::Write => {
                assert_eq!((m.va, dest), (chunk.addr, None));
                RdmaWrite::new(usr_len).as_bytes().to_vec()
            }
            Direction::Read => {
                assert_eq!(m.va, chunk.addr + u64::from(data_len));
                assert_eq!(dest.map_or(0, |d| d.len.get()), data_len);
                let flags = if need_inval {
                    MsgFlags::NEED_INVAL
                } else {
                    MsgFlags::empty()
                };
                let head = rdma::RdmaRead::new(usr_len, flags, u16::from(dest.is_some()));
                [head.as_bytes(), dest.as_slice().as_bytes()].concat()
            }
        };
        assert_eq!(ours, message, "nothing lies behind the message");
        assert_eq!(u32::from(usr_len) + data_len, offset);
        let dest = dest.map(|d| (d, need_inval));
        assert!(
            self.inflight.insert(msg_id, dest).is_none(),
            "a chunk is used by one request at a time"
        );
    }

    fn answer(&mut self, m: &Message) {
        match (m.class, m.imm, m.invalidates) {
            (Class::Write, None, None) => {
                self.written.insert(m.rkey, m.bytes.len() as u32);
            }
            (Class::Send, None, Some(key)) => {
                assert!(m.bytes.is_empty());
                self.invalidated.push(key);
            }
            (Class::Send, Some(imm), None) => {
                let Imm::IoRsp(reply) = Imm::decode(imm).unwrap() else {
                    panic!("not an answer: {m:?}")
                };
                assert_eq!(Imm::IoRsp(reply).encode(), imm);
                assert_eq!(reply.errno, 0);
                let key = RkeyRsp::parse(&m.bytes).unwrap();
                assert_eq!(u32::from(key.buf_id.get()), reply.msg_id);
                assert_eq!(RkeyRsp::new(key.buf_id.get(), key.rkey.get()).as_bytes(), m.bytes);
                let dest = self.inflight.remove(&reply.msg_id).expect("an answer to a request");
                if let Some((dest, need_inval)) = dest {
                    assert_eq!(self.written.remove(&dest.key.get()), Some(dest.len.get()));
                    assert_eq!(self.invalidated.contains(&dest.key.get()), need_inval);
                    assert_eq!(reply.invalidated, need_inval);
                }
                self.chunks[reply.msg_id as usize].rkey = key.rkey.get();
                self.answered += 1;
            }
            _ => panic!("unexpected message from the server: {m:?}"),
        }
    }
}

#[test]
fn a_whole_session_of_the_kernel_is_read_and_made_again() {
    let traffic = read("rnbd.pcap");
    let layout = ConnRsp::parse(&traffic.responses[0]).unwrap().layout().unwrap();
    let mut messages = traffic.messages.iter();

    let info = messages.next().unwrap();
    assert!(info.from_client && info.class == Class::Send);
    let name = InfoReq::parse(&info.bytes).unwrap().name().unwrap();
    assert_eq!(name, "s1");
    assert_eq!(InfoReq::new(name).unwrap().as_bytes(), info.bytes);

    let info = messages.next().unwrap();
    assert!(!info.from_client && info.class == Class::Send);
    let rsp = InfoRsp::parse(&info.bytes).unwrap();
    assert_eq!(rsp.descriptors().len(), 512);
    assert_eq!(InfoRsp::new(rsp.descriptors().to_vec()).to_bytes(), info.bytes);
    assert_eq!(InfoRsp::parse(&rsp.to_bytes()).unwrap(), rsp);

    let mut replay = Replay {
        chunks: rsp.chunks(&layout).unwrap(),
        layout,
        inflight: HashMap::new(),
        written: HashMap::new(),
        invalidated: Vec::new(),
        answered: 0,
    };
    for m in messages {
        if m.from_client {
            replay.request(m)
        } else {
            replay.answer(m)
        }
    }
    assert!(replay.inflight.is_empty());
    assert!(replay.answered > 10, "{} requests", replay.answered);
}

#[test]
fn a_message_of_the_unmap_capture_has_no_data() {
    let traffic = read("rnbd-unmap.pcap");
    let close = traffic.messages.iter().find(|m| m.from_client).unwrap();
    let layout = ChunkLayout::new(512, 128 << 10).unwrap();
    let Imm::IoReq(payload) = Imm::decode(close.imm.unwrap()).unwrap() else {
        panic!("not a request")
    };
    let (_, offset) = layout.unpack(payload).unwrap();
    let request = Request::parse(&close.bytes[offset as usize..], offset, 4096).unwrap();
    assert_eq!(request.direction, Direction::Write);
    assert_eq!((u32::from(request.usr_len), request.data_len), (offset, 0));
    assert_eq!(
        RdmaWrite::new(offset as u16).as_bytes(),
        &close.bytes[offset as usize..]
    );
    assert_eq!(RdmaRead::LEN, 8);
}
