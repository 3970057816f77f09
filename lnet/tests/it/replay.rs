//! A node in the place of either kernel in captures: it gets what the captured peer sent, and is asked for the operations that the captured
//! side began. Each message of its own has to be the kernel's, byte for byte, but for names that each side chooses (handles, cookies, keys
//! and addresses); what else differs is counted, and has a reason.

use std::{collections::VecDeque, net::SocketAddr, time::Duration};

use lnet::{
    Buffer, Config, Entry, EntryOptions, Get, Node, Put,
    proto::{Body, Fragments, Handle, LnetHdr, Message, MsgType, Nid, Operation, PING_PORTAL, PORT, PingInfo, Reject},
};
use roce_verbs::{
    Instant, SendOp,
    provider::{CmKind, CmRef, Cx, DeviceIx, NoAnswer, Provider as _, QpId, RejectReason},
};

use crate::{
    capture::{Cm, Item, read_of},
    provider::{Keys, Scripted},
};

const HOSTS: [[u8; 4]; 2] = [[10, 77, 0, 1], [10, 77, 0, 2]];

/// Differences of a node from the kernel in whose place it is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Differences {
    /// Messages that give back another number of credits: the kernel posts a buffer again only after it has answered.
    credits: usize,
    /// Ping information: the node does not take part in discovery, and says so.
    pings: usize,
    /// NOOPs of the kernel: its timers and thresholds meet other moments.
    noops: usize,
    /// Messages of the node that the kernel did not send.
    more: usize,
    /// Frames of other answers to requests to connect.
    answers: Vec<u64>,
}

/// Node, and what is known of the captured side's names.
struct Player {
    node: Node,
    provider: Scripted,
    listener: CmRef,
    now: Instant,
    own: Nid,
    peer: Nid,
    cm: Option<CmRef>,
    qp: Option<QpId>,
    /// Messages of the node that the kernel's have not been compared with.
    ours: VecDeque<Vec<u8>>,
    /// The kernel's names and ours.
    handles: Vec<(Handle, Handle)>,
    cookies: Vec<(u64, u64)>,
    submitted: Vec<u64>,
    equal: usize,
    differences: Differences,
    wrong: Vec<String>,
}

/// Items of both hosts, and whether they are the first one's.
fn items(name: &str) -> Vec<(bool, Item)> {
    let of = |host: usize| read_of(&format!("lnet/{name}.pcap"), Some(HOSTS[host])).into_iter();
    let mut items: Vec<(bool, Item)> = of(0).map(|item| (true, item)).collect();
    items.extend(of(1).map(|item| (false, item)));
    items.sort_by_key(|(_, item)| match item {
        Item::Private(frame, ..) | Item::Send(frame, _) => *frame,
    });
    items
}

fn random(out: &mut [u8]) {
    out.fill(7);
}

fn buffer(len: usize) -> Buffer {
    // A buffer has at least a byte.
    Buffer::allocate(len.max(1)).unwrap().part(0, len).unwrap()
}

/// Returns whether a message begins an operation of its sender.
fn begins(message: &Message<'_>) -> bool {
    let operation = message.body.hdr().and_then(|hdr| hdr.operation().ok());
    matches!(operation, Some(Operation::Put { .. } | Operation::Get { .. }))
}

/// Names in a message that its sender chose: the handle, and the cookie.
fn names(message: &Message<'_>) -> (Option<Handle>, Option<u64>) {
    let handle = match message.body.hdr().and_then(|hdr| hdr.operation().ok()) {
        Some(Operation::Put { ack_md, .. }) if ack_md != Handle::NONE => Some(ack_md),
        Some(Operation::Get { return_md, .. }) => Some(return_md),
        _ => None,
    };
    let cookie = match message.body {
        Body::PutReq { cookie, .. } | Body::GetReq { cookie, .. } => Some(cookie),
        Body::PutAck { dst_cookie, .. } => Some(dst_cookie),
        _ => None,
    };
    (handle, cookie)
}

