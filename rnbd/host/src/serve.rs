//! A server of exports.

use core::time::Duration;
use std::{
    io,
    net::SocketAddr,
    sync::{Arc, mpsc::channel},
    time::Instant,
};

use roce::LocalDevice;
use roce::reactor::Reactor;

use crate::{
    admission::ServerAdmission,
    control::serve::ServeControl,
    events::{EventReceiver, queue},
    jobs::{Done, Workers},
    loops::{Loops, catch_panic},
    server::{Command, Plan, Service},
};

pub(crate) mod config;

pub use self::config::{ServeConfig, ServeEvent, ServedPath, StartError};
pub use crate::stats::ServeStats;

/// A running server. Dropping it stops it, and waits for that.
#[derive(Debug)]
pub struct Serving {
    loops: Loops<Command, Done, ()>,
    events: EventReceiver<ServeEvent>,
    local: SocketAddr,
    /// Loops that have not said that they have ended.
    running: usize,
}

impl Serving {
    /// Listens, and serves from then on.
    ///
    /// # Errors
    /// When the address or port can't be listened on, or the system refuses.
    pub fn start(device: LocalDevice, config: ServeConfig) -> Result<Self, StartError> {
        let admission = ServerAdmission::new(&config.rtrs, 1);
        Self::start_shards(vec![device], config, &admission)
    }

    /// The same on several loops, one for each shard of its devices ([`LocalDevice::open_shards`]) that were opened with this admission.
    /// Each session is on one of them, whole.
    ///
    /// # Errors
    /// As [`start`](Self::start); when the admission is for another number of loops.
    pub fn start_shards(
        devices: Vec<LocalDevice>,
        config: ServeConfig,
        admission: &ServerAdmission,
    ) -> Result<Self, StartError> {
        if devices.len() != admission.loops() {
            let text = format!(
                "{} shards, and an admission for {} loops",
                devices.len(),
                admission.loops()
            );
            return Err(StartError::System(io::Error::new(io::ErrorKind::InvalidInput, text)));
        }
        let reactors = devices.iter().map(|_| Reactor::<Service>::new(config.reactor));
        let reactors = reactors.collect::<io::Result<Vec<_>>>()?;
        let workers = Workers::new()?;
        let handles: Arc<[_]> = reactors.iter().map(Reactor::handle).collect();
        let open = Arc::default();
        let (send, events) = queue(ServeEvent::Lost);
        let (ready, started) = channel();
        // Loops that run are stopped when this is dropped.
        let mut this = Self {
            loops: Loops::default(),
            events,
            local: config.rtrs.listen_addr(),
            running: 0,
        };
        for (index, (reactor, device)) in reactors.into_iter().zip(devices).enumerate() {
            let plan = Plan {
                config: config.clone(),
                admission: admission.shared.clone(),
                open: Arc::clone(&open),
                workers: workers.clone(),
                loops: handles.clone(),
                index,
                events: send.clone(),
            };
            let (send, ready) = (send.clone(), ready.clone());
            let spawned = this.loops.spawn(handles[index].clone(), move || {
                let ended = catch_panic(|| Service::run(reactor, device, plan, ready));
                send.send(ServeEvent::Stopped(ended.err()));
            });
            spawned.inspect_err(|_| this.quit())?;
            this.running += 1;
        }
        drop(ready);
        for _ in 0..this.running {
            let listens = started.recv().unwrap_or_else(|_| {
                let gone = io::Error::other("the loop ended at once");
                Err(StartError::System(gone))
            });
            this.local = listens.inspect_err(|_| this.quit())?;
        }
        Ok(this)
    }

    /// Returns the listening address: the first of its addresses.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The next event, or `None` after this time.
    pub fn next(&mut self, time: Duration) -> Option<ServeEvent> {
        let until = Instant::now() + time;
        loop {
            let event = self.events.next(until.saturating_duration_since(Instant::now()))?;
            let ServeEvent::Stopped(why) = &event else {
                return Some(event);
            };
            self.running = self.running.saturating_sub(1);
            if why.is_some() {
                // A part of a server is none, and the others would wait for it.
                self.quit();
                return Some(event);
            }
            if self.running == 0 {
                return Some(event);
            }
        }
    }

