//! Clients whose requests come by any connection, as the kernel's do, at a server on several loops, one of which has each session: which
//! processor a request was made on says by which connection it goes, while the chunk is whichever is free.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    thread,
};

use crate::common::{Lab, eventually};
use ferroce_rig::{Host, IoBuffer, Session};
use rnbd::proto::{AccessMode, IoOp, MsgClose, MsgIo, MsgOpen, MsgOpenRsp, Rw, parse_open_rsp};
use rtrs::{
    Direction, IoError,
    client::{ConType, SessionConfig},
};
use zerocopy::IntoBytes;

const BLOCK: usize = 4096;
/// I/O connections.
const CONNECTIONS: u16 = 5;

struct Kernel(Session);

fn code(result: Result<(), IoError>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(IoError::Remote(errno)) => errno.abs(),
        Err(e) => panic!("{e}"),
    }
}

impl Kernel {
    fn new(lab: &Lab, name: &str) -> Result<Self, rtrs::Error> {
        let path = lab.path();
        let config = SessionConfig {
            connections: CONNECTIONS,
            connect_timeout: crate::common::TIMEOUT,
            ..SessionConfig::new(name, path)
        };
        Session::open(&Host::open(path.src.unwrap()), config).map(Self)
    }

    fn try_open(&self, name: &str, mode: AccessMode) -> Result<u32, i32> {
        let message = MsgOpen::new(name.as_bytes(), mode).unwrap();
        let buffer = self.0.alloc_buffer(size_of::<MsgOpenRsp>()).unwrap();
        let outcome = self
            .0
            .call(ConType::Admin, Direction::Read, message.as_bytes(), Some(buffer));
        match code(outcome.result) {
            0 => {
                let mut bytes = [0; size_of::<MsgOpenRsp>()];
                outcome.data.unwrap().read(0, &mut bytes).unwrap();
                Ok(parse_open_rsp(&bytes).unwrap().device_id.get())
            }
            errno => Err(errno),
        }
    }

    fn open(&self, name: &str, mode: AccessMode) -> u32 {
        self.try_open(name, mode).unwrap()
    }

    fn close(&self, device: u32) {
        let message = MsgClose::new(device);
        let outcome = self.0.call(ConType::Admin, Direction::Write, message.as_bytes(), None);
        assert_eq!(code(outcome.result), 0);
    }

    /// The error number, and the data of a read.
    fn io(&self, by: usize, device: u32, rw: Rw, at: usize, data: Option<&[u8]>) -> (i32, Option<IoBuffer>) {
        let (len, direction) = match (rw.op, data) {
            (IoOp::Read, _) => (BLOCK, Direction::Read),
            (_, data) => (data.map_or(0, <[u8]>::len), Direction::Write),
        };
        let buffer = (len > 0).then(|| self.0.alloc_buffer(len).unwrap());
        let buffer = buffer.map(|mut buffer| {
            if let Some(data) = data {
                buffer.write(0, data).unwrap();
            }
            buffer
        });
        let message = MsgIo::new(device, rw, at as u64 / 512, len as u32);
        let outcome = self.0.call(ConType::Io(by), direction, message.as_bytes(), buffer);
        (code(outcome.result), outcome.data)
    }

    fn write(&self, by: usize, device: u32, at: usize, data: &[u8]) -> i32 {
        self.io(by, device, Rw::new(IoOp::Write), at, Some(data)).0
    }

    fn flush(&self, by: usize, device: u32) -> i32 {
        self.io(by, device, Rw::new(IoOp::Flush), 0, None).0
    }

    fn read(&self, by: usize, device: u32, at: usize) -> Result<Vec<u8>, i32> {
        match self.io(by, device, Rw::new(IoOp::Read), at, None) {
            (0, Some(buffer)) => {
                let mut bytes = vec![0; BLOCK];
                buffer.read(0, &mut bytes).unwrap();
                Ok(bytes)
            }
            (errno, _) => Err(errno),
        }
    }
}

/// A block of which each has another.
fn block(who: usize, turn: usize, at: usize) -> Vec<u8> {
    let word = (who as u64) << 56 | (turn as u64) << 40 | at as u64;
    (0..BLOCK as u64 / 8).flat_map(|n| (word ^ n).to_le_bytes()).collect()
}

fn lab(loops: usize, invalidate: bool) -> Lab {
    Lab::on_loops(loops, |c| {
        // So few chunks that each is used again and again, by other connections.
        c.rtrs.queue_depth = 6;
        c.rtrs.always_invalidate = invalidate;
    })
}

