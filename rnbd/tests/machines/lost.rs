//! Acknowledged writes that the server loses: who is told, how often, and that nobody else is.

use rnbd::{
    Errno,
    block::BlockOp,
    client::{
        OnLoss, Opener,
        output::{DeviceKey, LossCause, Output},
    },
    proto::{CACHE_FUA, MsgOpenRsp, instance::Instance},
    server::Limits,
};
use zerocopy::IntoBytes;

use crate::served::Action;
use crate::{
    bench::{MIB, Submission, geometry},
    client_bench::{Bench, RW, open_rsp, open_rsp_of, zeroes},
    server::{A, Bench as Server, response},
};

const WRITE: BlockOp = BlockOp::Write { fua: false };
const FORCED: BlockOp = BlockOp::Write { fua: true };
const FLUSH: BlockOp = BlockOp::Flush;

/// Before the machine of the server restarts, and after.
const BOOTS: [&str; 2] = ["1", "2"];

impl Bench {
    fn mapped_of(rsp: &MsgOpenRsp, on_loss: OnLoss) -> (Self, DeviceKey) {
        let mut bench = Self::up();
        let device = bench.map("disk", rsp);
        bench.client.set_on_loss(device, on_loss).unwrap();
        assert!(bench.sent().is_empty());
        (bench, device)
    }

    /// An operation that the server does.
    fn does(&mut self, device: DeviceKey, op: BlockOp) -> Result<(), Errno> {
        let user = self.submit(device, op, 0, if op == FLUSH { 0 } else { 4096 });
        self.answered(user)
    }

    fn does_by(&mut self, opener: &Opener, op: BlockOp) -> Result<(), Errno> {
        let len = if op == FLUSH { 0 } else { 4096 };
        let data = op.has_data().then(|| self.buffer(len));
        let user = self.submit_by(opener, op, 0, len as u64, data);
        self.answered(user)
    }

    fn answered(&mut self, user: u64) -> Result<(), Errno> {
        let request = self.sent_one();
        self.answer(request, Ok(()));
        self.done(user)
    }

    /// The session is lost with these requests, and a server opens the device again. Returns what is told to be lost.
    fn reopened(&mut self, requests: Vec<Submission>, rsp: &MsgOpenRsp) -> Vec<(u64, LossCause)> {
        self.lose_all(requests);
        let open = self.come_back();
        self.answer_with(open, rsp.as_bytes());
        self.losses()
    }

    fn losses(&mut self) -> Vec<(u64, LossCause)> {
        let told = self.outputs().into_iter().filter_map(|output| match output {
            Output::WritesLost { writes, cause, .. } => Some((writes, cause)),
            Output::State(..) => None,
            other => panic!("{other:?}"),
        });
        told.collect()
    }
}

/// Whether a flush fails after these operations, another loss of the session and a flush.
fn fails_after(operations: &[BlockOp], boot: &str) -> bool {
    let (mut bench, device) = Bench::mapped_of(&open_rsp_of(7, "1"), OnLoss::Queue(None));
    for op in operations {
        assert_eq!(bench.does(device, *op), Ok(()));
    }
    let told = bench.reopened(Vec::new(), &open_rsp_of(9, boot));
    let result = bench.does(device, FLUSH);
    assert_eq!(told.is_empty(), result.is_ok(), "told: {told:?}");
    result.is_err()
}

#[test]
fn a_flush_fails_once_over_writes_that_are_lost() {
    for on_loss in [OnLoss::Error, OnLoss::Queue(None)] {
        let (mut bench, device) = Bench::mapped_of(&open_rsp_of(7, "1"), on_loss);
        assert_eq!((bench.does(device, WRITE), bench.does(device, WRITE)), (Ok(()), Ok(())));
        let told = bench.reopened(Vec::new(), &open_rsp_of(9, "2"));
        assert_eq!(told, [(2, LossCause::AnotherInstance)], "{on_loss:?}");
        assert_eq!(bench.client.counters(device).unwrap().lost, 2);
        assert_eq!(bench.does(device, BlockOp::Read), Ok(()));
        assert_eq!(bench.does(device, FORCED), Err(Errno::EIO));
        assert_eq!(bench.does(device, FORCED), Ok(()));
        assert_eq!(bench.does(device, zeroes(true)), Ok(()));
        assert_eq!(bench.does(device, FLUSH), Err(Errno::EIO));
        assert_eq!(
            (bench.does(device, FLUSH), bench.does(device, FORCED)),
            (Ok(()), Ok(()))
        );
        // Nothing was written since.
        assert_eq!(bench.reopened(Vec::new(), &open_rsp_of(11, "3")), []);
        assert_eq!(bench.does(device, FLUSH), Ok(()));
    }
}

