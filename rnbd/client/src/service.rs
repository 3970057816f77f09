//! Session, device and operations of a disk, on one loop.

use std::{
    collections::VecDeque,
    io,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use rand::{RngCore, SeedableRng, rngs::StdRng};
use rnbd::{
    Errno,
    block::{BlockOp, BlockRequest, Geometry},
    client::{
        Client as RnbdClient, OnLoss, Opener, Request as RnbdRequest, Unmap,
        output::{DeviceKey, Output},
    },
};
use roce::Completion;
use roce::reactor::{Service, TurnCx};
use roce_verbs::{
    Instant,
    provider::{Event, QpId},
};
use rtrs::{
    Cx, Error, PathError,
    client::{Buffer, Output as RtrsOutput, PathId, PathNews, SessionId, state::PathState},
};
use slab::Slab;

use crate::{
    error::OpenError,
    options::DiskOptions,
    request::{Outcome, Reply, Request, Transfer},
};

macro_rules! cx {
    ($self:expr, $turn:expr) => {
        &mut Cx {
            now: $turn.now,
            provider: $turn.device.provider(),
            random: &mut |out: &mut [u8]| $self.rng.fill_bytes(out),
        }
    };
}

/// Requests of other threads.
pub(crate) enum Command {
    Do(Request, Reply),
    /// Close, with an answer when that is done.
    Close(Option<OnClose>),
}

/// Phase of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// The session is being opened.
    Connecting,
    /// The server is opening the device.
    Mapping,
    /// Operations are taken.
    Open,
    /// Operations in flight end, and nothing more is taken.
    Draining,
    /// It is flushed.
    Flushing,
    /// The device is being closed.
    Unmapping,
    /// The session is being closed.
    Closing,
    Ended,
}

/// Called once: the disk is closed.
pub(crate) type OnClose = Box<dyn FnOnce(Result<(), OpenError>) + Send>;

/// Called once: the disk is open, or can't be.
pub(crate) type OnOpen = Box<dyn FnOnce(Result<Geometry, OpenError>) + Send>;

/// State that the handles of a disk share.
#[derive(Clone, Debug, Default)]
pub(crate) struct Status(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    geometry: Option<Geometry>,
    /// Why it ended, unless it was closed.
    failure: Option<(Errno, String)>,
}

impl Status {
    fn with<T>(&self, f: impl FnOnce(&mut Known) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn geometry(&self) -> Option<Geometry> {
        self.with(|known| known.geometry)
    }

    /// Returns why operations fail after the end.
    pub(crate) fn why_closed(&self) -> io::Error {
        self.with(|known| match &known.failure {
            Some((errno, text)) => io::Error::new(io::Error::from(*errno).kind(), text.clone()),
            None => OpenError::Closed.into(),
        })
    }

    /// Returns why there is no answer of a loop that has ended.
    pub(crate) fn end(&self) -> OpenError {
        self.with(|known| match known.failure.clone() {
            Some((errno, text)) => OpenError::Ended { errno, text },
            None => OpenError::Closed,
        })
    }

    /// Keeps the reason of an end, unless there was one before.
    pub(crate) fn fail(&self, why: &OpenError) {
        self.with(|known| {
            known.failure.get_or_insert_with(|| (why.errno(), why.to_string()));
        });
    }
}

type Rnbd = RnbdClient<Owner>;

/// Owner of an operation of RNBD's client.
#[derive(Debug)]
enum Owner {
    /// A part of a transfer.
    Part(usize, Range<usize>),
    /// The flush at the end.
    LastFlush,
}

/// A disk on a loop.
pub(crate) struct DiskService {
    options: DiskOptions,
    rnbd: Rnbd,
    rng: StdRng,
    phase: Phase,
    session: Option<SessionId>,
    device: Option<DeviceKey>,
    opener: Option<Opener>,
    status: Status,
    transfers: Slab<Transfer>,
    /// Operations in flight.
    operations: usize,
    /// Transfers with parts that have not begun, in order.
    waiting: VecDeque<usize>,
    /// Results for the caller's loop.
    pub(crate) results: VecDeque<(u64, Outcome)>,
    on_open: Option<OnOpen>,
    on_close: Option<OnClose>,
    /// Why it ended or ends, unless it was asked to.
    failure: Option<OpenError>,
    /// When a close gives up on what is in flight.
    deadline: Option<Instant>,
}

impl DiskService {
    /// A disk that begins to open with the first turn.
    pub(crate) fn new(options: DiskOptions, status: Status, on_open: OnOpen, turn: &mut TurnCx<'_, ()>) -> Self {
        let mut seed = [0; 32];
        let seeded = getrandom::fill(&mut seed);
        let mut this = Self {
            options,
            rnbd: Rnbd::new(),
            rng: StdRng::from_seed(seed),
            phase: Phase::Connecting,
            session: None,
            device: None,
            opener: None,
            status,
            transfers: Slab::new(),
            operations: 0,
            waiting: VecDeque::new(),
            results: VecDeque::new(),
            on_open: Some(on_open),
            on_close: None,
            failure: None,
            deadline: None,
        };
        if let Err(e) = seeded {
            this.end_with(turn, OpenError::System(io::Error::other(e.to_string())));
            return this;
        }
        let session = this.options.session.clone();
        match this.rnbd.rtrs_mut().open(cx!(this, turn), session) {
            Ok(session) => this.session = Some(session),
            Err(e) => this.end_with(turn, this.options.no_session(e)),
        }
        this
    }

