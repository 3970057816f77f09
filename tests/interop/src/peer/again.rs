//! What a responder makes of a READ of no bytes that comes again: the requester is nothing but packets, sent one by one, so
//! that the result depends on no loss and no timer.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use ferroce_hostile::{aim::Aim, origin::Origin};
use roce_bth::{Bth, Header, ICRC_LEN, NakCode, Opcode, Packet, Psn, Qpn, RKey, ROCE_UDP_PORT, Reth, Syndrome};

use crate::{
    Error,
    agent::{ALL_ACCESS, Agent},
    link::{addr_gid, gid_addr},
};

/// Arguments.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// The agent whose queue pairs are asked (TCP).
    #[arg(long)]
    agent: SocketAddr,
    /// What its device is.
    #[arg(long, value_enum)]
    device: Device,
}

/// A responder of which it is known what it makes of them.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum, Debug)]
enum Device {
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

/// The queue pair that asks. No device has it.
const OUR_QP: u32 = 0x1234;
const FIRST: Psn = Psn::new(100);
const PATIENCE: Duration = Duration::from_secs(60);

/// The sockets of the requester.
struct Sockets {
    requests: Origin,
    answers: UdpSocket,
}

impl Sockets {
    fn bind(local: IpAddr) -> Result<Self, Error> {
        let answers = UdpSocket::bind((local, ROCE_UDP_PORT))?;
        answers.set_read_timeout(Some(Duration::from_secs(1)))?;
        Ok(Self {
            requests: Origin::bind(Aim::in_namespace()?, local)?,
            answers,
        })
    }
}

/// A queue pair of the agent.
struct Line<'a> {
    sockets: &'a Sockets,
    addr: IpAddr,
    qpn: Qpn,
}

impl Line<'_> {
    fn ask(&self, psn: Psn, reth: Reth) -> Result<(), Error> {
        let bth = Bth {
            ack_req: true,
            ..Bth::new(Opcode::RcReadRequest, self.qpn, psn)
        };
        let header = Header {
            reth: Some(reth),
            ..Header::new(bth)
        };
        let mut packet = vec![0; header.wire_len() + ICRC_LEN];
        header.emit(&mut packet);
        let requests = &self.sockets.requests;
        requests.flow(self.addr)?.seal(0, &mut packet);
        Ok(requests.send(self.addr, 0, &packet)?)
    }

    /// PSN, opcode and syndrome of the next packet for our queue pair.
    fn answer(&self) -> Result<(Psn, Opcode, Syndrome), Error> {
        let until = Instant::now() + PATIENCE;
        let mut buffer = [0; 2048];
        while Instant::now() < until {
            let len = match self.sockets.answers.recv(&mut buffer) {
                Ok(len) => len,
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
                Err(e) => return Err(e.into()),
            };
            let Header { bth, aeth, .. } = Packet::parse(&buffer[..len])?.header;
            let aeth = aeth.ok_or_else(|| format!("{:?} is no answer", bth.opcode))?;
            if bth.dest_qp.value() == OUR_QP {
                return Ok((bth.psn, bth.opcode, aeth.syndrome));
            }
        }
        Err(format!("no answer within {PATIENCE:?}").into())
    }
}

/// A READ of no bytes, the same once more, and one of eight bytes behind it, whose answer ends the waiting: the responder
/// takes requests in their order.
fn fate(agent: &mut Agent, sockets: &Sockets, local: IpAddr, key: Key) -> Result<Fate, Error> {
    let (qpn, gid) = agent.create(16, 16, 1, 0)?;
    let mem = agent.mem(4096, ALL_ACCESS)?;
    agent.call(&format!("rtr {OUR_QP} {} {} 3 12 4", addr_gid(local), FIRST.value()))?;
    let line = Line {
        sockets,
        addr: gid_addr(gid.parse()?),
        qpn: Qpn::new(qpn),
    };
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
    let is_done = |answer, psn| matches!(answer, (at, Opcode::RcReadResponseOnly, Syndrome::Ack(_)) if at == psn);
    line.ask(FIRST, nothing)?;
    let first = line.answer()?;
    if !is_done(first, FIRST) {
        return Err(format!("the first copy is answered with {first:?}").into());
    }
    let next = FIRST.next();
    line.ask(FIRST, nothing)?;
    line.ask(next, valid)?;
    let second = line.answer()?;
    match second {
        (FIRST, _, Syndrome::Nak(NakCode::RemoteAccessError)) => Ok(Fate::Refused),
        _ if is_done(second, next) => Ok(Fate::Dropped),
        _ if is_done(second, FIRST) => {
            let last = line.answer()?;
            let goes_on = is_done(last, next);
            goes_on
                .then_some(Fate::Answered)
                .ok_or_else(|| format!("the request behind is answered with {last:?}").into())
        }
        _ => Err(format!("the second copy is answered with {second:?}").into()),
    }
}

/// Asks with each kind of key, on a queue pair of its own.
pub(crate) fn run(local: IpAddr, args: &Args) -> Result<(), Error> {
    let mut agent = Agent::connect(args.agent, Duration::from_secs(60))?;
    let sockets = Sockets::bind(local)?;
    let mut seen = Vec::new();
    for key in [Key::Valid, Key::Wrong, Key::Zero] {
        let fate = fate(&mut agent, &sockets, local, key).map_err(|e| format!("key {key:?}: {e}"))?;
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
