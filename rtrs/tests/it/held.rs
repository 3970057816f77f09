//! Requests that the server's user holds while their path is lost. The chunk of a request is one piece of memory for all paths: what
//! goes on by another path must not get at it before the user is done with it.

use std::{
    net::IpAddr,
    sync::{Arc, mpsc::Receiver},
    thread,
    time::Duration,
};

use crate::support::{PATIENCE, eventually};
use ferroce_rig::{Host, Outcome, Request, Server, ServerOps, Session, SessionHandle};
use parking_lot::Mutex;
use rtrs::{
    Direction,
    addr::PathAddr,
    client::{ConType, PathCommand, SessionConfig, state::PathState},
    server::ServerConfig,
};

const BLOCK: usize = 4096;
/// Long enough for what must not happen. A machine on which it would have taken longer finds a mistake less often.
const WHILE: Duration = Duration::from_millis(300);

/// A disk of blocks. It looks at a request's memory when it works on it, like a real one.
#[derive(Default)]
struct Disk {
    blocks: Vec<Vec<u8>>,
    /// Requests that it still has to hold when they come.
    holds: usize,
    held: Vec<Request>,
}

impl Disk {
    fn work(&mut self, request: Request) {
        let block = usize::from(request.user_header()[0]);
        match request.direction() {
            Direction::Write => request.read_data(0, &mut self.blocks[block]).unwrap(),
            Direction::Read => request.write_data(0, &self.blocks[block]).unwrap(),
        }
        request.complete(0);
    }
}

struct Backend(Mutex<Disk>);

impl ServerOps for Backend {
    fn session_opened(&self, _: &SessionHandle) {}

    fn rdma_request(&self, request: Request) {
        let mut disk = self.0.lock();
        match disk.holds.checked_sub(1) {
            Some(holds) => {
                disk.holds = holds;
                disk.held.push(request);
            }
            None => disk.work(request),
        }
    }

    fn session_closed(&self, _: &SessionHandle) {}
}

struct Lab {
    backend: Arc<Backend>,
    session: Session,
    _server: Server,
}

impl Lab {
    /// A session of `depth` permits over two paths.
    fn new(always_invalidate: bool, depth: u32) -> Self {
        let [server, a, b] = [(); 3].map(|()| IpAddr::from(ferroce_loopback::address()));
        let disk = Disk {
            blocks: (0..3).map(|block| vec![block; BLOCK]).collect(),
            ..Disk::default()
        };
        let backend = Arc::new(Backend(Mutex::new(disk)));
        let config = ServerConfig {
            addr: server,
            queue_depth: depth,
            always_invalidate,
            ..ServerConfig::default()
        };
        let server = Server::listen(&Host::open(server), config, backend.clone()).unwrap();
        let paths = [a, b].map(|src| PathAddr {
            src: Some(src),
            dst: server.local_addr(),
        });
        let config = SessionConfig {
            paths: paths.to_vec(),
            max_reconnects: SessionConfig::FOREVER,
            reconnect_delay: Duration::from_millis(50),
            connect_timeout: PATIENCE,
            ..SessionConfig::new("held", paths[0])
        };
        let session = Session::open(&Host::open_all(&[a, b]), config).unwrap();
        assert_eq!(session.info().queue_depth, depth);
        Self {
            backend,
            session,
            _server: server,
        }
    }

    /// The request that was held first is worked on.
    fn release(&self) {
        let mut disk = self.backend.0.lock();
        let request = disk.held.remove(0);
        disk.work(request);
    }

    fn begin(&self, direction: Direction, block: u8, byte: u8) -> Receiver<Outcome> {
        let mut buffer = self.session.alloc_buffer(BLOCK).unwrap();
        buffer.write(0, &[byte; BLOCK]).unwrap();
        self.session.begin(ConType::Io(0), direction, &[block], Some(buffer))
    }

