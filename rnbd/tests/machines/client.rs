//! The client: devices over sessions that come and go, and operations as requests.

use proptest::prelude::*;
use rnbd::{
    Errno,
    block::{BlockOp, Completion, Geometry},
    client::{error::MapError, output::Output, state::DeviceState},
    proto::{AccessMode, CACHE_WRITEBACK, ClientMsg, F_FUA, F_SYNC, IoOp, MsgOpenRsp, MsgSessInfo},
};
use rtrs::{
    Direction, IoError, PathError,
    client::{
        buffers::Buffer,
        config::{ConType, SessionInfo},
        request::SessionId,
    },
};
use zerocopy::IntoBytes;

use crate::{
    bench::{MAX_IO, MIB, RtrsOutput, Submission, session_info},
    client_bench::{Bench, FLAGS, RW, S, io, lost, message, open_rsp, zeroes},
};

#[test]
fn devices_are_opened_when_the_version_is_agreed_on() {
    let mut bench = Bench::with_limit(64 << 20);
    let device = bench.client.map(S, "disk", RW);
    let ask = bench.sent_one();
    assert_eq!(
        (ask.con, ask.direction, bench.client.version(S)),
        (ConType::Admin, Direction::Read, None)
    );
    assert_eq!(ask.data.as_ref().map(Buffer::len), Some(36));
    bench.answer_with(ask, MsgSessInfo::response(1).as_bytes());
    assert_eq!(bench.client.version(S), Some(1));

    let open = bench.sent_one();
    assert_eq!((open.con, open.direction), (ConType::Admin, Direction::Read));
    assert_eq!(open.data.as_ref().map(Buffer::len), Some(56));
    match message(&open) {
        ClientMsg::Open(m) => assert_eq!((m.name(), m.access_mode), (Some(&b"disk"[..]), RW as u8)),
        other => panic!("{other:?}"),
    }
    bench.answer_with(open, open_rsp(7).as_bytes());
    let want = Geometry {
        size: 8 * MIB,
        logical_block_size: 512,
        physical_block_size: 4096,
        max_transfer: MAX_IO,
        max_discard: MIB,
        discard_granularity: 4096,
        read_only: false,
        write_cache: true,
        fua: true,
        max_write_zeroes: MIB / 2,
        queue_depth: 60,
    };
    assert!(matches!(bench.output(), Output::Mapped(key, g) if key == device && g == want));
    assert_eq!(
        (bench.client.name(device), bench.client.mode(device)),
        (Some("disk"), Some(RW))
    );
    assert_eq!(
        (bench.client.state(device), bench.lent()),
        (Some(DeviceState::Mapped), 0)
    );
    // A second one needs no other version.
    bench.map("other", &open_rsp(8));
}

#[test]
fn what_can_not_be_mapped_says_why_and_is_gone() {
    let mut bench = Bench::up();
    let device = bench.client.map(SessionId(99), "disk", RW);
    let e = bench.map_error();
    assert!(
        matches!(e, MapError::Session(rtrs::Error::Down(PathError::Closed))),
        "{e}"
    );
    assert_eq!(bench.client.state(device), None);
    for name in ["", "a\0b", &"x".repeat(255)] {
        bench.client.map(S, name, RW);
        assert!(matches!(bench.map_error(), MapError::Name(n) if n == name));
    }
    bench.client.map(S, "disk", RW);
    bench.client.map(S, "disk", AccessMode::ReadOnly);
    assert!(matches!(bench.map_error(), MapError::AlreadyMapped(n) if n == "disk"));

    let open = bench.sent_one();
    bench.answer(open, Err(IoError::Remote(1)));
    let e = bench.map_error().to_string();
    assert_eq!(
        e,
        "the server refuses device disk (rw): somebody has it open for writing"
    );
    // It is not mapped, so it may be again.
    bench.client.map(S, "disk", RW);
    let open = bench.sent_one();
    bench.answer_with(open, MsgOpenRsp::new().as_bytes());
    let e = bench.map_error().to_string();
    assert_eq!(e, "the server's answer to the open request is malformed");
    bench.client.map(S, "disk", RW);
    let open = bench.sent_one();
    bench.answer(open, Err(lost()));
    let e = bench.map_error().to_string();
    assert_eq!(e, "the open request: path lost: the peer disconnected");
    assert_eq!(bench.lent(), 0);
}

