//! Connection as the node's peer sees it: a second reading of the protocol, which the node's messages have to agree with.

use lnet::proto::{Body, Completion, Fragment, Handle, LnetHdr, Message, MsgType, Nid, Operation, RdmaDesc};
use roce_verbs::{
    RemoteAddr, SendOp,
    provider::{CmRef, QpId},
};

/// Names of the node's that a peer keeps, at most.
const MAX_NAMES: usize = 64;

/// Credits, by the rules of version 2: messages that each side may send.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ledger {
    pub(super) depth: u16,
    pub(super) node: u16,
    pub(super) peer: u16,
    /// Credits that the peer has to give back.
    pub(super) owed: u16,
}

/// Memory that a peer has described, and the cookie of its DONE.
struct Sink {
    kind: MsgType,
    cookie: u64,
    key: u32,
    frags: Vec<Fragment>,
}

impl Sink {
    fn has(&self, write: &(RemoteAddr, usize)) -> bool {
        let (to, len) = (write.0, write.1 as u64);
        let is_in = |frag: &Fragment| frag.addr == to.addr && len <= u64::from(frag.nob);
        self.key == to.rkey.0 && self.frags.iter().any(is_in)
    }
}

/// Memory that the node has described.
#[derive(Clone, Copy, Debug)]
pub(super) struct Granted {
    /// DONE that ends it.
    pub(super) kind: MsgType,
    pub(super) cookie: u64,
    pub(super) key: u32,
    pub(super) frag: Fragment,
}

/// Effect of a message of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effect {
    /// It breaks the protocol: the node ends the connection.
    Ends,
    /// It may be right.
    Counts,
    /// It ends this transfer, if it is right: from then on the memory is not the peer's.
    Frees(u32, Fragment),
}

/// See the module.
pub(super) struct Link {
    pub(super) cm: CmRef,
    pub(super) peer: Nid,
    /// The peer's incarnation.
    pub(super) stamp: u64,
    /// The node has begun it.
    pub(super) is_nodes: bool,
    /// Messages that were asked for.
    pub(super) asked: u16,
    pub(super) qp: Option<QpId>,
    /// From the time on at which the peer may send.
    pub(super) ledger: Option<Ledger>,
    /// PUT_REQs of the peer without an answer.
    puts: Vec<u64>,
    sinks: Vec<Sink>,
    written: Vec<(RemoteAddr, usize)>,
    /// PUT_REQs of the node without an answer.
    pub(super) announced: Vec<(u64, u32)>,
    pub(super) granted: Vec<Granted>,
    /// GETs and PUTs of the node that want an answer, and the bytes of that.
    pub(super) handles: Vec<(Handle, u32, bool)>,
}

impl Link {
    pub(super) fn new(cm: CmRef, peer: Nid, stamp: u64, is_nodes: bool) -> Self {
        Self {
            cm,
            peer,
            stamp,
            is_nodes,
            asked: 0,
            qp: None,
            ledger: None,
            puts: Vec::new(),
            sinks: Vec::new(),
            written: Vec::new(),
            announced: Vec::new(),
            granted: Vec::new(),
            handles: Vec::new(),
        }
    }

    pub(super) fn stands(&mut self, depth: u16) {
        self.ledger = Some(Ledger {
            depth,
            node: depth,
            peer: depth,
            owed: 0,
        });
    }

    /// Receives that the node must have posted for what its peer may send: messages with a credit, answers, and two NOOPs.
    pub(super) fn receives(&self) -> usize {
        let credits = self.ledger.map_or(0, |ledger| ledger.peer);
        usize::from(credits) + self.announced.len() + self.granted.len() + 2
    }

    /// Counts a message of the peer, which the node is to be given next.
    pub(super) fn sends(&mut self, bytes: &[u8], (us, node): ((Nid, u64), (Nid, u64))) -> Effect {
        let Ok(message) = Message::parse(bytes) else {
            return Effect::Ends;
        };
        let is_its = ((message.src, message.src_stamp), (message.dst, message.dst_stamp)) == (us, node);
        let Some(ledger) = self.ledger.as_mut().filter(|_| is_its) else {
            return Effect::Ends;
        };
        let costs = matches!(
            message.body.kind(),
            MsgType::Immediate | MsgType::PutReq | MsgType::GetReq
        );
        let credits = u16::from(message.credits);
        if ledger.node + credits > ledger.depth || (costs && ledger.peer == 0) {
            return Effect::Ends;
        }
        ledger.node += credits;
        ledger.owed = ledger.owed.saturating_sub(credits);
        ledger.peer -= u16::from(costs);
        self.says(&message.body)
    }

    fn says(&mut self, body: &Body<'_>) -> Effect {
        let is_asked = match *body {
            Body::ConnReq(_) | Body::ConnAck(_) => false,
            Body::Noop | Body::Immediate { .. } => true,
            Body::PutReq { cookie, .. } => {
                self.puts.push(cookie);
                true
            }
            Body::GetReq { cookie, desc, .. } => {
                self.describe(MsgType::GetDone, cookie, &desc);
                true
            }
            Body::PutAck {
                src_cookie,
                dst_cookie,
                desc,
            } => {
                self.describe(MsgType::PutDone, dst_cookie, &desc);
                self.is_answered(src_cookie)
            }
            Body::PutNak(done) => self.is_answered(done.cookie),
            Body::PutDone(done) => return self.ends(MsgType::PutDone, done),
            Body::GetDone(done) => return self.ends(MsgType::GetDone, done),
        };
        if is_asked { Effect::Counts } else { Effect::Ends }
    }

