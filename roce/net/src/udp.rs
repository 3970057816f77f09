//! The datapath over ordinary UDP sockets: no privilege, no kernel module.
//!
//! The sockets are never connected, and set to `IP_PMTUDISC_PROBE`, so that packets leave with DF set and Identification 0
//! (segment *i* of a GSO send: *i*), which is what their ICRCs were made with.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

use roce_icrc::Flow;
use roce_port::Steering;
use roce_verbs::Instant;
use socket2::Socket;

use crate::{
    clock,
    datapath::{Burst, Capabilities, Datagram, Datapath, DatapathCounters, Received, Sent, Undeliverable},
    group::Groups,
    iface, senders,
    socket::{Family, OpenError, UdpConfig, adopt, configure_receiver, context, enlarge, family_addresses},
    steer,
    sys::{self, Origin, RecvRing, SendQueue},
    undeliverable,
    unsegmented::Unsegmented,
};

/// Bursts of one system call.
const SEND_BATCH: usize = 32;
/// Buffers of one receive call. Merged buffers fill all 64 KiB, so fewer of those are taken at a time.
const RECV_SLOTS: usize = 64;
/// As many merged buffers as stay in a second-level cache until they are handled.
const RECV_MERGED: usize = 4;
/// The longest UDP payload.
const MAX_DATAGRAM: usize = 65_536;
/// Segments and bytes that every kernel with UDP_SEGMENT takes.
const MAX_SEGMENTS: usize = 64;
const MAX_BURST_BYTES: usize = 65_507;
/// Time for which the interface of a local address is not looked up again: an address may move to another one.
const SCOPE_AGE: Duration = Duration::from_secs(1);
/// Below this a burst of a few messages overflows the receive buffer.
const SMALL_BUFFER: usize = 1 << 20;

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
    families: Vec<Family>,
    /// Sockets that receive what comes to a single address, beside one for all.
    singles: Vec<(IpAddr, Socket)>,
    /// Which sender of each family is for management datagrams alone.
    mad_sender: Option<usize>,
    /// ICMP errors about those are kept.
    hears: bool,
    /// Room in the send buffer that was full last.
    room: sys::RoomWatch,
    queue: SendQueue,
    ring: RecvRing,
    /// Messages to ask for at a time: fewer while merged buffers come.
    vlen: usize,
    gso: bool,
    unsegmented: Unsegmented,
    gro: bool,
    counters: DatapathCounters,
    /// Kinds of send errors that were already reported in the log.
    warned: u32,
    scratch: Vec<u8>,
    /// Other members of the sockets' groups.
    _held: Vec<Arc<OwnedFd>>,
    groups: Groups,
    /// Interfaces of local addresses from which link-local and multicast packets were sent, and the time when they were looked up.
    scopes: HashMap<IpAddr, u32>,
    scopes_since: Instant,
}

