//! What the tests over the software device share: devices on loopback addresses of their own, and a server whose user
//! is a disk in memory.
#![allow(dead_code)]

pub(crate) mod raw;
pub(crate) mod stranger;

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use ferroce_rig::{Host, IoBuffer, Outcome, Request, Server, ServerOps, Session, SessionHandle};
use parking_lot::Mutex;
use roce::{Device, DeviceConfig};
use rtrs::{
    Direction, IoError,
    addr::PathAddr,
    client::{ConType, SessionConfig},
    heartbeat::HeartbeatConfig,
    proto::Uuid,
    server::ServerConfig,
};

/// RTRS port of all tests: each has addresses of its own.
pub(crate) const PORT: u16 = 1234;

/// Two loopback addresses that no other test uses.
pub(crate) fn addresses() -> (IpAddr, IpAddr) {
    (ferroce_loopback::address().into(), ferroce_loopback::address().into())
}

pub(crate) fn device(addr: IpAddr) -> Device {
    Device::open(DeviceConfig::new(addr)).expect("a device on a loopback address")
}

pub(crate) fn uuid() -> Uuid {
    Uuid::draw(&mut |bytes| rand::fill(bytes))
}

/// A host whose loop runs on a thread.
pub(crate) fn host(addr: IpAddr) -> Host {
    Host::open(addr)
}

/// What must have happened by then, or it will not.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for something that must come; fails the test if it does not.
pub(crate) fn eventually(what: &str, mut cond: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !cond() {
        assert!(Instant::now() < deadline, "{what}: did not come");
        thread::sleep(Duration::from_millis(5));
    }
}

/// What the header of a request asks of the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ask {
    /// Reads or writes at this offset.
    Transfer(u64),
    /// Ends with this error number.
    Fail(i32),
    /// Is dropped without an answer.
    Forget,
    /// Waits until the disk is told to go on.
    Hold,
    /// Reads: how many requests were made.
    Count,
}

impl Ask {
    pub(crate) fn header(self, padding: usize) -> Vec<u8> {
        let (kind, arg) = match self {
            Self::Transfer(at) => (0u8, at),
            Self::Fail(e) => (1, e as u64),
            Self::Forget => (2, 0),
            Self::Hold => (3, 0),
            Self::Count => (4, 0),
        };
        let mut h = vec![kind];
        h.extend(arg.to_le_bytes());
        h.resize(9 + padding, 0xee);
        h
    }

    fn parse(header: &[u8]) -> Option<Self> {
        let arg = u64::from_le_bytes(header.get(1..9)?.try_into().ok()?);
        Some(match header[0] {
            0 => Self::Transfer(arg),
            1 => Self::Fail(arg as i32),
            2 => Self::Forget,
            3 => Self::Hold,
            4 => Self::Count,
            _ => return None,
        })
    }
}

/// A disk in memory, most of whose answers come from threads of its own.
pub(crate) struct Disk {
    pub(crate) bytes: Mutex<Vec<u8>>,
    pub(crate) opened: Mutex<Vec<SessionHandle>>,
    pub(crate) closed: Mutex<Vec<SessionHandle>>,
    pub(crate) requests: AtomicUsize,
    pub(crate) held: Mutex<Vec<Request>>,
    queue: mpsc::Sender<Request>,
}

impl Disk {
    pub(crate) fn new(size: usize) -> Arc<Self> {
        let (queue, work) = mpsc::channel();
        let work = Arc::new(Mutex::new(work));
        let disk = Arc::new(Self {
            bytes: Mutex::new(vec![0; size]),
            opened: Mutex::default(),
            closed: Mutex::default(),
            requests: AtomicUsize::new(0),
            held: Mutex::default(),
            queue,
        });
        for _ in 0..2 {
            let (work, disk) = (work.clone(), Arc::downgrade(&disk));
            thread::spawn(move || {
                loop {
                    let Ok(request) = work.lock().recv() else { return };
                    let Some(disk) = disk.upgrade() else { return };
                    disk.serve(request);
                }
            });
        }
        disk
    }

    fn serve(&self, request: Request) {
        let count = self.requests.fetch_add(1, Ordering::Relaxed);
        let Some(ask) = Ask::parse(request.user_header()) else {
            return request.complete(22);
        };
        let len = request.data_len();
        match ask {
            Ask::Transfer(at) => {
                let mut disk = self.bytes.lock();
                let Some(range) = disk.get_mut(at as usize..at as usize + len) else {
                    return request.complete(28);
                };
                match request.direction() {
                    Direction::Write => request.read_data(0, range).unwrap(),
                    Direction::Read => request.write_data(0, range).unwrap(),
                }
                drop(disk);
                request.complete(0);
            }
            Ask::Fail(e) => request.complete(e),
            Ask::Forget => drop(request),
            Ask::Hold => self.held.lock().push(request),
            Ask::Count => {
                let bytes = (count as u64).to_le_bytes();
                let n = len.min(bytes.len());
                request.write_data(0, &bytes[..n]).unwrap();
                request.complete(0);
            }
        }
    }
}

impl ServerOps for Disk {
    fn session_opened(&self, session: &SessionHandle) {
        self.opened.lock().push(session.clone());
    }

