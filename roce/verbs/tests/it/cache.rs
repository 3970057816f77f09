//! A queue pair's cache of keys gives the answers of the table.

use std::sync::Arc;

use proptest::prelude::*;
use roce_bth::{LKey, Qpn, RKey, Reth};
use roce_verbs::mem::{FastRegion, KeyCache, KeyError, MemoryTable, Pages, PdHandle, Region, Span, Window, WindowKind};
use roce_verbs::{
    AccessFlags, DeviceLimits, Sge,
    wr::{BindWindow, FastRegister},
};

const RIGHTS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::MW_BIND);
const VIEW: AccessFlags = AccessFlags::REMOTE_WRITE.union(AccessFlags::REMOTE_READ);
const LEN: u64 = 256;
const QPS: [Qpn; 2] = [Qpn::new(3), Qpn::new(4)];

/// Objects of a table, and a cache of each queue pair.
struct Objects {
    table: MemoryTable,
    pd: PdHandle,
    regions: Vec<Arc<Region>>,
    fast: Arc<FastRegion>,
    windows: Vec<Arc<Window>>,
    /// All keys that were ever valid.
    keys: Vec<(u32, u64)>,
    caches: [KeyCache; 2],
}

#[derive(Clone, Debug)]
enum Change {
    Deregister,
    Register,
    Bind { window: usize, qp: usize },
    FastRegister,
    Invalidate { qp: usize, key: usize },
    Revoke,
    ForgetQp { qp: usize },
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let one = prop_oneof![
        Just(Change::Deregister),
        Just(Change::Register),
        (0..2usize, 0..2usize).prop_map(|(window, qp)| Change::Bind { window, qp }),
        Just(Change::FastRegister),
        (0..2usize, any::<usize>()).prop_map(|(qp, key)| Change::Invalidate { qp, key }),
        Just(Change::Revoke),
        (0..2usize).prop_map(|qp| Change::ForgetQp { qp }),
    ];
    proptest::collection::vec(one, 1..40)
}

impl Objects {
    fn new() -> Self {
        let table = MemoryTable::new([9; 32], &DeviceLimits::software(1));
        let pd = table.alloc_pd().unwrap();
        let kinds = [WindowKind::Type1, WindowKind::Type2];
        let windows = kinds.map(|kind| table.alloc_window(pd, kind).unwrap());
        let mut made = Self {
            fast: table.alloc_fast(pd).unwrap(),
            windows: windows.into(),
            regions: vec![],
            keys: vec![],
            caches: Default::default(),
            table,
            pd,
        };
        // More than a cache keeps.
        (0..6).for_each(|_| made.apply(&Change::Register));
        made
    }

    /// Makes a change, which may be refused.
    fn apply(&mut self, change: &Change) {
        let (table, pd) = (&self.table, self.pd);
        match change {
            Change::Register => {
                let region = table.alloc_region(pd, LEN as usize, RIGHTS).unwrap();
                self.keys.push((region.rkey().0, region.addr()));
                self.regions.push(region);
            }
            Change::Deregister | Change::Revoke => {
                let Some(region) = self.regions.pop() else { return };
                let done = match change {
                    Change::Revoke => table.revoke(&region),
                    _ => table.deregister(&region),
                };
                if done.is_err() {
                    self.regions.push(region);
                }
            }
            Change::Bind { window, qp } => {
                let (Some(region), window) = (self.regions.last(), &self.windows[*window]) else {
                    return;
                };
                let args = BindWindow {
                    key: window.rkey().next(),
                    lkey: region.lkey(),
                    addr: region.addr(),
                    length: LEN / 2,
                    access: VIEW,
                };
                self.keys.push((args.key.0, args.addr));
                let _ = table.bind_window(pd, QPS[*qp], &args);
            }
            Change::FastRegister => {
                let Some(region) = self.regions.last() else { return };
                let args = FastRegister {
                    key: self.fast.rkey().next(),
                    lkey: region.lkey(),
                    addr: region.addr(),
                    length: LEN / 2,
                    iova: 1 << 20,
                    access: VIEW,
                };
                self.keys.push((args.key.0, args.iova));
                let _ = table.fast_register(pd, &args);
            }
            Change::Invalidate { qp, key } => {
                let (key, _) = self.keys[key % self.keys.len()];
                let _ = table.invalidate(pd, QPS[*qp], RKey(key));
            }
            Change::ForgetQp { qp } => table.forget_qp(QPS[*qp]),
        }
    }

    /// Compares the answers about all keys, twice: the second time the cache has them.
    fn compare(&mut self) {
        let plain = |result: Result<Span, KeyError>| result.map(|span| (span.len(), span.is_revoked()));
        let Self { table, pd, caches, .. } = self;
        for (cache, qpn) in caches.iter_mut().zip(QPS) {
            let recent = self.keys.iter().rev().take(6);
            for (key, addr) in recent.clone().chain(recent) {
                for (at, len, need) in [
                    (*addr, 64, VIEW),
                    (addr + LEN / 2, 1, AccessFlags::REMOTE_READ),
                    (*addr, 8, AccessFlags::REMOTE_ATOMIC),
                    (addr - 1, 1, AccessFlags::empty()),
                ] {
                    let reth = Reth {
                        va: at,
                        rkey: RKey(*key),
                        dma_len: len,
                    };
                    let cached = cache.resolve_remote(table, *pd, qpn, &reth, need);
                    let known = table.resolve_remote(*pd, qpn, RKey(*key), at, len, need);
                    assert_eq!(plain(cached), plain(known), "key {key:#x} of {qpn:?}, {len} at {at:#x}");
                    let sge = Sge {
                        addr: at,
                        length: len,
                        lkey: LKey(*key),
                    };
                    let cached = cache.resolve_local(table, *pd, &sge, need);
                    let known = table.resolve_local(*pd, &sge, need);
                    assert_eq!(plain(cached), plain(known), "local key {key:#x}, {len} at {at:#x}");
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn a_cache_gives_the_answers_of_the_table(changes in changes()) {
        let mut objects = Objects::new();
        objects.compare();
        for change in changes {
            objects.apply(&change);
            objects.compare();
        }
    }
}

#[test]
fn a_cache_does_not_keep_memory() {
    let table = MemoryTable::new([9; 32], &DeviceLimits::software(1));
    let pd = table.alloc_pd().unwrap();
    let memory: Arc<dyn roce_verbs::provider::Memory> = Pages::allocate(4096).unwrap();
    let region = table.register_memory(pd, &memory, 0..4096, Some(0), RIGHTS).unwrap();
    let mut cache = KeyCache::default();
    let reth = Reth {
        va: 0,
        rkey: region.rkey(),
        dma_len: 8,
    };
    let span = cache.resolve_remote(&table, pd, QPS[0], &reth, VIEW);
    drop(span.unwrap());
    table.deregister(&region).unwrap();
    drop(region);
    assert_eq!(Arc::strong_count(&memory), 1);
}
