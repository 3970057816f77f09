//! Operations under way: whose turn it is to send a part, and who waits for a buffer.

use std::collections::VecDeque;

use rtrs::{
    Direction,
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
    flight::Flight,
    memory::{self, SessionBuffers},
    operation::Operation,
};
use crate::{
    errno::Errno,
    proto::{IoOp, MsgIo, SECTOR},
    slab::Slab,
};

/// What became of an operation's turn.
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
        let device = devices.get_mut(operation.device.0);
        let Some(device) = device.filter(|_| operation.wants_turn()) else {
            return Turn::Nothing;
        };
        let Some(id) = device.id.filter(|_| device.opened == operation.opened) else {
            device.counters.count_unsent();
            return self.give_up(memory, device.session, key, Errno::ECONNABORTED);
        };
        let mut data = operation.data.take();
        let mut step = device.step(operation.op);
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
                Err(e) => return self.give_up(memory, device.session, key, e),
            }
        }
        let (offset, len) = operation.span.take(step);
        if let Some(buffer) = data.as_mut().filter(|_| operation.zeroes) {
            buffer.set_len(len as usize);
        }
        let rw = device.rw(operation.op);
        let (session, hint, bytes) = (device.session, operation.hint, len as u32);
        if operation.wants_turn() {
            operation.queued = true;
            self.ready.push_back(key);
        }
        let flight = Flight::Part {
            operation: key,
            op: rw.op,
            bytes,
        };
        let message = MsgIo::new(id, rw, offset / SECTOR, bytes);
        let submission = Submission {
            tag: flights.insert(flight),
            con: ConType::Io(hint),
            // The kernel's client sends a flush as a read without data.
            direction: match rw.op {
                IoOp::Read | IoOp::Flush => Direction::Read,
                _ => Direction::Write,
            },
            header: SmallVec::from_slice(message.as_bytes()),
            data,
        };
        Turn::Send(session, submission)
    }

    fn give_up(&mut self, memory: &mut dyn SessionBuffers, session: SessionId, key: u64, e: Errno) -> Turn {
        if let Some(operation) = self.operations.get_mut(key) {
            operation.span.fail(e);
            operation.give_spare(memory, session);
        }
        self.proceed(key);
        Turn::Nothing
    }

    /// A part of an operation has ended: which, with what, and of how many bytes on the device.
    pub(super) fn part_done(
        &mut self,
        memory: &mut dyn SessionBuffers,
        devices: &mut Slab<Device>,
        (key, op, bytes): (u64, IoOp, u32),
        result: Result<(), Errno>,
        data: Option<Buffer>,
    ) {
        // Both are there as long as there are parts.
        let Some(operation) = self.operations.get_mut(key) else {
            return;
        };
        let Some(device) = devices.get_mut(operation.device.0) else {
            return;
        };
        device.counters.count(op, bytes, result);
        operation.span.ended(result);
        if operation.zeroes {
            operation.spare.extend(data);
            operation.give_spare(memory, device.session);
        } else {
            operation.data = data;
        }
        self.proceed(key);
    }
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
