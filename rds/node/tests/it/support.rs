//! Nodes and programs of tests.

use std::{
    net::{IpAddr, SocketAddr},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rds_local::{Control, RecvKind, Socket};
use rds_node::{Config, NodeEvent, Running, start};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{RecvFlags, SendFlags},
};
use tempfile::TempDir;

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
            running: start(config).unwrap(),
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
