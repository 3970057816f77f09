//! Bandwidth: many messages outstanding.

use std::{net::SocketAddr, thread, time::Instant};

use roce::{Completion, Device, DeviceStats, Mtu, Payload, SendFlags, SendOp, SendWr, VerbsError};

use super::{
    Amount, Operation,
    client::{Connection, Endpoint, check},
    failed, latency,
    report::{Measurement, Work},
    wire::{Role, credit_at, receives},
};
use crate::output::Failure;

/// Completions taken with one poll.
const POLL: usize = 64;
/// Samples of latency kept.
const MAX_SAMPLES: usize = 1 << 20;

/// Whether measuring is over before its time.
pub(crate) type Stopped<'a> = &'a (dyn Fn() -> bool + Sync);

/// Shape of a load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) operation: Operation,
    /// Of a message.
    pub(crate) bytes: u32,
    /// Messages outstanding on each queue pair.
    pub(crate) depth: u32,
    /// Queue pairs of a thread that are busy.
    pub(crate) qps: u32,
    /// Idle ones among them.
    pub(crate) idle: u32,
    /// Threads, each with queue pairs and a completion queue of its own.
    pub(crate) threads: u32,
}

/// The loads of all threads.
pub(crate) struct Loads<'a>(Vec<Load<'a>>);

impl<'a> Loads<'a> {
    /// Connects all queue pairs, those that are kept busy and the idle ones.
    pub(crate) fn connect(device: &'a Device, peer: SocketAddr, shape: Shape) -> Result<Self, Failure> {
        let each = (0..shape.threads).map(|n| {
            let idle = if n == 0 { shape.idle } else { 0 };
            Load::connect(device, peer, Shape { idle, ..shape })
        });
        each.collect::<Result<_, _>>().map(Self)
    }

    pub(crate) fn bytes(&self) -> u32 {
        self.0[0].bytes
    }

    pub(crate) fn mtu(&self) -> Mtu {
        self.0[0].mtu()
    }

    /// Keeps all connections busy for a time, then waits for what is outstanding. May be called again.
    pub(crate) fn run(&mut self, amount: Amount, stopped: Stopped<'_>) -> Result<(), Failure> {
        if let [only] = &mut *self.0 {
            return only.run(amount, stopped);
        }
        let threads = self.0.len() as u64;
        let part = |n: u64| match amount {
            Amount::Count(all) => Amount::Count(all / threads + u64::from(n < all % threads)),
            time @ Amount::Time(_) => time,
        };
        thread::scope(|scope| {
            let started = self.0.iter_mut().zip(0..).map(|(load, n)| {
                let run = move || load.run(part(n), stopped);
                let started = thread::Builder::new().spawn_scoped(scope, run);
                started.map_err(|e| Failure::failed(format!("starting a thread: {e}")))
            });
            let started = started.collect::<Result<Vec<_>, _>>()?;
            let broke = |_| Err(Failure::failed("a thread of the measurement panicked"));
            started
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(broke))
        })
    }

    /// Everything since the connections were made.
    pub(crate) fn measurement(&mut self) -> Measurement {
        let (first, others) = self.0.split_at_mut(1);
        let all = &mut first[0];
        for other in others {
            all.work.messages += other.work.messages;
            all.work.time = all.work.time.max(other.work.time);
            all.samples.append(&mut other.samples);
        }
        let mut m = all.measurement();
        m.qps *= self.0.len() as u32;
        m
    }
}

/// Connections that a thread keeps busy.
struct Load<'a> {
    endpoint: Endpoint<'a>,
    connections: Vec<Connection>,
    /// They are there, and that is all.
    _idle: Vec<Connection>,
    /// Messages that were sent on each.
    sent: Vec<u64>,
    operation: Operation,
    bytes: u32,
    depth: u32,
    before: DeviceStats,
    work: Work,
    samples: Vec<u64>,
}

impl<'a> Load<'a> {
    fn connect(device: &'a Device, peer: SocketAddr, shape: Shape) -> Result<Self, Failure> {
        let Shape {
            operation,
            bytes,
            depth,
            qps,
            idle,
            ..
        } = shape;
        let endpoint = Endpoint::new(device, (depth * qps * 2).max(64))?;
        let role = Role::of(operation);
        let connect = |count, role, bytes, depth| {
            let each = (0..count).map(|_| endpoint.connect(peer, role, bytes, depth));
            each.collect::<Result<Vec<_>, _>>()
        };
        let idle = connect(idle, Role::Target, 64, 1)?;
        let connections = connect(qps, role, bytes, depth)?;
        Ok(Self {
            before: device.stats(),
            endpoint,
            connections,
            _idle: idle,
            sent: vec![0; qps as usize],
            operation,
            bytes,
            depth,
            work: Work::default(),
            samples: vec![],
        })
    }

