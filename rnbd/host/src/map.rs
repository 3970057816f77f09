//! Devices of a server as exports at an NBD socket.

use core::{convert::Infallible, time::Duration};
use std::{collections::BTreeSet, io, os::unix::net::UnixStream, path::PathBuf, sync::Arc};

use rnbd::{
    Errno,
    block::Geometry,
    client::{OnLoss, error::MapError, output::LossCause},
    proto::AccessMode,
};
use roce::reactor::{Handle, Reactor, ReactorConfig};
use roce::{Arrival, LocalDevice, Placement};
use rtrs::{
    Error, IoError, PathError,
    addr::PathAddr,
    client::{SessionConfig, SessionInfo},
};

use crate::{
    addresses::Addresses,
    control::map::MapControl,
    events::{EventReceiver, EventSender, queue},
    links::Links,
    listen::{Listen, NbdAddress},
    loops::{Loops, catch_panic},
    mapper::{Command, Service},
    tls::Tls,
};

pub use crate::{control::MapDevice, stats::MapStats};

/// A socket where a virtual machine's front end finds a device as a disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VhostSocket {
    /// The device's name.
    pub device: String,
    /// The socket file.
    pub path: PathBuf,
}

/// Why these can't be the devices of a mapping.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DevicesError {
    /// A mapping without devices.
    #[error("a mapping needs a device")]
    NoDevice,
    /// A session has a device once.
    #[error("device {0:?} is named twice")]
    Twice(String),
    /// A socket for a device that is not mapped.
    #[error("a vhost-user socket for {0:?}, which is no device of the mapping")]
    NoSuch(String),
}

/// How to map.
#[derive(Clone, Debug)]
pub struct MapConfig {
    /// The session.
    pub session: SessionConfig,
    /// The devices, all over this session. NBD clients that name none get the first.
    pub devices: Vec<MapDevice>,
    /// Loss policy: the fate of requests while no path is up.
    pub on_loss: OnLoss,
    /// Listeners for NBD clients.
    pub listen: Vec<Listen>,
    /// TLS for NBD clients, on all listeners.
    pub tls: Option<Tls>,
    /// Sockets for the front ends of virtual machines (vhost-user-blk), made with mode 0600 and removed at the end.
    pub vhost: Vec<VhostSocket>,
    /// NBD clients that have chosen a device; further ones are rejected. A quarter of them is reserved for Unix
    /// sockets if there are TCP sockets, too.
    pub max_clients: usize,
    /// Time for the requests of NBD clients in flight when it stops.
    pub grace: Duration,
    /// The loop.
    pub reactor: ReactorConfig,
}

impl MapConfig {
    /// One device, to read and write, without TLS; 16 NBD clients, 5 s of grace.
    pub fn new(session: SessionConfig, device: impl Into<String>, listen: Vec<Listen>) -> Self {
        Self {
            session,
            devices: vec![MapDevice {
                name: device.into(),
                mode: AccessMode::ReadWrite,
            }],
            on_loss: OnLoss::default(),
            listen,
            tls: None,
            vhost: Vec::new(),
            max_clients: 16,
            grace: Duration::from_secs(5),
            reactor: ReactorConfig::default(),
        }
    }

    /// Whether these can be the devices; the session has a [check](SessionConfig::check) of its own.
    ///
    /// # Errors
    /// Says why not.
    pub fn check_devices(&self) -> Result<(), DevicesError> {
        let mut names = BTreeSet::new();
        let twice = self.devices.iter().find(|device| !names.insert(&device.name));
        match twice {
            Some(device) => Err(DevicesError::Twice(device.name.clone())),
            None if self.devices.is_empty() => Err(DevicesError::NoDevice),
            None => match self.vhost.iter().find(|socket| !names.contains(&socket.device)) {
                Some(socket) => Err(DevicesError::NoSuch(socket.device.clone())),
                None => Ok(()),
            },
        }
    }
}

