//! Stranger with a node of its own, which knows the protocol of selftest: it sends requests in its own name and in that of others, and
//! answers what it is asked as it likes.

use core::time::Duration;
use std::collections::BTreeSet;

use lnet::{
    Buffer, Entry, EntryId, EntryOptions, Failure, Get, Node, Output, Put, Served,
    proto::{ByteOrder, Nid},
    selftest::{
        Client, Data, Name,
        proto::{
            Body, DEST_LEN, FRAMEWORK_PORTAL, Features, MESSAGE_LEN, Message, PING_MAGIC, Parameters, RDMA_PORTAL,
            REQUEST_PORTAL, Service, Sid, destinations_to_bytes,
        },
    },
};
use roce_sim::{Check, Coverage, MS, Rng, US, lan::Machines};
use roce_verbs::{
    Completion, Instant,
    provider::{Cx, Event, QpId},
};

/// Longest data that it offers or asks for.
const MAX_DATA: usize = 1 << 20;
/// Requests of hosts to each portal that it can read.
const READABLE: usize = 8192;
/// Requests that it remembers, to send them again.
const REMEMBERED: usize = 16;
/// Requests of a flood.
const FLOOD: u32 = 200;

/// Plan of a stranger.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IntruderPlan {
    /// Number of its moves.
    pub(crate) moves: u32,
    /// It ends sessions of others, by force and with the numbers that nodes tell it.
    pub(crate) uses_force: bool,
    /// Longest pause between two moves, nanoseconds.
    pub(crate) think: u64,
}

impl IntruderPlan {
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        Self {
            moves: rng.pick(&[30, 100, 300]),
            uses_force: rng.chance(0.5),
            think: rng.pick(&[50 * US, MS, 20 * MS]),
        }
    }
}

/// See the module.
pub(crate) struct Intruder {
    node: Node,
    plan: IntruderPlan,
    hosts: Vec<Nid>,
    client: Client,
    /// Sessions that nodes have told it of.
    sids: Vec<Sid>,
    /// Match bits for its replies and its data that hosts have told it.
    asked: BTreeSet<(Nid, u64)>,
    /// Portal, match bits and bytes of former requests.
    sent: Vec<(u32, u64, Vec<u8>)>,
    /// Memory that requests of others come into.
    inbox: [(EntryId, Buffer); 2],
    next_at: u64,
    /// It neither does nor answers anything.
    is_quiet: bool,
    leaves: bool,
    rng: Rng,
    pub(crate) coverage: Coverage,
}

impl Intruder {
    pub(crate) fn start(mut node: Node, plan: IntruderPlan, hosts: &[Nid], mut rng: Rng) -> Self {
        let inbox = [REQUEST_PORTAL, FRAMEWORK_PORTAL].map(|portal| {
            let memory = Buffer::allocate(READABLE * MESSAGE_LEN).expect("memory");
            let entry = node.attach(Entry {
                portal,
                from: None,
                match_bits: 0,
                ignore_bits: u64::MAX,
                options: EntryOptions::PUT,
                memory: memory.clone(),
                uses: None,
            });
            (entry, memory)
        });
        Self {
            node,
            plan,
            hosts: hosts.to_vec(),
            client: Client::new(Duration::from_secs(20), 3),
            sids: Vec::new(),
            asked: BTreeSet::new(),
            sent: Vec::new(),
            inbox,
            next_at: rng.range(0, 10 * MS),
            is_quiet: false,
            leaves: false,
            rng,
            coverage: Coverage::default(),
        }
    }

    /// It does nothing from here on, but notes what it is asked.
    pub(crate) const fn be_quiet(&mut self) {
        self.is_quiet = true;
    }

    /// Its node ends.
    pub(crate) const fn leave(&mut self) {
        self.leaves = true;
    }

    /// Returns whether a host has asked it for a reply, or data, with these match bits.
    pub(crate) fn was_asked(&self, by: Nid, match_bits: u64) -> bool {
        self.asked.contains(&(by, match_bits))
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.node.is_stopped()
    }

    fn act(&mut self, now: Instant) {
        let to = self.rng.pick(&self.hosts);
        match self.rng.index(8) {
            0..3 => self.framework(now, to),
            3 => self.bulk(now, to),
            4 => self.raw(now, to),
            5 => self.guess(now, to),
            6 => self.replay(now, to),
            _ => {
                self.coverage.note("stranger: flood");
                let body = self.body_of_flood();
                for _ in 0..self.rng.range(1, u64::from(FLOOD)) {
                    self.send(now, to, &Message::new(Features::all(), body).to_bytes());
                }
            }
        }
    }

