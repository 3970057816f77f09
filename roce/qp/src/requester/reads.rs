//! READs: which part of one is requested next, and where its responses belong.

use roce_bth::{Packet, Position, Syndrome};
use roce_verbs::WcStatus;

use super::{Requester, scoreboard::Mark};
use crate::{
    context::{Call, QpContext},
    sendq::{Kind, PACKET_OVERHEAD, SendWqe},
    seq::Seq,
};

/// Largest part of a READ requested again after a probe timeout, bytes.
const PROBED_PART: usize = 64 << 10;

impl Requester {
    /// Returns one past the last PSN that a READ request from `seq` on covers.
    ///
    /// Until a response has arrived, the request itself may have been lost: it is repeated unchanged then.
    pub(super) fn read_end(&self, call: &Call<'_>, wqe: &SendWqe, seq: Seq) -> Seq {
        let all = wqe.request_end(seq);
        // An answer to something later shows that the request arrived: request only what is missing.
        let end = self.first_answered(seq, all);
        if seq == wqe.request_start(seq) && end == all {
            return end;
        }
        let bytes = match self.timers.backoff {
            // Parts are requested one at a time.
            0 => call.window.piece_limit(),
            _ => call.window.read_limit().min(PROBED_PART),
        };
        let packets = bytes / (call.qp.mtu() + PACKET_OVERHEAD);
        end.min(seq.plus(packets.max(1) as u64))
    }

    /// Returns how far to request a READ again from `seq` on.
    ///
    /// Repeats the whole READ if the peer may never have seen it, else only consecutive lost packets.
    pub(super) fn lost_run(&self, call: &Call<'_>, wqe: &SendWqe, seq: Seq) -> Seq {
        if !call.qp.is_selective() {
            return self.read_end(call, wqe, seq);
        }
        let end = wqe.request_end(seq);
        let at = self.first_answered(seq, end);
        if seq == wqe.request_start(seq) && at == end {
            return end;
        }
        let most = (call.window.read_limit() / (call.qp.mtu() + PACKET_OVERHEAD)).max(1) as u64;
        self.scoreboard
            .run_end(seq, at.min(seq.plus(most)), |mark| mark == Mark::Lost)
    }

    /// Returns index and work request of the oldest outstanding PSN, if it is a READ.
    pub(super) fn oldest_read(&self) -> Option<(usize, &SendWqe)> {
        let index = self.sq.index_of(self.una)?;
        let wqe = &self.sq.wqes[index];
        (wqe.kind() == Kind::Read).then_some((index, wqe))
    }

    /// Returns whether retransmitting the oldest packet would request more than [`PROBED_PART`] bytes of a READ.
    pub(super) fn oldest_is_long_read(&self, call: &Call<'_>) -> bool {
        let una = self.una;
        let cost = |w: &SendWqe| w.cost(una, self.read_end(call, w, una), call.qp.mtu());
        self.oldest_read().is_some_and(|(_, w)| cost(w) > PROBED_PART)
    }

    /// Writes the data of a response to the memory of its work request.
    ///
    /// # Errors
    /// The status with which the work request fails if the response does not fit, or the memory is gone.
    pub(super) fn place_response(
        &self,
        qp: &QpContext,
        wqe: &SendWqe,
        seq: Seq,
        packet: &Packet<'_>,
    ) -> Result<(), WcStatus> {
        let header = packet.header;
        let value = header.atomic_ack().map(u64::to_ne_bytes);
        let (fits, offset, data) = match &value {
            Some(value) => (true, 0, &value[..]),
            None => {
                let (fits, offset) = self.fits_read(qp, wqe, seq, packet);
                (fits, offset, packet.payload)
            }
        };
        let acked = header.aeth().is_none_or(|a| matches!(a.syndrome, Syndrome::Ack(_)));
        if !fits || !acked || !wqe.expects(header.bth.opcode.info().class) {
            return Err(WcStatus::BadResponseError);
        }
        match data.is_empty() || wqe.data.write_at(offset, data).is_ok() {
            true => Ok(()),
            false => Err(WcStatus::LocalProtectionError),
        }
    }

    /// Returns whether a READ response fits its work request, and the offset of its payload.
    fn fits_read(&self, qp: &QpContext, wqe: &SendWqe, seq: Seq, packet: &Packet<'_>) -> (bool, usize) {
        let index = seq.since(wqe.first);
        let (offset, len) = match wqe.kind() {
            Kind::Read => wqe.slice(index, qp.mtu()),
            _ => (0, 0),
        };
        let last = seq.plus(1) == wqe.request_end(seq);
        let position = packet.header.bth.opcode.info().position;
        // After a repeated request the responses start again at its first packet or continue (rdma_rxe). They may end
        // early, because the READ may have been requested in parts.
        let fits = packet.payload.len() == len
            && (position.ends() || !last)
            && (!position.ends() || last || self.reads.in_parts)
            && (index > 0 || position.starts())
            && (position == Position::Middle || packet.header.aeth().is_some());
        (fits, offset)
    }
}
