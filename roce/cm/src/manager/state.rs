//! The states of a connection and what is legal in each, as a table.

/// State of a connection (IBA 12.9.7; `enum ib_cm_state`, whose REP_RCVD and MRA_REP_SENT, REQ_RCVD and MRA_REQ_SENT
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
    /// We sent a REJ, and repeat it for whoever did not get it.
    Refused,
    /// Nothing more happens.
    Over,
}

/// Input of the connection state machine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Input {
    /// Repeated REQ.
    Req,
    /// An MRA for what we sent last.
    Mra,
    /// A REP.
    Rep,
    /// An RTU.
    Rtu,
    /// A REJ.
    Rej,
    /// A DREQ.
    Dreq,
    /// A DREP.
    Drep,
    /// The consumer accepts.
    Accept,
    /// The consumer refuses.
    Reject,
    /// The queue pair is in RTS.
    QpReady,
    /// The queue pair could not be brought up.
    QpFailed,
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
    /// It gives way to a newer request.
    Displaced,
    /// ICMP: our REQ could not be delivered.
    Undeliverable,
}

/// Action of the connection state machine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Action {
    /// Sends an MRA for the REQ or REP that came again.
    AnswerMra,
    /// Sends the message that awaits an answer again, without waiting for the timer.
    Resend,
    /// Sends the RTU again.
    AnswerRtu,
    /// Sends the DREP again.
    AnswerDrep,
    /// Sends the REJ again.
    RepeatRej,
    /// Answers a late REQ, REP or RTU with a REJ of its own: stale connection, or no such communication ID.
    RejectLate,
    /// Gives the peer the time it asked for.
    Extend,
    /// Takes the REP over and reports it.
    TakeReply,
    /// Sends the RTU; established.
    SendRtu,
    /// Sends the REP.
    SendRep,
    /// Established by the peer's RTU or by data.
    Establish,
    /// Sends a REJ; the connection is over.
    Refuse,
    /// The peer's REJ ends the attempt.
    TakeRejection,
    /// Asks the peer whether it still has the connection.
    Challenge,
    /// The peer still has the connection.
    Reassure,
    /// Sends a DREQ.
    SendDreq,
    /// The peer's DREQ ends the connection: sends the DREP, enters timewait.
    TakeDreq,
    /// The connection has ended: enters timewait.
    EnterTimewait,
    /// The attempt is abandoned, and the peer told in case that it still knows of it: a REJ, or a DREQ after a REP.
    Abandon,
    /// The request is forgotten without a word: whoever sent it has given up, or may never have.
    Forget,
    /// Sends again, or gives up when it is time.
    Retry,
    /// Gives up: the peer receives nothing.
    GiveUp,
    /// Leaves timewait.
    ExitTimewait,
    /// Nothing more happens.
    End,
    /// Nothing: a duplicate that needs no answer.
    Ignore,
}

use Action as A;
use Input as I;
use State as S;

