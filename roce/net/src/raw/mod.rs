//! The datapath over raw IP sockets, and over packet sockets (AF_PACKET), for hosts where a UDP socket won't do: the IPv4
//! Identification is set and seen, so that all 32 bits of each ICRC count, and frames can have a VLAN tag.
//!
//! Packets are built and parsed by `pnet`. Its channels are not used: they move one packet per system call and wait, where this
//! sends with `sendmmsg`, receives with `recvmmsg` and filters in the kernel ([`filter`]).
//!
//! Packet sockets send to neighbours; to addresses of this host a raw IP socket does, because the IP layer takes no frame from `lo`
//! for a loopback address. Both kinds of sockets see what the other sends there.

mod any_source;
mod filter;
mod frame;
mod hops;
mod merged;
mod reservation;
mod sockets;

use std::{
    collections::VecDeque,
    io,
    net::IpAddr,
    os::fd::{AsFd, BorrowedFd},
    time::Duration,
};

use roce_bth::ROCE_UDP_PORT;
use roce_port::{MAX_SEGMENTS, MAX_TRAIN_BYTES, RxMeta, Steering, Train};
use roce_verbs::Instant;
use smallvec::SmallVec;
use socket2::Socket;

pub use any_source::AnySource;

use self::{
    filter::{Accepted, Layer},
    hops::{Hops, Next},
    reservation::Reservation,
    sockets::Receiver,
};
use crate::{
    clock,
    datapath::{Capabilities, Datapath, DatapathCounters, Received, Sent, Undeliverable},
    group::Groups,
    iface,
    intake::Intake,
    losses::Losses,
    outgoing::Outgoing,
    scopes::Scopes,
    socket::{OpenError, UdpConfig, accept_nothing, context, grow_receive_buffers, receive_buffer},
    sys::{self, Framed, RoomWatch, SendQueue, Way},
};

/// Packets of one system call.
const SEND_BATCH: usize = 32;
/// The longest message: an Ethernet header and the longest IP packet.
const MAX_MESSAGE: usize = 14 + 40 + 65_535;
/// Packets that wait for link addresses, at most, and for how long: as the kernel keeps them.
const MAX_WAITING: usize = 101;
const WAIT: Duration = Duration::from_secs(3);

/// Kind of the sockets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wires {
    /// Raw IP.
    Ip,
    /// Packet, with the VLAN of all frames.
    Link(Option<u16>),
}

impl Wires {
    fn name(self) -> &'static str {
        match self {
            Self::Ip => "raw",
            Self::Link(_) => "packet",
        }
    }
}

/// Socket that packets leave by.
struct Senders {
    /// Raw IP sockets, by IP version.
    ip: Vec<(IpAddr, Socket)>,
    /// A packet socket, and where its frames go.
    link: Option<(Socket, Hops)>,
}

/// Packet that is kept.
struct Kept {
    packet: Outgoing,
    identification: u16,
    since: Instant,
}

/// Packets of one system call, all from one socket.
type Batch<'a> = SmallVec<[Framed<'a>; SEND_BATCH]>;

/// Interface and link address that a packet leaves for.
#[derive(Clone, Copy)]
enum Exit {
    Ip,
    Link(u32, frame::LinkHeader),
}

/// Raw IP or packet sockets.
pub(crate) struct RawDatapath {
    addr: IpAddr,
    shard: Option<(Steering, usize)>,
    reserved: Reservation,
    receivers: Vec<Receiver>,
    senders: Senders,
    trains: bool,
    /// Room in the send buffer that was full last.
    room: RoomWatch,
    queue: SendQueue,
    intake: Intake,
    /// Packets for which the send buffer had no room: all others wait for them.
    backlog: VecDeque<Kept>,
    /// Packets to neighbours whose link address is not known yet.
    waiting: VecDeque<Kept>,
    counters: DatapathCounters,
    losses: Losses,
    groups: Groups,
    scopes: Scopes,
}

