//! The server: which requests are taken, and in which order what they ask for happens.

use std::{collections::BTreeMap, time::Duration};

use proptest::prelude::*;
use rnbd::{
    Errno,
    block::{BlockOp, Geometry},
    proto::{
        AccessMode, F_FUA, F_NO_UNMAP, F_PREFLUSH, IoOp, MsgClose, MsgIo, MsgOpen, MsgOpenRsp, MsgSessInfo, Rw,
        instance::Instance, parse_open_rsp,
    },
    server::{
        Limits, ServerCounters,
        action::{Identity, OpenRefused, Opened, Ticket},
        disk::{DiskOp, StoreId},
    },
};
use roce_verbs::Instant;
use rtrs::{
    Direction::{self, Read, Write},
    PathError,
    server::request::{Output, Request, RequestKey, SessionKey, SessionOpened},
};
use zerocopy::IntoBytes;

use crate::{
    bench::{MIB, geometry},
    served::{Action, Served},
};

pub(crate) const A: SessionKey = SessionKey(1);
pub(crate) const B: SessionKey = SessionKey(2);

pub(crate) struct Bench {
    pub(crate) server: Served,
    pub(crate) now: Instant,
    pub(crate) serial: u32,
    pub(crate) stores: u32,
}

impl Bench {
    pub(crate) fn new(limits: Limits) -> Self {
        let mut bench = Self {
            server: Served::new(limits),
            now: Instant::ZERO,
            serial: 0,
            stores: 0,
        };
        for session in [A, B] {
            bench.begin(session);
        }
        bench
    }

    pub(crate) fn begin(&mut self, session: SessionKey) {
        self.begin_as(session, &format!("session {}", session.0));
    }

    pub(crate) fn begin_as(&mut self, session: SessionKey, name: &str) {
        let opened = SessionOpened {
            session,
            name: name.into(),
            peer: ([192, 0, 2, 1], 1000).into(),
            connections: 2,
        };
        self.server.rtrs(self.now, Output::SessionOpened(opened));
    }

    pub(crate) fn end(&mut self, session: SessionKey) {
        let why = PathError::PeerDisconnected;
        let output = Output::SessionClosed { session, why };
        self.server.rtrs(self.now, output);
    }

    /// The data of each request lies at 1 MiB times its chunk, which is its serial.
    pub(crate) fn ask(
        &mut self,
        session: SessionKey,
        direction: Direction,
        header: &[u8],
        data_len: u32,
    ) -> RequestKey {
        self.serial += 1;
        self.now = self.now + Duration::from_millis(1);
        let key = RequestKey {
            session,
            chunk: self.serial as u16,
            serial: self.serial,
        };
        let request = Request {
            key,
            direction,
            connection: 1,
            header: header.into(),
            data_len,
            data_offset: data_offset(key),
        };
        self.server.rtrs(self.now, Output::Request(request));
        key
    }

    pub(crate) fn actions(&mut self) -> Vec<Action> {
        std::iter::from_fn(|| self.server.poll_action()).collect()
    }

    pub(crate) fn action(&mut self) -> Action {
        let mut actions = self.actions();
        assert_eq!(actions.len(), 1, "{actions:?}");
        actions.remove(0)
    }

