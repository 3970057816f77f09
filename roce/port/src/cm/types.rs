//! Settings, arguments, events, errors and counters of a [`Manager`](crate::cm::Manager).

use core::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use roce_verbs::{
    AddressVector, Mtu, PathMtus, Psn, QKey, Qpn,
    provider::{ConnParams, NoAnswer, RejectReason},
};

use crate::cm::{cma::PortSpace, mad::MAD_LEN};

/// Identifies a connection. A manager never reuses one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnId(pub u64);

/// Identifies a listener. A manager never reuses one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ListenId(pub u64);

/// Current resource usage of a manager ([`Manager::usage`](crate::cm::Manager::usage)). [`CmConfig`] limits each.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Connections and resolutions, including half-open and lingering ones.
    pub connections: usize,
    /// Half-open connections.
    pub half_open: usize,
    /// Largest number of half-open connections of one peer address (IPv6: one /64).
    pub half_open_of_peer: usize,
    /// Destroyed connections that linger to answer late MADs.
    pub lingering: usize,
    /// Destroyed resolutions that linger to answer repeated SIDR requests.
    pub lingering_resolutions: usize,
    /// Resolutions that peers asked for and the consumer has not destroyed.
    pub held_resolutions: usize,
    /// Peers whose MADs are rate-limited.
    pub rated_peers: usize,
    /// Outgoing MADs not yet polled.
    pub queued_mads: usize,
}

/// Rate limit of MADs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RateLimit {
    /// MADs per second, at least 1.
    pub per_second: u32,
    /// MADs accepted at once after an idle time.
    pub burst: u32,
}

/// Settings of a manager.
#[derive(Clone, Debug)]
pub struct CmConfig {
    /// GUID of our channel adapter, in every REQ and REP. No two live devices may share one.
    /// Peers recognise duplicates and stale connections by it, communication IDs and queue pair numbers.
    pub ca_guid: u64,
    /// Largest supported path MTUs. A REQ with a larger one is rejected with reason 26 and our MTU.
    pub mtus: PathMtus,
    /// Pause before the first retransmission; doubles each time.
    ///
    /// A REP is never repeated sooner, whatever response timeout the peer names. The kernel always waits the whole
    /// response timeout, but answers earlier duplicates.
    pub first_retry: Duration,
    /// Time after which an unanswered REQ, REP or DREQ fails, even if retries are left.
    ///
    /// [`ConnParams::timeout`] overrides it for a REQ. An MRA restarts it at the end of the service timeout. A peer's
    /// request waits as long for the consumer, or longer if the peer repeats it; a REP whose REQ is repeated waits as long as
    /// that REQ says.
    pub give_up: Duration,
    /// Largest number of connections and resolutions, including half-open and lingering ones.
    pub max_connections: usize,
    /// Largest number of half-open connections, and separately of unanswered SIDR requests.
    /// Beyond it, the oldest whose peer address is unverified is evicted.
    pub max_half_open: usize,
    /// `max_half_open` of one peer address (IPv6: one /64).
    /// Beyond it, the oldest of that address is evicted if it is older than `first_retry`.
    pub max_half_open_per_peer: usize,
    /// Rate of MADs processed for one peer address (IPv6: one /64). More are dropped.
    /// Does not count MADs that name a connection by its communication ID or repeat a known request.
    pub mad_rate: RateLimit,
    /// Largest number of rate-limited addresses. Beyond it, those that have sent least are removed.
    pub max_rated_peers: usize,
    /// Largest number of ended connections that linger to answer late MADs, and separately of answered SIDR requests.
    /// Beyond it, the oldest is removed.
    ///
    /// Also the largest number of peers' SIDR requests, answered and expired ones included, that the consumer has not
    /// destroyed. More are dropped.
    pub max_lingering: usize,
    /// Largest number of outgoing MADs not yet polled. More are dropped; retransmission recovers them.
    pub max_queued_mads: usize,
    /// Range of our communication and SIDR request IDs, without 0. Processes at one address have disjoint ranges.
    pub comm_ids: (u32, u32),
    /// Queue [`ConnChange`]s, which must then be polled.
    pub report_changes: bool,
}

