//! Requests of a client, from their first byte to the last byte of their reply.

use std::collections::VecDeque;

use roce_verbs::Instant;
use rtrs::client::buffers::Buffer;
use smallvec::SmallVec;

use crate::{
    block::{BlockOp, Extent, Geometry},
    errno::Errno,
    nbd::{
        copy::BufferCopy,
        framing::Asked,
        handshake::Chosen,
        parse::{ParseBuffer, check},
        payload::{Need, Part, Target},
        pending::{NbdRequest, Pending, PendingKey, PendingTable, Release},
        proto::{self, Framing, Request, cmd, cmd_flag},
        reply::{Account, Outbox},
        state::{End, Stall},
    },
    proto::status,
};

/// Requests of one connection that may be in flight.
const MAX_REQUESTS: usize = 1024;
/// Extents of a reply at most.
const MAX_EXTENTS: u32 = status::MAX_EXTENTS;
/// Bytes of one connection that may be in flight.
const MAX_BYTES: u64 = 64 << 20;

/// Stands for the device as long as none is chosen: every request is out of range.
const NO_DEVICE: Geometry = Geometry {
    size: 0,
    logical_block_size: 512,
    physical_block_size: 512,
    max_transfer: 512,
    max_discard: 0,
    discard_granularity: 0,
    read_only: true,
    write_cache: false,
    fua: false,
    max_write_zeroes: 0,
    queue_depth: 0,
};

/// Bytes of one connection that may be in flight: half of the buffers is left to others.
fn share(g: &Geometry) -> u64 {
    (u64::from(g.queue_depth / 2) * u64::from(g.max_transfer)).clamp(1, MAX_BYTES)
}

/// A read that is given its buffers.
#[derive(Debug)]
struct ReadJob {
    key: PendingKey,
    offset: u64,
    /// Parts that are started.
    next: u32,
    parts: u32,
    /// Buffers of parts that are started only when there are enough for all.
    collected: SmallVec<[Buffer; 1]>,
    /// The data is collected in the heap, or is not wanted: each part starts as soon as it has a buffer.
    staged: bool,
}

/// A write whose payload is received.
#[derive(Debug)]
struct WriteJob {
    key: PendingKey,
    offset: u64,
    fua: bool,
    index: u32,
    part: Part,
}

/// The request that is being received and started: the last one that was read.
#[derive(Debug)]
enum Job {
    /// None: the next bytes are a header.
    Idle,
    /// A request that has failed. So many bytes of its payload are still to be thrown away.
    Failed { key: PendingKey, left: usize },
    /// A read.
    Read(ReadJob),
    /// A write.
    Write(WriteJob),
}

/// A part of a read whose data is to be copied to the heap.
#[derive(Debug)]
struct Landed {
    key: PendingKey,
    buffer: Buffer,
}