/// Why a mapping ended without having been asked to, or not in good order.
#[derive(Debug, thiserror::Error)]
pub enum MapFailure {
    /// The session could not be opened.
    #[error(transparent)]
    Session(Error),
    /// A device could not be opened.
    #[error("device {device}: {error}")]
    Map {
        /// Name of the device.
        device: String,
        /// Why.
        error: MapError,
    },
    /// A socket for NBD clients can't be had.
    #[error("{0}")]
    Socket(io::Error),
    /// The session was lost.
    #[error("{0}")]
    Lost(PathError),
    /// The last flush of a device failed.
    #[error("flush of device {device}: {errno}")]
    Flush {
        /// Name of the device.
        device: String,
        /// Why.
        errno: Errno,
    },
    /// A device could not be closed.
    #[error("closing device {device}: {error}")]
    Close {
        /// Name of the device.
        device: String,
        /// Why.
        error: IoError,
    },
    /// The loop could not go on.
    #[error("{0}")]
    Loop(String),
}

impl MapFailure {
    /// The error number that the kernel's client has for it.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Session(e) => Errno::from_wire(e.errno()),
            Self::Map { error, .. } => error.errno(),
            Self::Lost(_) => Errno::ECONNABORTED,
            Self::Flush { errno, .. } => *errno,
            Self::Close { error, .. } => Errno::from_wire(error.errno()),
            Self::Socket(_) | Self::Loop(_) => Errno::EIO,
        }
    }
}

/// Event of a mapping.
#[derive(Debug)]
pub enum MapEvent {
    /// NBD clients can come, to these. It comes once, before any device.
    Listening(Vec<NbdAddress>),
    /// A device is there, and NBD clients can choose it. It comes for each of those that the mapping begins with when all are open,
    /// and for one that is added later when it is.
    Mapped {
        /// The device.
        device: MapDevice,
        /// Size and limits.
        geometry: Geometry,
        /// Limits of the session.
        info: SessionInfo,
    },
    /// Event of a path or a device.
    News(MapNews),
    /// It is over.
    Ended(Result<(), MapFailure>),
}

/// Event of a path or a device.
#[derive(Debug)]
pub enum MapNews {
    /// A path is up; `again` if it has been before.
    PathUp {
        /// The path.
        path: PathAddr,
        /// See above.
        again: bool,
    },
    /// A path is down, and why.
    PathDown {
        /// The path.
        path: PathAddr,
        /// Why.
        why: PathError,
    },
    /// A path has taken over requests of one that is down.
    TookOver {
        /// The path that took them.
        path: PathAddr,
        /// How many.
        requests: u32,
    },
    /// A path could not be connected; there will be other attempts.
    AttemptFailed {
        /// The path.
        path: PathAddr,
        /// Why.
        error: Error,
    },
    /// A path stays down.
    PathClosed {
        /// The path.
        path: PathAddr,
        /// Why.
        why: PathError,
    },
    /// No path is up, and why the last one went.
    Lost(PathError),
    /// A path is up again.
    Back(SessionInfo),
    /// The server has opened a device again.
    Remapped {
        /// Name of the device.
        device: String,
    },
    /// It would not: [`OnLoss`] says whether it is asked again.
    NotRemapped {
        /// Name of the device.
        device: String,
        /// Why.
        error: MapError,
    },
    /// The server may have lost writes that it had acknowledged and no flush had made durable: the next flush of each NBD client and
    /// virtual machine fails.
    WritesLost {
        /// The device.
        device: String,
        /// Requests that wrote.
        writes: u64,
        /// How that is known.
        cause: LossCause,
    },
    /// A device has another size, or other limits.
    Changed {
        /// Name of the device.
        device: String,
        /// Size and limits.
        geometry: Geometry,
    },
    /// A device is gone, as [was asked for](crate::control::MapRequest::Unmap).
    Unmapped {
        /// Name of the device.
        device: String,
        /// Error of the final flush.
        why: Option<String>,
    },
    /// So many events were dropped, as [`Mapping::next`] was not called.
    EventsLost(u64),
}

/// Placement of connect requests at a mapping, which accepts none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nobody;

impl Placement for Nobody {
    fn place(&self, _: &Arrival<'_>) -> usize {
        0
    }
}

