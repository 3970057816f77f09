//! Keys, ranges, rights, and what revocation means.

use std::sync::Arc;

use proptest::prelude::*;
use roce_bth::{LKey, Qpn, RKey};
use roce_verbs::mem::{
    AccessError, AtomicError, KeyError, MemError, MemoryTable, NewRegion, PdHandle, Region, SgList, Span, WindowKind,
};
use roce_verbs::{
    AccessFlags, DeviceLimits, Sge,
    wr::{BindWindow, FastRegister},
};

const ALL: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::MW_BIND);
const QP: Qpn = Qpn::new(3);

fn table() -> (MemoryTable, PdHandle) {
    let table = MemoryTable::new([9; 32], &DeviceLimits::software(1));
    let pd = table.alloc_pd().unwrap();
    (table, pd)
}

fn sge(region: &Region, offset: u64, length: u32) -> Sge {
    Sge {
        addr: region.addr() + offset,
        length,
        lkey: region.lkey(),
    }
}

fn remote(t: &MemoryTable, pd: PdHandle, key: RKey, addr: u64, len: u32, need: AccessFlags) -> Result<Span, KeyError> {
    t.resolve_remote(pd, QP, key, addr, len, need)
}

#[test]
fn owned_memory_is_aligned_and_zeroed_and_holds_what_is_written() {
    let (t, pd) = table();
    let r = t.alloc_region(pd, 10_000, ALL).unwrap();
    assert_eq!(r.addr() % 4096, 0);
    assert_eq!(r.as_ptr() as u64, r.addr());
    let mut out = vec![1; 10_000];
    r.read(0, &mut out).unwrap();
    assert_eq!(out, vec![0; 10_000]);
    r.write(9_990, &[7; 10]).unwrap();
    r.read(9_985, &mut out[..15]).unwrap();
    assert_eq!(out[..15], [0, 0, 0, 0, 0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]);
    let e = r.write(9_991, &[7; 10]).unwrap_err();
    assert_eq!((e.offset, e.len, e.size), (9_991, 10, 10_000));
    assert!(r.read(usize::MAX, &mut [0]).is_err());
    assert!(r.read(10_000, &mut []).is_ok());
    let empty = t.alloc_region(pd, 0, ALL).unwrap();
    assert!(empty.is_empty());
}

#[test]
fn ranges_are_checked_to_the_byte() {
    let (t, pd) = table();
    for access in [ALL, ALL | AccessFlags::ZERO_BASED] {
        let r = t.alloc_region(pd, 100, access).unwrap();
        let base = r.addr();
        assert_eq!(base == 0, access.contains(AccessFlags::ZERO_BASED));
        let get = |addr: u64, len: u32| remote(&t, pd, r.rkey(), addr, len, AccessFlags::REMOTE_READ).map(|s| s.len());
        assert_eq!(get(base, 100), Ok(100));
        assert_eq!(get(base + 99, 1), Ok(1));
        assert_eq!(get(base, 101), Err(KeyError::Range));
        assert_eq!(get(base + 100, 1), Err(KeyError::Range));
        assert_eq!(get(base.wrapping_sub(1), 1), Err(KeyError::Range));
        assert_eq!(get(u64::MAX, u32::MAX), Err(KeyError::Range));
        assert_eq!(
            t.resolve_local(pd, &sge(&r, 60, 40), AccessFlags::LOCAL_WRITE)
                .map(|s| s.len()),
            Ok(40)
        );
        assert_eq!(
            t.resolve_local(pd, &sge(&r, 60, 41), AccessFlags::LOCAL_WRITE).err(),
            Some(KeyError::Range)
        );
    }
}

