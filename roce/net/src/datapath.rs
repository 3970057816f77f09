//! Datapaths: they move sealed packets between a port and the network.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
};

use roce_verbs::provider::NoAnswer;

/// The hop limit that sockets are set to; others cost a control message.
pub const DEFAULT_HOP_LIMIT: u8 = 64;

/// Packets for one send: all `segment_len` bytes long but the last, which may be shorter; packet *i* is sealed with IPv4
/// Identification *i*.
#[derive(Clone, Copy, Debug)]
pub struct Burst<'a> {
    /// Our address.
    pub local: IpAddr,
    /// Destination.
    pub remote: SocketAddr,
    /// Our UDP port: one of [`Capabilities::src_ports`], [`Capabilities::mad_port`], or the RoCE port.
    pub src_port: u16,
    /// TOS or traffic class.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Bytes of each packet but the last; not zero.
    pub segment_len: usize,
    /// The packets, one behind the other.
    pub bytes: &'a [u8],
}

impl Burst<'_> {
    /// How many packets it holds.
    pub fn packets(&self) -> usize {
        self.bytes.len().div_ceil(self.segment_len.max(1))
    }
}

/// A received datagram, or several of one flow that the kernel merged (GRO).
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    /// The address that it was sent to.
    pub local: IpAddr,
    /// The sender.
    pub remote: SocketAddr,
    /// The IPv4 Identification, where the datapath sees headers.
    pub identification: Option<u16>,
    /// Bytes of each packet but the last, which may be shorter.
    pub segment_len: usize,
    /// TOS or traffic class.
    pub traffic_class: u8,
    /// TTL or hop limit as it came, 0 if not known.
    pub hop_limit: u8,
    /// The UDP payloads, one behind the other.
    pub bytes: &'a [u8],
}

/// Abilities of a datapath.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// The most packets of a burst; 1 when it can't segment.
    pub max_segments: usize,
    /// The most bytes of a burst.
    pub max_burst_bytes: usize,
    /// UDP ports that bursts may come from.
    pub src_ports: Vec<u16>,
    /// UDP port for management datagrams alone: ICMP errors about what leaves from it can be [heard](Datapath::hear_undeliverable).
    pub mad_port: Option<u16>,
    /// Bytes of the receive buffer, as the kernel counts them (packet data and its own overhead).
    pub receive_buffer: usize,
}

/// An ICMP error about a packet of ours.
#[derive(Clone, Copy, Debug)]
pub struct Undeliverable<'a> {
    /// Address that the packet was sent to.
    pub remote: IpAddr,
    /// Cause that the error names.
    pub why: NoAnswer,
    /// Beginning of the UDP payload, as the error quotes it. Anybody can make up such an error.
    pub quoted: &'a [u8],
}

/// How far a send came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sent {
    /// Bursts that were sent, or lost as the network may lose them (each loss is counted).
    pub bursts: usize,
    /// The send buffer is full. When it has room again, a [descriptor](Datapath::descriptors) is readable.
    pub blocked: bool,
}

/// How far a receive came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Received {
    /// Datagrams (or merged buffers) handed over.
    pub datagrams: usize,
    /// More may be waiting.
    pub more: bool,
}

/// Counts kept by a datapath.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DatapathCounters {
    /// System calls that sent something.
    pub tx_calls: u64,
    /// Bursts sent.
    pub tx_bursts: u64,
    /// Bursts that were sent packet by packet because segmentation was refused.
    pub tx_unsegmented: u64,
    /// Times the send buffer was full.
    pub tx_blocked: u64,
    /// Bursts lost because a packet is longer than the interface or the path takes.
    pub tx_too_long: u64,
    /// Bursts lost because the system had no buffers.
    pub tx_no_buffers: u64,
    /// Bursts lost because there is no way to the peer.
    pub tx_unreachable: u64,
    /// Bursts lost because a firewall rule forbids them.
    pub tx_forbidden: u64,
    /// Bursts lost for another reason.
    pub tx_errors: u64,
    /// System calls that received something.
    pub rx_calls: u64,
    /// Datagrams or merged buffers received.
    pub rx_datagrams: u64,
    /// Datagrams dropped because they were longer than any RoCE packet or came from an unknown address family.
    pub rx_malformed: u64,
    /// Receives that failed.
    pub rx_errors: u64,
    /// Packets that the kernel dropped because the receive buffer was full.
    pub rx_buffer_drops: u64,
}

impl DatapathCounters {
    /// Adds what another datapath has counted.
    pub fn add(&mut self, other: &Self) {
        self.tx_calls += other.tx_calls;
        self.tx_bursts += other.tx_bursts;
        self.tx_unsegmented += other.tx_unsegmented;
        self.tx_blocked += other.tx_blocked;
        self.tx_too_long += other.tx_too_long;
        self.tx_no_buffers += other.tx_no_buffers;
        self.tx_unreachable += other.tx_unreachable;
        self.tx_forbidden += other.tx_forbidden;
        self.tx_errors += other.tx_errors;
        self.rx_calls += other.rx_calls;
        self.rx_datagrams += other.rx_datagrams;
        self.rx_malformed += other.rx_malformed;
        self.rx_errors += other.rx_errors;
        self.rx_buffer_drops += other.rx_buffer_drops;
    }
}

/// Moves sealed packets. One thread at a time drives it, under the port's lock. None of the methods waits.
pub trait Datapath: Send {
    /// Returns its abilities.
    fn capabilities(&self) -> Capabilities;
    /// Sends bursts in order, until the send buffer is full.
    fn send(&mut self, bursts: &mut dyn Iterator<Item = Burst<'_>>) -> Sent;
    /// Receives about `budget` packets at most (with 1: one datagram, in one system call) and hands each datagram to `handle`.
    fn receive(&mut self, budget: usize, handle: &mut dyn FnMut(&Datagram<'_>)) -> Received;
    /// Receives what is sent to a multicast group on the interface that has the local address. Counted: as many leaves as
    /// joins end it. Afterwards there may be another descriptor.
    ///
    /// # Errors
    /// When the system refuses, or the datapath can't.
    fn join(&mut self, _group: IpAddr, _local: IpAddr) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Takes back one join.
    fn leave(&mut self, _group: IpAddr, _local: IpAddr) {}
    /// Begins or ends to keep ICMP errors about packets from [`Capabilities::mad_port`]. Meanwhile they make a descriptor ready.
    fn hear_undeliverable(&mut self, _on: bool) {}
    /// Hands over the ICMP errors that came since, and forgets them.
    fn undeliverable(&mut self, _handle: &mut dyn FnMut(&Undeliverable<'_>)) {}
    /// Returns the descriptors to watch for input: for packets, and for room after a send that [blocked](Sent::blocked). Those that were there before come first, in the same order, as long as they live.
    fn descriptors(&self) -> Vec<BorrowedFd<'_>>;
    /// Counts so far.
    fn counters(&self) -> DatapathCounters;
    /// Returns counts so far without a system call. Those that the kernel keeps may be missing.
    fn own_counters(&self) -> DatapathCounters {
        self.counters()
    }
    /// Sets the receive buffer and returns what the system granted.
    ///
    /// # Errors
    /// When the system refuses.
    fn set_receive_buffer(&mut self, bytes: usize) -> io::Result<usize>;
}

/// Receives a copy of every packet. A driver calls it under the port's lock.
pub trait Tap: Send {
    /// Takes a packet that was sent, or received (before any check). `index`: its position in a segmented send or merged buffer.
    fn packet(&mut self, from: SocketAddr, to: SocketAddr, index: u16, bytes: &[u8]);
}