#[test]
fn without_a_version_nothing_is_opened_and_the_next_map_asks_again() {
    let mut bench = Bench::with_limit(64 << 20);
    let ask = bench.sent_one();
    bench.client.map(S, "a", RW);
    bench.client.map(S, "b", RW);
    bench.answer_with(ask, MsgSessInfo::request(2).as_bytes());
    let outputs = bench.outputs();
    assert_eq!(outputs.len(), 2, "{outputs:?}");
    for output in outputs {
        assert!(matches!(
            output,
            Output::MapFailed(_, MapError::Malformed("the session information"))
        ));
    }
    bench.client.map(S, "a", RW);
    let ask = bench.sent_one();
    bench.answer(ask, Err(IoError::Remote(22)));
    assert!(matches!(
        bench.map_error(),
        MapError::Request {
            source: IoError::Remote(22),
            ..
        }
    ));
    bench.client.map(S, "a", RW);
    bench.agree();
    assert!(matches!(message(&bench.sent_one()), ClientMsg::Open(_)));
}

#[test]
fn requests_are_what_the_operation_says() {
    let (mut bench, device) = Bench::mapped();
    let cases = [
        (BlockOp::Read, IoOp::Read, F_SYNC, Direction::Read),
        (BlockOp::Write { fua: false }, IoOp::Write, 0, Direction::Write),
        (
            BlockOp::Write { fua: true },
            IoOp::Write,
            F_SYNC | F_FUA,
            Direction::Write,
        ),
        (BlockOp::Discard, IoOp::Discard, 0, Direction::Write),
        (zeroes(true), IoOp::WriteZeroes, FLAGS, Direction::Write),
        (
            BlockOp::WriteZeroes {
                fua: false,
                may_unmap: true,
            },
            IoOp::WriteZeroes,
            0,
            Direction::Write,
        ),
    ];
    for (op, wire, flags, direction) in cases {
        let user = bench.submit(device, op, 4096, 8192);
        let s = bench.sent_one();
        let m = io(&s);
        assert_eq!((m.device_id.get(), m.sector.get(), m.bi_size.get()), (7, 8, 8192));
        assert_eq!(m.rw.get(), wire as u32 | flags, "{op:?}");
        assert_eq!((s.con, s.direction), (ConType::Io(5), direction));
        bench.answer(s, Ok(()));
        bench.done(user).unwrap();
    }
    let user = bench.submit(device, BlockOp::Flush, 123, 456);
    let s = bench.sent_one();
    let m = io(&s);
    assert_eq!((m.sector.get(), m.bi_size.get()), (0, 0));
    assert_eq!(
        (m.rw.get(), s.direction),
        (IoOp::Flush as u32 | F_SYNC | F_FUA, Direction::Read)
    );
    bench.answer(s, Err(IoError::Remote(5)));
    assert_eq!(bench.done(user), Err(Errno::EIO));
    let c = bench.client.counters(device).unwrap();
    assert_eq!(
        (c.completed, c.failed, c.read_bytes, c.written_bytes),
        (7, 1, 8192, 2 * 8192)
    );
    assert_eq!(bench.lent(), 0);
}