impl UdpDatapath {
    /// Binds the sockets.
    ///
    /// # Errors
    /// When the port is taken or the address is not ours.
    pub fn open(config: &UdpConfig) -> Result<Self, OpenError> {
        let mut families = vec![];
        for addr in family_addresses(config.addr) {
            match Family::open(config, addr) {
                Ok(family) => families.push(family),
                // A host without IPv6 still has the other half of the unspecified address.
                Err(OpenError::Io { source, .. })
                    if config.addr.is_unspecified() && source.raw_os_error() == Some(libc::EAFNOSUPPORT) => {}
                Err(e) => return Err(e),
            }
        }
        if families.is_empty() {
            return Err(OpenError::NotLocal(config.addr));
        }
        Self::with_sockets(config, families, vec![])
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
            let addr = at.ip();
            match families.iter().find(|f| f.addr.is_ipv4() == addr.is_ipv4()) {
                None => families.push(Family::of(socket, addr)?),
                Some(all) if all.addr.is_unspecified() && !addr.is_unspecified() => {
                    configure_receiver(&socket, addr, false).map_err(context("setting up the receiving socket"))?;
                    singles.push((addr, socket));
                }
                Some(_) => return Err(refused(invalid("two of one IP version"))),
            }
        }
        let config = UdpConfig { port, ..config.clone() };
        let mut this = Self::with_sockets(&config, families, singles)?;
        this._held = sockets.held.clone();
        Ok(this)
    }

    /// Binds the sockets of several loops that share an address, one datapath for each; the kernel steers packets to them by
    /// queue pair number. Each has senders of its own.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_shards(config: &UdpConfig, steering: Steering) -> Result<Vec<Self>, OpenError> {
        let shards = steer::open_groups(config, steering)?.into_iter().map(|shard| {
            let mut families = vec![];
            for (addr, socket) in shard.sockets {
                families.push(Family::of(socket, addr)?);
            }
            let mut this = Self::with_sockets(config, families, vec![])?;
            this._held = shard.held;
            Ok(this)
        });
        shards.collect()
    }

    fn with_sockets(
        config: &UdpConfig,
        mut families: Vec<Family>,
        singles: Vec<(IpAddr, Socket)>,
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
        let mut this = Self {
            port: config.port,
            families,
            singles,
            mad_sender,
            hears: false,
            room: sys::RoomWatch::new().map_err(context("watching send buffers"))?,
            queue: SendQueue::new(SEND_BATCH),
            ring: RecvRing::new(RECV_SLOTS, MAX_DATAGRAM).map_err(context("allocating receive buffers"))?,
            vlen: RECV_MERGED,
            gso: config.gso,
            unsegmented: Unsegmented::default(),
            gro: config.gro,
            counters: DatapathCounters::default(),
            warned: 0,
            scratch: vec![],
            _held: vec![],
            groups: Groups::default(),
            scopes: HashMap::new(),
            scopes_since: Instant::ZERO,
        };
        if this.gro {
            let merge = |(socket, _): (&Socket, _)| sys::set_int(socket.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 1);
            let merged = this.receivers().try_for_each(merge);
            if let Err(e) = merged {
                tracing::info!("UDP_GRO is refused ({e}): packets are received one by one");
                this.gro = false;
            }
        }
        if this.gso && !this.segmentation_available() {
            tracing::info!("UDP_SEGMENT is refused: packets are sent one by one");
            this.gso = false;
        }
        let granted = this
            .set_receive_buffer(config.receive_buffer)
            .map_err(context("setting the receive buffer"))?;
        if granted < config.receive_buffer.min(SMALL_BUFFER) {
            tracing::warn!(
                "the receive buffer is only {granted} bytes of {} asked for: packets will be lost under load; as root: \
                 `sysctl -w net.core.rmem_max={}`",
                config.receive_buffer,
                config.receive_buffer,
            );
        }
        Ok(this)
    }

    /// The sockets that packets come by, and the address that each is bound to if that is a specific one.
    fn receivers(&self) -> impl Iterator<Item = (&Socket, Option<IpAddr>)> {
        let main = self.families.iter().map(|f| (&f.main, f.bound()));
        main.chain(self.singles.iter().map(|(addr, socket)| (socket, Some(*addr))))
    }

    /// The sockets that management datagrams leave from, and whether each is of IPv4.
    fn mad_senders(&self) -> impl Iterator<Item = (&Socket, bool)> {
        self.families.iter().filter_map(|f| {
            let (_, socket) = f.senders.get(self.mad_sender?)?;
            Some((socket, f.addr.is_ipv4()))
        })
    }

    /// Whether merged buffers are received.
    pub fn merging(&self) -> bool {
        self.gro
    }

    /// Asks the kernel whether it knows UDP_SEGMENT, without keeping it set.
    fn segmentation_available(&self) -> bool {
        let all = |size| {
            self.sockets()
                .all(|s| sys::set_int(s.as_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, size).is_ok())
        };
        all(1024) && all(0)
    }

    fn sockets(&self) -> impl Iterator<Item = &Socket> {
        self.families
            .iter()
            .flat_map(|f| std::iter::once(&f.main).chain(f.senders.iter().map(|(_, s)| s)))
    }

    /// Sends a chunk whose bursts all leave from the same socket.
    fn send_chunk(&mut self, family: usize, sender: Option<usize>, bursts: &[Burst<'_>]) -> Sent {
        let mut done = 0;
        while done < bursts.len() {
            let Some(sent) = self.send_some(family, sender, &bursts[done..]) else {
                self.counters.tx_blocked += 1;
                self.watch_room(family, sender);
                break;
            };
            done += sent;
        }
        Sent {
            bursts: done,
            blocked: done < bursts.len(),
        }
    }

    fn watch_room(&mut self, family: usize, sender: Option<usize>) {
        let f = &self.families[family];
        let socket = sender.map_or(&f.main, |i| &f.senders[i].1);
        if let Err(e) = self.room.arm(socket.as_fd()) {
            // The next packet that arrives, or timer, sends the rest.
            tracing::warn!("epoll_ctl of a full send buffer failed: {e}");
        }
    }

    /// Sends as many of a chunk as one system call takes. `None`: the send buffer is full.
    fn send_some(&mut self, family: usize, sender: Option<usize>, bursts: &[Burst<'_>]) -> Option<usize> {
        let first = bursts.first()?;
        let to = first.remote.ip();
        if first.packets() > 1 && !self.unsegmented.is_empty() && self.unsegmented.has(clock::now(), to) {
            return self.send_one_by_one(family, sender, first).then_some(1);
        }
        let f = &self.families[family];
        let socket = sender.map_or(&f.main, |i| &f.senders[i].1).as_fd();
        let origin = Origin {
            any: f.addr.is_unspecified(),
            scopes: &self.scopes,
        };
        let mut sent = self.queue.send(socket, bursts, &origin);
        if sent.is_err() && self.hears && sender == self.mad_sender {
            // An earlier packet's error may have been reported, which a socket does once.
            sent = self.queue.send(socket, bursts, &origin);
        }
        match sent {
            Ok(n) => {
                self.counters.tx_calls += 1;
                self.counters.tx_bursts += n as u64;
                Some(n)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => None,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Some(0),
            Err(e) => self.burst_failed(family, sender, first, &e).then_some(1),
        }
    }

    /// A burst was refused. Segmentation may be to blame; else it is lost, as a network may lose it. False: it is to be sent
    /// when there is room.
    fn burst_failed(&mut self, family: usize, sender: Option<usize>, burst: &Burst<'_>, error: &io::Error) -> bool {
        let code = error.raw_os_error().unwrap_or(0);
        if burst.packets() > 1 && matches!(code, libc::EIO | libc::EINVAL | libc::EOPNOTSUPP) {
            if self.unsegmented.on_refused(clock::now(), burst.remote.ip()) {
                let to = burst.remote.ip();
                tracing::warn!(
                    "a segmented send to {to} was refused ({error}): packets go there one by one for a while"
                );
            }
            return self.send_one_by_one(family, sender, burst);
        }
        self.count_lost(burst, error);
        true
    }

    /// A burst, or a packet of it, is lost.
    fn count_lost(&mut self, burst: &Burst<'_>, error: &io::Error) {
        let code = error.raw_os_error().unwrap_or(0);
        let (counter, hint) = match code {
            libc::EMSGSIZE => (
                &mut self.counters.tx_too_long,
                "the path MTU is larger than the interface's MTU less 96 bytes",
            ),
            libc::ENOBUFS | libc::ENOMEM | libc::EAGAIN => {
                (&mut self.counters.tx_no_buffers, "the system's buffers are exhausted")
            }
            libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN | libc::EADDRNOTAVAIL | libc::EHOSTDOWN => (
                &mut self.counters.tx_unreachable,
                "check routes and that the interface is up",
            ),
            libc::EPERM | libc::EACCES => (
                &mut self.counters.tx_forbidden,
                "a firewall rule forbids it: UDP port 4791 must be open",
            ),
            _ => (&mut self.counters.tx_errors, "the packets count as lost"),
        };
        *counter += 1;
        let bit = 1u32 << (code.unsigned_abs() % 32);
        if self.warned & bit == 0 {
            self.warned |= bit;
            tracing::warn!(
                "sending to {} from {} failed: {error}; {hint}",
                burst.remote,
                burst.local
            );
        }
    }

    /// Sends the packets of a burst each on its own. Each then carries Identification 0, so it is sealed anew. False: the send
    /// buffer is full, and nothing was sent.
    fn send_one_by_one(&mut self, family: usize, sender: Option<usize>, burst: &Burst<'_>) -> bool {
        let local = SocketAddr::new(burst.local, burst.src_port);
        let Ok(flow) = Flow::try_from((local, burst.remote)) else {
            return true;
        };
        for (index, packet) in burst.bytes.chunks(burst.segment_len.max(1)).enumerate() {
            self.scratch.clear();
            self.scratch.extend_from_slice(packet);
            flow.seal(0, &mut self.scratch);
            let f = &self.families[family];
            let socket = sender.map_or(&f.main, |i| &f.senders[i].1).as_fd();
            let single = Burst {
                segment_len: packet.len(),
                bytes: &self.scratch,
                ..*burst
            };
            let origin = Origin {
                any: f.addr.is_unspecified(),
                scopes: &self.scopes,
            };
            match self.queue.send(socket, &[single], &origin) {
                Ok(_) => self.counters.tx_calls += 1,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && index == 0 => return false,
                Err(e) => self.count_lost(burst, &e),
            }
        }
        self.counters.tx_unsegmented += 1;
        true
    }

    /// Which socket a burst must leave from.
    fn route(&self, burst: &Burst<'_>) -> Option<(usize, Option<usize>)> {
        let (index, family) = self
            .families
            .iter()
            .enumerate()
            .find(|(_, f)| f.addr.is_ipv4() == burst.remote.is_ipv4())?;
        match family.senders.iter().position(|(port, _)| *port == burst.src_port) {
            Some(sender) => Some((index, Some(sender))),
            None => (burst.src_port == self.port).then_some((index, None)),
        }
    }

    /// Notes the interface of a burst's local address, if its destination needs one.
    fn note_scope(&mut self, burst: &Burst<'_>) {
        if !Origin::needs_scope(burst.remote.ip()) {
            return;
        }
        let now = clock::now();
        if now.saturating_since(self.scopes_since) > SCOPE_AGE {
            self.scopes_since = now;
            self.scopes.clear();
        }
        if !self.scopes.contains_key(&burst.local)
            && let Ok(index) = iface::index_of(burst.local)
        {
            self.scopes.insert(burst.local, index);
        }
    }
}

/// Receiving socket, and the address that it is bound to if that is a specific one.
struct Inlet<'a> {
    socket: BorrowedFd<'a>,
    bound: Option<IpAddr>,
}

/// The part of a datapath that receives.
struct Receiver<'a> {
    ring: &'a mut RecvRing,
    vlen: &'a mut usize,
    counters: &'a mut DatapathCounters,
}

