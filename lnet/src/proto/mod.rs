//! Messages of LNet over o2iblnd.
//!
//! A SEND carries one [`Message`] (`kib_msg`), at most 4096 bytes. It and its bodies are in the *sender's* byte order, which the magic
//! shows. The [`LnetHdr`] inside is always little-endian. Data that does not fit goes by RDMA WRITE into memory that an [`RdmaDesc`]
//! describes.
//!
//! Parsing borrows from the bytes. Version 1 (Lustre 1.6 and 1.8) is recognized by [`peek`] and refused.

mod checksum;
mod conn;
mod consts;
mod desc;
mod error;
mod hdr;
mod msg;
mod nid;
pub(crate) mod order;
mod ping;

pub use checksum::{Checksum, checksum};
pub use conn::{ConnParams, Reject, Why};
pub use consts::{HEAD_LEN, MAGIC, MAX_MSG, PORT, VERSION_1, VERSION_2};
pub use desc::{Fragment, Fragments, MAX_FRAGS, RdmaDesc};
pub use error::ProtoError;
pub use hdr::{Handle, LnetHdr, MAX_PAYLOAD, Operation, PID_LUSTRE};
pub use msg::{Body, Completion, MAX_IMMEDIATE, Message, MsgType, Peek, peek};
pub use nid::{NET_LO, NET_O2IB, NET_TCP, Nid};
pub use order::ByteOrder;
pub use ping::{Features, NiStatus, PING_MATCH_BITS, PING_PORTAL, PingInfo, STATUS_DOWN, STATUS_UP};
