//! Accepting clients, and stopping.

use std::{
    collections::HashMap,
    fmt,
    io::{self, Read, Write},
    net::Shutdown,
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::{connection, socket::SocketFile};
use crate::{backend::Throttle, block::BlockDevice};

/// A device under a name.
pub struct NbdExport<D> {
    /// What clients ask for; a client that asks for "" gets the first export.
    pub name: String,
    /// Shown to those who ask.
    pub description: String,
    /// The bytes.
    pub device: Arc<D>,
}

impl<D> fmt::Debug for NbdExport<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdExport")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// How to serve.
#[derive(Debug)]
pub struct NbdConfig<D> {
    /// The socket file, made with mode 0600 and removed at the end.
    pub socket: PathBuf,
    /// At least one.
    pub exports: Vec<NbdExport<D>>,
    /// Clients beyond this many are turned away.
    pub max_connections: usize,
    /// Time for requests in flight to complete when stopping.
    pub grace: Duration,
}

impl<D> NbdConfig<D> {
    /// One device without a name, 16 connections, 5 s of grace.
    pub fn new(socket: impl Into<PathBuf>, device: Arc<D>) -> Self {
        let export = NbdExport {
            name: String::new(),
            description: String::new(),
            device,
        };
        Self {
            socket: socket.into(),
            exports: vec![export],
            max_connections: 16,
            grace: Duration::from_secs(5),
        }
    }

    /// Gives the first export a name; a client that asks for "" gets it all the same.
    #[must_use]
    pub fn named(mut self, name: impl Into<String>) -> Self {
        if let Some(first) = self.exports.first_mut() {
            first.name = name.into();
        }
        self
    }
}

struct Clients {
    open: HashMap<u64, UnixStream>,
    next: u64,
    stopping: bool,
    /// The accepting thread has ended and the socket file is gone.
    ended: bool,
}

struct Shared {
    clients: Mutex<Clients>,
    changed: Condvar,
    waker: UnixStream,
    turned_away: AtomicU64,
    log: Throttle,
}

impl Shared {
    fn turn_away(&self, why: fmt::Arguments<'_>) {
        self.turned_away.fetch_add(1, Relaxed);
        if let Some(suppressed) = self.log.pass() {
            tracing::warn!(suppressed, "an NBD client is turned away: {why}");
        }
    }
}

/// Stops a server from any thread.
#[derive(Clone)]
pub struct StopHandle(Arc<Shared>);

impl StopHandle {
    /// Asks the server to stop: no new clients, requests that have arrived are answered.
    pub fn stop(&self) {
        let mut c = self.0.clients.lock();
        c.stopping = true;
        // The sending side stays open for the replies.
        for s in c.open.values() {
            let _ = s.shutdown(Shutdown::Read);
        }
        drop(c);
        let _ = (&self.0.waker).write_all(&[0]);
    }
}

impl fmt::Debug for StopHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StopHandle").finish_non_exhaustive()
    }
}

/// A running NBD server. Dropping it stops it.
pub struct NbdServer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    grace: Duration,
    path: PathBuf,
}

