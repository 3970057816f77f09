//! The datapath over ordinary UDP sockets: no privilege, no kernel module.
//!
//! The sockets are never connected, and set to `IP_PMTUDISC_PROBE`, so that packets leave with DF set and Identification 0
//! (segment *i* of a GSO send: *i*), which is what their ICRCs were made with.

use std::{
    io, mem,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use nix::sys::socket::{
    setsockopt,
    sockopt::{UdpGroSegment, UdpGsoSegment},
};
use roce_icrc::Flow;
use roce_port::{MAX_SEGMENTS, MAX_TRAIN_BYTES, RxMeta, Steering, Train};
use socket2::Socket;

use crate::{
    clock,
    datapath::{Capabilities, Datapath, DatapathCounters, Received, Sent, Undeliverable},
    group::Groups,
    intake::Intake,
    losses::Losses,
    scopes::Scopes,
    senders,
    socket::{Family, OpenError, UdpConfig, adopt, context, grow_receive_buffers, receive_buffer},
    steer,
    sys::{self, SendQueue},
    undeliverable,
    unsegmented::Unsegmented,
};

/// Trains of one system call.
const SEND_BATCH: usize = 32;
/// The longest UDP payload.
const MAX_DATAGRAM: usize = 65_536;
/// Sockets that somebody else (a broker) has opened: one member of each reuseport group, for one process of several
/// behind one address.
#[derive(Clone, Debug, Default)]
pub struct OpenSockets {
    /// To receive on: UDP sockets bound to the RoCE port, one for each IP version at most. Beside one for all addresses there
    /// may be such for single ones, whose packets the kernel gives to these.
    pub receivers: Vec<Arc<OwnedFd>>,
    /// Kept open as long as the datapath lives, and not used: the other members of the groups, so that no member
    /// changes its place when its process ends.
    pub held: Vec<Arc<OwnedFd>>,
}

/// UDP sockets on the RoCE port.
pub struct UdpDatapath {
    port: u16,
    /// Sockets by IP version. Those that receive what comes to a single address, next to one for all, come last and send nothing.
    families: Vec<Family>,
    /// Which sender of each family is for management datagrams alone.
    mad_sender: Option<usize>,
    /// ICMP errors about those are kept.
    hears: bool,
    /// Room in the send buffer that was full last.
    room: sys::RoomWatch,
    queue: SendQueue,
    intake: Intake,
    gso: bool,
    unsegmented: Unsegmented,
    gro: bool,
    counters: DatapathCounters,
    losses: Losses,
    /// Packet that is sent on its own.
    scratch: Vec<u8>,
    /// Other members of the sockets' groups.
    _held: Vec<Arc<OwnedFd>>,
    groups: Groups,
    scopes: Scopes,
}

impl UdpDatapath {
    /// Binds the sockets.
    ///
    /// # Errors
    /// When the port is taken or the address is not ours.
    pub fn open(config: &UdpConfig) -> Result<Self, OpenError> {
        let mut one = Self::open_shards(config, None)?;
        one.pop().ok_or(OpenError::NotLocal(config.addr))
    }

    /// Receives on sockets that are open already; opens those to send from. Of the settings `addr` and `port` are not
    /// used: the sockets have theirs.
    ///
    /// # Errors
    /// When a socket is not a bound UDP socket, or two are of one IP version, neither of them for all addresses.
    pub fn from_sockets(config: &UdpConfig, sockets: &OpenSockets) -> Result<Self, OpenError> {
        let refused = context("taking over UDP sockets");
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text);
        let mut taken = Vec::new();
        for fd in &sockets.receivers {
            taken.push(adopt(fd).map_err(context("taking over a UDP socket"))?);
        }
        let port = taken.first().map(|(_, at)| at.port());
        let port = port.ok_or_else(|| refused(invalid("there is none")))?;
        if taken.iter().any(|(_, at)| at.port() != port) {
            return Err(refused(invalid("two UDP ports")));
        }
        // Those for all addresses first: what leaves is sent by one of these.
        taken.sort_by_key(|(_, at)| !at.ip().is_unspecified());
        let (mut families, mut singles) = (Vec::<Family>::new(), Vec::new());
        for (socket, at) in taken {
            let family = Family::of(socket, at.ip())?;
            match families.iter().find(|f| f.addr.is_ipv4() == at.is_ipv4()) {
                None => families.push(family),
                Some(all) if all.bound().is_none() && family.bound().is_some() => singles.push(family),
                Some(_) => return Err(refused(invalid("two of one IP version"))),
            }
        }
        let config = UdpConfig { port, ..config.clone() };
        Self::with_sockets(&config, families, singles, sockets.held.clone())
    }

    /// Binds the sockets of several loops that share an address, one datapath for each; the kernel steers packets to them by
    /// queue pair number. Each has senders of its own. Without steering there is one loop.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_shards(config: &UdpConfig, steering: Option<Steering>) -> Result<Vec<Self>, OpenError> {
        let shards = steer::open_receivers(config, steering)?.into_iter();
        shards
            .map(|shard| Self::with_sockets(config, shard.families, vec![], shard.held))
            .collect()
    }

    fn with_sockets(
        config: &UdpConfig,
        mut families: Vec<Family>,
        singles: Vec<Family>,
        held: Vec<Arc<OwnedFd>>,
    ) -> Result<Self, OpenError> {
        let addrs: Vec<IpAddr> = families.iter().map(|f| f.addr).collect();
        // Errors that ICMP reports of requests must not hold up data: those have a socket of their own.
        let mad_sender = (config.send_sockets > 0).then_some(config.send_sockets);
        for _ in 0..config.send_sockets + usize::from(mad_sender.is_some()) {
            let (port, sockets) = senders::bind(&addrs)?;
            for (family, socket) in families.iter_mut().zip(sockets) {
                family.senders.push((port, socket));
            }
        }
        families.extend(singles);
        let mut this = Self {
            port: config.port,
            families,
            mad_sender,
            hears: false,
            room: sys::RoomWatch::new().map_err(context("watching send buffers"))?,
            queue: SendQueue::new(SEND_BATCH).map_err(context("allocating send headers"))?,
            intake: Intake::new(MAX_DATAGRAM).map_err(context("allocating receive buffers"))?,
            gso: config.gso,
            unsegmented: Unsegmented::default(),
            gro: config.gro,
            counters: DatapathCounters::default(),
            losses: Losses::default(),
            scratch: vec![],
            _held: held,
            groups: Groups::default(),
            scopes: Scopes::default(),
        };
        if this.gro {
            let merge = |f: &Family| setsockopt(&f.main, UdpGroSegment, &true);
            if let Err(e) = this.families.iter().try_for_each(merge) {
                tracing::info!("UDP_GRO is refused ({e}): packets are received one by one");
                this.gro = false;
            }
        }
        if this.gso && !this.segmentation_available() {
            tracing::info!("UDP_SEGMENT is refused: packets are sent one by one");
            this.gso = false;
        }
        grow_receive_buffers(this.receivers(), config.receive_buffer)?;
        Ok(this)
    }

    /// Returns the sockets that management datagrams leave from, and whether each is of IPv4.
    fn mad_senders(&self) -> impl Iterator<Item = (&Socket, bool)> {
        self.families.iter().filter_map(|f| {
            let (_, socket) = f.senders.get(self.mad_sender?)?;
            Some((socket, f.addr.is_ipv4()))
        })
    }

    /// Asks the kernel whether it knows UDP_SEGMENT, without keeping it set.
    fn segmentation_available(&self) -> bool {
        let all = |size| self.sockets().all(|s| setsockopt(s, UdpGsoSegment, &size).is_ok());
        all(1024) && all(0)
    }

    fn receivers(&self) -> impl Iterator<Item = &Socket> + Clone {
        self.families.iter().map(|f| &f.main)
    }

    fn sockets(&self) -> impl Iterator<Item = &Socket> {
        self.families
            .iter()
            .flat_map(|f| std::iter::once(&f.main).chain(f.senders.iter().map(|(_, s)| s)))
    }

    /// Sends trains that all leave from the same socket. Returns how many; if fewer than all, the send buffer is full.
    fn send_chunk(&mut self, route: Route, trains: &[Train<'_>]) -> usize {
        let mut done = 0;
        while let Some(first) = trains.get(done) {
            let to = first.remote.ip();
            let refused =
                first.segments() > 1 && !self.unsegmented.is_empty() && self.unsegmented.has(clock::now(), to);
            let sent = match refused {
                true => self.send_one_by_one(route, first).then_some(1),
                false => match self.transmit(route, &trains[done..]) {
                    Ok(n) => {
                        self.counters.tx_calls += 1;
                        self.counters.tx_bursts += n as u64;
                        Some(n)
                    }
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => None,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => Some(0),
                    Err(e) => self.train_failed(route, first, &e).then_some(1),
                },
            };
            let Some(sent) = sent else {
                self.counters.tx_blocked += 1;
                if let Err(e) = self.room.arm(route.socket(&self.families).as_fd()) {
                    // The next packet that arrives, or timer, sends the rest.
                    tracing::warn!("epoll_ctl of a full send buffer failed: {e}");
                }
                break;
            };
            done += sent;
        }
        done
    }

    /// Sends as many trains as one system call takes.
    fn transmit(&mut self, route: Route, trains: &[Train<'_>]) -> io::Result<usize> {
        let origin = self.scopes.origin(self.families[route.family].addr.is_unspecified());
        let socket = route.socket(&self.families).as_fd();
        let sent = self.queue.send(socket, trains, &origin);
        // An earlier packet's error may have been reported, which a socket does once.
        match sent.is_err() && self.hears && route.sender == self.mad_sender {
            true => self.queue.send(socket, trains, &origin),
            false => sent,
        }
    }

    /// Handles a train that was refused. Segmentation may be to blame; otherwise it is lost, as a network may lose it. False: it has to be
    /// sent when there is room.
    fn train_failed(&mut self, route: Route, train: &Train<'_>, error: &io::Error) -> bool {
        let code = error.raw_os_error().unwrap_or(0);
        if train.segments() > 1 && matches!(code, libc::EIO | libc::EINVAL | libc::EOPNOTSUPP) {
            if self.unsegmented.on_refused(clock::now(), train.remote.ip()) {
                let to = train.remote.ip();
                tracing::warn!(
                    "a segmented send to {to} was refused ({error}): packets go there one by one for a while"
                );
            }
            return self.send_one_by_one(route, train);
        }
        self.losses.count(&mut self.counters, train, error);
        true
    }

    /// Sends the packets of a train each on its own. Each then carries Identification 0, so it is sealed again. False: the send
    /// buffer is full, and nothing was sent.
    fn send_one_by_one(&mut self, route: Route, train: &Train<'_>) -> bool {
        let local = SocketAddr::new(train.local, train.src_port);
        let Ok(flow) = Flow::try_from((local, train.remote)) else {
            return true;
        };
        for (index, packet) in train.packets().enumerate() {
            let mut bytes = mem::take(&mut self.scratch);
            bytes.clear();
            bytes.extend_from_slice(packet);
            flow.seal(0, &mut bytes);
            let single = Train {
                segment_len: packet.len(),
                bytes: &bytes,
                ..*train
            };
            let sent = self.transmit(route, &[single]);
            self.scratch = bytes;
            match sent {
                Ok(_) => self.counters.tx_calls += 1,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && index == 0 => return false,
                Err(e) => self.losses.count(&mut self.counters, train, &e),
            }
        }
        self.counters.tx_unsegmented += 1;
        true
    }

    /// Returns the socket that a train must leave from.
    fn route(&self, train: &Train<'_>) -> Option<Route> {
        let family = self.position(train.remote.ip())?;
        let senders = &self.families[family].senders;
        let sender = senders.iter().position(|(port, _)| *port == train.src_port);
        (sender.is_some() || train.src_port == self.port).then_some(Route { family, sender })
    }

    /// Returns the place of the sockets that reach an address.
    fn position(&self, ip: IpAddr) -> Option<usize> {
        self.families.iter().position(|f| f.addr.is_ipv4() == ip.is_ipv4())
    }
}

/// Socket that trains leave from: a sender of a family, or its receiving socket.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Route {
    family: usize,
    sender: Option<usize>,
}