    /// Number of a session.
    fn sid(&mut self) -> Sid {
        let own = self.node.nid();
        let other = self.rng.pick(&self.hosts);
        let known = match self.sids.is_empty() || !self.plan.uses_force {
            true => None,
            false => Some(self.rng.pick(&self.sids)),
        };
        let stamp = self.rng.number() | 1 << 40;
        match self.rng.index(8) {
            0 => Sid::NONE,
            1 => Sid { nid: other, stamp },
            2 => Sid { nid: own, stamp },
            3 | 4 if known.is_some() => known.unwrap_or(Sid::NONE),
            _ => Sid { nid: own, stamp: 1 },
        }
    }

    /// Body of a request of the framework.
    fn body(&mut self) -> Body {
        let (reply_bits, sid) = (0, self.sid());
        let batch = self.rng.pick(&[0, 1, 1, 1, 2, u64::MAX]);
        match self.rng.index(7) {
            0 | 1 => Body::MakeSession {
                reply_bits,
                sid,
                force: u32::from(self.plan.uses_force && self.rng.chance(0.5)),
                name: Name::new("stranger"),
            },
            2 => Body::RemoveSession { reply_bits, sid },
            3 | 4 => Body::Batch {
                reply_bits,
                sid,
                batch,
                operation: self.rng.pick(&[Body::RUN, Body::RUN, Body::STOP, Body::QUERY, 0, 77]),
                test: self.rng.pick(&[0, 1, 2, u32::MAX]),
                argument: self.rng.pick(&[0, 1]),
            },
            5 => Body::Stat {
                reply_bits,
                sid,
                kind: self.rng.pick(&[0, 9]),
            },
            _ => Body::Debug {
                reply_bits,
                sid,
                flags: 0,
            },
        }
    }

    /// Body of a request that it sends many times: to the framework, or with data that nobody can fetch.
    fn body_of_flood(&mut self) -> Body {
        let body = self.body();
        let data = Body::Bulk {
            reply_bits: 0,
            bulk_bits: 0,
            operation: Body::WRITE,
            len: self.rng.pick(&[4096, 65_536, 1 << 20]),
            pattern: 1,
        };
        self.rng.pick(&[body, data])
    }

    fn features(&mut self) -> Features {
        let any = Features::from_bits_retain(self.rng.number() as u32);
        self.rng.pick(&[
            Features::all(),
            Features::all(),
            Features::all(),
            Features::empty(),
            any,
        ])
    }

    /// A request of the framework, whose reply it waits for.
    fn framework(&mut self, now: Instant, to: Nid) {
        self.coverage.note("stranger: request to the framework");
        let (body, data) = match self.rng.index(6) {
            0 => self.test(),
            1 => self.large_test(),
            _ => (self.body(), Data::None),
        };
        let request = (self.features(), body);
        // Too much may wait.
        let _ = self.client.call(&mut self.node, now, to, request, data);
    }

