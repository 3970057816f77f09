//! The server: what its operator sees and does, and clients that come back.

use std::time::Duration;

use rnbd::{
    Errno,
    block::{BlockOp, Geometry},
    proto::{AccessMode, IoOp, MsgClose},
    server::{Limits, action::OpenRefused},
};
use rtrs::{
    Direction::{Read, Write},
    server::request::SessionKey,
};
use zerocopy::IntoBytes;

use crate::served::Action;
use crate::{
    bench::{MIB, geometry},
    server::{A, B, Bench, disk_op, io, response, ticket_of},
};

#[test]
fn open_devices_are_listed_with_who_has_them() {
    let mut bench = Bench::new(Limits::default());
    assert!(bench.server.listing().is_empty());
    let (id, store) = bench.open(A, "disk", geometry(8 * MIB));
    let key = bench.ask_open(B, "other", AccessMode::ReadOnly);
    assert!(bench.server.listing().len() == 1, "it is not open yet");
    let read_only = Geometry {
        read_only: true,
        ..geometry(MIB)
    };
    let ticket = ticket_of(&bench.action());
    bench.opened(ticket, read_only, "other");
    let other = response(&bench.action(), key).device_id.get();
    let listed = bench.server.listing();
    let [one, two] = &listed[..] else { panic!("{listed:?}") };
    assert_eq!((one.session, one.session_name.as_str(), one.id), (A, "session 1", id));
    assert_eq!(
        (one.name.as_str(), one.label.as_str(), one.store),
        ("disk", "/disk", store)
    );
    assert_eq!(
        (one.mode, one.read_only, one.size),
        (AccessMode::ReadWrite, false, 8 * MIB)
    );
    assert_eq!((two.session, two.id, two.name.as_str()), (B, other, "other"));
    assert_eq!((two.mode, two.read_only, two.size), (AccessMode::ReadOnly, true, MIB));
    bench.server.resized(store, 9 * MIB);
    assert_eq!(bench.server.listing()[0].size, 9 * MIB);
    bench.end(A);
    assert_eq!(bench.server.listing().len(), 1);
}

#[test]
fn a_device_that_is_closed_by_force_is_not_connected_any_more() {
    let mut bench = Bench::new(Limits::default());
    let (id, _) = bench.open(A, "disk", geometry(8 * MIB));
    let (of_other, _) = bench.open(B, "disk", geometry(8 * MIB));
    let request = bench.ask(A, Read, io(id, IoOp::Read, 0, 512).as_bytes(), 512);
    let (under_way, _) = disk_op(&bench.action());
    assert!(bench.server.force_close(bench.now, A, id));
    assert!(!bench.server.force_close(bench.now, A, id), "it is closed");
    assert!(!bench.server.force_close(bench.now, SessionKey(77), id));
    assert!(bench.actions().is_empty(), "a request is under way");
    let write = io(id, IoOp::Write, 0, 512);
    assert_eq!(bench.errno(A, Write, write.as_bytes(), 512), Errno::ENOTCONN.raw());
    bench.server.io_done(under_way, Ok(()));
    let actions = bench.actions();
    let [Action::Answer(answered, 0), close] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(*answered, request);
    // Who opens it again meanwhile waits, and gets another number.
    let again = bench.ask_open(A, "disk", AccessMode::ReadWrite);
    assert!(bench.actions().is_empty());
    bench.server.closed(bench.now, ticket_of(close));
    let ticket = ticket_of(&bench.action());
    bench.opened(ticket, geometry(8 * MIB), "disk");
    assert_ne!(response(&bench.action(), again).device_id.get(), id);
    assert_eq!(bench.errno(A, Write, write.as_bytes(), 512), Errno::ENOTCONN.raw());
    // The client may close what it has no more.
    assert_eq!(bench.errno(A, Read, MsgClose::new(id).as_bytes(), 0), 0);
    // Another session's is its own.
    bench.ask(B, Write, io(of_other, IoOp::Write, 0, 512).as_bytes(), 512);
    assert_eq!(disk_op(&bench.action()).1.op, BlockOp::Write { fua: false });
}

#[test]
fn who_opens_again_what_it_has_open_gets_the_same() {
    let mut bench = Bench::new(Limits::default());
    let (id, _) = bench.open(A, "disk", geometry(8 * MIB));
    // As the kernel does, whatever mode it asks for.
    for mode in [AccessMode::ReadWrite, AccessMode::ReadOnly] {
        let key = bench.ask_open(A, "disk", mode);
        assert_eq!(response(&bench.action(), key).device_id.get(), id);
    }
    assert_eq!(bench.server.listing().len(), 1);
}

