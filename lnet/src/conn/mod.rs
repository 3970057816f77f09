//! Connection to a peer.

mod link;
mod tx;

use std::collections::{BTreeMap, VecDeque};

use roce_verbs::{
    Instant, WcStatus,
    messages::MessageDone,
    provider::{MrId, MrInfo, Provider},
};

pub(crate) use link::Link;
pub(crate) use tx::{Awaited, Content, Cookie, Target, Tx, Waiting};

use crate::{
    buffer::Buffer,
    config::Config,
    credits::{Credits, OUT_OF_BAND, Settled},
    event::{Failure, Of},
    handshake::{Agreed, Identity},
    info::{ConnectionInfo, Negotiated},
    proto::{Body, Completion, Fragment, Fragments, Message, MsgType, Nid, RdmaDesc},
};

use tx::{InFlight, writes};

/// Error number of a transfer for which there is no memory (`-ENOMEM`).
const NO_MEMORY: i32 = -12;
/// Of one whose sink is too short (`-EMSGSIZE`).
const TOO_LONG: i32 = -90;

/// Number of a connection.
pub(crate) type ConnId = usize;

/// States of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    /// We look for the way to the peer.
    Resolving,
    /// We have asked.
    Connecting,
    /// We have accepted, and wait for the peer's last word, or a message.
    Accepting,
    /// Both may send.
    Established,
    /// It is over. It goes when it is drained.
    Closing,
}

/// Transfer that has ended, with so many bytes.
pub(crate) type Ended = (Of, Result<u32, Failure>);

/// See the module.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) peer: Nid,
    pub(crate) phase: Phase,
    pub(crate) link: Link,
    /// The peer's incarnation; 0: not known yet.
    pub(crate) stamp: u64,
    /// Fragments of a descriptor.
    frags: u16,
    /// Why it is over.
    pub(crate) why: Failure,
    credits: Credits,
    /// Messages that wait for a place for their answer.
    asking: VecDeque<Tx>,
    /// Messages that wait for a credit.
    costly: VecDeque<Tx>,
    /// Messages that wait for neither.
    free: VecDeque<Tx>,
    in_flight: VecDeque<InFlight>,
    waiting: BTreeMap<Cookie, Waiting>,
    /// Buffers and lengths of messages that have come before the peer's answer to our request.
    early: Vec<(u32, usize)>,
    /// Transfers that could not begin.
    ended: Vec<Ended>,
    /// When something was sent last.
    sent_at: Instant,
}

impl Connection {
    /// Returns one that is not established.
    pub(crate) fn new(peer: Nid, phase: Phase, link: Link, now: Instant) -> Self {
        Self {
            peer,
            phase,
            link,
            stamp: 0,
            frags: 0,
            why: Failure::Disconnected,
            credits: Credits::new(1, 1),
            asking: VecDeque::new(),
            costly: VecDeque::new(),
            free: VecDeque::new(),
            in_flight: VecDeque::new(),
            waiting: BTreeMap::new(),
            early: Vec::new(),
            ended: Vec::new(),
            sent_at: now,
        }
    }

    /// Takes what was agreed on. No message has left or come before.
    pub(crate) fn agree(&mut self, agreed: &Agreed, config: &Config) {
        (self.stamp, self.frags) = (agreed.stamp, agreed.frags);
        self.credits = Credits::new(agreed.depth, config.high_water(agreed.depth)).with(config.planted());
    }

    /// Keeps a message until it is known what was agreed on.
    pub(crate) fn keep_early(&mut self, buffer: u32, len: usize) {
        self.early.push((buffer, len));
    }

    /// Takes the messages that were kept.
    pub(crate) fn take_early(&mut self) -> Vec<(u32, usize)> {
        core::mem::take(&mut self.early)
    }

    /// Its parameters.
    pub(crate) const fn negotiated(&self) -> Negotiated {
        Negotiated {
            depth: self.credits.info().depth,
            frags: self.frags,
            incarnation: self.stamp,
        }
    }

    /// Its state, to be shown.
    pub(crate) fn info(&self) -> ConnectionInfo {
        let is_promised = |waiting: &&Waiting| matches!(waiting.state, Awaited::PutDone(..));
        let promised = self.waiting.values().filter(is_promised).count();
        ConnectionInfo {
            peer: self.peer,
            is_established: self.phase == Phase::Established,
            negotiated: self.negotiated(),
            credits: self.credits.info(),
            queued: self.queued(),
            in_flight: self.in_flight.len(),
            asked: self.waiting.len() - promised,
            promised,
        }
    }

