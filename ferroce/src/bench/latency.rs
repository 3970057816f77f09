//! Ping-pong over queue pairs, both sides polling.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use roce::{Completion, Device, Payload, SendFlags, SendOp, SendWr, VerbsError};

use super::{
    Amount, Emit,
    client::{Connection, Endpoint, check, post_recv, sleep_and_poll},
    failed,
    report::{Measurement, Work},
    wire::Role,
};
use crate::output::Failure;

/// A peer that is silent for so long has failed, whatever its queue pair says.
const PATIENCE: Duration = Duration::from_secs(10);

/// How a side waits for the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Waiting {
    Polling,
    /// For events of a completion queue.
    Sleeping,
}

/// Sends back and forth: WRITE, then SEND. Of a WRITE that has no immediate data nobody can be woken.
pub(crate) fn run(
    device: &Device,
    peer: SocketAddr,
    bytes: u32,
    (waiting, amount): (Waiting, Amount),
    stopped: &dyn Fn() -> bool,
    emit: Emit<'_>,
) -> Result<(), Failure> {
    let bytes = bytes.max(1);
    let games = match waiting {
        Waiting::Polling => [("write_lat", Role::WriteEcho), ("send_lat", Role::SendEcho)],
        Waiting::Sleeping => [
            ("write_event_lat", Role::SleepingWriteEcho),
            ("send_event_lat", Role::SleepingSendEcho),
        ],
    };
    for (op, role) in games {
        let endpoint = match waiting {
            Waiting::Polling => Endpoint::new(device, 64)?,
            Waiting::Sleeping => Endpoint::sleeping(device, 64)?,
        };
        let connection = endpoint.connect(peer, role, bytes, 8)?;
        let mut game = Game {
            endpoint: &endpoint,
            connection: &connection,
            bytes,
            completions: vec![],
            unsent: 0,
        };
        let before = device.stats();
        let mut samples = vec![];
        let began = Instant::now();
        let mut round = 0u64;
        while !stopped() && !over(amount, began, round) {
            let start = Instant::now();
            match role {
                Role::WriteEcho => game.write(round)?,
                Role::SleepingWriteEcho => game.send(SendOp::WriteWithImm(connection.memory, 0))?,
                _ => game.send(SendOp::Send)?,
            }
            samples.push(start.elapsed().as_nanos() as u64);
            round += 1;
        }
        let work = Work {
            messages: round,
            time: began.elapsed(),
        };
        let mtu = device.mtu().bytes();
        let mut m = Measurement::new(op, bytes, mtu, work, &mut samples);
        m.count(device, &before);
        emit(&m)?;
    }
    Ok(())
}

pub(crate) fn over(amount: Amount, began: Instant, rounds: u64) -> bool {
    match amount {
        Amount::Count(n) => rounds >= n,
        Amount::Time(t) => began.elapsed() >= t,
    }
}

/// The mark of a round in the last byte of a message, below [`ANSWER`].
pub(crate) fn mark(round: u64) -> u8 {
    (round % 127) as u8 + 1
}

/// Set in the marks of answers: each side's buffer holds what it sent last, which must not look like a message.
pub(crate) const ANSWER: u8 = 0x80;

struct Game<'a> {
    endpoint: &'a Endpoint<'a>,
    connection: &'a Connection,
    bytes: u32,
    completions: Vec<Completion>,
    /// Sends not yet completed.
    unsent: u32,
}

impl Game<'_> {
    fn post(&mut self, op: SendOp) -> Result<(), Failure> {
        let sges = [self.connection.mr.sge(0, self.bytes as usize)];
        let wr = SendWr {
            wr_id: 1,
            op,
            flags: SendFlags::SIGNALED,
            payload: Payload::Sges(&sges),
        };
        self.unsent += 1;
        self.connection
            .qp
            .post_send(&[wr])
            .map_err(|(_, e)| failed("posting")(VerbsError::Post(e)))
    }

    /// Polls once, asleep before if that is how it waits; returns how many receives completed.
    fn poll(&mut self) -> Result<u32, Failure> {
        let cq = &self.endpoint.cq;
        match &self.endpoint.events {
            Some(events) => sleep_and_poll(cq, events, &mut self.completions, PATIENCE)?,
            None => {
                self.completions.clear();
                cq.poll(&mut self.completions, 8).map_err(failed("polling"))?;
            }
        }
        let mut received = 0;
        for c in &self.completions {
            check(c)?;
            match c.wr_id {
                0 => received += 1,
                _ => self.unsent -= 1,
            }
        }
        Ok(received)
    }

    /// Writes our mark to the peer and waits until it has written it back, into the same place of our memory.
    fn write(&mut self, round: u64) -> Result<(), Failure> {
        let last = self.bytes as usize - 1;
        let mr = &self.connection.mr;
        let out = |e| Failure::failed(format!("{e}"));
        mr.write(last, &[mark(round)]).map_err(out)?;
        self.post(SendOp::Write(self.connection.memory))?;
        let mut seen = [0];
        let began = Instant::now();
        loop {
            self.poll()?;
            mr.read(last, &mut seen).map_err(out)?;
            if seen[0] == mark(round) | ANSWER && self.unsent == 0 {
                return Ok(());
            }
            impatient(began)?;
        }
    }

    /// Sends something that consumes a receive, and waits for the like.
    fn send(&mut self, op: SendOp) -> Result<(), Failure> {
        post_recv(&self.connection.qp, &self.connection.mr, 1)?;
        self.post(op)?;
        let began = Instant::now();
        let mut received = 0;
        while received == 0 || self.unsent > 0 {
            received += self.poll()?;
            impatient(began)?;
        }
        Ok(())
    }
}

/// An error when the peer should have been heard since.
pub(crate) fn impatient(began: Instant) -> Result<(), Failure> {
    match began.elapsed() > PATIENCE {
        true => Err(Failure::failed("the peer does not answer any more")),
        false => Ok(()),
    }
}
