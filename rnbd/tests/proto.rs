//! Messages: what is written reads back, nothing panics, and the kernel's own bytes parse.

use pcap_file::pcap::PcapReader;
use proptest::prelude::*;
use rnbd::{
    Errno,
    proto::{
        AccessMode, CACHE_FUA, CACHE_WRITEBACK, ClientMsg, IoOp, MsgClose, MsgIo, MsgOpen, MsgOpenRsp, MsgSessInfo,
        ProtoError, Rw, parse_open_rsp, parse_sess_info_rsp,
    },
};
use zerocopy::IntoBytes;

fn mode() -> impl Strategy<Value = AccessMode> {
    prop::sample::select(vec![AccessMode::ReadOnly, AccessMode::ReadWrite, AccessMode::Migration])
}

fn rw() -> impl Strategy<Value = Rw> {
    (prop::sample::select(IoOp::ALL.to_vec()), any::<[bool; 4]>()).prop_map(|(op, [sync, fua, preflush, no_unmap])| {
        Rw {
            op,
            sync,
            fua,
            preflush,
            no_unmap,
        }
    })
}

proptest! {
    #[test]
    fn io_reads_back(id: u32, rw in rw(), sector: u64, bytes: u32) {
        let m = MsgIo::new(id, rw, sector, bytes);
        prop_assert_eq!(ClientMsg::parse(m.as_bytes()), Ok(ClientMsg::Io(m)));
        prop_assert_eq!(Rw::from_wire(m.rw.get()), Some(rw));
        prop_assert_eq!((m.device_id.get(), m.sector.get(), m.bi_size.get()), (id, sector, bytes));
    }

    #[test]
    fn open_reads_back(name in prop::collection::vec(1u8.., 1..255), mode in mode()) {
        let m = MsgOpen::new(&name, mode).unwrap();
        let Ok(ClientMsg::Open(back)) = ClientMsg::parse(m.as_bytes()) else { panic!() };
        prop_assert_eq!(back.name(), Some(&name[..]));
        prop_assert_eq!(AccessMode::from_wire(back.access_mode), Some(mode));
    }

    #[test]
    fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300), kind in 0u8..8) {
        let mut b = bytes;
        if b.len() >= 2 { b[0] = kind; b[1] = 0; }
        if let Ok(ClientMsg::Open(o)) = ClientMsg::parse(&b) { let _ = o.name(); }
        let _ = parse_open_rsp(&b);
        let _ = parse_sess_info_rsp(&b);
    }

    #[test]
    fn rw_knows_its_bits_and_ignores_others(n: u32) {
        match Rw::from_wire(n) {
            Some(rw) => prop_assert_eq!(rw.to_wire(), n & 0xfff),
            None => prop_assert!(n & 0xff > 5),
        }
    }
}

#[test]
fn field_positions_are_the_kernels() {
    let m = MsgIo::new(
        0x0403_0201,
        Rw {
            sync: true,
            fua: true,
            ..Rw::new(IoOp::Write)
        },
        0x1122_3344_5566_7788,
        0x1000,
    );
    let mut want = vec![
        4, 0, 0, 0, 1, 2, 3, 4, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 1, 3, 0, 0, 0, 0x10,
    ];
    want.resize(32, 0);
    assert_eq!(m.as_bytes(), want);
    let zeroes = Rw {
        preflush: true,
        no_unmap: true,
        ..Rw::new(IoOp::WriteZeroes)
    };
    assert_eq!(zeroes.to_wire(), 0xc05);
    assert_eq!(MsgClose::new(7).as_bytes(), [5, 0, 0, 0, 7, 0, 0, 0]);
    assert_eq!(MsgSessInfo::request(2).as_bytes()[..5], [0, 0, 0, 0, 2]);
    let o = MsgOpen::new(b"ab", AccessMode::Migration).unwrap();
    assert_eq!(o.as_bytes()[..9], [2, 0, 0, 0, 2, 0, b'a', b'b', 0]);
    assert_eq!(o.as_bytes().len(), 264);
}

#[test]
fn bad_messages_are_named() {
    assert_eq!(MsgOpen::new(b"", AccessMode::ReadOnly).unwrap_err(), Errno::EINVAL);
    assert_eq!(MsgOpen::new(b"a\0b", AccessMode::ReadOnly).unwrap_err(), Errno::EINVAL);
    assert_eq!(
        MsgOpen::new(&[b'a'; 255], AccessMode::ReadOnly).unwrap_err(),
        Errno::ENAMETOOLONG
    );
    assert_eq!(ClientMsg::parse(&[1, 0, 0, 0]), Err(ProtoError::Type(1)));
    assert_eq!(
        ClientMsg::parse(&[5, 0, 0, 0, 1, 0, 0]),
        Err(ProtoError::Short {
            kind: 5,
            len: 7,
            need: 8
        })
    );
    assert_eq!(
        ClientMsg::parse(&[4; 2]),
        Err(ProtoError::Short {
            kind: 0,
            len: 2,
            need: 4
        })
    );
    let mut unterminated = [0xff; 264];
    unterminated[..4].copy_from_slice(&[2, 0, 0, 0]);
    let Ok(ClientMsg::Open(o)) = ClientMsg::parse(&unterminated) else {
        panic!()
    };
    assert_eq!(o.name(), None);
}

#[test]
fn a_request_without_priority_is_taken() {
    let m = MsgIo::new(1, Rw::new(IoOp::Read), 5, 512);
    assert_eq!(ClientMsg::parse(&m.as_bytes()[..MsgIo::LEN_V1]), Ok(ClientMsg::Io(m)));
    assert!(ClientMsg::parse(&m.as_bytes()[..23]).is_err());
}

