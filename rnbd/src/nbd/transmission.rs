//! Requests of a client, from their first byte to the last byte of their reply.

use core::{cell::RefCell, ops::ControlFlow};
use std::rc::Rc;

use roce_verbs::Instant;
use rtrs::client::buffers::Buffer;
use smallvec::SmallVec;

use crate::{
    block::{BlockOp, BlockRequest, Completion, Geometry},
    errno::Errno,
    nbd::{
        handshake::Chosen,
        memory::give,
        parse::ParseBuffer,
        payload::{Need, Part, Target},
        proto::{self, Framing, Request, cmd, cmd_flag},
        reply::{Account, Header, Outbox},
        request::{Backend, InFlight, RequestPart},
        state::{End, Stall},
    },
    proto::status,
};

/// Requests in flight of one connection at most.
const MAX_REQUESTS: usize = 1024;
/// Extents of a reply at most.
const MAX_EXTENTS: u32 = status::MAX_EXTENTS;
/// Bytes in flight of one connection at most.
const MAX_BYTES: u64 = 64 << 20;

/// The device before one is chosen: every request is out of range.
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

/// Bytes in flight of one connection at most: half of the buffers is left to others.
fn most_bytes(g: &Geometry) -> u64 {
    (u64::from(g.queue_depth / 2) * u64::from(g.max_transfer)).clamp(1, MAX_BYTES)
}

type Shared = Rc<RefCell<InFlight>>;

/// A read that takes its buffers.
#[derive(Debug)]
struct ReadJob {
    request: Shared,
    /// The next part that has no buffer.
    next: u32,
    /// The data is collected in the heap, or dropped: each part is submitted as soon as it has a buffer.
    staged: bool,
}

/// A write whose payload is received.
#[derive(Debug)]
struct WriteJob {
    request: Shared,
    fua: bool,
    index: u32,
    part: Part,
}

/// The request that is being received and submitted: the last one that was read.
#[derive(Debug)]
enum Job {
    /// None: the next bytes are a header.
    Idle,
    /// A request that has failed. So many bytes of its payload are still to be skipped.
    Failed { request: Shared, left: usize },
    /// A read.
    Read(ReadJob),
    /// A write.
    Write(WriteJob),
}

/// Why work on what has arrived stops.
#[derive(Debug)]
pub(crate) enum Stop {
    /// A request in flight has to complete first.
    Stall(Stall),
    /// More bytes of this have to arrive; some of them have.
    Input(&'static str, bool),
    /// The input has ended.
    End(End),
}

type Step = ControlFlow<Stop>;

/// The requests of a client, and its output.
#[derive(Debug)]
pub(crate) struct Transmission {
    /// The time of the last call.
    now: Instant,
    /// The transmission flags that the client knows.
    told: u16,
    framing: Framing,
    /// The client may ask what is allocated.
    allocation: bool,
    /// The size that the client knows, in bytes: the protocol can't change it.
    told_size: u64,
    geometry: Geometry,
    job: Job,
    account: Account,
    out: Outbox,
}

impl Transmission {
    /// Without requests, with these bytes to be sent first.
    pub(crate) fn new(now: Instant, text: &[u8]) -> Self {
        Self {
            now,
            told: 0,
            framing: Framing::Simple,
            allocation: false,
            told_size: 0,
            geometry: NO_DEVICE,
            job: Job::Idle,
            account: Account::new(MAX_REQUESTS, most_bytes(&NO_DEVICE)),
            out: Outbox::new(now, text),
        }
    }

    /// Sets the time.
    pub(crate) fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    /// Sets the result of the negotiation, and the device's bytes that the client was told.
    pub(crate) fn set_terms(&mut self, chosen: &Chosen, size: u64) {
        (self.told, self.told_size) = (chosen.flags, size);
        (self.framing, self.allocation) = (chosen.framing, chosen.allocation);
    }

    /// Sets the device's geometry. For a client it never becomes larger than it was told.
    pub(crate) fn set_geometry(&mut self, geometry: Geometry) {
        self.geometry = Geometry {
            size: geometry.size.min(self.told_size),
            ..geometry
        };
        self.account.set_max_bytes(most_bytes(&geometry));
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
        self.in_flight().0 == 0 && self.out.is_empty()
    }

