//! The client: what becomes of devices and their operations when a session is lost, shrinks, or comes back as another.

use std::time::Duration;

use rnbd::{
    Errno,
    block::{BlockOp, Completion},
    client::{
        OnLoss, Unmap,
        error::MapError,
        output::{DeviceKey, Output},
        state::DeviceState,
    },
    proto::{AccessMode, ClientMsg, IoOp, MsgOpenRsp},
};
use rtrs::{Direction, IoError, PathError, client::config::SessionInfo};
use zerocopy::IntoBytes;

use crate::{
    bench::{MAX_IO, MIB, RtrsOutput, Submission, session_info},
    client_bench::{Bench, RW, S, io, lost, message, open_rsp, zeroes},
};

const SECOND: Duration = Duration::from_secs(1);
const WRITE: BlockOp = BlockOp::Write { fua: false };

impl Bench {
    /// A mapped device whose operations wait.
    pub(crate) fn waiting(on_loss: OnLoss) -> (Self, DeviceKey) {
        let (mut bench, device) = Self::mapped();
        bench.client.set_on_loss(device, on_loss).unwrap();
        // It takes a buffer for the day when there are no others.
        assert!(bench.sent().is_empty());
        assert_eq!(bench.lent(), 1);
        (bench, device)
    }

    /// The session comes back: the request to open the device again.
    pub(crate) fn come_back(&mut self) -> Submission {
        self.tell(RtrsOutput::Up(S, session_info()));
        self.agree();
        self.sent_one()
    }

    /// The session is lost, and with it these requests.
    pub(crate) fn lose_all(&mut self, requests: Vec<Submission>) {
        self.lose();
        for request in requests {
            self.answer(request, Err(lost()));
        }
    }

    pub(crate) fn opened_again(&mut self, id: u32) {
        let open = self.come_back();
        self.answer_with(open, open_rsp(id).as_bytes());
    }

    fn states(&mut self) -> Vec<DeviceState> {
        let outputs = self.outputs().into_iter().map(|output| match output {
            Output::State(_, state) => state,
            other => panic!("{other:?}"),
        });
        outputs.collect()
    }

