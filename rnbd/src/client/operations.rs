//! Operations that no request of RTRS has: those that can be sent, and those that wait.

use std::collections::{BTreeMap, VecDeque};

use roce_verbs::Instant;
use rtrs::{
    Cx, IoError,
    client::{buffers::Buffer, config::ConType, request::Submission},
};
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use super::{
    device::{Admission, Device, Fate},
    loss_policy::{RETRY, Timer},
    memory::{self, SessionBuffers},
    operation::{Kind, Operation, Prepared, Request, Sent},
    state::DeviceKey,
    status,
    transport::Transport,
};
use crate::{
    errno::Errno,
    proto::{MsgIo, SECTOR},
    slab::Slab,
};

/// An operation with a part to be sent.
#[derive(Debug)]
enum Ready<F> {
    Whole(Box<Operation<F>>),
    /// It has parts in flight.
    Split(u64),
}

/// All operations of a client but those that lie in [requests](Request) of RTRS.
#[derive(Debug)]
pub(super) struct Operations<F> {
    /// Number of the last operation.
    last: u64,
    /// Operations of which a part can be sent, one after the other.
    ready: VecDeque<Ready<F>>,
    /// Operations of which a part could be sent if there were a buffer.
    starved: VecDeque<Box<Operation<F>>>,
    /// Operations that have several requests in flight, by their numbers.
    split: BTreeMap<u64, Box<Operation<F>>>,
    /// Operations that wait for their device, in the order of submission.
    held: BTreeMap<u64, Box<Operation<F>>>,
    /// Time of the next attempt for those whose device does not seem to be lost.
    pub(super) retry: Timer,
    /// Operations that have ended.
    ended: VecDeque<Box<Operation<F>>>,
}

impl<F> Default for Operations<F> {
    fn default() -> Self {
        Self {
            last: 0,
            ready: VecDeque::new(),
            starved: VecDeque::new(),
            split: BTreeMap::new(),
            held: BTreeMap::new(),
            retry: Timer::Off,
            ended: VecDeque::new(),
        }
    }
}

impl<F> Operations<F> {
    /// The number of the next operation.
    pub(super) fn next_number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The next operation that has ended.
    pub(super) fn poll_ended(&mut self) -> Option<Box<Operation<F>>> {
        self.ended.pop_front()
    }

    /// Puts an operation where it stays until something can be done for it. Its device outlives it.
    pub(super) fn place(&mut self, mut operation: Box<Operation<F>>) {
        if operation.span.over().is_some() {
            self.ended.push_back(operation);
        } else if operation.span.parts() > 0 {
            let ready = operation.wants_turn() && !operation.waits;
            if ready && !core::mem::replace(&mut operation.queued, true) {
                self.ready.push_back(Ready::Split(operation.number));
            }
            self.split.insert(operation.number, operation);
        } else if operation.waits {
            self.held.insert(operation.number, operation);
        } else {
            self.ready.push_back(Ready::Whole(operation));
        }
    }

    /// Sends as many requests as there are buffers for. Returns whether any operation went on.
    pub(super) fn send<T: Transport<F>>(&mut self, cx: &mut Cx<'_>, rtrs: &mut T, devices: &mut Slab<Device>) -> bool {
        // Those that find no buffer below need not look again.
        let mut starved = self.starved.len();
        let mut worked = false;
        loop {
            let ready = self.ready.pop_front().or_else(|| {
                starved = starved.checked_sub(1)?;
                self.starved.pop_front().map(Ready::Whole)
            });
            let operation = match ready {
                Some(Ready::Whole(operation)) => Some(operation),
                Some(Ready::Split(number)) => self.split.remove(&number),
                None => return worked,
            };
            let Some(mut operation) = operation else { continue };
            operation.queued = false;
            let Some(device) = devices.get_mut(operation.device.0) else {
                // A device outlives its operations. One without must end: placed again, it would be ready at once.
                operation.waits = false;
                operation.span.fail(Errno::ESHUTDOWN);
                self.place(operation);
                worked = true;
                continue;
            };
            // A part may have ended since: the device may be lost without our knowing yet.
            if operation.wants_turn() && !operation.waits {
                worked |= self.send_next(cx, rtrs, device, operation);
            } else {
                self.place(operation);
                worked = true;
            }
        }
    }

