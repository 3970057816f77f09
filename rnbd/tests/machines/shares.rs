//! A server in shares: a device that is answered for is open at all of them, and is closed at all of them before it is closed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;
use rnbd::{
    Errno,
    proto::{AccessMode, IoOp, MsgClose, MsgIo, MsgOpen, Rw, parse_open_rsp},
    server::{
        Limits, Places, Server,
        action::{Action, Identity, Opened},
        disk::StoreId,
        parts::Letter,
    },
};
use roce_verbs::Instant;
use rtrs::{
    Direction, PathError,
    server::{
        Share,
        request::{Output, Request, RequestKey, SessionKey, SessionOpened},
    },
};
use zerocopy::IntoBytes;

use crate::bench::{MIB, geometry};

const NOW: Instant = Instant::ZERO;
const SHARES: usize = 3;
/// The second share is its home.
const SESSION: SessionKey = SessionKey(2);
const HOME: usize = 1;

#[derive(Debug)]
struct Room;

impl Places for Room {
    fn take(&mut self) -> bool {
        true
    }

    fn give_back(&mut self) {}
}

/// A share, and what its loop has to do for it.
struct Loop {
    server: Server,
    waiting: VecDeque<Action>,
    /// Stores that its disks have, and those with operations.
    stores: BTreeSet<StoreId>,
    next: u32,
}

struct World {
    loops: Vec<Loop>,
    letters: BTreeMap<(usize, usize), VecDeque<Letter>>,
    serial: u32,
    /// Answers: the error number, and the number of a device that was opened.
    answers: BTreeMap<RequestKey, (i32, Option<u32>)>,
    asked: BTreeSet<RequestKey>,
    /// Sectors of the device that was opened last.
    sectors: u64,
    /// A loop whose disks can take over nothing.
    full: Option<usize>,
}

impl World {
    fn without_session() -> Self {
        let one = |index| Loop {
            server: Server::with_share(Limits::default(), Box::new(Room), Share::new(index, SHARES).unwrap()),
            waiting: VecDeque::new(),
            stores: BTreeSet::new(),
            next: 100 * index as u32,
        };
        Self {
            loops: (0..SHARES).map(one).collect(),
            letters: BTreeMap::new(),
            serial: 0,
            answers: BTreeMap::new(),
            asked: BTreeSet::new(),
            sectors: 0,
            full: None,
        }
    }

    fn new() -> Self {
        let mut world = Self::without_session();
        (0..SHARES).for_each(|index| world.session(index, true));
        world
    }

    fn session(&mut self, index: usize, begins: bool) {
        self.session_of(index, begins, 4);
    }

    /// Begins or ends a session of a client that has so many connections.
    fn session_of(&mut self, index: usize, begins: bool, connections: u16) {
        let output = match begins {
            true => Output::SessionOpened(SessionOpened {
                session: SESSION,
                name: "s".into(),
                peer: ([192, 0, 2, 1], 1000).into(),
                connections,
            }),
            false => Output::SessionClosed {
                session: SESSION,
                why: PathError::PeerDisconnected,
            },
        };
        assert!(self.loops[index].server.rtrs(NOW, output).is_none());
        self.collect(index);
    }

    /// One of the session's paths is up, and has so many connections.
    fn path_up(&mut self, index: usize, connections: u16) {
        let output = Output::PathUp {
            session: SESSION,
            peer: ([192, 0, 2, 1], 1001).into(),
            local: [192, 0, 2, 2].into(),
            connections,
        };
        assert!(
            self.loops[index].server.rtrs(NOW, output).is_some(),
            "it is for the host, too"
        );
        self.collect(index);
    }

    fn ask(&mut self, index: usize, direction: Direction, header: &[u8], data_len: u32) -> RequestKey {
        self.serial += 1;
        let key = RequestKey {
            session: SESSION,
            chunk: self.serial as u16,
            serial: self.serial,
        };
        let request = Request {
            key,
            direction,
            connection: index as u16,
            header: header.into(),
            data_len,
            data_offset: 0,
        };
        self.asked.insert(key);
        assert!(self.loops[index].server.rtrs(NOW, Output::Request(request)).is_none());
        self.collect(index);
        key
    }

