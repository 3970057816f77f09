//! Header before every fragment.

use bitflags::bitflags;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    big_endian::{U16, U32, U64},
};

use super::{
    error::ProtoError,
    ext::{EXT_LEN, Extensions},
    limits::{BITMAP_LEN, MAX_FRAGMENT, MAX_MESSAGE},
};

/// Bytes of the largest SEND: header and data.
pub const MAX_SEND: usize = Header::LEN + MAX_FRAGMENT;

bitflags! {
    /// Flags of a header.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct Flags: u8 {
        /// The data is a congestion map.
        const CONG_BITMAP = 1;
        /// The receiver must send an acknowledgement.
        const ACK_REQUIRED = 1 << 1;
        /// The message was sent before, over a former connection.
        const RETRANSMITTED = 1 << 2;
        /// Several extension headers follow (`RDS_FLAG_EXTHDR_EXTENSION`, Linux 7.3).
        const SEVERAL_EXTENSIONS = 1 << 5;
    }
}

/// Purpose of a message, as its header shows it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// Congestion map of the sender's address.
    Bitmap,
    /// Acknowledgement without data.
    Ack,
    /// Request for a [`Pong`](Self::Pong), to port 0.
    Ping,
    /// Answer to a [`Ping`](Self::Ping), from port 0.
    Pong,
    /// Data of a program.
    Data,
}

/// Header (`struct rds_header`), 48 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Header {
    /// Number of the message on the connection, from 1; 0 for congestion maps and acknowledgements.
    pub sequence: U64,
    /// Last sequence number received; 0: none.
    pub ack: U64,
    /// Bytes of the whole message, without headers.
    pub len: U32,
    /// Port of the sender.
    pub sport: U16,
    /// Port of the receiver.
    pub dport: U16,
    flags: u8,
    /// Receive buffers posted since the last header, if both sides use credits.
    pub credit: u8,
    reserved: [u8; 4],
    checksum: U16,
    ext: [u8; EXT_LEN],
}

impl Header {
    /// Bytes.
    pub const LEN: usize = size_of::<Self>();

    /// Returns a sealed header without extensions.
    pub fn new(sequence: u64, ack: u64, len: u32, (sport, dport): (u16, u16), flags: Flags) -> Self {
        let mut header = Self {
            sequence: sequence.into(),
            ack: ack.into(),
            len: len.into(),
            sport: sport.into(),
            dport: dport.into(),
            flags: flags.bits(),
            ..Self::default()
        };
        header.seal();
        header
    }

    /// Returns a sealed header of an acknowledgement without data.
    pub fn ack_only(ack: u64) -> Self {
        Self::new(0, ack, 0, (0, 0), Flags::empty())
    }

    /// Returns a sealed header of a congestion map's fragments. The kernel takes any other flag for data.
    pub fn bitmap(ack: u64) -> Self {
        Self::new(0, ack, BITMAP_LEN as u32, (0, 0), Flags::CONG_BITMAP)
    }

    /// Reads a header and checks its checksum. Returns the bytes behind it, too.
    ///
    /// # Errors
    /// Too short, or a wrong checksum.
    pub fn parse(bytes: &[u8]) -> Result<(&Self, &[u8]), ProtoError> {
        let (header, rest) = Self::peek(bytes)?;
        if !header.checksum_ok() {
            return Err(ProtoError::Checksum {
                found: header.checksum.get(),
                expected: header.sum(),
            });
        }
        Ok((header, rest))
    }

    /// Reads a header without its checksum. Returns the bytes behind it, too.
    ///
    /// # Errors
    /// Too short.
    pub fn peek(bytes: &[u8]) -> Result<(&Self, &[u8]), ProtoError> {
        Self::ref_from_prefix(bytes).map_err(|_| ProtoError::Short {
            what: "RDS header",
            len: bytes.len(),
            need: Self::LEN,
        })
    }

    /// Flags; unknown bits are kept.
    pub fn flags(&self) -> Flags {
        Flags::from_bits_retain(self.flags)
    }

    /// Checksum in the header; 0: not checked.
    pub fn checksum(&self) -> u16 {
        self.checksum.get()
    }

