//! Packets between two queue pairs by hand, judged and counted.

use std::net::SocketAddr;

use roce_bth::{
    Aeth, Bth, Credits, Header, ICRC_LEN, MAX_HEADER_LEN, Msn, NakCode, Opcode, Packet, Psn, Qpn, Reth, RnrTimer,
    Syndrome,
};
use roce_pcap::{
    Finding, Flow, Flows,
    judge::{Event, Judge, Meta, Observed, Stated, Summary},
};
use roce_port::cm::datagram;

pub(crate) const A: &str = "10.0.0.1";
pub(crate) const B: &str = "10.0.0.2";
pub(crate) const QP_A: u32 = 0x11;
pub(crate) const QP_B: u32 = 0x22;

/// A judge and its statistics, fed by hand.
pub(crate) struct Wire {
    pub(crate) judge: Judge,
    flows: Flows,
    /// Packets with the part that each plays.
    pub(crate) events: Vec<Event>,
    frame: u64,
    /// Time of the last packet, microseconds.
    pub(crate) us: u64,
    pub(crate) port: u16,
    /// Address of the host that A talks to.
    pub(crate) peer: &'static str,
    pub(crate) ecn: u8,
    /// Bytes that the capture cuts off.
    pub(crate) cut: usize,
    /// Whether packets have a wrong ICRC.
    pub(crate) damaged: bool,
}

impl Wire {
    pub(crate) fn new() -> Self {
        Self {
            judge: Judge::new(),
            flows: Flows::new(),
            events: vec![],
            frame: 0,
            us: 0,
            port: 50_000,
            peer: B,
            ecn: 0,
            cut: 0,
            damaged: false,
        }
    }

    /// One that knows the two queue pairs.
    pub(crate) fn stated() -> Self {
        let mut wire = Self::new();
        wire.state(Some(1024), None, None);
        wire
    }

    /// One that knows the two queue pairs, the first PSN of their requests and how many READs may be outstanding.
    pub(crate) fn named(psn: u32, depth: u8) -> Self {
        let mut wire = Self::new();
        wire.state(Some(1024), Some(Psn::new(psn)), Some(depth));
        wire
    }

    /// Names the two queue pairs to the judge.
    pub(crate) fn state(&mut self, mtu: Option<u32>, psn: Option<Psn>, depth: Option<u8>) {
        self.judge.state(&Stated {
            ends: [
                (A.parse().unwrap(), Qpn::new(QP_A)),
                (B.parse().unwrap(), Qpn::new(QP_B)),
            ],
            mtu,
            first_psn: [psn; 2],
            depth: [depth; 2],
        });
    }

    /// Sends a packet from A, ten microseconds after the one before.
    pub(crate) fn a(&mut self, header: Header, payload: usize) {
        self.send(self.us + 10, QP_B, header, payload);
    }

    /// Sends a packet from B, ten microseconds after the one before.
    pub(crate) fn b(&mut self, header: Header, payload: usize) {
        self.send(self.us + 10, QP_A, header, payload);
    }

    /// Ends the capture. Returns all findings: frame, rule, host at fault, text.
    pub(crate) fn found(&mut self) -> Vec<String> {
        self.judge.finish();
        let describe = |f: Finding| {
            let host = f
                .at_fault
                .map_or("-".to_owned(), |addr| match addr.to_string().as_str() {
                    A => "A".to_owned(),
                    B => "B".to_owned(),
                    other => other.to_owned(),
                });
            format!("{} {} {host}: {}", f.frame, f.rule.id(), f.text)
        };
        self.judge.take_findings().into_iter().map(describe).collect()
    }

    /// Returns what is said of the only conversation.
    pub(crate) fn summary(&self) -> Summary {
        let mut all = self.judge.conversations();
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }

    /// Sends a packet to a queue pair at a time, microseconds.
    pub(crate) fn send(&mut self, us: u64, to: u32, mut header: Header, payload: usize) {
        header.bth.dest_qp = Qpn::new(to);
        let mut bytes = vec![0; MAX_HEADER_LEN];
        let len = header.emit(&mut bytes);
        bytes.truncate(len);
        bytes.resize(len + payload + ICRC_LEN, 7);
        self.put(us, to >= QP_B, &bytes);
    }

    /// Sends a management datagram, ten microseconds after the packet before.
    pub(crate) fn mad(&mut self, from_a: bool, mad: &[u8; 256]) {
        let mut bytes = vec![0; datagram::PACKET_LEN + ICRC_LEN];
        datagram::write(Psn::new(0), mad, &mut bytes);
        self.put(self.us + 10, from_a, &bytes);
    }

    fn put(&mut self, us: u64, from_a: bool, bytes: &[u8]) {
        let (src, dst) = if from_a { (A, self.peer) } else { (self.peer, A) };
        self.frame += 1;
        self.us = us;
        let meta = Meta {
            frame: self.frame,
            time_ns: 1_000_000 + us * 1000,
            src: SocketAddr::new(src.parse().unwrap(), self.port),
            dst: dst.parse().unwrap(),
            ecn: self.ecn,
        };
        let observed = match self.cut {
            0 => Observed::new(meta, Packet::parse(bytes).unwrap()),
            cut => Observed::cut(meta, &bytes[..bytes.len() - cut], bytes.len()).unwrap(),
        };
        if self.damaged {
            self.judge.damaged(&observed);
        } else if let Some(event) = self.judge.packet(&observed) {
            self.flows.event(&event);
            self.events.push(event);
        }
    }

    pub(crate) fn finish(self) -> Vec<Flow> {
        self.flows.finish(&self.judge).flows
    }
}

pub(crate) fn request(opcode: Opcode, psn: u32) -> Header {
    let mut header = Header::new(Bth::new(opcode, Qpn::new(0), Psn::new(psn)));
    header.bth.ack_req = true;
    header
}

pub(crate) fn write(psn: u32, len: u32) -> Header {
    let mut header = request(Opcode::RcWriteOnly, psn);
    header.reth = Some(Reth {
        dma_len: len,
        ..Reth::default()
    });
    header
}

pub(crate) fn answer(opcode: Opcode, psn: u32, syndrome: Syndrome, msn: u32) -> Header {
    let mut header = Header::new(Bth::new(opcode, Qpn::new(0), Psn::new(psn)));
    header.aeth = Some(Aeth {
        syndrome,
        msn: Msn::new(msn),
    });
    header
}

pub(crate) fn ack(psn: u32, msn: u32) -> Header {
    let syndrome = Syndrome::Ack(Credits::INVALID);
    answer(Opcode::RcAcknowledge, psn, syndrome, msn)
}

pub(crate) fn read(psn: u32, len: u32) -> Header {
    let mut header = write(psn, len);
    header.bth.opcode = Opcode::RcReadRequest;
    header
}

pub(crate) fn response(opcode: Opcode, psn: u32, msn: u32) -> Header {
    answer(opcode, psn, Syndrome::Ack(Credits::INVALID), msn)
}

pub(crate) fn nak(code: NakCode, psn: u32, msn: u32) -> Header {
    answer(Opcode::RcAcknowledge, psn, Syndrome::Nak(code), msn)
}

/// An RNR NAK with a timer's code.
pub(crate) fn rnr(code: u8, psn: u32, msn: u32) -> Header {
    answer(Opcode::RcAcknowledge, psn, Syndrome::Rnr(RnrTimer::new(code)), msn)
}