#[test]
fn what_a_device_can_not_do_is_not_asked_for() {
    let (mut bench, device) = Bench::mapped();
    let cases = [
        (BlockOp::Read, 8 * MIB, 512, Errno::EIO),
        (BlockOp::Read, 1, 512, Errno::EINVAL),
        (BlockOp::Read, 0, 100, Errno::EINVAL),
        (BlockOp::Write { fua: false }, u64::MAX - 511, 512, Errno::EIO),
        (BlockOp::Discard, 0, 8 * MIB + 512, Errno::EIO),
        (BlockOp::Discard, 256, 512, Errno::EINVAL),
        (zeroes(false), u64::MAX - 511, 512, Errno::EIO),
    ];
    for (op, offset, len, want) in cases {
        assert_eq!(bench.refused(device, op, offset, len), want, "{op:?} {offset} {len}");
    }
    // Buffers that do not fit the operation come back all the same.
    for (op, len, buffer) in [
        (BlockOp::Read, 512, 1024),
        (BlockOp::Discard, 512, 512),
        (BlockOp::Flush, 0, 512),
    ] {
        let buffer = bench.buffer(buffer);
        let user = bench.submit_with(device, op, 0, len, Some(buffer));
        assert_eq!(bench.done(user), Err(Errno::EINVAL));
    }
    let user = bench.submit_with(device, BlockOp::Read, 0, 512, None);
    assert_eq!(bench.done(user), Err(Errno::EINVAL));

    let mut poor = open_rsp(8);
    poor.max_discard_sectors.set(0);
    poor.cache_policy = CACHE_WRITEBACK;
    let poor = bench.map("poor", &poor);
    assert_eq!(bench.refused(poor, BlockOp::Discard, 0, 512), Errno::EOPNOTSUPP);
    assert_eq!(
        bench.refused(poor, BlockOp::Write { fua: true }, 0, 512),
        Errno::EOPNOTSUPP
    );
    assert_eq!(bench.refused(poor, zeroes(true), 0, 512), Errno::EOPNOTSUPP);

    let ro = bench.client.map(S, "ro", AccessMode::ReadOnly);
    let open = bench.sent_one();
    assert_eq!(bench.refused(ro, BlockOp::Flush, 0, 0), Errno::ENOTCONN);
    bench.answer_with(open, open_rsp(9).as_bytes());
    assert!(matches!(bench.output(), Output::Mapped(_, g) if g.read_only && g.max_discard == 0));
    assert_eq!(bench.refused(ro, BlockOp::Write { fua: false }, 0, 512), Errno::EROFS);
    assert_eq!(bench.refused(ro, zeroes(false), 0, 512), Errno::EROFS);
    assert_eq!(bench.lent(), 0);
    assert_eq!(bench.client.counters(device).unwrap().completed, 0);
}

#[test]
fn a_write_without_a_write_cache_is_as_good_as_forced() {
    let mut bench = Bench::up();
    let mut rsp = open_rsp(1);
    rsp.cache_policy = 0;
    let device = bench.map("disk", &rsp);
    let user = bench.submit(device, BlockOp::Write { fua: true }, 0, 512);
    let s = bench.sent_one();
    assert_eq!(io(&s).rw.get(), IoOp::Write as u32);
    bench.answer(s, Ok(()));
    bench.done(user).unwrap();
}

#[test]
fn unmapping_waits_for_what_is_under_way_and_then_closes() {
    let (mut bench, device) = Bench::mapped();
    let user = bench.submit(device, zeroes(false), 0, MIB);
    let mut parts = bench.sent();
    assert_eq!(parts.len(), 2);
    assert_eq!(bench.unmap(device), None);
    assert_eq!(bench.unmap(device), Some(Errno::EALREADY));
    assert_eq!(bench.client.state(device), Some(DeviceState::Unmapped));
    assert_eq!(bench.refused(device, BlockOp::Flush, 0, 0), Errno::ESHUTDOWN);
    bench.client.map(S, "disk", RW);
    assert!(matches!(bench.map_error(), MapError::AlreadyMapped(_)), "it still is");
    let last = parts.pop().unwrap();
    bench.answer(parts.pop().unwrap(), Ok(()));
    assert!(bench.sent().is_empty() && bench.outputs().is_empty());
    bench.answer(last, Ok(()));
    bench.done(user).unwrap();

    let close = bench.sent_one();
    assert!(matches!(message(&close), ClientMsg::Close(m) if m.device_id.get() == 7));
    assert_eq!((close.con, close.direction), (ConType::Admin, Direction::Write));
    assert!(close.data.is_none());
    bench.answer(close, Ok(()));
    assert!(matches!(bench.output(), Output::Unmapped(key, Ok(())) if key == device));
    assert_eq!((bench.client.state(device), bench.lent()), (None, 0));
    assert_eq!(bench.refused(device, BlockOp::Flush, 0, 0), Errno::ESHUTDOWN);
    bench.map("disk", &open_rsp(8));
}