#[test]
fn each_right_is_needed_and_domains_are_apart() {
    let (t, pd) = table();
    let other = t.alloc_pd().unwrap();
    let rights = [
        AccessFlags::REMOTE_READ,
        AccessFlags::REMOTE_WRITE,
        AccessFlags::REMOTE_ATOMIC,
    ];
    for given in rights {
        let r = t.alloc_region(pd, 64, given | AccessFlags::LOCAL_WRITE).unwrap();
        for need in rights {
            let result = remote(&t, pd, r.rkey(), r.addr(), 8, need);
            assert_eq!(result.err(), (given != need).then_some(KeyError::Access));
        }
        assert_eq!(
            remote(&t, other, r.rkey(), r.addr(), 8, given).err(),
            Some(KeyError::WrongPd)
        );
        assert_eq!(
            remote(&t, pd, r.rkey().next(), r.addr(), 8, given).err(),
            Some(KeyError::Unknown)
        );
    }
    let read_only = t.alloc_region(pd, 64, AccessFlags::empty()).unwrap();
    assert!(
        t.resolve_local(pd, &sge(&read_only, 0, 64), AccessFlags::empty())
            .is_ok()
    );
    assert_eq!(
        t.resolve_local(pd, &sge(&read_only, 0, 64), AccessFlags::LOCAL_WRITE)
            .err(),
        Some(KeyError::Access)
    );
    for bad in [AccessFlags::REMOTE_WRITE, AccessFlags::REMOTE_ATOMIC] {
        assert_eq!(t.alloc_region(pd, 64, bad).err(), Some(MemError::Access));
    }
}

#[test]
fn revocation_reaches_spans_but_not_the_owner() {
    let (t, pd) = table();
    let r = t.alloc_region(pd, 64, ALL).unwrap();
    let span = remote(&t, pd, r.rkey(), r.addr(), 64, AccessFlags::REMOTE_WRITE).unwrap();
    let part = remote(&t, pd, r.rkey(), r.addr() + 8, 8, AccessFlags::REMOTE_ATOMIC).unwrap();
    span.write(0, &[1; 64]).unwrap();
    t.deregister(&r).unwrap();
    assert_eq!(span.write(0, &[2; 64]), Err(AccessError::Revoked));
    assert_eq!(part.read(0, &mut [0; 8]), Err(AccessError::Revoked));
    assert_eq!(part.fetch_add(1), Err(AtomicError::Access(AccessError::Revoked)));
    assert!(span.is_revoked());
    assert_eq!(
        remote(&t, pd, r.rkey(), r.addr(), 64, AccessFlags::REMOTE_WRITE).err(),
        Some(KeyError::Unknown)
    );
    assert_eq!(t.deregister(&r), Err(MemError::NotFound));
    let mut out = [0; 64];
    r.read(0, &mut out).unwrap();
    assert_eq!(out, [1; 64]);
    // Spans keep the memory itself alive.
    drop(r);
    assert!(span.is_revoked());
}

fn lent(pd: PdHandle, ptr: *mut u8, len: usize, iova: u64) -> NewRegion {
    NewRegion {
        pd,
        ptr,
        len,
        iova,
        access: ALL,
        persist: None,
    }
}

#[test]
fn lent_memory_is_used_in_place() {
    let (t, pd) = table();
    let mut memory = vec![0u8; 256];
    let ptr = memory.as_mut_ptr();
    // SAFETY: the vector outlives the registration, is not moved, and nothing else runs.
    let r = unsafe { t.register(&lent(pd, ptr, 256, 0x7000)) }.unwrap();
    assert_eq!((r.addr(), r.len()), (0x7000, 256));
    let span = remote(&t, pd, r.rkey(), 0x7010, 16, AccessFlags::REMOTE_WRITE).unwrap();
    span.write(0, &[9; 16]).unwrap();
    let mut word = [0; 8];
    assert_eq!((r.read(16, &mut word), word), (Ok(()), [9; 8]));
    t.deregister(&r).unwrap();
    assert_eq!(memory[15..33], [&[0][..], &[9; 16], &[0]].concat());
    // It may be freed now, and a region that is kept must not reach it.
    drop(memory);
    assert!(r.read(16, &mut word).is_err() && r.write(0, &word).is_err());
    assert!(r.read(0, &mut []).is_err());
    let mut memory = vec![0u8; 256];
    let ptr = memory.as_mut_ptr();
    // SAFETY: nothing is registered, the call fails first.
    let wrapped = unsafe { t.register(&lent(pd, ptr, 256, u64::MAX - 100)) };
    assert_eq!(wrapped.err(), Some(MemError::Range(256)));
    // SAFETY: as above.
    let null = unsafe { t.register(&lent(pd, core::ptr::null_mut(), 1, 0)) };
    assert_eq!(null.err(), Some(MemError::Range(1)));
}

