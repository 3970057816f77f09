//! Keys, by each kind that the device has.

use roce_verbs::{
    AccessFlags, Payload, RKey, SendOp, WcFlags, WcStatus,
    provider::{GrantOf, KeyId, KeyKind, MrId, QpId, Registration, Revoked, VerbsError},
    wr::PostError,
};

use super::cases;
use crate::{Bed, LEN, Link, Side};

cases![
    a_region_has_a_key_of_its_own,
    keys_open_and_close,
    a_key_that_is_granted_again_is_another,
    a_key_opens_no_more_than_was_granted,
    a_key_has_the_rights_that_were_granted,
    a_peer_closes_a_key,
    a_key_of_a_connection_that_is_gone_is_closed,
    a_key_that_is_freed_is_closed,
    keys_that_can_not_be_granted,
    a_list_of_pieces_is_one_range,
];

const A: Side = Side::A;
const B: Side = Side::B;
const WRITE: AccessFlags = AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_WRITE);
const KINDS: [KeyKind; 3] = [KeyKind::FastRegistration, KeyKind::Window1, KeyKind::Window2];

fn has(bed: &mut Bed, kind: KeyKind) -> bool {
    let caps = bed.caps(B);
    match kind {
        KeyKind::FastRegistration => caps.fast_registration,
        KeyKind::Window1 => caps.window_1,
        KeyKind::Window2 => caps.window_2,
    }
}

/// Does something with a key of each kind that there is.
fn each(bed: &mut Bed, what: impl Fn(&mut Bed, KeyKind, KeyId)) {
    for kind in KINDS {
        let pd = bed.at(B).pd;
        let made = bed.provider(B).alloc_key(pd, kind);
        match has(bed, kind) {
            true => {
                let key = made.unwrap_or_else(|e| panic!("{kind:?}: {e}"));
                what(bed, kind, key);
                bed.provider(B).free_key(key);
            }
            false => assert!(matches!(made, Err(VerbsError::Unsupported(_))), "{kind:?}: {made:?}"),
        }
    }
}

fn write(bed: &mut Bed, qp: QpId, offset: usize, rkey: RKey, data: &[u8]) -> WcStatus {
    let to = bed.remote_by(B, offset, rkey);
    bed.post(A, qp, 70, SendOp::Write(to), Payload::Inline(data));
    bed.completion(A, qp, 70).status
}

/// A WRITE by this key is refused, and B is told.
fn is_refused(bed: &mut Bed, link: &Link, offset: usize, rkey: RKey, what: &str) {
    let before = bed.bytes(B, offset, 4);
    let status = write(bed, link.qp(A), offset, rkey, &[0xee; 4]);
    assert_eq!(status, WcStatus::RemoteAccessError, "{what}");
    assert_eq!(bed.bytes(B, offset, 4), before, "{what}");
}

fn a_region_has_a_key_of_its_own(bed: &mut Bed) {
    let link = bed.connect();
    let mr = bed.at(B).mr;
    assert_eq!(write(bed, link.qp(A), 8, mr.rkey, b"static"), WcStatus::Success);
    assert_eq!(bed.bytes(B, 8, 6), b"static");
    let (pd, pages) = (bed.at(B).pd, bed.at(B).pages.clone());
    let what = Registration {
        memory: pages,
        offset: 0,
        len: LEN,
        iova: None,
        access: WRITE,
    };
    let second = bed.provider(B).register(pd, &what).expect("a registration");
    assert_ne!(second.rkey, mr.rkey);
    assert_eq!(write(bed, link.qp(A), 16, second.rkey, b"second"), WcStatus::Success);
    bed.provider(B).deregister(second.id);
    is_refused(bed, &link, 24, second.rkey, "its region is not registered any more");
    bed.give_back(link);
}

