//! State of a socket in memory that its node and its programs share.
//!
//! The node makes it, a memory file whose size is sealed. What a program writes there concerns its own socket only: of all words the node
//! reads one, [`Page::received`], and nothing depends on that but the socket's own congestion.

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsFd, OwnedFd},
    sync::atomic::{AtomicU64, Ordering, fence},
};

use memmap2::MmapRaw;
use rustix::fs::{MemfdFlags, SealFlags};
use zerocopy::{FromBytes, IntoBytes};

use crate::{addr::RawAddr, limits::MAGIC};

/// Bytes of the file.
const LEN: usize = 4096;

/// Words of a page.
#[repr(C)]
struct Words {
    magic: AtomicU64,
    /// Odd while the node changes addresses.
    version: AtomicU64,
    bound: [AtomicU64; 3],
    peer: [AtomicU64; 3],
    send_buffer: AtomicU64,
    recv_buffer: AtomicU64,
    flags: AtomicU64,
    tos: AtomicU64,
    /// `SO_RDS_TRANSPORT` and 1; 0: not set.
    transport: AtomicU64,
    /// Not 0: some port of some peer is congested.
    congested: AtomicU64,
    received: AtomicU64,
}

/// Flags of a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum SocketFlags {
    /// `RDS_RECVERR`. The node's.
    RecvErr = 1,
    /// `RDS_CONG_MONITOR`. The node's.
    CongMonitor = 2,
    /// `SO_TIMESTAMP`. The program's: a message always has its time.
    Timestamp = 4,
    /// A message was sent: the type of service can't be set any more. The program's.
    Sent = 8,
}

/// State of a socket, mapped.
pub struct Page(MmapRaw);

impl std::fmt::Debug for Page {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Page")
            .field("bound", &self.bound())
            .field("peer", &self.peer())
            .finish_non_exhaustive()
    }
}

