//! Stall that was made public, as a capture: two faults, one on each side, of which neither alone would stop the connection.

use std::net::SocketAddr;

use roce_bth::{Aeth, Bth, Credits, Header, Msn, Opcode, Psn, Qpn, RKey, Reth, Syndrome};
use roce_pcap::Writer;

use crate::{error::Error, made::sealed};

/// Home-made peer that asks, and rdma_rxe that answers: last byte of the address, and queue pair.
const PEER: (u8, u32) = (1, 0x21);
const RXE: (u8, u32) = (2, 0x22);
/// Nanoseconds between packets, and until the peer repeats its request.
const STEP_NS: u64 = 20_000;
const STALL_NS: u64 = 146_000_000_000;

struct Maker<'a> {
    writer: Writer<&'a mut Vec<u8>>,
    time_ns: u64,
}

impl Maker<'_> {
    fn put(&mut self, from: (u8, u32), to: (u8, u32), header: Header, payload: usize) -> Result<(), Error> {
        let addr = |(last, _): (u8, u32), port| SocketAddr::from(([192, 0, 2, last], port));
        let (src, dst) = (addr(from, 50_000), addr(to, roce_bth::ROCE_UDP_PORT));
        let bytes = sealed((src, dst), header, &vec![0; payload])?;
        self.time_ns += STEP_NS;
        let written = self.writer.write(self.time_ns, src, dst, &bytes, 0);
        written.map_err(|e| Error::Unsuitable(e.to_string()))
    }

    fn ask(&mut self, opcode: Opcode, psn: u32, dma_len: Option<u32>, payload: usize) -> Result<(), Error> {
        let mut bth = Bth::new(opcode, Qpn::new(RXE.1), Psn::new(psn));
        bth.ack_req = opcode.info().position.ends();
        let reth = dma_len.map(|dma_len| Reth {
            va: 0x1000,
            rkey: RKey(0x100),
            dma_len,
        });
        let header = Header {
            reth,
            ..Header::new(bth)
        };
        self.put(PEER, RXE, header, payload)
    }

    fn answer(&mut self, opcode: Opcode, psn: u32, msn: Option<u32>, payload: usize) -> Result<(), Error> {
        let bth = Bth::new(opcode, Qpn::new(PEER.1), Psn::new(psn));
        let aeth = msn.map(|msn| Aeth {
            syndrome: Syndrome::Ack(Credits::INVALID),
            msn: Msn::new(msn),
        });
        let header = Header {
            aeth,
            ..Header::new(bth)
        };
        self.put(RXE, PEER, header, payload)
    }
}

/// A capture of the stall: a home-made peer counts a READ of three packets as two, so that its next SEND has the READ's last
/// PSN. `rdma_rxe` takes the SEND for a duplicate, and acknowledges it with a PSN of long before, because READs don't move
/// the one that it remembers. The peer waits for its acknowledgement until its timer runs out.
///
/// # Errors
/// Never, unless memory is out.
pub fn read_span() -> Result<Vec<u8>, Error> {
    let mut file = Vec::new();
    let writer = Writer::new(&mut file).map_err(|e| Error::Unsuitable(e.to_string()))?;
    let mut m = Maker {
        writer,
        time_ns: 1_700_000_000_000_000_000,
    };
    // The WRITE shows that the path MTU is 1024.
    m.ask(Opcode::RcWriteFirst, 0xff_fffe, Some(1028), 1024)?;
    m.ask(Opcode::RcWriteLast, 0xff_ffff, None, 4)?;
    m.answer(Opcode::RcAcknowledge, 0xff_ffff, Some(1), 0)?;
    m.ask(Opcode::RcReadRequest, 0, Some(2400), 0)?;
    m.answer(Opcode::RcReadResponseFirst, 0, Some(2), 1024)?;
    m.answer(Opcode::RcReadResponseMiddle, 1, None, 1024)?;
    m.answer(Opcode::RcReadResponseLast, 2, Some(2), 352)?;
    m.ask(Opcode::RcSendOnly, 2, None, 64)?;
    m.answer(Opcode::RcAcknowledge, 0xff_fff0, Some(2), 0)?;
    m.time_ns += STALL_NS;
    m.ask(Opcode::RcSendOnly, 2, None, 64)?;
    drop(m);
    Ok(file)
}
