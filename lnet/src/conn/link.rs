//! Queue pair of a connection, and what is posted.

use roce_verbs::{
    AccessFlags, Completion, Payload, RemoteAddr, SendFlags, SendOp, SendWr, Sge, WcStatus,
    messages::{MessageDone, MessageQp, MessageSpec},
    provider::{CmRef, DeviceIx, MrId, MrInfo, PdId, Provider, QpId, Registration, VerbsError},
};

use crate::{
    buffer::Buffer,
    credits::{OUT_OF_BAND, receives},
    proto::{MAX_FRAGS, MAX_MSG},
};

/// WRITE of a part of a local buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Write {
    pub(crate) local: Sge,
    pub(crate) remote: RemoteAddr,
}

/// Connection of the connection manager, with its queue pair once the device is known.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) cm: CmRef,
    /// Messages each way.
    depth: u16,
    messages: Option<MessageQp>,
    /// Work requests that may be posted; posted since the beginning, and completed of these.
    ring: u32,
    posted: u64,
    completed: u64,
    /// Messages posted since the beginning.
    sent: u32,
    /// Registrations of users' memory.
    registered: Vec<MrId>,
}

impl Link {
    /// Returns a link without a queue pair.
    pub(crate) fn new(cm: CmRef, depth: u16) -> Self {
        Self {
            cm,
            depth,
            messages: None,
            ring: 0,
            posted: 0,
            completed: 0,
            sent: 0,
            registered: Vec::new(),
        }
    }

    /// Messages that may be on their way.
    fn slots(&self) -> u32 {
        u32::from(self.depth + OUT_OF_BAND)
    }

    /// Creates the queue pair and posts all receives.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn create(
        &mut self,
        provider: &mut dyn Provider,
        (device, pd): (DeviceIx, PdId),
    ) -> Result<QpId, VerbsError> {
        let (slots, recvs) = (self.slots(), receives(self.depth));
        let most = provider.devices()[usize::from(device.0)].limits.max_qp_wr;
        if most < recvs.max(slots + MAX_FRAGS) {
            return Err(VerbsError::Limit("work requests of a queue pair"));
        }
        self.ring = most.min(slots + 2 * MAX_FRAGS);
        let spec = MessageSpec {
            pd,
            device,
            len: MAX_MSG,
            sends: slots,
            recvs,
            max_send_wr: self.ring,
            max_send_sge: 1,
        };
        let messages = self.messages.insert(MessageQp::create(provider, &spec)?);
        messages.post_receives(provider)?;
        Ok(messages.qp())
    }

    /// Destroys all that it has; nothing of it is under way.
    pub(crate) fn destroy(self, provider: &mut dyn Provider) {
        for mr in self.registered {
            provider.deregister(mr);
        }
        if let Some(messages) = self.messages {
            messages.destroy(provider);
        }
        provider.cm_destroy(self.cm);
    }

    /// Queue pair, once there is one.
    pub(crate) fn qp(&self) -> Option<QpId> {
        self.messages.as_ref().map(MessageQp::qp)
    }

    /// Returns whether a message with so many WRITEs before it may be posted while `in_flight` messages are on their way.
    pub(crate) fn has_room(&self, in_flight: usize, writes: usize) -> bool {
        let free = u64::from(self.ring) - (self.posted - self.completed);
        in_flight < self.slots() as usize && (writes as u64) < free
    }

    /// Registers a user's memory for the time of a transfer, for the peer to write if `is_sink`.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn register(
        &mut self,
        provider: &mut dyn Provider,
        buffer: &Buffer,
        is_sink: bool,
    ) -> Result<MrInfo, VerbsError> {
        let pd = self.messages.as_ref().ok_or(VerbsError::Closed)?.pd();
        let (memory, offset) = buffer.place();
        let access = match is_sink {
            true => AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
            false => AccessFlags::empty(),
        };
        let what = Registration {
            memory: memory.clone(),
            offset,
            len: buffer.len(),
            iova: None,
            access,
        };
        let mr = provider.register(pd, &what)?;
        self.registered.push(mr.id);
        Ok(mr)
    }

    /// A transfer is over: from here on the peer can't get at the memory.
    pub(crate) fn release(&mut self, provider: &mut dyn Provider, mr: MrId) {
        if let Some(at) = self.registered.iter().position(|of| *of == mr) {
            self.registered.swap_remove(at);
            provider.deregister(mr);
        }
    }

    /// Posts WRITEs, none of which is signaled, and a message behind them.
    ///
    /// # Errors
    /// The device's, or the message is longer than any.
    pub(crate) fn post(
        &mut self,
        provider: &mut dyn Provider,
        writes: &[Write],
        message: &[u8],
    ) -> Result<(), VerbsError> {
        let messages = self.messages.as_ref().ok_or(VerbsError::Closed)?;
        let too_long = || VerbsError::Invalid("a message of more than 4096 bytes".into());
        let own = messages.write(self.sent, &[message]).ok_or_else(too_long)?;
        self.sent = (self.sent + 1) % self.slots();
        let first = self.posted + 1;
        self.posted += writes.len() as u64 + 1;
        let ops = writes
            .iter()
            .map(|write| (SendOp::Write(write.remote), &write.local, SendFlags::empty()));
        let ops = ops.chain([(SendOp::Send, &own, SendFlags::SIGNALED)]);
        let wr = |(wr_id, (op, sge, flags))| SendWr {
            wr_id,
            op,
            flags,
            payload: Payload::Sges(core::slice::from_ref(sge)),
        };
        let wrs: Vec<SendWr<'_>> = (first..).zip(ops).map(wr).collect();
        provider.post_send(messages.qp(), &wrs).map_err(|(_, e)| e.into())
    }

    /// Understands a completion.
    ///
    /// # Errors
    /// The work request failed, and with it the link.
    pub(crate) fn completed(&mut self, wc: &Completion) -> Result<MessageDone, WcStatus> {
        if !wc.is_ok() {
            return Err(wc.status);
        }
        let done = MessageQp::done(wc);
        if let MessageDone::Sent(number) = done {
            self.completed = number;
        }
        Ok(done)
    }

    /// Takes a message out of its buffer, which is to be posted again.
    pub(crate) fn take(&mut self, buffer: u32, len: usize) -> Vec<u8> {
        let mut message = vec![0; len.min(MAX_MSG)];
        if let Some(messages) = &mut self.messages {
            if !messages.read(buffer, &mut message) {
                message.clear();
            }
            messages.give_back(buffer);
        }
        message
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