    /// Messages that wait to be sent.
    pub(crate) fn queued(&self) -> usize {
        self.asking.len() + self.costly.len() + self.free.len()
    }

    /// Adds a message to be sent.
    pub(crate) fn push(&mut self, tx: Tx) {
        match (tx.asks(), tx.costs()) {
            (true, _) => self.asking.push_back(tx),
            (false, true) => self.costly.push_back(tx),
            (false, false) => self.free.push_back(tx),
        }
    }

    /// Takes the transfers that could not begin.
    pub(crate) fn take_ended(&mut self) -> Vec<Ended> {
        core::mem::take(&mut self.ended)
    }

    /// Posts what there is and fits. [`take_ended`](Self::take_ended) has the transfers that could not begin, also after an error.
    ///
    /// # Errors
    /// The connection has failed.
    pub(crate) fn pump(
        &mut self,
        provider: &mut dyn Provider,
        us: &Identity,
        (now, config): (Instant, &Config),
    ) -> Result<(), Failure> {
        self.link.post_receives(provider)?;
        while !self.asking.is_empty() && self.credits.reserve() {
            self.costly.extend(self.asking.pop_front());
        }
        while let Some(tx) = self.next(now, config) {
            self.post(provider, us, tx)?;
            self.sent_at = now;
        }
        Ok(())
    }

    /// Takes the next message that may be sent now.
    fn next(&mut self, now: Instant, config: &Config) -> Option<Tx> {
        let in_flight = self.in_flight.len();
        let fits = |tx: &Tx| self.link.has_room(in_flight, tx.writes());
        if self.free.front().is_some_and(fits) {
            return self.free.pop_front();
        }
        if self.credits.may_send() && self.costly.front().is_some_and(fits) {
            return self.costly.pop_front();
        }
        let noops = self.in_flight.iter().filter(|sent| sent.is_noop).count();
        let is_idle = config.keepalive.is_some_and(|after| now >= self.sent_at + after);
        let is_due = self.credits.is_high() || is_idle;
        let may = noops < usize::from(OUT_OF_BAND) && self.link.has_room(in_flight, 0);
        (is_due && may && self.free.is_empty()).then(|| Tx {
            content: Content::Noop,
            deadline: now + config.timeout,
        })
    }

    /// Sends a message, with the memory that it needs.
    fn post(&mut self, provider: &mut dyn Provider, us: &Identity, tx: Tx) -> Result<(), Failure> {
        let deadline = tx.deadline;
        match tx.content {
            Content::Noop => self.send(provider, us, &Body::Noop, sent(deadline, true)),
            Content::Immediate { hdr, payload, of } => {
                let ends = Some((of, payload.len() as u32));
                let body = Body::Immediate {
                    hdr: &hdr,
                    payload: &payload,
                };
                self.send(
                    provider,
                    us,
                    &body,
                    InFlight {
                        ends,
                        ..sent(deadline, false)
                    },
                )
            }
            Content::PutReq {
                hdr,
                cookie,
                source,
                of,
            } => {
                self.await_answer(cookie, Awaited::Sink(source), of, deadline);
                let body = Body::PutReq { hdr: &hdr, cookie };
                self.send(provider, us, &body, sent(deadline, false))
            }
            Content::PutNak { cookie, status } => {
                let body = Body::PutNak(Completion { cookie, status });
                self.send(provider, us, &body, sent(deadline, false))
            }
            Content::Nothing { cookie, status } => {
                let body = Body::GetDone(Completion { cookie, status });
                self.send(provider, us, &body, sent(deadline, false))
            }
            Content::PutAck {
                src_cookie,
                cookie,
                sink,
                of,
            } => self.post_sink(provider, us, (src_cookie, cookie), (&sink, of), deadline),
            Content::GetReq { hdr, cookie, sink, of } => match self.link.register(provider, &sink, true) {
                Ok(mr) => {
                    let frags = [fragment(&mr)];
                    let body = Body::GetReq {
                        hdr: &hdr,
                        cookie,
                        desc: desc(&mr, &frags),
                    };
                    self.await_answer(cookie, Awaited::GetDone(mr.id, mr.len as u32), of, deadline);
                    self.send(provider, us, &body, sent(deadline, false))
                }
                Err(e) => {
                    self.credits.answered();
                    self.ended.push((of, Err(e.into())));
                    Ok(())
                }
            },
            Content::Data {
                kind,
                target,
                source,
                of,
            } => self.post_data(provider, us, (kind, &target), (&source, of), deadline),
        }
    }

