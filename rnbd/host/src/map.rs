//! Devices of a server as exports at an NBD socket.

pub(crate) mod types;

use core::{convert::Infallible, time::Duration};
use std::{io, os::unix::net::UnixStream, sync::Arc};

use roce::reactor::{Handle, Reactor};
use roce::{Arrival, LocalDevice, Placement};

use crate::{
    addresses::Addresses,
    control::map::MapControl,
    events::{EventReceiver, queue},
    links::Links,
    loops::{Loops, catch_panic},
    mapper::{Service, command::Command},
};

pub use crate::{control::MapDevice, stats::MapStats};
pub use types::{DevicesError, MapConfig, MapEvent, MapFailure, MapNews, VhostSocket};

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
        if let Some(last) = self.loops.join().pop() {
            self.last = last;
        }
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

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use rnbd::{proto::AccessMode, server::Limits};
    use rnbd_disk::{Caching, DiskConfig, ExportSpec, Exports};
    use roce::{DeviceConfig, LocalDevice, reactor::ReactorConfig};
    use rtrs::{addr::PathAddr, client::SessionConfig, heartbeat::HeartbeatConfig, server::ServerConfig};

    use super::*;
    use crate::{
        listen::Listen,
        serve::{ServeConfig, Serving},
    };

    const TIMEOUT: Duration = Duration::from_secs(60);

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
        let deadline = Instant::now() + TIMEOUT;
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
            let noticed = Instant::now() + TIMEOUT;
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
