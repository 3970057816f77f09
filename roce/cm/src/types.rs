//! What goes into a [`Manager`](crate::Manager) and comes out of it.

use core::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use roce_verbs::{
    AddressVector, Mtu, PathMtus, Psn, QKey, Qpn,
    provider::{ConnParams, RejectReason},
};

use crate::{
    cma::PortSpace,
    mad::{Attribute, MAD_LEN},
    state::State,
};

/// A connection. Never reused within the life of a manager.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnId(pub u64);

/// A listener. Never reused within the life of a manager.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ListenId(pub u64);

/// What a manager keeps at a moment ([`Manager::usage`](crate::Manager::usage)). Each has its limit in [`CmConfig`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Connections in all.
    pub connections: usize,
    /// Half-open ones.
    pub half_open: usize,
    /// The most of one peer (IPv6: of one /64).
    pub half_open_of_peer: usize,
    /// Connections that are destroyed and linger.
    pub lingering: usize,
    /// Peers whose MADs are counted.
    pub rated_peers: usize,
    /// MADs that wait to be polled.
    pub queued_mads: usize,
}

/// A rate of MADs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RateLimit {
    /// MADs per second, at least 1.
    pub per_second: u32,
    /// MADs at once after silence.
    pub burst: u32,
}

/// Settings of a manager.
#[derive(Clone, Debug)]
pub struct CmConfig {
    /// Our channel adapter's GUID, in every REQ and REP. Peers recognise duplicates and stale connections by it
    /// together with communication IDs and queue pair numbers, so no two live devices may share one.
    pub ca_guid: u64,
    /// The largest path MTUs that we can do: a REQ with a larger one is rejected with reason 26 and our MTU as the
    /// additional information.
    pub mtus: PathMtus,
    /// Code t of 4.096 us * 2^t that our REQs name as the CM response timeout of both sides, and the longest pause
    /// between two of our retransmissions (plus two packet lifetimes). `CMA_CM_RESPONSE_TIMEOUT`: 20, 4.3 s.
    pub response_timeout: u8,
    /// Retransmissions of a REQ, REP or DREQ, also the number that our REQs name. `CMA_MAX_CM_RETRIES`: 15.
    pub max_retries: u8,
    /// The pause before the first retransmission; it doubles each time. The kernel always waits the whole response
    /// timeout; its answers to earlier duplicates are the same. A REP is never repeated sooner, whatever response timeout
    /// the peer names.
    pub first_retry: Duration,
    /// How long a REQ (unless [`ConnParams::patience`] says), REP or DREQ may stay without any answer, whatever retries
    /// are left. After an MRA it counts from the end of the service timeout. So long does a request of a peer's wait for
    /// the consumer, too, unless the peer repeats it.
    pub give_up: Duration,
    /// Packet lifetime code of paths; the local ACK timeout that REQs name comes from it and from `ca_ack_delay`.
    /// `CMA_IBOE_PACKET_LIFETIME`: 18.
    pub packet_life_time: u8,
    /// Code of the delay of our own ACKs, in REPs as the target ACK delay. `RXE_LOCAL_CA_ACK_DELAY`: 15.
    pub ca_ack_delay: u8,
    /// Code of the service timeout that our MRAs ask for. `CMA_CM_MRA_SETTING`: 24, 69 s.
    pub service_timeout: u8,
    /// The longest service timeout that a peer's MRA is granted, as a code.
    pub max_service_timeout: u8,
    /// The longest timewait, whatever ACK timeout the peer named.
    pub max_timewait: Duration,
    /// Connections in all, half-open and lingering ones included.
    pub max_connections: usize,
    /// Requests from peers that are not established yet (connections and questions apart). When there are more the
    /// oldest gives way whose address has not shown that it receives what we send.
    pub max_half_open: usize,
    /// The same for one peer address, for IPv6 one /64: there the oldest of that address gives way, if it is older than
    /// `first_retry`.
    pub max_half_open_per_peer: usize,
    /// MADs that one peer address (IPv6: one /64) may have us process, those not counted that name a connection by its
    /// communication ID or repeat a request that we know. More are dropped.
    pub mad_rate: RateLimit,
    /// Addresses of which that is counted; of more, those that have sent least are forgotten.
    pub max_rated_peers: usize,
    /// Repetitions of one request that are answered.
    pub repeat_rate: RateLimit,
    /// Ended or destroyed connections that are still kept to answer late MADs; the oldest goes first.
    pub max_lingering: usize,
    /// MADs that wait to be polled; more are dropped (retransmission recovers them).
    pub max_queued_mads: usize,
    /// The lowest and highest communication ID (and SIDR request ID) of ours; 0 is never used. One process of several
    /// behind one address has a part of them.
    pub comm_ids: (u32, u32),
    /// Keep [`ConnChange`]s, which must then be polled.
    pub report_changes: bool,
}

