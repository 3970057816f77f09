//! The side that measures: bandwidth with many messages outstanding, and round trips.

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use roce::{Completion, DeviceStats, Mtu, Payload, RemoteAddr, SendFlags, SendOp, SendWr};
use smallvec::SmallVec;

use super::{
    Amount, Emit, Operation,
    endpoint::{Endpoint, POLL, RECEIVE, check, mark, parts},
    report::{Measurement, Work},
    wire::{ANSWER, Hello, Role, credit_at, receives, round_mark},
};
use crate::output::Failure;

/// Number of latency samples kept.
const MAX_SAMPLES: usize = 1 << 20;
/// Time without progress after which the peer has failed, whatever its queue pair reports.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns whether the measurement must end early.
pub(super) type Stopped<'a> = &'a (dyn Fn() -> bool + Sync);

pub(super) fn over(amount: Amount, began: Instant, rounds: u64) -> bool {
    match amount {
        Amount::Count(n) => rounds >= n,
        Amount::Time(t) => began.elapsed() >= t,
    }
}

/// Returns an error when there has been no progress for too long.
fn check_stall(since: Instant) -> Result<(), Failure> {
    match since.elapsed() > STALL_TIMEOUT {
        true => Err(Failure::failed("the peer does not answer any more")),
        false => Ok(()),
    }
}

fn hello(role: Role, bytes: u32, depth: u32) -> Hello {
    Hello {
        role,
        bytes,
        depth,
        memory: RemoteAddr::default(),
    }
}

/// Fills in the counts of an endpoint since `before`.
fn count(m: &mut Measurement, endpoint: &mut dyn Endpoint, before: &DeviceStats) {
    let after = endpoint.stats();
    m.device = endpoint.name().map(str::to_owned);
    m.packets = after.port.tx_packets - before.port.tx_packets;
    m.retransmits = after.retransmits() - before.retransmits();
    m.icrc_errors = after.icrc_errors() - before.icrc_errors();
}

/// Messages of a bandwidth measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) operation: Operation,
    pub(super) bytes: u32,
    /// Messages outstanding on each queue pair.
    pub(super) depth: u32,
    /// Busy queue pairs of a thread.
    pub(super) qps: u32,
    /// Idle queue pairs of the first thread.
    pub(super) idle: u32,
}

/// Bandwidth measurement, with a thread for each endpoint.
pub(super) struct Bandwidth<'a>(Vec<Sender<'a>>);

impl<'a> Bandwidth<'a> {
    /// Connects all queue pairs.
    pub(super) fn connect(
        endpoints: &'a mut [Box<dyn Endpoint>],
        peer: SocketAddr,
        load: Load,
    ) -> Result<Self, Failure> {
        let mut idle = load.idle;
        let each = endpoints.iter_mut().map(|endpoint| {
            let idle = std::mem::take(&mut idle);
            Sender::connect(&mut **endpoint, peer, Load { idle, ..load })
        });
        each.collect::<Result<_, _>>().map(Self)
    }

    pub(super) fn mtu(&self) -> Mtu {
        self.0[0].endpoint.mtu()
    }

    /// Keeps all connections busy, then waits for outstanding messages. May be called repeatedly.
    pub(super) fn run(&mut self, amount: Amount, stopped: Stopped<'_>) -> Result<(), Failure> {
        if let [only] = &mut *self.0 {
            return only.run(amount, stopped);
        }
        let threads = self.0.len() as u64;
        let part = |n: u64| match amount {
            Amount::Count(all) => Amount::Count(all / threads + u64::from(n < all % threads)),
            time @ Amount::Time(_) => time,
        };
        thread::scope(|scope| {
            let started = self.0.iter_mut().zip(0..).map(|(sender, n)| {
                let run = move || sender.run(part(n), stopped);
                let started = thread::Builder::new().spawn_scoped(scope, run);
                started.map_err(|e| Failure::failed(format!("starting a thread: {e}")))
            });
            let started = started.collect::<Result<Vec<_>, _>>()?;
            let panicked = |_| Err(Failure::failed("a thread of the measurement panicked"));
            started
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(panicked))
        })
    }

    /// Returns the result of all runs.
    pub(super) fn measurement(&mut self) -> Measurement {
        let mtu = self.mtu();
        let (mut work, mut samples) = (Work::default(), vec![]);
        for sender in &mut self.0 {
            work.messages += sender.work.messages;
            work.time = work.time.max(sender.work.time);
            samples.append(&mut sender.samples);
        }
        let threads = self.0.len() as u32;
        let Sender {
            endpoint, load, before, ..
        } = &mut self.0[0];
        let mut m = Measurement::new(load.operation.name(), load.bytes, mtu.bytes(), work, &mut samples);
        (m.depth, m.qps) = (load.depth, load.qps * threads);
        count(&mut m, &mut **endpoint, before);
        m
    }
}

