//! The client against the server, with memory and a disk that are vectors: what comes out is what was asked for.

use std::collections::BTreeMap;

use proptest::prelude::*;
use rnbd::{
    Errno,
    block::{self, BlockOp, BlockRequest, Completion, Extent, Geometry},
    client::{Client, OnLoss, Unmap, output::Output as ClientOutput},
    proto::{AccessMode, instance::Instance, status},
    server::{
        Limits,
        action::{Identity, Opened},
        disk::{DiskOp, StoreId},
    },
};
use roce_verbs::Instant;
use rtrs::{
    Direction, IoError, PathError,
    client::{buffers::Buffers, config::SessionInfo, request::SessionId},
    server::request::{Output as ServerOutput, Request, RequestKey, SessionKey, SessionOpened},
};

use crate::bench::{RtrsOutput, Script, Submission, geometry, session_info, with_cx};
use crate::served::{Action, Served};

const S: SessionId = SessionId(1);
const CHUNK: usize = 128 << 10;
const CHUNKS: usize = 64;

/// Two machines and what lies between them.
struct World {
    client: Client<u64, Script>,
    server: Served,
    session: SessionKey,
    memory: Vec<u8>,
    disk: Vec<u8>,
    geometry: Geometry,
    info: SessionInfo,
    /// Requests that have not been answered, by chunk.
    requests: BTreeMap<u16, Submission>,
    /// Submissions that wait for a chunk.
    waiting: Vec<Submission>,
    serial: u32,
    /// Actions for the disk, in no order.
    work: Vec<Action>,
    /// Reads to be checked: what the operation gave.
    done: BTreeMap<u64, (Result<(), Errno>, Vec<u8>)>,
    /// Extents that block status has found.
    found: BTreeMap<u64, Vec<Extent>>,
}

/// Sectors of zeroes are holes.
fn extents(bytes: &[u8], most: u32) -> Vec<Extent> {
    let mut all = Vec::new();
    for sector in bytes.chunks(512) {
        let zero = sector.iter().all(|b| *b == 0);
        block::append(&mut all, if zero { Extent::hole(512) } else { Extent::data(512) });
    }
    all.truncate(most as usize);
    all
}

impl World {
    fn new(geometry: Geometry) -> Self {
        let mut world = Self {
            client: Client::over(Script::default()),
            server: Served::new(Limits::default()),
            session: SessionKey(0),
            memory: vec![0xee; CHUNK * CHUNKS],
            disk: (0..geometry.size).map(|i| (i / 512) as u8).collect(),
            geometry,
            info: session_info(),
            requests: BTreeMap::new(),
            waiting: Vec::new(),
            serial: 0,
            work: Vec::new(),
            done: BTreeMap::new(),
            found: BTreeMap::new(),
        };
        world.client.rtrs_mut().pools.insert(S, Buffers::new(64 << 20));
        world.begin();
        world.tell(RtrsOutput::Opened(S, world.info));
        world
    }

    fn tell(&mut self, output: RtrsOutput) {
        self.client.rtrs_mut().told.push_back(output);
        with_cx(|cx| while self.client.turn(cx) {});
    }

    fn begin(&mut self) {
        self.session = SessionKey(self.session.0 + 1);
        let opened = SessionOpened {
            session: self.session,
            name: "s".into(),
            peer: ([192, 0, 2, 1], 1000).into(),
            connections: 2,
        };
        self.server.rtrs(Instant::ZERO, ServerOutput::SessionOpened(opened));
    }

    /// Both ends lose the session; the disk's work goes on.
    fn lose(&mut self) {
        let why = || PathError::PeerDisconnected;
        self.tell(RtrsOutput::Down(S, why()));
        for submission in core::mem::take(&mut self.requests).into_values() {
            self.end(submission, Err(IoError::Path(why())));
        }
        for submission in core::mem::take(&mut self.waiting) {
            self.end(submission, Err(IoError::Path(why())));
        }
        let session = self.session;
        self.server
            .rtrs(Instant::ZERO, ServerOutput::SessionClosed { session, why: why() });
        self.settle();
    }

    fn come_back(&mut self, max_io_size: u32) {
        self.begin();
        self.info.max_io_size = max_io_size;
        self.tell(RtrsOutput::Up(S, self.info));
    }

    fn end(&mut self, submission: Submission, result: Result<(), IoError>) {
        let done = RtrsOutput::Done {
            session: S,
            tag: submission.tag,
            result,
            data: submission.data,
        };
        self.tell(done);
    }