/// A message with other names, of the sender and of what it answers.
fn renamed(
    message: &Message<'_>,
    handle: impl Fn(Handle) -> Handle,
    cookie: impl Fn(u64) -> u64,
    credits: Option<u8>,
    keeps_memory: bool,
) -> Vec<u8> {
    let hdr = message.body.hdr().map(|hdr| {
        let operation = match hdr.operation().unwrap() {
            Operation::Put {
                ack_md,
                match_bits,
                hdr_data,
                portal,
                offset,
            } => Operation::Put {
                ack_md: if ack_md == Handle::NONE { ack_md } else { handle(ack_md) },
                match_bits,
                hdr_data,
                portal,
                offset,
            },
            Operation::Get {
                return_md,
                match_bits,
                portal,
                src_offset,
                sink_length,
            } => Operation::Get {
                return_md: handle(return_md),
                match_bits,
                portal,
                src_offset,
                sink_length,
            },
            Operation::Reply { dst_md } => Operation::Reply { dst_md: handle(dst_md) },
            Operation::Ack {
                dst_md,
                match_bits,
                mlength,
            } => Operation::Ack {
                dst_md: handle(dst_md),
                match_bits,
                mlength,
            },
            other => other,
        };
        LnetHdr::new(hdr.dst(), hdr.src(), hdr.payload_length.get(), &operation)
    });
    let mut renamed = *message;
    let mut frags = Vec::new();
    if let Body::PutAck { desc, .. } | Body::GetReq { desc, .. } = &message.body {
        frags = desc.frags.iter().collect();
    }
    if !keeps_memory {
        frags.iter_mut().for_each(|frag| frag.addr = 0);
    }
    match &mut renamed.body {
        Body::Immediate { hdr: of, .. } => *of = hdr.as_ref().unwrap(),
        Body::PutReq {
            hdr: of,
            cookie: number,
        } => {
            *of = hdr.as_ref().unwrap();
            *number = cookie(*number);
        }
        Body::GetReq {
            hdr: of,
            cookie: number,
            desc,
        } => {
            *of = hdr.as_ref().unwrap();
            *number = cookie(*number);
            desc.key = if keeps_memory { desc.key } else { 0 };
            desc.frags = Fragments::List(&frags);
        }
        Body::PutAck {
            src_cookie,
            dst_cookie,
            desc,
        } => {
            *src_cookie = cookie(*src_cookie);
            *dst_cookie = cookie(*dst_cookie);
            desc.key = if keeps_memory { desc.key } else { 0 };
            desc.frags = Fragments::List(&frags);
        }
        Body::PutNak(done) | Body::PutDone(done) | Body::GetDone(done) => done.cookie = cookie(done.cookie),
        Body::ConnReq(_) | Body::ConnAck(_) | Body::Noop => {}
    }
    if let Some(credits) = credits {
        renamed.credits = credits;
    }
    renamed.to_bytes()
}

impl Player {
    fn start(name: &str, is_first: bool) -> (Self, Vec<(bool, Item)>) {
        let items = items(name);
        let own = Nid::o2ib(HOSTS[usize::from(!is_first)].into());
        let peer = Nid::o2ib(HOSTS[usize::from(is_first)].into());
        let stamp = items.iter().find_map(|(of, item)| match item {
            Item::Private(_, Cm::Req | Cm::Rep, _, bytes) if *of == is_first => {
                Message::parse(bytes).ok().map(|message| message.src_stamp)
            }
            Item::Private(_, Cm::Rej, _, bytes) if *of == is_first => Reject::parse(bytes)
                .ok()
                .map(|reject| reject.incarnation)
                .filter(|stamp| *stamp != 0),
            _ => None,
        });
        let mut provider = Scripted::new(&[Keys::INSTANT]);
        let now = Instant::ZERO + Duration::from_secs(1);
        let mut cx = Cx {
            now,
            provider: &mut provider,
            random: &mut random,
        };
        let node = Node::listen(&mut cx, Config::default(), own, stamp.expect("an incarnation")).unwrap();
        let listener = *provider.cms.keys().next().unwrap();
        let player = Self {
            node,
            provider,
            listener,
            now,
            own,
            peer,
            cm: None,
            qp: None,
            ours: VecDeque::new(),
            handles: Vec::new(),
            cookies: Vec::new(),
            submitted: Vec::new(),
            equal: 0,
            differences: Differences::default(),
            wrong: Vec::new(),
        };
        (player, items)
    }