impl CmConfig {
    /// The kernel's settings, for a device with this GUID and path MTU.
    pub fn new(ca_guid: u64, mtu: Mtu) -> Self {
        Self {
            ca_guid,
            mtus: mtu.into(),
            response_timeout: 20,
            max_retries: 15,
            first_retry: Duration::from_millis(250),
            give_up: Duration::from_secs(10),
            packet_life_time: 18,
            ca_ack_delay: 15,
            service_timeout: 24,
            max_service_timeout: 25,
            max_timewait: Duration::from_secs(10),
            max_connections: 65_536,
            max_half_open: 4096,
            // All processes of a host are one peer; what it may take up is about 2 MiB.
            max_half_open_per_peer: 1024,
            // All to all between 128 processes on either host, all at once; no program connects faster for long.
            mad_rate: RateLimit {
                per_second: 4096,
                burst: 16_384,
            },
            max_rated_peers: 4096,
            // Peers repeat after 0.2 s at the soonest; networks now and then.
            repeat_rate: RateLimit {
                per_second: 16,
                burst: 16,
            },
            max_lingering: 4096,
            max_queued_mads: 4096,
            comm_ids: (1, u32::MAX),
            report_changes: false,
        }
    }
}

/// A connection has been established, or is over: its peer has answered our DREQ, or ended it, or did not answer. Who ends
/// connections of others that have died needs to know both.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnChange {
    /// Established, and not over.
    pub established: bool,
    /// Our address.
    pub local: IpAddr,
    /// The peer's.
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
    /// Reliable.
    #[default]
    Rc,
    /// Unreliable.
    Uc,
    /// Extended reliable: the initiator connects to the target (IBTA Annex A14).
    Xrc,
}

/// What to listen for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ListenArgs {
    /// On this address, or (unspecified) on all of its IP version, or (`None`) on all.
    pub addr: Option<IpAddr>,
    /// Port space.
    pub space: PortSpace,
    /// Port.
    pub port: u16,
    /// Requests for another transport are rejected; `None`: any will do. Not asked in a port space of datagrams.
    pub transport: Option<ConnTransport>,
    /// So many requests (at least one), of one peer address three quarters of that, may wait for the consumer's answer;
    /// more are dropped, and the peer repeats them. A request has its place until the consumer answers or destroys it,
    /// also when its peer has given up meanwhile.
    pub backlog: u32,
}

/// Whether two listeners, or a listener and the address of a request, have an address in common. As [`ListenArgs::addr`].
pub fn overlap(a: Option<IpAddr>, b: Option<IpAddr>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => a == b || (a.is_ipv4() == b.is_ipv4() && (a.is_unspecified() || b.is_unspecified())),
        _ => true,
    }
}

/// Which queue pair to ask for.
#[derive(Clone, Debug)]
pub struct ResolveArgs {
    /// Our address; with port 0 an ephemeral one is chosen.
    pub local: SocketAddr,
    /// The listener: its address, same family, and port.
    pub remote: SocketAddr,
    /// Port space.
    pub space: PortSpace,
    /// Private data, at most 180 bytes.
    pub private_data: Vec<u8>,
}

