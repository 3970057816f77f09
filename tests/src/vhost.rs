//! A virtual machine without a machine: the front end of a vhost-user-blk device and the guest's driver, written apart from the back end
//! (the front end's messages are the crate `vhost`'s). Its memory is two regions with a hole between them.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd},
        unix::net::UnixStream,
    },
    path::Path,
    sync::atomic::{Ordering, fence},
    time::Duration,
};

use vhost::{
    VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData,
    vhost_user::{
        Frontend, VhostUserFrontend as _, VhostUserProtocolFeatures,
        message::{FrontendReq, VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight},
    },
};
use vm_memory::{Bytes as _, FileOffset, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

/// Descriptors of a ring.
pub const QUEUE: u16 = 128;
/// Bytes of each region of memory.
pub const REGION: usize = 16 << 20;
/// The regions' first bytes.
pub const LOW: u64 = 0;
/// See above. Right behind the lower one.
pub const HIGH: u64 = LOW + REGION as u64;
/// Behind a hole.
pub const FAR: u64 = 1 << 32;
/// Where buffers may lie; below are the rings.
pub const BUFFERS: u64 = 4 << 20;

/// Bytes of a ring's place in the memory.
const RING: u64 = 64 << 10;
const PROTOCOL: u64 = 1 << 30;

/// Flags of a descriptor.
pub const NEXT: u16 = 1;
/// See above: the device writes.
pub const WRITE: u16 = 2;

/// Kinds of requests.
pub mod kind {
    #![allow(missing_docs)]
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const ID: u32 = 8;
    pub const DISCARD: u32 = 11;
    pub const ZEROES: u32 = 13;
}

/// Bytes in the guest's memory.
pub type Segment = (u64, u32);

/// How a request has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    /// The head of its chain.
    pub head: u16,
    /// Bytes that the device says it has written.
    pub written: u32,
}

/// A ring as the driver sees it.
struct Ring {
    index: usize,
    kick: EventFd,
    call: EventFd,
    err: EventFd,
    available: u16,
    used: u16,
    /// Free descriptors.
    free: Vec<u16>,
    /// By head: the descriptors of the chain.
    chains: Vec<Vec<u16>>,
}

impl Ring {
    fn base(&self) -> u64 {
        self.index as u64 * RING
    }

    fn table(&self) -> u64 {
        self.base()
    }

    fn avail(&self) -> u64 {
        self.base() + (16 << 10)
    }

    fn used(&self) -> u64 {
        self.base() + (32 << 10)
    }

    /// Place of a chain's header, and of its status.
    fn header(&self, head: u16) -> u64 {
        self.base() + (48 << 10) + u64::from(head) * 64
    }
}

/// See the module.
pub struct Guest {
    /// The front end.
    pub front: Frontend,
    files: Vec<File>,
    /// Its memory.
    pub memory: GuestMemoryMmap,
    rings: Vec<Ring>,
    /// Features that were agreed on.
    pub features: u64,
    /// Where the device tells of changes.
    pub channel: UnixStream,
}