#[test]
fn atomics_need_an_aligned_word() {
    let (t, pd) = table();
    let r = t.alloc_region(pd, 64, ALL).unwrap();
    let word = |offset, len| remote(&t, pd, r.rkey(), r.addr() + offset, len, AccessFlags::REMOTE_ATOMIC).unwrap();
    assert_eq!(word(8, 8).fetch_add(5), Ok(0));
    assert_eq!(word(8, 8).compare_swap(5, u64::MAX), Ok(5));
    assert_eq!(word(8, 8).compare_swap(5, 1), Ok(u64::MAX));
    assert_eq!(word(8, 8).fetch_add(2), Ok(u64::MAX));
    assert_eq!(word(8, 8).fetch_add(0), Ok(1));
    assert_eq!(word(12, 8).fetch_add(1), Err(AtomicError::Misaligned));
    assert_eq!(word(8, 16).fetch_add(1), Err(AtomicError::Misaligned));
}

#[test]
fn a_domain_with_objects_can_t_go() {
    let (t, pd) = table();
    let r = t.alloc_region(pd, 64, ALL).unwrap();
    let f = t.alloc_fast(pd).unwrap();
    let w = t.alloc_window(pd, WindowKind::Type1).unwrap();
    t.hold_pd(pd).unwrap();
    for release in [
        &mut || t.deregister(&r).unwrap() as _,
        &mut || t.dealloc_fast(&f).unwrap(),
        &mut || t.dealloc_window(&w).unwrap(),
        &mut || t.release_pd(pd),
    ] as [&mut dyn FnMut(); 4]
    {
        assert!(matches!(t.dealloc_pd(pd), Err(MemError::Busy(_))));
        release();
    }
    t.dealloc_pd(pd).unwrap();
    assert_eq!(t.dealloc_pd(pd), Err(MemError::NotFound));
    assert_eq!(t.alloc_region(pd, 64, ALL).err(), Some(MemError::NotFound));
    assert_eq!(t.dealloc_fast(&f), Err(MemError::NotFound));
    assert_eq!(t.dealloc_window(&w), Err(MemError::NotFound));
}

#[test]
fn limits_hold_and_come_back() {
    let limits = DeviceLimits {
        max_pd: 1,
        max_mr: 2,
        max_mw: 1,
        max_mr_size: 4096,
        ..DeviceLimits::software(1)
    };
    let t = MemoryTable::new([1; 32], &limits);
    let pd = t.alloc_pd().unwrap();
    assert!(matches!(t.alloc_pd(), Err(MemError::Limit(_))));
    assert_eq!(t.alloc_region(pd, 4097, ALL).err(), Some(MemError::Range(4097)));
    let r = t.alloc_region(pd, 4096, ALL).unwrap();
    let f = t.alloc_fast(pd).unwrap();
    assert!(matches!(t.alloc_region(pd, 1, ALL), Err(MemError::Limit(_))));
    assert!(matches!(t.alloc_fast(pd), Err(MemError::Limit(_))));
    t.deregister(&r).unwrap();
    assert!(t.alloc_fast(pd).is_ok());
    t.dealloc_fast(&f).unwrap();
    let w = t.alloc_window(pd, WindowKind::Type2).unwrap();
    assert!(matches!(t.alloc_window(pd, WindowKind::Type2), Err(MemError::Limit(_))));
    t.dealloc_window(&w).unwrap();
    assert!(t.alloc_window(pd, WindowKind::Type2).is_ok());
}