    /// Plays one side of a capture.
    fn play(name: &str, is_first: bool) -> Self {
        let (mut player, items) = Self::start(name, is_first);
        for (at, (of, item)) in items.iter().enumerate() {
            let is_ours = *of == is_first;
            if matches!(item, Item::Private(_, Cm::Req, ..)) && name.starts_with("odd-") {
                // Connections of these captures follow each other.
                player.disconnect();
            }
            match item {
                Item::Private(_, Cm::Req, _, bytes) if is_ours => player.connects(bytes, &items[at..], is_first),
                Item::Private(_, Cm::Req, port, bytes) => player.asked(*port, bytes),
                Item::Private(frame, Cm::Rep, _, bytes) if is_ours => player.accepts(*frame, bytes),
                Item::Private(_, Cm::Rep, _, bytes) => player.established(bytes.clone()),
                Item::Private(frame, Cm::Rej, _, bytes) if is_ours => player.rejects(*frame, bytes),
                Item::Private(_, Cm::Rej, _, bytes) => player.rejected(bytes),
                Item::Send(frame, bytes) if is_ours => {
                    let message = Message::parse(bytes).unwrap();
                    player.begin(*frame, &message);
                    player.compare(*frame, &message);
                }
                Item::Send(_, bytes) => player.deliver(&Message::parse(bytes).unwrap(), &items[at..], is_first),
            }
        }
        player.differences.more = player.ours.len();
        player
    }

