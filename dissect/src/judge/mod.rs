//! Judge of RDS and LNet: follows their connections in a capture and reports broken rules.
//!
//! [`roce_pcap`]'s judge of the transport gives it packets with the part that they play. It puts SENDs and WRITEs together in the order in
//! which their receiver executes them. Rules about what the other side has sent (an acknowledgement of a message, an answer to a request,
//! a credit) need that side complete: such a finding is a *claim* until a later packet proves that the capture misses nothing, and is
//! dropped if it does. A connection whose beginning is not in the capture is judged by what it shows from its first two messages on.

mod claims;
mod conn;
mod cx;
mod lnet;
mod maps;
mod private;
mod rds;
mod rds_pair;
mod sink;
mod stream;
mod transfers;

use std::{collections::BTreeMap, io::Read, path::Path};

use ::lnet::proto::{Body, Message as Kib};
use roce_pcap::{
    Capture, Checker, Error, Finding, FrameReport, Report, Setup,
    judge::{ConnectionMessage, Event, EventKind, Observed, Stated, UpperJudge},
};
use roce_port::cm::mad::{Message, Rep, Req};

use self::{
    conn::{Conn, PairKey, Protocol},
    lnet::Lnet,
    rds::Rds,
    rds_pair::RdsPair,
};
use crate::{recognize, service::Service};

/// Connections at most; the oldest are no longer judged.
const MAX_CONNS: usize = 1024;
/// Pairs of RDS nodes at most; further ones are not remembered over a connection's end.
const MAX_PAIRS: usize = 4096;
/// SENDs by which a conversation is recognized, or taken for that of another protocol.
const MAX_LOOKS: u8 = 64;

/// Conversation of the transport.
#[derive(Debug)]
enum Slot {
    /// So many SENDs were looked at; the last one was of this service.
    Unknown(u8, Option<Service>),
    /// Of another protocol.
    Other,
    /// Of one that is judged.
    Judged(Box<Conn>),
    /// Forgotten for a newer one.
    Forgotten,
}

/// Judges RDS and LNet.
#[derive(Default, Debug)]
pub struct ProtocolJudge {
    /// By the transport's index.
    slots: Vec<Slot>,
    /// Connections that are judged, the oldest first, and their slots.
    judged: BTreeMap<u64, usize>,
    serials: u64,
    pairs: BTreeMap<PairKey, RdsPair>,
}

impl ProtocolJudge {
    /// Returns what checkers of captures begin with: this judge, and queue pairs that the user names.
    pub fn setup(stated: &[Stated]) -> Setup {
        Setup {
            stated: stated.to_vec(),
            upper: Some(|| Box::new(Self::default())),
        }
    }

    fn slot(&mut self, index: usize) -> &mut Slot {
        if index >= self.slots.len() {
            self.slots.resize_with(index + 1, || Slot::Unknown(0, None));
        }
        &mut self.slots[index]
    }

    /// Enters a connection.
    fn enter(&mut self, index: usize, protocol: Protocol, named: bool, proven: bool) {
        while self.judged.len() >= MAX_CONNS {
            if let Some((_, oldest)) = self.judged.pop_first() {
                *self.slot(oldest) = Slot::Forgotten;
            }
        }
        if let Some(key) = match &protocol {
            Protocol::Rds(_, pair) => *pair,
            Protocol::Lnet(_) => None,
        } && self.pairs.len() < MAX_PAIRS
        {
            self.pairs.entry(key).or_default();
        }
        self.serials += 1;
        let serial = self.serials;
        self.judged.insert(serial, index);
        *self.slot(index) = Slot::Judged(Box::new(Conn::new(serial, protocol, named, proven)));
    }

    /// Looks at the SENDs of a conversation of which the beginning is not known. Two in a row decide.
    fn look(&mut self, event: &Event, o: &Observed<'_>) {
        let EventKind::Request { repeated: false, .. } = event.kind else {
            return;
        };
        let info = event.opcode.info();
        if !info.position.starts() || info.class != roce_bth::Class::Send {
            return;
        }
        let found = recognize::upper(o);
        let Slot::Unknown(looks, before) = self.slot(event.conversation) else {
            return;
        };
        *looks += 1;
        let before = std::mem::replace(before, found);
        let ends = *looks >= MAX_LOOKS;
        let protocol = match found.filter(|_| before == found) {
            Some(Service::Rds) => Protocol::Rds(Box::default(), None),
            Some(Service::Lnet) => Protocol::Lnet(Box::default()),
            _ if ends => {
                *self.slot(event.conversation) = Slot::Other;
                return;
            }
            _ => return,
        };
        self.enter(event.conversation, protocol, false, true);
    }