    /// Begins an operation, or refuses it.
    pub(crate) fn submit(&mut self, request: Request, reply: Reply) {
        let geometry = self.status.geometry().filter(|_| self.phase == Phase::Open);
        let checked = match geometry {
            Some(geometry) => request.check(&geometry),
            None if matches!(self.phase, Phase::Connecting | Phase::Mapping) => Err(Errno::ENOTCONN.into()),
            None => Err(self.status.why_closed()),
        };
        match checked {
            Ok(()) => {
                let index = self.transfers.insert(Transfer::new(request, reply));
                self.waiting.push_back(index);
            }
            Err(why) => reply.refuse(why, &mut self.results),
        }
    }

    /// Begins to close. What is in flight ends first.
    pub(crate) fn close(&mut self, turn: &mut TurnCx<'_, ()>, reply: Option<OnClose>) {
        if self.on_close.is_none() {
            self.on_close = reply;
        }
        self.deadline.get_or_insert(turn.now + self.options.grace);
        match self.phase {
            Phase::Connecting | Phase::Mapping => {
                self.failed(OpenError::Closed);
                self.close_session(turn);
            }
            Phase::Open => {
                self.phase = Phase::Draining;
                // Nothing waits for a lost session then.
                if let Some(device) = self.device
                    && let Err(e) = self.rnbd.set_on_loss(device, OnLoss::Error)
                {
                    tracing::debug!("on loss: {e}");
                }
                self.look_drained(turn);
            }
            _ => {}
        }
    }

    /// Takes the reason of an end that was not asked for, or went wrong.
    pub(crate) fn take_failure(&mut self) -> Option<OpenError> {
        self.failure.take()
    }
}

/// From one state to the next.
impl DiskService {
    fn look_drained(&mut self, turn: &mut TurnCx<'_, ()>) {
        if self.phase != Phase::Draining || !self.transfers.is_empty() {
            return;
        }
        let writable = self.status.geometry().is_some_and(|geometry| !geometry.read_only);
        match &self.opener {
            Some(opener) if writable && self.failure.is_none() => {
                self.phase = Phase::Flushing;
                self.operations += 1;
                let flush = BlockRequest::flush(Owner::LastFlush);
                self.rnbd.submit(opener, flush);
            }
            _ => self.unmap(turn),
        }
    }

    fn unmap(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.phase = Phase::Unmapping;
        let how = Unmap::Normal { in_use: false };
        let begun = self.device.map(|device| self.rnbd.unmap(device, how));
        if !matches!(begun, Some(Ok(()))) {
            self.close_session(turn);
        }
    }

