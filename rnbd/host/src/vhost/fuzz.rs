//! A front end and its guest that do whatever the fuzzer says.

use std::{
    collections::VecDeque,
    io,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    time::Duration,
};

use rnbd::{
    Errno,
    block::{Completion, Geometry},
    client::{Client, output::DeviceKey},
    virtio_blk,
};
use roce_verbs::mem::Pages;
use roce_verbs::{Instant, provider::Memory};
use rtrs::client::{Buffer, LentId};
use rustix::{
    event::EventfdFlags,
    fs::{MemfdFlags, ftruncate, memfd_create},
};
use vhost::vhost_user::message::{FrontendReq, VhostUserMemoryRegion, VhostUserVringAddr, VhostUserVringAddrFlags};
use vm_memory::ByteValued as _;

use super::{Front, FrontRequest, Lender, Surroundings, Watched, mapped::Mapped, wire};
use crate::front::FrontEnd as _;

/// Bytes of the guest's memory, and of a ring.
const MEMORY: u64 = 64 << 10;
const SIZE: u16 = 8;
/// Addresses of rings that are properly set up: table, available, used.
const RING: [u64; 3] = [0, 0x1000, 0x2000];

/// Owner of shared memory, which knows its buffers.
pub trait Memories {
    /// Registers memory.
    fn lend(&mut self, memory: Arc<Pages>) -> LentId;
    /// Ends that.
    fn take_back(&mut self, id: LentId);
    /// Looks whether all of a buffer is in memory that is lent.
    fn check(&self, buffer: &Buffer);
}

/// The fuzzer's bytes.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn take(&mut self, most: usize) -> &[u8] {
        let (head, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        head
    }

    fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.next(), self.next()])
    }
}

struct Around<'a> {
    memories: &'a mut dyn Memories,
    lent: usize,
}

impl Lender for Around<'_> {
    fn lend(&mut self, memory: Arc<Pages>) -> Result<LentId, String> {
        self.lent += 1;
        Ok(self.memories.lend(memory))
    }

    fn take_back(&mut self, id: LentId) {
        self.lent -= 1;
        self.memories.take_back(id);
    }
}

impl Surroundings for Around<'_> {
    fn watch(&mut self, _: BorrowedFd<'_>, _: Watched) -> io::Result<()> {
        Ok(())
    }

    fn forget(&mut self, _: BorrowedFd<'_>) {}
}

fn geometry(config: u8) -> Geometry {
    let bit = |n: u8| config >> n & 1 != 0;
    Geometry {
        size: 1 << 20,
        logical_block_size: if bit(0) { 4096 } else { 512 },
        physical_block_size: 4096,
        max_transfer: 16 << 10,
        max_discard: if bit(1) { 8192 } else { 0 },
        discard_granularity: 4096,
        read_only: bit(2),
        write_cache: bit(3),
        fua: bit(4),
        max_write_zeroes: if bit(5) { 1 << 30 } else { 0 },
        queue_depth: 8,
    }
}

/// The front end's side.
struct Player {
    stream: UnixStream,
    file: OwnedFd,
    memory: Arc<Pages>,
    features: u64,
    available: u16,
}

impl Player {
    fn send(&self, request: FrontendReq, body: &[u8], fd: Option<BorrowedFd<'_>>) {
        // A front end that is cut off hears nothing.
        let _ = wire::send_request(&self.stream, request.into(), body, fd);
    }

