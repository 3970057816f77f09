//! Queue pair of a connection, with its memory and what is posted.

use core::ops::Range;

use roce_verbs::{
    Completion, Payload, SendFlags, SendOp, SendWr, Sge, WcStatus,
    messages::{MessageDone, MessageQp, MessageSpec},
    provider::{CmRef, DeviceIx, PdId, Provider, QpId, VerbsError},
};

use super::{
    broken::Broken,
    operation::{Ended, Operations, Prepared},
    queue::NextFragment,
};
use crate::{
    config::Rings,
    counters::Counters,
    key::PairKey,
    proto::{Header, MAX_SEND},
};

/// Number of a link.
pub(crate) type LinkId = usize;

/// Work requests after which one is signaled.
const SIGNAL_EACH: u64 = 16;
/// Bytes of operations whose local memory is copied, at a time.
const MAX_STAGED: usize = 4 << 20;
/// Local elements of a work request, unless the device has fewer. The kernel has as many.
const MAX_SGES: u32 = 8;

/// Connection of the connection manager, with its queue pair once the device is known.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) key: PairKey,
    pub(crate) cm: CmRef,
    rings: Rings,
    messages: Option<MessageQp>,
    /// Work requests of fragments and operations that were posted, and of these completed, since the beginning.
    posted: u64,
    completed: u64,
    /// Operations that were posted.
    pub(crate) operations: Operations,
    /// Work request that has failed, and how.
    failed: Option<(u64, WcStatus)>,
    /// Nothing of it counts any more; it goes once it is drained.
    pub(crate) is_closing: bool,
}

impl Link {
    /// Returns a link without a queue pair.
    pub(crate) fn new(key: PairKey, cm: CmRef, rings: Rings) -> Self {
        Self {
            key,
            cm,
            rings,
            messages: None,
            posted: 0,
            completed: 0,
            operations: Operations::default(),
            failed: None,
            is_closing: false,
        }
    }

    /// Creates the queue pair and posts the receives.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn create(
        &mut self,
        provider: &mut dyn Provider,
        (device, pd): (DeviceIx, PdId),
    ) -> Result<QpId, VerbsError> {
        let limits = &provider.devices()[usize::from(device.0)].limits;
        let (most, sges) = (
            limits.max_qp_wr,
            MAX_SGES.min(limits.max_sge).min(limits.max_sge_rd).max(1),
        );
        (self.rings.send, self.rings.recv) = (self.rings.send.min(most), self.rings.recv.min(most));
        let spec = MessageSpec {
            pd,
            device,
            len: MAX_SEND,
            sends: self.rings.send,
            recvs: self.rings.recv,
            max_send_wr: self.rings.send,
            max_send_sge: sges,
        };
        let messages = self.messages.insert(MessageQp::create(provider, &spec)?);
        messages.post_receives(provider)?;
        Ok(messages.qp())
    }

    /// Destroys all that it has.
    pub(crate) fn destroy(self, provider: &mut dyn Provider) {
        if let Some(messages) = self.messages {
            messages.destroy(provider);
        }
        self.operations.free(provider);
        provider.cm_destroy(self.cm);
    }

    /// Queue pair, once there is one.
    pub(crate) fn qp(&self) -> Option<QpId> {
        self.messages.as_ref().map(MessageQp::qp)
    }

    /// Work requests that may be posted now.
    pub(crate) fn room(&self) -> usize {
        (u64::from(self.rings.send) - (self.posted - self.completed)) as usize
    }

    /// Understands a completion.
    ///
    /// # Errors
    /// The work request failed, and with it the link.
    pub(crate) fn completed(&mut self, wc: &Completion) -> Result<MessageDone, Broken> {
        if !wc.is_ok() {
            self.failed = Some((wc.wr_id, wc.status));
            return Err(Broken::Completion(wc.status));
        }
        let done = MessageQp::done(wc);
        if let MessageDone::Sent(number) = done {
            self.completed = number;
        }
        Ok(done)
    }

    /// Returns the operations that have ended well since it was asked last.
    pub(crate) fn ended(&mut self, provider: &mut dyn Provider) -> Vec<Ended> {
        self.operations.completed(self.completed, provider)
    }

    /// Returns its operations, which end with it.
    pub(crate) fn fail(&mut self) -> Vec<Ended> {
        self.operations.failed(self.failed)
    }

    /// Copies what has come out of its buffer.
    pub(crate) fn read(&self, buffer: u32, out: &mut [u8]) -> bool {
        let messages = self.messages.as_ref();
        messages.is_some_and(|messages| messages.read(buffer, out))
    }

    /// A receive buffer is free again.
    pub(crate) fn give_back(&mut self, buffer: u32) {
        if let Some(messages) = &mut self.messages {
            messages.give_back(buffer);
        }
    }

    /// Counts what is to be posted for the peer's messages.
    pub(crate) fn count_receives(&self, counters: &mut Counters) {
        let free = self.messages.as_ref().map_or(0, MessageQp::unposted);
        counters.ib_rx_refill_from_cq += u64::from(free > 0);
        counters.ib_rx_ring_empty += u64::from(free == self.rings.recv as usize);
    }

    /// Posts the receive buffers that are free.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn post_receives(&mut self, provider: &mut dyn Provider) -> Result<(), VerbsError> {
        match &mut self.messages {
            Some(messages) => messages.post_receives(provider),
            None => Ok(()),
        }
    }
}