#[test]
fn keys_are_unpredictable_and_unique() {
    let (t, pd) = table();
    let other = MemoryTable::new([8; 32], &DeviceLimits::software(1));
    let pd2 = other.alloc_pd().unwrap();
    let keys: Vec<u32> = (0..2000).map(|_| t.alloc_fast(pd).unwrap().rkey().0).collect();
    let others: Vec<u32> = (0..2000).map(|_| other.alloc_fast(pd2).unwrap().rkey().0).collect();
    let indices: std::collections::HashSet<u32> = keys.iter().map(|k| k >> 8).collect();
    assert_eq!(indices.len(), 2000);
    assert_ne!(keys, others);
    // Also the changing byte starts at random.
    let bytes: std::collections::HashSet<u32> = keys.iter().map(|k| k & 0xff).collect();
    assert!(bytes.len() > 200);
}

fn grant(key: RKey, r: &Region, offset: u64, length: u64) -> FastRegister {
    FastRegister {
        key,
        lkey: r.lkey(),
        addr: r.addr() + offset,
        length,
        iova: 0x10_0000,
        access: ALL,
    }
}

#[test]
fn a_fast_region_opens_and_closes_in_turn() {
    let (t, pd) = table();
    let r = t.alloc_region(pd, 4096, ALL).unwrap();
    let f = t.alloc_fast(pd).unwrap();
    let first = f.rkey();
    let get = |key, addr, len| remote(&t, pd, key, addr, len, AccessFlags::REMOTE_WRITE);
    assert_eq!(get(first, 0, 1).err(), Some(KeyError::Closed));
    let key = first.next();
    t.fast_register(pd, &grant(key, &r, 100, 50)).unwrap();
    assert_eq!(f.rkey(), key);
    assert_eq!(
        get(first, 0x10_0000, 1).err(),
        Some(KeyError::Unknown),
        "the old key byte is dead"
    );
    let span = get(key, 0x10_0000, 50).unwrap();
    assert_eq!(get(key, 0x10_0000, 51).err(), Some(KeyError::Range));
    span.write(0, &[3; 50]).unwrap();
    let mut out = [0; 52];
    r.read(99, &mut out).unwrap();
    assert_eq!(out[..], [&[0][..], &[3; 50], &[0]].concat());
    assert_eq!(
        t.fast_register(pd, &grant(key.next(), &r, 0, 1)),
        Err(KeyError::State),
        "still open"
    );
    t.invalidate(pd, QP, key).unwrap();
    assert_eq!(span.write(0, &[4]), Err(AccessError::Revoked));
    assert_eq!(get(key, 0x10_0000, 1).err(), Some(KeyError::Closed));
    t.fast_register(pd, &grant(key.next(), &r, 0, 4096)).unwrap();
    let span = get(key.next(), 0x10_0000, 4096).unwrap();
    // The backing region takes everything with it.
    t.deregister(&r).unwrap();
    assert_eq!(span.read(0, &mut [0]), Err(AccessError::Revoked));
}

#[test]
fn fast_registration_checks_its_arguments() {
    let (t, pd) = table();
    let other = t.alloc_pd().unwrap();
    let r = t.alloc_region(pd, 4096, ALL).unwrap();
    let read_only = t.alloc_region(pd, 4096, AccessFlags::REMOTE_READ).unwrap();
    let foreign = t.alloc_region(other, 4096, ALL).unwrap();
    let f = t.alloc_fast(pd).unwrap();
    let w = t.alloc_window(pd, WindowKind::Type2).unwrap();
    let key = f.rkey();
    let wraps = FastRegister {
        iova: u64::MAX,
        ..grant(key, &r, 0, 2)
    };
    for (args, error) in [
        (grant(key, &r, 4000, 97), KeyError::Range),
        (grant(key, &r, 0, u64::MAX), KeyError::Range),
        (grant(key, &read_only, 0, 10), KeyError::Access),
        (grant(key, &foreign, 0, 10), KeyError::WrongPd),
        (grant(r.rkey(), &r, 0, 10), KeyError::State),
        (grant(w.rkey(), &r, 0, 10), KeyError::State),
        (grant(RKey(key.0 ^ 0x100), &r, 0, 10), KeyError::Unknown),
        (wraps, KeyError::Range),
    ] {
        assert_eq!(t.fast_register(pd, &args), Err(error), "{args:?}");
    }
    assert_eq!(
        t.fast_register(other, &grant(key, &foreign, 0, 10)),
        Err(KeyError::WrongPd)
    );
    assert_eq!(f.rkey(), key);
    assert_eq!(
        t.invalidate(pd, QP, r.rkey()),
        Err(KeyError::State),
        "a plain region stays"
    );
}