impl Route {
    fn socket(self, families: &[Family]) -> &Socket {
        let family = &families[self.family];
        self.sender.map_or(&family.main, |sender| &family.senders[sender].1)
    }
}

impl Datapath for UdpDatapath {
    fn capabilities(&self) -> Capabilities {
        let senders = self.families.first().map_or(&[][..], |f| &f.senders);
        let mut src_ports: Vec<u16> = senders.iter().map(|(port, _)| *port).collect();
        let mad_port = self.mad_sender.map(|at| src_ports.remove(at));
        Capabilities {
            mad_port,
            max_segments: if self.gso { MAX_SEGMENTS } else { 1 },
            max_train_bytes: MAX_TRAIN_BYTES,
            src_ports,
            receive_buffer: receive_buffer(self.receivers()),
        }
    }

    fn send(&mut self, trains: &mut dyn Iterator<Item = Train<'_>>) -> Sent {
        let (mut done, mut blocked) = (0, false);
        let mut trains = trains.peekable();
        while !blocked && let Some(first) = trains.next() {
            let Some(route) = self.route(&first) else {
                self.counters.tx_errors += 1;
                done += 1;
                continue;
            };
            let mut chunk = smallvec::SmallVec::<[Train<'_>; SEND_BATCH]>::new();
            chunk.push(first);
            while chunk.len() < self.queue.capacity()
                && let Some(next) = trains.next_if(|b| self.route(b) == Some(route))
            {
                chunk.push(next);
            }
            chunk.iter().for_each(|train| self.scopes.note(train));
            let sent = self.send_chunk(route, &chunk);
            done += sent;
            blocked = sent < chunk.len();
        }
        Sent { trains: done, blocked }
    }

    fn receive(&mut self, budget: usize, handle: &mut dyn FnMut(&RxMeta, &[u8])) -> Received {
        let (mut datagrams, mut more) = (0, false);
        self.room.clear();
        let main = self.families.iter().map(|f| (f.main.as_fd(), f.bound()));
        let groups = self.groups.sockets().map(|(group, socket)| (socket, Some(group)));
        for (socket, bound) in main.chain(groups) {
            // Each has its own budget, so that none starves another.
            let got = self
                .intake
                .receive(socket, budget, &mut self.counters, handle, |ring, i| {
                    ring.slot(i, bound)
                });
            datagrams += got.datagrams;
            more |= got.more;
        }
        Received { datagrams, more }
    }

    fn join(&mut self, group: IpAddr, local: IpAddr) -> io::Result<()> {
        let family = self.position(group).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let family = &self.families[family];
        // A socket that is bound to one address gets nothing that is sent to a group: those have sockets of their own.
        let main = family.addr.is_unspecified().then(|| family.main.as_fd());
        self.groups.join(group, local, main, self.port)
    }

    fn leave(&mut self, group: IpAddr, local: IpAddr) {
        let main = self.position(group).map(|at| self.families[at].main.as_fd());
        self.groups.leave(group, local, main);
    }

    fn hear_undeliverable(&mut self, on: bool) {
        self.hears = on;
        for (socket, v4) in self.mad_senders() {
            if let Err(e) = undeliverable::hear(socket, v4, on) {
                tracing::debug!("IP_RECVERR is refused: {e}");
            }
        }
    }

    fn undeliverable(&mut self, handle: &mut dyn FnMut(&Undeliverable<'_>)) {
        for (socket, _) in self.mad_senders() {
            undeliverable::take(socket.as_fd(), handle);
        }
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let main = self.families.iter().map(|f| f.main.as_fd());
        let mads = self.mad_senders().map(|(socket, _)| socket.as_fd());
        let groups = self.groups.sockets().map(|(_, socket)| socket);
        main.chain(mads).chain([self.room.as_fd()]).chain(groups).collect()
    }

    fn own_counters(&self) -> DatapathCounters {
        self.counters
    }

    fn counters(&self) -> DatapathCounters {
        let drops = self.families.iter().filter_map(|f| sys::receive_drops(f.main.as_fd()));
        DatapathCounters {
            rx_buffer_drops: drops.sum(),
            ..self.counters
        }
    }
}