    /// A test of hosts, of itself, and of nodes that there are not.
    fn test(&mut self) -> (Body, Data) {
        self.coverage.note("stranger: test");
        let own = self.node.nid();
        let nowhere = Nid::o2ib([10, 0, 9, 9].into());
        let tcp = Nid::new(lnet::proto::NET_TCP, 0, self.hosts[0].address());
        let host = self.rng.pick(&self.hosts);
        let node = self.rng.pick(&[host, host, own, nowhere, tcp, Nid(0), Nid(u64::MAX)]);
        let count = self.rng.pick(&[1, 1, 2, 30]);
        let mut nodes = vec![node; count];
        nodes[0] = self.rng.pick(&[node, node, own]);
        let parameters = Parameters::Bulk {
            operation: self.rng.pick(&[Body::READ, Body::WRITE, 0]),
            pattern: self.rng.pick(&[1, 2, 3, 9]),
            len: self.rng.pick(&[0, 8, 4096, 65_536, 1 << 20, u32::MAX]),
            offset: self.rng.pick(&[0, 0, 8, 4095, u32::MAX]),
        };
        let ping = Parameters::Ping { size: 0, flags: 0 };
        let parameters = self.rng.pick(&[parameters, ping]);
        let without_end = if self.hosts.contains(&node) { 50 } else { u32::MAX };
        let claimed = self.rng.pick(&[count as u32, count as u32, 0, 1000, u32::MAX]);
        let body = Body::Test {
            reply_bits: 0,
            bulk_bits: 0,
            sid: self.sid(),
            batch: self.rng.pick(&[0, 1, 1, 1, 7]),
            service: self
                .rng
                .pick(&[parameters.service().number(), Service::Debug.number(), 99]),
            loops: self.rng.pick(&[0, 1, 20, without_end]),
            concurrency: self.rng.pick(&[0, 1, 1, 2, 1024, u32::MAX]),
            is_client: self.rng.pick(&[0, 1, 1, 1, 255]),
            stop_on_error: self.rng.pick(&[0, 1]),
            nodes: claimed,
            parameters: parameters.to_bytes(ByteOrder::Little, Features::all()),
        };
        let list = destinations_to_bytes(&nodes);
        assert_eq!(list.len(), count * DEST_LEN);
        let memory = Buffer::allocate(list.len()).expect("memory");
        memory.write(&list);
        let short = memory.part(0, 8).expect("a part");
        let data = self.rng.pick(&[0, 0, 0, 1, 2]);
        let data = [Data::Source(memory), Data::Source(short), Data::None]
            .into_iter()
            .nth(data);
        (body, data.unwrap_or(Data::None))
    }

    /// A test of as many hosts, at as many at a time, as may be, or more.
    fn large_test(&mut self) -> (Body, Data) {
        self.coverage.note("stranger: large test");
        let nodes: Vec<Nid> = (0..16).map(|_| self.rng.pick(&self.hosts)).collect();
        let body = Body::Test {
            reply_bits: 0,
            bulk_bits: 0,
            sid: Sid {
                nid: self.node.nid(),
                stamp: 1,
            },
            batch: 1,
            service: Service::Ping.number(),
            loops: 20,
            concurrency: self.rng.pick(&[1, 4, 5, 1024]),
            is_client: 1,
            stop_on_error: 0,
            nodes: nodes.len() as u32,
            parameters: [0; 12],
        };
        let memory = Buffer::allocate(nodes.len() * DEST_LEN).expect("memory");
        memory.write(&destinations_to_bytes(&nodes));
        (body, Data::Source(memory))
    }

    /// A request for data, with lengths and memory that don't fit.
    fn bulk(&mut self, now: Instant, to: Nid) {
        self.coverage.note("stranger: request for data");
        let len = self
            .rng
            .pick(&[0, 1, 8, 4095, 4096, 65_536, 1 << 20, (1 << 20) + 1, u32::MAX]);
        let room = self.rng.pick(&[1, 4096, len as usize, len as usize]).clamp(1, MAX_DATA);
        let memory = Buffer::allocate(room).expect("memory");
        let data = match self.rng.index(3) {
            0 => Data::None,
            1 => Data::Sink(memory),
            _ => Data::Source(memory),
        };
        let body = Body::Bulk {
            reply_bits: 0,
            bulk_bits: 0,
            operation: self.rng.pick(&[Body::READ, Body::WRITE, 0, 9]),
            len,
            pattern: self.rng.pick(&[0, 1, 2, 3, 77]),
        };
        let request = (self.features(), body);
        let _ = self.client.call(&mut self.node, now, to, request, data);
    }

    /// A request with any bits for its reply, some of it damaged, to any portal.
    fn raw(&mut self, now: Instant, to: Nid) {
        self.coverage.note("stranger: damaged request");
        let mut message = Message::new(self.features(), self.body());
        message.version = self.rng.pick(&[1, 1, 0, 2]);
        message.order = self.rng.pick(&[ByteOrder::Little, ByteOrder::Big]);
        let mut bytes = message.to_bytes().to_vec();
        let at = self.rng.index(bytes.len());
        bytes[at] = self.rng.number() as u8;
        let len = self.rng.pick(&[0, 1, 24, 159, 160, 160, 160, 161, 4000]);
        bytes.resize(len, 7);
        let portal = self.rng.pick(&[REQUEST_PORTAL, FRAMEWORK_PORTAL, RDMA_PORTAL, 0]);
        let match_bits = self.rng.range(0, 14);
        self.put(now, to, (portal, match_bits), &bytes);
    }

