//! Queue pairs, and their work requests that have not completed.

use std::{collections::VecDeque, io, sync::Arc};

use roce_verbs::{
    AccessFlags, Completion, DeviceLimits, Payload, QpCaps, QpState, Qpn, RKey, RecvWr, SendFlags, SendOp, SendWr,
    WcStatus, legal,
    provider::{ConnParams, QpId, QpSpec, VerbsError},
    wr::PostError,
};

use crate::{
    advice,
    device::{Device, Pd},
    sys::{self, Bind, CmId, Mw, Reads, RecvList, SendList},
};

/// Rights of peers through a queue pair; regions and windows limit them further.
const REMOTE: AccessFlags = AccessFlags::REMOTE_WRITE.union(AccessFlags::REMOTE_READ);

/// Bit of a receive in the `wr_id` that the device has: a completion with an error does not say what it is of.
const RECV: u64 = 1 << 63;
/// Position of the queue pair in it. The generation in its number tells it from a former one, which may have completions in the queue.
const QP_SHIFT: u32 = 31;
const SEQUENCE_MASK: u64 = (1 << QP_SHIFT) - 1;

/// Returns the queue pair of a work request by the `wr_id` that the device has.
pub(crate) fn qp_of(wr_id: u64) -> QpId {
    QpId((wr_id >> QP_SHIFT) as u32)
}

/// Work requests of one queue that have not completed, as far as is known.
///
/// A send that makes no completion is known to be done when a later one completes.
#[derive(Debug)]
struct Queue {
    /// `wr_id` of the users.
    wr_ids: VecDeque<u64>,
    /// Sequence number of the first.
    first: u64,
    max: usize,
}

impl Queue {
    fn new(max: u32) -> Self {
        Self {
            wr_ids: VecDeque::new(),
            first: 0,
            max: max as usize,
        }
    }

    /// Adds a work request, although the queue is full. Returns its sequence number.
    fn push(&mut self, wr_id: u64) -> u64 {
        self.wr_ids.push_back(wr_id);
        (self.first + self.wr_ids.len() as u64 - 1) & SEQUENCE_MASK
    }

    fn room(&self) -> usize {
        self.max.saturating_sub(self.wr_ids.len())
    }

    /// Removes the last ones: they were not accepted.
    fn unpush(&mut self, count: usize) {
        self.wr_ids.truncate(self.wr_ids.len().saturating_sub(count));
    }

    /// Removes one that has completed, and those before it. Returns its `wr_id`.
    fn complete(&mut self, sequence: u64) -> Option<u64> {
        let index = sequence.wrapping_sub(self.first) & SEQUENCE_MASK;
        let wr_id = *self.wr_ids.get(index as usize)?;
        self.wr_ids.drain(..=index as usize);
        self.first += index + 1;
        Some(wr_id)
    }

    /// Removes all.
    fn take_all(&mut self) -> impl Iterator<Item = u64> + '_ {
        self.first += self.wr_ids.len() as u64;
        self.wr_ids.drain(..)
    }
}

/// Progress of a drain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Draining {
    No,
    /// Until both queues are empty.
    Pending,
    Done,
}

/// Queue pair.
pub(crate) struct Qp {
    device: usize,
    /// `None` if the device is gone and the queue pair was drained.
    raw: Option<sys::Qp>,
    id: QpId,
    qpn: Qpn,
    state: QpState,
    caps: QpCaps,
    /// Rights of peers.
    access: AccessFlags,
    /// READs and atomics that the device can answer and send at a time.
    reads: Reads,
    send: Queue,
    recv: Queue,
    draining: Draining,
    /// Sequence number of the send that was posted to drain the queue: behind all others.
    last: Option<u64>,
    /// The peer used a key, address or right that it does not have.
    violated: bool,
}

/// Returns the library's error for a work request as ours.
fn post_error(e: &io::Error) -> PostError {
    match e.raw_os_error() {
        Some(libc::ENOMEM) => PostError::QueueFull,
        _ => PostError::Invalid("the device refuses the work request"),
    }
}

/// Returns an error of verbs for arguments and sizes as ours.
fn create_error(what: &str, e: io::Error) -> VerbsError {
    match e.raw_os_error() {
        Some(libc::EINVAL) => VerbsError::Invalid(format!(
            "{what}: the device refuses: a size is beyond its limits, perhaps"
        )),
        Some(libc::ENOSPC) => VerbsError::Limit("objects of the device"),
        _ => advice::failed(what.to_owned(), e),
    }
}