    fn close_session(&mut self, turn: &mut TurnCx<'_, ()>) {
        if matches!(self.phase, Phase::Closing | Phase::Ended) {
            return;
        }
        self.phase = Phase::Closing;
        match self.session {
            Some(session) => self.rnbd.rtrs_mut().close(cx!(self, turn), session),
            None => self.finish(turn),
        }
    }

    fn end_with(&mut self, turn: &mut TurnCx<'_, ()>, why: OpenError) {
        self.failed(why);
        self.finish(turn);
    }

    /// The disk ends or is about to, for this reason, unless there was one before.
    fn failed(&mut self, why: OpenError) {
        if self.failure.is_none() {
            self.status.fail(&why);
            self.failure = Some(why);
        }
    }

    /// The loop ends with this turn.
    fn finish(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.phase = Phase::Ended;
        for (_, mut transfer) in core::mem::take(&mut self.transfers) {
            transfer.fail(self.status.why_closed());
            transfer.finish(&mut self.results);
        }
        if let Some(on_open) = self.on_open.take() {
            on_open(Err(self.failure.take().unwrap_or(OpenError::Closed)));
        }
        if let Some(on_close) = self.on_close.take() {
            on_close(self.failure.take().map_or(Ok(()), Err));
        }
        turn.stop();
    }

    /// All paths are gone for good.
    fn lost(&mut self, turn: &mut TurnCx<'_, ()>, why: PathError) {
        tracing::error!("the disk {} is lost: {why}", self.options.name);
        self.failed(OpenError::Lost(why));
        self.close_session(turn);
    }
}

/// Outputs of the machines.
impl DiskService {
    fn session_opened(&mut self, session: SessionId) {
        if self.phase == Phase::Connecting {
            self.phase = Phase::Mapping;
            let device = self.rnbd.map(session, &self.options.name, self.options.mode);
            if let Err(e) = self.rnbd.set_on_loss(device, self.options.on_loss) {
                // Why it can't be mapped is reported.
                tracing::debug!("on loss: {e}");
            }
            self.device = Some(device);
        }
    }

    fn session_down(&mut self, turn: &mut TurnCx<'_, ()>, why: PathError) {
        tracing::warn!("no path to {} is up: {why}", self.options.name);
        if !matches!(self.phase, Phase::Open | Phase::Draining) {
            self.failed(OpenError::Lost(why));
            self.close_session(turn);
        }
    }

    fn path_news(&mut self, turn: &mut TurnCx<'_, ()>, session: SessionId, id: PathId, news: PathNews) {
        let paths = self.rnbd.rtrs().paths(session);
        let path = paths.iter().find(|p| p.id == id).map(|p| p.addr.to_string());
        let path = path.unwrap_or_default();
        match news {
            PathNews::Up { again: true } => tracing::info!("path {path} is up again"),
            PathNews::Up { again: false } => tracing::debug!("path {path} is up"),
            PathNews::Down(why) => tracing::warn!("path {path} is down: {why}"),
            PathNews::TookOver(requests) => tracing::info!("path {path} has taken over {requests} requests"),
            PathNews::AttemptFailed(error) => tracing::warn!("path {path} could not be connected: {error}"),
            PathNews::Closed(why) => {
                let open = !matches!(self.phase, Phase::Connecting | Phase::Closing | Phase::Ended);
                if open && paths.iter().all(|path| path.state == PathState::Closed) {
                    self.lost(turn, why);
                }
            }
            PathNews::Done(..) => {}
        }
    }

    fn session_output(&mut self, turn: &mut TurnCx<'_, ()>, output: RtrsOutput<RnbdRequest<Owner>>) {
        match output {
            RtrsOutput::Opened(session, _) => self.session_opened(session),
            RtrsOutput::OpenFailed(_, error) => self.end_with(turn, self.options.no_session(error)),
            RtrsOutput::Down(_, why) => self.session_down(turn, why),
            RtrsOutput::Closed(_) => self.finish(turn),
            RtrsOutput::Path { session, path, news } => self.path_news(turn, session, path, news),
            // RNBD takes the ends of requests.
            RtrsOutput::Up(..) | RtrsOutput::Done { .. } => {}
        }
    }

