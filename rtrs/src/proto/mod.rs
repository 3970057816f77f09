//! The messages of RTRS 2.0 (`rtrs-pri.h`), all little-endian.
//!
//! Every message is a `zerocopy` struct of exactly the wire's bytes, with a checked parse that names the field which
//! is wrong. Reserved bytes are kept, so that a parsed message is emitted again byte for byte.

mod common;
pub mod conn;
pub mod errno;
pub mod imm;
pub mod info;
pub mod rdma;

pub use common::{
    DEFAULT_PORT, Direction, MAGIC, MAX_CONNECTIONS, MAX_HDR_SIZE, MAX_PATHS, MAX_QUEUE_DEPTH, MIN_CHUNK_SIZE,
    MsgFlags, MsgType, NAME_MAX, ProtoError, SERVICE_QUEUE_DEPTH, SgDesc, Uuid, VERSION, VERSION_MAJOR, VERSION_MINOR,
};
pub use conn::{ConnReq, ConnRsp};
pub use imm::{ChunkLayout, Imm, IoReply};
pub use info::{InfoReq, InfoRsp};
pub use rdma::{RdmaRead, RdmaWrite, Request, RkeyRsp};