#[test]
fn a_session_that_comes_back_opens_its_devices_again() {
    let (mut bench, device) = Bench::mapped();
    let in_flight = bench.submit(device, BlockOp::Read, 0, 4096);
    let read = bench.sent_one();
    let unsent = bench.submit(device, BlockOp::Read, 0, 4096);
    bench.lose();
    // Neither an operation that was accepted before the session was lost is sent, nor one that comes after.
    let mut outputs = bench.outputs();
    assert!(matches!(outputs[0], Output::State(key, DeviceState::MappedDisconnected) if key == device));
    match outputs.pop() {
        Some(Output::Done {
            user,
            completion: Completion { result, data, .. },
            ..
        }) if user == unsent => {
            assert_eq!((result, outputs.len()), (Err(Errno::ECONNABORTED), 1));
            bench.give(data);
        }
        other => panic!("{other:?}"),
    }
    assert!(bench.sent().is_empty());
    bench.answer(read, Err(lost()));
    assert_eq!(bench.done(in_flight), Err(Errno::ECONNABORTED));
    assert_eq!(bench.refused(device, BlockOp::Flush, 0, 0), Errno::ECONNABORTED);
    bench.client.map(S, "other", RW);
    let e = bench.map_error();
    assert!(
        matches!(e, MapError::Session(rtrs::Error::Down(PathError::PeerDisconnected))),
        "{e}"
    );

    let info = SessionInfo {
        max_io_size: 60 << 10,
        ..session_info()
    };
    bench.tell(RtrsOutput::Up(S, info));
    bench.agree();
    let open = bench.sent_one();
    assert!(matches!(message(&open), ClientMsg::Open(m) if m.name() == Some(b"disk")));
    let mut rsp = open_rsp(31);
    rsp.nsectors.set(9 * MIB / 512);
    bench.answer_with(open, rsp.as_bytes());
    let outputs = bench.outputs();
    let [geometry, state] = &outputs[..] else {
        panic!("{outputs:?}")
    };
    assert!(matches!(geometry, Output::Geometry(_, g) if (g.size, g.max_transfer) == (9 * MIB, 60 << 10)));
    assert!(matches!(state, Output::State(_, DeviceState::Mapped)));
    let user = bench.submit(device, BlockOp::Read, 8 * MIB, 4096);
    let s = bench.sent_one();
    assert_eq!(io(&s).device_id.get(), 31);
    bench.answer(s, Ok(()));
    bench.done(user).unwrap();
    assert_eq!(bench.lent(), 0);
}

/// The server's number of the device may be another one's by then.
#[test]
fn what_was_asked_for_before_is_not_for_what_is_opened_after() {
    let (mut bench, device) = Bench::mapped();
    let unsent = bench.submit(device, BlockOp::Write { fua: false }, 0, 4096);
    bench.lose();
    bench.tell(RtrsOutput::Up(S, session_info()));
    let ask = bench.next().unwrap();
    bench.answer_with(ask, MsgSessInfo::response(2).as_bytes());
    let open = bench.sent_one();
    bench.answer_with(open, open_rsp(7).as_bytes());
    assert!(bench.sent().is_empty());
    let outputs = bench.outputs();
    let [down, done, up] = &outputs[..] else {
        panic!("{outputs:?}")
    };
    assert!(matches!(down, Output::State(_, DeviceState::MappedDisconnected)));
    assert!(
        matches!(done, Output::Done { user, completion: Completion { result: Err(Errno::ECONNABORTED), .. }, .. } if *user == unsent)
    );
    assert!(
        matches!(up, Output::State(_, DeviceState::Mapped)),
        "nothing else has changed"
    );
}