/// Connections that a thread keeps busy; idle ones have higher numbers.
struct Sender<'a> {
    endpoint: &'a mut dyn Endpoint,
    load: Load,
    /// The peer's memory, and the messages sent, on each connection.
    targets: Vec<(RemoteAddr, u64)>,
    /// Time of posting of each message in flight, by connection.
    posted_at: Vec<Instant>,
    before: DeviceStats,
    work: Work,
    samples: Vec<u64>,
}

impl Drop for Sender<'_> {
    fn drop(&mut self) {
        self.endpoint.close_all();
    }
}

impl<'a> Sender<'a> {
    fn connect(endpoint: &'a mut dyn Endpoint, peer: SocketAddr, load: Load) -> Result<Self, Failure> {
        let mut this = Self {
            before: DeviceStats::default(),
            endpoint,
            load,
            targets: vec![],
            posted_at: vec![Instant::now(); load.depth as usize * load.qps as usize],
            work: Work::default(),
            samples: vec![],
        };
        for _ in 0..load.qps {
            let hello = hello(Role::of(load.operation), load.bytes, load.depth);
            this.targets.push((this.endpoint.connect(peer, hello)?, 0));
        }
        for _ in 0..load.idle {
            this.endpoint.connect(peer, hello(Role::Target, 64, 1))?;
        }
        this.before = this.endpoint.stats();
        Ok(this)
    }

    /// Returns how many messages the peer can take on a connection.
    fn room(&self, connection: u32) -> Result<usize, Failure> {
        if self.load.operation != Operation::Send {
            return Ok(usize::MAX);
        }
        let mut credit = [0; size_of::<u64>()];
        self.endpoint
            .read(connection, credit_at(self.load.bytes), &mut credit)?;
        let credit = u64::from_le_bytes(credit).max(receives(self.load.depth).into());
        let (_, sent) = self.targets[connection as usize];
        Ok(usize::try_from(credit.saturating_sub(sent)).unwrap_or(usize::MAX))
    }

    /// Returns the place of a message in `posted_at`.
    fn slot(&self, connection: u32, message: u32) -> usize {
        connection as usize * self.load.depth as usize + message as usize
    }