    fn rdma_request(&self, request: Request) {
        // Some answers come from the loop itself, some from other threads.
        if request.data_len() % 2 == 1 {
            self.serve(request);
        } else {
            self.queue.send(request).unwrap();
        }
    }

    fn session_closed(&self, session: &SessionHandle) {
        self.closed.lock().push(session.clone());
    }
}

/// A server with its disk, and what a client needs.
pub(crate) struct Bed {
    // Dropped in this order.
    pub(crate) server: Server,
    pub(crate) disk: Arc<Disk>,
    pub(crate) server_host: Host,
    /// Made when first used: a test may want the address for itself.
    client_host: OnceLock<Host>,
    stranger: OnceLock<Device>,
    pub(crate) path: PathAddr,
}

/// Frequent heartbeats, and the patience that a loaded machine takes.
const HEARTBEAT: HeartbeatConfig = HeartbeatConfig {
    interval: Duration::from_millis(500),
    max_missed: 38,
};

/// Finds out soon that a peer is dead, but not because a machine is slow.
pub(crate) const IMPATIENT: HeartbeatConfig = HeartbeatConfig {
    interval: Duration::from_millis(200),
    max_missed: 13,
};

/// Small chunks.
pub(crate) fn config() -> ServerConfig {
    ServerConfig {
        queue_depth: 32,
        max_chunk_size: 64 << 10,
        heartbeat: HEARTBEAT,
        ..ServerConfig::default()
    }
}

impl Bed {
    pub(crate) fn new(config: ServerConfig) -> Self {
        let (server_ip, client_ip) = addresses();
        let server_host = host(server_ip);
        let disk = Disk::new(1 << 20);
        let config = ServerConfig {
            addr: server_ip,
            port: PORT,
            ..config
        };
        let server = Server::listen(&server_host, config, disk.clone()).unwrap();
        let path = PathAddr {
            src: Some(client_ip),
            dst: SocketAddr::new(server_ip, PORT),
        };
        Self {
            server,
            disk,
            server_host,
            client_host: OnceLock::new(),
            stranger: OnceLock::new(),
            path,
        }
    }

    fn client_ip(&self) -> IpAddr {
        self.path.src.unwrap()
    }

    /// The client's host.
    pub(crate) fn client(&self) -> &Host {
        self.client_host.get_or_init(|| host(self.client_ip()))
    }

    /// A device at the client's address, for who speaks verbs by hand. Not beside [`client`](Self::client).
    pub(crate) fn stranger(&self) -> &Device {
        self.stranger.get_or_init(|| device(self.client_ip()))
    }

    pub(crate) fn args(&self, name: &str, connections: u16) -> SessionConfig {
        SessionConfig {
            connections,
            connect_timeout: PATIENCE,
            heartbeat: HEARTBEAT,
            ..SessionConfig::new(name, self.path)
        }
    }

    pub(crate) fn open(&self, name: &str, connections: u16) -> Session {
        Session::open(self.client(), self.args(name, connections)).unwrap()
    }

    /// A session of another client, on a host that goes with it.
    pub(crate) fn open_elsewhere(&self, name: &str) -> Session {
        let (ip, _) = addresses();
        let args = SessionConfig {
            paths: vec![PathAddr {
                src: Some(ip),
                ..self.path
            }],
            ..self.args(name, 1)
        };
        Session::open(&host(ip), args).unwrap()
    }
}

/// Where the results of requests go. Their buffers do not: the session wants them back.
pub(crate) type Results = mpsc::Sender<Result<(), IoError>>;

/// Sends a request.
pub(crate) fn begin(
    session: &Session,
    con: ConType,
    direction: Direction,
    ask: Ask,
    data: Option<IoBuffer>,
    tx: &Results,
) {
    let tx = tx.clone();
    let done = move |o: Outcome| {
        // A test that has failed listens no more.
        let _ = tx.send(o.result);
    };
    session.request(con, direction, &ask.header(0), data, done);
}

/// The next result.
pub(crate) fn ended<T>(rx: &mpsc::Receiver<T>) -> T {
    rx.recv_timeout(PATIENCE).expect("every request ends")
}

/// Waits for so many results, all good.
pub(crate) fn all_well(rx: &mpsc::Receiver<Result<(), IoError>>, n: usize) {
    for _ in 0..n {
        ended(rx).unwrap();
    }
}

/// A buffer with these bytes.
pub(crate) fn buffer(session: &Session, bytes: &[u8]) -> IoBuffer {
    let mut b = session.alloc_buffer(bytes.len()).unwrap();
    b.write(0, bytes).unwrap();
    b
}

pub(crate) fn contents(buffer: &IoBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    buffer.read(0, &mut bytes).unwrap();
    bytes
}

pub(crate) fn write(session: &Session, at: u64, bytes: &[u8]) -> Outcome {
    let data = buffer(session, bytes);
    session.call(
        ConType::Io(0),
        Direction::Write,
        &Ask::Transfer(at).header(0),
        Some(data),
    )
}

pub(crate) fn read(session: &Session, at: u64, len: usize) -> Vec<u8> {
    let data = session.alloc_buffer(len).unwrap();
    let outcome = session.call(
        ConType::Io(0),
        Direction::Read,
        &Ask::Transfer(at).header(0),
        Some(data),
    );
    outcome.result.unwrap();
    contents(&outcome.data.unwrap())
}