    fn open(&mut self, index: usize, name: &str) -> RequestKey {
        let message = MsgOpen::new(name.as_bytes(), AccessMode::ReadWrite).unwrap();
        self.ask(index, Direction::Read, message.as_bytes(), 56)
    }

    fn close(&mut self, index: usize, id: u32) -> RequestKey {
        self.ask(index, Direction::Read, MsgClose::new(id).as_bytes(), 0)
    }

    fn write(&mut self, index: usize, id: u32) -> RequestKey {
        let message = MsgIo::new(id, Rw::new(IoOp::Write), 0, 512);
        self.ask(index, Direction::Write, message.as_bytes(), 512)
    }

    /// Takes what a share has to say; answers are looked at, and what the loop has to do waits.
    fn collect(&mut self, index: usize) {
        let Loop { server, waiting, .. } = &mut self.loops[index];
        while let Some((to, letter)) = server.poll_letter() {
            assert_ne!(to, index);
            self.letters.entry((index, to)).or_default().push_back(letter);
        }
        while let Some(action) = server.poll_action() {
            let (key, answer) = match action {
                Action::Answer(key, errno) => (key, (errno, None)),
                Action::AnswerWith { request, message, .. } => {
                    let response = parse_open_rsp(&message).unwrap();
                    self.sectors = response.nsectors.get();
                    (request, (0, Some(response.device_id.get())))
                }
                other => {
                    waiting.push_back(other);
                    continue;
                }
            };
            assert!(self.asked.remove(&key), "{key:?} is answered twice");
            self.answers.insert(key, answer);
        }
    }

    /// The loop does the oldest thing that waits. True: there was one.
    fn work(&mut self, index: usize) -> bool {
        let Some(action) = self.loops[index].waiting.pop_front() else {
            return false;
        };
        self.work_on(index, action);
        self.collect(index);
        true
    }

    fn work_on(&mut self, index: usize, action: Action) {
        let full = self.full == Some(index);
        let at_home = |store| self.loops[HOME].stores.contains(&store);
        match action {
            Action::Open { ticket, name, .. } => {
                let store = self.store(index);
                let opened = Opened {
                    store,
                    geometry: geometry(8 * MIB),
                    identity: Identity(name),
                    label: "/x".into(),
                    instance: None,
                };
                self.loops[index].server.opened(NOW, ticket, Ok(opened));
            }
            Action::TakeOver { ticket, home, store } => {
                assert!(
                    home == HOME && at_home(store),
                    "it is open there as long as it is taken over"
                );
                let result = if full {
                    Err(Errno::ENFILE)
                } else {
                    Ok(self.store(index))
                };
                self.loops[index].server.taken_over(ticket, result);
            }
            Action::Close { ticket, store } => {
                assert!(self.loops[index].stores.remove(&store));
                self.loops[index].server.closed(NOW, ticket);
            }
            Action::Io(ticket, session, op) => {
                assert!(session == SESSION && self.loops[index].stores.contains(&op.store));
                self.loops[index].server.io_done(ticket, Ok(()));
            }
            other => panic!("{other:?}"),
        }
    }

    fn store(&mut self, index: usize) -> StoreId {
        let of = &mut self.loops[index];
        of.next += 1;
        of.stores.insert(StoreId(of.next));
        StoreId(of.next)
    }

    /// A letter comes. True: there was one.
    fn deliver(&mut self, from: usize, to: usize) -> bool {
        let Some(letter) = self.letters.get_mut(&(from, to)).and_then(VecDeque::pop_front) else {
            return false;
        };
        self.loops[to].server.letter(NOW, from, letter);
        self.collect(to);
        true
    }

    fn settle(&mut self) {
        loop {
            let mut moved = false;
            for from in 0..SHARES {
                moved |= self.work(from);
                for to in 0..SHARES {
                    moved |= self.deliver(from, to);
                }
            }
            if !moved {
                return;
            }
        }
    }