/// An operation of many parts, of which the first end well after the device has been opened again.
#[test]
fn an_operation_does_not_go_on_with_another_opening() {
    let mut bench = Bench::up();
    let mut rsp = open_rsp(7);
    rsp.max_discard_sectors.set(8);
    let device = bench.map("disk", &rsp);
    let user = bench.submit(device, BlockOp::Discard, 0, MIB);
    let parts = bench.sent();
    assert_eq!(parts.len(), 16);
    bench.lose();
    bench.tell(RtrsOutput::Up(S, session_info()));
    bench.agree();
    let open = bench.sent_one();
    bench.answer_with(open, rsp.as_bytes());
    bench.outputs();
    for part in parts {
        bench.answer(part, Ok(()));
    }
    assert!(bench.sent().is_empty());
    assert_eq!(bench.done(user), Err(Errno::ECONNABORTED));
}

#[test]
fn a_device_that_is_not_opened_again_stays_until_it_is_asked_for() {
    let (mut bench, device) = Bench::mapped();
    bench.lose();
    bench.outputs();
    assert_eq!(bench.remap(device), None);
    let e = bench.map_error();
    assert!(matches!(e, MapError::Session(_)), "there is no path");
    assert_eq!(e.errno(), Errno::ECONNABORTED);
    bench.tell(RtrsOutput::Up(S, session_info()));
    bench.agree();
    let open = bench.sent_one();
    bench.answer(open, Err(IoError::Remote(2)));
    assert!(matches!(
        bench.map_error(),
        MapError::Refused {
            errno: Errno::ENOENT,
            ..
        }
    ));
    assert_eq!(bench.client.state(device), Some(DeviceState::MappedDisconnected));
    assert_eq!(bench.refused(device, BlockOp::Flush, 0, 0), Errno::ECONNABORTED);

    // The session is lost while it is being opened: who has asked hears of it, once.
    assert_eq!([bench.remap(device), bench.remap(device)], [None; 2]);
    bench.sent_one();
    bench.lose();
    assert_eq!(bench.map_error().errno(), Errno::ECONNABORTED);
    bench.tell(RtrsOutput::Up(S, session_info()));
    bench.agree();
    let open = bench.sent_one();
    bench.answer(open, Err(IoError::Remote(2)));
    bench.map_error();
    bench.lose();
    assert!(bench.outputs().is_empty(), "nobody has asked");
    bench.tell(RtrsOutput::Up(S, session_info()));
    bench.agree();
    let open = bench.sent_one();
    bench.answer(open, Err(IoError::Remote(2)));
    bench.map_error();

    assert_eq!([bench.remap(device), bench.remap(device)], [None; 2]);
    let open = bench.sent_one();
    bench.answer_with(open, open_rsp(9).as_bytes());
    assert!(matches!(bench.output(), Output::State(_, DeviceState::Mapped)));
    assert_eq!(bench.remap(device), Some(Errno::EALREADY));
    assert!(bench.sent().is_empty() && bench.outputs().is_empty());
}

#[test]
fn a_device_may_be_unmapped_at_any_time() {
    // Before the version is known.
    let mut bench = Bench::with_limit(64 << 20);
    let device = bench.client.map(S, "disk", RW);
    assert_eq!(bench.unmap(device), None);
    assert!(matches!(bench.output(), Output::Unmapped(key, Ok(())) if key == device));
    bench.agree();
    assert!(bench.sent().is_empty());

    // While it is being opened: what the server opens is closed.
    let device = bench.client.map(S, "disk", RW);
    let open = bench.sent_one();
    assert_eq!(bench.unmap(device), None);
    assert!(bench.outputs().is_empty());
    bench.answer_with(open, open_rsp(4).as_bytes());
    let close = bench.sent_one();
    assert!(matches!(message(&close), ClientMsg::Close(m) if m.device_id.get() == 4));
    bench.answer(close, Err(lost()));
    assert!(matches!(bench.output(), Output::Unmapped(_, Err(IoError::Path(_)))));

    // The same, and the server does not open it.
    let device = bench.client.map(S, "disk", RW);
    let open = bench.sent_one();
    assert_eq!(bench.unmap(device), None);
    bench.answer(open, Err(IoError::Remote(2)));
    assert!(matches!(bench.output(), Output::Unmapped(_, Ok(()))));
    assert!(bench.sent().is_empty());

    // Without its session, which closes it by itself.
    let device = bench.map("disk", &open_rsp(5));
    bench.lose();
    bench.outputs();
    assert_eq!(bench.unmap(device), None);
    assert!(matches!(
        bench.output(),
        Output::Unmapped(_, Err(IoError::Path(PathError::PeerDisconnected)))
    ));
    assert_eq!((bench.client.state(device), bench.lent()), (None, 0));
}

