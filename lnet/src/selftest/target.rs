//! Node that a console drives, and that others test.

use core::time::Duration;
use std::collections::BTreeMap;

use roce_verbs::Instant;

use super::{
    client::Client,
    errno,
    proto::{
        Body, DEST_LEN, Features, LnetCounters, MAX_BULK, Message, PING_MAGIC, Pattern, RDMA_PORTAL, RpcCounters,
        Service, Sid, VERSION,
    },
    session::{Session, words},
    slots::{Arrived, Slots},
    wire::Name,
};
use crate::{
    buffer::Buffer,
    event::{Failure, JobId, Output},
    node::Node,
    operation::{Get, Put},
    proto::Nid,
};

/// Settings of a target. The defaults are the kernel's, and limits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TargetConfig {
    /// Longest time until a reply to a request of ours.
    pub rpc_timeout: Duration,
    /// Time without a request of its console after which a session ends.
    pub session_timeout: Duration,
    /// Requests that may wait to be read, of each service of the framework, and of each other one. More are dropped.
    pub slots: (usize, usize),
    /// Requests of a peer that are answered at a time. More are dropped.
    pub max_requests: u32,
    /// Bytes of data of a peer at a time; more are refused.
    pub max_bulk: usize,
    /// Units of tests of a session, and bytes of their data, at most.
    pub max_units: usize,
    /// Bytes of data of the tests of a session.
    pub max_unit_bytes: usize,
}

impl Default for TargetConfig {
    fn default() -> Self {
        Self {
            rpc_timeout: Duration::from_secs(64),
            session_timeout: Duration::from_secs(100),
            slots: (8, 128),
            max_requests: 1024,
            max_bulk: 64 << 20,
            max_units: 2048,
            max_unit_bytes: 256 << 20,
        }
    }
}

/// Request whose data is under way.
#[derive(Debug)]
struct Moving {
    peer: Nid,
    request: Message,
    bytes: usize,
    then: Then,
}

/// Next step of a request whose data has come, or left.
#[derive(Debug)]
enum Then {
    Reply,
    Check(Buffer, Pattern),
    Add(Buffer),
}

/// Requests and data of a peer under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Load {
    requests: u32,
    bytes: usize,
}

/// Decision about a request.
enum Answer {
    /// None is sent.
    Drop,
    Reply(Features, Body),
    /// First there is data to move.
    Wait,
}

/// See the module.
#[derive(Debug)]
pub struct Target {
    config: TargetConfig,
    slots: Slots,
    client: Client,
    session: Option<Session>,
    /// Data of all requests to send some.
    source: Buffer,
    moving: BTreeMap<JobId, Moving>,
    /// Replies under way, and whose they are.
    replies: BTreeMap<JobId, Nid>,
    loads: BTreeMap<Nid, Load>,
    rpc: RpcCounters,
}

impl Target {
    /// Attaches the services. `stamp`: as of a [`Client`]. `None`: there is no memory.
    pub fn attach(node: &mut Node, config: TargetConfig, stamp: u64) -> Option<Self> {
        let source = Buffer::allocate(MAX_BULK as usize)?;
        source.write(&words(MAX_BULK as usize));
        Some(Self {
            slots: Slots::attach(node, config.slots.0, config.slots.1)?,
            client: Client::new(config.rpc_timeout, stamp),
            config,
            session: None,
            source,
            moving: BTreeMap::new(),
            replies: BTreeMap::new(),
            loads: BTreeMap::new(),
            rpc: RpcCounters::default(),
        })
    }

    /// The session that there is, and its name.
    pub fn session(&self) -> Option<(Sid, Name)> {
        self.session.as_ref().map(|session| (session.sid, session.name))
    }

    /// Counters of its requests and those of others.
    pub const fn counters(&self) -> RpcCounters {
        let (sent, expired) = self.client.counters();
        RpcCounters {
            sent,
            expired,
            ..self.rpc
        }
    }

    /// Requests of a peer that have not ended, and bytes of their data.
    pub fn load(&self, peer: Nid) -> (u32, usize) {
        self.loads.get(&peer).map_or((0, 0), |load| (load.requests, load.bytes))
    }

    /// Returns whether no request has to end: none of others, none of the session's tests.
    pub fn is_idle(&self) -> bool {
        self.loads.is_empty() && self.client.is_empty()
    }

    /// Handles a report of the node. Returns whether it is about selftest.
    pub fn output(&mut self, node: &mut Node, now: Instant, output: &Output) -> bool {
        let is_ours = self.client.output(node, output) || self.own_output(node, now, output);
        self.go_on(node, now);
        is_ours
    }