    fn post_sink(
        &mut self,
        provider: &mut dyn Provider,
        us: &Identity,
        (src_cookie, dst_cookie): (Cookie, Cookie),
        (sink, of): (&Buffer, Of),
        deadline: Instant,
    ) -> Result<(), Failure> {
        match self.link.register(provider, sink, true) {
            Ok(mr) => {
                let frags = [fragment(&mr)];
                let body = Body::PutAck {
                    src_cookie,
                    dst_cookie,
                    desc: desc(&mr, &frags),
                };
                self.await_answer(dst_cookie, Awaited::PutDone(mr.id, mr.len as u32), of, deadline);
                self.send(provider, us, &body, sent(deadline, false))
            }
            Err(e) => {
                // No PUT_DONE will come that gives the credit back.
                self.credits.put_done();
                let refusal = Completion {
                    cookie: src_cookie,
                    status: NO_MEMORY,
                };
                self.ended.push((of, Err(e.into())));
                self.send(provider, us, &Body::PutNak(refusal), sent(deadline, false))
            }
        }
    }

    /// Writes data into the peer's memory and tells it, or tells it why not.
    fn post_data(
        &mut self,
        provider: &mut dyn Provider,
        us: &Identity,
        (kind, target): (MsgType, &Target),
        (source, of): (&Buffer, Of),
        deadline: Instant,
    ) -> Result<(), Failure> {
        let registered = self.link.register(provider, source, false);
        let ready = match registered {
            Ok(mr) => match writes(&mr, target) {
                Some(writes) => Ok((mr, writes)),
                None => {
                    self.link.release(provider, mr.id);
                    Err((TOO_LONG, Failure::TooLong))
                }
            },
            Err(e) => Err((NO_MEMORY, e.into())),
        };
        let status = match &ready {
            Ok((mr, _)) => mr.len as i32,
            Err((status, _)) => *status,
        };
        let done = Completion {
            cookie: target.cookie,
            status,
        };
        let body = match kind {
            MsgType::PutDone => Body::PutDone(done),
            _ => Body::GetDone(done),
        };
        match ready {
            Ok((mr, writes)) => {
                let flight = InFlight {
                    mr: Some(mr.id),
                    ends: Some((of, mr.len as u32)),
                    ..sent(deadline, false)
                };
                self.transmit(provider, us, (&writes, &body), flight)
            }
            Err((_, why)) => {
                self.ended.push((of, Err(why)));
                self.send(provider, us, &body, sent(deadline, false))
            }
        }
    }

    fn await_answer(&mut self, cookie: Cookie, state: Awaited, of: Of, deadline: Instant) {
        self.waiting.insert(cookie, Waiting { state, of, deadline });
    }

    fn send(
        &mut self,
        provider: &mut dyn Provider,
        us: &Identity,
        body: &Body<'_>,
        flight: InFlight,
    ) -> Result<(), Failure> {
        self.transmit(provider, us, (&[], body), flight)
    }

