//! Send batch of a port: a staging slab of sealed packets, grouped into trains of one GSO send each.

use core::net::{IpAddr, Ipv4Addr, SocketAddr};

use roce_bth::{ICRC_LEN, Qpn, ROCE_UDP_PORT};
use roce_icrc::IpPair;
use roce_qp::{TxKind, TxSink};
use roce_verbs::AddressVector;
use smallvec::SmallVec;

use crate::{config::PortConfig, gso::Staging, path::TxPath, peer::Peers, qpn::udp_source_port};

/// Largest number of segments in one GSO send: `UDP_MAX_SEGMENTS` of Linux before 6.9, which rejects more.
pub const MAX_SEGMENTS: usize = 64;
/// Largest payload of a UDP datagram over IPv4, bytes. It also limits a whole GSO send.
pub const MAX_TRAIN_BYTES: usize = 65_507;
/// Smallest staging slab, bytes: holds at least one packet of any kind.
const MIN_CAPACITY: usize = 8 << 10;

/// Sizes of a [`TxBatch`].
#[derive(Clone, Debug)]
pub struct TxConfig {
    /// Puts several packets into one train. Off: each train is one packet.
    pub gso: bool,
    /// Largest number of packets in a train; at most [`MAX_SEGMENTS`].
    pub max_segments: usize,
    /// Largest size of a train, bytes; at most [`MAX_TRAIN_BYTES`].
    pub max_train_bytes: usize,
    /// Size of the staging slab, bytes. Should fit the processor's cache.
    pub capacity: usize,
}

impl Default for TxConfig {
    fn default() -> Self {
        Self {
            gso: true,
            max_segments: MAX_SEGMENTS,
            max_train_bytes: MAX_TRAIN_BYTES,
            capacity: 256 << 10,
        }
    }
}

struct TrainRecord {
    path: TxPath,
    src: Qpn,
    dest: Qpn,
    start: usize,
    len: usize,
    segment_len: usize,
    segments: usize,
    /// Another packet of at most `segment_len` bytes may follow.
    open: bool,
}

/// Staging slab of sealed packets. [`crate::Port::poll_transmit`] fills it, the datapath sends and clears it.
pub struct TxBatch {
    config: TxConfig,
    slab: Box<[u8]>,
    used: usize,
    /// Offset of the last packet.
    last: usize,
    trains: Vec<TrainRecord>,
}

/// Packets to one queue pair, for one send (`UDP_SEGMENT`).
///
/// All are `segment_len` bytes long but the last, which may be shorter. Packet *i* is sealed with IPv4 Identification
/// *i*, because Linux numbers the segments of a GSO send so.
#[derive(Clone, Copy, Debug)]
pub struct Train<'a> {
    /// Our address.
    pub local: IpAddr,
    /// The peer's address and the RoCE port.
    pub remote: SocketAddr,
    /// Our UDP port.
    pub src_port: u16,
    /// TOS or traffic class.
    pub tos: u8,
    /// TTL or hop limit.
    pub ttl: u8,
    /// Bytes of each packet but the last; not zero.
    pub segment_len: usize,
    /// The packets back to back.
    pub bytes: &'a [u8],
}

impl<'a> Train<'a> {
    /// Returns the number of packets.
    pub fn segments(&self) -> usize {
        self.bytes.len().div_ceil(self.segment_len.max(1))
    }

    /// Iterates over the packets in the order of their Identifications.
    pub fn packets(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.bytes.chunks(self.segment_len.max(1))
    }
}

impl core::fmt::Debug for TxBatch {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("TxBatch")
            .field("used", &self.used)
            .field("trains", &self.trains.len())
            .finish_non_exhaustive()
    }
}

impl TxBatch {
    /// Creates an empty batch. Clamps sizes to the limits of Linux.
    pub fn new(mut config: TxConfig) -> Self {
        config.max_segments = config.max_segments.clamp(1, MAX_SEGMENTS);
        config.max_train_bytes = config.max_train_bytes.min(MAX_TRAIN_BYTES);
        config.capacity = config.capacity.max(MIN_CAPACITY);
        Self {
            slab: vec![0; config.capacity].into_boxed_slice(),
            used: 0,
            last: 0,
            trains: Vec::new(),
            config,
        }
    }