fn bind(key: RKey, r: &Region, offset: u64, length: u64, access: AccessFlags) -> BindWindow {
    BindWindow {
        key,
        lkey: r.lkey(),
        addr: r.addr() + offset,
        length,
        access,
    }
}

#[test]
fn a_type_2_window_belongs_to_its_queue_pair() {
    let (t, pd) = table();
    let r = t.alloc_region(pd, 4096, ALL).unwrap();
    let w = t.alloc_window(pd, WindowKind::Type2).unwrap();
    let key = w.rkey().next();
    let rights = AccessFlags::REMOTE_WRITE;
    t.bind_window(pd, QP, &bind(key, &r, 64, 64, rights)).unwrap();
    let at = r.addr() + 64;
    let span = remote(&t, pd, key, at, 64, rights).unwrap();
    assert_eq!(
        t.resolve_remote(pd, Qpn::new(4), key, at, 64, rights).err(),
        Some(KeyError::WrongQp)
    );
    assert_eq!(
        remote(&t, pd, key, at, 64, AccessFlags::REMOTE_READ).err(),
        Some(KeyError::Access)
    );
    assert_eq!(remote(&t, pd, key, at - 1, 64, rights).err(), Some(KeyError::Range));
    let as_local = Sge {
        addr: at,
        length: 1,
        lkey: LKey(key.0),
    };
    assert_eq!(
        t.resolve_local(pd, &as_local, AccessFlags::empty()).err(),
        Some(KeyError::Unknown)
    );
    assert_eq!(
        t.bind_window(pd, QP, &bind(key.next(), &r, 0, 1, rights)),
        Err(KeyError::State),
        "bound already"
    );
    assert!(
        matches!(t.deregister(&r), Err(MemError::Busy(_))),
        "a window is bound to the region"
    );
    assert_eq!(t.invalidate(pd, Qpn::new(4), key), Err(KeyError::WrongQp));
    t.invalidate(pd, QP, key).unwrap();
    assert_eq!(span.read(0, &mut [0]), Err(AccessError::Revoked));
    // Zero-based: addresses are offsets.
    t.bind_window(pd, QP, &bind(key.next(), &r, 64, 64, rights | AccessFlags::ZERO_BASED))
        .unwrap();
    assert_eq!(remote(&t, pd, key.next(), 0, 64, rights).map(|s| s.len()), Ok(64));
    // The end of the queue pair closes it.
    t.forget_qp(QP);
    assert_eq!(remote(&t, pd, key.next(), 0, 64, rights).err(), Some(KeyError::Closed));
    t.deregister(&r).unwrap();
}

#[test]
fn a_type_1_window_is_rebound_at_will() {
    let (t, pd) = table();
    let (r, s) = (
        t.alloc_region(pd, 4096, ALL).unwrap(),
        t.alloc_region(pd, 4096, ALL).unwrap(),
    );
    let w = t.alloc_window(pd, WindowKind::Type1).unwrap();
    let rights = AccessFlags::REMOTE_READ;
    let key = w.rkey().next();
    t.bind_window(pd, QP, &bind(key, &r, 0, 10, rights)).unwrap();
    let old = t.resolve_remote(pd, Qpn::new(9), key, r.addr(), 10, rights).unwrap();
    assert_eq!(t.invalidate(pd, QP, key), Err(KeyError::State));
    t.bind_window(pd, QP, &bind(key.next(), &s, 0, 10, rights)).unwrap();
    assert!(old.is_revoked());
    t.deregister(&r).unwrap();
    assert!(matches!(t.deregister(&s), Err(MemError::Busy(_))));
    t.bind_window(pd, QP, &bind(key, &s, 0, 0, rights)).unwrap();
    t.deregister(&s).unwrap();
    assert_eq!(remote(&t, pd, key, s.addr(), 1, rights).err(), Some(KeyError::Closed));
}

