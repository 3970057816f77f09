//! Settings of a node.

use core::time::Duration;

use crate::proto::{MAX_FRAGMENT, MAX_MESSAGE};

/// Numbers of buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rings {
    /// Fragments that may be on their way.
    pub send: u32,
    /// Receives that are posted.
    pub recv: u32,
}

/// Settings of a node. The defaults are the kernel's where it has the same (`/proc/sys/net/rds`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Most that a socket may have on its way (`SO_SNDBUF`, effective bytes), if it does not say.
    pub send_buffer: usize,
    /// Unread bytes from which on a socket's port is congested (`SO_RCVBUF`, effective bytes), if it does not say.
    pub recv_buffer: usize,
    /// Shortest time of which a part passes between two attempts to connect (`reconnect_min_delay_ms`).
    pub reconnect_min: Duration,
    /// Longest such time (`reconnect_max_delay_ms`).
    pub reconnect_max: Duration,
    /// Messages after which an acknowledgement is asked for (`max_unacked_packets`).
    pub unacked_messages: u32,
    /// Bytes after which an acknowledgement is asked for (`max_unacked_bytes`).
    pub unacked_bytes: u64,
    /// Time after which a peer is told what has come if it does not ask. The kernel never does.
    pub ack_delay: Duration,
    /// Time after which a peer is asked what has come, once: as long as it does not say, a header alone is sent as often. The kernel never asks
    /// again.
    pub probe_delay: Duration,
    /// Whether pings are answered (`ping_enable`).
    pub answers_pings: bool,
    /// Buffers of each connection.
    pub rings: Rings,
    /// Connections at most, of all peers.
    pub max_connections: usize,
    /// Sockets at most.
    pub max_sockets: usize,
    /// Operations of a socket that have not ended, with reports that it has not read, at most. Beyond it sends wait.
    pub max_operations: usize,
    /// Regions of a socket at most.
    pub max_regions: usize,
    /// Bytes that all sockets together have not read, at most, and a message for each connection. Peers that send more wait (RNR).
    pub max_unread: usize,
    /// Sequence number of the first message to a peer. It has to be greater than those of former nodes at this address, since peers drop
    /// what seems to be sent again: milliseconds since 1970 times 2^20, for example.
    pub first_sequence: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            send_buffer: 106_496,
            recv_buffer: 106_496,
            reconnect_min: Duration::from_millis(4),
            reconnect_max: Duration::from_secs(1),
            unacked_messages: 8,
            unacked_bytes: 16 << 20,
            ack_delay: Duration::from_millis(100),
            probe_delay: Duration::from_secs(1),
            answers_pings: true,
            rings: Rings { send: 256, recv: 1024 },
            max_connections: 4096,
            max_sockets: 65_536,
            max_operations: 1024,
            max_regions: 4096,
            max_unread: 256 << 20,
            first_sequence: 1,
        }
    }
}

impl Config {
    /// Checks the settings.
    ///
    /// # Errors
    /// Names the one that is not possible.
    pub fn check(&self) -> Result<(), &'static str> {
        let longest = (MAX_MESSAGE as usize).div_ceil(MAX_FRAGMENT);
        match self {
            Self { rings, .. } if rings.send < 4 || rings.recv < 4 => Err("a connection needs 4 buffers each way"),
            Self { max_unread, .. } if *max_unread < longest * MAX_FRAGMENT => {
                Err("unread bytes must be allowed for a message of 1 MiB")
            }
            Self { reconnect_min, .. } if reconnect_min.is_zero() => Err("the least time between connects is 0"),
            Self {
                reconnect_min,
                reconnect_max,
                ..
            } if reconnect_min > reconnect_max => Err("the least time between connects is above the longest"),
            _ => Ok(()),
        }
    }
}