impl RawDatapath {
    /// Opens the sockets of several loops that share an address, one datapath for each. Without steering there is one loop.
    ///
    /// # Errors
    /// Without CAP_NET_RAW, when the port is taken, or the address is not ours.
    pub(crate) fn open_shards(
        wires: Wires,
        config: &UdpConfig,
        steering: Option<Steering>,
    ) -> Result<Vec<Self>, OpenError> {
        let config = UdpConfig {
            addr: config.addr.to_canonical(),
            ..config.clone()
        };
        // Whoever lacks the right learns that first.
        drop(sockets::link_sender(wires.name())?);
        let interfaces = match wires {
            Wires::Ip => vec![],
            Wires::Link(_) => interfaces(wires.name(), config.addr)?,
        };
        let mains = reservation::bind(&config)?;
        let shards = 0..steering.map_or(1, Steering::shards);
        let open = |shard| {
            let shard = steering.map(|steering| (steering, shard));
            let reserved = Reservation::new(mains.clone(), config.send_sockets)?;
            Self::new(wires, &config, shard, reserved, &interfaces)
        };
        shards.map(open).collect()
    }

    fn new(
        wires: Wires,
        config: &UdpConfig,
        shard: Option<(Steering, usize)>,
        reserved: Reservation,
        interfaces: &[(u32, bool)],
    ) -> Result<Self, OpenError> {
        let name = wires.name();
        let accepted = accepted(config.addr, shard, &Groups::default());
        let addrs = || reserved.mains.iter().map(|(addr, _)| *addr);
        let ip = addrs().map(|addr| Ok((addr, sockets::ip_sender(name, addr)?)));
        let ip = ip.collect::<Result<_, OpenError>>()?;
        let (receivers, link) = match wires {
            Wires::Ip => {
                let open = |addr: IpAddr| Receiver::ip(name, addr.is_ipv4(), &accepted);
                (addrs().map(open).collect::<Result<_, _>>()?, None)
            }
            Wires::Link(vlan) => {
                let v4 = config.addr.is_ipv4();
                let open = |&(index, loopback): &(u32, bool)| {
                    let vlan = vlan.filter(|_| !loopback).unwrap_or(0);
                    Receiver::link(name, index, loopback, Layer::Link { v4, vlan }, &accepted)
                };
                let hops = Hops::new(vlan).map_err(context("opening a netlink socket"))?;
                let opened = interfaces.iter().map(open).collect::<Result<_, _>>()?;
                (opened, Some((sockets::link_sender(name)?, hops)))
            }
        };
        let this = Self {
            addr: config.addr,
            shard,
            reserved,
            receivers,
            senders: Senders { ip, link },
            trains: config.gso,
            room: RoomWatch::new().map_err(context("watching send buffers"))?,
            queue: SendQueue::new(SEND_BATCH).map_err(context("allocating send headers"))?,
            intake: Intake::new(MAX_MESSAGE).map_err(context("allocating receive buffers"))?,
            backlog: VecDeque::new(),
            waiting: VecDeque::new(),
            counters: DatapathCounters::default(),
            losses: Losses::default(),
            groups: Groups::default(),
            scopes: Scopes::default(),
        };
        grow_receive_buffers(this.receiving(), config.receive_buffer)?;
        Ok(this)
    }

    fn receiving(&self) -> impl Iterator<Item = &Socket> + Clone {
        self.receivers.iter().map(|receiver| &receiver.socket)
    }

    /// Returns the place of the raw IP socket that a train may leave from.
    fn family(&self, train: &Train<'_>) -> Option<usize> {
        let ours = train.src_port == ROCE_UDP_PORT || self.reserved.has(train.src_port);
        let v4 = train.remote.is_ipv4();
        let ip = self.senders.ip.iter();
        ip.filter(|_| ours)
            .position(|(addr, _)| addr.is_ipv4() == v4 && train.local.is_ipv4() == v4)
    }

