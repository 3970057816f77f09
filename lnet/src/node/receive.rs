//! Messages of peers.

use roce_verbs::{
    Instant,
    provider::{Cx, Provider},
};

use super::Node;
use crate::{
    buffer::Buffer,
    conn::{Awaited, ConnId, Content, Cookie, Phase, Target, Tx},
    event::{Failure, JobId, Of, Output, Served},
    portal::{Matched, Wanted},
    proto::{
        Body, ByteOrder, Completion, Features, Handle, LnetHdr, Message, MsgType, NET_LO, NiStatus, Nid, Operation,
        PID_LUSTRE, PING_MATCH_BITS, PING_PORTAL, PingInfo, RdmaDesc, STATUS_UP,
    },
};

/// Error number of a GET that nothing matches (`-ENODATA`).
const NO_DATA: i32 = -61;
/// Longest ping information of a peer that is taken, and forgotten.
const MAX_PUSH: usize = 64 << 10;

/// Decision about an LNet message.
enum Parsed {
    /// It is for nobody here.
    Dropped,
    /// It is for us.
    For(Operation),
}

/// Memory for a PUT's or REPLY's data, and whose it is.
type Sink = (Buffer, Of);

impl Node {
    /// A message has come.
    pub(super) fn received(&mut self, cx: &mut Cx<'_>, id: ConnId, buffer: u32, len: usize) -> Result<(), Failure> {
        if self.conns[id].phase == Phase::Accepting {
            // The peer sends, so it has got our answer: its last word is lost or late.
            self.established(cx.provider, id);
        }
        let bytes = self.conns[id].link.take(buffer, len);
        let message = Message::parse(&bytes)?;
        self.conns[id].accept(&self.us, &message)?;
        self.dirty.insert(id);
        match message.body {
            Body::Noop => Ok(()),
            Body::ConnReq(_) | Body::ConnAck(_) => Err(Failure::Peer("a request to connect amid a connection")),
            Body::Immediate { hdr, payload } => self.immediate(cx.now, id, hdr, payload),
            Body::PutReq { hdr, cookie } => self.put_req(cx.now, id, hdr, cookie),
            Body::GetReq { hdr, cookie, desc } => self.get_req(cx.now, id, hdr, (cookie, &desc)),
            Body::PutAck {
                src_cookie,
                dst_cookie,
                desc,
            } => self.put_ack(cx.now, id, src_cookie, target(dst_cookie, &desc)),
            Body::PutNak(done) => {
                let waiting = self.conns[id].answered(done.cookie, MsgType::PutNak)?;
                let result = match done.status {
                    0.. => Ok(0),
                    status => Err(Failure::Status(status)),
                };
                self.ended(waiting.of, result);
                Ok(())
            }
            Body::PutDone(done) => self.filled(cx, id, MsgType::PutDone, done),
            Body::GetDone(done) => self.filled(cx, id, MsgType::GetDone, done),
        }
    }

    fn push(&mut self, now: Instant, id: ConnId, content: Content) -> Result<(), Failure> {
        let deadline = now + self.config.timeout;
        let tx = Tx { content, deadline };
        // A peer that asks and takes no answers.
        if self.conns[id].queued() >= self.config.max_queued {
            self.ended(tx.of(), Err(Failure::Full));
            return Err(Failure::Full);
        }
        self.count_sent(&tx.content);
        self.conns[id].push(tx);
        Ok(())
    }

    fn count_received(&mut self, len: u32) {
        self.counters.received += 1;
        self.counters.received_bytes += u64::from(len);
    }

    /// Understands an LNet header.
    fn parse(&mut self, id: ConnId, hdr: &LnetHdr) -> Result<Parsed, Failure> {
        let operation = hdr.check()?;
        let (dst, us) = (hdr.dst(), self.us.nid);
        // Answers go to where the message has come from: there are no routers.
        if dst == us && hdr.src() == self.conns[id].peer {
            self.count_received(hdr.payload_length.get());
            return Ok(Parsed::For(operation));
        }
        self.counters.dropped += 1;
        match dst != us && dst.0 >> 32 == us.0 >> 32 {
            true => Err(Failure::Peer("an LNet message for another node")),
            false => Ok(Parsed::Dropped),
        }
    }