impl Qp {
    /// Creates a queue pair, in INIT.
    pub(crate) fn create(
        pd: &Pd,
        cq: &Arc<sys::Cq>,
        device: &Device,
        limits: &DeviceLimits,
        spec: &QpSpec,
        id: QpId,
    ) -> Result<Self, VerbsError> {
        let (most, caps) = (limits.max_qp_wr, spec.caps);
        if caps.max_send_wr > most || caps.max_recv_wr > most {
            return Err(VerbsError::Limit("work requests of a queue pair"));
        }
        if caps.max_send_sge.max(caps.max_recv_sge) > limits.max_sge {
            return Err(VerbsError::Limit("scatter/gather elements of a work request"));
        }
        if caps.max_inline_data > limits.max_inline_data {
            return Err(VerbsError::Limit("inline data of a work request"));
        }
        // One more for the send that drains.
        let max_send_wr = (caps.max_send_wr + 1).min(most);
        let asked = QpCaps { max_send_wr, ..caps };
        let raw = sys::Qp::create(&pd.raw, cq, &asked, spec.signal_all, id.0.into());
        let raw = raw.map_err(|e| create_error("making a queue pair", e))?;
        let access = match device.atomics {
            true => REMOTE | AccessFlags::REMOTE_ATOMIC,
            false => REMOTE,
        };
        let ready = raw.init(access);
        ready.map_err(|e| create_error("making a queue pair ready for receives", e))?;
        Ok(Self {
            device: pd.device,
            qpn: Qpn::new(raw.number()),
            raw: Some(raw),
            id,
            state: QpState::Init,
            send: Queue::new(max_send_wr - 1),
            recv: Queue::new(caps.max_recv_wr),
            caps,
            access,
            reads: Reads {
                answered: limits.max_qp_rd_atom,
                sent: limits.max_qp_init_rd_atom,
            },
            draining: Draining::No,
            last: None,
            violated: false,
        })
    }

    pub(crate) fn device(&self) -> usize {
        self.device
    }

    pub(crate) fn qpn(&self) -> Qpn {
        self.qpn
    }

    pub(crate) fn state(&self) -> QpState {
        self.state
    }

    pub(crate) fn reads(&self) -> Reads {
        self.reads
    }

    pub(crate) fn is_violated(&self) -> bool {
        self.violated
    }

    pub(crate) fn set_violated(&mut self) {
        self.violated = true;
    }

    /// Returns an error unless it can send, or flush.
    pub(crate) fn check_sends(&self) -> Result<&sys::Qp, PostError> {
        let sends = matches!(self.state, QpState::Rts | QpState::Err) && self.draining == Draining::No;
        let raw = self.raw.as_ref().filter(|_| sends);
        raw.ok_or(PostError::State(self.state))
    }

    /// Adds a send to the queue, although it is full. Returns the `wr_id` for the device.
    fn push_send(&mut self, wr_id: u64) -> u64 {
        u64::from(self.id.0) << QP_SHIFT | self.send.push(wr_id)
    }

    fn add_send(&mut self, list: &mut SendList, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.check_send(wr)?;
        let id = self.push_send(wr.wr_id);
        list.push(wr, id).inspect_err(|_| self.send.unpush(1))
    }

    fn check_send(&self, wr: &SendWr<'_>) -> Result<(), PostError> {
        if self.send.room() == 0 {
            return Err(PostError::QueueFull);
        }
        match wr.payload {
            Payload::Sges(sges) => check_sges(sges.len(), self.caps.max_send_sge),
            Payload::Inline(bytes) => {
                let (given, max) = (bytes.len(), self.caps.max_inline_data as usize);
                if given > max {
                    return Err(PostError::InlineTooLong { given, max });
                }
                match legal::operation(wr.op.code()).inline {
                    true => Ok(()),
                    false => Err(PostError::Invalid("this operation takes no inline data")),
                }
            }
        }
    }

    fn add_recv(&mut self, list: &mut RecvList, wr: &RecvWr<'_>) -> Result<(), PostError> {
        check_sges(wr.sges.len(), self.caps.max_recv_sge)?;
        if self.recv.room() == 0 {
            return Err(PostError::QueueFull);
        }
        let id = RECV | u64::from(self.id.0) << QP_SHIFT | self.recv.push(wr.wr_id);
        list.push(wr, id);
        Ok(())
    }

