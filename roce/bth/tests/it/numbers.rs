//! Circular numbers, keys and code tables.

use std::time::Duration;

use proptest::prelude::*;
use roce_bth::{Credits, Msn, NakCode, PKey, Psn, QKey, Qpn, RKey, RnrTimer, Syndrome};

/// IBTA table 46, in milliseconds as printed there.
const RNR_MS: [f64; 32] = [
    655.36, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32, 0.48, 0.64, 0.96, 1.28, 1.92, 2.56, 3.84, 5.12,
    7.68, 10.24, 15.36, 20.48, 30.72, 40.96, 61.44, 81.92, 122.88, 163.84, 245.76, 327.68, 491.52,
];

/// IBTA table 45; code 31 is "invalid".
const CREDITS: [u32; 31] = [
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
    8192, 12288, 16384, 24576, 32768,
];

#[test]
fn rnr_timers_are_the_tables() {
    for (code, ms) in (0u8..).zip(RNR_MS) {
        assert_eq!(
            RnrTimer::new(code).duration(),
            Duration::from_micros((ms * 1000.0).round() as u64),
            "code {code}"
        );
        assert_eq!(RnrTimer::new(code | 0xe0), RnrTimer::new(code), "only five bits count");
        assert_eq!(RnrTimer::new(code).code(), code);
    }
}

#[test]
fn credits_are_the_tables() {
    for (code, count) in (0u8..).zip(CREDITS) {
        assert_eq!(Credits::new(code).count(), Some(count), "code {code}");
        assert_eq!(Credits::new(code).code(), code);
    }
    assert_eq!(Credits::INVALID.count(), None);
    assert_eq!(Credits::new(31), Credits::INVALID);
}

#[test]
fn every_syndrome_byte_reads_as_specified_and_back() {
    for byte in 0..=255u8 {
        let syndrome = Syndrome::from_byte(byte);
        assert_eq!(syndrome.to_byte(), byte);
        let low = byte & 0x1f;
        let want = match byte >> 5 {
            0 => Syndrome::Ack(Credits::new(low)),
            1 => Syndrome::Rnr(RnrTimer::new(low)),
            3 => match low {
                0 => Syndrome::Nak(NakCode::PsnSequenceError),
                1 => Syndrome::Nak(NakCode::InvalidRequest),
                2 => Syndrome::Nak(NakCode::RemoteAccessError),
                3 => Syndrome::Nak(NakCode::RemoteOperationalError),
                4 => Syndrome::Nak(NakCode::InvalidRdRequest),
                _ => Syndrome::Reserved(byte),
            },
            _ => Syndrome::Reserved(byte),
        };
        assert_eq!(syndrome, want, "{byte:#04x}");
    }
}

const TOP: u32 = 1 << 24;
const HALF: i32 = 1 << 23;

/// Numbers with many around zero, the wrap and half-way.
fn psn() -> impl Strategy<Value = Psn> {
    prop_oneof![0u32..8, TOP - 8..TOP, (TOP / 2 - 8)..(TOP / 2 + 8), 0..TOP].prop_map(Psn::new)
}

fn step() -> impl Strategy<Value = u32> {
    prop_oneof![0u32..8, TOP - 8..TOP + 8, (TOP / 2 - 8)..(TOP / 2 + 8), any::<u32>()]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn adding_and_subtracting_undo_each_other(p in psn(), n in step()) {
        prop_assert_eq!(p.add(n).sub(n), p);
        prop_assert_eq!(p.sub(n).add(n), p);
        prop_assert!(p.add(n).value() < TOP);
        prop_assert_eq!(p.next(), p.add(1));
        prop_assert_eq!(p.add(n).offset_from(p), n % TOP);
        prop_assert_eq!(u64::from(p.add(n).value()), (u64::from(p.value()) + u64::from(n)) % u64::from(TOP));
    }

    #[test]
    fn the_signed_distance_is_the_shortest_way(p in psn(), d in prop_oneof![-8i32..8, -HALF..-HALF + 8, HALF - 8..HALF, -HALF..HALF]) {
        let q = p.add(d as u32);
        prop_assert_eq!(q.diff(p), d);
        prop_assert_eq!(q.is_after(p), d > 0);
        prop_assert_eq!(q.is_before(p), d < 0);
        if d != -HALF {
            prop_assert_eq!(p.diff(q), -d);
            prop_assert_eq!(p.is_before(q), q.is_after(p));
        }
    }

    /// Within a window of less than half the circle the order is a total one, wherever the window lies.
    #[test]
    fn order_does_not_depend_on_the_wrap(base in psn(), a in 0..TOP / 2, b in 0..TOP / 2) {
        let (x, y) = (base.add(a), base.add(b));
        prop_assert_eq!(x.is_before(y), a < b);
        prop_assert_eq!(x.is_after(y), a > b);
        prop_assert_eq!(x == y, a == b);
    }

    #[test]
    fn only_24_bits_are_kept(v: u32) {
        prop_assert_eq!(Psn::new(v).value(), v % TOP);
        prop_assert_eq!(Msn::new(v).value(), v % TOP);
        prop_assert_eq!(Qpn::new(v).value(), v % TOP);
    }

    #[test]
    fn the_key_byte_is_the_low_one(key: u32, byte: u8) {
        let changed = RKey(key).with_key_byte(byte);
        prop_assert_eq!(changed.key_byte(), byte);
        prop_assert_eq!(changed.0 >> 8, key >> 8);
        prop_assert_eq!(changed.next().key_byte(), byte.wrapping_add(1));
        prop_assert_eq!(changed.next().0 >> 8, key >> 8);
    }
}

#[test]
fn the_wrap_itself() {
    let last = Psn::new(0x00ff_ffff);
    assert_eq!(last.next(), Psn::new(0));
    assert!(last.is_before(Psn::new(0)));
    assert_eq!(Psn::new(0).diff(last), 1);
    assert_eq!(Psn::new(0).sub(1), last);
    assert_eq!(Psn::new(5).offset_from(last), 6);
}

#[test]
fn well_known_numbers() {
    assert_eq!(
        (Qpn::SMI.value(), Qpn::GSI.value(), Qpn::MULTICAST.value()),
        (0, 1, 0xff_ffff)
    );
    assert_eq!(QKey::GSI.0, 0x8001_0000);
    let controlled = [0, 0x7fff_ffff, 0x8000_0000, QKey::GSI.0].map(|key| QKey(key).is_controlled());
    assert_eq!(controlled, [false, false, true, true]);
    assert_eq!(PKey::DEFAULT.0, 0xffff);
    assert_eq!(Qpn::new(0x11).to_string(), "0x000011");
    assert_eq!(format!("{:?}", Psn::new(0x11)), "Psn(0x000011)");
}