#[test]
fn windows_bind_only_where_they_may() {
    let (t, pd) = table();
    let plain = t.alloc_region(pd, 64, ALL - AccessFlags::MW_BIND).unwrap();
    let read_only = t.alloc_region(pd, 64, AccessFlags::MW_BIND).unwrap();
    let zero = t.alloc_region(pd, 64, ALL | AccessFlags::ZERO_BASED).unwrap();
    let r = t.alloc_region(pd, 64, ALL).unwrap();
    let one = t.alloc_window(pd, WindowKind::Type1).unwrap();
    let two = t.alloc_window(pd, WindowKind::Type2).unwrap();
    let other = t.alloc_pd().unwrap();
    let foreign = t.alloc_region(other, 64, ALL).unwrap();
    let stranger = t.alloc_window(other, WindowKind::Type2).unwrap();
    let write = AccessFlags::REMOTE_WRITE;
    for (args, error) in [
        (bind(two.rkey(), &foreign, 0, 8, write), KeyError::WrongPd),
        (bind(stranger.rkey(), &r, 0, 8, write), KeyError::WrongPd),
        (bind(two.rkey(), &plain, 0, 8, write), KeyError::Access),
        (bind(two.rkey(), &read_only, 0, 8, write), KeyError::Access),
        (bind(two.rkey(), &zero, 0, 8, write), KeyError::Access),
        (bind(two.rkey(), &r, 60, 8, write), KeyError::Range),
        (bind(two.rkey(), &r, 0, 0, write), KeyError::State),
        (
            bind(one.rkey(), &r, 0, 8, write | AccessFlags::ZERO_BASED),
            KeyError::Access,
        ),
        (bind(r.rkey(), &r, 0, 8, write), KeyError::State),
    ] {
        assert_eq!(t.bind_window(pd, QP, &args), Err(error), "{args:?}");
    }
    assert!(
        t.bind_window(pd, QP, &bind(two.rkey(), &read_only, 0, 8, AccessFlags::REMOTE_READ))
            .is_ok()
    );
}

#[test]
fn a_bound_fast_region_can_t_be_invalidated() {
    let (t, pd) = table();
    let r = t.alloc_region(pd, 4096, ALL).unwrap();
    let f = t.alloc_fast(pd).unwrap();
    t.fast_register(pd, &grant(f.rkey(), &r, 0, 4096)).unwrap();
    let w = t.alloc_window(pd, WindowKind::Type2).unwrap();
    let args = BindWindow {
        key: w.rkey(),
        lkey: LKey(f.rkey().0),
        addr: 0x10_0000,
        length: 8,
        access: AccessFlags::REMOTE_READ,
    };
    t.bind_window(pd, QP, &args).unwrap();
    assert_eq!(t.invalidate(pd, QP, f.rkey()), Err(KeyError::State));
    let span = remote(&t, pd, w.rkey(), 0x10_0000, 8, AccessFlags::REMOTE_READ).unwrap();
    // Two steps away, the memory's end still reaches the span.
    t.deregister(&r).unwrap();
    assert!(span.is_revoked());
}

proptest! {
    #[test]
    fn a_list_is_one_run_of_bytes(
        lens in prop::collection::vec(0usize..40, 0..8),
        accesses in prop::collection::vec((0usize..300, 0usize..80, any::<bool>()), 0..40),
    ) {
        let (t, pd) = table();
        let total: usize = lens.iter().sum();
        let r = t.alloc_region(pd, 4096, ALL).unwrap();
        let mut list = SgList::new();
        // The pieces lie apart, last one first.
        let mut at = 4096;
        let mut places = Vec::new();
        for len in &lens {
            at -= len + 3;
            places.extend(at..at + len);
            let span = t.resolve_local(pd, &sge(&r, at as u64, *len as u32), AccessFlags::LOCAL_WRITE).unwrap();
            match list.is_empty() {
                true => list = SgList::from(span),
                false => list.push(span),
            }
        }
        prop_assert_eq!(list.len(), total);
        let mut model = vec![0u8; 4096];
        for (i, (offset, len, write)) in accesses.into_iter().enumerate() {
            let fits = offset + len <= total || len == 0;
            if write {
                let data: Vec<u8> = (0..len).map(|n| (n * 7 + i) as u8).collect();
                prop_assert_eq!(list.write_at(offset, &data).is_ok(), fits);
                if fits {
                    for (n, byte) in data.iter().enumerate() {
                        model[places[offset + n]] = *byte;
                    }
                }
            } else {
                let mut out = vec![0; len];
                prop_assert_eq!(list.read_at(offset, &mut out).is_ok(), fits);
                if fits {
                    let want: Vec<u8> = (0..len).map(|n| model[places[offset + n]]).collect();
                    prop_assert_eq!(out, want);
                }
            }
        }
        let mut all = vec![0; 4096];
        r.read(0, &mut all).unwrap();
        prop_assert_eq!(all, model);
    }
}

