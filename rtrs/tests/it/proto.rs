//! Messages and immediate values: what is written is read back, and no bytes from a peer do harm.

use proptest::prelude::*;
use rtrs::{
    Direction,
    proto::{
        ChunkLayout, ConnReq, ConnRsp, Imm, InfoReq, InfoRsp, IoReply, MsgFlags, ProtoError, RdmaRead, RdmaWrite,
        Request, RkeyRsp, SgDesc, Uuid, info::check_name,
    },
};
use zerocopy::IntoBytes;

proptest! {
    #[test]
    fn connection_requests(cid in 0u16..4096, more in 1u16..4096, recon: u16, path: [u8; 16], sess: [u8; 16], first: bool) {
        let num = cid.saturating_add(more).min(4096);
        prop_assume!(cid < num);
        let msg = ConnReq::new(cid, num, recon, Uuid(path), Uuid(sess), first);
        let back = ConnReq::parse(msg.as_bytes()).unwrap();
        prop_assert_eq!(back, &msg);
        prop_assert_eq!((back.cid.get(), back.cid_num.get(), back.recon_cnt.get()), (cid, num, recon));
        prop_assert_eq!((back.path_uuid, back.session_uuid, back.first_conn()), (Uuid(path), Uuid(sess), first));
    }

    #[test]
    fn connection_responses(depth: u16, io: u32, hdr: u32, new_rkey: bool, errno in 1i32..4096) {
        let flags = if new_rkey { MsgFlags::NEW_RKEY } else { MsgFlags::empty() };
        let msg = ConnRsp::accept(depth, io, hdr, flags);
        let back = ConnRsp::parse(msg.as_bytes()).unwrap();
        prop_assert_eq!(back, &msg);
        prop_assert_eq!((back.errno(), back.flags()), (0, flags));
        if let Ok(layout) = back.layout() {
            prop_assert_eq!(layout.queue_depth(), u32::from(depth));
            prop_assert_eq!(u64::from(layout.chunk_size()), u64::from(io) + u64::from(hdr));
        }
        let refused = ConnRsp::reject(errno);
        // The kernel reads the field as a signed 16-bit number.
        prop_assert_eq!(i16::from_le_bytes(refused.as_bytes()[4..6].try_into().unwrap()), -(errno as i16));
        prop_assert_eq!(ConnRsp::parse(refused.as_bytes()).unwrap().errno(), errno);
    }

    #[test]
    fn immediate_values(msg_id in 0u32..1 << 19, errno in 0i32..512, invalidated: bool, payload in 0u32..1 << 28) {
        let reply = IoReply::new(msg_id, -errno, invalidated);
        prop_assert_eq!(reply.errno, errno as u16);
        for imm in [Imm::IoRsp(reply), Imm::IoReq(payload), Imm::HbMsg, Imm::HbAck] {
            prop_assert_eq!(Imm::decode(imm.encode()), Ok(imm));
        }
    }

    #[test]
    fn any_immediate_value_decodes_or_is_refused(imm: u32) {
        match Imm::decode(imm) {
            Ok(Imm::HbMsg) => prop_assert_eq!(imm >> 28, 8),
            Ok(Imm::HbAck) => prop_assert_eq!(imm >> 28, 9),
            Ok(known) => prop_assert_eq!(known.encode(), imm),
            Err(_) => prop_assert!(!matches!(imm >> 28, 0 | 1 | 2 | 8 | 9)),
        }
    }

    #[test]
    fn chunk_and_offset(depth in 1u32..=65535, size in 1u32..1 << 20, id: u32, offset: u32) {
        let Ok(layout) = ChunkLayout::new(depth, size) else { return Ok(()) };
        let (id, offset) = (id % depth, offset % size);
        let payload = layout.pack(id, offset);
        prop_assert!(payload < 1 << 28);
        prop_assert_eq!(layout.unpack(payload), Ok((id, offset)));
    }

    #[test]
    fn unpacked_values_are_in_bounds(depth in 1u32..=65535, size in 1u32..1 << 20, payload: u32) {
        let Ok(layout) = ChunkLayout::new(depth, size) else { return Ok(()) };
        if let Ok((id, offset)) = layout.unpack(payload) {
            prop_assert!(id < depth && offset < size);
        }
    }

    #[test]
    fn names(name in "[a-zA-Z0-9_@:-]{1,254}") {
        let msg = InfoReq::new(&name).unwrap();
        prop_assert_eq!(InfoReq::parse(msg.as_bytes()).unwrap().name(), Ok(name.as_str()));
    }

    #[test]
    fn session_information(pieces in 1u32..16, per in 1u32..16, size in 4097u32..100_000, addr in 0u64..1 << 47, key: u32) {
        let layout = ChunkLayout::new(pieces * per, size).unwrap();
        let desc: Vec<_> = (0..pieces)
            .map(|i| SgDesc::new(addr + (u64::from(i) << 32), key.wrapping_add(i), per * size))
            .collect();
        let rsp = InfoRsp::parse(&InfoRsp::new(desc).to_bytes()).unwrap();
        let chunks = rsp.chunks(&layout).unwrap();
        prop_assert_eq!(chunks.len() as u32, pieces * per);
        for (i, c) in chunks.iter().enumerate() {
            let (piece, at) = (i as u32 / per, i as u32 % per);
            prop_assert_eq!(c.addr, addr + (u64::from(piece) << 32) + u64::from(at * size));
            prop_assert_eq!(c.rkey, key.wrapping_add(piece));
        }
    }

    #[test]
    fn requests(usr in 0u16..=4096, data in 0u32..1 << 20, addr: u64, key: u32, inval: bool) {
        let offset = data + u32::from(usr);
        let write = RdmaWrite::new(usr);
        let expected = Request {
            direction: Direction::Write,
            usr_len: usr,
            data_len: data,
            dest: None,
            need_inval: false,
        };
        prop_assert_eq!(Request::parse(write.as_bytes(), offset, 4096), Ok(expected));
        let flags = if inval { MsgFlags::NEED_INVAL } else { MsgFlags::empty() };
        let dest = SgDesc::new(addr, key, data);
        let read = [RdmaRead::new(usr, flags, 1).as_bytes(), dest.as_bytes()].concat();
        let expected = Request {
            direction: Direction::Read,
            ..expected
        };
        let wanted = Request {
            dest: Some(dest),
            need_inval: inval,
            ..expected
        };
        prop_assert_eq!(Request::parse(&read, offset, 4096), Ok(wanted));
        // Without a destination there is no key to revoke, whatever the flag says.
        let status = RdmaRead::new(usr, flags, 0);
        prop_assert_eq!(Request::parse(status.as_bytes(), offset, 4096), Ok(expected));
        if offset > 0 {
            // The header can't be longer than what lies before the message.
            let short = Request::parse(write.as_bytes(), u32::from(usr).saturating_sub(1), 4096);
            prop_assert_eq!(short.is_err(), usr > 0);
        }
    }

    #[test]
    fn random_bytes_do_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..400), offset: u32, hdr in 0u32..8192) {
        let _ = ConnReq::parse(&bytes);
        let _ = ConnRsp::parse(&bytes).map(ConnRsp::layout);
        let _ = InfoReq::parse(&bytes).map(|m| m.name().map(str::to_owned));
        let layout = ChunkLayout::new(512, 128 << 10).unwrap();
        let _ = InfoRsp::parse(&bytes).map(|m| m.chunks(&layout));
        let _ = RkeyRsp::parse(&bytes);
        if let Ok(Request { usr_len, data_len, .. }) = Request::parse(&bytes, offset, hdr) {
            prop_assert_eq!(u32::from(usr_len) + data_len, offset);
            prop_assert!(u32::from(usr_len) <= hdr);
        }
    }

    /// Random bytes rarely get past the type; these start right and go wrong somewhere.
    #[test]
    fn spoiled_messages_do_no_harm(at in 0usize..300, value: u8, cut in 0usize..300, offset in 0u32..200_000) {
        let layout = ChunkLayout::new(4, 16 << 10).unwrap();
        let desc: Vec<_> = (0..4).map(|i| SgDesc::new(u64::MAX - 70_000 + i * 16_384, 7, 16 << 10)).collect();
        let messages = [
            ConnReq::new(1, 2, 3, Uuid([1; 16]), Uuid([2; 16]), true).as_bytes().to_vec(),
            ConnRsp::accept(4, 12 << 10, 4096, MsgFlags::NEW_RKEY).as_bytes().to_vec(),
            InfoReq::new("name").unwrap().as_bytes().to_vec(),
            InfoRsp::new(desc).to_bytes(),
            [RdmaRead::new(8, MsgFlags::NEED_INVAL, 1).as_bytes(), SgDesc::new(1, 2, 3).as_bytes()].concat(),
            RkeyRsp::new(3, 4).as_bytes().to_vec(),
        ];
        for mut bytes in messages {
            if let Some(b) = bytes.get_mut(at) {
                *b = value;
            }
            bytes.truncate(cut.max(1));
            let _ = ConnReq::parse(&bytes);
            let _ = ConnRsp::parse(&bytes).map(ConnRsp::layout);
            let _ = InfoReq::parse(&bytes).map(|m| m.name().map(str::to_owned));
            if let Ok(chunks) = InfoRsp::parse(&bytes).and_then(|m| m.chunks(&layout)) {
                prop_assert_eq!(chunks.len(), 4);
            }
            let _ = Request::parse(&bytes, offset, 4096);
            let _ = RkeyRsp::parse(&bytes);
        }
    }
}