/// Outcome of a step.
#[derive(Debug)]
pub(crate) enum Step {
    /// To the next one.
    On,
    /// Nowhere, until something is given, sent or done.
    Wait,
    /// Nowhere, until more bytes of this come; some of them have come.
    Starved(&'static str, bool),
    /// To the end of the input.
    End(End),
}

/// The data of a read is collected in the heap from here on. `false` without memory: the read has failed.
fn stage(job: &mut ReadJob, pending: &mut PendingTable) -> bool {
    let Some(pending) = pending.get_mut(job.key) else {
        return false;
    };
    match pending.expect_heap() {
        Ok(()) => job.staged = true,
        Err(e) => pending.fail(e),
    }
    job.staged
}

/// The header that is next, or why there is none.
fn head(input: &ParseBuffer, framing: Framing) -> Option<Result<Request, End>> {
    let request = Request::parse(input.unread(), framing)?;
    Some(request.ok_or_else(|| End::Protocol("request without its magic number".into())))
}

/// Bytes that a request moves between the device and memory. Of what is only to be cached the beginning will do.
fn moved(q: &Request) -> u32 {
    match q.command {
        cmd::READ | cmd::WRITE | cmd::CACHE => q.len.min(proto::MAX_PAYLOAD.into()) as u32,
        _ => 0,
    }
}

/// Bytes that a request counts for: those that it moves, if it is in order.
fn charge(q: &Request, checked: Result<(), Errno>) -> u64 {
    checked.map_or(0, |()| moved(q).into())
}

/// The requests of a client, and what is sent to it.
#[derive(Debug)]
pub(crate) struct Transmission {
    /// The latest time that was told.
    now: Instant,
    /// The transmission flags that the client knows.
    told: u16,
    framing: Framing,
    /// The client may ask what is allocated.
    allocation: bool,
    /// The size that it knows, in bytes: the protocol has no word for another one.
    told_size: u64,
    geometry: Geometry,
    job: Job,
    pending: PendingTable,
    account: Account,
    requests: VecDeque<NbdRequest>,
    landed: VecDeque<Landed>,
    /// This part's data will have been copied to the heap when the next call comes.
    copied: Option<PendingKey>,
    out: Outbox,
    free: VecDeque<Buffer>,
}

impl Transmission {
    /// Nothing, with these bytes to be sent first.
    pub(crate) fn new(now: Instant, text: &[u8]) -> Self {
        Self {
            now,
            told: 0,
            framing: Framing::Simple,
            allocation: false,
            told_size: 0,
            geometry: NO_DEVICE,
            job: Job::Idle,
            pending: PendingTable::default(),
            account: Account::new(MAX_REQUESTS, share(&NO_DEVICE)),
            requests: VecDeque::new(),
            landed: VecDeque::new(),
            copied: None,
            out: Outbox::new(now, text),
            free: VecDeque::new(),
        }
    }

    /// It is so late.
    pub(crate) fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    /// Sets the result of the negotiation, and the device's bytes that the client was told.
    pub(crate) fn set_terms(&mut self, chosen: &Chosen, size: u64) {
        (self.told, self.told_size) = (chosen.flags, size);
        (self.framing, self.allocation) = (chosen.framing, chosen.allocation);
    }

    fn check(&self, q: &Request) -> Result<(), Errno> {
        check(q, self.told, self.framing, self.allocation, &self.geometry)
    }

    /// Sets the device's geometry. To a client it never becomes larger than it was told.
    pub(crate) fn set_geometry(&mut self, geometry: Geometry) {
        self.geometry = Geometry {
            size: geometry.size.min(self.told_size),
            ..geometry
        };
        self.account.set_max_bytes(share(&geometry));
    }

    /// Requests and bytes in flight.
    pub(crate) fn in_flight(&self) -> (usize, u64) {
        self.account.in_flight()
    }

    /// Returns the bytes to send.
    pub(crate) fn out(&self) -> &Outbox {
        &self.out
    }

    /// Returns the buffer that answers of the negotiation are appended to.
    pub(crate) fn text(&mut self) -> &mut Vec<u8> {
        self.out.text()
    }

    /// Whether all requests are answered and all answers are sent.
    pub(crate) fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.out.is_empty()
    }

    /// Whether something is to be polled for. Nothing new is begun with before: so a device that does everything at once is
    /// asked, and its client answered, in the client's order.
    fn has_work(&self) -> bool {
        !self.requests.is_empty() || !self.landed.is_empty()
    }

    /// Why nothing is to be received.
    pub(crate) fn stall(&self, input: &ParseBuffer) -> Option<Stall> {
        if self.has_work() {
            return Some(Stall::Work);
        }
        match &self.job {
            Job::Idle => {
                let q = head(input, self.framing)?.ok()?;
                self.account.blocked(charge(&q, self.check(&q)))
            }
            Job::Failed { .. } => None,
            Job::Read(_) => Some(Stall::Buffers),
            Job::Write(job) => match job.part.need(input) {
                Need::Buffer => Some(Stall::Buffers),
                Need::Bytes => None,
                Need::Copy | Need::Nothing => Some(Stall::Work),
            },
        }
    }

