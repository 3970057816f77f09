//! Messages of RDS 3.1 to 4.1 over a reliable connection, all big-endian.
//!
//! Every SEND is a 48-byte [`Header`] and up to 4096 bytes of data. A longer message takes several SENDs, each with a header of its
//! own. Headers and private data are `zerocopy` structs of exactly the wire's bytes, reserved ones included, so that a parsed message
//! is emitted again byte for byte.

mod bitmap;
mod conn;
mod cookie;
mod error;
mod ext;
mod header;
mod limits;

pub use bitmap::{BitmapFragment, CongestionMap};
pub use conn::{ConnCommon, ConnV4, ConnV6, MINORS, PORT_V4, PORT_V6, Private, Reject, Version};
pub use cookie::RdmaCookie;
pub use error::ProtoError;
pub use ext::{EXT_LEN, Extension, Extensions, RdmaDirection, pack};
pub use header::{Flags, Fragment, Header, Kind, MAX_SEND};
pub use limits::{BITMAP_FRAGMENTS, BITMAP_LEN, MAX_FRAGMENT, MAX_MESSAGE};