    fn output(&mut self, turn: &mut TurnCx<'_, ()>, output: Output<Owner>) {
        match output {
            Output::Rtrs(output) => self.session_output(turn, output),
            Output::Mapped(key, geometry) => {
                self.status.with(|known| known.geometry = Some(geometry));
                self.opener = Some(self.rnbd.opener(key));
                if self.phase == Phase::Mapping {
                    self.phase = Phase::Open;
                }
                if let Some(on_open) = self.on_open.take() {
                    on_open(Ok(geometry));
                }
            }
            Output::MapFailed(key, error) if self.rnbd.state(key).is_some() => {
                tracing::warn!("the server has not opened {} again: {error}", self.options.name);
            }
            Output::MapFailed(_, error) => {
                self.failed(OpenError::Map(error));
                self.device = None;
                self.close_session(turn);
            }
            Output::Done { user, completion, .. } => self.done(turn, user, completion.result, completion.data),
            Output::WritesLost { writes, cause, .. } => {
                let name = &self.options.name;
                tracing::error!("{writes} writes to {name} may be lost, the next flush fails: {cause}");
            }
            Output::Geometry(_, geometry) => self.status.with(|known| known.geometry = Some(geometry)),
            Output::State(_, state) => tracing::debug!("{}: {state:?}", self.options.name),
            Output::Unmapped(..) => self.close_session(turn),
        }
    }

    fn done(&mut self, turn: &mut TurnCx<'_, ()>, owner: Owner, result: Result<(), Errno>, data: Option<Buffer>) {
        self.operations -= 1;
        match owner {
            Owner::Part(index, part) => {
                let mut result = result.map_err(io::Error::from);
                if let Some(transfer) = self.transfers.get_mut(index) {
                    let read = transfer.op() == BlockOp::Read && result.is_ok();
                    if let (true, Some(buffer), Some(session)) = (read, &data, self.session) {
                        let copied = self
                            .rnbd
                            .rtrs()
                            .buffers(session)
                            .map(|all| all.read(buffer, 0, transfer.bytes(part)));
                        if !matches!(copied, Some(Ok(()))) {
                            result = Err(Errno::EIO.into());
                        }
                    }
                    transfer.end(result);
                    self.look_over(index);
                }
            }
            Owner::LastFlush => {
                if let Err(errno) = result {
                    self.failed(OpenError::Flush(errno));
                }
                self.unmap(turn);
            }
        }
        self.give(data);
    }

    fn give(&mut self, data: Option<Buffer>) {
        if let (Some(buffer), Some(session)) = (data, self.session) {
            self.rnbd.rtrs_mut().give_buffer(session, buffer);
        }
    }

    /// Reports a transfer of which nothing is left to do.
    fn look_over(&mut self, index: usize) {
        if self.transfers.get(index).is_some_and(Transfer::is_over) {
            self.waiting.retain(|waiting| *waiting != index);
            self.transfers.remove(index).finish(&mut self.results);
        }
    }

    /// Runs the machines until they have nothing more to do.
    fn pass_on(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        let mut worked = false;
        loop {
            let mut more = self.rnbd.turn(cx!(self, turn));
            while let Some(output) = self.rnbd.poll_output() {
                more = true;
                self.output(turn, output);
            }
            if !more {
                return worked;
            }
            worked = true;
        }
    }
}

/// Operations.
impl DiskService {
    /// Begins parts of transfers as long as there are buffers.
    fn begin_parts(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        let mut worked = false;
        while let Some(index) = self.waiting.front().copied() {
            match self.begin_part(turn, index) {
                Begun::More => worked = true,
                Begun::All => {
                    worked = true;
                    self.waiting.pop_front();
                    self.look_over(index);
                }
                // One comes back with the end of a part in flight.
                Begun::NoBuffer => break,
            }
        }
        worked
    }

