//! Messages: what is written reads back, nothing panics, and the kernel's own bytes parse.

use pcap_file::pcap::PcapReader;
use proptest::prelude::*;
use rnbd::{
    Errno,
    block::{self, Extent},
    proto::{
        AccessMode, CACHE_FUA, CACHE_WRITEBACK, ClientMsg, IoOp, MsgClose, MsgIo, MsgOpen, MsgOpenRsp, MsgSessInfo,
        ProtoError, Rw, STATUS_MAGIC,
        instance::Instance,
        parse_open_rsp, parse_sess_info_rsp,
        status::{self, StatusError},
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
            None => prop_assert!(n & 0xff > 5 && n & 0xff != 0xba),
        }
    }

    #[test]
    fn block_status_reads_back(
        parts in prop::collection::vec((1u32..5000, any::<[bool; 2]>()), 1..600),
        most in 1u32..600,
        more in any::<u32>(),
    ) {
        let all: Vec<Extent> = parts
            .iter()
            .map(|(sectors, [hole, zero])| Extent { len: u64::from(*sectors) * 512, hole: *hole, zero: *zero })
            .collect();
        let bytes = status::answer(&all, most);
        prop_assert_eq!(bytes.len(), status::answer_len(most));
        let told = &all[..all.len().min(most as usize)];
        let range = told.iter().map(|e| e.len).sum::<u64>() + u64::from(more);
        let mut joined = Vec::new();
        told.iter().for_each(|extent| block::append(&mut joined, *extent));
        prop_assert_eq!(status::parse(&bytes, range, most, 512), Ok(joined));
    }

    /// The answer read from any bytes is in the range, in whole blocks, and no longer than it may be.
    #[test]
    fn any_answer_to_block_status_is_in_the_range_or_refused(
        words in prop::collection::vec(prop_oneof![0u32..4, any::<u32>()], 0..40),
        cut in 0usize..8,
        count in prop_oneof![0u32..30, any::<u32>()],
        len in prop_oneof![1u64..100_000, any::<u64>()],
        most in 0u32..30,
        block in prop::sample::select(vec![512u64, 4096]),
    ) {
        let mut bytes = STATUS_MAGIC.to_vec();
        bytes.extend(count.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(words.iter().flat_map(|w| w.to_le_bytes()));
        bytes.truncate(bytes.len() - cut);
        if let Ok(extents) = status::parse(&bytes, len, most, block) {
            prop_assert!((1..=most as usize).contains(&extents.len()));
            prop_assert!(extents.iter().all(|e| e.len > 0 && e.len.is_multiple_of(block)));
            prop_assert!(extents.iter().map(|e| e.len).sum::<u64>() <= len);
            prop_assert!(extents.windows(2).all(|pair| !pair[0].is_like(&pair[1])));
        }
    }
}

#[test]
fn an_instance_has_its_place_in_the_answer_to_an_open() {
    let instance = Instance::from_wire(0x0102_0304);
    let mut rsp = MsgOpenRsp::new();
    rsp.set_instance(instance);
    assert_eq!(
        (&rsp.as_bytes()[..4], &rsp.as_bytes()[46..48]),
        (&[3, 0, 4, 3][..], &[2, 1][..])
    );
    assert!(rsp.as_bytes()[4..46].iter().all(|byte| *byte == 0));
    assert_eq!(rsp.instance(), None, "the kernel's server leaves anything there");
    rsp.offer_block_status();
    assert_eq!(rsp.instance(), instance);
    rsp.set_instance(None);
    assert_eq!(rsp.instance(), None);
}

#[test]
fn block_status_has_its_place_in_the_messages() {
    let mut rsp = MsgOpenRsp::new();
    assert!(!rsp.offers_block_status());
    rsp.offer_block_status();
    assert!(rsp.offers_block_status());
    assert_eq!(rsp.as_bytes()[46..], [&[0, 0], &STATUS_MAGIC[..]].concat());

    let m = status::request(7, 8 * 512, 0x0102_0300 * 512, 4096, 0x0203);
    let tail = [0xba, 1, 0, 0, 0, 0x10, 0, 0, 0, 0, 3, 2, 0, 3, 2, 1];
    assert_eq!(m.as_bytes()[..16], [4, 0, 0, 0, 7, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(m.as_bytes()[16..], tail);
    assert_eq!(ClientMsg::parse(m.as_bytes()), Ok(ClientMsg::Io(m)));
    // Without what came with protocol 2 it asks for nothing.
    let Ok(ClientMsg::Io(short)) = ClientMsg::parse(&m.as_bytes()[..MsgIo::LEN_V1]) else {
        panic!()
    };
    assert_eq!(short.status_sectors.get(), 0);
    let long = status::request(7, 0, u64::MAX, 4096, u32::MAX);
    assert_eq!((long.status_sectors.get(), long.status_extents.get()), (u32::MAX, 0));

    for (room, wanted, most) in [
        (4096, 0, 510),
        (4096, 3, 3),
        (512, 100, 62),
        (1 << 20, 0, 510),
        (24, 0, 1),
        (23, 0, 0),
        (0, 9, 0),
    ] {
        assert_eq!(
            status::request(7, 0, 512, room, wanted).most_extents(),
            most,
            "{room}, {wanted}"
        );
    }

    let answer = status::answer(&[Extent::data(1024), Extent::hole(512)], 3);
    let mut want = STATUS_MAGIC.to_vec();
    want.extend([2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0]);
    want.extend([0; 8]);
    assert_eq!(answer, want);
}

#[test]
fn what_is_wrong_with_an_answer_to_block_status_is_named() {
    let (data, hole) = (Extent::data, Extent::hole);
    let answer = |extents: &[Extent]| status::answer(extents, extents.len() as u32);
    let count = |n: u8| {
        let mut bytes = answer(&[data(512), hole(512)]);
        bytes[8] = n;
        bytes
    };
    for (bytes, why) in [
        (Vec::new(), StatusError::Foreign),
        (STATUS_MAGIC.to_vec(), StatusError::Foreign),
        // What a server gives that reads instead.
        (vec![0; 4096], StatusError::Foreign),
        (count(0), StatusError::Count { count: 0, most: 2 }),
        (count(3), StatusError::Count { count: 3, most: 2 }),
        (answer(&[data(512); 4]), StatusError::Count { count: 4, most: 3 }),
        (answer(&[data(512), hole(0)]), StatusError::Empty(1)),
        (answer(&[data(8192), hole(512)]), StatusError::Beyond(1)),
        (answer(&[data(u64::MAX)]), StatusError::Beyond(0)),
    ] {
        assert_eq!(status::parse(&bytes, 8192, 3, 512), Err(why), "{bytes:?}");
    }
    let torn = answer(&[data(4096), hole(512)]);
    assert_eq!(status::parse(&torn, 8192, 3, 4096), Err(StatusError::Torn(1)));
    // Bits that nobody knows yet.
    let mut more = answer(&[hole(8192)]);
    more[20] |= 0xf4;
    assert_eq!(status::parse(&more, 8192, 3, 512), Ok(vec![hole(8192)]));
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
    let writes = rdma_writes(include_bytes!("../../../pcap-fixtures/rnbd.pcap"));
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
    let writes = rdma_writes(include_bytes!("../../../pcap-fixtures/rnbd.pcap"));
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
    let writes = rdma_writes(include_bytes!("../../../pcap-fixtures/rnbd-unmap.pcap"));
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
