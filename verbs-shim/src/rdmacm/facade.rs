//! The transport: the process's one device (`crate::engine`), which all devices of the list stand for.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd, OwnedFd},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use roce::{CmEvent, EventChannel, Membership, Mtu, PortHold, RejectReason, Thread, VerbsError, iface};
use roce_cm::{AcceptArgs, ConnectArgs, ListenArgs, ResolveArgs, SidrAnswer, cma::PortSpace};

use super::{
    Errno, Result,
    backend::{Backend, Handle, Place, Report},
    ffi,
    resolver::{self, Resolver, Started},
};
use crate::{config, device, engine::Engine};

/// The connection manager while it is in use.
pub(crate) struct Link {
    cm: Arc<EventChannel>,
    /// Keeps the device open.
    engine: Arc<Engine>,
    /// Runs [`report_events`].
    thread: Thread,
}

impl Link {
    /// Lets the device go. When this returns, and nobody else has it, its address may be opened anew. Not to be called
    /// with a lock that the thread takes.
    pub(crate) fn end(self) {
        let Self { cm, engine, thread } = self;
        drop(cm);
        if !thread.finish() {
            tracing::error!("the thread for connection events has failed, or does not end");
        }
        drop(engine);
    }
}

/// Remains of a process without channels, to be ended.
pub(crate) struct Ending {
    link: Option<Link>,
    resolver: Option<Resolver>,
}

impl Ending {
    /// Ends all of it. Not to be called with a lock that its threads take.
    pub(crate) fn end(self) {
        drop(self.resolver);
        if let Some(link) = self.link {
            link.end();
        }
    }
}

/// How long what is known of an address is believed.
const FRESH: Duration = Duration::from_millis(500);

/// The real transport. It is opened with the first connection or listener.
#[derive(Default)]
pub(crate) struct Facade {
    link: Option<Link>,
    /// Started with the first address that has to be resolved.
    resolver: Option<Resolver>,
    /// Result of opening the link on behalf of a caller: opening takes too long for the lock that this is under.
    offered: Option<Result<Arc<Engine>>>,
    /// Devices of addresses that were asked for lately.
    places: HashMap<IpAddr, (Instant, Place)>,
}

/// A connection, resolution or listener.
pub(crate) struct Id(roce::Id);

impl Handle for Id {
    fn key(&self) -> u64 {
        self.0.handle()
    }
}

impl Facade {
    fn cm(&mut self) -> Result<&EventChannel> {
        if self.link.is_none() {
            let engine = self.offered.clone().unwrap_or_else(Engine::get)?;
            let cm = Arc::new(engine.device.create_cm_channel()?);
            let readable = cm.as_fd().try_clone_to_owned()?;
            let weak = Arc::downgrade(&cm);
            let thread = Thread::start("ferroce cm", move || report_events(&weak, &readable))?;
            self.link = Some(Link { cm, engine, thread });
        }
        self.link.as_ref().map(|l| &*l.cm).ok_or(Errno::IO)
    }

    /// Gives up the link and the resolver, which the caller ends.
    pub(crate) fn close(&mut self) -> Ending {
        Ending {
            link: self.link.take(),
            resolver: self.resolver.take(),
        }
    }

    /// Whether the next command that needs the transport has to open it.
    pub(crate) fn is_closed(&self) -> bool {
        self.link.is_none()
    }

    /// Has the link made of this when it is needed; `None`: not any more.
    pub(crate) fn offer(&mut self, engine: Option<Result<Arc<Engine>>>) {
        self.offered = engine;
    }
}

