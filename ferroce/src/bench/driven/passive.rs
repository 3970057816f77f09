//! The side that listens: it does what each connection's first word asks for.

use std::{collections::HashMap, net::SocketAddr, thread, time::Duration};

use roce::{
    LocalDevice, Payload, RejectReason, SendOp,
    verbs::provider::{CmKind, CmRef, DeviceIx, Event, QpId},
};

use super::{Driven, Memory, Objects, RECEIVE, params};
use crate::{
    bench::{
        client::check,
        failed,
        latency::{ANSWER, mark},
        server::{MAX_BYTES, MAX_CONNECTIONS, MAX_DEPTH, MAX_TOTAL},
        wire::{Hello, Role, credit_at, emit_memory, receives},
    },
    output::Failure,
};

/// How long it sleeps when no connection needs it.
const IDLE: Duration = Duration::from_millis(2);
/// WRITEs of credit under way at most.
const TELLING: usize = 4;

struct Peer {
    qp: QpId,
    memory: Memory,
    hello: Hello,
    /// Rounds of a WRITE ping-pong.
    round: u64,
    /// Receives posted so far, what of that the sender was told, and WRITEs about it under way.
    posted: u64,
    told: u64,
    telling: usize,
}

/// A listener with its connections.
pub(crate) struct Passive {
    driven: Driven,
    objects: Vec<Objects>,
    peers: HashMap<CmRef, Peer>,
    by_qp: HashMap<QpId, CmRef>,
}

impl Passive {
    /// Listens there.
    pub(crate) fn new(devices: LocalDevice, addr: SocketAddr) -> Result<Self, Failure> {
        let mut driven = Driven::new(devices);
        let listens = driven.devices.provider().cm_listen(addr, 128);
        listens.map_err(failed(&format!("listening on {addr}")))?;
        Ok(Self {
            driven,
            objects: Vec::new(),
            peers: HashMap::new(),
            by_qp: HashMap::new(),
        })
    }

    /// Serves until told to stop. A connection that fails ends, no more.
    pub(crate) fn run(mut self, stopped: &dyn Fn() -> bool) -> Result<(), Failure> {
        while !stopped() {
            self.driven.turn()?;
            for event in std::mem::take(&mut self.driven.events) {
                if let Event::Cm { id, kind } = event {
                    self.on_event(id, kind);
                }
            }
            let completions = std::mem::take(&mut self.driven.completions);
            for (qp, wc) in &completions {
                let Some(id) = self.by_qp.get(qp).copied() else {
                    continue;
                };
                if check(wc)
                    .and_then(|()| self.completed(id, wc.wr_id == RECEIVE))
                    .is_err()
                {
                    self.forget(id, true);
                }
            }
            self.driven.completions = completions;
            self.echo();
            self.driven.flush();
            if self.peers.is_empty() {
                thread::sleep(IDLE);
            }
        }
        let ids: Vec<_> = self.peers.keys().copied().collect();
        self.driven.end(ids.into_iter());
        Ok(())
    }

    fn on_event(&mut self, id: CmRef, kind: CmKind) {
        match kind {
            CmKind::ConnectRequest {
                device, private_data, ..
            } => {
                let accepted = match Hello::parse(&private_data) {
                    Some(hello) if hello.role.sleeps() => Err(Failure::failed(
                        "--events is of software: this side polls an RDMA device",
                    )),
                    Some(hello) if hello.bytes <= MAX_BYTES && hello.depth <= MAX_DEPTH => {
                        self.accept(id, device, hello)
                    }
                    _ => Err(Failure::failed("a request that is not of ferroce bench")),
                };
                if let Err(e) = accepted {
                    tracing::warn!("a connection was refused: {}", e.text().unwrap_or_default());
                    let provider = self.driven.devices.provider();
                    let _ = provider.cm_reject(id, RejectReason::CONSUMER, b"ferroce bench");
                    provider.cm_destroy(id);
                }
            }
            CmKind::Established { .. } => {}
            _ => self.forget(id, false),
        }
    }

