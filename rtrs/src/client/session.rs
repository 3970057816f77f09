//! A session: what a user of the transport holds.

use core::{fmt, time::Duration};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use roce_verbs::{AccessFlags, provider::Provider};

use super::{
    buffer::{IoBuffer, Pool},
    path::{Path, PathConfig, Submission},
    permit::{Permit, Permits},
};
use crate::{
    Direction, Error, IoError, PathError,
    addr::PathAddr,
    heartbeat::HeartbeatConfig,
    proto::{Uuid, info::check_name},
};

/// How to open a session.
#[derive(Clone, Debug)]
pub struct OpenArgs {
    /// Name; the server knows the session by it. No slash, no dot.
    pub name: String,
    /// Paths to the server; exactly one for now.
    pub paths: Vec<PathAddr>,
    /// Connections for I/O per path, at least 1 (the service connection comes on top). Default: number of CPUs.
    pub connections: u16,
    /// Longest time for each step of connecting. Default: 30 s, as the kernel's (`RTRS_CONNECT_TIMEOUT_MS`, `rtrs-clt.c`).
    pub connect_timeout: Duration,
    /// Heartbeats.
    pub heartbeat: HeartbeatConfig,
    /// Longest user header of a request, bytes; the server's limit holds as well.
    pub max_user_header: u16,
    /// Have the server revoke the key of each read's buffer when the read is done, as the kernel's client does. Off,
    /// all buffers stay open for the server's writes while the session lives; that spares two work requests per read.
    pub invalidate_reads: bool,
    /// Registered bytes for I/O buffers at most; `None`: what all requests in flight can use.
    pub buffer_bytes: Option<usize>,
    /// Threads that poll the I/O connections.
    pub progress_threads: usize,
    /// How long a thread polls an empty completion queue before it goes to sleep.
    pub spin: Duration,
}

impl OpenArgs {
    /// A session over one path, everything else by default.
    pub fn new(name: impl Into<String>, path: PathAddr) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self {
            name: name.into(),
            paths: vec![path],
            connections: u16::try_from(cpus).unwrap_or(64).min(64),
            connect_timeout: Duration::from_secs(30),
            heartbeat: HeartbeatConfig::default(),
            // RNBD's longest message (open) has 264.
            max_user_header: 320,
            invalidate_reads: true,
            buffer_bytes: None,
            progress_threads: 1,
            spin: Duration::from_micros(20),
        }
    }

    fn check(&self) -> Result<(), Error> {
        let config = |m: &str| Err(Error::Config(m.into()));
        if let Err(e) = check_name(&self.name) {
            return Err(Error::Config(e.to_string()));
        }
        if self.paths.len() != 1 {
            return config("a session needs exactly one path");
        }
        if self.connections == 0 || self.connections >= crate::proto::MAX_CONNECTIONS {
            return config("a path needs 1 to 4095 I/O connections");
        }
        if self.progress_threads == 0 {
            return config("a path needs at least one progress thread");
        }
        if self.heartbeat.interval.is_zero() || self.connect_timeout.is_zero() {
            return config("the heartbeat interval and the connect timeout must not be zero");
        }
        Ok(())
    }
}

/// Which connection a request goes over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ConType {
    /// The service connection: user messages other than I/O.
    Admin,
    /// An I/O connection; equal hints (a CPU or queue number) give the same one.
    Io(usize),
}

/// What a session can do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SessionInfo {
    /// Largest data of a request, bytes.
    pub max_io_size: u32,
    /// Requests in flight at most.
    pub queue_depth: u32,
    /// Pieces of memory that a request's data may have: one buffer.
    pub max_segments: u32,
    /// Longest user header, bytes.
    pub max_user_header: u32,
    /// The server changes the key of a chunk with every request (`always_invalidate`).
    pub new_rkeys: bool,
}

/// How a request ended.
#[derive(Debug)]
pub struct Outcome<P: Provider> {
    /// Success, the server's error number, or what broke.
    pub result: Result<(), IoError>,
    /// The request's buffer.
    pub data: Option<IoBuffer<P>>,
}

struct Inner<P: Provider> {
    name: String,
    info: SessionInfo,
    permits: Arc<Permits>,
    pool: Arc<Pool<P>>,
    /// One now; requests go to the first that is up.
    paths: Vec<Arc<Path<P>>>,
}

impl<P: Provider> Drop for Inner<P> {
    fn drop(&mut self) {
        for path in &self.paths {
            path.close();
        }
    }
}

/// A session with a server. Clones are the same session; it is closed when the last one goes, or by
/// [`Session::close`].
pub struct Session<P: Provider>(Arc<Inner<P>>);

impl<P: Provider> Clone for Session<P> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<P: Provider> fmt::Debug for Session<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("name", &self.0.name)
            .field("info", &self.0.info)
            .finish_non_exhaustive()
    }
}