/// Closing makes durable what was written, and may take longer than the client needs to come back.
#[test]
fn a_client_that_comes_back_waits_for_what_it_had_open() {
    let mut bench = Bench::new(Limits::default());
    bench.open(A, "disk", geometry(8 * MIB));
    bench.open(A, "other", geometry(8 * MIB));
    bench.end(A);
    let mut closes = bench.actions();
    assert_eq!(closes.len(), 2);
    const AGAIN: SessionKey = SessionKey(5);
    bench.begin_as(AGAIN, "session 1");
    let (disk, third) = (
        bench.ask_open(AGAIN, "disk", AccessMode::ReadWrite),
        bench.ask_open(AGAIN, "third", AccessMode::ReadWrite),
    );
    assert!(bench.actions().is_empty(), "they are opened in their order");
    // Others have nothing to wait for: they are told what the export says.
    let stranger = bench.ask_open(B, "disk", AccessMode::ReadWrite);
    let ticket = ticket_of(&bench.action());
    bench
        .server
        .opened(bench.now, ticket, Err(OpenRefused::from(Errno::EPERM)));
    assert!(matches!(bench.action(), Action::Answer(key, e) if key == stranger && e == Errno::EPERM.raw()));
    bench.server.closed(bench.now, ticket_of(&closes.pop().unwrap()));
    assert!(bench.actions().is_empty(), "the other one");
    bench.server.closed(bench.now, ticket_of(&closes.pop().unwrap()));
    let open = bench.action();
    bench.opened(ticket_of(&open), geometry(MIB), "disk");
    let actions = bench.actions();
    let [answer, open] = &actions[..] else {
        panic!("{actions:?}")
    };
    response(answer, disk);
    bench.opened(ticket_of(open), geometry(MIB), "third");
    response(&bench.action(), third);
    assert_eq!(bench.server.listing().len(), 2);
}

#[test]
fn an_open_that_is_under_way_is_waited_for_as_well() {
    for well in [true, false] {
        let mut bench = Bench::new(Limits::default());
        let lost = bench.ask_open(A, "disk", AccessMode::ReadWrite);
        let open = ticket_of(&bench.action());
        bench.end(A);
        const AGAIN: SessionKey = SessionKey(5);
        bench.begin_as(AGAIN, "session 1");
        let key = bench.ask_open(AGAIN, "disk", AccessMode::ReadWrite);
        assert!(bench.actions().is_empty());
        let mut actions = match well {
            true => {
                bench.opened(open, geometry(MIB), "disk");
                let actions = bench.actions();
                let [Action::Answer(answered, _), close] = &actions[..] else {
                    panic!("{actions:?}")
                };
                assert_eq!(*answered, lost);
                bench.server.closed(bench.now, ticket_of(close));
                bench.actions()
            }
            false => {
                bench
                    .server
                    .opened(bench.now, open, Err(OpenRefused::from(Errno::ENOENT)));
                let mut actions = bench.actions();
                let refused = actions
                    .iter()
                    .position(|a| matches!(a, Action::Answer(key, _) if *key == lost));
                actions.remove(refused.unwrap());
                actions
            }
        };
        assert_eq!(actions.len(), 1, "{actions:?}");
        let next = actions.remove(0);
        bench.opened(ticket_of(&next), geometry(MIB), "disk");
        response(&bench.action(), key);
        bench.end(AGAIN);
        let close = bench.action();
        bench.server.closed(bench.now, ticket_of(&close));
        assert!(bench.server.is_idle());
    }
}

/// Requests of before, which may still come after a client is back, meet no device.
#[test]
fn numbers_of_a_session_are_not_those_of_the_one_before() {
    let mut bench = Bench::new(Limits::default());
    let (a, _) = bench.open(A, "a", geometry(MIB));
    let (b, _) = bench.open(A, "b", geometry(MIB));
    bench.end(A);
    for close in bench.actions() {
        bench.server.closed(bench.now, ticket_of(&close));
    }
    bench.now = bench.now + Duration::from_millis(1);
    bench.begin(A);
    // In another order.
    let (b_again, _) = bench.open(A, "b", geometry(MIB));
    let (a_again, _) = bench.open(A, "a", geometry(MIB));
    assert!([a, b].iter().all(|id| ![a_again, b_again].contains(id)));
    for stale in [a, b] {
        let write = io(stale, IoOp::Write, 0, 512);
        assert_eq!(bench.errno(A, Write, write.as_bytes(), 512), Errno::ENOTCONN.raw());
    }
}