fn any_connection(loops: usize, invalidate: bool) {
    const THREADS: usize = 4;
    const TURNS: usize = 150;
    let lab = lab(loops, invalidate);
    let kernel = Kernel::new(&lab, "kernel").unwrap();
    let device = kernel.open("disk", AccessMode::ReadWrite);
    thread::scope(|scope| {
        for who in 0..THREADS {
            let kernel = &kernel;
            scope.spawn(move || {
                for turn in 0..TURNS {
                    let at = (who * 16 + turn % 16) * BLOCK;
                    let data = block(who, turn, at);
                    assert_eq!(kernel.write(turn, device, at, &data), 0);
                    if turn % 10 == who {
                        assert_eq!(kernel.flush(turn + 1, device), 0);
                    }
                    // By the next connection.
                    assert!(kernel.read(turn + 1, device, at).unwrap() == data, "{who} in {turn}");
                }
            });
        }
    });
    let image = fs::read(lab.image("disk")).unwrap();
    for who in 0..THREADS {
        for turn in TURNS - 16..TURNS {
            let at = (who * 16 + turn % 16) * BLOCK;
            assert!(image[at..at + BLOCK] == block(who, turn, at), "{who} in {turn}");
        }
    }
    let flushes = (0..THREADS * TURNS).filter(|n| n % TURNS % 10 == n / TURNS).count();
    let total = (2 * THREADS * TURNS + flushes) as u64;
    eventually("the numbers of all loops", || {
        let stats = lab.stats();
        assert_eq!(stats.rnbd.failed + stats.rnbd.malformed, 0);
        stats.rnbd.requests == total && stats.requests.len() == loops
    });
    let stats = lab.stats();
    assert!(stats.requests.contains(&total), "one loop has it: {:?}", stats.requests);
    assert_eq!(stats.sessions.iter().sum::<usize>(), 1, "it is one session");
    assert_eq!(stats.rnbd.opens, 1);
    kernel.0.close();
    let admission = lab.admission.clone().unwrap();
    eventually("nothing is left", || {
        admission.loads().iter().all(|n| *n == 0) && lab.stats().rnbd.open == 0
    });
}

#[test]
fn two_loops_take_requests_by_any_connection() {
    any_connection(2, true);
}

#[test]
fn three_loops_take_requests_by_any_connection() {
    any_connection(3, true);
}

#[test]
fn chunks_whose_keys_last_are_used_by_any_connection() {
    any_connection(3, false);
}

#[test]
fn two_sessions_on_one_image_see_and_flush_what_the_other_wrote() {
    let lab = lab(3, true);
    let kernels = ["a", "b"].map(|name| Kernel::new(&lab, name).unwrap());
    let first = kernels[0].open("second", AccessMode::ReadWrite);
    assert_eq!(
        kernels[1].try_open("second", AccessMode::ReadWrite),
        Err(libc::EPERM),
        "there is a writer"
    );
    let devices = [first, kernels[1].open("second", AccessMode::Migration)];
    eventually("they are on two loops", || lab.stats().sessions == [1, 1, 0]);
    for turn in 0..120 {
        let (writer, reader) = (turn % 2, (turn + 1) % 2);
        let (at, by) = (turn % 7 * BLOCK, turn / 2);
        let data = block(writer, turn, at);
        assert_eq!(kernels[writer].write(by, devices[writer], at, &data), 0);
        assert!(kernels[reader].read(by + turn, devices[reader], at).unwrap() == data);
        assert_eq!(kernels[reader].flush(by + 1, devices[reader]), 0);
    }
    // The first writer's right ends with its device.
    kernels[0].close(devices[0]);
    kernels[1].close(devices[1]);
    let again = kernels[1].open("second", AccessMode::ReadWrite);
    assert_eq!(kernels[1].write(3, again, 0, &block(9, 9, 9)), 0);
    eventually("both loops have had requests", || {
        lab.stats().requests.iter().filter(|n| **n > 0).count() == 2
    });
}

