//! The client: devices that the server has closed although the session is up.

use std::time::Duration;

use rnbd::{
    Errno,
    block::{BlockOp, Completion},
    client::{
        OnLoss,
        output::{LossCause, Output},
        state::DeviceState,
    },
    proto::ClientMsg,
};
use rtrs::IoError;
use zerocopy::IntoBytes;

use crate::{
    bench::Submission,
    client_bench::{Bench, RW, S, io, message, open_rsp, open_rsp_of},
};

const SECOND: Duration = Duration::from_secs(1);
const WRITE: BlockOp = BlockOp::Write { fua: false };
/// ENOTCONN: no device of this number is open.
const CLOSED: Result<(), IoError> = Err(IoError::Remote(107));

fn names(opens: &[Submission]) -> Vec<String> {
    let name = |s: &Submission| match message(s) {
        ClientMsg::Open(m) => String::from_utf8(m.name().unwrap().to_vec()).unwrap(),
        other => panic!("{other:?}"),
    };
    opens.iter().map(name).collect()
}

impl Bench {
    /// The client agrees on a version and asks for a device again, after a second.
    fn opens(&mut self) -> Submission {
        assert!(self.sent().is_empty());
        self.wait(SECOND);
        self.agree();
        self.sent_one()
    }
}

#[test]
fn requests_wait_until_the_device_is_open_again() {
    let (mut bench, device) = Bench::waiting(OnLoss::Queue(None));
    let users = [0, 4096].map(|at| bench.submit(device, WRITE, at, 4096));
    let [first, second] = <[Submission; 2]>::try_from(bench.sent()).unwrap();
    bench.answer(first, CLOSED);
    assert!(matches!(
        bench.output(),
        Output::State(_, DeviceState::MappedDisconnected)
    ));
    let late = bench.submit(device, BlockOp::Flush, 0, 0);
    // An answer of before, which says nothing new.
    bench.answer(second, CLOSED);
    let open = bench.opens();
    // A kernel's server takes the lowest number that is free: the same.
    bench.answer_with(open, open_rsp(7).as_bytes());
    assert!(matches!(bench.output(), Output::State(_, DeviceState::Mapped)));
    let sent = bench.sent();
    assert_eq!(sent.len(), 3);
    for request in sent {
        bench.answer(request, Ok(()));
    }
    let ends = [users[0], users[1], late].map(|user| (user, Ok(())));
    assert_eq!(bench.ends(), ends);
    assert_eq!(bench.client.counters(device).unwrap().repeated, 2);
    bench.wait(10 * SECOND);
    assert!(bench.sent().is_empty() && bench.client.next_timeout().is_none());
}

/// As with the kernel's client.
#[test]
fn without_waiting_requests_fail_and_the_device_stays_as_it_is() {
    let (mut bench, device) = Bench::mapped();
    for _ in 0..2 {
        let user = bench.submit(device, WRITE, 0, 4096);
        let write = bench.sent_one();
        bench.answer(write, CLOSED);
        assert_eq!(bench.done(user), Err(Errno::ENOTCONN));
        bench.wait(10 * SECOND);
        assert!(bench.sent().is_empty() && bench.outputs().is_empty());
    }
    assert_eq!(bench.remap(device), Some(Errno::EALREADY));
}

#[test]
fn a_server_that_never_has_the_device_open_is_asked_once_a_second() {
    let (mut bench, device) = Bench::waiting(OnLoss::Queue(None));
    let user = bench.submit(device, WRITE, 0, 4096);
    for _ in 0..5 {
        let write = bench.sent_one();
        bench.answer(write, CLOSED);
        let open = bench.opens();
        bench.answer_with(open, open_rsp(7).as_bytes());
    }
    // It is refused now, and asked for again all the same.
    let write = bench.sent_one();
    bench.answer(write, CLOSED);
    let open = bench.opens();
    bench.answer(open, Err(IoError::Remote(2)));
    assert!(bench.sent().is_empty());
    bench.wait(SECOND);
    let open = bench.sent_one();
    bench.outputs();
    bench.answer_with(open, open_rsp(8).as_bytes());
    let write = bench.sent_one();
    assert_eq!(io(&write).device_id.get(), 8);
    bench.answer(write, Ok(()));
    assert_eq!(bench.ends(), [(user, Ok(()))]);
}

/// With numbers that a kernel's server gives again, a request that is late would reach another device.
#[test]
fn no_device_is_opened_while_a_request_of_before_is_in_flight() {
    let mut bench = Bench::up();
    let devices = [("a", 0), ("b", 1)].map(|(name, id)| bench.map(name, &open_rsp(id)));
    for device in devices {
        bench.client.set_on_loss(device, OnLoss::Queue(None)).unwrap();
    }
    let slow = bench.submit(devices[0], WRITE, 0, 4096);
    let refused = bench.submit(devices[1], WRITE, 0, 4096);
    let [to_a, to_b] = <[Submission; 2]>::try_from(bench.sent()).unwrap();
    bench.answer(to_b, CLOSED);
    let more = devices.map(|device| bench.submit(device, BlockOp::Flush, 0, 0));
    // Nor is a third one mapped, or either by hand.
    let third = bench.client.map(S, "c", RW);
    assert_eq!(bench.remap(devices[1]), None);
    bench.wait(10 * SECOND);
    assert!(bench.sent().is_empty());
    bench.answer(to_a, CLOSED);
    assert!(bench.sent().is_empty());
    bench.wait(SECOND);
    bench.agree();
    let opens = bench.sent();
    assert_eq!(names(&opens), ["a", "b", "c"]);
    bench.outputs();
    for (open, id) in opens.into_iter().zip([1, 0, 2]) {
        bench.answer_with(open, open_rsp(id).as_bytes());
    }
    assert_eq!(bench.client.state(third), Some(DeviceState::Mapped));
    bench.outputs();
    for request in bench.sent() {
        let is_of_a = io(&request).device_id.get() == 1;
        assert!(is_of_a || io(&request).device_id.get() == 0);
        bench.answer(request, Ok(()));
    }
    let mut ends = bench.ends();
    ends.sort_unstable_by_key(|(user, _)| *user);
    assert_eq!(ends, [slow, refused, more[0], more[1]].map(|user| (user, Ok(()))));
}

