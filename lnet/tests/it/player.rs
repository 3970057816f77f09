//! A node in the place of one side of a capture.

use std::{collections::VecDeque, net::SocketAddr, time::Duration};

use lnet::{
    Buffer, Config, Entry, EntryOptions, Get, Node, Put,
    proto::{Body, Fragment, Handle, Message, MsgType, Nid, Operation, PING_PORTAL, PORT, PingInfo, Reject},
};
use roce_verbs::{
    Instant, RemoteAddr, SendOp,
    provider::{CmKind, CmRef, Cx, DeviceIx, NoAnswer, Provider as _, QpId, RejectReason},
};

use crate::{
    capture::{Cm, Item},
    conversation::{HOSTS, Written, ends, frame, items, writes},
    names::{begins, is_same, names, renamed},
    provider::{Keys, Scripted},
};

/// Differences of a node from the kernel in whose place it is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Differences {
    /// Messages that give back another number of credits: the kernel posts a buffer again only after it has answered.
    pub(crate) credits: usize,
    /// Ping information: the node does not take part in discovery, and says so.
    pub(crate) pings: usize,
    /// NOOPs of the kernel: its timers and thresholds meet other moments.
    pub(crate) noops: usize,
    /// Messages of the node that the kernel did not send.
    pub(crate) more: usize,
    /// Frames of other requests to connect, and of other answers to them.
    pub(crate) answers: Vec<u64>,
    /// Frames of messages after which the node ends a connection that the kernel goes on with.
    pub(crate) closed: Vec<u64>,
    /// WRITEs of the node that the kernel did not make.
    pub(crate) writes: usize,
}

/// Node, and what is known of the captured side's names.
pub(crate) struct Player {
    node: Node,
    provider: Scripted,
    listener: CmRef,
    now: Instant,
    own: Nid,
    peer: Nid,
    stamp: u64,
    cm: Option<CmRef>,
    qp: Option<QpId>,
    /// WRITEs of the captured side that no message has ended, and those of the node.
    written: VecDeque<Written>,
    our_writes: Vec<(RemoteAddr, Vec<u8>)>,
    /// Keys of memory for ping information.
    pinged: Vec<u32>,
    /// Credits that messages of the node and of the kernel give back.
    pub(crate) given: (u64, u64),
    /// Messages of the node that the kernel's have not been compared with.
    pub(crate) ours: VecDeque<Vec<u8>>,
    /// The kernel's names and ours.
    handles: Vec<(Handle, Handle)>,
    cookies: Vec<(u64, u64)>,
    submitted: Vec<u64>,
    pub(crate) equal: usize,
    pub(crate) differences: Differences,
    pub(crate) wrong: Vec<String>,
}

/// Takes the first, if its frame is before this one.
fn next_before<T>(queue: &mut VecDeque<T>, frame_of: impl Fn(&T) -> u64, frame: u64) -> Option<T> {
    let is_before = queue.front().is_some_and(|first| frame_of(first) < frame);
    is_before.then(|| queue.pop_front()).flatten()
}

fn random(out: &mut [u8]) {
    out.fill(7);
}

fn listen(provider: &mut Scripted, now: Instant, own: [u8; 4], stamp: u64) -> (Node, CmRef) {
    let mut cx = Cx {
        now,
        provider,
        random: &mut random,
    };
    let node = Node::listen(&mut cx, Config::default(), Nid::o2ib(own.into()), stamp).unwrap();
    (node, *provider.cms.keys().next().unwrap())
}

fn buffer(len: usize) -> Buffer {
    // A buffer has at least a byte.
    Buffer::allocate(len.max(1)).unwrap().part(0, len).unwrap()
}