    fn own_output(&mut self, node: &mut Node, now: Instant, output: &Output) -> bool {
        match output {
            Output::Served(served, result) => match self.slots.take(served, result) {
                Arrived::Elsewhere => return false,
                Arrived::Nonsense => self.rpc.dropped += 1,
                Arrived::Request(request) => self.request(node, now, served.from, &request),
            },
            Output::Unlinked(entry) => return self.slots.unlinked(node, *entry),
            Output::Done(job, result) => {
                if let Some(peer) = self.replies.remove(job) {
                    self.rpc.errors += u32::from(result.is_err());
                    self.release(peer, 0);
                    return true;
                }
                let Some(moving) = self.moving.remove(job) else {
                    return false;
                };
                self.moved(node, now, moving, result);
            }
            Output::Up(..) | Output::Down(..) | Output::Refused(..) | Output::Pinged(_) | Output::Pushed(_) => {
                return false;
            }
        }
        true
    }

    /// Requests of units that have ended make place for the next.
    fn go_on(&mut self, node: &mut Node, now: Instant) {
        while let Some((id, result)) = self.client.poll() {
            if let Some(session) = &mut self.session {
                session.called((node, &mut self.client), now, id, &result);
            }
        }
    }

    /// Gives up what has waited too long.
    pub fn timeout(&mut self, node: &mut Node, now: Instant) {
        self.client.timeout(node, now);
        if let Some(session) = self.session.take_if(|session| session.expires <= now) {
            session.end(node, &mut self.client);
        }
        self.go_on(node, now);
    }

    /// When to call [`timeout`](Self::timeout).
    pub fn next_timeout(&self) -> Option<Instant> {
        let session = self.session.as_ref().map(|session| session.expires);
        session.into_iter().chain(self.client.next_timeout()).min()
    }

    fn request(&mut self, node: &mut Node, now: Instant, peer: Nid, request: &Message) {
        self.rpc.received = self.rpc.received.wrapping_add(1);
        let load = self.loads.entry(peer).or_default();
        if load.requests >= self.config.max_requests {
            self.rpc.dropped += 1;
            return;
        }
        load.requests += 1;
        let answer = match request.body {
            _ if request.version != VERSION => self.refused(request, errno::PROTOCOL),
            Body::Ping { magic, number, .. } => ping(request.features, magic, number),
            Body::Bulk { .. } => self.bulk(node, now, peer, request),
            _ => self.framework(node, now, peer, request),
        };
        match answer {
            Answer::Drop => {
                self.rpc.dropped += 1;
                self.release(peer, 0);
            }
            Answer::Reply(features, body) => self.reply(node, now, (peer, request), (features, body)),
            Answer::Wait => {}
        }
    }

    fn release(&mut self, peer: Nid, bytes: usize) {
        if let Some(load) = self.loads.get_mut(&peer) {
            load.requests -= 1;
            load.bytes -= bytes;
            if *load == Load::default() {
                self.loads.remove(&peer);
            }
        }
    }

    fn reply(
        &mut self,
        node: &mut Node,
        now: Instant,
        (peer, request): (Nid, &Message),
        (features, body): (Features, Body),
    ) {
        let mut body_of_request = request.body;
        let reply_bits = body_of_request.bits().map_or(0, |(reply, _)| *reply);
        let message = Message::new(features, body).to_bytes();
        let sent = put(node, now, (peer, reply_bits), Buffer::allocate(message.len()), &message);
        match sent {
            Ok(job) => {
                self.replies.insert(job, peer);
            }
            Err(_) => {
                self.rpc.errors += 1;
                self.release(peer, 0);
            }
        }
    }

    fn sid(&self) -> Sid {
        self.session.as_ref().map_or(Sid::NONE, |session| session.sid)
    }

    /// Reply to a request that is refused.
    fn refused(&self, request: &Message, status: u32) -> Answer {
        let sid = self.sid();
        let body = match request.body {
            Body::MakeSession { .. } => Body::SessionMade {
                status,
                sid,
                timeout: 0,
                name: Name::default(),
            },
            Body::RemoveSession { .. } => Body::SessionRemoved { status, sid },
            Body::Batch { .. } => Body::BatchReply {
                status,
                sid,
                active: 0,
                time: 0,
            },
            Body::Stat { .. } => Body::StatReply {
                status,
                sid,
                framework: Default::default(),
                rpc: Default::default(),
                lnet: Default::default(),
            },
            Body::Test { .. } => Body::TestReply { status, sid },
            Body::Debug { .. } => Body::DebugReply {
                status,
                sid,
                timeout: 0,
                batches: 0,
                name: Name::default(),
            },
            Body::Bulk { .. } => Body::BulkReply { status },
            Body::Ping { .. } => Body::PingReply {
                status,
                magic: PING_MAGIC,
                number: 0,
            },
            _ => return Answer::Drop,
        };
        Answer::Reply(Features::all(), body)
    }