    fn immediate(&mut self, now: Instant, id: ConnId, hdr: &LnetHdr, payload: &[u8]) -> Result<(), Failure> {
        let Parsed::For(operation) = self.parse(id, hdr)? else {
            return Ok(());
        };
        let len = hdr.payload_length.get() as usize;
        let data = payload
            .get(..len)
            .ok_or(Failure::Peer("less data than the header says"))?;
        let peer = self.conns[id].peer;
        match operation {
            Operation::Ack { dst_md, mlength, .. } => {
                if let Some(job) = self.named(peer, dst_md) {
                    self.acknowledged(job, mlength);
                }
                Ok(())
            }
            Operation::Reply { dst_md } => {
                if let Some(job) = self.named(peer, dst_md) {
                    let result = match self.sink_of(job, len) {
                        Some(sink) => Ok(sink.write(data) as u32),
                        None => Err(Failure::TooLong),
                    };
                    self.finish(job, result);
                }
                Ok(())
            }
            Operation::Put { .. } => {
                let Some((sink, of)) = self.sink_of_put(peer, hdr, &operation, true) else {
                    return self.pushed(now, id, hdr, &operation);
                };
                let taken = sink.write(&data[..sink.len().min(data.len())]) as u32;
                self.delivered(now, id, of, Ok(taken))
            }
            Operation::Get { sink_length, .. } => self.reply(now, id, hdr, (&operation, sink_length as usize)),
            Operation::Hello { .. } => Ok(()),
        }
    }

    /// Answers a GET with a REPLY.
    fn reply(
        &mut self,
        now: Instant,
        id: ConnId,
        hdr: &LnetHdr,
        (operation, room): (&Operation, usize),
    ) -> Result<(), Failure> {
        let Operation::Get { return_md, .. } = *operation else {
            return Ok(());
        };
        let peer = self.conns[id].peer;
        let (source, of) = match self.source_of_get(peer, operation, room) {
            Some(found) => found,
            None => {
                self.counters.dropped += 1;
                return Ok(());
            }
        };
        let reply = Operation::Reply { dst_md: return_md };
        let mut answer = LnetHdr::new(peer, self.us.nid, source.len() as u32, &reply);
        answer.dst_pid = hdr.src_pid;
        let content = self.data(answer, source, of);
        self.push(now, id, content)
    }

    fn put_req(&mut self, now: Instant, id: ConnId, hdr: &LnetHdr, src_cookie: Cookie) -> Result<(), Failure> {
        let sink = match self.parse(id, hdr)? {
            Parsed::Dropped => None,
            Parsed::For(operation) => self.sink_for(self.conns[id].peer, hdr, &operation),
        };
        let content = match sink {
            Some((sink, of)) if !sink.is_empty() => Content::PutAck {
                src_cookie,
                cookie: self.cookie(),
                sink,
                of,
            },
            other => {
                self.conns[id].refused();
                if let Some((_, of)) = other {
                    self.delivered(now, id, of, Ok(0))?;
                }
                Content::PutNak {
                    cookie: src_cookie,
                    status: 0,
                }
            }
        };
        self.push(now, id, content)
    }

    /// Memory for data that a peer wants to write: of an entry, or of one of our GETs.
    fn sink_for(&mut self, peer: Nid, hdr: &LnetHdr, operation: &Operation) -> Option<Sink> {
        match *operation {
            Operation::Put { .. } => self.sink_of_put(peer, hdr, operation, false),
            Operation::Reply { dst_md } => {
                let job: JobId = self.named(peer, dst_md)?;
                let Some(sink) = self.sink_of(job, hdr.payload_length.get() as usize) else {
                    self.finish(job, Err(Failure::TooLong));
                    return None;
                };
                self.answer_moves(job);
                Some((sink, Of::Job(job)))
            }
            _ => None,
        }
    }