/// The answer to who asks for a queue pair.
#[derive(Clone, Debug, Default)]
pub struct SidrAnswer {
    /// 0, or why not ([`sidr_status`](crate::mad::sidr_status)).
    pub status: u8,
    /// The queue pair that serves.
    pub qpn: Qpn,
    /// Its Q_Key.
    pub qkey: QKey,
    /// Private data, at most 136 bytes.
    pub private_data: Vec<u8>,
}

/// What to connect.
#[derive(Clone, Debug)]
pub struct ConnectArgs {
    /// Our address; with port 0 an ephemeral one is chosen (it only shows in the REQ's header).
    pub local: SocketAddr,
    /// The listener: its address, same family, and port in the RDMA_CM TCP port space.
    pub remote: SocketAddr,
    /// Our queue pair.
    pub qpn: Qpn,
    /// The first PSN that we expect (our RQ PSN); the peer starts to send with it (IBA 12.7.31).
    pub start_psn: Psn,
    /// Path MTU.
    pub mtu: Mtu,
    /// Private data (at most 56 bytes), depths, retries and type of service.
    pub params: ConnParams,
    /// Our queue pair honours end-to-end credits.
    pub flow_control: bool,
    /// Our queue pair uses a shared receive queue.
    pub srq: bool,
    /// Port space of the listener.
    pub space: PortSpace,
    /// Transport of our queue pair.
    pub transport: ConnTransport,
    /// UDP source port of our queue pair's packets, if it is fixed: peers of ours take no packets from another.
    pub src_port: Option<u16>,
}

impl ConnectArgs {
    /// RC in the TCP port space, default parameters, no flow control, no shared receive queue.
    pub fn new(local: SocketAddr, remote: SocketAddr, qpn: Qpn, start_psn: Psn, mtu: Mtu) -> Self {
        Self {
            local,
            remote,
            qpn,
            start_psn,
            mtu,
            params: ConnParams::default(),
            flow_control: false,
            srq: false,
            space: PortSpace::Tcp,
            transport: ConnTransport::Rc,
            src_port: None,
        }
    }
}

/// How to accept.
#[derive(Clone, Debug)]
pub struct AcceptArgs {
    /// Our queue pair, in RTS already (see [`Manager::accept_path`](crate::Manager::accept_path)).
    pub qpn: Qpn,
    /// The first PSN that we expect (our RQ PSN); the peer starts to send with it (IBA 12.7.31).
    pub start_psn: Psn,
    /// Private data (at most 196 bytes), depths, RNR retries and type of service. Depths are cut to what the REQ offered.
    pub params: ConnParams,
    /// Our queue pair honours end-to-end credits.
    pub flow_control: bool,
    /// Our queue pair uses a shared receive queue.
    pub srq: bool,
    /// UDP source port of our queue pair's packets, if it is fixed.
    pub src_port: Option<u16>,
}

impl AcceptArgs {
    /// No flow control, no shared receive queue, no fixed source port.
    pub const fn new(qpn: Qpn, start_psn: Psn, params: ConnParams) -> Self {
        Self {
            qpn,
            start_psn,
            params,
            flow_control: false,
            srq: false,
            src_port: None,
        }
    }
}

