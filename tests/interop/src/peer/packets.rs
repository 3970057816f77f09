//! An end of a connection that is nothing but packets, sent and taken one by one: what the other end makes of them depends on
//! no loss and no timer.

use std::{
    io::ErrorKind,
    net::{IpAddr, UdpSocket},
    time::{Duration, Instant},
};

use ferroce_hostile::{aim::Aim, origin::Origin};
use roce_bth::{Aeth, Bth, Credits, Header, ICRC_LEN, Msn, Opcode, Packet, Psn, Qpn, ROCE_UDP_PORT, Syndrome};

use crate::{
    Error,
    agent::Agent,
    link::{addr_gid, gid_addr},
};

/// Our queue pair. No device has it.
const OUR_QP: u32 = 0x1234;
/// The first PSN of both ends.
pub(crate) const FIRST: Psn = Psn::new(100);
const TIMEOUT: Duration = Duration::from_secs(60);

/// The sockets of our end.
pub(crate) struct Sockets {
    local: IpAddr,
    output: Origin,
    input: UdpSocket,
}

impl Sockets {
    pub(crate) fn bind(local: IpAddr) -> Result<Self, Error> {
        let input = UdpSocket::bind((local, ROCE_UDP_PORT))?;
        input.set_read_timeout(Some(Duration::from_secs(1)))?;
        Ok(Self {
            local,
            output: Origin::bind(Aim::in_namespace()?, local)?,
            input,
        })
    }
}

/// A connection with a queue pair of the agent.
pub(crate) struct Line<'a> {
    sockets: &'a Sockets,
    addr: IpAddr,
    qpn: Qpn,
}

impl<'a> Line<'a> {
    /// A new queue pair of the agent, in RTS; it waits 0.5 s for an answer, and asks six times more. Path MTU 1024.
    pub(crate) fn open(agent: &mut Agent, sockets: &'a Sockets) -> Result<Self, Error> {
        let (qpn, gid) = agent.create(16, 16, 1, 0)?;
        let (ours, psn) = (addr_gid(sockets.local), FIRST.value());
        agent.call(&format!("rtr {OUR_QP} {ours} {psn} 3 12 4"))?;
        agent.call(&format!("rts {psn} 17 6 6 4"))?;
        Ok(Self {
            sockets,
            addr: gid_addr(gid.parse()?),
            qpn: Qpn::new(qpn),
        })
    }

    /// The headers of a packet to the agent's queue pair; those beyond the BTH are the caller's.
    pub(crate) const fn header(&self, opcode: Opcode, psn: Psn) -> Header {
        Header::new(Bth::new(opcode, self.qpn, psn))
    }

    /// Sends a packet; its payload is a multiple of four bytes long.
    pub(crate) fn send(&self, header: Header, payload: &[u8]) -> Result<(), Error> {
        let mut packet = vec![0; header.wire_len()];
        header.emit(&mut packet);
        packet.extend(payload);
        packet.extend([0; ICRC_LEN]);
        let output = &self.sockets.output;
        output.flow(self.addr)?.seal(0, &mut packet);
        Ok(output.send(self.addr, 0, &packet)?)
    }

    /// Sends an answer: an acknowledgement, or a packet of a READ's.
    pub(crate) fn answer(&self, opcode: Opcode, psn: Psn, msn: u32, payload: &[u8]) -> Result<(), Error> {
        let aeth = Aeth {
            syndrome: Syndrome::Ack(Credits::new(31)),
            msn: Msn::new(msn),
        };
        let header = Header {
            aeth: Some(aeth),
            ..self.header(opcode, psn)
        };
        self.send(header, payload)
    }

    /// The headers of the next packet for our queue pair.
    pub(crate) fn next(&self) -> Result<Header, Error> {
        let until = Instant::now() + TIMEOUT;
        let mut buffer = [0; 2048];
        while Instant::now() < until {
            let len = match self.sockets.input.recv(&mut buffer) {
                Ok(len) => len,
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
                Err(e) => return Err(e.into()),
            };
            let header = Header::from(Packet::parse(&buffer[..len])?.header);
            if header.bth.dest_qp.value() == OUR_QP {
                return Ok(header);
            }
        }
        Err(format!("no packet within {TIMEOUT:?}").into())
    }
}
