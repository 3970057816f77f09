//! Machine with its thread.

use std::{
    fmt, io,
    net::IpAddr,
    sync::{Arc, mpsc::channel},
    task::{Poll, Waker},
    thread::{Builder, JoinHandle},
    time::Duration,
};

use rand::{SeedableRng, rngs::StdRng};
use roce::{
    DeviceConfig, Hardware, LocalDevice,
    reactor::{LoopStats, Reactor, ReactorConfig},
};
use roce_verbs::provider::{Cx, VerbsError};

use crate::{
    machine::Machine,
    service::MachineService,
    shared::{Command, Shared},
};

/// Machine in a thread of its own. When it is dropped it waits until the machine has stopped.
pub struct Hosted<M: Machine> {
    shared: Arc<Shared<M>>,
    addr: IpAddr,
    thread: Option<JoinHandle<()>>,
}

impl<M: Machine> fmt::Debug for Hosted<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hosted")
            .field("addr", &self.addr)
            .finish_non_exhaustive()
    }
}

impl<M: Machine> Drop for Hosted<M> {
    fn drop(&mut self) {
        self.shared.command(Command::Stop);
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed.
            let _ = thread.join();
        }
    }
}

impl<M: Machine> Hosted<M> {
    /// Opens a device in a thread of this name, makes the machine there with `make`, and waits for that. If one of the RDMA devices has the
    /// address, that is its device, with its own settings.
    ///
    /// # Errors
    /// When the address is not one of this host's, or has another owner of UDP port 4791 already; errors of `make`.
    pub fn start(
        name: &str,
        (device, rdma): (DeviceConfig, Option<Box<dyn Hardware>>),
        make: impl FnOnce(&mut Cx<'_>) -> Result<M, VerbsError> + Send + 'static,
    ) -> io::Result<Self> {
        let mut seed = [0; 32];
        getrandom::fill(&mut seed).map_err(|e| io::Error::other(e.to_string()))?;
        let rng = StdRng::from_seed(seed);
        let addr = device.addr;
        let reactor = Reactor::<MachineService<M>>::new(ReactorConfig::default())?;
        let shared = Arc::new(Shared::new(reactor.handle()));
        let (send, started) = channel();
        let of_thread = shared.clone();
        let run = move || {
            let device = match open(device, rdma) {
                Ok(device) => device,
                Err(e) => return drop(send.send(Err(io_error(e)))),
            };
            let (shared, ended) = (of_thread.clone(), of_thread);
            let ran = reactor.run(device, |turn| {
                let mut service = MachineService::new(shared, rng);
                let begun = service.begin(turn, make).map_err(io_error);
                if begun.is_err() {
                    turn.stop();
                }
                // It is waited for below.
                let _ = send.send(begun);
                service
            });
            ended.end(
                &ran.err()
                    .map_or_else(|| io::ErrorKind::NotConnected.into(), io::Error::other),
            );
        };
        let thread = Builder::new().name(name.into()).spawn(run)?;
        let hosted = Self {
            shared,
            addr,
            thread: Some(thread),
        };
        started
            .recv()
            .unwrap_or_else(|_| Err(io::ErrorKind::NotConnected.into()))?;
        Ok(hosted)
    }

    /// Address of the device.
    pub fn addr(&self) -> IpAddr {
        self.addr
    }

    /// Calls the machine from this thread. What is to be posted leaves by the machine's thread.
    ///
    /// # Errors
    /// Why the machine has ended.
    pub fn call<T>(&self, f: impl FnOnce(&mut M) -> T) -> io::Result<T> {
        self.shared.call(f)
    }

    /// Calls the machine from this thread again after each change, until it is ready or the time is over.
    ///
    /// # Errors
    /// `TimedOut`, and why the machine has ended.
    pub fn wait<T>(&self, timeout: Option<Duration>, f: impl FnMut(&mut M) -> Poll<T>) -> io::Result<T> {
        self.shared.wait(timeout, f)
    }

    /// Has the machine's thread run a closure, which must not wait. If the machine has ended the closure is dropped.
    pub fn submit(&self, f: impl FnOnce(&mut M, &mut Cx<'_>) + Send + 'static) {
        self.shared.command(Command::Run(Box::new(f)));
    }

    /// Runs a closure in the machine's thread, and waits for its result.
    ///
    /// # Errors
    /// `NotConnected`: the machine has ended.
    pub fn run<T: Send + 'static>(&self, f: impl FnOnce(&mut M, &mut Cx<'_>) -> T + Send + 'static) -> io::Result<T> {
        let (send, result) = channel();
        self.submit(move |machine, cx| {
            // It is waited for below.
            let _ = send.send(f(machine, cx));
        });
        result.recv().map_err(|_| io::ErrorKind::NotConnected.into())
    }

    /// Returns the statistics of the machine's loop.
    ///
    /// # Errors
    /// `NotConnected`: the machine has ended.
    pub fn stats(&self) -> io::Result<LoopStats> {
        let (send, stats) = channel();
        self.shared.command(Command::Stats(send));
        stats.recv().map_err(|_| io::ErrorKind::NotConnected.into())
    }

    /// Has a task woken when a part of the machine changes. To be called before the part is looked at, so that no change is missed.
    pub fn wake(&self, key: M::Key, waker: &Waker) {
        self.shared.wake(key, waker);
    }

    /// Forgets the tasks that wait for a part.
    pub fn forget(&self, key: M::Key) {
        self.shared.forget(key);
    }
}

/// Opens the RDMA devices if one of them has the address, or one in software.
fn open(device: DeviceConfig, rdma: Option<Box<dyn Hardware>>) -> Result<LocalDevice, VerbsError> {
    let none: &[DeviceConfig] = &[];
    match rdma.filter(|rdma| rdma.owner(device.addr).is_some()) {
        Some(rdma) => Ok(LocalDevice::open(none)?.with_hardware(rdma)),
        None => LocalDevice::open(&[device]),
    }
}

fn io_error(error: VerbsError) -> io::Error {
    match error {
        VerbsError::Io { source, context } => io::Error::new(source.kind(), format!("{context}: {source}")),
        VerbsError::Address(text) => io::Error::new(io::ErrorKind::AddrInUse, text),
        VerbsError::Invalid(text) => io::Error::new(io::ErrorKind::InvalidInput, text),
        other => io::Error::other(other),
    }
}