    fn opened(&mut self, name: &str) -> u32 {
        let key = self.open(HOME, name);
        self.settle();
        self.answers[&key].1.expect("it is open")
    }

    fn is_empty(&self) {
        assert!(self.asked.is_empty(), "not answered: {:?}", self.asked);
        for (index, of) in self.loops.iter().enumerate() {
            assert!(of.server.is_idle() && of.stores.is_empty(), "{index}: {:?}", of.server);
        }
    }
}

#[test]
fn a_device_is_answered_for_when_all_shares_have_it() {
    let mut world = World::new();
    let key = world.open(HOME, "disk");
    world.work(HOME);
    for share in [0, 2] {
        world.deliver(HOME, share);
        assert!(!world.answers.contains_key(&key));
        world.work(share);
        world.deliver(share, HOME);
    }
    let id = world.answers[&key].1.unwrap();
    for share in 0..SHARES {
        let request = world.write(share, id);
        assert_eq!(world.loops[share].waiting.len(), 1);
        world.work(share);
        assert_eq!(world.answers[&request], (0, None));
    }
    let again = world.open(HOME, "disk");
    assert_eq!(world.answers[&again].1, Some(id), "it is open already");
}

#[test]
fn a_device_is_closed_when_no_share_works_on_it() {
    let mut world = World::new();
    let id = world.opened("disk");
    let late = world.write(2, id);
    let close = world.close(HOME, id);
    let io = world.loops[2].waiting.pop_front().unwrap();
    world.settle();
    assert!(!world.answers.contains_key(&close), "a share works on it");
    assert_eq!(world.loops[HOME].stores.len(), 1, "the last to go");
    let refused = world.write(2, id);
    assert_eq!(world.answers[&refused].0, Errno::ENOTCONN.raw());
    world.work_on(2, io);
    world.collect(2);
    assert_eq!(world.answers[&late].0, 0);
    world.settle();
    assert_eq!(world.answers[&close].0, 0);
    world.is_empty();
}

#[test]
fn a_share_that_can_not_have_it_keeps_the_device_from_being_opened() {
    let mut world = World::new();
    world.full = Some(2);
    let key = world.open(HOME, "disk");
    world.settle();
    assert_eq!(world.answers[&key], (Errno::ENFILE.raw(), None));
    world.is_empty();
    world.full = None;
    world.opened("disk");
}

#[test]
fn shares_without_connections_of_a_session_have_none_of_its_devices() {
    for (connections, shares) in [(2, &[HOME][..]), (3, &[HOME, 2]), (4, &[0, HOME, 2])] {
        let mut world = World::without_session();
        for share in shares {
            world.session_of(*share, true, connections);
        }
        let id = world.opened("disk");
        for share in 0..SHARES {
            let there = usize::from(shares.contains(&share));
            assert_eq!(world.loops[share].stores.len(), there, "{connections}, {share}");
        }
        let close = world.close(HOME, id);
        world.settle();
        assert_eq!(world.answers[&close].0, 0);
        world.is_empty();
    }
}

/// A kernel's client has more connections on its first paths, those of its poll queues, than on one that is added.
#[test]
fn a_path_with_more_connections_than_the_first_brings_shares_that_get_the_devices() {
    let mut world = World::without_session();
    world.session_of(HOME, true, 2);
    let id = world.opened("disk");
    let opening = world.open(HOME, "other");
    world.session_of(2, true, 3);
    world.path_up(HOME, 3);
    world.settle();
    let other = world.answers[&opening].1.expect("it is open");
    for id in [id, other] {
        for share in [HOME, 2] {
            let request = world.write(share, id);
            world.settle();
            assert_eq!(world.answers[&request], (0, None), "{share}");
        }
    }
    // Paths of the same kind change nothing.
    world.path_up(HOME, 3);
    world.path_up(HOME, 2);
    assert!(world.letters.values().all(VecDeque::is_empty));
    for id in [id, other] {
        let close = world.close(HOME, id);
        world.settle();
        assert_eq!(world.answers[&close].0, 0);
    }
    world.is_empty();
}

