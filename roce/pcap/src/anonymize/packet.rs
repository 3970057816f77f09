//! Packets: addresses, keys, immediate data and payload.

use roce_bth::{BTH_LEN, ExtHeader, Opcode, Qpn, Service};
use roce_port::cm::mad::MAD_LEN;

use super::{
    address::Addresses,
    cm,
    secret::{Domain, Secret},
};

/// Least and most that is added to virtual addresses, in pages: far from the original, and not beyond what user space has.
const PAGES: (u64, u64) = (1 << 20, 1 << 34);
const PAGE_BITS: u32 = 12;

/// Payload that takes the place of the original.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Filling {
    /// Bytes that are the same for the same payload: the judge tells whether a repetition has the payload of the first.
    #[default]
    Pattern,
    /// Zeros.
    Zeros,
}

/// Replaces the contents of packets.
pub(super) struct Packets {
    pub(super) addresses: Addresses,
    secret: Secret,
    filling: Filling,
    keep_private: bool,
}

impl Packets {
    pub(super) fn new(secret: Secret, filling: Filling, keep_private: bool) -> Self {
        Self {
            addresses: Addresses::new(secret.clone()),
            secret,
            filling,
            keep_private,
        }
    }

    /// Replaces the contents of a packet without its ICRC, or of as much of it as there is. `dst` is its receiver as it was.
    pub(super) fn replace(&mut self, bytes: &mut [u8], dst: &[u8]) {
        let opcode = bytes.first().copied().and_then(Opcode::from_byte);
        let Some(opcode) = opcode.filter(|_| bytes.len() >= BTH_LEN) else {
            let known = bytes.len().min(BTH_LEN);
            return self.fill(&mut bytes[known..]);
        };
        let info = opcode.info();
        let pad = usize::from(bytes[1] >> 4 & 3);
        let dest_qp = Qpn::new(u32::from_be_bytes([0, bytes[5], bytes[6], bytes[7]]));
        for header in ExtHeader::ALL {
            if let Some(at) = info.offset(header) {
                let end = bytes.len().min(at + header.len());
                if let Some(part) = bytes.get_mut(at..end) {
                    self.header(header, part, dst);
                }
            }
        }
        let Some(tail) = bytes.get_mut(info.header_len..) else {
            return;
        };
        match tail.len() {
            // A management datagram: its length tells whether it is one.
            MAD_LEN if dest_qp == Qpn::GSI && info.service == Service::Ud => {
                cm::replace(tail, &mut self.addresses, self.keep_private);
            }
            len => {
                let (payload, padding) = tail.split_at_mut(len.saturating_sub(pad));
                padding.fill(0);
                self.fill(payload);
            }
        }
    }

    fn header(&self, header: ExtHeader, bytes: &mut [u8], dst: &[u8]) {
        if bytes.len() < header.len() {
            // The capture cut it.
            bytes.fill(0);
            return;
        }
        match header {
            ExtHeader::Reth => self.remote(bytes, dst),
            ExtHeader::AtomicEth => {
                self.remote(bytes, dst);
                bytes[12..].chunks_mut(8).for_each(|operand| self.operand(operand));
            }
            ExtHeader::AtomicAckEth => self.operand(bytes),
            ExtHeader::Imm => self.permute(Domain::Immediate, bytes),
            ExtHeader::Ieth => self.permute(Domain::RKey, bytes),
            ExtHeader::CnpReserved => bytes.fill(0),
            ExtHeader::Deth | ExtHeader::Xrceth | ExtHeader::Feth | ExtHeader::Aeth => {}
        }
    }

    /// Replaces a virtual address and the key behind it. All addresses under a key move by the same pages.
    fn remote(&self, bytes: &mut [u8], dst: &[u8]) {
        let (va, rest) = bytes.split_at_mut(8);
        let rkey = &mut rest[..4];
        let pages = u64::from_le_bytes(self.secret.bytes(Domain::Address, &[dst, rkey]));
        let pages = PAGES.0 + pages % (PAGES.1 - PAGES.0);
        let old = va.first_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
        va.copy_from_slice(&old.wrapping_add(pages << PAGE_BITS).to_be_bytes());
        self.permute(Domain::RKey, rkey);
    }

    fn permute(&self, domain: Domain, bytes: &mut [u8]) {
        if let Some(bytes) = bytes.first_chunk_mut::<4>() {
            *bytes = self.secret.permute(domain, u32::from_be_bytes(*bytes)).to_be_bytes();
        }
    }

    fn operand(&self, bytes: &mut [u8]) {
        let new: [u8; 8] = self.secret.bytes(Domain::Operand, &[bytes]);
        bytes.iter_mut().zip(new).for_each(|(byte, new)| *byte = new);
    }

    /// Replaces payload.
    fn fill(&self, payload: &mut [u8]) {
        match self.filling {
            Filling::Zeros => payload.fill(0),
            Filling::Pattern => {
                let pattern = self.secret.hash(Domain::Payload, &[payload]);
                let pattern = pattern.iter().cycle();
                payload.iter_mut().zip(pattern).for_each(|(byte, new)| *byte = *new);
            }
        }
    }
}
