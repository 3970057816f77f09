//! Rejects.

use lnet::proto::{ByteOrder, ConnParams, ProtoError, Reject, Why};

const PARAMS: ConnParams = ConnParams {
    queue_depth: 8,
    max_frags: 257,
    max_msg_size: 4096,
};

#[test]
fn fields_are_at_their_offsets() {
    for big in [false, true] {
        let mut bytes: Vec<u8> = (0..24).collect();
        let magic = 0x0be9_1b91u32;
        bytes[..4].copy_from_slice(&if big { magic.to_be_bytes() } else { magic.to_le_bytes() });
        let number = |at: usize, len: usize| {
            let add = |value: u64, byte: &u8| value << 8 | u64::from(*byte);
            match big {
                true => bytes[at..at + len].iter().fold(0, add),
                false => bytes[at..at + len].iter().rev().fold(0, add),
            }
        };
        let reject = Reject::parse(&bytes).unwrap();
        assert_eq!(reject.order, if big { ByteOrder::Big } else { ByteOrder::Little });
        assert_eq!(u64::from(reject.version), number(4, 2));
        assert_eq!((reject.why, reject.padding), (Why(6), 7));
        assert_eq!(reject.incarnation, number(8, 8));
        assert_eq!(u64::from(reject.params.queue_depth), number(16, 2));
        assert_eq!(u64::from(reject.params.max_frags), number(18, 2));
        assert_eq!(u64::from(reject.params.max_msg_size), number(20, 4));
        assert_eq!(reject.to_bytes(), bytes);
    }
}

#[test]
fn missing_bytes_behind_the_reason_are_zeros() {
    let whole = Reject::new(Why::MSG_QUEUE_SIZE, 0x1122_3344_5566_7788, PARAMS);
    let bytes = whole.to_bytes();
    assert_eq!(Reject::parse(&bytes), Ok(whole));
    for len in 0..bytes.len() {
        let read = Reject::parse(&bytes[..len]);
        if len < 8 {
            assert!(matches!(read, Err(ProtoError::Short { need: 8, .. })), "{len}");
            continue;
        }
        let zeros = [&bytes[..len], &vec![0; bytes.len() - len]].concat();
        assert_eq!(read, Reject::parse(&zeros));
        assert_eq!(read.unwrap().why, Why::MSG_QUEUE_SIZE);
    }
    assert!(Reject::parse(&[&[1][..], &bytes[1..]].concat()).is_err());
}

#[test]
fn reasons_have_names() {
    let named = (0..=255).filter(|n| Why(*n).name().is_some()).collect::<Vec<_>>();
    assert_eq!(named, (1..=9).collect::<Vec<_>>());
    assert_eq!(Why::EARLY.to_string(), "network interface not ready (EARLY)");
    assert_eq!(Why(50).to_string(), "reason 50");
}
