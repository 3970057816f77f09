//! What a requester that goes back makes of an acknowledgement of more than it has sent again, and of one of just that. The packets
//! have to leave it so slowly that it can be met on its way.

use std::net::IpAddr;

use roce_bth::{Aeth, Header, Msn, NakCode, Opcode, Syndrome};

use crate::{
    Error,
    again::Args,
    agent::{ALL_ACCESS, Agent, AgentPost, WRITE},
    packets::{FIRST, Line, Sockets},
};

const MTU: usize = 1024;
/// More than rdma_rxe hands to its network interface at once (`RXE_INFLIGHT_SKBS_PER_QP_HIGH`).
const PACKETS: u32 = 100;

/// A WRITE, the last but first packets of which are asked for again. True: it is completed.
fn completes(agent: &mut Agent, sockets: &Sockets, jump: bool) -> Result<bool, Error> {
    let line = Line::open(agent, sockets)?;
    let mem = agent.mem(PACKETS as usize * MTU, ALL_ACCESS)?;
    agent.post(AgentPost {
        op: WRITE,
        mem: mem.id,
        len: PACKETS * MTU as u32,
        // Of our memory, that there is none of.
        raddr: 4096,
        rkey: 77,
        ..AgentPost::default()
    })?;
    let last = FIRST.add(PACKETS - 1);
    while line.next()?.bth.psn != last {}
    let nak = Aeth {
        syndrome: Syndrome::Nak(NakCode::PsnSequenceError),
        msn: Msn::new(0),
    };
    let nak = Header {
        aeth: Some(nak),
        ..line.header(Opcode::RcAcknowledge, FIRST.add(1))
    };
    line.send(nak, &[])?;
    let again = line.next()?.bth.psn;
    if again != FIRST.add(1) {
        return Err(format!("asked for PSN {}, the agent has sent {again:?}", FIRST.add(1)).into());
    }
    if jump {
        line.answer(Opcode::RcAcknowledge, last, 1, &[])?;
    }
    while line.next()?.bth.psn != last {}
    if !jump {
        line.answer(Opcode::RcAcknowledge, last, 1, &[])?;
    }
    // It asks every half second, if it asks.
    match agent.poll('s', 1, 5000)?[..] {
        [] => Ok(false),
        [wc] if wc.status == 0 => Ok(true),
        ref other => Err(format!("the agent's WRITE: {other:?}").into()),
    }
}

/// With an acknowledgement in its turn, and with one that jumps. That rdma_rxe takes for progress, and the copies of what is acknowledged
/// already for nothing: when all is sent again it waits for nothing any more, with no timer.
pub(crate) fn run(local: IpAddr, args: &Args) -> Result<(), Error> {
    let mut agent = Agent::connect(args.agent)?;
    let sockets = Sockets::bind(local)?;
    for (jump, expected) in [(false, true), (true, false)] {
        let seen = completes(&mut agent, &sockets, jump)?;
        if seen != expected {
            return Err(format!("a jump: {jump}: the WRITE is completed: {seen}, not {expected}").into());
        }
        println!("a jump: {jump}: the WRITE is completed: {seen}: passed");
    }
    agent.call("quit")?;
    Ok(())
}