    /// Posts a list whose sends are in the queue.
    fn post_list(&mut self, list: &mut SendList) -> Result<(), (usize, PostError)> {
        let Some(raw) = &self.raw else { return Ok(()) };
        raw.post(list).map_err(|(accepted, e)| {
            self.send.unpush(list.len() - accepted);
            (accepted, post_error(&e))
        })
    }

    pub(crate) fn post_send(&mut self, list: &mut SendList, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        self.check_sends().map_err(|e| (0, e))?;
        list.clear();
        let added = wrs.iter().try_for_each(|wr| self.add_send(list, wr));
        self.post_list(list)?;
        added.map_err(|e| (list.len(), e))
    }

    pub(crate) fn post_recv(&mut self, list: &mut RecvList, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        if self.draining != Draining::No || self.raw.is_none() {
            return Err((0, PostError::State(QpState::Err)));
        }
        list.clear();
        let added = wrs.iter().try_for_each(|wr| self.add_recv(list, wr));
        let posted = self.raw.as_ref().map_or(Ok(()), |raw| raw.post(list));
        posted.map_err(|(accepted, e)| {
            self.recv.unpush(list.len() - accepted);
            (accepted, post_error(&e))
        })?;
        added.map_err(|e| (list.len(), e))
    }

    /// Posts a type 1 window's binding, which closes what it opened before.
    pub(crate) fn post_bind_1(&mut self, mw: &mut Mw, bind: &Bind<'_>, wr_id: u64) -> Result<(), PostError> {
        if self.send.room() == 0 {
            return Err(PostError::QueueFull);
        }
        let id = self.push_send(wr_id);
        let posted = self.check_sends()?.post_bind_1(id, mw, bind);
        posted.map_err(|e| {
            self.send.unpush(1);
            post_error(&e)
        })
    }

    /// Posts a type 2 window's binding under a key, after closing the key under which it is open: it may be bound only when it is closed.
    /// Returns of a refusal whether it was closed.
    pub(crate) fn post_bind_2(
        &mut self,
        list: &mut SendList,
        (mw, open, key): (&mut Mw, Option<RKey>, RKey),
        bind: &Bind<'_>,
        wr_id: u64,
    ) -> Result<(), (bool, PostError)> {
        if self.send.room() < 1 + usize::from(open.is_some()) {
            return Err((false, PostError::QueueFull));
        }
        list.clear();
        if let Some(open) = open {
            let id = self.push_send(wr_id);
            let closed = list.push(&local_invalidate(open, wr_id, SendFlags::empty()), id);
            closed.map_err(|e| (false, e))?;
        }
        let id = self.push_send(wr_id);
        list.push_bind(id, mw, key, bind);
        self.post_list(list).map_err(|(accepted, e)| (accepted > 0, e))?;
        mw.set_rkey(key);
        Ok(())
    }

    /// Processes a completion of it, and replaces its `wr_id` by the user's. Returns whether it is the user's.
    pub(crate) fn complete(&mut self, wc: &mut Completion) -> bool {
        let (is_receive, sequence) = (wc.wr_id & RECV != 0, wc.wr_id & SEQUENCE_MASK);
        let queue = if is_receive { &mut self.recv } else { &mut self.send };
        let Some(wr_id) = queue.complete(sequence) else {
            return false;
        };
        if !is_receive && self.last == Some(sequence) {
            return false;
        }
        wc.wr_id = wr_id;
        if !wc.is_ok() && wc.status != WcStatus::FlushError {
            // The device has moved it.
            self.state = QpState::Err;
        }
        // Some drivers report a refused access by the receive that it has taken, and not by an event.
        self.violated |= is_receive && matches!(wc.status, WcStatus::LocalAccessError | WcStatus::RemoteAccessError);
        true
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining == Draining::Pending
    }

    /// Finishes a drain if nothing is outstanding. Returns whether it has.
    pub(crate) fn finish_drain(&mut self) -> bool {
        let now = self.is_draining() && self.send.wr_ids.is_empty() && self.recv.wr_ids.is_empty();
        if now {
            self.draining = Draining::Done;
        }
        now
    }