#[test]
fn many_threads_use_the_table_while_keys_come_and_go() {
    let (t, pd) = table();
    let t = Arc::new(t);
    let shared = t.alloc_region(pd, 4096, ALL).unwrap();
    std::thread::scope(|s| {
        for n in 0..4u8 {
            let (t, shared) = (&t, &shared);
            s.spawn(move || {
                for _ in 0..2000 {
                    let r = t.alloc_region(pd, 128, ALL).unwrap();
                    let span = remote(t, pd, r.rkey(), r.addr(), 128, AccessFlags::REMOTE_WRITE).unwrap();
                    span.write(0, &[n; 128]).unwrap();
                    let word = remote(t, pd, shared.rkey(), shared.addr(), 8, AccessFlags::REMOTE_ATOMIC).unwrap();
                    word.fetch_add(1).unwrap();
                    t.deregister(&r).unwrap();
                    assert_eq!(span.write(0, &[0]), Err(AccessError::Revoked));
                    let mut out = [0; 128];
                    r.read(0, &mut out).unwrap();
                    assert_eq!(out, [n; 128]);
                }
            });
        }
    });
    let mut out = [0; 8];
    shared.read(0, &mut out).unwrap();
    assert_eq!(u64::from_ne_bytes(out), 8000);
}

#[test]
fn a_region_revoked_under_writers_stops_them_all() {
    let (t, pd) = table();
    for _ in 0..50 {
        let r = t.alloc_region(pd, 4096, ALL).unwrap();
        let span = remote(&t, pd, r.rkey(), r.addr(), 4096, AccessFlags::REMOTE_WRITE).unwrap();
        std::thread::scope(|s| {
            for n in 1..4u8 {
                let span = span.clone();
                s.spawn(move || while span.write(0, &[n; 4096]).is_ok() {});
            }
            std::thread::yield_now();
            t.deregister(&r).unwrap();
        });
        assert!(span.is_revoked());
    }
}

/// A fast region over pieces of two regions, which a peer may write from address 0x1000 on: 5 bytes, 0 bytes, 3 bytes, 8 bytes.
fn scattered(t: &MemoryTable, pd: PdHandle, a: &Region, b: &Region) -> RKey {
    let fast = t.alloc_fast(pd).unwrap();
    let key = RKey(fast.rkey().0 ^ 0x5a);
    let pieces = [sge(a, 10, 5), sge(b, 7, 0), sge(b, 100, 3), sge(a, 0, 8)];
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
    t.fast_register_list(pd, key, &pieces, 0x1000, access).unwrap();
    key
}