    /// Returns the destination of payload, and how much of it; only without a [`stall`](Self::stall).
    pub(crate) fn target(&mut self) -> Option<(Target<'_>, usize)> {
        match &mut self.job {
            Job::Write(job) => {
                let left = job.part.left();
                Some((job.part.target()?, left))
            }
            _ => None,
        }
    }

    /// Returns how many of `n` received bytes go behind the payload.
    pub(crate) fn received(&mut self, n: usize, input: &ParseBuffer) -> usize {
        match &mut self.job {
            Job::Write(job) if job.part.need(input) == Need::Bytes => job.part.received(self.now, n),
            _ => n,
        }
    }

    /// Bytes of a buffer that is needed.
    pub(crate) fn need(&mut self, input: &ParseBuffer) -> Option<usize> {
        if self.has_work() {
            return None;
        }
        match &self.job {
            Job::Read(job) => {
                let index = job.next + job.collected.len() as u32;
                let (_, len) = self.pending.get_mut(job.key)?.range(index);
                Some(len as usize)
            }
            Job::Write(job) => (job.part.need(input) == Need::Buffer).then(|| job.part.len()),
            Job::Idle | Job::Failed { .. } => None,
        }
    }

    /// Here is a buffer.
    pub(crate) fn give(&mut self, mut buffer: Buffer, input: &ParseBuffer) {
        let Some(need) = self.need(input) else {
            self.free.push_back(buffer);
            return;
        };
        buffer.set_len(need);
        if buffer.len() < need {
            self.free.push_back(buffer);
            return self.refuse(Errno::ENOMEM, input);
        }
        match &mut self.job {
            Job::Read(job) => {
                job.collected.push(buffer);
                if job.staged || job.collected.len() == job.parts as usize {
                    self.start_read();
                }
            }
            Job::Write(job) => self.free.extend(job.part.give(self.now, buffer)),
            Job::Idle | Job::Failed { .. } => self.free.push_back(buffer),
        }
    }

    /// There is no buffer for now.
    pub(crate) fn lack(&mut self) {
        if let Job::Read(job) = &mut self.job
            && !job.staged
            && job.parts > 1
            && stage(job, &mut self.pending)
        {
            self.start_read();
        }
    }

    /// There will be no buffer.
    pub(crate) fn refuse(&mut self, e: Errno, input: &ParseBuffer) {
        match core::mem::replace(&mut self.job, Job::Idle) {
            Job::Read(job) => {
                self.fail(job.key, e);
                self.free.extend(job.collected);
                self.job = Job::Failed { key: job.key, left: 0 };
            }
            Job::Write(job) if job.part.need(input) == Need::Buffer => {
                self.fail(job.key, e);
                self.fail_write(job);
            }
            other => self.job = other,
        }
    }

    /// A copy that is to be made before any other call.
    pub(crate) fn poll_copy<'a>(&'a mut self, input: &'a mut ParseBuffer) -> Option<BufferCopy<'a>> {
        if let Some(landed) = self.landed.pop_front() {
            self.copied = Some(landed.key);
            self.free.push_back(landed.buffer);
            let (pending, part) = self.pending.part_mut(landed.key)?;
            return Some(BufferCopy::Read {
                buffer: self.free.back()?,
                at: 0,
                out: pending.heap(part),
            });
        }
        if let Job::Write(job) = &mut self.job
            && job.part.need(input) == Need::Copy
        {
            return job.part.poll_copy(input, &mut self.free);
        }
        self.out.poll_spill(&mut self.free)
    }

    /// The data that was last to be copied has been.
    pub(crate) fn settle(&mut self) {
        if let Some(key) = self.copied.take() {
            self.release(key);
        }
    }