    fn with<T>(&mut self, call: impl FnOnce(&mut Node, &mut Cx<'_>) -> T) -> T {
        let mut cx = Cx {
            now: self.now,
            provider: &mut self.provider,
            random: &mut random,
        };
        call(&mut self.node, &mut cx)
    }

    /// Until the node has nothing left to do.
    fn settle(&mut self) {
        loop {
            let mut wcs = Vec::new();
            self.provider.poll_completions(&mut wcs, 64).unwrap();
            let event = self.provider.poll_event();
            let is_idle = wcs.is_empty() && event.is_none() && !self.node.wants_turn();
            self.with(|node, cx| {
                for (qp, wc) in &wcs {
                    node.completion(cx, *qp, wc);
                }
                if let Some(event) = &event {
                    node.event(cx, event);
                }
                while node.poll_output().is_some() {}
                node.end_batch(cx);
            });
            if let Some(qp) = self.qp {
                let sends = self.provider.take_sends(qp).into_iter();
                self.ours
                    .extend(sends.filter(|(op, _)| *op == SendOp::Send).map(|(_, bytes)| bytes));
            }
            if is_idle {
                return;
            }
        }
    }

    fn handle_of(&self, theirs: Handle) -> Handle {
        let known = self.handles.iter().find(|(of, _)| *of == theirs);
        known.map_or(theirs, |(_, ours)| *ours)
    }

    fn cookie_of(&self, theirs: u64) -> u64 {
        let known = self.cookies.iter().rev().find(|(of, _)| *of == theirs);
        known.map_or(theirs, |(_, ours)| *ours)
    }

    /// The captured side connects, as it has something to send.
    fn connects(&mut self, bytes: &[u8], after: &[(bool, Item)], is_first: bool) {
        let first = after.iter().find_map(|(of, item)| match item {
            Item::Send(frame, bytes) if *of == is_first => Some((*frame, bytes)),
            _ => None,
        });
        match first.map(|(frame, bytes)| (frame, Message::parse(bytes).unwrap())) {
            Some((frame, message)) if begins(&message) => self.begin(frame, &message),
            _ if self.node.jobs() == 0 => drop(self.node.ping(self.now, self.peer, buffer(272))),
            _ => {}
        }
        // A second attempt may be a second later.
        self.with(|node, cx| node.end_batch(cx));
        let attempt = |cms: &Scripted| {
            let mut ids = cms
                .cms
                .iter()
                .filter(|(_, cm)| cm.peer.is_some_and(|p| p.port() == PORT));
            ids.find(|(_, cm)| cm.qp.is_none()).map(|(id, _)| *id)
        };
        if attempt(&self.provider).is_none()
            && let Some(at) = self.node.next_timeout()
        {
            self.now = self.now.max(at);
            self.with(|node, cx| node.timeout(cx));
            self.settle();
        }
        let Some(cm) = attempt(&self.provider) else {
            return self.wrong.push("the node does not connect".into());
        };
        self.provider.tell(cm, CmKind::Resolved { device: DeviceIx(0) });
        self.settle();
        self.take(cm, bytes);
    }

    /// The node has asked, or accepted, with this private data.
    fn take(&mut self, cm: CmRef, bytes: &[u8]) {
        let Some((qp, params)) = self
            .provider
            .cms
            .get(&cm)
            .and_then(|cm| Some((cm.qp?, cm.params.clone()?)))
        else {
            return self.wrong.push("the node neither connects nor accepts".into());
        };
        (self.cm, self.qp) = (Some(cm), Some(qp));
        let ours = params.private_data;
        match bytes.starts_with(&ours) && (params.initiator_depth, params.responder_resources) == (0, 0) {
            true => self.equal += 1,
            false => self.wrong.push(format!("private data {ours:02x?}, not {bytes:02x?}")),
        }
    }

    fn asked(&mut self, port: u16, bytes: &[u8]) {
        assert_eq!(port, PORT);
        let local = SocketAddr::from((self.own.address(), PORT));
        let peer = SocketAddr::from((self.peer.address(), 1023));
        self.cm = Some(self.provider.ask(self.listener, 0, local, peer, bytes.to_vec()));
        self.settle();
    }

    fn accepts(&mut self, frame: u64, bytes: &[u8]) {
        let cm = self.cm.unwrap();
        if !self.provider.cms.contains_key(&cm) {
            self.differences.answers.push(frame);
            return;
        }
        let before = self.wrong.len();
        self.take(cm, bytes);
        if let Some(wrong) = self.wrong.get_mut(before) {
            *wrong = format!("frame {frame}: {wrong}");
        }
        self.established(Vec::new());
    }

    fn established(&mut self, private_data: Vec<u8>) {
        let cm = self.cm.unwrap();
        self.provider.tell(cm, CmKind::Established { private_data });
        self.settle();
    }

    fn rejects(&mut self, frame: u64, bytes: &[u8]) {
        if bytes.iter().all(|byte| *byte == 0) {
            // The connection manager's, of a request that was not answered.
            self.provider
                .tell(self.cm.unwrap(), CmKind::Unreachable(NoAnswer::Timeout));
            return self.settle();
        }
        match self.provider.rejected.pop() {
            Some((_, ours)) if bytes.starts_with(&ours) && !ours.is_empty() => self.equal += 1,
            Some((_, ours)) => {
                // The fields of a reject that has no word of its sender differ in nothing that counts.
                let (ours, theirs) = (Reject::parse(&ours).unwrap(), Reject::parse(bytes).unwrap());
                self.differences.answers.push(frame);
                if ours.why != theirs.why && ours.why.0 != 3 {
                    self.wrong.push(format!("frame {frame}: {ours:?}, not {theirs:?}"));
                }
            }
            None => {
                self.differences.answers.push(frame);
                self.disconnect();
            }
        }
    }

    /// The peer has ended the connection.
    fn disconnect(&mut self) {
        if let Some(cm) = self.cm.take().filter(|cm| self.provider.cms.contains_key(cm)) {
            self.provider.tell(cm, CmKind::Disconnected);
            self.settle();
        }
        self.qp = None;
    }

    fn rejected(&mut self, bytes: &[u8]) {
        let kind = CmKind::Rejected {
            reason: RejectReason::CONSUMER,
            private_data: bytes.to_vec(),
        };
        self.provider.tell(self.cm.unwrap(), kind);
        self.settle();
    }

    /// The captured side begins an operation.
    fn begin(&mut self, frame: u64, message: &Message<'_>) {
        if !begins(message) || self.submitted.contains(&frame) {
            return;
        }
        self.submitted.push(frame);
        let hdr = message.body.hdr().unwrap();
        let len = hdr.payload_length.get() as usize;
        let begun = match hdr.operation().unwrap() {
            Operation::Put {
                ack_md,
                match_bits,
                hdr_data,
                portal,
                offset,
            } => {
                let source = buffer(len);
                if let Body::Immediate { payload, .. } = message.body {
                    source.write(payload);
                }
                let put = Put {
                    peer: self.peer,
                    portal,
                    match_bits,
                    hdr_data,
                    offset,
                    source,
                    ack: ack_md != Handle::NONE,
                };
                self.node.put(self.now, &put)
            }
            Operation::Get {
                match_bits,
                portal,
                src_offset,
                sink_length,
                ..
            } => {
                let get = Get {
                    peer: self.peer,
                    portal,
                    match_bits,
                    offset: src_offset,
                    sink: buffer(sink_length as usize),
                };
                self.node.get(self.now, &get)
            }
            _ => return,
        };
        begun.unwrap();
        if self.qp.is_some() {
            self.settle();
        }
    }

    /// Returns whether a message of the node is the kernel's, but for names and credits.
    fn is_same(ours: &Message<'_>, theirs: &Message<'_>) -> bool {
        let blank = |message: &Message<'_>| {
            let own = names(message);
            // What the peer has named is the same; of our own names each side has its own.
            let handle = |handle| if Some(handle) == own.0 { Handle::NONE } else { handle };
            let cookie = |cookie| if Some(cookie) == own.1 { 0 } else { cookie };
            renamed(message, handle, cookie, Some(0), false)
        };
        blank(ours) == blank(theirs)
    }

