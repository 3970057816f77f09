//! A [`Device`]: software, with threads of its own.

use std::{net::SocketAddr, time::Duration};

use roce::{
    AccessFlags, Channel, CmEventKind, Completion, ConnParams, Cq, Device, DeviceStats, EventChannel, Id, Mr, Mtu,
    NoAnswer, Pd, Qp, QpCaps, QpInit, RecvWr, RemoteAddr, SendWr, Sge, VerbsError,
};
use slab::Slab;

use super::{
    endpoint::{CONNECT_TIMEOUT, Endpoint, Event, POLL, RECEIVE, Shape, gone, mark, rejected, unreachable},
    failed,
    wire::{Hello, emit_memory, parse_memory},
};
use crate::output::Failure;

/// Objects of one thread on a device.
pub(super) struct Threads {
    device: Device,
    pd: Pd,
    channel: EventChannel,
    /// Completions of the connections made here; accepted ones have queues of their own, on any shard.
    cq: Option<Cq>,
    /// Events of the completion queues of connections that sleep.
    events: Option<Channel>,
    connections: Slab<Connection>,
    listener: Option<Id>,
    request: Option<Id>,
}

struct Connection {
    qp: Qp,
    mr: Mr,
    cq: Cq,
    sleeps: bool,
    completes: bool,
    /// None until it is connected.
    id: Option<Id>,
}

impl Connection {
    fn remote(&self) -> RemoteAddr {
        RemoteAddr {
            addr: self.mr.addr(),
            rkey: self.mr.rkey(),
        }
    }

    fn post_recv(&self, number: u32, count: usize) -> Result<(), Failure> {
        let sges = [self.mr.sge(0, self.mr.len())];
        let wr = RecvWr {
            wr_id: mark(number, RECEIVE),
            sges: &sges,
        };
        let posted = self.qp.post_recv(&vec![wr; count]);
        posted.map_err(|(_, e)| failed("posting a receive")(VerbsError::Post(e)))
    }
}

impl Threads {
    pub(super) fn new(device: &Device) -> Result<Self, Failure> {
        Ok(Self {
            pd: device.alloc_pd().map_err(failed("creating a protection domain"))?,
            channel: device
                .create_cm_channel()
                .map_err(failed("creating an event channel"))?,
            device: device.clone(),
            cq: None,
            events: None,
            connections: Slab::new(),
            listener: None,
            request: None,
        })
    }

    fn at(&self, number: u32) -> Result<&Connection, Failure> {
        self.connections.get(number as usize).ok_or_else(gone)
    }

    fn create_cq(&mut self, entries: u32, sleeps: bool) -> Result<Cq, Failure> {
        if sleeps && self.events.is_none() {
            let events = self.device.create_channel();
            self.events = Some(events.map_err(failed("creating a completion channel"))?);
        }
        let cq = self
            .device
            .create_cq(entries, self.events.as_ref().filter(|_| sleeps), 0);
        cq.map_err(failed("creating a completion queue"))
    }

    fn create(&self, shape: &Shape, cq: Cq) -> Result<Connection, Failure> {
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
        let mr = self.device.alloc_mr(&self.pd, shape.memory, access);
        let init = QpInit {
            send_cq: &cq,
            recv_cq: &cq,
            caps: QpCaps {
                max_send_wr: shape.sends,
                max_recv_wr: shape.receives,
                ..QpCaps::default()
            },
            signal_all: false,
        };
        let qp = self.device.create_qp(&self.pd, &init);
        Ok(Connection {
            mr: mr.map_err(failed("registering memory"))?,
            qp: qp.map_err(failed("creating a queue pair"))?,
            cq,
            sleeps: shape.sleeps,
            completes: shape.completes,
            id: None,
        })
    }

    /// Appends completions, without sleeping.
    fn take(&self, out: &mut Vec<Completion>) -> Result<usize, Failure> {
        let poll = |cq: &Cq| cq.poll(out, POLL).map_err(failed("polling"));
        match &self.cq {
            Some(cq) => [cq].into_iter().map(poll).sum(),
            None => {
                let accepted = self.connections.iter().filter(|(_, c)| c.completes);
                accepted.map(|(_, c)| &c.cq).map(poll).sum()
            }
        }
    }
}

impl Endpoint for Threads {
    fn mtu(&self) -> Mtu {
        let first = self.connections.iter().next();
        let negotiated = first.and_then(|(_, c)| c.qp.query().ok()?.path_mtu);
        negotiated.unwrap_or(self.device.mtu())
    }

    fn name(&self) -> Option<&str> {
        None
    }

    fn stats(&mut self) -> DeviceStats {
        self.device.stats()
    }

    fn can_sleep(&self) -> bool {
        true
    }

    fn listen(&mut self, addr: SocketAddr) -> Result<(), Failure> {
        let listener = self.device.listen(&self.channel, addr, 128);
        self.listener = Some(listener.map_err(failed(&format!("listening on {addr}")))?);
        Ok(())
    }