    /// Returns the destination of payload, and how much of it.
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
    pub(crate) fn received(&mut self, n: usize) -> usize {
        match &mut self.job {
            Job::Write(job) if job.part.need() == Need::Bytes => job.part.received(self.now, n),
            _ => n,
        }
    }

    /// A part has ended.
    pub(crate) fn done(&mut self, part: RequestPart, completion: Completion, backend: &mut dyn Backend) {
        let RequestPart { request, index } = part;
        if self.out.is_closed() {
            // Nobody gets the data.
            request.borrow_mut().fail(Errno::ECONNABORTED);
        }
        request.borrow_mut().part_ended(index, completion, backend);
        self.release(request, backend);
    }

    /// The client has taken `n` bytes.
    pub(crate) fn sent(&mut self, n: usize, backend: &mut dyn Backend) {
        self.out.sent(self.now, n, &mut self.account, backend);
    }

    /// When the client has kept buffers for too long.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let part = match &self.job {
            Job::Write(job) => job.part.deadline(),
            _ => None,
        };
        [part, self.out.deadline()].into_iter().flatten().min()
    }

    /// Checks that deadline.
    pub(crate) fn timeout(&mut self, backend: &mut dyn Backend) {
        if let Job::Write(job) = &mut self.job {
            job.part.timeout(self.now, backend);
        }
        self.out.timeout(self.now, backend);
    }

    /// Stops sending.
    pub(crate) fn close_output(&mut self, backend: &mut dyn Backend) {
        self.out.close(&mut self.account, backend);
    }
}

/// Receiving and submitting.
impl Transmission {
    /// Works on what has arrived, as far as it goes.
    pub(crate) fn run(&mut self, input: &mut ParseBuffer, backend: &mut dyn Backend) -> Stop {
        loop {
            let step = match core::mem::replace(&mut self.job, Job::Idle) {
                Job::Idle => self.next_request(input, backend),
                Job::Failed { request, left } => self.skip(request, left, input, backend),
                Job::Read(job) => self.read(job, backend),
                Job::Write(job) => self.write(job, input, backend),
            };
            if let ControlFlow::Break(stop) = step {
                return stop;
            }
        }
    }

    fn next_request(&mut self, input: &mut ParseBuffer, backend: &mut dyn Backend) -> Step {
        let end = |why: String| ControlFlow::Break(Stop::End(End::Protocol(why)));
        let q = match Request::parse(input.unread(), self.framing) {
            None => return ControlFlow::Break(Stop::Input("a request", !input.unread().is_empty())),
            Some(None) => return end("request without its magic number".into()),
            Some(Some(q)) => q,
        };
        if q.command == cmd::DISC {
            return ControlFlow::Break(Stop::End(End::Left));
        }
        let payload = q.payload(self.framing);
        if payload > proto::MAX_PAYLOAD.into() {
            return end(format!("a request with {payload} bytes of payload"));
        }
        let checked = q.check(self.told, self.framing, self.allocation, &self.geometry);
        // What is refused moves nothing.
        let charge = checked.map_or(0, |()| q.moved().into());
        if let Err(stall) = self.account.admit(charge) {
            return ControlFlow::Break(Stop::Stall(stall));
        }
        input.consume(self.framing.request_len());
        input.expect_more_like(&q);
        let header = Header {
            framing: self.framing,
            command: q.command,
            cookie: q.cookie,
            offset: q.offset,
        };
        let mut request = InFlight::new(header, charge, q.len, q.moved(), &self.geometry);
        match checked {
            Ok(()) => self.begin(&q, request, backend),
            Err(e) => {
                request.fail(e);
                self.skip(share(request), payload as usize, input, backend)
            }
        }
    }