impl Player {
    fn start(name: &str, is_first: bool, items: &[(bool, Item)]) -> Self {
        let (own, peer) = (HOSTS[usize::from(!is_first)], HOSTS[usize::from(is_first)]);
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
        let (now, stamp) = (Instant::ZERO + Duration::from_secs(1), stamp.expect("an incarnation"));
        let (node, listener) = listen(&mut provider, now, own, stamp);
        Self {
            node,
            provider,
            listener,
            now,
            own: Nid::o2ib(own.into()),
            peer: Nid::o2ib(peer.into()),
            stamp,
            cm: None,
            qp: None,
            written: writes(name, own).into(),
            our_writes: Vec::new(),
            pinged: Vec::new(),
            given: (0, 0),
            ours: VecDeque::new(),
            handles: Vec::new(),
            cookies: Vec::new(),
            submitted: Vec::new(),
            equal: 0,
            differences: Differences::default(),
            wrong: Vec::new(),
        }
    }

    /// Plays one side of a capture.
    pub(crate) fn play(name: &str, is_first: bool) -> Self {
        let items = items(name);
        let mut player = Self::start(name, is_first, &items);
        // Where one side is a program for odd cases, connections follow each other, and who ends them counts.
        let is_odd = name.starts_with("odd-");
        let mut ends = match name {
            // Its last two are there at once.
            "odd-requests" => VecDeque::new(),
            _ if is_odd => ends(name).into(),
            _ => VecDeque::new(),
        };
        for (at, (of, item)) in items.iter().enumerate() {
            while let Some((of, at)) = next_before(&mut ends, |(_, at)| *at, frame(item)) {
                player.ends(at, of == is_first);
            }
            if is_odd && matches!(item, Item::Private(_, Cm::Req, ..)) {
                player.disconnect();
            }
            player.item(*of == is_first, item, (&items[at..], is_first));
        }
        player.differences.more = player.ours.len();
        player.given.0 += player
            .ours
            .iter()
            .map(|m| u64::from(Message::parse(m).unwrap().credits))
            .sum::<u64>();
        player.differences.writes = player.our_writes.len();
        player
    }