    /// Returns where a train leaves. `None`: it is lost, which is counted, or waits for a link address.
    fn exit(&mut self, now: Instant, train: &Train<'_>, first: u16) -> Option<Exit> {
        if self.family(train).is_none() {
            self.counters.tx_errors += 1;
            return None;
        }
        let next = match &mut self.senders.link {
            None => Ok(Next::Here),
            Some((_, hops)) => hops.next(now, train.local, train.remote.ip()),
        };
        match next {
            Ok(Next::Here) => {
                self.scopes.note(train);
                Some(Exit::Ip)
            }
            Ok(Next::Link(index, header)) => Some(Exit::Link(index, header)),
            Ok(Next::Unresolved) => {
                self.wait(now, train, first);
                None
            }
            Err(e) => {
                self.losses.count(&mut self.counters, train, &e);
                None
            }
        }
    }

    /// Keeps the packets of a train until a link address is known. `first`: Identification of its first packet.
    fn wait(&mut self, now: Instant, train: &Train<'_>, first: u16) {
        for (index, packet) in train.packets().enumerate() {
            if self.waiting.len() >= MAX_WAITING {
                let full = io::Error::from_raw_os_error(libc::ENOBUFS);
                return self.losses.count(&mut self.counters, train, &full);
            }
            self.waiting.push_back(Kept {
                packet: Outgoing::new(train, packet.to_vec()),
                identification: first.wrapping_add(index as u16),
                since: now,
            });
        }
        if let Some((_, hops)) = &mut self.senders.link {
            hops.watch_changes();
        }
    }

    /// Sends the packets whose link address is known by now.
    fn retry_waiting(&mut self) {
        let Some((_, hops)) = &mut self.senders.link else {
            return;
        };
        if !hops.take_change() {
            return;
        }
        let now = clock::now();
        let waiting = std::mem::take(&mut self.waiting);
        for kept in waiting {
            if now.saturating_since(kept.since) > WAIT {
                let late = io::Error::from_raw_os_error(libc::EHOSTUNREACH);
                self.losses.count(&mut self.counters, &kept.packet.train(), &late);
                continue;
            }
            let waits = self.waiting.len();
            self.send_kept(now, &kept);
            if let Some(again) = self.waiting.get_mut(waits) {
                again.since = kept.since;
            }
        }
        if self.waiting.is_empty()
            && let Some((_, hops)) = &mut self.senders.link
        {
            hops.ignore_changes();
        }
    }

    /// Sends the packets for which there was no room. Returns false if there still is none.
    fn send_backlog(&mut self) -> bool {
        let now = clock::now();
        let mut backlog = std::mem::take(&mut self.backlog);
        while let Some(kept) = backlog.pop_front() {
            if !self.send_kept(now, &kept) {
                // It is in the new backlog, before the others.
                self.backlog.append(&mut backlog);
                return false;
            }
        }
        true
    }

    /// Sends a packet again that was kept. Returns false if there is no room.
    fn send_kept(&mut self, now: Instant, kept: &Kept) -> bool {
        let train = kept.packet.train();
        let Some(exit) = self.exit(now, &train, kept.identification) else {
            return true;
        };
        let mut batch = Batch::new();
        batch.push(framed(train, exit, kept.identification));
        self.transmit(now, &mut batch)
    }

    /// Sends packets, all from one socket, and empties the batch. Returns false if the send buffer is full: those that are left are in
    /// the backlog.
    fn transmit(&mut self, now: Instant, batch: &mut Batch<'_>) -> bool {
        let mut done = 0;
        while let Some(first) = batch.get(done) {
            let family = self.family(&first.train).unwrap_or(0);
            let (addr, ip) = &self.senders.ip[family];
            let socket = match (first.way, &self.senders.link) {
                (Way::Link(_), Some((socket, _))) => socket,
                _ => ip,
            };
            let origin = self.scopes.origin(addr.is_unspecified());
            match self.queue.send_framed(socket.as_fd(), &batch[done..], &origin) {
                Ok(sent) => {
                    self.counters.tx_calls += 1;
                    done += sent;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.counters.tx_blocked += 1;
                    if let Err(e) = self.room.arm(socket.as_fd()) {
                        // The next packet that arrives, or timer, sends the rest.
                        tracing::warn!("epoll_ctl of a full send buffer failed: {e}");
                    }
                    for packet in batch.drain(..).skip(done) {
                        self.keep(now, &packet.train, packet.identification);
                    }
                    return false;
                }
                Err(e) => {
                    self.losses.count(&mut self.counters, &first.train, &e);
                    done += 1;
                }
            }
        }
        batch.clear();
        true
    }