    fn accept(&mut self, id: CmRef, device: DeviceIx, hello: Hello) -> Result<(), Failure> {
        let total: u64 = self.peers.values().map(|p| u64::from(p.hello.bytes)).sum();
        if self.peers.len() >= MAX_CONNECTIONS || total + u64::from(hello.bytes) > MAX_TOTAL {
            return Err(Failure::failed("too many connections, or too much memory of theirs"));
        }
        let objects = match self.objects.iter().find(|o| o.device == device) {
            Some(objects) => *objects,
            None => {
                let made = self.driven.objects(device)?;
                self.objects.push(made);
                made
            }
        };
        let posted = receives(hello.depth);
        let memory = self.driven.memory(objects, hello.bytes as usize)?;
        let qp = self.driven.queue_pair(objects, hello.depth.max(8), posted)?;
        if hello.role.receives() {
            self.driven.post_recv(qp, &memory, posted as usize)?;
        }
        let answer = params(emit_memory(memory.remote()));
        let accepted = self.driven.devices.provider().cm_accept(id, qp, &answer);
        accepted.map_err(failed("accepting"))?;
        let peer = Peer {
            qp,
            memory,
            hello,
            round: 0,
            posted: posted.into(),
            told: posted.into(),
            telling: 0,
        };
        self.peers.insert(id, peer);
        self.by_qp.insert(qp, id);
        Ok(())
    }

    /// A connection has ended, or is to.
    fn forget(&mut self, id: CmRef, tell: bool) {
        let provider = self.driven.devices.provider();
        if tell {
            provider.cm_disconnect(id);
        }
        if let Some(peer) = self.peers.remove(&id) {
            self.by_qp.remove(&peer.qp);
            provider.destroy_qp(peer.qp);
            provider.deregister(peer.memory.info.id);
        }
        provider.cm_destroy(id);
    }

    fn completed(&mut self, id: CmRef, received: bool) -> Result<(), Failure> {
        let Some(peer) = self.peers.get_mut(&id) else {
            return Ok(());
        };
        match (peer.hello.role, received) {
            (Role::SendEcho, true) => {
                self.driven.post_recv(peer.qp, &peer.memory, 1)?;
                let sges = [peer.memory.sge(peer.hello.bytes as usize)];
                self.driven.post(peer.qp, 1, SendOp::Send, Payload::Sges(&sges))
            }
            (Role::Sink, true) => {
                self.driven.post_recv(peer.qp, &peer.memory, 1)?;
                peer.posted += 1;
                peer.tell(&mut self.driven)
            }
            (Role::Sink, false) => {
                peer.telling = peer.telling.saturating_sub(1);
                peer.tell(&mut self.driven)
            }
            _ => Ok(()),
        }
    }

    /// Answers WRITEs that have arrived.
    fn echo(&mut self) {
        let mut failed = Vec::new();
        let writers = self.peers.iter_mut().filter(|(_, p)| p.hello.role == Role::WriteEcho);
        for (id, peer) in writers {
            if peer.echo(&mut self.driven).is_err() {
                failed.push(*id);
            }
        }
        failed.into_iter().for_each(|id| self.forget(id, true));
    }
}

impl Peer {
    /// Answers a WRITE whose mark has arrived with one that carries the answer's mark.
    fn echo(&mut self, driven: &mut Driven) -> Result<(), Failure> {
        let last = self.hello.bytes.max(1) as usize - 1;
        let [seen] = self.memory.read(last)?;
        if seen != mark(self.round) {
            return Ok(());
        }
        self.memory.write(last, &[seen | ANSWER])?;
        self.round += 1;
        let sges = [self.memory.sge(self.hello.bytes as usize)];
        driven.post(self.qp, 1, SendOp::Write(self.hello.memory), Payload::Sges(&sges))
    }

    /// Tells the sender how many receives there are, when it is worth a packet.
    fn tell(&mut self, driven: &mut Driven) -> Result<(), Failure> {
        if self.posted - self.told < u64::from(receives(self.hello.depth)) / 4 || self.telling >= TELLING {
            return Ok(());
        }
        let mut to = self.hello.memory;
        to.addr = to.addr.wrapping_add(credit_at(self.hello.bytes) as u64);
        self.told = self.posted;
        self.telling += 1;
        driven.post(
            self.qp,
            1,
            SendOp::Write(to),
            Payload::Inline(&self.posted.to_le_bytes()),
        )
    }
}