/// Its requests would succeed, on another device.
#[test]
fn a_device_whose_number_is_given_to_another_is_opened_again() {
    let mut bench = Bench::up();
    let idle = bench.map("a", &open_rsp(0));
    let device = bench.client.map(S, "b", RW);
    let open = bench.sent_one();
    bench.answer_with(open, open_rsp(0).as_bytes());
    bench.outputs();
    assert_eq!(bench.refused(idle, BlockOp::Flush, 0, 0), Errno::ECONNABORTED);
    assert!(bench.sent().is_empty());
    bench.wait(SECOND);
    bench.agree();
    let opens = bench.sent();
    assert_eq!(names(&opens), ["a", "b"]);
    for (open, id) in opens.into_iter().zip([1, 0]) {
        bench.answer_with(open, open_rsp(id).as_bytes());
    }
    for (device, id) in [(idle, 1), (device, 0)] {
        bench.submit(device, BlockOp::Flush, 0, 0);
        assert_eq!(io(&bench.sent_one()).device_id.get(), id);
    }
    bench.wait(10 * SECOND);
    assert!(bench.sent().is_empty());
}

#[test]
fn a_device_that_was_closed_can_be_unmapped_meanwhile() {
    let (mut bench, device) = Bench::waiting(OnLoss::Queue(None));
    let user = bench.submit(device, WRITE, 0, 4096);
    let write = bench.sent_one();
    bench.answer(write, CLOSED);
    bench.outputs();
    assert_eq!(bench.unmap(device), None);
    let outputs = bench.outputs();
    let [
        Output::Done {
            user: u,
            completion: Completion {
                result: Err(Errno::ESHUTDOWN),
                ..
            },
            ..
        },
        Output::Unmapped(key, Ok(())),
    ] = &outputs[..]
    else {
        panic!("{outputs:?}")
    };
    assert_eq!((*u, *key), (user, device));
    assert!(bench.sent().is_empty());
    bench.wait(10 * SECOND);
    // The version is agreed on for the next device.
    bench.agree();
    assert!(bench.sent().is_empty());
    bench.map("disk", &open_rsp(7));
}

#[test]
fn a_loss_of_the_session_meanwhile_is_an_ordinary_one() {
    let (mut bench, device) = Bench::waiting(OnLoss::Queue(None));
    let users = [0, 4096].map(|at| bench.submit(device, WRITE, at, 4096));
    let mut sent = bench.sent();
    bench.answer(sent.remove(0), CLOSED);
    bench.lose_all(sent);
    bench.wait(10 * SECOND);
    assert!(bench.sent().is_empty(), "there is no path");
    bench.opened_again(7);
    for request in bench.sent() {
        bench.answer(request, Ok(()));
    }
    assert_eq!(bench.ends(), users.map(|user| (user, Ok(()))));
}

/// The server's machine may have restarted.
#[test]
fn what_it_may_have_lost_is_told() {
    let mut bench = Bench::up();
    let device = bench.map("disk", &open_rsp(7));
    bench.client.set_on_loss(device, OnLoss::Queue(None)).unwrap();
    bench.submit(device, WRITE, 0, 4096);
    let write = bench.sent_one();
    bench.answer(write, Ok(()));
    assert_eq!(bench.ends().len(), 1);
    let flush = bench.submit(device, BlockOp::Flush, 0, 0);
    let sent = bench.sent_one();
    bench.answer(sent, CLOSED);
    bench.outputs();
    let open = bench.opens();
    bench.answer_with(open, open_rsp(7).as_bytes());
    let told = bench.outputs().into_iter().any(|output| {
        matches!(
            output,
            Output::WritesLost {
                writes: 1,
                cause: LossCause::Unknown,
                ..
            }
        )
    });
    assert!(told);
    let sent = bench.sent_one();
    bench.answer(sent, Ok(()));
    assert_eq!(bench.ends(), [(flush, Err(Errno::EIO))]);
}

/// A server that names its instance closes a device of a session that is up by an operator's order only.
#[test]
fn the_order_to_close_counts_where_the_server_names_its_instance() {
    let mut bench = Bench::up();
    let device = bench.map("disk", &open_rsp_of(7, "1"));
    bench.client.set_on_loss(device, OnLoss::Queue(None)).unwrap();
    let write = bench.submit(device, WRITE, 0, 4096);
    let sent = bench.sent_one();
    bench.answer(sent, CLOSED);
    assert_eq!(bench.ends(), [(write, Err(Errno::ENOTCONN))]);
    assert!(bench.sent().is_empty());
}