    /// Iterates over the trains in sending order.
    pub fn trains(&self) -> impl ExactSizeIterator<Item = Train<'_>> {
        self.trains.iter().map(|t| Train {
            local: t.path.flow.ip.src(),
            remote: SocketAddr::new(t.path.flow.ip.dst(), ROCE_UDP_PORT),
            src_port: t.path.flow.src_port,
            tos: t.path.tos,
            ttl: t.path.ttl,
            segment_len: t.segment_len,
            bytes: &self.slab[t.start..t.start + t.len],
        })
    }

    /// Iterates over our queue pair of each train. A train of datagrams may have packets of others, too.
    pub fn senders(&self) -> impl ExactSizeIterator<Item = Qpn> {
        self.trains.iter().map(|t| t.src)
    }

    /// Returns whether no train is staged.
    pub fn is_empty(&self) -> bool {
        self.trains.is_empty()
    }

    /// Brings trains from the same UDP port together, so that one system call sends them. Trains from one port keep their order, and ports
    /// that of their first trains.
    pub fn group(&mut self) {
        let port = |train: &TrainRecord| train.path.flow.src_port;
        if self.trains.is_sorted_by(|a, b| port(a) == port(b)) {
            return;
        }
        let mut ports = SmallVec::<[u16; 8]>::new();
        for port in self.trains.iter().map(port) {
            if !ports.contains(&port) {
                ports.push(port);
            }
        }
        self.trains
            .sort_by_key(|train| ports.iter().position(|known| *known == port(train)));
    }

    /// Removes all trains; the slab is reused.
    pub fn clear(&mut self) {
        self.used = 0;
        self.last = 0;
        self.trains.clear();
    }

    /// Returns the clamped sizes.
    pub fn config(&self) -> &TxConfig {
        &self.config
    }

    /// Returns whether a packet of `len` bytes without ICRC fits.
    pub(crate) fn has_room(&self, len: usize) -> bool {
        self.slab.len() - self.used >= len.saturating_add(ICRC_LEN)
    }

    /// Lets no further packet join the last train.
    pub(crate) fn close_train(&mut self) {
        if let Some(train) = self.trains.last_mut() {
            train.open = false;
        }
    }

    /// Returns whether the last train is one of packets to this receiver.
    fn leads_to(&self, path: &TxPath, dest: Qpn) -> bool {
        self.trains.last().is_some_and(|t| {
            t.dest == dest && t.path.flow == path.flow && t.path.tos == path.tos && t.path.ttl == path.ttl
        })
    }

    /// Returns whether a packet of `total` bytes to the receiver of the last train may join it.
    fn has_place(&self, total: usize) -> bool {
        self.config.gso
            && self.trains.last().is_some_and(|t| {
                t.open
                    && total <= t.segment_len
                    && t.segments < self.config.max_segments
                    && t.len + total <= self.config.max_train_bytes
            })
    }

    /// Returns whether this batch should accept a packet of `len` bytes without ICRC. `joins`: it joins the last train.
    ///
    /// Leaves a train that the end of the slab would cut short to the next batch.
    fn accepts(&self, len: usize, alone: bool, joins: bool) -> bool {
        let free = self.slab.len() - self.used;
        self.has_room(len)
            && (alone
                || joins
                || !self.config.gso
                || free >= self.config.max_train_bytes
                || self.used < self.slab.len() / 2)
    }

    /// Returns the last packet.
    fn last(&self) -> &[u8] {
        &self.slab[self.last..self.used]
    }

    /// Seals the packet just written and adds it to the last train or a new one. Returns its index in the train.
    fn commit(&mut self, path: &mut TxPath, [src, dest]: [Qpn; 2], packet: &Reserved) -> usize {
        let total = packet.len + ICRC_LEN;
        let start = self.used;
        let index = match self.trains.last_mut().filter(|_| packet.joins) {
            Some(train) => {
                train.len += total;
                train.segments += 1;
                train.open = total == train.segment_len;
                train.segments - 1
            }
            None => {
                self.trains.push(TrainRecord {
                    path: *path,
                    src,
                    dest,
                    start,
                    len: total,
                    segment_len: total,
                    segments: 1,
                    open: !packet.alone,
                });
                0
            }
        };
        path.prefix.seal(index as u16, &mut self.slab[start..start + total]);
        self.last = start;
        self.used += total;
        index
    }
}

/// Statistics of the packets that a sink staged.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Staged {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) retransmissions: u64,
    /// Statistics that show whether trains reach the peer.
    pub(crate) trains: Staging,
}

/// Packet sink of one queue pair for one turn.
pub(crate) struct QpSink<'a> {
    batch: &'a mut TxBatch,
    path: TxPath,
    src: Qpn,
    dest: Qpn,
    /// Resolves the receiver of each datagram. `None` for connected queue pairs.
    directory: Option<Directory<'a>>,
    /// The peer receives trains of several packets.
    gso: bool,
    /// Packets left to stage in this turn.
    budget: usize,
    /// Whether the batch's last train leads to the receiver.
    continues: bool,
    reserved: Option<Reserved>,
    pub(crate) staged: Staged,
    /// The slab, not the turn's budget, has rejected a packet.
    pub(crate) full: bool,
}

/// Packet that is being written.
struct Reserved {
    kind: TxKind,
    len: usize,
    /// It must not share a train.
    alone: bool,
    /// It joins the last train.
    joins: bool,
}

