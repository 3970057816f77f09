//! Operations that the user has begun, and what becomes of transfers.

use roce_verbs::Instant;

use super::Node;
use crate::{
    buffer::Buffer,
    conn::{Content, Phase, Tx},
    event::{Failure, JobId, Of, Output, Served},
    info::Counters,
    operation::{Get, Job, JobKind, Put, checked_len},
    peer::Peer,
    proto::{Handle, LnetHdr, MAX_IMMEDIATE, Nid, Operation},
};

impl Node {
    /// Begins a PUT.
    ///
    /// # Errors
    /// Too much waits for the peer, there are too many peers, or there is too much data.
    pub fn put(&mut self, now: Instant, put: &Put) -> Result<JobId, Failure> {
        let len = checked_len(&put.source)?;
        let id = self.begin(put.peer)?;
        let ack_md = if put.ack { self.handle(id) } else { Handle::NONE };
        let operation = Operation::Put {
            ack_md,
            match_bits: put.match_bits,
            hdr_data: put.hdr_data,
            portal: put.portal,
            offset: put.offset,
        };
        let hdr = LnetHdr::new(put.peer, self.us.nid, len, &operation);
        let kind = JobKind::Put {
            left: None,
            took: None,
            ack: put.ack,
        };
        let content = self.data(hdr, put.source.clone(), Of::Job(id));
        self.submit(now, (id, put.peer, kind), content);
        Ok(id)
    }