    /// Keeps a packet until there is room.
    fn keep(&mut self, now: Instant, packet: &Train<'_>, identification: u16) {
        self.backlog.push_back(Kept {
            packet: Outgoing::new(packet, packet.bytes.to_vec()),
            identification,
            since: now,
        });
    }

    /// Has all receivers accept packets to the groups that were joined.
    fn accept_groups(&self) -> io::Result<()> {
        let accepted = accepted(self.addr, self.shard, &self.groups);
        let done = self
            .receivers
            .iter()
            .try_for_each(|receiver| receiver.accept(&accepted));
        done.map_err(io::Error::other)
    }
}

/// Returns the packets that a datapath receives.
fn accepted(addr: IpAddr, shard: Option<(Steering, usize)>, groups: &Groups) -> Accepted {
    let addrs = match addr.is_unspecified() {
        true => vec![],
        false => std::iter::once(addr).chain(groups.all()).collect(),
    };
    Accepted { addrs, shard }
}

/// Returns the interfaces that packets to an address arrive at, and whether each is a loopback interface: its own, and `lo` for those
/// from this host.
fn interfaces(datapath: &'static str, addr: IpAddr) -> Result<Vec<(u32, bool)>, OpenError> {
    let unsuitable = |reason: String| OpenError::Unsuitable { datapath, addr, reason };
    if addr.is_unspecified() {
        return Err(unsuitable(
            "it needs an address of one interface; name a single one (`--addr`)".into(),
        ));
    }
    let failed = context("finding the interface");
    let own = iface::index_of(addr).map_err(|_| OpenError::NotLocal(addr))?;
    let all = iface::interfaces().map_err(failed)?;
    let name = |index| all.iter().find(|i| i.index == index).map_or("?", |i| &i.name);
    let loopbacks: Vec<u32> = all.iter().filter(|i| i.loopback).map(|i| i.index).collect();
    if !loopbacks.contains(&own) && !iface::is_ethernet(own).map_err(context("finding the interface"))? {
        let reason = format!("{} is no Ethernet interface; the raw datapath needs none", name(own));
        return Err(unsuitable(reason));
    }
    let mut found = vec![(own, loopbacks.contains(&own))];
    found.extend(
        loopbacks
            .into_iter()
            .filter(|index| *index != own)
            .map(|index| (index, true)),
    );
    Ok(found)
}

/// Makes a packet's headers.
fn framed<'a>(packet: Train<'a>, exit: Exit, identification: u16) -> Framed<'a> {
    match exit {
        Exit::Link(index, header) => Framed::new(packet, Way::Link(index), identification, |head| {
            header.write(head, &packet, identification)
        }),
        Exit::Ip => Framed::new(packet, Way::Ip, identification, |head| match packet.local {
            IpAddr::V4(_) => frame::write_ipv4(head, &packet, identification),
            // The kernel makes the IPv6 header, which has no Identification.
            IpAddr::V6(_) => frame::write_udp(head, &packet),
        }),
    }
}

/// Returns whether two packets can leave with one system call.
fn same_socket(a: &Framed<'_>, b: &Framed<'_>) -> bool {
    let link = |f: &Framed<'_>| matches!(f.way, Way::Link(_));
    link(a) == link(b) && a.train.remote.is_ipv4() == b.train.remote.is_ipv4()
}

