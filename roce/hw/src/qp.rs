//! Queue pairs: what of theirs is under way.

use std::collections::VecDeque;

use roce_verbs::{
    AccessFlags, Completion, Payload, QpCaps, QpState, Qpn, SendFlags, SendOp, SendWr, WcStatus,
    provider::{Event, QpId, QpSpec, VerbsError},
    wr::PostError,
};

use crate::{
    advice,
    device::{Device, FULL, HwDevice, gone},
    sys::{self, Attributes, State},
};

/// What peers may do by a queue pair; regions and windows say what they may do where.
pub(crate) const REMOTE: AccessFlags = AccessFlags::REMOTE_WRITE.union(AccessFlags::REMOTE_READ);

/// In a work request's mark as the device has it: it is a receive's, since a completion with an error does not say what it is of.
const RECV: u64 = 1 << 63;
/// Where the queue pair's tag is: a number that is used again may have completions of before in the queue.
const TAG_SHIFT: u32 = 48;
const TAG_MASK: u16 = 0x7fff;
const SEQ_MASK: u64 = (1 << TAG_SHIFT) - 1;

/// The work requests of one queue that have not completed, as far as is known.
///
/// A send that makes no completion is known to be over when one behind it completes.
#[derive(Debug)]
pub(crate) struct Queue {
    /// Their users' marks.
    marks: VecDeque<u64>,
    /// The number of the first.
    first: u64,
    max: usize,
}

impl Queue {
    fn new(max: u32) -> Self {
        Self {
            marks: VecDeque::new(),
            first: 0,
            max: max as usize,
        }
    }

    /// The number of the next one.
    pub(crate) fn push(&mut self, mark: u64) -> u64 {
        self.marks.push_back(mark);
        self.first + self.marks.len() as u64 - 1
    }

    pub(crate) fn is_full(&self) -> bool {
        self.marks.len() >= self.max
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.marks.is_empty()
    }

    /// Forgets the last ones: they were not accepted.
    pub(crate) fn unpush(&mut self, count: usize) {
        self.marks.truncate(self.marks.len().saturating_sub(count));
    }

    /// One has completed, and with it those before. Its mark.
    fn complete(&mut self, number: u64) -> Option<u64> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        let mark = *self.marks.get(index)?;
        self.marks.drain(..=index);
        self.first = number + 1;
        Some(mark)
    }

    /// Takes out all marks.
    fn take(&mut self) -> impl Iterator<Item = u64> + '_ {
        self.first += self.marks.len() as u64;
        self.marks.drain(..)
    }
}

/// How far a drain is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Drain {
    No,
    /// Until both queues are empty.
    Waiting,
    Over,
}

pub(crate) struct Qp {
    pub(crate) device: usize,
    /// Gone when the device is and the queue pair was drained.
    pub(crate) raw: Option<sys::Qp>,
    pub(crate) qpn: Qpn,
    tag: u16,
    pub(crate) state: QpState,
    pub(crate) caps: QpCaps,
    pub(crate) send: Queue,
    pub(crate) recv: Queue,
    pub(crate) drain: Drain,
    /// The send that was posted to drain the queue: behind all others.
    last: Option<u64>,
    /// The peer used a key, address or right that it does not have.
    pub(crate) violated: bool,
}

/// Whose completion it is.
pub(crate) enum Completed {
    /// The user's, with this mark.
    Mark(u64),
    /// Ours.
    Own,
    /// Nobody's: of a queue pair that is gone.
    Nobody,
}

impl Qp {
    /// The mark that the device gets.
    pub(crate) fn send_id(&self, number: u64) -> u64 {
        u64::from(self.tag) << TAG_SHIFT | number & SEQ_MASK
    }

    pub(crate) fn recv_id(&self, number: u64) -> u64 {
        RECV | self.send_id(number)
    }

