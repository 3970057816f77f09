//! The side that measures.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use roce::{
    LocalDevice, Mtu, Payload, RejectReason, RemoteAddr, SendOp,
    verbs::provider::{CmKind, CmRef, DeviceIx, Event, QpId},
};

use super::{Driven, Memory, Objects, RECEIVE, params};
use crate::{
    bench::{
        Amount, Emit, Operation,
        client::check,
        failed,
        latency::{ANSWER, impatient, mark, over},
        report::{Measurement, Work},
        wire::{Hello, Role, credit_at, parse_memory, receives},
    },
    output::Failure,
};

/// Until a peer must have answered.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Samples of latency kept.
const MAX_SAMPLES: usize = 1 << 20;

/// Our end, on an RDMA device.
pub(crate) struct Active {
    driven: Driven,
    from: IpAddr,
    peer: SocketAddr,
    mtu: Mtu,
    /// The device's name.
    device: String,
    objects: Option<Objects>,
}

/// A connection to the passive side.
struct Connection {
    id: CmRef,
    qp: QpId,
    ours: Memory,
    theirs: RemoteAddr,
    sent: u64,
}

impl Active {
    /// Of the device that has `from`.
    pub(crate) fn new(devices: LocalDevice, from: IpAddr, peer: SocketAddr) -> Result<Self, Failure> {
        let mut driven = Driven::new(devices);
        let device = driven.name(from);
        let mtu = driven.devices.mtu(from);
        Ok(Self {
            mtu: mtu.map_err(|e| Failure::failed(format!("the path MTU of {from}: {e}")))?,
            driven,
            from,
            peer,
            device: device.ok_or_else(|| Failure::failed(format!("no RDMA device has {from}")))?,
            objects: None,
        })
    }

    fn refused(&self, why: &str) -> Failure {
        Failure::failed(format!("connecting to {}: {why}", self.peer))
    }

    /// Turns until an event of the connection is there.
    fn event(&mut self, id: CmRef, until: Instant) -> Result<CmKind, Failure> {
        loop {
            self.driven.turn()?;
            self.driven.flush();
            for event in self.driven.events.drain(..) {
                if let Event::Cm { id: of, kind } = event
                    && of == id
                {
                    return Ok(kind);
                }
            }
            if Instant::now() > until {
                return Err(self.refused("no answer: is `ferroce bench --server` running there?"));
            }
        }
    }

    fn device_objects(&mut self, device: DeviceIx) -> Result<Objects, Failure> {
        if let Some(objects) = self.objects.filter(|objects| objects.device == device) {
            return Ok(objects);
        }
        let made = self.driven.objects(device)?;
        self.objects = Some(made);
        Ok(made)
    }

    fn connect(&mut self, role: Role, bytes: u32, depth: u32) -> Result<Connection, Failure> {
        let until = Instant::now() + CONNECT_TIMEOUT;
        let resolved = self.driven.devices.provider().cm_resolve(Some(self.from), self.peer);
        let id = resolved.map_err(failed(&format!("connecting to {}", self.peer)))?;
        let device = match self.event(id, until)? {
            CmKind::Resolved { device } => device,
            CmKind::ConnectError(why) => return Err(self.refused(&why)),
            _ => return Err(self.refused("no way there")),
        };
        let objects = self.device_objects(device)?;
        let ours = self.driven.memory(objects, credit_at(bytes) + size_of::<u64>())?;
        let qp = self.driven.queue_pair(objects, depth + 1, depth + 1)?;
        let hello = Hello {
            role,
            bytes,
            depth,
            memory: ours.remote(),
        };
        let connected = self.driven.devices.provider().cm_connect(id, qp, &params(hello.emit()));
        connected.map_err(failed(&format!("connecting to {}", self.peer)))?;
        let why = match self.event(id, until)? {
            CmKind::Established { private_data } => match parse_memory(&private_data) {
                Some(theirs) => {
                    return Ok(Connection {
                        id,
                        qp,
                        ours,
                        theirs,
                        sent: 0,
                    });
                }
                None => "the peer is not a `ferroce bench --server`".to_owned(),
            },
            CmKind::Rejected { reason, .. } if reason == RejectReason::INVALID_SERVICE_ID => {
                "nothing listens there: start `ferroce bench --server` first".to_owned()
            }
            CmKind::Rejected { reason, .. } => format!("the peer refused: {reason}"),
            CmKind::ConnectError(why) => why,
            CmKind::Unreachable(why) => format!("{why}: is `ferroce bench --server` running there?"),
            _ => "the connection ended".to_owned(),
        };
        Err(self.refused(&why))
    }