#[test]
fn each_check_names_its_field() {
    let ok = ConnReq::new(0, 2, 1, Uuid::default(), Uuid::default(), true);
    let spoil = |at: usize, value: u8| {
        let mut b = ok.as_bytes().to_vec();
        b[at] = value;
        ConnReq::parse(&b).map(|_| ())
    };
    assert_eq!(spoil(2, 0), Err(ProtoError::Magic(0x1b00)));
    assert_eq!(spoil(5, 3), Err(ProtoError::Version(0x300)));
    // Another minor version is fine.
    assert_eq!(spoil(4, 9), Ok(()));
    assert!(matches!(
        spoil(6, 2),
        Err(ProtoError::Field {
            field: "connection number",
            ..
        })
    ));
    assert!(matches!(
        spoil(9, 0x20),
        Err(ProtoError::Field {
            field: "number of connections",
            ..
        })
    ));
    assert!(matches!(
        ConnReq::parse(&ok.as_bytes()[..55]),
        Err(ProtoError::Short { need: 56, len: 55, .. })
    ));
    assert_eq!(
        ProtoError::Version(0x300).to_string(),
        "protocol version 3.0, this side speaks 2.0"
    );
}

#[test]
fn session_names_follow_the_kernels_rules() {
    for bad in ["", "a/b", "a.b", "a\0b", &"x".repeat(255)] {
        assert!(check_name(bad).is_err(), "{bad:?}");
        assert!(InfoReq::new(bad).is_err(), "{bad:?}");
    }
    assert!(check_name(&"x".repeat(254)).is_ok());
    let mut endless = InfoReq::new("x").unwrap().as_bytes().to_vec();
    endless[2..257].fill(b'x');
    assert_eq!(
        InfoReq::parse(&endless).unwrap().name(),
        Err(ProtoError::Name("has no end"))
    );
}