    /// Sets the extension headers (see [`pack`](super::pack)). [`Header::seal`] must follow.
    pub fn set_extensions(&mut self, ext: [u8; EXT_LEN]) {
        self.ext = ext;
    }

    /// Sets the flags. [`Header::seal`] must follow.
    pub fn set_flags(&mut self, flags: Flags) {
        self.flags = flags.bits();
    }

    /// Extension headers.
    pub fn extensions(&self) -> Extensions<'_> {
        Extensions::new(&self.ext)
    }

    /// Writes the checksum. Must come after all changes.
    pub fn seal(&mut self) {
        self.checksum = self.sum().into();
    }

    /// Returns whether the checksum is right, or 0, which stands for none.
    pub fn checksum_ok(&self) -> bool {
        self.checksum.get() == 0 || self.checksum.get() == self.sum()
    }

    /// Returns the IP checksum of the header, with a checksum field of 0.
    fn sum(&self) -> u16 {
        let words = self.as_bytes().chunks_exact(2);
        let sum: u32 = words.map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
        let mut sum = sum - u32::from(self.checksum.get());
        while sum >> 16 != 0 {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }

    /// Purpose of the message. As in the kernel, only a header whose flags are exactly `CONG_BITMAP` brings a map.
    pub fn kind(&self) -> Kind {
        match (self.sport.get(), self.dport.get()) {
            _ if self.flags == Flags::CONG_BITMAP.bits() => Kind::Bitmap,
            (0, 0) if self.sequence.get() == 0 && self.len.get() == 0 => Kind::Ack,
            (sport, 0) if sport != 0 => Kind::Ping,
            (0, dport) if dport != 0 => Kind::Pong,
            _ => Kind::Data,
        }
    }

    /// SENDs of the message: one at least.
    pub fn fragments(&self) -> u32 {
        self.len.get().div_ceil(MAX_FRAGMENT as u32).max(1)
    }

    /// Bytes of data in fragment `index`; 0 beyond the last.
    pub fn fragment_len(&self, index: u32) -> usize {
        let before = u64::from(index) * MAX_FRAGMENT as u64;
        u64::from(self.len.get())
            .saturating_sub(before)
            .min(MAX_FRAGMENT as u64) as usize
    }

    /// Checks that a fragment belongs to the message of `first`. Only acknowledgement, credit, flags and checksum may differ.
    ///
    /// # Errors
    /// Names the first field that differs.
    pub fn continues(&self, first: &Self, index: u32) -> Result<(), ProtoError> {
        let fields = [
            ("sequence", self.sequence == first.sequence),
            ("length", self.len == first.len),
            ("source port", self.sport == first.sport),
            ("destination port", self.dport == first.dport),
        ];
        match fields.iter().find(|(_, same)| !same) {
            Some((field, _)) => Err(ProtoError::Mismatch { field, index }),
            None => Ok(()),
        }
    }
}

/// Fragment of a message: a whole SEND.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fragment<'a> {
    /// The header.
    pub header: &'a Header,
    /// The data.
    pub data: &'a [u8],
}

impl<'a> Fragment<'a> {
    /// Reads fragment `index` of a message, and checks checksum and lengths. The kernel (before 7.3) does not check the latter.
    ///
    /// # Errors
    /// Too short, a wrong checksum, a message above [`MAX_MESSAGE`], or data of another length than belongs there.
    pub fn parse(bytes: &'a [u8], index: u32) -> Result<Self, ProtoError> {
        let (header, data) = Header::parse(bytes)?;
        let message = header.len.get();
        if message > MAX_MESSAGE {
            return Err(ProtoError::TooLong {
                len: message,
                max: MAX_MESSAGE,
            });
        }
        let expected = header.fragment_len(index);
        if data.len() != expected || index >= header.fragments() {
            return Err(ProtoError::Fragment {
                index,
                message,
                len: data.len(),
                expected,
            });
        }
        Ok(Self { header, data })
    }

    /// Appends the bytes to send.
    pub fn emit(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.header.as_bytes());
        out.extend_from_slice(self.data);
    }
}

const _: () = assert!(Header::LEN == 48);