    fn close(&mut self, connections: Vec<Connection>) {
        self.driven.end(connections.iter().map(|c| c.id));
        for c in connections {
            let provider = self.driven.devices.provider();
            provider.cm_destroy(c.id);
            provider.destroy_qp(c.qp);
            provider.deregister(c.ours.info.id);
        }
    }

    fn measured(&self, op: &'static str, bytes: u32, work: Work, samples: &mut [u64]) -> Measurement {
        let mut m = Measurement::new(op, bytes, self.mtu.bytes(), work, samples);
        m.device = Some(self.device.clone());
        m
    }

    /// Many messages outstanding.
    pub(crate) fn bandwidth(
        &mut self,
        operation: Operation,
        bytes: u32,
        (depth, qps): (u32, u32),
        amount: Amount,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Measurement, Failure> {
        let (op, role) = (name(operation), Role::of(operation));
        let mut connections = (0..qps)
            .map(|_| self.connect(role, bytes, depth))
            .collect::<Result<Vec<_>, _>>()?;
        let mut run = Run {
            operation,
            bytes,
            depth,
            free: vec![(0..depth).collect(); qps as usize],
            posted_at: vec![Instant::now(); (depth * qps) as usize],
            outstanding: 0,
            left: match amount {
                Amount::Count(n) => n,
                Amount::Time(_) => u64::MAX,
            },
            work: Work::default(),
            samples: Vec::new(),
        };
        let ran = run.go(&mut self.driven, &mut connections, amount, stopped);
        self.close(connections);
        ran?;
        let mut m = self.measured(op, bytes, run.work, &mut run.samples);
        (m.depth, m.qps) = (depth, qps);
        Ok(m)
    }

    /// Ping-pong: WRITE, then SEND.
    pub(crate) fn latency(
        &mut self,
        bytes: u32,
        amount: Amount,
        stopped: &dyn Fn() -> bool,
        emit: Emit<'_>,
    ) -> Result<(), Failure> {
        let bytes = bytes.max(1);
        for (op, role) in [("write_lat", Role::WriteEcho), ("send_lat", Role::SendEcho)] {
            let connection = self.connect(role, bytes, 8)?;
            let (mut round, mut samples, began) = (0u64, vec![], Instant::now());
            let mut played = Ok(());
            while played.is_ok() && !stopped() && !over(amount, began, round) {
                let start = Instant::now();
                played = match role {
                    Role::WriteEcho => self.write_round(&connection, bytes, round),
                    _ => self.send_round(&connection, bytes),
                };
                samples.push(start.elapsed().as_nanos() as u64);
                round += 1;
            }
            let work = Work {
                messages: round,
                time: began.elapsed(),
            };
            self.close(vec![connection]);
            played?;
            emit(&self.measured(op, bytes, work, &mut samples))?;
        }
        Ok(())
    }

    /// Writes our mark to the peer and waits until it has written the answer.
    fn write_round(&mut self, c: &Connection, bytes: u32, round: u64) -> Result<(), Failure> {
        let last = bytes as usize - 1;
        c.ours.write(last, &[mark(round)])?;
        let sges = [c.ours.sge(bytes as usize)];
        self.driven
            .post(c.qp, 1, SendOp::Write(c.theirs), Payload::Sges(&sges))?;
        let (began, mut unsent) = (Instant::now(), 1);
        loop {
            unsent -= self.turn()?.1;
            if unsent == 0 && c.ours.read(last)? == [mark(round) | ANSWER] {
                return Ok(());
            }
            impatient(began)?;
        }
    }

    fn send_round(&mut self, c: &Connection, bytes: u32) -> Result<(), Failure> {
        self.driven.post_recv(c.qp, &c.ours, 1)?;
        let sges = [c.ours.sge(bytes as usize)];
        self.driven.post(c.qp, 1, SendOp::Send, Payload::Sges(&sges))?;
        let (began, mut received, mut unsent) = (Instant::now(), 0, 1);
        while received == 0 || unsent > 0 {
            let (more, sent) = self.turn()?;
            received += more;
            unsent -= sent;
            impatient(began)?;
        }
        Ok(())
    }

    /// One turn: how many receives and sends have completed.
    fn turn(&mut self) -> Result<(u32, u32), Failure> {
        self.driven.flush();
        self.driven.turn()?;
        let (mut received, mut sent) = (0, 0);
        for (_, wc) in &self.driven.completions {
            check(wc)?;
            match wc.wr_id {
                RECEIVE => received += 1,
                _ => sent += 1,
            }
        }
        Ok((received, sent))
    }
}

fn name(operation: Operation) -> &'static str {
    match operation {
        Operation::Read => "read",
        Operation::Send => "send",
        Operation::Write | Operation::Latency | Operation::Rtrs | Operation::Ceiling => "write",
    }
}