    /// Something has completed.
    pub(crate) fn completed(&mut self, id: u64) -> Completed {
        let (tag, number) = ((id >> TAG_SHIFT) as u16 & TAG_MASK, id & SEQ_MASK);
        if tag != self.tag {
            return Completed::Nobody;
        }
        let queue = if id & RECV != 0 { &mut self.recv } else { &mut self.send };
        let mark = queue.complete(number);
        match mark {
            Some(_) if id & RECV == 0 && self.last == Some(number) => Completed::Own,
            Some(mark) => Completed::Mark(mark),
            None => Completed::Nobody,
        }
    }

    /// Whether a mark is that of a receive.
    pub(crate) const fn is_receive(&self, id: u64) -> bool {
        id & RECV != 0
    }

    /// Whether it is drained now, and was not before.
    pub(crate) fn is_drained_now(&mut self) -> bool {
        let now = self.drain == Drain::Waiting && self.send.is_empty() && self.recv.is_empty();
        if now {
            self.drain = Drain::Over;
        }
        now
    }

    /// Moves it to error. Whether that was done.
    pub(crate) fn fail(&mut self) -> bool {
        let Some(raw) = &self.raw else { return true };
        if self.state == QpState::Err {
            return true;
        }
        let done = raw.modify(&mut Attributes::of(State::Err));
        match done {
            Ok(()) => self.state = QpState::Err,
            Err(e) => tracing::debug!(qpn = %self.qpn, "a queue pair could not be moved to error: {e}"),
        }
        self.state == QpState::Err
    }

    /// Posts the work request that completes after all others. Whether that was done.
    fn post_last(&mut self, list: &mut sys::SendList) -> bool {
        let number = self.send.push(0);
        let wr = SendWr {
            wr_id: 0,
            op: SendOp::Send,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&[]),
        };
        list.clear();
        let posted = match (&self.raw, list.push(&wr, self.send_id(number))) {
            (Some(raw), Ok(())) => raw.post_send(list).map_err(|(_, e)| e),
            _ => return false,
        };
        if let Err(e) = &posted {
            tracing::warn!(qpn = %self.qpn, "the send that shows that a queue is drained was refused: {e}");
            self.send.unpush(1);
            return false;
        }
        self.last = Some(number);
        true
    }

    /// Ends it. Marks of what was under way, which nothing will complete.
    fn abandon(&mut self) -> Vec<u64> {
        self.raw = None;
        self.state = QpState::Err;
        let own = self.last.take().is_some();
        let mut marks: Vec<u64> = self.send.take().collect();
        if own {
            // It was posted last.
            marks.pop();
        }
        marks.extend(self.recv.take());
        marks
    }
}

/// What verbs say of arguments and sizes that they refuse.
fn refused(what: &str, e: std::io::Error) -> VerbsError {
    match e.raw_os_error() {
        Some(libc::EINVAL) => VerbsError::Invalid(format!(
            "{what}: the device refuses: a size is beyond its limits, perhaps"
        )),
        Some(libc::ENOSPC) => VerbsError::Limit("objects of the device"),
        _ => advice::failed(what.to_owned(), e),
    }
}

impl HwDevice {
    pub(crate) fn make_qp(&mut self, spec: &QpSpec) -> Result<QpId, VerbsError> {
        let pd = self.pd(spec.pd)?;
        let device = pd.device;
        let cq = self.cqs.get(spec.cq).filter(|cq| cq.device == device);
        let cq = cq.ok_or_else(|| gone("completion queue of the device"))?;
        let limits = &self.caps[device].limits;
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
        let raw = sys::Qp::create(&pd.raw, &cq.raw, &asked, spec.signal_all);
        let raw = raw.map_err(|e| refused("making a queue pair", e))?;
        // The port may turn out to be another when the way is known.
        let access = access(&self.devices[device]);
        let ready = raw.modify(&mut Attributes::init(1, access));
        ready.map_err(|e| refused("making a queue pair ready for receives", e))?;
        self.made = self.made.wrapping_add(1) & TAG_MASK;
        let qp = Qp {
            device,
            qpn: Qpn::new(raw.number()),
            raw: Some(raw),
            tag: self.made,
            state: QpState::Init,
            send: Queue::new(max_send_wr - 1),
            recv: Queue::new(caps.max_recv_wr),
            caps,
            drain: Drain::No,
            last: None,
            violated: false,
        };
        let number = qp.qpn.value();
        let id = self.qps.insert(qp).ok_or(FULL)?;
        self.devices[device].qps.insert(number, id);
        Ok(id)
    }