    fn connect(&mut self, peer: SocketAddr, hello: Hello) -> Result<RemoteAddr, Failure> {
        let limits = self.device.limits();
        let cq = match self.cq.clone() {
            Some(cq) => cq,
            None => self.create_cq(limits.max_cqe, hello.role.sleeps())?,
        };
        self.cq = Some(cq.clone());
        let new = self.create(&Shape::active(&hello), cq)?;
        let hello = Hello {
            memory: new.remote(),
            ..hello
        };
        let params = ConnParams {
            private_data: hello.emit(),
            initiator_depth: u8::try_from(hello.depth).unwrap_or(u8::MAX).min(limits.max_qp_rd_atom),
            ..ConnParams::default()
        };
        let connecting = format!("connecting to {peer}");
        let id = self.device.connect(&self.channel, None, peer, &new.qp, params);
        let id = Some(id.map_err(failed(&connecting))?);
        self.connections.insert(Connection { id, ..new });
        let event = self.channel.wait(Some(CONNECT_TIMEOUT)).map_err(failed(&connecting))?;
        let why = match event.map(|e| e.kind) {
            Some(CmEventKind::Established { private_data, .. }) => match parse_memory(&private_data) {
                Some(memory) => return Ok(memory),
                None => "the peer is not a `ferroce bench --server`".to_owned(),
            },
            Some(CmEventKind::Rejected { reason, .. }) => rejected(reason),
            Some(CmEventKind::Failed { text, .. }) => text,
            Some(CmEventKind::Unreachable { why, .. }) => unreachable(why),
            Some(_) => "the connection ended".to_owned(),
            None => unreachable(NoAnswer::Timeout),
        };
        Err(Failure::failed(format!("{connecting}: {why}")))
    }

    fn event(&mut self, timeout: Duration) -> Result<Option<Event>, Failure> {
        let event = self
            .channel
            .wait(Some(timeout))
            .map_err(failed("waiting for connections"))?;
        let Some(event) = event else { return Ok(None) };
        Ok(match event.kind {
            CmEventKind::Request { private_data, .. } => {
                self.request = Some(event.id);
                Some(Event::Request(private_data))
            }
            CmEventKind::Established { .. } => None,
            _ => {
                let ended = |c: &Connection| c.id.as_ref().is_some_and(|id| id.handle() == event.id.handle());
                let found = self.connections.iter().find(|(_, c)| ended(c));
                found.map(|(number, _)| Event::Ended(number as u32))
            }
        })
    }

    fn accept(&mut self, shape: &Shape) -> Result<u32, Failure> {
        let id = self.request.take().ok_or_else(gone)?;
        let cq = self.create_cq(shape.sends + shape.receives + 8, shape.sleeps)?;
        let new = self.create(shape, cq)?;
        let params = ConnParams {
            private_data: emit_memory(new.remote()),
            responder_resources: self.device.limits().max_qp_rd_atom,
            ..ConnParams::default()
        };
        let new = Connection {
            id: Some(id.clone()),
            ..new
        };
        let number = self.connections.insert(new) as u32;
        let ready = self.at(number).and_then(|new| {
            new.post_recv(number, shape.posted as usize)?;
            id.accept(&new.qp, params).map_err(failed("accepting"))
        });
        if ready.is_err() {
            self.close(number);
        }
        ready.map(|()| number)
    }

    fn reject(&mut self, private_data: &[u8]) {
        if let Some(id) = self.request.take() {
            let _ = id.reject(private_data);
        }
    }

    fn close(&mut self, connection: u32) {
        let closed = self.connections.try_remove(connection as usize);
        if let Some(id) = closed.and_then(|c| c.id) {
            let _ = id.disconnect();
        }
    }

    fn close_all(&mut self) {
        self.connections.clear();
    }

    fn poll(&mut self, out: &mut Vec<Completion>, sleep: Option<Duration>) -> Result<(), Failure> {
        let any = self.take(out)? > 0;
        let (Some(sleep), Some(events), false) = (sleep, &self.events, any) else {
            return Ok(());
        };
        for (_, c) in self.connections.iter().filter(|(_, c)| c.sleeps) {
            c.cq.arm(false).map_err(failed("arming a completion queue"))?;
        }
        // Completions that came before that make no event.
        if self.take(out)? == 0 {
            events.wait(Some(sleep)).map_err(failed("waiting for a completion"))?;
            self.take(out)?;
        }
        Ok(())
    }

    fn post_send(&mut self, connection: u32, wrs: &[SendWr<'_>]) -> Result<(), Failure> {
        let posted = self.at(connection)?.qp.post_send(wrs);
        posted.map_err(|(_, e)| failed("posting")(VerbsError::Post(e)))
    }

    fn post_recv(&mut self, connection: u32, count: usize) -> Result<(), Failure> {
        self.at(connection)?.post_recv(connection, count)
    }

    fn sge(&self, connection: u32, len: u32) -> Sge {
        self.at(connection)
            .map_or(Sge::default(), |c| c.mr.sge(0, len as usize))
    }

    fn read(&self, connection: u32, at: usize, out: &mut [u8]) -> Result<(), Failure> {
        self.at(connection)?.mr.read(at, out).map_err(Failure::of)
    }

    fn write(&self, connection: u32, at: usize, data: &[u8]) -> Result<(), Failure> {
        self.at(connection)?.mr.write(at, data).map_err(Failure::of)
    }
}
