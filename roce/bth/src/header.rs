//! Base transport header, and extended headers of several fields.

use bitflags::bitflags;

use crate::{
    ids::{PKey, QKey, Qpn, RKey, Srqn},
    opcode::Opcode,
    psn::Psn,
    wire::{BTH_LEN, Wire, header},
};

/// Base transport header: 12 bytes (IBTA 9.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Bth {
    /// Opcode.
    pub opcode: Opcode,
    /// Solicited event: the receiver's completion may wake a waiting consumer.
    pub solicited: bool,
    /// Migration request. rdma_rxe sends 0, ConnectX 1; it is not checked.
    pub migreq: bool,
    /// Pad bytes (0 to 3) between payload and ICRC.
    pub pad: u8,
    /// Transport header version; 0 is the only one.
    pub version: u8,
    /// Partition key.
    pub pkey: PKey,
    /// Forward explicit congestion notification.
    pub fecn: bool,
    /// Backward explicit congestion notification.
    pub becn: bool,
    /// The six reserved bits beside FECN and BECN, as they came.
    pub reserved6: u8,
    /// Destination queue pair.
    pub dest_qp: Qpn,
    /// The responder must acknowledge this packet.
    pub ack_req: bool,
    /// The seven reserved bits beside AckReq, as they came.
    pub reserved7: u8,
    /// Packet sequence number.
    pub psn: Psn,
}

impl Bth {
    /// Bytes on the wire.
    pub const LEN: usize = BTH_LEN;

    /// Creates a header on the default partition with everything but the arguments zero.
    pub const fn new(opcode: Opcode, dest_qp: Qpn, psn: Psn) -> Self {
        Self {
            opcode,
            solicited: false,
            migreq: false,
            pad: 0,
            version: 0,
            pkey: PKey::DEFAULT,
            fecn: false,
            becn: false,
            reserved6: 0,
            dest_qp,
            ack_req: false,
            reserved7: 0,
            psn,
        }
    }

    /// Reads all but the opcode, which the caller has looked up.
    pub(crate) fn read(b: &[u8; 12], opcode: Opcode) -> Self {
        Self {
            opcode,
            solicited: b[1] & 0x80 != 0,
            migreq: b[1] & 0x40 != 0,
            pad: (b[1] >> 4) & 3,
            version: b[1] & 0x0f,
            pkey: PKey(u16::from_be_bytes([b[2], b[3]])),
            fecn: b[4] & 0x80 != 0,
            becn: b[4] & 0x40 != 0,
            reserved6: b[4] & 0x3f,
            dest_qp: Qpn::new(u32::from_be_bytes([0, b[5], b[6], b[7]])),
            ack_req: b[8] & 0x80 != 0,
            reserved7: b[8] & 0x7f,
            psn: Psn::new(u32::from_be_bytes([0, b[9], b[10], b[11]])),
        }
    }

    pub(crate) fn write(&self) -> [u8; 12] {
        let flags =
            u8::from(self.solicited) << 7 | u8::from(self.migreq) << 6 | (self.pad & 3) << 4 | (self.version & 0x0f);
        let marks = u8::from(self.fecn) << 7 | u8::from(self.becn) << 6 | (self.reserved6 & 0x3f);
        let request = u8::from(self.ack_req) << 7 | (self.reserved7 & 0x7f);
        let [key0, key1] = self.pkey.0.to_be_bytes();
        // Whole words: a store for each byte costs more.
        let words = [
            u32::from_be_bytes([self.opcode as u8, flags, key0, key1]),
            u32::from(marks) << 24 | self.dest_qp.value(),
            u32::from(request) << 24 | self.psn.value(),
        ];
        let mut b = [0; 12];
        for (bytes, word) in b.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *bytes = word.to_be_bytes();
        }
        b
    }
}

header! {
    /// RDMA extended transport header: 16 bytes.
    #[derive(Default)]
    Reth[16] {
        /// Virtual address in the responder.
        va: u64[8],
        /// The key of the responder's region or window.
        rkey: RKey[4],
        /// Bytes of the whole message.
        dma_len: u32[4],
    }
}

header! {
    /// Atomic extended transport header: 28 bytes.
    #[derive(Default)]
    AtomicEth[28] {
        /// Virtual address of the 8-byte word, naturally aligned.
        va: u64[8],
        /// The key of the responder's region or window.
        rkey: RKey[4],
        /// CmpSwap: the new value; FetchAdd: the addend.
        swap_add: u64[8],
        /// CmpSwap: the value to compare with.
        compare: u64[8],
    }
}

header! {
    /// Datagram extended transport header: 8 bytes.
    #[derive(Default)]
    Deth[8] {
        /// Queue key.
        qkey: QKey[4],
        /// The reserved byte before the source QP, as it came.
        reserved: u8[1],
        /// Source queue pair.
        src_qp: Qpn[3],
    }
}

header! {
    /// Extended reliable connection header: 4 bytes (IBTA Annex A14).
    #[derive(Default)]
    XrcEth[4] {
        /// The reserved byte before the number, as it came.
        reserved: u8[1],
        /// Shared receive queue of the message.
        srqn: Srqn[3],
    }
}

bitflags! {
    /// Guarantee of a FLUSH (FETH placement type, four bits, IBTA Annex A19).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct Placement: u8 {
        /// All agents see the data.
        const GLOBAL_VISIBILITY = 1;
        /// The data survives the loss of power.
        const PERSISTENT = 1 << 1;
    }
}

/// Range of a FLUSH (FETH selectivity level, two bits, IBTA Annex A19).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub enum Selectivity {
    /// The range of the RETH.
    #[default]
    Range,
    /// The whole region of the RETH's key.
    Region,
    /// A reserved code point, kept as it came (2 or 3).
    Reserved(u8),
}

impl Selectivity {
    /// Reads the low two bits.
    pub const fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            0 => Self::Range,
            1 => Self::Region,
            other => Self::Reserved(other),
        }
    }

    /// The two bits.
    pub const fn bits(self) -> u8 {
        match self {
            Self::Range => 0,
            Self::Region => 1,
            Self::Reserved(bits) => bits & 3,
        }
    }
}

/// FLUSH extended transport header: 4 bytes (IBTA Annex A19).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct Feth {
    /// Placement type.
    pub placement: Placement,
    /// Selectivity level.
    pub selectivity: Selectivity,
    /// The 26 reserved bits above, as they came (shifted down).
    pub reserved: u32,
}

impl Feth {
    /// Bytes on the wire.
    pub const LEN: usize = 4;
}

impl Wire<4> for Feth {
    fn read(b: &[u8; 4]) -> Self {
        Self {
            placement: Placement::from_bits_retain(b[3] & 0xf),
            selectivity: Selectivity::from_bits(b[3] >> 4),
            reserved: u32::from_be_bytes(*b) >> 6,
        }
    }

    fn write(&self) -> [u8; 4] {
        let low = (self.placement.bits() & 0xf) | self.selectivity.bits() << 4;
        (self.reserved << 6 | u32::from(low)).to_be_bytes()
    }
}