impl CmConfig {
    /// Returns the kernel's settings for a device with this GUID and path MTU.
    pub fn new(ca_guid: u64, mtu: Mtu) -> Self {
        Self {
            ca_guid,
            mtus: mtu.into(),
            first_retry: Duration::from_millis(250),
            give_up: Duration::from_secs(10),
            max_connections: 65_536,
            max_half_open: 4096,
            // All processes of a host are one peer, which may so occupy about 2 MiB.
            max_half_open_per_peer: 1024,
            // Burst: 128 processes on each of two hosts connect all to all. No application sustains a higher rate.
            mad_rate: RateLimit {
                per_second: 4096,
                burst: 16_384,
            },
            max_rated_peers: 4096,
            max_lingering: 4096,
            max_queued_mads: 4096,
            comm_ids: (1, u32::MAX),
            report_changes: false,
        }
    }

    /// Returns the pause before the first retransmission, at least 1 ms.
    pub(crate) fn first_pause(&self) -> Duration {
        self.first_retry.max(Duration::from_millis(1))
    }
}

/// Start or end of a connection. A process that disconnects on behalf of dead ones needs both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnChange {
    /// Established; false: ended.
    pub established: bool,
    /// Our address.
    pub local: IpAddr,
    /// The peer's address.
    pub remote: IpAddr,
    /// Our communication ID.
    pub local_id: u32,
    /// The peer's communication ID.
    pub remote_id: u32,
    /// The peer's queue pair.
    pub remote_qpn: Qpn,
}

/// Transport of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ConnTransport {
    /// Reliable connection.
    #[default]
    Rc,
    /// Unreliable connection.
    Uc,
    /// Extended reliable connection: the initiator connects to the target (IBTA Annex A14).
    Xrc,
}

/// Arguments of a listener.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ListenArgs {
    /// Local address. Unspecified: all of its IP version; `None`: all.
    pub addr: Option<IpAddr>,
    /// Port space.
    pub space: PortSpace,
    /// Port.
    pub port: u16,
    /// Accepted transport; `None`: any. Requests for another are rejected. Ignored in a datagram port space.
    pub transport: Option<ConnTransport>,
    /// Largest number of requests of one peer address (IPv6: one /64) that wait for the consumer, at least 1.
    /// Connect and SIDR requests count together.
    ///
    /// All addresses together get a quarter more. Requests beyond that are dropped, and the peers repeat them. A request
    /// counts until the consumer answers it, destroys it or takes it over
    /// ([`Manager::leave_backlog`](crate::cm::Manager::leave_backlog)), even if its peer has given up.
    pub backlog: u32,
}

impl ListenArgs {
    /// Creates arguments for RC in the TCP port space.
    pub const fn new(addr: Option<IpAddr>, port: u16, backlog: u32) -> Self {
        Self {
            addr,
            space: PortSpace::Tcp,
            port,
            transport: Some(ConnTransport::Rc),
            backlog,
        }
    }

    /// Returns whether a resolution may ask the listener for a queue pair that takes datagrams.
    pub(crate) const fn takes_datagrams(&self) -> bool {
        self.space.is_datagram() || matches!(self.space, PortSpace::Ib)
    }
}

/// Returns whether two addresses, in the form of [`ListenArgs::addr`], overlap.
pub fn overlap(a: Option<IpAddr>, b: Option<IpAddr>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a == b || (a.is_ipv4() == b.is_ipv4() && (a.is_unspecified() || b.is_unspecified())),
        _ => true,
    }
}

/// Arguments of a SIDR request.
#[derive(Clone, Debug)]
pub struct ResolveArgs {
    /// Our address and port; 0 for an ephemeral one.
    pub local: SocketAddr,
    /// The listener's address and port, of the same family.
    pub remote: SocketAddr,
    /// Port space.
    pub space: PortSpace,
    /// Private data, at most 180 bytes.
    pub private_data: Vec<u8>,
}

/// Answer to a SIDR request.
#[derive(Clone, Debug, Default)]
pub struct SidrAnswer {
    /// SIDR status ([`sidr_status`](crate::cm::mad::sidr_status)); 0 on success.
    pub status: u8,
    /// Queue pair of the service.
    pub qpn: Qpn,
    /// Q_Key of the queue pair.
    pub qkey: QKey,
    /// Private data, at most 136 bytes.
    pub private_data: Vec<u8>,
}

/// Our queue pair, as a REQ or REP names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalQp {
    /// Number.
    pub qpn: Qpn,
    /// First PSN that we expect: our RQ PSN, with which the peer starts sending (IBA 12.7.31).
    pub start_psn: Psn,
    /// Transport. Of an accept: ignored, as the REQ names it.
    pub transport: ConnTransport,
    /// It honours end-to-end credits.
    pub flow_control: bool,
    /// It uses a shared receive queue.
    pub srq: bool,
    /// UDP source port of its packets, if fixed. A ferroce peer drops packets from any other.
    pub src_port: Option<u16>,
}

