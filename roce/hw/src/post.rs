//! Posting and completing.

use std::io;

use roce_verbs::{
    Completion, Instant, Payload, QpState, Qpn, RKey, RecvWr, SendOp, SendWr, WcFlags, WcOpcode, WcStatus,
    provider::{Event, QpId, VerbsError},
    wr::PostError,
};

use crate::{
    device::HwDevice,
    qp::{Completed, Drain, Qp},
    sys::{Polled, RecvList, SendList},
};

/// What the library says of a work request that it does not take.
pub(crate) fn refused(e: &io::Error) -> PostError {
    match e.raw_os_error() {
        Some(libc::ENOMEM) => PostError::QueueFull,
        _ => PostError::Invalid("the device refuses the work request"),
    }
}

fn check_send(qp: &Qp, wr: &SendWr<'_>) -> Result<(), PostError> {
    if qp.send.is_full() {
        return Err(PostError::QueueFull);
    }
    match wr.payload {
        Payload::Sges(sges) => {
            let (given, max) = (sges.len(), qp.caps.max_send_sge as usize);
            if given > max {
                return Err(PostError::TooManySges { given, max });
            }
        }
        Payload::Inline(bytes) => {
            let (given, max) = (bytes.len(), qp.caps.max_inline_data as usize);
            if given > max {
                return Err(PostError::InlineTooLong { given, max });
            }
            let taken = matches!(
                wr.op,
                SendOp::Send
                    | SendOp::SendWithImm(_)
                    | SendOp::SendWithInv(_)
                    | SendOp::Write(_)
                    | SendOp::WriteWithImm(..)
            );
            if !taken {
                return Err(PostError::Invalid("this operation takes no inline data"));
            }
        }
    }
    Ok(())
}

/// Adds a work request to a list, and to what is under way.
fn add_send(qp: &mut Qp, list: &mut SendList, wr: &SendWr<'_>) -> Result<(), PostError> {
    check_send(qp, wr)?;
    let number = qp.send.push(wr.wr_id);
    let id = qp.send_id(number);
    list.push(wr, id).inspect_err(|_| qp.send.unpush(1))
}

fn add_recv(qp: &mut Qp, list: &mut RecvList, wr: &RecvWr<'_>) -> Result<(), PostError> {
    let (given, max) = (wr.sges.len(), qp.caps.max_recv_sge as usize);
    if given > max {
        return Err(PostError::TooManySges { given, max });
    }
    if qp.recv.is_full() {
        return Err(PostError::QueueFull);
    }
    let number = qp.recv.push(wr.wr_id);
    list.push(wr, qp.recv_id(number));
    Ok(())
}

fn status(code: u32) -> WcStatus {
    use WcStatus as S;
    const ALL: [S; 22] = [
        S::Success,
        S::LocalLengthError,
        S::LocalQpOperationError,
        S::LocalEecOperationError,
        S::LocalProtectionError,
        S::FlushError,
        S::MwBindError,
        S::BadResponseError,
        S::LocalAccessError,
        S::RemoteInvalidRequestError,
        S::RemoteAccessError,
        S::RemoteOperationError,
        S::RetryExceeded,
        S::RnrRetryExceeded,
        S::LocalRddViolation,
        S::RemoteInvalidRdRequest,
        S::RemoteAborted,
        S::InvalidEecn,
        S::InvalidEecState,
        S::FatalError,
        S::ResponseTimeout,
        S::GeneralError,
    ];
    ALL.get(code as usize).copied().unwrap_or(S::GeneralError)
}

fn opcode(code: u32) -> WcOpcode {
    use WcOpcode as O;
    const ALL: [O; 11] = [
        O::Send,
        O::RdmaWrite,
        O::RdmaRead,
        O::CompareSwap,
        O::FetchAdd,
        O::BindWindow,
        O::LocalInvalidate,
        O::Flush,
        O::AtomicWrite,
        O::Recv,
        O::RecvRdmaWithImm,
    ];
    ALL.into_iter().find(|o| *o as u32 == code).unwrap_or_default()
}

fn completion(wc: &Polled, wr_id: u64) -> Completion {
    let flags = WcFlags::from_bits_truncate(wc.flags);
    let with = |flag| if flags.contains(flag) { wc.extra } else { 0 };
    Completion {
        wr_id,
        status: status(wc.status),
        opcode: opcode(wc.opcode),
        vendor_err: wc.vendor_err,
        byte_len: wc.byte_len,
        imm: u32::from_be(with(WcFlags::WITH_IMM)),
        invalidated: RKey(with(WcFlags::WITH_INV)),
        qpn: Qpn::new(wc.qp_num),
        src_qp: Qpn::new(wc.src_qp),
        pkey_index: wc.pkey_index,
        sl: wc.sl,
        timestamp: Instant::ZERO,
        flags,
        solicited: false,
    }
}

