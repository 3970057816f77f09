//! Ping information: the data of portal 0 of every node.

use bitflags::bitflags;

use super::{
    error::ProtoError,
    nid::Nid,
    order::{ByteOrder, Reader, Writer},
};

/// Portal of ping information.
pub const PING_PORTAL: u32 = 0;
/// Match bits of ping information.
pub const PING_MATCH_BITS: u64 = 1 << 63;
/// Status of an interface that works.
pub const STATUS_UP: u32 = 0x15aa_c0de;
/// Status of an interface that does not.
pub const STATUS_DOWN: u32 = 0xdead_face;
/// Magic number (`LNET_PROTO_PING_MAGIC`).
const MAGIC: u32 = 0x7069_6e67;
const HEAD_LEN: usize = 16;
const ENTRY_LEN: usize = 16;

bitflags! {
    /// Features of a node. Kernels send 0x1e, or 0x0e with discovery switched off.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct Features: u32 {
        /// Ping information of old.
        const BASE = 1;
        /// Entries have a status.
        const NI_STATUS = 1 << 1;
        /// Not a router.
        const RTE_DISABLED = 1 << 2;
        /// Several interfaces may be used together.
        const MULTI_RAIL = 1 << 3;
        /// Accepts pushes of ping information.
        const DISCOVERY = 1 << 4;
        /// Entries with large addresses follow the others.
        const LARGE_ADDR = 1 << 5;
        /// The primary address is a large one.
        const PRIMARY_LARGE = 1 << 6;
        /// Metadata follows.
        const METADATA = 1 << 7;
    }
}

impl Features {
    /// Features of a node of this crate: those of a kernel with discovery switched on. Without [`Features::DISCOVERY`] a kernel that is
    /// told to discover the node by force hangs with its next message.
    pub(crate) const NODE: Self = Self::NI_STATUS
        .union(Self::RTE_DISABLED)
        .union(Self::MULTI_RAIL)
        .union(Self::DISCOVERY);
}

/// Network interface of a node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct NiStatus {
    /// Address.
    pub nid: Nid,
    /// [`STATUS_UP`] or [`STATUS_DOWN`]; of the first entry, `0@lo`, the sequence number of the information.
    pub status: u32,
    /// Bytes of the whole information, in the first entry of nodes with [`Features::LARGE_ADDR`]; else 0.
    pub msg_size: u32,
}

/// Ping information (`struct lnet_ping_info`), in the sender's byte order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PingInfo<'a> {
    /// Byte order of the sender.
    pub order: ByteOrder,
    /// Features; unknown bits are kept.
    pub features: Features,
    /// Process ID.
    pub pid: u32,
    /// Interfaces of the node: more than [`PingInfo::interfaces`] if the reply was truncated.
    pub count: u32,
    entries: &'a [u8],
    rest: &'a [u8],
}

impl<'a> PingInfo<'a> {
    /// Returns whether bytes begin as ping information.
    pub fn is(bytes: &[u8]) -> bool {
        bytes.first_chunk().is_some_and(|m| ByteOrder::of(MAGIC, *m).is_some())
    }

    /// Reads ping information.
    ///
    /// # Errors
    /// Too short for the fields before the entries, or no magic.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ProtoError> {
        const WHAT: &str = "LNet ping information";
        let (Some(magic), Some((_, behind))) = (bytes.first_chunk::<4>(), bytes.split_at_checked(HEAD_LEN)) else {
            return Err(ProtoError::Short {
                what: WHAT,
                len: bytes.len(),
                need: HEAD_LEN,
            });
        };
        let order = ByteOrder::of(MAGIC, *magic).ok_or(ProtoError::Magic {
            what: WHAT,
            found: u32::from_le_bytes(*magic),
        })?;
        let mut fields = Reader::new(WHAT, order, &bytes[4..]);
        let (features, pid, count) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let there = (behind.len() / ENTRY_LEN).min(count as usize);
        let (entries, rest) = behind.split_at(there * ENTRY_LEN);
        Ok(Self {
            order,
            features: Features::from_bits_retain(features),
            pid,
            count,
            entries,
            rest,
        })
    }

    /// Interfaces that came.
    pub fn interfaces(&self) -> impl Iterator<Item = NiStatus> + use<'a> {
        let (order, entries) = (self.order, self.entries.chunks_exact(ENTRY_LEN));
        entries.filter_map(move |entry| {
            let mut fields = Reader::new("entry", order, entry);
            Some(NiStatus {
                nid: Nid(fields.u64().ok()?),
                status: fields.u32().ok()?,
                msg_size: fields.u32().ok()?,
            })
        })
    }

    /// Bytes behind the entries: those of large addresses, or a part of one.
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Returns the bytes of ping information. `rest` goes behind the entries.
    pub fn emit(order: ByteOrder, features: Features, pid: u32, interfaces: &[NiStatus], rest: &[u8]) -> Vec<u8> {
        let mut out = Writer::new(order);
        out.u32(MAGIC);
        out.u32(features.bits());
        out.u32(pid);
        out.u32(u32::try_from(interfaces.len()).unwrap_or(u32::MAX));
        for ni in interfaces {
            out.u64(ni.nid.0);
            out.u32(ni.status);
            out.u32(ni.msg_size);
        }
        out.bytes(rest);
        out.out
    }
}
