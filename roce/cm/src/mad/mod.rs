//! Management datagrams of communication management: 256 bytes, a 24-byte common header (IBA 13.4.3) and one of the
//! messages of IBA chapter 12. Places are those of the kernel's `ibta_vol1_c12.h`.

mod bits;
mod messages;

use core::net::{IpAddr, Ipv6Addr};

pub use bits::FieldSpec;
pub use messages::{Drep, Dreq, Mra, Rej, Rep, Req, Rtu, SidrRep, SidrReq};

/// Bytes of a MAD.
pub const MAD_LEN: usize = 256;
/// Bytes of the common MAD header.
pub const HEADER_LEN: usize = 24;
/// Management class of communication management (`IB_MGMT_CLASS_CM`).
pub const CLASS: u8 = 0x07;
/// Version of the class (`IB_CM_CLASS_VERSION`).
const CLASS_VERSION: u8 = 2;
/// Version of MADs.
const BASE_VERSION: u8 = 1;
/// Method Send: all CM messages.
const METHOD_SEND: u8 = 0x03;

/// Values of [`SidrRep::status`] (`enum ib_cm_sidr_status`).
pub mod sidr_status {
    /// Found.
    pub const SUCCESS: u8 = 0;
    /// Nobody has this service ID.
    pub const UNSUPPORTED: u8 = 1;
    /// The consumer refuses.
    pub const REJECT: u8 = 2;
    /// No queue pair.
    pub const NO_QP: u8 = 3;
    /// Ask elsewhere.
    pub const REDIRECT: u8 = 4;
    /// Class version not supported.
    pub const UNSUPPORTED_VERSION: u8 = 5;
}

/// Kind of a MAD: its attribute ID (IBA 12.6.1, table 105). LAP and APR are not used on RoCE (`cm_lap_handler`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
#[allow(missing_docs)]
pub enum Attribute {
    Req = 0x10,
    Mra = 0x11,
    Rej = 0x12,
    Rep = 0x13,
    Rtu = 0x14,
    Dreq = 0x15,
    Drep = 0x16,
    SidrReq = 0x17,
    SidrRep = 0x18,
}

impl Attribute {
    /// All, in the order of their IDs.
    pub const ALL: [Self; 9] = [
        Self::Req,
        Self::Mra,
        Self::Rej,
        Self::Rep,
        Self::Rtu,
        Self::Dreq,
        Self::Drep,
        Self::SidrReq,
        Self::SidrRep,
    ];

    /// Returns the attribute with this ID.
    pub(crate) fn from_id(id: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|a| *a as u16 == id)
    }

    /// Returns a stable name for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Req => "req",
            Self::Mra => "mra",
            Self::Rej => "rej",
            Self::Rep => "rep",
            Self::Rtu => "rtu",
            Self::Dreq => "dreq",
            Self::Drep => "drep",
            Self::SidrReq => "sidr_req",
            Self::SidrRep => "sidr_rep",
        }
    }

    pub(crate) const fn index(self) -> usize {
        self as usize - Self::Req as usize
    }
}

/// Transport service type of a REQ.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Transport {
    /// Reliable connection.
    Rc = 0,
    /// Unreliable connection.
    Uc = 1,
    /// Reliable datagram.
    Rd = 2,
    /// As the extended transport type says (XRC).
    Extended = 3,
}

impl Transport {
    pub(crate) const fn from_bits(v: u8) -> Self {
        match v & 3 {
            0 => Self::Rc,
            1 => Self::Uc,
            2 => Self::Rd,
            _ => Self::Extended,
        }
    }
}

/// Which message an MRA or REJ answers (`enum cm_msg_response`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Subject {
    /// A REQ.
    Req = 0,
    /// A REP.
    Rep = 1,
    /// MRA: a LAP. REJ: no particular one.
    Other = 2,
    /// Never parsed.
    Reserved = 3,
}

impl Subject {
    pub(crate) const fn from_bits(v: u8) -> Self {
        match v & 3 {
            0 => Self::Req,
            1 => Self::Rep,
            2 => Self::Other,
            _ => Self::Reserved,
        }
    }
}

/// A GID. On RoCEv2 it is an IP address: IPv6, or IPv4-mapped (IBTA A17.9.1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct Gid(pub [u8; 16]);

impl From<IpAddr> for Gid {
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(v4) => Self(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Self(v6.octets()),
        }
    }
}

impl From<Gid> for IpAddr {
    fn from(gid: Gid) -> Self {
        Self::V6(Ipv6Addr::from(gid.0)).to_canonical()
    }
}

/// Why bytes are not a CM MAD.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MadError {
    /// Not 256 bytes.
    #[error("a MAD of {0} bytes")]
    Length(usize),
    /// Base version.
    #[error("base version {0}")]
    BaseVersion(u8),
    /// Management class.
    #[error("management class {0:#x}")]
    Class(u8),
    /// Class version.
    #[error("class version {0}")]
    ClassVersion(u8),
    /// Method.
    #[error("method {0:#x}")]
    Method(u8),
    /// Attribute ID.
    #[error("attribute ID {0:#x}")]
    Attribute(u16),
    /// A field that can't have the value it has.
    #[error("field {0} of a {1:?}")]
    Field(&'static str, Attribute),
}