    /// Begins with a request that is in order.
    fn begin(&mut self, q: &Request, mut request: InFlight, backend: &mut dyn Backend) -> Step {
        // Without a write cache every write is as good as forced.
        let forced = q.flags & cmd_flag::FUA != 0 && self.geometry.write_cache;
        let fua = forced && self.geometry.fua;
        let op = match q.command {
            _ if q.command != cmd::FLUSH && q.len == 0 => None,
            cmd::READ | cmd::CACHE => {
                // One read does not take most of the buffers to itself.
                let is_long = q.command == cmd::READ && request.parts() > (self.geometry.queue_depth / 4).max(1);
                if is_long {
                    request.expect_heap();
                }
                self.job = Job::Read(ReadJob {
                    request: share(request),
                    next: 0,
                    staged: is_long || q.command == cmd::CACHE,
                });
                return ControlFlow::Continue(());
            }
            cmd::WRITE => Some(BlockOp::Write { fua }),
            cmd::FLUSH => Some(BlockOp::Flush),
            cmd::BLOCK_STATUS if q.flags & cmd_flag::REQ_ONE != 0 => Some(BlockOp::BlockStatus { most: 1 }),
            cmd::BLOCK_STATUS => Some(BlockOp::BlockStatus { most: MAX_EXTENTS }),
            cmd::TRIM => Some(BlockOp::Discard),
            cmd::WRITE_ZEROES => Some(BlockOp::WriteZeroes {
                fua,
                may_unmap: q.flags & cmd_flag::NO_HOLE == 0,
            }),
            _ => None,
        };
        // A discard knows no FUA, and the device may have lost it since the client was told.
        request.set_flush(op.is_some_and(|op| forced && op.writes() && (op == BlockOp::Discard || !fua)));
        if q.command == cmd::BLOCK_STATUS {
            // Until the device says more.
            request.learn(&[]);
        }
        let (_, len) = request.range(0);
        let request = share(request);
        match op {
            Some(BlockOp::Write { fua }) => {
                self.job = Job::Write(WriteJob {
                    request,
                    fua,
                    index: 0,
                    part: Part::new(len as usize),
                });
                return ControlFlow::Continue(());
            }
            Some(BlockOp::Flush) => self.submit(&request, 0, BlockOp::Flush, (0, 0), None, backend),
            Some(op) => self.submit(&request, 0, op, (q.offset, q.len), None, backend),
            None => {}
        }
        self.release(request, backend);
        ControlFlow::Continue(())
    }

    /// Takes buffers for a read, and submits its parts.
    fn read(&mut self, mut job: ReadJob, backend: &mut dyn Backend) -> Step {
        let parts = job.request.borrow().parts();
        // Of parts that are submitted only when there are enough for all: none when it has to wait.
        let mut collected = SmallVec::<[Buffer; 1]>::new();
        while job.next < parts && !job.request.borrow().failed() {
            let (_, len) = job.request.borrow().range(job.next);
            match backend.take(len as usize) {
                Ok(Some(buffer)) => {
                    collected.push(buffer);
                    job.next += 1;
                }
                // Two clients could each hold what the other waits for.
                Ok(None) if !job.staged && parts > 1 => {
                    job.staged = true;
                    job.request.borrow_mut().expect_heap();
                }
                Ok(None) => {
                    self.job = Job::Read(job);
                    return ControlFlow::Break(Stop::Stall(Stall::Buffers));
                }
                Err(e) => job.request.borrow_mut().fail(e),
            }
            if job.request.borrow().failed() || !(job.staged || job.next == parts) {
                continue;
            }
            if !job.staged {
                job.request.borrow_mut().expect_buffers();
            }
            let first = job.next - collected.len() as u32;
            for (index, mut buffer) in (first..).zip(collected.drain(..)) {
                let (at, len) = job.request.borrow().range(index);
                buffer.set_len(len as usize);
                let range = (job.request.borrow().header.offset + u64::from(at), len.into());
                self.submit(&job.request, index, BlockOp::Read, range, Some(buffer), backend);
            }
        }
        collected.into_iter().for_each(|buffer| give(backend, Some(buffer)));
        self.release(job.request, backend);
        ControlFlow::Continue(())
    }