impl fmt::Debug for NbdServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdServer")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl NbdServer {
    /// Makes the socket file and starts to serve. Clients can connect when this returns.
    ///
    /// # Errors
    /// `InvalidInput` without an export, `AddrInUse` when another server has the socket, `AlreadyExists` when the path
    /// is something else, and those of the system.
    pub fn start<D: BlockDevice>(config: NbdConfig<D>) -> io::Result<Self> {
        if config.exports.is_empty() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "nothing to export"));
        }
        let file = SocketFile::bind(&config.socket)?;
        file.listener.set_nonblocking(true)?;
        let (waker, woken) = UnixStream::pair()?;
        waker.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let clients = Clients {
            open: HashMap::new(),
            next: 0,
            stopping: false,
            ended: false,
        };
        let shared = Arc::new(Shared {
            clients: Mutex::new(clients),
            changed: Condvar::new(),
            waker,
            turned_away: AtomicU64::new(0),
            log: Throttle::new(),
        });
        let (grace, path) = (config.grace, config.socket.clone());
        let s = shared.clone();
        let thread = thread::Builder::new().name("nbd-accept".into()).spawn(move || {
            accept(&s, &file, &woken, config);
            drop(file);
            s.clients.lock().ended = true;
            s.changed.notify_all();
        })?;
        Ok(Self {
            shared,
            thread: Some(thread),
            grace,
            path,
        })
    }

    /// For ctrl-C handlers.
    pub fn stop_handle(&self) -> StopHandle {
        StopHandle(self.shared.clone())
    }

    /// Clients connected now.
    pub fn connections(&self) -> usize {
        self.shared.clients.lock().open.len()
    }

    /// Clients that were not served so far: there were as many as may be, or the system gave no thread or descriptor.
    pub fn turned_away(&self) -> u64 {
        self.shared.turned_away.load(Relaxed)
    }

    /// Waits until somebody stops the server, then for the requests in flight.
    pub fn wait(mut self) {
        let mut c = self.shared.clients.lock();
        while !c.ended {
            self.shared.changed.wait(&mut c);
        }
        drop(c);
        self.finish();
    }

    /// Stops: no new clients, requests that have arrived are answered within the grace time, the socket file is gone.
    pub fn stop(mut self) {
        self.finish();
    }

    fn finish(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.stop_handle().stop();
        let _ = thread.join();
        let until = Instant::now() + self.grace;
        let mut c = self.shared.clients.lock();
        while !c.open.is_empty() {
            if self.shared.changed.wait_until(&mut c, until).timed_out() {
                tracing::warn!(
                    clients = c.open.len(),
                    "NBD clients did not take their replies in time; cut off"
                );
                for s in c.open.values() {
                    let _ = s.shutdown(Shutdown::Both);
                }
                break;
            }
        }
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.finish();
    }
}

fn accept<D: BlockDevice>(shared: &Arc<Shared>, file: &SocketFile, mut woken: &UnixStream, config: NbdConfig<D>) {
    let exports: Arc<[NbdExport<D>]> = config.exports.into();
    loop {
        if shared.clients.lock().stopping {
            return;
        }
        let mut fds = [file.listener.as_raw_fd(), woken.as_raw_fd()].map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        });
        // SAFETY: two elements.
        unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) };
        let _ = woken.read(&mut [0; 16]);
        match file.listener.accept() {
            Ok((stream, _)) => admit(shared, &exports, stream, config.max_connections),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(e) => {
                // Out of descriptors, most likely: it does not help to ask again at once.
                shared.turn_away(format_args!("{e}"));
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

fn admit<D: BlockDevice>(shared: &Arc<Shared>, exports: &Arc<[NbdExport<D>]>, stream: UnixStream, max: usize) {
    let mut c = shared.clients.lock();
    if c.open.len() >= max {
        shared.turn_away(format_args!("there are {max} already"));
        return;
    }
    let ready = stream.set_nonblocking(false).and_then(|()| stream.try_clone());
    let Ok(control) = ready.inspect_err(|e| shared.turn_away(format_args!("{e}"))) else {
        return;
    };
    if c.stopping {
        return;
    }
    let id = c.next;
    c.next += 1;
    c.open.insert(id, control);
    drop(c);
    let (s, exports) = (shared.clone(), exports.clone());
    let thread = thread::Builder::new().name("nbd-reader".into()).spawn(move || {
        let gone = Gone { shared: s, id };
        if let Err(e) = connection::serve(&stream, &exports) {
            tracing::debug!("NBD client: {e}");
        }
        // The registry holds a duplicate: this is what the client sees as the end.
        let _ = stream.shutdown(Shutdown::Both);
        drop(gone);
    });
    if let Err(e) = thread {
        shared.turn_away(format_args!("no thread: {e}"));
        shared.clients.lock().open.remove(&id);
    }
}

/// Takes a client off the list, also when its thread panics.
struct Gone {
    shared: Arc<Shared>,
    id: u64,
}

impl Drop for Gone {
    fn drop(&mut self) {
        self.shared.clients.lock().open.remove(&self.id);
        self.shared.changed.notify_all();
    }
}