#[test]
fn devices_come_and_go_while_others_are_used() {
    let lab = lab(3, true);
    let kernel = Kernel::new(&lab, "kernel").unwrap();
    let disk = kernel.open("disk", AccessMode::ReadWrite);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for who in 0..2 {
            let (kernel, over) = (&kernel, &over);
            scope.spawn(move || {
                for turn in 0.. {
                    let at = (who * 8 + turn % 8) * BLOCK;
                    let data = block(who, turn, at);
                    assert_eq!(kernel.write(turn, disk, at, &data), 0);
                    assert!(kernel.read(turn + 2, disk, at).unwrap() == data);
                    if over.load(SeqCst) {
                        break;
                    }
                }
            });
        }
        let (kernel, over) = (&kernel, &over);
        scope.spawn(move || {
            for turn in 0..25usize {
                let second = kernel.open("second", AccessMode::ReadWrite);
                // It is there for every connection as soon as the client knows of it.
                for by in 0..CONNECTIONS.into() {
                    assert_eq!(kernel.write(by, second, by * BLOCK, &block(by, turn, 0)), 0);
                }
                // Requests are on their way while it is closed: they are answered, with success or that it is gone.
                thread::scope(|late| {
                    for by in 0..3 {
                        late.spawn(move || {
                            let answer = kernel.read(by + turn, second, by * BLOCK).map(|_| ());
                            assert!(matches!(answer, Ok(()) | Err(libc::ENOTCONN)), "{answer:?}");
                        });
                    }
                    kernel.close(second);
                });
                // It is gone for every one.
                for by in 0..CONNECTIONS.into() {
                    assert_eq!(kernel.read(by, second, 0).map(|_| ()), Err(libc::ENOTCONN));
                }
            }
            over.store(true, SeqCst);
        });
    });
    let second = fs::read(lab.image("second")).unwrap();
    for by in 0..usize::from(CONNECTIONS) {
        assert!(second[by * BLOCK..][..BLOCK] == block(by, 24, 0), "{by}");
    }
    eventually("one is open, after 26 openings", || {
        let stats = lab.stats().rnbd;
        (stats.open, stats.opens) == (1, 26)
    });
}

/// It ends in good order, and does not wait until its grace is over, whatever its loops have to do with each other then.
#[test]
fn a_server_ends_while_clients_come_and_work() {
    for _ in 0..3 {
        let mut lab = Lab::on_loops(3, |c| c.grace = 100 * crate::common::TIMEOUT);
        let workers: Vec<Kernel> = (0..3)
            .map(|n| Kernel::new(&lab, &format!("worker {n}")).unwrap())
            .collect();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for worker in &workers {
                let device = worker.open("disk", AccessMode::ReadOnly);
                scope.spawn(move || {
                    let message = MsgIo::new(device, Rw::new(IoOp::Read), 0, BLOCK as u32);
                    for by in 0.. {
                        let Ok(buffer) = worker.0.alloc_buffer(BLOCK) else {
                            break;
                        };
                        let io = ConType::Io(by);
                        let outcome = worker.0.call(io, Direction::Read, message.as_bytes(), Some(buffer));
                        if outcome.result.is_err() {
                            break;
                        }
                    }
                });
            }
            for comer in 0..2 {
                let (lab, over) = (&lab, &over);
                let path = lab.path();
                scope.spawn(move || {
                    let host = Host::open(path.src.unwrap());
                    while !over.load(SeqCst) {
                        let config = SessionConfig {
                            connections: CONNECTIONS,
                            connect_timeout: std::time::Duration::from_secs(1),
                            ..SessionConfig::new(format!("comer {comer}"), path)
                        };
                        if let Ok(session) = Session::open(&host, config) {
                            session.close();
                        }
                    }
                });
            }
            eventually("they work", || lab.stats().rnbd.requests > 300);
            lab.ask_to_end();
            eventually("it has ended", || lab.has_ended());
            over.store(true, SeqCst);
        });
        lab.end();
    }
}

#[test]
fn limits_are_those_of_the_server() {
    let lab = Lab::on_loops(2, |c| {
        c.rtrs.max_sessions = 3;
        c.limits.max_devices = 2;
        c.limits.max_open = 3;
    });
    let open = |kernel: &Kernel, name| kernel.try_open(name, AccessMode::ReadOnly).map(|_| ());
    let [a, b] = ["a", "b"].map(|name| Kernel::new(&lab, name).unwrap());
    eventually("a session on each loop", || lab.stats().sessions == [1, 1]);
    assert!(Kernel::new(&lab, "a").is_err(), "the name is another session's");
    let c = Kernel::new(&lab, "c").unwrap();
    assert!(Kernel::new(&lab, "d").is_err(), "there are three");
    assert_eq!((open(&a, "disk"), open(&a, "second")), (Ok(()), Ok(())));
    assert_eq!(open(&a, "ro"), Err(libc::EMFILE));
    assert_eq!(open(&b, "disk"), Ok(()));
    for other in [&b, &c] {
        assert_eq!(open(other, "second"), Err(libc::ENFILE));
    }
    a.0.close();
    eventually("its devices are closed", || open(&b, "second").is_ok());
    eventually("both of them", || open(&c, "disk").is_ok());
    eventually("there is room again", || Kernel::new(&lab, "a").is_ok());
}