#[test]
fn home_is_told_that_a_device_is_larger_than_it_was() {
    let mut world = World::new();
    world.opened("disk");
    let store = *world.loops[2].stores.first().unwrap();
    world.loops[2].server.resized(store, 9 * MIB);
    world.collect(2);
    world.settle();
    // The client asks for the device again, and is told.
    world.open(HOME, "disk");
    assert_eq!(world.sectors, 9 * MIB / 512);
}

#[test]
fn a_device_that_is_closed_by_force_is_so_at_all_shares() {
    let mut world = World::new();
    let id = world.opened("disk");
    let under_way = world.write(2, id);
    assert!(!world.loops[2].server.force_close(NOW, SESSION, id), "it is home's");
    assert!(world.loops[2].server.listing().is_empty());
    assert_eq!(world.loops[HOME].server.listing()[0].id, id);
    assert!(world.loops[HOME].server.force_close(NOW, SESSION, id));
    world.collect(HOME);
    let again = world.open(HOME, "disk");
    assert!(world.loops[HOME].waiting.is_empty(), "it is not closed everywhere");
    world.settle();
    assert_eq!(world.answers[&under_way].0, 0);
    let other = world.answers[&again].1.expect("it is open again");
    assert_ne!(other, id);
    for share in 0..SHARES {
        let refused = world.write(share, id);
        assert_eq!(world.answers[&refused].0, Errno::ENOTCONN.raw());
        let taken = world.write(share, other);
        world.settle();
        assert_eq!(world.answers[&taken].0, 0);
    }
    let close = world.close(HOME, other);
    world.settle();
    assert_eq!(world.answers[&close].0, 0);
    world.is_empty();
}

#[test]
fn devices_are_opened_and_closed_at_home_only() {
    let mut world = World::new();
    let id = world.opened("disk");
    for key in [world.open(0, "other"), world.close(0, id)] {
        assert_eq!(world.answers[&key].0, Errno::EINVAL.raw());
    }
    let request = world.write(0, id);
    world.settle();
    assert_eq!(world.answers[&request].0, 0);
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Open(u8),
    Close(u8),
    Force(u8),
    Write(usize, u8),
    Work(usize),
    Deliver(usize, usize),
    Full(Option<usize>),
    Reopen,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0u8..3).prop_map(Op::Open),
        2 => (0u8..6).prop_map(Op::Close),
        1 => (0u8..6).prop_map(Op::Force),
        6 => (0..SHARES, 0u8..6).prop_map(|(share, id)| Op::Write(share, id)),
        12 => (0..SHARES).prop_map(Op::Work),
        12 => (0..SHARES, 0..SHARES).prop_map(|(from, to)| Op::Deliver(from, to)),
        1 => proptest::option::of(0..SHARES).prop_map(Op::Full),
        1 => Just(Op::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// In whatever order letters and disks come: each request is answered once, no operation goes to a store that is closed, none is
    /// taken over from one, and at the end nothing is open.
    #[test]
    fn whatever_comes_first_nothing_stays_open(ops in proptest::collection::vec(op(), 1..200), away_first in any::<bool>()) {
        let mut world = World::new();
        for op in ops {
            match op {
                Op::Open(name) => { world.open(HOME, &format!("d{name}")); }
                Op::Close(id) => { world.close(HOME, id.into()); }
                Op::Force(id) => {
                    world.loops[HOME].server.force_close(NOW, SESSION, id.into());
                    world.collect(HOME);
                }
                Op::Write(share, id) => { world.write(share, id.into()); }
                Op::Work(share) => { world.work(share); }
                Op::Deliver(from, to) => { world.deliver(from, to); }
                Op::Full(share) => world.full = share,
                // Home's session may end and begin anew; to the other shares it is one.
                Op::Reopen => {
                    world.session(HOME, false);
                    world.session(HOME, true);
                }
            }
        }
        let order = if away_first { [0, 2, HOME] } else { [HOME, 2, 0] };
        for share in order {
            world.session(share, false);
        }
        world.settle();
        world.is_empty();
    }
}