    /// The next request.
    pub(crate) fn poll_request(&mut self) -> Option<NbdRequest> {
        self.requests.pop_front()
    }

    /// A block status is over.
    pub(crate) fn status(&mut self, key: PendingKey, result: Result<&[Extent], Errno>) {
        if let Some(pending) = self.pending.get_mut(key) {
            match result {
                Ok(extents) => pending.learn(extents),
                Err(e) => pending.fail(e),
            }
        }
        self.release(key);
    }

    /// A request is over.
    pub(crate) fn done(&mut self, key: PendingKey, result: Result<(), Errno>, data: Option<Buffer>, losses: u64) {
        let Some((pending, part)) = self.pending.part_mut(key) else {
            self.free.extend(data);
            return;
        };
        pending.part_ended(result, losses);
        match pending.land(part, data, &mut self.free) {
            Some(buffer) if self.out.is_closed() => {
                self.free.push_back(buffer);
                self.release(key);
            }
            Some(buffer) => self.landed.push_back(Landed { key, buffer }),
            None => self.release(key),
        }
    }

    /// The client has taken `n` bytes.
    pub(crate) fn sent(&mut self, n: usize) {
        self.out.sent(self.now, n, &mut self.account, &mut self.free);
    }

    /// A buffer that goes back.
    pub(crate) fn poll_free(&mut self) -> Option<Buffer> {
        self.free.pop_front()
    }

    /// When the client has kept buffers for too long.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let part = match &self.job {
            Job::Write(job) => job.part.deadline(),
            _ => None,
        };
        [part, self.out.deadline()].into_iter().flatten().min()
    }

    /// Looks whether that time has come.
    pub(crate) fn timeout(&mut self) {
        if let Job::Write(job) = &mut self.job {
            job.part.timeout(self.now, &mut self.free);
        }
        self.out.timeout(self.now);
    }
}

/// Receiving and starting.
impl Transmission {
    /// One step of the work on what has come.
    pub(crate) fn work(&mut self, input: &mut ParseBuffer) -> Step {
        match &mut self.job {
            Job::Idle => self.next_request(input),
            Job::Failed { key, left } => {
                let key = *key;
                *left -= input.skip(*left);
                if *left > 0 {
                    return Step::Starved("a write", true);
                }
                self.job = Job::Idle;
                self.release(key);
                Step::On
            }
            Job::Read(job) => {
                let key = job.key;
                if !self.failed(key) {
                    return Step::Wait;
                }
                self.give_up(Errno::EIO);
                Step::On
            }
            Job::Write(_) => self.receive_write(input),
        }
    }

    fn next_request(&mut self, input: &mut ParseBuffer) -> Step {
        if self.has_work() {
            return Step::Wait;
        }
        let q = match head(input, self.framing) {
            None => return Step::Starved("a request", !input.unread().is_empty()),
            Some(Err(why)) => return Step::End(why),
            Some(Ok(q)) => q,
        };
        if q.command == cmd::DISC {
            return Step::End(End::Left);
        }
        let payload = q.payload(self.framing);
        if payload > proto::MAX_PAYLOAD.into() {
            return Step::End(End::Protocol(format!("a request with {payload} bytes of payload")));
        }
        let checked = self.check(&q);
        let charge = charge(&q, checked);
        if self.account.blocked(charge).is_some() {
            return Step::Wait;
        }
        let asked = Asked {
            framing: self.framing,
            command: q.command,
            cookie: q.cookie,
            offset: q.offset,
        };
        let pending = Pending::new(asked, charge, q.len, moved(&q), &self.geometry);
        let Some(key) = self.pending.insert(pending) else {
            return Step::Wait;
        };
        self.account.admit(charge);
        input.consume(self.framing.request_len());
        input.expect_more_like(&q);
        match checked {
            Ok(()) => self.begin(&q, key),
            Err(e) => {
                self.fail(key, e);
                let left = payload as usize;
                self.job = Job::Failed { key, left };
            }
        }
        Step::On
    }

