//! Operations under way: whose turn it is to send a part, and who waits for a buffer.

use std::collections::{BTreeSet, VecDeque};

use roce_verbs::Instant;
use rtrs::{
    Direction, IoError,
    client::{
        buffers::Buffer,
        config::ConType,
        request::{SessionId, Submission},
    },
    cx::Cx,
};
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use super::{
    device::Device,
    flight::{Admission, Fate, Flight, FlightPart},
    memory::{self, SessionBuffers},
    operation::{Operation, Part},
    output::DeviceKey,
    patience::{Alarm, RETRY},
    status,
};
use crate::{
    errno::Errno,
    proto::{IoOp, MsgIo, SECTOR},
    slab::Slab,
};

/// Outcome of an operation's turn.
#[derive(Debug)]
enum Turn {
    /// A part of it is to be sent.
    Send(SessionId, Submission),
    /// It waits for a buffer.
    Starved,
    /// There is nothing to do for it.
    Nothing,
}

/// All operations of a client.
#[derive(Debug, Default)]
pub(super) struct Work {
    operations: Slab<Operation>,
    /// Operations of which a part can be sent, in turns.
    ready: VecDeque<u64>,
    /// Operations of which a part could be sent if there were a buffer.
    starved: VecDeque<u64>,
    /// Operations that wait for their device, in the order in which they were begun.
    held: BTreeSet<u64>,
    /// When those are sent again whose device does not seem to be lost.
    retry: Alarm,
    /// Operations that have ended, and how.
    ended: VecDeque<(Operation, Result<(), Errno>)>,
}

impl Work {
    /// Begins with an operation, on a device that is there until [it has ended](Self::poll_ended).
    pub(super) fn add(&mut self, operation: Operation) {
        let key = self.operations.insert(operation);
        self.proceed(key);
    }

    /// The next operation that has ended, and how.
    pub(super) fn poll_ended(&mut self) -> Option<(Operation, Result<(), Errno>)> {
        self.ended.pop_front()
    }

    /// Goes on with an operation: it ends, or stands in a queue, or waits for parts that are under way.
    fn proceed(&mut self, key: u64) {
        let Some(operation) = self.operations.get_mut(key) else {
            return;
        };
        if let Some(result) = operation.span.over() {
            self.held.remove(&key);
            let ended = self.operations.remove(key);
            self.ended.extend(ended.map(|operation| (operation, result)));
        } else if operation.wants_turn() && !operation.queued {
            operation.queued = true;
            self.ready.push_back(key);
        }
    }

    /// The next request, which is kept as a flight. `None`: there is none, or there are no buffers.
    pub(super) fn poll(
        &mut self,
        cx: &mut Cx<'_>,
        memory: &mut dyn SessionBuffers,
        devices: &mut Slab<Device>,
        flights: &mut Slab<Flight>,
    ) -> Option<(SessionId, Submission)> {
        // Those that find no buffer below need not look again.
        let mut starved = self.starved.len();
        loop {
            let key = match self.ready.pop_front() {
                Some(key) => key,
                None if starved > 0 => {
                    starved -= 1;
                    self.starved.pop_front()?
                }
                None => return None,
            };
            match self.turn(cx, memory, devices, flights, key) {
                Turn::Send(session, submission) => return Some((session, submission)),
                Turn::Starved => self.starved.push_back(key),
                Turn::Nothing => {}
            }
        }
    }