/// All that the peer contributes to bringing our queue pair to RTR and RTS (`cm_init_qp_rtr_attr`,
/// `cm_init_qp_rts_attr`). Our RQ PSN is the `start_psn` of [`ConnectArgs`] or [`AcceptArgs`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteQp {
    /// Path to the peer.
    pub av: AddressVector,
    /// The peer's queue pair.
    pub qpn: Qpn,
    /// The first PSN that the peer expects: our SQ PSN.
    pub sq_psn: Psn,
    /// Path MTU.
    pub mtu: Mtu,
    /// READs and atomics that we answer at a time (`max_dest_rd_atomic`). In a request: the most that the peer
    /// will send.
    pub responder_resources: u8,
    /// READs and atomics that we send at a time (`max_rd_atomic`). In a request: the most that the peer answers.
    pub initiator_depth: u8,
    /// Local ACK timeout code.
    pub timeout: u8,
    /// Retries.
    pub retry_cnt: u8,
    /// RNR retries, 7 = for ever.
    pub rnr_retry: u8,
    /// Transport.
    pub transport: ConnTransport,
    /// The peer's queue pair honours end-to-end credits.
    pub flow_control: bool,
    /// The peer's queue pair uses a shared receive queue.
    pub srq: bool,
    /// The peer's adapter keeps packets beyond a gap and says which ([`guid`](crate::guid)).
    pub keeps_packets: bool,
    /// UDP source port that all packets of the peer's queue pair come from, if it is one of ours and has named it.
    pub src_port: Option<u16>,
}

