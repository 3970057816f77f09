//! Nodes and programs of tests.

use std::{
    fs::OpenOptions,
    io::IoSlice,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, OwnedFd},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rds_local::{Answer, Control, Op, RecvKind, Request, SendHeader, Socket};
use rds_node::{Config, NodeEvent, Running, start};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{RecvFlags, SendFlags},
};
use tempfile::TempDir;
use zerocopy::IntoBytes as _;

/// Longest time that anything may take: much longer than it does.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Node process with its directory and an address that no other test has.
pub(crate) struct Host {
    pub(crate) dir: TempDir,
    pub(crate) addr: IpAddr,
    pub(crate) running: Running,
}

/// Returns the settings of a node that has its addresses alone, and stays.
pub(crate) fn config(dir: &Path) -> Config {
    Config {
        linger: None,
        join: None,
        ..Config::new(dir.into())
    }
}

impl Host {
    pub(crate) fn new(change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(dir.path());
        change(&mut config);
        Self {
            running: start(config, None).unwrap(),
            addr: ferroce_loopback::address().into(),
            dir,
        }
    }

    pub(crate) fn program(&self) -> Control {
        program(self.dir.path())
    }

    /// Waits for an event.
    pub(crate) fn event(&self, is: impl Fn(&NodeEvent) -> bool) -> NodeEvent {
        loop {
            let event = self.running.next(LONG).expect("no such event");
            if is(&event) {
                return event;
            }
        }
    }
}

/// Connects a program to a node that runs.
pub(crate) fn program(dir: &Path) -> Control {
    Control::find(dir).unwrap().expect("no node")
}

/// Control connection of this process as a program that gives its memory, as libraries do.
pub(crate) struct Program {
    pub(crate) socket: OwnedFd,
    pub(crate) memory: u64,
}

/// Asks, with files.
pub(crate) fn ask(socket: &OwnedFd, request: &Request, files: &[OwnedFd]) -> std::io::Result<Answer> {
    let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    rds_local::send(socket, &[IoSlice::new(&request.to_bytes())], &fds, SendFlags::empty())?;
    let mut bytes = [0; Answer::LEN];
    let record = rds_local::receive(socket, &mut bytes, RecvFlags::empty())?.unwrap();
    let answer = Answer::parse(&bytes[..record.len]).unwrap();
    match answer.errno {
        0 => Ok(answer),
        errno => Err(std::io::Error::from_raw_os_error(errno)),
    }
}

impl Program {
    pub(crate) fn new(host: &Host) -> Self {
        let socket = rds_local::connect(&host.dir.path().join(rds_local::SOCKET))
            .unwrap()
            .unwrap();
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/proc/self/mem")
            .unwrap();
        let memory = ask(&socket, &Request::Memory, &[file.into()]).unwrap().value;
        Self { socket, memory }
    }

    pub(crate) fn map(&self, socket: &Socket<'_>, bytes: &[u8], flags: u32) -> std::io::Result<u64> {
        let request = Request::Map {
            socket: socket.key(),
            addr: at(bytes),
            len: bytes.len() as u64,
            flags,
        };
        ask(&self.socket, &request, &[]).map(|answer| answer.value)
    }

    pub(crate) fn unmap(&self, socket: &Socket<'_>, cookie: u64) -> std::io::Result<()> {
        let request = Request::Unmap {
            socket: socket.key(),
            cookie,
            flags: 0,
        };
        ask(&self.socket, &request, &[]).map(drop)
    }
}

/// Address of bytes.
pub(crate) fn at(bytes: &[u8]) -> u64 {
    bytes.as_ptr().expose_provenance() as u64
}

/// Sends a message with an operation.
pub(crate) fn put(socket: &Socket<'_>, op: &Op, data: &[u8], to: SocketAddr) {
    let bytes = op.to_bytes();
    let header = SendHeader::new(Some(to), op, bytes.len(), data.len());
    let parts = [header.as_bytes(), &bytes, data].map(IoSlice::new);
    rds_local::send(socket, &parts, &[], SendFlags::empty()).unwrap();
}

pub(crate) fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

/// Receives the next message: sender and data.
pub(crate) fn receive(socket: &Socket<'_>) -> (SocketAddr, Vec<u8>) {
    wait_for(socket, PollFlags::IN);
    let received = socket.recv(RecvFlags::DONTWAIT).unwrap();
    assert!(matches!(received.kind, RecvKind::Message(_)), "{received:?}");
    (received.from.unwrap(), received.data)
}

pub(crate) fn send(socket: &Socket<'_>, data: &[u8], to: SocketAddr) {
    socket.send_to(data, Some(to), SendFlags::empty()).unwrap();
}

/// Waits until a socket is ready.
pub(crate) fn wait_for(socket: &Socket<'_>, what: PollFlags) {
    let mut fds = [PollFd::new(socket, what)];
    let time = Timespec::try_from(LONG).unwrap();
    assert_eq!(poll(&mut fds, Some(&time)), Ok(1), "nothing comes");
}

/// Waits until something is so.
pub(crate) fn until(what: &str, mut f: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !f() {
        assert!(Instant::now() < end, "not within {LONG:?}: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}
