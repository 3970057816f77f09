//! A server of exports.

use core::time::Duration;
use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread::{Builder, JoinHandle},
    time::Instant,
};

use rnbd::server::Limits;
use rnbd_disk::{DiskConfig, Exports};
use roce::reactor::{Handle, Reactor, ReactorConfig, ReactorError};
use roce::{LocalDevice, verbs::provider::VerbsError};
use rtrs::{
    PathError,
    addr::PathAddr,
    server::{ServerConfig, request::SessionOpened},
};

use crate::{
    admission::ServerAdmission,
    caught::caught,
    control::serve::ServeControl,
    events::{EventReceiver, queue},
    jobs::{Done, Workers},
    server::{Command, Plan, Service},
};

pub use crate::stats::ServeStats;

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// Sessions.
    pub rtrs: ServerConfig,
    /// Devices.
    pub limits: Limits,
    /// Exports.
    pub exports: Arc<Exports>,
    /// The disks.
    pub disk: DiskConfig,
    /// The loop.
    pub reactor: ReactorConfig,
    /// Time for sessions to end and files to be written back when it stops.
    pub grace: Duration,
}

/// Event of a server.
#[derive(Debug)]
pub enum ServeEvent {
    /// A client has opened a session.
    SessionOpened(SessionOpened),
    /// A session is over.
    SessionClosed(SessionOpened, PathError),
    /// A path of a session is up: its first one, or one more.
    PathUp(ServedPath),
    /// A path is gone, and why. A session is over after its last one.
    PathDown(ServedPath, PathError),
    /// So many events were dropped, as [`Serving::next`] was not called.
    Lost(u64),
    /// All loops have ended; or, with an error, one that nobody asked to. Then the others end as well.
    Stopped(Option<String>),
}

/// A path of a session.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServedPath {
    /// The session's name.
    pub session: String,
    /// The client's address.
    pub client: SocketAddr,
    /// Ours.
    pub server: IpAddr,
}

impl core::fmt::Display for ServedPath {
    /// As its client and the kernel name it, `ip:CLIENT@ip:SERVER`.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let path = PathAddr {
            src: Some(self.client.ip().to_canonical()),
            dst: SocketAddr::new(self.server.to_canonical(), 0),
        };
        path.fmt(f)
    }
}

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address or the port can't be had, or an argument is wrong.
    #[error(transparent)]
    Rtrs(#[from] rtrs::Error),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] VerbsError),
    /// The system gives no thread, descriptor or random bytes.
    #[error("{0}")]
    System(#[from] io::Error),
    /// The loop ended at once.
    #[error(transparent)]
    Loop(#[from] ReactorError),
}

/// One loop of a server.
#[derive(Debug)]
struct Turning {
    handle: Handle<Command, Done>,
    thread: JoinHandle<()>,
}

/// A running server. Dropping it stops it, and waits for that.
#[derive(Debug)]
pub struct Serving {
    loops: Vec<Turning>,
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
        let mut this = Self {
            loops: Vec::new(),
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
            let handle = handles[index].clone();
            let (send, ready) = (send.clone(), ready.clone());
            let name = match index {
                0 => "ferroce-io".to_owned(),
                _ => format!("ferroce-io-{index}"),
            };
            // Those that run already are stopped when this is dropped.
            let thread = Builder::new().name(name).spawn(move || {
                let ended = caught(|| Service::run(reactor, device, plan, ready));
                send.send(ServeEvent::Stopped(ended.err()));
            });
            let thread = thread.inspect_err(|_| this.quit())?;
            this.loops.push(Turning { handle, thread });
            this.running += 1;
        }
        drop(ready);
        for _ in 0..this.loops.len() {
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

    /// Returns the statistics. `None` when its loops have ended.
    pub fn stats(&self) -> Option<ServeStats> {
        let asked: Vec<_> = self.loops.iter().map(|turning| (turning, turning.ask())).collect();
        let answers = asked
            .into_iter()
            .filter_map(|(turning, answer)| turning.wait_for(&answer));
        answers.reduce(|mut sum, of_loop| {
            sum.add(&of_loop);
            sum
        })
    }

    /// Steers it, from any thread.
    pub fn control(&self) -> ServeControl {
        ServeControl::new(self.loops.iter().map(|turning| turning.handle.clone()).collect())
    }

    fn ask_to_stop(&self) {
        for turning in &self.loops {
            turning.handle.command(Command::Stop);
        }
    }

    fn quit(&self) {
        for turning in &self.loops {
            turning.handle.command(Command::Quit);
        }
    }

    /// Ends the sessions in good order and waits until what they wrote is durable; the events of that.
    pub fn stop(&mut self) -> Vec<ServeEvent> {
        self.ask_to_stop();
        let mut events = Vec::new();
        while self.running > 0 {
            let ended = self.loops.iter().all(|turning| turning.thread.is_finished());
            match self.next(Duration::from_millis(50)) {
                Some(event) => events.push(event),
                None if ended => break,
                None => {}
            }
        }
        for turning in self.loops.drain(..) {
            let _ = turning.thread.join();
        }
        events
    }
}

impl Turning {
    fn ask(&self) -> Receiver<ServeStats> {
        let (send, answer) = channel();
        self.handle.command(Command::Stats(send));
        answer
    }

    fn wait_for<T>(&self, answer: &Receiver<T>) -> Option<T> {
        loop {
            match answer.recv_timeout(Duration::from_millis(100)) {
                Ok(answer) => return Some(answer),
                Err(RecvTimeoutError::Timeout) if !self.thread.is_finished() => {}
                Err(_) => return answer.try_recv().ok(),
            }
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if !self.loops.is_empty() {
            self.stop();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use ferroce_rig::{Host, Session};
    use rnbd_disk::Caching;
    use roce::{DeviceConfig, LocalDevice};
    use rtrs::{addr::PathAddr, client::SessionConfig};

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
            server.loops[failing].handle.command(Command::Panic);
            let deadline = Instant::now() + Duration::from_secs(60);
            let why = loop {
                assert!(Instant::now() < deadline);
                if let Some(ServeEvent::Stopped(why)) = server.next(Duration::from_millis(10)) {
                    break why.expect("nobody asked it to end");
                }
            };
            assert!(why.contains("as intended"), "{why}");
            while server.loops.iter().any(|turning| !turning.thread.is_finished()) {
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