    /// The next part of an operation, which has been taken out of its queue.
    fn turn(
        &mut self,
        cx: &mut Cx<'_>,
        memory: &mut dyn SessionBuffers,
        devices: &mut Slab<Device>,
        flights: &mut Slab<Flight>,
        key: u64,
    ) -> Turn {
        let Some(operation) = self.operations.get_mut(key) else {
            return Turn::Nothing;
        };
        operation.queued = false;
        if self.held.contains(&key) {
            // A part has come back since: the device may be lost without our knowing yet.
            return Turn::Nothing;
        }
        let device = devices.get_mut(operation.device.0);
        let Some(device) = device.filter(|_| operation.wants_turn()) else {
            return Turn::Nothing;
        };
        let session = device.session;
        let id = match device.admits(operation) {
            Admission::Now(id) => id,
            Admission::Later => return self.hold(memory, session, key),
            Admission::Never(e) => {
                device.counters.count_unsent();
                return self.give_up(memory, session, key, e);
            }
        };
        if status::is_status(operation) {
            return self.status_turn(cx, memory, device, flights, key, id);
        }
        let lent = operation.is_lent();
        let mut data = if lent { None } else { operation.data.take() };
        let mut step = device.step(operation.op);
        if lent {
            let block = device.geometry.map_or(0, |g| g.logical_block_size as usize);
            match operation.lent_part(step, block) {
                Ok(buffer) => {
                    step = buffer.len() as u64;
                    data = Some(buffer);
                }
                Err(e) => return self.give_up(memory, session, key, e),
            }
        }
        if operation.zeroes {
            match zeroes(cx, memory, operation, device, step) {
                Ok(Some(buffer)) => {
                    step = step.min(buffer.len() as u64);
                    data = Some(buffer);
                }
                // A part that is under way brings one back.
                Ok(None) if operation.span.parts() > 0 => return Turn::Nothing,
                Ok(None) => {
                    operation.queued = true;
                    return Turn::Starved;
                }
                Err(e) => return self.give_up(memory, session, key, e),
            }
        }
        let part = operation.span.take(step);
        let prepared = match data.as_mut() {
            Some(buffer) if operation.zeroes => {
                buffer.set_len(part.1 as usize);
                Ok(())
            }
            Some(buffer) => operation.prepare(memory, session, buffer, part),
            None => Ok(()),
        };
        if let Err(e) = prepared {
            operation.data = operation.data.take().or(data);
            operation.span.ended(Err(e));
            return self.give_up(memory, session, key, e);
        }
        let request = request(operation, device, id, part, data);
        if operation.wants_turn() {
            operation.queued = true;
            self.ready.push_back(key);
        }
        let flight = FlightPart {
            operation: key,
            op: request.op,
            part,
            opened: device.opened,
            covers: device.losses.flush_begins(),
        };
        Turn::Send(session, request.with_tag(flights.insert(Flight::Part(flight))))
    }

    /// The turn of a block status, on the server's device `id`.
    fn status_turn(
        &mut self,
        cx: &mut Cx<'_>,
        memory: &mut dyn SessionBuffers,
        device: &Device,
        flights: &mut Slab<Flight>,
        key: u64,
        id: u32,
    ) -> Turn {
        let Some(operation) = self.operations.get_mut(key) else {
            return Turn::Nothing;
        };
        if !device.answers_status {
            status::answer_unasked(operation);
            self.proceed(key);
            return Turn::Nothing;
        }
        match status::request(cx, memory, operation, device, id) {
            Ok(Some((part, submission))) => {
                let flight = FlightPart {
                    operation: key,
                    op: IoOp::BlockStatus,
                    part,
                    opened: device.opened,
                    covers: 0,
                };
                let tag = flights.insert(Flight::Part(flight));
                Turn::Send(device.session, Submission { tag, ..submission })
            }
            Ok(None) => {
                operation.queued = true;
                Turn::Starved
            }
            Err(e) => self.give_up(memory, device.session, key, e),
        }
    }

    fn give_up(&mut self, memory: &mut dyn SessionBuffers, session: SessionId, key: u64, e: Errno) -> Turn {
        if let Some(operation) = self.operations.get_mut(key) {
            operation.span.fail(e);
            operation.give_spare(memory, session);
        }
        self.proceed(key);
        Turn::Nothing
    }

    /// An operation waits for its device.
    fn hold(&mut self, memory: &mut dyn SessionBuffers, session: SessionId, key: u64) -> Turn {
        if let Some(operation) = self.operations.get_mut(key) {
            // Who opens the device again needs buffers, too.
            operation.give_all_spare(memory, session);
            self.held.insert(key);
            if self.retry == Alarm::Off {
                self.retry = Alarm::Set(RETRY);
            }
        }
        Turn::Nothing
    }

