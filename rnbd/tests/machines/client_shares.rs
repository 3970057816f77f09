//! A client in shares: devices that are mapped at one, and used at all.

use std::{collections::VecDeque, time::Duration};

use proptest::prelude::*;
use rnbd::{
    Errno,
    block::BlockOp,
    client::{
        Client, Letter, OnLoss, Unmap,
        error::MapError,
        output::{DeviceKey, Output},
        state::DeviceState,
    },
    proto::{ClientMsg, MsgOpenRsp, MsgSessInfo},
};
use rtrs::{
    IoError, PathError,
    client::{
        config::{ConType, SessionInfo},
        request::{Output as RtrsOutput, Submission},
    },
};
use zerocopy::IntoBytes;

use crate::{
    bench::{MIB, session_info},
    client_bench::{Bench, RW, S, io, lost, message, open_rsp},
};

const SHARES: u16 = 3;
const READ: BlockOp = BlockOp::Read;

/// Permits of a share.
fn info(share: usize) -> SessionInfo {
    SessionInfo {
        queue_depth: 20 + share as u32,
        ..session_info()
    }
}

/// The shares of a client, and letters that arrive at once.
pub(crate) struct Three(pub(crate) [Bench; SHARES as usize]);

impl Three {
    /// A session that is up, and its version agreed on.
    fn up() -> Self {
        let mut three = Self([0, 1, 2].map(|n| Bench::of(Client::share(n, SHARES))));
        three.tell_all(|n| RtrsOutput::Opened(S, info(n)));
        three.0[0].agree();
        three
    }

    fn mapped() -> (Self, [DeviceKey; SHARES as usize]) {
        Self::mapped_as(&open_rsp(7))
    }

    pub(crate) fn mapped_as(rsp: &MsgOpenRsp) -> (Self, [DeviceKey; SHARES as usize]) {
        let mut three = Self::up();
        let home = three.0[0].map("disk", rsp);
        three.post();
        let keys = [1, 2].map(|n: usize| match three.0[n].output() {
            Output::Mapped(key, _) => key,
            other => panic!("{other:?}"),
        });
        (three, [home, keys[0], keys[1]])
    }

    fn tell_all(&mut self, output: impl Fn(usize) -> RtrsOutput) {
        for (n, bench) in self.0.iter_mut().enumerate() {
            bench.tell(output(n));
        }
    }

    pub(crate) fn lose(&mut self) {
        self.tell_all(|_| RtrsOutput::Down(S, PathError::PeerDisconnected));
    }

    /// The session is up again, and its version agreed on.
    pub(crate) fn back(&mut self) {
        self.tell_all(|n| RtrsOutput::Up(S, info(n)));
        self.0[0].agree();
    }

    /// Delivers letters until there are none.
    pub(crate) fn post(&mut self) {
        while let Some((from, to, letter)) = self.next_letter() {
            self.0[to].client.letter(from, letter);
        }
    }

    fn next_letter(&mut self) -> Option<(u16, usize, Letter)> {
        let mut all = self.0.iter_mut().zip(0..);
        all.find_map(|(bench, from)| {
            let (to, letter) = bench.client.poll_letter()?;
            assert_ne!(to, from);
            Some((from, to.into(), letter))
        })
    }

    fn answer(&mut self, share: usize, submission: Submission, result: Result<(), IoError>) {
        self.0[share].answer(submission, result);
        self.post();
    }
}

