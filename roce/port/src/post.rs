//! Work requests of applications.

use roce_bth::Qpn;
use roce_verbs::{Instant, RecvWr, SendRequest, SendWr, Target, wr::PostError};

use crate::port::Port;

impl Port {
    /// Posts send work requests in order, up to the first invalid one.
    ///
    /// # Errors
    /// The number of work requests posted, and the error of the next one.
    pub fn post_send(&mut self, now: Instant, qpn: Qpn, wrs: &[SendWr<'_>]) -> Result<(), (usize, PostError)> {
        self.post(now, qpn, wrs, |qp, ctx, wr| qp.post_send(ctx, wr))
    }

    /// Posts receive work requests in order, up to the first invalid one.
    ///
    /// # Errors
    /// The number of work requests posted, and the error of the next one.
    pub fn post_recv(&mut self, now: Instant, qpn: Qpn, wrs: &[RecvWr<'_>]) -> Result<(), (usize, PostError)> {
        self.post(now, qpn, wrs, |qp, ctx, wr| qp.post_recv(ctx, wr))
    }

    /// Posts send work requests with a target each: datagrams, and messages of XRC initiators.
    ///
    /// # Errors
    /// The number of work requests posted, and the error of the next one.
    pub fn post_requests(
        &mut self,
        now: Instant,
        qpn: Qpn,
        requests: &[SendRequest<'_>],
    ) -> Result<(), (usize, PostError)> {
        let mtus = self.config.mtus.clone();
        self.post(now, qpn, requests, |qp, ctx, r| match r.target {
            Target::Datagram(to) => qp.post_send_within(ctx, &r.wr, r.target, mtus.of(to.av.local).bytes()),
            _ => qp.post_send_to(ctx, &r.wr, r.target),
        })
    }

    /// Posts send work requests with a target each, all or none (`ibv_wr_complete`).
    ///
    /// # Errors
    /// The index of the first invalid work request, and its error. Then nothing is posted.
    pub fn post_batch(
        &mut self,
        now: Instant,
        qpn: Qpn,
        requests: &[SendRequest<'_>],
    ) -> Result<(), (usize, PostError)> {
        let slot = self.qpns.get(qpn).ok_or((0, PostError::NoQueuePair))?;
        let qp = &self.qps[slot].qp;
        for (i, r) in requests.iter().enumerate() {
            qp.check_post(&r.wr, &r.target, i).map_err(|e| (i, e))?;
        }
        self.post_requests(now, qpn, requests)
    }
}
