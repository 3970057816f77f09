//! Private data of connections.

use std::net::IpAddr;

use rds::proto::{ConnCommon, ConnV4, ConnV6, PORT_V4, PORT_V6, Private, ProtoError, Reject, Version};
use zerocopy::IntoBytes;

#[test]
fn fields_are_at_their_offsets_in_both_forms() {
    let bytes: [u8; 60] = std::array::from_fn(|i| i as u8 + 1);
    let v4 = Private::parse(PORT_V4, &bytes).unwrap();
    assert_eq!(v4.addresses(), ([1, 2, 3, 4].into(), [5, 6, 7, 8].into()));
    let v6 = Private::parse(PORT_V6, &bytes).unwrap();
    let address = |from: u8| IpAddr::from(std::array::from_fn::<u8, 16, _>(|i| from + i as u8));
    assert_eq!(v6.addresses(), (address(1), address(17)));
    for (data, at, len) in [(v4, 9, 32), (v6, 33, 56)] {
        let common = data.common();
        let be = |from: u8, n: u8| (0..n).fold(0u64, |v, i| v << 8 | u64::from(from + i));
        assert_eq!((common.version().major, common.version().minor), (at, at + 1));
        assert_eq!(u64::from(common.minors.get()), be(at + 2, 2));
        assert_eq!(common.tos, at + 4);
        assert_eq!(common.ack_seq.get(), be(at + 8, 8));
        assert_eq!(u64::from(common.credits.get()), be(at + 16, 4));
        assert_eq!(data.as_bytes(), &bytes[..len]);
    }
}

#[test]
fn every_truncation_is_an_error() {
    for (port, need) in [(PORT_V4, 32), (PORT_V6, 56)] {
        for len in 0..=60 {
            let bytes = vec![3; len];
            match Private::parse(port, &bytes) {
                Ok(data) => assert!(len >= need && data.as_bytes().len() == need),
                Err(error) => {
                    assert!(matches!(error, ProtoError::Short { len: l, need: n, .. } if l == len && n == need))
                }
            }
        }
    }
    for len in 0..4 {
        assert!(Reject::parse(&vec![0; len]).is_err());
    }
}

#[test]
fn a_request_is_the_kernels() {
    let ours = ConnV4::new(
        [10, 77, 0, 2].into(),
        [10, 77, 0, 1].into(),
        ConnCommon::new(Version::V3_1, 0, 0, 0),
    );
    let mut kernels = vec![10, 77, 0, 2, 10, 77, 0, 1, 3, 1, 0, 3];
    kernels.resize(32, 0);
    assert_eq!(ours.as_bytes(), kernels);
    let v6 = ConnV6::new(
        "fd77::1".parse().unwrap(),
        "fd77::2".parse().unwrap(),
        ConnCommon::new(Version::V4_1, 9, 8, 7),
    );
    let read = ConnV6::parse(v6.as_bytes()).unwrap();
    assert_eq!((read, read.common.version(), read.common.tos), (&v6, Version::V4_1, 9));
}

#[test]
fn versions_are_answered_as_the_kernel_does() {
    // RDS.md, measured.
    let version = |major, minor| Version { major, minor };
    for (offered, minors, answer) in [
        (version(3, 1), 3, Some(version(3, 1))),
        (version(3, 1), 0, Some(version(3, 1))),
        (version(4, 1), 3, Some(version(4, 1))),
        (version(4, 1), 2, Some(version(4, 1))),
        (version(4, 7), 0xff, Some(version(4, 1))),
        (version(4, 0), 1, Some(version(4, 0))),
        (version(0, 0), 0, Some(version(4, 0))),
        (version(4, 1), 4, None),
        (version(3, 0), 3, None),
        (version(3, 2), 3, None),
        (version(2, 0), 3, None),
        (version(5, 1), 3, None),
    ] {
        assert_eq!(offered.answer(minors), answer, "{offered} mask {minors:#x}");
    }
}

#[test]
fn rejects_are_little_endian() {
    assert_eq!(Reject::INCOMPATIBLE.to_bytes(), [1, 0, 0, 0]);
    for (bytes, retries) in [
        ([1, 0, 0, 0], true),
        ([0, 0, 0, 0], true),
        ([0xff, 0xff, 0xff, 0xff], true),
        ([2, 0, 0, 0], false),
        ([0, 0, 0, 1], false),
    ] {
        let reject = Reject::parse(&bytes).unwrap();
        assert_eq!((reject.retries(), reject.to_bytes()), (retries, bytes));
    }
}
