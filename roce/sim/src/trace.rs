//! A fingerprint of a run, and its capture file.

use std::{fs::File, io::BufWriter, net::SocketAddr, path::Path};

use roce_bth::{BTH_LEN, ROCE_UDP_PORT};
use roce_pcap::Writer;
use roce_port::CmEventKind;
use roce_verbs::Completion;

use crate::net::Frame;

/// Log of events, which prints them or not.
#[derive(Clone, Copy, Debug)]
pub struct Notes {
    on: bool,
}

impl Notes {
    /// Prints a line, if there is a log.
    pub fn print(self, now: u64, text: impl FnOnce() -> String) {
        if self.on {
            eprintln!("{now:>12} {}", text());
        }
    }
}

/// Fingerprint of what happens, and a capture of what is sent, if there is one.
pub struct Trace {
    hash: u64,
    pcap: Option<Writer<BufWriter<File>>>,
    notes: Notes,
}

impl Trace {
    /// Creates a trace.
    ///
    /// # Errors
    /// When the file can't be created.
    pub fn new(pcap: Option<&Path>, log: bool) -> std::io::Result<Self> {
        Ok(Self {
            hash: 0xcbf2_9ce4_8422_2325,
            pcap: pcap.map(Writer::create).transpose()?,
            notes: Notes { on: log },
        })
    }

    /// Returns the fingerprint of what happened so far.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    fn mix(&mut self, value: u64) {
        self.hash = (self.hash ^ value).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }

    /// Writes a packet or train to the capture, before the network damages it: the file shows what ports sent.
    pub fn sent(&mut self, now: u64, frame: &Frame) {
        let Some(pcap) = &mut self.pcap else {
            return;
        };
        for (i, packet) in frame.packets().enumerate() {
            let dst = SocketAddr::new(frame.dst, ROCE_UDP_PORT);
            let id = frame.identification.wrapping_add(i as u16);
            // The capture is an aid; the run goes on without it.
            let _ = pcap.write(now, frame.src, dst, packet, id);
        }
    }

    /// Logs a train that is sent.
    pub(crate) fn leaves(&self, now: u64, host: usize, train: &roce_port::Train<'_>) {
        if !self.notes.on {
            return;
        }
        for packet in train.packets().filter_map(|bytes| roce_bth::Packet::parse(bytes).ok()) {
            let b = &packet.header.bth;
            self.note(now, || {
                format!("host {host} sends {:?} to {} psn {}", b.opcode, b.dest_qp, b.psn)
            });
        }
    }

    /// Logs a forged packet that is processed. It has no part in the fingerprint.
    pub(crate) fn forged(&mut self, now: u64, host: usize, frame: &Frame) {
        self.note(now, || {
            let head = &frame.bytes[..frame.bytes.len().min(BTH_LEN)];
            let (src, id) = (frame.src, frame.identification);
            format!("host {host} takes forged {head:02x?} from {src}, Identification {id}")
        });
        self.sent(now, frame);
    }

    /// Adds a packet that is processed. Addresses in memory differ from run to run, so only the BTH enters the fingerprint.
    pub fn received(&mut self, now: u64, host: usize, frame: &Frame) {
        if self.notes.on
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
        self.note(now, || {
            let (id, opcode, status, len) = (c.wr_id, c.opcode, c.status, c.byte_len);
            format!("host {host}: {id} {opcode:?} {status:?} {len} bytes")
        });
        self.mix(now);
        self.mix(c.wr_id);
        self.mix(u64::from(c.status as u32) << 32 | u64::from(c.byte_len));
    }

    pub(crate) fn cm(&mut self, now: u64, host: usize, event: &CmEventKind) {
        self.note(now, || format!("host {host}: {event:?}"));
        self.mix(now);
        self.mix(event.conn().0);
    }

    /// Prints a line of the log, if there is one.
    pub fn note(&self, now: u64, text: impl FnOnce() -> String) {
        self.notes.print(now, text);
    }

    /// Returns the log.
    pub fn notes(&self) -> Notes {
        self.notes
    }
}
