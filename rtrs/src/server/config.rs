//! Configuration of a server.

use core::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use roce_verbs::DeviceLimits;

use crate::{
    Error,
    admission::{AccessList, Limits},
    heartbeat::HeartbeatConfig,
    proto::{
        ChunkLayout, DEFAULT_PORT, MAX_CONNECTIONS, MAX_HDR_SIZE, MAX_QUEUE_DEPTH, MIN_CHUNK_SIZE, SERVICE_QUEUE_DEPTH,
    },
};

/// Configuration of a server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Address to listen on; unspecified means all.
    pub addr: IpAddr,
    /// Port.
    pub port: u16,
    /// Further addresses to listen on, which may be other devices'.
    pub further: Vec<SocketAddr>,
    /// Clients that may connect, and with which names; empty: all.
    pub allow: AccessList,
    /// Sessions at a time; each has `queue_depth * max_chunk_size` bytes.
    pub max_sessions: usize,
    /// Sessions of one client at a time: of one IPv4 address, one link-local IPv6 address or one other IPv6 /64.
    pub max_sessions_per_client: usize,
    /// Paths of all sessions at a time.
    pub max_paths: usize,
    /// Connections of a path at most, the service connection included (kernel clients: number of CPUs + 1).
    pub max_connections: u16,
    /// Requests in flight of a session (chunks), 1 to 65535.
    pub queue_depth: u32,
    /// Bytes of a chunk, a power of two; 4096 of them are for headers.
    pub max_chunk_size: u32,
    /// Take back the key of a chunk while its request is worked on, and give the client a new one with the answer.
    /// Off, a client can change a chunk while the user reads it; requests cost two work requests less.
    pub always_invalidate: bool,
    /// Heartbeats.
    pub heartbeat: HeartbeatConfig,
    /// Longest time from a path's first connection request to the end of its handshake.
    pub handshake_timeout: Duration,
}

impl Default for ServerConfig {
    /// The kernel's values: all addresses, port 1234, 512 chunks of 128 KiB, always_invalidate.
    fn default() -> Self {
        let limits = Limits::default();
        Self {
            addr: IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            port: DEFAULT_PORT,
            further: Vec::new(),
            allow: AccessList::default(),
            max_sessions: limits.sessions,
            max_sessions_per_client: limits.sessions_per_client,
            max_paths: limits.paths,
            max_connections: limits.connections_per_path,
            queue_depth: 512,
            max_chunk_size: 128 << 10,
            always_invalidate: true,
            heartbeat: HeartbeatConfig::default(),
            handshake_timeout: limits.handshake,
        }
    }
}

impl ServerConfig {
    /// First address at which it listens.
    pub fn listen_addr(&self) -> SocketAddr {
        SocketAddr::new(self.addr, self.port)
    }

    /// All addresses that it listens on.
    pub fn listen_addrs(&self) -> impl Iterator<Item = SocketAddr> {
        core::iter::once(self.listen_addr()).chain(self.further.iter().copied())
    }

    /// Whether requests may come to a device with these addresses. One without any has all, or may get some.
    pub(crate) fn listens_at(&self, addrs: &[IpAddr]) -> bool {
        let one_of = |ip: IpAddr| ip.is_unspecified() || addrs.contains(&ip.to_canonical());
        addrs.is_empty() || self.listen_addrs().any(|listen| one_of(listen.ip()))
    }

    /// Largest data of a request, bytes.
    pub fn max_io_size(&self) -> u32 {
        self.max_chunk_size.saturating_sub(MAX_HDR_SIZE)
    }

    /// Bytes of a session's chunks.
    pub fn session_bytes(&self) -> u64 {
        u64::from(self.queue_depth) * u64::from(self.max_chunk_size)
    }

    /// Limits of the admission.
    pub fn limits(&self) -> Limits {
        Limits {
            sessions: self.max_sessions,
            sessions_per_client: self.max_sessions_per_client,
            paths: self.max_paths,
            connections_per_path: self.max_connections,
            handshake: self.handshake_timeout,
            ..Limits::default()
        }
    }

    /// Checks the values by themselves and against the device.
    pub(crate) fn check(&self, limits: &DeviceLimits) -> Result<ChunkLayout, Error> {
        let config = |m: String| Err(Error::Config(m));
        if self.queue_depth == 0 || self.queue_depth > MAX_QUEUE_DEPTH {
            return config(format!(
                "queue depth {}: must be 1 to {MAX_QUEUE_DEPTH}",
                self.queue_depth
            ));
        }
        if self.max_chunk_size < MIN_CHUNK_SIZE || !self.max_chunk_size.is_power_of_two() {
            return config(format!(
                "chunk size {}: must be a power of two, at least {MIN_CHUNK_SIZE}",
                self.max_chunk_size
            ));
        }
        let Ok(layout) = ChunkLayout::new(self.queue_depth, self.max_chunk_size) else {
            return config(format!(
                "{} chunks of {} bytes: chunk number and offset don't fit in 28 bits",
                self.queue_depth, self.max_chunk_size
            ));
        };
        if self.session_bytes() > u32::MAX.into() {
            return config("the chunks of a session must stay below 4 GiB".into());
        }
        if self.service_send_wr() > limits.max_qp_wr || self.queue_depth + 1 > limits.max_qp_wr {
            return config(format!(
                "queue depth {}: more than the device's queues can hold",
                self.queue_depth
            ));
        }
        if [self.max_sessions, self.max_sessions_per_client, self.max_paths].contains(&0) {
            return config("at least one session and one path are needed".into());
        }
        if !(2..=MAX_CONNECTIONS).contains(&self.max_connections) {
            return config("a path has 2 to 4096 connections".into());
        }
        if self.heartbeat.interval.is_zero() || self.handshake_timeout.is_zero() {
            return config("the heartbeat interval and the handshake timeout must not be zero".into());
        }
        Ok(layout)
    }

    /// Send queue of a service connection: the kernel's, and room to open all chunks at once.
    pub(crate) fn service_send_wr(&self) -> u32 {
        2 * SERVICE_QUEUE_DEPTH + 2 + self.queue_depth
    }
}