/// Work request of a train.
#[derive(Debug)]
struct Car {
    op: SendOp,
    flags: SendFlags,
    /// Its elements among the train's.
    sges: Range<usize>,
}

/// Work requests of a turn, to be posted at once.
#[derive(Debug)]
pub(crate) struct Train<'a> {
    link: &'a mut Link,
    cars: Vec<Car>,
    sges: Vec<Sge>,
}

impl<'a> Train<'a> {
    /// Returns an empty train.
    pub(crate) fn new(link: &'a mut Link) -> Self {
        Self {
            link,
            cars: Vec::new(),
            sges: Vec::new(),
        }
    }

    /// Work requests for which there is room.
    pub(crate) fn room(&self) -> usize {
        self.link.room() - self.cars.len()
    }

    /// Returns whether there are none, and none of earlier turns are under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.is_empty() && self.link.posted == self.link.completed
    }

    /// Returns whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.cars.is_empty()
    }

    /// Number of the next work request, from 1.
    fn next_number(&self) -> u64 {
        self.link.posted + self.cars.len() as u64 + 1
    }

    /// Copies a header and data into a free buffer. `is_last`: they end their message, and the kernel looks at what has come (its receive
    /// queue is armed for solicited events only).
    ///
    /// # Errors
    /// Without a buffer, or without memory.
    pub(crate) fn push(&mut self, header: &Header, data: &[u8], is_last: bool) -> Result<(), Broken> {
        use zerocopy::IntoBytes as _;
        let messages = self.link.messages.as_ref().filter(|_| self.room() > 0);
        let buffer = (self.next_number() % u64::from(self.link.rings.send)) as u32;
        let written = messages.and_then(|messages| messages.write(buffer, &[header.as_bytes(), data]));
        let sge = written.ok_or(Broken::Memory)?;
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SOLICITED, is_last);
        self.add(SendOp::Send, flags, &[sge]);
        Ok(())
    }

    /// Copies a fragment of a message, as [`push`](Self::push).
    ///
    /// # Errors
    /// As [`push`](Self::push).
    pub(crate) fn push_fragment(&mut self, next: &NextFragment<'_>) -> Result<(), Broken> {
        self.push(&next.header, next.data, next.is_last)?;
        if next.is_fenced
            && let Some(car) = self.cars.last_mut()
        {
            car.flags |= SendFlags::FENCE;
        }
        if next.has_operation && next.is_last {
            self.end_operation();
        }
        Ok(())
    }

    /// Returns whether an operation can begin, or go on. If not it can when others have ended.
    pub(crate) fn has_room_for(&self, operation: &Prepared, from: usize) -> bool {
        let staged = self.link.operations.staged();
        from > 0 || staged == 0 || staged + operation.staged() <= MAX_STAGED
    }

    /// Adds a work request of an operation, which begins with it if `from` is 0. Returns how many pieces it has.
    ///
    /// # Errors
    /// The operation's memory can't be registered.
    pub(crate) fn push_operation(
        &mut self,
        provider: &mut dyn Provider,
        operation: &mut Prepared,
        from: usize,
    ) -> Result<usize, VerbsError> {
        let gone = || VerbsError::State("no queue pair".into());
        let (pd, most) = self
            .link
            .messages
            .as_ref()
            .map(|messages| (messages.pd(), messages.max_send_sge() as usize))
            .ok_or_else(gone)?;
        let number = self.next_number();
        if from == 0 {
            let posted = operation.begin(provider, pd, number)?;
            self.link.operations.push(posted);
        }
        let posted = self.link.operations.current().ok_or_else(gone)?;
        let end = operation.pieces().min(from + most);
        let (op, sges) = operation.request(posted, from..end);
        posted.own.end = number + 1;
        self.add(op, SendFlags::empty(), &sges);
        Ok(end - from)
    }

    /// Ends the operation that was added last, and its message, with the work request that was added last.
    pub(crate) fn end_operation(&mut self) {
        let last = self.next_number() - 1;
        if let Some(posted) = self.link.operations.current() {
            posted.last = Some(last);
        }
    }

    fn add(&mut self, op: SendOp, flags: SendFlags, sges: &[Sge]) {
        let first = self.sges.len();
        self.sges.extend_from_slice(sges);
        let sges = first..self.sges.len();
        self.cars.push(Car { op, flags, sges });
    }

    /// Posts them.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn post(self, provider: &mut dyn Provider) -> Result<(), VerbsError> {
        let Self { link, cars, sges } = self;
        let Some(messages) = &link.messages else { return Ok(()) };
        let (first, last) = (link.posted + 1, link.posted + cars.len() as u64);
        let wr = |(wr_id, car): (u64, &Car)| {
            // Of the last one the completion says that all before it have gone.
            let mut flags = car.flags;
            flags.set(SendFlags::SIGNALED, wr_id % SIGNAL_EACH == 0 || wr_id == last);
            SendWr {
                wr_id,
                op: car.op,
                flags,
                payload: Payload::Sges(&sges[car.sges.clone()]),
            }
        };
        let wrs: Vec<SendWr<'_>> = (first..).zip(&cars).map(wr).collect();
        link.posted = last;
        provider.post_send(messages.qp(), &wrs).map_err(|(_, e)| e.into())
    }
}
