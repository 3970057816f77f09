//! Judges of the protocols above the transport: what they are given, and the interface that they have.

use std::fmt;

use roce_port::cm::mad::{Message, Req};

use super::{event::Event, observed::Observed};
use crate::finding::Finding;

/// Message of the connection manager.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionMessage<'a> {
    /// Its packet.
    pub packet: &'a Observed<'a>,
    /// The message.
    pub message: &'a Message,
    /// Connection request that it is or answers, if the capture has it.
    pub request: Option<&'a Req>,
    /// The request was seen before: this one is a repetition.
    pub repeated: bool,
    /// Conversation that the request made. The requester is its endpoint 0.
    pub conversation: Option<usize>,
}

/// Judge of a protocol above the transport. A [`Judge`](super::Judge) gives it what it has judged, in the order of the capture.
pub trait UpperJudge: fmt::Debug + Send {
    /// Takes a packet of a conversation, and adds what it shows to `findings`.
    fn packet(&mut self, event: &Event, packet: &Observed<'_>, findings: &mut Vec<Finding>);

    /// Takes a message of the connection manager, likewise.
    fn connection(&mut self, message: &ConnectionMessage<'_>, findings: &mut Vec<Finding>);

    /// Notes that conversation `part` is the other direction of `whole`: its endpoint 0 is endpoint 1 of that.
    fn merged(&mut self, part: usize, whole: usize);

    /// Returns checks of a conversation that were not possible, in words.
    fn not_checked(&self, conversation: usize) -> Vec<String>;
}

/// Creates a judge of the protocols above the transport.
pub type NewUpperJudge = fn() -> Box<dyn UpperJudge>;