    /// A request to send or to take data.
    fn bulk(&mut self, node: &mut Node, now: Instant, peer: Nid, request: &Message) -> Answer {
        let Body::Bulk {
            bulk_bits,
            operation,
            len,
            pattern,
            ..
        } = request.body
        else {
            return Answer::Drop;
        };
        let refused = |status| Answer::Reply(request.features, Body::BulkReply { status });
        let pattern = match (operation, Pattern::from_wire(pattern)) {
            (Body::READ | Body::WRITE, Some(pattern)) => pattern,
            _ => return refused(errno::INVALID),
        };
        let is_page = request.features.contains(Features::BULK_LEN) || len % 4096 == 0;
        match request.features {
            features if !Features::all().contains(features) => return self.refused(request, errno::PROTOCOL),
            _ if !is_page || !(1..=MAX_BULK).contains(&len) => return refused(errno::INVALID),
            _ => {}
        }
        let len = len as usize;
        let (then, begun) = match operation {
            Body::READ => {
                let data = self.source.part(0, len);
                (Then::Reply, put_data(node, now, (peer, bulk_bits), data))
            }
            _ => {
                let Some(sink) = self.sink(peer, len) else {
                    return refused(errno::NO_MEMORY);
                };
                let begun = get(node, now, (peer, bulk_bits), sink.clone());
                (Then::Check(sink, pattern), begun)
            }
        };
        self.move_data(peer, request, (len, then), begun)
    }

    /// Memory for data of a peer.
    fn sink(&self, peer: Nid, len: usize) -> Option<Buffer> {
        let used = self.loads.get(&peer).map_or(0, |load| load.bytes);
        let fits = used.saturating_add(len) <= self.config.max_bulk;
        fits.then(|| Buffer::allocate(len)).flatten()
    }

    fn move_data(
        &mut self,
        peer: Nid,
        request: &Message,
        (len, then): (usize, Then),
        begun: Result<JobId, Failure>,
    ) -> Answer {
        let Ok(job) = begun else { return Answer::Drop };
        let bytes = if matches!(then, Then::Reply) { 0 } else { len };
        self.loads.entry(peer).or_default().bytes += bytes;
        let moving = Moving {
            peer,
            request: *request,
            bytes,
            then,
        };
        self.moving.insert(job, moving);
        Answer::Wait
    }

    /// The data of a request has come, or left, or not.
    fn moved(&mut self, node: &mut Node, now: Instant, moving: Moving, result: &Result<u32, Failure>) {
        let Moving {
            peer,
            request,
            bytes,
            then,
        } = moving;
        if let Some(load) = self.loads.get_mut(&peer) {
            load.bytes -= bytes;
        }
        let len = match (result, &then) {
            (Ok(len), Then::Check(sink, _) | Then::Add(sink)) if *len as usize == sink.len() => *len,
            (Ok(len), Then::Reply) => *len,
            _ => {
                self.rpc.errors += 1;
                return self.release(peer, 0);
            }
        };
        let (features, body) = match then {
            Then::Reply => {
                self.rpc.bulk_put += u64::from(len);
                (request.features, Body::BulkReply { status: 0 })
            }
            Then::Check(sink, pattern) => {
                self.rpc.bulk_get += u64::from(len);
                let is_kept = pattern.is_kept(&sink.to_vec(), request.order);
                let status = if is_kept { 0 } else { errno::BAD_MESSAGE };
                (request.features, Body::BulkReply { status })
            }
            Then::Add(sink) => {
                self.rpc.bulk_get += u64::from(len);
                self.refresh(now, &request);
                let status = self.add_client(&request, &sink.to_vec()).err().unwrap_or(0);
                (
                    request.features,
                    Body::TestReply {
                        status,
                        sid: self.sid(),
                    },
                )
            }
        };
        self.reply(node, now, (peer, &request), (features, body));
    }