fn keys_open_and_close(bed: &mut Bed) {
    each(bed, |bed, kind, key| {
        let link = bed.connect();
        let mut former = RKey::default();
        for round in 1..4u8 {
            let rkey = bed.grant(link.qp(B), key, 4096, 4096, WRITE);
            assert_ne!(rkey, former, "{kind:?}");
            former = rkey;
            let status = write(bed, link.qp(A), 4096, rkey, &[round; 8]);
            assert_eq!(status, WcStatus::Success, "{kind:?}");
            assert_eq!(bed.bytes(B, 4096, 8), [round; 8], "{kind:?}");
            bed.revoke(link.qp(B), key);
            let again = bed.provider(B).revoke(link.qp(B), key, 3);
            assert_eq!(again.expect("nothing to do"), Revoked::Now, "{kind:?}: it is closed");
        }
        assert!(!bed.provider(B).access_violated(link.qp(B)));
        is_refused(bed, &link, 4096, former, &format!("{kind:?} was taken back"));
        bed.give_back(link);
    });
}

fn a_key_that_is_granted_again_is_another(bed: &mut Bed) {
    each(bed, |bed, kind, key| {
        let link = bed.connect();
        let first = bed.grant(link.qp(B), key, 0, 64, WRITE);
        let second = bed.grant(link.qp(B), key, 4096, 64, WRITE);
        assert_ne!(first, second, "{kind:?}");
        assert_eq!(
            write(bed, link.qp(A), 4096, second, b"new"),
            WcStatus::Success,
            "{kind:?}"
        );
        is_refused(bed, &link, 0, first, &format!("{kind:?} was granted again"));
        bed.give_back(link);
    });
}

fn a_key_opens_no_more_than_was_granted(bed: &mut Bed) {
    each(bed, |bed, kind, key| {
        let mut rkeys = Vec::new();
        for offset in [4096 - 4, 4096 + 64 - 2] {
            let link = bed.connect();
            let rkey = bed.grant(link.qp(B), key, 4096, 64, WRITE);
            assert_eq!(
                write(bed, link.qp(A), 4096 + 60, rkey, b"last"),
                WcStatus::Success,
                "{kind:?}"
            );
            is_refused(bed, &link, offset, rkey, &format!("{kind:?} does not open {offset}"));
            // Whether the queue pair is told apart at once or with its end.
            bed.wait("the violation", |bed| {
                bed.provider(B).access_violated(link.qp(B)).then_some(())
            });
            rkeys.push(rkey);
            bed.give_back(link);
            bed.provider(B).close_key(key);
        }
    });
}

fn a_key_has_the_rights_that_were_granted(bed: &mut Bed) {
    each(bed, |bed, kind, key| {
        let link = bed.connect();
        let rkey = bed.grant(link.qp(B), key, 0, 4096, AccessFlags::REMOTE_READ);
        bed.fill(B, 0, b"read me");
        let (from, into) = (bed.remote_by(B, 0, rkey), bed.sge(A, 0, 7));
        bed.post(A, link.qp(A), 1, SendOp::Read(from), Payload::Sges(&[into]));
        bed.success(A, link.qp(A), 1);
        assert_eq!(bed.bytes(A, 0, 7), b"read me", "{kind:?}");
        is_refused(bed, &link, 0, rkey, &format!("{kind:?} is for reading"));
        bed.give_back(link);
        bed.provider(B).close_key(key);
    });
}

fn a_peer_closes_a_key(bed: &mut Bed) {
    each(bed, |bed, kind, key| {
        if kind == KeyKind::Window1 || !bed.caps(B).tells_invalidated {
            return;
        }
        let link = bed.connect();
        let (qa, qb) = (link.qp(A), link.qp(B));
        let mut former = RKey::default();
        // As RTRS uses the key of a read: granted, written, closed by the answer, and granted again.
        for round in 0..4u64 {
            let rkey = bed.grant(qb, key, 0, 4096, WRITE);
            bed.receive(B, qb, 30 + round, &[]);
            assert_eq!(
                write(bed, qa, 0, rkey, &[round as u8; 4]),
                WcStatus::Success,
                "{kind:?}"
            );
            bed.post(A, qa, 80, SendOp::SendWithInv(rkey), Payload::Sges(&[]));
            let wc = bed.success(B, qb, 30 + round);
            assert!(wc.flags.contains(WcFlags::WITH_INV), "{kind:?}: {wc:?}");
            assert_eq!(wc.invalidated, rkey, "{kind:?}");
            bed.success(A, qa, 80);
            former = rkey;
        }
        is_refused(bed, &link, 0, former, &format!("{kind:?} was closed by the peer"));
        bed.give_back(link);
    });
}