    /// Everything but the disk's work.
    fn settle(&mut self) {
        loop {
            with_cx(|cx| while self.client.turn(cx) {});
            if let Some((_, submission)) = self.client.rtrs_mut().sent.pop_front() {
                self.waiting.insert(0, submission);
            } else if let Some(action) = self.server.poll_action() {
                self.act(action);
            } else if !self.waiting.is_empty() && self.requests.len() < CHUNKS {
                let submission = self.waiting.pop().unwrap();
                self.request(submission);
            } else if let Some(output) = self.client.poll_output() {
                self.output(output);
            } else {
                return;
            }
        }
    }

    fn request(&mut self, submission: Submission) {
        let (len, max) = (
            submission.data.as_ref().map_or(0, |b| b.len()),
            self.info.max_io_size as usize,
        );
        if len > max {
            return self.end(submission, Err(IoError::TooLong { what: "data", len, max }));
        }
        let chunk = (0..CHUNKS as u16).find(|c| !self.requests.contains_key(c)).unwrap();
        self.serial += 1;
        let data_offset = usize::from(chunk) * CHUNK;
        let mut data_len = 0;
        if let Some(buffer) = &submission.data {
            data_len = buffer.len();
            if submission.direction == Direction::Write {
                let to = &mut self.memory[data_offset..][..data_len];
                self.client.rtrs().pools[&S].read(buffer, 0, to).unwrap();
            }
        }
        let request = Request {
            key: RequestKey {
                session: self.session,
                chunk,
                serial: self.serial,
            },
            direction: submission.direction,
            connection: 1,
            header: submission.header.clone(),
            data_len: data_len as u32,
            data_offset,
        };
        self.requests.insert(chunk, submission);
        self.server.rtrs(Instant::ZERO, ServerOutput::Request(request));
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::AnswerWith { request, at, message } => {
                self.memory[at..][..message.len()].copy_from_slice(&message);
                self.answered(request, 0);
            }
            Action::Answer(request, errno) => self.answered(request, errno),
            Action::Zero { from, len, .. } => self.memory[from..][..len].fill(0),
            other => self.work.push(other),
        }
    }

    fn answered(&mut self, key: RequestKey, errno: i32) {
        if key.session != self.session || !self.requests.contains_key(&key.chunk) {
            return;
        }
        let submission = self.requests.remove(&key.chunk).unwrap();
        if errno != 0 {
            return self.end(submission, Err(IoError::Remote(errno)));
        }
        if let (Some(buffer), Direction::Read) = (&submission.data, submission.direction) {
            let from = &self.memory[usize::from(key.chunk) * CHUNK..][..buffer.len()];
            self.client.rtrs().pools[&S].write(buffer, 0, from).unwrap();
        }
        self.end(submission, Ok(()));
    }

    fn output(&mut self, output: ClientOutput) {
        if let ClientOutput::Done { user, completion, .. } = output {
            let Completion {
                result, data, extents, ..
            } = completion;
            if !extents.is_empty() {
                self.found.insert(user, extents);
            }
            let mut bytes = Vec::new();
            if let Some(buffer) = data {
                let pool = self.client.rtrs_mut().pools.get_mut(&S).unwrap();
                bytes.resize(buffer.len(), 0);
                pool.read(&buffer, 0, &mut bytes).unwrap();
                pool.give(buffer);
            }
            assert!(
                self.done.insert(user, (result, bytes)).is_none(),
                "operation {user} ended twice"
            );
        }
    }

    /// One piece of the disk's work.
    fn disk(&mut self, which: usize) {
        if self.work.is_empty() {
            return;
        }
        let action = self.work.swap_remove(which % self.work.len());
        match action {
            Action::Open { ticket, name, .. } => {
                let opened = Opened {
                    store: StoreId(1),
                    geometry: self.geometry,
                    identity: Identity(name),
                    label: "disk".into(),
                    instance: Some(Instance::of([b"disk".as_slice()])),
                };
                self.server.opened(Instant::ZERO, ticket, Ok(opened));
            }
            Action::Close { ticket, .. } => self.server.closed(Instant::ZERO, ticket),
            Action::Io(ticket, session, op) => {
                // The memory of a session that is gone is another's.
                if session == self.session {
                    self.execute(&op);
                }
                self.server.io_done(ticket, Ok(()));
            }
            other => panic!("{other:?}"),
        }
        self.settle();
    }

    fn execute(&mut self, op: &DiskOp) {
        let (at, len) = (op.offset as usize, op.len as usize);
        match op.op {
            BlockOp::Read => self.memory[op.data..][..len].copy_from_slice(&self.disk[at..][..len]),
            BlockOp::Write { .. } => self.disk[at..][..len].copy_from_slice(&self.memory[op.data..][..len]),
            BlockOp::Flush => {}
            BlockOp::Discard | BlockOp::WriteZeroes { .. } => self.disk[at..][..len].fill(0),
            BlockOp::BlockStatus { most } => {
                let answer = status::answer(&extents(&self.disk[at..][..len], most), most);
                self.memory[op.data..][..answer.len()].copy_from_slice(&answer);
            }
        }
    }

    fn finish(&mut self) {
        self.settle();
        while !self.work.is_empty() {
            self.disk(0);
        }
    }
}