fn memory_file() -> File {
    // SAFETY: a plain call with a name of ours.
    let fd = unsafe { nix::libc::memfd_create(c"guest".as_ptr(), nix::libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "memfd_create: {}", io::Error::last_os_error());
    // SAFETY: a new descriptor that nobody else owns.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(REGION as u64).expect("memory for a guest");
    file
}

impl Guest {
    /// Connects to a back end, agrees on everything that it offers but what is in `without`, and gives it the memory; rings are still
    /// to be [started](Self::start).
    ///
    /// # Panics
    /// When that does not work.
    pub fn connect(socket: &Path, without: u64) -> Self {
        let files: Vec<File> = (0..3).map(|_| memory_file()).collect();
        let region = |file: &File, at| {
            let file = FileOffset::new(file.try_clone().expect("a descriptor"), 0);
            (GuestAddress(at), REGION, Some(file))
        };
        let at = [LOW, HIGH, FAR];
        let memory = GuestMemoryMmap::from_ranges_with_files(files.iter().zip(at).map(|(f, at)| region(f, at)));
        Self::with_memory(socket, without, files, memory.expect("memory for a guest"))
    }

    fn with_memory(socket: &Path, without: u64, files: Vec<File>, memory: GuestMemoryMmap) -> Self {
        let mut front = Frontend::connect(socket, 64).expect("a back end listens");
        front.set_owner().expect("set_owner");
        let offered = front.get_features().expect("get_features");
        assert_ne!(offered & PROTOCOL, 0, "protocol features");
        let protocol = front.get_protocol_features().expect("get_protocol_features");
        front.set_protocol_features(protocol).expect("set_protocol_features");
        assert!(protocol.contains(VhostUserProtocolFeatures::REPLY_ACK));
        front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let features = offered & !without;
        front.set_features(features).expect("set_features");
        assert!(front.get_queue_num().expect("get_queue_num") >= 1);
        let (channel, theirs) = UnixStream::pair().expect("sockets");
        channel
            .set_read_timeout(Some(Duration::from_secs(30)))
            .expect("a timeout");
        front.set_backend_request_fd(&theirs).expect("set_backend_request_fd");
        let guest = Self {
            front,
            files,
            memory,
            rings: Vec::new(),
            features,
            channel,
        };
        guest.tell_memory();
        guest
    }

    /// The same virtual machine at another back end, or at one that has been away: with its memory, and what it had under way.
    ///
    /// # Panics
    /// When that does not work.
    pub fn reconnect(self, socket: &Path, inflight: Option<(&VhostUserInflight, &File)>) -> Self {
        let Self {
            files,
            memory,
            rings,
            features,
            front,
            ..
        } = self;
        // The next is let in when this one has left.
        drop(front);
        let mut guest = Self::with_memory(socket, !features & !PROTOCOL, files, memory);
        if let Some((what, file)) = inflight {
            guest
                .front
                .set_inflight_fd(what, file.as_raw_fd())
                .expect("set_inflight_fd");
        }
        for ring in rings {
            let used = ring.used;
            guest.begin(&ring, used);
            guest.rings.push(ring);
        }
        guest
    }

    /// The regions as the front end tells of them.
    pub fn regions(&self) -> Vec<VhostUserMemoryRegionInfo> {
        let region = |region| VhostUserMemoryRegionInfo::from_guest_region(region).expect("a region with a file");
        self.memory.iter().map(region).collect()
    }

    /// Gives the back end all of the memory.
    ///
    /// # Panics
    /// When it does not take it.
    pub fn tell_memory(&self) {
        self.front.set_mem_table(&self.regions()).expect("set_mem_table");
    }

    /// The file behind a region.
    pub fn file(&self, region: usize) -> &File {
        &self.files[region]
    }

    /// The address in this process of one of the guest's.
    fn user(&self, at: u64) -> u64 {
        self.memory
            .get_host_address(GuestAddress(at))
            .expect("an address of the guest") as u64
    }

    /// Starts one more ring.
    ///
    /// # Panics
    /// When the back end does not take it.
    pub fn start(&mut self) -> usize {
        let event = || EventFd::new(nix::libc::EFD_NONBLOCK | nix::libc::EFD_CLOEXEC).expect("an event descriptor");
        let index = self.rings.len();
        let ring = Ring {
            index,
            kick: event(),
            call: event(),
            err: event(),
            available: 0,
            used: 0,
            free: (0..QUEUE).rev().collect(),
            chains: vec![Vec::new(); QUEUE.into()],
        };
        self.begin(&ring, 0);
        self.rings.push(ring);
        index
    }

    fn begin(&mut self, ring: &Ring, base: u16) {
        let index = ring.index;
        let config = VringConfigData {
            queue_max_size: QUEUE,
            queue_size: QUEUE,
            flags: 0,
            desc_table_addr: self.user(ring.table()),
            used_ring_addr: self.user(ring.used()),
            avail_ring_addr: self.user(ring.avail()),
            log_addr: None,
        };
        self.front.set_vring_num(index, QUEUE).expect("set_vring_num");
        self.front.set_vring_base(index, base).expect("set_vring_base");
        self.front.set_vring_addr(index, &config).expect("set_vring_addr");
        self.front.set_vring_call(index, &ring.call).expect("set_vring_call");
        self.front.set_vring_err(index, &ring.err).expect("set_vring_err");
        self.front.set_vring_kick(index, &ring.kick).expect("set_vring_kick");
        self.front.set_vring_enable(index, true).expect("set_vring_enable");
    }

    /// Bytes of the configuration space.
    ///
    /// # Panics
    /// When the back end does not tell.
    pub fn config(&mut self, len: usize) -> Vec<u8> {
        let room = vec![0; len];
        let flags = VhostUserConfigFlags::empty();
        let config = self.front.get_config(0, len as u32, flags, &room);
        config.expect("get_config").1
    }

    /// Sectors of the device.
    pub fn capacity(&mut self) -> u64 {
        let config = self.config(8);
        u64::from_le_bytes(config.try_into().expect("8 bytes"))
    }

    /// Writes into the guest's memory.
    ///
    /// # Panics
    /// Outside it.
    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.memory
            .write_slice(bytes, GuestAddress(at))
            .expect("memory of the guest");
    }

    /// Reads out of it.
    ///
    /// # Panics
    /// Outside it.
    pub fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.memory
            .read_slice(&mut out, GuestAddress(at))
            .expect("memory of the guest");
        out
    }

    /// Puts bytes over segments, one after the other.
    pub fn scatter(&self, segments: &[Segment], bytes: &[u8]) {
        let mut left = bytes;
        for (at, len) in segments {
            let (now, rest) = left.split_at(*len as usize);
            self.put(*at, now);
            left = rest;
        }
    }

    /// The bytes of segments, one after the other.
    pub fn gather(&self, segments: &[Segment]) -> Vec<u8> {
        let all = segments.iter().map(|(at, len)| self.get(*at, *len as usize));
        all.collect::<Vec<_>>().concat()
    }

    /// Makes descriptors available as they are: address, length, flags without NEXT. Returns the head. The device is not kicked.
    ///
    /// # Panics
    /// Without free descriptors.
    pub fn queue(&mut self, ring: usize, descriptors: &[(u64, u32, u16)]) -> u16 {
        let of = &mut self.rings[ring];
        let take = |_: &_| of.free.pop().expect("a free descriptor");
        let taken: Vec<u16> = descriptors.iter().map(take).collect();
        let table = of.table();
        for (i, (at, len, flags)) in descriptors.iter().enumerate() {
            let next = taken.get(i + 1).copied();
            let flags = flags | next.map_or(0, |_| NEXT);
            let mut bytes = at.to_le_bytes().to_vec();
            bytes.extend_from_slice(&len.to_le_bytes());
            bytes.extend_from_slice(&flags.to_le_bytes());
            bytes.extend_from_slice(&next.unwrap_or(0).to_le_bytes());
            self.put(table + 16 * u64::from(taken[i]), &bytes);
        }
        let head = taken[0];
        self.rings[ring].chains[usize::from(head)] = taken;
        self.offer(ring, head);
        head
    }

    /// Makes a head available, whatever it is the head of.
    pub fn offer(&mut self, ring: usize, head: u16) {
        let of = &mut self.rings[ring];
        let (avail, index) = (of.avail(), of.available);
        of.available = index.wrapping_add(1);
        self.put(avail + 4 + 2 * u64::from(index % QUEUE), &head.to_le_bytes());
        fence(Ordering::SeqCst);
        self.set_available(ring, index.wrapping_add(1));
    }

    /// Sets the index of the ring of what is available.
    pub fn set_available(&self, ring: usize, index: u16) {
        self.put(self.rings[ring].avail() + 2, &index.to_le_bytes());
    }

    /// Tells the device that there is something.
    ///
    /// # Panics
    /// When it can't be told.
    pub fn kick(&self, ring: usize) {
        self.rings[ring].kick.write(1).expect("kick");
    }

    /// Takes the descriptor that tells of requests in a ring away from the device, which polls the ring from then on.
    ///
    /// # Panics
    /// When it can't be told.
    pub fn poll(&self, ring: usize) {
        const VERSION: u32 = 1;
        const NO_DESCRIPTOR: u64 = 0x100;
        let body = (ring as u64 | NO_DESCRIPTOR).to_ne_bytes();
        let header = [FrontendReq::SET_VRING_KICK.into(), VERSION, body.len() as u32];
        let message = [header.map(u32::to_ne_bytes).concat(), body.to_vec()].concat();
        // SAFETY: the front end has its socket open as long as it lives, which is longer than this call.
        let socket = unsafe { BorrowedFd::borrow_raw(self.front.as_raw_fd()) };
        assert_eq!(nix::unistd::write(socket, &message), Ok(message.len()));
    }

    /// Makes a request available: a header, data, room for data, and a status. Returns the head.
    pub fn submit(&mut self, ring: usize, kind: u32, sector: u64, output: &[Segment], input: &[Segment]) -> u16 {
        let next = *self.rings[ring].free.last().expect("a free descriptor");
        let header = self.rings[ring].header(next);
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&sector.to_le_bytes());
        bytes.push(0xff);
        self.put(header, &bytes);
        let mut descriptors = vec![(header, 16, 0)];
        descriptors.extend(output.iter().map(|(at, len)| (*at, *len, 0)));
        descriptors.extend(input.iter().map(|(at, len)| (*at, *len, WRITE)));
        descriptors.push((header + 16, 1, WRITE));
        self.queue(ring, &descriptors)
    }

    /// The status of a request that was [submitted](Self::submit).
    pub fn status(&self, ring: usize, head: u16) -> u8 {
        self.get(self.rings[ring].header(head) + 16, 1)[0]
    }

    /// A request that has ended, if one has.
    pub fn ended(&mut self, ring: usize) -> Option<Ended> {
        let of = &self.rings[ring];
        let (used, index) = (of.used(), of.used);
        if self.get(used + 2, 2) == index.to_le_bytes() {
            return None;
        }
        fence(Ordering::SeqCst);
        let element = self.get(used + 4 + 8 * u64::from(index % QUEUE), 8);
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|n| element[at + n]));
        let head = word(0) as u16;
        let of = &mut self.rings[ring];
        of.used = index.wrapping_add(1);
        let chain = core::mem::take(&mut of.chains[usize::from(head)]);
        of.free.extend(chain);
        Some(Ended { head, written: word(4) })
    }

    /// The next request that ends; the guest sleeps until it is notified.
    ///
    /// # Panics
    /// When none does.
    pub fn wait(&mut self, ring: usize) -> Ended {
        loop {
            // From the next answer on it wants to be notified.
            let (event, used) = (
                self.rings[ring].avail() + 4 + 2 * u64::from(QUEUE),
                self.rings[ring].used,
            );
            self.put(event, &used.to_le_bytes());
            fence(Ordering::SeqCst);
            if let Some(ended) = self.ended(ring) {
                return ended;
            }
            assert!(readable(&self.rings[ring].call), "the guest is not notified");
            let _ = self.rings[ring].call.read();
        }
    }

    /// Waits until the device says that a ring is broken.
    ///
    /// # Panics
    /// When it does not.
    pub fn wait_broken(&self, ring: usize) {
        assert!(readable(&self.rings[ring].err), "the ring is not said to be broken");
    }

    /// One request, which is answered; its status, and how many bytes were written.
    ///
    /// # Panics
    /// When something else is answered.
    pub fn run(&mut self, ring: usize, kind: u32, sector: u64, output: &[Segment], input: &[Segment]) -> (u8, u32) {
        let head = self.submit(ring, kind, sector, output, input);
        self.kick(ring);
        let ended = self.wait(ring);
        assert_eq!(ended.head, head, "another request has ended");
        (self.status(ring, head), ended.written)
    }

    /// Writes bytes from segments to the device.
    ///
    /// # Panics
    /// When the device does not.
    pub fn write(&mut self, ring: usize, sector: u64, segments: &[Segment], bytes: &[u8]) {
        self.scatter(segments, bytes);
        assert_eq!(self.run(ring, kind::OUT, sector, segments, &[]), (0, 1));
    }

    /// Reads into segments from the device.
    ///
    /// # Panics
    /// When the device does not.
    pub fn read(&mut self, ring: usize, sector: u64, segments: &[Segment]) -> Vec<u8> {
        let len: u32 = segments.iter().map(|(_, len)| len).sum();
        assert_eq!(self.run(ring, kind::IN, sector, &[], segments), (0, len + 1));
        self.gather(segments)
    }

    /// Stops a ring; the index of the next request that the device would have taken.
    ///
    /// # Panics
    /// When the back end does not.
    pub fn stop(&mut self, ring: usize) -> u32 {
        self.front.get_vring_base(ring).expect("get_vring_base")
    }

    /// Starts it again where it was.
    ///
    /// # Panics
    /// When the back end does not.
    pub fn restart(&mut self, ring: usize, base: u32) {
        let of = self.rings.remove(ring);
        self.begin(&of, base as u16);
        self.rings.insert(ring, of);
    }
}

/// Waits until a descriptor is readable; `false`: it takes longer than anything should.
fn readable(fd: &EventFd) -> bool {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    // SAFETY: the descriptor lives as long as the reference to it.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd.as_raw_fd()) };
    let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(crate::process::TIMEOUT).unwrap_or(PollTimeout::MAX);
    poll(&mut fds, timeout).is_ok_and(|n| n > 0)
}