    fn item(&mut self, is_ours: bool, item: &Item, (after, is_first): (&[(bool, Item)], bool)) {
        match item {
            Item::Private(frame, Cm::Req, _, bytes) if is_ours => self.connects(*frame, bytes, after, is_first),
            Item::Private(_, Cm::Req, port, bytes) => self.asked(*port, bytes),
            Item::Private(frame, Cm::Rep, _, bytes) if is_ours => self.accepts(*frame, bytes),
            Item::Private(frame, Cm::Rep, _, bytes) => self.accepted(*frame, bytes, after, is_first),
            Item::Private(frame, Cm::Rej, _, bytes) if is_ours => self.rejects(*frame, bytes),
            Item::Private(_, Cm::Rej, _, bytes) => self.rejected(bytes),
            Item::Send(frame, bytes) if is_ours => {
                let message = Message::parse(bytes).unwrap();
                self.begin(*frame, &message, after);
                self.compare(*frame, &message);
            }
            Item::Send(frame, bytes) => self.deliver(*frame, bytes, after, is_first),
        }
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
            for (op, bytes) in self.qp.map(|qp| self.provider.take_sends(qp)).unwrap_or_default() {
                match op {
                    SendOp::Write(to) => self.our_writes.push((to, bytes)),
                    op => {
                        assert_eq!(op, SendOp::Send);
                        self.ours.push_back(bytes);
                    }
                }
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
    fn connects(&mut self, frame: u64, bytes: &[u8], after: &[(bool, Item)], is_first: bool) {
        match Message::parse(bytes) {
            Ok(message) if message.src_stamp != self.stamp => self.restart(message.src_stamp),
            Ok(_) => {}
            // The kernel tries again with version 1, which the node does not speak.
            Err(_) => return self.differences.answers.push(frame),
        }
        // An operation for which nobody has answered ends, and is begun again.
        if self.node.jobs() == 0 {
            let first = after.iter().enumerate().find_map(|(at, (of, item))| match item {
                Item::Send(frame, bytes) if *of == is_first => Some((at, *frame, bytes)),
                _ => None,
            });
            let first = first.map(|(at, frame, bytes)| (at, frame, Message::parse(bytes).unwrap()));
            match first.filter(|(_, _, message)| begins(message)) {
                Some((at, frame, message)) => {
                    self.submitted.retain(|of| *of != frame);
                    self.begin(frame, &message, &after[at..]);
                }
                None => drop(self.node.ping(self.now, self.peer, buffer(272))),
            }
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
        let until = self.now + Duration::from_secs(1);
        while attempt(&self.provider).is_none()
            && let Some(at) = self.node.next_timeout().filter(|at| *at <= until)
        {
            self.now = self.now.max(at);
            self.with(|node, cx| node.timeout(cx));
            self.settle();
        }
        let Some(cm) = attempt(&self.provider) else {
            return self.wrong.push(format!("frame {frame}: the node does not connect"));
        };
        self.provider.tell(cm, CmKind::Resolved { device: DeviceIx(0) });
        self.settle();
        self.take(frame, cm, bytes);
    }

    /// The node has asked, or accepted, with this private data.
    fn take(&mut self, frame: u64, cm: CmRef, bytes: &[u8]) {
        let Some((qp, params)) = self
            .provider
            .cms
            .get(&cm)
            .and_then(|cm| Some((cm.qp?, cm.params.clone()?)))
        else {
            return self
                .wrong
                .push(format!("frame {frame}: the node neither connects nor accepts"));
        };
        (self.cm, self.qp) = (Some(cm), Some(qp));
        let ours = params.private_data;
        match bytes.starts_with(&ours) && (params.initiator_depth, params.responder_resources) == (0, 0) {
            true => self.equal += 1,
            false => self
                .wrong
                .push(format!("frame {frame}: private data {ours:02x?}, not {bytes:02x?}")),
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
        self.take(frame, cm, bytes);
        self.established(Vec::new());
    }

    fn established(&mut self, private_data: Vec<u8>) {
        let cm = self.cm.unwrap();
        self.provider.tell(cm, CmKind::Established { private_data });
        self.settle();
    }

    /// The peer has accepted. The node goes on with that connection or ends it, as the kernel does.
    fn accepted(&mut self, frame: u64, bytes: &[u8], after: &[(bool, Item)], is_first: bool) {
        self.established(bytes.to_vec());
        let until = |item: &&(bool, Item)| !matches!(item, (_, Item::Private(_, Cm::Req, ..)));
        let mut then = after[1..].iter().take_while(until);
        let goes_on = then.any(|(of, item)| *of == is_first && matches!(item, Item::Send(..)));
        if goes_on != self.is_live() {
            self.wrong.push(format!("frame {frame}: the kernel goes on: {goes_on}"));
        }
    }

    fn is_live(&self) -> bool {
        self.cm.is_some_and(|cm| self.provider.live(cm).is_some())
    }

    /// One side ends the connection; the node has ended it, if it is the captured one.
    fn ends(&mut self, frame: u64, is_ours: bool) {
        match is_ours {
            true if self.is_live() => self.wrong.push(format!("frame {frame}: the node goes on")),
            _ => self.disconnect(),
        }
    }

    /// The captured side has started again.
    fn restart(&mut self, stamp: u64) {
        self.provider = Scripted::new(&[Keys::INSTANT]);
        let own = self.own.address().octets();
        (self.node, self.listener) = listen(&mut self.provider, self.now, own, stamp);
        (self.stamp, self.cm, self.qp) = (stamp, None, None);
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
        let Some(cm) = self.cm.take() else { return };
        let kind = CmKind::Rejected {
            reason: RejectReason::CONSUMER,
            private_data: bytes.to_vec(),
        };
        self.provider.tell(cm, kind);
        self.settle();
    }

    /// The captured side begins an operation.
    fn begin(&mut self, frame: u64, message: &Message<'_>, after: &[(bool, Item)]) {
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
                match message.body {
                    Body::Immediate { payload, .. } => _ = source.write(payload),
                    Body::PutReq { cookie, .. } => self.fill(&source, &self.sink_of(cookie, after)),
                    _ => {}
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

    fn is_ping_reply(message: &Message<'_>) -> bool {
        matches!(message.body, Body::Immediate { payload, .. } if PingInfo::is(payload))
    }

    /// Compares a message of the kernel with the node's.
    fn compare(&mut self, frame: u64, theirs: &Message<'_>) {
        self.given.1 += u64::from(theirs.credits);
        if matches!(theirs.body, Body::PutDone(_) | Body::GetDone(_)) {
            self.compare_writes(frame);
        }
        let all: Vec<Vec<u8>> = self.ours.iter().cloned().collect();
        let parsed: Vec<Message<'_>> = all.iter().map(|bytes| Message::parse(bytes).unwrap()).collect();
        let mut at = parsed.iter().position(|ours| is_same(ours, theirs));
        if at.is_none() && Self::is_ping_reply(theirs) {
            at = parsed.iter().position(Self::is_ping_reply);
            self.differences.pings += usize::from(at.is_some());
        }
        let Some(at) = at else {
            match theirs.body.kind() {
                // Of a connection that the node has ended.
                _ if !self.is_live() && !self.differences.closed.is_empty() => {}
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
        self.given.0 += u64::from(ours.credits);
        let ((our_handle, our_cookie), (handle, cookie)) = (names(ours), names(theirs));
        self.handles.extend(handle.zip(our_handle));
        self.cookies.extend(cookie.zip(our_cookie));
        self.ours.remove(at);
    }

    /// Memory that the peer describes for a PUT_REQ of this cookie.
    fn sink_of(&self, cookie: u64, after: &[(bool, Item)]) -> Vec<Fragment> {
        let found = after.iter().find_map(|(_, item)| match item {
            Item::Send(_, bytes) => match Message::parse(bytes).ok()?.body {
                Body::PutAck { src_cookie, desc, .. } if src_cookie == cookie => Some(desc.frags.iter().collect()),
                _ => None,
            },
            Item::Private(..) => None,
        });
        found.unwrap_or_default()
    }

    /// Fills memory with the data that the captured side writes into its peer's.
    fn fill(&self, memory: &Buffer, frags: &[Fragment]) {
        let mut at = 0;
        for frag in frags {
            for write in &self.written {
                let offset = write.addr.wrapping_sub(frag.addr) as usize;
                if offset < frag.nob as usize && at + offset < memory.len() {
                    let part = memory.part(at + offset, memory.len() - at - offset).unwrap();
                    part.write(&write.data);
                }
            }
            at += frag.nob as usize;
        }
    }

    /// Data of the captured side has been written, and a message says so: the node has written the same.
    fn compare_writes(&mut self, frame: u64) {
        while let Some(write) = next_before(&mut self.written, |write| write.frame, frame) {
            let is_same = |(to, data): &(RemoteAddr, Vec<u8>)| {
                (to.addr, to.rkey.0) == (write.addr, write.key) && *data == write.data
            };
            match self.our_writes.iter().position(is_same) {
                Some(at) => {
                    self.our_writes.remove(at);
                    self.equal += 1;
                }
                None if self.pinged.contains(&write.key) => self.ping_written(&write),
                None => {
                    let (addr, len) = (write.addr, write.data.len());
                    self.wrong
                        .push(format!("frame {frame}: {len} bytes at {addr:x} are not written"));
                }
            }
        }
    }

    /// Ping information has been written: it is in the same place, with what the node says of itself.
    fn ping_written(&mut self, theirs: &Written) {
        let is_there = |(to, data): &(RemoteAddr, Vec<u8>)| (to.addr, data.len()) == (theirs.addr, theirs.data.len());
        match self.our_writes.iter().position(is_there) {
            Some(at) => {
                self.our_writes.remove(at);
                self.differences.pings += 1;
            }
            None => self.wrong.push(format!("frame {}: no ping information", theirs.frame)),
        }
    }

    /// The peer sends a message, which names what the kernel had named.
    fn deliver(&mut self, frame: u64, bytes: &[u8], after: &[(bool, Item)], is_first: bool) {
        let Some(qp) = self.cm.and_then(|cm| self.provider.live(cm)) else {
            return;
        };
        let message = Message::parse(bytes).ok();
        if let Some(message) = &message {
            self.prepare(message, after, is_first);
        }
        let is_answer = |message: &Message<'_>| match message.body.hdr().map(|hdr| hdr.operation()) {
            None | Some(Ok(Operation::Reply { .. } | Operation::Ack { .. })) => true,
            Some(_) => false,
        };
        let named = match &message {
            Some(message) if is_answer(message) => {
                let cookie = |cookie| match message.body {
                    // Its own.
                    Body::PutAck { dst_cookie, .. } if cookie == dst_cookie => cookie,
                    _ => self.cookie_of(cookie),
                };
                renamed(message, |handle| self.handle_of(handle), cookie, None, true)
            }
            _ => bytes.to_vec(),
        };
        self.provider.deliver(qp, &named, None);
        self.settle();
        let goes_on = after[1..].iter().find_map(|(of, item)| match item {
            Item::Send(..) if *of == is_first => Some(true),
            Item::Private(_, Cm::Req, ..) => Some(false),
            _ => None,
        });
        if goes_on == Some(true) && !self.is_live() {
            self.differences.closed.push(frame);
        }
    }

    /// Returns whether the captured side has had something for an operation of its peer: it answers with data, memory or an ACK.
    fn has_matched(message: &Message<'_>, after: &[(bool, Item)], is_first: bool) -> bool {
        let answers = |answer: &Message<'_>| match (message.body, answer.body) {
            (Body::PutReq { cookie, .. }, Body::PutAck { src_cookie, .. }) => cookie == src_cookie,
            (Body::GetReq { cookie, .. }, Body::GetDone(done)) => cookie == done.cookie && done.status >= 0,
            (Body::Immediate { hdr, .. }, body) => {
                let answer = body.hdr().and_then(|hdr| hdr.operation().ok());
                match (hdr.operation(), answer) {
                    (Ok(Operation::Get { return_md, .. }), Some(Operation::Reply { dst_md })) => return_md == dst_md,
                    (Ok(Operation::Put { ack_md, .. }), Some(Operation::Ack { dst_md, mlength, .. })) => {
                        (ack_md, hdr.payload_length.get()) == (dst_md, mlength)
                    }
                    // Without an acknowledgement nothing shows.
                    (Ok(Operation::Put { ack_md, .. }), _) => ack_md == Handle::NONE,
                    _ => false,
                }
            }
            _ => false,
        };
        let until = |item: &&(bool, Item)| !matches!(item, (_, Item::Private(_, Cm::Req, ..)));
        let mut own = after.iter().take_while(until).filter(|(of, _)| *of == is_first);
        own.any(|(_, item)| matches!(item, Item::Send(_, bytes) if Message::parse(bytes).is_ok_and(|m| answers(&m))))
    }

    /// Memory for an operation of the peer, with what the captured side had there.
    fn prepare(&mut self, message: &Message<'_>, after: &[(bool, Item)], is_first: bool) {
        let hdr = message
            .body
            .hdr()
            .filter(|_| Self::has_matched(message, after, is_first));
        let Some(hdr) = hdr else { return };
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
                if let Body::GetReq { desc, .. } = message.body {
                    self.pinged.extend((portal == PING_PORTAL).then_some(desc.key));
                    self.fill(&memory, &desc.frags.iter().collect::<Vec<_>>());
                }
                let reply = after.iter().find_map(|(of, item)| match item {
                    Item::Send(_, bytes) if *of == is_first => match Message::parse(bytes).ok()?.body {
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
