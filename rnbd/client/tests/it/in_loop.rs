//! A disk in a loop of the caller's.

use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    os::fd::AsRawFd,
    time::{Duration, Instant},
};

use crate::common::{SIZE, Server, TIMEOUT, pattern};
use mio::{Events, Interest, Poll, Token, unix::SourceFd};
use rnbd_client::{DiskEvent, DiskLoop, OpenError, Request};

/// A loop with a disk.
struct Loop {
    poll: Poll,
    disk: DiskLoop,
    until: Instant,
}

impl Loop {
    fn new(disk: DiskLoop) -> Self {
        let poll = Poll::new().unwrap();
        let fd = disk.as_raw_fd();
        poll.registry()
            .register(&mut SourceFd(&fd), Token(0), Interest::READABLE)
            .unwrap();
        let until = Instant::now() + TIMEOUT;
        Self { poll, disk, until }
    }

    /// Waits for the next event.
    fn next(&mut self) -> DiskEvent {
        loop {
            let timeout = self.disk.turn().unwrap();
            if let Some(event) = self.disk.next_event() {
                return event;
            }
            let left = self.until.checked_duration_since(Instant::now()).expect("an event");
            let timeout = timeout.map_or(left, |timeout| timeout.min(left));
            self.poll.poll(&mut Events::with_capacity(4), Some(timeout)).unwrap();
        }
    }
}

#[test]
fn one_descriptor_drives_all() {
    let server = Server::new();
    let mut disk = Loop::new(server.options("s", "disk").open_in_loop().unwrap());
    disk.disk.submit(7, Request::Flush);
    assert!(matches!(disk.next(), DiskEvent::Done { user: 7, result: Err(e) } if e.kind() == ErrorKind::NotConnected));
    let DiskEvent::Opened(geometry) = disk.next() else {
        panic!("not open")
    };
    assert_eq!((geometry.size, disk.disk.geometry()), (SIZE, Some(geometry)));
    // More than there are buffers for.
    let want = pattern(SIZE as usize);
    for user in 0..32 {
        let (offset, len) = (user * (256 << 10), 256 << 10);
        disk.disk.submit(user, Request::Read { offset, len });
    }
    let mut read = BTreeMap::new();
    while read.len() < 32 {
        match disk.next() {
            DiskEvent::Done { user, result } => read.insert(user, result.unwrap()),
            other => panic!("{other:?}"),
        };
    }
    assert!(read.into_values().collect::<Vec<_>>().concat() == want);
    let write = Request::Write {
        offset: 4096,
        data: vec![5; 8192],
        fua: false,
    };
    disk.disk.submit(40, write);
    assert!(matches!(disk.next(), DiskEvent::Done { user: 40, result: Ok(data) } if data.len() == 8192));
    disk.disk.submit(41, Request::Read { offset: 1, len: 1 });
    assert!(matches!(disk.next(), DiskEvent::Done { user: 41, result: Err(e) } if e.kind() == ErrorKind::InvalidInput));
    disk.disk.close();
    assert!(matches!(disk.next(), DiskEvent::Closed(Ok(()))));
    assert_eq!(disk.disk.turn().unwrap(), None);
    assert_eq!(fs::read(server.image()).unwrap()[4096..12288], [5; 8192]);
    server.has_sessions(0);
}

#[test]
fn one_that_can_not_be_opened_says_why() {
    let server = Server::new();
    let mut disk = Loop::new(server.options("s", "no-such").open_in_loop().unwrap());
    match disk.next() {
        DiskEvent::Closed(Err(OpenError::Map(e))) => assert!(e.to_string().contains("no-such"), "{e}"),
        other => panic!("{other:?}"),
    }
    assert!(disk.disk.next_event().is_none());
}

#[test]
fn a_close_gives_up_on_a_server_that_is_gone() {
    let mut server = Server::new();
    let options = server.options("s", "disk").grace(Duration::from_millis(200));
    let mut disk = Loop::new(options.open_in_loop().unwrap());
    assert!(matches!(disk.next(), DiskEvent::Opened(_)));
    server.end();
    disk.disk.submit(1, Request::Flush);
    disk.disk.close();
    let (mut done, mut closed) = (false, false);
    while !closed {
        match disk.next() {
            DiskEvent::Done { user: 1, result } => done = result.is_err(),
            DiskEvent::Closed(result) => closed = result.is_err(),
            other => panic!("{other:?}"),
        }
    }
    assert!(done);
}