impl Datapath for RawDatapath {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            max_segments: if self.trains { MAX_SEGMENTS } else { 1 },
            max_train_bytes: MAX_TRAIN_BYTES,
            src_ports: self.reserved.src_ports(),
            mad_port: self.reserved.mad_port(),
            receive_buffer: receive_buffer(self.receiving()),
        }
    }

    fn send(&mut self, trains: &mut dyn Iterator<Item = Train<'_>>) -> Sent {
        if !self.backlog.is_empty() && !self.send_backlog() {
            return Sent {
                trains: 0,
                blocked: true,
            };
        }
        let now = clock::now();
        let (mut done, mut blocked) = (0, false);
        let mut batch = Batch::new();
        while !blocked && let Some(train) = trains.next() {
            done += 1;
            let Some(exit) = self.exit(now, &train, 0) else {
                continue;
            };
            for (index, bytes) in train.packets().enumerate() {
                let packet = Train {
                    segment_len: bytes.len(),
                    bytes,
                    ..train
                };
                if blocked {
                    self.keep(now, &packet, index as u16);
                    continue;
                }
                let packet = framed(packet, exit, index as u16);
                let full = batch.len() == SEND_BATCH || batch.first().is_some_and(|first| !same_socket(first, &packet));
                if full && !self.transmit(now, &mut batch) {
                    blocked = true;
                    self.keep(now, &packet.train, packet.identification);
                } else {
                    batch.push(packet);
                }
            }
            self.counters.tx_bursts += 1;
        }
        blocked = blocked || !self.transmit(now, &mut batch);
        Sent { trains: done, blocked }
    }

    fn receive(&mut self, budget: usize, handle: &mut dyn FnMut(&RxMeta, &[u8])) -> Received {
        if self.room.clear() {
            self.send_backlog();
        }
        if !self.waiting.is_empty() {
            self.retry_waiting();
        }
        let (mut datagrams, mut more) = (0, false);
        for receiver in &self.receivers {
            // Each has its own budget, so that none starves another.
            let fd = receiver.socket.as_fd();
            let got = self
                .intake
                .receive(fd, budget, &mut self.counters, handle, |ring, i| receiver.read(ring, i));
            datagrams += got.datagrams;
            more |= got.more;
        }
        Received { datagrams, more }
    }

    fn join(&mut self, group: IpAddr, local: IpAddr) -> io::Result<()> {
        // By a socket that receives nothing: this has routers and the interface send the group here.
        let mains = self.reserved.mains.clone();
        let main = mains.iter().find(|(addr, _)| addr.is_ipv4() == group.is_ipv4());
        self.groups
            .join(group, local, main.map(|(_, socket)| socket.as_fd()), ROCE_UDP_PORT)?;
        for (_, socket) in self.groups.sockets() {
            accept_nothing(&socket)?;
        }
        self.accept_groups().inspect_err(|_| self.leave(group, local))
    }

    fn leave(&mut self, group: IpAddr, local: IpAddr) {
        let mains = self.reserved.mains.clone();
        let main = mains.iter().find(|(addr, _)| addr.is_ipv4() == group.is_ipv4());
        self.groups.leave(group, local, main.map(|(_, socket)| socket.as_fd()));
        if let Err(e) = self.accept_groups() {
            tracing::debug!("a left group is still received: {e}");
        }
    }

    fn hear_undeliverable(&mut self, on: bool) {
        self.reserved.hear_undeliverable(on);
    }

    fn undeliverable(&mut self, handle: &mut dyn FnMut(&Undeliverable<'_>)) {
        self.reserved.undeliverable(handle);
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let receiving = self.receiving().map(AsFd::as_fd);
        let mads = self.reserved.mad_sockets().map(AsFd::as_fd);
        let hops = self.senders.link.iter().map(|(_, hops)| hops.as_fd());
        receiving.chain(mads).chain([self.room.as_fd()]).chain(hops).collect()
    }

    fn own_counters(&self) -> DatapathCounters {
        self.counters
    }

    fn counters(&self) -> DatapathCounters {
        let drops = self.receiving().filter_map(|socket| sys::receive_drops(socket.as_fd()));
        DatapathCounters {
            rx_buffer_drops: drops.sum(),
            ..self.counters
        }
    }
}
