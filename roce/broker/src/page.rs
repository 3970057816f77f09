//! Counters of a member in a page of memory, which outlives its process.
//!
//! The broker makes the page, a `memfd` whose size is sealed, and hands it to the member with its place. The member maps it and stores
//! its counters there. The broker never maps it: it reads the file when somebody asks for statistics, and for the last time after the
//! member has left, whether that closed its devices or was killed.
//!
//! Members are not trusted. No size of the file and no content harms the broker: a read of the file fails where an access to a mapping
//! would raise SIGBUS. A page holds numbers only; names of counters are the broker's own ([`COUNTERS`]), and it knows the addresses.

use std::{
    collections::BTreeMap, io, net::IpAddr, os::fd::OwnedFd, sync::atomic::AtomicU64, sync::atomic::Ordering::Relaxed,
};

use memmap2::MmapRaw;
use rustix::fs::{MemfdFlags, SealFlags};
use serde::{Deserialize, Serialize};

/// Counters of a page, in its order. Add further ones at the end only: broker and members of one protocol version may be of different
/// builds.
pub const COUNTERS: [&str; 16] = [
    "sent_pkts",
    "rcvd_pkts",
    "duplicate_request",
    "out_of_seq_request",
    "rcvd_rnr_err",
    "send_rnr_err",
    "rcvd_seq_err",
    "ack_deferred",
    "retry_exceeded_err",
    "retry_rnr_exceeded_err",
    "completer_retry_err",
    "send_err",
    "link_downed",
    "rdma_sends",
    "rdma_recvs",
    "cm_drop_backlog",
];
/// Addresses of a member that are shown: those that it has opened first.
pub const MAX_ADDRS: usize = 4;

/// Bytes of the file.
const LEN: usize = 4096;
/// Words of a page: path MTU, 0 until something is published; number of queue pairs; counters.
const WORDS: usize = 2 + COUNTERS.len();

/// Status of a member's devices at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Path MTU, bytes.
    pub mtu: u32,
    /// Number of queue pairs.
    pub queue_pairs: u64,
    /// Values of [`COUNTERS`].
    pub counters: [u64; COUNTERS.len()],
}

/// Status of a member, from its page.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Addresses that it has opened, in order, [`MAX_ADDRS`] at most; empty: all of the host.
    pub addrs: Vec<IpAddr>,
    /// Path MTU, bytes.
    pub mtu: u32,
    /// Number of queue pairs.
    pub queue_pairs: u64,
    /// Counters by name.
    pub counters: BTreeMap<String, u64>,
}

/// Page of a member, as the member has it.
pub(crate) struct Page(MmapRaw);

impl Page {
    /// Maps the page that a broker has handed out.
    ///
    /// # Errors
    /// If the file could become shorter than the page, or the system refuses.
    pub(crate) fn map(file: &OwnedFd) -> io::Result<Self> {
        let sealed = rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK);
        let page = MmapRaw::map_raw(file)?;
        match sealed && page.len() >= LEN {
            true => Ok(Self(page)),
            false => Err(io::Error::other("the page for counters is not sealed, or too short")),
        }
    }

    fn words(&self) -> &[AtomicU64; WORDS] {
        // SAFETY: mapped as long as `self` lives, with room for the words, aligned to a page; the file's size is sealed.
        unsafe { &*self.0.as_mut_ptr().cast() }
    }

    /// Publishes a status. Returns whether it differs from the last one.
    pub(crate) fn publish(&self, status: &Snapshot) -> bool {
        let values = [status.mtu.into(), status.queue_pairs]
            .into_iter()
            .chain(status.counters);
        let changed = self.words().iter().zip(values).filter(|(word, value)| {
            let differs = word.load(Relaxed) != *value;
            word.store(*value, Relaxed);
            differs
        });
        changed.count() > 0
    }

    /// Takes over what was published in a page of a former broker.
    pub(crate) fn copy(&self, former: &Self) {
        for (new, old) in self.words().iter().zip(former.words()) {
            new.store(old.load(Relaxed), Relaxed);
        }
    }
}

/// Page of a member, as the broker has it.
pub(crate) struct PageFile {
    file: OwnedFd,
    addrs: Vec<IpAddr>,
}