/// Resolves the receivers of a datagram queue pair to paths.
pub(crate) struct Directory<'a> {
    pub(crate) config: &'a PortConfig,
    pub(crate) peers: &'a Peers,
    /// The sender.
    pub(crate) qpn: Qpn,
    /// The queue pair's last receiver.
    pub(crate) last: &'a mut Option<Receiver>,
}

/// Receiver of datagrams, with the path to it.
#[derive(Clone, Copy)]
pub(crate) struct Receiver {
    to: AddressVector,
    dest: Qpn,
    path: TxPath,
    /// Whether trains arrive there; `None`: only if the peer has proved it.
    gso: Option<bool>,
}

impl Directory<'_> {
    fn resolve(&self, to: &AddressVector, dest: Qpn) -> Option<Receiver> {
        let av = self.config.path(to).ok()?;
        let default_port = || self.config.src_port(udp_source_port(self.qpn, dest));
        let src_port = self.config.requested_port(&av).unwrap_or_else(default_port);
        Some(Receiver {
            to: *to,
            dest,
            path: self.config.tx_path(&av, src_port)?,
            gso: match av.is_multicast() {
                true => Some(false),
                false => self.config.is_on_host(&av).then_some(true),
            },
        })
    }
}

impl<'a> QpSink<'a> {
    /// Creates the sink of a datagram queue pair, which sets the receiver of each packet.
    pub(crate) fn directed(batch: &'a mut TxBatch, directory: Directory<'a>, budget: usize) -> Self {
        let (src, dst) = (Ipv4Addr::UNSPECIFIED, Ipv4Addr::UNSPECIFIED);
        let unset = || TxPath::new(IpPair::V4 { src, dst }, 0, 0, 0);
        let path = directory.last.map_or_else(unset, |last| last.path);
        let ends = [directory.qpn, Qpn::default()];
        Self {
            directory: Some(directory),
            ..Self::new(batch, &path, ends, false, budget)
        }
    }

    /// Creates the sink of a queue pair for packets to a peer's: `[ours, theirs]`.
    pub(crate) fn new(batch: &'a mut TxBatch, path: &TxPath, [src, dest]: [Qpn; 2], gso: bool, budget: usize) -> Self {
        Self {
            continues: batch.leads_to(path, dest),
            batch,
            path: *path,
            src,
            dest,
            directory: None,
            gso,
            budget,
            reserved: None,
            staged: Staged::default(),
            full: false,
        }
    }
}