    fn transmit(
        &mut self,
        provider: &mut dyn Provider,
        us: &Identity,
        (writes, body): (&[link::Write], &Body<'_>),
        flight: InFlight,
    ) -> Result<(), Failure> {
        let costs = match body.kind() {
            MsgType::Immediate | MsgType::PutReq | MsgType::GetReq => true,
            MsgType::Noop => self.credits.noop_costs(),
            _ => false,
        };
        let message = Message {
            credits: self.credits.sent(costs),
            src_stamp: us.stamp,
            dst_stamp: self.stamp,
            ..Message::new(us.nid, self.peer, *body)
        };
        // First, so that its transfer ends with the connection if it can't be posted.
        self.in_flight.push_back(flight);
        Ok(self.link.post(provider, writes, &message.to_bytes())?)
    }

    /// A message has gone. Returns the transfer that has ended with it.
    pub(crate) fn sent(&mut self, provider: &mut dyn Provider) -> Option<Ended> {
        let flight = self.in_flight.pop_front()?;
        if let Some(mr) = flight.mr {
            self.link.release(provider, mr);
        }
        flight.ends.map(|(of, len)| (of, Ok(len)))
    }

    /// Checks the head of a message, and takes the credits that it gives back and that it costs.
    ///
    /// # Errors
    /// It is none of this connection's.
    pub(crate) fn accept(&mut self, us: &Identity, message: &Message<'_>) -> Result<(), Failure> {
        let is_theirs = (message.src, message.src_stamp) == (self.peer, self.stamp);
        if !is_theirs || (message.dst, message.dst_stamp) != (us.nid, us.stamp) {
            return Err(Failure::Peer("a message of another node or incarnation, or for one"));
        }
        message.check_checksum()?;
        self.credits.returned(message.credits)?;
        let settled = match message.body.kind() {
            MsgType::Immediate | MsgType::GetReq => Settled::Returned,
            MsgType::PutReq => Settled::Kept,
            _ => return Ok(()),
        };
        self.credits.received()?;
        self.credits.settle(settled);
        Ok(())
    }

    /// A PUT_REQ is not answered with memory.
    pub(crate) fn refused(&mut self) {
        self.credits.put_done();
    }

    /// Takes the transfer that a message of the peer answers.
    ///
    /// # Errors
    /// There is none, or it waits for something else.
    pub(crate) fn answered(&mut self, cookie: Cookie, kind: MsgType) -> Result<Waiting, Failure> {
        let fits = |waiting: &Waiting| {
            matches!(
                (&waiting.state, kind),
                (Awaited::Sink(_), MsgType::PutAck | MsgType::PutNak)
                    | (Awaited::PutDone(..), MsgType::PutDone)
                    | (Awaited::GetDone(..), MsgType::GetDone)
            )
        };
        let nothing = Failure::Peer("an answer to nothing that was asked");
        if !self.waiting.get(&cookie).is_some_and(fits) {
            return Err(nothing);
        }
        let waiting = self.waiting.remove(&cookie).ok_or(nothing)?;
        match waiting.state {
            Awaited::PutDone(..) => self.credits.put_done(),
            Awaited::Sink(_) | Awaited::GetDone(..) => self.credits.answered(),
        }
        Ok(waiting)
    }

    /// The peer is done with our memory. Returns the bytes that have come, by its word.
    ///
    /// # Errors
    /// [`Failure::Status`]: it could not. [`Failure::Peer`]: it says more than there is room for.
    pub(crate) fn filled(
        &mut self,
        provider: &mut dyn Provider,
        (mr, room): (MrId, u32),
        status: i32,
    ) -> Result<u32, Failure> {
        self.link.release(provider, mr);
        match u32::try_from(status) {
            Ok(len) if len <= room => Ok(len),
            Ok(_) => Err(Failure::Peer("more bytes are done than were asked for")),
            Err(_) => Err(Failure::Status(status)),
        }
    }

    /// Returns whether something waits longer than it may.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        let queues = [&self.asking, &self.costly, &self.free];
        let queued = queues.into_iter().filter_map(|queue| queue.front());
        let mut deadlines = queued
            .map(|tx| tx.deadline)
            .chain(self.in_flight.front().map(|sent| sent.deadline))
            .chain(self.waiting.values().map(|waiting| waiting.deadline));
        deadlines.any(|at| at <= now)
    }

    /// Understands a completion.
    ///
    /// # Errors
    /// The connection has failed.
    pub(crate) fn completed(&mut self, wc: &roce_verbs::Completion) -> Result<MessageDone, Failure> {
        self.link.completed(wc).map_err(|status: WcStatus| match status {
            // The queue pair has failed: what came before says why, or the connection manager has ended it.
            WcStatus::FlushError => Failure::Disconnected,
            status => Failure::Completion(status),
        })
    }

    /// Destroys it; nothing of it is under way. Returns its transfers, which have failed.
    pub(crate) fn destroy(self, provider: &mut dyn Provider) -> Vec<Of> {
        let queued = [self.asking, self.costly, self.free].into_iter().flatten().map(Tx::of);
        let sent = self.in_flight.into_iter().filter_map(|sent| Some(sent.ends?.0));
        let waiting = self.waiting.into_values().map(|waiting| waiting.of);
        let transfers = queued.chain(sent).chain(waiting).collect();
        self.link.destroy(provider);
        transfers
    }
}

const fn sent(deadline: Instant, is_noop: bool) -> InFlight {
    InFlight {
        is_noop,
        mr: None,
        ends: None,
        deadline,
    }
}

fn fragment(mr: &MrInfo) -> Fragment {
    Fragment {
        nob: mr.len as u32,
        addr: mr.addr,
    }
}

const fn desc<'a>(mr: &MrInfo, frags: &'a [Fragment]) -> RdmaDesc<'a> {
    RdmaDesc {
        key: mr.rkey.0,
        frags: Fragments::List(frags),
    }
}