    pub(crate) fn end_qp(&mut self, id: QpId) {
        self.close_keys_through(id);
        let Some(qp) = self.qps.remove(id) else { return };
        self.events.retain(|e| !matches!(e, Event::Drained(of) if *of == id));
        self.flushed.retain(|(of, _)| *of != id);
        self.devices[qp.device].qps.remove(&qp.qpn.value());
    }

    pub(crate) fn drain_qp(&mut self, id: QpId) {
        let Some(qp) = self.qps.get_mut(id).filter(|qp| qp.drain == Drain::No) else {
            return;
        };
        qp.drain = Drain::Waiting;
        let alive = !self.devices[qp.device].gone && qp.fail();
        if alive && (qp.send.is_empty() || qp.post_last(&mut self.sends)) {
            if qp.is_drained_now() {
                self.events.push_back(Event::Drained(id));
            }
            return;
        }
        self.abandon(id);
    }

    /// Gives back what a queue pair has under way, of which the device will tell nothing more: it is destroyed first, so that nothing
    /// of it is used any more.
    pub(crate) fn abandon(&mut self, id: QpId) {
        // What has completed is in the queues still.
        let mut polled = Vec::new();
        let _ = self.take_completions(&mut polled, usize::MAX);
        self.flushed.extend(polled);
        self.close_keys_through(id);
        let Some(qp) = self.qps.get_mut(id) else { return };
        let qpn = qp.qpn;
        let flushed = |wr_id| Completion {
            wr_id,
            status: WcStatus::FlushError,
            qpn,
            ..Completion::default()
        };
        let marks = qp.abandon();
        self.flushed.extend(marks.into_iter().map(|mark| (id, flushed(mark))));
        if self.qps.get_mut(id).is_some_and(Qp::is_drained_now) {
            self.events.push_back(Event::Drained(id));
        }
    }

    /// A queue pair that can send, or that flushes.
    ///
    /// # Errors
    /// Without such a queue pair.
    pub(crate) fn sender(&mut self, id: QpId) -> Result<(&mut Qp, &mut sys::SendList), PostError> {
        let qp = self.qps.get_mut(id).ok_or(PostError::NoQueuePair)?;
        let sends = matches!(qp.state, QpState::Rts | QpState::Err) && qp.drain == Drain::No && qp.raw.is_some();
        match sends {
            true => Ok((qp, &mut self.sends)),
            false => Err(PostError::State(qp.state)),
        }
    }
}

/// What peers may do by a queue pair of the device.
pub(crate) fn access(device: &Device) -> AccessFlags {
    match device.atomics {
        true => REMOTE | AccessFlags::REMOTE_ATOMIC,
        false => REMOTE,
    }
}

#[cfg(test)]
mod tests {
    use super::Queue;

    #[test]
    fn a_completion_is_one_of_those_before_too() {
        let mut queue = Queue::new(3);
        let numbers: Vec<u64> = [7, 8, 9].into_iter().map(|mark| queue.push(mark)).collect();
        assert_eq!(numbers, [0, 1, 2]);
        assert!(queue.is_full());
        assert_eq!(queue.complete(1), Some(8));
        assert_eq!(queue.complete(0), None, "it was over already");
        assert_eq!(queue.push(5), 3);
        queue.unpush(1);
        assert_eq!(queue.push(6), 3, "the number of one that was refused is the next one's");
        assert_eq!(queue.take().collect::<Vec<_>>(), [9, 6]);
        assert!(queue.is_empty());
        assert_eq!((queue.complete(3), queue.push(1)), (None, 4));
    }
}