fn a_key_of_a_connection_that_is_gone_is_closed(bed: &mut Bed) {
    each(bed, |bed, kind, key| {
        let first = bed.connect();
        let rkey = bed.grant(first.qp(B), key, 8192, 64, WRITE);
        bed.give_back(first);
        bed.provider(B).close_key(key);
        let link = bed.connect();
        is_refused(
            bed,
            &link,
            8192,
            rkey,
            &format!("{kind:?} of a connection that is gone"),
        );
        bed.give_back(link);
        // It can be granted through another.
        let link = bed.connect();
        let again = bed.grant(link.qp(B), key, 8192, 64, WRITE);
        assert_eq!(
            write(bed, link.qp(A), 8192, again, b"ok"),
            WcStatus::Success,
            "{kind:?}"
        );
        bed.give_back(link);
    });
}

fn a_key_that_is_freed_is_closed(bed: &mut Bed) {
    each(bed, |bed, kind, _| {
        let link = bed.connect();
        let pd = bed.at(B).pd;
        let key = bed.provider(B).alloc_key(pd, kind).expect("a key");
        let rkey = bed.grant(link.qp(B), key, 0, 64, WRITE);
        bed.provider(B).free_key(key);
        is_refused(bed, &link, 0, rkey, &format!("{kind:?} was freed"));
        bed.give_back(link);
    });
}

fn keys_that_can_not_be_granted(bed: &mut Bed) {
    each(bed, |bed, kind, key| {
        let link = bed.connect();
        let (qp, mr) = (link.qp(B), bed.at(B).mr.id);
        let of = |mr, offset, len| GrantOf {
            mr,
            offset,
            len,
            iova: None,
            access: WRITE,
        };
        let good = of(mr, 0, 64);
        let b = bed.provider(B);
        for (qp, key, grant) in [
            (qp, key, of(mr, LEN - 1, 2)),
            (qp, key, of(mr, usize::MAX, 2)),
            (qp, key, of(MrId(0xfff_fffff), 0, 64)),
            (qp, KeyId(0xfff_fffff), good),
        ] {
            let refused = b.grant(qp, key, &grant, 1);
            assert!(matches!(refused, Err(PostError::Invalid(_))), "{kind:?}: {refused:?}");
        }
        let nobody = QpId(0xfff_fffff);
        assert_eq!(b.grant(nobody, key, &good, 1), Err(PostError::NoQueuePair));
        assert_eq!(b.revoke(nobody, key, 1), Err(PostError::NoQueuePair));
        assert!(b.revoke(qp, KeyId(0xfff_fffff), 1).is_err());
        // None of that has hurt.
        let rkey = bed.grant(qp, key, 0, 64, WRITE);
        assert_eq!(write(bed, link.qp(A), 0, rkey, b"ok"), WcStatus::Success, "{kind:?}");
        bed.revoke(qp, key);
        bed.give_back(link);
    });
}

fn a_list_of_pieces_is_one_range(bed: &mut Bed) {
    let scattered = bed.caps(B).scattered_keys;
    each(bed, |bed, kind, key| {
        let link = bed.connect();
        let mr = bed.at(B).mr.id;
        let piece = |offset, len| GrantOf {
            mr,
            offset,
            len,
            iova: None,
            access: WRITE,
        };
        let pieces = [piece(100, 3), piece(5000, 3)];
        let granted = bed.provider(B).grant_list(link.qp(B), key, &pieces);
        if !scattered || kind != KeyKind::FastRegistration {
            assert!(granted.is_err(), "{kind:?}");
            bed.give_back(link);
            return;
        }
        let rkey = granted.expect("a key").rkey();
        assert_eq!(write(bed, link.qp(A), 100, rkey, b"abcdef"), WcStatus::Success);
        assert_eq!(
            (bed.bytes(B, 100, 4), bed.bytes(B, 5000, 4)),
            (b"abc\0".to_vec(), b"def\0".to_vec())
        );
        bed.give_back(link);
        bed.provider(B).close_key(key);
    });
}
