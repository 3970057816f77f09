//! Connection of a protocol above the transport.

use std::net::IpAddr;

use roce_bth::Class;
use roce_pcap::{
    Finding,
    judge::{Event, EventKind, Observed},
};

use super::{
    claims::{Claims, Missing},
    cx::Cx,
    lnet::Lnet,
    rds::Rds,
    rds_pair::RdsPair,
    stream::{Proof, Stream, Whole},
};
use crate::recognize;

/// Addresses of two nodes, ascending, and type of service.
pub(super) type PairKey = (IpAddr, IpAddr, u8);

/// Protocol of a connection.
#[derive(Debug)]
pub(super) enum Protocol {
    /// RDS, and the pair of nodes that it is of.
    Rds(Box<Rds>, Option<PairKey>),
    Lnet(Box<Lnet>),
}

/// Connection of a protocol above the transport.
#[derive(Debug)]
pub(super) struct Conn {
    /// Number among all connections.
    pub(super) serial: u64,
    protocol: Protocol,
    /// The capture has the messages that made it.
    named: bool,
    /// A message had the form of the protocol's: the payload is there, and not replaced.
    proven: bool,
    streams: [Stream; 2],
    claims: Claims,
}

impl Conn {
    /// Creates a connection. `named`: the capture has the messages that made it. `proven`: messages had the form of the protocol's.
    pub(super) fn new(serial: u64, protocol: Protocol, named: bool, proven: bool) -> Self {
        Self {
            serial,
            protocol,
            named,
            proven,
            streams: Default::default(),
            claims: Claims::default(),
        }
    }

    /// Returns the pair of nodes of an RDS connection.
    pub(super) const fn pair(&self) -> Option<PairKey> {
        match &self.protocol {
            Protocol::Rds(_, pair) => *pair,
            Protocol::Lnet(_) => None,
        }
    }

    /// Takes a packet. `pair` is what is known of the pair of nodes.
    pub(super) fn packet(
        &mut self,
        event: &Event,
        o: &Observed<'_>,
        pair: Option<&mut RdsPair>,
        findings: &mut Vec<Finding>,
    ) {
        match event.kind {
            EventKind::Request { .. } => self.request(event, o, pair, findings),
            EventKind::Ack { .. } | EventKind::ReadResponse { .. } | EventKind::Nak { .. } | EventKind::Rnr { .. } => {
                self.answer(event, findings);
            }
            EventKind::Cnp | EventKind::Datagram | EventKind::Unknown => {}
        }
    }

    fn answer(&mut self, event: &Event, findings: &mut Vec<Finding>) {
        let requester = 1 - event.sender;
        match self.streams[requester].answered(event) {
            Proof::Gap => self.protocol.lost(requester, &mut self.claims),
            Proof::All if !self.claims.is_empty() => self.claims.confirm(requester, event.frame, findings),
            Proof::All | Proof::None => {}
        }
        if let (Protocol::Rds(rds, _), EventKind::Ack { psn, .. }) = (&mut self.protocol, event.kind) {
            rds.acknowledged(requester, psn, event.time_ns);
        }
    }

    fn request(
        &mut self,
        event: &Event,
        o: &Observed<'_>,
        mut pair: Option<&mut RdsPair>,
        findings: &mut Vec<Finding>,
    ) {
        let sender = event.sender;
        let Self {
            protocol,
            streams,
            claims,
            ..
        } = self;
        let trouble_ns = streams[sender].trouble_ns();
        let taken = streams[sender].take(event, o, self.named);
        if taken.gap {
            protocol.lost(sender, claims);
        }
        if let (false, Protocol::Rds(rds, _), Some(payload)) = (taken.in_order, &mut *protocol, o.payload) {
            rds.early(sender, payload, pair.as_deref_mut());
        }
        let Some(message) = taken.message else {
            let is_message = matches!(event.opcode.info().class, Class::Send | Class::Write);
            if taken.in_order && !is_message && !claims.is_empty() {
                claims.confirm(sender, event.frame, findings);
            }
            return;
        };
        if !self.proven {
            self.proven = protocol.proves(&message);
        }
        if !self.proven {
            protocol.lost(sender, claims);
            return;
        }
        if !claims.is_empty() {
            let is = |missing| protocol.is(missing, &message);
            claims.next_message(sender, message.first_ns, is, findings);
        }
        let mut cx = Cx {
            conversation: event.conversation,
            sender,
            frame: message.frame,
            time_ns: event.time_ns,
            peers: (o.meta.src.ip(), o.meta.dst),
            claims,
            findings,
        };
        match protocol {
            Protocol::Rds(rds, _) => rds.message(&message, trouble_ns, pair, &mut cx),
            Protocol::Lnet(lnet) => lnet.message(&message, &mut cx),
        }
    }

    /// Returns checks that were not possible.
    pub(super) fn not_checked(&self) -> Vec<String> {
        let mut texts = Vec::new();
        if !self.proven {
            texts.push(format!("{}: no message of it was recognized", self.protocol.name()));
            return texts;
        }
        if self.streams.iter().any(|stream| !stream.is_whole(self.named)) {
            texts.push(format!(
                "{}: messages before the capture, or missing in it",
                self.protocol.name()
            ));
        }
        if let Protocol::Lnet(lnet) = &self.protocol {
            if !lnet.counts_credits() {
                texts.push("LNet: credits".to_owned());
            }
            if !lnet.pairs_cookies() {
                texts.push("LNet: cookies and sinks of both sides".to_owned());
            }
        }
        texts
    }
}

impl Protocol {
    const fn name(&self) -> &'static str {
        match self {
            Self::Rds(..) => "RDS",
            Self::Lnet(_) => "LNet",
        }
    }

    /// Notes that messages of a side are missing in the capture.
    fn lost(&mut self, sender: usize, claims: &mut Claims) {
        claims.drop_of(sender);
        match self {
            Self::Rds(rds, _) => rds.lost(sender),
            Self::Lnet(lnet) => lnet.lost(sender),
        }
    }

    fn is(&self, missing: Missing, message: &Whole<'_>) -> bool {
        match self {
            Self::Rds(..) => Rds::is(missing, message),
            Self::Lnet(_) => Lnet::is(missing, message),
        }
    }

    /// Returns whether a message has the form of the protocol's.
    fn proves(&self, message: &Whole<'_>) -> bool {
        message.reth.is_none()
            && match self {
                Self::Rds(..) => recognize::is_rds(message.bytes, true),
                Self::Lnet(_) => ::lnet::proto::peek(message.bytes).is_ok(),
            }
    }
}