    /// A session does not end while its console asks. The kernel's does not end while anybody asks for anything.
    fn refresh(&mut self, now: Instant, request: &Message) {
        let sid = request.body.sid();
        if let Some(session) = self.session.as_mut().filter(|session| Some(session.sid) == sid) {
            session.expires = now + self.config.session_timeout;
        }
    }

    /// A request of the framework.
    fn framework(&mut self, node: &mut Node, now: Instant, peer: Nid, request: &Message) -> Answer {
        self.refresh(now, request);
        let features = request.features;
        let is_wrong = match (&request.body, &self.session) {
            (Body::MakeSession { .. } | Body::Debug { .. }, _) | (_, None) => !Features::all().contains(features),
            (_, Some(session)) => session.features != features,
        };
        if is_wrong {
            return self.refused(request, errno::PROTOCOL);
        }
        let done = match request.body {
            Body::MakeSession { sid, force, name, .. } => self.make(node, now, (sid, name, features), force != 0),
            Body::RemoveSession { sid, .. } => self.remove(node, sid),
            Body::Debug { .. } => self.debug(),
            Body::Stat { sid, .. } => self.stat(node, now, sid),
            Body::Batch { .. } => self.batch(node, now, &request.body),
            Body::Test { .. } => match self.add(node, now, peer, request) {
                Ok(Some(answer)) => return answer,
                Ok(None) => Ok(Body::TestReply {
                    status: 0,
                    sid: self.sid(),
                }),
                Err(status) => Err(status),
            },
            _ => return Answer::Drop,
        };
        let features = self
            .session
            .as_ref()
            .map_or(Features::all(), |session| session.features);
        match done {
            Ok(body) => Answer::Reply(features, body),
            Err(status) => match self.refused(request, status) {
                Answer::Reply(_, body) => Answer::Reply(features, body),
                other => other,
            },
        }
    }

    /// Whether a request is for the session that there is.
    fn session_of(&mut self, sid: Sid, other: u32) -> Result<&mut Session, u32> {
        match &mut self.session {
            _ if sid.nid == Sid::NONE.nid => Err(errno::INVALID),
            Some(session) if session.sid == sid => Ok(session),
            Some(_) => Err(other),
            None => Err(errno::NO_SESSION),
        }
    }

    fn make(
        &mut self,
        node: &mut Node,
        now: Instant,
        (sid, name, features): (Sid, Name, Features),
        force: bool,
    ) -> Result<Body, u32> {
        if sid.nid == Sid::NONE.nid {
            return Err(errno::INVALID);
        }
        let timeout = self.config.session_timeout.as_secs() as u32;
        let made = |status, sid, name| Body::SessionMade {
            status,
            sid,
            timeout,
            name,
        };
        match &mut self.session {
            Some(session) if session.sid == sid => {
                session.references = session.references.saturating_add(1);
                return Ok(made(0, sid, Name::default()));
            }
            Some(session) if !force => return Ok(made(errno::BUSY, session.sid, session.name)),
            _ => {}
        }
        let expires = now + self.config.session_timeout;
        let session = Session::new((sid, name, features), now, expires);
        if let Some(former) = self.session.replace(session) {
            former.end(node, &mut self.client);
        }
        Ok(made(0, sid, Name::default()))
    }

    fn remove(&mut self, node: &mut Node, sid: Sid) -> Result<Body, u32> {
        let session = self.session_of(sid, errno::BUSY)?;
        session.references -= 1;
        if session.references == 0
            && let Some(session) = self.session.take()
        {
            session.end(node, &mut self.client);
        }
        Ok(Body::SessionRemoved {
            status: 0,
            sid: self.sid(),
        })
    }

    fn debug(&self) -> Result<Body, u32> {
        let session = self.session.as_ref().ok_or(errno::NO_SESSION)?;
        Ok(Body::DebugReply {
            status: 0,
            sid: session.sid,
            timeout: self.config.session_timeout.as_secs() as u32,
            batches: 0,
            name: session.name,
        })
    }

    fn stat(&mut self, node: &Node, now: Instant, sid: Sid) -> Result<Body, u32> {
        let rpc = self.counters();
        let framework = self.session_of(sid, errno::NO_SESSION)?.counters(now);
        let lnet = node.counters();
        Ok(Body::StatReply {
            status: 0,
            sid,
            framework,
            rpc,
            lnet: LnetCounters {
                sent: lnet.sent as u32,
                received: lnet.received as u32,
                dropped: lnet.dropped as u32,
                sent_bytes: lnet.sent_bytes,
                received_bytes: lnet.received_bytes,
                ..LnetCounters::default()
            },
        })
    }