impl PageFile {
    /// Makes an empty page.
    pub(crate) fn new() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("ferroce-counters", flags)?;
        rustix::fs::ftruncate(&file, LEN as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { file, addrs: vec![] })
    }

    /// Returns a descriptor for the member.
    pub(crate) fn for_member(&self) -> io::Result<OwnedFd> {
        self.file.try_clone()
    }

    /// Notes that the member has opened an address.
    pub(crate) fn add_address(&mut self, addr: IpAddr) {
        if self.addrs.len() < MAX_ADDRS && !self.addrs.contains(&addr) {
            self.addrs.push(addr);
            self.addrs.sort_unstable();
        }
    }

    /// Returns what the member has published last. `None`: nothing so far.
    pub(crate) fn read(&self) -> Option<Report> {
        let mut bytes = [[0; 8]; WORDS];
        // The member may be storing: each word is one of a moment ago or of now.
        let read = rustix::io::pread(&self.file, bytes.as_flattened_mut(), 0);
        let [mtu, queue_pairs, counters @ ..] = bytes.map(u64::from_ne_bytes);
        let mtu = u32::try_from(mtu)
            .ok()
            .filter(|mtu| read == Ok(8 * WORDS) && *mtu > 0)?;
        let all = self.addrs.iter().any(IpAddr::is_unspecified);
        Some(Report {
            addrs: if all { vec![] } else { self.addrs.clone() },
            mtu,
            queue_pairs,
            counters: named(&counters),
        })
    }
}

/// Returns values of [`COUNTERS`] with their names.
pub(crate) fn named(values: &[u64; COUNTERS.len()]) -> BTreeMap<String, u64> {
    COUNTERS.map(str::to_owned).into_iter().zip(*values).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Page, PageFile) {
        let file = PageFile::new().unwrap();
        (Page::map(&file.for_member().unwrap()).unwrap(), file)
    }

    #[test]
    fn the_broker_reads_what_the_member_has_published_and_keeps_it() {
        let (page, mut file) = pair();
        let addrs = [IpAddr::from([127, 0, 0, 2]), "2001:db8::1".parse().unwrap()];
        addrs.iter().rev().for_each(|addr| file.add_address(*addr));
        assert_eq!(file.read(), None);
        let status = Snapshot {
            mtu: 1024,
            queue_pairs: 7,
            counters: std::array::from_fn(|n| n as u64 + 100),
        };
        assert!(page.publish(&status) && !page.publish(&status));
        let expected = Report {
            addrs: addrs.to_vec(),
            mtu: 1024,
            queue_pairs: 7,
            counters: COUNTERS.iter().map(|name| (*name).to_owned()).zip(100..).collect(),
        };
        assert_eq!(file.read(), Some(expected.clone()));
        let (next, next_file) = pair();
        next.copy(&page);
        drop((page, next));
        assert_eq!(file.read(), Some(expected.clone()));
        assert_eq!(next_file.read().unwrap().counters, expected.counters);
        // All of the host's, and no more than are shown.
        file.add_address([0; 4].into());
        assert!(file.read().unwrap().addrs.is_empty());
        (0..9).for_each(|n| file.add_address([127, 0, 1, n].into()));
        assert_eq!(file.addrs.len(), MAX_ADDRS);
    }

    #[test]
    fn a_member_can_not_change_the_size_of_its_page() {
        let (_page, file) = pair();
        let theirs = file.for_member().unwrap();
        for len in [0, LEN - 1, LEN + 1] {
            assert_eq!(rustix::fs::ftruncate(&theirs, len as u64), Err(rustix::io::Errno::PERM));
        }
        let more = rustix::io::pwrite(&theirs, b"more", LEN as u64);
        assert_eq!(more, Err(rustix::io::Errno::PERM));
    }

    #[test]
    fn whatever_a_page_holds_is_numbers_with_our_names() {
        let (_page, file) = pair();
        let theirs = file.for_member().unwrap();
        for garbage in [0xff, 0xc3, b'\n'] {
            rustix::io::pwrite(&theirs, &[garbage; LEN], 0).unwrap();
            // A path MTU that is none: the page counts as empty.
            assert_eq!(file.read(), None);
            rustix::io::pwrite(&theirs, &1u64.to_ne_bytes(), 0).unwrap();
            let read = file.read().unwrap();
            assert!(read.addrs.is_empty(), "{read:?}");
            assert!(read.counters.keys().all(|name| COUNTERS.contains(&name.as_str())));
            assert!(read.counters.values().all(|n| *n == u64::from_ne_bytes([garbage; 8])));
        }
    }

    /// Not a page of a broker's: it could be cut below the mapping.
    #[test]
    fn files_without_a_seal_or_too_short_are_neither_mapped_nor_read() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("test", flags).unwrap();
        let file = PageFile { file, addrs: vec![] };
        assert_eq!(file.read(), None);
        rustix::fs::ftruncate(&file.file, LEN as u64).unwrap();
        assert!(Page::map(&file.file).is_err());
        rustix::io::pwrite(&file.file, &[1; 64], 0).unwrap();
        rustix::fs::ftruncate(&file.file, 64).unwrap();
        assert_eq!(file.read(), None);
        rustix::fs::fcntl_add_seals(&file.file, SealFlags::SHRINK).unwrap();
        assert!(Page::map(&file.file).is_err());
        let (pipe, _) = std::io::pipe().unwrap();
        assert!(Page::map(&pipe.into()).is_err());
    }
}
