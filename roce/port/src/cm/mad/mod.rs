//! Management datagrams of communication management: 256 bytes, a 24-byte common header (IBA 13.4.3) and one of the
//! messages of IBA chapter 12. Places are those of the kernel's `ibta_vol1_c12.h`.

mod bits;
mod messages;

pub(crate) use bits::gid;
pub use bits::{FieldSpec, HEADER_LEN, MAD_LEN, Subject, Transport};
pub use messages::{Drep, Dreq, Mra, Rej, Rep, Req, Rtu, SidrRep, SidrReq};

use crate::cm::drops::DropReason;

/// Management class of communication management (`IB_MGMT_CLASS_CM`).
pub const CLASS: u8 = 0x07;
/// Base version 1, management class, its version (`IB_CM_CLASS_VERSION`), and method Send, which all CM messages have.
const START: [u8; 4] = [1, CLASS, 2, 3];

/// Values of [`SidrRep::status`] (`enum ib_cm_sidr_status`).
pub mod sidr_status {
    /// Found.
    pub const SUCCESS: u8 = 0;
    /// Unknown service ID.
    pub const UNSUPPORTED: u8 = 1;
    /// Refused by the consumer.
    pub const REJECT: u8 = 2;
}

macro_rules! messages {
    ($($t:ident = $id:literal $name:literal,)*) => {
        /// Kind of a MAD: its attribute ID (IBA 12.6.1, table 105). LAP and APR are not used on RoCE (`cm_lap_handler`).
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(u16)]
        #[allow(missing_docs)]
        pub enum Attribute {
            $($t = $id,)*
        }

        impl Attribute {
            /// All, in the order of their IDs.
            pub const ALL: [Self; [$($id),*].len()] = [$(Self::$t),*];

            /// Returns a stable name for reports.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$t => $name,)* }
            }
        }

        /// Message.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[allow(missing_docs)]
        pub enum Message {
            $($t($t),)*
        }

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

            /// Returns every field's place in a message of this kind.
            pub const fn fields(attribute: Attribute) -> &'static [FieldSpec] {
                match attribute { $(Attribute::$t => $t::FIELDS,)* }
            }
        }
    };
}

messages! {
    Req = 0x10 "req",
    Mra = 0x11 "mra",
    Rej = 0x12 "rej",
    Rep = 0x13 "rep",
    Rtu = 0x14 "rtu",
    Dreq = 0x15 "dreq",
    Drep = 0x16 "drep",
    SidrReq = 0x17 "sidr_req",
    SidrRep = 0x18 "sidr_rep",
}

macro_rules! of_connections {
    ($($name:ident)*) => {
        $(impl $name {
            /// Creates a message with these communication IDs: ours and the peer's.
            pub(crate) fn between((local_comm_id, remote_comm_id): (u32, u32)) -> Self {
                Self { local_comm_id, remote_comm_id, ..Self::default() }
            }
        })*

        impl Message {
            /// Returns the communication IDs of sender and receiver, if a message of this kind names both.
            pub(crate) const fn comm_ids(&self) -> Option<(u32, u32)> {
                match self {
                    $(Self::$name(m) => Some((m.local_comm_id, m.remote_comm_id)),)*
                    _ => None,
                }
            }
        }
    };
}

of_connections! { Mra Rej Rep Rtu Dreq Drep }

impl Attribute {
    pub(crate) fn from_id(id: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|a| *a as u16 == id)
    }

    pub(crate) const fn index(self) -> usize {
        self as usize - Self::Req as usize
    }
}

impl Message {
    /// Returns the receiver's communication ID or request ID. `None` if a message of this kind names none.
    pub const fn receiver_id(&self) -> Option<u32> {
        match (self, self.comm_ids()) {
            (Self::SidrRep(m), _) => Some(m.request_id),
            (_, Some((_, receiver))) => Some(receiver),
            _ => None,
        }
    }
}

/// CM MAD.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mad {
    /// Number of an exchange, which answers repeat.
    pub transaction_id: u64,
    /// Vendor options of REQ, REP and SIDR (enhanced connection establishment), else 0.
    pub attribute_modifier: u32,
    /// The message.
    pub message: Message,
}

impl Mad {
    /// Creates a MAD with attribute modifier 0.
    pub fn new(transaction_id: u64, message: impl Into<Message>) -> Self {
        Self {
            transaction_id,
            attribute_modifier: 0,
            message: message.into(),
        }
    }

    /// Parses a MAD. Reserved bits and the header's status are ignored.
    ///
    /// # Errors
    /// Reason for which the MAD is dropped: length, header, attribute or field.
    pub fn parse(bytes: &[u8]) -> Result<Self, DropReason> {
        let bytes: &[u8; MAD_LEN] = bytes.try_into().map_err(|_| DropReason::Length)?;
        if !bytes.starts_with(&START) {
            return Err(DropReason::Header);
        }
        let id = u16::from_be_bytes([bytes[16], bytes[17]]);
        let attribute = Attribute::from_id(id).ok_or(DropReason::Attribute)?;
        let message = Message::read(attribute, bytes);
        check(&message)?;
        Ok(Self {
            transaction_id: u64::from_be_bytes(std::array::from_fn(|i| bytes[8 + i])),
            attribute_modifier: u32::from_be_bytes(std::array::from_fn(|i| bytes[20 + i])),
            message,
        })
    }

    /// Returns the bytes; reserved bits are zero, values wider than their field are cut off.
    pub fn emit(&self) -> [u8; MAD_LEN] {
        let mut bytes = [0; MAD_LEN];
        bytes[..4].copy_from_slice(&START);
        bytes[8..16].copy_from_slice(&self.transaction_id.to_be_bytes());
        bytes[16..18].copy_from_slice(&(self.message.attribute() as u16).to_be_bytes());
        bytes[20..24].copy_from_slice(&self.attribute_modifier.to_be_bytes());
        self.message.write(&mut bytes);
        bytes
    }
}

/// Checks the fields of which some values are invalid in any state.
fn check(message: &Message) -> Result<(), DropReason> {
    let (subject, info_length) = match message {
        Message::Rej(m) => (m.subject, m.info_length),
        Message::Mra(m) => (m.subject, 0),
        Message::SidrRep(m) => (Subject::Other, m.info_length),
        _ => return Ok(()),
    };
    match subject == Subject::Reserved || info_length > 72 {
        true => Err(DropReason::Field),
        false => Ok(()),
    }
}