    fn sink_of_put(&mut self, from: Nid, hdr: &LnetHdr, operation: &Operation, has_data: bool) -> Option<Sink> {
        let Operation::Put {
            ack_md,
            match_bits,
            hdr_data,
            portal,
            offset,
        } = *operation
        else {
            return None;
        };
        let wanted = Wanted {
            from,
            portal,
            match_bits,
            offset: offset as usize,
            len: hdr.payload_length.get() as usize,
            is_put: true,
            has_data,
        };
        let Matched { entry, offset, memory } = self.portals.find(&wanted)?;
        let served = Served {
            entry,
            from,
            is_put: true,
            match_bits,
            hdr_data,
            offset,
            ack: (ack_md != Handle::NONE).then(|| (ack_md, hdr.src_pid.get())),
        };
        Some((memory, Of::Served(Box::new(served))))
    }

    /// Data for a GET: ping information, or an entry's.
    fn source_of_get(&mut self, from: Nid, operation: &Operation, room: usize) -> Option<(Buffer, Of)> {
        let Operation::Get {
            match_bits,
            portal,
            src_offset,
            ..
        } = *operation
        else {
            return None;
        };
        if (portal, match_bits) == (PING_PORTAL, PING_MATCH_BITS) {
            let info = self.ping_info();
            let source = Buffer::allocate(info.len())?;
            source.write(&info);
            self.out.push_back(Output::Pinged(from));
            return Some((source.part(0, info.len().min(room))?, Of::Nobody));
        }
        let wanted = Wanted {
            from,
            portal,
            match_bits,
            offset: src_offset as usize,
            len: room,
            is_put: false,
            has_data: true,
        };
        let Matched { entry, offset, memory } = self.portals.find(&wanted)?;
        let served = Served {
            entry,
            from,
            is_put: false,
            match_bits,
            hdr_data: 0,
            offset,
            ack: None,
        };
        Some((memory, Of::Served(Box::new(served))))
    }

    /// Ping information of this node. The status of the first interface, the loopback, is the sequence number of the information, which
    /// never changes: as that of a kernel to which one interface was added.
    fn ping_info(&mut self) -> Vec<u8> {
        const SEQUENCE_NUMBER: u32 = 2;
        self.counters.pings += 1;
        let interface = |nid, status| NiStatus {
            nid,
            status,
            msg_size: 0,
        };
        let loopback = Nid::new(NET_LO, 0, [0; 4].into());
        let interfaces = [interface(loopback, SEQUENCE_NUMBER), interface(self.us.nid, STATUS_UP)];
        PingInfo::emit(ByteOrder::Little, Features::NODE, PID_LUSTRE, &interfaces, &[])
    }

    /// A PUT that no entry takes: a peer's ping information is acknowledged, anything else is dropped.
    fn pushed(&mut self, now: Instant, id: ConnId, hdr: &LnetHdr, operation: &Operation) -> Result<(), Failure> {
        let len = hdr.payload_length.get();
        match *operation {
            Operation::Put {
                ack_md,
                match_bits: PING_MATCH_BITS,
                portal: PING_PORTAL,
                ..
            } if ack_md != Handle::NONE && len as usize <= MAX_PUSH => {
                self.counters.discoveries += 1;
                self.out.push_back(Output::Pushed(self.conns[id].peer));
                self.acknowledge(now, id, (ack_md, hdr.src_pid.get()), PING_MATCH_BITS, len)
            }
            _ => {
                self.counters.dropped += 1;
                Ok(())
            }
        }
    }

