//! The PSNs of messages of many packets start again at 0 in the middle of the message.

use std::time::{Duration, Instant};

use roce::Device;

use crate::{
    Error,
    agent::Agent,
    ops::{Plan, Test},
};

/// Length of the messages, bytes.
const LEN: usize = 64 << 10;
/// PSNs have 24 bits.
const PSNS: u32 = 1 << 24;

/// PSNs of a message of `len` bytes: a packet each, for a READ those of its answer.
pub(crate) const fn packets(len: usize, mtu: usize) -> u32 {
    let count = len.div_ceil(mtu);
    if count == 0 { 1 } else { count as u32 }
}

/// The PSN with which a message of so many packets starts so that its middle one has PSN 0; several packets.
pub(crate) const fn start(packets: u32) -> u32 {
    PSNS - packets / 2
}

/// Whether PSN 0 belongs to a packet of the message that is not its first.
const fn inside(start: u32, packets: u32) -> bool {
    start < PSNS && start + packets > PSNS
}

/// An operation on a new connection.
struct Round {
    what: &'static str,
    ours_asks: bool,
    /// How often [`Round::run`] sends the message.
    times: u32,
    run: fn(&mut Test, usize) -> Result<(), Error>,
}

/// SEND, WRITE and READ of 64 KiB both ways, each over a connection of its own whose first message has the wrap in its
/// middle. Returns the agent and how many operations there were.
pub(crate) fn run(provider: &Device, plan: &Plan<'_>, mut agent: Agent) -> Result<(Agent, u32), Error> {
    let count = packets(LEN, plan.mtu.bytes());
    let first = start(count);
    if !inside(first, count) {
        return Err(format!("{count} packets from PSN {first:#x} on do not pass 0").into());
    }
    let round = |what, ours_asks, times, run| Round {
        what,
        ours_asks,
        times,
        run,
    };
    let rounds: [Round; 6] = [
        // With and without immediate.
        round("our SEND", true, 2, Test::messages_out),
        round("our WRITE", true, 1, Test::write_out),
        round("our READ", true, 1, Test::read_out),
        round("the agent's SEND", false, 2, Test::messages_in),
        round("the agent's WRITE", false, 1, Test::write_in),
        round("the agent's READ", false, 1, Test::read_in),
    ];
    let mut done = 0;
    for round in rounds {
        let mut test = Test::open(provider, plan, agent, first, LEN)?;
        (round.run)(&mut test, LEN).map_err(|e| format!("PSNs that pass 0 in {}: {e}", round.what))?;
        done += test.done;
        let end = (first + round.times * count) % PSNS;
        if !plan.args.as_capable {
            reached(&mut test.agent, round.ours_asks, end).map_err(|e| format!("{}: {e}", round.what))?;
        }
        agent = test.agent;
    }
    println!(
        "PSNs {first:#x} to {:#x} in one SEND, WRITE, READ each way: passed",
        (first + count - 1) % PSNS
    );
    Ok((agent, done))
}

/// rdma_rxe says with which PSN it goes on (other devices may say with which they started): it is `end`, once nothing is
/// repeated any more.
fn reached(agent: &mut Agent, ours_asks: bool, end: u32) -> Result<(), Error> {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let (sent, taken) = agent.psns()?;
        let there = if ours_asks { taken } else { sent };
        if there == end {
            return Ok(());
        }
        if Instant::now() > until {
            return Err(format!("the agent is at PSN {there:#x}, not {end:#x}").into());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wrap_is_inside_the_message_at_every_path_mtu() {
        for mtu in [256, 512, 1024, 2048, 4096] {
            for len in [mtu + 1, 5000, 20_000, LEN] {
                let count = packets(len, mtu);
                assert!(count < 2 || inside(start(count), count), "{len} bytes at {mtu}");
            }
        }
        assert_eq!((packets(0, 1024), packets(1024, 1024), packets(1025, 1024)), (1, 1, 2));
        // The last packet at 0xffffff, or the first at 0: not inside.
        assert!(!inside(PSNS - 15, 15) && !inside(0, 64) && inside(PSNS - 1, 2));
    }
}