#[test]
fn a_key_opens_pieces_as_one_range() {
    let (t, pd) = table();
    let a = t.alloc_region(pd, 4096, ALL).unwrap();
    let b = t.alloc_region(pd, 4096, ALL).unwrap();
    let key = scattered(&t, pd, &a, &b);
    let write = AccessFlags::REMOTE_WRITE;
    let span = remote(&t, pd, key, 0x1000, 16, write).unwrap();
    span.write(0, b"0123456789abcdef").unwrap();
    let read = |region: &Region, at, len| {
        let mut out = vec![0; len];
        region.read(at, &mut out).unwrap();
        out
    };
    assert_eq!(read(&a, 9, 7), b"\x0001234\0");
    assert_eq!(read(&b, 99, 5), b"\x00567\0");
    assert_eq!(read(&a, 0, 9), b"89abcdef\0");
    // A range within it, over the joints.
    let span = remote(&t, pd, key, 0x1003, 7, write).unwrap();
    span.write(1, b"XYZUVW").unwrap();
    let mut out = [0; 7];
    span.read(0, &mut out).unwrap();
    assert_eq!(&out, b"3XYZUVW");
    assert_eq!(
        (read(&a, 10, 5), read(&b, 100, 3)),
        (b"0123X".to_vec(), b"YZU".to_vec())
    );
    for (addr, len) in [(0xfff, 1), (0x1000, 17), (0x1010, 1)] {
        assert_eq!(remote(&t, pd, key, addr, len, write).unwrap_err(), KeyError::Range);
    }
    assert_eq!(
        remote(&t, pd, key, 0x1000, 1, AccessFlags::REMOTE_READ).unwrap_err(),
        KeyError::Access
    );
    // A word in one piece can be stored at once, one over a joint can't.
    assert!(remote(&t, pd, key, 0x1008, 8, write).unwrap().store([1; 8]).is_ok());
    assert!(remote(&t, pd, key, 0x1000, 8, write).unwrap().store([2; 8]).is_err());
    assert_eq!((read(&a, 0, 8), read(&a, 10, 5)), (vec![1; 8], b"0123X".to_vec()));
}

#[test]
fn pieces_end_with_their_key_and_with_any_of_their_regions() {
    let (t, pd) = table();
    let a = t.alloc_region(pd, 4096, ALL).unwrap();
    let b = t.alloc_region(pd, 4096, ALL).unwrap();
    let write = AccessFlags::REMOTE_WRITE;
    let key = scattered(&t, pd, &a, &b);
    let span = remote(&t, pd, key, 0x1000, 16, write).unwrap();
    t.invalidate(pd, QP, key).unwrap();
    assert_eq!(span.write(0, &[1]).unwrap_err(), AccessError::Revoked);
    assert_eq!(remote(&t, pd, key, 0x1000, 1, write).unwrap_err(), KeyError::Closed);
    let key = scattered(&t, pd, &a, &b);
    let span = remote(&t, pd, key, 0x1000, 16, write).unwrap();
    t.deregister(&b).unwrap();
    assert_eq!(span.write(0, &[1]).unwrap_err(), AccessError::Revoked);
}

#[test]
fn pieces_are_checked_as_one_would_be() {
    let (t, pd) = table();
    let a = t.alloc_region(pd, 64, ALL).unwrap();
    let closed = t.alloc_region(pd, 64, AccessFlags::empty()).unwrap();
    let fast = t.alloc_fast(pd).unwrap();
    let write = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
    let register = |pieces: &[Sge], iova, access| t.fast_register_list(pd, fast.rkey(), pieces, iova, access);
    let good = sge(&a, 0, 8);
    assert_eq!(register(&[good, sge(&a, 60, 5)], 0, write), Err(KeyError::Range));
    assert_eq!(register(&[good, sge(&closed, 0, 5)], 0, write), Err(KeyError::Access));
    assert_eq!(register(&[good, good], u64::MAX - 14, write), Err(KeyError::Range));
    let atomic = write | AccessFlags::REMOTE_ATOMIC;
    assert_eq!(register(&[good, good], 0, atomic), Err(KeyError::Access));
    let unknown = Sge { lkey: LKey(7), ..good };
    assert_eq!(register(&[good, unknown], 0, write), Err(KeyError::Unknown));
    assert_eq!(register(&[good, good], u64::MAX - 15, write), Ok(()));
    assert_eq!(register(&[good], 0, write), Err(KeyError::State), "it is open");
    // No window can be bound to pieces.
    let window = t.alloc_window(pd, WindowKind::Type2).unwrap();
    let bind = BindWindow {
        key: window.rkey(),
        lkey: LKey(fast.rkey().0),
        addr: u64::MAX - 15,
        length: 4,
        access: AccessFlags::REMOTE_WRITE,
    };
    assert!(t.bind_window(pd, QP, &bind).is_err());
}