    /// A reply, or data, for requests of others, whose match bits it guesses right.
    fn guess(&mut self, now: Instant, to: Nid) {
        self.coverage.note("stranger: guessed match bits");
        let match_bits = self.rng.pick(&[1 << 14, 1 << 15]) << 48 | self.rng.range(1, 60);
        if self.rng.chance(0.3) {
            let sink = Buffer::allocate(self.rng.pick(&[8, 4096])).expect("memory");
            let get = Get {
                peer: to,
                portal: RDMA_PORTAL,
                match_bits,
                offset: 0,
                sink,
            };
            let _ = self.node.get(now, &get);
            return;
        }
        let body = self.reply();
        let reply = Message::new(Features::all(), body).to_bytes();
        self.put(now, to, (RDMA_PORTAL, match_bits), &reply);
    }

    fn reply(&mut self) -> Body {
        let (status, sid) = (self.rng.pick(&[0, 0, 22, u32::MAX]), self.sid());
        let batch = Body::BatchReply {
            status,
            sid,
            active: self.rng.pick(&[0, 7]),
            time: 0,
        };
        let ping = Body::PingReply {
            status,
            magic: self.rng.pick(&[PING_MAGIC, 7]),
            number: self.rng.pick(&[0, 1]),
        };
        let test = Body::TestReply { status, sid };
        self.rng.pick(&[batch, ping, test, Body::BulkReply { status }])
    }

    /// A request that was sent before, to any host.
    fn replay(&mut self, now: Instant, to: Nid) {
        if !self.sent.is_empty() {
            self.coverage.note("stranger: repeated request");
            let at = self.rng.index(self.sent.len());
            let (portal, bits, bytes) = self.sent[at].clone();
            self.put(now, to, (portal, bits), &bytes);
        }
    }

    /// Sends a request as it is.
    fn send(&mut self, now: Instant, to: Nid, bytes: &[u8]) {
        let service = Message::parse(bytes).ok().and_then(|message| message.body.service());
        if let Some(service) = service {
            self.put(now, to, (service.portal(), service.number().into()), bytes);
        }
    }

    fn put(&mut self, now: Instant, to: Nid, (portal, match_bits): (u32, u64), bytes: &[u8]) {
        // A buffer has at least a byte.
        let memory = Buffer::allocate(bytes.len().max(1)).expect("memory");
        memory.write(bytes);
        let put = Put {
            peer: to,
            portal,
            match_bits,
            hdr_data: 0,
            offset: 0,
            source: memory.part(0, bytes.len()).expect("a part"),
            ack: false,
        };
        if self.node.put(now, &put).is_ok() && self.sent.len() < REMEMBERED {
            self.sent.push((portal, match_bits, bytes.to_vec()));
        }
    }

    /// A host asks: it is answered rightly, wrongly, twice or not at all.
    fn asked(&mut self, now: Instant, served: &Served) {
        let from = served.from;
        let inbox = self.inbox.iter().find(|(entry, _)| *entry == served.entry);
        let bytes = inbox.and_then(|(_, memory)| memory.part(served.offset, MESSAGE_LEN));
        let Some(Ok(request)) = bytes.map(|bytes| Message::parse(&bytes.to_vec())) else {
            return;
        };
        self.coverage.note("stranger: request of a host");
        let sid = match request.body {
            Body::MakeSession { sid, .. } | Body::Stat { sid, .. } | Body::Test { sid, .. } => sid,
            _ => Sid::NONE,
        };
        let (reply_bits, right) = match request.body {
            Body::Bulk {
                reply_bits,
                bulk_bits,
                operation,
                len,
                ..
            } => {
                self.asked.insert((from, bulk_bits));
                if !self.is_quiet {
                    self.transfer(now, from, (operation, bulk_bits), len);
                }
                (reply_bits, Body::BulkReply { status: 0 })
            }
            Body::Ping {
                reply_bits,
                magic,
                number,
                ..
            } => {
                let status = 0;
                (reply_bits, Body::PingReply { status, magic, number })
            }
            Body::MakeSession { reply_bits, .. } => {
                let made = Body::SessionMade {
                    status: 0,
                    sid,
                    timeout: 0,
                    name: Name::default(),
                };
                (reply_bits, made)
            }
            Body::Test { reply_bits, .. } => (reply_bits, Body::TestReply { status: 0, sid }),
            Body::Stat { reply_bits, .. } | Body::RemoveSession { reply_bits, .. } => {
                (reply_bits, Body::SessionRemoved { status: 0, sid })
            }
            _ => return,
        };
        self.asked.insert((from, reply_bits));
        if self.is_quiet {
            return;
        }
        if self.rng.chance(0.5) {
            // Others were asked at about the same time.
            let reply = Message::new(Features::all(), self.reply()).to_bytes();
            for near in [-6, -4, -2, -1, 1, 2, 3, 4, 6] {
                self.put(now, from, (RDMA_PORTAL, reply_bits.wrapping_add_signed(near)), &reply);
            }
        }
        for _ in 0..self.rng.pick(&[0, 1, 1, 1, 2]) {
            let wrong = self.reply();
            let body = self.rng.pick(&[right, right, right, wrong]);
            let mut reply = Message::new(Features::all(), body).to_bytes().to_vec();
            reply.truncate(self.rng.pick(&[MESSAGE_LEN, MESSAGE_LEN, MESSAGE_LEN, 24]));
            self.put(now, from, (RDMA_PORTAL, reply_bits), &reply);
        }
    }

