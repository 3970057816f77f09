//! Packets of a socket's pair.

use std::net::SocketAddr;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    addr::RawAddr,
    error::ProtocolError,
    limits::{MAGIC, MAX_MESSAGE},
    op::Op,
};

/// First bytes of a packet from a program: a message to send. The operation's bytes and the data follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SendHeader {
    magic: u32,
    op: u32,
    op_len: u32,
    data_len: u32,
    to: RawAddr,
}

impl SendHeader {
    /// Bytes of a header.
    pub const LEN: usize = size_of::<Self>();

    /// Returns the header of a message with so many bytes of data. `to`: `None` sends to where the socket is connected. `op_len` is the
    /// length of [`Op::to_bytes`].
    pub fn new(to: Option<SocketAddr>, op: &Op, op_len: usize, data_len: usize) -> Self {
        Self {
            magic: MAGIC,
            op: op.kind(),
            op_len: op_len as u32,
            data_len: data_len as u32,
            to: to.into(),
        }
    }

    /// Parses a packet: destination, operation and data.
    ///
    /// # Errors
    /// Whatever is wrong with it.
    pub fn parse(packet: &[u8]) -> Result<(Option<SocketAddr>, Op, &[u8]), ProtocolError> {
        let length = ProtocolError::Length(packet.len());
        let (header, rest) = Self::read_from_prefix(packet).map_err(|_| length)?;
        if header.magic != MAGIC {
            return Err(ProtocolError::Version(header.magic));
        }
        let (op, data) = rest.split_at_checked(header.op_len as usize).ok_or(length)?;
        if data.len() != header.data_len as usize || data.len() > MAX_MESSAGE {
            return Err(length);
        }
        Ok((header.to.get()?, Op::parse(header.op, op)?, data))
    }
}

/// Content of a packet to a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecvKind {
    /// A message; the data follows. With the cookie of memory of the sender, if it has sent one.
    Message(Option<u64>),
    /// An operation has ended. `recvmsg` returns 0 with `RDS_CMSG_RDMA_STATUS`.
    Notification {
        /// The program's value.
        token: u64,
        /// `RDS_RDMA_SUCCESS`, …
        status: i32,
    },
    /// Ports modulo 64 that are free again. `recvmsg` returns 0 with `RDS_CMSG_CONG_UPDATE`.
    Congestion(u64),
    /// Nothing to receive: it only makes the descriptor readable, as a congestion map does in the kernel. To be skipped.
    Wake,
}

/// First bytes of a packet to a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RecvHeader {
    magic: u32,
    kind: u32,
    data_len: u32,
    flags: u32,
    from: RawAddr,
    /// The cookie, the ports, or the token.
    value: u64,
    /// Or the status.
    time: i64,
}

const HAS_COOKIE: u32 = 1;
const IN_FILE: u32 = 2;

const MESSAGE: u32 = 0;
const NOTIFICATION: u32 = 1;
const CONGESTION: u32 = 2;
const WAKE: u32 = 3;

impl RecvHeader {
    /// Bytes of a header.
    pub const LEN: usize = size_of::<Self>();

    /// Returns the header of a packet. `time`: when it came, nanoseconds since 1970.
    pub fn new(kind: RecvKind, from: Option<SocketAddr>, time: i64, data_len: usize) -> Self {
        let (number, cookie, value) = match kind {
            RecvKind::Message(cookie) => (MESSAGE, cookie.is_some(), cookie.unwrap_or_default()),
            RecvKind::Notification { token, .. } => (NOTIFICATION, false, token),
            RecvKind::Congestion(ports) => (CONGESTION, false, ports),
            RecvKind::Wake => (WAKE, false, 0),
        };
        let time = match kind {
            RecvKind::Notification { status, .. } => status.into(),
            _ => time,
        };
        Self {
            magic: MAGIC,
            kind: number,
            data_len: data_len as u32,
            flags: if cookie { HAS_COOKIE } else { 0 },
            from: from.into(),
            value,
            time,
        }
    }

    /// Parses a header. The data may have been cut by the program's buffer: [`data_len`](Self::data_len) is its full length.
    ///
    /// # Errors
    /// Whatever is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<(Self, RecvKind), ProtocolError> {
        let header = Self::read_from_bytes(bytes.get(..Self::LEN).unwrap_or(bytes))
            .map_err(|_| ProtocolError::Length(bytes.len()))?;
        if header.magic != MAGIC {
            return Err(ProtocolError::Version(header.magic));
        }
        let kind = match header.kind {
            MESSAGE => RecvKind::Message((header.flags & HAS_COOKIE != 0).then_some(header.value)),
            NOTIFICATION => RecvKind::Notification {
                token: header.value,
                status: i32::try_from(header.time).map_err(|_| ProtocolError::Value)?,
            },
            CONGESTION => RecvKind::Congestion(header.value),
            WAKE => RecvKind::Wake,
            other => return Err(ProtocolError::Kind(other)),
        };
        header.from.get()?;
        Ok((header, kind))
    }

    /// Returns the header of data that is in a file: the descriptor of a sealed memory file comes with the packet, which has no data. So
    /// come messages that are longer than the system lets a packet be (`net.core.wmem_max`), of peers that let theirs be longer.
    #[must_use]
    pub fn in_file(mut self) -> Self {
        self.flags |= IN_FILE;
        self
    }

    /// Returns whether the data is [in a file](Self::in_file).
    pub fn is_in_file(&self) -> bool {
        self.flags & IN_FILE != 0
    }

    /// Full length of the data that follows.
    pub fn data_len(&self) -> usize {
        self.data_len as usize
    }

    /// Sender of a message.
    pub fn from(&self) -> Option<SocketAddr> {
        self.from.get().ok().flatten()
    }

    /// Time when it came, nanoseconds since 1970.
    pub fn time(&self) -> i64 {
        self.time
    }
}