    fn is_ping_reply(message: &Message<'_>) -> bool {
        matches!(message.body, Body::Immediate { payload, .. } if PingInfo::is(payload))
    }

    /// Compares a message of the kernel with the node's.
    fn compare(&mut self, frame: u64, theirs: &Message<'_>) {
        let all: Vec<Vec<u8>> = self.ours.iter().cloned().collect();
        let parsed: Vec<Message<'_>> = all.iter().map(|bytes| Message::parse(bytes).unwrap()).collect();
        let mut at = parsed.iter().position(|ours| Self::is_same(ours, theirs));
        if at.is_none() && Self::is_ping_reply(theirs) {
            at = parsed.iter().position(Self::is_ping_reply);
            self.differences.pings += usize::from(at.is_some());
        }
        let Some(at) = at else {
            match theirs.body.kind() {
                MsgType::Noop => self.differences.noops += 1,
                _ => self
                    .wrong
                    .push(format!("frame {frame}: {theirs:?} is not sent, but {parsed:?}")),
            }
            return;
        };
        let ours = &parsed[at];
        self.equal += 1;
        self.differences.credits += usize::from(ours.credits != theirs.credits);
        let ((our_handle, our_cookie), (handle, cookie)) = (names(ours), names(theirs));
        self.handles.extend(handle.zip(our_handle));
        self.cookies.extend(cookie.zip(our_cookie));
        self.ours.remove(at);
    }

    /// The peer sends a message, which names what the kernel had named.
    fn deliver(&mut self, message: &Message<'_>, after: &[(bool, Item)], is_first: bool) {
        self.prepare(message, after, is_first);
        let is_answer = !begins(message);
        let handle = |handle| if is_answer { self.handle_of(handle) } else { handle };
        let cookie = |cookie| match message.body {
            // Its own.
            Body::PutReq { .. } | Body::GetReq { .. } => cookie,
            Body::PutAck { dst_cookie, .. } if cookie == dst_cookie => cookie,
            _ => self.cookie_of(cookie),
        };
        let bytes = renamed(message, handle, cookie, None, true);
        self.provider.deliver(self.qp.unwrap(), &bytes, None);
        self.settle();
    }