    fn describe(&mut self, kind: MsgType, cookie: u64, desc: &RdmaDesc<'_>) {
        self.sinks.push(Sink {
            kind,
            cookie,
            key: desc.key,
            frags: desc.frags.iter().collect(),
        });
    }

    /// The peer answers a PUT_REQ, whose buffer is free again. Returns whether there is one.
    fn is_answered(&mut self, cookie: u64) -> bool {
        let at = self.announced.iter().position(|(of, _)| *of == cookie);
        at.map(|at| self.announced.remove(at)).is_some()
    }

    fn ends(&mut self, kind: MsgType, done: Completion) -> Effect {
        let is_it = |granted: &Granted| (granted.kind, granted.cookie) == (kind, done.cookie);
        let Some(at) = self.granted.iter().position(is_it) else {
            return Effect::Ends;
        };
        let granted = self.granted.remove(at);
        match u32::try_from(done.status) {
            Ok(len) if len > granted.frag.nob => Effect::Ends,
            _ => Effect::Frees(granted.key, granted.frag),
        }
    }

    /// Reads what the node has sent.
    pub(super) fn reads(&mut self, op: SendOp, bytes: &[u8], (us, node): ((Nid, u64), (Nid, u64))) {
        match op {
            SendOp::Write(to) => return self.written.push((to, bytes.len())),
            SendOp::Send => {}
            op => panic!("a node that posts {op:?}"),
        }
        let message = Message::parse(bytes).expect("a message");
        assert_eq!(
            ((message.src, message.src_stamp), (message.dst, message.dst_stamp)),
            (node, us)
        );
        assert!(message.trailing.is_empty() && message.checksum == 0);
        let costs = matches!(
            message.body.kind(),
            MsgType::Immediate | MsgType::PutReq | MsgType::GetReq
        );
        let ledger = self.ledger.as_mut().expect("a connection that stands");
        ledger.peer += u16::from(message.credits);
        assert!(ledger.peer <= ledger.depth, "{ledger:?}: more credits than there are");
        if costs {
            ledger.node = ledger.node.checked_sub(1).expect("a credit");
            ledger.owed += 1;
        }
        self.hears(&message);
        assert!(self.written.is_empty(), "data that no message ends");
    }

    fn hears(&mut self, message: &Message<'_>) {
        match message.body {
            Body::Noop => {}
            Body::ConnReq(_) | Body::ConnAck(_) => panic!("{message:?} amid a connection"),
            Body::Immediate { hdr, payload } => {
                assert_eq!(hdr.payload_length.get() as usize, payload.len());
                self.operation(message, hdr);
            }
            Body::PutReq { hdr, cookie } => {
                self.announced.push((cookie, hdr.payload_length.get()));
                self.operation(message, hdr);
            }
            Body::GetReq { hdr, cookie, desc } => {
                self.grant(MsgType::GetDone, cookie, &desc);
                self.operation(message, hdr);
            }
            Body::PutAck {
                src_cookie,
                dst_cookie,
                desc,
            } => {
                self.answers_put(src_cookie);
                self.grant(MsgType::PutDone, dst_cookie, &desc);
            }
            Body::PutNak(done) => {
                self.answers_put(done.cookie);
                assert!(done.status <= 0);
            }
            Body::PutDone(done) => self.done(MsgType::PutDone, done),
            Body::GetDone(done) => self.done(MsgType::GetDone, done),
        }
    }

    fn operation(&mut self, message: &Message<'_>, hdr: &LnetHdr) {
        assert_eq!((hdr.src(), hdr.dst()), (message.src, message.dst));
        let name = match hdr.check().expect("an operation") {
            Operation::Get {
                return_md, sink_length, ..
            } => Some((return_md, sink_length, false)),
            Operation::Put { ack_md, .. } if ack_md != Handle::NONE => Some((ack_md, hdr.payload_length.get(), true)),
            _ => None,
        };
        self.handles
            .extend(name.filter(|_| matches!(message.body, Body::Immediate { .. } | Body::PutReq { .. })));
        let more = self.handles.len().saturating_sub(MAX_NAMES);
        self.handles.drain(..more);
    }

    fn grant(&mut self, kind: MsgType, cookie: u64, desc: &RdmaDesc<'_>) {
        assert_eq!(desc.frags.len(), 1);
        let frag = desc.frags.get(0).expect("a fragment");
        let key = desc.key;
        assert!(frag.nob > 0);
        self.granted.push(Granted {
            kind,
            cookie,
            key,
            frag,
        });
    }

    fn answers_put(&mut self, cookie: u64) {
        let at = self.puts.iter().position(|of| *of == cookie);
        self.puts.remove(at.expect("an answer to a PUT_REQ"));
    }

    /// The node says that it has written, and has done so where it was told.
    fn done(&mut self, kind: MsgType, done: Completion) {
        let written = core::mem::take(&mut self.written);
        let is_it = |sink: &Sink| {
            let is_its = (sink.kind, sink.cookie) == (kind, done.cookie);
            is_its && written.iter().all(|write| sink.has(write))
        };
        let at = self
            .sinks
            .iter()
            .position(is_it)
            .expect("memory that the peer has described");
        self.sinks.remove(at);
        let bytes: usize = written.iter().map(|(_, len)| len).sum();
        match usize::try_from(done.status) {
            Ok(status) => assert_eq!(status, bytes, "the status is not what was written"),
            Err(_) => assert_eq!(bytes, 0, "data of a transfer that has failed"),
        }
    }
}
