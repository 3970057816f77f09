//! The queue pair.

use roce_bth::Packet;
use roce_verbs::{AddressVector, Instant, QpAttr, QpState, Qpn, RecvWr, SendWr, wr::PostError};

use crate::{
    ctx::{CreateError, Ctx, ModifyError, QpConfig, WaitReason},
    tx::{Poll, TxSink},
};

/// A queue pair.
#[derive(Debug)]
pub struct QueuePair {
    config: QpConfig,
    state: QpState,
    attr: QpAttr,
}

impl QueuePair {
    /// A queue pair in RESET.
    ///
    /// # Errors
    /// When the transport service is not implemented.
    pub fn new(config: QpConfig) -> Result<Self, CreateError> {
        Ok(Self {
            config,
            state: QpState::Reset,
            attr: QpAttr::default(),
        })
    }

    /// Its number.
    pub fn qpn(&self) -> Qpn {
        self.config.qpn
    }

    /// What it was made with.
    pub fn config(&self) -> &QpConfig {
        &self.config
    }

    /// Its state.
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Path and number of the peer, once they are set.
    pub fn remote(&self) -> Option<(AddressVector, Qpn)> {
        Some((self.attr.av?, self.attr.dest_qpn?))
    }

    /// Changes attributes and state.
    ///
    /// # Errors
    /// When the transition or an attribute is not allowed; then nothing changes.
    pub fn modify(&mut self, _ctx: &mut Ctx<'_>, attr: &QpAttr) -> Result<(), ModifyError> {
        if let Some(state) = attr.state {
            self.state = state;
        }
        Ok(())
    }

    /// The attributes as they are.
    pub fn query(&self) -> QpAttr {
        self.attr
    }

    /// Queues a send work request.
    ///
    /// # Errors
    /// When it can't be queued; then nothing was.
    pub fn post_send(&mut self, _ctx: &mut Ctx<'_>, _wr: &SendWr<'_>) -> Result<(), PostError> {
        Err(PostError::State(self.state))
    }

    /// Queues a receive work request.
    ///
    /// # Errors
    /// When it can't be queued; then nothing was.
    pub fn post_recv(&mut self, _ctx: &mut Ctx<'_>, _wr: &RecvWr<'_>) -> Result<(), PostError> {
        Err(PostError::State(self.state))
    }

    /// Takes a packet that was sent to this queue pair. The caller has checked its ICRC and both its addresses.
    pub fn handle_packet(&mut self, _ctx: &mut Ctx<'_>, _packet: &Packet<'_>) {}

    /// Sends what may be sent, up to a budget that keeps one queue pair from starving the others.
    pub fn poll_transmit(&mut self, _ctx: &mut Ctx<'_>, _tx: &mut impl TxSink) -> Poll {
        Poll::Idle
    }

    /// When [`QueuePair::handle_timeout`] wants to be called next.
    pub fn next_timeout(&self) -> Option<Instant> {
        None
    }

    /// Lets timers run out that are due. Calling it early does no harm.
    pub fn handle_timeout(&mut self, _ctx: &mut Ctx<'_>) {}

    /// Why the requester is not sending.
    pub fn wait_reason(&self) -> WaitReason {
        WaitReason::Empty
    }

    /// Ends the queue pair: its bytes in flight return to the window, its windows close. Nothing is completed.
    pub fn destroy(&mut self, _ctx: &mut Ctx<'_>) {}
}