/// Every legal event: state, input, action. What is not here is refused (a call) or dropped and counted (a MAD).
pub const TABLE: &[(State, Input, Action)] = &[
    (S::ReqSent, I::Mra, A::Extend),
    (S::ReqSent, I::Rep, A::TakeReply),
    (S::ReqSent, I::Rej, A::TakeRejection),
    (S::ReqSent, I::Dreq, A::TakeDreq),
    (S::ReqSent, I::Disconnect, A::Refuse),
    (S::ReqSent, I::Timer, A::Retry),
    (S::ReqSent, I::Undeliverable, A::GiveUp),
    (S::ReqExtended, I::Mra, A::Extend),
    (S::ReqExtended, I::Rep, A::TakeReply),
    (S::ReqExtended, I::Rej, A::TakeRejection),
    (S::ReqExtended, I::Dreq, A::TakeDreq),
    (S::ReqExtended, I::Disconnect, A::Refuse),
    (S::ReqExtended, I::Timer, A::Retry),
    (S::RepReceived, I::Rep, A::AnswerMra),
    (S::RepReceived, I::Rej, A::TakeRejection),
    (S::RepReceived, I::Dreq, A::TakeDreq),
    (S::RepReceived, I::QpReady, A::SendRtu),
    (S::RepReceived, I::QpFailed, A::Refuse),
    (S::RepReceived, I::Disconnect, A::Refuse),
    (S::RepReceived, I::Stale, A::Abandon),
    (S::ReqReceived, I::Req, A::AnswerMra),
    (S::ReqReceived, I::Rej, A::TakeRejection),
    (S::ReqReceived, I::Accept, A::SendRep),
    (S::ReqReceived, I::Reject, A::Refuse),
    (S::ReqReceived, I::Disconnect, A::Refuse),
    (S::ReqReceived, I::Timer, A::Forget),
    (S::ReqReceived, I::Displaced, A::Forget),
    (S::RepSent, I::Req, A::Resend),
    (S::RepSent, I::Mra, A::Extend),
    (S::RepSent, I::Rtu, A::Establish),
    (S::RepSent, I::Rej, A::TakeRejection),
    (S::RepSent, I::Dreq, A::TakeDreq),
    (S::RepSent, I::Communication, A::Establish),
    (S::RepSent, I::Disconnect, A::SendDreq),
    (S::RepSent, I::Timer, A::Retry),
    (S::RepSent, I::Displaced, A::Forget),
    (S::RepExtended, I::Req, A::Ignore),
    (S::RepExtended, I::Mra, A::Extend),
    (S::RepExtended, I::Rtu, A::Establish),
    (S::RepExtended, I::Rej, A::TakeRejection),
    (S::RepExtended, I::Dreq, A::TakeDreq),
    (S::RepExtended, I::Communication, A::Establish),
    (S::RepExtended, I::Disconnect, A::SendDreq),
    (S::RepExtended, I::Stale, A::Abandon),
    (S::RepExtended, I::Timer, A::Retry),
    (S::Established, I::Req, A::Ignore),
    (S::Established, I::Rep, A::AnswerRtu),
    (S::Established, I::Rtu, A::Reassure),
    (S::Established, I::Rej, A::EnterTimewait),
    (S::Established, I::Dreq, A::TakeDreq),
    (S::Established, I::Communication, A::Ignore),
    (S::Established, I::Disconnect, A::SendDreq),
    (S::Established, I::Stale, A::SendDreq),
    (S::Established, I::Doubt, A::Challenge),
    (S::Established, I::Timer, A::Retry),
    (S::DreqSent, I::Req, A::Ignore),
    (S::DreqSent, I::Rep, A::Ignore),
    (S::DreqSent, I::Rtu, A::Ignore),
    (S::DreqSent, I::Rej, A::EnterTimewait),
    (S::DreqSent, I::Dreq, A::TakeDreq),
    (S::DreqSent, I::Drep, A::EnterTimewait),
    (S::DreqSent, I::Timer, A::Retry),
    (S::Timewait, I::Req, A::RejectLate),
    (S::Timewait, I::Rep, A::RejectLate),
    (S::Timewait, I::Rtu, A::RejectLate),
    (S::Timewait, I::Dreq, A::AnswerDrep),
    (S::Timewait, I::Drep, A::Ignore),
    (S::Timewait, I::Timer, A::ExitTimewait),
    (S::Refused, I::Req, A::RepeatRej),
    (S::Refused, I::Rep, A::RepeatRej),
    (S::Refused, I::Rtu, A::RepeatRej),
    (S::Refused, I::Dreq, A::AnswerDrep),
    (S::Refused, I::Timer, A::End),
];

impl State {
    /// All states.
    pub const ALL: [Self; 11] = [
        S::ReqSent,
        S::ReqExtended,
        S::RepReceived,
        S::ReqReceived,
        S::RepSent,
        S::RepExtended,
        S::Established,
        S::DreqSent,
        S::Timewait,
        S::Refused,
        S::Over,
    ];

    /// Returns the action for an input in this state.
    pub fn action(self, input: Input) -> Option<Action> {
        TABLE
            .iter()
            .find(|(s, i, _)| (*s, *i) == (self, input))
            .map(|(_, _, a)| *a)
    }

    /// A request from a peer that is not established.
    pub const fn is_half_open(self) -> bool {
        matches!(self, S::ReqReceived | S::RepSent | S::RepExtended)
    }

    /// A request of ours that waits for an answer.
    pub(crate) const fn is_request(self) -> bool {
        matches!(self, S::ReqSent | S::ReqExtended)
    }

    /// The peer's queue pair is still taken by this connection.
    pub(crate) const fn holds_qp(self) -> bool {
        !matches!(self, S::Timewait | S::Refused | S::Over)
    }

    /// The attempt or connection has come to its end.
    pub(crate) const fn has_ended(self) -> bool {
        !self.holds_qp()
    }
}
