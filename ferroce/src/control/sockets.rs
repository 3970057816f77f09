//! Sockets that are listened on, and the threads of those who have connected.

use std::{
    io::{self, Write},
    net::{Shutdown, TcpListener, TcpStream},
    os::{
        fd::AsFd,
        unix::net::{UnixListener, UnixStream},
    },
    sync::{Arc, mpsc::sync_channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;
use rnbd::Errno;
use rnbd_host::control::Refused;

use super::{
    Shared,
    connection::{Greeting, HELLO_TIME, Output, Requests, refusal},
};

/// Connections of a socket at a time.
const MAX_CONNECTIONS: usize = 32;
/// Lines that wait for who reads slowly.
const MAX_LINES: usize = 64;
/// Who takes nothing for that long is cut off.
const WRITE_TIME: Duration = Duration::from_secs(30);
/// What is still to be said at the end gets that long.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// After a failure to accept.
const PAUSE: Duration = Duration::from_millis(500);

/// A stream of either kind.
pub(super) trait Stream: AsFd + Write + Send + Sized + 'static {
    fn try_clone(&self) -> io::Result<Self>;
    fn shutdown(&self, how: Shutdown) -> io::Result<()>;
}

impl Stream for UnixStream {
    fn try_clone(&self) -> io::Result<Self> {
        Self::try_clone(self)
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        Self::shutdown(self, how)
    }
}

impl Stream for TcpStream {
    fn try_clone(&self) -> io::Result<Self> {
        Self::try_clone(self)
    }

    fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        Self::shutdown(self, how)
    }
}

/// A listening socket's thread.
pub(super) struct Acceptor {
    /// Wakes it up when it is closed.
    wake: UnixStream,
    thread: JoinHandle<()>,
    ends: Ends,
}

/// Somebody who has connected.
struct Guest {
    thread: JoinHandle<()>,
    end: Box<dyn Fn(Shutdown) + Send>,
}

type Ends = Arc<Mutex<Vec<Guest>>>;

impl Acceptor {
    pub(super) fn unix(
        listener: UnixListener,
        shared: Arc<Shared>,
        serve: impl Fn(&UnixStream) + Clone + Send + 'static,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let too_many = Refused::new(Errno::EBUSY, format!("{MAX_CONNECTIONS} are connected already"));
        let accept = move |listener: &UnixListener| {
            let (stream, _) = listener.accept()?;
            stream.set_nonblocking(false)?;
            Ok(stream)
        };
        Self::start(listener, shared, accept, serve, refusal(&too_many))
    }

    pub(super) fn tcp(
        listener: TcpListener,
        shared: Arc<Shared>,
        serve: impl Fn(&TcpStream) + Clone + Send + 'static,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let accept = move |listener: &TcpListener| {
            let (stream, _) = listener.accept()?;
            stream.set_nonblocking(false)?;
            Ok(stream)
        };
        Self::start(listener, shared, accept, serve, super::http::BUSY.to_owned())
    }

    fn start<L: AsFd + Send + 'static, S: Stream>(
        listener: L,
        shared: Arc<Shared>,
        accept: impl Fn(&L) -> io::Result<S> + Send + 'static,
        serve: impl Fn(&S) + Clone + Send + 'static,
        too_many: String,
    ) -> io::Result<Self> {
        let (wake, woken) = UnixStream::pair()?;
        let ends = Ends::default();
        let guests = ends.clone();
        let thread = thread::Builder::new().name("ferroce-accept".into()).spawn(move || {
            while wait(&listener, &woken) && !shared.is_ending() {
                match accept(&listener) {
                    Ok(stream) => admit(&guests, stream, serve.clone(), &too_many),
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                    Err(e) => {
                        // Such as too many open files: those who leave make room.
                        tracing::warn!("a connection could not be accepted: {e}");
                        thread::sleep(PAUSE);
                    }
                }
            }
        })?;
        Ok(Self { wake, thread, ends })
    }

    /// Takes nobody more, has all answered, and waits until all have gone.
    pub(super) fn end(self) {
        drop(self.wake);
        let _ = self.thread.join();
        let guests = std::mem::take(&mut *self.ends.lock());
        guests.iter().for_each(|guest| (guest.end)(Shutdown::Read));
        let end = Instant::now() + LAST_WORDS;
        for guest in guests {
            while !guest.thread.is_finished() && Instant::now() < end {
                thread::sleep(Duration::from_millis(5));
            }
            (guest.end)(Shutdown::Both);
            let _ = guest.thread.join();
        }
    }
}

/// Waits for somebody to come; false when nobody is wanted any more.
fn wait(listener: &impl AsFd, woken: &UnixStream) -> bool {
    let mut fds = [
        PollFd::new(listener.as_fd(), PollFlags::POLLIN),
        PollFd::new(woken.as_fd(), PollFlags::POLLIN),
    ];
    // Interrupted, it is simply tried again.
    let _ = poll(&mut fds, PollTimeout::NONE);
    fds[1].any() != Some(true)
}

fn admit<S: Stream>(guests: &Ends, mut stream: S, serve: impl Fn(&S) + Send + 'static, too_many: &str) {
    let mut guests = guests.lock();
    guests.retain(|guest| !guest.thread.is_finished());
    if guests.len() >= MAX_CONNECTIONS {
        // A new socket has room for a line.
        let _ = stream.write_all(too_many.as_bytes());
        return;
    }
    let Ok(other) = stream.try_clone() else { return };
    let thread = thread::Builder::new().name("ferroce-ctl".into()).spawn(move || {
        serve(&stream);
        // It is open here still.
        let _ = stream.shutdown(Shutdown::Both);
    });
    match thread {
        Ok(thread) => guests.push(Guest {
            thread,
            end: Box::new(move |how| drop(other.shutdown(how))),
        }),
        Err(e) => tracing::warn!("no thread for a connection: {e}"),
    }
}

/// Requests and answers, to the end of the connection.
pub(super) fn converse(shared: &Arc<Shared>, stream: &UnixStream) {
    let writing = stream.try_clone();
    let set = stream.set_read_timeout(Some(HELLO_TIME));
    let (Ok(mut writing), Ok(())) = (writing, set) else {
        return;
    };
    let (lines, to_write) = sync_channel::<String>(MAX_LINES);
    let writer = thread::Builder::new().name("ferroce-ctl".into()).spawn(move || {
        let _ = writing.set_write_timeout(Some(WRITE_TIME));
        for line in to_write {
            if writing.write_all(line.as_bytes()).is_err() {
                break;
            }
        }
        // The reader is not to wait for more either.
        let _ = writing.shutdown(Shutdown::Both);
    });
    let requests = Requests::new(shared.clone(), Output::Lines(lines));
    requests.read(stream, Greeting::Until(Instant::now() + HELLO_TIME));
    requests.end();
    if let Ok(writer) = writer {
        let _ = writer.join();
    }
}
