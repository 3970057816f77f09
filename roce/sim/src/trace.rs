//! A fingerprint of a run, and its capture file.

use std::{fs::File, io::BufWriter, net::SocketAddr, path::Path};

use roce_bth::{BTH_LEN, ROCE_UDP_PORT};
use roce_pcap::Writer;
use roce_port::CmEventKind;
use roce_verbs::Completion;

use crate::net::Frame;

/// Says what happens, if somebody wants to know.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notes {
    on: bool,
}

impl Notes {
    pub(crate) fn say(self, now: u64, text: impl FnOnce() -> String) {
        if self.on {
            eprintln!("{now:>12} {}", text());
        }
    }
}

/// Hashes what happens; writes what is sent to a file if there is one.
pub(crate) struct Trace {
    hash: u64,
    pcap: Option<Writer<BufWriter<File>>>,
    log: bool,
}

impl Trace {
    /// # Errors
    /// When the file can't be made.
    pub(crate) fn new(pcap: Option<&Path>, log: bool) -> std::io::Result<Self> {
        Ok(Self {
            hash: 0xcbf2_9ce4_8422_2325,
            pcap: pcap.map(Writer::create).transpose()?,
            log,
        })
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    fn mix(&mut self, value: u64) {
        self.hash = (self.hash ^ value).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }

    /// A packet (or train) leaves. Written before the network damages it, so that the file shows what ports sent.
    pub(crate) fn sent(&mut self, now: u64, frame: &Frame) {
        let Some(pcap) = &mut self.pcap else {
            return;
        };
        let step = if frame.segment_len == 0 {
            frame.bytes.len().max(1)
        } else {
            frame.segment_len
        };
        for (i, packet) in frame.bytes.chunks(step).enumerate() {
            let dst = SocketAddr::new(frame.dst, ROCE_UDP_PORT);
            let id = frame.identification.wrapping_add(i as u16);
            // The capture is an aid; the run goes on without it.
            let _ = pcap.write(now, frame.src, dst, packet, id);
        }
    }

    /// A train is sent: for the log only.
    pub(crate) fn leaves(&self, now: u64, host: usize, train: &roce_port::Train<'_>) {
        if !self.log {
            return;
        }
        for packet in train.packets().filter_map(|bytes| roce_bth::Packet::parse(bytes).ok()) {
            let b = &packet.header.bth;
            eprintln!(
                "{now:>12} host {host} sends {:?} to {} psn {}",
                b.opcode, b.dest_qp, b.psn
            );
        }
    }

    /// A forged packet is processed. It has no part in the fingerprint.
    pub(crate) fn forged(&mut self, now: u64, host: usize, frame: &Frame) {
        if self.log {
            let head = &frame.bytes[..frame.bytes.len().min(BTH_LEN)];
            let (src, id) = (frame.src, frame.identification);
            eprintln!("{now:>12} host {host} takes forged {head:02x?} from {src}, Identification {id}");
        }
        self.sent(now, frame);
    }

    /// A packet is processed. Addresses in memory differ from run to run, so only the BTH enters the fingerprint.
    pub(crate) fn received(&mut self, now: u64, host: usize, frame: &Frame) {
        if self.log
            && let Ok(p) = roce_bth::Packet::parse(&frame.bytes)
        {
            let b = &p.header.bth;
            let aeth = p.header.aeth().map(|a| a.syndrome);
            eprintln!(
                "{now:>12} host {host} takes {:?} to {} psn {} ack {} {} bytes {aeth:?}",
                b.opcode,
                b.dest_qp,
                b.psn,
                b.ack_req,
                frame.bytes.len()
            );
        }
        self.mix(now);
        self.mix((host as u64) << 32 | frame.bytes.len() as u64);
        for half in frame.bytes[..frame.bytes.len().min(BTH_LEN)].chunks(4) {
            let mut word = [0; 4];
            word[..half.len()].copy_from_slice(half);
            self.mix(u64::from(u32::from_be_bytes(word)));
        }
    }

    pub(crate) fn completed(&mut self, now: u64, host: usize, c: &Completion) {
        if self.log {
            eprintln!(
                "{now:>12} host {host}: {} {:?} {:?} {} bytes",
                c.wr_id, c.opcode, c.status, c.byte_len
            );
        }
        self.mix(now);
        self.mix(c.wr_id);
        self.mix(u64::from(c.status as u32) << 32 | u64::from(c.byte_len));
    }

    pub(crate) fn cm(&mut self, now: u64, host: usize, event: &CmEventKind) {
        if self.log {
            eprintln!("{now:>12} host {host}: {event:?}");
        }
        self.mix(now);
        self.mix(event.conn().0);
    }

    pub(crate) fn note(&self, now: u64, text: impl FnOnce() -> String) {
        self.notes().say(now, text);
    }

    /// For those who are told of events elsewhere.
    pub(crate) fn notes(&self) -> Notes {
        Notes { on: self.log }
    }

    pub(crate) fn finish(&mut self) {
        if let Some(pcap) = &mut self.pcap {
            let _ = pcap.flush();
        }
    }
}
