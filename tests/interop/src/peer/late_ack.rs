//! What a requester makes of a late acknowledgement of a WRITE that comes amid the answer to its next READ.

use std::net::IpAddr;

use roce_bth::{Header, Opcode};

use crate::{
    Error,
    again::{Args, Device},
    agent::{ALL_ACCESS, Agent, AgentPost, IN_ERROR, READ, WRITE},
    packets::{Line, Sockets},
};

const MTU: usize = 1024;
const PACKETS: u32 = 4;
/// Behind which packet of the answer the acknowledgement comes.
const LATE: u32 = 2;
const RTS: &str = "3";

/// How the READ ended.
#[derive(PartialEq, Eq, Debug)]
struct Ending {
    /// Packets of the answer that are in the requester's memory, from the first on.
    arrived: u32,
    state: String,
}

impl Device {
    /// The READ itself succeeds always.
    fn with_late_ack(self) -> Ending {
        let (arrived, state) = match self {
            Self::Rxe6_1 => (PACKETS, RTS),
            // It takes the acknowledgement for the answer's end, the next packet for an error, and reports success.
            Self::Rxe6_12 => (LATE, IN_ERROR),
        };
        Ending {
            arrived,
            state: state.to_owned(),
        }
    }
}

/// A word that each packet of the answer is full of.
const fn word(packet: u32) -> u64 {
    0x0101_0101_0101_0101 * (packet as u64 + 1)
}

/// A request of the agent: its packet.
fn asked(line: &Line<'_>, opcode: Opcode) -> Result<Header, Error> {
    let request = line.next()?;
    match request.bth.opcode == opcode {
        true => Ok(request),
        false => Err(format!("the agent sends {request:?}").into()),
    }
}

fn succeeds(agent: &mut Agent, what: &str) -> Result<(), Error> {
    match agent.poll('s', 1, 60_000)?[..] {
        [wc] if wc.status == 0 => Ok(()),
        ref other => Err(format!("the agent's {what}: {other:?}").into()),
    }
}

/// A WRITE that is acknowledged, and a READ that is answered.
fn ending(agent: &mut Agent, sockets: &Sockets, late: bool, expected_state: &str) -> Result<Ending, Error> {
    let line = Line::open(agent, sockets)?;
    let mem = agent.mem(PACKETS as usize * MTU, ALL_ACCESS)?;
    let post = |op, len| AgentPost {
        op,
        mem: mem.id,
        len,
        // Of our memory, that there is none of.
        raddr: 4096,
        rkey: 77,
        ..AgentPost::default()
    };
    agent.post(post(WRITE, 8))?;
    let write = asked(&line, Opcode::RcWriteOnly)?.bth.psn;
    line.answer(Opcode::RcAcknowledge, write, 1, &[])?;
    succeeds(agent, "WRITE")?;
    agent.post(post(READ, PACKETS * MTU as u32))?;
    let read = asked(&line, Opcode::RcReadRequest)?.bth.psn;
    for packet in 0..PACKETS {
        if late && packet == LATE {
            line.answer(Opcode::RcAcknowledge, write, 1, &[])?;
        }
        let opcode = match packet {
            0 => Opcode::RcReadResponseFirst,
            p if p == PACKETS - 1 => Opcode::RcReadResponseLast,
            _ => Opcode::RcReadResponseMiddle,
        };
        line.answer(opcode, read.add(packet), 2, &word(packet).to_ne_bytes().repeat(MTU / 8))?;
    }
    succeeds(agent, "READ")?;
    let mut arrived = 0;
    while arrived < PACKETS && agent.word(mem.id, u64::from(arrived) * MTU as u64, None)? == word(arrived) {
        arrived += 1;
    }
    let state = agent.settled_state(|s| s == expected_state)?;
    Ok(Ending { arrived, state })
}

/// With and without the late acknowledgement.
pub(crate) fn run(local: IpAddr, args: &Args) -> Result<(), Error> {
    let mut agent = Agent::connect(args.agent)?;
    let sockets = Sockets::bind(local)?;
    let whole = Ending {
        arrived: PACKETS,
        state: RTS.to_owned(),
    };
    for (late, expected) in [(false, whole), (true, args.device.with_late_ack())] {
        let seen = ending(&mut agent, &sockets, late, &expected.state)?;
        if seen != expected {
            return Err(format!("late acknowledgement: {late}: {seen:?}, not {expected:?}").into());
        }
        println!(
            "late acknowledgement: {late}: the READ succeeds, {} of {PACKETS} packets of its answer are there: passed",
            seen.arrived
        );
    }
    agent.call("quit")?;
    Ok(())
}