    /// Enters the connection of a REP.
    fn connect(&mut self, index: usize, req: &Req, rep: &Rep) {
        if !matches!(self.slot(index), Slot::Unknown(0, None)) {
            // A repetition.
            return;
        }
        let protocol = match private::service(req).0 {
            Service::Rds => private::rds(req).map(|private| {
                let (from, to) = private.addresses();
                let key = (from.min(to), from.max(to), private.common().tos);
                Protocol::Rds(Box::new(Rds::begun(to < from)), (from != to).then_some(key))
            }),
            Service::Lnet => lnet(req, rep).map(|lnet| Protocol::Lnet(Box::new(lnet))),
            _ => None,
        };
        if let Some(protocol) = protocol {
            self.enter(index, protocol, true, false);
        }
    }
}

/// Returns the connection of CONNREQ and CONNACK.
fn lnet(req: &Req, rep: &Rep) -> Option<Lnet> {
    let request = private::conn_req(req)?;
    let answer = Kib::parse(&rep.private_data).ok()?;
    match answer.body {
        Body::ConnAck(params) => Some(Lnet::begun(&request, &answer, params)),
        _ => None,
    }
}

impl UpperJudge for ProtocolJudge {
    fn packet(&mut self, event: &Event, packet: &Observed<'_>, findings: &mut Vec<Finding>) {
        let pairs = &mut self.pairs;
        match self.slots.get_mut(event.conversation) {
            Some(Slot::Other | Slot::Forgotten) => {}
            Some(Slot::Judged(conn)) => {
                let pair = conn.pair().and_then(|key| pairs.get_mut(&key));
                conn.packet(event, packet, pair, findings);
            }
            Some(Slot::Unknown(..)) | None => self.look(event, packet),
        }
    }

    fn connection(&mut self, message: &ConnectionMessage<'_>, findings: &mut Vec<Finding>) {
        private::judge(message, findings);
        if let (Some(index), Some(req), Message::Rep(rep)) = (message.conversation, message.request, message.message) {
            self.connect(index, req, rep);
        }
    }

    fn merged(&mut self, part: usize, whole: usize) {
        // Both begin again: their messages can't be put in one order.
        for index in [part, whole] {
            if let Slot::Judged(conn) = std::mem::replace(self.slot(index), Slot::Unknown(0, None)) {
                self.judged.remove(&conn.serial);
            }
        }
    }

    fn not_checked(&self, conversation: usize) -> Vec<String> {
        match self.slots.get(conversation) {
            Some(Slot::Judged(conn)) => conn.not_checked(),
            Some(Slot::Forgotten) => vec!["RDS or LNet: more than 1024 connections".to_owned()],
            Some(Slot::Unknown(..) | Slot::Other) | None => Vec::new(),
        }
    }
}

/// Creates a checker that also judges RDS and LNet; `name` is what its report calls the capture.
pub fn checker(name: impl Into<String>) -> Checker {
    Checker::with(name, &ProtocolJudge::setup(&[]))
}

/// Checks a capture file, with RDS and LNet.
///
/// # Errors
/// When the file cannot be opened or is not a capture.
pub fn check_file(path: impl AsRef<Path>) -> Result<Report, Error> {
    let name = path.as_ref().display().to_string();
    Ok(roce_pcap::check(checker(name), Capture::open(path)?, |_| {}))
}

/// Checks a capture, with RDS and LNet, and hands each RoCEv2 frame to `each`; `name` is what the report calls it.
///
/// # Errors
/// When the bytes are not a capture.
pub fn check_reader(name: &str, reader: impl Read, each: impl FnMut(&FrameReport)) -> Result<Report, Error> {
    Ok(roce_pcap::check(checker(name), Capture::new(reader)?, each))
}