    /// Begins a GET.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn get(&mut self, now: Instant, get: &Get) -> Result<JobId, Failure> {
        let sink_length = checked_len(&get.sink)?;
        let id = self.begin(get.peer)?;
        let operation = Operation::Get {
            return_md: self.handle(id),
            match_bits: get.match_bits,
            portal: get.portal,
            src_offset: get.offset,
            sink_length,
        };
        let hdr = LnetHdr::new(get.peer, self.us.nid, 0, &operation);
        let content = match get.sink.len() > MAX_IMMEDIATE {
            true => Content::GetReq {
                hdr,
                cookie: self.cookie(),
                sink: get.sink.clone(),
                of: Of::Job(id),
            },
            false => Content::Immediate {
                hdr,
                payload: Vec::new(),
                of: Of::Job(id),
            },
        };
        self.submit(now, (id, get.peer, JobKind::Get(get.sink.clone())), content);
        Ok(id)
    }

    /// Returns an LNet message with data: in one, if it fits.
    pub(super) fn data(&mut self, hdr: LnetHdr, source: Buffer, of: Of) -> Content {
        match source.len() > MAX_IMMEDIATE {
            true => Content::PutReq {
                hdr,
                cookie: self.cookie(),
                source,
                of,
            },
            false => Content::Immediate {
                hdr,
                payload: source.to_vec(),
                of,
            },
        }
    }

    fn begin(&mut self, peer: Nid) -> Result<JobId, Failure> {
        if self.stopping {
            return Err(Failure::Stopping);
        }
        if peer.0 >> 32 != self.us.nid.0 >> 32 {
            return Err(Failure::Local(format!(
                "{peer} is not in the network of {}, and there are no routers",
                self.us.nid
            )));
        }
        if !self.peers.contains_key(&peer) {
            if self.peers.len() >= self.config.max_peers {
                return Err(Failure::Full);
            }
            self.peers.insert(peer, Peer::new(&self.config));
        }
        let conn = self.connection_to(peer).map_or(0, |id| self.conns[id].queued());
        let waiting = self.peers.get(&peer).map_or(0, |peer| peer.queue.len());
        if conn + waiting >= self.config.max_queued {
            return Err(Failure::Full);
        }
        let id = JobId(self.next_job);
        self.next_job += 1;
        Ok(id)
    }

    fn submit(&mut self, now: Instant, (id, peer, kind): (JobId, Nid, JobKind), content: Content) {
        let deadline = now + self.config.timeout;
        let job = Job {
            peer,
            deadline,
            is_moving: true,
            kind,
        };
        self.jobs.insert(id, job);
        self.send(peer, Tx { content, deadline });
    }

    /// Sends a message to a peer as soon as there is a connection.
    fn send(&mut self, peer: Nid, tx: Tx) {
        self.count_sent(&tx.content);
        match self.connection_to(peer) {
            Some(id) => {
                self.conns[id].push(tx);
                self.dirty.insert(id);
            }
            None => {
                if let Some(peer) = self.peers.get_mut(&peer) {
                    peer.queue.push_back(tx);
                }
                self.waking.insert(peer);
            }
        }
    }

    pub(super) fn count_sent(&mut self, content: &Content) {
        if let Some(len) = content.lnet_len() {
            self.counters.sent += 1;
            self.counters.sent_bytes += len as u64;
        }
    }

    /// The connection that messages to a peer go by.
    pub(super) fn connection_to(&self, peer: Nid) -> Option<usize> {
        let conns = &self.peers.get(&peer)?.conns;
        let stands = |id: &&usize| self.conns[**id].phase == Phase::Established;
        conns.iter().find(stands).copied()
    }

    /// The name by which answers find an operation.
    const fn handle(&self, id: JobId) -> Handle {
        Handle {
            interface: self.us.stamp,
            object: id.0,
        }
    }

    /// The operation that an answer of a peer names.
    pub(super) fn named(&self, peer: Nid, handle: Handle) -> Option<JobId> {
        let id = JobId(handle.object);
        let is_its = self.jobs.get(&id).is_some_and(|job| job.peer == peer);
        (handle.interface == self.us.stamp && is_its).then_some(id)
    }

    /// Memory for so much data of an operation's answer; `None`: it has none, or less.
    pub(super) fn sink_of(&self, id: JobId, len: usize) -> Option<Buffer> {
        match &self.jobs.get(&id)?.kind {
            JobKind::Get(sink) => sink.part(0, len),
            JobKind::Put { .. } => None,
        }
    }

    /// The answer of an operation comes by a transfer.
    pub(super) fn answer_moves(&mut self, id: JobId) {
        if let Some(job) = self.jobs.get_mut(&id) {
            job.is_moving = true;
        }
    }

    /// A transfer has ended.
    pub(super) fn ended(&mut self, of: Of, result: Result<u32, Failure>) {
        match (of, result) {
            (Of::Nobody, _) => {}
            (Of::Served(served), result) => self.served(*served, result),
            (Of::Job(id), Err(why)) => self.finish(id, Err(why)),
            (Of::Job(id), Ok(len)) => {
                let Some(job) = self.jobs.get_mut(&id) else { return };
                job.is_moving = false;
                if let JobKind::Put { left, .. } = &mut job.kind {
                    *left = Some(len);
                }
                self.finish_put(id);
            }
        }
    }

    /// A peer tells how much of a PUT it has taken.
    pub(super) fn acknowledged(&mut self, id: JobId, len: u32) {
        if let Some(JobKind::Put { took, .. }) = self.jobs.get_mut(&id).map(|job| &mut job.kind) {
            *took = Some(len);
        }
        self.finish_put(id);
    }

    fn finish_put(&mut self, id: JobId) {
        let done = match self.jobs.get(&id).map(|job| &job.kind) {
            Some(JobKind::Put { left, ack: false, .. }) => *left,
            Some(JobKind::Put { left, took, .. }) => left.and(*took),
            _ => None,
        };
        if let Some(len) = done {
            self.finish(id, Ok(len));
        }
    }

    /// An operation has ended.
    pub(super) fn finish(&mut self, id: JobId, result: Result<u32, Failure>) {
        if self.jobs.remove(&id).is_some() {
            self.counters.operation_timeouts += u64::from(result == Err(Failure::Timeout));
            self.out.push_back(Output::Done(id, result));
        }
    }

    fn served(&mut self, served: Served, result: Result<u32, Failure>) {
        let entry = served.entry;
        let Counters {
            puts,
            put_bytes,
            gets,
            get_bytes,
            failed,
            ..
        } = &mut self.counters;
        let (done, bytes) = if served.is_put {
            (puts, put_bytes)
        } else {
            (gets, get_bytes)
        };
        match &result {
            Ok(len) => {
                *done += 1;
                *bytes += u64::from(*len);
            }
            Err(_) => *failed += 1,
        }
        self.out.push_back(Output::Served(served, result));
        if self.portals.released(entry) {
            self.out.push_back(Output::Unlinked(entry));
        }
    }

    /// Ends operations whose answer can't come any more, or has not come in time, unless a connection has their memory.
    pub(super) fn give_up(&mut self, why: &Failure, is_meant: impl Fn(Nid, Instant) -> bool) {
        let over = self
            .jobs
            .iter()
            .filter(|(_, job)| !job.is_moving && is_meant(job.peer, job.deadline));
        let over: Vec<JobId> = over.map(|(id, _)| *id).collect();
        for id in over {
            self.finish(id, Err(why.clone()));
        }
    }
}