    /// Handles the answer to a part of an operation. True: it says that the server has [closed](Fate::Closed) the device.
    pub(super) fn part_done(
        &mut self,
        memory: &mut dyn SessionBuffers,
        devices: &mut Slab<Device>,
        flight: FlightPart,
        result: Result<(), IoError>,
        data: Option<Buffer>,
    ) -> bool {
        let key = flight.operation;
        // Both are there as long as there are parts.
        let Some(operation) = self.operations.get_mut(key) else {
            return false;
        };
        let Some(device) = devices.get_mut(operation.device.0) else {
            return false;
        };
        let session = device.session;
        let refused = matches!(result, Err(IoError::Remote(_)));
        let mut fate = device.fate(&flight, result);
        let mut moved = Ok(());
        if status::is_status(operation) {
            fate = status::ended(memory, operation, device, &flight, fate, refused, data);
        } else if operation.op.has_data() {
            moved = operation.take_back(memory, session, data, flight.part);
        } else {
            operation.spare.extend(data);
        }
        match fate {
            Fate::Over(result) => {
                let result = result.and(moved);
                if result.is_ok() {
                    device.part_succeeded(&flight, operation);
                }
                device.counters.count(flight.op, flight.part.1 as u32, result);
                operation.span.ended(result);
            }
            Fate::Smaller | Fate::Again | Fate::Closed => {
                device.counters.repeated += 1;
                operation.span.lost(flight.part);
            }
        }
        operation.give_spare(memory, session);
        let closed = fate == Fate::Closed;
        let waits = closed || fate == Fate::Again || self.held.contains(&key);
        // Its device may be back already.
        let is_back = device.is_other_than(operation.opened) && operation.span.parts() == 0;
        if !waits || is_back || operation.span.over().is_some() {
            self.held.remove(&key);
            self.proceed(key);
        } else {
            self.hold(memory, session, key);
        }
        closed
    }

    /// Whether requests to such devices are in flight.
    pub(super) fn in_flight(&self, to: impl Fn(DeviceKey) -> bool) -> bool {
        let mut all = self.operations.iter();
        all.any(|(_, operation)| operation.span.parts() > 0 && to(operation.device))
    }

    /// A device is back: what waits for it comes before what is begun now.
    pub(super) fn resume(&mut self, device: DeviceKey) {
        for key in self.held_of(device).into_iter().rev() {
            let Some(operation) = self.operations.get_mut(key) else {
                continue;
            };
            // A part that is still on its way back goes on with it when it is there.
            if operation.span.parts() == 0 {
                self.held.remove(&key);
                if !core::mem::replace(&mut operation.queued, true) {
                    self.ready.push_front(key);
                }
            }
        }
    }

    /// Fails the operations that wait for a device.
    pub(super) fn fail_held(&mut self, device: DeviceKey, e: Errno) {
        for key in self.held_of(device) {
            self.held.remove(&key);
            if let Some(operation) = self.operations.get_mut(key) {
                operation.span.fail(e);
            }
            self.proceed(key);
        }
    }

    /// Operations that wait for a device.
    pub(super) fn held_of(&self, device: DeviceKey) -> Vec<u64> {
        let of = |key: &&u64| self.operations.get(**key).is_some_and(|o| o.device == device);
        self.held.iter().filter(of).copied().collect()
    }

    /// When what waits is looked at again: a path can be lost without the device.
    pub(super) fn alarm(&mut self) -> &mut Alarm {
        &mut self.retry
    }

    /// When the alarm rings.
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        self.retry.at()
    }

    /// Whether anything waits.
    pub(super) fn holds(&self) -> bool {
        !self.held.is_empty()
    }
}

/// A request that has no name yet.
struct Request {
    op: IoOp,
    submission: Submission,
}

impl Request {
    fn with_tag(self, tag: u64) -> Submission {
        Submission { tag, ..self.submission }
    }
}

/// The request for a part of an operation, on the server's device `id`.
fn request(operation: &Operation, device: &Device, id: u32, (offset, len): Part, data: Option<Buffer>) -> Request {
    let rw = device.rw(operation.op);
    let message = MsgIo::new(id, rw, offset / SECTOR, len as u32);
    let submission = Submission {
        tag: 0,
        con: ConType::Io(operation.hint),
        // The kernel's client sends a flush as a read without data.
        direction: match rw.op {
            IoOp::Read | IoOp::Flush => Direction::Read,
            _ => Direction::Write,
        },
        header: SmallVec::from_slice(message.as_bytes()),
        data,
    };
    Request { op: rw.op, submission }
}

/// A buffer of zeroes for a part of at most `step` bytes.
fn zeroes(
    cx: &mut Cx<'_>,
    memory: &mut dyn SessionBuffers,
    operation: &mut Operation,
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