    /// Posts as many of these messages as the peer can take.
    fn post(&mut self, connection: u32, messages: &mut Vec<u32>, now: Instant) -> Result<(), Failure> {
        let count = messages.len().min(self.room(connection)?);
        if count == 0 {
            return Ok(());
        }
        for message in &messages[..count] {
            let slot = self.slot(connection, *message);
            self.posted_at[slot] = now;
        }
        let (target, sent) = &mut self.targets[connection as usize];
        let op = match self.load.operation {
            Operation::Read => SendOp::Read(*target),
            Operation::Send => SendOp::Send,
            Operation::Write | Operation::Latency | Operation::Rtrs | Operation::Ceiling => SendOp::Write(*target),
        };
        *sent += count as u64;
        let sges = [self.endpoint.sge(connection, self.load.bytes)];
        let sges = if self.load.bytes == 0 { &[][..] } else { &sges[..] };
        let wrs = messages.drain(..count).map(|message| SendWr {
            wr_id: mark(connection, message),
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(sges),
        });
        let wrs: SmallVec<[SendWr<'_>; 16]> = wrs.collect();
        self.endpoint.post_send(connection, &wrs)
    }

    fn run(&mut self, amount: Amount, stopped: Stopped<'_>) -> Result<(), Failure> {
        let mut free: Vec<Vec<u32>> = vec![vec![]; self.targets.len()];
        let mut completions: Vec<Completion> = Vec::with_capacity(POLL);
        let began = Instant::now();
        let mut left = match amount {
            Amount::Count(n) => n,
            Amount::Time(_) => u64::MAX,
        };
        let mut outstanding = 0u64;
        for messages in &mut free {
            messages.extend(0..self.load.depth.min(u32::try_from(left).unwrap_or(u32::MAX)));
            left -= messages.len() as u64;
            outstanding += messages.len() as u64;
        }
        // A software queue pair reports a lost peer itself, and messages of 1 GiB may take longer than the timeout.
        let on_device = self.endpoint.name().is_some();
        let (mut now, mut progress) = (began, began);
        while outstanding > 0 {
            for (connection, messages) in (0..).zip(&mut free).filter(|(_, m)| !m.is_empty()) {
                self.post(connection, messages, now)?;
            }
            completions.clear();
            self.endpoint.poll(&mut completions, None)?;
            now = Instant::now();
            if stopped() || matches!(amount, Amount::Time(t) if now - began >= t) {
                left = 0;
                outstanding -= free.iter_mut().map(|m| m.drain(..).len() as u64).sum::<u64>();
            }
            if !completions.is_empty() {
                progress = now;
            } else if on_device || free.iter().any(|m| !m.is_empty()) {
                check_stall(progress)?;
            }
            for c in &completions {
                check(c)?;
                let (connection, message) = parts(c.wr_id);
                if self.samples.len() < MAX_SAMPLES {
                    let waited = now - self.posted_at[self.slot(connection, message)];
                    self.samples.push(waited.as_nanos() as u64);
                }
                outstanding -= 1;
                self.work.messages += 1;
                if left > 0 {
                    left -= 1;
                    outstanding += 1;
                    free[connection as usize].push(message);
                }
            }
        }
        self.work.time += began.elapsed();
        Ok(())
    }
}

/// Measures round trips of WRITEs and SENDs. With `sleeps` both sides sleep, and WRITEs have immediate data, because nothing else wakes the
/// peer.
pub(super) fn latency(
    endpoint: &mut dyn Endpoint,
    peer: SocketAddr,
    bytes: u32,
    (sleeps, amount): (bool, Amount),
    stopped: Stopped<'_>,
    emit: Emit<'_>,
) -> Result<(), Failure> {
    let bytes = bytes.max(1);
    let modes = match sleeps {
        false => [("write_lat", Role::WriteEcho), ("send_lat", Role::SendEcho)],
        true => [
            ("write_event_lat", Role::SleepingWriteEcho),
            ("send_event_lat", Role::SleepingSendEcho),
        ],
    };
    for (op, role) in modes {
        let measured = ping_pong(endpoint, peer, (op, role, bytes), amount, stopped);
        endpoint.close_all();
        emit(&measured?)?;
    }
    Ok(())
}

/// Connects to a peer of this role, and measures round trips.
fn ping_pong(
    endpoint: &mut dyn Endpoint,
    peer: SocketAddr,
    (op, role, bytes): (&'static str, Role, u32),
    amount: Amount,
    stopped: Stopped<'_>,
) -> Result<Measurement, Failure> {
    let mut ping_pong = PingPong {
        target: endpoint.connect(peer, hello(role, bytes, 8))?,
        endpoint,
        bytes,
        sleep: role.sleeps().then_some(STALL_TIMEOUT),
        completions: vec![],
    };
    let before = ping_pong.endpoint.stats();
    let (mut round, mut samples, began) = (0u64, vec![], Instant::now());
    while !stopped() && !over(amount, began, round) {
        let start = Instant::now();
        match role {
            Role::WriteEcho => ping_pong.write(round)?,
            Role::SleepingWriteEcho => ping_pong.send(SendOp::WriteWithImm(ping_pong.target, 0))?,
            _ => ping_pong.send(SendOp::Send)?,
        }
        samples.push(start.elapsed().as_nanos() as u64);
        round += 1;
    }
    let work = Work {
        messages: round,
        time: began.elapsed(),
    };
    let mut m = Measurement::new(op, bytes, endpoint.mtu().bytes(), work, &mut samples);
    count(&mut m, endpoint, &before);
    Ok(m)
}

/// Ping-pong over connection 0.
struct PingPong<'a> {
    endpoint: &'a mut dyn Endpoint,
    target: RemoteAddr,
    bytes: u32,
    sleep: Option<Duration>,
    completions: Vec<Completion>,
}

impl PingPong<'_> {
    fn post(&mut self, op: SendOp) -> Result<(), Failure> {
        let sges = [self.endpoint.sge(0, self.bytes)];
        let wr = SendWr {
            wr_id: mark(0, 0),
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&sges),
        };
        self.endpoint.post_send(0, &[wr])
    }

    /// Polls once. Returns how many receives and sends have completed.
    fn poll(&mut self) -> Result<(usize, usize), Failure> {
        self.completions.clear();
        self.endpoint.poll(&mut self.completions, self.sleep)?;
        self.completions.iter().try_for_each(check)?;
        let received = self.completions.iter().filter(|c| parts(c.wr_id).1 == RECEIVE).count();
        Ok((received, self.completions.len() - received))
    }

    /// Writes the round's mark to the peer, and waits for the answer in the same byte of our memory.
    fn write(&mut self, round: u64) -> Result<(), Failure> {
        let last = self.bytes as usize - 1;
        self.endpoint.write(0, last, &[round_mark(round)])?;
        self.post(SendOp::Write(self.target))?;
        let (began, mut sent, mut seen) = (Instant::now(), 0, [0]);
        loop {
            sent += self.poll()?.1;
            self.endpoint.read(0, last, &mut seen)?;
            if seen[0] == round_mark(round) | ANSWER && sent > 0 {
                return Ok(());
            }
            check_stall(began)?;
        }
    }

    /// Sends a message that consumes a receive, and waits for the peer's.
    fn send(&mut self, op: SendOp) -> Result<(), Failure> {
        self.endpoint.post_recv(0, 1)?;
        self.post(op)?;
        let (began, mut received, mut sent) = (Instant::now(), 0, 0);
        while received == 0 || sent == 0 {
            let more = self.poll()?;
            (received, sent) = (received + more.0, sent + more.1);
            check_stall(began)?;
        }
        Ok(())
    }
}