    fn event() -> OwnedFd {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC).expect("a descriptor")
    }

    /// A guest with a ring, as a decent front end sets it up.
    fn set_up(&self) {
        self.send(FrontendReq::SET_FEATURES, &self.features.to_ne_bytes(), None);
        let mut table = [1u32.to_ne_bytes(), [0; 4]].concat();
        table.extend_from_slice(VhostUserMemoryRegion::new(0, MEMORY, 0, 0).as_slice());
        self.send(FrontendReq::SET_MEM_TABLE, &table, Some(self.file.as_fd()));
        let state = |num: u32| [0u32.to_ne_bytes(), num.to_ne_bytes()].concat();
        self.send(FrontendReq::SET_VRING_NUM, &state(SIZE.into()), None);
        let [table, available, used] = RING;
        let flags = VhostUserVringAddrFlags::empty();
        let addr = VhostUserVringAddr::new(0, flags, table, used, available, 0);
        self.send(FrontendReq::SET_VRING_ADDR, addr.as_slice(), None);
        self.send(
            FrontendReq::SET_VRING_KICK,
            &0u64.to_ne_bytes(),
            Some(Self::event().as_fd()),
        );
        self.send(FrontendReq::SET_VRING_ENABLE, &state(1), None);
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        let _ = self.memory.write(at as usize, bytes);
    }

    /// A chain of descriptors, which is available then.
    fn queue(&mut self, input: &mut Bytes<'_>) {
        let head = u16::from(input.next()) % (SIZE + 1);
        let count = input.next() % 5;
        for n in 0..u16::from(count) {
            let shape = input.next();
            let at = match shape & 3 {
                0 => u64::from(input.word()),
                1 => MEMORY - u64::from(input.next()),
                2 => u64::MAX - u64::from(input.word()),
                _ => 0x4000 + u64::from(input.next()) * 16,
            };
            let len = match shape >> 2 & 3 {
                0 => 16,
                1 => u32::from(input.next()) * 512,
                2 => 1,
                _ => u32::from(input.word()) << 16,
            };
            let next = (head + n + 1) % SIZE;
            let last = n + 1 == u16::from(count);
            let flags = u16::from(!last) | u16::from(shape >> 4 & 6);
            let mut bytes = at.to_le_bytes().to_vec();
            bytes.extend_from_slice(&len.to_le_bytes());
            bytes.extend_from_slice(&flags.to_le_bytes());
            bytes.extend_from_slice(&next.to_le_bytes());
            self.put(RING[0] + 16 * u64::from((head + n) % SIZE), &bytes);
        }
        let slot = RING[1] + 4 + 2 * u64::from(self.available % SIZE);
        self.put(slot, &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.put(RING[1] + 2, &self.available.to_le_bytes());
    }

    /// A header of a request, where descriptors like to lie.
    fn header(&self, input: &mut Bytes<'_>) {
        let at = 0x4000 + u64::from(input.next()) * 16;
        let mut bytes = u32::from(input.next() % 16).to_le_bytes().to_vec();
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&u64::from(input.next()).to_le_bytes());
        self.put(at, &bytes);
    }

    fn raw(&self, input: &mut Bytes<'_>) {
        let request = FrontendReq::try_from(u32::from(input.next() % 45)).unwrap_or(FrontendReq::GET_FEATURES);
        let len = usize::from(input.next());
        let body = input.take(len).to_vec();
        let (event, kind) = (Self::event(), input.next() % 3);
        let fd = [None, Some(event.as_fd()), Some(self.file.as_fd())][usize::from(kind)];
        self.send(request, &body, fd);
    }
}

/// Plays it. Every operation on the device ends, in the order that the input says; in the end nothing is left. Returns how many there were.
///
/// # Panics
/// When something does not hold.
pub fn run(bytes: &[u8], memories: &mut dyn Memories) -> usize {
    let mut input = Bytes(bytes);
    let (stream, ours) = UnixStream::pair().expect("sockets");
    stream.set_nonblocking(true).expect("a socket");
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("memory");
    ftruncate(&file, MEMORY).expect("memory");
    let mapped = Mapped::new(file.as_fd(), 0, MEMORY).expect("memory");
    let memory: Arc<dyn Memory> = mapped;
    let memory = Pages::of(&memory).expect("memory");
    let mut around = Around { memories, lent: 0 };
    let geometry = geometry(input.next());
    let device = (
        Client::<()>::new().opener(DeviceKey::default()),
        "disk".to_owned(),
        geometry,
    );
    let mut front = Front::new(&mut around, ours, 0, device).expect("a front end");
    let mut player = Player {
        stream,
        file,
        memory,
        features: virtio_blk::features(&geometry) | 1 << 30,
        available: 0,
    };
    player.set_up();
    let (mut ended, mut now) = (0, Instant::ZERO);
    let mut under_way: VecDeque<FrontRequest> = VecDeque::new();
    while !input.0.is_empty() {
        match input.next() % 8 {
            0 => player.raw(&mut input),
            1 => player.set_up(),
            2 => {
                let (at, len) = (input.word(), input.next());
                let bytes = input.take(len.into()).to_vec();
                player.put(at.into(), &bytes);
            }
            3 => player.header(&mut input),
            4 | 5 => player.queue(&mut input),
            6 => {
                let which = usize::from(input.next());
                if let Some(request) = under_way.remove(which % under_way.len().max(1)) {
                    end(&mut front, &around, request, input.next());
                    ended += 1;
                }
            }
            _ => {
                front.ready(Watched::Socket);
                front.ready(Watched::Kick(0));
                now = now + Duration::from_millis(1);
                front.work(&mut around, now);
                front.notify();
            }
        }
        under_way.extend(core::iter::from_fn(|| front.next_request()));
    }
    front.let_go();
    while let Some(request) = under_way.pop_front() {
        end(&mut front, &around, request, 0);
        ended += 1;
        under_way.extend(core::iter::from_fn(|| front.next_request()));
    }
    assert!(front.is_over(), "something is left: {front:?}");
    front.notify();
    front.part(&mut around);
    assert_eq!(around.lent, 0, "memory is left");
    ended
}

fn end(front: &mut Front, around: &Around<'_>, request: FrontRequest, how: u8) {
    assert_eq!(request.data.is_some(), request.op.has_data());
    if let Some(data) = &request.data {
        assert_eq!(data.len() as u64, request.len);
        around.memories.check(data);
    }
    let result = match how % 4 {
        1 => Err(Errno::EIO),
        2 => Err(Errno::EOPNOTSUPP),
        _ => Ok(()),
    };
    let completion = Completion::new(result, None);
    front.complete(Instant::ZERO, request.user, completion, &mut ());
}