    /// Returns the statistics of the loops that run. `None` when all have ended.
    pub fn stats(&self) -> Option<ServeStats> {
        let parts = self.control().stats_by_loop().into_iter().flatten();
        parts.reduce(|mut sum, part| {
            sum.add(&part);
            sum
        })
    }

    /// Controls it, from any thread.
    pub fn control(&self) -> ServeControl {
        ServeControl::new(self.loops.handles().cloned().collect())
    }

    fn quit(&self) {
        self.loops.command(|| Command::Quit);
    }

    /// Ends the sessions in good order and waits until what they wrote is durable; the events of that.
    pub fn stop(&mut self) -> Vec<ServeEvent> {
        self.loops.command(|| Command::Stop);
        let mut events = Vec::new();
        while self.running > 0 {
            let ended = self.loops.have_ended();
            match self.next(Duration::from_millis(50)) {
                Some(event) => events.push(event),
                None if ended => break,
                None => {}
            }
        }
        self.loops.join();
        events
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use ferroce_rig::{Host, Session};
    use rnbd::server::Limits;
    use rnbd_disk::{Caching, DiskConfig, Exports};
    use roce::{DeviceConfig, LocalDevice, reactor::ReactorConfig};
    use rtrs::{addr::PathAddr, client::SessionConfig, server::ServerConfig};

    use super::*;

    fn several(loops: usize) -> Serving {
        let addr = ferroce_loopback::address().into();
        let config = ServeConfig {
            rtrs: ServerConfig {
                addr,
                ..ServerConfig::default()
            },
            limits: Limits::default(),
            exports: Exports::new([], None, Caching::PageCache).unwrap(),
            disk: DiskConfig::default(),
            reactor: ReactorConfig::default(),
            // Nothing waits for its end.
            grace: Duration::from_secs(3600),
        };
        let admission = ServerAdmission::new(&config.rtrs, loops);
        let devices = LocalDevice::open_shards(&[DeviceConfig::new(addr)], loops, admission.clone()).unwrap();
        Serving::start_shards(devices, config, &admission).unwrap()
    }

    /// A client with one session, which is on one of the loops.
    fn client(server: &mut Serving) -> Session {
        let path = PathAddr {
            src: Some(ferroce_loopback::address().into()),
            dst: server.local_addr(),
        };
        let config = SessionConfig {
            connections: 4,
            ..SessionConfig::new("client", path)
        };
        let open = thread::spawn(move || Session::open(&Host::open(path.src.unwrap()), config).unwrap());
        while !open.is_finished() {
            server.next(Duration::from_millis(10));
        }
        open.join().unwrap()
    }

    #[test]
    fn a_loop_that_fails_ends_all() {
        for failing in 0..3 {
            let mut server = several(3);
            assert_eq!(server.stats().unwrap().sessions, [0; 3]);
            // One loop has its session: the one that fails, or another, which must end it.
            let _client = client(&mut server);
            server.loops.handles().nth(failing).unwrap().command(Command::Panic);
            let deadline = Instant::now() + Duration::from_secs(60);
            let why = loop {
                assert!(Instant::now() < deadline);
                if let Some(ServeEvent::Stopped(why)) = server.next(Duration::from_millis(10)) {
                    break why.expect("nobody asked it to end");
                }
            };
            assert!(why.contains("as intended"), "{why}");
            while !server.loops.have_ended() {
                assert!(Instant::now() < deadline);
                server.next(Duration::from_millis(10));
            }
            assert!(server.stats().is_none());
            // It failed once. That the client's paths went may be told only now.
            let failed = |event: &ServeEvent| matches!(event, ServeEvent::Stopped(Some(_)));
            assert!(!server.stop().iter().any(failed));
        }
    }

    #[test]
    fn loops_that_are_asked_to_end_end_once() {
        let mut server = several(2);
        let events = server.stop();
        assert!(matches!(events[..], [ServeEvent::Stopped(None)]), "{events:?}");
        // The address is free again.
        drop(server);
    }
}