    /// Begins with a request that is in order.
    fn begin(&mut self, q: &Request, key: PendingKey) {
        // Without a write cache every write is as good as forced.
        let forced = q.flags & cmd_flag::FUA != 0 && self.geometry.write_cache;
        let fua = forced && self.geometry.fua;
        let op = match q.command {
            _ if q.command != cmd::FLUSH && q.len == 0 => None,
            cmd::READ | cmd::CACHE => return self.begin_read(q, key),
            cmd::WRITE => Some(BlockOp::Write { fua }),
            cmd::FLUSH => Some(BlockOp::Flush),
            cmd::BLOCK_STATUS => Some(BlockOp::BlockStatus {
                most: if q.flags & cmd_flag::REQ_ONE != 0 {
                    1
                } else {
                    MAX_EXTENTS
                },
            }),
            cmd::TRIM => Some(BlockOp::Discard),
            cmd::WRITE_ZEROES => Some(BlockOp::WriteZeroes {
                fua,
                may_unmap: q.flags & cmd_flag::NO_HOLE == 0,
            }),
            _ => None,
        };
        if let Some(pending) = self.pending.get_mut(key) {
            // A discard knows no FUA, and the device may have lost it since the client was told.
            let flush = op.is_some_and(|op| forced && op.writes() && (op == BlockOp::Discard || !fua));
            pending.set_flush(flush);
            if q.command == cmd::BLOCK_STATUS {
                // Until the device says more.
                pending.learn(&[]);
            }
        }
        match op {
            Some(BlockOp::Write { fua }) => return self.begin_write(q, key, fua),
            Some(BlockOp::Flush) => self.start(key, BlockOp::Flush, 0, 0, None),
            Some(op) => self.start(key, op, q.offset, q.len, None),
            None => {}
        }
        self.release(key);
    }

    fn begin_read(&mut self, q: &Request, key: PendingKey) {
        let Some(pending) = self.pending.get_mut(key) else {
            return;
        };
        let parts = pending.parts();
        let mut job = ReadJob {
            key,
            offset: q.offset,
            next: 0,
            parts,
            collected: SmallVec::new(),
            staged: q.command == cmd::CACHE,
        };
        // One read does not take most of the buffers to itself.
        if !job.staged && parts > (self.geometry.queue_depth / 4).max(1) && !stage(&mut job, &mut self.pending) {
            return self.release(key);
        }
        self.job = Job::Read(job);
    }

    fn begin_write(&mut self, q: &Request, key: PendingKey, fua: bool) {
        let Some(pending) = self.pending.get_mut(key) else {
            return;
        };
        let (_, len) = pending.range(0);
        self.job = Job::Write(WriteJob {
            key,
            offset: q.offset,
            fua,
            index: 0,
            part: Part::new(len as usize),
        });
    }

    /// Starts the parts of a read that have their buffers.
    fn start_read(&mut self) {
        let Job::Read(job) = &mut self.job else { return };
        let (key, offset, first) = (job.key, job.offset, job.next);
        let collected = core::mem::take(&mut job.collected);
        job.next += collected.len() as u32;
        let over = job.next >= job.parts;
        if let Some(pending) = self.pending.get_mut(key)
            && !job.staged
        {
            pending.expect_buffers();
        }
        for (index, buffer) in (first..).zip(collected) {
            let (at, len) = self.pending.get_mut(key).map_or((0, 0), |p| p.range(index));
            let offset = offset + u64::from(at);
            self.start(key.part(index), BlockOp::Read, offset, len.into(), Some(buffer));
        }
        if over {
            self.job = Job::Idle;
            self.release(key);
        }
    }