impl TxSink for QpSink<'_> {
    fn reserve(&mut self, kind: TxKind, len: usize) -> Option<&mut [u8]> {
        self.reserved = None;
        if self.budget == 0 {
            return None;
        }
        let alone = kind.is_again() || !self.gso;
        let joins = !alone && self.continues && self.batch.has_place(len + ICRC_LEN);
        if !self.batch.accepts(len, alone, joins) {
            self.full = true;
            return None;
        }
        self.reserved = Some(Reserved {
            kind,
            len,
            alone,
            joins,
        });
        let at = self.batch.used;
        Some(&mut self.batch.slab[at..at + len])
    }

    fn commit(&mut self) {
        let Some(packet) = self.reserved.take() else { return };
        let index = self.batch.commit(&mut self.path, [self.src, self.dest], &packet);
        self.continues = true;
        self.budget -= 1;
        self.staged.packets += 1;
        self.staged.bytes += (packet.len + ICRC_LEN) as u64;
        self.staged.retransmissions += u64::from(packet.kind.is_again());
        self.staged.trains.note(packet.kind, index, self.batch.last());
    }

    fn direct(&mut self, to: &AddressVector, dest: Qpn) -> bool {
        let Some(d) = &mut self.directory else { return false };
        if d.last.is_none_or(|last| last.to != *to || last.dest != dest) {
            *d.last = d.resolve(to, dest);
        }
        let Some(receiver) = &*d.last else { return false };
        // UD has no acknowledgements that would reveal lost trains: send them only where they are known to arrive.
        let remote = receiver.path.flow.ip.dst();
        self.gso = receiver.gso.unwrap_or_else(|| d.peers.gso_proven(remote));
        self.path = receiver.path;
        self.dest = dest;
        self.continues = self.batch.leads_to(&self.path, dest);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use roce_icrc::IpPair;

    fn path(remote: u8) -> TxPath {
        let ip = IpPair::try_from((IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, remote]))).unwrap();
        TxPath::new(ip, 0xc123, 0, 64)
    }

    fn stage(batch: &mut TxBatch, path: &TxPath, dest: u32, kind: TxKind, len: usize) {
        let mut sink = QpSink::new(batch, path, [Qpn::new(9), Qpn::new(dest)], true, 1000);
        sink.reserve(kind, len).unwrap().fill(len as u8);
        sink.commit();
    }

    fn shape(batch: &TxBatch) -> Vec<(usize, usize, usize)> {
        batch
            .trains()
            .map(|t| (t.segment_len, t.segments(), t.bytes.len()))
            .collect()
    }

    #[test]
    fn trains_of_one_port_come_together_in_their_order() {
        let mut b = TxBatch::new(TxConfig::default());
        for (port, dest) in [(2, 1), (1, 2), (2, 3), (3, 4), (1, 5)] {
            let mut path = path(1);
            path.flow.src_port = port;
            stage(&mut b, &path, dest, TxKind::Request, 40);
        }
        b.group();
        let order: Vec<_> = b
            .trains
            .iter()
            .map(|t| (t.path.flow.src_port, t.dest.value()))
            .collect();
        assert_eq!(order, [(2, 1), (2, 3), (1, 2), (1, 5), (3, 4)]);
    }

    #[test]
    fn equal_packets_form_a_train_and_a_shorter_one_ends_it() {
        let mut b = TxBatch::new(TxConfig::default());
        let p = path(2);
        for len in [96, 96, 96, 40, 40] {
            stage(&mut b, &p, 7, TxKind::Request, len);
        }
        assert_eq!(shape(&b), [(100, 4, 344), (44, 1, 44)]);
        assert!(b.senders().all(|qpn| qpn == Qpn::new(9)));
        for train in b.trains() {
            for (i, packet) in train.packets().enumerate() {
                assert!(p.flow.verify(i as u16, packet), "packet {i}");
                assert!(!p.flow.verify(i as u16 + 1, packet));
            }
        }
        b.clear();
        assert!(b.is_empty());
    }

    #[test]
    fn a_longer_packet_another_queue_pair_or_another_peer_starts_a_train() {
        let mut b = TxBatch::new(TxConfig::default());
        let (p, q) = (path(2), path(3));
        stage(&mut b, &p, 7, TxKind::Request, 96);
        stage(&mut b, &p, 7, TxKind::Request, 100);
        stage(&mut b, &p, 8, TxKind::Request, 100);
        stage(&mut b, &q, 8, TxKind::Request, 100);
        assert_eq!(b.trains().len(), 4);
    }

    #[test]
    fn no_packet_joins_a_closed_train() {
        let mut b = TxBatch::new(TxConfig::default());
        b.close_train();
        let p = path(2);
        stage(&mut b, &p, 7, TxKind::Request, 96);
        stage(&mut b, &p, 7, TxKind::Request, 96);
        b.close_train();
        stage(&mut b, &p, 7, TxKind::Request, 96);
        assert_eq!(shape(&b), [(100, 2, 200), (100, 1, 100)]);
    }

    #[test]
    fn retransmissions_are_sent_alone() {
        let mut b = TxBatch::new(TxConfig::default());
        let p = path(2);
        for kind in [
            TxKind::Request,
            TxKind::Retransmission,
            TxKind::Retransmission,
            TxKind::Request,
        ] {
            stage(&mut b, &p, 7, kind, 96);
        }
        assert!(b.trains().all(|t| t.segments() == 1));
    }

    #[test]
    fn limits_of_a_train_and_of_the_slab_are_enforced() {
        let mut b = TxBatch::new(TxConfig {
            gso: true,
            max_segments: 3,
            max_train_bytes: 250,
            capacity: 0,
        });
        let p = path(2);
        for _ in 0..4 {
            stage(&mut b, &p, 7, TxKind::Request, 96);
        }
        assert_eq!(shape(&b), [(100, 2, 200), (100, 2, 200)]);
        let mut sink = QpSink::new(&mut b, &p, [Qpn::new(9), Qpn::new(7)], true, 1000);
        while sink.reserve(TxKind::Request, 96).is_some() {
            sink.commit();
        }
        assert!(sink.full);
        let total: usize = b.trains().map(|t| t.bytes.len()).sum();
        // No train starts that the slab's end would cut short.
        assert!(
            total.is_multiple_of(200) && total + 250 + 200 > MIN_CAPACITY && total <= MIN_CAPACITY,
            "{total}"
        );
    }

    #[test]
    fn a_reservation_that_is_not_committed_leaves_nothing() {
        let mut b = TxBatch::new(TxConfig::default());
        let p = path(2);
        let mut sink = QpSink::new(&mut b, &p, [Qpn::new(9), Qpn::new(7)], true, 2);
        assert!(sink.reserve(TxKind::Request, 96).is_some());
        assert!(sink.reserve(TxKind::Ack, 16).is_some());
        sink.commit();
        sink.commit();
        assert_eq!(sink.staged.packets, 1);
        assert_eq!(shape(&b), [(20, 1, 20)]);
    }
}
