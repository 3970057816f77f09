//! Queue pairs: what of theirs is under way.

use std::collections::VecDeque;

use roce_local::{Completed, Drain};
use roce_verbs::{
    AccessFlags, Completion, DeviceLimits, Payload, QpCaps, QpState, Qpn, SendFlags, SendOp, SendWr, WcStatus,
    provider::{QpSpec, VerbsError},
    wr::PostError,
};

use crate::{
    advice,
    device::{Cq, Device, Pd},
    sys::{self, Attributes, SendList, State},
};

/// Rights of peers through a queue pair; regions and windows limit them further.
pub(crate) const REMOTE: AccessFlags = AccessFlags::REMOTE_WRITE.union(AccessFlags::REMOTE_READ);

/// In a work request's mark as the device has it: it is a receive's, since a completion with an error does not say what it is of.
const RECV: u64 = 1 << 63;
/// Position of the queue pair's tag: a QPN that is reused may have completions of its former queue pair in the queue.
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
    fn take_all(&mut self) -> impl Iterator<Item = u64> + '_ {
        self.first += self.marks.len() as u64;
        self.marks.drain(..)
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

pub(crate) struct Qp {
    pub(crate) device: usize,
    /// Gone when the device is and the queue pair was drained.
    pub(crate) raw: Option<sys::Qp>,
    pub(crate) qpn: Qpn,
    tag: u16,
    pub(crate) state: QpState,
    pub(crate) caps: QpCaps,
    /// Rights of peers.
    pub(crate) access: AccessFlags,
    /// READs and atomics that the device can answer and send at a time.
    pub(crate) reads: (u8, u8),
    pub(crate) send: Queue,
    pub(crate) recv: Queue,
    draining: Draining,
    /// The send that was posted to drain the queue: behind all others.
    last: Option<u64>,
}

impl Qp {
    /// The mark that the device gets.
    pub(crate) fn send_id(&self, number: u64) -> u64 {
        u64::from(self.tag) << TAG_SHIFT | number & SEQ_MASK
    }

    pub(crate) fn recv_id(&self, number: u64) -> u64 {
        RECV | self.send_id(number)
    }

    /// Takes the work request of a completion out of its queue. Returns its mark, if it is the user's.
    fn take(&mut self, id: u64) -> Option<u64> {
        let (tag, number) = ((id >> TAG_SHIFT) as u16 & TAG_MASK, id & SEQ_MASK);
        if tag != self.tag {
            return None;
        }
        let is_receive = id & RECV != 0;
        let queue = if is_receive { &mut self.recv } else { &mut self.send };
        let mark = queue.complete(number)?;
        (is_receive || self.last != Some(number)).then_some(mark)
    }

    /// Processes a completion, and replaces its mark by the user's.
    pub(crate) fn complete(&mut self, wc: &mut Completion) -> Completed {
        let is_receive = wc.wr_id & RECV != 0;
        let mark = self.take(wc.wr_id);
        let drained = self.is_drained_now();
        let Some(mark) = mark else {
            return Completed {
                drained,
                ..Completed::default()
            };
        };
        wc.wr_id = mark;
        if !wc.is_ok() && wc.status != WcStatus::FlushError {
            // The device has moved it.
            self.state = QpState::Err;
        }
        Completed {
            is_users: true,
            drained,
            // Some drivers report a refused access by the receive that it has taken, and not by an event.
            violated: is_receive && matches!(wc.status, WcStatus::LocalAccessError | WcStatus::RemoteAccessError),
        }
    }

    /// Returns whether receives may be posted.
    pub(crate) fn takes_receives(&self) -> bool {
        self.draining == Draining::No && self.raw.is_some()
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining == Draining::Pending
    }

    /// Returns whether it is drained now, and was not before.
    fn is_drained_now(&mut self) -> bool {
        let now = self.is_draining() && self.send.is_empty() && self.recv.is_empty();
        if now {
            self.draining = Draining::Done;
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
    fn post_last(&mut self, list: &mut SendList) -> bool {
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

    /// Moves it to error, so that everything outstanding completes.
    pub(crate) fn drain(&mut self, is_gone: bool, list: &mut SendList) -> Drain {
        if self.draining != Draining::No {
            return Drain::Pending;
        }
        self.draining = Draining::Pending;
        let alive = !is_gone && self.fail();
        if !alive || !self.send.is_empty() && !self.post_last(list) {
            return Drain::Dead;
        }
        match self.is_drained_now() {
            true => Drain::Done,
            false => Drain::Pending,
        }
    }

    /// Destroys it, and returns the marks of what was outstanding, which nothing will complete.
    pub(crate) fn abandon(&mut self) -> Vec<u64> {
        self.raw = None;
        self.state = QpState::Err;
        self.draining = Draining::Done;
        let own = self.last.take().is_some();
        let mut marks: Vec<u64> = self.send.take_all().collect();
        if own {
            // It was posted last.
            marks.pop();
        }
        marks.extend(self.recv.take_all());
        marks
    }
}

/// Returns an error of verbs for arguments and sizes as ours.
fn refused(what: &str, e: std::io::Error) -> VerbsError {
    match e.raw_os_error() {
        Some(libc::EINVAL) => VerbsError::Invalid(format!(
            "{what}: the device refuses: a size is beyond its limits, perhaps"
        )),
        Some(libc::ENOSPC) => VerbsError::Limit("objects of the device"),
        _ => advice::failed(what.to_owned(), e),
    }
}

impl Qp {
    /// Creates a queue pair, in INIT. `number` distinguishes its completions from those of one that had its QPN before.
    pub(crate) fn create(
        (pd, cq): (&Pd, &Cq),
        device: &Device,
        limits: &DeviceLimits,
        number: u16,
        spec: &QpSpec,
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
        let raw = sys::Qp::create(&pd.raw, &cq.raw, &asked, spec.signal_all);
        let raw = raw.map_err(|e| refused("making a queue pair", e))?;
        let access = match device.atomics {
            true => REMOTE | AccessFlags::REMOTE_ATOMIC,
            false => REMOTE,
        };
        // The port may turn out to be another when the route is known.
        let ready = raw.modify(&mut Attributes::init(1, access));
        ready.map_err(|e| refused("making a queue pair ready for receives", e))?;
        Ok(Self {
            device: pd.device,
            qpn: Qpn::new(raw.number()),
            raw: Some(raw),
            tag: number & TAG_MASK,
            state: QpState::Init,
            send: Queue::new(max_send_wr - 1),
            recv: Queue::new(caps.max_recv_wr),
            caps,
            access,
            reads: (limits.max_qp_rd_atom, limits.max_qp_init_rd_atom),
            draining: Draining::No,
            last: None,
        })
    }

    /// Returns an error unless it can send, or flush.
    pub(crate) fn check_sends(&self) -> Result<(), PostError> {
        let sends = matches!(self.state, QpState::Rts | QpState::Err);
        match sends && self.draining == Draining::No && self.raw.is_some() {
            true => Ok(()),
            false => Err(PostError::State(self.state)),
        }
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
        assert_eq!(queue.take_all().collect::<Vec<_>>(), [9, 6]);
        assert!(queue.is_empty());
        assert_eq!((queue.complete(3), queue.push(1)), (None, 4));
    }
}
