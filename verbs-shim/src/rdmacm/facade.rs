//! The transport: the process's one device (`crate::engine`), which all devices of the list stand for.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use roce::{CmEvent, EventChannel, Membership, PortHold, RejectReason, VerbsError, iface};
use roce_port::cm::{AcceptArgs, ConnectArgs, ListenArgs, ResolveArgs, SidrAnswer, cma::PortSpace};

use super::{
    Errno, Result,
    backend::{Backend, CmaDevice, Handle, Report},
    neighbour::{self, Resolver, Started},
};
use crate::{
    device,
    engine::Engine,
    gids,
    worker::{Next, Worker},
};

/// The connection manager while it is in use. Its parts are dropped in this order.
struct Link {
    cm: Arc<EventChannel>,
    /// Reports events of connections.
    _worker: Worker,
    /// Keeps the device open.
    engine: Arc<Engine>,
}

/// Remains of a process without channels. Not to be dropped with a lock that its threads take. Afterwards, and when nothing else
/// has the device, its address may be opened again.
pub(crate) struct Ending {
    _resolver: Option<Resolver>,
    _link: Option<Link>,
}

/// How long the device of an address is cached.
const FRESH: Duration = Duration::from_millis(500);

/// Functions that the transport's threads call, without its locks.
#[derive(Clone, Copy)]
pub(crate) struct Reports {
    /// Takes a report.
    pub(crate) deliver: fn(Report<Id>),
    /// Does what is due, and returns when to call again.
    pub(crate) tend: fn() -> Option<Instant>,
}

/// The real transport. It is opened with the first connection or listener.
pub(crate) struct Facade {
    reports: Reports,
    link: Option<Link>,
    /// Started with the first address that has to be resolved.
    neighbour: Option<Resolver>,
    /// Result of opening the link on behalf of a caller: opening takes too long for the lock that this is under.
    offered: Option<Result<Arc<Engine>>>,
    /// Devices of recently used addresses.
    places: HashMap<IpAddr, (Instant, CmaDevice)>,
}

/// A connection, resolution or listener.
pub(crate) struct Id(roce::Id);

impl Handle for Id {
    fn key(&self) -> u64 {
        self.0.handle()
    }
}

impl Facade {
    pub(crate) fn new(reports: Reports) -> Self {
        Self {
            reports,
            link: None,
            neighbour: None,
            offered: None,
            places: HashMap::new(),
        }
    }

    fn cm(&mut self) -> Result<&EventChannel> {
        if self.link.is_none() {
            let engine = self.offered.clone().unwrap_or_else(Engine::get)?;
            let cm = Arc::new(engine.device.create_cm_channel()?);
            let readable = cm.as_fd().try_clone_to_owned()?;
            let reports = self.reports;
            let work = move |cm: &EventChannel| report_events(cm, reports);
            let worker = Worker::on("ferroce cm", readable, &cm, work)?;
            self.link = Some(Link {
                cm,
                _worker: worker,
                engine,
            });
        }
        self.link.as_ref().map(|l| &*l.cm).ok_or(Errno::IO)
    }

    /// Gives up the link and the neighbour, which the caller drops.
    pub(crate) fn close(&mut self) -> Ending {
        Ending {
            _resolver: self.neighbour.take(),
            _link: self.link.take(),
        }
    }

    /// Whether the next command that needs the transport has to open it.
    pub(crate) fn is_closed(&self) -> bool {
        self.link.is_none()
    }

    /// Offers an engine for the link, until it is called with `None`.
    pub(crate) fn offer(&mut self, engine: Option<Result<Arc<Engine>>>) {
        self.offered = engine;
    }
}

/// Reports the events of connections that there are.
fn report_events(cm: &EventChannel, reports: Reports) -> Next {
    loop {
        match cm.take() {
            Ok(Some(event)) => (reports.deliver)(report(event)),
            Ok(None) => break,
            Err(_) => {
                (reports.deliver)(Report::Gone);
                return Next::End;
            }
        }
    }
    (reports.tend)().map_or(Next::Ready, Next::At)
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

/// Returns the error for a port that can't be had.
fn in_use(e: VerbsError) -> Errno {
    match e {
        VerbsError::Address(reason) => Errno(libc::EADDRINUSE).because(reason),
        other => other.into(),
    }
}

impl Backend for Facade {
    type Handle = Id;
    type Query = Started;
    /// `None` for a sender only.
    type Member = Option<Membership>;
    type Hold = PortHold;

    fn cma_dev_of(&mut self, local: IpAddr) -> Result<CmaDevice> {
        self.places.retain(|_, (seen, _)| seen.elapsed() < FRESH);
        if let Some((_, cma_dev)) = self.places.get(&local) {
            return Ok(*cma_dev);
        }
        let found = device::list()?.into_iter().find_map(|d| Some((d, d.gids.find(local)?)));
        let Some((device, index)) = found else {
            return Err(match gids::interface_of(local)? {
                Some(interface) => Errno::NODEV.because(format_args!(
                    "{local} is an address of {interface}, which is no device here: it is down, or FERROCE_ADDR (--addr) leaves it out"
                )),
                None => Errno(libc::EADDRNOTAVAIL).because(format_args!("no interface has the address {local}")),
            });
        };
        let cma_dev = CmaDevice {
            index: device.index as u32,
            guid: device.guid(),
            gid_index: u8::try_from(index).map_err(|_| Errno::NODEV)?,
            mtu: device.path_mtu().ok_or(Errno::INVAL)?,
        };
        self.places.insert(local, (Instant::now(), cma_dev));
        Ok(cma_dev)
    }

    fn source_for(&mut self, remote: SocketAddr) -> Result<IpAddr> {
        let usual = iface::route_to_scoped(remote)?;
        if self.cma_dev_of(usual).is_ok() {
            return Ok(usual);
        }
        // The program is confined to other addresses than the one that the system would take: one of the same
        // interface serves as well.
        let interface = iface::interface_of(usual)?.0;
        let device = device::list()?.into_iter().find(|d| d.interface == interface);
        Ok(device.and_then(|d| d.gids.like(usual)).map_or(usual, |(_, ip)| ip))
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
        route: (IpAddr, SocketAddr),
        timeout: Option<Duration>,
    ) -> Result<Option<Started>> {
        if neighbour::is_resolved(route.0, route.1)? {
            return Ok(None);
        }
        let neighbour = match self.neighbour.take() {
            Some(neighbour) => neighbour,
            None => Resolver::start(self.reports.deliver)?,
        };
        Ok(Some(self.neighbour.insert(neighbour).query(ticket, route, timeout)))
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
