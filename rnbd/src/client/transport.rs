//! RTRS's client, as RNBD's owns it: requests go down, outputs come up.

use rtrs::{
    Cx,
    client::{
        Client,
        request::{Output, SessionId, Submission},
    },
};

use super::{memory::SessionBuffers, operation::Request};

/// RTRS's client, which [`Client`](super::Client) owns and calls. A test can have another one.
pub trait Transport<F>: SessionBuffers {
    /// Sends a request, which ends with [`Output::Done`], also if it can't be sent.
    fn submit(&mut self, cx: &mut Cx<'_>, session: SessionId, request: Submission<Request<F>>);
    /// Returns the next output.
    fn poll_output(&mut self) -> Option<Output<Request<F>>>;
}

impl<F> Transport<F> for Client<Request<F>> {
    fn submit(&mut self, cx: &mut Cx<'_>, session: SessionId, request: Submission<Request<F>>) {
        Client::submit(self, cx, session, request);
    }

    fn poll_output(&mut self) -> Option<Output<Request<F>>> {
        Client::poll_output(self)
    }
}