#[test]
fn incomplete_chunk_lists_are_refused() {
    let layout = ChunkLayout::new(4, 8192).unwrap();
    let list = |lens: &[u32]| {
        let desc = lens.iter().map(|l| SgDesc::new(0x1000, 1, *l)).collect();
        InfoRsp::new(desc).chunks(&layout).map(|c| c.len())
    };
    assert_eq!(list(&[8192; 4]), Ok(4));
    assert_eq!(list(&[4 * 8192]), Ok(4));
    assert_eq!(list(&[3 * 8192, 8192]), Ok(4));
    for bad in [
        &[][..],
        &[8192; 3],
        &[8192; 2],
        &[5 * 8192],
        &[8192, 8191],
        &[0, 8192],
        &[u32::MAX - 8191],
    ] {
        assert!(list(bad).is_err(), "{bad:?}");
    }
    let wraps = InfoRsp::new(vec![SgDesc::new(u64::MAX - 100, 1, 4 * 8192)]);
    assert!(wraps.chunks(&layout).is_err());
}

#[test]
fn queue_depth_and_chunk_size_share_28_bits() {
    assert!(ChunkLayout::new(512, 128 << 10).is_ok());
    assert!(ChunkLayout::new(512, 512 << 10).is_ok());
    assert!(ChunkLayout::new(512, 1 << 20).is_err());
    assert!(ChunkLayout::new(1, 1 << 28).is_ok());
    assert!(ChunkLayout::new(65535, 4096).is_ok());
    assert!(ChunkLayout::new(65536, 4096).is_err());
    assert!(ChunkLayout::new(0, 4096).is_err());
    assert!(ChunkLayout::new(1, 0).is_err());
    // The kernel's numbers for the default: 9 bits of chunk, 19 of offset.
    assert_eq!(ChunkLayout::new(512, 128 << 10).unwrap().pack(3, 0x48), 3 << 19 | 0x48);
}

#[test]
fn statuses_that_do_not_fit_become_eio() {
    assert_eq!(IoReply::new(1, 28, false).errno, 28);
    assert_eq!(IoReply::new(1, -28, false).errno, 28);
    assert_eq!(IoReply::new(1, 511, false).errno, 511);
    assert_eq!(IoReply::new(1, 512, false).errno, 5);
    assert_eq!(IoReply::new(1, i32::MIN, false).errno, 5);
}

#[test]
fn session_names_have_no_control_characters() {
    for bad in ["a\nb", "\x1b[2J", "a\u{7f}", "\u{9b}31m"] {
        assert!(check_name(bad).is_err(), "{bad:?}");
        // As a client sends it that does not check.
        let mut bytes = InfoReq::new("x").unwrap().as_bytes().to_vec();
        bytes[2..2 + bad.len()].copy_from_slice(bad.as_bytes());
        assert!(InfoReq::parse(&bytes).unwrap().name().is_err(), "{bad:?}");
    }
    assert!(check_name("größer 磁盘").is_ok());
}