#[test]
fn only_what_is_neither_flushed_nor_forced_can_be_lost() {
    let may_unmap = true;
    let lost: [&[BlockOp]; 3] = [
        &[WRITE],
        &[FLUSH, WRITE],
        &[BlockOp::WriteZeroes { fua: false, may_unmap }],
    ];
    let kept: [&[BlockOp]; 5] = [
        &[],
        &[WRITE, FLUSH],
        &[FORCED, zeroes(true)],
        &[BlockOp::Read],
        &[BlockOp::Discard],
    ];
    for operations in lost {
        assert!(fails_after(operations, "2"), "{operations:?}");
    }
    for operations in kept {
        assert!(!fails_after(operations, "2"), "{operations:?}");
    }
    for operations in lost.iter().chain(&kept) {
        assert!(
            !fails_after(operations, "1"),
            "a server process may restart: {operations:?}"
        );
    }
}

/// A flush that fails at the server covers nothing, and one that is under way covers what was acknowledged when it was sent.
#[test]
fn a_flush_covers_what_was_acknowledged_before() {
    let (mut bench, device) = Bench::mapped_of(&open_rsp_of(7, "1"), OnLoss::Queue(None));
    bench.does(device, WRITE).unwrap();
    let failing = bench.submit(device, FLUSH, 0, 0);
    let request = bench.sent_one();
    bench.answer(request, Err(rtrs::IoError::Remote(-5)));
    assert_eq!(bench.done(failing), Err(Errno::EIO));
    let flush = bench.submit(device, FLUSH, 0, 0);
    let request = bench.sent_one();
    bench.does(device, WRITE).unwrap();
    bench.does(device, WRITE).unwrap();
    bench.answer(request, Ok(()));
    assert_eq!(bench.done(flush), Ok(()));
    let told = bench.reopened(Vec::new(), &open_rsp_of(9, "2"));
    assert_eq!(told, [(2, LossCause::AnotherInstance)]);
}

/// A write that was never acknowledged is sent again, and so is not lost; a flush under way covers lost ones.
#[test]
fn what_was_under_way_is_not_lost() {
    for written in [false, true] {
        let (mut bench, device) = Bench::mapped_of(&open_rsp_of(7, "1"), OnLoss::Queue(None));
        if written {
            bench.does(device, WRITE).unwrap();
        }
        let users = [WRITE, FLUSH, FORCED].map(|op| bench.submit(device, op, 0, if op == FLUSH { 0 } else { 512 }));
        let requests = bench.sent();
        let told = bench.reopened(requests, &open_rsp_of(9, "2"));
        assert_eq!(told.len(), usize::from(written));
        for request in bench.sent() {
            bench.answer(request, Ok(()));
        }
        let durable = if written { Err(Errno::EIO) } else { Ok(()) };
        assert_eq!(
            bench.ends(),
            [(users[0], Ok(())), (users[1], durable), (users[2], durable)]
        );
        assert_eq!(
            bench.does(device, FLUSH),
            Ok(()),
            "it has been told, or there was nothing"
        );
    }
}

