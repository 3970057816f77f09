//! LNet over o2iblnd: names, incarnations, credits, cookies, bulk data.

use ::lnet::proto::{Body, Checksum, Completion, ConnParams, MAX_MSG, Message as Kib, Nid, ProtoError, RdmaDesc};
use roce_bth::Reth;
use roce_pcap::Rule;

use super::{
    claims::Missing,
    cx::Cx,
    sink::Sink,
    stream::Whole,
    transfers::{Kind, Request, Transfers},
};
use crate::credits::{Credits, Imbalance, takes_credit};

/// Node of a connection, as its messages name it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Node {
    nid: Nid,
    stamp: u64,
}

/// LNet connection.
#[derive(Default, Debug)]
pub(super) struct Lnet {
    nodes: [Option<Node>; 2],
    /// `None`: not known.
    credits: Option<Credits>,
    transfers: Transfers,
    /// Nothing is missing of a side's messages.
    whole: [bool; 2],
}

impl Lnet {
    /// Creates a connection whose beginning the capture has, of CONNREQ and CONNACK.
    pub(super) fn begun(request: &Kib<'_>, answer: &Kib<'_>, params: ConnParams) -> Self {
        let node = |kib: &Kib<'_>| Node {
            nid: kib.src,
            stamp: kib.src_stamp,
        };
        Self {
            nodes: [Some(node(request)), Some(node(answer))],
            credits: Some(Credits::new(params.queue_depth)),
            whole: [true; 2],
            ..Self::default()
        }
    }

    /// Returns whether credits are counted.
    pub(super) const fn counts_credits(&self) -> bool {
        self.credits.is_some()
    }

    /// Returns whether cookies are paired.
    pub(super) fn pairs_cookies(&self) -> bool {
        self.whole == [true; 2]
    }

    /// Notes that messages of a side are missing in the capture.
    pub(super) fn lost(&mut self, sender: usize) {
        self.credits = None;
        self.whole[sender] = false;
        self.transfers.lost(sender);
    }

    /// Returns whether a message is what a claim takes for missing.
    pub(super) fn is(missing: Missing, message: &Whole<'_>) -> bool {
        let Ok(kib) = Kib::parse(message.bytes) else {
            return false;
        };
        let (made, key) = match kib.body {
            Body::PutReq { cookie, .. } => (Some(cookie), None),
            Body::PutAck { dst_cookie, desc, .. } => (Some(dst_cookie), Some(desc.key)),
            Body::GetReq { cookie, desc, .. } => (Some(cookie), Some(desc.key)),
            _ => (None, None),
        };
        match missing {
            Missing::Cookie(cookie) => made == Some(cookie),
            Missing::Key(wanted) => key == Some(wanted),
            Missing::Credit => kib.credits > 0 || takes_credit(&kib.body),
            Missing::Sequence(_) | Missing::Map => false,
        }
    }

    /// Judges a SEND or WRITE.
    pub(super) fn message(&mut self, message: &Whole<'_>, cx: &mut Cx<'_>) {
        if let Some(reth) = message.reth {
            self.write(&reth, cx);
            return;
        }
        if message.len > MAX_MSG {
            cx.find(
                Rule::LnetFormat,
                format!("a message of {} bytes, at most {MAX_MSG}", message.len),
            );
            self.lost(cx.sender);
            return;
        }
        let kib = match Kib::parse(message.bytes) {
            Ok(kib) => kib,
            Err(why) => {
                // A kernel answers messages of version 1.
                if !matches!(why, ProtoError::Version1 | ProtoError::Version(_)) {
                    cx.find(Rule::LnetFormat, why.to_string());
                }
                self.lost(cx.sender);
                return;
            }
        };
        if let Some(text) = wrong_checksum(&kib) {
            cx.find(Rule::LnetChecksum, text);
        }
        check_header(&kib, cx);
        self.names(&kib, cx);
        self.ledger(&kib, cx);
        self.body(&kib.body, cx);
    }

    /// Compares the nodes of a message with those of the connection.
    fn names(&mut self, kib: &Kib<'_>, cx: &mut Cx<'_>) {
        let named = [
            (cx.sender, kib.src, kib.src_stamp),
            (cx.receiver(), kib.dst, kib.dst_stamp),
        ];
        for (side, nid, stamp) in named {
            let known = *self.nodes[side].get_or_insert(Node { nid, stamp });
            if known.nid != nid {
                let text = format!(
                    "{} names {nid}, the connection is with {}",
                    kib.body.kind().name(),
                    known.nid
                );
                cx.find(Rule::LnetNid, text);
            }
            if known.stamp != stamp {
                let text = format!(
                    "{} names incarnation {stamp:#x} of {nid}, the connection is with {:#x}",
                    kib.body.kind().name(),
                    known.stamp
                );
                cx.find(Rule::LnetStamp, text);
            }
        }
    }

    /// Counts the credits that a message returns and takes.
    fn ledger(&mut self, kib: &Kib<'_>, cx: &mut Cx<'_>) {
        let Some(credits) = &mut self.credits else { return };
        let (kind, depth) = (kib.body.kind().name(), credits.depth());
        for imbalance in credits.count(cx.sender, kib).into_iter().flatten() {
            let text = match imbalance {
                Imbalance::Returned { taken } => {
                    format!(
                        "{kind} returns {} credits, and {taken} of {depth} were taken",
                        kib.credits
                    )
                }
                Imbalance::NoneLeft => format!("{kind} without a credit: {depth} messages are not returned"),
            };
            cx.claim(Rule::LnetCredits, Missing::Credit, text);
        }
    }

    fn body(&mut self, body: &Body<'_>, cx: &mut Cx<'_>) {
        match *body {
            Body::ConnReq(_) | Body::ConnAck(_) => {
                cx.find(Rule::LnetFormat, format!("{} on a connection", body.kind().name()));
            }
            Body::Noop | Body::Immediate { .. } => {}
            Body::PutReq { cookie, .. } => self.open(cx, Kind::PutReq, cookie, None),
            Body::GetReq { cookie, desc, .. } => self.open(cx, Kind::GetReq, cookie, Some(desc)),
            Body::PutAck {
                src_cookie,
                dst_cookie,
                desc,
            } => {
                self.answer(cx, body, Kind::PutReq, src_cookie);
                self.open(cx, Kind::PutAck, dst_cookie, Some(desc));
            }
            Body::PutNak(done) => drop(self.answer(cx, body, Kind::PutReq, done.cookie)),
            Body::PutDone(done) => self.done(cx, body, Kind::PutAck, done),
            Body::GetDone(done) => self.done(cx, body, Kind::GetReq, done),
        }
    }

    fn open(&mut self, cx: &Cx<'_>, kind: Kind, cookie: u64, desc: Option<RdmaDesc<'_>>) {
        self.transfers.add(Request {
            maker: cx.sender,
            kind,
            cookie,
            sink: desc.map(|desc| Sink::new(&desc)),
        });
    }

    /// Finds the request that a message answers.
    fn answer(&mut self, cx: &mut Cx<'_>, body: &Body<'_>, to: Kind, cookie: u64) -> Option<Request> {
        let found = self.transfers.take(cx.receiver(), to, cookie);
        if found.is_none() && self.whole[cx.receiver()] && self.transfers.is_complete() {
            let text = format!(
                "{} with cookie {cookie:#x}, and no {} with it is open",
                body.kind().name(),
                to.name()
            );
            cx.claim(Rule::LnetCookie, Missing::Cookie(cookie), text);
        }
        found
    }

    fn done(&mut self, cx: &mut Cx<'_>, body: &Body<'_>, to: Kind, done: Completion) {
        let sink = self.answer(cx, body, to, done.cookie).and_then(|request| request.sink);
        let written = sink.as_ref().and_then(Sink::bytes);
        if let (Ok(status), Some(written)) = (u64::try_from(done.status), written)
            && status != written
        {
            let text = format!("{} reports {status} bytes, {written} were written", body.kind().name());
            cx.find(Rule::LnetBytes, text);
        }
    }

    /// Judges a WRITE of bulk data.
    fn write(&mut self, reth: &Reth, cx: &mut Cx<'_>) {
        let key = reth.rkey.0;
        let complete = self.whole[cx.receiver()] && self.transfers.is_complete();
        match self.transfers.sink(cx.receiver(), key) {
            Some(sink) => {
                if let Some(text) = sink.write(reth.va, reth.dma_len) {
                    cx.find(Rule::LnetSink, text);
                }
            }
            None if complete => {
                let text = format!(
                    "a WRITE of {} bytes with key {key:#x}, which no open request describes",
                    reth.dma_len
                );
                cx.claim(Rule::LnetSink, Missing::Key(key), text);
            }
            None => {}
        }
    }
}

/// Checks the LNet header of a message as a receiver does.
fn check_header(kib: &Kib<'_>, cx: &mut Cx<'_>) {
    let Some(hdr) = kib.body.hdr() else { return };
    if let Err(why) = hdr.check() {
        cx.find(Rule::LnetFormat, why.to_string());
    } else if let Body::Immediate { payload, .. } = kib.body
        && hdr.payload_length.get() as usize > payload.len()
    {
        let text = format!(
            "an IMMEDIATE with {} bytes of data by its header has {}",
            hdr.payload_length,
            payload.len()
        );
        cx.find(Rule::LnetFormat, text);
    }
}

/// Describes the checksum of a message, if it is wrong.
pub(super) fn wrong_checksum(kib: &Kib<'_>) -> Option<String> {
    let why = match kib.judge_checksum() {
        Checksum::Wrong => "is wrong",
        Checksum::ZeroPayload => "was made over zeros instead of the data",
        Checksum::None | Checksum::Signed | Checksum::Unsigned => return None,
    };
    Some(format!(
        "the checksum {:#010x} of {} {why}",
        kib.checksum,
        kib.body.kind().name()
    ))
}