    /// Sends the next part of an operation: with the operation, if it has no other. `false`: it waits for a buffer.
    fn send_next<T: Transport<F>>(
        &mut self,
        cx: &mut Cx<'_>,
        rtrs: &mut T,
        device: &mut Device,
        mut operation: Box<Operation<F>>,
    ) -> bool {
        let session = device.session;
        let prepared = match device.admits(&mut operation) {
            Admission::Now(_) if status::is_status(&operation) && !device.answers_status => {
                status::answer_unasked(&mut operation);
                self.place(operation);
                return true;
            }
            Admission::Now(id) => prepare(cx, rtrs, &mut operation, device, id),
            Admission::Later => {
                self.hold(rtrs, device, &mut operation);
                self.place(operation);
                return true;
            }
            Admission::Never(e) => {
                device.counters.count_unsent();
                Err(e)
            }
        };
        match prepared {
            Ok(Some((sent, header, data))) => {
                device.in_flight += 1;
                let con = ConType::Io(operation.request.hint);
                let kind = if operation.span.parts() == 1 && !operation.wants_turn() {
                    Kind::Whole(operation, sent)
                } else {
                    let number = operation.number;
                    self.place(operation);
                    Kind::Part(number, sent)
                };
                let request = Submission {
                    tag: Request(kind),
                    con,
                    direction: sent.direction(),
                    header,
                    data,
                };
                rtrs.submit(cx, session, request);
                true
            }
            // A part in flight brings a buffer back.
            Ok(None) if operation.span.parts() > 0 => {
                self.split.insert(operation.number, operation);
                false
            }
            Ok(None) => {
                self.starved.push_back(operation);
                false
            }
            Err(e) => {
                operation.span.fail(e);
                operation.give_spare(rtrs, session);
                self.place(operation);
                true
            }
        }
    }

    /// An operation has to wait for its device.
    fn hold(&mut self, memory: &mut dyn SessionBuffers, device: &Device, operation: &mut Operation<F>) {
        // Opening the device again needs buffers, too.
        operation.give_all_spare(memory, device.session);
        operation.waits = true;
        if self.retry == Timer::Off {
            self.retry = Timer::Set(RETRY);
        }
    }

    /// The operation of a request that has ended.
    pub(super) fn of_part(&mut self, number: u64) -> Option<Box<Operation<F>>> {
        self.split.remove(&number)
    }

    /// Handles the answer to a part of an operation. True: it says that the server has [closed](Fate::Closed) the device.
    pub(super) fn part_done(
        &mut self,
        memory: &mut dyn SessionBuffers,
        device: &mut Device,
        mut operation: Box<Operation<F>>,
        sent: Sent,
        (result, data): (Result<(), IoError>, Option<Buffer>),
    ) -> bool {
        let session = device.session;
        device.in_flight = device.in_flight.saturating_sub(1);
        let refused = matches!(result, Err(IoError::Remote(_)));
        let mut fate = device.fate(&sent, result);
        let mut moved = Ok(());
        if status::is_status(&operation) {
            fate = status::ended(memory, &mut operation, device, &sent, fate, refused, data);
        } else if operation.request.op.has_data() {
            moved = operation.take_back(memory, session, data, sent.part);
        } else {
            operation.spare.extend(data);
        }
        match fate {
            Fate::Over(result) => {
                let result = result.and(moved);
                if result.is_ok() {
                    device.part_succeeded(&sent, &mut operation);
                }
                device.counters.count(sent.op, sent.part.1 as u32, result);
                operation.span.ended(result);
            }
            Fate::Smaller | Fate::Again | Fate::Closed => {
                device.counters.repeated += 1;
                operation.span.lost(sent.part);
            }
        }
        operation.give_spare(memory, session);
        let closed = fate == Fate::Closed;
        if closed || fate == Fate::Again || operation.waits {
            // Its device may be back already.
            let is_back = device.is_other_than(operation.opened) && operation.span.parts() == 0;
            match is_back || operation.span.over().is_some() {
                true => operation.waits = false,
                false => self.hold(memory, device, &mut operation),
            }
        }
        self.place(operation);
        closed
    }

