//! Requests of a program to its node, and answers.

use std::net::SocketAddr;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{addr::RawAddr, error::ProtocolError, key::SocketKey, limits::MAGIC};

/// Option of a socket that is the node's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SocketOption {
    /// Effective bytes of the send buffer: half of what `SO_SNDBUF` tells.
    SendBuffer,
    /// Effective bytes of the receive buffer.
    RecvBuffer,
    /// `RDS_RECVERR`, 0 or 1.
    RecvErr,
    /// `RDS_CONG_MONITOR`, 0 or 1.
    CongMonitor,
    /// `SO_RDS_TRANSPORT`: a number, once and before binding.
    Transport,
}

const OPTIONS: [SocketOption; 5] = [
    SocketOption::SendBuffer,
    SocketOption::RecvBuffer,
    SocketOption::RecvErr,
    SocketOption::CongMonitor,
    SocketOption::Transport,
];

/// Request of a program. Each is one packet and gets one [`Answer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// A new socket. The answer has its key as value, and two descriptors: the program's end, and its page.
    Socket,
    /// The page of a socket whose descriptor this process has got: one descriptor. `ENOTSOCK` if it is none of this node.
    Attach(SocketKey),
    /// `bind`. The answer has the address.
    Bind(SocketKey, SocketAddr),
    /// `connect`.
    Connect(SocketKey, SocketAddr),
    /// `SIOCRDSSETTOS`.
    SetTos(SocketKey, u8),
    /// An option.
    SetOption(SocketKey, SocketOption, u64),
    /// `RDS_CANCEL_SENT_TO`.
    Cancel(SocketKey, SocketAddr),
    /// Whether a message may go to an address (`None`: where the socket is connected): `ENOBUFS` while its port is congested. With `wait`
    /// the answer comes when it is not: use a control connection of its own, and close it to give up.
    Congestion {
        /// Socket.
        socket: SocketKey,
        /// Destination.
        to: Option<SocketAddr>,
        /// Answer when it is free.
        wait: bool,
    },
    /// `RDS_INFO_*` by its number. The answer has the size of an element as value, the number of bytes as length, and a descriptor of a
    /// sealed memory file with them. `ENOPROTOOPT`: no such information.
    Info(u32),
    /// The memory of the program, which comes as a descriptor of its `/proc/self/mem`. [`Map`](Self::Map) of this connection registers it.
    /// The answer has a number as value, for [`RdmaOp::memory`](crate::RdmaOp::memory) of this process, as long as the connection lives.
    Memory,
    /// `EINVAL` unless a cookie is of a region of the socket, at any offset (`RDS_CMSG_RDMA_DEST`).
    Region(SocketKey, u64),
    /// Registers memory of the program (`RDS_GET_MR`, `RDS_CMSG_RDMA_MAP`). The answer has the cookie as value.
    Map {
        /// Socket.
        socket: SocketKey,
        /// Address in the program.
        addr: u64,
        /// Bytes.
        len: u64,
        /// `RDS_RDMA_*` flags.
        flags: u32,
    },
    /// `RDS_FREE_MR`; cookie 0: all unused ones.
    Unmap {
        /// Socket.
        socket: SocketKey,
        /// Cookie.
        cookie: u64,
        /// `RDS_RDMA_*` flags.
        flags: u32,
    },
}

#[derive(Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawRequest {
    magic: u32,
    kind: u32,
    socket: u64,
    addr: RawAddr,
    values: [u64; 3],
}

impl Request {
    /// Bytes of a request.
    pub const LEN: usize = size_of::<RawRequest>();