/// What a manager reports. Per connection the order is: on the active side `Reply` or `Rejected` or `Unreachable`;
/// on the passive side `Request`, then (after accept) `Established` or `Rejected` or `Unreachable`; once either
/// side is established `Disconnected`, then `TimewaitExit`. Nothing comes after destroy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// Passive: somebody wants to connect. Answer with accept or reject.
    Request {
        /// Where it arrived.
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
    /// Passive: somebody asks for a queue pair. Answer with [`Manager::answer`](crate::Manager::answer).
    SidrRequest {
        /// Where it arrived.
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
    /// Active: the answer to a resolution, which is over.
    Resolved {
        /// The resolution.
        conn: ConnId,
        /// 0, or why not ([`sidr_status`](crate::mad::sidr_status)).
        status: u8,
        /// The queue pair that serves, if the status is 0.
        qpn: Qpn,
        /// Its Q_Key.
        qkey: QKey,
        /// Additional information as the status defines it, up to 72 bytes.
        info: Vec<u8>,
        /// The consumer's private data: 136 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// Active: the peer accepts. Bring the queue pair to RTS, then call `qp_ready` or `qp_failed`. No `Established`
    /// follows on this side: the connection is established when `qp_ready` returns.
    Reply {
        /// The connection.
        conn: ConnId,
        /// The peer's queue pair, depths as negotiated.
        path: RemoteQp,
        /// The consumer's private data: 196 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// Passive: the RTU came (or `communication_established` was called).
    Established {
        /// The connection.
        conn: ConnId,
    },
    /// The peer refused, or (passive) took its request back, or must have given up ([`RejectReason::TIMEOUT`]) or given way
    /// to others while the request waited for the consumer. The connection is over.
    Rejected {
        /// The connection.
        conn: ConnId,
        /// Why.
        reason: RejectReason,
        /// Additional reject information as the reason defines it, up to 72 bytes (IBA table 109).
        info: Vec<u8>,
        /// The consumer's private data: 148 bytes, zero-padded.
        private_data: Vec<u8>,
    },
    /// Our REQ (active) or REP (passive) was never answered, or the half-open connection (passive) gave way to newer ones.
    /// The connection is over.
    Unreachable {
        /// The connection.
        conn: ConnId,
    },
    /// An established connection ended: by the peer, or our own disconnect was answered or given up. Both sides'
    /// queue pairs go to error.
    Disconnected {
        /// The connection.
        conn: ConnId,
        /// Our DREQ was never answered.
        timed_out: bool,
    },
    /// The queue pair's number may be used again (IBA 12.9.8.4).
    TimewaitExit {
        /// The connection.
        conn: ConnId,
    },
}

impl Event {
    /// The connection that it is about.
    pub const fn conn(&self) -> ConnId {
        match self {
            Self::Request { conn, .. }
            | Self::SidrRequest { conn, .. }
            | Self::Resolved { conn, .. }
            | Self::Reply { conn, .. }
            | Self::Established { conn }
            | Self::Rejected { conn, .. }
            | Self::Unreachable { conn }
            | Self::Disconnected { conn, .. }
            | Self::TimewaitExit { conn } => *conn,
        }
    }
}

/// A MAD to send: UD SEND ONLY from QP1 to QP1, Q_Key 0x80010000, P_Key 0xffff.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutMad {
    /// Our address.
    pub local: IpAddr,
    /// The peer's address.
    pub remote: IpAddr,
    /// The MAD.
    pub mad: [u8; MAD_LEN],
}

/// Why a call was refused. Nothing changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CmError {
    /// Somebody listens on this port already.
    #[error("address and port are in use")]
    AddressInUse,
    /// Local and remote address are of different families, or one is unspecified or multicast.
    #[error("addresses don't make a path")]
    Address,
    /// Too much private data.
    #[error("{given} bytes of private data, at most {max}")]
    PrivateData {
        /// Bytes given.
        given: usize,
        /// Bytes that the message holds.
        max: usize,
    },
    /// As many connections as configured.
    #[error("too many connections")]
    Limit,
    /// Not a connection, or destroyed.
    #[error("no such connection")]
    NoConnection,
    /// The connection's state does not allow it.
    #[error("the connection is in state {0:?}")]
    State(State),
    /// The resolution does not wait for an answer.
    #[error("the question is not open any more")]
    Answered,
}

/// Why a MAD was dropped without effect.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(usize)]
pub enum DropReason {
    /// Not 256 bytes.
    Length,
    /// Not base version 1, class 7 (communication management), class version 2, method Send.
    Header,
    /// An attribute that no CM message has, or that RoCE doesn't use (LAP, APR).
    Attribute,
    /// A field that can't have the value it has.
    Field,
    /// Names a connection that we don't have.
    UnknownConnection,
    /// Names a connection with another peer address than it came from.
    WrongAddress,
    /// A DREQ for another queue pair than the connection's.
    WrongQp,
    /// Not expected in the connection's state.
    State,
    /// A duplicate that needs no answer.
    Duplicate,
    /// A request beyond the listener's backlog.
    Backlog,
    /// A request beyond one peer's share of the listener's backlog.
    BacklogPeer,
    /// A request beyond the half-open connections allowed in all, none of which gives way.
    HalfOpen,
    /// A request beyond the half-open connections allowed to one peer, none of which gives way (yet).
    HalfOpenPeer,
    /// More MADs than one peer may send in a time, or repetitions of one request.
    Rate,
    /// A request beyond the connections allowed in all.
    Connections,
    /// An answer that found the queue of outgoing MADs full.
    OutQueueFull,
}

impl DropReason {
    /// All reasons.
    pub const ALL: [Self; 16] = [
        Self::Length,
        Self::Header,
        Self::Attribute,
        Self::Field,
        Self::UnknownConnection,
        Self::WrongAddress,
        Self::WrongQp,
        Self::State,
        Self::Duplicate,
        Self::Backlog,
        Self::BacklogPeer,
        Self::HalfOpen,
        Self::HalfOpenPeer,
        Self::Rate,
        Self::Connections,
        Self::OutQueueFull,
    ];

    /// A stable name for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Header => "header",
            Self::Attribute => "attribute",
            Self::Field => "field",
            Self::UnknownConnection => "unknown_connection",
            Self::WrongAddress => "wrong_address",
            Self::WrongQp => "wrong_qp",
            Self::State => "state",
            Self::Duplicate => "duplicate",
            Self::Backlog => "backlog",
            Self::BacklogPeer => "backlog_peer",
            Self::HalfOpen => "half_open",
            Self::HalfOpenPeer => "half_open_peer",
            Self::Rate => "rate",
            Self::Connections => "connections",
            Self::OutQueueFull => "out_queue_full",
        }
    }
}