/// The client's own buffer has only the rest of a long write.
#[test]
fn a_write_fails_that_has_lost_a_part() {
    for (boot, end) in BOOTS.into_iter().zip([Ok(()), Err(Errno::EIO)]) {
        let (mut bench, device) = Bench::mapped_of(&open_rsp_of(7, "1"), OnLoss::Queue(None));
        let most = bench.client.geometry(device).unwrap().max_transfer;
        let user = bench.submit(device, WRITE, 0, u64::from(most));
        let request = bench.sent_one();
        let data = request.data.as_ref().unwrap().len();
        let too_long = rtrs::IoError::TooLong {
            what: "data",
            len: data,
            max: data / 2,
        };
        bench.answer(request, Err(too_long));
        assert!(
            bench
                .outputs()
                .iter()
                .all(|output| matches!(output, Output::Geometry(..)))
        );
        let half = bench.sent_one();
        bench.answer(half, Ok(()));
        let rest = bench.sent();
        bench.lose_all(rest);
        let open = bench.come_back();
        bench.answer_with(open, open_rsp_of(9, boot).as_bytes());
        while let Some(request) = bench.next() {
            bench.answer(request, Ok(()));
        }
        let ended = bench.outputs().into_iter().find_map(|output| match output {
            Output::Done {
                user: of, completion, ..
            } => Some((of, completion.result)),
            _ => None,
        });
        assert_eq!(ended, Some((user, end)));
    }
}

#[test]
fn each_user_of_a_device_is_told() {
    let (mut bench, device) = Bench::mapped_of(&open_rsp_of(7, "1"), OnLoss::Queue(None));
    let [writer, reader] = [0, 1].map(|_| bench.client.opener(device));
    bench.does_by(&writer, WRITE).unwrap();
    bench.reopened(Vec::new(), &open_rsp_of(9, "2"));
    let early = bench.client.opener(device);
    // It may have relied on the flush of another.
    for opener in [&reader, &writer, &early] {
        assert_eq!(bench.does_by(opener, FLUSH), Err(Errno::EIO));
        assert_eq!(bench.does_by(opener, FLUSH), Ok(()));
    }
    let late = bench.client.opener(device);
    assert_eq!(bench.does_by(&late, FLUSH), Ok(()));
}

/// A kernel's server, and an older one of ours, name no instance. A device without a volatile cache has nothing to lose.
#[test]
fn of_a_server_that_says_nothing_unflushed_writes_count_as_lost() {
    let (mut bench, device) = Bench::mapped_of(&open_rsp(7), OnLoss::Queue(None));
    bench.does(device, WRITE).unwrap();
    assert_eq!(bench.reopened(Vec::new(), &open_rsp(9)), [(1, LossCause::Unknown)]);
    assert_eq!(
        (bench.does(device, FLUSH), bench.does(device, FLUSH)),
        (Err(Errno::EIO), Ok(()))
    );
    // Another server in its place.
    bench.does(device, WRITE).unwrap();
    assert_eq!(
        bench.reopened(Vec::new(), &open_rsp_of(11, "1")),
        [(1, LossCause::Unknown)]
    );
    let mut durable = open_rsp(7);
    durable.cache_policy = CACHE_FUA;
    let (mut bench, device) = Bench::mapped_of(&durable, OnLoss::Queue(None));
    bench.does(device, WRITE).unwrap();
    assert_eq!(bench.reopened(Vec::new(), &durable), []);
    assert_eq!(bench.does(device, FLUSH), Ok(()));
}

#[test]
fn a_device_that_is_mapped_anew_has_lost_nothing() {
    let (mut bench, device) = Bench::mapped_of(&open_rsp_of(7, "1"), OnLoss::Queue(None));
    bench.does(device, WRITE).unwrap();
    assert_eq!(bench.unmap(device), None);
    let close = bench.sent_one();
    bench.answer(close, Ok(()));
    assert!(matches!(bench.output(), Output::Unmapped(_, Ok(()))));
    let device = bench.map("disk", &open_rsp_of(9, "2"));
    assert_eq!(bench.does(device, FLUSH), Ok(()));
}

#[test]
fn a_server_says_where_it_keeps_what_is_not_flushed() {
    let mut bench = Server::new(Limits::default());
    for (name, opened) in [("one", false), ("two", false), ("one", true)] {
        let key = bench.ask_open(A, name, RW);
        if !opened {
            let Action::Open { ticket, .. } = bench.action() else {
                panic!("it is not opened")
            };
            bench.opened(ticket, geometry(8 * MIB), name);
        }
        let answer = response(&bench.action(), key);
        assert_eq!(answer.instance(), Some(Instance::of([name.as_bytes()])));
    }
}