#[test]
fn a_session_takes_its_devices_along() {
    let (mut bench, device) = Bench::mapped();
    let closing = bench.map("closing", &open_rsp(8));
    let init = bench.client.map(S, "init", RW);
    let open = bench.sent_one();
    assert_eq!(bench.unmap(closing), None);
    let close = bench.sent_one();
    bench.answer(close, Err(lost()));
    assert!(matches!(bench.output(), Output::Unmapped(key, Err(_)) if key == closing));
    bench.answer(open, Err(lost()));
    assert!(matches!(bench.output(), Output::MapFailed(key, MapError::Request { .. }) if key == init));
    let unsent = bench.submit(device, BlockOp::Read, 0, 512);
    bench.tell(RtrsOutput::Closed(S));
    assert!(bench.sent().is_empty());
    let outputs = bench.outputs();
    let [done, unmapped] = &outputs[..] else {
        panic!("{outputs:?}")
    };
    assert!(
        matches!(done, Output::Done { user, completion: Completion { result: Err(Errno::ECONNABORTED), .. }, .. } if *user == unsent)
    );
    assert!(matches!(unmapped, Output::Unmapped(key, Err(IoError::Path(PathError::Closed))) if *key == device));
    bench.client.map(S, "disk", RW);
    assert!(matches!(
        bench.map_error(),
        MapError::Session(rtrs::Error::Down(PathError::Closed))
    ));
}

/// RTRS tells of a loss before or after what was lost.
#[test]
fn answers_that_come_after_the_loss_are_of_no_interest() {
    let mut bench = Bench::with_limit(64 << 20);
    let ask = bench.sent_one();
    let early = bench.client.map(S, "early", RW);
    bench.lose();
    assert!(matches!(bench.output(), Output::MapFailed(key, MapError::Session(_)) if key == early));
    bench.tell(RtrsOutput::Up(S, session_info()));
    bench.answer_with(ask, MsgSessInfo::response(1).as_bytes());
    assert_eq!(bench.client.version(S), None);
    bench.agree();

    let device = bench.map("disk", &open_rsp(7));
    let unmapped = bench.map("unmapped", &open_rsp(8));
    assert_eq!(bench.unmap(unmapped), None);
    let close = bench.sent_one();
    bench.lose();
    let outputs = bench.outputs();
    assert!(
        outputs
            .iter()
            .any(|o| matches!(o, Output::Unmapped(key, Err(_)) if *key == unmapped)),
        "{outputs:?}"
    );
    bench.tell(RtrsOutput::Up(S, session_info()));
    bench.agree();
    let stale = bench.sent_one();
    bench.lose();
    bench.tell(RtrsOutput::Up(S, session_info()));
    bench.agree();
    let open = bench.sent_one();
    bench.answer_with(stale, open_rsp(1).as_bytes());
    bench.answer(close, Ok(()));
    assert_eq!(bench.client.state(device), Some(DeviceState::MappedDisconnected));
    assert!(bench.outputs().is_empty());
    bench.answer_with(open, open_rsp(2).as_bytes());
    let user = bench.submit(device, BlockOp::Flush, 0, 0);
    let flush = bench.sent_one();
    assert_eq!((io(&flush).device_id.get(), bench.lent()), (2, 0));
    bench.answer(flush, Ok(()));
    let outputs = bench.outputs();
    assert!(
        matches!(outputs[..], [Output::State(..), Output::Done { user: u, completion: Completion { result: Ok(()), .. }, .. }] if u == user)
    );
    assert_eq!(bench.lent(), 0);
}

#[test]
fn messages_wait_for_buffers() {
    // One slab of the largest buffers, all lent to others.
    let mut bench = Bench::before_the_session(256 << 10);
    let held: Vec<_> = (0..2).map(|_| bench.buffer(128 << 10)).collect();
    bench.tell(RtrsOutput::Opened(S, session_info()));
    bench.client.map(S, "disk", RW);
    assert!(bench.sent().is_empty() && bench.outputs().is_empty());
    held.into_iter().for_each(|buffer| bench.give(Some(buffer)));
    bench.agree();
    assert_eq!(bench.sent_one().data.map(|b| b.len()), Some(56));
}