    /// Receives the payload of a write, and submits its parts.
    fn write(&mut self, mut job: WriteJob, input: &mut ParseBuffer, backend: &mut dyn Backend) -> Step {
        loop {
            job.part.absorb(input, backend);
            match job.part.need() {
                Need::Nothing => break,
                Need::Bytes => {
                    self.job = Job::Write(job);
                    return ControlFlow::Break(Stop::Input("a write", true));
                }
                Need::Buffer if job.request.borrow().failed() => return self.fail_write(job, input, backend),
                Need::Buffer => match backend.take(job.part.len()) {
                    Ok(Some(mut buffer)) => {
                        buffer.set_len(job.part.len());
                        job.part.give(self.now, buffer, backend);
                    }
                    Ok(None) => {
                        self.job = Job::Write(job);
                        return ControlFlow::Break(Stop::Stall(Stall::Buffers));
                    }
                    Err(e) => job.request.borrow_mut().fail(e),
                },
            }
        }
        let WriteJob {
            request,
            fua,
            index,
            part,
        } = job;
        let ((at, len), (_, next)) = (request.borrow().range(index), request.borrow().range(index + 1));
        let range = (request.borrow().header.offset + u64::from(at), len.into());
        self.submit(
            &request,
            index,
            BlockOp::Write { fua },
            range,
            part.into_buffer(),
            backend,
        );
        match next {
            0 => self.release(request, backend),
            next => {
                self.job = Job::Write(WriteJob {
                    request,
                    fua,
                    index: index + 1,
                    part: Part::new(next as usize),
                });
            }
        }
        ControlFlow::Continue(())
    }

    /// A write has failed: the rest of its payload is skipped.
    fn fail_write(&mut self, job: WriteJob, input: &mut ParseBuffer, backend: &mut dyn Backend) -> Step {
        let left = job.request.borrow().behind(job.index) + job.part.left();
        give(backend, job.part.into_buffer());
        self.skip(job.request, left, input, backend)
    }

    /// Skips payload of a request that has failed.
    fn skip(&mut self, request: Shared, left: usize, input: &mut ParseBuffer, backend: &mut dyn Backend) -> Step {
        let left = left - input.skip(left);
        if left > 0 {
            self.job = Job::Failed { request, left };
            return ControlFlow::Break(Stop::Input("a write", true));
        }
        self.release(request, backend);
        ControlFlow::Continue(())
    }

    /// Ends the request that is being received or submitted, for this reason.
    pub(crate) fn give_up(&mut self, why: Errno, backend: &mut dyn Backend) {
        let request = match core::mem::replace(&mut self.job, Job::Idle) {
            Job::Idle => return,
            Job::Failed { request, .. } => request,
            Job::Read(job) => job.request,
            Job::Write(job) => {
                give(backend, job.part.into_buffer());
                job.request
            }
        };
        request.borrow_mut().fail(why);
        self.release(request, backend);
    }

    /// Submits a part of a request: so many bytes from there.
    fn submit(
        &mut self,
        request: &Shared,
        index: u32,
        op: BlockOp,
        (offset, len): (u64, u64),
        data: Option<Buffer>,
        backend: &mut dyn Backend,
    ) {
        request.borrow_mut().part_begins();
        let part = RequestPart {
            request: request.clone(),
            index,
        };
        let request = BlockRequest::new(part, op, offset, len).with_data(data);
        if let Some((part, completion)) = backend.submit(request) {
            self.done(part, completion, backend);
        }
    }

    /// A part has ended, or all are submitted: with the last of that the request has.
    fn release(&mut self, request: Shared, backend: &mut dyn Backend) {
        let Some(request) = Rc::into_inner(request) else { return };
        let mut request = request.into_inner();
        request.close();
        if request.take_flush() && !self.out.is_closed() {
            request.part_begins();
            let part = RequestPart {
                request: share(request),
                index: 0,
            };
            let flush = BlockRequest {
                forces: true,
                ..BlockRequest::flush(part)
            };
            if let Some((part, completion)) = backend.submit(flush) {
                self.done(part, completion, backend);
            }
            return;
        }
        let reply = request.into_reply(backend);
        self.out.push(self.now, reply, &mut self.account, backend);
    }
}

fn share(request: InFlight) -> Shared {
    Rc::new(RefCell::new(request))
}