    /// Data of a test, of the right length or another one.
    fn transfer(&mut self, now: Instant, from: Nid, (operation, match_bits): (u32, u64), len: u32) {
        let len = self
            .rng
            .pick(&[len as usize, len as usize, 8, MAX_DATA])
            .clamp(1, MAX_DATA);
        if operation == Body::READ {
            return self.put(now, from, (RDMA_PORTAL, match_bits), &vec![7; len]);
        }
        let get = Get {
            peer: from,
            portal: RDMA_PORTAL,
            match_bits,
            offset: 0,
            sink: Buffer::allocate(len).expect("memory"),
        };
        let _ = self.node.get(now, &get);
    }
}

impl Machines for Intruder {
    fn completion(&mut self, cx: &mut Cx<'_>, qp: QpId, wc: &Completion) {
        self.node.completion(cx, qp, wc);
    }

    fn event(&mut self, cx: &mut Cx<'_>, event: &Event) {
        self.node.event(cx, event);
    }

    fn timeout(&mut self, cx: &mut Cx<'_>) {
        self.node.timeout(cx);
        self.client.timeout(&mut self.node, cx.now);
    }

    fn work(&mut self, cx: &mut Cx<'_>) -> Check {
        while let Some(output) = self.node.poll_output() {
            if self.client.output(&mut self.node, &output) {
                continue;
            }
            match output {
                Output::Served(served, Ok(_)) if served.is_put => self.asked(cx.now, &served),
                // A host breaks no rule of the protocol.
                Output::Down(peer, Failure::Message(e)) => return Err(format!("a message of {peer}: {e}")),
                Output::Down(peer, Failure::Credits(e)) => return Err(format!("credits of {peer}: {e}")),
                _ => {}
            }
        }
        while let Some((_, result)) = self.client.poll() {
            match result.map(|reply| reply.body) {
                Ok(
                    Body::SessionMade { sid, .. }
                    | Body::DebugReply { sid, .. }
                    | Body::StatReply { sid, .. }
                    | Body::SessionRemoved { sid, .. }
                    | Body::BatchReply { sid, .. },
                ) if sid != Sid::NONE && self.sids.len() < REMEMBERED => self.sids.push(sid),
                _ => {}
            }
        }
        if self.leaves {
            if !self.node.is_stopped() {
                self.node.stop(cx);
            }
            return Ok(());
        }
        while self.plan.moves > 0 && !self.is_quiet && self.next_at <= cx.now.as_nanos() {
            self.act(cx.now);
            self.plan.moves -= 1;
            self.next_at = cx.now.as_nanos() + self.rng.range(1, self.plan.think);
        }
        Ok(())
    }

    fn end_batch(&mut self, cx: &mut Cx<'_>) {
        self.node.end_batch(cx);
    }

    fn next_timeout(&self) -> Option<Instant> {
        let acts = self.plan.moves > 0 && !self.is_quiet;
        let acts = acts.then(|| Instant::from_nanos(self.next_at));
        [acts, self.node.next_timeout(), self.client.next_timeout()]
            .into_iter()
            .flatten()
            .min()
    }
}
