//! States of connections and resolutions, and the inputs that change them.

use roce_verbs::provider::{NoAnswer, RejectReason};

use crate::cm::mad::{Rej, Rep, SidrRep, Subject};

/// State of a connection or resolution (IBA 12.9.7; `enum ib_cm_state`, whose REP_RCVD and MRA_REP_SENT, REQ_RCVD and MRA_REQ_SENT
/// are one state here: duplicates are always answered with an MRA; its DREQ_RCVD is passed at once).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum State {
    /// Active: REQ sent, no answer yet.
    ReqSent,
    /// Active: the peer has the REQ and asked for more time (MRA).
    ReqExtended,
    /// Active: REP received, the queue pair is being brought up.
    RepReceived,
    /// Passive: REQ received, the consumer decides.
    ReqReceived,
    /// Passive: REP sent.
    RepSent,
    /// Passive: the peer has the REP and asked for more time (MRA).
    RepExtended,
    /// Both sides may send.
    Established,
    /// DREQ sent.
    DreqSent,
    /// Disconnected; packets of the connection may still be under way.
    Timewait,
    /// We sent a REJ, and repeat it for duplicates of what it rejected.
    Refused,
    /// Active: SIDR_REQ sent, no answer yet.
    SidrSent,
    /// Passive: SIDR_REQ received, the consumer decides.
    SidrReceived,
    /// Passive: SIDR_REP sent, which is repeated for duplicates of the request.
    SidrAnswered,
    /// The connection or resolution has ended.
    Over,
}

/// Input of the connection state machine: what `perform.rs` has a table of.
#[derive(Debug)]
pub(super) enum Input<'a> {
    /// Repeated REQ.
    Req,
    /// An MRA for this message, with its service timeout, a code.
    Mra(Subject, u8),
    /// A REP.
    Rep(&'a Rep),
    /// An RTU.
    Rtu,
    /// A REJ.
    Rej(&'a Rej),
    /// A DREQ of this transaction.
    Dreq(u64),
    /// A DREP.
    Drep,
    /// The consumer accepts with this REP.
    Accept(&'a Rep),
    /// The consumer refuses a request or a reply, with this private data.
    Reject(RejectReason, [u8; 148]),
    /// The queue pair is in RTS.
    QpReady,
    /// A packet arrived on the queue pair.
    Communication,
    /// The consumer ends the connection.
    Disconnect,
    /// The peer's REP reused the connection's queue pair.
    Stale,
    /// A REQ in the peer's name reused the connection's queue pair or communication ID.
    Doubt,
    /// The connection's timer.
    Timer,
    /// A newer request evicts it.
    Displaced,
    /// ICMP: our REQ or SIDR_REQ could not be delivered.
    Undeliverable(NoAnswer),
    /// Repeated SIDR_REQ.
    SidrReq,
    /// A SIDR_REP.
    SidrRep(&'a SidrRep),
    /// The consumer answers a SIDR_REQ with this but for the numbers of the request.
    Answer(&'a SidrRep),
}

use State as S;

impl State {
    /// Returns whether this is a peer's connect request that is not established.
    pub const fn is_half_open(self) -> bool {
        matches!(self, S::ReqReceived | S::RepSent | S::RepExtended)
    }

    /// Returns whether a peer's request waits for the consumer.
    pub(crate) const fn waits_for_consumer(self) -> bool {
        matches!(self, S::ReqReceived | S::SidrReceived)
    }

    /// Returns whether a request of ours waits for an answer.
    pub(crate) const fn is_request(self) -> bool {
        matches!(self, S::ReqSent | S::ReqExtended | S::SidrSent)
    }

    /// Returns whether this connection still uses the peer's queue pair.
    pub(crate) const fn holds_qp(self) -> bool {
        !matches!(self, S::Timewait | S::Refused | S::Over)
    }
}
