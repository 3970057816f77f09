//! Requests to services of other nodes.

use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

use roce_verbs::Instant;
use thiserror::Error;

use super::proto::{Body, Features, MESSAGE_LEN, Message, RDMA_PORTAL};
use crate::{
    buffer::Buffer,
    event::{EntryId, Failure, JobId, Output},
    node::Node,
    operation::Put,
    portal::{Entry, EntryOptions},
    proto::{Nid, ProtoError},
};

/// Number of a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CallId(u64);

/// Data that belongs to a request.
#[derive(Clone, Debug)]
pub enum Data {
    /// None.
    None,
    /// Memory that the server fills.
    Sink(Buffer),
    /// Memory that the server fetches.
    Source(Buffer),
}

/// Why a request has come to nothing.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum CallError {
    /// It could not be sent, or the reply or the data has not come whole.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// The reply can't be understood.
    #[error(transparent)]
    Malformed(#[from] ProtoError),
    /// The reply is one to something else.
    #[error("the reply is of type {found} and not {expected}")]
    Reply {
        /// Its type.
        found: u32,
        /// That of a reply to the request.
        expected: u32,
    },
    /// Other data has come than was asked for.
    #[error("{found} bytes of data instead of {expected}")]
    Data {
        /// Bytes that came, or were fetched.
        found: u32,
        /// Bytes of the memory.
        expected: usize,
    },
    /// No reply in time.
    #[error("no reply in time")]
    Timeout,
    /// It was canceled.
    #[error("canceled")]
    Canceled,
}

/// Request that has not ended. It ends when nothing of it is left in the node, so that its memory is free.
#[derive(Debug)]
struct Call {
    expected: u32,
    deadline: Instant,
    /// Its PUT, while that has not ended.
    job: Option<JobId>,
    /// Memory for the reply, and for the data, while peers may use it.
    reply: Option<(EntryId, Buffer)>,
    data: Option<(EntryId, usize)>,
    /// Its result, as far as it is known.
    outcome: Option<Result<Message, CallError>>,
}

impl Call {
    const fn is_over(&self) -> bool {
        self.job.is_none() && self.reply.is_none() && self.data.is_none()
    }
}

/// Sends requests, and waits for their replies.
#[derive(Debug)]
pub struct Client {
    timeout: Duration,
    /// Match bits of the next memory.
    next_bits: u64,
    next: u64,
    calls: BTreeMap<CallId, Call>,
    by_job: BTreeMap<JobId, CallId>,
    by_entry: BTreeMap<EntryId, CallId>,
    out: VecDeque<(CallId, Result<Message, CallError>)>,
    sent: u32,
    expired: u32,
}

impl Client {
    /// Returns one without requests. `timeout`: longest time until a reply (the kernel's `rpc_timeout` is 64 s). `stamp`: a number that
    /// clients of other times at this NID did not have, so that late replies to them find nothing.
    pub const fn new(timeout: Duration, stamp: u64) -> Self {
        Self {
            timeout,
            next_bits: stamp << 48 | 1,
            next: 0,
            calls: BTreeMap::new(),
            by_job: BTreeMap::new(),
            by_entry: BTreeMap::new(),
            out: VecDeque::new(),
            sent: 0,
            expired: 0,
        }
    }

    /// Requests that have not ended.
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// Returns whether all requests have ended.
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Requests sent, and those without a reply in time.
    pub(super) const fn counters(&self) -> (u32, u32) {
        (self.sent, self.expired)
    }

    /// Takes the next request that has ended, with its reply.
    pub fn poll(&mut self) -> Option<(CallId, Result<Message, CallError>)> {
        self.out.pop_front()
    }

    /// Sends a request. Its match bits are set here.
    ///
    /// # Errors
    /// Too much waits for the peer, there are too many peers, or `body` is a reply.
    pub fn call(
        &mut self,
        node: &mut Node,
        now: Instant,
        peer: Nid,
        (features, mut body): (Features, Body),
        data: Data,
    ) -> Result<CallId, Failure> {
        let service = body
            .service()
            .ok_or(Failure::Peer("a reply in the place of a request"))?;
        let memory = Buffer::allocate(MESSAGE_LEN).ok_or_else(|| Failure::Local("no memory".into()))?;
        let (reply_bits, data_bits) = (self.next_bits, self.next_bits + 1);
        self.next_bits += 2;
        if let Some((reply, data)) = body.bits() {
            *reply = reply_bits;
            if let Some(data) = data {
                *data = data_bits;
            }
        }
        let request = Message::new(features, body).to_bytes();
        let source = Buffer::allocate(MESSAGE_LEN).ok_or_else(|| Failure::Local("no memory".into()))?;
        source.write(&request);
        let put = Put {
            peer,
            portal: service.portal(),
            match_bits: service.number().into(),
            hdr_data: 0,
            offset: 0,
            source,
            ack: false,
        };
        let job = node.put(now, &put)?;
        let id = CallId(self.next);
        self.next += 1;
        self.sent = self.sent.wrapping_add(1);
        self.by_job.insert(job, id);
        let reply = self.attach(node, id, (peer, reply_bits), (EntryOptions::PUT, memory.clone()));
        let (data, len) = match data {
            Data::None => (None, 0),
            Data::Sink(memory) => (Some((EntryOptions::PUT, memory.clone())), memory.len()),
            Data::Source(memory) => (Some((EntryOptions::GET, memory.clone())), memory.len()),
        };
        let data = data.map(|of| (self.attach(node, id, (peer, data_bits), of), len));
        let call = Call {
            expected: body.number() + 1,
            deadline: now + self.timeout,
            job: Some(job),
            reply: Some((reply, memory)),
            data,
            outcome: None,
        };
        self.calls.insert(id, call);
        Ok(id)
    }