    /// Memory for an operation of the peer, with what the captured side had there.
    fn prepare(&mut self, message: &Message<'_>, after: &[(bool, Item)], is_first: bool) {
        let Some(hdr) = message.body.hdr() else { return };
        let (options, portal, match_bits, memory) = match hdr.operation().unwrap() {
            Operation::Put { portal, match_bits, .. } => {
                let memory = buffer(hdr.payload_length.get() as usize);
                (EntryOptions::PUT, portal, match_bits, memory)
            }
            Operation::Get {
                portal,
                match_bits,
                sink_length,
                return_md,
                ..
            } => {
                let memory = buffer(sink_length as usize);
                let reply = after.iter().find_map(|(of, item)| match item {
                    Item::Send(_, bytes) if *of == is_first => match Message::parse(bytes).unwrap().body {
                        Body::Immediate { hdr, payload }
                            if hdr.operation() == Ok(Operation::Reply { dst_md: return_md }) =>
                        {
                            Some(payload)
                        }
                        _ => None,
                    },
                    _ => None,
                });
                memory.write(reply.unwrap_or_default());
                (EntryOptions::GET, portal, match_bits, memory)
            }
            _ => return,
        };
        if portal != PING_PORTAL {
            self.node.attach(Entry {
                portal,
                from: None,
                match_bits,
                ignore_bits: 0,
                options,
                memory,
                uses: Some(1),
            });
        }
    }
}

fn check(name: &str, is_first: bool, expected: Differences) {
    let played = Player::play(name, is_first);
    let wrong: String = played.wrong.iter().map(|wrong| format!("\n  {wrong}")).collect();
    let host = HOSTS[usize::from(!is_first)];
    assert!(wrong.is_empty(), "{name}, our side {host:?}:{wrong}");
    assert!(played.equal > 0, "{name}");
    assert_eq!(
        played.differences, expected,
        "{name}, our side {host:?}, {} equal",
        played.equal
    );
}

/// Messages with other credits, ping information, NOOPs; `None`: not replayed.
type Counts = Option<(usize, usize, usize)>;

/// Captures, and by host what differs.
const TABLE: [(&str, [Counts; 2]); 13] = [
    ("ping", [Some((0, 1, 0)), Some((0, 2, 0))]),
    ("discover", [Some((2, 1, 0)), Some((4, 2, 0))]),
    ("selftest-ping", [Some((0, 1, 0)), Some((0, 1, 0))]),
    ("brw-read-4k", [Some((0, 1, 0)), Some((0, 1, 0))]),
    ("brw-read-64k", [Some((0, 1, 0)), Some((0, 1, 0))]),
    ("brw-read-3976", [Some((0, 1, 0)), Some((0, 1, 0))]),
    ("brw-write-4k", [Some((4, 1, 0)), Some((0, 1, 0))]),
    ("brw-write-3984", [Some((2, 1, 0)), Some((0, 1, 0))]),
    ("peer-credits-8-42", [Some((0, 0, 0)), Some((0, 1, 0))]),
    ("keepalive", [Some((0, 0, 1)), Some((0, 1, 1))]),
    // The first host opens two connections, the node one.
    ("conns-per-peer-2", [None, Some((0, 2, 0))]),
    ("loss", [Some((6, 1, 0)), Some((0, 2, 0))]),
    // The second host dies and comes back.
    ("restart-killed", [Some((0, 1, 0)), None]),
];

#[test]
fn the_node_sends_what_each_captured_kernel_sent() {
    for (name, hosts) in TABLE {
        for (host, expected) in hosts.into_iter().enumerate() {
            let Some((credits, pings, noops)) = expected else {
                continue;
            };
            // The kernel refuses the first request of another incarnation, and ends the connection that stands. The node takes it, and ends
            // that one once the new one is established: anybody can send such a request.
            let answers = if name == "restart-killed" { vec![9] } else { Vec::new() };
            let expected = Differences {
                credits,
                pings,
                noops,
                answers,
                ..Differences::default()
            };
            check(name, host == 0, expected);
        }
    }
}

#[test]
fn odd_requests_are_answered_as_by_the_kernel() {
    let expected = Differences {
        // The kernel's threshold at depth 1 is 0: it gives back no credits in messages for that alone.
        noops: 2,
        // A depth of 0, with which the kernel can't send; version 1, which the node does not speak (83, 88); a source that is not the
        // packet's; another incarnation, which the kernel refuses once.
        answers: vec![46, 83, 88, 107, 135],
        ..Differences::default()
    };
    check("odd-requests", true, expected);
}
