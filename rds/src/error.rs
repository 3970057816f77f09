//! Errors of socket calls.

use thiserror::Error;

/// Why a call failed, as the kernel's RDS tells it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Error {
    /// No socket of this number.
    #[error("no such socket")]
    BadSocket,
    /// The address can't be bound or sent to.
    #[error("invalid address or argument")]
    Invalid,
    /// The address is not the node's.
    #[error("not an address of this node")]
    NotOurs,
    /// The port is bound by another socket.
    #[error("the port is taken")]
    InUse,
    /// The destination has no address.
    #[error("no destination address")]
    NoAddress,
    /// The socket is not bound, or has no destination.
    #[error("not bound, or no destination")]
    NotConnected,
    /// An IPv4 destination of an IPv6 socket, or the reverse.
    #[error("the destination is of another address family")]
    Family,
    /// Longer than the send buffer, or than 1 MiB.
    #[error("the message is too long")]
    TooLong,
    /// The send buffer is full, or there is nothing to receive.
    #[error("would block")]
    WouldBlock,
    /// The destination port is congested.
    #[error("the destination is congested")]
    Congested,
    /// The node's limit of sockets or connections is reached.
    #[error("limit reached")]
    Limit,
    /// The range is outside the memory, or can't be registered.
    #[error("bad memory")]
    Fault,
    /// No device has the address of the socket.
    #[error("no device")]
    NoDevice,
    /// Neither the device nor this node can do it.
    #[error("not supported")]
    Unsupported,
    /// The call comes too early or too late for this socket.
    #[error("not possible in this state of the socket")]
    State,
}

impl Error {
    /// Linux's error number.
    pub const fn errno(self) -> i32 {
        match self {
            Self::BadSocket => 9,                   // EBADF
            Self::WouldBlock => 11,                 // EAGAIN
            Self::Fault => 14,                      // EFAULT
            Self::NoDevice => 19,                   // ENODEV
            Self::Invalid => 22,                    // EINVAL
            Self::Limit => 23,                      // ENFILE
            Self::State => 25,                      // ENOTTY
            Self::NoAddress => 89,                  // EDESTADDRREQ
            Self::TooLong => 90,                    // EMSGSIZE
            Self::Family | Self::Unsupported => 95, // EOPNOTSUPP
            Self::InUse => 98,                      // EADDRINUSE
            Self::NotOurs => 99,                    // EADDRNOTAVAIL
            Self::Congested => 105,                 // ENOBUFS
            Self::NotConnected => 107,              // ENOTCONN
        }
    }
}