/// Thread that reports events of connections.
fn report_events(cm: &Weak<EventChannel>, readable: &OwnedFd) {
    let mut alarm: Option<Instant> = None;
    loop {
        let wait = alarm.map_or(-1, |at| {
            let left = at.saturating_duration_since(Instant::now()).as_millis() + 1;
            i32::try_from(left).unwrap_or(i32::MAX)
        });
        let mut entry = libc::pollfd {
            fd: readable.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry on the stack.
        unsafe { libc::poll(&raw mut entry, 1, wait) };
        // Closing the queue makes its descriptor readable, so this ends when the link does.
        let Some(cm) = cm.upgrade() else { return };
        loop {
            match cm.take() {
                Ok(Some(event)) => ffi::deliver(report(event)),
                Ok(None) => break,
                Err(_) => {
                    ffi::deliver(Report::Gone);
                    return;
                }
            }
        }
        alarm = ffi::tend();
    }
}

fn report(CmEvent { id, listener, kind }: CmEvent) -> Report<Id> {
    match listener {
        Some(key) => Report::Cm {
            key,
            new: Some(Id(id)),
            event: kind,
        },
        // The id is dropped before the program learns of the event: it may then end the connection at once.
        None => Report::Cm {
            key: id.handle(),
            new: None,
            event: kind,
        },
    }
}

/// The error when a port can't be had.
fn in_use(e: VerbsError) -> Errno {
    match e {
        VerbsError::Address(reason) => Errno(libc::EADDRINUSE).because(reason),
        other => other.into(),
    }
}

/// The path MTU of a device: what its interface carries, unless less was asked for.
fn path_mtu(device: &device::VerbsDevice) -> Result<Mtu> {
    let carries = Mtu::for_interface(device.interface_mtu()).ok_or(Errno::INVAL)?;
    Ok(config::mtu().map_or(carries, |wanted| wanted.min(carries)))
}

impl Backend for Facade {
    type Handle = Id;
    type Query = Started;
    /// None for who only sends.
    type Member = Option<Membership>;
    type Hold = PortHold;

    fn place_of(&mut self, local: IpAddr) -> Result<Place> {
        self.places.retain(|_, (seen, _)| seen.elapsed() < FRESH);
        if let Some((_, place)) = self.places.get(&local) {
            return Ok(*place);
        }
        let found = device::list()?.into_iter().find_map(|d| Some((d, d.gids.find(local)?)));
        let Some((device, index)) = found else {
            return Err(match device::interface_of(local)? {
                Some(interface) => Errno::NODEV.because(format_args!(
                    "{local} is an address of {interface}, which is no device here: it is down, or FERROCE_ADDR (--addr) leaves it out"
                )),
                None => Errno(libc::EADDRNOTAVAIL).because(format_args!("no interface has the address {local}")),
            });
        };
        let place = Place {
            index: device.index as u32,
            guid: device.guid(),
            gid_index: u8::try_from(index).map_err(|_| Errno::NODEV)?,
            mtu: path_mtu(device)?,
        };
        self.places.insert(local, (Instant::now(), place));
        Ok(place)
    }

    fn source_for(&mut self, remote: SocketAddr) -> Result<IpAddr> {
        let usual = iface::route_to_scoped(remote)?;
        if self.place_of(usual).is_ok() {
            return Ok(usual);
        }
        // The program is confined to other addresses than the one that the system would take: one of the same
        // interface serves as well.
        let interface = iface::interface_of(usual)?.0;
        let beside = device::list()?.into_iter().find(|d| d.interface == interface);
        let own = beside.and_then(|d| {
            d.gids
                .entries()
                .into_iter()
                .find(|(_, ip)| ip.is_ipv4() == usual.is_ipv4())
        });
        Ok(own.map_or(usual, |(_, ip)| ip))
    }

    fn some_address(&mut self, v6: bool) -> Option<IpAddr> {
        let all = device::list()
            .unwrap_or_default()
            .into_iter()
            .flat_map(|d| d.gids.entries());
        let mut fits: Vec<IpAddr> = all.map(|(_, ip)| ip).filter(|ip| ip.is_ipv6() == v6).collect();
        fits.sort_by_key(|ip| !ip.is_loopback());
        fits.first().copied()
    }

    fn resolve_neighbour(
        &mut self,
        ticket: u64,
        way: (IpAddr, SocketAddr),
        timeout: Option<Duration>,
    ) -> Result<Option<Started>> {
        if resolver::is_resolved(way.0, way.1)? {
            return Ok(None);
        }
        let resolver = match self.resolver.take() {
            Some(resolver) => resolver,
            None => Resolver::start()?,
        };
        Ok(Some(self.resolver.insert(resolver).query(ticket, way, timeout)))
    }

    fn reserve(&mut self, space: PortSpace, port: u16, addr: Option<IpAddr>, reuse: bool) -> Result<(u16, PortHold)> {
        let hold = self.cm()?.reserve(space, port, addr, reuse).map_err(in_use)?;
        Ok((hold.port(), hold))
    }

    fn listen(&mut self, args: &ListenArgs) -> Result<Id> {
        Ok(Id(self.cm()?.listen(args).map_err(in_use)?))
    }

    fn connect(&mut self, args: &ConnectArgs) -> Result<Id> {
        self.cm()?;
        let link = self.link.as_ref().ok_or(Errno::IO)?;
        // The interface may carry less by now than when the route was resolved.
        let args = ConnectArgs {
            mtu: args.mtu.min(link.engine.device.mtu_from(args.local.ip())?),
            ..args.clone()
        };
        Ok(Id(link.cm.connect(&args)?))
    }

    fn resolve(&mut self, args: &ResolveArgs) -> Result<Id> {
        Ok(Id(self.cm()?.resolve(args)?))
    }

    fn leave_backlog(&mut self, conn: &Id) {
        // A closed device has no backlog.
        let _ = conn.0.leave_backlog();
    }

    fn accept(&mut self, conn: &Id, args: &AcceptArgs) -> Result<()> {
        Ok(conn.0.accept_with(args)?)
    }

    fn answer(&mut self, conn: &Id, answer: &SidrAnswer) -> Result<()> {
        Ok(conn.0.answer(answer)?)
    }

    fn establish(&mut self, conn: &Id) -> Result<()> {
        Ok(conn.0.establish()?)
    }

    fn reject(&mut self, conn: &Id, reason: RejectReason, data: &[u8]) -> Result<()> {
        Ok(conn.0.reject_with(reason, data)?)
    }

    fn notify(&mut self, conn: &Id) -> Result<()> {
        Ok(conn.0.notify()?)
    }

    fn disconnect(&mut self, conn: &Id) -> Result<()> {
        Ok(conn.0.disconnect()?)
    }

    fn join(&mut self, local: IpAddr, group: IpAddr, send_only: bool) -> Result<Option<Membership>> {
        if send_only {
            return Ok(None);
        }
        self.cm()?;
        let link = self.link.as_ref().ok_or(Errno::IO)?;
        Ok(Some(link.engine.device.join_group(group, local)?))
    }
}