impl Receiver<'_> {
    fn receive(&mut self, inlet: &Inlet<'_>, budget: usize, handle: &mut dyn FnMut(&Datagram<'_>)) -> Received {
        let (mut datagrams, mut packets) = (0, 0);
        while packets < budget {
            // Looking for a further one costs as much as finding that there is none.
            let asked = (*self.vlen).min(budget);
            let got = match self.ring.receive(inlet.socket, asked) {
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => {
                    // An ICMP error can't come here (unconnected); whatever it is, the next call tells.
                    tracing::debug!("receiving failed: {e}");
                    self.counters.rx_errors += 1;
                    0
                }
            };
            if got == 0 {
                return Received { datagrams, more: false };
            }
            self.counters.rx_calls += 1;
            let mut merged = false;
            for i in 0..got {
                let slot = self.ring.slot(i);
                let (Some(remote), Some(local), false) = (slot.remote, inlet.bound.or(slot.local), slot.truncated)
                else {
                    self.counters.rx_malformed += 1;
                    packets += 1;
                    continue;
                };
                merged |= slot.segment_len.is_some();
                let segment_len = slot.segment_len.unwrap_or(slot.bytes.len()).max(1);
                packets += slot.bytes.len().div_ceil(segment_len).max(1);
                handle(&Datagram {
                    local,
                    remote,
                    identification: None,
                    segment_len,
                    traffic_class: slot.traffic_class,
                    hop_limit: slot.hop_limit,
                    bytes: slot.bytes,
                });
            }
            self.counters.rx_datagrams += got as u64;
            datagrams += got;
            *self.vlen = if merged { RECV_MERGED } else { self.ring.slots() };
            if got < asked {
                return Received { datagrams, more: false };
            }
        }
        Received { datagrams, more: true }
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
            max_burst_bytes: MAX_BURST_BYTES,
            src_ports,
            receive_buffer: self
                .receivers()
                .filter_map(|(socket, _)| socket.recv_buffer_size().ok())
                .min()
                .unwrap_or(0),
        }
    }

    fn send(&mut self, bursts: &mut dyn Iterator<Item = Burst<'_>>) -> Sent {
        let mut done = 0;
        let mut next = bursts.next();
        while let Some(first) = next.take() {
            self.note_scope(&first);
            let Some(route) = self.route(&first) else {
                self.counters.tx_errors += 1;
                done += 1;
                next = bursts.next();
                continue;
            };
            let mut chunk = smallvec::SmallVec::<[Burst<'_>; SEND_BATCH]>::new();
            chunk.push(first);
            while chunk.len() < self.queue.capacity() {
                next = bursts.next();
                match next {
                    Some(b) if self.route(&b) == Some(route) => {
                        self.note_scope(&b);
                        chunk.push(b);
                    }
                    _ => break,
                }
                next = None;
            }
            if chunk.len() == self.queue.capacity() {
                next = bursts.next();
            }
            let sent = self.send_chunk(route.0, route.1, &chunk);
            done += sent.bursts;
            if sent.blocked {
                return Sent {
                    bursts: done,
                    blocked: true,
                };
            }
        }
        Sent {
            bursts: done,
            blocked: false,
        }
    }

    fn receive(&mut self, budget: usize, handle: &mut dyn FnMut(&Datagram<'_>)) -> Received {
        let mut total = Received {
            datagrams: 0,
            more: false,
        };
        self.room.clear();
        let mut receiver = Receiver {
            ring: &mut self.ring,
            vlen: &mut self.vlen,
            counters: &mut self.counters,
        };
        let main = self.families.iter().map(|f| Inlet {
            socket: f.main.as_fd(),
            bound: f.bound(),
        });
        let singles = self.singles.iter().map(|(addr, socket)| Inlet {
            socket: socket.as_fd(),
            bound: Some(*addr),
        });
        let groups = self.groups.sockets().map(|(group, socket)| Inlet {
            socket,
            bound: Some(group),
        });
        for inlet in main.chain(singles).chain(groups) {
            // Each has its own budget, so that none starves another.
            let one = receiver.receive(&inlet, budget, handle);
            total.datagrams += one.datagrams;
            total.more |= one.more;
        }
        total
    }

    fn join(&mut self, group: IpAddr, local: IpAddr) -> io::Result<()> {
        let family = self.families.iter().find(|f| f.addr.is_ipv4() == group.is_ipv4());
        let family = family.ok_or(io::ErrorKind::AddrNotAvailable)?;
        // A socket that is bound to one address gets nothing that is sent to a group: those have sockets of their own.
        let main = family.addr.is_unspecified().then(|| family.main.as_fd());
        self.groups.join(group, local, main, self.port)
    }

    fn leave(&mut self, group: IpAddr, local: IpAddr) {
        let main = self
            .families
            .iter()
            .find(|f| f.addr.is_ipv4() == group.is_ipv4())
            .map(|f| f.main.as_fd());
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
        let main = self.receivers().map(|(socket, _)| socket.as_fd());
        let mads = self.mad_senders().map(|(socket, _)| socket.as_fd());
        let groups = self.groups.sockets().map(|(_, socket)| socket);
        main.chain(mads).chain([self.room.as_fd()]).chain(groups).collect()
    }

    fn own_counters(&self) -> DatapathCounters {
        self.counters
    }

    fn counters(&self) -> DatapathCounters {
        let drops = self
            .receivers()
            .filter_map(|(socket, _)| sys::receive_drops(socket.as_fd()));
        DatapathCounters {
            rx_buffer_drops: drops.sum(),
            ..self.counters
        }
    }

    fn set_receive_buffer(&mut self, bytes: usize) -> io::Result<usize> {
        let mut granted = usize::MAX;
        for (socket, _) in self.receivers() {
            // Twice what is asked for is what the kernel makes of it.
            let got = enlarge(socket, libc::SO_RCVBUF, libc::SO_RCVBUFFORCE, bytes)?;
            granted = granted.min(got);
        }
        Ok(granted)
    }
}