    /// A device is back: operations that wait for it precede new ones.
    pub(super) fn resume(&mut self, device: DeviceKey) {
        // An operation with a part in flight goes on when that has ended.
        for mut operation in self.take_held(device).into_iter().rev() {
            operation.waits = false;
            self.ready.push_front(Ready::Whole(operation));
        }
    }

    /// Fails the operations that wait for a device.
    pub(super) fn fail_held(&mut self, device: DeviceKey, e: Errno) {
        let split = self.split.values_mut();
        for operation in split.filter(|operation| operation.device == device && operation.waits) {
            operation.waits = false;
            operation.span.fail(e);
        }
        for mut operation in self.take_held(device) {
            operation.span.fail(e);
            self.place(operation);
        }
    }

    /// Takes the operations out that wait for a device, in their order.
    fn take_held(&mut self, device: DeviceKey) -> Vec<Box<Operation<F>>> {
        let held = self.held.iter().filter(|(_, operation)| operation.device == device);
        let numbers: Vec<u64> = held.map(|(number, _)| *number).collect();
        numbers.iter().filter_map(|number| self.held.remove(number)).collect()
    }

    /// Number of operations that wait for a device.
    pub(super) fn waiting(&self, device: DeviceKey) -> usize {
        let all = self.held.values().chain(self.split.values());
        all.filter(|operation| operation.device == device && operation.waits)
            .count()
    }

    /// When [`retry`](Self::retry) is due.
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.retry.at()
    }

    /// Whether anything waits.
    pub(super) fn holds(&self) -> bool {
        !self.held.is_empty() || self.split.values().any(|operation| operation.waits)
    }
}

/// Makes the request for the next part of an operation, on the server's device `id`. `None`: a buffer has to come back first.
///
/// # Errors
/// The memory's errors; EINVAL for lent memory that is in too many pieces.
fn prepare<F>(
    cx: &mut Cx<'_>,
    memory: &mut dyn SessionBuffers,
    operation: &mut Operation<F>,
    device: &mut Device,
    id: u32,
) -> Result<Option<Prepared>, Errno> {
    if status::is_status(operation) {
        return status::prepare(cx, memory, operation, device, id);
    }
    let op = operation.request.op;
    let mut step = device.step(op);
    let mut data = None;
    if operation.is_lent() {
        let block = device.geometry.map_or(0, |g| g.logical_block_size as usize);
        let buffer = operation.lent_part(step, block)?;
        step = buffer.len() as u64;
        data = Some(buffer);
    } else if operation.zeroes {
        let Some(buffer) = zeroes(cx, memory, operation, device, step)? else {
            return Ok(None);
        };
        step = step.min(buffer.len() as u64);
        data = Some(buffer);
    } else if let Some(buffer) = operation.request.data.take() {
        data = Some(buffer);
    }
    let part = operation.span.take(step);
    let prepared = match data.as_mut() {
        Some(buffer) if operation.zeroes => {
            buffer.set_len(part.1 as usize);
            Ok(())
        }
        Some(buffer) => operation.prepare(memory, device.session, buffer, part),
        None => Ok(()),
    };
    if let Err(e) = prepared {
        operation.request.data = operation.request.data.take().or(data);
        operation.span.ended(Err(e));
        return Err(e);
    }
    let rw = device.rw(op);
    let message = MsgIo::new(id, rw, part.0 / SECTOR, part.1 as u32);
    let sent = Sent {
        op: rw.op,
        part,
        opened: device.opened,
        covers: device.losses.flush_begins(),
    };
    Ok(Some((sent, SmallVec::from_slice(message.as_bytes()), data)))
}

/// A buffer of zeroes for a part of at most `step` bytes.
fn zeroes<F>(
    cx: &mut Cx<'_>,
    memory: &mut dyn SessionBuffers,
    operation: &mut Operation<F>,
    device: &Device,
    step: u64,
) -> Result<Option<Buffer>, Errno> {
    if let Some(buffer) = operation.spare.pop() {
        return Ok(Some(buffer));
    }
    let want = step.min(operation.span.left()) as usize;
    let least = device.geometry.map_or(0, |g| g.logical_block_size as usize);
    memory::of_zeroes(cx, memory, device.session, want, least)
}