/// A measurement of bandwidth that goes on.
struct Run {
    operation: Operation,
    bytes: u32,
    depth: u32,
    /// Numbers of messages that are not outstanding, for each connection.
    free: Vec<Vec<u32>>,
    /// When each of them was posted last.
    posted_at: Vec<Instant>,
    outstanding: u64,
    /// Messages that are still to be sent.
    left: u64,
    work: Work,
    samples: Vec<u64>,
}

impl Run {
    fn go(
        &mut self,
        driven: &mut Driven,
        connections: &mut [Connection],
        amount: Amount,
        stopped: &dyn Fn() -> bool,
    ) -> Result<(), Failure> {
        let began = Instant::now();
        let mut moved = began;
        loop {
            let over = stopped() || matches!(amount, Amount::Time(t) if began.elapsed() >= t);
            if over {
                self.left = 0;
            }
            for (index, c) in connections.iter_mut().enumerate() {
                self.fill(driven, index, c)?;
            }
            if self.outstanding == 0 && self.left == 0 {
                break;
            }
            driven.flush();
            driven.turn()?;
            let now = Instant::now();
            match driven.completions.is_empty() {
                true => impatient(moved)?,
                false => moved = now,
            }
            for (_, wc) in &driven.completions {
                check(wc)?;
                self.completed(wc.wr_id, now);
            }
        }
        self.work.time += began.elapsed();
        Ok(())
    }

    /// Posts on a connection what the peer can take.
    fn fill(&mut self, driven: &mut Driven, index: usize, c: &mut Connection) -> Result<(), Failure> {
        while self.left > 0 && !self.free[index].is_empty() && self.room(c)? > 0 {
            let Some(slot) = self.free[index].pop() else { break };
            let op = match self.operation {
                Operation::Read => SendOp::Read(c.theirs),
                Operation::Send => SendOp::Send,
                Operation::Write | Operation::Latency | Operation::Rtrs | Operation::Ceiling => SendOp::Write(c.theirs),
            };
            let sges = [c.ours.sge(self.bytes as usize)];
            let sges = if self.bytes == 0 { &[][..] } else { &sges[..] };
            // Receives have mark 0.
            let wr_id = ((index as u64 + 1) << 32) | u64::from(slot);
            driven.post(c.qp, wr_id, op, Payload::Sges(sges))?;
            self.posted_at[index * self.depth as usize + slot as usize] = Instant::now();
            c.sent += 1;
            self.left -= 1;
            self.outstanding += 1;
        }
        Ok(())
    }

    /// How many messages the peer can take now.
    fn room(&self, c: &Connection) -> Result<u64, Failure> {
        if self.operation != Operation::Send {
            return Ok(u64::MAX);
        }
        let told = u64::from_le_bytes(c.ours.read(credit_at(self.bytes))?);
        Ok(told.max(receives(self.depth).into()).saturating_sub(c.sent))
    }

    fn completed(&mut self, wr_id: u64, now: Instant) {
        let (index, slot) = ((wr_id >> 32) as usize - 1, wr_id as u32);
        let at = self.posted_at[index * self.depth as usize + slot as usize];
        if self.samples.len() < MAX_SAMPLES {
            self.samples.push((now - at).as_nanos() as u64);
        }
        self.free[index].push(slot);
        self.outstanding -= 1;
        self.work.messages += 1;
    }
}