/// What a manager has counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    received: [u64; Attribute::ALL.len()],
    sent: [u64; Attribute::ALL.len()],
    retried: [u64; Attribute::ALL.len()],
    dropped: [u64; DropReason::ALL.len()],
    /// REJs sent, whatever the reason.
    pub rejects_sent: u64,
    /// Old connections torn down because the peer used their queue pair or communication ID anew.
    pub stale: u64,
    /// MRAs that extended a timer.
    pub extended: u64,
    /// REQs, REPs and DREQs given up.
    pub timeouts: u64,
    /// Lingering connections forgotten early to make room.
    pub forgotten: u64,
    /// Half-open connections and questions that gave way to newer ones of other addresses.
    pub displaced: u64,
    /// Half-open connections and questions that gave way to newer ones of the same address.
    pub displaced_peer: u64,
    /// Requests whose peer must have given up before the consumer answered.
    pub expired: u64,
    /// MADs not sent, for they would have gone to an address that has not shown that it receives what we send.
    pub withheld: u64,
}

impl Counters {
    /// MADs received with this attribute.
    pub fn received(&self, a: Attribute) -> u64 {
        self.received[a.index()]
    }

    /// MADs sent with this attribute, retransmissions included.
    pub fn sent(&self, a: Attribute) -> u64 {
        self.sent[a.index()]
    }

    /// MADs sent again after a timeout.
    pub fn retried(&self, a: Attribute) -> u64 {
        self.retried[a.index()]
    }

    /// MADs dropped for this reason.
    pub fn dropped(&self, r: DropReason) -> u64 {
        self.dropped[r as usize]
    }

    /// All, with stable names for reports.
    pub fn named(&self) -> impl Iterator<Item = (String, u64)> {
        let by_kind = |what: &'static str, n: [u64; Attribute::ALL.len()]| {
            let kinds = Attribute::ALL.into_iter().zip(n);
            kinds.map(move |(a, n)| (format!("cm_{what}_{}", a.name()), n))
        };
        let dropped = DropReason::ALL.into_iter().zip(self.dropped);
        let others = [
            ("rejects_sent", self.rejects_sent),
            ("stale", self.stale),
            ("extended", self.extended),
            ("timeouts", self.timeouts),
            ("forgotten", self.forgotten),
            ("displaced", self.displaced),
            ("displaced_peer", self.displaced_peer),
            ("expired", self.expired),
            ("withheld", self.withheld),
        ];
        by_kind("received", self.received)
            .chain(by_kind("sent", self.sent))
            .chain(by_kind("retried", self.retried))
            .chain(dropped.map(|(r, n)| (format!("cm_drop_{}", r.name()), n)))
            .chain(others.map(|(name, n)| (format!("cm_{name}"), n)))
    }

    /// Adds what another manager has counted.
    pub fn add(&mut self, other: &Self) {
        let tables = [
            (&mut self.received[..], &other.received[..]),
            (&mut self.sent[..], &other.sent[..]),
            (&mut self.retried[..], &other.retried[..]),
            (&mut self.dropped[..], &other.dropped[..]),
        ];
        for (ours, theirs) in tables {
            ours.iter_mut().zip(theirs).for_each(|(a, b)| *a += b);
        }
        self.rejects_sent += other.rejects_sent;
        self.stale += other.stale;
        self.extended += other.extended;
        self.timeouts += other.timeouts;
        self.forgotten += other.forgotten;
        self.displaced += other.displaced;
        self.displaced_peer += other.displaced_peer;
        self.expired += other.expired;
        self.withheld += other.withheld;
    }

    pub(crate) fn count_received(&mut self, a: Attribute) {
        self.received[a.index()] += 1;
    }

    pub(crate) fn count_sent(&mut self, a: Attribute) {
        self.sent[a.index()] += 1;
        self.rejects_sent += u64::from(a == Attribute::Rej);
    }

    pub(crate) fn count_retried(&mut self, a: Attribute) {
        self.retried[a.index()] += 1;
    }

    pub(crate) fn count_drop(&mut self, r: DropReason) {
        self.dropped[r as usize] += 1;
    }
}