#[test]
fn zeroes_as_data_take_few_buffers_and_go_on_as_they_come_back() {
    let mut bench = Bench::up();
    let mut rsp = open_rsp(7);
    rsp.max_write_zeroes_sectors.set(0);
    let device = bench.map("disk", &rsp);
    // What was in the buffers before is not what is written.
    let used: Vec<_> = (0..4).map(|_| bench.buffer(MAX_IO as usize)).collect();
    for buffer in used {
        bench.client.rtrs().pools[&S]
            .write(&buffer, 0, &[1; MAX_IO as usize])
            .unwrap();
        bench.give(Some(buffer));
    }
    let (offset, len) = (512, 3 * MIB + 1024);
    let user = bench.submit(device, zeroes(true), offset, len);
    let mut covered = offset;
    let mut in_flight = bench.sent();
    while !in_flight.is_empty() {
        assert!(in_flight.len() <= 4 && bench.lent() <= 4);
        let part = in_flight.remove(0);
        let m = io(&part);
        assert_eq!(
            (m.rw.get(), part.direction),
            (IoOp::Write as u32 | F_SYNC | F_FUA, Direction::Write)
        );
        assert_eq!(m.sector.get() * 512, covered);
        covered += u64::from(m.bi_size.get());
        let buffer = part.data.as_ref().unwrap();
        let mut bytes = vec![1; buffer.len()];
        bench.client.rtrs().pools[&S].read(buffer, 0, &mut bytes).unwrap();
        assert_eq!(bytes.len(), m.bi_size.get() as usize);
        assert!(bytes.iter().all(|b| *b == 0));
        bench.answer(part, Ok(()));
        in_flight.extend(bench.sent());
    }
    assert_eq!(covered, offset + len);
    bench.done(user).unwrap();
    assert_eq!(bench.lent(), 0);
}

#[test]
fn zeroes_find_their_way_through_a_pool_that_others_use() {
    let mut bench = Bench::with_limit(256 << 10);
    bench.agree();
    let mut rsp = open_rsp(7);
    rsp.max_write_zeroes_sectors.set(0);
    let device = bench.map("disk", &rsp);
    // The version exchange has cut the pool into pieces of 4 KiB, and all but one are lent.
    let mut held: Vec<_> = (0..63).map(|_| bench.buffer(4096)).collect();
    let user = bench.submit(device, zeroes(false), 0, 16 << 10);
    let first = bench.sent_one();
    assert_eq!(io(&first).bi_size.get(), 4096);
    let second = bench.submit(device, zeroes(false), 1 << 20, 4096);
    assert!(bench.sent().is_empty(), "it waits");
    bench.give(held.pop());
    let other = bench.sent_one();
    assert_eq!(io(&other).sector.get() * 512, 1 << 20);
    bench.answer(other, Ok(()));
    bench.done(second).unwrap();
    let mut parts = vec![first];
    let mut bytes = 0;
    while let Some(part) = parts.pop() {
        bytes += io(&part).bi_size.get();
        bench.answer(part, Ok(()));
        parts.extend(bench.sent());
    }
    assert_eq!(bytes, 16 << 10);
    bench.done(user).unwrap();
    assert_eq!(bench.lent(), held.len());
}