fn unmapped(bench: &mut Bench) -> Result<(), IoError> {
    match bench.output() {
        Output::Unmapped(_, result) => result,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_home_has_mapped_is_there_at_each_share() {
    let mut three = Three::up();
    assert!(three.0[1].sent().is_empty(), "home agrees on the version");
    three.0[2].client.map(S, "disk", RW);
    assert!(matches!(
        three.0[2].map_error(),
        MapError::Session(rtrs::Error::Config(_))
    ));
    let home = three.0[0].map("disk", &open_rsp(7));
    three.post();
    for (n, bench) in three.0.iter_mut().enumerate().skip(1) {
        let key = match bench.output() {
            Output::Mapped(key, geometry) => {
                assert_eq!((geometry.size, geometry.queue_depth), (8 * MIB, 16 + n as u32));
                assert_eq!(bench.client.geometry(key), Some(geometry));
                key
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(
            (bench.client.name(key), bench.client.mode(key)),
            (Some("disk"), Some(RW))
        );
        let user = bench.submit(key, READ, 4096, 512);
        let read = bench.sent_one();
        assert_eq!((read.con, io(&read).device_id.get()), (ConType::Io(5), 7));
        bench.answer(read, Ok(()));
        assert_eq!(bench.done(user), Ok(()));
        assert_eq!(bench.client.counters(key).unwrap().read_bytes, 512);
        // Only home's words count.
        assert_eq!([bench.unmap(key), bench.remap(key)], [Some(Errno::EINVAL); 2]);
        assert_eq!(bench.client.resize(key, 8), Err(Errno::EINVAL));
        assert_eq!(bench.client.state(key), Some(DeviceState::Mapped));
    }
    assert_eq!(three.0[0].client.counters(home).unwrap().completed, 0);
    assert!(three.next_letter().is_none());
}

#[test]
fn a_device_is_closed_when_no_share_works_on_it() {
    let (mut three, [home, one, two]) = Three::mapped();
    let users = [
        three.0[1].submit(one, READ, 0, 512),
        three.0[2].submit(two, BlockOp::Flush, 0, 0),
    ];
    let (read, flush) = (three.0[1].sent_one(), three.0[2].sent_one());
    assert_eq!(three.0[0].unmap(home), None);
    // What is submitted before the word has come is served.
    let late = three.0[1].submit(one, READ, 512, 512);
    let late_read = three.0[1].sent_one();
    three.post();
    let refused = three.0[1].refused(one, READ, 0, 512);
    assert_eq!(refused, Errno::ESHUTDOWN);
    three.answer(1, read, Ok(()));
    three.answer(2, flush, Ok(()));
    assert_eq!(three.0[1].done(users[0]), Ok(()));
    let outputs = three.0[2].outputs();
    assert!(
        matches!(&outputs[..], [Output::Done { user, result: Ok(()), .. }, Output::Unmapped(key, Ok(()))]
            if *user == users[1] && *key == two),
        "{outputs:?}"
    );
    assert!(
        three.0[0].sent().is_empty() && three.0[0].outputs().is_empty(),
        "one works on it"
    );
    three.answer(1, late_read, Ok(()));
    let outputs = three.0[1].outputs();
    assert!(
        matches!(&outputs[..], [Output::Done { user, result: Ok(()), .. }, Output::Unmapped(..)] if *user == late),
        "{outputs:?}"
    );
    let close = three.0[0].sent_one();
    assert!(matches!(message(&close), ClientMsg::Close(m) if m.device_id.get() == 7));
    three.answer(0, close, Ok(()));
    assert!(unmapped(&mut three.0[0]).is_ok());
    assert_eq!(three.0.each_ref().map(|bench| bench.client.state(one)), [None; 3]);
    // The name is free again.
    three.0[0].map("disk", &open_rsp(8));
}

#[test]
fn a_device_that_has_grown_has_at_each_share() {
    let (mut three, keys) = Three::mapped();
    let [_, one, two] = keys;
    let (sent, unsent) = (
        three.0[1].submit(one, READ, 0, 512),
        three.0[2].submit(two, READ, 0, 512),
    );
    let in_flight = three.0[1].sent_one();
    three.lose();
    for (bench, key) in three.0.iter_mut().zip(keys) {
        let gone = bench.output();
        assert!(matches!(gone, Output::State(k, DeviceState::MappedDisconnected) if k == key));
    }
    three.answer(1, in_flight, Err(lost()));
    assert_eq!(three.0[1].done(sent), Err(Errno::ECONNABORTED));
    assert!(three.0[2].sent().is_empty(), "it was meant for the device as it was");
    assert_eq!(three.0[2].done(unsent), Err(Errno::ECONNABORTED));

    three.back();
    let open = three.0[0].sent_one();
    assert!(three.0[1].sent().is_empty() && three.0[2].sent().is_empty());
    assert_eq!(three.0[1].refused(one, READ, 0, 512), Errno::ECONNABORTED);
    let mut rsp = open_rsp(31);
    rsp.nsectors.set(9 * MIB / 512);
    three.0[0].answer_with(open, rsp.as_bytes());
    three.post();
    for (bench, key) in three.0.iter_mut().zip(keys) {
        let outputs = bench.outputs();
        assert!(
            matches!(&outputs[..], [Output::Geometry(_, g), Output::State(_, DeviceState::Mapped)] if g.size == 9 * MIB),
            "{outputs:?}"
        );
        bench.submit(key, READ, 9 * MIB - 512, 512);
        assert_eq!(io(&bench.sent_one()).device_id.get(), 31);
    }
}

#[test]
fn a_share_that_lost_the_path_first_waits_for_the_next() {
    let mut three = Three::up();
    three.0[0].client.map(S, "disk", RW);
    let open = three.0[0].sent_one();
    three.0[1].lose();
    three.0[0].answer_with(open, open_rsp(7).as_bytes());
    three.post();
    let outputs = three.0[1].outputs();
    let [
        Output::Mapped(key, _),
        Output::State(_, DeviceState::MappedDisconnected),
    ] = outputs[..]
    else {
        panic!("{outputs:?}")
    };
    assert_eq!(three.0[1].refused(key, READ, 0, 512), Errno::ECONNABORTED);
    for n in [0, 2] {
        three.0[n].lose();
        three.0[n].outputs();
    }
    three.back();
    let open = three.0[0].sent_one();
    three.0[0].answer_with(open, open_rsp(8).as_bytes());
    three.post();
    assert!(matches!(three.0[1].output(), Output::State(k, DeviceState::Mapped) if k == key));
    three.0[1].submit(key, READ, 0, 512);
    assert_eq!(io(&three.0[1].sent_one()).device_id.get(), 8);
}

#[test]
fn a_device_goes_with_its_session_at_each_share() {
    let (mut three, [home, one, _]) = Three::mapped();
    assert_eq!(three.0[0].unmap(home), None);
    let user = three.0[1].submit(one, READ, 0, 512);
    let read = three.0[1].sent_one();
    // The word that it is unmapped comes after the end.
    three.0[1].answer(read, Err(lost()));
    assert_eq!(three.0[1].done(user), Err(Errno::ECONNABORTED));
    for n in [1, 2, 0] {
        three.0[n].tell(RtrsOutput::Closed(S));
        let ended = unmapped(&mut three.0[n]);
        assert!(matches!(ended, Err(IoError::Path(PathError::Closed))), "{n}: {ended:?}");
    }
    three.post();
    assert!(three.0.iter_mut().all(|bench| bench.outputs().is_empty()));

    // A share without the session has no use for a device, and holds up nobody.
    let mut three = Three::up();
    three.0[2].tell(RtrsOutput::Closed(S));
    let device = three.0[0].map("disk", &open_rsp(7));
    three.post();
    assert!(three.0[2].outputs().is_empty());
    assert_eq!(three.0[0].unmap(device), None);
    three.post();
    let close = three.0[0].sent_one();
    three.answer(0, close, Ok(()));
    assert!(unmapped(&mut three.0[0]).is_ok());
}

#[test]
fn a_size_that_is_set_is_so_at_each_share() {
    let (mut three, keys) = Three::mapped();
    three.0[0].client.resize(keys[0], 2 * MIB / 512).unwrap();
    three.post();
    for (bench, key) in three.0.iter_mut().zip(keys) {
        assert!(matches!(bench.output(), Output::Geometry(k, g) if (k, g.size) == (key, 2 * MIB)));
        assert_eq!(bench.refused(key, READ, 2 * MIB, 512), Errno::EIO);
    }
}

#[test]
fn operations_of_each_share_wait_for_their_device() {
    let (mut three, keys) = Three::mapped();
    let queue = OnLoss::Queue(Some(Duration::from_secs(9)));
    assert_eq!(three.0[1].client.set_on_loss(keys[1], queue), Err(Errno::EINVAL));
    three.0[0].client.set_on_loss(keys[0], queue).unwrap();
    three.post();
    let users = [0, 1, 2].map(|n: usize| three.0[n].submit(keys[n], READ, 0, 512));
    let in_flight = [0, 1, 2].map(|n: usize| three.0[n].sent());
    three.lose();
    for (n, sent) in in_flight.into_iter().enumerate() {
        sent.into_iter().for_each(|read| three.0[n].answer(read, Err(lost())));
        assert!(three.0[n].sent().is_empty());
        assert!(matches!(
            three.0[n].output(),
            Output::State(_, DeviceState::MappedDisconnected)
        ));
        three.0[n].wait(Duration::from_secs(8));
    }
    three.back();
    let open = three.0[0].sent_one();
    three.0[0].answer_with(open, open_rsp(31).as_bytes());
    three.post();
    for (n, user) in users.into_iter().enumerate() {
        assert!(matches!(three.0[n].output(), Output::State(_, DeviceState::Mapped)));
        let again = three.0[n].sent_one();
        assert_eq!(io(&again).device_id.get(), 31);
        three.answer(n, again, Ok(()));
        assert_eq!(three.0[n].done(user), Ok(()));
    }
    // Its patience is each share's, and ends there.
    let user = three.0[2].submit(keys[2], READ, 0, 512);
    three.lose();
    assert!(three.0[2].sent().is_empty());
    three.0[2].wait(Duration::from_secs(9));
    let outputs = three.0[2].outputs();
    assert!(
        matches!(outputs[..], [Output::State(..), Output::Done { user: u, result: Err(Errno::ECONNABORTED), .. }] if u == user),
        "{outputs:?}"
    );
}

#[test]
fn force_reaches_each_share() {
    let (mut three, [home, one, _]) = Three::mapped();
    let unsent = three.0[1].submit(one, READ, 0, 512);
    three.0[0].client.unmap(home, Unmap::Force).unwrap();
    three.post();
    assert!(three.0[1].sent().is_empty());
    three.post();
    let outputs = three.0[1].outputs();
    assert!(
        matches!(outputs[..], [Output::Done { user, result: Err(Errno::ESHUTDOWN), .. }, Output::Unmapped(..)] if user == unsent),
        "{outputs:?}"
    );
    let close = three.0[0].sent_one();
    three.answer(0, close, Ok(()));
    assert!(unmapped(&mut three.0[0]).is_ok());
}

/// Messages from one share to another, in order.
enum Mail {
    /// RTRS at home: there is a path, of this number; there is none any more.
    Up(u32),
    Down(u32),
    /// RTRS to home: the path is lost here; nothing is left of it here.
    Lost(u32),
    Gone,
    Rnbd(Letter),
}

/// Shares whose letters take their time, on an RTRS that is true to its word, and a server that knows which device is open.
struct World {
    benches: Vec<Bench>,
    keys: Vec<Option<DeviceKey>>,
    mail: Vec<VecDeque<Mail>>,
    /// The path that each share has, by number.
    paths: Vec<Option<u32>>,
    path: u32,
    /// Shares that have something of the last path.
    there: usize,
    /// Requests with the server, of a share and a path.
    requests: Vec<(usize, u32, Submission)>,
    /// The server's number for the device, on a path.
    open: Option<(u32, u32)>,
    /// The server has closed the device on this path, which the client may not know.
    closed: Option<u32>,
    begun: u64,
    ended: u64,
    failed: u64,
    unmapped: usize,
}

const N: usize = SHARES as usize;

impl World {
    fn new(on_loss: OnLoss) -> Self {
        let mut world = Self {
            benches: (0..SHARES).map(|n| Bench::of(Client::share(n, SHARES))).collect(),
            keys: vec![None; N],
            mail: (0..N * N).map(|_| VecDeque::new()).collect(),
            paths: vec![Some(0); N],
            path: 0,
            there: N,
            requests: Vec::new(),
            open: None,
            closed: None,
            begun: 0,
            ended: 0,
            failed: 0,
            unmapped: 0,
        };
        for n in 0..N {
            world.benches[n].tell(RtrsOutput::Opened(S, info(n)));
        }
        let device = world.benches[0].client.map(S, "disk", RW);
        // Before it is opened, so that each share knows it from the beginning.
        world.benches[0].client.set_on_loss(device, on_loss).unwrap();
        world.keys[0] = Some(device);
        world.settle();
        // The version, and the device.
        for _ in 0..2 {
            world.answer(0);
            world.settle();
        }
        world
    }

    fn settle(&mut self) {
        for n in 0..N {
            for submission in self.benches[n].sent() {
                self.send(n, submission);
            }
            for output in self.benches[n].outputs() {
                match output {
                    Output::Mapped(key, _) => self.keys[n] = Some(key),
                    Output::Done { data, result, .. } => {
                        self.ended += 1;
                        self.failed += u64::from(result.is_err());
                        self.benches[n].give(data);
                    }
                    Output::Unmapped(..) => {
                        assert!(self.keys[n].take().is_some());
                        self.unmapped += 1;
                        assert!(n > 0 || self.unmapped == N, "home is the last");
                    }
                    Output::MapFailed(_, e) => panic!("{e}"),
                    _ => {}
                }
            }
            while let Some((to, letter)) = self.benches[n].client.poll_letter() {
                self.mail[n * N + usize::from(to)].push_back(Mail::Rnbd(letter));
            }
        }
    }

    /// RTRS has a request.
    fn send(&mut self, n: usize, submission: Submission) {
        let Some(path) = self.paths[n] else {
            return self.benches[n].answer(submission, Err(lost()));
        };
        if let ClientMsg::Io(m) = message(&submission) {
            assert_eq!(m.device_id.get(), 100 + path, "another path's number");
            let lost = self.paths[0] != Some(path);
            assert!(lost || self.open.is_some() || self.closed == Some(path), "it is closed");
        }
        self.requests.push((n, path, submission));
    }

    /// The server answers one of its requests.
    fn answer(&mut self, which: usize) {
        if self.requests.is_empty() {
            return;
        }
        let (n, path, submission) = self.requests.remove(which % self.requests.len());
        let bench = &mut self.benches[n];
        match message(&submission) {
            ClientMsg::SessInfo(_) => bench.answer_with(submission, MsgSessInfo::response(2).as_bytes()),
            ClientMsg::Open(_) => {
                let is_io = |s: &Submission| matches!(message(s), ClientMsg::Io(_));
                let early = self.requests.iter().any(|(_, p, s)| *p == path && is_io(s));
                assert!(!early, "a request of before could reach another device");
                self.closed = None;
                let mut rsp: MsgOpenRsp = open_rsp(100 + path);
                rsp.nsectors.set((8 + u64::from(path)) * MIB / 512);
                self.open = Some((path, 100 + path));
                bench.answer_with(submission, rsp.as_bytes());
            }
            ClientMsg::Close(m) => {
                assert!(self.open == Some((path, m.device_id.get())) || self.closed == Some(path));
                assert!(!self.requests.iter().any(|(_, p, _)| *p == path), "it is in use");
                self.open = None;
                bench.answer(submission, Ok(()));
            }
            _ if self.closed == Some(path) => bench.answer(submission, Err(IoError::Remote(107))),
            _ => bench.answer(submission, Ok(())),
        }
    }

    /// The server closes the device, as a kernel's does that has seen the session's last path go before another has come up.
    fn close(&mut self) {
        if let Some((path, _)) = self.open.take() {
            self.closed = Some(path);
        }
    }

    fn wait(&mut self) {
        self.benches
            .iter_mut()
            .for_each(|bench| bench.wait(Duration::from_secs(1)));
    }

    /// A share loses its path. Its requests end.
    fn lose(&mut self, n: usize) {
        let Some(path) = self.paths[n].take() else { return };
        self.benches[n].lose();
        let (mine, others): (Vec<_>, Vec<_>) = self.requests.drain(..).partition(|(of, ..)| *of == n);
        self.requests = others;
        for (_, _, submission) in mine {
            self.benches[n].answer(submission, Err(lost()));
        }
        if n > 0 {
            self.mail[n * N].extend([Mail::Lost(path), Mail::Gone]);
            return;
        }
        self.open = None;
        self.there -= 1;
        (1..N).for_each(|to| self.mail[to].push_back(Mail::Down(path)));
    }

    /// Home has a new path.
    fn come_back(&mut self) {
        if self.there > 0 {
            return;
        }
        self.path += 1;
        self.there = N;
        self.paths[0] = Some(self.path);
        (1..N).for_each(|to| self.mail[to].push_back(Mail::Up(self.path)));
        self.benches[0].tell(RtrsOutput::Up(S, info(0)));
    }

    /// The next letter from one to another arrives.
    fn deliver(&mut self, from: usize, to: usize) {
        match self.mail[from * N + to].pop_front() {
            Some(Mail::Rnbd(letter)) => self.benches[to].client.letter(from as u16, letter),
            Some(Mail::Up(path)) => {
                self.paths[to] = Some(path);
                self.benches[to].tell(RtrsOutput::Up(S, info(to)));
            }
            Some(Mail::Down(path)) if self.paths[to] == Some(path) => self.lose(to),
            Some(Mail::Lost(path)) if self.paths[to] == Some(path) => self.lose(to),
            Some(Mail::Gone) => self.there -= 1,
            _ => {}
        }
    }

    fn submit(&mut self, n: usize, op: BlockOp) {
        if let Some(key) = self.keys[n] {
            self.begun += 1;
            let len = if op == READ { 512 } else { 0 };
            self.benches[n].submit(key, op, 0, len);
        }
    }

    fn step(&mut self, (what, which): (u8, usize)) {
        match what {
            0..60 => self.deliver(which % N, which / N % N),
            60..75 => self.submit(which % N, READ),
            75..80 => self.submit(which % N, BlockOp::Flush),
            80..93 => self.answer(which),
            93..95 => self.lose(which % N),
            95 => self.close(),
            96 => self.wait(),
            _ => self.come_back(),
        }
        self.settle();
    }

    /// All letters are delivered, and all requests answered, also those that are sent again after a pause.
    fn rest(&mut self) {
        for _ in 0..6 {
            self.quiesce();
            self.wait();
            self.settle();
        }
        self.quiesce();
    }

    fn quiesce(&mut self) {
        while !self.requests.is_empty() || self.mail.iter().any(|mail| !mail.is_empty()) {
            for (from, to) in (0..N).flat_map(|from| (0..N).map(move |to| (from, to))) {
                self.deliver(from, to);
                self.settle();
            }
            self.answer(0);
            self.settle();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Paths come and go at each share at any time, letters cross with everything.
    #[test]
    fn shares_never_use_what_is_not_open(
        steps in prop::collection::vec((0u8..100, any::<usize>()), 0..400),
        more in prop::collection::vec((0u8..100, any::<usize>()), 0..60),
        waits in any::<bool>(),
    ) {
        let mut world = World::new(if waits { OnLoss::Queue(None) } else { OnLoss::Error });
        for step in steps {
            world.step(step);
        }
        world.rest();
        world.come_back();
        world.rest();
        for n in 0..N {
            let key = world.keys[n].expect("it is known everywhere");
            prop_assert_eq!(world.benches[n].client.state(key), Some(DeviceState::Mapped));
            let size = (8 + u64::from(world.path)) * MIB;
            prop_assert_eq!(world.benches[n].client.geometry(key).unwrap().size, size);
        }
        prop_assert_eq!(world.begun, world.ended);
        prop_assert!(!waits || world.failed == 0, "{} have failed", world.failed);
        // Work goes on at all shares while it is unmapped.
        let home = world.keys[0].unwrap();
        world.submit(1, READ);
        world.settle();
        assert_eq!(world.benches[0].unmap(home), None);
        world.settle();
        for step in more {
            world.step(step);
        }
        world.rest();
        prop_assert_eq!((world.unmapped, world.open), (N, None));
        prop_assert_eq!(world.begun, world.ended);
        prop_assert!(world.benches.iter().all(|bench| bench.lent() == 0));
    }
}