    fn receive_write(&mut self, input: &mut ParseBuffer) -> Step {
        let Job::Write(mut job) = core::mem::replace(&mut self.job, Job::Idle) else {
            return Step::On;
        };
        job.part.absorb(input);
        let wait = match job.part.need(input) {
            Need::Nothing => {
                self.submit_write(job);
                return Step::On;
            }
            Need::Buffer if self.failed(job.key) => {
                self.fail_write(job);
                return Step::On;
            }
            Need::Buffer | Need::Copy => Step::Wait,
            Need::Bytes => Step::Starved("a write", true),
        };
        self.job = Job::Write(job);
        wait
    }

    /// A part of a write is in its buffer.
    fn submit_write(&mut self, job: WriteJob) {
        let (key, index) = (job.key, job.index);
        let ranges = self.pending.get_mut(key).map(|p| (p.range(index), p.range(index + 1)));
        let ((at, len), (_, next)) = ranges.unwrap_or_default();
        let (op, offset) = (BlockOp::Write { fua: job.fua }, job.offset + u64::from(at));
        self.start(key.part(index), op, offset, len.into(), job.part.into_buffer());
        if next == 0 {
            return self.release(key);
        }
        self.job = Job::Write(WriteJob {
            index: index + 1,
            part: Part::new(next as usize),
            ..job
        });
    }

    /// The rest of a write that has failed is thrown away.
    fn fail_write(&mut self, job: WriteJob) {
        let behind = self.pending.get_mut(job.key).map_or(0, |p| p.behind(job.index));
        self.job = Job::Failed {
            key: job.key,
            left: behind + job.part.left(),
        };
        self.free.extend(job.part.into_buffer());
    }

    /// The request that is being received or started is not started any further, for this reason.
    pub(crate) fn give_up(&mut self, why: Errno) {
        let key = match core::mem::replace(&mut self.job, Job::Idle) {
            Job::Idle => return,
            Job::Failed { key, .. } => key,
            Job::Read(job) => {
                self.free.extend(job.collected);
                job.key
            }
            Job::Write(job) => {
                self.free.extend(job.part.into_buffer());
                job.key
            }
        };
        self.fail(key, why);
        self.release(key);
    }

    /// Requests that nobody has begun with are over.
    pub(crate) fn drop_requests(&mut self) {
        self.settle();
        let requests = core::mem::take(&mut self.requests).into_iter().map(|q| (q.key, q.data));
        let landed = core::mem::take(&mut self.landed);
        let landed = landed.into_iter().map(|l| (l.key, Some(l.buffer)));
        for (key, data) in requests.chain(landed) {
            self.free.extend(data);
            self.fail(key, Errno::ECONNABORTED);
            self.release(key);
        }
    }

    /// Nothing is sent any more.
    pub(crate) fn close_output(&mut self) {
        self.out.close(&mut self.account, &mut self.free);
    }

    fn fail(&mut self, key: PendingKey, e: Errno) {
        if let Some(pending) = self.pending.get_mut(key) {
            pending.fail(e);
        }
    }

    fn failed(&mut self, key: PendingKey) -> bool {
        self.pending.get_mut(key).is_none_or(|p| p.failed())
    }

    /// Starts a part of a request.
    fn start(&mut self, key: PendingKey, op: BlockOp, offset: u64, len: u64, data: Option<Buffer>) {
        let Some(pending) = self.pending.get_mut(key) else {
            self.free.extend(data);
            return;
        };
        pending.open();
        self.requests.push_back(NbdRequest {
            key,
            op,
            offset,
            len,
            data,
            forces: false,
        });
    }

    /// Ends a part, or that parts are started.
    fn release(&mut self, key: PendingKey) {
        match self.pending.release(key, &mut self.free) {
            Release::Open => {}
            Release::Flush(key) if self.out.is_closed() => self.release(key),
            Release::Flush(key) => self.requests.push_back(NbdRequest {
                key,
                op: BlockOp::Flush,
                offset: 0,
                len: 0,
                data: None,
                forces: true,
            }),
            Release::Over(reply) => self.out.push(self.now, reply, &mut self.account, &mut self.free),
        }
    }
}
