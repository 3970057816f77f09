//! Numbers of the protocol.

/// Name of the node's socket in the broker's directory.
pub const SOCKET: &str = "rds.sock";
/// Longest message, data only (`RDS_MAX_MSG_SIZE`).
pub const MAX_MESSAGE: usize = 1 << 20;
/// First word of every packet: `RDS` and the version of these messages. Another version is an error ([`ProtocolError::Version`]).
///
/// [`ProtocolError::Version`]: crate::ProtocolError::Version
pub const MAGIC: u32 = u32::from_be_bytes(*b"RDS\x02");