    /// A request for the first block, whose path is lost while the disk holds it.
    fn begin_held(&self, direction: Direction, byte: u8) -> Receiver<Outcome> {
        self.backend.0.lock().holds = 1;
        let outcome = self.begin(direction, 0, byte);
        eventually("it is held", || self.backend.0.lock().held.len() == 1);
        self.cut(0);
        outcome
    }

    /// A write of 20 to the second block behind that request: neither ends while that is held.
    fn begin_behind(&self, first: &Receiver<Outcome>) -> Receiver<Outcome> {
        let second = self.begin(Direction::Write, 1, 20);
        thread::sleep(WHILE);
        assert!(
            first.try_recv().is_err() && second.try_recv().is_err(),
            "the chunk is in use"
        );
        second
    }

    fn ends_well(outcome: &Receiver<Outcome>) -> Outcome {
        let outcome = outcome.recv_timeout(PATIENCE).expect("every request ends");
        assert!(outcome.result.is_ok(), "{:?}", outcome.result);
        outcome
    }

    /// Takes a path down that nobody connects again, and waits for that.
    fn cut(&self, path: u16) {
        self.session.path_command(path, PathCommand::Disconnect).unwrap();
        self.until(path, PathState::Closed);
    }

    fn until(&self, path: u16, state: PathState) {
        eventually(&format!("path {path} is {state:?}"), || {
            self.session.paths()[usize::from(path)].state == state
        });
    }

    fn blocks(&self) -> [u8; 3] {
        let disk = self.backend.0.lock();
        let first = |block: usize| {
            let block = &disk.blocks[block];
            assert!(block.iter().all(|byte| *byte == block[0]), "a mixture");
            block[0]
        };
        [first(0), first(1), first(2)]
    }
}

#[test]
fn a_write_that_is_held_while_its_path_is_lost_writes_its_own_data() {
    for always_invalidate in [true, false] {
        let lab = Lab::new(always_invalidate, 1);
        // It goes by the other path, in the same chunk; the next one would too, with other data for another place.
        let first = lab.begin_held(Direction::Write, 10);
        let second = lab.begin_behind(&first);
        lab.release();
        Lab::ends_well(&first);
        Lab::ends_well(&second);
        assert_eq!(lab.blocks(), [10, 20, 2]);
        assert!(lab.session.paths()[1].stats.failovers >= 1);
    }
}

#[test]
fn a_read_that_is_held_while_its_path_is_lost_spoils_no_later_write() {
    for always_invalidate in [true, false] {
        let lab = Lab::new(always_invalidate, 1);
        let first = lab.begin_held(Direction::Read, 99);
        let second = lab.begin_behind(&first);
        lab.release();
        let mut read = [9; BLOCK];
        Lab::ends_well(&first).data.unwrap().read(0, &mut read).unwrap();
        assert!(read == [0; BLOCK]);
        Lab::ends_well(&second);
        assert_eq!(lab.blocks(), [0, 20, 2]);
    }
}

#[test]
fn nobody_connects_anew_while_a_request_of_a_lost_path_is_held() {
    for (always_invalidate, direction) in [
        (true, Direction::Write),
        (false, Direction::Write),
        (true, Direction::Read),
    ] {
        // The permit of a request that nobody has answered rests for half a minute: the next takes another.
        let lab = Lab::new(always_invalidate, 2);
        let first = lab.begin_held(direction, 10);
        // The session is lost, and its user is told: the chunk is free as far as the client knows.
        lab.cut(1);
        let lost = first.recv_timeout(PATIENCE).expect("every request ends");
        assert!(lost.result.is_err());
        lab.session.path_command(1, PathCommand::Reconnect).unwrap();
        thread::sleep(WHILE);
        assert!(lab.session.state().is_err(), "the chunk is in use");
        lab.release();
        lab.until(1, PathState::Connected);
        let second = lab.begin(Direction::Write, 1, 20);
        Lab::ends_well(&second);
        let of_first = if direction == Direction::Write { 10 } else { 0 };
        assert_eq!(lab.blocks(), [of_first, 20, 2]);
    }
}