/// Bytes that are not the same anywhere else.
fn pattern(fill: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| fill ^ (i / 300) as u8).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Each operation has a region of its own. What it reads or leaves there is what it should, unless the session was lost
    /// under it and the device's operations do not wait; nothing else changes, and everything comes back. Sessions that come back may
    /// move less at a time than before, and may say so only when they are asked for more.
    #[test]
    fn operations_do_what_they_should(
        operations in prop::collection::vec((0u8..6, 0u64..64, 1u64..180, any::<u8>()), 1..24),
        order in prop::collection::vec((0usize..64, 0u8..60), 200),
        waits in any::<bool>(),
        smaller in prop::collection::vec(prop_oneof![Just(124u32 << 10), Just(4096), Just(20 << 10)], 1..4),
        max_discard in 1u64..100,
        max_write_zeroes in prop_oneof![Just(0), 1u64..100],
    ) {
        let count = operations.len() as u64;
        let mut world = World::new(Geometry {
            max_discard: max_discard * 512,
            max_write_zeroes: max_write_zeroes * 512,
            ..geometry(count * 256 * 512)
        });
        let device = world.client.map(S, "disk", AccessMode::ReadWrite);
        if waits {
            world.client.set_on_loss(device, OnLoss::Queue(None)).unwrap();
        }
        world.finish();
        let before = world.disk.clone();
        for (n, (kind, offset, sectors, fill)) in operations.iter().enumerate() {
            let (offset, len) = ((n as u64 * 256 + offset) * 512, sectors * 512);
            let op = match kind {
                0 => BlockOp::Read,
                1 => BlockOp::Write { fua: n % 2 == 0 },
                2 => BlockOp::Discard,
                3 => BlockOp::WriteZeroes { fua: false, may_unmap: true },
                4 => BlockOp::BlockStatus { most: u32::from(*fill) + 1 },
                _ => BlockOp::Flush,
            };
            let data = (*kind < 2).then(|| {
                let pool = world.client.rtrs_mut().pools.get_mut(&S).unwrap();
                let buffer = with_cx(|cx| pool.take(cx, len as usize)).unwrap();
                pool.write(&buffer, 0, &pattern(*fill, len as usize)).unwrap();
                buffer
            });
            let opener = world.client.opener(device);
            let request = BlockRequest {
                hint: n,
                ..BlockRequest::new(n as u64, op, offset, len).with_data(data)
            };
            world.client.submit(&opener, request);
        }
        world.settle();
        let mut lost = false;
        for (which, event) in order {
            if event == 0 {
                lost = true;
                world.lose();
                world.come_back(smaller[which % smaller.len()]);
                world.settle();
            } else if event == 1 {
                world.info.max_io_size = smaller[which % smaller.len()].min(world.info.max_io_size);
            }
            world.disk(which);
        }
        world.finish();
        world.client.unmap(device, Unmap::Normal { in_use: false }).unwrap();
        world.finish();

        prop_assert_eq!(world.done.len(), operations.len());
        for (n, (kind, offset, sectors, fill)) in operations.iter().enumerate() {
            let region = n * 256 * 512..(n + 1) * 256 * 512;
            let (start, len) = (*offset as usize * 512, *sectors as usize * 512);
            let (old, new) = (&before[region.clone()], &world.disk[region]);
            let (result, data) = &world.done[&(n as u64)];
            let mut want = old.to_vec();
            match kind {
                1 => want[start..][..len].copy_from_slice(&pattern(*fill, len)),
                2 | 3 => want[start..][..len].fill(0),
                _ => {}
            }
            if result.is_ok() {
                prop_assert!(new == &want[..], "operation {n} of kind {kind}");
                prop_assert!(*kind != 0 || data[..] == old[start..][..len]);
                if *kind == 4 {
                    let there = extents(&old[start..][..len], u32::from(*fill) + 1);
                    prop_assert_eq!(&world.found[&(n as u64)], &there);
                }
            } else {
                prop_assert!(lost && !waits && *result == Err(Errno::ECONNABORTED), "{result:?}");
                // Some of its parts may have been executed.
                for (i, byte) in new.iter().enumerate() {
                    prop_assert!(*byte == want[i] || *byte == old[i]);
                }
            }
        }
        prop_assert_eq!(world.client.rtrs().pools[&S].lent(), 0);
        prop_assert!(world.server.is_idle());
        prop_assert_eq!(world.server.counters().malformed, 0);
        prop_assert!(world.client.state(device).is_none());
    }
}