impl HwDevice {
    pub(crate) fn send(&mut self, id: QpId, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        let (qp, list) = self.sender(id).map_err(|e| (0, e))?;
        list.clear();
        let added = wrs.iter().try_for_each(|wr| add_send(qp, list, wr));
        let (count, raw) = (list.len(), qp.raw.as_ref());
        let posted = raw.map_or(Ok(()), |raw| raw.post_send(list));
        if let Err((accepted, e)) = posted {
            qp.send.unpush(count - accepted);
            return Err((accepted, refused(&e)));
        }
        added.map_err(|e| (count, e))
    }

    pub(crate) fn receive(&mut self, id: QpId, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        let qp = self.qps.get_mut(id).ok_or((0, PostError::NoQueuePair))?;
        if qp.drain != Drain::No || qp.raw.is_none() {
            return Err((0, PostError::State(QpState::Err)));
        }
        let list = &mut self.recvs;
        list.clear();
        let added = wrs.iter().try_for_each(|wr| add_recv(qp, list, wr));
        let (count, raw) = (list.len(), qp.raw.as_ref());
        let posted = raw.map_or(Ok(()), |raw| raw.post_recv(list));
        if let Err((accepted, e)) = posted {
            qp.recv.unpush(count - accepted);
            return Err((accepted, refused(&e)));
        }
        added.map_err(|e| (count, e))
    }

    /// Appends at most `max` completions of all queues; returns how many.
    pub(crate) fn take_completions(
        &mut self,
        out: &mut Vec<(QpId, Completion)>,
        max: usize,
    ) -> Result<usize, VerbsError> {
        let before = out.len();
        let ready = self.flushed.len().min(max);
        out.extend(self.flushed.drain(..ready));
        let mut polled = std::mem::take(&mut self.polled);
        let mut failed = None;
        for i in 0..self.polling.len() {
            while let Some(cq) = self.cqs.get(self.polling[i]) {
                let (device, room) = (cq.device, max - (out.len() - before));
                polled.clear();
                match cq.raw.poll(&mut polled, room) {
                    Ok(0) => break,
                    Ok(_) => {}
                    Err(e) => {
                        failed = Some(VerbsError::State(e.to_string()));
                        break;
                    }
                }
                for wc in &polled {
                    out.extend(self.completed(device, wc));
                }
            }
        }
        self.polled = polled;
        failed.map_or(Ok(out.len() - before), Err)
    }

    /// What a completion is for the user.
    fn completed(&mut self, device: usize, wc: &Polled) -> Option<(QpId, Completion)> {
        let id = *self.devices[device].qps.get(&wc.qp_num)?;
        let qp = self.qps.get_mut(id)?;
        let mark = qp.completed(wc.wr_id);
        if qp.is_drained_now() {
            // It is in the queue behind this completion, since events are asked for after completions.
            self.events.push_back(Event::Drained(id));
        }
        let Completed::Mark(mark) = mark else { return None };
        let out = completion(wc, mark);
        if !out.is_ok() && out.status != WcStatus::FlushError {
            // The device has moved it.
            qp.state = QpState::Err;
        }
        let received = qp.is_receive(wc.wr_id);
        // Some drivers tell of a refused access by the receive that it has taken, and not by an event.
        if received && matches!(out.status, WcStatus::LocalAccessError | WcStatus::RemoteAccessError) {
            qp.violated = true;
        }
        if out.is_ok() && out.flags.contains(WcFlags::WITH_INV) {
            self.closed_by_peer(out.invalidated);
        }
        Some((id, out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_the_library_are_ours() {
        for code in 0..22 {
            assert_eq!(status(code) as u32, code);
        }
        assert_eq!(status(23), WcStatus::GeneralError, "one that we do not know");
        for code in [0, 1, 2, 3, 4, 5, 6, 8, 9, 128, 129] {
            assert_eq!(opcode(code) as u32, code);
        }
    }

    #[test]
    fn immediate_data_is_big_endian_and_a_key_is_not() {
        let wc = Polled {
            wr_id: 1,
            status: 0,
            opcode: 128,
            vendor_err: 0,
            byte_len: 4,
            extra: u32::from_ne_bytes([1, 2, 3, 4]),
            qp_num: 17,
            src_qp: 0,
            flags: 2,
            pkey_index: 0,
            sl: 0,
        };
        let out = completion(&wc, 9);
        assert_eq!((out.wr_id, out.imm, out.invalidated), (9, 0x0102_0304, RKey(0)));
        let out = completion(
            &Polled {
                flags: 8,
                extra: 0x500,
                ..wc
            },
            9,
        );
        assert_eq!((out.imm, out.invalidated), (0, RKey(0x500)));
    }
}
