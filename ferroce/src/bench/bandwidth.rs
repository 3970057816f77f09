//! Bandwidth: many messages outstanding.

use std::{net::SocketAddr, time::Instant};

use roce::{
    Completion, CompletionQueue, Device, DeviceStats, MemoryRegion, Mtu, Payload, QueuePair, SendFlags, SendOp, SendWr,
    VerbsError,
};

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

/// Connections that are kept busy.
pub(crate) struct Load<'a> {
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
    /// Connects all queue pairs, those that are kept busy and the idle ones.
    pub(crate) fn connect(
        device: &'a Device,
        peer: SocketAddr,
        operation: Operation,
        bytes: u32,
        depth: u32,
        (qps, idle): (u32, u32),
    ) -> Result<Self, Failure> {
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

    pub(crate) fn bytes(&self) -> u32 {
        self.bytes
    }

    pub(crate) fn mtu(&self) -> Mtu {
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

    /// Keeps all connections busy for a time, then waits for what is outstanding. May be called again.
    pub(crate) fn run(&mut self, amount: Amount, stopped: &dyn Fn() -> bool) -> Result<(), Failure> {
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

    /// Everything since the connections were made.
    pub(crate) fn measurement(&mut self) -> Measurement {
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
