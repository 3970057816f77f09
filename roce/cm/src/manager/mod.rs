//! The connection manager.
pub mod state;

use core::net::IpAddr;

use roce_verbs::{
    Instant,
    provider::{ConnParams, RejectReason},
};

use crate::types::{AcceptArgs, CmConfig, CmError, ConnId, ConnectArgs, Counters, Event, ListenId, OutMad, RemoteQp};

/// The connection manager of one port (one GSI).
pub struct Manager {
    counters: Counters,
}

#[allow(unused_variables)]
impl Manager {
    /// A manager without connections; `seed` makes communication IDs, transaction IDs and ephemeral ports.
    pub fn new(config: CmConfig, seed: [u8; 32]) -> Self {
        Self {
            counters: Counters::default(),
        }
    }

    /// Listens on a port of the RDMA_CM TCP port space, on one address or on all. Up to `backlog` requests may wait
    /// for accept or reject; more are dropped (the peer repeats them).
    ///
    /// # Errors
    /// When a listener has the port on this address already.
    pub fn listen(&mut self, addr: Option<IpAddr>, port: u16, backlog: u32) -> Result<ListenId, CmError> {
        Err(CmError::Limit)
    }

    /// Stops listening. Requests already reported stay.
    pub fn unlisten(&mut self, id: ListenId) {}

    /// Sends a REQ. The outcome is an event.
    ///
    /// # Errors
    /// When an argument is wrong or a limit is reached.
    pub fn connect(&mut self, now: Instant, args: &ConnectArgs) -> Result<ConnId, CmError> {
        Err(CmError::Limit)
    }

    /// The path of a waiting request with depths as accepting with `params` would negotiate them: what to bring the
    /// queue pair to RTS with before [`Manager::accept`].
    ///
    /// # Errors
    /// When the connection is not a waiting request.
    pub fn accept_path(&self, conn: ConnId, params: &ConnParams) -> Result<RemoteQp, CmError> {
        Err(CmError::NoConnection)
    }

    /// Accepts a request: sends the REP. The queue pair must be in RTS (the peer's first packet may come before its
    /// RTU).
    ///
    /// # Errors
    /// When the connection is not a waiting request, or there is too much private data.
    pub fn accept(&mut self, now: Instant, conn: ConnId, args: &AcceptArgs) -> Result<(), CmError> {
        Err(CmError::NoConnection)
    }

    /// Refuses a request (`rdma_reject`). The connection is over; destroy it.
    ///
    /// # Errors
    /// When the connection is not a waiting request, or there are more than 148 bytes of private data.
    pub fn reject(
        &mut self,
        now: Instant,
        conn: ConnId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        Err(CmError::NoConnection)
    }

    /// Answer to [`Event::Reply`]: the queue pair is in RTS; sends the RTU and the connection is established.
    ///
    /// # Errors
    /// When the connection doesn't wait for it (the peer may have ended it meanwhile).
    pub fn qp_ready(&mut self, now: Instant, conn: ConnId) -> Result<(), CmError> {
        Err(CmError::NoConnection)
    }

    /// Answer to [`Event::Reply`]: the queue pair could not be brought up; rejects the reply.
    ///
    /// # Errors
    /// When the connection doesn't wait for it.
    pub fn qp_failed(&mut self, now: Instant, conn: ConnId, reason: RejectReason) -> Result<(), CmError> {
        Err(CmError::NoConnection)
    }

    /// Passive: a packet arrived on the queue pair before the RTU (`rdma_notify`, IBA 12.9.5 "communication
    /// established"). Harmless at any other time.
    pub fn communication_established(&mut self, now: Instant, conn: ConnId) {}

    /// Ends an established (or accepted) connection: sends a DREQ; [`Event::Disconnected`] follows. An unanswered
    /// connect or request is taken back or rejected. Harmless at any other time.
    pub fn disconnect(&mut self, now: Instant, conn: ConnId) {}

    /// Disconnects if need be and forgets the connection: no more events come. What the peer still needs to be told
    /// is told in the background.
    pub fn destroy(&mut self, now: Instant, conn: ConnId) {}

    /// Takes a MAD that arrived on QP1. Whatever its bytes are, the worst that happens is a counted drop.
    pub fn handle_mad(&mut self, now: Instant, local: IpAddr, remote: IpAddr, mad: &[u8]) {}

    /// Takes a MAD to send.
    pub fn poll_mad(&mut self) -> Option<OutMad> {
        None
    }

    /// Takes an event.
    pub fn poll_event(&mut self) -> Option<Event> {
        None
    }

    /// When [`Manager::handle_timeout`] wants to be called.
    pub fn next_timeout(&self) -> Option<Instant> {
        None
    }

    /// Does what is due. Calling it early is harmless.
    pub fn handle_timeout(&mut self, now: Instant) {}

    /// What was counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// State of a connection, for diagnosis.
    pub fn state(&self, conn: ConnId) -> Option<state::State> {
        None
    }
}
