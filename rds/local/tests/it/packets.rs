//! Every packet comes back from its bytes, and no bytes make a parser panic.

use std::net::SocketAddr;

use proptest::{collection::vec, option, prelude::*};
use rds_local::{
    Answer, AtomicKind, AtomicOp, MAX_LOCAL, MAX_MESSAGE, Op, ProtocolError, RdmaOp, RecvHeader, RecvKind, Request,
    SendHeader, SocketKey, SocketOption,
};

fn addr() -> impl Strategy<Value = SocketAddr> {
    prop_oneof![
        any::<([u8; 4], u16)>().prop_map(SocketAddr::from),
        any::<([u8; 16], u16)>().prop_map(SocketAddr::from),
    ]
}

fn key() -> impl Strategy<Value = SocketKey> {
    any::<u64>().prop_map(SocketKey)
}

fn request() -> impl Strategy<Value = Request> {
    let option = prop_oneof![
        Just(SocketOption::SendBuffer),
        Just(SocketOption::RecvBuffer),
        Just(SocketOption::RecvErr),
        Just(SocketOption::CongMonitor),
        Just(SocketOption::Transport),
    ];
    prop_oneof![
        Just(Request::Socket),
        key().prop_map(Request::Attach),
        (key(), addr()).prop_map(|(key, addr)| Request::Bind(key, addr)),
        (key(), addr()).prop_map(|(key, addr)| Request::Connect(key, addr)),
        (key(), any::<u8>()).prop_map(|(key, tos)| Request::SetTos(key, tos)),
        (key(), option, any::<u64>()).prop_map(|(key, option, value)| Request::SetOption(key, option, value)),
        (key(), addr()).prop_map(|(key, addr)| Request::Cancel(key, addr)),
        (key(), option::of(addr()), any::<bool>()).prop_map(|(socket, to, wait)| Request::Congestion {
            socket,
            to,
            wait
        }),
        any::<u32>().prop_map(Request::Info),
        (key(), any::<(u64, u64, u32)>()).prop_map(|(socket, (addr, len, flags))| Request::Map {
            socket,
            addr,
            len,
            flags
        }),
        (key(), any::<(u64, u32)>()).prop_map(|(socket, (cookie, flags))| Request::Unmap { socket, cookie, flags }),
        Just(Request::Memory),
        (key(), any::<u64>()).prop_map(|(socket, cookie)| Request::Region(socket, cookie)),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let kind = prop_oneof![
        Just(AtomicKind::FetchAdd),
        Just(AtomicKind::CompareSwap),
        Just(AtomicKind::MaskedFetchAdd),
        Just(AtomicKind::MaskedCompareSwap),
    ];
    prop_oneof![
        Just(Op::None),
        any::<u64>().prop_map(Op::Dest),
        (any::<[u64; 5]>(), vec(any::<(u64, u64)>(), 1..9)).prop_map(
            |([cookie, remote_addr, remote_len, flags, token], local)| {
                Op::Rdma(RdmaOp {
                    memory: 3,
                    cookie,
                    remote_addr,
                    remote_len,
                    flags,
                    token,
                    local,
                })
            }
        ),
        (kind, any::<([u64; 5], [u64; 4])>()).prop_map(
            |(kind, ([cookie, local_addr, remote_addr, flags, token], values))| {
                Op::Atomic(AtomicOp {
                    memory: 4,
                    kind,
                    cookie,
                    local_addr,
                    remote_addr,
                    values,
                    flags,
                    token,
                })
            }
        ),
    ]
}

fn packet(to: Option<SocketAddr>, op: &Op, data: &[u8]) -> Vec<u8> {
    let op_bytes = op.to_bytes();
    let header = SendHeader::new(to, op, op_bytes.len(), data.len());
    [zerocopy::IntoBytes::as_bytes(&header), &op_bytes, data].concat()
}

proptest! {
    #[test]
    fn requests_come_back(request in request()) {
        let bytes = request.to_bytes();
        prop_assert_eq!(Request::parse(&bytes), Ok(request));
        prop_assert_eq!(Request::parse(&bytes[1..]), Err(ProtocolError::Length(bytes.len() - 1)));
        prop_assert!(Request::parse(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn answers_come_back(errno in any::<i32>(), value in any::<u64>(), len in any::<u64>(), addr in option::of(addr())) {
        let answer = Answer { errno, value, len, addr };
        let bytes = answer.to_bytes();
        prop_assert_eq!(Answer::parse(&bytes), Ok(answer));
        prop_assert!(Answer::parse(&bytes[..bytes.len() - 1]).is_err());
    }

    #[test]
    fn messages_come_back_whole_or_not_at_all(to in option::of(addr()), op in op(), data in vec(any::<u8>(), 0..100), cut in any::<prop::sample::Index>()) {
        let bytes = packet(to, &op, &data);
        prop_assert_eq!(SendHeader::parse(&bytes), Ok((to, op, &data[..])));
        prop_assert!(SendHeader::parse(&bytes[..cut.index(bytes.len())]).is_err());
        prop_assert!(SendHeader::parse(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn headers_to_programs_come_back(from in addr(), cookie in option::of(any::<u64>()), ports in any::<u64>(), status in any::<i32>(), time in any::<i64>(), len in 0..MAX_MESSAGE) {
        let notification = RecvKind::Notification { token: ports, status };
        for kind in [RecvKind::Message(cookie), notification, RecvKind::Congestion(ports), RecvKind::Wake] {
            let header = RecvHeader::new(kind, Some(from), time, len);
            let bytes = zerocopy::IntoBytes::as_bytes(&header);
            let (parsed, parsed_kind) = RecvHeader::parse(bytes).unwrap();
            prop_assert_eq!(parsed_kind, kind);
            prop_assert_eq!((parsed.from(), parsed.data_len()), (Some(from), len));
            prop_assert!(kind == notification || parsed.time() == time);
            prop_assert!(RecvHeader::parse(&bytes[..bytes.len() - 1]).is_err());
        }
    }

    #[test]
    fn no_bytes_make_a_parser_panic(mut bytes in vec(any::<u8>(), 0..200), is_ours in any::<bool>()) {
        if let (true, Some(magic)) = (is_ours, bytes.first_chunk_mut::<4>()) {
            *magic = rds_local::MAGIC.to_ne_bytes();
        }
        let _ = Request::parse(&bytes);
        let _ = Answer::parse(&bytes);
        let _ = SendHeader::parse(&bytes);
        let _ = RecvHeader::parse(&bytes);
    }

    #[test]
    fn one_changed_byte_is_an_error_or_another_packet(op in op(), at in any::<prop::sample::Index>(), with in 1..=255u8) {
        let mut bytes = packet(None, &op, b"data");
        let at = at.index(bytes.len());
        bytes[at] ^= with;
        if let Ok((to, parsed, data)) = SendHeader::parse(&bytes) {
            // Padding of an address is not looked at.
            let same = (to, &parsed, data) == (None, &op, b"data");
            prop_assert!(!same || (16..40).contains(&at));
        }
    }
}

#[test]
fn limits_are_checked() {
    let data = vec![0; MAX_MESSAGE + 1];
    assert!(SendHeader::parse(&packet(None, &Op::None, &data)).is_err());
    assert!(SendHeader::parse(&packet(None, &Op::None, &data[1..])).is_ok());
    for pieces in [0, MAX_LOCAL + 1] {
        let op = Op::Rdma(RdmaOp {
            local: vec![(0, 0); pieces],
            ..RdmaOp::default()
        });
        assert_eq!(SendHeader::parse(&packet(None, &op, b"")), Err(ProtocolError::Value));
    }
}

#[test]
fn other_versions_are_named() {
    let mut bytes = Request::Socket.to_bytes();
    bytes[0] ^= 0xff;
    let found = u32::from_ne_bytes(*bytes.first_chunk().unwrap());
    assert_eq!(Request::parse(&bytes), Err(ProtocolError::Version(found)));
}