    /// Sends a request that is answered at once, and returns the error.
    pub(crate) fn errno(&mut self, session: SessionKey, direction: Direction, header: &[u8], data_len: u32) -> i32 {
        let key = self.ask(session, direction, header, data_len);
        match self.action() {
            Action::Answer(request, errno) if request == key => errno,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn ask_open(&mut self, session: SessionKey, name: &str, mode: AccessMode) -> RequestKey {
        let message = MsgOpen::new(name.as_bytes(), mode).unwrap();
        self.ask(session, Read, message.as_bytes(), 56)
    }

    pub(crate) fn opened(&mut self, ticket: Ticket, geometry: Geometry, identity: &str) -> StoreId {
        self.stores += 1;
        let store = StoreId(self.stores);
        let opened = Opened {
            store,
            geometry,
            identity: Identity(identity.into()),
            label: format!("/{identity}"),
            instance: Some(Instance::of([identity.as_bytes()])),
        };
        self.server.opened(self.now, ticket, Ok(opened));
        store
    }

    /// Opens a device with the identity of its name: its number and its store.
    pub(crate) fn open(&mut self, session: SessionKey, name: &str, geometry: Geometry) -> (u32, StoreId) {
        let key = self.ask_open(session, name, AccessMode::ReadWrite);
        let store = match self.action() {
            Action::Open { ticket, .. } => self.opened(ticket, geometry, name),
            other => panic!("{other:?}"),
        };
        let action = self.action();
        (response(&action, key).device_id.get(), store)
    }

    pub(crate) fn counters(&self) -> ServerCounters {
        self.server.counters()
    }
}

pub(crate) fn data_offset(key: RequestKey) -> usize {
    usize::from(key.chunk) << 20
}

pub(crate) fn response(action: &Action, key: RequestKey) -> MsgOpenRsp {
    match action {
        Action::AnswerWith { request, at, message } if *request == key => {
            assert_eq!(*at, data_offset(key));
            parse_open_rsp(message).unwrap()
        }
        other => panic!("{other:?}"),
    }
}

pub(crate) fn io(device: u32, op: IoOp, sector: u64, bytes: u32) -> MsgIo {
    MsgIo::new(device, Rw::new(op), sector, bytes)
}

pub(crate) fn with_flags(mut m: MsgIo, flags: u32) -> MsgIo {
    m.rw.set(m.rw.get() | flags);
    m
}

pub(crate) fn ticket_of(action: &Action) -> Ticket {
    match action {
        Action::Open { ticket, .. } | Action::Close { ticket, .. } => *ticket,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn disk_op(action: &Action) -> (RequestKey, DiskOp) {
    match action {
        Action::Io(ticket, _, op) => (*ticket, *op),
        other => panic!("{other:?}"),
    }
}

#[test]
fn requests_that_make_no_sense_are_refused_without_the_disk() {
    let mut bench = Bench::new(Limits::default());
    let (id, _) = bench.open(A, "disk", geometry(8 * MIB));
    let cases: [(&str, Direction, MsgIo, u32, Errno); 13] = [
        (
            "more than the data",
            Write,
            io(id, IoOp::Write, 0, 1024),
            512,
            Errno::EINVAL,
        ),
        (
            "more than the room",
            Read,
            io(id, IoOp::Read, 0, 1 << 31),
            512,
            Errno::EINVAL,
        ),
        ("no sectors", Read, io(id, IoOp::Read, 0, 100), 512, Errno::EINVAL),
        ("read as a write", Write, io(id, IoOp::Read, 0, 512), 512, Errno::EINVAL),
        ("write as a read", Read, io(id, IoOp::Write, 0, 512), 512, Errno::EINVAL),
        ("overflow", Write, io(id, IoOp::Write, u64::MAX, 512), 512, Errno::EIO),
        (
            "overflow by one",
            Write,
            io(id, IoOp::Write, u64::MAX / 512, 512),
            512,
            Errno::EIO,
        ),
        (
            "secure erase",
            Write,
            io(id, IoOp::SecureErase, 0, 512),
            0,
            Errno::EOPNOTSUPP,
        ),
        (
            "write same",
            Write,
            io(id, IoOp::WriteZeroes, 0, 512),
            512,
            Errno::EOPNOTSUPP,
        ),
        (
            "zeroes as a read",
            Read,
            io(id, IoOp::WriteZeroes, 0, 512),
            512,
            Errno::EINVAL,
        ),
        (
            "flush with data as a read",
            Read,
            io(id, IoOp::Flush, 0, 512),
            512,
            Errno::EINVAL,
        ),
        (
            "flush with more than the data",
            Write,
            io(id, IoOp::Flush, 0, 1024),
            512,
            Errno::EINVAL,
        ),
        (
            "no operation",
            Read,
            with_flags(io(id, IoOp::Read, 0, 512), 6),
            512,
            Errno::EINVAL,
        ),
    ];
    for (what, direction, m, len, want) in &cases {
        assert_eq!(bench.errno(A, *direction, m.as_bytes(), *len), want.raw(), "{what}");
    }
    let n = cases.len() as u64;
    let c = bench.counters();
    assert_eq!((c.requests, c.failed, c.malformed), (n, n, n));

    // Well-formed, but not for this device.
    let long = io(id, IoOp::WriteZeroes, 0, (1 << 30) + 512);
    assert_eq!(bench.errno(A, Write, long.as_bytes(), 0), Errno::EOPNOTSUPP.raw());
    let (read_only, _) = bench.open(
        B,
        "ro",
        Geometry {
            read_only: true,
            ..geometry(MIB)
        },
    );
    let write = io(read_only, IoOp::Write, 0, 512);
    assert_eq!(bench.errno(B, Write, write.as_bytes(), 512), Errno::EROFS.raw());
    let c = bench.counters();
    assert_eq!((c.requests, c.failed, c.malformed), (n + 2, n + 2, n));

    // For no device at all: another session's are not there.
    let other = io(7, IoOp::Read, 0, 512);
    assert_eq!(bench.errno(A, Read, other.as_bytes(), 512), Errno::ENOTCONN.raw());
    let stranger = SessionKey(9);
    assert_eq!(bench.errno(stranger, Read, other.as_bytes(), 512), Errno::ENODEV.raw());
    for header in [&[][..], &[1, 0, 0, 0], &[9; 40], &[2, 0, 0, 0, 1, 0], &[2, 0, 0, 0, 7]] {
        assert_eq!(bench.errno(A, Read, header, 512), Errno::EINVAL.raw(), "{header:?}");
    }
    let c = bench.counters();
    assert_eq!((c.requests, c.malformed), (n + 2, n + 6));
}

#[test]
fn what_is_asked_for_reaches_the_disk_as_it_is() {
    let mut bench = Bench::new(Limits::default());
    let (id, store) = bench.open(A, "disk", geometry(8 * MIB));
    let zeroes = |fua, may_unmap| BlockOp::WriteZeroes { fua, may_unmap };
    let cases = [
        (Read, io(id, IoOp::Read, 8, 4096), 4096, BlockOp::Read),
        (Write, io(id, IoOp::Write, 8, 4096), 4096, BlockOp::Write { fua: false }),
        (
            Write,
            with_flags(io(id, IoOp::Write, 8, 4096), F_FUA),
            4096,
            BlockOp::Write { fua: true },
        ),
        (
            Read,
            with_flags(io(id, IoOp::Flush, u64::MAX, 0), F_FUA | F_PREFLUSH),
            0,
            BlockOp::Flush,
        ),
        (Write, io(id, IoOp::Discard, 8, 1 << 30), 0, BlockOp::Discard),
        (Write, io(id, IoOp::WriteZeroes, 8, 1 << 30), 0, zeroes(false, true)),
        (
            Write,
            with_flags(io(id, IoOp::WriteZeroes, 8, 512), F_FUA | F_NO_UNMAP),
            0,
            zeroes(true, false),
        ),
        // Flags that nobody knows yet, and a range that only the disk can judge.
        (
            Read,
            with_flags(io(id, IoOp::Read, 1 << 40, 512), 1 << 20),
            512,
            BlockOp::Read,
        ),
    ];
    for (direction, m, len, op) in cases {
        let key = bench.ask(A, direction, m.as_bytes(), len);
        let (ticket, asked) = disk_op(&bench.action());
        let offset = if op == BlockOp::Flush { 0 } else { m.sector.get() * 512 };
        let want = (store, op, offset, u64::from(m.bi_size.get()));
        assert_eq!((asked.store, asked.op, asked.offset, asked.len), want);
        if matches!(op, BlockOp::Read | BlockOp::Write { .. }) {
            assert_eq!(asked.data, data_offset(key));
        }
        bench.server.io_done(ticket, Ok(()));
        assert_eq!(bench.action(), Action::Answer(key, 0));
    }
    let c = bench.counters();
    assert_eq!((c.requests, c.failed, c.malformed), (8, 0, 0));
    assert_eq!((c.read_bytes, c.written_bytes), (4096 + 512, 2 * 4096));
}

#[test]
fn a_flush_comes_first_and_the_rest_only_if_it_succeeds() {
    let mut bench = Bench::new(Limits::default());
    let (id, _) = bench.open(A, "disk", geometry(8 * MIB));
    let write = with_flags(io(id, IoOp::Write, 0, 512), F_PREFLUSH);
    let flush_and_write = with_flags(io(id, IoOp::Flush, 0, 512), F_FUA);
    for (m, fua) in [(write, false), (flush_and_write, true)] {
        let key = bench.ask(A, Write, m.as_bytes(), 512);
        let (ticket, op) = disk_op(&bench.action());
        assert_eq!((op.op, op.len), (BlockOp::Flush, 0));
        bench.server.io_done(ticket, Ok(()));
        let (second, op) = disk_op(&bench.action());
        assert_eq!(
            (op.op, op.len, op.data),
            (BlockOp::Write { fua }, 512, data_offset(key))
        );
        bench.server.io_done(second, Ok(()));
        assert_eq!(bench.action(), Action::Answer(key, 0));

        let key = bench.ask(A, Write, m.as_bytes(), 512);
        let (ticket, _) = disk_op(&bench.action());
        bench.server.io_done(ticket, Err(Errno::ENOSPC));
        assert_eq!(bench.action(), Action::Answer(key, Errno::ENOSPC.raw()));
    }
    let c = bench.counters();
    assert_eq!((c.requests, c.failed, c.written_bytes), (4, 2, 2 * 512));
}

#[test]
fn a_read_that_leaves_room_shows_nothing_of_earlier_requests() {
    let mut bench = Bench::new(Limits::default());
    let (id, _) = bench.open(A, "disk", geometry(8 * MIB));
    for (result, zeroed) in [(Ok(()), true), (Err(Errno::EIO), false)] {
        let key = bench.ask(A, Read, io(id, IoOp::Read, 3, 512).as_bytes(), 4096);
        let (ticket, _) = disk_op(&bench.action());
        bench.server.io_done(ticket, result);
        let mut actions = bench.actions();
        let answer = Action::Answer(key, result.map_or_else(Errno::raw, |()| 0));
        assert_eq!(actions.pop(), Some(answer));
        let zero = Action::Zero {
            request: key,
            from: data_offset(key) + 512,
            len: 4096 - 512,
        };
        assert_eq!(actions, if zeroed { vec![zero] } else { vec![] });
    }
    // It fails if the room can't be cleared.
    bench.server.writes_fail = true;
    let key = bench.ask(A, Read, io(id, IoOp::Read, 3, 512).as_bytes(), 4096);
    let (ticket, _) = disk_op(&bench.action());
    bench.server.io_done(ticket, Ok(()));
    assert_eq!(bench.actions(), [Action::Answer(key, Errno::EIO.raw())]);
    let counters = bench.server.counters();
    assert_eq!((counters.failed, counters.read_bytes), (2, 512));
}

#[test]
fn the_version_is_the_lower_one() {
    let mut bench = Bench::new(Limits::default());
    for (theirs, agreed) in [(1, 1), (2, 2), (200, 2)] {
        let key = bench.ask(A, Read, MsgSessInfo::request(theirs).as_bytes(), 36);
        let want = Action::AnswerWith {
            request: key,
            at: data_offset(key),
            message: MsgSessInfo::response(agreed).as_bytes().into(),
        };
        assert_eq!(bench.action(), want);
    }
    let m = MsgSessInfo::request(2);
    assert_eq!(bench.errno(A, Read, m.as_bytes(), 35), Errno::EINVAL.raw());
    assert_eq!(bench.errno(A, Write, m.as_bytes(), 36), Errno::EINVAL.raw());
}

#[test]
fn an_open_without_room_for_its_answer_opens_nothing() {
    let mut bench = Bench::new(Limits::default());
    let open = MsgOpen::new(b"disk", AccessMode::ReadOnly).unwrap();
    assert_eq!(bench.errno(A, Read, open.as_bytes(), 55), Errno::EINVAL.raw());
    assert_eq!(bench.errno(A, Write, open.as_bytes(), 56), Errno::EINVAL.raw());
    let mut bad_mode = open;
    bad_mode.access_mode = 3;
    assert_eq!(bench.errno(A, Read, bad_mode.as_bytes(), 56), Errno::EINVAL.raw());
    let c = bench.counters();
    assert_eq!((c.opens, c.refused, c.open), (0, 1, 0));
    assert!(bench.server.is_idle());
}

#[test]
fn a_session_opens_one_device_after_the_other() {
    let mut bench = Bench::new(Limits::default());
    let first = bench.ask_open(A, "disk", AccessMode::ReadWrite);
    let again = bench.ask_open(A, "disk", AccessMode::ReadWrite);
    let second = bench.ask_open(A, "other", AccessMode::Migration);
    let elsewhere = bench.ask_open(B, "disk", AccessMode::ReadOnly);
    let actions = bench.actions();
    let [one, two] = &actions[..] else {
        panic!("{actions:?}")
    };
    let want = Action::Open {
        ticket: ticket_of(one),
        session_name: "session 1".into(),
        name: b"disk".into(),
        mode: AccessMode::ReadWrite,
    };
    assert_eq!(*one, want);
    assert!(
        matches!(
            two,
            Action::Open {
                mode: AccessMode::ReadOnly,
                ..
            }
        ),
        "{two:?}"
    );

    bench.opened(ticket_of(one), geometry(8 * MIB), "disk");
    let actions = bench.actions();
    let [answer, same, next] = &actions[..] else {
        panic!("{actions:?}")
    };
    let device = response(answer, first);
    assert_eq!(
        (device.nsectors.get(), device.logical_block_size.get()),
        (8 * MIB / 512, 512)
    );
    assert_eq!(response(same, again), device);
    assert!(
        matches!(
            next,
            Action::Open {
                mode: AccessMode::Migration,
                ..
            }
        ),
        "{next:?}"
    );

    // Refused in one session, opened in the other.
    bench.server.opened(bench.now, ticket_of(two), Err(Errno::EPERM.into()));
    assert_eq!(bench.action(), Action::Answer(elsewhere, Errno::EPERM.raw()));
    bench.opened(ticket_of(next), geometry(MIB), "other");
    assert_ne!(response(&bench.action(), second).device_id, device.device_id);
    let c = bench.counters();
    assert_eq!((c.opens, c.refused, c.open), (3, 1, 2));
}

#[test]
fn one_device_is_open_once_however_it_is_spelled() {
    let mut bench = Bench::new(Limits::default());
    let (id, store) = bench.open(A, "disk", geometry(MIB));
    // The opener refuses it by itself, for there is a writer.
    let key = bench.ask_open(A, "/disk", AccessMode::ReadWrite);
    let ticket = ticket_of(&bench.action());
    let refused = OpenRefused {
        errno: Errno::EPERM,
        identity: Some(Identity(b"disk".into())),
    };
    bench.server.opened(bench.now, ticket, Err(refused.clone()));
    assert_eq!(bench.action(), Action::Answer(key, Errno::EEXIST.raw()));
    // It opens it, as for a second reader.
    let key = bench.ask_open(A, "//disk", AccessMode::ReadOnly);
    let ticket = ticket_of(&bench.action());
    let twice = bench.opened(ticket, geometry(MIB), "disk");
    let actions = bench.actions();
    let [answer, close] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(*answer, Action::Answer(key, Errno::EEXIST.raw()));
    assert!(
        matches!(close, Action::Close { store, .. } if *store == twice),
        "{close:?}"
    );
    assert_eq!(bench.counters().open, 2, "until it is closed");
    bench.server.closed(bench.now, ticket_of(close));
    assert_eq!((bench.actions(), bench.counters().open), (vec![], 1));
    // Another session's writer is another thing.
    let key = bench.ask_open(B, "disk", AccessMode::ReadWrite);
    let ticket = ticket_of(&bench.action());
    bench.server.opened(bench.now, ticket, Err(refused));
    assert_eq!(bench.action(), Action::Answer(key, Errno::EPERM.raw()));
    // The device that was there still is.
    bench.ask(A, Read, io(id, IoOp::Read, 0, 512).as_bytes(), 512);
    assert_eq!(disk_op(&bench.action()).1.store, store);
    assert_eq!(bench.counters().refused, 3);
}

#[test]
fn open_devices_are_bounded_those_included_that_are_being_closed() {
    let mut bench = Bench::new(Limits {
        max_devices: 2,
        max_open: 3,
    });
    let (first, _) = bench.open(A, "1", geometry(MIB));
    bench.open(A, "2", geometry(MIB));
    let message = MsgOpen::new(b"3", AccessMode::ReadOnly).unwrap();
    let open = message.as_bytes();
    assert_eq!(bench.errno(A, Read, open, 56), Errno::EMFILE.raw());
    bench.open(B, "1", geometry(MIB));
    assert_eq!(bench.errno(B, Read, open, 56), Errno::ENFILE.raw());
    let key = bench.ask(A, Write, MsgClose::new(first).as_bytes(), 0);
    let ticket = ticket_of(&bench.action());
    assert_eq!(bench.errno(B, Read, open, 56), Errno::ENFILE.raw());
    bench.server.closed(bench.now, ticket);
    assert_eq!(bench.action(), Action::Answer(key, 0));
    bench.ask(B, Read, open, 56);
    let refused = ticket_of(&bench.action());
    bench.server.opened(bench.now, refused, Err(Errno::ENOENT.into()));
    bench.actions();
    bench.open(B, "3", geometry(MIB));
    let c = bench.counters();
    assert_eq!((c.opens, c.refused, c.refused_limit, c.open), (4, 4, 3, 3));
}

#[test]
fn a_close_is_answered_after_the_last_request_and_the_sync() {
    let mut bench = Bench::new(Limits::default());
    let (id, store) = bench.open(A, "disk", geometry(MIB));
    let requests: Vec<_> = (0..2)
        .map(|_| {
            let m = with_flags(io(id, IoOp::Write, 0, 512), F_PREFLUSH);
            let key = bench.ask(A, Write, m.as_bytes(), 512);
            (key, disk_op(&bench.action()).0)
        })
        .collect();
    let close = bench.ask(A, Write, MsgClose::new(id).as_bytes(), 0);
    assert_eq!(bench.actions(), []);
    // It takes no more, and a second close has nothing to do.
    let late = io(id, IoOp::Read, 0, 512);
    assert_eq!(bench.errno(A, Read, late.as_bytes(), 512), Errno::ENOTCONN.raw());
    assert_eq!(bench.errno(A, Write, MsgClose::new(id).as_bytes(), 0), 0);

    bench.server.io_done(requests[0].1, Err(Errno::EIO));
    assert_eq!(bench.action(), Action::Answer(requests[0].0, Errno::EIO.raw()));
    bench.server.io_done(requests[1].1, Ok(()));
    let (second, _) = disk_op(&bench.action());
    bench.server.io_done(second, Ok(()));
    let actions = bench.actions();
    let [answer, closing] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(*answer, Action::Answer(requests[1].0, 0));
    assert!(
        matches!(closing, Action::Close { store: s, .. } if *s == store),
        "{closing:?}"
    );
    assert!(!bench.server.is_idle());
    bench.server.closed(bench.now, ticket_of(closing));
    assert_eq!(bench.action(), Action::Answer(close, 0));
    assert!(bench.server.is_idle());
    // Its number is not the next device's.
    assert_ne!(bench.open(A, "disk", geometry(MIB)).0, id);
}

#[test]
fn the_end_of_a_session_closes_what_it_has_open() {
    let mut bench = Bench::new(Limits::default());
    let (_, idle) = bench.open(A, "idle", geometry(MIB));
    let (busy_id, busy) = bench.open(A, "busy", geometry(MIB));
    let request = bench.ask(A, Read, io(busy_id, IoOp::Read, 0, 512).as_bytes(), 512);
    let (ticket, _) = disk_op(&bench.action());
    let coming = bench.ask_open(A, "coming", AccessMode::ReadWrite);
    let open = ticket_of(&bench.action());
    let waiting = bench.ask_open(A, "waiting", AccessMode::ReadWrite);
    bench.end(A);
    let actions = bench.actions();
    let [answer, close] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert!(
        matches!(close, Action::Close { store, .. } if *store == idle),
        "{close:?}"
    );
    assert_eq!(*answer, Action::Answer(waiting, Errno::ENODEV.raw()));
    bench.server.closed(bench.now, ticket_of(close));

    bench.server.io_done(ticket, Ok(()));
    let actions = bench.actions();
    let [answer, close] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(*answer, Action::Answer(request, 0));
    assert!(
        matches!(close, Action::Close { store, .. } if *store == busy),
        "{close:?}"
    );
    bench.server.closed(bench.now, ticket_of(close));

    let came = bench.opened(open, geometry(MIB), "coming");
    let actions = bench.actions();
    let [answer, close] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert!(
        matches!(close, Action::Close { store, .. } if *store == came),
        "{close:?}"
    );
    assert_eq!(*answer, Action::Answer(coming, Errno::ENODEV.raw()));
    assert_eq!(bench.counters().open, 1);
    bench.server.closed(bench.now, ticket_of(close));
    assert!(bench.server.is_idle() && bench.actions().is_empty());
    assert_eq!((bench.counters().open, bench.counters().opens), (0, 2));
}

#[test]
fn who_opens_again_is_told_of_another_size() {
    let mut bench = Bench::new(Limits::default());
    let (id, store) = bench.open(A, "disk", geometry(MIB));
    bench.server.resized(store, 2 * MIB);
    bench.server.resized(StoreId(77), 3 * MIB);
    let key = bench.ask_open(A, "disk", AccessMode::ReadWrite);
    let rsp = response(&bench.action(), key);
    assert_eq!((rsp.device_id.get(), rsp.nsectors.get()), (id, 2 * MIB / 512));
}

/// A header: anything, or something like a message.
fn header() -> impl Strategy<Value = Vec<u8>> {
    let bytes = prop::collection::vec(any::<u8>(), 0..300);
    let message = (0u16..7, 0u32..4, any::<u64>(), 0u32..8, 0u32..9, any::<u32>());
    let io = message.prop_map(|(kind, device, sector, op, sectors, flags)| {
        let mut m = MsgIo::new(
            device,
            Rw::new(IoOp::Read),
            sector & (u64::MAX >> (op * 8)),
            sectors * 512,
        );
        m.rw.set(op | flags << 8);
        let mut bytes = m.as_bytes().to_vec();
        bytes[..2].copy_from_slice(&kind.to_le_bytes());
        bytes
    });
    let open = (0u8..4, "[ab]{0,2}").prop_map(|(mode, name)| {
        let mut m = MsgOpen::new(b"x", AccessMode::ReadOnly).unwrap();
        m.access_mode = mode;
        let mut bytes = m.as_bytes().to_vec();
        bytes[6..9].fill(0);
        bytes[6..6 + name.len()].copy_from_slice(name.as_bytes());
        bytes
    });
    prop_oneof![bytes, io.clone(), io, open]
}

proptest! {
    /// Whatever clients send and however the disk's work ends, each request is answered once, and nothing stays open.
    #[test]
    fn every_request_is_answered_once(
        requests in prop::collection::vec(
            (header(), any::<bool>(), 0u32..10, any::<bool>(), 0usize..8, any::<bool>(), 0u8..40),
            1..120,
        ),
    ) {
        let mut bench = Bench::new(Limits { max_devices: 2, max_open: 3 });
        let mut asked = BTreeMap::new();
        let mut under_way = Vec::new();
        let mut sessions = [A, B];
        for (header, read, data, first, which, well, end) in requests {
            let direction = if read { Read } else { Write };
            let session = &mut sessions[usize::from(first)];
            asked.insert(bench.ask(*session, direction, &header, data * 512), 0);
            if end == 0 {
                bench.end(*session);
                *session = SessionKey(session.0 + 2);
                bench.begin(*session);
            }
            settle(&mut bench, &mut asked, &mut under_way);
            if which < under_way.len() {
                let action = under_way.swap_remove(which);
                finish(&mut bench, &action, well);
            }
            settle(&mut bench, &mut asked, &mut under_way);
        }
        sessions.into_iter().for_each(|session| bench.end(session));
        settle(&mut bench, &mut asked, &mut under_way);
        while let Some(action) = under_way.pop() {
            finish(&mut bench, &action, true);
            settle(&mut bench, &mut asked, &mut under_way);
        }
        prop_assert!(asked.values().all(|n| *n == 1), "{asked:?}");
        prop_assert!(bench.server.is_idle());
        prop_assert_eq!(bench.counters().open, 0);
    }
}

/// Takes the actions: answers are counted, the rest is to be done.
fn settle(bench: &mut Bench, asked: &mut BTreeMap<RequestKey, u32>, under_way: &mut Vec<Action>) {
    for action in bench.actions() {
        match action {
            Action::Answer(request, _) | Action::AnswerWith { request, .. } => *asked.get_mut(&request).unwrap() += 1,
            Action::Zero { request, .. } => assert_eq!(asked[&request], 0, "its answer follows"),
            other => under_way.push(other),
        }
    }
}

fn finish(bench: &mut Bench, action: &Action, well: bool) {
    match action {
        Action::Open { ticket, name, .. } if well => {
            // Two spellings of one export.
            let identity = String::from_utf8_lossy(name).replace('b', "a");
            bench.opened(*ticket, geometry(MIB), &identity);
        }
        Action::Open { ticket, .. } => bench.server.opened(bench.now, *ticket, Err(Errno::ENOENT.into())),
        Action::Close { ticket, .. } => bench.server.closed(bench.now, *ticket),
        Action::Io(ticket, ..) => bench
            .server
            .io_done(*ticket, if well { Ok(()) } else { Err(Errno::EIO) }),
        other => panic!("{other:?}"),
    }
}
