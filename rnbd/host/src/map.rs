//! A device of a server as an NBD socket.

use core::{convert::Infallible, time::Duration};
use std::{
    io,
    path::PathBuf,
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread::{Builder, JoinHandle},
};

use rnbd::{
    Errno,
    block::Geometry,
    client::{device::DeviceCounters, error::MapError},
    proto::AccessMode,
};
use roce::LocalDevice;
use roce_reactor::{Handle, Helper, Reactor, ReactorConfig};
use rtrs::{
    Error, IoError, PathError,
    client::{SessionConfig, SessionInfo},
};

use crate::{
    caught::caught,
    mapper::{Command, Service},
    stats::LoopStats,
};

/// How to map.
#[derive(Clone, Debug)]
pub struct MapConfig {
    /// The session.
    pub session: SessionConfig,
    /// The device, as the server calls it.
    pub device: String,
    /// How it is opened.
    pub mode: AccessMode,
    /// The socket file for NBD clients, made with mode 0600 and removed at the end.
    pub socket: PathBuf,
    /// NBD clients beyond this many are turned away.
    pub max_clients: usize,
    /// Time for the requests of NBD clients in flight when it stops.
    pub grace: Duration,
    /// The loop.
    pub reactor: ReactorConfig,
}

impl MapConfig {
    /// Read and write, 16 NBD clients, 5 s of grace.
    pub fn new(session: SessionConfig, device: impl Into<String>, socket: impl Into<PathBuf>) -> Self {
        Self {
            session,
            device: device.into(),
            mode: AccessMode::ReadWrite,
            socket: socket.into(),
            max_clients: 16,
            grace: Duration::from_secs(5),
            reactor: ReactorConfig::default(),
        }
    }
}

/// Why a mapping ended without having been asked to, or not in good order.
#[derive(Debug, thiserror::Error)]
pub enum MapFailure {
    /// The session could not be opened.
    #[error(transparent)]
    Session(Error),
    /// The device could not be opened.
    #[error(transparent)]
    Map(MapError),
    /// The socket for NBD clients can't be made.
    #[error("{0}")]
    Socket(io::Error),
    /// The session was lost.
    #[error("{0}")]
    Lost(PathError),
    /// What was written could not be made durable at the end.
    #[error("{0}")]
    Flush(Errno),
    /// The device could not be closed.
    #[error("{0}")]
    Close(IoError),
    /// The loop could not go on.
    #[error("{0}")]
    Loop(String),
}

/// What happens.
#[derive(Debug)]
pub enum MapEvent {
    /// The device is there, and NBD clients can connect.
    Mapped {
        /// What the device is like.
        geometry: Geometry,
        /// What the session can do.
        info: SessionInfo,
    },
    /// It is over.
    Ended(Result<(), MapFailure>),
}

/// What a mapping has done so far.
#[derive(Clone, Debug, Default)]
pub struct MapStats {
    /// The loop.
    pub turns: LoopStats,
    /// The device.
    pub device: DeviceCounters,
    /// NBD clients connected now.
    pub clients: usize,
    /// NBD clients that were not served.
    pub turned_away: u64,
}

/// A mapping. Dropping it ends it, and waits for that.
#[derive(Debug)]
pub struct Mapping {
    handle: Handle<Command, ()>,
    helper: Helper<()>,
    events: Receiver<MapEvent>,
    thread: Option<JoinHandle<MapStats>>,
    /// At the end.
    last: MapStats,
    ended: bool,
}

impl Mapping {
    /// Begins to open the session; [`MapEvent::Mapped`] or [`MapEvent::Ended`] follows.
    ///
    /// # Errors
    /// When the system gives no thread or descriptor.
    pub fn start(device: LocalDevice, config: MapConfig) -> io::Result<Self> {
        let (reactor, helper) = Reactor::<Service>::new(config.reactor)?;
        let handle = reactor.handle();
        let (tell, events) = channel();
        let thread = Builder::new().name("ferroce-io".into()).spawn(move || {
            let told = tell.clone();
            let run = || Ok::<_, Infallible>(Service::run(reactor, device, config, tell));
            caught(run).unwrap_or_else(|e| {
                // Nobody listens any more when the program ends.
                let _ = told.send(MapEvent::Ended(Err(MapFailure::Loop(e))));
                MapStats::default()
            })
        })?;
        Ok(Self {
            handle,
            helper,
            events,
            thread: Some(thread),
            last: MapStats::default(),
            ended: false,
        })
    }

    /// The next event, or `None` after this time.
    pub fn next(&mut self, time: Duration) -> Option<MapEvent> {
        let event = match self.events.recv_timeout(time) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => {
                self.ended = true;
                return None;
            }
        };
        self.ended |= matches!(event, MapEvent::Ended(_));
        Some(event)
    }

    /// What it has done so far.
    pub fn stats(&mut self) -> MapStats {
        let (send, answer) = channel();
        self.handle.command(Command::Stats(send));
        loop {
            match answer.recv_timeout(Duration::from_millis(100)) {
                Ok(stats) => return stats,
                Err(RecvTimeoutError::Timeout) if self.thread.as_ref().is_some_and(|t| !t.is_finished()) => {}
                Err(_) => break,
            }
        }
        self.join();
        answer.try_recv().unwrap_or_else(|_| self.last.clone())
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take()
            && let Ok(last) = thread.join()
        {
            self.last = last;
        }
        // It has no jobs.
        self.helper.run_for(Duration::ZERO);
    }

    /// Ends it: NBD clients' requests are answered, what was written is made durable, the device is closed and the session ended.
    /// [`MapEvent::Ended`] follows.
    pub fn stop(&self) {
        self.handle.command(Command::Stop);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.stop();
        self.join();
    }
}

/// Where the loop reports to.
pub(crate) type Tell = Sender<MapEvent>;