    fn begin_part(&mut self, turn: &mut TurnCx<'_, ()>, index: usize) -> Begun {
        let most = self
            .status
            .geometry()
            .map_or(0, |geometry| geometry.max_transfer as usize);
        let Some(transfer) = self.transfers.get_mut(index) else {
            return Begun::All;
        };
        let (Some(session), Some(opener)) = (self.session, &self.opener) else {
            transfer.fail(Errno::ENOTCONN.into());
            return Begun::All;
        };
        let (op, (offset, len)) = (transfer.op(), transfer.range());
        if !op.has_data() {
            transfer.begin(&(0..0));
            self.operations += 1;
            let request = BlockRequest::new(Owner::Part(index, 0..0), op, offset, len);
            self.rnbd.submit(opener, request);
            return Begun::All;
        }
        let Some(part) = transfer.next_part(most) else {
            return Begun::All;
        };
        let buffer = match self.rnbd.rtrs_mut().take_buffer(cx!(self, turn), session, part.len()) {
            Ok(buffer) => buffer,
            Err(Error::NoBuffer { .. }) if self.operations > 0 => return Begun::NoBuffer,
            Err(e) => {
                transfer.fail(Errno::from_wire(e.errno()).into());
                return Begun::All;
            }
        };
        if op != BlockOp::Read {
            let bytes = transfer.bytes(part.clone());
            let written = self
                .rnbd
                .rtrs()
                .buffers(session)
                .map(|all| all.write(&buffer, 0, bytes));
            if !matches!(written, Some(Ok(()))) {
                transfer.fail(Errno::EIO.into());
                self.give(Some(buffer));
                return Begun::All;
            }
        }
        transfer.begin(&part);
        let (at, bytes) = (offset + part.start as u64, part.len() as u64);
        self.operations += 1;
        let request = BlockRequest::new(Owner::Part(index, part), op, at, bytes).with_data(Some(buffer));
        self.rnbd.submit(opener, request);
        Begun::More
    }
}

/// How far a transfer has begun.
enum Begun {
    /// There may be another part.
    More,
    /// It has no part left that could begin.
    All,
    /// All buffers are in use.
    NoBuffer,
}

impl Service for DiskService {
    type Command = Command;
    type Output = ();

    fn command(&mut self, turn: &mut TurnCx<'_, ()>, command: Command) {
        match command {
            Command::Do(request, reply) => self.submit(request, reply),
            Command::Close(reply) => self.close(turn, reply),
        }
    }

    fn completions(&mut self, turn: &mut TurnCx<'_, ()>, completions: &[(QpId, Completion)]) {
        for (qp, wc) in completions {
            self.rnbd.rtrs_mut().completion(cx!(self, turn), *qp, wc);
        }
    }

    fn event(&mut self, turn: &mut TurnCx<'_, ()>, event: Event) {
        self.rnbd.rtrs_mut().event(cx!(self, turn), &event);
    }

    fn timeout(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.rnbd.rtrs_mut().timeout(cx!(self, turn));
        self.rnbd.timeout(turn.now);
        if self.deadline.is_some_and(|at| at <= turn.now) {
            self.deadline = None;
            if !matches!(self.phase, Phase::Closing | Phase::Ended) {
                self.failed(OpenError::Flush(Errno::ETIMEDOUT));
                self.close_session(turn);
            }
        }
    }

    fn work(&mut self, turn: &mut TurnCx<'_, ()>) -> bool {
        let mut worked = self.pass_on(turn);
        worked |= self.begin_parts(turn);
        worked |= self.pass_on(turn);
        self.look_drained(turn);
        worked
    }

    fn end(&mut self, turn: &mut TurnCx<'_, ()>) {
        self.rnbd.rtrs_mut().end_batch(cx!(self, turn));
        self.pass_on(turn);
        self.look_drained(turn);
        self.rnbd.rtrs_mut().end_batch(cx!(self, turn));
    }

    fn sent(&mut self, _: &mut TurnCx<'_, ()>) -> bool {
        // Buffers may have come back at the end of the turn.
        !self.waiting.is_empty() && self.operations == 0
    }

    fn next_timeout(&self) -> Option<Instant> {
        let times = [self.rnbd.rtrs().next_timeout(), self.rnbd.next_timeout(), self.deadline];
        times.into_iter().flatten().min()
    }
}