/// A mapping. Dropping it ends it, and waits for that.
#[derive(Debug)]
pub struct Mapping {
    handle: Handle<Command, ()>,
    /// The loop, which ends with its last statistics.
    loops: Loops<Command, (), MapStats>,
    last: MapStats,
    addresses: Arc<Addresses>,
    /// Notifies the loop of interfaces that go down.
    _links: Option<Links>,
    events: EventReceiver<MapEvent>,
    ended: bool,
}

impl Mapping {
    /// Begins to open the session, on a loop in a thread of its own; [`MapEvent::Mapped`] or [`MapEvent::Ended`] follows.
    ///
    /// # Errors
    /// When the devices [can't be](MapConfig::check_devices), or the system gives no thread or descriptor.
    pub fn start(device: LocalDevice, config: MapConfig) -> io::Result<Self> {
        let check = config.check_devices();
        check.map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
        let reactor = Reactor::<Service>::new(config.reactor)?;
        let handle = reactor.handle();
        let addresses = Arc::new(Addresses::new(device.opener(), handle.clone()));
        let links = Links::watch(handle.clone());
        let (tell, events) = queue(|lost| MapEvent::News(MapNews::EventsLost(lost)));
        let mut loops = Loops::default();
        loops.spawn(handle.clone(), move || {
            let told = tell.clone();
            let run = || Ok::<_, Infallible>(Service::run(reactor, device, config, tell));
            catch_panic(run).unwrap_or_else(|e| {
                told.send(MapEvent::Ended(Err(MapFailure::Loop(e))));
                MapStats::default()
            })
        })?;
        Ok(Self {
            handle,
            loops,
            last: MapStats::default(),
            addresses,
            _links: links,
            events,
            ended: false,
        })
    }

    /// The next event, or `None` after this time.
    pub fn next(&mut self, time: Duration) -> Option<MapEvent> {
        let event = self.events.next(time)?;
        self.ended |= matches!(event, MapEvent::Ended(_));
        Some(event)
    }

    /// Returns the statistics.
    pub fn stats(&mut self) -> MapStats {
        if let Ok(stats) = self.control().stats() {
            return stats;
        }
        self.join();
        self.last.clone()
    }

    fn join(&mut self) {
        self.last = self.loops.join().pop().unwrap_or_else(|| self.last.clone());
    }

    /// Steers it, from any thread.
    pub fn control(&self) -> MapControl {
        MapControl::new(self.handle.clone(), self.addresses.clone())
    }

    /// Serves an NBD client of this process, at the other end of a socket pair, as one that came to a Unix socket. The pair is closed
    /// without a greeting if the mapping is not [listening](MapEvent::Listening).
    ///
    /// # Errors
    /// When the socket can't be set up.
    pub fn connect(&self, client: UnixStream) -> io::Result<()> {
        client.set_nonblocking(true)?;
        self.handle.command(Command::Connect(client));
        Ok(())
    }

    /// Ends it: NBD clients' requests are answered, what was written is made durable, the devices are closed and the session ended.
    /// [`MapEvent::Ended`] follows.
    pub fn stop(&self) {
        self.handle.command(Command::Stop);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.stop();
        while !self.ended && !self.loops.have_ended() {
            self.next(Duration::from_millis(50));
        }
        self.join();
    }
}

