//! Base transport header, and extended headers of several fields.

use crate::{
    ids::{PKey, QKey, Qpn, RKey, Srqn},
    opcode::Opcode,
    psn::Psn,
};

fn be32(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn be64(b: &[u8], at: usize) -> u64 {
    u64::from(be32(b, at)) << 32 | u64::from(be32(b, at + 4))
}

/// Header with its form on the wire.
pub(crate) trait Wire<const N: usize> {
    fn read(b: &[u8; N]) -> Self;
    fn write(&self) -> [u8; N];
}

impl Wire<4> for u32 {
    fn read(b: &[u8; 4]) -> Self {
        Self::from_be_bytes(*b)
    }

    fn write(&self) -> [u8; 4] {
        self.to_be_bytes()
    }
}

impl Wire<8> for u64 {
    fn read(b: &[u8; 8]) -> Self {
        Self::from_be_bytes(*b)
    }

    fn write(&self) -> [u8; 8] {
        self.to_be_bytes()
    }
}

impl Wire<4> for RKey {
    fn read(b: &[u8; 4]) -> Self {
        Self(u32::read(b))
    }

    fn write(&self) -> [u8; 4] {
        self.0.write()
    }
}

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
    pub const LEN: usize = crate::BTH_LEN;

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
            dest_qp: Qpn::new(be32(b, 4)),
            ack_req: b[8] & 0x80 != 0,
            reserved7: b[8] & 0x7f,
            psn: Psn::new(be32(b, 8)),
        }
    }

    pub(crate) fn write(&self) -> [u8; 12] {
        let mut b = [0; 12];
        b[0] = self.opcode as u8;
        b[1] = u8::from(self.solicited) << 7 | u8::from(self.migreq) << 6 | (self.pad & 3) << 4 | (self.version & 0x0f);
        b[2..4].copy_from_slice(&self.pkey.0.to_be_bytes());
        b[4..8].copy_from_slice(&self.dest_qp.value().to_be_bytes());
        b[4] = u8::from(self.fecn) << 7 | u8::from(self.becn) << 6 | (self.reserved6 & 0x3f);
        b[8..12].copy_from_slice(&self.psn.value().to_be_bytes());
        b[8] = u8::from(self.ack_req) << 7 | (self.reserved7 & 0x7f);
        b
    }
}

/// RDMA extended transport header: 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct Reth {
    /// Virtual address in the responder.
    pub va: u64,
    /// The key of the responder's region or window.
    pub rkey: RKey,
    /// Bytes of the whole message.
    pub dma_len: u32,
}

impl Reth {
    /// Bytes on the wire.
    pub const LEN: usize = 16;
}

impl Wire<16> for Reth {
    fn read(b: &[u8; 16]) -> Self {
        Self {
            va: be64(b, 0),
            rkey: RKey(be32(b, 8)),
            dma_len: be32(b, 12),
        }
    }

    fn write(&self) -> [u8; 16] {
        let mut b = [0; 16];
        b[..8].copy_from_slice(&self.va.to_be_bytes());
        b[8..12].copy_from_slice(&self.rkey.0.to_be_bytes());
        b[12..].copy_from_slice(&self.dma_len.to_be_bytes());
        b
    }
}

/// Atomic extended transport header: 28 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct AtomicEth {
    /// Virtual address of the 8-byte word, naturally aligned.
    pub va: u64,
    /// The key of the responder's region or window.
    pub rkey: RKey,
    /// CmpSwap: the new value; FetchAdd: the addend.
    pub swap_add: u64,
    /// CmpSwap: the value to compare with.
    pub compare: u64,
}

impl AtomicEth {
    /// Bytes on the wire.
    pub const LEN: usize = 28;
}

impl Wire<28> for AtomicEth {
    fn read(b: &[u8; 28]) -> Self {
        Self {
            va: be64(b, 0),
            rkey: RKey(be32(b, 8)),
            swap_add: be64(b, 12),
            compare: be64(b, 20),
        }
    }

    fn write(&self) -> [u8; 28] {
        let mut b = [0; 28];
        b[..8].copy_from_slice(&self.va.to_be_bytes());
        b[8..12].copy_from_slice(&self.rkey.0.to_be_bytes());
        b[12..20].copy_from_slice(&self.swap_add.to_be_bytes());
        b[20..].copy_from_slice(&self.compare.to_be_bytes());
        b
    }
}

/// Datagram extended transport header: 8 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct Deth {
    /// Queue key.
    pub qkey: QKey,
    /// The reserved byte before the source QP, as it came.
    pub reserved: u8,
    /// Source queue pair.
    pub src_qp: Qpn,
}

impl Deth {
    /// Bytes on the wire.
    pub const LEN: usize = 8;
}

impl Wire<8> for Deth {
    fn read(b: &[u8; 8]) -> Self {
        Self {
            qkey: QKey(be32(b, 0)),
            reserved: b[4],
            src_qp: Qpn::new(be32(b, 4)),
        }
    }

    fn write(&self) -> [u8; 8] {
        let mut b = [0; 8];
        b[..4].copy_from_slice(&self.qkey.0.to_be_bytes());
        b[4..].copy_from_slice(&self.src_qp.value().to_be_bytes());
        b[4] = self.reserved;
        b
    }
}

/// Guarantee of a FLUSH (FETH placement type, IBTA Annex A19).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct Placement(u8);

impl Placement {
    /// All agents see the data.
    pub const GLOBAL_VISIBILITY: Self = Self(1);
    /// The data survives the loss of power.
    pub const PERSISTENT: Self = Self(1 << 1);

    /// The low four bits.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & 0xf)
    }

    /// The four bits.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Returns whether all of `other` is set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the union of both.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
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
            placement: Placement::from_bits(b[3]),
            selectivity: Selectivity::from_bits(b[3] >> 4),
            reserved: be32(b, 0) >> 6,
        }
    }

    fn write(&self) -> [u8; 4] {
        let low = self.placement.bits() | self.selectivity.bits() << 4;
        (self.reserved << 6 | u32::from(low)).to_be_bytes()
    }
}

/// Extended reliable connection header: 4 bytes (IBTA Annex A14).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct XrcEth {
    /// The reserved byte before the number, as it came.
    pub reserved: u8,
    /// Shared receive queue of the message.
    pub srqn: Srqn,
}

impl XrcEth {
    /// Bytes on the wire.
    pub const LEN: usize = 4;
}

impl Wire<4> for XrcEth {
    fn read(b: &[u8; 4]) -> Self {
        Self {
            reserved: b[0],
            srqn: Srqn::new(be32(b, 0)),
        }
    }

    fn write(&self) -> [u8; 4] {
        let mut b = self.srqn.value().to_be_bytes();
        b[0] = self.reserved;
        b
    }
}
