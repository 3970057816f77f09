//! Private data of the connection manager's REQ, REP and REJ.

use core::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    big_endian::{U16, U32, U64},
};

use super::error::ProtoError;

/// TCP port space number of connections between IPv4 addresses (`RDS_PORT`).
pub const PORT_V4: u16 = 18634;
/// TCP port space number of connections between IPv6 addresses (`RDS_CM_PORT`).
pub const PORT_V6: u16 = 16385;
/// Mask of the minor versions of major version 4 that this crate has the messages of: 0 and 1.
pub const MINORS: u16 = 0b11;

/// Version of the protocol. All have the same messages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version {
    /// Major number.
    pub major: u8,
    /// Minor number.
    pub minor: u8,
}

impl Version {
    /// Version that Linux proposes.
    pub const V3_1: Self = Self { major: 3, minor: 1 };
    /// Version of requests that name none.
    pub const V4_0: Self = Self { major: 4, minor: 0 };
    /// Version that Oracle's kernels propose.
    pub const V4_1: Self = Self { major: 4, minor: 1 };

    /// Version to answer a request with, as Linux 6.1 chooses it. `None`: reject the request.
    pub fn answer(self, minors: u16) -> Option<Self> {
        match self.major {
            0 => Some(Self::V4_0),
            3 if self == Self::V3_1 => Some(self),
            4 => (minors & MINORS).checked_ilog2().map(|bit| Self {
                major: 4,
                minor: bit as u8,
            }),
            _ => None,
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Fields behind the addresses, 24 bytes (`struct rds_ib_conn_priv_cmn`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ConnCommon {
    major: u8,
    minor: u8,
    /// Minor versions that the sender has, as a mask.
    pub minors: U16,
    /// Type of service of the connection.
    pub tos: u8,
    reserved: [u8; 3],
    /// Last sequence number that the sender received over a former connection.
    pub ack_seq: U64,
    /// Receive buffers that the sender has posted; 0: the connection has no credits.
    pub credits: U32,
    padding: U32,
}

impl ConnCommon {
    /// Returns the fields of this version and type of service.
    pub fn new(version: Version, tos: u8, ack_seq: u64, credits: u32) -> Self {
        Self {
            major: version.major,
            minor: version.minor,
            minors: MINORS.into(),
            tos,
            ack_seq: ack_seq.into(),
            credits: credits.into(),
            ..Self::default()
        }
    }

    /// Version.
    pub fn version(&self) -> Version {
        Version {
            major: self.major,
            minor: self.minor,
        }
    }
}

/// Private data between IPv4 addresses, 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ConnV4 {
    src: [u8; 4],
    dst: [u8; 4],
    /// The remaining fields.
    pub common: ConnCommon,
}

/// Private data between IPv6 addresses, 56 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ConnV6 {
    src: [u8; 16],
    dst: [u8; 16],
    /// The remaining fields.
    pub common: ConnCommon,
}

macro_rules! conn {
    ($name:ident, $address:ident, $what:literal) => {
        impl $name {
            /// Bytes.
            pub const LEN: usize = size_of::<Self>();

            /// Returns the private data from one address to another.
            pub fn new(src: $address, dst: $address, common: ConnCommon) -> Self {
                Self {
                    src: src.octets(),
                    dst: dst.octets(),
                    common,
                }
            }

            /// Reads private data; bytes behind it (padding of the CM) are ignored.
            ///
            /// # Errors
            /// Too short.
            pub fn parse(bytes: &[u8]) -> Result<&Self, ProtoError> {
                let short = |_| ProtoError::Short {
                    what: $what,
                    len: bytes.len(),
                    need: Self::LEN,
                };
                Self::ref_from_prefix(bytes).map(|(data, _)| data).map_err(short)
            }

            /// Address of the sender.
            pub fn src(&self) -> $address {
                self.src.into()
            }

            /// Address of the receiver.
            pub fn dst(&self) -> $address {
                self.dst.into()
            }
        }
    };
}

conn!(ConnV4, Ipv4Addr, "private data between IPv4 addresses");
conn!(ConnV6, Ipv6Addr, "private data between IPv6 addresses");

/// Private data of a REQ or REP, of either form.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Private<'a> {
    /// Between IPv4 addresses.
    V4(&'a ConnV4),
    /// Between IPv6 addresses.
    V6(&'a ConnV6),
}

impl<'a> Private<'a> {
    /// Reads the private data of a connection to this port, which names the form: IPv6 at [`PORT_V6`].
    ///
    /// # Errors
    /// Too short.
    pub fn parse(port: u16, bytes: &'a [u8]) -> Result<Self, ProtoError> {
        match port {
            PORT_V6 => ConnV6::parse(bytes).map(Self::V6),
            _ => ConnV4::parse(bytes).map(Self::V4),
        }
    }

    /// Addresses of sender and receiver.
    pub fn addresses(&self) -> (IpAddr, IpAddr) {
        match self {
            Self::V4(data) => (data.src().into(), data.dst().into()),
            Self::V6(data) => (data.src().into(), data.dst().into()),
        }
    }

    /// Fields behind the addresses.
    pub fn common(&self) -> &'a ConnCommon {
        match self {
            Self::V4(data) => &data.common,
            Self::V6(data) => &data.common,
        }
    }

    /// Bytes to send.
    pub fn as_bytes(&self) -> &'a [u8] {
        match self {
            Self::V4(data) => data.as_bytes(),
            Self::V6(data) => data.as_bytes(),
        }
    }
}

/// Private data of a REJ with reason 28: 4 bytes, in the byte order of the sender's processor. ferroce sends little-endian, which x86
/// and Arm kernels read.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Reject(pub i32);

impl Reject {
    /// Bytes.
    pub const LEN: usize = 4;
    /// Value of the kernel's rejects: incompatible version, connections in both directions at once, and connections that the peer has
    /// forgotten.
    pub const INCOMPATIBLE: Self = Self(1);

    /// Reads the private data of a REJ.
    ///
    /// # Errors
    /// Too short.
    pub fn parse(bytes: &[u8]) -> Result<Self, ProtoError> {
        let head = bytes.first_chunk().ok_or(ProtoError::Short {
            what: "private data of a reject",
            len: bytes.len(),
            need: Self::LEN,
        })?;
        Ok(Self(i32::from_le_bytes(*head)))
    }

    /// Bytes to send.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        self.0.to_le_bytes()
    }

    /// Returns whether the kernel connects again after such a reject. After others it waits for ever.
    pub fn retries(self) -> bool {
        self.0 <= 1
    }
}

const _: () = assert!(size_of::<ConnCommon>() == 24 && ConnV4::LEN == 32 && ConnV6::LEN == 56);