impl LocalQp {
    /// Creates an RC queue pair without flow control, SRQ or fixed source port.
    pub const fn new(qpn: Qpn, start_psn: Psn) -> Self {
        Self {
            qpn,
            start_psn,
            transport: ConnTransport::Rc,
            flow_control: false,
            srq: false,
            src_port: None,
        }
    }
}

/// Arguments of an active connection.
#[derive(Clone, Debug)]
pub struct ConnectArgs {
    /// Our address and port; 0 for an ephemeral one. The port shows only in the REQ's header.
    pub local: SocketAddr,
    /// The listener's address, of the same family, and port in `space`.
    pub remote: SocketAddr,
    /// Our queue pair.
    pub qp: LocalQp,
    /// Path MTU.
    pub mtu: Mtu,
    /// Private data (at most 56 bytes), depths, retries and type of service.
    pub params: ConnParams,
    /// Port space of the listener.
    pub space: PortSpace,
}

impl ConnectArgs {
    /// Creates arguments for RC in the TCP port space, without flow control or SRQ.
    pub fn new(local: SocketAddr, remote: SocketAddr, qpn: Qpn, start_psn: Psn, mtu: Mtu) -> Self {
        Self {
            local,
            remote,
            qp: LocalQp::new(qpn, start_psn),
            mtu,
            params: ConnParams::default(),
            space: PortSpace::Tcp,
        }
    }
}

/// Arguments of an accept.
#[derive(Clone, Debug)]
pub struct AcceptArgs {
    /// Our queue pair, already in RTS (see [`Manager::accept_path`](crate::cm::Manager::accept_path)).
    pub qp: LocalQp,
    /// Private data (at most 196 bytes), depths, RNR retries and type of service. Depths are cut to the REQ's offer.
    pub params: ConnParams,
}

impl AcceptArgs {
    /// Creates arguments without flow control, SRQ or fixed source port.
    pub const fn new(qpn: Qpn, start_psn: Psn, params: ConnParams) -> Self {
        let qp = LocalQp::new(qpn, start_psn);
        Self { qp, params }
    }
}

/// The peer's attributes for moving our queue pair to RTS (`cm_init_qp_rtr_attr`, `cm_init_qp_rts_attr`).
///
/// Our RQ PSN is the `start_psn` of [`LocalQp`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteQp {
    /// Path to the peer.
    pub av: AddressVector,
    /// The peer's queue pair.
    pub qpn: Qpn,
    /// First PSN that the peer expects: our SQ PSN.
    pub sq_psn: Psn,
    /// Path MTU.
    pub mtu: Mtu,
    /// READs and atomics that we answer at a time (`max_dest_rd_atomic`). In a request: the most that the peer sends.
    pub responder_resources: u8,
    /// READs and atomics that we send at a time (`max_rd_atomic`). In a request: the most that the peer answers.
    pub initiator_depth: u8,
    /// Local ACK timeout code.
    pub timeout: u8,
    /// Retry count.
    pub retry_cnt: u8,
    /// RNR retry count; 7: unlimited.
    pub rnr_retry: u8,
    /// Transport.
    pub transport: ConnTransport,
    /// The peer's queue pair honours end-to-end credits.
    pub flow_control: bool,
    /// The peer's queue pair uses a shared receive queue.
    pub srq: bool,
    /// The peer's adapter supports selective ACK ([`guid`](crate::cm::guid)).
    pub keeps_packets: bool,
    /// UDP source port of the peer's queue pair, if a ferroce peer has named it.
    pub src_port: Option<u16>,
}

impl RemoteQp {
    /// Creates a queue pair of which only the path and the transport are known.
    pub(crate) fn new(av: AddressVector, mtu: Mtu, transport: ConnTransport) -> Self {
        Self {
            av,
            qpn: Qpn::default(),
            sq_psn: Psn::default(),
            mtu,
            responder_resources: 0,
            initiator_depth: 0,
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
            transport,
            flow_control: false,
            srq: false,
            keeps_packets: false,
            src_port: None,
        }
    }
}

