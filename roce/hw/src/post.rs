//! Posting and completing.

use std::io;

use roce_verbs::{
    Completion, Instant, Payload, QpState, Qpn, RKey, RecvWr, SendOp, SendWr, WcFlags, WcOpcode, WcStatus,
    wr::PostError,
};

use crate::{
    qp::Qp,
    sys::{Polled, RecvList, SendList},
};

/// Returns the library's error for a work request as ours.
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

impl Qp {
    pub(crate) fn post_send(&mut self, list: &mut SendList, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        self.check_sends().map_err(|e| (0, e))?;
        list.clear();
        let added = wrs.iter().try_for_each(|wr| add_send(self, list, wr));
        let (count, raw) = (list.len(), self.raw.as_ref());
        let posted = raw.map_or(Ok(()), |raw| raw.post_send(list));
        if let Err((accepted, e)) = posted {
            self.send.unpush(count - accepted);
            return Err((accepted, refused(&e)));
        }
        added.map_err(|e| (count, e))
    }

    pub(crate) fn post_recv(&mut self, list: &mut RecvList, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        if !self.takes_receives() {
            return Err((0, PostError::State(QpState::Err)));
        }
        list.clear();
        let added = wrs.iter().try_for_each(|wr| add_recv(self, list, wr));
        let (count, raw) = (list.len(), self.raw.as_ref());
        let posted = raw.map_or(Ok(()), |raw| raw.post_recv(list));
        if let Err((accepted, e)) = posted {
            self.recv.unpush(count - accepted);
            return Err((accepted, refused(&e)));
        }
        added.map_err(|e| (count, e))
    }
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

/// Returns a completion of the library as ours; the mark is that of the device still.
pub(crate) fn completion(wc: &Polled) -> Completion {
    let flags = WcFlags::from_bits_truncate(wc.flags);
    let with = |flag| if flags.contains(flag) { wc.extra } else { 0 };
    Completion {
        wr_id: wc.wr_id,
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
        let out = completion(&wc);
        assert_eq!((out.wr_id, out.imm, out.invalidated), (1, 0x0102_0304, RKey(0)));
        let out = completion(&Polled {
            flags: 8,
            extra: 0x500,
            ..wc
        });
        assert_eq!((out.imm, out.invalidated), (0, RKey(0x500)));
    }
}
