//! Datapaths: they move sealed packets between a port and the network.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::BorrowedFd,
};

use roce_port::{RxMeta, Train};
use roce_verbs::{counters, provider::NoAnswer};

/// The hop limit that sockets are set to; others cost a control message.
pub const DEFAULT_HOP_LIMIT: u8 = 64;

/// Returns the packets of a received datagram, or of several of one flow that the kernel merged (GRO).
pub fn packets<'a>(meta: &RxMeta, bytes: &'a [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a> {
    bytes.chunks(match meta.segment_len {
        0 => bytes.len().max(1),
        len => len,
    })
}

/// Abilities of a datapath.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// The most packets of a train; 1 when it can't segment.
    pub max_segments: usize,
    /// The most bytes of a train.
    pub max_train_bytes: usize,
    /// UDP ports that trains may come from.
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
    /// Trains that were sent, or lost as the network may lose them (each loss is counted).
    pub trains: usize,
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

counters! {
    /// Counters of a datapath.
    pub struct DatapathCounters;

    /// System calls that sent something.
    tx_calls,
    /// Trains sent.
    tx_bursts,
    /// Trains that were sent packet by packet because segmentation was refused.
    tx_unsegmented,
    /// Times the send buffer was full.
    tx_blocked,
    /// Trains lost because a packet is longer than the interface or the path takes.
    tx_too_long,
    /// Trains lost because the system had no buffers.
    tx_no_buffers,
    /// Trains lost because there is no way to the peer.
    tx_unreachable,
    /// Trains lost because a firewall rule forbids them.
    tx_forbidden,
    /// Trains lost for another reason.
    tx_errors,
    /// System calls that received something.
    rx_calls,
    /// Datagrams or merged buffers received.
    rx_datagrams,
    /// Datagrams dropped because they were longer than any RoCE packet or came from an unknown address family.
    rx_malformed,
    /// Receives that failed.
    rx_errors,
    /// Packets that the kernel dropped because the receive buffer was full.
    rx_buffer_drops,
}

/// Moves sealed packets. One thread at a time drives it, under the port's lock. None of the methods waits.
pub trait Datapath: Send {
    /// Returns its abilities.
    fn capabilities(&self) -> Capabilities;
    /// Sends trains in order, until the send buffer is full. Trains from a UDP port that is not among the [`Capabilities`] count as
    /// errors.
    fn send(&mut self, trains: &mut dyn Iterator<Item = Train<'_>>) -> Sent;
    /// Receives about `budget` packets at most (with 1: one datagram, in one system call) and hands each datagram to `handle`.
    fn receive(&mut self, budget: usize, handle: &mut dyn FnMut(&RxMeta, &[u8])) -> Received;
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
}

/// Trouble of a port that a capture may be taken for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trouble {
    /// A queue pair, or its send queue, has moved to an error state because of an error.
    QueuePair,
    /// A packet with a wrong ICRC has come.
    Icrc,
}

/// Receives a copy of every packet. A driver calls it under the port's lock.
pub trait Tap: Send {
    /// Takes a packet that was sent, or received (before any check). `index`: its position in a segmented send or merged buffer.
    fn packet(&mut self, from: SocketAddr, to: SocketAddr, index: u16, bytes: &[u8]);
    /// Takes notice that something has gone wrong. The packets that show it came before.
    fn trouble(&mut self, _what: Trouble) {}
}