/// Sender of the loop's events.
pub(crate) type Tell = EventSender<MapEvent>;

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rnbd::server::Limits;
    use rnbd_disk::{Caching, DiskConfig, ExportSpec, Exports};
    use roce::{DeviceConfig, LocalDevice};
    use rtrs::{addr::PathAddr, heartbeat::HeartbeatConfig, server::ServerConfig};

    use super::*;
    use crate::serve::{ServeConfig, Serving};

    const PATIENCE: Duration = Duration::from_secs(60);

    fn server(folder: &std::path::Path) -> Serving {
        let path = folder.join("image");
        std::fs::write(&path, [0; 4096]).unwrap();
        let spec = ExportSpec {
            name: "disk".into(),
            path,
            ..ExportSpec::default()
        };
        let addr = ferroce_loopback::address().into();
        let config = ServeConfig {
            rtrs: ServerConfig {
                addr,
                // By which it sees that a client is gone without a word.
                heartbeat: HeartbeatConfig {
                    interval: Duration::from_millis(300),
                    ..HeartbeatConfig::default()
                },
                ..ServerConfig::default()
            },
            limits: Limits::default(),
            exports: Exports::new([spec], None, Caching::PageCache).unwrap(),
            disk: DiskConfig::default(),
            reactor: ReactorConfig::default(),
            grace: Duration::from_secs(30),
        };
        let device = LocalDevice::open(&[DeviceConfig::new(addr)]).unwrap();
        Serving::start(device, config).unwrap()
    }

    fn map(server: std::net::SocketAddr, folder: &std::path::Path) -> Mapping {
        let src = ferroce_loopback::address().into();
        let path = PathAddr {
            src: Some(src),
            dst: server,
        };
        let listen = vec![Listen::Unix(folder.join("nbd"))];
        let config = MapConfig::new(SessionConfig::new("s", path), "disk", listen);
        let device = LocalDevice::open(&[DeviceConfig::new(src)]).unwrap();
        Mapping::start(device, config).unwrap()
    }

    /// The next event, while the server's files are opened and closed.
    fn next(mapping: &mut Mapping, server: &mut Serving) -> MapEvent {
        let deadline = Instant::now() + PATIENCE;
        loop {
            assert!(Instant::now() < deadline, "nothing comes");
            server.next(Duration::from_millis(5));
            if let Some(event) = mapping.next(Duration::from_millis(5))
                && !matches!(event, MapEvent::News(_) | MapEvent::Listening(_))
            {
                return event;
            }
        }
    }

    #[test]
    fn a_loop_that_panics_ends_the_mapping() {
        let dir = tempfile::tempdir().unwrap();
        let mut server = server(dir.path());
        for mapped in [true, false] {
            let mut mapping = map(server.local_addr(), dir.path());
            if mapped {
                assert!(matches!(next(&mut mapping, &mut server), MapEvent::Mapped { .. }));
                assert_eq!(mapping.stats().clients, 0);
            }
            mapping.handle.command(Command::Panic);
            match next(&mut mapping, &mut server) {
                MapEvent::Ended(Err(MapFailure::Loop(why))) => assert!(why.contains("as it is to be"), "{why}"),
                other => panic!("{mapped}: {other:?}"),
            }
            assert!(!dir.path().join("nbd").exists(), "nobody is let in any more");
            // The server may take some time to notice.
            let noticed = Instant::now() + PATIENCE;
            while server.stats().unwrap().sessions != [0] {
                assert!(Instant::now() < noticed);
                server.next(Duration::from_millis(10));
            }
        }
    }

    #[test]
    fn a_session_has_each_device_once_and_one_at_least() {
        let path = PathAddr {
            src: None,
            dst: ([127, 0, 0, 1], 1234).into(),
        };
        let mut config = MapConfig::new(SessionConfig::new("s", path), "disk", Vec::new());
        assert_eq!(config.check_devices(), Ok(()));
        let again = MapDevice {
            mode: AccessMode::ReadOnly,
            ..config.devices[0].clone()
        };
        config.devices.push(again);
        assert_eq!(config.check_devices(), Err(DevicesError::Twice("disk".into())));
        config.devices.clear();
        assert_eq!(config.check_devices(), Err(DevicesError::NoDevice));
    }

    #[test]
    fn a_mapping_ends_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut server = server(dir.path());
        let mut mapping = map(server.local_addr(), dir.path());
        assert!(matches!(next(&mut mapping, &mut server), MapEvent::Mapped { .. }));
        mapping.stop();
        assert!(matches!(next(&mut mapping, &mut server), MapEvent::Ended(Ok(()))));
        assert!(mapping.next(Duration::ZERO).is_none() && mapping.ended);
        // Dropped without having been ended.
        let mut again = map(server.local_addr(), dir.path());
        assert!(matches!(next(&mut again, &mut server), MapEvent::Mapped { .. }));
        std::thread::scope(|scope| {
            let ended = scope.spawn(move || drop(again));
            while !ended.is_finished() {
                server.next(Duration::from_millis(5));
            }
        });
        assert!(!dir.path().join("nbd").exists());
    }
}
