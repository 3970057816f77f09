//! A server of exports.

use core::time::Duration;
use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{Builder, JoinHandle},
};

use rnbd::server::{Limits, ServerCounters};
use rnbd_disk::{DiskConfig, Exports};
use roce::{LocalDevice, verbs::provider::VerbsError};
use roce_reactor::{Handle, Helper, Reactor, ReactorConfig, ReactorError};
use rtrs::{
    PathError,
    server::{ServerConfig, request::SessionOpened},
};

use crate::{
    caught::caught,
    server::{Command, Done, Service},
    stats::LoopStats,
};

/// How to serve.
#[derive(Debug)]
pub struct ServeConfig {
    /// Sessions.
    pub rtrs: ServerConfig,
    /// Devices.
    pub limits: Limits,
    /// What is offered.
    pub exports: Arc<Exports>,
    /// The disks.
    pub disk: DiskConfig,
    /// The loop.
    pub reactor: ReactorConfig,
    /// Time for sessions to end and files to be written back when it stops.
    pub grace: Duration,
}

/// What happens.
#[derive(Debug)]
pub enum ServeEvent {
    /// A client has opened a session.
    SessionOpened(SessionOpened),
    /// A session is over.
    SessionClosed(SessionOpened, PathError),
    /// The loop has ended; an error says that nobody asked it to.
    Stopped(Option<String>),
}

/// What a server has done so far.
#[derive(Clone, Debug, Default)]
pub struct ServeStats {
    /// The loop.
    pub turns: LoopStats,
    /// Block devices.
    pub rnbd: ServerCounters,
    /// Sessions, by name.
    pub rtrs: Vec<(&'static str, u64)>,
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

/// A running server. Dropping it stops it, and waits for that.
#[derive(Debug)]
pub struct Serving {
    handle: Handle<Command, Done>,
    helper: Helper<Done>,
    events: Receiver<ServeEvent>,
    thread: Option<JoinHandle<()>>,
    local: SocketAddr,
    stopped: bool,
}

impl Serving {
    /// Listens, and serves from then on.
    ///
    /// # Errors
    /// When the address or port can't be listened on, or the system refuses.
    pub fn start(device: LocalDevice, config: ServeConfig) -> Result<Self, StartError> {
        let (reactor, helper) = Reactor::<Service>::new(config.reactor)?;
        let handle = reactor.handle();
        let (tell, events) = channel();
        let (ready, started) = channel();
        let thread = Builder::new().name("ferroce-io".into()).spawn(move || {
            let told = tell.clone();
            let ended = caught(|| Service::run(reactor, device, config, tell, &ready));
            // Nobody listens any more when the program ends.
            let _ = told.send(ServeEvent::Stopped(ended.err()));
        })?;
        let started = started.recv().unwrap_or_else(|_| {
            let gone = io::Error::other("the loop ended at once");
            Err(StartError::System(gone))
        });
        match started {
            Ok(local) => Ok(Self {
                handle,
                helper,
                events,
                thread: Some(thread),
                local,
                stopped: false,
            }),
            Err(e) => {
                let _ = thread.join();
                Err(e)
            }
        }
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// The next event, or `None` after this time. Meanwhile files are opened and closed.
    pub fn next(&mut self, time: Duration) -> Option<ServeEvent> {
        if let Ok(event) = self.events.try_recv() {
            return Some(self.seen(event));
        }
        self.helper.run_for(time);
        let event = self.events.try_recv().ok()?;
        Some(self.seen(event))
    }

    fn seen(&mut self, event: ServeEvent) -> ServeEvent {
        self.stopped |= matches!(event, ServeEvent::Stopped(_));
        event
    }

    /// What it has done so far. `None` when the loop has ended.
    pub fn stats(&self) -> Option<ServeStats> {
        let (send, answer) = channel();
        self.handle.command(Command::Stats(send));
        self.wait_for(&answer)
    }

    fn wait_for<T>(&self, answer: &Receiver<T>) -> Option<T> {
        loop {
            match answer.recv_timeout(Duration::from_millis(100)) {
                Ok(answer) => return Some(answer),
                Err(RecvTimeoutError::Timeout) if self.thread.as_ref().is_some_and(|t| !t.is_finished()) => {}
                Err(_) => return answer.try_recv().ok(),
            }
        }
    }

    /// Ends the sessions in good order and waits until what they wrote is durable; the events of that.
    pub fn stop(&mut self) -> Vec<ServeEvent> {
        self.handle.command(Command::Stop);
        let mut events = Vec::new();
        while !self.stopped {
            match self.next(Duration::from_millis(50)) {
                Some(event) => events.push(event),
                None if self.thread.as_ref().is_none_or(JoinHandle::is_finished) => break,
                None => {}
            }
        }
        // Files that are still to be closed.
        while self.helper.run_for(Duration::ZERO) {}
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        events
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.stop();
        }
    }
}

/// Where the loop reports to.
pub(crate) type Tell = Sender<ServeEvent>;