    /// Moves it to error. Returns whether it is there.
    pub(crate) fn fail(&mut self) -> bool {
        let Some(raw) = &self.raw else { return true };
        if self.state != QpState::Err {
            match raw.fail() {
                Ok(()) => self.state = QpState::Err,
                Err(e) => tracing::debug!(qpn = %self.qpn, "a queue pair could not be moved to error: {e}"),
            }
        }
        self.state == QpState::Err
    }

    /// Moves it to error, so that everything outstanding completes. Returns whether the device will complete it.
    pub(crate) fn drain(&mut self, is_gone: bool, list: &mut SendList) -> bool {
        if self.draining != Draining::No {
            return true;
        }
        self.draining = Draining::Pending;
        !is_gone && self.fail() && (self.send.wr_ids.is_empty() || self.post_last(list))
    }

    /// Posts the work request that completes after all others. Returns whether that was done.
    fn post_last(&mut self, list: &mut SendList) -> bool {
        let wr = SendWr {
            wr_id: 0,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&[]),
        };
        list.clear();
        let id = self.push_send(0);
        let posted = list.push(&wr, id).map_err(|e| (0, e));
        match posted.and_then(|()| self.post_list(list)) {
            Ok(()) => self.last = Some(id & SEQUENCE_MASK),
            Err((_, e)) => {
                tracing::warn!(qpn = %self.qpn, "the send that shows that a queue is drained was refused: {e}");
            }
        }
        self.last.is_some()
    }

    /// Destroys it, and returns the `wr_id` of what was outstanding, which nothing will complete.
    pub(crate) fn abandon(&mut self) -> Vec<u64> {
        self.raw = None;
        self.state = QpState::Err;
        self.draining = Draining::Done;
        if self.last.take().is_some() {
            self.send.unpush(1);
        }
        let sends: Vec<u64> = self.send.take_all().collect();
        sends.into_iter().chain(self.recv.take_all()).collect()
    }

    /// Brings it to RTS with what the connection manager knows. `tos`: of our packets, if it is not that of the path.
    pub(crate) fn bring_up(&mut self, cm: &CmId, params: &ConnParams, reads: Reads, tos: Option<u8>) -> io::Result<()> {
        let raw = self.raw.as_ref().ok_or(io::ErrorKind::NotFound)?;
        raw.bring_up(cm, self.access, reads, params.min_rnr_timer, tos)?;
        self.state = QpState::Rts;
        Ok(())
    }
}

fn check_sges(given: usize, max: u32) -> Result<(), PostError> {
    let max = max as usize;
    match given > max {
        true => Err(PostError::TooManySges { given, max }),
        false => Ok(()),
    }
}

pub(crate) fn local_invalidate(key: RKey, wr_id: u64, flags: SendFlags) -> SendWr<'static> {
    SendWr {
        wr_id,
        op: SendOp::LocalInvalidate(key),
        flags,
        payload: Payload::Sges(&[]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_is_one_of_those_before_too() {
        let mut queue = Queue::new(3);
        let numbers: Vec<u64> = [7, 8, 9].into_iter().map(|wr_id| queue.push(wr_id)).collect();
        assert_eq!(numbers, [0, 1, 2]);
        assert_eq!(queue.room(), 0);
        assert_eq!(queue.complete(1), Some(8));
        assert_eq!(queue.complete(0), None, "it was done already");
        assert_eq!(queue.push(5), 3);
        queue.unpush(1);
        assert_eq!(queue.push(6), 3, "the number of one that was refused is the next one's");
        assert_eq!(queue.take_all().collect::<Vec<_>>(), [9, 6]);
        assert_eq!(queue.room(), 3);
        assert_eq!((queue.complete(3), queue.push(1)), (None, 4));
    }

    #[test]
    fn sequence_numbers_begin_again() {
        let mut queue = Queue::new(3);
        queue.first = SEQUENCE_MASK;
        assert_eq!([queue.push(7), queue.push(8), queue.push(9)], [SEQUENCE_MASK, 0, 1]);
        assert_eq!((queue.complete(0), queue.complete(1)), (Some(8), Some(9)));
    }

    #[test]
    fn the_number_of_a_queue_pair_is_in_its_work_requests() {
        let id = QpId(0xfff1_2345);
        let wr_id = u64::from(id.0) << QP_SHIFT | 17;
        assert_eq!((qp_of(wr_id), qp_of(RECV | wr_id)), (id, id));
        assert_eq!(wr_id & SEQUENCE_MASK, 17);
    }
}