proptest! {
    /// Parts of several operations end in any order, some with errors. Each operation ends once, with its first error or with
    /// its whole range covered, and never has too much under way.
    #[test]
    fn operations_end_once_with_their_first_error(
        operations in prop::collection::vec((0u8..3, 0u64..256, 0u64..600), 1..6),
        steps in (1u32..40, prop_oneof![Just(0u32), 1u32..40]),
        ends in prop::collection::vec((any::<usize>(), prop::option::weighted(0.02, 1..100i32)), 900),
    ) {
        let mut bench = Bench::up();
        let mut rsp = open_rsp(7);
        rsp.max_discard_sectors.set(steps.0);
        rsp.max_write_zeroes_sectors.set(steps.1);
        let device = bench.map("disk", &rsp);
        // Per operation: the range that is covered, its end, and the first error. Ranges do not overlap.
        let mut model = Vec::new();
        for (n, (kind, offset, len)) in operations.into_iter().enumerate() {
            let op = match kind {
                0 => BlockOp::Discard,
                1 => zeroes(false),
                _ => BlockOp::Read,
            };
            let len = if kind == 2 { len.clamp(1, 100) } else { len };
            let offset = n as u64 * 2048 + offset;
            let user = bench.submit(device, op, offset * 512, len * 512);
            model.push((user, offset, offset + len, None));
        }
        let mut in_flight: Vec<Submission> = Vec::new();
        let mut results = std::collections::BTreeMap::new();
        for (index, error) in ends.into_iter().chain(std::iter::repeat((0, None))) {
            for part in bench.sent() {
                let m = io(&part);
                let (_, covered, end, failed) = &mut model[m.sector.get() as usize / 2048];
                prop_assert_eq!((m.sector.get(), *failed), (*covered, None));
                *covered += u64::from(m.bi_size.get()) / 512;
                prop_assert!(*covered <= *end);
                in_flight.push(part);
            }
            let of = |n: usize| in_flight.iter().filter(|p| io(p).sector.get() as usize / 2048 == n).count();
            prop_assert!((0..model.len()).all(|n| of(n) <= 16));
            if !in_flight.is_empty() {
                let part = in_flight.remove(index % in_flight.len());
                let n = io(&part).sector.get() as usize / 2048;
                let failed = &mut model[n].3;
                *failed = failed.or(error.map(Errno::from_wire));
                bench.answer(part, error.map_or(Ok(()), |e| Err(IoError::Remote(e))));
            }
            for output in bench.outputs() {
                let Output::Done { user, completion, .. } = output else { panic!("{output:?}") };
                bench.give(completion.data);
                prop_assert_eq!(results.insert(user, completion.result), None, "twice");
            }
            if results.len() == model.len() {
                break;
            }
        }
        for (user, covered, end, failed) in model {
            prop_assert_eq!(results[&user], failed.map_or(Ok(()), Err));
            prop_assert!(failed.is_some() || covered == end);
        }
        prop_assert!(in_flight.is_empty());
        prop_assert_eq!(bench.lent(), 0);
    }

    /// A server may answer anything.
    #[test]
    fn senseless_answers_do_no_harm(
        answers in prop::collection::vec((prop::collection::vec(any::<u8>(), 56), any::<bool>(), any::<i32>()), 1..20),
    ) {
        let mut bench = Bench::with_limit(64 << 20);
        for (mut bytes, well_formed, errno) in answers {
            bench.client.map(S, "disk", RW);
            for submission in bench.sent() {
                if well_formed {
                    let kind = match message(&submission) {
                        ClientMsg::SessInfo(_) => 1,
                        ClientMsg::Open(_) => 3,
                        _ => 0,
                    };
                    bytes[..2].copy_from_slice(&[kind, 0]);
                }
                match submission.data.as_ref().map(Buffer::len) {
                    Some(len) => bench.answer_with(submission, &bytes[..len]),
                    None => bench.answer(submission, Err(IoError::Remote(errno))),
                }
            }
            for output in bench.outputs() {
                if let Output::Mapped(device, g) = output {
                    prop_assert!(g.max_transfer >= g.logical_block_size && g.max_transfer % g.logical_block_size == 0);
                    for op in [BlockOp::Discard, zeroes(false), BlockOp::Flush] {
                        bench.submit(device, op, 0, g.size);
                    }
                    for part in bench.sent() {
                        bench.answer(part, Err(IoError::Remote(errno)));
                    }
                    prop_assert!(bench.sent().is_empty());
                    prop_assert_eq!(bench.outputs().len(), 3);
                    assert_eq!(bench.unmap(device), None);
                }
            }
        }
        for submission in bench.sent() {
            bench.answer(submission, Err(lost()));
        }
        prop_assert_eq!(bench.lent(), 0);
    }
}