    fn batch(&mut self, node: &mut Node, now: Instant, body: &Body) -> Result<Body, u32> {
        let Body::Batch {
            sid,
            batch,
            operation,
            test,
            argument,
            ..
        } = *body
        else {
            return Err(errno::INVALID);
        };
        self.session_of(sid, errno::NO_SESSION)?;
        let session = self.session.as_mut().ok_or(errno::NO_SESSION)?;
        let with = (node, &mut self.client);
        let active = match operation {
            Body::RUN => session.run(with, now, batch).map(|()| 0),
            Body::STOP => session.stop(with, batch, argument != 0).map(|()| 0),
            Body::QUERY => session.query(batch, test),
            _ => Err(errno::INVALID),
        }?;
        Ok(Body::BatchReply {
            status: 0,
            sid,
            active,
            time: 0,
        })
    }

    /// Adds a test. A client's nodes come first, as data.
    fn add(&mut self, node: &mut Node, now: Instant, peer: Nid, request: &Message) -> Result<Option<Answer>, u32> {
        let Body::Test {
            bulk_bits,
            sid,
            batch,
            service,
            loops,
            concurrency,
            is_client,
            nodes,
            ..
        } = request.body
        else {
            return Err(errno::INVALID);
        };
        let is_test = [Service::Bulk, Service::Ping].map(Service::number).contains(&service);
        let len = (nodes as usize).saturating_mul(DEST_LEN);
        let fits = (1..=MAX_BULK as usize).contains(&len) || is_client == 0;
        let is_possible = loops != 0 && (1..=MAX_CONCURRENCY).contains(&concurrency) && fits;
        if !is_test || !is_possible {
            return Err(errno::INVALID);
        }
        let session = self.session_of(sid, errno::NO_ENTRY).map_err(|status| match status {
            errno::NO_SESSION => errno::NO_ENTRY,
            other => other,
        })?;
        if is_client == 0 {
            return session.add_server(batch).map(|()| None);
        }
        session.admit(batch)?;
        let is_in_bytes = session.features.contains(Features::BULK_LEN);
        let len = if is_in_bytes { len } else { len.next_multiple_of(4096) };
        let sink = self.sink(peer, len).ok_or(errno::NO_MEMORY)?;
        let begun = get(node, now, (peer, bulk_bits), sink.clone());
        Ok(Some(self.move_data(peer, request, (len, Then::Add(sink)), begun)))
    }

    fn add_client(&mut self, request: &Message, data: &[u8]) -> Result<(), u32> {
        let Body::Test { sid, nodes, .. } = request.body else {
            return Err(errno::INVALID);
        };
        let limits = (self.config.max_units, self.config.max_unit_bytes);
        let session = self.session_of(sid, errno::NO_ENTRY)?;
        let mut peers = request.destinations(data);
        peers.truncate(nodes as usize);
        session.add_client(request, &peers, limits)
    }
}

/// Units of a test for each node, at most (`SFW_MAX_CONCUR`).
const MAX_CONCURRENCY: u32 = 1024;

fn ping(features: Features, magic: u32, number: u32) -> Answer {
    let is_known = Features::all().contains(features);
    let status = if is_known { 0 } else { errno::PROTOCOL };
    let reply = Body::PingReply { status, magic, number };
    match magic {
        PING_MAGIC => Answer::Reply(features & Features::all(), reply),
        _ => Answer::Drop,
    }
}

fn put(
    node: &mut Node,
    now: Instant,
    (peer, match_bits): (Nid, u64),
    memory: Option<Buffer>,
    data: &[u8],
) -> Result<JobId, Failure> {
    if let Some(memory) = &memory {
        memory.write(data);
    }
    put_data(node, now, (peer, match_bits), memory)
}

fn put_data(
    node: &mut Node,
    now: Instant,
    (peer, match_bits): (Nid, u64),
    source: Option<Buffer>,
) -> Result<JobId, Failure> {
    let put = Put {
        peer,
        portal: RDMA_PORTAL,
        match_bits,
        hdr_data: 0,
        offset: 0,
        source: source.ok_or_else(|| Failure::Local("no memory".into()))?,
        ack: false,
    };
    node.put(now, &put)
}

fn get(node: &mut Node, now: Instant, (peer, match_bits): (Nid, u64), sink: Buffer) -> Result<JobId, Failure> {
    let get = Get {
        peer,
        portal: RDMA_PORTAL,
        match_bits,
        offset: 0,
        sink,
    };
    node.get(now, &get)
}
