//! Listening sockets, and a thread for each accepted connection.

use std::{
    io::{self, Write},
    net::Shutdown,
    os::{fd::AsFd, unix::net::UnixStream},
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;
use roce_net::places::{Entered, Full, Limits, Peer, Places};
use socket2::Socket;

use super::{peer::Authority, shared::Shared};

/// Time that the end waits for answers to be read.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Pause after a failure to accept.
const PAUSE: Duration = Duration::from_millis(500);

/// Writes all bytes, or fails after this time, however little the peer takes at a time.
pub(super) fn write_within(mut stream: &Socket, mut bytes: &[u8], time: Duration) -> io::Result<()> {
    let end = Instant::now() + time;
    while !bytes.is_empty() {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Protocol that a listener serves.
pub(super) trait Service: Clone + Send + 'static {
    const LIMITS: Limits;
    /// Time for the first request; until it has arrived the connection is half-open.
    const FIRST_REQUEST: Duration;
    /// Returns the peer of a new connection; an error is its last line.
    fn identify(&self, stream: &Socket) -> Result<Peer, String>;
    /// Serves a connection to its end.
    fn serve(&self, stream: &Socket, place: &Place);
    /// Last line of a connection that gets no place.
    fn full(&self, full: &Full) -> String;
    /// Last line of a connection whose first request is late.
    fn late(&self) -> String;
    /// Last line of an evicted half-open connection.
    fn evicted(&self) -> String;
}

/// A listening socket's thread.
pub(super) struct Acceptor {
    /// Closed to wake it up.
    wake: UnixStream,
    thread: JoinHandle<()>,
    connections: Arc<Mutex<Connections>>,
}

/// The thread of a connection.
struct Connection {
    id: u64,
    thread: JoinHandle<()>,
    end: End,
}

/// Writes a last line, and shuts the connection down.
type End = Box<dyn Fn(&str, Shutdown) + Send>;

struct Connections {
    places: Places<Instant>,
    threads: Vec<Connection>,
}

impl Connections {
    fn end(&self, ids: &[u64], text: &str) {
        let those = self.threads.iter().filter(|c| ids.contains(&c.id));
        those.for_each(|connection| (connection.end)(text, Shutdown::Both));
    }
}

/// The place of a connection, until it is dropped.
pub(super) struct Place {
    connections: Arc<Mutex<Connections>>,
    id: u64,
    peer: Peer,
}

impl Place {
    pub(super) fn authority(&self) -> Authority {
        match self.peer.trusted {
            true => Authority::Full,
            false => Authority::Limited,
        }
    }

    /// Ends the deadline and the risk of eviction: the first request has arrived. False: the connection was evicted before.
    pub(super) fn opened(&self) -> bool {
        self.connections.lock().places.open(self.id).is_ok()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.lock().places.leave(self.id);
    }
}

impl Acceptor {
    pub(super) fn start<V: Service>(listener: Socket, shared: Arc<Shared>, service: V) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let (wake, woken) = UnixStream::pair()?;
        let connections = Arc::new(Mutex::new(Connections {
            places: Places::new(V::LIMITS),
            threads: Vec::new(),
        }));
        let all = connections.clone();
        let thread = thread::Builder::new().name("ferroce-accept".into()).spawn(move || {
            loop {
                let deadline = all.lock().places.deadline(V::FIRST_REQUEST);
                if !wait(&listener, &woken, deadline) || shared.is_ending() {
                    break;
                }
                expire(&all, &service);
                match listener.accept() {
                    Ok((stream, _)) => admit(&all, stream, &service),
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    Err(e) => {
                        // Such as too many open files: closed connections make room.
                        tracing::warn!("a connection could not be accepted: {e}");
                        thread::sleep(PAUSE);
                    }
                }
            }
        })?;
        Ok(Self {
            wake,
            thread,
            connections,
        })
    }

    /// Stops accepting, lets all requests be answered, and waits until all connections are closed.
    pub(super) fn end(self) {
        drop(self.wake);
        let _ = self.thread.join();
        let threads = std::mem::take(&mut self.connections.lock().threads);
        threads
            .iter()
            .for_each(|connection| (connection.end)("", Shutdown::Read));
        let end = Instant::now() + LAST_WORDS;
        for connection in threads {
            while !connection.thread.is_finished() && Instant::now() < end {
                thread::sleep(Duration::from_millis(5));
            }
            (connection.end)("", Shutdown::Both);
            let _ = connection.thread.join();
        }
    }
}

/// Waits for a connection or a deadline; false: stop.
fn wait(listener: &impl AsFd, woken: &UnixStream, deadline: Option<Instant>) -> bool {
    let mut fds = [
        PollFd::new(listener.as_fd(), PollFlags::POLLIN),
        PollFd::new(woken.as_fd(), PollFlags::POLLIN),
    ];
    let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
    // Rounded up, so that the deadline has passed afterwards.
    let timeout = deadline.map(|at| PollTimeout::try_from(left(at).as_millis() + 1).unwrap_or(PollTimeout::MAX));
    // An interrupted poll is repeated by the caller.
    let _ = poll(&mut fds, timeout.unwrap_or(PollTimeout::NONE));
    fds[1].any() != Some(true)
}

fn expire<V: Service>(all: &Mutex<Connections>, service: &V) {
    let mut all = all.lock();
    let late = all.places.expire(V::FIRST_REQUEST, Instant::now());
    if !late.is_empty() {
        all.end(&late, &service.late());
    }
}

fn admit(all: &Arc<Mutex<Connections>>, stream: Socket, service: &impl Service) {
    let mut connections = all.lock();
    connections
        .threads
        .retain(|connection| !connection.thread.is_finished());
    let entered = service.identify(&stream).and_then(|peer| {
        let entered = connections.places.enter(peer, Instant::now());
        entered
            .map(|entered| (entered, peer))
            .map_err(|full| service.full(&full))
    });
    let (Entered { id, evicted }, peer) = match entered {
        Ok(entered) => entered,
        Err(text) => {
            // A new socket has room for a line.
            let _ = (&stream).write(text.as_bytes());
            return;
        }
    };
    if let Some(evicted) = evicted {
        connections.end(&[evicted], &service.evicted());
    }
    let (service, all) = (service.clone(), all.clone());
    let spawned = stream.try_clone().and_then(|other| {
        let thread = thread::Builder::new().name("ferroce-ctl".into()).spawn(move || {
            let place = Place {
                connections: all,
                id,
                peer,
            };
            service.serve(&stream, &place);
            // A clone of it is still open.
            let _ = stream.shutdown(Shutdown::Both);
        })?;
        Ok((thread, other))
    });
    match spawned {
        Ok((thread, other)) => connections.threads.push(Connection {
            id,
            thread,
            end: Box::new(move |text, how| {
                // Nothing has been written to a half-open connection: it has room for a line.
                let _ = (&other).write(text.as_bytes());
                let _ = other.shutdown(how);
            }),
        }),
        Err(e) => {
            connections.places.leave(id);
            tracing::warn!("no thread for a connection: {e}");
        }
    }
}