    /// Emits it.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let none = SocketKey(0);
        let (kind, socket, addr, values) = match *self {
            Self::Socket => (0, none, None, [0; 3]),
            Self::Attach(socket) => (1, socket, None, [0; 3]),
            Self::Bind(socket, addr) => (2, socket, Some(addr), [0; 3]),
            Self::Connect(socket, addr) => (3, socket, Some(addr), [0; 3]),
            Self::SetTos(socket, tos) => (4, socket, None, [tos.into(), 0, 0]),
            Self::SetOption(socket, option, value) => (5, socket, None, [option as u64, value, 0]),
            Self::Cancel(socket, addr) => (6, socket, Some(addr), [0; 3]),
            Self::Congestion { socket, to, wait } => (7, socket, to, [wait.into(), 0, 0]),
            Self::Info(number) => (8, none, None, [number.into(), 0, 0]),
            Self::Map {
                socket,
                addr,
                len,
                flags,
            } => (9, socket, None, [addr, len, flags.into()]),
            Self::Unmap { socket, cookie, flags } => (10, socket, None, [cookie, flags.into(), 0]),
            Self::Memory => (11, none, None, [0; 3]),
            Self::Region(socket, cookie) => (12, socket, None, [cookie, 0, 0]),
        };
        zerocopy::transmute!(RawRequest {
            magic: MAGIC,
            kind,
            socket: socket.0,
            addr: addr.into(),
            values,
        })
    }

    /// Parses a packet.
    ///
    /// # Errors
    /// Whatever is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let raw = RawRequest::read_from_bytes(bytes).map_err(|_| ProtocolError::Length(bytes.len()))?;
        if raw.magic != MAGIC {
            return Err(ProtocolError::Version(raw.magic));
        }
        let (socket, [a, b, c]) = (SocketKey(raw.socket), raw.values);
        let small = |value: u64| u32::try_from(value).map_err(|_| ProtocolError::Value);
        Ok(match raw.kind {
            0 => Self::Socket,
            1 => Self::Attach(socket),
            2 => Self::Bind(socket, raw.addr.required()?),
            3 => Self::Connect(socket, raw.addr.required()?),
            4 => Self::SetTos(socket, u8::try_from(a).map_err(|_| ProtocolError::Value)?),
            5 => {
                let option = usize::try_from(a).ok().and_then(|a| OPTIONS.get(a));
                Self::SetOption(socket, *option.ok_or(ProtocolError::Value)?, b)
            }
            6 => Self::Cancel(socket, raw.addr.required()?),
            7 => Self::Congestion {
                socket,
                to: raw.addr.get()?,
                wait: a != 0,
            },
            8 => Self::Info(small(a)?),
            9 => Self::Map {
                socket,
                addr: a,
                len: b,
                flags: small(c)?,
            },
            10 => Self::Unmap {
                socket,
                cookie: a,
                flags: small(b)?,
            },
            11 => Self::Memory,
            12 => Self::Region(socket, a),
            other => return Err(ProtocolError::Kind(other)),
        })
    }
}

/// Answer to a [`Request`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Answer {
    /// 0, or Linux's error number.
    pub errno: i32,
    /// As the request says.
    pub value: u64,
    /// As the request says.
    pub len: u64,
    /// As the request says.
    pub addr: Option<SocketAddr>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawAnswer {
    magic: u32,
    errno: i32,
    value: u64,
    len: u64,
    addr: RawAddr,
}

impl Answer {
    /// Bytes of an answer.
    pub const LEN: usize = size_of::<RawAnswer>();

    /// Returns a refusal.
    pub fn error(errno: i32) -> Self {
        Self {
            errno,
            ..Self::default()
        }
    }

    /// Emits it.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        zerocopy::transmute!(RawAnswer {
            magic: MAGIC,
            errno: self.errno,
            value: self.value,
            len: self.len,
            addr: self.addr.into(),
        })
    }

    /// Parses a packet.
    ///
    /// # Errors
    /// Whatever is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let raw = RawAnswer::read_from_bytes(bytes).map_err(|_| ProtocolError::Length(bytes.len()))?;
        if raw.magic != MAGIC {
            return Err(ProtocolError::Version(raw.magic));
        }
        Ok(Self {
            errno: raw.errno,
            value: raw.value,
            len: raw.len,
            addr: raw.addr.get()?,
        })
    }
}