/// A message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Message {
    Req(Req),
    Mra(Mra),
    Rej(Rej),
    Rep(Rep),
    Rtu(Rtu),
    Dreq(Dreq),
    Drep(Drep),
    SidrReq(SidrReq),
    SidrRep(SidrRep),
}

macro_rules! conversions {
    ($($t:ident),*) => {
        $(impl From<$t> for Message {
            fn from(m: $t) -> Self {
                Self::$t(m)
            }
        })*

        impl Message {
            /// Returns the kind.
            pub const fn attribute(&self) -> Attribute {
                match self { $(Self::$t(_) => Attribute::$t,)* }
            }

            fn read(attribute: Attribute, bytes: &[u8; MAD_LEN]) -> Self {
                match attribute { $(Attribute::$t => Self::$t($t::read(bytes)),)* }
            }

            fn write(&self, bytes: &mut [u8; MAD_LEN]) {
                match self { $(Self::$t(m) => m.write(bytes),)* }
            }

            /// Every field's place in a message of this kind.
            pub const fn fields(attribute: Attribute) -> &'static [FieldSpec] {
                match attribute { $(Attribute::$t => $t::FIELDS,)* }
            }
        }
    };
}
conversions!(Req, Mra, Rej, Rep, Rtu, Dreq, Drep, SidrReq, SidrRep);

/// A CM MAD.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mad {
    /// Marks an exchange: answers repeat it.
    pub transaction_id: u64,
    /// Vendor options of REQ, REP and SIDR (enhanced connection establishment), else 0.
    pub attribute_modifier: u32,
    /// The message.
    pub message: Message,
}

impl Mad {
    /// A MAD with attribute modifier 0.
    pub fn new(transaction_id: u64, message: impl Into<Message>) -> Self {
        Self {
            transaction_id,
            attribute_modifier: 0,
            message: message.into(),
        }
    }

    /// Reads a MAD. Reserved bits and the header's status are ignored.
    ///
    /// # Errors
    /// Names the first check that failed.
    pub fn parse(bytes: &[u8]) -> Result<Self, MadError> {
        let bytes: &[u8; MAD_LEN] = bytes.try_into().map_err(|_| MadError::Length(bytes.len()))?;
        let [base, class, version, method, ..] = *bytes;
        match (base, class, version, method) {
            (BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND) => {}
            (BASE_VERSION, CLASS, CLASS_VERSION, _) => return Err(MadError::Method(method)),
            (BASE_VERSION, CLASS, _, _) => return Err(MadError::ClassVersion(version)),
            (BASE_VERSION, _, _, _) => return Err(MadError::Class(class)),
            _ => return Err(MadError::BaseVersion(base)),
        }
        let id = u16::from_be_bytes([bytes[16], bytes[17]]);
        let attribute = Attribute::from_id(id).ok_or(MadError::Attribute(id))?;
        let message = Message::read(attribute, bytes);
        check(&message)?;
        Ok(Self {
            transaction_id: u64::from_be_bytes(std::array::from_fn(|i| bytes[8 + i])),
            attribute_modifier: u32::from_be_bytes(std::array::from_fn(|i| bytes[20 + i])),
            message,
        })
    }

    /// The bytes; reserved bits are zero, values wider than their field are cut off.
    pub fn emit(&self) -> [u8; MAD_LEN] {
        let mut bytes = [0; MAD_LEN];
        bytes[..4].copy_from_slice(&[BASE_VERSION, CLASS, CLASS_VERSION, METHOD_SEND]);
        bytes[8..16].copy_from_slice(&self.transaction_id.to_be_bytes());
        bytes[16..18].copy_from_slice(&(self.message.attribute() as u16).to_be_bytes());
        bytes[20..24].copy_from_slice(&self.attribute_modifier.to_be_bytes());
        self.message.write(&mut bytes);
        bytes
    }
}

/// The checks that need no connection.
fn check(message: &Message) -> Result<(), MadError> {
    let (subject, info_length) = match message {
        Message::Rej(m) => (m.subject, m.info_length),
        Message::Mra(m) => (m.subject, 0),
        Message::SidrRep(m) => (Subject::Other, m.info_length),
        _ => return Ok(()),
    };
    if subject == Subject::Reserved {
        return Err(MadError::Field("subject", message.attribute()));
    }
    if usize::from(info_length) > 72 {
        return Err(MadError::Field("info_length", message.attribute()));
    }
    Ok(())
}

/// Zero-padded private data, or `None` when it is too long.
pub(crate) fn pad<const N: usize>(data: &[u8]) -> Option<[u8; N]> {
    let mut out = [0; N];
    out.get_mut(..data.len())?.copy_from_slice(data);
    Some(out)
}