    fn mtu(&self) -> Mtu {
        let connection = self.connections.first();
        let negotiated = connection.and_then(|c| c.qp.query().ok()?.path_mtu);
        negotiated.unwrap_or(self.endpoint.device.mtu())
    }

    /// How many messages the peer can take now.
    fn room(&self, index: usize) -> Result<usize, Failure> {
        if self.operation != Operation::Send {
            return Ok(usize::MAX);
        }
        let mut told = [0; size_of::<u64>()];
        let at = credit_at(self.bytes);
        let read = self.connections[index].mr.read(at, &mut told);
        read.map_err(|e| Failure::failed(format!("{e}")))?;
        let receives = u64::from_le_bytes(told).max(receives(self.depth).into());
        Ok(usize::try_from(receives.saturating_sub(self.sent[index])).unwrap_or(usize::MAX))
    }

    /// Posts as many of these messages on a connection as the peer can take.
    fn post(&mut self, index: usize, slots: &mut Vec<u32>) -> Result<usize, Failure> {
        let count = slots.len().min(self.room(index)?);
        if count == 0 {
            return Ok(0);
        }
        self.post_all(index, &slots[..count])?;
        self.sent[index] += count as u64;
        slots.drain(..count);
        Ok(count)
    }

    /// Posts messages on a connection, one for each of its numbers.
    fn post_all(&self, index: usize, slots: &[u32]) -> Result<(), Failure> {
        let c = &self.connections[index];
        let op = match self.operation {
            Operation::Read => SendOp::Read(c.memory),
            Operation::Send => SendOp::Send,
            Operation::Write | Operation::Latency | Operation::Rtrs | Operation::Ceiling => SendOp::Write(c.memory),
        };
        let sges = [c.mr.sge(0, self.bytes as usize)];
        let sges = if self.bytes == 0 { &[][..] } else { &sges[..] };
        let wrs: smallvec::SmallVec<[SendWr<'_>; 16]> = slots
            .iter()
            .map(|slot| SendWr {
                wr_id: (index as u64) << 32 | u64::from(*slot),
                op,
                flags: SendFlags::SIGNALED,
                payload: Payload::Sges(sges),
            })
            .collect();
        c.qp.post_send(&wrs)
            .map_err(|(_, e)| failed("posting")(VerbsError::Post(e)))
    }

    fn run(&mut self, amount: Amount, stopped: Stopped<'_>) -> Result<(), Failure> {
        let depth = self.depth as usize;
        let mut posted_at = vec![Instant::now(); depth * self.connections.len()];
        let mut again: Vec<Vec<u32>> = vec![vec![]; self.connections.len()];
        let mut completions: Vec<Completion> = Vec::with_capacity(POLL);
        let began = Instant::now();
        let mut left = match amount {
            Amount::Count(n) => n,
            Amount::Time(_) => u64::MAX,
        };
        let mut outstanding = 0u64;
        for slots in &mut again {
            slots.extend(0..self.depth.min(u32::try_from(left).unwrap_or(u32::MAX)));
            left -= slots.len() as u64;
            outstanding += slots.len() as u64;
        }
        let mut moved = began;
        while outstanding > 0 {
            let mut posted = 0;
            for (index, slots) in again.iter_mut().enumerate().filter(|(_, s)| !s.is_empty()) {
                posted += self.post(index, slots)?;
            }
            completions.clear();
            let polled = self.endpoint.cq.poll(&mut completions, POLL);
            if polled.map_err(failed("polling"))? == 0 {
                if posted == 0 && again.iter().any(|s| !s.is_empty()) {
                    latency::impatient(moved)?;
                }
                continue;
            }
            let now = Instant::now();
            moved = now;
            let over = stopped() || matches!(amount, Amount::Time(t) if now - began >= t);
            for c in &completions {
                check(c)?;
                let (index, slot) = ((c.wr_id >> 32) as usize, c.wr_id as u32);
                let at = &mut posted_at[index * depth + slot as usize];
                if self.samples.len() < MAX_SAMPLES {
                    self.samples.push((now - *at).as_nanos() as u64);
                }
                *at = now;
                outstanding -= 1;
                self.work.messages += 1;
                if !over && left > 0 {
                    left -= 1;
                    outstanding += 1;
                    again[index].push(slot);
                }
            }
        }
        self.work.time += began.elapsed();
        Ok(())
    }

    fn measurement(&mut self) -> Measurement {
        let op = match self.operation {
            Operation::Read => "read",
            Operation::Send => "send",
            Operation::Write | Operation::Latency | Operation::Rtrs | Operation::Ceiling => "write",
        };
        let mut m = Measurement::new(op, self.bytes, self.mtu().bytes(), self.work, &mut self.samples);
        m.depth = self.depth;
        m.qps = self.connections.len() as u32;
        m.count(self.endpoint.device, &self.before);
        debug_assert!(self.connections.iter().all(|c| c.mr.len() >= self.bytes as usize));
        m
    }
}
