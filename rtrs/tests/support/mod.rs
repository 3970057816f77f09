//! A server on sockets whose user is a disk in memory, and clients of it, on loopback addresses of their own.
#![allow(dead_code, reason = "each program uses what it needs")]

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use ferroce_rig::{Host, IoBuffer, Outcome, Request, Server, ServerOps, Session, SessionHandle};
use parking_lot::Mutex;
use rtrs::{
    Direction,
    addr::PathAddr,
    client::{ConType, SessionConfig},
    heartbeat::HeartbeatConfig,
    server::ServerConfig,
};

/// Longest time that a step of a test may take.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// Frequent heartbeats, and as many missed ones as a loaded machine takes.
const HEARTBEAT: HeartbeatConfig = HeartbeatConfig {
    interval: Duration::from_millis(500),
    max_missed: 38,
};

/// Waits for something that must come; fails the test if it does not.
pub(crate) fn eventually(what: &str, mut cond: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !cond() {
        assert!(Instant::now() < deadline, "{what}: did not come");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Header of a request for the disk's bytes at this offset.
pub(crate) fn header(at: u64, padding: usize) -> Vec<u8> {
    let mut header = at.to_le_bytes().to_vec();
    header.resize(8 + padding, 0xee);
    header
}

/// A disk in memory, most of whose answers come from threads of its own.
pub(crate) struct Disk {
    bytes: Mutex<Vec<u8>>,
    pub(crate) closed: Mutex<Vec<SessionHandle>>,
    queue: mpsc::Sender<Request>,
}

impl Disk {
    fn new(size: usize) -> Arc<Self> {
        let (queue, work) = mpsc::channel();
        let work = Arc::new(Mutex::new(work));
        let disk = Arc::new(Self {
            bytes: Mutex::new(vec![0; size]),
            closed: Mutex::default(),
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
        let Some(at) = request.user_header().first_chunk().map(|at| u64::from_le_bytes(*at)) else {
            return request.complete(22);
        };
        let mut disk = self.bytes.lock();
        let Some(range) = disk.get_mut(at as usize..at as usize + request.data_len()) else {
            return request.complete(28);
        };
        match request.direction() {
            Direction::Write => request.read_data(0, range).unwrap(),
            Direction::Read => request.write_data(0, range).unwrap(),
        }
        drop(disk);
        request.complete(0);
    }
}

impl ServerOps for Disk {
    fn session_opened(&self, _: &SessionHandle) {}

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
    _server_host: Host,
    /// Made when first used: a test may want the address for itself.
    client_host: OnceLock<Host>,
    pub(crate) path: PathAddr,
}

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
        let [server_ip, client_ip] = [(); 2].map(|()| IpAddr::from(ferroce_loopback::address()));
        let server_host = Host::open(server_ip);
        let disk = Disk::new(1 << 20);
        let config = ServerConfig {
            addr: server_ip,
            ..config
        };
        let path = PathAddr {
            src: Some(client_ip),
            dst: SocketAddr::new(server_ip, config.port),
        };
        Self {
            server: Server::listen(&server_host, config, disk.clone()).unwrap(),
            disk,
            _server_host: server_host,
            client_host: OnceLock::new(),
            path,
        }
    }

    /// The client's host.
    pub(crate) fn client(&self) -> &Host {
        self.client_host.get_or_init(|| Host::open(self.path.src.unwrap()))
    }

    pub(crate) fn args(&self, name: &str, connections: u16) -> SessionConfig {
        SessionConfig {
            connections,
            connect_timeout: TIMEOUT,
            heartbeat: HEARTBEAT,
            ..SessionConfig::new(name, self.path)
        }
    }

    pub(crate) fn open(&self, name: &str, connections: u16) -> Session {
        Session::open(self.client(), self.args(name, connections)).unwrap()
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
    session.call(ConType::Io(0), Direction::Write, &header(at, 0), Some(data))
}

pub(crate) fn read(session: &Session, at: u64, len: usize) -> Vec<u8> {
    let data = session.alloc_buffer(len).unwrap();
    let outcome = session.call(ConType::Io(0), Direction::Read, &header(at, 0), Some(data));
    outcome.result.unwrap();
    contents(&outcome.data.unwrap())
}
