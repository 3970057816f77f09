//! What a responder makes of a READ of no bytes that comes again.

use std::net::{IpAddr, SocketAddr};

use roce_bth::{Aeth, Header, NakCode, Opcode, RKey, Reth, Syndrome};

use crate::{
    Error,
    agent::{ALL_ACCESS, Agent},
    packets::{FIRST, Line, Sockets},
};

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The agent at the other end (TCP).
    #[arg(long)]
    pub(crate) agent: SocketAddr,
    /// What its device is.
    #[arg(long, value_enum)]
    pub(crate) device: Device,
}

/// A device of which it is known what it makes of them.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum, Debug)]
pub(crate) enum Device {
    /// rdma_rxe of Linux 6.1.
    #[value(name = "rxe-6.1")]
    Rxe6_1,
    /// rdma_rxe of Linux 6.12.
    #[value(name = "rxe-6.12")]
    Rxe6_12,
}

/// The key of the request, which nothing is accessed with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Key {
    /// That of the region at the address.
    Valid,
    /// One that nothing has.
    Wrong,
    /// 0.
    Zero,
}

/// What came of the second copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    /// The answer that the first one got.
    Answered,
    /// A NAK: remote access error.
    Refused,
    /// Nothing, and the next request was answered.
    Dropped,
}

impl Device {
    const fn expected(self, key: Key) -> Fate {
        match (self, key) {
            // It looks the key up when it repeats the answer.
            (Self::Rxe6_1, Key::Valid) => Fate::Answered,
            (Self::Rxe6_1, Key::Wrong | Key::Zero) => Fate::Refused,
            // It compares the key with 0, which it keeps of the first one.
            (Self::Rxe6_12, Key::Zero) => Fate::Answered,
            (Self::Rxe6_12, Key::Valid | Key::Wrong) => Fate::Dropped,
        }
    }
}

/// A READ of no bytes, the same once more, and one of eight bytes behind it, whose answer ends the waiting: the responder
/// takes requests in their order.
fn fate(agent: &mut Agent, sockets: &Sockets, key: Key) -> Result<Fate, Error> {
    let line = Line::open(agent, sockets)?;
    let mem = agent.mem(4096, ALL_ACCESS)?;
    let valid = Reth {
        va: mem.addr,
        rkey: RKey(mem.rkey),
        dma_len: 8,
    };
    let nothing = Reth {
        rkey: match key {
            Key::Valid => valid.rkey,
            Key::Wrong => RKey(mem.rkey ^ 0x55),
            Key::Zero => RKey(0),
        },
        dma_len: 0,
        ..valid
    };
    let ask = |psn, reth| {
        let mut header = line.header(Opcode::RcReadRequest, psn);
        header.bth.ack_req = true;
        header.reth = Some(reth);
        line.send(header, &[])
    };
    let is_done = |answer: &Header, psn| {
        let acked = matches!(
            answer.aeth,
            Some(Aeth {
                syndrome: Syndrome::Ack(_),
                ..
            })
        );
        (answer.bth.opcode, answer.bth.psn) == (Opcode::RcReadResponseOnly, psn) && acked
    };
    ask(FIRST, nothing)?;
    let first = line.next()?;
    if !is_done(&first, FIRST) {
        return Err(format!("the first copy is answered with {first:?}").into());
    }
    let next = FIRST.next();
    ask(FIRST, nothing)?;
    ask(next, valid)?;
    let second = line.next()?;
    let refused = Syndrome::Nak(NakCode::RemoteAccessError);
    if second.bth.psn == FIRST && second.aeth.is_some_and(|a| a.syndrome == refused) {
        return Ok(Fate::Refused);
    }
    if is_done(&second, next) {
        return Ok(Fate::Dropped);
    }
    let last = line.next()?;
    if is_done(&second, FIRST) && is_done(&last, next) {
        return Ok(Fate::Answered);
    }
    Err(format!("the second copy and the request behind it are answered with {second:?}, {last:?}").into())
}

/// Asks with each kind of key, on a queue pair of its own.
pub(crate) fn run(local: IpAddr, args: &Args) -> Result<(), Error> {
    let mut agent = Agent::connect(args.agent)?;
    let sockets = Sockets::bind(local)?;
    let mut seen = Vec::new();
    for key in [Key::Valid, Key::Wrong, Key::Zero] {
        let fate = fate(&mut agent, &sockets, key).map_err(|e| format!("key {key:?}: {e}"))?;
        let expected = args.device.expected(key);
        if fate != expected {
            return Err(format!("key {key:?}: the second copy was {fate:?}, not {expected:?}").into());
        }
        seen.push(format!("key {key:?}: {fate:?}"));
    }
    agent.call("quit")?;
    println!("a READ of no bytes that comes again: {}: passed", seen.join(", "));
    Ok(())
}