/// Event of a connection, resolution or listener. None follows its destruction.
/// Its `Display` is one line, with the reason in words.
///
/// Order on the active side: `Reply`, `Rejected` or `Unreachable`. On the passive side: `Request`, then after accept
/// `Established`, `Rejected` or `Unreachable`. Of an established connection: `Disconnected`, then `TimewaitExit`.
///
/// A layer that moves queue pairs to RTS for others turns `Reply` into `Established` or `Failed`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// Passive: a peer requests a connection. Answer with accept or reject.
    Request {
        /// Listener that got the request.
        listener: ListenId,
        /// The new half-open connection.
        conn: ConnId,
        /// Our address and port.
        local: SocketAddr,
        /// The peer's address and (ephemeral) port.
        remote: SocketAddr,
        /// The consumer's private data: 56 bytes, zero-padded.
        private_data: Vec<u8>,
        /// The peer's queue pair, and upper bounds for our depths.
        path: RemoteQp,
    },
    /// Passive: SIDR request of a peer. Answer with [`Manager::answer`](crate::cm::Manager::answer).
    SidrRequest {
        /// Listener that got the request.
        listener: ListenId,
        /// The new resolution.
        conn: ConnId,
        /// Our address and port.
        local: SocketAddr,
        /// The peer's address and (ephemeral) port.
        remote: SocketAddr,
        /// Port space.
        space: PortSpace,
        /// The consumer's private data: 180 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// Active: answer to a resolution, which has ended.
    Resolved {
        /// The resolution.
        conn: ConnId,
        /// SIDR status ([`sidr_status`](crate::cm::mad::sidr_status)); 0 on success.
        status: u8,
        /// Queue pair of the service, if the status is 0.
        qpn: Qpn,
        /// Q_Key of the queue pair.
        qkey: QKey,
        /// Additional information as the status defines it, up to 72 bytes.
        info: Vec<u8>,
        /// The consumer's private data: 136 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// Active: the peer accepted. Move the queue pair to RTS, then call `qp_ready` or `qp_failed`.
    ///
    /// The connection is established when `qp_ready` returns; no `Established` follows.
    Reply {
        /// The connection.
        conn: ConnId,
        /// The peer's queue pair, depths as negotiated.
        path: RemoteQp,
        /// The consumer's private data: 196 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// Passive: the RTU arrived, or `communication_established` was called. Active: instead of `Reply`, the queue pair is in RTS.
    Established {
        /// The connection.
        conn: ConnId,
        /// Active: the peer's private data from the accept, 196 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// Active: instead of `Reply`, the queue pair could not be moved to RTS. The connection has ended.
    Failed {
        /// The connection.
        conn: ConnId,
        /// Error text.
        text: String,
    },
    /// The peer rejected or withdrew the connection, which has ended.
    ///
    /// Passive also: the request waited too long for the consumer ([`RejectReason::TIMEOUT`]) or was evicted.
    Rejected {
        /// The connection.
        conn: ConnId,
        /// Reject reason.
        reason: RejectReason,
        /// Additional reject information as the reason defines it, up to 72 bytes (IBA table 109).
        info: Vec<u8>,
        /// The consumer's private data: 148 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// The peer never answered our REQ (active) or REP (passive). The connection has ended.
    ///
    /// Passive also: newer connections evicted the half-open one.
    Unreachable {
        /// The connection.
        conn: ConnId,
        /// Timeout, or the ICMP error about our request.
        why: NoAnswer,
    },
    /// An established connection has ended. Both sides' queue pairs enter the error state.
    ///
    /// The peer disconnected, answered our DREQ, or never answered it.
    Disconnected {
        /// The connection.
        conn: ConnId,
        /// The peer never answered our DREQ.
        timed_out: bool,
    },
    /// Timewait has expired: the queue pair's number may be reused (IBA 12.9.8.4).
    TimewaitExit {
        /// The connection.
        conn: ConnId,
    },
}

impl Event {
    /// Returns the connection of the event.
    pub const fn conn(&self) -> ConnId {
        match self {
            Self::Request { conn, .. }
            | Self::SidrRequest { conn, .. }
            | Self::Resolved { conn, .. }
            | Self::Reply { conn, .. }
            | Self::Established { conn, .. }
            | Self::Failed { conn, .. }
            | Self::Rejected { conn, .. }
            | Self::Unreachable { conn, .. }
            | Self::Disconnected { conn, .. }
            | Self::TimewaitExit { conn } => *conn,
        }
    }

    /// Returns the listener and the new connection or resolution of a request.
    pub const fn request(&self) -> Option<(ListenId, ConnId)> {
        match self {
            Self::Request { listener, conn, .. } | Self::SidrRequest { listener, conn, .. } => Some((*listener, *conn)),
            _ => None,
        }
    }
}

/// Outgoing MAD: UD SEND ONLY from QP1 to QP1, Q_Key 0x80010000, P_Key 0xffff.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutMad {
    /// Our address.
    pub local: IpAddr,
    /// The peer's address.
    pub remote: IpAddr,
    /// The MAD.
    pub mad: [u8; MAD_LEN],
}