#[test]
fn a_senseless_open_response_is_refused() {
    let mut m = MsgOpenRsp::new();
    assert_eq!(parse_open_rsp(m.as_bytes()), Err(Errno::EINVAL), "no block size");
    m.logical_block_size.set(512);
    assert!(parse_open_rsp(m.as_bytes()).is_ok());
    m.logical_block_size.set(513);
    assert!(parse_open_rsp(m.as_bytes()).is_err());
    m.logical_block_size.set(512);
    m.nsectors.set(u64::MAX / 512);
    assert!(parse_open_rsp(m.as_bytes()).is_err());
    m.nsectors.set(8);
    m.hdr.msg_type.set(2);
    assert!(parse_open_rsp(m.as_bytes()).is_err());
}

/// A complete RDMA WRITE of the capture: from the client (with immediate data) or from the server.
struct Write {
    from_client: bool,
    data: Vec<u8>,
}

/// RDMA WRITE messages of a capture of Ethernet frames with IPv4, UDP and RoCEv2, without loss.
fn rdma_writes(file: &[u8]) -> Vec<Write> {
    const RETH: usize = 16;
    const IMM: usize = 4;
    let mut reader = PcapReader::new(file).unwrap();
    let mut open: std::collections::HashMap<u32, Vec<u8>> = Default::default();
    let mut out = Vec::new();
    while let Some(p) = reader.next_packet() {
        let f = p.unwrap().data;
        let (opcode, pad) = (f[42], usize::from(f[43] >> 4 & 3));
        let qpn = u32::from_be_bytes([0, f[47], f[48], f[49]]);
        let skip = match opcode {
            6 | 10 => RETH,
            7 | 8 => 0,
            9 => IMM,
            11 => RETH + IMM,
            _ => continue,
        };
        let data = open.entry(qpn).or_default();
        data.extend(&f[54 + skip..f.len() - 4 - pad]);
        if matches!(opcode, 8..=11) {
            out.push(Write {
                from_client: f[29] == 2,
                data: std::mem::take(data),
            });
        }
    }
    out
}

/// The RNBD message and the data before it, of what a client wrote into a chunk: data, message, RTRS message
/// (`struct rtrs_msg_rdma_write` or `rtrs_msg_rdma_read` with some descriptors).
fn user_message(w: &[u8]) -> (ClientMsg, usize) {
    let u16_at = |at: usize| usize::from(u16::from_le_bytes([w[at], w[at + 1]]));
    for descriptors in 0..=64 {
        let (len, kind) = if descriptors == 0 {
            (4, 2)
        } else {
            (8 + 16 * (descriptors - 1), 3)
        };
        let Some(at) = w.len().checked_sub(len) else { break };
        let read_fits = kind == 2 || u16_at(at + 6) == descriptors - 1;
        if u16_at(at) == kind && read_fits && at >= u16_at(at + 2) {
            let start = at - u16_at(at + 2);
            return (ClientMsg::parse(&w[start..at]).unwrap(), start);
        }
    }
    panic!("no RTRS message at the end of {} bytes", w.len());
}

#[test]
fn the_kernels_messages_parse() {
    let writes = rdma_writes(include_bytes!("../../pcap-fixtures/rnbd.pcap"));
    let (mut infos, mut opens, mut read, mut written) = (0, 0, 0u64, 0u64);
    for w in writes.iter().filter(|w| w.from_client) {
        match user_message(&w.data) {
            (ClientMsg::SessInfo(m), _) => {
                infos += 1;
                assert_eq!(m.ver, 2);
            }
            (ClientMsg::Open(m), _) => {
                opens += 1;
                assert_eq!(m.name(), Some(&b"newroot/dev/ram0"[..]));
                assert_eq!(AccessMode::from_wire(m.access_mode), Some(AccessMode::ReadWrite));
            }
            (ClientMsg::Io(m), data) => {
                let rw = Rw::from_wire(m.rw.get()).expect("known operation");
                assert_eq!(m.device_id.get(), 0);
                match rw.op {
                    IoOp::Read => read += u64::from(m.bi_size.get()),
                    IoOp::Write => {
                        assert_eq!(m.bi_size.get() as usize, data);
                        written += data as u64;
                    }
                    _ => {}
                }
            }
            (m, _) => panic!("{m:?}"),
        }
    }
    assert_eq!((infos, opens), (1, 1));
    assert!(written >= 256 << 10, "{written}");
    assert!(read >= 256 << 10, "{read}");
}

#[test]
fn the_kernels_answers_parse() {
    let writes = rdma_writes(include_bytes!("../../pcap-fixtures/rnbd.pcap"));
    let mut answers = writes.iter().filter(|w| !w.from_client);
    let info = parse_sess_info_rsp(&answers.next().unwrap().data).unwrap();
    assert_eq!(info, MsgSessInfo::response(2));
    let bytes = &answers.next().unwrap().data;
    let open = parse_open_rsp(bytes).unwrap();
    assert_eq!(open.as_bytes(), bytes);
    assert_eq!(open.nsectors.get(), 0x20000);
    assert_eq!(
        (open.logical_block_size.get(), open.physical_block_size.get()),
        (512, 4096)
    );
    assert_eq!((open.max_hw_sectors.get(), open.max_segments.get()), (255, 128));
    assert_eq!(open.cache_policy & (CACHE_FUA | CACHE_WRITEBACK), 0);
}

#[test]
fn the_kernels_close_parses() {
    let writes = rdma_writes(include_bytes!("../../pcap-fixtures/rnbd-unmap.pcap"));
    let closes: Vec<_> = writes
        .iter()
        .filter(|w| w.from_client)
        .map(|w| user_message(&w.data).0)
        .collect();
    let [ClientMsg::Close(m)] = closes[..] else {
        panic!("{closes:?}")
    };
    assert_eq!(m.device_id.get(), 0);
}