impl Page {
    /// Makes the page of a new socket. The descriptor is for programs.
    ///
    /// # Errors
    /// When the system has no memory or descriptors.
    pub fn create() -> io::Result<(Self, OwnedFd)> {
        let file = rustix::fs::memfd_create("ferroce-rds-socket", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::ftruncate(&file, LEN as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let page = Self(MmapRaw::map_raw(&file)?);
        page.words().magic.store(MAGIC.into(), Ordering::Release);
        Ok((page, file))
    }

    /// Maps a page that a node has handed out.
    ///
    /// # Errors
    /// When it is none, or could become shorter.
    pub fn map(file: impl AsFd) -> io::Result<Self> {
        let file = file.as_fd();
        let sealed = rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK);
        let page = Self(MmapRaw::map_raw(&file)?);
        match sealed && page.0.len() >= LEN && page.words().magic.load(Ordering::Acquire) == u64::from(MAGIC) {
            true => Ok(page),
            false => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "not the page of an RDS socket",
            )),
        }
    }

    fn words(&self) -> &Words {
        // SAFETY: mapped as long as `self` lives, at least a page long and aligned to one; `create` makes it so, and `map` looks before
        // it hands the value out. The words are atomic, as other processes change them.
        unsafe { &*self.0.as_mut_ptr().cast() }
    }

    fn addr(&self, of: impl Fn(&Words) -> &[AtomicU64; 3]) -> Option<SocketAddr> {
        let words = self.words();
        // The node changes addresses at most once a call: a handful of attempts finds them at rest, and a page that somebody has
        // spoilt does not hang its program.
        for _ in 0..1000 {
            let before = words.version.load(Ordering::Acquire);
            let raw = of(words).each_ref().map(|word| word.load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            if before.is_multiple_of(2) && words.version.load(Ordering::Relaxed) == before {
                return RawAddr::read_from_bytes(raw.as_bytes()).ok()?.get().ok()?;
            }
            std::hint::spin_loop();
        }
        None
    }

    fn set_addr(&self, addr: Option<SocketAddr>, of: impl Fn(&Words) -> &[AtomicU64; 3]) {
        let words = self.words();
        let raw: [u64; 3] = zerocopy::transmute!(RawAddr::from(addr));
        let version = words.version.load(Ordering::Relaxed) & !1;
        words.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        for (word, value) in of(words).iter().zip(raw) {
            word.store(value, Ordering::Relaxed);
        }
        words.version.store(version.wrapping_add(2), Ordering::Release);
    }

    /// Address that the socket is bound to.
    pub fn bound(&self) -> Option<SocketAddr> {
        self.addr(|words| &words.bound)
    }

    /// For the node, as all that sets.
    pub fn set_bound(&self, addr: SocketAddr) {
        self.set_addr(Some(addr), |words| &words.bound);
    }

    /// Address that the socket is connected to.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.addr(|words| &words.peer)
    }

    /// See [`peer`](Self::peer).
    pub fn set_peer(&self, addr: SocketAddr) {
        self.set_addr(Some(addr), |words| &words.peer);
    }

    /// Effective bytes of the send and of the receive buffer.
    pub fn buffers(&self) -> (usize, usize) {
        let words = self.words();
        let [send, recv] = [&words.send_buffer, &words.recv_buffer].map(|word| word.load(Ordering::Relaxed) as usize);
        (send, recv)
    }

    /// See [`buffers`](Self::buffers).
    pub fn set_buffers(&self, send: usize, recv: usize) {
        self.words().send_buffer.store(send as u64, Ordering::Relaxed);
        self.words().recv_buffer.store(recv as u64, Ordering::Relaxed);
    }

    /// Returns whether a flag is set.
    pub fn flag(&self, flag: SocketFlags) -> bool {
        self.words().flags.load(Ordering::Relaxed) & flag as u64 != 0
    }

    /// Sets a flag.
    pub fn set_flag(&self, flag: SocketFlags, on: bool) {
        match on {
            true => self.words().flags.fetch_or(flag as u64, Ordering::Relaxed),
            false => self.words().flags.fetch_and(!(flag as u64), Ordering::Relaxed),
        };
    }

    /// Type of service.
    pub fn tos(&self) -> u8 {
        self.words().tos.load(Ordering::Relaxed) as u8
    }

    /// See [`tos`](Self::tos).
    pub fn set_tos(&self, tos: u8) {
        self.words().tos.store(tos.into(), Ordering::Relaxed);
    }

    /// Number of the transport that was chosen.
    pub fn transport(&self) -> Option<u32> {
        let word = self.words().transport.load(Ordering::Relaxed);
        word.checked_sub(1).map(|number| number as u32)
    }

    /// See [`transport`](Self::transport).
    pub fn set_transport(&self, number: u32) {
        self.words().transport.store(u64::from(number) + 1, Ordering::Relaxed);
    }

    /// Returns whether some port of some peer is congested: then the node is to be asked before a message is sent
    /// ([`Request::Congestion`](crate::Request::Congestion)).
    pub fn some_port_is_congested(&self) -> bool {
        self.words().congested.load(Ordering::Relaxed) != 0
    }

    /// See [`some_port_is_congested`](Self::some_port_is_congested).
    pub fn set_some_port_is_congested(&self, congested: bool) {
        self.words().congested.store(congested.into(), Ordering::Relaxed);
    }

    /// A program has taken a message with so many bytes of data (their full number) out of the socket: before its call returns, and not if
    /// it only peeked.
    pub fn add_received(&self, bytes: usize) {
        self.words().received.fetch_add(bytes as u64, Ordering::Release);
    }

    /// Bytes that programs have taken. Any number: a program can write what it wants.
    pub fn received(&self) -> u64 {
        self.words().received.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_side_writes_the_other_reads() {
        let (node, file) = Page::create().unwrap();
        let program = Page::map(&file).unwrap();
        assert_eq!(
            (program.bound(), program.peer(), program.transport()),
            (None, None, None)
        );
        let addrs: [SocketAddr; 2] = ["192.0.2.1:7".parse().unwrap(), "[fe80::1%3]:9".parse().unwrap()];
        node.set_bound(addrs[0]);
        node.set_peer(addrs[1]);
        node.set_buffers(8192, 4096);
        node.set_tos(200);
        node.set_transport(0);
        node.set_some_port_is_congested(true);
        assert_eq!((program.bound(), program.peer()), (Some(addrs[0]), Some(addrs[1])));
        assert_eq!(
            (program.buffers(), program.tos(), program.transport()),
            ((8192, 4096), 200, Some(0))
        );
        assert!(program.some_port_is_congested());
        program.set_flag(SocketFlags::Timestamp, true);
        node.set_flag(SocketFlags::RecvErr, true);
        program.set_flag(SocketFlags::Timestamp, false);
        assert!(node.flag(SocketFlags::RecvErr) && !node.flag(SocketFlags::Timestamp));
        program.add_received(4096);
        assert_eq!(node.received(), 4096);
    }

    #[test]
    fn an_address_is_never_seen_half_changed() {
        let (node, file) = Page::create().unwrap();
        let program = Page::map(&file).unwrap();
        let addrs: [SocketAddr; 2] = [
            "[1:1:1:1:1:1:1:1]:1".parse().unwrap(),
            "[2:2:2:2:2:2:2:2]:2".parse().unwrap(),
        ];
        node.set_peer(addrs[0]);
        std::thread::scope(|scope| {
            scope.spawn(|| (0..20_000).for_each(|n| node.set_peer(addrs[n % 2])));
            for _ in 0..20_000 {
                assert!(program.peer().is_none_or(|addr| addrs.contains(&addr)));
            }
        });
    }

    #[test]
    fn other_files_are_not_mapped() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&file, LEN as u64).unwrap();
        assert!(Page::map(&file).is_err(), "not sealed");
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        assert!(Page::map(&file).is_err(), "not a page");
        let (_, page) = Page::create().unwrap();
        assert!(rustix::fs::ftruncate(&page, 0).is_err(), "it can't be shortened");
    }

    #[test]
    fn whatever_a_page_holds_reading_it_ends() {
        let (_, file) = Page::create().unwrap();
        rustix::io::pwrite(&file, &[0xff; LEN - 8], 8).unwrap();
        let page = Page::map(&file).unwrap();
        assert_eq!((page.bound(), page.peer()), (None, None));
        rustix::io::pwrite(&file, &[0xfe; LEN - 8], 8).unwrap();
        assert_eq!((page.bound(), page.peer()), (None, None));
        let _ = (page.buffers(), page.tos(), page.transport(), page.received());
    }
}