    /// Data of a peer is in an entry's memory, or not.
    fn delivered(&mut self, now: Instant, id: ConnId, of: Of, result: Result<u32, Failure>) -> Result<(), Failure> {
        let ack = match (&of, &result) {
            (Of::Served(served), Ok(len)) => served.ack.map(|ack| (ack, served.match_bits, *len)),
            _ => None,
        };
        self.ended(of, result);
        match ack {
            Some((ack, match_bits, len)) => self.acknowledge(now, id, ack, match_bits, len),
            None => Ok(()),
        }
    }

    fn acknowledge(
        &mut self,
        now: Instant,
        id: ConnId,
        (dst_md, pid): (Handle, u32),
        match_bits: u64,
        mlength: u32,
    ) -> Result<(), Failure> {
        let operation = Operation::Ack {
            dst_md,
            match_bits,
            mlength,
        };
        let mut hdr = LnetHdr::new(self.conns[id].peer, self.us.nid, 0, &operation);
        hdr.dst_pid = pid.into();
        let content = Content::Immediate {
            hdr,
            payload: Vec::new(),
            of: Of::Nobody,
        };
        self.push(now, id, content)
    }

    fn get_req(
        &mut self,
        now: Instant,
        id: ConnId,
        hdr: &LnetHdr,
        (cookie, desc): (Cookie, &RdmaDesc<'_>),
    ) -> Result<(), Failure> {
        let room = usize::try_from(desc.nob()).unwrap_or(usize::MAX);
        let found = match self.parse(id, hdr)? {
            Parsed::For(operation @ Operation::Get { sink_length, .. }) => {
                let room = room.min(sink_length as usize);
                self.source_of_get(self.conns[id].peer, &operation, room)
            }
            Parsed::For(_) => return Err(Failure::Peer("memory for an answer to something else than a GET")),
            Parsed::Dropped => None,
        };
        let content = match found {
            Some((source, of)) if !source.is_empty() => Content::Data {
                kind: MsgType::GetDone,
                target: target(cookie, desc),
                source,
                of,
            },
            other => {
                let status = if other.is_some() { 0 } else { NO_DATA };
                if let Some((_, of)) = other {
                    self.ended(of, Ok(0));
                }
                Content::Nothing { cookie, status }
            }
        };
        self.push(now, id, content)
    }

    fn put_ack(&mut self, now: Instant, id: ConnId, cookie: Cookie, target: Target) -> Result<(), Failure> {
        let waiting = self.conns[id].answered(cookie, MsgType::PutAck)?;
        let Awaited::Sink(source) = waiting.state else {
            return Ok(());
        };
        let content = Content::Data {
            kind: MsgType::PutDone,
            target,
            source,
            of: waiting.of,
        };
        self.push(now, id, content)
    }

    /// The peer has written, or says why it has not.
    fn filled(&mut self, cx: &mut Cx<'_>, id: ConnId, kind: MsgType, done: Completion) -> Result<(), Failure> {
        let waiting = self.conns[id].answered(done.cookie, kind)?;
        let (Awaited::PutDone(mr, room) | Awaited::GetDone(mr, room)) = waiting.state else {
            return Ok(());
        };
        let provider: &mut dyn Provider = cx.provider;
        let result = self.conns[id].filled(provider, (mr, room), done.status);
        if let (MsgType::GetDone, Ok(len)) = (kind, &result) {
            self.count_received(*len);
        }
        match (waiting.of, result) {
            (of, Err(why)) => {
                self.ended(of, Err(why.clone()));
                match why {
                    Failure::Peer(_) => Err(why),
                    _ => Ok(()),
                }
            }
            (Of::Job(job), result) => {
                self.finish(job, result);
                Ok(())
            }
            (of, result) => self.delivered(cx.now, id, of, result),
        }
    }
}

fn target(cookie: Cookie, desc: &RdmaDesc<'_>) -> Target {
    Target {
        cookie,
        key: desc.key,
        frags: desc.frags.iter().collect(),
    }
}
