//! Ping information.

use lnet::proto::{ByteOrder, Features, NET_LO, NiStatus, Nid, PingInfo, STATUS_DOWN, STATUS_UP};

fn interfaces() -> [NiStatus; 3] {
    let entry = |nid, status| NiStatus {
        nid,
        status,
        msg_size: 0,
    };
    [
        entry(Nid::new(NET_LO, 0, [0, 0, 0, 0].into()), 2),
        entry(Nid::o2ib([10, 77, 0, 1].into()), STATUS_UP),
        entry(Nid::o2ib([10, 77, 1, 1].into()), STATUS_DOWN),
    ]
}

#[test]
fn both_byte_orders_are_read_again() {
    for order in [ByteOrder::Little, ByteOrder::Big] {
        let features = Features::from_bits_retain(0x8000_001e);
        let bytes = PingInfo::emit(order, features, 12345, &interfaces(), b"rest");
        assert!(PingInfo::is(&bytes));
        assert_eq!(bytes.len(), 16 + 3 * 16 + 4);
        let info = PingInfo::parse(&bytes).unwrap();
        assert_eq!(
            (info.order, info.features, info.pid, info.count),
            (order, features, 12345, 3)
        );
        assert_eq!(info.interfaces().collect::<Vec<_>>(), interfaces());
        assert_eq!(info.rest(), b"rest");
    }
}

#[test]
fn a_truncated_reply_has_the_entries_that_came() {
    let bytes = PingInfo::emit(ByteOrder::Little, Features::NI_STATUS, 1, &interfaces(), &[]);
    for len in 0..bytes.len() {
        match PingInfo::parse(&bytes[..len]) {
            Err(_) => assert!(len < 16),
            Ok(info) => {
                let there = (len - 16) / 16;
                assert_eq!(info.count, 3);
                assert_eq!(info.interfaces().collect::<Vec<_>>(), interfaces()[..there]);
                assert_eq!(info.rest().len(), len - 16 - there * 16);
            }
        }
    }
    assert!(!PingInfo::is(&bytes[1..]) && PingInfo::parse(&bytes[1..]).is_err());
}