    /// How all that has ended did so, by number.
    pub(crate) fn ends(&mut self) -> Vec<(u64, Result<(), Errno>)> {
        let mut ends = Vec::new();
        for output in self.outputs() {
            match output {
                Output::Done { user, completion, .. } => {
                    self.give(completion.data);
                    ends.push((user, completion.result));
                }
                Output::State(..) | Output::Geometry(..) | Output::WritesLost { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        ends
    }
}

fn ranges(sent: &[Submission]) -> Vec<(u64, u32)> {
    let range = |s: &Submission| (io(s).sector.get() * 512, io(s).bi_size.get());
    sent.iter().map(range).collect()
}

/// A session that is being closed takes no requests, and its end is told later. What has more parts to send waits as well.
#[test]
fn what_can_not_be_sent_is_not_tried_again_at_once() {
    let (mut bench, device) = Bench::waiting(OnLoss::Queue(None));
    let user = bench.submit(device, BlockOp::Discard, 0, 8 * MIB);
    let mut refused = 0;
    while let Some(request) = bench.next() {
        bench.answer(request, Err(lost()));
        refused += 1;
        assert!(refused <= 16, "it is tried without end");
    }
    bench.wait(SECOND);
    while let Some(request) = bench.next() {
        bench.answer(request, Ok(()));
    }
    assert_eq!(bench.ends(), [(user, Ok(()))]);
}

#[test]
fn devices_come_back_each_by_itself() {
    let mut bench = Bench::up();
    let devices = [("a", 1), ("b", 2), ("c", 3)].map(|(name, id)| bench.map(name, &open_rsp(id)));
    bench.lose();
    assert_eq!(bench.states(), [DeviceState::MappedDisconnected; 3]);
    bench.tell(RtrsOutput::Up(S, session_info()));
    bench.agree();
    let mut opens = bench.sent();
    assert_eq!(opens.len(), 3);
    bench.answer(opens.remove(1), Err(IoError::Remote(1)));
    let failed = bench.map_error();
    assert_eq!(failed.errno(), Errno::EPERM);
    for (open, id) in opens.into_iter().zip([8, 9]) {
        bench.answer_with(open, open_rsp(id).as_bytes());
    }
    let states = devices.map(|device| bench.client.state(device).unwrap());
    let [up, down] = [DeviceState::Mapped, DeviceState::MappedDisconnected];
    assert_eq!(states, [up, down, up]);
    bench.outputs();
    // Only who asks has it opened again.
    bench.wait(60 * SECOND);
    assert!(bench.sent().is_empty());
    assert_eq!(
        devices.map(|device| bench.remap(device)),
        [Some(Errno::EALREADY), None, Some(Errno::EALREADY)]
    );
    assert!(matches!(message(&bench.sent_one()), ClientMsg::Open(m) if m.name() == Some(b"b")));
}

#[test]
fn remapping_and_unmapping_say_why_not() {
    let mut bench = Bench::up();
    let device = bench.client.map(S, "disk", RW);
    assert_eq!(bench.remap(device), Some(Errno::EBUSY), "it has not been opened yet");
    assert_eq!(bench.client.resize(device, 1), Err(Errno::ENOENT));
    let open = bench.sent_one();
    bench.answer_with(open, open_rsp(7).as_bytes());
    bench.outputs();
    let in_use = Unmap::Normal { in_use: true };
    assert_eq!(bench.client.unmap(device, in_use), Err(Errno::EBUSY));
    assert_eq!(bench.client.state(device), Some(DeviceState::Mapped));
    assert_eq!(bench.unmap(device), None);
    assert_eq!(bench.client.unmap(device, Unmap::Force), Err(Errno::EALREADY));
    assert_eq!(bench.remap(device), Some(Errno::ENODEV), "it is unmapped");
    assert_eq!(bench.client.resize(device, 1), Err(Errno::ENOENT));
    let close = bench.sent_one();
    bench.answer(close, Ok(()));
    bench.outputs();
    assert_eq!(
        (bench.remap(device), bench.unmap(device)),
        (Some(Errno::ENODEV), Some(Errno::ENODEV))
    );
    assert_eq!(
        bench.client.set_on_loss(device, OnLoss::Queue(None)),
        Err(Errno::ENODEV)
    );
}

#[test]
fn a_size_that_is_set_holds_until_the_device_is_opened_again() {
    let (mut bench, device) = Bench::mapped();
    for (sectors, inside, outside) in [(1000, 1000 * 512 - 512, 1000 * 512), (40_000, 20_479_488, 20_480_000)] {
        bench.client.resize(device, sectors).unwrap();
        assert!(matches!(bench.output(), Output::Geometry(key, g) if key == device && g.size == sectors * 512));
        assert_eq!(bench.refused(device, BlockOp::Read, outside, 512), Errno::EIO);
        assert_eq!(bench.refused(device, BlockOp::Read, inside, 1024), Errno::EIO);
        let user = bench.submit(device, BlockOp::Read, inside, 512);
        let read = bench.sent_one();
        bench.answer(read, Ok(()));
        bench.done(user).unwrap();
    }
    bench.client.resize(device, 40_000).unwrap();
    assert!(bench.outputs().is_empty(), "it is so already");
    assert_eq!(bench.client.resize(device, u64::MAX), Err(Errno::EINVAL));
    bench.lose();
    assert_eq!(bench.client.resize(device, 1), Err(Errno::ENOENT), "it is not mapped");
    bench.outputs();
    bench.opened_again(8);
    let outputs = bench.outputs();
    assert!(
        matches!(&outputs[..], [Output::Geometry(_, g), Output::State(_, DeviceState::Mapped)] if g.size == 8 * MIB),
        "{outputs:?}"
    );
    bench.client.resize(device, 0).unwrap();
    bench.outputs();
    assert_eq!(bench.refused(device, BlockOp::Read, 0, 512), Errno::EIO);
}

#[test]
fn each_mode_is_asked_for_and_only_ro_refuses_writes() {
    let mut bench = Bench::up();
    let modes = [AccessMode::ReadOnly, AccessMode::ReadWrite, AccessMode::Migration];
    for (n, mode) in modes.into_iter().enumerate() {
        let device = bench.client.map(S, &format!("disk{n}"), mode);
        let open = bench.sent_one();
        assert!(matches!(message(&open), ClientMsg::Open(m) if m.access_mode == mode as u8));
        bench.answer_with(open, open_rsp(n as u32).as_bytes());
        bench.outputs();
        let writes = [WRITE, zeroes(false), BlockOp::Discard];
        for op in writes {
            let user = bench.submit(device, op, 0, 512);
            if mode == AccessMode::ReadOnly {
                assert_eq!(bench.done(user), Err(Errno::EROFS), "{op:?}");
            } else {
                let sent = bench.sent_one();
                bench.answer(sent, Ok(()));
                assert_eq!(bench.done(user), Ok(()));
            }
        }
        // Also after it came back.
        bench.lose();
        bench.outputs();
        bench.tell(RtrsOutput::Up(S, session_info()));
        bench.agree();
        let opens = bench.sent();
        for (open, id) in opens.into_iter().zip(9..) {
            bench.answer_with(open, open_rsp(id).as_bytes());
        }
        bench.outputs();
        assert_eq!(
            bench.client.geometry(device).unwrap().read_only,
            mode == AccessMode::ReadOnly
        );
    }
}

#[test]
fn force_ends_what_is_under_way_without_touching_what_is_in_flight() {
    let mut bench = Bench::up();
    let mut rsp = open_rsp(7);
    rsp.max_discard_sectors.set(8);
    let device = bench.map("disk", &rsp);
    let long = bench.submit(device, BlockOp::Discard, 0, MIB);
    let read = bench.submit(device, BlockOp::Read, 0, 4096);
    let mut in_flight = bench.sent();
    assert_eq!(in_flight.len(), 17);
    let unsent = bench.submit(device, WRITE, 0, 4096);
    bench.client.unmap(device, Unmap::Force).unwrap();
    assert!(bench.sent().is_empty());
    assert_eq!(bench.ends(), [(unsent, Err(Errno::ESHUTDOWN))]);
    // The server answers, or the path goes: only then the buffer is free.
    let at = in_flight
        .iter()
        .position(|s| io(s).rw.get() & 0xff == IoOp::Read as u32);
    let answer = in_flight.remove(at.unwrap());
    bench.answer(answer, Ok(()));
    assert_eq!(bench.ends(), [(read, Ok(()))]);
    for part in in_flight {
        assert!(bench.outputs().is_empty());
        bench.answer(part, Ok(()));
        let goes_on = bench.sent();
        let only_close = goes_on.iter().all(|s| matches!(message(s), ClientMsg::Close(_)));
        assert!(only_close, "{goes_on:?}");
        for close in goes_on {
            bench.answer(close, Ok(()));
        }
    }
    let outputs = bench.outputs();
    assert!(
        matches!(&outputs[..], [Output::Done { user, completion: Completion { result: Err(Errno::ESHUTDOWN), .. }, .. }, Output::Unmapped(key, Ok(()))]
            if *user == long && *key == device),
        "{outputs:?}"
    );
    assert_eq!(bench.lent(), 0);
}

#[test]
fn more_than_a_session_can_move_at_a_time_goes_in_parts() {
    let (mut bench, device) = Bench::mapped();
    let len = u64::from(MAX_IO);
    let (write, read) = (
        bench.submit(device, WRITE, 0, len),
        bench.submit(device, BlockOp::Read, 4096, len),
    );
    // The session says so when it is asked for more than it can: nothing is lost.
    let whole = bench.sent();
    assert_eq!(ranges(&whole), [(0, MAX_IO), (4096, MAX_IO)]);
    let max = 50_000;
    for request in whole {
        let len = request.data.as_ref().unwrap().len();
        bench.answer(request, Err(IoError::TooLong { what: "data", len, max }));
    }
    assert!(matches!(bench.output(), Output::Geometry(_, g) if g.max_transfer == 49152));
    let mut seen = Vec::new();
    loop {
        let parts = bench.sent();
        if parts.is_empty() {
            break;
        }
        assert!(parts.len() <= 2, "one buffer, one part");
        for part in parts {
            assert!(io(&part).bi_size.get() as usize <= max);
            assert_eq!(part.data.as_ref().unwrap().len(), io(&part).bi_size.get() as usize);
            seen.push((
                part.direction == Direction::Write,
                ranges(std::slice::from_ref(&part))[0],
            ));
            bench.answer(part, Ok(()));
        }
    }
    for (is_write, from) in [(true, 0), (false, 4096)] {
        let mut of: Vec<_> = seen
            .iter()
            .filter(|(w, _)| *w == is_write)
            .map(|(_, range)| *range)
            .collect();
        of.sort_unstable();
        let mut covered = from;
        for (at, bytes) in of {
            assert_eq!(at, covered);
            covered += u64::from(bytes);
        }
        assert_eq!(covered, from + len);
    }
    let mut ends = bench.ends();
    ends.sort_unstable_by_key(|(user, _)| *user);
    assert_eq!(ends, [(write, Ok(())), (read, Ok(()))]);
    // What the user asks for from now on, too.
    let user = bench.submit(device, WRITE, 0, len);
    assert_eq!(ranges(&bench.sent()), [(0, 49152)]);
    bench.tell(RtrsOutput::Closed(S));
    assert!(bench.client.next_timeout().is_none() && user > 0);
    // One that is told beforehand.
    let (mut bench, device) = Bench::mapped();
    bench.client.session_changed(
        S,
        SessionInfo {
            max_io_size: 4096,
            queue_depth: 8,
            ..session_info()
        },
    );
    assert!(matches!(bench.output(), Output::Geometry(_, g) if (g.max_transfer, g.queue_depth) == (4096, 4)));
    bench.submit(device, BlockOp::Read, 0, 8192);
    assert_eq!(ranges(&bench.sent()), [(4096, 4096)], "the last part comes first");
    // What can't be split is an error.
    let sectors = bench.submit(device, BlockOp::Read, 0, 512);
    let read = bench.sent_one();
    bench.answer(
        read,
        Err(IoError::TooLong {
            what: "data",
            len: 512,
            max: 100,
        }),
    );
    assert!(bench.ends().contains(&(sectors, Err(Errno::EMSGSIZE))));
}

#[test]
fn operations_wait_for_their_device_and_are_sent_in_their_order() {
    let (mut bench, device) = Bench::waiting(OnLoss::Queue(None));
    let write = bench.submit(device, WRITE, 0, 4096);
    let flush = bench.submit(device, BlockOp::Flush, 0, 0);
    let in_flight = bench.sent();
    let unsent = bench.submit(device, BlockOp::Read, 8192, 4096);
    bench.lose_all(in_flight);
    let new = bench.submit(device, WRITE, 12288, 4096);
    assert!(bench.sent().is_empty());
    assert_eq!(bench.states(), [DeviceState::MappedDisconnected]);
    assert_eq!(
        (bench.client.waiting(device), bench.client.next_timeout().is_some()),
        (4, true)
    );
    bench.wait(100 * SECOND);
    assert!(bench.sent().is_empty() && bench.outputs().is_empty());

    let open = bench.come_back();
    let late = bench.submit(device, WRITE, 20480, 4096);
    assert!(bench.sent().is_empty(), "it is not open yet");
    bench.answer_with(open, open_rsp(31).as_bytes());
    assert_eq!(bench.states(), [DeviceState::Mapped]);
    let sent = bench.sent();
    assert_eq!(
        ranges(&sent),
        [(0, 4096), (0, 0), (8192, 4096), (12288, 4096), (20480, 4096)]
    );
    assert!(sent.iter().all(|s| io(s).device_id.get() == 31));
    assert_eq!(io(&sent[1]).rw.get() & 0xff, IoOp::Flush as u32);
    for request in sent {
        bench.answer(request, Ok(()));
    }
    let users = [write, flush, unsent, new, late];
    assert_eq!(bench.ends(), users.map(|user| (user, Ok(()))));
    let counters = bench.client.counters(device).unwrap();
    assert_eq!((counters.completed, counters.failed, counters.repeated), (5, 0, 2));
    assert_eq!(bench.client.waiting(device), 0);
    // Unmapped, it needs no reserve.
    bench.unmap(device);
    let close = bench.sent_one();
    bench.answer(close, Ok(()));
    assert!(bench.sent().is_empty());
    assert_eq!(bench.lent(), 0);
}

/// Each part of a long operation for itself, and a data buffer where it was.
#[test]
fn an_operation_goes_on_with_the_parts_that_were_lost() {
    let mut bench = Bench::up();
    let mut rsp = open_rsp(7);
    rsp.max_discard_sectors.set(8);
    let device = bench.map("disk", &rsp);
    bench.client.set_on_loss(device, OnLoss::Queue(None)).unwrap();
    let user = bench.submit(device, BlockOp::Discard, 0, 10 * 4096);
    let mut parts = bench.sent();
    assert_eq!(parts.len(), 10);
    let answered: Vec<_> = [7, 3, 0].into_iter().map(|at| parts.remove(at)).collect();
    for part in answered {
        bench.answer(part, Ok(()));
    }
    // Some come back only when the device is open again.
    let late = parts.split_off(4);
    bench.lose_all(parts);
    rsp.device_id.set(8);
    let open = bench.come_back();
    bench.answer_with(open, rsp.as_bytes());
    for part in late {
        assert!(bench.sent().is_empty(), "what it is to wait for is not there");
        bench.answer(part, Err(lost()));
    }
    let mut again = bench.sent();
    again.sort_unstable_by_key(|s| io(s).sector.get());
    let missing = [1u64, 2, 4, 5, 6, 8, 9].map(|n| (n * 4096, 4096));
    assert_eq!(ranges(&again), missing);
    for part in again {
        assert_eq!(io(&part).device_id.get(), 8);
        bench.answer(part, Ok(()));
    }
    assert_eq!(bench.ends(), [(user, Ok(()))]);
}

#[test]
fn what_waits_is_looked_at_anew() {
    let (mut bench, device) = Bench::waiting(OnLoss::Queue(None));
    let beyond = bench.submit(device, WRITE, 7 * MIB, 4096);
    let zero = bench.submit(device, zeroes(false), 0, 8192);
    let in_flight = bench.sent();
    bench.lose_all(in_flight);
    // The server has another image, and is older.
    let mut rsp: MsgOpenRsp = open_rsp(8);
    rsp.nsectors.set(2 * MIB / 512);
    rsp.max_write_zeroes_sectors.set(0);
    let open = bench.come_back();
    bench.answer_with(open, rsp.as_bytes());
    let written = bench.sent_one();
    assert_eq!(
        (io(&written).rw.get(), io(&written).bi_size.get()),
        (IoOp::Write as u32, 8192)
    );
    assert_eq!(bench.ends(), [(beyond, Err(Errno::EIO))]);
    bench.answer(written, Ok(()));
    assert_eq!(bench.ends(), [(zero, Ok(()))]);
}

#[test]
fn a_timeout_fails_requests_until_the_device_is_back() {
    let (mut bench, device) = Bench::waiting(OnLoss::Queue(Some(5 * SECOND)));
    let write = bench.submit(device, WRITE, 0, 4096);
    let in_flight = bench.sent();
    bench.lose_all(in_flight);
    assert!(bench.sent().is_empty());
    bench.states();
    bench.wait(4 * SECOND);
    assert!(bench.outputs().is_empty());
    bench.wait(SECOND);
    assert_eq!(bench.ends(), [(write, Err(Errno::ECONNABORTED))]);
    assert_eq!(bench.refused(device, WRITE, 0, 4096), Errno::ECONNABORTED);
    bench.opened_again(9);
    bench.states();
    let user = bench.submit(device, WRITE, 0, 4096);
    let in_flight = bench.sent();
    assert_eq!(in_flight.len(), 1);
    // The next loss has all its time.
    bench.lose_all(in_flight);
    assert!(bench.sent().is_empty());
    bench.wait(4 * SECOND);
    bench.opened_again(10);
    let again = bench.sent_one();
    bench.answer(again, Ok(()));
    assert_eq!(bench.ends(), [(user, Ok(()))]);
    bench.wait(10 * SECOND);
    assert!(bench.outputs().is_empty());
}

/// The server may have just begun, or have still to close what the lost session had open.
#[test]
fn a_device_that_operations_wait_for_is_asked_for_again_and_again() {
    let (mut bench, device) = Bench::waiting(OnLoss::Queue(None));
    let write = bench.submit(device, WRITE, 0, 4096);
    let in_flight = bench.sent();
    bench.lose_all(in_flight);
    bench.states();
    let mut open = bench.come_back();
    bench.answer(open, Err(IoError::Remote(2)));
    assert!(matches!(
        bench.map_error(),
        MapError::Refused {
            errno: Errno::ENOENT,
            ..
        }
    ));
    for _ in 0..3 {
        assert!(bench.sent().is_empty());
        bench.wait(SECOND);
        open = bench.sent_one();
        bench.answer(open, Err(IoError::Remote(16)));
        assert!(bench.outputs().is_empty(), "it is known already");
    }
    assert!(bench.sent().is_empty());
    // Who asks is told.
    assert_eq!(bench.remap(device), None);
    open = bench.sent_one();
    bench.answer(open, Err(IoError::Remote(1)));
    assert_eq!(bench.map_error().errno(), Errno::EPERM);
    assert!(bench.sent().is_empty());
    bench.wait(SECOND);
    open = bench.sent_one();
    bench.answer_with(open, open_rsp(8).as_bytes());
    assert_eq!(bench.states(), [DeviceState::Mapped]);
    let again = bench.sent_one();
    bench.answer(again, Ok(()));
    assert_eq!(bench.ends(), [(write, Ok(()))]);
    // Another loss ends the attempts.
    bench.lose();
    bench.states();
    bench.wait(10 * SECOND);
    assert!(bench.sent().is_empty() && bench.outputs().is_empty());
}

#[test]
fn a_request_that_comes_too_late_for_its_device_is_sent_again() {
    for (on_loss, end) in [(OnLoss::Queue(None), None), (OnLoss::Error, Some(Errno::ENOTCONN))] {
        let (mut bench, device) = Bench::mapped();
        bench.client.set_on_loss(device, on_loss).unwrap();
        let user = bench.submit(device, WRITE, 0, 4096);
        let stale = bench.sent_one();
        bench.lose();
        bench.opened_again(8);
        // It has come by another path, with the number of before.
        bench.answer(stale, Err(IoError::Remote(107)));
        match end {
            Some(e) => assert_eq!(bench.ends(), [(user, Err(e))]),
            None => {
                let again = bench.sent_one();
                assert_eq!(io(&again).device_id.get(), 8);
                bench.answer(again, Ok(()));
                assert_eq!(bench.ends(), [(user, Ok(()))]);
            }
        }
    }
}

/// RTRS has nowhere to send a request, and the session is not lost.
#[test]
fn a_request_that_is_lost_alone_is_sent_again_later() {
    let (mut bench, device) = Bench::waiting(OnLoss::Queue(Some(SECOND)));
    let user = bench.submit(device, BlockOp::Flush, 0, 0);
    for _ in 0..5 {
        let flush = bench.sent_one();
        bench.answer(flush, Err(lost()));
        assert!(bench.sent().is_empty() && bench.outputs().is_empty());
        bench.wait(SECOND);
    }
    let flush = bench.sent_one();
    bench.answer(flush, Ok(()));
    assert_eq!(bench.ends(), [(user, Ok(()))]);
    bench.wait(10 * SECOND);
    assert_eq!(bench.client.next_timeout(), None);
}

#[test]
fn a_device_is_opened_again_though_operations_have_all_buffers() {
    let mut bench = Bench::before_the_session(256 << 10);
    bench.tell(RtrsOutput::Opened(S, session_info()));
    bench.agree();
    let device = bench.map("disk", &open_rsp(7));
    let other = bench.map("other", &open_rsp(8));
    bench.client.set_on_loss(device, OnLoss::Queue(None)).unwrap();
    assert!(bench.sent().is_empty());
    bench.lose();
    bench.states();
    let users: Vec<_> = (0..63).map(|n| bench.submit(device, WRITE, n * 4096, 4096)).collect();
    assert!(bench.sent().is_empty());
    assert_eq!(bench.lent(), 64);
    bench.tell(RtrsOutput::Up(S, session_info()));
    bench.agree();
    // One after the other, with the one buffer that is left.
    let open = bench.sent_one();
    bench.answer_with(open, open_rsp(9).as_bytes());
    let mut ended = 0;
    loop {
        let sent = bench.sent();
        if sent.is_empty() {
            break;
        }
        for request in sent {
            match message(&request) {
                ClientMsg::Open(_) => bench.answer_with(request, open_rsp(10).as_bytes()),
                _ => bench.answer(request, Ok(())),
            }
        }
        ended += bench.ends().len();
    }
    assert_eq!((ended, bench.lent()), (users.len(), 1));
    assert_eq!(bench.client.state(other), Some(DeviceState::Mapped));
    bench.client.set_on_loss(device, OnLoss::Error).unwrap();
    assert!(bench.sent().is_empty());
    assert_eq!(bench.lent(), 0);
}

#[test]
fn nothing_waits_for_what_will_not_come_back() {
    for how in 0..4 {
        let (mut bench, device) = Bench::waiting(OnLoss::Queue(None));
        let (write, flush) = (
            bench.submit(device, WRITE, 0, 4096),
            bench.submit(device, BlockOp::Flush, 0, 0),
        );
        let in_flight = bench.sent();
        bench.lose_all(in_flight);
        bench.states();
        let why = match how {
            0 => {
                assert_eq!(bench.unmap(device), None);
                Errno::ECONNABORTED
            }
            1 => {
                bench.client.unmap(device, Unmap::Force).unwrap();
                Errno::ECONNABORTED
            }
            2 => {
                bench.tell(RtrsOutput::Closed(S));
                Errno::ECONNABORTED
            }
            _ => {
                bench.client.set_on_loss(device, OnLoss::Error).unwrap();
                Errno::ECONNABORTED
            }
        };
        assert!(bench.sent().is_empty());
        let mut outputs = bench.outputs();
        if how < 3 {
            let last = outputs.pop();
            assert!(
                matches!(last, Some(Output::Unmapped(key, Err(IoError::Path(_)))) if key == device),
                "{last:?}"
            );
        }
        let ends: Vec<_> = outputs
            .into_iter()
            .map(|output| match output {
                Output::Done { user, completion, .. } => {
                    bench.give(completion.data);
                    (user, completion.result)
                }
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(ends, [(write, Err(why)), (flush, Err(why))], "{how}");
        assert!(bench.sent().is_empty());
        assert_eq!(bench.lent(), 0, "{how}");
    }
    // A device that has not been opened is not waited for.
    let mut bench = Bench::up();
    let device = bench.client.map(S, "disk", RW);
    bench.client.set_on_loss(device, OnLoss::Queue(None)).unwrap();
    let open = bench.sent_one();
    bench.lose();
    assert!(matches!(
        bench.map_error(),
        MapError::Session(rtrs::Error::Down(PathError::PeerDisconnected))
    ));
    bench.answer(open, Err(lost()));
    assert!(bench.sent().is_empty());
    assert_eq!((bench.client.state(device), bench.lent()), (None, 0));
}