    fn attach(
        &mut self,
        node: &mut Node,
        id: CallId,
        (peer, match_bits): (Nid, u64),
        (options, memory): (EntryOptions, Buffer),
    ) -> EntryId {
        let entry = node.attach(Entry {
            portal: RDMA_PORTAL,
            from: Some(peer),
            match_bits,
            ignore_bits: 0,
            options,
            memory,
            uses: Some(1),
        });
        self.by_entry.insert(entry, id);
        entry
    }

    /// Gives a request up. It ends when nothing of it is left.
    pub fn cancel(&mut self, node: &mut Node, id: CallId) {
        self.fail(node, id, CallError::Canceled);
    }

    fn fail(&mut self, node: &mut Node, id: CallId, why: CallError) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        if !matches!(call.outcome, Some(Err(_))) {
            call.outcome = Some(Err(why));
        }
        let reply = call.reply.as_ref().map(|(entry, _)| *entry);
        for entry in reply.into_iter().chain(call.data.map(|(entry, _)| entry)) {
            node.detach(entry);
        }
    }

    /// Handles a report of the node. Returns whether it is about a request.
    pub fn output(&mut self, node: &mut Node, output: &Output) -> bool {
        match output {
            Output::Done(job, result) => {
                let Some(id) = self.by_job.remove(job) else {
                    return false;
                };
                if let Err(why) = result {
                    self.fail(node, id, why.clone().into());
                }
                if let Some(call) = self.calls.get_mut(&id) {
                    call.job = None;
                }
                self.finish(id);
            }
            Output::Served(served, result) => {
                let Some(&id) = self.by_entry.get(&served.entry) else {
                    return false;
                };
                if let Err(why) = self.served(node, id, served.entry, result) {
                    self.fail(node, id, why);
                }
            }
            Output::Unlinked(entry) => {
                let Some(id) = self.by_entry.remove(entry) else {
                    return false;
                };
                if let Some(call) = self.calls.get_mut(&id) {
                    call.reply.take_if(|(of, _)| of == entry);
                    call.data.take_if(|(of, _)| of == entry);
                }
                self.finish(id);
            }
            Output::Up(..) | Output::Down(..) | Output::Refused(..) | Output::Pinged(_) | Output::Pushed(_) => {
                return false;
            }
        }
        true
    }

    fn served(
        &mut self,
        node: &mut Node,
        id: CallId,
        entry: EntryId,
        result: &Result<u32, Failure>,
    ) -> Result<(), CallError> {
        let Some(call) = self.calls.get_mut(&id) else {
            return Ok(());
        };
        let len = result.clone()?;
        if let Some((_, expected)) = call.data.filter(|(of, _)| *of == entry) {
            return match len as usize == expected {
                true => Ok(()),
                false => Err(CallError::Data { found: len, expected }),
            };
        }
        let Some((_, memory)) = &call.reply else { return Ok(()) };
        let bytes = memory.to_vec();
        let reply = Message::parse(&bytes[..bytes.len().min(len as usize)])?;
        let (found, expected) = (reply.body.number(), call.expected);
        if found != expected {
            return Err(CallError::Reply { found, expected });
        }
        if call.outcome.is_none() {
            call.outcome = Some(Ok(reply));
        }
        if let Some((entry, _)) = call.data.filter(|_| reply.body.status() != Some(0)) {
            // The server has refused before any data.
            node.detach(entry);
        }
        Ok(())
    }

    fn finish(&mut self, id: CallId) {
        if self.calls.get(&id).is_some_and(Call::is_over)
            && let Some(call) = self.calls.remove(&id)
        {
            let outcome = call.outcome.unwrap_or(Err(CallError::Canceled));
            self.out.push_back((id, outcome));
        }
    }

    /// Gives up what has waited too long.
    pub fn timeout(&mut self, node: &mut Node, now: Instant) {
        let late = |call: &Call| call.deadline <= now && !matches!(call.outcome, Some(Err(_)));
        let late: Vec<CallId> = self.calls.iter().filter(|(_, c)| late(c)).map(|(id, _)| *id).collect();
        for id in late {
            self.expired = self.expired.wrapping_add(1);
            self.fail(node, id, CallError::Timeout);
        }
    }

    /// When to call [`timeout`](Self::timeout).
    pub fn next_timeout(&self) -> Option<Instant> {
        // All have the same timeout, so they are in the order of their deadlines.
        let mut calls = self.calls.values();
        let waiting = calls.find(|call| !matches!(call.outcome, Some(Err(_))))?;
        Some(waiting.deadline)
    }
}