impl<P: Provider> Session<P> {
    /// Connects to the server and makes the handshake.
    ///
    /// # Errors
    /// Says what is wrong with the arguments, the way to the server, or its answer.
    pub fn open(provider: &P, args: OpenArgs) -> Result<Self, Error> {
        args.check()?;
        let uuid = Uuid::random().map_err(|e| Error::System("random bytes", e))?;
        let pd = provider.alloc_pd()?;
        let config = PathConfig {
            addr: args.paths[0],
            name: args.name.clone(),
            connections: args.connections,
            connect_timeout: args.connect_timeout,
            heartbeat: args.heartbeat,
            max_user_header: args.max_user_header,
            invalidate_reads: args.invalidate_reads,
            progress_threads: args.progress_threads.min(args.connections.into()),
            spin: args.spin,
        };
        let path = Path::connect(provider, &pd, config, uuid)?;
        let access = match args.invalidate_reads {
            true => AccessFlags::LOCAL_WRITE | AccessFlags::MW_BIND,
            false => AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
        };
        let info = *path.info();
        let full = Pool::<P>::bytes_for(info.max_io_size as usize, info.queue_depth as usize);
        let pool = Pool::new(provider.clone(), pd, access, args.buffer_bytes.unwrap_or(full));
        Ok(Self(Arc::new(Inner {
            name: args.name,
            info,
            permits: path.permits().clone(),
            pool,
            paths: vec![path],
        })))
    }

    /// The session's name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// What the session can do.
    pub fn info(&self) -> SessionInfo {
        self.0.info
    }

    /// Whether requests can be sent; the reason why not.
    ///
    /// # Errors
    /// Why the session is down.
    pub fn state(&self) -> Result<(), PathError> {
        let mut state = Err(PathError::Closed);
        for path in &self.0.paths {
            state = path.state();
            if state.is_ok() {
                break;
            }
        }
        state
    }

    /// Calls `f` once when the session goes down (at once if it is down already), on a thread of the session: `f` must
    /// not block.
    pub fn on_down(&self, f: impl FnOnce(&PathError) + Send + 'static) {
        if let Some(path) = self.0.paths.first() {
            path.on_down(Box::new(f));
        }
    }

    /// A registered buffer of `len` bytes (content undefined).
    ///
    /// # Errors
    /// When the pool is used up.
    pub fn alloc_buffer(&self, len: usize) -> Result<IoBuffer<P>, Error> {
        self.0.pool.alloc(len)
    }

    /// A permit for one request; waits while the queue is full.
    ///
    /// # Errors
    /// When the session is down.
    pub fn permit(&self) -> Result<Permit, Error> {
        self.0.permits.take().map_err(Error::Down)
    }

    /// A permit for one request; `None` while the queue is full.
    ///
    /// # Errors
    /// When the session is down.
    pub fn try_permit(&self) -> Result<Option<Permit>, Error> {
        self.0.permits.try_take().map_err(Error::Down)
    }

    /// Sends a request: the user's header and, for a write, the data of the buffer; for a read its answer lands there.
    ///
    /// `done` is called exactly once, with the buffer, on a thread of the session, or on this one if the request can't
    /// be sent. It must not block: heartbeats go on without it, but no other request completes meanwhile. The permit is
    /// free again before `done` is called.
    pub fn request(
        &self,
        permit: Permit,
        con: ConType,
        direction: Direction,
        header: &[u8],
        data: Option<IoBuffer<P>>,
        done: impl FnOnce(Outcome<P>) + Send + 'static,
    ) {
        let submission = Submission {
            permit,
            con,
            direction,
            data,
            done: Box::new(done),
        };
        let info = &self.0.info;
        let data_len = submission.data.as_ref().map_or(0, IoBuffer::len);
        if header.len() > info.max_user_header as usize {
            return submission.fail(IoError::TooLong {
                what: "user header",
                len: header.len(),
                max: info.max_user_header as usize,
            });
        }
        if data_len > info.max_io_size as usize {
            return submission.fail(IoError::TooLong {
                what: "data",
                len: data_len,
                max: info.max_io_size as usize,
            });
        }
        if !submission.permit.belongs_to(&self.0.permits) {
            return submission.fail(IoError::Path(PathError::Unexpected("the permit is of another session")));
        }
        match self.0.paths.iter().find(|p| p.state().is_ok()) {
            Some(path) => path.send(submission, header),
            None => submission.fail(IoError::Path(self.state().err().unwrap_or(PathError::Closed))),
        }
    }

    /// Sends a request and waits for its end. Not to be called from a completion callback.
    pub fn call(&self, con: ConType, direction: Direction, header: &[u8], data: Option<IoBuffer<P>>) -> Outcome<P> {
        let permit = match self.0.permits.take() {
            Ok(permit) => permit,
            Err(e) => {
                return Outcome {
                    result: Err(IoError::Path(e)),
                    data,
                };
            }
        };
        let slot = Arc::new((Mutex::new(None), Condvar::new()));
        let theirs = slot.clone();
        self.request(permit, con, direction, header, data, move |outcome| {
            *theirs.0.lock() = Some(outcome);
            theirs.1.notify_one();
        });
        let mut outcome = slot.0.lock();
        loop {
            if let Some(outcome) = outcome.take() {
                return outcome;
            }
            slot.1.wait(&mut outcome);
        }
    }

    /// Disconnects in good order. Requests in flight end with an error.
    pub fn close(&self) {
        for path in &self.0.paths {
            path.close();
        }
    }
}
